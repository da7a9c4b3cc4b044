//! Computes the status of one of home's Tenants from its members' reports. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{self, ClusterState, Outlook, State, Truth, reason};
use krypton_types::names;
use krypton_types::placed_tenant::placed_on;
use krypton_types::tenant::{TenantReport, UpcomingStep};

use super::placement;
use crate::members::tenant_reports::{MemberView, ReportState, ReportedView, Targets};
use crate::tenants::summary::{self, TenantMembers};

/// How long the status keeps the condition of a member that left the fleet or has lost its Tenant.
pub(super) const DEPARTURE_GRACE: Duration = Duration::from_secs(60);

/// Settings for all of home's Tenants.
#[derive(Clone, Debug)]
pub struct TenantSettings {
    pub self_cluster: bool,
    pub allow_chart_skip: bool,
    /// Only these namespaces; `None` for all.
    pub namespaces: Option<BTreeSet<String>>,
}

/// State of a Tenant between decisions. It does not survive a restart: grace periods then start over, so a
/// condition stays longer and never shorter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DecisionMemory {
    /// Departing members, each with the time of its departure.
    departing: BTreeMap<String, BootTime>,
    unnamed: Option<UnnamedMembers>,
}

/// Members that a recorded summary only counts, and that have not reported since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UnnamedMembers {
    /// The recorded number of members when this hub started.
    expected: usize,
    /// Number of members that have not reported yet.
    missing: usize,
}

impl DecisionMemory {
    /// Returns whether some members of the Tenant are still known only as a count.
    pub(super) fn has_unnamed(&self) -> bool {
        self.unnamed.is_some_and(|unnamed| unnamed.missing > 0)
    }
}

/// Returns whether the Tenant may have members that are known only as a count.
pub(super) fn may_have_unnamed(tenant: &Tenant, memory: &DecisionMemory) -> bool {
    memory
        .unnamed
        .map_or_else(|| tenant.has_summary(), |unnamed| unnamed.missing > 0)
}

/// The time of a decision.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecisionTime {
    pub(super) boot: BootTime,
    pub(super) wall: Timestamp,
    /// Whether members may still be connecting after the hub's start.
    pub(super) in_startup_grace: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Decision {
    pub(super) status: TenantStatus,
    /// Whether a Tenant that is not ready progresses or is stalled. `None` keeps the recorded conditions.
    pub(super) outlook: Option<Outlook>,
    pub(super) memory: DecisionMemory,
    /// When to decide again if no report arrives before.
    pub(super) due: Option<BootTime>,
}

