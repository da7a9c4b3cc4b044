//! `kubectl krypton install hub|agent`: installs or upgrades the hub or an agent, with the user's permissions.

use std::path::{Path, PathBuf};

use clap::Args;
use krypton_types::error_chain::chain;
use tempfile::NamedTempFile;

use crate::check;
use crate::error::KubectlError;
use crate::helm::{ChartValues, HelmArgs};
use crate::home::Target;
use crate::program::Program;
use crate::render::CommandOutput;
use crate::tool::temporary_file;

const VERSION: &str = env!("CARGO_PKG_VERSION");
const EXAMPLES: &str = "\
Examples:
  # Install the hub, or upgrade it with the same values
  kubectl krypton install hub

  # Upgrade an agent
  kubectl krypton install agent

  # Install an agent that joins the fleet of a bundle
  kubectl krypton install agent --bundle NAME.yaml";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Install {
    /// The program to install. Its namespace is created if missing; by default krypton for the hub (--hub-namespace), and
    /// krypton-system for the agent (--namespace). To add a cluster to the fleet, use `join --agent-context`, which
    /// installs the agent too
    program: Program,
    /// For the agent: the join bundle in this file, which `join` prints
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
    #[command(flatten)]
    values: ChartValues,
    /// The Helm chart: a folder, an archive, or a reference that Helm accepts; by default the one in this program
    #[arg(long, value_name = "CHART")]
    chart: Option<String>,
    /// Install without the checks of the cluster and of your rights
    #[arg(long)]
    skip_checks: bool,
    #[command(flatten)]
    helm: HelmArgs,
}

/// Changes nothing if the cluster or the user's rights do not fit.
pub(crate) async fn run(args: Install, target: &Target<'_>) -> Result<CommandOutput, KubectlError> {
    let namespace = args.program.named_namespace(&target.args)?;
    let mut values = args.values.flags();
    let bundle = match &args.bundle {
        Some(_) if args.program == Program::Hub => {
            return Err(KubectlError::usage("a hub takes no --bundle"));
        }
        Some(file) => Some(copy_bundle(file)?),
        None => None,
    };
    let cluster = target.connect().await?;
    if !args.skip_checks {
        check::ensure_installable(&cluster, args.program).await?;
    }
    args.helm.check_version().await?;
    let namespace = namespace.unwrap_or(args.program.default_namespace());
    let release = args.helm.release(args.program, namespace, &target.args);
    values.extend(bundle.as_ref().map(bundle_flag));
    let chart = args.chart.as_deref();
    let mut output = CommandOutput::stdout(release.install(&cluster, chart, &values).await?);
    if chart.is_none()
        && let Ok(Some(tag)) = release.pinned_tag().await
        && tag != VERSION
    {
        output.stderr = format!(
            "the release keeps image.tag={tag}, and not {VERSION}, the version of its chart; --set image.tag= removes that value\n"
        );
    }
    Ok(output)
}

/// Copies a valid join bundle into a temporary file.
fn copy_bundle(path: &Path) -> Result<NamedTempFile, KubectlError> {
    let bundle = check::read_bundle(path)?;
    let yaml = bundle.to_yaml().map_err(|error| {
        KubectlError::Failed(format!("writing the bundle failed: {}", chain(&error)))
    })?;
    temporary_file("the bundle", &yaml)
}

/// Returns Helm's flag for the join bundle in this file.
pub(crate) fn bundle_flag(file: &NamedTempFile) -> [String; 2] {
    let path = escape(&file.path().display().to_string());
    ["--set-file".to_owned(), format!("join.bundle={path}")]
}

/// Escapes a path for Helm's flag, where a backslash escapes the next character and a comma ends the value.
fn escape(path: &str) -> String {
    path.replace('\\', r"\\").replace(',', r"\,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_windows_is_escaped_for_helm() {
        let path = r"C:\Users\Jane, Doe\bundle";
        assert_eq!(escape(path), r"C:\\Users\\Jane\, Doe\\bundle");
    }
}
