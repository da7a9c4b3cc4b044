//! Locks and reads whose order a test can determine.
//!
//! Without the feature `simulation`, these are the locks of parking_lot. With it, a thread of a `schedule`
//! takes turns with the others at each lock and step. Any other thread runs as without the feature.

#[cfg(feature = "simulation")]
mod mutex;
#[cfg(feature = "simulation")]
pub mod schedule;

#[cfg(feature = "simulation")]
pub use self::mutex::{Mutex, MutexGuard};
#[cfg(feature = "simulation")]
pub use self::schedule::step;
#[cfg(not(feature = "simulation"))]
pub use parking_lot::{Mutex, MutexGuard};

/// Runs `action`. A schedule can run other threads before and after it.
#[cfg(not(feature = "simulation"))]
#[inline]
pub fn step<T>(action: impl FnOnce() -> T) -> T {
    action()
}
