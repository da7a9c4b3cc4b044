//! Messages of Go's JSON decoder for common mistakes.

use serde_json::Value;

use crate::kind::Kind;
use crate::request::go_type;

/// Returns the decoder's message for a field of the wrong type, if the kind has one of these mistakes.
pub(crate) fn problem(kind: &Kind, object: &Value) -> Option<String> {
    match (kind.group.as_str(), kind.resource.as_str()) {
        ("", "configmaps") => strings_problem(&object["data"], "ConfigMap.data"),
        ("", "secrets") => secret_problem(object),
        ("coordination.k8s.io", "leases") => ["acquireTime", "renewTime"]
            .iter()
            .find_map(|field| time_problem(&object["spec"][*field])),
        _ => None,
    }
}

fn wrong_type(value: &Value, field: &str, expected: &str) -> String {
    let actual = go_type(value);
    format!("json: cannot unmarshal {actual} into Go struct field {field} of type {expected}")
}

fn strings_problem(map: &Value, field: &str) -> Option<String> {
    match map {
        Value::Null => None,
        Value::Object(map) => {
            let wrong = map
                .values()
                .find(|value| !value.is_string() && !value.is_null())?;
            Some(wrong_type(wrong, field, "string"))
        }
        other => Some(wrong_type(other, field, "map[string]string")),
    }
}

fn secret_problem(object: &Value) -> Option<String> {
    let data = match &object["data"] {
        Value::Null => return None,
        Value::Object(map) => map,
        other => return Some(wrong_type(other, "Secret.data", "map[string][]uint8")),
    };
    data.values().find_map(|value| match value {
        Value::Null => None,
        Value::String(text) => base64_problem(text),
        other => Some(wrong_type(other, "Secret.data", "[]uint8")),
    })
}

fn base64_problem(text: &str) -> Option<String> {
    let is_digit =
        |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'+' | b'/' | b'=' | b'\n' | b'\r');
    let position = text.bytes().position(|c| !is_digit(c));
    let position =
        position.or_else(|| (!text.len().is_multiple_of(4)).then_some(text.len() / 4 * 4))?;
    Some(format!("illegal base64 data at input byte {position}"))
}

fn time_problem(value: &Value) -> Option<String> {
    let text = value.as_str()?;
    let starts_with_year = text.bytes().take(4).filter(u8::is_ascii_digit).count() == 4;
    (!starts_with_year).then(|| {
        format!(
            "parsing time {text:?} as \"2006-01-02T15:04:05.000000Z07:00\": cannot parse {text:?} as \"2006\""
        )
    })
}
