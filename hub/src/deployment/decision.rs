//! What follows of one KryptonDeployment: what is ordered of members, what its object says, what is written
//! on it. Pure.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use krypton_common::conditions::{self, READY, State, TARGET_RESOLVED, Truth, reason};
use krypton_common::deployment::{DesiredDeployment, PASSED_ON};
use krypton_common::drift::{DriftMode, DriftPolicy};
use krypton_common::names;
use krypton_crds::krypton_deployment::{
    DeploymentPhase, KryptonDeployment, KryptonDeploymentStatus,
};
use kube::ResourceExt as _;

use super::aim::Cluster;
use crate::deployments::Said;

/// Reasons of the condition `Ready` (operator reference 1.6), and those that it lacks.
pub(super) mod ready {
    pub(in crate::deployment) const DEPLOYED: &str = "Deployed";
    pub(in crate::deployment) const NOT_READY: &str = "NotReady";
    pub(in crate::deployment) const ACCOUNT_MISSING: &str = "AccountMissing";
    pub(in crate::deployment) const EDGE_UNAVAILABLE: &str = "EdgeUnavailable";
    pub(in crate::deployment) const HELM_FAILED: &str = "HelmFailed";
    pub(in crate::deployment) const DELETING: &str = "Deleting";
}

/// A member that the release is ordered of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) cluster: String,
    /// Of the kubeconfig in the member's Secret, where it was named.
    pub(super) key: Option<String>,
}

/// What is on record of a KryptonDeployment's places; what cannot be read is none.
pub(super) fn places(object: &KryptonDeployment) -> Vec<Place> {
    let recorded = object.annotations().get(names::DEPLOYED_ON_ANNOTATION);
    let entries = recorded.map_or("", String::as_str).split(',');
    let place = |entry: &str| {
        let (cluster, key) = match entry.split_once(':') {
            Some((cluster, key)) => (cluster, Some(key.to_owned())),
            None => (entry, None),
        };
        names::is_dns_subdomain(cluster).then(|| Place {
            cluster: cluster.to_owned(),
            key,
        })
    };
    entries.map(str::trim).filter_map(place).collect()
}

fn recorded(places: &[Place]) -> Option<String> {
    let entry = |place: &Place| match &place.key {
        Some(key) => format!("{}:{key}", place.cluster),
        None => place.cluster.clone(),
    };
    let entries: Vec<String> = places.iter().map(entry).collect();
    (!entries.is_empty()).then(|| entries.join(","))
}

/// What was read afresh of a deletion, before anything follows from it (design §3, rule 2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Deletion {
    #[default]
    NotRead,
    OfTheObject,
    /// All are being deleted, with their CRD.
    OfTheCrd,
}

/// A place, as it is now.
#[derive(Clone, Debug, Default)]
pub(super) struct At {
    /// `None`: there is no such member.
    pub(super) cluster: Option<Cluster>,
    pub(super) said: Option<Said>,
    /// More is ordered of it than it takes.
    pub(super) full: bool,
}

/// All that a decision rests on.
pub(super) struct View<'a> {
    pub(super) object: &'a KryptonDeployment,
    /// The member that it is for, with the key that was named; else what `TargetClusterResolved` says.
    pub(super) aim: Result<Place, State>,
    /// Of its recorded places, and of the member that it is for.
    pub(super) at: BTreeMap<String, At>,
    pub(super) deletion: Deletion,
    pub(super) check_every: u32,
    pub(super) now: Timestamp,
}

/// What is to be written on the object itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Marks {
    pub(super) finalizers: Vec<String>,
    /// Of [`names::DEPLOYED_ON_ANNOTATION`]; `None`: none.
    pub(super) places: Option<String>,
}

/// Something to tell of on the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct News {
    pub(super) warning: bool,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

fn news(reason: &'static str, message: impl Into<String>) -> News {
    News {
        warning: false,
        reason,
        message: message.into(),
    }
}

fn warning(reason: &'static str, message: impl Into<String>) -> News {
    News {
        warning: true,
        ..news(reason, message)
    }
}

