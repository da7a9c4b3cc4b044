//! Status of a member's Tenants and the events of its transitions. Pure functions.

pub mod throttle;

use jiff::Timestamp;
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_helm::releases::Status;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::{self, ClusterState, Outlook, Phase, Truth, reason};
use krypton_types::tenant::UpcomingStep;

use crate::drift;
use crate::owner::ReleaseOwner;

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
    status.last_message = Some(summary.ready.message.clone());
    status.observed_generation = Some(generation);
    status.next_steps = next_step
        .map(|next_step| next_step.in_status(cluster))
        .into_iter()
        .collect();
    let outlook = Outlook::from_state(state, next_step);
    conditions::set_progress(
        &mut status.conditions,
        &summary.ready,
        outlook,
        generation,
        now,
    );
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
    (from != to).then(|| ObjectEvent::normal(PHASE_SET, to.to_string()))
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
            // The event has the name that krypton-operator gave it.
            reason::HELM_UNAVAILABLE => "HelmConfigInitFailed",
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

/// Replaces the event for the start of a run, if it installs a release of a KryptonDeployment that a user uninstalled
/// with `--keep-history`.
pub(crate) fn reinstallation_event(
    owner: &ReleaseOwner,
    newest: Option<&Revision>,
    event: ObjectEvent,
) -> ObjectEvent {
    let is_uninstalled = newest.is_some_and(|newest| newest.status == Status::Uninstalled);
    let starts_run = ["HelmInstallStart", "HelmUpgradeStart"].contains(&event.reason);
    match owner {
        ReleaseOwner::Deployment(order) if is_uninstalled && starts_run => ObjectEvent {
            warning: true,
            reason: "ReleaseNotInstalled",
            message: format!(
                "release {} was uninstalled; installing it again",
                order.release()
            ),
        },
        _ => event,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use krypton_types::conditions::State;
    use krypton_types::deployment::DesiredDeployment;

    use super::*;
    use crate::fixtures::foreign_revision;

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

    fn progress(reason: &str) -> ClusterState {
        let no_error = (Truth::False, reason::NO_ERROR);
        state((Truth::False, reason), (Truth::True, reason), no_error)
    }

    fn ready(reason: &str) -> ClusterState {
        let no_error = (Truth::False, reason::NO_ERROR);
        state((Truth::True, reason), (Truth::False, reason), no_error)
    }

    fn failed(reason: &str) -> ClusterState {
        let not_ready = (Truth::False, reason);
        state(not_ready, not_ready, (Truth::True, reason))
    }

    fn tenant() -> Tenant {
        Tenant::new("acme", krypton_crds::tenant::TenantSpec::default())
    }

    #[test]
    fn events_are_emitted_only_on_transitions() {
        let others = [progress("Other"), failed("Other"), ready("Other")];
        for (current, reason, warning) in [
            (progress(reason::INSTALLING), "HelmInstallStart", false),
            (progress(reason::UPGRADING), "HelmUpgradeStart", false),
            (progress(reason::LOCKED), "ReleaseLocked", true),
            (ready(reason::INSTALLED), "HelmInstalled", false),
            (ready(reason::UPGRADED), "HelmUpgraded", false),
            (ready(reason::NO_CHANGE), "HelmSkip", false),
            (failed(reason::INSTALL_FAILED), "HelmInstallFailed", true),
            (failed(reason::UPGRADE_FAILED), "HelmUpgradeFailed", true),
            (failed(reason::ROLLBACK_FAILED), "HelmRollbackFailed", true),
            (
                failed(reason::UNINSTALL_FAILED),
                "HelmUninstallFailed",
                true,
            ),
            (
                failed(reason::HELM_UNAVAILABLE),
                "HelmConfigInitFailed",
                true,
            ),
            (failed(reason::CHART_NOT_LOADED), "ChartNotLoaded", true),
            (
                failed(reason::VERSION_NOT_FOUND),
                "ChartVersionNotFound",
                true,
            ),
            (failed(reason::VERSION_INVALID), "ChartVersionInvalid", true),
            (failed(reason::VALUES_TOO_LARGE), "ClusterError", true),
        ] {
            for previous in others.iter().map(Some).chain([None]) {
                let events = transition_events(previous, &current);
                assert_eq!(reasons(&events), [reason], "{previous:?}");
                assert_eq!(events[0].warning, warning, "{reason}");
            }
            assert!(
                transition_events(Some(&current), &current).is_empty(),
                "{reason}"
            );
        }
    }

    #[test]
    fn uninstalled_deployment_release_has_its_own_event() {
        let order = DesiredDeployment {
            name: "acme".to_owned(),
            ..DesiredDeployment::default()
        };
        let deployment = ReleaseOwner::Deployment(Arc::new(order));
        let tenant = ReleaseOwner::Tenant(Arc::new(tenant()));
        let gone = Some(Status::Uninstalled);
        let (installs, upgrades) = ("HelmInstallStart", "HelmUpgradeStart");
        for (owner, newest, started, expected) in [
            (&deployment, gone, installs, "ReleaseNotInstalled"),
            (&deployment, gone, upgrades, "ReleaseNotInstalled"),
            (&deployment, gone, "ReleaseLocked", "ReleaseLocked"),
            (&deployment, Some(Status::Deployed), upgrades, upgrades),
            (&deployment, None, installs, installs),
            (&tenant, gone, installs, installs),
        ] {
            let newest = newest.map(|status| foreign_revision(1, status));
            let event = ObjectEvent::normal(started, "");
            let event = reinstallation_event(owner, newest.as_ref(), event);
            assert_eq!(event.reason, expected, "{owner:?} {newest:?}");
        }
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
            let now = Timestamp::UNIX_EPOCH;
            let phase = status(&tenant(), "edge-1", &current, None, None, skip, now).phase;
            if let Some(message) = message {
                assert_eq!(phase.as_deref(), Some(message), "{current:?} {skip}");
            }
        }
    }

    #[test]
    fn unready_tenant_is_reconciling_until_krypton_gives_up() {
        use krypton_types::tenant::UpcomingStepKind::{GivenUp, Retry};
        let (failed, installed) = (failed(reason::UPGRADE_FAILED), ready(reason::INSTALLED));
        let mut tenant = tenant();
        for (current, step, expected) in [
            (&failed, Some(Retry), Some(conditions::RECONCILING)),
            (&failed, Some(GivenUp), Some(conditions::STALLED)),
            (&installed, None, None),
        ] {
            let next = step.map(|step| UpcomingStep::new(step, None, 1));
            let now = Timestamp::UNIX_EPOCH;
            let written = status(&tenant, "edge-1", current, next, None, false, now);
            let find = |type_: &str| conditions::find(&written.conditions, type_);
            let ready = find(conditions::READY).unwrap();
            let shown: Vec<&str> = [conditions::RECONCILING, conditions::STALLED]
                .into_iter()
                .filter(|type_| find(type_).is_some_and(|it| it.message == ready.message))
                .collect();
            assert_eq!(shown, Vec::from_iter(expected), "{current:?}");
            tenant.status = Some(written);
        }
    }

    #[test]
    fn unchanged_status_keeps_its_timestamps() {
        let mut tenant = tenant();
        tenant.metadata.generation = Some(3);
        let ready = ready(reason::INSTALLED);
        let at = |second| Timestamp::from_second(second).unwrap();
        let first = status(&tenant, "edge-1", &ready, None, Some("r/c:1"), false, at(1));
        tenant.status = Some(first.clone());
        let second = status(&tenant, "edge-1", &ready, None, Some("r/c:1"), false, at(2));
        assert_eq!(first, second);
        assert_eq!(first.observed_generation, Some(3));
        assert_eq!(first.phase.as_deref(), Some("Ready"));
    }
}
