//! The hub's gRPC port: mutual TLS, identification of peers, and connection limits.
//!
//! tonic cannot replace its TLS configuration at runtime and has no deadline for handshakes. The listener
//! therefore completes the handshake before it passes a connection to tonic.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures::StreamExt as _;
use jiff::Timestamp;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::net::{Listener, Stream};
use krypton_runtime::newest::NewestSeen as _;
use krypton_runtime::rate_limit::Rate;
use krypton_runtime::tls;
use krypton_types::error_chain::chain;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::ca::{Authority, AuthorityError, HUB_CERTIFICATE_LIFE, Live, read_agent_certificate};
use crate::edgecluster::credential_expiry;
use crate::observe::metrics::{DoorMetrics, SessionMetrics};

use crate::agent_server::byte_limit::Metered;
use crate::agent_server::connection_limiter::{
    AddressShare, ConnectionLimiter, MemberShare, one_address,
};
use crate::agent_server::strangers::{Asked, Full, Strangers};
pub use crate::agent_server::tls_connection::{Connection, Peer};
use crate::agent_server::tls_connection::{Life, Newcomer, Places};

/// Enough for a session and the few other calls of an agent.
const STREAMS: u32 = 16;
const HEADER_LIST: u32 = 16 * 1024;
/// Bytes that a peer may send before the hub reads them: a few messages, for all its streams and for one
/// stream.
const CONNECTION_WINDOW: u32 = 512 * 1024;
const STREAM_WINDOW: u32 = 256 * 1024;
/// Connections between the handshake and tonic, which accepts them immediately.
const WAITING: usize = 16;
/// Pause after an error that the next accept would hit again, such as EMFILE.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
const CREDENTIAL_CHECK: Duration = Duration::from_secs(60);

/// The flag of this port, for messages.
pub const LISTEN_FLAG: &str = "--listen";

