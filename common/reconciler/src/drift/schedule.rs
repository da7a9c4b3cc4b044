//! Schedules drift checks: one release of the member at a time, and only while no action runs for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
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
use crate::drift::check::{CheckError, CheckInput, DriftCache, DriftCheck, check_release};
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

/// The drift checks of a member.
#[derive(Default)]
pub(crate) struct DriftSchedule {
    check_queue: CheckQueue,
    running: Option<(OwnerKey, Arc<DriftCheck>)>,
    /// `None` while a check runs, which then holds it.
    cache: Option<Box<DriftCache>>,
    pub jobs: JoinSet<CheckEnd>,
}

/// The cache, and the result of the check that held it.
type CheckEnd = (Box<DriftCache>, Result<RevisionDrift, CheckError>);

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
        let running = self.running.as_ref().filter(|(running, _)| running == key);
        running
            .inspect(|(_, check)| check.cancel.cancel())
            .is_some()
    }

    /// Cancels the running check, and waits for its last request.
    pub(crate) async fn end(&mut self) {
        if let Some((_, check)) = &self.running {
            check.cancel.cancel();
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
        let running = self.running.as_ref().filter(|(running, _)| running == key);
        let is_current =
            running.is_none_or(|(_, check)| check.matches_request(revision, plan.drift.as_ref()));
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
        let check = Arc::new(DriftCheck {
            release: job.release,
            revision: newest.revision,
            settings,
            cancel: CancellationToken::new(),
            adopted: newest.is_foreign(),
        });
        let member = &runner.member.name;
        let span = job.key.span(member, job.owner.generation(), &check.release);
        span.record("action", "look_for_drift");
        self.running = Some((job.key, Arc::clone(&check)));
        let run = Arc::clone(runner).run_drift_check(job.owner, check, cache);
        self.jobs.spawn(run.instrument(span));
    }

    /// Records the result of a check. Returns the owner to reconcile.
    pub(crate) fn finish(
        &mut self,
        done: Result<CheckEnd, JoinError>,
        owner_states: &mut BTreeMap<OwnerKey, OwnerState>,
        member: &str,
    ) -> Option<OwnerKey> {
        let (key, check) = self.running.take()?;
        let (cache, result) = match done {
            Ok(end) => end,
            Err(error) => {
                tracing::error!(%error, %member, "a drift check failed");
                return Some(key);
            }
        };
        self.cache = Some(cache);
        if let Some(state) = owner_states.get_mut(&key) {
            let memory = &mut state.memory;
            if let Err(CheckError::Unreadable(_)) = &result {
                memory.to_reread = Some(check.revision);
            }
            match result {
                Ok(drift) => {
                    memory.drift = Some(drift);
                    memory.failed_checks = None;
                }
                Err(CheckError::Unreadable(problem) | CheckError::Failed(problem)) => {
                    memory.record_failed_check(check.revision, problem);
                }
                Err(CheckError::Cancelled) => {}
            }
        }
        Some(key)
    }
}

fn interval(settings: &DriftSettings) -> Duration {
    Duration::from_secs(settings.interval_seconds.into())
}

impl ActionRunner {
    async fn run_drift_check(
        self: Arc<Self>,
        owner: ReleaseOwner,
        check: Arc<DriftCheck>,
        mut cache: Box<DriftCache>,
    ) -> CheckEnd {
        let result = self.check_drift(&owner, &check, &mut cache).await;
        let outcome = match &result {
            Ok(_) => "ok",
            Err(CheckError::Cancelled) => "conflict",
            Err(CheckError::Unreadable(_) | CheckError::Failed(_)) => "failed",
        };
        Span::current().record("outcome", outcome);
        if let Err(CheckError::Unreadable(problem) | CheckError::Failed(problem)) = &result {
            tracing::info!(member = %self.member.name, %problem,
                "drift check failed; waiting for the next one");
        }
        let drift = result.map(|(report, recorded)| {
            if let Some(event) = correction_event(&report) {
                self.emit_event(&owner, event);
            }
            let held_back = !recorded && check.settings.mode == DriftMode::Heal;
            let note = match held_back {
                true => "; not corrected, as Krypton has no record of this revision",
                false => "",
            };
            let message = describe(&report).map(|message| message + note);
            RevisionDrift {
                revision: report.revision,
                message,
            }
        });
        (cache, drift)
    }

    /// Returns the differences, and whether the revision has a record.
    async fn check_drift(
        &self,
        owner: &ReleaseOwner,
        check: &DriftCheck,
        cache: &mut DriftCache,
    ) -> Result<(DriftReport, bool), CheckError> {
        let (manifest, invalid_documents, digest) = self.deployed_manifest(check).await?;
        let recorded = self.is_recorded(check, &digest).await?;
        if invalid_documents > 0 {
            tracing::warn!(member = %self.member.name, unread = invalid_documents,
                "ignoring invalid documents of the manifest");
        }
        let user = owner.user(&self.desired.get().lockdown);
        let user_client = user.map(|user| client_as(&self.member.client, &user));
        let user_client = user_client.transpose()?;
        let input = CheckInput {
            check,
            client: user_client.as_ref().unwrap_or(&self.member.helm_client),
            metrics: &self.tools.drift,
            recorded,
            may_write: &|| self.check_permit().is_ok(),
        };
        let report = Box::pin(check_release(&input, cache, &manifest)).await?;
        Ok((report, recorded))
    }

    /// Returns the manifest of the revision, which must still be deployed.
    async fn deployed_manifest(
        &self,
        check: &DriftCheck,
    ) -> Result<(Vec<Value>, usize, String), CheckError> {
        let release = &check.release;
        let api: Api<Secret> = Api::namespaced(self.member.client.clone(), &release.namespace);
        let name = secret_name(&release.name, check.revision);
        self.tools.drift.requests.inc();
        let secret = call(format!("reading Secret {name}"), api.get_opt(&name)).await?;
        let secret = secret.ok_or(CheckError::Cancelled)?;
        let deployed = Revision::from_metadata(&secret.metadata)
            .is_some_and(|(_, revision)| revision.status == Status::Deployed);
        if !deployed {
            return Err(CheckError::Cancelled);
        }
        // A megabyte of YAML takes tens of milliseconds, which must not block other tasks.
        let decoded = off_thread::start(move || {
            let (objects, invalid_documents) = manifest::objects(&secret)?;
            Ok::<_, ReleaseError>((objects, invalid_documents, releases::digest(&secret)?))
        });
        let decoded = decoded.await?;
        decoded.map_err(|error| CheckError::Unreadable(chain(&error)))
    }

    /// Returns true if Krypton deployed this manifest. The users of the workspace can change it, and its objects are
    /// read and applied with Helm's rights.
    async fn is_recorded(&self, check: &DriftCheck, digest: &str) -> Result<bool, CheckError> {
        self.tools.drift.requests.inc();
        let record = self.release_record(&check.release).await;
        let record = record.map_err(|fault| CheckError::Failed(fault.text().to_owned()))?;
        match record.compare(check.revision, digest) {
            RecordComparison::Recorded => Ok(true),
            RecordComparison::Unrecorded => Ok(false),
            RecordComparison::Tampered => Err(CheckError::Unreadable(format!(
                "revision {} of release {} has changed since Krypton deployed it",
                check.revision, check.release.name
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use krypton_helm::releases::labels::ReleaseKey;
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
        let running = DriftCheck {
            release: ReleaseKey::new("acme", "web"),
            revision: 3,
            settings: settings.clone(),
            cancel: CancellationToken::new(),
            adopted: false,
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
