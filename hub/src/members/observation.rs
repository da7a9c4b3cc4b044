//! The hub's observation of each member.

use std::collections::BTreeSet;

use jiff::Timestamp;
use krypton_crds::edge_cluster::{AgentKey, AgentRoots, Mode};
use krypton_types::conditions::{State, Truth};
use krypton_types::desired::Version;
use krypton_types::validity::Validity;

use crate::members::{LockedMember, MemberRegistry};

/// Current state of one member as the hub observes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemberObservation {
    pub mode: Mode,
    pub resolved: State,
    /// State of the member's source, which replaces `resolved` while the hub cannot read the source.
    pub source: Option<State>,
    pub connected: State,
    pub healthy: State,
    pub kubernetes_version: Option<String>,
    pub uid: Option<String>,
    /// Holder of the member's Lease.
    pub holder: Option<String>,
    pub applied: Option<(Version, String)>,
    pub agent_version: Option<String>,
    /// Validity of the certificate of the agent that connected last.
    pub certificate: Option<Validity>,
    /// Whether a session of this term reported the certificate. Otherwise it comes from the recorded status.
    pub certificate_reported: bool,
    /// The key of that certificate.
    pub agent_key: Option<AgentKey>,
    /// Last time at which an agent of the member used an unknown key.
    pub key_refused: Option<Timestamp>,
    /// Whether the agent's clock agreed with the hub's at the start of its last session in this term.
    pub clock: Option<State>,
    /// The CA roots that the agent trusts, and the one that issued its certificate.
    pub roots: Option<AgentRoots>,
    /// Validity of the credential in the hub's kubeconfig, if the credential contains it.
    pub access: Option<Validity>,
    /// Progress of decommissioning, if the member leaves together with its releases.
    pub uninstalled: Option<State>,
    /// State of the member's values.
    pub values: MemberValuesState,
    /// The member has sent no report in this leader term for so long that the status recorded in an earlier
    /// term no longer counts.
    pub record_expired: bool,
}

/// State of a member's values.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum MemberValuesState {
    /// Unknown; the recorded condition stays.
    #[default]
    Unknown,
    /// The member has only the fleet's values, and these are valid. The condition is removed.
    FleetOnly,
    /// The state of the member's own values.
    Reported(State),
}

impl MemberObservation {
    /// Forgets what an agent's session has reported of itself.
    pub(super) fn forget_agent(&mut self) {
        (self.agent_version, self.roots, self.clock) = (None, None, None);
        (self.certificate, self.certificate_reported) = (None, false);
    }
}

/// UID of a member's cluster, by source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ClusterUids {
    /// From the hub's own connection. The outer `None` means that it has not been tried yet.
    pub(super) hub: Option<Option<String>>,
    /// From the agent's session.
    pub(super) agent: Option<String>,
}

impl MemberRegistry {
    /// Changes a member's observation.
    pub fn observe(&self, member: &str, change: impl FnOnce(&mut MemberObservation)) {
        self.with(member, |member| member.observe(change));
    }

    /// Returns what the hub observes of the member, if it has observed anything.
    pub fn observation(&self, member: &str) -> Option<MemberObservation> {
        self.state.lock().members.get(member)?.observation.clone()
    }

    /// Returns the members whose observation or Tenant counts have changed since the last call.
    pub fn take_changed(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.state.lock().fleet.changed)
    }

    /// Maps each member's observation.
    pub fn observations<T>(&self, map: impl Fn(&str, &MemberObservation) -> T) -> Vec<T> {
        let state = self.state.lock();
        let members = state.members.iter();
        let observed =
            members.filter_map(|(name, entry)| Some((name, entry.observation.as_ref()?)));
        observed
            .map(|(name, observation)| map(name, observation))
            .collect()
    }

    /// Returns the number of connected members, and of all members.
    pub fn connected(&self) -> (usize, usize) {
        let connected =
            self.observations(|_, observation| observation.connected.truth == Truth::True);
        let count = connected.iter().filter(|connected| **connected).count();
        (count, connected.len())
    }

    /// Returns the UID of the member's cluster, `None` before the first attempt to read it. The agent's report
    /// takes precedence, because it runs on the cluster.
    pub fn cluster_uid(&self, member: &str) -> Option<Option<String>> {
        let state = self.state.lock();
        let uids = &state.members.get(member)?.uids;
        match &uids.agent {
            Some(uid) => Some(Some(uid.clone())),
            None => uids.hub.clone(),
        }
    }
}

impl LockedMember<'_> {
    pub(super) fn observe(&mut self, change: impl FnOnce(&mut MemberObservation)) {
        let previous = self.entry.observation.clone();
        change(self.entry.observation.get_or_insert_default());
        if self.entry.observation != previous {
            self.mark_changed();
        }
    }

    /// Marks the member as changed.
    pub(super) fn mark_changed(&mut self) {
        self.fleet.changed.insert(self.name.to_owned());
        self.registry.changed.notify_one();
    }

    pub(super) fn set_uids(&mut self, change: impl FnOnce(&mut ClusterUids)) {
        let previous = self.entry.uids.clone();
        change(&mut self.entry.uids);
        if self.entry.uids != previous {
            self.registry.uid_changed.notify_one();
        }
    }
}
