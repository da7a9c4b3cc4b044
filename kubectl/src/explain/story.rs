//! Builds the explanation of a Tenant from its sources. Pure: equal sources produce equal output.

mod member;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_types::conditions::{self, PLACED, READY, TARGET_RESOLVED, Truth};
use krypton_types::names::{ORPHAN_ANNOTATION, PAUSED_ANNOTATION, SELF_CLUSTER};
use krypton_types::placed_tenant::placed_on;
use krypton_types::tenant::TenantKey;
use kube::ResourceExt;

use super::remedy;
use super::sources::{Asking, Sources};
use crate::render::{age, reason_and_message};

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

/// One statement of the explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) mark: Mark,
    /// Member that the line is about. `None` for the Tenant or the home cluster.
    pub(super) member: Option<String>,
    pub(super) text: String,
    /// Action that the user can take.
    pub(super) remedy: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Well,
    Note,
    Wrong,
    NotKnown,
}

struct Teller<'a> {
    key: &'a TenantKey,
    now: Timestamp,
    member: Option<String>,
    lines: Vec<Line>,
}

/// Builds the explanation, limited to the member `on` if it is set.
pub(super) fn story(key: &TenantKey, on: Option<&str>, sources: &Sources, now: Timestamp) -> Story {
    let mut teller = Teller {
        key,
        now,
        member: None,
        lines: Vec::new(),
    };
    let found = match &sources.tenant {
        Asking::Found(tenant) => Some(tenant),
        _ => None,
    };
    let status = found.and_then(|tenant| tenant.status.clone());
    let status = status.unwrap_or_default();
    teller.tenant(&sources.tenant, &status);
    let of_home = |found: &Asking<_>| matches!(found, Asking::Found(_));
    let is_home = found.is_none()
        || status.hub_epoch.is_some()
        || sources.members.values().any(of_home)
        || matches!(sources.lead, Asking::Found(_));
    let led = if is_home {
        teller.lead(&sources.lead, &sources.hub_namespaces)
    } else {
        teller.say(
            Mark::Note,
            "this cluster is not home: what follows is what it says itself",
        );
        teller.acts(&sources.acts)
    };
    let heard = teller.members(sources, found, &status, is_home);
    teller.member = None;
    if on.is_none() {
        teller.rest(&status, sources.members.len());
    }
    teller.events(&sources.events);
    Story {
        ready: led == Some(true)
            && heard
            && found.is_some_and(|tenant| is_ready(tenant, &status, on)),
        lines: teller.lines,
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

impl Teller<'_> {
    fn push(&mut self, mark: Mark, text: impl Into<String>, remedy: Option<String>) {
        self.lines.push(Line {
            mark,
            member: self.member.clone(),
            text: text.into(),
            remedy,
        });
    }

    fn say(&mut self, mark: Mark, text: impl Into<String>) {
        self.push(mark, text, None);
    }

    /// Adds a line if the request failed. Returns false if it succeeded.
    fn not_known<T>(&mut self, what: &str, asking: &Asking<T>) -> bool {
        match asking {
            Asking::NotPermitted(verb) => {
                self.say(
                    Mark::NotKnown,
                    format!("{what} is not known: you may not {verb}"),
                );
            }
            Asking::NoAnswer(why) => {
                self.say(Mark::NotKnown, format!("{what} is not known: {why}"));
            }
            Asking::Found(_) | Asking::None => return false,
        }
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
    fn command(&self, verb: &str, tenant: Option<&Tenant>) -> String {
        let TenantKey { namespace, name } = self.key;
        let command = format!("kubectl krypton {verb} tenant {name} -n {namespace}");
        let placed = tenant.and_then(placed_on);
        match self.member.as_deref() {
            Some(member) if member != SELF_CLUSTER && placed != Some(member) => {
                format!("{command}, with the --context of {member}: it was made there")
            }
            _ => command,
        }
    }

    fn tenant(&mut self, asked: &Asking<Tenant>, status: &TenantStatus) {
        let key = self.key;
        if self.not_known(&format!("Tenant {key}"), asked) {
            return;
        }
        let Asking::Found(tenant) = asked else {
            let remedy = "one that was made on a member alone is told of there: give that cluster's --context";
            let text = format!("there is no Tenant {key} at home");
            self.push(Mark::NotKnown, text, Some(remedy.to_owned()));
            return;
        };
        self.whose(tenant, status);
        if let Some(deleted) = &tenant.metadata.deletion_timestamp {
            let since = self.when(deleted.0);
            let held = tenant.finalizers().join(", ");
            let held = match held.is_empty() {
                true => String::new(),
                false => format!(", held by the finalizers {held}"),
            };
            self.say(Mark::Note, format!("being deleted since {since}{held}"));
        }
        let annotation = |name: &str| tenant.annotations().get(name).map(String::as_str);
        if annotation(PAUSED_ANNOTATION).is_some_and(|value| value != "false") {
            let text = "paused by an annotation: nothing is written for it but its status";
            let remedy = self.command("resume", None);
            self.push(Mark::Note, text, Some(remedy));
        }
        if annotation(ORPHAN_ANNOTATION) == Some("true") {
            let text = "annotated as an orphan: its release stays when it is deleted";
            self.say(Mark::Note, text);
        }
        let Some(ready) = conditions::find(&status.conditions, READY) else {
            let remedy = "see its events: one that does not fit the schema is told of there";
            let text = "nothing was said of it yet";
            self.push(Mark::NotKnown, text, Some(remedy.to_owned()));
            return;
        };
        if is_behind(tenant, status) {
            let text = "it was changed, and nobody has looked at the change yet";
            self.say(Mark::Note, text);
        }
        let text = reason_and_message(&ready.reason, &ready.message);
        self.say(mark(ready.truth), text);
    }

    /// Describes the origin and the target of the Tenant.
    fn whose(&mut self, tenant: &Tenant, status: &TenantStatus) {
        let key = self.key;
        let clusters = conditions::clusters(&status.conditions);
        let count = status
            .summary
            .map_or(clusters.len(), |all| all.clusters as usize);
        let text = match (placed_on(tenant), tenant.names_member()) {
            (Some(member), _) => format!("Tenant {key} is placed on {member}, from home"),
            (None, Some(member)) => format!("Tenant {key} names {member}"),
            (None, None) => match (count, clusters.keys().next()) {
                (0, _) => format!("Tenant {key} is on no cluster that has said so"),
                (1, Some(only)) => format!("Tenant {key} is on {only}"),
                _ => format!("Tenant {key} is on {count} clusters"),
            },
        };
        self.say(Mark::Well, text);
        let said = |type_| conditions::find(&status.conditions, type_);
        let resolved = said(TARGET_RESOLVED).filter(|state| state.truth == Truth::False);
        let placed = said(PLACED).filter(|state| state.truth != Truth::True);
        let placed = placed.filter(|placed| {
            resolved
                .as_ref()
                .is_none_or(|resolved| resolved.reason != placed.reason)
        });
        for state in [resolved, placed].into_iter().flatten() {
            let remedy = remedy::of_tenant(&state.reason).map(str::to_owned);
            let text = reason_and_message(&state.reason, &state.message);
            self.push(mark(state.truth), text, remedy);
        }
    }

    /// Returns whether a hub leads, or `None` if unknown.
    fn lead(&mut self, asked: &Asking<Lease>, looked: &[String]) -> Option<bool> {
        if self.not_known("who leads of the hubs", asked) {
            return None;
        }
        let Asking::Found(lease) = asked else {
            let places = looked.join(" or ");
            let text = format!("there is no Lease of a hub in the namespace {places}");
            let remedy = "name the hub's namespace with --hub-namespace";
            self.push(Mark::NotKnown, text, Some(remedy.to_owned()));
            return None;
        };
        let (holder, renewed) = self.held(lease, LEASE_IS_OLD)?;
        if let Some(holder) = holder {
            self.say(Mark::Well, format!("the hub {holder} leads"));
            return Some(true);
        }
        let since = renewed.map_or_else(|| "ever".to_owned(), |at| self.when(at));
        let text = format!("no hub has led since {since}: what is told below is of then");
        let remedy = "look at the hub's pods and their log; what is installed runs on";
        self.push(Mark::Wrong, text, Some(remedy.to_owned()));
        Some(false)
    }

    /// Returns whether an agent or a hub acts on this edge cluster, or `None` if unknown.
    fn acts(&mut self, asked: &Asking<Lease>) -> Option<bool> {
        if self.not_known("who acts on this cluster", asked) {
            return None;
        }
        let (holder, renewed) = match asked {
            Asking::Found(lease) => self.held(lease, HOLD_IS_OLD)?,
            _ => (None, None),
        };
        if let Some(holder) = holder {
            self.say(
                Mark::Well,
                format!("{holder} holds its Lease, and acts here"),
            );
            return Some(true);
        }
        let text = match renewed {
            Some(at) => {
                let since = self.when(at);
                format!("nobody has acted here since {since}: what is told below is of then")
            }
            None => "nobody has acted here yet".to_owned(),
        };
        let remedy =
            "look at the agent's pods and their log, or at the hub's; what is installed runs on";
        self.push(Mark::Wrong, text, Some(remedy.to_owned()));
        Some(false)
    }

    /// Returns the holder (`None` if the Lease is older than `old` seconds) and the last renewal. If the clocks differ
    /// too much, adds a line and returns `None`.
    fn held<'l>(
        &mut self,
        lease: &'l Lease,
        old: i64,
    ) -> Option<(Option<&'l str>, Option<Timestamp>)> {
        let spec = lease.spec.as_ref();
        let renewed = spec.and_then(|spec| spec.renew_time.as_ref().map(|time| time.0));
        let ago = renewed.map(|at| self.now.as_second() - at.as_second());
        if let Some(at) = renewed.filter(|_| ago < Some(-LEASE_IS_OLD)) {
            let at = self.when(at);
            let text = format!("who holds the Lease is not known: it was renewed at {at}");
            let remedy = "compare the clock of this machine with theirs";
            self.push(Mark::NotKnown, text, Some(remedy.to_owned()));
            return None;
        }
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref());
        let is_old = ago.is_none_or(|ago| ago > old);
        let holder = holder.filter(|holder| !holder.is_empty() && !is_old);
        Some((holder, renewed))
    }

    /// Mentions the members that have no separate lines.
    fn rest(&mut self, status: &TenantStatus, told: usize) {
        let all = match &status.summary {
            Some(summary) => summary.clusters as usize,
            None => conditions::clusters(&status.conditions).len(),
        };
        if all > told {
            let text = format!(
                "of {all} clusters the {told} worst are told of: kubectl krypton get tenant {} -n {} has a line for each",
                self.key.name, self.key.namespace
            );
            self.say(Mark::Note, text);
        }
    }

    fn events(&mut self, asked: &Asking<Vec<super::sources::Happened>>) {
        if self.not_known("what happened to it of late", asked) {
            return;
        }
        let Asking::Found(events) = asked else {
            return;
        };
        for event in events.iter().skip(events.len().saturating_sub(EVENTS)) {
            let mark = if event.warning {
                Mark::Note
            } else {
                Mark::Well
            };
            let said = reason_and_message(&event.reason, &event.message);
            let ago = age(event.at, self.now);
            self.say(mark, format!("event, {ago} ago: {said}"));
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
