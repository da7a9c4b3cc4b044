//! The form of a manifest's object that Helm applies.

use std::hash::{DefaultHasher, Hash, Hasher};

use krypton_helm::releases::labels::ReleaseKey;
use serde_json::{Map, Value};

const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "Helm");
const RELEASE_NAME: &str = "meta.helm.sh/release-name";
const RELEASE_NAMESPACE: &str = "meta.helm.sh/release-namespace";
/// Metadata that the API server sets.
const SERVER_FIELDS: [&str; 7] = [
    "creationTimestamp",
    "deletionTimestamp",
    "generation",
    "managedFields",
    "resourceVersion",
    "selfLink",
    "uid",
];

/// Returns the object that Helm applies: the manifest's object with the marks of its release.
pub(super) fn applied(manifest: &Value, release: &ReleaseKey) -> Value {
    let mut object = manifest.clone();
    let Some(meta) = object_field(&mut object, "metadata") else {
        return object;
    };
    for key in SERVER_FIELDS {
        meta.remove(key);
    }
    let mut set = |section: &str, key: &str, value: &str| {
        let map = meta.entry(section).or_insert(Value::Null);
        if map.is_null() {
            *map = Value::Object(Map::new());
        }
        if let Value::Object(map) = map {
            map.insert(key.to_owned(), value.into());
        }
    };
    set("labels", MANAGED_BY.0, MANAGED_BY.1);
    set("annotations", RELEASE_NAME, &release.name);
    set("annotations", RELEASE_NAMESPACE, &release.namespace);
    object
}

fn object_field<'a>(object: &'a mut Value, key: &str) -> Option<&'a mut Map<String, Value>> {
    object.as_object_mut()?.get_mut(key)?.as_object_mut()
}

/// Restricts the apply to the live object at its current version.
pub(super) fn with_live_identity(mut applied: Value, live: &Value) -> Value {
    if let Some(meta) = object_field(&mut applied, "metadata") {
        for key in ["uid", "resourceVersion"] {
            if let Some(value) = live.pointer(&format!("/metadata/{key}")) {
                meta.insert(key.to_owned(), value.clone());
            }
        }
    }
    applied
}

/// Returns the release that the object's annotations name, if it is another one.
pub(super) fn other_release(live: &Value, release: &ReleaseKey) -> Option<String> {
    let annotations = &live["metadata"]["annotations"];
    let name = annotations[RELEASE_NAME].as_str()?;
    let namespace = annotations[RELEASE_NAMESPACE].as_str()?;
    let is_ours = name == release.name && namespace == release.namespace;
    (!is_ours).then(|| format!("{namespace}/{name}"))
}

/// Returns true if the object's annotations name this release.
pub(super) fn belongs_to(live: &Value, release: &ReleaseKey) -> bool {
    let name = live["metadata"]["annotations"].get(RELEASE_NAME);
    name.is_some() && other_release(live, release).is_none()
}

/// Hashes all inputs of a comparison: the whole object, or everything except its status if it has a generation.
pub(super) fn comparison_hash(live: &Value) -> u64 {
    let field = |key: &str| live.pointer(key).map(Value::to_string);
    let mut hasher = DefaultHasher::new();
    let generation = live.pointer("/metadata/generation").and_then(Value::as_u64);
    field("/metadata/uid").hash(&mut hasher);
    match generation.filter(|generation| *generation > 0) {
        Some(generation) => {
            generation.hash(&mut hasher);
            for key in ["labels", "annotations", "deletionTimestamp"] {
                field(&format!("/metadata/{key}")).hash(&mut hasher);
            }
        }
        None => field("/metadata/resourceVersion").hash(&mut hasher),
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    pub(super) fn release() -> ReleaseKey {
        ReleaseKey::new("acme", "web")
    }

    #[test]
    fn applied_object_has_helm_metadata_without_server_fields() {
        let marked = json!({
            "labels": {"app.kubernetes.io/managed-by": "Helm"},
            "annotations": {"meta.helm.sh/release-name": "web", "meta.helm.sh/release-namespace": "acme"},
        });
        for metadata in [
            json!({}),
            json!({"labels": null, "annotations": null}),
            json!({"creationTimestamp": null, "uid": "u", "resourceVersion": "1", "managedFields": []}),
        ] {
            let object = applied(&json!({"metadata": metadata, "status": {}}), &release());
            assert_eq!(object, json!({"metadata": marked, "status": {}}));
        }
        let labelled = json!({"metadata": {"labels": {"a": "b"}}});
        let object = applied(&labelled, &release());
        assert_eq!(object.pointer("/metadata/labels/a"), Some(&json!("b")));
    }

    #[test]
    fn write_carries_live_uid_and_resource_version() {
        let live = json!({"metadata": {"uid": "u", "resourceVersion": "7", "labels": {}}});
        let written = with_live_identity(json!({"metadata": {"name": "a"}}), &live);
        let expected = json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "7"}});
        assert_eq!(written, expected);
    }

    #[test]
    fn object_of_different_release_is_detected() {
        let object_of = |name: &str| {
            json!({"metadata": {"annotations": {
                "meta.helm.sh/release-name": name, "meta.helm.sh/release-namespace": "acme"}}})
        };
        assert_eq!(other_release(&object_of("web"), &release()), None);
        assert_eq!(other_release(&json!({}), &release()), None);
        let other = other_release(&object_of("other"), &release());
        assert_eq!(other.as_deref(), Some("acme/other"));
    }

    #[test]
    fn status_only_change_skips_comparison_when_generation_exists() {
        let object = |generation: u64, version: &str, label: &str| {
            let meta = json!({"uid": "u", "generation": generation,
                "resourceVersion": version, "labels": {"a": label}});
            comparison_hash(&json!({ "metadata": meta }))
        };
        assert_eq!(object(2, "1", "x"), object(2, "2", "x"));
        assert_ne!(object(2, "1", "x"), object(3, "1", "x"));
        assert_ne!(object(2, "1", "x"), object(2, "1", "y"));
        assert_ne!(object(0, "1", "x"), object(0, "2", "x"));
    }
}
