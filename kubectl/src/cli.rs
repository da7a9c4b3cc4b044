//! The command line, and which command runs.

use std::ffi::OsString;
use std::io::Write;

use clap::{
    Arg, ArgAction, ColorChoice, CommandFactory as _, FromArgMatches as _, Parser, Subcommand,
};
use futures::future::LocalBoxFuture;
use jiff::Timestamp;

use crate::commands::change::{self, Verb};
use crate::commands::{
    accept_release, get, install, join, leave, log_level, migrate, quickstart, rotate_ca,
    support_bundle, uninstall, version,
};
use crate::error::KubectlError;
use crate::home::{Target, TargetArgs};
use crate::render::CommandOutput;
use crate::{check, complete, explain};

/// Show the fleet of Krypton and its Tenants, and let clusters join it
#[derive(Clone, Debug, Parser)]
#[command(
    name = "kubectl-krypton",
    bin_name = "kubectl krypton",
    version,
    max_term_width = 100,
    arg(no_color())
)]
pub struct Cli {
    #[command(flatten)]
    target: TargetArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Print a table of clusters, Tenants or KryptonDeployments
    Get(get::Get),
    /// Explain the state of a Tenant, KryptonDeployment or cluster, and the next step
    Explain(explain::Explain),
    /// Check the home cluster, the hub and each member, or whether Krypton can be installed
    Check(check::Check),
    /// Stop all writes for an object except its status
    #[command(after_help = change::PAUSE_EXAMPLES)]
    Pause(change::Change),
    /// End a pause
    #[command(after_help = change::RESUME_EXAMPLES)]
    Resume(change::Change),
    /// Retry a failed action now, without waiting for the back-off
    #[command(after_help = change::RESYNC_EXAMPLES, mut_args(change::restrict_kinds))]
    Resync(change::Change),
    /// Trust a stored Helm release that has changed since Krypton deployed it
    AcceptRelease(accept_release::AcceptRelease),
    /// Let the hub connect to clusters whose source is in another namespace than the hub's
    #[command(after_help = change::ACCEPT_EXAMPLES)]
    Accept(change::Members),
    /// Reject the agents of clusters, and stop the hub's own access to these clusters
    #[command(after_help = change::BAN_EXAMPLES)]
    Ban(change::Members),
    /// Revert a ban
    #[command(after_help = change::UNBAN_EXAMPLES)]
    Unban(change::Members),
    /// Create a local kind cluster with a hub and a first Tenant, or delete it
    Quickstart(quickstart::Quickstart),
    /// Install or upgrade the hub or an agent, with Helm
    Install(install::Install),
    /// Uninstall the hub or an agent, and list what stays
    Uninstall(uninstall::Uninstall),
    /// Let a cluster join the fleet: print a join bundle for its agent, or also install the agent
    Join(join::Join),
    /// Remove a cluster from the fleet
    Leave(leave::Leave),
    /// Replace the root of the hub's CA while agents stay connected, or show the progress
    RotateCa(rotate_ca::RotateCa),
    /// Show the log filter of hub or agent, or change it temporarily
    LogLevel(log_level::LogLevel),
    /// Create KryptonDeployments from the CryptoEdgeDeployments of krypton-operator in all namespaces, or in --namespace.
    /// The CryptoEdgeDeployments stay unchanged
    Migrate(migrate::Migrate),
    /// Write one file for support, without secrets
    SupportBundle(support_bundle::SupportBundle),
    /// Print the versions of this program, of the hub and of the agents
    Version(version::Versions),
}

impl Command {
    /// Returns whether the only namespace of the command is the hub's.
    fn needs_only_hub(&self) -> bool {
        match self {
            Self::Check(check) => check.needs_only_hub(),
            _ => matches!(self, Self::Join(_) | Self::RotateCa(_) | Self::Version(_)),
        }
    }
}

fn no_color() -> Arg {
    let flag = Arg::new("no-color").long("no-color");
    let flag = flag.action(ArgAction::SetTrue).global(true);
    flag.help("Print help and errors without colors")
}

/// Only help and errors have colors.
fn parse(args: &[OsString]) -> Result<Cli, clap::Error> {
    let mut command = Cli::command();
    if args.iter().any(|arg| arg == "--no-color") {
        command = command.color(ColorChoice::Never);
    }
    let mut matches = command.try_get_matches_from_mut(args)?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// Runs a command line, which starts with the program's name. `env` reads a variable. A command that watches prints to
/// `out` for as long as the reader accepts it.
pub async fn run(
    args: impl IntoIterator<Item = OsString>,
    env: &dyn Fn(&str) -> Option<String>,
    now: Timestamp,
    out: &mut dyn Write,
) -> Result<CommandOutput, KubectlError> {
    let args: Vec<OsString> = args.into_iter().collect();
    if complete::is_requested(args.first().map(OsString::as_os_str)) {
        let args = args.iter().skip(1);
        let args: Vec<String> = args.map(|arg| arg.to_string_lossy().into_owned()).collect();
        return Ok(CommandOutput::stdout(
            complete::completions(&Cli::command(), &args, env).await,
        ));
    }
    let cli = parse(&args).map_err(KubectlError::Usage)?;
    if cli.command.needs_only_hub() {
        cli.target.reject_namespace()?;
    }
    let target = &Target {
        args: cli.target,
        env,
    };
    let command: LocalBoxFuture<'_, Result<CommandOutput, KubectlError>> = match cli.command {
        Command::Get(args) => Box::pin(get::run(args, target, now, out)),
        Command::Explain(args) => Box::pin(explain::run(args, target, now)),
        Command::Check(args) => Box::pin(check::run(args, target, now)),
        Command::Pause(args) => Box::pin(change::run(Verb::Pause, args.objects()?, target, now)),
        Command::Resume(args) => Box::pin(change::run(Verb::Resume, args.objects()?, target, now)),
        Command::Resync(args) => Box::pin(change::run(Verb::Resync, args.objects()?, target, now)),
        Command::AcceptRelease(args) => Box::pin(accept_release::run(args, target)),
        Command::Accept(args) => Box::pin(change::run(Verb::Accept, args.objects(), target, now)),
        Command::Ban(args) => Box::pin(change::run(Verb::Ban, args.objects(), target, now)),
        Command::Unban(args) => Box::pin(change::run(Verb::Unban, args.objects(), target, now)),
        Command::Quickstart(args) => Box::pin(quickstart::run(args, target, out)),
        Command::Install(args) => Box::pin(install::run(args, target)),
        Command::Uninstall(args) => Box::pin(uninstall::run(args, target)),
        Command::Join(args) => Box::pin(join::run(args, target, now)),
        Command::Leave(args) => Box::pin(leave::run(args, target)),
        Command::RotateCa(args) => Box::pin(rotate_ca::run(args, target, now)),
        Command::LogLevel(args) => Box::pin(log_level::run(args, target)),
        Command::Migrate(args) => Box::pin(migrate::run(args, target)),
        Command::SupportBundle(args) => Box::pin(support_bundle::run(args, target, now)),
        Command::Version(args) => Box::pin(version::run(args, target, out)),
    };
    command.await
}
