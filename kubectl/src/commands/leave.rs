//! `kubectl krypton leave NAME`: deletes the EdgeCluster and reports what happens to its releases.

use std::time::Duration;

use clap::Args;
use krypton_crds::edge_cluster::{DeletionPolicy, EdgeClusterSpec};
use krypton_runtime::args::go_values::parse_duration;
use krypton_types::names::{ORPHAN_ANNOTATION, SELF_CLUSTER, UNINSTALL_FINALIZER};
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::error::KubectlError;
use crate::home::Target;
use crate::kind::Kind;
use crate::objects::{Objects, Scope, condition};
use crate::render::{Printed, one_line};

const INTERVAL: Duration = Duration::from_secs(2);
/// The hub adds its finalizer within a second or two.
const FINALIZER_DEADLINE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, Args)]
pub(crate) struct Leave {
    /// Name of the cluster in the fleet
    name: String,
    /// Keep all releases on the cluster
    #[arg(long, required_unless_present = "uninstall")]
    orphan: bool,
    /// First uninstall all releases on the cluster. The hub waits for a cluster that is unreachable
    #[arg(long, conflicts_with = "orphan")]
    uninstall: bool,
    /// Wait until the EdgeCluster is deleted, at most for this time
    #[arg(long, value_name = "DURATION", num_args = 0..=1, default_missing_value = "10m", value_parser = wait)]
    wait: Option<Duration>,
}

fn wait(text: &str) -> Result<Duration, &'static str> {
    parse_duration(text).ok_or("write a duration, as 90s or 10m")
}

pub(crate) async fn run(leave: Leave, target: &Target<'_>) -> Result<Printed, KubectlError> {
    let home = target.connect().await?;
    let name = leave.name.as_str();
    if name == SELF_CLUSTER {
        let why = "the home cluster cannot leave; start the hub with --self-cluster=false to ignore its Tenants";
        return Err(KubectlError::Refused(why.to_owned()));
    }
    let members = home.untyped(Kind::Cluster.resource(), &Scope::All);
    let changing = members.change(name, |found| (patch(found, leave.orphan), ()));
    let (found, ()) = changing.await?;
    if leave.uninstall {
        wait_for_finalizer(&members, &found).await?;
    }
    if found.metadata.deletion_timestamp.is_none() {
        members.delete(name, found.uid()).await?;
    }
    let mut printed = Printed {
        stdout: format!("{} is leaving\n", members.full_name(name)),
        stderr: advice(&found, leave.orphan),
    };
    match leave.wait {
        Some(deadline) if !is_gone(&members, &found, deadline).await? => {
            let error = KubectlError::Refused(format!(
                "{name} still exists after {} s; 'kubectl describe edgecluster {name}' shows the reason, and 'kubectl krypton leave {name} --orphan' removes it and keeps its releases",
                deadline.as_secs()
            ));
            Err(error.after(printed))
        }
        Some(_) => {
            printed.stdout += &format!("{} is gone\n", members.full_name(name));
            Ok(printed)
        }
        None => Ok(printed),
    }
}

/// Waits for the hub's finalizer, without which a deletion takes effect immediately and uninstalls nothing.
async fn wait_for_finalizer(
    members: &Objects<DynamicObject>,
    member: &DynamicObject,
) -> Result<(), KubectlError> {
    let name = member.name_any();
    let is_ours = |finalizer: &String| finalizer == UNINSTALL_FINALIZER;
    let look = |found: Option<DynamicObject>| {
        let found = found.filter(|found| found.uid() == member.uid());
        let found = found.ok_or_else(|| members.not_found(&members.kind.kind, &name))?;
        Ok(found.finalizers().iter().any(is_ours).then_some(()))
    };
    let times = (INTERVAL, FINALIZER_DEADLINE);
    members.wait(&name, times, look).await?.ok_or_else(|| {
        KubectlError::Refused(format!(
            "the hub has not added its finalizer to EdgeCluster {name} within {} s, so it would uninstall nothing; the EdgeCluster was not deleted: check that the hub runs, and retry",
            FINALIZER_DEADLINE.as_secs()
        ))
    })
}

