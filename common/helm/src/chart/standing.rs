//! State of each chart in the cache, for dumps.

use std::sync::PoisonError;

use krypton_runtime::clock::BootTime;

use super::{ChartCache, ChartFault, ChartRef, Memory};

/// State of a requested chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
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
    pub fn standing(&self) -> Vec<(ChartRef, Standing)> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let standing = slots.iter().filter_map(|(chart, slot)| {
            // A locked entry has a fetch in progress.
            let standing = match slot.try_lock().as_deref() {
                Err(_) => Standing::Fetching,
                Ok(Memory::Nothing) => return None,
                Ok(Memory::Have(fetched, since, _)) => Standing::Here {
                    since: *since,
                    version: fetched.version.clone(),
                    sha256: fetched.sha256.clone(),
                },
                Ok(Memory::Failed {
                    error,
                    times,
                    since,
                    until,
                }) => Standing::Failed {
                    fault: error.fault(),
                    times: *times,
                    since: *since,
                    until: *until,
                },
            };
            Some((chart.clone(), standing))
        });
        standing.collect()
    }
}
