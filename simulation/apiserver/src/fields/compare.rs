//! The fields in which two objects differ.

use std::collections::BTreeMap;

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
    /// Adds a field and the fields below it that differ. A leaf has none.
    fn add(
        &mut self,
        element: PathElement,
        [before, after]: [Option<&Value>; 2],
        (is_leaf, below): (bool, Self),
    ) {
        let changed = match (before, after) {
            (None, _) => Some(&mut self.added),
            (_, None) => Some(&mut self.removed),
            _ => is_leaf.then_some(&mut self.modified),
        };
        if let Some(changed) = changed {
            changed.members.insert(element.clone());
        }
        for (set, below) in [
            (&mut self.added, below.added),
            (&mut self.modified, below.modified),
            (&mut self.removed, below.removed),
        ] {
            if !below.is_empty() {
                set.children.insert(element.clone(), below);
            }
        }
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

impl Schema {
    pub(super) fn compare(&self, before: &Value, after: &Value) -> Comparison {
        self.compare_values(&self.root, Some(before), Some(after)).1
    }

    /// Returns the added and modified fields, and the removed ones. Leaves out the ignored fields and all below them.
    pub(super) fn written_and_removed(
        &self,
        before: &Value,
        after: &Value,
        ignored: &FieldSet,
    ) -> (FieldSet, FieldSet) {
        let comparison = self.compare(before, after);
        let (mut written, mut removed) = (comparison.added, comparison.removed);
        written.add(comparison.modified);
        written.remove_with_fields(ignored);
        removed.remove_with_fields(ignored);
        (written, removed)
    }

    /// Returns whether a field is a leaf that differs, and the fields below it that do.
    fn compare_values(
        &self,
        ty: &Type,
        before: Option<&Value>,
        after: Option<&Value>,
    ) -> (bool, Comparison) {
        let mut comparison = Comparison::default();
        // A write changes a small part of an object.
        if before == after {
            return (false, comparison);
        }
        let mut compare = |shape| self.compare_shapes(shape, before, after, &mut comparison);
        let shapes = (self.shape(ty, before), self.shape(ty, after));
        let is_leaf = match (before, after) {
            (_, None) => compare(shapes.0),
            (Some(_), _) if !shapes.0.has_same_form(shapes.1) => {
                compare(shapes.0) | compare(shapes.1)
            }
            _ => compare(shapes.1),
        };
        (is_leaf, comparison)
    }

    /// Returns whether the value is a leaf here. Two empty lists or maps are.
    fn compare_shapes(
        &self,
        shape: Shape<'_>,
        before: Option<&Value>,
        after: Option<&Value>,
        comparison: &mut Comparison,
    ) -> bool {
        match shape {
            Shape::Leaf => true,
            Shape::List { list_type, items } => {
                let (before, after) = (list(before), list(after));
                self.compare_items(list_type, items, before, after, comparison);
                before.is_empty() && after.is_empty()
            }
            Shape::Map(structure) => {
                let (before, after) = (fields(before), fields(after));
                self.compare_fields(structure, before, after, comparison);
                before.is_none() && after.is_none()
            }
        }
    }

    fn compare_fields(
        &self,
        structure: Option<&Structure>,
        before: Option<&Map<String, Value>>,
        after: Option<&Map<String, Value>>,
        comparison: &mut Comparison,
    ) {
        let is_new = |name: &&String| before.is_none_or(|before| !before.contains_key(*name));
        let new_names = after.into_iter().flat_map(Map::keys).filter(is_new);
        for name in before.into_iter().flat_map(Map::keys).chain(new_names) {
            let sides = [before, after].map(|fields| fields?.get(name));
            if sides[0] != sides[1] {
                let below = self.compare_values(field_type(structure, name), sides[0], sides[1]);
                comparison.add(PathElement::Field(name.clone()), sides, below);
            }
        }
    }

    fn compare_items(
        &self,
        list_type: &ListType,
        ty: &Type,
        before: &[Value],
        after: &[Value],
        comparison: &mut Comparison,
    ) {
        let mut items: BTreeMap<PathElement, [Vec<&Value>; 2]> = BTreeMap::new();
        for (side, values) in [before, after].into_iter().enumerate() {
            for value in values {
                if let Ok(element) = self.path_element(list_type, ty, value) {
                    items.entry(element).or_default()[side].push(value);
                }
            }
        }
        for (element, [before, after]) in items {
            if before == after {
                continue;
            }
            let sides = [before.first().copied(), after.first().copied()];
            let below = match before.len().max(after.len()) {
                1 => self.compare_values(ty, sides[0], sides[1]),
                _ => (true, Comparison::default()),
            };
            comparison.add(element, sides, below);
        }
    }
}
