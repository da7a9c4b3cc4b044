//! Files in the folder of the cache, written atomically.

use std::path::Path;

use tempfile::NamedTempFile;

/// Prefix of incomplete files and temporary folders.
pub(super) const PARTIAL: &str = ".partial-";

pub(super) fn partial_file(dir: &Path) -> std::io::Result<NamedTempFile> {
    tempfile::Builder::new().prefix(PARTIAL).tempfile_in(dir)
}

/// Writes the file atomically.
pub(super) fn write_file(dir: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = partial_file(dir)?;
    std::io::Write::write_all(&mut file, bytes)?;
    file.persist(path).map(drop).map_err(|error| error.error)
}
