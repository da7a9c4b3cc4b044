//! Sets of fields, and their JSON form `FieldsV1`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::{Map, Value};

/// A value that identifies a list item. The order is the order of the real API server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scalar {
    Int(i64),
    Text(String),
    Bool(bool),
    /// Any other value as JSON. Such values occur in lists of type `set` only.
    Other(String),
}

impl Scalar {
    pub(super) fn new(value: &Value) -> Self {
        match value {
            Value::String(text) => Self::Text(text.clone()),
            Value::Bool(value) => Self::Bool(*value),
            other => match other.as_i64() {
                Some(number) => Self::Int(number),
                None => Self::Other(other.to_string()),
            },
        }
    }

    fn to_json(&self) -> Value {
        match self {
            Self::Int(number) => (*number).into(),
            Self::Text(text) => text.clone().into(),
            Self::Bool(value) => (*value).into(),
            Self::Other(json) => serde_json::from_str(json).unwrap_or(Value::Null),
        }
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(number) => write!(f, "{number}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Other(json) => f.write_str(json),
        }
    }
}

/// One step from an object to a field of it. The order is the order of the real API server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PathElement {
    /// A field of a structure or a key of a map, `f:name`.
    Field(String),
    /// An item of an associative list, `k:{"name":"x"}`. Sorted by key.
    Key(Vec<(String, Scalar)>),
    /// An item of a set, `v:value`.
    Value(Scalar),
    /// An item by its position, `i:0`.
    Index(i64),
}

impl PathElement {
    fn parse(text: &str) -> Option<Self> {
        let (kind, rest) = text.split_once(':')?;
        let json = || serde_json::from_str::<Value>(rest).ok();
        Some(match kind {
            "f" => Self::Field(rest.to_owned()),
            "k" => {
                let Value::Object(keys) = json()? else {
                    return None;
                };
                let keys = keys.iter();
                let mut keys: Vec<_> = keys.map(|(k, v)| (k.clone(), Scalar::new(v))).collect();
                keys.sort();
                Self::Key(keys)
            }
            "v" => Self::Value(Scalar::new(&json()?)),
            "i" => Self::Index(rest.parse().ok()?),
            _ => return None,
        })
    }

    fn fields_v1(&self) -> String {
        match self {
            Self::Field(name) => ["f:", name].concat(),
            Self::Key(keys) => {
                let keys = keys
                    .iter()
                    .map(|(key, value)| (key.clone(), value.to_json()));
                format!("k:{}", Value::Object(keys.collect()))
            }
            Self::Value(value) => format!("v:{}", value.to_json()),
            Self::Index(index) => format!("i:{index}"),
        }
    }
}

/// The form of a path in error messages is a sequence of these, such as `.spec.ports[port=80,protocol="TCP"]`.
impl fmt::Display for PathElement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(name) => write!(f, ".{name}"),
            Self::Key(keys) => {
                let keys = keys.iter().map(|(key, value)| format!("{key}={value}"));
                write!(f, "[{}]", keys.collect::<Vec<_>>().join(","))
            }
            Self::Value(value) => write!(f, "[={value}]"),
            Self::Index(index) => write!(f, "[{index}]"),
        }
    }
}

pub(super) fn path_text(path: &[PathElement]) -> String {
    path.iter().map(ToString::to_string).collect()
}

/// A set of fields. A field can be a member without its parents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FieldSet {
    pub(super) members: BTreeSet<PathElement>,
    /// The fields below each element. No set here is empty.
    pub(super) children: BTreeMap<PathElement, FieldSet>,
}

impl FieldSet {
    /// Reads the JSON form, or returns `None` if it is invalid.
    pub(super) fn parse(fields: &Value) -> Option<Self> {
        let mut set = Self::default();
        for (key, value) in fields.as_object()? {
            if key == "." {
                continue;
            }
            let element = PathElement::parse(key)?;
            let children = Self::parse(value)?;
            if children.is_empty() || value.get(".").is_some() {
                set.members.insert(element.clone());
            }
            set.insert_children(element, children);
        }
        Some(set)
    }

    /// Returns the JSON form.
    pub(super) fn fields_v1(&self) -> Value {
        let mut fields = Map::new();
        for element in &self.members {
            fields.insert(element.fields_v1(), Value::Object(Map::new()));
        }
        for (element, children) in &self.children {
            let mut children = children.fields_v1();
            if let (true, Some(children)) =
                (self.members.contains(element), children.as_object_mut())
            {
                children.insert(".".to_owned(), Value::Object(Map::new()));
            }
            fields.insert(element.fields_v1(), children);
        }
        Value::Object(fields)
    }

