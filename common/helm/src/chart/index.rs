//! Reads the entries of one chart from a repository's `index.yaml` and skips the rest.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::error::ChartProblem;
use super::version::{self, VersionSelector};

/// Maximum size of an index in bytes, as in Flux.
pub(super) const LIMIT: u64 = 50 << 20;

/// A version in the repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IndexEntry {
    pub version: String,
    /// The first URL: absolute, or relative to the repository.
    pub url: String,
    /// SHA-256 in lower-case hex.
    pub digest: Option<String>,
}

#[derive(Deserialize)]
struct RawEntry {
    version: Option<String>,
    urls: Option<Vec<Option<String>>>,
    digest: Option<String>,
}

/// Finds the requested entry of the chart `name`. Slow for large indexes, so call it outside async threads.
pub(crate) fn find_entry(
    name: &str,
    selector: &VersionSelector,
    index: &[u8],
) -> Result<IndexEntry, ChartProblem> {
    let versions = parse(index, name)
        .map_err(ChartProblem::Index)?
        .ok_or(ChartProblem::Unlisted)?;
    let offered: Vec<(String, RawEntry)> = versions
        .into_iter()
        .filter_map(|mut raw| Some((raw.version.take()?, raw)))
        .collect();
    let Some((version, raw)) = version::pick(selector, &offered, |offer| offer.0.as_str()) else {
        let newest = version::pick(&VersionSelector::Newest, &offered, |offer| offer.0.as_str());
        let newest = newest.map(|offer| offer.0.clone());
        return Err(ChartProblem::VersionNotFound { newest });
    };
    let mut urls = raw.urls.iter().flatten().flatten();
    let url = urls.find(|url| !url.is_empty());
    let url = url.ok_or(ChartProblem::EntryUrl)?;
    let digest = raw.digest.as_deref().map(|digest| {
        digest
            .strip_prefix("sha256:")
            .unwrap_or(digest)
            .to_ascii_lowercase()
    });
    Ok(IndexEntry {
        version: version.clone(),
        url: url.clone(),
        digest: digest.filter(|digest| !digest.is_empty()),
    })
}

/// Returns the entries of the chart `name`, or `None` if the index does not list it.
fn parse(index: &[u8], name: &str) -> Result<Option<Vec<RawEntry>>, serde_saphyr::Error> {
    // The download already limits the size. This allows the parser to read an index of that size.
    let limit = usize::try_from(LIMIT).unwrap_or(usize::MAX);
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: limit,
            max_nodes: limit,
            max_total_scalar_bytes: limit,
        },
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
        emit_comments: false,
        with_snippet: false,
    };
    serde_saphyr::with_deserializer_from_slice_with_options(index, options, |document| {
        let chart = ValueAt {
            key: name,
            seed: PhantomData::<Option<Vec<RawEntry>>>,
        };
        ValueAt {
            key: "entries",
            seed: chart,
        }
        .deserialize(document)?
        .map(Option::flatten)
        .ok_or_else(|| serde::de::Error::custom("it has no entries"))
    })
}

/// Reads the value at one key of a mapping with `seed` and skips all other keys.
#[derive(Clone, Copy)]
struct ValueAt<'a, S> {
    key: &'a str,
    seed: S,
}

impl<'de, S: DeserializeSeed<'de> + Clone> DeserializeSeed<'de> for ValueAt<'_, S> {
    type Value = Option<S::Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: DeserializeSeed<'de> + Clone> Visitor<'de> for ValueAt<'_, S> {
    type Value = Option<S::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a mapping that may have the key {:?}", self.key)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut value = None;
        while let Some(key) = map.next_key::<String>()? {
            if key == self.key {
                value = Some(map.next_value_seed(self.seed.clone())?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDEX: &str = r#"
apiVersion: v1
entries:
  other:
    - version: [not, a, version]
  small:
    - {version: 1.1.0, urls: [charts/small-1.1.0.tgz], digest: "sha256:AB12", created: 2026-11-20T00:00:00Z}
    - {version: v1.0.0, urls: ["", "https://cdn.example.org/small-1.0.0.tgz"]}
    - {urls: [without-a-version.tgz]}
    - {version: 0.9.0, urls: null}
generated: 2026-11-20T00:00:00Z
"#;

    fn lookup(name: &str, version: &str) -> Result<IndexEntry, ChartProblem> {
        let selector = version::RequestedVersion::parse(version).unwrap().selector;
        find_entry(name, &selector, INDEX.as_bytes())
    }

    #[test]
    fn entry_is_found_despite_malformed_other_entries() {
        let newest = IndexEntry {
            version: "1.1.0".to_owned(),
            url: "charts/small-1.1.0.tgz".to_owned(),
            digest: Some("ab12".to_owned()),
        };
        assert_eq!(lookup("small", "1.1.0").unwrap(), newest);
        assert_eq!(lookup("small", "").unwrap(), newest);
        assert_eq!(lookup("small", "^1").unwrap(), newest);
        let older = lookup("small", "~1.0").unwrap();
        assert_eq!(older, lookup("small", "1.0.0").unwrap());
        assert_eq!(older.version, "v1.0.0");
        assert_eq!(older.url, "https://cdn.example.org/small-1.0.0.tgz");
        assert_eq!(older.digest, None);
    }

    #[test]
    fn missing_version_unlisted_chart_and_bad_link_differ() {
        let missing = lookup("small", "3.0.0").unwrap_err();
        assert!(
            matches!(&missing, ChartProblem::VersionNotFound { newest: Some(newest) } if newest == "1.1.0"),
            "{missing}"
        );
        let unlisted = lookup("large", "1.0.0").unwrap_err();
        assert!(matches!(unlisted, ChartProblem::Unlisted), "{unlisted}");
        let unlinked = lookup("small", "0.9.0").unwrap_err();
        assert!(matches!(unlinked, ChartProblem::EntryUrl), "{unlinked}");
    }

    #[test]
    fn rubbish_is_not_an_index() {
        for rubbish in [
            b"<!doctype html><p>Hello".as_slice(),
            b"[]",
            b"",
            b"apiVersion: v1",
            b"a: b: c",
            b"\0",
            b"\xff\xfe",
        ] {
            let result = find_entry("small", &VersionSelector::Newest, rubbish);
            assert!(
                matches!(result, Err(ChartProblem::Index(_))),
                "{rubbish:?}: {result:?}"
            );
        }
    }

    #[test]
    fn index_larger_than_parser_limits_is_read() {
        let mut index = String::from("entries:\n  big:\n");
        for number in 0..30_000 {
            index.push_str(&format!(
                "    - {{version: 0.0.{number}, urls: [a, b, c, d, e]}}\n"
            ));
        }
        let newest = find_entry("big", &VersionSelector::Newest, index.as_bytes());
        assert_eq!(newest.unwrap().version, "0.0.29999");
    }
}
