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

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser;
use tokio::signal::unix::{Signal, SignalKind, signal};

use folder::Folder;
use screen::Screen;
use stage::Stage;

const STOPPED: &str = "stopped before the end";

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
    match demonstrate(&args, &Screen::new()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn demonstrate(args: &Args, screen: &Screen) -> Result<()> {
    let mut stop = Stop::listen()?;
    // Dropped last, after all processes that write to it.
    let folder = Folder::acquire()?;
    screen.step("Starting three control planes and a chart repository");
    let mut stage = tokio::select! {
        started = Box::pin(Stage::start(screen, &folder)) => started?,
        () = stop.requested() => bail!(STOPPED),
    };
    let outcome = tokio::select! {
        outcome = Box::pin(story::play(screen, &mut stage)) => outcome,
        () = stop.requested() => bail!(STOPPED),
    };
    if outcome.is_err() {
        return outcome.context(stage.save_logs(&folder));
    }
    if args.exit {
        return Ok(());
    }
    screen.print(&stage.instructions());
    let ended = tokio::select! {
        () = stop.requested() => Ok(()),
        ended = stage.wait_for_hub_exit() => ended,
    };
    if ended.is_err() {
        return ended.context(stage.save_logs(&folder));
    }
    screen.print("\nStopping and removing all of it.");
    Ok(())
}

/// Signals that request the end of the demo.
struct Stop {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Stop {
    fn listen() -> Result<Self> {
        let listen_for = |kind| signal(kind).context("listening for signals");
        Ok(Self {
            interrupt: listen_for(SignalKind::interrupt())?,
            terminate: listen_for(SignalKind::terminate())?,
            hang_up: listen_for(SignalKind::hangup())?,
        })
    }

    async fn requested(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}
