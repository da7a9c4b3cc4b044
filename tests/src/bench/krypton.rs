//! Measures Krypton: concurrent Tenants on an edge cluster, one more Tenant alone, and the idle time afterwards. Either
//! the hub or an agent manages the edge cluster.

use std::{
    fs,
    ops::Range,
    path::Path,
    time::{Duration, Instant},
};

use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_tests::{
    Agent, AgentOptions, ChartRepository, Cluster, Daemon, Hub, HubOptions, Mode, Parts,
    STEP_DEADLINE, eventually,
    fleet::{CONNECTED, FleetClient, HEALTHY, HUB_NAMESPACE, condition},
    membership::enrolled_agent,
    process::log_end,
};

use anyhow::{Context, Result, anyhow};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{Api, api::PostParams};
use tempfile::TempDir;

use crate::{
    CHART, CHART_VERSION, HELM_CONCURRENCY,
    arrivals::{ArrivalSpan, Arrivals},
    install_timeout,
    load::{self, CpuTimes, Memory},
    log_progress,
    machine::OtherLoad,
    name,
    traffic::{Traffic, dedicated_kubeconfig},
};

const EDGE: &str = "edge";
const NAMESPACE: &str = "default";
/// Maximum number of concurrent create requests.
const CREATE_CONCURRENCY: usize = 16;
/// Time for events, statuses and controllers to settle after the last arrival.
pub(crate) const SETTLE: Duration = Duration::from_secs(5);

/// One measured installation and its cost, until `SETTLE` after its end.
#[derive(Debug, Clone)]
pub(crate) struct InstallCost {
    pub(crate) arrivals: ArrivalSpan,
    /// Time until the last Helm process ended, if known.
    pub(crate) helm_ended: Option<Duration>,
    /// Includes the CPU time of children, such as Helm.
    pub(crate) cpu_seconds: f64,
    /// The part of the hub or agent itself. Zero for the floor.
    pub(crate) own_cpu_seconds: f64,
    pub(crate) edge: Traffic,
    /// Cores used by other processes.
    pub(crate) other_cores: f64,
}

#[derive(Debug, Clone)]
pub(crate) struct KryptonResults {
    pub(crate) concurrent: InstallCost,
    /// Requests to the home cluster for the many Tenants.
    pub(crate) home: Traffic,
    pub(crate) memory: Memory,
    /// One more Tenant, installed alone with warm caches.
    pub(crate) single: InstallCost,
    pub(crate) idle: Option<IdleComparison>,
}

/// The same span of time twice, with and without Krypton.
#[derive(Debug, Clone)]
pub(crate) struct IdleComparison {
    pub(crate) memory: Memory,
    pub(crate) with: IdleUsage,
    /// Measured only together with the hub.
    pub(crate) without: Option<IdleUsage>,
}

/// Requests to the API servers and CPU usage while idle.
#[derive(Debug, Clone)]
pub(crate) struct IdleUsage {
    pub(crate) edge: Traffic,
    pub(crate) home: Traffic,
    /// CPU time of the hub or agent. Zero if it had ended before.
    pub(crate) cpu_seconds: f64,
    pub(crate) other_cores: f64,
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
    extra_flags: &[String],
) -> Result<KryptonResults> {
    let actors = match mode {
        Mode::Agent => "hub and agent",
        Mode::Proxy | Mode::SelfCluster => "hub",
    };
    let with = match extra_flags {
        [] => String::new(),
        extra_flags => format!(" with {}", extra_flags.join(" ")),
    };
    log_progress(&format!(
        "{size} Tenants: starting home, edge, {actors}{with}"
    ));
    let mut setup = Setup::start(mode, repository, extra_flags).await?;
    let outcome = setup.measure(size, idle).await;
    outcome.map_err(|error| with_log(error, setup.actor()))
}

