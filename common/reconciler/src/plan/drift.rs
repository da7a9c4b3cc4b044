//! Adds drift to a plan: whether to check the release, and the result of the last check.

use krypton_types::conditions::reason;
use krypton_types::desired::drift::DriftMode;

use super::Plan;
use super::action::Action;
use super::view::View;
use crate::drift::{Wanted, with_findings};

/// Permits a drift check if the release is as desired, its rollout is complete, and Krypton may write.
pub(super) fn over(mut plan: Plan, view: &View<'_>) -> Plan {
    if !plan.settled {
        return plan;
    }
    let policy = view.owner.drift().unwrap_or(&view.desired.drift);
    let wanted = Wanted::of(policy, |name| view.owner.annotation(name));
    let off = wanted.mode == DriftMode::Off;
    let newest = view.newest().map(|newest| newest.revision);
    let last = view.memory.drift.as_ref();
    let last = last.filter(|last| newest == Some(last.revision));
    let ready = &mut plan.state.ready;
    // The findings of an earlier process stay until this process has checked the release.
    if off || wanted.mistaken.is_some() || last.is_some() {
        let message = last.filter(|_| !off).and_then(|last| last.message.clone());
        let said: Vec<String> = wanted.mistaken.clone().into_iter().chain(message).collect();
        let said = (!said.is_empty()).then(|| said.join("; "));
        ready.message = with_findings(&ready.message, said.as_deref());
    }
    let rolls_out = [reason::INSTALLING, reason::UPGRADING].contains(&&*ready.reason);
    let may = view.hold().is_none() && plan.action == Action::Nothing;
    plan.drift = (may && !off && !rolls_out).then_some(wanted);
    plan
}