#[derive(Debug)]
pub(super) struct Decision {
    /// By member.
    pub(super) orders: BTreeMap<String, DesiredDeployment>,
    /// `None`: they are as they should be.
    pub(super) marks: Option<Marks>,
    /// Told once they are written.
    pub(super) with_marks: Vec<News>,
    pub(super) status: KryptonDeploymentStatus,
    /// Told once it is written.
    pub(super) with_status: Vec<News>,
    /// The deletion is to be read afresh.
    pub(super) read: bool,
}

/// Decides.
pub(super) fn decide(view: &View<'_>) -> Decision {
    if view.object.metadata.deletion_timestamp.is_some() {
        view.leave()
    } else {
        view.stay()
    }
}

/// What `Ready` is to say, and the phase and the line for people with it.
struct Standing {
    phase: DeploymentPhase,
    ready: State,
    last_message: String,
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

    /// What was said of the very object; another of the name was another's.
    fn said(&self, cluster: &str) -> Option<&Said> {
        let said = self.at.get(cluster)?.said.as_ref()?;
        let uid = self.object.metadata.uid.as_deref().unwrap_or_default();
        (said.report.uid == uid).then_some(said)
    }

    /// The member has said that nothing is left to be done there, in answer to an order to remove.
    fn gone(&self, cluster: &str) -> bool {
        let generation = self.object.metadata.generation.unwrap_or_default();
        self.said(cluster).is_some_and(|said| {
            said.fresh && said.report.gone && said.report.observed_generation == generation
        })
    }

    fn order(&self, remove: bool) -> DesiredDeployment {
        let meta = &self.object.metadata;
        let annotation = |name: &&str| {
            let value = self.annotated(name)?;
            Some(((*name).to_owned(), value.to_owned()))
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
                .map(str::to_owned),
            // As the original did, whatever the fleet does with Tenants.
            drift: Some(DriftPolicy {
                mode: DriftMode::Heal,
                interval_seconds: self.check_every,
            }),
            annotations: PASSED_ON.iter().filter_map(annotation).collect(),
        }
    }

    fn marks(&self, finalized: bool, places: &[Place]) -> Option<Marks> {
        let others = self.object.finalizers().iter();
        let mut finalizers: Vec<String> = others
            .filter(|name| finalized || *name != names::DEPLOYMENT_FINALIZER)
            .cloned()
            .collect();
        if finalized && !self.finalized() {
            finalizers.push(names::DEPLOYMENT_FINALIZER.to_owned());
        }
        let places = recorded(places);
        let same = finalizers == self.object.finalizers()
            && places.as_deref() == self.annotated(names::DEPLOYED_ON_ANNOTATION);
        (!same).then_some(Marks { finalizers, places })
    }

