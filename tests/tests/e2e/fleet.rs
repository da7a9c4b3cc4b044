//! Verifies members: discovery by Secrets, kubeconfig rotation, and duplicates.

use krypton_tests::{
    Hub, HubOptions, Membership, Mode, Parts, ServedChart, TestResult, assert_contains, by_agent,
    fleet::{ALL_READY, CONNECTED, ExpectedCondition, FleetClient, HEALTHY, RESOLVED},
    home_and_edge,
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

async fn older_of_duplicate_members_acts_alone(mode: Mode) -> TestResult {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let (home, edge) = home_and_edge("double", Parts::WithControllers).await?;
    let options = HubOptions::new(home.kubeconfig()).args(chart.flags(&[]));
    let mut hub = Hub::start(&options)?;
    let _member = Membership::join(mode, &mut hub, &home, &edge, "edge-b").await?;
    let (fleet_client, at_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    let healthy = healthy_conditions(mode);
    fleet_client.wait_for_member("edge-b", &healthy).await?;
    // The age decides, not the name.
    fleet_client
        .add_member("edge-a", &edge.kubeconfig_with_token())
        .await?;
    let home_again = std::fs::read_to_string(home.kubeconfig())?;
    fleet_client.add_member("home-again", &home_again).await?;
    let double = ("Healthy", "False", "DuplicateCluster");
    for (name, other) in [("edge-a", "edge-b"), ("home-again", "self-cluster")] {
        let message = fleet_client
            .member_condition_message(name, &[double])
            .await?;
        assert_contains!(message, format!("member {other} represents"));
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
    for (client, member) in [(&at_edge, "edge-b"), (&fleet_client, "self-cluster")] {
        let releases = client.releases().await?;
        let only = format!("sh.helm.release.v1.tenant-acme-{member}.v1");
        assert!(releases.keys().eq([&only]), "{releases:?}");
    }
    fleet_client.wait_for_member("edge-b", &healthy).await?;
    assert_contains!(hub.log()?, "DuplicateCluster");
    Ok(())
}
