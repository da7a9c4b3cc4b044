//! Reports of a member on one Tenant.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use krypton_crds::tenant::{HistoryEntry, NextStep, TenantStatus};
use serde::{Deserialize, Serialize};

use crate::conditions::{ClusterState, MESSAGE_MAX, State};
use crate::labels::Labels;
use crate::text::truncate;

/// Longest reconcile request that Krypton acknowledges, in bytes.
pub const REQUEST_MAX: usize = 256;

/// Namespace and name of a Tenant, the same on every member.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TenantKey {
    pub namespace: String,
    pub name: String,
}

impl TenantKey {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for TenantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The times at which a Tenant was created and deleted, in whole seconds.
#[derive(Clone, Copy, Debug)]
pub struct Lifetime {
    created: Option<Timestamp>,
    deleted: Option<Timestamp>,
}

impl Lifetime {
    #[must_use]
    pub fn new(metadata: &ObjectMeta) -> Self {
        let instant = |time: &Option<Time>| time.as_ref().map(|time| time.0);
        Self {
            created: instant(&metadata.creation_timestamp),
            deleted: instant(&metadata.deletion_timestamp),
        }
    }

    /// Whether the Tenant was deleted before its CRD was created, and so together with an earlier CRD. A client then
    /// removed that CRD's finalizer, and etcd kept the Tenant. If both happened in the same second, only a Tenant of an
    /// earlier CRD is older than the CRD.
    #[must_use]
    pub fn ended_before(self, crd_created: Option<Timestamp>) -> bool {
        let Some((deleted, crd_created)) = self.deleted.zip(crd_created) else {
            return false;
        };
        let is_older = self.created.is_some_and(|created| created < crd_created);
        deleted < crd_created || (deleted == crd_created && is_older)
    }
}

/// The latest report of one member on one Tenant. It replaces all earlier ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantReport {
    /// `metadata.generation` of the reported Tenant on the member.
    pub observed_generation: i64,
    /// `status.lastAppliedChart`. Empty until a chart has been applied.
    pub applied_chart: String,
    pub state: ClusterState,
    /// The Tenant's labels. Without labels, versions that do not know the field compute the same digest.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// The member's next automatic step after a failure or while it waits. No digest contains it, so versions that do
    /// not know the field compute the same digest.
    #[serde(skip)]
    pub next: Option<UpcomingStep>,
    /// The reconcile request that the member handled last: the value of the annotation. No digest contains it.
    #[serde(skip)]
    pub handled_request: Option<String>,
    /// `status.history`. Set only by the reconciler of the home cluster, because it would take too much memory for the
    /// Tenants of all members. No digest contains it.
    #[serde(skip)]
    pub history: Option<Arc<TenantHistory>>,
}

/// The `status.history` of one Tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantHistory {
    /// UID of the Tenant. One that was deleted and created again has another history.
    pub uid: String,
    pub entries: Vec<HistoryEntry>,
}

/// The next step that a member takes for a Tenant or KryptonDeployment automatically, unless something changes before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpcomingStep {
    pub step: UpcomingStepKind,
    /// Time of the step in whole seconds, by the member's wall clock. `None` if no time is set.
    pub at: Option<Timestamp>,
    /// Number of consecutive failed attempts.
    pub attempts: u32,
}

/// Kind of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpcomingStepKind {
    /// Retry the failed action.
    Retry,
    /// Take over the release from its current holder.
    Unlock,
    /// No step until the chart, the values or the Tenant changes, or a user requests a retry.
    GivenUp,
    /// Stop waiting for the workloads to become ready.
    Wait,
}

/// Times that differ by less count as equal: each is computed from a monotonic clock, which drifts from the wall
/// clock.
const SAME_TIME_SECONDS: i64 = 2;

impl UpcomingStep {
    /// Creates a step with its time rounded to whole seconds.
    #[must_use]
    pub fn new(step: UpcomingStepKind, at: Option<Timestamp>, attempts: u32) -> Self {
        let round = |at: Timestamp| {
            let second = at.as_millisecond().saturating_add(500).div_euclid(1000);
            Timestamp::from_second(second).unwrap_or(at)
        };
        Self {
            step,
            at: at.map(round),
            attempts,
        }
    }

    /// Like [`UpcomingStep::new`], with the time in seconds since 1970. Returns `None` if that time is out of range.
    /// The API server rejects a time before 1970 with a negative year, and the rest of the status with it.
    pub fn at_second(step: UpcomingStepKind, second: Option<i64>, attempts: u32) -> Option<Self> {
        let at = second.map(Timestamp::from_second).transpose().ok()?;
        if at.is_some_and(|at| at < Timestamp::UNIX_EPOCH) {
            return None;
        }
        Some(Self::new(step, at, attempts))
    }

