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
use futures::{FutureExt as _, StreamExt as _};
use jiff::Timestamp;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::net::{Listener, Stream};
use krypton_runtime::newest::NewestSeen as _;
use krypton_runtime::rate_limit::Rate;
use krypton_runtime::tls;
use krypton_types::error_chain::chain;
use krypton_types::validity::Validity;
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

use crate::ca::{
    Authority, AuthorityError, CurrentAuthority, HUB_CERTIFICATE_LIFE, read_agent_certificate,
};

use crate::agent_server::anonymous_connections::{
    AnonymousConnections, ExceededLimit, RequestReceived,
};
use crate::agent_server::byte_limit::MeteredStream;
use crate::agent_server::connection_limiter::{
    AddressBudget, ConnectionLimiter, MemberBudget, address_key,
};
use crate::agent_server::metrics::{PortMetrics, SessionMetrics};
pub use crate::agent_server::tls_connection::{Connection, Peer};
use crate::agent_server::tls_connection::{HeldSlots, UnauthenticatedSlot, anonymous_lifetime};

/// Enough for a session and the few other calls of an agent.
const STREAMS: u32 = 16;
const HEADER_LIST: u32 = 16 * 1024;
/// Bytes that a peer may send before the hub reads them: a few messages, for all its streams and for one
/// stream.
const CONNECTION_WINDOW: u32 = 512 * 1024;
const STREAM_WINDOW: u32 = 256 * 1024;
/// Connections between the handshake and tonic, which accepts them immediately.
const QUEUE: usize = 16;
/// Pause after an error that the next accept would hit again, such as EMFILE.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
const CREDENTIAL_CHECK: Duration = Duration::from_secs(60);

/// The flag of this port, for messages.
pub const LISTEN_FLAG: &str = "--listen";

