//! Shows that missing or false information uninstalls nothing. Each release stays installed while an API server returns
//! false responses, and while state disappears and returns. A real deletion proceeds once it is confirmed.

use std::{collections::BTreeMap, fs};

use anyhow::{Context as _, Result, bail, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Secret};
use krypton_tests::{
    AgentOptions, AnsweringProxy, Cluster, FalseResponse, Hub, HubOptions, Membership, Mode, Parts,
    ResponseFault, ServedChart, TestResult, answering_proxy::Verb, by_agent, eventually,
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
fn has_later_revision(name: &str, now: &BTreeMap<String, String>) -> bool {
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
struct ProxiedMember {
    membership: Membership,
    hub: Hub,
    proxy: AnsweringProxy,
    fleet_client: FleetClient,
    at_home: FleetClient,
    chart: ServedChart,
    values_version: u32,
    _home: Cluster,
    edge: Cluster,
}

impl ProxiedMember {
    async fn start(name: &str, mode: Mode, deleted_tenants: &[String]) -> TestResult<Self> {
        let chart = ServedChart::small("{replicaCount: 0, message: v0}").await?;
        let (home, edge) = home_and_edge(name, Parts::ControlPlane).await?;
        let proxy = AnsweringProxy::start(&edge).await?;
        let flags = chart.flags(&["--self-cluster=false"]);
        let options = HubOptions::new(home.kubeconfig()).args(flags);
        let mut hub = Hub::start(&options)?;
        let file = proxy.kubeconfig();
        let access = fs::read_to_string(&file)?;
        let access_and_options = (access.as_str(), AgentOptions::new(&file));
        let membership =
            Membership::join_with(mode, &mut hub, &home, access_and_options, EDGE).await?;
        let member = Self {
            membership,
            hub,
            proxy,
            fleet_client: FleetClient::new(&edge),
            at_home: FleetClient::new(&home),
            chart,
            values_version: 0,
            _home: home,
            edge,
        };
        let fleet_client = &member.fleet_client;
        member.edge.create_namespace(SHARED).await?;
        try_join_all(KEPT.map(|name| fleet_client.create(name, json!({})))).await?;
        let shared = json!({"workspace": SHARED});
        let creations = deleted_tenants
            .iter()
            .map(|name| fleet_client.create(name, shared.clone()));
        try_join_all(creations).await?;
        let all = KEPT
            .into_iter()
            .chain(deleted_tenants.iter().map(String::as_str));
        for name in all {
            fleet_client.wait_ready(name).await?;
        }
        Ok(member)
    }

    /// Changes the values, so all Tenants need an upgrade.
    fn change_values(&mut self) -> Result<u32> {
        self.values_version += 1;
        let yaml = format!("{{replicaCount: 0, message: v{}}}", self.values_version);
        self.chart.write(&yaml)?;
        Ok(self.values_version)
    }

    fn release(name: &str) -> String {
        names::tenant_release(name, EDGE)
    }

    /// Returns the UIDs of the deployed release Secrets and of the Deployments.
    async fn deployed_objects(&self) -> Result<BTreeMap<String, String>> {
        self.find_objects("owner=helm,status=deployed").await
    }

    async fn find_objects(&self, releases: &str) -> Result<BTreeMap<String, String>> {
        let mut uids = BTreeMap::new();
        let params = ListParams::default();
        let secrets: Api<Secret> = Api::all(self.fleet_client.client.clone());
        let deployments: Api<Deployment> = Api::all(self.fleet_client.client.clone());
        for secret in secrets
            .list_metadata(&params.clone().labels(releases))
            .await?
        {
            uids.insert(secret.name_any(), secret.uid().unwrap_or_default());
        }
        for deployment in deployments.list_metadata(&params).await? {
            let name = format!("Deployment {}", deployment.name_any());
            uids.insert(name, deployment.uid().unwrap_or_default());
        }
        Ok(uids)
    }

    /// Verifies that all objects in `before` still exist, except the objects of `deleted_releases`. Each release must be deployed
    /// once.
    async fn check_unchanged(
        &self,
        before: &BTreeMap<String, String>,
        deleted_releases: &[&str],
    ) -> Result<()> {
        let now = self.find_objects("owner=helm").await?;
        let deleted_releases: Vec<String> = deleted_releases
            .iter()
            .map(|name| Self::release(name))
            .collect();
        for (name, uid) in before {
            if !deleted_releases
                .iter()
                .any(|release| name.contains(release.as_str()))
            {
                let stands = now.get(name) == Some(uid) || has_later_revision(name, &now);
                ensure!(stands, "{name} was {uid}: {now:?}");
            }
        }
        for release in &deleted_releases {
            let remaining: Vec<_> = now.keys().filter(|name| name.contains(release)).collect();
            ensure!(remaining.is_empty(), "remaining: {remaining:?}");
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

    async fn wait_kept_ready(&self, values: Option<u32>) {
        for name in KEPT {
            if let Some(number) = values {
                self.wait_for_values(name, name, number).await;
            }
            self.fleet_client.wait_ready(name).await.unwrap();
        }
    }

    /// Waits, because Helm can still be running.
    async fn wait_for_values(&self, name: &str, namespace: &str, number: u32) {
        let (release, message) = (Self::release(name), format!("v{number}"));
        let fleet_client = &self.fleet_client;
        let waiting = fleet_client.wait_for_message(namespace, &release, &message);
        waiting.await.unwrap();
    }

    async fn wait_for_false_responses(&mut self, at_least: u64) {
        let proxy = &self.proxy;
        eventually("the false response to be sent", async || {
            match proxy.false_responses() {
                count if count >= at_least => Ok(Some(())),
                count => bail!("{count} times; passed: {:?}", proxy.forwarded_requests()),
            }
        })
        .await
        .unwrap();
        let actor = self.membership.actor(&mut self.hub);
        assert!(!actor.log().unwrap().contains("panicked"));
    }
}

async fn restored_etcd_or_unseen_tenant_keeps_releases(mode: Mode) -> TestResult {
    let deleted_tenants = ["before".to_owned()];
    let mut member = Box::pin(ProxiedMember::start("away", mode, &deleted_tenants)).await?;
    etcd_is_restored(&mut member).await?;
    namespace_of_unobserved_tenants_is_kept(&mut member).await
}

/// Restores etcd to a state before some Tenants were created and others deleted. The resourceVersions decrease.
async fn etcd_is_restored(member: &mut ProxiedMember) -> TestResult {
    let fleet_client = member.fleet_client.clone();
    let before = member.deployed_objects().await?;
    let release = ProxiedMember::release("before");
    // If the snapshot contained a running upgrade, the repair would add a revision.
    member
        .wait_for_values("before", SHARED, member.values_version)
        .await;
    let number = eventually("no upgrade to be running", async || {
        let revisions = fleet_client.revisions(SHARED, &release).await?;
        match revisions.last() {
            Some((number, status)) if status == "deployed" => Ok(Some(*number)),
            _ => bail!("{revisions:?}"),
        }
    })
    .await?;
    let snapshot = member.edge.snapshot().await?;
    let shared = json!({"workspace": SHARED});
    fleet_client.create("late", shared.clone()).await?;
    fleet_client.wait_ready("late").await?;
    fleet_client.remove("before").await?;
    member.check_unchanged(&before, &["before"]).await?;
    // A restored API server answers 429 until the storage of the CRD is ready again.
    let version = async || {
        eventually("no list of Tenants", async || {
            let tenants = fleet_client.tenants().list(&ListParams::default()).await?;
            let version = tenants.metadata.resource_version.context("no version")?;
            Ok(Some(version.parse::<u64>()?))
        })
        .await
        .unwrap()
    };
    let latest = version().await;

    member.edge.restore(&snapshot).await?;

    assert!(version().await < latest, "the resourceVersion went back");
    let log = |member: &mut ProxiedMember| member.membership.actor(&mut member.hub).log().unwrap();
    let uninstalled = log(member).matches("running helm uninstall").count();
    // A Tenant deleted after the snapshot is live again, and a Tenant created after it is absent.
    let values = member.change_values()?;
    member.wait_kept_ready(Some(values)).await;
    fleet_client.wait_ready("before").await?;
    fleet_client
        .wait_deployed(SHARED, &release, number + 1)
        .await?;
    member.check_unchanged(&before, &["late"]).await?;
    assert_eq!(fleet_client.tenants().get_opt("late").await?, None);
    assert_eq!(
        log(member).matches("running helm uninstall").count(),
        uninstalled
    );
    fleet_client.create("late", shared).await?;
    fleet_client.wait_ready("late").await?;
    for name in ["late", "before"] {
        fleet_client.remove(name).await?;
    }
    member.check_unchanged(&before, &["late", "before"]).await?;
    Ok(())
}

/// Krypton created the namespace for a Tenant that is now deleted, and another Tenant has moved into it.
async fn namespace_of_unobserved_tenants_is_kept(member: &mut ProxiedMember) -> TestResult {
    let fleet_client = member.fleet_client.clone();
    let at_home = member.at_home.clone();
    let pause = async |paused: bool| {
        let spec = json!({"paused": paused});
        at_home.patch_member(EDGE, spec).await.unwrap();
    };
    fleet_client.install("host").await?;
    pause(true).await;
    fleet_client.delete("host").await?;
    let ready = format!("ClusterReady/{EDGE}");
    let deleting = (ready.as_str(), "False", "Deleting");
    fleet_client.wait_for("host", &[deleting]).await?;
    member.proxy.inject(ResponseFault {
        verbs: &[Verb::List, Verb::Watch],
        resources: &["tenants"],
        response: FalseResponse::Status(503),
    });
    member.wait_for_false_responses(1).await;
    let guest = json!({"workspace": SHARED});
    fleet_client
        .in_namespace("host")
        .create("guest", guest)
        .await?;
    pause(false).await;
    eventually("the release to be uninstalled", async || match fleet_client
        .revisions("host", &ProxiedMember::release("host"))
        .await?
    {
        left if left.is_empty() => Ok(Some(())),
        left => bail!("{left:?}"),
    })
    .await?;
    let count = member.proxy.false_responses();
    member.wait_for_false_responses(count + 3).await;
    member.proxy.forward_all();
    fleet_client.wait_gone("host").await?;
    fleet_client
        .in_namespace("host")
        .wait_ready("guest")
        .await?;
    let namespace = fleet_client.namespace("host").await?.unwrap();
    assert_eq!(namespace.metadata.deletion_timestamp, None);
    Ok(())
}
