//! Explains one member: its reporter, its desired state, the state of the Tenant there, and the next step.

use jiff::Timestamp;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterStatus, Mode};
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_types::conditions::{self, ClusterState, State, Truth, reason};
use krypton_types::desired::Version;
use krypton_types::names::SELF_CLUSTER;
use krypton_types::tenant::{TenantKey, UpcomingStep, UpcomingStepKind};

use super::super::remedy;
use super::super::sources::{ExplanationSources, Lookup};
use super::{Explainer, MAX_UNGROUPED_MEMBERS, mark_for};
use crate::render::reason_and_message;
use crate::statement::{Line, Mark};

const DRIFT_SEPARATOR: &str = "; drift: ";

/// The hub writes `lastSeen` once a minute. If it is older, in seconds, the hub is down or the clocks differ.
const LAST_SEEN_MAX_AGE: i64 = 300;

impl Explainer {
    /// Adds the lines of all members. Returns false if any member is silent.
    pub(super) fn explain_members(
        &mut self,
        key: &TenantKey,
        sources: &ExplanationSources,
        tenant: Option<&Tenant>,
        status: &TenantStatus,
        is_home: bool,
    ) -> bool {
        let clusters = conditions::clusters(&status.conditions);
        let mut all_connected = true;
        let mut healthy = Vec::new();
        for (name, lookup) in &sources.members {
            let first_line = self.lines.len();
            self.member = Some(name.clone());
            if is_home {
                all_connected &= self.explain_member(name, lookup);
            }
            let next = UpcomingStep::from_status(status, name);
            match clusters.get(name) {
                Some(state) => self.explain_state(key, state, next, tenant),
                None => self.add(
                    Mark::Unknown,
                    "the home cluster has no report of this Tenant there",
                ),
            }
            let is_ok = |line: &Line| line.mark == Mark::Ok;
            if sources.members.len() > MAX_UNGROUPED_MEMBERS
                && self.lines.iter().skip(first_line).all(is_ok)
            {
                self.lines.truncate(first_line);
                healthy.push(name.as_str());
            }
        }
        self.member = None;
        if !healthy.is_empty() {
            let count = healthy.len();
            let text = format!("well on {count} members: {}", healthy.join(", "));
            self.add(Mark::Ok, text);
        }
        all_connected
    }

    /// Adds the lines of one member. Returns false if it is silent.
    pub(crate) fn explain_member(&mut self, name: &str, lookup: &Lookup<EdgeCluster>) -> bool {
        if self.add_failure("the state of this member", lookup) {
            return false;
        }
        let Lookup::Found(cluster) = lookup else {
            let remedy = "kubectl krypton get clusters lists the members";
            self.add_with_remedy(Mark::Problem, "no EdgeCluster has this name", remedy);
            return false;
        };
        if cluster.metadata.deletion_timestamp.is_some() {
            self.add(Mark::Note, "it is leaving the fleet");
        }
        if cluster.spec.banned {
            let text = "banned: the hub rejects its agent and does not connect to it";
            let remedy = format!("kubectl krypton unban {name}");
            self.add_with_remedy(Mark::Problem, text, remedy.as_str());
        }
        if cluster.spec.paused {
            let text = "paused on the EdgeCluster: Krypton writes only status there";
            let remedy = format!("kubectl krypton resume cluster {name}");
            self.add_with_remedy(Mark::Note, text, remedy.as_str());
        }
        let status = cluster.status.clone().unwrap_or_default();
        let connected = conditions::find(&status.conditions, "Connected");
        let is_connected = self.explain_connection(name, &status, connected.as_ref());
        self.explain_lease(&status, connected.as_ref(), is_connected);
        self.explain_desired_state(&status, is_connected);
        for type_ in [
            conditions::VALUES_RESOLVED,
            "CertificateCurrent",
            "AccessCurrent",
            conditions::CLOCK_SYNCHRONIZED,
        ] {
            let condition = conditions::find(&status.conditions, type_);
            if let Some(condition) = condition.filter(|condition| condition.truth == Truth::False) {
                let remedy = remedy::for_member(&condition.reason);
                self.add_condition(Mark::Note, &condition, remedy);
            }
        }
        is_connected
    }

