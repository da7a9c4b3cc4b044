//! Records the result of an action, and the time of the next attempt.

use std::sync::Arc;
use std::time::Duration;

use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::chance;
use krypton_runtime::clock::BootTime;
use krypton_runtime::retry::backoff;
use krypton_runtime::work_queue::Outcome;
use krypton_types::conditions::reason;
use krypton_types::desired::handling::Remediation;
use tokio::task::{Id, JoinError};

use crate::actions::error::{ActionError, CONFLICT_PAUSE};
use crate::actions::{Job, JobResult, ReleaseUpdate};
use crate::helm_queue::WaitResult;
use crate::owner::OwnerKey;
use crate::owner_state::OwnerState;
use crate::placed_tenants::MAX_UNREPORTED_CONFLICTS;
use crate::plan::{AppliedRun, Attempt, Failure, Refusal};
use crate::reconciler::{Reconciler, RunningAction};

/// Number of consecutive failed requests before a condition shows the failure.
const SHOWN_AFTER: u32 = 3;
/// Longest pause after a failure that the release did not cause.
const LOCAL_RETRY_MAX: Duration = Duration::from_secs(30);

impl Reconciler {
    /// Plans again for a release that has its chart and slot now, or records why the wait failed.
    pub(crate) fn finish_waiting(&mut self, ended: Result<(Id, WaitResult), JoinError>) {
        let failed = match self.helm_queue.finish(ended) {
            None => return,
            Some(Ok(key)) => return self.queue.add(key),
            Some(Err(failed)) => failed,
        };
        let (key, waiting, error) = (failed.key, failed.waiting, failed.error);
        let now = BootTime::now();
        let outcome = error.as_ref().map_or("failed", ActionError::outcome);
        waiting.span.record("outcome", outcome);
        let _within = waiting.span.entered();
        let work = &self.runner.tools.work;
        work.record_action(&waiting.request.action, now.since(waiting.started), outcome);
        match error {
            Some(error) => self.record_failure((&key, false), waiting.attempt, error, now),
            None => {
                tracing::error!(member = %self.member.name, "waiting for Helm failed");
                let state = self.owner_states.entry(key.clone()).or_default();
                state.hold(waiting.attempt, now + self.member.retry_max);
            }
        }
        self.owners_changed([key].into());
    }

    pub(crate) fn finish(
        &mut self,
        action: RunningAction,
        result: Result<Box<JobResult>, JoinError>,
    ) {
        let RunningAction { job, attempt, span } = action;
        let (key, now) = (&job.key, BootTime::now());
        // The following log lines belong to the span of the same job.
        let _within = span.enter();
        self.action_queue.done(key, Outcome::Done, now, 0.0);
        self.queue.done(key, Outcome::Again(now), now, 0.0);
        match result {
            Ok(result) => self.record_result(&job, attempt, *result, now),
            Err(error) => {
                tracing::error!(%error, member = %self.member.name, "action panicked");
                if let Some(state) = self.owner_states.get_mut(key) {
                    let until = now + self.member.retry_max;
                    state.panicked(attempt, until);
                }
            }
        }
        self.owners_changed([key.clone()].into());
    }

    fn record_result(&mut self, job: &Job, attempt: Attempt, mut result: JobResult, now: BootTime) {
        if job.lists != self.index.lists_started() {
            result.forget_responses();
        }
        let is_decoded = result.release_details.is_some();
        let updated = self.update_index(&job.release, &mut result);
        let state = self.owner_states.entry(job.key.clone()).or_default();
        state.is_removing = false;
        (state.not_before, state.held_attempt) = (None, None);
        state.needs_slot = result.needs_slot;
        if is_decoded || updated.is_some() {
            let unread = updated.as_ref().filter(|_| !is_decoded);
            state.memory.to_reread = unread.map(|revision| revision.revision);
        }
        if is_decoded {
            state.memory.unrecorded = result.unrecorded;
        }
        if is_decoded && let Some(updated) = updated {
            state.memory.record_read(&updated);
            state.memory.forget_tampering();
        }
        state.record_job(job, &mut result, now);
        // Reporting a refusal does not end it.
        let refusal = state.memory.refusal.as_ref();
        let is_for_action = refusal.is_some_and(|refusal| !refusal.is_status_write);
        let reports_refusal = job.is_report_only() && is_for_action;
        if !(reports_refusal || matches!(result.error, Some(ActionError::Conflict))) {
            state.conflicts = 0;
        }
        match result.error {
            None => state.succeeded(job.is_report_only(), result.clears_failure),
            Some(error) => {
                self.record_failure((&job.key, job.is_report_only()), attempt, error, now);
            }
        }
    }

