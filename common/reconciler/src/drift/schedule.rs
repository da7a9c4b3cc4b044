//! Schedules drift checks: one release of the member at a time, and only while no action runs for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::RecordComparison;
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, ReleaseError, Status, manifest, secret_name};
use krypton_runtime::access::client_as;
use krypton_runtime::call::call;
use krypton_runtime::chance;
use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::off_thread;
use krypton_runtime::retry::Backoff;
use krypton_runtime::work_queue::WorkQueue;
use krypton_types::desired::drift::DriftMode;
use krypton_types::error_chain::chain;
use kube::api::Api;
use serde_json::Value;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span};

use crate::actions::{ActionRunner, Job};
use crate::drift::check::{CheckError, CheckInput, DriftCache, check_release};
use crate::drift::{DriftReport, DriftSettings, correction_event, describe};
use crate::index::Index;
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::owner_state::OwnerState;
use crate::plan::{Action, Plan, RevisionDrift};

/// Due times of the releases. After a start, the first checks are spread over a whole interval.
#[derive(Debug)]
struct CheckQueue {
    queue: WorkQueue<OwnerKey>,
    /// The release that is checked next.
    next: Option<OwnerKey>,
}

impl Default for CheckQueue {
    fn default() -> Self {
        let none = Backoff::up_to(Duration::ZERO);
        Self {
            queue: WorkQueue::new(1, none, none),
            next: None,
        }
    }
}

impl CheckQueue {
    /// Schedules a check within an interval, unless one is already scheduled.
    fn add(&mut self, key: &OwnerKey, interval: Duration, now: BootTime, chance: f64) {
        let soon = now + interval.mul_f64(1.2);
        let is_scheduled = self.queue.due_at(key).is_some_and(|at| at <= soon);
        if self.next.as_ref() != Some(key) && !is_scheduled {
            let at = now + interval.mul_f64(chance);
            self.queue.add_at(key.clone(), at);
        }
    }

    /// A check starts. The next one follows after an interval, plus or minus a fifth.
    fn reschedule(&mut self, key: &OwnerKey, interval: Duration, now: BootTime, chance: f64) {
        self.remove(key);
        let at = now + interval.mul_f64(0.8 + 0.4 * chance);
        self.queue.add_at(key.clone(), at);
    }

    fn remove(&mut self, key: &OwnerKey) {
        self.next.take_if(|next| next == key);
        self.queue.forget(key);
    }

    /// Returns the release whose check is due.
    fn next_due(&mut self, now: BootTime) -> Option<&OwnerKey> {
        if self.next.is_none() {
            self.next = self.queue.pop(now);
        }
        self.next.as_ref()
    }

    fn wake(&self) -> Option<BootTime> {
        self.queue.wake().filter(|_| self.next.is_none())
    }
}

/// The running check.
#[derive(Clone, Debug)]
struct RunningCheck {
    key: OwnerKey,
    revision: u32,
    settings: DriftSettings,
    cancel: CancellationToken,
}

impl RunningCheck {
    /// Returns true if the check still has the requested revision and settings.
    fn matches_request(&self, revision: Option<u32>, settings: Option<&DriftSettings>) -> bool {
        Some(self.revision) == revision && Some(&self.settings) == settings
    }
}

/// The drift checks of a member.
#[derive(Default)]
pub(crate) struct DriftSchedule {
    check_queue: CheckQueue,
    running: Option<RunningCheck>,
    /// `None` while a check runs, which then holds it.
    cache: Option<Box<DriftCache>>,
    pub jobs: JoinSet<Box<CheckJobResult>>,
}

/// Input of a check.
pub(super) struct CheckJob {
    check: RunningCheck,
    owner: ReleaseOwner,
    release: ReleaseKey,
    adopted: bool,
    cache: Box<DriftCache>,
}

/// Result of a check.
pub(crate) struct CheckJobResult {
    key: OwnerKey,
    cache: Box<DriftCache>,
    drift: Option<RevisionDrift>,
    /// Revision to read again: it cannot be decoded, or has changed since it was deployed.
    unreadable: Option<u32>,
    /// The revision whose check failed, and why.
    failed: Option<(u32, String)>,
}

/// Reason why a check was impossible.
enum CheckFailure {
    Unreadable(String),
    Other(String),
}

impl DriftSchedule {
    /// Returns the next due time. A running check reports its own end.
    pub(crate) fn wake(&self) -> Option<BootTime> {
        self.check_queue.wake().filter(|_| self.running.is_none())
    }

