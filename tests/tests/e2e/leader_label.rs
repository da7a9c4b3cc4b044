//! Several hubs as the chart runs them: the Service of agents leads to the one that leads, by the label that it
//! puts on its own pod, and the hub's account can do no more to pods than that.

use std::{path::Path, time::Instant};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use krypton_tests::{
    Agent, AgentOptions, ChartRepository, ChartSource, Cluster, HubPod, OwnChart, Parts, PodName,
    ServicePort, eventually,
    fleet::{FleetClient, PATIENCE},
    membership::{bundle_of, write_secret},
};
use krypton_types::names::{HUB_LEASE, LEADER_LABEL};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{ListParams, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use tempfile::TempDir;

const CONNECTED: (&str, &str, &str) = ("Connected", "True", "Connected");
const EDGE: &str = "edge-1";
const OF_HUB: &str = "app.kubernetes.io/name=krypton-hub";

/// Home with the chart, and a process for each of its pods.
struct Stage {
    home: Cluster,
    port: ServicePort,
    hubs: Vec<(PodName, HubPod)>,
    _repository: ChartRepository,
}

impl Stage {
    async fn set(name: &str) -> Self {
        let repository = ChartRepository::start(&[ChartSource::small("1.0.0")])
            .await
            .unwrap();
        let home = Cluster::start(name, Parts::WithPods).await.unwrap();
        let chart = format!("--set=chart.repo={}", repository.url());
        let values = [
            chart.as_str(),
            "--set=chart.name=small,chart.version=1.0.0,chart.installCRDs=false",
            "--set=replicaCount=2,selfCluster=false",
        ];
        OwnChart::Hub.install(&home, values).await.unwrap();
        let namespace = OwnChart::Hub.namespace();
        let port = ServicePort::start(home.client(), namespace, "krypton-hub-agents")
            .await
            .unwrap();
        let names = eventually("two pods that run", PATIENCE, async || {
            let names = pods(&home).await?;
            Ok((names.len() == 2).then_some(names))
        })
        .await
        .unwrap();
        let mut stage = Self {
            home,
            port,
            hubs: Vec::new(),
            _repository: repository,
        };
        for name in names {
            let hub = stage.start(&name, None).await;
            stage.hubs.push((name, hub));
        }
        stage
    }

    async fn start(&self, name: &PodName, before: Option<&HubPod>) -> HubPod {
        let advertise = format!("--advertise={}", self.port.address());
        let mut hub = HubPod::start_as(&self.home, name, before, &[advertise])
            .await
            .unwrap();
        self.port.route(&name.name, hub.hub.agents_address());
        // Those that stand by are ready, too.
        hub.hub.ready(PATIENCE).await.unwrap();
        hub
    }

    /// The process of this pod, which has ended, is started again.
    async fn start_again(&mut self, place: usize) {
        let (name, before) = &self.hubs[place];
        let hub = self.start(name, Some(before)).await;
        self.hubs[place].1 = hub;
    }

    /// Which of the hubs holds the Lease.
    async fn leader(&self) -> Result<usize> {
        let leases: Api<Lease> = Api::namespaced(self.home.client(), OwnChart::Hub.namespace());
        let lease = leases.get(HUB_LEASE).await?;
        let holder = lease.spec.and_then(|spec| spec.holder_identity);
        let holder = holder.unwrap_or_default();
        let of = |pod: &PodName| holder.starts_with(&format!("hub/{}/", pod.name));
        let leader = self.hubs.iter().position(|(pod, _)| of(pod));
        leader.with_context(|| format!("held by {holder:?}"))
    }

    /// Waits until the Service leads to this hub's pod alone, and no other has the label.
    async fn leads_to(&self, place: usize) {
        let wanted = &self.hubs[place].0.name;
        eventually("the Service to lead to one", PATIENCE, async || {
            let (led, labelled) = (self.port.pods().await?, labelled(&self.home).await?);
            if led != [wanted.clone()] || labelled != [wanted.clone()] {
                bail!("to {led:?} instead of {wanted}; labelled: {labelled:?}");
            }
            Ok(Some(()))
        })
        .await
        .unwrap();
    }

    /// Waits until another than this hub leads, by Lease and by Service.
    async fn followed(&self, place: usize) -> usize {
        let next = eventually("another to lead", PATIENCE, async || {
            let leader = self.leader().await?;
            Ok((leader != place).then_some(leader))
        })
        .await
        .unwrap();
        self.leads_to(next).await;
        next
    }
}

async fn pods(cluster: &Cluster) -> Result<Vec<PodName>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), OwnChart::Hub.namespace());
    let listed = pods.list(&ListParams::default().labels(OF_HUB)).await?;
    let running = listed.items.into_iter().filter(|pod| {
        let status = pod.status.as_ref();
        status.and_then(|status| status.phase.as_deref()) == Some("Running")
    });
    Ok(running
        .map(|pod| PodName {
            name: pod.name_any(),
            uid: pod.uid().unwrap_or_default(),
        })
        .collect())
}

