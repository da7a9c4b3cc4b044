//! The reconciler of one member: watches and home's orders feed the index, the plan is made, one action a
//! Tenant or deployment is done.
//!
//! Level-triggered: nothing is queued but the names of those that are to be looked at, each once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_helm::chart::ChartCache;
use krypton_helm::driver::{Helm, StopHandle};
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::{Release, WorkloadKind};
use krypton_runtime::access::Report;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::events::{Events, ObjectEvent};
use krypton_runtime::lease::{self, LeaseGoal, LeaseName, LeaseState, NO_NEW_RUNS_AFTER, Times};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::watchdog::Watchdog;
use krypton_types::allowed_namespaces::Allowed;
use krypton_types::desired::{DesiredState, Version};
use krypton_types::error_chain::chain;
use kube::runtime::watcher::Event;
use kube::{Client, Resource as _, ResourceExt as _};
use tokio::sync::{mpsc, watch};
use tokio::task::{Id, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span};

use crate::actions::{ActionRunner, JobResult};
use crate::bounds::Bounds;
use crate::cluster_version::ClusterVersion;
use crate::digests::{Digests, OwnChart};
use crate::drift::DriftMetrics;
use crate::drift::schedule::DriftSchedule;
use crate::helm_queue::HelmQueue;
use crate::index::{CrdState, Index};
use crate::metrics::{Depths, Part, WorkMetrics};
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::placed_tenants::PlacedTenants;
use crate::plan::{Attempt, Memory, Policy};
use crate::record::Recording;
use crate::report_store::ReportStore;
use crate::turns::ConcurrencyLimit;
use crate::watches::{Seen, Watch};
use crate::workspaces::Workspaces;
use crate::{lease_guard, workload};

pub use crate::dump::{LeaseNow, OwnerNow, Question, ReconcilerNow, StateNow};

/// Who writes the status of the member's Tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusMode {
    /// This reconciler.
    Write,
    /// Its caller, out of the reports: on home, where a Tenant has several members.
    Report,
}