    /// Returns whether all members, or any, are members of a set in its JSON form.
    fn is_in(&self, fields: &Value, all: bool) -> bool {
        let is_member = |element: &PathElement| {
            let field = fields.get(element.fields_v1()).and_then(Value::as_object);
            field.is_some_and(|below| below.is_empty() || below.contains_key("."))
        };
        let is_in = |(element, set): (&PathElement, &Self)| match fields.get(element.fields_v1()) {
            Some(below) => set.is_in(below, all),
            None => false,
        };
        match all {
            true => self.members.iter().all(is_member) && self.children.iter().all(is_in),
            false => self.members.iter().any(is_member) || self.children.iter().any(is_in),
        }
    }

    /// Returns whether a set in its JSON form contains all members.
    pub(super) fn is_subset_of(&self, fields: &Value) -> bool {
        self.is_in(fields, true)
    }

    /// Returns whether a set in its JSON form contains any member.
    pub(super) fn overlaps(&self, fields: &Value) -> bool {
        self.is_in(fields, false)
    }

    /// Returns the set of paths, each a sequence of names.
    pub(super) fn from_paths(paths: &[&[&str]]) -> Self {
        let mut set = Self::default();
        for path in paths {
            let path = path
                .iter()
                .map(|name| PathElement::Field((*name).to_owned()));
            set.insert(&path.collect::<Vec<_>>());
        }
        set
    }

    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty() && self.children.is_empty()
    }

    /// Adds a field. The empty path stands for the object, which is never a member.
    pub(super) fn insert(&mut self, path: &[PathElement]) {
        match path {
            [] => (),
            [last] => {
                self.members.insert(last.clone());
            }
            [first, rest @ ..] => match self.children.get_mut(first) {
                Some(children) => children.insert(rest),
                None => self.children.entry(first.clone()).or_default().insert(rest),
            },
        }
    }

    fn insert_children(&mut self, element: PathElement, children: Self) {
        if !children.is_empty() {
            self.children.insert(element, children);
        }
    }

    #[must_use]
    pub(super) fn union(&self, other: &Self) -> Self {
        let mut union = self.clone();
        union.add(other.clone());
        union
    }

    /// Adds the members of the other set.
    pub(super) fn add(&mut self, mut other: Self) {
        self.members.append(&mut other.members);
        for (element, set) in other.children {
            match self.children.get_mut(&element) {
                Some(existing) => existing.add(set),
                None => self.insert_children(element, set),
            }
        }
    }

    /// Returns the members that are not members of the other set.
    #[must_use]
    pub(super) fn difference(&self, other: &Self) -> Self {
        let mut difference = self.clone();
        difference.remove(other);
        difference
    }

    /// Removes the members of the other set.
    pub(super) fn remove(&mut self, other: &Self) {
        self.members
            .retain(|element| !other.members.contains(element));
        self.children.retain(|element, set| {
            if let Some(other) = other.children.get(element) {
                set.remove(other);
            }
            !set.is_empty()
        });
    }

    #[must_use]
    pub(super) fn intersection(&self, other: &Self) -> Self {
        let mut result = Self {
            members: self.members.intersection(&other.members).cloned().collect(),
            ..Self::default()
        };
        for (element, set) in &self.children {
            if let Some(other) = other.children.get(element) {
                result.insert_children(element.clone(), set.intersection(other));
            }
        }
        result
    }

    /// Removes the members of the other set and the fields below them.
    pub(super) fn remove_with_fields(&mut self, other: &Self) {
        self.members
            .retain(|element| !other.members.contains(element));
        self.children.retain(|element, set| {
            if let Some(other) = other.children.get(element) {
                set.remove_with_fields(other);
            }
            !other.members.contains(element) && !set.is_empty()
        });
    }

    /// Returns all members. At each level, members precede the fields below them.
    pub(super) fn paths(&self) -> Vec<Vec<PathElement>> {
        let mut paths: Vec<_> = self
            .members
            .iter()
            .map(|element| vec![element.clone()])
            .collect();
        for (element, set) in &self.children {
            for mut path in set.paths() {
                path.insert(0, element.clone());
                paths.push(path);
            }
        }
        paths
    }
}
