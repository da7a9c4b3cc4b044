//! The fields in which two objects differ.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::schema::{ListType, Schema, Shape, Structure, Type, field_type};
use super::set::{FieldSet, PathElement};

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
        let mut comparer = Comparer {
            schema: self,
            path: Vec::new(),
            comparison: Comparison::default(),
        };
        comparer.compare_values(&self.root, Some(before), Some(after));
        comparer.comparison
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

struct Comparer<'a> {
    schema: &'a Schema,
    path: Vec<PathElement>,
    comparison: Comparison,
}

impl Comparer<'_> {
    fn compare_values(&mut self, ty: &Type, before: Option<&Value>, after: Option<&Value>) {
        // A write changes a small part of an object.
        if before.is_some() && before == after {
            return;
        }
        let shapes = (self.schema.shape(ty, before), self.schema.shape(ty, after));
        let is_leaf = match (before, after) {
            (None, None) => return,
            (_, None) => self.compare_shapes(shapes.0, before, after),
            (None, _) => self.compare_shapes(shapes.1, before, after),
            _ if shapes.0.has_same_form(shapes.1) => self.compare_shapes(shapes.1, before, after),
            _ => {
                self.compare_shapes(shapes.0, before, after);
                self.compare_shapes(shapes.1, before, after)
            }
        };
        match (before, after) {
            (None, _) if !is_leaf => self.comparison.added.insert(&self.path),
            (_, None) if !is_leaf => self.comparison.removed.insert(&self.path),
            _ => (),
        }
    }

    /// Returns whether the value is a leaf here. Two empty lists or maps are.
    fn compare_shapes(
        &mut self,
        shape: Shape<'_>,
        before: Option<&Value>,
        after: Option<&Value>,
    ) -> bool {
        let is_leaf = match shape {
            Shape::Leaf => true,
            Shape::List { .. } => list(before).is_empty() && list(after).is_empty(),
            Shape::Map(_) => fields(before).is_none() && fields(after).is_none(),
        };
        match shape {
            _ if is_leaf => self.compare_leaf(before, after),
            Shape::List { list_type, items } => {
                self.compare_items(list_type, items, list(before), list(after))
            }
            Shape::Map(structure) => self.compare_fields(structure, fields(before), fields(after)),
            Shape::Leaf => (),
        }
        is_leaf
    }

    fn compare_leaf(&mut self, before: Option<&Value>, after: Option<&Value>) {
        match (before, after) {
            (None, _) => self.comparison.added.insert(&self.path),
            (_, None) => self.comparison.removed.insert(&self.path),
            (before, after) if before != after => self.comparison.modified.insert(&self.path),
            _ => (),
        }
    }

    fn compare_fields(
        &mut self,
        structure: Option<&Structure>,
        before: Option<&Map<String, Value>>,
        after: Option<&Map<String, Value>>,
    ) {
        let names = before.into_iter().chain(after).flat_map(Map::keys);
        for name in names.collect::<BTreeSet<_>>() {
            let [before, after] = [before, after].map(|fields| fields?.get(name));
            self.path.push(PathElement::Field(name.clone()));
            self.compare_values(field_type(structure, name), before, after);
            self.path.pop();
        }
    }

    fn compare_items(
        &mut self,
        list_type: &ListType,
        ty: &Type,
        before: &[Value],
        after: &[Value],
    ) {
        let mut items: BTreeMap<PathElement, [Vec<&Value>; 2]> = BTreeMap::new();
        for (side, values) in [before, after].into_iter().enumerate() {
            for value in values {
                if let Ok(element) = self.schema.path_element(list_type, ty, value) {
                    items.entry(element).or_default()[side].push(value);
                }
            }
        }
        for (element, [before, after]) in items {
            self.path.push(element);
            match (before.as_slice(), after.as_slice()) {
                (before @ ([] | [_]), after @ ([] | [_])) => {
                    self.compare_values(ty, before.first().copied(), after.first().copied());
                }
                (_, []) => self.comparison.removed.insert(&self.path),
                ([], _) => self.comparison.added.insert(&self.path),
                (before, after) if before != after => self.comparison.modified.insert(&self.path),
                _ => (),
            }
            self.path.pop();
        }
    }
}
