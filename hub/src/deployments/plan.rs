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
use krypton_types::deployment::{DesiredDeployment, PASSED_ON, ReportedEvent};
use krypton_types::desired::drift::{DriftMode, DriftPolicy};
use krypton_types::names;
use kube::ResourceExt as _;

use crate::deployments::target::Cluster;
use crate::leader::home_writer::Deletion;
use crate::members::deployment_orders::Said;

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
pub(super) struct At {
    /// The acting member. `None` if the cluster has no member.
    pub(super) member: Option<(String, Cluster)>,
    pub(super) said: Option<Said>,
    /// Whether the orders exceed the member's limit.
    pub(super) full: bool,
}

/// A placement that is recorded, or is about to be.
#[derive(Clone, Debug)]
pub(super) struct Site {
    pub(super) placement: Placement,
    pub(super) at: At,
}

/// All inputs of a decision.
pub(super) struct View<'a> {
    pub(super) object: &'a KryptonDeployment,
    /// The target cluster, or the state for `TargetClusterResolved` without one.
    pub(super) target: Result<Site, State>,
    /// The recorded placements.
    pub(super) sites: Vec<Site>,
    /// Why the object is deleted. The hub reads it again before it acts on the deletion.
    pub(super) deletion: Option<Deletion>,
    pub(super) check_every: u32,
    pub(super) now: Timestamp,
}

fn news(reason: &'static str, message: impl Into<String>) -> ObjectEvent {
    ObjectEvent {
        warning: false,
        reason,
        message: message.into(),
    }
}

pub(super) fn warning(reason: &'static str, message: impl Into<String>) -> ObjectEvent {
    ObjectEvent {
        warning: true,
        ..news(reason, message)
    }
}

#[derive(Debug)]
pub(super) struct Decision {
    /// By member.
    pub(super) orders: BTreeMap<String, DesiredDeployment>,
    /// The new finalizers. `None` if they do not change.
    pub(super) finalizers: Option<Vec<String>>,
    /// Events to record after the finalizers are written.
    pub(super) with_finalizers: Vec<ObjectEvent>,
    pub(super) status: KryptonDeploymentStatus,
    /// Events to record after the status is written.
    pub(super) with_status: Vec<ObjectEvent>,
    /// Whether the hub must reread the deletion.
    pub(super) read: bool,
}

/// Decides on the view's object.
pub(super) fn decide(view: &View<'_>) -> Decision {
    if view.object.metadata.deletion_timestamp.is_some() {
        view.leave()
    } else {
        view.stay()
    }
}

/// The condition `Ready`, with the matching phase and human-readable line.
struct Assessment {
    phase: DeploymentPhase,
    ready: State,
    last_message: String,
}

impl Assessment {
    /// Appends `more` to both messages.
    fn and(mut self, more: &str) -> Self {
        for line in [&mut self.ready.message, &mut self.last_message] {
            line.push_str("; ");
            line.push_str(more);
        }
        self
    }
}

