//! Kills Helm at every point at which it can wait, and verifies that the next pass repairs the release.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Result, bail, ensure};
use futures::StreamExt;
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Pod},
};
use krypton_runtime::newest::Newest as _;
use krypton_tests::{
    Gate, Mode, Pair, Parts, STEP_DEADLINE, Scenario, ServedChart, TestResult, eventually,
    fleet::{FleetClient, kill_helm},
    gate,
};
use krypton_types::names;
use kube::{
    Api, ResourceExt,
    api::ListParams,
    runtime::{WatchStreamExt, watcher},
};
use serde_json::json;
use tokio::{sync::watch, task::JoinHandle};

/// Availability of the Deployments in a namespace.
#[derive(Clone, Copy, PartialEq)]
enum Availability {
    NotYet,
    Always,
    Stopped,
}

/// A watch that verifies that Deployments stay available.
struct AvailabilityWatch {
    availability: watch::Receiver<Availability>,
    task: JoinHandle<()>,
}

impl AvailabilityWatch {
    /// Returns when a Deployment is available.
    async fn watch(fleet_client: &FleetClient, namespace: &str) -> Self {
        let api: Api<Deployment> = Api::namespaced(fleet_client.client.clone(), namespace);
        let (seen, mut availability) = watch::channel(Availability::NotYet);
        let task = tokio::spawn(async move {
            let mut events = watcher(api, watcher::Config::default())
                .default_backoff()
                .boxed();
            while let Some(event) = events.next().await {
                let available = match event {
                    Ok(watcher::Event::Apply(object) | watcher::Event::InitApply(object)) => object
                        .status
                        .is_some_and(|status| status.available_replicas.is_some()),
                    Ok(watcher::Event::Delete(_)) => false,
                    _ => continue,
                };
                seen.send_modify(|availability| match (*availability, available) {
                    (Availability::NotYet, true) => *availability = Availability::Always,
                    (Availability::Always, false) => *availability = Availability::Stopped,
                    _ => {}
                });
            }
        });
        let first = availability.wait_for(|availability| *availability != Availability::NotYet);
        let first = tokio::time::timeout(STEP_DEADLINE, first).await;
        drop(first.expect("no Deployment becomes available").unwrap());
        Self { availability, task }
    }

    fn end(self) -> bool {
        self.task.abort();
        self.availability.get() == Availability::Always
    }
}

/// Returns names and UIDs of a namespace's objects: ConfigMaps of the release, Deployments, and pods of hooks.
async fn objects(fleet_client: &FleetClient, namespace: &str) -> Result<BTreeMap<String, String>> {
    let of_helm = ListParams::default().labels("app.kubernetes.io/managed-by=Helm");
    let maps: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), namespace);
    let deployments: Api<Deployment> = Api::namespaced(fleet_client.client.clone(), namespace);
    let pods: Api<Pod> = Api::namespaced(fleet_client.client.clone(), namespace);
    let mut uids = BTreeMap::new();
    let mut put = |kind: &str, object: &dyn Fn() -> (String, Option<String>)| {
        let (name, uid) = object();
        uids.insert(format!("{kind}/{name}"), uid.unwrap_or_default());
    };
    for map in maps.list(&of_helm).await? {
        put("ConfigMap", &|| (map.name_any(), map.uid()));
    }
    for deployment in deployments.list(&of_helm).await? {
        put("Deployment", &|| (deployment.name_any(), deployment.uid()));
    }
    for pod in pods.list(&ListParams::default()).await? {
        if pod.owner_references().is_empty() {
            put("Pod", &|| (pod.name_any(), pod.uid()));
        }
    }
    Ok(uids)
}

/// Waits until the newest revision is the only deployed one, no lock is left, and all objects are from the chart.
async fn wait_complete(
    fleet_client: &FleetClient,
    namespace: &str,
    release: &str,
) -> Result<BTreeMap<String, String>> {
    let revisions = fleet_client.revisions(namespace, release).await?;
    let deployed = revisions.iter().filter(|(_, status)| status == "deployed");
    ensure!(deployed.count() == 1, "{revisions:?}");
    ensure!(
        revisions
            .last()
            .is_some_and(|(_, status)| status == "deployed"),
        "{revisions:?}"
    );
    let locked = |status: &String| status.contains("ing");
    ensure!(
        !revisions.iter().any(|(_, status)| locked(status)),
        "{revisions:?}"
    );
    let remaining = objects(fleet_client, namespace).await?;
    let expected = [
        format!("ConfigMap/{release}"),
        format!("Deployment/{release}"),
    ];
    ensure!(remaining.keys().eq(expected.iter()), "{remaining:?}");
    Ok(remaining)
}

