//! Home and two edges, real, with hubs and agent, and what is faulty between them.

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
    hubs::{Hubs, Post},
    judgement::CHART,
    whom::{Edge, Workspace},
};

pub(crate) const VERSIONS: [&str; 2] = ["1.0.0", "1.1.0"];
pub(crate) const REPLICAS: u32 = 1;
/// How long a cluster may take to get well.
const CLUSTER: Duration = Duration::from_secs(300);
/// Short pauses, so that what is waited for fits into the quiet.
const RETRY_MAX: &str = "5s";
const DRIFT_INTERVAL: &str = "15s";

/// An edge, and the ways to it: line, then who answers in the apiserver's place, then the apiserver.
pub(crate) struct Site {
    pub(crate) edge: Edge,
    pub(crate) cluster: Cluster,
    /// The administrator's, directly.
    pub(crate) client: Client,
    pub(crate) answers: AnsweringProxy,
    pub(crate) way: FaultProxy,
}

impl Site {
    async fn start(edge: Edge) -> Result<Self> {
        let name = format!("soak-{}", edge.name());
        let cluster = Cluster::start(&name, Parts::WithPods).await?;
        let answers = AnsweringProxy::before(&cluster).await?;
        let way = FaultProxy::before_proxy(&answers).await?;
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
            answers,
            way,
        })
    }

    /// Waits until the cluster itself is well again: its controllers and its scheduler follow what changes, and
    /// new pods get ready. On a loaded machine that takes them long after their apiserver has been killed.
    async fn runs_pods(&self) -> Result<()> {
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
        eventually_within("the canary to be taken", CLUSTER, async || {
            self.cluster.apply(&canary.to_string()).await.map(Some)
        })
        .await?;
        let api: Api<Deployment> = Api::namespaced(self.client.clone(), "default");
        let what = format!("a new pod to be ready on {}", self.edge.name());
        eventually_within(&what, CLUSTER, async || {
            let canary = api.get(name).await?;
            let told = canary.status.unwrap_or_default();
            let followed = told.observed_generation == canary.metadata.generation;
            let all = |count: Option<i32>| count == Some(1);
            let whole = all(told.updated_replicas) && all(told.available_replicas);
            ensure!(followed && whole && all(told.replicas), "{told:?}");
            Ok(Some(()))
        })
        .await
    }
}

