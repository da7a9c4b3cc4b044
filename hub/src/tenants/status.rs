//! The status of one of home's Tenants, out of what its members say. Pure.

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

/// For so long the condition of a member stays that has left the fleet, or has this Tenant no more.
pub(super) const DEPARTURE_GRACE: Duration = Duration::from_secs(60);

/// What holds for all of home's Tenants.
#[derive(Clone, Debug)]
pub struct Rules {
    pub self_cluster: bool,
    pub allow_chart_skip: bool,
    /// Only these namespaces; `None` for all.
    pub namespaces: Option<BTreeSet<String>>,
}

/// What is remembered of a Tenant from one decision to the next, and not over a restart: graces begin
/// anew then, so that a condition stays longer and never shorter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// Members that depart, since when.
    departing: BTreeMap<String, BootTime>,
    unheard: Option<Unheard>,
}

/// Members of which a summary has told the number alone, and which have not been heard since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unheard {
    /// All members, when this hub began.
    expected: usize,
    left: usize,
}

impl Memory {
    /// Whether some members of the Tenant are still known by number only.
    pub(super) fn misses_some(&self) -> bool {
        self.unheard.is_some_and(|unheard| unheard.left > 0)
    }
}

/// Whether there may be members of the Tenant of which the number alone is known.
pub(super) fn misses(tenant: &Tenant, memory: &Memory) -> bool {
    let summarised = || {
        let status = tenant.status.as_ref();
        status.is_some_and(|status| status.summary.is_some())
    };
    memory
        .unheard
        .map_or_else(summarised, |unheard| unheard.left > 0)
}

/// When a decision is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    pub(super) boot: BootTime,
    pub(super) wall: Timestamp,
    /// Members may still be on their way after the hub's start.
    pub(super) patient: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Decision {
    pub(super) status: TenantStatus,
    pub(super) memory: Memory,
    /// It is to be made again then, though nothing is heard.
    pub(super) due: Option<BootTime>,
}

/// The status, out of what the members say.
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
    // Its members are those that have last reported it: the conditions themselves remember.
    let mut before = conditions::clusters(&recorded.conditions);
    if targets.is_some() {
        // It was our word, not the member's.
        before.retain(|_, state| state.ready.reason != reason::NAMESPACE_NOT_ALLOWED);
    }
    let mut parts = Parts::default();
    let recorded_with = before.keys().map(String::as_str);
    let heard_of = heard.said.keys().map(|name| &**name);
    let all: BTreeSet<&str> = recorded_with.chain(heard_of).collect();
    let is_refused = |name: &str| refused.is_some_and(|(refused, _)| *refused == name);
    for name in all {
        // A refused member is not asked.
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
        let refused = ClusterState {
            ready: ready.clone(),
            progress: None,
            error: None,
        };
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
        // What is on record stands until those are late whose names it does not hold.
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

/// What each member is to the Tenant.
#[derive(Default)]
struct Parts<'a> {
    members: Members,
    departing: BTreeMap<String, BootTime>,
    /// When the first grace ends.
    due: Option<BootTime>,
    /// Charts that members report and the hub has given them.
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
                // Before the first report, what is on record stands as its state does.
                let on_record = || Next::from_status(recorded, name);
                let coming = report.map_or_else(on_record, |report| report.next);
                if let Some(coming) = coming {
                    self.members.next.insert(name.to_owned(), coming);
                }
                if let Some(report) = report.filter(|report| report.state == state) {
                    // The text is the hub's own: a report only confirms it.
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
                // Until it is read back that the condition has gone.
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

/// The status over these members. `resolved` is the condition of the target: outer `None` leaves it as it is.
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

/// Replaces the reports of a member that has this name and does not count.
fn anothers_word(why: &'static str) -> Saying {
    Saying {
        hearing: Hearing::Silent(why.to_owned()),
        report: None,
        patient: false,
        dealt: None,
    }
}

/// What a member is to the Tenant.
enum Part {
    Member(ClusterState),
    /// It has none of it any more, as is known for certain: why, and in words.
    Departs(&'static str, &'static str),
    /// It had none of it any more when it was last heard: that stands.
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
            "it is no member of the fleet any more; this condition goes in a minute",
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
        // It says all it has, and this is not among it.
        (Hearing::Full, None) if was.is_none() || here => return Part::Stranger,
        (Hearing::Full, None) => {
            return Part::Departs(
                reason::TENANT_GONE,
                "it has no Tenant of this namespace and name any more; this condition goes in a minute",
            );
        }
        (Hearing::NotYet, Some(_)) => "it has begun anew and not said all again",
        (Hearing::Silent(why), _) => why,
        (Hearing::NotYet, None) => "not heard since the hub was started",
    };
    let Some(last) = report.map(|report| &report.state).or(was) else {
        return Part::Stranger;
    };
    match last.ready.reason.as_str() {
        reason::TENANT_GONE => Part::Departed(last.clone()),
        // It is back, unless that is not known yet.
        reason::MEMBER_LEFT if member.is_none() => Part::Departed(last.clone()),
        reason::MEMBER_LEFT => Part::Member(unheard(last, "back in the fleet, and not heard yet")),
        _ if hearing == Hearing::NotYet && patient => Part::Member(last.clone()),
        _ => Part::Member(unheard(last, why)),
    }
}

/// How many members of the fleet may have the Tenant, and have neither said so nor that they have not.
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

/// How many members are missed, of those whose number alone is on record: no more than are silent, and
/// never more again than before.
fn unheard_of(before: Option<Unheard>, recorded: usize, known: usize, silent: usize) -> Unheard {
    let expected = before.map_or(recorded, |before| before.expected);
    let most = before.map_or(usize::MAX, |before| before.left);
    Unheard {
        expected,
        left: expected.saturating_sub(known).min(silent).min(most),
    }
}

fn ready_alone(truth: Truth, why: &str, message: &str) -> ClusterState {
    ClusterState {
        ready: State::new(truth, why, message),
        progress: None,
        error: None,
    }
}

/// The member that the Tenant names, and what is said of it, where that does not take its namespace.
fn refusal<'a>(tenant: &'a Tenant, targets: Option<&Targets>) -> Option<(&'a str, State)> {
    let member = tenant.names_member()?;
    let namespace = tenant.metadata.namespace.as_deref().unwrap_or_default();
    let state = targets?.get(member)?.allowed.refusal(member, namespace)?;
    Some((member, state))
}

/// Whether the member that the Tenant names can be had: what its EdgeCluster says, to whom it may concern.
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
            "there is no EdgeCluster {member}: clusterRef names a member of the fleet, by the name that it has there"
        );
        return Some(State::new(Truth::False, reason::CLUSTER_NOT_FOUND, message));
    };
    let unknown = || State::new(Truth::Unknown, reason::UNSPECIFIED, "not looked at yet");
    Some(target.resolved.clone().unwrap_or_else(unknown))
}

/// The last known state of a member that is silent: whether it is ready is no longer known.
fn unheard(last: &ClusterState, why: &str) -> ClusterState {
    ClusterState {
        ready: State::new(Truth::Unknown, reason::CLUSTER_UNREACHABLE, why),
        ..last.clone()
    }
}
