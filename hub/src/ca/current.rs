//! The current CA. A rotation, by this hub or another, replaces it while the hub runs.

use std::sync::Arc;

use krypton_runtime::newest::Newest as _;
use tokio::sync::watch;

use super::Authority;

/// One slot, shared by all code that signs, verifies or publishes roots.
#[derive(Debug)]
pub struct Live(watch::Sender<Arc<Authority>>);

impl Live {
    pub fn new(authority: Authority) -> Self {
        Self(watch::Sender::new(Arc::new(authority)))
    }

    pub fn now(&self) -> Arc<Authority> {
        self.0.get()
    }

    pub fn subscribe(&self) -> watch::Receiver<Arc<Authority>> {
        self.0.subscribe()
    }

    /// Returns false if the CA is unchanged.
    pub fn replace(&self, next: Authority) -> bool {
        self.0.send_if_modified(|present| {
            let news = present.roots != next.roots;
            if news {
                *present = Arc::new(next);
            }
            news
        })
    }
}
