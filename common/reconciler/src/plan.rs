//! Decides the next action and the conditions of one Tenant or KryptonDeployment from a view of the member, without
//! I/O.

mod deletion;
mod drift;
mod presence;
pub mod repair;
#[cfg(test)]
mod tests;
mod waiting;

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use jiff::Timestamp;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{Release, Status};
use krypton_helm::slots::priority::Priority;
use krypton_runtime::clock::BootTime;
use krypton_types::allowed_namespaces::Allowed;
use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::desired::{ChartState, DesiredState};
use krypton_types::names;
use krypton_types::placed_tenant::placed_on;
use krypton_types::tenant::{Next, Step};

use crate::drift::Wanted;
use crate::index::Workspace;
use crate::owner::ReleaseOwner;

/// Annotation on a Tenant that Krypton recreated after the deletion of its CRD: the Tenant's previous UID.
pub const PREVIOUS_UID_ANNOTATION: &str = "mesh.openkcm.io/previous-uid";

/// How Krypton reacts to an upgrade that it gives up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Remediation {
    /// Keep the failed revision. Objects that the upgrade did not change keep running.
    #[default]
    Keep,
    /// Roll back to the last deployed revision.
    Rollback,
}

impl FromStr for Remediation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "keep" => Ok(Self::Keep),
            "rollback" => Ok(Self::Rollback),
            other => Err(format!("{other:?} is neither \"keep\" nor \"rollback\"")),
        }
    }
}

/// Allowed values of [`Policy::history_max`]. With fewer than 2, Helm would not keep a failed revision next to the
/// deployed one. Krypton could then not find the leftovers of the failed attempt.
pub const HISTORY: RangeInclusive<u8> = 2..=100;
const HISTORY_DEFAULT: u8 = 3;

/// Settings that apply to all releases of a member.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Time that a release may take to become ready after Helm has exited.
    pub helm_timeout: Duration,
    /// Time for which Krypton respects a lock that it did not create.
    pub foreign_lock_grace: Duration,
    /// Number of retries after a failed install or upgrade; unlimited if `None`.
    pub retries: Option<u32>,
    pub remediation: Remediation,
    /// Number of revisions that Helm keeps of a release: the running one and the latest attempts.
    pub history_max: u8,
    /// Namespaces that are never a workspace, in addition to `kube-*` and `krypton-system`.
    pub protected_namespaces: Vec<String>,
}

impl Policy {
    /// Protects the process's `own` namespaces, except `default`, which every Tenant may use as a workspace.
    pub fn new(helm_timeout: Duration, own: impl IntoIterator<Item = String>) -> Self {
        let own = own.into_iter();
        Self {
            helm_timeout,
            foreign_lock_grace: helm_timeout * 3 + Duration::from_secs(60),
            retries: None,
            remediation: Remediation::default(),
            history_max: HISTORY_DEFAULT,
            protected_namespaces: own.filter(|namespace| namespace != "default").collect(),
        }
    }

    /// Sets the number of revisions to keep of each release, limited to [`HISTORY`].
    #[must_use]
    pub fn with_history(mut self, revisions: u8) -> Self {
        self.history_max = revisions.clamp(*HISTORY.start(), *HISTORY.end());
        self
    }

    /// Sets the number of retries, and the remediation after the last one.
    #[must_use]
    pub fn remediated(mut self, retries: Option<u32>, remediation: Remediation) -> Self {
        (self.retries, self.remediation) = (retries, remediation);
        self
    }
}

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
    pub facts: Option<&'a Release>,
    /// Description of the first workload that is not ready.
    pub unready: Option<&'a str>,
    /// The namespaces whose Tenants may name this member.
    pub allowed: &'a Allowed,
    pub memory: &'a Memory,
}