    pub(crate) fn forget(&mut self, key: &OwnerKey) {
        self.check_queue.remove(key);
        self.cancel_check(key);
    }

    fn cancel_check(&self, key: &OwnerKey) -> bool {
        let running = self.running.as_ref().filter(|running| running.key == *key);
        running.inspect(|running| running.cancel.cancel()).is_some()
    }

    /// Cancels the running check, and waits for its last request.
    pub(crate) async fn end(&mut self) {
        if let Some(running) = &self.running {
            running.cancel.cancel();
        }
        while self.jobs.join_next().await.is_some() {}
    }

    /// Returns the release whose check is due, unless a check runs.
    pub(crate) fn next_due(&mut self, now: BootTime) -> Option<&OwnerKey> {
        if self.running.is_some() {
            return None;
        }
        self.check_queue.next_due(now)
    }

    /// Schedules or unschedules the owner. Returns true if a running check must end first, as the plan has another
    /// action.
    pub(crate) fn update(
        &mut self,
        key: &OwnerKey,
        plan: &Plan,
        revision: Option<u32>,
        now: BootTime,
    ) -> bool {
        let idle = plan.action == Action::Nothing;
        match &plan.drift {
            Some(settings) => self
                .check_queue
                .add(key, interval(settings), now, chance::random()),
            None => self.check_queue.remove(key),
        }
        let running = self.running.as_ref();
        let running = running.filter(|running| running.key == *key);
        let is_current =
            running.is_none_or(|running| running.matches_request(revision, plan.drift.as_ref()));
        if idle && is_current {
            return false;
        }
        // Cancel an outdated check and start one with the current settings next.
        if plan.drift.is_some() && !is_current {
            self.check_queue.remove(key);
            self.check_queue.queue.add(key.clone());
        }
        self.cancel_check(key) && !idle
    }

    /// Starts a check of the job's release instead of an action, if it is the owner's turn.
    pub(crate) fn start(
        &mut self,
        job: Job,
        index: &Index,
        runner: &Arc<ActionRunner>,
        now: BootTime,
    ) {
        let (Some(settings), Some(newest)) = (job.plan.drift, job.newest) else {
            return;
        };
        if self.running.is_some() || self.check_queue.next.as_ref() != Some(&job.key) {
            return;
        }
        self.check_queue
            .reschedule(&job.key, interval(&settings), now, chance::random());
        let mut cache = self.cache.take().unwrap_or_default();
        cache.retain(|release| index.is_claimed(release));
        let check = RunningCheck {
            key: job.key,
            revision: newest.revision,
            settings,
            cancel: CancellationToken::new(),
        };
        self.running = Some(check.clone());
        let member = &runner.member.name;
        let span = check.key.span(member, job.owner.generation(), &job.release);
        span.record("action", "look_for_drift");
        let job = Box::new(CheckJob {
            check,
            owner: job.owner,
            release: job.release,
            adopted: newest.is_foreign(),
            cache,
        });
        let check = Arc::clone(runner).run_drift_check(job);
        self.jobs.spawn(check.instrument(span));
    }

    /// Records the result of a check. Returns the owner to reconcile.
    pub(crate) fn finish(
        &mut self,
        done: Result<Box<CheckJobResult>, JoinError>,
        owner_states: &mut BTreeMap<OwnerKey, OwnerState>,
        member: &str,
    ) -> Option<OwnerKey> {
        let running = self.running.take();
        match done {
            Ok(result) => {
                self.cache = Some(result.cache);
                if let Some(state) = owner_states.get_mut(&result.key) {
                    if result.drift.is_some() {
                        state.memory.drift = result.drift;
                        state.memory.failed_checks = None;
                    }
                    if let Some((revision, message)) = result.failed {
                        state.memory.record_failed_check(revision, message);
                    }
                    if result.unreadable.is_some() {
                        state.memory.to_reread = result.unreadable;
                    }
                }
                Some(result.key)
            }
            Err(error) => {
                tracing::error!(%error, %member, "a drift check failed");
                running.map(|running| running.key)
            }
        }
    }
}

fn interval(settings: &DriftSettings) -> Duration {
    Duration::from_secs(settings.interval_seconds.into())
}

