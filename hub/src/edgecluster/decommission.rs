//! Decommissions a deleted EdgeCluster whose `deletionPolicy` is `Uninstall`: a finalizer keeps it until
//! the member has uninstalled its releases.

use std::collections::{BTreeMap, BTreeSet};

use krypton_crds::edge_cluster::{DeletionPolicy, EdgeCluster};
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::names;
use kube::ResourceExt as _;

use super::publisher::MemberOrder;
use crate::home_events::MemberEvent;
use crate::leader::home_writer::DeletionCause;
use crate::members::tenant_reports::UninstallCounts;

/// Inputs of the decision, in addition to the EdgeCluster.
#[derive(Clone, Debug, Default)]
pub(super) struct DecommissionState {
    /// The result of rereading the deletion.
    pub(super) deletion: Option<DeletionCause>,
    /// Why Krypton must not act on the member now.
    pub(super) held_back: Option<String>,
    pub(super) connected: bool,
    /// Whether the member has persisted the order.
    pub(super) is_order_applied: bool,
    /// Counts from the member's complete report.
    pub(super) uninstall_counts: Option<UninstallCounts>,
}

/// The next step for an EdgeCluster's finalizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DecommissionStep {
    Nothing,
    /// The EdgeCluster is deleted and no longer has the finalizer. Send the member no new order: it would
    /// install again what it has just uninstalled.
    Gone,
    /// Add the finalizer: a deletion must wait for the member.
    AddFinalizer,
    /// Remove the finalizer, for this cause.
    RemoveFinalizer(FinalizerRemoval),
    /// Reread the deletion before acting on it.
    RereadDeletion,
    /// Send the member no new order, for this reason.
    Wait(String),
    /// Order the member to uninstall. The text is its progress.
    Uninstall(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FinalizerRemoval {
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

fn has_finalizer(object: &EdgeCluster) -> bool {
    let mut finalizers = object.finalizers().iter();
    finalizers.any(|finalizer| finalizer == names::UNINSTALL_FINALIZER)
}

/// Returns whether the EdgeCluster is being deleted, and possibly its releases too.
pub(super) fn is_decommissioning(object: &EdgeCluster) -> bool {
    object.metadata.deletion_timestamp.is_some() && has_finalizer(object)
}

pub(super) fn next_step(object: &EdgeCluster, progress: &DecommissionState) -> DecommissionStep {
    if object.metadata.deletion_timestamp.is_none() {
        return match (uninstalls(object), has_finalizer(object)) {
            (true, false) => DecommissionStep::AddFinalizer,
            (false, true) => DecommissionStep::RemoveFinalizer(FinalizerRemoval::NotWanted),
            _ => DecommissionStep::Nothing,
        };
    }
    if !has_finalizer(object) {
        return DecommissionStep::Gone;
    }
    let orphaned = object.annotations().get(names::ORPHAN_ANNOTATION);
    if !uninstalls(object) || orphaned.is_some_and(|value| value == "true") {
        return DecommissionStep::RemoveFinalizer(FinalizerRemoval::Orphaned);
    }
    match progress.deletion {
        None => return DecommissionStep::RereadDeletion,
        Some(DeletionCause::Crd) => {
            return DecommissionStep::RemoveFinalizer(FinalizerRemoval::CrdDeleted);
        }
        Some(DeletionCause::Object) => {}
    }
    if let Some(reason) = &progress.held_back {
        return DecommissionStep::Wait(reason.clone());
    }
    match progress.uninstall_counts {
        Some(counts) if progress.is_order_applied && progress.connected => {
            if counts.uninstalled == counts.total {
                DecommissionStep::RemoveFinalizer(FinalizerRemoval::Uninstalled)
            } else {
                DecommissionStep::Uninstall(format!(
                    "uninstalled {} of {} releases",
                    counts.uninstalled, counts.total
                ))
            }
        }
        _ if progress.connected => {
            DecommissionStep::Uninstall("waiting for the member's confirmation".to_owned())
        }
        _ => DecommissionStep::Uninstall("waiting for the member, which is unreachable".to_owned()),
    }
}

impl DecommissionStep {
    /// Returns the order for the member, or `None` to keep the last one. `paused` applies if the member
    /// stays.
    pub(super) fn order(&self, paused: bool) -> Option<MemberOrder> {
        let (paused, retire) = match self {
            Self::Nothing
            | Self::AddFinalizer
            | Self::RemoveFinalizer(FinalizerRemoval::NotWanted) => (paused, false),
            Self::Uninstall(_) => (false, true),
            // A member that was ordered to uninstall must stop.
            Self::Wait(_)
            | Self::RemoveFinalizer(FinalizerRemoval::Orphaned | FinalizerRemoval::CrdDeleted) => {
                (true, false)
            }
            Self::Gone
            | Self::RereadDeletion
            | Self::RemoveFinalizer(FinalizerRemoval::Uninstalled) => return None,
        };
        Some(MemberOrder { paused, retire })
    }

    /// Returns the new finalizers, or `None` if they do not change.
    pub(super) fn finalizers(&self, object: &EdgeCluster) -> Option<Vec<String>> {
        match self {
            Self::AddFinalizer => Some(finalizers(object, true)),
            Self::RemoveFinalizer(_) => Some(finalizers(object, false)),
            _ => None,
        }
    }

    /// Returns the EdgeCluster's condition `Uninstalled` while the finalizer keeps it.
    pub(super) fn condition(&self) -> Option<State> {
        let remedy = format!(
            "annotate it with {}=true to remove it and keep the releases",
            names::ORPHAN_ANNOTATION
        );
        let (reason, message) = match self {
            Self::RereadDeletion => (
                reason::UNINSTALLING,
                "reading the deletion again".to_owned(),
            ),
            Self::Wait(cause) => (reason::UNINSTALL_WAITS, format!("{cause}; {remedy}")),
            Self::Uninstall(progress) => (reason::UNINSTALLING, format!("{progress}; {remedy}")),
            _ => return None,
        };
        Some(State::new(Truth::False, reason, message))
    }
}

impl FinalizerRemoval {
    /// Returns the reason and message of the event, if the cause has one.
    pub(super) fn event(self) -> Option<(&'static str, &'static str)> {
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
                "the CRD of EdgeClusters is being deleted; the member's releases stay",
            )),
        }
    }
}

