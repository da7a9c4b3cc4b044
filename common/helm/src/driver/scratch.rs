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
pub(super) struct RunFolder {
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
        match fs::remove_dir_all(scratch.runs_folder()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        scratch.create_folders().map_err(failed)?;
        Ok(scratch)
    }

    /// Creates all folders that do not exist yet.
    fn create_folders(&self) -> io::Result<()> {
        let folders = [
            self.runs_folder(),
            self.home(),
            self.helm_folder("cache"),
            self.helm_folder("config"),
            self.helm_folder("data"),
            self.helm_folder("plugins"),
        ];
        folders.iter().try_for_each(|folder| create_private(folder))
    }

    pub(super) fn home(&self) -> PathBuf {
        self.root.join("home")
    }

    pub(super) fn helm_folder(&self, name: &str) -> PathBuf {
        self.root.join("helm").join(name)
    }

    fn runs_folder(&self) -> PathBuf {
        self.private.join("runs")
    }

    /// Creates the folder of a run.
    pub(super) fn create_run(&self, cache_key: &str) -> Result<RunFolder, HelmError> {
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
        let create = || {
            self.create_folders()?;
            create_private(&cache)?;
            let owner_only = Permissions::from_mode(0o700);
            tempfile::Builder::new()
                .permissions(owner_only)
                .tempdir_in(self.runs_folder())
        };
        let dir = create().map_err(|source| HelmError::Scratch {
            path: self.private.clone(),
            source,
        })?;
        Ok(RunFolder { dir, cache })
    }
}

impl RunFolder {
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

fn create_private(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}
