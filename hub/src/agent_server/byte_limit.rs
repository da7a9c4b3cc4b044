//! Limits the bytes read from a peer: a total for an unauthenticated peer, a rate for a member.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::net::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::agent_server::connection_limiter::MemberShare;

/// Time of the last bytes from a peer.
#[derive(Debug)]
pub(crate) struct Heard(AtomicU64);

impl Heard {
    fn new() -> Self {
        let heard = Self(AtomicU64::default());
        heard.now(BootTime::now());
        heard
    }

    fn now(&self, now: BootTime) {
        let millis = u64::try_from(now.0.as_millis()).unwrap_or(u64::MAX);
        self.0.store(millis, Ordering::Relaxed);
    }

    /// Completes when the peer was silent for `limit`.
    pub(super) async fn silent_for(&self, limit: Duration) {
        loop {
            let heard = BootTime(Duration::from_millis(self.0.load(Ordering::Relaxed)));
            let left = limit.saturating_sub(BootTime::now().since(heard));
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }
}

#[derive(Debug)]
enum Allowance {
    /// Bytes that the peer may still send.
    Stranger(u64),
    Member(Arc<MemberShare>),
}

/// A socket below TLS.
#[derive(Debug)]
pub(super) struct Metered {
    stream: Stream,
    allowance: Allowance,
    /// Pauses reads of a member. Its bytes stay in the kernel, which eventually stops the sender.
    pause: Option<Pin<Box<Sleep>>>,
    heard: Arc<Heard>,
}

impl Metered {
    /// Wraps the socket of an unauthenticated peer.
    pub(super) fn of_stranger(stream: Stream, bytes: u64) -> Self {
        Self {
            stream,
            allowance: Allowance::Stranger(bytes),
            pause: None,
            heard: Arc::new(Heard::new()),
        }
    }

    /// Charges further reads to a member, after the peer has shown its certificate.
    pub(super) fn is_of_member(&mut self, share: Arc<MemberShare>) {
        self.allowance = Allowance::Member(share);
    }

    pub(super) fn heard(&self) -> Arc<Heard> {
        Arc::clone(&self.heard)
    }

    fn has_read(&mut self, bytes: usize) {
        let now = BootTime::now();
        self.heard.now(now);
        let bytes = bytes as u64;
        match &mut self.allowance {
            Allowance::Stranger(left) => *left = left.saturating_sub(bytes),
            Allowance::Member(share) => {
                let wait = share.has_read(now, bytes);
                if !wait.is_zero() {
                    self.pause = Some(Box::pin(tokio::time::sleep(wait)));
                }
            }
        }
    }
}

impl AsyncRead for Metered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Allowance::Stranger(0) = self.allowance {
            let problem = "more data than a client without an agent certificate may send";
            return Poll::Ready(Err(io::Error::other(problem)));
        }
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let bytes = buf.filled().len() - before;
        if bytes > 0 {
            self.has_read(bytes);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Metered {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
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
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
