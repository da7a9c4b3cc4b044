//! A listener that holds few connections, and none that has gone quiet.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};

/// A scraper and a kubelet need one or two each.
const MAX_CONNECTIONS: usize = 64;
/// Longer than the usual minute between two scrapes would keep more; they simply connect again.
const QUIET_LIMIT: Duration = Duration::from_secs(30);

/// Waits with accepting while `MAX_CONNECTIONS` are open; the kernel's queue holds the next ones.
#[derive(Debug)]
pub(super) struct BoundedListener {
    inner: TcpListener,
    permits: Arc<Semaphore>,
    quiet_limit: Duration,
}

impl BoundedListener {
    pub(super) fn new(inner: TcpListener) -> Self {
        Self::with_limits(inner, MAX_CONNECTIONS, QUIET_LIMIT)
    }

    pub(super) fn with_limits(
        inner: TcpListener,
        connections: usize,
        quiet_limit: Duration,
    ) -> Self {
        Self {
            inner,
            permits: Arc::new(Semaphore::new(connections)),
            quiet_limit,
        }
    }
}

impl Listener for BoundedListener {
    type Io = BoundedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (BoundedStream, SocketAddr) {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.expect("the semaphore is never closed");
        let (stream, address) = Listener::accept(&mut self.inner).await;
        let quiet = Box::pin(tokio::time::sleep(self.quiet_limit));
        (
            BoundedStream {
                stream,
                quiet,
                quiet_limit: self.quiet_limit,
                _permit: permit,
            },
            address,
        )
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// A connection that fails when nothing could be read or written for a while.
#[derive(Debug)]
pub(super) struct BoundedStream {
    stream: TcpStream,
    quiet: Pin<Box<Sleep>>,
    quiet_limit: Duration,
    _permit: OwnedSemaphorePermit,
}

impl BoundedStream {
    /// Passes progress on and puts the deadline off; without progress, asks the deadline.
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
        let progress = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.judge(progress, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
