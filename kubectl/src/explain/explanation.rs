//! Builds the explanation of an object from its sources. Pure: equal sources produce equal output.

mod cluster;
mod deployment;
mod member;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use krypton_crds::tenant::{HistoryEntry, RevisionOutcome, Tenant, TenantStatus};
use krypton_types::conditions::{self, ClusterState, PLACED, READY, State, TARGET_RESOLVED, Truth};
use krypton_types::names::{ORPHAN_ANNOTATION, PAUSED_ANNOTATION, SELF_CLUSTER};
use krypton_types::placed_tenant::placed_on;
use krypton_types::tenant::TenantKey;
use kube::ResourceExt;

use super::remedy;
use super::sources::{ExplanationSources, Lookup, PastEvent};
use crate::render::{age, reason_and_message};
use crate::statement::{Line, Mark};

pub(super) use cluster::explain_cluster;
pub(super) use deployment::explain_deployment;

/// Age in seconds after which a hub's Lease counts as expired. Twelve times the hub's default, as clocks differ.
const HUB_LEASE_MAX_AGE: i64 = 60;
/// The same limit for the Lease on a member, which is valid for one minute.
const EDGE_LEASE_MAX_AGE: i64 = 120;
/// Maximum number of events in an explanation.
const SHOWN_EVENTS: usize = 8;
/// Maximum number of revisions in an explanation.
const SHOWN_REVISIONS: usize = 3;
/// With more members than this, healthy members share one line.
const MAX_UNGROUPED_MEMBERS: usize = 3;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Explanation {
    pub(super) lines: Vec<Line>,
    /// The object is Ready, and the reporters of its status are still active.
    pub(super) ready: bool,
}

/// Collects the lines of an explanation.
pub(crate) struct Explainer {
    now: Timestamp,
    /// Member that the next lines are about.
    member: Option<String>,
    pub(crate) lines: Vec<Line>,
}

/// Builds the explanation of a Tenant, limited to `member` if it is set.
pub(super) fn explain(
    key: &TenantKey,
    member: Option<&str>,
    sources: &ExplanationSources,
    now: Timestamp,
) -> Explanation {
    let mut explainer = Explainer::new(now);
    let tenant = match &sources.tenant {
        Lookup::Found(tenant) => Some(tenant),
        _ => None,
    };
    let status = tenant.and_then(|tenant| tenant.status.clone());
    let mut status = status.unwrap_or_default();
    if let (Lookup::Found(report), Some(member)) = (&sources.member_report, member) {
        conditions::set_cluster(&mut status.conditions, member, &report.state, 0, now);
        let text = format!("Tenant {key} exists only on {member}, which reports it");
        explainer.add(Mark::Ok, text);
    } else {
        explainer.explain_tenant(key, &sources.tenant, &status);
        explainer.add_failure("the member's report of it", &sources.member_report);
    }
    let is_found = |member: &Lookup<_>| matches!(member, Lookup::Found(_));
    let is_home = tenant.is_none()
        || status.hub_epoch.is_some()
        || sources.members.values().any(is_found)
        || matches!(sources.leader_lease, Lookup::Found(_));
    let is_led = if is_home {
        explainer.explain_leader(&sources.leader_lease, &sources.hub_namespaces)
    } else {
        let text = "this is not the home cluster: the next lines show its own records";
        explainer.add(Mark::Note, text);
        explainer.explain_edge_lease(&sources.edge_lease)
    };
    let all_connected = explainer.explain_members(key, sources, tenant, &status, is_home);
    if member.is_none() {
        explainer.mention_omitted_members(key, &status, sources.members.len());
    }
    if !is_home || member.is_none_or(|member| member == SELF_CLUSTER) {
        explainer.member = is_home.then(|| SELF_CLUSTER.to_owned());
        explainer.explain_history(&status.history);
        explainer.member = None;
    }
    explainer.explain_events(&sources.events);
    let is_ready = match &sources.member_report {
        Lookup::Found(report) => is_ready_on_member(&report.state),
        _ => tenant.is_some_and(|tenant| is_ready(tenant, &status, member)),
    };
    Explanation {
        ready: is_led && all_connected && is_ready,
        lines: explainer.lines,
    }
}

