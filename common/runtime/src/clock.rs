//! Clocks of the system. Only code at the I/O boundary reads them.

use std::ops::{Add, AddAssign};
use std::time::Duration;

use jiff::Timestamp;

/// Time since boot, including suspension. Neither an administrator nor NTP can change it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(pub Duration);

impl BootTime {
    /// Reads CLOCK_BOOTTIME. On other systems than Linux, returns the time since the first call.
    pub fn now() -> Self {
        #[cfg(feature = "simulation")]
        if let Some(world) = crate::world::current() {
            return Self(world.boot_time());
        }
        Self(since_boot())
    }

    /// Returns the time since `earlier`, or zero if `earlier` is not in the past.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for BootTime {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0 + duration)
    }
}

impl AddAssign<Duration> for BootTime {
    fn add_assign(&mut self, duration: Duration) {
        self.0 += duration;
    }
}

#[cfg(target_os = "linux")]
fn since_boot() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
    Duration::new(seconds, nanos)
}

#[cfg(not(target_os = "linux"))]
fn since_boot() -> Duration {
    static FIRST_CALL: std::sync::LazyLock<std::time::Instant> =
        std::sync::LazyLock::new(std::time::Instant::now);
    FIRST_CALL.elapsed()
}

/// Reads the wall clock, for times that users read.
pub fn wall() -> Timestamp {
    #[cfg(feature = "simulation")]
    if let Some(world) = crate::world::current() {
        return world.wall();
    }
    Timestamp::now()
}

/// Sleeps until `at`, relative to `now`. Sleeps forever if `at` is `None`.
pub async fn sleep_until(at: Option<BootTime>, now: BootTime) {
    match at {
        Some(at) => tokio::time::sleep(at.since(now)).await,
        None => std::future::pending().await,
    }
}
