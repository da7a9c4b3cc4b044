//! State of each chart in the cache, for dumps.

use std::sync::PoisonError;

use krypton_runtime::clock::BootTime;

use super::{ChartCache, ChartFault, ChartRef, EntryState};

/// State of a requested chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheState {
    Cached {
        since: BootTime,
        /// The version in the chart's `Chart.yaml`.
        version: String,
        sha256: String,
    },
    Failed {
        fault: ChartFault,
        /// Number of consecutive failures.
        times: u32,
        /// Time of the last failure.
        since: BootTime,
        /// Time of the next retry.
        until: BootTime,
    },
    /// A fetch is in progress.
    Fetching,
}

impl ChartCache {
    /// Returns the state of all cached charts in no particular order. Does not wait for fetches.
    pub fn cache_state(&self) -> Vec<(ChartRef, CacheState)> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let states = entries.iter().filter_map(|(chart, entry)| {
            // A locked entry has a fetch in progress.
            let state = match entry.try_lock().as_deref() {
                Err(_) => CacheState::Fetching,
                Ok(EntryState::Empty) => return None,
                Ok(EntryState::Loaded(fetched, since, _)) => CacheState::Cached {
                    since: *since,
                    version: fetched.version.clone(),
                    sha256: fetched.sha256.clone(),
                },
                Ok(EntryState::Failed {
                    error,
                    times,
                    since,
                    until,
                }) => CacheState::Failed {
                    fault: error.fault(),
                    times: *times,
                    since: *since,
                    until: *until,
                },
            };
            Some((chart.clone(), state))
        });
        states.collect()
    }
}
