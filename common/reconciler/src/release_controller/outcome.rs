//! Records the result of an action, and the time of the next attempt.

use std::sync::Arc;
use std::time::Duration;

use krypton_helm::releases::revision::Revision;
use krypton_runtime::chance;
use krypton_runtime::clock::BootTime;
use krypton_runtime::retry::backoff;
use krypton_runtime::work_queue::Outcome;
use krypton_types::conditions::reason as why;
use tokio::task::{Id, JoinError};

use super::Running;
use crate::actions::{ActionError, JobResult, ReleaseNews};
use crate::helm_queue::{Failed, Waited};
use crate::owner::OwnerKey;
use crate::placed_tenants::STALE_IS_SAID;
use crate::plan::{Applied, Attempt, Failure, Refusal, Remediation};
use crate::run_loop::{AFTER_CONFLICT, Reconciler, Slot};

/// Number of consecutive failed requests before a condition shows the failure.
const SHOWN_AFTER: u32 = 3;
/// Longest pause after a failure that the release did not cause.
const LOCAL_RETRY_MAX: Duration = Duration::from_secs(30);

impl Reconciler {
    /// Plans again for a release that has its chart and slot now, or records why the wait failed.
    pub(crate) fn finish_waiting(&mut self, ended: Result<(Id, Waited), JoinError>) {
        let failed = match self.helm.ended(ended) {
            None => return,
            Some(Ok(key)) => return self.queue.add(key),
            Some(Err(failed)) => failed,
        };
        let Failed {
            key,
            waiting,
            fault,
        } = failed;
        let now = BootTime::now();
        let outcome = fault.as_ref().map_or("failed", ActionError::outcome);
        waiting.span.record("outcome", outcome);
        let _within = waiting.span.entered();
        let work = &self.performer.tools.work;
        work.reconciled(&waiting.need.action, now.since(waiting.begun), outcome);
        match fault {
            Some(fault) => self.failed((&key, false), waiting.attempt, fault, now),
            None => {
                tracing::error!(member = %self.member.name, "the wait for Helm ended badly");
                let slot = self.slots.entry(key.clone()).or_default();
                slot.hold(waiting.attempt, BootTime(now.0 + self.member.retry_max));
            }
        }
        self.owners_changed([key].into());
    }

    pub(crate) fn finish(&mut self, running: Running, done: Result<Box<JobResult>, JoinError>) {
        let now = BootTime::now();
        let Running { key, attempt, span } = running;
        // The following log lines belong to the span of the same job.
        let _within = span.entered();
        self.calls.done(&key, Outcome::Done, now, 0.0);
        self.queue.done(&key, Outcome::Again(now), now, 0.0);
        match done {
            Ok(done) => self.record(*done, now),
            Err(error) => {
                tracing::error!(%error, member = %self.member.name, "an action ended badly");
                if let Some(slot) = self.slots.get_mut(&key) {
                    slot.panicked(attempt, BootTime(now.0 + self.member.retry_max));
                }
            }
        }
        self.owners_changed([key].into());
    }

    fn record(&mut self, mut done: JobResult, now: BootTime) {
        if done.lists != self.index.lists() {
            done.forget_responses();
        }
        let read = done.release_details.is_some();
        let one = self.learn(&mut done);
        let slot = self.slots.entry(done.key.clone()).or_default();
        slot.removing = false;
        (slot.not_before, slot.held) = (None, None);
        slot.needs_slot = done.needs_slot;
        if read || one.is_some() {
            let unread = one.as_ref().filter(|_| !read);
            slot.memory.doubted = unread.map(|revision| revision.revision);
        }
        if read {
            slot.memory.unrecorded = done.unrecorded;
        }
        if read && let Some(one) = one {
            slot.memory.read(&one);
            let over = |failure: &mut Failure| failure.reason == why::RELEASE_TAMPERED;
            slot.memory.failure.take_if(over);
        }
        slot.remember(&mut done, now);
        // Reporting a refusal does not end it.
        let refusal = slot.memory.refusal.as_ref();
        let of_action = refusal.is_some_and(|refusal| !refusal.of_status);
        let said_it = done.spoke && of_action;
        if !(said_it || matches!(done.fault, Some(ActionError::Conflict))) {
            slot.stale = 0;
        }
        match done.fault {
            None => slot.succeeded(done.spoke, done.progressed),
            Some(fault) => self.failed((&done.key, done.spoke), done.attempt, fault, now),
        }
    }

