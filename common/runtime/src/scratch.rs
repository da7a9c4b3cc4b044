//! Folders for the exclusive use of this process: one for charts and Helm's caches, one for files with credentials.

use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use tempfile::TempDir;
use thiserror::Error;

/// The flag of hub and agent that names the parent of [`private`].
const PRIVATE_FLAG: &str = "--private-dir";

/// Folders that this process has created.
static OWN_FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

#[derive(Debug, Error)]
#[error("using the folder {} failed; name another with {flag}", .folder.display())]
pub struct ScratchError {
    folder: PathBuf,
    flag: &'static str,
    #[source]
    source: std::io::Error,
}

/// Creates a folder in `parent`, named after `program`. Removes folders of killed processes of that program, as they
/// contain credentials. The error names `flag`.
pub fn folder(parent: &Path, program: &str, flag: &'static str) -> Result<TempDir, ScratchError> {
    let with_folder = |source| ScratchError {
        folder: parent.to_owned(),
        flag,
        source,
    };
    std::fs::create_dir_all(parent).map_err(with_folder)?;
    for entry in std::fs::read_dir(parent).map_err(with_folder)?.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| {
            name.strip_prefix(program)?
                .strip_prefix('-')?
                .split('-')
                .next()
        });
        let is_orphaned = owner
            .and_then(|pid| pid.parse().ok())
            .is_some_and(|pid| is_unused(pid, &entry.path()));
        if is_orphaned && let Err(error) = std::fs::remove_dir_all(entry.path()) {
            tracing::warn!(folder = %entry.path().display(), program, %error, "failed to remove the folder of a dead process");
        }
    }
    let created = tempfile::Builder::new()
        .prefix(&format!("{program}-{}-", std::process::id()))
        .tempdir_in(parent)
        .map_err(with_folder)?;
    let mut own = OWN_FOLDERS.lock();
    own.push(created.path().to_owned());
    Ok(created)
}

/// Returns whether no process uses the folder. After a container restart, the previous process can have had the same
/// PID.
fn is_unused(pid: u32, folder: &Path) -> bool {
    if pid == std::process::id() {
        let own = OWN_FOLDERS.lock();
        return !own.iter().any(|own| own == folder);
    }
    !Path::new("/proc").join(pid.to_string()).exists()
}

/// Creates a folder in `parent` for files with credentials or values. Without `parent`, the folder is in `scratch`.
///
/// # Errors
/// If the folder cannot be used.
pub fn private(
    parent: Option<&Path>,
    scratch: &TempDir,
    program: &str,
) -> Result<TempDir, ScratchError> {
    folder(parent.unwrap_or(scratch.path()), program, PRIVATE_FLAG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_dead_processes_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let own = folder(parent.path(), "hub", "--dir").unwrap();
        // No process has this PID: the maximum of Linux is 4194304.
        for name in ["hub-4194305-abc", "agent-4194305-abc", "hub-x-abc", "hub"] {
            std::fs::create_dir(parent.path().join(name)).unwrap();
        }
        let next = folder(parent.path(), "hub", "--dir").unwrap();
        assert!(!parent.path().join("hub-4194305-abc").exists());
        for name in ["agent-4194305-abc", "hub-x-abc", "hub"] {
            assert!(parent.path().join(name).exists(), "{name}");
        }
        assert!(own.path().exists() && next.path().exists());
    }

    #[test]
    fn folder_of_an_earlier_container_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        // The first process of each container has the same PID.
        let earlier = parent
            .path()
            .join(format!("hub-{}-abc", std::process::id()));
        std::fs::create_dir(&earlier).unwrap();
        let own = folder(parent.path(), "hub", "--dir").unwrap();
        assert!(!earlier.exists() && own.path().exists());
    }

    #[test]
    fn private_folder_is_where_it_is_named() {
        let (memory, disk) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let scratch = folder(disk.path(), "hub", "--dir").unwrap();
        let named = private(Some(memory.path()), &scratch, "hub").unwrap();
        assert!(named.path().starts_with(memory.path()));
        let unnamed = private(None, &scratch, "hub").unwrap();
        assert!(unnamed.path().starts_with(scratch.path()));
    }

    #[test]
    fn unusable_folder_error_names_flag() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let message = folder(file.path(), "hub", "--dir").unwrap_err().to_string();
        assert!(
            message.contains("--dir") && message.contains(file.path().to_str().unwrap()),
            "{message}"
        );
    }
}
