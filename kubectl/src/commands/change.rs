//! `kubectl krypton pause|resume|resync|accept|ban|unban`: changes one field or annotation of each object.

use clap::{Arg, Args};
use jiff::Timestamp;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_types::conditions;
use krypton_types::names::{PAUSED_ANNOTATION, RECONCILE_REQUESTED_ANNOTATION, SELF_CLUSTER};
use kube::api::ListParams;
use serde_json::{Value, json};

use crate::error::KubectlError;
use crate::home::{Connection, Target};
use crate::kind::{Kind, KindArg};
use crate::render::{CommandOutput, text_at};

pub(crate) const PAUSE_EXAMPLES: &str = "\
Examples:
  # Pause a Tenant
  kubectl krypton pause tenant NAME

  # Pause all Tenants of a cluster
  kubectl krypton pause cluster NAME";
pub(crate) const RESUME_EXAMPLES: &str = "\
Examples:
  # End the pause of a Tenant
  kubectl krypton resume tenant NAME

  # End the pause of a cluster
  kubectl krypton resume cluster NAME";
pub(crate) const RESYNC_EXAMPLES: &str = "\
Examples:
  # Retry a failed action of a Tenant
  kubectl krypton resync tenant NAME -n NAMESPACE";
pub(crate) const ACCEPT_EXAMPLES: &str = "\
Examples:
  # Let the hub connect to a cluster
  kubectl krypton accept NAME";
pub(crate) const BAN_EXAMPLES: &str = "\
Examples:
  # Ban a cluster, for example because its agent's key has leaked
  kubectl krypton ban NAME";
pub(crate) const UNBAN_EXAMPLES: &str = "\
Examples:
  # Let a banned cluster connect again
  kubectl krypton unban NAME";

#[derive(Clone, Debug, Args)]
pub(crate) struct Change {
    #[arg(value_parser = Kind::singular(&Kind::ALL))]
    kind: KindArg,
    /// Name of the object; repeatable. KIND/NAME is possible, too
    #[arg(value_name = "NAME")]
    names: Vec<String>,
}

/// Restricts the kinds of [`Change`] to those with releases.
pub(crate) fn restrict_kinds(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "kind" => arg.value_parser(Kind::singular(&[Kind::Tenant, Kind::Deployment])),
        _ => arg,
    }
}

impl Change {
    /// Returns the kind and the names of the objects.
    pub(crate) fn objects(&self) -> Result<(Kind, Vec<String>), KubectlError> {
        let names = self.kind.names(&self.names)?;
        match names.is_empty() {
            true => Err(KubectlError::usage("name at least one object")),
            false => Ok((self.kind.kind, names)),
        }
    }
}

#[derive(Clone, Debug, Args)]
pub(crate) struct Members {
    /// Name of a cluster of the fleet
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
}

