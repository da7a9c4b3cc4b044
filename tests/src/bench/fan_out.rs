//! Measures one hub with a thousand agents: the propagation of a change, the hub's resource usage, and the reconnection
//! of all agents after a crash.

use std::time::{Duration, Instant};

use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterStatus};
use krypton_tests::{eventually_within, fleet::condition};
use krypton_types::desired::Version;

use anyhow::{Context, Result, bail};
use kube::Api;

use crate::{
    arrivals::Arrivals,
    histogram::Histogram,
    krypton::{SETTLE, with_log},
    load::{self, CpuTimes, Memory},
    log_progress,
    machine::OtherLoad,
    simulated::{AgentObservation, Agents, DEADLINE},
    stage::{Stage, number},
    traffic::Traffic,
};

const PROPAGATION: &str = "krypton_hub_desired_propagation_seconds";
const HANDSHAKES: &str = "krypton_hub_handshakes_in_flight_max";
/// Interval between CPU readings while idle. Long compared to the unit of CPU time, and short compared to the minute
/// between two writes of `lastSeen`.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);
/// After a link is established, the agent sends its full report within this time.
const FULL_REPORT_DELAY: Duration = Duration::from_secs(1);
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
pub(crate) struct FanOutResults {
    pub(crate) options: Options,
    /// The hub's memory with all EdgeClusters and no agent.
    pub(crate) without_agents: Memory,
    pub(crate) connecting: ConnectResults,
    pub(crate) connected: Memory,
    pub(crate) idle: FanOutIdle,
    pub(crate) rounds: ChangeResults,
    /// Measured with all Tenants reported.
    pub(crate) filling: TenantResults,
    pub(crate) restart: RestartResults,
    /// Sum of both hubs.
    pub(crate) resyncs: usize,
}

/// Agents that connect concurrently.
#[derive(Debug)]
pub(crate) struct ConnectResults {
    pub(crate) first: Duration,
    pub(crate) last: Duration,
    /// Maximum number of sessions in one second.
    pub(crate) max_per_second: usize,
    /// The hub's CPU time until the last session, in seconds.
    pub(crate) hub: CpuTimes,
    /// Time until the EdgeClusters on home show all agents as connected and up to date.
    pub(crate) shown_on_home: Duration,
    /// Maximum number of concurrent TLS handshakes.
    pub(crate) handshakes: u64,
}

#[derive(Debug)]
pub(crate) struct FanOutIdle {
    /// In milli-cores.
    pub(crate) hub: f64,
    /// The part of `hub` that was spent in the kernel.
    pub(crate) kernel: f64,
    /// Median of the parts of length `SAMPLE_INTERVAL`, which excludes bursts.
    pub(crate) median: f64,
    pub(crate) home: Traffic,
    /// Milli-cores of all simulated agents.
    pub(crate) agents: f64,
    pub(crate) other_cores: f64,
}

impl FanOutIdle {
    pub(crate) fn status_writes(&self) -> u64 {
        let status_patch_count = |((verb, resource), count): (&(String, String), &u64)| {
            (verb == "PATCH" && resource == "edgeclusters").then_some(*count)
        };
        self.home.all.iter().filter_map(status_patch_count).sum()
    }
}

#[derive(Debug)]
pub(crate) struct ChangeResults {
    /// On the hub's clock: from the new desired state until the agent confirms its slot.
    pub(crate) by_hub: Histogram,
    /// On the agents' clock, relative to the first agent, for each round: 50 %, 99 % and all.
    pub(crate) by_agents: Vec<[Duration; 3]>,
    /// Time from the first agent's receipt until all EdgeClusters show the change.
    pub(crate) shown_on_home: Vec<Duration>,
    /// The hub's CPU time for an average change, until home shows it.
    pub(crate) hub: CpuTimes,
    pub(crate) other_cores: f64,
}

#[derive(Debug)]
pub(crate) struct TenantResults {
    /// Time until all EdgeClusters count all Tenants.
    pub(crate) shown_on_home: Duration,
    pub(crate) memory: Memory,
}

