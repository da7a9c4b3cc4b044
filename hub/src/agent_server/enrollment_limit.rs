//! Limits rejected enrollments per address and per token. Performs no I/O.
//!
//! Guessing a secret of 256 bits is infeasible. The limit bounds the cost of attempts: requests to the home
//! cluster, log lines and events.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use parking_lot::Mutex;

use super::connection_limiter::address_key;

/// Many agents may share an address or a load balancer. Only rejected attempts count in the end.
const ADDRESS_LIMIT: AttemptLimit = AttemptLimit {
    caller: "this address",
    burst: 32,
    every: Duration::from_secs(2),
};
/// The owner of a token is rejected only a few times. An attacker with the public part of a token delays its
/// owner by seconds only.
const TOKEN_LIMIT: AttemptLimit = AttemptLimit {
    caller: "this join token",
    burst: 8,
    every: Duration::from_secs(5),
};
/// Addresses and tokens to remember, about 100 bytes each.
const MAX_ENTRIES: usize = 4096;

/// The number of immediate attempts, and the time until one more is allowed.
#[derive(Clone, Copy, Debug)]
struct AttemptLimit {
    /// Whose attempts are counted together, for messages.
    caller: &'static str,
    burst: u32,
    every: Duration,
}

/// Whose attempts are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum LimitKey {
    Address(IpAddr),
    Token(String),
}

impl LimitKey {
    fn limit(&self) -> AttemptLimit {
        match self {
            Self::Address(_) => ADDRESS_LIMIT,
            Self::Token(_) => TOKEN_LIMIT,
        }
    }
}

/// The caller exceeded a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitExceeded {
    /// `this address` or `this join token`.
    pub(super) caller: &'static str,
    /// Time until an attempt can succeed.
    pub(super) wait: Duration,
}

/// Recent rejections by address and token.
#[derive(Debug, Default)]
pub(super) struct EnrollmentLimiter {
    /// The time at which all used attempts are restored, at one interval each.
    restored_at: Mutex<HashMap<LimitKey, BootTime>>,
}

impl EnrollmentLimiter {
    /// Starts an attempt. It counts as rejected until [`Self::forgive`].
    pub(super) fn begin(
        &self,
        address: Option<IpAddr>,
        token: Option<&str>,
        now: BootTime,
    ) -> Result<(), LimitExceeded> {
        let mut restored_at = self.restored_at.lock();
        keys(address, token).try_for_each(|key| take(&mut restored_at, key, now))
    }

    /// Returns the attempt: it succeeded, or failed because of the hub.
    pub(super) fn forgive(&self, address: Option<IpAddr>, token: Option<&str>) {
        let mut restored_at = self.restored_at.lock();
        for key in keys(address, token) {
            let every = key.limit().every;
            if let Some(time) = restored_at.get_mut(&key) {
                *time = BootTime(time.0.saturating_sub(every));
            }
        }
    }
}

/// The address comes first: a throttled one must not use up the attempts of a token.
fn keys(address: Option<IpAddr>, token: Option<&str>) -> impl Iterator<Item = LimitKey> {
    let address = address.map(address_key).map(LimitKey::Address);
    let token = token.map(|name| LimitKey::Token(name.to_owned()));
    address.into_iter().chain(token)
}

