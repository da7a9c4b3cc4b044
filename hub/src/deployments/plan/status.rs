//! The status of a KryptonDeployment: the condition `Ready` with its phase, message and events. Computed from
//! the target and the members' reports.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use krypton_crds::krypton_deployment::{DeploymentPhase, KryptonDeploymentStatus, Placement};
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::{
    self, ClusterState, Outlook, READY, State, TARGET_RESOLVED, Truth, reason,
};
use krypton_types::names;
use krypton_types::text::truncated;

use super::{DeploymentView, Repair, Site};

/// Reasons of the condition `Ready` that the shared reasons lack.
mod ready {
    pub(super) const DEPLOYED: &str = "Deployed";
    pub(super) const NOT_READY: &str = "NotReady";
    pub(super) const REPAIR_TRIGGERED: &str = "RepairTriggered";
    pub(super) const ACCOUNT_MISSING: &str = "AccountMissing";
    pub(super) const EDGE_UNAVAILABLE: &str = "EdgeUnavailable";
    pub(super) const HELM_FAILED: &str = "HelmFailed";
    pub(super) const DELETING: &str = "Deleting";
}

/// The condition `Ready`, with the matching phase and human-readable line.
pub(super) struct Assessment {
    phase: DeploymentPhase,
    pub(super) ready: State,
    /// Matters only if the object is not ready.
    outlook: Outlook,
    last_message: String,
}

impl Assessment {
    /// Appends the text to both messages.
    fn append(mut self, text: &str) -> Self {
        for line in [&mut self.ready.message, &mut self.last_message] {
            line.push_str("; ");
            line.push_str(text);
        }
        self
    }
}

