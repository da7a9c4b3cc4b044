//! Pure decisions over all EdgeClusters and sources.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_runtime::clock::BootTime;
use krypton_types::allowed_namespaces::AllowedNamespaces;
use krypton_types::conditions::{TARGET_RESOLVED, find, reason};
use krypton_types::names;
use kube::ResourceExt as _;

use super::SOURCES_GRACE;
use super::api::{EdgeClusters, is_enrolled, is_joined};
use crate::discovery::membership::{self, Membership};
use crate::members::MemberRegistry;
use crate::members::duplicates::MemberIdentity;
use crate::members::tenant_reports::{Target, Targets};
use crate::proxy::Access;

/// Members, each with the access to its cluster and its source.
pub(super) type MemberSources = BTreeMap<String, (Access, SourceRef)>;

/// Returns when to assign new names even if a provider has not listed yet. `None` if no source waits for
/// that alone. A source that becomes readable is itself a change.
pub(crate) fn grace_ends(waiting: bool, started: BootTime, now: BootTime) -> Option<BootTime> {
    let grace_end = started + SOURCES_GRACE;
    (waiting && now < grace_end).then_some(grace_end)
}

/// Returns the members with a source.
pub(super) fn members_with_source(
    home: Option<&kube::Config>,
    membership: &Membership,
) -> MemberSources {
    let mut with_source: MemberSources = membership
        .members
        .iter()
        .map(|(name, source)| {
            let access = Access::Kubeconfig(source.origin.clone(), source.access.clone());
            (name.clone(), (access, source.origin.source_ref()))
        })
        .collect();
    if let Some(config) = home {
        let source = SourceRef {
            kind: membership::SELF_CLUSTER.to_owned(),
            namespace: None,
            name: None,
        };
        let access = Access::Home(Box::new(config.clone()));
        with_source.insert(names::SELF_CLUSTER.to_owned(), (access, source));
    }
    with_source
}

pub(super) fn identities(
    edge_clusters: &EdgeClusters,
    with_source: &MemberSources,
    membership: &Membership,
    members: &MemberRegistry,
) -> BTreeMap<String, MemberIdentity> {
    // Members without an EdgeCluster count too: one of them may take precedence.
    let names: BTreeSet<&String> = edge_clusters
        .objects
        .keys()
        .chain(with_source.keys())
        .collect();
    names
        .into_iter()
        .map(|name| {
            let object = edge_clusters.objects.get(name);
            let uid = members.cluster_uid(name);
            let agent = object.is_some_and(is_enrolled);
            let recorded = object.and_then(|object| object.status.as_ref()?.cluster_uid.clone());
            let identity = MemberIdentity {
                present: with_source.contains_key(name)
                    || membership.unseen.contains_key(name)
                    || object.is_some_and(is_joined),
                agent,
                created: object
                    .and_then(|object| object.metadata.creation_timestamp.as_ref())
                    .map(|time| time.0),
                // The hub does not wait for a member that it cannot access.
                attempted: uid.is_some() || !with_source.contains_key(name),
                // Until an agent reconnects, it counts as the recorded cluster.
                current_uid: uid.flatten().or_else(|| recorded.clone().filter(|_| agent)),
                recorded_uid: recorded,
            };
            (name.clone(), identity)
        })
        .collect()
}

/// Returns the epoch of the hub that wrote the object last.
pub(super) fn written_epoch(object: &EdgeCluster) -> Option<u64> {
    object.status.as_ref()?.hub_epoch
}

pub(super) fn conditions(object: &EdgeCluster) -> &[Condition] {
    let status = object.status.as_ref();
    status.map_or(&[], |status| &status.conditions)
}

pub(super) fn is_paused(object: &EdgeCluster) -> bool {
    let annotation = object.annotations().get(names::PAUSED_ANNOTATION);
    object.spec.paused || annotation.is_some_and(|value| value != "false")
}

/// Returns the namespaces on home whose Tenants may name the member.
pub(super) fn allowed(object: &EdgeCluster) -> AllowedNamespaces {
    AllowedNamespaces::new(object.spec.allowed_namespaces.as_deref())
}

/// Returns the members that Tenants on home may name.
pub(crate) fn targets(edge_clusters: &EdgeClusters) -> Targets {
    let objects = edge_clusters.objects.iter();
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
    use super::super::RECONCILE_EVERY;
    use super::*;

    #[test]
    fn unreadable_source_causes_no_polling() {
        let (started, soon) = (
            BootTime(SOURCES_GRACE),
            BootTime(SOURCES_GRACE + RECONCILE_EVERY),
        );
        let grace_end = BootTime(SOURCES_GRACE + SOURCES_GRACE);
        assert_eq!(grace_ends(true, started, soon), Some(grace_end));
        assert_eq!(grace_ends(false, started, soon), None);
        assert_eq!(grace_ends(true, started, grace_end), None);
    }
}
