//! Byte streams between hub and agents.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::{Buf as _, Bytes};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Message, Outbox, ProcessId};
use crate::time::Millis;

/// Bytes in flight after which a writer waits, as with the buffers of a TCP connection.
const IN_FLIGHT: usize = 256 << 10;

/// One end of a stream, with the bytes that arrive for its process.
#[derive(Debug)]
pub struct StreamEnd {
    /// The process that reads here.
    pub process: ProcessId,
    incoming: Mutex<Incoming>,
}

#[derive(Debug, Default)]
struct Incoming {
    /// When the last bytes arrive. Later ones do not overtake them.
    last_arrival: Millis,
    bytes: VecDeque<Bytes>,
    /// Sent by the other end and not yet read here.
    in_flight: usize,
    finished: bool,
    reset: bool,
    /// All later bytes are lost, and neither end notices.
    severed: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl StreamEnd {
    pub fn new(process: ProcessId) -> Arc<Self> {
        Arc::new(Self {
            process,
            incoming: Mutex::default(),
        })
    }

    /// Returns when bytes arrive that would arrive at `at` on an empty stream.
    pub(crate) fn reserve_arrival(&self, at: Millis) -> Millis {
        let mut incoming = self.incoming.lock();
        incoming.last_arrival = incoming.last_arrival.max(at);
        incoming.last_arrival
    }

    /// Bytes of the other end arrive.
    pub fn deliver(&self, bytes: Bytes) {
        let mut incoming = self.incoming.lock();
        incoming.bytes.push_back(bytes);
        wake(&mut incoming.reader);
    }

    /// The other end sends no more.
    pub fn finish(&self, reset: bool) {
        let mut incoming = self.incoming.lock();
        incoming.finished = true;
        incoming.reset |= reset;
        wake(&mut incoming.reader);
        wake(&mut incoming.writer);
    }

    /// Loses all later bytes of the other end.
    pub(crate) fn sever(&self) {
        self.incoming.lock().severed = true;
    }

    pub(crate) fn is_severed(&self) -> bool {
        self.incoming.lock().severed
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

/// A stream, as one of its processes uses it.
pub struct SimStream {
    local: Arc<StreamEnd>,
    remote: Arc<StreamEnd>,
    outbox: Outbox,
    finished: bool,
}

impl fmt::Debug for SimStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimStream({:?})", self.local.process)
    }
}

impl SimStream {
    pub fn new(local: Arc<StreamEnd>, remote: Arc<StreamEnd>, outbox: Outbox) -> Self {
        Self {
            local,
            remote,
            outbox,
            finished: false,
        }
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        let message = Message::Finish {
            to: Arc::clone(&self.remote),
            reset: true,
        };
        self.outbox.push(self.local.process, message);
    }
}

impl AsyncRead for SimStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut incoming = self.local.incoming.lock();
        let Some(mut chunk) = incoming.bytes.pop_front() else {
            if incoming.reset {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            if incoming.finished {
                return Poll::Ready(Ok(()));
            }
            incoming.reader = Some(context.waker().clone());
            return Poll::Pending;
        };
        let count = chunk.len().min(buffer.remaining());
        buffer.put_slice(&chunk.split_to(count));
        if chunk.has_remaining() {
            incoming.bytes.push_front(chunk);
        }
        incoming.in_flight = incoming.in_flight.saturating_sub(count);
        wake(&mut incoming.writer);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for SimStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.local.incoming.lock().reset {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let mut remote = self.remote.incoming.lock();
        if remote.in_flight >= IN_FLIGHT {
            remote.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        remote.in_flight += bytes.len();
        drop(remote);
        let message = Message::Bytes {
            to: Arc::clone(&self.remote),
            bytes: Bytes::copy_from_slice(bytes),
        };
        self.outbox.push(self.local.process, message);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !std::mem::replace(&mut self.finished, true) {
            let message = Message::Finish {
                to: Arc::clone(&self.remote),
                reset: false,
            };
            self.outbox.push(self.local.process, message);
        }
        Poll::Ready(Ok(()))
    }
}
