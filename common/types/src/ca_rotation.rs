//! The rotation of the hub's CA: what is the next step, and who has to be waited for. Pure.
//!
//! A person asks for it by an annotation on the CA's Secret (`kubectl krypton rotate-ca`); the hub that
//! leads makes each step as one write of that Secret, from what is in it and in the EdgeClusters, so that
//! whatever ends in between is continued by whoever comes next. Nothing is counted on but what is read:
//!
//! 1. Announced: there is a next root. It is told to all agents, and given to those who join.
//! 2. Switched, once all agents have said that they trust it: it signs, and agents renew.
//! 3. Steady again, once the certificate of each is of the new root: the former one is trusted no more.
//!
//! Who has not done its part is waited for, without end, unless a person names it to be locked out. Banned
//! members and those whose certificate has expired are out already. Between two steps there is a pause in
//! which every hub has read the Secret and who has just joined has come.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use krypton_crds::edge_cluster::EdgeCluster;
use serde::{Deserialize, Serialize};

use crate::names::SELF_CLUSTER;
use crate::root_digest::RootDigest;

/// A person asks for a rotation; the value says when.
pub const REQUEST_ANNOTATION: &str = "mesh.openkcm.io/rotate-ca";
/// Whom a person does not want to be waited for: a [`LockOut`].
pub const LOCK_OUT_ANNOTATION: &str = "mesh.openkcm.io/rotate-ca-lock-out";
/// How far it is, for people: a [`Standing`]. The hub goes by the Secret's content.
pub const STANDING_ANNOTATION: &str = "mesh.openkcm.io/ca-rotation";

/// How often the Secret is read.
pub const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Between two steps: three looks of every hub, and time for who has enrolled to connect.
pub const SETTLE: Duration = Duration::from_secs(30);

/// How far a rotation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    Steady,
    Announced,
    Switched,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A phase, and of which root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    pub phase: Phase,
    /// The new one; when steady, the one that signs.
    pub root: RootDigest,
}

/// What the Secret's metadata says of its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    pub phase: Phase,
    pub root: String,
    pub since: Timestamp,
}

/// Members that need not be waited for, by the phase in which they were named: to be forgiven for not
/// trusting the new root is not to be forgiven for not having renewed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockOut {
    /// The new root of the rotation that it is meant for. For another one it means nothing.
    pub root: String,
    #[serde(default)]
    pub announced: BTreeSet<String>,
    #[serde(default)]
    pub switched: BTreeSet<String>,
}

impl LockOut {
    fn covers(&self, awaited: &Awaited, stage: Stage) -> bool {
        let meant = self.root == stage.root.to_string();
        let out_already = awaited.why != Why::NotRenewed && self.announced.contains(&awaited.name);
        meant
            && match stage.phase {
                Phase::Steady => false,
                Phase::Announced => self.announced.contains(&awaited.name),
                Phase::Switched => out_already || self.switched.contains(&awaited.name),
            }
    }
}

/// Why a member is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It is a member by its agent, which has not connected since it enrolled, or not to a hub that asks
    /// for roots.
    NotHeard,
    /// Its agent does not say which roots it trusts.
    SaysNothing,
    /// Its agent has not said that it trusts the new root.
    NotTrusted,
    /// Its agent's certificate is of a former root.
    NotRenewed,
}

/// A member that would be locked out by the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Awaited {
    pub name: String,
    /// Of its EdgeCluster.
    pub uid: String,
    pub why: Why,
    pub connected: bool,
    pub agent_version: Option<String>,
    pub last_seen: Option<Timestamp>,
}

impl Awaited {
    /// What a person can do about it.
    pub fn remedy(&self) -> String {
        let name = &self.name;
        match (self.why, self.connected) {
            (Why::NotHeard, _) => {
                format!("start its agent, or delete EdgeCluster {name} if there is none")
            }
            (Why::SaysNothing, true) => "upgrade its agent".to_owned(),
            (_, true) => "it has been told; its agent's log says what keeps it".to_owned(),
            (_, false) => {
                format!("bring its agent back, or delete EdgeCluster {name} if the cluster is gone")
            }
        }
    }
}