/// Computes the status from the members' reports.
pub(super) fn decide(
    tenant: &Tenant,
    view: &ReportedView,
    settings: &TenantSettings,
    memory: &DecisionMemory,
    now: DecisionTime,
) -> Decision {
    let recorded = tenant.status.clone().unwrap_or_default();
    let targets = view.targets.as_deref();
    let only_member = placement::only_member(tenant, targets);
    let may_count = |name: &str| only_member.as_ref().is_none_or(|only| only.name == name);
    let counts_home = settings.self_cluster && may_count(names::SELF_CLUSTER);
    let mismatch = only_member
        .as_ref()
        .and_then(|only| only.mismatch)
        .map(mismatched_member);
    let refusal = refusal(tenant, targets);
    let refused = refusal.as_ref().filter(|(refused, _)| may_count(refused));
    // The conditions record which members last reported the Tenant.
    let mut previous = conditions::clusters(&recorded.conditions);
    if targets.is_some() {
        // The hub set this reason itself. It is not a report.
        previous.retain(|_, state| state.ready.reason != reason::NAMESPACE_NOT_ALLOWED);
    }
    let mut roles = MemberRoles::default();
    let recorded_names = previous.keys().map(String::as_str);
    let reported_names = view.members.keys().map(|name| &**name);
    let all: BTreeSet<&str> = recorded_names.chain(reported_names).collect();
    let is_refused = |name: &str| refused.is_some_and(|(refused, _)| *refused == name);
    for name in all {
        // The hub ignores reports of a refused member.
        if !may_count(name) || (name == names::SELF_CLUSTER && !counts_home) || is_refused(name) {
            continue;
        }
        let member = mismatch.as_ref().or(view.members.get(name));
        let role = role(
            name,
            member,
            previous.get(name),
            targets,
            now.in_startup_grace,
        );
        roles.add(name, role, member, (&recorded, memory), now);
    }
    let MemberRoles {
        mut members,
        departing,
        due,
        charts,
    } = roles;
    if let Some((member, ready)) = refused {
        let state = ClusterState::from(ready.clone());
        members.counted.insert((*member).to_owned(), state);
    }
    if counts_home && !members.counted.contains_key(names::SELF_CLUSTER) {
        let message = "the home cluster has not reported this Tenant yet";
        let waiting = ready_only(Truth::Unknown, reason::NOT_READY, message);
        members
            .counted
            .insert(names::SELF_CLUSTER.to_owned(), waiting);
    }

    let silent = match may_have_unnamed(tenant, memory) && only_member.is_none() {
        true => count_silent(&members, refusal.as_ref(), view),
        false => 0,
    };
    let recorded_count = recorded
        .summary
        .map_or(0, |summary| summary.clusters as usize);
    let unnamed = unnamed_members(
        memory.unnamed,
        recorded_count,
        members.counted.len(),
        silent,
    );
    let next = DecisionMemory {
        departing,
        unnamed: Some(unnamed),
    };
    members.unnamed = unnamed.missing;
    if unnamed.missing > 0 && now.in_startup_grace {
        // Keep the recorded status until the unnamed members are overdue.
        return Decision {
            status: recorded,
            outlook: None,
            memory: next,
            due,
        };
    }

    let target_known = targets.is_some() || tenant.referenced_member().is_none();
    let resolved = target_known.then(|| resolved(tenant, refusal.as_ref(), targets));
    let report = |name: &str| {
        let member = view.members.get(name)?;
        let counts = mismatch.is_none() && !is_refused(name);
        member.report.as_deref().filter(|_| counts)
    };
    let mut status = aggregated(
        tenant,
        recorded,
        &members,
        &report,
        resolved,
        (settings, now),
    );
    // No other member follows the request at home.
    let handler = match &only_member {
        Some(only) if placed_on(tenant).is_some() => Some(only.name),
        _ => counts_home.then_some(names::SELF_CLUSTER),
    };
    if let Some(request) = handled_request(tenant, handler.and_then(report)) {
        status.last_handled_reconcile_at = Some(request);
    }
    if let Some(chart) = charts.into_iter().next_back() {
        status.last_applied_chart = Some(chart.to_owned());
    }
    match counts_home {
        true => set_history(&mut status, tenant, report(names::SELF_CLUSTER)),
        false => status.history.clear(),
    }
    Decision {
        status,
        outlook: Some(members.outlook(settings.allow_chart_skip)),
        memory: next,
        due,
    }
}

/// Returns the request at home if the report confirms that the member has handled it.
fn handled_request(tenant: &Tenant, report: Option<&TenantReport>) -> Option<String> {
    let annotations = tenant.metadata.annotations.as_ref()?;
    let requested = annotations.get(names::RECONCILE_REQUESTED_ANNOTATION)?;
    let handled = report?.handled_request.as_ref()?;
    (handled == requested).then(|| requested.clone())
}

/// Sets the history that the reconciler of the home cluster reports. Before its first report, the recorded one stays.
fn set_history(status: &mut TenantStatus, tenant: &Tenant, report: Option<&TenantReport>) {
    let history = report.and_then(|report| report.history.as_ref());
    let history = history.filter(|history| Some(&history.uid) == tenant.metadata.uid.as_ref());
    if let Some(history) = history {
        status.history.clone_from(&history.entries);
    }
}

/// The role of each member for the Tenant.
#[derive(Default)]
struct MemberRoles<'a> {
    members: TenantMembers,
    departing: BTreeMap<String, BootTime>,
    /// The end of the first grace period.
    due: Option<BootTime>,
    /// Charts that a member reports, and that the hub sent to it.
    charts: BTreeSet<&'a str>,
}

