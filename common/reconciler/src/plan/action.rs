//! Second step of a plan: chooses the action for a state.

use krypton_helm::releases::Status;
use krypton_helm::slots::priority::Priority;
use krypton_types::conditions::reason;

use super::memory::{Failure, Run, is_before_helm};
use super::readiness;
use super::state::ReleaseState;
use super::view::View;

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
        status: Status,
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
        "status",
        "add_finalizer",
        "create_workspace",
        "read_release",
        "unlock",
        "install",
        "upgrade",
        "reinstall",
        "sweep",
        "sweep_default",
        "rollback",
        "uninstall",
        "annotate",
        "delete_workspace",
        "remove_finalizer",
    ];

    /// Returns the action's name in metrics. `Nothing` is `status`, because Krypton may still report the state.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Nothing => "status",
            Self::AddFinalizer => "add_finalizer",
            Self::CreateWorkspace => "create_workspace",
            Self::ReadRelease(_) => "read_release",
            Self::Unlock { .. } => "unlock",
            Self::Helm(Run::Install) => "install",
            Self::Helm(Run::Upgrade) => "upgrade",
            Self::InstallAgain => "reinstall",
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
    pub fn priority(&self, failed: bool) -> Priority {
        match self {
            Self::Helm(Run::Install) | Self::InstallAgain | Self::Uninstall if !failed => {
                Priority::High
            }
            _ => Priority::Low,
        }
    }
}

/// Chooses the action for a state.
pub(super) fn action(state: &ReleaseState<'_>, view: &View<'_>) -> Action {
    use ReleaseState::*;
    match state {
        NoFinalizer { .. } => Action::AddFinalizer,
        NoWorkspace => Action::CreateWorkspace,
        Absent | Unrecorded | OutOfDate | Failed | Uninstalled => Action::Helm(view.run()),
        FailedInstall => Action::InstallAgain,
        Unread(revision) | RemovalUnread(revision) => Action::ReadRelease(*revision),
        Superseded(newest) | StaleLock(newest) => Action::Unlock {
            revision: newest.revision,
            status: newest.status,
        },
        RollbackDue { to, .. } => Action::Rollback(*to),
        Unannotated(_) => Action::Annotate,
        // The sweep can wait, and does not affect the conditions of the release.
        Leftovers(revision, _) if view.hold().is_none() => Action::Sweep(*revision),
        LeftInDefault(revision, _) => Action::SweepDefault(*revision),
        Installed => Action::Uninstall,
        UnusedWorkspace { terminating: false } => Action::DeleteWorkspace,
        Removed => Action::RemoveFinalizer { orphaned: false },
        Orphaned => Action::RemoveFinalizer { orphaned: true },
        Held(_) => read_action(readiness::unread_revision(view)),
        BackingOff(failure) => read_while_failing(failure.reason, view),
        ValuesNotAllowed => read_while_failing(reason::VALUES_NOT_ALLOWED, view),
        ValuesTooLarge { .. } => read_while_failing(reason::VALUES_TOO_LARGE, view),
        // The other states need nothing, wait, or need a user.
        _ => Action::Nothing,
    }
}

pub(super) fn read_action(revision: Option<u32>) -> Action {
    revision.map_or(Action::Nothing, Action::ReadRelease)
}

/// Returns the read of the running release while attempts fail for this reason before Helm starts.
fn read_while_failing(reason: &str, view: &View<'_>) -> Action {
    let backs_off = |failure: &Failure| failure.reason != reason && view.now < failure.retry_at;
    // The read itself may fail.
    let may_read = is_before_helm(reason)
        && reason != reason::HELM_UNAVAILABLE
        && !view.failure().is_some_and(backs_off);
    read_action(readiness::unread_running_revision(view).filter(|_| may_read))
}
