//! Third step of a plan: the conditions to report for a state.

use krypton_helm::releases::Status;
use krypton_helm::releases::revision::Revision;
use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::names;
use krypton_types::placed_tenant::placed_on;

use super::action::Run;
use super::memory::Failure;
use super::readiness::{followed, kept, with_note};
use super::state::{ReleaseState, Rollout};
use super::view::{Hold, View};
use crate::owner::ReleaseOwner;

pub(super) const INSTALLING: &str = "installing release";
pub(super) const UPGRADING: &str = "upgrading release";
const VALUES_NOT_ALLOWED: &str =
    "Tenant values are disabled; remove spec.values, or start the hub with --tenant-values";

/// Returns the conditions to report for a state.
pub(super) fn conditions(is: &ReleaseState<'_>, view: &View<'_>) -> ClusterState {
    use ReleaseState::*;
    let (owner, namespace, name) = (
        view.owner,
        &view.release_key.namespace,
        &view.release_key.name,
    );
    let said = || view.said();
    let after = |why, message: &str| after_failure(why, message, view);
    match is {
        OtherMember => ClusterState::from(other_member(owner, view.cluster)),
        NamespaceNotAllowed(ready) => ClusterState::from(ready.clone()),

        WorkspaceInvalid => failed(reason::WORKSPACE_INVALID, &invalid(owner, namespace)),
        WorkspaceProtected(of) => failed(
            reason::NAMESPACE_NOT_OWNED,
            &protected(owner, namespace, of),
        ),
        WorkspaceForbidden => after(reason::NAMESPACE_NOT_OWNED, &forbidden(owner, namespace)),
        ValuesNotAllowed => after(reason::VALUES_NOT_ALLOWED, VALUES_NOT_ALLOWED),
        ValuesTooLarge { what, size, most } => after(
            reason::VALUES_TOO_LARGE,
            &format!("{what} {size} bytes as JSON, more than {most}: shorten spec.values"),
        ),
        Foreign(message) => failed(reason::RELEASE_IN_USE, message),

        NoFinalizer { outdated: false } | WorkspaceUnseen { outdated: false } | Unread(_) => {
            unchanged(said())
        }
        NoFinalizer { outdated: true }
        | WorkspaceUnseen { outdated: true }
        | NoWorkspace
        | Absent
        | Unrecorded
        | OutOfDate
        | Failed
        | Uninstalled
        | Superseded(_)
        | StaleLock(_) => announced(view.run(), said()),
        FailedInstall => announced(Run::Install, said()),
        WorkspaceTerminating => failed(
            reason::WORKSPACE_TERMINATING,
            &format!("namespace {namespace} is being deleted; waiting until it is gone"),
        ),
        Locked { newest, .. } => {
            let message = format!(
                "release {name} is {}: another Helm process is running; Krypton takes over after {} s",
                newest.status,
                view.policy.foreign_lock_grace.as_secs()
            );
            ClusterState {
                progress: Some(State::new(Truth::True, reason::LOCKED, message)),
                ..announced(view.run(), said())
            }
        }
        Unknown(revision) => {
            let message = format!(
                "revision {revision} of release {name} has an unknown status; check it with helm history"
            );
            failed(reason::LOCKED, &message)
        }

        Unannotated(rollout)
        | Leftovers(_, rollout)
        | LeftInDefault(_, rollout)
        | InSync(rollout) => settled(rollout, view),

        BackingOff(failure) | RollbackDue { failure, .. } => {
            after(failure.reason, &failure.message)
        }
        GivenUp(failure) => after(failure.reason, &given_up(owner, failure)),
        Held(hold) => held(*hold, view),

        AwaitsFinalizers => deleting("waiting for other finalizers"),
        Orphaned => deleting(&format!(
            "orphaned: release {name} stays in namespace {namespace}"
        )),
        RemovalHeld(why) => deleting(&format!("deletion waits: {why}")),
        RemovalFailed(failure) if failure.reason == reason::SUSPENDED => {
            deleting(&format!("deletion waits: {}", failure.message))
        }
        RemovalFailed(failure) => ClusterState {
            error: Some(State::new(
                Truth::True,
                failure.reason,
                failure.message.clone(),
            )),
            ..cleanup(owner)
        },
        UnusedWorkspace { .. } => deleting(&format!("deleting namespace {namespace}")),
        RemovalUnread(_) | Installed | Removed => cleanup(owner),
        Gone {
            orphaned,
            foreign,
            retired,
        } => gone(owner, *orphaned, foreign.as_deref(), *retired),
    }
}

fn other_member(owner: &ReleaseOwner, cluster: &str) -> State {
    let placed = owner.tenant().and_then(|tenant| placed_on(tenant));
    let named = match placed {
        Some(member) => format!("it is placed on {member}"),
        None => format!(
            "clusterRef names {}",
            owner.names_member().unwrap_or_default()
        ),
    };
    let message = format!("{named}; this is {cluster}, which leaves the Tenant alone");
    State::new(Truth::False, reason::NOT_THIS_CLUSTER, message)
}

