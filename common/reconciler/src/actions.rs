//! Runs one action. Each write has a precondition, and each call has a deadline.

mod cert_manager;
mod chart_crds;
mod deletion_check;
pub(super) mod error;
mod finalizer;
mod helm_run;
mod leftovers;
mod objects;
mod occupants;
mod read_release;
mod rollback;
mod status;
mod stored_revisions;
mod trust;
mod uninstall;
mod unlock;
mod unreadable_revision;
mod workspace;

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::tenant::Tenant;
use krypton_helm::driver::StopSignal;
use krypton_helm::releases::Release;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::access::{client_as, kubeconfig_as};
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::events::{EventRecorder, ObjectEvent};
use krypton_runtime::lease::LeaseState;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{ClusterState, reason};
use krypton_types::deployment::ReportedEvent;
use krypton_types::desired::{ChartState, DesiredState};
use krypton_types::tenant::UpcomingStep;
use kube::api::Api;
use kube::{Client, Resource};
use tempfile::TempPath;
use tokio::sync::watch;
use tracing::Span;

use crate::helm_queue::HelmReservation;
use crate::index::CrdState;
use crate::inputs::{Member, Tools};
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::plan::{Action, Plan, Run};
use crate::report_store::ReportStore;
use error::{ActionError, ActionResult, helm_failure, transient, unavailable};
use leftovers::LeftoverSource;

/// Whether an action runs Helm, and so needs a slot.
pub(super) fn runs_helm(action: &Action) -> bool {
    matches!(
        action,
        Action::Helm(_) | Action::InstallAgain | Action::Rollback(_) | Action::Uninstall
    )
}

/// The inputs of one action, taken from the index at the time of the plan.
pub(super) struct Job {
    pub key: OwnerKey,
    pub owner: ReleaseOwner,
    pub plan: Plan,
    /// The state as last written with the Lease.
    pub published: Option<ClusterState>,
    /// The next step, reported together with the plan's state.
    pub next: Option<UpcomingStep>,
    /// The last reconcile request that was handled, reported together with the plan's state.
    pub handled_request: Option<String>,
    pub release: ReleaseKey,
    pub newest: Option<Revision>,
    /// All revisions, including the newest.
    pub revisions: Vec<Revision>,
    /// Highest `resourceVersion` among them.
    pub known_version: u64,
    /// Number of the index's lists at the time of the plan.
    pub lists: u64,
    pub workspace_exists: bool,
    /// State of the Tenant CRD on the cluster.
    pub tenant_crd: CrdState,
    /// `ActionRunner::crd_losses` at the time of the plan.
    pub crd_losses: u64,
    /// Whether no other Tenant or KryptonDeployment stays on this member.
    pub is_last_owner: bool,
    pub desired: Arc<DesiredState>,
    /// The fingerprint of the chart for this Tenant or deployment.
    pub fingerprint: Arc<str>,
    /// Whether the permit was granted at the time of the plan.
    pub permitted: bool,
    /// The Helm slot and the chart of a run, until it starts.
    pub reservation: Option<HelmReservation>,
}

impl Job {
    /// The chart for this Tenant or deployment.
    fn chart(&self) -> Cow<'_, ChartState> {
        self.desired.chart_with(self.owner.values())
    }

    /// Whether the job only reports the state.
    pub(crate) fn is_report_only(&self) -> bool {
        self.plan.action == Action::Nothing
    }
}

/// The objects that a job has read or written, and the state that it has reported.
#[derive(Default)]
pub(super) struct JobResult {
    /// The state that the job reported.
    pub reported: Option<ClusterState>,
    /// The reported state, if this process held the Lease and wrote the state with its events.
    pub published: Option<ClusterState>,
    pub tenant: Option<Tenant>,
    pub release_update: Option<ReleaseUpdate>,
    pub release_details: Option<Release>,
    /// See `plan::Memory::unrecorded`.
    pub unrecorded: Option<(u32, bool)>,
    pub workspace: Option<ObjectMeta>,
    pub applied: Option<Run>,
    /// UID of the Tenant if its deletion was confirmed while its CRD was intact.
    pub deletion_confirmed: Option<String>,
    /// UID of the deployment if its cleanup is complete.
    pub cleaned_up: Option<String>,
    /// Earlier failures no longer apply.
    pub clears_failure: bool,
    /// The action stopped because it needs a Helm slot.
    pub needs_slot: bool,
    pub error: Option<ActionError>,
}

