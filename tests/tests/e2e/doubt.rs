//! Shows that missing or false information uninstalls nothing. Each release stays installed while an API server returns
//! false responses, and while state disappears and returns. A real deletion proceeds once it is confirmed.

use std::{collections::BTreeMap, fs};

use anyhow::{Context as _, Result, bail, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Secret};
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    AgentOptions, Answer, AnsweringProxy, Cluster, Hub, HubOptions, Lie, Membership, Merge as _,
    Mode, Parts, ServedChart, TestResult, answering_proxy::Verb, by_agent, eventually,
    fleet::FleetClient, home_and_edge,
};
use krypton_types::names;
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::json;

const EDGE: &str = "edge-1";
/// Tenants that the test never deletes. Each has a namespace of its name.
const KEPT: [&str; 3] = ["one", "two", "three"];
/// Workspace of the Tenants that the test deletes, so the namespace outlives them.
const SHARED: &str = "theirs";

by_agent!(restored_etcd_or_unseen_tenant_keeps_releases);

/// Returns true if a later revision of the same release exists. Helm keeps several revisions after upgrades. After an
/// uninstall, the numbers would restart at 1.
fn upgraded(name: &str, now: &BTreeMap<String, String>) -> bool {
    let revision = |name: &str| {
        let (release, number) = name.rsplit_once(".v")?;
        Some((release.to_owned(), number.parse::<u32>().ok()?))
    };
    revision(name).is_some_and(|(release, number)| {
        let mut others = now.keys().filter_map(|name| revision(name));
        others.any(|(other, later)| other == release && later > number)
    })
}

/// A fleet of one member. The actor reaches it through a proxy.
struct Scene {
    membership: Membership,
    hub: Hub,
    proxy: AnsweringProxy,
    fleet_client: FleetClient,
    at_home: FleetClient,
    chart: ServedChart,
    written: u32,
    _home: Cluster,
    edge: Cluster,
}

impl Scene {
    async fn set(name: &str, mode: Mode, going: &[String]) -> TestResult<Self> {
        let chart = ServedChart::small("{replicaCount: 0, message: v0}").await?;
        let (home, edge) = home_and_edge(name, Parts::ControlPlane).await?;
        let proxy = AnsweringProxy::before(&edge).await?;
        let flags = chart.flags(&["--self-cluster=false"]);
        let options = HubOptions::new(home.kubeconfig()).args(flags);
        let mut hub = Hub::start(&options)?;
        let file = proxy.kubeconfig();
        let through = fs::read_to_string(&file)?;
        let by = (through.as_str(), AgentOptions::new(&file));
        let membership = Membership::join_by(mode, &mut hub, &home, by, EDGE).await?;
        let scene = Self {
            membership,
            hub,
            proxy,
            fleet_client: FleetClient::at(&edge),
            at_home: FleetClient::at(&home),
            chart,
            written: 0,
            _home: home,
            edge,
        };
        let fleet_client = &scene.fleet_client;
        scene.edge.kubectl(["create", "namespace", SHARED]).await?;
        try_join_all(KEPT.map(|name| fleet_client.create(name, json!({})))).await?;
        let shared = json!({"workspace": SHARED});
        let made = going
            .iter()
            .map(|name| fleet_client.create(name, shared.clone()));
        try_join_all(made).await?;
        let all = KEPT.into_iter().chain(going.iter().map(String::as_str));
        for name in all {
            fleet_client.ready(name).await?;
        }
        Ok(scene)
    }

    /// Changes the values, so all Tenants need an upgrade.
    fn change_values(&mut self) -> Result<u32> {
        self.written += 1;
        let yaml = format!("{{replicaCount: 0, message: v{}}}", self.written);
        self.chart.write(&yaml)?;
        Ok(self.written)
    }

    fn release(name: &str) -> String {
        names::tenant_release(name, EDGE)
    }

