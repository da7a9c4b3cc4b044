//! The types of the fields of a kind: which lists are associative, and which structures are atomic.
//!
//! `builtin.json` holds the types of the built-in kinds, from the OpenAPI document of Kubernetes 1.36. A type is an
//! object of fields. `=` among them marks an atomic structure. The notation of a field:
//!
//! - `.` scalar, with its default after it, `?` any value;
//! - `Name` structure, `!Name` structure that is always present, `=Name` structure that is atomic in this field;
//! - `[]T` atomic list, `[=]T` set, `[name]T` list with this key, `+` before it if the list is never omitted;
//! - `{}T` map, `{=}T` atomic map.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::set::{FieldSet, PathElement, Scalar};
use crate::meta;

#[derive(Clone, Debug)]
pub(super) enum Type {
    Scalar {
        default: Option<Value>,
    },
    Untyped,
    List {
        list_type: ListType,
        items: Box<Type>,
        required: bool,
    },
    Structure(Structure),
    Named {
        name: String,
        atomic: bool,
        always_present: bool,
    },
}

static UNTYPED: Type = Type::Untyped;

#[derive(Clone, Debug, Default)]
pub(super) struct Structure {
    fields: BTreeMap<String, Type>,
    /// Type of the fields without a declaration.
    additional: Option<Box<Type>>,
    atomic: bool,
    /// Names of the fields that the decoder may add.
    completed: Vec<String>,
}

/// How the items of a list relate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ListType {
    Atomic,
    Set,
    Map(Vec<String>),
}

/// A type as the algorithms treat it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape<'a> {
    /// A scalar, or a list or structure with one owner.
    Leaf,
    List {
        list_type: &'a ListType,
        items: &'a Type,
    },
    /// Without a structure, any fields of any type.
    Map(Option<&'a Structure>),
}

impl Shape<'_> {
    pub(super) fn has_same_form(self, other: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

pub(super) fn field_type<'a>(structure: Option<&'a Structure>, name: &str) -> &'a Type {
    let Some(structure) = structure else {
        return &UNTYPED;
    };
    let declared = structure.fields.get(name);
    declared
        .or(structure.additional.as_deref())
        .unwrap_or(&UNTYPED)
}

pub(super) fn declares(structure: Option<&Structure>, name: &str) -> bool {
    structure.is_some_and(|structure| structure.fields.contains_key(name))
}

/// Returns whether a structure has a type for the field.
pub(super) fn accepts(structure: Option<&Structure>, name: &str) -> bool {
    declares(structure, name) || structure.is_none_or(|structure| structure.additional.is_some())
}

type Types = BTreeMap<String, Structure>;

#[derive(Debug)]
struct BuiltIn {
    kinds: BTreeMap<String, String>,
    types: Arc<Types>,
}

static BUILT_IN: LazyLock<BuiltIn> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct File {
        kinds: BTreeMap<String, String>,
        types: BTreeMap<String, BTreeMap<String, String>>,
    }
    let file: File = serde_json::from_str(include_str!("builtin.json")).expect("the file is JSON");
    let structure = |mut fields: BTreeMap<String, String>| Structure {
        atomic: fields.remove("=").is_some(),
        completed: fields
            .iter()
            .filter(|(_, text)| text.starts_with(['!', '+']))
            .map(|(name, _)| name.clone())
            .collect(),
        fields: fields
            .into_iter()
            .map(|(name, text)| (name, parse_type(&text)))
            .collect(),
        additional: None,
    };
    let types = file
        .types
        .into_iter()
        .map(|(name, fields)| (name, structure(fields)));
    BuiltIn {
        kinds: file.kinds,
        types: Arc::new(types.collect()),
    }
});

fn parse_type(text: &str) -> Type {
    if let Some(list) = text.strip_prefix('+') {
        return match parse_type(list) {
            Type::List {
                list_type, items, ..
            } => Type::List {
                list_type,
                items,
                required: true,
            },
            other => other,
        };
    }
    if let Some((keys, items)) = text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        let list_type = match keys {
            "" => ListType::Atomic,
            "=" => ListType::Set,
            keys => ListType::Map(keys.split(',').map(str::to_owned).collect()),
        };
        return Type::List {
            list_type,
            items: Box::new(parse_type(items)),
            required: false,
        };
    }
    if let Some((atomic, values)) = text.strip_prefix('{').and_then(|text| text.split_once('}')) {
        let additional = Some(Box::new(parse_type(values)));
        return Type::Structure(Structure {
            additional,
            atomic: atomic == "=",
            ..Structure::default()
        });
    }
    if let Some(default) = text.strip_prefix('.') {
        return Type::Scalar {
            default: serde_json::from_str(default).ok(),
        };
    }
    if text == "?" {
        return Type::Untyped;
    }
    let name = text.trim_start_matches(['!', '=']).to_owned();
    Type::Named {
        name,
        atomic: text.starts_with('='),
        always_present: text.starts_with('!'),
    }
}

/// The types of all fields of one kind.
#[derive(Clone, Debug)]
pub(crate) struct Schema {
    types: Arc<Types>,
    pub(super) root: Type,
    pub(super) built_in: bool,
    has_status: bool,
}