impl ActionRunner {
    async fn run_drift_check(self: Arc<Self>, mut job: Box<CheckJob>) -> Box<CheckJobResult> {
        let result = self.check_drift(&mut job).await;
        let outcome = match &result {
            Ok(Some(_)) => "ok",
            Ok(None) => "conflict",
            Err(_) => "failed",
        };
        Span::current().record("outcome", outcome);
        let (mut unreadable, mut failed) = (None, None);
        let drift = match result {
            Ok(Some((report, recorded))) => {
                if let Some(event) = correction_event(&report) {
                    self.emit_event(&job.owner, event);
                }
                let held_back = !recorded && job.check.settings.mode == DriftMode::Heal;
                let note = match held_back {
                    true => "; not corrected, as Krypton has no record of this revision",
                    false => "",
                };
                let message = describe(&report).map(|message| message + note);
                Some(RevisionDrift {
                    revision: report.revision,
                    message,
                })
            }
            // The release has changed in the meantime.
            Ok(None) => None,
            Err(failure) => {
                let problem = match failure {
                    CheckFailure::Unreadable(problem) => {
                        unreadable = Some(job.check.revision);
                        problem
                    }
                    CheckFailure::Other(problem) => problem,
                };
                tracing::info!(member = %self.member.name, %problem,
                    "drift check failed; waiting for the next one");
                failed = Some((job.check.revision, problem));
                None
            }
        };
        Box::new(CheckJobResult {
            key: job.check.key,
            cache: job.cache,
            drift,
            unreadable,
            failed,
        })
    }

    /// Returns the differences, and whether the revision has a record.
    async fn check_drift(
        &self,
        job: &mut CheckJob,
    ) -> Result<Option<(DriftReport, bool)>, CheckFailure> {
        let Some((manifest, invalid_documents, digest)) = self.deployed_manifest(job).await? else {
            return Ok(None);
        };
        let recorded = self.is_recorded(job, &digest).await?;
        if invalid_documents > 0 {
            tracing::warn!(member = %self.member.name, unread = invalid_documents,
                "ignoring invalid documents of the manifest");
        }
        let user = job.owner.user(&self.desired.get().lockdown);
        let user_client = user.map(|user| client_as(&self.member.client, &user));
        let user_client = user_client.transpose();
        let user_client = user_client.map_err(|error| CheckFailure::Other(chain(&error)))?;
        let input = CheckInput {
            client: user_client.as_ref().unwrap_or(&self.member.helm_client),
            release: &job.release,
            revision: job.check.revision,
            settings: &job.check.settings,
            metrics: &self.tools.drift,
            cancel: &job.check.cancel,
            adopted: job.adopted,
            recorded,
            may_write: &|| self.check_permit().is_ok(),
        };
        let check = Box::pin(check_release(&input, &mut job.cache, &manifest));
        match check.await {
            Ok(report) => Ok(Some((report, recorded))),
            Err(CheckError::Cancelled) => Ok(None),
            Err(error) => Err(CheckFailure::Other(chain(&error))),
        }
    }

    /// Returns the manifest of the revision, if it is still deployed.
    async fn deployed_manifest(
        &self,
        job: &CheckJob,
    ) -> Result<Option<(Vec<Value>, usize, String)>, CheckFailure> {
        let api: Api<Secret> = Api::namespaced(self.member.client.clone(), &job.release.namespace);
        let name = secret_name(&job.release.name, job.check.revision);
        self.tools.drift.requests.inc();
        let secret = call(format!("reading Secret {name}"), api.get_opt(&name)).await;
        let secret = secret.map_err(|error| CheckFailure::Other(chain(&error)))?;
        let Some(secret) = secret else {
            return Ok(None);
        };
        let deployed = Revision::from_metadata(&secret.metadata)
            .is_some_and(|(_, revision)| revision.status == Status::Deployed);
        if !deployed {
            return Ok(None);
        }
        // A megabyte of YAML takes tens of milliseconds, which must not block other tasks.
        let decoded = off_thread::start(move || {
            let (objects, invalid_documents) = manifest::objects(&secret)?;
            Ok::<_, ReleaseError>((objects, invalid_documents, releases::digest(&secret)?))
        });
        let decoded = decoded.await;
        let decoded = decoded.map_err(|error| CheckFailure::Other(chain(&error)))?;
        decoded
            .map(Some)
            .map_err(|error| CheckFailure::Unreadable(chain(&error)))
    }

