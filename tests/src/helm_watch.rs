//! Wraps Helm in a script that logs its caller and detects overlapping runs. Each run holds a file lock, which the
//! kernel releases when the run's last process ends.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tempfile::TempDir;

use crate::tools::Tools;

/// The script that all actors of one member run instead of Helm. It logs the run and then replaces itself with Helm.
#[derive(Debug)]
pub struct HelmWatch {
    folder: TempDir,
}

impl HelmWatch {
    pub fn new() -> Result<Self> {
        let folder = TempDir::with_prefix("krypton-helm-watch-").context("creating a folder")?;
        Ok(Self { folder })
    }

    /// Returns the flag for the actor of this name.
    pub fn flag(&self, actor: &str) -> Result<String> {
        let helm = Tools::find()?.binary("helm");
        let program = self.folder.path().join(format!("helm-of-{actor}"));
        let [lock, log] = [self.path("lock"), self.path("log")].map(|path| shell_quoted(&path));
        let helm = shell_quoted(&helm);
        // All actors share the uptime clock.
        let script = format!(
            "#!/bin/sh\n\
             [ \"$1\" = version ] && exec {helm} \"$@\"\n\
             read -r now _ </proc/uptime\n\
             exec 9>>{lock}\n\
             if flock -n 9; then how=alone; else how=BESIDE-ANOTHER; fi\n\
             echo \"{actor} $now $how $1\" >>{log}\n\
             exec {helm} \"$@\"\n"
        );
        let write = || {
            fs::write(&program, script)?;
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
        };
        write().with_context(|| format!("writing {}", program.display()))?;
        Ok(format!("--helm={}", program.display()))
    }

    /// Returns the actors of all Helm runs in order. Fails if two runs overlapped.
    pub fn runs(&self) -> Result<Vec<String>> {
        let log = match fs::read_to_string(self.path("log")) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.context("reading the log of Helm runs")?,
        };
        anyhow::ensure!(
            !log.contains("BESIDE-ANOTHER"),
            "two concurrent runs:\n{log}"
        );
        let actor = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        Ok(log.lines().map(actor).collect())
    }

    /// Returns whether a run has not ended. A killed run ends only when all its threads have, after its command line
    /// has become empty. A run that starts in between would count as concurrent.
    pub fn is_running(&self) -> Result<bool> {
        let lock = fs::File::open(self.path("lock")).context("opening the lock of Helm runs")?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Ok(true),
            taken => taken
                .map(|()| false)
                .context("taking the lock of Helm runs"),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn shell_quoted(path: &Path) -> String {
    format!("'{}'", path.display())
}
