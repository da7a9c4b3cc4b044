//! Finds the writer of a field in the API server's managed fields.

use serde_json::Value;

use super::HELM;
use crate::drift::json_pointer::{self, PointerStep};

/// Returns the managers that write `spec.replicas` through the scale subresource.
pub(super) fn scale_managers(live: &Value) -> impl Iterator<Item = &str> {
    managed_fields(live)
        .filter(|entry| entry.get("subresource").and_then(Value::as_str) == Some("scale"))
        .filter(|entry| entry.pointer("/fieldsV1/f:spec/f:replicas").is_some())
        .filter_map(manager)
}

/// Returns the latest manager other than Helm that wrote one of these fields. Fields that were removed have no owner,
/// so the fallback is the latest writer of the object.
pub(super) fn last_writer(live: &Value, pointers: &[String]) -> Option<String> {
    let mut others: Vec<&Value> = managed_fields(live)
        .filter(|entry| manager(entry).is_some_and(|manager| manager != HELM))
        .filter(|entry| entry.get("subresource").and_then(Value::as_str) != Some("status"))
        .collect();
    // The times are RFC 3339 in UTC, so they sort as text.
    others.sort_by_key(|entry| std::cmp::Reverse(entry.get("time").and_then(Value::as_str)));
    let owns = |entry: &&&Value| {
        let fields = entry.get("fieldsV1");
        let fields = fields.unwrap_or(&Value::Null);
        pointers.iter().any(|pointer| {
            let steps = json_pointer::parse(pointer).unwrap_or_default();
            owns_field(fields, live, &steps)
        })
    };
    let entry = others.iter().find(owns).or(others.first());
    entry.and_then(|entry| manager(entry)).map(str::to_owned)
}

fn managed_fields(live: &Value) -> impl Iterator<Item = &Value> {
    let fields = live.pointer("/metadata/managedFields");
    fields.and_then(Value::as_array).into_iter().flatten()
}

fn manager(entry: &Value) -> Option<&str> {
    entry.get("manager")?.as_str()
}

/// Returns true if a field set contains the field, or a parent or child that is owned as a whole. In a set, `f:` is a
/// key, `k:` an item by its keys, and `v:` an item by its value.
fn owns_field(fields: &Value, live: &Value, steps: &[PointerStep]) -> bool {
    let Some((PointerStep::Key(step), rest)) = steps.split_first() else {
        return fields.is_object();
    };
    let Some(map) = fields.as_object() else {
        return false;
    };
    // A leaf also owns everything below it.
    if map.is_empty() {
        return true;
    }
    let null = Value::Null;
    if let Some(child) = map.get(&format!("f:{step}")) {
        return owns_field(child, live.get(step).unwrap_or(&null), rest);
    }
    let index = step.parse::<usize>().ok();
    let Some(item) = index.and_then(|index| live.get(index)) else {
        return false;
    };
    map.iter().any(|(key, child)| {
        let keys = key
            .strip_prefix("k:")
            .and_then(|keys| serde_json::from_str(keys).ok());
        let Some(Value::Object(keys)) = keys else {
            return false;
        };
        let matches_keys = keys.iter().all(|(key, value)| item.get(key) == Some(value));
        matches_keys && owns_field(child, item, rest)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn live() -> Value {
        json!({
            "metadata": {"managedFields": [
                {"manager": "helm", "operation": "Apply", "time": "2026-01-03T00:00:00Z",
                 "fieldsV1": {"f:spec": {"f:replicas": {}}}},
                {"manager": "kubectl-edit", "operation": "Update", "time": "2026-01-01T00:00:00Z",
                 "fieldsV1": {"f:spec": {"f:template": {"f:spec": {"f:containers": {
                     "k:{\"name\":\"main\"}": {".": {}, "f:image": {}}}}}}}},
                {"manager": "tuner", "operation": "Update", "time": "2026-01-02T00:00:00Z",
                 "fieldsV1": {"f:metadata": {"f:labels": {"f:a/b": {}}}, "f:spec": {"f:args": {}}}},
                {"manager": "kube-controller-manager", "operation": "Update", "subresource": "status",
                 "time": "2026-01-04T00:00:00Z", "fieldsV1": {"f:status": {}}},
            ]},
            "spec": {"replicas": 1, "args": ["x"],
                     "template": {"spec": {"containers": [{"name": "side"}, {"name": "main", "image": "i"}]}}},
        })
    }

    #[test]
    fn drift_names_field_owner_or_last_writer() {
        for (pointer, expected) in [
            ("/spec/template/spec/containers/1/image", "kubectl-edit"),
            ("/metadata/labels/a~1b", "tuner"),
            ("/spec/args/0", "tuner"),
            ("/spec/args", "tuner"),
            ("/spec/template", "kubectl-edit"),
            ("/spec/template/spec/containers/0/image", "tuner"),
            ("/spec/paused", "tuner"),
        ] {
            let manager = last_writer(&live(), &[pointer.to_owned()]);
            assert_eq!(manager.as_deref(), Some(expected), "{pointer}");
        }
    }

    #[test]
    fn helm_and_status_managers_are_ignored() {
        let mut live = live();
        let fields = live.pointer_mut("/metadata/managedFields").unwrap();
        let fields = fields.as_array_mut().unwrap();
        fields.drain(1..3);
        assert_eq!(last_writer(&live, &["/spec/replicas".to_owned()]), None);
        assert_eq!(last_writer(&json!({}), &["/spec".to_owned()]), None);
    }
}
