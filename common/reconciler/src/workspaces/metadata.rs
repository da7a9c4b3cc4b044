//! Configured labels and annotations of a workspace's namespace, in addition to Krypton's own marks.
//!
//! Computes the change that adds the configured keys and removes keys that were configured before. An annotation
//! records the configured keys. The API server's field managers cannot serve for that:
//!
//! - They distinguish a create from an apply, so keys from the create would stay forever.
//! - No apply creates an object but leaves an existing one unchanged. Some policies require the labels in the create.

use std::collections::{BTreeMap, BTreeSet};

use krypton_types::desired::namespaces::{self, NamespaceConfiguration};
use kube::core::ObjectMeta;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Annotation on a namespace that lists the configured keys.
pub(crate) const CONFIGURED_KEYS_ANNOTATION: &str = "mesh.openkcm.io/namespace-configuration";

/// Content of the annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct ConfiguredKeys {
    labels: BTreeSet<String>,
    annotations: BTreeSet<String>,
}

impl ConfiguredKeys {
    fn new(configuration: &NamespaceConfiguration) -> Self {
        Self {
            labels: configuration.labels.keys().cloned().collect(),
            annotations: configuration.annotations.keys().cloned().collect(),
        }
    }

    /// Reserved keys are dropped. A user who can write the annotation must not make Krypton remove its own marks.
    fn parse(text: Option<&String>) -> Self {
        let mut keys: Self = text
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        keys.labels.retain(|key| !namespaces::is_reserved(key));
        keys.annotations.retain(|key| !namespaces::is_reserved(key));
        keys
    }

    fn to_annotation(&self) -> Option<String> {
        let is_empty = *self == Self::default();
        // Serialization to memory cannot fail.
        (!is_empty).then(|| json!(self).to_string())
    }
}

/// All labels and annotations of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceMetadata {
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
}

impl NamespaceMetadata {
    pub fn new(meta: &ObjectMeta) -> Self {
        Self {
            labels: meta.labels.clone().unwrap_or_default(),
            annotations: meta.annotations.clone().unwrap_or_default(),
        }
    }

    /// Adds the configured keys, for the create request of a namespace.
    #[must_use]
    pub fn with_configuration(mut self, configuration: &NamespaceConfiguration) -> Self {
        self.labels.extend(configuration.labels.clone());
        self.annotations.extend(configuration.annotations.clone());
        if let Some(record) = ConfiguredKeys::new(configuration).to_annotation() {
            self.annotations
                .insert(CONFIGURED_KEYS_ANNOTATION.to_owned(), record);
        }
        self
    }

    /// Returns the `metadata` of the merge patch, or `None` if nothing differs.
    pub fn patch(&self, configuration: &NamespaceConfiguration) -> Option<Value> {
        let record = self.annotations.get(CONFIGURED_KEYS_ANNOTATION);
        let (previous, current) = (
            ConfiguredKeys::parse(record),
            ConfiguredKeys::new(configuration),
        );
        let labels = difference(&self.labels, &configuration.labels, &previous.labels);
        let mut annotations = difference(
            &self.annotations,
            &configuration.annotations,
            &previous.annotations,
        );
        let next = current.to_annotation();
        if record != next.as_ref() {
            annotations.insert(CONFIGURED_KEYS_ANNOTATION.to_owned(), json!(next));
        }
        let is_empty = labels.is_empty() && annotations.is_empty();
        (!is_empty).then(|| json!({"labels": labels, "annotations": annotations}))
    }
}

