//! Which clusters the members have turned out to be, by UID: filled by the proxies, read by the fleet.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

/// Which clusters the members have turned out to be.
#[derive(Debug, Default)]
pub struct Found {
    uids: Mutex<BTreeMap<String, Option<String>>>,
    /// Told of every change.
    pub changed: Notify,
}

impl Found {
    /// `None` when the member was tried and did not say.
    pub fn set(&self, member: &str, uid: Option<String>) {
        let mut uids = self.uids.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = uids.entry(member.to_owned()).or_insert(None);
        // A cluster that does not answer any more is still the one it was.
        if uid.is_some() {
            *slot = uid;
        }
        drop(uids);
        self.changed.notify_one();
    }

    pub fn forget(&self, member: &str) {
        self.uids
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(member);
    }

    /// `None` before the first attempt.
    pub fn get(&self, member: &str) -> Option<Option<String>> {
        self.uids
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(member)
            .cloned()
    }
}
