//! Replaces the values of a transcript that differ between two runs by symbols that keep equality and order.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

/// Keys of times. Two servers don't share a clock, and clients compare only times that they wrote.
const TIME_KEYS: [&str; 5] = [
    "creationTimestamp",
    "deletionTimestamp",
    "lastTransitionTime",
    "lastUpdateTime",
    "time",
];

/// Keys that depend on the server's version or configuration and that no client of ours reads.
const OMITTED: [&str; 2] = [
    // A hash of the stored version in discovery, for storage migration.
    "storageVersionHash",
    // A deprecated field of lists and objects, absent from some versions.
    "selfLink",
];

/// Texts in messages before a resource version.
const VERSION_PREFIXES: [&str; 6] = [
    "ResourceVersion in the precondition (",
    "ResourceVersion in record (",
    "ResourceVersion in precondition: ",
    "ResourceVersion in object meta: ",
    "resourceVersion=",
    "resource version: ",
];

#[derive(Default)]
struct Symbols {
    /// Versions of objects, with their rank.
    object_versions: BTreeMap<u64, usize>,
    /// Versions of lists and bookmarks. Other writers of the same server raise them.
    list_versions: BTreeSet<u64>,
    /// UIDs, continue tokens and generated names, numbered in order of appearance.
    symbols: BTreeMap<String, String>,
    uid_count: usize,
    token_count: usize,
    name_count: usize,
    keeps_managed_fields: bool,
}

pub(super) fn transcript(steps: Vec<Value>, keeps_managed_fields: bool) -> Value {
    let mut symbols = Symbols {
        keeps_managed_fields,
        ..Symbols::default()
    };
    let steps = Value::Array(steps);
    symbols.collect(&steps);
    for (index, rank) in symbols.object_versions.values_mut().enumerate() {
        *rank = index + 1;
    }
    symbols.normalize("", &steps)
}

/// Whether this is the metadata of a list or of a bookmark.
fn is_list_metadata(metadata: &Map<String, Value>) -> bool {
    metadata.contains_key("resourceVersion")
        && !metadata.contains_key("uid")
        && !metadata.contains_key("name")
}

