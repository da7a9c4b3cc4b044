//! `kubectl krypton uninstall hub|agent`: removes the hub or an agent, and lists what stays.

use std::time::Duration;

use clap::Args;
use k8s_openapi::api::apps::v1::Deployment;
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::join_info::NAME as JOIN_CONFIG_MAP;
use krypton_types::names::{CHART_CONFIG_MAP, EPOCH_CONFIG_MAP, MEMBERS_CONFIG_MAP};
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
use crate::statement::docs_url;

const INTERVAL: Duration = Duration::from_secs(1);
/// How to remove what stays.
pub(crate) const RELEASES_DOCS: &str = "how-to/uninstall.md#uninstall-the-releases-too";

#[derive(Clone, Debug, Args)]
pub(crate) struct Uninstall {
    /// The program to uninstall. Its namespace is by default krypton for the hub (--hub-namespace), and krypton-system for
    /// the agent (--namespace). Tenants, their releases and the CRDs stay
    program: Program,
    #[command(flatten)]
    helm: HelmArgs,
}

pub(crate) async fn run(
    args: Uninstall,
    target: &Target<'_>,
) -> Result<CommandOutput, KubectlError> {
    let program = args.program;
    let namespace = program.named_namespace(&target.args)?;
    let namespace = namespace.unwrap_or(program.default_namespace());
    let cluster = target.connect().await?;
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
            "- Secret {namespace}/krypton-hub-ca, which all agents trust: a new hub in this namespace uses it again\n\
             - the hub's records in ConfigMaps of the namespace {namespace}: {CHART_CONFIG_MAP}, {EPOCH_CONFIG_MAP}, \
             {JOIN_CONFIG_MAP} and {MEMBERS_CONFIG_MAP}"
        ),
        Program::Agent => format!(
            "- Secret {namespace}/krypton-agent-identity: a new agent in this namespace is the same member of the fleet, until you run 'kubectl krypton leave' on the home cluster"
        ),
    };
    let namespaces = match namespace {
        SYSTEM_NAMESPACE => "the namespace".to_owned(),
        other => format!("the namespaces {other} and"),
    };
    format!(
        "These stay on the cluster {context:?}:\n- the CRDs{objects}\n- the Helm releases of all Tenants\n\
         - {namespaces} {SYSTEM_NAMESPACE}, with the records of this cluster as a member: Secret krypton-desired-state, \
         and Secrets krypton-release-… of the releases\n{secret_note}\n\
         To remove them too, see {}\n",
        docs_url(RELEASES_DOCS)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_objects_are_listed_for_each_program() {
        let text = remaining_note(Program::Hub, "krypton", "home", &["2 tenants".to_owned()]);
        for kept in [
            "- the CRDs with 2 tenants\n",
            "- the namespaces krypton and krypton-system, with",
            "Secret krypton/krypton-hub-ca",
            "namespace krypton: krypton-hub-chart, krypton-hub-epoch",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        let text = remaining_note(Program::Agent, "krypton-system", "edge-1", &[]);
        assert!(text.contains("on the cluster \"edge-1\""), "{text}");
        assert!(text.contains("- the CRDs\n"), "{text}");
        assert!(
            text.contains("- the namespace krypton-system, with"),
            "{text}"
        );
    }
}
