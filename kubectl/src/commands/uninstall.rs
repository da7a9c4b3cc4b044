//! `kubectl krypton uninstall hub|agent`: removes the hub or an agent, and lists what stays.

use std::time::Duration;

use clap::Args;
use k8s_openapi::api::apps::v1::Deployment;
use krypton_runtime::lease::{LEASE_NAME, SYSTEM_NAMESPACE};
use krypton_types::join_info::NAME as JOIN_CONFIG_MAP;
use krypton_types::join_token::NAME_PREFIX as JOIN_TOKEN_PREFIX;
use krypton_types::names::{
    CA_SECRET, CHART_CONFIG_MAP, EPOCH_CONFIG_MAP, HUB_LEASE, MEMBERS_CONFIG_MAP,
};
use kube::api::{DynamicObject, ListParams};
use kube::core::ApiResource;
use serde_json::{Value, json};

use crate::error::KubectlError;
use crate::helm::HelmArgs;
use crate::home::{Connection, Target};
use crate::kind::Kind;
use crate::objects::{Objects, Scope, poll_patiently};
use crate::program::{Program, pods_of};
use crate::render::{CommandOutput, text_at};
use crate::statement::docs_url;

const INTERVAL: Duration = Duration::from_secs(1);
/// Label with the name of the release.
const INSTANCE_LABEL: &str = "app.kubernetes.io/instance";
/// How to remove what stays.
const RELEASES_DOCS: &str = "how-to/uninstall.md#uninstall-the-releases-too";
const EXAMPLES: &str = "\
Examples:
  # Uninstall the agent of this cluster
  kubectl krypton uninstall agent

  # Uninstall the hub
  kubectl krypton uninstall hub";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Uninstall {
    /// The program to uninstall. Without --hub-namespace (hub) or --namespace (agent), the command searches krypton,
    /// krypton-system and the namespace of the context. Tenants, their releases and the CRDs stay
    program: Program,
    #[command(flatten)]
    helm: HelmArgs,
}

