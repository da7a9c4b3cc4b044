//! A connection after its handshake: its peer and its lifetime.

use std::any::Any;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use super::anonymous_connections::{AnonymousSlot, RequestReceived};
use crate::agent_server::byte_limit::MeteredStream;
use crate::agent_server::connection_limiter::{AddressBudget, ConnectionSlot};
use crate::ca::AgentCertificate;

/// The other end of a connection.
#[derive(Clone, Debug)]
pub struct Peer {
    pub address: SocketAddr,
    /// The agent's certificate. `Err` is a human-readable reason: it is missing or does not belong to an agent.
    pub certificate: Result<AgentCertificate, String>,
    pub(super) request_received: RequestReceived,
}

impl Peer {
    pub fn new(address: SocketAddr, certificate: Result<AgentCertificate, String>) -> Self {
        Self {
            address,
            certificate,
            request_received: RequestReceived::default(),
        }
    }

    /// Records that a complete request has arrived, so the connection may stay until its response.
    pub fn mark_request_received(&self) {
        self.request_received.set();
    }
}

/// Completes when a connection without an agent's certificate must end: after `total`, without a request after
/// `first_request`, or when another connection needs its slot.
pub(super) fn anonymous_lifetime(
    slot: &AnonymousSlot,
    first_request: Duration,
    total: Duration,
) -> impl Future<Output = ()> + Send + use<> {
    let (request_received, evicted) = (slot.request_received.clone(), slot.evicted.clone());
    async move {
        let start = Instant::now();
        let expired = async {
            tokio::time::sleep_until(start + first_request.min(total)).await;
            if request_received.get() {
                tokio::time::sleep_until(start + total).await;
            }
        };
        tokio::select! {
            () = expired => {}
            () = evicted.cancelled() => {}
        }
    }
}

/// Slots of a connection, freed when it ends.
pub(super) type HeldSlots = Box<dyn Any + Send>;

/// Slot of a connection without an agent's certificate, or before the agent shows it.
pub(super) struct UnauthenticatedSlot {
    pub(super) _total: OwnedSemaphorePermit,
    pub(super) address: ConnectionSlot<IpAddr, AddressBudget>,
}

/// Fails when its lifetime ends, which for an agent is the expiry of its certificate. Also fails when the peer
/// is silent, because agents send pings.
pub struct Connection {
    stream: TlsStream<MeteredStream>,
    peer: Peer,
    /// `None` after the lifetime has ended.
    end: Option<BoxFuture<'static, ()>>,
    _slots: HeldSlots,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

impl Connection {
    pub(super) fn new(
        stream: TlsStream<MeteredStream>,
        peer: Peer,
        lifetime: BoxFuture<'static, ()>,
        silence: Duration,
        shutdown: CancellationToken,
        slots: HeldSlots,
    ) -> Self {
        let last_activity = stream.get_ref().0.last_activity();
        let end = async move {
            tokio::select! {
                () = lifetime => {}
                () = last_activity.silent_for(silence) => {}
                () = shutdown.cancelled() => {}
            }
        };
        Self {
            stream,
            peer,
            end: Some(Box::pin(end)),
            _slots: slots,
        }
    }

    fn check_end(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let has_ended = match &mut self.end {
            Some(end) => end.as_mut().poll(cx).is_ready(),
            None => true,
        };
        if has_ended {
            self.end = None;
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_end(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_end(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_end(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_end(cx)?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_end(cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
