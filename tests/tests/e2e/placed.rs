//! Verifies Tenants of home that are placed on the member they name.

use std::collections::BTreeMap;

use anyhow::{bail, ensure};
use futures::{StreamExt, TryStreamExt};
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::tenant::Tenant;
use krypton_tests::{
    ChartRepository, ChartSource, Cluster, Hub, HubOptions, Membership, Mode, Pair, Parts,
    TestResult, by_agent, eventually,
    fleet::{ALL_READY, FleetClient, PATIENCE, chart_flags},
};
use krypton_types::names;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

const PLACED: (&str, &str, &str) = ("Placed", "True", "Placed");
const EDGE: &str = "edge-1";
/// A namespace of home. The members don't have it.
const TEAM: &str = "team";

by_agent!(placed_tenant_follows_home_and_leaves_member_first);

struct Scene {
    pair: Pair,
    home: FleetClient,
    edge: FleetClient,
    _repository: ChartRepository,
}

impl Scene {
    async fn open(name: &str, mode: Mode) -> TestResult<Self> {
        let charts = [ChartSource::small("1.0.0")];
        let repository = ChartRepository::start(&charts).await?;
        let mut pair = Pair::start(name, mode, Parts::WithControllers).await?;
        let mut flags = chart_flags(&repository, "small", "1.0.0");
        flags.extend(["--tenant-values".to_owned(), "--place-tenants".to_owned()]);
        pair.open(flags).await?;
        let words = ["create", "namespace", TEAM];
        pair.home().kubectl(words).await?;
        Ok(Self {
            home: FleetClient::at(pair.home()).within(TEAM),
            edge: pair.fleet_client().within(TEAM),
            pair,
            _repository: repository,
        })
    }

    async fn place(&self, name: &str) -> Tenant {
        let spec = json!({
            "workspace": format!("{name}-ws"),
            "clusterRef": {"secretName": EDGE},
            "values": {"replicaCount": 0},
        });
        self.home.create(name, spec).await.unwrap()
    }

    /// Waits until the Tenant is placed and ready, and returns the member's Tenant.
    async fn is_placed(&self, name: &str) -> TestResult<Tenant> {
        let shown = self
            .home
            .shows(name, &[PLACED, ALL_READY])
            .await?
            .status
            .unwrap()
            .conditions;
        let ready = self.pair.condition("ClusterReady");
        let ready = shown.iter().find(|found| found.type_ == ready);
        assert!(
            ready.is_some_and(|found| found.status == "True"),
            "{shown:?}"
        );
        Ok(self.edge.tenants().get(name).await?)
    }

    async fn patch(&self, fleet_client: &FleetClient, name: &str, patch: Value) {
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let tenants = fleet_client.tenants();
        tenants.patch(name, &params, &patch).await.unwrap();
    }

    /// Waits until the member's Tenant satisfies the predicate.
    async fn on_edge(&self, name: &str, what: &str, is: impl Fn(&Tenant) -> bool) -> Tenant {
        let tenants = self.edge.tenants();
        eventually(what, async || match tenants.get_opt(name).await? {
            Some(found) if is(&found) => Ok(Some(found)),
            found => bail!("{found:?}"),
        })
        .await
        .unwrap()
    }
}

fn home_uid(tenant: &Tenant) -> Option<&str> {
    let annotation = tenant.annotations().get(names::HOME_UID_ANNOTATION);
    annotation.map(String::as_str)
}

fn message(tenant: &Tenant) -> Option<&str> {
    tenant.spec.values.as_ref()?.get("message")?.as_str()
}

