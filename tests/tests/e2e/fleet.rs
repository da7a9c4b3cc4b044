//! Members: found by their Secrets, counted on home, followed through rotation, leaving and doubles.

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

by_agent!(home_tenant_counts_namesakes_on_all_members);
in_both_modes!(
    older_of_duplicate_members_acts_alone,
    deleted_member_keeps_releases_and_rejoins_on_request,
);

/// What home says of a member that is well.
fn well(mode: Mode) -> Vec<Expected<'static>> {
    match mode {
        Mode::SelfCluster | Mode::Proxy => vec![RESOLVED, CONNECTED, HEALTHY],
        // There is nothing to resolve.
        Mode::Agent => vec![CONNECTED, HEALTHY],
    }
}

/// A hub that installs Deployments without pods, and what it needs.
struct Fleet {
    home: Cluster,
    desk: FleetClient,
    hub: Hub,
    chart: ServedChart,
}

async fn start(name: &str, parts: Parts, more: &[&str]) -> Result<Fleet> {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let home = Cluster::start(name, parts).await?;
    let options = HubOptions::new(home.kubeconfig()).args(chart.flags(more));
    let hub = Hub::start(&options)?;
    let desk = FleetClient::at(&home);
    Ok(Fleet {
        home,
        desk,
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
    let desk = &fleet.desk;
    let (first, second) = (FleetClient::at(&one), FleetClient::at(&two));
    desk.create("acme", json!({})).await?;
    let on_home = [
        ALL_READY,
        ("ClusterReady/self-cluster", "True", "Installed"),
    ];
    let alone = desk.shows("acme", &on_home).await?;
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
    let tenant = desk.shows("acme", &all).await?;
    let status = tenant.status.unwrap();
    assert_eq!(
        status.last_message.as_deref(),
        Some("3 of 3 clusters ready")
    );
    assert_eq!(status.phase.as_deref(), Some("Ready"));
    // An edge tells of itself alone.
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
            let status = desk
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
    a_member_is_named_from_where_it_allows(desk, &fleet.home).await?;
    Ok(())
}

/// With edge-1 that has a Tenant `mine`, which names it, and a home where nothing is limited yet.
async fn a_member_is_named_from_where_it_allows(desk: &FleetClient, home: &Cluster) -> TestResult {
    let members: Api<EdgeCluster> = Api::all(home.client());
    let allow = async |name: &str, namespaces: serde_json::Value| {
        members
            .merge(name, &json!({"spec": {"allowedNamespaces": namespaces}}))
            .await
            .unwrap();
    };
    let naming = |name: &str| json!({"clusterRef": {"secretName": name}});
    let mine = ("ClusterReady/edge-1", "True", "Installed");
    desk.create("mine", naming("edge-1")).await?;
    // As its EdgeCluster says, which has it from a Secret or from the agent.
    let named = members.get("edge-1").await?.status.unwrap();
    let named = condition(&named.conditions, "TargetClusterResolved").unwrap();
    let resolved = ("TargetClusterResolved", "True", named.reason.as_str());
    desk.shows("mine", &[ALL_READY, mine, resolved]).await?;
    allow("edge-1", json!(["team-a"])).await;
    let refused = [
        ("ClusterReady/edge-1", "False", "NamespaceNotAllowed"),
        ("TargetClusterResolved", "False", "NamespaceNotAllowed"),
        ("Ready", "False", "ClustersNotReady"),
    ];
    desk.shows("mine", &refused).await?;
    // Who does not name it is told of it as before.
    let counted = [ALL_READY, ("ClusterReady/edge-1", "True", "Installed")];
    desk.shows("acme", &counted).await?;

    // Nothing is installed before the limit is seen.
    let key = "mesh.openkcm.io/paused";
    desk.create_annotated("here", naming("self-cluster"), &[(key, "true")])
        .await?;
    allow("self-cluster", json!([])).await;
    let refused = ("ClusterReady/self-cluster", "False", "NamespaceNotAllowed");
    desk.shows("here", &[refused]).await?;
    desk.annotate("here", key, "false").await?;
    // Nor after it: who comes later and names nobody is through.
    desk.create("later", json!({})).await?;
    let well = ("ClusterReady/self-cluster", "True", "Installed");
    desk.shows("later", &[ALL_READY, well]).await?;
    let here = desk.shows("here", &[refused]).await?;
    assert_eq!(here.metadata.finalizers, None);
    let release = "tenant-here-self-cluster";
    assert_eq!(desk.revisions("here", release).await?, []);

    allow("edge-1", json!(["default"])).await;
    allow("self-cluster", json!(null)).await;
    desk.shows("mine", &[ALL_READY, mine]).await?;
    desk.shows("here", &[ALL_READY, well]).await?;
    Ok(())
}

/// The same access, by way of a program: refused unless the hub is told otherwise.
fn with_exec(cluster: &Cluster) -> String {
    cluster
        .kubeconfig_with_token()
        .lines()
        .map(|line| match line.split_once("token:") {
            Some((indent, _)) => {
                let exec =
                    "exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/true}";
                format!("{indent}{exec}\n")
            }
            None => format!("{line}\n"),
        })
        .collect()
}

/// With a kubeconfig only: an agent has none that the hub could rotate, spoil or lose.
#[tokio::test]
async fn member_survives_rotated_rejected_and_removed_kubeconfig() -> TestResult {
    let (fleet, edge) = tokio::try_join!(
        start(
            "rotation-home",
            Parts::ControlPlane,
            &["--self-cluster=false"]
        ),
        Cluster::start("rotation-edge", Parts::WithControllers),
    )?;
    let (desk, at_edge) = (&fleet.desk, FleetClient::at(&edge));
    desk.add_member("edge-1", &edge.kubeconfig_with_token())
        .await?;
    at_edge.install("before").await?;
    let healthy = [RESOLVED, CONNECTED, HEALTHY];
    desk.member_shows("edge-1", &healthy).await?;

    desk.add_member("edge-1", &edge.kubeconfig_with_next_token())
        .await?;
    edge.rotate_token().await?;
    at_edge.install("rotated").await?;
    desk.member_shows("edge-1", &healthy).await?;

    desk.add_member("edge-1", &with_exec(&edge)).await?;
    let invalid = ("TargetClusterResolved", "False", "KubeconfigInvalid");
    let shown = [invalid, CONNECTED, HEALTHY];
    let told = desk.member_message("edge-1", &shown).await?;
    assert!(told.contains("default/edge-1"), "{told}");
    assert!(told.contains("exec"), "{told}");
    at_edge.install("meanwhile").await?;

    desk.add_member("edge-1", &edge.kubeconfig_with_token())
        .await?;
    desk.member_shows("edge-1", &healthy).await?;

    let tenant = desk.create("before", json!({})).await?;
    assert_eq!(tenant.status, None);
    desk.ready("before").await?;
    let releases = at_edge.releases().await?;
    assert_eq!(releases.len(), 3);
    desk.label_member("edge-1", false).await?;
    let gone = [
        ("TargetClusterResolved", "False", "SourceGone"),
        ("Connected", "False", "SourceGone"),
    ];
    desk.member_shows("edge-1", &gone).await?;
    let unknown = [
        ("ClusterReady/edge-1", "Unknown", "ClusterUnreachable"),
        ("Ready", "Unknown", "ClustersUnknown"),
    ];
    desk.shows("before", &unknown).await?;
    assert_eq!(at_edge.holder().await?, "", "the Lease is given up");
    // Nobody looks at a Tenant now.
    at_edge.create("later", json!({})).await?;
    assert_eq!(at_edge.releases().await?, releases);

    desk.label_member("edge-1", true).await?;
    at_edge.ready("later").await?;
    desk.member_shows("edge-1", &healthy).await?;
    desk.ready("before").await?;
    let mut now = at_edge.releases().await?;
    now.retain(|name, _| releases.contains_key(name));
    assert_eq!(now, releases);
    Ok(())
}

async fn older_of_duplicate_members_acts_alone(mode: Mode) -> TestResult {
    let (mut fleet, edge) = tokio::try_join!(
        start("double-home", Parts::WithControllers, &[]),
        Cluster::start("double-edge", Parts::WithControllers),
    )?;
    let _member = fleet.join(mode, &edge, "edge-b").await?;
    let (desk, at_edge) = (&fleet.desk, FleetClient::at(&edge));
    let healthy = well(mode);
    desk.member_shows("edge-b", &healthy).await?;
    // The name comes first, the age decides.
    desk.add_member("edge-a", &edge.kubeconfig_with_token())
        .await?;
    let home_again = std::fs::read_to_string(fleet.home.kubeconfig())?;
    desk.add_member("home-again", &home_again).await?;
    let double = ("Healthy", "False", "DuplicateCluster");
    for (name, other) in [("edge-a", "edge-b"), ("home-again", "self-cluster")] {
        let told = desk.member_message(name, &[double]).await?;
        assert!(told.contains(&format!("member {other},")), "{told}");
    }

    at_edge.install("acme").await?;
    desk.create("acme", json!({})).await?;
    let both = [
        ALL_READY,
        ("ClusterReady/self-cluster", "True", "Installed"),
        ("ClusterReady/edge-b", "True", "Installed"),
    ];
    let tenant = desk.shows("acme", &both).await?;
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
    let on_home = releases(desk.releases().await?);
    assert_eq!(
        on_home,
        only(&["sh.helm.release.v1.tenant-acme-self-cluster.v1"])
    );
    desk.member_shows("edge-b", &healthy).await?;
    assert!(fleet.hub.log()?.contains("DuplicateCluster"));
    Ok(())
}

/// Over one kubeconfig: an agent is a second writer of another kind, see `handover.rs`.
#[tokio::test]
async fn second_hub_writes_nothing_until_first_stops() -> TestResult {
    let mut fleet = start("hubs", Parts::WithControllers, &[]).await?;
    let desk = fleet.desk.clone();
    desk.install("first").await?;
    let holder = desk.holder().await?;

    let options = HubOptions::new(fleet.home.kubeconfig()).args(fleet.chart.flags(&[]));
    let mut second = Hub::start(&options)?;
    second.ready(PATIENCE).await?;
    desk.lease_renewed().await?;
    desk.install("second").await?;
    desk.lease_renewed().await?;
    assert_eq!(desk.holder().await?, holder, "the Lease stays where it was");
    for name in ["first", "second"] {
        let release = format!("tenant-{name}-self-cluster");
        desk.newest_is(name, &release, 1, "deployed").await?;
        let told = desk.events(name).await?;
        assert!(told.values().all(|count| *count == 1), "{told:?}");
    }
    let log = second.log()?;
    assert!(!log.contains("running helm"), "{log}");
    assert!(!log.contains("panicked"), "{log}");

    let releases = desk.releases().await?;
    fleet.hub.stop().await?;
    desk.held_by_another(&holder).await?;
    desk.install("third").await?;
    let mut now = desk.releases().await?;
    now.remove("sh.helm.release.v1.tenant-third-self-cluster.v1")
        .expect("installed");
    assert_eq!(now, releases);
    Ok(())
}

async fn dismissed(hub: &Hub) {
    eventually("the hub to say that the member was dismissed", async || {
        let said = hub.log()?.contains("EdgeCluster edge-1 was deleted");
        Ok(said.then_some(()))
    })
    .await
    .unwrap();
}

async fn deleted_member_keeps_releases_and_rejoins_on_request(mode: Mode) -> TestResult {
    let (mut pair, _chart) = Scenario::new("comes-back", mode).start().await?;
    let (desk, at_edge) = (FleetClient::at(pair.home()), pair.desk());
    at_edge.install("acme").await?;
    let before = desk
        .member_shows(pair.name(), &[CONNECTED, HEALTHY])
        .await?;
    let releases = at_edge.releases().await?;

    let members: Api<EdgeCluster> = Api::all(pair.home().client());
    members
        .delete(pair.name(), &DeleteParams::default())
        .await?;
    if mode == Mode::Agent {
        // Its certificate was of the one that is gone: somebody has to join it again.
        let log = pair.actor()?.log_path().to_owned();
        eventually("the agent to be refused", async || {
            let log = std::fs::read_to_string(&log)?;
            Ok(log.contains("kubectl krypton join edge-1").then_some(()))
        })
        .await?;
        pair.join_again().await?;
    } else {
        dismissed(pair.hub()?).await;
        // Nor does a new hub take it for a new member.
        pair.hub()?.stop().await?;
        pair.start_hub_again()?;
        dismissed(pair.hub()?).await;
        assert!(members.get_opt(pair.name()).await?.is_none());
        assert_eq!(at_edge.releases().await?, releases);
        desk.label_member(pair.name(), false).await?;
        desk.label_member(pair.name(), true).await?;
    }
    eventually("another EdgeCluster of that name", async || {
        let now = desk
            .member_shows(pair.name(), &[CONNECTED, HEALTHY])
            .await?;
        Ok((now.metadata.uid != before.metadata.uid).then_some(()))
    })
    .await?;
    assert_eq!(at_edge.releases().await?, releases);
    Ok(())
}
