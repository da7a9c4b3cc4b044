//! Keeps one stream to the hub open, and reconnects when it ends.
//!
//! The session buffers no state. Reports stay in the report store until the stream has capacity, so the agent sends
//! only the newest report of each Tenant. The latest desired state goes to a `watch` channel.

mod reconnect;
mod report_queue;

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use krypton_proto::skew::PROTOCOL;
use krypton_proto::v1::{
    AgentMessage, Hello, HubMessage, TrustedRoots, Welcome, agent_message, hub_message,
};
use krypton_reconciler::report_store::ReportStore;
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::NewestSeen as _;
use krypton_types::desired::{DesiredState, Version};
use krypton_types::error_chain::chain;
use krypton_types::root_digest::RootDigest;
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

use crate::session::connect::{Connection, DialError, Dialer};
use reconnect::Pace;
use report_queue::ReportQueue;

/// Time from the start of the stream to the hub's Welcome.
const WELCOME: Duration = Duration::from_secs(10);
/// Capacity of the outgoing channel. The newest report of each object waits in the report store.
const OUTGOING: usize = 2;
/// Clock difference that the agent logs, because certificates have a validity period.
const CLOCKS: Duration = Duration::from_secs(60);
/// Milliseconds between two heartbeats that the hub can request.
const HEARTBEAT: std::ops::RangeInclusive<u32> = 1_000..=60_000;
/// Number of distinct errors that the agent logs above debug level.
const SAID: usize = 16;

/// State of the connection to the hub.
#[derive(Clone, Debug)]
pub enum Link {
    Down(String),
    Up(Connection),
}

impl Default for Link {
    fn default() -> Self {
        Self::Down("the hub was not reached yet".to_owned())
    }
}

impl Link {
    pub fn is_up(&self) -> bool {
        self.connection().is_some()
    }

    pub fn connection(&self) -> Option<&Connection> {
        match self {
            Self::Up(connection) => Some(connection),
            Self::Down(_) => None,
        }
    }
}

/// Details of the connection to the hub, for diagnosis.
#[derive(Clone, Debug, Default)]
pub struct Contact {
    pub up: bool,
    /// Time of the last change of `up`. `None` if the session was never up.
    pub since: Option<BootTime>,
    /// Time of the hub's last message.
    pub heard: Option<BootTime>,
    /// Address of the hub in the current or last session. The hub reports the next two fields.
    pub address: Option<String>,
    pub hub_version: Option<String>,
    pub session: Option<u64>,
}

impl Contact {
    fn welcomed(&mut self, address: &str, welcome: &Welcome, now: BootTime) {
        let version = welcome.hub_version.chars().take(64).collect();
        // A session that directly follows another one continues the uptime.
        let since = self.since.filter(|_| self.up).unwrap_or(now);
        *self = Self {
            up: true,
            since: Some(since),
            heard: Some(now),
            address: Some(address.to_owned()),
            hub_version: Some(version),
            session: Some(welcome.session),
        };
    }

    fn lost(&mut self, now: BootTime) {
        if self.up {
            (self.up, self.since) = (false, Some(now));
        }
    }
}

/// Dependencies and identity of a session.
#[derive(Debug)]
pub struct Session {
    pub dialer: Arc<Dialer>,
    /// Name of this agent replica, stable across restarts.
    pub replica: String,
    pub cluster_uid: String,
    pub kubernetes_version: String,
    /// Reports of the reconciler.
    pub report_store: Arc<ReportStore>,
    /// Receives the hub's newest desired state.
    pub desired: watch::Sender<Option<Arc<DesiredState>>>,
    /// Version and digest of the desired state that the member had stored at startup.
    pub recorded: Option<(Version, String)>,
    pub link: watch::Sender<Link>,
    pub contact: watch::Sender<Contact>,
}

/// Reason why there is no session.
#[derive(Debug, Error)]
pub enum SessionError {
    #[error("there is no session with the hub")]
    Dial(#[source] DialError),
    #[error("the hub at {address} rejected this agent: {message}")]
    Refused { address: String, message: String },
    #[error("the session with the hub at {address} broke ({code:?}): {message}; retrying")]
    Broken {
        address: String,
        code: Code,
        message: String,
    },
    #[error("the hub at {0} ended the session; retrying")]
    Ended(String),
    #[error("the hub at {address} did not answer within {} s; check whether it is overloaded; retrying", WELCOME.as_secs())]
    NoWelcome { address: String },
    #[error(
        "the hub at {address} uses protocol {protocol}, which this agent does not support; install an agent of the hub's version {hub}"
    )]
    Protocol {
        address: String,
        protocol: u32,
        hub: String,
    },
    #[error("the first message from {0} is not a Welcome; check that the address is the hub's")]
    Unexpected(String),
}

