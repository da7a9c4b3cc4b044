//! Shuts down the process: after a signal, or because one of its tasks ended.

use krypton_runtime::tasks::Tasks;
use krypton_types::error_chain::chain;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::{AGENTS_TASK, ELECTION_TASK, FLEET_TASK};
use crate::leader::{self, ElectionHandle};

/// All running tasks, in the order in which they end.
pub(super) struct Shutdown {
    pub(super) election_handle: ElectionHandle,
    /// Tasks that run until the hub stops.
    pub(super) permanent: Tasks,
    /// Tasks that may end before.
    pub(super) tasks: JoinSet<()>,
    /// Ends the agents' port and the fleet, after another hub could have become the leader.
    pub(super) serving: CancellationToken,
    /// Ends the writers of home.
    pub(super) home: CancellationToken,
    pub(super) stop: CancellationToken,
    pub(super) failure: Option<anyhow::Error>,
}

impl Shutdown {
    /// Waits for a task that must not end. Then stops the hub, and its supervisor restarts it.
    pub(super) async fn task_ended(&mut self) {
        let error: anyhow::Error = tokio::select! {
            error = self.permanent.wait_any() => {
                tracing::error!(error = %chain(&error), "the hub cannot continue; exiting for a restart");
                error.into()
            }
            error = next_panic(&mut self.tasks) => {
                tracing::error!(%error, "a task failed; exiting for a restart");
                error.into()
            }
        };
        self.failure = Some(error);
        self.stop.cancel();
    }

    /// Ends all tasks.
    ///
    /// # Errors
    /// The reason if the hub did not stop by a signal, or a task that panicked.
    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        // First of all, so another hub can lead while this one waits for Helm. It keeps the Leases of those
        // members until then.
        self.election_handle.leave().await;
        let permanent = &mut self.permanent;
        let released =
            tokio::time::timeout(leader::RELEASE_TIMEOUT, permanent.wait_for(ELECTION_TASK)).await;
        if released.is_err() {
            tracing::warn!("releasing the leader's Lease takes long; it expires later");
        }
        self.serving.cancel();
        tracing::info!("shutting down; waiting for Helm processes");
        let agents = self.permanent.wait_for(AGENTS_TASK).await;
        let fleet = self.permanent.wait_for(FLEET_TASK).await;
        self.home.cancel();
        self.permanent.wait_all().await.and(agents).and(fleet)?;
        released.unwrap_or(Ok(()))?;
        self.tasks.abort_all();
        match self.failure {
            Some(error) => Err(error),
            None => {
                tracing::info!("stopped");
                Ok(())
            }
        }
    }
}

/// Waits for the next task that panicked.
async fn next_panic(tasks: &mut JoinSet<()>) -> JoinError {
    loop {
        match tasks.join_next().await {
            Some(Err(error)) => return error,
            Some(Ok(())) => {}
            None => std::future::pending().await,
        }
    }
}
