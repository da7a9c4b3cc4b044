//! The newest report of each key from one member. Performs no I/O.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use krypton_types::report_digest::ReportDigest;

/// Earlier reports stand until the next full report is complete.
#[derive(Debug)]
pub(super) struct ReportSet<K, R> {
    reports: BTreeMap<K, R>,
    /// Keys reported since the start of the full report. Not updated after its end.
    current: BTreeSet<K>,
    complete: bool,
    digest: ReportDigest<K>,
}

impl<K, R> Default for ReportSet<K, R> {
    fn default() -> Self {
        Self {
            reports: BTreeMap::new(),
            current: BTreeSet::new(),
            complete: false,
            digest: ReportDigest::default(),
        }
    }
}

impl<K: Ord + Clone, R> ReportSet<K, R> {
    /// Sets a report with its part of the digest. Returns the report before it.
    pub(super) fn insert(&mut self, key: K, report: R, digest_part: u128) -> Option<R> {
        if !self.complete {
            self.current.insert(key.clone());
        }
        self.digest.set_part(&key, Some(digest_part));
        self.reports.insert(key, report)
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<R> {
        self.current.remove(key);
        self.digest.set_part(key, None);
        self.reports.remove(key)
    }

    pub(super) fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&R>
    where
        K: Borrow<Q>,
    {
        self.reports.get(key)
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = (&K, &R)> {
        self.reports.iter()
    }

    /// Returns the reports after this key, in order.
    pub(super) fn after(&self, key: Option<&K>) -> impl Iterator<Item = (&K, &R)> {
        let from = key.map_or(Bound::Unbounded, Bound::Excluded);
        self.reports.range((from, Bound::Unbounded))
    }

    pub(super) fn len(&self) -> usize {
        self.reports.len()
    }

    /// Returns the number of reports since the start of the full report.
    pub(super) fn current_len(&self) -> usize {
        match self.complete {
            true => self.reports.len(),
            false => self.current.len(),
        }
    }

    /// Whether the current reporter has sent this report.
    pub(super) fn is_current(&self, key: &K) -> bool {
        self.complete || self.current.contains(key)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Starts a full report.
    pub(super) fn begin_full_report(&mut self) {
        self.current.clear();
        self.complete = false;
    }

    /// Ends the full report. Returns the reports that it does not contain, which are dropped.
    pub(super) fn finish_full_report(&mut self) -> BTreeMap<K, R> {
        if self.complete {
            return BTreeMap::new();
        }
        self.complete = true;
        let current = std::mem::take(&mut self.current);
        self.digest.retain(|key| current.contains(key));
        let dropped = self.reports.extract_if(.., |key, _| !current.contains(key));
        dropped.collect()
    }

    /// Number of reports, and their digest.
    pub(super) fn digest(&self) -> (u64, u128) {
        self.digest.value()
    }
}
