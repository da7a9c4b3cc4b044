//! Decommissions a deleted EdgeCluster whose `deletionPolicy` is `Uninstall`: a finalizer keeps it until
//! the member has uninstalled its releases.

use std::collections::{BTreeMap, BTreeSet};

use krypton_crds::edge_cluster::{DeletionPolicy, EdgeCluster};
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::names;
use kube::api::Api;
use kube::{Client, ResourceExt as _};

use super::publisher::Order;
use crate::leader::home_writer::{Deletion, read_deletion};
use crate::notices::MemberEvent;
use crate::tenants::Retired;

/// Inputs of the decision, in addition to the EdgeCluster.
#[derive(Clone, Debug, Default)]
pub(super) struct DecommissionState {
    /// The result of rereading the deletion.
    pub(super) read: Option<Deletion>,
    /// Why Krypton must not act on the member now.
    pub(super) held_back: Option<String>,
    pub(super) connected: bool,
    /// Whether the member has persisted the order.
    pub(super) taken: bool,
    /// Counts from the member's complete report.
    pub(super) retired: Option<Retired>,
}

/// The next step for an EdgeCluster's finalizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Nothing,
    /// The EdgeCluster is deleted and no longer has the finalizer. Send the member no new order: it would
    /// install again what it has just uninstalled.
    Gone,
    /// Add the finalizer: a deletion must wait for the member.
    PutOn,
    /// Remove the finalizer, for this cause.
    TakeOff(LetGo),
    /// Reread the deletion before acting on it.
    Read,
    /// Send the member no new order, for this reason.
    Wait(String),
    /// Order the member to uninstall. The text is its progress.
    Uninstall(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LetGo {
    /// The EdgeCluster stays.
    NotWanted,
    Uninstalled,
    Orphaned,
    CrdDeleted,
}

/// Returns whether deleting this EdgeCluster uninstalls releases. Never for home: discovery would recreate
/// `self-cluster` immediately.
fn uninstalls(object: &EdgeCluster) -> bool {
    object.spec.deletion_policy == DeletionPolicy::Uninstall
        && object.name_any() != names::SELF_CLUSTER
}

fn held(object: &EdgeCluster) -> bool {
    let mut finalizers = object.finalizers().iter();
    finalizers.any(|finalizer| finalizer == names::UNINSTALL_FINALIZER)
}

/// Returns whether the EdgeCluster is being deleted, and possibly its releases too.
pub(super) fn leaving(object: &EdgeCluster) -> bool {
    object.metadata.deletion_timestamp.is_some() && held(object)
}

pub(super) fn step(object: &EdgeCluster, progress: &DecommissionState) -> Step {
    if object.metadata.deletion_timestamp.is_none() {
        return match (uninstalls(object), held(object)) {
            (true, false) => Step::PutOn,
            (false, true) => Step::TakeOff(LetGo::NotWanted),
            _ => Step::Nothing,
        };
    }
    if !held(object) {
        return Step::Gone;
    }
    let orphaned = object.annotations().get(names::ORPHAN_ANNOTATION);
    if !uninstalls(object) || orphaned.is_some_and(|value| value == "true") {
        return Step::TakeOff(LetGo::Orphaned);
    }
    match progress.read {
        None => return Step::Read,
        Some(Deletion::OfTheCrd) => return Step::TakeOff(LetGo::CrdDeleted),
        Some(Deletion::OfTheObject) => {}
    }
    if let Some(why) = &progress.held_back {
        return Step::Wait(why.clone());
    }
    match progress.retired {
        Some(retired) if progress.taken && progress.connected => {
            if retired.gone == retired.tenants {
                Step::TakeOff(LetGo::Uninstalled)
            } else {
                Step::Uninstall(format!(
                    "uninstalled {} of {} releases",
                    retired.gone, retired.tenants
                ))
            }
        }
        _ if progress.connected => {
            Step::Uninstall("waiting for the member's confirmation".to_owned())
        }
        _ => Step::Uninstall("waiting for the member, which is unreachable".to_owned()),
    }
}

impl Step {
    /// Returns the order for the member, or `None` to keep the last one. `paused` applies if the member
    /// stays.
    pub(super) fn order(&self, paused: bool) -> Option<Order> {
        let (paused, retire) = match self {
            Self::Nothing | Self::PutOn | Self::TakeOff(LetGo::NotWanted) => (paused, false),
            Self::Uninstall(_) => (false, true),
            // A member that was ordered to uninstall must stop.
            Self::Wait(_) | Self::TakeOff(LetGo::Orphaned | LetGo::CrdDeleted) => (true, false),
            Self::Gone | Self::Read | Self::TakeOff(LetGo::Uninstalled) => return None,
        };
        Some(Order { paused, retire })
    }

    /// Returns the new finalizers, or `None` if they do not change.
    pub(super) fn finalizers(&self, object: &EdgeCluster) -> Option<Vec<String>> {
        match self {
            Self::PutOn => Some(finalizers(object, true)),
            Self::TakeOff(_) => Some(finalizers(object, false)),
            Self::Nothing | Self::Gone | Self::Read | Self::Wait(_) | Self::Uninstall(_) => None,
        }
    }

    /// Returns the EdgeCluster's condition `Uninstalled` while the finalizer keeps it.
    pub(super) fn condition(&self) -> Option<State> {
        let remedy = format!(
            "annotate it with {}=true to remove it and keep the releases",
            names::ORPHAN_ANNOTATION
        );
        let (why, message) = match self {
            Self::Read => (
                reason::UNINSTALLING,
                "the deletion is read again".to_owned(),
            ),
            Self::Wait(why) => (reason::UNINSTALL_WAITS, format!("{why}; {remedy}")),
            Self::Uninstall(how) => (reason::UNINSTALLING, format!("{how}; {remedy}")),
            Self::Nothing | Self::Gone | Self::PutOn | Self::TakeOff(_) => return None,
        };
        Some(State::new(Truth::False, why, message))
    }
}

impl LetGo {
    /// Returns the reason and message of the event, if the cause has one.
    pub(super) fn told(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::NotWanted => None,
            Self::Uninstalled => Some((
                "Uninstalled",
                "the member has uninstalled its releases; deleting its EdgeCluster",
            )),
            Self::Orphaned => Some((
                "Orphaned",
                "the EdgeCluster is removed; the member's remaining releases stay on its cluster",
            )),
            Self::CrdDeleted => Some((
                "Orphaned",
                "the CRD of EdgeClusters is being deleted, which uninstalls nothing",
            )),
        }
    }
}

