//! Measures Krypton: concurrent Tenants on an edge cluster, one more Tenant alone, and the idle time afterwards. Either
//! the hub or an agent manages the edge cluster.

use std::{
    fs,
    ops::Range,
    time::{Duration, Instant},
};

use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_tests::{
    Agent, AgentOptions, ChartRepository, Cluster, Daemon, Hub, HubOptions, Mode, Parts, bundle,
    eventually,
    fleet::{CONNECTED, FleetClient, HEALTHY, HUB_NAMESPACE, PATIENCE, condition},
    process::log_end,
};

use anyhow::{Context, Result, anyhow};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{Api, api::PostParams};
use tempfile::TempDir;

use crate::{
    AT_ONCE, CHART, CHART_VERSION,
    arrivals::{Arrivals, Span},
    load::{self, Memory},
    machine::Neighbours,
    name, patience, say, together,
    traffic::{Traffic, single_out},
};

const EDGE: &str = "edge";
const NAMESPACE: &str = "default";
/// Maximum number of concurrent create requests.
const CREATES_AT_ONCE: usize = 16;
/// Time for events, statuses and controllers to settle after the last arrival.
pub(crate) const SETTLE: Duration = Duration::from_secs(5);

/// One measured installation and its cost, until `SETTLE` after its end.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) arrivals: Span,
    /// Time until the last Helm process ended, if known.
    pub(crate) helm_ended: Option<Duration>,
    /// Includes the CPU time of children, such as Helm.
    pub(crate) cpu_seconds: f64,
    /// The part of the hub or agent itself. Zero for the floor.
    pub(crate) own_cpu_seconds: f64,
    pub(crate) edge: Traffic,
    /// Cores used by other processes.
    pub(crate) neighbours: f64,
}

#[derive(Debug, Clone)]
pub(crate) struct Krypton {
    pub(crate) many: Work,
    /// Requests to the home cluster for the many Tenants.
    pub(crate) home: Traffic,
    pub(crate) memory: Memory,
    /// One more Tenant, installed alone with warm caches.
    pub(crate) single: Work,
    pub(crate) idle: Option<Idle>,
}

/// The same span of time twice, with and without Krypton.
#[derive(Debug, Clone)]
pub(crate) struct Idle {
    pub(crate) cpu_seconds: f64,
    pub(crate) memory: Memory,
    pub(crate) with: Rest,
    /// Measured only together with the hub.
    pub(crate) without: Option<Rest>,
}

/// Requests to the API servers and CPU usage of other processes while idle.
#[derive(Debug, Clone)]
pub(crate) struct Rest {
    pub(crate) edge: Traffic,
    pub(crate) home: Traffic,
    pub(crate) neighbours: f64,
}

pub(crate) struct Setup {
    hub: Hub,
    /// `None` if the hub manages the edge cluster.
    agent: Option<Agent>,
    home: Cluster,
    edge: Cluster,
    folder: TempDir,
}

pub(crate) async fn measure(
    size: u32,
    mode: Mode,
    idle: Duration,
    repository: &ChartRepository,
    more: &[String],
) -> Result<Krypton> {
    let by = match mode {
        Mode::Agent => "hub and agent",
        Mode::Proxy | Mode::SelfCluster => "hub",
    };
    let with = match more {
        [] => String::new(),
        more => format!(" with {}", more.join(" ")),
    };
    say(&format!("{size} Tenants: starting home, edge, {by}{with}"));
    let mut setup = Setup::start(mode, repository, more).await?;
    let outcome = setup.measure(size, idle).await;
    outcome.map_err(|error| with_log(error, setup.actor()))
}

