//! Registry of the fleet's members: admission, desired state, reports and observations.
//!
//! One lock covers all members. The stores of reports are locked after it, never before. No lock is taken while a watch
//! channel is locked.

pub mod agent_keys;
pub mod arbiter;
mod claims;
pub mod deployment_orders;
pub mod duplicates;
mod health;
pub mod member;
pub mod observation;
pub mod placement_orders;
pub mod remote_orders;
mod report_set;
pub mod tenant_reports;
pub(crate) mod tenant_summary;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::sync::Mutex;
use krypton_types::desired::Version;
use tokio::sync::{Notify, watch};

use crate::members::arbiter::Reporters;
use crate::members::claims::EpochClaims;
use crate::members::deployment_orders::DeploymentOrders;
use crate::members::member::{Member, MemberSnapshot, reject};
use crate::members::observation::{ClusterUids, MemberObservation};
use crate::members::placement_orders::PlacementOrders;
use crate::members::tenant_reports::TenantReports;

/// Message for an agent of a deleted EdgeCluster.
pub const GONE: &str = "its EdgeCluster is gone; run 'kubectl krypton join' again";

/// Why the registry has no such member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotFound {
    /// The hub has not listed the EdgeClusters yet, or not since it became leader.
    NotYet,
    Gone,
}

/// State of one member.
#[derive(Debug, Default)]
struct MemberEntry {
    /// `None` without an EdgeCluster.
    member: Option<Arc<Member>>,
    reporters: Reporters,
    /// `None` until something is observed.
    observation: Option<MemberObservation>,
    uids: ClusterUids,
}

impl MemberEntry {
    fn is_empty(&self) -> bool {
        self.member.is_none()
            && self.observation.is_none()
            && self.uids == ClusterUids::default()
            && self.reporters.is_idle()
    }
}

#[derive(Debug, Default)]
struct RegistryState {
    /// The EdgeClusters have been listed once.
    listed: bool,
    /// Start of the leader term in which the hub must list the EdgeClusters before it admits agents.
    awaited: Option<BootTime>,
    members: BTreeMap<String, MemberEntry>,
    fleet: CrossMemberState,
}

impl RegistryState {
    fn member(&self, name: &str) -> Option<&Arc<Member>> {
        self.members.get(name)?.member.as_ref()
    }
}

/// State of the registry that concerns several members.
#[derive(Debug, Default)]
struct CrossMemberState {
    /// Members whose observation or Tenant counts have changed.
    changed: BTreeSet<String>,
    /// Members to evaluate again at a certain time, even without a report.
    due: BTreeSet<(BootTime, String)>,
    /// The epoch that this hub issues.
    epoch: u64,
    epoch_claims: EpochClaims,
}

/// All members, by name, and the stores of their reports.
#[derive(Debug, Default)]
pub struct MemberRegistry {
    state: Mutex<RegistryState>,
    /// Notified when an observation or a Tenant count changes.
    pub changed: Notify,
    /// Notified when the UID of a member's cluster changes.
    pub uid_changed: Notify,
    due_changed: Notify,
    reports: Arc<TenantReports>,
    deployments: Arc<DeploymentOrders>,
    placements: Arc<PlacementOrders>,
    /// The latest epoch that a member has and this hub has not issued. It means that the home cluster was
    /// restored.
    ahead: watch::Sender<u64>,
}

/// One member, while the registry is locked.
struct LockedMember<'a> {
    registry: &'a MemberRegistry,
    name: &'a str,
    entry: &'a mut MemberEntry,
    fleet: &'a mut CrossMemberState,
}

impl MemberRegistry {
    pub fn new(reports: Arc<TenantReports>) -> Self {
        Self {
            reports,
            ..Self::default()
        }
    }

    /// Reports of the members on KryptonDeployments.
    pub fn deployments(&self) -> &Arc<DeploymentOrders> {
        &self.deployments
    }

    /// Reports of the members on placed Tenants.
    pub fn placements(&self) -> &Arc<PlacementOrders> {
        &self.placements
    }

    /// The latest epoch that a member has and this hub has not issued.
    pub fn ahead(&self) -> &watch::Sender<u64> {
        &self.ahead
    }

    /// Starts a leader term. [`Self::get`] finds no member until the EdgeClusters are [listed](Self::listed_in)
    /// in it.
    pub fn begin_term(&self, since: BootTime) {
        self.deployments.reset_for_term(since);
        self.placements.reset_for_term(since);
        self.reports.reset_targets();
        let mut state = self.state.lock();
        state.awaited = Some(since);
        let RegistryState { members, fleet, .. } = &mut *state;
        for (name, entry) in members {
            let mut member = LockedMember {
                registry: self,
                name,
                entry,
                fleet,
            };
            member.begin_term(since);
        }
    }

    /// Records that the EdgeClusters were listed in this term and the admissions derive from that list.
    pub fn listed_in(&self, since: Option<BootTime>) {
        let mut state = self.state.lock();
        if state.awaited == since {
            state.awaited = None;
        }
    }

    /// Returns the member of this name.
    ///
    /// # Errors
    /// Fails if there is no such member, or if the EdgeClusters are not listed yet.
    pub fn get(&self, name: &str) -> Result<Arc<Member>, NotFound> {
        let state = self.state.lock();
        if state.awaited.is_some() {
            return Err(NotFound::NotYet);
        }
        match state.member(name) {
            Some(member) => Ok(Arc::clone(member)),
            None if state.listed => Err(NotFound::Gone),
            None => Err(NotFound::NotYet),
        }
    }

