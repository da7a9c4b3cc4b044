//! The decision: what is known of one Tenant or deployment in, the one next action and its conditions out. No I/O.

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

/// Annotation on a Tenant that was put back after its CRD was deleted: its UID before.
pub const PREVIOUS_UID_ANNOTATION: &str = "mesh.openkcm.io/previous-uid";

/// What is done about an upgrade that is given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Remediation {
    /// The failed revision stays; what it has not changed runs on.
    #[default]
    Keep,
    /// The last revision that was deployed is put back.
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

/// How many revisions of a release may be kept. With fewer than the least, helm would keep no failed one
/// beside what runs, of which could be told what it left.
pub const HISTORY: RangeInclusive<u8> = 2..=100;
const HISTORY_DEFAULT: u8 = 3;

/// What stays the same for all of a member.
#[derive(Clone, Debug)]
pub struct Policy {
    /// How long a release may take to become ready, after helm has ended.
    pub helm_timeout: Duration,
    /// How long a lock that somebody else left is respected.
    pub foreign_lock_grace: Duration,
    /// How often a failed install or upgrade is tried again before it is given up; without end if `None`.
    pub retries: Option<u32>,
    pub remediation: Remediation,
    /// Revisions kept of a release: what runs, and what came of the last attempts.
    pub history_max: u8,
    /// Namespaces that are never a workspace, beside `kube-*` and `krypton-system`.
    pub protected_namespaces: Vec<String>,
}

impl Policy {
    /// That of a process whose `own` namespaces are no workspaces; `default` is one for everybody.
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

    /// Keeps so many revisions of each release.
    #[must_use]
    pub fn with_history(mut self, revisions: u8) -> Self {
        self.history_max = revisions.clamp(*HISTORY.start(), *HISTORY.end());
        self
    }

    /// Gives up after so many retries, and does this then.
    #[must_use]
    pub fn remediated(mut self, retries: Option<u32>, remediation: Remediation) -> Self {
        (self.retries, self.remediation) = (retries, remediation);
        self
    }
}

/// Whether the member may be written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Permit {
    Granted,
    /// Why not, for people.
    Withheld(String),
}

/// Everything the decision rests on.
#[derive(Clone, Debug)]
pub struct View<'a> {
    pub cluster: &'a str,
    /// The namespace of the member's kubeconfig Secret, where it has one.
    pub source_namespace: Option<&'a str>,
    pub now: BootTime,
    pub policy: &'a Policy,
    pub permit: Permit,
    pub desired: &'a DesiredState,
    /// Of `desired`, with what the owner has of its own.
    pub chart: &'a ChartState,
    /// The fingerprint of `chart`.
    pub fingerprint: &'a str,
    pub owner: &'a ReleaseOwner,
    pub release_key: &'a ReleaseKey,
    /// The release's revisions, oldest first.
    pub revisions: &'a [&'a Revision],
    /// Those that ask for this release, oldest first, this one among them.
    pub claimants: &'a [ReleaseOwner],
    pub workspace: Option<&'a Workspace>,
    /// Where else there is a release of this name that the original has made and nobody asks for, of a Tenant
    /// that has none and names no workspace.
    pub elsewhere: Option<&'a str>,
    /// Other Tenants or deployments use the workspace.
    pub workspace_shared: bool,
    /// The newest revision, decoded; where that was needed.
    pub facts: Option<&'a Release>,
    /// The first workload that is not ready, in words.
    pub unready: Option<&'a str>,
    /// Whose Tenants may name this member.
    pub allowed: &'a Allowed,
    pub memory: &'a Memory,
}

/// What this process remembers of a owner. Losing it costs a retry, never a release.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// What was last reported of the Tenant, with or without the Lease.
    pub said: Option<ClusterState>,
    /// What was last written and told with the Lease; at first, what the status says.
    pub told: Option<ClusterState>,
    /// What comes next, as it was last reported and as it was written with the Lease.
    pub said_next: Option<Next>,
    pub told_next: Option<Next>,
    /// When it was last reported or written.
    pub said_at: Option<BootTime>,
    pub failure: Option<Failure>,
    /// Why the API server refuses the planned requests.
    pub refusal: Option<Refusal>,
    /// The last helm run that ended well.
    pub applied: Option<Applied>,
    /// Since when a lock of somebody else has been seen.
    pub locked: Option<(u32, BootTime)>,
    /// Since when this process has known the Tenant.
    pub known_since: Option<BootTime>,
    /// What the last look for drift has shown.
    pub drift: Option<Drifted>,
    /// The newest revision when it was last seen deployed, and its Secret's version.
    pub deployed: Option<(u32, String)>,
    /// The revision that was read last, and its Secret's version.
    pub read_as: Option<(u32, String)>,
    /// A deployed revision of ours without a record, and whether it was read with the permit: without it the releases
    /// of an earlier version may be on record by now. The process died before it could record what Helm deployed.
    pub unrecorded: Option<(u32, bool)>,
    /// A revision that is to be read again: it may be one that helm cannot read any more.
    pub doubted: Option<u32>,
    /// UID of a deployment of which nothing is left to be done; in the place of a finalizer.
    pub let_go: Option<String>,
}