async fn labelled(cluster: &Cluster) -> Result<Vec<String>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), OwnChart::Hub.namespace());
    let with = ListParams::default().labels(&format!("{LEADER_LABEL}=true"));
    let listed = pods.list(&with).await?;
    Ok(listed.items.iter().map(ResourceExt::name_any).collect())
}

async fn joined(stage: &Stage, edge: &Cluster) -> Agent {
    let folder = TempDir::with_prefix("krypton-join-").unwrap();
    let file = folder.path().join("bundle.yaml");
    let namespace = OwnChart::Hub.namespace();
    let bundle = bundle_of(&stage.home, namespace, EDGE).await.unwrap();
    let at = stage.port.address().to_string();
    assert!(bundle.contains(&at), "{at} is not in: {bundle}");
    write_secret(&file, &bundle).unwrap();
    let options = AgentOptions::new(edge.kubeconfig()).join_file(&file);
    let mut agent = Agent::start(&options).unwrap();
    agent.ready(PATIENCE).await.unwrap();
    agent
}

async fn client_of(kubeconfig: &Path) -> Client {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await;
    Client::try_from(config.unwrap()).unwrap()
}

/// How many sessions the agent has had.
fn sessions(agent: &Agent) -> usize {
    let log = agent.log().unwrap();
    log.matches("in session with the hub").count()
}

#[tokio::test]
async fn agent_service_follows_leader_through_every_failover() {
    let (mut stage, edge) = tokio::join!(
        Stage::set("label-home"),
        Cluster::start("label-edge", Parts::ControlPlane)
    );
    let edge = edge.unwrap();
    let desk = FleetClient::at(&stage.home);
    let first = stage.leader().await.unwrap();
    stage.leads_to(first).await;
    let agent = joined(&stage, &edge).await;
    desk.member_shows(EDGE, &[CONNECTED]).await.unwrap();
    let before = sessions(&agent);

    // Killed: its label goes by the next one's hand, and the agent follows by itself.
    let killed = Instant::now();
    stage.hubs[first].1.hub.kill9().await.unwrap();
    let second = stage.followed(first).await;
    let labelled_after = killed.elapsed();
    eventually("the agent to be back", PATIENCE, async || {
        Ok((sessions(&agent) > before).then_some(()))
    })
    .await
    .unwrap();
    eprintln!(
        "killed: the Service leads to the next after {:.1} s, the agent is back after {:.1} s",
        labelled_after.as_secs_f64(),
        killed.elapsed().as_secs_f64()
    );

    // Its container is started again in the same pod, with the label of a life that led.
    let name = stage.hubs[first].0.name.clone();
    let label = format!("{LEADER_LABEL}=true");
    let namespace = OwnChart::Hub.namespace();
    let pod = ["label", "pod", &name, &label, "-n", namespace];
    stage.home.kubectl(pod).await.unwrap();
    stage.start_again(first).await;
    let now = labelled(&stage.home).await.unwrap();
    assert_eq!(now, [stage.hubs[second].0.name.clone()], "when it is ready");
    stage.leads_to(second).await;

    // Frozen: it cannot take the label off itself, and does not want it back when it wakes.
    stage.hubs[second].1.hub.freeze().unwrap();
    let third = stage.followed(second).await;
    assert_eq!(third, first);
    stage.hubs[second].1.hub.thaw().unwrap();
    eventually("the woken one to know", PATIENCE, async || {
        let log = stage.hubs[second].1.hub.log()?;
        let woken = log.rsplit("this hub leads").next().unwrap_or_default();
        Ok(woken.contains("this hub is a standby").then_some(()))
    })
    .await
    .unwrap();
    stage.leads_to(third).await;
    desk.member_shows(EDGE, &[CONNECTED]).await.unwrap();

    // Stopped: it takes the label off itself.
    assert!(stage.hubs[third].1.hub.stop().await.unwrap().success());
    assert_eq!(stage.followed(third).await, second);

    // Somebody takes it off: it is put back.
    let name = stage.hubs[second].0.name.clone();
    let off = format!("{LEADER_LABEL}-");
    let pod = ["label", "pod", &name, &off, "-n", namespace];
    stage.home.kubectl(pod).await.unwrap();
    stage.leads_to(second).await;
}

