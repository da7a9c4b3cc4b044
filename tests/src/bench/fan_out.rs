//! One hub and a thousand agents: how fast a change reaches them all, what the hub costs meanwhile, and
//! how they all come back when it dies.

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
/// CPU time is read so often while idle: long against its unit, short against the minute between two
/// writes of `lastSeen`.
const SAMPLE: Duration = Duration::from_secs(5);
/// Of the chart's values, which each member is sent.
const VALUES_BYTES: usize = 2048;
/// Files of everything else.
const FILES: u64 = 256;
/// A link that is up has its account on the way within this.
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

/// All that was measured.
#[derive(Debug)]
pub(crate) struct FanOut {
    pub(crate) options: Options,
    /// The hub with all EdgeClusters and no agent.
    pub(crate) alone: Memory,
    pub(crate) connecting: Gathering,
    pub(crate) connected: Memory,
    pub(crate) idle: Idle,
    pub(crate) rounds: Rounds,
    /// With all Tenants reported.
    pub(crate) filling: Filling,
    pub(crate) restart: Restart,
    /// Of both hubs.
    pub(crate) resyncs: usize,
}

/// Agents that get a session, all at once.
#[derive(Debug)]
pub(crate) struct Gathering {
    pub(crate) first: Duration,
    pub(crate) last: Duration,
    /// The most in any one second.
    pub(crate) most_a_second: usize,
    /// The hub's CPU time until the last, in seconds.
    pub(crate) hub: Times,
    /// Until home's EdgeClusters show all of them as connected and up to date.
    pub(crate) shown: Duration,
    /// TLS handshakes of the hub at a time, at most.
    pub(crate) handshakes: u64,
}

#[derive(Debug)]
pub(crate) struct Idle {
    /// In milli-cores.
    pub(crate) hub: f64,
    /// Of that the kernel's part.
    pub(crate) kernel: f64,
    /// The middle one of its parts of `SAMPLE`: what is left without the bursts.
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
    /// By the hub's clock: from the new desired state to the agent's word that it is in its slot.
    pub(crate) by_hub: Histogram,
    /// By the agents' clock, which begins with the first of them, for each round: half of them, 99 %, all.
    pub(crate) by_agents: Vec<[Duration; 3]>,
    /// Until all EdgeClusters show it, since the first agent had it.
    pub(crate) shown: Vec<Duration>,
    /// The hub's, of one change on average, until home shows it.
    pub(crate) hub: Times,
    pub(crate) neighbours: f64,
}

#[derive(Debug)]
pub(crate) struct Filling {
    /// Until all EdgeClusters count all Tenants.
    pub(crate) shown: Duration,
    pub(crate) memory: Memory,
}

/// Since the old hub was killed.
#[derive(Debug)]
pub(crate) struct Restart {
    pub(crate) gathering: Gathering,
    /// Until all had answered a change that was made after they were back: what they say is heard in
    /// order, and their accounts go before it.
    pub(crate) heard: Duration,
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
        let folder = TempDir::with_prefix("krypton-bench-").context("making a folder")?;
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
        say(&format!("fan-out: making {count} EdgeClusters"));
        let members = self.make_members("simulated", count).await?;
        tokio::time::sleep(SETTLE).await;
        let alone = Memory::of(self.hub.pid())?;

        say(&format!("fan-out: {count} agents connect at once"));
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
        say("fan-out: the hub is killed and started again");
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

    /// By the hub's own CA, once it has made one.
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

    /// Waits until each has a session that began after `clock` and home shows what it says, `tenants`
    /// among it.
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
            "fan-out: idle, the hub takes {:.1} milli-cores",
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
                "fan-out: change {round} of {rounds} has reached all {:.0} ms after the first, home shows it after {:.1} s",
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

    /// Changes the chart's values, and returns when each agent had them, in order.
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

    /// Waits until the hub has heard so many answers since its start.
    async fn answered(&self, count: u64) -> Result<Histogram> {
        eventually_within("the agents' answers", DEADLINE, async || {
            let seen = self.propagation().await?;
            if seen.count() < count {
                bail!("{} of {count}", seen.count());
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
        let heard = async {
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
        let (heard, gathering) = tokio::try_join!(heard, gathering)?;
        let neighbours = neighbours.cores(self.known()?)?;
        tokio::time::sleep(SETTLE).await;
        Ok(Restart {
            gathering,
            heard,
            memory: Memory::of(self.hub.pid())?,
            neighbours,
        })
    }

    fn resyncs(&self) -> Result<usize> {
        Ok(self.hub.log()?.matches(RESYNC).count())
    }

    /// CPU time of all that runs for us.
    pub(crate) fn known(&self) -> Result<f64> {
        load::known_seconds(&[self.home.pids(), vec![self.hub.pid()]].concat())
    }
}

fn flags(values: &ValuesFile) -> Vec<String> {
    vec![
        format!("--namespace={HUB_NAMESPACE}"),
        // Nobody fetches it: there is nothing behind the agents to install it on.
        "--chart-repo=https://charts.example.org".to_owned(),
        format!("--chart-name={CHART}"),
        format!("--chart-version={CHART_VERSION}"),
        values_flag(values),
        "--self-cluster=false".to_owned(),
    ]
}

/// Values of a usual size.
fn content(round: u32) -> String {
    format!("round: {round}\nrest: {}\n", "x".repeat(VALUES_BYTES))
}

/// What the EdgeCluster lacks to show its agent as connected, at this desired state, with so many Tenants.
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

/// A number out of a Prometheus text, which names the metric with its labels.
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

/// The most moments in any span of this length. They are in order.
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

/// The agents' ends of all connections are this process's; the hub, which has the other ends, inherits the
/// limit.
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
    fn the_busiest_second_may_begin_with_any_arrival() {
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
