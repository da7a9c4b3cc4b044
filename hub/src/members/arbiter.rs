//! Selects the reporter of each member: one of its agents' sessions or its proxy.
//!
//! The arbiter prefers the Lease holder to observers, and agents to the proxy. It requests a full report from a
//! new reporter.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use krypton_crds::edge_cluster::{AgentKey, AgentRoots, Mode};
pub use krypton_reconciler::agent_presence::{Presence, SILENCE};
use krypton_reconciler::report_store::Changes;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::Version;
use krypton_types::member::MemberReport;
use krypton_types::report_digest::together;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::edgecluster::credential_expiry::Validity;
use crate::members::claims::{Claims, Waits, Witnesses};
use crate::members::deployment_orders::Deployments;
use crate::members::observation::{MemberObservation, ObservationBoard};
use crate::members::placement_orders::Placements;
use crate::tenants::{Changed, Hearing, Reports};

const UNCONFIRMED: &str = "the member reports a later desired state, and no other member confirms it; if home was \
    restored from a backup, delete Secret krypton-system/krypton-desired-state on the member, or wait six hours";
/// Prefix of an agent's name in the Lease; a hub's is `hub/`.
pub const AGENT_HOLDER: &str = "agent/";

/// Minimum time between two full reports that the hub requests from a reporter because of a digest mismatch.
const ASK_EVERY: Duration = Duration::from_secs(10);
/// Time for which an oversized response stays in the condition. Longer than any retry back-off.
const OFFENCE_STANDS: Duration = Duration::from_secs(5 * 60);
/// Identifies a reporter of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReporterId {
    Proxy,
    /// The number of an agent's session. Newer sessions have greater numbers.
    Session(u64),
}

#[derive(Debug)]
struct Reporter {
    said: Option<MemberReport>,
    /// For an agent: the last time at which it could act, as far as the hub knows.
    able: Option<BootTime>,
    /// The reporter sent changes while it was not selected.
    missed: bool,
    /// Number of the outstanding full report; `None` once it is complete.
    awaited: Option<u64>,
    /// Time of the last request for a full report.
    asked: Option<BootTime>,
    asks: watch::Sender<u64>,
}

impl Reporter {
    fn is_ready(&self) -> bool {
        self.said.as_ref().is_some_and(|said| said.ready)
    }

    fn learn(&mut self, report: MemberReport, now: BootTime) {
        if self.is_ready() && !report.ready && !report.connected {
            self.able = self.able.map(Presence::able_before);
        }
        self.said = Some(report);
        self.lives(now);
    }

    fn lives(&mut self, now: BootTime) {
        if self.is_ready() {
            self.able = Some(now);
        }
    }
}

#[derive(Debug)]
struct Member {
    arbiter: BTreeMap<ReporterId, Reporter>,
    speaker: Option<ReporterId>,
    presence: watch::Sender<Presence>,
    /// Time of the last report from an agent, or of the start of the wait for one.
    heard: BootTime,
    /// The last time at which an agent whose session has ended could act.
    able: Option<BootTime>,
    /// State of the hub's own connection to the cluster; `None` without one.
    link: Option<State>,
    /// Reason and message why neither hub nor agent may act. Overrides any other health state.
    held_back: Option<(&'static str, String)>,
    claims: Claims,
    /// Message about an oversized response that the hub cut off, and the time of the last one.
    offence: Option<(String, BootTime)>,
}

impl Default for Member {
    fn default() -> Self {
        Self {
            arbiter: BTreeMap::new(),
            speaker: None,
            presence: watch::Sender::new(Presence::Never),
            heard: BootTime::default(),
            able: None,
            link: None,
            held_back: None,
            claims: Claims::default(),
            offence: None,
        }
    }
}

/// Arbiter of all members, with the stores that it writes the selected reports to.
#[derive(Debug)]
pub struct ReportArbiter {
    members: Mutex<BTreeMap<String, Member>>,
    /// Members to evaluate again at a certain time, even without a report.
    due: Mutex<BTreeSet<(BootTime, String)>>,
    due_changed: Notify,
    reports: Arc<Reports>,
    deployments: Arc<Deployments>,
    placements: Arc<Placements>,
    facts: Arc<ObservationBoard>,
    /// The latest epoch that a member has and this hub has not issued. It means that the home cluster was
    /// restored.
    ahead: watch::Sender<u64>,
    /// The epoch that this hub issues.
    epoch: AtomicU64,
    /// Locked briefly, while `members` is locked.
    witnesses: Mutex<Witnesses>,
}

/// Properties of an agent at the start of its session.
#[derive(Clone, Debug)]
pub struct AgentDetails {
    pub cluster_uid: String,
    pub kubernetes_version: String,
    pub agent_version: String,
    pub certificate: Validity,
    /// The key of that certificate.
    pub key: AgentKey,
    /// Version and digest of the desired state that the member has recorded.
    pub applied: Option<(Version, String)>,
}

impl ReportArbiter {
    pub fn new(
        reports: Arc<Reports>,
        facts: Arc<ObservationBoard>,
        ahead: watch::Sender<u64>,
    ) -> Self {
        Self {
            members: Mutex::default(),
            due: Mutex::default(),
            due_changed: Notify::new(),
            reports,
            deployments: Arc::default(),
            placements: Arc::default(),
            facts,
            ahead,
            epoch: AtomicU64::new(0),
            witnesses: Mutex::default(),
        }
    }

