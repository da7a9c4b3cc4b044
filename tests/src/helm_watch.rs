//! A helm that writes down who runs it, and whether another still does: the kernel's lock on one file is
//! held by each run until its last process is gone, however it ends.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::tools::Tools;

/// What all actors of one member run in the place of helm: a script that becomes helm. Each is to run one
/// at a time.
#[derive(Debug)]
pub struct HelmWatch {
    folder: TempDir,
}

impl HelmWatch {
    pub fn new() -> Result<Self> {
        let folder = TempDir::with_prefix("krypton-helm-watch-").context("making a folder")?;
        Ok(Self { folder })
    }

    /// The flag for an actor of this name.
    pub fn flag(&self, actor: &str) -> Result<String> {
        let helm = Tools::find()?.binary("helm");
        let program = self.folder.path().join(format!("helm-of-{actor}"));
        let [lock, log] = [self.path("lock"), self.path("log")].map(|path| shown(&path));
        let helm = shown(&helm);
        // Uptime is the clock that all of them share.
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

    /// Who has run helm, one after the other.
    /// Fails if two runs overlapped.
    pub fn runs(&self) -> Result<Vec<String>> {
        let log = match fs::read_to_string(self.path("log")) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.context("reading who has run helm")?,
        };
        anyhow::ensure!(!log.contains("BESIDE-ANOTHER"), "two at once:\n{log}");
        let actor = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        Ok(log.lines().map(actor).collect())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn shown(path: &Path) -> String {
    format!("'{}'", path.display())
}