pub(crate) async fn run(
    args: Uninstall,
    target: &Target<'_>,
) -> Result<CommandOutput, KubectlError> {
    let program = args.program;
    let named = program.named_namespace(&target.args)?;
    let cluster = target.connect().await?;
    let namespace = find_release(&args, named, target, &cluster).await?;
    let namespace = namespace.as_str();
    let release = args.helm.release(program, namespace, &target.args);
    let scope = Scope::Namespace(namespace.to_owned());
    let deployments = cluster.untyped(ApiResource::erase::<Deployment>(&()), &scope);
    let stopped = stop(&args, &cluster, namespace, &deployments).await?;
    let output = match release.uninstall().await {
        Ok(output) => output,
        Err(error) => {
            if let Some((deployment, replicas)) = &stopped {
                set_replicas(&deployments, deployment, *replicas).await?;
            }
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

/// Returns the namespace of the release: the one that the user named, or the first of the usual ones that has it.
async fn find_release(
    args: &Uninstall,
    named: Option<&str>,
    target: &Target<'_>,
    cluster: &Connection,
) -> Result<String, KubectlError> {
    let program = args.program;
    let mut namespaces = cluster.program_namespaces(named);
    // The default one comes first, because the user may have no rights in the others.
    namespaces.sort_by_key(|namespace| namespace.as_str() != program.default_namespace());
    for namespace in &namespaces {
        let release = args.helm.release(program, namespace, &target.args);
        if release.is_installed().await? {
            return Ok(namespace.clone());
        }
    }
    Err(KubectlError::NotFound(format!(
        "there is no Helm release {} in the namespace {} on the cluster {:?}; name its namespace with {}, or its cluster with --context or --kubeconfig",
        program.container(),
        namespaces.join(" or "),
        cluster.context,
        program.namespace_flag()
    )))
}

/// Ends all pods of the release's Deployment while they still have their rights: an agent lets Helm finish, and both
/// release their Lease. Returns the Deployment and its earlier number of pods, which remains if they do not end. `None`
/// without a Deployment, as for a release with `installMode.crdsRbacOnly`.
async fn stop(
    args: &Uninstall,
    cluster: &Connection,
    namespace: &str,
    deployments: &Objects<DynamicObject>,
) -> Result<Option<(String, i64)>, KubectlError> {
    let (program, deadline) = (args.program, args.helm.timeout);
    // The name depends on the values.
    let label = format!("{INSTANCE_LABEL}={}", program.container());
    let found = deployments.list_selected(None, Some(&label)).await?;
    let mut found = found.iter();
    let Some(deployment) = found.find_map(|it| text_at(it, "/metadata/name")) else {
        return Ok(None);
    };
    let previous = set_replicas(deployments, &deployment, 0).await?;
    let check = async || {
        let pods = pods_of(cluster, namespace, program).await?;
        Ok(pods.is_empty().then_some(()))
    };
    let error = match poll_patiently((INTERVAL, deadline), check).await {
        Ok(Some(())) => return Ok(Some((deployment, previous))),
        Ok(None) => KubectlError::NoResponse(format!(
            "the pods of the {} in the namespace {namespace} did not end within {} s; they run again, and nothing was uninstalled",
            program.name(),
            deadline.as_secs()
        )),
        Err(error) => error,
    };
    set_replicas(deployments, &deployment, previous).await?;
    Err(error)
}

/// Sets the number of pods. Returns the earlier one.
async fn set_replicas(
    deployments: &Objects<DynamicObject>,
    deployment: &str,
    replicas: i64,
) -> Result<i64, KubectlError> {
    let decide = |deployment: &DynamicObject| {
        let previous = deployment.data.pointer("/spec/replicas");
        let patch = json!({"spec": {"replicas": replicas}});
        (Some(patch), previous.and_then(Value::as_i64).unwrap_or(1))
    };
    let (_, previous) = deployments.change(deployment, decide).await?;
    Ok(previous)
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
    let name = match count {
        1 => objects.kind.kind.to_lowercase(),
        _ => objects.kind.plural.clone(),
    };
    Some(format!("{count} {name}"))
}

/// Describes what is left, and how to remove it.
fn remaining_note(program: Program, namespace: &str, context: &str, objects: &[String]) -> String {
    let objects = match objects {
        [] => String::new(),
        objects => format!(" with {}", objects.join(", ")),
    };
    let secret_note = match program {
        Program::Hub => format!(
            "- Secret {namespace}/{CA_SECRET}, which all agents trust: a new hub in this namespace uses it again\n\
             - the hub's other records in the namespace {namespace}: ConfigMaps {CHART_CONFIG_MAP}, {EPOCH_CONFIG_MAP}, \
             {JOIN_CONFIG_MAP} and {MEMBERS_CONFIG_MAP}, Lease {HUB_LEASE}, Secret krypton-hub-values-salt, and Secrets \
             {JOIN_TOKEN_PREFIX}… of join tokens"
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
        "These stay on the cluster {context:?}:\n- the CRDs{objects}\n\
         - the Helm releases of all Tenants, and their namespaces\n\
         - {namespaces} {SYSTEM_NAMESPACE}, with the records of this cluster as a member: Secret krypton-desired-state, \
         its owner ConfigMap krypton-root-owner, Lease {LEASE_NAME}, Secrets krypton-release-… of the releases, and \
         Secrets krypton-tenant-backup-… after a deletion of the Tenant CRD\n{secret_note}\n\
         To remove them too, see {}\n",
        docs_url(RELEASES_DOCS)
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Names in the first column of the table below this heading of the page about objects.
    fn documented_names(heading: &str) -> Vec<String> {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/objects.md");
        let page = std::fs::read_to_string(page).unwrap();
        let lines = page.lines().skip_while(|line| *line != heading).skip(1);
        let rows = lines.take_while(|line| !line.starts_with("## "));
        let cells = rows.filter_map(|row| row.strip_prefix("| ")?.split(" | ").next());
        let names = cells.filter_map(|cell| cell.split('`').nth(1));
        names.map(str::to_owned).collect()
    }

    #[test]
    fn every_documented_object_is_listed() {
        let hub = remaining_note(Program::Hub, "krypton", "home", &[]);
        let agent = remaining_note(Program::Agent, "krypton-system", "edge-1", &[]);
        let of_hub = documented_names("## Home cluster, in the hub's namespace");
        let of_member = documented_names("## Every member, in `krypton-system`");
        assert!(of_hub.len() >= 8 && of_member.len() >= 6);
        for name in of_hub {
            assert!(hub.contains(&name), "{name}: {hub}");
        }
        for name in of_member {
            assert!(agent.contains(&name), "{name}: {agent}");
            let is_only_with_agent = name == "krypton-agent-identity";
            assert!(is_only_with_agent || hub.contains(&name), "{name}: {hub}");
        }
    }

    #[test]
    fn remaining_objects_are_listed_for_each_program() {
        let text = remaining_note(Program::Hub, "krypton", "home", &["2 tenants".to_owned()]);
        for kept in [
            "- the CRDs with 2 tenants\n",
            "- the namespaces krypton and krypton-system, with",
            "Secret krypton/krypton-hub-ca",
            "namespace krypton: ConfigMaps krypton-hub-chart, krypton-hub-epoch",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        let text = remaining_note(Program::Agent, "krypton-system", "edge-1", &[]);
        assert!(text.contains("on the cluster \"edge-1\""), "{text}");
        assert!(text.contains("- the CRDs\n"), "{text}");
        let namespace = "- the namespace krypton-system, with";
        assert!(text.contains(namespace), "{text}");
    }
}
