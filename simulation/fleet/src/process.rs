//! One simulated process: a paused runtime with its own clocks.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::path::PathBuf;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use futures::future::LocalBoxFuture;
use krypton_runtime::world;
use tokio::runtime::{Builder, LocalOptions, LocalRuntime, RngSeed};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::conductor::Millis;
use crate::outbox::{Outbox, ProcessId};
use crate::world::{Clocks, ProcessWorld};

thread_local! {
    /// Wakes the future that waits until the current runtime is idle.
    static WAITING: RefCell<Option<Waker>> = const { RefCell::new(None) };
    static IDLE: Cell<bool> = const { Cell::new(false) };
}

/// The main future of a process.
pub(crate) type Main = Box<dyn FnOnce() -> LocalBoxFuture<'static, Result<(), String>>>;

/// Gives a process something that arrives for it.
pub(crate) type Delivery = Box<dyn FnOnce()>;

pub(crate) struct Process {
    pub id: ProcessId,
    /// The machine or pod that it runs on, such as `hub-0`.
    pub host: String,
    /// `None` after a kill.
    runtime: Option<LocalRuntime>,
    world: Rc<ProcessWorld>,
    main: JoinHandle<Result<(), String>>,
    /// Global time of the start.
    started_at: Millis,
    /// Error of its clocks, in millionths.
    rate: i64,
    /// Total time of suspension, which its monotonic clock does not count.
    suspended: Millis,
    /// A stopped process does not run until this time.
    pub stopped_until: Option<Millis>,
    /// Folder of its files.
    pub folder: PathBuf,
}

pub(crate) struct Start {
    pub id: ProcessId,
    pub host: String,
    pub seed: u64,
    pub clocks: Clocks,
    pub rate: i64,
    pub at: Millis,
    pub folder: PathBuf,
    pub outbox: Outbox,
}

impl Process {
    pub(crate) fn start(start: Start, main: Main) -> std::io::Result<Self> {
        let mut seed = [0; 32];
        for (to, from) in seed.iter_mut().zip(start.seed.to_le_bytes()) {
            *to = from;
        }
        let runtime = Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .rng_seed(RngSeed::from_bytes(&seed))
            .on_thread_park(|| {
                if let Some(waker) = WAITING.take() {
                    IDLE.set(true);
                    waker.wake();
                }
            })
            .build_local(LocalOptions::default())?;
        let begin = runtime.block_on(async { Instant::now() });
        let world = Rc::new(ProcessWorld::new(
            start.id,
            start.outbox,
            start.seed,
            begin,
            start.clocks,
        ));
        let entered = world::enter(Rc::clone(&world) as Rc<dyn world::World>);
        let main = runtime.spawn_local(main());
        drop(entered);
        Ok(Self {
            id: start.id,
            host: start.host,
            runtime: Some(runtime),
            world,
            main,
            started_at: start.at,
            rate: start.rate,
            suspended: 0,
            stopped_until: None,
            folder: start.folder,
        })
    }

    /// Runs it up to this global time, hands it what arrives then, and runs it until it is idle.
    pub(crate) fn run(&mut self, at: Millis, arriving: Vec<Delivery>) {
        let target = self.world.started + Duration::from_millis(self.local(at));
        let Some(runtime) = &self.runtime else {
            return;
        };
        let _world = world::enter(Rc::clone(&self.world) as Rc<dyn world::World>);
        runtime.block_on(async {
            if Instant::now() < target {
                sleep_until(target).await;
            }
            for delivery in arriving {
                delivery();
            }
            idle().await;
        });
    }

    /// Lets it continue after a stop (SIGSTOP): all timers that are due fire at once.
    pub(crate) fn resume(&mut self, at: Millis) {
        self.stopped_until = None;
        let target = self.world.started + Duration::from_millis(self.local(at));
        let Some(runtime) = &self.runtime else {
            return;
        };
        let _world = world::enter(Rc::clone(&self.world) as Rc<dyn world::World>);
        runtime.block_on(async {
            let passed = target.saturating_duration_since(Instant::now());
            tokio::time::advance(passed).await;
        });
    }

    /// Its machine was suspended for this time: only the boot clock and the wall clock have advanced.
    pub(crate) fn suspended_for(&mut self, length: Millis) {
        self.suspended += length;
        let mut clocks = self.world.clocks.get();
        clocks.suspended += Duration::from_millis(length);
        self.world.clocks.set(clocks);
    }

    /// Changes the error of its wall clock.
    pub(crate) fn skew(&self, by: jiff::SignedDuration) {
        let mut clocks = self.world.clocks.get();
        clocks.skew += by;
        self.world.clocks.set(clocks);
    }

    /// Returns how the main future ended, once.
    pub(crate) fn ended(&mut self) -> Option<Result<(), String>> {
        let runtime = self.runtime.as_ref().filter(|_| self.main.is_finished())?;
        let ended = runtime.block_on(&mut self.main);
        Some(ended.unwrap_or_else(|error| Err(error.to_string())))
    }

    /// The time since boot at a global time.
    pub(crate) fn boot(&self, at: Millis) -> Duration {
        let clocks = self.world.clocks.get();
        clocks.boot + clocks.suspended + Duration::from_millis(self.local(at))
    }

    /// The first global time at which its boot clock shows at least `boot`.
    pub(crate) fn when(&self, boot: Duration) -> Millis {
        let clocks = self.world.clocks.get();
        let local = boot.saturating_sub(clocks.boot + clocks.suspended);
        let local = i64::try_from(local.as_millis()).unwrap_or(i64::MAX / 2_000_000);
        let passed = local.saturating_mul(1_000_000) / (1_000_000 + self.rate);
        let passed = u64::try_from(passed).unwrap_or_default();
        self.started_at + self.suspended + passed + 1
    }

    fn local(&self, at: Millis) -> Millis {
        let passed = at.saturating_sub(self.started_at + self.suspended);
        let passed = i64::try_from(passed).unwrap_or(i64::MAX);
        let error = passed.saturating_mul(self.rate) / 1_000_000;
        u64::try_from(passed + error).unwrap_or_default()
    }
}

impl Drop for Process {
    /// Kills it. Its destructors run, but they neither send anything nor reach its files.
    fn drop(&mut self) {
        let outbox = self.world.outbox.clone();
        outbox.mute(Some(self.id));
        let away = self.folder.with_extension("killed");
        let moved = std::fs::rename(&self.folder, &away).is_ok();
        {
            let _world = world::enter(Rc::clone(&self.world) as Rc<dyn world::World>);
            drop(self.runtime.take());
        }
        if moved {
            // The destructors may have created the folder again.
            drop(std::fs::remove_dir_all(&self.folder));
            drop(std::fs::rename(&away, &self.folder));
        }
        outbox.mute(None);
    }
}

/// Waits until the runtime has nothing else to do at this instant.
async fn idle() {
    IDLE.set(false);
    poll_fn(|context| {
        if IDLE.replace(false) {
            return Poll::Ready(());
        }
        WAITING.set(Some(context.waker().clone()));
        Poll::Pending
    })
    .await;
}
