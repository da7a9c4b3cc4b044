//! `kubectl krypton log-level`: shows the log filter of a hub or agent, or changes it temporarily, through the debug port.

use std::net::SocketAddr;

use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use krypton_runtime::admin::parse_filter_duration;

use crate::debug_port::{DebugPort, parse_loopback_address, shortened};
use crate::error::KubectlError;
use crate::home::Target;
use crate::program::Program;
use crate::render::CommandOutput;
use crate::running_pods;

const EXAMPLES: &str = "\
Examples:
  # Show the filter of the leading hub
  kubectl krypton log-level hub

  # Set the level of the leading hub to debug for 10 minutes
  kubectl krypton log-level hub debug --for 10m

  # Log debug lines of an agent's reconciler for one hour
  kubectl krypton log-level agent info,krypton_reconciler=debug --for 1h --context edge-1";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LogLevel {
    /// Program whose filter to show or change. --hub-namespace names the namespace of the hub's pods, --namespace that of
    /// the agent's. By default, they are in krypton-system, else krypton, else that of the context
    #[arg(value_name = "PROGRAM")]
    of: Program,
    /// New filter: error, warn, info, debug, trace or off, or one of them for each target, as in
    /// info,krypton_reconciler::run_loop=debug. Without it, the command shows the current filter
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
    /// Duration of the change, as 90s, 10m or 2h: by default 15m, at most 24h; 0 lasts until the restart
    #[arg(long = "for", value_name = "DURATION", requires = "filter", value_parser = parse_duration)]
    lasts: Option<String>,
    /// All pods, not only the leader or the acting agent
    #[arg(long)]
    all: bool,
    /// Only this pod
    #[arg(long, value_name = "POD", conflicts_with = "all")]
    pod: Option<String>,
    /// Address of a debug port, instead of a cluster
    #[arg(long, hide = true, value_name = "HOST:PORT", value_parser = parse_loopback_address)]
    debug_address: Option<SocketAddr>,
}

/// Returns the duration of a change as the debug port accepts it. 0 lasts until the restart.
fn parse_duration(text: &str) -> Result<String, String> {
    Ok(match parse_filter_duration(text)? {
        Some(lasts) => format!("{}ms", lasts.as_millis()),
        None => "0".to_owned(),
    })
}

pub(crate) async fn run(
    args: LogLevel,
    target: &Target<'_>,
) -> Result<CommandOutput, KubectlError> {
    let path = match &args.lasts {
        Some(lasts) => format!("/debug/log?for={lasts}"),
        None => "/debug/log".to_owned(),
    };
    let filter = args.filter.as_deref();
    if let Some(address) = args.debug_address {
        let response = send(&DebugPort::Address(address), &path, filter).await?;
        return Ok(CommandOutput::stdout(response));
    }
    let namespace = args.of.named_namespace(&target.args)?;
    let cluster = target.connect().await?;
    let (namespace, pods) = running_pods::find(args.of, &cluster, namespace).await?;
    let selected = match (&args.pod, args.all) {
        (Some(name), _) => {
            let pod = pods.into_iter().find(|pod| pod.name == *name);
            let pods = cluster.namespaced::<Pod>(&namespace);
            vec![pod.ok_or_else(|| pods.not_found("running pod", name))?]
        }
        (None, true) => pods,
        (None, false) => vec![running_pods::active(args.of, pods, &cluster, &namespace).await?],
    };
    let mut output = CommandOutput::default();
    let mut first_error = None;
    for pod in selected {
        let port = pod.debug_port(&cluster);
        match send(&port, &path, filter).await {
            Ok(line) => output.stdout += &line,
            Err(error) => {
                first_error.get_or_insert(error);
            }
        }
    }
    match first_error {
        None => Ok(output),
        Some(error) => Err(error.with_output(output)),
    }
}

async fn send(
    port: &DebugPort<'_>,
    path: &str,
    filter: Option<&str>,
) -> Result<String, KubectlError> {
    let response = port.send(path, filter).await?;
    Ok(format!("{}: {}\n", port.name(), shortened(&response)))
}
