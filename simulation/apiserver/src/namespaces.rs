//! The controller of namespaces: their first content and their deletion.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::key::Key;
use crate::meta;
use crate::server::ApiServer;

pub(crate) const SYSTEM_NAMESPACES: [&str; 4] =
    ["default", "kube-node-lease", "kube-public", "kube-system"];

fn namespace_key(name: &str) -> Key {
    Key::new("", "namespaces", "", name)
}

impl ApiServer {
    pub(crate) fn is_namespace_terminating(&self, name: &str) -> bool {
        let namespace = self.store.get(&namespace_key(name));
        namespace.is_some_and(|namespace| meta::is_terminating(namespace))
    }

    pub(crate) fn sync_namespace(&mut self, name: &str, now: Timestamp) {
        let Some(namespace) = self.get(&namespace_key(name)) else {
            return;
        };
        match meta::is_terminating(&namespace) {
            true => self.delete_content(name, &namespace, now),
            false => self.create_initial_objects(name, now),
        }
    }

    /// Creates the objects that each namespace contains.
    fn create_initial_objects(&mut self, name: &str, now: Timestamp) {
        let certificate = format!("CA of {}", self.options.name);
        let description = "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints \
                     such as the internal service IP or kubernetes.default.svc. No other usage is guaranteed across \
                     distributions of Kubernetes clusters.";
        let objects = [
            ("serviceaccounts", json!({"metadata": {"name": "default"}})),
            (
                "configmaps",
                json!({
                    "metadata": {
                        "name": "kube-root-ca.crt",
                        "annotations": {"kubernetes.io/description": description},
                    },
                    "data": {"ca.crt": certificate},
                }),
            ),
        ];
        for (resource, object) in objects {
            let Some(kind) = self.kinds.get("", "v1", resource).cloned() else {
                continue;
            };
            let key = kind.key(name, meta::name(&object));
            if self.store.get(&key).is_none() {
                let write = self.controller_write(&kind, &key, "", now);
                drop(self.create(write, object));
            }
        }
    }

    /// Deletes the content, and then the namespace.
    fn delete_content(&mut self, name: &str, namespace: &Arc<Value>, now: Timestamp) {
        let contents: Vec<(Key, bool)> = self
            .store
            .objects()
            .filter(|(_, entry)| entry.key.namespace == name)
            .map(|(_, entry)| ((*entry.key).clone(), meta::is_terminating(&entry.value)))
            .collect();
        for (key, is_terminating) in contents {
            if !is_terminating {
                self.controller_delete(&key, &json!({}), now);
            }
        }
        let (resources, finalizers) = self.remaining(name);
        let is_empty = resources.is_empty();
        let conditions = conditions(namespace, &resources, &finalizers, now);
        if namespace["status"]["conditions"] != conditions {
            let mut next = (**namespace).clone();
            next["status"]["conditions"] = conditions;
            self.controller_update(&namespace_key(name), "status", now, next);
        }
        if is_empty && let Some(namespace) = self.get(&namespace_key(name)) {
            let mut next = (*namespace).clone();
            let finalizers = meta::strings(&namespace["spec"]["finalizers"]);
            let others: Vec<Value> = finalizers
                .filter(|finalizer| *finalizer != "kubernetes")
                .map(Value::from)
                .collect();
            next["spec"]["finalizers"] = others.into();
            self.controller_update(&namespace_key(name), "finalize", now, next);
        }
    }

    /// Returns the number of remaining objects by resource and by finalizer.
    fn remaining(&self, namespace: &str) -> (BTreeMap<String, usize>, BTreeMap<String, usize>) {
        let mut counts = (BTreeMap::new(), BTreeMap::new());
        let entries = self.store.objects();
        for (_, entry) in entries.filter(|(_, entry)| entry.key.namespace == namespace) {
            let group = &entry.key.group;
            let resource = match group.as_str() {
                "" => format!("{}.", entry.key.resource),
                group => format!("{}.{group}", entry.key.resource),
            };
            *counts.0.entry(resource).or_default() += 1;
            for finalizer in meta::finalizers(&entry.value) {
                *counts.1.entry(finalizer.to_owned()).or_default() += 1;
            }
        }
        counts
    }
}

fn conditions(
    namespace: &Value,
    resources: &BTreeMap<String, usize>,
    finalizers: &BTreeMap<String, usize>,
    now: Timestamp,
) -> Value {
    let describe = |counts: &BTreeMap<String, usize>, verb: &str| {
        let entries = counts.iter();
        let entries =
            entries.map(|(name, count)| format!("{name} {verb} {count} resource instances"));
        entries.collect::<Vec<_>>().join(", ")
    };
    let remaining = match resources.is_empty() {
        true => (
            "False",
            "ContentRemoved",
            "All content successfully removed".to_owned(),
        ),
        false => (
            "True",
            "SomeResourcesRemain",
            format!(
                "Some resources are remaining: {}",
                describe(resources, "has")
            ),
        ),
    };
    let finalizing = match finalizers.is_empty() {
        true => (
            "False",
            "ContentHasNoFinalizers",
            "All content-preserving finalizers finished".to_owned(),
        ),
        false => (
            "True",
            "SomeFinalizersRemain",
            format!(
                "Some content in the namespace has finalizers remaining: {}",
                describe(finalizers, "in")
            ),
        ),
    };
    let success = |reason, message: &str| ("False", reason, message.to_owned());
    let conditions = [
        (
            "NamespaceDeletionDiscoveryFailure",
            success(
                "ResourcesDiscovered",
                "All resources successfully discovered",
            ),
        ),
        (
            "NamespaceDeletionGroupVersionParsingFailure",
            success(
                "ParsedGroupVersions",
                "All legacy kube types successfully parsed",
            ),
        ),
        (
            "NamespaceDeletionContentFailure",
            success(
                "ContentDeleted",
                "All content successfully deleted, may be waiting on finalization",
            ),
        ),
        ("NamespaceContentRemaining", remaining),
        ("NamespaceFinalizersRemaining", finalizing),
    ];
    conditions
        .into_iter()
        .map(|(kind, (status, reason, message))| {
            json!({
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": meta::transition_time(namespace, kind, status, now),
            })
        })
        .collect()
}
