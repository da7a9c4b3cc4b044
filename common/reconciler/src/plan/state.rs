//! First step of a plan: names the situation of a release.

use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{ORIGINALS_NAMESPACE, Status};
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::handling::{Handling, Remediation, WaitPolicy};
use krypton_types::{fingerprint, names, values};

use super::memory::{Failure, Run};
use super::ownership::{Ownership, may_use_workspace, ownership};
use super::revisions::{
    has_copied_run, is_failed_install, is_marked_as_rollback, is_own_run, last_good,
    unswept_attempt, upgraded_adoption,
};
use super::view::{Hold, Permit, View};
use crate::owner::ReleaseOwner;
use crate::status::throttle::QUIET;

/// The situation of a release. The rows of `docs/explanation/repair.md` are the states that the newest revision determines.
#[derive(Debug)]
pub(super) enum ReleaseState<'a> {
    // Another member manages the release, or no member.
    OtherMember,
    /// This member does not allow its name in the owner's namespace.
    NamespaceNotAllowed(State),

    // Krypton must not install the release. An existing release stays unchanged.
    WorkspaceInvalid,
    /// The workspace belongs to Kubernetes or Krypton.
    WorkspaceProtected(&'static str),
    /// Lockdown forbids the workspace to the owner.
    WorkspaceForbidden,
    ValuesNotAllowed,
    ValuesTooLarge {
        subject: &'static str,
        size: usize,
        limit: usize,
    },
    /// The release belongs to another owner, which the message names.
    Foreign(String),

    // The objects around the release are not ready.
    NoFinalizer {
        outdated: bool,
    },
    NoWorkspace,
    /// The watch has not shown the namespace of an existing release yet.
    WorkspaceUnseen {
        outdated: bool,
    },
    WorkspaceTerminating,

    // States by the newest revision.
    Absent,
    /// The labels of this deployed revision are not sufficient for a decision.
    Unread(u32),
    /// Krypton deployed the revision, but has no record of it.
    Unrecorded,
    OutOfDate,
    /// The first installation failed.
    FailedInstall,
    Failed,
    Uninstalled,
    Superseded(&'a Revision),
    /// The Helm process that locked the release is dead.
    StaleLock(&'a Revision),
    /// Another client's Helm process may still run.
    Locked {
        newest: &'a Revision,
        until: BootTime,
    },
    /// A newer version of Helm set the status of this revision.
    Unknown(u32),

    // The newest revision is as desired.
    /// The Tenant lacks the Go operator's fingerprint annotation.
    Unannotated(Rollout<'a>),
    /// This failed revision may have left objects.
    Leftovers(u32, Rollout<'a>),
    /// The Go operator's objects of this revision are still in `default`.
    LeftInDefault(u32, Rollout<'a>),
    InSync(Rollout<'a>),

    // An action is due, but Krypton does not run it now.
    BackingOff(&'a Failure),
    GivenUp(&'a Failure),
    /// Krypton has given up the upgrade, and rolls back to this revision.
    RollbackDue {
        failure: &'a Failure,
        to: u32,
    },
    Held(Hold<'a>),

    // A removal is due.
    /// Only the finalizers of other controllers are left.
    AwaitsFinalizers,
    Orphaned,
    RemovalHeld(&'a str),
    RemovalUnread(u32),
    RemovalFailed(&'a Failure),
    Installed,
    /// Krypton created the workspace, and no other owner uses it.
    UnusedWorkspace {
        terminating: bool,
    },
    /// Only the finalizer is left.
    Removed,
    /// The removal is complete. `foreign` names the owner of a release that belongs to another one.
    Gone {
        orphaned: bool,
        foreign: Option<String>,
        /// The whole member leaves the fleet.
        retired: bool,
    },
}

/// Readiness of the workloads of a release that is as desired.
#[derive(Debug)]
pub(super) enum Rollout<'a> {
    /// All workloads are ready, or the owner does not wait for them.
    Complete,
    /// Workloads were ready before.
    Lost(&'a str),
    Waiting {
        run: Run,
        detail: &'a str,
        /// Set while the conditions do not show the detail yet.
        quiet_until: Option<BootTime>,
        deadline: BootTime,
    },
    TimedOut {
        run: Run,
        detail: &'a str,
    },
}

impl<'a> ReleaseState<'a> {
    /// Returns the rollout if the release is as desired.
    pub(super) fn rollout(&self) -> Option<&Rollout<'a>> {
        match self {
            Self::Unannotated(rollout)
            | Self::Leftovers(_, rollout)
            | Self::LeftInDefault(_, rollout)
            | Self::InSync(rollout) => Some(rollout),
            _ => None,
        }
    }

    /// Whether an action follows as soon as another client or Kubernetes has finished.
    pub(super) fn waits_for_others(&self) -> bool {
        matches!(
            self,
            Self::Locked { .. }
                | Self::WorkspaceTerminating
                | Self::WorkspaceUnseen { .. }
                | Self::UnusedWorkspace { terminating: true }
        )
    }

    fn unlocks(&self) -> bool {
        matches!(self, Self::Superseded(_) | Self::StaleLock(_))
    }

    /// Whether the action waits for the back-off of a failed attempt.
    fn is_attempted(&self) -> bool {
        self.unlocks()
            || matches!(
                self,
                Self::NoWorkspace
                    | Self::Absent
                    | Self::Unread(_)
                    | Self::Unrecorded
                    | Self::OutOfDate
                    | Self::FailedInstall
                    | Self::Failed
                    | Self::Uninstalled
            )
    }

    /// Whether the action waits for the permit and for the end of a pause. A read changes nothing on the member.
    fn is_held(&self) -> bool {
        match self {
            Self::Unread(_) => false,
            Self::NoFinalizer { .. } | Self::RollbackDue { .. } | Self::Unannotated(_) => true,
            _ => self.is_attempted(),
        }
    }
}

/// Names the situation of the owner's release.
pub(super) fn release_state<'a>(view: &'a View<'a>) -> ReleaseState<'a> {
    let owner = view.owner;
    let is_here = owner.is_for(view.cluster, view.source_namespace);
    let must_clean_up = owner.is_being_removed() && view.has_finalizer();
    if !is_here && !must_clean_up {
        return ReleaseState::OtherMember;
    }
    if owner.is_being_removed() {
        return deleted(view);
    }
    if view.desired.retire {
        return retired(view);
    }
    let refusal = view.allowed.refusal(view.cluster, owner.namespace());
    if let Some(refusal) = refusal.filter(|_| owner.named_member().is_some()) {
        return ReleaseState::NamespaceNotAllowed(refusal);
    }
    let state = install_refusal(view).unwrap_or_else(|| present(view));
    match view.hold() {
        Some(hold) if state.is_held() => ReleaseState::Held(hold),
        _ => state,
    }
}

/// Returns the state of a deleted Tenant, or of a deployment whose removal the hub orders.
fn deleted<'a>(view: &'a View<'a>) -> ReleaseState<'a> {
    let ownership = ownership(view);
    let is_ours = matches!(ownership, Ownership::Mine | Ownership::Unread(_));
    match view.owner {
        _ if view.has_finalizer() => removal(view, &ownership),
        ReleaseOwner::Tenant(_) => ReleaseState::AwaitsFinalizers,
        ReleaseOwner::Deployment(order) if is_ours && !order.orphan => removal(view, &ownership),
        ReleaseOwner::Deployment(order) => ReleaseState::Gone {
            orphaned: order.orphan,
            foreign: ownership.into_foreign(),
            retired: false,
        },
    }
}

/// Returns the state on a member that leaves the fleet with its releases. The Tenant stays, but Krypton no longer
/// manages it, and does not check a kept workspace again after it has removed the finalizer.
fn retired<'a>(view: &'a View<'a>) -> ReleaseState<'a> {
    let ownership = ownership(view);
    let state = removal(view, &ownership);
    let orphaned = match state {
        _ if view.has_finalizer() => return state,
        ReleaseState::Orphaned => true,
        ReleaseState::Removed | ReleaseState::UnusedWorkspace { terminating: false } => false,
        _ => return state,
    };
    ReleaseState::Gone {
        orphaned,
        foreign: ownership.into_foreign(),
        retired: true,
    }
}

fn removal<'a>(view: &'a View<'a>, ownership: &Ownership) -> ReleaseState<'a> {
    if view.owner.annotation(names::ORPHAN_ANNOTATION) == Some("true") {
        return ReleaseState::Orphaned;
    }
    if let Some(hold) = view.hold() {
        return ReleaseState::RemovalHeld(hold.message);
    }
    match ownership {
        Ownership::Unread(revision) => return ReleaseState::RemovalUnread(*revision),
        Ownership::Mine => {
            let failure = view.failure();
            let failure = failure.filter(|failure| view.now < failure.retry_at);
            return failure.map_or(ReleaseState::Installed, ReleaseState::RemovalFailed);
        }
        Ownership::Free | Ownership::Theirs(_) => {}
    }
    match view.workspace {
        Some(workspace)
            if workspace.creator.is_some()
                && may_use_workspace(view, view.owner)
                && view.release_key.namespace != "default"
                && !view.workspace_shared
                && *ownership == Ownership::Free =>
        {
            ReleaseState::UnusedWorkspace {
                terminating: workspace.terminating,
            }
        }
        _ => ReleaseState::Removed,
    }
}

/// Returns the state if Krypton must not install the release. A Helm run cannot fix that. Without the values, Krypton
/// would install another release than the user requested.
fn install_refusal<'a>(view: &View<'_>) -> Option<ReleaseState<'a>> {
    let workspace = &view.release_key.namespace;
    if !names::is_dns_label(workspace) {
        return Some(ReleaseState::WorkspaceInvalid);
    }
    if workspace.starts_with("kube-") {
        return Some(ReleaseState::WorkspaceProtected("Kubernetes"));
    }
    if workspace == "krypton-system" || view.policy.protected_namespaces.contains(workspace) {
        return Some(ReleaseState::WorkspaceProtected("Krypton"));
    }
    if !may_use_workspace(view, view.owner) {
        return Some(ReleaseState::WorkspaceForbidden);
    }
    let own_values = view
        .owner
        .values()
        .filter(|own_values| !own_values.is_empty())?;
    if !view.desired.tenant_values {
        return Some(ReleaseState::ValuesNotAllowed);
    }
    let limits = [
        ("spec.values are", own_values, values::TENANT_MAX_BYTES),
        (
            "with spec.values, all values are",
            &view.chart.values,
            values::MAX_BYTES,
        ),
    ];
    limits.into_iter().find_map(|(subject, values, limit)| {
        let size = values::size(values);
        (size > limit).then_some(ReleaseState::ValuesTooLarge {
            subject,
            size,
            limit,
        })
    })
}

/// Returns the state of a release without a due removal, before the hold.
fn present<'a>(view: &'a View<'a>) -> ReleaseState<'a> {
    let state = match ownership(view) {
        Ownership::Theirs(message) => return ReleaseState::Foreign(message),
        Ownership::Unread(revision) => ReleaseState::Unread(revision),
        Ownership::Free | Ownership::Mine => installed(view),
    };
    let Some(failure) = view.failure().filter(|_| state.is_attempted()) else {
        return state;
    };
    let backs_off = view.now < failure.retry_at;
    let handling = view.policy.handling(&view.desired.handling);
    // Giving up does not stop an unlock, because all other actions depend on it.
    if !state.unlocks() && is_given_up(&handling, failure) {
        return match rollback_target(&handling, view.revisions) {
            Some(_) if backs_off && failure.reason == reason::ROLLBACK_FAILED => {
                ReleaseState::BackingOff(failure)
            }
            Some(to) => ReleaseState::RollbackDue { failure, to },
            None => ReleaseState::GivenUp(failure),
        };
    }
    match backs_off {
        true => ReleaseState::BackingOff(failure),
        false => state,
    }
}

/// Whether Krypton has given up. Only a change of the chart, the values or the Tenant, or a user's request, starts
/// another attempt.
fn is_given_up(handling: &Handling, failure: &Failure) -> bool {
    let retries = handling.retries;
    let has_no_retries_left = retries.is_some_and(|retries| failure.attempts > retries);
    let rolls_back = handling.remediation == Remediation::Rollback;
    match failure.reason {
        reason::ROLLBACK_FAILED => true,
        reason::INSTALL_FAILED => has_no_retries_left,
        reason::UPGRADE_FAILED => has_no_retries_left || (rolls_back && failure.permanent),
        _ => false,
    }
}

fn rollback_target(handling: &Handling, revisions: &[&Revision]) -> Option<u32> {
    let has_failed = revisions
        .last()
        .is_some_and(|newest| newest.status == Status::Failed);
    let may_roll_back = has_failed && handling.remediation == Remediation::Rollback;
    last_good(revisions)
        .filter(|_| may_roll_back)
        .map(|good| good.revision)
}

/// Returns the state of this owner's release by its newest revision, its workspace and its finalizer.
fn installed<'a>(view: &'a View<'a>) -> ReleaseState<'a> {
    let newest = view.newest();
    let currency = newest.map_or(Currency::Outdated, |newest| currency(view, newest));
    let outdated = currency == Currency::Outdated;
    if view.owner.tenant().is_some() && !view.has_finalizer() {
        return ReleaseState::NoFinalizer { outdated };
    }
    match view.workspace {
        None if newest.is_none() => return ReleaseState::NoWorkspace,
        None => return ReleaseState::WorkspaceUnseen { outdated },
        Some(workspace) if workspace.terminating => return ReleaseState::WorkspaceTerminating,
        Some(_) => {}
    }
    let Some(newest) = newest else {
        return ReleaseState::Absent;
    };
    match newest.status {
        Status::Deployed if outdated => ReleaseState::OutOfDate,
        Status::Deployed => deployed(view, newest),
        Status::Failed if is_failed_install(view.revisions, newest) => ReleaseState::FailedInstall,
        Status::Failed => ReleaseState::Failed,
        Status::Uninstalled => ReleaseState::Uninstalled,
        Status::Superseded => ReleaseState::Superseded(newest),
        Status::PendingInstall
        | Status::PendingUpgrade
        | Status::PendingRollback
        | Status::Uninstalling => locked(view, newest),
        Status::Unknown => ReleaseState::Unknown(newest.revision),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Currency {
    Current,
    Outdated,
    /// The labels are not sufficient: Krypton must read the revision.
    Unread,
}

/// Whether the newest revision is as desired. Krypton's label takes precedence. Without it, the Go operator's
/// annotation counts if chart name and version agree.
fn currency(view: &View<'_>, newest: &Revision) -> Currency {
    let currency_if = |is_current: bool| match is_current {
        true => Currency::Current,
        false => Currency::Outdated,
    };
    if let Some(label) = &newest.fingerprint {
        return currency_if(label == view.fingerprint && !has_copied_run(view.revisions, newest));
    }
    let chart = view.chart;
    let is_adoptable = match view.owner {
        ReleaseOwner::Tenant(_) => view
            .original_fingerprint()
            .is_some_and(|value| chart.is_original_fingerprint(value)),
        // The Go operator left no mark, and set these values for every chart.
        ReleaseOwner::Deployment(_) => {
            let values = &chart.values;
            values.is_empty()
                || (values.len() == 1 && values.get("replicaCount") == Some(&1.into()))
        }
    };
    match view.decoded(newest) {
        _ if !is_adoptable => Currency::Outdated,
        None => Currency::Unread,
        Some(release) => {
            let without_v = |version: &str| version.trim_start_matches('v').to_owned();
            let has_version = chart.version.is_empty()
                || without_v(&release.chart_version) == without_v(&chart.version);
            currency_if(has_version && view.has_desired_chart(release))
        }
    }
}

/// Returns the state of a deployed revision that is as desired, as far as its labels show. Its manifest lists the
/// workloads that must be ready, and a new process has not read it yet.
///
/// Helm must render a revision without a record again: Krypton does not heal from it, and an uninstallation would skip
/// its hooks.
fn deployed<'a>(view: &'a View<'a>, newest: &Revision) -> ReleaseState<'a> {
    let unread = ReleaseState::Unread(newest.revision);
    if view.decoded(newest).is_none() || view.memory.to_reread == Some(newest.revision) {
        return unread;
    }
    let is_own_run = is_own_run(view.revisions, newest);
    match view.memory.unrecorded {
        Some((revision, read_with_permit))
            if revision == newest.revision && is_own_run && view.permit == Permit::Granted =>
        {
            match read_with_permit {
                true => ReleaseState::Unrecorded,
                false => unread,
            }
        }
        _ => settled(view, newest),
    }
}

/// Returns the state of a release that is as desired: its rollout, the Go operator's annotation, and leftovers.
fn settled<'a>(view: &'a View<'a>, newest: &Revision) -> ReleaseState<'a> {
    let rollout = rollout(view, newest);
    let chart = view.chart;
    let original = fingerprint::original(&chart.repo, &chart.name, &chart.version);
    if view.owner.tenant().is_some() && view.original_fingerprint() != Some(&original) {
        return ReleaseState::Unannotated(rollout);
    }
    if let Some(revision) = unswept_attempt(view.revisions) {
        return ReleaseState::Leftovers(revision, rollout);
    }
    // The Go operator's objects may serve until the release is ready in its workspace.
    let may_sweep = view.hold().is_none()
        && view.release_key.namespace != ORIGINALS_NAMESPACE
        && matches!(rollout, Rollout::Complete);
    match upgraded_adoption(view.revisions).filter(|_| may_sweep) {
        Some(revision) => ReleaseState::LeftInDefault(revision, rollout),
        None => ReleaseState::InSync(rollout),
    }
}

fn rollout<'a>(view: &View<'a>, newest: &Revision) -> Rollout<'a> {
    let detail = match (view.desired.handling.wait, view.unready) {
        (WaitPolicy::Ready, Some(detail)) => detail,
        _ => return Rollout::Complete,
    };
    let was_ready = |ready: State| ready.truth == Truth::True || ready.reason == reason::NOT_READY;
    if view
        .reported_state()
        .is_some_and(|state| was_ready(state.ready))
    {
        return Rollout::Lost(detail);
    }
    let memory = view.memory;
    let run = match &memory.applied {
        Some(applied) => applied.run,
        None if newest.revision == 1 => Run::Install,
        None => Run::Upgrade,
    };
    // After a restart, the time starts again. A longer wait is the safe choice.
    let ended = memory.applied.as_ref().map(|applied| applied.ended);
    let started = ended.or(memory.known_since).unwrap_or(view.now);
    let deadline = started + view.policy.helm_timeout;
    // Keep the first message for a while. Most releases become ready before a user reads another one, and each message
    // costs a status write.
    let quiet_until = started + QUIET;
    match view.now < deadline {
        true => Rollout::Waiting {
            run,
            detail,
            quiet_until: (view.now < quiet_until).then_some(quiet_until),
            deadline,
        },
        false => Rollout::TimedOut { run, detail },
    }
}

/// Returns the state of a locked release. The lock of a dead run of Krypton is stale immediately, because the permit
/// excludes another live run. Any other lock is stale after a grace period. An uninstallation leaves no run mark.
fn locked<'a>(view: &View<'_>, newest: &'a Revision) -> ReleaseState<'a> {
    let is_ours =
        is_own_run(view.revisions, newest) || is_marked_as_rollback(view.revisions, newest);
    let since = match view.memory.locked {
        Some((revision, since)) if revision == newest.revision => since,
        _ => view.now,
    };
    let grace = view.policy.foreign_lock_grace;
    if (is_ours && newest.status.is_pending()) || view.now.since(since) >= grace {
        return ReleaseState::StaleLock(newest);
    }
    ReleaseState::Locked {
        newest,
        until: since + grace,
    }
}
