//! Registry of members that may connect, each with its desired state. Discovery publishes the states; sessions and
//! proxies read them.

pub mod agent_keys;
pub mod arbiter;
mod claims;
pub mod deployment_orders;
pub mod duplicates;
pub mod found;
pub mod member;
pub mod observation;
pub mod placement_orders;
pub mod remote_orders;
pub(crate) mod tenant_reports;
pub(crate) mod tenant_summary;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_types::desired::Version;
use tokio::sync::watch;

use crate::members::member::{Member, MemberSnapshot, refuse};

/// Message for an agent of a deleted EdgeCluster.
pub const GONE: &str = "its EdgeCluster is gone; run 'kubectl krypton join' again";

/// Why the registry has no such member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotFound {
    /// The hub has not listed the EdgeClusters yet, or not since it became leader.
    NotYet,
    Gone,
}

#[derive(Debug, Default)]
struct Registry {
    listed: bool,
    /// Start of the leader term in which the hub must list the EdgeClusters before it admits agents.
    awaited: Option<BootTime>,
    members: BTreeMap<String, Arc<Member>>,
}

/// All members, by name.
#[derive(Debug, Default)]
pub struct Members {
    registry: Mutex<Registry>,
}

impl Members {
    /// Starts a leader term. [`Self::get`] finds no member until the EdgeClusters are [listed](Self::listed_in)
    /// in it.
    pub fn anew(&self, since: BootTime) {
        self.lock().awaited = Some(since);
    }

    /// Records that the EdgeClusters were listed in this term and the admissions derive from that list.
    pub fn listed_in(&self, since: Option<BootTime>) {
        let mut registry = self.lock();
        if registry.awaited == since {
            registry.awaited = None;
        }
    }

    /// Returns the member of this name.
    ///
    /// # Errors Fails if there is no such member, or if the EdgeClusters are not listed yet.
    pub fn get(&self, name: &str) -> Result<Arc<Member>, NotFound> {
        let registry = self.lock();
        if registry.awaited.is_some() {
            return Err(NotFound::NotYet);
        }
        match registry.members.get(name) {
            Some(member) => Ok(Arc::clone(member)),
            None if registry.listed => Err(NotFound::Gone),
            None => Err(NotFound::NotYet),
        }
    }

    /// Returns the version of each member's desired state and the time since when it applies.
    pub fn wanted(&self) -> BTreeMap<String, (Version, BootTime)> {
        let registry = self.lock();
        let wanted = registry.members.iter().filter_map(|(name, member)| {
            let published = member.published.get();
            let published = published.as_ref()?;
            Some((name.clone(), (published.desired.version, published.since)))
        });
        wanted.collect()
    }

    /// Returns a snapshot of each member, by name.
    pub fn snapshots(&self) -> BTreeMap<String, MemberSnapshot> {
        let registry = self.lock();
        let members = registry.members.iter();
        let snapshot = |member: &Member| MemberSnapshot {
            uid: member.uid.clone(),
            published: member.published.get(),
            refused: member.admission.get().refused.is_some(),
            sessions: member
                .lock()
                .iter()
                .map(|(replica, (number, _))| (replica.clone(), *number))
                .collect(),
        };
        members
            .map(|(name, member)| (name.clone(), snapshot(member)))
            .collect()
    }

    /// Returns the member of this EdgeCluster. A new UID creates a new member and rejects the sessions of the
    /// old one.
    pub fn enter(&self, name: &str, uid: &str) -> Arc<Member> {
        let mut registry = self.lock();
        let published = match registry.members.get(name) {
            Some(found) if found.uid == uid => return Arc::clone(found),
            Some(found) => {
                refuse(
                    found,
                    "its EdgeCluster was made anew; run 'kubectl krypton join' again",
                );
                Arc::clone(&found.published)
            }
            None => Arc::new(watch::Sender::new(None)),
        };
        let member = Arc::new(Member::new(uid.to_owned(), published));
        registry
            .members
            .insert(name.to_owned(), Arc::clone(&member));
        member
    }

    /// Rejects the sessions of this EdgeCluster's member immediately, because a reconcile of a large fleet
    /// takes time.
    pub fn cut(&self, name: &str, uid: Option<&str>, why: &str) {
        let registry = self.lock();
        let member = registry.members.get(name);
        if let Some(member) = member.filter(|member| Some(&*member.uid) == uid) {
            refuse(member, why);
        }
    }

    /// Rejects the sessions of members without an EdgeCluster, once all EdgeClusters are known. Keeps the entry
    /// of a member that is still needed, because its EdgeCluster is about to be created.
    pub fn keep(&self, has_object: impl Fn(&str) -> bool, needed: impl Fn(&str) -> bool) {
        let mut registry = self.lock();
        registry.listed = true;
        registry.members.retain(|name, member| {
            let here = has_object(name);
            if !here {
                refuse(member, GONE);
            }
            here || needed(name)
        });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn cut_hits_only_member_with_matching_uid() {
        let members = Members::default();
        let (one, other) = (members.enter("a", "u"), members.enter("b", "u"));
        members.cut("a", Some("before"), "gone");
        members.cut("a", None, "gone");
        assert_eq!(one.admission.get().refused, None);
        members.cut("a", Some("u"), "gone");
        assert_eq!(one.admission.get().refused.as_deref(), Some("gone"));
        assert_eq!(other.admission.get().refused, None);
    }

    #[test]
    fn members_are_unknown_until_tenure_lists_edge_clusters() {
        let members = Members::default();
        members.enter("a", "u");
        let [first, second] = [1, 2].map(|since| BootTime(Duration::from_secs(since)));
        members.anew(second);
        for of in [None, Some(first)] {
            members.keep(|name| name == "a", |_| false);
            members.listed_in(of);
            assert_eq!(members.get("a").unwrap_err(), NotFound::NotYet);
            assert_eq!(members.get("b").unwrap_err(), NotFound::NotYet);
        }
        members.listed_in(Some(second));
        assert!(members.get("a").is_ok());
        assert_eq!(members.get("b").unwrap_err(), NotFound::Gone);
    }

    #[test]
    fn member_is_unknown_until_listed_and_then_gone() {
        let members = Members::default();
        assert_eq!(members.get("a").unwrap_err(), NotFound::NotYet);
        members.enter("a", "u");
        members.keep(|name| name == "a", |_| false);
        assert_eq!(members.get("b").unwrap_err(), NotFound::Gone);
        let before = members.get("a").unwrap();
        let after = members.enter("a", "v");
        assert!(before.admission.get().refused.is_some());
        assert_eq!(after.admission.get().refused, None);
    }
}
