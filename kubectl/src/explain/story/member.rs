//! Explains one member: its reporter, its desired state, the state of the Tenant there, and the next step.

use jiff::Timestamp;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterStatus, Mode};
use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_types::conditions::{self, ClusterState, State, Truth, reason};
use krypton_types::desired::Version;
use krypton_types::tenant::{Next, Step};

use super::super::remedy;
use super::super::sources::{Asking, Sources};
use super::{FEW, Mark, Teller, mark};
use crate::render::{age, reason_and_message};

const DRIFT: &str = "; drift: ";

/// The hub writes `lastSeen` once a minute. If it is older, in seconds, the hub is down or the clocks differ.
const SEEN_IS_OLD: i64 = 300;

impl Teller<'_> {
    /// Adds the lines of all members. Returns false if any member is silent.
    pub(super) fn members(
        &mut self,
        sources: &Sources,
        tenant: Option<&Tenant>,
        status: &TenantStatus,
        is_home: bool,
    ) -> bool {
        let clusters = conditions::clusters(&status.conditions);
        let mut heard = true;
        let mut well = Vec::new();
        for (name, asked) in &sources.members {
            let begun = self.lines.len();
            self.member = Some(name.clone());
            if is_home {
                heard &= self.member(asked);
            }
            let next = Next::from_status(status, name);
            match clusters.get(name) {
                Some(state) => self.state(state, next, tenant),
                None => self.say(Mark::NotKnown, "home knows of no such Tenant there"),
            }
            let all_well = self.lines[begun..]
                .iter()
                .all(|line| line.mark == Mark::Well);
            if all_well && sources.members.len() > FEW {
                self.lines.truncate(begun);
                well.push(name.as_str());
            }
        }
        self.member = None;
        if !well.is_empty() {
            let count = well.len();
            let text = format!("well on {count} members: {}", well.join(", "));
            self.say(Mark::Well, text);
        }
        heard
    }

    /// Adds the lines of one member. Returns false if it is silent.
    fn member(&mut self, asked: &Asking<EdgeCluster>) -> bool {
        if self.not_known("how this member stands", asked) {
            return false;
        }
        let Asking::Found(cluster) = asked else {
            let remedy = "kubectl krypton get clusters lists the members";
            let text = "there is no EdgeCluster of this name";
            self.push(Mark::Wrong, text, Some(remedy.to_owned()));
            return false;
        };
        let name = self.member.clone().unwrap_or_default();
        if cluster.metadata.deletion_timestamp.is_some() {
            self.say(Mark::Note, "it is leaving the fleet");
        }
        if cluster.spec.banned {
            let remedy = format!("kubectl krypton unban {name}");
            self.push(Mark::Wrong, "banned: nobody goes there", Some(remedy));
        }
        if cluster.spec.paused {
            let text = "paused on the EdgeCluster: nothing is written there but status";
            let remedy = format!("kubectl krypton resume cluster {name}");
            self.push(Mark::Note, text, Some(remedy));
        }
        let status = cluster.status.clone().unwrap_or_default();
        let heard = self.session(&status);
        self.lease(&status, heard);
        self.desired(&status, heard);
        for type_ in [conditions::VALUES_RESOLVED, "CertificateCurrent"] {
            let said = conditions::find(&status.conditions, type_);
            if let Some(said) = said.filter(|said| said.truth == Truth::False) {
                self.told(Mark::Note, &said, remedy::of_member(&said.reason));
            }
        }
        heard
    }

    fn told(&mut self, mark: Mark, state: &State, remedy: Option<&str>) {
        let text = reason_and_message(&state.reason, &state.message);
        self.push(mark, text, remedy.map(str::to_owned));
    }

    fn session(&mut self, status: &EdgeClusterStatus) -> bool {
        let Some(connected) = conditions::find(&status.conditions, "Connected") else {
            self.say(Mark::NotKnown, "nobody has looked at it yet");
            return false;
        };
        let seen = status.last_seen.as_ref().map(|time| time.0);
        let silent = |seen: &Timestamp| self.now.as_second() - seen.as_second() > SEEN_IS_OLD;
        if connected.truth == Truth::True
            && let Some(seen) = seen.filter(silent)
        {
            let since = self.when(seen);
            let text = format!("home says that it is connected, and has not seen it since {since}");
            let remedy =
                "look at the hub's pods and their log: who is connected is looked at each minute";
            self.push(Mark::NotKnown, text, Some(remedy.to_owned()));
            return false;
        }
        match connected.truth {
            Truth::True => {
                let who = match (status.mode, &status.agent_version) {
                    (Some(Mode::Agent), Some(version)) => {
                        format!("its agent ({version}) is connected")
                    }
                    (Some(Mode::Agent), None) => "its agent is connected".to_owned(),
                    (Some(Mode::Proxy), _) => "the hub reaches it by its kubeconfig".to_owned(),
                    (Some(Mode::None) | None, _) => {
                        "it is connected, and nobody acts on it".to_owned()
                    }
                };
                let seen = seen.map(|seen| format!(", last seen {} ago", age(seen, self.now)));
                let text = format!("{who}{}", seen.unwrap_or_default());
                self.say(Mark::Well, text);
                true
            }
            truth => {
                let changed = status
                    .conditions
                    .iter()
                    .find(|found| found.type_ == "Connected");
                let changed = changed.map(|found| found.last_transition_time.0);
                let since = seen.or(changed).map(|since| self.when(since));
                let why = reason_and_message(&connected.reason, &connected.message);
                let text = match since {
                    Some(since) => format!("nothing was heard of it since {since}: {why}"),
                    None => format!("nothing was heard of it yet: {why}"),
                };
                let remedy = remedy::of_member(&connected.reason).map(str::to_owned);
                self.push(mark(truth), text, remedy);
                false
            }
        }
    }

    fn lease(&mut self, status: &EdgeClusterStatus, heard: bool) {
        let healthy = conditions::find(&status.conditions, "Healthy");
        let wrong = healthy.filter(|healthy| healthy.truth != Truth::True);
        // An earlier line already reports the connection problem.
        let connected = conditions::find(&status.conditions, "Connected");
        let same = |state: &State| {
            connected
                .as_ref()
                .is_some_and(|told| told.reason == state.reason)
        };
        if let Some(wrong) = wrong.filter(|wrong| !same(wrong)) {
            self.told(Mark::Note, &wrong, remedy::of_member(&wrong.reason));
        }
        if let Some(holder) = status.holder.as_deref().filter(|holder| !holder.is_empty()) {
            if heard {
                let text = format!("{holder} holds its Lease, and acts there");
                self.say(Mark::Well, text);
            } else {
                let text = format!("{holder} held its Lease when it was last heard");
                self.say(Mark::NotKnown, text);
            }
        }
    }

    fn desired(&mut self, status: &EdgeClusterStatus, heard: bool) {
        let Some(desired) = &status.desired else {
            return;
        };
        let wanted = Version {
            epoch: desired.epoch,
            generation: desired.generation,
        };
        let chart = &desired.chart;
        match (&status.applied, status.is_behind()) {
            (_, Some(false)) => {
                let what = format!("what is wanted: {chart} (desired state {wanted})");
                if heard {
                    self.say(Mark::Well, format!("it has {what}"));
                } else {
                    self.say(
                        Mark::NotKnown,
                        format!("it had, when it was last heard, {what}"),
                    );
                }
            }
            (Some(applied), None) => {
                let (epoch, generation) = (applied.epoch, applied.generation);
                let has = Version { epoch, generation };
                let text =
                    format!("it acts on desired state {has}, later than home tells to be wanted");
                self.say(Mark::Note, text);
            }
            (Some(applied), _) => {
                let has = Version {
                    epoch: applied.epoch,
                    generation: applied.generation,
                };
                let since = desired.since.as_ref().map(|since| self.when(since.0));
                let since = since
                    .map(|since| format!(" since {since}"))
                    .unwrap_or_default();
                let text = format!(
                    "it acts on desired state {has}; {wanted} is wanted{since}, with {chart}"
                );
                self.say(Mark::Note, text);
            }
            (None, _) => {
                let text =
                    format!("it has taken no desired state yet; {wanted} is wanted, with {chart}");
                self.say(Mark::Note, text);
            }
        }
    }

    /// Describes the state of the Tenant on the member.
    fn state(&mut self, state: &ClusterState, next: Option<Next>, tenant: Option<&Tenant>) {
        let is_true = |state: &&State| state.truth == Truth::True;
        let error = state.error.as_ref().filter(is_true);
        if let Some(error) = error {
            self.told(Mark::Wrong, error, remedy::of_tenant(&error.reason));
        }
        let going = state.progress.as_ref().filter(is_true);
        if let Some(going) = going {
            self.told(Mark::Note, going, None);
        }
        let (ready, drift) = without_drift(&state.ready);
        match ready.truth {
            Truth::True => self.told(Mark::Well, &ready, None),
            Truth::Unknown => self.told(Mark::NotKnown, &ready, remedy::of_tenant(&ready.reason)),
            Truth::False if error.is_some() || going.is_some() => {}
            Truth::False => self.told(Mark::Wrong, &ready, remedy::of_tenant(&ready.reason)),
        }
        if let Some(drift) = drift {
            let text = format!("it has drifted from its chart: {drift}");
            self.say(Mark::Note, text);
        }
        let held = state.progress.as_ref().filter(|progress| {
            progress.truth == Truth::False
                && [reason::PAUSED, reason::LOCKED].contains(&progress.reason.as_str())
        });
        if let Some(held) = held {
            let resume = (held.reason == reason::PAUSED).then(|| self.command("resume", tenant));
            let text = reason_and_message(&held.reason, &held.message);
            self.push(
                Mark::Note,
                format!("nothing is changed there: {text}"),
                resume,
            );
        }
        // A Ready Tenant can have an outdated entry from an older version of the hub or agent.
        match next.filter(|_| ready.truth != Truth::True) {
            Some(next) => self.next(next, tenant),
            None if error.is_some_and(|error| error.message.starts_with("not ready ")) => {
                let text = "nothing is tried again: it is Ready as soon as its workloads are";
                self.say(Mark::Note, text);
            }
            None => {}
        }
    }

    fn next(&mut self, next: Next, tenant: Option<&Tenant>) {
        let at = next.at.map(|at| self.when(at));
        let past = next.at.is_some_and(|at| at <= self.now);
        let (attempts, s) = (next.attempts, if next.attempts == 1 { "" } else { "s" });
        let (text, remedy) = match (next.step, at) {
            (Step::Retry, Some(at)) if past => (
                format!(
                    "next: another attempt, due {at}, after {attempts} failed attempt{s}; of that nothing was said yet"
                ),
                None,
            ),
            (Step::Retry, at) => (
                format!(
                    "next: it is tried again at {}, after {attempts} failed attempt{s}",
                    at.unwrap_or_else(|| "a time that is not told".to_owned())
                ),
                Some(format!("at once: {}", self.command("resync", tenant))),
            ),
            (Step::GivenUp, _) => (
                format!(
                    "next: nothing. It was given up after {attempts} failed attempt{s}, until chart, values or Tenant change"
                ),
                Some(format!("one more: {}", self.command("resync", tenant))),
            ),
            (Step::Unlock, at) => (
                format!(
                    "next: the release is taken over from whoever holds it at {}",
                    at.unwrap_or_else(|| "a time that is not told".to_owned())
                ),
                None,
            ),
            (Step::Wait, at) => (
                format!(
                    "next: its workloads have until {} to become ready",
                    at.unwrap_or_else(|| "a time that is not told".to_owned())
                ),
                None,
            ),
        };
        self.push(Mark::Note, text, remedy);
    }
}

/// Splits the drift details off the condition's message.
fn without_drift(state: &State) -> (State, Option<&str>) {
    let found = state.message.split_once(DRIFT);
    let bare = found.map_or(state.message.as_str(), |(bare, _)| bare);
    let bare = State::new(state.truth, state.reason.clone(), bare);
    (bare, found.map(|(_, drift)| drift))
}