    /// Describes the member's connection. Returns false if the member is silent.
    fn explain_connection(
        &mut self,
        name: &str,
        status: &EdgeClusterStatus,
        connected: Option<&State>,
    ) -> bool {
        let Some(connected) = connected else {
            self.add(Mark::Unknown, "the hub has not observed it yet");
            return false;
        };
        let seen = status.last_seen.as_ref().map(|time| time.0);
        if connected.truth != Truth::True {
            let mut conditions = status.conditions.iter();
            let changed = conditions.find(|condition| condition.type_ == "Connected");
            let changed = changed.map(|condition| condition.last_transition_time.0);
            let since = match seen.or(changed) {
                Some(since) => format!("since {}", self.format_time(since)),
                None => "yet".to_owned(),
            };
            let cause = reason_and_message(&connected.reason, &connected.message);
            let text = format!("no contact {since}: {cause}");
            let remedy = remedy::for_member(&connected.reason);
            self.add_with_remedy(mark_for(connected.truth), text, remedy);
            return false;
        }
        let is_old = |seen: &Timestamp| self.now.as_second() - seen.as_second() > LAST_SEEN_MAX_AGE;
        if let Some(seen) = seen.filter(is_old) {
            let since = self.format_time(seen);
            let text =
                format!("the home cluster shows it as connected, but it last responded at {since}");
            let remedy =
                "look at the hub's pods and their log: the hub checks connections every minute";
            self.add_with_remedy(Mark::Unknown, text, remedy);
            return false;
        }
        let connection = match (status.mode, &status.agent_version) {
            (Some(Mode::Agent), Some(version)) => format!("its agent ({version}) is connected"),
            (Some(Mode::Agent), None) => "its agent is connected".to_owned(),
            (Some(Mode::Proxy), _) if name == SELF_CLUSTER => {
                "the hub acts on its own cluster".to_owned()
            }
            (Some(Mode::Proxy), _) => "the hub reaches it through its kubeconfig".to_owned(),
            (Some(Mode::None) | None, _) => {
                "it is connected, but no agent or hub acts on it".to_owned()
            }
        };
        self.add(Mark::Ok, connection);
        true
    }

    fn explain_lease(
        &mut self,
        status: &EdgeClusterStatus,
        connected: Option<&State>,
        is_connected: bool,
    ) {
        let healthy = conditions::find(&status.conditions, "Healthy");
        // An earlier line already shows a connection problem.
        let is_shown =
            |state: &State| connected.is_some_and(|connected| connected.reason == state.reason);
        if let Some(healthy) =
            healthy.filter(|healthy| healthy.truth != Truth::True && !is_shown(healthy))
        {
            self.add_condition(Mark::Note, &healthy, remedy::for_member(&healthy.reason));
        }
        match status.lease_holder.as_deref() {
            None | Some("") => {}
            Some(holder) if is_connected => {
                let text = format!("{holder} holds its Lease, and acts there");
                self.add(Mark::Ok, text);
            }
            Some(holder) => {
                let text = format!("{holder} held its Lease at the last contact");
                self.add(Mark::Unknown, text);
            }
        }
    }

    fn explain_desired_state(&mut self, status: &EdgeClusterStatus, is_connected: bool) {
        let Some(desired) = &status.desired else {
            return;
        };
        let chart = &desired.chart;
        let version = |epoch, generation| Version { epoch, generation };
        let desired_version = version(desired.epoch, desired.generation);
        let applied = status.applied.as_ref();
        let applied_version = applied.map(|applied| version(applied.epoch, applied.generation));
        let mark = match (status.is_behind(), is_connected) {
            (Some(false), true) => Mark::Ok,
            (Some(false), false) => Mark::Unknown,
            _ => Mark::Note,
        };
        let text = match (applied_version, status.is_behind()) {
            (_, Some(false)) => {
                let applied = match is_connected {
                    true => "it has applied",
                    false => "at the last contact, it had applied",
                };
                format!("{applied} the current desired state {desired_version}: {chart}")
            }
            (Some(applied_version), None) => format!(
                "it has applied desired state {applied_version}, which is later than that on the home cluster"
            ),
            (Some(applied_version), _) => {
                let since = desired.since.as_ref();
                let since = since.map(|since| format!(" since {}", self.format_time(since.0)));
                let since = since.unwrap_or_default();
                format!(
                    "it has applied desired state {applied_version}, but not {desired_version} (sent{since}): {chart}"
                )
            }
            (None, _) => format!(
                "it has applied no desired state yet; the hub sends {desired_version}: {chart}"
            ),
        };
        self.add(mark, text);
    }

