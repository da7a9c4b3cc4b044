//! Builds the explanation of a Tenant from its sources. Pure: equal sources produce equal output.

mod member;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_types::conditions::{self, PLACED, READY, State, TARGET_RESOLVED, Truth};
use krypton_types::names::{ORPHAN_ANNOTATION, PAUSED_ANNOTATION, SELF_CLUSTER};
use krypton_types::placed_tenant::placed_on;
use krypton_types::tenant::TenantKey;
use kube::ResourceExt;

use super::remedy;
use super::sources::{Answer, PastEvent, Sources};
use crate::render::{age, reason_and_message};
use crate::statement::{Line, Mark};

/// Age in seconds after which a Lease that was not renewed counts as expired. Twelve times the hub's default, as clocks
/// differ.
const LEASE_IS_OLD: i64 = 60;
/// The same limit for the Lease on a member, which is valid for one minute.
const HOLD_IS_OLD: i64 = 120;
const EVENTS: usize = 8;
/// With more members than this, healthy members share one line.
const FEW: usize = 3;

/// The complete explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Story {
    pub(super) lines: Vec<Line>,
    /// The Tenant is Ready, and the reporters of its status are still active.
    pub(super) ready: bool,
}

/// Collects the lines of an explanation.
pub(crate) struct Explainer {
    now: Timestamp,
    /// Member that the next lines are about.
    member: Option<String>,
    pub(crate) lines: Vec<Line>,
}

/// Builds the explanation, limited to the member `on` if it is set.
pub(super) fn story(key: &TenantKey, on: Option<&str>, sources: &Sources, now: Timestamp) -> Story {
    let mut explainer = Explainer::new(now);
    let found = match &sources.tenant {
        Answer::Found(tenant) => Some(tenant),
        _ => None,
    };
    let status = found.and_then(|tenant| tenant.status.clone());
    let mut status = status.unwrap_or_default();
    if let (Answer::Found(report), Some(member)) = (&sources.reported, on) {
        conditions::set_cluster(&mut status.conditions, member, &report.state, 0, now);
        let text = format!("Tenant {key} exists only on {member}, which reports it");
        explainer.add(Mark::Well, text);
    } else {
        explainer.tenant(key, &sources.tenant, &status);
        explainer.not_known("the member's report of it", &sources.reported);
    }
    let is_found = |member: &Answer<_>| matches!(member, Answer::Found(_));
    let is_home = found.is_none()
        || status.hub_epoch.is_some()
        || sources.members.values().any(is_found)
        || matches!(sources.lead, Answer::Found(_));
    let is_led = if is_home {
        explainer.lead(&sources.lead, &sources.hub_namespaces)
    } else {
        let text = "this is not the home cluster: the next lines show its own records";
        explainer.add(Mark::Note, text);
        explainer.acts(&sources.acts)
    };
    let all_report = explainer.members(key, sources, found, &status, is_home);
    if on.is_none() {
        explainer.rest(key, &status, sources.members.len());
    }
    explainer.events(&sources.events);
    let is_ready = match &sources.reported {
        Answer::Found(report) => report.state.ready.truth == Truth::True,
        _ => found.is_some_and(|tenant| is_ready(tenant, &status, on)),
    };
    Story {
        ready: is_led && all_report && is_ready,
        lines: explainer.lines,
    }
}

fn is_ready(tenant: &Tenant, status: &TenantStatus, on: Option<&str>) -> bool {
    if tenant.metadata.deletion_timestamp.is_some() {
        return false;
    }
    let truth = match on {
        Some(member) => conditions::clusters(&status.conditions)
            .get(member)
            .map(|state| state.ready.truth),
        None => conditions::find(&status.conditions, READY).map(|state| state.truth),
    };
    truth == Some(Truth::True) && !is_behind(tenant, status)
}

/// Returns whether the status describes an earlier generation.
fn is_behind(tenant: &Tenant, status: &TenantStatus) -> bool {
    let now = tenant.metadata.generation.unwrap_or_default();
    status.observed_generation.is_none_or(|seen| seen < now)
}

impl Explainer {
    pub(crate) fn new(now: Timestamp) -> Self {
        Self {
            now,
            member: None,
            lines: Vec::new(),
        }
    }

    /// The next lines are about this member.
    pub(crate) fn about(&mut self, member: &str) {
        self.member = Some(member.to_owned());
    }

