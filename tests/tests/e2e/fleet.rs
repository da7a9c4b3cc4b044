//! Verifies members: discovery by Secrets, kubeconfig rotation, and duplicates.

use anyhow::Result;
use krypton_tests::{
    Cluster, Hub, HubOptions, Membership, Mode, Parts, ServedChart, TestResult, by_agent,
    fleet::{ALL_READY, CONNECTED, ExpectedCondition, FleetClient, HEALTHY, RESOLVED},
};
use serde_json::json;

by_agent!(older_of_duplicate_members_acts_alone);

/// Returns the conditions of a healthy member on home.
fn healthy_conditions(mode: Mode) -> Vec<ExpectedCondition<'static>> {
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
    _chart: ServedChart,
}

async fn start(name: &str, parts: Parts, more: &[&str]) -> Result<Fleet> {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let home = Cluster::start(name, parts).await?;
    let options = HubOptions::new(home.kubeconfig()).args(chart.flags(more));
    let hub = Hub::start(&options)?;
    let fleet_client = FleetClient::new(&home);
    Ok(Fleet {
        home,
        fleet_client,
        hub,
        _chart: chart,
    })
}

impl Fleet {
    async fn join(&mut self, mode: Mode, edge: &Cluster, name: &str) -> Result<Membership> {
        Membership::join(mode, &mut self.hub, &self.home, edge, name).await
    }
}

async fn older_of_duplicate_members_acts_alone(mode: Mode) -> TestResult {
    let (mut fleet, edge) = tokio::try_join!(
        start("double-home", Parts::WithControllers, &[]),
        Cluster::start("double-edge", Parts::WithControllers),
    )?;
    let _member = fleet.join(mode, &edge, "edge-b").await?;
    let (fleet_client, at_edge) = (&fleet.fleet_client, FleetClient::new(&edge));
    let healthy = healthy_conditions(mode);
    fleet_client.wait_for_member("edge-b", &healthy).await?;
    // The age decides, not the name.
    fleet_client
        .add_member("edge-a", &edge.kubeconfig_with_token())
        .await?;
    let home_again = std::fs::read_to_string(fleet.home.kubeconfig())?;
    fleet_client.add_member("home-again", &home_again).await?;
    let double = ("Healthy", "False", "DuplicateCluster");
    for (name, other) in [("edge-a", "edge-b"), ("home-again", "self-cluster")] {
        let message = fleet_client
            .member_condition_message(name, &[double])
            .await?;
        assert!(
            message.contains(&format!("member {other} represents")),
            "{message}"
        );
    }

    at_edge.install("acme").await?;
    fleet_client.create("acme", json!({})).await?;
    let both = [
        ALL_READY,
        ("ClusterReady/self-cluster", "True", "Installed"),
        ("ClusterReady/edge-b", "True", "Installed"),
    ];
    let tenant = fleet_client.wait_for("acme", &both).await?;
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
    let releases = |releases_by_name: std::collections::BTreeMap<String, String>| -> Vec<String> {
        releases_by_name.into_keys().collect()
    };
    let on_edge = releases(at_edge.releases().await?);
    assert_eq!(on_edge, only(&["sh.helm.release.v1.tenant-acme-edge-b.v1"]));
    let on_home = releases(fleet_client.releases().await?);
    assert_eq!(
        on_home,
        only(&["sh.helm.release.v1.tenant-acme-self-cluster.v1"])
    );
    fleet_client.wait_for_member("edge-b", &healthy).await?;
    assert!(fleet.hub.log()?.contains("DuplicateCluster"));
    Ok(())
}
