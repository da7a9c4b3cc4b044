//! Versions of Helm that the driver supports.

use semver::Version;

/// Oldest supported version. Older versions have vulnerabilities or lack flags that this driver uses.
pub(super) const OLDEST_VERSION: Version = Version::new(4, 2, 4);

/// Returns whether the driver supports the version that `helm version` has printed.
pub(super) fn is_supported(output: &str) -> bool {
    let version = output
        .strip_prefix('v')
        .and_then(|text| Version::parse(text).ok());
    version
        .is_some_and(|version| version.major == OLDEST_VERSION.major && version >= OLDEST_VERSION)
}
