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

use crate::agent_server::connection_limiter::MemberBudget;

/// Time of the last bytes from a peer.
#[derive(Debug)]
pub(crate) struct LastActivity(AtomicU64);

impl LastActivity {
    fn new() -> Self {
        let last_activity = Self(AtomicU64::default());
        last_activity.update(BootTime::now());
        last_activity
    }

    fn update(&self, now: BootTime) {
        let millis = u64::try_from(now.0.as_millis()).unwrap_or(u64::MAX);
        self.0.store(millis, Ordering::Relaxed);
    }

    /// Completes when the peer was silent for `limit`.
    pub(super) async fn silent_for(&self, limit: Duration) {
        loop {
            let last = BootTime(Duration::from_millis(self.0.load(Ordering::Relaxed)));
            let remaining = limit.saturating_sub(BootTime::now().since(last));
            if remaining.is_zero() {
                return;
            }
            tokio::time::sleep(remaining).await;
        }
    }
}

#[derive(Debug)]
enum ByteLimit {
    /// Bytes that a peer without an agent's certificate may still send.
    Anonymous(u64),
    Member(Arc<MemberBudget>),
}

/// A socket below TLS.
#[derive(Debug)]
pub(super) struct MeteredStream {
    stream: Stream,
    limit: ByteLimit,
    /// Pauses reads of a member. Its bytes stay in the kernel, which eventually stops the sender.
    pause: Option<Pin<Box<Sleep>>>,
    last_activity: Arc<LastActivity>,
}

impl MeteredStream {
    /// Wraps the socket of an unauthenticated peer.
    pub(super) fn anonymous(stream: Stream, bytes: u64) -> Self {
        Self {
            stream,
            limit: ByteLimit::Anonymous(bytes),
            pause: None,
            last_activity: Arc::new(LastActivity::new()),
        }
    }

    /// Charges further reads to a member, after the peer has shown its certificate.
    pub(super) fn set_member(&mut self, budget: Arc<MemberBudget>) {
        self.limit = ByteLimit::Member(budget);
    }

    pub(super) fn last_activity(&self) -> Arc<LastActivity> {
        Arc::clone(&self.last_activity)
    }

    fn charge(&mut self, bytes: usize) {
        let now = BootTime::now();
        self.last_activity.update(now);
        let bytes = bytes as u64;
        match &mut self.limit {
            ByteLimit::Anonymous(remaining) => *remaining = remaining.saturating_sub(bytes),
            ByteLimit::Member(budget) => {
                let delay = budget.charge(now, bytes);
                if !delay.is_zero() {
                    self.pause = Some(Box::pin(tokio::time::sleep(delay)));
                }
            }
        }
    }
}

impl AsyncRead for MeteredStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let ByteLimit::Anonymous(0) = self.limit {
            let problem = "more data than a client without an agent certificate may send";
            return Poll::Ready(Err(io::Error::other(problem)));
        }
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        let filled = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let bytes = buf.filled().len() - filled;
        if bytes > 0 {
            self.charge(bytes);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for MeteredStream {
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
