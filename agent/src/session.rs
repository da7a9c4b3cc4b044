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
use krypton_runtime::dial::DialError;
use krypton_runtime::newest::NewestSeen as _;
use krypton_types::desired::{DesiredState, Version};
use krypton_types::error_chain::chain;
use krypton_types::root_digest::RootDigest;
use krypton_types::text::truncated;
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

use crate::session::connect::{Connection, Dialer, status_message};
use reconnect::ReconnectBackoff;
use report_queue::ReportQueue;

/// Time from the start of the stream to the hub's Welcome.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(10);
/// Capacity of the outgoing channel. The newest report of each object waits in the report store.
const OUTGOING_CAPACITY: usize = 2;
/// Clock difference that the agent logs, because certificates have a validity period.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(60);
/// Milliseconds between two heartbeats that the hub can request.
const HEARTBEAT: std::ops::RangeInclusive<u32> = 1_000..=60_000;
/// Longest version of a hub, and longest reason for a drain, in bytes.
const VERSION_MAX: usize = 64;
const REASON_MAX: usize = 200;
/// Number of distinct errors that the agent logs above debug level.
const LOGGED_ERRORS_MAX: usize = 16;

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
    pub last_message: Option<BootTime>,
    /// Address of the hub in the current or last session. The hub reports the next two fields.
    pub address: Option<String>,
    pub hub_version: Option<String>,
    pub session: Option<u64>,
}

impl Contact {
    fn record_welcome(&mut self, address: &str, welcome: &Welcome, now: BootTime) {
        let version = truncated(welcome.hub_version.clone(), VERSION_MAX);
        // A session that directly follows another one continues the uptime.
        let since = self.since.filter(|_| self.up).unwrap_or(now);
        *self = Self {
            up: true,
            since: Some(since),
            last_message: Some(now),
            address: Some(address.to_owned()),
            hub_version: Some(version),
            session: Some(welcome.session),
        };
    }

    fn record_loss(&mut self, now: BootTime) {
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
    #[error("the hub at {address} did not answer within {} s; check whether it is overloaded; retrying", WELCOME_TIMEOUT.as_secs())]
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
    /// The hub is shutting down or has lost leadership.
    #[error("{reason}")]
    Drained { reason: String, pause: Duration },
}

/// Keeps a session open until `stop`.
pub async fn run(session: Session, stop: CancellationToken) {
    let mut backoff = ReconnectBackoff::default();
    let mut logged_errors = LoggedErrors::default();
    loop {
        let error = tokio::select! {
            () = stop.cancelled() => break,
            error = session.run_once(&mut backoff, &mut logged_errors) => error,
        };
        logged_errors.log(&error);
        let pause = match &error {
            SessionError::Drained { pause, .. } => {
                backoff.after_drain(BootTime::now(), *pause, chance::random())
            }
            SessionError::Refused { .. } | SessionError::Protocol { .. } => {
                backoff.after_rejection(chance::random())
            }
            _ => backoff.after_failure(BootTime::now(), chance::random()),
        };
        session.mark_down(chain(&error));
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(pause) => {}
        }
    }
    session.mark_down("this agent is stopping".to_owned());
}

impl Session {
    fn mark_down(&self, problem: String) {
        self.link.send_replace(Link::Down(problem));
        self.contact
            .send_modify(|contact| contact.record_loss(BootTime::now()));
    }

    /// Returns why the session ended or did not start.
    async fn run_once(
        &self,
        backoff: &mut ReconnectBackoff,
        logged_errors: &mut LoggedErrors,
    ) -> SessionError {
        let mut opened = Box::pin(self.open()).await.map(Box::new);
        loop {
            let open = match opened {
                Ok(open) => open,
                Err(error) => return error,
            };
            backoff.record_welcome(BootTime::now());
            logged_errors.errors.clear();
            logged_errors.check_clocks(open.clock_ahead);
            opened = Box::pin(self.run_stream(*open, logged_errors)).await;
        }
    }

