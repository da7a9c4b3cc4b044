//! Plans the removal of a release: with its Tenant, on an order of the hub, or with the whole member.

use krypton_types::conditions::{ClusterState, Truth, reason};
use krypton_types::names;

use super::{Action, Coming, Ownership, Permit, Plan, View, state};
use crate::owner::ReleaseOwner;

/// Plans for a deleted Tenant, or for a deployment whose removal the hub orders.
pub(super) fn plan(view: &View<'_>) -> Plan {
    if let ReleaseOwner::Deployment(order) = view.owner {
        let ours = matches!(view.ownership(), Ownership::Mine | Ownership::Unread);
        return match view.has_finalizer() || (ours && !order.orphan) {
            true => removal(view),
            false => Plan {
                gone: true,
                ..Plan::wait(over(view, order.orphan, "as home has ordered"))
            },
        };
    }
    if !view.has_finalizer() {
        return Plan::wait(deleting("waiting for the finalizers of others"));
    }
    removal(view)
}

/// Plans for a member that leaves the fleet with its releases. The Tenant stays, but Krypton no longer manages it.
pub(super) fn retire(view: &View<'_>) -> Plan {
    let plan = removal(view);
    match plan.action {
        // Krypton does not check a kept workspace again after it has removed the finalizer.
        Action::RemoveFinalizer { .. } | Action::DeleteWorkspace if !view.has_finalizer() => {
            let orphaned = plan.action == Action::RemoveFinalizer { orphaned: true };
            let why = "the cluster was taken out of the fleet with deletionPolicy Uninstall";
            Plan::wait(over(view, orphaned, why))
        }
        _ => plan,
    }
}

fn removal(view: &View<'_>) -> Plan {
    let going = match view.owner {
        ReleaseOwner::Tenant(_) => "tenant cleanup in progress",
        ReleaseOwner::Deployment(_) => "cleanup in progress",
    };
    if view.owner.annotation(names::ORPHAN_ANNOTATION) == Some("true") {
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
    let ownership = view.ownership();
    if let (Ownership::Unread, Some(newest)) = (&ownership, view.newest()) {
        return Plan::new(Action::ReadRelease(newest.revision), deleting(going));
    }
    if ownership == Ownership::Mine {
        return match view.failure() {
            Some(failure) if view.now < failure.retry_at && failure.reason == reason::SUSPENDED => {
                Plan {
                    wake: Some(failure.retry_at),
                    ..Plan::wait(deleting(&format!("deletion waits: {}", failure.message)))
                }
            }
            Some(failure) if view.now < failure.retry_at => Plan {
                wake: Some(failure.retry_at),
                next: Coming::retry(failure),
                ..Plan::wait(ClusterState {
                    error: Some(state(Truth::True, failure.reason, failure.message.clone())),
                    ..deleting(going)
                })
            },
            _ => Plan::new(Action::Uninstall, deleting(going)),
        };
    }
    match view.workspace {
        // Krypton created it, and no other owner uses it. It is deleted only if it is empty.
        Some(workspace)
            if workspace.creator.is_some()
                && view.may_use_workspace(view.owner)
                && view.release_key.namespace != "default"
                && !view.workspace_shared
                && ownership == Ownership::Free =>
        {
            let message = format!("deleting namespace {}", view.release_key.namespace);
            let action = if workspace.terminating {
                Action::Nothing
            } else {
                Action::DeleteWorkspace
            };
            Plan::new(action, deleting(&message))
        }
        _ => Plan::new(Action::RemoveFinalizer { orphaned: false }, deleting(going)),
    }
}

/// Returns the final state: the release is removed, left on purpose, or belongs to another owner.
fn over(view: &View<'_>, orphaned: bool, why: &str) -> ClusterState {
    let what = match (orphaned, view.ownership()) {
        (true, _) => format!(
            "the release is left where it is, as the {} is annotated",
            view.owner.kind()
        ),
        (false, Ownership::Theirs(whose)) => whose,
        (false, _) => "the release is uninstalled".to_owned(),
    };
    let message = format!("{what}: {why}");
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