#[derive(Debug, Error)]
pub enum ListenerError {
    #[error("failed to create the hub's certificate")]
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
pub async fn renew_credential(
    ca: Arc<CurrentAuthority>,
    tls: Arc<ArcSwap<ServerConfig>>,
    metrics: Arc<SessionMetrics>,
    stop: CancellationToken,
) {
    let mut issued_at = clock::wall();
    let mut authority = ca.subscribe();
    let mut current = authority.get_and_update();
    publish_expiry(&current, issued_at, &metrics);
    loop {
        // Agents compare the dates with the wall clock. The hub checks it often, because it may be set.
        tokio::select! {
            () = stop.cancelled() => return,
            Ok(()) = authority.changed() => {}
            () = tokio::time::sleep(CREDENTIAL_CHECK) => {}
        }
        let now = clock::wall();
        let next = authority.get_and_update();
        if Arc::ptr_eq(&next, &current) && !is_renewal_due(issued_at, now) {
            continue;
        }
        match server_config(&next, now) {
            Ok(config) => {
                tls.store(Arc::new(config));
                (issued_at, current) = (now, next);
                publish_expiry(&current, issued_at, &metrics);
                tracing::info!("renewed the hub's certificate");
            }
            Err(error) => {
                tracing::warn!(error = %chain(&error), "failed to renew the hub's certificate; retrying");
            }
        }
    }
}

/// Publishes the expiry of the CA and of the certificate created at `issued_at`.
fn publish_expiry(authority: &Authority, issued_at: Timestamp, metrics: &SessionMetrics) {
    if let Some(Validity { not_after: end, .. }) = authority.validity() {
        metrics.set_certificate_expiry("ca", end);
        let hub_end = issued_at.saturating_add(HUB_CERTIFICATE_LIFE);
        metrics.set_certificate_expiry("hub", hub_end.unwrap_or(end).min(end));
    }
}

/// Also true if the clock was set back to a time at which the certificate is barely valid.
fn is_renewal_due(issued_at: Timestamp, now: Timestamp) -> bool {
    let two_thirds = i64::try_from(HUB_CERTIFICATE_LIFE.as_secs() / 3 * 2).unwrap_or(i64::MAX);
    let age = now.as_second().saturating_sub(issued_at.as_second());
    age >= two_thirds || age < -12 * 60 * 60
}

/// Serves `routes` on `listener` until `stop`, and then closes all connections after a short drain. Each
/// request has a [`Peer`] in its extensions.
pub async fn serve(
    listener: Listener,
    tls: Arc<ArcSwap<ServerConfig>>,
    trust_domain: String,
    routes: Routes,
    metrics: PortMetrics,
    stop: CancellationToken,
) -> Result<(), ListenerError> {
    let limits = Limits::default();
    serve_within(listener, tls, trust_domain, routes, limits, metrics, stop).await
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
    handshake_timeout: Duration,
    /// Ten times the largest fleet, at about 50 KiB each.
    connections: usize,
    /// Connections that have not shown an agent's certificate: the share of four addresses, at about 5 KiB each
    /// while they wait. The other connections are reserved for agents.
    unauthenticated: usize,
    /// Connections without an agent's certificate after the handshake, for enrollment. A new one replaces the
    /// oldest.
    anonymous: usize,
    /// Lifetime of such a connection. An enrollment takes less.
    anonymous_lifetime: Duration,
    /// From the end of the handshake to the end of the first request, which agents send immediately.
    first_request: Duration,
    /// Bytes that the hub reads before an agent shows its certificate: a handshake, and an enrollment of 12 KiB
    /// at most.
    anonymous_bytes: u64,
    per_address: AddressLimits,
    /// Connections of one member: a few replicas, each with remains of its last connections.
    connections_per_member: usize,
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
struct AddressLimits {
    /// A large fleet behind one NAT that reconnects simultaneously; a quarter of the total.
    unauthenticated: usize,
    /// Half of the total. At 0.6 s each over a long distance, a thousand agents take 10 s.
    handshakes: usize,
    /// As many as enroll simultaneously, and a quarter of the total. A new one replaces the oldest.
    anonymous: usize,
    /// Two reconnections of a fleet of a thousand immediately, then a tenth of a core.
    handshake_rate: Rate,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshakes: 128,
            handshake_timeout: Duration::from_secs(10),
            connections: 10_000,
            unauthenticated: 4096,
            anonymous: 64,
            anonymous_lifetime: Duration::from_secs(30),
            first_request: Duration::from_secs(3),
            anonymous_bytes: 64 * 1024,
            per_address: AddressLimits {
                unauthenticated: 1024,
                handshakes: 64,
                anonymous: 16,
                handshake_rate: Rate {
                    burst: 2000,
                    per_token: Duration::from_millis(10),
                },
            },
            connections_per_member: 64,
            member_bytes: Rate {
                burst: 16 << 20,
                per_token: Duration::from_micros(1),
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
    metrics: PortMetrics,
    stop: CancellationToken,
) -> Result<(), ListenerError> {
    let (accepted_tx, accepted_rx) = mpsc::channel(QUEUE);
    let shutdown = CancellationToken::new();
    // Dropping this future for any reason closes the connections.
    let _shutdown_guard = shutdown.clone().drop_guard();
    let per_address = limits.per_address;
    let gate = Arc::new(ConnectionGate {
        tls,
        trust_domain,
        limits,
        metrics,
        connections: Arc::new(Semaphore::new(limits.connections)),
        handshakes: Semaphore::new(limits.handshakes),
        unauthenticated: Arc::new(Semaphore::new(limits.unauthenticated)),
        anonymous: AnonymousConnections::new(limits.anonymous, per_address.anonymous),
        addresses: ConnectionLimiter::new(per_address.unauthenticated, move || {
            AddressBudget::new(per_address.handshakes, per_address.handshake_rate)
        }),
        members: ConnectionLimiter::new(limits.connections_per_member, move || {
            MemberBudget::new(limits.member_bytes)
        }),
        shutdown,
    });
    // The hub sends no pings: agents ping, and a session without heartbeats times out.
    let serving = Server::builder()
        .max_concurrent_streams(STREAMS)
        .http2_max_header_list_size(HEADER_LIST)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .initial_stream_window_size(STREAM_WINDOW)
        .add_routes(routes)
        .serve_with_incoming_shutdown(
            ReceiverStream::new(accepted_rx).map(Ok::<Connection, Infallible>),
            stop.clone().cancelled_owned(),
        );
    let until_drained = async {
        // The socket is closed first. New connections then go to another hub instead of waiting in its queue.
        accept(listener, &gate, accepted_tx, &stop).await;
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
    gate: &Arc<ConnectionGate>,
    accepted_tx: mpsc::Sender<Connection>,
    stop: &CancellationToken,
) {
    let mut is_failing = false;
    loop {
        // When all slots are taken, new connections wait in the kernel's bounded queue.
        let next = async {
            let slot = Arc::clone(&gate.connections).acquire_owned().await;
            (slot, listener.accept().await)
        };
        let Some((Ok(slot), accepted)) = stop.run_until_cancelled(next).await else {
            return;
        };
        match accepted {
            Ok((stream, address)) => {
                is_failing = false;
                // Checked here, because a connection that is refused immediately needs no task.
                let unauthenticated = match gate.reserve(address) {
                    Ok(unauthenticated) => unauthenticated,
                    Err(refusal) => {
                        gate.record_refusal(address, &refusal);
                        continue;
                    }
                };
                let (gate, accepted_tx) = (Arc::clone(gate), accepted_tx.clone());
                tokio::spawn(async move {
                    match gate.admit(stream, address, slot, unauthenticated).await {
                        // The send fails after tonic has stopped.
                        Ok(connection) => drop(accepted_tx.send(connection).await),
                        Err(refusal) => gate.record_refusal(address, &refusal),
                    }
                });
            }
            Err(error) if is_connection_error(error.kind()) => {}
            Err(error) => {
                if !is_failing {
                    tracing::warn!(%error, "accepting a connection failed; retrying every second");
                }
                is_failing = true;
                stop.run_until_cancelled(tokio::time::sleep(ACCEPT_PAUSE))
                    .await;
            }
        }
    }
}

/// Whether the error affects only one connection, which is closed already.
fn is_connection_error(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
    )
}

/// Why a connection is refused.
#[derive(Debug, Error)]
enum ConnectionRefusal {
    #[error("no handshake within {} s", .0.as_secs_f32())]
    Timeout(Duration),
    #[error("the handshake failed")]
    Handshake(#[source] io::Error),
    #[error("too many unauthenticated connections (limit: {0})")]
    TooManyUnauthenticated(usize),
    #[error("too many unauthenticated connections of this address (limit: {0})")]
    TooManyOfAddress(usize),
    #[error("too many handshakes with this address in a row")]
    HandshakeRate,
    #[error("cluster {cluster} has {limit} connections already")]
    TooManyOfMember { cluster: String, limit: usize },
}

impl ConnectionRefusal {
    /// Returns the label value for the metric.
    fn reason(&self) -> &'static str {
        match self {
            Self::Timeout(_) => "slow",
            Self::Handshake(_) => "handshake",
            Self::TooManyUnauthenticated(_) => ExceededLimit::All.reason(),
            Self::TooManyOfAddress(_) | Self::HandshakeRate => ExceededLimit::Address.reason(),
            Self::TooManyOfMember { .. } => "member",
        }
    }
}

impl ExceededLimit {
    /// Returns the label value for the metric.
    fn reason(self) -> &'static str {
        match self {
            Self::All => "unauthenticated",
            Self::Address => "address",
        }
    }
}

/// Admits connections within the limits.
struct ConnectionGate {
    tls: Arc<ArcSwap<ServerConfig>>,
    trust_domain: String,
    limits: Limits,
    metrics: PortMetrics,
    connections: Arc<Semaphore>,
    handshakes: Semaphore,
    unauthenticated: Arc<Semaphore>,
    anonymous: Arc<AnonymousConnections>,
    addresses: Arc<ConnectionLimiter<IpAddr, AddressBudget>>,
    members: Arc<ConnectionLimiter<String, MemberBudget>>,
    /// Closes every connection.
    shutdown: CancellationToken,
}

impl ConnectionGate {
    fn record_refusal(&self, address: SocketAddr, refusal: &ConnectionRefusal) {
        self.metrics.count_refused(refusal.reason());
        tracing::debug!(%address, reason = %chain(refusal), "a connection was refused");
    }

    /// Reserves a slot for a new, unauthenticated connection.
    fn reserve(&self, address: SocketAddr) -> Result<UnauthenticatedSlot, ConnectionRefusal> {
        let limits = &self.limits;
        let address = self
            .addresses
            .acquire(&address_key(address.ip()), BootTime::now())
            .ok_or(ConnectionRefusal::TooManyOfAddress(
                limits.per_address.unauthenticated,
            ))?;
        let total = Arc::clone(&self.unauthenticated)
            .try_acquire_owned()
            .map_err(|_| ConnectionRefusal::TooManyUnauthenticated(limits.unauthenticated))?;
        Ok(UnauthenticatedSlot {
            _total: total,
            address,
        })
    }

    /// Completes the handshake, and assigns the connection to its member, or to the anonymous connections.
    async fn admit(
        &self,
        stream: Stream,
        address: SocketAddr,
        connection: OwnedSemaphorePermit,
        unauthenticated: UnauthenticatedSlot,
    ) -> Result<Connection, ConnectionRefusal> {
        let limit = self.limits.handshake_timeout;
        let handshake = self.handshake(stream, &unauthenticated.address.budget);
        let mut stream = tokio::time::timeout(limit, handshake)
            .await
            .map_err(|_| ConnectionRefusal::Timeout(limit))??;
        let mut peer = self.peer(address, stream.get_ref().1.peer_certificates());
        let (lifetime, slots) = match &peer.certificate {
            Ok(certificate) => {
                let validity = certificate.not_after.duration_since(clock::wall());
                let cluster = &certificate.cluster;
                let member = self.members.acquire(cluster, BootTime::now());
                let member = member.ok_or_else(|| ConnectionRefusal::TooManyOfMember {
                    cluster: cluster.clone(),
                    limit: self.limits.connections_per_member,
                })?;
                stream.get_mut().0.set_member(Arc::clone(&member.budget));
                // A certificate that has just expired has no time left.
                let validity = Duration::try_from(validity).unwrap_or_default();
                let slots: HeldSlots = Box::new((connection, member));
                let lifetime = async move { tokio::time::sleep(validity).await };
                (lifetime.boxed(), slots)
            }
            Err(_) => {
                let (anonymous, exceeded) = self.anonymous.add(address_key(address.ip()));
                if let Some(exceeded) = exceeded {
                    self.metrics.count_refused(exceeded.reason());
                    tracing::debug!(
                        full = ?exceeded,
                        "closed the oldest unauthenticated connection"
                    );
                }
                peer.request_received = anonymous.request_received.clone();
                let lifetime = anonymous_lifetime(
                    &anonymous,
                    self.limits.first_request,
                    self.limits.anonymous_lifetime,
                );
                let slots: HeldSlots = Box::new((connection, unauthenticated, anonymous));
                (lifetime.boxed(), slots)
            }
        };
        let (silence, shutdown) = (self.limits.silence, self.shutdown.clone());
        Ok(Connection::new(
            stream, peer, lifetime, silence, shutdown, slots,
        ))
    }

    /// Waits for a slot of the address first, and then for a global one. An address that fills its own slots
    /// delays others only by these.
    async fn handshake(
        &self,
        stream: Stream,
        address: &AddressBudget,
    ) -> Result<TlsStream<MeteredStream>, ConnectionRefusal> {
        // A longer wait would leave no time for the handshake and would waste a slot.
        let wait = address
            .next_handshake(BootTime::now(), self.limits.handshake_timeout / 2)
            .ok_or(ConnectionRefusal::HandshakeRate)?;
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        // Neither semaphore is ever closed.
        let _address_slot = address.handshake_slots.acquire().await;
        let _total_slot = self.handshakes.acquire().await;
        let _counted = self.metrics.start_handshake();
        let acceptor = TlsAcceptor::from(self.tls.load_full());
        let stream = MeteredStream::anonymous(stream, self.limits.anonymous_bytes);
        acceptor
            .accept(stream)
            .await
            .map_err(ConnectionRefusal::Handshake)
    }

    fn peer(&self, address: SocketAddr, certificates: Option<&[CertificateDer<'_>]>) -> Peer {
        let certificate = match certificates.and_then(<[_]>::first) {
            None => Err("no client certificate".to_owned()),
            Some(der) => read_agent_certificate(&self.trust_domain, der).map_err(|error| {
                format!("the client certificate cannot be used: {}", chain(&error))
            }),
        };
        Peer {
            address,
            certificate,
            request_received: RequestReceived::default(),
        }
    }
}

#[cfg(test)]
mod tests;