#[tokio::test]
async fn leader_label_right_is_minimal_and_not_required() {
    let mut stage = Stage::set("label-rights").await;
    let namespace = OwnChart::Hub.namespace();
    let leader = stage.leader().await.unwrap();
    stage.leads_to(leader).await;

    // What the account may not do with the right to patch pods.
    let stranger = "apiVersion: v1
kind: Pod
metadata: {name: stranger, namespace: krypton}
spec: {containers: [{name: one, image: one}]}
";
    stage.home.apply(stranger).await.unwrap();
    let kubeconfig = stage.hubs[leader].1.access.kubeconfig();
    let as_the_hub: Api<Pod> = Api::namespaced(client_of(&kubeconfig).await, namespace);
    let own = stage.hubs[leader].0.name.clone();
    let labels = |labels: Value| json!({"metadata": {"labels": labels}});
    let nothing_else = "nothing of a pod but its label";
    let this_label = "mesh.openkcm.io/leader only";
    // An apiserver reads its policies once a second.
    let probe = json!({"metadata": {"annotations": {"probe": "policy"}}});
    eventually("the policy to count", PATIENCE, async || {
        let dry = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let tried = as_the_hub.patch(&own, &dry, &Patch::Merge(&probe)).await;
        Ok(tried.is_err().then_some(()))
    })
    .await
    .unwrap();
    let spec = json!({"spec": {"activeDeadlineSeconds": 1}});
    let annotation = json!({"metadata": {"annotations": {"a": "b"}}});
    let finalizer = json!({"metadata": {"finalizers": ["a.example/b"]}});
    for (pod, patch, words) in [
        (own.as_str(), spec, nothing_else),
        (&own, annotation, nothing_else),
        (&own, finalizer, nothing_else),
        (&own, labels(json!({"a": "b"})), this_label),
        (
            &own,
            labels(json!({"app.kubernetes.io/name": null})),
            this_label,
        ),
        (&own, labels(json!({LEADER_LABEL: "maybe"})), this_label),
        (
            "stranger",
            labels(json!({LEADER_LABEL: "true"})),
            "pods of its own release only",
        ),
    ] {
        let refused = as_the_hub
            .patch(pod, &PatchParams::default(), &Patch::Merge(&patch))
            .await;
        let refused = refused.map(drop).unwrap_err().to_string();
        assert!(refused.contains(words), "{patch}: {refused}");
    }
    assert!(as_the_hub.get(&own).await.is_err());

    // Without the right, the next one leads, and says what is missing.
    let role = [
        "delete",
        "role",
        "krypton-hub-leader-label",
        "-n",
        namespace,
    ];
    stage.home.kubectl(role).await.unwrap();
    stage.hubs[leader].1.hub.kill9().await.unwrap();
    let next = eventually("the other to lead", PATIENCE, async || {
        let now = stage.leader().await?;
        Ok((now != leader).then_some(now))
    })
    .await
    .unwrap();
    eventually("what is missing to be said", PATIENCE, async || {
        let log = stage.hubs[next].1.hub.log()?;
        Ok(log.contains("the hub may not label pod").then_some(()))
    })
    .await
    .unwrap();
    stage.hubs[next].1.hub.ready(PATIENCE).await.unwrap();
}
