//! Server-side apply and managed fields: merges configurations into live objects and tracks which manager owns which
//! field, as a real API server does. Pure functions on JSON.
//!
//! Not modelled: conversion between versions of one kind, changes of a schema under existing objects, and kubectl's
//! annotation of client-side apply.

use jiff::Timestamp;
use serde_json::Value;

/// The types of all fields of one kind.
#[derive(Clone, Debug)]
pub struct Schema {}

impl Schema {
    /// Returns the schema of a built-in kind, such as `apps/v1` and `Deployment`, or `None` for an unknown kind.
    pub fn built_in(_api_version: &str, _kind: &str) -> Option<Self> {
        todo!()
    }

    /// Returns the schema of a custom resource from `openAPIV3Schema` of its version. `status` is whether that version
    /// has the subresource `status`.
    pub fn custom(_open_api: &Value, _status: bool) -> Self {
        todo!()
    }

    /// Gives an object of a built-in kind the form that the decoder of a real server gives it: removes null, empty
    /// lists and empty maps, and adds the structures that are always present, such as `resources` of a container.
    /// Leaves custom resources unchanged. [`apply`] and [`track_update`] call it.
    pub fn complete(&self, _object: &mut Value) {
        todo!()
    }
}

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
        todo!()
    }
}

/// Merges a configuration into the live object and returns the new object with its `managedFields`. Without a live
/// object the result is the object to create.
///
/// The caller sets the metadata that only servers set, such as `uid`, and resets the fields that the endpoint does not
/// write, such as `status`. If nothing changes, the result equals the live object.
pub fn apply(
    _schema: &Schema,
    _live: Option<&Value>,
    _configuration: &Value,
    _writer: &Writer<'_>,
    _force: bool,
) -> Result<Value, ApplyError> {
    todo!()
}

/// Sets `managedFields` of an object that a client creates, replaces or patches. Fields that changed belong to the
/// writer; other managers lose them, and they lose removed fields.
///
/// Call it with the decoded and defaulted object of the client, before the server fills in or resets fields. If
/// nothing changes, `managedFields` stay as they are in the live object.
pub fn track_update(_schema: &Schema, _live: Option<&Value>, _new: &mut Value, _writer: &Writer<'_>) {
    todo!()
}

/// Returns the manager of an update: the parameter `fieldManager`, or the part of the user agent before `/`.
pub fn manager_of(_field_manager: Option<&str>, _user_agent: &str) -> String {
    todo!()
}
