//! Runs one action. Each write has a precondition, and each call has a deadline.

mod cert_manager;
mod chart_crds;
mod deletion_check;
mod finalizer;
mod helm_run;
mod leftovers;
mod occupants;
mod read_release;
mod rollback;
mod status;
mod stored;
mod trust;
mod uninstall;
mod unlock;
mod unreadable_revision;
mod workspace;

use std::borrow::Cow;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::tenant::Tenant;
use krypton_helm::driver::{HelmError, StopSignal, is_suspended};
use krypton_helm::releases::Release;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::access::{client_as, kubeconfig_as};
use krypton_runtime::call::ApiError;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::events::{EventRecorder, ObjectEvent};
use krypton_runtime::lease::LeaseState;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{ClusterState, reason};
use krypton_types::deployment::ReportedEvent;
use krypton_types::desired::{ChartState, DesiredState};
use krypton_types::error_chain::chain;
use krypton_types::tenant::Next;
use kube::api::Api;
use kube::{Client, Resource};
use tempfile::TempPath;
use tokio::sync::watch;
use tracing::Span;

use super::helm_queue::Ready;
use crate::index::CrdState;
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::plan::{Action, Attempt, Plan, Run};
use crate::report_store::ReportStore;
use crate::run_loop::{Member, Tools};

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
    pub told: Option<ClusterState>,
    /// The next step, reported together with the plan's state.
    pub next: Option<Next>,
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
    pub tenants: CrdState,
    /// Whether no other Tenant or KryptonDeployment stays on this member.
    pub last: bool,
    pub desired: Arc<DesiredState>,
    /// The fingerprint of the chart for this Tenant or deployment.
    pub fingerprint: Arc<str>,
    /// Whether the permit was granted at the time of the plan.
    pub permitted: bool,
    /// The Helm slot and the chart of a run.
    pub ready: Option<Ready>,
}

impl Job {
    /// The chart for this Tenant or deployment.
    fn chart(&self) -> Cow<'_, ChartState> {
        self.desired.chart_with(self.owner.values())
    }
}

/// The result of a job.
pub(super) struct JobResult {
    pub key: OwnerKey,
    pub of: ReleaseKey,
    pub attempt: Attempt,
    /// See `Job::lists`.
    pub lists: u64,
    /// The state that the job reported.
    pub said: Option<ClusterState>,
    /// The reported state, if this process held the Lease and wrote the state with its events.
    pub told: Option<ClusterState>,
    /// The next step that was reported with the state.
    pub next: Option<Next>,
    pub tenant: Option<Tenant>,
    pub release: Option<ReleaseNews>,
    pub release_details: Option<Release>,
    /// See `plan::Memory::unrecorded`.
    pub unrecorded: Option<(u32, bool)>,
    pub workspace: Option<ObjectMeta>,
    pub applied: Option<Run>,
    /// UID of the Tenant if its deletion was confirmed while its CRD was intact.
    pub deletion_confirmed: Option<String>,
    /// UID of the deployment if its cleanup is complete.
    pub let_go: Option<String>,
    /// Earlier failures no longer apply.
    pub progressed: bool,
    /// The job only reported the state.
    pub spoke: bool,
    /// The action stopped because it needs a Helm slot.
    pub needs_slot: bool,
    pub fault: Option<ActionError>,
}

impl JobResult {
    /// Drops what the job has read or written.
    pub(crate) fn forget_responses(&mut self) {
        (self.tenant, self.workspace) = (None, None);
        (self.release, self.release_details, self.unrecorded) = (None, None, None);
    }
}

/// Result of reading a release's Secrets.
pub(super) enum ReleaseNews {
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

/// Why an action did not succeed.
#[derive(Debug)]
pub(super) enum ActionError {
    /// Shown in a condition and retried after a back-off. `permanent` if only a change can help.
    Failed {
        reason: &'static str,
        message: String,
        permanent: bool,
    },
    /// An input of the plan has changed: plan again shortly.
    Conflict,
    /// A transient failure of the API server, which the Tenant did not cause.
    Transient(String),
    /// The API server refuses the request itself; a retry alone does not help.
    Refused(String),
}

impl ActionError {
    /// Returns the outcome for metrics.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::Failed { .. } => "failed",
            Self::Conflict => "conflict",
            Self::Transient(_) | Self::Refused(_) => "transient",
        }
    }
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
    pub hold: watch::Receiver<LeaseState>,
    pub stop: StopSignal,
}

impl ActionRunner {
    pub(super) async fn perform(self: Arc<Self>, mut job: Box<Job>) -> Box<JobResult> {
        let ready = job.ready.take();
        let mut done = Box::new(JobResult {
            key: job.key.clone(),
            of: job.release.clone(),
            attempt: Attempt::of(&job.owner, &job.desired, &job.fingerprint),
            lists: job.lists,
            said: None,
            told: None,
            next: job.next,
            tenant: None,
            release: None,
            release_details: None,
            unrecorded: None,
            workspace: None,
            applied: None,
            deletion_confirmed: None,
            let_go: None,
            progressed: false,
            spoke: job.plan.action == Action::Nothing,
            needs_slot: false,
            fault: None,
        });
        let begun = BootTime::now();
        // The file is deleted when the action ends.
        let (performer, _kubeconfig) = match self.acting_for(&job) {
            Ok((performer, kubeconfig)) => (performer, kubeconfig),
            Err(fault) => {
                done.fault = Some(fault);
                return done;
            }
        };
        Box::pin(performer.act(&job, ready, &mut done, begun)).await;
        done
    }