#[derive(Debug, Error)]
pub enum ListenerError {
    #[error("making the hub's certificate failed")]
    Certificate(#[source] AuthorityError),
    #[error("the hub's certificate cannot be used")]
    Tls(#[source] tls::TlsError),
    #[error("--listen: serving failed")]
    Serve(#[source] tonic::transport::Error),
}

/// Returns a TLS configuration with a new certificate of the hub.
pub fn server_config(authority: &Authority, now: Timestamp) -> Result<ServerConfig, ListenerError> {
    let credential = authority
        .hub_credential(now)
        .map_err(ListenerError::Certificate)?;
    tls::server_config(&authority.roots(), credential).map_err(ListenerError::Tls)
}

/// Renews the hub's certificate and the roots of agents until `stop`. The certificate was created just before
/// the call. The hub renews it at two thirds of its lifetime and when the CA changes. Existing connections keep
/// the old one.
pub async fn keep_credential(
    live: Arc<Live>,
    tls: Arc<ArcSwap<ServerConfig>>,
    metrics: Arc<SessionMetrics>,
    stop: CancellationToken,
) {
    let mut made = clock::wall();
    let mut authority = live.subscribe();
    let mut used = authority.see();
    show_ends(&used, made, &metrics);
    loop {
        // Agents compare the dates with the wall clock. The hub checks it often, because it may be set.
        tokio::select! {
            () = stop.cancelled() => return,
            Ok(()) = authority.changed() => {}
            () = tokio::time::sleep(CREDENTIAL_CHECK) => {}
        }
        let now = clock::wall();
        let next = authority.see();
        if Arc::ptr_eq(&next, &used) && !is_due(made, now) {
            continue;
        }
        match server_config(&next, now) {
            Ok(config) => {
                tls.store(Arc::new(config));
                (made, used) = (now, next);
                show_ends(&used, made, &metrics);
                tracing::info!("renewed the hub's certificate");
            }
            Err(error) => {
                tracing::warn!(error = %chain(&error), "renewing the hub's certificate failed; retrying in a minute");
            }
        }
    }
}

/// Publishes the expiry of the CA and of the certificate created at `made`.
fn show_ends(authority: &Authority, made: Timestamp, metrics: &SessionMetrics) {
    let roots = authority.roots();
    if let Some(end) = roots
        .first()
        .and_then(|signing| credential_expiry::end_of(signing))
    {
        metrics.certificate("ca", end);
        let own = made.saturating_add(HUB_CERTIFICATE_LIFE);
        metrics.certificate("hub", own.unwrap_or(end).min(end));
    }
}

/// Also true if the clock was set back to a time at which the certificate is barely valid.
fn is_due(made: Timestamp, now: Timestamp) -> bool {
    let two_thirds = i64::try_from(HUB_CERTIFICATE_LIFE.as_secs() / 3 * 2).unwrap_or(i64::MAX);
    let age = now.as_second().saturating_sub(made.as_second());
    age >= two_thirds || age < -12 * 60 * 60
}

/// Serves `routes` on `listener` until `stop`, and then closes all connections after a short drain. Each
/// request has a [`Peer`] in its extensions.
pub async fn serve(
    listener: Listener,
    tls: Arc<ArcSwap<ServerConfig>>,
    trust_domain: String,
    routes: Routes,
    metrics: DoorMetrics,
    stop: CancellationToken,
) -> Result<(), ListenerError> {
    let limits = Limits::default();
    let serving = serve_within(listener, tls, trust_domain, routes, limits, metrics, stop);
    serving.await
}

/// Limits for the number and duration of connections.
///
/// An address may be one machine, or a NAT with a whole fleet. The limits per address therefore apply only to
/// connections without an agent's certificate, and prefer waiting to refusal.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// A handshake costs 1 ms of a core and about 50 KiB.
    handshakes: usize,
    /// Deadline from the accepted connection, including the wait for a slot: as long as an agent waits.
    handshake: Duration,
    /// Ten times the largest fleet, at about 50 KiB each.
    connections: usize,
    /// Connections that have not shown an agent's certificate: the share of four addresses, at about 5 KiB each
    /// while they wait. The other connections are reserved for agents.
    newcomers: usize,
    /// Connections without an agent's certificate after the handshake, for enrollment. A new one replaces the
    /// oldest.
    strangers: usize,
    /// Lifetime of such a connection. An enrollment takes less.
    stranger: Duration,
    /// From the end of the handshake to the end of the first request, which agents send immediately.
    request: Duration,
    /// Bytes that the hub reads before an agent shows its certificate: a handshake, and an enrollment of 12 KiB
    /// at most.
    stranger_bytes: u64,
    of_an_address: OfAnAddress,
    /// Connections of one member: a few replicas, each with remains of its last connections.
    of_a_member: usize,
    /// Allows a full report of 10,000 Tenants immediately, at more than 1 KiB each, then 1 MB a second. A flood
    /// of PINGs on an idle connection then takes a few hundredths of a core.
    member_bytes: Rate,
    /// Three ping intervals of an agent.
    silence: Duration,
    /// Time for calls in flight after the stop. Sessions end earlier.
    drain: Duration,
}

/// Limits for one address, which leave room for others.
#[derive(Clone, Copy, Debug)]
struct OfAnAddress {
    /// A large fleet behind one NAT that reconnects simultaneously; a quarter of the total.
    newcomers: usize,
    /// Half of the total. At 0.6 s each over a long distance, a thousand agents take 10 s.
    handshakes: usize,
    /// As many as enroll simultaneously, and a quarter of the total. A new one replaces the oldest.
    strangers: usize,
    /// Two reconnections of a fleet of a thousand immediately, then a tenth of a core.
    handshake_rate: Rate,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshakes: 128,
            handshake: Duration::from_secs(10),
            connections: 10_000,
            newcomers: 4096,
            strangers: 64,
            stranger: Duration::from_secs(30),
            request: Duration::from_secs(3),
            stranger_bytes: 64 * 1024,
            of_an_address: OfAnAddress {
                newcomers: 1024,
                handshakes: 64,
                strangers: 16,
                handshake_rate: Rate {
                    burst: 2000,
                    each: Duration::from_millis(10),
                },
            },
            of_a_member: 64,
            member_bytes: Rate {
                burst: 16 << 20,
                each: Duration::from_micros(1),
            },
            silence: Duration::from_secs(30),
            drain: Duration::from_secs(5),
        }
    }
}

async fn serve_within(
    listener: Listener,
    tls: Arc<ArcSwap<ServerConfig>>,
    trust_domain: String,
    routes: Routes,
    limits: Limits,
    metrics: DoorMetrics,
    stop: CancellationToken,
) -> Result<(), ListenerError> {
    let (finished, waiting) = mpsc::channel(WAITING);
    let cut = CancellationToken::new();
    // Dropping this future for any reason closes the connections.
    let _cut_at_the_end = cut.clone().drop_guard();
    let door = Arc::new(Door::new(tls, trust_domain, limits, metrics, cut));
    // The hub sends no pings: agents ping, and a session without heartbeats times out.
    let serving = Server::builder()
        .max_concurrent_streams(STREAMS)
        .http2_max_header_list_size(HEADER_LIST)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .initial_stream_window_size(STREAM_WINDOW)
        .add_routes(routes)
        .serve_with_incoming_shutdown(
            ReceiverStream::new(waiting).map(Ok::<Connection, Infallible>),
            stop.clone().cancelled_owned(),
        );
    let until_drained = async {
        // The socket is closed first. New connections then go to another hub instead of waiting in its queue.
        accept(listener, &door, finished, &stop).await;
        tokio::time::sleep(limits.drain).await;
    };
    tokio::select! {
        served = serving => served.map_err(ListenerError::Serve),
        () = until_drained => Ok(()),
    }
}

