//! What the hub observes of each member.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use krypton_crds::edge_cluster::{AgentKey, AgentRoots, Mode};
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::Version;
use tokio::sync::Notify;

use crate::edgecluster::credential_expiry::Validity;

/// Current state of one member as the hub observes it.
#[derive(Clone, Debug, PartialEq)]
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
    pub certificate_said: bool,
    /// The key of that certificate.
    pub agent_key: Option<AgentKey>,
    /// Last time at which an agent of the member used an unknown key.
    pub key_refused: Option<Timestamp>,
    /// The CA roots that the agent trusts, and the one that issued its certificate.
    pub roots: Option<AgentRoots>,
    /// Validity of the credential in the hub's kubeconfig, if the credential contains it.
    pub access: Option<Validity>,
    /// Progress of decommissioning, if the member leaves together with its releases.
    pub uninstalled: Option<State>,
    /// State of the member's values.
    pub values: Values,
    /// The member has sent no report in this leader term for so long that the status recorded in an earlier
    /// term no longer counts.
    pub unheard: bool,
}

/// State of a member's values.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Values {
    /// Unknown; the recorded condition stays.
    #[default]
    NotKnown,
    /// The member has only the fleet's values, and these are valid. The condition is removed.
    Plain,
    Said(State),
}

impl Default for MemberObservation {
    fn default() -> Self {
        let starting = || State::new(Truth::Unknown, reason::STARTING, "");
        Self {
            mode: Mode::None,
            resolved: starting(),
            source: None,
            connected: starting(),
            healthy: starting(),
            kubernetes_version: None,
            uid: None,
            holder: None,
            applied: None,
            agent_version: None,
            certificate: None,
            certificate_said: false,
            agent_key: None,
            key_refused: None,
            roots: None,
            access: None,
            uninstalled: None,
            values: Values::NotKnown,
            unheard: false,
        }
    }
}

/// Observations of all members, one slot each, and the set of changed members.
#[derive(Debug, Default)]
pub struct ObservationBoard {
    slots: Mutex<(BTreeMap<String, MemberObservation>, BTreeSet<String>)>,
    pub changed: Notify,
}

impl ObservationBoard {
    /// Changes a member's observation.
    pub fn set(&self, member: &str, change: impl FnOnce(&mut MemberObservation)) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let facts = slots.0.entry(member.to_owned()).or_default();
        let before = facts.clone();
        change(facts);
        if *facts != before {
            slots.1.insert(member.to_owned());
            drop(slots);
            self.changed.notify_one();
        }
    }

    /// Marks a member whose Tenant counts have changed.
    pub fn touch(&self, member: &str) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.1.insert(member.to_owned());
        drop(slots);
        self.changed.notify_one();
    }

    pub fn get(&self, member: &str) -> Option<MemberObservation> {
        self.slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .get(member)
            .cloned()
    }

    /// Drops all members except those to `keep`, and returns the names of the dropped ones.
    pub fn forget(&self, keep: impl Fn(&str) -> bool) -> Vec<String> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<String> = slots.0.keys().filter(|name| !keep(name)).cloned().collect();
        for name in &gone {
            slots.0.remove(name);
            slots.1.remove(name);
        }
        gone
    }

    /// Returns the members that changed since the last call.
    pub fn take_changed(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.slots.lock().unwrap_or_else(PoisonError::into_inner).1)
    }

    /// Maps each member's observation with `look`.
    pub fn each<T>(&self, look: impl Fn(&str, &MemberObservation) -> T) -> Vec<T> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let facts = slots.0.iter();
        facts.map(|(name, facts)| look(name, facts)).collect()
    }

    /// Returns the number of connected members, and of all members.
    pub fn connected(&self) -> (usize, usize) {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let connected = slots
            .0
            .values()
            .filter(|facts| facts.connected.truth == Truth::True);
        (connected.count(), slots.0.len())
    }
}
