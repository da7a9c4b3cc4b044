//! Server-side apply and managed fields: merges configurations into live objects and tracks which manager owns which
//! field, as a real API server does. Pure functions on JSON.
//!
//! Not modelled: conversion between versions of one kind, changes of a schema under existing objects, and kubectl's
//! annotation of client-side apply.

mod collect;
mod compare;
mod managers;
mod merge;
pub(crate) mod schema;
mod set;
#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::cause::Cause;
use crate::meta;
use crate::status::{Failure, Outcome};
use managers::{Fields, ManagerEntry, ManagerId, Managers, Operation};
use schema::Schema;
use set::FieldSet;

/// The author of one write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Writer<'a> {
    pub(crate) manager: &'a str,
    /// `apiVersion` of the request's path.
    pub(crate) api_version: &'a str,
    /// Such as `status`, or empty.
    pub(crate) subresource: &'a str,
    pub(crate) at: Timestamp,
}

/// Merges a configuration into the live object and returns the new object with its `managedFields`. Without a live
/// object the result is the object to create.
///
/// The caller sets the metadata that only servers set, such as `uid`, and resets the fields that the endpoint does not
/// write, such as `status`. If nothing changes, the result equals the live object.
pub(crate) fn apply(
    schema: &Schema,
    live: Option<&Value>,
    configuration: &Value,
    writer: &Writer<'_>,
    force: bool,
) -> Outcome<Value> {
    check_configuration(configuration, writer)?;
    let ignored = schema.ignored_fields(writer.subresource);
    let applied = match schema.all_fields(configuration) {
        Ok(mut applied) => {
            applied.remove_with_fields(&ignored);
            applied
        }
        Err(error) => return Err(schema_error(configuration, &error)),
    };
    let base = comparable(schema, live, &Map::new());
    let mut managers = live.map(Managers::read_from).unwrap_or_default();
    if managers.0.is_empty() && live.is_some() {
        let first_manager = Writer {
            manager: BEFORE_FIRST_APPLY,
            subresource: "",
            ..*writer
        };
        assign_changed_fields(
            schema,
            &mut managers,
            &schema.empty(),
            &base,
            &first_manager,
        );
    }
    let id = writer.id(Operation::Apply);
    let previous = managers.0.remove(&id);
    let mut merged = schema.merge(&base, configuration);
    if let Some(previous) = &previous {
        merged = prune(schema, &merged, &managers, &applied, &previous.fields.set());
    }
    let (written, removed) = schema.written_and_removed(&base, &merged, &ignored);
    if !force {
        check_conflicts(&managers, &written)?;
    }
    managers.lose(&written, &removed);
    let time = match base == merged {
        true => previous.and_then(|previous| previous.time),
        false => Some(meta::format_time(writer.at)),
    };
    let entry = ManagerEntry {
        fields: Fields::Changed(applied.difference(&UNOWNED_FIELDS)),
        api_version: writer.api_version.to_owned(),
        time,
    };
    managers.0.insert(id, entry);
    managers.remove_empty();
    schema.complete(&mut merged);
    write_managers(&managers, live, &mut merged);
    Ok(merged)
}

/// Sets `managedFields` of an object that a client creates, replaces or patches. Fields that changed belong to the
/// writer; other managers lose them, and they lose removed fields.
///
/// Call it with the decoded and defaulted object of the client, before the server fills in or resets fields. `new`
/// gets the `unchanged` fields of the live object at the end. If nothing changes, `managedFields` stay as they are in
/// the live object.
pub(crate) fn track_update(
    schema: &Schema,
    live: Option<&Value>,
    new: &mut Value,
    unchanged: Map<String, Value>,
    writer: &Writer<'_>,
) {
    let stored = live.map(Managers::read_from).unwrap_or_default();
    let mut managers = stored.or_sent(new, writer.subresource, schema.built_in);
    let base = comparable(schema, live, &unchanged);
    schema.complete(new);
    Managers::default().write(new);
    // An object whose managers were reset stays without managers until the next apply.
    if !managers.0.is_empty() || live.is_none() {
        assign_changed_fields(schema, &mut managers, &base, new, writer);
        managers.limit_updaters();
    }
    meta::put_top_level(unchanged, new);
    write_managers(&managers, live, new);
}

/// Manager of the fields that an object without managers has when it is first applied.
const BEFORE_FIRST_APPLY: &str = "before-first-apply";

impl Writer<'_> {
    fn id(&self, operation: Operation) -> ManagerId {
        let api_version = match operation {
            Operation::Apply => "",
            Operation::Update => self.api_version,
        };
        let manager = if self.manager.is_empty() {
            "unknown"
        } else {
            self.manager
        };
        ManagerId {
            manager: manager.to_owned(),
            operation,
            api_version: api_version.to_owned(),
            subresource: self.subresource.to_owned(),
        }
    }
}

/// Fields that no manager owns.
static UNOWNED_FIELDS: LazyLock<FieldSet> = LazyLock::new(|| {
    FieldSet::from_paths(&[
        &["apiVersion"],
        &["kind"],
        &["metadata"],
        &["metadata", "name"],
        &["metadata", "namespace"],
        &["metadata", "creationTimestamp"],
        &["metadata", "selfLink"],
        &["metadata", "uid"],
        &["metadata", "clusterName"],
        &["metadata", "generation"],
        &["metadata", "managedFields"],
        &["metadata", "resourceVersion"],
    ])
});

