//! Shows recovery from power losses and killed processes during an install, upgrade, rollback or uninstall. The next
//! pass repairs the release, and running workloads stay available.

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use krypton_tests::{
    Gate, Mode, Pair, Parts, Scenario, ServedChart, TestResult, by_agent, eventually,
    fleet::{ALL_READY, FleetClient, condition, wait_for_helm_exit},
    gate,
};
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::{Value, json};

const EVENTS: [&str; 4] = ["pre-install", "pre-upgrade", "pre-rollback", "pre-delete"];

by_agent!(killed_helm_run_is_repaired_after_restart);

/// A member with single-pod Deployments. Each Helm run waits at a gate before its first action.
struct GatedMember {
    pair: Pair,
    fleet_client: FleetClient,
    chart: ServedChart,
}

impl GatedMember {
    async fn start(name: &str, mode: Mode, more: &[&str]) -> TestResult<Self> {
        let gate = Gate::everywhere()?;
        let (pair, chart) = Scenario::new(name, mode)
            .parts(Parts::WithPods)
            .chart(gate.chart(), "gates")
            .values(&json!({"gates": EVENTS}).to_string())
            .flags(more)
            .start()
            .await?;
        Ok(Self {
            fleet_client: pair.fleet_client(),
            pair,
            chart,
        })
    }

    fn set_values(&self, more: &Value) {
        let mut values = json!({"gates": EVENTS});
        for (key, value) in more.as_object().unwrap() {
            values[key] = value.clone();
        }
        self.chart.write(&values.to_string()).unwrap();
    }

    async fn install(&self, name: &str) -> Deployment {
        self.fleet_client.create(name, json!({})).await.unwrap();
        self.complete_hook(name, "pre-install", None).await;
        self.wait_ready(name).await.unwrap()
    }

    async fn wait_for_hook(&self, name: &str, event: &str, known: Option<&Pod>) -> Pod {
        gate::wait_for_hook(&self.fleet_client, name, event, known)
            .await
            .unwrap()
    }

    async fn complete_hook(&self, name: &str, event: &str, known: Option<&Pod>) {
        gate::complete_next_hook(&self.fleet_client, name, event, known)
            .await
            .unwrap();
    }

    /// Waits until the Tenant is ready. Its only deployed revision is the newest, and no revision is pending.
    async fn wait_ready(&self, name: &str) -> TestResult<Deployment> {
        self.fleet_client.wait_ready(name).await?;
        let release = self.pair.release(name);
        let what = format!("one deployed revision of {release}");
        eventually(&what, async || {
            let revisions = self.fleet_client.revisions(name, &release).await?;
            let deployed = revisions.iter().filter(|(_, status)| status == "deployed");
            ensure!(deployed.count() == 1, "{revisions:?}");
            let newest = revisions
                .last()
                .is_some_and(|(_, status)| status == "deployed");
            ensure!(newest, "{revisions:?}");
            Ok(Some(()))
        })
        .await?;
        Ok(self.serving_deployment(name).await?)
    }

    /// Returns the release's only Deployment, which must have an available pod.
    async fn serving_deployment(&self, name: &str) -> Result<Deployment> {
        let api: Api<Deployment> = Api::namespaced(self.fleet_client.client.clone(), name);
        let deployments = api.list(&ListParams::default()).await?.items;
        let [deployment] = deployments.as_slice() else {
            bail!("{} Deployments", deployments.len());
        };
        let status = deployment.status.clone().unwrap_or_default();
        ensure!(status.available_replicas == Some(1), "{status:?}");
        Ok(deployment.clone())
    }

    /// Opens the gate at `event` for every run, until the Tenant is ready or gone.
    async fn complete_all_hooks(&self, name: &str, event: &str) {
        let pods: Api<Pod> = Api::namespaced(self.fleet_client.client.clone(), name);
        let what = format!("{name} to get past {event}");
        eventually(&what, async || {
            for pod in pods.list(&ListParams::default()).await? {
                let status = pod.status.clone().unwrap_or_default();
                let ended = status.phase.as_deref() == Some("Succeeded");
                if pod.name_any().ends_with(event) && !ended {
                    gate::complete_hook(&self.fleet_client, name, &pod).await?;
                }
            }
            let Some(tenant) = self.fleet_client.tenants().get_opt(name).await? else {
                return Ok(Some(()));
            };
            let conditions = tenant.status.unwrap_or_default().conditions;
            match condition(&conditions, ALL_READY.0) {
                Some(ready) if ready.status == ALL_READY.1 => Ok(Some(())),
                other => bail!("{other:?}"),
            }
        })
        .await
        .unwrap();
    }

