//! The clock of this machine, as far as commands depend on it.

use std::time::Instant;

use jiff::Timestamp;

/// The clock of this machine since the start of the command, which may wait for a login.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalClock {
    start: Timestamp,
    started: Instant,
}

impl LocalClock {
    pub(crate) fn start(now: Timestamp) -> Self {
        Self {
            start: now,
            started: Instant::now(),
        }
    }

    pub(crate) fn now(self) -> Timestamp {
        let now = self.start.saturating_add(self.started.elapsed());
        now.unwrap_or(self.start)
    }
}
