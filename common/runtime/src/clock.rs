//! The clocks, read at the rim only.

use std::time::Duration;

use jiff::Timestamp;

/// Time since boot, suspension included, which no operator and no NTP step can move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(pub Duration);

impl BootTime {
    /// Reads CLOCK_BOOTTIME.
    pub fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
        let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
        Self(Duration::new(seconds, nanos))
    }

    /// How long ago `earlier` was; zero when it is not in the past.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// The wall clock, for what people read.
pub fn wall() -> Timestamp {
    Timestamp::now()
}

/// Sleeps until `at`, counted from `now`; for ever without one.
pub async fn sleep_until(at: Option<BootTime>, now: BootTime) {
    match at {
        Some(at) => tokio::time::sleep(at.since(now)).await,
        None => std::future::pending().await,
    }
}
