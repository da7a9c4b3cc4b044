//! Readiness of a release's workloads, by Helm's rule for `--wait`, from the existing watch.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{ORIGINALS_NAMESPACE, Workload, WorkloadKind};
use kube::core::Object;
use serde::Deserialize;

/// Maximum number of unready workloads to name.
const MAX_NAMED: usize = 3;

/// A Deployment, StatefulSet or DaemonSet with only the fields that readiness needs. A pod template is the largest part
/// of each object, and its decoder is a large part of a small agent.
pub type WorkloadObject = Object<WorkloadSpec, WorkloadStatus>;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WorkloadSpec {
    replicas: Option<i32>,
    /// A Deployment has this field. The other kinds have an `updateStrategy`.
    #[serde(alias = "updateStrategy")]
    strategy: UpdateStrategy,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct UpdateStrategy {
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
pub struct WorkloadStatus {
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
pub type WorkloadKey = Workload;

/// Readiness of a workload. The objects themselves are not stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadState {
    pub ready: bool,
    /// Text for messages, such as "0 of 1 available".
    pub detail: String,
}

/// Returns the readiness of a workload by the rule for its kind.
pub fn readiness(kind: WorkloadKind, object: &WorkloadObject) -> WorkloadState {
    let Some(status) = observed_status(object) else {
        return workload_state(false, "not yet observed by its controller".to_owned());
    };
    match kind {
        WorkloadKind::Deployment => deployment(&object.spec, status),
        WorkloadKind::StatefulSet => stateful_set(&object.spec, status),
        WorkloadKind::DaemonSet => daemon_set(&object.spec, status),
    }
}

/// All replicas must have the latest template, and at least `replicas - maxUnavailable` of them must be available. This
/// is Helm's `deploymentReady`, which reads the newest ReplicaSet.
///
/// The status of a Deployment counts the available replicas of all ReplicaSets. The old replicas are subtracted.
fn deployment(spec: &WorkloadSpec, status: &WorkloadStatus) -> WorkloadState {
    let desired = spec.replicas.unwrap_or(1);
    let (updated, available) = (status.updated_replicas, status.available_replicas);
    if updated < desired {
        return workload_state(false, format!("{updated} of {desired} replicas updated"));
    }
    let older = (status.replicas - updated).max(0);
    let new = (available - older).max(0);
    let detail = match older {
        0 => format!("{available} of {desired} available"),
        older => format!("{new} of {desired} new ones available, {older} old ones left"),
    };
    workload_state(new >= desired - max_unavailable(spec, desired), detail)
}

/// All replicas must be ready, and those above the partition updated.
fn stateful_set(spec: &WorkloadSpec, status: &WorkloadStatus) -> WorkloadState {
    let desired = spec.replicas.unwrap_or(1);
    let rolling_update = spec.strategy.rolling_update.as_ref();
    let partition = rolling_update.and_then(|update| update.partition);
    let to_update = desired - partition.unwrap_or(0);
    let (updated, ready) = (status.updated_replicas, status.ready_replicas);
    if is_rolling_update(spec) && updated < to_update {
        return workload_state(false, format!("{updated} of {to_update} replicas updated"));
    }
    workload_state(ready >= desired, format!("{ready} of {desired} ready"))
}

/// All pods must be updated, and all but `maxUnavailable` ready.
fn daemon_set(spec: &WorkloadSpec, status: &WorkloadStatus) -> WorkloadState {
    let desired = status.desired_number_scheduled;
    let (updated, ready) = (status.updated_number_scheduled, status.number_ready);
    if is_rolling_update(spec) && updated < desired {
        return workload_state(false, format!("{updated} of {desired} pods updated"));
    }
    workload_state(
        ready >= desired - max_unavailable(spec, desired),
        format!("{ready} of {desired} ready"),
    )
}

/// Returns the status, if it reflects the latest spec.
fn observed_status(object: &WorkloadObject) -> Option<&WorkloadStatus> {
    let newest = object.metadata.generation.unwrap_or(0);
    let status = object.status.as_ref()?;
    (status.observed_generation >= newest).then_some(status)
}

fn is_rolling_update(spec: &WorkloadSpec) -> bool {
    spec.strategy.type_.as_deref() != Some("OnDelete")
}

fn max_unavailable(spec: &WorkloadSpec, replicas: i32) -> i32 {
    let rolling_update = spec.strategy.rolling_update.as_ref();
    rolling_update
        .and_then(|update| update.max_unavailable.as_ref())
        .map_or(0, |value| rounded_down(value, replicas))
}

/// Rule for a release's workloads in the namespace `default` without that namespace in the manifest. krypton-operator
/// created them in the namespace of its kubeconfig.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StrayRule {
    /// They count like all others, as the release itself is in `default`.
    Counted,
    /// krypton-operator installed the revision, so they are its workloads.
    Current,
    /// A Krypton revision has its own workloads in the workspace. These are about to be deleted.
    Leftover,
}

impl StrayRule {
    /// Returns the rule for a release in `namespace` with the latest revision `newest`.
    pub fn for_release(namespace: &str, newest: Option<&Revision>) -> Self {
        match newest {
            _ if namespace == ORIGINALS_NAMESPACE => Self::Counted,
            Some(newest) if newest.is_foreign() => Self::Current,
            _ => Self::Leftover,
        }
    }
}

/// Describes the workloads that are not ready: names a few and counts the rest. Returns `None` if all are ready.
///
/// `expected` contains the release's workloads, if known. A workload that the watch has not shown yet is not ready. A
/// release without workloads is ready as soon as it is applied.
pub fn unready(
    expected: Option<&[Workload]>,
    states: &BTreeMap<WorkloadKey, WorkloadState>,
    stray_rule: StrayRule,
) -> Option<String> {
    let declared: BTreeSet<&WorkloadKey> = expected.unwrap_or_default().iter().collect();
    let runs_in_default = |key: &WorkloadKey| {
        stray_rule == StrayRule::Current
            && states.contains_key(&WorkloadKey {
                namespace: ORIGINALS_NAMESPACE.to_owned(),
                ..key.clone()
            })
    };
    let missing = declared.iter().copied();
    let missing = missing.filter(|key| !states.contains_key(key) && !runs_in_default(key));
    let missing = missing.map(|key| (key, "not found"));
    let is_leftover = |key: &WorkloadKey| {
        stray_rule == StrayRule::Leftover
            && expected.is_some()
            && key.namespace == ORIGINALS_NAMESPACE
            && !declared.contains(key)
    };
    let unready = states.iter();
    let unready = unready.filter(|(key, state)| !state.ready && !is_leftover(key));
    let unready = unready.map(|(key, state)| (key, state.detail.as_str()));
    let descriptions: Vec<String> = missing
        .chain(unready)
        .map(|(key, detail)| format!("{} {}/{}: {detail}", key.kind, key.namespace, key.name))
        .collect();
    let (shown, more) = descriptions.split_at(descriptions.len().min(MAX_NAMED));
    match (shown, more.len()) {
        ([], _) => None,
        (shown, 0) => Some(shown.join(", ")),
        (shown, more) => Some(format!("{}, and {more} more", shown.join(", "))),
    }
}

fn workload_state(ready: bool, detail: String) -> WorkloadState {
    WorkloadState { ready, detail }
}

/// Returns `maxUnavailable` as the Deployment controller computes it: a percentage is rounded down.
fn rounded_down(value: &IntOrString, total: i32) -> i32 {
    match value {
        IntOrString::Int(number) => *number,
        IntOrString::String(percent) => percent
            .trim_end_matches('%')
            .parse::<i32>()
            .map_or(0, |percent| total.saturating_mul(percent) / 100),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn deployment_key(namespace: &str, name: &str) -> WorkloadKey {
        WorkloadKey {
            kind: WorkloadKind::Deployment,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }

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
            let state = readiness(WorkloadKind::Deployment, &object);
            assert_eq!(state.ready, ready, "{object:?}");
        }
    }

    #[test]
    fn remaining_old_pods_are_reported() {
        let object = with_older(deployment_with(1, "25%", 2, 1, 1), 1);
        let detail = readiness(WorkloadKind::Deployment, &object).detail;
        assert_eq!(detail, "0 of 1 new ones available, 1 old ones left");
    }

    #[test]
    fn stateful_set_waits_for_updated_and_ready_replicas() {
        for (updated, ready, expected) in [(2, 2, true), (1, 2, false), (2, 1, false)] {
            let object = json!({
                "metadata": { "generation": 1 },
                "spec": { "replicas": 2, "selector": {}, "template": {}, "serviceName": "s" },
                "status": { "observedGeneration": 1, "replicas": 2, "updatedReplicas": updated, "readyReplicas": ready },
            });
            let object = serde_json::from_value(object).unwrap();
            let state = readiness(WorkloadKind::StatefulSet, &object);
            assert_eq!(state.ready, expected, "{updated} {ready}");
        }
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
            let state = readiness(WorkloadKind::DaemonSet, &object(kind, updated, ready));
            assert_eq!(state.ready, expected, "{kind} {updated} {ready}");
        }
    }

    #[test]
    fn unobserved_workload_is_not_ready() {
        let object: WorkloadObject =
            serde_json::from_value(json!({ "metadata": { "generation": 1 }, "spec": {} })).unwrap();
        for kind in [
            WorkloadKind::Deployment,
            WorkloadKind::StatefulSet,
            WorkloadKind::DaemonSet,
        ] {
            let state = readiness(kind, &object);
            assert!(!state.ready && state.detail.contains("not yet observed"));
        }
    }

    #[test]
    fn workload_missing_from_watch_is_not_ready() {
        let expected = [deployment_key("ns", "web")];
        let message = unready(Some(&expected), &BTreeMap::new(), StrayRule::Counted);
        assert_eq!(message.unwrap(), "Deployment ns/web: not found");
        assert_eq!(unready(None, &BTreeMap::new(), StrayRule::Counted), None);
    }

    #[test]
    fn unready_message_names_few_and_counts_rest() {
        let entry = |ready: bool, name: &str| {
            let state = workload_state(ready, "1 of 3 available".to_owned());
            (deployment_key("ns", name), state)
        };
        let mut states: BTreeMap<_, _> =
            [entry(false, "a"), entry(true, "b"), entry(false, "c")].into();
        assert_eq!(
            unready(None, &states, StrayRule::Counted).unwrap(),
            "Deployment ns/a: 1 of 3 available, Deployment ns/c: 1 of 3 available"
        );
        states.extend(["d", "e", "f"].map(|name| entry(false, name)));
        let message = unready(None, &states, StrayRule::Counted).unwrap();
        assert!(
            message.ends_with("Deployment ns/d: 1 of 3 available, and 2 more"),
            "{message}"
        );
    }

    #[test]
    fn original_workload_in_default_counts_until_own_revision() {
        let key = |namespace: &str| deployment_key(namespace, "web");
        let expected = [deployment_key("ns", "web")];
        let state = |ready: bool| workload_state(ready, "0 of 1 available".to_owned());
        let in_default = |ready: bool| BTreeMap::from([(key("default"), state(ready))]);
        let both = |ready: bool| {
            BTreeMap::from([(key("default"), state(false)), (key("ns"), state(ready))])
        };
        let unready_with = |rule, states| unready(Some(&expected), &states, rule);
        assert_eq!(unready_with(StrayRule::Current, in_default(true)), None);
        assert!(unready_with(StrayRule::Current, in_default(false)).is_some());
        assert!(unready_with(StrayRule::Current, BTreeMap::new()).is_some());
        // With a revision in the workspace, a workload in `default` neither replaces nor blocks another one.
        assert!(unready_with(StrayRule::Leftover, in_default(true)).is_some());
        assert!(unready_with(StrayRule::Leftover, both(false)).is_some());
        assert_eq!(unready_with(StrayRule::Leftover, both(true)), None);
        // A workload that the manifest places in `default` belongs to the release.
        let placed = [key("default")];
        assert!(unready(Some(&placed), &in_default(false), StrayRule::Leftover).is_some());
    }
}
