//! The programs of the fleet, and their pods.

use clap::ValueEnum;
use k8s_openapi::api::core::v1::Pod;
use kube::core::ApiResource;
use serde_json::Value;

use crate::error::KubectlError;
use crate::home::{Connection, TargetArgs};
use crate::objects::Scope;
use crate::render::{list_at, reason_and_message, text_at};

/// A program of the fleet. Each has a chart, and a debug port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Program {
    /// The hub, on the home cluster
    Hub,
    /// The agent, on the cluster of the context
    Agent,
}

impl Program {
    pub(crate) const ALL: [Self; 2] = [Self::Hub, Self::Agent];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Hub => "hub",
            Self::Agent => "agent",
        }
    }

    /// Name of its chart, of its Helm release, and of its container there.
    pub(crate) fn container(self) -> &'static str {
        match self {
            Self::Hub => "krypton-hub",
            Self::Agent => "krypton-agent",
        }
    }

    /// The flag that names its namespace.
    pub(crate) fn namespace_flag(self) -> &'static str {
        match self {
            Self::Hub => "--hub-namespace",
            Self::Agent => "--namespace",
        }
    }

    /// Its namespace, if the user named one. Fails if the flag is that of the other program.
    pub(crate) fn named_namespace(self, args: &TargetArgs) -> Result<Option<&str>, KubectlError> {
        let (named, other) = match self {
            Self::Hub => (&args.hub_namespace, &args.namespace),
            Self::Agent => (&args.namespace, &args.hub_namespace),
        };
        match other {
            None => Ok(named.as_deref()),
            Some(_) => Err(KubectlError::usage(format!(
                "name the namespace of the {} with {}",
                self.name(),
                self.namespace_flag()
            ))),
        }
    }

    /// File name of its state dump below `/debug/`.
    pub(crate) fn dump_file(self) -> &'static str {
        match self {
            Self::Hub => "fleet.json",
            Self::Agent => "agent.json",
        }
    }
}

fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    list_at(pod, "/spec/containers")
}

/// Returns the hub or agent in the pod's containers.
pub(crate) fn programs(pod: &Value) -> impl Iterator<Item = Program> {
    containers(pod).filter_map(|container| {
        let name = container.get("name")?.as_str()?;
        Program::ALL.into_iter().find(|it| it.container() == name)
    })
}

/// Returns the pods of the program in this namespace. Omits pods that have ended.
pub(crate) async fn pods_of(
    cluster: &Connection,
    namespace: &str,
    program: Program,
) -> Result<Vec<Value>, KubectlError> {
    let kind = ApiResource::erase::<Pod>(&());
    let pods = cluster.untyped(kind, &Scope::Namespace(namespace.to_owned()));
    let mut pods = pods.list_values().await?;
    let has_ended = |pod: &Value| {
        let phase = pod.pointer("/status/phase").and_then(Value::as_str);
        matches!(phase, Some("Failed" | "Succeeded"))
    };
    pods.retain(|pod| !has_ended(pod) && programs(pod).any(|other| other == program));
    Ok(pods)
}

/// Returns why a container waits, otherwise the first condition that is not met.
pub(crate) fn unready_cause(pod: &Value) -> Option<String> {
    let mut statuses = list_at(pod, "/status/containerStatuses");
    let waiting = statuses.find_map(|status| status.pointer("/state/waiting"));
    let mut conditions = list_at(pod, "/status/conditions");
    let cause = waiting.or_else(|| conditions.find(|it| it["status"] == "False"))?;
    let text = |pointer| text_at(cause, pointer).unwrap_or_default();
    Some(reason_and_message(&text("/reason"), &text("/message")))
}

pub(crate) fn image_of(pod: &Value, program: Program) -> Option<&str> {
    let container = containers(pod).find(|it| it["name"] == program.container());
    container?.get("image")?.as_str()
}

/// Returns the value of the program's flag in the pod, otherwise that of the environment variable.
pub(crate) fn setting<'a>(
    pod: &'a Value,
    program: Program,
    (flag, variable): (&str, &str),
) -> Option<&'a str> {
    let container = containers(pod).find(|it| it["name"] == program.container())?;
    let array = move |key: &str| container.get(key).and_then(Value::as_array);
    let args = ["command", "args"].into_iter().filter_map(array).flatten();
    let mut args = args.filter_map(Value::as_str);
    let mut value = None;
    while let Some(arg) = args.next() {
        match arg.strip_prefix(flag) {
            Some("") => value = args.next(),
            Some(rest) => value = rest.strip_prefix('=').or(value),
            None => {}
        }
    }
    let from_variable = || {
        let variable = array("env")?.iter().find(|it| it["name"] == variable);
        variable?.get("value")?.as_str()
    };
    value.or_else(from_variable)
}

/// Returns whether the pod has a running process.
pub(crate) fn is_running(pod: &Value) -> bool {
    pod.pointer("/status/phase").and_then(Value::as_str) == Some("Running")
        && pod.pointer("/metadata/deletionTimestamp").is_none()
}
