//! Measures one hub with a thousand agents: the propagation of a change, the hub's resource usage, and the reconnection
//! of all agents after a crash.

use std::{
    fs,
    time::{Duration, Instant},
};

use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec, EdgeClusterStatus};
use krypton_hub::ca::Authority;
use krypton_tests::{
    Cluster, Hub, HubOptions, Parts, eventually_within,
    fleet::{HUB_NAMESPACE, ValuesFile, condition, values_flag},
};
use krypton_types::{desired::Version, names::CA_SECRET};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, ResourceExt, api::PostParams};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;

use crate::{
    CHART, CHART_VERSION,
    arrivals::Arrivals,
    histogram::Histogram,
    krypton::{SETTLE, with_log},
    load::{self, Memory, Times},
    machine::Neighbours,
    say,
    simulated::{Agents, Enrolled, Member, Seen},
    traffic::{Traffic, single_out},
};

const PROPAGATION: &str = "krypton_hub_desired_propagation_seconds";
const HANDSHAKES: &str = "krypton_hub_handshakes_in_flight_max";
const CREATES_AT_ONCE: usize = 16;
pub(crate) const DEADLINE: Duration = Duration::from_secs(180);
/// Interval between CPU readings while idle. Long compared to the unit of CPU time, and short compared to the minute
/// between two writes of `lastSeen`.
const SAMPLE: Duration = Duration::from_secs(5);
/// Size of the chart's values, which every member receives.
const VALUES_BYTES: usize = 2048;
/// Number of files for other purposes than connections.
const FILES: u64 = 256;
/// After a link is established, the agent sends its full report within this time.
const AFTER_LINK: Duration = Duration::from_secs(1);
const RESYNC: &str = "requesting all of them";

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Simulated agents
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub(crate) agents: u32,
    /// Seconds of idling
    #[arg(long, value_name = "SECONDS", default_value_t = 120,
        value_parser = clap::value_parser!(u64).range(5..=3600))]
    pub(crate) idle: u64,
    /// Changes of the chart's values, one after the other
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
    /// Tenants that each agent reports before the hub is killed
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub(crate) tenants_each: u32,
}

/// All measurements.
#[derive(Debug)]
pub(crate) struct FanOut {
    pub(crate) options: Options,
    /// The hub's memory with all EdgeClusters and no agent.
    pub(crate) alone: Memory,
    pub(crate) connecting: Gathering,
    pub(crate) connected: Memory,
    pub(crate) idle: Idle,
    pub(crate) rounds: Rounds,
    /// Measured with all Tenants reported.
    pub(crate) filling: Filling,
    pub(crate) restart: Restart,
    /// Sum of both hubs.
    pub(crate) resyncs: usize,
}

/// Agents that connect concurrently.
#[derive(Debug)]
pub(crate) struct Gathering {
    pub(crate) first: Duration,
    pub(crate) last: Duration,
    /// Maximum number of sessions in one second.
    pub(crate) most_a_second: usize,
    /// The hub's CPU time until the last session, in seconds.
    pub(crate) hub: Times,
    /// Time until the EdgeClusters on home show all agents as connected and up to date.
    pub(crate) shown: Duration,
    /// Maximum number of concurrent TLS handshakes.
    pub(crate) handshakes: u64,
}

#[derive(Debug)]
pub(crate) struct Idle {
    /// In milli-cores.
    pub(crate) hub: f64,
    /// The part of `hub` that was spent in the kernel.
    pub(crate) kernel: f64,
    /// Median of the parts of length `SAMPLE`, which excludes bursts.
    pub(crate) middle: f64,
    pub(crate) home: Traffic,
    /// Milli-cores of all simulated agents.
    pub(crate) agents: f64,
    pub(crate) neighbours: f64,
}

impl Idle {
    pub(crate) fn status_writes(&self) -> u64 {
        let written = |((verb, resource), count): (&(String, String), &u64)| {
            (verb == "PATCH" && resource == "edgeclusters").then_some(*count)
        };
        self.home.all.iter().filter_map(written).sum()
    }
}

