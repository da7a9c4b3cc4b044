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
    fan_out::{DEADLINE, Stage, allow_files},
    krypton::with_log,
    say,
    simulated::{Agents, Member, Seen},
    table::{at_most, fixed, table},
};

const TARGET: f64 = 5.0;
const HEADS: [&str; 6] = ["figure", "p50", "p99", "most", "agents", "target of p99"];
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
enum How {
    Ban,
    Delete,
}

#[derive(Debug, Clone, Copy)]
enum When {
    /// Each member when the previous stream has ended.
    InTurn,
    AtOnce,
}

/// The measured times of one case, in ascending order.
#[derive(Debug)]
pub(crate) struct Line {
    how: How,
    when: When,
    took: Vec<Duration>,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.how {
            How::Ban => "banned",
            How::Delete => "deleted",
        };
        let when = match self.when {
            When::InTurn => "one after the other",
            When::AtOnce => "all concurrently",
        };
        write!(f, "{how}, {when}, s")
    }
}

pub(crate) async fn measure(options: &Options) -> Result<Vec<Line>> {
    allow_files(options.agents)?;
    say("cut: starting home and hub");
    let mut stage = Stage::start().await?;
    stage.hub.ready(DEADLINE).await?;
    let mut lines = Vec::new();
    for how in [How::Ban, How::Delete] {
        for when in [When::InTurn, When::AtOnce] {
            let line = Box::pin(line(&stage, options, how, when)).await;
            let line = line.map_err(|error| with_log(error, &stage.hub))?;
            say(&format!("cut: {line}: done"));
            lines.push(line);
        }
    }
    Ok(lines)
}

async fn line(stage: &Stage, options: &Options, how: How, when: When) -> Result<Line> {
    let prefix = format!("{how:?}-{when:?}").to_lowercase();
    let members = stage.make_members(&prefix, options.agents).await?;
    let agents = Agents::start(stage.enroll(&members).await?);
    agents
        .all("have a session", DEADLINE, |seen: &Seen| seen.up)
        .await?;
    let desired = |seen: &Seen| seen.desired.map(|(_, at)| at);
    agents
        .all("have a desired state", DEADLINE, desired)
        .await?;
    let at_once = match when {
        When::InTurn => 1,
        When::AtOnce => members.len(),
    };
    let api: Api<EdgeCluster> = Api::all(stage.home.client());
    let each = members.iter().enumerate().map(|(index, member)| {
        let (api, agents) = (api.clone(), &agents);
        async move {
            let answered = cut(&api, how, member).await?;
            let ended = agents.ended(index, DEADLINE).await?;
            // The stream can end before the API server responds.
            Ok::<_, anyhow::Error>(ended.saturating_duration_since(answered))
        }
    });
    let cutting = stream::iter(each).buffer_unordered(at_once);
    let mut took: Vec<Duration> = cutting.try_collect().await?;
    took.sort();
    Ok(Line { how, when, took })
}

/// Returns the time of the API server's response.
async fn cut(api: &Api<EdgeCluster>, how: How, member: &Member) -> Result<Instant> {
    let name = &member.name;
    match how {
        How::Ban => {
            let banned = api.merge(name, &json!({"spec": {"banned": true}})).await;
            banned.with_context(|| format!("banning {name}"))?;
        }
        How::Delete => {
            let deleted = api.delete(name, &DeleteParams::default()).await;
            deleted.with_context(|| format!("deleting {name}"))?;
        }
    }
    Ok(Instant::now())
}

pub(crate) fn render(lines: &[Line]) -> String {
    let rows: Vec<_> = lines
        .iter()
        .map(|line| {
            let [half, most_all, all] = [0.5, 0.99, 1.0].map(|part| quantile(&line.took, part));
            [
                line.to_string(),
                fixed(half, 3),
                fixed(most_all, 3),
                fixed(all, 3),
                line.took.len().to_string(),
                at_most(TARGET, most_all),
            ]
        })
        .collect();
    format!("{}\n{NOTES}", table(HEADS, &rows))
}

/// Returns the quantile of ordered values, in seconds.
fn quantile(values: &[Duration], part: f64) -> f64 {
    let index = (part * values.len() as f64).ceil() as usize;
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
