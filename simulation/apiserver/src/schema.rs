//! Structural schemas of custom resources: pruning, defaults and validation.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;

use regex::Regex;
use serde_json::{Map, Value};

use crate::cause::Cause;

/// A structural schema with its compiled patterns.
#[derive(Debug)]
pub(crate) struct StructuralSchema {
    root: Value,
    patterns: BTreeMap<String, Regex>,
}

impl StructuralSchema {
    pub(crate) fn new(root: Value) -> Self {
        let mut patterns = BTreeMap::new();
        collect_patterns(&root, &mut patterns);
        Self { root, patterns }
    }

    pub(crate) fn root(&self) -> &Value {
        &self.root
    }

    /// Drops unknown fields and sets defaults, except in metadata. Returns the paths of the dropped fields.
    pub(crate) fn complete(&self, object: &mut Value) -> Vec<String> {
        let mut dropped = Vec::new();
        let Some(map) = object.as_object_mut() else {
            return dropped;
        };
        let metadata = map.remove("metadata");
        let names = ["kind", "apiVersion"].map(|name| (name, map.remove(name)));
        prune(&self.root, object, &Path::Root, &mut dropped);
        set_defaults(&self.root, object);
        if let Some(map) = object.as_object_mut() {
            map.extend(metadata.map(|value| ("metadata".to_owned(), value)));
            let names = names.into_iter();
            map.extend(names.filter_map(|(name, value)| Some((name.to_owned(), value?))));
        }
        dropped
    }

    /// Returns the violations, in the order of the fields.
    pub(crate) fn violations(&self, object: &Value, subresource: &str) -> Vec<Cause> {
        let mut causes = Vec::new();
        self.validate(&self.root, object, &Path::Root, &mut causes);
        // The server lists unsupported values last.
        causes.sort_by_key(|cause| cause.reason == "FieldValueNotSupported");
        if subresource == "status" {
            // The server validates the status alone.
            for cause in &mut causes {
                let message = cause.message.replace(": status.", ": ");
                cause.message = message;
            }
        }
        causes
    }

    fn validate(&self, schema: &Value, value: &Value, path: &Path<'_>, causes: &mut Vec<Cause>) {
        if value.is_null() && schema["nullable"] == true {
            return;
        }
        if let Some(expected) = expected_type_if_wrong(schema, value) {
            if report_wrong_format(schema, value, path, causes) {
                return;
            }
            causes.push(wrong_type(path, expected, type_of(value)));
            self.validate_enum(schema, value, path, causes);
            return;
        }
        self.validate_enum(schema, value, path, causes);
        match value {
            Value::Object(map) => self.validate_map(schema, map, path, causes),
            Value::Array(list) => {
                check_count(schema, "maxItems", list.len(), path, causes);
                check_duplicates(schema, list, path, causes);
                if !schema["items"].is_null() {
                    for (index, item) in list.iter().enumerate() {
                        let path = Path::Item(path, index);
                        self.validate(&schema["items"], item, &path, causes);
                    }
                }
            }
            Value::String(text) => self.validate_text(schema, text, path, causes),
            Value::Number(number) => {
                for (limit, wrong, text) in [
                    ("minimum", Ordering::Less, "greater"),
                    ("maximum", Ordering::Greater, "less"),
                ] {
                    if let (Some(limit), Some(number)) = (schema[limit].as_f64(), number.as_f64())
                        && number.partial_cmp(&limit) == Some(wrong)
                    {
                        let problem =
                            format!("{path} in body should be {text} than or equal to {limit}");
                        causes.push(Cause::invalid(path_or_nil(path), value, &problem));
                    }
                }
            }
            _ => {}
        }
    }

    fn validate_enum(
        &self,
        schema: &Value,
        value: &Value,
        path: &Path<'_>,
        causes: &mut Vec<Cause>,
    ) {
        let Some(allowed) = schema["enum"].as_array() else {
            return;
        };
        if !allowed.contains(value) {
            let allowed: Vec<String> = allowed.iter().map(Value::to_string).collect();
            let supported = allowed.join(", ");
            causes.push(Cause::unsupported(&path_or_nil(path), value, &supported));
        }
    }

