//! Limits rejected enrollments per address and per token. Performs no I/O.
//!
//! Guessing a secret of 256 bits is infeasible. The limit bounds the cost of attempts: requests to the home
//! cluster, log lines and events.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use krypton_runtime::clock::BootTime;

use super::connection_limiter::one_address;

/// Many agents may share an address or a load balancer. Only rejected attempts count in the end.
const OF_AN_ADDRESS: Limit = Limit {
    burst: 32,
    every: Duration::from_secs(2),
};
/// The owner of a token is rejected only a few times. An attacker with the public part of a token delays its
/// owner by seconds only.
const OF_A_TOKEN: Limit = Limit {
    burst: 8,
    every: Duration::from_secs(5),
};
/// Addresses and tokens to remember, about 100 bytes each.
const KEPT: usize = 4096;

/// The number of immediate attempts, and the time until one more is allowed.
#[derive(Clone, Copy, Debug)]
struct Limit {
    burst: u32,
    every: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Whose {
    Address(IpAddr),
    Token(String),
}

impl Whose {
    fn limit(&self) -> Limit {
        match self {
            Self::Address(_) => OF_AN_ADDRESS,
            Self::Token(_) => OF_A_TOKEN,
        }
    }
}

/// The caller exceeded a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooOften {
    /// `this address` or `this join token`.
    pub(super) whose: &'static str,
    /// Time until an attempt can succeed.
    pub(super) wait: Duration,
}

/// Recent rejections by address and token.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The time at which all used attempts are restored, at one interval each.
    used: Mutex<HashMap<Whose, BootTime>>,
}

impl Pace {
    /// Starts an attempt. It counts as rejected until [`Self::harmless`].
    pub(super) fn begin(
        &self,
        address: Option<IpAddr>,
        token: Option<&str>,
        now: BootTime,
    ) -> Result<(), TooOften> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let (address, token) = keys(address, token);
        // A throttled address must not use up the attempts of a token.
        if let Some(address) = &address {
            take(&mut used, address, now).map_err(|wait| TooOften {
                whose: "this address",
                wait,
            })?;
        }
        if let Some(token) = &token {
            take(&mut used, token, now).map_err(|wait| TooOften {
                whose: "this join token",
                wait,
            })?;
        }
        Ok(())
    }

    /// Returns the attempt: it succeeded, or failed because of the hub.
    pub(super) fn harmless(&self, address: Option<IpAddr>, token: Option<&str>) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let (address, token) = keys(address, token);
        for whose in [address, token].into_iter().flatten() {
            let every = whose.limit().every;
            if let Some(until) = used.get_mut(&whose) {
                *until = BootTime(until.0.saturating_sub(every));
            }
        }
    }
}

fn keys(address: Option<IpAddr>, token: Option<&str>) -> (Option<Whose>, Option<Whose>) {
    let token = token.map(|name| Whose::Token(name.to_owned()));
    (address.map(one_address).map(Whose::Address), token)
}

fn take(used: &mut HashMap<Whose, BootTime>, whose: &Whose, now: BootTime) -> Result<(), Duration> {
    let Limit { burst, every } = whose.limit();
    let until = used.get(whose).copied().unwrap_or_default().max(now);
    let next = BootTime(until.0 + every);
    let over = next.since(now).saturating_sub(every * burst);
    if !over.is_zero() {
        return Err(over);
    }
    if !used.contains_key(whose) && used.len() >= KEPT {
        used.retain(|_, until| *until > now);
        // Evict the entry with the fewest used attempts, which loses least.
        let least = used.iter().min_by_key(|(_, until)| **until);
        if let Some(least) = least.map(|(whose, _)| whose.clone())
            && used.len() >= KEPT
        {
            used.remove(&least);
        }
    }
    used.insert(whose.clone(), next);
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
        let pace = Pace::default();
        for number in 0..32 {
            let token = format!("{number:016x}");
            pace.begin(address(1), Some(&token), at(0)).unwrap();
        }
        let slowed = pace.begin(address(1), Some("new"), at(0)).unwrap_err();
        assert_eq!(slowed.whose, "this address");
        assert_eq!(slowed.wait, Duration::from_secs(2));
        pace.begin(address(2), Some("new"), at(0)).unwrap();
        pace.begin(address(1), Some("new"), at(2)).unwrap();
        pace.begin(address(1), Some("new"), at(2)).unwrap_err();
    }

    #[test]
    fn guesser_is_throttled_by_token_across_addresses() {
        let pace = Pace::default();
        for last in 0..8 {
            pace.begin(address(last), Some("a"), at(0)).unwrap();
        }
        let slowed = pace.begin(address(9), Some("a"), at(1)).unwrap_err();
        assert_eq!(slowed.whose, "this join token");
        pace.begin(address(9), Some("b"), at(1)).unwrap();
        // The owner can try again within seconds.
        pace.begin(address(9), Some("a"), at(5)).unwrap();
    }

    #[test]
    fn admitted_agents_do_not_throttle_each_other() {
        let pace = Pace::default();
        for number in 0..1_000 {
            let token = format!("{number:016x}");
            pace.begin(address(1), Some(&token), at(0)).unwrap();
            pace.harmless(address(1), Some(&token));
        }
    }

    #[test]
    fn ipv6_network_counts_as_one_guesser() {
        let pace = Pace::default();
        let of = |host: u16| Some(IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, host]));
        for host in 0..32 {
            pace.begin(of(host), None, at(0)).unwrap();
        }
        pace.begin(of(99), None, at(0)).unwrap_err();
        let mapped = |last| Some(IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0xc000, last]));
        pace.begin(mapped(0x201), None, at(0)).unwrap();
        assert_eq!(keys(mapped(0x201), None), keys(address(1), None));
    }

    proptest! {
        #[test]
        fn admitted_attempts_never_exceed_burst_plus_rate(
            pauses in proptest::collection::vec(0_u64..4, 1..300)
        ) {
            let pace = Pace::default();
            let (mut now, mut through) = (0, 0);
            for pause in pauses {
                now += pause;
                through += u64::from(pace.begin(address(1), None, at(now)).is_ok());
                prop_assert!(through <= 32 + now / 2);
            }
        }
    }

    #[test]
    fn throttle_memory_is_bounded_and_keeps_busiest() {
        let pace = Pace::default();
        for _ in 0..32 {
            pace.begin(address(1), None, at(0)).unwrap();
        }
        for other in 0..KEPT + 64 {
            let other = IpAddr::from((0x0a00_0000 + u32::try_from(other).unwrap()).to_be_bytes());
            pace.begin(Some(other), None, at(0)).unwrap();
        }
        assert_eq!(pace.used.lock().unwrap().len(), KEPT);
        pace.begin(address(1), None, at(0)).unwrap_err();
    }
}
