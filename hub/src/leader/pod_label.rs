//! Sets the label [`LEADER_LABEL`] on the leader's pod. The Service for agents selects by it.
//!
//! The label only routes agents. The Lease decides which hub writes, and a standby redirects agents regardless
//! of the label. A late or missing label costs time, not safety.

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
use thiserror::Error;

use super::{Leader, LeaderState};
use crate::args::{LocalSource, OwnPod};
use crate::home;

const CALL: Duration = Duration::from_secs(2);
/// Delay after a transient failure.
const RETRY: Duration = Duration::from_secs(1);
/// Interval for a check. A user or another hub may have removed the label, and a rejected request may be
/// allowed by now.
const LOOK_EVERY: Duration = Duration::from_secs(10);
const ABOUT: &str = "leader label";

#[derive(Debug, Error)]
pub enum LabelError {
    #[error(
        "the hub is not allowed to label pod {pod} with {LEADER_LABEL}: {reason}, so agents cannot reach it through the Service; grant it the right to patch pods there, or install the chart with leaderElection.label=false"
    )]
    Forbidden { pod: String, reason: String },
    #[error(
        "pod {pod} does not exist or was replaced; check POD_NAME, KRYPTON_POD_NAMESPACE and POD_UID"
    )]
    Gone { pod: String },
    #[error(transparent)]
    Api(ApiError),
}

impl LabelError {
    fn of(pod: String, error: ApiError) -> Self {
        match error.status() {
            Some(status) if status.code == 403 => Self::Forbidden {
                pod,
                reason: status.message.clone(),
            },
            // A different UID causes a conflict or an invalid request.
            Some(status) if matches!(status.code, 404 | 409 | 422) => Self::Gone { pod },
            _ => Self::Api(error),
        }
    }
}

/// A change of a pod's label.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LabelChange {
    /// Sets or removes the label on the hub's own pod.
    Own(bool),
    /// Removes the label from the previous leader's pod.
    Former(String),
}

/// Schedules the label changes. Performs no I/O.
#[derive(Debug)]
struct Course {
    /// Start of the current leader term.
    led_since: Option<BootTime>,
    /// Time of the next change of the own pod.
    own: Option<BootTime>,
    /// The pod that must lose the label, and the time of that change.
    former: Option<(String, BootTime)>,
}

impl Course {
    /// Creates the schedule at startup. An earlier container of this pod may have led until a moment ago.
    fn new(now: BootTime) -> Self {
        Self {
            led_since: None,
            own: Some(now),
            former: None,
        }
    }

    /// Returns the next change, or the time to check again. `lead` is the start of the term, if this hub leads,
    /// and the previous leader's pod.
    fn next(
        &mut self,
        lead: Option<(BootTime, Option<&str>)>,
        now: BootTime,
    ) -> Result<LabelChange, Option<BootTime>> {
        let since = lead.map(|(since, _)| since);
        if since != self.led_since {
            self.led_since = since;
            self.own = Some(now);
            let former = lead.and_then(|(_, former)| former);
            self.former = former.map(|former| (former.to_owned(), now));
        }
        if let Some((former, at)) = &self.former
            && *at <= now
        {
            return Ok(LabelChange::Former(former.clone()));
        }
        if self.own.is_some_and(|at| at <= now) {
            return Ok(LabelChange::Own(since.is_some()));
        }
        let former = self.former.as_ref().map(|(_, at)| *at);
        Err(self.own.into_iter().chain(former).min())
    }

    fn did(&mut self, label_change: &LabelChange, went: Went, now: BootTime) {
        let again = went
            .again(label_change)
            .map(|pause| BootTime(now.0 + pause));
        match label_change {
            LabelChange::Own(_) => self.own = again,
            LabelChange::Former(former) => self.former = again.map(|at| (former.clone(), at)),
        }
    }
}

/// Result of a label change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Went {
    Well,
    /// The pod does not exist.
    Nowhere,
    Refused,
    Badly,
}

impl Went {
    pub(crate) fn of(done: &Result<(), LabelError>) -> Self {
        match done {
            Ok(()) => Self::Well,
            Err(LabelError::Gone { .. }) => Self::Nowhere,
            Err(LabelError::Forbidden { .. }) => Self::Refused,
            Err(LabelError::Api(_)) => Self::Badly,
        }
    }

    /// Returns the delay before the change is repeated; `None` if it is not.
    fn again(self, label_change: &LabelChange) -> Option<Duration> {
        match (self, label_change) {
            (Self::Badly, _) => Some(RETRY),
            (_, LabelChange::Own(true)) | (Self::Refused, LabelChange::Own(false)) => {
                Some(LOOK_EVERY)
            }
            (_, LabelChange::Own(false) | LabelChange::Former(_)) => None,
        }
    }
}

