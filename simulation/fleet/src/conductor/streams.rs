//! Connections between hub and agents.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::Simulation;
use crate::network::Verdict;
use crate::outbox::ProcessId;
use crate::process::Delivery;
use crate::streams::{End, SimStream};

/// Something that waits until its link is well.
pub(super) struct Held {
    from: String,
    to: Arc<End>,
    bytes: Option<Bytes>,
    reset: bool,
}

impl Simulation {
    pub(super) fn dial(
        &mut self,
        (from, host): (ProcessId, String),
        address: SocketAddr,
        reply: oneshot::Sender<io::Result<SimStream>>,
    ) {
        let target = match self.services.get(&address) {
            Some(find) => find(self),
            None => Some(address),
        };
        let listener = target.and_then(|target| self.listeners.get(&target));
        let Some((listening, accepted)) = listener.map(|(id, accepted)| (*id, accepted.clone()))
        else {
            let delivery =
                Box::new(move || drop(reply.send(Err(io::ErrorKind::ConnectionRefused.into()))));
            return self.deliver(from, self.now + 2, delivery);
        };
        let Some(there) = self
            .processes
            .get(&listening)
            .map(|process| process.host.clone())
        else {
            return;
        };
        let ways = [
            self.links.verdict(&host, &there),
            self.links.verdict(&there, &host),
        ];
        let [Verdict::Arrives(to), Verdict::Arrives(back)] = ways else {
            let lost = ways.contains(&Verdict::Lost);
            let (kind, after) = match lost {
                // The dialer has its own, shorter limit.
                true => (io::ErrorKind::TimedOut, 120_000),
                false => (io::ErrorKind::ConnectionRefused, 2),
            };
            let delivery = Box::new(move || drop(reply.send(Err(kind.into()))));
            return self.deliver(from, self.now + after, delivery);
        };
        let (near, far) = (End::new(from), End::new(listening));
        self.streams.push((Arc::clone(&near), Arc::clone(&far)));
        let ip = self.hosts.get(&host).map(|host| host.ip);
        let peer = SocketAddr::from((ip.unwrap_or([10, 0, 0, 0]), 40_000));
        let dialed = SimStream::new(Arc::clone(&near), Arc::clone(&far), self.outbox.clone());
        let arrived = SimStream::new(far, near, self.outbox.clone());
        self.deliver(
            listening,
            self.now + to,
            Box::new(move || drop(accepted.send((arrived, peer)))),
        );
        self.deliver(
            from,
            self.now + to + back,
            Box::new(move || drop(reply.send(Ok(dialed)))),
        );
    }

    /// Sends bytes, or the end of a stream.
    pub(super) fn send(&mut self, from: &str, to: Arc<End>, bytes: Option<Bytes>, reset: bool) {
        let held = Held {
            from: from.to_owned(),
            to,
            bytes,
            reset,
        };
        if let Some(held) = self.try_send(held) {
            self.held.push(held);
        }
    }

    /// Returns what cannot pass.
    fn try_send(&mut self, held: Held) -> Option<Held> {
        let reader = self.processes.get(&held.to.process)?;
        if held.to.is_severed() {
            return None;
        }
        let waits = self
            .held
            .iter()
            .any(|earlier| Arc::ptr_eq(&earlier.to, &held.to));
        if waits || !self.links.passes(&held.from, &reader.host) {
            return Some(held);
        }
        let delay = match self.links.verdict(&held.from, &reader.host) {
            Verdict::Arrives(delay) => delay,
            // TCP sends a lost segment again.
            Verdict::Lost | Verdict::Refused => 250,
        };
        let at = held.to.arrival(self.now + delay);
        let Held {
            to, bytes, reset, ..
        } = held;
        let process = to.process;
        let delivery: Delivery = Box::new(move || match bytes {
            Some(bytes) => to.deliver(bytes),
            None => to.finish(reset),
        });
        self.deliver(process, at, delivery);
        None
    }

    /// Open connections lose what `from` sends to `to` from now, and neither end gets to know it. New ones work.
    pub fn half_open(&mut self, from: &str, to: &str) {
        let host = |end: &End| Some(self.processes.get(&end.process)?.host.as_str());
        for (one, other) in &self.streams {
            for (writer, reader) in [(one, other), (other, one)] {
                if host(writer) == Some(from) && host(reader) == Some(to) {
                    reader.sever();
                }
            }
        }
        self.held.retain(|held| !held.to.is_severed());
        self.half_open_watches(from, to);
    }

    /// Sends what waited for its link.
    pub(super) fn release_held(&mut self) {
        for held in std::mem::take(&mut self.held) {
            if let Some(held) = self.try_send(held) {
                self.held.push(held);
            }
        }
        self.release_watches();
    }

    /// The streams of a killed process break, as its kernel tells the peers.
    pub(super) fn break_streams_of(&mut self, process: ProcessId, host: &str) {
        let streams = std::mem::take(&mut self.streams);
        let (broken, rest) = streams.into_iter().partition::<Vec<_>, _>(|(one, other)| {
            one.process == process || other.process == process
        });
        self.streams = rest;
        for (one, other) in broken {
            let peer = if one.process == process { other } else { one };
            self.send(host, peer, None, true);
        }
        self.listeners
            .retain(|_, (listening, _)| *listening != process);
    }
}
