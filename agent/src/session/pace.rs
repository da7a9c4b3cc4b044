//! How long is waited before the next session. Pure.

use std::time::Duration;

use crate::clock::Boot;

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(30);
/// A session that has lasted this long makes up for the failures before it.
const GOOD: Duration = Duration::from_secs(60);
/// The longest that a hub may ask us to stay away.
const AWAY: Duration = Duration::from_secs(300);

/// Full jitter: a hub that comes back must not find a thousand agents at its door at once.
#[derive(Debug, Default)]
pub(super) struct Pace {
    failures: u32,
    welcomed: Option<Boot>,
}

impl Pace {
    pub(super) fn welcomed(&mut self, now: Boot) {
        self.welcomed = Some(now);
    }

    /// After a session or an attempt that failed; `jitter` is in 0..1.
    pub(super) fn failed(&mut self, now: Boot, jitter: f64) -> Duration {
        if let Some(welcomed) = self.welcomed.take()
            && now.since(welcomed) >= GOOD
        {
            self.failures = 0;
        }
        self.failures = self.failures.saturating_add(1);
        let full = FIRST
            .saturating_mul(1 << self.failures.min(10))
            .min(LONGEST);
        FIRST + (full - FIRST).mul_f64(jitter.clamp(0.0, 1.0))
    }

    /// The hub does not want us: only a person can change that.
    pub(super) fn refused(&mut self, jitter: f64) -> Duration {
        self.welcomed = None;
        self.failures = self.failures.saturating_add(1);
        LONGEST / 2 + LONGEST.mul_f64(jitter.clamp(0.0, 1.0) / 2.0)
    }

    /// The hub has asked us to come again after `pause`.
    pub(super) fn drained(&mut self, pause: Duration, jitter: f64) -> Duration {
        *self = Self::default();
        let pause = pause.min(AWAY);
        pause + (pause / 2 + FIRST).mul_f64(jitter.clamp(0.0, 1.0))
    }
}

/// `period`, give or take a fifth.
pub(super) fn spread(period: Duration, jitter: f64) -> Duration {
    period.mul_f64(0.8 + 0.4 * jitter.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Boot = Boot(Duration::from_secs(1000));

    #[test]
    fn pauses_grow_to_half_a_minute_and_are_left_to_chance_in_full() {
        let mut pace = Pace::default();
        let mut before = Duration::ZERO;
        for _ in 0..20 {
            let mut lucky = Pace {
                failures: pace.failures,
                welcomed: None,
            };
            assert_eq!(lucky.failed(NOW, 0.0), FIRST);
            let longest = pace.failed(NOW, 1.0);
            assert!(longest >= before && longest <= LONGEST, "{longest:?}");
            before = longest;
        }
        assert_eq!(before, LONGEST);
    }

    #[test]
    fn only_a_session_of_a_minute_makes_up_for_failures() {
        let mut pace = Pace::default();
        for _ in 0..10 {
            pace.failed(NOW, 1.0);
        }
        pace.welcomed(NOW);
        assert_eq!(pace.failed(Boot(NOW.0 + GOOD / 2), 1.0), LONGEST);
        pace.welcomed(NOW);
        assert_eq!(pace.failed(Boot(NOW.0 + GOOD), 1.0), FIRST * 2);
    }

    #[test]
    fn a_refusal_is_asked_about_rarely_and_a_drain_is_obeyed() {
        let mut pace = Pace::default();
        assert!(pace.refused(0.0) >= LONGEST / 2);
        assert_eq!(pace.refused(1.0), LONGEST);
        let asked = Duration::from_secs(4);
        assert_eq!(pace.drained(asked, 0.0), asked);
        assert!(pace.drained(asked, 1.0) > asked);
        assert!(pace.drained(Duration::from_secs(1 << 30), 1.0) <= AWAY * 2);
    }

    #[test]
    fn heartbeats_are_spread_by_a_fifth() {
        let ten = Duration::from_secs(10);
        assert_eq!(spread(ten, 0.0), Duration::from_secs(8));
        assert_eq!(spread(ten, 1.0), Duration::from_secs(12));
    }
}
