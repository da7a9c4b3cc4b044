//! Schedules drift checks: one release of the member at a time, and only while no action runs for it.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::Verdict;
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

use crate::actions::ActionRunner;
use crate::drift::look::{LookError, Notes, Task, look as drift_of};
use crate::drift::{Seen, Wanted, described, told};
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::plan::{Action, Drifted, Plan};
use crate::run_loop::Reconciler;

/// Due times of the releases. After a start, the first checks are spread over a whole interval.
#[derive(Debug)]
struct Schedule {
    queue: WorkQueue<OwnerKey>,
    /// The release that is checked next.
    next: Option<OwnerKey>,
}

impl Default for Schedule {
    fn default() -> Self {
        let none = Backoff::up_to(Duration::ZERO);
        Self {
            queue: WorkQueue::new(1, none, none),
            next: None,
        }
    }
}

impl Schedule {
    /// Schedules a check within an interval, unless one is already scheduled.
    fn enter(&mut self, key: &OwnerKey, interval: Duration, now: BootTime, chance: f64) {
        let soon = BootTime(now.0 + interval.mul_f64(1.2));
        let is_scheduled = self.queue.due_at(key).is_some_and(|at| at <= soon);
        if self.next.as_ref() != Some(key) && !is_scheduled {
            let at = BootTime(now.0 + interval.mul_f64(chance));
            self.queue.add_at(key.clone(), at);
        }
    }

    /// A check starts. The next one follows after an interval, plus or minus a fifth.
    fn begun(&mut self, key: &OwnerKey, interval: Duration, now: BootTime, chance: f64) {
        self.leave(key);
        let at = BootTime(now.0 + interval.mul_f64(0.8 + 0.4 * chance));
        self.queue.add_at(key.clone(), at);
    }

    fn leave(&mut self, key: &OwnerKey) {
        self.next.take_if(|next| next == key);
        self.queue.forget(key);
    }

