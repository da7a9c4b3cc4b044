//! Readiness of a release's workloads, by Helm's rule for `--wait`, from the existing watch.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{ORIGINALS_NAMESPACE, WorkloadKind};
use kube::core::Object;
use serde::Deserialize;

/// Maximum number of unready workloads to name.
const NAMED: usize = 3;

/// A Deployment, StatefulSet or DaemonSet with only the fields that readiness needs. A pod template is the largest part
/// of each object, and its decoder is a large part of a small agent.
pub type WorkloadObject = Object<Spec, Status>;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    replicas: Option<i32>,
    /// A Deployment has this field. The other kinds have an `updateStrategy`.
    #[serde(alias = "updateStrategy")]
    strategy: Strategy,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Strategy {
    #[serde(rename = "type")]
    type_: Option<String>,
    rolling_update: Option<RollingUpdate>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RollingUpdate {
    max_unavailable: Option<IntOrString>,
    partition: Option<i32>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    observed_generation: i64,
    replicas: i32,
    updated_replicas: i32,
    available_replicas: i32,
    ready_replicas: i32,
    desired_number_scheduled: i32,
    updated_number_scheduled: i32,
    number_ready: i32,
}

/// Key of a workload within one release.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkloadKey {
    pub kind: WorkloadKind,
    pub namespace: String,
    pub name: String,
}

/// Readiness of a workload. The objects themselves are not stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadState {
    pub ready: bool,
    /// Text for messages, such as "0 of 1 available".
    pub detail: String,
}

/// Returns the readiness of a Deployment. All replicas must have the latest template, and at least `replicas -
/// maxUnavailable` of them must be available. This is Helm's `deploymentReady`, which reads the newest ReplicaSet.
///
/// The status of a Deployment counts the available replicas of all ReplicaSets. The old replicas are subtracted.
pub fn deployment(object: &WorkloadObject) -> WorkloadState {
    let Some(status) = observed(object) else {
        return waiting("not yet observed by its controller".to_owned());
    };
    let wanted = object.spec.replicas.unwrap_or(1);
    let (updated, available) = (status.updated_replicas, status.available_replicas);
    if updated < wanted {
        return waiting(format!("{updated} of {wanted} replicas updated"));
    }
    let older = (status.replicas - updated).max(0);
    let new = (available - older).max(0);
    let detail = match older {
        0 => format!("{available} of {wanted} available"),
        older => format!("{new} of {wanted} new ones available, {older} old ones left"),
    };
    verdict(new >= wanted - max_unavailable(object, wanted), detail)
}

/// Returns the readiness of a StatefulSet. All replicas must be ready, and those above the partition updated.
pub fn stateful_set(object: &WorkloadObject) -> WorkloadState {
    let Some(status) = observed(object) else {
        return waiting("not yet observed by its controller".to_owned());
    };
    let wanted = object.spec.replicas.unwrap_or(1);
    let rolling_update = object.spec.strategy.rolling_update.as_ref();
    let partition = rolling_update.and_then(|update| update.partition);
    let to_update = wanted - partition.unwrap_or(0);
    let (updated, ready) = (status.updated_replicas, status.ready_replicas);
    if rolling(object) && updated < to_update {
        return waiting(format!("{updated} of {to_update} replicas updated"));
    }
    verdict(ready >= wanted, format!("{ready} of {wanted} ready"))
}

/// Returns the readiness of a DaemonSet. All its pods must be updated, and all but `maxUnavailable` ready.
pub fn daemon_set(object: &WorkloadObject) -> WorkloadState {
    let Some(status) = observed(object) else {
        return waiting("not yet observed by its controller".to_owned());
    };
    let wanted = status.desired_number_scheduled;
    let (updated, ready) = (status.updated_number_scheduled, status.number_ready);
    if rolling(object) && updated < wanted {
        return waiting(format!("{updated} of {wanted} pods updated"));
    }
    verdict(
        ready >= wanted - max_unavailable(object, wanted),
        format!("{ready} of {wanted} ready"),
    )
}

/// Returns the status, if it reflects the latest spec.
fn observed(object: &WorkloadObject) -> Option<&Status> {
    let newest = object.metadata.generation.unwrap_or(0);
    let status = object.status.as_ref()?;
    (status.observed_generation >= newest).then_some(status)
}

fn rolling(object: &WorkloadObject) -> bool {
    object.spec.strategy.type_.as_deref() != Some("OnDelete")
}

fn max_unavailable(object: &WorkloadObject, of: i32) -> i32 {
    let rolling_update = object.spec.strategy.rolling_update.as_ref();
    rolling_update
        .and_then(|update| update.max_unavailable.as_ref())
        .map_or(0, |value| rounded_down(value, of))
}

/// Rule for a release's workloads in the namespace `default` without that namespace in the manifest. krypton-operator
/// created them in the namespace of its kubeconfig.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strays {
    /// They count like all others, as the release itself is in `default`.
    None,
    /// krypton-operator installed the revision, so they are its workloads.
    Stand,
    /// A Krypton revision has its own workloads in the workspace. These are about to be deleted.
    Left,
}