fn invalid(owner: &ReleaseOwner, workspace: &str) -> String {
    format!(
        "{workspace:?} cannot be a namespace (a DNS label of at most 63 characters); {}",
        another_workspace(owner, "set spec.workspace")
    )
}

fn protected(owner: &ReleaseOwner, workspace: &str, of: &str) -> String {
    let remedy = "delete the Tenant, and create it again with another spec.workspace";
    format!(
        "namespace {workspace} belongs to {of} and is never a workspace; {}",
        another_workspace(owner, remedy)
    )
}

fn forbidden(owner: &ReleaseOwner, workspace: &str) -> String {
    let of = owner.namespace();
    format!(
        "namespace {workspace} is neither {of}, where this {} is, nor was it made for it; {}, or have an operator of \
         the cluster annotate the namespace with {}={of}/{}",
        owner.kind(),
        another_workspace(owner, "create the Tenant again with another spec.workspace"),
        names::ADOPT_ANNOTATION,
        owner.name(),
    )
}

/// Returns the fix for an unusable workspace. A KryptonDeployment's name determines its workspace.
fn another_workspace(owner: &ReleaseOwner, of_tenant: &'static str) -> &'static str {
    match owner {
        ReleaseOwner::Tenant(_) => of_tenant,
        ReleaseOwner::Deployment(_) => "create the KryptonDeployment again under another name",
    }
}

fn given_up(owner: &ReleaseOwner, failure: &Failure) -> String {
    format!(
        "{}; given up after {} attempts, until chart, values or {} change or annotation {} is set",
        failure.message,
        failure.attempts,
        owner.kind(),
        names::RECONCILE_REQUESTED_ANNOTATION
    )
}

/// Reports that an action waits for a permit or for the end of a pause. The readiness of the deployed revision is still
/// updated.
fn held(hold: Hold<'_>, view: &View<'_>) -> ClusterState {
    let unseen = || {
        ClusterState::from(State::new(
            Truth::Unknown,
            hold.reason,
            "not reconciled yet",
        ))
    };
    let said = view.said().unwrap_or_else(unseen);
    ClusterState {
        ready: followed(view, said.ready),
        progress: Some(State::new(Truth::False, hold.reason, hold.message)),
        error: said.error,
    }
}

/// Reports a failed attempt. If Krypton could not fetch the chart or start Helm, the running release keeps its
/// readiness.
fn after_failure(why: &str, message: &str, view: &View<'_>) -> ClusterState {
    if why == reason::SUSPENDED {
        return ClusterState {
            ready: State::new(Truth::Unknown, why, message),
            progress: Some(State::new(Truth::False, why, message)),
            error: Some(no_error()),
        };
    }
    let is_deployed = |revision: &&&Revision| revision.status == Status::Deployed;
    let Some(running) = view.revisions.iter().rev().find(is_deployed) else {
        return failed(why, message);
    };
    let message = format!("{message} (revision {} keeps running)", running.revision);
    let mut after = failed(why, &message);
    if is_before_helm(why)
        && let Some(ready) = kept(view)
    {
        after.ready = ready;
    }
    after
}

/// Whether an attempt failed before Helm started.
pub(super) fn is_before_helm(why: &str) -> bool {
    [
        reason::CHART_NOT_LOADED,
        reason::VERSION_NOT_FOUND,
        reason::VERSION_INVALID,
        reason::HELM_UNAVAILABLE,
        reason::VALUES_NOT_ALLOWED,
        reason::VALUES_TOO_LARGE,
    ]
    .contains(&why)
}

/// Nothing changes, so the last reported state stays.
fn unchanged(said: Option<ClusterState>) -> ClusterState {
    let unseen = || {
        ClusterState::from(State::new(
            Truth::Unknown,
            reason::NO_CHANGE,
            "looking at the release",
        ))
    };
    said.unwrap_or_else(unseen)
}

/// Announces a run. An error stays until an attempt succeeds.
fn announced(run: Run, said: Option<ClusterState>) -> ClusterState {
    let (why, message) = announcement(run);
    in_progress(why, message, said.and_then(|said| said.error))
}

fn announcement(run: Run) -> (&'static str, &'static str) {
    match run {
        Run::Install => (reason::INSTALLING, INSTALLING),
        Run::Upgrade => (reason::UPGRADING, UPGRADING),
    }
}

fn in_progress(why: &str, message: &str, error: Option<State>) -> ClusterState {
    let lasts = |why: &str| {
        [
            reason::INSTALL_FAILED,
            reason::UPGRADE_FAILED,
            reason::ROLLBACK_FAILED,
            reason::CHART_NOT_LOADED,
            reason::VERSION_NOT_FOUND,
            reason::VERSION_INVALID,
            reason::HELM_UNAVAILABLE,
        ]
        .contains(&why)
    };
    let error = error.filter(|error| error.truth == Truth::True && lasts(&error.reason));
    ClusterState {
        ready: State::new(Truth::False, why, message),
        progress: Some(State::new(Truth::True, why, message)),
        error: Some(error.unwrap_or_else(no_error)),
    }
}

/// Reports the rollout of a release that is as desired.
fn settled(rollout: &Rollout<'_>, view: &View<'_>) -> ClusterState {
    let said = view.said();
    match *rollout {
        Rollout::Complete => {
            let finished = view.memory.applied.as_ref().map(|applied| applied.run);
            let mut settled = ready(said, finished);
            let wait = view.desired.handling.wait;
            settled.ready.message = with_note(&settled.ready.message, wait, view.unready);
            settled
        }
        Rollout::Lost(detail) => ClusterState {
            ready: State::new(Truth::False, reason::NOT_READY, detail),
            progress: said.and_then(|said| said.progress),
            error: Some(no_error()),
        },
        Rollout::Waiting {
            run,
            detail,
            quiet_until,
            ..
        } => {
            let (why, announcement) = announcement(run);
            let message = match quiet_until {
                Some(_) => announcement.to_owned(),
                None => format!("{} applied, waiting: {detail}", verb(run)),
            };
            in_progress(why, &message, said.and_then(|said| said.error))
        }
        Rollout::TimedOut { run, detail } => {
            let why = match run {
                Run::Install => reason::INSTALL_FAILED,
                Run::Upgrade => reason::UPGRADE_FAILED,
            };
            let (after, verb) = (view.policy.helm_timeout.as_secs(), verb(run));
            failed(
                why,
                &format!("not ready {after} s after the {verb}: {detail}"),
            )
        }
    }
}

fn verb(run: Run) -> &'static str {
    match run {
        Run::Install => "install",
        Run::Upgrade => "upgrade",
    }
}