    /// Adds a line with the action that the user can take, if any.
    pub(crate) fn advise<'r>(
        &mut self,
        mark: Mark,
        text: impl Into<String>,
        remedy: impl Into<Option<&'r str>>,
    ) {
        self.lines.push(Line {
            member: self.member.clone(),
            ..Line::new(mark, text, remedy)
        });
    }

    fn add(&mut self, mark: Mark, text: impl Into<String>) {
        self.advise(mark, text, None);
    }

    /// Adds the reason and message of a condition.
    fn condition(&mut self, mark: Mark, state: &State, remedy: Option<&str>) {
        let text = reason_and_message(&state.reason, &state.message);
        self.advise(mark, text, remedy);
    }

    /// Adds a line if the request failed. Returns false if it succeeded.
    fn not_known<T>(&mut self, what: &str, answer: &Answer<T>) -> bool {
        let Some(why) = answer.failure() else {
            return false;
        };
        self.add(Mark::NotKnown, format!("{what} is not known: {why}"));
        true
    }

    /// Formats a timestamp with its distance from now.
    fn when(&self, at: Timestamp) -> String {
        let at = Timestamp::from_second(at.as_second()).unwrap_or(at);
        match at > self.now {
            true => format!("{at} (in {})", age(self.now, at)),
            false => format!("{at} ({} ago)", age(at, self.now)),
        }
    }

    /// Formats the command, with the context that it needs if the Tenant was created on the member.
    fn command(&self, verb: &str, key: &TenantKey, tenant: Option<&Tenant>) -> String {
        let TenantKey { namespace, name } = key;
        let command = format!("kubectl krypton {verb} tenant {name} -n {namespace}");
        let placed = tenant.and_then(placed_on);
        match self.member.as_deref() {
            Some(member) if member != SELF_CLUSTER && placed != Some(member) => {
                format!("{command}, with the --context of {member}: it was created there")
            }
            _ => command,
        }
    }

    fn tenant(&mut self, key: &TenantKey, answer: &Answer<Tenant>, status: &TenantStatus) {
        if self.not_known(&format!("Tenant {key}"), answer) {
            return;
        }
        let Answer::Found(tenant) = answer else {
            let remedy = "if it exists only on a member, pass that cluster's --context";
            let text = format!("the home cluster has no Tenant {key}");
            return self.advise(Mark::NotKnown, text, remedy);
        };
        self.target(key, tenant, status);
        if let Some(deleted) = &tenant.metadata.deletion_timestamp {
            let since = self.when(deleted.0);
            let held = match tenant.finalizers() {
                [] => String::new(),
                held => format!(", held by the finalizers {}", held.join(", ")),
            };
            self.add(Mark::Note, format!("being deleted since {since}{held}"));
        }
        let annotation = |name: &str| tenant.annotations().get(name).map(String::as_str);
        if annotation(PAUSED_ANNOTATION).is_some_and(|value| value != "false") {
            let text = "paused by an annotation: nothing is written for it but its status";
            let remedy = self.command("resume", key, None);
            self.advise(Mark::Note, text, remedy.as_str());
        }
        if annotation(ORPHAN_ANNOTATION) == Some("true") {
            let text = "annotated as an orphan: its release stays when it is deleted";
            self.add(Mark::Note, text);
        }
        let Some(ready) = conditions::find(&status.conditions, READY) else {
            let remedy = "see its events: they report a Tenant that does not match the schema";
            return self.advise(Mark::NotKnown, "it has no status yet", remedy);
        };
        if is_behind(tenant, status) {
            let text = "it was changed, and its status does not reflect the change yet";
            self.add(Mark::Note, text);
        }
        self.condition(mark(ready.truth), &ready, None);
    }

    /// Describes the origin and the target of the Tenant.
    fn target(&mut self, key: &TenantKey, tenant: &Tenant, status: &TenantStatus) {
        let clusters = conditions::clusters(&status.conditions);
        let count = status
            .summary
            .map_or(clusters.len(), |all| all.clusters as usize);
        let text = match (placed_on(tenant), tenant.names_member()) {
            (Some(member), _) => format!("Tenant {key} is placed on {member} by the home cluster"),
            (None, Some(member)) => format!("Tenant {key} names {member}"),
            (None, None) => match (count, clusters.keys().next()) {
                (0, _) => format!("Tenant {key} has no report from a cluster"),
                (1, Some(only)) => format!("Tenant {key} is on {only}"),
                _ => format!("Tenant {key} is on {count} clusters"),
            },
        };
        self.add(Mark::Well, text);
        let find = |type_| conditions::find(&status.conditions, type_);
        let resolved = find(TARGET_RESOLVED).filter(|state| state.truth == Truth::False);
        let placed = find(PLACED).filter(|state| state.truth != Truth::True);
        let same = |a: &State| resolved.as_ref().is_some_and(|b| a.reason == b.reason);
        let placed = placed.filter(|placed| !same(placed));
        for state in [&resolved, &placed].into_iter().flatten() {
            self.condition(mark(state.truth), state, remedy::of_tenant(&state.reason));
        }
    }

    /// Returns whether a hub leads.
    pub(crate) fn lead(&mut self, answer: &Answer<Lease>, namespaces: &[String]) -> bool {
        if self.not_known("the leader of the hubs", answer) {
            return false;
        }
        let Answer::Found(lease) = answer else {
            let namespaces = namespaces.join(" or ");
            let text = format!("there is no Lease of a hub in the namespace {namespaces}");
            let remedy = "name the hub's namespace with --hub-namespace";
            self.advise(Mark::NotKnown, text, remedy);
            return false;
        };
        let Some((holder, renewed)) = self.holder(lease, LEASE_IS_OLD) else {
            return false;
        };
        match holder {
            Some(holder) => self.add(Mark::Well, format!("the hub {holder} leads")),
            None => {
                let since = renewed.map_or_else(|| "ever".to_owned(), |at| self.when(at));
                let text =
                    format!("no hub has led since {since}: the lines below are from that time");
                let remedy =
                    "look at the hub's pods and their log; installed workloads keep running";
                self.advise(Mark::Wrong, text, remedy);
            }
        }
        holder.is_some()
    }

    /// Returns whether an agent or a hub acts on this edge cluster.
    fn acts(&mut self, answer: &Answer<Lease>) -> bool {
        if self.not_known("the Lease holder of this cluster", answer) {
            return false;
        }
        let (holder, renewed) = match answer {
            Answer::Found(lease) => match self.holder(lease, HOLD_IS_OLD) {
                Some(held) => held,
                None => return false,
            },
            _ => (None, None),
        };
        if let Some(holder) = holder {
            let text = format!("{holder} holds its Lease, and acts here");
            self.add(Mark::Well, text);
            return true;
        }
        let text = match renewed {
            Some(at) => {
                let since = self.when(at);
                format!(
                    "no agent or hub has acted here since {since}: the lines below are from that time"
                )
            }
            None => "no agent or hub has acted here yet".to_owned(),
        };
        let remedy = "look at the agent's pods and their log, or at the hub's; installed workloads keep running";
        self.advise(Mark::Wrong, text, remedy);
        false
    }

    /// Returns the holder (`None` if the Lease is older than `old` seconds) and the last renewal. If the clocks differ
    /// too much, adds a line and returns `None`.
    fn holder<'l>(
        &mut self,
        lease: &'l Lease,
        old: i64,
    ) -> Option<(Option<&'l str>, Option<Timestamp>)> {
        let spec = lease.spec.as_ref();
        let renewed = spec.and_then(|spec| spec.renew_time.as_ref().map(|time| time.0));
        let ago = renewed.map(|at| self.now.as_second() - at.as_second());
        if let Some(at) = renewed.filter(|_| ago < Some(-LEASE_IS_OLD)) {
            let at = self.when(at);
            let text = format!("the Lease holder is not known: the Lease was renewed at {at}");
            let remedy = "compare the clocks of this machine and of the cluster";
            self.advise(Mark::NotKnown, text, remedy);
            return None;
        }
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref());
        let is_old = ago.is_none_or(|ago| ago > old);
        let holder = holder.filter(|holder| !holder.is_empty() && !is_old);
        Some((holder, renewed))
    }

    /// Mentions the members that have no separate lines.
    fn rest(&mut self, key: &TenantKey, status: &TenantStatus, shown: usize) {
        let all = match &status.summary {
            Some(summary) => summary.clusters as usize,
            None => conditions::clusters(&status.conditions).len(),
        };
        if all > shown {
            let TenantKey { namespace, name } = key;
            let text = format!(
                "only the {shown} worst of {all} clusters are shown: kubectl krypton get tenant {name} -n {namespace} has a line for each"
            );
            self.add(Mark::Note, text);
        }
    }

    fn events(&mut self, answer: &Answer<Vec<PastEvent>>) {
        if self.not_known("the list of recent events", answer) {
            return;
        }
        let Answer::Found(events) = answer else {
            return;
        };
        for event in events.iter().skip(events.len().saturating_sub(EVENTS)) {
            let mark = match event.warning {
                true => Mark::Note,
                false => Mark::Well,
            };
            let message = reason_and_message(&event.reason, &event.message);
            let ago = age(event.at, self.now);
            self.add(mark, format!("event, {ago} ago: {message}"));
        }
    }
}

fn mark(truth: Truth) -> Mark {
    match truth {
        Truth::True => Mark::Well,
        Truth::False => Mark::Wrong,
        Truth::Unknown => Mark::NotKnown,
    }
}
