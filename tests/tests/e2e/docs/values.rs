//! The pages of the charts' values, from `values.yaml` and its comments.

use std::fs;

use krypton_tests::OwnChart;
use serde_json::Value;

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
    /// The comment above the key. Without one, a reference to the key that shares its comment.
    comment: String,
}

/// Returns all keys in the order of the file.
fn keys(text: &str) -> Vec<Key> {
    let mut keys: Vec<Key> = Vec::new();
    let mut parents: Vec<(usize, &str)> = Vec::new();
    let mut comment: Vec<&str> = Vec::new();
    let mut documented: Option<&str> = None;
    for line in text.lines() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        if let Some(text) = trimmed.strip_prefix('#') {
            comment.push(text.trim());
            continue;
        }
        let key = trimmed.split_once(':').map(|(key, _)| key);
        let key = key.filter(|key| !key.starts_with('-') && !key.contains('"'));
        if trimmed.is_empty() {
            documented = None;
        } else if let Some(key) = key {
            parents.retain(|(outer, _)| *outer < indent);
            parents.push((indent, key));
            let path: Vec<&str> = parents.iter().map(|(_, key)| *key).collect();
            let comment = match documented {
                Some(shared) if indent == 0 && comment.is_empty() => format!("See `{shared}`"),
                _ => comment.join(" "),
            };
            if indent == 0 && !comment.is_empty() && !comment.starts_with("See `") {
                documented = Some(key);
            }
            keys.push(Key {
                path: path.join("."),
                comment,
            });
        }
        comment.clear();
    }
    keys
}

fn value<'a>(values: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(values, |value, key| &value[key])
}

/// Returns a row for each value, and for each group that has a comment.
fn rows(text: &str) -> Vec<[String; 3]> {
    let values: Value = serde_saphyr::from_str(text).unwrap();
    let is_inside = |path: &str| {
        let contains = |whole: &str| {
            path.strip_prefix(whole)
                .is_some_and(|rest| rest.starts_with('.'))
        };
        WHOLE.into_iter().any(contains)
    };
    let keys = keys(text);
    let is_described = |path: &str| {
        keys.iter()
            .any(|key| key.path == path && !key.comment.is_empty())
    };
    let mut rows = Vec::new();
    for Key { path, comment } in keys.iter().filter(|key| !is_inside(&key.path)) {
        let value = value(&values, path);
        let is_group =
            value.as_object().is_some_and(|map| !map.is_empty()) && !WHOLE.contains(&path.as_str());
        if is_group && comment.is_empty() {
            continue;
        }
        let group = path.rsplit_once('.').map(|(group, _)| group);
        let has_meaning = !comment.is_empty() || group.is_some_and(is_described);
        assert!(has_meaning, "no comment above {path}");
        let default = match is_group {
            true => String::new(),
            false => code(&value.to_string()),
        };
        rows.push([code(path), default, sentence(comment)]);
    }
    rows
}

#[test]
fn docs_values_pages_are_current() -> Result<(), String> {
    for (chart, page) in [
        (OwnChart::Hub, "hub-values.md"),
        (OwnChart::Agent, "agent-values.md"),
    ] {
        let text = fs::read_to_string(chart.folder().join("values.yaml")).unwrap();
        let rows = rows(&text);
        assert!(rows.len() > 80, "{page}: {}", rows.len());
        check(page, &table(["Value", "Default", "Meaning"], &rows))?;
    }
    Ok(())
}

#[test]
fn comment_above_value_describes_it() {
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
";
    let cells = |row: [&str; 3]| row.map(str::to_owned);
    let expected = [
        cells(["`one`", "", "One and more."]),
        cells(["`one.two`", "`2`", "Two."]),
        cells(["`one.none`", "`{}`", ""]),
        cells(["`resources`", "`{\"limits\":{\"cpu\":1}}`", "Shared."]),
        cells(["`other`", "`[]`", "See `resources`."]),
    ];
    assert_eq!(rows(text), expected);
}
