//! Members that the hub does not connect to until an operator accepts their source.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{State, Truth, reason};

use crate::edgecluster::api::{EdgeClusters, is_enrolled};
use crate::home_events::MemberEvent;
use crate::proxy::Shared;

/// The namespaces whose sources make members immediately; `None` stands for all.
#[derive(Clone, Debug)]
pub struct AcceptedNamespaces(pub Option<BTreeSet<String>>);

impl AcceptedNamespaces {
    /// Whether the hub connects by a new source immediately. Home and files have no namespace.
    fn accepts(&self, source: &SourceRef) -> bool {
        match (&self.0, &source.namespace) {
            (Some(namespaces), Some(namespace)) => namespaces.contains(namespace),
            _ => true,
        }
    }
}

/// Whether the hub may connect by the member's source. An EdgeCluster without the field was created by
/// an operator or by an earlier hub.
pub(super) fn is_accepted(object: &EdgeCluster) -> bool {
    object.spec.accepted != Some(false)
}

/// Takes the members out of `with_source` that wait for an operator, those without an EdgeCluster included.
pub(super) fn take_waiting<T>(
    with_source: &mut BTreeMap<String, (T, SourceRef)>,
    edge_clusters: &EdgeClusters,
    accepted_namespaces: &AcceptedNamespaces,
) -> BTreeMap<String, (T, SourceRef)> {
    let is_waiting =
        |name: &String, (_, source): &mut (T, SourceRef)| match edge_clusters.objects.get(name) {
            Some(object) => !is_accepted(object),
            None => !accepted_namespaces.accepts(source),
        };
    with_source.extract_if(.., is_waiting).collect()
}

/// Reports that the member waits, and records one event that explains how to accept it.
pub(super) fn report_waiting(
    shared: &Arc<Shared>,
    name: &str,
    object: &EdgeCluster,
    may_write: bool,
    now: BootTime,
) {
    let message = format!(
        "the source in spec.sourceRef is not accepted, so the hub does not connect; to accept the member, run: kubectl krypton accept {name}"
    );
    let state = State::new(Truth::False, reason::NOT_ACCEPTED, message.clone());
    let mut is_new = false;
    shared.members.observe(name, |observation| {
        is_new = observation.resolved != state;
        observation.resolved = state.clone();
    });
    // An agent needs no acceptance.
    let link = (!is_enrolled(object)).then_some(state);
    shared.members.set_connection(name, link, now);
    if is_new && may_write {
        let event = MemberEvent::new(object, reason::NOT_ACCEPTED, message);
        shared.notices.warn(event);
    }
}

#[cfg(test)]
mod tests {
    use krypton_crds::edge_cluster::EdgeClusterSpec;

    use super::*;

    fn source(namespace: Option<&str>) -> SourceRef {
        SourceRef {
            kind: "Secret".to_owned(),
            namespace: namespace.map(str::to_owned),
            name: Some("edge".to_owned()),
        }
    }

    /// The members that wait, of one source.
    fn is_waiting(
        namespace: Option<&str>,
        accepted: Option<Option<bool>>,
        listed: Option<&str>,
    ) -> bool {
        let mut edge_clusters = EdgeClusters::default();
        if let Some(accepted) = accepted {
            let spec = EdgeClusterSpec {
                accepted,
                source_ref: Some(source(namespace)),
                ..EdgeClusterSpec::default()
            };
            let object = EdgeCluster::new("edge", spec);
            edge_clusters.objects.insert("edge".to_owned(), object);
        }
        let mut with_source = [("edge".to_owned(), ((), source(namespace)))].into();
        let accepted_namespaces = AcceptedNamespaces(listed.map(|name| [name.to_owned()].into()));
        let waiting = take_waiting(&mut with_source, &edge_clusters, &accepted_namespaces);
        assert_eq!(with_source.len() + waiting.len(), 1);
        !waiting.is_empty()
    }

    #[test]
    fn source_outside_the_hubs_namespace_waits_for_acceptance() {
        let (hub_only, any) = (Some("krypton"), None);
        // New ones: by their namespace.
        assert!(!is_waiting(Some("krypton"), None, hub_only));
        assert!(is_waiting(Some("team-a"), None, hub_only));
        assert!(!is_waiting(Some("team-a"), None, any));
        assert!(!is_waiting(None, None, hub_only), "a file, or home");
        // For an existing EdgeCluster the field alone decides.
        for namespace in [Some("krypton"), Some("team-a"), None] {
            assert!(is_waiting(namespace, Some(Some(false)), hub_only));
            assert!(is_waiting(namespace, Some(Some(false)), any));
            assert!(!is_waiting(namespace, Some(Some(true)), hub_only));
            assert!(!is_waiting(namespace, Some(None), hub_only));
        }
    }
}