/// Keeps the label on the leader's pod.
#[derive(Debug)]
pub struct Label {
    pods: Api<Pod>,
    own: OwnPod,
    readiness: Readiness,
    told: Option<String>,
    course: Course,
}

impl Label {
    /// Removes the label that an earlier container of this pod may have left, before anything else. Retries
    /// until the hub's own cluster responds.
    ///
    /// Returns `None` if the hub's pod or its cluster is unknown. The hub then leads without the label.
    pub async fn cleared(
        own: Option<OwnPod>,
        local: LocalSource,
        readiness: Readiness,
    ) -> Option<Self> {
        let own = own?;
        // A Service has no endpoint for a pod that is not ready, regardless of its labels.
        let starting = readiness.guard("label of the leader");
        let client = match own_cluster(&local).await {
            Ok(client) => client,
            Err(problem) => {
                tracing::error!(%problem, "the leader's pod gets no label; the agents' Service does not route to it");
                readiness.note(ABOUT, Some(format!("its pod is not labelled: {problem}")));
                return None;
            }
        };
        let mut label = Self {
            pods: Api::namespaced(client, &own.namespace),
            own,
            readiness,
            told: None,
            course: Course::new(BootTime::now()),
        };
        let off = LabelChange::Own(false);
        loop {
            let went = label.carry_out(&off).await;
            label.course.did(&off, went, BootTime::now());
            if went != Went::Badly {
                break;
            }
            tokio::time::sleep(RETRY).await;
        }
        drop(starting);
        Some(label)
    }

    /// Updates the label with the leadership, until this hub shuts down or the election ends.
    pub async fn keep(mut self, mut lead: Leader) {
        loop {
            let stand = lead.stand();
            let leader_term = stand.leader_term();
            let former = leader_term.and_then(|leader_term| leader_term.former.as_deref());
            let former = former.and_then(pod_of).filter(|pod| *pod != self.own.name);
            let leads = leader_term.map(|leader_term| (leader_term.since, former));
            match self.course.next(leads, BootTime::now()) {
                // Another hub may lead by now and may have removed the label from this pod.
                Ok(label_change)
                    if matches!(stand, LeaderState::Unconfirmed(_))
                        || (label_change == LabelChange::Own(true)
                            && !lead.writes(BootTime::now())) =>
                {
                    self.course.did(&label_change, Went::Badly, BootTime::now());
                }
                Ok(label_change) => {
                    let went = self.carry_out(&label_change).await;
                    self.course.did(&label_change, went, BootTime::now());
                }
                // The pod is deleted together with this process.
                Err(_) if stand == LeaderState::Leaving => return,
                Err(wake) => tokio::select! {
                    changed = lead.changed() => if !changed { return },
                    () = clock::sleep_until(wake, BootTime::now()) => {}
                },
            }
        }
    }

    async fn carry_out(&mut self, label_change: &LabelChange) -> Went {
        let (name, patch) = match label_change {
            LabelChange::Own(on) => (&self.own.name, own_patch(&self.own.uid, *on)),
            LabelChange::Former(name) => (name, former_patch()),
        };
        let pod = format!("{}/{name}", self.own.namespace);
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let request = self.pods.patch_metadata(name, &params, &patch);
        let attempt = format!("labelling pod {pod} with {LEADER_LABEL}");
        let done = call_within(CALL, attempt, request).await;
        let done = done.map(drop).map_err(|error| LabelError::of(pod, error));
        let went = Went::of(&done);
        match label_change {
            // A standby does not need the label, so its errors are not reported.
            LabelChange::Own(on) => self.tell(done.as_ref().err().filter(|_| *on)),
            // The pod was deleted with its node, or never existed.
            LabelChange::Former(pod) => match &done {
                Ok(()) => tracing::debug!(%pod, "the hub that led before has the label no more"),
                Err(error) => {
                    tracing::debug!(error = %chain(error), "the label of the hub that led before")
                }
            },
        }
        went
    }

    fn tell(&mut self, error: Option<&LabelError>) {
        let text = error.map(|error| chain(error));
        if let Some(text) = text
            .as_ref()
            .filter(|text| self.told.as_ref() != Some(*text))
        {
            tracing::warn!(error = %text, "agents may not reach the leader");
        }
        self.readiness.note(ABOUT, text.clone());
        self.told = text;
    }
}

async fn own_cluster(local: &LocalSource) -> Result<Client, String> {
    let found = access::local(local, None, Config::incluster).await;
    let found = found.map_err(|error| chain(&error))?;
    home::client(found.config).map_err(|error| chain(&error))
}

/// Matches the pod by its UID, because its name may be in use again.
fn own_patch(uid: &str, on: bool) -> Value {
    let label = if on { json!("true") } else { Value::Null };
    json!({"metadata": {"uid": uid, "labels": {LEADER_LABEL: label}}})
}

