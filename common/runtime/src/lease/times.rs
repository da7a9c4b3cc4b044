//! Times of a Lease.

use std::time::Duration;

/// Times of a Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Time without a renewal after which the Lease expires, measured with the observer's own clock.
    pub duration: Duration,
    pub renew_every: Duration,
    /// Interval between two checks of a waiting process, and the pause after a failure.
    pub retry: Duration,
    /// Timeout of an API call.
    pub call: Duration,
    /// Maximum age of the last renewal for starting work.
    pub fresh: Duration,
    /// Maximum age of the last renewal for which the holder still treats the Lease as its own, if no other
    /// process has acquired it.
    pub keep: Duration,
    /// Maximum pause between responses of the API server before a holder's expiry restarts. During an outage,
    /// no holder can renew, so the first process to reconnect would take the Lease from a live holder. `None`
    /// never restarts the expiry.
    pub gap: Option<Duration>,
}

impl Times {
    /// Times of a member's Lease. They leave Helm runs enough time to end.
    pub const MEMBER: Self = Self {
        duration: Duration::from_secs(60),
        renew_every: Duration::from_secs(15),
        retry: Duration::from_secs(3),
        call: Duration::from_secs(8),
        fresh: Duration::from_secs(30),
        keep: Duration::from_secs(45),
        gap: None,
    };

    /// Times of the hub's leader Lease, which guards single writes. With 5 s, a standby follows a killed
    /// leader within 5.5 s.
    pub const fn of_lead(duration: Duration) -> Self {
        Self {
            duration,
            renew_every: tenths(duration, 2),
            retry: tenths(duration, 1),
            call: tenths(duration, 2),
            fresh: tenths(duration, 7),
            keep: Duration::from_secs(30),
            gap: Some(tenths(duration, 4)),
        }
    }
}

const fn tenths(of: Duration, many: u32) -> Duration {
    Duration::from_millis(of.as_millis() as u64 * many as u64 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether the times differ by more than the clock drift between two machines, 1 %, plus a
    /// margin.
    fn apart(longer: Duration, shorter: Duration) -> bool {
        longer.mul_f64(0.98) > shorter
    }

    #[test]
    fn holder_stops_before_next_starts() {
        for times in [Times::MEMBER, Times::of_lead(Duration::from_secs(5))] {
            assert!(apart(times.duration, times.fresh), "{times:?}");
            // One renewal may fail, and another may follow in time.
            let renewed = times.renew_every + times.call + times.retry + times.call;
            assert!(renewed <= times.fresh + times.call, "{times:?}");
        }
        assert!(apart(Times::MEMBER.duration, Times::MEMBER.keep));
    }

    #[test]
    fn leader_times_are_fractions_of_lease_duration() {
        let times = Times::of_lead(Duration::from_secs(5));
        let seconds = |seconds| Duration::from_secs_f64(seconds);
        assert_eq!(times.renew_every, seconds(1.0));
        assert_eq!(times.retry, seconds(0.5));
        assert_eq!(times.call, seconds(1.0));
        assert_eq!(times.fresh, seconds(3.5));
        assert_eq!(times.gap, Some(seconds(2.0)));
    }
}
