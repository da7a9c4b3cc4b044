//! What the server adds to a CRD that is written.

use serde_json::{Value, json};

/// Completes a new or changed CRD.
pub(crate) fn set_defaults(object: &mut Value) {
    let spec = &mut object["spec"];
    if spec["conversion"].is_null() {
        spec["conversion"] = json!({"strategy": "None"});
    }
    let kind = spec["names"]["kind"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    if spec["names"]["singular"].is_null() {
        spec["names"]["singular"] = kind.to_lowercase().into();
    }
    if spec["names"]["listKind"].is_null() {
        spec["names"]["listKind"] = format!("{kind}List").into();
    }
}

/// Returns the status of a new CRD.
pub(crate) fn initial_status(object: &Value) -> Value {
    let versions = object["spec"]["versions"].as_array();
    let versions = versions.into_iter().flatten();
    let stored: Vec<Value> = versions
        .filter(|version| version["storage"] == true)
        .map(|version| version["name"].clone())
        .collect();
    json!({
        "acceptedNames": {"kind": "", "plural": ""},
        "conditions": null,
        "storedVersions": stored,
    })
}