/// The member and its chart with gates.
struct GatedMember {
    pair: Pair,
    chart: ServedChart,
}

impl GatedMember {
    async fn start(name: &str, events: &[&str], more: &[&str]) -> Result<Self> {
        let gate = Gate::everywhere()?;
        let (pair, chart) = Scenario::new(name, Mode::SelfCluster)
            .parts(Parts::WithPods)
            .chart(gate.chart(), "gates")
            .values(&json!({"gates": events}).to_string())
            .flags(more)
            .start()
            .await?;
        Ok(Self { pair, chart })
    }

    fn folder(&mut self) -> Result<PathBuf> {
        let log = self.pair.actor()?.log_path();
        Ok(log.parent().map(PathBuf::from).unwrap_or_default())
    }

    /// Waits for Helm at `event`, and kills it.
    async fn kill_at(&mut self, namespace: &str, event: &str) -> Result<Pod> {
        let fleet_client = self.pair.fleet_client();
        let hook = gate::wait_for_hook(&fleet_client, namespace, event, None).await?;
        let folder = self.folder()?;
        let killed = kill_helm(&folder)?;
        ensure!(killed == 1, "{killed} Helm processes ran at {event}");
        Ok(hook)
    }
}

#[tokio::test]
async fn killed_helm_is_repaired_by_next_pass() -> TestResult {
    let mut member = GatedMember::start("killed", &gate::EVENTS, &[]).await?;
    let fleet_client = member.pair.fleet_client();
    let release = member.pair.release("acme");
    fleet_client.create("acme", json!({})).await?;

    // Before the first apply, and after the last.
    let hook = member.kill_at("acme", "pre-install").await?;
    fleet_client
        .wait_for_revision("acme", &release, 1, "pending-install")
        .await?;
    gate::complete_next_hook(&fleet_client, "acme", "pre-install", Some(&hook)).await?;
    let hook = member.kill_at("acme", "post-install").await?;
    let created = objects(&fleet_client, "acme").await?;
    let serving = AvailabilityWatch::watch(&fleet_client, "acme").await;
    // The repair runs the hooks of an installation, and no hooks of an upgrade.
    gate::complete_next_hook(&fleet_client, "acme", "pre-install", None).await?;
    gate::complete_next_hook(&fleet_client, "acme", "post-install", Some(&hook)).await?;
    fleet_client.wait_ready("acme").await?;
    let installed = wait_complete(&fleet_client, "acme", &release).await?;
    for (name, uid) in &installed {
        assert_eq!(created.get(name), Some(uid), "{name} was recreated");
    }

    // An upgrade that creates an object outside the next revision.
    let second = json!({"gates": gate::EVENTS, "message": "second", "extra": "left-over"});
    member.chart.write(&second.to_string())?;
    let hook = member.kill_at("acme", "pre-upgrade").await?;
    gate::complete_next_hook(&fleet_client, "acme", "pre-upgrade", Some(&hook)).await?;
    let hook = member.kill_at("acme", "post-upgrade").await?;
    let remaining = objects(&fleet_client, "acme").await?;
    assert!(
        remaining.contains_key("ConfigMap/left-over"),
        "{remaining:?}"
    );
    let third = json!({"gates": gate::EVENTS, "message": "third"});
    member.chart.write(&third.to_string())?;
    gate::complete_next_hook(&fleet_client, "acme", "pre-upgrade", None).await?;
    gate::complete_next_hook(&fleet_client, "acme", "post-upgrade", Some(&hook)).await?;
    fleet_client.wait_ready("acme").await?;
    eventually("no leftover objects", async || {
        wait_complete(&fleet_client, "acme", &release)
            .await
            .map(Some)
    })
    .await
    .map(|now| assert_eq!(now, installed))?;
    assert!(serving.end(), "the release kept serving");

    fleet_client.delete("acme").await?;
    let hook = member.kill_at("acme", "pre-delete").await?;
    let tenant = fleet_client.tenants().get("acme").await?;
    let deleting = tenant.annotations().get(names::DELETING_ANNOTATION);
    assert_eq!(deleting.map(String::as_str), Some("true"));
    let revisions = fleet_client.revisions("acme", &release).await?;
    assert_eq!(revisions.last().unwrap().1, "uninstalling");
    gate::complete_next_hook(&fleet_client, "acme", "pre-delete", Some(&hook)).await?;
    let hook = member.kill_at("acme", "post-delete").await?;
    gate::complete_next_hook(&fleet_client, "acme", "pre-delete", None).await?;
    gate::complete_next_hook(&fleet_client, "acme", "post-delete", Some(&hook)).await?;
    fleet_client.wait_gone("acme").await?;
    assert!(fleet_client.releases().await?.is_empty());
    Ok(())
}

