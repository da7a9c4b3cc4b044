//! Computes the delay before the next session. Pure.

use std::time::Duration;

use krypton_runtime::clock::BootTime;

const DELAY_MIN: Duration = Duration::from_millis(500);
const DELAY_MAX: Duration = Duration::from_secs(30);
/// A session of this length resets the back-off.
const RESET_AFTER: Duration = Duration::from_secs(60);
/// Longest delay that the hub can request.
const DRAIN_DELAY_MAX: Duration = Duration::from_secs(300);
/// A session of this length was stable. When it ends, another hub probably becomes leader within seconds.
const STABLE_AFTER: Duration = Duration::from_secs(5);
/// How long the agent retries frequently after the end of a stable session.
const FAST_RETRY_PERIOD: Duration = Duration::from_secs(15);
/// Longest delay during that time. Agents must be back within 10 s after their hub has died.
const FAST_RETRY_DELAY_MAX: Duration = Duration::from_secs(2);

/// Delays with full jitter: after a restart of the hub, 1,000 agents must not reconnect simultaneously.
#[derive(Clone, Debug, Default)]
pub(super) struct ReconnectBackoff {
    failures: u32,
    welcomed_at: Option<BootTime>,
    /// End of the last stable session, or the earliest reconnect time if the hub requested a delay.
    lost_at: Option<BootTime>,
}

impl ReconnectBackoff {
    /// A stream with a newer certificate continues the previous session.
    pub(super) fn record_welcome(&mut self, now: BootTime) {
        self.welcomed_at.get_or_insert(now);
    }

    /// Returns the delay after a failed session or attempt. `jitter` is in 0..1.
    pub(super) fn after_failure(&mut self, now: BootTime, jitter: f64) -> Duration {
        if let Some(welcomed_at) = self.welcomed_at.take() {
            let uptime = now.since(welcomed_at);
            if uptime >= RESET_AFTER {
                self.failures = 0;
            }
            self.lost_at = (uptime >= STABLE_AFTER).then_some(now);
        }
        let limit = match self.lost_at {
            Some(lost_at) if now.since(lost_at) < FAST_RETRY_PERIOD => FAST_RETRY_DELAY_MAX,
            _ => DELAY_MAX,
        };
        // The frequent retries of that period must not lengthen later delays.
        if limit == DELAY_MAX || self.max_delay() < limit {
            self.failures = self.failures.saturating_add(1);
        }
        DELAY_MIN + (self.max_delay().min(limit) - DELAY_MIN).mul_f64(jitter.clamp(0.0, 1.0))
    }

    fn max_delay(&self) -> Duration {
        DELAY_MIN
            .saturating_mul(1 << self.failures.min(10))
            .min(DELAY_MAX)
    }

    /// Returns the delay after the hub rejected the agent. Only a user can fix that, so the agent retries rarely.
    pub(super) fn after_rejection(&mut self, jitter: f64) -> Duration {
        (self.welcomed_at, self.lost_at) = (None, None);
        self.failures = self.failures.saturating_add(1);
        DELAY_MAX / 2 + DELAY_MAX.mul_f64(jitter.clamp(0.0, 1.0) / 2.0)
    }

    /// Returns the delay if the hub requested a reconnect after `pause`.
    pub(super) fn after_drain(&mut self, now: BootTime, pause: Duration, jitter: f64) -> Duration {
        let was_stable = self
            .welcomed_at
            .is_some_and(|welcomed_at| now.since(welcomed_at) >= STABLE_AFTER);
        let pause = pause.min(DRAIN_DELAY_MAX);
        let pause = pause + (pause / 2 + DELAY_MIN).mul_f64(jitter.clamp(0.0, 1.0));
        *self = Self {
            lost_at: was_stable.then_some(now + pause),
            ..Self::default()
        };
        pause
    }
}

