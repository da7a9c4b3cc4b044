//! Status of a member's Tenants and the events of its transitions. Pure functions.

pub mod throttle;

use jiff::Timestamp;
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::{self, ClusterState, Phase, Truth, reason};
use krypton_types::tenant::UpcomingStep;

use crate::drift;

/// Reason of the event for a phase change.
pub const PHASE_SET: &str = "PhaseSet";

/// Returns the status of a Tenant that only this member reconciles.
pub fn status(
    tenant: &Tenant,
    cluster: &str,
    state: &ClusterState,
    next_step: Option<UpcomingStep>,
    applied_chart: Option<&str>,
    allow_chart_skip: bool,
    now: Timestamp,
) -> TenantStatus {
    let generation = tenant.metadata.generation.unwrap_or_default();
    let mut status = tenant.status.clone().unwrap_or_default();
    conditions::set_cluster(&mut status.conditions, cluster, state, generation, now);
    let clusters = [(cluster.to_owned(), state.clone())].into();
    let summary = conditions::summarise(&clusters, allow_chart_skip);
    conditions::set(
        &mut status.conditions,
        "Ready",
        &summary.ready,
        generation,
        now,
    );
    status.phase = Some(summary.phase.to_string());
    status.last_message = Some(summary.last_message);
    status.observed_generation = Some(generation);
    status.next_steps = next_step
        .map(|next_step| next_step.in_status(cluster))
        .into_iter()
        .collect();
    if let Some(chart) = applied_chart {
        status.last_applied_chart = Some(chart.to_owned());
    }
    status
}

/// Returns the event for a phase change of a Tenant that only one member reconciles.
pub fn phase_event(
    previous: Option<&ClusterState>,
    current: &ClusterState,
    allow_chart_skip: bool,
) -> Option<ObjectEvent> {
    let phase = |state| conditions::phase(state, allow_chart_skip);
    // A new object starts as Pending.
    let (from, to) = (previous.map_or(Phase::Pending, phase), phase(current));
    (from != to).then(|| ObjectEvent {
        warning: false,
        reason: PHASE_SET,
        message: to.to_string(),
    })
}

/// Returns the events between two states of one Tenant on one member, except `PhaseSet`.
pub fn transition_events(
    previous: Option<&ClusterState>,
    current: &ClusterState,
) -> Vec<ObjectEvent> {
    let mut events = Vec::new();
    let mut add = |warning, reason, message: &str| {
        events.push(ObjectEvent {
            warning,
            reason,
            message: message.to_owned(),
        });
    };
    let previously = |pick: fn(&ClusterState) -> Option<&conditions::State>| {
        previous
            .and_then(pick)
            .map(|state| (state.truth, state.reason.as_str()))
    };
    if let Some(progress) = &current.progress
        && progress.truth == Truth::True
        && previously(|state| state.progress.as_ref()) != Some((Truth::True, &progress.reason))
    {
        match progress.reason.as_str() {
            reason::INSTALLING => add(false, "HelmInstallStart", &progress.message),
            reason::UPGRADING => add(false, "HelmUpgradeStart", &progress.message),
            reason::LOCKED => add(true, "ReleaseLocked", &progress.message),
            _ => {}
        }
    }
    if let Some(error) = &current.error
        && error.truth == Truth::True
        && previously(|state| state.error.as_ref()) != Some((Truth::True, &error.reason))
    {
        let event = match error.reason.as_str() {
            reason::INSTALL_FAILED => "HelmInstallFailed",
            reason::UPGRADE_FAILED => "HelmUpgradeFailed",
            reason::CHART_NOT_LOADED => "ChartNotLoaded",
            reason::VERSION_NOT_FOUND => "ChartVersionNotFound",
            reason::VERSION_INVALID => "ChartVersionInvalid",
            reason::ROLLBACK_FAILED => "HelmRollbackFailed",
            reason::HELM_UNAVAILABLE => "HelmUnavailable",
            reason::RELEASE_IN_USE => "ReleaseInUse",
            reason::RELEASE_TAMPERED => "ReleaseTampered",
            reason::NAMESPACE_NOT_OWNED => "NamespaceNotOwned",
            reason::WORKSPACE_INVALID => "WorkspaceInvalid",
            reason::WORKSPACE_TERMINATING => "WorkspaceTerminating",
            reason::UNINSTALL_FAILED => "HelmUninstallFailed",
            reason::REQUEST_REFUSED => "RequestRefused",
            _ => "ClusterError",
        };
        add(true, event, &error.message);
    }
    if current.ready.truth == Truth::True
        && previously(|state| Some(&state.ready)) != Some((Truth::True, &current.ready.reason))
    {
        match current.ready.reason.as_str() {
            reason::INSTALLED => add(false, "HelmInstalled", &current.ready.message),
            reason::UPGRADED => add(false, "HelmUpgraded", &current.ready.message),
            reason::NO_CHANGE => add(false, "HelmSkip", "fingerprint unchanged"),
            _ => {}
        }
    }
    let message = previous.map(|state| state.ready.message.as_str());
    events.extend(drift::drift_event(message, &current.ready.message));
    events
}

