//! Limits connections per address or member, and stores the budget that the connections of a key share.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::rate_limit::{Bucket, Rate};
use tokio::sync::Semaphore;

/// Number of keys below which idle keys are not removed.
const SWEEP_FROM: usize = 64;

/// Budget that all connections of one key share.
pub(super) trait Share {
    /// Whether the budget is fully restored. Dropping and recreating it then loses nothing.
    fn is_rested(&self, now: BootTime) -> bool;
}

/// Counts connections by key. Stores the keys that have connections or a used budget, and at most as many
/// others.
pub(super) struct ConnectionLimiter<K, S> {
    /// Maximum number of connections of one key.
    limit: usize,
    make: Box<dyn Fn() -> S + Send + Sync>,
    keys: Mutex<Keys<K, S>>,
}

struct Keys<K, S> {
    each: HashMap<K, (usize, Arc<S>)>,
    sweep_at: usize,
}

impl<K: Eq + Hash + Clone, S: Share> ConnectionLimiter<K, S> {
    pub(super) fn new(limit: usize, make: impl Fn() -> S + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            limit,
            make: Box::new(make),
            keys: Mutex::new(Keys {
                each: HashMap::new(),
                sweep_at: SWEEP_FROM,
            }),
        })
    }

    /// Adds a connection of this key. Returns `None` at the limit.
    pub(super) fn enter(self: &Arc<Self>, key: &K, now: BootTime) -> Option<Place<K, S>> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if keys.each.len() >= keys.sweep_at {
            keys.each
                .retain(|_, (here, share)| *here > 0 || !share.is_rested(now));
            keys.sweep_at = SWEEP_FROM.max(2 * keys.each.len());
        }
        let (here, share) = keys
            .each
            .entry(key.clone())
            .or_insert_with(|| (0, Arc::new((self.make)())));
        if *here >= self.limit {
            return None;
        }
        *here += 1;
        Some(Place {
            share: Arc::clone(share),
            key: key.clone(),
            limiter: Arc::clone(self),
        })
    }
}

/// A counted connection. Dropping it frees the slot.
pub(super) struct Place<K: Eq + Hash, S> {
    pub(super) share: Arc<S>,
    key: K,
    limiter: Arc<ConnectionLimiter<K, S>>,
}

impl<K: Eq + Hash, S> Drop for Place<K, S> {
    fn drop(&mut self) {
        let keys = &self.limiter.keys;
        let mut keys = keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((here, _)) = keys.each.get_mut(&self.key) {
            *here -= 1;
        }
    }
}

impl<K, S> fmt::Debug for ConnectionLimiter<K, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crowd").finish_non_exhaustive()
    }
}

impl<K: Eq + Hash + fmt::Debug, S> fmt::Debug for Place<K, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Place").field(&self.key).finish()
    }
}

/// Budget of unauthenticated connections of one address.
#[derive(Debug)]
pub(super) struct AddressShare {
    /// Slots for their handshakes.
    pub(super) turns: Arc<Semaphore>,
    handshakes: Mutex<Bucket>,
}

impl AddressShare {
    pub(super) fn new(turns: usize, handshakes: Rate) -> Self {
        Self {
            turns: Arc::new(Semaphore::new(turns)),
            handshakes: Mutex::new(Bucket::new(handshakes)),
        }
    }

    /// Returns the time to wait before the next handshake; `None` if it exceeds `patience`.
    pub(super) fn next_handshake(&self, now: BootTime, patience: Duration) -> Option<Duration> {
        let mut handshakes = self
            .handshakes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        handshakes.take(now, 1, patience).ok()
    }
}

impl Share for AddressShare {
    fn is_rested(&self, now: BootTime) -> bool {
        let handshakes = self
            .handshakes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        handshakes.is_full(now)
    }
}

/// Budget of all connections of one member.
#[derive(Debug)]
pub(super) struct MemberShare {
    bytes: Mutex<Bucket>,
}