/// Reports a ready release. `finished` is the run of this process.
fn ready(said: Option<ClusterState>, finished: Option<Run>) -> ClusterState {
    let (was_ready, progress) = match said {
        Some(said) => (Some(said.ready), said.progress),
        None => (None, None),
    };
    let was_ready = was_ready.filter(|ready| ready.truth == Truth::True);
    let running = progress.as_ref();
    let running = running.filter(|progress| progress.truth == Truth::True);
    // An earlier process may have started the run.
    let finished = finished.or(match running.map(|progress| &*progress.reason) {
        Some(reason::INSTALLING) => Some(Run::Install),
        Some(reason::UPGRADING) => Some(Run::Upgrade),
        _ => None,
    });
    let ended = |why| Some(State::new(Truth::False, why, ""));
    let (ready, progress) = match (finished, was_ready) {
        (Some(Run::Install), _) => (
            State::new(Truth::True, reason::INSTALLED, "release installed"),
            ended(reason::INSTALL_COMPLETE),
        ),
        (Some(Run::Upgrade), _) => (
            State::new(Truth::True, reason::UPGRADED, "release upgraded"),
            ended(reason::UPGRADE_COMPLETE),
        ),
        (None, Some(before)) => (before, progress),
        (None, None) => (
            State::new(Truth::True, reason::NO_CHANGE, "release up-to-date"),
            None,
        ),
    };
    let over = |progress: &State| {
        progress.truth == Truth::False
            && ![reason::PAUSED, reason::LOCKED].contains(&&*progress.reason)
    };
    ClusterState {
        ready,
        progress: progress.filter(over).or_else(|| ended(reason::NO_CHANGE)),
        error: Some(no_error()),
    }
}

fn cleanup(owner: &ReleaseOwner) -> ClusterState {
    deleting(match owner {
        ReleaseOwner::Tenant(_) => "tenant cleanup in progress",
        ReleaseOwner::Deployment(_) => "cleanup in progress",
    })
}

/// Reports the end of a removal: the release is removed, left on purpose, or belongs to another owner.
fn gone(
    owner: &ReleaseOwner,
    orphaned: bool,
    foreign: Option<&str>,
    retired: bool,
) -> ClusterState {
    let left = format!(
        "the release is left where it is, as the {} is annotated",
        owner.kind()
    );
    let what = match (orphaned, foreign) {
        (true, _) => &left,
        (false, Some(whose)) => whose,
        (false, None) => "the release is uninstalled",
    };
    let why = match retired {
        true => "the cluster was taken out of the fleet with deletionPolicy Uninstall",
        false => "as home has ordered",
    };
    ClusterState {
        ready: State::new(Truth::False, reason::UNINSTALLED, format!("{what}: {why}")),
        progress: Some(State::new(Truth::False, reason::UNINSTALLED, "")),
        error: Some(no_error()),
    }
}

fn deleting(message: &str) -> ClusterState {
    ClusterState {
        ready: State::new(Truth::False, reason::DELETING, message),
        progress: Some(State::new(Truth::True, reason::DELETING, message)),
        error: Some(no_error()),
    }
}

fn failed(why: &str, message: &str) -> ClusterState {
    ClusterState {
        ready: State::new(Truth::False, why, message),
        progress: Some(State::new(Truth::False, why, "")),
        error: Some(State::new(Truth::True, why, message)),
    }
}

fn no_error() -> State {
    State::new(Truth::False, reason::NO_ERROR, "")
}
