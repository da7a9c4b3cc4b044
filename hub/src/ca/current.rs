//! The current CA. A rotation, by this hub or another, replaces it while the hub runs.

use std::sync::Arc;

use krypton_runtime::newest::Newest as _;
use tokio::sync::watch;

use super::Authority;

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

    /// Returns false if the CA is unchanged.
    pub fn replace(&self, next: Authority) -> bool {
        self.0.send_if_modified(|current| {
            let is_changed = current.roots != next.roots;
            if is_changed {
                *current = Arc::new(next);
            }
            is_changed
        })
    }
}
