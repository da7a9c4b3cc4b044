//! `kubectl krypton log-level`: what a hub or agent logs, shown or changed for a while, by its debug port.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use krypton_runtime::admin::filter_lasts;
use krypton_runtime::lease::{LEASE_NAME, SYSTEM_NAMESPACE};
use krypton_types::names::{HUB_LEASE, LEADER_LABEL, namespace_name};
use kube::Api;
use kube::core::ApiResource;
use serde_json::Value;

use super::join;
use crate::debug_port::{DebugPort, Program, Question, is_running, loopback, port_of, shown};
use crate::error::{KubectlError, call_failed};
use crate::home::{Connection, HomeArgs, Place, connect, list};
use crate::render::{Printed, text_at};

#[derive(Clone, Debug, Args)]
pub(crate) struct LogLevel {
    of: Program,
    /// What is to be logged: error, warn, info, debug, trace or off, or these by target, as
    /// info,krypton_reconciler::run_loop=debug. Without it, what is logged now is shown.
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
    /// For how long, as 90s, 10m or 2h: 15m by default, 24h at most; 0 is until the restart.
    #[arg(long = "for", value_name = "DURATION", requires = "filter", value_parser = lasting)]
    lasts: Option<Lasting>,
    /// All pods of it, not only the one that leads or acts.
    #[arg(long)]
    all: bool,
    /// This pod alone.
    #[arg(long, value_name = "POD", conflicts_with = "all")]
    pod: Option<String>,
    /// Namespace of the pods; by default krypton-system, else krypton, else that of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    /// Ask here, and no cluster.
    #[arg(long, hide = true, value_name = "HOST:PORT", value_parser = loopback)]
    debug_address: Option<SocketAddr>,
    #[command(flatten)]
    home: HomeArgs,
}

/// For how long; `None` is until the restart.
#[derive(Clone, Copy, Debug)]
struct Lasting(Option<Duration>);

fn lasting(text: &str) -> Result<Lasting, String> {
    filter_lasts(text).map(Lasting)
}

/// A pod that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    name: String,
    port: Option<u16>,
    /// Labelled as the one that leads.
    leads: bool,
}

pub(crate) async fn run(
    args: LogLevel,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Printed, KubectlError> {
    let question = question(args.filter.as_deref(), args.lasts);
    let mut printed = Printed::default();
    if let Some(address) = args.debug_address {
        printed.stdout = told(&DebugPort::Here(address), &question).await?;
        return Ok(printed);
    }
    let cluster = connect(&args.home, env).await?;
    let (namespace, pods) = find(&args, &cluster).await?;
    let chosen = match (&args.pod, args.all) {
        (Some(name), _) => {
            let one = pods.into_iter().find(|pod| pod.name == *name);
            vec![one.ok_or_else(|| {
                cluster.not_found("running pod", name, &Place::Namespace(namespace.clone()))
            })?]
        }
        (None, true) => pods,
        (None, false) => vec![first(args.of, pods, &cluster, &namespace).await?],
    };
    let mut failed = None;
    for pod in chosen {
        let port = DebugPort::Pod {
            cluster: &cluster,
            namespace: &namespace,
            name: &pod.name,
            port: pod.port,
        };
        match told(&port, &question).await {
            Ok(line) => printed.stdout += &line,
            Err(error) => {
                failed.get_or_insert(error);
            }
        }
    }
    match failed {
        None => Ok(printed),
        Some(error) if printed.stdout.is_empty() => Err(error),
        Some(error) => {
            let error = Box::new(error);
            Err(KubectlError::Partly { printed, error })
        }
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

async fn told(port: &DebugPort<'_>, question: &Question) -> Result<String, KubectlError> {
    let answer = port.ask(question).await?;
    Ok(format!("{}: {}\n", port.whose(), shown(&answer)))
}

/// The first namespace with running pods of it, and these.
async fn find(args: &LogLevel, cluster: &Connection) -> Result<(String, Vec<Seen>), KubectlError> {
    let kind = ApiResource::erase::<Pod>(&());
    let places = join::places(args.namespace.as_deref(), &cluster.namespace);
    let mut refused = None;
    for namespace in &places {
        let place = Place::Namespace(namespace.clone());
        let client = cluster.client.clone();
        match list(client, &kind, &place, None, &cluster.context).await {
            Ok(pods) => {
                let seen: Vec<Seen> = pods.iter().filter_map(|pod| seen(pod, args.of)).collect();
                if !seen.is_empty() {
                    return Ok((namespace.clone(), seen));
                }
            }
            // It may be in the next one.
            Err(error @ KubectlError::Forbidden { .. }) => {
                refused.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    Err(refused.unwrap_or_else(|| KubectlError::NoPod {
        context: cluster.context.clone(),
        program: args.of.name(),
        place: format!("in {}", places.join(" or ")),
    }))
}

/// The pod, if it is one of these and runs.
fn seen(pod: &Value, program: Program) -> Option<Seen> {
    let containers = pod.pointer("/spec/containers")?.as_array()?;
    let mut names = containers.iter().filter_map(|it| it.get("name")?.as_str());
    let ours = names.any(|name| Program::of(name) == Some(program));
    let labels = pod.pointer("/metadata/labels");
    let label = labels.and_then(|labels| labels.get(LEADER_LABEL)?.as_str());
    (ours && is_running(pod)).then(|| {
        Some(Seen {
            name: text_at(pod, "/metadata/name")?,
            port: port_of(pod, program.container()),
            leads: label == Some("true"),
        })
    })?
}

/// The one that leads or acts: of a single one, it.
async fn first(
    program: Program,
    mut pods: Vec<Seen>,
    cluster: &Connection,
    namespace: &str,
) -> Result<Seen, KubectlError> {
    let found = match (pods.len(), program) {
        (1, _) => Some(0),
        (_, Program::Hub) => {
            // Who may not read it has the label left, which a hub that died may still have.
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
        let what = match program {
            Program::Hub => "leads",
            Program::Agent => "acts",
        };
        let why = format!(
            "none of the pods {} is known to be the one that {what} now; name one with --pod, or take --all",
            names.join(", ")
        );
        KubectlError::Refused { why }
    })
}

/// Who holds a Lease.
async fn holder(
    cluster: &Connection,
    namespace: &str,
    name: &str,
) -> Result<Option<String>, KubectlError> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), namespace);
    let lease = cluster.in_time(leases.get_opt(name)).await?;
    let lease = lease.map_err(|error| {
        let kind = ApiResource::erase::<Lease>(&());
        let place = Place::Namespace(namespace.to_owned());
        call_failed(error, "get", &kind, &place, &cluster.context)
    })?;
    Ok(lease.and_then(|lease| lease.spec?.holder_identity))
}

/// Which pod it is that holds a Lease, as `hub/POD/…` or `agent/POD/…`.
fn held_by(program: Program, holder: &str, pods: &[Seen]) -> Option<usize> {
    let mut parts = holder.split('/');
    let pod = (parts.next() == Some(program.name())).then(|| parts.next())??;
    pods.iter().position(|seen| seen.name == pod)
}

#[cfg(test)]
mod tests {
    use krypton_runtime::lease::agent_holder;

    use super::*;

    #[test]
    fn lease_holder_is_matched_to_its_pod() {
        let pods = ["agent-0", "agent-1"].map(|name| Seen {
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
