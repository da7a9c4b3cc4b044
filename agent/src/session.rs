//! The session: one stream to the hub for as long as there is a hub, and a new one whenever it ends.
//!
//! It owns nothing that it carries. Reports stay in the report_store until there is room for them on the way,
//! so the newest of each Tenant is sent; the newest desired state goes to a slot.

mod reconnect;
mod report_queue;

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use krypton_proto::skew::PROTOCOL;
use krypton_proto::v1::{
    AgentMessage, Hello, HubMessage, Trusts, Welcome, agent_message, hub_message,
};
use krypton_reconciler::report_store::ReportStore;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::effect;
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

/// From the start of the stream to the hub's Welcome.
const WELCOME: Duration = Duration::from_secs(10);
/// Messages that are made and not yet on their way. The newest of everything waits in the report_store.
const OUTGOING: usize = 2;
/// Clocks that differ by more are worth a word: certificates are valid from and to a time.
const CLOCKS: Duration = Duration::from_secs(60);
/// What a hub may ask for between two heartbeats.
const HEARTBEAT: std::ops::RangeInclusive<u32> = 1_000..=60_000;
/// Distinct errors that are remembered as said.
const SAID: usize = 16;

/// Whether there is a session now.
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

/// How it stands with the hub, for who looks for what is wrong.
#[derive(Clone, Debug, Default)]
pub struct Contact {
    pub up: bool,
    /// Since when; `None` where it has never been up.
    pub since: Option<BootTime>,
    /// When the hub last said something.
    pub heard: Option<BootTime>,
    /// Where the hub of the present or last session is, and what it has said of itself.
    pub address: Option<String>,
    pub hub_version: Option<String>,
    pub session: Option<u64>,
}

