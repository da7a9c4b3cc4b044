//! The input of a plan: everything that is known about one owner, its release and its workspace.

use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{Release, Status};
use krypton_runtime::clock::BootTime;
use krypton_types::allowed_namespaces::AllowedNamespaces;
use krypton_types::conditions::{ClusterState, reason};
use krypton_types::desired::{ChartState, DesiredState};
use krypton_types::names;

use super::memory::{Attempt, Failure, Memory, Run};
use super::policy::Policy;
use crate::index::Workspace;
use crate::owner::ReleaseOwner;
use crate::placement::home_uid;

/// Whether Krypton may write to the member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Permit {
    Granted,
    /// The reason, as text for users.
    Withheld(String),
}

/// The complete input of a decision.
#[derive(Clone, Debug)]
pub struct View<'a> {
    pub cluster: &'a str,
    /// The field manager of this process.
    pub program: &'a str,
    /// The namespace of the member's kubeconfig Secret; `None` if the member has no such Secret.
    pub source_namespace: Option<&'a str>,
    pub now: BootTime,
    pub policy: &'a Policy,
    pub permit: Permit,
    pub desired: &'a DesiredState,
    /// The chart of `desired`, merged with the owner's values.
    pub chart: &'a ChartState,
    /// The fingerprint of `chart`.
    pub fingerprint: &'a str,
    pub owner: &'a ReleaseOwner,
    pub release_key: &'a ReleaseKey,
    /// The release's revisions, oldest first.
    pub revisions: &'a [&'a Revision],
    /// All owners that request this release, oldest first, including `owner`.
    pub claimants: &'a [ReleaseOwner],
    pub workspace: Option<&'a Workspace>,
    /// Set for a Tenant without a release and without `spec.workspace`: another namespace in which the Go operator
    /// installed a release of this name. No Tenant requests that release.
    pub elsewhere: Option<&'a str>,
    /// Whether other Tenants or KryptonDeployments use the workspace.
    pub workspace_shared: bool,
    /// The newest revision, decoded; `None` until an action reads it.
    pub release_details: Option<&'a Release>,
    /// Description of the first workload that is not ready.
    pub unready: Option<&'a str>,
    /// The namespaces whose Tenants may name this member.
    pub allowed: &'a AllowedNamespaces,
    pub memory: &'a Memory,
}

/// The reason why Krypton must not change the member for an owner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold<'a> {
    pub(super) reason: &'static str,
    pub(super) message: &'a str,
}

impl<'a> View<'a> {
    pub(super) fn has_finalizer(&self) -> bool {
        match self.owner {
            ReleaseOwner::Tenant(tenant) => {
                let finalizers = tenant.metadata.finalizers.as_deref().unwrap_or_default();
                finalizers
                    .iter()
                    .any(|finalizer| finalizer == names::TENANT_FINALIZER)
            }
            // The home cluster's finalizer stays until this member reports that the deployment is gone.
            ReleaseOwner::Deployment(order) => {
                self.memory.cleaned_up.as_deref() != Some(&order.uid)
            }
        }
    }

    pub(super) fn newest(&self) -> Option<&'a Revision> {
        self.revisions.last().copied()
    }

    /// Returns the newest revision if it is deployed.
    pub(super) fn deployed(&self) -> Option<&'a Revision> {
        let newest = self.newest();
        newest.filter(|newest| newest.status == Status::Deployed)
    }

    pub(super) fn hold(&self) -> Option<Hold<'_>> {
        let (reason, message) = match (pause_reason(self.owner, self.desired), &self.permit) {
            (Some(reason), _) => (reason::PAUSED, reason),
            (None, Permit::Withheld(reason)) => (reason::LOCKED, &**reason),
            (None, Permit::Granted) => return None,
        };
        Some(Hold { reason, message })
    }

    /// The Go operator's fingerprint annotation on the Tenant.
    pub(super) fn original_fingerprint(&self) -> Option<&str> {
        self.owner
            .annotation(&names::fingerprint_annotation(self.cluster))
    }

    /// Returns the decoded content of the revision, if an action has read it.
    pub(super) fn decoded(&self, revision: &Revision) -> Option<&Release> {
        self.release_details
            .filter(|release_details| release_details.revision == revision.revision)
    }

    /// Whether the release contains the desired chart, in any version.
    pub(super) fn has_desired_chart(&self, release_details: &Release) -> bool {
        release_details.chart_name == self.chart.name.rsplit('/').next().unwrap_or_default()
    }

    /// Returns the run that makes the release as desired: until a revision has been deployed, an installation.
    pub(super) fn run(&self) -> Run {
        let was_deployed = self
            .revisions
            .iter()
            .any(|revision| matches!(revision.status, Status::Deployed | Status::Superseded));
        match was_deployed {
            true => Run::Upgrade,
            false => Run::Install,
        }
    }

    pub(super) fn reported_state(&self) -> Option<ClusterState> {
        self.memory.last_reported(self.owner, self.cluster)
    }

    /// Returns the last failure, unless the inputs of the attempt have changed since.
    pub(super) fn failure(&self) -> Option<&'a Failure> {
        let attempt = Attempt::new(self.owner, self.desired, self.fingerprint);
        let failure = self.memory.failure.as_ref();
        failure.filter(|failure| failure.attempt == attempt)
    }
}

/// Why the Tenant or the whole member is paused; `None` if neither is.
pub(crate) fn pause_reason(owner: &ReleaseOwner, desired: &DesiredState) -> Option<&'static str> {
    let paused = owner.annotation(names::PAUSED_ANNOTATION);
    if paused.is_some_and(|value| value != "false") || is_paused_at_home(owner, desired) {
        return Some(match owner {
            ReleaseOwner::Tenant(_) => "paused by annotation on the Tenant",
            ReleaseOwner::Deployment(_) => "paused by annotation on the KryptonDeployment",
        });
    }
    desired.paused.then_some("paused on the EdgeCluster")
}

/// Whether the Tenant was placed for a Tenant of the home cluster that is paused. The annotation follows only when the
/// order has been carried out.
fn is_paused_at_home(owner: &ReleaseOwner, desired: &DesiredState) -> bool {
    let uid = owner.tenant().and_then(|tenant| home_uid(tenant));
    uid.is_some_and(|uid| {
        let mut paused = desired.placed.iter().filter(|order| order.paused);
        paused.any(|order| {
            order.is_for(uid) && order.name == owner.name() && order.namespace == owner.namespace()
        })
    })
}
