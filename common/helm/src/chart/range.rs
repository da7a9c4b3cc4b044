//! Version ranges with Helm's syntax: `^1.2`, `~1.2.3`, `>=1.0 <2.0`, `1.x`, `1.2 - 1.4`, `a || b`.

use semver::Version;

/// Alternatives. Each is a list of bounds that must all hold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Range(Vec<Vec<Bound>>);

/// Maximum number of bounds. No real range needs more. Limits the comparisons that a text of 256 bytes can
/// cause.
const MOST: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Relation {
    Equal,
    Other,
    Above,
    Below,
    AtLeast,
    AtMost,
    /// `~`: the same minor version.
    Near,
    /// `^`: no breaking change.
    Compatible,
}

/// The written parts of a bound's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Said {
    Nothing,
    Major,
    Minor,
    All,
}

#[derive(Clone, Debug, PartialEq)]
struct Bound {
    relation: Relation,
    /// The version, with 0 for the parts that are not written.
    version: Version,
    said: Said,
}

impl Relation {
    /// Returns whether `*` may follow the operator.
    fn may_be_of_any(self) -> bool {
        !matches!(
            self,
            Self::Other | Self::Above | Self::AtMost | Self::Compatible
        )
    }
}

impl Range {
    /// Parses a range. Returns `None` if the text is not a range.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let groups: Vec<Vec<Bound>> = text.split("||").map(group).collect::<Option<_>>()?;
        (groups.iter().map(Vec::len).sum::<usize>() <= MOST).then_some(Self(groups))
    }

    /// Returns whether the version matches. A pre-release matches only if the range contains a pre-release.
    pub(crate) fn fits(&self, version: &Version) -> bool {
        self.0.iter().any(|bounds| {
            let named = bounds.iter().any(|bound| !bound.version.pre.is_empty());
            (named || version.pre.is_empty()) && bounds.iter().all(|bound| bound.holds(version))
        })
    }

    /// Formats the range so that [`Range::parse`] can read it.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn written(&self) -> String {
        let bounds = |bounds: &Vec<Bound>| bounds.iter().map(Bound::written).collect::<Vec<_>>();
        let groups = self.0.iter().map(|group| bounds(group).join(", "));
        groups.collect::<Vec<_>>().join(" || ")
    }
}

fn group(text: &str) -> Option<Vec<Bound>> {
    let text = text.trim_matches(' ');
    if let Some((low, high)) = text.split_once(" - ") {
        let bound = |relation: Relation, text: &str| {
            let (version, said) = partial(text.trim_matches(' '))?;
            (said > Said::Nothing || relation.may_be_of_any()).then_some(Bound {
                relation,
                version,
                said,
            })
        };
        return Some(vec![
            bound(Relation::AtLeast, low)?,
            bound(Relation::AtMost, high)?,
        ]);
    }
    let mut bounds = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (relation, after) = relation(rest);
        let after = after.trim_start_matches(' ');
        let (word, next) = match after.find([' ', ',']) {
            Some(end) => after.split_at(end),
            None => (after, ""),
        };
        let (version, said) = partial(word)?;
        // In Helm, `^*` means 0.0.0, `<=*` means 0.0.x, and `>*` and `!=*` mean any version except 0.0.0.
        if said == Said::Nothing && !relation.may_be_of_any() {
            return None;
        }
        bounds.push(Bound {
            relation,
            version,
            said,
        });
        let next = next.trim_start_matches(' ');
        rest = match next.strip_prefix(',') {
            Some(next) if next.trim_matches(' ').is_empty() => return None,
            Some(next) => next.trim_start_matches(' '),
            None => next,
        };
    }
    (!bounds.is_empty()).then_some(bounds)
}

/// The operators, longest first.
const SIGNS: [(&str, Relation); 11] = [
    (">=", Relation::AtLeast),
    ("=>", Relation::AtLeast),
    ("<=", Relation::AtMost),
    ("=<", Relation::AtMost),
    ("!=", Relation::Other),
    ("~>", Relation::Near),
    (">", Relation::Above),
    ("<", Relation::Below),
    ("=", Relation::Equal),
    ("~", Relation::Near),
    ("^", Relation::Compatible),
];

/// Splits the text into the operator and the rest.
fn relation(text: &str) -> (Relation, &str) {
    let signed = SIGNS
        .iter()
        .find_map(|(sign, relation)| Some((*relation, text.strip_prefix(sign)?)));
    signed.unwrap_or((Relation::Equal, text))
}

/// Parses `1`, `1.2`, `1.2.3-rc.1`, `1.x` or `*`, with an optional leading `v`.
fn partial(text: &str) -> Option<(Version, Said)> {
    let text = text.strip_prefix('v').unwrap_or(text);
    if let Ok(version) = Version::parse(text) {
        return Some((version, Said::All));
    }
    let mut numbers = [0, 0, 0];
    let mut said = Said::Nothing;
    let mut open = false;
    let mut parts = text.split('.');
    for (number, upto) in numbers
        .iter_mut()
        .zip([Said::Major, Said::Minor, Said::All])
    {
        match parts.next() {
            Some("x" | "X" | "*") => open = true,
            // Parts after a wildcard have no effect. They are most likely a mistake.
            Some(part) if !open => {
                let plain = part.bytes().all(|byte| byte.is_ascii_digit())
                    && (part.len() == 1 || !part.starts_with('0'));
                *number = plain.then(|| part.parse().ok())??;
                said = upto;
            }
            Some(_) => return None,
            None if upto == Said::Major => return None,
            None => open = true,
        }
    }
    if parts.next().is_some() || (said == Said::Nothing && !open) {
        return None;
    }
    let [major, minor, patch] = numbers;
    Some((Version::new(major, minor, patch), said))
}