/// Result of a stream after the hub's Welcome.
enum Next {
    /// A new stream with a newer certificate, already welcomed by the hub.
    Stream(Box<Open>),
    Ending(Ending),
}

impl From<SessionError> for Next {
    fn from(error: SessionError) -> Self {
        Self::Ending(Ending::Error(error))
    }
}

/// Reason for the end of a session.
enum Ending {
    Drain { reason: String, pause: Duration },
    Error(SessionError),
}

/// Keeps a session open until `stop`.
pub async fn run(session: Session, stop: CancellationToken) {
    let mut pace = Pace::default();
    let mut said = Said::default();
    loop {
        let ending = tokio::select! {
            () = stop.cancelled() => break,
            ending = session.once(&mut pace, &mut said) => ending,
        };
        let pause = match &ending {
            Ending::Drain { reason, pause } => {
                tracing::info!(%reason, "the session ended; reconnecting");
                pace.drained(BootTime::now(), *pause, chance::random())
            }
            Ending::Error(error) => {
                said.say(error);
                match error {
                    SessionError::Refused { .. } | SessionError::Protocol { .. } => {
                        pace.refused(chance::random())
                    }
                    _ => pace.failed(BootTime::now(), chance::random()),
                }
            }
        };
        let problem = match ending {
            Ending::Drain { reason, .. } => reason,
            Ending::Error(error) => chain(&error),
        };
        session.link.send_replace(Link::Down(problem));
        session.contact.send_modify(|it| it.lost(BootTime::now()));
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(pause) => {}
        }
    }
    let problem = "this agent is stopping".to_owned();
    session.link.send_replace(Link::Down(problem));
    session.contact.send_modify(|it| it.lost(BootTime::now()));
}

impl Session {
    async fn once(&self, pace: &mut Pace, said: &mut Said) -> Ending {
        let mut open = match Box::pin(self.open()).await {
            Ok(open) => Box::new(open),
            Err(error) => return Ending::Error(error),
        };
        loop {
            pace.welcomed(BootTime::now());
            said.clear();
            said.clocks(open.ahead);
            match Box::pin(self.follow(*open, said)).await {
                Next::Stream(next) => open = next,
                Next::Ending(ending) => return ending,
            }
        }
    }

    /// Connects and exchanges Hello and Welcome.
    async fn open(&self) -> Result<Open, SessionError> {
        let connection = self.dialer.connect().await.map_err(SessionError::Dial)?;
        let address = connection.address().to_owned();
        let (outgoing, messages) = mpsc::channel(OUTGOING);
        let mut kept = self.dialer.trust().kept();
        let trusted = kept.see().as_deref().map(TrustedRoots::new);
        // The queue is empty, so the message fits.
        let _fits = outgoing.try_send(message(agent_message::Kind::Hello(self.hello(trusted))));
        let greeting = async {
            let mut fleet = connection.fleet();
            let connecting = fleet.connect(ReceiverStream::new(messages));
            let answer = connecting.await?;
            let mut incoming = answer.into_inner();
            let first = incoming.message().await?;
            Ok::<_, Status>((incoming, first))
        };
        let (incoming, first) = match tokio::time::timeout(WELCOME, greeting).await {
            Ok(Ok(greeted)) => greeted,
            Ok(Err(status)) => {
                // A hub that is not the leader returns this code, so try the next address first.
                if status.code() == Code::Unavailable {
                    self.dialer.pass_on(&address);
                }
                return Err(meaning(&connection, &status));
            }
            Err(_) => {
                self.dialer.pass_on(&address);
                return Err(SessionError::NoWelcome { address });
            }
        };
        let welcome = match first {
            Some(HubMessage {
                kind: Some(hub_message::Kind::Welcome(welcome)),
            }) => welcome,
            Some(_) => return Err(SessionError::Unexpected(address)),
            None => return Err(SessionError::Ended(address)),
        };
        if !PROTOCOL.contains(&welcome.protocol) {
            return Err(SessionError::Protocol {
                address,
                protocol: welcome.protocol,
                hub: welcome.hub_version.chars().take(64).collect(),
            });
        }
        Ok(Open {
            connection,
            outgoing,
            incoming,
            ahead: clock::wall().as_second().saturating_sub(welcome.now),
            welcome,
            kept,
        })
    }

