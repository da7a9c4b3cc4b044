//! The relevant fields of a ClusterProfile. The parser is lenient: a malformed profile affects no other
//! profile.

use std::collections::BTreeMap;

use krypton_types::kubeconfig::SIZE_MAX;
use kube::api::DynamicObject;
use serde_json::{Map, Value};

use super::super::provider::ApiKind;
use super::super::{Source, SourceKind};

/// A profile is usable only with this condition.
const READY: &str = "ControlPlaneHealthy";

pub(super) const API: ApiKind = ApiKind {
    group: "multicluster.x-k8s.io",
    versions: &["v1alpha1"],
    plural: "clusterprofiles",
};

/// A ClusterProfile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Profile {
    /// The source without access.
    pub source: Source,
    /// Why the condition is missing or not `True`.
    pub unready: Option<String>,
    /// Clusters by name of the access provider, or an error that affects all of them.
    pub access: Result<BTreeMap<String, Map<String, Value>>, &'static str>,
}

impl Profile {
    /// `None` if the object is being deleted.
    pub(super) fn read(object: &DynamicObject) -> Option<Self> {
        let meta = &object.metadata;
        if meta.name.is_none() || meta.deletion_timestamp.is_some() {
            return None;
        }
        let status = object.data.get("status").unwrap_or(&Value::Null);
        Some(Self {
            source: Source::from_object(SourceKind::ClusterProfile, meta),
            unready: unready(status),
            access: access(status),
        })
    }
}

fn unready(status: &Value) -> Option<String> {
    let conditions = status.get("conditions").and_then(Value::as_array);
    let condition = conditions
        .into_iter()
        .flatten()
        .find(|condition| condition.get("type").and_then(Value::as_str) == Some(READY));
    let Some(condition) = condition else {
        return Some(format!("it has no condition {READY}"));
    };
    let text = |key| condition.get(key).and_then(Value::as_str).unwrap_or("");
    match text("status") {
        "True" => None,
        other => Some(format!(
            "its condition {READY} is {other:?}: {} {}",
            text("reason"),
            text("message")
        )),
    }
}

/// Reads the clusters of the access providers. If a name occurs twice, the current field wins over the
/// deprecated one.
fn access(status: &Value) -> Result<BTreeMap<String, Map<String, Value>>, &'static str> {
    let mut clusters = BTreeMap::new();
    let mut size = 0;
    for field in ["credentialProviders", "accessProviders"] {
        let items = match status.get(field) {
            None | Some(Value::Null) => continue,
            Some(Value::Array(items)) => items,
            Some(_) => return Err("its access providers are not a list"),
        };
        for item in items {
            // Profiles are kept in memory. The used part must fit into a kubeconfig anyway.
            size += item.to_string().len();
            if size > SIZE_MAX {
                return Err("its access providers are larger than 256 KiB; remove some");
            }
            let name = item.get("name").and_then(Value::as_str);
            let cluster = item.get("cluster").and_then(Value::as_object);
            let (Some(name), Some(cluster)) = (name, cluster) else {
                return Err("it has an access provider without a name or a cluster");
            };
            clusters.insert(name.to_owned(), cluster.clone());
        }
    }
    Ok(clusters)
}

/// A profile as an API server returns it.
#[cfg(test)]
pub(super) fn object(name: &str, status: Value) -> DynamicObject {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "multicluster.x-k8s.io/v1alpha1",
        "kind": "ClusterProfile",
        "metadata": {"name": name, "namespace": "fleet", "uid": format!("uid-{name}")},
        "spec": {"clusterManager": {"name": "a"}},
        "status": status,
    }))
    .unwrap()
}

#[cfg(test)]
mod tests {
    use krypton_types::names;
    use serde_json::json;

    use super::*;

    fn read(status: Value) -> Profile {
        Profile::read(&object("edge-1", status)).unwrap()
    }

    #[test]
    fn profile_is_ready_only_with_healthy_control_plane() {
        let condition = |type_: &str, status: &str| json!({"conditions": [{"type": type_, "status": status, "reason": "Why", "message": "so"}]});
        assert_eq!(read(condition(READY, "True")).unready, None);
        for (status, expected) in [
            (Value::Null, "no condition"),
            (json!({"conditions": null}), "no condition"),
            (condition("Joined", "True"), "no condition"),
            (condition(READY, "False"), "\"False\": Why so"),
            (condition(READY, "true"), "\"true\""),
        ] {
            let problem = read(status.clone()).unready.unwrap();
            assert!(problem.contains(expected), "{status}: {problem}");
        }
    }

    #[test]
    fn the_current_field_wins_over_the_deprecated_one() {
        let profile = read(json!({
            "credentialProviders": [
                {"name": "a", "cluster": {"server": "https://old"}},
                {"name": "b", "cluster": {"server": "https://only"}},
            ],
            "accessProviders": [{"name": "a", "cluster": {"server": "https://new"}}],
        }));
        let access = profile.access.unwrap();
        assert_eq!(access["a"]["server"], "https://new");
        assert_eq!(access["b"]["server"], "https://only");
    }

    #[test]
    fn annotation_names_member_and_deleting_profile_is_ignored() {
        let mut profile = object("edge-1", Value::Null);
        let annotations = [(names::MEMBER_NAME_ANNOTATION.to_owned(), "paris".to_owned())];
        profile.metadata.annotations = Some(annotations.into());
        assert_eq!(Profile::read(&profile).unwrap().source.member, "paris");
        let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH);
        profile.metadata.deletion_timestamp = Some(now);
        assert_eq!(Profile::read(&profile), None);
    }

    #[test]
    fn malformed_profile_is_rejected_without_panic() {
        for status in [
            json!({"accessProviders": {}}),
            json!({"accessProviders": [{"name": "a"}]}),
            json!({"accessProviders": [1]}),
            json!({"accessProviders": [{"name": "a", "cluster": {"x": "y".repeat(SIZE_MAX)}}]}),
        ] {
            assert!(read(status).access.is_err());
        }
        let none = json!({"accessProviders": null, "credentialProviders": null});
        assert_eq!(read(none).access, Ok(BTreeMap::new()));
    }
}
