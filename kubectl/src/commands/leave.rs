//! `kubectl krypton leave NAME`: the EdgeCluster is deleted, after it was said what becomes of what is installed.

use std::time::Duration;

use clap::Args;
use krypton_crds::edge_cluster::{DeletionPolicy, EdgeCluster, EdgeClusterSpec};
use krypton_runtime::args::go_values::parse_duration;
use krypton_types::names::{ORPHAN_ANNOTATION, SELF_CLUSTER, UNINSTALL_FINALIZER};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::core::ApiResource;
use kube::{Error as KubeError, ResourceExt as _};
use serde_json::{Value, json};

use crate::error::{KubectlError, call_failed};
use crate::home::{Connection, HomeArgs, Place};
use crate::render::Printed;

const LOOK_EVERY: Duration = Duration::from_secs(2);
const TRIES: usize = 3;
/// The hub writes on an EdgeCluster within a second or two of its change.
const HOLD_DEADLINE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, Args)]
pub(crate) struct Leave {
    /// Name of the cluster in the fleet.
    name: String,
    /// What is installed there stays, and goes on running.
    #[arg(long, required_unless_present = "uninstall")]
    orphan: bool,
    /// Uninstall all releases there first. A cluster that is away is waited for.
    #[arg(long, conflicts_with = "orphan")]
    uninstall: bool,
    /// Wait until it is gone, for so long at most.
    #[arg(long, value_name = "DURATION", num_args = 0..=1, default_missing_value = "10m", value_parser = patience)]
    wait: Option<Duration>,
    #[command(flatten)]
    pub(crate) home: HomeArgs,
}

fn patience(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| "a duration such as 90s or 10m is wanted".to_owned())
}