    /// Connects and exchanges Hello and Welcome.
    async fn open(&self) -> Result<OpenStream, SessionError> {
        let connection = self.dialer.connect().await.map_err(SessionError::Dial)?;
        let address = connection.address().to_owned();
        let (outgoing, messages) = mpsc::channel(OUTGOING_CAPACITY);
        let mut stored_roots = self.dialer.root_updates().stored_digests();
        let trusted = stored_roots
            .get_and_update()
            .as_deref()
            .map(TrustedRoots::new);
        // The queue is empty, so the message fits.
        let _fits = outgoing.try_send(message(agent_message::Kind::Hello(self.hello(trusted))));
        let handshake = async {
            let mut fleet = connection.fleet();
            let response_future = fleet.connect(ReceiverStream::new(messages));
            let response = response_future.await?;
            let mut incoming = response.into_inner();
            let first = incoming.message().await?;
            Ok::<_, Status>((incoming, first))
        };
        let (incoming, first) = match tokio::time::timeout(WELCOME_TIMEOUT, handshake).await {
            Ok(Ok(streams)) => streams,
            Ok(Err(status)) => {
                // A hub that is not the leader returns this code, so try the next address first.
                if status.code() == Code::Unavailable {
                    self.dialer.try_next_first(&address);
                }
                return Err(error_from_status(&connection, &status));
            }
            Err(_) => {
                self.dialer.try_next_first(&address);
                return Err(SessionError::NoWelcome { address });
            }
        };
        let welcome = match first.map(|message| message.kind) {
            Some(Some(hub_message::Kind::Welcome(welcome))) => welcome,
            Some(_) => return Err(SessionError::Unexpected(address)),
            None => return Err(SessionError::Ended(address)),
        };
        if !PROTOCOL.contains(&welcome.protocol) {
            return Err(SessionError::Protocol {
                address,
                protocol: welcome.protocol,
                hub: truncated(welcome.hub_version, VERSION_MAX),
            });
        }
        Ok(OpenStream {
            connection,
            outgoing,
            incoming,
            clock_ahead: clock::wall().as_second().saturating_sub(welcome.now),
            welcome,
            stored_roots,
        })
    }

