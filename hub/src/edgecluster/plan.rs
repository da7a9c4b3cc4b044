//! Pure decisions over all EdgeClusters and sources.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_runtime::clock::BootTime;
use krypton_types::allowed_namespaces::Allowed;
use krypton_types::conditions::{TARGET_RESOLVED, find, reason};
use krypton_types::names;

use super::PATIENCE;
use super::api::{Bound, EdgeClusters, enrolled, joined};
use super::source_history::SourceHistory;
use crate::discovery::membership::{self, Before, Membership};
use crate::discovery::{Found, Source, Sources};
use crate::members::MemberRegistry;
use crate::members::duplicates::Claim;
use crate::proxy::Access;
use crate::tenants::{Target, Targets};

/// Returns when to assign new names even if a provider has not listed yet. `None` if no source waits for
/// that alone. A source that becomes readable is itself a change.
pub(crate) fn patience_ends(waiting: bool, begun: BootTime, now: BootTime) -> Option<BootTime> {
    let ends = BootTime(begun.0 + PATIENCE);
    (waiting && now < ends).then_some(ends)
}

/// Binds sources to members.
pub(super) fn members_now(
    sources: &Sources,
    bound: &Bound,
    book: &SourceHistory,
    patient: bool,
) -> Membership {
    let found: Vec<&Found> = sources.iter().collect();
    let before = Before {
        bound,
        dismissed: &book.dismissed(bound),
        patient,
    };
    membership::membership(&found, before)
}

/// The members with a source, each with the access to its cluster and its source.
pub(super) fn wanted(
    home: Option<&kube::Config>,
    membership: &Membership,
) -> BTreeMap<String, (Access, SourceRef)> {
    let mut wanted: BTreeMap<String, (Access, SourceRef)> = membership
        .members
        .iter()
        .map(|(name, source)| {
            let member = (access(source), source.origin.source_ref());
            (name.clone(), member)
        })
        .collect();
    if let Some(config) = home {
        let source = SourceRef {
            kind: membership::SELF_CLUSTER.to_owned(),
            namespace: None,
            name: None,
        };
        let access = Access::Home(Box::new(config.clone()));
        wanted.insert(names::SELF_CLUSTER.to_owned(), (access, source));
    }
    wanted
}

fn access(source: &Source) -> Access {
    Access::Kubeconfig(source.origin.clone(), source.access.clone())
}

pub(super) fn claims(
    known: &EdgeClusters,
    wanted: &BTreeMap<String, (Access, SourceRef)>,
    membership: &Membership,
    members: &MemberRegistry,
) -> BTreeMap<String, Claim> {
    // Members without an EdgeCluster count too: one of them may take precedence.
    let names: BTreeSet<&String> = known.objects.keys().chain(wanted.keys()).collect();
    names
        .into_iter()
        .map(|name| {
            let object = known.objects.get(name);
            let uid = members.cluster_uid(name);
            let agent = object.is_some_and(enrolled);
            let recorded = object.and_then(|object| object.status.as_ref()?.cluster_uid.clone());
            let claim = Claim {
                present: wanted.contains_key(name)
                    || membership.unseen.contains_key(name)
                    || object.is_some_and(joined),
                agent,
                created: object
                    .and_then(|object| object.metadata.creation_timestamp.as_ref())
                    .map(|time| time.0),
                // The hub does not wait for a member that it cannot access.
                attempted: uid.is_some() || !wanted.contains_key(name),
                // Until an agent reconnects, it counts as the recorded cluster.
                found: uid.flatten().or_else(|| recorded.clone().filter(|_| agent)),
                recorded,
            };
            (name.clone(), claim)
        })
        .collect()
}

/// Returns the epoch of the hub that wrote the object last.
pub(super) fn mark(object: &EdgeCluster) -> Option<u64> {
    object.status.as_ref()?.hub_epoch
}

pub(super) fn conditions(object: &EdgeCluster) -> &[Condition] {
    let status = object.status.as_ref();
    status.map_or(&[], |status| &status.conditions)
}

/// Settings of the member in its EdgeCluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wishes {
    pub(super) paused: bool,
    pub(super) banned: bool,
}

pub(super) fn wishes(object: &EdgeCluster) -> Wishes {
    let annotated = object
        .metadata
        .annotations
        .as_ref()
        .and_then(|annotations| annotations.get(names::PAUSED_ANNOTATION))
        .is_some_and(|value| value != "false");
    Wishes {
        paused: object.spec.paused || annotated,
        banned: object.spec.banned,
    }
}

/// Returns the namespaces on home whose Tenants may name the member.
pub(super) fn allowed(object: &EdgeCluster) -> Allowed {
    Allowed::new(object.spec.allowed_namespaces.as_deref())
}

/// Returns the members that Tenants on home may name.
pub(crate) fn targets(known: &EdgeClusters) -> Targets {
    let objects = known.objects.iter();
    objects
        .map(|(name, object)| {
            let source = object.spec.source_ref.as_ref();
            let target = Target {
                source_namespace: source.and_then(|source| source.namespace.clone()),
                allowed: allowed(object),
                cluster_uid: (object.status.as_ref()).and_then(|status| status.cluster_uid.clone()),
                duplicate: conditions(object)
                    .iter()
                    .any(|condition| condition.reason == reason::DUPLICATE),
                resolved: find(conditions(object), TARGET_RESOLVED),
            };
            (name.clone(), target)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::LOOK_EVERY;
    use super::*;

    #[test]
    fn unreadable_source_causes_no_polling() {
        let (begun, soon) = (BootTime(PATIENCE), BootTime(PATIENCE + LOOK_EVERY));
        let ends = BootTime(PATIENCE + PATIENCE);
        assert_eq!(patience_ends(true, begun, soon), Some(ends));
        assert_eq!(patience_ends(false, begun, soon), None);
        assert_eq!(patience_ends(true, begun, ends), None);
    }
}
