//! `kubectl krypton leave NAME`: deletes the EdgeCluster and reports what happens to its releases.

use std::time::Duration;

use clap::{ArgGroup, Args};
use krypton_crds::edge_cluster::{DeletionPolicy, EdgeClusterSpec};
use krypton_runtime::args::go_values::parse_duration;
use krypton_types::names::{ORPHAN_ANNOTATION, SELF_CLUSTER, UNINSTALL_FINALIZER};
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::error::KubectlError;
use crate::home::{Connection, Target};
use crate::kind::Kind;
use crate::objects::{Objects, Scope, condition};
use crate::render::{CommandOutput, list_at, one_line, text_at};

const INTERVAL: Duration = Duration::from_secs(2);
/// The hub adds its finalizer within a second or two.
const FINALIZER_DEADLINE: Duration = Duration::from_secs(30);
/// Maximum number of KryptonDeployments that the advice names.
const MAX_NAMES: usize = 5;
const EXAMPLES: &str = "\
Examples:
  # Remove a cluster from the fleet, and keep its releases
  kubectl krypton leave NAME --orphan

  # Uninstall the releases of a cluster, and wait until it has left
  kubectl krypton leave NAME --uninstall --wait";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES, group(ArgGroup::new("releases").required(true)))]
pub(crate) struct Leave {
    /// Name of the cluster in the fleet
    name: String,
    /// Keep all releases on the cluster
    #[arg(long, group = "releases")]
    orphan: bool,
    /// First uninstall all releases on the cluster. The hub waits for a cluster that is unreachable
    #[arg(long, group = "releases")]
    uninstall: bool,
    /// Wait until the EdgeCluster is deleted, at most for this time
    #[arg(long, value_name = "DURATION", num_args = 0..=1, default_missing_value = "10m", value_parser = parse_wait)]
    wait: Option<Duration>,
}

fn parse_wait(text: &str) -> Result<Duration, &'static str> {
    parse_duration(text).ok_or("write a duration, as 90s or 10m")
}

pub(crate) async fn run(leave: Leave, target: &Target<'_>) -> Result<CommandOutput, KubectlError> {
    let home = target.connect().await?;
    let name = leave.name.as_str();
    if name == SELF_CLUSTER {
        let reason = "the home cluster cannot leave; start the hub with --self-cluster=false to ignore its Tenants";
        return Err(KubectlError::Refused(reason.to_owned()));
    }
    let members = home.members();
    let changing = members.change(name, |member| (patch(member, leave.orphan), ()));
    let (member, ()) = changing.await?;
    if leave.uninstall {
        wait_for_finalizer(&members, &member).await?;
    }
    if member.metadata.deletion_timestamp.is_none() {
        members.delete(name, member.uid()).await?;
    }
    let mut output = CommandOutput {
        stdout: format!("{} is leaving\n", members.full_name(name)),
        stderr: advice(&member, leave.orphan),
    };
    if leave.uninstall {
        output.stderr += &Box::pin(remaining_deployments(&home, name)).await;
    }
    match leave.wait {
        Some(deadline) if !wait_until_gone(&members, &member, deadline).await? => {
            let error = KubectlError::Refused(format!(
                "{name} still exists after {} s; 'kubectl describe edgecluster {name}' shows the reason, and 'kubectl krypton leave {name} --orphan' removes it and keeps its releases",
                deadline.as_secs()
            ));
            Err(error.with_output(output))
        }
        Some(_) => {
            output.stdout += &format!("{} is gone\n", members.full_name(name));
            Ok(output)
        }
        None => Ok(output),
    }
}

