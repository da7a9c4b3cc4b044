//! Explains one member: its reporter, its desired state, the state of the Tenant there, and the next step.

use jiff::Timestamp;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterStatus, Mode};
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_types::conditions::{self, ClusterState, State, Truth, reason};
use krypton_types::desired::Version;
use krypton_types::tenant::{Next, Step, TenantKey};

use super::super::remedy;
use super::super::sources::{Answer, Sources};
use super::{Explainer, FEW, mark};
use crate::render::{age, reason_and_message};
use crate::statement::{Line, Mark};

const DRIFT: &str = "; drift: ";

/// The hub writes `lastSeen` once a minute. If it is older, in seconds, the hub is down or the clocks differ.
const SEEN_IS_OLD: i64 = 300;

impl Explainer {
    /// Adds the lines of all members. Returns false if any member is silent.
    pub(super) fn members(
        &mut self,
        key: &TenantKey,
        sources: &Sources,
        tenant: Option<&Tenant>,
        status: &TenantStatus,
        is_home: bool,
    ) -> bool {
        let clusters = conditions::clusters(&status.conditions);
        let mut all_report = true;
        let mut well = Vec::new();
        for (name, answer) in &sources.members {
            let first = self.lines.len();
            self.member = Some(name.clone());
            if is_home {
                all_report &= self.member(name, answer);
            }
            let next = Next::from_status(status, name);
            match clusters.get(name) {
                Some(state) => self.state(key, state, next, tenant),
                None => self.add(
                    Mark::NotKnown,
                    "the home cluster has no report of this Tenant there",
                ),
            }
            let is_well = |line: &Line| line.mark == Mark::Well;
            if sources.members.len() > FEW && self.lines.iter().skip(first).all(is_well) {
                self.lines.truncate(first);
                well.push(name.as_str());
            }
        }
        self.member = None;
        if !well.is_empty() {
            let count = well.len();
            let text = format!("well on {count} members: {}", well.join(", "));
            self.add(Mark::Well, text);
        }
        all_report
    }

    /// Adds the lines of one member. Returns false if it is silent.
    pub(crate) fn member(&mut self, name: &str, answer: &Answer<EdgeCluster>) -> bool {
        if self.not_known("the state of this member", answer) {
            return false;
        }
        let Answer::Found(cluster) = answer else {
            let remedy = "kubectl krypton get clusters lists the members";
            self.advise(Mark::Wrong, "no EdgeCluster has this name", remedy);
            return false;
        };
        if cluster.metadata.deletion_timestamp.is_some() {
            self.add(Mark::Note, "it is leaving the fleet");
        }
        if cluster.spec.banned {
            let remedy = format!("kubectl krypton unban {name}");
            self.advise(
                Mark::Wrong,
                "banned: the hub rejects its agent and does not connect to it",
                remedy.as_str(),
            );
        }
        if cluster.spec.paused {
            let text = "paused on the EdgeCluster: nothing is written there but status";
            let remedy = format!("kubectl krypton resume cluster {name}");
            self.advise(Mark::Note, text, remedy.as_str());
        }
        let status = cluster.status.clone().unwrap_or_default();
        let connected = conditions::find(&status.conditions, "Connected");
        let reports = self.session(&status, connected.as_ref());
        self.lease(&status, connected.as_ref(), reports);
        self.desired(&status, reports);
        for type_ in [conditions::VALUES_RESOLVED, "CertificateCurrent"] {
            let found = conditions::find(&status.conditions, type_);
            if let Some(found) = found.filter(|found| found.truth == Truth::False) {
                self.condition(Mark::Note, &found, remedy::of_member(&found.reason));
            }
        }
        reports
    }

    /// Describes the member's connection. Returns false if the member is silent.
    fn session(&mut self, status: &EdgeClusterStatus, connected: Option<&State>) -> bool {
        let Some(connected) = connected else {
            self.add(Mark::NotKnown, "the hub has not observed it yet");
            return false;
        };
        let seen = status.last_seen.as_ref().map(|time| time.0);
        if connected.truth != Truth::True {
            let mut conditions = status.conditions.iter();
            let changed = conditions.find(|found| found.type_ == "Connected");
            let changed = changed.map(|found| found.last_transition_time.0);
            let since = match seen.or(changed) {
                Some(since) => format!("since {}", self.when(since)),
                None => "yet".to_owned(),
            };
            let why = reason_and_message(&connected.reason, &connected.message);
            let text = format!("no contact {since}: {why}");
            let remedy = remedy::of_member(&connected.reason);
            self.advise(mark(connected.truth), text, remedy);
            return false;
        }
        let is_old = |seen: &Timestamp| self.now.as_second() - seen.as_second() > SEEN_IS_OLD;
        if let Some(seen) = seen.filter(is_old) {
            let since = self.when(seen);
            let text =
                format!("the home cluster shows it as connected, but it last responded at {since}");
            let remedy =
                "look at the hub's pods and their log: the hub checks connections every minute";
            self.advise(Mark::NotKnown, text, remedy);
            return false;
        }
        let who = match (status.mode, &status.agent_version) {
            (Some(Mode::Agent), Some(version)) => format!("its agent ({version}) is connected"),
            (Some(Mode::Agent), None) => "its agent is connected".to_owned(),
            (Some(Mode::Proxy), _) => "the hub reaches it through its kubeconfig".to_owned(),
            (Some(Mode::None) | None, _) => {
                "it is connected, but no agent or hub acts on it".to_owned()
            }
        };
        let seen = seen.map(|seen| format!(", last seen {} ago", age(seen, self.now)));
        self.add(Mark::Well, who + &seen.unwrap_or_default());
        true
    }

