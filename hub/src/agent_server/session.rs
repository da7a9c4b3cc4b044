//! Session of one agent: forwards its reports to the arbiter, and sends it the latest desired state of its
//! member.
//!
//! Level-triggered in both directions: a flag marks pending data, and a send uses the latest value. A slow
//! reader blocks only its own slot.

mod admission;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use krypton_crds::edge_cluster::AgentRoots;
use krypton_proto::v1::{
    self, AgentMessage, HubMessage, agent_message::Kind as FromAgent, hub_message::Kind as FromHub,
};
use krypton_proto::{Bytes, REPORTS_PER_MESSAGE, WireError, skew};
use krypton_reconciler::report_store::Changes;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_runtime::watchdog::Watchdog;
use krypton_types::conditions::{Truth, reason};
use krypton_types::deployment::REPORT_WEIGHT;
use krypton_types::error_chain::chain;
use krypton_types::member::MemberReport;
use krypton_types::root_digest::RootDigest;
use krypton_types::validity::Validity;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};
use tracing::Instrument as _;

pub use self::admission::admit;
use self::admission::{check_admission, check_cluster, clock_state, expired, untrusted_root};
use crate::agent_server::metrics::SessionMetrics;
use crate::ca::{AgentCertificate, Authority};
use crate::home_events::{HomeEvents, MemberEvent};
use crate::leader::Leader;
use crate::members::MemberRegistry;
use crate::members::arbiter::{AgentDetails, ReporterId, SILENCE};
use crate::members::deployment_orders::DEPLOYMENTS_MAX;
use crate::members::member::{MESSAGE_COST, Member, PublishedState};
use crate::members::placement_orders::PLACED_MAX;
use crate::members::tenant_reports::TENANTS_MAX;

/// Deadline for the first message.
const HELLO_DEADLINE: Duration = Duration::from_secs(10);
/// Interval of an agent's heartbeats.
pub const HEARTBEAT: Duration = Duration::from_secs(10);
/// Messages in flight to one agent: the latest desired state and a request.
const OUTGOING: usize = 2;
/// Longest text in a Hello, in bytes.
const TEXT_MAX: usize = 253;
/// After a shutdown of the hub, agents spread their reconnections over this time. By then another hub leads, if
/// any.
const AFTER_STOP: Duration = Duration::from_secs(2);
/// The same if another hub leads already.
const AFTER_LOSS: Duration = Duration::from_secs(1);

/// After a change of the CA, agents spread their renewals over this time for each session, within the bounds
/// below. This makes five signatures and handshakes a second.
const RENEWAL_EACH: Duration = Duration::from_millis(200);
const RENEWAL_WITHIN: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(10 * 60)];

/// State that all sessions share.
#[derive(Debug)]
pub struct Sessions {
    pub members: Arc<MemberRegistry>,
    pub metrics: Arc<SessionMetrics>,
    pub events: HomeEvents,
    pub hub_version: String,
    /// The number of the last session of this hub.
    pub last_number: AtomicU64,
    /// A hub that loses leadership ends its sessions.
    pub leader: Leader,
    pub stop: CancellationToken,
    pub watchdog: Watchdog,
}

pub(crate) type Outgoing = mpsc::Sender<Result<HubMessage, Status>>;
pub(crate) type Incoming = mpsc::Receiver<Result<HubMessage, Status>>;

impl Sessions {
    /// Starts a session for an admitted member. The receiver yields the messages to the agent.
    pub(crate) fn start(
        self: &Arc<Self>,
        member: Arc<Member>,
        certificate: AgentCertificate,
        incoming: Streaming<AgentMessage>,
        authority: watch::Receiver<Arc<Authority>>,
    ) -> Incoming {
        let (outgoing, messages) = mpsc::channel(OUTGOING);
        let sessions = Arc::clone(self);
        let task_name = format!("the session of member {}", certificate.cluster);
        let span = tracing::error_span!("session", member = %certificate.cluster);
        let session = async move {
            let name = certificate.cluster.clone();
            let running = sessions.run(&member, &certificate, incoming, &outgoing, authority);
            let result = Box::pin(running).await;
            let Err(status) = result else { return };
            tracing::info!(member = %name, code = ?status.code(), reason = status.message(), "session ended");
            // An agent that no longer reads does not receive the status.
            let sending = outgoing.send(Err(status));
            if tokio::time::timeout(HELLO_DEADLINE, sending).await.is_err() {
                tracing::debug!(member = %name, "the agent did not read why the session ended");
            }
        };
        tokio::spawn(self.watchdog.watch(task_name, session.instrument(span)));
        messages
    }