#[derive(Debug)]
pub(crate) struct Rounds {
    /// On the hub's clock: from the new desired state until the agent confirms its slot.
    pub(crate) by_hub: Histogram,
    /// On the agents' clock, relative to the first agent, for each round: 50 %, 99 % and all.
    pub(crate) by_agents: Vec<[Duration; 3]>,
    /// Time from the first agent's receipt until all EdgeClusters show the change.
    pub(crate) shown: Vec<Duration>,
    /// The hub's CPU time for an average change, until home shows it.
    pub(crate) hub: Times,
    pub(crate) neighbours: f64,
}

#[derive(Debug)]
pub(crate) struct Filling {
    /// Time until all EdgeClusters count all Tenants.
    pub(crate) shown: Duration,
    pub(crate) memory: Memory,
}

/// Times since the old hub was killed.
#[derive(Debug)]
pub(crate) struct Restart {
    pub(crate) gathering: Gathering,
    /// Time until all agents confirmed a change that followed their return. Reports are ordered, so their full reports
    /// were processed before.
    pub(crate) confirmed: Duration,
    pub(crate) memory: Memory,
    pub(crate) neighbours: f64,
}

/// A home with its hub, for agents without clusters.
pub(crate) struct Stage {
    pub(crate) hub: Hub,
    values: ValuesFile,
    pub(crate) home: Cluster,
    kubeconfig: std::path::PathBuf,
    _folder: TempDir,
}

pub(crate) async fn measure(options: &Options) -> Result<FanOut> {
    allow_files(options.agents)?;
    say("fan-out: starting home and hub");
    let mut stage = Stage::start().await?;
    let outcome = Box::pin(stage.measure(options)).await;
    outcome.map_err(|error| with_log(error, &stage.hub))
}

impl Stage {
    pub(crate) async fn start() -> Result<Self> {
        let home = Cluster::start("home", Parts::ControlPlane).await?;
        let folder = TempDir::with_prefix("krypton-bench-").context("creating a folder")?;
        let kubeconfig = folder.path().join("home.kubeconfig");
        fs::write(&kubeconfig, single_out(&home).await?).context("writing the hub's kubeconfig")?;
        let values = ValuesFile::new(&content(0))?;
        let hub = Hub::start(&HubOptions::new(&kubeconfig).args(flags(&values)))?;
        Ok(Self {
            hub,
            values,
            home,
            kubeconfig,
            _folder: folder,
        })
    }

    async fn measure(&mut self, options: &Options) -> Result<FanOut> {
        self.hub.ready(DEADLINE).await?;
        let count = options.agents;
        say(&format!("fan-out: creating {count} EdgeClusters"));
        let members = self.make_members("simulated", count).await?;
        tokio::time::sleep(SETTLE).await;
        let alone = Memory::of(self.hub.pid())?;

        say(&format!("fan-out: {count} agents connect concurrently"));
        let enrolled = self.enroll(&members).await?;
        let watch = self.watch().await?;
        let (clock, before) = (Instant::now(), Times::of(self.hub.pid())?);
        let agents = Agents::start(enrolled);
        let connecting = self.gather(&agents, 0, watch, clock, before).await?;
        tokio::time::sleep(SETTLE).await;
        let connected = Memory::of(self.hub.pid())?;

        say(&format!("fan-out: idling for {} s", options.idle));
        let idle = self.idle(Duration::from_secs(options.idle)).await?;
        let rounds = self.rounds(&agents, options.rounds).await?;

        let each = options.tenants_each;
        say(&format!("fan-out: each agent reports {each} Tenants"));
        let filling = self.fill(&agents, count, each).await?;
        let resyncs = self.resyncs()?;
        say("fan-out: killing and restarting the hub");
        let restart = self.restart(&agents, count, each).await?;
        Ok(FanOut {
            options: options.clone(),
            alone,
            connecting,
            connected,
            idle,
            rounds,
            filling,
            restart,
            resyncs: resyncs + self.resyncs()?,
        })
    }