    fn lease(&mut self, status: &EdgeClusterStatus, connected: Option<&State>, reports: bool) {
        let healthy = conditions::find(&status.conditions, "Healthy");
        // An earlier line already shows a connection problem.
        let is_shown = |state: &State| connected.is_some_and(|it| it.reason == state.reason);
        if let Some(healthy) = healthy.filter(|it| it.truth != Truth::True && !is_shown(it)) {
            self.condition(Mark::Note, &healthy, remedy::of_member(&healthy.reason));
        }
        match status.lease_holder.as_deref() {
            None | Some("") => {}
            Some(holder) if reports => {
                let text = format!("{holder} holds its Lease, and acts there");
                self.add(Mark::Well, text);
            }
            Some(holder) => {
                let text = format!("{holder} held its Lease at the last contact");
                self.add(Mark::NotKnown, text);
            }
        }
    }

    fn desired(&mut self, status: &EdgeClusterStatus, reports: bool) {
        let Some(desired) = &status.desired else {
            return;
        };
        let chart = &desired.chart;
        let version = |epoch, generation| Version { epoch, generation };
        let wanted = version(desired.epoch, desired.generation);
        let applied = status.applied.as_ref();
        let applied = applied.map(|applied| version(applied.epoch, applied.generation));
        let (mark, text) = match (applied, status.is_behind()) {
            (_, Some(false)) => {
                let what = format!("the current desired state {wanted}: {chart}");
                match reports {
                    true => (Mark::Well, format!("it has applied {what}")),
                    false => {
                        let text = format!("at the last contact, it had applied {what}");
                        (Mark::NotKnown, text)
                    }
                }
            }
            (Some(has), None) => {
                let text = format!(
                    "it has applied desired state {has}, which is later than that on the home cluster"
                );
                (Mark::Note, text)
            }
            (Some(has), _) => {
                let since = desired.since.as_ref().map(|since| self.when(since.0));
                let since = since.map_or_else(String::new, |since| format!(" since {since}"));
                let text = format!(
                    "it has applied desired state {has}, but not {wanted} (sent{since}): {chart}"
                );
                (Mark::Note, text)
            }
            (None, _) => {
                let text =
                    format!("it has applied no desired state yet; the hub sends {wanted}: {chart}");
                (Mark::Note, text)
            }
        };
        self.add(mark, text);
    }

    /// Describes the state of the Tenant on the member.
    fn state(
        &mut self,
        key: &TenantKey,
        state: &ClusterState,
        next: Option<Next>,
        tenant: Option<&Tenant>,
    ) {
        let is_true = |state: &&State| state.truth == Truth::True;
        let error = state.error.as_ref().filter(is_true);
        if let Some(error) = error {
            self.condition(Mark::Wrong, error, remedy::of_tenant(&error.reason));
        }
        let progress = state.progress.as_ref().filter(is_true);
        if let Some(progress) = progress {
            self.condition(Mark::Note, progress, None);
        }
        let (ready, drift) = without_drift(&state.ready);
        let remedy = remedy::of_tenant(&ready.reason).filter(|_| ready.truth != Truth::True);
        if ready.truth != Truth::False || (error.is_none() && progress.is_none()) {
            self.condition(mark(ready.truth), &ready, remedy);
        }
        if let Some(drift) = drift {
            let text = format!("it has drifted from its chart: {drift}");
            self.add(Mark::Note, text);
        }
        let held = state.progress.as_ref().filter(|progress| {
            progress.truth == Truth::False
                && [reason::PAUSED, reason::LOCKED].contains(&progress.reason.as_str())
        });
        if let Some(held) = held {
            let resume =
                (held.reason == reason::PAUSED).then(|| self.command("resume", key, tenant));
            let text = reason_and_message(&held.reason, &held.message);
            let text = format!("nothing is changed there: {text}");
            self.advise(Mark::Note, text, resume.as_deref());
        }
        // A Ready Tenant can have an outdated entry from an older version of the hub or agent.
        match next.filter(|_| ready.truth != Truth::True) {
            Some(next) => self.next(next, &self.command("resync", key, tenant)),
            None if error.is_some_and(|error| error.message.starts_with("not ready ")) => {
                let text = "no retry is needed: it is Ready as soon as its workloads are";
                self.add(Mark::Note, text);
            }
            None => {}
        }
    }

    fn next(&mut self, next: Next, resync: &str) {
        let at = next.at.map(|at| self.when(at));
        let at = at.unwrap_or_else(|| "an unknown time".to_owned());
        let is_due = next.at.is_some_and(|at| at <= self.now);
        let s = if next.attempts == 1 { "" } else { "s" };
        let attempts = format!("{} failed attempt{s}", next.attempts);
        let (text, remedy) = match next.step {
            Step::Retry if is_due => (
                format!("another attempt, due {at}, after {attempts}; no result yet"),
                None,
            ),
            Step::Retry => (
                format!("it is retried at {at}, after {attempts}"),
                Some(format!("now: {resync}")),
            ),
            Step::GivenUp => (
                format!(
                    "nothing. It was given up after {attempts}, until chart, values or Tenant change"
                ),
                Some(format!("one more: {resync}")),
            ),
            Step::Unlock => (
                format!("Krypton takes over the lock of the release at {at}"),
                None,
            ),
            Step::Wait => (
                format!("its workloads have until {at} to become ready"),
                None,
            ),
        };
        self.advise(Mark::Note, format!("next: {text}"), remedy.as_deref());
    }
}

/// Splits the drift details off the condition's message.
fn without_drift(state: &State) -> (State, Option<&str>) {
    let found = state.message.split_once(DRIFT);
    let bare = found.map_or(state.message.as_str(), |(bare, _)| bare);
    let bare = State::new(state.truth, state.reason.clone(), bare);
    (bare, found.map(|(_, drift)| drift))
}
