//! Computes the status of one of home's Tenants from its members' reports. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{self, ClusterState, State, Truth, reason};
use krypton_types::names;
use krypton_types::tenant::Next;

use super::placement;
use crate::members::tenant_reports::{Heard, Hearing, Saying, Targets};
use crate::tenants::summary::{self, Members};

/// How long the status keeps the condition of a member that left the fleet or has lost its Tenant.
pub(super) const DEPARTURE_GRACE: Duration = Duration::from_secs(60);

/// Settings for all of home's Tenants.
#[derive(Clone, Debug)]
pub struct Rules {
    pub self_cluster: bool,
    pub allow_chart_skip: bool,
    /// Only these namespaces; `None` for all.
    pub namespaces: Option<BTreeSet<String>>,
}

/// State of a Tenant between decisions. It does not survive a restart: grace periods then start over, so a
/// condition stays longer and never shorter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// Departing members, each with the time of its departure.
    departing: BTreeMap<String, BootTime>,
    unheard: Option<Unheard>,
}

/// Members that a summary only counts, and that have not reported since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unheard {
    /// The recorded number of members when this hub started.
    expected: usize,
    left: usize,
}

impl Memory {
    /// Returns whether some members of the Tenant are still known only as a count.
    pub(super) fn misses_some(&self) -> bool {
        self.unheard.is_some_and(|unheard| unheard.left > 0)
    }
}

/// Returns whether the Tenant may have members that are known only as a count.
pub(super) fn misses(tenant: &Tenant, memory: &Memory) -> bool {
    let summarised = || {
        let status = tenant.status.as_ref();
        status.is_some_and(|status| status.summary.is_some())
    };
    memory
        .unheard
        .map_or_else(summarised, |unheard| unheard.left > 0)
}

/// The time of a decision.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    pub(super) boot: BootTime,
    pub(super) wall: Timestamp,
    /// Whether members may still be connecting after the hub's start.
    pub(super) patient: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Decision {
    pub(super) status: TenantStatus,
    pub(super) memory: Memory,
    /// When to decide again if no report arrives before.
    pub(super) due: Option<BootTime>,
}

/// Computes the status from the members' reports.
pub(super) fn decide(
    tenant: &Tenant,
    heard: &Heard,
    rules: &Rules,
    memory: &Memory,
    now: Now,
) -> Decision {
    let recorded = tenant.status.clone().unwrap_or_default();
    let targets = heard.targets.as_deref();
    let sole = placement::sole(tenant, targets);
    let counts = |name: &str| sole.as_ref().is_none_or(|sole| sole.name == name);
    let own = rules.self_cluster && counts(names::SELF_CLUSTER);
    let another = sole
        .as_ref()
        .and_then(|sole| sole.another)
        .map(anothers_word);
    let refusal = refusal(tenant, targets);
    let refused = refusal.as_ref().filter(|(refused, _)| counts(refused));
    // The conditions record which members last reported the Tenant.
    let mut before = conditions::clusters(&recorded.conditions);
    if targets.is_some() {
        // The hub set this reason itself. It is not a report.
        before.retain(|_, state| state.ready.reason != reason::NAMESPACE_NOT_ALLOWED);
    }
    let mut parts = Parts::default();
    let recorded_with = before.keys().map(String::as_str);
    let heard_of = heard.said.keys().map(|name| &**name);
    let all: BTreeSet<&str> = recorded_with.chain(heard_of).collect();
    let is_refused = |name: &str| refused.is_some_and(|(refused, _)| *refused == name);
    for name in all {
        // The hub ignores reports of a refused member.
        if !counts(name) || (name == names::SELF_CLUSTER && !own) || is_refused(name) {
            continue;
        }
        let said = another.as_ref().or(heard.said.get(name));
        let part = part(name, said, before.get(name), targets, now.patient);
        parts.take(name, part, said, (&recorded, memory), now);
    }
    let Parts {
        mut members,
        departing,
        due,
        charts,
    } = parts;
    let mut next = Memory {
        departing,
        unheard: None,
    };
    if let Some((member, ready)) = refused {
        let refused = ClusterState::from(ready.clone());
        members.counted.insert((*member).to_owned(), refused);
    }
    if own && !members.counted.contains_key(names::SELF_CLUSTER) {
        let message = "the home cluster has not reported this Tenant yet";
        let waiting = ready_alone(Truth::Unknown, reason::NOT_READY, message);
        members
            .counted
            .insert(names::SELF_CLUSTER.to_owned(), waiting);
    }

    let silent = match misses(tenant, memory) && sole.is_none() {
        true => silent(&members, refusal.as_ref(), heard),
        false => 0,
    };
    let expected = recorded.summary.map_or(0, |found| found.clusters as usize);
    let unheard = unheard_of(memory.unheard, expected, members.counted.len(), silent);
    next.unheard = Some(unheard);
    members.unheard = unheard.left;
    if unheard.left > 0 && now.patient {
        // Keep the recorded status until the unnamed members are overdue.
        let memory = next;
        return Decision {
            status: recorded,
            memory,
            due,
        };
    }

    let target_known = targets.is_some() || tenant.names_member().is_none();
    let resolved = target_known.then(|| resolved(tenant, refusal.as_ref(), targets));
    let mut status = aggregated(tenant, recorded, &members, resolved, (rules, now));
    if let Some(chart) = charts.into_iter().next_back() {
        status.last_applied_chart = Some(chart.to_owned());
    }
    Decision {
        status,
        memory: next,
        due,
    }
}

