//! Selects the reporter of each member: one of its agents' sessions or its proxy.
//!
//! The Lease holder is preferred to observers, and an agent to the proxy. The arbiter requests a full report from a
//! new reporter.

mod evaluation;

use std::collections::BTreeMap;
use std::time::Duration;

use krypton_crds::edge_cluster::{AgentKey, AgentRoots};
pub use krypton_reconciler::agent_presence::{Presence, SILENCE};
use krypton_reconciler::report_store::Changes;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{State, reason};
use krypton_types::desired::Version;
use krypton_types::member::MemberReport;
use krypton_types::report_digest::combine;
use krypton_types::validity::Validity;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::members::claims::ClaimHistory;
use crate::members::observation::MemberObservation;
use crate::members::tenant_reports::TenantReportChanges;
use crate::members::{LockedMember, MemberRegistry};

/// Prefix of an agent's name in the Lease; a hub's is `hub/`.
pub const AGENT_HOLDER: &str = "agent/";

/// Minimum time between two full reports that the hub requests from a reporter because of a digest mismatch.
const RESYNC_INTERVAL: Duration = Duration::from_secs(10);

/// Identifies a reporter of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReporterId {
    Proxy,
    /// The number of an agent's session. Newer sessions have greater numbers.
    Session(u64),
}

#[derive(Debug, Default)]
struct Reporter {
    report: Option<MemberReport>,
    /// For an agent: the last time at which it could act, as far as the hub knows.
    last_able: Option<BootTime>,
    /// The reporter sent changes while it was not selected.
    missed_changes: bool,
    /// Number of the outstanding full report; `None` once it is complete.
    awaited_report: Option<u64>,
    /// Time of the last request for a full report.
    requested_at: Option<BootTime>,
    requests: watch::Sender<u64>,
}

impl Reporter {
    fn is_ready(&self) -> bool {
        self.report.as_ref().is_some_and(|report| report.ready)
    }

    fn update(&mut self, report: MemberReport, now: BootTime) {
        if self.is_ready() && !report.ready && !report.connected {
            self.last_able = self.last_able.map(Presence::able_before);
        }
        self.report = Some(report);
        self.mark_alive(now);
    }

    fn mark_alive(&mut self, now: BootTime) {
        if self.is_ready() {
            self.last_able = Some(now);
        }
    }

    /// Requests a full report.
    fn request_full_report(&mut self, now: BootTime) {
        self.requested_at = Some(now);
        let mut number = 0;
        self.requests.send_modify(|latest| {
            *latest += 1;
            number = *latest;
        });
        self.awaited_report = Some(number);
        self.missed_changes = false;
    }
}

/// The reporters of one member.
#[derive(Debug, Default)]
pub(super) struct Reporters {
    all: BTreeMap<ReporterId, Reporter>,
    selected: Option<ReporterId>,
    presence: watch::Sender<Presence>,
    /// Time of the last report from an agent, or of the start of the wait for one.
    last_agent_report: BootTime,
    /// The last time at which an agent whose session has ended could act.
    last_able: Option<BootTime>,
    /// State of the hub's own connection to the cluster; `None` without one.
    connection: Option<State>,
    /// Reason and message why neither hub nor agent may act. Overrides any other health state.
    held_back: Option<(&'static str, String)>,
    claims: ClaimHistory,
    /// Message about an oversized response that the hub cut off, and the time of the last one.
    oversized_response: Option<(String, BootTime)>,
}

impl Reporters {
    /// Whether there is neither a reporter nor a subscriber.
    pub(super) fn is_idle(&self) -> bool {
        self.all.is_empty() && self.presence.is_closed()
    }

    fn agents(&self) -> impl Iterator<Item = &Reporter> {
        let agents = self.all.iter().filter(|(id, _)| **id != ReporterId::Proxy);
        agents.map(|(_, reporter)| reporter)
    }

    fn selected(&self) -> Option<SelectedReporter<'_>> {
        let id = self.selected?;
        let reporter = self.all.get(&id)?;
        Some(SelectedReporter {
            id,
            report: reporter.report.as_ref(),
            complete: reporter.awaited_report.is_none(),
        })
    }
}