/// Returns the order to publish. A held-back member receives no new order, but an uninstall order is
/// withdrawn. `is_retiring` is whether its last order was to uninstall: that order may belong to an earlier
/// EdgeCluster.
pub(super) fn order_to_publish(
    order: Option<MemberOrder>,
    held_back: bool,
    is_retiring: bool,
) -> Option<MemberOrder> {
    let stop = MemberOrder {
        paused: true,
        retire: false,
    };
    match held_back {
        false => order,
        true => is_retiring.then_some(stop),
    }
}

/// Returns the finalizers with or without Krypton's.
fn finalizers(object: &EdgeCluster, with_ours: bool) -> Vec<String> {
    let others = object.finalizers().iter();
    let others = others.filter(|finalizer| *finalizer != names::UNINSTALL_FINALIZER);
    let ours = with_ours.then(|| names::UNINSTALL_FINALIZER.to_owned());
    others.cloned().chain(ours).collect()
}

/// The state of deletions, by the EdgeCluster's UID.
#[derive(Debug, Default)]
pub(super) struct Decommissions {
    /// Confirmed deletions. They remain valid while this hub leads.
    confirmed: BTreeMap<String, DeletionCause>,
    /// Recorded events, one for each UID and reason.
    recorded_events: BTreeSet<(String, &'static str)>,
}

impl Decommissions {
    pub(crate) fn confirmed(&self, object: &EdgeCluster) -> Option<DeletionCause> {
        self.confirmed.get(object.metadata.uid.as_deref()?).copied()
    }

    pub(super) fn confirm(&mut self, uid: String, deletion: DeletionCause) {
        self.confirmed.insert(uid, deletion);
    }

    /// Discards confirmed deletions, because another hub may have led.
    pub(super) fn read_again(&mut self) {
        self.confirmed.clear();
    }

