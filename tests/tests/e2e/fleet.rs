//! Verifies members: discovery by Secrets, counts on home, kubeconfig rotation, leaving, and duplicates.

use anyhow::{Result, bail};
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    Cluster, Hub, HubOptions, Membership, Merge as _, Mode, Parts, Scenario, ServedChart,
    TestResult, by_agent, eventually,
    fleet::{ALL_READY, CONNECTED, Expected, FleetClient, HEALTHY, PATIENCE, RESOLVED, condition},
    in_both_modes,
};
use kube::{Api, api::DeleteParams};
use serde_json::json;

by_agent!(
    home_tenant_counts_namesakes_on_all_members,
    older_of_duplicate_members_acts_alone,
);
in_both_modes!(deleted_member_keeps_releases_and_rejoins_on_request);

/// Returns the conditions of a healthy member on home.
fn well(mode: Mode) -> Vec<Expected<'static>> {
    match mode {
        Mode::SelfCluster | Mode::Proxy => vec![RESOLVED, CONNECTED, HEALTHY],
        // There is no source to resolve.
        Mode::Agent => vec![CONNECTED, HEALTHY],
    }
}

/// A hub that installs Deployments without pods, and its prerequisites.
struct Fleet {
    home: Cluster,
    fleet_client: FleetClient,
    hub: Hub,
    chart: ServedChart,
}

async fn start(name: &str, parts: Parts, more: &[&str]) -> Result<Fleet> {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let home = Cluster::start(name, parts).await?;
    let options = HubOptions::new(home.kubeconfig()).args(chart.flags(more));
    let hub = Hub::start(&options)?;
    let fleet_client = FleetClient::at(&home);
    Ok(Fleet {
        home,
        fleet_client,
        hub,
        chart,
    })
}

impl Fleet {
    async fn join(&mut self, mode: Mode, edge: &Cluster, name: &str) -> Result<Membership> {
        Membership::join(mode, &mut self.hub, &self.home, edge, name).await
    }
}

async fn home_tenant_counts_namesakes_on_all_members(mode: Mode) -> TestResult {
    let (mut fleet, one, two) = tokio::try_join!(
        start("count-home", Parts::WithControllers, &[]),
        Cluster::start("count-1", Parts::WithControllers),
        Cluster::start("count-2", Parts::WithControllers),
    )?;
    let mut members = Vec::new();
    for (name, cluster) in [("edge-1", &one), ("edge-2", &two)] {
        members.push(fleet.join(mode, cluster, name).await?);
    }
    let fleet_client = &fleet.fleet_client;
    let (first, second) = (FleetClient::at(&one), FleetClient::at(&two));
    fleet_client.create("acme", json!({})).await?;
    let on_home = [
        ALL_READY,
        ("ClusterReady/self-cluster", "True", "Installed"),
    ];
    let alone = fleet_client.shows("acme", &on_home).await?;
    assert_eq!(
        alone.status.unwrap().last_message.as_deref(),
        Some("1 of 1 clusters ready")
    );

    for edge in [&first, &second] {
        edge.create("acme", json!({})).await?;
    }
    let all = [
        ALL_READY,
        on_home[1],
        ("ClusterReady/edge-1", "True", "Installed"),
        ("ClusterReady/edge-2", "True", "Installed"),
    ];
    let tenant = fleet_client.shows("acme", &all).await?;
    let status = tenant.status.unwrap();
    assert_eq!(
        status.last_message.as_deref(),
        Some("3 of 3 clusters ready")
    );
    assert_eq!(status.phase.as_deref(), Some("Ready"));
    // An edge cluster shows only its own condition.
    let own = first.shows("acme", &[ALL_READY, all[2]]).await?;
    let own = own.status.unwrap();
    assert_eq!(own.last_message.as_deref(), Some("1 of 1 clusters ready"));
    assert!(
        own.conditions
            .iter()
            .all(|condition| !condition.type_.ends_with("/edge-2"))
    );
    for (edge, name) in [(&first, "edge-1"), (&second, "edge-2")] {
        edge.newest_is("acme", &format!("tenant-acme-{name}"), 1, "deployed")
            .await?;
    }

    let mine = json!({"clusterRef": {"secretName": "edge-1"}});
    first.create("mine", mine.clone()).await?;
    second.create("mine", mine).await?;
    first.ready("mine").await?;
    let elsewhere = [
        ("ClusterReady/edge-2", "False", "NotThisCluster"),
        ("Ready", "False", "ClustersNotReady"),
    ];
    let tenant = second.shows("mine", &elsewhere).await?;
    assert_eq!(tenant.metadata.finalizers, None);
    assert_eq!(second.revisions("mine", "tenant-mine-edge-2").await?, []);
    assert_eq!(second.namespace("mine").await?, None);

    for (name, mode, total) in [
        ("self-cluster", Mode::SelfCluster, 1),
        ("edge-1", mode, 2),
        ("edge-2", mode, 1),
    ] {
        let what = format!("{name} to count {total} Tenants, all ready");
        eventually(&what, async || {
            let status = fleet_client
                .member_shows(name, &well(mode))
                .await?
                .status
                .unwrap_or_default();
            let tenants = status.tenants.unwrap_or_default();
            if (tenants.total, tenants.ready) != (total, total) {
                bail!("{tenants:?}");
            }
            if status.mode != Some(mode.on_record()) {
                bail!("its mode is {:?}", status.mode);
            }
            Ok(Some(()))
        })
        .await?;
    }
    a_member_is_named_from_where_it_allows(fleet_client, &fleet.home).await?;
    Ok(())
}