    fn validate_map(
        &self,
        schema: &Value,
        map: &Map<String, Value>,
        path: &Path<'_>,
        causes: &mut Vec<Cause>,
    ) {
        check_count(schema, "maxProperties", map.len(), path, causes);
        for field in crate::meta::strings(&schema["required"]) {
            if !map.contains_key(field) {
                causes.push(Cause::required(Path::Field(path, field).to_string(), ""));
            }
        }
        for (name, value) in map {
            if matches!(path, Path::Root) && name == "metadata" {
                continue;
            }
            let property = &schema["properties"][name];
            let schema = match property {
                Value::Null => &schema["additionalProperties"],
                property => property,
            };
            if schema.is_object() {
                self.validate(schema, value, &Path::Field(path, name), causes);
            }
        }
    }

    fn validate_text(&self, schema: &Value, text: &str, path: &Path<'_>, causes: &mut Vec<Cause>) {
        let length = text.chars().count();
        if let Some(maximum) = schema["maxLength"].as_u64()
            && length as u64 > maximum
        {
            causes.push(Cause {
                reason: "FieldValueTooLong",
                message: format!("Too long: may not be more than {maximum} bytes"),
                field: path_or_nil(path),
            });
        }
        if let Some(minimum) = schema["minLength"].as_u64()
            && (length as u64) < minimum
        {
            let problem = format!("{path} in body should be at least {minimum} chars long");
            causes.push(Cause::invalid(path_or_nil(path), &text.into(), &problem));
        }
        if let Some(pattern) = schema["pattern"].as_str()
            && let Some(regex) = self.patterns.get(pattern)
            && !regex.is_match(text)
        {
            let problem = format!("{path} in body should match '{pattern}'");
            causes.push(Cause::invalid(path_or_nil(path), &text.into(), &problem));
        }
    }
}

fn collect_patterns(schema: &Value, patterns: &mut BTreeMap<String, Regex>) {
    if let Some(pattern) = schema["pattern"].as_str()
        && let Ok(compiled) = Regex::new(pattern)
    {
        patterns.insert(pattern.to_owned(), compiled);
    }
    for (_, schema) in schema["properties"].as_object().into_iter().flatten() {
        collect_patterns(schema, patterns);
    }
    for field in ["items", "additionalProperties"] {
        if schema[field].is_object() {
            collect_patterns(&schema[field], patterns);
        }
    }
}

/// A path in an object. Its text is only needed for problems.
#[derive(Debug)]
pub(crate) enum Path<'a> {
    Root,
    Field(&'a Self, &'a str),
    Item(&'a Self, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => Ok(()),
            Self::Field(Self::Root, field) => f.write_str(field),
            Self::Field(path, field) => write!(f, "{path}.{field}"),
            Self::Item(path, index) => write!(f, "{path}[{index}]"),
        }
    }
}

fn path_or_nil(path: &Path<'_>) -> String {
    match path {
        Path::Root => "<nil>".to_owned(),
        path => path.to_string(),
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Returns the expected type if the value has another one.
fn expected_type_if_wrong<'a>(schema: &'a Value, value: &Value) -> Option<&'a str> {
    let expected = schema["type"].as_str()?;
    let actual = type_of(value);
    let fits = match expected {
        _ if schema["x-kubernetes-int-or-string"] == true => true,
        "number" => matches!(actual, "number" | "integer"),
        expected => expected == actual,
    };
    (!fits).then_some(expected)
}

fn wrong_type(path: &Path<'_>, expected: &str, actual: &str) -> Cause {
    let problem = format!("{path} in body must be of type {expected}: {actual:?}");
    Cause {
        reason: "FieldValueTypeInvalid",
        ..Cause::invalid(path_or_nil(path), &actual.into(), &problem)
    }
}