    /// Returns the version of each member's desired state and the time since when it applies.
    pub fn desired_versions(&self) -> BTreeMap<String, (Version, BootTime)> {
        self.each_member(|member| {
            let published = member.published.get();
            let published = published.as_ref()?;
            Some((published.desired.version, published.since))
        })
    }

    /// Returns a snapshot of each member, by name.
    pub fn snapshots(&self) -> BTreeMap<String, MemberSnapshot> {
        self.each_member(|member| Some(member.snapshot()))
    }

    fn each_member<T>(&self, map: impl Fn(&Member) -> Option<T>) -> BTreeMap<String, T> {
        let state = self.state.lock();
        let mapped = state.members.iter().filter_map(|(name, entry)| {
            let mapped = map(entry.member.as_ref()?)?;
            Some((name.clone(), mapped))
        });
        mapped.collect()
    }

    /// Returns the member of this EdgeCluster. A new UID creates a new member and rejects the sessions of the
    /// old one.
    pub fn get_or_create(&self, name: &str, uid: &str) -> Arc<Member> {
        self.with(name, |locked| {
            let entry = &mut locked.entry.member;
            let published = match entry {
                Some(member) if member.uid == uid => return Arc::clone(member),
                Some(old) => {
                    reject(
                        old,
                        "its EdgeCluster was recreated; run 'kubectl krypton join' again",
                    );
                    Arc::clone(&old.published)
                }
                None => Arc::default(),
            };
            let member = Arc::new(Member::new(uid.to_owned(), published));
            *entry = Some(Arc::clone(&member));
            member
        })
    }

    /// Rejects the sessions of this EdgeCluster's member immediately, because a reconcile of a large fleet
    /// takes time.
    pub fn reject_sessions(&self, name: &str, uid: Option<&str>, reason: &str) {
        let state = self.state.lock();
        let member = state.member(name);
        if let Some(member) = member.filter(|member| Some(&*member.uid) == uid) {
            reject(member, reason);
        }
    }

    /// Rejects the sessions of members without an EdgeCluster, once all EdgeClusters are known. Keeps the entry of
    /// a member with a proxy, because its EdgeCluster is about to be created. Drops the observations of members
    /// that are not `needed`, and returns their names.
    pub fn retain(
        &self,
        has_object: impl Fn(&str) -> bool,
        has_proxy: impl Fn(&str) -> bool,
        needed: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let mut state = self.state.lock();
        state.listed = true;
        let RegistryState { members, fleet, .. } = &mut *state;
        let mut forgotten = Vec::new();
        for (name, entry) in members.iter_mut() {
            let exists = has_object(name);
            if let Some(member) = entry.member.as_ref().filter(|_| !exists) {
                reject(member, GONE);
            }
            if !exists && !has_proxy(name) {
                entry.member = None;
            }
            if entry.observation.is_none() || needed(name) {
                continue;
            }
            (entry.observation, entry.uids) = (None, ClusterUids::default());
            fleet.changed.remove(name);
            if entry.reporters.is_idle() {
                entry.reporters = Reporters::default();
                fleet.epoch_claims.record(name, None);
                self.reports.forget(name);
                self.deployments.forget(name);
                self.placements.forget(name);
            }
            forgotten.push(name.clone());
        }
        members.retain(|_, entry| !entry.is_empty());
        forgotten
    }

    fn with<T>(&self, name: &str, action: impl FnOnce(&mut LockedMember<'_>) -> T) -> T {
        let mut state = self.state.lock();
        let RegistryState { members, fleet, .. } = &mut *state;
        action(&mut LockedMember {
            registry: self,
            name,
            entry: members.entry(name.to_owned()).or_default(),
            fleet,
        })
    }
}

#[cfg(all(test, feature = "simulation"))]
mod schedules;
#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn cut_hits_only_member_with_matching_uid() {
        let members = MemberRegistry::default();
        let (one, other) = (
            members.get_or_create("a", "u"),
            members.get_or_create("b", "u"),
        );
        members.reject_sessions("a", Some("before"), "gone");
        members.reject_sessions("a", None, "gone");
        assert_eq!(one.admission.get().refused, None);
        members.reject_sessions("a", Some("u"), "gone");
        assert_eq!(one.admission.get().refused.as_deref(), Some("gone"));
        assert_eq!(other.admission.get().refused, None);
    }

    #[test]
    fn members_are_unknown_until_term_lists_edge_clusters() {
        let members = MemberRegistry::default();
        members.get_or_create("a", "u");
        let [first, second] = [1, 2].map(|since| BootTime(Duration::from_secs(since)));
        members.begin_term(second);
        for term in [None, Some(first)] {
            members.retain(|name| name == "a", |_| false, |_| true);
            members.listed_in(term);
            assert_eq!(members.get("a").unwrap_err(), NotFound::NotYet);
            assert_eq!(members.get("b").unwrap_err(), NotFound::NotYet);
        }
        members.listed_in(Some(second));
        assert!(members.get("a").is_ok());
        assert_eq!(members.get("b").unwrap_err(), NotFound::Gone);
    }

    #[test]
    fn member_is_unknown_until_listed_and_then_gone() {
        let members = MemberRegistry::default();
        assert_eq!(members.get("a").unwrap_err(), NotFound::NotYet);
        members.get_or_create("a", "u");
        members.retain(|name| name == "a", |_| false, |_| true);
        assert_eq!(members.get("b").unwrap_err(), NotFound::Gone);
        let old_member = members.get("a").unwrap();
        let new_member = members.get_or_create("a", "v");
        assert!(old_member.admission.get().refused.is_some());
        assert_eq!(new_member.admission.get().refused, None);
    }
}