/// The role of each member for the Tenant.
#[derive(Default)]
struct Parts<'a> {
    members: Members,
    departing: BTreeMap<String, BootTime>,
    /// The end of the first grace period.
    due: Option<BootTime>,
    /// Charts that a member reports, and that the hub sent to it.
    charts: BTreeSet<&'a str>,
}

impl<'a> Parts<'a> {
    fn take(
        &mut self,
        name: &str,
        part: Part,
        said: Option<&'a Saying>,
        (recorded, memory): (&TenantStatus, &Memory),
        now: Now,
    ) {
        match part {
            Part::Member(state) => {
                let report = said.and_then(|saying| saying.report.as_ref());
                // Before the first report, the recorded next step and state stay valid.
                let on_record = || Next::from_status(recorded, name);
                let coming = report.map_or_else(on_record, |report| report.next);
                if let Some(coming) = coming {
                    self.members.next.insert(name.to_owned(), coming);
                }
                if let Some(report) = report.filter(|report| report.state == state) {
                    // Use the hub's own text of the chart: a report merely confirms it.
                    let dealt = said.and_then(|said| said.dealt.as_deref());
                    let confirmed = dealt.filter(|dealt| *dealt == report.applied_chart);
                    self.charts.extend(confirmed);
                }
                self.members.counted.insert(name.to_owned(), state);
            }
            Part::Departed(state) => {
                self.members.departed.insert(name.to_owned(), state);
            }
            Part::Departs(why, message) => {
                let since = memory.departing.get(name).copied().unwrap_or(now.boot);
                // Kept until the hub has read the status back without the condition.
                self.departing.insert(name.to_owned(), since);
                if now.boot.since(since) < DEPARTURE_GRACE {
                    let end = BootTime(since.0 + DEPARTURE_GRACE);
                    self.due = Some(self.due.map_or(end, |due| due.min(end)));
                    let state = ready_alone(Truth::Unknown, why, message);
                    self.members.departed.insert(name.to_owned(), state);
                }
            }
            Part::Stranger => {}
        }
    }
}

