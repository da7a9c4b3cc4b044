//! Adds drift to a plan: whether to check the release, and the result of the last check.

use krypton_types::conditions::reason;
use krypton_types::desired::drift::DriftMode;

use super::{Action, Permit, Plan, View};
use crate::drift::{Wanted, with_findings};

/// Permits a drift check if the release is as desired, its rollout is complete, and Krypton may write.
pub(super) fn over(view: &View<'_>, mut plan: Plan) -> Plan {
    if !plan.settled {
        return plan;
    }
    let policy = view.owner.drift().unwrap_or(&view.desired.drift);
    let wanted = Wanted::of(policy, |name| view.owner.annotation(name));
    let off = wanted.mode == DriftMode::Off;
    let last = view.memory.drift.as_ref();
    let last = last.filter(|last| {
        view.newest()
            .is_some_and(|newest| newest.revision == last.revision)
    });
    let ready = &mut plan.state.ready;
    // The findings of an earlier process stay until this process has checked the release.
    if off || wanted.mistaken.is_some() || last.is_some() {
        let words = last.filter(|_| !off).and_then(|last| last.words.clone());
        let said: Vec<String> = wanted.mistaken.clone().into_iter().chain(words).collect();
        let said = (!said.is_empty()).then(|| said.join("; "));
        ready.message = with_findings(&ready.message, said.as_deref());
    }
    let going = [reason::INSTALLING, reason::UPGRADING].contains(&ready.reason.as_str());
    let may = view.permit == Permit::Granted && view.paused().is_none();
    if !off && may && !going && plan.action == Action::Nothing {
        plan.drift = Some(wanted);
    }
    plan
}