    /// Adds the objects that the action read or wrote to the index. Returns the single revision among them.
    fn learn(&mut self, done: &mut JobResult) -> Option<Revision> {
        if let Some(tenant) = done.tenant.take() {
            let changed = self.index.tenant_written(tenant);
            self.owners_changed(changed);
        }
        if let Some(meta) = done.workspace.take() {
            let (namespaces, changed) = self.index.workspace_written(&meta);
            self.placed_tenants.touch_namespaces(&namespaces);
            self.owners_changed(changed);
        }
        let mut one = None;
        match done.release.take() {
            Some(ReleaseNews::All {
                metas,
                version,
                known_before,
            }) => {
                self.index
                    .release_listed(&done.of, metas, (version, known_before));
            }
            Some(ReleaseNews::One(meta)) => {
                one = Revision::of(&meta).map(|(_, revision)| revision);
                let changed = self.index.release_read(&meta);
                self.owners_changed(changed);
            }
            None => {}
        }
        if let Some(release_details) = done.release_details.take() {
            self.release_details
                .insert(done.of.clone(), Arc::new(release_details));
        } else if self.index.release(&done.of).is_empty() {
            self.release_details.remove(&done.of);
        }
        one
    }

    /// Records why an attempt failed, and the time of the next one.
    fn failed(
        &mut self,
        (key, spoke): (&OwnerKey, bool),
        attempt: Attempt,
        fault: ActionError,
        now: BootTime,
    ) {
        let slot = self.slots.entry(key.clone()).or_default();
        let fault = lasting(fault, slot.stale);
        let refused = matches!(fault, ActionError::Refused(_));
        match fault {
            ActionError::Conflict => {
                let pause = AFTER_CONFLICT * (1 << slot.stale.min(4));
                let pause = pause.mul_f64(1.0 + chance::random::<f64>());
                slot.stale += 1;
                slot.not_before = Some(BootTime(now.0 + pause));
            }
            ActionError::Transient(problem) | ActionError::Refused(problem) => {
                let before = slot.memory.refusal.take();
                let same = before.is_some_and(|before| before.attempt == attempt);
                slot.failures = if same { slot.failures + 1 } else { 1 };
                let pause = backoff(slot.failures, self.member.retry_max, chance::random());
                let retry_at = BootTime(now.0 + pause);
                let shown = refused || slot.failures >= SHOWN_AFTER;
                // Write the condition now, unless the API server refuses the status itself.
                if spoke || !shown {
                    slot.hold(attempt.clone(), retry_at);
                }
                tracing::warn!(member = %self.member.name, %problem,
                    retry_in_seconds = pause.as_secs(), "not done");
                slot.memory.refusal = Some(Refusal {
                    message: problem,
                    attempts: slot.failures,
                    retry_at,
                    attempt,
                    of_status: spoke,
                    of_reading: slot.reading,
                    shown,
                });
            }
            ActionError::Failed {
                reason,
                message,
                permanent,
            } => self.shown(key, attempt, (reason, message, permanent), now),
        }
    }

    /// Records a failure that the conditions show.
    fn shown(
        &mut self,
        key: &OwnerKey,
        attempt: Attempt,
        (reason, message, permanent): (&'static str, String, bool),
        now: BootTime,
    ) {
        let slot = self.slots.entry(key.clone()).or_default();
        let before = slot.memory.failure.as_ref();
        let before = before.filter(|failure| failure.attempt == attempt);
        // Count failures of the release separately from other failures, because only they lead to giving up.
        let attempts = before
            .filter(|failure| is_of_release(failure.reason) == is_of_release(reason))
            .map_or(0, |failure| failure.attempts)
            + 1;
        let policy = &self.member.policy;
        let counts = policy.retries.is_some() || policy.remediation == Remediation::Rollback;
        let stands = counts
            && !is_of_release(reason)
            && before.is_some_and(|failure| is_of_release(failure.reason));
        let cap = match reason {
            // A retry costs little, and the cause may end at any time.
            why::HELM_UNAVAILABLE | why::SUSPENDED => self.member.retry_max.min(LOCAL_RETRY_MAX),
            _ => self.member.retry_max,
        };
        let pause = match permanent {
            true => cap,
            false => backoff(attempts, cap, chance::random()),
        };
        let retry_at = BootTime(now.0 + pause);
        tracing::warn!(member = %self.member.name, reason, problem = %message,
            attempts, retry_in_seconds = pause.as_secs(), "failed");
        // The report of this failure may be a write, too. A given-up release must not start again because of it.
        if reason == why::SUSPENDED || stands {
            slot.hold(attempt.clone(), retry_at);
        }
        if !stands {
            slot.memory.failure = Some(Failure {
                reason,
                message,
                attempts,
                permanent,
                retry_at,
                attempt,
            });
        }
    }
}

impl Slot {
    /// Holds the attempt back until this time.
    fn hold(&mut self, attempt: Attempt, until: BootTime) {
        (self.not_before, self.held) = (Some(until), Some(attempt));
    }

