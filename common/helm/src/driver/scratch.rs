//! Helm's private folders, and a temporary folder for each run.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use krypton_types::{fingerprint, names};
use serde_json::{Map, Value};
use tempfile::TempDir;

use super::HelmError;

/// Folders of Helm's files.
#[derive(Debug)]
pub(super) struct Scratch {
    root: PathBuf,
    /// Folder for values and Helm's temporary files.
    private: PathBuf,
}

/// Folder of one run. Dropping it removes the folder.
#[derive(Debug)]
pub(super) struct Run {
    dir: TempDir,
    /// The member's discovery cache, which all its runs share.
    pub cache: PathBuf,
}

impl Scratch {
    pub(super) fn prepare(root: &Path, private: &Path) -> Result<Self, HelmError> {
        let failed = |source| HelmError::Scratch {
            path: root.to_owned(),
            source,
        };
        let scratch = Self {
            root: std::path::absolute(root).map_err(failed)?,
            private: std::path::absolute(private).map_err(failed)?,
        };
        // Remove the values that a killed process left behind.
        match fs::remove_dir_all(scratch.runs()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        scratch.make().map_err(failed)?;
        Ok(scratch)
    }

    /// Creates all folders that do not exist yet.
    fn make(&self) -> io::Result<()> {
        let folders = [
            self.runs(),
            self.home(),
            self.helm("cache"),
            self.helm("config"),
            self.helm("data"),
            self.helm("plugins"),
        ];
        folders.iter().try_for_each(|folder| private(folder))
    }

    pub(super) fn home(&self) -> PathBuf {
        self.root.join("home")
    }

    pub(super) fn helm(&self, what: &str) -> PathBuf {
        self.root.join("helm").join(what)
    }

    fn runs(&self) -> PathBuf {
        self.private.join("runs")
    }

    pub(super) fn run(&self, cache_key: &str) -> Result<Run, HelmError> {
        // A member's name is a valid folder name. Hash any other key.
        let cache = self
            .root
            .join("discovery")
            .join(if names::is_dns_subdomain(cache_key) {
                cache_key.to_owned()
            } else {
                fingerprint::sha256_hex(cache_key.as_bytes())
            });
        // Create the folders again, because a cleanup of temporary files may have removed them.
        let make = || {
            self.make()?;
            private(&cache)?;
            let own = Permissions::from_mode(0o700);
            tempfile::Builder::new()
                .permissions(own)
                .tempdir_in(self.runs())
        };
        let dir = make().map_err(|source| HelmError::Scratch {
            path: self.private.clone(),
            source,
        })?;
        Ok(Run { dir, cache })
    }
}

impl Run {
    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Writes the values so that only this run can read them. JSON is valid YAML.
    pub(super) fn write_values(&self, values: &Map<String, Value>) -> Result<PathBuf, HelmError> {
        let path = self.path().join("values.json");
        let write = || {
            let file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)?;
            let mut file = BufWriter::new(file);
            serde_json::to_writer(&mut file, values)?;
            file.flush()
        };
        match write() {
            Ok(()) => Ok(path),
            Err(source) => Err(HelmError::Scratch { path, source }),
        }
    }
}

fn private(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}
