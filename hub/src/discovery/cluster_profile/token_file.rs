//! A token in a file of the hub, which clients reread periodically. A new token needs no new kubeconfig and
//! interrupts no client.

use std::io::Write as _;
use std::path::Path;

use tempfile::{NamedTempFile, TempPath};

/// Deletes the file on drop. Clients that have read the token keep using it.
#[derive(Debug)]
pub(super) struct TokenFile(TempPath);

impl TokenFile {
    /// Writes a file with a unique name that only the hub can read.
    pub(super) fn write(folder: &Path, token: &str) -> std::io::Result<Self> {
        Ok(Self(write_temporary(folder, token)?.into_temp_path()))
    }

    /// Replaces the token atomically.
    pub(super) fn replace(&self, token: &str) -> std::io::Result<()> {
        let folder = self.0.parent().unwrap_or(Path::new("/"));
        let persisted = write_temporary(folder, token)?.persist(self.path());
        persisted.map_err(|error| error.error)?;
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

fn write_temporary(folder: &Path, token: &str) -> std::io::Result<NamedTempFile> {
    let mut file = tempfile::Builder::new()
        .prefix("token-")
        .tempfile_in(folder)?;
    file.write_all(token.as_bytes())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn token_file_is_private_and_deleted_on_drop() {
        let folder = tempfile::tempdir().unwrap();
        let file = TokenFile::write(folder.path(), "one").unwrap();
        file.replace("two").unwrap();
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "two");
        let mode = std::fs::metadata(file.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(file);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
