//! Verifies that Krypton plans a release again when its Helm slot becomes free.

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    Gate, Merge as _, Mode, Pair, Scenario, ServedChart, TestResult, eventually,
    fleet::FleetClient, gate,
};
use krypton_types::names;
use kube::Api;
use serde_json::json;

const FIRST: &str = "{message: first}";
const SECOND: &str = "{message: second}";

/// A hub with one slot, whose Tenants may set values.
struct Stage {
    pair: Pair,
    fleet_client: FleetClient,
    chart: ServedChart,
}

impl Stage {
    async fn start(name: &str) -> Result<Self> {
        let gate = Gate::everywhere()?;
        let flags = [
            "--max-concurrent-helm=1",
            "--tenant-values",
            "--wait=none",
            "--helm-timeout=10m",
        ];
        let scenario = Scenario::new(name, Mode::SelfCluster).flags(&flags);
        let gates = scenario.chart(gate.chart(), "gates").values(FIRST);
        let (pair, chart) = gates.start().await?;
        Ok(Self {
            fleet_client: pair.fleet_client(),
            pair,
            chart,
        })
    }

    async fn install(&self, name: &str) -> Result<()> {
        self.fleet_client.install(name).await?;
        Ok(())
    }

    /// Occupies the only slot with an installation that waits for its hook.
    async fn block(&self, name: &str) -> Result<Pod> {
        let spec = json!({"values": {"gates": ["pre-install"]}});
        self.fleet_client.create(name, spec).await?;
        gate::at(&self.fleet_client, name, "pre-install", None).await
    }

    /// Waits until this number of releases waits for the slot.
    async fn waiting(&mut self, priority: &str, count: usize) -> Result<()> {
        let series = format!("krypton_hub_helm_waiting{{priority=\"{priority}\"}} ");
        let line = format!("{series}{count}");
        let hub = self.pair.hub()?;
        eventually(&line, async || {
            let metrics = hub.metrics().await?;
            let found = metrics.lines().find(|found| found.starts_with(&series));
            match found {
                Some(found) if found == line => Ok(Some(())),
                found => bail!("{found:?}"),
            }
        })
        .await
    }

    /// Completes the run that occupies the slot, and waits for the next ones.
    async fn release(&self, name: &str, hook: &Pod) -> Result<()> {
        gate::open(&self.fleet_client, name, hook).await?;
        self.fleet_client.ready(name).await?;
        self.fleet_client.lease_renewed().await
    }

    async fn is(&self, name: &str, number: u32) -> Result<()> {
        let revisions = self
            .fleet_client
            .revisions(name, &self.pair.release(name))
            .await?;
        let (newest, status) = revisions.last().context("no revision")?;
        if (*newest, status.as_str()) != (number, "deployed") {
            bail!("{name}: {revisions:?}");
        }
        Ok(())
    }

    async fn becomes(&self, name: &str, number: u32) -> Result<()> {
        let release = self.pair.release(name);
        self.fleet_client
            .newest_is(name, &release, number, "deployed")
            .await
    }

    async fn pause(&self, paused: bool) {
        let members: Api<EdgeCluster> = Api::all(self.fleet_client.client.clone());
        members
            .merge(self.pair.name(), &json!({"spec": {"paused": paused}}))
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn paused_or_reverted_upgrade_leaves_the_slot_queue() -> TestResult {
    let mut stage = Stage::start("slots").await?;
    stage.install("acme").await?;

    // The values are reverted while the upgrade waits.
    let hook = stage.block("first").await?;
    stage.chart.write(SECOND)?;
    stage.waiting("low", 1).await?;
    stage.chart.write(FIRST)?;
    stage.waiting("low", 0).await?;
    stage.release("first", &hook).await?;
    stage.is("acme", 1).await?;

    // The member is paused.
    let hook = stage.block("second").await?;
    stage.chart.write(SECOND)?;
    stage.waiting("low", 2).await?;
    stage.pause(true).await;
    stage.waiting("low", 0).await?;
    let progress = stage.pair.condition("ClusterProgress");
    let paused = [(progress.as_str(), "False", "Paused")];
    stage.fleet_client.shows("acme", &paused).await?;
    stage.fleet_client.shows("first", &paused).await?;
    gate::open(&stage.fleet_client, "second", &hook).await?;
    stage.becomes("second", 1).await?;
    stage.fleet_client.lease_renewed().await?;
    stage.is("acme", 1).await?;
    stage.is("first", 1).await?;
    stage.pause(false).await;
    stage.becomes("acme", 2).await?;
    Ok(())
}

#[tokio::test]
async fn deletion_and_orphan_annotation_redirect_a_waiting_run() -> TestResult {
    let mut stage = Stage::start("redirect").await?;
    for name in ["gone", "kept"] {
        stage.install(name).await?;
    }
    let hook = stage.block("first").await?;
    stage.chart.write(SECOND)?;
    stage.waiting("low", 2).await?;
    for name in ["gone", "kept"] {
        stage.fleet_client.delete(name).await?;
    }
    stage.waiting("high", 2).await?;
    stage.waiting("low", 0).await?;

    let orphan = names::ORPHAN_ANNOTATION;
    let fleet_client = &stage.fleet_client;
    fleet_client.annotate("kept", orphan, "true").await?;
    fleet_client.gone("kept").await?;
    stage.waiting("high", 1).await?;
    stage.release("first", &hook).await?;
    stage.fleet_client.gone("gone").await?;

    stage.is("kept", 1).await?;
    let left = stage.fleet_client.namespace("gone").await?;
    assert_eq!(left, None, "its workspace is deleted too");
    for name in ["gone", "kept"] {
        let events = stage.fleet_client.events(name).await?;
        assert_eq!(events.get("HelmUpgradeStart"), None, "{events:?}");
    }
    Ok(())
}
