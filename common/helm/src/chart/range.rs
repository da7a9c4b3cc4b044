//! Version ranges with Helm's syntax: `^1.2`, `~1.2.3`, `>=1.0 <2.0`, `1.x`, `1.2 - 1.4`, `a || b`.

use semver::Version;

/// Alternatives. Each is a list of bounds that must all hold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Range(Vec<Vec<Bound>>);

/// Maximum number of bounds. No real range needs more. Limits the comparisons that a text of 256 bytes can
/// cause.
const MAX_BOUNDS: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operator {
    Equal,
    NotEqual,
    Greater,
    Less,
    AtLeast,
    AtMost,
    /// `~`: the same minor version.
    Tilde,
    /// `^`: no breaking change.
    Caret,
}

/// How many parts of a bound's version the text gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Precision {
    Wildcard,
    Major,
    Minor,
    Full,
}

#[derive(Clone, Debug, PartialEq)]
struct Bound {
    operator: Operator,
    /// The version, with 0 for the parts that are not written.
    version: Version,
    precision: Precision,
}

impl Operator {
    /// Returns whether `*` may follow the operator. In Helm, `^*` means 0.0.0, `<=*` means 0.0.x, and `>*` and `!=*`
    /// mean any version except 0.0.0.
    fn accepts_wildcard(self) -> bool {
        !matches!(
            self,
            Self::NotEqual | Self::Greater | Self::AtMost | Self::Caret
        )
    }
}

impl Range {
    /// Parses a range. Returns `None` if the text is not a range.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let groups: Vec<Vec<Bound>> = text.split("||").map(parse_group).collect::<Option<_>>()?;
        (groups.iter().map(Vec::len).sum::<usize>() <= MAX_BOUNDS).then_some(Self(groups))
    }

    /// Returns whether the version matches. A pre-release matches only if the range contains a pre-release.
    pub(crate) fn matches(&self, version: &Version) -> bool {
        self.0.iter().any(|bounds| {
            let has_pre_release = bounds.iter().any(|bound| !bound.version.pre.is_empty());
            (has_pre_release || version.pre.is_empty())
                && bounds.iter().all(|bound| bound.holds(version))
        })
    }

    /// Formats the range so that [`Range::parse`] can read it.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn to_text(&self) -> String {
        let bounds = |bounds: &Vec<Bound>| bounds.iter().map(Bound::to_text).collect::<Vec<_>>();
        let groups = self.0.iter().map(|group| bounds(group).join(", "));
        groups.collect::<Vec<_>>().join(" || ")
    }
}