/// Waits for the hub's finalizer, without which a deletion takes effect immediately and uninstalls nothing.
async fn wait_for_finalizer(
    members: &Objects<DynamicObject>,
    member: &DynamicObject,
) -> Result<(), KubectlError> {
    let name = member.name_any();
    let check = |current: Option<DynamicObject>| {
        let current = current.filter(|current| current.uid() == member.uid());
        let current = current.ok_or_else(|| members.not_found(&members.kind.kind, &name))?;
        let mut finalizers = current.finalizers().iter();
        Ok(finalizers.any(|it| it == UNINSTALL_FINALIZER).then_some(()))
    };
    let times = (INTERVAL, FINALIZER_DEADLINE);
    members.wait_for(&name, times, check).await?.ok_or_else(|| {
        KubectlError::Refused(format!(
            "the hub has not added its finalizer to EdgeCluster {name} within {} s, so it would uninstall nothing; the EdgeCluster was not deleted: check that the hub runs, and retry",
            FINALIZER_DEADLINE.as_secs()
        ))
    })
}

/// Waits until the EdgeCluster is deleted, and prints the reason whenever it changes. Returns false after the deadline.
async fn wait_until_gone(
    members: &Objects<DynamicObject>,
    member: &DynamicObject,
    deadline: Duration,
) -> Result<bool, KubectlError> {
    let name = member.name_any();
    let mut printed_reason = None;
    let check = |current: Option<DynamicObject>| {
        let Some(current) = current.filter(|current| current.uid() == member.uid()) else {
            return Ok(Some(()));
        };
        let reason = reason(&current).unwrap_or_else(|| "waits for the hub".to_owned());
        if printed_reason.as_ref() != Some(&reason) {
            eprintln!("{name}: {reason}");
            printed_reason = Some(reason);
        }
        Ok(None)
    };
    let deleted = members.wait_for(&name, (INTERVAL, deadline), check).await?;
    Ok(deleted.is_some())
}

fn spec(object: &DynamicObject) -> EdgeClusterSpec {
    let spec = object.data.get("spec").cloned().unwrap_or_default();
    serde_json::from_value(spec).unwrap_or_default()
}

/// Returns the patch before the deletion. `None` if the object needs none.
fn patch(object: &DynamicObject, orphan: bool) -> Option<Value> {
    let uninstalls = spec(object).deletion_policy != DeletionPolicy::Retain;
    let annotation = object.annotations().get(ORPHAN_ANNOTATION);
    let is_annotated = annotation.is_some_and(|value| value == "true");
    Some(match (orphan, uninstalls, is_annotated) {
        // The annotation also releases an EdgeCluster that is already being deleted.
        (true, true, _) => json!({
            "spec": {"deletionPolicy": null},
            "metadata": {"annotations": {ORPHAN_ANNOTATION: "true"}},
        }),
        (true, false, _) | (false, true, false) => return None,
        (false, _, _) => json!({
            "spec": {"deletionPolicy": DeletionPolicy::Uninstall},
            "metadata": {"annotations": {ORPHAN_ANNOTATION: null}},
        }),
    })
}

/// The hub's message about the deletion.
fn reason(object: &DynamicObject) -> Option<String> {
    let message = condition(object, "Uninstalled")?.get("message")?;
    message.as_str().map(one_line)
}

/// Describes the effects, and the remaining work for the user.
fn advice(object: &DynamicObject, orphan: bool) -> String {
    let mut text = match orphan {
        true => "its releases stay installed; its agent keeps its last desired state until you uninstall the agent's chart\n",
        false => "the hub first uninstalls its releases and deletes the namespaces that Krypton created; if the cluster is unreachable, the hub waits\n",
    }
    .to_owned();
    match spec(object).source_ref {
        Some(source) => {
            let namespace = source.namespace.map(|namespace| format!("{namespace}/"));
            text += &format!(
                "its source is {} {}{}; the cluster joins again only if you remove and recreate that\n",
                source.kind,
                namespace.unwrap_or_default(),
                source.name.unwrap_or_default()
            );
        }
        None if orphan => {}
        None => {
            text += "its agent keeps running until you run 'kubectl krypton uninstall agent' on that cluster\n";
        }
    }
    text
}

/// Describes the KryptonDeployments whose release the hub uninstalls there.
async fn remaining_deployments(home: &Connection, member: &str) -> String {
    let deployments = home.untyped(Kind::Deployment.resource(), &Scope::All);
    // The home cluster may not have the kind, and the user may not list it.
    let deployments = deployments.list_values().await.unwrap_or_default();
    deployments_advice(&deployments, member)
}

