//! The file of chart values. The hub validates the complete file and follows its changes.

use std::path::Path;

use krypton_runtime::admin::Readiness;
use krypton_runtime::periodic::file::{FileError, POLL_INTERVAL, SettingsFile, follow_file};
use serde_json::{Map, Value};
use serde_saphyr::UserMessageFormatter;
use tokio::sync::watch;

/// Why a values file is unusable. Never contains the file's content, which may be secret.
#[derive(Debug, thiserror::Error)]
pub enum ValuesFileError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("the values file {path}: {problem}")]
    Content { path: String, problem: NotValues },
}

fn settings_file(path: &Path) -> SettingsFile {
    SettingsFile {
        name: "values file",
        flag: "--chart-values-file",
        path: path.to_owned(),
    }
}

/// Loads the values from the file at `path`. An empty file, or one with comments only, has none.
///
/// # Errors
///
/// If the file can't be read in time, or its content is not a mapping.
pub async fn load(path: &Path) -> Result<Map<String, Value>, ValuesFileError> {
    parse(path, &settings_file(path).read_with_deadline().await?)
}

/// Sends the values after each change to valid content. Logs invalid content once and keeps the last good
/// values. While the file doesn't respond, `readiness` has a note. Ends when all receivers are dropped.
pub async fn follow(path: &Path, tx: watch::Sender<Map<String, Value>>, readiness: Readiness) {
    let file = settings_file(path);
    let about = file.name;
    let report_hang = |problem| readiness.note(about, problem);
    follow_file(file, POLL_INTERVAL, tx, parse, report_hang).await;
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, ValuesFileError> {
    mapping(bytes).map_err(|problem| ValuesFileError::Content {
        path: path.display().to_string(),
        problem,
    })
}

/// Why a text is not a values mapping. Never contains the text, which may be secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotValues {
    #[error("line {line} is not valid YAML: {reason}")]
    Yaml { line: u64, reason: String },
    #[error("line {line} holds {content}; write a mapping of value names to values")]
    NotAMapping { line: u64, content: &'static str },
}

/// Parses the values in a text. An empty text, or one with comments only, has none.
///
/// # Errors
///
/// If the text is not YAML, or not a mapping.
pub fn mapping(bytes: &[u8]) -> Result<Map<String, Value>, NotValues> {
    // No snippets: the lines around an error may hold secrets. Octal numbers as in Helm: `defaultMode:
    // 0644` must have the same meaning as with `helm --values`.
    let options = serde_saphyr::options! { with_snippet: false, legacy_octal_numbers: true };
    let value: Value =
        serde_saphyr::from_slice_with_options(bytes, options).map_err(|error| NotValues::Yaml {
            line: error.location().map_or(1, |location| location.line()),
            reason: error.render_with_formatter(&UserMessageFormatter),
        })?;
    let content = match value {
        Value::Object(values) => return Ok(values),
        Value::Null => return Ok(Map::new()),
        Value::Array(_) => "a list",
        Value::Bool(_) | Value::Number(_) | Value::String(_) => "a single value",
    };
    Err(NotValues::NotAMapping {
        line: first_line(bytes),
        content,
    })
}

/// Line of the first content that is neither blank nor a comment nor a document marker.
fn first_line(bytes: &[u8]) -> u64 {
    let mut number = 0;
    for line in bytes.split(|byte| *byte == b'\n') {
        number += 1;
        let line = line.trim_ascii();
        if !line.is_empty() && !line.starts_with(b"#") && line != b"---" {
            break;
        }
    }
    number
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn load(content: &[u8]) -> Result<Map<String, Value>, ValuesFileError> {
        parse(Path::new("values.yaml"), content)
    }

    #[test]
    fn mapping_is_loaded_and_empty_means_no_values() {
        let values = load(b"replicaCount: 2\nimage:\n  tag: \"1.0\"\n").unwrap();
        let expected = json!({"replicaCount": 2, "image": {"tag": "1.0"}});
        assert_eq!(Value::Object(values), expected);
        for empty in ["", "# nothing yet\n", "---\n", "{}", "null"] {
            assert!(load(empty.as_bytes()).unwrap().is_empty(), "{empty:?}");
        }
    }

    #[test]
    fn scalars_are_interpreted_as_helm_does() {
        let cases = [
            ("0644", json!(0o644)),
            ("010", json!(8)),
            ("0o17", json!(15)),
            ("0x1F", json!(31)),
            ("yes", json!(true)),
            ("off", json!(false)),
            ("\"yes\"", json!("yes")),
            ("1.10", json!(1.1)),
            ("1:30", json!("1:30")),
            ("2024-01-01", json!("2024-01-01")),
            ("~", json!(null)),
        ];
        for (text, expected) in cases {
            let values = load(format!("a: {text}").as_bytes()).unwrap();
            assert_eq!(values["a"], expected, "{text}");
        }
        let values = load(b"1: x\ntrue: y").unwrap();
        assert_eq!(values.keys().collect::<Vec<_>>(), ["1", "true"]);
    }

    #[test]
    fn non_mapping_is_rejected_with_its_line() {
        let cases = [
            ("# values\n\n- a\n- b\n", "line 3 holds a list"),
            ("---\n42\n", "line 2 holds a single value"),
            ("just text", "line 1 holds a single value"),
        ];
        for (content, expected) in cases {
            let text = load(content.as_bytes()).unwrap_err().to_string();
            assert!(
                text.contains(expected) && text.contains("values.yaml"),
                "{text}"
            );
        }
    }

    #[test]
    fn invalid_yaml_error_names_line_without_content() {
        for (content, line) in [
            ("a: 1\npassword: hunter2\nb: [1\n", 3..=4),
            ("password: hunter2\na: 1\na: 2\n", 3..=3),
            ("a: hunter2\n\tb: 1\n", 1..=2),
            ("a: hunter2\n---\nb: 1\n", 2..=3),
        ] {
            let error = load(content.as_bytes()).unwrap_err();
            let ValuesFileError::Content {
                problem:
                    NotValues::Yaml {
                        line: error_line, ..
                    },
                ..
            } = &error
            else {
                panic!("{error:?}")
            };
            assert!(line.contains(error_line), "{content:?}: {error}");
            assert!(
                !format!("{error} {error:?}").contains("hunter2"),
                "{error:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_values_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Err(error) = parse(Path::new("v"), &bytes) {
                prop_assert!(error.to_string().contains("line "));
            }
        }
    }
}
