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
pub(crate) const GIVEN_ANNOTATION: &str = "mesh.openkcm.io/namespace-configuration";

/// Content of the annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Given {
    labels: BTreeSet<String>,
    annotations: BTreeSet<String>,
}

impl Given {
    fn of(configuration: &NamespaceConfiguration) -> Self {
        Self {
            labels: configuration.labels.keys().cloned().collect(),
            annotations: configuration.annotations.keys().cloned().collect(),
        }
    }

    /// Reserved keys are dropped. A user who can write the annotation must not make Krypton remove its own marks.
    fn read(text: Option<&String>) -> Self {
        let mut given: Self = text
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        given.labels.retain(|key| !namespaces::is_reserved(key));
        given
            .annotations
            .retain(|key| !namespaces::is_reserved(key));
        given
    }

    fn written(&self) -> Option<String> {
        let nothing = *self == Self::default();
        // Serialization to memory cannot fail.
        (!nothing).then(|| json!(self).to_string())
    }
}

/// All labels and annotations of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceMetadata {
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
}

impl NamespaceMetadata {
    pub fn of(meta: &ObjectMeta) -> Self {
        Self {
            labels: meta.labels.clone().unwrap_or_default(),
            annotations: meta.annotations.clone().unwrap_or_default(),
        }
    }

    /// Adds the configured keys, for the create request of a namespace.
    #[must_use]
    pub fn given(mut self, wanted: &NamespaceConfiguration) -> Self {
        self.labels.extend(wanted.labels.clone());
        self.annotations.extend(wanted.annotations.clone());
        if let Some(record) = Given::of(wanted).written() {
            self.annotations.insert(GIVEN_ANNOTATION.to_owned(), record);
        }
        self
    }

    /// Returns the `metadata` of the merge patch, or `None` if nothing differs.
    pub fn change(&self, wanted: &NamespaceConfiguration) -> Option<Value> {
        let record = self.annotations.get(GIVEN_ANNOTATION);
        let (before, after) = (Given::read(record), Given::of(wanted));
        let labels = difference(&self.labels, &wanted.labels, &before.labels);
        let mut annotations =
            difference(&self.annotations, &wanted.annotations, &before.annotations);
        let next = after.written();
        if record != next.as_ref() {
            annotations.insert(GIVEN_ANNOTATION.to_owned(), json!(next));
        }
        let nothing = labels.is_empty() && annotations.is_empty();
        (!nothing).then(|| json!({"labels": labels, "annotations": annotations}))
    }
}

/// Returns the wanted keys that differ, and null for each configured key that is present but no longer wanted.
fn difference(
    there: &BTreeMap<String, String>,
    wanted: &BTreeMap<String, String>,
    given: &BTreeSet<String>,
) -> Map<String, Value> {
    let set = wanted
        .iter()
        .filter(|(key, value)| there.get(*key) != Some(value));
    let set = set.map(|(key, value)| (key.clone(), json!(value)));
    let gone = given
        .iter()
        .filter(|key| !wanted.contains_key(*key) && there.contains_key(*key));
    set.chain(gone.map(|key| (key.clone(), Value::Null)))
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

    fn wanted(labels: &[(&str, &str)], annotations: &[(&str, &str)]) -> NamespaceConfiguration {
        NamespaceConfiguration {
            labels: map(labels),
            annotations: map(annotations),
        }
    }

    fn marked() -> NamespaceMetadata {
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
        assert_eq!(marked().change(&none), None);
        assert_eq!(marked().given(&none), marked());
    }

    #[test]
    fn new_namespace_needs_no_metadata_patch() {
        let first = wanted(&[("team", "a"), ("zone", "1")], &[("owner", "x")]);
        let made = marked().given(&first);
        assert_eq!(made.labels["team"], "a");
        assert_eq!(made.change(&first), None);
    }

    #[test]
    fn configuration_change_updates_own_and_keeps_foreign_metadata() {
        let first = wanted(&[("team", "a"), ("zone", "1")], &[("owner", "x")]);
        let next = wanted(&[("team", "b")], &[]);
        let made = marked().given(&first);
        let patch = made.change(&next).unwrap();
        assert_eq!(patch["labels"], json!({"team": "b", "zone": null}));
        let now = merged(&made, &patch);
        assert_eq!(now.labels["theirs"], "1");
        assert_eq!(now.annotations["note"], "theirs");
        assert!(!now.labels.contains_key("zone") && !now.annotations.contains_key("owner"));
        assert_eq!(now.change(&next), None);
        // Without a configuration, the namespace is as before.
        let none = NamespaceConfiguration::default();
        let patch = now.change(&none).unwrap();
        assert_eq!(merged(&now, &patch), marked());
        // A namespace that existed before the configuration gets its keys.
        let patch = marked().change(&next).unwrap();
        assert_eq!(merged(&marked(), &patch), now);
    }

    #[test]
    fn changed_or_removed_metadata_is_restored() {
        let first = wanted(&[("team", "a")], &[("owner", "x")]);
        let mut namespace_metadata = marked().given(&first);
        namespace_metadata
            .labels
            .insert("team".to_owned(), "mine".to_owned());
        namespace_metadata.annotations.remove("owner");
        let patch = namespace_metadata.change(&first).unwrap();
        assert_eq!(
            patch,
            json!({"labels": {"team": "a"}, "annotations": {"owner": "x"}})
        );
        namespace_metadata.annotations.remove(GIVEN_ANNOTATION);
        let patch = namespace_metadata.change(&first).unwrap();
        assert_eq!(merged(&namespace_metadata, &patch), marked().given(&first));
    }

    #[test]
    fn namespace_markers_are_never_removed() {
        let mut namespace_metadata = marked();
        let record = json!({"labels": ["mesh.openkcm.io/created-for", "theirs"]}).to_string();
        namespace_metadata
            .annotations
            .insert(GIVEN_ANNOTATION.to_owned(), record);
        let patch = namespace_metadata
            .change(&NamespaceConfiguration::default())
            .unwrap();
        assert_eq!(patch["labels"], json!({"theirs": null}));
        // An unreadable annotation counts as missing.
        namespace_metadata
            .annotations
            .insert(GIVEN_ANNOTATION.to_owned(), "{".to_owned());
        let patch = namespace_metadata
            .change(&NamespaceConfiguration::default())
            .unwrap();
        assert_eq!(
            patch,
            json!({"labels": {}, "annotations": {GIVEN_ANNOTATION: null}})
        );
    }
}