/// Waits until the EdgeCluster is deleted, and prints the reason whenever it changes.
async fn is_gone(
    members: &Objects<DynamicObject>,
    member: &DynamicObject,
    deadline: Duration,
) -> Result<bool, KubectlError> {
    let name = member.name_any();
    let mut shown = None;
    let look = |found: Option<DynamicObject>| {
        let Some(found) = found.filter(|found| found.uid() == member.uid()) else {
            return Ok(Some(()));
        };
        let reason = reason(&found).unwrap_or_else(|| "waits for the hub".to_owned());
        if shown.as_ref() != Some(&reason) {
            eprintln!("{name}: {reason}");
            shown = Some(reason);
        }
        Ok(None)
    };
    let gone = members.wait(&name, (INTERVAL, deadline), look).await?;
    Ok(gone.is_some())
}

fn spec(object: &DynamicObject) -> EdgeClusterSpec {
    let spec = object.data.get("spec").cloned().unwrap_or_default();
    serde_json::from_value(spec).unwrap_or_default()
}

/// Returns the patch before the deletion. `None` if the object needs none.
fn patch(object: &DynamicObject, orphan: bool) -> Option<Value> {
    let uninstalls = spec(object).deletion_policy != DeletionPolicy::Retain;
    let annotated = object
        .annotations()
        .get(ORPHAN_ANNOTATION)
        .map(String::as_str)
        == Some("true");
    Some(match (orphan, uninstalls, annotated) {
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
        false => "the hub first uninstalls its releases and deletes the namespaces that Krypton created; it waits for a cluster that is unreachable\n",
    }
    .to_owned();
    if let Some(source) = spec(object).source_ref {
        let namespace = source.namespace.map(|namespace| format!("{namespace}/"));
        text += &format!(
            "its source is {} {}{}; the cluster joins again only if you remove and recreate that\n",
            source.kind,
            namespace.unwrap_or_default(),
            source.name.unwrap_or_default()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(spec: Value, annotations: Value) -> DynamicObject {
        serde_json::from_value(json!({
            "metadata": {"name": "edge-1", "uid": "u", "resourceVersion": "7", "annotations": annotations},
            "spec": spec,
        }))
        .unwrap()
    }

    #[test]
    fn leave_patches_release_policy_only_when_it_differs() {
        let (keeps, orphaned) = (json!({}), json!({ORPHAN_ANNOTATION: "true"}));
        let uninstalls = json!({"deletionPolicy": "Uninstall"});
        let none = json!({});
        let rows = [
            (&keeps, &none, true, None),
            (&uninstalls, &none, true, Some((json!(null), json!("true")))),
            (&uninstalls, &none, false, None),
            (
                &keeps,
                &none,
                false,
                Some((json!("Uninstall"), json!(null))),
            ),
            (
                &uninstalls,
                &orphaned,
                false,
                Some((json!("Uninstall"), json!(null))),
            ),
        ];
        for (spec, annotations, orphan, expected) in rows {
            let patch = patch(&object(spec.clone(), annotations.clone()), orphan);
            let written = patch.map(|patch| {
                (
                    patch["spec"]["deletionPolicy"].clone(),
                    patch["metadata"]["annotations"][ORPHAN_ANNOTATION].clone(),
                )
            });
            assert_eq!(written, expected, "{spec} {annotations} {orphan}");
        }
    }

    #[test]
    fn leave_advice_names_source_of_member() {
        let found =
            json!({"sourceRef": {"kind": "Secret", "namespace": "krypton", "name": "edge-1"}});
        let told = advice(&object(found, json!({})), true);
        assert!(told.contains("Secret krypton/edge-1"), "{told}");
        assert_eq!(
            advice(&object(json!({}), json!({})), false).lines().count(),
            1
        );
    }
}