/// What is said of a revision's drift; nothing when there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drifted {
    pub revision: u32,
    pub words: Option<String>,
}

/// What an attempt to install or upgrade is of: where it is another, what failed before says nothing.
pub fn tried(fingerprint: &str, desired: &DesiredState) -> String {
    let mut tried = vec![fingerprint.to_owned()];
    // Content that the hub has found since may be had where none was.
    tried.extend(desired.chart.pinned.clone());
    if !desired.chart_crds.is_default() {
        tried.push(desired.chart_crds.to_string());
    }
    // Another account may have the rights that were missing.
    if !desired.lockdown.is_default() {
        tried.push(desired.lockdown.default_service_account.clone());
    }
    tried.join(" ")
}

impl Memory {
    /// The cluster is of another version than when the last attempt failed: it may succeed now.
    pub fn cluster_changed(&mut self) {
        self.failure = None;
    }

    /// Takes in what is known before a plan: the status so far, and since when a revision is locked.
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

    /// Takes in the newest revision. Nobody has a reason to write to one that is deployed before there is
    /// another, but it happens.
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

    /// What was read is of this version of the Secret: the watch may have shown a later one meanwhile. Where the same
    /// is read again, what the watch shows is an earlier one, as after a restore, and no reason to read on.
    pub fn read(&mut self, revision: &Revision) {
        if revision.status == Status::Deployed {
            let now = Some((revision.revision, revision.resource_version.clone()));
            let again = self.read_as == now;
            self.deployed = now.clone().filter(|_| !again);
            self.read_as = now;
        }
    }

    /// What is said of the Tenant now: our own last word, else the status that an earlier process left.
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

/// The last attempt, when it failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub reason: &'static str,
    pub message: String,
    pub attempts: u32,
    /// The same attempt would fail the same way.
    pub permanent: bool,
    pub retry_at: BootTime,
    pub attempt: Attempt,
}

/// Identifies an attempt. An earlier failure holds back only the same attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub generation: i64,
    pub fingerprint: String,
    /// The value of the annotation that requests a retry.
    pub requested: Option<String>,
    /// `None` unless the release goes; then whether its objects stay.
    pub removal: Option<bool>,
}

impl Attempt {
    /// `fingerprint` is that of the chart for this owner.
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

/// Requests in a row that the API server did not take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub message: String,
    pub attempts: u32,
    pub retry_at: BootTime,
    pub attempt: Attempt,
    /// The refused request was the status itself.
    pub of_status: bool,
    /// The refused request was for the content of the release.
    pub of_reading: bool,
    /// The conditions show it. False while it may be a short outage.
    pub shown: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    AddFinalizer,
    CreateWorkspace,
    /// Read and decode a revision: its labels alone do not settle the matter.
    ReadRelease(u32),
    /// Mark a revision that a dead helm left as failed.
    Unlock {
        revision: u32,
        was: String,
    },
    Helm(Run),
    /// Repeats an installation that left its traces, hooks included.
    InstallAgain,
    /// Remove what a failed revision has made and the deployed one does not have.
    Sweep(u32),
    /// Remove what the original has put into `default` of a revision that ours has replaced.
    SweepDefault(u32),
    /// Put a revision back whose upgrade is given up.
    Rollback(u32),
    Uninstall,
    /// Put the original's fingerprint annotation on the Tenant.
    Annotate,
    DeleteWorkspace,
    /// Of a deployment, which has none: let go of it.
    RemoveFinalizer {
        orphaned: bool,
    },
}

impl Action {
    /// All that [`Self::name`] may say.
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

    /// For metrics. Where nothing is to be done, there is something to be said.
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

    /// What has `failed` before goes behind what is tried for the first time.
    pub fn urgency(&self, failed: bool) -> Priority {
        match self {
            Self::Helm(Run::Install) | Self::InstallAgain | Self::Uninstall if !failed => {
                Priority::High
            }
            _ => Priority::Low,
        }
    }
}

