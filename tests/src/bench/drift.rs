//! Measures the cost of drift detection. Compares an idle fleet without drift checks to one with frequent checks, and
//! derives the cost of one check from the difference.

use std::time::Duration;

use anyhow::{Result, ensure};
use krypton_tests::{ChartRepository, Mode};

use crate::{
    krypton::{IdleUsage, Setup, with_log},
    log_progress,
    table::{fixed, table},
};

const HEADERS: [&str; 4] = ["drift", "one check", "an hour", ""];
const NOTES: &str = "an hour: checks of one release at the default interval of 10 minutes. The release is the chart `small`: \
three objects\nwithout drift. Each check reads every object once.";
/// At the default interval of 10 minutes.
const CHECKS_PER_HOUR: f64 = 6.0;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Releases
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=300))]
    pub(crate) tenants: u32,
    /// Seconds at rest, with checks and without
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(10..=3600))]
    pub(crate) seconds: u64,
    /// Seconds between two checks of one release
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub(crate) interval: u64,
}

pub(crate) struct DriftResults {
    checks: f64,
    requests: f64,
    cpu_seconds: f64,
}

pub(crate) async fn measure(
    options: &Options,
    repository: &ChartRepository,
) -> Result<DriftResults> {
    let without = measure_at_rest(options, "off", repository).await?;
    let with = measure_at_rest(options, "warn", repository).await?;
    let requests = |usage: &IdleUsage| usage.edge.own_requests as f64;
    // Each drift check reads the release's Secret once, and an idle reconciler reads no other.
    let key = ("GET".to_owned(), "secrets".to_owned());
    let secret_reads = |usage: &IdleUsage| usage.edge.all.get(&key).copied().unwrap_or_default();
    let checks = secret_reads(&with) as f64 - secret_reads(&without) as f64;
    ensure!(checks >= 1.0, "the agent performed no drift check");
    Ok(DriftResults {
        checks,
        requests: requests(&with) - requests(&without),
        cpu_seconds: with.cpu_seconds - without.cpu_seconds,
    })
}

async fn measure_at_rest(
    options: &Options,
    drift: &str,
    repository: &ChartRepository,
) -> Result<IdleUsage> {
    let size = options.tenants;
    log_progress(&format!(
        "{size} Tenants, drift {drift}: starting home, edge, hub and agent"
    ));
    let interval = format!("--drift-interval={}s", options.interval);
    let flags = [format!("--drift={drift}"), interval];
    let setup = Setup::start(Mode::Agent, repository, &flags).await?;
    let measuring = async {
        setup.install(0..size).await?;
        // After two intervals, the first drift check of each object is over.
        let warm_up = Duration::from_secs(2 * options.interval);
        tokio::time::sleep(warm_up).await;
        log_progress(&format!("at rest for {} s", options.seconds));
        setup
            .measure_idle(Duration::from_secs(options.seconds))
            .await
    };
    measuring
        .await
        .map_err(|error| with_log(error, setup.actor()))
}

pub(crate) fn render(measured: &DriftResults) -> String {
    let row = |name: &str, total: f64, digits: usize| {
        let per_check = total / measured.checks;
        let per_hour = per_check * CHECKS_PER_HOUR;
        [
            name.to_owned(),
            fixed(per_check, digits),
            fixed(per_hour, digits),
            String::new(),
        ]
    };
    let rows = [
        row("requests", measured.requests, 1),
        row("agent's CPU, ms", measured.cpu_seconds * 1000.0, 2),
    ];
    let checks = measured.checks;
    format!("{}\n{NOTES}\n{checks} looks.", table(HEADERS, &rows))
}