/// Accepts connections until `stop`, and retries after errors.
async fn accept(
    listener: Listener,
    door: &Arc<Door>,
    finished: mpsc::Sender<Connection>,
    stop: &CancellationToken,
) {
    let mut failing = false;
    loop {
        // When all slots are taken, new connections wait in the kernel's bounded queue.
        let next = async {
            let place = Arc::clone(&door.connections).acquire_owned().await;
            (place, listener.accept().await)
        };
        let Some((Ok(place), accepted)) = stop.run_until_cancelled(next).await else {
            return;
        };
        match accepted {
            Ok((stream, address)) => {
                failing = false;
                // Checked here, because a connection that is refused immediately needs no task.
                let newcomer = match door.receive(address) {
                    Ok(newcomer) => newcomer,
                    Err(refused) => {
                        door.refuses(address, &refused);
                        continue;
                    }
                };
                let (door, finished) = (Arc::clone(door), finished.clone());
                tokio::spawn(async move {
                    let came_in = door.let_in(stream, address, place, newcomer).await;
                    match came_in {
                        // The send fails after tonic has stopped.
                        Ok(connection) => drop(finished.send(connection).await),
                        Err(refused) => door.refuses(address, &refused),
                    }
                });
            }
            Err(error) if is_of_one_connection(error.kind()) => {}
            Err(error) => {
                if !failing {
                    tracing::warn!(%error, "accepting a connection failed; retrying every second");
                }
                failing = true;
                stop.run_until_cancelled(tokio::time::sleep(ACCEPT_PAUSE))
                    .await;
            }
        }
    }
}

/// Whether the error affects only one connection, which is closed already.
fn is_of_one_connection(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
    )
}

#[derive(Debug, Error)]
enum Refused {
    #[error("no handshake within {} s", .0.as_secs_f32())]
    Slow(Duration),
    #[error("the handshake failed")]
    Handshake(#[source] io::Error),
    #[error("too many unauthenticated connections (limit: {0})")]
    Newcomers(usize),
    #[error("too many unauthenticated connections of this address (limit: {0})")]
    NewcomersOfAddress(usize),
    #[error("too many handshakes with this address one after the other")]
    Pace,
    #[error("cluster {cluster} has {limit} connections already")]
    Member { cluster: String, limit: usize },
}

/// All values that [`Refused::why`] may return.
pub(crate) const REFUSED_WHY: [&str; 5] = ["slow", "handshake", "strangers", "address", "member"];

impl Refused {
    /// Returns the label value for the metric.
    fn why(&self) -> &'static str {
        match self {
            Self::Slow(_) => "slow",
            Self::Handshake(_) => "handshake",
            Self::Newcomers(_) => Full::All.why(),
            Self::NewcomersOfAddress(_) | Self::Pace => Full::Address.why(),
            Self::Member { .. } => "member",
        }
    }
}

impl Full {
    /// Returns the label value for the metric.
    fn why(self) -> &'static str {
        match self {
            Self::All => "strangers",
            Self::Address => "address",
        }
    }
}

/// Admits connections within the limits.
#[derive(Debug)]
struct Door {
    tls: Arc<ArcSwap<ServerConfig>>,
    trust_domain: String,
    limits: Limits,
    metrics: DoorMetrics,
    connections: Arc<Semaphore>,
    handshakes: Semaphore,
    newcomers: Arc<Semaphore>,
    strangers: Arc<Strangers>,
    addresses: Arc<ConnectionLimiter<IpAddr, AddressShare>>,
    members: Arc<ConnectionLimiter<String, MemberShare>>,
    /// Closes every connection.
    cut: CancellationToken,
}

impl Door {
    fn new(
        tls: Arc<ArcSwap<ServerConfig>>,
        trust_domain: String,
        limits: Limits,
        metrics: DoorMetrics,
        cut: CancellationToken,
    ) -> Self {
        let of_an_address = limits.of_an_address;
        Self {
            tls,
            trust_domain,
            limits,
            metrics,
            connections: Arc::new(Semaphore::new(limits.connections)),
            handshakes: Semaphore::new(limits.handshakes),
            newcomers: Arc::new(Semaphore::new(limits.newcomers)),
            strangers: Strangers::new(limits.strangers, of_an_address.strangers),
            addresses: ConnectionLimiter::new(of_an_address.newcomers, move || {
                let OfAnAddress {
                    handshakes,
                    handshake_rate,
                    ..
                } = of_an_address;
                AddressShare::new(handshakes, handshake_rate)
            }),
            members: ConnectionLimiter::new(limits.of_a_member, move || {
                MemberShare::new(limits.member_bytes)
            }),
            cut,
        }
    }