impl Bound {
    fn holds(&self, version: &Version) -> bool {
        let order = version.cmp_precedence(&self.version);
        match self.relation {
            Relation::Equal => self.matches(version),
            Relation::Other => !self.matches(version),
            // The lowest match of `>1` is 2, and of `>1.2` it is 1.3.
            Relation::Above => order.is_gt() && (self.said == Said::All || !self.matches(version)),
            Relation::Below => order.is_lt(),
            Relation::AtLeast => order.is_ge(),
            // `<=1` excludes 2, and `<=1.2` excludes 1.3.
            Relation::AtMost => order.is_le() || (self.said != Said::All && self.matches(version)),
            Relation::Near => {
                order.is_ge() && agree(version, &self.version, self.said.min(Said::Minor))
            }
            Relation::Compatible => order.is_ge() && agree(version, &self.version, self.leading()),
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn written(&self) -> String {
        let Version { major, minor, .. } = self.version;
        let version = match self.said {
            Said::Nothing => "*".to_owned(),
            Said::Major => major.to_string(),
            Said::Minor => format!("{major}.{minor}"),
            Said::All => self.version.to_string(),
        };
        let sign = SIGNS
            .iter()
            .find(|(_, relation)| *relation == self.relation);
        format!("{}{version}", sign.map_or("", |(sign, _)| sign))
    }

    /// Returns whether the version agrees with the written parts.
    fn matches(&self, version: &Version) -> bool {
        agree(version, &self.version, self.said)
            && (self.said != Said::All || version.cmp_precedence(&self.version).is_eq())
    }

    /// Returns the parts up to the first number that is not 0.
    fn leading(&self) -> Said {
        let Version { major, minor, .. } = self.version;
        match (major, minor) {
            (1.., _) => Said::Major,
            (0, 1..) => Said::Minor,
            (0, 0) => Said::All,
        }
        .min(self.said)
    }
}

fn agree(a: &Version, b: &Version, upto: Said) -> bool {
    (upto < Said::Major || a.major == b.major)
        && (upto < Said::Minor || a.minor == b.minor)
        && (upto < Said::All || a.patch == b.patch)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// One range per line, then a tab, then the versions that match in Helm's library. hack/semver generates
    /// this file.
    const TABLE: &str = include_str!("range/masterminds.tsv");

    /// Returns whether Helm accepts the range, most likely by accident, while Krypton rejects it.
    fn is_a_mistake(range: &str) -> bool {
        let operand = range.trim_start_matches(['^', '>', '<', '=', '~', '!']);
        let wild = operand.len() < range.len() && ["*", "x", "X"].contains(&operand);
        wild || ["01", "1.02", "1.x.3", "*-0", "1.x-0", "1.2-1.4", "1 - *"].contains(&operand)
    }

    #[test]
    fn ranges_match_same_versions_as_helm() {
        let rows: Vec<(&str, &str)> = TABLE
            .lines()
            .map(|line| line.split_once('\t').unwrap())
            .collect();
        let versions: BTreeSet<Version> = rows
            .iter()
            .filter(|(_, fitting)| *fitting != "none")
            .flat_map(|(_, fitting)| fitting.split_whitespace())
            .map(|version| Version::parse(version).unwrap())
            .collect();
        let mut differences = Vec::new();
        for (range, theirs) in &rows {
            let ours = Range::parse(range).map_or("none".to_owned(), |range| {
                let fitting = versions.iter().filter(|version| range.fits(version));
                fitting
                    .map(Version::to_string)
                    .collect::<Vec<_>>()
                    .join(" ")
            });
            if ours != *theirs && !(ours == "none" && is_a_mistake(range)) {
                differences.push(format!("{range}: {ours} and not {theirs}"));
            }
        }
        assert!(differences.is_empty(), "{differences:#?}");
    }

    #[test]
    fn table_of_ranges_has_helms_library_version() {
        let version = |file: &'static str| {
            let line = file
                .lines()
                .find(|line| line.contains("Masterminds/semver/v3 "));
            line.and_then(|line| line.split_whitespace().find(|word| word.starts_with("v3")))
        };
        let ours = version(include_str!("../../../../hack/semver/go.mod"));
        assert!(ours.is_some());
        assert_eq!(
            ours,
            version(include_str!("../../../../hack/tools/helm/go.mod"))
        );
    }

    #[test]
    fn invalid_ranges_are_rejected() {
        for bad in [
            "",
            " ",
            "latest",
            "^",
            ">=",
            "1..2",
            "1.2.3.4",
            "01",
            "1.x.2",
            "||",
            "1 ||",
            "1.2.3+",
            "^v",
            "a - b",
            "1 - *",
            "1\n",
            "-1",
            "99999999999999999999",
            &"1 ".repeat(100),
        ] {
            assert_eq!(Range::parse(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_caret_keeps_major(
            text in "[0-9xv.*<>=!~^| ,-]{0,40}",
            major in 1_u64..100, minor in 0_u64..100, patch in 0_u64..100,
            other in (0_u64..200, 0_u64..200, 0_u64..200),
        ) {
            drop(Range::parse(&text));
            let range = Range::parse(&format!("^{major}.{minor}.{patch}")).unwrap();
            let other = Version::new(other.0, other.1, other.2);
            let fits = other.major == major && other >= Version::new(major, minor, patch);
            prop_assert_eq!(range.fits(&other), fits);
        }
    }
}
