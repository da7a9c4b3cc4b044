//! A deleted EdgeCluster whose `deletionPolicy` is `Uninstall`: kept by a finalizer until the member has
//! uninstalled its releases.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::edge_cluster::{DeletionPolicy, EdgeCluster};
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::error_chain::chain;
use krypton_types::names;
use kube::api::Api;
use kube::{Client, ResourceExt as _};

use crate::members::Order;
use crate::notices::MemberEvent;
use crate::tenants::Retired;

const DEADLINE: Duration = Duration::from_secs(10);

/// What the decision rests on, beside the EdgeCluster itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Standing {
    /// What was read afresh of the deletion.
    pub(super) read: Option<Deletion>,
    /// Why nobody is to act on the member now.
    pub(super) held_back: Option<String>,
    pub(super) connected: bool,
    /// The order is on record on the member.
    pub(super) taken: bool,
    /// What the member says of its Tenants, when it has said all.
    pub(super) retired: Option<Retired>,
}

/// A deletion, as the apiserver tells of it when it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deletion {
    /// Somebody has deleted this EdgeCluster.
    OfTheMember,
    /// All are being deleted, with their CRD.
    OfTheCrd,
}

/// The one next thing to do about an EdgeCluster's finalizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Nothing,
    /// A deletion is to wait for the member.
    PutOn,
    /// A deletion is to wait no more: why.
    TakeOff(LetGo),
    /// The deletion is to be read afresh before anything follows from it.
    Read,
    /// The member is not to be given anything now: why.
    Wait(String),
    /// The member is to uninstall: how far it is.
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

/// What deleting this EdgeCluster means. Home leaves no fleet of its own: `self-cluster` would be found
/// anew at once.
fn uninstalls(object: &EdgeCluster) -> bool {
    object.spec.deletion_policy == DeletionPolicy::Uninstall
        && object.name_any() != names::SELF_CLUSTER
}

fn held(object: &EdgeCluster) -> bool {
    let mut finalizers = object.finalizers().iter();
    finalizers.any(|finalizer| finalizer == names::UNINSTALL_FINALIZER)
}

/// It is on its way out, and its releases may be.
pub(super) fn leaving(object: &EdgeCluster) -> bool {
    object.metadata.deletion_timestamp.is_some() && held(object)
}

pub(super) fn step(object: &EdgeCluster, standing: &Standing) -> Step {
    if object.metadata.deletion_timestamp.is_none() {
        return match (uninstalls(object), held(object)) {
            (true, false) => Step::PutOn,
            (false, true) => Step::TakeOff(LetGo::NotWanted),
            _ => Step::Nothing,
        };
    }
    if !held(object) {
        return Step::Nothing;
    }
    let orphaned = object.annotations().get(names::ORPHAN_ANNOTATION);
    if !uninstalls(object) || orphaned.is_some_and(|value| value == "true") {
        return Step::TakeOff(LetGo::Orphaned);
    }
    match standing.read {
        None => return Step::Read,
        Some(Deletion::OfTheCrd) => return Step::TakeOff(LetGo::CrdDeleted),
        Some(Deletion::OfTheMember) => {}
    }
    if let Some(why) = &standing.held_back {
        return Step::Wait(why.clone());
    }
    match standing.retired {
        Some(retired) if standing.taken && standing.connected => {
            if retired.gone == retired.tenants {
                Step::TakeOff(LetGo::Uninstalled)
            } else {
                Step::Uninstall(format!(
                    "{} of {} Tenants and deployments have no release any more",
                    retired.gone, retired.tenants
                ))
            }
        }
        _ if standing.connected => {
            Step::Uninstall("the member has not yet said that it has begun".to_owned())
        }
        _ => Step::Uninstall("the member cannot be reached; it is waited for".to_owned()),
    }
}

