//! Runs `make demo`: a fleet of three real control planes on this machine. Shows an installation, a chart upgrade, the
//! deletion of a Tenant, and the loss and return of an agent. Verifies every step on the API servers before the next.

#[path = "../demo/folder.rs"]
mod folder;
#[path = "../demo/goals.rs"]
mod goals;
#[path = "../demo/screen.rs"]
mod screen;
#[path = "../demo/stage.rs"]
mod stage;
#[path = "../demo/story.rs"]
mod story;

use std::{pin::pin, process::ExitCode};

use anyhow::{Context, Result};
use clap::Parser;
use krypton_tests::program::{exit_code, stop_requested};

use folder::Folder;
use screen::Screen;
use stage::Stage;

/// Demonstrates Krypton on three clusters that it starts on this machine.
#[derive(Debug, Parser)]
#[command(name = "demo", version)]
struct Args {
    /// Exit after the last step, with status 0 only if every step succeeded. Otherwise keep all running until Ctrl-C
    #[arg(long)]
    exit: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    // When this returns, all owners are dropped, so no started process is left.
    exit_code("demo", demonstrate(&args, &Screen::new()).await)
}

async fn demonstrate(args: &Args, screen: &Screen) -> Result<()> {
    let mut stop = pin!(stop_requested());
    // Dropped last, after all processes that write to it.
    let folder = Folder::acquire()?;
    screen.step("Starting three control planes and a chart repository");
    let mut stage = tokio::select! {
        started = Box::pin(Stage::start(screen, &folder)) => started?,
        error = &mut stop => return Err(error),
    };
    let outcome = tokio::select! {
        outcome = Box::pin(story::play(screen, &mut stage)) => outcome,
        error = &mut stop => return Err(error),
    };
    if outcome.is_err() {
        return outcome.context(stage.save_logs(&folder));
    }
    if args.exit {
        return Ok(());
    }
    screen.print(&stage.instructions());
    let ended = tokio::select! {
        _ = &mut stop => Ok(()),
        ended = stage.wait_for_hub_exit() => ended,
    };
    if ended.is_err() {
        return ended.context(stage.save_logs(&folder));
    }
    screen.print("\nStopping and removing all of it.");
    Ok(())
}