/// Krypton breaks a foreign lock after three times this timeout and a minute.
const SHORT_TIMEOUT: &str = "--helm-timeout=5s";

/// Runs Helm as a user, until it waits at `event`, and kills it.
async fn kill_manual_run_at(
    member: &GatedMember,
    namespace: &str,
    event: &str,
    args: &[&str],
) -> Result<()> {
    let fleet_client = member.pair.fleet_client();
    let in_namespace = ["--namespace", namespace, "--timeout=170s"];
    let args = args.iter().chain(&in_namespace).copied();
    tokio::select! {
        ended = member.pair.cluster().helm(args) => bail!("helm ended before it was killed: {ended:?}"),
        hook = gate::wait_for_hook(&fleet_client, namespace, event, None) => hook.map(drop),
    }
}

#[tokio::test]
async fn dead_manual_helm_run_is_repaired_without_uninstall() -> TestResult {
    let events = ["pre-rollback", "pre-delete", "post-delete"];
    let member = GatedMember::start("byhand", &events, &[SHORT_TIMEOUT]).await?;
    let fleet_client = member.pair.fleet_client();
    let names = ["rolling", "going", "gone"];
    let mut before = BTreeMap::new();
    for name in names {
        fleet_client.create(name, json!({})).await?;
    }
    for name in names {
        fleet_client.wait_ready(name).await?;
        let release = member.pair.release(name);
        before.insert(name, wait_complete(&fleet_client, name, &release).await?);
    }
    let serving = [
        AvailabilityWatch::watch(&fleet_client, "rolling").await,
        AvailabilityWatch::watch(&fleet_client, "going").await,
    ];
    let release = names.map(|name| member.pair.release(name));

    kill_manual_run_at(
        &member,
        "rolling",
        "pre-rollback",
        &["rollback", &release[0], "1"],
    )
    .await?;
    fleet_client
        .wait_for_revision("rolling", &release[0], 2, "pending-rollback")
        .await?;
    kill_manual_run_at(&member, "going", "pre-delete", &["uninstall", &release[1]]).await?;
    let uninstall = ["uninstall", release[2].as_str()];
    let past_the_first = async {
        gate::complete_next_hook(&fleet_client, "gone", "pre-delete", None).await?;
        std::future::pending::<Result<()>>().await
    };
    tokio::select! {
        died = kill_manual_run_at(&member, "gone", "post-delete", &uninstall) => died.unwrap(),
        opened = past_the_first => opened.unwrap(),
    }
    for (name, release) in [("going", &release[1]), ("gone", &release[2])] {
        fleet_client
            .wait_for_revision(name, release, 1, "uninstalling")
            .await?;
    }

    let locked = format!("ClusterProgress/{}", member.pair.name());
    for name in names {
        let expected = (locked.as_str(), "True", "Locked");
        fleet_client.wait_for(name, &[expected]).await?;
    }
    for (name, release) in names.iter().zip(&release) {
        fleet_client.event_message(name, "ReleaseUnlocked").await?;
        fleet_client.wait_ready(name).await?;
        eventually("only interrupted hooks to be left", async || {
            let pods: Api<Pod> = Api::namespaced(fleet_client.client.clone(), name);
            for pod in pods.list(&ListParams::default()).await? {
                if pod.owner_references().is_empty() {
                    // A foreign Helm created the pod. Its next run or a user deletes it.
                    pods.delete(&pod.name_any(), &Default::default()).await?;
                }
            }
            wait_complete(&fleet_client, name, release).await.map(Some)
        })
        .await?;
    }
    for (name, serving) in ["rolling", "going"].into_iter().zip(serving) {
        assert!(serving.end(), "{name} kept serving");
    }
    for name in ["rolling", "going"] {
        let now = wait_complete(&fleet_client, name, &member.pair.release(name)).await?;
        assert_eq!(now, before[name], "{name}: objects were recreated");
    }
    Ok(())
}