impl Strays {
    /// Returns the rule for a release in `namespace` with the latest revision `newest`.
    pub fn of(namespace: &str, newest: Option<&Revision>) -> Self {
        match newest {
            _ if namespace == ORIGINALS_NAMESPACE => Self::None,
            Some(newest) if newest.is_foreign() => Self::Stand,
            _ => Self::Left,
        }
    }
}

/// Describes the workloads that are not ready: names a few and counts the rest. Returns `None` if all are ready.
///
/// `expected` contains the release's workloads, if known. A workload that the watch has not shown yet is not ready. A
/// release without workloads is ready as soon as it is applied.
pub fn unready(
    expected: Option<&[krypton_helm::releases::Workload]>,
    seen: &BTreeMap<WorkloadKey, WorkloadState>,
    strays: Strays,
) -> Option<String> {
    let key = |workload: &krypton_helm::releases::Workload| WorkloadKey {
        kind: workload.kind,
        namespace: workload.namespace.clone(),
        name: workload.name.clone(),
    };
    let declared: BTreeSet<WorkloadKey> = expected.unwrap_or_default().iter().map(key).collect();
    let stands = |key: &WorkloadKey| {
        strays == Strays::Stand
            && seen.contains_key(&WorkloadKey {
                namespace: ORIGINALS_NAMESPACE.to_owned(),
                ..key.clone()
            })
    };
    let missing = declared.iter();
    let missing = missing.filter(|key| !seen.contains_key(key) && !stands(key));
    let missing = missing.map(|key| (key, "not found"));
    let left = |key: &WorkloadKey| {
        strays == Strays::Left
            && expected.is_some()
            && key.namespace == ORIGINALS_NAMESPACE
            && !declared.contains(key)
    };
    let unready = seen.iter();
    let unready = unready.filter(|(key, state)| !state.ready && !left(key));
    let unready = unready.map(|(key, state)| (key, state.detail.as_str()));
    let all: Vec<String> = missing
        .chain(unready)
        .map(|(key, detail)| format!("{} {}/{}: {detail}", key.kind, key.namespace, key.name))
        .collect();
    let (named, more) = all.split_at(all.len().min(NAMED));
    match (named, more.len()) {
        ([], _) => None,
        (named, 0) => Some(named.join(", ")),
        (named, more) => Some(format!("{}, and {more} more", named.join(", "))),
    }
}

fn waiting(detail: String) -> WorkloadState {
    WorkloadState {
        ready: false,
        detail,
    }
}

fn verdict(ready: bool, detail: String) -> WorkloadState {
    WorkloadState { ready, detail }
}

