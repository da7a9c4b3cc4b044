//! Stores members in the status of a Tenant: the conditions of all, or a summary with the worst. Pure and
//! bounded, because the API server rejects an object that is too large.

use std::collections::BTreeMap;

use jiff::Timestamp;
use krypton_crds::tenant::{ClusterSummary, TenantStatus};
use krypton_types::conditions::{
    self, ClusterState, MESSAGE_MAX, Readiness, Summary, Tally, Truth, summarise, summarise_many,
};
use krypton_types::tenant::Next;

use crate::members::tenant_summary::REASON_MAX;

/// Beyond this number of members, the status has a summary. It is removed at `LISTED_AGAIN` members, so a
/// member that comes and goes does not rewrite the status each time.
const LISTED_ALL: usize = 50;
const LISTED_AGAIN: usize = 40;
/// Members with their own conditions in addition to a summary.
const LISTED_WORST: usize = 20;
/// From this number of members on, messages have half their length.
const MANY: usize = 25;
/// Longest message in bytes of a member in addition to a summary.
const MESSAGE_OF_WORST: usize = 256;

/// The members of a Tenant.
#[derive(Clone, Debug, Default)]
pub(super) struct Members {
    pub(super) counted: BTreeMap<String, ClusterState>,
    /// Departed members: shown for a while, and not counted.
    pub(super) departed: BTreeMap<String, ClusterState>,
    /// The next step that each member takes without an order.
    pub(super) next: BTreeMap<String, Next>,
    /// Number of members without a known name.
    pub(super) unheard: usize,
}

impl Members {
    /// Returns whether no member counts.
    pub(super) fn is_empty(&self) -> bool {
        self.counted.is_empty() && self.unheard == 0
    }

    fn total(&self) -> usize {
        self.counted.len() + self.unheard
    }
}

/// Stores the members in the status and removes departed ones. Returns the summary over all.
pub(super) fn put(
    status: &mut TenantStatus,
    members: &Members,
    allow_chart_skip: bool,
    generation: i64,
    now: Timestamp,
) -> Summary {
    let (summary, listed) = if is_summarised(status.summary.is_some(), members) {
        let summary = summarise_many(&members.counted, members.unheard, allow_chart_skip);
        status.summary = Some(counts(summary.tally));
        (summary, worst(members, allow_chart_skip))
    } else {
        status.summary = None;
        (summarise(&members.counted, allow_chart_skip), all(members))
    };
    status.conditions.retain(|condition| {
        conditions::parse_condition_type(&condition.type_)
            .is_none_or(|(_, member)| listed.contains_key(member))
    });
    let listed_next = members.next.iter();
    let listed_next = listed_next.filter(|(name, _)| listed.contains_key(name.as_str()));
    status.next_steps = listed_next
        .map(|(name, next)| next.in_status(name))
        .collect();
    for (name, state) in &listed {
        conditions::set_cluster(&mut status.conditions, name, state, generation, now);
    }
    summary
}

/// Members without a known name cannot be listed.
fn is_summarised(before: bool, members: &Members) -> bool {
    let total = members.total();
    total > LISTED_ALL || (before && (total > LISTED_AGAIN || members.unheard > 0))
}

/// Returns all members, and as many departed ones as fit.
fn all(members: &Members) -> BTreeMap<&str, ClusterState> {
    let message = if members.total() > MANY {
        MESSAGE_MAX / 2
    } else {
        MESSAGE_MAX
    };
    let both = members.counted.iter().chain(&members.departed);
    both.take(LISTED_ALL)
        .map(|(name, state)| (name.as_str(), within(state, message)))
        .collect()
}

/// Returns the members that are not ready, the worst first, followed by departed ones. Each has its
/// readiness, and its error if there is one.
fn worst(members: &Members, allow_chart_skip: bool) -> BTreeMap<&str, ClusterState> {
    let mut wrong: Vec<_> = members
        .counted
        .iter()
        .map(|(name, state)| (Readiness::of(state, allow_chart_skip), name, state))
        .filter(|(readiness, ..)| *readiness != Readiness::Ready)
        .collect();
    wrong.sort_by_key(|(readiness, name, _)| (*readiness, *name));
    let wrong = wrong.into_iter().map(|(_, name, state)| (name, state));
    wrong
        .chain(&members.departed)
        .take(LISTED_WORST)
        .map(|(name, state)| {
            let mut state = within(state, MESSAGE_OF_WORST);
            state.progress = None;
            state.error = state.error.filter(|error| error.truth == Truth::True);
            (name.as_str(), state)
        })
        .collect()
}

fn within(state: &ClusterState, message: usize) -> ClusterState {
    let cut = |state: &conditions::State| state.within(REASON_MAX, message);
    ClusterState {
        ready: cut(&state.ready),
        progress: state.progress.as_ref().map(cut),
        error: state.error.as_ref().map(cut),
    }
}

fn counts(tally: Tally) -> ClusterSummary {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    ClusterSummary {
        clusters: count(tally.total()),
        ready: count(tally.ready),
        error: count(tally.error),
        not_ready: count(tally.not_ready),
        unknown: count(tally.unknown),
    }
}
