//! `kubectl krypton log-level`: shows the log filter of a hub or agent, or changes it temporarily, through the debug port.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use krypton_runtime::admin::filter_lasts;
use krypton_runtime::lease::{LEASE_NAME, SYSTEM_NAMESPACE};
use krypton_types::names::{HUB_LEASE, LEADER_LABEL, namespace_name};
use kube::core::ApiResource;
use serde_json::Value;

use crate::debug_port::{
    DebugPort, Program, Question, is_running, loopback, port_of, programs, shown,
};
use crate::error::KubectlError;
use crate::home::{Connection, Env, HomeArgs, connect, search};
use crate::objects::Scope;
use crate::render::{Printed, text_at};

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
    #[command(flatten)]
    home: HomeArgs,
}

/// Duration of a change; `None` lasts until the restart.
#[derive(Clone, Copy, Debug)]
struct Lasting(Option<Duration>);

fn lasting(text: &str) -> Result<Lasting, String> {
    filter_lasts(text).map(Lasting)
}

/// A running pod.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RunningPod {
    name: String,
    port: Option<u16>,
    /// Has the leader's label.
    leads: bool,
}

pub(crate) async fn run(args: LogLevel, env: Env<'_>) -> Result<Printed, KubectlError> {
    let question = question(args.filter.as_deref(), args.lasts);
    if let Some(address) = args.debug_address {
        let answer = answer(&DebugPort::Here(address), &question).await?;
        return Ok(Printed::stdout(answer));
    }
    let cluster = connect(&args.home, env).await?;
    let (namespace, pods) = find(&args, &cluster).await?;
    let chosen = match (&args.pod, args.all) {
        (Some(name), _) => {
            let one = pods.into_iter().find(|pod| pod.name == *name);
            let pods = cluster.namespaced::<Pod>(&namespace);
            vec![one.ok_or_else(|| pods.not_found("running pod", name))?]
        }
        (None, true) => pods,
        (None, false) => vec![active(args.of, pods, &cluster, &namespace).await?],
    };
    let mut printed = Printed::default();
    let mut failed = None;
    for pod in chosen {
        let port = DebugPort::Pod {
            cluster: &cluster,
            namespace: &namespace,
            name: &pod.name,
            port: pod.port,
        };
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

/// Returns the first namespace with running pods of the program, and these pods.
async fn find(
    args: &LogLevel,
    cluster: &Connection,
) -> Result<(String, Vec<RunningPod>), KubectlError> {
    let namespaces = cluster.hub_namespaces(args.namespace.as_deref());
    let look = async |namespace: &str| {
        let kind = ApiResource::erase::<Pod>(&());
        let pods = cluster.untyped(kind, &Scope::Namespace(namespace.to_owned()));
        let pods = pods.values(None).await?;
        let running: Vec<_> = pods.iter().filter_map(|it| running(it, args.of)).collect();
        Ok((!running.is_empty()).then_some(running))
    };
    search(&namespaces, look).await?.ok_or_else(|| {
        KubectlError::NotFound(format!(
            "no pod of the {} runs in {} on the cluster {:?}; name its namespace with -n, or its cluster with --context or --kubeconfig",
            args.of.name(),
            namespaces.join(" or "),
            cluster.context
        ))
    })
}

/// Returns the pod if it runs the program.
fn running(pod: &Value, program: Program) -> Option<RunningPod> {
    let runs = is_running(pod) && programs(pod).any(|found| found == program);
    let labels = pod.pointer("/metadata/labels");
    let label = labels.and_then(|labels| labels.get(LEADER_LABEL)?.as_str());
    let name = text_at(pod, "/metadata/name").filter(|_| runs)?;
    Some(RunningPod {
        name,
        port: port_of(pod, program),
        leads: label == Some("true"),
    })
}

/// Returns the leader or the acting agent. A single pod needs no further evidence.
async fn active(
    program: Program,
    mut pods: Vec<RunningPod>,
    cluster: &Connection,
    namespace: &str,
) -> Result<RunningPod, KubectlError> {
    let found = match (pods.len(), program) {
        (1, _) => Some(0),
        (_, Program::Hub) => {
            // Without the right to read the Lease, the label remains, which a dead hub may still have.
            let holder = holder(cluster, namespace, HUB_LEASE).await.ok().flatten();
            holder
                .and_then(|holder| held_by(program, &holder, &pods))
                .or_else(|| pods.iter().position(|pod| pod.leads))
        }
        (_, Program::Agent) => {
            let holder = holder(cluster, SYSTEM_NAMESPACE, LEASE_NAME).await?;
            holder.and_then(|holder| held_by(program, &holder, &pods))
        }
    };
    found.map(|at| pods.swap_remove(at)).ok_or_else(|| {
        let names: Vec<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
        let does = match program {
            Program::Hub => "is the leader",
            Program::Agent => "holds the Lease",
        };
        KubectlError::Refused(format!(
            "cannot determine which of the pods {} {does}; name one with --pod, or use --all",
            names.join(", ")
        ))
    })
}

/// Returns the holder of a Lease.
async fn holder(
    cluster: &Connection,
    namespace: &str,
    name: &str,
) -> Result<Option<String>, KubectlError> {
    let lease = cluster.namespaced::<Lease>(namespace).find(name).await?;
    Ok(lease.and_then(|lease| lease.spec?.holder_identity))
}

/// Returns the index of the pod that holds a Lease, as `hub/POD/…` or `agent/POD/…`.
fn held_by(program: Program, holder: &str, pods: &[RunningPod]) -> Option<usize> {
    let mut parts = holder.split('/');
    let pod = (parts.next() == Some(program.name())).then(|| parts.next())??;
    pods.iter().position(|running| running.name == pod)
}

#[cfg(test)]
mod tests {
    use krypton_runtime::lease::agent_holder;

    use super::*;

    #[test]
    fn lease_holder_is_matched_to_its_pod() {
        let pods = ["agent-0", "agent-1"].map(|name| RunningPod {
            name: name.to_owned(),
            port: None,
            leads: false,
        });
        let of = |program, holder: &str| held_by(program, holder, &pods);
        let held = agent_holder("agent-1", None, 7);
        assert_eq!(of(Program::Agent, &held), Some(1));
        assert_eq!(of(Program::Hub, &held), None);
        assert_eq!(of(Program::Hub, "hub/agent-0/00000007"), Some(0));
        assert_eq!(of(Program::Agent, &agent_holder("other", None, 7)), None);
        assert_eq!(of(Program::Agent, ""), None);
    }
}
