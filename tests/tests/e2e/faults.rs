//! Shows recovery from faults of hub, agent and members: restarts, a crash during an install, and a lost API server.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use krypton_tests::{
    Cluster, Gate, Hub, HubOptions, Membership, Mode, Parts, Scenario, ServedChart, TestResult,
    by_agent, eventually,
    fleet::{ALL_READY, CONNECTED, FleetClient, HEALTHY, helm_processes},
    gate, home_and_edge,
};
use serde_json::json;

by_agent!(
    a_restart_finds_everything_as_it_was_left,
    unreachable_member_is_reported_alone_and_recovers,
);

/// State that an idle actor must not change: the Tenant and its resourceVersion, its events, and all releases.
async fn everything(fleet_client: &FleetClient) -> Result<impl PartialEq + std::fmt::Debug> {
    let tenant = fleet_client.tenants().get("acme").await?;
    let events = fleet_client.events("acme").await?;
    let status = tenant.status.unwrap_or_default();
    let conditions: Vec<_> = status
        .conditions
        .into_iter()
        .map(|found| {
            (
                found.type_,
                found.status,
                found.reason,
                found.last_transition_time,
            )
        })
        .collect();
    let version = tenant.metadata.resource_version;
    Ok((
        events,
        fleet_client.releases().await?,
        conditions,
        status.phase,
        version,
    ))
}

/// Restarts the hub, and the agent if there is one. The agent stops after the hub and starts before it.
async fn a_restart_finds_everything_as_it_was_left(mode: Mode) -> TestResult {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let (home, edge) = home_and_edge("restart", Parts::WithControllers).await?;
    let (fleet_client, at_edge) = (FleetClient::at(&home), FleetClient::at(&edge));
    let options = HubOptions::new(home.kubeconfig()).args(chart.flags(&[]));
    let mut hub = Hub::start(&options)?;
    let mut member = Membership::join(mode, &mut hub, &home, &edge, "edge-1").await?;
    let places = [(&fleet_client, "self-cluster"), (&at_edge, "edge-1")];
    for (fleet_client, _) in places {
        fleet_client.create("acme", json!({})).await?;
    }
    let both = ("ClusterReady/edge-1", "True", "Installed");
    fleet_client.shows("acme", &[ALL_READY, both]).await?;
    let (mut before, mut holders) = (Vec::new(), Vec::new());
    for (fleet_client, _) in places {
        fleet_client.lease_renewed().await?;
        before.push(everything(fleet_client).await?);
        holders.push(fleet_client.holder().await?);
    }

    assert!(hub.stop().await?.success());
    if let Some(agent) = member.agent() {
        assert_eq!(at_edge.holder().await?, holders[1], "it stays");
        assert!(agent.stop().await?.success());
    }
    for (fleet_client, _) in places {
        assert_eq!(fleet_client.holder().await?, "", "the Lease is released");
    }
    member.start_again(&edge)?;
    at_edge.held_by_another(&holders[1]).await?;
    let mut hub = Hub::start(&options.in_place_of(&hub))?;
    for ((place, name), before) in places.into_iter().zip(&holders) {
        let now = place.held_by_another(before).await?;
        eventually(
            &format!("EdgeCluster {name} to name the new holder"),
            async || {
                let member = fleet_client
                    .member_shows(name, &[CONNECTED, HEALTHY])
                    .await?;
                let named = member.status.unwrap_or_default().lease_holder;
                let named = named.unwrap_or_default();
                // The hub knows an agent's replica, which is a prefix of its holder identity.
                let same = match name {
                    "edge-1" => !named.is_empty() && now.starts_with(&named),
                    _ => named == now,
                };
                ensure!(same, "it shows {named:?}, and the Lease {now:?}");
                Ok(Some(()))
            },
        )
        .await?;
        // After the Lease was held for a full period, every object has been reconciled.
        place.lease_renewed().await?;
    }
    for ((fleet_client, name), before) in places.into_iter().zip(before) {
        assert_eq!(everything(fleet_client).await?, before, "{name}");
    }
    for log in [hub.log(), member.actor(&mut hub).log()] {
        let log = log?;
        assert!(!log.contains("running helm"), "{log}");
    }
    Ok(())
}