    /// Welcomes the agent, and runs its session until the end.
    async fn run(
        &self,
        member: &Arc<Member>,
        certificate: &AgentCertificate,
        mut incoming: Streaming<AgentMessage>,
        outgoing: &Outgoing,
        authority: watch::Receiver<Arc<Authority>>,
    ) -> Result<(), Status> {
        let name = &certificate.cluster;
        let hello = receive_hello(&mut incoming).await?;
        let trusted_roots = match &hello.trusted_roots {
            Some(roots) => roots.read().map_err(|error| invalid(&error))?,
            None => Vec::new(),
        };
        let protocol = skew::negotiate(
            hello.protocol_min..=hello.protocol_max,
            &hello.agent_version,
            &self.hub_version,
        )
        .map_err(|problem| Status::failed_precondition(problem.to_string()))?;
        let admission = member.admission.get();
        check_cluster(name, &admission, &hello.cluster_uid).inspect_err(|refusal| {
            self.warn(name, member, "CredentialUsedTwice", refusal.message());
        })?;
        let wall = clock::wall();
        let agent_clock = clock_state(hello.now.saturating_sub(wall.as_second()));
        if agent_clock.truth == Truth::False {
            self.warn(name, member, reason::CLOCK_DIFFERS, &agent_clock.message);
        }
        let number = self.last_number.fetch_add(1, Ordering::Relaxed) + 1;
        let welcome = v1::Welcome {
            protocol,
            hub_version: self.hub_version.clone(),
            session: number,
            heartbeat_millis: u32::try_from(HEARTBEAT.as_millis()).unwrap_or(u32::MAX),
            now: wall.as_second(),
        };
        send(outgoing, FromHub::Welcome(welcome)).await?;
        // The Hello may arrive long after the admission. Check again before the hub trusts it and ends an older
        // session.
        check_admission(member, certificate, &authority.get())?;
        let replaced = member.begin_session(&hello.replica, number);
        let replaced = replaced.ok_or_else(|| {
            Status::resource_exhausted("this member has too many agents connected already")
        })?;
        let mut session = ActiveSession {
            sessions: self,
            member,
            name,
            replica: hello.replica.clone(),
            id: ReporterId::Session(number),
            number,
            replaced,
            certificate,
            trusted_roots,
            announced_roots: None,
        };
        tracing::info!(member = %name, agent_replica = %hello.replica, agent = %hello.agent_version, session = number, "session started");
        self.metrics.sessions.inc();
        self.members.agent_connected(
            name,
            &AgentDetails {
                cluster_uid: hello.cluster_uid,
                kubernetes_version: hello.kubernetes_version,
                agent_version: hello.agent_version,
                certificate: Validity {
                    not_before: certificate.not_before,
                    not_after: certificate.not_after,
                },
                key: certificate.recorded_key(),
                clock: agent_clock,
                applied: hello.applied.and_then(v1::Applied::read),
            },
        );
        let resyncs = self.members.open(name, session.id, BootTime::now());
        session.run(incoming, outgoing, resyncs, authority).await
    }

    /// Records a warning about a member as an event.
    fn warn(&self, name: &str, member: &Member, reason: &'static str, message: &str) {
        self.events.warn(MemberEvent {
            member: name.to_owned(),
            uid: member.uid.clone(),
            reason,
            message: message.to_owned(),
        });
    }
}

/// A running session. Dropping it unregisters the session.
struct ActiveSession<'a> {
    sessions: &'a Sessions,
    member: &'a Arc<Member>,
    name: &'a str,
    replica: String,
    id: ReporterId,
    number: u64,
    /// Cancelled when another session of this replica starts.
    replaced: CancellationToken,
    certificate: &'a AgentCertificate,
    /// The roots that the agent reports as trusted.
    trusted_roots: Vec<RootDigest>,
    /// The roots in the latest announcement of this session. The agent trusts them, or soon will.
    announced_roots: Option<Vec<RootDigest>>,
}

impl Drop for ActiveSession<'_> {
    fn drop(&mut self) {
        self.sessions.metrics.sessions.dec();
        self.member.end_session(&self.replica, self.number);
        self.sessions
            .members
            .close(self.name, self.id, BootTime::now());
    }
}