fn is_ready(tenant: &Tenant, status: &TenantStatus, member: Option<&str>) -> bool {
    let is_ready = match member {
        Some(member) => conditions::clusters(&status.conditions)
            .get(member)
            .is_some_and(is_ready_on_member),
        None => conditions::find(&status.conditions, READY)
            .is_some_and(|ready| ready.truth == Truth::True),
    };
    is_ready && is_current(tenant, status.observed_generation)
}

/// After a failed upgrade, the previous revision is ready, and the Tenant is not.
fn is_ready_on_member(state: &ClusterState) -> bool {
    let has_error = state
        .error
        .as_ref()
        .is_some_and(|error| error.truth == Truth::True);
    state.ready.truth == Truth::True && !has_error
}

/// Returns whether the object stays, and its status describes this generation.
fn is_current(object: &impl ResourceExt, observed_generation: Option<i64>) -> bool {
    object.meta().deletion_timestamp.is_none() && !is_behind(object, observed_generation)
}

/// Returns whether the status describes an earlier generation.
fn is_behind(object: &impl ResourceExt, observed_generation: Option<i64>) -> bool {
    let generation = object.meta().generation.unwrap_or_default();
    observed_generation.is_none_or(|observed| observed < generation)
}

impl Explainer {
    pub(crate) fn new(now: Timestamp) -> Self {
        Self {
            now,
            member: None,
            lines: Vec::new(),
        }
    }

    /// Makes the next lines refer to this member.
    pub(crate) fn set_member(&mut self, member: &str) {
        self.member = Some(member.to_owned());
    }

