//! Member-wide work before any Tenant: write permission, saved desired state, CRD and report.

use std::sync::Arc;

use krypton_runtime::chance;
use krypton_runtime::clock::BootTime;
use krypton_runtime::lease::NO_NEW_RUNS_AFTER;
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_runtime::retry::backoff;
use krypton_types::desired::DesiredState;
use krypton_types::error_chain::chain;
use krypton_types::member::MemberReport;
use krypton_types::tenant::TenantKey;

use kube::ResourceExt;
use std::time::Duration;
use tracing::Instrument as _;

use crate::backup::KnownDeletions;
use crate::backup::restoring::{CrdRound, UnrestoredTenants, back_up_tenants, restore_tenants};
use crate::index::CrdState;
use crate::owner::ReleaseOwner;
use crate::reconciler::Reconciler;
use crate::record::{self, RecordAction, RecordResult};
use crate::tenant_list_schema::TenantListSchema;

const RECORD_RETRY_MAX: Duration = Duration::from_secs(60);
/// Pause between two checks of the CRD while it needs changes.
const CRD_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between two rounds without a CRD or a list of records. Until then, the reconciler handles no Tenant.
const CRD_RETRY_MAX: Duration = Duration::from_secs(10);

impl Reconciler {
    /// Returns the time of the API server's last response. The caller received one just before the start.
    pub(super) fn last_response(&self) -> BootTime {
        self.lease_state
            .get()
            .last_response
            .map_or(self.started, |response| response.max(self.started))
    }

    /// Reconciles the write permission, the saved desired state and the CRD.
    pub(super) fn reconcile_member(&mut self, now: BootTime) {
        // A process that cannot see the cluster must not keep others from acting on it.
        let lease_goal = self.member.lease_goal.get();
        if self.index.ready() && self.lease_goal.get() != lease_goal {
            self.lease_goal.send_replace(lease_goal);
        }
        let (permitted, is_holder) = {
            let lease_state = self.lease_state.get_and_update();
            (lease_state.may_start(now), lease_state.renewed.is_some())
        };
        self.held_since = is_holder.then(|| self.held_since.unwrap_or(now));
        if permitted != self.permitted {
            self.permitted = permitted;
            tracing::info!(member = %self.member.name, permitted, "write permission changed");
            // Another writer may have changed the cluster in the meantime. Failures while the cluster was unreachable
            // must not delay the next attempt.
            self.recorded = None;
            self.recording_tasks.abort_all();
            self.recording_failures = 0;
            self.recording_problem = None;
            self.recheck_crd();
            if permitted {
                for state in self.owner_states.values_mut() {
                    state.retry_read(now);
                }
            }
            self.queue_all();
        }
        if !permitted {
            let is_replaced = self.index.schema().flatten().is_some();
            if self.listed_under == TenantListSchema::KryptonOperator && is_replaced {
                (self.listed_under, self.relist_tenants) = (TenantListSchema::Observed, true);
            }
            return;
        }
        self.record_desired();
        if let Some(state) = self.index.crd()
            && !self.crd_checked
            && self.crd_jobs.is_empty()
            && now >= self.crd_not_before
        {
            let runner = Arc::clone(&self.runner);
            let deletions = self.known_deletions();
            let previous = self.unrestored.clone().unwrap_or_default();
            let crd_round = async move {
                match state {
                    CrdState::Terminating => {
                        back_up_tenants(&runner.member.client, &deletions).await
                    }
                    _ => restore_tenants(&runner, previous).await,
                }
            };
            self.crd_jobs.spawn(crd_round.in_current_span());
        }
    }

    /// Saves the desired state before the reconciler acts on it.
    fn record_desired(&mut self) {
        let desired = self.desired.get();
        let recorded = self.recorded.as_mut();
        self.latest_recorded = recorded.is_some_and(|recorded| share_if_equal(recorded, &desired));
        let pause_unrecorded = is_pause_unrecorded(
            desired.paused,
            self.latest_recorded,
            self.recording_failures,
        );
        if pause_unrecorded != self.pause_unrecorded {
            self.pause_unrecorded = pause_unrecorded;
            self.queue_all();
        }
        if !self.latest_recorded && self.recording_tasks.is_empty() {
            let client = self.member.client.clone();
            let pause = retry_pause(self.recording_failures, RECORD_RETRY_MAX);
            let recording = async move {
                tokio::time::sleep(pause).await;
                let result = record::save(&client, &desired).await;
                (desired, result.map_err(|error| chain(&error)))
            };
            self.recording_tasks.spawn(recording.in_current_span());
        }
    }

