//! Removes values that may be secret from an object, and keeps its shape.

use krypton_types::redact::{HIDDEN, is_secret_name, redact};
use serde_json::{Map, Value};

/// Contains the object with all values, as `kubectl apply` stores it.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Prefixes of container variables that are shown, because Krypton puts no secrets into them.
const SHOWN_VARIABLES: [&str; 2] = ["RUST_LOG", "KRYPTON_"];
/// Fields of which only the keys are shown: chart values and the data of Secrets.
const KEYS_ONLY_FIELDS: [&str; 3] = ["values", "data", "stringData"];

/// Returns the object with the keys of chart values only, and texts without parts that resemble a secret.
pub(super) fn redacted(object: &Value) -> Value {
    match object {
        Value::Object(fields) => Value::Object(redacted_fields(fields)),
        Value::Array(items) => redacted_items(items),
        Value::String(text) => redact(text).into(),
        other => other.clone(),
    }
}

fn redacted_fields(fields: &Map<String, Value>) -> Map<String, Value> {
    let variable = fields.get("name").and_then(Value::as_str);
    let mut redacted_object = Map::new();
    for (name, value) in fields {
        let value = match name.as_str() {
            "managedFields" => continue,
            LAST_APPLIED => HIDDEN.into(),
            // `env: [{name, value}]`
            "value" if variable.is_some_and(|variable| !is_shown_variable(variable)) => {
                HIDDEN.into()
            }
            name if KEYS_ONLY_FIELDS.contains(&name) => keys_of(value),
            name if is_secret_name(name) => hidden(value),
            _ => redacted(value),
        };
        redacted_object.insert(name.clone(), value);
    }
    redacted_object
}

/// Also hides the item after a flag such as `--token`.
fn redacted_items(items: &[Value]) -> Value {
    let mut after_secret_flag = false;
    let redacted_list = items.iter().map(|item| {
        let text = item.as_str();
        let hide = after_secret_flag && text.is_some_and(|text| !text.starts_with("--"));
        after_secret_flag = text.is_some_and(|text| {
            text.starts_with("--") && !text.contains('=') && is_secret_name(text)
        });
        if hide { HIDDEN.into() } else { redacted(item) }
    });
    redacted_list.collect()
}

/// Hides a value with a secret's name. Fields of an object have their own names.
fn hidden(value: &Value) -> Value {
    match value {
        Value::String(_) | Value::Number(_) => HIDDEN.into(),
        Value::Array(items) => items.iter().map(hidden).collect(),
        other => redacted(other),
    }
}

fn is_shown_variable(name: &str) -> bool {
    SHOWN_VARIABLES.iter().any(|shown| name.starts_with(shown)) && !is_secret_name(name)
}

/// Returns the keys at each depth, without their values.
fn keys_of(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let keys = fields
                .iter()
                .map(|(key, value)| (key.clone(), keys_of(value)));
            Value::Object(keys.collect())
        }
        Value::Array(items) => items.iter().map(keys_of).collect(),
        Value::Null => Value::Null,
        _ => HIDDEN.into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_keep_keys_and_texts_lose_secrets() {
        let object = json!({
            "metadata": {
                "name": "acme",
                "managedFields": [{"manager": "kubectl"}],
                "annotations": {LAST_APPLIED: "{\"password\":\"canary\"}", "note": "password=canary"},
            },
            "spec": {
                "values": {"db": {"login": "canary", "hosts": ["canary"]}, "none": null},
                "repo": "https://me:canary@example.org/charts",
                "clientSecret": "canary",
                "tokens": ["canary", {"pin": 1}],
                "pinToken": 1234,
                "args": ["--token", "canary", "--token=canary", "--verbose", "yes"],
                "secretName": "named",
                "automountServiceAccountToken": false,
            },
            "status": {"conditions": [{"message": "Bearer canary-canary", "type": "ClusterReady/edge-eu-central-1-of-many-of-them"}]},
        });
        let expected = json!({
            "metadata": {
                "name": "acme",
                "annotations": {LAST_APPLIED: HIDDEN, "note": "password=[redacted]"},
            },
            "spec": {
                "values": {"db": {"login": HIDDEN, "hosts": [HIDDEN]}, "none": null},
                "repo": "https://[redacted]@example.org/charts",
                "clientSecret": HIDDEN,
                "tokens": [HIDDEN, {"pin": 1}],
                "pinToken": HIDDEN,
                "args": ["--token", HIDDEN, "--token=[redacted]", "--verbose", "yes"],
                "secretName": "named",
                "automountServiceAccountToken": false,
            },
            "status": {"conditions": [{"message": "Bearer [redacted]", "type": "ClusterReady/edge-eu-central-1-of-many-of-them"}]},
        });
        assert_eq!(redacted(&object), expected);
    }

    #[test]
    fn only_known_harmless_variables_are_shown() {
        let container = |name: &str| json!({"env": [{"name": name, "value": "info"}]});
        for name in ["RUST_LOG", "KRYPTON_HUB_ADDRESSES"] {
            assert_eq!(redacted(&container(name)), container(name));
        }
        for name in ["HTTPS_PROXY", "KRYPTON_JOIN_TOKEN", "PASSWORD"] {
            let hidden = redacted(&container(name));
            assert_eq!(
                hidden.pointer("/env/0/value"),
                Some(&HIDDEN.into()),
                "{name}"
            );
        }
    }
}
