//! Merges a configuration into an object, and removes fields from an object.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::compare::{fields, list};
use super::schema::{Relation, Schema, Shape, Type, field_type};
use super::set::{Element, FieldSet};

impl Schema {
    /// Returns the live object with the values of the configuration.
    pub(super) fn merge(&self, live: &Value, configuration: &Value) -> Value {
        self.merge_values(&self.root, Some(live), Some(configuration))
            .unwrap_or(Value::Null)
    }

    fn merge_values(
        &self,
        of: &Type,
        live: Option<&Value>,
        wanted: Option<&Value>,
    ) -> Option<Value> {
        let shape = self.shape(of, wanted.or(live));
        let latest = || wanted.or(live).cloned();
        match shape {
            Shape::Leaf => latest(),
            Shape::List { relation, items } => match (list(live), list(wanted)) {
                ([], []) => latest(),
                (live, wanted) => Some(self.merge_lists(relation, items, live, wanted)),
            },
            Shape::Map(structure) => {
                let (live, wanted) = (fields(live), fields(wanted));
                if live.is_none() && wanted.is_none() {
                    return latest();
                }
                let mut merged = Map::new();
                let names = live.into_iter().chain(wanted).flat_map(Map::keys);
                for name in names {
                    let get = |fields: Option<&'_ Map<String, Value>>| {
                        fields.and_then(|fields| fields.get(name)).cloned()
                    };
                    let of = field_type(structure, name);
                    let value = self.merge_values(of, get(live).as_ref(), get(wanted).as_ref());
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
        relation: &Relation,
        of: &Type,
        live: &[Value],
        wanted: &[Value],
    ) -> Value {
        let identify = |value| self.element(relation, of, value).ok();
        let live: Vec<_> = live.iter().map(|value| (identify(value), value)).collect();
        let wanted: Vec<_> = wanted
            .iter()
            .map(|value| (identify(value), value))
            .collect();
        let index = |list: &[(Option<Element>, _)]| -> BTreeMap<Element, usize> {
            let list = list.iter().enumerate().rev();
            list.filter_map(|(index, (element, _))| Some((element.clone()?, index)))
                .collect()
        };
        let (live_index, wanted_index) = (index(&live), index(&wanted));
        let in_both = |element: &Option<Element>| {
            let element = element.as_ref()?;
            Some((
                live_index.get(element).copied()?,
                wanted_index.get(element).copied()?,
            ))
        };
        let mut merged = Vec::new();
        let mut rest = live.iter().enumerate().peekable();
        for (position, (element, value)) in wanted.iter().enumerate() {
            let mut shared = wanted
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
            let own = in_both(element).and_then(|(index, _)| live.get(index));
            merged.extend(self.merge_values(of, own.map(|(_, value)| *value), Some(value)));
        }
        let rest = rest.filter(|(_, (element, _))| in_both(element).is_none());
        merged.extend(rest.map(|(_, (_, value))| (*value).clone()));
        Value::Array(merged)
    }

    /// Returns the object without these fields. A list or map that becomes empty is null.
    pub(super) fn remove(&self, object: &Value, set: &FieldSet) -> Value {
        self.remove_below(&self.root, object, set)
    }

    fn remove_below(&self, of: &Type, value: &Value, set: &FieldSet) -> Value {
        let left = |element: &Element, of: &Type, value: &Value| match set.below.get(element) {
            _ if set.members.contains(element) => None,
            Some(below) => Some(self.remove_below(of, value, below)),
            None => Some(value.clone()),
        };
        match self.shape(of, Some(value)) {
            Shape::Leaf if value.is_array() || value.is_object() => Value::Null,
            Shape::Leaf => value.clone(),
            Shape::List { relation, items } => {
                let values = list(Some(value)).iter().filter_map(|value| {
                    match self.element(relation, items, value) {
                        Ok(element) => left(&element, items, value),
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
                            let of = field_type(structure, name);
                            let value = left(&Element::Field(name.clone()), of, value)?;
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
