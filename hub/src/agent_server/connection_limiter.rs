//! Limits connections per address or member, and stores the budget that the connections of a key share.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::rate_limit::{Rate, TokenBucket};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

/// Number of keys below which idle keys are not removed.
const SWEEP_FROM: usize = 64;

/// Budget that all connections of one key share.
pub(super) trait Budget {
    /// Whether the budget is fully restored. Dropping and recreating it then loses nothing.
    fn is_full(&self, now: BootTime) -> bool;
}

/// Counts connections by key. Stores the keys that have connections or a used budget, and at most as many
/// others.
pub(super) struct ConnectionLimiter<K, S> {
    /// Maximum number of connections of one key.
    limit: usize,
    new_budget: Box<dyn Fn() -> S + Send + Sync>,
    entries: Mutex<Entries<K, S>>,
}

struct Entries<K, S> {
    /// The number of connections of each key, and its budget.
    by_key: HashMap<K, (usize, Arc<S>)>,
    /// Number of keys at which idle keys are removed.
    sweep_at: usize,
}

impl<K: Eq + Hash + Clone, S: Budget> ConnectionLimiter<K, S> {
    pub(super) fn new(
        limit: usize,
        new_budget: impl Fn() -> S + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            limit,
            new_budget: Box::new(new_budget),
            entries: Mutex::new(Entries {
                by_key: HashMap::new(),
                sweep_at: SWEEP_FROM,
            }),
        })
    }

    /// Adds a connection of this key. Returns `None` at the limit.
    pub(super) fn acquire(
        self: &Arc<Self>,
        key: &K,
        now: BootTime,
    ) -> Option<ConnectionSlot<K, S>> {
        let mut entries = self.entries.lock();
        if entries.by_key.len() >= entries.sweep_at {
            entries
                .by_key
                .retain(|_, (connections, budget)| *connections > 0 || !budget.is_full(now));
            entries.sweep_at = SWEEP_FROM.max(2 * entries.by_key.len());
        }
        let (connections, budget) = entries
            .by_key
            .entry(key.clone())
            .or_insert_with(|| (0, Arc::new((self.new_budget)())));
        if *connections >= self.limit {
            return None;
        }
        *connections += 1;
        Some(ConnectionSlot {
            budget: Arc::clone(budget),
            key: key.clone(),
            limiter: Arc::clone(self),
        })
    }
}

/// A counted connection. Dropping it frees the slot.
pub(super) struct ConnectionSlot<K: Eq + Hash, S> {
    pub(super) budget: Arc<S>,
    key: K,
    limiter: Arc<ConnectionLimiter<K, S>>,
}

impl<K: Eq + Hash, S> Drop for ConnectionSlot<K, S> {
    fn drop(&mut self) {
        let mut entries = self.limiter.entries.lock();
        if let Some((connections, _)) = entries.by_key.get_mut(&self.key) {
            *connections -= 1;
        }
    }
}

/// Budget of unauthenticated connections of one address.
#[derive(Debug)]
pub(super) struct AddressBudget {
    /// Slots for their handshakes.
    pub(super) handshake_slots: Arc<Semaphore>,
    handshakes: Mutex<TokenBucket>,
}

impl AddressBudget {
    pub(super) fn new(handshake_slots: usize, handshakes: Rate) -> Self {
        Self {
            handshake_slots: Arc::new(Semaphore::new(handshake_slots)),
            handshakes: Mutex::new(TokenBucket::new(handshakes)),
        }
    }

    /// Returns the time to wait before the next handshake; `None` if it exceeds `max_wait`.
    pub(super) fn next_handshake(&self, now: BootTime, max_wait: Duration) -> Option<Duration> {
        self.handshakes.lock().take(now, 1, max_wait).ok()
    }
}

impl Budget for AddressBudget {
    fn is_full(&self, now: BootTime) -> bool {
        self.handshakes.lock().is_full(now)
    }
}

