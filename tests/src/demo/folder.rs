//! The folder `.demo` in the checkout. It contains all files of the demo and is removed with it.

use std::{
    fs::{self, DirBuilder, File, TryLockError},
    io::Write,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, bail};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../.demo");
const LOCK_FILE: &str = "lock";
/// Logs that stay after a failed demo.
pub(crate) const HUB_LOG: &str = "hub.log";
pub(crate) const AGENT_LOG: &str = "agent.log";
const LOGS: [&str; 2] = [HUB_LOG, AGENT_LOG];

#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The kernel releases the lock when the process ends, even after a crash.
    _lock: File,
}

impl Folder {
    /// Locks the folder for this process, removes the files of an earlier run, and uses it for all temporary files.
    pub(crate) fn acquire() -> Result<Self> {
        // The folder contains the clusters' keys.
        let created = DirBuilder::new().recursive(true).mode(0o700).create(FOLDER);
        created.with_context(|| format!("creating {FOLDER}"))?;
        let path = fs::canonicalize(FOLDER).with_context(|| format!("reading {FOLDER}"))?;
        let lock = path.join(LOCK_FILE);
        let lock = File::create(&lock).with_context(|| format!("opening {}", lock.display()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "a demo of this checkout already runs ({}); end it with Ctrl-C in its terminal",
                path.display()
            ),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("locking {}", path.display()));
            }
        }
        clear(&path, &[LOCK_FILE])?;
        tempfile::env::override_temp_dir(&path)
            .map_err(|other| anyhow!("temporary files already go to {}", other.display()))?;
        Ok(Self { path, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends to a log that outlives a failed demo, and returns its path.
    pub(crate) fn save_log(&self, name: &str, log: &Path) -> Result<PathBuf> {
        let saved = self.path.join(name);
        let copy = || -> std::io::Result<()> {
            let mut file = File::options().create(true).append(true).open(&saved)?;
            file.write_all(&fs::read(log)?)
        };
        copy().with_context(|| format!("copying {} to {}", log.display(), saved.display()))?;
        Ok(saved)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if std::thread::panicking() || std::env::var_os("KRYPTON_KEEP").is_some() {
            eprintln!("demo: its files are in {}", self.path.display());
            return;
        }
        let removed = match LOGS.iter().any(|log| self.path.join(log).exists()) {
            true => clear(&self.path, &LOGS),
            false => fs::remove_dir_all(&self.path).context("removing the folder"),
        };
        if let Err(error) = removed {
            eprintln!("demo: {} is left: {error:#}", self.path.display());
        }
    }
}

fn clear(folder: &Path, except: &[&str]) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("reading {}", folder.display()))?;
        if except.iter().any(|name| entry.file_name() == *name) {
            continue;
        }
        let path = entry.path();
        let removed = match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => fs::remove_dir_all(&path),
            false => fs::remove_file(&path),
        };
        removed.with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}