    /// Returns the release whose check is due.
    fn turn(&mut self, now: BootTime) -> Option<&OwnerKey> {
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
#[derive(Debug)]
struct Running {
    key: OwnerKey,
    revision: u32,
    wanted: Wanted,
    cancel: CancellationToken,
}

impl Running {
    /// Returns true if the check still has the requested revision and settings.
    fn seeks(&self, revision: Option<u32>, wanted: Option<&Wanted>) -> bool {
        Some(self.revision) == revision && Some(&self.wanted) == wanted
    }
}

/// The drift checks of a member.
#[derive(Default)]
pub(crate) struct DriftSchedule {
    schedule: Schedule,
    running: Option<Running>,
    /// `None` while a check runs, which then holds them.
    notes: Option<Box<Notes>>,
    pub jobs: JoinSet<Box<Looked>>,
}

/// Input of a check.
pub(super) struct Look {
    key: OwnerKey,
    owner: ReleaseOwner,
    release: ReleaseKey,
    revision: u32,
    adopted: bool,
    wanted: Wanted,
    cancel: CancellationToken,
    notes: Box<Notes>,
}

/// Result of a check.
pub(crate) struct Looked {
    key: OwnerKey,
    notes: Box<Notes>,
    drifted: Option<Drifted>,
    /// Revision to read again: it cannot be decoded, or has changed since it was deployed.
    unreadable: Option<u32>,
}

/// Reason why a check was impossible.
enum Blind {
    Unreadable(String),
    Otherwise(String),
}

impl DriftSchedule {
    /// Returns the next due time. A running check reports its own end.
    pub(crate) fn wake(&self) -> Option<BootTime> {
        self.schedule.wake().filter(|_| self.running.is_none())
    }

    pub(crate) fn forget(&mut self, key: &OwnerKey) {
        self.schedule.leave(key);
        self.call_off(key);
    }

    fn call_off(&self, key: &OwnerKey) -> bool {
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
}

impl Reconciler {
    /// Queues the release whose check is due.
    pub(crate) fn check_drift(&mut self, now: BootTime) {
        if self.drift_schedule.running.is_none()
            && let Some(key) = self.drift_schedule.schedule.turn(now)
        {
            self.queue.add(key.clone());
        }
    }

    /// Schedules or unschedules the owner. Returns true if a running check must end first, as the plan has another
    /// action.
    pub(crate) fn drift_first(
        &mut self,
        key: &OwnerKey,
        plan: &Plan,
        revision: Option<u32>,
        now: BootTime,
    ) -> bool {
        let idle = plan.action == Action::Nothing;
        let drift_schedule = &mut self.drift_schedule;
        match &plan.drift {
            Some(wanted) => {
                drift_schedule
                    .schedule
                    .enter(key, interval(wanted), now, chance::random())
            }
            None => drift_schedule.schedule.leave(key),
        }
        let running = drift_schedule.running.as_ref();
        let running = running.filter(|running| running.key == *key);
        let goes_on = running.is_none_or(|running| running.seeks(revision, plan.drift.as_ref()));
        if idle && goes_on {
            return false;
        }
        // Cancel an outdated check and start one with the current settings next.
        if plan.drift.is_some() && !goes_on {
            drift_schedule.schedule.leave(key);
            drift_schedule.schedule.queue.add(key.clone());
        }
        drift_schedule.call_off(key) && !idle
    }

    /// Starts a check if it is the owner's turn.
    pub(crate) fn begin_drift(
        &mut self,
        key: &OwnerKey,
        owner: &ReleaseOwner,
        plan: Plan,
        (release, revision): (&ReleaseKey, Option<u32>),
        now: BootTime,
    ) {
        let drift_schedule = &mut self.drift_schedule;
        let (Some(wanted), Some(revision)) = (plan.drift, revision) else {
            return;
        };
        if drift_schedule.running.is_some() || drift_schedule.schedule.next.as_ref() != Some(key) {
            return;
        }
        drift_schedule
            .schedule
            .begun(key, interval(&wanted), now, chance::random());
        let cancel = CancellationToken::new();
        let newest = self.index.release(release).last().copied();
        let adopted = newest.is_some_and(Revision::is_foreign);
        let mut notes = drift_schedule.notes.take().unwrap_or_default();
        notes.keep(|release| self.index.claimed(release));
        drift_schedule.running = Some(Running {
            key: key.clone(),
            revision,
            wanted: wanted.clone(),
            cancel: cancel.clone(),
        });
        let look = Box::new(Look {
            key: key.clone(),
            owner: owner.clone(),
            release: release.clone(),
            revision,
            adopted,
            wanted,
            cancel,
            notes,
        });
        let span = key.span(&self.member.name, owner.generation(), release);
        span.record("action", "look_for_drift");
        let looking = Arc::clone(&self.performer).look(look);
        drift_schedule.jobs.spawn(looking.instrument(span));
    }

    pub(crate) fn finish_drift(&mut self, done: Result<Box<Looked>, JoinError>) {
        let running = self.drift_schedule.running.take();
        match done {
            Ok(looked) => {
                self.drift_schedule.notes = Some(looked.notes);
                if let Some(slot) = self.slots.get_mut(&looked.key) {
                    if looked.drifted.is_some() {
                        slot.memory.drift = looked.drifted;
                    }
                    if looked.unreadable.is_some() {
                        slot.memory.doubted = looked.unreadable;
                    }
                }
                self.queue.add(looked.key);
            }
            Err(error) => {
                tracing::error!(%error, member = %self.member.name, "a look for drift ended badly");
                self.queue.extend(running.map(|running| running.key));
            }
        }
    }
}

fn interval(wanted: &Wanted) -> Duration {
    Duration::from_secs(wanted.interval_seconds.into())
}

impl ActionRunner {
    async fn look(self: Arc<Self>, mut look: Box<Look>) -> Box<Looked> {
        let seen = self.look_at(&mut look).await;
        let outcome = match &seen {
            Ok(Some(_)) => "ok",
            Ok(None) => "conflict",
            Err(_) => "failed",
        };
        Span::current().record("outcome", outcome);
        let mut unreadable = None;
        let drifted = match seen {
            Ok(Some((seen, recorded))) => {
                for told in told(&seen) {
                    self.tell(&look.owner, told);
                }
                let held_back = !recorded && look.wanted.mode == DriftMode::Heal;
                let message = described(&seen).map(|message| match held_back {
                    false => message,
                    true => {
                        format!(
                            "{message}; not corrected, as Krypton has no record of this revision"
                        )
                    }
                });
                Some(Drifted {
                    revision: seen.revision,
                    message,
                })
            }
            // The release has changed in the meantime.
            Ok(None) => None,
            Err(blind) => {
                let problem = match blind {
                    Blind::Unreadable(problem) => {
                        unreadable = Some(look.revision);
                        problem
                    }
                    Blind::Otherwise(problem) => problem,
                };
                tracing::info!(member = %self.member.name, %problem,
                    "drift check failed; waiting for the next one");
                None
            }
        };
        Box::new(Looked {
            key: look.key,
            notes: look.notes,
            drifted,
            unreadable,
        })
    }

    /// Returns the differences, and whether the revision has a record.
    async fn look_at(&self, look: &mut Look) -> Result<Option<(Seen, bool)>, Blind> {
        let Some((manifest, unread, digest)) = self.manifest(look).await? else {
            return Ok(None);
        };
        let recorded = self.is_recorded(look, &digest).await?;
        if unread > 0 {
            tracing::warn!(member = %self.member.name, unread,
                "ignoring invalid documents of the manifest");
        }
        let user = look.owner.user(&self.desired.get().lockdown);
        let acting = user.map(|user| client_as(&self.member.client, &user));
        let acting = acting.transpose();
        let acting = acting.map_err(|error| Blind::Otherwise(chain(&error)))?;
        let task = Task {
            client: acting.as_ref().unwrap_or(&self.member.helm_client),
            release: &look.release,
            revision: look.revision,
            wanted: &look.wanted,
            metrics: &self.tools.drift,
            cancel: &look.cancel,
            adopted: look.adopted,
            recorded,
            may_write: &|| self.may_write(),
        };
        let looking = Box::pin(drift_of(&task, &mut look.notes, &manifest));
        match looking.await {
            Ok(seen) => Ok(Some((seen, recorded))),
            Err(LookError::CalledOff) => Ok(None),
            Err(error) => Err(Blind::Otherwise(error.text())),
        }
    }

    /// Returns the manifest of the revision, if it is still deployed.
    async fn manifest(&self, look: &Look) -> Result<Option<(Vec<Value>, usize, String)>, Blind> {
        let api: Api<Secret> = Api::namespaced(self.member.client.clone(), &look.release.namespace);
        let name = secret_name(&look.release.name, look.revision);
        self.tools.drift.requests.inc();
        let secret = call(format!("reading Secret {name}"), api.get_opt(&name)).await;
        let secret = secret.map_err(|error| Blind::Otherwise(chain(&error)))?;
        let Some(secret) = secret else {
            return Ok(None);
        };
        let deployed = Revision::of(&secret.metadata)
            .is_some_and(|(_, revision)| revision.status == Status::Deployed);
        if !deployed {
            return Ok(None);
        }
        // A megabyte of YAML takes tens of milliseconds, which must not block other tasks.
        let read = off_thread::start(move || {
            let (objects, unread) = manifest::objects(&secret)?;
            Ok::<_, ReleaseError>((objects, unread, releases::digest(&secret)?))
        });
        let read = read.await;
        let read = read.map_err(|error| Blind::Otherwise(chain(&error)))?;
        read.map(Some)
            .map_err(|error| Blind::Unreadable(chain(&error)))
    }

    /// Returns true if Krypton deployed this manifest. The users of the workspace can change it, and its objects are
    /// read and applied with Helm's rights.
    async fn is_recorded(&self, look: &Look, digest: &str) -> Result<bool, Blind> {
        self.tools.drift.requests.inc();
        let record = self.release_record(&look.release).await;
        let record = record.map_err(|fault| Blind::Otherwise(fault.text().to_owned()))?;
        match record.verdict(look.revision, digest) {
            Verdict::Recorded => Ok(true),
            Verdict::Unrecorded => Ok(false),
            Verdict::Tampered => Err(Blind::Unreadable(format!(
                "revision {} of release {} has changed since Krypton deployed it",
                look.revision, look.release.name
            ))),
        }
    }

    fn may_write(&self) -> bool {
        self.stop.is_open() && self.hold.get().may_start(BootTime::now())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use krypton_types::desired::drift::DriftPolicy;
    use krypton_types::tenant::TenantKey;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(600);

    fn key(number: u32) -> OwnerKey {
        OwnerKey::Tenant(TenantKey {
            namespace: "default".to_owned(),
            name: format!("t{number:03}"),
        })
    }

    pub(super) fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(seconds))
    }

    #[test]
    fn drift_checks_are_spread_evenly_over_interval() {
        let mut schedule = Schedule::default();
        for number in 0..100 {
            let chance = f64::from(number) / 100.0;
            schedule.enter(&key(number), INTERVAL, at(0), chance);
        }
        let mut looks: BTreeMap<OwnerKey, u32> = BTreeMap::new();
        let mut most = 0;
        for second in 0..=6000 {
            let mut now = 0;
            while let Some(next) = schedule.turn(at(second)).cloned() {
                *looks.entry(next.clone()).or_default() += 1;
                schedule.begun(&next, INTERVAL, at(second), 0.5);
                now += 1;
            }
            most = most.max(now);
        }
        assert!(most <= 1, "{most}");
        assert!(
            looks.values().all(|looks| (9..=11).contains(looks)),
            "{looks:?}"
        );
    }

    #[test]
    fn reentered_owner_keeps_turn_unless_interval_shrinks() {
        let mut schedule = Schedule::default();
        schedule.enter(&key(1), INTERVAL, at(0), 0.9);
        schedule.enter(&key(1), INTERVAL, at(0), 0.1);
        assert_eq!(schedule.wake(), Some(at(540)));
        schedule.enter(&key(1), INTERVAL / 100, at(0), 0.5);
        assert_eq!(schedule.wake(), Some(at(3)));
    }

    #[test]
    fn drift_check_continues_only_while_its_inputs_match() {
        let wanted = Wanted {
            mode: DriftMode::Heal,
            interval_seconds: 600,
            ..Wanted::default()
        };
        let running = Running {
            key: key(1),
            revision: 3,
            wanted: wanted.clone(),
            cancel: CancellationToken::new(),
        };
        assert!(running.seeks(Some(3), Some(&wanted)));
        let warns = Wanted {
            mode: DriftMode::Warn,
            ..wanted.clone()
        };
        let policy = DriftPolicy {
            mode: DriftMode::Heal,
            interval_seconds: 600,
        };
        let ignores = Wanted::of(&policy, |name| {
            name.ends_with("drift-ignore")
                .then_some("Deployment:/spec/replicas")
        });
        assert_ne!(ignores.rules, wanted.rules);
        for (revision, now) in [
            (Some(3), Some(&warns)),
            (Some(3), Some(&ignores)),
            (Some(3), None),
            (Some(4), Some(&wanted)),
            (None, Some(&wanted)),
        ] {
            assert!(!running.seeks(revision, now), "{revision:?} {now:?}");
        }
    }

    #[test]
    fn removed_owner_loses_turn_and_next_follows() {
        let mut schedule = Schedule::default();
        for number in 1..=2 {
            schedule.enter(&key(number), INTERVAL, at(0), 0.0);
        }
        assert_eq!(schedule.turn(at(0)), Some(&key(1)));
        schedule.enter(&key(1), INTERVAL, at(0), 0.5);
        assert_eq!(schedule.turn(at(0)), Some(&key(1)), "it keeps its turn");
        assert_eq!(schedule.wake(), None);
        schedule.leave(&key(1));
        assert_eq!(schedule.turn(at(0)), Some(&key(2)));
        schedule.leave(&key(2));
        assert_eq!(schedule.turn(at(0)), None);
        assert_eq!(schedule.wake(), None);
    }
}
