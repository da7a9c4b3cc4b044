//! Adds drift to a plan: whether to check the release, and the result of the last check.

use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::drift::DriftMode;

use super::Plan;
use super::action::Action;
use super::view::View;
use crate::drift::{DriftSettings, with_findings};

/// Number of drift checks that fail in a row before a condition shows the failure.
const SHOWN_AFTER: u32 = 3;

/// Permits a drift check if the release is as desired, its rollout is complete, and Krypton may write.
pub(super) fn with_drift(mut plan: Plan, view: &View<'_>) -> Plan {
    if !plan.settled {
        return plan;
    }
    // The policy of a KryptonDeployment overrides the fleet's.
    let order = view.owner.deployment();
    let own_policy = order.and_then(|order| order.drift.as_ref());
    let policy = own_policy.unwrap_or(&view.desired.drift);
    let settings = DriftSettings::new(policy, |name| view.owner.annotation(name));
    let is_off = settings.mode == DriftMode::Off;
    let newest = view.newest().map(|newest| newest.revision);
    let last = view.memory.drift.as_ref();
    let last = last.filter(|last| newest == Some(last.revision));
    let ready = &mut plan.state.ready;
    // The findings of an earlier process stay until this process has checked the release.
    if is_off || settings.invalid_annotations.is_some() || last.is_some() {
        let findings = last
            .filter(|_| !is_off)
            .and_then(|last| last.message.clone());
        let errors = settings.invalid_annotations.clone().into_iter();
        let messages: Vec<String> = errors.chain(findings).collect();
        let message = (!messages.is_empty()).then(|| messages.join("; "));
        ready.message = with_findings(&ready.message, message.as_deref());
    }
    let is_rolling_out = [reason::INSTALLING, reason::UPGRADING].contains(&&*ready.reason);
    let may_change = view.hold().is_none() && !is_rolling_out;
    let failed = view.memory.failed_checks.as_ref();
    let failed = failed.filter(|failed| newest == Some(failed.revision) && !is_off);
    // KryptonDeployments are always corrected, so the failure matters. A Tenant's state does not depend on drift.
    let error = plan.state.error.as_ref();
    let has_error = error.is_some_and(|error| error.truth == Truth::True);
    if let Some(failed) = failed.filter(|failed| failed.count >= SHOWN_AFTER)
        && view.owner.tenant().is_none()
        && may_change
        && !has_error
    {
        let message = format!(
            "failed to compare the release with its chart: {}",
            failed.message
        );
        plan.state.error = Some(State::new(
            Truth::True,
            reason::HEALTH_CHECK_FAILED,
            message,
        ));
    }
    let may_check = may_change && !is_off && plan.action == Action::Nothing;
    plan.drift = may_check.then_some(settings);
    plan
}
