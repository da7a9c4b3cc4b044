//! `kubectl krypton uninstall hub|agent`: removes the hub or an agent, and lists what stays.

use std::time::Duration;

use clap::Args;
use k8s_openapi::api::apps::v1::Deployment;
use krypton_types::names::namespace_name;
use kube::api::{DynamicObject, ListParams};
use kube::core::ApiResource;
use serde_json::{Value, json};

use crate::error::KubectlError;
use crate::helm::{HelmArgs, Release};
use crate::home::{Connection, Target};
use crate::kind::Kind;
use crate::objects::{Objects, Scope, poll};
use crate::program::{Program, pods_of};
use crate::render::Printed;

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

pub(crate) async fn run(args: Uninstall, target: &Target<'_>) -> Result<Printed, KubectlError> {
    let cluster = target.connect().await?;
    let program = args.program;
    let namespace = args.namespace.as_deref();
    let namespace = namespace.unwrap_or(program.usual_namespace());
    let release = Release {
        program,
        namespace,
        cluster: &target.args,
        helm: &args.helm,
    };
    release.exists().await?;
    let pods = Pods::of(&cluster, namespace, program);
    let replicas = pods.stop(args.helm.timeout).await?;
    let output = match release.uninstall().await {
        Ok(output) => output,
        Err(error) => {
            pods.scale(replicas).await?;
            return Err(error);
        }
    };
    let mut objects = Vec::new();
    for kind in Kind::ALL {
        objects.extend(count(&cluster, kind).await);
    }
    Ok(Printed {
        stdout: output,
        stderr: stays(program, namespace, &cluster.context, &objects),
    })
}

/// The pods of the program's Deployment.
struct Pods<'a> {
    cluster: &'a Connection,
    deployments: Objects<DynamicObject>,
    namespace: &'a str,
    program: Program,
}

impl<'a> Pods<'a> {
    fn of(cluster: &'a Connection, namespace: &'a str, program: Program) -> Self {
        let kind = ApiResource::erase::<Deployment>(&());
        Self {
            cluster,
            deployments: cluster.untyped(kind, &Scope::Namespace(namespace.to_owned())),
            namespace,
            program,
        }
    }

    /// Sets the number of pods. Returns the earlier one.
    async fn scale(&self, replicas: i64) -> Result<i64, KubectlError> {
        let decide = |found: &DynamicObject| {
            let before = found.data.pointer("/spec/replicas");
            let patch = json!({"spec": {"replicas": replicas}});
            (Some(patch), before.and_then(Value::as_i64).unwrap_or(1))
        };
        let name = self.program.container();
        let (_, before) = self.deployments.change(name, decide).await?;
        Ok(before)
    }

    /// Ends all pods while they still have their rights: an agent lets Helm finish, and both release their Lease.
    /// Returns the earlier number of pods, which remains if they do not end.
    async fn stop(&self, deadline: Duration) -> Result<i64, KubectlError> {
        let before = self.scale(0).await?;
        let look = async || {
            let pods = pods_of(self.cluster, self.namespace, self.program).await?;
            Ok(pods.is_empty().then_some(()))
        };
        if poll((INTERVAL, deadline), look).await?.is_none() {
            self.scale(before).await?;
            return Err(KubectlError::NoAnswer(format!(
                "the pods of the {} in the namespace {} did not end within {} s; they run again, and nothing was uninstalled",
                self.program.name(),
                self.namespace,
                deadline.as_secs()
            )));
        }
        Ok(before)
    }
}

/// Formats the number of objects. `None` if the cluster does not have the kind, or the user may not list it.
async fn count(cluster: &Connection, kind: Kind) -> Option<String> {
    let objects = cluster.untyped(kind.resource(), &Scope::All);
    let one = ListParams::default().limit(1);
    let found = objects.call("list", "", objects.api.list_metadata(&one));
    let found = found.await.ok()?;
    // The API server counts the rest.
    let rest = found.metadata.remaining_item_count.unwrap_or_default();
    let count = rest.saturating_add(i64::try_from(found.items.len()).unwrap_or_default());
    Some(format!("{count} {}", objects.kind.plural))
}

/// Describes what is left, and how to remove it.
fn stays(program: Program, namespace: &str, context: &str, objects: &[String]) -> String {
    let objects = match objects {
        [] => String::new(),
        objects => format!(" with {}", objects.join(", ")),
    };
    let own = match program {
        Program::Hub => format!(
            "- Secret {namespace}/krypton-hub-ca, which all agents trust: a new hub in this namespace uses it again"
        ),
        Program::Agent => format!(
            "- Secret {namespace}/krypton-agent-identity: a new agent in this namespace is the same member of the fleet, until you run 'kubectl krypton leave' on the home cluster"
        ),
    };
    format!(
        "These stay on the cluster {context:?}:\n- the CRDs{objects}\n- the Helm releases of all Tenants\n{own}\n\
         To remove them too, see docs/how-to/uninstall.md#uninstall-the-releases-too\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_objects_are_listed_for_each_program() {
        let text = stays(Program::Hub, "krypton", "home", &["2 tenants".to_owned()]);
        assert!(text.contains("- the CRDs with 2 tenants\n"), "{text}");
        assert!(text.contains("Secret krypton/krypton-hub-ca"), "{text}");
        let text = stays(Program::Agent, "krypton-system", "edge-1", &[]);
        assert!(text.contains("on the cluster \"edge-1\""), "{text}");
        assert!(text.contains("- the CRDs\n"), "{text}");
    }
}
