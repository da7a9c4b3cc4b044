//! Shows that the agents' Service routes to the leader of several hubs by a label on its pod. Each hub sets the label
//! on its own pod, and its account can't change anything else on pods.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use krypton_tests::{
    Agent, AgentOptions, ChartRepository, ChartSource, Cluster, HubPod, Merge as _, OwnChart,
    Parts, PodName, STEP_DEADLINE, ServicePort, TestResult, assert_contains, eventually,
    fleet::{CONNECTED, FleetClient},
    membership::{bundle_in_namespace, write_secret},
};
use krypton_types::names::{HUB_LEASE, LEADER_LABEL};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{ListParams, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use tempfile::TempDir;

const EDGE: &str = "edge-1";
const HUB_LABEL: &str = "app.kubernetes.io/name=krypton-hub";

/// A home cluster with the hub's chart, and a process for each of its pods.
struct LabelledHubs {
    home: Cluster,
    port: ServicePort,
    hubs: Vec<(PodName, HubPod)>,
    _repository: ChartRepository,
}

impl LabelledHubs {
    async fn new(name: &str) -> TestResult<Self> {
        let repository = ChartRepository::start(&[ChartSource::small("1.0.0")]).await?;
        let home = Cluster::start(name, Parts::WithPods).await?;
        let chart = format!("--set=chart.repo={}", repository.url());
        let values = [
            chart.as_str(),
            "--set=chart.name=small,chart.version=1.0.0,chart.installCRDs=false",
            "--set=replicaCount=2,selfCluster=false",
        ];
        OwnChart::Hub.install(&home, values).await?;
        let namespace = OwnChart::Hub.namespace();
        let port = ServicePort::start(home.client(), namespace, "krypton-hub-agents").await?;
        let names = eventually("two pods that run", async || {
            let names = pods(&home).await?;
            Ok((names.len() == 2).then_some(names))
        })
        .await?;
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
        Ok(stage)
    }

    async fn start(&self, name: &PodName, before: Option<&HubPod>) -> HubPod {
        let advertise = format!("--advertise={}", self.port.address());
        let mut hub = HubPod::start_as(&self.home, name, before, &[advertise])
            .await
            .unwrap();
        self.port.route(&name.name, hub.hub.agents_address());
        // Standby hubs are ready, too.
        hub.hub.wait_ready(STEP_DEADLINE).await.unwrap();
        hub
    }

    /// Restarts the stopped process of this pod.
    async fn restart(&mut self, index: usize) {
        let (name, before) = &self.hubs[index];
        let hub = self.start(name, Some(before)).await;
        self.hubs[index].1 = hub;
    }

    /// Returns the index of the Lease holder.
    async fn leader(&self) -> Result<usize> {
        let leases: Api<Lease> = Api::namespaced(self.home.client(), OwnChart::Hub.namespace());
        let lease = leases.get(HUB_LEASE).await?;
        let holder = lease.spec.and_then(|spec| spec.holder_identity);
        let holder = holder.unwrap_or_default();
        let is_holder = |pod: &PodName| holder.starts_with(&format!("hub/{}/", pod.name));
        let leader = self.hubs.iter().position(|(pod, _)| is_holder(pod));
        leader.with_context(|| format!("held by {holder:?}"))
    }

    /// Waits until the Service routes only to this hub's pod, and no other pod has the label.
    async fn wait_for_route_to(&self, index: usize) {
        let expected = &self.hubs[index].0.name;
        eventually("the Service to route to one pod", async || {
            let (led, labelled) = (self.port.pods().await?, labelled_pods(&self.home).await?);
            if led != [expected.clone()] || labelled != [expected.clone()] {
                bail!("to {led:?} instead of {expected}; labeled: {labelled:?}");
            }
            Ok(Some(()))
        })
        .await
        .unwrap();
    }

    /// Waits until another hub is the leader, both by Lease and by Service.
    async fn wait_for_other_leader(&self, index: usize) -> usize {
        let next = eventually("another leader", async || {
            let leader = self.leader().await?;
            Ok((leader != index).then_some(leader))
        })
        .await
        .unwrap();
        self.wait_for_route_to(next).await;
        next
    }
}

async fn pods(cluster: &Cluster) -> Result<Vec<PodName>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), OwnChart::Hub.namespace());
    let found = pods.list(&ListParams::default().labels(HUB_LABEL)).await?;
    let running = found.items.into_iter().filter(|pod| {
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

async fn labelled_pods(cluster: &Cluster) -> Result<Vec<String>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), OwnChart::Hub.namespace());
    let leader_label = ListParams::default().labels(&format!("{LEADER_LABEL}=true"));
    let found = pods.list(&leader_label).await?;
    Ok(found.items.iter().map(ResourceExt::name_any).collect())
}

async fn joined_agent(stage: &LabelledHubs, edge: &Cluster) -> TestResult<Agent> {
    let folder = TempDir::with_prefix("krypton-join-")?;
    let file = folder.path().join("bundle.yaml");
    let namespace = OwnChart::Hub.namespace();
    let bundle = bundle_in_namespace(&stage.home, namespace, EDGE).await?;
    let address = stage.port.address().to_string();
    assert_contains!(bundle, address);
    write_secret(&file, &bundle)?;
    let options = AgentOptions::new(edge.kubeconfig()).join_file(&file);
    Ok(Agent::start_ready(&options).await?)
}

async fn client_for(kubeconfig: &Path) -> TestResult<Client> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await;
    Ok(Client::try_from(config?)?)
}

/// Returns the number of sessions that the agent has established.
fn sessions(agent: &Agent) -> usize {
    let log = agent.log().unwrap();
    log.matches("in session with the hub").count()
}

