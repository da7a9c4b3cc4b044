//! How long each thing about a Lease takes.

use std::time::Duration;

/// The times of one Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// It is dead when it has not been renewed for this long, by the watcher's own clock.
    pub duration: Duration,
    pub renew_every: Duration,
    /// Between two looks of whoever waits for it, and after a failure.
    pub retry: Duration,
    /// The deadline of one call.
    pub call: Duration,
    /// Nothing is begun under a renewal that is older.
    pub fresh: Duration,
    /// So long after the last renewal its holder may still take it to be its own, where nobody else has
    /// taken it; then it is anybody's.
    pub keep: Duration,
    /// With one, a holder's silence counts only while the apiserver answers: after a longer pause without an
    /// answer it begins anew. Nobody could have renewed, and whoever asked first would take the Lease from
    /// one that lives.
    pub gap: Option<Duration>,
}

impl Times {
    /// Of a member's Lease: helm runs live under it, and must be able to end.
    pub const MEMBER: Self = Self {
        duration: Duration::from_secs(60),
        renew_every: Duration::from_secs(15),
        retry: Duration::from_secs(3),
        call: Duration::from_secs(8),
        fresh: Duration::from_secs(30),
        keep: Duration::from_secs(45),
        gap: None,
    };

    /// Of the hub's lead, under which single writes are made: with 5 s, one that is killed is followed
    /// within 5.5 s.
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

    /// 1 % that the clocks of two machines may differ by, and then some.
    fn apart(longer: Duration, shorter: Duration) -> bool {
        longer.mul_f64(0.98) > shorter
    }

    #[test]
    fn a_holder_stops_before_another_may_begin() {
        for times in [Times::MEMBER, Times::of_lead(Duration::from_secs(5))] {
            assert!(apart(times.duration, times.fresh), "{times:?}");
            // One renewal may fail, and one more be made.
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
