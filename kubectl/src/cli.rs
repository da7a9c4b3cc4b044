//! The command line, and which command runs.

use std::ffi::OsString;
use std::io::Write;

use clap::{Parser, Subcommand};
use jiff::Timestamp;

use crate::commands::change::{self, Verb};
use crate::commands::{
    accept_release, get, join, leave, log_level, migrate, rotate_ca, support_bundle, version,
};
use crate::error::KubectlError;
use crate::home::{HomeArgs, connect};
use crate::render::Printed;
use crate::{complete, explain};

/// Shows the fleet of Krypton and its Tenants, and lets clusters join it.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "kubectl-krypton",
    bin_name = "kubectl krypton",
    version,
    max_term_width = 100
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Print a table of clusters, Tenants or KryptonDeployments.
    Get(get::Get),
    /// Tell of a Tenant how it stands, why, and what comes next, from home to each cluster.
    Explain(explain::Explain),
    /// Have nothing written for an object, on whichever cluster it is, but its status.
    Pause(change::Change),
    /// End such a pause.
    Resume(change::Change),
    /// Try now what has failed, whatever pause was to come before the next attempt.
    Resync(change::Resync),
    /// Trust a stored Helm release that has changed since Krypton deployed it
    AcceptRelease(accept_release::AcceptRelease),
    /// Let the hub connect to clusters whose source lies in another namespace than its own.
    Accept(change::Members),
    /// Refuse the agents of clusters, and do not go there either.
    Ban(change::Members),
    /// Let them in again.
    Unban(change::Members),
    /// Print a join bundle: a file that lets the agent of a cluster into the fleet, once.
    Join(join::Join),
    /// Take a cluster out of the fleet.
    Leave(leave::Leave),
    /// Replace the root of the hub's CA while agents stay connected, or tell how far that is.
    RotateCa(rotate_ca::RotateCa),
    /// Show what hub or agent log, or change it for a while.
    LogLevel(log_level::LogLevel),
    /// Make KryptonDeployments of the CryptoEdgeDeployments of the former operator, or show them; the old objects
    /// stay as they are.
    Migrate(migrate::Migrate),
    /// Collect what somebody needs to help, without secrets, in one file.
    SupportBundle(support_bundle::SupportBundle),
    /// Print the version of this program, of the hub and of the agents.
    Version(version::Versions),
}

/// Runs one command line, the program's name first. `env` reads a variable; what goes on for as long as
/// somebody reads goes to `out`.
pub async fn run(
    args: impl IntoIterator<Item = OsString>,
    env: &dyn Fn(&str) -> Option<String>,
    now: Timestamp,
    out: &mut dyn Write,
) -> Result<Printed, KubectlError> {
    let args: Vec<OsString> = args.into_iter().collect();
    if complete::is_asked(args.first().map(OsString::as_os_str)) {
        let words = args
            .iter()
            .skip(1)
            .map(|word| word.to_string_lossy().into_owned());
        let words: Vec<String> = words.collect();
        let stdout = Box::pin(complete::answer(&words, env)).await;
        let stderr = String::new();
        return Ok(Printed { stdout, stderr });
    }
    let cli = Cli::try_parse_from(args).map_err(KubectlError::Usage)?;
    let changed = |verb, aim: change::ChangeTarget, home: HomeArgs| {
        Box::pin(async move {
            let home = connect(&home, env).await?;
            change::run(verb, aim, &home, now).await
        })
    };
    match cli.command {
        Command::Get(get) => Box::pin(get::run(get, env, now, out)).await,
        Command::Explain(args) => {
            let home = connect(&args.home, env).await?;
            Box::pin(explain::run(args, &home, now)).await
        }
        Command::Pause(args) => {
            let home = args.home.clone();
            changed(Verb::Pause, args.into(), home).await
        }
        Command::Resume(args) => {
            let home = args.home.clone();
            changed(Verb::Resume, args.into(), home).await
        }
        Command::Resync(args) => {
            let home = args.home.clone();
            changed(Verb::Resync, args.into(), home).await
        }
        Command::AcceptRelease(args) => {
            let cluster = connect(&args.home, env).await?;
            Box::pin(accept_release::run(args, &cluster)).await
        }
        Command::Accept(args) => {
            let home = args.home.clone();
            changed(Verb::Accept, args.into(), home).await
        }
        Command::Ban(args) => {
            let home = args.home.clone();
            changed(Verb::Ban, args.into(), home).await
        }
        Command::Unban(args) => {
            let home = args.home.clone();
            changed(Verb::Unban, args.into(), home).await
        }
        Command::Join(join) => {
            let home = connect(&join.home, env).await?;
            let running = join::run(join, home.client, &home.context, &home.namespace, now);
            Box::pin(running)
                .await
                .map_err(|error| KubectlError::Join(Box::new(error)))
        }
        Command::Leave(leave) => {
            let home = connect(&leave.home, env).await?;
            Box::pin(leave::run(leave, &home)).await
        }
        Command::RotateCa(rotate) => {
            let home = connect(&rotate.home, env).await?;
            let running = rotate_ca::run(rotate, home.client, &home.context, &home.namespace, now);
            Box::pin(running)
                .await
                .map_err(|error| KubectlError::RotateCa(Box::new(error)))
        }
        Command::LogLevel(args) => Box::pin(log_level::run(args, env)).await,
        Command::Migrate(migrate) => {
            let home = connect(&migrate.home, env).await?;
            Box::pin(migrate::run(migrate, home.client, &home.context)).await
        }
        Command::SupportBundle(args) => Box::pin(support_bundle::run(args, env, now)).await,
        Command::Version(args) => Ok(Box::pin(version::run(args, env)).await),
    }
}
