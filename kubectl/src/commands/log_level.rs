//! `kubectl krypton log-level`: shows the log filter of a hub or agent, or changes it temporarily, through the debug port.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use krypton_runtime::admin::filter_lasts;
use krypton_types::names::namespace_name;

use crate::debug_port::{DebugPort, Question, loopback, shown};
use crate::error::KubectlError;
use crate::home::Target;
use crate::program::Program;
use crate::render::Printed;
use crate::running_pods;

#[derive(Clone, Debug, Args)]
pub(crate) struct LogLevel {
    of: Program,
    /// New filter: error, warn, info, debug, trace or off, or one of them for each target, as in
    /// info,krypton_reconciler::run_loop=debug. Without it, the command shows the current filter
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
    /// Duration of the change, as 90s, 10m or 2h: by default 15m, at most 24h; 0 lasts until the restart
    #[arg(long = "for", value_name = "DURATION", requires = "filter", value_parser = lasting)]
    lasts: Option<Lasting>,
    /// All pods, not only the leader or the acting agent
    #[arg(long)]
    all: bool,
    /// Only this pod
    #[arg(long, value_name = "POD", conflicts_with = "all")]
    pod: Option<String>,
    /// Namespace of the pods; by default krypton-system, else krypton, else that of the context
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    /// Address of a debug port, instead of a cluster
    #[arg(long, hide = true, value_name = "HOST:PORT", value_parser = loopback)]
    debug_address: Option<SocketAddr>,
}

/// Duration of a change; `None` lasts until the restart.
#[derive(Clone, Copy, Debug)]
struct Lasting(Option<Duration>);

fn lasting(text: &str) -> Result<Lasting, String> {
    filter_lasts(text).map(Lasting)
}

pub(crate) async fn run(args: LogLevel, target: &Target<'_>) -> Result<Printed, KubectlError> {
    let question = question(args.filter.as_deref(), args.lasts);
    if let Some(address) = args.debug_address {
        let answer = answer(&DebugPort::Here(address), &question).await?;
        return Ok(Printed::stdout(answer));
    }
    let cluster = target.connect().await?;
    let (namespace, pods) =
        running_pods::find(args.of, &cluster, args.namespace.as_deref()).await?;
    let chosen = match (&args.pod, args.all) {
        (Some(name), _) => {
            let one = pods.into_iter().find(|pod| pod.name == *name);
            let pods = cluster.namespaced::<Pod>(&namespace);
            vec![one.ok_or_else(|| pods.not_found("running pod", name))?]
        }
        (None, true) => pods,
        (None, false) => vec![running_pods::active(args.of, pods, &cluster, &namespace).await?],
    };
    let mut printed = Printed::default();
    let mut failed = None;
    for pod in chosen {
        let port = pod.debug_port(&cluster, &namespace);
        match answer(&port, &question).await {
            Ok(line) => printed.stdout += &line,
            Err(error) => {
                failed.get_or_insert(error);
            }
        }
    }
    match failed {
        None => Ok(printed),
        Some(error) => Err(error.after(printed)),
    }
}

fn question(filter: Option<&str>, lasts: Option<Lasting>) -> Question {
    let path = "/debug/log";
    let Some(filter) = filter else {
        return Question::get(path);
    };
    let path = match lasts {
        None => path.to_owned(),
        Some(Lasting(None)) => format!("{path}?for=0"),
        Some(Lasting(Some(lasts))) => format!("{path}?for={}ms", lasts.as_millis()),
    };
    Question::put(path, filter)
}

async fn answer(port: &DebugPort<'_>, question: &Question) -> Result<String, KubectlError> {
    let answer = port.ask(question).await?;
    Ok(format!("{}: {}\n", port.name(), shown(&answer)))
}
