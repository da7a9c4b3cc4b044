//! `kubectl krypton install hub|agent`: installs or upgrades the hub or an agent, with the user's permissions.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use crate::check;
use crate::error::KubectlError;
use crate::helm::{ChartRelease, HelmArgs};
use crate::home::Target;
use crate::program::Program;
use crate::render::CommandOutput;

#[derive(Clone, Debug, Args)]
pub(crate) struct Install {
    /// The program to install. Its namespace is created if missing; by default krypton for the hub (--hub-namespace), and
    /// krypton-system for the agent (--namespace). To add a cluster to the fleet, use `join --agent-context`, which
    /// installs the agent too
    program: Program,
    /// A value for the chart, as in Helm's --set; repeatable
    #[arg(long = "set", value_name = "KEY=VALUE")]
    values: Vec<String>,
    /// File with values for the chart; repeatable
    #[arg(short = 'f', long = "values", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The Helm chart: a folder, an archive, or a reference that Helm accepts; by default the one in this program
    #[arg(long, value_name = "CHART")]
    chart: Option<String>,
    #[command(flatten)]
    helm: HelmArgs,
}

/// Changes nothing if the cluster or the user's rights do not fit.
pub(crate) async fn run(args: Install, target: &Target<'_>) -> Result<CommandOutput, KubectlError> {
    let namespace = args.program.named_namespace(&target.args)?;
    let cluster = target.connect().await?;
    check::ensure_installable(&cluster, args.program).await?;
    args.helm.check_version().await?;
    let release = ChartRelease {
        program: args.program,
        namespace: namespace.unwrap_or(args.program.default_namespace()),
        cluster: &target.args,
        helm: &args.helm,
    };
    let mut values = Vec::new();
    for file in &args.files {
        values.extend([OsString::from("--values"), file.into()]);
    }
    for value in &args.values {
        values.extend([OsString::from("--set"), value.into()]);
    }
    let output = release
        .install(&cluster, args.chart.as_deref(), &values)
        .await?;
    Ok(CommandOutput::stdout(output))
}