    fn refuses(&self, address: SocketAddr, refused: &Refused) {
        self.metrics.refused(refused.why());
        tracing::debug!(%address, reason = %chain(refused), "a connection was refused");
    }

    /// Reserves a slot for a new, unauthenticated connection.
    fn receive(&self, address: SocketAddr) -> Result<Newcomer, Refused> {
        let limits = &self.limits;
        let of_address = self
            .addresses
            .enter(&one_address(address.ip()), BootTime::now())
            .ok_or(Refused::NewcomersOfAddress(limits.of_an_address.newcomers))?;
        let of_all = Arc::clone(&self.newcomers)
            .try_acquire_owned()
            .map_err(|_| Refused::Newcomers(limits.newcomers))?;
        Ok(Newcomer {
            _of_all: of_all,
            of_address,
        })
    }

    async fn let_in(
        &self,
        stream: Stream,
        address: SocketAddr,
        place: OwnedSemaphorePermit,
        newcomer: Newcomer,
    ) -> Result<Connection, Refused> {
        // Messages are small and answered immediately. An error on a closed connection shows up at the next
        // read.
        drop(stream.set_nodelay());
        let limit = self.limits.handshake;
        let shaking = self.shake_hands(stream, &newcomer.of_address.share);
        let mut stream = tokio::time::timeout(limit, shaking)
            .await
            .map_err(|_| Refused::Slow(limit))??;
        let mut peer = self.peer(address, stream.get_ref().1.peer_certificates());
        let cut = self.cut.clone();
        let (life, places) = match &peer.certificate {
            Ok(certificate) => {
                let life = certificate.not_after.duration_since(clock::wall());
                let cluster = &certificate.cluster;
                let of_member = self.members.enter(cluster, BootTime::now());
                let of_member = of_member.ok_or_else(|| Refused::Member {
                    cluster: cluster.clone(),
                    limit: self.limits.of_a_member,
                })?;
                stream
                    .get_mut()
                    .0
                    .is_of_member(Arc::clone(&of_member.share));
                // A certificate that has just expired has no time left.
                let life = Duration::try_from(life).unwrap_or_default();
                (Life::of_agent(life), Places::of_member(place, of_member))
            }
            Err(_) => {
                let (own, full) = self.strangers.enter(one_address(address.ip()));
                if let Some(full) = full {
                    self.metrics.refused(full.why());
                    tracing::debug!(
                        ?full,
                        "the oldest connection without an agent's certificate makes room"
                    );
                }
                peer.asked = own.asked.clone();
                let life = Life::of_stranger(&own, self.limits.request, self.limits.stranger);
                (life, Places::of_stranger(place, newcomer, own))
            }
        };
        let silence = self.limits.silence;
        Ok(Connection::new(stream, peer, life, silence, cut, places))
    }

    /// Waits for a slot of the address first, and then for a global one. An address that fills its own slots
    /// delays others only by these.
    async fn shake_hands(
        &self,
        stream: Stream,
        address: &AddressShare,
    ) -> Result<TlsStream<Metered>, Refused> {
        // A longer wait would leave no time for the handshake and would waste a slot.
        let wait = address
            .next_handshake(BootTime::now(), self.limits.handshake / 2)
            .ok_or(Refused::Pace)?;
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        // Neither semaphore is ever closed.
        let _of_address = address.turns.acquire().await;
        let _of_all = self.handshakes.acquire().await;
        let _counted = self.metrics.handshake();
        let acceptor = TlsAcceptor::from(self.tls.load_full());
        let stream = Metered::of_stranger(stream, self.limits.stranger_bytes);
        acceptor.accept(stream).await.map_err(Refused::Handshake)
    }

    fn peer(&self, address: SocketAddr, certificates: Option<&[CertificateDer<'_>]>) -> Peer {
        let certificate = match certificates.and_then(<[_]>::first) {
            None => Err("no client certificate".to_owned()),
            Some(own) => read_agent_certificate(&self.trust_domain, own).map_err(|error| {
                format!("the client certificate cannot be used: {}", chain(&error))
            }),
        };
        Peer {
            address,
            certificate,
            asked: Asked::default(),
        }
    }
}

#[cfg(test)]
mod tests;
