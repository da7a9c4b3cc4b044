//! Sets the label [`LEADER_LABEL`] on the leader's pod. The Service for agents selects by it.
//!
//! The label only routes agents. The Lease decides which hub writes, and a standby redirects agents regardless
//! of the label. A late or missing label costs time, not safety.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use krypton_runtime::access;
use krypton_runtime::admin::Readiness;
use krypton_runtime::call::{ApiError, call_within};
use krypton_runtime::clock::{self, BootTime};
use krypton_types::error_chain::chain;
use krypton_types::names::LEADER_LABEL;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Config};
use serde_json::{Value, json};

use super::{Leader, LeaderState};
use crate::args::{LocalSource, OwnPod};
use crate::home;

const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay after a transient failure.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Interval for setting the label again. A user or another hub may have removed the label, and a rejected request may be
/// allowed by now.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
const READINESS_NOTE: &str = "leader label";

/// A change of a pod's label. The hub makes changes that are due in this order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LabelChange {
    /// Removes the label from the previous leader's pod.
    Previous(String),
    /// Sets or removes the label on the hub's own pod.
    Own(bool),
}

/// Schedules the label changes. Performs no I/O.
#[derive(Debug)]
struct LabelSchedule {
    /// Start of the current leader term.
    term_start: Option<BootTime>,
    /// The next changes, each with its time.
    due: BTreeMap<LabelChange, BootTime>,
}

impl LabelSchedule {
    /// Creates the schedule at startup. An earlier container of this pod may have led until a moment ago.
    fn new(now: BootTime) -> Self {
        Self {
            term_start: None,
            due: [(LabelChange::Own(false), now)].into(),
        }
    }

    /// Returns the next change, or the time to check again. `term` is the start of the leader term, if this hub
    /// leads, and the previous leader's pod.
    fn next(
        &mut self,
        term: Option<(BootTime, Option<&str>)>,
        now: BootTime,
    ) -> Result<LabelChange, Option<BootTime>> {
        let start = term.map(|(start, _)| start);
        if start != self.term_start {
            self.term_start = start;
            let previous_pod = term.and_then(|(_, previous_pod)| previous_pod);
            let previous = previous_pod.map(|pod| LabelChange::Previous(pod.to_owned()));
            let changes = previous
                .into_iter()
                .chain([LabelChange::Own(start.is_some())]);
            self.due = changes.map(|change| (change, now)).collect();
        }
        let due = self.due.iter().find(|(_, at)| **at <= now);
        due.map(|(change, _)| change.clone())
            .ok_or_else(|| self.due.values().min().copied())
    }

    /// Records the result of a change, and schedules its repetition.
    fn record(&mut self, change: &LabelChange, result: LabelResult, now: BootTime) {
        self.due.remove(change);
        let delay = result.repeat_after(change);
        self.due
            .extend(delay.map(|delay| (change.clone(), now + delay)));
    }
}

/// Result of a label change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LabelResult {
    Done,
    /// The pod does not exist.
    NotFound,
    Forbidden,
    Failed,
}

impl LabelResult {
    /// Returns the result of a failed request, and the message for users.
    fn from_error(pod: &str, error: &ApiError) -> (Self, String) {
        match error.status() {
            Some(status) if status.code == 403 => {
                let reason = &status.message;
                let message = format!(
                    "the hub is not allowed to label pod {pod} with {LEADER_LABEL}: {reason}, so agents cannot reach it through the Service; grant it the right to patch pods there, or install the chart with leaderElection.label=false"
                );
                (Self::Forbidden, message)
            }
            // A different UID causes a conflict or an invalid request.
            Some(status) if matches!(status.code, 404 | 409 | 422) => {
                let message = format!(
                    "pod {pod} does not exist or was replaced; check POD_NAME, KRYPTON_POD_NAMESPACE and POD_UID"
                );
                (Self::NotFound, message)
            }
            _ => (Self::Failed, chain(error)),
        }
    }

    /// Returns the delay before the change is repeated; `None` if it is not.
    fn repeat_after(self, change: &LabelChange) -> Option<Duration> {
        match (self, change) {
            (Self::Failed, _) => Some(RETRY_DELAY),
            (_, LabelChange::Own(true)) | (Self::Forbidden, LabelChange::Own(false)) => {
                Some(CHECK_INTERVAL)
            }
            (_, LabelChange::Own(false) | LabelChange::Previous(_)) => None,
        }
    }
}

/// Keeps the label on the leader's pod.
#[derive(Debug)]
pub struct LeaderLabel {
    pods: Api<Pod>,
    own: OwnPod,
    readiness: Readiness,
    /// The error that was logged last.
    reported_error: Option<String>,
    schedule: LabelSchedule,
}

