//! The schema of the custom objects of the cases.

use serde_json::{Value, json};

/// The schema of the Widgets of the cases.
pub(super) fn widget_schema() -> Value {
    let text = json!({"type": "string"});
    json!({
        "type": "object",
        "required": ["spec"],
        "properties": {
            "spec": {
                "type": "object",
                "required": ["color"],
                "properties": {
                    "color": {"type": "string", "enum": ["red", "green"]},
                    "size": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 10, "default": 3},
                    "name": {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^[a-z]+$"},
                    "note": {"type": "string", "nullable": true},
                    "tags": {"type": "array", "items": text, "x-kubernetes-list-type": "set", "maxItems": 3},
                    "parts": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["key"],
                            "properties": {"key": text, "value": text, "other": text}
                        },
                        "x-kubernetes-list-type": "map",
                        "x-kubernetes-list-map-keys": ["key"]
                    },
                    "labels": {"type": "object", "additionalProperties": text},
                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}
                }
            },
            "status": {
                "type": "object",
                "properties": {
                    "state": text,
                    "observed": {"type": "integer", "format": "int64"},
                    "since": {"type": "string", "format": "date-time", "nullable": true}
                }
            }
        }
    })
}
