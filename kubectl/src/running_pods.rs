//! The pods of hub and agent, and which of them is the leader or acts.

use k8s_openapi::api::coordination::v1::Lease;
use krypton_runtime::lease::{LEASE_NAME, SYSTEM_NAMESPACE};
use krypton_types::names::{HUB_LEASE, LEADER_LABEL};
use serde_json::Value;

use crate::debug_port::{DebugPort, port_of};
use crate::error::KubectlError;
use crate::home::{Connection, search};
use crate::program::{Program, is_running, pods_of};
use crate::render::text_at;

/// A hub or agent in its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProgramPod {
    pub(crate) program: Program,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) is_running: bool,
    port: Option<u16>,
    /// Has the leader's label.
    is_leader: bool,
}

impl ProgramPod {
    pub(crate) fn new(pod: &Value, program: Program, namespace: &str) -> Self {
        let labels = pod.pointer("/metadata/labels");
        let label = labels.and_then(|labels| labels.get(LEADER_LABEL)?.as_str());
        Self {
            program,
            namespace: namespace.to_owned(),
            name: text_at(pod, "/metadata/name").unwrap_or_default(),
            is_running: is_running(pod),
            port: port_of(pod, program),
            is_leader: label == Some("true"),
        }
    }

    pub(crate) fn debug_port<'a>(&'a self, cluster: &'a Connection) -> DebugPort<'a> {
        DebugPort::Pod {
            cluster,
            namespace: &self.namespace,
            name: &self.name,
            port: self.port,
        }
    }
}

/// Returns the first namespace with running pods of the program, and these pods.
pub(crate) async fn find(
    program: Program,
    cluster: &Connection,
    namespace: Option<&str>,
) -> Result<(String, Vec<ProgramPod>), KubectlError> {
    let namespaces = cluster.program_namespaces(namespace);
    let read = async |namespace: &str| {
        let pods = pods_of(cluster, namespace, program).await?;
        let pods = pods.iter();
        let pods = pods.map(|pod| ProgramPod::new(pod, program, namespace));
        let running: Vec<_> = pods.filter(|pod| pod.is_running).collect();
        Ok((!running.is_empty()).then_some(running))
    };
    search(&namespaces, read).await?.ok_or_else(|| {
        KubectlError::NotFound(format!(
            "no pod of the {} runs in {} on the cluster {:?}; name its namespace with {}, or its cluster with --context or --kubeconfig",
            program.name(),
            namespaces.join(" or "),
            cluster.context,
            program.namespace_flag()
        ))
    })
}

/// Returns the leader or the acting agent. A single pod needs no further evidence.
pub(crate) async fn active(
    program: Program,
    mut pods: Vec<ProgramPod>,
    cluster: &Connection,
    namespace: &str,
) -> Result<ProgramPod, KubectlError> {
    let index = match (pods.len(), program) {
        (1, _) => Some(0),
        (_, Program::Hub) => {
            // Without the right to read the Lease, the label remains, which a dead hub may still have.
            let holder = holder(cluster, namespace, HUB_LEASE).await.ok().flatten();
            holder
                .and_then(|holder| holder_index(program, &holder, &pods))
                .or_else(|| pods.iter().position(|pod| pod.is_leader))
        }
        (_, Program::Agent) => {
            let holder = holder(cluster, SYSTEM_NAMESPACE, LEASE_NAME).await?;
            holder.and_then(|holder| holder_index(program, &holder, &pods))
        }
    };
    index.map(|index| pods.swap_remove(index)).ok_or_else(|| {
        let names: Vec<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
        let role = match program {
            Program::Hub => "is the leader",
            Program::Agent => "holds the Lease",
        };
        KubectlError::Refused(format!(
            "cannot determine which of the pods {} {role}; one of them should soon, so retry; log-level also accepts --pod and --all",
            names.join(", ")
        ))
    })
}

async fn holder(
    cluster: &Connection,
    namespace: &str,
    name: &str,
) -> Result<Option<String>, KubectlError> {
    let lease = cluster.namespaced::<Lease>(namespace).find(name).await?;
    Ok(lease.and_then(|lease| lease.spec?.holder_identity))
}

/// Returns the index of the pod that holds a Lease, as `hub/POD/…` or `agent/POD/…`.
fn holder_index(program: Program, holder: &str, pods: &[ProgramPod]) -> Option<usize> {
    let mut parts = holder.split('/');
    let pod = (parts.next() == Some(program.name())).then(|| parts.next())??;
    pods.iter().position(|candidate| candidate.name == pod)
}

#[cfg(test)]
mod tests {
    use krypton_runtime::lease::agent_holder;
    use serde_json::json;

    use super::*;

    #[test]
    fn lease_holder_is_matched_to_its_pod() {
        let pods = ["agent-0", "agent-1"].map(|name| {
            let pod = json!({"metadata": {"name": name}});
            ProgramPod::new(&pod, Program::Agent, SYSTEM_NAMESPACE)
        });
        let index = |program, holder: &str| holder_index(program, holder, &pods);
        let holder = agent_holder("agent-1", None, 7);
        assert_eq!(index(Program::Agent, &holder), Some(1));
        assert_eq!(index(Program::Hub, &holder), None);
        assert_eq!(index(Program::Hub, "hub/agent-0/00000007"), Some(0));
        assert_eq!(index(Program::Agent, &agent_holder("other", None, 7)), None);
        assert_eq!(index(Program::Agent, ""), None);
    }
}