#[tokio::test]
async fn agent_service_follows_leader_through_every_failover() -> TestResult {
    let (stage, edge) = tokio::join!(
        LabelledHubs::new("label-home"),
        Cluster::start("label-edge", Parts::ControlPlane)
    );
    let edge = edge?;
    let mut stage = stage?;
    let fleet_client = FleetClient::new(&stage.home);
    let first = stage.leader().await?;
    stage.wait_for_route_to(first).await;
    let agent = joined_agent(&stage, &edge).await?;
    fleet_client.wait_for_member(EDGE, &[CONNECTED]).await?;
    let before = sessions(&agent);

    // Kill the leader: its successor removes the label, and the agent reconnects automatically.
    stage.hubs[first].1.hub.kill9().await?;
    let second = stage.wait_for_other_leader(first).await;
    eventually("the agent to reconnect", async || {
        Ok((sessions(&agent) > before).then_some(()))
    })
    .await?;

    // Restart its container in the same pod, which still has the label from its time as leader.
    let name = stage.hubs[first].0.name.clone();
    let label = format!("{LEADER_LABEL}=true");
    let namespace = OwnChart::Hub.namespace();
    let pod = ["label", "pod", &name, &label, "-n", namespace];
    stage.home.kubectl(pod).await?;
    stage.restart(first).await;
    let now = labelled_pods(&stage.home).await?;
    assert_eq!(now, [stage.hubs[second].0.name.clone()], "when it is ready");
    stage.wait_for_route_to(second).await;

    // Freeze the leader: it can't remove its label, and doesn't restore the label when it resumes.
    stage.hubs[second].1.hub.freeze()?;
    let third = stage.wait_for_other_leader(second).await;
    assert_eq!(third, first);
    stage.hubs[second].1.hub.thaw()?;
    eventually("the resumed hub to observe it", async || {
        let log = stage.hubs[second].1.hub.log()?;
        let woken = log.rsplit("became leader").next().unwrap_or_default();
        Ok(woken.contains("this hub is a standby").then_some(()))
    })
    .await?;
    stage.wait_for_route_to(third).await;
    fleet_client.wait_for_member(EDGE, &[CONNECTED]).await?;

    // Stop the leader: it removes its label.
    assert!(stage.hubs[third].1.hub.stop().await?.success());
    assert_eq!(stage.wait_for_other_leader(third).await, second);

    // Remove the label: the leader restores it.
    let name = stage.hubs[second].0.name.clone();
    let off = format!("{LEADER_LABEL}-");
    let pod = ["label", "pod", &name, &off, "-n", namespace];
    stage.home.kubectl(pod).await?;
    stage.wait_for_route_to(second).await;

    stage.restart(third).await;
    check_label_rights(&mut stage, second).await
}

/// The right to label pods is minimal, and a hub without it still becomes the leader.
async fn check_label_rights(stage: &mut LabelledHubs, leader: usize) -> TestResult {
    let namespace = OwnChart::Hub.namespace();
    // Operations that the account can't perform, despite its right to patch pods.
    let stranger = "apiVersion: v1
kind: Pod
metadata: {name: stranger, namespace: krypton}
spec: {containers: [{name: one, image: one}]}
";
    stage.home.apply(stranger).await?;
    let kubeconfig = stage.hubs[leader].1.access.kubeconfig();
    let as_the_hub: Api<Pod> = Api::namespaced(client_for(&kubeconfig).await?, namespace);
    let leader_pod = stage.hubs[leader].0.name.clone();
    let labels = |labels: Value| json!({"metadata": {"labels": labels}});
    let nothing_else = "nothing of a pod but its label";
    let this_label = "mesh.openkcm.io/leader only";
    // An API server reloads its policies every second.
    let probe = json!({"metadata": {"annotations": {"probe": "policy"}}});
    eventually("the policy to be enforced", async || {
        let dry = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let tried = as_the_hub
            .patch(&leader_pod, &dry, &Patch::Merge(&probe))
            .await;
        Ok(tried.is_err().then_some(()))
    })
    .await?;
    let spec = json!({"spec": {"activeDeadlineSeconds": 1}});
    let annotation = json!({"metadata": {"annotations": {"a": "b"}}});
    let finalizer = json!({"metadata": {"finalizers": ["a.example/b"]}});
    for (pod, patch, expected_text) in [
        (leader_pod.as_str(), spec, nothing_else),
        (&leader_pod, annotation, nothing_else),
        (&leader_pod, finalizer, nothing_else),
        (&leader_pod, labels(json!({"a": "b"})), this_label),
        (
            &leader_pod,
            labels(json!({"app.kubernetes.io/name": null})),
            this_label,
        ),
        (
            &leader_pod,
            labels(json!({LEADER_LABEL: "maybe"})),
            this_label,
        ),
        (
            "stranger",
            labels(json!({LEADER_LABEL: "true"})),
            "pods of its own release only",
        ),
    ] {
        let refused = as_the_hub.merge(pod, &patch).await;
        let refused = refused.map(drop).unwrap_err().to_string();
        assert!(refused.contains(expected_text), "{patch}: {refused}");
    }
    assert!(as_the_hub.get(&leader_pod).await.is_err());

    // Without the right, the next hub becomes leader and reports the missing right.
    let role = format!("delete role krypton-hub-leader-label -n {namespace}");
    stage.home.kubectl_line(&role).await?;
    stage.hubs[leader].1.hub.kill9().await?;
    let next = eventually("the other hub to become the leader", async || {
        let now = stage.leader().await?;
        Ok((now != leader).then_some(now))
    })
    .await?;
    stage.hubs[next]
        .1
        .hub
        .wait_for_log("the hub is not allowed to label pod")
        .await?;
    stage.hubs[next].1.hub.wait_ready(STEP_DEADLINE).await?;
    Ok(())
}