async fn placed_tenant_follows_home_and_leaves_member_first(mode: Mode) -> TestResult {
    let scene = Scene::open("placed", mode).await?;
    let at_home = scene.place("acme").await;
    let made = scene.is_placed("acme").await?;
    assert_eq!(
        made.labels()[names::MANAGED_BY_LABEL],
        names::MANAGED_BY_HUB
    );
    assert_eq!(home_uid(&made), at_home.metadata.uid.as_deref());
    assert_eq!(made.spec.cluster_ref, None);
    assert_eq!(made.workspace(), "acme-ws");
    let release = scene.pair.release("acme");
    scene
        .edge
        .newest_is("acme-ws", &release, 1, "deployed")
        .await?;

    let with_message = |text: &str| json!({"spec": {"values": {"message": text}}});
    scene
        .patch(&scene.home, "acme", with_message("second"))
        .await;
    let is = |found: &Tenant| message(found) == Some("second");
    scene.on_edge("acme", "the edit to follow", is).await;
    scene
        .edge
        .newest_is("acme-ws", &release, 2, "deployed")
        .await?;
    // Changes on the member are reverted.
    let named =
        json!({"spec": {"clusterRef": {"secretName": "elsewhere"}, "values": {"message": "mine"}}});
    scene.patch(&scene.edge, "acme", named).await;
    let is = |found: &Tenant| is(found) && found.spec.cluster_ref.is_none();
    scene.on_edge("acme", "the edit to be put back", is).await;
    scene.edge.delete("acme").await?;
    let again = |found: &Tenant| found.uid() != made.uid() && message(found) == Some("second");
    scene
        .on_edge("acme", "the Tenant to be made again", again)
        .await;
    scene.is_placed("acme").await?;

    scene.home.delete("acme").await?;
    scene.home.gone("acme").await?;
    let left = scene.edge.tenants().get_opt("acme").await?;
    assert_eq!(left, None);
    let left = scene.edge.revisions("acme-ws", &release).await?;
    assert!(left.is_empty(), "{left:?}");
    // Other objects may use home's namespace on the member.
    assert!(scene.edge.namespace(TEAM).await?.is_some());
    Ok(())
}

/// Members of a large fleet, and Tenants of each.
const MEMBERS: usize = 20;
const EACH: usize = 100;
/// Number of control planes that start concurrently.
const AT_ONCE: usize = 2;