impl Schema {
    /// Returns the schema of a built-in kind, such as `apps/v1` and `Deployment`, or `None` for an unknown kind.
    pub(crate) fn built_in(api_version: &str, kind: &str) -> Option<Self> {
        let name = BUILT_IN.kinds.get(&format!("{api_version} {kind}"))?;
        let types = Arc::clone(&BUILT_IN.types);
        let has_status = types.get(name)?.fields.contains_key("status");
        let root = Type::Named {
            name: name.clone(),
            atomic: false,
            always_present: true,
        };
        Some(Self {
            types,
            root,
            built_in: true,
            has_status,
        })
    }

    /// Returns the schema of a custom resource from `openAPIV3Schema` of its version. `has_status` is whether that
    /// version has the subresource `status`.
    pub(crate) fn custom(open_api: &Value, has_status: bool) -> Self {
        let types = Arc::clone(&BUILT_IN.types);
        let mut root = custom_structure(open_api, false);
        add_object_fields(&mut root);
        Self {
            types,
            root: Type::Structure(root),
            built_in: false,
            has_status,
        }
    }

    /// Gives an object the form that the decoder of a real server gives it. Removes null, empty lists and empty maps.
    /// Adds the structures that are always present, such as `resources` of a container. Moves `stringData` of a
    /// Secret to `data`. Changes only `metadata` of a custom resource. [`apply`](super::apply()) and
    /// [`track_update`](super::track_update) call it.
    pub(crate) fn complete(&self, object: &mut Value) {
        if !self.built_in {
            if let Some(metadata) = object.get_mut("metadata") {
                self.complete_value(
                    field_type(self.structure(&self.root), "metadata"),
                    metadata,
                    false,
                );
            }
            return;
        }
        self.complete_value(&self.root, object, false);
        if matches!(&self.root, Type::Named { name, .. } if name == "Secret") {
            encode_strings(object);
        }
    }

    /// Returns an object without content, which is the live object of a creation.
    pub(super) fn empty(&self) -> Value {
        let mut object = Value::Object(Map::new());
        if self.built_in {
            self.complete_value(&self.root, &mut object, true);
        }
        object
    }

    /// Returns the fields that a request to this endpoint does not write.
    pub(super) fn ignored_fields(&self, subresource: &str) -> FieldSet {
        match subresource {
            "status" if self.built_in => FieldSet::from_paths(&[&["spec"]]),
            "status" => {
                FieldSet::from_paths(&[&["apiVersion"], &["kind"], &["metadata"], &["spec"]])
            }
            _ if self.has_status => FieldSet::from_paths(&[&["status"]]),
            _ => FieldSet::default(),
        }
    }

    pub(super) fn shape<'a>(&'a self, ty: &'a Type, value: Option<&Value>) -> Shape<'a> {
        match ty {
            Type::Scalar { .. } => Shape::Leaf,
            Type::Untyped => match value {
                None | Some(Value::Null | Value::Object(_)) => Shape::Map(None),
                Some(_) => Shape::Leaf,
            },
            Type::List {
                list_type: ListType::Atomic,
                ..
            } => Shape::Leaf,
            Type::List {
                list_type, items, ..
            } => Shape::List { list_type, items },
            Type::Named { atomic: true, .. } => Shape::Leaf,
            Type::Structure(_) | Type::Named { .. } => match self.structure(ty) {
                Some(structure) if structure.atomic => Shape::Leaf,
                structure => Shape::Map(structure),
            },
        }
    }

    /// Returns the fields of a structure or map, also of an atomic one.
    pub(super) fn structure<'a>(&'a self, ty: &'a Type) -> Option<&'a Structure> {
        match ty {
            Type::Structure(structure) => Some(structure),
            Type::Named { name, .. } => self.types.get(name),
            _ => None,
        }
    }

    /// Identifies an item of a set or associative list.
    pub(super) fn path_element(
        &self,
        list_type: &ListType,
        items: &Type,
        item: &Value,
    ) -> Result<PathElement, String> {
        let ListType::Map(keys) = list_type else {
            return Ok(PathElement::Value(Scalar::new(item)));
        };
        if !item.is_object() {
            return Err("associative list with keys may not have non-map elements".to_owned());
        }
        let structure = self.structure(items);
        let default = |key: &str| match field_type(structure, key) {
            Type::Scalar { default } => default.as_ref(),
            _ => None,
        };
        let value = |key: &String| Some((key.clone(), item.get(key).or_else(|| default(key))?));
        let key_values = keys.iter().filter_map(value);
        let mut key_values: Vec<_> = key_values
            .map(|(key, value)| (key, Scalar::new(value)))
            .collect();
        key_values.sort();
        if key_values.is_empty() {
            let keys = keys
                .iter()
                .map(|key| format!("{key:?}"))
                .collect::<Vec<_>>();
            return Err(format!(
                "associative list with keys has an element that omits all key fields [{}] (and doesn't have default values for any key fields)",
                keys.join(" ")
            ));
        }
        Ok(PathElement::Key(key_values))
    }