impl ActiveSession<'_> {
    async fn run(
        &mut self,
        mut incoming: Streaming<AgentMessage>,
        outgoing: &Outgoing,
        mut resyncs: watch::Receiver<u64>,
        mut authority: watch::Receiver<Arc<Authority>>,
    ) -> Result<(), Status> {
        let mut published = self.member.published.subscribe();
        let mut admission = self.member.admission.subscribe();
        // Include changes since the admission.
        admission.mark_changed();
        authority.mark_changed();
        let leader = self.sessions.leader.clone();
        let leadership_lost = leader.until_lost();
        tokio::pin!(leadership_lost);
        let mut desired_due = true;
        let mut resync_due = false;
        let mut roots_due = false;
        let lifetime = self.certificate.not_after.duration_since(clock::wall());
        let expiry = tokio::time::sleep(lifetime.try_into().unwrap_or(Duration::ZERO));
        tokio::pin!(expiry);
        let silence = tokio::time::sleep(SILENCE);
        tokio::pin!(silence);
        // While the session is throttled, HTTP/2 flow control holds the agent's messages back. Pings of the
        // connection and messages to the agent are not affected.
        let mut is_reading = true;
        let mut was_throttled = false;
        let resume = tokio::time::sleep(Duration::ZERO);
        tokio::pin!(resume);
        loop {
            // The state of a standby has no epoch or one of an earlier leader. It must not reach agents.
            let epoch = leader.leader_term().map_or(0, |term| term.epoch).max(1);
            let is_current = |published: &PublishedState| published.desired.version.epoch >= epoch;
            desired_due &= published.get().as_ref().is_some_and(is_current);
            tokio::select! {
                biased;
                () = self.replaced.cancelled() => {
                    return Err(Status::aborted("another session of this replica has started; check whether two agents run with one name"));
                }
                () = self.sessions.stop.cancelled() => {
                    return send(outgoing, drain("the hub stops", AFTER_STOP)).await;
                }
                () = &mut leadership_lost => {
                    return send(outgoing, drain("this hub is no longer the leader", AFTER_LOSS)).await;
                }
                changed = admission.changed() => {
                    if changed.is_err() { return Err(Status::unavailable("the hub stops")) }
                    if let Some(reason) = &admission.get_and_update().refused {
                        return Err(Status::permission_denied(reason.clone()));
                    }
                    self.sessions.check_key(self.member, self.certificate)?;
                }
                changed = authority.changed() => {
                    if changed.is_err() { return Err(Status::unavailable("the hub stops")) }
                    let authority = authority.get_and_update();
                    roots_due = self.record_roots(&authority)? && authority.is_current(epoch);
                }
                () = &mut expiry => return Err(expired()),
                () = &mut silence => {
                    return Err(Status::deadline_exceeded(format!("no message for {} s", SILENCE.as_secs())));
                }
                changed = published.changed() => {
                    if changed.is_err() { return Err(Status::unavailable("the hub stops")) }
                    desired_due = true;
                }
                changed = resyncs.changed() => {
                    if changed.is_err() { return Err(Status::unavailable("the hub stops")) }
                    resync_due = true;
                }
                permit = outgoing.reserve(), if desired_due || roots_due || resync_due => {
                    let Ok(permit) = permit else { return Ok(()) };
                    let (name, kind) = if desired_due {
                        desired_due = false;
                        let published = published.get_and_update();
                        ("desired", published.as_ref().map(|published| FromHub::Desired((*published.message).clone())))
                    } else if roots_due {
                        roots_due = false;
                        let authority = authority.get();
                        self.announced_roots = Some(RootDigest::from_ders(&authority.roots()));
                        ("roots", Some(FromHub::Roots(self.roots(&authority))))
                    } else {
                        resync_due = false;
                        let number = resyncs.get_and_update();
                        ("resync", Some(FromHub::Resync(v1::Resync { number })))
                    };
                    if let Some(kind) = kind {
                        self.sessions.metrics.messages("hub", name).inc();
                        permit.send(Ok(HubMessage { kind: Some(kind) }));
                    }
                }
                () = &mut resume, if !is_reading => is_reading = true,
                // If the agent disconnects while throttled, discard the rest of its messages.
                () = outgoing.closed(), if !is_reading => return Ok(()),
                message = incoming.message(), if is_reading => {
                    let Some(message) = message? else { return Ok(()) };
                    // The hub may have replaced the key since the last message.
                    self.sessions.check_key(self.member, self.certificate)?;
                    let wait = self.member.charge_reports(BootTime::now(), cost(&message));
                    let resume_at = tokio::time::Instant::now() + wait;
                    // A throttled agent does not count as silent.
                    silence.as_mut().reset(resume_at + SILENCE);
                    if !wait.is_zero() {
                        if !was_throttled {
                            tracing::warn!(member = %self.name, agent_replica = %self.replica, "the agent sends too many reports; throttling");
                        }
                        (is_reading, was_throttled) = (false, true);
                        resume.as_mut().reset(resume_at);
                        self.sessions.metrics.throttled.inc();
                    }
                    if let Some(FromAgent::TrustedRoots(roots)) = &message.kind {
                        self.trusted_roots = roots.read().map_err(|problem| invalid(&problem))?;
                        // Its answer to an earlier announcement does not make another one due.
                        self.record_roots(&authority.get())?;
                    }
                    self.process(message, published.get().as_ref())?;
                }
            }
        }
    }

    /// Records which CA roots the agent trusts. Returns whether the hub must send it the roots.
    ///
    /// # Errors
    /// Fails if no current root has issued the agent's certificate.
    fn record_roots(&self, authority: &Authority) -> Result<bool, Status> {
        let issuer = authority
            .issuer_of(&self.certificate.der)
            .ok_or_else(|| untrusted_root(self.name))?;
        let roots = AgentRoots {
            trusted: self
                .trusted_roots
                .iter()
                .map(RootDigest::to_string)
                .collect(),
            issuer: Some(issuer.to_string()),
        };
        self.sessions.members.agent_roots(self.name, roots);
        let current_roots = RootDigest::from_ders(&authority.roots());
        let expected = self.announced_roots.as_ref().unwrap_or(&self.trusted_roots);
        Ok(*expected != current_roots || authority.signing_root() != Some(issuer))
    }

    fn roots(&self, authority: &Authority) -> v1::Roots {
        let signing = authority.signing_root();
        let renew = authority.issuer_of(&self.certificate.der) != signing;
        let sessions = self.sessions.metrics.sessions.get().max(0).unsigned_abs();
        let within = renewal_within(sessions);
        v1::Roots {
            certificates: authority
                .roots()
                .iter()
                .map(|root| Bytes::copy_from_slice(root))
                .collect(),
            renew_within_millis: renew
                .then(|| u32::try_from(within.as_millis()).unwrap_or(u32::MAX)),
        }
    }

    /// Processes one message.
    fn process(
        &self,
        message: AgentMessage,
        published: Option<&PublishedState>,
    ) -> Result<(), Status> {
        let invalid = |problem: WireError| invalid(&problem);
        let members = &self.sessions.members;
        self.sessions
            .metrics
            .messages("agent", kind(&message))
            .inc();
        match message.kind {
            Some(FromAgent::Report(report)) => {
                if report_count(&report) > REPORTS_PER_MESSAGE {
                    return Err(invalid(WireError::Unexpected(
                        "a report with too many objects",
                    )));
                }
                let counter = &self.sessions.metrics.reports;
                counter.inc_by(report.tenants.len() as u64);
                let tenants = report.tenants.into_iter().map(|it| it.read());
                let deployments = report.deployments.into_iter().map(|it| it.read());
                let placed = report.placed.into_iter().map(|it| it.read());
                let changes = Changes {
                    member: report.member.map(MemberReport::from),
                    tenants: tenants.collect::<Result<_, _>>().map_err(invalid)?,
                    deployments: deployments.collect::<Result<_, _>>().map_err(invalid)?,
                    placed: placed.collect::<Result<_, _>>().map_err(invalid)?,
                };
                let is_within_limits = members.report(
                    self.name,
                    self.id,
                    changes,
                    report.complete,
                    BootTime::now(),
                );
                if !is_within_limits {
                    return Err(Status::resource_exhausted(format!(
                        "more than {TENANTS_MAX} Tenants, {DEPLOYMENTS_MAX} deployments or {PLACED_MAX} placed Tenants on one member"
                    )));
                }
            }
            Some(FromAgent::Heartbeat(heartbeat)) => {
                members.compare(self.name, self.id, heartbeat.digest(), BootTime::now());
            }
            Some(FromAgent::Applied(applied)) => {
                if let Some(((version, _), published)) = applied.read().zip(published)
                    && version == published.desired.version
                {
                    let propagation = BootTime::now().since(published.since);
                    self.sessions
                        .metrics
                        .propagation
                        .observe(propagation.as_secs_f64());
                }
            }
            Some(FromAgent::Hello(_)) => {
                return Err(invalid(WireError::Unexpected("a second Hello")));
            }
            // `TrustedRoots` is handled by the caller; `None` is a message of a later protocol revision.
            Some(FromAgent::TrustedRoots(_)) | None => {}
        }
        Ok(())
    }
}

