//! The managers of an object: which fields each one owns.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::set::FieldSet;

/// Managers that update and do not apply, before the oldest are combined.
const MAX_UPDATERS: usize = 10;
const COMBINED_MANAGER: &str = "ancient-changes";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    Apply,
    Update,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Apply => "Apply",
            Self::Update => "Update",
        }
    }
}

/// Identity of a manager. The order is the order in messages about conflicts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ManagerId {
    pub(super) manager: String,
    pub(super) operation: Operation,
    /// Empty for `Apply`: a manager that applies has one entry for all versions.
    pub(super) api_version: String,
    pub(super) subresource: String,
}

impl ManagerId {
    /// The manager as messages show it.
    pub(super) fn describe(&self) -> String {
        let mut text = format!("{:?}", self.manager);
        if !self.subresource.is_empty() {
            text.push_str(&format!(" with subresource {:?}", self.subresource));
        }
        if self.operation == Operation::Update {
            text.push_str(&format!(" using {}", self.api_version));
        }
        text
    }
}

/// A set of fields. Most writes keep the stored JSON, which then needs no conversion.
#[derive(Clone, Debug)]
pub(super) enum Fields<'a> {
    Stored(&'a Value),
    Changed(FieldSet),
}

impl Fields<'_> {
    pub(super) fn set(&self) -> Cow<'_, FieldSet> {
        match self {
            Self::Stored(fields) => Cow::Owned(FieldSet::parse(fields).unwrap_or_default()),
            Self::Changed(set) => Cow::Borrowed(set),
        }
    }

    fn change(&mut self) -> &mut FieldSet {
        if let Self::Stored(_) = self {
            *self = Self::Changed(self.set().into_owned());
        }
        match self {
            Self::Changed(set) => set,
            Self::Stored(_) => unreachable!("the fields were converted"),
        }
    }

    pub(super) fn add(&mut self, set: FieldSet) {
        match self {
            Self::Stored(fields) if set.is_subset_of(fields) => {}
            _ => self.change().add(set),
        }
    }

    pub(super) fn remove(&mut self, set: &FieldSet) {
        match self {
            Self::Stored(fields) if !set.overlaps(fields) => {}
            _ => self.change().remove(set),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Stored(fields) => fields.as_object().is_none_or(Map::is_empty),
            Self::Changed(set) => set.is_empty(),
        }
    }

    fn to_json(&self) -> Value {
        match self {
            Self::Stored(fields) => (*fields).clone(),
            Self::Changed(set) => set.fields_v1(),
        }
    }

    fn equals(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Stored(one), Self::Stored(other)) => one == other,
            (one, other) => one.set() == other.set(),
        }
    }
}

/// The fields of one manager.
#[derive(Clone, Debug)]
pub(super) struct ManagerEntry<'a> {
    pub(super) fields: Fields<'a>,
    pub(super) api_version: String,
    pub(super) time: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Managers<'a>(pub(super) BTreeMap<ManagerId, ManagerEntry<'a>>);

/// Returns whether a request resets the managers, by a list of one empty entry. An empty list does so too if the
/// kind is built in.
fn is_reset(object: &Value, built_in: bool) -> bool {
    let entries = object.pointer("/metadata/managedFields");
    match entries.and_then(Value::as_array).map(Vec::as_slice) {
        Some([]) => built_in,
        Some([Value::Object(entry)]) => entry.is_empty(),
        _ => false,
    }
}

/// Returns a copy of an object without `managedFields`, which are often the largest part, and without these fields.
pub(super) fn without_managed_fields(object: &Value, left_out: &Map<String, Value>) -> Value {
    let Value::Object(fields) = object else {
        return object.clone();
    };
    let fields = fields
        .iter()
        .filter(|(name, _)| !left_out.contains_key(*name));
    let copies = fields.map(|(name, value)| {
        let value = match value {
            Value::Object(metadata) if name == "metadata" => {
                let others = metadata.iter().filter(|(name, _)| *name != "managedFields");
                let others = others.map(|(name, value)| (name.clone(), value.clone()));
                Value::Object(others.collect())
            }
            value => value.clone(),
        };
        (name.clone(), value)
    });
    Value::Object(copies.collect())
}