    pub(crate) async fn make_members(&self, prefix: &str, count: u32) -> Result<Vec<Member>> {
        let api: Api<EdgeCluster> = Api::all(self.home.client());
        let each = (0..count).map(|number| {
            let api = api.clone();
            async move {
                let name = format!("{prefix}-{number:04}");
                let object = EdgeCluster::new(&name, EdgeClusterSpec::default());
                let made = api.create(&PostParams::default(), &object).await?;
                let uid = made.uid().context("an EdgeCluster without a UID")?;
                Ok::<_, anyhow::Error>(Member { name, uid })
            }
        });
        let making = stream::iter(each).buffer_unordered(CREATES_AT_ONCE);
        making.try_collect().await.context("making EdgeClusters")
    }

    /// Issues certificates from the hub's CA, once the hub has created it.
    pub(crate) async fn enroll(&self, members: &[Member]) -> Result<Vec<Enrolled>> {
        let client = self.home.client();
        let secrets: Api<Secret> = Api::namespaced(client.clone(), HUB_NAMESPACE);
        eventually_within("the hub's CA", DEADLINE, async || {
            Ok(secrets.get_opt(CA_SECRET).await?.map(drop))
        })
        .await?;
        let authority = Authority::load_or_make(client, HUB_NAMESPACE, "bench.krypton").await?;
        let hub = self.hub.agents_address().to_string();
        let enroll = |member| Enrolled::new(&authority, member, &hub);
        members.iter().map(enroll).collect()
    }

    async fn watch(&self) -> Result<Arrivals<EdgeCluster>> {
        Arrivals::watch(Api::all(self.home.client())).await
    }

    /// Waits until each agent has a session that started after `clock`, and home shows its state including `tenants`.
    async fn gather(
        &self,
        agents: &Agents,
        tenants: u32,
        mut watch: Arrivals<EdgeCluster>,
        clock: Instant,
        before: Times,
    ) -> Result<Gathering> {
        let came = |seen: &Seen| seen.up.filter(|up| *up > clock);
        let came = agents.all("have a session", DEADLINE, came).await?;
        let hub = Times::of(self.hub.pid())?.since(&before);
        let ends = came.first().zip(came.last());
        let (first, last) = ends.context("no agents")?;
        say(&format!(
            "fan-out: all have a session after {:.1} s",
            last.duration_since(clock).as_secs_f64()
        ));
        let version = |seen: &Seen| seen.desired.filter(|(_, at)| *at > clock).map(|(_, at)| at);
        agents
            .all("have a desired state", DEADLINE, version)
            .await?;
        let version = agents.version().context("no desired state")?;
        let count = u32::try_from(came.len()).context("counting agents")?;
        let shown = watch.all(count, clock, DEADLINE, |object| {
            shows(object, version, tenants)
        });
        let shown = shown.await?.last;
        say(&format!(
            "fan-out: home shows all of them after {:.1} s",
            shown.as_secs_f64()
        ));
        let handshakes = number(&self.hub.metrics().await?, HANDSHAKES)?;
        Ok(Gathering {
            first: first.duration_since(clock),
            last: last.duration_since(clock),
            most_a_second: most_within(&came, Duration::from_secs(1)),
            hub,
            shown,
            handshakes,
        })
    }

    async fn idle(&self, span: Duration) -> Result<Idle> {
        let home = Traffic::read(&self.home).await?;
        let neighbours = Neighbours::watch(self.known()?)?;
        let (clock, own) = (Instant::now(), load::known_seconds(&[])?);
        let begin = Times::of(self.hub.pid())?;
        let (mut last, mut since) = (begin, clock);
        let mut samples = Vec::new();
        while clock.elapsed() < span {
            let left = span.saturating_sub(clock.elapsed());
            tokio::time::sleep(SAMPLE.min(left)).await;
            let now = Times::of(self.hub.pid())?;
            let took = since.elapsed();
            samples.push(milli_cores(now.since(&last).total(), took));
            (last, since) = (now, Instant::now());
        }
        let took = clock.elapsed();
        let hub = last.since(&begin);
        let agents = milli_cores(load::known_seconds(&[])? - own, took);
        let neighbours = neighbours.cores(self.known()?)?;
        samples.sort_by(f64::total_cmp);
        say(&format!(
            "fan-out: idle, the hub uses {:.1} milli-cores",
            milli_cores(hub.total(), took)
        ));
        Ok(Idle {
            hub: milli_cores(hub.total(), took),
            kernel: milli_cores(hub.kernel, took),
            middle: samples.get(samples.len() / 2).copied().unwrap_or_default(),
            home: Traffic::read(&self.home).await?.since(&home),
            agents,
            neighbours,
        })
    }

