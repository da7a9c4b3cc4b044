//! Merges layers of chart values, and locates secrets in the result.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value};

/// Limit for the values of one member, in bytes of JSON. The member stores them in one Secret, which holds 1 MiB.
pub const MAX_BYTES: usize = 1_000_000;

/// Limit for the values of one Tenant, in bytes of JSON. An agent holds the values of all its Tenants in memory. It
/// saves them in one Secret if their CRD is deleted.
pub const TENANT_MAX_BYTES: usize = 64 * 1024;

/// Merges `over` into `under`, like Helm with `--values under --values over`. Maps are merged, and other values are
/// replaced. A `null` stays, as Helm uses it to delete the chart's own value.
pub fn merge(under: &mut Map<String, Value>, over: &Map<String, Value>) {
    for (key, value) in over {
        match (under.get_mut(key), value) {
            (Some(Value::Object(under)), Value::Object(over)) => merge(under, over),
            _ => {
                under.insert(key.clone(), value.clone());
            }
        }
    }
}

/// Returns the size of a value in bytes of JSON.
pub fn size(value: &impl Serialize) -> usize {
    #[derive(Default)]
    struct ByteCounter(usize);
    impl Write for ByteCounter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut counter = ByteCounter::default();
    // Serialization into a counter does not fail.
    if serde_json::to_writer(&mut counter, value).is_err() {
        return usize::MAX;
    }
    counter.0
}

/// Returns JSON pointers to the strings, numbers and whole lists in `merged` that come from `layer` unchanged.
/// Booleans and null do not count as secrets.
pub fn pointers_from(layer: &Map<String, Value>, merged: &Map<String, Value>) -> Vec<String> {
    let mut pointers = Vec::new();
    collect_pointers(layer, merged, "", &mut pointers);
    pointers
}

fn collect_pointers(
    layer: &Map<String, Value>,
    merged: &Map<String, Value>,
    parent: &str,
    pointers: &mut Vec<String>,
) {
    for (key, value) in layer {
        let pointer = format!("{parent}/{}", key.replace('~', "~0").replace('/', "~1"));
        match (value, merged.get(key)) {
            (Value::Object(layer), Some(Value::Object(merged))) => {
                collect_pointers(layer, merged, &pointer, pointers);
            }
            (Value::Null | Value::Bool(_), _) => {}
            (value, Some(in_merged)) if value == in_merged => pointers.push(pointer),
            _ => {}
        }
    }
}

