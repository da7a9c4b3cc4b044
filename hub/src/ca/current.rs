//! The current CA. A rotation, by this hub or another, replaces it while the hub runs.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use krypton_runtime::newest::Newest as _;
use tokio::sync::watch;
use tonic::Status;

use super::Authority;
use crate::leader::Leader;

/// Shared by all code that signs, verifies or publishes roots.
#[derive(Debug)]
pub struct CurrentAuthority(watch::Sender<Arc<Authority>>);

impl CurrentAuthority {
    pub fn new(authority: Authority) -> Self {
        Self(watch::Sender::new(Arc::new(authority)))
    }

    pub fn get(&self) -> Arc<Authority> {
        self.0.get()
    }

    pub fn subscribe(&self) -> watch::Receiver<Arc<Authority>> {
        self.0.subscribe()
    }

    /// Returns the CA for a certificate. The agent then trusts only its roots.
    ///
    /// # Errors
    /// Returns `Unavailable` if an earlier leader may have changed the CA since this hub read it.
    pub fn get_to_sign(&self, leader: &Leader) -> Result<Arc<Authority>, Status> {
        let authority = self.get();
        let epoch = leader.leader_term().map_or(0, |term| term.epoch);
        match authority.is_current(epoch) {
            true => Ok(authority),
            false => Err(Status::unavailable(
                "this hub has just become the leader and has not read its CA yet; retry",
            )),
        }
    }

    /// Uses the CA that this hub read. Returns false if the roots are unchanged.
    pub fn replace(&self, mut next: Authority) -> bool {
        self.0.send_if_modified(|current| {
            let is_changed = current.roots != next.roots;
            if is_changed {
                next.epoch = current.epoch.load(Ordering::Relaxed).into();
                *current = Arc::new(next);
            }
            is_changed
        })
    }

    /// Records that this hub read the CA in the leader term `epoch`.
    pub fn confirm(&self, epoch: u64) {
        self.0
            .send_if_modified(|current| current.epoch.swap(epoch, Ordering::Relaxed) != epoch);
    }
}
