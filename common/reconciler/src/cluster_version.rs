//! Version of the cluster. It is queried only while an owner has failed, as an upgrade of the cluster may fix the
//! failure.

use std::time::Duration;

use krypton_runtime::call::call;
use krypton_runtime::clock::BootTime;
use krypton_types::error_chain::chain;
use kube::Client;
use tokio::task::{JoinError, JoinSet};

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

    /// Returns the time of the next query, unless one runs.
    pub(super) fn next_query(&self) -> Option<BootTime> {
        self.queries.is_empty().then_some(self.due)
    }

    /// Starts a query.
    pub(super) fn query(&mut self, client: &Client, now: BootTime) {
        self.due = now + QUERY_PAUSE;
        let client = client.clone();
        self.queries.spawn(async move {
            let version = call("reading /version", client.apiserver_version()).await;
            let version = version.map_err(|error| chain(&error))?;
            Ok(version.git_version)
        });
    }

    /// Stores the result of a query. Returns true if the version has changed.
    pub(super) fn finish(
        &mut self,
        done: Result<Result<String, String>, JoinError>,
        member: &str,
    ) -> bool {
        match done {
            Ok(Ok(version)) => {
                let changed = self.update(version);
                if changed {
                    tracing::info!(%member, version = self.known,
                        "the cluster's version changed; retrying failed releases");
                }
                changed
            }
            Ok(Err(problem)) => {
                tracing::debug!(%member, %problem, "failed to read the cluster's version");
                false
            }
            Err(error) => {
                tracing::error!(%error, "reading the cluster's version failed");
                false
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
