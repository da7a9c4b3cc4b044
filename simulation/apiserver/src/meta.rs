//! Access to the metadata of objects.

use jiff::Timestamp;
use serde_json::{Map, Value};

/// An entry of `ownerReferences`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnerReference<'a> {
    pub(crate) uid: &'a str,
    pub(crate) blocks_deletion: bool,
}

/// Returns a string of the metadata, or an empty one.
pub(crate) fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

pub(crate) fn name(object: &Value) -> &str {
    text(object, "name")
}

pub(crate) fn is_terminating(object: &Value) -> bool {
    !object["metadata"]["deletionTimestamp"].is_null()
}

pub(crate) fn finalizers(object: &Value) -> impl Iterator<Item = &str> {
    strings(&object["metadata"]["finalizers"])
}

pub(crate) fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}

pub(crate) fn owners(object: &Value) -> impl Iterator<Item = OwnerReference<'_>> {
    let owners = object["metadata"]["ownerReferences"].as_array();
    owners.into_iter().flatten().map(|owner| OwnerReference {
        uid: owner["uid"].as_str().unwrap_or_default(),
        blocks_deletion: owner["blockOwnerDeletion"] == true,
    })
}

/// Returns the metadata as a map, and creates it if it is missing.
fn map(object: &mut Value) -> &mut Map<String, Value> {
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    let metadata = &mut object["metadata"];
    if !metadata.is_object() {
        *metadata = Value::Object(Map::new());
    }
    match metadata {
        Value::Object(map) => map,
        _ => unreachable!("the metadata are an object"),
    }
}

pub(crate) fn set(object: &mut Value, field: &str, value: impl Into<Value>) {
    map(object).insert(field.to_owned(), value.into());
}

pub(crate) fn remove(object: &mut Value, field: &str) {
    map(object).remove(field);
}

/// Adds a finalizer, unless the object has it.
pub(crate) fn add_finalizer(object: &mut Value, finalizer: &str) {
    let mut list: Vec<Value> = finalizers(object).map(Value::from).collect();
    if !list.iter().any(|known| known == finalizer) {
        list.push(finalizer.into());
        set(object, "finalizers", list);
    }
}

/// Removes a finalizer, and the list if it becomes empty.
pub(crate) fn remove_finalizer(object: &mut Value, finalizer: &str) {
    if let Some(list) = object["metadata"]["finalizers"].as_array_mut() {
        list.retain(|entry| entry != finalizer);
        if list.is_empty() {
            remove(object, "finalizers");
        }
    }
}

/// Copies a field of the metadata, or removes it.
pub(crate) fn copy(from: &Value, to: &mut Value, field: &str) {
    match &from["metadata"][field] {
        Value::Null => remove(to, field),
        value if to["metadata"].get(field) == Some(value) => {}
        value => set(to, field, value.clone()),
    }
}

/// Whether two objects have the same fields, with values that `are_equal` accepts.
pub(crate) fn have_equal_fields(
    one: &Value,
    other: &Value,
    are_equal: impl Fn(&str, &Value, &Value) -> bool,
) -> bool {
    let (Some(fields), Some(others)) = (one.as_object(), other.as_object()) else {
        return one == other;
    };
    let is_equal = |(name, value): (&String, &Value)| {
        let other = others.get(name);
        other.is_some_and(|other| are_equal(name, value, other))
    };
    fields.len() == others.len() && fields.iter().all(is_equal)
}

/// Whether an object without managed fields has the other metadata of a stored one.
pub(crate) fn has_metadata_of(stored: &Value, object: &Value) -> bool {
    let [stored, metadata] = [stored, object].map(|object| object["metadata"].as_object());
    let (Some(stored), Some(metadata)) = (stored, metadata) else {
        return false;
    };
    let stored = stored.iter().filter(|(name, _)| *name != "managedFields");
    stored.eq(metadata)
}

/// Sets top-level fields.
pub(crate) fn put_top_level(fields: Map<String, Value>, object: &mut Value) {
    if let Some(object) = object.as_object_mut() {
        object.extend(fields);
    }
}

/// Copies the fields of an object or of its metadata, except the `kept` ones.
pub(crate) fn copy_except(kept: &[&str], from: &Value, to: &mut Value) {
    let (Some(from), Some(to)) = (from.as_object(), to.as_object_mut()) else {
        return;
    };
    let is_kept = |name: &String| kept.contains(&name.as_str());
    to.retain(|name, _| is_kept(name) || from.contains_key(name));
    for (name, value) in from.iter().filter(|(name, _)| !is_kept(name)) {
        if to.get(name) != Some(value) {
            to.insert(name.clone(), value.clone());
        }
    }
}

/// Copies a top-level field, or removes it.
pub(crate) fn copy_top_level(from: &Value, to: &mut Value, field: &str) {
    if let Some(map) = to.as_object_mut() {
        match from.get(field) {
            value if value == map.get(field) => None,
            Some(value) => map.insert(field.to_owned(), value.clone()),
            None => map.remove(field),
        };
    }
}

/// Returns the time of the known condition with this status, or now.
pub(crate) fn transition_time(object: &Value, kind: &str, status: &str, now: Timestamp) -> Value {
    let conditions = object["status"]["conditions"].as_array();
    let is_same = |known: &&Value| known["type"] == kind && known["status"] == status;
    let known = conditions.into_iter().flatten().find(is_same);
    let time = known.map(|known| known["lastTransitionTime"].clone());
    time.unwrap_or_else(|| format_time(now).into())
}

/// Formats a time as in `creationTimestamp`.
pub(crate) fn format_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
