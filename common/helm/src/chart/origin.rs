//! Where an archive comes from, and whether it is what it must be therefore.

use std::sync::Arc;

use krypton_types::fingerprint::sha256_hex;

use super::version::{self, Asked, Wanted};
use super::{ChartError, ChartRef, archive, oci};

/// Where an archive comes from, and what it must hold therefore.
pub(super) enum Origin {
    Listed(Listed),
    /// The name is a path.
    File,
    Fallback,
}

/// What an index or a registry says of an archive.
pub(super) struct Listed {
    pub name: String,
    pub version: String,
    pub sha256: Option<String>,
    /// By which a registry knows it, too.
    pub manifest_sha256: Option<String>,
}

impl Origin {
    /// The archive's digest and what is inside, when it is the chart that was asked for. Slow for large ones.
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

/// The digest that was to be expected, when it is another.
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
        // The hub has seen the manifest, and the archive alone does not say which it was.
        Origin::Fallback => oci::is_meant(chart),
    };
    (!by_manifest).then(|| pin.clone())
}

/// Whether the archive is of another chart than was asked for; a path says nothing of it.
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