    /// Sets the epoch that the hub issues.
    pub fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::Relaxed);
    }

    /// Starts a leader term of this hub.
    ///
    /// A member without a session may have had one with the previous leader. Its agent therefore counts as away
    /// from `now`. The arbiter drops reports of earlier terms, because another hub may have newer ones. The
    /// recorded status stays.
    pub fn reset_for_term(&self, now: BootTime) {
        self.deployments.reset_for_term(now);
        self.placements.reset_for_term(now);
        self.reports.reset_targets();
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, member) in members.iter_mut() {
            if member.arbiter.keys().any(|id| *id != ReporterId::Proxy) {
                continue;
            }
            (member.heard, member.able) = (now, None);
            member.presence.send_if_modified(|presence| {
                let was_there = *presence != Presence::Never;
                if was_there {
                    *presence = Presence::Away(now);
                }
                was_there
            });
            self.forget_heard(name, member, now);
            if member.arbiter.is_empty() && member.presence.get() != Presence::Never {
                self.reports.begin(name, now);
                self.facts.set(name, |facts| {
                    facts.connected = State::new(Truth::Unknown, reason::STARTING, "");
                    facts.healthy = facts.connected.clone();
                });
            }
            self.settle(name, member, now);
        }
    }

    /// Drops all data of a member without a session that no current reporter has sent.
    fn forget_heard(&self, name: &str, member: &mut Member, now: BootTime) {
        self.facts.set(name, |facts| {
            (facts.agent_version, facts.roots) = (None, None);
            (facts.certificate, facts.certificate_said) = (None, false);
        });
        let proxy = member.arbiter.get_mut(&ReporterId::Proxy);
        // The proxy has kept watching the cluster, and its full report is complete.
        let says_all = |reporter: &Reporter| {
            let said = reporter.said.as_ref();
            reporter.awaited.is_none() && said.is_some_and(|said| said.connected && said.synced)
        };
        if proxy.as_deref().is_some_and(says_all) {
            return;
        }
        self.reports.forget_said(name, now);
        self.deployments.forget(name);
        self.placements.forget(name);
        self.facts
            .set(name, |facts| (facts.applied, facts.holder) = (None, None));
        if let Some(reporter) = proxy {
            ask(reporter, now);
        }
    }

    /// Reports of the members on KryptonDeployments.
    pub fn deployments(&self) -> &Arc<Deployments> {
        &self.deployments
    }

    /// Reports of the members on placed Tenants.
    pub fn placements(&self) -> &Arc<Placements> {
        &self.placements
    }

    /// Subscribes to the presence of the member's agent.
    pub fn presence(&self, member: &str) -> watch::Receiver<Presence> {
        self.with(member, |_, found| found.presence.subscribe())
    }

    /// Records that an agent was enrolled for the member. Until it connects, it counts as away since `now`.
    pub fn agent_known(&self, member: &str, now: BootTime) {
        self.with(member, |this, found| {
            let session = found.arbiter.keys().any(|id| *id != ReporterId::Proxy);
            if session || found.presence.get() != Presence::Never {
                return;
            }
            found.presence.send_replace(Presence::Away(now));
            found.heard = now;
            this.settle(member, found, now);
        });
    }

    /// Drops the data of the member's agent, because its EdgeCluster was deleted.
    pub fn forget_agent(&self, member: &str, now: BootTime) {
        self.with(member, |this, found| {
            found.presence.send_replace(Presence::Never);
            this.facts.set(member, |facts| {
                facts.uid = None;
                facts.agent_version = None;
                (facts.certificate, facts.certificate_said) = (None, false);
                (facts.agent_key, facts.key_refused) = (None, None);
                facts.roots = None;
            });
            this.settle(member, found, now);
        });
    }

    /// Removes a deleted member, unless a reporter or subscriber still uses it.
    pub fn forget(&self, member: &str) {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = members
            .get(member)
            .is_some_and(|found| found.arbiter.is_empty() && found.presence.is_closed());
        if idle {
            members.remove(member);
            let mut witnesses = self
                .witnesses
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            witnesses.hear(member, None);
            self.reports.forget(member);
            self.deployments.forget(member);
            self.placements.forget(member);
        }
    }

    /// Registers a reporter. The returned channel holds the number of the full report that the hub requests.
    pub fn open(&self, member: &str, id: ReporterId, now: BootTime) -> watch::Receiver<u64> {
        self.with(member, |this, found| {
            let (asks, asked) = watch::channel(0);
            let reporter = Reporter {
                said: None,
                able: None,
                missed: false,
                awaited: Some(0),
                asked: None,
                asks,
            };
            found.arbiter.insert(id, reporter);
            if id != ReporterId::Proxy {
                found.heard = now;
            }
            this.settle(member, found, now);
            asked
        })
    }

    /// Records the agent's details at the start of a session.
    pub fn agent(&self, member: &str, agent: &AgentDetails) {
        self.facts.set(member, |facts| {
            facts.uid = Some(agent.cluster_uid.clone());
            facts.kubernetes_version = Some(agent.kubernetes_version.clone());
            facts.agent_version = Some(agent.agent_version.clone());
            (facts.certificate, facts.certificate_said) = (Some(agent.certificate), true);
            facts.agent_key = Some(agent.key.clone());
            if agent.applied.is_some() {
                facts.applied.clone_from(&agent.applied);
            }
        });
    }

    /// Records that an agent of the member used a key that the hub has not recorded.
    pub fn agent_key_refused(&self, member: &str, now: jiff::Timestamp) {
        self.facts
            .set(member, |facts| facts.key_refused = Some(now));
    }

    /// Records which CA roots the member's agent trusts, and which one issued its certificate.
    pub fn agent_roots(&self, member: &str, roots: AgentRoots) {
        self.facts.set(member, |facts| facts.roots = Some(roots));
    }

    /// Applies the changes that a reporter sent. `complete` is the number of the full report that ends with
    /// them. Returns false if the member exceeds a storage limit.
    pub fn say(
        &self,
        member: &str,
        id: ReporterId,
        changes: Changes,
        complete: Option<u64>,
        now: BootTime,
    ) -> bool {
        let tenants = Changed::new(changes.tenants);
        let (deployments, placed) = (changes.deployments, changes.placed);
        self.with(member, |this, found| {
            let Some(reporter) = found.arbiter.get_mut(&id) else {
                return true;
            };
            if id != ReporterId::Proxy {
                found.heard = now;
            }
            // A reconciler that has not started reports the default.
            if let Some(report) = changes
                .member
                .filter(|said| *said != MemberReport::default())
            {
                reporter.learn(report, now);
            }
            if found.speaker != Some(id) {
                // This report may make it the selected reporter. The hub requests its earlier changes again.
                this.settle(member, found, now);
                if found.speaker != Some(id) {
                    if let Some(reporter) = found.arbiter.get_mut(&id) {
                        reporter.missed |= !tenants.is_empty()
                            || !deployments.is_empty()
                            || !placed.is_empty()
                            || complete.is_some();
                    }
                    return true;
                }
            }
            let Some(reporter) = found.arbiter.get_mut(&id) else {
                return true;
            };
            if complete.is_some() && complete == reporter.awaited {
                reporter.awaited = None;
            }
            let mut kept = true;
            if !tenants.is_empty() {
                kept = this.reports.report(member, tenants);
                this.facts.touch(member);
            }
            kept &= this.deployments.report(member, deployments);
            // The status of a Tenant contains its placement.
            let keys = placed.keys().cloned().collect();
            kept &= this.placements.report(member, placed);
            this.reports.touch(keys);
            this.settle(member, found, now);
            kept
        })
    }

    /// Compares the number of reports and their digest with the stored ones, and requests a full report if they
    /// differ.
    pub fn compare(&self, member: &str, id: ReporterId, theirs: (u64, u128), now: BootTime) {
        self.with(member, |this, found| {
            let Some(reporter) = found.arbiter.get_mut(&id) else {
                return;
            };
            found.heard = now;
            reporter.lives(now);
            if found.speaker != Some(id) || reporter.awaited.is_some() {
                return;
            }
            let Some(ours) = this.reports.digest(member) else {
                return;
            };
            let patient = reporter.asked.is_some_and(|at| now.since(at) < ASK_EVERY);
            let ours = together([
                ours,
                this.deployments.digest(member),
                this.placements.digest(member),
            ]);
            if ours != theirs && !patient {
                tracing::warn!(member, said = theirs.0, held = ours.0,
                    "what is held of the member is not what its agent has said; asking for all of it");
                this.reports.begin(member, now);
                this.deployments.begin(member);
                this.placements.begin(member);
                ask(reporter, now);
            }
        });
    }

    /// Unregisters a reporter.
    pub fn close(&self, member: &str, id: ReporterId, now: BootTime) {
        self.with(member, |this, found| {
            let able = found.arbiter.remove(&id).and_then(|reporter| reporter.able);
            found.able = found.able.max(able);
            // An agent that was never ready has not prevented the proxy from acting.
            if id != ReporterId::Proxy && found.presence.get() == Presence::Never {
                found
                    .presence
                    .send_replace(Presence::Away(BootTime::default()));
            }
            this.settle(member, found, now);
        });
    }

    /// Sets the state of the hub's own connection to the cluster.
    pub fn link(&self, member: &str, link: Option<State>, now: BootTime) {
        self.with(member, |this, found| {
            found.link = link;
            this.settle(member, found, now);
        });
    }

    /// Sets or clears the reason why neither hub nor agent may act on the member.
    pub fn hold_back(&self, member: &str, why: Option<(&'static str, String)>, now: BootTime) {
        self.with(member, |this, found| {
            if found.held_back == why {
                return;
            }
            // While the hub is still checking for duplicates, the last status stays.
            if let Some((why, message)) = why.as_ref().filter(|why| why.0 != reason::CONNECTING) {
                tracing::warn!(member, reason = why, problem = %message, "the member is left alone");
            }
            found.held_back = why;
            this.settle(member, found, now);
        });
    }

    /// Records that the hub cut off a response of the member's API server. The first message stays for a while,
    /// because the condition must not change with each response.
    pub fn offend(&self, member: &str, message: String, now: BootTime) {
        self.with(member, |this, found| {
            match &mut found.offence {
                Some((_, last)) => *last = now,
                None => {
                    tracing::warn!(member, problem = %message, "the member's API server answers beyond the limits");
                    found.offence = Some((message, now));
                    this.settle(member, found, now);
                }
            }
        });
    }

    /// Evaluates members again when their time has come, until `stop`.
    pub async fn keep(&self, stop: CancellationToken) {
        loop {
            let now = BootTime::now();
            let (due, next) = {
                let mut waiting = self.due();
                let later =
                    waiting.split_off(&(BootTime(now.0 + Duration::from_nanos(1)), String::new()));
                let due = std::mem::replace(&mut *waiting, later);
                (due, waiting.first().map(|(at, _)| *at))
            };
            for (_, member) in due {
                self.with(&member, |this, found| this.settle(&member, found, now));
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.due_changed.notified() => {}
                () = clock::sleep_until(next, now) => {}
            }
        }
    }

    fn due(&self) -> std::sync::MutexGuard<'_, BTreeSet<(BootTime, String)>> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Selects the reporter, and updates the stores from its reports.
    fn settle(&self, name: &str, member: &mut Member, now: BootTime) {
        let speaker = speaker(&member.arbiter, member.speaker);
        if speaker != member.speaker {
            member.speaker = speaker;
            if let Some(reporter) = speaker.and_then(|id| member.arbiter.get_mut(&id)) {
                tracing::debug!(member = name, ?speaker, "speaks for the member");
                self.reports.begin(name, now);
                self.deployments.begin(name);
                self.placements.begin(name);
                if reporter.missed {
                    ask(reporter, now);
                }
            }
        }
        let agents = || {
            let agents = member
                .arbiter
                .iter()
                .filter(|(id, _)| **id != ReporterId::Proxy);
            agents.map(|(_, reporter)| reporter)
        };
        let ready = agents().any(Reporter::is_ready);
        let able = agents()
            .filter_map(|reporter| reporter.able)
            .chain(member.able)
            .max();
        member.presence.send_if_modified(|presence| {
            let next = presence.next(ready, able.unwrap_or(now));
            let changed = next != *presence;
            *presence = next;
            changed
        });
        let reporter = speaker.and_then(|id| Some((id, member.arbiter.get(&id)?)));
        if let Some((_, last)) = &member.offence {
            let until = BootTime(last.0 + OFFENCE_STANDS);
            match until <= now {
                true => member.offence = None,
                false => self.look_again(name, until),
            }
        }
        let mut standing = standing(
            reporter.map(|(id, reporter)| (id, reporter.said.as_ref(), reporter.awaited.is_none())),
            member.link.as_ref(),
            member.held_back.as_ref(),
            member.presence.get(),
            now.since(member.heard) >= SILENCE,
        );
        if speaker.is_none() && now.since(member.heard) < SILENCE {
            self.look_again(name, BootTime(member.heard.0 + SILENCE));
        }
        if let (Some((message, _)), None) = (&member.offence, &member.held_back) {
            let state = State::new(Truth::False, reason::LIMIT_EXCEEDED, message.clone());
            standing.healthy = Some(state);
        }
        let said = reporter.and_then(|(_, reporter)| reporter.said.as_ref());
        let writes = said.is_some_and(|said| said.writing) && member.held_back.is_none();
        self.weigh(name, &mut member.claims, writes, &mut standing, now);
        self.facts.set(name, |facts| standing.put(facts));
        if let Some(hearing) = standing.hearing {
            self.reports.hearing(name, hearing);
        }
        // A full report of orders may be complete although the Tenants cannot be listed.
        let whole = reporter.is_some_and(|(_, reporter)| {
            let said = reporter.said.as_ref();
            reporter.awaited.is_none() && said.is_some_and(|said| said.connected && said.ready)
        });
        if whole {
            self.deployments.whole(name);
            self.placements.whole(name);
        }
    }

    /// Follows a member's claim of an epoch that this hub has not issued, once the claim is credible.
    fn weigh(
        &self,
        name: &str,
        claims: &mut Claims,
        writes: bool,
        standing: &mut Standing,
        now: BootTime,
    ) {
        let acts = writes && (standing.ahead.is_some() || standing.applied.is_some());
        let (given, known) = (self.epoch.load(Ordering::Relaxed), self.ahead.get());
        let later = {
            let mut witnesses = self
                .witnesses
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            witnesses.hear(name, acts.then_some(standing.ahead));
            witnesses.later(name, given, known)
        };
        let Some((later, confirmed)) = later else {
            return claims.end();
        };
        match claims.follow(now, confirmed) {
            Ok(()) => {
                self.ahead.send_if_modified(|known| {
                    let news = later > *known;
                    *known = (*known).max(later);
                    news
                });
            }
            Err(Waits::Again(at)) => self.look_again(name, at),
            Err(Waits::Alone(at)) => {
                let state = State::new(Truth::False, reason::STALE, UNCONFIRMED);
                standing.healthy = Some(state);
                self.look_again(name, at);
            }
        }
    }

    fn look_again(&self, name: &str, at: BootTime) {
        self.due().insert((at, name.to_owned()));
        self.due_changed.notify_one();
    }

    fn with<T>(&self, member: &str, act: impl FnOnce(&Self, &mut Member) -> T) -> T {
        // A panic cannot leave these plain values half written, so a poisoned lock is safe to use.
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        act(self, members.entry(member.to_owned()).or_default())
    }
}