/// Returns `period`, plus or minus up to a fifth.
pub(super) fn with_jitter(period: Duration, jitter: f64) -> Duration {
    period.mul_f64(0.8 + 0.4 * jitter.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: BootTime = BootTime(Duration::from_secs(1000));

    fn after_now(by: Duration) -> BootTime {
        NOW + by
    }

    #[test]
    fn backoff_grows_to_cap_with_full_jitter() {
        let mut backoff = ReconnectBackoff::default();
        let mut previous = Duration::ZERO;
        for _ in 0..20 {
            let mut with_no_jitter = ReconnectBackoff {
                failures: backoff.failures,
                ..ReconnectBackoff::default()
            };
            assert_eq!(with_no_jitter.after_failure(NOW, 0.0), DELAY_MIN);
            let longest = backoff.after_failure(NOW, 1.0);
            assert!(longest >= previous && longest <= DELAY_MAX, "{longest:?}");
            previous = longest;
        }
        assert_eq!(previous, DELAY_MAX);
    }

    #[test]
    fn only_minute_long_session_resets_backoff() {
        let mut backoff = ReconnectBackoff::default();
        for _ in 0..10 {
            backoff.after_failure(NOW, 1.0);
        }
        let ended_at = after_now(RESET_AFTER / 2);
        backoff.record_welcome(NOW);
        backoff.after_failure(ended_at, 1.0);
        assert_eq!(
            backoff.after_failure(ended_at + FAST_RETRY_PERIOD, 1.0),
            DELAY_MAX
        );
        backoff.record_welcome(NOW);
        assert_eq!(
            backoff.after_failure(after_now(RESET_AFTER), 1.0),
            DELAY_MIN * 2
        );
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
        for (lasted, attempts) in rows {
            let mut backoff = ReconnectBackoff::default();
            backoff.record_welcome(NOW);
            for (at, longest) in attempts {
                let now = after_now(seconds(lasted) + seconds(*at));
                let mut with_no_jitter = backoff.clone();
                assert_eq!(with_no_jitter.after_failure(now, 0.0), DELAY_MIN);
                assert_eq!(
                    backoff.after_failure(now, 1.0),
                    seconds(*longest),
                    "{lasted} {at}"
                );
            }
        }
    }

    #[test]
    fn stream_with_newer_certificate_continues_settled_session() {
        let mut backoff = ReconnectBackoff::default();
        backoff.record_welcome(NOW);
        backoff.record_welcome(after_now(STABLE_AFTER));
        backoff.after_failure(after_now(STABLE_AFTER), 1.0);
        backoff.after_failure(after_now(STABLE_AFTER), 1.0);
        assert_eq!(
            backoff.after_failure(after_now(STABLE_AFTER), 1.0),
            FAST_RETRY_DELAY_MAX
        );
    }

    #[test]
    fn short_retry_window_starts_after_drain_pause() {
        let requested = Duration::from_secs(60);
        for (was_stable, third_delay) in [(true, FAST_RETRY_DELAY_MAX), (false, DELAY_MIN * 8)] {
            let mut backoff = ReconnectBackoff::default();
            backoff.record_welcome(NOW);
            let now = if was_stable {
                after_now(STABLE_AFTER)
            } else {
                NOW
            };
            let pause = backoff.after_drain(now, requested, 0.0);
            let reconnected_at = now + pause;
            assert_eq!(backoff.after_failure(reconnected_at, 1.0), DELAY_MIN * 2);
            assert_eq!(backoff.after_failure(reconnected_at, 1.0), DELAY_MIN * 4);
            assert_eq!(backoff.after_failure(reconnected_at, 1.0), third_delay);
        }
    }

    #[test]
    fn refused_agent_retries_rarely_and_obeys_drain_delay() {
        let mut backoff = ReconnectBackoff::default();
        assert!(backoff.after_rejection(0.0) >= DELAY_MAX / 2);
        assert_eq!(backoff.after_rejection(1.0), DELAY_MAX);
        let requested = Duration::from_secs(4);
        assert_eq!(backoff.after_drain(NOW, requested, 0.0), requested);
        assert!(backoff.after_drain(NOW, requested, 1.0) > requested);
        assert!(backoff.after_drain(NOW, Duration::from_secs(1 << 30), 1.0) <= DRAIN_DELAY_MAX * 2);
    }

    #[test]
    fn heartbeats_are_spread_by_a_fifth() {
        let ten = Duration::from_secs(10);
        assert_eq!(with_jitter(ten, 0.0), Duration::from_secs(8));
        assert_eq!(with_jitter(ten, 1.0), Duration::from_secs(12));
    }
}
