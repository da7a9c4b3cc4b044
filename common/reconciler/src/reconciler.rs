//! The state of one member's reconciler.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use krypton_helm::releases::Release;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_runtime::clock::BootTime;
use krypton_runtime::lease::{LeaseGoal, LeaseState};
use krypton_runtime::retry::Backoff;
use krypton_runtime::tasks::KeyedTasks;
use krypton_runtime::work_queue::WorkQueue;
use krypton_types::desired::{DesiredState, Version};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::Span;

use crate::actions::{ActionRunner, Job, JobResult};
use crate::backup::restoring::{CrdRound, UnrestoredTenants};
use crate::bounds::WatchBounds;
use crate::cluster_version::ClusterVersion;
use crate::digests::DesiredDigests;
use crate::drift::schedule::DriftSchedule;
use crate::helm_queue::HelmQueue;
use crate::index::Index;
use crate::inputs::Member;
use crate::metrics::ReconcilerShare;
use crate::owner::OwnerKey;
use crate::owner_state::OwnerState;
use crate::placed_tenants::PlacedTenants;
use crate::plan::Attempt;
use crate::record::RecordResult;
use crate::report_store::ReportStore;
use crate::tenant_list_schema::TenantListSchema;
use crate::workspaces::Workspaces;

/// Maximum number of Tenants with API requests in flight, apart from Helm runs. At startup, a thousand Tenants must
/// neither flood the API server nor take the memory of a thousand calls.
const MAX_CONCURRENT_ACTIONS: usize = 16;

/// A running action.
pub(crate) struct RunningAction {
    pub job: Arc<Job>,
    pub attempt: Attempt,
    pub span: Span,
}

/// The state of the reconcile loop. Each part of its work is in the file of its subject.
pub(crate) struct Reconciler {
    pub member: Arc<Member>,
    pub runner: Arc<ActionRunner>,
    pub report_store: Arc<ReportStore>,
    pub index: Index,
    pub bounds: WatchBounds,
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
    pub crd_jobs: JoinSet<CrdRound>,
    /// The CRD is up to date and no saved Tenant waits to be restored.
    pub crd_checked: bool,
    /// Tenants that were saved when their CRD was deleted and are not restored yet. `None` until the backup is read.
    pub unrestored: Option<UnrestoredTenants>,
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
    pub queue_metrics: ReconcilerShare,
}

impl Reconciler {
    pub(crate) fn new(runner: Arc<ActionRunner>, lease_goal: watch::Sender<LeaseGoal>) -> Self {
        let member = Arc::clone(&runner.member);
        // An owner's back-off depends on its attempt, so its `OwnerState` holds it.
        let no_backoff = Backoff::up_to(Duration::ZERO);
        Self {
            index: Index::new(&member.name, member.source_namespace.as_deref()),
            bounds: WatchBounds::new(member.on_excess.clone()),
            report_store: Arc::clone(&runner.report_store),
            desired: runner.desired.clone(),
            lease_state: runner.lease_state.clone(),
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
            placed_tenants: PlacedTenants::new(member.retry_max),
            workspaces: Workspaces::new(member.retry_max),
            cluster_version: ClusterVersion::default(),
            permitted: false,
            held_since: None,
            cluster_problem: None,
            started: BootTime::now(),
            queue_metrics: runner.tools.work.new_share(),
            member,
            runner,
        }
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
}