    /// Describes the state of the Tenant on the member.
    fn explain_state(
        &mut self,
        key: &TenantKey,
        state: &ClusterState,
        next: Option<UpcomingStep>,
        tenant: Option<&Tenant>,
    ) {
        let is_true = |state: &&State| state.truth == Truth::True;
        let error = state.error.as_ref().filter(is_true);
        if let Some(error) = error {
            self.add_condition(Mark::Problem, error, remedy::for_tenant(&error.reason));
        }
        let progress = state.progress.as_ref().filter(is_true);
        if let Some(progress) = progress {
            let remedy = remedy::for_waiting(&progress.message);
            self.add_condition(Mark::Note, progress, remedy);
        }
        let (ready, drift) = without_drift(&state.ready);
        let remedy = remedy::for_tenant(&ready.reason).filter(|_| ready.truth != Truth::True);
        if ready.truth != Truth::False || (error.is_none() && progress.is_none()) {
            self.add_condition(mark_for(ready.truth), &ready, remedy);
        }
        if let Some(drift) = drift {
            let text = format!("it has drifted from its chart: {drift}");
            self.add(Mark::Note, text);
        }
        let blocked = state.progress.as_ref().filter(|progress| {
            progress.truth == Truth::False
                && [reason::PAUSED, reason::LOCKED].contains(&progress.reason.as_str())
        });
        if let Some(blocked) = blocked {
            let resume =
                (blocked.reason == reason::PAUSED).then(|| self.command_for("resume", key, tenant));
            let text = reason_and_message(&blocked.reason, &blocked.message);
            let text = format!("Krypton changes nothing there: {text}");
            self.add_with_remedy(Mark::Note, text, resume.as_deref());
        }
        // A Ready Tenant can have an outdated entry from an older version of the hub or agent.
        match next.filter(|_| ready.truth != Truth::True) {
            Some(next) => self.explain_next_step(next, &self.command_for("resync", key, tenant)),
            None if error.is_some_and(|error| error.message.starts_with("not ready ")) => {
                let text = "no retry is needed: it is Ready as soon as its workloads are";
                self.add(Mark::Note, text);
            }
            None => {}
        }
    }

    fn explain_next_step(&mut self, next: UpcomingStep, resync: &str) {
        let at = next.at.map(|at| self.format_time(at));
        let at = at.unwrap_or_else(|| "an unknown time".to_owned());
        let is_due = next.at.is_some_and(|at| at <= self.now);
        let plural = if next.attempts == 1 { "" } else { "s" };
        let attempts = format!("{} failed attempt{plural}", next.attempts);
        let (text, remedy) = match next.step {
            UpcomingStepKind::Retry if is_due => (
                format!("another attempt, due {at}, after {attempts}; no result yet"),
                None,
            ),
            UpcomingStepKind::Retry => (
                format!("it is retried at {at}, after {attempts}"),
                Some(format!("now: {resync}")),
            ),
            UpcomingStepKind::GivenUp => (
                format!(
                    "nothing. Krypton has stopped retrying after {attempts}, until the chart, the values or the Tenant changes"
                ),
                Some(format!("one more: {resync}")),
            ),
            UpcomingStepKind::Unlock => (
                format!("Krypton takes over the lock of the release at {at}"),
                None,
            ),
            UpcomingStepKind::Wait => (
                format!("its workloads have until {at} to become ready"),
                None,
            ),
        };
        self.add_with_remedy(Mark::Note, format!("next: {text}"), remedy.as_deref());
    }
}

/// Splits the drift details off the condition's message.
fn without_drift(state: &State) -> (State, Option<&str>) {
    let parts = state.message.split_once(DRIFT_SEPARATOR);
    let message = parts.map_or(state.message.as_str(), |(message, _)| message);
    let remaining = State::new(state.truth, state.reason.clone(), message);
    (remaining, parts.map(|(_, drift)| drift))
}
