//! Decides on one KryptonDeployment: the orders for members, and the object's finalizers, status and
//! events. Pure.

mod history;
mod status;

use std::collections::BTreeMap;

use jiff::Timestamp;
use krypton_crds::krypton_deployment::{KryptonDeployment, KryptonDeploymentStatus, Placement};
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::deployment::{DesiredDeployment, PASSED_ANNOTATIONS, ReportedEvent};
use krypton_types::desired::drift::{DriftMode, DriftPolicy};
use krypton_types::names;
use kube::ResourceExt as _;

pub(super) use self::history::HistorySources;

use self::status::Assessment;
use crate::deployments::events::Repair;
use crate::deployments::target::TargetMember;
use crate::leader::home_writer::DeletionCause;
use crate::members::deployment_orders::DeploymentOrderReport;

/// Maximum size in bytes of an annotation that is passed on. Members persist their orders.
const ANNOTATION_MAX: usize = 4 * 1024;

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
    /// The last repair of the release since the object was ready.
    pub(super) repair: Option<Repair>,
    /// Whether the recorded history is already derived from the same object and reports.
    pub(super) is_history_settled: bool,
    pub(super) now: Timestamp,
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
        let annotation = |name: &str| {
            let value = self.annotation(name)?;
            (value.len() <= ANNOTATION_MAX).then(|| value.to_owned())
        };
        // A removal needs no other annotations. Without them the order stays small and fits.
        let passed_on = PASSED_ANNOTATIONS.iter().filter(|_| !remove);
        let passed_on = passed_on.filter_map(|&name| Some((name.to_owned(), annotation(name)?)));
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
            requested: annotation(names::RECONCILE_REQUESTED_ANNOTATION),
            // Deployments are always healed, regardless of the fleet's drift mode for Tenants.
            drift: Some(DriftPolicy {
                mode: DriftMode::Heal,
                interval_seconds: self.drift_check_seconds,
            }),
            annotations: passed_on.collect(),
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
                } else if self.is_uninstalled(site) {
                    events.push(self.removal_event(site));
                    // Without the order, the member drops its report before the removal is recorded.
                    add_order(site, true);
                } else if self.is_orphaned() {
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
                events.push(ObjectEvent::normal("Routing", message));
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
                ObjectEvent::normal("AccountValidated", message),
                ObjectEvent::normal("FinalizerAdded", names::DEPLOYMENT_FINALIZER),
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
                Some(DeletionCause::Crd) => "the CRD of KryptonDeployments is being deleted",
                _ => "the KryptonDeployment has the orphan annotation",
            };
            let clusters: Vec<&str> = self
                .sites
                .iter()
                .map(|it| it.placement.cluster.as_str())
                .collect();
            if !clusters.is_empty() || is_unrecorded {
                let release = self.release_description();
                let clusters = match clusters.is_empty() {
                    true => "its cluster".to_owned(),
                    false => clusters.join(", "),
                };
                let message = format!("kept {release} on {clusters}: {cause}");
                events.push(ObjectEvent::warning("Orphaned", message));
            }
        } else if has_finalizer {
            let unrecorded_target = self.target.as_ref().ok().filter(|_| is_unrecorded);
            for site in self.sites.iter().chain(unrecorded_target) {
                if self.is_uninstalled(site) {
                    events.push(self.removal_event(site));
                } else {
                    let removing = site.placement.removing || is_confirmed;
                    placements.push(Placement {
                        removing,
                        ..site.placement.clone()
                    });
                }
                // Until the deletion is confirmed, the order is paused and changes nothing. It stays after the
                // removal: without it, the member drops its report before the finalizer is removed.
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
            events.push(ObjectEvent::normal(
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
            let how = uninstalled.map_or("release uninstalled", |ready| &ready.message);
            return ObjectEvent::normal("HelmUninstalled", format!("cluster {cluster}: {how}"));
        }
        let message = format!(
            "kept {} on {cluster}: the KryptonDeployment has the orphan annotation",
            self.release_description()
        );
        ObjectEvent::warning("Orphaned", message)
    }
}

#[cfg(test)]
mod tests;