/// Edge-1 has a Tenant `mine`, which names it. On home, no member limits its namespaces yet.
async fn a_member_is_named_from_where_it_allows(
    fleet_client: &FleetClient,
    home: &Cluster,
) -> TestResult {
    let members: Api<EdgeCluster> = Api::all(home.client());
    let allow = async |name: &str, namespaces: serde_json::Value| {
        members
            .merge(name, &json!({"spec": {"allowedNamespaces": namespaces}}))
            .await
            .unwrap();
    };
    let naming = |name: &str| json!({"clusterRef": {"secretName": name}});
    let mine = ("ClusterReady/edge-1", "True", "Installed");
    fleet_client.create("mine", naming("edge-1")).await?;
    // The name comes from the EdgeCluster, which has it from a Secret or from the agent.
    let named = members.get("edge-1").await?.status.unwrap();
    let named = condition(&named.conditions, "TargetClusterResolved").unwrap();
    let resolved = ("TargetClusterResolved", "True", named.reason.as_str());
    fleet_client
        .shows("mine", &[ALL_READY, mine, resolved])
        .await?;
    allow("edge-1", json!(["team-a"])).await;
    let refused = [
        ("ClusterReady/edge-1", "False", "NamespaceNotAllowed"),
        ("TargetClusterResolved", "False", "NamespaceNotAllowed"),
        ("Ready", "False", "ClustersNotReady"),
    ];
    fleet_client.shows("mine", &refused).await?;
    // Tenants that don't name the member show it as before.
    let counted = [ALL_READY, ("ClusterReady/edge-1", "True", "Installed")];
    fleet_client.shows("acme", &counted).await?;

    // Krypton installs nothing before it observes the limit.
    let key = "mesh.openkcm.io/paused";
    fleet_client
        .create_annotated("here", naming("self-cluster"), &[(key, "true")])
        .await?;
    allow("self-cluster", json!([])).await;
    let refused = ("ClusterReady/self-cluster", "False", "NamespaceNotAllowed");
    fleet_client.shows("here", &[refused]).await?;
    fleet_client.annotate("here", key, "false").await?;
    // Nor after it. A later Tenant that names no member shows that the hub has processed all.
    fleet_client.create("later", json!({})).await?;
    let well = ("ClusterReady/self-cluster", "True", "Installed");
    fleet_client.shows("later", &[ALL_READY, well]).await?;
    let here = fleet_client.shows("here", &[refused]).await?;
    assert_eq!(here.metadata.finalizers, None);
    let release = "tenant-here-self-cluster";
    assert_eq!(fleet_client.revisions("here", release).await?, []);

    allow("edge-1", json!(["default"])).await;
    allow("self-cluster", json!(null)).await;
    fleet_client.shows("mine", &[ALL_READY, mine]).await?;
    fleet_client.shows("here", &[ALL_READY, well]).await?;
    Ok(())
}

async fn older_of_duplicate_members_acts_alone(mode: Mode) -> TestResult {
    let (mut fleet, edge) = tokio::try_join!(
        start("double-home", Parts::WithControllers, &[]),
        Cluster::start("double-edge", Parts::WithControllers),
    )?;
    let _member = fleet.join(mode, &edge, "edge-b").await?;
    let (fleet_client, at_edge) = (&fleet.fleet_client, FleetClient::at(&edge));
    let healthy = well(mode);
    fleet_client.member_shows("edge-b", &healthy).await?;
    // The age decides, not the name.
    fleet_client
        .add_member("edge-a", &edge.kubeconfig_with_token())
        .await?;
    let home_again = std::fs::read_to_string(fleet.home.kubeconfig())?;
    fleet_client.add_member("home-again", &home_again).await?;
    let double = ("Healthy", "False", "DuplicateCluster");
    for (name, other) in [("edge-a", "edge-b"), ("home-again", "self-cluster")] {
        let message = fleet_client.member_message(name, &[double]).await?;
        assert!(message.contains(&format!("member {other},")), "{message}");
    }

    at_edge.install("acme").await?;
    fleet_client.create("acme", json!({})).await?;
    let both = [
        ALL_READY,
        ("ClusterReady/self-cluster", "True", "Installed"),
        ("ClusterReady/edge-b", "True", "Installed"),
    ];
    let tenant = fleet_client.shows("acme", &both).await?;
    let status = tenant.status.unwrap();
    assert_eq!(
        status.last_message.as_deref(),
        Some("2 of 2 clusters ready")
    );
    let only = |names: &[&str]| {
        names
            .iter()
            .map(|name| (*name).to_owned())
            .collect::<Vec<_>>()
    };
    let releases = |found: std::collections::BTreeMap<String, String>| -> Vec<String> {
        found.into_keys().collect()
    };
    let on_edge = releases(at_edge.releases().await?);
    assert_eq!(on_edge, only(&["sh.helm.release.v1.tenant-acme-edge-b.v1"]));
    let on_home = releases(fleet_client.releases().await?);
    assert_eq!(
        on_home,
        only(&["sh.helm.release.v1.tenant-acme-self-cluster.v1"])
    );
    fleet_client.member_shows("edge-b", &healthy).await?;
    assert!(fleet.hub.log()?.contains("DuplicateCluster"));
    Ok(())
}

