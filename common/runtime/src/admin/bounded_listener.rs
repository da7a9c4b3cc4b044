//! Limits the connections of a server in number and time. If there are too many, the server closes the oldest
//! connection of the client address with the most connections.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Limits of connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionLimits {
    /// Maximum number of open connections. A scraper and a kubelet need one or two each.
    pub(super) connections: usize,
    /// Maximum time without a read or a write.
    pub(super) idle: Duration,
    /// Maximum lifetime of a connection.
    pub(super) lifetime: Duration,
}

impl ConnectionLimits {
    /// Limits for probes: by default, a kubelet waits one second and opens a connection for each probe.
    pub(super) const PROBES: Self = Self {
        connections: 64,
        idle: Duration::from_secs(3),
        lifetime: Duration::from_secs(5),
    };
    /// Limits for scrapers and users. A client that pauses for a minute between two requests reconnects.
    pub(super) const READERS: Self = Self {
        connections: 64,
        idle: Duration::from_secs(30),
        lifetime: Duration::from_secs(3600),
    };
}

/// Open connections from oldest to newest: client address and cancellation token.
type Connections = BTreeMap<u64, (IpAddr, CancellationToken)>;
type OpenConnections = Arc<Mutex<Connections>>;

/// Returns the oldest connection of the address with the most connections.
fn connection_to_evict(open: &Connections) -> Option<u64> {
    let mut by_address: BTreeMap<IpAddr, (usize, u64)> = BTreeMap::new();
    for (number, (address, _)) in open {
        let (count, _) = by_address.entry(*address).or_insert((0, *number));
        *count += 1;
    }
    let fullest = by_address
        .into_values()
        .max_by_key(|(count, oldest)| (*count, std::cmp::Reverse(*oldest)));
    fullest.map(|(_, oldest)| oldest)
}

#[derive(Debug)]
pub(super) struct BoundedListener {
    inner: TcpListener,
    limits: ConnectionLimits,
    open: OpenConnections,
    accepted: u64,
}

impl BoundedListener {
    pub(super) fn new(inner: TcpListener, limits: ConnectionLimits) -> Self {
        Self {
            inner,
            limits,
            open: OpenConnections::default(),
            accepted: 0,
        }
    }

    fn admit(&mut self, address: IpAddr) -> (ConnectionEntry, CancellationToken) {
        let mut open = self.open.lock();
        while open.len() >= self.limits.connections.max(1)
            && let Some(number) = connection_to_evict(&open)
            && let Some((_, oldest)) = open.remove(&number)
        {
            oldest.cancel();
        }
        self.accepted += 1;
        let evicted = CancellationToken::new();
        open.insert(self.accepted, (address.to_canonical(), evicted.clone()));
        let entry = ConnectionEntry {
            number: self.accepted,
            open: Arc::clone(&self.open),
        };
        (entry, evicted)
    }
}

impl Listener for BoundedListener {
    type Io = BoundedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (BoundedStream, SocketAddr) {
        // Lets the accepted connections send their requests first.
        tokio::task::yield_now().await;
        let (stream, address) = Listener::accept(&mut self.inner).await;
        let (entry, evicted) = self.admit(address.ip());
        let stream = BoundedStream {
            stream,
            idle: Box::pin(tokio::time::sleep(self.limits.idle)),
            idle_limit: self.limits.idle,
            end: Box::pin(tokio::time::sleep(self.limits.lifetime)),
            evicted: Box::pin(evicted.cancelled_owned()),
            _entry: entry,
        };
        (stream, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// Entry of an open connection. Dropping it removes the entry.
#[derive(Debug)]
struct ConnectionEntry {
    number: u64,
    open: OpenConnections,
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        self.open.lock().remove(&self.number);
    }
}

/// A connection that fails when it is idle or too old, or when a new connection needs its place.
pub(super) struct BoundedStream {
    stream: TcpStream,
    idle: Pin<Box<Sleep>>,
    idle_limit: Duration,
    end: Pin<Box<Sleep>>,
    evicted: Pin<Box<WaitForCancellationFutureOwned>>,
    _entry: ConnectionEntry,
}

impl BoundedStream {
    /// Reads or writes within the limits. Progress resets the idle deadline.
    fn poll_limited<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut TcpStream>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let timed_out = || Err(io::ErrorKind::TimedOut.into());
        if self.end.as_mut().poll(cx).is_ready() || self.evicted.as_mut().poll(cx).is_ready() {
            return Poll::Ready(timed_out());
        }
        let progress = poll(Pin::new(&mut self.stream), cx);
        if progress.is_pending() {
            return self.idle.as_mut().poll(cx).map(|()| timed_out());
        }
        let deadline = Instant::now() + self.idle_limit;
        self.idle.as_mut().reset(deadline);
        progress
    }
}

impl AsyncRead for BoundedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_limited(cx, |stream, cx| stream.poll_read(cx, buf))
    }
}

impl AsyncWrite for BoundedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_limited(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_limited(cx, |stream, cx| stream.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