    /// Returns true if Krypton deployed this manifest. The users of the workspace can change it, and its objects are
    /// read and applied with Helm's rights.
    async fn is_recorded(&self, job: &CheckJob, digest: &str) -> Result<bool, CheckFailure> {
        self.tools.drift.requests.inc();
        let record = self.release_record(&job.release).await;
        let record = record.map_err(|fault| CheckFailure::Other(fault.text().to_owned()))?;
        match record.compare(job.check.revision, digest) {
            RecordComparison::Recorded => Ok(true),
            RecordComparison::Unrecorded => Ok(false),
            RecordComparison::Tampered => Err(CheckFailure::Unreadable(format!(
                "revision {} of release {} has changed since Krypton deployed it",
                job.check.revision, job.release.name
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::desired::drift::DriftPolicy;
    use krypton_types::tenant::TenantKey;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(600);

    fn key(number: u32) -> OwnerKey {
        OwnerKey::Tenant(TenantKey::new("default", format!("t{number:03}")))
    }

    pub(super) fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(seconds))
    }

    #[test]
    fn drift_checks_are_spread_evenly_over_interval() {
        let mut check_queue = CheckQueue::default();
        for number in 0..100 {
            let chance = f64::from(number) / 100.0;
            check_queue.add(&key(number), INTERVAL, at(0), chance);
        }
        let mut checks: BTreeMap<OwnerKey, u32> = BTreeMap::new();
        let mut most = 0;
        for second in 0..=6000 {
            let mut now = 0;
            while let Some(next) = check_queue.next_due(at(second)).cloned() {
                *checks.entry(next.clone()).or_default() += 1;
                check_queue.reschedule(&next, INTERVAL, at(second), 0.5);
                now += 1;
            }
            most = most.max(now);
        }
        assert!(most <= 1, "{most}");
        assert!(
            checks.values().all(|checks| (9..=11).contains(checks)),
            "{checks:?}"
        );
    }

    #[test]
    fn reentered_owner_keeps_turn_unless_interval_shrinks() {
        let mut check_queue = CheckQueue::default();
        check_queue.add(&key(1), INTERVAL, at(0), 0.9);
        check_queue.add(&key(1), INTERVAL, at(0), 0.1);
        assert_eq!(check_queue.wake(), Some(at(540)));
        check_queue.add(&key(1), INTERVAL / 100, at(0), 0.5);
        assert_eq!(check_queue.wake(), Some(at(3)));
    }

    #[test]
    fn drift_check_continues_only_while_its_inputs_match() {
        let settings = DriftSettings {
            mode: DriftMode::Heal,
            interval_seconds: 600,
            ..DriftSettings::default()
        };
        let running = RunningCheck {
            key: key(1),
            revision: 3,
            settings: settings.clone(),
            cancel: CancellationToken::new(),
        };
        assert!(running.matches_request(Some(3), Some(&settings)));
        let warn_settings = DriftSettings {
            mode: DriftMode::Warn,
            ..settings.clone()
        };
        let policy = DriftPolicy {
            mode: DriftMode::Heal,
            interval_seconds: 600,
        };
        let ignore_settings = DriftSettings::new(&policy, |name| {
            name.ends_with("drift-ignore")
                .then_some("Deployment:/spec/replicas")
        });
        assert_ne!(ignore_settings.rules, settings.rules);
        for (revision, now) in [
            (Some(3), Some(&warn_settings)),
            (Some(3), Some(&ignore_settings)),
            (Some(3), None),
            (Some(4), Some(&settings)),
            (None, Some(&settings)),
        ] {
            assert!(
                !running.matches_request(revision, now),
                "{revision:?} {now:?}"
            );
        }
    }

    #[test]
    fn removed_owner_loses_turn_and_next_follows() {
        let mut check_queue = CheckQueue::default();
        for number in 1..=2 {
            check_queue.add(&key(number), INTERVAL, at(0), 0.0);
        }
        assert_eq!(check_queue.next_due(at(0)), Some(&key(1)));
        check_queue.add(&key(1), INTERVAL, at(0), 0.5);
        assert_eq!(
            check_queue.next_due(at(0)),
            Some(&key(1)),
            "it keeps its turn"
        );
        assert_eq!(check_queue.wake(), None);
        check_queue.remove(&key(1));
        assert_eq!(check_queue.next_due(at(0)), Some(&key(2)));
        check_queue.remove(&key(2));
        assert_eq!(check_queue.next_due(at(0)), None);
        assert_eq!(check_queue.wake(), None);
    }
}