fn parse_group(text: &str) -> Option<Vec<Bound>> {
    let text = text.trim_matches(' ');
    if let Some((low, high)) = text.split_once(" - ") {
        return Some(vec![
            Bound::parse(Operator::AtLeast, low.trim_matches(' '))?,
            Bound::parse(Operator::AtMost, high.trim_matches(' '))?,
        ]);
    }
    let mut bounds = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (operator, after) = split_operator(rest);
        let after = after.trim_start_matches(' ');
        let (word, next) = match after.find([' ', ',']) {
            Some(end) => after.split_at(end),
            None => (after, ""),
        };
        bounds.push(Bound::parse(operator, word)?);
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
const OPERATORS: [(&str, Operator); 11] = [
    (">=", Operator::AtLeast),
    ("=>", Operator::AtLeast),
    ("<=", Operator::AtMost),
    ("=<", Operator::AtMost),
    ("!=", Operator::NotEqual),
    ("~>", Operator::Tilde),
    (">", Operator::Greater),
    ("<", Operator::Less),
    ("=", Operator::Equal),
    ("~", Operator::Tilde),
    ("^", Operator::Caret),
];

/// Splits the text into the operator and the rest.
fn split_operator(text: &str) -> (Operator, &str) {
    let split = OPERATORS
        .iter()
        .find_map(|(sign, operator)| Some((*operator, text.strip_prefix(sign)?)));
    split.unwrap_or((Operator::Equal, text))
}

/// Parses `1`, `1.2`, `1.2.3-rc.1`, `1.x` or `*`, with an optional leading `v`.
fn parse_partial(text: &str) -> Option<(Version, Precision)> {
    let text = text.strip_prefix('v').unwrap_or(text);
    if let Ok(version) = Version::parse(text) {
        return Some((version, Precision::Full));
    }
    let mut numbers = [0, 0, 0];
    let mut precision = Precision::Wildcard;
    let mut has_wildcard = false;
    let mut parts = text.split('.');
    for (number, part_precision) in
        numbers
            .iter_mut()
            .zip([Precision::Major, Precision::Minor, Precision::Full])
    {
        match parts.next() {
            Some("x" | "X" | "*") => has_wildcard = true,
            // Parts after a wildcard have no effect. They are most likely a mistake.
            Some(part) if !has_wildcard => {
                let is_number = part.bytes().all(|byte| byte.is_ascii_digit())
                    && (part.len() == 1 || !part.starts_with('0'));
                *number = is_number.then(|| part.parse().ok())??;
                precision = part_precision;
            }
            Some(_) => return None,
            None if part_precision == Precision::Major => return None,
            None => has_wildcard = true,
        }
    }
    if parts.next().is_some() || (precision == Precision::Wildcard && !has_wildcard) {
        return None;
    }
    let [major, minor, patch] = numbers;
    Some((Version::new(major, minor, patch), precision))
}

impl Bound {
    fn parse(operator: Operator, text: &str) -> Option<Self> {
        let (version, precision) = parse_partial(text)?;
        let is_valid = precision > Precision::Wildcard || operator.accepts_wildcard();
        is_valid.then_some(Self {
            operator,
            version,
            precision,
        })
    }

    fn holds(&self, version: &Version) -> bool {
        let order = version.cmp_precedence(&self.version);
        match self.operator {
            Operator::Equal => self.matches(version),
            Operator::NotEqual => !self.matches(version),
            // The lowest match of `>1` is 2, and of `>1.2` it is 1.3.
            Operator::Greater => {
                order.is_gt() && (self.precision == Precision::Full || !self.matches(version))
            }
            Operator::Less => order.is_lt(),
            Operator::AtLeast => order.is_ge(),
            // `<=1` excludes 2, and `<=1.2` excludes 1.3.
            Operator::AtMost => {
                order.is_le() || (self.precision != Precision::Full && self.matches(version))
            }
            Operator::Tilde => {
                order.is_ge() && agree(version, &self.version, self.precision.min(Precision::Minor))
            }
            Operator::Caret => {
                order.is_ge() && agree(version, &self.version, self.caret_precision())
            }
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    fn to_text(&self) -> String {
        let Version { major, minor, .. } = self.version;
        let version = match self.precision {
            Precision::Wildcard => "*".to_owned(),
            Precision::Major => major.to_string(),
            Precision::Minor => format!("{major}.{minor}"),
            Precision::Full => self.version.to_string(),
        };
        let sign = OPERATORS
            .iter()
            .find(|(_, operator)| *operator == self.operator);
        format!("{}{version}", sign.map_or("", |(sign, _)| sign))
    }

    /// Returns whether the version agrees with the written parts.
    fn matches(&self, version: &Version) -> bool {
        agree(version, &self.version, self.precision)
            && (self.precision != Precision::Full || version.cmp_precedence(&self.version).is_eq())
    }

    /// Returns the precision up to the first number that is not 0.
    fn caret_precision(&self) -> Precision {
        let Version { major, minor, .. } = self.version;
        match (major, minor) {
            (1.., _) => Precision::Major,
            (0, 1..) => Precision::Minor,
            (0, 0) => Precision::Full,
        }
        .min(self.precision)
    }
}

fn agree(a: &Version, b: &Version, precision: Precision) -> bool {
    (precision < Precision::Major || a.major == b.major)
        && (precision < Precision::Minor || a.minor == b.minor)
        && (precision < Precision::Full || a.patch == b.patch)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Helm's library, then one range per line, a tab, and the versions that match. hack/tools/semver generates this file.
    const TABLE: &str = include_str!("range/masterminds.tsv");

    /// Returns whether Helm accepts the range, most likely by accident, while Krypton rejects it.
    fn is_rejected_on_purpose(range: &str) -> bool {
        let operand = range.trim_start_matches(['^', '>', '<', '=', '~', '!']);
        let is_bare_wildcard = operand.len() < range.len() && ["*", "x", "X"].contains(&operand);
        is_bare_wildcard
            || ["01", "1.02", "1.x.3", "*-0", "1.x-0", "1.2-1.4", "1 - *"].contains(&operand)
    }

    #[test]
    fn ranges_match_same_versions_as_helm() {
        let rows: Vec<(&str, &str)> = TABLE
            .lines()
            .skip(1)
            .map(|line| line.split_once('\t').unwrap())
            .collect();
        let versions: BTreeSet<Version> = rows
            .iter()
            .filter(|(_, matching)| *matching != "none")
            .flat_map(|(_, matching)| matching.split_whitespace())
            .map(|version| Version::parse(version).unwrap())
            .collect();
        let mut differences = Vec::new();
        for (range, expected) in &rows {
            let actual = Range::parse(range).map_or("none".to_owned(), |range| {
                let matching = versions.iter().filter(|version| range.matches(version));
                matching
                    .map(Version::to_string)
                    .collect::<Vec<_>>()
                    .join(" ")
            });
            if actual != *expected && !(actual == "none" && is_rejected_on_purpose(range)) {
                differences.push(format!("{range}: {actual} and not {expected}"));
            }
        }
        assert!(differences.is_empty(), "{differences:#?}");
    }

    #[test]
    fn table_of_ranges_has_helms_library_version() {
        let (library, _) = TABLE.split_once('\n').unwrap();
        let pinned = include_str!("../../../../hack/tools/go.mod").lines();
        assert!(
            pinned.map(str::trim).any(|line| line == library),
            "{library}"
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
            let matches = other.major == major && other >= Version::new(major, minor, patch);
            prop_assert_eq!(range.matches(&other), matches);
        }
    }
}
