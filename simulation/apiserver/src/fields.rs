//! Server-side apply and managed fields: merges configurations into live objects and tracks which manager owns which
//! field, as a real API server does. Pure functions on JSON.
//!
//! Not modelled: conversion between versions of one kind, changes of a schema under existing objects, and kubectl's
//! annotation of client-side apply.

mod collect;
mod compare;
mod managers;
mod merge;
mod schema;
mod set;
#[cfg(test)]
mod tests;

use jiff::Timestamp;
use serde_json::{Value, json};

use managers::{Entry, Id, Managers, Operation};
pub use schema::Schema;
pub use set::{Element, FieldSet, Scalar};

/// The author of one write.
#[derive(Clone, Copy, Debug)]
pub struct Writer<'a> {
    /// The parameter `fieldManager`; for updates without it, see [`manager_of`].
    pub manager: &'a str,
    /// `apiVersion` of the request's path.
    pub api_version: &'a str,
    /// Such as `status`, or empty.
    pub subresource: &'a str,
    pub at: Timestamp,
}

/// Why an object was not applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// Code 400, reason `BadRequest`.
    #[error("{0}")]
    BadRequest(String),
    /// Code 500, reason empty: the configuration does not match the schema.
    #[error("{0}")]
    Schema(String),
    /// Code 409, reason `Conflict`: other managers own fields with other values.
    #[error("{message}")]
    Conflict { message: String, causes: Vec<Cause> },
}

/// One field with another owner, a cause of type `FieldManagerConflict`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    pub message: String,
    pub field: String,
}

impl ApplyError {
    /// Returns the Status object that the server answers with. Its `code` is the code of the response.
    pub fn status(&self) -> Value {
        let status = |code: u16| {
            let message = self.to_string();
            json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code})
        };
        match self {
            Self::BadRequest(_) => {
                let mut status = status(400);
                status["reason"] = "BadRequest".into();
                status
            }
            Self::Schema(_) => status(500),
            Self::Conflict { causes, .. } => {
                let causes = causes.iter().map(|cause| {
                    json!({"reason": "FieldManagerConflict", "message": cause.message, "field": cause.field})
                });
                let mut status = status(409);
                status["reason"] = "Conflict".into();
                status["details"] = json!({"causes": causes.collect::<Vec<_>>()});
                status
            }
        }
    }
}

/// Merges a configuration into the live object and returns the new object with its `managedFields`. Without a live
/// object the result is the object to create.
///
/// The caller sets the metadata that only servers set, such as `uid`, and resets the fields that the endpoint does not
/// write, such as `status`. If nothing changes, the result equals the live object.
pub fn apply(
    schema: &Schema,
    live: Option<&Value>,
    configuration: &Value,
    writer: &Writer<'_>,
    force: bool,
) -> Result<Value, ApplyError> {
    check(configuration, writer)?;
    let ignored = schema.ignored(writer.subresource);
    let set = match schema.fields_of(configuration) {
        Ok(set) => set.without(&ignored),
        Err(error) => return Err(schema_error(configuration, &error)),
    };
    let before = without_managers(schema, live);
    let mut managers = live.map(Managers::of).unwrap_or_default();
    if managers.0.is_empty() && live.is_some() {
        let first = Writer {
            manager: BEFORE_FIRST_APPLY,
            subresource: "",
            ..*writer
        };
        own_changes(schema, &mut managers, &schema.empty(), &before, &first);
    }
    let id = writer.id(Operation::Apply);
    let previous = managers.0.remove(&id);
    let mut merged = schema.merge(&before, configuration);
    if let Some(previous) = &previous {
        merged = prune(schema, &merged, &managers, &set, &previous.set);
    }
    let found = schema.compare(&before, &merged).without(&ignored);
    if !force {
        conflicts(&managers, &found.written())?;
    }
    for entry in managers.0.values_mut() {
        entry.set = entry
            .set
            .difference(&found.written())
            .difference(&found.removed);
    }
    let time = match before == merged {
        true => previous.and_then(|previous| previous.time),
        false => Some(writer.time()),
    };
    let api_version = writer.api_version.to_owned();
    managers.0.insert(
        id,
        Entry {
            set: set.difference(&never_owned()),
            api_version,
            time,
        },
    );
    managers.remove_empty();
    schema.complete(&mut merged);
    finish(&mut managers, live, &mut merged);
    Ok(merged)
}

/// Sets `managedFields` of an object that a client creates, replaces or patches. Fields that changed belong to the
/// writer; other managers lose them, and they lose removed fields.
///
/// Call it with the decoded and defaulted object of the client, before the server fills in or resets fields. If
/// nothing changes, `managedFields` stay as they are in the live object.
pub fn track_update(schema: &Schema, live: Option<&Value>, new: &mut Value, writer: &Writer<'_>) {
    let mut managers = Managers::for_update(live, new, writer.subresource, schema.built_in);
    let before = without_managers(schema, live);
    schema.complete(new);
    Managers::default().write(new);
    // An object whose managers were reset stays without managers until the next apply.
    if !managers.0.is_empty() || live.is_none() {
        own_changes(schema, &mut managers, &before, new, writer);
        managers.limit();
    }
    finish(&mut managers, live, new);
}

/// Returns the manager of an update: the parameter `fieldManager`, or the part of the user agent before `/`.
pub fn manager_of(field_manager: Option<&str>, user_agent: &str) -> String {
    if let Some(manager) = field_manager.filter(|manager| !manager.is_empty()) {
        return manager.to_owned();
    }
    let name = user_agent.split('/').next().unwrap_or_default();
    let mut manager = String::new();
    for character in name.chars().filter(|character| !character.is_control()) {
        if manager.len() + character.len_utf8() > MAX_MANAGER_LENGTH {
            break;
        }
        manager.push(character);
    }
    manager
}

