//! The reconcile loop of one member.
//!
//! Watches and the orders of the home cluster feed the index. The loop plans from the index and runs one action for
//! each Tenant or KryptonDeployment at a time.
//!
//! The loop is level-triggered: it queues only the keys to reconcile, each at most once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use krypton_helm::driver::StopHandle;
use krypton_helm::releases::Release;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::events::EventRecorder;
use krypton_runtime::lease::{
    self, LeaseGoal, LeaseName, LeaseState, LeaseTimes, NO_NEW_RUNS_AFTER,
};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::retry::Backoff;
use krypton_runtime::tasks::KeyedTasks;
use krypton_runtime::work_queue::WorkQueue;
use krypton_types::desired::{DesiredState, Version};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::actions::{ActionRunner, JobResult};
use crate::bounds::WatchBounds;
use crate::cluster_version::ClusterVersion;
use crate::digests::{DesiredDigests, FingerprintCache};
use crate::drift::schedule::DriftSchedule;
use crate::helm_queue::HelmQueue;
use crate::index::{CrdState, Index};
use crate::lease_guard;
use crate::metrics::{QueueDepths, ReconcilerShare};
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::placed_tenants::PlacedTenants;
use crate::plan::{Attempt, Memory};
use crate::record::RecordResult;
use crate::release_controller::RunningAction;
use crate::report_store::ReportStore;
use crate::watches::{Watch, WatchEvent};
use crate::workspaces::Workspaces;

mod tenant_list_schema;
mod watch_events;

pub use crate::dump::{ConditionDump, DumpRequest, LeaseDump, OwnerDump, ReconcilerDump};
pub use crate::inputs::{Member, StatusMode, Tools};
pub use tenant_list_schema::TenantListSchema;

/// Time that running Helm processes get to finish when the process stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(15);
/// Pause between two checks of the CRD while it needs changes.
pub(crate) const CRD_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of events to apply before the next reconcile.
const EVENT_BATCH: usize = 512;
/// Maximum number of Tenants with API requests in flight, apart from Helm runs. At startup, a thousand Tenants must
/// neither flood the API server nor take the memory of a thousand calls.
const MAX_CONCURRENT_ACTIONS: usize = 16;

/// Reconciles the member until `stop`. Returns when no Helm process of this reconciler runs and the Lease is released.
pub async fn run(
    member: Member,
    tools: Tools,
    desired: watch::Receiver<Arc<DesiredState>>,
    report_store: Arc<ReportStore>,
    stop: CancellationToken,
) {
    let no_dump_requests = mpsc::channel(1).1;
    run_with_dumps(member, tools, desired, report_store, no_dump_requests, stop).await;
}

/// Reconciles the member like [`run`], and responds to requests for dumps of its state.
pub async fn run_with_dumps(
    member: Member,
    tools: Tools,
    desired: watch::Receiver<Arc<DesiredState>>,
    report_store: Arc<ReportStore>,
    dump_requests: mpsc::Receiver<DumpRequest>,
    stop: CancellationToken,
) {
    let span = tracing::error_span!("reconciler", member = %member.name);
    let reconciling = Box::pin(reconcile(
        member,
        tools,
        desired,
        report_store,
        dump_requests,
        stop,
    ));
    reconciling.instrument(span).await;
}