    /// It is to be there.
    fn stay(&self) -> Decision {
        let before = places(self.object);
        let account = !self.object.spec.account.name.is_empty();
        let target = self.aim.as_ref().ok().filter(|_| account);
        let mut places = before.clone();
        let (mut with_marks, mut orders) = (Vec::new(), BTreeMap::new());
        let standing = self.standing(target, account);
        if let Some(target) = target {
            let there = standing.ready.truth == Truth::True
                && self.said(&target.cluster).is_some_and(|said| said.fresh);
            match places.iter_mut().find(|it| it.cluster == target.cluster) {
                Some(place) => place.key.clone_from(&target.key),
                None => {
                    // Put on record before it is ordered: whatever ends in between, it is found again.
                    places.push(target.clone());
                    let region = self.region();
                    let message =
                        format!("routed to cluster {} of region {region}", target.cluster);
                    with_marks.push(news("Routing", message));
                }
            }
            if !self.finalized() {
                let message = format!("account {} accepted", self.object.spec.account.name);
                with_marks.insert(0, news("AccountValidated", message));
                with_marks.insert(1, news("FinalizerAdded", names::DEPLOYMENT_FINALIZER));
            }
            // It was somewhere else before: that goes when this one is well.
            let mut left = Vec::new();
            places.retain(|place| {
                let stays = place.cluster == target.cluster
                    || !(self.orphaned() || self.gone(&place.cluster));
                if !stays {
                    left.push(place.cluster.clone());
                }
                stays
            });
            for cluster in left {
                with_marks.push(self.let_go(&cluster));
            }
            if self.finalized() {
                for place in before
                    .iter()
                    .filter(|place| places.contains(place) || place.cluster == target.cluster)
                {
                    let former = place.cluster != target.cluster;
                    orders.insert(place.cluster.clone(), self.order(former && there));
                }
            }
        } else if self.finalized() {
            // Nothing that is known says that it should not be where it is. Who may not aim at a member any
            // more gets nothing of it either.
            let from = self.object.namespace().unwrap_or_default();
            let allowed = |place: &&Place| {
                let cluster = self
                    .at
                    .get(&place.cluster)
                    .and_then(|at| at.cluster.as_ref());
                cluster.is_some_and(|it| it.allowed.refusal(&place.cluster, &from).is_none())
            };
            let stands = before.iter().filter(allowed);
            orders.extend(stands.map(|it| (it.cluster.clone(), self.order(false))));
        }
        let marks = self.marks(self.finalized() || target.is_some(), &places);
        let with_marks = if marks.is_some() {
            with_marks
        } else {
            Vec::new()
        };
        let former: Vec<&str> = places
            .iter()
            .map(|place| place.cluster.as_str())
            .filter(|cluster| target.is_some_and(|target| target.cluster != *cluster))
            .collect();
        let (status, with_status) = self.status(self.with_former(standing, &former));
        Decision {
            orders: self.within(orders),
            marks,
            with_marks,
            status,
            with_status,
            read: false,
        }
    }

    /// It is to go.
    fn leave(&self) -> Decision {
        let mut places = places(self.object);
        let orphaned = self.orphaned() || self.deletion == Deletion::OfTheCrd;
        let mut with_marks = Vec::new();
        let mut orders = BTreeMap::new();
        let held = self.finalized();
        if held && !places.is_empty() {
            if orphaned {
                let why = match self.deletion {
                    Deletion::OfTheCrd => "all KryptonDeployments are deleted with their CRD",
                    _ => "as it is annotated",
                };
                let left = places.iter().map(|place| place.cluster.as_str());
                let left = left.collect::<Vec<_>>().join(", ");
                let message = format!("{} is left where it is, on {left}: {why}", self.release());
                with_marks.push(warning("Orphaned", message));
                places.clear();
            } else {
                let removes = self.deletion == Deletion::OfTheObject;
                let mut gone = Vec::new();
                places.retain(|place| {
                    let stays = !(removes && self.gone(&place.cluster));
                    if !stays {
                        gone.push(place.cluster.clone());
                    }
                    stays
                });
                for cluster in gone {
                    with_marks.push(self.let_go(&cluster));
                }
                let each = places.iter();
                orders.extend(each.map(|it| (it.cluster.clone(), self.order(removes))));
            }
        }
        let done = places.is_empty();
        if held && done {
            with_marks.push(news("FinalizerRemoved", names::DEPLOYMENT_FINALIZER));
        }
        let marks = held.then(|| self.marks(!done, &places)).flatten();
        let with_marks = if marks.is_some() {
            with_marks
        } else {
            Vec::new()
        };
        let (status, with_status) = self.status(self.leaving(&places));
        Decision {
            read: held && !done && !orphaned && self.deletion == Deletion::NotRead,
            orders: self.within(orders),
            marks,
            with_marks,
            status,
            with_status,
        }
    }

    /// Without what a member does not take.
    fn within(
        &self,
        mut orders: BTreeMap<String, DesiredDeployment>,
    ) -> BTreeMap<String, DesiredDeployment> {
        orders.retain(|cluster, _| {
            let at = self.at.get(cluster);
            at.is_some_and(|at| at.cluster.is_some() && !at.full)
        });
        orders
    }