    /// Returns the UIDs of the deployed release Secrets and of the Deployments.
    async fn standing(&self) -> Result<BTreeMap<String, String>> {
        self.found("owner=helm,status=deployed").await
    }

    async fn found(&self, releases: &str) -> Result<BTreeMap<String, String>> {
        let mut found = BTreeMap::new();
        let params = ListParams::default();
        let secrets: Api<Secret> = Api::all(self.fleet_client.client.clone());
        let deployments: Api<Deployment> = Api::all(self.fleet_client.client.clone());
        for secret in secrets
            .list_metadata(&params.clone().labels(releases))
            .await?
        {
            found.insert(secret.name_any(), secret.uid().unwrap_or_default());
        }
        for deployment in deployments.list_metadata(&params).await? {
            let name = format!("Deployment {}", deployment.name_any());
            found.insert(name, deployment.uid().unwrap_or_default());
        }
        Ok(found)
    }

    /// Verifies that all objects in `before` still exist, except the objects of `gone`. Each release must be deployed
    /// once.
    async fn stands(&self, before: &BTreeMap<String, String>, gone: &[&str]) -> Result<()> {
        let now = self.found("owner=helm").await?;
        let gone: Vec<String> = gone.iter().map(|name| Self::release(name)).collect();
        for (name, uid) in before {
            if !gone.iter().any(|release| name.contains(release.as_str())) {
                let stands = now.get(name) == Some(uid) || upgraded(name, &now);
                ensure!(stands, "{name} was {uid}: {now:?}");
            }
        }
        for release in &gone {
            let left: Vec<_> = now.keys().filter(|name| name.contains(release)).collect();
            ensure!(left.is_empty(), "remaining: {left:?}");
        }
        for name in KEPT {
            let revisions = self
                .fleet_client
                .revisions(name, &Self::release(name))
                .await?;
            let deployed = revisions.iter().filter(|(_, status)| status == "deployed");
            ensure!(deployed.count() == 1, "{name}: {revisions:?}");
        }
        Ok(())
    }

    async fn kept_are_ready(&self, values: Option<u32>) {
        for name in KEPT {
            if let Some(number) = values {
                self.values_reach(name, name, number).await;
            }
            self.fleet_client.ready(name).await.unwrap();
        }
    }

    /// Waits, because Helm can still be running.
    async fn values_reach(&self, name: &str, namespace: &str, number: u32) {
        let wanted = format!("v{number}");
        let what = format!("the values {wanted} to reach {name}");
        let (release, namespace) = (Self::release(name), format!("--namespace={namespace}"));
        eventually(&what, async || {
            let message = "--output=jsonpath={.data.message}";
            let args = ["get", "configmap", &release, &namespace, message];
            match self.edge.kubectl(args).await? {
                found if found == wanted => Ok(Some(())),
                found => bail!("found {found:?}"),
            }
        })
        .await
        .unwrap();
    }

    async fn lies_at_least(&mut self, at_least: u64) {
        let proxy = &self.proxy;
        eventually("the false response to be sent", async || {
            match proxy.lied() {
                lied if lied >= at_least => Ok(Some(())),
                lied => bail!("{lied} times; passed: {:?}", proxy.passed()),
            }
        })
        .await
        .unwrap();
        let actor = self.membership.actor(&mut self.hub);
        assert!(!actor.log().unwrap().contains("panicked"));
    }
}

async fn restored_etcd_or_unseen_tenant_keeps_releases(mode: Mode) -> TestResult {
    let going = ["before".to_owned()];
    let mut scene = Box::pin(Scene::set("away", mode, &going)).await?;
    etcd_is_restored(&mut scene).await?;
    namespace_of_unobserved_tenants_is_kept(&mut scene).await
}