async fn reconcile(
    member: Member,
    tools: Tools,
    desired: watch::Receiver<Arc<DesiredState>>,
    report_store: Arc<ReportStore>,
    dump_requests: mpsc::Receiver<DumpRequest>,
    stop: CancellationToken,
) {
    let (lease_state_sender, lease_state) = watch::channel(LeaseState::default());
    let (lease_goal, lease_goals) = watch::channel(LeaseGoal::Observe);
    let runs_ended = CancellationToken::new();
    let lease_task = lease::hold(
        member.client.clone(),
        (LeaseName::member(), LeaseTimes::MEMBER),
        member.holder.clone(),
        lease_goals,
        lease_state_sender,
        stop.clone(),
        runs_ended.clone(),
    );
    let task_name = |task: &str| format!("{task} of member {}", member.name);
    let lease_task = (tools.watchdog).watch(task_name("the Lease"), lease_task.in_current_span());
    let lease_task = tokio::spawn(lease_task);
    let (stop_handle, stop_signal) = StopHandle::new();
    let stop_handle = Arc::new(stop_handle);
    let guard_task = lease_guard::guard_runs(lease_state.clone(), Arc::clone(&stop_handle));
    let guard_task =
        (tools.watchdog).watch(task_name("the end of runs"), guard_task.in_current_span());
    let guard_task = tokio::spawn(guard_task);
    let member = Arc::new(member);
    let events = EventRecorder::start(
        member.client.clone(),
        member.instance.clone(),
        &tools.watchdog,
    )
    .with_counter(tools.work.events_dropped.clone());
    let queue_metrics = tools.work.new_share();
    let retry_max = member.retry_max;
    // An owner's back-off depends on its attempt, so its `OwnerState` holds it.
    let no_backoff = Backoff::up_to(Duration::ZERO);
    let runner = Arc::new(ActionRunner {
        member: Arc::clone(&member),
        fleet_client: member.helm_client.clone(),
        desired: desired.clone(),
        tools,
        events,
        report_store: Arc::clone(&report_store),
        lease_state: lease_state.clone(),
        stop: stop_signal,
    });
    let mut reconciler = Reconciler {
        index: Index::new(&member.name, member.source_namespace.as_deref()),
        bounds: WatchBounds::new(member.on_excess.clone()),
        member,
        runner,
        report_store,
        desired,
        lease_state,
        lease_goal,
        recorded: None,
        digests: DesiredDigests::default(),
        newer_recorded: None,
        recording_tasks: JoinSet::new(),
        ownerless_reason: None,
        jobs: KeyedTasks::default(),
        crd_jobs: JoinSet::new(),
        crd_checked: false,
        unrestored: None,
        crd_was_missing: false,
        relist_tenants: false,
        listed_under: TenantListSchema::default(),
        crd_not_before: BootTime::default(),
        crd_failures: 0,
        crd_problem: None,
        recording_failures: 0,
        recording_problem: None,
        latest_recorded: false,
        pause_unrecorded: false,
        owner_states: BTreeMap::new(),
        release_details: BTreeMap::new(),
        queue: WorkQueue::new(usize::MAX, no_backoff, no_backoff),
        action_queue: WorkQueue::new(MAX_CONCURRENT_ACTIONS, no_backoff, no_backoff),
        helm_queue: HelmQueue::default(),
        drift_schedule: DriftSchedule::default(),
        placed_tenants: PlacedTenants::new(retry_max),
        workspaces: Workspaces::new(retry_max),
        cluster_version: ClusterVersion::default(),
        permitted: false,
        held_since: None,
        cluster_problem: None,
        started: BootTime::now(),
        queue_metrics,
    };
    reconciler.run(dump_requests, &stop).await;
    reconciler.drain(&stop_handle).await;
    runs_ended.cancel();
    guard_task.abort();
    if let Err(error) = lease_task.await {
        tracing::error!(%error, "the Lease's task failed");
    }
}

/// State of a Tenant or KryptonDeployment between two reconciles.
#[derive(Default)]
pub(crate) struct OwnerState {
    pub memory: Memory,
    /// The running action handles a deletion.
    pub is_removing: bool,
    /// The last action read the release.
    pub is_reading: bool,
    /// UID of the object whose deletion was seen while the CRD was intact.
    pub confirmed_deletion: Option<String>,
    pub wake: Option<BootTime>,
    /// Earliest time of the next reconcile, after a failed write.
    pub not_before: Option<BootTime>,
    /// Attempt that is held back until `not_before`. `None` holds back every attempt.
    pub held_attempt: Option<Attempt>,
    pub failures: u32,
    /// Number of consecutive actions that failed because their plan was out of date.
    pub conflicts: u32,
    /// The last action stopped because it needs a Helm slot.
    pub needs_slot: bool,
    pub(crate) fingerprint_cache: FingerprintCache,
}

impl OwnerState {
    /// Returns true if the current attempt is the one that is held back.
    pub(crate) fn holds_back(
        &self,
        owner: &ReleaseOwner,
        desired: &DesiredState,
        fingerprint: &str,
    ) -> bool {
        let held_attempt = self.held_attempt.as_ref();
        held_attempt
            .is_none_or(|held_attempt| *held_attempt == Attempt::new(owner, desired, fingerprint))
    }
}