    /// Adds a line with the action that the user can take, if any.
    pub(crate) fn add_with_remedy<'r>(
        &mut self,
        mark: Mark,
        text: impl Into<String>,
        remedy: impl Into<Option<&'r str>>,
    ) {
        self.lines.push(Line {
            mark,
            member: self.member.clone(),
            remedy: remedy.into().map(str::to_owned),
            ..Line::ok(text)
        });
    }

    fn add(&mut self, mark: Mark, text: impl Into<String>) {
        self.add_with_remedy(mark, text, None);
    }

    /// Adds the reason and message of a condition.
    fn add_condition(&mut self, mark: Mark, state: &State, remedy: Option<&str>) {
        let text = reason_and_message(&state.reason, &state.message);
        self.add_with_remedy(mark, text, remedy);
    }

    /// Adds a line if the request failed. Returns false if it succeeded.
    fn add_failure<T>(&mut self, subject: &str, lookup: &Lookup<T>) -> bool {
        let Some(reason) = lookup.failure() else {
            return false;
        };
        self.add(Mark::Unknown, format!("{subject} is not known: {reason}"));
        true
    }

    /// Formats a timestamp with its distance from now.
    fn format_time(&self, time: Timestamp) -> String {
        let time = Timestamp::from_second(time.as_second()).unwrap_or(time);
        match time > self.now {
            true => format!("{time} (in {})", age(self.now, time)),
            false => format!("{time} ({} ago)", age(time, self.now)),
        }
    }

    /// Formats the command, with the context that it needs if the Tenant was created on the member.
    fn command_for(&self, verb: &str, key: &TenantKey, tenant: Option<&Tenant>) -> String {
        let TenantKey { namespace, name } = key;
        let command = format!("kubectl krypton {verb} tenant {name} -n {namespace}");
        let placement = tenant.and_then(placed_on);
        match self.member.as_deref() {
            Some(member) if member != SELF_CLUSTER && placement != Some(member) => {
                format!("{command}, with the --context of {member}: it was created there")
            }
            _ => command,
        }
    }

    fn explain_tenant(&mut self, key: &TenantKey, lookup: &Lookup<Tenant>, status: &TenantStatus) {
        if self.add_failure(&format!("Tenant {key}"), lookup) {
            return;
        }
        let Lookup::Found(tenant) = lookup else {
            let remedy = "if it exists only on a member, pass that cluster's --context";
            let text = format!("the home cluster has no Tenant {key}");
            return self.add_with_remedy(Mark::Unknown, text, remedy);
        };
        self.explain_target(key, tenant, status);
        self.explain_metadata(tenant, &self.command_for("resume", key, None));
        let Some(ready) = conditions::find(&status.conditions, READY) else {
            let remedy = "see its events: they report a Tenant that does not match the schema";
            return self.add_with_remedy(Mark::Unknown, "it has no status yet", remedy);
        };
        self.explain_readiness(tenant, status.observed_generation, &ready, None);
    }

    /// Describes the deletion and the annotations of an object that has a release.
    fn explain_metadata(&mut self, object: &impl ResourceExt, resume: &str) {
        if let Some(deleted) = &object.meta().deletion_timestamp {
            let since = self.format_time(deleted.0);
            let finalizers = match object.finalizers() {
                [] => String::new(),
                finalizers => format!(", held by the finalizers {}", finalizers.join(", ")),
            };
            let text = format!("being deleted since {since}{finalizers}");
            self.add(Mark::Note, text);
        }
        let annotation = |name: &str| object.annotations().get(name).map(String::as_str);
        if annotation(PAUSED_ANNOTATION).is_some_and(|value| value != "false") {
            let text = "paused by an annotation: Krypton writes only its status";
            self.add_with_remedy(Mark::Note, text, resume);
        }
        if annotation(ORPHAN_ANNOTATION) == Some("true") {
            let text = "annotated as an orphan: its release stays when it is deleted";
            self.add(Mark::Note, text);
        }
    }

    /// Describes the condition `Ready` of an object, and whether it is outdated.
    fn explain_readiness(
        &mut self,
        object: &impl ResourceExt,
        observed_generation: Option<i64>,
        ready: &State,
        remedy: Option<&str>,
    ) {
        if is_behind(object, observed_generation) {
            let text = "it was changed, and its status does not reflect the change yet";
            self.add(Mark::Note, text);
        }
        self.add_condition(mark_for(ready.truth), ready, remedy);
    }

    /// Describes the origin and the target of the Tenant.
    fn explain_target(&mut self, key: &TenantKey, tenant: &Tenant, status: &TenantStatus) {
        let clusters = conditions::clusters(&status.conditions);
        let count = status
            .summary
            .map_or(clusters.len(), |summary| summary.clusters as usize);
        let text = match (placed_on(tenant), tenant.referenced_member()) {
            (Some(member), _) => format!("Tenant {key} is placed on {member} by the home cluster"),
            (None, Some(member)) => format!("Tenant {key} names {member}"),
            (None, None) => match (count, clusters.keys().next()) {
                (0, _) => format!("Tenant {key} has no report from a cluster"),
                (1, Some(only)) => format!("Tenant {key} is on {only}"),
                _ => format!("Tenant {key} is on {count} clusters"),
            },
        };
        self.add(Mark::Ok, text);
        let find = |type_| conditions::find(&status.conditions, type_);
        let resolved = find(TARGET_RESOLVED).filter(|state| state.truth == Truth::False);
        let placed = find(PLACED).filter(|state| state.truth != Truth::True);
        let is_same = |a: &State| resolved.as_ref().is_some_and(|b| a.reason == b.reason);
        let placed = placed.filter(|placed| !is_same(placed));
        for state in [&resolved, &placed].into_iter().flatten() {
            let remedy = remedy::for_tenant(&state.reason);
            self.add_condition(mark_for(state.truth), state, remedy);
        }
    }

    /// Returns whether a hub leads.
    pub(crate) fn explain_leader(&mut self, lookup: &Lookup<Lease>, namespaces: &[String]) -> bool {
        if self.add_failure("the leader of the hubs", lookup) {
            return false;
        }
        let Lookup::Found(lease) = lookup else {
            let namespaces = namespaces.join(" or ");
            let text = format!("there is no Lease of a hub in the namespace {namespaces}");
            let remedy = "name the hub's namespace with --hub-namespace";
            self.add_with_remedy(Mark::Unknown, text, remedy);
            return false;
        };
        let Some((holder, renewed)) = self.current_holder(lease, HUB_LEASE_MAX_AGE) else {
            return false;
        };
        match holder {
            Some(holder) => self.add(Mark::Ok, format!("the hub {holder} leads")),
            None => {
                let since = renewed.map_or_else(|| "ever".to_owned(), |at| self.format_time(at));
                let text =
                    format!("no hub has led since {since}: the lines below are from that time");
                let remedy =
                    "look at the hub's pods and their log; installed workloads keep running";
                self.add_with_remedy(Mark::Problem, text, remedy);
            }
        }
        holder.is_some()
    }

    /// Returns whether an agent or a hub acts on this edge cluster.
    fn explain_edge_lease(&mut self, lookup: &Lookup<Lease>) -> bool {
        if self.add_failure("the Lease holder of this cluster", lookup) {
            return false;
        }
        let (holder, renewed) = match lookup {
            Lookup::Found(lease) => match self.current_holder(lease, EDGE_LEASE_MAX_AGE) {
                Some(renewal) => renewal,
                None => return false,
            },
            _ => (None, None),
        };
        if let Some(holder) = holder {
            let text = format!("{holder} holds its Lease, and acts here");
            self.add(Mark::Ok, text);
            return true;
        }
        let text = match renewed {
            Some(renewed) => {
                let since = self.format_time(renewed);
                format!(
                    "no agent or hub has acted here since {since}: the lines below are from that time"
                )
            }
            None => "no agent or hub has acted here yet".to_owned(),
        };
        let remedy = "look at the agent's pods and their log, or at the hub's; installed workloads keep running";
        self.add_with_remedy(Mark::Problem, text, remedy);
        false
    }

    /// Returns the holder (`None` if the Lease is older than `max_age` seconds) and the last renewal. If the clocks
    /// differ too much, adds a line and returns `None`.
    fn current_holder<'l>(
        &mut self,
        lease: &'l Lease,
        max_age: i64,
    ) -> Option<(Option<&'l str>, Option<Timestamp>)> {
        let spec = lease.spec.as_ref();
        let renewed = spec.and_then(|spec| spec.renew_time.as_ref().map(|time| time.0));
        let age = renewed.map(|at| self.now.as_second() - at.as_second());
        if let Some(at) = renewed.filter(|_| age < Some(-HUB_LEASE_MAX_AGE)) {
            let at = self.format_time(at);
            let text = format!("the Lease holder is not known: the Lease was renewed at {at}");
            let remedy = "compare the clocks of this machine and of the cluster";
            self.add_with_remedy(Mark::Unknown, text, remedy);
            return None;
        }
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref());
        let is_expired = age.is_none_or(|age| age > max_age);
        let holder = holder.filter(|holder| !holder.is_empty() && !is_expired);
        Some((holder, renewed))
    }

    /// Mentions the members that have no separate lines.
    fn mention_omitted_members(&mut self, key: &TenantKey, status: &TenantStatus, shown: usize) {
        let total = match &status.summary {
            Some(summary) => summary.clusters as usize,
            None => conditions::clusters(&status.conditions).len(),
        };
        if total > shown {
            let TenantKey { namespace, name } = key;
            let text = format!(
                "only the {shown} worst of {total} clusters are shown: kubectl krypton get tenant {name} -n {namespace} has a line for each"
            );
            self.add(Mark::Note, text);
        }
    }

    /// Describes the last revisions of the release. An entry of a Tenant names no cluster.
    fn explain_history<'h>(&mut self, history: impl IntoIterator<Item = &'h HistoryEntry>) {
        for entry in history.into_iter().take(SHOWN_REVISIONS) {
            let mark = match entry.outcome {
                RevisionOutcome::Failed | RevisionOutcome::RolledBack => Mark::Note,
                _ => Mark::Ok,
            };
            let chart = [&entry.chart, &entry.chart_version].into_iter().flatten();
            let chart: String = chart.map(|text| format!(" {text}")).collect();
            let time = entry.time.as_ref().map(|time| self.format_time(time.0));
            let time = time.map_or_else(String::new, |time| format!(", {time}"));
            let by = entry.by.as_ref();
            let by = by.map_or_else(String::new, |by| format!(" by {by}"));
            let cluster = entry.cluster.as_ref();
            let cluster = cluster.map_or_else(String::new, |cluster| format!(" on {cluster}"));
            let text = format!(
                "revision {}{chart}{cluster}: {:?}, cause {:?}{by}{time}",
                entry.revision, entry.outcome, entry.cause
            );
            self.add(mark, text);
        }
    }

    fn explain_events(&mut self, lookup: &Lookup<Vec<PastEvent>>) {
        if self.add_failure("the list of recent events", lookup) {
            return;
        }
        let Lookup::Found(events) = lookup else {
            return;
        };
        for event in events
            .iter()
            .skip(events.len().saturating_sub(SHOWN_EVENTS))
        {
            let mark = match event.warning {
                true => Mark::Note,
                false => Mark::Ok,
            };
            let message = reason_and_message(&event.reason, &event.message);
            let ago = age(event.at, self.now);
            self.add(mark, format!("event, {ago} ago: {message}"));
        }
    }
}

fn mark_for(truth: Truth) -> Mark {
    match truth {
        Truth::True => Mark::Ok,
        Truth::False => Mark::Problem,
        Truth::Unknown => Mark::Unknown,
    }
}