impl Setup {
    /// Starts the clusters, the hub with `more` flags, and the agent.
    pub(crate) async fn start(
        mode: Mode,
        repository: &ChartRepository,
        extra_flags: &[String],
    ) -> Result<Self> {
        let (home, edge) = tokio::try_join!(
            Cluster::start("home", Parts::ControlPlane),
            Cluster::start(EDGE, Parts::WithPods),
        )?;
        let folder = TempDir::with_prefix("krypton-bench-").context("creating a folder")?;
        let kubeconfig = async |cluster: &Cluster| {
            let file = folder.path().join(cluster.name());
            fs::write(&file, dedicated_kubeconfig(cluster).await?)
                .context("writing a kubeconfig")?;
            Ok::<_, anyhow::Error>(file)
        };
        let (home_kubeconfig, edge_kubeconfig) =
            (kubeconfig(&home).await?, kubeconfig(&edge).await?);
        let flags = [
            format!("--namespace={HUB_NAMESPACE}"),
            format!("--chart-repo={}", repository.url()),
            format!("--chart-name={CHART}"),
            format!("--chart-version={CHART_VERSION}"),
            "--chart-install-crds=false".to_owned(),
            "--self-cluster=false".to_owned(),
            format!("--max-concurrent-helm={HELM_CONCURRENCY}"),
            // The same as for the floor, which has only one cluster.
            format!("--max-concurrent-helm-per-member={HELM_CONCURRENCY}"),
        ];
        let mut hub = Hub::start(
            &HubOptions::new(&home_kubeconfig)
                .args(flags)
                .args(extra_flags),
        )?;
        let fleet_client = FleetClient::new(&home);
        let agent = if mode == Mode::Agent {
            hub.wait_ready(STEP_DEADLINE).await?;
            Some(enrolled_agent(&home, EDGE, agent_options(&edge_kubeconfig)).await?)
        } else {
            let kubeconfig =
                fs::read_to_string(&edge_kubeconfig).context("reading a kubeconfig")?;
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
        let member = fleet_client
            .wait_for_member(EDGE, &[CONNECTED, HEALTHY])
            .await;
        member.map_err(|error| with_log(error, setup.actor()))?;
        Ok(setup)
    }

    /// Restarts the agent, which then lists and reconciles everything. Returns its requests to the edge cluster until
    /// they stop.
    pub(crate) async fn restart_agent(&mut self) -> Result<Traffic> {
        if let Some(agent) = &mut self.agent {
            agent.stop().await?;
        }
        let before = Traffic::read(&self.edge).await?;
        let kubeconfig = self.folder.path().join(EDGE);
        self.agent = Some(Agent::start(&agent_options(&kubeconfig))?);
        let mut previous_requests = 0;
        eventually("the agent to be idle", async || {
            let now = Traffic::read(&self.edge).await?.since(&before);
            let new_requests =
                now.own_requests - std::mem::replace(&mut previous_requests, now.own_requests);
            tokio::time::sleep(SETTLE).await;
            Ok((now.own_requests > 0 && new_requests == 0).then_some(now))
        })
        .await
        .map_err(|error| with_log(error, self.actor()))
    }

    /// Returns the number of release revisions on the edge cluster.
    pub(crate) async fn revisions(&self) -> Result<usize> {
        Ok(FleetClient::new(&self.edge).releases().await?.len())
    }

    /// Returns the process that manages the edge cluster.
    pub(crate) fn actor(&self) -> &Daemon {
        match &self.agent {
            Some(agent) => agent,
            None => &self.hub,
        }
    }

    async fn measure(&mut self, size: u32, idle: Duration) -> Result<KryptonResults> {
        tokio::time::sleep(SETTLE).await;
        let home = Traffic::read(&self.home).await?;
        let concurrent = self.install(0..size).await?;
        let home = Traffic::read(&self.home).await?.since(&home);
        let memory = Memory::read_for(self.actor().pid())?;
        log_progress(&format!(
            "all Ready after {:.1} s",
            concurrent.arrivals.last.as_secs_f64()
        ));

        let mut idle_comparison = None;
        if !idle.is_zero() {
            log_progress(&format!("idling for {} s", idle.as_secs()));
            idle_comparison = Some(IdleComparison {
                with: self.measure_idle(idle).await?,
                memory: Memory::read_for(self.actor().pid())?,
                without: None,
            });
        }
        let single = self.install(size..size + 1).await?;
        if let Some(idle_comparison) = idle_comparison.as_mut().filter(|_| self.agent.is_none()) {
            self.hub.stop().await?;
            tokio::time::sleep(SETTLE).await;
            log_progress(&format!("idling for {} s without the hub", idle.as_secs()));
            idle_comparison.without = Some(self.measure_idle(idle).await?);
        }
        Ok(KryptonResults {
            concurrent,
            home,
            memory,
            single,
            idle: idle_comparison,
        })
    }

    /// Creates Tenants concurrently, and waits until each is Ready and all Helm processes have ended.
    pub(crate) async fn install(&self, numbers: Range<u32>) -> Result<InstallCost> {
        let count = numbers.end - numbers.start;
        let client = self.edge.client();
        let tenants: Api<Tenant> = Api::namespaced(client.clone(), NAMESPACE);
        let mut arrivals = Arrivals::watch(tenants.clone()).await?;
        let (edge, cpu_before) = (
            Traffic::read(&self.edge).await?,
            self.actor().cpu_seconds()?,
        );
        let own_cpu_before = CpuTimes::read_for(self.actor().pid())?;
        let other_load = OtherLoad::watch(self.known_cpu_seconds()?)?;

        let clock = Instant::now();
        let creating = create(&tenants, numbers.clone());
        let waiting = arrivals.wait_for_all(count, clock, install_timeout(count), |tenant| {
            check_ready(tenant, &numbers)
        });
        let ((), arrivals) = tokio::try_join!(creating, waiting)?;
        let other_cores = other_load.cores(self.known_cpu_seconds()?)?;
        tokio::time::sleep(SETTLE).await;
        let edge = Traffic::read(&self.edge).await?.since(&edge);
        let cpu_seconds = self.actor().cpu_seconds()? - cpu_before;
        let own_cpu = CpuTimes::read_for(self.actor().pid())?.since(&own_cpu_before);
        Ok(InstallCost {
            arrivals,
            helm_ended: None,
            cpu_seconds,
            own_cpu_seconds: own_cpu.total(),
            edge,
            other_cores,
        })
    }

    pub(crate) async fn measure_idle(&self, idle: Duration) -> Result<IdleUsage> {
        let cpu_before = self.actor().cpu_seconds().ok();
        let (edge, home) = self.traffic().await?;
        let other_load = OtherLoad::watch(self.known_cpu_seconds()?)?;
        tokio::time::sleep(idle).await;
        let other_cores = other_load.cores(self.known_cpu_seconds()?)?;
        let (edge_now, home_now) = self.traffic().await?;
        let cpu_seconds = match cpu_before {
            Some(before) => self.actor().cpu_seconds()? - before,
            None => 0.0,
        };
        Ok(IdleUsage {
            edge: edge_now.since(&edge),
            home: home_now.since(&home),
            cpu_seconds,
            other_cores,
        })
    }

    async fn traffic(&self) -> Result<(Traffic, Traffic)> {
        Ok((
            Traffic::read(&self.edge).await?,
            Traffic::read(&self.home).await?,
        ))
    }

    /// Returns the CPU time of all processes of the benchmark. A hub that has ended counts as zero.
    fn known_cpu_seconds(&self) -> Result<f64> {
        let daemons = [Some(&*self.hub), self.agent.as_deref()];
        let running = daemons.into_iter().flatten().map(Daemon::pid);
        let running = running.filter(|pid| CpuTimes::read_for(*pid).is_ok());
        let clusters = [self.home.pids(), self.edge.pids()].concat();
        load::total_seconds(&running.chain(clusters).collect::<Vec<_>>())
    }
}

fn agent_options(kubeconfig: &Path) -> AgentOptions<'_> {
    let flag = format!("--max-concurrent-helm={HELM_CONCURRENCY}");
    AgentOptions::new(kubeconfig).args([flag])
}

/// Adds the daemon's log to the error, because the log is deleted together with the daemon.
pub(crate) fn with_log(error: anyhow::Error, daemon: &Daemon) -> anyhow::Error {
    anyhow!("{error:#}\nits log ends:\n{}", log_end(daemon.log_path()))
}

async fn create(tenants: &Api<Tenant>, numbers: Range<u32>) -> Result<()> {
    let creations = numbers.map(|number| async move {
        let tenant = Tenant::new(&name(number), TenantSpec::default());
        tenants.create(&PostParams::default(), &tenant).await
    });
    let creates = stream::iter(creations).buffer_unordered(CREATE_CONCURRENCY);
    creates
        .try_for_each(|_| async { Ok(()) })
        .await
        .context("creating Tenants")
}

/// Returns the reason why the Tenant is not Ready. Ignores Tenants with other numbers, which existed before.
fn check_ready(tenant: &Tenant, numbers: &Range<u32>) -> Result<(), String> {
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