pub(crate) struct Reconciler {
    pub member: Arc<Member>,
    pub runner: Arc<ActionRunner>,
    pub report_store: Arc<ReportStore>,
    pub index: Index,
    bounds: WatchBounds,
    pub desired: watch::Receiver<Arc<DesiredState>>,
    pub lease_state: watch::Receiver<LeaseState>,
    /// Current goal for the Lease.
    pub lease_goal: watch::Sender<LeaseGoal>,
    /// The desired state that is saved on the member. The reconciler acts only on a saved desired state.
    pub recorded: Option<Arc<DesiredState>>,
    /// The desired state whose orders are in the index, with its digests.
    pub digests: DesiredDigests,
    /// A later saved version. The reconciler does not act on an older one.
    pub newer_recorded: Option<Version>,
    pub recording_tasks: JoinSet<(Arc<DesiredState>, Result<RecordResult, String>)>,
    /// The last logged reason why the anchor does not own the saved desired state.
    pub ownerless_reason: Option<String>,
    pub(crate) jobs: KeyedTasks<RunningAction, Box<JobResult>>,
    pub crd_jobs: JoinSet<crate::backup::restoring::CrdRound>,
    /// The CRD is up to date and no saved Tenant waits to be restored.
    pub crd_checked: bool,
    /// Tenants that were saved when their CRD was deleted and are not restored yet. `None` until the backup is read.
    pub unrestored: Option<crate::backup::restoring::UnrestoredTenants>,
    /// The CRD was missing. Until it is reconciled, a missing Tenant may be one that is not restored yet.
    pub crd_was_missing: bool,
    /// The Tenants must be listed again.
    pub relist_tenants: bool,
    pub listed_under: TenantListSchema,
    pub crd_not_before: BootTime,
    pub crd_failures: u32,
    pub crd_problem: Option<String>,
    pub recording_failures: u32,
    pub recording_problem: Option<String>,
    /// The saved desired state is the latest one.
    pub latest_recorded: bool,
    /// The reconciler does not act, as it could not save a pause.
    pub pause_unrecorded: bool,
    pub owner_states: BTreeMap<OwnerKey, OwnerState>,
    pub release_details: BTreeMap<ReleaseKey, Arc<Release>>,
    /// The owners to reconcile.
    pub queue: WorkQueue<OwnerKey>,
    /// The owners that wait to run an action. Limits all actions except Helm runs.
    pub action_queue: WorkQueue<OwnerKey>,
    pub helm_queue: HelmQueue,
    pub drift_schedule: DriftSchedule,
    pub placed_tenants: PlacedTenants,
    pub workspaces: Workspaces,
    pub cluster_version: ClusterVersion,
    pub permitted: bool,
    /// Time at which this process acquired the Lease.
    pub held_since: Option<BootTime>,
    pub cluster_problem: Option<String>,
    pub started: BootTime,
    queue_metrics: ReconcilerShare,
}