/// The member and how it is reached.
#[derive(Clone)]
pub struct Member {
    /// Its name in the fleet; part of the names of releases and conditions.
    pub name: String,
    /// The namespace of the Secret it comes from, which a `clusterRef` may name too.
    pub source_namespace: Option<String>,
    pub client: Client,
    /// With the rights that helm has, for what is done to the objects of releases.
    pub helm_client: Client,
    /// The same access, as a file for helm.
    pub kubeconfig: PathBuf,
    /// Our name in the Lease: one process, one name.
    pub holder: String,
    /// `Observe` reports what there is and writes nothing; `LeaseState` is not taken back.
    pub lease: watch::Receiver<LeaseGoal>,
    /// Our name in events.
    pub instance: String,
    pub status: StatusMode,
    /// Only Tenants of these namespaces; `None` for all.
    pub namespaces: Option<BTreeSet<String>>,
    /// Whose Tenants may name this member, where they are home's.
    pub allowed: watch::Receiver<Allowed>,
    /// The longest pause between two attempts.
    pub retry_max: Duration,
    pub policy: Policy,
    /// Receives what its watches show beyond the bounds; `None` if its API server is trusted, which has no bounds.
    pub beyond: Option<Report>,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// What members share: one pool of helm runs, one cache of charts.
#[derive(Clone, Debug)]
pub struct Tools {
    pub helm: Arc<Helm>,
    pub charts: Arc<ChartCache>,
    pub drift: DriftMetrics,
    pub work: WorkMetrics,
    /// Ends the process if a task hangs.
    pub watchdog: Watchdog,
}

/// How long running helms may go on when the process is asked to stop.
const DRAIN: Duration = Duration::from_secs(15);
/// The pause after a write that somebody else's write overtook; twice as long each time, up to sixteen times.
pub const AFTER_CONFLICT: Duration = Duration::from_millis(250);
/// The pause between two drift_schedule of seeing to the CRD, while it is not as it should be.
pub(crate) const CRD_EVERY: Duration = Duration::from_secs(1);
/// Events taken in before the next look at the Tenants.
const BATCH: usize = 512;
/// Tenants that calls are made for at once, helm left out: a start with a thousand of them shall neither
/// storm the apiserver nor take the memory of a thousand calls.
const CALLS: usize = 16;

/// Reconciles the member until `stop`. Returns when no helm run of ours lives and the Lease is given up.
pub async fn run(
    member: Member,
    tools: Tools,
    desired: watch::Receiver<Arc<DesiredState>>,
    report_store: Arc<ReportStore>,
    stop: CancellationToken,
) {
    let nobody = mpsc::channel(1).1;
    run_and_tell(member, tools, desired, report_store, nobody, stop).await;
}

/// The same, and answers who asks how it stands.
pub async fn run_and_tell(
    member: Member,
    tools: Tools,
    desired: watch::Receiver<Arc<DesiredState>>,
    report_store: Arc<ReportStore>,
    questions: mpsc::Receiver<Question>,
    stop: CancellationToken,
) {
    let span = tracing::error_span!("reconciler", member = %member.name);
    let reconciling = Box::pin(reconcile(
        member,
        tools,
        desired,
        report_store,
        questions,
        stop,
    ));
    reconciling.instrument(span).await;
}

async fn reconcile(
    member: Member,
    tools: Tools,
    desired: watch::Receiver<Arc<DesiredState>>,
    report_store: Arc<ReportStore>,
    questions: mpsc::Receiver<Question>,
    stop: CancellationToken,
) {
    let (holds, hold) = watch::channel(LeaseState::default());
    let (wish, wishes) = watch::channel(LeaseGoal::Observe);
    let idle = CancellationToken::new();
    let holding = lease::hold(
        member.client.clone(),
        (LeaseName::of_member(), Times::MEMBER),
        member.holder.clone(),
        wishes,
        holds,
        stop.clone(),
        idle.clone(),
    );
    let watched = |what: &str| format!("{what} of member {}", member.name);
    let holding = (tools.watchdog).watch(watched("the Lease"), holding.in_current_span());
    let lease = tokio::spawn(holding);
    let (handle, signal) = StopHandle::new();
    let handle = Arc::new(handle);
    let ending = lease_guard::end_runs(hold.clone(), Arc::clone(&handle)).in_current_span();
    let ending = tools.watchdog.watch(watched("the end of runs"), ending);
    let ending = tokio::spawn(ending);
    let member = Arc::new(member);
    let events = Events::start(member.client.clone(), member.instance.clone())
        .counting(tools.work.events_dropped.clone());
    let depths = tools.work.part();
    let performer = Arc::new(ActionRunner {
        member: Arc::clone(&member),
        fleet_client: member.helm_client.clone(),
        desired: desired.clone(),
        tools,
        events,
        report_store: Arc::clone(&report_store),
        hold: hold.clone(),
        stop: signal,
    });
    let mut reconciler = Reconciler {
        index: Index::new(&member.name, member.source_namespace.as_deref()),
        bounds: Bounds::new(member.beyond.clone()),
        member,
        performer,
        report_store,
        desired,
        hold,
        wish,
        recorded: None,
        digests: Digests::default(),
        ahead: None,
        recording: JoinSet::new(),
        unowned: None,
        jobs: JoinSet::new(),
        running: HashMap::new(),
        crd_jobs: JoinSet::new(),
        crd_checked: false,
        waiting: None,
        crd_lost: false,
        list_anew: false,
        listed: ListedUnder::default(),
        crd_not_before: BootTime::default(),
        crd_failures: 0,
        crd_problem: None,
        recording_failures: 0,
        recording_problem: None,
        on_record: false,
        misses_pause: false,
        slots: BTreeMap::new(),
        facts: BTreeMap::new(),
        dirty: BTreeSet::new(),
        calls: ConcurrencyLimit::new(CALLS),
        helm: HelmQueue::default(),
        wakes: BTreeSet::new(),
        drift_schedule: DriftSchedule::default(),
        placed_tenants: PlacedTenants::default(),
        workspaces: Workspaces::default(),
        version: ClusterVersion::default(),
        permitted: false,
        held: None,
        problem: None,
        started: BootTime::now(),
        depths,
    };
    reconciler.follow(questions, &stop).await;
    reconciler.drain(&handle).await;
    idle.cancel();
    ending.abort();
    if let Err(error) = lease.await {
        tracing::error!(%error, "the Lease's task ended badly");
    }
}

/// What is kept for a Tenant or a deployment between two looks.
#[derive(Default)]
pub(crate) struct Slot {
    pub memory: Memory,
    pub busy: bool,
    /// What is done for it is done because it has been deleted.
    pub removing: bool,
    /// The last action read the release.
    pub reading: bool,
    /// The UID with which it was deleted while the CRD was whole.
    pub deletion_confirmed: Option<String>,
    pub wake: Option<BootTime>,
    /// Not to be looked at before, since a write did not go through.
    pub not_before: Option<BootTime>,
    /// The attempt that is held back until then. `None` holds back every attempt.
    pub held: Option<Attempt>,
    pub failures: u32,
    /// How often in a row the plan rested on what had changed.
    pub stale: u32,
    /// The last action stopped because it needs a slot of Helm.
    pub needs_slot: bool,
    pub(crate) own_chart: OwnChart,
}

impl Slot {
    /// Whether what is wanted now is what is held back.
    pub(crate) fn held_for(
        &self,
        owner: &ReleaseOwner,
        desired: &DesiredState,
        fingerprint: &str,
    ) -> bool {
        let held = self.held.as_ref();
        held.is_none_or(|held| *held == Attempt::of(owner, desired, fingerprint))
    }