impl Step {
    /// What the member is to be given; `None`: nothing but what it has. `paused`: were it to stay.
    pub(super) fn order(&self, paused: bool) -> Option<Order> {
        let (paused, retire) = match self {
            Self::Nothing | Self::PutOn | Self::TakeOff(LetGo::NotWanted) => (paused, false),
            Self::Uninstall(_) => (false, true),
            // Who has been told to uninstall before is to stop.
            Self::Wait(_) | Self::TakeOff(LetGo::Orphaned | LetGo::CrdDeleted) => (true, false),
            Self::Read | Self::TakeOff(LetGo::Uninstalled) => return None,
        };
        Some(Order { paused, retire })
    }

    /// The finalizers as they are to be, where they are to be others.
    pub(super) fn finalizers(&self, object: &EdgeCluster) -> Option<Vec<String>> {
        match self {
            Self::PutOn => Some(finalizers(object, true)),
            Self::TakeOff(_) => Some(finalizers(object, false)),
            Self::Nothing | Self::Read | Self::Wait(_) | Self::Uninstall(_) => None,
        }
    }

    /// The condition `Uninstalled` of the EdgeCluster, while it is kept.
    pub(super) fn condition(&self) -> Option<State> {
        let remedy = format!(
            "annotate it with {}=true to let it go and leave the releases",
            names::ORPHAN_ANNOTATION
        );
        let (why, message) = match self {
            Self::Read => (
                reason::UNINSTALLING,
                "the deletion is read again".to_owned(),
            ),
            Self::Wait(why) => (reason::UNINSTALL_WAITS, format!("{why}; {remedy}")),
            Self::Uninstall(how) => (reason::UNINSTALLING, format!("{how}; {remedy}")),
            Self::Nothing | Self::PutOn | Self::TakeOff(_) => return None,
        };
        Some(State::new(Truth::False, why, message))
    }
}

impl LetGo {
    /// Reason and message of the event, where there is one.
    pub(super) fn told(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::NotWanted => None,
            Self::Uninstalled => Some((
                "Uninstalled",
                "the member has uninstalled its releases; its EdgeCluster goes",
            )),
            Self::Orphaned => Some((
                "Orphaned",
                "the EdgeCluster goes; what is left of the member's releases stays on its cluster",
            )),
            Self::CrdDeleted => Some((
                "Orphaned",
                "the CRD of EdgeClusters is being deleted, which uninstalls nothing",
            )),
        }
    }
}

/// Whoever is held back is given nothing new; but that it is to uninstall, as `retires` says it was told
/// last, is taken back: the order may be of an EdgeCluster that is no more.
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

/// The finalizers with ours, or without.
fn finalizers(object: &EdgeCluster, on: bool) -> Vec<String> {
    let others = object.finalizers().iter();
    let others = others.filter(|finalizer| *finalizer != names::UNINSTALL_FINALIZER);
    let ours = on.then(|| names::UNINSTALL_FINALIZER.to_owned());
    others.cloned().chain(ours).collect()
}

/// What is remembered of deletions, by the EdgeCluster's UID.
#[derive(Debug, Default)]
pub(super) struct Retirements {
    /// What was read stays true while this hub leads.
    read: BTreeMap<String, Deletion>,
    /// What was told of them, once each.
    told: BTreeSet<(String, &'static str)>,
    pub(super) reading: BTreeSet<String>,
}

/// What came of reading one.
pub(super) struct Reading {
    pub(super) name: String,
    uid: String,
    /// `None`: it is not deleted, or could not be read.
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

    /// Another may have led: what was read is read again.
    pub(super) fn read_again(&mut self) {
        self.read.clear();
        self.reading.clear();
    }

