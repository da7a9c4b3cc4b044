//! Converts the object of a request to its stored form, and finds the fields that the server does not know.

use serde_json::Value;

use crate::builtin;
use crate::decoder;
use crate::kind::Kind;
use crate::meta;
use crate::schema::Path;
use crate::status::{Failure, Outcome};

/// Rejects an object whose kind or version differs.
pub(super) fn check_type(kind: &Kind, next: &Value) -> Outcome<()> {
    let text = |field: &str| next[field].as_str().unwrap_or_default();
    let (version, name) = (text("apiVersion"), text("kind"));
    let expected = kind.api_version();
    let undecodable = |problem: String| {
        let short_version = version.rsplit('/').next().unwrap_or_default();
        Err(Failure::bad_request(format!(
            "{name} in version {short_version:?} cannot be handled as a {}: {problem}",
            kind.kind
        )))
    };
    if kind.is_custom() {
        return match name {
            "" => Err(Failure::bad_request(format!(
                "the object provided is unrecognized (must be of type {}): Object 'Kind' is missing in '{next}' \
                 ({next})",
                kind.kind
            ))),
            _ if version != expected => Err(Failure::bad_request(format!(
                "the API version in the data ({version}) does not match the expected API version ({expected})"
            ))),
            name if name != kind.kind => Err(Failure::changed_kind(kind, name, meta::name(next))),
            _ => Ok(()),
        };
    }
    if !version.is_empty() && version != expected {
        return undecodable(format!(
            "no kind {name:?} is registered for version {version:?} in scheme \"pkg/runtime/scheme.go:111\""
        ));
    }
    if !name.is_empty() && name != kind.kind {
        let group = match kind.group.split('.').next() {
            None | Some("") => "core",
            Some(group) => group,
        };
        return undecodable(format!(
            "converting (v1.{name}) to ({group}.{}): unknown conversion",
            kind.kind
        ));
    }
    Ok(())
}

/// Converts a client's object to the stored form: known fields only, with defaults of custom resources.
pub(super) fn decode(
    kind: &Kind,
    previous: Option<&Value>,
    next: &mut Value,
) -> Outcome<Vec<String>> {
    let undecodable = |error: String| {
        Failure::bad_request(format!(
            "{} in version {:?} cannot be handled as a {}: {error}",
            kind.kind, kind.version, kind.kind
        ))
    };
    next["apiVersion"] = kind.api_version().into();
    next["kind"] = kind.kind.as_str().into();
    let mut unknown = Vec::new();
    if !previous.is_some_and(|previous| meta::has_metadata_of(previous, next)) {
        let input = next["metadata"].take();
        let metadata = builtin::normalize_metadata(&input).map_err(undecodable)?;
        let path = Path::Field(&Path::Root, "metadata");
        unknown_fields(&input, &metadata, &path, &mut unknown);
        next["metadata"] = metadata;
    }
    if let Some(problem) = decoder::problem(kind, next) {
        return Err(undecodable(problem));
    }
    if let Some(normalize) = kind.normalize {
        let metadata = next["metadata"].take();
        let normalized = normalize(next).map_err(undecodable)?;
        unknown_fields(next, &normalized, &Path::Root, &mut unknown);
        *next = normalized;
        next["metadata"] = metadata;
    }
    if let Some(schema) = &kind.schema {
        unknown.extend(schema.complete(next));
    }
    if let Some(fields) = &kind.fields {
        fields.complete(next);
    }
    Ok(unknown)
}

/// Returns the problem with unknown fields in a strict request.
pub(crate) fn strict_problem(unknown: &[String]) -> String {
    let fields = unknown
        .iter()
        .map(|field| format!("unknown field {field:?}"));
    let fields: Vec<String> = fields.collect();
    format!("strict decoding error: {}", fields.join(", "))
}

/// Collects the paths of the fields that the decoder has dropped.
fn unknown_fields(input: &Value, decoded: &Value, path: &Path<'_>, unknown: &mut Vec<String>) {
    if input == decoded {
        return;
    }
    match (input, decoded) {
        (Value::Object(input), Value::Object(decoded)) => {
            for (name, value) in input {
                let path = Path::Field(path, name);
                match decoded.get(name) {
                    Some(decoded) => unknown_fields(value, decoded, &path, unknown),
                    None if builtin::is_empty(value)
                        || matches!(&**name, "metadata" | "selfLink") => {}
                    None => unknown.push(path.to_string()),
                }
            }
        }
        (Value::Array(input), Value::Array(decoded)) => {
            for (index, (input, decoded)) in input.iter().zip(decoded).enumerate() {
                unknown_fields(input, decoded, &Path::Item(path, index), unknown);
            }
        }
        _ => {}
    }
}

/// Converts a decoded object to its stored form.
pub(super) fn to_stored_form(kind: &Kind, next: &mut Value) {
    if kind.group == "events.k8s.io" {
        crate::render::to_stored_event(next);
    }
    builtin::add_empty_fields(kind, next);
    next["apiVersion"] = kind.stored_api_version.as_str().into();
}