    /// Holds the attempt back, as what it did has ended in a panic.
    pub(crate) fn panicked(&mut self, attempt: Attempt, until: BootTime) {
        (self.busy, self.removing) = (false, false);
        (self.not_before, self.held) = (Some(until), Some(attempt));
    }
}

/// Under which schema of their CRD the Tenants were listed that are known. An apiserver leaves out of its answers
/// what its schema does not have, such as the workspace; once there is another, no watch tells of that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ListedUnder {
    /// Ours, or a newer one; or there was nothing to list.
    #[default]
    Ours,
    /// An older one of ours: they are listed afresh once it is replaced.
    Older,
    /// The original's: until then nothing is done about them, which would store them as they were read, and
    /// nothing is said.
    Originals,
    /// Listed afresh by who may not write, as soon as somebody else had replaced the original's. Whether that was
    /// in force by then nobody knows: it is good enough to tell by, not to act on.
    Observed,
}

impl ListedUnder {
    /// After another schema was seen.
    fn then(self, seen: Option<Option<u32>>) -> Self {
        match (self, seen) {
            (_, Some(None)) | (Self::Originals, _) => Self::Originals,
            (Self::Older | Self::Observed, _) => self,
            (Self::Ours, Some(Some(version))) if version < krypton_crds::SCHEMA_VERSION => {
                Self::Older
            }
            (Self::Ours, _) => Self::Ours,
        }
    }

    /// Whether Tenants can be looked at, by who may write or by who may not.
    pub fn will_do(self, permitted: bool) -> bool {
        match self {
            Self::Ours | Self::Older => true,
            Self::Observed => !permitted,
            Self::Originals => false,
        }
    }
}

