//! Limits the connections of a server in number and time. If there are too many, the server closes the oldest
//! connection of the client address with the most connections.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Limits of connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Maximum number of open connections. A scraper and a kubelet need one or two each.
    pub(super) connections: usize,
    /// Maximum time without a read or a write.
    pub(super) quiet: Duration,
    /// Maximum lifetime of a connection.
    pub(super) life: Duration,
}

impl Bounds {
    /// Limits for probes: by default, a kubelet waits one second and opens a connection for each probe.
    pub(super) const PROBES: Self = Self {
        connections: 64,
        quiet: Duration::from_secs(3),
        life: Duration::from_secs(5),
    };
    /// Limits for scrapers and users. A client that pauses for a minute between two requests reconnects.
    pub(super) const READERS: Self = Self {
        connections: 64,
        quiet: Duration::from_secs(30),
        life: Duration::from_secs(3600),
    };
}

/// Open connections from oldest to newest: client address and cancellation token.
type Connections = BTreeMap<u64, (IpAddr, CancellationToken)>;
type Open = Arc<Mutex<Connections>>;

fn lock(open: &Open) -> MutexGuard<'_, Connections> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the oldest connection of the address with the most connections.
fn one_too_many(open: &Connections) -> Option<u64> {
    let mut of_address: BTreeMap<IpAddr, (usize, u64)> = BTreeMap::new();
    for (number, (address, _)) in open {
        let (count, _) = of_address.entry(*address).or_insert((0, *number));
        *count += 1;
    }
    let most = of_address
        .into_values()
        .max_by_key(|(count, oldest)| (*count, std::cmp::Reverse(*oldest)));
    most.map(|(_, oldest)| oldest)
}

#[derive(Debug)]
pub(super) struct BoundedListener {
    inner: TcpListener,
    bounds: Bounds,
    open: Open,
    accepted: u64,
}

impl BoundedListener {
    pub(super) fn new(inner: TcpListener, bounds: Bounds) -> Self {
        Self {
            inner,
            bounds,
            open: Open::default(),
            accepted: 0,
        }
    }

    fn admit(&mut self, address: IpAddr) -> (Place, CancellationToken) {
        let mut open = lock(&self.open);
        while open.len() >= self.bounds.connections.max(1)
            && let Some(number) = one_too_many(&open)
            && let Some((_, oldest)) = open.remove(&number)
        {
            oldest.cancel();
        }
        self.accepted += 1;
        let cut = CancellationToken::new();
        open.insert(self.accepted, (address.to_canonical(), cut.clone()));
        let place = Place {
            number: self.accepted,
            open: Arc::clone(&self.open),
        };
        (place, cut)
    }
}

impl Listener for BoundedListener {
    type Io = BoundedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (BoundedStream, SocketAddr) {
        // Lets the accepted connections send their requests first.
        tokio::task::yield_now().await;
        let (stream, address) = Listener::accept(&mut self.inner).await;
        let (place, cut) = self.admit(address.ip());
        let stream = BoundedStream {
            stream,
            quiet: Box::pin(tokio::time::sleep(self.bounds.quiet)),
            quiet_limit: self.bounds.quiet,
            end: Box::pin(tokio::time::sleep(self.bounds.life)),
            cut: Box::pin(cut.cancelled_owned()),
            _place: place,
        };
        (stream, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// Entry of an open connection. Dropping it removes the entry.
#[derive(Debug)]
struct Place {
    number: u64,
    open: Open,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.open).remove(&self.number);
    }
}

/// A connection that fails when it is idle or too old, or when a new connection needs its place.
pub(super) struct BoundedStream {
    stream: TcpStream,
    quiet: Pin<Box<Sleep>>,
    quiet_limit: Duration,
    end: Pin<Box<Sleep>>,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _place: Place,
}

impl BoundedStream {
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        self.end.as_mut().poll(cx).is_ready() || self.cut.as_mut().poll(cx).is_ready()
    }

    /// Progress resets the idle deadline. Without progress, checks the deadline.
    fn judge<T>(
        &mut self,
        progress: Poll<io::Result<T>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        match progress {
            Poll::Ready(result) => {
                let deadline = Instant::now() + self.quiet_limit;
                self.quiet.as_mut().reset(deadline);
                Poll::Ready(result)
            }
            Poll::Pending => self
                .quiet
                .as_mut()
                .poll(cx)
                .map(|()| Err(io::ErrorKind::TimedOut.into())),
        }
    }
}

impl AsyncRead for BoundedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_over(cx) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let progress = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.judge(progress, cx)
    }
}

impl AsyncWrite for BoundedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_over(cx) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let progress = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.judge(progress, cx)
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
        if self.is_over(cx) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let progress = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.judge(progress, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
