//! Measures the effect of a flood of reports, or of a member's API server with endless responses, on other agents of
//! the hub.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use krypton_tests::{
    AnsweringProxy, Cluster, FalseResponse, Parts, ResponseFault, answering_proxy::READ_VERBS,
    fleet::FleetClient,
};
use tokio::task::JoinSet;

use crate::{
    krypton::SETTLE,
    load::CpuTimes,
    log_progress,
    machine::OtherLoad,
    raw_agent::{Samples, flood, probe},
    simulated::{Agents, Enrolled},
    stage::{Stage, number},
    table::{at_most, fixed, table},
};

/// Number of flooding agents in each part of a round, and whether an API server responds endlessly. The parts
/// alternate, so other load on the machine affects all of them.
const FLOODING: [(u32, bool); 5] = [(0, false), (1, false), (0, false), (10, false), (0, true)];
const HEADERS: [&str; 7] = [
    "figure",
    "alone",
    "alone too",
    "1 floods",
    "10 flood",
    "endless server",
    "target",
];
const HOSTILE: &str = "hostile";
const REPORTS: &str = "krypton_hub_messages_total{sender=\"agent\",kind=\"report\"}";
const THROTTLED: &str = "krypton_hub_sessions_throttled_total";
/// Interval between changes of the chart's values. The hub checks for them every two seconds.
const CHANGE_EVERY: Duration = Duration::from_secs(4);
const TARGET: f64 = 1.1;
const NOTES: &str = "\
The parts alternate. The two parts alone differ only by other load on the machine, and floods are compared to
their average. A flood reports one Tenant per message, as fast as the hub reads, from its start. Agents measure
the time of desired states, relative to the first agent that has them. Reports are timed by
probes, from a report until the hub responds to the wrong digest after it. The endless server is the API
server of one more member, which the hub reaches through a kubeconfig. Its responses never end.
";

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Agents without a flood, and as many probes
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) agents: u32,
    /// Seconds of each of the five parts of a round
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(5..=3600))]
    pub(crate) seconds: u64,
    /// Rounds of all parts
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: u32,
}

#[derive(Debug)]
pub(crate) struct FloodResults {
    options: Options,
    parts: Vec<FloodPart>,
}

/// Measurements during one number of floods. Times are in milliseconds, in ascending order.
#[derive(Debug, Default)]
struct FloodPart {
    desired: Vec<f64>,
    reports: Vec<f64>,
    seconds: f64,
    /// Number of reports that the hub processed.
    processed: u64,
    throttled: u64,
    /// CPU time of the hub and of other processes, in seconds.
    hub: f64,
    other_cores: f64,
}

