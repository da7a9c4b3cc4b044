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
    Gate, Mode, Pair, Parts, Scenario, ServedChart, TestResult, eventually,
    fleet::{FleetClient, PATIENCE, kill_helm},
    gate,
};
use kube::{
    Api, ResourceExt,
    api::ListParams,
    runtime::{WatchStreamExt, watcher},
};
use serde_json::json;
use tokio::{sync::watch, task::JoinHandle};

/// Availability of the Deployments in a namespace.
#[derive(Clone, Copy, PartialEq)]
enum Served {
    NotYet,
    Always,
    Stopped,
}

/// A watch that verifies that Deployments stay available.
struct Serving {
    served: watch::Receiver<Served>,
    task: JoinHandle<()>,
}

impl Serving {
    /// Returns when a Deployment is available.
    async fn watch(fleet_client: &FleetClient, namespace: &str) -> Self {
        let api: Api<Deployment> = Api::namespaced(fleet_client.client.clone(), namespace);
        let (seen, mut served) = watch::channel(Served::NotYet);
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
                seen.send_modify(|served| match (*served, available) {
                    (Served::NotYet, true) => *served = Served::Always,
                    (Served::Always, false) => *served = Served::Stopped,
                    _ => {}
                });
            }
        });
        let first = served.wait_for(|served| *served != Served::NotYet);
        let first = tokio::time::timeout(PATIENCE, first).await;
        drop(first.expect("no Deployment becomes available").unwrap());
        Self { served, task }
    }

    fn end(self) -> bool {
        self.task.abort();
        self.served.get() == Served::Always
    }
}

/// Returns names and UIDs of a namespace's objects: ConfigMaps of the release, Deployments, and pods of hooks.
async fn objects(fleet_client: &FleetClient, namespace: &str) -> Result<BTreeMap<String, String>> {
    let of_helm = ListParams::default().labels("app.kubernetes.io/managed-by=Helm");
    let maps: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), namespace);
    let deployments: Api<Deployment> = Api::namespaced(fleet_client.client.clone(), namespace);
    let pods: Api<Pod> = Api::namespaced(fleet_client.client.clone(), namespace);
    let mut found = BTreeMap::new();
    let mut put = |kind: &str, object: &dyn Fn() -> (String, Option<String>)| {
        let (name, uid) = object();
        found.insert(format!("{kind}/{name}"), uid.unwrap_or_default());
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
    Ok(found)
}

/// Waits until the newest revision is the only deployed one, no lock is left, and all objects are from the chart.
async fn complete(
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
    let found = objects(fleet_client, namespace).await?;
    let expected = [
        format!("ConfigMap/{release}"),
        format!("Deployment/{release}"),
    ];
    ensure!(found.keys().eq(expected.iter()), "{found:?}");
    Ok(found)
}

/// The member and its chart with gates.
struct Scene {
    pair: Pair,
    chart: ServedChart,
    _gate: Gate,
}

impl Scene {
    async fn set(name: &str, events: &[&str], more: &[&str]) -> Result<Self> {
        let gate = Gate::everywhere()?;
        let (pair, chart) = Scenario::new(name, Mode::SelfCluster)
            .parts(Parts::WithPods)
            .chart(gate.chart(), "gates")
            .values(&json!({"gates": events}).to_string())
            .flags(more)
            .start()
            .await?;
        Ok(Self {
            pair,
            chart,
            _gate: gate,
        })
    }

    fn folder(&mut self) -> Result<PathBuf> {
        let log = self.pair.actor()?.log_path();
        Ok(log.parent().map(PathBuf::from).unwrap_or_default())
    }

    /// Waits for Helm at `event`, and kills it.
    async fn kill_at(&mut self, namespace: &str, event: &str) -> Result<Pod> {
        let fleet_client = self.pair.fleet_client();
        let hook = gate::at(&fleet_client, namespace, event, None).await?;
        let folder = self.folder()?;
        let killed = kill_helm(&folder)?;
        ensure!(killed == 1, "{killed} Helm processes ran at {event}");
        Ok(hook)
    }
}