    /// Returns a runner that acts as the owner's service account, if the owner has one.
    fn acting_for(
        self: Arc<Self>,
        job: &Job,
    ) -> Result<(Arc<Self>, Option<TempPath>), ActionError> {
        let user = job.owner.user(&job.desired.lockdown);
        let Some(user) = user.filter(|_| job.plan.action != Action::Nothing) else {
            return Ok((self, None));
        };
        let client = client_as(&self.member.client, &user).map_err(|_| ActionError::Failed {
            reason: reason::HELM_UNAVAILABLE,
            message: "spec.serviceAccountName is not the name of a service account; correct it"
                .to_owned(),
            permanent: true,
        })?;
        let kubeconfig = kubeconfig_as(&self.member.kubeconfig, &user);
        let kubeconfig = kubeconfig.map_err(|error| ActionError::Failed {
            reason: reason::HELM_UNAVAILABLE,
            message: format!(
                "failed to write Helm's kubeconfig: {error}; check the free space of --private-dir"
            ),
            permanent: false,
        })?;
        let member = Member {
            helm_client: client,
            kubeconfig: kubeconfig.to_path_buf(),
            ..(*self.member).clone()
        };
        let performer = Self {
            member: Arc::new(member),
            ..(*self).clone()
        };
        Ok((Arc::new(performer), Some(kubeconfig)))
    }

    async fn act(&self, job: &Job, ready: Option<Ready>, done: &mut JobResult, begun: BootTime) {
        let result = match &job.plan.action {
            Action::Nothing => self.say(job, done).await,
            Action::AddFinalizer => self.add_finalizer(job, done).await,
            Action::CreateWorkspace => self.create_workspace(job, done).await,
            Action::ReadRelease(revision) => self.read_release(job, *revision, ready, done).await,
            Action::Unlock { revision, was } => {
                let lock = (*revision, &**was);
                self.unlock(job, lock, ready, done).await
            }
            Action::Helm(run) => self.helm(job, *run, false, ready, done).await,
            Action::InstallAgain => self.helm(job, Run::Install, true, ready, done).await,
            Action::Sweep(revision) => self.sweep(job, *revision, done).await,
            Action::SweepDefault(revision) => self.sweep_default(job, *revision, done).await,
            Action::Rollback(to) => self.roll_back(job, *to, ready, done).await,
            Action::Uninstall => self.uninstall(job, ready, done).await,
            Action::Annotate => self.annotate(job, done).await,
            Action::DeleteWorkspace => self.delete_workspace(job, done).await,
            Action::RemoveFinalizer { orphaned } => {
                self.remove_finalizer(job, *orphaned, done).await
            }
        };
        done.fault = result.err();
        let outcome = done.fault.as_ref().map_or("ok", ActionError::outcome);
        Span::current().record("outcome", outcome);
        let took = BootTime::now().since(begun);
        let work = &self.tools.work;
        work.reconciled(&job.plan.action, took, outcome);
    }

    fn client(&self) -> Client {
        self.member.client.clone()
    }

    fn tenants(&self, namespace: &str) -> Api<Tenant> {
        Api::namespaced(self.client(), namespace)
    }

    /// Emits an event on the Tenant. The hub emits a deployment's events from the member's reports.
    pub(super) fn tell(&self, owner: &ReleaseOwner, told: ObjectEvent) {
        match owner {
            ReleaseOwner::Tenant(tenant) => self.events.tell(tenant.object_ref(&()), told),
            ReleaseOwner::Deployment(order) => {
                let reported_event = ReportedEvent {
                    at: u64::try_from(clock::wall().as_nanosecond()).unwrap_or_default(),
                    reason: told.reason.to_owned(),
                    message: told.message,
                };
                self.report_store.did(order, reported_event);
            }
        }
    }

    fn secrets(&self, release: &ReleaseKey) -> Api<Secret> {
        Api::namespaced(self.client(), &release.namespace)
    }

    pub(super) fn still_permitted(&self) -> Result<(), ActionError> {
        let permitted = self.stop.is_open() && self.hold.get().may_start(BootTime::now());
        permitted.then_some(()).ok_or(ActionError::Conflict)
    }
}

impl ActionError {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Failed { message, .. } | Self::Transient(message) | Self::Refused(message) => {
                message
            }
            Self::Conflict => "changed by another writer",
        }
    }
}

fn unavailable(error: &HelmError) -> ActionError {
    ActionError::Failed {
        reason: reason::HELM_UNAVAILABLE,
        message: chain(error),
        permanent: false,
    }
}

fn suspended(message: String) -> ActionError {
    ActionError::Failed {
        reason: reason::SUSPENDED,
        message,
        permanent: false,
    }
}

impl From<ApiError> for ActionError {
    /// An answer that a retry of the same request would get again is a refusal.
    fn from(error: ApiError) -> Self {
        let Some(status) = error.status() else {
            return transient(&error);
        };
        match status.code {
            404 | 409 => Self::Conflict,
            _ if is_suspended(&status.message) => suspended(status.message.clone()),
            400 | 403 | 405 | 413 | 415 | 422 => Self::Refused(chain(&error)),
            _ => transient(&error),
        }
    }
}

fn transient(error: &dyn std::error::Error) -> ActionError {
    ActionError::Transient(chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_repeat_are_refusals() {
        let answered = |code: u16| {
            let status = kube::core::Status::failure("no", "Reason").with_code(code);
            ActionError::from(ApiError::Failed {
                attempt: "writing".into(),
                source: Box::new(kube::Error::Api(status.boxed())),
            })
        };
        for code in [400, 403, 405, 413, 415, 422] {
            assert!(matches!(answered(code), ActionError::Refused(_)), "{code}");
        }
        for code in [401, 429, 500, 503] {
            assert!(
                matches!(answered(code), ActionError::Transient(_)),
                "{code}"
            );
        }
    }
}
