//! The file of chart values. The hub validates the complete file and follows its changes.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use krypton_runtime::admin::Readiness;
use serde_json::{Map, Value};
use serde_saphyr::UserMessageFormatter;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// Size limit of the file, 1 MiB, equal to that of a Secret or ConfigMap.
pub const MAX_BYTES: u64 = 1024 * 1024;
/// Poll interval. A mounted Secret changes by swapped symlinks, which watches of a path miss.
pub const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// A read that takes longer counts as hung: its mount doesn't respond.
pub const DEADLINE: Duration = Duration::from_secs(10);
const ABOUT: &str = "values file";

/// Why a values file is unusable. Never contains the file's content, which may be secret.
#[derive(Debug, thiserror::Error)]
pub enum ValuesFileError {
    #[error("reading the values file {path} failed; correct --chart-values-file or the file's permissions", path = path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the values file {path} does not answer within {} s; check whether its mount hangs", DEADLINE.as_secs(), path = path.display())]
    Hangs { path: PathBuf },
    #[error("the values file {path} is not a regular file; name a file with --chart-values-file", path = path.display())]
    NotAFile { path: PathBuf },
    #[error("the values file {path} is larger than 1 MiB; shorten it", path = path.display())]
    TooLarge { path: PathBuf },
    #[error("the values file {path}, line {line}, is not valid YAML: {reason}", path = path.display())]
    Yaml {
        path: PathBuf,
        line: u64,
        reason: String,
    },
    #[error("the values file {path}, line {line}, holds {found}; write a mapping of value names to values", path = path.display())]
    NotAMapping {
        path: PathBuf,
        line: u64,
        found: &'static str,
    },
}

/// Namespace for the functions of the values file.
#[derive(Clone, Copy, Debug)]
pub struct ValuesFile;

impl ValuesFile {
    /// Loads the values from the file at `path`. An empty file, or one with comments only, has none.
    pub fn load(path: &Path) -> Result<Map<String, Value>, ValuesFileError> {
        parse(path, &read(path)?)
    }

    /// Like [`Self::load`], for a mount that may hang.
    ///
    /// # Errors
    ///
    /// As [`Self::load`], and if the mount doesn't respond in time.
    pub async fn load_in_time(path: &Path) -> Result<Map<String, Value>, ValuesFileError> {
        let at = path.to_owned();
        let loaded = in_time(DEADLINE, move || Self::load(&at)).await;
        loaded.unwrap_or_else(|| {
            Err(ValuesFileError::Hangs {
                path: path.to_owned(),
            })
        })
    }
}

/// Reads on a separate thread, which outlives `deadline` if its mount hangs. Returns `None` then.
pub(crate) async fn in_time<T: Send + 'static>(
    deadline: Duration,
    read: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let reading = tokio::task::spawn_blocking(read);
    tokio::time::timeout(deadline, reading).await.ok()?.ok()
}

/// Sends the values after each change to valid content. Logs invalid content once and keeps the last good
/// values. While the file doesn't respond, `readiness` has a note. Ends when all receivers are dropped.
pub async fn watch(
    path: PathBuf,
    every: Duration,
    tx: watch::Sender<Map<String, Value>>,
    readiness: Readiness,
) {
    let at = path.clone();
    let hangs = move |hangs: bool| {
        let why = ValuesFileError::Hangs { path: at.clone() };
        if hangs {
            tracing::error!(error = %why, "the chart values stay as they were");
        } else {
            tracing::info!(path = %at.display(), "the values file answers again");
        }
        readiness.note(ABOUT, hangs.then(|| why.to_string()));
    };
    follow(path, (every, DEADLINE), tx, read, hangs).await;
}

async fn follow(
    path: PathBuf,
    (every, deadline): (Duration, Duration),
    tx: watch::Sender<Map<String, Value>>,
    read: impl Fn(&Path) -> Result<Vec<u8>, ValuesFileError> + Clone + Send + 'static,
    hangs: impl Fn(bool),
) {
    let mut follower = Follower::default();
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = tx.closed() => return,
            _ = ticks.tick() => {}
        }
        let (at, read) = (path.clone(), read.clone());
        let looking = read_patiently(deadline, move || read(&at), &hangs);
        let content = tokio::select! {
            () = tx.closed() => return,
            content = looking => content,
        };
        let Some(content) = content else {
            continue; // the runtime is shutting down
        };
        match follower.observe(&path, content) {
            Observation::Same => {}
            Observation::Good(values) => {
                let changed = tx.send_if_modified(|current| {
                    let differs = *current != values;
                    if differs {
                        *current = values;
                    }
                    differs
                });
                if changed {
                    tracing::info!(path = %path.display(), "chart values changed");
                }
            }
            Observation::Bad(error) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "the chart values stay as they were"
                );
            }
        }
    }
}