#[tokio::test]
async fn killed_helm_is_repaired_by_next_pass() -> TestResult {
    let mut scene = Scene::set("killed", &gate::EVENTS, &[]).await?;
    let fleet_client = scene.pair.fleet_client();
    let release = scene.pair.release("acme");
    fleet_client.create("acme", json!({})).await?;

    // Before the first apply, and after the last.
    let hook = scene.kill_at("acme", "pre-install").await?;
    fleet_client
        .newest_is("acme", &release, 1, "pending-install")
        .await?;
    gate::pass(&fleet_client, "acme", "pre-install", Some(&hook)).await?;
    let hook = scene.kill_at("acme", "post-install").await?;
    let made = objects(&fleet_client, "acme").await?;
    let serving = Serving::watch(&fleet_client, "acme").await;
    // The repair runs the hooks of an installation, and no hooks of an upgrade.
    gate::pass(&fleet_client, "acme", "pre-install", None).await?;
    gate::pass(&fleet_client, "acme", "post-install", Some(&hook)).await?;
    fleet_client.ready("acme").await?;
    let installed = complete(&fleet_client, "acme", &release).await?;
    for (name, uid) in &installed {
        assert_eq!(made.get(name), Some(uid), "{name} was recreated");
    }

    // An upgrade that creates an object outside the next revision.
    let second = json!({"gates": gate::EVENTS, "message": "second", "extra": "left-over"});
    scene.chart.write(&second.to_string())?;
    let hook = scene.kill_at("acme", "pre-upgrade").await?;
    gate::pass(&fleet_client, "acme", "pre-upgrade", Some(&hook)).await?;
    let hook = scene.kill_at("acme", "post-upgrade").await?;
    let left = objects(&fleet_client, "acme").await?;
    assert!(left.contains_key("ConfigMap/left-over"), "{left:?}");
    let third = json!({"gates": gate::EVENTS, "message": "third"});
    scene.chart.write(&third.to_string())?;
    gate::pass(&fleet_client, "acme", "pre-upgrade", None).await?;
    gate::pass(&fleet_client, "acme", "post-upgrade", Some(&hook)).await?;
    fleet_client.ready("acme").await?;
    eventually("no leftover objects", async || {
        complete(&fleet_client, "acme", &release).await.map(Some)
    })
    .await
    .map(|now| assert_eq!(now, installed))?;
    assert!(serving.end(), "the release kept serving");

    fleet_client.delete("acme").await?;
    let hook = scene.kill_at("acme", "pre-delete").await?;
    let revisions = fleet_client.revisions("acme", &release).await?;
    assert_eq!(revisions.last().unwrap().1, "uninstalling");
    gate::pass(&fleet_client, "acme", "pre-delete", Some(&hook)).await?;
    let hook = scene.kill_at("acme", "post-delete").await?;
    gate::pass(&fleet_client, "acme", "pre-delete", None).await?;
    gate::pass(&fleet_client, "acme", "post-delete", Some(&hook)).await?;
    fleet_client.gone("acme").await?;
    assert!(fleet_client.releases().await?.is_empty());
    Ok(())
}

/// Krypton breaks a foreign lock after three times this timeout and a minute.
const SHORT: &str = "--helm-timeout=20s";

/// Runs Helm as a user, until it waits at `event`, and kills it.
async fn die_at(scene: &Scene, namespace: &str, event: &str, args: &[&str]) -> Result<()> {
    let fleet_client = scene.pair.fleet_client();
    let in_namespace = ["--namespace", namespace, "--timeout=170s"];
    let args = args.iter().chain(&in_namespace).copied();
    tokio::select! {
        ended = scene.pair.cluster().helm(args) => bail!("helm ended before it was killed: {ended:?}"),
        hook = gate::at(&fleet_client, namespace, event, None) => hook.map(drop),
    }
}

#[tokio::test]
async fn dead_manual_helm_run_is_repaired_without_uninstall() -> TestResult {
    let events = ["pre-rollback", "pre-delete", "post-delete"];
    let scene = Scene::set("byhand", &events, &[SHORT]).await?;
    let fleet_client = scene.pair.fleet_client();
    let names = ["rolling", "going", "gone"];
    let mut before = BTreeMap::new();
    for name in names {
        fleet_client.create(name, json!({})).await?;
    }
    for name in names {
        fleet_client.ready(name).await?;
        let release = scene.pair.release(name);
        before.insert(name, complete(&fleet_client, name, &release).await?);
    }
    let serving = [
        Serving::watch(&fleet_client, "rolling").await,
        Serving::watch(&fleet_client, "going").await,
    ];
    let release = names.map(|name| scene.pair.release(name));

    die_at(
        &scene,
        "rolling",
        "pre-rollback",
        &["rollback", &release[0], "1"],
    )
    .await?;
    fleet_client
        .newest_is("rolling", &release[0], 2, "pending-rollback")
        .await?;
    die_at(&scene, "going", "pre-delete", &["uninstall", &release[1]]).await?;
    let uninstall = ["uninstall", release[2].as_str()];
    let past_the_first = async {
        gate::pass(&fleet_client, "gone", "pre-delete", None).await?;
        std::future::pending::<Result<()>>().await
    };
    tokio::select! {
        died = die_at(&scene, "gone", "post-delete", &uninstall) => died.unwrap(),
        opened = past_the_first => opened.unwrap(),
    }
    for (name, release) in [("going", &release[1]), ("gone", &release[2])] {
        fleet_client
            .newest_is(name, release, 1, "uninstalling")
            .await?;
    }

    let locked = format!("ClusterProgress/{}", scene.pair.name());
    for name in names {
        let expected = (locked.as_str(), "True", "Locked");
        fleet_client.shows(name, &[expected]).await?;
    }
    for (name, release) in names.iter().zip(&release) {
        // The grace period is nearly as long as the default deadline.
        for _ in 0..2 {
            let done = fleet_client.event_message(name, "ReleaseUnlocked").await;
            if done.is_ok() {
                break;
            }
        }
        fleet_client.ready(name).await?;
        eventually("only interrupted hooks to be left", async || {
            let pods: Api<Pod> = Api::namespaced(fleet_client.client.clone(), name);
            for pod in pods.list(&ListParams::default()).await? {
                if pod.owner_references().is_empty() {
                    // A foreign Helm created the pod. Its next run or a user deletes it.
                    pods.delete(&pod.name_any(), &Default::default()).await?;
                }
            }
            complete(&fleet_client, name, release).await.map(Some)
        })
        .await?;
    }
    for (name, serving) in ["rolling", "going"].into_iter().zip(serving) {
        assert!(serving.end(), "{name} kept serving");
    }
    for name in ["rolling", "going"] {
        let now = complete(&fleet_client, name, &scene.pair.release(name)).await?;
        assert_eq!(now, before[name], "{name}: objects were recreated");
    }
    Ok(())
}
