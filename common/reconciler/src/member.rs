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

use crate::backup::Deletions;
use crate::backup::restoring::{CrdRound, Known, keep_tenants, put_back_tenants};
use crate::index::CrdState;
use crate::owner::ReleaseOwner;
use crate::record::{self, Advance, Recording};
use crate::run_loop::{CRD_EVERY, ListedUnder, Reconciler};

const RECORD_RETRY_MAX: Duration = Duration::from_secs(60);
/// Longest pause between two rounds without a CRD or a list of records. Until then, the reconciler handles no Tenant.
const CRD_RETRY_MAX: Duration = Duration::from_secs(10);

impl Reconciler {
    /// Returns the time of the API server's last response. The caller received one just before the start.
    pub(super) fn heard(&self) -> BootTime {
        self.hold
            .get()
            .heard
            .map_or(self.started, |heard| heard.max(self.started))
    }

    /// Reconciles the write permission, the saved desired state and the CRD.
    pub(super) fn reconcile_member(&mut self, now: BootTime) {
        // A process that cannot see the cluster must not keep others from acting on it.
        let lease = self.member.lease.get();
        if self.index.ready() && self.wish.get() != lease {
            self.wish.send_replace(lease);
        }
        let (permitted, ours) = {
            let hold = self.hold.see();
            (hold.may_start(now), hold.renewed.is_some())
        };
        self.held = ours.then(|| self.held.unwrap_or(now));
        if permitted != self.permitted {
            self.permitted = permitted;
            tracing::info!(member = %self.member.name, permitted, "the Lease");
            // Another writer may have changed the cluster in the meantime. Failures while the cluster was unreachable
            // must not delay the next attempt.
            self.recorded = None;
            self.recording.abort_all();
            self.recording_failures = 0;
            self.recording_problem = None;
            self.recheck_crd();
            self.look_at_all();
        }
        if !permitted {
            let replaced = self.index.schema().flatten().is_some();
            if self.listed == ListedUnder::Originals && replaced {
                (self.listed, self.list_again) = (ListedUnder::Observed, true);
            }
            return;
        }
        self.record_desired();
        if let Some(state) = self.index.crd()
            && !self.crd_checked
            && self.crd_jobs.is_empty()
            && now >= self.crd_not_before
        {
            let performer = Arc::clone(&self.performer);
            let known = self.deletions();
            let before = self.waiting.clone().unwrap_or_default();
            let seeing = async move {
                match state {
                    CrdState::Terminating => keep_tenants(&performer.member.client, &known).await,
                    _ => put_back_tenants(&performer, before).await,
                }
            };
            self.crd_jobs.spawn(seeing.in_current_span());
        }
    }

    /// Saves the desired state before the reconciler acts on it.
    fn record_desired(&mut self) {
        let wanted = self.desired.get();
        let recorded = self.recorded.as_mut();
        self.on_record = recorded.is_some_and(|recorded| is_same(recorded, &wanted));
        let misses_pause = misses_pause(wanted.paused, self.on_record, self.recording_failures);
        if misses_pause != self.misses_pause {
            self.misses_pause = misses_pause;
            self.look_at_all();
        }
        if !self.on_record && self.recording.is_empty() {
            let client = self.member.client.clone();
            let pause = retry_pause(self.recording_failures, RECORD_RETRY_MAX);
            let recording = async move {
                tokio::time::sleep(pause).await;
                let result = record::record(&client, &wanted).await;
                (wanted, result.map_err(|error| chain(&error)))
            };
            self.recording.spawn(recording.in_current_span());
        }
    }

    /// Forgets the known records, as another process may have written them or the CRD was deleted.
    pub(super) fn recheck_crd(&mut self) {
        self.crd_jobs.abort_all();
        self.crd_checked = false;
        self.crd_failures = 0;
        self.waiting = None;
    }

    /// Returns true if the Tenant waits to be restored, or if the waiting Tenants are unknown.
    pub(super) fn is_kept(&self, tenant: &TenantKey) -> bool {
        let kept = |waiting: &Known| waiting.contains_key(tenant);
        self.permitted && self.waiting.as_ref().is_none_or(kept)
    }

    /// Returns true if a Tenant that waits to be restored is in the namespace or has its release there.
    pub(super) fn is_kept_for(&self, namespace: &str) -> bool {
        let mut waiting = self.waiting.iter().flatten();
        waiting.any(|(tenant, kept)| {
            tenant.namespace == namespace || kept.workspace.as_deref() == Some(namespace)
        })
    }

    /// Describes the Tenants that are not restored yet, with the reason for the first one.
    fn not_restored(&self) -> Option<String> {
        if !self.permitted {
            return None;
        }
        let Some(waiting) = &self.waiting else {
            let problem = self.crd_problem.as_ref();
            return problem.map(|problem| format!("no Tenant is reconciled: {problem}"));
        };
        let (tenant, first) = waiting.first_key_value()?;
        Some(format!(
            "Tenants not restored since their CRD was deleted: {}; the first is {tenant}: {}",
            waiting.len(),
            first.problem
        ))
    }

