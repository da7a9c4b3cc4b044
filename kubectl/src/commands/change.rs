//! `kubectl krypton pause|resume|resync|accept|ban|unban`: one field or annotation of an object, changed as it was seen.

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use krypton_types::conditions;
use krypton_types::names::{
    PAUSED_ANNOTATION, RECONCILE_REQUESTED_ANNOTATION, SELF_CLUSTER, namespace_name,
};
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::ApiResource;
use serde_json::{Value, json};

use crate::error::{KubectlError, call_failed};
use crate::home::{Connection, HomeArgs, Place};
use crate::render::{Printed, text_at};

/// Another write may come between reading and writing; somebody who writes all the time is not waited for.
const TRIES: usize = 3;

#[derive(Clone, Debug, Args)]
pub(crate) struct Change {
    kind: Kind,
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Namespace of Tenants and KryptonDeployments; by default that of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    #[command(flatten)]
    pub(crate) home: HomeArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct Resync {
    kind: Reconciled,
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Namespace of the objects; by default that of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    #[command(flatten)]
    pub(crate) home: HomeArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct Members {
    /// Name of a cluster of the fleet.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    pub(crate) home: HomeArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    #[value(aliases = ["clusters", "edgecluster", "edgeclusters", "ec"])]
    Cluster,
    #[value(aliases = ["tenants", "tn"])]
    Tenant,
    #[value(aliases = ["deployments", "kryptondeployment", "kryptondeployments", "kd"])]
    Deployment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Reconciled {
    #[value(aliases = ["tenants", "tn"])]
    Tenant,
    #[value(aliases = ["deployments", "kryptondeployment", "kryptondeployments", "kd"])]
    Deployment,
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

/// What is to be written, if anything.
#[derive(Clone, Debug, PartialEq)]
struct Step {
    /// A merge patch; none where it is so already.
    patch: Option<Value>,
    /// What is said of the object then, after its name.
    said: &'static str,
    /// What a person should know beside it.
    note: Option<&'static str>,
    /// The same of clusters that it does not reach, where the object is one of home.
    elsewhere: Option<String>,
}

/// The objects that are meant.
#[derive(Debug)]
pub(crate) struct ChangeTarget {
    kind: Kind,
    names: Vec<String>,
    namespace: Option<String>,
}

impl From<Change> for ChangeTarget {
    fn from(change: Change) -> Self {
        Self {
            kind: change.kind,
            names: change.names,
            namespace: change.namespace,
        }
    }
}

impl From<Resync> for ChangeTarget {
    fn from(resync: Resync) -> Self {
        Self {
            kind: match resync.kind {
                Reconciled::Tenant => Kind::Tenant,
                Reconciled::Deployment => Kind::Deployment,
            },
            names: resync.names,
            namespace: resync.namespace,
        }
    }
}

impl From<Members> for ChangeTarget {
    fn from(members: Members) -> Self {
        Self {
            kind: Kind::Cluster,
            names: members.names,
            namespace: None,
        }
    }
}

/// Changes one after the other. What was done before one failed is said.
pub(crate) async fn run(
    verb: Verb,
    aim: ChangeTarget,
    home: &Connection,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let kind = match aim.kind {
        Kind::Cluster => ApiResource::erase::<EdgeCluster>(&()),
        Kind::Tenant => ApiResource::erase::<Tenant>(&()),
        Kind::Deployment => ApiResource::erase::<KryptonDeployment>(&()),
    };
    let place = match aim.kind {
        Kind::Cluster => Place::Cluster,
        Kind::Tenant | Kind::Deployment => {
            Place::Namespace(aim.namespace.unwrap_or_else(|| home.namespace.clone()))
        }
    };
    let mut printed = Printed::default();
    for name in &aim.names {
        match change((verb, aim.kind), (&kind, &place), name, home, now).await {
            Ok(mut step) => {
                // On an edge its own cluster is all that its Tenants tell of.
                if step.elsewhere.is_some() && !home.has_members().await {
                    step.elsewhere = None;
                }
                printed.stdout += &format!(
                    "{}.{}/{name} {}\n",
                    singular(aim.kind),
                    kind.group,
                    step.said
                );
                for note in step
                    .note
                    .map(str::to_owned)
                    .into_iter()
                    .chain(step.elsewhere)
                {
                    printed.stderr += &format!("{note}\n");
                }
            }
            Err(error) if printed.stdout.is_empty() => return Err(error),
            Err(error) => {
                let error = Box::new(error);
                return Err(KubectlError::Partly { printed, error });
            }
        }
    }
    Ok(printed)
}

fn singular(kind: Kind) -> &'static str {
    match kind {
        Kind::Cluster => "edgecluster",
        Kind::Tenant => "tenant",
        Kind::Deployment => "kryptondeployment",
    }
}

async fn change(
    (verb, of): (Verb, Kind),
    (kind, place): (&ApiResource, &Place),
    name: &str,
    home: &Connection,
    now: Timestamp,
) -> Result<Step, KubectlError> {
    let client = home.client.clone();
    let api: Api<DynamicObject> = match place {
        Place::Cluster => Api::all_with(client, kind),
        Place::Namespace(namespace) => Api::namespaced_with(client, namespace, kind),
    };
    let explained = |verb, error| call_failed(error, verb, kind, place, &home.context);
    for _ in 0..TRIES {
        let found = home.in_time(api.get_opt(name)).await?;
        let found = found.map_err(|error| explained("get", error))?;
        let Some(found) = found else {
            return Err(home.not_found(&kind.kind, name, place));
        };
        let object = serde_json::to_value(&found).unwrap_or_default();
        let mut step = step(verb, of, &object, now);
        let Some(patch) = &mut step.patch else {
            return Ok(step);
        };
        // What was not looked at is not changed.
        patch["metadata"]["uid"] = json!(found.metadata.uid);
        patch["metadata"]["resourceVersion"] = json!(found.metadata.resource_version);
        let params = PatchParams {
            field_manager: Some("kubectl-krypton".to_owned()),
            ..PatchParams::default()
        };
        match home
            .in_time(api.patch(name, &params, &Patch::Merge(&*patch)))
            .await?
        {
            Ok(_) => return Ok(step),
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(explained("patch", error)),
        }
    }
    Err(KubectlError::Refused {
        why: format!(
            "{} {name} is written by others all the time; find out by whom, and run this again",
            kind.kind
        ),
    })
}

/// What is to be written into this object.
fn step(verb: Verb, kind: Kind, object: &Value, now: Timestamp) -> Step {
    let annotation = |name: &str| {
        let annotations = object.pointer("/metadata/annotations")?;
        annotations.get(name)?.as_str().map(str::to_owned)
    };
    let set = |field: &str| object.pointer(field).and_then(Value::as_bool) == Some(true);
    let annotated = annotation(PAUSED_ANNOTATION).is_some_and(|value| value != "false");
    let (changes, patch, said) = match (verb, kind) {
        (Verb::Pause, Kind::Cluster) => (
            !set("/spec/paused"),
            json!({"spec": {"paused": true}}),
            ("paused", "is paused already"),
        ),
        // Both ways of pausing it.
        (Verb::Resume, Kind::Cluster) => (
            set("/spec/paused") || annotated,
            json!({"spec": {"paused": null}, "metadata": {"annotations": {PAUSED_ANNOTATION: null}}}),
            ("resumed", "is not paused"),
        ),
        (Verb::Pause, _) => (
            !annotated,
            json!({"metadata": {"annotations": {PAUSED_ANNOTATION: "true"}}}),
            ("paused", "is paused already"),
        ),
        (Verb::Resume, _) => (
            annotated,
            json!({"metadata": {"annotations": {PAUSED_ANNOTATION: null}}}),
            ("resumed", "is not paused"),
        ),
        (Verb::Resync, _) => (
            true,
            json!({"metadata": {"annotations": {RECONCILE_REQUESTED_ANNOTATION: now.to_string()}}}),
            ("is reconciled anew", ""),
        ),
        (Verb::Accept, _) => (
            object.pointer("/spec/accepted") == Some(&json!(false)),
            json!({"spec": {"accepted": true}}),
            ("accepted", "is accepted already"),
        ),
        (Verb::Ban, _) => (
            !set("/spec/banned"),
            json!({"spec": {"banned": true}}),
            ("banned", "is banned already"),
        ),
        (Verb::Unban, _) => (
            set("/spec/banned"),
            json!({"spec": {"banned": null}}),
            ("unbanned", "is not banned"),
        ),
    };
    let (done, already) = said;
    Step {
        note: (verb == Verb::Ban).then_some(
            "what is installed there stays, and its agent goes on with what it was told last; to stop that too, pause the cluster first",
        ),
        elsewhere: elsewhere(object).filter(|_| kind == Kind::Tenant),
        patch: changes.then_some(patch),
        said: if changes { done } else { already },
    }
}

/// The clusters of which home only tells: the Tenant was made there, and what is written on home's does not
/// reach it.
fn elsewhere(object: &Value) -> Option<String> {
    let listed = object.pointer("/status/conditions")?.clone();
    let conditions: Vec<_> = serde_json::from_value(listed).ok()?;
    let placed =
        ["/spec/clusterRef/secretName", "/status/place/cluster"].map(|at| text_at(object, at));
    let made_there: Vec<String> = conditions::clusters(&conditions)
        .into_keys()
        .filter(|cluster| cluster != SELF_CLUSTER && !placed.contains(&Some(cluster.clone())))
        .collect();
    (!made_there.is_empty()).then(|| {
        format!(
            "this does not reach {}: the Tenant was made there; run the same with --context or --kubeconfig of that cluster",
            made_there.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Timestamp {
        "2026-01-02T03:04:05Z".parse().unwrap()
    }

    #[test]
    fn each_verb_patches_only_when_change_is_needed() {
        let paused = json!({"metadata": {"annotations": {PAUSED_ANNOTATION: "true"}}});
        let not = json!({"metadata": {"annotations": {PAUSED_ANNOTATION: "false"}}});
        let (plain, spec) = (json!({}), json!({"spec": {"paused": true, "banned": true}}));
        let waiting = json!({"spec": {"accepted": false}});
        let rows = [
            (Verb::Pause, Kind::Tenant, &plain, true, "paused"),
            (Verb::Pause, Kind::Tenant, &not, true, "paused"),
            (
                Verb::Pause,
                Kind::Tenant,
                &paused,
                false,
                "is paused already",
            ),
            (Verb::Resume, Kind::Deployment, &paused, true, "resumed"),
            (Verb::Resume, Kind::Deployment, &not, false, "is not paused"),
            (Verb::Pause, Kind::Cluster, &plain, true, "paused"),
            (
                Verb::Pause,
                Kind::Cluster,
                &spec,
                false,
                "is paused already",
            ),
            (Verb::Resume, Kind::Cluster, &spec, true, "resumed"),
            (Verb::Resume, Kind::Cluster, &paused, true, "resumed"),
            (Verb::Resume, Kind::Cluster, &plain, false, "is not paused"),
            (
                Verb::Resync,
                Kind::Tenant,
                &paused,
                true,
                "is reconciled anew",
            ),
            (Verb::Accept, Kind::Cluster, &waiting, true, "accepted"),
            (
                Verb::Accept,
                Kind::Cluster,
                &plain,
                false,
                "is accepted already",
            ),
            (Verb::Ban, Kind::Cluster, &plain, true, "banned"),
            (Verb::Ban, Kind::Cluster, &spec, false, "is banned already"),
            (Verb::Unban, Kind::Cluster, &spec, true, "unbanned"),
            (Verb::Unban, Kind::Cluster, &plain, false, "is not banned"),
        ];
        for (verb, kind, object, changes, said) in rows {
            let step = step(verb, kind, object, now());
            assert_eq!(
                (step.patch.is_some(), step.said),
                (changes, said),
                "{verb:?} {kind:?}"
            );
        }
    }

    #[test]
    fn tenant_change_notes_unreached_clusters() {
        let ready = |cluster: &str| {
            json!({"type": format!("ClusterReady/{cluster}"), "status": "True", "reason": "Installed",
                "message": "", "lastTransitionTime": "2026-01-02T03:00:05Z"})
        };
        let object = |clusters: &[&str]| {
            let conditions: Vec<Value> = clusters.iter().map(|cluster| ready(cluster)).collect();
            json!({"spec": {"clusterRef": {"secretName": "edge-1"}}, "status": {"conditions": conditions}})
        };
        assert_eq!(elsewhere(&object(&["edge-1", SELF_CLUSTER])), None);
        let note = elsewhere(&object(&["edge-1", "edge-2", "edge-3"])).unwrap();
        assert!(note.contains("does not reach edge-2, edge-3:"), "{note}");
    }
}
