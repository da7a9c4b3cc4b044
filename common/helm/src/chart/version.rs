//! Chart versions: exact SemVer 2 with an optional leading `v`, or a range.

use krypton_types::fingerprint::is_hex;
use semver::Version;

use super::range::Range;

/// Maximum length of a version. Longer texts are never versions and would only fill messages.
const MAX_LENGTH: usize = 256;
/// Separator between an exact version and its digest.
const DIGEST_SEPARATOR: &str = "@sha256:";

/// Kind of a requested version.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum VersionSelector {
    /// The newest version that is not a pre-release.
    Newest,
    /// An exact version, as written.
    Exact(String),
    Range(Range),
}

/// A requested version with its required digest (lower-case hex).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestedVersion {
    pub selector: VersionSelector,
    pub sha256: Option<String>,
}

impl RequestedVersion {
    /// Parses an empty text, `1.2.3`, `1.2.3@sha256:…` or a range. Returns `None` for any other text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self {
                selector: VersionSelector::Newest,
                sha256: None,
            });
        }
        let (version, sha256) = match text.split_once(DIGEST_SEPARATOR) {
            Some((version, digest)) if is_sha256(digest) => (version, Some(digest.to_owned())),
            Some(_) => return None,
            None => (text, None),
        };
        let selector = if parse(version).is_some() {
            VersionSelector::Exact(version.to_owned())
        } else if sha256.is_none() && version.len() <= MAX_LENGTH {
            VersionSelector::Range(Range::parse(version)?)
        } else {
            return None;
        };
        Some(Self { selector, sha256 })
    }
}

/// Returns whether the text consists of 64 lower-case hex digits.
pub(crate) fn is_sha256(text: &str) -> bool {
    is_hex(text, 64)
}

/// Returns whether `text` is a range, whose result depends on the versions in the repository.
pub fn is_range(text: &str) -> bool {
    RequestedVersion::parse(text)
        .is_some_and(|requested| matches!(requested.selector, VersionSelector::Range(_)))
}

/// Returns the exact version in a text, without a leading `v`.
pub fn parse(text: &str) -> Option<Version> {
    if text.len() > MAX_LENGTH {
        return None;
    }
    Version::parse(text.strip_prefix('v').unwrap_or(text)).ok()
}

/// Returns whether two texts are the same version, build metadata included.
pub(crate) fn same(a: &str, b: &str) -> bool {
    a == b || parse(a).is_some_and(|version| parse(b) == Some(version))
}

/// Selects one of `offered`. For an exact version, prefers the same spelling over an equal version. For a
/// range, selects the newest match. Otherwise, selects the newest version that is not a pre-release.
pub(crate) fn pick<'a, T>(
    selector: &VersionSelector,
    offered: &'a [T],
    text: impl Fn(&T) -> &str,
) -> Option<&'a T> {
    let newest = |matches: &dyn Fn(&Version) -> bool| {
        offered
            .iter()
            .filter_map(|offer| parse(text(offer)).map(|version| (version, offer)))
            .filter(|(version, _)| matches(version))
            // Take the first of several equal versions, as Helm does.
            .reduce(|best, next| {
                let is_newer = next.0.cmp_precedence(&best.0).is_gt();
                if is_newer { next } else { best }
            })
            .map(|(_, offer)| offer)
    };
    match selector {
        VersionSelector::Newest => newest(&|version| version.pre.is_empty()),
        VersionSelector::Range(range) => newest(&|version| range.matches(version)),
        VersionSelector::Exact(exact) => {
            let same_spelling = offered.iter().find(|offer| text(offer) == exact);
            same_spelling.or_else(|| offered.iter().find(|offer| same(text(offer), exact)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picked(requested: &str, offered: &[&str]) -> Option<String> {
        let selector = RequestedVersion::parse(requested).unwrap().selector;
        pick(&selector, offered, |text| text).map(ToString::to_string)
    }

    #[test]
    fn only_exact_versions_are_versions() {
        for good in ["1.2.3", "v1.2.3", "1.2.3-rc.1", "1.2.3+build.5", "0.0.0"] {
            assert!(parse(good).is_some(), "{good}");
            assert!(!is_range(good), "{good}");
        }
        let long = format!("1.2.{}", "3".repeat(10_000));
        for bad in [
            "", "1", "v1.2", "1.2.3+", "01.2.3", "^1", ">=1.0.0", "latest", "vv1.2.3", " 1.2.3",
            "1.2.3\n", &long,
        ] {
            assert!(parse(bad).is_none(), "{bad}");
        }
        for bad in ["latest", "1.2.3+", "01.2.3", "vv1.2.3", "1.2.3\n", &long] {
            assert_eq!(RequestedVersion::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_digest_pins_an_exact_version_only() {
        let hex = "0123456789abcdef".repeat(4);
        let requested = RequestedVersion::parse(&format!("v1.2.3@sha256:{hex}")).unwrap();
        assert_eq!(
            requested.selector,
            VersionSelector::Exact("v1.2.3".to_owned())
        );
        assert_eq!(requested.sha256.as_deref(), Some(hex.as_str()));
        for bad in [
            format!("^1.2@sha256:{hex}"),
            format!("@sha256:{hex}"),
            format!("1.2.3@sha256:{}", hex.to_uppercase()),
            "1.2.3@sha256:12".to_owned(),
            format!("1.2.3@sha512:{hex}"),
        ] {
            assert_eq!(RequestedVersion::parse(&bad), None, "{bad}");
        }
    }

    #[test]
    fn exact_spelling_is_preferred_over_equal_version() {
        assert_eq!(picked("1.19.1", &["v1.19.1"]).as_deref(), Some("v1.19.1"));
        assert_eq!(picked("v1.19.1", &["1.19.1"]).as_deref(), Some("1.19.1"));
        assert_eq!(
            picked("1.19.1", &["v1.19.1", "1.19.1"]).as_deref(),
            Some("1.19.1")
        );
        assert_eq!(
            picked("1.19.1", &["1.19.10", "1.19.1-rc.1", "1.19.1+other"]),
            None
        );
    }

    #[test]
    fn highest_stable_version_in_range_is_picked() {
        let offered = ["1.9.0", "1.10.0", "2.0.0-rc.1", "rubbish", "v1.2.0"];
        assert_eq!(picked("", &offered).as_deref(), Some("1.10.0"));
        assert_eq!(picked("", &["1.0.0-alpha"]), None);
        assert_eq!(picked("~1.9", &offered).as_deref(), Some("1.9.0"));
        assert_eq!(picked("<2", &offered).as_deref(), Some("1.10.0"));
        assert_eq!(picked(">=3", &offered), None);
    }
}
