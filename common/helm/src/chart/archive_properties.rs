//! Properties of every archive, checked by tests and by the fuzzer.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use tar::{Archive, EntryType};

use super::archive::{ChartMetadata, inspect};

const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Compresses the input unless it is a gzip stream, because a fuzzer cannot produce valid checksums.
pub(crate) fn packed(bytes: &[u8]) -> Option<Vec<u8>> {
    if bytes.starts_with(&GZIP) {
        return Some(bytes.to_vec());
    }
    let mut gzip = GzEncoder::new(Vec::new(), Compression::none());
    gzip.write_all(bytes).ok()?;
    gzip.finish().ok()
}

/// Returns the property that the archive `bytes` violates, if any. Also shows that the check terminates
/// without a panic.
pub(crate) fn broken_promise(bytes: &[u8]) -> Option<String> {
    let tgz = packed(bytes)?;
    let metadata = match inspect(&tgz) {
        Ok(metadata) => metadata,
        Err(error) => {
            // A path is cut to 100 characters, and each may be escaped.
            let is_long = error.to_string().len() > 2_000;
            return is_long.then(|| "the message is long".to_owned());
        }
    };
    let ChartMetadata { name, version } = metadata;
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\\']) {
        return Some(format!("the chart is named {name:?}"));
    }
    if semver::Version::parse(version.strip_prefix('v').unwrap_or(&version)).is_err() {
        return Some(format!("the version is {version:?}"));
    }
    misplaced_entry(&tgz)
}

/// Returns an entry that would be unpacked outside the chart's single folder, or as anything except a file.
fn misplaced_entry(tgz: &[u8]) -> Option<String> {
    let mut tar = Archive::new(MultiGzDecoder::new(tgz));
    let entries = match tar.entries() {
        Ok(entries) => entries,
        Err(error) => return Some(format!("accepted and not readable: {error}")),
    };
    let mut folder = None;
    for entry in entries {
        let mut entry = match entry {
            Ok(entry) => entry,
            Err(error) => return Some(format!("accepted and damaged: {error}")),
        };
        let kind = entry.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            continue;
        }
        if !matches!(kind, EntryType::Regular | EntryType::Directory) {
            return Some(format!("accepted an entry of kind {kind:?}"));
        }
        let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let mut parts = path.trim_end_matches('/').split('/');
        let top = parts.next().unwrap_or_default().to_owned();
        let is_invalid = |part: &str| part.is_empty() || part == "." || part == "..";
        if is_invalid(&top) || parts.any(is_invalid) || path.contains('\\') {
            return Some(format!("accepted the path {path:?}"));
        }
        if *folder.get_or_insert_with(|| top.clone()) != top {
            return Some(format!("accepted a second folder {top:?}"));
        }
        let mut size = 0;
        let mut buffer = [0; 8192];
        loop {
            match entry.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => size += length as u64,
                Err(error) => return Some(format!("accepted and damaged: {error}")),
            }
        }
        if size > 5 << 20 {
            return Some(format!("accepted {size} bytes at {path:?}"));
        }
    }
    None
}
