//! The schema of `status.conditions`.

use schemars::{Schema, SchemaGenerator, json_schema};

/// As the standard one, but for `type`: its pattern refuses `ClusterReady/edge-1`, as before the
/// slash it wants a DNS name, so there is none here.
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
                    "description": "When `status` last changed.",
                    "type": "string",
                    "format": "date-time",
                },
                "message": {
                    "description": "For people; may be empty.",
                    "type": "string",
                    "maxLength": 32768,
                },
                "observedGeneration": {
                    "description": "The `metadata.generation` that the condition is about.",
                    "type": "integer",
                    "format": "int64",
                    "minimum": 0,
                },
                "reason": {
                    "description": "For programs: one word in CamelCase.",
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "status": {
                    "type": "string",
                    "enum": ["True", "False", "Unknown"],
                },
                "type": {
                    "description": "`Ready`, or `ClusterReady/<cluster>` and the like.",
                    "type": "string",
                    "maxLength": 316,
                },
            },
        },
    })
}
