//! Fields of an untrusted document with their paths: every error names its field, and never the content. A field that is
//! null or an empty string counts as unset.

use serde_json::{Map, Value};

const SHOWN_KEY_MAX: usize = 40;

/// A field that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    #[error("{path} is not a known field: remove it or correct its name")]
    Unknown { path: String },
    #[error("{path} {problem}")]
    Invalid { path: String, problem: &'static str },
}

/// The fields of one map. A missing map has none.
#[derive(Debug)]
pub struct Fields<'a> {
    pub(crate) path: String,
    pub(crate) map: Option<&'a Map<String, Value>>,
}

impl<'a> Fields<'a> {
    /// Returns the fields of `value`, which is at `path` of its document.
    pub fn new(value: &'a Value, path: impl Into<String>) -> Result<Self, FieldError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self {
                path,
                map: Some(map),
            }),
            _ => Err(FieldError::Invalid {
                path,
                problem: "must be a map",
            }),
        }
    }

    pub fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.map
            .into_iter()
            .flat_map(|map| map.keys().map(String::as_str))
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map?
            .get(key)
            .filter(|value| !value.is_null() && value.as_str() != Some(""))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, FieldError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) if text.contains('\0') => {
                Err(self.invalid(key, "must not have a NUL"))
            }
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.invalid(key, "must be a string: put it in quotes")),
        }
    }

    pub fn required(&self, key: &str, problem: &'static str) -> Result<&'a str, FieldError> {
        self.text(key)?.ok_or_else(|| self.invalid(key, problem))
    }

    pub fn flag(&self, key: &str) -> Result<bool, FieldError> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.invalid(key, "must be true or false, without quotes")),
        }
    }

    pub fn nested(&self, key: &str) -> Result<Option<Self>, FieldError> {
        let value = self.get(key);
        value
            .map(|value| Fields::new(value, self.path_to(key)))
            .transpose()
    }

    pub(crate) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, FieldError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(_) => Err(self.invalid(key, "must be a list")),
        }
    }

    /// Returns the maps of a list.
    pub fn items(&self, key: &str) -> Result<Option<Vec<Self>>, FieldError> {
        let Some(items) = self.list(key)? else {
            return Ok(None);
        };
        let fields = |(index, value)| Fields::new(value, format!("{}[{index}]", self.path_to(key)));
        items
            .iter()
            .enumerate()
            .map(fields)
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Returns the texts of a list, which may be empty strings. None if the list is missing.
    pub fn texts(&self, key: &str) -> Result<Vec<&'a str>, FieldError> {
        let text = |(index, value): (usize, &'a Value)| {
            let text = value.as_str().filter(|text| !text.contains('\0'));
            text.ok_or_else(|| FieldError::Invalid {
                path: format!("{}[{index}]", self.path_to(key)),
                problem: "must be a string without a NUL: put it in quotes",
            })
        };
        let items = self.list(key)?.unwrap_or_default();
        items.iter().enumerate().map(text).collect()
    }

    /// Rejects all other fields: a misspelled one would have no effect.
    pub fn allow_only(&self, allowed: &[&str]) -> Result<(), FieldError> {
        match self.keys().find(|key| !allowed.contains(key)) {
            Some(key) => Err(FieldError::Unknown {
                path: self.path_to(key),
            }),
            None => Ok(()),
        }
    }

    pub fn invalid(&self, key: &str, problem: &'static str) -> FieldError {
        FieldError::Invalid {
            path: self.path_to(key),
            problem,
        }
    }

    pub fn path_to(&self, key: &str) -> String {
        // A key may be a misplaced secret. Real field names are short and consist of letters and dashes.
        let key = if key.len() <= SHOWN_KEY_MAX
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
