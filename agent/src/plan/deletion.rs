//! The plan for a release that is to go: with its Tenant, or with the whole member.

use krypton_common::conditions::{ClusterState, Truth, reason};
use krypton_common::names;

use super::{Action, Ownership, Permit, Plan, View, state};

/// The Tenant has been deleted.
pub(super) fn plan(view: &View<'_>) -> Plan {
    if !view.has_finalizer() {
        return Plan::wait(deleting("waiting for the finalizers of others"));
    }
    removal(view)
}

/// The member leaves the fleet with its releases: the Tenant stays, and is nobody's any more.
pub(super) fn retire(view: &View<'_>) -> Plan {
    let plan = removal(view);
    match plan.action {
        Action::RemoveFinalizer { .. } if !view.has_finalizer() => {
            let orphaned = plan.action == Action::RemoveFinalizer { orphaned: true };
            Plan::wait(retired(view, orphaned))
        }
        _ => plan,
    }
}

fn removal(view: &View<'_>) -> Plan {
    if view.annotation(names::ORPHAN_ANNOTATION) == Some("true") {
        let message = format!(
            "orphaned: release {} stays in namespace {}",
            view.release_key.name, view.release_key.namespace
        );
        return Plan::new(
            Action::RemoveFinalizer { orphaned: true },
            deleting(&message),
        );
    }
    if let Some(why) = view.paused() {
        return Plan::wait(deleting(&format!("deletion waits: {why}")));
    }
    if let Permit::Withheld(why) = &view.permit {
        return Plan::wait(deleting(&format!("deletion waits: {why}")));
    }
    if view.ownership() == Ownership::Mine {
        return match view.failure() {
            Some(failure) if view.now < failure.retry_at && failure.reason == reason::SUSPENDED => {
                Plan {
                    wake: Some(failure.retry_at),
                    ..Plan::wait(deleting(&format!("deletion waits: {}", failure.message)))
                }
            }
            Some(failure) if view.now < failure.retry_at => Plan {
                wake: Some(failure.retry_at),
                ..Plan::wait(ClusterState {
                    error: Some(state(Truth::True, failure.reason, failure.message.clone())),
                    ..deleting("tenant cleanup in progress")
                })
            },
            _ => Plan::new(Action::Uninstall, deleting("tenant cleanup in progress")),
        };
    }
    match view.workspace {
        // Made by us, and nobody else is in it (design §3, rule 8).
        Some(workspace)
            if workspace.creator.is_some()
                && view.release_key.namespace != "default"
                && !view.workspace_shared
                && view.ownership() == Ownership::Free =>
        {
            let message = format!("deleting namespace {}", view.release_key.namespace);
            let action = if workspace.terminating {
                Action::Nothing
            } else {
                Action::DeleteWorkspace
            };
            Plan::new(action, deleting(&message))
        }
        _ => Plan::new(
            Action::RemoveFinalizer { orphaned: false },
            deleting("tenant cleanup in progress"),
        ),
    }
}

/// Nothing of ours is left; or it is left on purpose, or is not ours.
fn retired(view: &View<'_>, orphaned: bool) -> ClusterState {
    let what = match (orphaned, view.ownership()) {
        (true, _) => "the release is left where it is, as the Tenant is annotated".to_owned(),
        (false, Ownership::Theirs(whose)) => whose,
        (false, _) => "the release is uninstalled".to_owned(),
    };
    let message =
        format!("{what}: the cluster was taken out of the fleet with deletionPolicy Uninstall");
    ClusterState {
        ready: state(Truth::False, reason::UNINSTALLED, message),
        progress: Some(state(Truth::False, reason::UNINSTALLED, "")),
        error: Some(state(Truth::False, reason::NO_ERROR, "")),
    }
}

fn deleting(message: &str) -> ClusterState {
    ClusterState {
        ready: state(Truth::False, reason::DELETING, message),
        progress: Some(state(Truth::True, reason::DELETING, message)),
        error: Some(state(Truth::False, reason::NO_ERROR, "")),
    }
}
