//! Third step of a plan: the conditions to report for a state.

use krypton_helm::releases::Status;
use krypton_helm::releases::revision::Revision;
use krypton_types::conditions::{ClusterState, State, Truth, WAITING, reason};
use krypton_types::names;
use krypton_types::placed_tenant::placed_on;

use super::memory::{Failure, Run, is_before_helm};
use super::readiness::{running_readiness, updated_readiness, with_note};
use super::state::{ReleaseState, Rollout};
use super::view::{Hold, View};
use crate::owner::ReleaseOwner;

pub(super) const INSTALLING: &str = "installing release";
pub(super) const UPGRADING: &str = "upgrading release";
const VALUES_NOT_ALLOWED: &str =
    "Tenant values are disabled; remove spec.values, or start the hub with --tenant-values";

/// Returns the conditions to report for a state.
pub(super) fn conditions(state: &ReleaseState<'_>, view: &View<'_>) -> ClusterState {
    use ReleaseState::*;
    let (owner, namespace, name) = (
        view.owner,
        &view.release_key.namespace,
        &view.release_key.name,
    );
    let reported = || view.reported_state();
    let attempt_failed = |reason, message: &str| after_failure(reason, message, view);
    match state {
        OtherMember => ClusterState::from(other_member(owner, view.cluster)),
        NamespaceNotAllowed(ready) => ClusterState::from(ready.clone()),

        WorkspaceInvalid => failed(
            reason::WORKSPACE_INVALID,
            &invalid_workspace(owner, namespace),
        ),
        WorkspaceProtected(holder) => failed(
            reason::NAMESPACE_NOT_OWNED,
            &protected_workspace(owner, namespace, holder),
        ),
        WorkspaceForbidden => attempt_failed(
            reason::NAMESPACE_NOT_OWNED,
            &forbidden_workspace(owner, namespace),
        ),
        ValuesNotAllowed => attempt_failed(reason::VALUES_NOT_ALLOWED, VALUES_NOT_ALLOWED),
        ValuesTooLarge {
            subject,
            size,
            limit,
        } => attempt_failed(
            reason::VALUES_TOO_LARGE,
            &format!("{subject} {size} bytes as JSON, more than {limit}; shorten spec.values"),
        ),
        Foreign(message) => failed(reason::RELEASE_IN_USE, message),

        NoFinalizer { outdated: false } | WorkspaceUnseen { outdated: false } | Unread(_) => {
            unchanged(reported())
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
        | StaleLock(_) => announced(view.run(), reported()),
        FailedInstall => announced(Run::Install, reported()),
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
                ..announced(view.run(), reported())
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
            attempt_failed(failure.reason, &failure.message)
        }
        GivenUp(failure) => attempt_failed(failure.reason, &given_up(owner, failure)),
        Held(hold) => held(*hold, view),

        AwaitsFinalizers => deleting("waiting for other finalizers"),
        Orphaned => deleting(&format!(
            "orphaned: release {name} stays in namespace {namespace}"
        )),
        RemovalHeld(reason) => deleting(&format!("deletion waits: {reason}")),
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
        } => removal_complete(owner, *orphaned, foreign.as_deref(), *retired),
    }
}

fn other_member(owner: &ReleaseOwner, cluster: &str) -> State {
    let placed = owner.tenant().and_then(|tenant| placed_on(tenant));
    let cause = match placed {
        Some(member) => format!("the Tenant is placed on {member}"),
        None => format!(
            "clusterRef names {}",
            owner.named_member().unwrap_or_default()
        ),
    };
    let message = format!("{cause}; cluster {cluster} ignores this Tenant");
    State::new(Truth::False, reason::NOT_THIS_CLUSTER, message)
}

fn invalid_workspace(owner: &ReleaseOwner, workspace: &str) -> String {
    format!(
        "{workspace:?} cannot be a namespace (a DNS label of at most 63 characters); {}",
        another_workspace(owner, "set spec.workspace")
    )
}

fn protected_workspace(owner: &ReleaseOwner, workspace: &str, holder: &str) -> String {
    let remedy = "delete the Tenant, and create it again with another spec.workspace";
    format!(
        "namespace {workspace} is reserved for {holder}; {}",
        another_workspace(owner, remedy)
    )
}