impl JobResult {
    /// Returns the listed revisions of the release; empty if the job has not listed them.
    fn listed(&self) -> &[ObjectMeta] {
        match &self.release_update {
            Some(ReleaseUpdate::All { metas, .. }) => metas,
            _ => &[],
        }
    }

    /// Drops what the job has read or written, and its claim that a user has changed the release. A restore of etcd may
    /// have changed it.
    pub(crate) fn forget_responses(&mut self) {
        (self.tenant, self.workspace) = (None, None);
        (self.release_update, self.release_details, self.unrecorded) = (None, None, None);
        let error = self.error.as_ref();
        if error.is_some_and(ActionError::is_tampering) {
            self.error = Some(ActionError::Conflict);
        }
    }
}

/// Result of reading a release's Secrets.
pub(super) enum ReleaseUpdate {
    /// A new list of all revisions.
    All {
        metas: Vec<ObjectMeta>,
        version: u64,
        /// Highest `resourceVersion` of a revision that was known before the request.
        known_before: u64,
    },
    /// One revision. `JobResult::release_details` has its content if it could be decoded.
    One(Box<ObjectMeta>),
}

/// Runs the actions of a reconciler.
#[derive(Clone)]
pub(super) struct ActionRunner {
    /// While an action runs for an owner with a service account, this has the rights of that account.
    pub member: Arc<Member>,
    /// Has Helm's rights even if the action uses a service account. For chart objects that belong to no Tenant.
    pub fleet_client: Client,
    /// The latest desired state. A job has the desired state from the time of its plan.
    pub desired: watch::Receiver<Arc<DesiredState>>,
    pub tools: Tools,
    pub events: EventRecorder,
    pub report_store: Arc<ReportStore>,
    pub lease_state: watch::Receiver<LeaseState>,
    /// How often the Tenant CRD was found deleted. Its Tenants lose their finalizers, so their jobs start no Helm.
    pub crd_losses: Arc<AtomicU64>,
    pub stop: StopSignal,
}

impl ActionRunner {
    pub(super) async fn run_job(
        self: Arc<Self>,
        job: Arc<Job>,
        reservation: Option<HelmReservation>,
    ) -> Box<JobResult> {
        let mut result = Box::<JobResult>::default();
        let started = BootTime::now();
        // The file is deleted when the action ends.
        let (runner, _kubeconfig) = match self.runner_for(&job) {
            Ok((runner, kubeconfig)) => (runner, kubeconfig),
            Err(error) => {
                result.error = Some(error);
                return result;
            }
        };
        Box::pin(runner.run_action(&job, reservation, &mut result, started)).await;
        result
    }

    /// Returns a runner that acts as the owner's service account, if the owner has one.
    fn runner_for(self: Arc<Self>, job: &Job) -> ActionResult<(Arc<Self>, Option<TempPath>)> {
        let user = job.owner.user(&job.desired.lockdown);
        let Some(user) = user.filter(|_| !job.is_report_only()) else {
            return Ok((self, None));
        };
        let client = client_as(&self.member.client, &user).map_err(|_| {
            let message =
                "spec.serviceAccountName is not the name of a service account; correct it";
            ActionError::permanent(reason::HELM_UNAVAILABLE, message.to_owned())
        })?;
        let kubeconfig = kubeconfig_as(&self.member.kubeconfig, &user);
        let kubeconfig = kubeconfig.map_err(|error| {
            let message = format!(
                "failed to write Helm's kubeconfig: {error}; check the free space of --private-dir"
            );
            ActionError::failed(reason::HELM_UNAVAILABLE, message)
        })?;
        let member = Member {
            helm_client: client,
            kubeconfig: kubeconfig.to_path_buf(),
            ..(*self.member).clone()
        };
        let runner = Self {
            member: Arc::new(member),
            ..(*self).clone()
        };
        Ok((Arc::new(runner), Some(kubeconfig)))
    }

