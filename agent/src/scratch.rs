//! A folder of this process alone, for charts, kubeconfigs and helm's files.

use std::path::{Path, PathBuf};

use tempfile::TempDir;
use thiserror::Error;

#[derive(Debug, Error)]
#[error("using the folder {} failed; name another with {flag}", .folder.display())]
pub struct ScratchError {
    folder: PathBuf,
    flag: &'static str,
    #[source]
    source: std::io::Error,
}

/// Makes one in `parent`, named after `program`. What processes of that program left that were killed
/// is removed: it holds credentials. `flag` is the one to be named in the error.
pub fn folder(parent: &Path, program: &str, flag: &'static str) -> Result<TempDir, ScratchError> {
    let explain = |source| ScratchError {
        folder: parent.to_owned(),
        flag,
        source,
    };
    std::fs::create_dir_all(parent).map_err(explain)?;
    for entry in std::fs::read_dir(parent).map_err(explain)?.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| {
            name.strip_prefix(program)?
                .strip_prefix('-')?
                .split('-')
                .next()
        });
        let dead = owner.is_some_and(|pid| {
            pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists()
        });
        if dead && let Err(error) = std::fs::remove_dir_all(entry.path()) {
            tracing::warn!(folder = %entry.path().display(), %error, "removing what a dead {program} left failed");
        }
    }
    let make = || {
        tempfile::Builder::new()
            .prefix(&format!("{program}-{}-", std::process::id()))
            .tempdir_in(parent)
    };
    crate::effect_now!("scratch.folder", make()).map_err(explain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_process_left_goes_and_all_else_stays() {
        let parent = tempfile::tempdir().unwrap();
        let own = folder(parent.path(), "hub", "--dir").unwrap();
        // No process has this number: the highest that Linux gives is 4194304.
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
    fn a_folder_that_cannot_be_used_is_told_with_the_flag() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let said = folder(file.path(), "hub", "--dir").unwrap_err().to_string();
        assert!(
            said.contains("--dir") && said.contains(file.path().to_str().unwrap()),
            "{said}"
        );
    }
}
