//! Computes the delay before the next session. Pure.

use std::time::Duration;

use krypton_runtime::clock::BootTime;

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(30);
/// A session of this length resets the back-off.
const GOOD: Duration = Duration::from_secs(60);
/// Longest delay that the hub can request.
const AWAY: Duration = Duration::from_secs(300);
/// A session of this length was stable. When it ends, another hub probably becomes leader within seconds.
const SETTLED: Duration = Duration::from_secs(5);
/// How long the agent retries frequently after the end of a stable session.
const SOON: Duration = Duration::from_secs(15);
/// Longest delay during that time. Agents must be back within 10 s after their hub has died.
const SHORT: Duration = Duration::from_secs(2);

/// Delays with full jitter: after a restart of the hub, 1,000 agents must not reconnect simultaneously.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    failures: u32,
    welcomed: Option<BootTime>,
    /// End of the last stable session, or the earliest reconnect time if the hub requested a delay.
    lost: Option<BootTime>,
}

impl Pace {
    /// A stream with a newer certificate continues the previous session.
    pub(super) fn welcomed(&mut self, now: BootTime) {
        self.welcomed.get_or_insert(now);
    }

    /// Returns the delay after a failed session or attempt. `jitter` is in 0..1.
    pub(super) fn failed(&mut self, now: BootTime, jitter: f64) -> Duration {
        if let Some(welcomed) = self.welcomed.take() {
            let lasted = now.since(welcomed);
            if lasted >= GOOD {
                self.failures = 0;
            }
            self.lost = (lasted >= SETTLED).then_some(now);
        }
        let longest = match self.lost {
            Some(lost) if now.since(lost) < SOON => SHORT,
            _ => LONGEST,
        };
        // The frequent retries of that period must not lengthen later delays.
        if longest == LONGEST || self.full() < longest {
            self.failures = self.failures.saturating_add(1);
        }
        FIRST + (self.full().min(longest) - FIRST).mul_f64(jitter.clamp(0.0, 1.0))
    }

    fn full(&self) -> Duration {
        FIRST
            .saturating_mul(1 << self.failures.min(10))
            .min(LONGEST)
    }

    /// Returns the delay after the hub rejected the agent. Only a user can fix that, so the agent retries rarely.
    pub(super) fn refused(&mut self, jitter: f64) -> Duration {
        (self.welcomed, self.lost) = (None, None);
        self.failures = self.failures.saturating_add(1);
        LONGEST / 2 + LONGEST.mul_f64(jitter.clamp(0.0, 1.0) / 2.0)
    }

    /// Returns the delay if the hub requested a reconnect after `pause`.
    pub(super) fn drained(&mut self, now: BootTime, pause: Duration, jitter: f64) -> Duration {
        let settled = self
            .welcomed
            .is_some_and(|welcomed| now.since(welcomed) >= SETTLED);
        let pause = pause.min(AWAY);
        let pause = pause + (pause / 2 + FIRST).mul_f64(jitter.clamp(0.0, 1.0));
        *self = Self {
            lost: settled.then_some(BootTime(now.0 + pause)),
            ..Self::default()
        };
        pause
    }
}

/// Returns `period`, plus or minus up to a fifth.
pub(super) fn spread(period: Duration, jitter: f64) -> Duration {
    period.mul_f64(0.8 + 0.4 * jitter.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: BootTime = BootTime(Duration::from_secs(1000));

    fn later(by: Duration) -> BootTime {
        BootTime(NOW.0 + by)
    }

    #[test]
    fn backoff_grows_to_cap_with_full_jitter() {
        let mut pace = Pace::default();
        let mut before = Duration::ZERO;
        for _ in 0..20 {
            let mut lucky = Pace {
                failures: pace.failures,
                ..Pace::default()
            };
            assert_eq!(lucky.failed(NOW, 0.0), FIRST);
            let longest = pace.failed(NOW, 1.0);
            assert!(longest >= before && longest <= LONGEST, "{longest:?}");
            before = longest;
        }
        assert_eq!(before, LONGEST);
    }

    #[test]
    fn only_minute_long_session_resets_backoff() {
        let mut pace = Pace::default();
        for _ in 0..10 {
            pace.failed(NOW, 1.0);
        }
        let ended = later(GOOD / 2);
        pace.welcomed(NOW);
        pace.failed(ended, 1.0);
        assert_eq!(pace.failed(BootTime(ended.0 + SOON), 1.0), LONGEST);
        pace.welcomed(NOW);
        assert_eq!(pace.failed(later(GOOD), 1.0), FIRST * 2);
    }

    #[test]
    fn settled_session_retries_often_then_backs_off() {
        let seconds = Duration::from_secs;
        // Session duration; then pairs of a failure time after its end and the longest delay after it, in seconds.
        let rows: [(u64, &[(u64, u64)]); 3] = [
            (4, &[(0, 1), (1, 2), (3, 4), (7, 8), (14, 16)]),
            (
                5,
                &[(0, 1), (1, 2), (3, 2), (5, 2), (14, 2), (15, 4), (19, 8)],
            ),
            (
                600,
                &[
                    (0, 1),
                    (1, 2),
                    (3, 2),
                    (14, 2),
                    (16, 4),
                    (20, 8),
                    (28, 16),
                    (44, 30),
                ],
            ),
        ];
        for (lasted, tries) in rows {
            let mut pace = Pace::default();
            pace.welcomed(NOW);
            for (at, longest) in tries {
                let now = later(seconds(lasted) + seconds(*at));
                let mut lucky = pace.clone();
                assert_eq!(lucky.failed(now, 0.0), FIRST);
                assert_eq!(pace.failed(now, 1.0), seconds(*longest), "{lasted} {at}");
            }
        }
    }

    #[test]
    fn stream_with_newer_certificate_continues_settled_session() {
        let mut pace = Pace::default();
        pace.welcomed(NOW);
        pace.welcomed(later(SETTLED));
        pace.failed(later(SETTLED), 1.0);
        pace.failed(later(SETTLED), 1.0);
        assert_eq!(pace.failed(later(SETTLED), 1.0), SHORT);
    }

    #[test]
    fn short_retry_window_starts_after_drain_pause() {
        let asked = Duration::from_secs(60);
        for (settled, third) in [(true, SHORT), (false, FIRST * 8)] {
            let mut pace = Pace::default();
            pace.welcomed(NOW);
            let now = if settled { later(SETTLED) } else { NOW };
            let pause = pace.drained(now, asked, 0.0);
            let again = BootTime(now.0 + pause);
            assert_eq!(pace.failed(again, 1.0), FIRST * 2);
            assert_eq!(pace.failed(again, 1.0), FIRST * 4);
            assert_eq!(pace.failed(again, 1.0), third);
        }
    }

    #[test]
    fn refused_agent_retries_rarely_and_obeys_drain_delay() {
        let mut pace = Pace::default();
        assert!(pace.refused(0.0) >= LONGEST / 2);
        assert_eq!(pace.refused(1.0), LONGEST);
        let asked = Duration::from_secs(4);
        assert_eq!(pace.drained(NOW, asked, 0.0), asked);
        assert!(pace.drained(NOW, asked, 1.0) > asked);
        assert!(pace.drained(NOW, Duration::from_secs(1 << 30), 1.0) <= AWAY * 2);
    }

    #[test]
    fn heartbeats_are_spread_by_a_fifth() {
        let ten = Duration::from_secs(10);
        assert_eq!(spread(ten, 0.0), Duration::from_secs(8));
        assert_eq!(spread(ten, 1.0), Duration::from_secs(12));
    }
}
