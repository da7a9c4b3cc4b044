//! A home cluster with its hub, for agents without clusters.

use std::{fs, time::Instant};

use krypton_tests::{
    Cluster, Hub, HubOptions, Parts,
    fleet::{HUB_NAMESPACE, ValuesFile, values_flag},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;

use crate::{
    CHART, CHART_VERSION,
    krypton::with_log,
    load, log_progress,
    simulated::{self, AgentObservation, Agents, DEADLINE, Enrolled, Member},
    traffic::dedicated_kubeconfig,
};

/// Size of the chart's values, which every member receives.
const VALUES_BYTES: usize = 2048;
/// Number of files for other purposes than connections.
const OTHER_FILES: u64 = 256;

/// A home with its hub, for agents without clusters.
pub(crate) struct Stage {
    pub(crate) hub: Hub,
    values: ValuesFile,
    pub(crate) home: Cluster,
    kubeconfig: std::path::PathBuf,
    _folder: TempDir,
}

impl Stage {
    /// Starts home and the hub of this benchmark, and raises the limit of open files for its agents.
    pub(crate) async fn start(benchmark: &str, agents: u32) -> Result<Self> {
        allow_files(agents)?;
        log_progress(&format!("{benchmark}: starting home and hub"));
        let home = Cluster::start("home", Parts::ControlPlane).await?;
        let folder = TempDir::with_prefix("krypton-bench-").context("creating a folder")?;
        let kubeconfig = folder.path().join("home.kubeconfig");
        fs::write(&kubeconfig, dedicated_kubeconfig(&home).await?)
            .context("writing the hub's kubeconfig")?;
        let values = ValuesFile::new(&values_yaml(0))?;
        let mut hub = Hub::start(&HubOptions::new(&kubeconfig).args(flags(&values)))?;
        let ready = hub.wait_ready(DEADLINE).await;
        ready.map_err(|error| with_log(error, &hub))?;
        Ok(Self {
            hub,
            values,
            home,
            kubeconfig,
            _folder: folder,
        })
    }

    /// Kills the hub, and starts another one on its port.
    pub(crate) async fn restart_hub(&mut self) -> Result<()> {
        self.hub.kill9().await?;
        let options = HubOptions::new(&self.kubeconfig).args(flags(&self.values));
        self.hub = Hub::start(&options.on_port_of(&self.hub))?;
        Ok(())
    }

    pub(crate) async fn create_members(&self, prefix: &str, count: u32) -> Result<Vec<Member>> {
        let names = (0..count).map(|number| format!("{prefix}-{number:04}"));
        simulated::create_members(&self.home, names).await
    }

    pub(crate) async fn enroll(&self, members: &[Member]) -> Result<Vec<Enrolled>> {
        simulated::enroll(&self.home, &self.hub, members).await
    }

    /// Changes the chart's values. Returns the times at which the agents received them, in ascending order.
    pub(crate) async fn change(&self, agents: &Agents, round: u32) -> Result<Vec<Instant>> {
        let previous_version = agents.version();
        self.values.write(&values_yaml(round))?;
        let received_at = |observation: &AgentObservation| {
            let later = observation
                .desired
                .filter(|(version, _)| Some(*version) > previous_version);
            later.map(|(_, at)| at)
        };
        agents.wait_for_all("have the change", received_at).await
    }

    /// Returns the CPU time of all processes of the benchmark.
    pub(crate) fn known_cpu_seconds(&self) -> Result<f64> {
        load::total_seconds(&[self.home.pids(), vec![self.hub.pid()]].concat())
    }
}

fn flags(values: &ValuesFile) -> Vec<String> {
    vec![
        format!("--namespace={HUB_NAMESPACE}"),
        // Not fetched, because no cluster is behind the agents.
        "--chart-repo=https://charts.example.org".to_owned(),
        format!("--chart-name={CHART}"),
        format!("--chart-version={CHART_VERSION}"),
        values_flag(values),
        "--self-cluster=false".to_owned(),
    ]
}

/// Returns values of a typical size.
fn values_yaml(round: u32) -> String {
    format!("round: {round}\nrest: {}\n", "x".repeat(VALUES_BYTES))
}

/// Returns a number from a Prometheus text. `name` includes the labels.
pub(crate) fn number(metrics: &str, name: &str) -> Result<u64> {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name));
    let value = line.with_context(|| format!("no metric {name}"))?.trim();
    value
        .parse()
        .with_context(|| format!("metric {name} is {value}"))
}

/// Raises the limit of open files. This process has the agents' ends of all connections. The hub has the other ends,
/// and inherits the limit.
fn allow_files(agents: u32) -> Result<()> {
    let needed = u64::from(agents) + OTHER_FILES;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if maximum.is_some_and(|maximum| maximum < needed) {
        bail!("{agents} agents need {needed} open files; raise the limit ('ulimit -Hn')");
    }
    let limit = Rlimit {
        current: Some(needed),
        maximum,
    };
    setrlimit(Resource::Nofile, limit).context("raising the limit of open files")
}