/// The selected reporter of a member.
#[derive(Clone, Copy, Debug)]
pub(super) struct SelectedReporter<'a> {
    pub(super) id: ReporterId,
    pub(super) report: Option<&'a MemberReport>,
    /// Its full report has arrived.
    pub(super) complete: bool,
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
    /// Whether its clock agrees with the hub's.
    pub clock: State,
    /// Version and digest of the desired state that the member has recorded.
    pub applied: Option<(Version, String)>,
}

impl MemberRegistry {
    /// Sets the epoch that the hub issues.
    pub fn set_epoch(&self, epoch: u64) {
        self.state.lock().fleet.epoch = epoch;
    }

    /// Subscribes to the presence of the member's agent.
    pub fn presence(&self, member: &str) -> watch::Receiver<Presence> {
        self.with(member, |member| member.reporters().presence.subscribe())
    }

    /// Records that an agent was enrolled for the member. Until it connects, it counts as away since `now`.
    pub fn agent_enrolled(&self, member: &str, now: BootTime) {
        self.with(member, |member| {
            let reporters = member.reporters();
            if reporters.agents().next().is_some() || reporters.presence.get() != Presence::Never {
                return;
            }
            reporters.presence.send_replace(Presence::Away(now));
            reporters.last_agent_report = now;
            member.reevaluate(now);
        });
    }

    /// Drops the data of the member's agent, because its EdgeCluster was deleted.
    pub fn forget_agent(&self, member: &str, now: BootTime) {
        self.with(member, |member| {
            member.reporters().presence.send_replace(Presence::Never);
            member.observe(|observation| {
                observation.uid = None;
                observation.forget_agent();
                (observation.agent_key, observation.key_refused) = (None, None);
            });
            member.set_uids(|uids| uids.agent = None);
            member.reevaluate(now);
        });
    }

    /// Registers a reporter. The returned channel holds the number of the full report that the hub requests.
    pub fn open(&self, member: &str, id: ReporterId, now: BootTime) -> watch::Receiver<u64> {
        self.with(member, |member| {
            let reporter = Reporter {
                awaited_report: Some(0),
                ..Reporter::default()
            };
            let requested = reporter.requests.subscribe();
            let reporters = member.reporters();
            reporters.all.insert(id, reporter);
            if id != ReporterId::Proxy {
                reporters.last_agent_report = now;
            }
            member.reevaluate(now);
            requested
        })
    }

    /// Records the agent's details at the start of a session.
    pub fn agent_connected(&self, member: &str, agent: &AgentDetails) {
        self.with(member, |member| {
            member.set_uids(|uids| uids.agent = Some(agent.cluster_uid.clone()));
            member.observe(|observation| {
                observation.uid = Some(agent.cluster_uid.clone());
                observation.kubernetes_version = Some(agent.kubernetes_version.clone());
                observation.agent_version = Some(agent.agent_version.clone());
                (observation.certificate, observation.certificate_reported) =
                    (Some(agent.certificate), true);
                observation.agent_key = Some(agent.key.clone());
                observation.clock = Some(agent.clock.clone());
                if agent.applied.is_some() {
                    observation.applied.clone_from(&agent.applied);
                }
            });
        });
    }

    /// Records that an agent of the member used a key that the hub has not recorded.
    pub fn agent_key_refused(&self, member: &str, now: jiff::Timestamp) {
        self.observe(member, |observation| observation.key_refused = Some(now));
    }

    /// Records which CA roots the member's agent trusts, and which one issued its certificate.
    pub fn agent_roots(&self, member: &str, roots: AgentRoots) {
        self.observe(member, |observation| observation.roots = Some(roots));
    }