fn managed_fields(object: &Value) -> &[Value] {
    let entries = object.pointer("/metadata/managedFields");
    entries.and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

impl<'a> Managers<'a> {
    /// Reads the managers of a stored object. Without valid managers the result is empty.
    pub(super) fn read_from(object: &'a Value) -> Self {
        Self::parse(managed_fields(object), |fields| {
            Some(Fields::Stored(fields))
        })
        .unwrap_or_default()
    }

    /// Returns the managers for an update of the object that has these. A client can write them, except through a
    /// subresource. A client that sends none does not remove them.
    #[must_use]
    pub(super) fn or_sent(self, new: &Value, subresource: &str, built_in: bool) -> Self {
        if !subresource.is_empty() {
            return self;
        }
        if is_reset(new, built_in) {
            return Self::default();
        }
        let sent = Self::parse(managed_fields(new), |fields| {
            FieldSet::parse(fields).map(Fields::Changed)
        });
        match sent {
            Some(managers) if !managers.0.is_empty() => managers,
            _ => self,
        }
    }

    fn parse<'b>(
        entries: &'b [Value],
        read_fields: impl Fn(&'b Value) -> Option<Fields<'a>>,
    ) -> Option<Self> {
        let mut managers = BTreeMap::new();
        for entry in entries {
            let text = |name: &str| entry[name].as_str().unwrap_or_default();
            let operation = match text("operation") {
                "Apply" => Operation::Apply,
                "Update" => Operation::Update,
                _ => return None,
            };
            let api_version = text("apiVersion").to_owned();
            if api_version.is_empty() || text("fieldsType") != "FieldsV1" {
                return None;
            }
            let fields = match entry.get("fieldsV1") {
                Some(fields) => read_fields(fields)?,
                None => Fields::Changed(FieldSet::default()),
            };
            let time = entry["time"].as_str().map(str::to_owned);
            let id = ManagerId {
                manager: text("manager").to_owned(),
                operation,
                api_version: match operation {
                    Operation::Apply => String::new(),
                    Operation::Update => api_version.clone(),
                },
                subresource: text("subresource").to_owned(),
            };
            let entry = ManagerEntry {
                fields,
                api_version,
                time,
            };
            managers.insert(id, entry);
        }
        Some(Self(managers))
    }

    /// Replaces `managedFields` of an object.
    pub(super) fn write(&self, object: &mut Value) {
        let entries = self.entries();
        let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
            return;
        };
        match entries.is_empty() {
            true => metadata.remove("managedFields"),
            false => metadata.insert("managedFields".to_owned(), Value::Array(entries)),
        };
    }

    fn entries(&self) -> Vec<Value> {
        let mut entries: Vec<_> = self.0.iter().collect();
        entries.sort_by_key(|(id, entry)| (id.operation, &entry.time, *id));
        let entries = entries.into_iter().map(|(id, entry)| {
            let mut value = json!({
                "manager": id.manager,
                "operation": id.operation.name(),
                "apiVersion": entry.api_version,
                "fieldsType": "FieldsV1",
                "fieldsV1": entry.fields.to_json(),
            });
            if let Some(time) = &entry.time {
                value["time"] = time.as_str().into();
            }
            if !id.subresource.is_empty() {
                value["subresource"] = id.subresource.as_str().into();
            }
            value
        });
        entries.collect()
    }

    /// Returns whether the managers own the same fields, at any times.
    pub(super) fn has_same_fields(&self, other: &Self) -> bool {
        let mut entries = self.0.values().zip(other.0.values());
        self.0.keys().eq(other.0.keys())
            && entries.all(|(one, other)| {
                one.api_version == other.api_version && one.fields.equals(&other.fields)
            })
    }

    /// Removes the fields that another manager has written or removed.
    pub(super) fn lose(&mut self, written: &FieldSet, removed: &FieldSet) {
        for entry in self.0.values_mut() {
            entry.fields.remove(written);
            entry.fields.remove(removed);
        }
    }

    pub(super) fn remove_empty(&mut self) {
        self.0.retain(|_, entry| !entry.fields.is_empty());
    }

    /// Combines the oldest managers that update if there are too many.
    pub(super) fn limit_updaters(&mut self) {
        let updaters = self
            .0
            .iter()
            .filter(|(id, _)| id.operation == Operation::Update);
        let mut updaters: Vec<_> = updaters
            .map(|(id, entry)| (entry.time.clone(), id.clone()))
            .collect();
        updaters.sort();
        let mut count = updaters.len();
        let mut first_of_version: BTreeMap<String, ManagerId> = BTreeMap::new();
        for (time, id) in updaters {
            if count <= MAX_UPDATERS {
                return;
            }
            let Some(first) = first_of_version.get(&id.api_version) else {
                first_of_version.insert(id.api_version.clone(), id);
                continue;
            };
            let combined = ManagerId {
                manager: COMBINED_MANAGER.to_owned(),
                operation: Operation::Update,
                api_version: id.api_version.clone(),
                subresource: String::new(),
            };
            if !self.0.contains_key(&combined)
                && let Some(entry) = self.0.remove(first)
            {
                self.0.insert(combined.clone(), entry);
            }
            if id != combined
                && let Some(entry) = self.0.remove(&id)
                && let Some(combined_entry) = self.0.get_mut(&combined)
            {
                combined_entry.fields.add(entry.fields.set().into_owned());
                combined_entry.time = time;
            }
            count -= 1;
        }
    }
}
