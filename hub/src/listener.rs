//! The hub's gRPC port: mutual TLS, who is behind each connection, and how many there may be.
//!
//! tonic's own TLS can neither be replaced while it runs nor bound in time, so connections come to it
//! with the handshake done.

mod connection;

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures::StreamExt as _;
use jiff::Timestamp;
use krypton_agent::clock;
use krypton_common::error_chain::chain;
use krypton_common::tls;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::authority::{Authority, AuthorityError, HUB_CERTIFICATE_LIFE, read_agent_certificate};
use crate::expiry;
use crate::metrics::SessionMetrics;

use connection::Places;
pub use connection::{Connection, Peer};

/// A session, and the few calls that an agent makes beside it.
const STREAMS: u32 = 16;
const HEADER_LIST: u32 = 16 * 1024;
/// What a peer may send before it is read: a few messages' worth, of all its streams and of one.
const CONNECTION_WINDOW: u32 = 512 * 1024;
const STREAM_WINDOW: u32 = 256 * 1024;
/// Connections between handshake and tonic, which takes them at once.
const WAITING: usize = 16;
/// After an error that the next accept would meet again, as EMFILE.
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

/// TLS with a new certificate of the hub.
pub fn server_config(authority: &Authority, now: Timestamp) -> Result<ServerConfig, ListenerError> {
    let credential = authority
        .hub_credential(now)
        .map_err(ListenerError::Certificate)?;
    tls::server_config(&authority.roots(), credential).map_err(ListenerError::Tls)
}

/// Replaces the hub's certificate, made just before, at two thirds of its life until `stop`.
/// Connections that are there keep the old one.
pub async fn keep_credential(
    authority: Arc<Authority>,
    tls: Arc<ArcSwap<ServerConfig>>,
    metrics: Arc<SessionMetrics>,
    stop: CancellationToken,
) {
    let mut made = clock::wall();
    show_ends(&authority, made, &metrics);
    // By the wall clock, which is what agents compare the dates with, and often, since it may be set.
    while stop
        .run_until_cancelled(tokio::time::sleep(CREDENTIAL_CHECK))
        .await
        .is_some()
    {
        let now = clock::wall();
        if !is_due(made, now) {
            continue;
        }
        match server_config(&authority, now) {
            Ok(config) => {
                tls.store(Arc::new(config));
                made = now;
                show_ends(&authority, made, &metrics);
                tracing::info!("renewed the hub's certificate");
            }
            Err(error) => {
                tracing::warn!(error = %chain(&error), "renewing the hub's certificate failed; it is tried again in a minute");
            }
        }
    }
}

/// When the CA ends and the certificate that was made then.
fn show_ends(authority: &Authority, made: Timestamp, metrics: &SessionMetrics) {
    let roots = authority.roots();
    if let Some(end) = roots.first().and_then(|signing| expiry::end_of(signing)) {
        metrics.certificate("ca", end);
        let own = made.saturating_add(HUB_CERTIFICATE_LIFE);
        metrics.certificate("hub", own.unwrap_or(end).min(end));
    }
}

/// Also when the clock was set back to where the certificate is hardly valid yet.
fn is_due(made: Timestamp, now: Timestamp) -> bool {
    let two_thirds = i64::try_from(HUB_CERTIFICATE_LIFE.as_secs() / 3 * 2).unwrap_or(i64::MAX);
    let age = now.as_second().saturating_sub(made.as_second());
    age >= two_thirds || age < -12 * 60 * 60
}

/// Serves `routes` on `listener` until `stop`, and ends all connections a little later. Requests carry
/// a [`Peer`] in their extensions.
pub async fn serve(
    listener: TcpListener,
    tls: Arc<ArcSwap<ServerConfig>>,
    trust_domain: String,
    routes: Routes,
    stop: CancellationToken,
) -> Result<(), ListenerError> {
    serve_within(listener, tls, trust_domain, routes, Limits::default(), stop).await
}

/// How many of what there may be at a time, and for how long.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// A handshake costs 1 ms of a core and some 50 KiB.
    handshakes: usize,
    handshake: Duration,
    /// Ten times the largest fleet, at some 50 KiB each.
    connections: usize,
    /// Connections without an agent's certificate: those that enrol.
    strangers: usize,
    /// An enrolment takes less.
    stranger: Duration,
    /// Of one member: a few replicas, each with what is left of its last connections.
    of_a_member: usize,
    /// How long calls may go on after the stop. Sessions end by themselves before.
    drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshakes: 128,
            handshake: Duration::from_secs(10),
            connections: 10_000,
            strangers: 64,
            stranger: Duration::from_secs(30),
            of_a_member: 64,
            drain: Duration::from_secs(5),
        }
    }
}

async fn serve_within(
    listener: TcpListener,
    tls: Arc<ArcSwap<ServerConfig>>,
    trust_domain: String,
    routes: Routes,
    limits: Limits,
    stop: CancellationToken,
) -> Result<(), ListenerError> {
    let (finished, waiting) = mpsc::channel(WAITING);
    let cut = CancellationToken::new();
    // Whatever ends this future ends the connections.
    let _cut_at_the_end = cut.clone().drop_guard();
    let door = Arc::new(Door::new(tls, trust_domain, limits, cut));
    // No pings of ours: agents ping, and whoever does not send a heartbeat is cut by its session.
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
        accept(&listener, &door, finished, &stop).await;
        tokio::time::sleep(limits.drain).await;
    };
    tokio::select! {
        served = serving => served.map_err(ListenerError::Serve),
        () = until_drained => Ok(()),
    }
}

