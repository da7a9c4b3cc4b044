//! Starts home and two edge clusters with hubs, an agent, and the faulty connections between them.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use krypton_tests::{
    Agent, AgentOptions, AnsweringProxy, ChartRepository, ChartSource, Cluster, Daemon, FaultProxy,
    Hub, Parts, Traffic, eventually_within,
    fleet::{FleetClient, ValuesFile, chart_flags, kill_helm, values_flag},
    membership::enrolled_agent,
};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::Mutex;

use super::{
    hubs::{Hubs, RunningHub, VERSIONS},
    judgement::CHART,
    whom::{Edge, Workspace},
};

pub(crate) const REPLICAS: u32 = 1;
/// Deadline for a cluster's recovery.
const RECOVERY_DEADLINE: Duration = Duration::from_secs(300);
/// A short back-off, which ends within the quiet period.
const RETRY_MAX: &str = "5s";
const DRIFT_INTERVAL: &str = "15s";

/// An edge cluster and the path to it: fault line, answering proxy, API server.
pub(crate) struct Site {
    pub(crate) edge: Edge,
    pub(crate) cluster: Cluster,
    /// A direct administrator's client.
    pub(crate) client: Client,
    pub(crate) answering_proxy: AnsweringProxy,
    pub(crate) fault_proxy: FaultProxy,
}

impl Site {
    async fn start(edge: Edge) -> Result<Self> {
        let name = format!("soak-{}", edge.name());
        let cluster = Cluster::start(&name, Parts::WithPods).await?;
        let answering_proxy = AnsweringProxy::start(&cluster).await?;
        let fault_proxy = FaultProxy::start_for_proxy(&answering_proxy).await?;
        for number in 0..2 {
            let namespace = json!({
                "apiVersion": "v1", "kind": "Namespace",
                "metadata": {"name": Workspace::shared(number),
                    "labels": {super::snapshot::FOREIGN_LABEL: "true"}},
            });
            cluster.apply(&namespace.to_string()).await?;
        }
        let client = cluster.client();
        Ok(Self {
            edge,
            cluster,
            client,
            answering_proxy,
            fault_proxy,
        })
    }

    /// Waits until the cluster itself has recovered: its controllers and its scheduler react, and new pods become
    /// ready. On a loaded machine, this can be long after a killed API server has restarted.
    async fn wait_for_pods(&self) -> Result<()> {
        let name = "canary";
        let labels = json!({"app": name});
        let canary = json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {
                        "labels": labels,
                        "annotations": {"asked-at": jiff::Timestamp::now().to_string()},
                    },
                    "spec": {"containers": [{"name": name, "image": "canary.example.org/canary"}]},
                },
            },
        });
        eventually_within(
            "the canary to be rolled out",
            RECOVERY_DEADLINE,
            async || self.cluster.apply(&canary.to_string()).await.map(Some),
        )
        .await?;
        let api: Api<Deployment> = Api::namespaced(self.client.clone(), "default");
        let what = format!("a new pod to be ready on {}", self.edge.name());
        eventually_within(&what, RECOVERY_DEADLINE, async || {
            let canary = api.get(name).await?;
            let status = canary.status.unwrap_or_default();
            let is_observed = status.observed_generation == canary.metadata.generation;
            let all = |count: Option<i32>| count == Some(1);
            let rolled_out = all(status.updated_replicas) && all(status.available_replicas);
            ensure!(
                is_observed && rolled_out && all(status.replicas),
                "{status:?}"
            );
            Ok(Some(()))
        })
        .await
    }
}

/// All running components. The hubs and the agent are dropped first.
pub(crate) struct Stage {
    pub(crate) hubs: Hubs,
    pub(crate) agent: Mutex<Agent>,
    pub(crate) values: ValuesFile,
    pub(crate) repository: ChartRepository,
    pub(crate) home: Cluster,
    sites: [Site; 2],
    logs: PathBuf,
}

impl Stage {
    pub(crate) async fn start(hubs: usize, logs: &Path) -> Result<Self> {
        let charts = VERSIONS.map(ChartSource::small);
        let (home, one, two, repository) = tokio::try_join!(
            Cluster::start("soak-home", Parts::ControlPlane),
            Site::start(Edge::One),
            Site::start(Edge::Two),
            ChartRepository::start(&charts),
        )?;
        let values = ValuesFile::new(&values(&message(0)))?;
        let flags = common_hub_flags(&repository, &values);
        let hubs = Hubs::start(&home, hubs, flags).await?;
        let kubeconfig = read_kubeconfig(&two)?;
        let fleet_client = FleetClient::new(&home);
        fleet_client
            .add_member(Edge::Two.name(), &kubeconfig)
            .await?;
        let edge_kubeconfig = one.fault_proxy.kubeconfig();
        let agent =
            enrolled_agent(&home, Edge::One.name(), AgentOptions::new(&edge_kubeconfig)).await?;
        Ok(Self {
            hubs,
            agent: Mutex::new(agent),
            values,
            repository,
            home,
            sites: [one, two],
            logs: logs.to_owned(),
        })
    }

    pub(crate) fn site(&self, edge: Edge) -> &Site {
        let [one, two] = &self.sites;
        match edge {
            Edge::One => one,
            Edge::Two => two,
        }
    }

    /// Returns the hub's kubeconfig of edge-2.
    pub(crate) fn kubeconfig(&self) -> Result<String> {
        read_kubeconfig(self.site(Edge::Two))
    }