impl LeaderLabel {
    /// Removes the label that an earlier container of this pod may have left, before anything else. Retries
    /// until the hub's own cluster responds.
    ///
    /// Returns `None` if the hub's pod or its cluster is unknown. The hub then leads without the label.
    pub async fn clear_stale(
        own: Option<OwnPod>,
        local: LocalSource,
        readiness: Readiness,
    ) -> Option<Self> {
        let own = own?;
        // A Service has no endpoint for a pod that is not ready, regardless of its labels.
        let starting = readiness.guard("label of the leader");
        let client = match own_cluster_client(&local).await {
            Ok(client) => client,
            Err(problem) => {
                tracing::error!(%problem, "failed to label the leader's pod");
                readiness.note(
                    READINESS_NOTE,
                    Some(format!("its pod is not labelled: {problem}")),
                );
                return None;
            }
        };
        let mut label = Self {
            pods: Api::namespaced(client, &own.namespace),
            own,
            readiness,
            reported_error: None,
            schedule: LabelSchedule::new(BootTime::now()),
        };
        let removal = LabelChange::Own(false);
        loop {
            let result = label.apply(&removal).await;
            label.schedule.record(&removal, result, BootTime::now());
            if result != LabelResult::Failed {
                break;
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
        drop(starting);
        Some(label)
    }

    /// Updates the label with the leadership, until this hub shuts down or the election ends.
    pub async fn run(mut self, mut leader: Leader) {
        loop {
            let state = leader.state();
            let leader_term = state.leader_term();
            let previous_pod = leader_term
                .and_then(|leader_term| leader_term.previous_leader.as_deref())
                .and_then(pod_name)
                .filter(|pod| *pod != self.own.name);
            let term = leader_term.map(|leader_term| (leader_term.since, previous_pod));
            match self.schedule.next(term, BootTime::now()) {
                // Another hub may lead by now and may have removed the label from this pod.
                Ok(change)
                    if matches!(state, LeaderState::Unconfirmed(_))
                        || (change == LabelChange::Own(true)
                            && !leader.may_write(BootTime::now())) =>
                {
                    self.schedule
                        .record(&change, LabelResult::Failed, BootTime::now());
                }
                Ok(change) => {
                    let result = self.apply(&change).await;
                    self.schedule.record(&change, result, BootTime::now());
                }
                // The pod is deleted together with this process.
                Err(_) if state == LeaderState::Leaving => return,
                Err(wake) => tokio::select! {
                    changed = leader.changed() => if !changed { return },
                    () = clock::sleep_until(wake, BootTime::now()) => {}
                },
            }
        }
    }

    async fn apply(&mut self, change: &LabelChange) -> LabelResult {
        let (name, patch) = match change {
            LabelChange::Own(on) => (&self.own.name, own_patch(&self.own.uid, *on)),
            LabelChange::Previous(name) => (name, previous_patch()),
        };
        let pod = format!("{}/{name}", self.own.namespace);
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let request = self.pods.patch_metadata(name, &params, &patch);
        let attempt = format!("labelling pod {pod} with {LEADER_LABEL}");
        let response = call_within(CALL_TIMEOUT, attempt, request).await;
        let failure = response
            .err()
            .map(|error| LabelResult::from_error(&pod, &error));
        let (result, problem) = failure.unzip();
        match (change, problem) {
            // A standby does not need the label, so its errors are not reported.
            (LabelChange::Own(on), problem) => self.report(problem.filter(|_| *on)),
            (LabelChange::Previous(pod), None) => {
                tracing::debug!(%pod, "removed the previous leader's label");
            }
            // The pod was deleted with its node, or never existed.
            (LabelChange::Previous(_), Some(error)) => {
                tracing::debug!(%error, "failed to remove the previous leader's label");
            }
        }
        result.unwrap_or(LabelResult::Done)
    }

    fn report(&mut self, problem: Option<String>) {
        if let Some(error) = &problem
            && self.reported_error != problem
        {
            tracing::warn!(%error, "agents may not reach the leader");
        }
        self.readiness.note(READINESS_NOTE, problem.clone());
        self.reported_error = problem;
    }
}

async fn own_cluster_client(local: &LocalSource) -> Result<Client, String> {
    let access = access::local(local, None, Config::incluster).await;
    let access = access.map_err(|error| chain(&error))?;
    home::client(access.config).map_err(|error| chain(&error))
}

/// Matches the pod by its UID, because its name may be in use again.
fn own_patch(uid: &str, on: bool) -> Value {
    let label = if on { json!("true") } else { Value::Null };
    json!({"metadata": {"uid": uid, "labels": {LEADER_LABEL: label}}})
}

/// Patches a pod that is known only by its unique name. Removing an absent label has no effect.
fn previous_patch() -> Value {
    json!({"metadata": {"labels": {LEADER_LABEL: null}}})
}

/// Returns the pod in a hub's name in the Lease, `hub/<pod>/<random>`.
fn pod_name(holder: &str) -> Option<&str> {
    let (pod, _) = holder.strip_prefix("hub/")?.rsplit_once('/')?;
    (!pod.is_empty() && !pod.contains('/')).then_some(pod)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(100 + seconds))
    }