    async fn rounds(&self, agents: &Agents, rounds: u32) -> Result<Rounds> {
        let neighbours = Neighbours::watch(self.known()?)?;
        let begin = self.propagation().await?;
        let times = Times::of(self.hub.pid())?;
        let (mut by_agents, mut shown) = (Vec::new(), Vec::new());
        for round in 1..=rounds {
            let mut watch = self.watch().await?;
            let clock = Instant::now();
            let came = self.change(agents, round).await?;
            let (first, version) = came
                .first()
                .copied()
                .zip(agents.version())
                .context("no agents")?;
            let at = |part: f64| {
                let index = (part * (came.len() - 1) as f64).ceil() as usize;
                came.get(index)
                    .map_or(Duration::ZERO, |at| at.duration_since(first))
            };
            let times = [0.5, 0.99, 1.0].map(at);
            let count = u32::try_from(came.len()).context("counting agents")?;
            let arriving = watch.all(count, clock, DEADLINE, |object| shows(object, version, 0));
            let on_home = arriving
                .await?
                .last
                .saturating_sub(first.duration_since(clock));
            say(&format!(
                "fan-out: change {round} of {rounds} reached all agents {:.0} ms after the first; home shows it after {:.1} s",
                times[2].as_secs_f64() * 1000.0,
                on_home.as_secs_f64()
            ));
            by_agents.push(times);
            shown.push(on_home);
        }
        let expected = begin.count() + u64::from(rounds) * agents.count() as u64;
        let by_hub = self.answered(expected).await?.since(&begin);
        let hub = Times::of(self.hub.pid())?.since(&times);
        Ok(Rounds {
            by_hub,
            by_agents,
            shown,
            hub: Times {
                user: hub.user / f64::from(rounds),
                kernel: hub.kernel / f64::from(rounds),
            },
            neighbours: neighbours.cores(self.known()?)?,
        })
    }

    /// Changes the chart's values. Returns the times at which the agents received them, in ascending order.
    pub(crate) async fn change(&self, agents: &Agents, round: u32) -> Result<Vec<Instant>> {
        let before = agents.version();
        self.values.write(&content(round))?;
        let came = |seen: &Seen| {
            let later = seen.desired.filter(|(version, _)| Some(*version) > before);
            later.map(|(_, at)| at)
        };
        agents.all("have the change", DEADLINE, came).await
    }

    async fn propagation(&self) -> Result<Histogram> {
        Histogram::read(&self.hub.metrics().await?, PROPAGATION)
    }

    /// Waits until the hub has received this number of confirmations since its start.
    async fn answered(&self, count: u64) -> Result<Histogram> {
        eventually_within("the agents' answers", DEADLINE, async || {
            let seen = self.propagation().await?;
            if seen.count() < count {
                bail!("only {} of {count}", seen.count());
            }
            Ok(Some(seen))
        })
        .await
    }

    async fn fill(&self, agents: &Agents, count: u32, each: u32) -> Result<Filling> {
        let version = agents.version().context("no desired state")?;
        let mut watch = self.watch().await?;
        let clock = Instant::now();
        agents.report_tenants(each);
        let shown = if each == 0 {
            Duration::ZERO
        } else {
            let shown = watch.all(count, clock, DEADLINE, |object| {
                shows(object, version, each)
            });
            shown.await?.last
        };
        tokio::time::sleep(SETTLE).await;
        let memory = Memory::of(self.hub.pid())?;
        Ok(Filling { shown, memory })
    }

