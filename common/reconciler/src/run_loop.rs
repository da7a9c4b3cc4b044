//! The reconcile loop of one member.
//!
//! Watches and the orders of the home cluster feed the index. The loop plans from the index and runs one action for
//! each Tenant or KryptonDeployment at a time.
//!
//! The loop is level-triggered: it queues only the keys to reconcile, each at most once.

use std::collections::{BTreeMap, BTreeSet};
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
use krypton_runtime::events::{EventRecorder, ObjectEvent};
use krypton_runtime::lease::{self, LeaseGoal, LeaseName, LeaseState, NO_NEW_RUNS_AFTER, Times};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::retry::Backoff;
use krypton_runtime::tasks::KeyedTasks;
use krypton_runtime::watchdog::Watchdog;
use krypton_runtime::work_queue::WorkQueue;
use krypton_types::allowed_namespaces::Allowed;
use krypton_types::desired::{DesiredState, Version};
use krypton_types::error_chain::chain;
use kube::runtime::watcher::Event;
use kube::{Client, Resource as _, ResourceExt as _};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

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
use crate::release_controller::Running;
use crate::report_store::ReportStore;
use crate::watches::{Seen, Watch};
use crate::workspaces::Workspaces;
use crate::{lease_guard, workload};

pub use crate::dump::{LeaseNow, OwnerNow, Question, ReconcilerNow, StateNow};

/// Selects the writer of the status of the member's Tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusMode {
    /// This reconciler writes the status.
    Write,
    /// The caller writes the status from the reports. The home cluster uses this, as a Tenant there has several
    /// members.
    Report,
}

/// A member and the access to it.
#[derive(Clone)]
pub struct Member {
    /// Name in the fleet. It is part of the names of releases and conditions.
    pub name: String,
    /// Namespace of the Secret that defines the member. A `clusterRef` may name it too.
    pub source_namespace: Option<String>,
    pub client: Client,
    /// Client with Helm's rights, for requests on the objects of releases.
    pub helm_client: Client,
    /// Kubeconfig file for Helm, with the same access.
    pub kubeconfig: PathBuf,
    /// Holder name in the Lease. Each process has its own.
    pub holder: String,
    /// Goal for the Lease. `Observe` only reports and writes nothing. `Hold` is never revoked.
    pub lease: watch::Receiver<LeaseGoal>,
    /// Reporting instance in events.
    pub instance: String,
    pub status: StatusMode,
    /// Namespaces of the Tenants to reconcile. `None` means all.
    pub namespaces: Option<BTreeSet<String>>,
    /// Namespaces whose Tenants may name this member, if they are Tenants of the home cluster.
    pub allowed: watch::Receiver<Allowed>,
    /// Longest back-off between two attempts.
    pub retry_max: Duration,
    pub policy: Policy,
    /// Receives an error if the watches exceed the bounds. `None` trusts the API server and disables the bounds.
    pub beyond: Option<Report>,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Resources that members share: one pool of Helm runs and one chart cache.
#[derive(Clone, Debug)]
pub struct Tools {
    pub helm: Arc<Helm>,
    pub charts: Arc<ChartCache>,
    pub drift: DriftMetrics,
    pub work: WorkMetrics,
    /// Ends the process if a task hangs.
    pub watchdog: Watchdog,
}

/// Time that running Helm processes get to finish when the process stops.
const DRAIN: Duration = Duration::from_secs(15);
/// First pause after a write conflict. It doubles with each further conflict: up to 16 times this value for a release,
/// and up to separate limits for placed Tenants and workspaces.
pub const AFTER_CONFLICT: Duration = Duration::from_millis(250);
/// Pause between two checks of the CRD while it needs changes.
pub(crate) const CRD_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of events to apply before the next reconcile.
const BATCH: usize = 512;
/// Maximum number of Tenants with API requests in flight, apart from Helm runs. At startup, a thousand Tenants must
/// neither flood the API server nor take the memory of a thousand calls.
const CALLS: usize = 16;

/// Reconciles the member until `stop`. Returns when no Helm process of this reconciler runs and the Lease is released.
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

/// Reconciles the member like [`run`], and answers questions about its state.
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
    let events = EventRecorder::start(
        member.client.clone(),
        member.instance.clone(),
        &tools.watchdog,
    )
    .with_counter(tools.work.events_dropped.clone());
    let depths = tools.work.part();
    let retry_max = member.retry_max;
    // An owner's back-off depends on its attempt, so its slot holds it.
    let no_backoff = Backoff::up_to(Duration::ZERO);
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
        jobs: KeyedTasks::default(),
        crd_jobs: JoinSet::new(),
        crd_checked: false,
        waiting: None,
        crd_lost: false,
        list_again: false,
        listed: ListedUnder::default(),
        crd_not_before: BootTime::default(),
        crd_failures: 0,
        crd_problem: None,
        recording_failures: 0,
        recording_problem: None,
        on_record: false,
        misses_pause: false,
        slots: BTreeMap::new(),
        release_details: BTreeMap::new(),
        queue: WorkQueue::new(usize::MAX, no_backoff, no_backoff),
        calls: WorkQueue::new(CALLS, no_backoff, no_backoff),
        helm: HelmQueue::default(),
        drift_schedule: DriftSchedule::default(),
        placed_tenants: PlacedTenants::new(retry_max),
        workspaces: Workspaces::new(retry_max),
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

/// State of a Tenant or KryptonDeployment between two reconciles.
#[derive(Default)]
pub(crate) struct Slot {
    pub memory: Memory,
    /// The running action handles a deletion.
    pub removing: bool,
    /// The last action read the release.
    pub reading: bool,
    /// UID of the object whose deletion was seen while the CRD was intact.
    pub deletion_confirmed: Option<String>,
    pub wake: Option<BootTime>,
    /// Earliest time of the next reconcile, after a failed write.
    pub not_before: Option<BootTime>,
    /// Attempt that is held back until `not_before`. `None` holds back every attempt.
    pub held: Option<Attempt>,
    pub failures: u32,
    /// Number of consecutive actions that failed because their plan was out of date.
    pub stale: u32,
    /// The last action stopped because it needs a Helm slot.
    pub needs_slot: bool,
    pub(crate) own_chart: OwnChart,
}

impl Slot {
    /// Returns true if the current attempt is the one that is held back.
    pub(crate) fn held_for(
        &self,
        owner: &ReleaseOwner,
        desired: &DesiredState,
        fingerprint: &str,
    ) -> bool {
        let held = self.held.as_ref();
        held.is_none_or(|held| *held == Attempt::of(owner, desired, fingerprint))
    }
}

/// CRD schema under which the known Tenants were listed.
///
/// An API server omits fields that its schema does not contain, such as the workspace. No watch reports a schema
/// change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ListedUnder {
    /// The current schema or a newer one. Also the state before the first list.
    #[default]
    Ours,
    /// An older Krypton schema. The reconciler lists the Tenants again after it is replaced.
    Older,
    /// The schema of krypton-operator. Until it is replaced, the reconciler neither writes nor reports Tenants: a write
    /// would store them without the omitted fields.
    Originals,
    /// Listed by a reconciler without write permission, immediately after another process replaced krypton-operator's
    /// schema. The list may still follow the old schema, so it is good enough for reports but not for actions.
    Observed,
}