    fn let_go(&self, cluster: &str) -> News {
        let said = self.said(cluster).map(|said| &said.report.state.ready);
        let left = said.filter(|ready| ready.reason == reason::UNINSTALLED);
        if self.gone(cluster) {
            let how = left.map_or("the release is uninstalled", |ready| &ready.message);
            return news("HelmUninstalled", format!("cluster {cluster}: {how}"));
        }
        let message = format!(
            "{} is left where it is, on {cluster}: as it is annotated",
            self.release()
        );
        warning("Orphaned", message)
    }

    fn standing(&self, target: Option<&Place>, account: bool) -> Standing {
        let region = self.region();
        if !account {
            let message = "spec.account.name is empty: write whose deployment it is";
            return error(State::new(Truth::False, ready::ACCOUNT_MISSING, message));
        }
        let Some(target) = target else {
            let why = self.aim.as_ref().err();
            let message = why.map_or("", |why| &why.message);
            let truth = why.map_or(Truth::Unknown, |why| why.truth);
            let line = format!("Edge cluster {region} not available: {message}");
            return Standing {
                phase: match truth {
                    Truth::False => DeploymentPhase::Error,
                    _ => DeploymentPhase::Pending,
                },
                ready: State::new(truth, ready::EDGE_UNAVAILABLE, line.clone()),
                last_message: line,
            };
        };
        let cluster = &target.cluster;
        if let Some(line) = self.unheard(cluster) {
            let line = format!("Edge cluster {region} not available: {line}");
            return Standing {
                last_message: line.clone(),
                ..error(State::new(Truth::Unknown, ready::EDGE_UNAVAILABLE, line))
            };
        }
        if self.at.get(cluster).is_some_and(|at| at.full) {
            let message =
                format!("cluster {cluster} has as many deployments as it takes; take some away");
            return error(State::new(Truth::False, ready::NOT_READY, message));
        }
        let generation = self.object.metadata.generation.unwrap_or_default();
        let said = self.said(cluster).map(|said| &said.report);
        let Some(said) = said.filter(|it| it.observed_generation == generation && !it.gone) else {
            let message = format!("cluster {cluster} is yet to say how it stands");
            return pending(State::new(Truth::False, ready::NOT_READY, message));
        };
        let state = &said.state;
        if let Some(wrong) = state.error.as_ref().filter(|it| it.truth == Truth::True) {
            return error(State::new(
                Truth::False,
                failed(&wrong.reason),
                format!("cluster {cluster}: {}", wrong.message),
            ));
        }
        match state.ready.truth {
            Truth::True => Standing {
                phase: DeploymentPhase::Ready,
                ready: State::new(
                    Truth::True,
                    ready::DEPLOYED,
                    format!("cluster {cluster}: {}", state.ready.message),
                ),
                last_message: format!("Successfully deployed to region {region}"),
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

    /// What keeps a member from being heard of.
    fn unheard(&self, cluster: &str) -> Option<String> {
        let Some(found) = self.at.get(cluster).and_then(|at| at.cluster.as_ref()) else {
            return Some(format!("there is no EdgeCluster {cluster} any more"));
        };
        let connected = found.connected.as_ref();
        let wrong = connected.filter(|state| state.truth != Truth::True);
        wrong.map(|state| format!("EdgeCluster {cluster}: {}: {}", state.reason, state.message))
    }

    /// It runs where it was before too.
    fn with_former(&self, mut standing: Standing, former: &[&str]) -> Standing {
        if former.is_empty() {
            return standing;
        }
        let waits = match standing.ready.truth {
            Truth::True => "goes",
            _ => "stays until this one is ready",
        };
        let more: Vec<String> = former
            .iter()
            .map(|cluster| match self.unheard(cluster) {
                Some(why) => format!(
                    "what is on {cluster} {waits}; {why}; annotation {}=true lets go of it",
                    names::ORPHAN_ANNOTATION
                ),
                None => format!("what is on {cluster} {waits}"),
            })
            .collect();
        let more = more.join("; ");
        for line in [&mut standing.ready.message, &mut standing.last_message] {
            line.push_str("; ");
            line.push_str(&more);
        }
        standing
    }

    fn leaving(&self, places: &[Place]) -> Standing {
        let line = match (self.deletion, places.first()) {
            (_, None) => "nothing is left to be removed".to_owned(),
            (Deletion::NotRead, _) => "the deletion is looked at".to_owned(),
            (_, Some(place)) => {
                let cluster = &place.cluster;
                if let Some(why) = self.unheard(cluster) {
                    format!(
                        "deletion waits: {why}; annotation {}=true lets go and leaves the release",
                        names::ORPHAN_ANNOTATION
                    )
                } else {
                    let said = self.said(cluster).map(|said| &said.report.state);
                    let wrong = said.and_then(|state| state.error.as_ref());
                    let wrong = wrong.filter(|it| it.truth == Truth::True);
                    let going = said.and_then(|state| state.progress.as_ref());
                    match (wrong, going) {
                        (Some(wrong), _) => {
                            let message = format!("cluster {cluster}: {}", wrong.message);
                            let reason = failed(&wrong.reason);
                            return error(State::new(Truth::False, reason, message));
                        }
                        (None, Some(going)) => format!("cluster {cluster}: {}", going.message),
                        (None, None) => format!("cluster {cluster} is yet to say how it stands"),
                    }
                }
            }
        };
        pending(State::new(Truth::False, ready::DELETING, line))
    }

    /// The status, and what is to be told with it: each time that the reason is another.
    fn status(&self, standing: Standing) -> (KryptonDeploymentStatus, Vec<News>) {
        let before = self.object.status.as_ref();
        let mut conditions: Vec<Condition> =
            before.map_or_else(Vec::new, |status| status.conditions.clone());
        let generation = self.object.metadata.generation.unwrap_or_default();
        let target = match &self.aim {
            Err(state) => state.clone(),
            Ok(place) => {
                let resolved = self
                    .at
                    .get(&place.cluster)
                    .and_then(|at| at.cluster.as_ref());
                let resolved = resolved.and_then(|cluster| cluster.resolved.clone());
                resolved.map_or_else(
                    || {
                        State::new(
                            Truth::Unknown,
                            crate::facts::reason::STARTING,
                            format!("EdgeCluster {} is new", place.cluster),
                        )
                    },
                    |state| State {
                        message: format!("EdgeCluster {}: {}", place.cluster, state.message),
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
            &standing.ready,
            generation,
            self.now,
        );
        let mut told = Vec::new();
        let applied = self
            .aim
            .as_ref()
            .ok()
            .and_then(|place| self.said(&place.cluster));
        let applied = applied.map(|said| said.report.applied_chart.clone());
        let applied = applied.filter(|chart| !chart.is_empty());
        let chart_before = before.and_then(|status| status.last_applied_chart.clone());
        if standing.ready.truth == Truth::True
            && let Some(chart) = applied.as_ref()
            && chart_before.as_ref() != Some(chart)
        {
            told.push(news("HelmDeployed", format!("{}: {chart}", self.release())));
        }
        if was.as_deref() != Some(&standing.ready.reason) {
            told.extend(self.transition(&standing.ready));
        }
        let status = KryptonDeploymentStatus {
            phase: Some(standing.phase),
            last_message: Some(cut(standing.last_message)),
            last_applied_chart: applied.or(chart_before),
            observed_generation: Some(generation),
            conditions,
        };
        (status, told)
    }

    fn transition(&self, to: &State) -> Option<News> {
        let message = to.message.clone();
        Some(match to.reason.as_str() {
            ready::DEPLOYED => news("Ready", message),
            ready::ACCOUNT_MISSING => warning("AccountMissing", message),
            ready::EDGE_UNAVAILABLE => warning("EdgeUnavailable", message),
            ready::DELETING => news("DeleteStarted", message),
            ready::NOT_READY => news("NotReady", message),
            reason::UNINSTALL_FAILED => warning("HelmUninstallFailed", message),
            ready::HELM_FAILED => warning("HelmDeployFailed", message),
            _ => warning("Refused", message),
        })
    }
}

/// The original had one word for all that helm or its chart can do wrong.
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

fn error(state: State) -> Standing {
    Standing {
        phase: DeploymentPhase::Error,
        last_message: state.message.clone(),
        ready: state,
    }
}

fn pending(state: State) -> Standing {
    Standing {
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
