//! Writes objects as JSON in the form that a client requests.

use bytes::Bytes;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;

use crate::kind::Kind;
use crate::request::View;

/// An object in the form of a response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RenderedObject<'a> {
    pub(crate) object: &'a Value,
    pub(crate) kind: &'a Kind,
    pub(crate) view: View,
    /// Whether the object is an item of a list of a built-in kind, without `kind` and `apiVersion`.
    pub(crate) omits_type: bool,
    /// Replaces the object's version in the event of its deletion.
    pub(crate) version: Option<u64>,
}

impl<'a> RenderedObject<'a> {
    pub(crate) fn new(kind: &'a Kind, view: View, object: &'a Value) -> Self {
        Self {
            object,
            kind,
            view,
            omits_type: false,
            version: None,
        }
    }
}

/// Names of the fields of an Event in `v1` and in `events.k8s.io/v1`.
const EVENT_FIELDS: [(&str, &str); 7] = [
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("count", "deprecatedCount"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("reportingComponent", "reportingController"),
];

fn served_field(stored: &str) -> &str {
    let field = EVENT_FIELDS.iter().find(|(name, _)| *name == stored);
    field.map_or(stored, |(_, name)| name)
}

/// Renames the fields of an Event from `events.k8s.io/v1` to the form of the store.
pub(crate) fn to_stored_event(object: &mut Value) {
    if let Some(map) = object.as_object_mut() {
        for (stored, name) in EVENT_FIELDS {
            if let Some(value) = map.remove(name) {
                map.insert(stored.to_owned(), value);
            }
        }
    }
}

/// Renames the fields of an Event from the form of the store to `events.k8s.io/v1`.
pub(crate) fn to_served_event(object: &mut Value) {
    if let Some(map) = object.as_object_mut() {
        for (stored, name) in EVENT_FIELDS {
            if let Some(value) = map.remove(stored) {
                map.insert(name.to_owned(), value);
            }
        }
    }
}

struct RenderedMetadata<'a> {
    map: &'a Value,
    version: Option<u64>,
}

impl Serialize for RenderedMetadata<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (Some(version), Some(map)) = (self.version, self.map.as_object()) else {
            return self.map.serialize(serializer);
        };
        let mut out = serializer.serialize_map(None)?;
        for (name, value) in map {
            match name.as_str() {
                "resourceVersion" => out.serialize_entry(name, &version.to_string())?,
                _ => out.serialize_entry(name, value)?,
            }
        }
        out.end()
    }
}

impl Serialize for RenderedObject<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        let metadata = RenderedMetadata {
            map: &self.object["metadata"],
            version: self.version,
        };
        if self.view == View::Metadata {
            map.serialize_entry("kind", "PartialObjectMetadata")?;
            map.serialize_entry("apiVersion", "meta.k8s.io/v1")?;
            map.serialize_entry("metadata", &metadata)?;
            return map.end();
        }
        if !self.omits_type {
            map.serialize_entry("kind", &self.kind.kind)?;
            map.serialize_entry("apiVersion", &self.kind.api_version())?;
        }
        let is_new_event = self.kind.group == "events.k8s.io";
        for (name, value) in self.object.as_object().into_iter().flatten() {
            match name.as_str() {
                "kind" | "apiVersion" => {}
                "metadata" => map.serialize_entry(name, &metadata)?,
                name if is_new_event => map.serialize_entry(served_field(name), value)?,
                name => map.serialize_entry(name, value)?,
            }
        }
        map.end()
    }
}

/// Writes a value, which cannot fail for JSON in memory.
pub(crate) fn json_bytes(value: &impl Serialize) -> Bytes {
    serde_json::to_vec(value).unwrap_or_default().into()
}

/// A watch event with an object in JSON, as one line.
pub(crate) fn watch_event(kind: &str, object: &[u8]) -> Bytes {
    let parts: [&[u8]; 5] = [
        b"{\"type\":\"",
        kind.as_bytes(),
        b"\",\"object\":",
        object,
        b"}\n",
    ];
    parts.concat().into()
}