    async fn wait_gone(&self, name: &str) {
        self.fleet_client.wait_gone(name).await.unwrap();
        let revisions = self
            .fleet_client
            .revisions(name, &self.pair.release(name))
            .await;
        assert_eq!(revisions.unwrap(), []);
    }

    /// Stops etcd and the API server together, and starts them again.
    async fn lose_power(&self) {
        self.pair.cluster().power_off().await.unwrap();
        self.pair.cluster().power_on().await.unwrap();
    }
}

#[tokio::test]
async fn member_power_loss_during_helm_run_is_repaired() -> TestResult {
    let mut member = GatedMember::start("power", Mode::Agent, &[]).await?;
    member.fleet_client.create("acme", json!({})).await?;
    member.wait_for_hook("acme", "pre-install", None).await;
    member.lose_power().await;
    // Either the run that survived the power loss or the next one finishes the installation.
    member.complete_all_hooks("acme", "pre-install").await;
    let before = member.wait_ready("acme").await?;

    member.set_values(&json!({"message": "second"}));
    member.wait_for_hook("acme", "pre-upgrade", None).await;
    member.lose_power().await;
    let serving = eventually("the API server to respond", async || {
        member.serving_deployment("acme").await.map(Some)
    });
    assert_eq!(serving.await?.uid(), before.uid());
    member.complete_all_hooks("acme", "pre-upgrade").await;
    assert_eq!(member.wait_ready("acme").await?.uid(), before.uid());

    member.fleet_client.delete("acme").await?;
    member.wait_for_hook("acme", "pre-delete", None).await;
    member.lose_power().await;
    member.complete_all_hooks("acme", "pre-delete").await;
    member.wait_gone("acme").await;
    let log = member.pair.actor()?.log()?;
    assert!(!log.contains("panicked"), "{log}");
    Ok(())
}

async fn killed_helm_run_is_repaired_after_restart(mode: Mode) -> TestResult {
    let extra_flags = ["--remediation=rollback", "--helm-timeout=20s"];
    let mut member = GatedMember::start("killed", mode, &extra_flags).await?;
    let mut before = Vec::new();
    for name in ["upgraded", "rolled", "going"] {
        before.push(member.install(name).await);
    }
    let log = member.pair.actor()?.log_path().to_owned();
    let folder = log.parent().unwrap();

    member.fleet_client.delete("going").await?;
    let going = member.wait_for_hook("going", "pre-delete", None).await;
    member.set_values(&json!({"message": "second", "brokenIn": "rolled"}));
    let upgraded = member.wait_for_hook("upgraded", "pre-upgrade", None).await;
    let rolled = member.wait_for_hook("rolled", "pre-upgrade", None).await;
    gate::complete_hook(&member.fleet_client, "rolled", &rolled).await?;
    member.wait_for_hook("rolled", "pre-rollback", None).await;
    member.pair.actor()?.kill9().await?;
    wait_for_helm_exit(folder).await?;
    member.set_values(&json!({"message": "third"}));
    member.pair.start_actor_again()?;

    member
        .complete_hook("going", "pre-delete", Some(&going))
        .await;
    member
        .complete_hook("upgraded", "pre-upgrade", Some(&upgraded))
        .await;
    member.wait_gone("going").await;
    assert_eq!(member.wait_ready("upgraded").await?.uid(), before[0].uid());
    // The pending rollback blocks other runs until its grace period ends. The earlier workload stays available.
    assert_eq!(
        member.serving_deployment("rolled").await?.uid(),
        before[1].uid()
    );
    member
        .complete_hook("rolled", "pre-upgrade", Some(&rolled))
        .await;
    assert_eq!(member.wait_ready("rolled").await?.uid(), before[1].uid());
    Ok(())
}