impl Setup {
    /// Starts the clusters, the hub with `more` flags, and the agent.
    pub(crate) async fn start(
        mode: Mode,
        repository: &ChartRepository,
        more: &[String],
    ) -> Result<Self> {
        let (home, edge) = tokio::try_join!(
            Cluster::start("home", Parts::ControlPlane),
            Cluster::start(EDGE, Parts::WithPods),
        )?;
        let folder = TempDir::with_prefix("krypton-bench-").context("creating a folder")?;
        let kubeconfig = async |cluster: &Cluster| {
            let file = folder.path().join(cluster.name());
            fs::write(&file, single_out(cluster).await?).context("writing a kubeconfig")?;
            Ok::<_, anyhow::Error>(file)
        };
        let (at_home, at_edge) = (kubeconfig(&home).await?, kubeconfig(&edge).await?);
        let flags = [
            format!("--namespace={HUB_NAMESPACE}"),
            format!("--chart-repo={}", repository.url()),
            format!("--chart-name={CHART}"),
            format!("--chart-version={CHART_VERSION}"),
            "--chart-install-crds=false".to_owned(),
            "--self-cluster=false".to_owned(),
            format!("--max-concurrent-helm={AT_ONCE}"),
            // The same as for the floor, which has only one cluster.
            format!("--max-concurrent-helm-per-member={AT_ONCE}"),
        ];
        let mut hub = Hub::start(&HubOptions::new(&at_home).args(flags).args(more))?;
        let fleet_client = FleetClient::at(&home);
        let agent = if mode == Mode::Agent {
            hub.ready(PATIENCE).await?;
            let join_file = folder.path().join("bundle.yaml");
            // The folder is readable only by its owner.
            fs::write(&join_file, bundle(&home, EDGE).await?).context("writing a join bundle")?;
            let options = AgentOptions::new(&at_edge).join_file(&join_file);
            let flag = format!("--max-concurrent-helm={AT_ONCE}");
            Some(Agent::start(&options.args([flag]))?)
        } else {
            let kubeconfig = fs::read_to_string(&at_edge).context("reading a kubeconfig")?;
            fleet_client.add_member(EDGE, &kubeconfig).await?;
            None
        };
        let setup = Self {
            hub,
            agent,
            home,
            edge,
            folder,
        };
        setup.connected().await?;
        Ok(setup)
    }

    async fn connected(&self) -> Result<()> {
        let fleet_client = FleetClient::at(&self.home);
        let shown = fleet_client.member_shows(EDGE, &[CONNECTED, HEALTHY]).await;
        shown
            .map(drop)
            .map_err(|error| with_log(error, self.actor()))
    }

    /// Restarts the agent, which then lists and reconciles everything. Returns its requests to the edge cluster until
    /// they stop.
    pub(crate) async fn pass(&mut self) -> Result<Traffic> {
        if let Some(agent) = &mut self.agent {
            agent.stop().await?;
        }
        let before = Traffic::read(&self.edge).await?;
        let kubeconfig = self.folder.path().join(EDGE);
        let flag = format!("--max-concurrent-helm={AT_ONCE}");
        let options = AgentOptions::new(&kubeconfig).args([flag]);
        self.agent = Some(Agent::start(&options)?);
        let mut asked = 0;
        eventually("the agent to be idle", async || {
            let now = Traffic::read(&self.edge).await?.since(&before);
            let more = now.of_subject - std::mem::replace(&mut asked, now.of_subject);
            tokio::time::sleep(SETTLE).await;
            Ok((now.of_subject > 0 && more == 0).then_some(now))
        })
        .await
        .map_err(|error| with_log(error, self.actor()))
    }

    /// Returns the number of release revisions on the edge cluster.
    pub(crate) async fn revisions(&self) -> Result<usize> {
        Ok(FleetClient::at(&self.edge).releases().await?.len())
    }

    /// Returns the process that manages the edge cluster.
    pub(crate) fn actor(&self) -> &Daemon {
        match &self.agent {
            Some(agent) => agent,
            None => &self.hub,
        }
    }

    async fn measure(&mut self, size: u32, idle: Duration) -> Result<Krypton> {
        tokio::time::sleep(SETTLE).await;
        let home = Traffic::read(&self.home).await?;
        let many = self.install(0..size).await?;
        let home = Traffic::read(&self.home).await?.since(&home);
        let memory = Memory::of(self.actor().pid())?;
        say(&format!(
            "all Ready after {:.1} s",
            many.arrivals.last.as_secs_f64()
        ));

        let mut idled = None;
        if !idle.is_zero() {
            say(&format!("idling for {} s", idle.as_secs()));
            let before = self.actor().cpu_seconds()?;
            let with = self.rest(idle).await?;
            let cpu_seconds = self.actor().cpu_seconds()? - before;
            idled = Some(Idle {
                cpu_seconds,
                memory: Memory::of(self.actor().pid())?,
                with,
                without: None,
            });
        }
        let single = self.install(size..size + 1).await?;
        if let Some(idled) = idled.as_mut().filter(|_| self.agent.is_none()) {
            self.hub.stop().await?;
            tokio::time::sleep(SETTLE).await;
            say(&format!("idling for {} s without the hub", idle.as_secs()));
            idled.without = Some(self.rest(idle).await?);
        }
        Ok(Krypton {
            many,
            home,
            memory,
            single,
            idle: idled,
        })
    }