/// Returns the order to publish. A held-back member receives no new order, but an uninstall order is
/// withdrawn. `retires` is whether its last order was to uninstall: that order may belong to an earlier
/// EdgeCluster.
pub(super) fn given(order: Option<Order>, held_back: bool, retires: bool) -> Option<Order> {
    let stop = Order {
        paused: true,
        retire: false,
    };
    match held_back {
        false => order,
        true => retires.then_some(stop),
    }
}

/// Returns the finalizers with or without Krypton's.
fn finalizers(object: &EdgeCluster, on: bool) -> Vec<String> {
    let others = object.finalizers().iter();
    let others = others.filter(|finalizer| *finalizer != names::UNINSTALL_FINALIZER);
    let ours = on.then(|| names::UNINSTALL_FINALIZER.to_owned());
    others.cloned().chain(ours).collect()
}

/// The state of deletions, by the EdgeCluster's UID.
#[derive(Debug, Default)]
pub(super) struct Retirements {
    /// Confirmed deletions. They remain valid while this hub leads.
    read: BTreeMap<String, Deletion>,
    /// Recorded events, one for each UID and reason.
    told: BTreeSet<(String, &'static str)>,
    pub(super) reading: BTreeSet<String>,
}

/// The result of rereading a deletion.
pub(super) struct Reading {
    pub(super) name: String,
    uid: String,
    /// `None` if the object is not deleted, or the read failed.
    pub(super) found: Option<Deletion>,
}

impl Retirements {
    pub(crate) fn of(&self, object: &EdgeCluster) -> Option<Deletion> {
        self.read.get(object.metadata.uid.as_deref()?).copied()
    }

    pub(super) fn take(&mut self, reading: &Reading) {
        self.reading.remove(&reading.uid);
        if let Some(found) = reading.found {
            self.read.insert(reading.uid.clone(), found);
        }
    }

    /// Discards confirmed deletions, because another hub may have led.
    pub(super) fn read_again(&mut self) {
        self.read.clear();
        self.reading.clear();
    }

