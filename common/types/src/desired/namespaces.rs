//! Labels and annotations of the namespaces that Krypton creates for workspaces.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::names::{self, is_label_value, is_qualified_name};

/// Configuration of a fleet or of one member.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NamespaceConfiguration {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// Why a configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigurationError {
    #[error("{0:?} is not a valid label or annotation key")]
    Key(String),
    #[error("{0:?} is Kubernetes' or Krypton's own")]
    Reserved(String),
    #[error("label {0:?} has an invalid value")]
    Value(String),
    #[error("more than 64 labels or annotations")]
    TooMany,
    #[error("labels and annotations are {0} bytes, more than 16384")]
    TooLarge(usize),
}

impl ConfigurationError {
    /// Returns the fix.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Key(_) => {
                "write at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, after a DNS name and '/' where there is a prefix"
            }
            Self::Reserved(_) => {
                "leave out kubernetes.io/metadata.name, app.kubernetes.io/managed-by and all of mesh.openkcm.io"
            }
            Self::Value(_) => {
                "write at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, or nothing"
            }
            Self::TooMany => "write at most 64 of each",
            Self::TooLarge(_) => "write at most 16 KiB in all",
        }
    }
}

impl NamespaceConfiguration {
    /// Limit for the number of labels, and for the number of annotations.
    pub const MAX_KEYS: usize = 64;
    /// Limit for the total size of keys and values.
    pub const MAX_BYTES: usize = 16 << 10;

    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.annotations.is_empty()
    }

    /// Returns this configuration with `over` merged into it, key by key.
    #[must_use]
    pub fn overlaid(&self, over: &Self) -> Self {
        let mut next = self.clone();
        next.labels.extend(over.labels.clone());
        next.annotations.extend(over.annotations.clone());
        next
    }

    /// Checks the configuration against the API server's rules and the reserved keys.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self) -> Result<(), ConfigurationError> {
        if self.labels.len() > Self::MAX_KEYS || self.annotations.len() > Self::MAX_KEYS {
            return Err(ConfigurationError::TooMany);
        }
        for key in self.labels.keys().chain(self.annotations.keys()) {
            if !is_qualified_name(key) {
                return Err(ConfigurationError::Key(key.clone()));
            }
            if is_reserved(key) {
                return Err(ConfigurationError::Reserved(key.clone()));
            }
        }
        let is_invalid = |(_, value): &(&String, &String)| !is_label_value(value);
        if let Some((key, _)) = self.labels.iter().find(is_invalid) {
            return Err(ConfigurationError::Value(key.clone()));
        }
        let all = self.labels.iter().chain(&self.annotations);
        let bytes = all.map(|(key, value)| key.len() + value.len()).sum();
        match bytes > Self::MAX_BYTES {
            true => Err(ConfigurationError::TooLarge(bytes)),
            false => Ok(()),
        }
    }
}

/// Returns whether a configuration must not set this key: the API server sets it, or Krypton marks its namespaces
/// with it.
pub fn is_reserved(key: &str) -> bool {
    let prefix = key.split_once('/').map_or("", |(prefix, _)| prefix);
    let is_ours = prefix
        .strip_suffix(names::GROUP)
        .is_some_and(|before| before.is_empty() || before.ends_with('.'));
    is_ours
        || [
            "kubernetes.io/metadata.name",
            "app.kubernetes.io/managed-by",
        ]
        .contains(&key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> NamespaceConfiguration {
        let pairs = pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        NamespaceConfiguration {
            labels: pairs.collect(),
            ..NamespaceConfiguration::default()
        }
    }

    fn annotations(pairs: &[(&str, &str)]) -> NamespaceConfiguration {
        NamespaceConfiguration {
            annotations: labels(pairs).labels,
            ..NamespaceConfiguration::default()
        }
    }

    #[test]
    fn valid_label_and_annotation_keys_are_accepted() {
        let long = format!("{}/{}", vec!["a".repeat(63); 3].join("."), "n".repeat(63));
        for (key, value) in [
            ("team", "a"),
            ("team", ""),
            ("Team_1.x", "A_b.C-9"),
            ("pod-security.kubernetes.io/enforce", "restricted"),
            ("kubernetes.io/other", "x"),
            ("my-mesh.openkcm.io.example.org/x", "x"),
            ("notmesh.openkcm.io/x", "x"),
            (long.as_str(), &"v".repeat(63)),
        ] {
            assert_eq!(labels(&[(key, value)]).check(), Ok(()), "{key}");
            assert_eq!(annotations(&[(key, "any: text, at all\n")]).check(), Ok(()));
        }
        assert_eq!(NamespaceConfiguration::default().check(), Ok(()));
    }

    #[test]
    fn invalid_keys_and_values_are_rejected_by_name() {
        let key = |key: &str| ConfigurationError::Key(key.to_owned());
        let long = "n".repeat(64);
        for bad in [
            "", "-a", "a-", "a b", "a/b/c", "/a", "a/", "UP.org/a", "ä", &long,
        ] {
            assert_eq!(labels(&[(bad, "x")]).check(), Err(key(bad)), "{bad}");
            assert_eq!(annotations(&[(bad, "x")]).check(), Err(key(bad)), "{bad}");
        }
        for bad in ["-", "a b", "ä", &long] {
            let refused = ConfigurationError::Value("team".to_owned());
            assert_eq!(labels(&[("team", bad)]).check(), Err(refused), "{bad}");
        }
    }

    #[test]
    fn reserved_namespace_labels_and_annotations_are_rejected() {
        for key in [
            "kubernetes.io/metadata.name",
            "app.kubernetes.io/managed-by",
            "mesh.openkcm.io/created-for",
            "mesh.openkcm.io/anything",
            "more.mesh.openkcm.io/anything",
        ] {
            let refused = Err(ConfigurationError::Reserved(key.to_owned()));
            assert_eq!(labels(&[(key, "x")]).check(), refused);
            assert_eq!(annotations(&[(key, "x")]).check(), refused);
        }
    }

    #[test]
    fn it_is_bounded() {
        let many: Vec<String> = (0..65).map(|n| format!("k{n}")).collect();
        let pairs: Vec<(&str, &str)> = many.iter().map(|key| (key.as_str(), "v")).collect();
        assert_eq!(labels(&pairs[..64]).check(), Ok(()));
        assert_eq!(labels(&pairs).check(), Err(ConfigurationError::TooMany));
        assert_eq!(
            annotations(&pairs).check(),
            Err(ConfigurationError::TooMany)
        );
        let fits = "x".repeat(NamespaceConfiguration::MAX_BYTES - 1);
        assert_eq!(annotations(&[("a", &fits)]).check(), Ok(()));
        let text = "x".repeat(NamespaceConfiguration::MAX_BYTES);
        let size = NamespaceConfiguration::MAX_BYTES + 1;
        let refused = Err(ConfigurationError::TooLarge(size));
        assert_eq!(annotations(&[("a", &text)]).check(), refused);
    }

    #[test]
    fn member_namespace_configuration_overrides_fleet_per_key() {
        let mut fleet = labels(&[("a", "1"), ("b", "1")]);
        fleet.annotations = labels(&[("c", "1")]).labels;
        let over = fleet.overlaid(&labels(&[("b", "2"), ("d", "2")]));
        assert_eq!(
            over.labels,
            labels(&[("a", "1"), ("b", "2"), ("d", "2")]).labels
        );
        assert_eq!(over.annotations, fleet.annotations);
    }
}