    fn complete_value(&self, ty: &Type, value: &mut Value, empty: bool) {
        match (ty, value) {
            (Type::List { items, .. }, Value::Array(values)) => {
                for value in values {
                    self.complete_value(items, value, empty);
                }
            }
            (ty, Value::Object(fields)) => {
                if let Some(structure) = self.structure(ty) {
                    self.complete_fields(structure, fields, empty);
                }
            }
            _ => (),
        }
    }

    fn complete_fields(&self, structure: &Structure, fields: &mut Map<String, Value>, empty: bool) {
        fields.retain(|name, value| {
            if !matches!(value, Value::Null | Value::Array(_) | Value::Object(_)) {
                return true;
            }
            let ty = field_type(Some(structure), name);
            let plain_map = matches!(ty, Type::Structure(_));
            self.complete_value(ty, value, empty);
            match value {
                Value::Null if structure.fields.is_empty() => {
                    // A map of strings decodes null as an empty string.
                    *value = Value::String(String::new());
                    true
                }
                Value::Null => false,
                Value::Array(values) => {
                    let required = matches!(ty, Type::List { required: true, .. } | Type::Untyped);
                    required || !values.is_empty()
                }
                Value::Object(values) => !plain_map || !values.is_empty(),
                _ => true,
            }
        });
        for name in &structure.completed {
            let ty = field_type(Some(structure), name);
            let missing = match ty {
                Type::Named {
                    always_present: true,
                    ..
                } => Value::Object(Map::new()),
                Type::List { required: true, .. } if empty => Value::Null,
                _ => continue,
            };
            if !fields.contains_key(name) {
                let mut missing = missing;
                self.complete_value(ty, &mut missing, empty);
                fields.insert(name.clone(), missing);
            }
        }
    }
}

/// Moves `stringData` of a Secret to `data`.
fn encode_strings(secret: &mut Value) {
    let Some(fields) = secret.as_object_mut() else {
        return;
    };
    let Some(Value::Object(strings)) = fields.remove("stringData") else {
        return;
    };
    let data = fields
        .entry("data")
        .or_insert_with(|| Value::Object(Map::new()));
    let Some(data) = data.as_object_mut() else {
        return;
    };
    for (name, text) in strings {
        let text = STANDARD.encode(text.as_str().unwrap_or_default());
        data.insert(name, text.into());
    }
}

/// Adds the fields that each object has to the fields that a CRD declares.
fn add_object_fields(structure: &mut Structure) {
    for name in ["apiVersion", "kind"] {
        structure
            .fields
            .insert(name.to_owned(), Type::Scalar { default: None });
    }
    structure
        .fields
        .insert("metadata".to_owned(), parse_type("ObjectMeta"));
}

const PRESERVE_UNKNOWN_FIELDS: &str = "x-kubernetes-preserve-unknown-fields";

fn custom_type(open_api: &Value, preserve: bool) -> Type {
    let scalar = || Type::Scalar {
        default: open_api.get("default").cloned(),
    };
    if open_api["x-kubernetes-int-or-string"] == true {
        return scalar();
    }
    let preserve = preserve || open_api[PRESERVE_UNKNOWN_FIELDS] == true;
    match open_api["type"].as_str() {
        Some("array") => custom_list(open_api, preserve),
        Some("object") => {
            let mut structure = custom_structure(open_api, preserve);
            if open_api["x-kubernetes-embedded-resource"] == true {
                add_object_fields(&mut structure);
            }
            Type::Structure(structure)
        }
        None => Type::Untyped,
        Some(_) => scalar(),
    }
}

fn custom_list(open_api: &Value, preserve: bool) -> Type {
    let list_type = match open_api["x-kubernetes-list-type"].as_str() {
        Some("set") => ListType::Set,
        Some("map") => {
            let keys = meta::strings(&open_api["x-kubernetes-list-map-keys"]);
            ListType::Map(keys.map(str::to_owned).collect())
        }
        _ => ListType::Atomic,
    };
    let items = open_api
        .get("items")
        .map_or(Type::Untyped, |items| custom_type(items, preserve));
    Type::List {
        list_type,
        items: Box::new(items),
        required: false,
    }
}

fn custom_structure(open_api: &Value, preserve: bool) -> Structure {
    let properties = open_api["properties"].as_object().into_iter().flatten();
    let preserve = preserve || open_api[PRESERVE_UNKNOWN_FIELDS] == true;
    let fields: BTreeMap<_, _> = properties
        .map(|(name, value)| (name.clone(), custom_type(value, preserve)))
        .collect();
    let additional = match open_api.get("additionalProperties") {
        Some(values @ Value::Object(_)) => Some(custom_type(values, preserve)),
        Some(Value::Bool(true)) => Some(Type::Untyped),
        Some(_) => None,
        None => (preserve || fields.is_empty()).then_some(Type::Untyped),
    };
    Structure {
        fields,
        additional: additional.map(Box::new),
        atomic: open_api["x-kubernetes-map-type"] == "atomic",
        completed: Vec::new(),
    }
}
