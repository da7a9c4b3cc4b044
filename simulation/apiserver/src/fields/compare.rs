//! The fields in which two objects differ.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::schema::{Relation, Schema, Shape, Structure, Type, field_type};
use super::set::{Element, FieldSet};

#[derive(Debug, Default)]
pub(super) struct Comparison {
    pub(super) added: FieldSet,
    pub(super) modified: FieldSet,
    pub(super) removed: FieldSet,
}

impl Comparison {
    /// Leaves out these fields and the fields below them.
    pub(super) fn without(&self, ignored: &FieldSet) -> Self {
        Self {
            added: self.added.without(ignored),
            modified: self.modified.without(ignored),
            removed: self.removed.without(ignored),
        }
    }

    pub(super) fn written(&self) -> FieldSet {
        self.added.union(&self.modified)
    }
}

impl Schema {
    pub(super) fn compare(&self, before: &Value, after: &Value) -> Comparison {
        let mut walk = Walk {
            schema: self,
            path: Vec::new(),
            found: Comparison::default(),
        };
        walk.values(&self.root, Some(before), Some(after));
        walk.found
    }
}

pub(super) fn list(value: Option<&Value>) -> &[Value] {
    value.and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

pub(super) fn fields(value: Option<&Value>) -> Option<&Map<String, Value>> {
    value
        .and_then(Value::as_object)
        .filter(|fields| !fields.is_empty())
}

struct Walk<'a> {
    schema: &'a Schema,
    path: Vec<Element>,
    found: Comparison,
}

impl Walk<'_> {
    fn values(&mut self, of: &Type, before: Option<&Value>, after: Option<&Value>) {
        let shapes = (self.schema.shape(of, before), self.schema.shape(of, after));
        let leaf = match (before, after) {
            (None, None) => return,
            (_, None) => self.shaped(shapes.0, before, after),
            (None, _) => self.shaped(shapes.1, before, after),
            _ if shapes.0.is_like(shapes.1) => self.shaped(shapes.1, before, after),
            _ => {
                self.shaped(shapes.0, before, after);
                self.shaped(shapes.1, before, after)
            }
        };
        match (before, after) {
            (None, _) if !leaf => self.found.added.insert(&self.path),
            (_, None) if !leaf => self.found.removed.insert(&self.path),
            _ => (),
        }
    }

    /// Returns whether the value is a leaf here. Two empty lists or maps are.
    fn shaped(&mut self, shape: Shape<'_>, before: Option<&Value>, after: Option<&Value>) -> bool {
        let leaf = match shape {
            Shape::Leaf => true,
            Shape::List { .. } => list(before).is_empty() && list(after).is_empty(),
            Shape::Map(_) => fields(before).is_none() && fields(after).is_none(),
        };
        match shape {
            _ if leaf => self.leaf(before, after),
            Shape::List { relation, items } => {
                self.items(relation, items, list(before), list(after))
            }
            Shape::Map(structure) => self.fields(structure, fields(before), fields(after)),
            Shape::Leaf => (),
        }
        leaf
    }

    fn leaf(&mut self, before: Option<&Value>, after: Option<&Value>) {
        match (before, after) {
            (None, _) => self.found.added.insert(&self.path),
            (_, None) => self.found.removed.insert(&self.path),
            (before, after) if before != after => self.found.modified.insert(&self.path),
            _ => (),
        }
    }

    fn fields(
        &mut self,
        structure: Option<&Structure>,
        before: Option<&Map<String, Value>>,
        after: Option<&Map<String, Value>>,
    ) {
        let get = |fields: Option<&'_ Map<String, Value>>, name: &str| -> Option<Value> {
            fields.and_then(|fields| fields.get(name)).cloned()
        };
        let names = before.into_iter().chain(after).flat_map(Map::keys);
        for name in names.collect::<std::collections::BTreeSet<_>>() {
            let (before, after) = (get(before, name), get(after, name));
            self.path.push(Element::Field(name.clone()));
            self.values(field_type(structure, name), before.as_ref(), after.as_ref());
            self.path.pop();
        }
    }

    fn items(&mut self, relation: &Relation, of: &Type, before: &[Value], after: &[Value]) {
        let mut items: BTreeMap<Element, [Vec<&Value>; 2]> = BTreeMap::new();
        for (side, values) in [before, after].into_iter().enumerate() {
            for value in values {
                if let Ok(element) = self.schema.element(relation, of, value) {
                    items.entry(element).or_default()[side].push(value);
                }
            }
        }
        for (element, [before, after]) in items {
            self.path.push(element);
            match (before.as_slice(), after.as_slice()) {
                (before @ ([] | [_]), after @ ([] | [_])) => {
                    self.values(of, before.first().copied(), after.first().copied());
                }
                (_, []) => self.found.removed.insert(&self.path),
                ([], _) => self.found.added.insert(&self.path),
                (before, after) if before != after => self.found.modified.insert(&self.path),
                _ => (),
            }
            self.path.pop();
        }
    }
}
