//! Snapshot of the reconciler's state for diagnostics, taken on request.

use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{ClusterState, State, Truth};
use serde::Serialize;
use tokio::sync::oneshot;

use crate::index::CrdState;
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::run_loop::{Reconciler, Slot};

/// Channel for the response to a diagnostics request.
pub type Question = oneshot::Sender<ReconcilerNow>;

/// Maximum number of owners in the snapshot. The rest is only counted.
const SUBJECTS_MOST: usize = 2_000;

/// The state of one reconciler.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReconcilerNow {
    pub lease: LeaseNow,
    pub apiserver_heard_before_seconds: u64,
    /// missing, terminating or present. `None` before the first list.
    pub tenant_crd: Option<&'static str>,
    pub lists_complete: bool,
    /// The version that is saved on the cluster, which the reconciler acts on.
    pub on_record: Option<String>,
    /// A later saved version. The reconciler does not act on an older one.
    pub later_on_record: Option<String>,
    /// Number of running actions.
    pub running: usize,
    pub owners_in_all: usize,
    /// The owners, failed ones first. Truncated if there are many.
    pub owners: Vec<OwnerNow>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LeaseNow {
    pub writes: bool,
    pub held_for_seconds: Option<u64>,
    pub renewed_before_seconds: Option<u64>,
    pub other_holder: Option<String>,
}

/// A Tenant or KryptonDeployment.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnerNow {
    pub kind: &'static str,
    pub key: String,
    pub generation: i64,
    pub being_removed: bool,
    pub release: String,
    pub revision: Option<u32>,
    pub locked: bool,
    pub ready: Option<StateNow>,
    pub progress: Option<StateNow>,
    pub error: Option<StateNow>,
    /// An action for the owner is running.
    pub at_work: bool,
    pub failed_with: Option<&'static str>,
    pub attempts: u32,
    pub retry_in_seconds: Option<u64>,
    /// The next step, as in `status.nextSteps`.
    pub next: Option<&'static str>,
    pub next_look_in_seconds: Option<u64>,
}

impl OwnerNow {
    pub fn is_in_error(&self) -> bool {
        self.error
            .as_ref()
            .is_some_and(|error| error.status == "True")
    }
}

/// A condition without its message.
#[derive(Debug, Serialize)]
pub struct StateNow {
    status: &'static str,
    reason: String,
}

impl Reconciler {
    pub(super) fn told(&self, now: BootTime) -> ReconcilerNow {
        let hold = self.hold.get();
        let ago = |then: BootTime| now.since(then).as_secs();
        let all = self.index.owners();
        let mut owners: Vec<OwnerNow> = all
            .map(|(key, owner)| self.subject_told(&key, &owner, now))
            .collect();
        let in_all = owners.len();
        // Failed owners first, even if another process made the attempts.
        owners.sort_by_key(|owner| owner.attempts == 0 && !owner.is_in_error());
        owners.truncate(SUBJECTS_MOST);
        ReconcilerNow {
            lease: LeaseNow {
                writes: self.permitted,
                held_for_seconds: self.held.map(ago),
                renewed_before_seconds: hold.renewed.map(ago),
                other_holder: hold.other,
            },
            apiserver_heard_before_seconds: ago(self.heard()),
            tenant_crd: self.index.crd().map(|crd| match crd {
                CrdState::Missing => "missing",
                CrdState::Terminating => "terminating",
                CrdState::Present => "present",
            }),
            lists_complete: self.index.synced(),
            on_record: self.recorded.as_ref().map(|it| it.version.to_string()),
            later_on_record: self.ahead.map(|version| version.to_string()),
            running: self.jobs.len(),
            owners_in_all: in_all,
            owners,
        }
    }

    fn subject_told(&self, key: &OwnerKey, owner: &ReleaseOwner, now: BootTime) -> OwnerNow {
        let none = Slot::default();
        let slot = self.slots.get(key).unwrap_or(&none);
        let failure = slot.memory.failure.as_ref();
        let release = owner.release(&self.member.name);
        let newest = self.index.release(&release).last().copied().cloned();
        let said = slot.memory.last_word(owner, &self.member.name);
        let said = |part: fn(ClusterState) -> Option<State>| said.clone().and_then(part);
        let until = |at: BootTime| at.since(now).as_secs();
        let next_look = slot.not_before.max(slot.wake).filter(|at| *at > now);
        OwnerNow {
            kind: owner.kind(),
            key: key.to_string(),
            generation: owner.generation(),
            being_removed: owner.is_going(),
            release: format!("{}/{}", release.namespace, release.name),
            revision: newest.as_ref().map(|newest| newest.revision),
            locked: newest.is_some_and(|newest| newest.status.is_locked()),
            ready: said(|state| Some(state.ready)).map(StateNow::of),
            progress: said(|state| state.progress).map(StateNow::of),
            error: said(|state| state.error).map(StateNow::of),
            at_work: self.queue.is_busy(key),
            failed_with: failure.map(|failure| failure.reason),
            attempts: failure.map_or(0, |failure| failure.attempts),
            retry_in_seconds: failure.map(|failure| until(failure.retry_at)),
            next: slot.memory.said_next.map(|next| next.step.as_str()),
            next_look_in_seconds: next_look.map(until),
        }
    }
}

impl StateNow {
    pub fn of(state: State) -> Self {
        Self {
            status: match state.truth {
                Truth::True => "True",
                Truth::False => "False",
                Truth::Unknown => "Unknown",
            },
            reason: state.reason,
        }
    }
}
