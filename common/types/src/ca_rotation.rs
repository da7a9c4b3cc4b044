//! Decides the steps of a rotation of the hub's CA and lists the members that block the next step. Performs no I/O.
//!
//! A user requests a rotation through an annotation on the CA Secret (`kubectl krypton rotate-ca`). The leader makes
//! each step as one write of that Secret. It derives the step from the Secret and the EdgeClusters alone, so the next
//! leader can continue a rotation after a crash at any point. The phases are:
//!
//! 1. `Announced`: a next root exists. The hub sends it to all agents and to agents that join.
//! 2. `Switched`, after all agents have reported that they trust the next root: it signs, and agents renew.
//! 3. `Steady`, after every agent has a certificate from the new root: the previous root is no longer trusted.
//!
//! The hub waits indefinitely for members that have not done their part, unless a user names them to be locked out.
//! It does not wait for banned members or members with an expired certificate: they have no access already. Between
//! two steps, a pause lets every hub read the Secret and lets newly enrolled agents connect.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use krypton_crds::edge_cluster::{EdgeCluster, Mode};
use serde::{Deserialize, Serialize};

use crate::names::SELF_CLUSTER;
use crate::root_digest::RootDigest;

/// Requests a rotation. The value is the time of the request.
pub const REQUEST_ANNOTATION: &str = "mesh.openkcm.io/rotate-ca";
/// Members that the rotation must not wait for: a [`LockOut`].
pub const LOCK_OUT_ANNOTATION: &str = "mesh.openkcm.io/rotate-ca-lock-out";
/// Progress of the rotation, for users: a [`RotationState`]. The hub relies on the Secret's data instead.
pub const ROTATION_STATE_ANNOTATION: &str = "mesh.openkcm.io/ca-rotation";

/// Interval at which each hub reads the Secret.
pub const READ_INTERVAL: Duration = Duration::from_secs(10);
/// Pause between two steps: three reads by every hub, and time for newly enrolled agents to connect.
pub const STEP_PAUSE: Duration = Duration::from_secs(30);

/// Progress of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RotationPhase {
    Steady,
    Announced,
    Switched,
}

impl fmt::Display for RotationPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A phase and the root that it concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotationStage {
    pub phase: RotationPhase,
    /// The new root. In the phase `Steady`, the root that signs.
    pub root: RootDigest,
}

/// Progress of the rotation as stored in the Secret's metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RotationState {
    pub phase: RotationPhase,
    pub root: String,
    pub since: Timestamp,
}

/// Members that the rotation need not wait for, by the phase in which a user named them. Permission to proceed
/// without a member's trust in the new root does not imply permission to proceed without its renewal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockOut {
    /// The new root of the rotation that this lock-out is meant for. It has no effect on other rotations.
    pub root: String,
    #[serde(default)]
    pub announced: BTreeSet<String>,
    #[serde(default)]
    pub switched: BTreeSet<String>,
}

impl LockOut {
    fn covers(&self, member: &BlockingMember, stage: RotationStage) -> bool {
        let is_this_rotation = self.root == stage.root.to_string();
        let was_locked_out =
            member.reason != BlockReason::NotRenewed && self.announced.contains(&member.name);
        is_this_rotation
            && match stage.phase {
                RotationPhase::Steady => false,
                RotationPhase::Announced => self.announced.contains(&member.name),
                RotationPhase::Switched => was_locked_out || self.switched.contains(&member.name),
            }
    }
}

/// Why the rotation waits for a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockReason {
    /// The agent has not connected since it enrolled, or has not yet connected to a hub that requests roots.
    NotConnected,
    /// The agent does not report which roots it trusts.
    RootsUnreported,
    /// The agent has not reported that it trusts the new root.
    NotTrusted,
    /// The agent's certificate was issued by a previous root.
    NotRenewed,
}

/// A member that the next step would lock out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockingMember {
    pub name: String,
    /// UID of its EdgeCluster.
    pub uid: String,
    pub reason: BlockReason,
    pub connected: bool,
    pub agent_version: Option<String>,
    pub last_seen: Option<Timestamp>,
}

impl BlockingMember {
    /// Returns the action that unblocks the rotation.
    pub fn remedy(&self) -> String {
        let name = &self.name;
        match (self.reason, self.connected) {
            (BlockReason::NotConnected, _) => {
                format!("start its agent, or delete EdgeCluster {name} if it has none")
            }
            (BlockReason::RootsUnreported, true) => "upgrade its agent".to_owned(),
            (_, true) => "it has received the request; see its agent's log".to_owned(),
            (_, false) => {
                format!("bring its agent back, or delete EdgeCluster {name} if the cluster is gone")
            }
        }
    }
}

