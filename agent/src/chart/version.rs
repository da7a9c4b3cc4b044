//! Chart versions: exact SemVer 2, for which a leading `v` makes no difference.

use semver::Version;

/// Longer ones are nobody's version, and would only fill messages.
const LONGEST: usize = 256;

pub(super) fn parse(text: &str) -> Option<Version> {
    if text.len() > LONGEST {
        return None;
    }
    Version::parse(text.strip_prefix('v').unwrap_or(text)).ok()
}

/// Whether two texts are the same version, build metadata included.
pub(super) fn same(a: &str, b: &str) -> bool {
    a == b || parse(a).is_some_and(|version| parse(b) == Some(version))
}

/// Picks from `offered`: the wanted version as it is written, else the same one written otherwise;
/// when none is wanted, the newest that is not a pre-release.
pub(super) fn pick<'a, T>(
    wanted: &str,
    offered: &'a [T],
    text: impl Fn(&T) -> &str,
) -> Option<&'a T> {
    if wanted.is_empty() {
        return offered
            .iter()
            .filter_map(|one| parse(text(one)).map(|version| (version, one)))
            .filter(|(version, _)| version.pre.is_empty())
            // Of equals the first counts, as it does in Helm.
            .reduce(|best, next| if next.0 > best.0 { next } else { best })
            .map(|(_, one)| one);
    }
    let exact = offered.iter().find(|one| text(one) == wanted);
    exact.or_else(|| offered.iter().find(|one| same(text(one), wanted)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_versions_are_versions() {
        for good in ["1.2.3", "v1.2.3", "1.2.3-rc.1", "1.2.3+build.5", "0.0.0"] {
            assert!(parse(good).is_some(), "{good}");
        }
        let long = format!("1.2.{}", "3".repeat(10_000));
        for bad in [
            "", "1", "v1.2", "1.2.3+", "01.2.3", "^1", ">=1.0.0", "latest", "vv1.2.3", " 1.2.3",
            "1.2.3\n", &long,
        ] {
            assert!(parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn the_way_a_version_is_written_wins_over_its_meaning() {
        let pick =
            |wanted, offered: &[&str]| pick(wanted, offered, |text| text).map(ToString::to_string);
        assert_eq!(pick("1.19.1", &["v1.19.1"]).as_deref(), Some("v1.19.1"));
        assert_eq!(pick("v1.19.1", &["1.19.1"]).as_deref(), Some("1.19.1"));
        assert_eq!(
            pick("1.19.1", &["v1.19.1", "1.19.1"]).as_deref(),
            Some("1.19.1")
        );
        assert_eq!(
            pick("1.19.1", &["1.19.10", "1.19.1-rc.1", "1.19.1+other"]),
            None
        );
    }

    #[test]
    fn the_newest_is_by_precedence_and_no_pre_release() {
        let offered = ["1.9.0", "1.10.0", "2.0.0-rc.1", "rubbish", "v1.2.0"];
        assert_eq!(pick("", &offered, |text| text), Some(&"1.10.0"));
        assert_eq!(pick("", &["1.0.0-alpha"], |text| text), None);
    }
}