    /// Adds the objects that the action read or wrote to the index. Returns the single revision among them.
    fn update_index(&mut self, release: &ReleaseKey, result: &mut JobResult) -> Option<Revision> {
        if let Some(tenant) = result.tenant.take() {
            let changed = self.index.tenant_written(tenant);
            self.owners_changed(changed);
        }
        if let Some(meta) = result.workspace.take() {
            let (namespaces, changed) = self.index.workspace_written(&meta);
            self.placed_tenants.queue_namespaces(&namespaces);
            self.owners_changed(changed);
        }
        let mut updated = None;
        match result.release_update.take() {
            Some(ReleaseUpdate::All {
                metas,
                version,
                known_before,
            }) => {
                self.index
                    .release_listed(release, metas, (version, known_before));
            }
            Some(ReleaseUpdate::One(meta)) => {
                updated = Revision::from_metadata(&meta).map(|(_, revision)| revision);
                let changed = self.index.release_read(&meta);
                self.owners_changed(changed);
            }
            None => {}
        }
        if let Some(release_details) = result.release_details.take() {
            self.release_details
                .insert(release.clone(), Arc::new(release_details));
        } else if self.index.release_revisions(release).is_empty() {
            self.release_details.remove(release);
        }
        updated
    }

    /// Records why an attempt failed, and the time of the next one.
    fn record_failure(
        &mut self,
        (key, is_report_only): (&OwnerKey, bool),
        attempt: Attempt,
        error: ActionError,
        now: BootTime,
    ) {
        let state = self.owner_states.entry(key.clone()).or_default();
        let error = escalate_conflict(error, state.conflicts);
        let is_refused = matches!(error, ActionError::Refused(_));
        match error {
            ActionError::Conflict => {
                let pause = CONFLICT_PAUSE * (1 << state.conflicts.min(4));
                let pause = pause.mul_f64(1.0 + chance::random::<f64>());
                state.conflicts += 1;
                state.not_before = Some(now + pause);
            }
            ActionError::Transient(problem) | ActionError::Refused(problem) => {
                let previous = state.memory.refusal.take();
                let previous = previous.filter(|previous| previous.attempt == attempt);
                let attempts = previous.map_or(0, |previous| previous.attempts) + 1;
                let pause = backoff(attempts, self.member.retry_max, chance::random());
                let retry_at = now + pause;
                let shown = is_refused || attempts >= SHOWN_AFTER;
                // Write the condition now, unless the API server refuses the status itself.
                if is_report_only || !shown {
                    state.hold(attempt.clone(), retry_at);
                }
                tracing::warn!(member = %self.member.name, %problem,
                    retry_in_seconds = pause.as_secs(), "request failed; retrying");
                state.memory.refusal = Some(Refusal {
                    message: problem,
                    attempts,
                    retry_at,
                    attempt,
                    is_status_write: is_report_only,
                    is_read: state.is_reading,
                    shown,
                });
            }
            ActionError::Failed {
                reason,
                message,
                permanent,
                revision,
            } => {
                let cause = (reason, message, permanent, revision);
                self.record_shown_failure(key, attempt, cause, now);
            }
        }
    }

    /// Records a failure that the conditions show.
    fn record_shown_failure(
        &mut self,
        key: &OwnerKey,
        attempt: Attempt,
        (reason, message, permanent, revision): (&'static str, String, bool, Option<u32>),
        now: BootTime,
    ) {
        let handling = self.member.policy.handling(&self.desired_now().handling);
        let state = self.owner_states.entry(key.clone()).or_default();
        let previous = state.memory.failure.as_ref();
        let previous = previous.filter(|failure| failure.attempt == attempt);
        // Count failures of the release separately from other failures, because only they lead to giving up.
        let attempts = previous
            .filter(|failure| is_release_failure(failure.reason) == is_release_failure(reason))
            .map_or(0, |failure| failure.attempts)
            + 1;
        let has_remediation =
            handling.retries.is_some() || handling.remediation == Remediation::Rollback;
        let keeps_previous = has_remediation
            && !is_release_failure(reason)
            && previous.is_some_and(|failure| is_release_failure(failure.reason));
        let cap = match reason {
            // A retry costs little, and the cause may end at any time.
            reason::HELM_UNAVAILABLE | reason::SUSPENDED => {
                self.member.retry_max.min(LOCAL_RETRY_MAX)
            }
            _ => self.member.retry_max,
        };
        let pause = match permanent {
            true => cap,
            false => backoff(attempts, cap, chance::random()),
        };
        let retry_at = now + pause;
        tracing::warn!(member = %self.member.name, reason, problem = %message,
            attempts, retry_in_seconds = pause.as_secs(), "action failed; retrying");
        // The report of this failure may be a write, too. A given-up release must not start again because of it.
        if reason == reason::SUSPENDED || keeps_previous {
            state.hold(attempt.clone(), retry_at);
        }
        if !keeps_previous {
            state.memory.failure = Some(Failure {
                reason,
                message,
                attempts,
                permanent,
                revision,
                retry_at,
                attempt,
            });
        }
    }
}

impl OwnerState {
    /// Holds the attempt back until this time.
    fn hold(&mut self, attempt: Attempt, until: BootTime) {
        (self.not_before, self.held_attempt) = (Some(until), Some(attempt));
    }

