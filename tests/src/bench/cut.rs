//! Measures how fast an agent's live stream ends after its member is banned or its EdgeCluster is deleted.

use krypton_tests::Merge as _;
use std::{
    fmt,
    time::{Duration, Instant},
};

use krypton_crds::edge_cluster::EdgeCluster;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{Api, api::DeleteParams};
use serde_json::json;

use crate::{
    krypton::with_log,
    log_progress,
    simulated::{Agents, Member},
    stage::Stage,
    table::{at_most, fixed, table},
};

const TARGET: f64 = 5.0;
const HEADERS: [&str; 6] = ["figure", "p50", "p99", "most", "agents", "target of p99"];
const NOTES: &str = "\
Seconds from the API server's response to the ban or the deletion until the agent's session ends. The agents
are simulated as in the fan-out. Hub, API server and etcd are real and share the machine. Each line uses
separate members, whose agents have a session and a desired state before the measurement starts.
";

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Simulated agents, for each line
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=2000))]
    pub(crate) agents: u32,
}

#[derive(Debug, Clone, Copy)]
enum Cause {
    Ban,
    Delete,
}

#[derive(Debug, Clone, Copy)]
enum Pacing {
    /// Each member when the previous stream has ended.
    InTurn,
    AtOnce,
}

/// The measured times of one case, in ascending order.
#[derive(Debug)]
pub(crate) struct CutTimes {
    cause: Cause,
    pacing: Pacing,
    durations: Vec<Duration>,
}

impl fmt::Display for CutTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cause = match self.cause {
            Cause::Ban => "banned",
            Cause::Delete => "deleted",
        };
        let pacing = match self.pacing {
            Pacing::InTurn => "one after the other",
            Pacing::AtOnce => "all concurrently",
        };
        write!(f, "{cause}, {pacing}, s")
    }
}

pub(crate) async fn measure(options: &Options) -> Result<Vec<CutTimes>> {
    let stage = Stage::start("cut", options.agents).await?;
    let mut lines = Vec::new();
    for cause in [Cause::Ban, Cause::Delete] {
        for pacing in [Pacing::InTurn, Pacing::AtOnce] {
            let line = Box::pin(measure_case(&stage, options, cause, pacing)).await;
            let line = line.map_err(|error| with_log(error, &stage.hub))?;
            log_progress(&format!("cut: {line}: done"));
            lines.push(line);
        }
    }
    Ok(lines)
}

async fn measure_case(
    stage: &Stage,
    options: &Options,
    cause: Cause,
    pacing: Pacing,
) -> Result<CutTimes> {
    let prefix = format!("{cause:?}-{pacing:?}").to_lowercase();
    let members = stage.create_members(&prefix, options.agents).await?;
    let agents = Agents::start_and_wait(stage.enroll(&members).await?).await?;
    let concurrency = match pacing {
        Pacing::InTurn => 1,
        Pacing::AtOnce => members.len(),
    };
    let api: Api<EdgeCluster> = Api::all(stage.home.client());
    let cuts = members.iter().enumerate().map(|(index, member)| {
        let (api, agents) = (api.clone(), &agents);
        async move {
            let responded_at = cut(&api, cause, member).await?;
            let ended_at = agents.wait_for_session_end(index).await?;
            // The stream can end before the API server responds.
            Ok::<_, anyhow::Error>(ended_at.saturating_duration_since(responded_at))
        }
    });
    let running = stream::iter(cuts).buffer_unordered(concurrency);
    let mut durations: Vec<Duration> = running.try_collect().await?;
    durations.sort();
    Ok(CutTimes {
        cause,
        pacing,
        durations,
    })
}

/// Returns the time of the API server's response.
async fn cut(api: &Api<EdgeCluster>, cause: Cause, member: &Member) -> Result<Instant> {
    let name = &member.name;
    match cause {
        Cause::Ban => {
            let banned = api.merge(name, &json!({"spec": {"banned": true}})).await;
            banned.with_context(|| format!("banning {name}"))?;
        }
        Cause::Delete => {
            let deleted = api.delete(name, &DeleteParams::default()).await;
            deleted.with_context(|| format!("deleting {name}"))?;
        }
    }
    Ok(Instant::now())
}

pub(crate) fn render(lines: &[CutTimes]) -> String {
    let rows: Vec<_> = lines
        .iter()
        .map(|line| {
            let [p50, p99, max] = [0.5, 0.99, 1.0].map(|rank| quantile(&line.durations, rank));
            [
                line.to_string(),
                fixed(p50, 3),
                fixed(p99, 3),
                fixed(max, 3),
                line.durations.len().to_string(),
                at_most(TARGET, p99),
            ]
        })
        .collect();
    format!("{}\n{NOTES}", table(HEADERS, &rows))
}

/// Returns the quantile of ordered values, in seconds.
fn quantile(values: &[Duration], rank: f64) -> f64 {
    let index = (rank * values.len() as f64).ceil() as usize;
    let value = values.get(index.saturating_sub(1));
    value.map_or(0.0, Duration::as_secs_f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantile_is_nearest_rank_value() {
        let values: Vec<_> = (1..=200).map(Duration::from_secs).collect();
        assert_eq!(quantile(&values, 0.5), 100.0);
        assert_eq!(quantile(&values, 0.99), 198.0);
        assert_eq!(quantile(&values, 1.0), 200.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