/// Returns the status over these members. `resolved` is the condition of the target: outer `None` leaves it
/// as it is.
fn aggregated(
    tenant: &Tenant,
    mut status: TenantStatus,
    members: &Members,
    resolved: Option<Option<State>>,
    (rules, now): (&Rules, Now),
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
    let skip = rules.allow_chart_skip;
    let mut summary = summary::put(&mut status, members, skip, generation, now.wall);
    if let (true, Some(member)) = (members.is_empty(), tenant.names_member()) {
        let message = format!(
            "clusterRef names {member}, which has not reported a Tenant of this namespace and name; create it there"
        );
        summary.ready.message.clone_from(&message);
        summary.last_message = message;
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
    status.last_message = Some(summary.last_message);
    status.observed_generation = Some(generation);
    status
}

/// Replaces the reports of a member that has this name but is not the intended one.
fn anothers_word(why: &'static str) -> Saying {
    Saying {
        hearing: Hearing::Silent(why.to_owned()),
        report: None,
        patient: false,
        dealt: None,
    }
}

/// The role of a member for the Tenant.
enum Part {
    Member(ClusterState),
    /// The member has certainly lost the Tenant or left the fleet. The fields are reason and message.
    Departs(&'static str, &'static str),
    /// The member had departed at the last decision. That remains valid.
    Departed(ClusterState),
    Stranger,
}

fn part(
    name: &str,
    said: Option<&Saying>,
    was: Option<&ClusterState>,
    targets: Option<&Targets>,
    patient: bool,
) -> Part {
    let here = name == names::SELF_CLUSTER;
    let member = targets.map(|targets| here || targets.contains_key(name));
    if member == Some(false) {
        let left = Part::Departs(
            reason::MEMBER_LEFT,
            "the cluster is no longer a member; this condition is removed in a minute",
        );
        return was.map_or(Part::Stranger, |_| left);
    }
    let (hearing, report, patient) = match said {
        Some(said) => (said.hearing.clone(), said.report.as_ref(), said.patient),
        None => (Hearing::NotYet, None, patient),
    };
    let why = match (&hearing, report) {
        (Hearing::Full, Some(report)) => return Part::Member(report.state.clone()),
        (Hearing::NotYet, Some(report)) if patient => return Part::Member(report.state.clone()),
        // The report is complete and does not contain this Tenant.
        (Hearing::Full, None) if was.is_none() || here => return Part::Stranger,
        (Hearing::Full, None) => {
            return Part::Departs(
                reason::TENANT_GONE,
                "the member no longer has this Tenant; this condition is removed in a minute",
            );
        }
        (Hearing::NotYet, Some(_)) => "waiting for a full report from the member",
        (Hearing::Silent(why), _) => why,
        (Hearing::NotYet, None) => "no report since the hub started",
    };
    let Some(last) = report.map(|report| &report.state).or(was) else {
        return Part::Stranger;
    };
    match last.ready.reason.as_str() {
        reason::TENANT_GONE => Part::Departed(last.clone()),
        // The member is back, unless the EdgeClusters are not known yet.
        reason::MEMBER_LEFT if member.is_none() => Part::Departed(last.clone()),
        reason::MEMBER_LEFT => {
            Part::Member(unheard(last, "back in the fleet; waiting for its report"))
        }
        _ if hearing == Hearing::NotYet && patient => Part::Member(last.clone()),
        _ => Part::Member(unheard(last, why)),
    }
}

/// Counts the fleet's members that may have the Tenant but have not reported on it.
fn silent(members: &Members, refusal: Option<&(&str, State)>, heard: &Heard) -> usize {
    let Some(targets) = heard.targets.as_deref() else {
        return usize::MAX;
    };
    let may_have_it = |name: &&String| {
        let known = members.counted.contains_key(*name) || members.departed.contains_key(*name);
        let refused = refusal.is_some_and(|(refused, _)| refused == name);
        let said_all =
            (heard.said.get(name.as_str())).is_some_and(|said| said.hearing == Hearing::Full);
        *name != names::SELF_CLUSTER && !known && !refused && !said_all
    };
    let count = targets.keys().filter(may_have_it).count();
    count.saturating_sub(heard.strangers)
}

/// Counts the unnamed members that are still missing. The count never exceeds the silent members, and never
/// rises.
fn unheard_of(before: Option<Unheard>, recorded: usize, known: usize, silent: usize) -> Unheard {
    let expected = before.map_or(recorded, |before| before.expected);
    let most = before.map_or(usize::MAX, |before| before.left);
    Unheard {
        expected,
        left: expected.saturating_sub(known).min(silent).min(most),
    }
}

fn ready_alone(truth: Truth, why: &str, message: &str) -> ClusterState {
    ClusterState::from(State::new(truth, why, message))
}

/// Returns the member that the Tenant names and the refusal, if the member does not allow the Tenant's
/// namespace.
fn refusal<'a>(tenant: &'a Tenant, targets: Option<&Targets>) -> Option<(&'a str, State)> {
    let member = tenant.names_member()?;
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
    let member = tenant.names_member()?;
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

/// Returns the last known state of a silent member, with unknown readiness.
fn unheard(last: &ClusterState, why: &str) -> ClusterState {
    ClusterState {
        ready: State::new(Truth::Unknown, reason::CLUSTER_UNREACHABLE, why),
        ..last.clone()
    }
}