    /// Forgets the known records, as another process may have written them or the CRD was deleted.
    pub(super) fn recheck_crd(&mut self) {
        self.crd_jobs.abort_all();
        self.crd_checked = false;
        self.crd_failures = 0;
        self.unrestored = None;
    }

    /// Returns true if the Tenant waits to be restored, or if the waiting Tenants are unknown.
    pub(super) fn awaits_restore(&self, tenant: &TenantKey) -> bool {
        let is_unrestored = |tenants: &UnrestoredTenants| tenants.contains_key(tenant);
        self.permitted && self.unrestored.as_ref().is_none_or(is_unrestored)
    }

    /// Returns true if a Tenant that waits to be restored is in the namespace or has its release there.
    pub(super) fn has_unrestored_in(&self, namespace: &str) -> bool {
        let mut unrestored = self.unrestored.iter().flatten();
        unrestored.any(|(tenant, state)| {
            tenant.namespace == namespace || state.workspace.as_deref() == Some(namespace)
        })
    }

    /// Describes the Tenants that are not restored yet, with the reason for the first one.
    fn describe_unrestored(&self) -> Option<String> {
        if !self.permitted {
            return None;
        }
        let Some(unrestored) = &self.unrestored else {
            let problem = self.crd_problem.as_ref();
            return problem.map(|problem| format!("no Tenant is reconciled: {problem}"));
        };
        let (tenant, first) = unrestored.first_key_value()?;
        Some(format!(
            "Tenants not restored since their CRD was deleted: {}; the first is {tenant}: {}",
            unrestored.len(),
            first.problem
        ))
    }

    fn known_deletions(&self) -> KnownDeletions {
        let mut deletions = KnownDeletions::default();
        for (key, state) in &self.owner_states {
            deletions.confirmed.extend(state.confirmed_deletion.clone());
            let owner = self.index.owner(key).filter(|_| state.is_removing);
            let tenant = owner.as_ref().and_then(ReleaseOwner::tenant);
            deletions
                .in_progress
                .extend(tenant.and_then(|tenant| tenant.uid()));
        }
        deletions
    }

    pub(super) fn finish_recording(
        &mut self,
        done: Result<(Arc<DesiredState>, Result<RecordResult, String>), tokio::task::JoinError>,
    ) {
        let Ok((desired, result)) = done else { return };
        // Another process may hold the Lease by now.
        if !self.permitted {
            return;
        }
        if let Ok(saved) = &result
            && saved.ownerless_reason != self.ownerless_reason
        {
            if let Some(reason) = &saved.ownerless_reason {
                tracing::warn!(member = %self.member.name, %reason,
                    "the record of the desired state has no owner");
            }
            self.ownerless_reason.clone_from(&saved.ownerless_reason);
        }
        match result.map(|result| result.action) {
            Ok(RecordAction::AlreadyRecorded | RecordAction::Record) => {
                self.recording_failures = 0;
                self.recording_problem = None;
                self.newer_recorded = None;
                self.recorded = Some(desired);
                self.queue_all();
            }
            Ok(RecordAction::Reject(version)) => {
                if self.newer_recorded != Some(version) {
                    tracing::warn!(member = %self.member.name, recorded = %version, given = %desired.version,
                        "ignoring an older desired state");
                }
                self.recording_failures += 1;
                self.newer_recorded = Some(version);
            }
            Err(problem) => {
                tracing::warn!(member = %self.member.name, %problem, "the desired state is not recorded yet");
                self.recording_failures += 1;
                self.recording_problem = Some(problem);
            }
        }
    }

