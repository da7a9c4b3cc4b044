//! Durations of a Lease: expiry, renewal, checks, and deadlines of its holder.

use std::time::Duration;

/// Time without a renewal after which a member's Lease expires, measured with the observer's own clock.
pub const DURATION: Duration = LeaseTimes::MEMBER.duration;
/// Maximum age of the last renewal for starting a Helm run.
pub const NO_NEW_RUNS_AFTER: Duration = LeaseTimes::MEMBER.fresh;
/// Maximum age of the last renewal for a running Helm process. Krypton kills older ones.
pub const KILL_AFTER: Duration = LeaseTimes::MEMBER.renew_deadline;

/// Times of a Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    /// Time without a renewal after which the Lease expires, measured with the observer's own clock.
    pub duration: Duration,
    pub renew_every: Duration,
    /// Interval between two checks of a waiting process, and the pause after a failure.
    pub retry: Duration,
    /// Timeout of an API call.
    pub call_timeout: Duration,
    /// Maximum age of the last renewal for starting work.
    pub fresh: Duration,
    /// Maximum age of the last renewal with which the holder still treats the Lease as its own, if no other
    /// process has acquired it.
    pub renew_deadline: Duration,
    /// Maximum pause between responses of the API server before a holder's expiry restarts. During an outage,
    /// no holder can renew, so the first process to reconnect would take the Lease from a live holder. `None`
    /// never restarts the expiry.
    pub outage_gap: Option<Duration>,
}

impl LeaseTimes {
    /// Times of a member's Lease. They leave Helm runs enough time to end.
    pub const MEMBER: Self = Self {
        duration: Duration::from_secs(60),
        renew_every: Duration::from_secs(15),
        retry: Duration::from_secs(3),
        call_timeout: Duration::from_secs(8),
        fresh: Duration::from_secs(30),
        renew_deadline: Duration::from_secs(45),
        outage_gap: None,
    };

    /// Times of the hub's leader Lease, which guards single writes. With 5 s, a standby follows a killed
    /// leader within 5.5 s.
    pub const fn for_leader(duration: Duration) -> Self {
        Self {
            duration,
            renew_every: tenths(duration, 2),
            retry: tenths(duration, 1),
            call_timeout: tenths(duration, 2),
            fresh: tenths(duration, 7),
            renew_deadline: Duration::from_secs(30),
            outage_gap: Some(tenths(duration, 4)),
        }
    }
}

const fn tenths(duration: Duration, count: u32) -> Duration {
    Duration::from_millis(duration.as_millis() as u64 * count as u64 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether the times differ by more than the clock drift between two machines, 1 %, plus a
    /// margin.
    fn is_safely_longer(longer: Duration, shorter: Duration) -> bool {
        longer.mul_f64(0.98) > shorter
    }

    #[test]
    fn holder_stops_before_next_starts() {
        for times in [
            LeaseTimes::MEMBER,
            LeaseTimes::for_leader(Duration::from_secs(5)),
        ] {
            assert!(is_safely_longer(times.duration, times.fresh), "{times:?}");
            // One renewal may fail, and another may follow in time.
            let renewed = times.renew_every + times.call_timeout + times.retry + times.call_timeout;
            assert!(renewed <= times.fresh + times.call_timeout, "{times:?}");
        }
        assert!(is_safely_longer(
            LeaseTimes::MEMBER.duration,
            LeaseTimes::MEMBER.renew_deadline
        ));
    }

    #[test]
    fn leader_times_are_fractions_of_lease_duration() {
        let times = LeaseTimes::for_leader(Duration::from_secs(5));
        let seconds = |seconds| Duration::from_secs_f64(seconds);
        assert_eq!(times.renew_every, seconds(1.0));
        assert_eq!(times.retry, seconds(0.5));
        assert_eq!(times.call_timeout, seconds(1.0));
        assert_eq!(times.fresh, seconds(3.5));
        assert_eq!(times.outage_gap, Some(seconds(2.0)));
    }
}