pub(crate) async fn measure(options: &Options) -> Result<FloodResults> {
    let floods = options.rounds
        * FLOODING
            .iter()
            .map(|(flood_count, _)| flood_count)
            .sum::<u32>();
    let count = 2 * options.agents + floods;
    let stage = Stage::start("flood", count).await?;
    let edge = Cluster::start("edge", Parts::ControlPlane).await?;
    let server = AnsweringProxy::start(&edge).await?;
    let kubeconfig = std::fs::read_to_string(server.kubeconfig())?;
    let fleet_client = FleetClient::new(&stage.home);
    fleet_client.add_member(HOSTILE, &kubeconfig).await?;
    let healthy = [("Healthy", "True", "Reconciling")];
    fleet_client.wait_for_member(HOSTILE, &healthy).await?;
    let members = stage.create_members("simulated", count).await?;
    let mut enrolled = stage.enroll(&members).await?;
    let mut split = |count: u32| -> Vec<Enrolled> {
        let rest = enrolled.len().saturating_sub(count as usize);
        enrolled.split_off(rest)
    };
    let agents = Agents::start_and_wait(split(options.agents)).await?;
    let (mut probes, samples) = (JoinSet::new(), Samples::default());
    for (index, enrolled) in split(options.agents).into_iter().enumerate() {
        let offset = index as f64 / f64::from(options.agents);
        probes.spawn(probe(enrolled, offset, Samples::clone(&samples)));
    }
    // One complete interval of all probes.
    tokio::time::sleep(SETTLE.max(Duration::from_secs(11))).await;
    let mut parts: Vec<FloodPart> = FLOODING.iter().map(|_| FloodPart::default()).collect();
    let mut changes = 0;
    for round in 1..=options.rounds {
        log_progress(&format!("flood: round {round} of {}", options.rounds));
        for ((flood_count, endless), part) in FLOODING.into_iter().zip(&mut parts) {
            if endless {
                server.inject(ResponseFault {
                    verbs: READ_VERBS,
                    resources: &[],
                    response: FalseResponse::Endless,
                });
            }
            let (clock, other_load) = (
                Instant::now(),
                OtherLoad::watch(stage.known_cpu_seconds()?)?,
            );
            let (metrics_before, cpu_before) = (
                stage.hub.metrics().await?,
                CpuTimes::read_for(stage.hub.pid())?,
            );
            let mut floods = JoinSet::new();
            for enrolled in split(flood_count) {
                floods.spawn(flood(enrolled));
            }
            while clock.elapsed() < Duration::from_secs(options.seconds) {
                changes += 1;
                let next = Instant::now() + CHANGE_EVERY;
                let times = stage.change(&agents, changes).await?;
                let first = times.first().copied().context("no agents")?;
                let delays = times.iter().map(|at| millis(at.duration_since(first)));
                part.desired.extend(delays);
                tokio::time::sleep_until(next.into()).await;
            }
            for tasks in [&mut probes, &mut floods] {
                if let Some(ended) = tasks.try_join_next() {
                    bail!("a session has ended: {:?}", ended?.err());
                }
            }
            let elapsed = clock.elapsed().as_secs_f64();
            part.seconds += elapsed;
            part.hub += CpuTimes::read_for(stage.hub.pid())?
                .since(&cpu_before)
                .total();
            part.other_cores += elapsed * other_load.cores(stage.known_cpu_seconds()?)?;
            let metrics_after = stage.hub.metrics().await?;
            for (sum, name) in [
                (&mut part.processed, REPORTS),
                (&mut part.throttled, THROTTLED),
            ] {
                // The metric doesn't exist before the first report.
                let before = number(&metrics_before, name).unwrap_or_default();
                *sum += number(&metrics_after, name)? - before;
            }
            let collected = std::mem::take(&mut *samples.lock());
            let recent = collected
                .iter()
                .filter(|(requested_at, _)| *requested_at >= clock);
            part.reports
                .extend(recent.map(|(_, elapsed)| millis(*elapsed)));
            drop(floods);
            server.forward_all();
            tokio::time::sleep(SETTLE).await;
        }
    }
    for part in &mut parts {
        part.desired.sort_by(f64::total_cmp);
        part.reports.sort_by(f64::total_cmp);
    }
    Ok(FloodResults {
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

/// Returns the ratio of the larger value to the smaller one.
fn max_ratio(one: f64, other: f64) -> f64 {
    one.max(other) / one.min(other)
}

/// Returns "undecided" if the two parts alone differ by more than the target.
fn ratio_verdict(ratio: f64, noise: f64) -> String {
    if noise <= TARGET {
        at_most(TARGET, ratio)
    } else {
        format!("<= {TARGET}: undecided, the parts alone differ {noise:.1} times")
    }
}

pub(crate) fn render(measured: &FloodResults) -> String {
    let [alone, one_flood, alone_too, ten_floods, endless_server] = measured.parts.as_slice()
    else {
        return String::new();
    };
    let parts = [alone, alone_too, one_flood, ten_floods, endless_server];
    let row = |label: &str, digits: usize, target: &str, figure: &dyn Fn(&FloodPart) -> f64| {
        let [a, b, c, d, e] = parts.map(|part| fixed(figure(part), digits));
        [label.to_owned(), a, b, c, d, e, target.to_owned()]
    };
    let mut rows = Vec::new();
    let desired: fn(&FloodPart) -> &[f64] = |part| &part.desired;
    let reports: fn(&FloodPart) -> &[f64] = |part| &part.reports;
    for (what, figure) in [
        ("a desired state reaches its agent", desired),
        ("a report is processed", reports),
    ] {
        let samples = parts.iter().map(|part| figure(part).len()).min();
        let label = format!("{what}: p50 of {}, ms", samples.unwrap_or_default());
        rows.push(row(&label, 2, "", &|part| quantile(figure(part), 0.5)));
        let p99 = |part: &FloodPart| quantile(figure(part), 0.99);
        rows.push(row("  p99, ms", 2, "", &p99));
        let average_alone = f64::midpoint(p99(alone), p99(alone_too));
        let ratio = |part: &FloodPart| p99(part) / average_alone;
        let noise = max_ratio(p99(alone), p99(alone_too));
        let worst = ratio(one_flood)
            .max(ratio(ten_floods))
            .max(ratio(endless_server));
        let target = ratio_verdict(worst, noise);
        rows.push(row("  p99 relative to alone", 2, &target, &ratio));
    }
    let per_second = |sum: f64, part: &FloodPart| sum / part.seconds;
    rows.extend([
        row(
            "reports that the hub processes in a second",
            0,
            "",
            &|part| per_second(part.processed as f64, part),
        ),
        row("sessions throttled, times a second", 0, "", &|part| {
            per_second(part.throttled as f64, part)
        }),
        row("cores of the hub", 3, "", &|part| {
            per_second(part.hub, part)
        }),
        row("cores used by other processes", 2, "", &|part| {
            per_second(part.other_cores, part)
        }),
    ]);
    format!(
        "\n== {} agents and as many probes on one hub, with floods ==\n{}{NOTES}",
        measured.options.agents,
        table(HEADERS, &rows),
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
    fn noisy_machine_gives_no_verdict() {
        assert_eq!(ratio_verdict(1.05, max_ratio(10.0, 10.5)), "<= 1.1: met");
        assert_eq!(ratio_verdict(1.2, max_ratio(10.5, 10.0)), "<= 1.1: missed");
        assert!(
            ratio_verdict(0.5, max_ratio(2.0, 1.0))
                .contains("undecided, the parts alone differ 2.0 times")
        );
    }

    #[test]
    fn a_number_is_read_with_its_labels() {
        let text = "# TYPE a counter\na_total{of=\"x\",kind=\"y\"} 7\na 3\n";
        assert_eq!(number(text, "a_total{of=\"x\",kind=\"y\"}").unwrap(), 7);
        assert_eq!(number(text, "a ").unwrap(), 3);
        assert!(number(text, "b").is_err());
    }
}