/// State of one owner that this process keeps in memory. Losing it costs a retry, never a release.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// The state as last reported, with or without the Lease.
    pub said: Option<ClusterState>,
    /// The state as last written with the Lease, including its events. Initially the state in the Tenant's status.
    pub told: Option<ClusterState>,
    /// The next step, as last reported and as last written with the Lease.
    pub said_next: Option<Next>,
    pub told_next: Option<Next>,
    /// Time of the last report or write.
    pub said_at: Option<BootTime>,
    pub failure: Option<Failure>,
    /// The API server's refusal of the planned requests.
    pub refusal: Option<Refusal>,
    /// The last Helm run that succeeded.
    pub applied: Option<Applied>,
    /// The newest revision if it is locked, and the time at which this process first saw the lock.
    pub locked: Option<(u32, BootTime)>,
    /// Time at which this process first saw the owner.
    pub known_since: Option<BootTime>,
    /// Result of the last drift check.
    pub drift: Option<Drifted>,
    /// Number and resource version of the newest revision when it was last seen deployed.
    pub deployed: Option<(u32, String)>,
    /// Number and resource version of the deployed revision that was read last.
    pub read_as: Option<(u32, String)>,
    /// A deployed revision of Krypton without a record, and whether it was read with the permit. A read without the
    /// permit may predate the records of releases that an earlier version installed. A revision has no record if the
    /// process died after Helm deployed it.
    pub unrecorded: Option<(u32, bool)>,
    /// A revision to read again, because Helm may no longer be able to decode it.
    pub doubted: Option<u32>,
    /// UID of a deployment whose cleanup is complete. Deployments have this instead of a finalizer.
    pub let_go: Option<String>,
}

/// Drift of a revision; `None` in `words` means no drift.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drifted {
    pub revision: u32,
    pub words: Option<String>,
}

/// Identifies the inputs of an attempt to install or upgrade. A failure with other inputs does not count.
pub fn tried(fingerprint: &str, desired: &DesiredState) -> String {
    let mut tried = vec![fingerprint.to_owned()];
    // The content may be available now if the hub has found its digest since the last attempt.
    tried.extend(desired.chart.pinned.clone());
    if !desired.chart_crds.is_default() {
        tried.push(desired.chart_crds.to_string());
    }
    // Another service account may have the missing rights.
    if !desired.lockdown.is_default() {
        tried.push(desired.lockdown.default_service_account.clone());
    }
    tried.join(" ")
}

impl Memory {
    /// Clears the last failure, because an attempt may succeed on another version of the cluster.
    pub fn cluster_changed(&mut self) {
        self.failure = None;
    }

    /// Updates the memory before a plan: the previous status, and the time since which a revision is locked.
    pub fn look(
        &mut self,
        owner: &ReleaseOwner,
        cluster: &str,
        revisions: &[&Revision],
        now: BootTime,
    ) {
        if self.known_since.is_none() {
            self.known_since = Some(now);
            self.told = owner.on_status(cluster);
            self.told_next = owner.next_on_status(cluster);
        }
        let newest = revisions.last().copied();
        self.locked = newest
            .filter(|revision| revision.status.is_locked())
            .map(|revision| match self.locked {
                Some((number, since)) if number == revision.revision => (number, since),
                _ => (revision.revision, now),
            });
        self.saw(newest);
    }

    /// Records the newest revision. A deployed revision that changes before a newer one exists must be read again,
    /// because no regular operation writes to it.
    pub fn saw(&mut self, newest: Option<&Revision>) {
        self.doubted = self
            .doubted
            .filter(|doubted| newest.is_some_and(|newest| newest.revision == *doubted));
        let deployed = newest.filter(|newest| newest.status == Status::Deployed);
        let now = deployed.map(|newest| (newest.revision, newest.resource_version.clone()));
        if let (Some((revision, before)), Some((same, now))) = (&self.deployed, &now)
            && revision == same
            && before != now
        {
            self.doubted = Some(*same);
        }
        self.deployed = now;
    }

    /// Records the resource version that was read, as the watch may already have shown a later one. If the same
    /// version is read twice, the watch shows an earlier one, as after a restore. No further read is needed then.
    pub fn read(&mut self, revision: &Revision) {
        if revision.status == Status::Deployed {
            let now = Some((revision.revision, revision.resource_version.clone()));
            let again = self.read_as == now;
            self.deployed = now.clone().filter(|_| !again);
            self.read_as = now;
        }
    }

    /// Returns the last reported state, or else the state that an earlier process left in the status.
    pub fn last_word(&self, owner: &ReleaseOwner, cluster: &str) -> Option<ClusterState> {
        self.said.clone().or_else(|| owner.on_status(cluster))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    Install,
    Upgrade,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    pub run: Run,
    pub ended: BootTime,
}

/// The last attempt, if it failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub reason: &'static str,
    pub message: String,
    pub attempts: u32,
    /// A retry of the same attempt would fail in the same way.
    pub permanent: bool,
    pub retry_at: BootTime,
    pub attempt: Attempt,
}

/// Identifies an attempt. A failure holds back only retries of the same attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub generation: i64,
    pub fingerprint: String,
    /// The value of the annotation that requests a retry.
    pub requested: Option<String>,
    /// `None` if the release stays; otherwise whether its removal leaves the objects behind.
    pub removal: Option<bool>,
}