    async fn run_action(
        &self,
        job: &Job,
        reservation: Option<HelmReservation>,
        result: &mut JobResult,
        started: BootTime,
    ) {
        let ended = match &job.plan.action {
            Action::Nothing => self.report(job, result).await,
            Action::AddFinalizer => self.add_finalizer(job, result).await,
            Action::CreateWorkspace => self.create_workspace(job, result).await,
            Action::ReadRelease(revision) => {
                self.read_release(job, *revision, reservation, result).await
            }
            Action::Unlock { revision, status } => {
                let lock = (*revision, *status);
                self.unlock(job, lock, reservation, result).await
            }
            Action::Helm(run) => self.helm(job, *run, false, reservation, result).await,
            Action::InstallAgain => {
                self.helm(job, Run::Install, true, reservation, result)
                    .await
            }
            Action::Sweep(revision) => {
                let swept = (*revision, LeftoverSource::ByAttempt);
                self.sweep(job, swept, result).await
            }
            Action::SweepDefault(revision) => {
                let swept = (*revision, LeftoverSource::InDefault);
                self.sweep(job, swept, result).await
            }
            Action::Rollback(to) => self.roll_back(job, *to, reservation, result).await,
            Action::Uninstall => self.uninstall(job, reservation, result).await,
            Action::Annotate => self.annotate(job, result).await,
            Action::DeleteWorkspace => self.delete_workspace(job, result).await,
            Action::RemoveFinalizer { orphaned } => {
                self.remove_finalizer(job, *orphaned, result).await
            }
        };
        result.error = ended.err();
        let outcome = result.error.as_ref().map_or("ok", ActionError::outcome);
        Span::current().record("outcome", outcome);
        let duration = BootTime::now().since(started);
        let work = &self.tools.work;
        work.record_action(&job.plan.action, duration, outcome);
    }

    fn client(&self) -> Client {
        self.member.client.clone()
    }

    fn tenants(&self, namespace: &str) -> Api<Tenant> {
        Api::namespaced(self.client(), namespace)
    }

    /// Emits an event on the Tenant. The hub emits a deployment's events from the member's reports.
    pub(super) fn emit_event(&self, owner: &ReleaseOwner, event: ObjectEvent) {
        match owner {
            ReleaseOwner::Tenant(tenant) => self.events.record_event(tenant.object_ref(&()), event),
            ReleaseOwner::Deployment(order) => {
                let reported_event = ReportedEvent {
                    at: u64::try_from(clock::wall().as_nanosecond()).unwrap_or_default(),
                    reason: event.reason.to_owned(),
                    message: event.message,
                };
                self.report_store.add_event(order, reported_event);
            }
        }
    }

    fn secrets(&self, release: &ReleaseKey) -> Api<Secret> {
        Api::namespaced(self.client(), &release.namespace)
    }

    /// Checks again right before Helm starts, because the preparation may have taken long.
    fn check_start(&self, job: &Job) -> ActionResult {
        let has_lost_crd = job.owner.tenant().is_some()
            && job.crd_losses != self.crd_losses.load(Ordering::Relaxed);
        if has_lost_crd || self.desired.get().paused {
            return Err(ActionError::Conflict);
        }
        self.check_permit()
    }

    pub(super) fn check_permit(&self) -> ActionResult {
        let permitted = self.stop.is_open() && self.lease_state.get().may_start(BootTime::now());
        permitted.then_some(()).ok_or(ActionError::Conflict)
    }
}
