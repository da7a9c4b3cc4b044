//! Verifies that a member with endless API server responses affects no other member.

use std::fs;

use krypton_tests::{
    Answer, AnsweringProxy, Cluster, Hub, HubOptions, Lie, Parts, ServedChart, TestResult,
    answering_proxy::{READS, Verb},
    fleet::{FleetClient, HEALTHY, PATIENCE},
    home_and_edge,
};
use serde_json::json;

const EDGE: &str = "edge-1";
/// Far below the memory limit in the hub's chart.
const HUB_MEMORY: u64 = 640 << 20;

/// Home, which is also a member, and another member behind a proxy.
struct Scene {
    proxy: AnsweringProxy,
    hub: Hub,
    at_home: FleetClient,
    at_edge: FleetClient,
    _clusters: [Cluster; 2],
    _chart: ServedChart,
}

impl Scene {
    async fn set(name: &str) -> TestResult<Self> {
        let chart = ServedChart::small("replicaCount: 0").await?;
        let (home, edge) = home_and_edge(name, Parts::WithControllers).await?;
        let proxy = AnsweringProxy::before(&edge).await?;
        let options = HubOptions::new(home.kubeconfig()).args(chart.flags(&[]));
        let mut hub = Hub::start(&options)?;
        hub.ready(PATIENCE).await?;
        let at_home = FleetClient::at(&home);
        let kubeconfig = fs::read_to_string(proxy.kubeconfig())?;
        at_home.add_member(EDGE, &kubeconfig).await?;
        at_home.member_shows(EDGE, &[HEALTHY]).await?;
        Ok(Self {
            proxy,
            hub,
            at_home,
            at_edge: FleetClient::at(&edge),
            _clusters: [home, edge],
            _chart: chart,
        })
    }

    /// Verifies that the other member is reconciled, and that the hub's memory stays low.
    async fn others_are_served(&self) -> TestResult {
        let fleet_client = &self.at_home;
        fleet_client.install("acme").await?;
        let memory = self.hub.rss_bytes()?;
        assert!(memory < HUB_MEMORY, "{memory}");
        Ok(())
    }

    async fn ends_well(&self) {
        self.proxy.forward_all();
        let fleet_client = &self.at_edge;
        fleet_client.ready("edgy").await.unwrap();
    }
}

#[tokio::test]
async fn endless_answers_concern_their_own_member() -> TestResult {
    let scene = Scene::set("endless").await?;
    scene.proxy.lie(Lie {
        verbs: READS,
        resources: &[],
        answer: Answer::Endless,
    });
    let limited = ("Healthy", "False", "ResponseLimitExceeded");
    scene.at_home.member_shows(EDGE, &[limited]).await?;
    scene.others_are_served().await?;
    let created = scene.at_edge.create("edgy", json!({}));
    created.await?;
    scene.ends_well().await;
    Ok(())
}

#[tokio::test]
async fn gzip_bomb_ends_its_own_helm_run() -> TestResult {
    let scene = Scene::set("bomb").await?;
    scene.proxy.lie(Lie {
        verbs: &[Verb::List],
        resources: &["secrets"],
        answer: Answer::Bomb,
    });
    let fleet_client = &scene.at_edge;
    fleet_client.create("edgy", json!({})).await?;
    let error = format!("ClusterError/{EDGE}");
    let expected = (error.as_str(), "True", "InstallFailed");
    let message = fleet_client.message("edgy", &[expected]).await?;
    assert!(message.contains("MiB of memory"), "{message}");
    scene.others_are_served().await?;
    scene.ends_well().await;
    Ok(())
}
