//! Runs the programs of the harness until their end or a signal. All owners are then dropped, so no started process is
//! left.

use std::process::ExitCode;

use anyhow::{Error, Result, anyhow};
use tokio::signal::unix::{SignalKind, signal};

/// Runs the work of the program with this name.
pub async fn run_until_stopped(name: &str, work: impl Future<Output = Result<()>>) -> ExitCode {
    let outcome = tokio::select! {
        outcome = work => outcome,
        error = stop_requested() => Err(error),
    };
    exit_code(name, outcome)
}

/// Prints the error of the program with this name.
pub fn exit_code(name: &str, outcome: Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Waits for Ctrl-C, SIGTERM or SIGHUP. Returns the error with which a program ends early.
pub async fn stop_requested() -> Error {
    match wait_for_signal().await {
        Ok(()) => anyhow!("stopped before the end"),
        Err(error) => Error::new(error).context("listening for signals"),
    }
}

async fn wait_for_signal() -> std::io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hang_up.recv() => {}
    }
    Ok(())
}