/// Manager of the fields that an object without managers has when it is first applied.
const BEFORE_FIRST_APPLY: &str = "before-first-apply";
const MAX_MANAGER_LENGTH: usize = 128;

impl Writer<'_> {
    fn id(&self, operation: Operation) -> Id {
        let api_version = match operation {
            Operation::Apply => "",
            Operation::Update => self.api_version,
        };
        let manager = if self.manager.is_empty() {
            "unknown"
        } else {
            self.manager
        };
        Id {
            manager: manager.to_owned(),
            operation,
            api_version: api_version.to_owned(),
            subresource: self.subresource.to_owned(),
        }
    }

    fn time(&self) -> String {
        self.at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
    }
}

/// Fields that no manager owns.
fn never_owned() -> FieldSet {
    FieldSet::of(&[
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
}

fn check(configuration: &Value, writer: &Writer<'_>) -> Result<(), ApplyError> {
    let version = configuration
        .get("apiVersion")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if version != writer.api_version {
        let expected = writer.api_version;
        return Err(ApplyError::BadRequest(format!(
            "Incorrect version specified in apply patch. Specified patch version: {version}, expected: {expected}"
        )));
    }
    if configuration
        .pointer("/metadata/managedFields")
        .is_some_and(|fields| !fields.is_null())
    {
        return Err(ApplyError::BadRequest(
            "metadata.managedFields must be nil".to_owned(),
        ));
    }
    Ok(())
}

fn schema_error(configuration: &Value, error: &str) -> ApplyError {
    let text = |pointer: &str| {
        configuration
            .pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or_default()
    };
    let (namespace, name) = (text("/metadata/namespace"), text("/metadata/name"));
    let (api_version, kind) = (text("/apiVersion"), text("/kind"));
    let group = if api_version.contains('/') { "" } else { "/" };
    ApplyError::Schema(format!(
        "failed to create typed patch object ({namespace}/{name}; {group}{api_version}, Kind={kind}): {error}"
    ))
}

/// Returns the live object as the algorithms compare it, or the empty object of a creation.
fn without_managers(schema: &Schema, live: Option<&Value>) -> Value {
    let Some(live) = live else {
        return schema.empty();
    };
    let mut live = live.clone();
    schema.complete(&mut live);
    Managers::default().write(&mut live);
    live
}

/// Removes the fields that the manager owned before and no longer applies, if no other manager owns them.
fn prune(
    schema: &Schema,
    merged: &Value,
    others: &Managers,
    applied: &FieldSet,
    previous: &FieldSet,
) -> Value {
    if previous.is_empty() {
        return merged.clone();
    }
    let previous = schema.with_structures(previous);
    let owned = others
        .0
        .values()
        .fold(applied.clone(), |owned, entry| owned.union(&entry.set));
    let owned = schema.with_structures(&owned);
    let fields = |value: &Value| schema.with_structures(&schema.valid_fields_of(value));
    let all = fields(merged);
    let pruned = schema.remove(merged, &previous);
    let pruned = schema.remove(merged, &all.difference(&fields(&pruned).union(&owned)));
    // Fields that no manager owns stay.
    let dropped = all.difference(&fields(&pruned)).intersection(&previous);
    schema.remove(merged, &dropped)
}

/// Fails if other managers own fields that this apply writes.
fn conflicts(managers: &Managers, written: &FieldSet) -> Result<(), ApplyError> {
    let mut causes = Vec::new();
    let mut lines = Vec::new();
    for (id, entry) in &managers.0 {
        let paths = entry.set.intersection(written).paths();
        if paths.is_empty() {
            continue;
        }
        let owner = id.text();
        lines.push(format!("conflicts with {owner}:"));
        for path in paths {
            let field = set::path_text(&path);
            lines.push(format!("- {field}"));
            causes.push(Cause {
                message: format!("conflict with {owner}"),
                field,
            });
        }
    }
    let message = match causes.as_slice() {
        [] => return Ok(()),
        [Cause { message, field }] => format!("Apply failed with 1 conflict: {message}: {field}"),
        causes => format!(
            "Apply failed with {} conflicts: {}",
            causes.len(),
            lines.join("\n")
        ),
    };
    Err(ApplyError::Conflict { message, causes })
}

/// Makes the writer of an update the owner of the fields that differ.
fn own_changes(
    schema: &Schema,
    managers: &mut Managers,
    before: &Value,
    after: &Value,
    writer: &Writer<'_>,
) {
    let ignored = schema.ignored(writer.subresource);
    let found = schema.compare(before, after).without(&ignored);
    let written = found.written();
    for entry in managers.0.values_mut() {
        entry.set = entry.set.difference(&written).difference(&found.removed);
    }
    let mut set = written.difference(&never_owned());
    if !set.is_empty() {
        let id = writer.id(Operation::Update);
        if let Some(previous) = managers.0.get(&id) {
            set = set.union(&previous.set);
        }
        let (api_version, time) = (writer.api_version.to_owned(), Some(writer.time()));
        managers.0.insert(
            id,
            Entry {
                set,
                api_version,
                time,
            },
        );
    }
    managers.remove_empty();
}

/// Writes the managers. Keeps their times if nothing else has changed.
fn finish(managers: &mut Managers, live: Option<&Value>, new: &mut Value) {
    let Some(live) = live else {
        managers.write(new);
        return;
    };
    let before = Managers::of(live);
    if managers.own_the_same(&before) {
        before.write(new);
        if new == live {
            return;
        }
    }
    managers.write(new);
}
