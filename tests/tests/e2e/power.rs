//! Shows recovery from power losses and killed processes during an install, upgrade, rollback or uninstall. The next
//! pass repairs the release, and running workloads stay available.

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use krypton_tests::{
    Gate, Mode, Pair, Parts, Scenario, ServedChart, TestResult, by_agent, eventually,
    fleet::{ALL_READY, FleetClient, condition, helm_ends},
    gate,
};
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::{Value, json};

const EVENTS: [&str; 4] = ["pre-install", "pre-upgrade", "pre-rollback", "pre-delete"];

by_agent!(killed_helm_run_is_repaired_after_restart);

/// A member with single-pod Deployments. Each Helm run waits at a gate before its first action.
struct Scene {
    pair: Pair,
    fleet_client: FleetClient,
    chart: ServedChart,
    _gate: Gate,
}

impl Scene {
    async fn set(name: &str, mode: Mode, more: &[&str]) -> TestResult<Self> {
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
            _gate: gate,
        })
    }

    fn write(&self, more: &Value) {
        let mut values = json!({"gates": EVENTS});
        for (key, value) in more.as_object().unwrap() {
            values[key] = value.clone();
        }
        self.chart.write(&values.to_string()).unwrap();
    }

    async fn install(&self, name: &str) -> Deployment {
        self.fleet_client.create(name, json!({})).await.unwrap();
        self.pass(name, "pre-install", None).await;
        self.ready(name).await.unwrap()
    }

    async fn at(&self, name: &str, event: &str, known: Option<&Pod>) -> Pod {
        gate::at(&self.fleet_client, name, event, known)
            .await
            .unwrap()
    }

    async fn pass(&self, name: &str, event: &str, known: Option<&Pod>) {
        gate::pass(&self.fleet_client, name, event, known)
            .await
            .unwrap();
    }

    /// Waits until the Tenant is ready. Its only deployed revision is the newest, and no revision is pending.
    async fn ready(&self, name: &str) -> TestResult<Deployment> {
        self.fleet_client.ready(name).await?;
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
        Ok(self.serves(name).await?)
    }

    /// Returns the release's only Deployment, which must have an available pod.
    async fn serves(&self, name: &str) -> Result<Deployment> {
        let api: Api<Deployment> = Api::namespaced(self.fleet_client.client.clone(), name);
        let found = api.list(&ListParams::default()).await?.items;
        let [deployment] = found.as_slice() else {
            bail!("{} Deployments", found.len());
        };
        let status = deployment.status.clone().unwrap_or_default();
        ensure!(status.available_replicas == Some(1), "{status:?}");
        Ok(deployment.clone())
    }

    /// Opens the gate at `event` for every run, until the Tenant is ready or gone.
    async fn pass_all(&self, name: &str, event: &str) {
        let pods: Api<Pod> = Api::namespaced(self.fleet_client.client.clone(), name);
        let what = format!("{name} to get past {event}");
        eventually(&what, async || {
            for pod in pods.list(&ListParams::default()).await? {
                let status = pod.status.clone().unwrap_or_default();
                let ended = status.phase.as_deref() == Some("Succeeded");
                if pod.name_any().ends_with(event) && !ended {
                    gate::open(&self.fleet_client, name, &pod).await?;
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

    async fn gone(&self, name: &str) {
        self.fleet_client.gone(name).await.unwrap();
        let left = self
            .fleet_client
            .revisions(name, &self.pair.release(name))
            .await;
        assert_eq!(left.unwrap(), []);
    }

    /// Stops etcd and the API server together, and starts them again.
    async fn lose_power(&self) {
        self.pair.cluster().power_off().await.unwrap();
        self.pair.cluster().power_on().await.unwrap();
    }
}

#[tokio::test]
async fn member_power_loss_during_helm_run_is_repaired() -> TestResult {
    let mut scene = Scene::set("power", Mode::Agent, &[]).await?;
    scene.fleet_client.create("acme", json!({})).await?;
    scene.at("acme", "pre-install", None).await;
    scene.lose_power().await;
    // Either the run that survived the power loss or the next one finishes the installation.
    scene.pass_all("acme", "pre-install").await;
    let before = scene.ready("acme").await?;

    scene.write(&json!({"message": "second"}));
    scene.at("acme", "pre-upgrade", None).await;
    scene.lose_power().await;
    let serving = eventually("the API server to respond", async || {
        scene.serves("acme").await.map(Some)
    });
    assert_eq!(serving.await?.uid(), before.uid());
    scene.pass_all("acme", "pre-upgrade").await;
    assert_eq!(scene.ready("acme").await?.uid(), before.uid());

    scene.fleet_client.delete("acme").await?;
    scene.at("acme", "pre-delete", None).await;
    scene.lose_power().await;
    scene.pass_all("acme", "pre-delete").await;
    scene.gone("acme").await;
    let log = scene.pair.actor()?.log()?;
    assert!(!log.contains("panicked"), "{log}");
    Ok(())
}

async fn killed_helm_run_is_repaired_after_restart(mode: Mode) -> TestResult {
    // An agent has its own remediation flags, so only the proxy rolls back here.
    let rolls_back = mode == Mode::Proxy;
    let more = ["--remediation=rollback", "--helm-timeout=20s"];
    let mut scene = Scene::set("killed", mode, &more).await?;
    let mut before = Vec::new();
    for name in ["upgraded", "rolled", "going"] {
        before.push(scene.install(name).await);
    }
    let log = scene.pair.actor()?.log_path().to_owned();
    let folder = log.parent().unwrap();

    scene.fleet_client.delete("going").await?;
    let going = scene.at("going", "pre-delete", None).await;
    scene.write(&json!({"message": "second", "brokenIn": "rolled"}));
    let upgraded = scene.at("upgraded", "pre-upgrade", None).await;
    let rolled = scene.at("rolled", "pre-upgrade", None).await;
    if rolls_back {
        gate::open(&scene.fleet_client, "rolled", &rolled).await?;
        scene.at("rolled", "pre-rollback", None).await;
    }
    scene.pair.actor()?.kill9().await?;
    helm_ends(folder).await?;
    scene.write(&json!({"message": "third"}));
    scene.pair.start_actor_again()?;

    scene.pass("going", "pre-delete", Some(&going)).await;
    scene.pass("upgraded", "pre-upgrade", Some(&upgraded)).await;
    scene.gone("going").await;
    assert_eq!(scene.ready("upgraded").await?.uid(), before[0].uid());
    // The pending rollback blocks other runs until its grace period ends. The earlier workload stays available.
    assert_eq!(scene.serves("rolled").await?.uid(), before[1].uid());
    scene.pass("rolled", "pre-upgrade", Some(&rolled)).await;
    assert_eq!(scene.ready("rolled").await?.uid(), before[1].uid());
    Ok(())
}
