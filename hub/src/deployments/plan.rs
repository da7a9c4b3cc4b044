//! Decides on one KryptonDeployment: the orders for members, and the object's finalizers, status and
//! events. Pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use krypton_crds::krypton_deployment::{
    DeploymentPhase, KryptonDeployment, KryptonDeploymentStatus, Placement,
};
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::{self, ClusterState, READY, State, TARGET_RESOLVED, Truth, reason};
use krypton_types::deployment::{DesiredDeployment, PASSED_ANNOTATIONS, ReportedEvent};
use krypton_types::desired::drift::{DriftMode, DriftPolicy};
use krypton_types::names;
use kube::ResourceExt as _;

use crate::deployments::target::TargetMember;
use crate::leader::home_writer::DeletionCause;
use crate::members::deployment_orders::DeploymentOrderReport;

/// Maximum size in bytes of an annotation that is passed on. Members persist their orders.
const ANNOTATION_MAX: usize = 4 * 1024;

/// Reasons of the condition `Ready` that the shared reasons lack.
pub(super) mod ready {
    pub(in crate::deployments) const DEPLOYED: &str = "Deployed";
    pub(in crate::deployments) const NOT_READY: &str = "NotReady";
    pub(in crate::deployments) const ACCOUNT_MISSING: &str = "AccountMissing";
    pub(in crate::deployments) const EDGE_UNAVAILABLE: &str = "EdgeUnavailable";
    pub(in crate::deployments) const HELM_FAILED: &str = "HelmFailed";
    pub(in crate::deployments) const DELETING: &str = "Deleting";
}

/// The hub's view of a cluster on which the release is or will be ordered.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterView {
    /// The acting member. `None` if the cluster has no member.
    pub(super) member: Option<(String, TargetMember)>,
    pub(super) report: Option<DeploymentOrderReport>,
    /// Whether the orders exceed the member's limit.
    pub(super) is_full: bool,
}

/// A placement that is recorded, or is about to be.
#[derive(Clone, Debug)]
pub(super) struct Site {
    pub(super) placement: Placement,
    pub(super) cluster: ClusterView,
}

/// All inputs of a decision.
pub(super) struct DeploymentView<'a> {
    pub(super) object: &'a KryptonDeployment,
    /// The target cluster, or the state for `TargetClusterResolved` without one.
    pub(super) target: Result<Site, State>,
    /// The recorded placements.
    pub(super) sites: Vec<Site>,
    /// Why the object is deleted. The hub reads it again before it acts on the deletion.
    pub(super) deletion: Option<DeletionCause>,
    pub(super) drift_check_seconds: u32,
    pub(super) now: Timestamp,
}

fn normal_event(reason: &'static str, message: impl Into<String>) -> ObjectEvent {
    ObjectEvent {
        warning: false,
        reason,
        message: message.into(),
    }
}

pub(super) fn warning_event(reason: &'static str, message: impl Into<String>) -> ObjectEvent {
    ObjectEvent {
        warning: true,
        ..normal_event(reason, message)
    }
}

#[derive(Debug)]
pub(super) struct DeploymentDecision {
    /// By member.
    pub(super) orders: BTreeMap<String, DesiredDeployment>,
    /// The new finalizers. `None` if they do not change.
    pub(super) finalizers: Option<Vec<String>>,
    /// Events to record after the finalizers are written.
    pub(super) finalizer_events: Vec<ObjectEvent>,
    pub(super) status: KryptonDeploymentStatus,
    /// Events to record after the status is written.
    pub(super) status_events: Vec<ObjectEvent>,
    /// Whether the hub must read the deletion from the API server.
    pub(super) must_read_deletion: bool,
}

/// Decides on the view's object.
pub(super) fn decide(view: &DeploymentView<'_>) -> DeploymentDecision {
    if view.object.metadata.deletion_timestamp.is_some() {
        view.decide_deleted()
    } else {
        view.decide_existing()
    }
}