    /// The event for this step, when it [was not told](Self::was_told) of before.
    pub(super) fn news(&self, object: &EdgeCluster, step: &Step) -> Option<MemberEvent> {
        let (reason, message) = match step {
            Step::Uninstall(_) => (
                reason::UNINSTALLING,
                "it was deleted with deletionPolicy Uninstall: the member uninstalls its releases",
            ),
            Step::TakeOff(why) => why.told()?,
            Step::Wait(_) | Step::Nothing | Step::PutOn | Step::Read => return None,
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

    /// There was room for the event.
    pub(super) fn was_told(&mut self, uid: String, reason: &'static str) {
        self.told.insert((uid, reason));
    }

    /// Forgets all but these.
    pub(super) fn keep(&mut self, here: impl Fn(&str) -> bool) {
        self.read.retain(|uid, _| here(uid));
        self.told.retain(|(uid, _)| here(uid));
    }
}

/// Reads afresh who is being deleted: the CRD first, as its deletion comes before that of its objects.
pub(super) async fn read(client: Client, name: String, uid: String) -> Reading {
    let reading = async {
        let objects: Api<EdgeCluster> = Api::all(client.clone());
        let object = objects.get_metadata(&name).await?;
        let deleted = object.metadata.uid.as_deref() == Some(&uid)
            && object.metadata.deletion_timestamp.is_some();
        if !deleted {
            return Ok(None);
        }
        let crds: Api<CustomResourceDefinition> = Api::all(client);
        let crd = crds.get_metadata(&EdgeCluster::crd().name_any()).await?;
        Ok(Some(match crd.metadata.deletion_timestamp {
            Some(_) => Deletion::OfTheCrd,
            None => Deletion::OfTheMember,
        }))
    };
    let found = match tokio::time::timeout(DEADLINE, reading).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => {
            let error: kube::Error = error;
            tracing::warn!(member = %name, problem = %chain(&error), "reading the deletion of the EdgeCluster failed; it is tried again");
            None
        }
        Err(_) => None,
    };
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

    /// A member that has done all that it was told.
    fn done() -> Standing {
        Standing {
            read: Some(Deletion::OfTheMember),
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
        let none = Standing::default();
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
        let none_at_all = Standing {
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
        for (standing, words) in [
            (
                Standing {
                    retired: Some(left),
                    ..done()
                },
                "1 of 2",
            ),
            (
                Standing {
                    retired: None,
                    ..done()
                },
                "not yet said",
            ),
            (
                Standing {
                    taken: false,
                    ..done()
                },
                "not yet said",
            ),
            (
                Standing {
                    connected: false,
                    ..done()
                },
                "cannot be reached",
            ),
            (
                Standing {
                    held_back: Some("it is paused".to_owned()),
                    ..done()
                },
                "it is paused",
            ),
        ] {
            let step = step(&deleted(), &standing);
            assert!(!matches!(step, Step::TakeOff(_)), "{standing:?}");
            let said = step.condition().unwrap().message;
            assert!(said.contains(words) && said.contains("orphan"), "{said}");
        }
    }

    #[test]
    fn deletion_is_reread_and_crd_deletion_uninstalls_nothing() {
        let unread = Standing {
            read: None,
            ..done()
        };
        assert_eq!(step(&deleted(), &unread), Step::Read);
        let crd = Standing {
            read: Some(Deletion::OfTheCrd),
            ..Standing::default()
        };
        assert_eq!(step(&deleted(), &crd), Step::TakeOff(LetGo::CrdDeleted));
    }

    #[test]
    fn only_confirmed_deletion_orders_uninstall() {
        let said = String::new;
        for (step, ordered) in [
            (Step::Nothing, Some((true, false))),
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
        // Read afresh first: what it was told last stands meanwhile.
        assert_eq!(given(None, false, true), None);
    }

    #[test]
    fn orphan_annotation_or_retain_policy_releases_immediately() {
        let unread = Standing::default();
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
            found: Some(Deletion::OfTheMember),
        });
        let ordered = Step::Uninstall(String::new());
        let news = readings.news(&object, &ordered).unwrap();
        assert!(
            readings.news(&object, &ordered).is_some(),
            "it was not told yet"
        );
        readings.was_told(news.uid, news.reason);
        assert!(readings.news(&object, &ordered).is_none(), "told twice");
        assert_eq!(readings.of(&object), Some(Deletion::OfTheMember));
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