fn drain(reason: &str, reconnect_after: Duration) -> FromHub {
    let millis = reconnect_after.as_millis();
    FromHub::Drain(v1::Drain {
        reason: reason.to_owned(),
        reconnect_after_millis: u32::try_from(millis).unwrap_or(u32::MAX),
    })
}

fn invalid(problem: &WireError) -> Status {
    Status::invalid_argument(chain(problem))
}

/// Returns the time over which this many agents renew their certificates.
fn renewal_within(sessions: u64) -> Duration {
    let sessions = u32::try_from(sessions).unwrap_or(u32::MAX);
    let [shortest, longest] = RENEWAL_WITHIN;
    RENEWAL_EACH
        .saturating_mul(sessions)
        .clamp(shortest, longest)
}

/// Returns the cost of a message. An oversized report counts as the maximum: it ends its session and must not
/// use up the quota of the member's other sessions.
fn cost(message: &AgentMessage) -> u64 {
    let reports = match &message.kind {
        Some(FromAgent::Report(report)) => report_count(report).min(REPORTS_PER_MESSAGE),
        _ => 0,
    };
    MESSAGE_COST + reports as u64
}

/// Returns the number of reports. A KryptonDeployment with revisions counts as several.
fn report_count(report: &v1::Report) -> usize {
    let weights = report.deployments.iter().map(|deployment| {
        let state = deployment.state.as_ref();
        let has_revisions = state.is_some_and(|state| state.revisions.is_some());
        if has_revisions { REPORT_WEIGHT } else { 1 }
    });
    report.tenants.len() + report.placed.len() + weights.sum::<usize>()
}

