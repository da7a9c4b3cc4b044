//! Summary of one Tenant over all its members: the phase, the condition `Ready`, and a human-readable message.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{ClusterState, MESSAGE_MAX, State, Truth, reason};
use crate::text::truncated;

/// Condition type that `kubectl wait --for=condition=Ready` checks.
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
    /// The condition [`READY`]. Its message is `status.lastMessage` too.
    pub ready: State,
    pub tally: Tally,
}

/// Number of members in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub error: usize,
    pub not_ready: usize,
    pub unknown: usize,
    pub ready: usize,
}

impl Tally {
    pub fn total(self) -> usize {
        self.error + self.not_ready + self.unknown + self.ready
    }

    /// Returns a text like `3 in error, 20 not ready`. Empty if all members are ready.
    fn describe_unready(self) -> String {
        let parts = [
            (self.error, "in error"),
            (self.not_ready, "not ready"),
            (self.unknown, "unknown"),
        ];
        let nonzero = parts.iter().filter(|(count, _)| *count > 0);
        let texts: Vec<String> = nonzero
            .map(|(count, state)| format!("{count} {state}"))
            .collect();
        texts.join(", ")
    }
}

/// State of a Tenant on a member, the worst first. `lastMessage` names the member in the worst state, and the first
/// by name among equals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Readiness {
    Error,
    NotReady,
    Unknown,
    Ready,
}

impl Readiness {
    /// Classifies a member's state. With `allow_chart_skip`, a failure to fetch the chart is not an error.
    pub fn from_state(state: &ClusterState, allow_chart_skip: bool) -> Self {
        match (
            has_counted_error(state, allow_chart_skip),
            state.ready.truth,
        ) {
            (true, _) => Self::Error,
            (false, Truth::False) => Self::NotReady,
            (false, Truth::Unknown) => Self::Unknown,
            (false, Truth::True) => Self::Ready,
        }
    }
}

/// Returns the summary over all members. The phase is `Ready` if at least one member is ready and no member has an
/// error. The condition is stricter: it is `True` only if at least one member exists and all are ready. With
/// `allow_chart_skip`, a failure to fetch the chart alone affects neither.
pub fn summarise(clusters: &BTreeMap<String, ClusterState>, allow_chart_skip: bool) -> Summary {
    summarise_with(clusters, 0, allow_chart_skip, false)
}

/// Like [`summarise`], with `silent` more members that have not reported and are not in `clusters`. The message
/// contains the number of members in each state.
pub fn summarise_many(
    clusters: &BTreeMap<String, ClusterState>,
    silent: usize,
    allow_chart_skip: bool,
) -> Summary {
    summarise_with(clusters, silent, allow_chart_skip, true)
}

fn summarise_with(
    clusters: &BTreeMap<String, ClusterState>,
    silent: usize,
    allow_chart_skip: bool,
    with_counts: bool,
) -> Summary {
    let mut tally = Tally {
        unknown: silent,
        ..Tally::default()
    };
    let mut worst: Option<(Readiness, &String, &ClusterState)> = None;
    for (name, state) in clusters {
        let readiness = Readiness::from_state(state, allow_chart_skip);
        *match readiness {
            Readiness::Error => &mut tally.error,
            Readiness::NotReady => &mut tally.not_ready,
            Readiness::Unknown => &mut tally.unknown,
            Readiness::Ready => &mut tally.ready,
        } += 1;
        // The iteration is in the order of names, so the first of equals stays.
        if worst.is_none_or(|(current, ..)| readiness < current) {
            worst = Some((readiness, name, state));
        }
    }

    let mut text = format!("{} of {} clusters ready", tally.ready, tally.total());
    let unready = tally.describe_unready();
    if with_counts && !unready.is_empty() {
        text.push_str(&format!(" ({unready})"));
    }
    let unready = worst.filter(|(readiness, ..)| *readiness != Readiness::Ready);
    if let Some((_, name, state)) = unready {
        text.push_str(&describe_state(name, state));
    } else if silent > 0 {
        text.push_str(&format!(
            "; {silent} without a report since the hub started"
        ));
    }
    let (truth, reason) = match tally {
        tally if tally.total() == 0 => (Truth::False, reason::NO_CLUSTERS),
        tally if tally.error + tally.not_ready > 0 => (Truth::False, reason::CLUSTERS_NOT_READY),
        tally if tally.unknown > 0 => (Truth::Unknown, reason::CLUSTERS_UNKNOWN),
        _ => (Truth::True, reason::ALL_CLUSTERS_READY),
    };
    let any_ready = clusters
        .values()
        .any(|state| state.ready.truth == Truth::True);
    let phase = match tally {
        tally if tally.error > 0 => Phase::Error,
        _ if any_ready => Phase::Ready,
        _ => Phase::Pending,
    };

    Summary {
        phase,
        ready: State::new(truth, reason, truncated(text, MESSAGE_MAX)),
        tally,
    }
}

/// Returns the phase of a Tenant that only one member reconciles.
pub fn phase(state: &ClusterState, allow_chart_skip: bool) -> Phase {
    match Readiness::from_state(state, allow_chart_skip) {
        Readiness::Error => Phase::Error,
        Readiness::NotReady | Readiness::Unknown => Phase::Pending,
        Readiness::Ready => Phase::Ready,
    }
}

fn has_counted_error(state: &ClusterState, allow_chart_skip: bool) -> bool {
    state.error.as_ref().is_some_and(|error| {
        error.truth == Truth::True && !(allow_chart_skip && reason::is_chart_fetch(&error.reason))
    })
}

/// Describes the member in the worst state. Prefers the error, even one that is not counted: it is more specific than
/// "not ready".
fn describe_state(name: &str, state: &ClusterState) -> String {
    let shown = match &state.error {
        Some(error) if error.truth == Truth::True => error,
        _ => &state.ready,
    };
    let separator = if shown.message.is_empty() { "" } else { ": " };
    format!("; {name}: {}{separator}{}", shown.reason, shown.message)
}
