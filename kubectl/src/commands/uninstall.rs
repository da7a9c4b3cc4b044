//! `kubectl krypton uninstall hub|agent`: removes the hub or an agent, and lists what stays.

use std::time::Duration;

use clap::Args;
use k8s_openapi::api::apps::v1::Deployment;
use krypton_types::names::namespace_name;
use kube::api::{DynamicObject, ListParams};
use kube::core::ApiResource;
use serde_json::{Value, json};

use crate::error::KubectlError;
use crate::helm::{ChartRelease, HelmArgs};
use crate::home::{Connection, Target};
use crate::kind::Kind;
use crate::objects::{Objects, Scope, poll};
use crate::program::{Program, pods_of};
use crate::render::CommandOutput;

const INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, Args)]
pub(crate) struct Uninstall {
    /// The program to uninstall. Tenants, their releases and the CRDs stay
    program: Program,
    /// Namespace; by default krypton for the hub, and krypton-system for the agent
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    #[command(flatten)]
    helm: HelmArgs,
}

pub(crate) async fn run(
    args: Uninstall,
    target: &Target<'_>,
) -> Result<CommandOutput, KubectlError> {
    let cluster = target.connect().await?;
    let program = args.program;
    let namespace = args.namespace.as_deref();
    let namespace = namespace.unwrap_or(program.default_namespace());
    let release = ChartRelease {
        program,
        namespace,
        cluster: &target.args,
        helm: &args.helm,
    };
    release.exists().await?;
    let pods = ProgramPods::new(&cluster, namespace, program);
    let replicas = pods.stop(args.helm.timeout).await?;
    let output = match release.uninstall().await {
        Ok(output) => output,
        Err(error) => {
            pods.set_replicas(replicas).await?;
            return Err(error);
        }
    };
    let mut objects = Vec::new();
    for kind in Kind::ALL {
        objects.extend(count_objects(&cluster, kind).await);
    }
    Ok(CommandOutput {
        stdout: output,
        stderr: remaining_note(program, namespace, &cluster.context, &objects),
    })
}

/// The pods of the program's Deployment.
struct ProgramPods<'a> {
    cluster: &'a Connection,
    deployments: Objects<DynamicObject>,
    namespace: &'a str,
    program: Program,
}

impl<'a> ProgramPods<'a> {
    fn new(cluster: &'a Connection, namespace: &'a str, program: Program) -> Self {
        let kind = ApiResource::erase::<Deployment>(&());
        Self {
            cluster,
            deployments: cluster.untyped(kind, &Scope::Namespace(namespace.to_owned())),
            namespace,
            program,
        }
    }

    /// Sets the number of pods. Returns the earlier one.
    async fn set_replicas(&self, replicas: i64) -> Result<i64, KubectlError> {
        let decide = |deployment: &DynamicObject| {
            let previous = deployment.data.pointer("/spec/replicas");
            let patch = json!({"spec": {"replicas": replicas}});
            (Some(patch), previous.and_then(Value::as_i64).unwrap_or(1))
        };
        let name = self.program.container();
        let (_, previous) = self.deployments.change(name, decide).await?;
        Ok(previous)
    }

    /// Ends all pods while they still have their rights: an agent lets Helm finish, and both release their Lease.
    /// Returns the earlier number of pods, which remains if they do not end.
    async fn stop(&self, deadline: Duration) -> Result<i64, KubectlError> {
        let previous = self.set_replicas(0).await?;
        let check = async || {
            let pods = pods_of(self.cluster, self.namespace, self.program).await?;
            Ok(pods.is_empty().then_some(()))
        };
        if poll((INTERVAL, deadline), check).await?.is_none() {
            self.set_replicas(previous).await?;
            return Err(KubectlError::NoResponse(format!(
                "the pods of the {} in the namespace {} did not end within {} s; they run again, and nothing was uninstalled",
                self.program.name(),
                self.namespace,
                deadline.as_secs()
            )));
        }
        Ok(previous)
    }
}

/// Formats the number of objects. `None` if the cluster does not have the kind, or the user may not list it.
async fn count_objects(cluster: &Connection, kind: Kind) -> Option<String> {
    let objects = cluster.untyped(kind.resource(), &Scope::All);
    let params = ListParams::default().limit(1);
    let list = objects.call("list", "", objects.api.list_metadata(&params));
    let list = list.await.ok()?;
    // The API server counts the rest.
    let rest = list.metadata.remaining_item_count.unwrap_or_default();
    let count = rest.saturating_add(i64::try_from(list.items.len()).unwrap_or_default());
    Some(format!("{count} {}", objects.kind.plural))
}

/// Describes what is left, and how to remove it.
fn remaining_note(program: Program, namespace: &str, context: &str, objects: &[String]) -> String {
    let objects = match objects {
        [] => String::new(),
        objects => format!(" with {}", objects.join(", ")),
    };
    let secret_note = match program {
        Program::Hub => format!(
            "- Secret {namespace}/krypton-hub-ca, which all agents trust: a new hub in this namespace uses it again"
        ),
        Program::Agent => format!(
            "- Secret {namespace}/krypton-agent-identity: a new agent in this namespace is the same member of the fleet, until you run 'kubectl krypton leave' on the home cluster"
        ),
    };
    format!(
        "These stay on the cluster {context:?}:\n- the CRDs{objects}\n- the Helm releases of all Tenants\n{secret_note}\n\
         To remove them too, see docs/how-to/uninstall.md#uninstall-the-releases-too\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_objects_are_listed_for_each_program() {
        let text = remaining_note(Program::Hub, "krypton", "home", &["2 tenants".to_owned()]);
        assert!(text.contains("- the CRDs with 2 tenants\n"), "{text}");
        assert!(text.contains("Secret krypton/krypton-hub-ca"), "{text}");
        let text = remaining_note(Program::Agent, "krypton-system", "edge-1", &[]);
        assert!(text.contains("on the cluster \"edge-1\""), "{text}");
        assert!(text.contains("- the CRDs\n"), "{text}");
    }
}
