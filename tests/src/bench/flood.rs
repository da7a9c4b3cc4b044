//! Agents on one hub, alone and beside some that flood it with reports: what the others notice.

use std::{
    sync::PoisonError,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use tokio::task::JoinSet;

use crate::{
    fan_out::{DEADLINE, Stage, allow_files, number},
    krypton::SETTLE,
    load::Times,
    machine::Neighbours,
    raw_agent::{Samples, flood, probe},
    say,
    simulated::{Agents, Enrolled, Seen},
    table::{at_most, fixed, table},
};

/// Agents that flood, in each part of the run.
const FLOODING: [u32; 4] = [0, 1, 10, 0];
const HEADS: [&str; 6] = [
    "figure",
    "alone",
    "1 floods",
    "10 flood",
    "alone again",
    "target",
];
const REPORTS: &str = "krypton_hub_messages_total{of=\"agent\",kind=\"report\"}";
const SLOWED: &str = "krypton_hub_sessions_slowed_total";
/// Between two changes of the chart's values, which the hub looks for every two seconds.
const CHANGE_EVERY: Duration = Duration::from_secs(4);
const TARGET: f64 = 1.1;
const NOTES: &str = "\
Floods report one Tenant a message as fast as the hub reads, from the first moment of their part on.
Desired states are timed by their agents, from the first of them that has it. Reports are timed by
probes, from a report until the hub answers the wrong digest behind it.
";

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Agents that mind their business, and as many probes
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) agents: u32,
    /// Seconds of each of the four parts
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(15..=3600))]
    pub(crate) seconds: u64,
}

#[derive(Debug)]
pub(crate) struct Flood {
    options: Options,
    parts: Vec<Part>,
}

/// What was seen while so many flooded. Times are in milliseconds, in order.
#[derive(Debug)]
struct Part {
    desired: Vec<f64>,
    reports: Vec<f64>,
    /// That the hub took in, of all.
    reports_a_second: f64,
    slowed: u64,
    /// Cores that the hub has used.
    hub: f64,
    neighbours: f64,
}

pub(crate) async fn measure(options: &Options) -> Result<Flood> {
    let floods = FLOODING.iter().sum::<u32>();
    allow_files(2 * options.agents + floods)?;
    say("flood: starting home and hub");
    let mut stage = Stage::start().await?;
    stage.hub.ready(DEADLINE).await?;
    let members = stage.make_members(2 * options.agents + floods).await?;
    let mut enrolled = stage.enrol(&members).await?;
    let mut split = |count: u32| -> Vec<Enrolled> {
        let rest = enrolled.len().saturating_sub(count as usize);
        enrolled.split_off(rest)
    };
    let agents = Agents::start(split(options.agents));
    let up = |seen: &Seen| seen.up.and(seen.desired).map(|(_, at)| at);
    agents.all("have a desired state", DEADLINE, up).await?;
    let (mut probes, samples) = (JoinSet::new(), Samples::default());
    for (index, enrolled) in split(options.agents).into_iter().enumerate() {
        let offset = index as f64 / f64::from(options.agents);
        probes.spawn(probe(enrolled, offset, Samples::clone(&samples)));
    }
    // A whole round of all probes.
    tokio::time::sleep(SETTLE.max(Duration::from_secs(11))).await;
    let mut parts = Vec::new();
    let mut round = 0;
    for flooding in FLOODING {
        say(&format!(
            "flood: {flooding} agents flood for {} s",
            options.seconds
        ));
        let mut floods = JoinSet::new();
        let (clock, neighbours) = (Instant::now(), Neighbours::watch(stage.known()?)?);
        let (metrics, times) = (stage.hub.metrics().await?, Times::of(stage.hub.pid())?);
        for enrolled in split(flooding) {
            floods.spawn(flood(enrolled));
        }
        let mut desired = Vec::new();
        while clock.elapsed() < Duration::from_secs(options.seconds) {
            round += 1;
            let next = Instant::now() + CHANGE_EVERY;
            let came = stage.change(&agents, round).await?;
            let first = came.first().copied().context("no agents")?;
            desired.extend(came.iter().map(|at| millis(at.duration_since(first))));
            tokio::time::sleep_until(next.into()).await;
        }
        for tasks in [&mut probes, &mut floods] {
            if let Some(ended) = tasks.try_join_next() {
                bail!("a session has ended: {:?}", ended?.err());
            }
        }
        let took = clock.elapsed().as_secs_f64();
        let after = stage.hub.metrics().await?;
        let counted =
            |name: &str| Ok::<_, anyhow::Error>(number(&after, name)? - number(&metrics, name)?);
        let taken = std::mem::take(&mut *samples.lock().unwrap_or_else(PoisonError::into_inner));
        let within = taken.iter().filter(|(asked, _)| *asked >= clock);
        let mut reports: Vec<f64> = within.map(|(_, took)| millis(*took)).collect();
        reports.sort_by(f64::total_cmp);
        desired.sort_by(f64::total_cmp);
        parts.push(Part {
            desired,
            reports,
            reports_a_second: counted(REPORTS)? as f64 / took,
            slowed: counted(SLOWED)?,
            hub: Times::of(stage.hub.pid())?.since(&times).total() / took,
            neighbours: neighbours.cores(stage.known()?)?,
        });
        drop(floods);
        tokio::time::sleep(SETTLE).await;
    }
    Ok(Flood {
        options: options.clone(),
        parts,
    })
}