    /// Holds back the attempt, as its action panicked.
    fn panicked(&mut self, attempt: Attempt, until: BootTime) {
        self.removing = false;
        self.hold(attempt, until);
    }

    /// Stores what the action did and reported.
    fn remember(&mut self, done: &mut JobResult, now: BootTime) {
        if done.let_go.is_some() {
            self.memory.let_go = done.let_go.take();
        }
        if done.deletion_confirmed.is_some() {
            self.deletion_confirmed = done.deletion_confirmed.take();
        }
        if done.said.is_some() {
            self.memory.said = done.said.take();
            self.memory.said_next = done.next;
            self.memory.said_at = Some(now);
        }
        if done.told.is_some() {
            self.memory.told = done.told.take();
            self.memory.told_next = done.next;
        }
        if let Some(run) = done.applied.take() {
            self.memory.applied = Some(Applied { run, ended: now });
        }
    }

    /// Forgets the refusal and the failure that this success ends.
    fn succeeded(&mut self, spoke: bool, progressed: bool) {
        let over = |refusal: &Refusal| match self.reading {
            true => refusal.of_reading,
            false => !spoke || refusal.of_status,
        };
        if self.memory.refusal.as_ref().is_none_or(over) {
            self.memory.refusal = None;
            self.failures = 0;
        }
        if progressed {
            self.memory.failure = None;
        }
    }
}

/// Whether the release itself failed, and not one of its prerequisites.
fn is_of_release(reason: &str) -> bool {
    [
        why::INSTALL_FAILED,
        why::UPGRADE_FAILED,
        why::ROLLBACK_FAILED,
        why::UNINSTALL_FAILED,
    ]
    .contains(&reason)
}

/// Turns a conflict that keeps recurring into a refusal, which the conditions show.
fn lasting(fault: ActionError, stale: u32) -> ActionError {
    match fault {
        ActionError::Conflict if stale >= STALE_IS_SAID => ActionError::Refused(
            "the API server keeps answering 404 or 409, or an object changes before each write; look for a proxy or \
             another controller"
                .to_owned(),
        ),
        fault => fault,
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
        let after = |stale| lasting(ActionError::Conflict, stale);
        assert!(matches!(after(STALE_IS_SAID - 1), ActionError::Conflict));
        assert!(matches!(after(STALE_IS_SAID), ActionError::Refused(_)));
        let passing = lasting(
            ActionError::Transient("no answer".to_owned()),
            STALE_IS_SAID,
        );
        assert!(matches!(passing, ActionError::Transient(_)));
    }

    #[test]
    fn panic_holds_back_only_the_same_attempt() {
        let desired = serde_json::json!({
            "version": { "epoch": 1, "generation": 1 },
            "chart": { "repo": "r", "name": "n", "version": "1", "install_crds": false, "values": {} },
            "paused": false,
        });
        let desired: DesiredState = serde_json::from_value(desired).unwrap();
        let owner = |remove| {
            ReleaseOwner::Deployment(Arc::new(DesiredDeployment {
                remove,
                ..DesiredDeployment::default()
            }))
        };
        let mut slot = Slot::default();
        slot.panicked(
            Attempt::of(&owner(false), &desired, "f"),
            BootTime::default(),
        );
        assert!(slot.held_for(&owner(false), &desired, "f"));
        assert!(!slot.held_for(&owner(false), &desired, "g"));
        assert!(!slot.held_for(&owner(true), &desired, "f"));
    }
}
