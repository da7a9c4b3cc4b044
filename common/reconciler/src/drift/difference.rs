//! Compares two forms of one object.

use serde_json::Value;

use crate::drift::json_pointer::escape;

/// Maximum number of fields to name in one object. One further field stands for the rest.
pub(super) const MAX_FIELDS: usize = 16;
const METADATA: [&str; 2] = ["labels", "annotations"];

/// Returns the fields of `live` that differ in `wanted`, as JSON pointers. Ignores the status, which belongs to the
/// object's controller, and all metadata except labels and annotations.
pub(crate) fn differences(live: &Value, wanted: &Value) -> Vec<String> {
    let mut fields = Vec::new();
    for (key, one, other) in pairs(live, wanted) {
        match key.as_str() {
            "status" => {}
            "metadata" => {
                for key in METADATA {
                    let field =
                        |object: Option<&Value>| object.and_then(|meta| meta.get(key)).cloned();
                    let (one, other) = (field(one), field(other));
                    compare(
                        &format!("/metadata/{key}"),
                        one.as_ref(),
                        other.as_ref(),
                        &mut fields,
                    );
                }
            }
            key => compare(&format!("/{}", escape(key)), one, other, &mut fields),
        }
    }
    fields
}

type Pair<'a> = (String, Option<&'a Value>, Option<&'a Value>);

/// Returns the values of both objects for each key of either.
fn pairs<'a>(one: &'a Value, other: &'a Value) -> Vec<Pair<'a>> {
    let keys = |value: &'a Value| value.as_object().into_iter().flat_map(|map| map.keys());
    let mut all: Vec<&String> = keys(one).chain(keys(other)).collect();
    all.sort_unstable();
    all.dedup();
    let pair = |key: &String| (key.clone(), one.get(key), other.get(key));
    all.into_iter().map(pair).collect()
}

fn compare(pointer: &str, one: Option<&Value>, other: Option<&Value>, fields: &mut Vec<String>) {
    // The API server limits the depth of an object, and thus this recursion.
    match (one, other) {
        _ if fields.len() > MAX_FIELDS => {}
        (one, other) if one == other => {}
        (Some(one @ Value::Object(_)), Some(other @ Value::Object(_))) => {
            for (key, one, other) in pairs(one, other) {
                compare(&format!("{pointer}/{}", escape(&key)), one, other, fields);
            }
        }
        (Some(Value::Array(one)), Some(Value::Array(other))) if one.len() == other.len() => {
            for (index, (one, other)) in one.iter().zip(other).enumerate() {
                compare(
                    &format!("{pointer}/{index}"),
                    Some(one),
                    Some(other),
                    fields,
                );
            }
        }
        // A missing value and an empty map have the same meaning.
        (one, other) if is_empty_value(one) && is_empty_value(other) => {}
        _ => fields.push(pointer.to_owned()),
    }
}

fn is_empty_value(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => true,
        Some(Value::Object(map)) => map.is_empty(),
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn differing_fields_are_named_except_server_managed() {
        let base = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {
                "name": "a", "resourceVersion": "1", "generation": 1, "managedFields": [1],
                "labels": {"a/b": "1"},
            },
            "data": {"x": "1"}, "list": [{"a": 1}, 2], "status": {"ready": 1},
        });
        let with = |pointer: &str, value: Value| {
            let mut object = base.clone();
            *object.pointer_mut(pointer).unwrap() = value;
            object
        };
        for (other, expected) in [
            (base.clone(), vec![]),
            (with("/metadata/resourceVersion", json!("2")), vec![]),
            (with("/metadata/generation", json!(2)), vec![]),
            (with("/metadata/managedFields", json!([])), vec![]),
            (with("/status", json!({})), vec![]),
            (with("/data/x", json!("2")), vec!["/data/x"]),
            (with("/data", json!({"y": "1"})), vec!["/data/x", "/data/y"]),
            (with("/data", Value::Null), vec!["/data"]),
            (with("/list/0/a", json!(2)), vec!["/list/0/a"]),
            (with("/list", json!([2])), vec!["/list"]),
            (
                with("/metadata/labels/a~1b", json!("2")),
                vec!["/metadata/labels/a~1b"],
            ),
            (
                with("/metadata/labels", json!({})),
                vec!["/metadata/labels/a~1b"],
            ),
        ] {
            assert_eq!(differences(&base, &other), expected, "{other}");
            assert_eq!(differences(&other, &base).len(), expected.len(), "{other}");
        }
    }

    #[test]
    fn nothing_and_an_empty_map_are_the_same() {
        let (none, empty) = (json!({"spec": {}}), json!({"spec": {"selector": {}}}));
        assert_eq!(differences(&none, &empty), [""; 0]);
        let list = json!({"spec": {"ports": []}});
        assert_eq!(differences(&none, &list), ["/spec/ports"]);
    }

    #[test]
    fn listed_differences_are_capped() {
        let object_with = |n: u32| {
            let fields = (0..1000).map(|key| (key.to_string(), json!(n)));
            Value::Object(fields.collect())
        };
        let fields = differences(&object_with(1), &object_with(2));
        assert_eq!(fields.len(), MAX_FIELDS + 1);
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            (0..3_i64).prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 3, |inner| {
            let array = proptest::collection::vec(inner.clone(), 0..3);
            let map = proptest::collection::btree_map("[ab/~]", inner, 0..3);
            prop_oneof![
                array.prop_map(Value::from),
                map.prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_field_that_is_named_does_differ(one in value(), other in value()) {
            let (one, other) = (json!({"spec": one}), json!({"spec": other}));
            prop_assert_eq!(differences(&one, &one), Vec::<String>::new());
            for pointer in differences(&one, &other) {
                prop_assert_ne!(one.pointer(&pointer), other.pointer(&pointer));
            }
        }
    }
}
