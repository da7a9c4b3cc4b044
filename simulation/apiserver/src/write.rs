//! A write of one object, and the result of a deletion.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use crate::cause::Cause;
use crate::key::Key;
use crate::kind::Kind;
use crate::status::Failure;

/// A write of one object.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) kind: Arc<Kind>,
    pub(crate) namespace: String,
    /// Empty for a POST.
    pub(crate) name: String,
    pub(crate) subresource: String,
    pub(crate) field_manager: String,
    /// Whether server-side apply has set the managed fields.
    pub(crate) is_apply: bool,
    /// The parameter `fieldValidation`.
    pub(crate) field_validation: String,
    pub(crate) dry_run: bool,
    pub(crate) now: Timestamp,
    /// User agent or name of the controller.
    pub(crate) author: String,
}

impl Write {
    pub(crate) fn key(&self) -> Key {
        self.kind.key(&self.namespace, &self.name)
    }

    pub(crate) fn invalid(&self, causes: &[Cause]) -> Box<Failure> {
        Failure::invalid(&self.kind, &self.name, causes)
    }

    pub(crate) fn writes_status(&self) -> bool {
        self.subresource == "status"
    }
}

/// Result of a DELETE.
#[derive(Debug)]
pub(crate) enum DeletionResult {
    Gone(Arc<Value>),
    Remains(Arc<Value>),
}