    fn deletions(&self) -> Deletions {
        let mut known = Deletions::default();
        for (key, slot) in &self.slots {
            known.confirmed.extend(slot.deletion_confirmed.clone());
            let owner = self.index.owner(key).filter(|_| slot.removing);
            let tenant = owner.as_ref().and_then(ReleaseOwner::tenant);
            known
                .under_way
                .extend(tenant.and_then(|tenant| tenant.uid()));
        }
        known
    }

    pub(super) fn finish_recording(
        &mut self,
        done: Result<(Arc<DesiredState>, Result<Recording, String>), tokio::task::JoinError>,
    ) {
        let Ok((desired, result)) = done else { return };
        // Another process may hold the Lease by now.
        if !self.permitted {
            return;
        }
        if let Ok(Recording { unowned, .. }) = &result
            && *unowned != self.unowned
        {
            if let Some(why) = unowned {
                tracing::warn!(member = %self.member.name, %why,
                    "the record of the desired state has no owner; nothing else depends on that");
            }
            self.unowned.clone_from(unowned);
        }
        match result.map(|recording| recording.advance) {
            Ok(Advance::Recorded | Advance::Record) => {
                self.recording_failures = 0;
                self.recording_problem = None;
                self.ahead = None;
                self.recorded = Some(desired);
                self.look_at_all();
            }
            Ok(Advance::Refuse(version)) => {
                if self.ahead != Some(version) {
                    tracing::warn!(member = %self.member.name, recorded = %version, given = %desired.version,
                        "ignoring an older desired state");
                }
                self.recording_failures += 1;
                self.ahead = Some(version);
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
        let pause = CRD_EVERY.max(retry_pause(self.crd_failures, CRD_RETRY_MAX));
        self.crd_not_before = BootTime(now.0 + pause);
        let ensured = round.problem.is_none() && self.index.crd() == Some(CrdState::Present);
        self.crd_problem.clone_from(&round.problem);
        if let Some(problem) = round.problem {
            tracing::warn!(member = %self.member.name, %problem, "the Tenant CRD");
            self.problem = Some(problem);
        }
        let Some(waiting) = round.waiting else { return };
        self.crd_checked = ensured && waiting.is_empty();
        if ensured {
            let next = waiting.values().map(|kept| kept.not_before).min();
            self.crd_not_before = self.crd_not_before.max(next.unwrap_or_default());
        }
        if ensured && (self.crd_lost || self.listed != ListedUnder::Ours) {
            // An older list lacks restored Tenants, and an older schema lacks some of their fields.
            (self.crd_lost, self.list_again) = (false, true);
            self.listed = ListedUnder::Ours;
        }
        self.waiting = Some(waiting);
        self.look_at_all();
    }

    pub(super) fn report_member(&mut self, now: BootTime) {
        let hold = self.hold.get();
        let connected = now.since(self.heard()) < NO_NEW_RUNS_AFTER;
        let unrecorded = self.permitted && !self.on_record;
        let recording = self.recording_problem.clone().filter(|_| unrecorded);
        let watching = hold.problem.or_else(|| self.problem.clone());
        let watching = watching.filter(|_| {
            !connected || !self.index.synced() || (self.permitted && self.recorded.is_none())
        });
        let report = MemberReport {
            // By now every listed Tenant has its report.
            synced: self.index.synced()
                && self.index.crd() == Some(CrdState::Present)
                && !(self.permitted && (self.crd_lost || self.list_again))
                && self.listed.will_do(self.permitted),
            ready: connected && self.index.ready(),
            writing: self.permitted,
            holder: if self.permitted {
                Some(self.member.holder.clone())
            } else {
                hold.other
            },
            connected,
            problem: watching.or(recording),
            applied: self
                .recorded
                .as_ref()
                .map(|desired| (desired.version, self.digests.state(desired).to_string())),
            ahead: self.ahead,
            not_restored: self.not_restored(),
        };
        self.report_store.member(&report);
    }
}

/// Returns true if the latest desired state is a pause that could not be saved. Until it is, the reconciler acts on no
/// earlier state.
fn misses_pause(paused: bool, on_record: bool, failures: u32) -> bool {
    paused && !on_record && failures > 0
}

/// Compares two states. Equal states share one allocation afterwards, which makes the next comparison cheap.
fn is_same(recorded: &mut Arc<DesiredState>, wanted: &Arc<DesiredState>) -> bool {
    if Arc::ptr_eq(recorded, wanted) {
        return true;
    }
    let same = **recorded == **wanted;
    if same {
        recorded.clone_from(wanted);
    }
    same
}

/// Returns the pause before the next attempt at the member's own objects.
fn retry_pause(failures: u32, longest: Duration) -> Duration {
    match failures {
        0 => Duration::ZERO,
        _ => backoff(failures, longest, chance::random()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unrecorded_pause_stops_the_member() {
        for (paused, on_record, failures, stops) in [
            (true, false, 1, true),
            (true, false, 0, false),
            (true, true, 1, false),
            (false, false, 1, false),
        ] {
            let now = misses_pause(paused, on_record, failures);
            assert_eq!(now, stops, "{paused} {on_record} {failures}");
        }
    }
}