/// Counts an attempt, unless it exceeds the limit.
fn take(
    restored_at: &mut HashMap<LimitKey, BootTime>,
    key: LimitKey,
    now: BootTime,
) -> Result<(), LimitExceeded> {
    let AttemptLimit {
        caller,
        burst,
        every,
    } = key.limit();
    let current = restored_at.get(&key).copied().unwrap_or_default().max(now);
    let next = current + every;
    let wait = next.since(now).saturating_sub(every * burst);
    if !wait.is_zero() {
        return Err(LimitExceeded { caller, wait });
    }
    if !restored_at.contains_key(&key) && restored_at.len() >= MAX_ENTRIES {
        restored_at.retain(|_, time| *time > now);
        // Evict the entry with the fewest used attempts, which loses least.
        let least_used = restored_at.iter().min_by_key(|(_, time)| **time);
        if let Some(least_used) = least_used.map(|(key, _)| key.clone())
            && restored_at.len() >= MAX_ENTRIES
        {
            restored_at.remove(&least_used);
        }
    }
    restored_at.insert(key, next);
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(second: u64) -> BootTime {
        BootTime(Duration::from_secs(1_000 + second))
    }

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, last]))
    }

    #[test]
    fn guesser_is_throttled_by_address_across_tokens() {
        let limiter = EnrollmentLimiter::default();
        for number in 0..32 {
            let token = format!("{number:016x}");
            limiter.begin(address(1), Some(&token), at(0)).unwrap();
        }
        let throttled = limiter.begin(address(1), Some("new"), at(0)).unwrap_err();
        assert_eq!(throttled.caller, "this address");
        assert_eq!(throttled.wait, Duration::from_secs(2));
        limiter.begin(address(2), Some("new"), at(0)).unwrap();
        limiter.begin(address(1), Some("new"), at(2)).unwrap();
        limiter.begin(address(1), Some("new"), at(2)).unwrap_err();
    }

    #[test]
    fn guesser_is_throttled_by_token_across_addresses() {
        let limiter = EnrollmentLimiter::default();
        for last in 0..8 {
            limiter.begin(address(last), Some("a"), at(0)).unwrap();
        }
        let throttled = limiter.begin(address(9), Some("a"), at(1)).unwrap_err();
        assert_eq!(throttled.caller, "this join token");
        limiter.begin(address(9), Some("b"), at(1)).unwrap();
        // The owner can try again within seconds.
        limiter.begin(address(9), Some("a"), at(5)).unwrap();
    }

    #[test]
    fn admitted_agents_do_not_throttle_each_other() {
        let limiter = EnrollmentLimiter::default();
        for number in 0..1_000 {
            let token = format!("{number:016x}");
            limiter.begin(address(1), Some(&token), at(0)).unwrap();
            limiter.forgive(address(1), Some(&token));
        }
    }

    #[test]
    fn ipv6_network_counts_as_one_guesser() {
        let limiter = EnrollmentLimiter::default();
        let address_in_network =
            |host: u16| Some(IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, host]));
        for host in 0..32 {
            limiter
                .begin(address_in_network(host), None, at(0))
                .unwrap();
        }
        limiter
            .begin(address_in_network(99), None, at(0))
            .unwrap_err();
        let mapped = |last| Some(IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0xc000, last]));
        limiter.begin(mapped(0x201), None, at(0)).unwrap();
        assert!(keys(mapped(0x201), None).eq(keys(address(1), None)));
    }

    proptest! {
        #[test]
        fn admitted_attempts_never_exceed_burst_plus_rate(
            pauses in proptest::collection::vec(0_u64..4, 1..300)
        ) {
            let limiter = EnrollmentLimiter::default();
            let (mut now, mut admitted) = (0, 0);
            for pause in pauses {
                now += pause;
                admitted += u64::from(limiter.begin(address(1), None, at(now)).is_ok());
                prop_assert!(admitted <= 32 + now / 2);
            }
        }
    }

    #[test]
    fn throttle_memory_is_bounded_and_keeps_busiest() {
        let limiter = EnrollmentLimiter::default();
        for _ in 0..32 {
            limiter.begin(address(1), None, at(0)).unwrap();
        }
        for other in 0..MAX_ENTRIES + 64 {
            let other = IpAddr::from((0x0a00_0000 + u32::try_from(other).unwrap()).to_be_bytes());
            limiter.begin(Some(other), None, at(0)).unwrap();
        }
        assert_eq!(limiter.restored_at.lock().len(), MAX_ENTRIES);
        limiter.begin(address(1), None, at(0)).unwrap_err();
    }
}