fn kind(message: &AgentMessage) -> &'static str {
    match message.kind {
        Some(FromAgent::Hello(_)) => "hello",
        Some(FromAgent::Report(_)) => "report",
        Some(FromAgent::Heartbeat(_)) => "heartbeat",
        Some(FromAgent::Applied(_)) => "applied",
        Some(FromAgent::TrustedRoots(_)) => "trusted_roots",
        None => "unknown",
    }
}

async fn receive_hello(incoming: &mut Streaming<AgentMessage>) -> Result<v1::Hello, Status> {
    let first = tokio::time::timeout(HELLO_DEADLINE, incoming.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no Hello arrived in time"))??;
    match first.and_then(|message| message.kind) {
        Some(FromAgent::Hello(hello)) => {
            for text in [
                &hello.replica,
                &hello.cluster_uid,
                &hello.kubernetes_version,
                &hello.agent_version,
            ] {
                // The hub writes these texts to logs, conditions and events.
                if text.len() > TEXT_MAX || !text.chars().all(|c| c.is_ascii_graphic()) {
                    return Err(Status::invalid_argument(
                        "Hello holds a text that is too long or not printable",
                    ));
                }
            }
            if hello.cluster_uid.is_empty() || hello.replica.is_empty() {
                return Err(Status::invalid_argument(
                    "Hello names no cluster or no replica",
                ));
            }
            Ok(hello)
        }
        _ => Err(Status::invalid_argument("the first message is not Hello")),
    }
}

async fn send(outgoing: &Outgoing, kind: FromHub) -> Result<(), Status> {
    let message = HubMessage { kind: Some(kind) };
    match tokio::time::timeout(HELLO_DEADLINE, outgoing.send(Ok(message))).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(Status::cancelled("the agent closed the stream")),
        Err(_) => Err(Status::deadline_exceeded(
            "the agent did not read the message in time",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deployment_with_revisions_counts_as_several() {
        let message = |deployments: usize, revisions: Option<v1::Revisions>| {
            let state = v1::DeploymentState {
                revisions,
                ..v1::DeploymentState::default()
            };
            let deployment = v1::Deployment {
                state: Some(state),
                ..v1::Deployment::default()
            };
            v1::Report {
                deployments: vec![deployment; deployments],
                ..v1::Report::default()
            }
        };
        let cost = |report: &v1::Report| {
            let kind = Some(FromAgent::Report(report.clone()));
            cost(&AgentMessage { kind }) - MESSAGE_COST
        };
        // An agent of an earlier version reports no revisions.
        let earlier = message(REPORTS_PER_MESSAGE, None);
        assert_eq!(report_count(&earlier), REPORTS_PER_MESSAGE);
        let most = REPORTS_PER_MESSAGE / REPORT_WEIGHT;
        let largest = message(most, Some(v1::Revisions::default()));
        assert_eq!(report_count(&largest), REPORTS_PER_MESSAGE);
        assert_eq!(cost(&largest), REPORTS_PER_MESSAGE as u64);
        let oversized = message(most + 1, Some(v1::Revisions::default()));
        assert!(report_count(&oversized) > REPORTS_PER_MESSAGE);
    }
}
