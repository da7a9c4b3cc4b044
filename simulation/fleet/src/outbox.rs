//! Messages from simulated processes to the conductor.

pub mod stream;

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use self::stream::{SimStream, StreamEnd};
use crate::helm::run_state::HelmRunState;

/// Identity of one process. A restarted process is a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub u64);

/// Body of a response.
#[derive(Debug)]
pub enum Body {
    Complete(Bytes),
    /// The chunks of a watch. A closed channel ends the body; an error breaks it.
    Chunks(mpsc::UnboundedReceiver<io::Result<Bytes>>),
}

pub type ReplySender = oneshot::Sender<io::Result<Response<Body>>>;

/// A message of a process to the conductor.
#[derive(Debug)]
pub enum Message {
    /// A request to the API server at this authority.
    Request {
        id: u64,
        authority: String,
        request: Box<Request<Bytes>>,
        reply: ReplySender,
    },
    /// The process no longer waits for the response, or no longer reads its body.
    RequestDropped {
        id: u64,
    },
    Listen {
        address: SocketAddr,
        connections: mpsc::UnboundedSender<(SimStream, SocketAddr)>,
    },
    Unlisten {
        address: SocketAddr,
    },
    Dial {
        address: SocketAddr,
        reply: oneshot::Sender<io::Result<SimStream>>,
    },
    /// Bytes for the other end of a stream.
    Bytes {
        to: Arc<StreamEnd>,
        bytes: Bytes,
    },
    /// No more bytes for the other end. `reset` if the stream was dropped.
    Finish {
        to: Arc<StreamEnd>,
        reset: bool,
    },
    StartHelm {
        arguments: Vec<OsString>,
        environment: Vec<(OsString, OsString)>,
        output: Option<PathBuf>,
        time_limit: Option<Duration>,
        state: Arc<HelmRunState>,
    },
    TerminateHelm {
        state: Arc<HelmRunState>,
    },
    KillHelm {
        state: Arc<HelmRunState>,
    },
    /// A new time limit, as time since boot.
    SetHelmTimeLimit {
        state: Arc<HelmRunState>,
        time_limit: Option<Duration>,
    },
}

/// The messages of all processes, in order. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct Outbox(Arc<Mutex<OutboxState>>);

#[derive(Debug, Default)]
struct OutboxState {
    messages: Vec<(ProcessId, Message)>,
    last_id: u64,
    /// A process that was killed. Its destructors run, but a killed process sends nothing.
    muted: Option<ProcessId>,
}

impl Outbox {
    pub fn push(&self, from: ProcessId, message: Message) {
        let mut state = self.0.lock();
        if state.muted != Some(from) {
            state.messages.push((from, message));
        }
    }

    /// Returns a number that no earlier call has returned.
    pub fn next_id(&self) -> u64 {
        let mut state = self.0.lock();
        state.last_id += 1;
        state.last_id
    }

    pub fn take(&self) -> Vec<(ProcessId, Message)> {
        std::mem::take(&mut self.0.lock().messages)
    }

    pub(crate) fn mute(&self, process: Option<ProcessId>) {
        self.0.lock().muted = process;
    }
}
