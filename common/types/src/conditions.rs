//! Status of a Tenant: conditions for each member, the phase, and the summary over all members.

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};

use crate::text::truncated;

mod progress;
pub mod reason;
mod summary;

pub use progress::{Outlook, RECONCILING, STALLED, set_progress};
pub use summary::{Phase, READY, Readiness, Summary, Tally, phase, summarise, summarise_many};

/// Condition of an EdgeCluster: whether all sources of its values are available.
pub const VALUES_RESOLVED: &str = "ValuesResolved";

/// Condition of an EdgeCluster and of objects that name it: whether the cluster is available.
pub const TARGET_RESOLVED: &str = "TargetClusterResolved";

/// Part of the message of a release whose workloads are not ready yet. The workloads follow.
pub const WAITING: &str = "applied, waiting: ";

/// Condition of a Tenant on the home cluster that names another member: whether it is placed there.
pub const PLACED: &str = "Placed";

/// Condition of an EdgeCluster: whether the clock of its agent agreed with the hub's when the agent connected.
pub const CLOCK_SYNCHRONIZED: &str = "ClockSynchronized";

/// Limit for messages in bytes. The API's own limit is 32 KiB.
pub const MESSAGE_MAX: usize = 1024;

/// `conditions[].status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Truth {
    True,
    False,
    Unknown,
}

impl Truth {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }

    /// Returns `Unknown` for any other status.
    pub fn from_status(status: &str) -> Self {
        match status {
            "True" => Self::True,
            "False" => Self::False,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for Truth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One condition without its type and its times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    pub truth: Truth,
    /// CamelCase, one of [`reason`].
    pub reason: String,
    pub message: String,
}

/// The state before the first observation.
impl Default for State {
    fn default() -> Self {
        Self::new(Truth::Unknown, reason::STARTING, "")
    }
}

impl State {
    /// Returns the state with the message cut to `message_max` bytes. A reason of more than `reason_max` bytes becomes
    /// [`reason::UNSPECIFIED`].
    #[must_use]
    pub fn truncated(&self, reason_max: usize, message_max: usize) -> Self {
        let reason = match self.reason.len() <= reason_max {
            true => self.reason.as_str(),
            false => reason::UNSPECIFIED,
        };
        let message = truncated(self.message.clone(), message_max);
        Self::new(self.truth, reason, message)
    }

    pub fn new(truth: Truth, reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            truth,
            reason: reason.into(),
            message: message.into(),
        }
    }

    fn from_condition(condition: &Condition) -> Self {
        Self::new(
            Truth::from_status(&condition.status),
            condition.reason.clone(),
            condition.message.clone(),
        )
    }
}

/// State of one Tenant on one member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterState {
    pub ready: State,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<State>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<State>,
}

impl From<State> for ClusterState {
    /// Neither progress nor error is known.
    fn from(ready: State) -> Self {
        Self {
            ready,
            progress: None,
            error: None,
        }
    }
}

impl ClusterState {
    /// Returns whether the member no longer has this Tenant. Such a state is shown for a while and not counted.
    pub fn has_departed(&self) -> bool {
        matches!(
            self.ready.reason.as_str(),
            reason::MEMBER_LEFT | reason::TENANT_GONE
        )
    }

    /// Returns the last known state of a silent member, with unknown readiness.
    #[must_use]
    pub fn unreachable(&self, message: &str) -> Self {
        Self {
            ready: State::new(Truth::Unknown, reason::CLUSTER_UNREACHABLE, message),
            ..self.clone()
        }
    }
}

/// Kind of a condition of one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Ready,
    Progress,
    Error,
}

impl Kind {
    fn prefix(self) -> &'static str {
        match self {
            Self::Ready => "ClusterReady/",
            Self::Progress => "ClusterProgress/",
            Self::Error => "ClusterError/",
        }
    }
}

/// Returns the condition type, such as `ClusterReady/<cluster>`.
pub fn condition_type(kind: Kind, cluster: &str) -> String {
    format!("{}{cluster}", kind.prefix())
}