impl Symbols {
    fn collect(&mut self, value: &Value) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| self.collect(item)),
            Value::Object(fields) => {
                for key in ["metadata", "/metadata", "details"] {
                    if let Some(Value::Object(metadata)) = fields.get(key) {
                        self.collect_metadata(metadata);
                    }
                }
                let sorted: BTreeMap<_, _> = fields.iter().collect();
                // A request's body contains only values of earlier responses.
                let values = sorted.iter().filter(|(key, _)| **key != "body");
                values.for_each(|(_, value)| self.collect(value));
            }
            _ => {}
        }
    }

    fn collect_metadata(&mut self, metadata: &Map<String, Value>) {
        let text = |key: &str| metadata.get(key).and_then(Value::as_str);
        let uid = text("uid");
        if let Some(version) = text("resourceVersion").and_then(|text| text.parse().ok()) {
            if uid.is_some() {
                self.object_versions.insert(version, 0);
            } else {
                self.list_versions.insert(version);
            }
        }
        let mut add = |text: &str, prefix: &str, count: &mut usize| {
            if !self.symbols.contains_key(text) {
                *count += 1;
                self.symbols
                    .insert(text.to_owned(), format!("{prefix}{count}"));
            }
        };
        if let Some(uid) = uid {
            add(uid, "uid", &mut self.uid_count);
        }
        if let Some(token) = text("continue").filter(|token| !token.is_empty()) {
            add(token, "continue", &mut self.token_count);
        }
        if let (Some(prefix), Some(name)) = (text("generateName"), text("name"))
            && name.len() == prefix.len() + 5
        {
            add(name, &format!("{prefix}name"), &mut self.name_count);
        }
    }

    fn normalize(&self, key: &str, value: &Value) -> Value {
        match value {
            Value::Array(items) => {
                Value::Array(items.iter().map(|item| self.normalize(key, item)).collect())
            }
            Value::Object(fields) if key == "metadata" && is_list_metadata(fields) => {
                let parts = fields.iter().map(|(key, value)| {
                    let value = match value {
                        Value::String(text) if key == "resourceVersion" => {
                            Value::String(self.version_of_list(text))
                        }
                        value => self.normalize(key, value),
                    };
                    (key.clone(), value)
                });
                Value::Object(parts.collect())
            }
            Value::Object(fields) => {
                let recorded = fields.iter().filter(|(key, _)| {
                    let is_managers = *key == "managedFields" && !self.keeps_managed_fields;
                    !is_managers && !OMITTED.contains(&key.as_str())
                });
                // An owner's UID is part of a key in `managedFields`.
                let parts = recorded
                    .map(|(key, value)| (self.replace_symbols(key), self.normalize(key, value)));
                let mut object = parts.collect();
                sort_conflicts(&mut object);
                Value::Object(object)
            }
            Value::String(text) if TIME_KEYS.contains(&key) && text.ends_with('Z') => {
                Value::String("<time>".to_owned())
            }
            Value::String(text) if key == "resourceVersion" => Value::String(self.version(text)),
            Value::String(text) => Value::String(self.replace_symbols(text)),
            other => other.clone(),
        }
    }

    fn version(&self, text: &str) -> String {
        let version = text.parse::<u64>().ok();
        match version.and_then(|version| self.object_versions.get(&version)) {
            Some(rank) => format!("rv{rank}"),
            None => self.version_of_list(text),
        }
    }

    fn version_of_list(&self, text: &str) -> String {
        let rank = self.rank_at(text);
        rank.map_or_else(|| text.to_owned(), |rank| format!("after rv{rank}"))
    }

    /// Returns the number of known versions of objects up to a version that the server has sent.
    fn rank_at(&self, text: &str) -> Option<usize> {
        let version: u64 = text.parse().ok()?;
        let is_known =
            self.object_versions.contains_key(&version) || self.list_versions.contains(&version);
        is_known.then(|| self.object_versions.range(..=version).count())
    }

    fn replace_symbols(&self, text: &str) -> String {
        let mut text = text.to_owned();
        // A continue token contains names, so the longest texts come first.
        let mut longest_first: Vec<_> = self.symbols.iter().collect();
        longest_first.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        for (original, symbol) in longest_first {
            text = text.replace(original.as_str(), symbol);
        }
        for prefix in VERSION_PREFIXES {
            text = self.replace_versions_after(&text, prefix);
        }
        without_object(&current_version(&text))
    }

    fn replace_versions_after(&self, text: &str, prefix: &str) -> String {
        let mut parts = text.split(prefix);
        let mut result = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let rest = part.trim_start_matches(|digit: char| digit.is_ascii_digit());
            let number = part.strip_suffix(rest).unwrap_or(part);
            // In a quiet store, a list has the version of the last write, so its symbol must be the same here.
            let rank = self.rank_at(number).map(|rank| format!("rv{rank}"));
            let symbol = rank.unwrap_or_else(|| number.to_owned());
            result.push_str(prefix);
            result.push_str(&symbol);
            result.push_str(rest);
        }
        result
    }
}

/// Replaces the server's current version in `too old resource version: 1 (2345)`.
fn current_version(text: &str) -> String {
    let Some((start, rest)) = text.split_once("too old resource version: ") else {
        return text.to_owned();
    };
    let Some((requested, rest)) = rest.split_once(" (") else {
        return text.to_owned();
    };
    let rest = rest.trim_start_matches(|digit: char| digit.is_ascii_digit());
    format!("{start}too old resource version: {requested} (<current>{rest}")
}

/// Sorts the causes of a conflict by field. A real server reports them in random order.
fn sort_conflicts(status: &mut Map<String, Value>) {
    if status.get("reason").and_then(Value::as_str) != Some("Conflict") {
        return;
    }
    let causes = status
        .get_mut("details")
        .and_then(|details| details.get_mut("causes"));
    if let Some(Value::Array(causes)) = causes {
        causes.sort_by_key(|cause| cause.get("field").map(Value::to_string));
    }
}

/// Shortens a message that quotes a whole object, with its times and managed fields. No client reads it.
fn without_object(text: &str) -> String {
    let quoted = text
        .split_once("Invalid value: \"{")
        .and_then(|(start, rest)| {
            let (_, end) = rest.rsplit_once("}\"")?;
            Some(format!("{start}Invalid value: \"{{<object>}}\"{end}"))
        });
    quoted.unwrap_or_else(|| text.to_owned())
}
