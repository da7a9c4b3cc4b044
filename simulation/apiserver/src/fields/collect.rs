//! The set of all fields of a value.

use std::collections::BTreeSet;

use serde_json::Value;

use super::schema::{ListType, Schema, Shape, Type, accepts, declares, field_type};
use super::set::{FieldSet, PathElement, path_text};

impl Schema {
    /// Returns all fields of an object. Fails if the object has undeclared fields or invalid associative lists.
    pub(super) fn all_fields(&self, object: &Value) -> Result<FieldSet, String> {
        let collector = FieldCollector::collect(self, object);
        match collector.errors.into_iter().next() {
            None => Ok(collector.set),
            Some(error) => Err(error),
        }
    }

    /// Returns all fields of an object that was stored, without its invalid parts.
    pub(super) fn valid_fields(&self, object: &Value) -> FieldSet {
        FieldCollector::collect(self, object).set
    }

    /// Adds the declared fields of structures of which the set contains only fields below them. A structure that a
    /// field set implies is a field like any other, unlike a map.
    pub(super) fn with_structures(&self, set: &FieldSet) -> FieldSet {
        self.with_structures_below(&self.root, set)
    }

    fn with_structures_below(&self, ty: &Type, set: &FieldSet) -> FieldSet {
        let structure = self.structure(ty);
        let mut result = FieldSet {
            members: set.members.clone(),
            ..FieldSet::default()
        };
        for (element, children) in &set.children {
            let ty = match (element, ty) {
                (PathElement::Field(name), _) => {
                    if declares(structure, name) {
                        result.members.insert(element.clone());
                    }
                    field_type(structure, name)
                }
                (PathElement::Key(_), Type::List { items, .. }) => items,
                _ => &Type::Untyped,
            };
            result
                .children
                .insert(element.clone(), self.with_structures_below(ty, children));
        }
        result
    }
}

struct FieldCollector<'a> {
    schema: &'a Schema,
    path: Vec<PathElement>,
    set: FieldSet,
    errors: Vec<String>,
}

impl<'a> FieldCollector<'a> {
    /// Collects the fields of an object.
    fn collect(schema: &'a Schema, object: &Value) -> Self {
        let mut collector = Self {
            schema,
            path: Vec::new(),
            set: FieldSet::default(),
            errors: Vec::new(),
        };
        collector.visit(&schema.root, object);
        collector
    }

    fn fail(&mut self, error: &str) {
        self.errors
            .push(format!("{}: {error}", path_text(&self.path)));
    }

    fn visit(&mut self, ty: &Type, value: &Value) {
        let schema = self.schema;
        match schema.shape(ty, Some(value)) {
            Shape::Leaf => self.set.insert(&self.path),
            Shape::List { list_type, items } => match value {
                Value::Array(values) => self.visit_items(list_type, items, values),
                Value::Null => (),
                _ => self.fail("expected list"),
            },
            Shape::Map(structure) => match value {
                Value::Object(fields) => {
                    for (name, value) in fields {
                        self.path.push(PathElement::Field(name.clone()));
                        match accepts(structure, name) {
                            true => self.visit(field_type(structure, name), value),
                            false => self.fail("field not declared in schema"),
                        }
                        let is_empty = value.as_object().is_some_and(serde_json::Map::is_empty);
                        if value.is_null() || is_empty || !declares(structure, name) {
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

    fn visit_items(&mut self, list_type: &ListType, items: &Type, values: &[Value]) {
        let mut seen = BTreeSet::new();
        for (index, value) in values.iter().enumerate() {
            let element = match self.schema.path_element(list_type, items, value) {
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
            self.visit(items, value);
            self.set.insert(&self.path);
            self.path.pop();
        }
    }
}