fn forbidden_workspace(owner: &ReleaseOwner, workspace: &str) -> String {
    let own = owner.namespace();
    format!(
        "this {} may use only namespace {own} or one created for it, not {workspace}; {}, or have an operator of the \
         cluster annotate namespace {workspace} with {}={own}/{}",
        owner.kind(),
        another_workspace(owner, "create the Tenant again with another spec.workspace"),
        names::ADOPT_ANNOTATION,
        owner.name(),
    )
}

/// Returns the fix for an unusable workspace. A KryptonDeployment's name determines its workspace.
fn another_workspace(owner: &ReleaseOwner, tenant_remedy: &'static str) -> &'static str {
    match owner {
        ReleaseOwner::Tenant(_) => tenant_remedy,
        ReleaseOwner::Deployment(_) => "create the KryptonDeployment again under another name",
    }
}

fn given_up(owner: &ReleaseOwner, failure: &Failure) -> String {
    format!(
        "{}; no more retries after {} attempts: change the chart, the values or the {}, or set annotation {}",
        failure.message,
        failure.attempts,
        owner.kind(),
        names::RECONCILE_REQUESTED_ANNOTATION
    )
}

/// Reports that an action waits for a permit or for the end of a pause. The readiness of the deployed revision is still
/// updated.
fn held(hold: Hold<'_>, view: &View<'_>) -> ClusterState {
    let reported = view.reported_state();
    let reported = reported.unwrap_or_else(|| unknown(hold.reason, "not reconciled yet"));
    ClusterState {
        ready: updated_readiness(view, reported.ready),
        progress: Some(State::new(Truth::False, hold.reason, hold.message)),
        error: reported.error,
    }
}

/// Reports a failed attempt. If Krypton could not fetch the chart or start Helm, the running release keeps its
/// readiness.
fn after_failure(reason: &str, message: &str, view: &View<'_>) -> ClusterState {
    if reason == reason::SUSPENDED {
        return ClusterState {
            ready: State::new(Truth::Unknown, reason, message),
            progress: Some(State::new(Truth::False, reason, message)),
            error: Some(no_error()),
        };
    }
    let is_deployed = |revision: &&&Revision| revision.status == Status::Deployed;
    let Some(running) = view.revisions.iter().rev().find(is_deployed) else {
        return failed(reason, message);
    };
    let message = format!("{message} (revision {} keeps running)", running.revision);
    let mut state = failed(reason, &message);
    if is_before_helm(reason)
        && let Some(ready) = running_readiness(view)
    {
        state.ready = ready;
    }
    state
}

/// Nothing changes, so the last reported state stays.
fn unchanged(reported: Option<ClusterState>) -> ClusterState {
    reported.unwrap_or_else(|| unknown(reason::NO_CHANGE, "reading the release"))
}

fn unknown(reason: &str, message: &str) -> ClusterState {
    ClusterState::from(State::new(Truth::Unknown, reason, message))
}

/// Announces a run. An error stays until an attempt succeeds.
fn announced(run: Run, reported: Option<ClusterState>) -> ClusterState {
    let (reason, message) = announcement(run);
    in_progress(reason, message, reported.and_then(|state| state.error))
}

fn announcement(run: Run) -> (&'static str, &'static str) {
    match run {
        Run::Install => (reason::INSTALLING, INSTALLING),
        Run::Upgrade => (reason::UPGRADING, UPGRADING),
    }
}

fn in_progress(reason: &str, message: &str, error: Option<State>) -> ClusterState {
    let is_lasting = |reason: &str| {
        [
            reason::INSTALL_FAILED,
            reason::UPGRADE_FAILED,
            reason::ROLLBACK_FAILED,
            reason::CHART_NOT_LOADED,
            reason::VERSION_NOT_FOUND,
            reason::VERSION_INVALID,
            reason::HELM_UNAVAILABLE,
        ]
        .contains(&reason)
    };
    let error = error.filter(|error| error.truth == Truth::True && is_lasting(&error.reason));
    ClusterState {
        ready: State::new(Truth::False, reason, message),
        progress: Some(State::new(Truth::True, reason, message)),
        error: Some(error.unwrap_or_else(no_error)),
    }
}

/// Reports the rollout of a release that is as desired.
fn settled(rollout: &Rollout<'_>, view: &View<'_>) -> ClusterState {
    let reported = view.reported_state();
    match *rollout {
        Rollout::Complete => {
            let finished = view.memory.applied.as_ref().map(|applied| applied.run);
            let mut state = ready(reported, finished);
            let wait = view.desired.handling.wait;
            state.ready.message = with_note(&state.ready.message, wait, view.unready);
            state
        }
        Rollout::Lost(detail) => ClusterState {
            ready: State::new(Truth::False, reason::NOT_READY, detail),
            progress: reported.and_then(|state| state.progress),
            error: Some(no_error()),
        },
        Rollout::Waiting {
            run,
            detail,
            quiet_until,
            ..
        } => {
            let (reason, announcement) = announcement(run);
            let message = match quiet_until {
                Some(_) => announcement.to_owned(),
                None => format!("{} {WAITING}{detail}", verb(run)),
            };
            in_progress(reason, &message, reported.and_then(|state| state.error))
        }
        Rollout::TimedOut { run, detail } => {
            let reason = match run {
                Run::Install => reason::INSTALL_FAILED,
                Run::Upgrade => reason::UPGRADE_FAILED,
            };
            let (seconds, verb) = (view.policy.helm_timeout.as_secs(), verb(run));
            failed(
                reason,
                &format!("not ready {seconds} s after the {verb}: {detail}"),
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
fn ready(reported: Option<ClusterState>, finished: Option<Run>) -> ClusterState {
    let (last_ready, progress) = match reported {
        Some(state) => (Some(state.ready), state.progress),
        None => (None, None),
    };
    let last_ready = last_ready.filter(|ready| ready.truth == Truth::True);
    let running = progress.as_ref();
    let running = running.filter(|progress| progress.truth == Truth::True);
    // An earlier process may have started the run.
    let finished = finished.or(match running.map(|progress| &*progress.reason) {
        Some(reason::INSTALLING) => Some(Run::Install),
        Some(reason::UPGRADING) => Some(Run::Upgrade),
        _ => None,
    });
    let ended = |reason| Some(State::new(Truth::False, reason, ""));
    let (ready, progress) = match (finished, last_ready) {
        (Some(Run::Install), _) => (
            State::new(Truth::True, reason::INSTALLED, "release installed"),
            ended(reason::INSTALL_COMPLETE),
        ),
        (Some(Run::Upgrade), _) => (
            State::new(Truth::True, reason::UPGRADED, "release upgraded"),
            ended(reason::UPGRADE_COMPLETE),
        ),
        (None, Some(last_ready)) => (last_ready, progress),
        (None, None) => (
            State::new(Truth::True, reason::NO_CHANGE, "release up-to-date"),
            None,
        ),
    };
    let has_ended = |progress: &State| {
        progress.truth == Truth::False
            && ![reason::PAUSED, reason::LOCKED].contains(&&*progress.reason)
    };
    ClusterState {
        ready,
        progress: progress
            .filter(has_ended)
            .or_else(|| ended(reason::NO_CHANGE)),
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
fn removal_complete(
    owner: &ReleaseOwner,
    orphaned: bool,
    foreign: Option<&str>,
    retired: bool,
) -> ClusterState {
    let orphaned_text = format!(
        "release kept, because the {} has the orphan annotation",
        owner.kind()
    );
    let result = match (orphaned, foreign) {
        (true, _) => &orphaned_text,
        (false, Some(message)) => message,
        (false, None) => "release uninstalled",
    };
    let cause = match retired {
        true => "the EdgeCluster was deleted with deletionPolicy Uninstall",
        false => "requested by the home cluster",
    };
    ClusterState {
        ready: State::new(
            Truth::False,
            reason::UNINSTALLED,
            format!("{result}: {cause}"),
        ),
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

fn failed(reason: &str, message: &str) -> ClusterState {
    ClusterState {
        ready: State::new(Truth::False, reason, message),
        progress: Some(State::new(Truth::False, reason, "")),
        error: Some(State::new(Truth::True, reason, message)),
    }
}

fn no_error() -> State {
    State::new(Truth::False, reason::NO_ERROR, "")
}
