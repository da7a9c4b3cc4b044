//! Fields of objects in JSON.

use serde_json::Value;

pub(crate) fn is_terminating(object: &Value) -> bool {
    field(object, "/metadata/deletionTimestamp").is_some()
}

/// Returns the field at a JSON pointer without escapes and numbers. Unlike [`Value::pointer`], it copies no names.
fn field<'a>(object: &'a Value, pointer: &str) -> Option<&'a Value> {
    let mut names = pointer.split('/').skip(1);
    names.try_fold(object, |value, name| value.get(name))
}

/// Text at a JSON pointer, or an empty text.
pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    let text = field(object, pointer).and_then(Value::as_str);
    text.unwrap_or_default()
}

pub(crate) fn annotation<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    field(object, "/metadata/annotations")?.get(key)?.as_str()
}

pub(crate) fn label<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    field(object, "/metadata/labels")?.get(key)?.as_str()
}

pub(crate) fn has_finalizer(object: &Value, name: &str) -> bool {
    let finalizers = field(object, "/metadata/finalizers").and_then(Value::as_array);
    finalizers
        .into_iter()
        .flatten()
        .any(|each| each.as_str() == Some(name))
}

pub(crate) fn number(object: &Value, pointer: &str) -> Option<u64> {
    field(object, pointer)?.as_u64()
}

pub(crate) fn is_true(object: &Value, pointer: &str) -> bool {
    field(object, pointer).and_then(Value::as_bool) == Some(true)
}

/// Status, reason and message of a condition, as text.
pub(crate) fn condition_text(object: &Value, kind: &str) -> String {
    let condition = find_condition(object, kind);
    condition.map_or("none".to_owned(), |condition| {
        let [status, reason, message] =
            ["/status", "/reason", "/message"].map(|field| text(condition, field));
        format!("{status} {reason}: {message}")
    })
}

/// Status and reason of a condition.
pub(crate) fn condition<'a>(object: &'a Value, kind: &str) -> Option<(&'a str, &'a str)> {
    let condition = find_condition(object, kind)?;
    Some((text(condition, "/status"), text(condition, "/reason")))
}

pub(crate) fn has_true_condition(object: &Value, kind: &str) -> bool {
    condition(object, kind).is_some_and(|(status, _)| status == "True")
}

fn find_condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    let mut conditions = field(object, "/status/conditions")?.as_array()?.iter();
    conditions.find(|condition| text(condition, "/type") == kind)
}