/// Requests a full report from a reporter.
fn ask(reporter: &mut Reporter, now: BootTime) {
    reporter.asked = Some(now);
    let mut number = 0;
    reporter.asks.send_modify(|asks| {
        *asks += 1;
        number = *asks;
    });
    reporter.awaited = Some(number);
    reporter.missed = false;
}

/// Selects the reporter: the Lease holder, otherwise one that can reach the cluster, otherwise any. Among
/// equals it prefers an agent, then the current reporter, then the newest session.
fn speaker(
    arbiter: &BTreeMap<ReporterId, Reporter>,
    present: Option<ReporterId>,
) -> Option<ReporterId> {
    let rank = |reporter: &Reporter| match &reporter.said {
        None => 0,
        Some(said) if !said.connected => 1,
        Some(said) if !said.synced => 2,
        Some(said) if !said.writing => 3,
        Some(_) => 4,
    };
    arbiter
        .iter()
        .max_by_key(|(id, reporter)| {
            let agent = **id != ReporterId::Proxy;
            (rank(reporter), agent, Some(**id) == present, **id)
        })
        .map(|(id, _)| *id)
}

/// State of a member, derived from its reports.
#[derive(Debug)]
struct Standing {
    mode: Mode,
    connected: Option<State>,
    healthy: Option<State>,
    holder: Option<Option<String>>,
    applied: Option<(Version, String)>,
    ahead: Option<u64>,
    hearing: Option<Hearing>,
}