    /// Applies the changes that a reporter sent. `complete` is the number of the full report that ends with
    /// them. Returns false if the member exceeds a storage limit.
    pub fn report(
        &self,
        member: &str,
        id: ReporterId,
        changes: Changes,
        complete: Option<u64>,
        now: BootTime,
    ) -> bool {
        let Changes {
            member: report,
            tenants,
            deployments,
            placed,
        } = changes;
        let tenants = TenantReportChanges::new(tenants);
        self.with(member, |member| {
            let reporters = member.reporters();
            let Some(reporter) = reporters.all.get_mut(&id) else {
                return true;
            };
            if id != ReporterId::Proxy {
                reporters.last_agent_report = now;
            }
            // A reconciler that has not started reports the default.
            if let Some(report) = report.filter(|report| *report != MemberReport::default()) {
                reporter.update(report, now);
            }
            if reporters.selected != Some(id) {
                // This report may make it the selected reporter. The hub requests its earlier changes again.
                member.reevaluate(now);
            }
            let reporters = member.reporters();
            let selected = reporters.selected == Some(id);
            let Some(reporter) = reporters.all.get_mut(&id) else {
                return true;
            };
            if !selected {
                reporter.missed_changes |= !tenants.is_empty()
                    || !deployments.is_empty()
                    || !placed.is_empty()
                    || complete.is_some();
                return true;
            }
            if complete.is_some() && complete == reporter.awaited_report {
                reporter.awaited_report = None;
            }
            let (registry, name) = (member.registry, member.name);
            let mut within_limit = true;
            if !tenants.is_empty() {
                let is_full = id != ReporterId::Proxy && registry.reports.is_full(name);
                within_limit = !is_full && registry.reports.apply(name, tenants);
                member.mark_changed();
            }
            within_limit &= registry.deployments.apply(name, deployments);
            // The status of a Tenant contains its placement.
            let keys = placed.keys().cloned().collect();
            within_limit &= registry.placements.apply(name, placed);
            registry.reports.mark_dirty(keys);
            member.reevaluate(now);
            within_limit
        })
    }

    /// Compares the number of reports and their digest with the stored ones, and requests a full report if they
    /// differ.
    pub fn compare(&self, member: &str, id: ReporterId, theirs: (u64, u128), now: BootTime) {
        self.with(member, |member| {
            let reporters = member.reporters();
            let Some(reporter) = reporters.all.get_mut(&id) else {
                return;
            };
            reporters.last_agent_report = now;
            reporter.mark_alive(now);
            let requested_recently = reporter
                .requested_at
                .is_some_and(|at| now.since(at) < RESYNC_INTERVAL);
            if reporters.selected != Some(id)
                || reporter.awaited_report.is_some()
                || requested_recently
            {
                return;
            }
            let Some(ours) = member.digest().filter(|ours| *ours != theirs) else {
                return;
            };
            tracing::warn!(
                member = member.name,
                said = theirs.0,
                held = ours.0,
                "stored reports differ from the agent's; requesting all of them"
            );
            member.begin_full_report(now);
            if let Some(reporter) = member.reporters().all.get_mut(&id) {
                reporter.request_full_report(now);
            }
        });
    }

    /// Unregisters a reporter.
    pub fn close(&self, member: &str, id: ReporterId, now: BootTime) {
        self.with(member, |member| {
            let reporters = member.reporters();
            let last_able = reporters
                .all
                .remove(&id)
                .and_then(|reporter| reporter.last_able);
            reporters.last_able = reporters.last_able.max(last_able);
            // An agent that was never ready has not prevented the proxy from acting.
            if id != ReporterId::Proxy && reporters.presence.get() == Presence::Never {
                let away = Presence::Away(BootTime::default());
                reporters.presence.send_replace(away);
            }
            member.reevaluate(now);
        });
    }

    /// Sets the state of the hub's own connection to the cluster.
    pub fn set_connection(&self, member: &str, connection: Option<State>, now: BootTime) {
        self.with(member, |member| {
            member.reporters().connection = connection;
            member.reevaluate(now);
        });
    }

    /// Records an attempt of the hub to reach the cluster: the state of its connection, and the cluster's UID if it
    /// responded.
    pub fn connection_attempted(
        &self,
        member: &str,
        connection: State,
        uid: Option<String>,
        now: BootTime,
    ) {
        self.with(member, |member| {
            member.reporters().connection = Some(connection);
            member.set_uids(|uids| {
                // A cluster that stops responding keeps its identity.
                uids.hub = Some(uid.or_else(|| uids.hub.take().flatten()));
            });
            member.reevaluate(now);
        });
    }

    /// Records the end of the hub's own connection to the cluster.
    pub fn clear_connection(&self, member: &str, now: BootTime) {
        self.with(member, |member| {
            member.reporters().connection = None;
            member.set_uids(|uids| uids.hub = None);
            member.observe(|observation| observation.access = None);
            member.reevaluate(now);
        });
    }