/// Without the member, the hub can't verify that the release is gone.
fn deployments_advice(deployments: &[Value], member: &str) -> String {
    let is_placed = |deployment: &&Value| {
        list_at(deployment, "/status/placements").any(|placement| placement["cluster"] == member)
    };
    let placed = deployments.iter().filter(is_placed);
    let names: Vec<String> = placed
        .map(|deployment| {
            let field = |pointer| text_at(deployment, pointer).unwrap_or_default();
            format!(
                "{}/{}",
                field("/metadata/namespace"),
                field("/metadata/name")
            )
        })
        .collect();
    if names.is_empty() {
        return String::new();
    }
    let omitted = match names.len() > MAX_NAMES {
        true => ", …",
        false => "",
    };
    let shown: Vec<&str> = names.iter().take(MAX_NAMES).map(String::as_str).collect();
    format!(
        "these KryptonDeployments stay on the home cluster: {}{omitted}; if you delete one, also set its annotation {ORPHAN_ANNOTATION}=true, because without the cluster its deletion waits\n",
        shown.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leave_names_deployments_of_the_member() {
        let deployment = |name: &str, cluster: &str| {
            json!({
                "metadata": {"namespace": "a", "name": name},
                "status": {"placements": [{"cluster": cluster, "clusterUid": "u"}]},
            })
        };
        let mut deployments = vec![deployment("one", "edge-1"), deployment("two", "edge-2")];
        assert_eq!(deployments_advice(&deployments, "edge-3"), "");
        let text = deployments_advice(&deployments, "edge-1");
        assert!(text.contains("home cluster: a/one; if"), "{text}");
        assert!(text.contains("mesh.openkcm.io/orphan=true"), "{text}");
        deployments.extend((0..MAX_NAMES).map(|number| deployment(&number.to_string(), "edge-1")));
        let text = deployments_advice(&deployments, "edge-1");
        assert!(text.contains("a/one, a/0, a/1, a/2, a/3, …; if"), "{text}");
    }

    fn object(spec: Value, annotations: Value) -> DynamicObject {
        serde_json::from_value(json!({
            "metadata": {"name": "edge-1", "uid": "u", "resourceVersion": "7", "annotations": annotations},
            "spec": spec,
        }))
        .unwrap()
    }

    #[test]
    fn leave_patches_release_policy_only_when_it_differs() {
        let (retains, orphaned) = (json!({}), json!({ORPHAN_ANNOTATION: "true"}));
        let uninstalls = json!({"deletionPolicy": "Uninstall"});
        let none = json!({});
        let orphaning = [json!(null), json!("true")];
        let uninstalling = [json!("Uninstall"), json!(null)];
        let rows = [
            (&retains, &none, true, None),
            (&uninstalls, &none, true, Some(&orphaning)),
            (&uninstalls, &none, false, None),
            (&retains, &none, false, Some(&uninstalling)),
            (&uninstalls, &orphaned, false, Some(&uninstalling)),
        ];
        for (spec, annotations, orphan, expected) in rows {
            let patch = patch(&object(spec.clone(), annotations.clone()), orphan);
            let written = patch.map(|patch| {
                let annotation = &patch["metadata"]["annotations"][ORPHAN_ANNOTATION];
                [patch["spec"]["deletionPolicy"].clone(), annotation.clone()]
            });
            assert_eq!(written.as_ref(), expected, "{spec} {annotations} {orphan}");
        }
    }

    #[test]
    fn leave_advice_names_source_of_member() {
        let spec =
            json!({"sourceRef": {"kind": "Secret", "namespace": "krypton", "name": "edge-1"}});
        let text = advice(&object(spec, json!({})), true);
        assert!(text.contains("Secret krypton/edge-1"), "{text}");
        let by_agent = object(json!({}), json!({}));
        assert_eq!(advice(&by_agent, true).lines().count(), 1);
        let text = advice(&by_agent, false);
        assert!(text.contains("kubectl krypton uninstall agent"), "{text}");
    }
}