impl Standing {
    fn put(&self, facts: &mut MemberObservation) {
        facts.mode = self.mode;
        if let Some(connected) = &self.connected {
            facts.connected.clone_from(connected);
        }
        if let Some(healthy) = &self.healthy {
            facts.healthy.clone_from(healthy);
        }
        if let Some(holder) = &self.holder {
            facts.holder.clone_from(holder);
        }
        if self.applied.is_some() {
            facts.applied.clone_from(&self.applied);
        }
    }
}

fn standing(
    reporter: Option<(ReporterId, Option<&MemberReport>, bool)>,
    link: Option<&State>,
    held_back: Option<&(&'static str, String)>,
    presence: Presence,
    silent: bool,
) -> Standing {
    let mut standing = match reporter {
        Some((id, Some(said), whole)) => spoken(id, said, whole),
        Some((id, None, _)) => Standing {
            mode: if id == ReporterId::Proxy {
                Mode::Proxy
            } else {
                Mode::Agent
            },
            connected: (id != ReporterId::Proxy)
                .then(|| State::new(Truth::True, reason::CONNECTED, "")),
            healthy: Some(State::new(Truth::Unknown, reason::STARTING, "")),
            holder: None,
            applied: None,
            ahead: None,
            hearing: None,
        },
        None => unspoken(link, presence, silent),
    };
    if let Some((why, message)) = held_back {
        standing.mode = Mode::None;
        // A suspended member is not unhealthy.
        let truth = match *why {
            reason::SUSPENDED => Truth::Unknown,
            _ => Truth::False,
        };
        standing.healthy = Some(State::new(truth, *why, message.clone()));
        standing.hearing =
            (*why != reason::CONNECTING).then(|| Hearing::Silent(format!("{why}: {message}")));
    }
    standing
}

fn spoken(id: ReporterId, said: &MemberReport, whole: bool) -> Standing {
    let problem = said.problem.clone().unwrap_or_default();
    let agent = id != ReporterId::Proxy;
    let connected = if said.connected {
        State::new(Truth::True, reason::CONNECTED, "")
    } else if agent {
        let message =
            format!("the agent is connected, its apiserver does not answer it: {problem}");
        State::new(Truth::False, reason::UNREACHABLE, message)
    } else {
        State::new(Truth::False, reason::UNREACHABLE, problem.clone())
    };
    let other = said.holder.as_ref().filter(|_| !said.writing);
    let healthy = if said.ahead.is_some() {
        let message = "the member has seen a later desired state; the hub takes a new epoch";
        State::new(Truth::False, reason::STALE, message)
    } else if let Some(other) = other {
        let who = if agent {
            "the connected agent"
        } else {
            "this hub"
        };
        let message = format!("{other} holds the Lease; {who} observes");
        State::new(Truth::True, reason::OBSERVING, message)
    } else if let (true, Some(why)) = (said.connected, &said.not_restored) {
        State::new(Truth::False, reason::NOT_RESTORED, why.clone())
    } else if said.connected && said.synced && said.writing && said.applied.is_some() {
        match &said.problem {
            Some(problem) if !problem.is_empty() => {
                let message = format!("the newest desired state is not on record: {problem}");
                State::new(Truth::False, reason::STALE, message)
            }
            _ => State::new(Truth::True, reason::RECONCILING, ""),
        }
    } else if said.connected {
        State::new(Truth::Unknown, reason::STARTING, problem.clone())
    } else {
        State::new(Truth::Unknown, reason::UNREACHABLE, problem.clone())
    };
    let held_by_agent = said
        .holder
        .as_ref()
        .map(|holder| holder.starts_with(AGENT_HOLDER));
    // Until the full report is complete, a missing Tenant means nothing.
    let hearing = match (said.connected, said.synced && whole) {
        (true, true) => Some(Hearing::Full),
        (true, false) => None,
        (false, _) => {
            let why = format!("the cluster does not answer: {problem}");
            Some(Hearing::Silent(why))
        }
    };
    Standing {
        mode: if held_by_agent.unwrap_or(agent) {
            Mode::Agent
        } else {
            Mode::Proxy
        },
        connected: Some(connected),
        healthy: Some(healthy),
        holder: Some(said.holder.clone()),
        applied: said.applied.clone(),
        // Only the Lease holder has a record on the member to compare with.
        ahead: said
            .ahead
            .filter(|_| said.writing)
            .map(|version| version.epoch),
        hearing,
    }
}

/// Derives the state of a member without a reporter from the hub's own connection, if there is one.
fn unspoken(link: Option<&State>, presence: Presence, silent: bool) -> Standing {
    let away = |message: &str| Standing {
        mode: Mode::Agent,
        connected: Some(State::new(Truth::False, reason::AGENT_AWAY, message)),
        healthy: Some(State::new(Truth::Unknown, reason::AGENT_AWAY, message)),
        holder: Some(None),
        applied: None,
        ahead: None,
        hearing: Some(Hearing::Silent(message.to_owned())),
    };
    match (link, presence) {
        // The agent may reconnect soon, so its last status stays for a while.
        (_, Presence::Away(_) | Presence::Ready) if !silent => Standing {
            mode: Mode::Agent,
            connected: None,
            healthy: None,
            holder: None,
            applied: None,
            ahead: None,
            hearing: None,
        },
        (None, Presence::Away(_) | Presence::Ready) => away(
            "the agent is not connected; it goes on with the last desired state it has. Look at its log and at the way from there to the hub",
        ),
        (Some(link), _) if link.truth == Truth::False => Standing {
            mode: Mode::None,
            connected: Some(link.clone()),
            healthy: Some(State::new(
                Truth::Unknown,
                link.reason.clone(),
                link.message.clone(),
            )),
            holder: Some(None),
            applied: None,
            ahead: None,
            hearing: Some(Hearing::Silent(link.message.clone())),
        },
        (link, _) => Standing {
            mode: Mode::None,
            connected: link.cloned(),
            healthy: None,
            holder: None,
            applied: None,
            ahead: None,
            hearing: None,
        },
    }
}

#[cfg(test)]
mod tests;