impl Attempt {
    /// `fingerprint` is the fingerprint of the chart for this owner.
    pub fn of(owner: &ReleaseOwner, desired: &DesiredState, fingerprint: &str) -> Self {
        let requested = owner.annotation(names::RECONCILE_REQUESTED_ANNOTATION);
        let orphaned = owner.annotation(names::ORPHAN_ANNOTATION) == Some("true");
        let going = owner.is_going() || desired.retire;
        Self {
            generation: owner.generation(),
            fingerprint: tried(fingerprint, desired),
            requested: requested.map(str::to_owned),
            removal: going.then_some(orphaned),
        }
    }
}

/// Consecutive requests that the API server rejected or did not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub message: String,
    pub attempts: u32,
    pub retry_at: BootTime,
    pub attempt: Attempt,
    /// The API server refused the status write itself.
    pub of_status: bool,
    /// The API server refused to return the content of the release.
    pub of_reading: bool,
    /// Whether the conditions show the refusal. False during a possibly short outage.
    pub shown: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    AddFinalizer,
    CreateWorkspace,
    /// Read and decode a revision, because its labels alone are not sufficient for a decision.
    ReadRelease(u32),
    /// Mark a revision as failed that a dead Helm process left locked.
    Unlock {
        revision: u32,
        was: String,
    },
    Helm(Run),
    /// Repeat a failed installation, including its hooks.
    InstallAgain,
    /// Remove objects that a failed revision created and the deployed revision does not declare.
    Sweep(u32),
    /// Remove the Go operator's objects from `default`, once a Krypton run has upgraded this revision.
    SweepDefault(u32),
    /// Roll back to this revision, because Krypton gave up the upgrade.
    Rollback(u32),
    Uninstall,
    /// Add the Go operator's fingerprint annotation to the Tenant.
    Annotate,
    DeleteWorkspace,
    /// Remove the Tenant's finalizer. A deployment has none here: record that its cleanup is complete.
    RemoveFinalizer {
        orphaned: bool,
    },
}

impl Action {
    /// All values of [`Self::name`].
    pub(crate) const NAMES: [&'static str; 15] = [
        "say",
        "add_finalizer",
        "create_workspace",
        "read_release",
        "unlock",
        "install",
        "upgrade",
        "install_again",
        "sweep",
        "sweep_default",
        "rollback",
        "uninstall",
        "annotate",
        "delete_workspace",
        "remove_finalizer",
    ];

    /// Returns the action's name in metrics. `Nothing` is `say`, because Krypton may still report the state.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Nothing => "say",
            Self::AddFinalizer => "add_finalizer",
            Self::CreateWorkspace => "create_workspace",
            Self::ReadRelease(_) => "read_release",
            Self::Unlock { .. } => "unlock",
            Self::Helm(Run::Install) => "install",
            Self::Helm(Run::Upgrade) => "upgrade",
            Self::InstallAgain => "install_again",
            Self::Sweep(_) => "sweep",
            Self::SweepDefault(_) => "sweep_default",
            Self::Rollback(_) => "rollback",
            Self::Uninstall => "uninstall",
            Self::Annotate => "annotate",
            Self::DeleteWorkspace => "delete_workspace",
            Self::RemoveFinalizer { .. } => "remove_finalizer",
        }
    }

    /// Gives first installations and uninstallations priority over upgrades and retries.
    pub fn urgency(&self, failed: bool) -> Priority {
        match self {
            Self::Helm(Run::Install) | Self::InstallAgain | Self::Uninstall if !failed => {
                Priority::High
            }
            _ => Priority::Low,
        }
    }
}

/// The next action, and the state to report with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub action: Action,
    /// The Tenant's conditions on this member.
    pub state: ClusterState,
    /// The chart that the release runs, if the release is as desired.
    pub applied_chart: Option<String>,
    /// Time of the next plan if nothing changes before.
    pub wake: Option<BootTime>,
    /// The next step to report.
    pub next: Option<Coming>,
    /// Whether the member's report includes the Tenant.
    pub ours: bool,
    /// The removal that the home cluster ordered is complete.
    pub gone: bool,
    /// The release is as desired. Krypton only waits for its readiness or writes about it.
    pub settled: bool,
    /// How to check the release for drift; `None` if Krypton must not check it now.
    pub drift: Option<Wanted>,
}