    fn hello(&self, trusted_roots: Option<TrustedRoots>) -> Hello {
        // The stored state from startup may be outdated, or the only known one.
        let applied = self
            .report_store
            .applied_version()
            .max(self.recorded.clone());
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
    /// stream before it closes the old one, so it stays connected. Returns the new stream.
    async fn run_stream(
        &self,
        open: OpenStream,
        logged_errors: &mut LoggedErrors,
    ) -> Result<Box<OpenStream>, SessionError> {
        let OpenStream {
            connection,
            outgoing,
            mut incoming,
            welcome,
            mut stored_roots,
            ..
        } = open;
        let address = connection.address().to_owned();
        tracing::info!(hub = %address, version = %welcome.hub_version, session = welcome.session,
            "in session with the hub");
        self.link.send_replace(Link::Up(connection.clone()));
        self.contact
            .send_modify(|contact| contact.record_welcome(&address, &welcome, BootTime::now()));
        let heartbeat = welcome
            .heartbeat_millis
            .clamp(*HEARTBEAT.start(), *HEARTBEAT.end());
        let heartbeat = Duration::from_millis(heartbeat.into());
        let mut report_queue = ReportQueue::new();
        self.report_store.resend();
        let mut heartbeat_timer = Box::pin(tokio::time::sleep(reconnect::with_jitter(
            heartbeat,
            chance::random(),
        )));
        let mut pending: Option<PendingStream<'_>> = None;
        let mut backoff = ReconnectBackoff::default();
        loop {
            tokio::select! {
                message = incoming.message() => match message {
                    Ok(Some(message)) => {
                        self.contact.send_modify(|contact| contact.last_message = Some(BootTime::now()));
                        if let Err(drained) = self.handle_message(message, &mut report_queue) {
                            self.dialer.try_next_first(&address);
                            return Err(drained);
                        }
                    }
                    result => return next_after_end(result, &connection, pending).await,
                },
                () = self.dialer.renewed() => pending = Some(Box::pin(self.open())),
                opened = wait_for_pending(&mut pending) => match opened {
                    Ok(open) => return Ok(Box::new(open)),
                    Err(error) => {
                        logged_errors.log(&error);
                        let pause = backoff.after_failure(BootTime::now(), chance::random());
                        pending = Some(Box::pin(async move {
                            tokio::time::sleep(pause).await;
                            self.open().await
                        }));
                    }
                },
                Ok(()) = stored_roots.changed() => {
                    if let Some(roots) = stored_roots.get_and_update().as_deref() {
                        report_queue.set_trusted_roots(TrustedRoots::new(roots));
                    }
                }
                () = self.report_store.changed(), if !report_queue.has_changes() => report_queue.mark_changed(),
                () = &mut heartbeat_timer => {
                    report_queue.request_heartbeat();
                    let pause = reconnect::with_jitter(heartbeat, chance::random());
                    heartbeat_timer.as_mut().reset(tokio::time::Instant::now() + pause);
                }
                permit = outgoing.reserve(), if report_queue.has_message() => match permit {
                    Ok(permit) => {
                        if let Some(kind) = report_queue.next_message(&self.report_store) {
                            permit.send(message(kind));
                        }
                    }
                    // The stream is closed; read its final status.
                    Err(_) => {
                        let result = incoming.message().await;
                        return next_after_end(result, &connection, pending).await;
                    }
                },
            }
        }
    }

    fn handle_message(
        &self,
        message: HubMessage,
        report_queue: &mut ReportQueue,
    ) -> Result<(), SessionError> {
        match message.kind {
            Some(hub_message::Kind::Desired(desired)) => match DesiredState::try_from(desired) {
                Ok(desired) => {
                    let (version, digest) = (desired.version, desired.digest());
                    tracing::debug!(%version, "received a desired state");
                    self.desired.send_if_modified(|current| {
                        let is_new = current.as_deref() != Some(&desired);
                        if is_new {
                            *current = Some(Arc::new(desired));
                        }
                        is_new
                    });
                    report_queue.set_applied(version, digest);
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
                return Err(SessionError::Drained {
                    reason: truncated(drain.reason, REASON_MAX),
                    pause: Duration::from_millis(drain.reconnect_after_millis.into()),
                });
            }
            Some(hub_message::Kind::Roots(roots)) => {
                tracing::debug!(count = roots.certificates.len(), "received the hub's roots");
                self.dialer.root_updates().announce(roots.into());
            }
            // Ignore a second Welcome and the message kinds of later protocol revisions.
            Some(hub_message::Kind::Welcome(_)) | None => {}
        }
        Ok(())
    }
}

/// A session after the hub's Welcome.
struct OpenStream {
    connection: Connection,
    outgoing: mpsc::Sender<AgentMessage>,
    incoming: Streaming<HubMessage>,
    welcome: Welcome,
    /// Seconds by which the agent's clock is ahead of the hub's.
    clock_ahead: i64,
    /// Digests of the stored roots. Those in Hello are marked as seen.
    stored_roots: watch::Receiver<Option<Vec<RootDigest>>>,
}

/// The pending connection that replaces the current stream.
type PendingStream<'a> =
    Pin<Box<dyn Future<Output = Result<OpenStream, SessionError>> + Send + 'a>>;

/// Waits for the pending connection. Never completes without one.
async fn wait_for_pending(
    pending: &mut Option<PendingStream<'_>>,
) -> Result<OpenStream, SessionError> {
    match pending {
        Some(opening) => {
            let opened = opening.await;
            *pending = None;
            opened
        }
        None => std::future::pending().await,
    }
}

/// Returns the replacement of a stream that has ended. The hub also ends a stream when it accepts the replacement.
async fn next_after_end(
    result: Result<Option<HubMessage>, Status>,
    connection: &Connection,
    pending: Option<PendingStream<'_>>,
) -> Result<Box<OpenStream>, SessionError> {
    if let Some(pending) = pending
        && let Ok(Ok(open)) = tokio::time::timeout(WELCOME_TIMEOUT, pending).await
    {
        return Ok(Box::new(open));
    }
    Err(match result {
        Err(status) => error_from_status(connection, &status),
        Ok(_) => SessionError::Ended(connection.address().to_owned()),
    })
}

fn message(kind: agent_message::Kind) -> AgentMessage {
    AgentMessage { kind: Some(kind) }
}

/// Maps the status of a failed call to an error.
fn error_from_status(connection: &Connection, status: &Status) -> SessionError {
    if let Some(rejection) = connection.rejection() {
        return SessionError::Dial(rejection);
    }
    let address = connection.address().to_owned();
    let message = status_message(status);
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
struct LoggedErrors {
    errors: BTreeSet<String>,
    clocks_differ: bool,
}

impl LoggedErrors {
    fn log(&mut self, error: &SessionError) {
        if let SessionError::Drained { reason, .. } = error {
            tracing::info!(%reason, "the session ended; reconnecting");
            return;
        }
        let text = chain(error);
        if self.errors.contains(&text) || self.errors.len() >= LOGGED_ERRORS_MAX {
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

    /// Logs a warning if the clocks differ. `clock_ahead` is the number of seconds by which the agent's clock is ahead of the
    /// hub's.
    fn check_clocks(&mut self, clock_ahead: i64) {
        let differ = clock_ahead.unsigned_abs() > CLOCK_DIFFERENCE_MAX.as_secs();
        if differ && !self.clocks_differ {
            tracing::warn!(
                seconds_ahead = clock_ahead,
                "the clock differs from the hub's; correct it"
            );
        }
        self.clocks_differ = differ;
    }
}

pub mod connect;
pub mod hub_chart;
#[cfg(test)]
mod tests;
