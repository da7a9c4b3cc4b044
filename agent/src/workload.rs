//! When a workload of a release counts as ready: Helm's own rule for `--wait`, on the watch we have anyway.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::release::WorkloadKind;

/// Names a workload within one release.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkloadKey {
    pub kind: WorkloadKind,
    pub namespace: String,
    pub name: String,
}

/// What readiness needs of a workload, and no more: the objects themselves are not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadState {
    pub ready: bool,
    /// "0 of 1 available", for people.
    pub detail: String,
}

/// A Deployment is ready when all its replicas are of the newest template and at least
/// `replicas - maxUnavailable` of them are available (helm's `deploymentReady`).
pub fn deployment(object: &Deployment) -> WorkloadState {
    let spec = object.spec.as_ref();
    let status = object.status.as_ref();
    let wanted = spec.and_then(|spec| spec.replicas).unwrap_or(1);
    let max_unavailable = spec
        .and_then(|spec| spec.strategy.as_ref())
        .and_then(|strategy| strategy.rolling_update.as_ref())
        .and_then(|update| update.max_unavailable.as_ref())
        .map_or(0, |value| rounded_down(value, wanted));
    let available = status
        .and_then(|status| status.available_replicas)
        .unwrap_or(0);
    let updated = status
        .and_then(|status| status.updated_replicas)
        .unwrap_or(0);
    let observed = status
        .and_then(|status| status.observed_generation)
        .unwrap_or(0);
    if observed < object.metadata.generation.unwrap_or(0) {
        return waiting("not yet observed by its controller".to_owned());
    }
    if updated < wanted {
        return waiting(format!("{updated} of {wanted} replicas updated"));
    }
    verdict(
        available >= wanted - max_unavailable,
        format!("{available} of {wanted} available"),
    )
}

/// A StatefulSet is ready when its replicas above the partition are updated and all are ready.
pub fn stateful_set(object: &StatefulSet) -> WorkloadState {
    let spec = object.spec.as_ref();
    let status = object.status.as_ref();
    let wanted = spec.and_then(|spec| spec.replicas).unwrap_or(1);
    let strategy = spec.and_then(|spec| spec.update_strategy.as_ref());
    let rolling = strategy.and_then(|strategy| strategy.type_.as_deref()) != Some("OnDelete");
    let partition = strategy
        .and_then(|strategy| strategy.rolling_update.as_ref())
        .and_then(|update| update.partition)
        .unwrap_or(0);
    let observed = status
        .and_then(|status| status.observed_generation)
        .unwrap_or(0);
    if observed < object.metadata.generation.unwrap_or(0) {
        return waiting("not yet observed by its controller".to_owned());
    }
    let updated = status
        .and_then(|status| status.updated_replicas)
        .unwrap_or(0);
    if rolling && updated < wanted - partition {
        return waiting(format!(
            "{updated} of {} replicas updated",
            wanted - partition
        ));
    }
    let ready = status.and_then(|status| status.ready_replicas).unwrap_or(0);
    verdict(ready >= wanted, format!("{ready} of {wanted} ready"))
}

/// A DaemonSet is ready when all but `maxUnavailable` of its pods are updated and ready.
pub fn daemon_set(object: &DaemonSet) -> WorkloadState {
    let strategy = object
        .spec
        .as_ref()
        .and_then(|spec| spec.update_strategy.as_ref());
    let rolling = strategy.and_then(|strategy| strategy.type_.as_deref()) != Some("OnDelete");
    let Some(status) = object.status.as_ref() else {
        return waiting("not yet observed by its controller".to_owned());
    };
    if status.observed_generation.unwrap_or(0) < object.metadata.generation.unwrap_or(0) {
        return waiting("not yet observed by its controller".to_owned());
    }
    let wanted = status.desired_number_scheduled;
    let updated = status.updated_number_scheduled.unwrap_or(0);
    if rolling && updated < wanted {
        return waiting(format!("{updated} of {wanted} pods updated"));
    }
    let max_unavailable = strategy
        .and_then(|strategy| strategy.rolling_update.as_ref())
        .and_then(|update| update.max_unavailable.as_ref())
        .map_or(0, |value| rounded_down(value, wanted));
    let ready = status.number_ready;
    verdict(
        ready >= wanted - max_unavailable,
        format!("{ready} of {wanted} ready"),
    )
}

/// The first workload that is not ready, in words; `None` when all are.
/// `expected` are the release's workloads where they are known: one that the watch has not shown yet
/// is not ready. A release without workloads is ready as soon as it is applied.
pub fn unready(
    expected: Option<&[crate::release::Workload]>,
    seen: &BTreeMap<WorkloadKey, WorkloadState>,
) -> Option<String> {
    for workload in expected.unwrap_or_default() {
        let key = WorkloadKey {
            kind: workload.kind,
            namespace: workload.namespace.clone(),
            name: workload.name.clone(),
        };
        if !seen.contains_key(&key) {
            return Some(format!(
                "{} {}/{}: not found",
                key.kind, key.namespace, key.name
            ));
        }
    }
    seen.iter()
        .find(|(_, state)| !state.ready)
        .map(|(key, state)| {
            format!(
                "{} {}/{}: {}",
                key.kind, key.namespace, key.name, state.detail
            )
        })
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

/// `maxUnavailable` as the Deployment controller reads it: a percentage is rounded down.
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
    use crate::release::Workload;

    fn deployment_with(
        replicas: i32,
        max_unavailable: &str,
        observed: i64,
        updated: i32,
        available: i32,
    ) -> Deployment {
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
                "updatedReplicas": updated,
                "availableReplicas": available,
            },
        }))
        .unwrap()
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
        ];
        for (object, ready) in cases {
            assert_eq!(deployment(&object).ready, ready, "{object:?}");
        }
    }

    #[test]
    fn a_stateful_set_waits_for_updated_and_ready_replicas() {
        let object = |updated: i32, ready: i32| -> StatefulSet {
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
    fn a_workload_that_the_watch_has_not_shown_is_not_ready() {
        let expected = [Workload {
            kind: WorkloadKind::Deployment,
            namespace: "ns".to_owned(),
            name: "web".to_owned(),
        }];
        assert_eq!(
            unready(Some(&expected), &BTreeMap::new()).unwrap(),
            "Deployment ns/web: not found"
        );
        assert_eq!(unready(None, &BTreeMap::new()), None);
    }
}
