//! Three-way merge patches.

use serde_json::{Map, Value};

/// Returns the merge patch that brings `current` to `target` and removes the fields that only `original` has.
///
/// Helm sends a strategic merge patch. The effect differs if another writer has added items to a list: Helm
/// keeps them, this patch removes them.
pub(crate) fn three_way(original: &Value, target: &Value, current: &Value) -> Value {
    let empty = Map::new();
    let fields = |value: &'_ Value| value.as_object().cloned();
    let (Some(target), current) = (target.as_object(), fields(current).unwrap_or_default()) else {
        return target.clone();
    };
    let original = original.as_object().unwrap_or(&empty);
    let mut patch = Map::new();
    for (key, wanted) in target {
        match current.get(key) {
            Some(actual) if wanted.is_object() && actual.is_object() => {
                let former = original.get(key).unwrap_or(&Value::Null);
                let inner = three_way(former, wanted, actual);
                if inner.as_object().is_none_or(|inner| !inner.is_empty()) {
                    patch.insert(key.clone(), inner);
                }
            }
            Some(actual) if covers(actual, wanted) => {}
            _ => drop(patch.insert(key.clone(), wanted.clone())),
        }
    }
    let dropped = original.keys().filter(|key| !target.contains_key(*key));
    for key in dropped.filter(|key| current.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    Value::Object(patch)
}

/// Returns whether `actual` equals `wanted`, except for fields that only `actual` has.
fn covers(actual: &Value, wanted: &Value) -> bool {
    match (actual, wanted) {
        (Value::Object(actual), Value::Object(wanted)) => wanted.iter().all(|(key, wanted)| {
            let actual = actual.get(key);
            actual.is_some_and(|actual| covers(actual, wanted))
        }),
        (Value::Array(actual), Value::Array(wanted)) => {
            let pairs = || actual.iter().zip(wanted);
            actual.len() == wanted.len() && pairs().all(|(actual, wanted)| covers(actual, wanted))
        }
        _ => actual == wanted,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn patch_adds_changes_and_removes_fields() {
        let original = json!({ "data": { "a": "1", "gone": "x" }, "kind": "ConfigMap" });
        let target = json!({ "data": { "a": "2", "new": "y" }, "kind": "ConfigMap" });
        let current = json!({
            "data": { "a": "1", "gone": "x", "foreign": "z" }, "kind": "ConfigMap",
        });
        assert_eq!(
            three_way(&original, &target, &current),
            json!({ "data": { "a": "2", "new": "y", "gone": null } })
        );
    }

    #[test]
    fn defaulted_list_items_are_no_change() {
        let target = json!({ "containers": [{ "name": "a", "image": "b" }] });
        let current = json!({ "containers": [{ "name": "a", "image": "b", "tty": false }] });
        assert_eq!(three_way(&target, &target, &current), json!({}));
    }
}