impl DeploymentView<'_> {
    pub(super) fn assessment(&self, target: Option<&Site>, has_account: bool) -> Assessment {
        let region = self.region();
        if !has_account {
            let message = "spec.account.name is empty; set the name of the account";
            return Assessment {
                outlook: Outlook::Stalled,
                ..error_assessment(State::new(Truth::False, ready::ACCOUNT_MISSING, message))
            };
        }
        let Some(target) = target else {
            let unresolved = self.target.as_ref().err();
            let message = unresolved.map_or("", |unresolved| &unresolved.message);
            let truth = unresolved.map_or(Truth::Unknown, |unresolved| unresolved.truth);
            let outlook = unresolved.map(|unresolved| Outlook::from_reason(&unresolved.reason));
            let line = format!("Edge cluster {region} not available: {message}");
            return Assessment {
                phase: match truth {
                    Truth::False => DeploymentPhase::Error,
                    _ => DeploymentPhase::Pending,
                },
                outlook: outlook.unwrap_or(Outlook::Reconciling),
                ..error_assessment(State::new(truth, ready::EDGE_UNAVAILABLE, line))
            };
        };
        let cluster = &target.placement.cluster;
        if let Some(cause) = silence_reason(target) {
            let line = format!("Edge cluster {region} not available: {cause}");
            return error_assessment(State::new(Truth::Unknown, ready::EDGE_UNAVAILABLE, line));
        }
        if target.cluster.is_full {
            let message = format!(
                "cluster {cluster} has the maximum number or size of KryptonDeployments; delete some of them"
            );
            return Assessment {
                outlook: Outlook::Stalled,
                ..error_assessment(State::new(Truth::False, ready::NOT_READY, message))
            };
        }
        let generation = self.object.metadata.generation.unwrap_or_default();
        let report = self.report_on(target).map(|stored| &stored.report);
        let Some(report) = report.filter(|it| it.observed_generation == generation && !it.gone)
        else {
            let message = format!("waiting for the report of cluster {cluster}");
            return pending_assessment(State::new(Truth::False, ready::NOT_READY, message));
        };
        let assessment = Assessment {
            outlook: Outlook::from_state(&report.state, report.next),
            ..self.assess_report(&report.state, cluster)
        };
        let assessment = self.with_repair(assessment);
        // A ready release may still lag behind the desired state, such as when it is paused.
        let progress = report.state.progress.as_ref();
        match progress.filter(|it| it.reason == reason::PAUSED) {
            Some(paused) => assessment.append(&paused.message),
            None => assessment,
        }
    }

    /// Shows that the release is being repaired, from the repair until it is ready or has failed. One status
    /// shows a repair that ended before its report arrived.
    fn with_repair(&self, mut assessment: Assessment) -> Assessment {
        let status = self.object.status.as_ref();
        let previous = status.and_then(|status| conditions::find(&status.conditions, READY));
        let was = |reason: &str| {
            previous
                .as_ref()
                .is_some_and(|ready| ready.reason == reason)
        };
        let is_repaired = self.repair.is_some();
        let ready = &mut assessment.ready;
        if ready.reason == ready::NOT_READY && (was(ready::REPAIR_TRIGGERED) || is_repaired) {
            ready::REPAIR_TRIGGERED.clone_into(&mut ready.reason);
        } else if ready.reason == ready::DEPLOYED && was(ready::DEPLOYED) && is_repaired {
            let message = ready.message.clone();
            let state = State::new(Truth::False, ready::REPAIR_TRIGGERED, message);
            return pending_assessment(state).append("the release was repaired");
        }
        assessment
    }

    /// Returns the readiness from the member's report on the latest order.
    fn assess_report(&self, state: &ClusterState, cluster: &str) -> Assessment {
        if let Some(failure) = failure_assessment(state, cluster) {
            return failure;
        }
        match state.ready.truth {
            Truth::True => {
                let message = format!("cluster {cluster}: {}", state.ready.message);
                Assessment {
                    phase: DeploymentPhase::Ready,
                    ready: State::new(Truth::True, ready::DEPLOYED, message),
                    outlook: Outlook::Reconciling,
                    last_message: format!("Successfully deployed to region {}", self.region()),
                }
            }
            truth => {
                let progress = state.progress.as_ref();
                let progress =
                    progress.filter(|it| it.truth == Truth::True || state.ready.message.is_empty());
                let shown = progress.unwrap_or(&state.ready);
                let message = format!("cluster {cluster}: {}: {}", shown.reason, shown.message);
                pending_assessment(State::new(truth, ready::NOT_READY, message))
            }
        }
    }

    /// Adds the earlier locations of the release to the message.
    pub(super) fn with_previous_sites(
        &self,
        assessment: Assessment,
        current_uid: &str,
    ) -> Assessment {
        let previous = self
            .sites
            .iter()
            .filter(|it| it.placement.cluster_uid != current_uid);
        let additions: Vec<String> = previous
            .map(|site| {
                let cluster = &site.placement.cluster;
                let progress = match site.placement.removing {
                    true => "is being uninstalled",
                    false => "stays until this one is ready",
                };
                match silence_reason(site) {
                    Some(cause) => format!(
                        "the release on {cluster} {progress}; {cause}; to stop waiting for {cluster}, set annotation {}=true",
                        names::ORPHAN_ANNOTATION
                    ),
                    None => format!("the release on {cluster} {progress}"),
                }
            })
            .collect();
        match additions.is_empty() {
            true => assessment,
            false => assessment.append(&additions.join("; ")),
        }
    }

    pub(super) fn assess_deletion(
        &self,
        placements: &[Placement],
        is_target_unknown: bool,
    ) -> Assessment {
        let orphan_hint = format!(
            "annotation {}=true removes it and keeps the release",
            names::ORPHAN_ANNOTATION
        );
        let target = self.target.as_ref();
        let site = placements.first().and_then(|placement| {
            let mut sites = self.sites.iter().chain(target.ok());
            let is_placed = |site: &&Site| site.placement.cluster_uid == placement.cluster_uid;
            sites.find(is_placed)
        });
        let line = match site {
            None if is_target_unknown => {
                let cause = target.err().map_or("", |cause| &cause.message);
                format!("deletion waits, because its cluster is unknown: {cause}; {orphan_hint}")
            }
            None => "nothing is left to uninstall".to_owned(),
            Some(site) => {
                let cluster = &site.placement.cluster;
                let state = self.report_on(site).map(|stored| &stored.report.state);
                let failure = state.and_then(|state| failure_assessment(state, cluster));
                let progress = state.and_then(|state| state.progress.as_ref());
                if let Some(cause) = silence_reason(site) {
                    format!("deletion waits: {cause}; {orphan_hint}")
                } else if !site.placement.removing {
                    "checking the deletion".to_owned()
                } else if let Some(failure) = failure {
                    return failure;
                } else if let Some(progress) = progress {
                    format!("cluster {cluster}: {}", progress.message)
                } else {
                    format!("waiting for the report of cluster {cluster}")
                }
            }
        };
        pending_assessment(State::new(Truth::False, ready::DELETING, line))
    }

    /// Returns the status and its events. A changed `Ready` reason emits an event.
    pub(super) fn status(
        &self,
        assessment: Assessment,
    ) -> (KryptonDeploymentStatus, Vec<ObjectEvent>) {
        let previous = self.object.status.as_ref();
        let mut conditions: Vec<Condition> =
            previous.map_or_else(Vec::new, |status| status.conditions.clone());
        let generation = self.object.metadata.generation.unwrap_or_default();
        let target = match &self.target {
            Err(state) => state.clone(),
            Ok(site) => {
                let cluster = &site.placement.cluster;
                let member = site.cluster.member.as_ref();
                match member.and_then(|(_, member)| member.resolved.clone()) {
                    Some(state) => State {
                        message: format!("EdgeCluster {cluster}: {}", state.message),
                        ..state
                    },
                    None => {
                        let message = format!("EdgeCluster {cluster} is new");
                        State::new(Truth::Unknown, reason::STARTING, message)
                    }
                }
            }
        };
        let previous_reason = conditions::find(&conditions, READY).map(|state| state.reason);
        let (ready, outlook) = (&assessment.ready, assessment.outlook);
        for (type_, state) in [(TARGET_RESOLVED, &target), (READY, ready)] {
            conditions::set(&mut conditions, type_, state, generation, self.now);
        }
        conditions::set_progress(&mut conditions, ready, outlook, generation, self.now);
        let mut events = Vec::new();
        let target = self.target.as_ref().ok();
        let report = target.and_then(|site| self.report_on(site));
        let applied_chart = report.map(|stored| stored.report.applied_chart.clone());
        let applied_chart = applied_chart.filter(|chart| !chart.is_empty());
        let previous_chart = previous.and_then(|status| status.last_applied_chart.clone());
        if assessment.ready.truth == Truth::True
            && let Some(chart) = applied_chart.as_ref()
            && previous_chart.as_ref() != Some(chart)
        {
            let message = format!("{}: {chart}", self.release_description());
            events.push(ObjectEvent::normal("HelmDeployed", message));
        }
        // The hub records a correction as an event of the same reason.
        let is_recorded = assessment.ready.reason == ready::REPAIR_TRIGGERED
            && self.repair == Some(Repair::Corrected);
        if previous_reason.as_deref() != Some(&assessment.ready.reason) && !is_recorded {
            events.push(ready_event(&assessment.ready));
        }
        // The member confirms the request. The value is the hub's own text.
        let requested = self.annotation(names::RECONCILE_REQUESTED_ANNOTATION);
        let handled = requested.filter(|request| {
            report.is_some_and(|stored| {
                stored.is_current && stored.report.handled_request.as_deref() == Some(*request)
            })
        });
        let status = KryptonDeploymentStatus {
            phase: Some(assessment.phase),
            last_message: Some(truncated(assessment.last_message, conditions::MESSAGE_MAX)),
            last_applied_chart: applied_chart.or(previous_chart),
            observed_generation: Some(generation),
            last_handled_reconcile_at: handled
                .or_else(|| previous?.last_handled_reconcile_at.as_deref())
                .map(str::to_owned),
            conditions,
            placements: None,
            history: self.history(),
            hub_epoch: previous.and_then(|status| status.hub_epoch),
        };
        (status, events)
    }
}

