//! Verifies that Krypton plans a release again when its Helm slot becomes free.

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use krypton_tests::{
    Gate, Mode, Pair, Scenario, ServedChart, TestResult, eventually, fleet::FleetClient, gate,
};
use krypton_types::names;
use serde_json::json;

const FIRST: &str = "{message: first}";
const SECOND: &str = "{message: second}";

/// A hub with one slot, whose Tenants may set values.
struct SlotHub {
    pair: Pair,
    fleet_client: FleetClient,
    chart: ServedChart,
}

impl SlotHub {
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
        gate::wait_for_hook(&self.fleet_client, name, "pre-install", None).await
    }

    /// Waits until this number of releases waits for the slot.
    async fn wait_for_queue(&mut self, priority: &str, count: usize) -> Result<()> {
        let series = format!("krypton_hub_helm_waiting{{priority=\"{priority}\"}} ");
        let line = format!("{series}{count}");
        let hub = self.pair.hub()?;
        eventually(&line, async || {
            let metrics = hub.metrics().await?;
            let sample = metrics.lines().find(|sample| sample.starts_with(&series));
            match sample {
                Some(sample) if sample == line => Ok(Some(())),
                sample => bail!("{sample:?}"),
            }
        })
        .await
    }

    /// Completes the run that occupies the slot, and waits for the next ones.
    async fn release(&self, name: &str, hook: &Pod) -> Result<()> {
        gate::complete_hook(&self.fleet_client, name, hook).await?;
        self.fleet_client.wait_ready(name).await?;
        self.fleet_client.wait_for_renewal().await
    }

    async fn check_revision(&self, name: &str, number: u32) -> Result<()> {
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

    async fn wait_for_new_revision(&self, name: &str, number: u32) -> Result<()> {
        let release = self.pair.release(name);
        self.fleet_client
            .wait_deployed(name, &release, number)
            .await
    }

    async fn pause(&self, paused: bool) {
        let spec = json!({"paused": paused});
        let patching = self.fleet_client.patch_member(self.pair.name(), spec);
        patching.await.unwrap();
    }
}

#[tokio::test]
async fn paused_reverted_or_deleted_release_leaves_slot_queue() -> TestResult {
    let mut stage = SlotHub::start("slots").await?;
    for name in ["acme", "gone", "kept"] {
        stage.install(name).await?;
    }

    // The values are reverted while the upgrades wait.
    let hook = stage.block("first").await?;
    stage.chart.write(SECOND)?;
    stage.wait_for_queue("low", 3).await?;
    stage.chart.write(FIRST)?;
    stage.wait_for_queue("low", 0).await?;
    stage.release("first", &hook).await?;
    for name in ["acme", "gone", "kept"] {
        stage.check_revision(name, 1).await?;
    }

    // Tenants are deleted, and one of them is orphaned.
    let hook = stage.block("second").await?;
    stage.chart.write(SECOND)?;
    stage.wait_for_queue("low", 4).await?;
    for name in ["gone", "kept"] {
        stage.fleet_client.delete(name).await?;
    }
    stage.wait_for_queue("high", 2).await?;
    stage.wait_for_queue("low", 2).await?;
    let orphan = names::ORPHAN_ANNOTATION;
    let fleet_client = &stage.fleet_client;
    fleet_client.annotate("kept", orphan, "true").await?;
    fleet_client.wait_gone("kept").await?;
    stage.wait_for_queue("high", 1).await?;
    stage.chart.write(FIRST)?;
    stage.wait_for_queue("low", 0).await?;
    gate::complete_hook(&stage.fleet_client, "second", &hook).await?;
    stage.fleet_client.wait_gone("gone").await?;
    let namespace = stage.fleet_client.namespace("gone").await?;
    assert_eq!(namespace, None, "its workspace is deleted too");
    stage.fleet_client.wait_ready("second").await?;

    // The member is paused.
    let hook = stage.block("third").await?;
    stage.chart.write(SECOND)?;
    stage.wait_for_queue("low", 3).await?;
    stage.pause(true).await;
    stage.wait_for_queue("low", 0).await?;
    let progress = stage.pair.condition("ClusterProgress");
    let paused = [(progress.as_str(), "False", "Paused")];
    for name in ["acme", "first", "second"] {
        stage.fleet_client.wait_for(name, &paused).await?;
    }
    gate::complete_hook(&stage.fleet_client, "third", &hook).await?;
    stage.wait_for_new_revision("third", 1).await?;
    stage.fleet_client.wait_for_renewal().await?;
    for name in ["acme", "first", "second", "kept"] {
        stage.check_revision(name, 1).await?;
    }
    for name in ["gone", "kept"] {
        let events = stage.fleet_client.events(name).await?;
        assert_eq!(events.get("HelmUpgradeStart"), None, "{events:?}");
    }
    stage.pause(false).await;
    stage.wait_for_new_revision("acme", 2).await?;
    Ok(())
}