impl Reconciler {
    async fn run(
        &mut self,
        mut dump_requests: mpsc::Receiver<DumpRequest>,
        stop: &CancellationToken,
    ) {
        let mut watches = crate::watches::all_except_tenants(&self.member.client);
        let mut tenants: Option<Watch> = None;
        let mut lease_goal = self.member.lease_goal.clone();
        let mut allowed_namespaces = self.member.allowed_namespaces.clone();
        loop {
            let now = BootTime::now();
            self.bounds
                .apply(&self.member.client, &mut watches, &mut tenants, now);
            self.reconcile_member(now);
            if std::mem::take(&mut self.relist_tenants) {
                self.index.tenants.mark_incomplete();
                tenants = None;
            }
            self.apply_orders();
            self.queue_due_drift_check(now);
            self.reconcile_owners(now);
            self.reconcile_placed_tenants(now);
            self.reconcile_workspaces(now);
            self.check_version(now);
            self.report_member(now);
            if self.index.crd() == Some(CrdState::Present) && tenants.is_none() {
                tenants = Some(crate::watches::tenants(&self.member.client));
            }
            self.queue_metrics.publish(QueueDepths {
                waiting: self.queue_depths(),
                writes: self.lease_state.get().may_start(now),
            });
            let wake = self.next_wake(now);
            tokio::select! {
                () = stop.cancelled() => return,
                Some(event) = watches.next() => {
                    self.apply_event(event, &mut tenants);
                    // Apply all events that are already available before the next reconcile.
                    for _ in 0..EVENT_BATCH {
                        match futures::FutureExt::now_or_never(watches.next()) {
                            Some(Some(event)) => self.apply_event(event, &mut tenants),
                            _ => break,
                        }
                    }
                }
                Some(event) = next_event(&mut tenants) => {
                    self.apply_event(event, &mut tenants);
                    for _ in 0..EVENT_BATCH {
                        match futures::FutureExt::now_or_never(next_event(&mut tenants)) {
                            Some(Some(event)) => self.apply_event(event, &mut tenants),
                            _ => break,
                        }
                    }
                }
                (job, done) = self.jobs.next() => self.finish(job, done),
                Some(ended) = self.helm_queue.tasks.join_next_with_id(), if !self.helm_queue.tasks.is_empty() => {
                    self.finish_waiting(ended);
                }
                done = self.placed_tenants.jobs.next() => self.finish_placement_step(done),
                done = self.workspaces.jobs.next() => self.finish_workspace(done),
                Some(done) = self.drift_schedule.jobs.join_next(), if !self.drift_schedule.jobs.is_empty() => {
                    self.finish_drift_check(done);
                }
                Some(done) = self.cluster_version.queries.join_next(), if !self.cluster_version.queries.is_empty() => {
                    self.finish_version(done);
                }
                Some(done) = self.recording_tasks.join_next(), if !self.recording_tasks.is_empty() => {
                    self.finish_recording(done);
                }
                Some(done) = self.crd_jobs.join_next(), if !self.crd_jobs.is_empty() => {
                    self.finish_crd(done);
                }
                changed = self.desired.changed() => {
                    if changed.is_err() { return }
                    self.queue_all();
                }
                changed = self.lease_state.changed() => if changed.is_err() { return },
                // An error means that the sender is gone. The goal then never changes again.
                Ok(()) = lease_goal.changed() => {}
                Ok(()) = allowed_namespaces.changed() => self.queue_all(),
                Some(request) = dump_requests.recv() => if !request.is_closed() {
                    // The receiver may have been dropped.
                    drop(request.send(self.dump(BootTime::now())));
                },
                () = clock::sleep_until(wake, now) => {}
            }
        }
    }

    /// Waits for running jobs, then terminates their Helm processes, then kills them.
    async fn drain(&mut self, stop_handle: &StopHandle) {
        stop_handle.close();
        self.helm_queue = HelmQueue::default();
        self.crd_jobs.abort_all();
        self.recording_tasks.abort_all();
        self.cluster_version.queries.abort_all();
        self.placed_tenants.jobs.abort_all();
        self.workspaces.jobs.abort_all();
        self.drift_schedule.end().await;
        if tokio::time::timeout(DRAIN_TIMEOUT, self.jobs.wait_all())
            .await
            .is_err()
        {
            tracing::info!(member = %self.member.name, "stopping Helm processes");
            stop_handle.soft();
        }
        self.jobs.wait_all().await;
    }

    /// Makes these owners due, and the placement orders of these Tenants.
    pub(crate) fn owners_changed(&mut self, keys: BTreeSet<OwnerKey>) {
        self.placed_tenants.queue_owners(&keys);
        self.queue.extend(keys);
    }

    pub(crate) fn queue_all(&mut self) {
        let keys = self.index.owners().map(|(key, _)| key);
        self.queue.extend(keys);
        self.placed_tenants.queue_all();
    }

    fn next_wake(&self, now: BootTime) -> Option<BootTime> {
        // Until the lists are complete, no owner is reconciled.
        let owner = self.queue.wake().filter(|_| self.index.ready());
        // The Lease and the connection expire without an event.
        let expiry = [self.lease_state.get().renewed, Some(self.last_response())]
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

async fn next_event(watch: &mut Option<Watch>) -> Option<WatchEvent> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}