#[cfg(test)]
mod tests {
    use krypton_types::conditions::State;

    use super::*;

    fn state(ready: (Truth, &str), progress: (Truth, &str), error: (Truth, &str)) -> ClusterState {
        let state = |(truth, reason): (Truth, &str)| State {
            truth,
            reason: reason.to_owned(),
            message: String::new(),
        };
        ClusterState {
            ready: state(ready),
            progress: Some(state(progress)),
            error: Some(state(error)),
        }
    }

    fn reasons(events: &[ObjectEvent]) -> Vec<&'static str> {
        events.iter().map(|event| event.reason).collect()
    }

    #[test]
    fn events_are_emitted_only_on_transitions() {
        use Truth::{False, True};
        let installing = state(
            (False, "Installing"),
            (True, "Installing"),
            (False, "NoError"),
        );
        let installed = state(
            (True, "Installed"),
            (False, "InstallComplete"),
            (False, "NoError"),
        );
        let failed = state(
            (False, "UpgradeFailed"),
            (False, "UpgradeFailed"),
            (True, "UpgradeFailed"),
        );
        assert_eq!(
            reasons(&transition_events(None, &installing)),
            ["HelmInstallStart"]
        );
        assert_eq!(
            reasons(&transition_events(Some(&installing), &installed)),
            ["HelmInstalled"]
        );
        assert_eq!(
            reasons(&transition_events(Some(&installed), &installed)),
            [""; 0]
        );
        assert_eq!(
            reasons(&transition_events(Some(&installed), &failed)),
            ["HelmUpgradeFailed"]
        );
        assert_eq!(reasons(&transition_events(Some(&failed), &failed)), [""; 0]);
    }

    #[test]
    fn phase_event_reports_the_phase_of_the_status() {
        use Truth::{False, True};
        let state = |ready: Truth, error: Option<&str>| {
            let error = error.map_or((False, "NoError"), |reason| (True, reason));
            state((ready, "Any"), (False, "Any"), error)
        };
        let fetch = Some(reason::CHART_NOT_LOADED);
        let pending = state(False, None);
        for (previous, current, skip, expected) in [
            (None, state(True, None), false, Some("Ready")),
            (None, state(False, None), false, None),
            (Some(&pending), state(False, fetch), false, Some("Error")),
            (Some(&pending), state(False, fetch), true, None),
            (Some(&pending), state(True, fetch), true, Some("Ready")),
            (Some(&state(True, None)), state(True, fetch), true, None),
            (
                Some(&state(True, None)),
                state(False, fetch),
                true,
                Some("Pending"),
            ),
            (
                Some(&pending),
                state(False, Some(reason::INSTALL_FAILED)),
                true,
                Some("Error"),
            ),
        ] {
            let event = phase_event(previous, &current, skip);
            let message = event.as_ref().map(|event| event.message.as_str());
            assert_eq!(message, expected, "{previous:?} {current:?} {skip}");
            let tenant = Tenant::new("acme", krypton_crds::tenant::TenantSpec::default());
            let now = Timestamp::UNIX_EPOCH;
            let phase = status(&tenant, "edge-1", &current, None, None, skip, now).phase;
            if let Some(message) = message {
                assert_eq!(phase.as_deref(), Some(message), "{current:?} {skip}");
            }
        }
    }

    #[test]
    fn unchanged_status_keeps_its_timestamps() {
        let mut tenant = Tenant::new("acme", krypton_crds::tenant::TenantSpec::default());
        tenant.metadata.generation = Some(3);
        let ready = state(
            (Truth::True, "Installed"),
            (Truth::False, "InstallComplete"),
            (Truth::False, "NoError"),
        );
        let at = |second| Timestamp::from_second(second).unwrap();
        let first = status(&tenant, "edge-1", &ready, None, Some("r/c:1"), false, at(1));
        tenant.status = Some(first.clone());
        let second = status(&tenant, "edge-1", &ready, None, Some("r/c:1"), false, at(2));
        assert_eq!(first, second);
        assert_eq!(first.observed_generation, Some(3));
        assert_eq!(first.phase.as_deref(), Some("Ready"));
    }
}