    /// Sets or clears the reason why neither hub nor agent may act on the member.
    pub fn hold_back(&self, member: &str, cause: Option<(&'static str, String)>, now: BootTime) {
        self.with(member, |member| {
            if member.reporters().held_back == cause {
                return;
            }
            // While the hub is still checking for duplicates, the last status stays.
            if let Some((reason, message)) = cause
                .as_ref()
                .filter(|(reason, _)| *reason != reason::CONNECTING)
            {
                tracing::warn!(member = member.name, reason, problem = %message, "not acting on member");
            }
            member.reporters().held_back = cause;
            member.reevaluate(now);
        });
    }

    /// Records that the hub cut off a response of the member's API server. The first message stays for a while,
    /// because the condition must not change with each response.
    pub fn oversized_response(&self, member: &str, message: String, now: BootTime) {
        self.with(member, |member| {
            if let Some((_, last)) = &mut member.reporters().oversized_response {
                *last = now;
                return;
            }
            tracing::warn!(member = member.name, problem = %message, "the member's API server exceeds a limit");
            member.reporters().oversized_response = Some((message, now));
            member.reevaluate(now);
        });
    }

    /// Evaluates members again when their time has come, until `stop`.
    pub async fn run(&self, stop: CancellationToken) {
        loop {
            let now = BootTime::now();
            let (due, next) = {
                let waiting = &mut self.state.lock().fleet.due;
                let after = now + Duration::from_nanos(1);
                let later = waiting.split_off(&(after, String::new()));
                let due = std::mem::replace(waiting, later);
                (due, waiting.first().map(|(at, _)| *at))
            };
            for (_, member) in due {
                self.with(&member, |member| member.reevaluate(now));
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.due_changed.notified() => {}
                () = clock::sleep_until(next, now) => {}
            }
        }
    }
}

impl LockedMember<'_> {
    fn reporters(&mut self) -> &mut Reporters {
        &mut self.entry.reporters
    }

    /// Starts a leader term.
    ///
    /// A member without a session may have had one with the previous leader. Its agent therefore counts as away
    /// from `now`. Reports of earlier terms are dropped, because another hub may have newer ones. The recorded
    /// status stays.
    pub(super) fn begin_term(&mut self, now: BootTime) {
        let reporters = self.reporters();
        if reporters.agents().next().is_some() {
            return;
        }
        (reporters.last_agent_report, reporters.last_able) = (now, None);
        if reporters.presence.get() != Presence::Never {
            reporters.presence.send_replace(Presence::Away(now));
        }
        self.forget_reports(now);
        let reporters = self.reporters();
        if reporters.all.is_empty() && reporters.presence.get() != Presence::Never {
            self.registry.reports.begin_full_report(self.name, now);
            self.observe(|observation| {
                observation.connected = State::default();
                observation.healthy = State::default();
            });
        }
        self.reevaluate(now);
    }

    /// Drops all data of a member without a session that no current reporter has sent.
    fn forget_reports(&mut self, now: BootTime) {
        self.observe(MemberObservation::forget_agent);
        let proxy = self.reporters().all.get_mut(&ReporterId::Proxy);
        // The proxy has kept watching the cluster, and its full report is complete.
        let reports_all = |reporter: &Reporter| {
            let report = reporter.report.as_ref();
            reporter.awaited_report.is_none()
                && report.is_some_and(|report| report.connected && report.synced)
        };
        if proxy.as_deref().is_some_and(reports_all) {
            return;
        }
        if let Some(reporter) = proxy {
            reporter.request_full_report(now);
        }
        self.registry.reports.drop_reports(self.name, now);
        self.registry.deployments.forget(self.name);
        self.registry.placements.forget(self.name);
        self.observe(|observation| (observation.applied, observation.holder) = (None, None));
    }

    fn begin_full_report(&self, now: BootTime) {
        self.registry.reports.begin_full_report(self.name, now);
        self.registry.deployments.begin_full_report(self.name);
        self.registry.placements.begin_full_report(self.name);
    }

    /// Number and digest of the stored reports. `None` until the full report is complete.
    fn digest(&self) -> Option<(u64, u128)> {
        let registry = self.registry;
        Some(combine([
            registry.reports.digest(self.name)?,
            registry.deployments.digest(self.name),
            registry.placements.digest(self.name),
        ]))
    }
}

#[cfg(test)]
mod tests;