pub(crate) async fn run(leave: Leave, home: &Connection) -> Result<Printed, KubectlError> {
    let name = leave.name.as_str();
    if name == SELF_CLUSTER {
        return Err(KubectlError::Refused {
            why: "the home cluster itself does not leave; start the hub with --self-cluster=false to leave its Tenants alone".to_owned(),
        });
    }
    let kind = ApiResource::erase::<EdgeCluster>(&());
    let api: Api<DynamicObject> = Api::all_with(home.client.clone(), &kind);
    let explained = |verb, error| call_failed(error, verb, &kind, &Place::Cluster, &home.context);
    let mut tries = 0;
    let found = loop {
        let found = home.in_time(api.get_opt(name)).await?;
        let found = found.map_err(|error| explained("get", error))?;
        let found = found.ok_or_else(|| home.not_found(&kind.kind, name, &Place::Cluster))?;
        let Some(patch) = patch(&found, leave.orphan) else {
            break found;
        };
        let params = PatchParams::default();
        let patch = Patch::Merge(patch);
        match home.in_time(api.patch(name, &params, &patch)).await? {
            Ok(patched) => break patched,
            Err(KubeError::Api(status)) if status.code == 409 && tries < TRIES => tries += 1,
            Err(error) => return Err(explained("patch", error)),
        }
    };
    if leave.uninstall {
        // One that is deleted before the hub holds it is gone at once, and nothing is uninstalled.
        let held = async {
            let mut now = found.clone();
            while !now
                .finalizers()
                .iter()
                .any(|held| held == UNINSTALL_FINALIZER)
            {
                tokio::time::sleep(LOOK_EVERY).await;
                let read = home.in_time(api.get_opt(name)).await?;
                let read = read.map_err(|error| explained("get", error))?;
                now = read
                    .filter(|now| now.uid() == found.uid())
                    .ok_or_else(|| home.not_found(&kind.kind, name, &Place::Cluster))?;
            }
            Ok(())
        };
        tokio::time::timeout(HOLD_DEADLINE, held)
            .await
            .map_err(|_| KubectlError::Refused {
                why: format!(
                    "the hub has not put its finalizer on EdgeCluster {name} within {} s, without which nothing would be uninstalled; it was not deleted: check that the hub runs, and run this again",
                    HOLD_DEADLINE.as_secs()
                ),
            })??;
    }
    let mut printed = Printed {
        stdout: format!("{}.{}/{name} is to leave\n", "edgecluster", kind.group),
        stderr: advice(&found, leave.orphan),
    };
    if found.metadata.deletion_timestamp.is_none() {
        // What was not looked at is not deleted.
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: found.uid(),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        let deleted = home.in_time(api.delete(name, &params)).await?;
        deleted.map_err(|error| explained("delete", error))?;
    }
    let Some(patience) = leave.wait else {
        return Ok(printed);
    };
    let gone = async {
        let mut told = None;
        loop {
            let now = home.in_time(api.get_opt(name)).await?;
            let now = now.map_err(|error| explained("get", error))?;
            match now.filter(|now| now.uid() == found.uid()) {
                None => return Ok(()),
                Some(now) => {
                    let waits = waits_for(&now);
                    if told != waits {
                        eprintln!(
                            "{name}: {}",
                            waits.as_deref().unwrap_or("waits for the hub")
                        );
                    }
                    told = waits;
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    match tokio::time::timeout(patience, gone).await {
        Ok(gone) => gone.map(|()| {
            printed.stdout += &format!("edgecluster.{}/{name} is gone\n", kind.group);
            printed
        }),
        Err(_) => Err(KubectlError::Partly {
            printed,
            error: Box::new(KubectlError::Refused {
                why: format!(
                    "{name} is not gone after {} s; 'kubectl describe edgecluster {name}' says what is waited for, and 'kubectl krypton leave {name} --orphan' lets it go with what is installed left there",
                    patience.as_secs()
                ),
            }),
        }),
    }
}

fn spec(object: &DynamicObject) -> EdgeClusterSpec {
    let spec = object.data.get("spec").cloned().unwrap_or_default();
    serde_json::from_value(spec).unwrap_or_default()
}

/// What is written before the deletion; none where it is so already.
fn patch(object: &DynamicObject, orphan: bool) -> Option<Value> {
    let uninstalls = spec(object).deletion_policy != DeletionPolicy::Retain;
    let annotated = object
        .annotations()
        .get(ORPHAN_ANNOTATION)
        .map(String::as_str)
        == Some("true");
    let mut patch = match (orphan, uninstalls, annotated) {
        // The annotation lets one go that is being deleted already.
        (true, true, _) => json!({
            "spec": {"deletionPolicy": null},
            "metadata": {"annotations": {ORPHAN_ANNOTATION: "true"}},
        }),
        (true, false, _) | (false, true, false) => return None,
        (false, _, _) => json!({
            "spec": {"deletionPolicy": DeletionPolicy::Uninstall},
            "metadata": {"annotations": {ORPHAN_ANNOTATION: null}},
        }),
    };
    // What was not looked at is not changed.
    patch["metadata"]["uid"] = json!(object.metadata.uid);
    patch["metadata"]["resourceVersion"] = json!(object.metadata.resource_version);
    Some(patch)
}

/// What it says of its deletion.
fn waits_for(object: &DynamicObject) -> Option<String> {
    let conditions = object.data.pointer("/status/conditions")?.as_array()?;
    let told = conditions
        .iter()
        .find(|condition| condition.get("type").and_then(Value::as_str) == Some("Uninstalled"))?;
    let message = told.get("message")?.as_str()?;
    Some(crate::render::one_line(message))
}

/// What is left to do for a person.
fn advice(object: &DynamicObject, orphan: bool) -> String {
    let mut lines = Vec::new();
    lines.push(match orphan {
        true => "what is installed there stays; an agent there goes on with what it was told last until its chart is uninstalled".to_owned(),
        false => "its releases are uninstalled first, and its namespaces that Krypton made; a cluster that is away is waited for".to_owned(),
    });
    let source = spec(object).source_ref;
    if let Some(source) = source {
        let place = source.namespace.map(|namespace| format!("{namespace}/"));
        lines.push(format!(
            "it was found by {} {}{}, and stays away until that is taken away and comes back",
            source.kind,
            place.unwrap_or_default(),
            source.name.unwrap_or_default()
        ));
    }
    lines.into_iter().map(|line| line + "\n").collect()
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
                assert_eq!(patch["metadata"]["resourceVersion"], "7");
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