/// Everything that runs. Hubs and agent go first.
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
    pub(crate) async fn set(hubs: usize, logs: &Path) -> Result<Self> {
        let charts = VERSIONS.map(ChartSource::small);
        let (home, one, two, repository) = tokio::try_join!(
            Cluster::start("soak-home", Parts::ControlPlane),
            Site::start(Edge::One),
            Site::start(Edge::Two),
            ChartRepository::start(&charts),
        )?;
        let values = ValuesFile::new(&values(&message(0)))?;
        let flags = hub_flags(&repository, &values);
        let hubs = Hubs::start(&home, hubs, flags).await?;
        let kubeconfig =
            fs::read_to_string(two.way.kubeconfig()).context("reading a kubeconfig")?;
        let desk = FleetClient::at(&home);
        desk.add_member(Edge::Two.name(), &kubeconfig).await?;
        let way = one.way.kubeconfig();
        let agent = enrolled_agent(&home, Edge::One.name(), AgentOptions::new(&way)).await?;
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

    /// The kubeconfig of edge-2 as the hub has it.
    pub(crate) fn kubeconfig(&self) -> Result<String> {
        let file = self.site(Edge::Two).way.kubeconfig();
        fs::read_to_string(file).context("reading a kubeconfig")
    }

    /// Another hub in place of one that has ended.
    pub(crate) fn start_hub(&self, post: &Post, hub: &mut Hub) -> Result<()> {
        self.keep_log(post.seat.name(), hub)?;
        self.hubs.start_again(post, hub)
    }

    /// The same of the agent, which has nothing but what is on its cluster.
    pub(crate) fn start_agent(&self, agent: &mut Agent) -> Result<()> {
        self.keep_log("agent", agent)?;
        *agent = Agent::start(&AgentOptions::new(&self.site(Edge::One).way.kubeconfig()))?;
        Ok(())
    }

    /// SIGKILL to every helm that runs, and not to those who run them. Whoever has another fault already is left
    /// out: it would be over before it could be asked.
    pub(crate) fn kill_helms(&self) {
        let of = |daemon: &Daemon| daemon.folder().map(Path::to_owned).ok();
        let hubs = (self.hubs.all().iter())
            .filter_map(|post| post.hub.try_lock().ok().and_then(|hub| of(&hub)));
        let agent = self.agent.try_lock().ok().and_then(|agent| of(&agent));
        for folder in hubs.chain(agent) {
            // One that has just ended by itself is none.
            kill_helm(&folder).ok();
        }
    }

    /// Fails when a hub or the agent has ended though nobody has killed it.
    pub(crate) async fn all_run(&self) -> Result<()> {
        for post in self.hubs.all() {
            let told = || format!("{} has ended by itself", post.seat.name());
            post.hub.lock().await.rss_bytes().with_context(told)?;
        }
        self.agent
            .lock()
            .await
            .rss_bytes()
            .context("the agent has ended by itself")?;
        Ok(())
    }

    /// Waits until both edges are well, whatever Krypton does there.
    /// An error is not a fault of Krypton.
    pub(crate) async fn clusters_are_well(&self) -> Result<()> {
        let [one, two] = &self.sites;
        tokio::try_join!(one.runs_pods(), two.runs_pods()).map(drop)
    }

    /// The logs so far, of those that run too.
    pub(crate) async fn keep_logs(&self) -> Result<()> {
        for site in &self.sites {
            let folder = site.cluster.folder();
            for entry in fs::read_dir(folder).context("reading a cluster's folder")? {
                let (from, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
                if from.extension().is_some_and(|extension| extension == "log") {
                    let to = format!("{}-{}", site.edge.name(), name.to_string_lossy());
                    fs::copy(&from, self.logs.join(to)).context("keeping a cluster's log")?;
                }
            }
        }
        for post in self.hubs.all() {
            self.keep_log(post.seat.name(), &*post.hub.lock().await)?;
        }
        self.keep_log("agent", &*self.agent.lock().await)
    }

    /// Once for each process, with all that it has said so far.
    fn keep_log(&self, name: &str, daemon: &Daemon) -> Result<()> {
        let to = self.logs.join(format!("{name}-{}.log", daemon.pid()));
        fs::copy(daemon.log_path(), &to).with_context(|| format!("keeping {}", to.display()))?;
        Ok(())
    }

    /// How often helm was run, by the logs that are kept.
    pub(crate) fn helm_runs(&self) -> Result<usize> {
        let mut runs = 0;
        for entry in fs::read_dir(&self.logs)
            .context("reading the logs")?
            .flatten()
        {
            let log = fs::read(entry.path()).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let told =
                |line: &&str| line.contains("running helm") && !line.contains("helm processes");
            runs += log.lines().filter(told).count();
        }
        Ok(runs)
    }

    /// An error is not a fault of Krypton.
    pub(crate) fn good_again(&self) -> Result<()> {
        self.hubs.good_again();
        for site in &self.sites {
            site.way.set(Traffic::Pass);
            site.answers.tell_the_truth();
            ensure!(
                !site.cluster.pids().is_empty(),
                "{} has ended",
                site.edge.name()
            );
        }
        Ok(())
    }
}

/// The value `message` of this number.
pub(crate) fn message(number: u32) -> String {
    format!("m-{number}")
}

/// The values file with it.
pub(crate) fn values(message: &str) -> String {
    json!({"message": message, "replicaCount": REPLICAS}).to_string()
}

/// Of all hubs, but for the version of the chart and what is each one's own.
fn hub_flags(repository: &ChartRepository, values: &ValuesFile) -> Vec<String> {
    let mut flags = chart_flags(repository, CHART, VERSIONS[0]);
    let set_here = ["--retry-max", "--chart-version"];
    flags.retain(|flag| !set_here.iter().any(|other| flag.starts_with(other)));
    flags.extend([
        values_flag(values),
        "--self-cluster=false".to_owned(),
        "--drift=heal".to_owned(),
        format!("--drift-interval={DRIFT_INTERVAL}"),
        format!("--retry-max={RETRY_MAX}"),
    ]);
    flags
}