/// Returns the wanted keys that differ, and null for each configured key that is present but no longer wanted.
fn difference(
    current: &BTreeMap<String, String>,
    configuration: &BTreeMap<String, String>,
    previous: &BTreeSet<String>,
) -> Map<String, Value> {
    let set = configuration
        .iter()
        .filter(|(key, value)| current.get(*key) != Some(value));
    let set = set.map(|(key, value)| (key.clone(), json!(value)));
    let removed = previous
        .iter()
        .filter(|key| !configuration.contains_key(*key) && current.contains_key(*key));
    set.chain(removed.map(|key| (key.clone(), Value::Null)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let pairs = pairs.iter();
        pairs
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn configuration(
        labels: &[(&str, &str)],
        annotations: &[(&str, &str)],
    ) -> NamespaceConfiguration {
        NamespaceConfiguration {
            labels: map(labels),
            annotations: map(annotations),
        }
    }

    fn krypton_namespace() -> NamespaceMetadata {
        NamespaceMetadata {
            labels: map(&[("mesh.openkcm.io/created-for", "uid"), ("theirs", "1")]),
            annotations: map(&[("note", "theirs")]),
        }
    }

    /// Merges as the API server does.
    fn merged(namespace_metadata: &NamespaceMetadata, patch: &Value) -> NamespaceMetadata {
        let mut next = namespace_metadata.clone();
        for (map, part) in [
            (&mut next.labels, "labels"),
            (&mut next.annotations, "annotations"),
        ] {
            for (key, value) in patch[part].as_object().unwrap() {
                match value {
                    Value::Null => drop(map.remove(key)),
                    value => drop(map.insert(key.clone(), value.as_str().unwrap().to_owned())),
                }
            }
        }
        next
    }

    #[test]
    fn without_a_configuration_nothing_is_written() {
        let none = NamespaceConfiguration::default();
        assert_eq!(krypton_namespace().patch(&none), None);
        let created = krypton_namespace().with_configuration(&none);
        assert_eq!(created, krypton_namespace());
    }

    #[test]
    fn new_namespace_needs_no_metadata_patch() {
        let first = configuration(&[("team", "a"), ("zone", "1")], &[("owner", "x")]);
        let created = krypton_namespace().with_configuration(&first);
        assert_eq!(created.labels["team"], "a");
        assert_eq!(created.patch(&first), None);
    }

    #[test]
    fn configuration_change_updates_own_and_keeps_foreign_metadata() {
        let first = configuration(&[("team", "a"), ("zone", "1")], &[("owner", "x")]);
        let next = configuration(&[("team", "b")], &[]);
        let created = krypton_namespace().with_configuration(&first);
        let patch = created.patch(&next).unwrap();
        assert_eq!(patch["labels"], json!({"team": "b", "zone": null}));
        let updated = merged(&created, &patch);
        assert_eq!(updated.labels["theirs"], "1");
        assert_eq!(updated.annotations["note"], "theirs");
        assert!(!updated.labels.contains_key("zone") && !updated.annotations.contains_key("owner"));
        assert_eq!(updated.patch(&next), None);
        // Without a configuration, the namespace is as before.
        let none = NamespaceConfiguration::default();
        let patch = updated.patch(&none).unwrap();
        assert_eq!(merged(&updated, &patch), krypton_namespace());
        // A namespace that existed before the configuration gets its keys.
        let patch = krypton_namespace().patch(&next).unwrap();
        assert_eq!(merged(&krypton_namespace(), &patch), updated);
    }

    #[test]
    fn changed_or_removed_metadata_is_restored() {
        let first = configuration(&[("team", "a")], &[("owner", "x")]);
        let mut namespace_metadata = krypton_namespace().with_configuration(&first);
        let NamespaceMetadata {
            labels,
            annotations,
        } = &mut namespace_metadata;
        labels.insert("team".to_owned(), "mine".to_owned());
        annotations.remove("owner");
        let patch = namespace_metadata.patch(&first).unwrap();
        let expected = json!({"labels": {"team": "a"}, "annotations": {"owner": "x"}});
        assert_eq!(patch, expected);
        let annotations = &mut namespace_metadata.annotations;
        annotations.remove(CONFIGURED_KEYS_ANNOTATION);
        let patch = namespace_metadata.patch(&first).unwrap();
        let expected = krypton_namespace().with_configuration(&first);
        assert_eq!(merged(&namespace_metadata, &patch), expected);
    }

    #[test]
    fn namespace_markers_are_never_removed() {
        let mut namespace_metadata = krypton_namespace();
        let record = json!({"labels": ["mesh.openkcm.io/created-for", "theirs"]}).to_string();
        namespace_metadata
            .annotations
            .insert(CONFIGURED_KEYS_ANNOTATION.to_owned(), record);
        let patch = namespace_metadata
            .patch(&NamespaceConfiguration::default())
            .unwrap();
        assert_eq!(patch["labels"], json!({"theirs": null}));
        // An unreadable annotation counts as missing.
        namespace_metadata
            .annotations
            .insert(CONFIGURED_KEYS_ANNOTATION.to_owned(), "{".to_owned());
        let patch = namespace_metadata
            .patch(&NamespaceConfiguration::default())
            .unwrap();
        let removed = json!({"labels": {}, "annotations": {CONFIGURED_KEYS_ANNOTATION: null}});
        assert_eq!(patch, removed);
    }
}
