//! Shared by the module `fuzzing` of each crate.

#![allow(dead_code, reason = "no crate needs all of it")]

/// The first promise that an input breaks.
pub(super) type Target = fn(&[u8]) -> Option<String>;

/// As `krypton_types::error_chain` has it.
const MESSAGE_MAX: usize = 4096;

/// Returns the broken promise from a target.
macro_rules! promise {
    ($kept:expr, $($broken:tt)+) => {
        if !$kept {
            return Some(format!($($broken)+));
        }
    };
}
pub(super) use promise;

/// Returns the promise for messages that a text breaks.
pub(super) fn message_defect(text: &str) -> Option<String> {
    promise!(
        text.len() <= MESSAGE_MAX,
        "a message of {} bytes",
        text.len()
    );
    let control = text.chars().any(char::is_control);
    control.then(|| format!("a control character in the message {text:?}"))
}

/// Replays the seeds of each target.
#[cfg(test)]
pub(super) fn replay(targets: &[(&str, Target)]) {
    let mut violations = Vec::new();
    for (target, broken_promise) in targets {
        for (seed, bytes) in seeds(target) {
            let violation = broken_promise(&bytes);
            violations.extend(violation.map(|violation| format!("{target}/{seed}: {violation}")));
        }
    }
    assert!(violations.is_empty(), "{violations:#?}");
}

/// Returns the seeds of a target with their names.
#[cfg(test)]
pub(crate) fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = folder_of(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder}: {error}"));
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        (name, std::fs::read(entry.path()).unwrap())
    };
    let seeds: Vec<_> = entries.map(read).collect();
    assert!(!seeds.is_empty(), "{folder} is empty");
    seeds
}

#[cfg(test)]
fn folder_of(target: &str) -> String {
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let mut folders = crates.map(|folder| folder.join("fuzz/corpus"));
    let corpus = folders.find(|folder| folder.exists()).unwrap();
    corpus.join(target).to_str().unwrap().to_owned()
}

/// Writes seeds that are not text, if `WRITE_CORPUS` is set.
#[cfg(test)]
pub(crate) fn write(target: &str, seeds: &[(&str, Vec<u8>)]) {
    if std::env::var_os("WRITE_CORPUS").is_none() {
        return;
    }
    let folder = folder_of(target);
    std::fs::create_dir_all(&folder).unwrap();
    for (name, bytes) in seeds {
        std::fs::write(format!("{folder}/{name}"), bytes).unwrap();
    }
}
