//! The surroundings of one simulated process: its clocks, its generator and its transport.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use krypton_runtime::access::Transport;
use krypton_runtime::world::World;
use kube::Config;
use kube::client::ClientBuilder;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{Rng as _, SeedableRng as _};
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::outbox::{Outbox, ProcessId};
use crate::transport::transport;

/// The clocks of one process, relative to its monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clocks {
    /// Time since boot when the process started.
    pub boot: Duration,
    /// Wall time when the process started.
    pub wall: Timestamp,
    /// Suspensions since then, which the monotonic clock does not count.
    pub suspended: Duration,
    /// Error of the wall clock since then.
    pub skew: SignedDuration,
}

#[derive(Debug)]
pub(crate) struct ProcessWorld {
    pub process: ProcessId,
    pub outbox: Outbox,
    pub clocks: Cell<Clocks>,
    /// Reading of the monotonic clock at the start.
    pub started: Instant,
    /// The last reading of the monotonic clock, for destructors that run outside the runtime.
    last_elapsed: Cell<Duration>,
    generator: RefCell<Xoshiro256PlusPlus>,
}

impl ProcessWorld {
    pub(crate) fn new(
        process: ProcessId,
        outbox: Outbox,
        seed: u64,
        started: Instant,
        clocks: Clocks,
    ) -> Self {
        Self {
            process,
            outbox,
            clocks: Cell::new(clocks),
            started,
            last_elapsed: Cell::default(),
            generator: RefCell::new(Xoshiro256PlusPlus::seed_from_u64(seed)),
        }
    }

    fn elapsed(&self) -> Duration {
        if Handle::try_current().is_ok() {
            self.last_elapsed.set(Instant::now() - self.started);
        }
        self.last_elapsed.get()
    }
}

impl World for ProcessWorld {
    fn random(&self, bytes: &mut [u8]) {
        self.generator.borrow_mut().fill_bytes(bytes);
    }

    fn transport(&self, config: Config) -> Result<ClientBuilder<Transport>, kube::Error> {
        transport(config, self.process, self.outbox.clone())
    }

    fn boot_time(&self) -> Duration {
        let clocks = self.clocks.get();
        clocks.boot + clocks.suspended + self.elapsed()
    }

    fn wall(&self) -> Timestamp {
        let clocks = self.clocks.get();
        let elapsed = SignedDuration::try_from(clocks.suspended + self.elapsed());
        let elapsed = elapsed.unwrap_or_default() + clocks.skew;
        clocks.wall.saturating_add(elapsed).unwrap_or(clocks.wall)
    }
}
