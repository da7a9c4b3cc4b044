//! Replaces a plan whose requests the API server refuses.

use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::tenant::UpcomingStepKind;

use super::action::{Action, read_action};
use super::memory::{Attempt, Refusal};
use super::next_step::PlannedStep;
use super::view::View;
use super::{Plan, readiness};

/// Waits for the next retry if the API server would refuse this plan as well. Workloads keep running, so the release
/// stays ready.
pub(super) fn with_refusal(plan: Plan, view: &View<'_>) -> Plan {
    let refusal = view.memory.refusal.as_ref();
    let Some(refusal) = refusal.filter(|refusal| applies(refusal, &plan.action, view)) else {
        return plan;
    };
    let reason = reason::REQUEST_REFUSED;
    let error = Some(State::new(Truth::True, reason, refusal.message.clone()));
    let is_removal = refusal.attempt.removal.is_some();
    // The API server refuses the read itself.
    let is_read = refusal.is_read || matches!(plan.action, Action::ReadRelease(_));
    let hold = view.hold();
    let progress = match &hold {
        Some(hold) => State::new(Truth::False, hold.reason, hold.message),
        None => State::new(Truth::False, reason, ""),
    };
    let next = PlannedStep {
        step: UpcomingStepKind::Retry,
        at: Some(refusal.retry_at),
        attempts: refusal.attempts,
    };
    Plan {
        action: match is_removal || is_read {
            true => Action::Nothing,
            false => read_action(readiness::unread_running_revision(view)),
        },
        state: match is_removal {
            true => ClusterState {
                error,
                ..plan.state
            },
            false => ClusterState {
                ready: readiness::running_readiness(view)
                    .unwrap_or_else(|| State::new(Truth::False, reason, refusal.message.clone())),
                progress: Some(progress),
                error,
            },
        },
        applied_chart: None,
        history: plan.history,
        revisions: plan.revisions,
        wake: Some(refusal.retry_at),
        // During a pause, or without the permit, the retry changes nothing.
        next: hold.is_none().then_some(next),
        is_reported: plan.is_reported,
        gone: false,
        settled: false,
        handles_request: false,
        drift: None,
    }
}

fn applies(refusal: &Refusal, action: &Action, view: &View<'_>) -> bool {
    let is_pending = match action {
        Action::Nothing => refusal.is_status_write,
        _ => view.now < refusal.retry_at,
    };
    let is_same_attempt =
        || refusal.attempt == Attempt::new(view.owner, view.desired, view.fingerprint);
    refusal.shown && is_pending && is_same_attempt()
}
