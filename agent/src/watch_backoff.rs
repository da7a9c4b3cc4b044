//! How long a watch that has failed waits before it tries again.

use std::time::Duration;

use kube::runtime::utils::Backoff;

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(8);

/// Half a second, doubling to eight, the upper half of it left to chance; from the start again after
/// a success. kube's own goes to 30 s and forgets only after two minutes: an apiserver that is back
/// would not be followed for as long again, since the first answer after an outage is often that
/// the resourceVersion is gone.
#[derive(Debug, Default)]
pub struct WatchBackoff {
    failures: u32,
}

fn pause(failures: u32, jitter: f64) -> Duration {
    let full = FIRST.saturating_mul(1 << failures.min(10)).min(LONGEST);
    full / 2 + full.mul_f64(jitter / 2.0)
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = pause(self.failures, rand::random());
        self.failures = self.failures.saturating_add(1);
        Some(pause)
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_never_waits_longer_than_eight_seconds_nor_less_than_a_quarter() {
        for failures in [0, 1, 5, 60, u32::MAX] {
            assert!(pause(failures, 0.0) >= Duration::from_millis(250));
            assert!(pause(failures, 1.0) <= LONGEST);
        }
        assert_eq!(pause(0, 1.0), FIRST);
        assert_eq!(pause(2, 1.0), FIRST * 4);
    }

    #[test]
    fn a_success_begins_anew() {
        let mut waits = WatchBackoff::default();
        for _ in 0..20 {
            waits.next();
        }
        waits.reset();
        assert!(waits.next() <= Some(FIRST));
    }
}