fn ready_event(state: &State) -> ObjectEvent {
    let message = state.message.clone();
    match state.reason.as_str() {
        ready::DEPLOYED => ObjectEvent::normal("Ready", message),
        ready::ACCOUNT_MISSING => ObjectEvent::warning("AccountMissing", message),
        ready::EDGE_UNAVAILABLE => ObjectEvent::warning("EdgeUnavailable", message),
        ready::DELETING => ObjectEvent::normal("DeleteStarted", message),
        ready::NOT_READY => ObjectEvent::normal("NotReady", message),
        ready::REPAIR_TRIGGERED => ObjectEvent::warning("RepairTriggered", message),
        reason::HEALTH_CHECK_FAILED => ObjectEvent::warning("HealthCheckFailed", message),
        reason::UNINSTALL_FAILED => ObjectEvent::warning("HelmUninstallFailed", message),
        ready::HELM_FAILED => ObjectEvent::warning("HelmDeployFailed", message),
        _ => ObjectEvent::warning("Refused", message),
    }
}

/// Returns why the site's member sends no current report.
fn silence_reason(site: &Site) -> Option<String> {
    let cluster = &site.placement.cluster;
    let Some((name, target)) = &site.cluster.member else {
        return Some(format!(
            "EdgeCluster {cluster} does not exist or represents another cluster"
        ));
    };
    let connected = target.connected.as_ref();
    let disconnected = connected.filter(|state| state.truth != Truth::True);
    disconnected.map(|state| format!("EdgeCluster {name}: {}: {}", state.reason, state.message))
}

/// Maps Helm and chart failures to the single reason `HelmFailed`.
fn failure_reason(reported: &str) -> &str {
    match reported {
        reason::INSTALL_FAILED
        | reason::UPGRADE_FAILED
        | reason::ROLLBACK_FAILED
        | reason::HELM_UNAVAILABLE => ready::HELM_FAILED,
        fetch if reason::is_chart_fetch(fetch) => ready::HELM_FAILED,
        other => other,
    }
}

/// Returns the failure that the member reports.
fn failure_assessment(state: &ClusterState, cluster: &str) -> Option<Assessment> {
    let failure = state.error.as_ref()?;
    let message = format!("cluster {cluster}: {}", failure.message);
    let state = State::new(Truth::False, failure_reason(&failure.reason), message);
    (failure.truth == Truth::True).then(|| error_assessment(state))
}

fn error_assessment(state: State) -> Assessment {
    Assessment {
        phase: DeploymentPhase::Error,
        outlook: Outlook::from_reason(&state.reason),
        last_message: state.message.clone(),
        ready: state,
    }
}

fn pending_assessment(state: State) -> Assessment {
    Assessment {
        phase: DeploymentPhase::Pending,
        ..error_assessment(state)
    }
}
