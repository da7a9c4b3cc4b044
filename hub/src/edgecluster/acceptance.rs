//! Members that the hub does not connect to until an operator accepts their source.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{State, Truth, reason};

use crate::edgecluster::api::{EdgeClusters, enrolled};
use crate::notices::MemberEvent;
use crate::proxy::Shared;

/// The namespaces whose sources make members immediately; `None` stands for all.
#[derive(Clone, Debug)]
pub struct Accepting(pub Option<BTreeSet<String>>);

impl Accepting {
    /// Whether the hub connects by a new source immediately. Home and files have no namespace.
    fn at_once(&self, source: &SourceRef) -> bool {
        match (&self.0, &source.namespace) {
            (Some(listed), Some(namespace)) => listed.contains(namespace),
            _ => true,
        }
    }
}

/// Whether the hub may connect by the member's source. An EdgeCluster without the field was created by
/// an operator or by an earlier hub.
pub(super) fn is_accepted(object: &EdgeCluster) -> bool {
    object.spec.accepted != Some(false)
}

/// Takes the members out of `wanted` that wait for an operator, those without an EdgeCluster included.
pub(super) fn take_waiting<T>(
    wanted: &mut BTreeMap<String, (T, SourceRef)>,
    known: &EdgeClusters,
    accepting: &Accepting,
) -> BTreeMap<String, (T, SourceRef)> {
    let waits = |name: &String, (_, source): &mut (T, SourceRef)| match known.objects.get(name) {
        Some(object) => !is_accepted(object),
        None => !accepting.at_once(source),
    };
    wanted.extract_if(.., waits).collect()
}

/// Shows that the member waits, and tells once how to accept it.
pub(super) fn say_waiting(
    shared: &Arc<Shared>,
    name: &str,
    object: &EdgeCluster,
    leading: bool,
    now: BootTime,
) {
    let message = format!(
        "the hub does not connect by spec.sourceRef until an operator accepts the member; run: kubectl krypton accept {name}"
    );
    let state = State::new(Truth::False, reason::NOT_ACCEPTED, message.clone());
    let mut news = false;
    shared.members.observe(name, |facts| {
        news = facts.resolved != state;
        facts.resolved = state.clone();
    });
    // An agent needs no acceptance.
    let link = (!enrolled(object)).then_some(state);
    shared.members.link(name, link, now);
    if news && leading {
        shared.notices.tell(MemberEvent {
            member: name.to_owned(),
            uid: object.metadata.uid.clone().unwrap_or_default(),
            reason: reason::NOT_ACCEPTED,
            message,
        });
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
    fn waits(
        namespace: Option<&str>,
        accepted: Option<Option<bool>>,
        listed: Option<&str>,
    ) -> bool {
        let mut known = EdgeClusters::default();
        if let Some(accepted) = accepted {
            let spec = EdgeClusterSpec {
                accepted,
                source_ref: Some(source(namespace)),
                ..EdgeClusterSpec::default()
            };
            let object = EdgeCluster::new("edge", spec);
            known.objects.insert("edge".to_owned(), object);
        }
        let mut wanted = [("edge".to_owned(), ((), source(namespace)))].into();
        let accepting = Accepting(listed.map(|name| [name.to_owned()].into()));
        let waiting = take_waiting(&mut wanted, &known, &accepting);
        assert_eq!(wanted.len() + waiting.len(), 1);
        !waiting.is_empty()
    }

    #[test]
    fn source_outside_the_hubs_namespace_waits_for_acceptance() {
        let (hub, all) = (Some("krypton"), None);
        // New ones: by their namespace.
        assert!(!waits(Some("krypton"), None, hub));
        assert!(waits(Some("team-a"), None, hub));
        assert!(!waits(Some("team-a"), None, all));
        assert!(!waits(None, None, hub), "a file, or home");
        // For an existing EdgeCluster the field alone decides.
        for namespace in [Some("krypton"), Some("team-a"), None] {
            assert!(waits(namespace, Some(Some(false)), hub));
            assert!(waits(namespace, Some(Some(false)), all));
            assert!(!waits(namespace, Some(Some(true)), hub));
            assert!(!waits(namespace, Some(None), hub));
        }
    }
}
