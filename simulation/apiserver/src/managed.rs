//! Calls server-side apply and the tracking of field managers.

use serde_json::Value;

use crate::objects::Write;
use crate::resources::Kind;
use crate::status::{Failure, Outcome};

/// Sets the managed fields of an update.
pub(crate) fn track(_kind: &Kind, _before: Option<&Value>, _next: &mut Value, _write: &Write) {}

/// Merges an applied configuration into the live object.
pub(crate) fn apply(
    _write: &Write,
    _live: Option<&Value>,
    _configuration: &Value,
    _force: bool,
) -> Outcome<Value> {
    Err(Failure::not_modelled("server-side apply"))
}