    /// Creates Tenants concurrently, and waits until each is Ready and all Helm processes have ended.
    pub(crate) async fn install(&self, numbers: Range<u32>) -> Result<Work> {
        let count = numbers.end - numbers.start;
        let client = self.edge.client();
        let tenants: Api<Tenant> = Api::namespaced(client.clone(), NAMESPACE);
        let mut arrivals = Arrivals::watch(tenants.clone()).await?;
        let (edge, cpu) = (
            Traffic::read(&self.edge).await?,
            self.actor().cpu_seconds()?,
        );
        let own = load::own_seconds(self.actor().pid())?;
        let neighbours = Neighbours::watch(self.known()?)?;

        let clock = Instant::now();
        let creating = create(&tenants, numbers.clone());
        let arriving = arrivals.all(count, clock, patience(count), |tenant| {
            ready(tenant, &numbers)
        });
        let (_, arrivals) = together(creating, arriving).await?;
        let neighbours = neighbours.cores(self.known()?)?;
        tokio::time::sleep(SETTLE).await;
        let edge = Traffic::read(&self.edge).await?.since(&edge);
        let cpu_seconds = self.actor().cpu_seconds()? - cpu;
        let own_cpu_seconds = load::own_seconds(self.actor().pid())? - own;
        Ok(Work {
            arrivals,
            helm_ended: None,
            cpu_seconds,
            own_cpu_seconds,
            edge,
            neighbours,
        })
    }

    pub(crate) async fn rest(&self, idle: Duration) -> Result<Rest> {
        let (edge, home) = self.traffic().await?;
        let neighbours = Neighbours::watch(self.known()?)?;
        tokio::time::sleep(idle).await;
        let neighbours = neighbours.cores(self.known()?)?;
        let (edge_now, home_now) = self.traffic().await?;
        Ok(Rest {
            edge: edge_now.since(&edge),
            home: home_now.since(&home),
            neighbours,
        })
    }

    async fn traffic(&self) -> Result<(Traffic, Traffic)> {
        Ok((
            Traffic::read(&self.edge).await?,
            Traffic::read(&self.home).await?,
        ))
    }

    /// Returns the CPU time of all processes of the benchmark. A hub that has ended counts as zero.
    fn known(&self) -> Result<f64> {
        let daemons = [Some(&*self.hub), self.agent.as_deref()];
        let running = daemons.into_iter().flatten().map(Daemon::pid);
        let running = running.filter(|pid| load::own_seconds(*pid).is_ok());
        let clusters = [self.home.pids(), self.edge.pids()].concat();
        load::known_seconds(&running.chain(clusters).collect::<Vec<_>>())
    }
}

/// Adds the daemon's log to the error, because the log is deleted together with the daemon.
pub(crate) fn with_log(error: anyhow::Error, daemon: &Daemon) -> anyhow::Error {
    anyhow!("{error:#}\nits log ends:\n{}", log_end(daemon.log_path()))
}

async fn create(tenants: &Api<Tenant>, numbers: Range<u32>) -> Result<()> {
    let each = numbers.map(|number| async move {
        let tenant = Tenant::new(&name(number), TenantSpec::default());
        tenants.create(&PostParams::default(), &tenant).await
    });
    let creates = stream::iter(each).buffer_unordered(CREATES_AT_ONCE);
    creates
        .try_for_each(|_| async { Ok(()) })
        .await
        .context("creating Tenants")
}

/// Returns the reason why the Tenant is not Ready. Ignores Tenants with other numbers, which existed before.
fn ready(tenant: &Tenant, numbers: &Range<u32>) -> Result<(), String> {
    if !numbers
        .clone()
        .any(|number| tenant.metadata.name == Some(name(number)))
    {
        return Err("not one of these".to_owned());
    }
    let status = tenant.status.clone().unwrap_or_default();
    if status.observed_generation != tenant.metadata.generation {
        return Err("no status yet".to_owned());
    }
    match condition(&status.conditions, "Ready") {
        Some(ready) if ready.status == "True" => Ok(()),
        _ => Err(status
            .last_message
            .unwrap_or_else(|| "no message".to_owned())),
    }
}
