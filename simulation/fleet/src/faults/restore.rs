//! Restores the etcd of a cluster. The server reports no changes then, so this module reports the differences.

use std::collections::BTreeMap;
use std::sync::Arc;

use krypton_sim_apiserver::server::{Change, Key, Snapshot};
use krypton_types::names::GROUP;
use serde_json::Value;

use crate::conductor::Simulation;
use crate::observe::Event;
use crate::stage;

/// Writer of the changes that a restore makes.
pub const RESTORE_WRITER: &str = "etcd-restore";

/// The resources that oracles check.
const RESOURCES: [(&str, &str); 14] = [
    ("", "namespaces"),
    ("", "secrets"),
    ("", "configmaps"),
    ("", "services"),
    ("", "serviceaccounts"),
    ("", "pods"),
    ("apps", "deployments"),
    ("apps", "statefulsets"),
    ("batch", "jobs"),
    ("coordination.k8s.io", "leases"),
    (GROUP, "tenants"),
    (GROUP, "edgeclusters"),
    (GROUP, "kryptondeployments"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
];

type Objects = BTreeMap<Key, Arc<Value>>;

/// Writer of the changes that the rebuild of a cluster makes.
pub const REBUILD_WRITER: &str = "cluster-rebuild";

/// Replaces a cluster by an empty one at the same address. Its agent stops.
pub(super) fn rebuild(simulation: &mut Simulation, cluster: &str) {
    simulation.crash(&format!("agent-{cluster}"), None);
    let empty = stage::api_server(simulation, &format!("{cluster} again")).snapshot();
    restore(simulation, cluster, empty, REBUILD_WRITER);
    if let Err(error) = stage::create_namespaces(simulation, cluster) {
        let text = format!("{cluster} gets no namespaces: {error:#}");
        simulation.record(Event::Fault { text });
    }
}

/// Restores the store, and reports the changes with this writer.
pub(super) fn restore(
    simulation: &mut Simulation,
    cluster: &str,
    snapshot: Snapshot,
    writer: &str,
) {
    let before = objects(simulation, cluster);
    simulation.change_cluster(cluster, |cluster, _| cluster.server.restore(snapshot));
    let after = objects(simulation, cluster);
    let at = simulation.wall_time();
    for (key, before, after) in differences(&before, &after) {
        let revision = after.as_ref().and_then(|object| revision(object));
        let change = Change {
            revision: revision.unwrap_or_default(),
            at,
            key,
            before,
            after,
            by: writer.to_owned(),
            subresource: String::new(),
        };
        let cluster = cluster.to_owned();
        simulation.record(Event::Change { cluster, change });
    }
}

type ObjectDifference = (Key, Option<Arc<Value>>, Option<Arc<Value>>);

fn differences(before: &Objects, after: &Objects) -> Vec<ObjectDifference> {
    let mut keys: Vec<&Key> = before.keys().chain(after.keys()).collect();
    keys.sort();
    keys.dedup();
    let pairs = keys.into_iter().map(|key| {
        (
            key.clone(),
            before.get(key).cloned(),
            after.get(key).cloned(),
        )
    });
    pairs.filter(|(_, before, after)| before != after).collect()
}

fn revision(object: &Value) -> Option<u64> {
    object
        .pointer("/metadata/resourceVersion")?
        .as_str()?
        .parse()
        .ok()
}

fn objects(simulation: &Simulation, cluster: &str) -> Objects {
    let mut objects = Objects::new();
    for (group, resource) in RESOURCES {
        for object in simulation.objects(cluster, group, resource) {
            let text = |pointer: &str| {
                let text = object.pointer(pointer).and_then(Value::as_str);
                text.unwrap_or_default().to_owned()
            };
            let (namespace, name) = (text("/metadata/namespace"), text("/metadata/name"));
            objects.insert(Key::new(group, resource, &namespace, &name), object);
        }
    }
    objects
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(name: &str) -> Key {
        Key::new("", "secrets", "a", name)
    }

    #[test]
    fn differences_list_created_deleted_and_changed_objects() {
        let (one, two) = (Arc::new(json!(1)), Arc::new(json!(2)));
        let before = [
            (key("changed"), Arc::clone(&one)),
            (key("deleted"), Arc::clone(&one)),
            (key("same"), Arc::clone(&one)),
        ];
        let after = [
            (key("changed"), Arc::clone(&two)),
            (key("created"), Arc::clone(&two)),
            (key("same"), Arc::clone(&one)),
        ];
        let changes = differences(&before.into(), &after.into());
        assert_eq!(
            changes,
            [
                (
                    key("changed"),
                    Some(Arc::clone(&one)),
                    Some(Arc::clone(&two))
                ),
                (key("created"), None, Some(two)),
                (key("deleted"), Some(one), None),
            ]
        );
    }
}