/// Returns the value at a JSON pointer.
pub fn value_at<'a>(values: &'a Map<String, Value>, pointer: &str) -> Option<&'a Value> {
    let path = pointer.strip_prefix('/')?;
    let (first, rest) = path
        .find('/')
        .map_or((path, ""), |slash| path.split_at(slash));
    let key = first.replace("~1", "/").replace("~0", "~");
    values.get(&key)?.pointer(rest)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn map(value: Value) -> Map<String, Value> {
        match value {
            Value::Object(map) => map,
            other => panic!("{other} is no map"),
        }
    }

    fn merged_with(under: &Map<String, Value>, over: &Map<String, Value>) -> Map<String, Value> {
        let mut result = under.clone();
        merge(&mut result, over);
        result
    }

    #[test]
    fn maps_merge_and_other_values_are_replaced() {
        let cases = [
            (
                json!({"a": {"x": 1}}),
                json!({"a": {"y": 2}}),
                json!({"a": {"x": 1, "y": 2}}),
            ),
            (json!({"a": [1, 2]}), json!({"a": [3]}), json!({"a": [3]})),
            (json!({"a": {"x": 1}}), json!({"a": 1}), json!({"a": 1})),
            (
                json!({"a": 1}),
                json!({"a": {"x": 1}}),
                json!({"a": {"x": 1}}),
            ),
            (
                json!({"a": {"x": 1}}),
                json!({"a": {}}),
                json!({"a": {"x": 1}}),
            ),
            (
                json!({"a": {"x": 1}}),
                json!({"a": null}),
                json!({"a": null}),
            ),
            (
                json!({"a": null}),
                json!({"a": {"x": 1}}),
                json!({"a": {"x": 1}}),
            ),
            (
                json!({}),
                json!({"a": {"x": null}}),
                json!({"a": {"x": null}}),
            ),
        ];
        for (under, over, expected) in cases {
            let merged = merged_with(&map(under.clone()), &map(over.clone()));
            assert_eq!(Value::Object(merged), expected, "{under} {over}");
        }
    }

    #[test]
    fn merge_order_matters_where_map_is_replaced() {
        let [first, second, third] = [
            json!({"a": {"x": 1}}),
            json!({"a": null}),
            json!({"a": {"y": 2}}),
        ]
        .map(map);
        let one_by_one = merged_with(&merged_with(&first, &second), &third);
        assert_eq!(Value::Object(one_by_one), json!({"a": {"y": 2}}));
        let last_first = merged_with(&first, &merged_with(&second, &third));
        assert_eq!(Value::Object(last_first), json!({"a": {"x": 1, "y": 2}}));
    }

    #[test]
    fn layer_values_are_found_at_their_paths() {
        let secret = map(json!({
            "db": {"password": "hunter2", "port": 5432, "tls": true, "gone": "x"},
            "list": ["a"], "a/b": {"c~d": "odd"}, "was": "before",
        }));
        let over = map(json!({"was": "after", "db": {"gone": {"now": 1}, "host": "h"}}));
        let merged = merged_with(&secret, &over);
        let pointers = pointers_from(&secret, &merged);
        assert_eq!(
            pointers,
            ["/a~1b/c~0d", "/db/password", "/db/port", "/list"]
        );
        assert_eq!(value_at(&merged, "/a~1b/c~0d"), Some(&json!("odd")));
        assert_eq!(value_at(&merged, "/db/password"), Some(&json!("hunter2")));
        assert_eq!(value_at(&merged, "/list"), Some(&json!(["a"])));
        for none in ["", "db", "/none", "/db/none/deeper"] {
            assert_eq!(value_at(&merged, none), None, "{none}");
        }
        assert_eq!(size(&map(json!({"a": "b"}))), r#"{"a":"b"}"#.len());
    }

    /// Generates values in which a key is either always a map or never one.
    fn any_values() -> impl Strategy<Value = Map<String, Value>> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::Bool),
            (0..3_u8).prop_map(|number| json!([number])),
            "[x-z]".prop_map(Value::String),
        ];
        let flat = prop::collection::btree_map("[a-c]", leaf, 0..4)
            .prop_map(|map| map.into_iter().collect::<Map<_, _>>());
        flat.prop_recursive(3, 16, 4, |inner| {
            let leaf = prop_oneof![Just(Value::Null), "[x-z]".prop_map(Value::String)];
            let leaves = prop::collection::btree_map("[a-c]", leaf, 0..4);
            let maps = prop::collection::btree_map("m[a-c]", inner, 0..3);
            (leaves, maps).prop_map(|(leaves, maps)| {
                let maps = maps.into_iter().map(|(key, map)| (key, Value::Object(map)));
                leaves.into_iter().chain(maps).collect()
            })
        })
    }

    proptest! {
        #[test]
        fn where_maps_stay_maps_only_the_sequence_counts(
            [a, b, c] in prop::array::uniform3(any_values())
        ) {
            prop_assert_eq!(merged_with(&merged_with(&a, &b), &c), merged_with(&a, &merged_with(&b, &c)));
            prop_assert_eq!(&merged_with(&a, &a), &a);
            prop_assert_eq!(&merged_with(&Map::new(), &a), &a);
            prop_assert_eq!(&merged_with(&a, &Map::new()), &a);
        }

        #[test]
        fn every_layer_path_resolves_to_layer_value([a, b] in prop::array::uniform2(any_values())) {
            let merged = merged_with(&a, &b);
            for pointer in pointers_from(&b, &merged) {
                prop_assert_eq!(value_at(&merged, &pointer), value_at(&b, &pointer));
                prop_assert!(value_at(&merged, &pointer).is_some());
            }
        }
    }
}