/// Times since the old hub was killed.
#[derive(Debug)]
pub(crate) struct RestartResults {
    pub(crate) connecting: ConnectResults,
    /// Time until all agents confirmed a change that followed their return. Reports are ordered, so their full reports
    /// were processed before.
    pub(crate) confirmed: Duration,
    pub(crate) memory: Memory,
    pub(crate) other_cores: f64,
}

pub(crate) async fn measure(options: &Options) -> Result<FanOutResults> {
    let mut stage = Stage::start("fan-out", options.agents).await?;
    let outcome = Box::pin(stage.measure(options)).await;
    outcome.map_err(|error| with_log(error, &stage.hub))
}

impl Stage {
    async fn measure(&mut self, options: &Options) -> Result<FanOutResults> {
        let count = options.agents;
        log_progress(&format!("fan-out: creating {count} EdgeClusters"));
        let members = self.create_members("simulated", count).await?;
        tokio::time::sleep(SETTLE).await;
        let without_agents = Memory::read_for(self.hub.pid())?;

        log_progress(&format!("fan-out: {count} agents connect concurrently"));
        let enrolled = self.enroll(&members).await?;
        let watch = self.watch().await?;
        let (clock, before) = (Instant::now(), CpuTimes::read_for(self.hub.pid())?);
        let agents = Agents::start(enrolled);
        let connecting = self
            .measure_connecting(&agents, 0, watch, clock, before)
            .await?;
        tokio::time::sleep(SETTLE).await;
        let connected = Memory::read_for(self.hub.pid())?;

        log_progress(&format!("fan-out: idling for {} s", options.idle));
        let idle = self.measure_idle(Duration::from_secs(options.idle)).await?;
        let rounds = self.measure_changes(&agents, options.rounds).await?;

        let each = options.tenants_each;
        log_progress(&format!("fan-out: each agent reports {each} Tenants"));
        let filling = self.measure_tenants(&agents, count, each).await?;
        let resyncs = self.count_resyncs()?;
        log_progress("fan-out: killing and restarting the hub");
        let restart = self.measure_restart(&agents, count, each).await?;
        Ok(FanOutResults {
            options: options.clone(),
            without_agents,
            connecting,
            connected,
            idle,
            rounds,
            filling,
            restart,
            resyncs: resyncs + self.count_resyncs()?,
        })
    }

    async fn watch(&self) -> Result<Arrivals<EdgeCluster>> {
        Arrivals::watch(Api::all(self.home.client())).await
    }

    /// Waits until each agent has a session that started after `clock`, and home shows its state including `tenants`.
    async fn measure_connecting(
        &self,
        agents: &Agents,
        tenants: u32,
        mut watch: Arrivals<EdgeCluster>,
        clock: Instant,
        before: CpuTimes,
    ) -> Result<ConnectResults> {
        let connected_at = |observation: &AgentObservation| observation.up.filter(|up| *up > clock);
        let times = agents.wait_for_all("have a session", connected_at).await?;
        let hub = CpuTimes::read_for(self.hub.pid())?.since(&before);
        let ends = times.first().zip(times.last());
        let (first, last) = ends.context("no agents")?;
        log_progress(&format!(
            "fan-out: all have a session after {:.1} s",
            last.duration_since(clock).as_secs_f64()
        ));
        let desired_at = |observation: &AgentObservation| {
            observation
                .desired
                .filter(|(_, at)| *at > clock)
                .map(|(_, at)| at)
        };
        agents
            .wait_for_all("have a desired state", desired_at)
            .await?;
        let version = agents.version().context("no desired state")?;
        let count = u32::try_from(times.len()).context("counting agents")?;
        let shown_on_home = watch.wait_for_all(count, clock, DEADLINE, |object| {
            check_shown(object, version, tenants)
        });
        let shown_on_home = shown_on_home.await?.last;
        log_progress(&format!(
            "fan-out: home shows all of them after {:.1} s",
            shown_on_home.as_secs_f64()
        ));
        let handshakes = number(&self.hub.metrics().await?, HANDSHAKES)?;
        Ok(ConnectResults {
            first: first.duration_since(clock),
            last: last.duration_since(clock),
            max_per_second: max_within(&times, Duration::from_secs(1)),
            hub,
            shown_on_home,
            handshakes,
        })
    }