    /// Starts another hub after one has ended.
    pub(crate) fn start_hub(&self, running_hub: &RunningHub, hub: &mut Hub) -> Result<()> {
        self.save_log(running_hub.hub_id.name(), hub)?;
        self.hubs.start_again(running_hub, hub)
    }

    /// Starts another agent, which has only the state on its cluster.
    pub(crate) fn start_agent(&self, agent: &mut Agent) -> Result<()> {
        self.save_log("agent", agent)?;
        *agent = Agent::start(&AgentOptions::new(
            &self.site(Edge::One).fault_proxy.kubeconfig(),
        ))?;
        Ok(())
    }

    /// Kills all running Helm processes with SIGKILL, without their parents. Omits actors with another fault, because
    /// waiting for their lock would outlast it.
    pub(crate) fn kill_helms(&self) {
        let folder_of = |daemon: &Daemon| daemon.folder().map(Path::to_owned).ok();
        let hubs = self.hubs.all().iter();
        let hubs = hubs.filter_map(|running_hub| {
            let hub = running_hub.hub.try_lock().ok()?;
            folder_of(&hub)
        });
        let agent = self.agent.try_lock().ok();
        let agent = agent.and_then(|agent| folder_of(&agent));
        for folder in hubs.chain(agent) {
            // Helm may have ended in the meantime.
            kill_helm(&folder).ok();
        }
    }

    /// Returns an error if a hub or the agent has ended unexpectedly.
    pub(crate) async fn check_running(&self) -> Result<()> {
        for running_hub in self.hubs.all() {
            let context = || format!("{} has ended unexpectedly", running_hub.hub_id.name());
            let hub = running_hub.hub.lock().await;
            hub.rss_bytes().with_context(context)?;
        }
        let agent = self.agent.lock().await;
        let used = agent.rss_bytes();
        used.map(drop).context("the agent has ended unexpectedly")
    }

    /// Waits until both edge clusters have recovered. An error here is not a fault of Krypton.
    pub(crate) async fn wait_for_clusters(&self) -> Result<()> {
        let [one, two] = &self.sites;
        tokio::try_join!(one.wait_for_pods(), two.wait_for_pods()).map(drop)
    }

    /// Saves the current logs, also of running processes.
    pub(crate) async fn save_logs(&self) -> Result<()> {
        for site in &self.sites {
            let folder = site.cluster.folder();
            for entry in fs::read_dir(folder).context("reading a cluster's folder")? {
                let (from, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
                if from.extension().is_some_and(|extension| extension == "log") {
                    let to = format!("{}-{}", site.edge.name(), name.to_string_lossy());
                    fs::copy(&from, self.logs.join(to)).context("saving a cluster's log")?;
                }
            }
        }
        for running_hub in self.hubs.all() {
            self.save_log(running_hub.hub_id.name(), &*running_hub.hub.lock().await)?;
        }
        self.save_log("agent", &*self.agent.lock().await)
    }

    /// Saves the complete log of a process once.
    fn save_log(&self, name: &str, daemon: &Daemon) -> Result<()> {
        let to = self.logs.join(format!("{name}-{}.log", daemon.pid()));
        fs::copy(daemon.log_path(), &to).with_context(|| format!("saving {}", to.display()))?;
        Ok(())
    }

    /// Returns the number of Helm runs in the saved logs.
    pub(crate) fn helm_runs(&self) -> Result<usize> {
        let mut runs = 0;
        for entry in fs::read_dir(&self.logs)
            .context("reading the logs")?
            .flatten()
        {
            let log = fs::read(entry.path()).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let is_helm_run =
                |line: &&str| line.contains("running helm") && !line.contains("helm processes");
            runs += log.lines().filter(is_helm_run).count();
        }
        Ok(runs)
    }

    /// Ends all faults. An error here is not a fault of Krypton.
    pub(crate) fn end_faults(&self) -> Result<()> {
        self.hubs.end_faults();
        for site in &self.sites {
            site.fault_proxy.set(Traffic::Pass);
            site.answering_proxy.forward_all();
            ensure!(
                !site.cluster.pids().is_empty(),
                "{} has ended",
                site.edge.name()
            );
        }
        Ok(())
    }
}

fn read_kubeconfig(site: &Site) -> Result<String> {
    fs::read_to_string(site.fault_proxy.kubeconfig()).context("reading a kubeconfig")
}

/// Returns the chart value `message` of this number.
pub(crate) fn message(number: u32) -> String {
    format!("m-{number}")
}

/// Returns a values file with this message.
pub(crate) fn values(message: &str) -> String {
    json!({"message": message, "replicaCount": REPLICAS}).to_string()
}

/// Returns the flags of all hubs, except the version of the chart and the flags of one hub.
fn common_hub_flags(repository: &ChartRepository, values: &ValuesFile) -> Vec<String> {
    let mut flags = chart_flags(repository, CHART, VERSIONS[0]);
    let replaced_flags = ["--retry-max", "--chart-version"];
    flags.retain(|flag| !replaced_flags.iter().any(|other| flag.starts_with(other)));
    flags.extend([
        values_flag(values),
        "--self-cluster=false".to_owned(),
        "--drift=heal".to_owned(),
        format!("--drift-interval={DRIFT_INTERVAL}"),
        format!("--retry-max={RETRY_MAX}"),
    ]);
    flags
}
