//! Merges a configuration into an object, and removes fields from an object.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::compare::{fields, list};
use super::schema::{ListType, Schema, Shape, Type, field_type};
use super::set::{FieldSet, PathElement};

impl Schema {
    /// Returns the live object with the values of the configuration.
    pub(super) fn merge(&self, live: &Value, configuration: &Value) -> Value {
        self.merge_values(&self.root, Some(live), Some(configuration))
            .unwrap_or(Value::Null)
    }

    fn merge_values(
        &self,
        ty: &Type,
        live: Option<&Value>,
        applied: Option<&Value>,
    ) -> Option<Value> {
        let shape = self.shape(ty, applied.or(live));
        let unmerged = || applied.or(live).cloned();
        match shape {
            Shape::Leaf => unmerged(),
            Shape::List { list_type, items } => match (list(live), list(applied)) {
                ([], []) => unmerged(),
                (live, applied) => Some(self.merge_lists(list_type, items, live, applied)),
            },
            Shape::Map(structure) => {
                let (live, applied) = (fields(live), fields(applied));
                if live.is_none() && applied.is_none() {
                    return unmerged();
                }
                let mut merged = Map::new();
                let names = live.into_iter().chain(applied).flat_map(Map::keys);
                for name in names.collect::<BTreeSet<_>>() {
                    let [live, applied] = [live, applied].map(|fields| fields?.get(name));
                    let value = self.merge_values(field_type(structure, name), live, applied);
                    merged.extend(value.map(|value| (name.clone(), value)));
                }
                Some(Value::Object(merged))
            }
        }
    }

    /// Merges two lists in the order of the configuration. An item of the live list only comes before the next item
    /// that both lists have in the same order.
    fn merge_lists(
        &self,
        list_type: &ListType,
        ty: &Type,
        live: &[Value],
        applied: &[Value],
    ) -> Value {
        let identify = |value| self.path_element(list_type, ty, value).ok();
        let live: Vec<_> = live.iter().map(|value| (identify(value), value)).collect();
        let applied: Vec<_> = applied
            .iter()
            .map(|value| (identify(value), value))
            .collect();
        let index = |list: &[(Option<PathElement>, _)]| -> BTreeMap<PathElement, usize> {
            let list = list.iter().enumerate().rev();
            list.filter_map(|(index, (element, _))| Some((element.clone()?, index)))
                .collect()
        };
        let (live_index, applied_index) = (index(&live), index(&applied));
        let in_both = |element: &Option<PathElement>| {
            let element = element.as_ref()?;
            Some((
                live_index.get(element).copied()?,
                applied_index.get(element).copied()?,
            ))
        };
        let mut merged = Vec::new();
        let mut rest = live.iter().enumerate().peekable();
        for (position, (element, value)) in applied.iter().enumerate() {
            let mut shared = applied
                .iter()
                .skip(position)
                .filter_map(|(element, _)| in_both(element));
            let next_shared = shared.next().map(|(live, _)| live);
            while let Some((index, (element, value))) = rest.peek() {
                match in_both(element) {
                    None => merged.push((*value).clone()),
                    Some(_) if Some(*index) == next_shared => break,
                    Some(_) => (),
                }
                rest.next();
            }
            let live_item = in_both(element).and_then(|(index, _)| live.get(index));
            merged.extend(self.merge_values(ty, live_item.map(|(_, value)| *value), Some(value)));
        }
        let rest = rest.filter(|(_, (element, _))| in_both(element).is_none());
        merged.extend(rest.map(|(_, (_, value))| (*value).clone()));
        Value::Array(merged)
    }

    /// Returns the object without these fields. A list or map that becomes empty is null.
    pub(super) fn remove(&self, object: &Value, set: &FieldSet) -> Value {
        self.remove_below(&self.root, object, set)
    }

    fn remove_below(&self, ty: &Type, value: &Value, set: &FieldSet) -> Value {
        let remaining =
            |element: &PathElement, ty: &Type, value: &Value| match set.children.get(element) {
                _ if set.members.contains(element) => None,
                Some(children) => Some(self.remove_below(ty, value, children)),
                None => Some(value.clone()),
            };
        match self.shape(ty, Some(value)) {
            Shape::Leaf if value.is_array() || value.is_object() => Value::Null,
            Shape::Leaf => value.clone(),
            Shape::List { list_type, items } => {
                let values = list(Some(value)).iter().filter_map(|value| {
                    match self.path_element(list_type, items, value) {
                        Ok(element) => remaining(&element, items, value),
                        Err(_) => Some(value.clone()),
                    }
                });
                let values: Vec<_> = values.collect();
                if values.is_empty() {
                    Value::Null
                } else {
                    Value::Array(values)
                }
            }
            Shape::Map(structure) => {
                let values =
                    fields(Some(value))
                        .into_iter()
                        .flatten()
                        .filter_map(|(name, value)| {
                            let ty = field_type(structure, name);
                            let value = remaining(&PathElement::Field(name.clone()), ty, value)?;
                            Some((name.clone(), value))
                        });
                let values: Map<_, _> = values.collect();
                if values.is_empty() {
                    Value::Null
                } else {
                    Value::Object(values)
                }
            }
        }
    }
}
