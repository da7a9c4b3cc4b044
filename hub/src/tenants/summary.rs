//! Stores members in the status of a Tenant: the conditions of all, or a summary with the worst. Pure and
//! bounded, because the API server rejects an object that is too large.

use std::collections::BTreeMap;

use jiff::Timestamp;
use krypton_crds::tenant::{ClusterStatus, ClusterSummary, TenantStatus};
use krypton_types::conditions::{
    self, ClusterState, MESSAGE_MAX, Outlook, Readiness, Summary, Tally, Truth, summarise,
    summarise_many,
};
use krypton_types::tenant::{TenantReport, UpcomingStep};
use krypton_types::text::truncated;

use crate::members::tenant_summary::{REASON_MAX, state_name, state_with_reason};

/// Beyond this number of members, the status has a summary. It is removed at `RELISTED_MAX` members, so a
/// member that comes and goes does not rewrite the status each time.
const LISTED_MAX: usize = 50;
const RELISTED_MAX: usize = 40;
/// Members with their own conditions in addition to a summary.
const WORST_MAX: usize = 20;
/// Most members whose messages have their full length.
const FULL_MESSAGES_MAX: usize = 25;
/// Longest message in bytes of a condition with more members.
const SHORT_MESSAGE_MAX: usize = 256;
/// Longest message and longest chart in `status.clusters`, in bytes.
const CLUSTER_MESSAGE_MAX: usize = 128;
const CLUSTER_CHART_MAX: usize = 256;

/// The members of a Tenant.
#[derive(Clone, Debug, Default)]
pub(super) struct TenantMembers {
    pub(super) counted: BTreeMap<String, ClusterState>,
    /// Departed members: shown for a while, and not counted.
    pub(super) departed: BTreeMap<String, ClusterState>,
    /// The next step that each member takes without an order.
    pub(super) next: BTreeMap<String, UpcomingStep>,
    /// Number of members without a known name.
    pub(super) unnamed: usize,
}

impl TenantMembers {
    /// Returns whether no member counts.
    pub(super) fn is_empty(&self) -> bool {
        self.counted.is_empty() && self.unnamed == 0
    }

    fn total(&self) -> usize {
        self.counted.len() + self.unnamed
    }

    /// Returns what the Tenant waits for if it is not ready on all members.
    pub(super) fn outlook(&self, allow_chart_skip: bool) -> Outlook {
        let unready = self.counted.iter().filter(|(_, state)| {
            Readiness::from_state(state, allow_chart_skip) != Readiness::Ready
        });
        let outlooks =
            unready.map(|(name, state)| Outlook::from_state(state, self.next.get(name).copied()));
        let unnamed = (self.unnamed > 0).then_some(Outlook::Reconciling);
        outlooks
            .chain(unnamed)
            .max()
            .unwrap_or(Outlook::Reconciling)
    }
}

/// Stores the members in the status and removes departed ones. `report` returns the report of a member. Returns the
/// summary over all.
pub(super) fn set_members<'a>(
    status: &mut TenantStatus,
    members: &TenantMembers,
    report: &dyn Fn(&str) -> Option<&'a TenantReport>,
    allow_chart_skip: bool,
    generation: i64,
    now: Timestamp,
) -> Summary {
    let (summary, listed) = if needs_summary(status.summary.is_some(), members) {
        let summary = summarise_many(&members.counted, members.unnamed, allow_chart_skip);
        status.summary = Some(cluster_summary(summary.tally));
        (summary, worst_members(members, allow_chart_skip))
    } else {
        status.summary = None;
        (
            summarise(&members.counted, allow_chart_skip),
            all_members(members),
        )
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
    let recorded = std::mem::take(&mut status.clusters);
    let cluster = |(&name, state): (&&str, &ClusterState)| {
        // Without a reported chart, the recorded one stays valid.
        let reported = report(name).map(|report| &report.applied_chart);
        let chart = reported.filter(|chart| !chart.is_empty()).or_else(|| {
            let recorded = recorded.iter().find(|recorded| recorded.name == name);
            recorded.and_then(|recorded| recorded.chart.as_ref())
        });
        cluster_status(name, state, chart, allow_chart_skip)
    };
    status.clusters = listed.iter().map(cluster).collect();
    for (name, state) in &listed {
        conditions::set_cluster(&mut status.conditions, name, state, generation, now);
    }
    summary
}

/// Members without a known name cannot be listed.
fn needs_summary(has_summary: bool, members: &TenantMembers) -> bool {
    let total = members.total();
    total > LISTED_MAX || (has_summary && (total > RELISTED_MAX || members.unnamed > 0))
}

/// Returns all members, and as many departed ones as fit.
fn all_members(members: &TenantMembers) -> BTreeMap<&str, ClusterState> {
    let message_max = if members.total() > FULL_MESSAGES_MAX {
        SHORT_MESSAGE_MAX
    } else {
        MESSAGE_MAX
    };
    let listed = members.counted.iter().chain(&members.departed);
    listed
        .take(LISTED_MAX)
        .map(|(name, state)| (name.as_str(), shortened(state, message_max)))
        .collect()
}

/// Returns the members that are not ready, the worst first, followed by departed ones. Each has its
/// readiness, and its error if there is one.
fn worst_members(members: &TenantMembers, allow_chart_skip: bool) -> BTreeMap<&str, ClusterState> {
    let mut not_ready: Vec<_> = members
        .counted
        .iter()
        .map(|(name, state)| (Readiness::from_state(state, allow_chart_skip), name, state))
        .filter(|(readiness, ..)| *readiness != Readiness::Ready)
        .collect();
    not_ready.sort_by_key(|(readiness, name, _)| (*readiness, *name));
    let not_ready = not_ready.into_iter().map(|(_, name, state)| (name, state));
    not_ready
        .chain(&members.departed)
        .take(WORST_MAX)
        .map(|(name, state)| {
            let mut state = shortened(state, SHORT_MESSAGE_MAX);
            state.progress = None;
            state.error = state.error.filter(|error| error.truth == Truth::True);
            (name.as_str(), state)
        })
        .collect()
}

fn cluster_status(
    name: &str,
    state: &ClusterState,
    chart: Option<&String>,
    allow_chart_skip: bool,
) -> ClusterStatus {
    let readiness = Readiness::from_state(state, allow_chart_skip);
    let cause = state_with_reason(state, readiness).truncated(REASON_MAX, CLUSTER_MESSAGE_MAX);
    let chart = chart.map(|chart| truncated(chart.clone(), CLUSTER_CHART_MAX));
    ClusterStatus {
        name: name.to_owned(),
        state: state_name(readiness).to_owned(),
        reason: cause.reason,
        message: cause.message,
        chart,
    }
}

fn shortened(state: &ClusterState, message_max: usize) -> ClusterState {
    let shorten = |state: &conditions::State| state.truncated(REASON_MAX, message_max);
    ClusterState {
        ready: shorten(&state.ready),
        progress: state.progress.as_ref().map(shorten),
        error: state.error.as_ref().map(shorten),
    }
}

fn cluster_summary(tally: Tally) -> ClusterSummary {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    ClusterSummary {
        clusters: count(tally.total()),
        ready: count(tally.ready),
        error: count(tally.error),
        not_ready: count(tally.not_ready),
        unknown: count(tally.unknown),
    }
}