    /// Holds back the attempt, as its action panicked.
    fn panicked(&mut self, attempt: Attempt, until: BootTime) {
        self.is_removing = false;
        self.hold(attempt, until);
    }

    /// Stores what the action did and reported.
    fn record_job(&mut self, job: &Job, result: &mut JobResult, now: BootTime) {
        if result.cleaned_up.is_some() {
            self.memory.cleaned_up = result.cleaned_up.take();
        }
        if result.deletion_confirmed.is_some() {
            self.confirmed_deletion = result.deletion_confirmed.take();
        }
        if result.reported.is_some() {
            self.memory.reported = result.reported.take();
            self.memory.reported_next = job.next;
            self.memory.reported_at = Some(now);
        }
        if result.published.is_some() {
            self.memory.published = result.published.take();
            self.memory.published_next = job.next;
            self.memory.handled_request.clone_from(&job.handled_request);
        }
        if let Some(run) = result.applied.take() {
            self.memory.applied = Some(AppliedRun { run, ended: now });
        }
    }

    /// Forgets the refusal and the failure that this success ends.
    fn succeeded(&mut self, is_report_only: bool, clears_failure: bool) {
        let is_ended = |refusal: &Refusal| match self.is_reading {
            true => refusal.is_read,
            false => !is_report_only || refusal.is_status_write,
        };
        if self.memory.refusal.as_ref().is_none_or(is_ended) {
            self.memory.refusal = None;
        }
        if clears_failure {
            self.memory.failure = None;
        }
    }
}

/// Whether the release itself failed, and not one of its prerequisites.
fn is_release_failure(reason: &str) -> bool {
    [
        reason::INSTALL_FAILED,
        reason::UPGRADE_FAILED,
        reason::ROLLBACK_FAILED,
        reason::UNINSTALL_FAILED,
    ]
    .contains(&reason)
}

/// Turns a conflict that keeps recurring into a refusal, which the conditions show.
fn escalate_conflict(error: ActionError, conflicts: u32) -> ActionError {
    match error {
        ActionError::Conflict if conflicts >= MAX_UNREPORTED_CONFLICTS => ActionError::Refused(
            "the API server keeps answering 404 or 409, or an object changes before each write; look for a proxy or \
             another controller"
                .to_owned(),
        ),
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::deployment::DesiredDeployment;
    use krypton_types::desired::DesiredState;

    use super::*;
    use crate::owner::ReleaseOwner;

    #[test]
    fn repeated_stale_answer_is_shown() {
        let error_after = |conflicts| escalate_conflict(ActionError::Conflict, conflicts);
        assert!(matches!(
            error_after(MAX_UNREPORTED_CONFLICTS - 1),
            ActionError::Conflict
        ));
        assert!(matches!(
            error_after(MAX_UNREPORTED_CONFLICTS),
            ActionError::Refused(_)
        ));
        let transient = escalate_conflict(
            ActionError::Transient("no answer".to_owned()),
            MAX_UNREPORTED_CONFLICTS,
        );
        assert!(matches!(transient, ActionError::Transient(_)));
    }

    #[test]
    fn panic_holds_back_only_the_same_attempt() {
        let desired = DesiredState::default();
        let owner = |remove| {
            ReleaseOwner::Deployment(Arc::new(DesiredDeployment {
                remove,
                ..DesiredDeployment::default()
            }))
        };
        let mut state = OwnerState::default();
        state.panicked(
            Attempt::new(&owner(false), &desired, "f"),
            BootTime::default(),
        );
        assert!(state.holds_back(&owner(false), &desired, "f"));
        assert!(!state.holds_back(&owner(false), &desired, "g"));
        assert!(!state.holds_back(&owner(true), &desired, "f"));
    }
}
