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

use std::sync::LazyLock;

use jiff::Timestamp;
use serde_json::{Value, json};

use managers::{ManagerEntry, ManagerId, Managers, Operation};
pub use schema::Schema;
pub use set::{FieldSet, PathElement, Scalar};

/// The author of one write.
#[derive(Clone, Copy, Debug)]
pub struct Writer<'a> {
    /// The parameter `fieldManager`; for updates without it, see [`manager_name`].
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
    Conflict {
        message: String,
        conflicts: Vec<FieldConflict>,
    },
}

/// One field with another owner, a cause of type `FieldManagerConflict`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldConflict {
    pub message: String,
    pub field: String,
}

impl ApplyError {
    /// Returns the Status object of the server's response. Its `code` is the code of the response.
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
            Self::Conflict { conflicts, .. } => {
                let causes = conflicts.iter().map(|conflict| {
                    json!({"reason": "FieldManagerConflict", "message": conflict.message, "field": conflict.field})
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
    check_configuration(configuration, writer)?;
    let ignored = schema.ignored_fields(writer.subresource);
    let applied = match schema.all_fields(configuration) {
        Ok(applied) => applied.without(&ignored),
        Err(error) => return Err(schema_error(configuration, &error)),
    };
    let base = without_managers(schema, live);
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
        merged = prune(schema, &merged, &managers, &applied, &previous.set);
    }
    let comparison = schema.compare(&base, &merged).without(&ignored);
    let written = comparison.written();
    if !force {
        check_conflicts(&managers, &written)?;
    }
    for entry in managers.0.values_mut() {
        entry.set = entry
            .set
            .difference(&written)
            .difference(&comparison.removed);
    }
    let time = match base == merged {
        true => previous.and_then(|previous| previous.time),
        false => Some(writer.time()),
    };
    let api_version = writer.api_version.to_owned();
    managers.0.insert(
        id,
        ManagerEntry {
            set: applied.difference(&UNOWNED_FIELDS),
            api_version,
            time,
        },
    );
    managers.remove_empty();
    schema.complete(&mut merged);
    write_managers(&mut managers, live, &mut merged);
    Ok(merged)
}

/// Sets `managedFields` of an object that a client creates, replaces or patches. Fields that changed belong to the
/// writer; other managers lose them, and they lose removed fields.
///
/// Call it with the decoded and defaulted object of the client, before the server fills in or resets fields. If
/// nothing changes, `managedFields` stay as they are in the live object.
pub fn track_update(schema: &Schema, live: Option<&Value>, new: &mut Value, writer: &Writer<'_>) {
    let mut managers = Managers::for_update(live, new, writer.subresource, schema.built_in);
    let base = without_managers(schema, live);
    schema.complete(new);
    Managers::default().write(new);
    // An object whose managers were reset stays without managers until the next apply.
    if !managers.0.is_empty() || live.is_none() {
        assign_changed_fields(schema, &mut managers, &base, new, writer);
        managers.limit_updaters();
    }
    write_managers(&mut managers, live, new);
}

/// Returns the manager of an update: the parameter `fieldManager`, or the part of the user agent before `/`.
pub fn manager_name(field_manager: Option<&str>, user_agent: &str) -> String {
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

    fn time(&self) -> String {
        self.at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
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

fn check_configuration(configuration: &Value, writer: &Writer<'_>) -> Result<(), ApplyError> {
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
    let mut live = managers::without_managed_fields(live);
    schema.complete(&mut live);
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
    let fields = |value: &Value| schema.with_structures(&schema.valid_fields(value));
    let all = fields(merged);
    let pruned = schema.remove(merged, &previous);
    let pruned = schema.remove(merged, &all.difference(&fields(&pruned).union(&owned)));
    // Fields that no manager owns stay.
    let dropped = all.difference(&fields(&pruned)).intersection(&previous);
    schema.remove(merged, &dropped)
}

/// Fails if other managers own fields that this apply writes.
fn check_conflicts(managers: &Managers, written: &FieldSet) -> Result<(), ApplyError> {
    let mut conflicts = Vec::new();
    let mut lines = Vec::new();
    for (id, entry) in &managers.0 {
        let paths = entry.set.intersection(written).paths();
        if paths.is_empty() {
            continue;
        }
        let owner = id.describe();
        lines.push(format!("conflicts with {owner}:"));
        for path in paths {
            let field = set::path_text(&path);
            lines.push(format!("- {field}"));
            conflicts.push(FieldConflict {
                message: format!("conflict with {owner}"),
                field,
            });
        }
    }
    let message = match conflicts.as_slice() {
        [] => return Ok(()),
        [FieldConflict { message, field }] => {
            format!("Apply failed with 1 conflict: {message}: {field}")
        }
        conflicts => format!(
            "Apply failed with {} conflicts: {}",
            conflicts.len(),
            lines.join("\n")
        ),
    };
    Err(ApplyError::Conflict { message, conflicts })
}

/// Makes the writer of an update the owner of the fields that differ.
fn assign_changed_fields(
    schema: &Schema,
    managers: &mut Managers,
    before: &Value,
    after: &Value,
    writer: &Writer<'_>,
) {
    let ignored = schema.ignored_fields(writer.subresource);
    let comparison = schema.compare(before, after).without(&ignored);
    let written = comparison.written();
    for entry in managers.0.values_mut() {
        entry.set = entry
            .set
            .difference(&written)
            .difference(&comparison.removed);
    }
    let mut set = written.difference(&UNOWNED_FIELDS);
    if !set.is_empty() {
        let id = writer.id(Operation::Update);
        if let Some(previous) = managers.0.get(&id) {
            set = set.union(&previous.set);
        }
        let (api_version, time) = (writer.api_version.to_owned(), Some(writer.time()));
        managers.0.insert(
            id,
            ManagerEntry {
                set,
                api_version,
                time,
            },
        );
    }
    managers.remove_empty();
}

/// Writes the managers. Keeps their times if nothing else has changed.
fn write_managers(managers: &mut Managers, live: Option<&Value>, new: &mut Value) {
    let Some(live) = live else {
        managers.write(new);
        return;
    };
    let previous = Managers::read_from(live);
    if managers.has_same_fields(&previous) {
        previous.write(new);
        if new == live {
            return;
        }
    }
    managers.write(new);
}
