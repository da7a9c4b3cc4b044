//! Digest of a full report. Two sides compare it to verify that they hold the same reports, without sending them
//! again.

use std::collections::BTreeMap;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::tenant::TenantKey;

/// Digest of a set of reports on Tenants or KryptonDeployments. It does not depend on their order. Replacing one
/// report takes constant time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportDigest<K = TenantKey> {
    parts: BTreeMap<K, u128>,
    sum: u128,
}

impl<K> Default for ReportDigest<K> {
    fn default() -> Self {
        Self {
            parts: BTreeMap::new(),
            sum: 0,
        }
    }
}

impl<K: Ord + Clone> ReportDigest<K> {
    /// Replaces the previous report with `report`. `None` removes it.
    pub fn set(&mut self, key: &K, report: Option<&impl Serialize>)
    where
        K: Serialize,
    {
        self.set_part(key, report.map(|report| part(key, report)));
    }

    /// Like `set`, with the result of [`part`].
    pub fn set_part(&mut self, key: &K, part: Option<u128>) {
        let previous = match part {
            Some(part) => {
                self.sum = self.sum.wrapping_add(part);
                self.parts.insert(key.clone(), part)
            }
            None => self.parts.remove(key),
        };
        self.sum = self.sum.wrapping_sub(previous.unwrap_or_default());
    }

    /// Keeps only the reports for which `keep` returns `true`.
    pub fn retain(&mut self, keep: impl Fn(&K) -> bool) {
        let sum = &mut self.sum;
        self.parts.retain(|key, part| {
            let is_kept = keep(key);
            if !is_kept {
                *sum = sum.wrapping_sub(*part);
            }
            is_kept
        });
    }

    /// Returns the number of reports and the digest.
    pub fn value(&self) -> (u64, u128) {
        (self.parts.len() as u64, self.sum)
    }
}

/// Returns the combined value of several digests, as a heartbeat contains it.
pub fn combine<const N: usize>(digests: [(u64, u128); N]) -> (u64, u128) {
    digests
        .into_iter()
        .fold((0, 0), |(count, sum), (reports, part)| {
            (count + reports, sum.wrapping_add(part))
        })
}

/// Returns one report's part of the digest. Both sides must trim the report first.
pub fn part(key: &impl Serialize, report: &impl Serialize) -> u128 {
    let content = serde_json::json!([key, report]).to_string();
    let digest: [u8; 32] = Sha256::digest(content.as_bytes()).into();
    let first = digest.first_chunk::<16>();
    first.map_or(0, |first| u128::from_be_bytes(*first))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::conditions::{State, Truth};
    use crate::labels::Labels;
    use crate::tenant::TenantReport;

    fn key(name: u8) -> TenantKey {
        TenantKey::new("default", format!("t{name}"))
    }

    fn report(generation: i64) -> TenantReport {
        TenantReport::new(generation, State::new(Truth::True, "Installed", ""))
    }

    proptest! {
        #[test]
        fn digest_depends_only_on_final_report_set(
            steps in proptest::collection::vec((0_u8..6, proptest::option::of(0_i64..4)), 0..60)
        ) {
            let mut stepwise = ReportDigest::default();
            let mut set = BTreeMap::new();
            for (name, generation) in steps {
                let report = generation.map(report);
                stepwise.set(&key(name), report.as_ref());
                match report {
                    Some(report) => set.insert(name, report),
                    None => set.remove(&name),
                };
            }
            let mut at_once = ReportDigest::default();
            for (name, report) in set.iter().rev() {
                at_once.set(&key(*name), Some(report));
            }
            prop_assert_eq!(stepwise.value(), at_once.value());
        }
    }

    #[test]
    fn digest_differs_for_changed_or_missing_reports() {
        let digest_of = |reports: &[(u8, i64)]| {
            let mut digest = ReportDigest::default();
            for (name, generation) in reports {
                digest.set(&key(*name), Some(&report(*generation)));
            }
            digest.value()
        };
        let base = digest_of(&[(1, 1), (2, 2)]);
        assert_ne!(base, digest_of(&[(1, 2), (2, 1)]));
        assert_ne!(base, digest_of(&[(1, 1), (3, 2)]));
        assert_ne!(base, digest_of(&[(1, 1)]));
        let mut digest = ReportDigest::default();
        digest.set(&key(1), Some(&report(1)));
        digest.set(&key(2), Some(&report(2)));
        digest.retain(|other| *other == key(1));
        assert_eq!(digest.value(), digest_of(&[(1, 1)]));
        let labelled = TenantReport {
            labels: Labels::new(&[("team".to_owned(), "a".to_owned())].into()),
            ..report(1)
        };
        digest.set(&key(1), Some(&labelled));
        assert_ne!(digest.value(), digest_of(&[(1, 1)]));
    }

    #[test]
    fn empty_labels_do_not_change_digest() {
        let json = serde_json::to_value(report(1)).unwrap();
        assert_eq!(json.get("labels"), None);
    }
}
