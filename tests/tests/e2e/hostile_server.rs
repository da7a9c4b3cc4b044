//! Verifies that a member with endless API server responses affects no other member.

use std::fs;

use krypton_tests::{
    AnsweringProxy, Cluster, FalseResponse, Hub, HubOptions, Parts, ResponseFault, ServedChart,
    TestResult,
    answering_proxy::{READ_VERBS, Verb},
    assert_contains,
    fleet::{FleetClient, HEALTHY},
    home_and_edge,
};
use serde_json::json;

const EDGE: &str = "edge-1";
/// Far below the memory limit in the hub's chart.
const HUB_MEMORY: u64 = 640 << 20;

/// Home, which is also a member, and another member behind a proxy.
struct HostileFleet {
    proxy: AnsweringProxy,
    hub: Hub,
    at_home: FleetClient,
    at_edge: FleetClient,
    _clusters: [Cluster; 2],
    _chart: ServedChart,
}

impl HostileFleet {
    async fn start(name: &str) -> TestResult<Self> {
        let chart = ServedChart::small("replicaCount: 0").await?;
        let (home, edge) = home_and_edge(name, Parts::WithControllers).await?;
        let proxy = AnsweringProxy::start(&edge).await?;
        let options = HubOptions::new(home.kubeconfig()).args(chart.flags(&[]));
        let hub = Hub::start_ready(&options).await?;
        let at_home = FleetClient::new(&home);
        let kubeconfig = fs::read_to_string(proxy.kubeconfig())?;
        at_home.add_member(EDGE, &kubeconfig).await?;
        at_home.wait_for_member(EDGE, &[HEALTHY]).await?;
        Ok(Self {
            proxy,
            hub,
            at_home,
            at_edge: FleetClient::new(&edge),
            _clusters: [home, edge],
            _chart: chart,
        })
    }

    /// Verifies that the other member is reconciled, and that the hub's memory stays low.
    async fn check_others_served(&self, tenant: &str) -> TestResult {
        self.at_home.install(tenant).await?;
        let memory = self.hub.rss_bytes()?;
        assert!(memory < HUB_MEMORY, "{memory}");
        Ok(())
    }

    async fn check_end(&self, tenant: &str) -> TestResult {
        self.proxy.forward_all();
        self.at_edge.wait_ready(tenant).await?;
        Ok(())
    }
}

#[tokio::test]
async fn bombs_and_endless_answers_concern_their_own_member() -> TestResult {
    let fleet = HostileFleet::start("hostile").await?;
    // A gzip bomb ends the Helm run that reads it.
    fleet.proxy.inject(ResponseFault {
        verbs: &[Verb::List],
        resources: &["secrets"],
        response: FalseResponse::Bomb,
    });
    let fleet_client = &fleet.at_edge;
    fleet_client.create("edgy", json!({})).await?;
    let error = format!("ClusterError/{EDGE}");
    let expected = (error.as_str(), "True", "InstallFailed");
    let message = fleet_client.condition_message("edgy", &[expected]).await?;
    assert_contains!(message, "MiB of memory");
    fleet.check_others_served("acme").await?;
    fleet.check_end("edgy").await?;
    fleet.at_home.wait_for_member(EDGE, &[HEALTHY]).await?;

    fleet.proxy.inject(ResponseFault {
        verbs: READ_VERBS,
        resources: &[],
        response: FalseResponse::Endless,
    });
    let limited = ("Healthy", "False", "ResponseLimitExceeded");
    fleet.at_home.wait_for_member(EDGE, &[limited]).await?;
    fleet.check_others_served("beta").await?;
    fleet_client.create("later", json!({})).await?;
    fleet.check_end("later").await
}
