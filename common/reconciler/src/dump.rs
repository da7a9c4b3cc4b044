//! Snapshot of the reconciler's state for diagnostics, taken on request.

use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{ClusterState, State};
use serde::Serialize;
use tokio::sync::oneshot;

use crate::index::CrdState;
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::owner_state::OwnerState;
use crate::reconciler::Reconciler;

/// Channel for the response to a diagnostics request.
pub type DumpRequest = oneshot::Sender<ReconcilerDump>;

/// Maximum number of owners in the snapshot. The rest is only counted.
const MAX_OWNERS: usize = 2_000;

/// The state of one reconciler.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReconcilerDump {
    pub lease: LeaseDump,
    /// Time since the last response of the API server.
    pub seconds_since_response: u64,
    /// missing, terminating or present. `None` before the first list.
    pub tenant_crd: Option<&'static str>,
    pub lists_complete: bool,
    /// The version that is saved on the cluster, which the reconciler acts on.
    pub recorded_version: Option<String>,
    /// A later saved version. The reconciler does not act on an older one.
    pub newer_recorded_version: Option<String>,
    /// Number of running actions.
    pub running: usize,
    pub owner_count: usize,
    /// The owners, failed ones first. Truncated if there are many.
    pub owners: Vec<OwnerDump>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LeaseDump {
    pub writes: bool,
    pub held_for_seconds: Option<u64>,
    pub seconds_since_renewal: Option<u64>,
    pub other_holder: Option<String>,
}

/// A Tenant or KryptonDeployment.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnerDump {
    pub kind: &'static str,
    pub key: String,
    pub generation: i64,
    pub being_removed: bool,
    pub release: String,
    pub revision: Option<u32>,
    pub locked: bool,
    pub ready: Option<ConditionDump>,
    pub progress: Option<ConditionDump>,
    pub error: Option<ConditionDump>,
    /// An action for the owner is running.
    pub running: bool,
    pub failure_reason: Option<&'static str>,
    pub attempts: u32,
    pub retry_in_seconds: Option<u64>,
    /// The next step, as in `status.nextSteps`.
    pub next_step: Option<&'static str>,
    pub next_reconcile_in_seconds: Option<u64>,
}

impl OwnerDump {
    pub fn is_in_error(&self) -> bool {
        self.error
            .as_ref()
            .is_some_and(|error| error.status == "True")
    }
}

/// A condition without its message.
#[derive(Debug, Serialize)]
pub struct ConditionDump {
    status: &'static str,
    reason: String,
}

impl Reconciler {
    pub(super) fn dump(&self, now: BootTime) -> ReconcilerDump {
        let lease_state = self.lease_state.get();
        let seconds_since = |then: BootTime| now.since(then).as_secs();
        let all = self.index.owners();
        let mut owners: Vec<OwnerDump> = all
            .map(|(key, owner)| self.dump_owner(&key, &owner, now))
            .collect();
        let owner_count = owners.len();
        // Failed owners first, even if another process made the attempts.
        owners.sort_by_key(|owner| owner.attempts == 0 && !owner.is_in_error());
        owners.truncate(MAX_OWNERS);
        ReconcilerDump {
            lease: LeaseDump {
                writes: self.permitted,
                held_for_seconds: self.held_since.map(seconds_since),
                seconds_since_renewal: lease_state.renewed.map(seconds_since),
                other_holder: lease_state.other_holder,
            },
            seconds_since_response: seconds_since(self.last_response()),
            tenant_crd: self.index.crd().map(|crd| match crd {
                CrdState::Missing => "missing",
                CrdState::Terminating => "terminating",
                CrdState::Present => "present",
            }),
            lists_complete: self.index.synced(),
            recorded_version: self.recorded.as_ref().map(|it| it.version.to_string()),
            newer_recorded_version: self.newer_recorded.map(|version| version.to_string()),
            running: self.jobs.len(),
            owner_count,
            owners,
        }
    }

    fn dump_owner(&self, key: &OwnerKey, owner: &ReleaseOwner, now: BootTime) -> OwnerDump {
        let default_state = OwnerState::default();
        let state = self.owner_states.get(key).unwrap_or(&default_state);
        let failure = state.memory.failure.as_ref();
        let release = owner.release(&self.member.name);
        let newest = self
            .index
            .release_revisions(&release)
            .last()
            .copied()
            .cloned();
        let reported = state.memory.last_reported(owner, &self.member.name);
        let condition = |select: fn(ClusterState) -> Option<State>| {
            let state = reported.clone().and_then(select);
            state.as_ref().map(ConditionDump::new)
        };
        let seconds_until = |at: BootTime| at.since(now).as_secs();
        let next_reconcile = state.not_before.max(state.wake).filter(|at| *at > now);
        OwnerDump {
            kind: owner.kind(),
            key: key.to_string(),
            generation: owner.generation(),
            being_removed: owner.is_being_removed(),
            release: format!("{}/{}", release.namespace, release.name),
            revision: newest.as_ref().map(|newest| newest.revision),
            locked: newest.is_some_and(|newest| newest.status.is_locked()),
            ready: condition(|state| Some(state.ready)),
            progress: condition(|state| state.progress),
            error: condition(|state| state.error),
            running: self.queue.is_busy(key),
            failure_reason: failure.map(|failure| failure.reason),
            attempts: failure.map_or(0, |failure| failure.attempts),
            retry_in_seconds: failure.map(|failure| seconds_until(failure.retry_at)),
            next_step: state.memory.reported_next.map(|next| next.step.as_str()),
            next_reconcile_in_seconds: next_reconcile.map(seconds_until),
        }
    }
}

impl ConditionDump {
    pub fn new(state: &State) -> Self {
        Self {
            status: state.truth.as_str(),
            reason: state.reason.clone(),
        }
    }
}
