//! Replaces a plan whose requests the API server refuses.

use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::tenant::Step;

use super::action::{Action, read};
use super::coming::Coming;
use super::memory::{Attempt, Refusal};
use super::view::View;
use super::{Plan, readiness};

/// Waits for the next retry if the API server would refuse this plan as well. Workloads keep running, so the release
/// stays ready.
pub(super) fn over(plan: Plan, view: &View<'_>) -> Plan {
    let refusal = view.memory.refusal.as_ref();
    let Some(refusal) = refusal.filter(|refusal| holds(refusal, &plan.action, view)) else {
        return plan;
    };
    let why = reason::REQUEST_REFUSED;
    let error = Some(State::new(Truth::True, why, refusal.message.clone()));
    let removal = refusal.attempt.removal.is_some();
    // The API server refuses the read itself.
    let unread = refusal.of_reading || matches!(plan.action, Action::ReadRelease(_));
    let next = Coming {
        step: Step::Retry,
        at: Some(refusal.retry_at),
        attempts: refusal.attempts,
    };
    Plan {
        action: match removal || unread {
            true => Action::Nothing,
            false => read(readiness::unread_kept(view)),
        },
        state: match removal {
            true => ClusterState {
                error,
                ..plan.state
            },
            false => ClusterState {
                ready: readiness::kept(view)
                    .unwrap_or_else(|| State::new(Truth::False, why, refusal.message.clone())),
                progress: Some(State::new(Truth::False, why, "")),
                error,
            },
        },
        applied_chart: None,
        wake: Some(refusal.retry_at),
        next: Some(next),
        ours: plan.ours,
        gone: false,
        settled: false,
        drift: None,
    }
}

fn holds(refusal: &Refusal, action: &Action, view: &View<'_>) -> bool {
    let waits = match action {
        Action::Nothing => refusal.of_status,
        _ => view.now < refusal.retry_at,
    };
    let same = || refusal.attempt == Attempt::of(view.owner, view.desired, view.fingerprint);
    refusal.shown && waits && same()
}
