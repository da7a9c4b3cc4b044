//! Connections without an agent's certificate: a bounded number, of which the oldest makes room for the next.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// Whether a complete request has arrived on a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestReceived(Arc<AtomicBool>);

impl RequestReceived {
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct AnonymousConnection {
    address: IpAddr,
    request_received: RequestReceived,
    evicted: CancellationToken,
}

/// By number, the oldest first.
type ConnectionsByNumber = BTreeMap<u64, AnonymousConnection>;

/// The open connections without an agent's certificate.
#[derive(Debug)]
pub(super) struct AnonymousConnections {
    max_total: usize,
    max_per_address: usize,
    /// The number of the newest connection, and the open ones.
    connections: Mutex<(u64, ConnectionsByNumber)>,
}

/// The limit for which a connection was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExceededLimit {
    All,
    Address,
}

impl AnonymousConnections {
    pub(super) fn new(max_total: usize, max_per_address: usize) -> Arc<Self> {
        Arc::new(Self {
            max_total: max_total.max(1),
            max_per_address: max_per_address.max(1),
            connections: Mutex::default(),
        })
    }

    /// Adds a connection. Returns the limit for which another one was evicted, if any.
    pub(super) fn add(self: &Arc<Self>, address: IpAddr) -> (AnonymousSlot, Option<ExceededLimit>) {
        let mut connections = self.connections.lock();
        let exceeded = self.evict(&mut connections.1, address);
        connections.0 += 1;
        let number = connections.0;
        let (request_received, evicted) = (RequestReceived::default(), CancellationToken::new());
        let connection = AnonymousConnection {
            address,
            request_received: request_received.clone(),
            evicted: evicted.clone(),
        };
        connections.1.insert(number, connection);
        let slot = AnonymousSlot {
            request_received,
            evicted,
            number,
            connections: Arc::clone(self),
        };
        (slot, exceeded)
    }

    /// Evicts a connection if there is no room for another one of this address.
    fn evict(
        &self,
        connections: &mut ConnectionsByNumber,
        address: IpAddr,
    ) -> Option<ExceededLimit> {
        let (victim, exceeded) = if count(connections, address) >= self.max_per_address {
            (oldest(connections, Some(address)), ExceededLimit::Address)
        } else if connections.len() >= self.max_total {
            // A connection with a request goes last, and then from the most crowded address.
            let idle = connections
                .iter()
                .find(|(_, connection)| !connection.request_received.get());
            let idle = idle.map(|(number, _)| *number);
            let victim = idle.or_else(|| oldest(connections, most_crowded_address(connections)));
            (victim, ExceededLimit::All)
        } else {
            return None;
        };
        let victim = connections.remove(&victim?)?;
        victim.evicted.cancel();
        Some(exceeded)
    }
}

fn count(connections: &ConnectionsByNumber, address: IpAddr) -> usize {
    connections
        .values()
        .filter(|connection| connection.address == address)
        .count()
}

/// The oldest connection of an address, preferably without a request.
fn oldest(connections: &ConnectionsByNumber, address: Option<IpAddr>) -> Option<u64> {
    let of_address = connections
        .iter()
        .filter(|(_, connection)| Some(connection.address) == address);
    let oldest = of_address.min_by_key(|(_, connection)| connection.request_received.get());
    oldest.map(|(number, _)| *number)
}

fn most_crowded_address(connections: &ConnectionsByNumber) -> Option<IpAddr> {
    let addresses = connections.values().map(|connection| connection.address);
    addresses.max_by_key(|address| count(connections, *address))
}

/// The slot of a connection without an agent's certificate. Dropping it frees the slot.
pub(super) struct AnonymousSlot {
    pub(super) request_received: RequestReceived,
    /// Cancelled when another connection needs the slot.
    pub(super) evicted: CancellationToken,
    number: u64,
    connections: Arc<AnonymousConnections>,
}

impl Drop for AnonymousSlot {
    fn drop(&mut self) {
        self.connections.connections.lock().1.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(last: u8) -> IpAddr {
        Ipv4Addr::new(192, 0, 2, last).into()
    }

    #[test]
    fn oldest_stranger_of_a_full_address_makes_room() {
        let connections = AnonymousConnections::new(10, 2);
        let [first, second] = [(); 2].map(|()| connections.add(address(1)).0);
        let other = connections.add(address(2)).0;
        let (third, exceeded) = connections.add(address(1));
        assert_eq!(exceeded, Some(ExceededLimit::Address));
        let evicted = [&first, &second, &third, &other].map(|slot| slot.evicted.is_cancelled());
        assert_eq!(evicted, [true, false, false, false]);
    }

    #[test]
    fn stranger_with_request_outlasts_idle_one_when_full() {
        let connections = AnonymousConnections::new(3, 3);
        let add = |last| connections.add(address(last)).0;
        let (enrolling, idle, also_idle) = (add(1), add(2), add(2));
        enrolling.request_received.set();
        let (next, exceeded) = connections.add(address(3));
        assert_eq!(exceeded, Some(ExceededLimit::All));
        let slots = [&enrolling, &idle, &also_idle, &next];
        let evicted = slots.map(|slot| slot.evicted.is_cancelled());
        assert_eq!(evicted, [false, true, false, false]);
    }

    #[test]
    fn crowded_address_makes_room_when_all_have_asked() {
        let connections = AnonymousConnections::new(3, 3);
        let add = |last| connections.add(address(last)).0;
        let (single, first, second) = (add(1), add(2), add(2));
        for slot in [&single, &first, &second] {
            slot.request_received.set();
        }
        let _next = add(3);
        let evicted = [&single, &first, &second].map(|slot| slot.evicted.is_cancelled());
        assert_eq!(evicted, [false, true, false]);
    }

    #[test]
    fn departed_strangers_leave_their_places() {
        let connections = AnonymousConnections::new(1, 1);
        for last in 0..100 {
            let (_slot, exceeded) = connections.add(address(last));
            assert_eq!(exceeded, None);
        }
    }
}