/// With one kubeconfig only. `handover.rs` covers the agent as a second writer.
#[tokio::test]
async fn second_hub_writes_nothing_until_first_stops() -> TestResult {
    let mut fleet = start("hubs", Parts::WithControllers, &[]).await?;
    let fleet_client = fleet.fleet_client.clone();
    fleet_client.install("first").await?;
    let holder = fleet_client.holder().await?;

    let options = HubOptions::new(fleet.home.kubeconfig()).args(fleet.chart.flags(&[]));
    let mut second = Hub::start(&options)?;
    second.ready(PATIENCE).await?;
    fleet_client.lease_renewed().await?;
    fleet_client.install("second").await?;
    fleet_client.lease_renewed().await?;
    assert_eq!(
        fleet_client.holder().await?,
        holder,
        "the Lease is unchanged"
    );
    for name in ["first", "second"] {
        let release = format!("tenant-{name}-self-cluster");
        fleet_client
            .newest_is(name, &release, 1, "deployed")
            .await?;
        let events = fleet_client.events(name).await?;
        assert!(events.values().all(|count| *count == 1), "{events:?}");
    }
    let log = second.log()?;
    assert!(!log.contains("running helm"), "{log}");
    assert!(!log.contains("panicked"), "{log}");

    let releases = fleet_client.releases().await?;
    fleet.hub.stop().await?;
    fleet_client.held_by_another(&holder).await?;
    fleet_client.install("third").await?;
    let mut now = fleet_client.releases().await?;
    now.remove("sh.helm.release.v1.tenant-third-self-cluster.v1")
        .expect("installed");
    assert_eq!(now, releases);
    Ok(())
}

async fn dismissed(hub: &Hub) {
    eventually("the hub to log the deletion", async || {
        let logged = hub.log()?.contains("EdgeCluster edge-1 was deleted");
        Ok(logged.then_some(()))
    })
    .await
    .unwrap();
}

async fn deleted_member_keeps_releases_and_rejoins_on_request(mode: Mode) -> TestResult {
    let (mut pair, _chart) = Scenario::new("comes-back", mode).start().await?;
    let (fleet_client, at_edge) = (FleetClient::at(pair.home()), pair.fleet_client());
    at_edge.install("acme").await?;
    let before = fleet_client
        .member_shows(pair.name(), &[CONNECTED, HEALTHY])
        .await?;
    let releases = at_edge.releases().await?;

    let members: Api<EdgeCluster> = Api::all(pair.home().client());
    members
        .delete(pair.name(), &DeleteParams::default())
        .await?;
    if mode == Mode::Agent {
        // The certificate belongs to the deleted EdgeCluster, so a user must join the agent again.
        let log = pair.actor()?.log_path().to_owned();
        eventually("the agent to be rejected", async || {
            let log = std::fs::read_to_string(&log)?;
            Ok(log.contains("kubectl krypton join edge-1").then_some(()))
        })
        .await?;
        pair.join_again().await?;
    } else {
        dismissed(pair.hub()?).await;
        // A new hub doesn't accept it as a new member either.
        pair.hub()?.stop().await?;
        pair.start_hub_again()?;
        dismissed(pair.hub()?).await;
        assert!(members.get_opt(pair.name()).await?.is_none());
        assert_eq!(at_edge.releases().await?, releases);
        fleet_client.label_member(pair.name(), false).await?;
        fleet_client.label_member(pair.name(), true).await?;
    }
    eventually("another EdgeCluster of that name", async || {
        let now = fleet_client
            .member_shows(pair.name(), &[CONNECTED, HEALTHY])
            .await?;
        Ok((now.metadata.uid != before.metadata.uid).then_some(()))
    })
    .await?;
    assert_eq!(at_edge.releases().await?, releases);
    Ok(())
}
