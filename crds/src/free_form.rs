//! The schema of values of a chart: an object of any content.

use schemars::{Schema, SchemaGenerator, json_schema};

pub(crate) fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "nullable": true,
        "x-kubernetes-preserve-unknown-fields": true,
    })
}