    /// Reads the next step of `cluster` from a status. Returns `None` if this version does not know the step.
    pub fn from_status(status: &TenantStatus, cluster: &str) -> Option<Self> {
        let recorded = status
            .next_steps
            .iter()
            .find(|next| next.cluster == cluster)?;
        let at = recorded.at.as_ref().map(|at| at.0);
        Some(Self::new(
            UpcomingStepKind::parse(&recorded.action)?,
            at,
            recorded.attempts,
        ))
    }

    /// Converts the next step of `cluster` into its form in the status.
    pub fn in_status(self, cluster: &str) -> NextStep {
        NextStep {
            cluster: cluster.to_owned(),
            action: self.step.as_str().to_owned(),
            at: self.at.map(Time),
            attempts: self.attempts,
        }
    }

    /// Time of the step in seconds since 1970.
    pub fn second(self) -> Option<i64> {
        self.at.map(Timestamp::as_second)
    }

    /// Returns `previous` if only the time differs, and by less than two seconds. Otherwise returns `self`.
    #[must_use]
    pub fn settled(self, previous: Option<Self>) -> Self {
        let is_same = |previous: &Self| {
            let difference = match (previous.at, self.at) {
                (Some(previous), Some(now)) => (previous.as_second() - now.as_second()).abs(),
                (None, None) => 0,
                _ => return false,
            };
            (previous.step, previous.attempts) == (self.step, self.attempts)
                && difference < SAME_TIME_SECONDS
        };
        previous.filter(is_same).unwrap_or(self)
    }
}

impl UpcomingStepKind {
    /// All steps.
    pub const ALL: [Self; 4] = [Self::Retry, Self::Unlock, Self::GivenUp, Self::Wait];

    /// The text in the status.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Retry => "Retry",
            Self::Unlock => "Unlock",
            Self::GivenUp => "GivenUp",
            Self::Wait => "Wait",
        }
    }

    /// The reverse of [`UpcomingStepKind::as_str`]. Returns `None` for an unknown text.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|step| step.as_str() == text)
    }
}

impl TenantReport {
    /// Creates a report without a chart, labels, a next step, a handled request and a history.
    pub fn new(observed_generation: i64, state: impl Into<ClusterState>) -> Self {
        Self {
            observed_generation,
            applied_chart: String::new(),
            state: state.into(),
            labels: Labels::default(),
            next: None,
            handled_request: None,
            history: None,
        }
    }

    /// Returns the report with every text cut to [`MESSAGE_MAX`] bytes, as it is sent, compared and stored.
    #[must_use]
    pub fn trimmed(mut self) -> Self {
        trim_all(&mut self.applied_chart, &mut self.state);
        trim_request(&mut self.handled_request);
        self
    }
}

pub(crate) fn trim_all(applied_chart: &mut String, state: &mut ClusterState) {
    trim(applied_chart);
    let states = [
        Some(&mut state.ready),
        state.progress.as_mut(),
        state.error.as_mut(),
    ];
    for State {
        reason, message, ..
    } in states.into_iter().flatten()
    {
        trim(reason);
        trim(message);
    }
}

/// Cuts a longer request, which then equals none that a user has set.
pub(crate) fn trim_request(request: &mut Option<String>) {
    if let Some(request) = request {
        truncate(request, REQUEST_MAX);
    }
}

fn trim(text: &mut String) {
    truncate(text, MESSAGE_MAX);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: i64) -> Option<Timestamp> {
        Some(Timestamp::from_millisecond(millis).unwrap())
    }

    #[test]
    fn times_before_1970_are_rejected() {
        let next = |second| UpcomingStep::at_second(UpcomingStepKind::Retry, Some(second), 1);
        assert!(next(0).is_some());
        assert_eq!(next(-1), None);
        assert_eq!(next(-100_000_000_000), None);
    }

    #[test]
    fn next_time_is_rounded_and_small_changes_ignored() {
        let next = |millis| UpcomingStep::new(UpcomingStepKind::Retry, at(millis), 1);
        assert_eq!(next(1_499).at, at(1_000));
        assert_eq!(next(1_500).at, at(2_000));
        let previous = next(10_000);
        assert_eq!(next(11_400).settled(Some(previous)), previous);
        assert_eq!(next(8_600).settled(Some(previous)), previous);
        assert_eq!(next(12_000).settled(Some(previous)), next(12_000));
        assert_eq!(next(10_000).settled(None), previous);
        let second = UpcomingStep {
            attempts: 2,
            ..next(10_000)
        };
        assert_eq!(second.settled(Some(previous)), second);
        let given_up = UpcomingStep::new(UpcomingStepKind::GivenUp, None, 1);
        assert_eq!(given_up.settled(Some(previous)), given_up);
        assert_eq!(given_up.settled(Some(given_up)), given_up);
    }

    #[test]
    fn each_step_is_read_as_it_is_written() {
        for step in UpcomingStepKind::ALL {
            assert_eq!(UpcomingStepKind::parse(step.as_str()), Some(step));
        }
        assert_eq!(UpcomingStepKind::parse("Later"), None);
    }
}