#[tokio::test]
#[ignore = "needs 24 GiB; `make placed` runs it"]
async fn restarted_hub_rewrites_no_placed_tenants() -> TestResult {
    let home = Cluster::start("many-placed", Parts::ControlPlane).await?;
    let edges = (0..MEMBERS).map(|number| {
        let name = format!("many-placed-{number}");
        async move { Cluster::start(&name, Parts::ControlPlane).await }
    });
    let edges = futures::stream::iter(edges).buffered(AT_ONCE);
    let edges: Vec<Cluster> = edges.try_collect().await?;
    let options = || {
        HubOptions::new(home.kubeconfig()).args([
            // Not fetched, because no Tenant has an accepted workspace.
            "--chart-repo=https://charts.example.org",
            "--chart-name=small",
            "--chart-version=1.0.0",
            "--self-cluster=false",
            "--place-tenants",
        ])
    };
    let mut hub = Hub::start(&options())?;
    let mut memberships = Vec::new();
    for (number, edge) in edges.iter().enumerate() {
        let mode = [Mode::Proxy, Mode::Agent][number % 2];
        let name = format!("edge-{number}");
        let joining = Membership::join(mode, &mut hub, &home, edge, &name);
        memberships.push(joining.await?);
    }
    home.kubectl(["create", "namespace", TEAM]).await?;
    let fleet_client = FleetClient::at(&home).within(TEAM);
    for number in 0..MEMBERS * EACH {
        let spec = json!({
            "clusterRef": {"secretName": format!("edge-{}", number % MEMBERS)},
            "workspace": "kube-system",
        });
        let name = format!("tenant-{number}");
        fleet_client.create(&name, spec).await?;
    }
    let refused = |tenant: &Tenant| {
        let conditions = tenant.status.clone().unwrap_or_default().conditions;
        let has = |type_: &str, why: &str| {
            let mut conditions = conditions.iter();
            conditions.any(|found| found.type_ == type_ && found.reason == why)
        };
        has("Placed", "Placed") && has("Ready", "ClustersNotReady")
    };
    let all_are_placed = async || {
        eventually("all to be placed", async || {
            let all = fleet_client.tenants().list(&ListParams::default()).await?;
            let placed = all.iter().filter(|tenant| refused(tenant)).count();
            ensure!(placed == MEMBERS * EACH, "{placed} are");
            Ok(Some(()))
        })
        .await
        .unwrap();
    };
    all_are_placed().await;

    let mut before = Vec::new();
    for edge in &edges {
        before.push((objects(edge).await, writes(edge).await));
    }
    hub.kill9().await?;
    hub = Hub::start(&options().in_place_of(&hub))?;
    hub.ready(PATIENCE).await?;
    // By now, each member has received this hub's desired state and has applied it.
    let members: Api<EdgeCluster> = Api::all(home.client());
    let at_home = FleetClient::at(&home);
    eventually("all members to apply the desired state", async || {
        let epoch = i64::try_from(at_home.hub_epoch().await?)?;
        for member in members.list(&ListParams::default()).await? {
            let name = member.name_any();
            let status = serde_json::to_value(member.status)?;
            let applied = status["applied"]["epoch"].as_i64();
            ensure!(applied == Some(epoch), "{name}: {status}");
        }
        Ok(Some(()))
    })
    .await?;
    // One more change of each member shows that all earlier ones were processed.
    for number in 0..MEMBERS {
        let spec = json!({
            "clusterRef": {"secretName": format!("edge-{number}")},
            "workspace": "kube-system",
        });
        let name = format!("later-{number}");
        fleet_client.create(&name, spec).await?;
        fleet_client.shows(&name, &[PLACED]).await?;
    }
    all_are_placed_still(&fleet_client).await;
    for (edge, (objects_before, writes_before)) in edges.iter().zip(before) {
        let mut after = objects(edge).await;
        after.retain(|name, _| name.starts_with("tenant-"));
        assert_eq!(after, objects_before, "{}", edge.name());
        let more = |(request, count): (Request, u64)| {
            let more = count - writes_before.get(&request).copied().unwrap_or_default();
            (more > 0).then_some((request, more))
        };
        let mut more: BTreeMap<Request, u64> =
            writes(edge).await.into_iter().filter_map(more).collect();
        // The records of the desired state, written by this hub and by its successor.
        let request = |verb: &str, resource: &str| (verb.to_owned(), resource.to_owned());
        let records = more.remove(&request("PUT", "secrets")).unwrap_or_default();
        assert!((1..=3).contains(&records), "{}: {records}", edge.name());
        // The later Tenant is created and reported. The versions show that no other object is written.
        more.remove(&request("PATCH", "tenants"));
        let made = [(request("POST", "tenants"), 1)].into();
        assert_eq!(more, made, "{}", edge.name());
    }
    drop(memberships);
    Ok(())
}

async fn all_are_placed_still(fleet_client: &FleetClient) {
    let all = fleet_client.tenants().list(&ListParams::default()).await;
    for tenant in all.unwrap() {
        let member = tenant.names_member().unwrap_or_default().to_owned();
        let on = tenant.annotations().get(names::PLACED_ON_ANNOTATION);
        assert_eq!(on, Some(&member));
    }
}

/// Returns all Tenants of a cluster with their versions.
async fn objects(edge: &Cluster) -> BTreeMap<String, Option<String>> {
    let tenants: Api<Tenant> = Api::all(edge.client());
    let all = tenants.list(&ListParams::default()).await.unwrap();
    all.into_iter()
        .map(|tenant| (tenant.name_any(), tenant.resource_version()))
        .collect()
}

type Request = (String, String);

/// Returns the number of writes, except for Leases and events.
async fn writes(edge: &Cluster) -> BTreeMap<Request, u64> {
    let mut requests = edge.requests().await.unwrap();
    requests.retain(|(verb, resource), _| {
        let reads = ["GET", "LIST", "WATCH"].contains(&verb.as_str());
        let ours = ["tenants", "namespaces", "configmaps", "secrets"];
        !reads && ours.contains(&resource.as_str())
    });
    requests
}
