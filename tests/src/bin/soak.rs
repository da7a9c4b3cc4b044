//! Runs `make soak`: injects random faults from a seed into a fleet of two edge clusters for half an hour. In each
//! pause, it verifies the promises on the API servers.

#[path = "../soak/carry.rs"]
mod carry;
#[path = "../soak/expected_state.rs"]
mod expected_state;
#[path = "../soak/fault.rs"]
mod fault;
#[path = "../soak/hubs.rs"]
mod hubs;
#[path = "../soak/judgement.rs"]
mod judgement;
#[path = "../soak/person.rs"]
mod person;
#[path = "../soak/plan.rs"]
mod plan;
#[path = "../soak/report.rs"]
mod report;
#[path = "../soak/run.rs"]
mod run;
#[path = "../soak/snapshot.rs"]
mod snapshot;
#[path = "../soak/stage.rs"]
mod stage;
#[path = "../soak/whom.rs"]
mod whom;
#[path = "../soak/witness.rs"]
mod witness;

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use krypton_tests::program::run_until_stopped;

/// Deadline of one read from an API server.
pub(crate) const READ_DEADLINE: Duration = Duration::from_secs(20);

/// Injects random faults into two edge clusters, and verifies all promises in each pause
#[derive(Debug, Parser)]
#[command(name = "soak", version)]
pub(crate) struct Args {
    /// Seed of the faults. The same seed generates the same faults at the same times
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Minutes after which no burst of faults starts. The last burst can end 4 minutes later
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=600))]
    minutes: u64,
    /// Number of Tenant names on both edge clusters. At any time, some are deleted
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(4..=500))]
    tenants: u16,
    /// Number of hubs on home. With two hubs, one is the leader and the other a standby
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    hubs: u8,
    /// Seconds of quiet after which all promises must hold
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    settle: u64,
    /// Append the summary to this file, in Markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<std::path::PathBuf>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    run_until_stopped("soak", Box::pin(run::run(&args))).await
}

pub(crate) fn log_progress(progress: &str) {
    eprintln!("soak: {progress}");
}