pub(crate) struct Reconciler {
    pub member: Arc<Member>,
    pub performer: Arc<ActionRunner>,
    pub report_store: Arc<ReportStore>,
    pub index: Index,
    bounds: Bounds,
    pub desired: watch::Receiver<Arc<DesiredState>>,
    pub hold: watch::Receiver<LeaseState>,
    /// What is wanted of the Lease now.
    pub wish: watch::Sender<LeaseGoal>,
    /// The desired state that is on record on the member, and so may be acted on.
    pub recorded: Option<Arc<DesiredState>>,
    /// The desired state whose orders are in the index, with its digests.
    pub digests: Digests,
    pub ahead: Option<Version>,
    pub recording: JoinSet<(Arc<DesiredState>, Result<Recording, String>)>,
    /// Why the anchor does not own what is on record, as it was last told.
    pub unowned: Option<String>,
    pub(crate) jobs: JoinSet<Box<JobResult>>,
    /// Whose each of them is, its attempt and its span.
    pub running: HashMap<Id, (OwnerKey, Attempt, Span)>,
    pub crd_jobs: JoinSet<crate::backup::restoring::CrdRound>,
    /// The CRD is up to date and nothing waits to be put back.
    pub crd_checked: bool,
    /// Tenants that were kept when their CRD went and are not back; `None` until that is read.
    pub waiting: Option<crate::backup::restoring::Known>,
    /// The CRD was away: until it is seen to, Tenants that are not there may be such as are yet to be put
    /// back.
    pub crd_lost: bool,
    /// Tenants are to be listed afresh.
    pub list_anew: bool,
    pub listed: ListedUnder,
    pub crd_not_before: BootTime,
    pub crd_failures: u32,
    pub crd_problem: Option<String>,
    pub recording_failures: u32,
    pub recording_problem: Option<String>,
    /// The recorded desired state is the newest one.
    pub on_record: bool,
    /// Nothing is acted on, since a pause could not be recorded.
    pub misses_pause: bool,
    pub slots: BTreeMap<OwnerKey, Slot>,
    pub facts: BTreeMap<ReleaseKey, Arc<Release>>,
    pub dirty: BTreeSet<OwnerKey>,
    /// Of all actions but runs of helm.
    pub calls: ConcurrencyLimit,
    pub helm: HelmQueue,
    pub wakes: BTreeSet<(BootTime, OwnerKey)>,
    pub drift_schedule: DriftSchedule,
    pub placed_tenants: PlacedTenants,
    pub workspaces: Workspaces,
    pub version: ClusterVersion,
    pub permitted: bool,
    /// Since when the Lease is ours.
    pub held: Option<BootTime>,
    pub problem: Option<String>,
    pub started: BootTime,
    depths: Part,
}

impl Reconciler {
    async fn follow(&mut self, mut questions: mpsc::Receiver<Question>, stop: &CancellationToken) {
        let mut watches = crate::watches::all_but_tenants(&self.member.client);
        let mut tenants: Option<Watch> = None;
        let mut lease = self.member.lease.clone();
        let mut allowed = self.member.allowed.clone();
        loop {
            let now = BootTime::now();
            self.bounds
                .apply(&self.member.client, &mut watches, &mut tenants, now);
            self.reconcile_member(now);
            if std::mem::take(&mut self.list_anew) {
                self.index.list_tenants_anew();
                tenants = None;
            }
            self.take_orders();
            self.check_drift(now);
            self.placed_tenants.touch(&self.dirty);
            self.reconcile_owners(now);
            self.reconcile_placed(now);
            self.reconcile_workspaces(now);
            self.check_version(now);
            self.report_member(now);
            if self.index.crd() == Some(CrdState::Present) && tenants.is_none() {
                tenants = Some(crate::watches::tenants(&self.member.client));
            }
            self.depths.tell(Depths {
                waiting: self.waiting(),
                writes: self.hold.get().may_start(now),
            });
            let wake = self.next_wake(now);
            tokio::select! {
                () = stop.cancelled() => return,
                Some(seen) = watches.next() => {
                    self.see(seen, &mut tenants);
                    // What is ready already is taken in together.
                    for _ in 0..BATCH {
                        match futures::FutureExt::now_or_never(watches.next()) {
                            Some(Some(seen)) => self.see(seen, &mut tenants),
                            _ => break,
                        }
                    }
                }
                Some(seen) = next_of(&mut tenants) => {
                    self.see(seen, &mut tenants);
                    for _ in 0..BATCH {
                        match futures::FutureExt::now_or_never(next_of(&mut tenants)) {
                            Some(Some(seen)) => self.see(seen, &mut tenants),
                            _ => break,
                        }
                    }
                }
                Some(done) = self.jobs.join_next_with_id(), if !self.jobs.is_empty() => {
                    self.finish(done);
                }
                Some(ended) = self.helm.tasks.join_next_with_id(), if !self.helm.tasks.is_empty() => {
                    self.finish_waiting(ended);
                }
                Some(done) = self.placed_tenants.jobs.join_next_with_id(), if !self.placed_tenants.jobs.is_empty() => {
                    self.finish_placed(done);
                }
                Some(done) = self.workspaces.jobs.join_next(), if !self.workspaces.jobs.is_empty() => {
                    self.finish_workspace(done);
                }
                Some(done) = self.drift_schedule.jobs.join_next(), if !self.drift_schedule.jobs.is_empty() => {
                    self.finish_drift(done);
                }
                Some(done) = self.version.asking.join_next(), if !self.version.asking.is_empty() => {
                    self.finish_version(done);
                }
                Some(done) = self.recording.join_next(), if !self.recording.is_empty() => {
                    self.finish_recording(done);
                }
                Some(done) = self.crd_jobs.join_next(), if !self.crd_jobs.is_empty() => {
                    self.finish_crd(done);
                }
                changed = self.desired.changed() => {
                    if changed.is_err() { return }
                    self.look_at_all();
                }
                changed = self.hold.changed() => if changed.is_err() { return },
                // Whoever will never wish otherwise has gone.
                Ok(()) = lease.changed() => {}
                Ok(()) = allowed.changed() => self.look_at_all(),
                Some(question) = questions.recv() => if !question.is_closed() {
                    // Whoever has asked may go meanwhile.
                    drop(question.send(self.told(BootTime::now())));
                },
                () = clock::sleep_until(wake, now) => {}
            }
        }
    }