    async fn measure_idle(&self, span: Duration) -> Result<FanOutIdle> {
        let home = Traffic::read(&self.home).await?;
        let other_load = OtherLoad::watch(self.known_cpu_seconds()?)?;
        let (clock, own_before) = (Instant::now(), load::total_seconds(&[])?);
        let start = CpuTimes::read_for(self.hub.pid())?;
        let (mut last_sample, mut sampled_at) = (start, clock);
        let mut samples = Vec::new();
        while clock.elapsed() < span {
            let remaining = span.saturating_sub(clock.elapsed());
            tokio::time::sleep(SAMPLE_INTERVAL.min(remaining)).await;
            let now = CpuTimes::read_for(self.hub.pid())?;
            let elapsed = sampled_at.elapsed();
            samples.push(milli_cores(now.since(&last_sample).total(), elapsed));
            (last_sample, sampled_at) = (now, Instant::now());
        }
        let elapsed = clock.elapsed();
        let hub = last_sample.since(&start);
        let agents = milli_cores(load::total_seconds(&[])? - own_before, elapsed);
        let other_cores = other_load.cores(self.known_cpu_seconds()?)?;
        samples.sort_by(f64::total_cmp);
        log_progress(&format!(
            "fan-out: idle, the hub uses {:.1} milli-cores",
            milli_cores(hub.total(), elapsed)
        ));
        Ok(FanOutIdle {
            hub: milli_cores(hub.total(), elapsed),
            kernel: milli_cores(hub.kernel, elapsed),
            median: samples.get(samples.len() / 2).copied().unwrap_or_default(),
            home: Traffic::read(&self.home).await?.since(&home),
            agents,
            other_cores,
        })
    }

    async fn measure_changes(&self, agents: &Agents, rounds: u32) -> Result<ChangeResults> {
        let other_load = OtherLoad::watch(self.known_cpu_seconds()?)?;
        let propagation_before = self.propagation().await?;
        let cpu_before = CpuTimes::read_for(self.hub.pid())?;
        let (mut by_agents, mut shown_on_home) = (Vec::new(), Vec::new());
        for round in 1..=rounds {
            let mut watch = self.watch().await?;
            let clock = Instant::now();
            let received = self.change(agents, round).await?;
            let (first, version) = received
                .first()
                .copied()
                .zip(agents.version())
                .context("no agents")?;
            let quantile = |part: f64| {
                let index = (part * (received.len() - 1) as f64).ceil() as usize;
                received
                    .get(index)
                    .map_or(Duration::ZERO, |time| time.duration_since(first))
            };
            let quantiles = [0.5, 0.99, 1.0].map(quantile);
            let count = u32::try_from(received.len()).context("counting agents")?;
            let waiting = watch.wait_for_all(count, clock, DEADLINE, |object| {
                check_shown(object, version, 0)
            });
            let on_home = waiting
                .await?
                .last
                .saturating_sub(first.duration_since(clock));
            log_progress(&format!(
                "fan-out: change {round} of {rounds} reached all agents {:.0} ms after the first; home shows it after {:.1} s",
                quantiles[2].as_secs_f64() * 1000.0,
                on_home.as_secs_f64()
            ));
            by_agents.push(quantiles);
            shown_on_home.push(on_home);
        }
        let expected = propagation_before.count() + u64::from(rounds) * agents.count() as u64;
        let by_hub = self
            .wait_for_confirmations(expected)
            .await?
            .since(&propagation_before);
        let hub = CpuTimes::read_for(self.hub.pid())?.since(&cpu_before);
        Ok(ChangeResults {
            by_hub,
            by_agents,
            shown_on_home,
            hub: CpuTimes {
                user: hub.user / f64::from(rounds),
                kernel: hub.kernel / f64::from(rounds),
            },
            other_cores: other_load.cores(self.known_cpu_seconds()?)?,
        })
    }

    async fn propagation(&self) -> Result<Histogram> {
        Histogram::read(&self.hub.metrics().await?, PROPAGATION)
    }

    /// Waits until the hub has received this number of confirmations since its start.
    async fn wait_for_confirmations(&self, count: u64) -> Result<Histogram> {
        eventually_within("the agents' answers", DEADLINE, async || {
            let histogram = self.propagation().await?;
            if histogram.count() < count {
                bail!("only {} of {count}", histogram.count());
            }
            Ok(Some(histogram))
        })
        .await
    }

