//! Stores the UIDs of the members' clusters. Proxies and sessions write them, and the fleet reads them.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

/// UID of a member's cluster, by source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ClusterUids {
    /// From the hub's own connection. The outer `None` means that it has not been tried yet.
    hub: Option<Option<String>>,
    /// From the agent's session.
    agent: Option<String>,
}

/// UIDs of the members' clusters.
#[derive(Debug, Default)]
pub struct Found {
    members: Mutex<BTreeMap<String, ClusterUids>>,
    /// Notified of every change.
    pub changed: Notify,
}

impl Found {
    /// Sets the UID from the hub's own connection; `None` if the cluster did not respond.
    pub fn set(&self, member: &str, uid: Option<String>) {
        self.change(member, |ways| {
            let slot = ways.hub.get_or_insert(None);
            // A cluster that stops responding keeps its identity.
            if uid.is_some() {
                *slot = uid;
            }
        });
    }

    /// Sets the UID that the member's agent reports.
    pub fn set_by_agent(&self, member: &str, uid: String) {
        self.change(member, |ways| ways.agent = Some(uid));
    }

    /// Forgets the result of the hub's own connection, because it has none now.
    pub fn forget(&self, member: &str) {
        self.change(member, |ways| ways.hub = None);
    }

    /// Forgets the agent's report, because it belongs to another EdgeCluster.
    pub fn forget_agent(&self, member: &str) {
        self.change(member, |ways| ways.agent = None);
    }

    /// Removes a deleted member.
    pub fn remove(&self, member: &str) {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.remove(member);
    }

    /// Returns `None` before the first attempt. The agent's report takes precedence, because it runs on the
    /// cluster.
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