/// Adds the causes for a fraction in an integer with a format.
fn report_wrong_format(
    schema: &Value,
    value: &Value,
    path: &Path<'_>,
    causes: &mut Vec<Cause>,
) -> bool {
    let format = schema["format"]
        .as_str()
        .filter(|_| schema["type"] == "integer");
    let (Some(format), Value::Number(_)) = (format, value) else {
        return false;
    };
    causes.push(wrong_type(path, format, "float64"));
    let problem = format!("Checked value must be of type integer with format {format} in {path}");
    causes.push(Cause::invalid(
        path_or_nil(&Path::Root),
        &"".into(),
        &problem,
    ));
    true
}

fn check_count(
    schema: &Value,
    limit: &str,
    count: usize,
    path: &Path<'_>,
    causes: &mut Vec<Cause>,
) {
    if let Some(maximum) = schema[limit].as_u64()
        && count as u64 > maximum
    {
        causes.push(Cause {
            reason: "FieldValueTooMany",
            message: format!("Too many: {count}: must have at most {maximum} items"),
            field: path_or_nil(path),
        });
    }
}

/// Adds the duplicates in a list that is a set or a map.
fn check_duplicates(schema: &Value, list: &[Value], path: &Path<'_>, causes: &mut Vec<Cause>) {
    let keys: Vec<&str> = crate::meta::strings(&schema["x-kubernetes-list-map-keys"]).collect();
    let identity = |item: &Value| match schema["x-kubernetes-list-type"].as_str() {
        Some("set") => Some(item.clone()),
        Some("map") => {
            let values = keys
                .iter()
                .map(|key| ((*key).to_owned(), item[*key].clone()));
            Some(Value::Object(values.collect()))
        }
        _ => None,
    };
    let mut identities: Vec<Value> = Vec::new();
    for (index, item) in list.iter().enumerate() {
        let Some(identity) = identity(item) else {
            return;
        };
        if identities.contains(&identity) {
            causes.push(Cause {
                reason: "FieldValueDuplicate",
                message: format!("Duplicate value: {identity}"),
                field: format!("{path}[{index}]"),
            });
        }
        identities.push(identity);
    }
}

fn prune(schema: &Value, value: &mut Value, path: &Path<'_>, dropped: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            let additional = &schema["additionalProperties"];
            let preserves_unknown =
                schema["x-kubernetes-preserve-unknown-fields"] == true || *additional == true;
            let is_embedded = schema["x-kubernetes-embedded-resource"] == true;
            map.retain(|name, value| {
                let property = &schema["properties"][name];
                if property.is_object() {
                    prune(property, value, &Path::Field(path, name), dropped);
                    return true;
                }
                if additional.is_object() {
                    prune(additional, value, &Path::Field(path, name), dropped);
                    return true;
                }
                let is_kept = preserves_unknown
                    || (is_embedded && matches!(&**name, "kind" | "apiVersion" | "metadata"));
                if !is_kept {
                    dropped.push(Path::Field(path, name).to_string());
                }
                is_kept
            });
        }
        Value::Array(list) if schema["items"].is_object() => {
            for (index, item) in list.iter_mut().enumerate() {
                prune(&schema["items"], item, &Path::Item(path, index), dropped);
            }
        }
        _ => {}
    }
}

fn set_defaults(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (name, property) in schema["properties"].as_object().into_iter().flatten() {
                // A null counts as missing unless the field is nullable.
                if property["nullable"] != true && map.get(name).is_some_and(Value::is_null) {
                    map.remove(name);
                }
                let default = &property["default"];
                if !default.is_null() && !map.contains_key(name) {
                    map.insert(name.clone(), default.clone());
                }
                if let Some(value) = map.get_mut(name) {
                    set_defaults(property, value);
                }
            }
            if schema["additionalProperties"].is_object() {
                for value in map.values_mut() {
                    set_defaults(&schema["additionalProperties"], value);
                }
            }
        }
        Value::Array(list) if schema["items"].is_object() => {
            for item in list {
                set_defaults(&schema["items"], item);
            }
        }
        _ => {}
    }
}
