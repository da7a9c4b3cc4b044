//! Version of the cluster. It is queried only while an owner has failed, as an upgrade of the cluster may fix the
//! failure.

use std::time::Duration;

use krypton_runtime::call::call;
use krypton_runtime::clock::BootTime;
use krypton_types::error_chain::chain;
use tokio::task::{JoinError, JoinSet};

use crate::run_loop::Reconciler;

const QUERY_PAUSE: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct ClusterVersion {
    known: Option<String>,
    due: BootTime,
    pub(super) queries: JoinSet<Result<String, String>>,
}

impl ClusterVersion {
    /// Stores the version. Returns true if it differs from the previous one. The first version does not count.
    fn update(&mut self, version: String) -> bool {
        let previous = self.known.replace(version);
        previous.is_some() && previous != self.known
    }

    /// Returns the time of the next query, if one is needed.
    fn next_query(&self) -> Option<BootTime> {
        self.queries.is_empty().then_some(self.due)
    }
}

impl Reconciler {
    fn has_failed_owner(&self) -> bool {
        let mut slots = self.owner_states.values();
        slots.any(|slot| slot.memory.failure.is_some())
    }

    pub(super) fn check_version(&mut self, now: BootTime) {
        let due = self
            .cluster_version
            .next_query()
            .is_some_and(|due| due <= now);
        if !due || !self.permitted || !self.has_failed_owner() {
            return;
        }
        self.cluster_version.due = BootTime(now.0 + QUERY_PAUSE);
        let client = self.member.client.clone();
        self.cluster_version.queries.spawn(async move {
            let version = call("reading /version", client.apiserver_version()).await;
            let version = version.map_err(|error| chain(&error))?;
            Ok(version.git_version)
        });
    }

    /// Returns the time of the next query, or `None` if none is needed.
    pub(super) fn version_wake(&self) -> Option<BootTime> {
        let due = self.cluster_version.next_query()?;
        (self.permitted && self.has_failed_owner()).then_some(due)
    }

    pub(super) fn finish_version(&mut self, done: Result<Result<String, String>, JoinError>) {
        match done {
            Ok(Ok(version)) => {
                if self.cluster_version.update(version) {
                    tracing::info!(member = %self.member.name, version = self.cluster_version.known,
                        "the cluster's version changed; retrying failed releases");
                    for slot in self.owner_states.values_mut() {
                        slot.memory.cluster_changed();
                    }
                    self.queue_all();
                }
            }
            Ok(Err(problem)) => {
                tracing::debug!(member = %self.member.name, %problem, "failed to read the cluster's version");
            }
            Err(error) => {
                tracing::error!(%error, "reading the cluster's version failed")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_version_is_baseline_and_differences_are_changes() {
        let mut cluster_version = ClusterVersion::default();
        let versions = ["v1.36.0", "v1.36.0", "v1.36.1", "v1.36.1", "v1.36.0"];
        let changed = versions.map(|version| cluster_version.update(version.to_owned()));
        assert_eq!(changed, [false, false, true, false, true]);
    }
}
