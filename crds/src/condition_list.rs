//! The schema of `status.conditions`.

use schemars::{Schema, SchemaGenerator, json_schema};

/// Returns the standard schema without the pattern of `type`. That pattern requires a DNS name before the slash and
/// rejects `ClusterReady/edge-1`.
pub(crate) fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
            "properties": {
                "lastTransitionTime": {
                    "description": "Time of the last change of `status`.",
                    "type": "string",
                    "format": "date-time",
                },
                "message": {
                    "description": "Human-readable message. Can be empty.",
                    "type": "string",
                    "maxLength": 32768,
                },
                "observedGeneration": {
                    "description": "The `metadata.generation` that the condition describes.",
                    "type": "integer",
                    "format": "int64",
                    "minimum": 0,
                },
                "reason": {
                    "description": "Machine-readable reason in CamelCase.",
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "status": {
                    "description": "`True`, `False` or `Unknown`.",
                    "type": "string",
                    "enum": ["True", "False", "Unknown"],
                },
                "type": {
                    "description": "Type of the condition, such as `Ready` or `ClusterReady/<cluster>`.",
                    "type": "string",
                    "maxLength": 316,
                },
            },
        },
    })
}