fn check_configuration(configuration: &Value, writer: &Writer<'_>) -> Outcome<()> {
    let version = configuration["apiVersion"].as_str().unwrap_or_default();
    if version != writer.api_version {
        let expected = writer.api_version;
        return Err(Failure::bad_request(format!(
            "Incorrect version specified in apply patch. Specified patch version: {version}, expected: {expected}"
        )));
    }
    if !configuration["metadata"]["managedFields"].is_null() {
        return Err(Failure::bad_request("metadata.managedFields must be nil"));
    }
    Ok(())
}

/// The failure for a configuration that does not match the schema.
fn schema_error(configuration: &Value, error: &str) -> Box<Failure> {
    let text = |field: &str| configuration[field].as_str().unwrap_or_default();
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    let namespace = meta::text(configuration, "namespace");
    let name = meta::name(configuration);
    let group = if api_version.contains('/') { "" } else { "/" };
    let message = format!(
        "failed to create typed patch object ({namespace}/{name}; {group}{api_version}, Kind={kind}): {error}"
    );
    Failure::new(500, "", message, Value::Null)
}

/// Returns the live object as the algorithms compare it, without `unchanged` fields, or the empty object of a creation.
fn comparable(schema: &Schema, live: Option<&Value>, unchanged: &Map<String, Value>) -> Value {
    let Some(live) = live else {
        return schema.empty();
    };
    let mut live = managers::without_managed_fields(live, unchanged);
    schema.complete(&mut live);
    live
}

/// Removes the fields that the manager owned before and no longer applies, if no other manager owns them.
fn prune(
    schema: &Schema,
    merged: &Value,
    others: &Managers<'_>,
    applied: &FieldSet,
    previous: &FieldSet,
) -> Value {
    if previous.is_empty() {
        return merged.clone();
    }
    let previous = schema.with_structures(previous);
    let owned = others.0.values().fold(applied.clone(), |owned, entry| {
        owned.union(&entry.fields.set())
    });
    let owned = schema.with_structures(&owned);
    let fields = |value: &Value| schema.with_structures(&schema.valid_fields(value));
    let all = fields(merged);
    let pruned = schema.remove(merged, &previous);
    let pruned = schema.remove(merged, &all.difference(&fields(&pruned).union(&owned)));
    // Fields that no manager owns stay.
    let dropped = all.difference(&fields(&pruned)).intersection(&previous);
    schema.remove(merged, &dropped)
}

/// Fails if other managers own fields that this apply writes.
fn check_conflicts(managers: &Managers<'_>, written: &FieldSet) -> Outcome<()> {
    let mut causes = Vec::new();
    let mut lines = Vec::new();
    for (id, entry) in &managers.0 {
        let paths = entry.fields.set().intersection(written).paths();
        if paths.is_empty() {
            continue;
        }
        let owner = id.describe();
        lines.push(format!("conflicts with {owner}:"));
        for path in paths {
            let field = set::path_text(&path);
            lines.push(format!("- {field}"));
            causes.push(Cause {
                reason: "FieldManagerConflict",
                message: format!("conflict with {owner}"),
                field,
            });
        }
    }
    let message = match &*causes {
        [] => return Ok(()),
        [cause] => format!(
            "Apply failed with 1 conflict: {}: {}",
            cause.message, cause.field
        ),
        causes => format!(
            "Apply failed with {} conflicts: {}",
            causes.len(),
            lines.join("\n")
        ),
    };
    let causes: Vec<Value> = causes.iter().map(Cause::to_json).collect();
    let details = json!({"causes": causes});
    Err(Failure::new(409, "Conflict", message, details))
}

/// Makes the writer of an update the owner of the fields that differ.
fn assign_changed_fields(
    schema: &Schema,
    managers: &mut Managers<'_>,
    before: &Value,
    after: &Value,
    writer: &Writer<'_>,
) {
    let ignored = schema.ignored_fields(writer.subresource);
    let (mut written, mut removed) = schema.written_and_removed(before, after, &ignored);
    let id = writer.id(Operation::Update);
    let own = managers.0.remove(&id);
    managers.lose(&written, &removed);
    removed.add(written.intersection(&UNOWNED_FIELDS));
    written.remove(&UNOWNED_FIELDS);
    let mut entry = own.unwrap_or_else(|| ManagerEntry {
        fields: Fields::Changed(FieldSet::default()),
        api_version: writer.api_version.to_owned(),
        time: None,
    });
    entry.fields.remove(&removed);
    if !written.is_empty() {
        entry.fields.add(written);
        entry.time = Some(meta::format_time(writer.at));
    }
    managers.0.insert(id, entry);
    managers.remove_empty();
}

/// Writes the managers. Keeps their times if nothing else has changed.
fn write_managers(managers: &Managers<'_>, live: Option<&Value>, new: &mut Value) {
    if let Some(live) = live
        && meta::have_equal_fields(live, new, |name, live, new| {
            name == "metadata" || live == new
        })
        && meta::has_metadata_of(live, new)
        && managers.has_same_fields(&Managers::read_from(live))
    {
        return meta::copy(live, new, "managedFields");
    }
    managers.write(new);
}