    /// Runs all changes that are due, each with this result. Returns them and the next wake-up time.
    fn apply_due(
        schedule: &mut LabelSchedule,
        term: Option<(BootTime, Option<&str>)>,
        result: LabelResult,
        now: BootTime,
    ) -> (Vec<LabelChange>, Option<BootTime>) {
        let mut changes = Vec::new();
        loop {
            match schedule.next(term, now) {
                Ok(change) => {
                    schedule.record(&change, result, now);
                    changes.push(change);
                }
                Err(wake) => return (changes, wake),
            }
            assert!(changes.len() < 5, "{changes:?}");
        }
    }

    #[test]
    fn stale_label_is_removed_once_at_start() {
        for result in [LabelResult::Done, LabelResult::NotFound] {
            let mut schedule = LabelSchedule::new(at(0));
            let first = apply_due(&mut schedule, None, result, at(0));
            assert_eq!(first, (vec![LabelChange::Own(false)], None));
            let later = apply_due(&mut schedule, None, result, at(60));
            assert_eq!(later, (vec![], None));
        }
    }

    #[test]
    fn pod_label_follows_leader_and_is_reapplied() {
        let ok = LabelResult::Done;
        let mut schedule = LabelSchedule::new(at(0));
        apply_due(&mut schedule, None, ok, at(0));
        let term = Some((at(1), Some("hub-a")));
        let (changes, wake) = apply_due(&mut schedule, term, ok, at(1));
        let previous = LabelChange::Previous("hub-a".to_owned());
        assert_eq!(changes, [previous, LabelChange::Own(true)]);
        assert_eq!(wake, Some(at(11)));
        assert_eq!(apply_due(&mut schedule, term, ok, at(10)).0, []);
        let (changes, _) = apply_due(&mut schedule, term, ok, at(11));
        assert_eq!(changes, [LabelChange::Own(true)]);
        // The label is removed immediately when leadership is lost, and set when it is regained.
        let lost = apply_due(&mut schedule, None, ok, at(12));
        assert_eq!(lost, (vec![LabelChange::Own(false)], None));
        let (changes, _) = apply_due(&mut schedule, Some((at(13), None)), ok, at(13));
        assert_eq!(changes, [LabelChange::Own(true)]);
    }

    #[test]
    fn failed_label_change_is_retried_while_leading() {
        let own = || vec![LabelChange::Own(true)];
        let previous = LabelChange::Previous("hub-a".to_owned());
        let both = vec![previous, LabelChange::Own(true)];
        for (result, pause, repeated) in [
            (LabelResult::Failed, RETRY_DELAY, both),
            (LabelResult::Forbidden, CHECK_INTERVAL, own()),
            (LabelResult::NotFound, CHECK_INTERVAL, own()),
        ] {
            let mut schedule = LabelSchedule::new(at(0));
            apply_due(&mut schedule, None, LabelResult::Done, at(0));
            let term = Some((at(1), Some("hub-a")));
            let (changes, wake) = apply_due(&mut schedule, term, result, at(1));
            assert_eq!(changes.len(), 2);
            assert_eq!(wake, Some(at(1) + pause));
            let later = at(1) + pause;
            assert_eq!(apply_due(&mut schedule, term, result, later).0, repeated);
            // The next leader removes a leftover label.
            let lost = apply_due(&mut schedule, None, LabelResult::Done, at(30));
            assert_eq!(lost, (vec![LabelChange::Own(false)], None));
        }
    }

    #[test]
    fn failed_label_removal_is_retried() {
        for (result, pause) in [
            (LabelResult::Failed, RETRY_DELAY),
            (LabelResult::Forbidden, CHECK_INTERVAL),
        ] {
            let mut schedule = LabelSchedule::new(at(0));
            let repeated = at(0) + pause;
            let (first, wake) = apply_due(&mut schedule, None, result, at(0));
            assert_eq!(wake, Some(repeated));
            let (second, _) = apply_due(&mut schedule, None, result, repeated);
            for changes in [first, second] {
                assert_eq!(changes, [LabelChange::Own(false)]);
            }
        }
    }

    #[test]
    fn pod_name_is_parsed_from_holder() {
        for (holder, pod) in [
            ("hub/krypton-hub-5d-x/0000beef", Some("krypton-hub-5d-x")),
            ("hub//0000beef", None),
            ("hub/a/b/0000beef", None),
            ("hub/a", None),
            ("agent/a/0000beef", None),
        ] {
            assert_eq!(pod_name(holder), pod, "{holder}");
        }
    }

    #[test]
    fn label_patch_has_only_label_and_own_uid() {
        let set = r#"{"metadata":{"labels":{"mesh.openkcm.io/leader":"true"},"uid":"u"}}"#;
        let removed = r#"{"metadata":{"labels":{"mesh.openkcm.io/leader":null},"uid":"u"}}"#;
        let previous = r#"{"metadata":{"labels":{"mesh.openkcm.io/leader":null}}}"#;
        assert_eq!(own_patch("u", true).to_string(), set);
        assert_eq!(own_patch("u", false).to_string(), removed);
        assert_eq!(previous_patch().to_string(), previous);
    }
}
