//! `make soak`: a fleet of two edges, to which for half an hour everything happens that a seed makes up. In
//! each pause the apiservers are asked whether all promises are kept.

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

use anyhow::{Context, Result, bail};
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

/// Of one question to an apiserver.
pub(crate) const READ_DEADLINE: Duration = Duration::from_secs(20);

/// Random faults over two edges, and a check of all promises in each pause between them.
#[derive(Debug, Parser)]
#[command(name = "soak", version)]
pub(crate) struct Args {
    /// What the faults are drawn from: the same seed makes the same faults at the same times
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// No burst of faults begins after so many minutes; the last one may end some 4 minutes later
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=600))]
    minutes: u64,
    /// Names of Tenants over both edges; at any time some are deleted
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(4..=500))]
    tenants: u16,
    /// Hubs of home: of two one leads, and the other is to follow it
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    hubs: u8,
    /// Seconds of quiet after which everything must be as promised
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    settle: u64,
    /// Append the summary to this file, in markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<std::path::PathBuf>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = tokio::select! {
        outcome = Box::pin(run::run(&args)) => outcome,
        outcome = told_to_stop() => outcome,
    };
    // By now everything that was started is gone: its owners are dropped.
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn told_to_stop() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    tokio::select! {
        pressed = tokio::signal::ctrl_c() => pressed.context("listening for Ctrl-C")?,
        _ = terminate.recv() => {}
    }
    bail!("stopped before the end")
}

pub(crate) fn say(progress: &str) {
    eprintln!("soak: {progress}");
}
