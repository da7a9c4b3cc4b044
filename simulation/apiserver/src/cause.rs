//! Problems with single fields of an object or of a request.

use std::fmt::Display;

use serde_json::{Value, json};

/// A problem with one field of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cause {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) field: String,
}

impl Cause {
    pub(crate) fn invalid(field: impl Into<String>, value: &Value, problem: &str) -> Self {
        Self {
            reason: "FieldValueInvalid",
            message: format!("Invalid value: {value}: {problem}"),
            field: field.into(),
        }
    }

    pub(crate) fn unsupported(field: &str, value: impl Display, supported: &str) -> Self {
        Self {
            reason: "FieldValueNotSupported",
            message: format!("Unsupported value: {value}: supported values: {supported}"),
            field: field.to_owned(),
        }
    }

    pub(crate) fn required(field: impl Into<String>, problem: &str) -> Self {
        let message = match problem {
            "" => "Required value".to_owned(),
            problem => format!("Required value: {problem}"),
        };
        Self {
            reason: "FieldValueRequired",
            message,
            field: field.into(),
        }
    }

    pub(crate) fn forbidden(field: impl Into<String>, problem: &str) -> Self {
        Self {
            reason: "FieldValueForbidden",
            message: format!("Forbidden: {problem}"),
            field: field.into(),
        }
    }

    pub(crate) fn immutable(field: impl Into<String>, value: &Value) -> Self {
        Self::invalid(field, value, "field is immutable")
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({"reason": self.reason, "message": self.message, "field": self.field})
    }
}
