//! Origin of an archive, and the checks that the origin requires.

use krypton_types::fingerprint::sha256_hex;

use super::chart_ref::ChartRef;
use super::error::ChartProblem;
use super::version::{self, RequestedVersion, VersionSelector};
use super::{archive, oci};

/// Origin of an archive, with the properties that the archive must have.
pub(super) enum Origin {
    Listed(ListedChart),
    /// A local file whose path is the chart's name.
    File,
    Fallback,
}

/// Properties of an archive in an index or a registry.
pub(super) struct ListedChart {
    pub name: String,
    pub version: String,
    pub sha256: Option<String>,
    /// Digest of the manifest, which also identifies the archive in a registry.
    pub manifest_sha256: Option<String>,
}

impl Origin {
    /// Returns the archive's digest and content if it is the requested chart. Slow for large archives.
    pub(super) fn verify(
        &self,
        chart: &ChartRef,
        requested: &RequestedVersion,
        bytes: &[u8],
    ) -> Result<(String, archive::ChartMetadata), ChartProblem> {
        let sha256 = sha256_hex(bytes);
        if let Some(expected) = unmet_digest(chart, requested, self, &sha256) {
            return Err(ChartProblem::Digest {
                expected: expected.escape_debug().to_string(),
                actual: sha256,
            });
        }
        let metadata = archive::inspect(bytes)?;
        let is_other_chart = match self {
            Origin::Listed(listed) => {
                metadata.name != listed.name || !version::same(&metadata.version, &listed.version)
            }
            Origin::Fallback => has_other_name(chart, &metadata.name),
            Origin::File => false,
        };
        if is_other_chart {
            let actual = format!("{} {}", metadata.name, metadata.version);
            return Err(ChartProblem::DifferentChart(actual));
        }
        if let VersionSelector::Exact(version) = &requested.selector
            && !matches!(self, Origin::Listed(_))
            && !version::same(&metadata.version, version)
        {
            let newest = Some(metadata.version);
            return Err(ChartProblem::VersionNotFound { newest });
        }
        Ok((sha256, metadata))
    }
}

/// Returns the expected digest if it differs from the actual one.
fn unmet_digest(
    chart: &ChartRef,
    requested: &RequestedVersion,
    origin: &Origin,
    sha256: &str,
) -> Option<String> {
    let listed = match origin {
        Origin::Listed(listed) => listed.sha256.as_ref(),
        Origin::File | Origin::Fallback => None,
    };
    if let Some(listed) = listed.filter(|listed| *listed != sha256) {
        return Some(listed.clone());
    }
    let pin = requested.sha256.as_ref().filter(|pin| *pin != sha256)?;
    let matches_manifest = match origin {
        Origin::Listed(listed) => listed.manifest_sha256.as_ref() == Some(pin),
        Origin::File => false,
        // The hub has verified the manifest. This process cannot derive its digest from the archive.
        Origin::Fallback => oci::is_oci(chart),
    };
    (!matches_manifest).then(|| pin.clone())
}

/// Returns whether the chart in the archive has a different name. A path implies no name.
fn has_other_name(chart: &ChartRef, actual: &str) -> bool {
    if oci::is_oci(chart) {
        chart.name.rsplit('/').next() != Some(actual)
    } else {
        !chart.repo.is_empty() && chart.name != actual
    }
}