    /// Returns the event for this step, unless it [was recorded](Self::mark_recorded) before.
    pub(super) fn event(
        &self,
        object: &EdgeCluster,
        step: &DecommissionStep,
    ) -> Option<MemberEvent> {
        let (reason, message) = match step {
            DecommissionStep::Uninstall(_) => (
                reason::UNINSTALLING,
                "the EdgeCluster was deleted with deletionPolicy Uninstall; the member uninstalls its releases",
            ),
            DecommissionStep::RemoveFinalizer(removal) => removal.event()?,
            _ => return None,
        };
        let event = MemberEvent::new(object, reason, message.to_owned());
        let key = (event.uid.clone(), reason);
        (!self.recorded_events.contains(&key)).then_some(event)
    }

    /// Marks the event as recorded.
    pub(super) fn mark_recorded(&mut self, uid: String, reason: &'static str) {
        self.recorded_events.insert((uid, reason));
    }

    /// Forgets all other EdgeClusters.
    pub(super) fn retain(&mut self, exists: impl Fn(&str) -> bool) {
        self.confirmed.retain(|uid, _| exists(uid));
        self.recorded_events.retain(|(uid, _)| exists(uid));
    }
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

    fn remove(cause: FinalizerRemoval) -> DecommissionStep {
        DecommissionStep::RemoveFinalizer(cause)
    }

    /// A member that has uninstalled all releases.
    fn uninstalled() -> DecommissionState {
        DecommissionState {
            deletion: Some(DeletionCause::Object),
            held_back: None,
            connected: true,
            is_order_applied: true,
            uninstall_counts: Some(UninstallCounts {
                total: 2,
                uninstalled: 2,
            }),
        }
    }

    #[test]
    fn finalizer_follows_uninstall_policy_except_on_home() {
        let none = DecommissionState::default();
        let mut object = member(DeletionPolicy::Retain);
        assert_eq!(next_step(&object, &none), DecommissionStep::Nothing);
        object.spec.deletion_policy = DeletionPolicy::Uninstall;
        assert_eq!(next_step(&object, &none), DecommissionStep::AddFinalizer);
        object.metadata.finalizers = Some(vec!["example.org/a".to_owned()]);
        let with = finalizers(&object, true);
        assert_eq!(with, ["example.org/a", names::UNINSTALL_FINALIZER]);
        object.metadata.finalizers = Some(with);
        assert_eq!(next_step(&object, &none), DecommissionStep::Nothing);
        object.spec.deletion_policy = DeletionPolicy::Retain;
        let not_wanted = remove(FinalizerRemoval::NotWanted);
        assert_eq!(next_step(&object, &none), not_wanted);
        assert_eq!(finalizers(&object, false), ["example.org/a"]);
        let mut home = member(DeletionPolicy::Uninstall);
        home.metadata.name = Some(names::SELF_CLUSTER.to_owned());
        assert_eq!(next_step(&home, &none), DecommissionStep::Nothing);
    }

    #[test]
    fn finalizer_is_removed_once_nothing_is_left() {
        let none_at_all = DecommissionState {
            uninstall_counts: Some(UninstallCounts::default()),
            ..uninstalled()
        };
        for progress in [uninstalled(), none_at_all] {
            let expected = remove(FinalizerRemoval::Uninstalled);
            assert_eq!(next_step(&deleted(), &progress), expected);
        }
    }