/// The next step that Krypton takes without a user, as [`Next`] in a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coming {
    pub step: Step,
    pub at: Option<BootTime>,
    /// Number of consecutive failed attempts.
    pub attempts: u32,
}

impl Coming {
    /// Converts the time to wall-clock time, where `now` and `wall` are the same moment.
    pub fn on_the_wall(self, now: BootTime, wall: Timestamp) -> Next {
        let on_the_wall = |at: BootTime| wall.checked_add(at.since(now)).unwrap_or(wall);
        let at = self.at.map(on_the_wall);
        Next::new(self.step, at, self.attempts)
    }

    /// Returns the retry after a failed attempt; `None` if the failure may end at any moment. Each attempt would then
    /// cause a status write without new information.
    fn retry(failure: &Failure) -> Option<Self> {
        let soon = [reason::HELM_UNAVAILABLE, reason::SUSPENDED];
        (!soon.contains(&failure.reason)).then_some(Self {
            step: Step::Retry,
            at: Some(failure.retry_at),
            attempts: failure.attempts,
        })
    }
}

/// Plans the next action. The same view always gives the same plan.
pub fn plan(view: &View<'_>) -> Plan {
    let plan = decide(view);
    let refusal = view.memory.refusal.as_ref();
    match refusal.filter(|refusal| refusal.holds(view, &plan)) {
        Some(refusal) => refused(view, plan, refusal),
        None => plan,
    }
}

impl Refusal {
    /// Whether the refusal replaces this plan, because the API server would refuse it as well.
    fn holds(&self, view: &View<'_>, plan: &Plan) -> bool {
        let waits = match plan.action {
            Action::Nothing => self.of_status,
            _ => view.now < self.retry_at,
        };
        self.shown
            && waits
            && self.attempt == Attempt::of(view.owner, view.desired, view.fingerprint)
    }

    /// Waits for the next retry.
    fn wait(&self, action: Action, state: ClusterState, ours: bool) -> Plan {
        let next = Coming {
            step: Step::Retry,
            at: Some(self.retry_at),
            attempts: self.attempts,
        };
        Plan {
            wake: Some(self.retry_at),
            next: Some(next),
            ours,
            ..Plan::new(action, state)
        }
    }
}

/// Returns the plan while the API server refuses requests. Workloads keep running, so the release stays ready.
fn refused(view: &View<'_>, plan: Plan, refusal: &Refusal) -> Plan {
    let why = reason::REQUEST_REFUSED;
    let error = Some(state(Truth::True, why, refusal.message.clone()));
    if refusal.attempt.removal.is_some() {
        let state = ClusterState {
            error,
            ..plan.state
        };
        return refusal.wait(Action::Nothing, state, plan.ours);
    }
    let (action, ready) = presence::kept(view).unwrap_or_else(|| {
        let ready = state(Truth::False, why, refusal.message.clone());
        (Action::Nothing, ready)
    });
    // The API server refuses the read itself.
    let unread = refusal.of_reading || matches!(plan.action, Action::ReadRelease(_));
    let action = if unread { Action::Nothing } else { action };
    let state = ClusterState {
        ready,
        progress: Some(state(Truth::False, why, "")),
        error,
    };
    refusal.wait(action, state, plan.ours)
}

fn decide(view: &View<'_>) -> Plan {
    let deleting = view.owner.is_going();
    if !view.owner.is_for(view.cluster, view.source_namespace) {
        if deleting && view.has_finalizer() {
            return deletion::plan(view);
        }
        let placed = view.owner.tenant().and_then(|tenant| placed_on(tenant));
        let named = match placed {
            Some(member) => format!("it is placed on {member}"),
            None => format!(
                "clusterRef names {}",
                view.owner.names_member().unwrap_or_default()
            ),
        };
        let message = format!(
            "{named}; this is {}, which leaves the Tenant alone",
            view.cluster
        );
        return Plan {
            ours: false,
            ..Plan::wait(ClusterState {
                ready: state(Truth::False, reason::NOT_THIS_CLUSTER, message),
                progress: None,
                error: None,
            })
        };
    }
    if deleting {
        return deletion::plan(view);
    }
    if view.desired.retire {
        return deletion::retire(view);
    }
    // An existing release stays unchanged.
    let named = view.owner.names_member().is_some();
    match view.allowed.refusal(view.cluster, view.owner.namespace()) {
        Some(ready) if named => Plan {
            ours: false,
            ..Plan::wait(ClusterState {
                ready,
                progress: None,
                error: None,
            })
        },
        _ => drift::over(view, presence::plan(view)),
    }
}