/// Returns `maxUnavailable` as the Deployment controller computes it: a percentage is rounded down.
fn rounded_down(value: &IntOrString, of: i32) -> i32 {
    match value {
        IntOrString::Int(number) => *number,
        IntOrString::String(percent) => percent
            .trim_end_matches('%')
            .parse::<i32>()
            .map_or(0, |percent| of.saturating_mul(percent) / 100),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use krypton_helm::releases::Workload;

    fn deployment_with(
        replicas: i32,
        max_unavailable: &str,
        observed: i64,
        updated: i32,
        available: i32,
    ) -> WorkloadObject {
        serde_json::from_value(json!({
            "metadata": { "generation": 2 },
            "spec": {
                "replicas": replicas,
                "selector": {},
                "template": {},
                "strategy": { "rollingUpdate": { "maxUnavailable": max_unavailable } },
            },
            "status": {
                "observedGeneration": observed,
                "replicas": updated,
                "updatedReplicas": updated,
                "availableReplicas": available,
            },
        }))
        .unwrap()
    }

    fn with_older(mut object: WorkloadObject, older: i32) -> WorkloadObject {
        object.status.as_mut().unwrap().replicas += older;
        object
    }

    #[test]
    fn a_deployment_is_ready_by_helms_rule() {
        let cases = [
            (deployment_with(1, "25%", 2, 1, 1), true),
            (deployment_with(1, "25%", 2, 1, 0), false),
            (deployment_with(1, "25%", 1, 1, 1), false),
            (deployment_with(4, "25%", 2, 4, 3), true),
            (deployment_with(4, "25%", 2, 3, 4), false),
            (deployment_with(0, "25%", 2, 0, 0), true),
            // The available replica is the old one. The new one does not start.
            (with_older(deployment_with(1, "25%", 2, 1, 1), 1), false),
            (with_older(deployment_with(1, "25%", 2, 1, 2), 1), true),
            (with_older(deployment_with(4, "25%", 2, 4, 3), 1), false),
            (with_older(deployment_with(4, "25%", 2, 4, 4), 1), true),
        ];
        for (object, ready) in cases {
            assert_eq!(deployment(&object).ready, ready, "{object:?}");
        }
    }

    #[test]
    fn remaining_old_pods_are_reported() {
        let object = with_older(deployment_with(1, "25%", 2, 1, 1), 1);
        let told = deployment(&object).detail;
        assert_eq!(told, "0 of 1 new ones available, 1 old ones left");
    }

    #[test]
    fn stateful_set_waits_for_updated_and_ready_replicas() {
        let object = |updated: i32, ready: i32| -> WorkloadObject {
            serde_json::from_value(json!({
                "metadata": { "generation": 1 },
                "spec": { "replicas": 2, "selector": {}, "template": {}, "serviceName": "s" },
                "status": { "observedGeneration": 1, "replicas": 2, "updatedReplicas": updated, "readyReplicas": ready },
            }))
            .unwrap()
        };
        assert!(stateful_set(&object(2, 2)).ready);
        assert!(!stateful_set(&object(1, 2)).ready);
        assert!(!stateful_set(&object(2, 1)).ready);
    }

    #[test]
    fn daemon_set_is_ready_within_max_unavailable() {
        let object = |kind: &str, updated: i32, ready: i32| -> WorkloadObject {
            serde_json::from_value(json!({
                "metadata": { "generation": 1 },
                "spec": {
                    "template": { "spec": { "containers": [] } },
                    "updateStrategy": { "type": kind, "rollingUpdate": { "maxUnavailable": 1 } },
                },
                "status": {
                    "observedGeneration": 1,
                    "desiredNumberScheduled": 3,
                    "updatedNumberScheduled": updated,
                    "numberReady": ready,
                },
            }))
            .unwrap()
        };
        for (kind, updated, ready, expected) in [
            ("RollingUpdate", 3, 3, true),
            ("RollingUpdate", 3, 2, true),
            ("RollingUpdate", 3, 1, false),
            ("RollingUpdate", 2, 3, false),
            ("OnDelete", 0, 3, true),
        ] {
            let state = daemon_set(&object(kind, updated, ready));
            assert_eq!(state.ready, expected, "{kind} {updated} {ready}");
        }
    }

    #[test]
    fn unobserved_workload_is_not_ready() {
        let object: WorkloadObject =
            serde_json::from_value(json!({ "metadata": { "generation": 1 }, "spec": {} })).unwrap();
        for read in [deployment, stateful_set, daemon_set] {
            let state = read(&object);
            assert!(!state.ready && state.detail.contains("not yet observed"));
        }
    }

    #[test]
    fn workload_missing_from_watch_is_not_ready() {
        let expected = [Workload {
            kind: WorkloadKind::Deployment,
            namespace: "ns".to_owned(),
            name: "web".to_owned(),
        }];
        assert_eq!(
            unready(Some(&expected), &BTreeMap::new(), Strays::None).unwrap(),
            "Deployment ns/web: not found"
        );
        assert_eq!(unready(None, &BTreeMap::new(), Strays::None), None);
    }

    #[test]
    fn unready_message_names_few_and_counts_rest() {
        let seen = |ready: bool, name: &str| {
            let key = WorkloadKey {
                kind: WorkloadKind::Deployment,
                namespace: "ns".to_owned(),
                name: name.to_owned(),
            };
            (key, verdict(ready, "1 of 3 available".to_owned()))
        };
        let mut all: BTreeMap<_, _> = [seen(false, "a"), seen(true, "b"), seen(false, "c")].into();
        assert_eq!(
            unready(None, &all, Strays::None).unwrap(),
            "Deployment ns/a: 1 of 3 available, Deployment ns/c: 1 of 3 available"
        );
        all.extend(["d", "e", "f"].map(|name| seen(false, name)));
        let said = unready(None, &all, Strays::None).unwrap();
        assert!(
            said.ends_with("Deployment ns/d: 1 of 3 available, and 2 more"),
            "{said}"
        );
    }

    #[test]
    fn original_workload_in_default_counts_until_own_revision() {
        let key = |namespace: &str| WorkloadKey {
            kind: WorkloadKind::Deployment,
            namespace: namespace.to_owned(),
            name: "web".to_owned(),
        };
        let expected = [Workload {
            kind: WorkloadKind::Deployment,
            namespace: "ns".to_owned(),
            name: "web".to_owned(),
        }];
        let state = |ready: bool| verdict(ready, "0 of 1 available".to_owned());
        let in_default = |ready: bool| BTreeMap::from([(key("default"), state(ready))]);
        let both = |ready: bool| {
            BTreeMap::from([(key("default"), state(false)), (key("ns"), state(ready))])
        };
        let there = |strays, seen| unready(Some(&expected), &seen, strays);
        assert_eq!(there(Strays::Stand, in_default(true)), None);
        assert!(there(Strays::Stand, in_default(false)).is_some());
        assert!(there(Strays::Stand, BTreeMap::new()).is_some());
        // With a revision in the workspace, a workload in `default` neither replaces nor blocks another one.
        assert!(there(Strays::Left, in_default(true)).is_some());
        assert!(there(Strays::Left, both(false)).is_some());
        assert_eq!(there(Strays::Left, both(true)), None);
        // A workload that the manifest places in `default` belongs to the release.
        let placed = [Workload {
            namespace: "default".to_owned(),
            ..expected[0].clone()
        }];
        assert!(unready(Some(&placed), &in_default(false), Strays::Left).is_some());
    }
}