    /// Lets what runs end by itself, then asks it to, then makes it.
    async fn drain(&mut self, handle: &StopHandle) {
        handle.close();
        self.helm = HelmQueue::default();
        self.crd_jobs.abort_all();
        self.recording.abort_all();
        self.version.asking.abort_all();
        self.placed_tenants.jobs.abort_all();
        self.workspaces.jobs.abort_all();
        self.drift_schedule.end().await;
        let ended = async { while self.jobs.join_next().await.is_some() {} };
        if tokio::time::timeout(DRAIN, ended).await.is_err() {
            tracing::info!(member = %self.member.name, "asking the running helm processes to stop");
            handle.soft();
        }
        while self.jobs.join_next().await.is_some() {}
    }

    fn see(&mut self, seen: Seen, tenants: &mut Option<Watch>) {
        if self.bounds.ended() {
            return;
        }
        let dirty = match seen {
            Seen::Tenant(event) => {
                let event = self.decoded(event);
                event
                    .map(|event| self.index.tenant_event(event))
                    .unwrap_or_default()
            }
            Seen::Release(event) => self.index.release_event(event),
            Seen::Workspace(event) => {
                let (namespaces, dirty) = self.index.workspace_event(event);
                self.placed_tenants.touch_namespaces(&namespaces);
                self.workspaces.touch(&namespaces, &self.index);
                dirty
            }
            Seen::Deployment(event) => {
                self.index
                    .workload_event(WorkloadKind::Deployment, event, workload::deployment)
            }
            Seen::StatefulSet(event) => {
                self.index
                    .workload_event(WorkloadKind::StatefulSet, event, workload::stateful_set)
            }
            Seen::DaemonSet(event) => {
                self.index
                    .workload_event(WorkloadKind::DaemonSet, event, workload::daemon_set)
            }
            Seen::Crd(event) => {
                let (before, schema) = (self.index.crd(), self.index.schema());
                self.index.crd_event(event);
                let after = self.index.crd();
                if self.index.schema() != schema {
                    self.listed = self.listed.then(self.index.schema());
                    self.crd_checked = false;
                }
                if after != before {
                    tracing::debug!(member = %self.member.name, crd = ?after, "the Tenant CRD");
                    self.crd_checked = false;
                    if before.is_some() && after != Some(CrdState::Present) {
                        self.crd_lost = true;
                        self.recheck_crd();
                    }
                    // The watch on Tenants starts anew with the CRD, without its back-off.
                    if after != Some(CrdState::Terminating) {
                        *tenants = None;
                    }
                    self.look_at_all();
                }
                BTreeSet::new()
            }
            Seen::Failed { what, error } => {
                self.problem = Some(format!("watching {what}: {}", chain(&error)));
                self.performer.tools.work.watch_failed(what);
                tracing::debug!(member = %self.member.name, what, error = %chain(&error), "watch failed; it is tried again");
                return;
            }
        };
        self.problem = None;
        self.dirty.extend(dirty);
        let excess = self
            .bounds
            .check(&mut self.index, self.dirty.len(), BootTime::now());
        if excess.is_some() {
            self.problem = excess;
            // Drops the names of other Tenants, which may be endless.
            self.dirty = self.slots.keys().cloned().collect();
            self.look_at_all();
        }
    }