/// Restores etcd to a state before some Tenants were created and others deleted. The resourceVersions decrease.
async fn etcd_is_restored(scene: &mut Scene) -> TestResult {
    let fleet_client = scene.fleet_client.clone();
    let before = scene.standing().await?;
    let release = Scene::release("before");
    // If the snapshot contained a running upgrade, the repair would add a revision.
    scene.values_reach("before", SHARED, scene.written).await;
    let number = eventually("no upgrade to be running", async || {
        let revisions = fleet_client.revisions(SHARED, &release).await?;
        match revisions.last() {
            Some((number, status)) if status == "deployed" => Ok(Some(*number)),
            _ => bail!("{revisions:?}"),
        }
    })
    .await?;
    let snapshot = scene.edge.snapshot().await?;
    let shared = json!({"workspace": SHARED});
    fleet_client.create("late", shared.clone()).await?;
    fleet_client.ready("late").await?;
    fleet_client.remove("before").await?;
    scene.stands(&before, &["before"]).await?;
    // A restored API server answers 429 until the storage of the CRD is ready again.
    let version = async || {
        eventually("no list of Tenants", async || {
            let listed = fleet_client.tenants().list(&ListParams::default()).await?;
            let version = listed.metadata.resource_version.context("no version")?;
            Ok(Some(version.parse::<u64>()?))
        })
        .await
        .unwrap()
    };
    let latest = version().await;

    scene.edge.restore(&snapshot).await?;

    assert!(version().await < latest, "the resourceVersion went back");
    let log = |scene: &mut Scene| scene.membership.actor(&mut scene.hub).log().unwrap();
    let uninstalled = log(scene).matches("running helm uninstall").count();
    // A Tenant deleted after the snapshot is live again, and a Tenant created after it is absent.
    let values = scene.change_values()?;
    scene.kept_are_ready(Some(values)).await;
    fleet_client.ready("before").await?;
    fleet_client
        .newest_is(SHARED, &release, number + 1, "deployed")
        .await?;
    scene.stands(&before, &["late"]).await?;
    assert_eq!(fleet_client.tenants().get_opt("late").await?, None);
    assert_eq!(
        log(scene).matches("running helm uninstall").count(),
        uninstalled
    );
    fleet_client.create("late", shared).await?;
    fleet_client.ready("late").await?;
    for name in ["late", "before"] {
        fleet_client.remove(name).await?;
    }
    scene.stands(&before, &["late", "before"]).await?;
    Ok(())
}

/// Krypton created the namespace for a Tenant that is now deleted, and another Tenant has moved into it.
async fn namespace_of_unobserved_tenants_is_kept(scene: &mut Scene) -> TestResult {
    let fleet_client = scene.fleet_client.clone();
    let members: Api<EdgeCluster> = Api::all(scene.at_home.client.clone());
    let pause = async |paused: bool| {
        members
            .merge(EDGE, &json!({"spec": {"paused": paused}}))
            .await
            .unwrap();
    };
    fleet_client.install("host").await?;
    pause(true).await;
    fleet_client.delete("host").await?;
    let ready = format!("ClusterReady/{EDGE}");
    let waits = (ready.as_str(), "False", "Deleting");
    fleet_client.shows("host", &[waits]).await?;
    scene.proxy.lie(Lie {
        verbs: &[Verb::List, Verb::Watch],
        resources: &["tenants"],
        answer: Answer::Status(503),
    });
    scene.lies_at_least(1).await;
    let guest = json!({"workspace": SHARED});
    fleet_client.within("host").create("guest", guest).await?;
    pause(false).await;
    eventually("the release to be uninstalled", async || match fleet_client
        .revisions("host", &Scene::release("host"))
        .await?
    {
        left if left.is_empty() => Ok(Some(())),
        left => bail!("{left:?}"),
    })
    .await?;
    let lied = scene.proxy.lied();
    scene.lies_at_least(lied + 3).await;
    scene.proxy.forward_all();
    fleet_client.gone("host").await?;
    fleet_client.within("host").ready("guest").await?;
    let namespace = fleet_client.namespace("host").await?.unwrap();
    assert_eq!(namespace.metadata.deletion_timestamp, None);
    Ok(())
}