    pub(super) fn finish_crd(&mut self, done: Result<CrdRound, tokio::task::JoinError>) {
        let round = match done {
            Ok(round) => round,
            // Another round follows.
            Err(error) if error.is_cancelled() => return,
            Err(error) => CrdRound {
                problem: Some(error.to_string()),
                ..CrdRound::default()
            },
        };
        let now = BootTime::now();
        self.crd_failures = match round.problem {
            None => 0,
            Some(_) => self.crd_failures + 1,
        };
        let pause = CRD_PAUSE.max(retry_pause(self.crd_failures, CRD_RETRY_MAX));
        self.crd_not_before = now + pause;
        let is_current = round.problem.is_none() && self.index.crd() == Some(CrdState::Present);
        self.crd_problem.clone_from(&round.problem);
        if let Some(problem) = round.problem {
            tracing::warn!(member = %self.member.name, %problem, "failed to reconcile the Tenant CRD; retrying");
            self.cluster_problem = Some(problem);
        }
        let Some(unrestored) = round.unrestored else {
            return;
        };
        self.crd_checked = is_current && unrestored.is_empty();
        if is_current {
            let next = unrestored.values().map(|state| state.not_before).min();
            self.crd_not_before = self.crd_not_before.max(next.unwrap_or_default());
        }
        if is_current && (self.crd_was_missing || self.listed_under != TenantListSchema::Current) {
            // An older list lacks restored Tenants, and an older schema lacks some of their fields.
            (self.crd_was_missing, self.relist_tenants) = (false, true);
            self.listed_under = TenantListSchema::Current;
        }
        self.unrestored = Some(unrestored);
        self.queue_all();
    }

    pub(super) fn report_member(&mut self, now: BootTime) {
        let lease_state = self.lease_state.get();
        let connected = now.since(self.last_response()) < NO_NEW_RUNS_AFTER;
        let unrecorded = self.permitted && !self.latest_recorded;
        let recording_problem = self.recording_problem.clone().filter(|_| unrecorded);
        let cluster_problem = lease_state.problem.or_else(|| self.cluster_problem.clone());
        let cluster_problem = cluster_problem.filter(|_| {
            !connected || !self.index.synced() || (self.permitted && self.recorded.is_none())
        });
        let report = MemberReport {
            // By now every listed Tenant has its report.
            synced: self.index.synced()
                && self.index.crd() == Some(CrdState::Present)
                && !(self.permitted && (self.crd_was_missing || self.relist_tenants))
                && self.listed_under.is_usable(self.permitted),
            ready: connected && self.index.ready(),
            writing: self.permitted,
            holder: if self.permitted {
                Some(self.member.holder.clone())
            } else {
                lease_state.other_holder
            },
            connected,
            problem: cluster_problem.or(recording_problem),
            applied: self
                .recorded
                .as_ref()
                .map(|desired| (desired.version, self.digests.state(desired).to_string())),
            ahead: self.newer_recorded,
            not_restored: self.describe_unrestored(),
        };
        self.report_store.set_member(&report);
    }
}

/// Returns true if the latest desired state is a pause that could not be saved. Until it is, the reconciler acts on no
/// earlier state.
fn is_pause_unrecorded(paused: bool, latest_recorded: bool, failures: u32) -> bool {
    paused && !latest_recorded && failures > 0
}

/// Compares two states. Equal states share one allocation afterwards, which makes the next comparison cheap.
fn share_if_equal(recorded: &mut Arc<DesiredState>, desired: &Arc<DesiredState>) -> bool {
    if Arc::ptr_eq(recorded, desired) {
        return true;
    }
    let is_equal = **recorded == **desired;
    if is_equal {
        recorded.clone_from(desired);
    }
    is_equal
}

/// Returns the pause before the next attempt at the member's own objects.
fn retry_pause(failures: u32, max_pause: Duration) -> Duration {
    match failures {
        0 => Duration::ZERO,
        _ => backoff(failures, max_pause, chance::random()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unrecorded_pause_stops_the_member() {
        for (paused, latest_recorded, failures, stops) in [
            (true, false, 1, true),
            (true, false, 0, false),
            (true, true, 1, false),
            (false, false, 1, false),
        ] {
            let is_stopped = is_pause_unrecorded(paused, latest_recorded, failures);
            assert_eq!(is_stopped, stops, "{paused} {latest_recorded} {failures}");
        }
    }
}