/// Why the Tenant or the whole member is paused; `None` if neither is.
pub(crate) fn paused(owner: &ReleaseOwner, desired: &DesiredState) -> Option<&'static str> {
    let paused = owner.annotation(names::PAUSED_ANNOTATION);
    if paused.is_some_and(|value| value != "false") {
        return Some(match owner {
            ReleaseOwner::Tenant(_) => "paused by annotation on the Tenant",
            ReleaseOwner::Deployment(_) => "paused by annotation on the KryptonDeployment",
        });
    }
    desired.paused.then_some("paused on the EdgeCluster")
}

/// Whether an operator of the cluster has opened the workspace to the owner.
fn is_open_to(workspace: &Workspace, owner: &ReleaseOwner) -> bool {
    let open_to = workspace.open_to.as_deref();
    open_to.and_then(|open_to| open_to.split_once('/')) == Some((owner.namespace(), owner.name()))
}

/// Whether lockdown lets the owner use its release's workspace. It may use its own namespace, a namespace created for
/// it, and a namespace that an operator of the cluster has opened to it.
pub(crate) fn may_use(
    owner: &ReleaseOwner,
    release: &ReleaseKey,
    workspace: Option<&Workspace>,
    newest: Option<&Revision>,
) -> bool {
    let Some(workspace) = workspace else {
        return true;
    };
    let created_for = workspace.creator.as_deref();
    // The Tenant was restored under another UID. Only a user with write access to the workspace can label a release
    // there.
    let before = |revision: &Revision| {
        revision.owner_uid.is_some()
            && revision.owner_uid.as_deref() == created_for
            && revision.owner_namespace.as_deref() == Some(owner.namespace())
    };
    release.namespace == owner.namespace()
        || created_for == Some(owner.uid())
        || newest.is_some_and(before)
        || is_open_to(workspace, owner)
}

/// The owner of a release, as seen by this Tenant or KryptonDeployment.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Ownership {
    /// The release does not exist, and Krypton may create it.
    Free,
    Mine,
    /// Krypton must read the newest revision first.
    Unread,
    /// The release belongs to another owner. The message names the owner and the fix.
    Theirs(String),
}