    async fn measure_tenants(
        &self,
        agents: &Agents,
        count: u32,
        each: u32,
    ) -> Result<TenantResults> {
        let version = agents.version().context("no desired state")?;
        let mut watch = self.watch().await?;
        let clock = Instant::now();
        agents.report_tenants(each);
        let shown_on_home = if each == 0 {
            Duration::ZERO
        } else {
            let shown_on_home = watch.wait_for_all(count, clock, DEADLINE, |object| {
                check_shown(object, version, each)
            });
            shown_on_home.await?.last
        };
        tokio::time::sleep(SETTLE).await;
        let memory = Memory::read_for(self.hub.pid())?;
        Ok(TenantResults {
            shown_on_home,
            memory,
        })
    }

    async fn measure_restart(
        &mut self,
        agents: &Agents,
        count: u32,
        each: u32,
    ) -> Result<RestartResults> {
        let watch = self.watch().await?;
        let clock = Instant::now();
        self.restart_hub().await?;
        let other_load = OtherLoad::watch(self.known_cpu_seconds()?)?;
        let confirmed = async {
            let connected_at =
                |observation: &AgentObservation| observation.up.filter(|up| *up > clock);
            agents
                .wait_for_all("have a session again", connected_at)
                .await?;
            self.wait_for_confirmations(u64::from(count)).await?;
            tokio::time::sleep(FULL_REPORT_DELAY).await;
            let before = self.propagation().await?.count();
            self.change(agents, u32::MAX).await?;
            self.wait_for_confirmations(before + u64::from(count))
                .await?;
            Ok::<_, anyhow::Error>(clock.elapsed())
        };
        let connecting = self.measure_connecting(agents, each, watch, clock, CpuTimes::default());
        let (confirmed, connecting) = tokio::try_join!(confirmed, connecting)?;
        let other_cores = other_load.cores(self.known_cpu_seconds()?)?;
        tokio::time::sleep(SETTLE).await;
        Ok(RestartResults {
            connecting,
            confirmed,
            memory: Memory::read_for(self.hub.pid())?,
            other_cores,
        })
    }

    fn count_resyncs(&self) -> Result<usize> {
        Ok(self.hub.log()?.matches(RESYNC).count())
    }
}

/// Returns the reason why the EdgeCluster doesn't show its agent as connected, at this desired state and with this
/// number of Tenants.
fn check_shown(object: &EdgeCluster, version: Version, tenants: u32) -> Result<(), String> {
    let EdgeClusterStatus {
        conditions,
        applied,
        tenants: counts,
        ..
    } = object.status.clone().unwrap_or_default();
    let applied_version = applied.as_ref().map(|applied| Version {
        epoch: applied.epoch,
        generation: applied.generation,
    });
    let ready = counts.unwrap_or_default().ready;
    let connected =
        condition(&conditions, "Connected").is_some_and(|condition| condition.status == "True");
    match applied_version {
        Some(applied_version) if applied_version >= version && connected && ready == tenants => {
            Ok(())
        }
        _ => Err(format!(
            "connected: {connected}, desired state {applied_version:?} instead of {version}, {ready} Tenants ready"
        )),
    }
}

fn milli_cores(seconds: f64, span: Duration) -> f64 {
    1000.0 * seconds / span.as_secs_f64()
}

/// Returns the maximum number of moments in any span of this length. The moments are in ascending order.
fn max_within(moments: &[Instant], span: Duration) -> usize {
    let from = |(index, start): (usize, &Instant)| {
        let rest = moments.get(index..).unwrap_or_default();
        rest.partition_point(|at| at.duration_since(*start) < span)
    };
    moments
        .iter()
        .enumerate()
        .map(from)
        .max()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_second_starts_with_any_arrival() {
        let start = Instant::now();
        let at = |millis: &[u64]| -> Vec<Instant> {
            let after = |millis: &u64| start + Duration::from_millis(*millis);
            millis.iter().map(after).collect()
        };
        let second = Duration::from_secs(1);
        assert_eq!(
            max_within(&at(&[0, 900, 1000, 1100, 1800, 2500]), second),
            4
        );
        assert_eq!(max_within(&[], second), 0);
    }
}
