//! One map of a kubeconfig with its path: every error can name its field. A field that is null or an empty string has
//! no effect in any client and counts as unset.

use serde_json::{Map, Value};

use super::KubeconfigError;

const NAME_SHOWN_MAX: usize = 64;
const KEY_SHOWN_MAX: usize = 40;

pub(super) struct Fields<'a> {
    path: String,
    map: Option<&'a Map<String, Value>>,
}

impl<'a> Fields<'a> {
    pub(super) fn root(document: &'a Value) -> Result<Self, KubeconfigError> {
        match document {
            Value::Null => Err(KubeconfigError::NoCurrentContext),
            Value::Object(map) => Ok(Self {
                path: String::new(),
                map: Some(map),
            }),
            _ => Err(KubeconfigError::Yaml {
                line: 0,
                column: 0,
                problem: "its root is no map",
            }),
        }
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.map
            .into_iter()
            .flat_map(|map| map.keys().map(String::as_str))
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map?
            .get(key)
            .filter(|value| !value.is_null() && value.as_str() != Some(""))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, KubeconfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.invalid(key, "must be a string: put it in quotes")),
        }
    }

    pub(super) fn required(
        &self,
        key: &str,
        problem: &'static str,
    ) -> Result<&'a str, KubeconfigError> {
        self.text(key)?.ok_or_else(|| self.invalid(key, problem))
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool, KubeconfigError> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.invalid(key, "must be true or false, without quotes")),
        }
    }

    pub(super) fn map(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, KubeconfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(_) => Err(self.invalid(key, "must be a map")),
        }
    }

    /// Requires an absolute path: a relative path would depend on the hub's working directory.
    pub(super) fn path(&self, key: &str) -> Result<Option<&'a str>, KubeconfigError> {
        match self.text(key)? {
            Some(path) if !path.starts_with('/') || path.chars().any(char::is_control) => {
                Err(self.invalid(key, "must be an absolute path"))
            }
            path => Ok(path),
        }
    }

    pub(super) fn constant(
        &self,
        key: &str,
        expected: &str,
        problem: &'static str,
    ) -> Result<(), KubeconfigError> {
        match self.text(key)? {
            Some(found) if found != expected => Err(self.invalid(key, problem)),
            _ => Ok(()),
        }
    }

    pub(super) fn refuse(&self, key: &str, remedy: &'static str) -> Result<(), KubeconfigError> {
        match self.get(key) {
            Some(_) => Err(self.forbidden(key, remedy)),
            None => Ok(()),
        }
    }

    pub(super) fn known(&self, known: &[&str]) -> Result<(), KubeconfigError> {
        match self.keys().find(|key| !known.contains(key)) {
            Some(key) => Err(KubeconfigError::UnknownField {
                path: self.path_to(key),
            }),
            None => Ok(()),
        }
    }

    /// Returns the map under `inner` in the only item of `list` with this name.
    pub(super) fn entry(
        &self,
        list: &'static str,
        inner: &'static str,
        name: &str,
    ) -> Result<Fields<'a>, KubeconfigError> {
        let items = match self.get(list) {
            None => [].as_slice(),
            Some(Value::Array(items)) => items.as_slice(),
            Some(_) => return Err(self.invalid(list, "must be a list")),
        };
        let mut found = items.iter().enumerate().filter_map(|(index, item)| {
            let map = item.as_object()?;
            (map.get("name")?.as_str()? == name).then_some((index, map))
        });
        let Some((index, map)) = found.next() else {
            return Err(KubeconfigError::NotFound {
                kind: inner,
                list,
                name: shown(name),
            });
        };
        if found.next().is_some() {
            return Err(KubeconfigError::Duplicate {
                list,
                name: shown(name),
            });
        }
        let item = Fields {
            path: format!("{list}[{index}]"),
            map: Some(map),
        };
        item.known(&["name", inner, "extensions"])?;
        Ok(Fields {
            path: item.path_to(inner),
            map: item.map(inner)?,
        })
    }

    pub(super) fn invalid(&self, key: &str, problem: &'static str) -> KubeconfigError {
        KubeconfigError::Invalid {
            path: self.path_to(key),
            problem,
        }
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

    pub(super) fn path_to(&self, key: &str) -> String {
        // A key may be a misplaced secret. Real field names are short and consist of letters and dashes.
        let key = if key.len() <= KEY_SHOWN_MAX
            && key
                .bytes()
                .all(|byte| byte.is_ascii_alphabetic() || byte == b'-')
        {
            key
        } else {
            "(key not shown)"
        };
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }
}

/// Quotes the name so that it cannot imitate other text in a log.
fn shown(name: &str) -> String {
    if name.chars().count() <= NAME_SHOWN_MAX {
        format!("{name:?}")
    } else {
        format!(
            "{:?}...",
            name.chars().take(NAME_SHOWN_MAX).collect::<String>()
        )
    }
}

pub(super) fn at_line(line: u64, column: u64) -> String {
    if line == 0 {
        String::new()
    } else {
        format!(" at line {line}, column {column}")
    }
}
