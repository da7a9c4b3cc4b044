//! Fields of a kubeconfig, and the fields that are not allowed.

use super::KubeconfigError;
use crate::document::{FieldError, Fields};

const SHOWN_NAME_MAX: usize = 64;

impl<'a> Fields<'a> {
    /// Requires an absolute path: a relative path would depend on the hub's working directory.
    pub(super) fn path(&self, key: &str) -> Result<Option<&'a str>, FieldError> {
        match self.text(key)? {
            Some(path) if !path.starts_with('/') || path.chars().any(char::is_control) => {
                Err(self.invalid(key, "must be an absolute path"))
            }
            path => Ok(path),
        }
    }

    pub(super) fn expect_value(
        &self,
        key: &str,
        expected: &str,
        problem: &'static str,
    ) -> Result<(), FieldError> {
        match self.text(key)? {
            Some(value) if value != expected => Err(self.invalid(key, problem)),
            _ => Ok(()),
        }
    }

    pub(super) fn forbid(&self, key: &str, remedy: &'static str) -> Result<(), KubeconfigError> {
        match self.get(key) {
            Some(_) => Err(self.forbidden(key, remedy)),
            None => Ok(()),
        }
    }

    /// Returns the map under `key` in the only item of `list` with this name.
    pub(super) fn entry(
        &self,
        list: &'static str,
        key: &'static str,
        name: &str,
    ) -> Result<Fields<'a>, KubeconfigError> {
        let items = self.list(list)?.unwrap_or_default();
        let mut matches = items.iter().enumerate().filter_map(|(index, item)| {
            let map = item.as_object()?;
            (map.get("name")?.as_str()? == name).then_some((index, map))
        });
        let Some((index, map)) = matches.next() else {
            return Err(KubeconfigError::NotFound {
                kind: key,
                list,
                name: quoted(name),
            });
        };
        if matches.next().is_some() {
            return Err(KubeconfigError::Duplicate {
                list,
                name: quoted(name),
            });
        }
        let item = Fields {
            path: format!("{list}[{index}]"),
            map: Some(map),
        };
        item.allow_only(&["name", key, "extensions"])?;
        Ok(Fields {
            path: item.path_to(key),
            map: item.nested(key)?.and_then(|fields| fields.map),
        })
    }

    pub(super) fn forbidden(&self, key: &str, remedy: &'static str) -> KubeconfigError {
        KubeconfigError::Forbidden {
            path: self.path_to(key),
            remedy,
        }
    }

    pub(super) fn no_credential(&self) -> KubeconfigError {
        KubeconfigError::NoCredential {
            path: self.path.clone(),
        }
    }
}

/// Quotes the name so that it cannot imitate other text in a log.
fn quoted(name: &str) -> String {
    if name.chars().count() <= SHOWN_NAME_MAX {
        format!("{name:?}")
    } else {
        format!(
            "{:?}...",
            name.chars().take(SHOWN_NAME_MAX).collect::<String>()
        )
    }
}

pub(super) fn position(line: u64, column: u64) -> String {
    if line == 0 {
        String::new()
    } else {
        format!(" at line {line}, column {column}")
    }
}
