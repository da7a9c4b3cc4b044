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
    for (key, desired) in target {
        match current.get(key) {
            Some(actual) if desired.is_object() && actual.is_object() => {
                let previous = original.get(key).unwrap_or(&Value::Null);
                let field_patch = three_way(previous, desired, actual);
                if field_patch
                    .as_object()
                    .is_none_or(|field_patch| !field_patch.is_empty())
                {
                    patch.insert(key.clone(), field_patch);
                }
            }
            Some(actual) if covers(actual, desired) => {}
            _ => drop(patch.insert(key.clone(), desired.clone())),
        }
    }
    let dropped = original.keys().filter(|key| !target.contains_key(*key));
    for key in dropped.filter(|key| current.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    Value::Object(patch)
}

/// Returns whether `actual` equals `desired`, except for fields that only `actual` has.
fn covers(actual: &Value, desired: &Value) -> bool {
    match (actual, desired) {
        (Value::Object(actual), Value::Object(desired)) => desired.iter().all(|(key, desired)| {
            let actual = actual.get(key);
            actual.is_some_and(|actual| covers(actual, desired))
        }),
        (Value::Array(actual), Value::Array(desired)) => {
            let pairs = || actual.iter().zip(desired);
            actual.len() == desired.len()
                && pairs().all(|(actual, desired)| covers(actual, desired))
        }
        _ => actual == desired,
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
    fn defaulted_list_items_change_nothing() {
        let target = json!({ "containers": [{ "name": "a", "image": "b" }] });
        let current = json!({ "containers": [{ "name": "a", "image": "b", "tty": false }] });
        assert_eq!(three_way(&target, &target, &current), json!({}));
    }
}
