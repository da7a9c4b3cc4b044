//! Requests on their way to API servers, and those whose client still waits or reads.

use std::io;

use bytes::Bytes;
use http::Request;
use krypton_sim_apiserver::server::WatchId;
use tokio::sync::mpsc;

use crate::outbox::{ProcessId, ReplySender};
use crate::plan::RequestFault;
use crate::process::Delivery;
use crate::time::Millis;

/// The sender of a request.
pub(super) struct RequestSender {
    pub process: ProcessId,
    pub host: String,
    /// The number of the request among the host's requests.
    pub nth: u32,
    pub fault: Option<RequestFault>,
}

/// A request on its way.
pub(super) struct RequestInTransit {
    pub(super) id: u64,
    pub(super) from: RequestSender,
    pub(super) cluster: String,
    pub(super) request: Request<Bytes>,
    pub(super) reply: ReplySender,
}

/// A request whose client still waits or reads.
pub(super) struct OpenRequest {
    pub(super) process: ProcessId,
    pub(super) host: String,
    pub(super) cluster: String,
    pub(super) watch: Option<(WatchId, mpsc::UnboundedSender<io::Result<Bytes>>)>,
    /// When the last chunk arrives. Later chunks do not overtake it.
    pub(super) last_arrival: Millis,
    /// Chunks that wait until the link works.
    pub(super) blocked: Vec<Bytes>,
    /// Whether the server has ended the watch after these chunks.
    pub(super) ended: bool,
    /// Whether its connection loses all later chunks.
    pub(super) severed: bool,
    /// Set if the request or response was lost and the client still waits.
    pub(super) lost_reply: Option<ReplySender>,
}

impl OpenRequest {
    /// Returns the delivery of the blocked chunks, and its time.
    pub(super) fn take_delivery(&mut self, at: Millis) -> Option<(ProcessId, Millis, Delivery)> {
        if self.severed || (self.blocked.is_empty() && !self.ended) {
            return None;
        }
        let (_, chunks) = self.watch.as_ref()?;
        let (chunks, lines) = (chunks.clone(), std::mem::take(&mut self.blocked));
        if self.ended {
            self.watch = None;
        }
        self.last_arrival = self.last_arrival.max(at);
        let delivery: Delivery = Box::new(move || {
            for line in lines {
                drop(chunks.send(Ok(line)));
            }
        });
        Some((self.process, self.last_arrival, delivery))
    }
}