/// Budget of all connections of one member.
#[derive(Debug)]
pub(super) struct MemberBudget {
    bytes: Mutex<TokenBucket>,
}

impl MemberBudget {
    pub(super) fn new(bytes: Rate) -> Self {
        let bytes = Mutex::new(TokenBucket::new(bytes));
        Self { bytes }
    }

    /// Charges the bytes read and returns how long to pause reading.
    pub(super) fn charge(&self, now: BootTime, bytes: u64) -> Duration {
        self.bytes.lock().charge(now, bytes)
    }
}

impl Budget for MemberBudget {
    fn is_full(&self, now: BootTime) -> bool {
        self.bytes.lock().is_full(now)
    }
}

/// Returns the key of an address. For IPv6 it is the /64 network, which one machine usually owns.
pub(super) fn address_key(address: IpAddr) -> IpAddr {
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
        per_token: Duration::from_secs(1),
    };

    fn limiter(limit: usize) -> Arc<ConnectionLimiter<u32, MemberBudget>> {
        ConnectionLimiter::new(limit, || MemberBudget::new(RATE))
    }

    #[test]
    fn limit_per_key_leaves_other_keys_room() {
        let limiter = limiter(2);
        let first = limiter.acquire(&1, NOW).unwrap();
        let _second = limiter.acquire(&1, NOW).unwrap();
        assert!(limiter.acquire(&1, NOW).is_none());
        assert!(limiter.acquire(&2, NOW).is_some());
        drop(first);
        assert!(limiter.acquire(&1, NOW).is_some());
    }

    #[test]
    fn returning_key_keeps_its_used_budget() {
        let limiter = limiter(2);
        let slot = limiter.acquire(&1, NOW).unwrap();
        assert_eq!(slot.budget.charge(NOW, 12), Duration::from_secs(2));
        drop(slot);
        let slot = limiter.acquire(&1, NOW).unwrap();
        assert_eq!(slot.budget.charge(NOW, 1), Duration::from_secs(3));
    }

    #[test]
    fn departed_keys_use_bounded_memory() {
        let limiter = limiter(2);
        let _connected = limiter.acquire(&u32::MAX, NOW).unwrap();
        let charged = limiter.acquire(&(u32::MAX - 1), NOW).unwrap();
        charged.budget.charge(NOW, 5);
        drop(charged);
        for key in 0..10_000 {
            drop(limiter.acquire(&key, NOW).unwrap());
            assert!(limiter.entries.lock().by_key.len() <= SWEEP_FROM);
        }
        let entries = limiter.entries.lock();
        assert!(
            entries.by_key.contains_key(&u32::MAX) && entries.by_key.contains_key(&(u32::MAX - 1))
        );
    }

    #[test]
    fn an_address_is_one_machines() {
        let key = |text: &str| address_key(text.parse().unwrap());
        assert_eq!(key("::ffff:192.0.2.7"), key("192.0.2.7"));
        assert_ne!(key("192.0.2.7"), key("192.0.2.8"));
        assert_eq!(key("2001:db8:0:1::1"), key("2001:db8:0:1:ffff::2"));
        assert_ne!(key("2001:db8:0:1::1"), key("2001:db8:0:2::1"));
    }

    #[test]
    fn handshakes_per_address_are_throttled_then_rejected() {
        let budget = AddressBudget::new(1, RATE);
        for _ in 0..10 {
            assert_eq!(
                budget.next_handshake(NOW, Duration::ZERO),
                Some(Duration::ZERO)
            );
        }
        let max_wait = Duration::from_secs(2);
        for seconds in [1, 2] {
            let delay = budget.next_handshake(NOW, max_wait);
            assert_eq!(delay, Some(Duration::from_secs(seconds)));
        }
        assert_eq!(budget.next_handshake(NOW, max_wait), None);
        assert!(!budget.is_full(NOW));
        assert!(budget.is_full(NOW + Duration::from_secs(12)));
    }
}