    /// Returns the event for this step, unless it [was recorded](Self::was_told) before.
    pub(super) fn news(&self, object: &EdgeCluster, step: &Step) -> Option<MemberEvent> {
        let (reason, message) = match step {
            Step::Uninstall(_) => (
                reason::UNINSTALLING,
                "it was deleted with deletionPolicy Uninstall: the member uninstalls its releases",
            ),
            Step::TakeOff(why) => why.told()?,
            Step::Wait(_) | Step::Nothing | Step::Gone | Step::PutOn | Step::Read => return None,
        };
        let uid = object.metadata.uid.clone().unwrap_or_default();
        let new = !self.told.contains(&(uid.clone(), reason));
        new.then(|| MemberEvent {
            member: object.name_any(),
            uid,
            reason,
            message: message.to_owned(),
        })
    }

    /// Marks the event as recorded.
    pub(super) fn was_told(&mut self, uid: String, reason: &'static str) {
        self.told.insert((uid, reason));
    }

    /// Forgets all other EdgeClusters.
    pub(super) fn keep(&mut self, here: impl Fn(&str) -> bool) {
        self.read.retain(|uid, _| here(uid));
        self.told.retain(|(uid, _)| here(uid));
    }
}

pub(super) async fn read(client: Client, name: String, uid: String) -> Reading {
    let objects: Api<EdgeCluster> = Api::all(client.clone());
    let found = read_deletion(client, &objects, &name, &uid).await;
    Reading { name, uid, found }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use krypton_crds::edge_cluster::EdgeClusterSpec;

    use super::*;

    fn member(policy: DeletionPolicy) -> EdgeCluster {
        let spec = EdgeClusterSpec {
            deletion_policy: policy,
            ..EdgeClusterSpec::default()
        };
        let mut object = EdgeCluster::new("edge-1", spec);
        object.metadata.uid = Some("u".to_owned());
        object
    }

    fn deleted() -> EdgeCluster {
        let mut object = member(DeletionPolicy::Uninstall);
        object.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        object.metadata.finalizers = Some(finalizers(&object, true));
        object
    }

    /// A member that has carried out its order.
    fn done() -> DecommissionState {
        DecommissionState {
            read: Some(Deletion::OfTheObject),
            held_back: None,
            connected: true,
            taken: true,
            retired: Some(Retired {
                tenants: 2,
                gone: 2,
            }),
        }
    }

    #[test]
    fn finalizer_follows_uninstall_policy_except_on_home() {
        let none = DecommissionState::default();
        let mut object = member(DeletionPolicy::Retain);
        assert_eq!(step(&object, &none), Step::Nothing);
        object.spec.deletion_policy = DeletionPolicy::Uninstall;
        assert_eq!(step(&object, &none), Step::PutOn);
        object.metadata.finalizers = Some(vec!["example.org/a".to_owned()]);
        let with = finalizers(&object, true);
        assert_eq!(with, ["example.org/a", names::UNINSTALL_FINALIZER]);
        object.metadata.finalizers = Some(with);
        assert_eq!(step(&object, &none), Step::Nothing);
        object.spec.deletion_policy = DeletionPolicy::Retain;
        assert_eq!(step(&object, &none), Step::TakeOff(LetGo::NotWanted));
        assert_eq!(finalizers(&object, false), ["example.org/a"]);
        let mut home = member(DeletionPolicy::Uninstall);
        home.metadata.name = Some(names::SELF_CLUSTER.to_owned());
        assert_eq!(step(&home, &none), Step::Nothing);
    }

    #[test]
    fn finalizer_is_removed_once_nothing_is_left() {
        assert_eq!(step(&deleted(), &done()), Step::TakeOff(LetGo::Uninstalled));
        let none_at_all = DecommissionState {
            retired: Some(Retired::default()),
            ..done()
        };
        assert_eq!(
            step(&deleted(), &none_at_all),
            Step::TakeOff(LetGo::Uninstalled)
        );
    }

    #[test]
    fn unfinished_uninstall_keeps_finalizer_and_states_reason() {
        let left = Retired {
            tenants: 2,
            gone: 1,
        };
        for (progress, expected) in [
            (
                DecommissionState {
                    retired: Some(left),
                    ..done()
                },
                "1 of 2",
            ),
            (
                DecommissionState {
                    retired: None,
                    ..done()
                },
                "confirmation",
            ),
            (
                DecommissionState {
                    taken: false,
                    ..done()
                },
                "confirmation",
            ),
            (
                DecommissionState {
                    connected: false,
                    ..done()
                },
                "unreachable",
            ),
            (
                DecommissionState {
                    held_back: Some("it is paused".to_owned()),
                    ..done()
                },
                "it is paused",
            ),
        ] {
            let step = step(&deleted(), &progress);
            assert!(!matches!(step, Step::TakeOff(_)), "{progress:?}");
            let said = step.condition().unwrap().message;
            assert!(said.contains(expected) && said.contains("orphan"), "{said}");
        }
    }

    #[test]
    fn deletion_is_reread_and_crd_deletion_uninstalls_nothing() {
        let unread = DecommissionState {
            read: None,
            ..done()
        };
        assert_eq!(step(&deleted(), &unread), Step::Read);
        let crd = DecommissionState {
            read: Some(Deletion::OfTheCrd),
            ..DecommissionState::default()
        };
        assert_eq!(step(&deleted(), &crd), Step::TakeOff(LetGo::CrdDeleted));
    }

    #[test]
    fn member_without_finalizer_gets_no_new_order() {
        let mut gone = deleted();
        gone.metadata.finalizers = None;
        assert_eq!(step(&gone, &done()), Step::Gone);
        gone.spec.deletion_policy = DeletionPolicy::default();
        assert_eq!(step(&gone, &DecommissionState::default()), Step::Gone);
    }

    #[test]
    fn only_confirmed_deletion_orders_uninstall() {
        let said = String::new;
        for (step, ordered) in [
            (Step::Nothing, Some((true, false))),
            (Step::Gone, None),
            (Step::PutOn, Some((true, false))),
            (Step::TakeOff(LetGo::NotWanted), Some((true, false))),
            (Step::Read, None),
            (Step::Wait(said()), Some((true, false))),
            (Step::Uninstall(said()), Some((false, true))),
            (Step::TakeOff(LetGo::Uninstalled), None),
            (Step::TakeOff(LetGo::Orphaned), Some((true, false))),
            (Step::TakeOff(LetGo::CrdDeleted), Some((true, false))),
        ] {
            let order = step.order(true).map(|order| (order.paused, order.retire));
            assert_eq!(order, ordered, "{step:?}");
        }
        assert_eq!(Step::Nothing.order(false), Some(Order::default()));
    }

    #[test]
    fn uninstall_order_is_withdrawn_from_held_back_member() {
        let uninstall = Step::Uninstall(String::new()).order(false);
        let stop = Step::Wait(String::new()).order(false);
        assert_eq!(given(uninstall, false, false), uninstall);
        assert_eq!(given(uninstall, true, true), stop);
        assert_eq!(given(uninstall, true, false), None);
        assert_eq!(given(stop, false, true), stop);
        // Before the deletion is reread, the last order remains valid.
        assert_eq!(given(None, false, true), None);
    }

    #[test]
    fn orphan_annotation_or_retain_policy_releases_immediately() {
        let unread = DecommissionState::default();
        let mut orphaned = deleted();
        orphaned
            .annotations_mut()
            .insert(names::ORPHAN_ANNOTATION.to_owned(), "true".to_owned());
        assert_eq!(step(&orphaned, &unread), Step::TakeOff(LetGo::Orphaned));
        let mut retained = deleted();
        retained.spec.deletion_policy = DeletionPolicy::Retain;
        assert_eq!(step(&retained, &unread), Step::TakeOff(LetGo::Orphaned));
    }

    #[test]
    fn confirmed_deletion_does_not_apply_to_recreated_cluster() {
        let mut readings = Retirements::default();
        let object = deleted();
        assert_eq!(readings.of(&object), None);
        readings.take(&Reading {
            name: "edge-1".to_owned(),
            uid: "u".to_owned(),
            found: Some(Deletion::OfTheObject),
        });
        let ordered = Step::Uninstall(String::new());
        let news = readings.news(&object, &ordered).unwrap();
        assert!(
            readings.news(&object, &ordered).is_some(),
            "it was not told yet"
        );
        readings.was_told(news.uid, news.reason);
        assert!(readings.news(&object, &ordered).is_none(), "told twice");
        assert_eq!(readings.of(&object), Some(Deletion::OfTheObject));
        let mut next = object.clone();
        next.metadata.uid = Some("v".to_owned());
        assert_eq!(readings.of(&next), None);
        // Another hub may have led.
        readings.read_again();
        assert_eq!(readings.of(&object), None);
        readings.keep(|uid| uid == "v");
        assert_eq!(readings.of(&object), None);
    }
}