impl ListedUnder {
    /// Returns the state after the watch showed the schema `seen`.
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

    /// Returns true if the list is good enough to reconcile, with (`permitted`) or without write permission.
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
    /// Current goal for the Lease.
    pub wish: watch::Sender<LeaseGoal>,
    /// The desired state that is saved on the member. The reconciler acts only on a saved desired state.
    pub recorded: Option<Arc<DesiredState>>,
    /// The desired state whose orders are in the index, with its digests.
    pub digests: Digests,
    pub ahead: Option<Version>,
    pub recording: JoinSet<(Arc<DesiredState>, Result<Recording, String>)>,
    /// The last logged reason why the anchor does not own the saved desired state.
    pub unowned: Option<String>,
    pub(crate) jobs: KeyedTasks<Running, Box<JobResult>>,
    pub crd_jobs: JoinSet<crate::backup::restoring::CrdRound>,
    /// The CRD is up to date and no saved Tenant waits to be restored.
    pub crd_checked: bool,
    /// Tenants that were saved when their CRD was deleted and are not restored yet. `None` until the backup is read.
    pub waiting: Option<crate::backup::restoring::Known>,
    /// The CRD was missing. Until it is reconciled, a missing Tenant may be one that is not restored yet.
    pub crd_lost: bool,
    /// The Tenants must be listed again.
    pub list_again: bool,
    pub listed: ListedUnder,
    pub crd_not_before: BootTime,
    pub crd_failures: u32,
    pub crd_problem: Option<String>,
    pub recording_failures: u32,
    pub recording_problem: Option<String>,
    /// The saved desired state is the latest one.
    pub on_record: bool,
    /// The reconciler does not act, as it could not save a pause.
    pub misses_pause: bool,
    pub slots: BTreeMap<OwnerKey, Slot>,
    pub release_details: BTreeMap<ReleaseKey, Arc<Release>>,
    /// The owners to reconcile.
    pub queue: WorkQueue<OwnerKey>,
    /// The owners that wait to run an action. Limits all actions except Helm runs.
    pub calls: WorkQueue<OwnerKey>,
    pub helm: HelmQueue,
    pub drift_schedule: DriftSchedule,
    pub placed_tenants: PlacedTenants,
    pub workspaces: Workspaces,
    pub version: ClusterVersion,
    pub permitted: bool,
    /// Time at which this process acquired the Lease.
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
            if std::mem::take(&mut self.list_again) {
                self.index.list_tenants_again();
                tenants = None;
            }
            self.take_orders();
            self.check_drift(now);
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
                    // Apply all events that are already available before the next reconcile.
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
                (job, done) = self.jobs.next() => self.finish(job, done),
                Some(ended) = self.helm.tasks.join_next_with_id(), if !self.helm.tasks.is_empty() => {
                    self.finish_waiting(ended);
                }
                done = self.placed_tenants.jobs.next() => self.finish_placed(done),
                done = self.workspaces.jobs.next() => self.finish_workspace(done),
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
                // An error means that the sender is gone. The goal then never changes again.
                Ok(()) = lease.changed() => {}
                Ok(()) = allowed.changed() => self.look_at_all(),
                Some(question) = questions.recv() => if !question.is_closed() {
                    // The receiver may have been dropped.
                    drop(question.send(self.told(BootTime::now())));
                },
                () = clock::sleep_until(wake, now) => {}
            }
        }
    }

    /// Waits for running jobs, then terminates their Helm processes, then kills them.
    async fn drain(&mut self, handle: &StopHandle) {
        handle.close();
        self.helm = HelmQueue::default();
        self.crd_jobs.abort_all();
        self.recording.abort_all();
        self.version.asking.abort_all();
        self.placed_tenants.jobs.abort_all();
        self.workspaces.jobs.abort_all();
        self.drift_schedule.end().await;
        if tokio::time::timeout(DRAIN, self.jobs.end()).await.is_err() {
            tracing::info!(member = %self.member.name, "stopping Helm processes");
            handle.soft();
        }
        self.jobs.end().await;
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
                    // The watch on Tenants restarts with the CRD, without its back-off.
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
                tracing::debug!(member = %self.member.name, what, error = %chain(&error), "watch failed; retrying");
                return;
            }
        };
        self.problem = None;
        self.owners_changed(dirty);
        let excess = self
            .bounds
            .check(&mut self.index, self.queue.ready(), BootTime::now());
        if excess.is_some() {
            self.problem = excess;
            // Drop the keys of unknown Tenants: their number is unbounded.
            self.queue.clear();
            self.queue.extend(self.slots.keys().cloned());
            self.look_at_all();
        }
    }

    /// Decodes the Tenants of an event. Reports a Tenant that does not decode, and drops it and Tenants of other
    /// namespaces.
    fn decoded(&self, event: Event<kube::core::DeserializeGuard<Tenant>>) -> Option<Event<Tenant>> {
        let read = |guard: kube::core::DeserializeGuard<Tenant>| match guard.0 {
            Ok(tenant) => Some(tenant),
            Err(invalid) => {
                let mut named = Tenant::new("", TenantSpec::default());
                named.metadata = invalid.metadata;
                let message = format!(
                    "ignoring this invalid Tenant until it is corrected: {}",
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

    /// Makes these owners due, and the placement orders of these Tenants.
    pub(crate) fn owners_changed(&mut self, keys: BTreeSet<OwnerKey>) {
        self.placed_tenants.touch(&keys);
        self.queue.extend(keys);
    }

    pub(crate) fn look_at_all(&mut self) {
        let keys = self.index.owners().map(|(key, _)| key);
        self.queue.extend(keys);
        self.placed_tenants.all();
    }

    fn next_wake(&self, now: BootTime) -> Option<BootTime> {
        // Until the lists are complete, no owner is reconciled.
        let owner = self.queue.wake().filter(|_| self.index.ready());
        // The Lease and the connection expire without an event.
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
            .chain(self.placed_tenants.wake(now))
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
    use krypton_crds::SCHEMA_VERSION;

    use super::ListedUnder::{self, Observed, Older, Originals, Ours};

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
            // The current schema replaced it, but the Tenants have not been listed since.
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
