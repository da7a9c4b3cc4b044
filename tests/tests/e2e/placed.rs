//! Verifies Tenants of home that are placed on the member they name.

use std::collections::BTreeMap;

use anyhow::{bail, ensure};
use futures::{StreamExt, TryStreamExt};
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::tenant::Tenant;
use krypton_tests::{
    Cluster, Hub, HubOptions, Membership, Merge as _, Mode, Pair, Parts, Scenario, ServedChart,
    TestResult, by_agent, eventually,
    fleet::{ALL_READY, FleetClient, condition},
};
use krypton_types::names;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

const PLACED: (&str, &str, &str) = ("Placed", "True", "Placed");
const EDGE: &str = "edge-1";
/// A namespace of home. The members don't have it.
const TEAM: &str = "team";

by_agent!(placed_tenant_follows_home_and_leaves_member_first);

struct PlacementFleet {
    pair: Pair,
    home: FleetClient,
    edge: FleetClient,
    _chart: ServedChart,
}

impl PlacementFleet {
    async fn start(name: &str, mode: Mode) -> TestResult<Self> {
        let flags = ["--tenant-values", "--place-tenants"];
        let (pair, chart) = Scenario::new(name, mode).flags(&flags).start().await?;
        pair.home().create_namespace(TEAM).await?;
        Ok(Self {
            home: FleetClient::new(pair.home()).in_namespace(TEAM),
            edge: pair.fleet_client().in_namespace(TEAM),
            pair,
            _chart: chart,
        })
    }

    async fn create_placed(&self, name: &str) -> Tenant {
        let spec = json!({
            "workspace": format!("{name}-ws"),
            "clusterRef": {"secretName": EDGE},
            "values": {"replicaCount": 0},
        });
        self.home.create(name, spec).await.unwrap()
    }

    /// Waits until the Tenant is placed and ready, and returns the member's Tenant.
    async fn wait_placed(&self, name: &str) -> TestResult<Tenant> {
        let tenant = self.home.wait_for(name, &[PLACED, ALL_READY]).await?;
        let conditions = tenant.status.unwrap().conditions;
        let ready = condition(&conditions, &self.pair.condition("ClusterReady"));
        assert!(
            ready.is_some_and(|it| it.status == "True"),
            "{conditions:?}"
        );
        Ok(self.edge.tenants().get(name).await?)
    }

    async fn patch(&self, fleet_client: &FleetClient, name: &str, patch: Value) {
        fleet_client.tenants().merge(name, &patch).await.unwrap();
    }

