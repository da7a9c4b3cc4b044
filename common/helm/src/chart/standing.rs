//! How each chart of the cache stands, for who looks for what is wrong.

use std::sync::PoisonError;

use krypton_runtime::clock::BootTime;

use super::{ChartCache, ChartFault, ChartRef, Memory};

/// How a chart that was asked for stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    Here {
        since: BootTime,
        /// As in its Chart.yaml.
        version: String,
        sha256: String,
    },
    Failed {
        fault: ChartFault,
        /// How often in a row.
        times: u32,
        /// The last time.
        since: BootTime,
        /// Before that it is not tried again.
        until: BootTime,
    },
    /// On its way just now.
    Fetching,
}

impl ChartCache {
    /// All that are remembered, in no order. Nobody is kept waiting.
    pub fn standing(&self) -> Vec<(ChartRef, Standing)> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let standing = slots.iter().filter_map(|(chart, slot)| {
            // Whoever holds one fetches just now.
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