    /// Drops a Tenant that does not decode, by name and with the reason, and Tenants that are not
    /// ours to see.
    fn decoded(&self, event: Event<kube::core::DeserializeGuard<Tenant>>) -> Option<Event<Tenant>> {
        let read = |guard: kube::core::DeserializeGuard<Tenant>| match guard.0 {
            Ok(tenant) => Some(tenant),
            Err(invalid) => {
                let mut named = Tenant::new("", TenantSpec::default());
                named.metadata = invalid.metadata;
                let message = format!(
                    "this Tenant cannot be read and is left alone until it is corrected: {}",
                    invalid.error
                );
                tracing::warn!(member = %self.member.name,
                    tenant = %format_args!("{}/{}", named.namespace().unwrap_or_default(), named.name_any()),
                    generation = named.metadata.generation, "{message}");
                let told = ObjectEvent {
                    warning: true,
                    reason: "TenantInvalid",
                    message,
                };
                self.performer.events.tell(named.object_ref(&()), told);
                None
            }
        };
        let ours = |tenant: &Tenant| match (&self.member.namespaces, &tenant.metadata.namespace) {
            (Some(namespaces), Some(namespace)) => namespaces.contains(namespace),
            _ => true,
        };
        let read = |guard| read(guard).filter(&ours);
        Some(match event {
            Event::Apply(guard) => Event::Apply(read(guard)?),
            Event::Delete(guard) => Event::Delete(read(guard)?),
            Event::Init => Event::Init,
            Event::InitApply(guard) => Event::InitApply(read(guard)?),
            Event::InitDone => Event::InitDone,
        })
    }

    pub(crate) fn look_at_all(&mut self) {
        let keys = self.index.owners().map(|(key, _)| key);
        self.dirty.extend(keys);
        self.placed_tenants.all();
    }

    fn next_wake(&self, now: BootTime) -> Option<BootTime> {
        let owner = self.wakes.first().map(|(at, _)| *at);
        // The permit and the connection run out without any event.
        let expiry = [self.hold.get().renewed, Some(self.heard())]
            .into_iter()
            .flatten()
            .map(|time| BootTime(time.0 + NO_NEW_RUNS_AFTER))
            .filter(|at| *at > now)
            .min();
        let crd = (self.permitted && !self.crd_checked).then_some(self.crd_not_before);
        owner
            .into_iter()
            .chain(expiry)
            .chain(crd.filter(|at| *at > now))
            .chain(self.drift_schedule.wake())
            .chain(self.placed_tenants.wake())
            .chain(self.workspaces.wake(now))
            .chain(self.version_wake().filter(|at| *at > now))
            .chain(self.bounds.wake())
            .min()
    }
}

async fn next_of(watch: &mut Option<Watch>) -> Option<Seen> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use krypton_crds::SCHEMA_VERSION;
    use krypton_types::deployment::DesiredDeployment;
    use krypton_types::desired::DesiredState;

    use super::ListedUnder::{self, Observed, Older, Originals, Ours};
    use super::Slot;
    use crate::owner::ReleaseOwner;
    use crate::plan::Attempt;
    use krypton_runtime::clock::BootTime;

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

    #[test]
    fn tenants_listed_under_original_schema_are_not_reconciled() {
        let ours = Some(SCHEMA_VERSION);
        let older = Some(SCHEMA_VERSION - 1);
        for (before, seen, after) in [
            (Ours, None, Ours),
            (Ours, Some(ours), Ours),
            (Ours, Some(Some(SCHEMA_VERSION + 1)), Ours),
            (Ours, Some(older), Older),
            (Ours, Some(None), Originals),
            (Older, Some(ours), Older),
            (Older, Some(None), Originals),
            // Ours has taken its place, and nothing was listed since.
            (Originals, Some(ours), Originals),
            (Originals, Some(older), Originals),
            (Observed, Some(ours), Observed),
            (Observed, Some(None), Originals),
        ] {
            assert_eq!(
                ListedUnder::then(before, seen),
                after,
                "{before:?} {seen:?}"
            );
        }
        let acts = |listed: ListedUnder| [true, false].map(|permitted| listed.will_do(permitted));
        assert_eq!([Ours, Older].map(acts), [[true, true]; 2]);
        assert_eq!(
            [acts(Observed), acts(Originals)],
            [[false, true], [false, false]]
        );
    }
}
