//! The pages of the charts' values, from `values.yaml`, its comments, and the descriptions in `values.schema.json`.

use std::fs;

use krypton_tests::OwnChart;
use serde_json::{Value, json};

use super::generated::{check, code, sentence, table};

/// Maps that are one value for users: their keys belong to Kubernetes.
const WHOLE: [&str; 8] = [
    "resources",
    "podSecurityContext",
    "securityContext",
    "startupProbe",
    "livenessProbe",
    "readinessProbe",
    "dashboard.labels",
    "service.ports",
];

/// A key of `values.yaml`.
struct Key {
    path: String,
    /// The comment above the key, or an empty text.
    comment: String,
}

/// Returns all keys in the order of the file.
fn keys(text: &str) -> Vec<Key> {
    let mut keys: Vec<Key> = Vec::new();
    let mut parents: Vec<(usize, &str)> = Vec::new();
    let mut comment: Vec<&str> = Vec::new();
    for line in text.lines() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        if let Some(text) = trimmed.strip_prefix('#') {
            comment.push(text.trim());
            continue;
        }
        let key = trimmed.split_once(':').map(|(key, _)| key);
        let key = key.filter(|key| !key.starts_with('-') && !key.contains('"'));
        if let Some(key) = key {
            parents.retain(|(outer, _)| *outer < indent);
            parents.push((indent, key));
            let path: Vec<&str> = parents.iter().map(|(_, key)| *key).collect();
            keys.push(Key {
                path: path.join("."),
                comment: comment.join(" "),
            });
        }
        comment.clear();
    }
    keys
}

fn value<'a>(values: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(values, |value, key| &value[key])
}

/// Returns the description of a value in `values.schema.json`, or an empty text.
fn description<'a>(schema: &'a Value, path: &str) -> &'a str {
    let field = path
        .split('.')
        .fold(schema, |schema, key| &schema["properties"][key]);
    field["description"].as_str().unwrap_or_default()
}

/// Returns a row for each value, and for each group that has a comment. Without a comment, the description in the
/// schema is the meaning of a value.
fn rows(text: &str, schema: &Value) -> Vec<[String; 3]> {
    let values: Value = serde_saphyr::from_str(text).unwrap();
    let is_inside = |path: &str| {
        let contains = |whole: &str| {
            path.strip_prefix(whole)
                .is_some_and(|rest| rest.starts_with('.'))
        };
        WHOLE.into_iter().any(contains)
    };
    let mut rows = Vec::new();
    for Key { path, comment } in keys(text) {
        let value = value(&values, &path);
        let is_group =
            value.as_object().is_some_and(|map| !map.is_empty()) && !WHOLE.contains(&path.as_str());
        if is_inside(&path) || (is_group && comment.is_empty()) {
            continue;
        }
        let meaning = match comment.is_empty() {
            true => sentence(description(schema, &path)),
            false => sentence(&comment),
        };
        let default = match is_group {
            true => String::new(),
            false => code(&value.to_string()),
        };
        rows.push([code(&path), default, meaning]);
    }
    rows
}

/// Returns the rows of a chart's page.
fn chart_rows(chart: OwnChart) -> Vec<[String; 3]> {
    let read = |file: &str| fs::read_to_string(chart.folder().join(file)).unwrap();
    let schema: Value = serde_json::from_str(&read("values.schema.json")).unwrap();
    rows(&read("values.yaml"), &schema)
}

#[test]
fn docs_values_pages_are_current() -> Result<(), String> {
    for (chart, page) in [
        (OwnChart::Hub, "hub-values.md"),
        (OwnChart::Agent, "agent-values.md"),
    ] {
        let rows = chart_rows(chart);
        assert!(rows.len() > 80, "{page}: {}", rows.len());
        check(page, &table(["Value", "Default", "Meaning"], &rows))?;
    }
    Ok(())
}

#[test]
fn every_chart_value_has_a_meaning() {
    for chart in OwnChart::ALL {
        let rows = chart_rows(chart);
        let unexplained: Vec<&str> = rows
            .iter()
            .filter(|[_, _, meaning]| meaning.is_empty())
            .map(|[path, _, _]| path.as_str())
            .collect();
        assert!(unexplained.is_empty(), "{}: {unexplained:?}", chart.name());
    }
}

#[test]
fn meaning_is_comment_or_else_description() {
    let text = "\
# File.

# One
# and more
one:
  # Two
  two: 2
  none: {}
# Shared
resources:
  limits: {cpu: 1}
other: []
last: 0
";
    let schema = json!({"properties": {
        "one": {"properties": {
            "two": {"description": "Second."},
            "none": {"description": "Nothing."},
        }},
        "other": {"description": "Others"},
    }});
    let cells = |row: [&str; 3]| row.map(str::to_owned);
    let expected = [
        cells(["`one`", "", "One and more."]),
        cells(["`one.two`", "`2`", "Two."]),
        cells(["`one.none`", "`{}`", "Nothing."]),
        cells(["`resources`", "`{\"limits\":{\"cpu\":1}}`", "Shared."]),
        cells(["`other`", "`[]`", "Others."]),
        cells(["`last`", "`0`", ""]),
    ];
    assert_eq!(rows(text, &schema), expected);
}
