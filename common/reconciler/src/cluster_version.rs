//! Version of the cluster. It is queried only while an owner has failed, as an upgrade of the cluster may fix the
//! failure.

use std::time::Duration;

use krypton_runtime::call::call;
use krypton_runtime::clock::BootTime;
use krypton_types::error_chain::chain;
use tokio::task::{JoinError, JoinSet};

use crate::run_loop::Reconciler;

const ASK_EVERY: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct ClusterVersion {
    known: Option<String>,
    due: BootTime,
    pub(super) asking: JoinSet<Result<String, String>>,
}

impl ClusterVersion {
    /// Stores the version. Returns true if it differs from the previous one. The first version does not count.
    fn is_another(&mut self, answer: String) -> bool {
        let before = self.known.replace(answer);
        before.is_some() && before != self.known
    }

    /// Returns the time of the next query, if one is needed.
    fn next(&self) -> Option<BootTime> {
        self.asking.is_empty().then_some(self.due)
    }
}

impl Reconciler {
    fn something_failed(&self) -> bool {
        let mut slots = self.slots.values();
        slots.any(|slot| slot.memory.failure.is_some())
    }

    pub(super) fn check_version(&mut self, now: BootTime) {
        let due = self.version.next().is_some_and(|due| due <= now);
        if !due || !self.permitted || !self.something_failed() {
            return;
        }
        self.version.due = BootTime(now.0 + ASK_EVERY);
        let client = self.member.client.clone();
        self.version.asking.spawn(async move {
            let version = call("reading /version", client.apiserver_version()).await;
            let version = version.map_err(|error| chain(&error))?;
            Ok(version.git_version)
        });
    }

    /// Returns the time of the next query, or `None` if none is needed.
    pub(super) fn version_wake(&self) -> Option<BootTime> {
        let due = self.version.next()?;
        (self.permitted && self.something_failed()).then_some(due)
    }

    pub(super) fn finish_version(&mut self, done: Result<Result<String, String>, JoinError>) {
        match done {
            Ok(Ok(version)) => {
                if self.version.is_another(version) {
                    tracing::info!(member = %self.member.name, version = self.version.known,
                        "the cluster's version changed; retrying failed releases");
                    for slot in self.slots.values_mut() {
                        slot.memory.cluster_changed();
                    }
                    self.look_at_all();
                }
            }
            Ok(Err(problem)) => {
                tracing::debug!(member = %self.member.name, %problem, "asking for the version of the cluster failed");
            }
            Err(error) => {
                tracing::error!(%error, "asking for the version of the cluster ended badly")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_version_is_baseline_and_differences_are_changes() {
        let mut version = ClusterVersion::default();
        let answers = ["v1.36.0", "v1.36.0", "v1.36.1", "v1.36.1", "v1.36.0"];
        let changed = answers.map(|answer| version.is_another(answer.to_owned()));
        assert_eq!(changed, [false, false, true, false, true]);
    }
}
