//! Calls server-side apply and the tracking of field managers.

use serde_json::{Map, Value};

use crate::fields::schema::Schema;
use crate::fields::{self, Writer};
use crate::kind::Kind;
use crate::render;
use crate::status::{Failure, Outcome};
use crate::write::Write;

fn writer<'a>(write: &'a Write, api_version: &'a str) -> Writer<'a> {
    Writer {
        manager: &write.field_manager,
        api_version,
        subresource: &write.subresource,
        at: write.now,
    }
}

fn no_field_schema(kind: &Kind) -> Box<Failure> {
    Failure::not_modelled(format_args!("the fields of the kind {}", kind.kind))
}

/// Returns the types of a kind's fields.
pub(crate) fn field_schema(kind: &Kind) -> Option<Schema> {
    match &kind.schema {
        Some(schema) => Some(Schema::custom(schema.root(), kind.has_status)),
        None => Schema::built_in(&kind.api_version(), &kind.kind),
    }
}

/// Sets the managed fields of an update, and puts the unchanged fields back.
pub(crate) fn track_update(
    kind: &Kind,
    previous: Option<&Value>,
    next: &mut Value,
    unchanged: Map<String, Value>,
    write: &Write,
) -> Outcome<()> {
    let fields = kind.fields.as_ref().ok_or_else(|| no_field_schema(kind))?;
    let api_version = kind.api_version();
    let served = previous
        .filter(|_| kind.group == "events.k8s.io")
        .map(|previous| {
            let mut served = previous.clone();
            render::to_served_event(&mut served);
            served
        });
    let previous = served.as_ref().or(previous);
    let writer = writer(write, &api_version);
    fields::track_update(fields, previous, next, unchanged, &writer);
    Ok(())
}

/// Merges an applied configuration into the live object.
pub(crate) fn apply(
    write: &Write,
    live: Option<&Value>,
    configuration: &Value,
    force: bool,
) -> Outcome<Value> {
    let kind = &write.kind;
    let fields = kind.fields.as_ref().ok_or_else(|| no_field_schema(kind))?;
    let api_version = kind.api_version();
    let writer = writer(write, &api_version);
    fields::apply(fields, live, configuration, &writer, force)
}