    fn hello(&self, trusted_roots: Option<TrustedRoots>) -> Hello {
        // The stored state from startup may be outdated, or the only known one.
        let applied = self.report_store.applied().max(self.recorded.clone());
        Hello {
            protocol_min: *PROTOCOL.start(),
            protocol_max: *PROTOCOL.end(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            replica: self.replica.clone(),
            cluster_uid: self.cluster_uid.clone(),
            kubernetes_version: self.kubernetes_version.clone(),
            applied: applied
                .map(|(version, digest)| krypton_proto::v1::Applied::new(version, digest)),
            now: clock::wall().as_second(),
            trusted_roots,
        }
    }

    /// Processes one stream until it ends or a stream with a newer certificate replaces it. The agent opens the new
    /// stream before it closes the old one, so it stays connected.
    async fn follow(&self, open: Open, said: &mut Said) -> Next {
        let Open {
            connection,
            outgoing,
            mut incoming,
            welcome,
            mut kept,
            ..
        } = open;
        let address = connection.address().to_owned();
        tracing::info!(hub = %address, version = %welcome.hub_version, session = welcome.session,
            "in session with the hub");
        self.link.send_replace(Link::Up(connection.clone()));
        self.contact
            .send_modify(|it| it.welcomed(&address, &welcome, BootTime::now()));
        let heartbeat = welcome
            .heartbeat_millis
            .clamp(*HEARTBEAT.start(), *HEARTBEAT.end());
        let heartbeat = Duration::from_millis(heartbeat.into());
        let mut report_queue = ReportQueue::new();
        self.report_store.resend();
        let mut beat = Box::pin(tokio::time::sleep(reconnect::spread(
            heartbeat,
            chance::random(),
        )));
        let mut next: Option<Opening<'_>> = None;
        let mut pace = Pace::default();
        loop {
            tokio::select! {
                message = incoming.message() => match message {
                    Ok(Some(message)) => {
                        self.contact.send_modify(|it| it.heard = Some(BootTime::now()));
                        if let Some(ending) = self.take_in(message, &mut report_queue) {
                            // The hub is shutting down or has lost leadership.
                            self.dialer.pass_on(&address);
                            return Next::Ending(ending);
                        }
                    }
                    ended => return after(ended, &connection, next).await,
                },
                () = self.dialer.renewed() => next = Some(Box::pin(self.open())),
                opened = opened(&mut next) => match opened {
                    Ok(open) => return Next::Stream(Box::new(open)),
                    Err(error) => {
                        said.say(&error);
                        let pause = pace.failed(BootTime::now(), chance::random());
                        next = Some(Box::pin(async move {
                            tokio::time::sleep(pause).await;
                            self.open().await
                        }));
                    }
                },
                Ok(()) = kept.changed() => {
                    if let Some(roots) = kept.see().as_deref() {
                        report_queue.trusted_roots(TrustedRoots::new(roots));
                    }
                }
                () = self.report_store.changed(), if !report_queue.has_changes() => report_queue.changed(),
                () = &mut beat => {
                    report_queue.heartbeat();
                    let next = reconnect::spread(heartbeat, chance::random());
                    beat.as_mut().reset(tokio::time::Instant::now() + next);
                }
                permit = outgoing.reserve(), if report_queue.has_something() => match permit {
                    Ok(permit) => {
                        if let Some(kind) = report_queue.next(&self.report_store) {
                            permit.send(message(kind));
                        }
                    }
                    // The stream is closed; read its final status.
                    Err(_) => {
                        let ended = incoming.message().await;
                        return after(ended, &connection, next).await;
                    }
                },
            }
        }
    }

    fn take_in(&self, message: HubMessage, report_queue: &mut ReportQueue) -> Option<Ending> {
        match message.kind {
            Some(hub_message::Kind::Desired(desired)) => match DesiredState::try_from(desired) {
                Ok(desired) => {
                    let (version, digest) = (desired.version, desired.digest());
                    tracing::debug!(%version, "a desired state has come");
                    self.desired.send_if_modified(|slot| {
                        let news = slot.as_deref() != Some(&desired);
                        if news {
                            *slot = Some(Arc::new(desired));
                        }
                        news
                    });
                    report_queue.applied(version, digest);
                }
                Err(error) => {
                    tracing::warn!(error = %chain(&error),
                        "ignoring an invalid desired state; check the version of the hub");
                }
            },
            Some(hub_message::Kind::Resync(resync)) => {
                tracing::debug!(number = resync.number, "the hub requests a full report");
                self.report_store.resend();
                report_queue.resync(resync.number);
            }
            Some(hub_message::Kind::Drain(drain)) => {
                return Some(Ending::Drain {
                    reason: drain.reason.chars().take(200).collect(),
                    pause: Duration::from_millis(drain.reconnect_after_millis.into()),
                });
            }
            Some(hub_message::Kind::Roots(roots)) => {
                tracing::debug!(count = roots.certificates.len(), "the hub names its roots");
                self.dialer.trust().tell(roots.into());
            }
            // Ignore a second Welcome and the message kinds of later protocol revisions.
            Some(hub_message::Kind::Welcome(_)) | None => {}
        }
        None
    }
}

/// A session after the hub's Welcome.
struct Open {
    connection: Connection,
    outgoing: mpsc::Sender<AgentMessage>,
    incoming: Streaming<HubMessage>,
    welcome: Welcome,
    /// Seconds by which the agent's clock is ahead of the hub's.
    ahead: i64,
    /// Digests of the stored roots. Those in Hello are marked as seen.
    kept: watch::Receiver<Option<Vec<RootDigest>>>,
}

/// The pending connection that replaces the current stream.
type Opening<'a> = Pin<Box<dyn Future<Output = Result<Open, SessionError>> + Send + 'a>>;

/// Waits for the pending connection. Never completes without one.
async fn opened(next: &mut Option<Opening<'_>>) -> Result<Open, SessionError> {
    match next {
        Some(opening) => {
            let opened = opening.await;
            *next = None;
            opened
        }
        None => std::future::pending().await,
    }
}

/// Decides how to continue after a stream has ended. The hub also ends a stream when it accepts the replacement.
async fn after(
    ended: Result<Option<HubMessage>, Status>,
    connection: &Connection,
    next: Option<Opening<'_>>,
) -> Next {
    if let Some(next) = next
        && let Ok(Ok(open)) = tokio::time::timeout(WELCOME, next).await
    {
        return Next::Stream(Box::new(open));
    }
    match ended {
        Err(status) => meaning(connection, &status).into(),
        Ok(_) => SessionError::Ended(connection.address().to_owned()).into(),
    }
}

fn message(kind: agent_message::Kind) -> AgentMessage {
    AgentMessage { kind: Some(kind) }
}

/// Maps the status of a failed call to an error.
fn meaning(connection: &Connection, status: &Status) -> SessionError {
    if let Some(refused) = connection.refused() {
        return SessionError::Dial(refused);
    }
    let address = connection.address().to_owned();
    let message: String = status.message().chars().take(500).collect();
    match status.code() {
        Code::PermissionDenied | Code::FailedPrecondition | Code::Unauthenticated => {
            SessionError::Refused { address, message }
        }
        code => SessionError::Broken {
            address,
            code,
            message,
        },
    }
}

/// Errors that were already logged. The agent logs each distinct error once until a session is established.
#[derive(Default)]
struct Said {
    errors: BTreeSet<String>,
    clocks: bool,
}

impl Said {
    fn say(&mut self, error: &SessionError) {
        let text = chain(error);
        if self.errors.contains(&text) || self.errors.len() >= SAID {
            tracing::debug!(error = %text, "no session");
            return;
        }
        match error {
            SessionError::Refused { .. } | SessionError::Protocol { .. } => {
                tracing::error!(error = %text, "keeping the current desired state");
            }
            _ => tracing::warn!(error = %text, "no session"),
        }
        self.errors.insert(text);
    }

    fn clear(&mut self) {
        self.errors.clear();
    }

    /// Logs a warning if the clocks differ. `ahead` is the number of seconds by which the agent's clock is ahead of the
    /// hub's.
    fn clocks(&mut self, ahead: i64) {
        let differ = ahead.unsigned_abs() > CLOCKS.as_secs();
        if differ && !self.clocks {
            let side = if ahead > 0 { "ahead of" } else { "behind" };
            tracing::warn!(
                "this machine's clock is {} s {side} the hub's; set it right, since certificates are valid by the clock",
                ahead.unsigned_abs()
            );
        }
        self.clocks = differ;
    }
}

pub mod connect;
pub mod hub_chart;
#[cfg(test)]
mod tests;
