//! Token bucket with a burst and a sustained rate. Pure: the caller passes the time.

use std::time::Duration;

use crate::clock::BootTime;

/// Limits of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Number of tokens in a full bucket.
    pub burst: u64,
    /// Time to earn one token.
    pub per_token: Duration,
}

impl Rate {
    /// Returns the time to earn `amount` tokens.
    pub fn time_to_earn(self, amount: u64) -> Duration {
        let nanos = self.per_token.as_nanos().saturating_mul(amount.into());
        // Centuries, which still allow a few additions without overflow.
        let longest = u128::from(u64::MAX / 4);
        Duration::from_nanos(u64::try_from(nanos.min(longest)).unwrap_or_default())
    }
}

/// A bucket, stored as the time at which it will be full.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    rate: Rate,
    full_at: BootTime,
}

impl TokenBucket {
    /// Creates a full bucket.
    pub fn new(rate: Rate) -> Self {
        let full_at = BootTime::default();
        Self { rate, full_at }
    }

    /// Takes tokens for work whose size is known only afterwards. Returns the time to wait before taking
    /// more.
    pub fn charge(&mut self, now: BootTime, amount: u64) -> Duration {
        let from = self.full_at.max(now).0;
        self.full_at = BootTime(from.saturating_add(self.rate.time_to_earn(amount)));
        self.wait(now)
    }

    /// Returns the time until the overdrawn tokens are earned again.
    pub fn wait(&self, now: BootTime) -> Duration {
        let missing = self.full_at.since(now);
        missing.saturating_sub(self.rate.time_to_earn(self.rate.burst))
    }

    /// Takes `amount` tokens. Returns the time to wait before the work.
    ///
    /// # Errors
    /// Returns the wait if it is longer than `max_wait`. Takes no tokens in that case.
    pub fn take(
        &mut self,
        now: BootTime,
        amount: u64,
        max_wait: Duration,
    ) -> Result<Duration, Duration> {
        let mut after = *self;
        let wait = after.charge(now, amount);
        if wait > max_wait {
            return Err(wait);
        }
        *self = after;
        Ok(wait)
    }

    /// Returns whether the bucket is full.
    pub fn is_full(&self, now: BootTime) -> bool {
        self.full_at <= now
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RATE: Rate = Rate {
        burst: 10,
        per_token: Duration::from_millis(100),
    };

    fn at(millis: u64) -> BootTime {
        BootTime(Duration::from_millis(1_000_000 + millis))
    }

    #[test]
    fn burst_passes_and_excess_is_paced() {
        let mut bucket = TokenBucket::new(RATE);
        // Time, amount and resulting wait.
        let steps = [
            (0, 10, 0),
            (0, 1, 100),
            (100, 1, 100),
            (150, 5, 550),
            (700, 0, 0),
            // A pause of one second fills the bucket, and a longer one adds nothing.
            (60_000, 10, 0),
            (60_000, 3, 300),
            // An amount above the bucket's size also has to wait.
            (70_000, 110, 10_000),
        ];
        for (now, amount, wait) in steps {
            let actual = bucket.charge(at(now), amount);
            assert_eq!(actual, Duration::from_millis(wait), "at {now}");
        }
    }

    #[test]
    fn refused_take_costs_no_tokens() {
        let mut bucket = TokenBucket::new(RATE);
        let millis = Duration::from_millis;
        let mut take = |now, amount| bucket.take(at(now), amount, Duration::ZERO);
        assert_eq!(take(0, 9), Ok(Duration::ZERO));
        for _ in 0..3 {
            assert_eq!(take(0, 2), Err(millis(100)));
        }
        assert_eq!(take(0, 1), Ok(Duration::ZERO));
        assert_eq!(take(99, 1), Err(millis(1)));
        assert_eq!(take(100, 1), Ok(Duration::ZERO));
        // Callers that wait long enough get their tokens, one after the other.
        for turn in 1..=3 {
            assert_eq!(bucket.take(at(100), 1, millis(300)), Ok(millis(100 * turn)));
        }
        assert_eq!(bucket.take(at(100), 1, millis(300)), Err(millis(400)));
    }

    #[test]
    fn bucket_refills_after_rest_without_overflow() {
        let mut bucket = TokenBucket::new(RATE);
        assert!(bucket.is_full(at(0)));
        bucket.charge(at(0), 7);
        assert!(!bucket.is_full(at(699)) && bucket.is_full(at(700)));
        for _ in 0..8 {
            bucket.charge(at(0), u64::MAX);
        }
        assert!(bucket.wait(at(0)) > Duration::from_secs(1 << 30));
    }

    proptest! {
        /// A caller that waits as required never gets more than a burst plus the earned tokens in any
        /// interval.
        #[test]
        fn no_span_overdraws_budget_beyond_one_message(
            steps in proptest::collection::vec((0_u64..3_000, 0_u64..40), 1..80)
        ) {
            let mut bucket = TokenBucket::new(RATE);
            let mut now = 0;
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (rest, amount) in steps {
                now += rest;
                let wait = bucket.charge(at(now), amount);
                taken.push((now, amount));
                now += u64::try_from(wait.as_millis()).unwrap();
            }
            for (index, (start, _)) in taken.iter().enumerate() {
                let mut sum = 0;
                for (end, amount) in &taken[index..] {
                    // The size of the last message is known only after it is read.
                    let earned = (end - start) / 100 + 1;
                    prop_assert!(sum <= RATE.burst + earned, "{sum} from {start} to {end}");
                    sum += amount;
                }
            }
        }

        /// A caller that keeps to the rate never waits.
        #[test]
        fn within_the_rate_nothing_waits(
            rests in proptest::collection::vec(0_u64..1_000, 1..80)
        ) {
            let mut bucket = TokenBucket::new(RATE);
            let mut now = 0;
            for rest in rests {
                now += rest;
                let amount = rest / 100;
                prop_assert_eq!(bucket.charge(at(now), amount), Duration::ZERO);
            }
        }

        /// Two readers that wait independently both make progress: a wait is at most the total debt.
        #[test]
        fn small_message_waits_no_longer_than_total_debt(
            large in proptest::collection::vec(1_u64..200, 1..8)
        ) {
            let mut bucket = TokenBucket::new(RATE);
            let sum: u64 = large.iter().sum();
            for amount in large {
                bucket.charge(at(0), amount);
            }
            let wait = bucket.charge(at(0), 1);
            prop_assert!(wait <= RATE.time_to_earn(sum + 1));
        }
    }
}
