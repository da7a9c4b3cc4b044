//! Measures an idle agent with many Tenants: its requests after a restart, its requests at rest, and its CPU and memory
//! usage.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use krypton_tests::{ChartRepository, Mode};
use tempfile::TempDir;

use crate::{
    krypton::{IdleUsage, Setup, with_log},
    load::Memory,
    log_progress,
    table::{MIB, fixed, table},
    traffic::Traffic,
};

const HEADERS: [&str; 3] = ["figure", "agent", "target"];
const NOTES: &str = "Helm runs are counted as the revisions that they create. Requests are the agent's own. At rest, it\n\
renews its Lease every 15 s, and restarts a watch that the API server ends. In the first ten minutes, it repeats the\n\
lists of kinds without objects, at most seven times each. The pass ends 5 s after all statuses\n\
are reported. It contains lists in pages of 50, watches, the Lease, its identity and the stored desired state.\n";

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Tenants on the edge; their Deployments have no pods
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) tenants: u32,
    /// Seconds at rest
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(10..=3600))]
    pub(crate) seconds: u64,
}

pub(crate) struct RestResults {
    tenants: u32,
    seconds: u64,
    /// Requests of a restarted agent.
    restart: Traffic,
    rest: IdleUsage,
    /// Number of revisions since all Tenants were installed.
    revisions: usize,
    memory: Memory,
}

pub(crate) async fn measure(
    options: &Options,
    repository: &ChartRepository,
) -> Result<RestResults> {
    let size = options.tenants;
    let folder = TempDir::with_prefix("krypton-rest-").context("creating a folder")?;
    let values = folder.path().join("values.yaml");
    fs::write(&values, "replicaCount: 0").context("writing values")?;
    log_progress(&format!(
        "{size} Tenants at rest: starting home, edge, hub and agent"
    ));
    let flags = [format!("--chart-values-file={}", values.display())];
    let mut setup = Setup::start(Mode::Agent, repository, &flags).await?;
    let measured = at_rest(options, &mut setup).await;
    measured.map_err(|error| with_log(error, setup.actor()))
}

async fn at_rest(options: &Options, setup: &mut Setup) -> Result<RestResults> {
    setup.install(0..options.tenants).await?;
    let before = setup.revisions().await?;
    log_progress("all Ready; the agent is restarted");
    let restart = setup.restart_agent().await?;
    log_progress(&format!("at rest for {} s", options.seconds));
    let rest = setup
        .measure_idle(Duration::from_secs(options.seconds))
        .await?;
    Ok(RestResults {
        tenants: options.tenants,
        seconds: options.seconds,
        restart,
        rest,
        revisions: setup.revisions().await?.saturating_sub(before),
        memory: Memory::read_for(setup.actor().pid())?,
    })
}

pub(crate) fn render(measured: &RestResults) -> String {
    let RestResults {
        tenants, seconds, ..
    } = measured;
    let row =
        |name: &str, figure: String, target: &str| [name.to_owned(), figure, target.to_owned()];
    let millicores = 1000.0 * measured.rest.cpu_seconds / *seconds as f64;
    let rows = [
        row("helm runs", measured.revisions.to_string(), "0"),
        row(
            "requests of a pass from a start",
            measured.restart.own_requests.to_string(),
            "the lists",
        ),
        row(
            "  for each Tenant",
            fixed(
                measured.restart.own_requests as f64 / f64::from(*tenants),
                3,
            ),
            "",
        ),
        row(
            &format!("requests in {seconds} s at rest"),
            measured.rest.edge.own_requests.to_string(),
            "the Lease's",
        ),
        row("CPU at rest, millicores", fixed(millicores, 2), ""),
        row(
            "RSS, MiB",
            fixed(measured.memory.resident as f64 / MIB, 1),
            "",
        ),
        row(
            "  its peak",
            fixed(measured.memory.peak as f64 / MIB, 1),
            "",
        ),
    ];
    format!(
        "\n== {tenants} Tenants at rest on one edge ==\n{}{NOTES}",
        table(HEADERS, &rows)
    )
}