impl<'a> MemberRoles<'a> {
    fn add(
        &mut self,
        name: &str,
        role: MemberRole,
        member: Option<&'a MemberView>,
        (recorded, memory): (&TenantStatus, &DecisionMemory),
        now: DecisionTime,
    ) {
        match role {
            MemberRole::Counted(state) => {
                let report = member.and_then(|member| member.report.as_ref());
                // Before the first report, the recorded next step and state stay valid.
                let recorded_step = || UpcomingStep::from_status(recorded, name);
                let next_step = report.map_or_else(recorded_step, |report| report.next);
                if let Some(next_step) = next_step {
                    self.members.next.insert(name.to_owned(), next_step);
                }
                if let Some(report) = report.filter(|report| report.state == state) {
                    // Use the hub's own text of the chart: a report merely confirms it.
                    let desired = member.and_then(|member| member.desired_chart.as_deref());
                    let confirmed = desired.filter(|chart| *chart == report.applied_chart);
                    self.charts.extend(confirmed);
                }
                self.members.counted.insert(name.to_owned(), state);
            }
            MemberRole::Departed(state) => {
                self.members.departed.insert(name.to_owned(), state);
            }
            MemberRole::Departing { reason, message } => {
                let since = memory.departing.get(name).copied().unwrap_or(now.boot);
                // Kept until the hub has read the status back without the condition.
                self.departing.insert(name.to_owned(), since);
                if now.boot.since(since) < DEPARTURE_GRACE {
                    let end = since + DEPARTURE_GRACE;
                    self.due = Some(self.due.map_or(end, |due| due.min(end)));
                    let state = ready_only(Truth::Unknown, reason, message);
                    self.members.departed.insert(name.to_owned(), state);
                }
            }
            MemberRole::Unrelated => {}
        }
    }
}

/// Returns the status over these members. `report` returns the report of a member. `resolved` is the condition of the
/// target: outer `None` leaves it as it is.
fn aggregated<'a>(
    tenant: &Tenant,
    mut status: TenantStatus,
    members: &TenantMembers,
    report: &dyn Fn(&str) -> Option<&'a TenantReport>,
    resolved: Option<Option<State>>,
    (settings, now): (&TenantSettings, DecisionTime),
) -> TenantStatus {
    let generation = tenant.metadata.generation.unwrap_or_default();
    let type_ = conditions::TARGET_RESOLVED;
    match resolved {
        Some(Some(state)) => {
            conditions::set(&mut status.conditions, type_, &state, generation, now.wall);
        }
        Some(None) => {
            conditions::remove(&mut status.conditions, type_);
        }
        None => {}
    }
    let skip = settings.allow_chart_skip;
    let mut summary =
        summary::set_members(&mut status, members, report, skip, generation, now.wall);
    if let (true, Some(member)) = (members.is_empty(), tenant.referenced_member()) {
        summary.ready.message = format!(
            "clusterRef names {member}, which has not reported a Tenant of this namespace and name; create it there"
        );
    }
    let ready = &summary.ready;
    conditions::set(
        &mut status.conditions,
        conditions::READY,
        ready,
        generation,
        now.wall,
    );
    status.phase = Some(summary.phase.to_string());
    status.last_message = Some(summary.ready.message);
    status.observed_generation = Some(generation);
    status
}

/// Replaces the reports of a member that has this name but is not the intended one.
fn mismatched_member(reason: &'static str) -> MemberView {
    MemberView {
        report_state: ReportState::Silent(reason.to_owned()),
        report: None,
        in_grace: false,
        desired_chart: None,
    }
}

/// The role of a member for the Tenant.
enum MemberRole {
    /// The member counts, with this state.
    Counted(ClusterState),
    /// The member has certainly lost the Tenant or left the fleet.
    Departing {
        reason: &'static str,
        message: &'static str,
    },
    /// The member had departed at the last decision. That remains valid.
    Departed(ClusterState),
    Unrelated,
}