/// Patches a pod that is known only by its unique name. Removing an absent label has no effect.
fn former_patch() -> Value {
    json!({"metadata": {"labels": {LEADER_LABEL: null}}})
}

/// Returns the pod in a hub's name in the Lease, `hub/<pod>/<random>`.
fn pod_of(holder: &str) -> Option<&str> {
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
    fn done(
        course: &mut Course,
        lead: Option<(BootTime, Option<&str>)>,
        went: Went,
        now: BootTime,
    ) -> (Vec<LabelChange>, Option<BootTime>) {
        let mut label_changes = Vec::new();
        loop {
            match course.next(lead, now) {
                Ok(label_change) => {
                    course.did(&label_change, went, now);
                    label_changes.push(label_change);
                }
                Err(wake) => return (label_changes, wake),
            }
            assert!(label_changes.len() < 5, "{label_changes:?}");
        }
    }

    #[test]
    fn stale_label_is_removed_once_at_start() {
        for went in [Went::Well, Went::Nowhere] {
            let mut course = Course::new(at(0));
            let first = done(&mut course, None, went, at(0));
            assert_eq!(first, (vec![LabelChange::Own(false)], None));
            assert_eq!(done(&mut course, None, went, at(60)), (vec![], None));
        }
    }

    #[test]
    fn pod_label_follows_leader_and_is_reapplied() {
        let well = Went::Well;
        let mut course = Course::new(at(0));
        done(&mut course, None, well, at(0));
        let lead = Some((at(1), Some("hub-a")));
        let (label_changes, wake) = done(&mut course, lead, well, at(1));
        assert_eq!(
            label_changes,
            [
                LabelChange::Former("hub-a".to_owned()),
                LabelChange::Own(true)
            ]
        );
        assert_eq!(wake, Some(at(11)));
        assert_eq!(done(&mut course, lead, well, at(10)).0, []);
        assert_eq!(
            done(&mut course, lead, well, at(11)).0,
            [LabelChange::Own(true)]
        );
        // The label is removed immediately when leadership is lost, and set when it is regained.
        let lost = done(&mut course, None, well, at(12));
        assert_eq!(lost, (vec![LabelChange::Own(false)], None));
        let (label_changes, _) = done(&mut course, Some((at(13), None)), well, at(13));
        assert_eq!(label_changes, [LabelChange::Own(true)]);
    }

    #[test]
    fn failed_label_change_is_retried_while_leading() {
        let (own, former) = (
            LabelChange::Own(true),
            LabelChange::Former("hub-a".to_owned()),
        );
        for (went, pause, again) in [
            (Went::Badly, RETRY, vec![former, own.clone()]),
            (Went::Refused, LOOK_EVERY, vec![own.clone()]),
            (Went::Nowhere, LOOK_EVERY, vec![own]),
        ] {
            let mut course = Course::new(at(0));
            done(&mut course, None, Went::Well, at(0));
            let lead = Some((at(1), Some("hub-a")));
            let (label_changes, wake) = done(&mut course, lead, went, at(1));
            assert_eq!(label_changes.len(), 2);
            assert_eq!(wake, Some(BootTime(at(1).0 + pause)));
            let later = BootTime(at(1).0 + pause);
            assert_eq!(done(&mut course, lead, went, later).0, again);
            // The next leader removes a leftover label.
            let lost = done(&mut course, None, Went::Well, at(30));
            assert_eq!(lost, (vec![LabelChange::Own(false)], None));
        }
    }

    #[test]
    fn failed_label_removal_is_retried() {
        for (went, pause) in [(Went::Badly, RETRY), (Went::Refused, LOOK_EVERY)] {
            let mut course = Course::new(at(0));
            let (label_changes, wake) = done(&mut course, None, went, at(0));
            let again = BootTime(at(0).0 + pause);
            assert_eq!(
                (label_changes, wake),
                (vec![LabelChange::Own(false)], Some(again))
            );
            assert_eq!(
                done(&mut course, None, went, again).0,
                [LabelChange::Own(false)]
            );
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
            assert_eq!(pod_of(holder), pod, "{holder}");
        }
    }

    #[test]
    fn label_patch_has_only_label_and_own_uid() {
        assert_eq!(
            own_patch("u", true).to_string(),
            r#"{"metadata":{"labels":{"mesh.openkcm.io/leader":"true"},"uid":"u"}}"#
        );
        assert_eq!(
            own_patch("u", false).to_string(),
            r#"{"metadata":{"labels":{"mesh.openkcm.io/leader":null},"uid":"u"}}"#
        );
        assert_eq!(
            former_patch().to_string(),
            r#"{"metadata":{"labels":{"mesh.openkcm.io/leader":null}}}"#
        );
    }
}
