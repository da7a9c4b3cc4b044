//! Which clusters the members have turned out to be, by UID: filled by proxies and sessions, read by the
//! fleet.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

/// What each way to a member has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ClusterUids {
    /// The hub's own; the outer `None` before its first attempt.
    hub: Option<Option<String>>,
    /// What the agent has said.
    agent: Option<String>,
}

/// Which clusters the members have turned out to be.
#[derive(Debug, Default)]
pub struct Found {
    members: Mutex<BTreeMap<String, ClusterUids>>,
    /// Told of every change.
    pub changed: Notify,
}

impl Found {
    /// `None` when the member was tried and did not say.
    pub fn set(&self, member: &str, uid: Option<String>) {
        self.change(member, |ways| {
            let slot = ways.hub.get_or_insert(None);
            // A cluster that does not answer any more is still the one it was.
            if uid.is_some() {
                *slot = uid;
            }
        });
    }

    /// What the member's agent says.
    pub fn set_by_agent(&self, member: &str, uid: String) {
        self.change(member, |ways| ways.agent = Some(uid));
    }

    /// The hub has no way of its own any more.
    pub fn forget(&self, member: &str) {
        self.change(member, |ways| ways.hub = None);
    }

    /// What an agent said is of another EdgeCluster.
    pub fn forget_agent(&self, member: &str) {
        self.change(member, |ways| ways.agent = None);
    }

    /// The member is no more.
    pub fn remove(&self, member: &str) {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.remove(member);
    }

    /// `None` before the first attempt. The agent is on the cluster, so its word goes first.
    pub fn get(&self, member: &str) -> Option<Option<String>> {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let ways = members.get(member)?;
        match &ways.agent {
            Some(uid) => Some(Some(uid.clone())),
            None => ways.hub.clone(),
        }
    }

    fn change(&self, member: &str, change: impl FnOnce(&mut ClusterUids)) {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let ways = members.entry(member.to_owned()).or_default();
        let before = ways.clone();
        change(ways);
        let changed = *ways != before;
        drop(members);
        if changed {
            self.changed.notify_one();
        }
    }
}
