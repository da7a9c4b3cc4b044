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
    /// Returns when a part of the response arrives that would arrive at `at` on an idle connection.
    pub(super) fn reserve_arrival(&mut self, at: Millis) -> Millis {
        self.last_arrival = self.last_arrival.max(at);
        self.last_arrival
    }

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
        let arrival = self.reserve_arrival(at);
        let delivery: Delivery = Box::new(move || {
            for line in lines {
                drop(chunks.send(Ok(line)));
            }
        });
        Some((self.process, arrival, delivery))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_overtake_neither_head_nor_earlier_chunks() {
        #[allow(clippy::disallowed_methods, reason = "the test sends two chunks")]
        let (chunks, _received) = mpsc::unbounded_channel();
        let mut open = OpenRequest {
            process: ProcessId(1),
            host: "hub-0".to_owned(),
            cluster: "home".to_owned(),
            watch: Some((WatchId(1), chunks)),
            last_arrival: 100,
            blocked: Vec::new(),
            ended: false,
            severed: false,
            lost_reply: None,
        };
        let arrival_of_chunk = |open: &mut OpenRequest, at| {
            open.blocked.push(Bytes::from_static(b"{}"));
            let (_, arrival, _) = open.take_delivery(at).unwrap();
            arrival
        };
        // The server sends the changes since the requested version before the conductor sends the head.
        assert_eq!(arrival_of_chunk(&mut open, 108), 108);
        assert_eq!(open.reserve_arrival(102), 108);
        assert_eq!(arrival_of_chunk(&mut open, 103), 108);
        assert_eq!(open.reserve_arrival(110), 110);
        assert_eq!(arrival_of_chunk(&mut open, 109), 110);
    }
}