impl View<'_> {
    fn has_finalizer(&self) -> bool {
        match self.owner {
            ReleaseOwner::Tenant(tenant) => {
                let finalizers = tenant.metadata.finalizers.as_deref().unwrap_or_default();
                finalizers
                    .iter()
                    .any(|finalizer| finalizer == names::TENANT_FINALIZER)
            }
            // The home cluster's finalizer stays until this member reports that the deployment is gone.
            ReleaseOwner::Deployment(order) => self.memory.let_go.as_deref() != Some(&order.uid),
        }
    }

    fn newest(&self) -> Option<&Revision> {
        self.revisions.last().copied()
    }

    fn paused(&self) -> Option<&'static str> {
        paused(self.owner, self.desired)
    }

    /// The Go operator's fingerprint annotation on the Tenant.
    fn original_fingerprint(&self) -> Option<&str> {
        self.owner
            .annotation(&names::fingerprint_annotation(self.cluster))
    }

    /// Whether an operator of the cluster has opened the workspace to this owner.
    fn is_let_in(&self) -> bool {
        self.workspace
            .is_some_and(|workspace| is_open_to(workspace, self.owner))
    }

    /// Whether `owner`, this owner or another claimant of the release, may use the workspace.
    fn may_use_workspace(&self, owner: &ReleaseOwner) -> bool {
        let lockdown = self.desired.lockdown.no_cross_namespace_refs;
        !lockdown || may_use(owner, self.release_key, self.workspace, self.newest())
    }

    /// Returns the owner of the release. A release has one owner, and Krypton never takes it from another claimant.
    fn ownership(&self) -> Ownership {
        let release = &self.release_key.name;
        let owner_uid = self.revisions.iter().rev().find_map(|revision| {
            revision
                .owner_uid
                .as_deref()
                .map(|uid| (uid, revision.owner_namespace.as_deref()))
        });
        let labelled = owner_uid.map(|(uid, _)| uid);
        let owner = self
            .claimants
            .iter()
            .find(|claimant| Some(claimant.uid()) == labelled)
            .or_else(|| {
                let mut claimants = self.claimants.iter();
                claimants.find(|claimant| self.may_use_workspace(claimant))
            });
        let kind = self.owner.kind();
        if let Some(owner) = owner
            && owner.uid() != self.owner.uid()
        {
            let remedy = match self.owner {
                ReleaseOwner::Tenant(_) => "give this Tenant another workspace",
                ReleaseOwner::Deployment(_) => "give this KryptonDeployment another name",
            };
            return Ownership::Theirs(format!(
                "release {release} in namespace {} belongs to {} {}/{}; {remedy}",
                self.release_key.namespace,
                owner.kind(),
                owner.namespace(),
                owner.name(),
            ));
        }
        let adopt = names::ADOPT_ANNOTATION;
        let lockdown = self.desired.lockdown.no_cross_namespace_refs;
        let (adopted, remedy) = match lockdown {
            true => {
                let (namespace, of) = (&self.release_key.namespace, self.owner.namespace());
                let name = self.owner.name();
                let remedy = format!(
                    "an operator of the cluster can annotate namespace {namespace} with {adopt}={of}/{name} to hand it over"
                );
                (self.is_let_in(), remedy)
            }
            false => (
                self.owner.annotation(adopt) == Some("true"),
                format!("annotate this {kind} with {adopt}=true to take it over"),
            ),
        };
        match (self.newest(), owner_uid) {
            // The Go operator's G3 CRD has no workspace field, so a Tenant written under that CRD loses the value.
            (None, _) if let Some(namespace) = self.elsewhere => Ownership::Theirs(format!(
                "the former operator has installed release {release} in namespace {namespace}, and this Tenant \
                 names no workspace: delete it, which leaves that release as it is, and make it anew with \
                 spec.workspace: {namespace} and the annotation {}",
                names::fingerprint_annotation(self.cluster),
            )),
            (None, _) => Ownership::Free,
            (Some(_), Some((uid, _))) if uid == self.owner.uid() => Ownership::Mine,
            (Some(_), Some((uid, namespace)))
                if adopted
                    || namespace == Some(self.owner.namespace())
                    || (!lockdown
                        && self.owner.annotation(PREVIOUS_UID_ANNOTATION) == Some(uid)) =>
            {
                Ownership::Mine
            }
            (Some(_), Some((_, namespace))) => Ownership::Theirs(format!(
                "release {release} in namespace {} was made for a {kind} of namespace {} that is gone; {remedy}",
                self.release_key.namespace,
                namespace.unwrap_or("unknown"),
            )),
            (Some(_), None) if adopted || (!lockdown && self.original_fingerprint().is_some()) => {
                Ownership::Mine
            }
            (Some(newest), None) if self.owner.deployment().is_some() && !lockdown => {
                match self.read(newest) {
                    None => Ownership::Unread,
                    Some(facts) if self.is_of_our_chart(facts) => Ownership::Mine,
                    Some(facts) => Ownership::Theirs(format!(
                        "release {release} in namespace {} is of chart {} and was not made by Krypton; {remedy}",
                        self.release_key.namespace, facts.chart_name,
                    )),
                }
            }
            (Some(_), None) => Ownership::Theirs(format!(
                "release {release} in namespace {} was not made by Krypton; {remedy}",
                self.release_key.namespace,
            )),
        }
    }

    /// Returns the decoded content of the revision, if an action has read it.
    fn read(&self, revision: &Revision) -> Option<&Release> {
        self.facts
            .filter(|facts| facts.revision == revision.revision)
    }

    /// Whether the release contains the desired chart, in any version.
    fn is_of_our_chart(&self, facts: &Release) -> bool {
        facts.chart_name == self.chart.name.rsplit('/').next().unwrap_or_default()
    }

    fn said(&self) -> Option<ClusterState> {
        self.memory.last_word(self.owner, self.cluster)
    }

    /// Returns the last failure, unless the inputs of the attempt have changed since.
    fn failure(&self) -> Option<&Failure> {
        let attempt = Attempt::of(self.owner, self.desired, self.fingerprint);
        let failure = self.memory.failure.as_ref();
        failure.filter(|failure| failure.attempt == attempt)
    }
}

impl Plan {
    pub fn new(action: Action, state: ClusterState) -> Self {
        Self {
            action,
            state,
            applied_chart: None,
            wake: None,
            next: None,
            ours: true,
            gone: false,
            settled: false,
            drift: None,
        }
    }

    fn wait(state: ClusterState) -> Self {
        Self::new(Action::Nothing, state)
    }
}

fn state(truth: Truth, reason: &str, message: impl Into<String>) -> State {
    State {
        truth,
        reason: reason.to_owned(),
        message: message.into(),
    }
}