    async fn restart(&mut self, agents: &Agents, count: u32, each: u32) -> Result<Restart> {
        let watch = self.watch().await?;
        let clock = Instant::now();
        self.hub.kill9().await?;
        let options = HubOptions::new(&self.kubeconfig).args(flags(&self.values));
        self.hub = Hub::start(&options.in_place_of(&self.hub))?;
        let neighbours = Neighbours::watch(self.known()?)?;
        let confirmed = async {
            let came = |seen: &Seen| seen.up.filter(|up| *up > clock);
            agents.all("have a session again", DEADLINE, came).await?;
            self.answered(u64::from(count)).await?;
            tokio::time::sleep(AFTER_LINK).await;
            let before = self.propagation().await?.count();
            self.change(agents, u32::MAX).await?;
            self.answered(before + u64::from(count)).await?;
            Ok::<_, anyhow::Error>(clock.elapsed())
        };
        let gathering = self.gather(agents, each, watch, clock, Times::default());
        let (confirmed, gathering) = tokio::try_join!(confirmed, gathering)?;
        let neighbours = neighbours.cores(self.known()?)?;
        tokio::time::sleep(SETTLE).await;
        Ok(Restart {
            gathering,
            confirmed,
            memory: Memory::of(self.hub.pid())?,
            neighbours,
        })
    }

    fn resyncs(&self) -> Result<usize> {
        Ok(self.hub.log()?.matches(RESYNC).count())
    }

    /// Returns the CPU time of all processes of the benchmark.
    pub(crate) fn known(&self) -> Result<f64> {
        load::known_seconds(&[self.home.pids(), vec![self.hub.pid()]].concat())
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
fn content(round: u32) -> String {
    format!("round: {round}\nrest: {}\n", "x".repeat(VALUES_BYTES))
}

/// Returns the reason why the EdgeCluster doesn't show its agent as connected, at this desired state and with this
/// number of Tenants.
fn shows(object: &EdgeCluster, version: Version, tenants: u32) -> Result<(), String> {
    let EdgeClusterStatus {
        conditions,
        applied,
        tenants: counts,
        ..
    } = object.status.clone().unwrap_or_default();
    let has = applied.as_ref().map(|applied| Version {
        epoch: applied.epoch,
        generation: applied.generation,
    });
    let ready = counts.unwrap_or_default().ready;
    let connected = condition(&conditions, "Connected").is_some_and(|is| is.status == "True");
    match has {
        Some(has) if has >= version && connected && ready == tenants => Ok(()),
        _ => Err(format!(
            "connected: {connected}, desired state {has:?} instead of {version}, {ready} Tenants ready"
        )),
    }
}

/// Returns a number from a Prometheus text. `name` includes the labels.
pub(crate) fn number(metrics: &str, name: &str) -> Result<u64> {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name));
    let value = line.with_context(|| format!("no metric {name}"))?.trim();
    value
        .parse()
        .with_context(|| format!("metric {name} is {value}"))
}

fn milli_cores(seconds: f64, span: Duration) -> f64 {
    1000.0 * seconds / span.as_secs_f64()
}

/// Returns the maximum number of moments in any span of this length. The moments are in ascending order.
fn most_within(moments: &[Instant], span: Duration) -> usize {
    let from = |(index, begin): (usize, &Instant)| {
        let rest = moments.get(index..).unwrap_or_default();
        rest.partition_point(|at| at.duration_since(*begin) < span)
    };
    moments
        .iter()
        .enumerate()
        .map(from)
        .max()
        .unwrap_or_default()
}

/// Raises the limit of open files. This process has the agents' ends of all connections. The hub has the other ends,
/// and inherits the limit.
pub(crate) fn allow_files(agents: u32) -> Result<()> {
    let needed = u64::from(agents) + FILES;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_second_starts_with_any_arrival() {
        let begin = Instant::now();
        let at = |millis: &[u64]| -> Vec<Instant> {
            let after = |millis: &u64| begin + Duration::from_millis(*millis);
            millis.iter().map(after).collect()
        };
        let second = Duration::from_secs(1);
        assert_eq!(
            most_within(&at(&[0, 900, 1000, 1100, 1800, 2500]), second),
            4
        );
        assert_eq!(most_within(&[], second), 0);
    }
}
