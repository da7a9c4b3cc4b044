//! State of each chart in the cache, for dumps.

use std::sync::PoisonError;

use krypton_runtime::clock::BootTime;

use super::{ChartCache, ChartFault, ChartRef, Memory};

/// State of a requested chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheState {
    Here {
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
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let cache_state = slots.iter().filter_map(|(chart, slot)| {
            // A locked entry has a fetch in progress.
            let cache_state = match slot.try_lock().as_deref() {
                Err(_) => CacheState::Fetching,
                Ok(Memory::Nothing) => return None,
                Ok(Memory::Have(fetched, since, _)) => CacheState::Here {
                    since: *since,
                    version: fetched.version.clone(),
                    sha256: fetched.sha256.clone(),
                },
                Ok(Memory::Failed {
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
            Some((chart.clone(), cache_state))
        });
        cache_state.collect()
    }
}
