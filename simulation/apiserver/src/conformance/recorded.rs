//! Reads, compares and writes the recorded transcripts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Case, TOPICS};

/// Transcripts of one topic, by the name of the case.
pub type Topic = BTreeMap<String, Value>;

/// A value that fits on a line of this width is written on one.
const WIDTH: usize = 110;

fn file_path(topic: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("recorded");
    folder.join(format!("{topic}.json"))
}

/// Reads all transcripts, by topic. A topic without a file has none.
pub fn read() -> Result<BTreeMap<String, Topic>, String> {
    let topics = TOPICS.iter().map(|(topic, _)| {
        let path = file_path(topic);
        let transcripts = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| format!("{} is invalid: {error}", path.display()))?,
            Err(_) => Topic::new(),
        };
        Ok(((*topic).to_owned(), transcripts))
    });
    topics.collect()
}

/// Writes the transcripts of one topic.
pub fn write(topic: &str, transcripts: &Topic) -> Result<(), String> {
    let mut text = "{\n".to_owned();
    for (index, (name, transcript)) in transcripts.iter().enumerate() {
        let comma = if index == 0 { "" } else { ",\n" };
        text.push_str(comma);
        text.push_str(&format!("\"{name}\": "));
        render(transcript, 0, 0, &mut text);
    }
    text.push_str("\n}\n");
    let path = file_path(topic);
    fs::write(&path, text).map_err(|error| format!("failed to write {}: {error}", path.display()))
}

/// Writes JSON with sorted keys. Short values stay on one line.
fn render(value: &Value, indent: usize, used: usize, text: &mut String) {
    let short = compact(value);
    if indent > 0 && used + indent + short.len() <= WIDTH {
        text.push_str(&short);
        return;
    }
    let inner = indent + 2;
    match value {
        Value::Array(items) if !items.is_empty() => {
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                start_line(index, inner, text);
                render(item, inner, 0, text);
            }
            end_container(indent, ']', text);
        }
        Value::Object(fields) if !fields.is_empty() => {
            text.push('{');
            let sorted: BTreeMap<_, _> = fields.iter().collect();
            for (index, (key, value)) in sorted.into_iter().enumerate() {
                start_line(index, inner, text);
                text.push_str(&format!("{}: ", Value::from(key.as_str())));
                render(value, inner, key.len() + 4, text);
            }
            end_container(indent, '}', text);
        }
        _ => text.push_str(&short),
    }
}

fn start_line(index: usize, indent: usize, text: &mut String) {
    text.push_str(if index == 0 { "\n" } else { ",\n" });
    text.push_str(&" ".repeat(indent));
}

fn end_container(indent: usize, bracket: char, text: &mut String) {
    text.push('\n');
    text.push_str(&" ".repeat(indent));
    text.push(bracket);
}

/// JSON on one line, with sorted keys and a space after each colon and comma.
fn compact(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(compact).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(fields) => {
            let sorted: BTreeMap<_, _> = fields.iter().collect();
            let fields = sorted
                .into_iter()
                .map(|(key, value)| format!("{}: {}", Value::from(key.as_str()), compact(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// Returns the first differing steps of a case, with the JSON pointer of each difference, or `None` if none differs.
pub fn difference(
    case: &Case,
    recorded: &BTreeMap<String, Topic>,
    transcript: &Value,
) -> Option<String> {
    let topic = recorded.get(case.topic);
    let Some(steps) = topic.and_then(|topic| topic.get(case.name)) else {
        return Some(format!("{case:?}: there is no recording"));
    };
    let mut differences = Vec::new();
    let (expected, actual) = (sorted(steps), sorted(transcript));
    compare("", Some(&expected), Some(&actual), &mut differences);
    if differences.is_empty() {
        return None;
    }
    let mut text = format!("{case:?}:");
    for (pointer, expected, actual) in differences.iter().take(6) {
        let step = pointer.split('/').nth(1).unwrap_or_default();
        let request = steps
            .pointer(&format!("/{step}/request"))
            .map(compact)
            .unwrap_or_default();
        text.push_str(&format!(
            "\n  {pointer} {request}\n    recorded {expected}\n    found    {actual}"
        ));
    }
    if differences.len() > 6 {
        text.push_str(&format!(
            "\n  and {} other differences",
            differences.len() - 6
        ));
    }
    Some(text)
}

/// Sorts lists whose order means nothing: the server's depends on the second of a write, or on Go's maps.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(sorted).collect(),
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| {
                let mut value = sorted(value);
                if matches!(name.as_str(), "managedFields" | "causes")
                    && let Value::Array(items) = &mut value
                {
                    items.sort_by_key(Value::to_string);
                }
                (name.clone(), value)
            };
            fields.iter().map(field).collect()
        }
        other => other.clone(),
    }
}

fn compare(
    pointer: &str,
    expected: Option<&Value>,
    actual: Option<&Value>,
    differences: &mut Vec<(String, String, String)>,
) {
    match (expected, actual) {
        (Some(Value::Object(expected)), Some(Value::Object(actual))) => {
            let keys: BTreeSet<_> = expected.keys().chain(actual.keys()).collect();
            for key in keys {
                let pointer = format!("{pointer}/{key}");
                compare(&pointer, expected.get(key), actual.get(key), differences);
            }
        }
        (Some(Value::Array(expected)), Some(Value::Array(actual))) => {
            for index in 0..expected.len().max(actual.len()) {
                let pointer = format!("{pointer}/{index}");
                let (expected, actual) = (expected.get(index), actual.get(index));
                compare(&pointer, expected, actual, differences);
            }
        }
        _ if expected != actual => {
            let text = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), compact);
            differences.push((pointer.to_owned(), text(expected), text(actual)));
        }
        _ => {}
    }
}