impl MemberShare {
    pub(super) fn new(bytes: Rate) -> Self {
        let bytes = Mutex::new(Bucket::new(bytes));
        Self { bytes }
    }

    /// Charges the bytes read and returns how long to pause reading.
    pub(super) fn has_read(&self, now: BootTime, bytes: u64) -> Duration {
        let mut bucket = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.charge(now, bytes)
    }
}

impl Share for MemberShare {
    fn is_rested(&self, now: BootTime) -> bool {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bytes.is_full(now)
    }
}

/// Returns the key of an address. For IPv6 it is the /64 network, which one machine usually owns.
pub(super) fn one_address(address: IpAddr) -> IpAddr {
    const NETWORK: u128 = !0 << 64;
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & NETWORK)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: BootTime = BootTime(Duration::from_secs(1000));
    const RATE: Rate = Rate {
        burst: 10,
        each: Duration::from_secs(1),
    };

    fn limiter(limit: usize) -> Arc<ConnectionLimiter<u32, MemberShare>> {
        ConnectionLimiter::new(limit, || MemberShare::new(RATE))
    }

    #[test]
    fn limit_per_key_leaves_other_keys_room() {
        let limiter = limiter(2);
        let one = limiter.enter(&1, NOW).unwrap();
        let _two = limiter.enter(&1, NOW).unwrap();
        assert!(limiter.enter(&1, NOW).is_none());
        assert!(limiter.enter(&2, NOW).is_some());
        drop(one);
        assert!(limiter.enter(&1, NOW).is_some());
    }

    #[test]
    fn returning_key_keeps_its_used_budget() {
        let limiter = limiter(2);
        let place = limiter.enter(&1, NOW).unwrap();
        assert_eq!(place.share.has_read(NOW, 12), Duration::from_secs(2));
        drop(place);
        let place = limiter.enter(&1, NOW).unwrap();
        assert_eq!(place.share.has_read(NOW, 1), Duration::from_secs(3));
    }

    #[test]
    fn departed_keys_use_bounded_memory() {
        let limiter = limiter(2);
        let _stays = limiter.enter(&u32::MAX, NOW).unwrap();
        let owes = limiter.enter(&(u32::MAX - 1), NOW).unwrap();
        owes.share.has_read(NOW, 5);
        drop(owes);
        for key in 0..10_000 {
            drop(limiter.enter(&key, NOW).unwrap());
            assert!(limiter.keys.lock().unwrap().each.len() <= SWEEP_FROM);
        }
        let keys = limiter.keys.lock().unwrap();
        assert!(keys.each.contains_key(&u32::MAX) && keys.each.contains_key(&(u32::MAX - 1)));
    }

    #[test]
    fn an_address_is_one_machines() {
        let one = |text: &str| one_address(text.parse().unwrap());
        assert_eq!(one("::ffff:192.0.2.7"), one("192.0.2.7"));
        assert_ne!(one("192.0.2.7"), one("192.0.2.8"));
        assert_eq!(one("2001:db8:0:1::1"), one("2001:db8:0:1:ffff::2"));
        assert_ne!(one("2001:db8:0:1::1"), one("2001:db8:0:2::1"));
    }

    #[test]
    fn handshakes_per_address_are_throttled_then_rejected() {
        let share = AddressShare::new(1, RATE);
        for _ in 0..10 {
            assert_eq!(
                share.next_handshake(NOW, Duration::ZERO),
                Some(Duration::ZERO)
            );
        }
        let patience = Duration::from_secs(2);
        for seconds in [1, 2] {
            let wait = share.next_handshake(NOW, patience);
            assert_eq!(wait, Some(Duration::from_secs(seconds)));
        }
        assert_eq!(share.next_handshake(NOW, patience), None);
        assert!(!share.is_rested(NOW));
        assert!(share.is_rested(BootTime(NOW.0 + Duration::from_secs(12))));
    }
}