impl fmt::Display for Awaited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.why {
            Why::NotHeard => "its agent has not connected yet, or not since the hub was upgraded",
            Why::SaysNothing => "its agent is too old to say which roots it trusts",
            Why::NotTrusted => "its agent does not trust the new root yet",
            Why::NotRenewed => "its agent's certificate is still of a former root",
        };
        f.write_str(why)
    }
}

/// Who would be locked out if the step after `stage` were made now.
pub fn awaited(stage: Stage, members: &[EdgeCluster], now: Timestamp) -> Vec<Awaited> {
    let mut awaited: Vec<_> = members
        .iter()
        .filter_map(|member| await_one(stage, member, now))
        .collect();
    awaited.sort_by(|one, other| one.name.cmp(&other.name));
    awaited
}

fn await_one(stage: Stage, member: &EdgeCluster, now: Timestamp) -> Option<Awaited> {
    let name = member.metadata.name.clone()?;
    let status = member.status.clone().unwrap_or_default();
    // An agent that has enrolled and not come yet is known by nothing else: what is on record is of
    // another before it.
    let never_came = status.never_came().map(|time| time.0);
    let seen = status.certificate_expiry.map(|time| time.0);
    let expiry = seen.max(never_came);
    // By its agent it is a member also where no other source has made it one.
    let by_agent = expiry.is_some() || member.spec.source_ref.is_none();
    let out = name == SELF_CLUSTER
        || member.spec.banned
        || member.metadata.deletion_timestamp.is_some()
        || expiry.is_some_and(|expiry| expiry <= now);
    if out || !by_agent {
        return None;
    }
    let root = stage.root.to_string();
    let why = match (status.roots, stage.phase) {
        (_, Phase::Steady) => return None,
        (Some(_), _) if never_came.is_some_and(|expiry| expiry > now) => Why::NotHeard,
        (None, _) => Why::NotHeard,
        (Some(roots), Phase::Switched) if roots.issuer.as_ref() == Some(&root) => return None,
        (Some(roots), _) if roots.trusted.is_empty() => Why::SaysNothing,
        (Some(roots), _) if !roots.trusted.contains(&root) => Why::NotTrusted,
        (Some(_), Phase::Announced) => return None,
        (Some(_), Phase::Switched) => Why::NotRenewed,
    };
    let connected = status
        .conditions
        .iter()
        .any(|condition| condition.type_ == "Connected" && condition.status == "True");
    Some(Awaited {
        uid: member.metadata.uid.clone().unwrap_or_default(),
        why,
        connected,
        agent_version: status.agent_version,
        last_seen: status.last_seen.map(|time| time.0),
        name,
    })
}

/// What is to be done with the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Rest,
    Announce,
    /// The new root signs from here on; these are locked out by it.
    Switch(Vec<Awaited>),
    /// The former roots are trusted no more; as above.
    Finish(Vec<Awaited>),
    /// Nothing, until these have done their part.
    Wait(Vec<Awaited>),
}

/// What a person has said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    pub requested: bool,
    pub lock_out: LockOut,
}

/// The next step. `settled`: the phase was seen for long enough.
pub fn next(
    stage: Stage,
    wishes: &Wishes,
    members: &[EdgeCluster],
    settled: bool,
    now: Timestamp,
) -> Step {
    if stage.phase == Phase::Steady {
        return match wishes.requested {
            true => Step::Announce,
            false => Step::Rest,
        };
    }
    let (locked_out, waited_for): (Vec<_>, Vec<_>) = awaited(stage, members, now)
        .into_iter()
        .partition(|member| wishes.lock_out.covers(member, stage));
    match stage.phase {
        _ if !waited_for.is_empty() => Step::Wait(waited_for),
        _ if !settled => Step::Rest,
        Phase::Announced => Step::Switch(locked_out),
        Phase::Switched | Phase::Steady => Step::Finish(locked_out),
    }
}

#[cfg(test)]
mod tests;
