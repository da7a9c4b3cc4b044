//! Connections between hub and agents.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::Simulation;
use crate::network::Transmission;
use crate::outbox::ProcessId;
use crate::outbox::stream::{SimStream, StreamEnd};
use crate::process::Delivery;

/// Bytes, or the end of a stream, that wait until their link works.
pub(super) struct BlockedSend {
    from: String,
    to: Arc<StreamEnd>,
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
        let listener_address = match self.services.get(&address) {
            Some(find_listener) => find_listener(self),
            None => Some(address),
        };
        let listener = listener_address.and_then(|address| self.listeners.get(&address));
        let Some((listener_id, connections)) =
            listener.map(|(id, connections)| (*id, connections.clone()))
        else {
            let delivery =
                Box::new(move || drop(reply.send(Err(io::ErrorKind::ConnectionRefused.into()))));
            return self.deliver(from, self.now + 2, delivery);
        };
        let Some(listener_host) = self
            .processes
            .get(&listener_id)
            .map(|process| process.host.clone())
        else {
            return;
        };
        let transmissions = [
            self.links.transmit(&host, &listener_host),
            self.links.transmit(&listener_host, &host),
        ];
        let [
            Transmission::Arrives(delay),
            Transmission::Arrives(return_delay),
        ] = transmissions
        else {
            let lost = transmissions.contains(&Transmission::Lost);
            let (kind, delay) = match lost {
                // The dialer has its own, shorter limit.
                true => (io::ErrorKind::TimedOut, 120_000),
                false => (io::ErrorKind::ConnectionRefused, 2),
            };
            let delivery = Box::new(move || drop(reply.send(Err(kind.into()))));
            return self.deliver(from, self.now + delay, delivery);
        };
        let (dialer_end, listener_end) = (StreamEnd::new(from), StreamEnd::new(listener_id));
        self.streams
            .push((Arc::clone(&dialer_end), Arc::clone(&listener_end)));
        let ip = self.hosts.get(&host).map(|host| host.ip);
        let peer = SocketAddr::from((ip.unwrap_or([10, 0, 0, 0]), 40_000));
        let dialer_stream = SimStream::new(
            Arc::clone(&dialer_end),
            Arc::clone(&listener_end),
            self.outbox.clone(),
        );
        let listener_stream = SimStream::new(listener_end, dialer_end, self.outbox.clone());
        self.deliver(
            listener_id,
            self.now + delay,
            Box::new(move || drop(connections.send((listener_stream, peer)))),
        );
        self.deliver(
            from,
            self.now + delay + return_delay,
            Box::new(move || drop(reply.send(Ok(dialer_stream)))),
        );
    }

    /// Sends bytes, or the end of a stream.
    pub(super) fn send(
        &mut self,
        from: &str,
        to: Arc<StreamEnd>,
        bytes: Option<Bytes>,
        reset: bool,
    ) {
        let blocked = BlockedSend {
            from: from.to_owned(),
            to,
            bytes,
            reset,
        };
        if let Some(blocked) = self.try_send(blocked) {
            self.blocked.push(blocked);
        }
    }

    /// Returns the bytes if they cannot pass.
    fn try_send(&mut self, blocked: BlockedSend) -> Option<BlockedSend> {
        let reader = self.processes.get(&blocked.to.process)?;
        if blocked.to.is_severed() {
            return None;
        }
        let is_behind_blocked = self
            .blocked
            .iter()
            .any(|earlier| Arc::ptr_eq(&earlier.to, &blocked.to));
        if is_behind_blocked || !self.links.passes(&blocked.from, &reader.host) {
            return Some(blocked);
        }
        let delay = match self.links.transmit(&blocked.from, &reader.host) {
            Transmission::Arrives(delay) => delay,
            // TCP sends a lost segment again.
            Transmission::Lost | Transmission::Refused => 250,
        };
        let at = blocked.to.reserve_arrival(self.now + delay);
        let BlockedSend {
            to, bytes, reset, ..
        } = blocked;
        let process = to.process;
        let delivery: Delivery = Box::new(move || match bytes {
            Some(bytes) => to.deliver(bytes),
            None => to.finish(reset),
        });
        self.deliver(process, at, delivery);
        None
    }

    /// Open connections lose all later bytes from `from` to `to`, and neither end notices. New ones work.
    pub fn half_open(&mut self, from: &str, to: &str) {
        let host_of = |end: &StreamEnd| Some(self.processes.get(&end.process)?.host.as_str());
        for (one, other) in &self.streams {
            for (writer, reader) in [(one, other), (other, one)] {
                if host_of(writer) == Some(from) && host_of(reader) == Some(to) {
                    reader.sever();
                }
            }
        }
        self.blocked.retain(|blocked| !blocked.to.is_severed());
        self.half_open_watches(from, to);
    }

    /// Sends the bytes that waited for their link.
    pub(super) fn send_blocked(&mut self) {
        for blocked in std::mem::take(&mut self.blocked) {
            if let Some(blocked) = self.try_send(blocked) {
                self.blocked.push(blocked);
            }
        }
        self.send_blocked_watches();
    }

    /// Breaks the streams of a killed process, whose kernel resets them.
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
            .retain(|_, (listener_id, _)| *listener_id != process);
    }
}