impl Members {
    pub(crate) fn objects(self) -> (Kind, Vec<String>) {
        (Kind::Cluster, self.names)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Pause,
    Resume,
    Resync,
    Accept,
    Ban,
    Unban,
}

const BAN_NOTE: &str = "its releases stay installed, and its agent keeps its last desired state; to stop the agent's writes too, pause the cluster first";

/// Changes the objects one after the other. An error lists the objects that were changed before it.
pub(crate) async fn run(
    verb: Verb,
    (kind, names): (Kind, Vec<String>),
    target: &Target<'_>,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    let home = target.connect().await?;
    let scope = kind.scope(target.args.namespace.as_deref(), &home);
    let objects = home.untyped(kind.resource(), &scope);
    let mut output = CommandOutput::default();
    for name in &names {
        let changing = objects.change(name, |object| {
            let object = objects.to_value(object.clone());
            let (patch, result) = plan_change(verb, kind, &object, now);
            let note = unreached_note(&object).filter(|_| kind == Kind::Tenant);
            (patch, (result, note))
        });
        let (result, note) = match changing.await {
            Ok((_, planned)) => planned,
            Err(error) => return Err(error.with_output(output)),
        };
        output.stdout += &format!("{} {result}\n", objects.full_name(name));
        if verb == Verb::Ban {
            output.stderr += &format!("{BAN_NOTE}\n");
        }
        // On an edge cluster, its Tenants name no other cluster.
        if let Some(note) = note
            && has_members(&home).await
        {
            output.stderr += &format!("{note}\n");
        }
    }
    Ok(output)
}

/// Returns whether the cluster has visible members, as a home cluster does.
async fn has_members(cluster: &Connection) -> bool {
    let members = cluster.all::<EdgeCluster>();
    let params = ListParams::default().limit(1);
    let list = members.call("list", "", members.api.list_metadata(&params));
    list.await.is_ok_and(|list| !list.items.is_empty())
}

/// Returns a merge patch, or `None` if the object needs no change, and the result for the user.
fn plan_change(
    verb: Verb,
    kind: Kind,
    object: &Value,
    now: Timestamp,
) -> (Option<Value>, &'static str) {
    let is_set = |field: &str| object.pointer(field).and_then(Value::as_bool) == Some(true);
    let annotations = object.pointer("/metadata/annotations");
    let annotation = annotations.and_then(|it| it.get(PAUSED_ANNOTATION)?.as_str());
    let is_annotated = annotation.is_some_and(|value| value != "false");
    let (needs_patch, patch, (changed_result, unchanged_result)) = match (verb, kind) {
        (Verb::Pause, Kind::Cluster) => (
            !is_set("/spec/paused"),
            json!({"spec": {"paused": true}}),
            ("paused", "is paused already"),
        ),
        // Ends both kinds of pause.
        (Verb::Resume, Kind::Cluster) => (
            is_set("/spec/paused") || is_annotated,
            json!({"spec": {"paused": null}, "metadata": {"annotations": {PAUSED_ANNOTATION: null}}}),
            ("resumed", "is not paused"),
        ),
        (Verb::Pause, _) => (
            !is_annotated,
            json!({"metadata": {"annotations": {PAUSED_ANNOTATION: "true"}}}),
            ("paused", "is paused already"),
        ),
        (Verb::Resume, _) => (
            is_annotated,
            json!({"metadata": {"annotations": {PAUSED_ANNOTATION: null}}}),
            ("resumed", "is not paused"),
        ),
        (Verb::Resync, _) => (
            true,
            json!({"metadata": {"annotations": {RECONCILE_REQUESTED_ANNOTATION: now.to_string()}}}),
            ("is reconciled again", ""),
        ),
        (Verb::Accept, _) => (
            object.pointer("/spec/accepted") == Some(&json!(false)),
            json!({"spec": {"accepted": true}}),
            ("accepted", "is accepted already"),
        ),
        (Verb::Ban, _) => (
            !is_set("/spec/banned"),
            json!({"spec": {"banned": true}}),
            ("banned", "is banned already"),
        ),
        (Verb::Unban, _) => (
            is_set("/spec/banned"),
            json!({"spec": {"banned": null}}),
            ("unbanned", "is not banned"),
        ),
    };
    match needs_patch {
        true => (Some(patch), changed_result),
        false => (None, unchanged_result),
    }
}

/// Returns a note about clusters on which the Tenant was created. A change on the home cluster does not reach them.
fn unreached_note(object: &Value) -> Option<String> {
    let conditions = object.pointer("/status/conditions")?.clone();
    let conditions: Vec<_> = serde_json::from_value(conditions).ok()?;
    let targets = ["/spec/clusterRef/secretName", "/status/placement/cluster"]
        .map(|path| text_at(object, path));
    let created_there: Vec<String> = conditions::clusters(&conditions)
        .into_keys()
        .filter(|cluster| cluster != SELF_CLUSTER && !targets.contains(&Some(cluster.clone())))
        .collect();
    (!created_there.is_empty()).then(|| {
        format!(
            "this does not reach {}: the Tenant was created there; run the command with --context or --kubeconfig of that cluster",
            created_there.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{condition, now};

    #[test]
    fn each_verb_patches_only_when_change_is_needed() {
        use Kind::{Cluster, Deployment, Tenant};
        use Verb::{Accept, Ban, Pause, Resume, Resync, Unban};
        let paused = json!({"metadata": {"annotations": {PAUSED_ANNOTATION: "true"}}});
        let unpaused = json!({"metadata": {"annotations": {PAUSED_ANNOTATION: "false"}}});
        let (plain, spec) = (json!({}), json!({"spec": {"paused": true, "banned": true}}));
        let waiting = json!({"spec": {"accepted": false}});
        let rows = [
            (Pause, Tenant, &plain, true, "paused"),
            (Pause, Tenant, &unpaused, true, "paused"),
            (Pause, Tenant, &paused, false, "is paused already"),
            (Resume, Deployment, &paused, true, "resumed"),
            (Resume, Deployment, &unpaused, false, "is not paused"),
            (Pause, Cluster, &plain, true, "paused"),
            (Pause, Cluster, &spec, false, "is paused already"),
            (Resume, Cluster, &spec, true, "resumed"),
            (Resume, Cluster, &paused, true, "resumed"),
            (Resume, Cluster, &plain, false, "is not paused"),
            (Resync, Tenant, &paused, true, "is reconciled again"),
            (Accept, Cluster, &waiting, true, "accepted"),
            (Accept, Cluster, &plain, false, "is accepted already"),
            (Ban, Cluster, &plain, true, "banned"),
            (Ban, Cluster, &spec, false, "is banned already"),
            (Unban, Cluster, &spec, true, "unbanned"),
            (Unban, Cluster, &plain, false, "is not banned"),
        ];
        for (verb, kind, object, needs_patch, result) in rows {
            let (patch, planned_result) = plan_change(verb, kind, object, now());
            assert_eq!(patch.is_some(), needs_patch, "{verb:?} {kind:?}");
            assert_eq!(planned_result, result, "{verb:?} {kind:?}");
        }
    }

    #[test]
    fn tenant_change_notes_unreached_clusters() {
        let ready = |cluster: &&str| {
            let type_ = format!("ClusterReady/{cluster}");
            condition(&type_, "True", "Installed", "")
        };
        let object = |clusters: &[&str]| {
            let conditions: Vec<Value> = clusters.iter().map(ready).collect();
            json!({"spec": {"clusterRef": {"secretName": "edge-1"}}, "status": {"conditions": conditions}})
        };
        assert_eq!(unreached_note(&object(&["edge-1", SELF_CLUSTER])), None);
        let note = unreached_note(&object(&["edge-1", "edge-2", "edge-3"])).unwrap();
        assert!(note.contains("does not reach edge-2, edge-3:"), "{note}");
    }
}
