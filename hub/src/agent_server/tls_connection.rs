//! A connection after its handshake: its peer and its lifetime.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use super::strangers::{Asked, StrangerPlace};
use crate::agent_server::byte_limit::Metered;
use crate::agent_server::connection_limiter::{AddressShare, MemberShare, Place};
use crate::ca::AgentCertificate;

/// The other end of a connection.
#[derive(Clone, Debug)]
pub struct Peer {
    pub address: SocketAddr,
    /// The agent's certificate. `Err` is a human-readable reason: it is missing or does not belong to an agent.
    pub certificate: Result<AgentCertificate, String>,
    pub(super) asked: Asked,
}

impl Peer {
    pub fn new(address: SocketAddr, certificate: Result<AgentCertificate, String>) -> Self {
        Self {
            address,
            certificate,
            asked: Asked::default(),
        }
    }

    /// Records that a complete request has arrived, so the connection may stay until its response.
    pub fn has_asked(&self) {
        self.asked.set();
    }
}

/// Lifetime of a connection.
#[derive(Debug)]
pub(super) struct Life {
    whole: Duration,
    /// Time limit for the first request.
    request: Option<(Duration, Asked)>,
    /// Cancelled when another connection needs the slot.
    cut: CancellationToken,
}

impl Life {
    pub(super) fn of_agent(whole: Duration) -> Self {
        Self {
            whole,
            request: None,
            cut: CancellationToken::new(),
        }
    }

    pub(super) fn of_stranger(place: &StrangerPlace, request: Duration, whole: Duration) -> Self {
        Self {
            whole,
            request: Some((request.min(whole), place.asked.clone())),
            cut: place.cut.clone(),
        }
    }

    /// Completes when the lifetime ends.
    async fn over(self) {
        let begun = Instant::now();
        let timed = async {
            if let Some((limit, asked)) = self.request {
                tokio::time::sleep_until(begun + limit).await;
                if !asked.get() {
                    return;
                }
            }
            tokio::time::sleep_until(begun + self.whole).await;
        };
        tokio::select! {
            () = timed => {}
            () = self.cut.cancelled() => {}
        }
    }
}

/// Slots of a connection, freed when it ends.
#[derive(Debug)]
pub(super) struct Places {
    _connection: OwnedSemaphorePermit,
    _kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Member {
        _place: Place<String, MemberShare>,
    },
    Stranger {
        _newcomer: Newcomer,
        _place: StrangerPlace,
    },
}

/// A connection without an agent's certificate, or before it is shown.
#[derive(Debug)]
pub(super) struct Newcomer {
    pub(super) _of_all: OwnedSemaphorePermit,
    pub(super) of_address: Place<IpAddr, AddressShare>,
}

impl Places {
    pub(super) fn of_member(
        connection: OwnedSemaphorePermit,
        place: Place<String, MemberShare>,
    ) -> Self {
        Self {
            _connection: connection,
            _kind: Kind::Member { _place: place },
        }
    }

    pub(super) fn of_stranger(
        connection: OwnedSemaphorePermit,
        newcomer: Newcomer,
        place: StrangerPlace,
    ) -> Self {
        Self {
            _connection: connection,
            _kind: Kind::Stranger {
                _newcomer: newcomer,
                _place: place,
            },
        }
    }
}

/// Fails when its lifetime ends, which for an agent is the expiry of its certificate. Also fails when the peer
/// is silent, because agents send pings.
pub struct Connection {
    stream: TlsStream<Metered>,
    peer: Peer,
    /// `None` after the lifetime has ended.
    end: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    _places: Places,
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
        stream: TlsStream<Metered>,
        peer: Peer,
        life: Life,
        silence: Duration,
        cut: CancellationToken,
        places: Places,
    ) -> Self {
        let heard = stream.get_ref().0.heard();
        let end = async move {
            tokio::select! {
                () = life.over() => {}
                () = heard.silent_for(silence) => {}
                () = cut.cancelled() => {}
            }
        };
        Self {
            stream,
            peer,
            end: Some(Box::pin(end)),
            _places: places,
        }
    }

    fn check_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let over = match &mut self.end {
            Some(end) => end.as_mut().poll(cx).is_ready(),
            None => true,
        };
        if over {
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
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