/// The reverse of [`condition_type`]. Returns `None` for any other condition type.
pub fn parse_condition_type(condition_type: &str) -> Option<(Kind, &str)> {
    [Kind::Ready, Kind::Progress, Kind::Error]
        .into_iter()
        .find_map(|kind| {
            let cluster = condition_type.strip_prefix(kind.prefix())?;
            (!cluster.is_empty()).then_some((kind, cluster))
        })
}

/// Sets the three conditions of `cluster` from `state` and removes conditions that `state` omits. Other conditions
/// and the order stay. Returns whether anything changed.
pub fn set_cluster(
    conditions: &mut Vec<Condition>,
    cluster: &str,
    state: &ClusterState,
    observed_generation: i64,
    now: Timestamp,
) -> bool {
    let states = [
        (Kind::Ready, Some(&state.ready)),
        (Kind::Progress, state.progress.as_ref()),
        (Kind::Error, state.error.as_ref()),
    ];
    let mut changed = false;
    for (kind, state) in states {
        let type_ = condition_type(kind, cluster);
        changed |= match state {
            Some(state) => set(conditions, &type_, state, observed_generation, now),
            None => remove(conditions, &type_),
        };
    }
    changed
}

/// Sets the condition `type_` from `state`. A new condition is appended. `lastTransitionTime` becomes `now` only if
/// the status changes. The message is cut to [`MESSAGE_MAX`] bytes. Returns whether anything changed.
pub fn set(
    conditions: &mut Vec<Condition>,
    type_: &str,
    state: &State,
    generation: i64,
    now: Timestamp,
) -> bool {
    let mut next = Condition {
        type_: type_.to_owned(),
        status: state.truth.as_str().to_owned(),
        reason: legal_reason(&state.reason).to_owned(),
        message: truncated(state.message.clone(), MESSAGE_MAX),
        observed_generation: Some(generation),
        last_transition_time: Time(now),
    };
    let Some(current) = conditions
        .iter_mut()
        .find(|condition| condition.type_ == type_)
    else {
        conditions.push(next);
        return true;
    };
    if current.status == next.status {
        next.last_transition_time = current.last_transition_time.clone();
    }
    let changed = *current != next;
    if changed {
        *current = next;
    }
    changed
}

/// Returns the state of the condition `type_`.
pub fn find(conditions: &[Condition], type_: &str) -> Option<State> {
    let condition = conditions.iter().find(|condition| condition.type_ == type_);
    condition.map(State::from_condition)
}

/// Removes the condition `type_`. Returns whether it existed.
pub fn remove(conditions: &mut Vec<Condition>, type_: &str) -> bool {
    let previous_len = conditions.len();
    conditions.retain(|condition| condition.type_ != type_);
    conditions.len() != previous_len
}

/// Returns the state of each member from the conditions. A member with only a progress or error condition, as
/// krypton-operator leaves it, is not known to be ready.
pub fn clusters(conditions: &[Condition]) -> BTreeMap<String, ClusterState> {
    let mut clusters: BTreeMap<String, ClusterState> = BTreeMap::new();
    for condition in conditions {
        let Some((kind, cluster)) = parse_condition_type(&condition.type_) else {
            continue;
        };
        let entry = clusters
            .entry(cluster.to_owned())
            .or_insert_with(|| State::new(Truth::Unknown, reason::NOT_READY, "").into());
        let state = State::from_condition(condition);
        match kind {
            Kind::Ready => entry.ready = state,
            Kind::Progress => entry.progress = Some(state),
            Kind::Error => entry.error = Some(state),
        }
    }
    clusters
}

/// Replaces an illegal reason: the API server would reject the whole status because of it, including other members'
/// conditions.
fn legal_reason(reason: &str) -> &str {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let bytes = reason.as_bytes();
    let is_legal = bytes.len() <= 1024
        && bytes.first().is_some_and(u8::is_ascii_alphabetic)
        && bytes.last().is_some_and(|byte| is_word(*byte))
        && bytes
            .iter()
            .all(|byte| is_word(*byte) || matches!(byte, b',' | b':'));
    if is_legal {
        reason
    } else {
        reason::UNSPECIFIED
    }
}

#[cfg(test)]
mod tests;