/// Accepts until `stop`, whatever happens.
async fn accept(
    listener: &TcpListener,
    door: &Arc<Door>,
    finished: mpsc::Sender<Connection>,
    stop: &CancellationToken,
) {
    let mut failing = false;
    loop {
        // When all places are taken, those who come wait in the kernel's queue, which is bounded.
        let next = async {
            let place = Arc::clone(&door.connections).acquire_owned().await;
            let turn = Arc::clone(&door.handshakes).acquire_owned().await;
            (place, turn, listener.accept().await)
        };
        let Some((Ok(place), Ok(turn), accepted)) = stop.run_until_cancelled(next).await else {
            return;
        };
        match accepted {
            Ok((stream, address)) => {
                failing = false;
                let (door, finished) = (Arc::clone(door), finished.clone());
                tokio::spawn(async move {
                    let came_in = door.let_in(stream, address, place).await;
                    match came_in {
                        // Fails when tonic has stopped.
                        Ok(connection) => drop(finished.send(connection).await),
                        Err(refused) => {
                            tracing::debug!(%address, reason = %chain(&refused), "a connection was refused");
                        }
                    }
                    drop(turn);
                });
            }
            Err(error) if is_of_one_connection(error.kind()) => {}
            Err(error) => {
                if !failing {
                    tracing::warn!(%error, "accepting a connection failed; it is tried again every second");
                }
                failing = true;
                stop.run_until_cancelled(tokio::time::sleep(ACCEPT_PAUSE))
                    .await;
            }
        }
    }
}

/// An error that went away with the connection it was about.
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
    #[error("{0} connections without an agent's certificate are there already")]
    Strangers(usize),
    #[error("cluster {cluster} has {limit} connections already")]
    Member { cluster: String, limit: usize },
}

/// Whom it lets in.
#[derive(Debug)]
struct Door {
    tls: Arc<ArcSwap<ServerConfig>>,
    trust_domain: String,
    limits: Limits,
    connections: Arc<Semaphore>,
    handshakes: Arc<Semaphore>,
    strangers: Arc<Semaphore>,
    members: Arc<Members>,
    /// Ends every connection.
    cut: CancellationToken,
}

impl Door {
    fn new(
        tls: Arc<ArcSwap<ServerConfig>>,
        trust_domain: String,
        limits: Limits,
        cut: CancellationToken,
    ) -> Self {
        Self {
            tls,
            trust_domain,
            limits,
            connections: Arc::new(Semaphore::new(limits.connections)),
            handshakes: Arc::new(Semaphore::new(limits.handshakes)),
            strangers: Arc::new(Semaphore::new(limits.strangers)),
            members: Arc::default(),
            cut,
        }
    }

    async fn let_in(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        place: OwnedSemaphorePermit,
    ) -> Result<Connection, Refused> {
        // Messages are small and answered at once. A peer that has gone says so at the next read.
        drop(stream.set_nodelay(true));
        let acceptor = TlsAcceptor::from(self.tls.load_full());
        let limit = self.limits.handshake;
        let stream = tokio::time::timeout(limit, acceptor.accept(stream))
            .await
            .map_err(|_| Refused::Slow(limit))?
            .map_err(Refused::Handshake)?;
        let peer = self.peer(address, stream.get_ref().1.peer_certificates());
        let (life, place) = match &peer.certificate {
            Ok(certificate) => {
                let life = certificate.not_after.duration_since(clock::wall());
                let limit = self.limits.of_a_member;
                let cluster = &certificate.cluster;
                let of_member = Members::enter(&self.members, cluster, limit);
                let of_member = of_member.ok_or_else(|| Refused::Member {
                    cluster: cluster.clone(),
                    limit,
                })?;
                // A certificate that has just expired has no time left.
                let life = Duration::try_from(life).unwrap_or_default();
                (life, Places::of_member(place, of_member))
            }
            Err(_) => {
                let stranger = Arc::clone(&self.strangers).try_acquire_owned();
                let stranger = stranger.map_err(|_| Refused::Strangers(self.limits.strangers))?;
                (self.limits.stranger, Places::of_stranger(place, stranger))
            }
        };
        Ok(Connection::new(stream, peer, life, self.cut.clone(), place))
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
        }
    }
}

/// Connections per member.
#[derive(Debug, Default)]
struct Members(Mutex<HashMap<String, usize>>);

impl Members {
    fn enter(members: &Arc<Self>, cluster: &str, limit: usize) -> Option<MemberPlace> {
        let mut counts = members.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(cluster.to_owned()).or_default();
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(MemberPlace {
            members: Arc::clone(members),
            cluster: cluster.to_owned(),
        })
    }
}

/// One connection of a member.
#[derive(Debug)]
struct MemberPlace {
    members: Arc<Members>,
    cluster: String,
}

impl Drop for MemberPlace {
    fn drop(&mut self) {
        let members = &self.members.0;
        let mut counts = members.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.cluster) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.cluster);
            }
        }
    }
}

#[cfg(test)]
mod tests;
