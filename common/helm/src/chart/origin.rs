//! Origin of an archive, and the checks that the origin requires.

use std::sync::Arc;

use krypton_types::fingerprint::sha256_hex;

use super::version::{self, Asked, Wanted};
use super::{ChartError, ChartRef, archive, oci};

/// Origin of an archive, with the properties that the archive must have.
pub(super) enum Origin {
    Listed(Listed),
    /// A local file whose path is the chart's name.
    File,
    Fallback,
}

/// Properties of an archive in an index or a registry.
pub(super) struct Listed {
    pub name: String,
    pub version: String,
    pub sha256: Option<String>,
    /// Digest of the manifest, which also identifies the archive in a registry.
    pub manifest_sha256: Option<String>,
}

impl Origin {
    /// Returns the archive's digest and content if it is the requested chart. Slow for large archives.
    pub(super) fn checked(
        &self,
        chart: &Arc<ChartRef>,
        asked: &Asked,
        bytes: &[u8],
    ) -> Result<(String, archive::Inside), ChartError> {
        let sha256 = sha256_hex(bytes);
        if let Some(wanted) = other_digest(chart, asked, self, &sha256) {
            let (wanted, found) = (wanted.escape_debug().to_string(), sha256);
            return Err(ChartError::Digest {
                chart: Arc::clone(chart),
                wanted,
                found,
            });
        }
        let inside = inspected(chart, bytes)?;
        let found = || format!("{} {}", inside.name, inside.version);
        let other_version = match &asked.wanted {
            Wanted::Exact(version) => !version::same(&inside.version, version),
            Wanted::Newest | Wanted::Range(_) => false,
        };
        match self {
            Origin::Listed(listed)
                if inside.name != listed.name
                    || !version::same(&inside.version, &listed.version) =>
            {
                let found = found();
                return Err(ChartError::Other {
                    chart: Arc::clone(chart),
                    found,
                });
            }
            Origin::Fallback if other_name(chart, &inside.name) => {
                let found = found();
                return Err(ChartError::Other {
                    chart: Arc::clone(chart),
                    found,
                });
            }
            Origin::File | Origin::Fallback if other_version => {
                return Err(ChartError::VersionNotFound {
                    chart: Arc::clone(chart),
                    newest: Some(inside.version),
                });
            }
            _ => {}
        }
        Ok((sha256, inside))
    }
}

/// Returns the expected digest if it differs from the actual one.
fn other_digest(chart: &ChartRef, asked: &Asked, origin: &Origin, sha256: &str) -> Option<String> {
    let listed = match origin {
        Origin::Listed(listed) => listed.sha256.as_ref(),
        Origin::File | Origin::Fallback => None,
    };
    if let Some(listed) = listed.filter(|listed| *listed != sha256) {
        return Some(listed.clone());
    }
    let pin = asked.sha256.as_ref().filter(|pin| *pin != sha256)?;
    let by_manifest = match origin {
        Origin::Listed(listed) => listed.manifest_sha256.as_ref() == Some(pin),
        Origin::File => false,
        // The hub has verified the manifest. This process cannot derive its digest from the archive.
        Origin::Fallback => oci::is_meant(chart),
    };
    (!by_manifest).then(|| pin.clone())
}

/// Returns whether the chart in the archive has a different name. A path implies no name.
fn other_name(chart: &ChartRef, inside: &str) -> bool {
    if oci::is_meant(chart) {
        chart.name.rsplit('/').next() != Some(inside)
    } else {
        !chart.repo.is_empty() && chart.name != inside
    }
}

pub(super) fn inspected(
    chart: &Arc<ChartRef>,
    bytes: &[u8],
) -> Result<archive::Inside, ChartError> {
    archive::inspect(bytes).map_err(|source| ChartError::Archive {
        chart: Arc::clone(chart),
        source,
    })
}