/// Reads on a separate thread. If the read takes longer than `deadline`, calls `hangs(true)`, waits for the
/// same read, and then calls `hangs(false)`. No second thread hangs on one mount. Returns `None` when the
/// runtime ends.
pub(crate) async fn read_patiently<T: Send + 'static>(
    deadline: Duration,
    read: impl FnOnce() -> T + Send + 'static,
    hangs: impl Fn(bool),
) -> Option<T> {
    let mut reading = tokio::task::spawn_blocking(read);
    if let Ok(ended) = tokio::time::timeout(deadline, &mut reading).await {
        return ended.ok();
    }
    hangs(true);
    let ended = reading.await;
    hangs(false);
    ended.ok()
}

/// The result of one poll of the file.
#[derive(Debug)]
enum Observation {
    /// Same as at the last poll, good or bad.
    Same,
    Good(Map<String, Value>),
    Bad(ValuesFileError),
}

/// Remembers the last poll to handle each content once.
#[derive(Debug, Default)]
struct Follower {
    last: Option<Result<Vec<u8>, String>>,
}

impl Follower {
    fn observe(&mut self, path: &Path, content: Result<Vec<u8>, ValuesFileError>) -> Observation {
        let seen = match &content {
            Ok(bytes) => Ok(bytes.clone()),
            Err(error) => Err(error.to_string()),
        };
        if self.last.as_ref() == Some(&seen) {
            return Observation::Same;
        }
        self.last = Some(seen);
        match content.and_then(|bytes| parse(path, &bytes)) {
            Ok(values) => Observation::Good(values),
            Err(error) => Observation::Bad(error),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ValuesFileError> {
    let failed = |source| ValuesFileError::Read {
        path: path.to_owned(),
        source,
    };
    // Opening a pipe would wait for a writer.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(ValuesFileError::NotAFile {
            path: path.to_owned(),
        });
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(ValuesFileError::TooLarge {
            path: path.to_owned(),
        });
    }
    Ok(bytes)
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, ValuesFileError> {
    mapping(bytes).map_err(|error| match error {
        NotValues::Yaml { line, reason } => ValuesFileError::Yaml {
            path: path.to_owned(),
            line,
            reason,
        },
        NotValues::NotAMapping { line, found } => ValuesFileError::NotAMapping {
            path: path.to_owned(),
            line,
            found,
        },
    })
}

/// Why a text is not a values mapping. Never contains the text, which may be secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotValues {
    #[error("line {line} is not valid YAML: {reason}")]
    Yaml { line: u64, reason: String },
    #[error("line {line} holds {found}; write a mapping of value names to values")]
    NotAMapping { line: u64, found: &'static str },
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
    let found = match value {
        Value::Object(values) => return Ok(values),
        Value::Null => return Ok(Map::new()),
        Value::Array(_) => "a list",
        Value::Bool(_) | Value::Number(_) | Value::String(_) => "a single value",
    };
    Err(NotValues::NotAMapping {
        line: first_line(bytes),
        found,
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
    use krypton_runtime::newest::NewestSeen as _;
    use proptest::prelude::*;

    use super::*;

    fn load(content: &[u8]) -> Result<Map<String, Value>, ValuesFileError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("values.yaml");
        std::fs::write(&path, content).unwrap();
        ValuesFile::load(&path)
    }

    #[test]
    fn mapping_is_loaded_and_empty_means_no_values() {
        let values = load(b"replicaCount: 2\nimage:\n  tag: \"1.0\"\n").unwrap();
        assert_eq!(
            Value::Object(values),
            serde_json::json!({"replicaCount": 2, "image": {"tag": "1.0"}})
        );
        for empty in ["", "# nothing yet\n", "---\n", "{}", "null"] {
            assert!(load(empty.as_bytes()).unwrap().is_empty(), "{empty:?}");
        }
    }

    #[test]
    fn scalars_are_interpreted_as_helm_does() {
        let cases = [
            ("0644", serde_json::json!(0o644)),
            ("010", serde_json::json!(8)),
            ("0o17", serde_json::json!(15)),
            ("0x1F", serde_json::json!(31)),
            ("yes", serde_json::json!(true)),
            ("off", serde_json::json!(false)),
            ("\"yes\"", serde_json::json!("yes")),
            ("1.10", serde_json::json!(1.1)),
            ("1:30", serde_json::json!("1:30")),
            ("2024-01-01", serde_json::json!("2024-01-01")),
            ("~", serde_json::json!(null)),
        ];
        for (text, expected) in cases {
            assert_eq!(
                load(format!("a: {text}").as_bytes()).unwrap()["a"],
                expected,
                "{text}"
            );
        }
        assert_eq!(
            load(b"1: x\ntrue: y").unwrap().keys().collect::<Vec<_>>(),
            ["1", "true"]
        );
    }

    #[test]
    fn non_mapping_is_rejected_with_its_line() {
        let cases = [
            ("# values\n\n- a\n- b\n", "line 3, holds a list"),
            ("---\n42\n", "line 2, holds a single value"),
            ("just text", "line 1, holds a single value"),
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
            let ValuesFileError::Yaml { line: found, .. } = &error else {
                panic!("{error:?}")
            };
            assert!(line.contains(found), "{content:?}: {error}");
            assert!(
                !format!("{error} {error:?}").contains("hunter2"),
                "{error:?}"
            );
        }
    }

    #[test]
    fn only_regular_files_up_to_one_mebibyte_load() {
        let directory = tempfile::tempdir().unwrap();
        let missing = ValuesFile::load(&directory.path().join("none.yaml")).unwrap_err();
        assert!(
            matches!(missing, ValuesFileError::Read { .. }),
            "{missing:?}"
        );
        let folder = ValuesFile::load(directory.path()).unwrap_err();
        assert!(
            matches!(folder, ValuesFileError::NotAFile { .. }),
            "{folder:?}"
        );

        let mut content = b"a: ".to_vec();
        content.resize(MAX_BYTES as usize, b'x');
        assert_eq!(load(&content).unwrap().len(), 1);
        content.push(b'x');
        assert!(matches!(
            load(&content),
            Err(ValuesFileError::TooLarge { .. })
        ));
    }

    #[test]
    fn each_content_is_judged_once() {
        let path = Path::new("values.yaml");
        let mut follower = Follower::default();
        let mut look = |content: &str| follower.observe(path, Ok(content.as_bytes().to_vec()));
        assert!(matches!(look("a: 1"), Observation::Good(_)));
        assert!(matches!(look("a: 1"), Observation::Same));
        assert!(matches!(look("- a"), Observation::Bad(_)));
        assert!(matches!(look("- a"), Observation::Same));
        assert!(matches!(look("- b"), Observation::Bad(_)));
        assert!(matches!(look("a: 1"), Observation::Good(_)));

        let gone = || ValuesFileError::NotAFile {
            path: path.to_owned(),
        };
        assert!(matches!(
            follower.observe(path, Err(gone())),
            Observation::Bad(_)
        ));
        assert!(matches!(
            follower.observe(path, Err(gone())),
            Observation::Same
        ));
    }

    #[tokio::test]
    async fn valid_edit_is_loaded_and_invalid_one_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("values.yaml");
        // Change the file like a mounted Secret: swap the symlink, never the file.
        let swap = |content: &str, version: &str| {
            let file = directory.path().join(version);
            std::fs::write(&file, content).unwrap();
            let link = directory.path().join("link");
            std::os::unix::fs::symlink(&file, &link).unwrap();
            std::fs::rename(&link, &path).unwrap();
        };
        swap("a: 1", "v1");
        let (tx, mut rx) = watch::channel(ValuesFile::load(&path).unwrap());
        let watching = tokio::spawn(watch(
            path.clone(),
            Duration::from_millis(5),
            tx,
            Readiness::new(),
        ));

        swap("a: 2", "v2");
        rx.changed().await.unwrap();
        assert_eq!(rx.see()["a"], 2);
        swap("- not a mapping", "v3");
        swap("a: 4", "v4");
        rx.changed().await.unwrap();
        assert_eq!(rx.see()["a"], 4);

        drop(rx);
        watching.await.unwrap();
    }

    #[tokio::test]
    async fn hung_mount_is_reported_and_file_read_later() {
        // The mount responds once for each message.
        let (answers, mount) = std::sync::mpsc::channel::<&'static [u8]>();
        let mount = std::sync::Arc::new(std::sync::Mutex::new(mount));
        let looks = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let read = {
            let looks = std::sync::Arc::clone(&looks);
            move |_: &Path| {
                looks.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                let answer = mount.lock().unwrap().recv();
                Ok(answer.unwrap_or_default().to_vec())
            }
        };
        let (told, mut hangs) = tokio::sync::mpsc::channel(8);
        let (tx, mut rx) = watch::channel(Map::new());
        let millis = Duration::from_millis;
        let path = PathBuf::from("values.yaml");
        let following = tokio::spawn(follow(path, (millis(1), millis(20)), tx, read, move |is| {
            told.try_send(is).unwrap();
        }));
        assert_eq!(hangs.recv().await, Some(true));
        assert_eq!(looks.load(std::sync::atomic::Ordering::SeqCst), 1);
        answers.send(b"a: 2").unwrap();
        assert_eq!(hangs.recv().await, Some(false));
        rx.changed().await.unwrap();
        assert_eq!(rx.see()["a"], 2);
        // The watch ends even while the mount hangs again.
        assert_eq!(hangs.recv().await, Some(true));
        drop(rx);
        following.await.unwrap();
        drop(answers);
    }

    #[tokio::test]
    async fn hung_read_ends_at_its_deadline() {
        let (answers, answer) = std::sync::mpsc::channel::<()>();
        let hung = in_time(Duration::from_millis(10), move || answer.recv());
        let ended = tokio::time::timeout(Duration::from_secs(5), hung).await;
        assert_eq!(ended, Ok(None));
        drop(answers);
        assert_eq!(in_time(DEADLINE, || 1).await, Some(1));
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