    /// Waits until the member's Tenant satisfies the predicate.
    async fn wait_on_edge(&self, name: &str, what: &str, is: impl Fn(&Tenant) -> bool) -> Tenant {
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
    let fleet = PlacementFleet::start("placed", mode).await?;
    let at_home = fleet.create_placed("acme").await;
    let placed = fleet.wait_placed("acme").await?;
    assert_eq!(
        placed.labels()[names::MANAGED_BY_LABEL],
        names::MANAGED_BY_HUB
    );
    assert_eq!(home_uid(&placed), at_home.metadata.uid.as_deref());
    assert_eq!(placed.spec.cluster_ref, None);
    assert_eq!(placed.workspace(), "acme-ws");
    let release = fleet.pair.release("acme");
    fleet.edge.wait_deployed("acme-ws", &release, 1).await?;

    let with_message = |text: &str| json!({"spec": {"values": {"message": text}}});
    fleet
        .patch(&fleet.home, "acme", with_message("second"))
        .await;
    let has_second_message = |tenant: &Tenant| message(tenant) == Some("second");
    fleet
        .wait_on_edge("acme", "the edit to follow", has_second_message)
        .await;
    fleet.edge.wait_deployed("acme-ws", &release, 2).await?;
    // Changes on the member are reverted.
    let named =
        json!({"spec": {"clusterRef": {"secretName": "elsewhere"}, "values": {"message": "mine"}}});
    fleet.patch(&fleet.edge, "acme", named).await;
    let has_second_message =
        |tenant: &Tenant| has_second_message(tenant) && tenant.spec.cluster_ref.is_none();
    fleet
        .wait_on_edge("acme", "the edit to be put back", has_second_message)
        .await;
    fleet.edge.delete("acme").await?;
    let is_recreated =
        |tenant: &Tenant| tenant.uid() != placed.uid() && message(tenant) == Some("second");
    fleet
        .wait_on_edge("acme", "the Tenant to be made again", is_recreated)
        .await;
    fleet.wait_placed("acme").await?;

    fleet.home.delete("acme").await?;
    fleet.home.wait_gone("acme").await?;
    let remaining = fleet.edge.tenants().get_opt("acme").await?;
    assert_eq!(remaining, None);
    let remaining = fleet.edge.revisions("acme-ws", &release).await?;
    assert!(remaining.is_empty(), "{remaining:?}");
    // Other objects may use home's namespace on the member.
    assert!(fleet.edge.namespace(TEAM).await?.is_some());
    Ok(())
}

/// Members of a large fleet, and Tenants of each.
const MEMBERS: usize = 20;
const TENANTS_EACH: usize = 100;
/// Number of control planes that start concurrently.
const START_CONCURRENCY: usize = 2;

#[tokio::test]
#[ignore = "needs 24 GiB; `make placed` runs it"]
async fn restarted_hub_rewrites_no_placed_tenants() -> TestResult {
    let home = Cluster::start("many-placed", Parts::ControlPlane).await?;
    let edges = (0..MEMBERS).map(|number| {
        let name = format!("many-placed-{number}");
        async move { Cluster::start(&name, Parts::ControlPlane).await }
    });
    let edges = futures::stream::iter(edges).buffered(START_CONCURRENCY);
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
    home.create_namespace(TEAM).await?;
    let fleet_client = FleetClient::new(&home).in_namespace(TEAM);
    for number in 0..MEMBERS * TENANTS_EACH {
        let spec = json!({
            "clusterRef": {"secretName": format!("edge-{}", number % MEMBERS)},
            "workspace": "kube-system",
        });
        let name = format!("tenant-{number}");
        fleet_client.create(&name, spec).await?;
    }
    let is_placed = |tenant: &Tenant| {
        let conditions = tenant.status.clone().unwrap_or_default().conditions;
        let has = |type_: &str, reason: &str| {
            let mut conditions = conditions.iter();
            conditions.any(|condition| condition.type_ == type_ && condition.reason == reason)
        };
        has("Placed", "Placed") && has("Ready", "ClustersNotReady")
    };
    let all_are_placed = async || {
        eventually("all to be placed", async || {
            let all = fleet_client.tenants().list(&ListParams::default()).await?;
            let placed = all.iter().filter(|tenant| is_placed(tenant)).count();
            ensure!(placed == MEMBERS * TENANTS_EACH, "{placed} are");
            Ok(Some(()))
        })
        .await
        .unwrap();
    };
    all_are_placed().await;

    let mut before = Vec::new();
    for edge in &edges {
        before.push((tenant_versions(edge).await, count_writes(edge).await));
    }
    hub.kill9().await?;
    let _hub = Hub::start_ready(&options().on_port_of(&hub)).await?;
    // By now, each member has received this hub's desired state and has applied it.
    let members: Api<EdgeCluster> = Api::all(home.client());
    let at_home = FleetClient::new(&home);
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
        fleet_client.wait_for(&name, &[PLACED]).await?;
    }
    check_all_placed(&fleet_client).await;
    for (edge, (objects_before, writes_before)) in edges.iter().zip(before) {
        let mut after = tenant_versions(edge).await;
        after.retain(|name, _| name.starts_with("tenant-"));
        assert_eq!(after, objects_before, "{}", edge.name());
        let added = |(request, count): (Request, u64)| {
            let extra = count - writes_before.get(&request).copied().unwrap_or_default();
            (extra > 0).then_some((request, extra))
        };
        let mut extra_requests: BTreeMap<Request, u64> = count_writes(edge)
            .await
            .into_iter()
            .filter_map(added)
            .collect();
        // The records of the desired state, written by this hub and by its successor.
        let request = |verb: &str, resource: &str| (verb.to_owned(), resource.to_owned());
        let records = extra_requests
            .remove(&request("PUT", "secrets"))
            .unwrap_or_default();
        assert!((1..=3).contains(&records), "{}: {records}", edge.name());
        // The later Tenant is created and reported. The versions show that no other object is written.
        extra_requests.remove(&request("PATCH", "tenants"));
        let one_creation = [(request("POST", "tenants"), 1)].into();
        assert_eq!(extra_requests, one_creation, "{}", edge.name());
    }
    drop(memberships);
    Ok(())
}

async fn check_all_placed(fleet_client: &FleetClient) {
    let all = fleet_client.tenants().list(&ListParams::default()).await;
    for tenant in all.unwrap() {
        let member = tenant.referenced_member().unwrap_or_default().to_owned();
        let placed_on = tenant.annotations().get(names::PLACED_ON_ANNOTATION);
        assert_eq!(placed_on, Some(&member));
    }
}

/// Returns all Tenants of a cluster with their versions.
async fn tenant_versions(edge: &Cluster) -> BTreeMap<String, Option<String>> {
    let tenants: Api<Tenant> = Api::all(edge.client());
    let all = tenants.list(&ListParams::default()).await.unwrap();
    all.into_iter()
        .map(|tenant| (tenant.name_any(), tenant.resource_version()))
        .collect()
}

type Request = (String, String);

/// Returns the number of writes, except for Leases and events.
async fn count_writes(edge: &Cluster) -> BTreeMap<Request, u64> {
    let mut requests = edge.requests().await.unwrap();
    requests.retain(|(verb, resource), _| {
        let reads = ["GET", "LIST", "WATCH"].contains(&verb.as_str());
        let ours = ["tenants", "namespaces", "configmaps", "secrets"];
        !reads && ours.contains(&resource.as_str())
    });
    requests
}