impl View<'_> {
    fn region(&self) -> &str {
        &self.object.spec.region.name
    }

    fn finalized(&self) -> bool {
        let mut all = self.object.finalizers().iter();
        all.any(|name| name == names::DEPLOYMENT_FINALIZER)
    }

    fn annotated(&self, name: &str) -> Option<&str> {
        self.object.annotations().get(name).map(String::as_str)
    }

    fn orphaned(&self) -> bool {
        self.annotated(names::ORPHAN_ANNOTATION) == Some("true")
    }

    fn release(&self) -> String {
        let name = self.object.name_any();
        format!(
            "release {} in namespace {name}",
            names::deployment_release(&name)
        )
    }

    /// Returns the report on this very object. A report with another UID is about an earlier object of the
    /// same name.
    fn said<'s>(&self, site: &'s Site) -> Option<&'s Said> {
        let said = site.at.said.as_ref()?;
        let uid = self.object.metadata.uid.as_deref().unwrap_or_default();
        (said.report.uid == uid).then_some(said)
    }

    /// Returns the events that members reported for this object, by member.
    pub(super) fn reported_events(&self) -> Vec<(String, Vec<ReportedEvent>)> {
        let sites = self.sites.iter().chain(self.target.as_ref().ok());
        let of = |site: &Site| {
            let said = self.said(site).filter(|said| said.fresh)?;
            let (member, _) = site.at.member.as_ref()?;
            Some((member.clone(), said.report.events.clone()))
        };
        sites.filter_map(of).collect()
    }

    /// Returns whether the member reports that nothing is left. The report must answer this recorded
    /// removal order: an earlier order's report proves nothing.
    fn gone(&self, site: &Site) -> bool {
        let generation = self.object.metadata.generation.unwrap_or_default();
        site.placement.removing
            && self.said(site).is_some_and(|said| {
                said.fresh && said.report.gone && said.report.observed_generation == generation
            })
    }

    fn order(&self, remove: bool) -> DesiredDeployment {
        let meta = &self.object.metadata;
        let annotation = |name: &&str| {
            let value = self
                .annotated(name)
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
            orphan: remove && self.orphaned(),
            paused: (self.annotated(names::PAUSED_ANNOTATION))
                .is_some_and(|value| value != "false"),
            requested: self
                .annotated(names::RECONCILE_REQUESTED_ANNOTATION)
                .filter(|value| value.len() <= ANNOTATION_MAX)
                .map(str::to_owned),
            // Deployments are always healed, regardless of the fleet's drift mode for Tenants.
            drift: Some(DriftPolicy {
                mode: DriftMode::Heal,
                interval_seconds: self.check_every,
            }),
            annotations: PASSED_ON.iter().filter_map(annotation).collect(),
        }
    }

    /// Returns the new finalizers, or `None` if they do not change.
    fn finalizers(&self, finalized: bool) -> Option<Vec<String>> {
        let mut finalizers = self.object.finalizers().to_vec();
        finalizers.retain(|name| name != names::DEPLOYMENT_FINALIZER);
        if finalized {
            finalizers.push(names::DEPLOYMENT_FINALIZER.to_owned());
        }
        (finalized != self.finalized()).then_some(finalizers)
    }

    /// Returns the recorded placements. `None` before the first one.
    fn recorded(&self) -> Option<&[Placement]> {
        self.object.status.as_ref()?.placements.as_deref()
    }

    /// Decides on an object that is not deleted.
    fn stay(&self) -> Decision {
        let account = !self.object.spec.account.name.is_empty();
        let target = self.target.as_ref().ok().filter(|_| account);
        let assessment = self.assessment(target, account);
        let (mut told, mut placements) = (Vec::new(), Vec::new());
        let mut orders = BTreeMap::new();
        let finalized = self.finalized();
        let mut give = |site: &Site, remove: bool| {
            if finalized && let Some((member, _)) = &site.at.member {
                orders.insert(member.clone(), self.order(remove));
            }
        };
        if let Some(target) = target {
            let uid = &target.placement.cluster_uid;
            let here = self
                .sites
                .iter()
                .find(|site| site.placement.cluster_uid == *uid);
            // The release is ready there, according to a report on this very order.
            let there = assessment.ready.truth == Truth::True
                && here.is_some_and(|here| !here.placement.removing)
                && self.said(target).is_some_and(|said| said.fresh);
            for site in &self.sites {
                if site.placement.cluster_uid == *uid {
                    // The same cluster may have another member name now, and may be the target again.
                    placements.push(target.placement.clone());
                    if !site.placement.removing && !target.at.full {
                        give(target, false);
                    }
                } else if self.orphaned() || self.gone(site) {
                    told.push(self.let_go(site));
                } else {
                    // An earlier location is removed once the release at the new one is ready. That is final.
                    let removing = site.placement.removing || there;
                    placements.push(Placement {
                        removing,
                        ..site.placement.clone()
                    });
                    give(site, site.placement.removing);
                }
            }
            if here.is_none() {
                // Record the placement before ordering it. After a crash, the next leader finds it again.
                placements.push(target.placement.clone());
                let (cluster, region) = (&target.placement.cluster, self.region());
                let message = format!("routed to cluster {cluster} of region {region}");
                told.push(news("Routing", message));
            }
        } else {
            // No information requires a move, so the release stays. A member that no longer allows this
            // namespace receives no order.
            let from = self.object.namespace().unwrap_or_default();
            for site in &self.sites {
                placements.push(site.placement.clone());
                let refusal =
                    |(name, member): &(String, Cluster)| member.allowed.refusal(name, &from);
                let refused = site.at.member.as_ref().and_then(refusal);
                if refused.is_none() {
                    give(site, site.placement.removing);
                }
            }
        }
        let finalizers = self.finalizers(finalized || target.is_some());
        let with_finalizers = finalizers.as_ref().map(|_| {
            let message = format!("account {} accepted", self.object.spec.account.name);
            vec![
                news("AccountValidated", message),
                news("FinalizerAdded", names::DEPLOYMENT_FINALIZER),
            ]
        });
        let assessment = match target {
            Some(target) => self.with_former(assessment, &target.placement.cluster_uid),
            None => assessment,
        };
        self.decision(
            orders,
            (finalizers, with_finalizers),
            (assessment, placements, told),
        )
    }

    /// Decides on a deleted object.
    fn leave(&self) -> Decision {
        let confirmed = self.deletion == Some(Deletion::OfTheObject);
        let lets_go = self.orphaned() || self.deletion == Some(Deletion::OfTheCrd);
        let held = self.finalized();
        let (mut told, mut placements) = (Vec::new(), Vec::new());
        let mut orders = BTreeMap::new();
        // An object created by krypton-operator has the finalizer but no recorded placements.
        let unrecorded = held && self.recorded().is_none();
        if held && lets_go {
            let why = match self.deletion {
                Some(Deletion::OfTheCrd) => "all KryptonDeployments are deleted with their CRD",
                _ => "as it is annotated",
            };
            let left: Vec<&str> = self
                .sites
                .iter()
                .map(|it| it.placement.cluster.as_str())
                .collect();
            if !left.is_empty() || unrecorded {
                let release = self.release();
                let left = match left.is_empty() {
                    true => "wherever it was".to_owned(),
                    false => left.join(", "),
                };
                let message = format!("{release} is left where it is, on {left}: {why}");
                told.push(warning("Orphaned", message));
            }
        } else if held {
            let aimed = self.target.as_ref().ok().filter(|_| unrecorded);
            for site in self.sites.iter().chain(aimed) {
                if self.gone(site) {
                    told.push(self.let_go(site));
                    continue;
                }
                let removing = site.placement.removing || confirmed;
                placements.push(Placement {
                    removing,
                    ..site.placement.clone()
                });
                // Until the deletion is confirmed, the order is paused and changes nothing.
                if let Some((member, _)) = site.at.member.as_ref().filter(|_| !unrecorded) {
                    let order = self.order(site.placement.removing);
                    let paused = order.paused || !site.placement.removing;
                    orders.insert(member.clone(), DesiredDeployment { paused, ..order });
                }
            }
        }
        let unknown = unrecorded && !lets_go && self.target.is_err();
        let done = placements.is_empty() && !unknown;
        let finalizers = self.finalizers(held && !done);
        let with_finalizers = finalizers.as_ref().map(|_| {
            told.push(news("FinalizerRemoved", names::DEPLOYMENT_FINALIZER));
            std::mem::take(&mut told)
        });
        let read = held && !done && !lets_go && self.deletion.is_none();
        let assessment = self.leaving(&placements, unknown);
        Decision {
            read: read && placements.iter().any(|placement| !placement.removing),
            ..self.decision(
                orders,
                (finalizers, with_finalizers),
                (assessment, placements, told),
            )
        }
    }

    fn decision(
        &self,
        orders: BTreeMap<String, DesiredDeployment>,
        (finalizers, with_finalizers): (Option<Vec<String>>, Option<Vec<ObjectEvent>>),
        (assessment, placements, told): (Assessment, Vec<Placement>, Vec<ObjectEvent>),
    ) -> Decision {
        let (mut status, mut with_status) = self.status(assessment);
        let recorded = self.recorded();
        status.placements = (recorded.is_some() || !placements.is_empty()).then_some(placements);
        if status.placements.as_deref() != recorded {
            with_status.splice(0..0, told);
        }
        Decision {
            orders,
            finalizers,
            with_finalizers: with_finalizers.unwrap_or_default(),
            status,
            with_status,
            read: false,
        }
    }

    fn let_go(&self, site: &Site) -> ObjectEvent {
        let cluster = &site.placement.cluster;
        if self.gone(site) {
            let said = self.said(site).map(|said| &said.report.state.ready);
            let left = said.filter(|ready| ready.reason == reason::UNINSTALLED);
            let how = left.map_or("the release is uninstalled", |ready| &ready.message);
            return news("HelmUninstalled", format!("cluster {cluster}: {how}"));
        }
        let message = format!(
            "{} is left where it is, on {cluster}: as it is annotated",
            self.release()
        );
        warning("Orphaned", message)
    }

    fn assessment(&self, target: Option<&Site>, account: bool) -> Assessment {
        let region = self.region();
        if !account {
            let message = "spec.account.name is empty; set the name of the account";
            return error(State::new(Truth::False, ready::ACCOUNT_MISSING, message));
        }
        let Some(target) = target else {
            let why = self.target.as_ref().err();
            let message = why.map_or("", |why| &why.message);
            let truth = why.map_or(Truth::Unknown, |why| why.truth);
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
        if let Some(line) = unheard(target) {
            let line = format!("Edge cluster {region} not available: {line}");
            return Assessment {
                last_message: line.clone(),
                ..error(State::new(Truth::Unknown, ready::EDGE_UNAVAILABLE, line))
            };
        }
        if target.at.full {
            let message =
                format!("cluster {cluster} has as many deployments as it takes; take some away");
            return error(State::new(Truth::False, ready::NOT_READY, message));
        }
        let generation = self.object.metadata.generation.unwrap_or_default();
        let said = self.said(target).map(|said| &said.report);
        let Some(said) = said.filter(|it| it.observed_generation == generation && !it.gone) else {
            let message = format!("waiting for the report of cluster {cluster}");
            return pending(State::new(Truth::False, ready::NOT_READY, message));
        };
        let assessment = self.reported(&said.state, cluster);
        // A ready release may still lag behind the desired state, such as when it is paused.
        let held = said.state.progress.as_ref();
        match held.filter(|it| it.reason == reason::PAUSED) {
            Some(paused) => assessment.and(&paused.message),
            None => assessment,
        }
    }

    /// Returns the readiness from the member's report on the latest order.
    fn reported(&self, state: &ClusterState, cluster: &str) -> Assessment {
        if let Some(wrong) = state.error.as_ref().filter(|it| it.truth == Truth::True) {
            return error(State::new(
                Truth::False,
                failed(&wrong.reason),
                format!("cluster {cluster}: {}", wrong.message),
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
                let said = progress.unwrap_or(&state.ready);
                let message = format!("cluster {cluster}: {}: {}", said.reason, said.message);
                pending(State::new(truth, ready::NOT_READY, message))
            }
        }
    }

    /// Adds the earlier locations of the release to the message.
    fn with_former(&self, assessment: Assessment, here: &str) -> Assessment {
        let former = self
            .sites
            .iter()
            .filter(|it| it.placement.cluster_uid != here);
        let more: Vec<String> = former
            .map(|site| {
                let cluster = &site.placement.cluster;
                let waits = match site.placement.removing {
                    true => "is being uninstalled",
                    false => "stays until this one is ready",
                };
                match unheard(site) {
                    Some(why) => format!(
                        "the release on {cluster} {waits}; {why}; to stop waiting for {cluster}, set annotation {}=true",
                        names::ORPHAN_ANNOTATION
                    ),
                    None => format!("the release on {cluster} {waits}"),
                }
            })
            .collect();
        match more.is_empty() {
            true => assessment,
            false => assessment.and(&more.join("; ")),
        }
    }

    fn leaving(&self, placements: &[Placement], unknown: bool) -> Assessment {
        let orphan = format!(
            "annotation {}=true removes it and keeps the release",
            names::ORPHAN_ANNOTATION
        );
        let aimed = self.target.as_ref();
        let site = placements.first().and_then(|placement| {
            let mut all = self.sites.iter().chain(aimed.ok());
            let is = |site: &&Site| site.placement.cluster_uid == placement.cluster_uid;
            all.find(is)
        });
        let line = match site {
            None if unknown => {
                let why = aimed.err().map_or("", |why| &why.message);
                format!("deletion waits, because its cluster is unknown: {why}; {orphan}")
            }
            None => "nothing is left to uninstall".to_owned(),
            Some(site) => {
                let cluster = &site.placement.cluster;
                let said = self.said(site).map(|said| &said.report.state);
                let wrong = said.and_then(|state| state.error.as_ref());
                let wrong = wrong.filter(|it| it.truth == Truth::True);
                let going = said.and_then(|state| state.progress.as_ref());
                if let Some(why) = unheard(site) {
                    format!("deletion waits: {why}; {orphan}")
                } else if !site.placement.removing {
                    "checking the deletion".to_owned()
                } else if let Some(wrong) = wrong {
                    let message = format!("cluster {cluster}: {}", wrong.message);
                    return error(State::new(Truth::False, failed(&wrong.reason), message));
                } else {
                    match going {
                        Some(going) => format!("cluster {cluster}: {}", going.message),
                        None => format!("waiting for the report of cluster {cluster}"),
                    }
                }
            }
        };
        pending(State::new(Truth::False, ready::DELETING, line))
    }

    /// Returns the status and its events. A changed `Ready` reason emits an event.
    fn status(&self, assessment: Assessment) -> (KryptonDeploymentStatus, Vec<ObjectEvent>) {
        let before = self.object.status.as_ref();
        let mut conditions: Vec<Condition> =
            before.map_or_else(Vec::new, |status| status.conditions.clone());
        let generation = self.object.metadata.generation.unwrap_or_default();
        let target = match &self.target {
            Err(state) => state.clone(),
            Ok(site) => {
                let member = site.at.member.as_ref();
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
        let was = conditions::find(&conditions, READY).map(|state| state.reason);
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
        let mut told = Vec::new();
        let applied = self.target.as_ref().ok().and_then(|site| self.said(site));
        let applied = applied.map(|said| said.report.applied_chart.clone());
        let applied = applied.filter(|chart| !chart.is_empty());
        let chart_before = before.and_then(|status| status.last_applied_chart.clone());
        if assessment.ready.truth == Truth::True
            && let Some(chart) = applied.as_ref()
            && chart_before.as_ref() != Some(chart)
        {
            told.push(news("HelmDeployed", format!("{}: {chart}", self.release())));
        }
        if was.as_deref() != Some(&assessment.ready.reason) {
            told.push(transition(&assessment.ready));
        }
        let status = KryptonDeploymentStatus {
            phase: Some(assessment.phase),
            last_message: Some(cut(assessment.last_message)),
            last_applied_chart: applied.or(chart_before),
            observed_generation: Some(generation),
            conditions,
            placements: None,
            hub_epoch: before.and_then(|status| status.hub_epoch),
        };
        (status, told)
    }
}

fn transition(to: &State) -> ObjectEvent {
    let message = to.message.clone();
    match to.reason.as_str() {
        ready::DEPLOYED => news("Ready", message),
        ready::ACCOUNT_MISSING => warning("AccountMissing", message),
        ready::EDGE_UNAVAILABLE => warning("EdgeUnavailable", message),
        ready::DELETING => news("DeleteStarted", message),
        ready::NOT_READY => news("NotReady", message),
        reason::UNINSTALL_FAILED => warning("HelmUninstallFailed", message),
        ready::HELM_FAILED => warning("HelmDeployFailed", message),
        _ => warning("Refused", message),
    }
}

/// Returns why the site's member sends no current report.
fn unheard(site: &Site) -> Option<String> {
    let cluster = &site.placement.cluster;
    let Some((name, found)) = &site.at.member else {
        return Some(format!(
            "EdgeCluster {cluster} does not exist or represents another cluster"
        ));
    };
    let connected = found.connected.as_ref();
    let wrong = connected.filter(|state| state.truth != Truth::True);
    wrong.map(|state| format!("EdgeCluster {name}: {}: {}", state.reason, state.message))
}

/// Maps Helm and chart failures to the single reason `HelmFailed`.
fn failed(said: &str) -> &str {
    match said {
        reason::INSTALL_FAILED
        | reason::UPGRADE_FAILED
        | reason::ROLLBACK_FAILED
        | reason::HELM_UNAVAILABLE => ready::HELM_FAILED,
        chart if reason::is_chart_fetch(chart) => ready::HELM_FAILED,
        other => other,
    }
}

fn error(state: State) -> Assessment {
    Assessment {
        phase: DeploymentPhase::Error,
        last_message: state.message.clone(),
        ready: state,
    }
}

fn pending(state: State) -> Assessment {
    Assessment {
        phase: DeploymentPhase::Pending,
        ..error(state)
    }
}

fn cut(mut message: String) -> String {
    message.truncate(message.floor_char_boundary(conditions::MESSAGE_MAX));
    message
}

#[cfg(test)]
mod tests;