/// The condition `Ready`, with the matching phase and human-readable line.
struct Assessment {
    phase: DeploymentPhase,
    ready: State,
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
    fn region(&self) -> &str {
        &self.object.spec.region.name
    }

    fn has_finalizer(&self) -> bool {
        let mut finalizers = self.object.finalizers().iter();
        finalizers.any(|name| name == names::DEPLOYMENT_FINALIZER)
    }

    fn annotation(&self, name: &str) -> Option<&str> {
        self.object.annotations().get(name).map(String::as_str)
    }

    fn is_orphaned(&self) -> bool {
        self.annotation(names::ORPHAN_ANNOTATION) == Some("true")
    }

    fn release_description(&self) -> String {
        let name = self.object.name_any();
        format!(
            "release {} in namespace {name}",
            names::deployment_release(&name)
        )
    }

    /// Returns the report on this very object. A report with another UID is about an earlier object of the
    /// same name.
    fn report_on<'s>(&self, site: &'s Site) -> Option<&'s DeploymentOrderReport> {
        let stored = site.cluster.report.as_ref()?;
        let uid = self.object.metadata.uid.as_deref().unwrap_or_default();
        (stored.report.uid == uid).then_some(stored)
    }

    /// Returns the events that members reported for this object, by member.
    pub(super) fn reported_events(&self) -> Vec<(String, Vec<ReportedEvent>)> {
        let sites = self.sites.iter().chain(self.target.as_ref().ok());
        let current_events = |site: &Site| {
            let stored = self.report_on(site).filter(|stored| stored.is_current)?;
            let (member, _) = site.cluster.member.as_ref()?;
            Some((member.clone(), stored.report.events.clone()))
        };
        sites.filter_map(current_events).collect()
    }

    /// Returns whether the member reports that nothing is left. The report must answer this recorded
    /// removal order: an earlier order's report proves nothing.
    fn is_uninstalled(&self, site: &Site) -> bool {
        let generation = self.object.metadata.generation.unwrap_or_default();
        site.placement.removing
            && self.report_on(site).is_some_and(|stored| {
                stored.is_current
                    && stored.report.gone
                    && stored.report.observed_generation == generation
            })
    }

    fn order(&self, remove: bool) -> DesiredDeployment {
        let meta = &self.object.metadata;
        let passed_on = |name: &&str| {
            let value = self
                .annotation(name)
                .filter(|value| value.len() <= ANNOTATION_MAX)?;
            // A removal needs no other annotations. Without them the order stays small and fits.
            (!remove).then(|| ((*name).to_owned(), value.to_owned()))
        };
        DesiredDeployment {
            namespace: self.object.namespace().unwrap_or_default(),
            name: self.object.name_any(),
            uid: meta.uid.clone().unwrap_or_default(),
            generation: meta.generation.unwrap_or_default(),
            created: meta
                .creation_timestamp
                .as_ref()
                .map_or(0, |time| time.0.as_second()),
            remove,
            orphan: remove && self.is_orphaned(),
            paused: (self.annotation(names::PAUSED_ANNOTATION))
                .is_some_and(|value| value != "false"),
            requested: self
                .annotation(names::RECONCILE_REQUESTED_ANNOTATION)
                .filter(|value| value.len() <= ANNOTATION_MAX)
                .map(str::to_owned),
            // Deployments are always healed, regardless of the fleet's drift mode for Tenants.
            drift: Some(DriftPolicy {
                mode: DriftMode::Heal,
                interval_seconds: self.drift_check_seconds,
            }),
            annotations: PASSED_ANNOTATIONS.iter().filter_map(passed_on).collect(),
        }
    }

    /// Returns the new finalizers, or `None` if they do not change.
    fn changed_finalizers(&self, wanted: bool) -> Option<Vec<String>> {
        let mut finalizers = self.object.finalizers().to_vec();
        finalizers.retain(|name| name != names::DEPLOYMENT_FINALIZER);
        if wanted {
            finalizers.push(names::DEPLOYMENT_FINALIZER.to_owned());
        }
        (wanted != self.has_finalizer()).then_some(finalizers)
    }

    /// Returns the recorded placements. `None` before the first one.
    fn recorded_placements(&self) -> Option<&[Placement]> {
        self.object.status.as_ref()?.placements.as_deref()
    }

    /// Decides on an object that is not deleted.
    fn decide_existing(&self) -> DeploymentDecision {
        let has_account = !self.object.spec.account.name.is_empty();
        let target = self.target.as_ref().ok().filter(|_| has_account);
        let assessment = self.assessment(target, has_account);
        let (mut events, mut placements) = (Vec::new(), Vec::new());
        let mut orders = BTreeMap::new();
        let has_finalizer = self.has_finalizer();
        let mut add_order = |site: &Site, remove: bool| {
            if has_finalizer && let Some((member, _)) = &site.cluster.member {
                orders.insert(member.clone(), self.order(remove));
            }
        };
        if let Some(target) = target {
            let uid = &target.placement.cluster_uid;
            let recorded_site = self
                .sites
                .iter()
                .find(|site| site.placement.cluster_uid == *uid);
            // The release is ready there, according to a report on this very order.
            let is_ready_at_target = assessment.ready.truth == Truth::True
                && recorded_site.is_some_and(|site| !site.placement.removing)
                && self
                    .report_on(target)
                    .is_some_and(|stored| stored.is_current);
            for site in &self.sites {
                if site.placement.cluster_uid == *uid {
                    // The same cluster may have another member name now, and may be the target again.
                    placements.push(target.placement.clone());
                    if !site.placement.removing && !target.cluster.is_full {
                        add_order(target, false);
                    }
                } else if self.is_orphaned() || self.is_uninstalled(site) {
                    events.push(self.removal_event(site));
                } else {
                    // An earlier location is removed once the release at the new one is ready. That is final.
                    let removing = site.placement.removing || is_ready_at_target;
                    placements.push(Placement {
                        removing,
                        ..site.placement.clone()
                    });
                    add_order(site, site.placement.removing);
                }
            }
            if recorded_site.is_none() {
                // Record the placement before ordering it. After a crash, the next leader finds it again.
                placements.push(target.placement.clone());
                let (cluster, region) = (&target.placement.cluster, self.region());
                let message = format!("routed to cluster {cluster} of region {region}");
                events.push(normal_event("Routing", message));
            }
        } else {
            // No information requires a move, so the release stays. A member that no longer allows this
            // namespace receives no order.
            let namespace = self.object.namespace().unwrap_or_default();
            for site in &self.sites {
                placements.push(site.placement.clone());
                let refusal = |(name, member): &(String, TargetMember)| {
                    member.allowed.refusal(name, &namespace)
                };
                let refused = site.cluster.member.as_ref().and_then(refusal);
                if refused.is_none() {
                    add_order(site, site.placement.removing);
                }
            }
        }
        let finalizers = self.changed_finalizers(has_finalizer || target.is_some());
        let finalizer_events = finalizers.as_ref().map(|_| {
            let message = format!("account {} accepted", self.object.spec.account.name);
            vec![
                normal_event("AccountValidated", message),
                normal_event("FinalizerAdded", names::DEPLOYMENT_FINALIZER),
            ]
        });
        let assessment = match target {
            Some(target) => self.with_previous_sites(assessment, &target.placement.cluster_uid),
            None => assessment,
        };
        self.decision(
            orders,
            (finalizers, finalizer_events),
            (assessment, placements, events),
        )
    }

    /// Decides on a deleted object.
    fn decide_deleted(&self) -> DeploymentDecision {
        let is_confirmed = self.deletion == Some(DeletionCause::Object);
        let leaves_release = self.is_orphaned() || self.deletion == Some(DeletionCause::Crd);
        let has_finalizer = self.has_finalizer();
        let (mut events, mut placements) = (Vec::new(), Vec::new());
        let mut orders = BTreeMap::new();
        // An object created by krypton-operator has the finalizer but no recorded placements.
        let is_unrecorded = has_finalizer && self.recorded_placements().is_none();
        if has_finalizer && leaves_release {
            let cause = match self.deletion {
                Some(DeletionCause::Crd) => "all KryptonDeployments are deleted with their CRD",
                _ => "as it is annotated",
            };
            let clusters: Vec<&str> = self
                .sites
                .iter()
                .map(|it| it.placement.cluster.as_str())
                .collect();
            if !clusters.is_empty() || is_unrecorded {
                let release = self.release_description();
                let clusters = match clusters.is_empty() {
                    true => "wherever it was".to_owned(),
                    false => clusters.join(", "),
                };
                let message = format!("{release} is left where it is, on {clusters}: {cause}");
                events.push(warning_event("Orphaned", message));
            }
        } else if has_finalizer {
            let unrecorded_target = self.target.as_ref().ok().filter(|_| is_unrecorded);
            for site in self.sites.iter().chain(unrecorded_target) {
                if self.is_uninstalled(site) {
                    events.push(self.removal_event(site));
                    continue;
                }
                let removing = site.placement.removing || is_confirmed;
                placements.push(Placement {
                    removing,
                    ..site.placement.clone()
                });
                // Until the deletion is confirmed, the order is paused and changes nothing.
                if let Some((member, _)) = site.cluster.member.as_ref().filter(|_| !is_unrecorded) {
                    let order = self.order(site.placement.removing);
                    let paused = order.paused || !site.placement.removing;
                    orders.insert(member.clone(), DesiredDeployment { paused, ..order });
                }
            }
        }
        let is_target_unknown = is_unrecorded && !leaves_release && self.target.is_err();
        let is_done = placements.is_empty() && !is_target_unknown;
        let finalizers = self.changed_finalizers(has_finalizer && !is_done);
        let finalizer_events = finalizers.as_ref().map(|_| {
            events.push(normal_event(
                "FinalizerRemoved",
                names::DEPLOYMENT_FINALIZER,
            ));
            std::mem::take(&mut events)
        });
        let needs_read = has_finalizer && !is_done && !leaves_release && self.deletion.is_none();
        let assessment = self.assess_deletion(&placements, is_target_unknown);
        DeploymentDecision {
            must_read_deletion: needs_read
                && placements.iter().any(|placement| !placement.removing),
            ..self.decision(
                orders,
                (finalizers, finalizer_events),
                (assessment, placements, events),
            )
        }
    }

    fn decision(
        &self,
        orders: BTreeMap<String, DesiredDeployment>,
        (finalizers, finalizer_events): (Option<Vec<String>>, Option<Vec<ObjectEvent>>),
        (assessment, placements, events): (Assessment, Vec<Placement>, Vec<ObjectEvent>),
    ) -> DeploymentDecision {
        let (mut status, mut status_events) = self.status(assessment);
        let recorded = self.recorded_placements();
        status.placements = (recorded.is_some() || !placements.is_empty()).then_some(placements);
        if status.placements.as_deref() != recorded {
            status_events.splice(0..0, events);
        }
        DeploymentDecision {
            orders,
            finalizers,
            finalizer_events: finalizer_events.unwrap_or_default(),
            status,
            status_events,
            must_read_deletion: false,
        }
    }

    fn removal_event(&self, site: &Site) -> ObjectEvent {
        let cluster = &site.placement.cluster;
        if self.is_uninstalled(site) {
            let ready = self
                .report_on(site)
                .map(|stored| &stored.report.state.ready);
            let uninstalled = ready.filter(|ready| ready.reason == reason::UNINSTALLED);
            let how = uninstalled.map_or("the release is uninstalled", |ready| &ready.message);
            return normal_event("HelmUninstalled", format!("cluster {cluster}: {how}"));
        }
        let message = format!(
            "{} is left where it is, on {cluster}: as it is annotated",
            self.release_description()
        );
        warning_event("Orphaned", message)
    }

    fn assessment(&self, target: Option<&Site>, has_account: bool) -> Assessment {
        let region = self.region();
        if !has_account {
            let message = "spec.account.name is empty; set the name of the account";
            return error_assessment(State::new(Truth::False, ready::ACCOUNT_MISSING, message));
        }
        let Some(target) = target else {
            let unresolved = self.target.as_ref().err();
            let message = unresolved.map_or("", |unresolved| &unresolved.message);
            let truth = unresolved.map_or(Truth::Unknown, |unresolved| unresolved.truth);
            let line = format!("Edge cluster {region} not available: {message}");
            return Assessment {
                phase: match truth {
                    Truth::False => DeploymentPhase::Error,
                    _ => DeploymentPhase::Pending,
                },
                ready: State::new(truth, ready::EDGE_UNAVAILABLE, line.clone()),
                last_message: line,
            };
        };
        let cluster = &target.placement.cluster;
        if let Some(cause) = silence_reason(target) {
            let line = format!("Edge cluster {region} not available: {cause}");
            return Assessment {
                last_message: line.clone(),
                ..error_assessment(State::new(Truth::Unknown, ready::EDGE_UNAVAILABLE, line))
            };
        }
        if target.cluster.is_full {
            let message =
                format!("cluster {cluster} has as many deployments as it takes; take some away");
            return error_assessment(State::new(Truth::False, ready::NOT_READY, message));
        }
        let generation = self.object.metadata.generation.unwrap_or_default();
        let report = self.report_on(target).map(|stored| &stored.report);
        let Some(report) = report.filter(|it| it.observed_generation == generation && !it.gone)
        else {
            let message = format!("waiting for the report of cluster {cluster}");
            return pending_assessment(State::new(Truth::False, ready::NOT_READY, message));
        };
        let assessment = self.assess_report(&report.state, cluster);
        // A ready release may still lag behind the desired state, such as when it is paused.
        let progress = report.state.progress.as_ref();
        match progress.filter(|it| it.reason == reason::PAUSED) {
            Some(paused) => assessment.append(&paused.message),
            None => assessment,
        }
    }

    /// Returns the readiness from the member's report on the latest order.
    fn assess_report(&self, state: &ClusterState, cluster: &str) -> Assessment {
        if let Some(failure) = state.error.as_ref().filter(|it| it.truth == Truth::True) {
            return error_assessment(State::new(
                Truth::False,
                failure_reason(&failure.reason),
                format!("cluster {cluster}: {}", failure.message),
            ));
        }
        match state.ready.truth {
            Truth::True => Assessment {
                phase: DeploymentPhase::Ready,
                ready: State::new(
                    Truth::True,
                    ready::DEPLOYED,
                    format!("cluster {cluster}: {}", state.ready.message),
                ),
                last_message: format!("Successfully deployed to region {}", self.region()),
            },
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
    fn with_previous_sites(&self, assessment: Assessment, current_uid: &str) -> Assessment {
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

    fn assess_deletion(&self, placements: &[Placement], is_target_unknown: bool) -> Assessment {
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
                let failure = state.and_then(|state| state.error.as_ref());
                let failure = failure.filter(|it| it.truth == Truth::True);
                let progress = state.and_then(|state| state.progress.as_ref());
                if let Some(cause) = silence_reason(site) {
                    format!("deletion waits: {cause}; {orphan_hint}")
                } else if !site.placement.removing {
                    "checking the deletion".to_owned()
                } else if let Some(failure) = failure {
                    let message = format!("cluster {cluster}: {}", failure.message);
                    return error_assessment(State::new(
                        Truth::False,
                        failure_reason(&failure.reason),
                        message,
                    ));
                } else {
                    match progress {
                        Some(progress) => format!("cluster {cluster}: {}", progress.message),
                        None => format!("waiting for the report of cluster {cluster}"),
                    }
                }
            }
        };
        pending_assessment(State::new(Truth::False, ready::DELETING, line))
    }

    /// Returns the status and its events. A changed `Ready` reason emits an event.
    fn status(&self, assessment: Assessment) -> (KryptonDeploymentStatus, Vec<ObjectEvent>) {
        let previous = self.object.status.as_ref();
        let mut conditions: Vec<Condition> =
            previous.map_or_else(Vec::new, |status| status.conditions.clone());
        let generation = self.object.metadata.generation.unwrap_or_default();
        let target = match &self.target {
            Err(state) => state.clone(),
            Ok(site) => {
                let member = site.cluster.member.as_ref();
                let resolved = member.and_then(|(_, member)| member.resolved.clone());
                resolved.map_or_else(
                    || {
                        State::new(
                            Truth::Unknown,
                            krypton_types::conditions::reason::STARTING,
                            format!("EdgeCluster {} is new", site.placement.cluster),
                        )
                    },
                    |state| State {
                        message: format!(
                            "EdgeCluster {}: {}",
                            site.placement.cluster, state.message
                        ),
                        ..state
                    },
                )
            }
        };
        let previous_reason = conditions::find(&conditions, READY).map(|state| state.reason);
        conditions::set(
            &mut conditions,
            TARGET_RESOLVED,
            &target,
            generation,
            self.now,
        );
        conditions::set(
            &mut conditions,
            READY,
            &assessment.ready,
            generation,
            self.now,
        );
        let mut events = Vec::new();
        let report = self
            .target
            .as_ref()
            .ok()
            .and_then(|site| self.report_on(site));
        let applied_chart = report.map(|stored| stored.report.applied_chart.clone());
        let applied_chart = applied_chart.filter(|chart| !chart.is_empty());
        let previous_chart = previous.and_then(|status| status.last_applied_chart.clone());
        if assessment.ready.truth == Truth::True
            && let Some(chart) = applied_chart.as_ref()
            && previous_chart.as_ref() != Some(chart)
        {
            events.push(normal_event(
                "HelmDeployed",
                format!("{}: {chart}", self.release_description()),
            ));
        }
        if previous_reason.as_deref() != Some(&assessment.ready.reason) {
            events.push(ready_event(&assessment.ready));
        }
        let status = KryptonDeploymentStatus {
            phase: Some(assessment.phase),
            last_message: Some(truncate(assessment.last_message)),
            last_applied_chart: applied_chart.or(previous_chart),
            observed_generation: Some(generation),
            conditions,
            placements: None,
            hub_epoch: previous.and_then(|status| status.hub_epoch),
        };
        (status, events)
    }
}

fn ready_event(state: &State) -> ObjectEvent {
    let message = state.message.clone();
    match state.reason.as_str() {
        ready::DEPLOYED => normal_event("Ready", message),
        ready::ACCOUNT_MISSING => warning_event("AccountMissing", message),
        ready::EDGE_UNAVAILABLE => warning_event("EdgeUnavailable", message),
        ready::DELETING => normal_event("DeleteStarted", message),
        ready::NOT_READY => normal_event("NotReady", message),
        reason::UNINSTALL_FAILED => warning_event("HelmUninstallFailed", message),
        ready::HELM_FAILED => warning_event("HelmDeployFailed", message),
        _ => warning_event("Refused", message),
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

fn error_assessment(state: State) -> Assessment {
    Assessment {
        phase: DeploymentPhase::Error,
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

fn truncate(mut message: String) -> String {
    message.truncate(message.floor_char_boundary(conditions::MESSAGE_MAX));
    message
}

#[cfg(test)]
mod tests;