impl fmt::Display for BlockingMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.reason {
            BlockReason::NotConnected => {
                "its agent has not connected yet, or not since the hub was upgraded"
            }
            BlockReason::RootsUnreported => "its agent is too old to report its trusted roots",
            BlockReason::NotTrusted => "its agent does not trust the new root yet",
            BlockReason::NotRenewed => "its agent's certificate is still from an earlier root",
        };
        f.write_str(text)
    }
}

/// Returns the members that would be locked out by the step after `stage` if the hub made it now.
pub fn blocking_members(
    stage: RotationStage,
    members: &[EdgeCluster],
    now: Timestamp,
) -> Vec<BlockingMember> {
    let mut blocking: Vec<_> = members
        .iter()
        .filter_map(|member| blocking_member(stage, member, now))
        .collect();
    blocking.sort_by(|a, b| a.name.cmp(&b.name));
    blocking
}

fn blocking_member(
    stage: RotationStage,
    member: &EdgeCluster,
    now: Timestamp,
) -> Option<BlockingMember> {
    let name = member.metadata.name.clone()?;
    let status = member.status.clone().unwrap_or_default();
    // An agent that has enrolled but not connected is visible only here: the rest of the status describes its
    // predecessor.
    let pending = status.expiry_before_connection().map(|time| time.0);
    let connected_expiry = status.certificate_expiry.map(|time| time.0);
    let expiry = connected_expiry.max(pending);
    let connected = status
        .conditions
        .iter()
        .any(|condition| condition.type_ == "Connected" && condition.status == "True");
    let agent_connected = connected && status.mode == Some(Mode::Agent);
    // A cluster with an agent is a member even if no other source declares it.
    let has_agent = expiry.is_some() || member.spec.source_ref.is_none();
    let is_excluded = name == SELF_CLUSTER
        || member.spec.banned
        || member.metadata.deletion_timestamp.is_some()
        // The certificate of a connected agent was valid when it connected, so the hub's clock may be wrong.
        || (!agent_connected && expiry.is_some_and(|expiry| expiry <= now));
    if is_excluded || !has_agent {
        return None;
    }
    let root = stage.root.to_string();
    let reason = match (status.trusted_roots, stage.phase) {
        (_, RotationPhase::Steady) => return None,
        (Some(_), _) if pending.is_some_and(|expiry| expiry > now) => BlockReason::NotConnected,
        (None, _) => BlockReason::NotConnected,
        (Some(roots), RotationPhase::Switched) if roots.issuer.as_ref() == Some(&root) => {
            return None;
        }
        (Some(roots), _) if roots.trusted.is_empty() => BlockReason::RootsUnreported,
        (Some(roots), _) if !roots.trusted.contains(&root) => BlockReason::NotTrusted,
        (Some(_), RotationPhase::Announced) => return None,
        (Some(_), RotationPhase::Switched) => BlockReason::NotRenewed,
    };
    Some(BlockingMember {
        uid: member.metadata.uid.clone().unwrap_or_default(),
        reason,
        connected,
        agent_version: status.agent_version,
        last_seen: status.last_seen.map(|time| time.0),
        name,
    })
}

/// The next change to the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RotationStep {
    Rest,
    Announce,
    /// Let the new root sign. This locks out the listed members.
    Switch(Vec<BlockingMember>),
    /// Stop trusting the previous roots. This locks out the listed members.
    Finish(Vec<BlockingMember>),
    /// No change until the listed members have done their part.
    Wait(Vec<BlockingMember>),
}

/// The user's requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RotationRequest {
    pub requested: bool,
    pub lock_out: LockOut,
}

/// Returns the next step. `is_settled`: the phase has lasted for at least [`STEP_PAUSE`].
pub fn next(
    stage: RotationStage,
    request: &RotationRequest,
    members: &[EdgeCluster],
    is_settled: bool,
    now: Timestamp,
) -> RotationStep {
    if stage.phase == RotationPhase::Steady {
        return match request.requested {
            true => RotationStep::Announce,
            false => RotationStep::Rest,
        };
    }
    let (locked_out, waited_for): (Vec<_>, Vec<_>) = blocking_members(stage, members, now)
        .into_iter()
        .partition(|member| request.lock_out.covers(member, stage));
    match stage.phase {
        _ if !waited_for.is_empty() => RotationStep::Wait(waited_for),
        _ if !is_settled => RotationStep::Rest,
        RotationPhase::Announced => RotationStep::Switch(locked_out),
        RotationPhase::Switched | RotationPhase::Steady => RotationStep::Finish(locked_out),
    }
}

#[cfg(test)]
mod tests;
