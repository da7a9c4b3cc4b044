//! One Tenant over all its members: phase, the condition `Ready`, and the text for people.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{ClusterState, State, Truth, cut, reason};

/// Type of the condition that `kubectl wait --for=condition=Ready` looks at.
pub const READY: &str = "Ready";

/// `status.phase`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    Pending,
    Ready,
    Error,
}

impl Phase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Ready => "Ready",
            Self::Error => "Error",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    pub phase: Phase,
    /// `status.lastMessage`; the same text as `ready.message`.
    pub last_message: String,
    /// The condition [`READY`].
    pub ready: State,
}

/// Where a member stands, the worst first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Error,
    NotReady,
    Unknown,
    Ready,
}

/// The summary over all members (design §2). The phase is Ready as soon as one member is, as in
/// the original; the condition is stricter: it is True only when there are members and all are
/// ready. With `allow_chart_skip` an error of fetching the chart alone counts for neither.
pub fn summarise(clusters: &BTreeMap<String, ClusterState>, allow_chart_skip: bool) -> Summary {
    let standing = |state: &ClusterState| match (counted_error(state, allow_chart_skip), state) {
        (true, _) => Standing::Error,
        (false, state) => match state.ready.truth {
            Truth::True => Standing::Ready,
            Truth::False => Standing::NotReady,
            Truth::Unknown => Standing::Unknown,
        },
    };
    let worst = clusters
        .iter()
        .map(|(name, state)| (standing(state), name, state))
        .min_by_key(
            // Names are unique, so the state never decides.
            |(standing, name, _)| (*standing, *name),
        );
    let ready_count = clusters
        .values()
        .filter(|state| standing(state) == Standing::Ready)
        .count();

    let mut text = format!("{ready_count} of {} clusters ready", clusters.len());
    let (truth, reason) = match worst {
        None => (Truth::False, reason::NO_CLUSTERS),
        Some((Standing::Ready, ..)) => (Truth::True, reason::ALL_CLUSTERS_READY),
        Some((standing, name, state)) => {
            text.push_str(&complaint(name, state));
            match standing {
                Standing::Unknown => (Truth::Unknown, reason::CLUSTERS_UNKNOWN),
                _ => (Truth::False, reason::CLUSTERS_NOT_READY),
            }
        }
    };
    let any_ready = clusters
        .values()
        .any(|state| state.ready.truth == Truth::True);
    let phase = match worst {
        Some((Standing::Error, ..)) => Phase::Error,
        _ if any_ready => Phase::Ready,
        _ => Phase::Pending,
    };

    let text = cut(text);
    Summary {
        phase,
        ready: State::new(truth, reason, text.clone()),
        last_message: text,
    }
}

fn counted_error(state: &ClusterState, allow_chart_skip: bool) -> bool {
    state.error.as_ref().is_some_and(|error| {
        error.truth == Truth::True && !(allow_chart_skip && reason::is_chart_fetch(&error.reason))
    })
}

/// An error that is not counted still says more than "not ready".
fn complaint(name: &str, state: &ClusterState) -> String {
    let said = match &state.error {
        Some(error) if error.truth == Truth::True => error,
        _ => &state.ready,
    };
    let separator = if said.message.is_empty() { "" } else { ": " };
    format!("; {name}: {}{separator}{}", said.reason, said.message)
}
