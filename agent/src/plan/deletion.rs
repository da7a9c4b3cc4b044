//! The plan for a Tenant that is to go.

use krypton_common::conditions::{ClusterState, Truth, reason};
use krypton_common::names;

use super::{Action, Ownership, Permit, Plan, View, state};

pub(super) fn plan(view: &View<'_>) -> Plan {
    if !view.has_finalizer() {
        return Plan::wait(deleting("waiting for the finalizers of others"));
    }
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

fn deleting(message: &str) -> ClusterState {
    ClusterState {
        ready: state(Truth::False, reason::DELETING, message),
        progress: Some(state(Truth::True, reason::DELETING, message)),
        error: Some(state(Truth::False, reason::NO_ERROR, "")),
    }
}
