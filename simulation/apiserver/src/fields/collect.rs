//! The set of all fields of a value.

use std::collections::BTreeSet;

use serde_json::Value;

use super::schema::{Relation, Schema, Shape, Type, accepts, declares, field_type};
use super::set::{Element, FieldSet, path_text};

impl Schema {
    /// Returns all fields of an object. Fails if the object has undeclared fields or invalid associative lists.
    pub(super) fn fields_of(&self, object: &Value) -> Result<FieldSet, String> {
        let walk = Walk::through(self, object);
        match walk.errors.into_iter().next() {
            None => Ok(walk.set),
            Some(error) => Err(error),
        }
    }

    /// Returns all fields of an object that was stored, without its invalid parts.
    pub(super) fn valid_fields_of(&self, object: &Value) -> FieldSet {
        Walk::through(self, object).set
    }

    /// Adds the declared fields of structures of which the set contains only fields below them. A structure that a
    /// field set implies is a field like any other, unlike a map.
    pub(super) fn with_structures(&self, set: &FieldSet) -> FieldSet {
        self.with_structures_below(&self.root, set)
    }

    fn with_structures_below(&self, of: &Type, set: &FieldSet) -> FieldSet {
        let structure = self.structure(of);
        let mut result = FieldSet {
            members: set.members.clone(),
            ..FieldSet::default()
        };
        for (element, below) in &set.below {
            let of = match (element, of) {
                (Element::Field(name), _) => {
                    if declares(structure, name) {
                        result.members.insert(element.clone());
                    }
                    field_type(structure, name)
                }
                (Element::Key(_), Type::List { items, .. }) => items,
                _ => &Type::Untyped,
            };
            result
                .below
                .insert(element.clone(), self.with_structures_below(of, below));
        }
        result
    }
}

struct Walk<'a> {
    schema: &'a Schema,
    path: Vec<Element>,
    set: FieldSet,
    errors: Vec<String>,
}

impl<'a> Walk<'a> {
    /// Collects the fields of an object.
    fn through(schema: &'a Schema, object: &Value) -> Self {
        let mut walk = Self {
            schema,
            path: Vec::new(),
            set: FieldSet::default(),
            errors: Vec::new(),
        };
        walk.value(&schema.root, object);
        walk
    }

    fn fail(&mut self, error: &str) {
        self.errors
            .push(format!("{}: {error}", path_text(&self.path)));
    }

    fn value(&mut self, of: &Type, value: &Value) {
        let schema = self.schema;
        match schema.shape(of, Some(value)) {
            Shape::Leaf => self.set.insert(&self.path),
            Shape::List { relation, items } => match value {
                Value::Array(values) => self.items(relation, items, values),
                Value::Null => (),
                _ => self.fail("expected list"),
            },
            Shape::Map(structure) => match value {
                Value::Object(fields) => {
                    for (name, value) in fields {
                        self.path.push(Element::Field(name.clone()));
                        match accepts(structure, name) {
                            true => self.value(field_type(structure, name), value),
                            false => self.fail("field not declared in schema"),
                        }
                        let empty = value.as_object().is_some_and(serde_json::Map::is_empty);
                        if value.is_null() || empty || !declares(structure, name) {
                            self.set.insert(&self.path);
                        }
                        self.path.pop();
                    }
                }
                Value::Null => (),
                _ => self.fail("expected map"),
            },
        }
    }

    fn items(&mut self, relation: &Relation, items: &Type, values: &[Value]) {
        let mut seen = BTreeSet::new();
        for (index, value) in values.iter().enumerate() {
            let element = match self.schema.element(relation, items, value) {
                Ok(element) => element,
                Err(error) => {
                    self.fail(&format!("element {index}: {error}"));
                    continue;
                }
            };
            if !seen.insert(element.clone()) {
                self.fail(&format!("duplicate entries for key {element}"));
                continue;
            }
            self.path.push(element);
            self.value(items, value);
            self.set.insert(&self.path);
            self.path.pop();
        }
    }
}