fn millis(span: Duration) -> f64 {
    span.as_secs_f64() * 1000.0
}

fn quantile(sorted: &[f64], part: f64) -> f64 {
    let index = (part * sorted.len().saturating_sub(1) as f64).ceil() as usize;
    sorted.get(index).copied().unwrap_or(f64::NAN)
}

pub(crate) fn render(measured: &Flood) -> String {
    let parts = &measured.parts;
    let row = |label: &str, digits: usize, target: &str, of: &dyn Fn(&Part) -> f64| {
        let mut cells = parts.iter().map(|part| fixed(of(part), digits));
        let mut next = || cells.next().unwrap_or_default();
        [
            label.to_owned(),
            next(),
            next(),
            next(),
            next(),
            target.to_owned(),
        ]
    };
    let mut rows = Vec::new();
    let kinds: [(&str, fn(&Part) -> &[f64]); 2] = [
        ("a desired state is with its agent", |part| &part.desired),
        ("a report is heard", |part| &part.reports),
    ];
    for (what, of) in kinds {
        let samples = parts
            .iter()
            .map(|part| of(part).len())
            .min()
            .unwrap_or_default();
        rows.push(row(
            &format!("{what}: p50 of {samples} and more, ms"),
            2,
            "",
            &|part| quantile(of(part), 0.5),
        ));
        let p99 = |part: &Part| quantile(of(part), 0.99);
        rows.push(row("  p99, ms", 2, "", &p99));
        let alone = parts.first().map_or(f64::NAN, p99);
        let ratio = |part: &Part| p99(part) / alone;
        let flooded = parts.iter().take(3).map(ratio).fold(0.0, f64::max);
        rows.push(row(
            "  p99 as a part of that alone",
            2,
            &at_most(TARGET, flooded),
            &ratio,
        ));
    }
    rows.extend([
        row("reports that the hub takes in a second", 0, "", &|part| {
            part.reports_a_second
        }),
        row("how often a session was slowed", 0, "", &|part| {
            part.slowed as f64
        }),
        row("cores of the hub", 3, "", &|part| part.hub),
        row("cores kept busy by others", 2, "", &|part| part.neighbours),
    ]);
    format!(
        "\n== {} agents and as many probes on one hub, beside floods ==\n{}{NOTES}",
        measured.options.agents,
        table(HEADS, &rows),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_samples() {
        let sorted: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!(quantile(&sorted, 0.5), 50.0);
        assert_eq!(quantile(&sorted, 0.99), 99.0);
        assert_eq!(quantile(&[3.0], 0.99), 3.0);
        assert!(quantile(&[], 0.99).is_nan());
    }

    #[test]
    fn a_number_is_read_with_its_labels() {
        let text = "# TYPE a counter\na_total{of=\"x\",kind=\"y\"} 7\na 3\n";
        assert_eq!(number(text, "a_total{of=\"x\",kind=\"y\"}").unwrap(), 7);
        assert_eq!(number(text, "a ").unwrap(), 3);
        assert!(number(text, "b").is_err());
    }
}