fn role(
    name: &str,
    member: Option<&MemberView>,
    previous: Option<&ClusterState>,
    targets: Option<&Targets>,
    in_startup_grace: bool,
) -> MemberRole {
    let is_home = name == names::SELF_CLUSTER;
    let in_fleet = targets.map(|targets| is_home || targets.contains_key(name));
    if in_fleet == Some(false) {
        let left = MemberRole::Departing {
            reason: reason::MEMBER_LEFT,
            message: "the cluster is no longer a member; this condition is removed in a minute",
        };
        return previous.map_or(MemberRole::Unrelated, |_| left);
    }
    let (report_state, report, in_grace) = match member {
        Some(member) => (
            member.report_state.clone(),
            member.report.as_ref(),
            member.in_grace,
        ),
        None => (ReportState::Pending, None, in_startup_grace),
    };
    let why = match (&report_state, report) {
        (ReportState::Complete, Some(report)) => return MemberRole::Counted(report.state.clone()),
        (ReportState::Pending, Some(report)) if in_grace => {
            return MemberRole::Counted(report.state.clone());
        }
        // The report is complete and does not contain this Tenant.
        (ReportState::Complete, None) if previous.is_none() || is_home => {
            return MemberRole::Unrelated;
        }
        (ReportState::Complete, None) => {
            return MemberRole::Departing {
                reason: reason::TENANT_GONE,
                message: "the member no longer has this Tenant; this condition is removed in a minute",
            };
        }
        (ReportState::Pending, Some(_)) => "waiting for a full report from the member",
        (ReportState::Silent(why), _) => why,
        (ReportState::Pending, None) => "no report since the hub started",
    };
    let Some(last) = report.map(|report| &report.state).or(previous) else {
        return MemberRole::Unrelated;
    };
    match last.ready.reason.as_str() {
        reason::TENANT_GONE => MemberRole::Departed(last.clone()),
        // The member is back, unless the EdgeClusters are not known yet.
        reason::MEMBER_LEFT if in_fleet.is_none() => MemberRole::Departed(last.clone()),
        reason::MEMBER_LEFT => {
            MemberRole::Counted(last.unreachable("back in the fleet; waiting for its report"))
        }
        _ if report_state == ReportState::Pending && in_grace => MemberRole::Counted(last.clone()),
        _ => MemberRole::Counted(last.unreachable(why)),
    }
}

/// Counts the fleet's members that may have the Tenant but have not reported on it.
fn count_silent(
    members: &TenantMembers,
    refusal: Option<&(&str, State)>,
    view: &ReportedView,
) -> usize {
    let Some(targets) = view.targets.as_deref() else {
        return usize::MAX;
    };
    let may_have_it = |name: &&String| {
        let known = members.counted.contains_key(*name) || members.departed.contains_key(*name);
        let refused = refusal.is_some_and(|(refused, _)| refused == name);
        let is_complete = view
            .members
            .get(name.as_str())
            .is_some_and(|member| member.report_state == ReportState::Complete);
        *name != names::SELF_CLUSTER && !known && !refused && !is_complete
    };
    let count = targets.keys().filter(may_have_it).count();
    count.saturating_sub(view.others_without)
}

/// Counts the unnamed members that are still missing. The count never exceeds the silent members, and never
/// rises.
fn unnamed_members(
    previous: Option<UnnamedMembers>,
    recorded: usize,
    known: usize,
    silent: usize,
) -> UnnamedMembers {
    let expected = previous.map_or(recorded, |previous| previous.expected);
    let limit = previous.map_or(usize::MAX, |previous| previous.missing);
    UnnamedMembers {
        expected,
        missing: expected.saturating_sub(known).min(silent).min(limit),
    }
}

fn ready_only(truth: Truth, reason: &str, message: &str) -> ClusterState {
    ClusterState::from(State::new(truth, reason, message))
}

/// Returns the member that the Tenant names and the refusal, if the member does not allow the Tenant's
/// namespace.
fn refusal<'a>(tenant: &'a Tenant, targets: Option<&Targets>) -> Option<(&'a str, State)> {
    let member = tenant.referenced_member()?;
    let namespace = tenant.metadata.namespace.as_deref().unwrap_or_default();
    let state = targets?.get(member)?.allowed.refusal(member, namespace)?;
    Some((member, state))
}

/// Returns whether the named member is reachable, as its EdgeCluster shows. If the member refuses the
/// namespace, returns only the refusal.
fn resolved(
    tenant: &Tenant,
    refusal: Option<&(&str, State)>,
    targets: Option<&Targets>,
) -> Option<State> {
    let member = tenant.referenced_member()?;
    if let Some((_, refused)) = refusal {
        return Some(refused.clone());
    }
    let Some(target) = targets.and_then(|targets| targets.get(member)) else {
        let message = format!(
            "EdgeCluster {member} does not exist; set spec.clusterRef.secretName to the name of a member"
        );
        return Some(State::new(Truth::False, reason::CLUSTER_NOT_FOUND, message));
    };
    let unknown = || State::new(Truth::Unknown, reason::UNSPECIFIED, "not reconciled yet");
    Some(target.resolved.clone().unwrap_or_else(unknown))
}