/// The next action, and what is to be said meanwhile.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub action: Action,
    /// The Tenant's conditions on this member.
    pub state: ClusterState,
    /// What the release now is, when it is as desired.
    pub applied_chart: Option<String>,
    /// Look again at this time, though nothing has happened.
    pub wake: Option<BootTime>,
    /// What is told of what comes next.
    pub next: Option<Coming>,
    /// Whether the Tenant counts as one of this member's.
    pub ours: bool,
    /// Home's order to remove is carried out.
    pub gone: bool,
    /// The release is as desired, and nothing is to be done but to wait for it, or to write about it.
    pub settled: bool,
    /// It may be looked at for drift, in this way.
    pub drift: Option<Wanted>,
}

/// What is done without anybody's doing, as `Next` of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coming {
    pub step: Step,
    pub at: Option<BootTime>,
    /// Those that have failed, in a row.
    pub attempts: u32,
}

impl Coming {
    /// By the wall clock, where `now` is the same moment as `wall`.
    pub fn on_the_wall(self, now: BootTime, wall: Timestamp) -> Next {
        let on_the_wall = |at: BootTime| wall.checked_add(at.since(now)).unwrap_or(wall);
        let at = self.at.map(on_the_wall);
        Next::new(self.step, at, self.attempts)
    }

    /// Another attempt after the one that has failed. Of what is over any moment, each attempt would be a write that
    /// tells nobody more.
    fn retry(failure: &Failure) -> Option<Self> {
        let soon = [reason::HELM_UNAVAILABLE, reason::SUSPENDED];
        (!soon.contains(&failure.reason)).then_some(Self {
            step: Step::Retry,
            at: Some(failure.retry_at),
            attempts: failure.attempts,
        })
    }
}

/// Decides. The same view gives the same plan.
pub fn plan(view: &View<'_>) -> Plan {
    let plan = decide(view);
    let refusal = view.memory.refusal.as_ref();
    match refusal.filter(|refusal| refusal.holds(view, &plan)) {
        Some(refusal) => refused(view, plan, refusal),
        None => plan,
    }
}

impl Refusal {
    /// Whether it replaces this plan, which the API server would refuse as well.
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

/// The plan while the API server refuses. Running workloads are not touched, so the release stays Ready.
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
    // It is a reading that is refused.
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
    // Its release, if it has one, stays as it is.
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

/// The operator of the workspace has opened it to the owner.
fn is_open_to(workspace: &Workspace, owner: &ReleaseOwner) -> bool {
    let open_to = workspace.open_to.as_deref();
    open_to.and_then(|open_to| open_to.split_once('/')) == Some((owner.namespace(), owner.name()))
}

/// Whether lockdown lets the owner use the workspace of its release: its own namespace, one that was created for
/// it, and one that the operator has opened to it.
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
    // The Tenant was restored since, under another UID. Only who may write there can label a release.
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

/// Whose the release is, as far as this Tenant or deployment is concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Ownership {
    /// It does not exist, and may be made.
    Free,
    Mine,
    /// Its newest revision has to be read before that can be said.
    Unread,
    /// Somebody else's: who, and what to do.
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
            // Home's finalizer holds it until we have said that it is gone.
            ReleaseOwner::Deployment(order) => self.memory.let_go.as_deref() != Some(&order.uid),
        }
    }

    fn newest(&self) -> Option<&Revision> {
        self.revisions.last().copied()
    }

    fn paused(&self) -> Option<&'static str> {
        paused(self.owner, self.desired)
    }

    /// The fingerprint annotation that is on the Tenant.
    fn original_fingerprint(&self) -> Option<&str> {
        self.owner
            .annotation(&names::fingerprint_annotation(self.cluster))
    }

    /// The operator of the workspace has opened it to this object.
    fn is_let_in(&self) -> bool {
        self.workspace
            .is_some_and(|workspace| is_open_to(workspace, self.owner))
    }

    /// Whether the owner, or another claimant of its release, may use the workspace.
    fn may_use_workspace(&self, owner: &ReleaseOwner) -> bool {
        let lockdown = self.desired.lockdown.no_cross_namespace_refs;
        !lockdown || may_use(owner, self.release_key, self.workspace, self.newest())
    }

    /// Whose the release is. One release has one owner, and Krypton takes over no release of others.
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
            // The original's CRD of G3 has no workspace: what is written under it loses that.
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

    /// What was read of the revision.
    fn read(&self, revision: &Revision) -> Option<&Release> {
        self.facts
            .filter(|facts| facts.revision == revision.revision)
    }

    /// By its name, whichever version.
    fn is_of_our_chart(&self, facts: &Release) -> bool {
        facts.chart_name == self.chart.name.rsplit('/').next().unwrap_or_default()
    }

    fn said(&self) -> Option<ClusterState> {
        self.memory.last_word(self.owner, self.cluster)
    }

    /// The last failure, while nothing has changed since that could help.
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