/// Behaves like the deletion of a pod: SIGTERM, and SIGKILL only after the charts' grace period.
#[tokio::test]
async fn stopped_install_ends_in_time_and_is_repaired() -> TestResult {
    let gate = Gate::new()?;
    let (mut pair, _chart) = Scenario::new("term", Mode::Agent)
        .chart(gate.chart(), "gate")
        .start()
        .await?;
    let fleet_client = pair.fleet_client();
    let release = &pair.release("acme");
    let folder = pair.actor()?.log_path().parent().unwrap().to_owned();
    fleet_client.create("acme", json!({})).await?;
    let hook = gate::hook(&fleet_client, "acme", None).await?;

    assert!(pair.actor()?.stop().await?.success());
    assert!(helm_processes(&folder).is_empty());
    assert_eq!(fleet_client.holder().await?, "", "the Lease is released");

    pair.start_actor_again()?;
    let next = gate::hook(&fleet_client, "acme", Some(&hook)).await?;
    gate::open(&fleet_client, "acme", &next).await?;
    fleet_client.ready("acme").await?;
    let revisions = fleet_client.revisions("acme", release).await?;
    let deployed = revisions.iter().filter(|(_, status)| status == "deployed");
    assert_eq!(deployed.count(), 1, "{revisions:?}");
    Ok(())
}

async fn unreachable_member_is_reported_alone_and_recovers(mode: Mode) -> TestResult {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let (home, one, two) = tokio::try_join!(
        Cluster::start("lost-home", Parts::ControlPlane),
        Cluster::start("lost-1", Parts::WithControllers),
        Cluster::start("lost-2", Parts::WithControllers),
    )?;
    let (fleet_client, first, second) = (
        FleetClient::at(&home),
        FleetClient::at(&one),
        FleetClient::at(&two),
    );
    let options = HubOptions::new(home.kubeconfig()).args(chart.flags(&[]));
    let mut hub = Hub::start(&options.args(["--self-cluster=false"]))?;
    let mut members = Vec::new();
    for (name, cluster) in [("edge-1", &one), ("edge-2", &two)] {
        let joining = Membership::join(mode, &mut hub, &home, cluster, name);
        members.push(joining.await?);
    }
    for edge in [&first, &second] {
        edge.create("acme", json!({})).await?;
    }
    fleet_client.create("acme", json!({})).await?;
    let on_both = [
        ALL_READY,
        ("ClusterReady/edge-1", "True", "Installed"),
        ("ClusterReady/edge-2", "True", "Installed"),
    ];
    fleet_client.shows("acme", &on_both).await?;
    let installed = (first.releases().await?, second.releases().await?);

    one.stop_apiserver().await?;
    second.install("meanwhile").await?;
    fleet_client
        .member_shows("edge-1", &[("Connected", "False", "Unreachable")])
        .await?;
    fleet_client
        .member_shows("edge-2", &[CONNECTED, HEALTHY])
        .await?;
    let half = [
        ("Ready", "Unknown", "ClustersUnknown"),
        ("ClusterReady/edge-1", "Unknown", "ClusterUnreachable"),
        on_both[2],
    ];
    let tenant = fleet_client.shows("acme", &half).await?;
    let message = tenant.status.unwrap().last_message.unwrap();
    for words in ["1 of 2 clusters ready", "edge-1"] {
        assert!(message.contains(words), "{message}");
    }

    one.start_apiserver().await?;
    fleet_client
        .member_shows("edge-1", &[CONNECTED, HEALTHY])
        .await?;
    fleet_client.shows("acme", &on_both).await?;
    first.install("after").await?;
    let left = |now: BTreeMap<String, String>, before: &BTreeMap<String, String>| {
        now.into_iter()
            .filter(|(name, _)| before.contains_key(name))
            .collect::<BTreeMap<_, _>>()
    };
    assert_eq!(left(first.releases().await?, &installed.0), installed.0);
    assert_eq!(left(second.releases().await?, &installed.1), installed.1);
    for mut member in members {
        let log = member.actor(&mut hub).log()?;
        assert!(!log.contains("uninstall"), "{log}");
    }
    Ok(())
}