    #[test]
    fn unfinished_uninstall_keeps_finalizer_and_states_reason() {
        let left = UninstallCounts {
            total: 2,
            uninstalled: 1,
        };
        let paused = "the EdgeCluster is paused";
        type Change<'a> = &'a dyn Fn(&mut DecommissionState);
        let changes: [(Change<'_>, &str); 5] = [
            (&|it| it.uninstall_counts = Some(left), "1 of 2"),
            (&|it| it.uninstall_counts = None, "confirmation"),
            (&|it| it.is_order_applied = false, "confirmation"),
            (&|it| it.connected = false, "unreachable"),
            (&|it| it.held_back = Some(paused.to_owned()), paused),
        ];
        for (change, expected) in changes {
            let mut progress = uninstalled();
            change(&mut progress);
            let step = next_step(&deleted(), &progress);
            assert!(
                !matches!(step, DecommissionStep::RemoveFinalizer(_)),
                "{progress:?}"
            );
            let message = step.condition().unwrap().message;
            assert!(
                message.contains(expected) && message.contains("orphan"),
                "{message}"
            );
        }
    }

    #[test]
    fn deletion_is_reread_and_crd_deletion_uninstalls_nothing() {
        let unread = DecommissionState {
            deletion: None,
            ..uninstalled()
        };
        let reread = DecommissionStep::RereadDeletion;
        assert_eq!(next_step(&deleted(), &unread), reread);
        let crd = DecommissionState {
            deletion: Some(DeletionCause::Crd),
            ..DecommissionState::default()
        };
        let crd_deleted = remove(FinalizerRemoval::CrdDeleted);
        assert_eq!(next_step(&deleted(), &crd), crd_deleted);
    }

    #[test]
    fn member_without_finalizer_gets_no_new_order() {
        let mut gone = deleted();
        gone.metadata.finalizers = None;
        assert_eq!(next_step(&gone, &uninstalled()), DecommissionStep::Gone);
        gone.spec.deletion_policy = DeletionPolicy::default();
        let unread = DecommissionState::default();
        assert_eq!(next_step(&gone, &unread), DecommissionStep::Gone);
    }

    #[test]
    fn only_confirmed_deletion_orders_uninstall() {
        let cause = String::new;
        let (pause, uninstall) = (Some((true, false)), Some((false, true)));
        for (step, expected) in [
            (DecommissionStep::Nothing, pause),
            (DecommissionStep::Gone, None),
            (DecommissionStep::AddFinalizer, pause),
            (DecommissionStep::RereadDeletion, None),
            (DecommissionStep::Wait(cause()), pause),
            (DecommissionStep::Uninstall(cause()), uninstall),
            (remove(FinalizerRemoval::NotWanted), pause),
            (remove(FinalizerRemoval::Uninstalled), None),
            (remove(FinalizerRemoval::Orphaned), pause),
            (remove(FinalizerRemoval::CrdDeleted), pause),
        ] {
            let order = step.order(true).map(|order| (order.paused, order.retire));
            assert_eq!(order, expected, "{step:?}");
        }
        assert_eq!(
            DecommissionStep::Nothing.order(false),
            Some(MemberOrder::default())
        );
    }

    #[test]
    fn uninstall_order_is_withdrawn_from_held_back_member() {
        let uninstall = DecommissionStep::Uninstall(String::new()).order(false);
        let stop = DecommissionStep::Wait(String::new()).order(false);
        assert_eq!(order_to_publish(uninstall, false, false), uninstall);
        assert_eq!(order_to_publish(uninstall, true, true), stop);
        assert_eq!(order_to_publish(uninstall, true, false), None);
        assert_eq!(order_to_publish(stop, false, true), stop);
        // Before the deletion is reread, the last order remains valid.
        assert_eq!(order_to_publish(None, false, true), None);
    }

    #[test]
    fn orphan_annotation_or_retain_policy_releases_immediately() {
        let unread = DecommissionState::default();
        let mut orphaned = deleted();
        orphaned
            .annotations_mut()
            .insert(names::ORPHAN_ANNOTATION.to_owned(), "true".to_owned());
        let mut retained = deleted();
        retained.spec.deletion_policy = DeletionPolicy::Retain;
        for object in [orphaned, retained] {
            let expected = remove(FinalizerRemoval::Orphaned);
            assert_eq!(next_step(&object, &unread), expected);
        }
    }

    #[test]
    fn confirmed_deletion_does_not_apply_to_recreated_cluster() {
        let mut decommissions = Decommissions::default();
        let object = deleted();
        assert_eq!(decommissions.confirmed(&object), None);
        decommissions.confirm("u".to_owned(), DeletionCause::Object);
        let ordered = DecommissionStep::Uninstall(String::new());
        let event = decommissions.event(&object, &ordered).unwrap();
        assert!(
            decommissions.event(&object, &ordered).is_some(),
            "no event before it is recorded"
        );
        decommissions.mark_recorded(event.uid, event.reason);
        assert!(
            decommissions.event(&object, &ordered).is_none(),
            "recorded twice"
        );
        assert_eq!(
            decommissions.confirmed(&object),
            Some(DeletionCause::Object)
        );
        let mut next = object.clone();
        next.metadata.uid = Some("v".to_owned());
        assert_eq!(decommissions.confirmed(&next), None);
        // Another hub may have led.
        decommissions.read_again();
        assert_eq!(decommissions.confirmed(&object), None);
        decommissions.retain(|uid| uid == "v");
        assert_eq!(decommissions.confirmed(&object), None);
    }
}