impl Contact {
    fn welcomed(&mut self, address: &str, welcome: &Welcome, now: BootTime) {
        let version = welcome.hub_version.chars().take(64).collect();
        // One that follows another leaves no time without.
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

/// What a session is made of.
#[derive(Debug)]
pub struct Session {
    pub dialer: Arc<Dialer>,
    /// Which of the member's agents this is; the same after a restart.
    pub replica: String,
    pub cluster_uid: String,
    pub kubernetes_version: String,
    /// What the reconciler says.
    pub report_store: Arc<ReportStore>,
    /// Where the hub's newest desired state goes.
    pub desired: watch::Sender<Option<Arc<DesiredState>>>,
    /// What was on record on the member at the start.
    pub recorded: Option<(Version, String)>,
    pub link: watch::Sender<Link>,
    pub contact: watch::Sender<Contact>,
}

/// Why there is no session.
#[derive(Debug, Error)]
pub enum SessionError {
    #[error("there is no session with the hub")]
    Dial(#[source] DialError),
    #[error("the hub at {address} refuses this agent: {words}")]
    Refused { address: String, words: String },
    #[error("the session with the hub at {address} broke ({code:?}): {words}; it is tried again")]
    Broken {
        address: String,
        code: Code,
        words: String,
    },
    #[error("the hub at {0} has ended the session; it is tried again")]
    Ended(String),
    #[error("the hub at {address} did not answer within {} s; is it overloaded? it is tried again", WELCOME.as_secs())]
    NoWelcome { address: String },
    #[error(
        "the hub at {address} speaks protocol {protocol}, which this agent does not; install an agent of the hub's version {hub}"
    )]
    Protocol {
        address: String,
        protocol: u32,
        hub: String,
    },
    #[error("the hub at {0} did not begin with a Welcome; is it a hub?")]
    Unexpected(String),
}

/// What comes after a stream that the hub had welcomed.
enum Next {
    /// Another one, with a newer certificate, that it has welcomed already.
    Stream(Box<Open>),
    Ending(Ending),
}

impl From<SessionError> for Next {
    fn from(error: SessionError) -> Self {
        Self::Ending(Ending::Error(error))
    }
}

/// How a session ended.
enum Ending {
    Drain { reason: String, pause: Duration },
    Error(SessionError),
}

/// Keeps a session until `stop`.
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
                tracing::info!(%reason, "the session ends; it is made anew");
                pace.drained(BootTime::now(), *pause, rand::random())
            }
            Ending::Error(error) => {
                said.say(error);
                match error {
                    SessionError::Refused { .. } | SessionError::Protocol { .. } => {
                        pace.refused(rand::random())
                    }
                    _ => pace.failed(BootTime::now(), rand::random()),
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

    /// Hello and Welcome.
    async fn open(&self) -> Result<Open, SessionError> {
        let connection = self.dialer.connect().await.map_err(SessionError::Dial)?;
        let address = connection.address().to_owned();
        let (outgoing, messages) = mpsc::channel(OUTGOING);
        let mut kept = self.dialer.trust().kept();
        let trusts = kept.see().as_deref().map(Trusts::new);
        // The queue is empty: there is room.
        let _fits = outgoing.try_send(message(agent_message::Kind::Hello(self.hello(trusts))));
        let greeting = async {
            let mut fleet = connection.fleet();
            let connecting = fleet.connect(ReceiverStream::new(messages));
            let answer = effect!("session.open", connecting).await?;
            let mut incoming = answer.into_inner();
            let first = incoming.message().await?;
            Ok::<_, Status>((incoming, first))
        };
        let (incoming, first) = match tokio::time::timeout(WELCOME, greeting).await {
            Ok(Ok(greeted)) => greeted,
            Ok(Err(status)) => {
                // One that does not lead says so in this way; where it does, the next one does not.
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

    fn hello(&self, trusts: Option<Trusts>) -> Hello {
        // What was on record at the start may be old news by now, or all there is.
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
            trusts,
        }
    }

    /// Follows one stream to its end, or until there is one with a newer certificate: that is opened
    /// beside it, so that there is no time without.
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
            rand::random(),
        )));
        let mut next: Option<Opening<'_>> = None;
        let mut pace = Pace::default();
        loop {
            tokio::select! {
                message = incoming.message() => match message {
                    Ok(Some(message)) => {
                        self.contact.send_modify(|it| it.heard = Some(BootTime::now()));
                        if let Some(ending) = self.take_in(message, &mut report_queue) {
                            // It wants to be rid of us: it stops, or leads no more.
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
                        let pause = pace.failed(BootTime::now(), rand::random());
                        next = Some(Box::pin(async move {
                            tokio::time::sleep(pause).await;
                            self.open().await
                        }));
                    }
                },
                Ok(()) = kept.changed() => {
                    if let Some(roots) = kept.see().as_deref() {
                        report_queue.trusts(Trusts::new(roots));
                    }
                }
                () = self.report_store.changed(), if !report_queue.has_changes() => report_queue.changed(),
                () = &mut beat => {
                    report_queue.heartbeat();
                    let next = reconnect::spread(heartbeat, rand::random());
                    beat.as_mut().reset(tokio::time::Instant::now() + next);
                }
                permit = outgoing.reserve(), if report_queue.has_something() => match permit {
                    Ok(permit) => {
                        if let Some(kind) = report_queue.next(&self.report_store) {
                            permit.send(message(kind));
                        }
                    }
                    // The stream is gone; what it ended with is about to come in.
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
                        "a desired state cannot be read and is left aside; is the hub of a later version?");
                }
            },
            Some(hub_message::Kind::Resync(resync)) => {
                tracing::debug!(number = resync.number, "the hub asks for the whole account");
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
            // A second Welcome, or what a later revision adds.
            Some(hub_message::Kind::Welcome(_)) | None => {}
        }
        None
    }
}

/// A session that the hub has welcomed.
struct Open {
    connection: Connection,
    outgoing: mpsc::Sender<AgentMessage>,
    incoming: Streaming<HubMessage>,
    welcome: Welcome,
    /// By how many seconds our clock is ahead of the hub's.
    ahead: i64,
    /// The roots that are kept; seen as far as Hello has told of them.
    kept: watch::Receiver<Option<Vec<RootDigest>>>,
}

/// A stream that is to follow the present one.
type Opening<'a> = Pin<Box<dyn Future<Output = Result<Open, SessionError>> + Send + 'a>>;

/// The outcome of the opening that is under way; for ever without one.
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

/// What comes after a stream that has ended. The hub ends one also because it has begun the next.
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

/// What a failed call says of the session.
fn meaning(connection: &Connection, status: &Status) -> SessionError {
    if let Some(refused) = connection.refused() {
        return SessionError::Dial(refused);
    }
    let address = connection.address().to_owned();
    let words: String = status.message().chars().take(500).collect();
    match status.code() {
        Code::PermissionDenied | Code::FailedPrecondition | Code::Unauthenticated => {
            SessionError::Refused { address, words }
        }
        code => SessionError::Broken {
            address,
            code,
            words,
        },
    }
}

/// What was said already: each distinct error once, until a session goes well.
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
                tracing::error!(error = %text, "the agent goes on with the desired state that it has");
            }
            _ => tracing::warn!(error = %text, "no session"),
        }
        self.errors.insert(text);
    }

    fn clear(&mut self) {
        self.errors.clear();
    }

    /// `ahead`: by how many seconds our clock is ahead of the hub's.
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
