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

use crate::outbox::{Outbox, ProcessId};
use crate::time::Millis;
use crate::world::{Clocks, ProcessWorld};

thread_local! {
    /// Wakes the future that waits until the current runtime is idle.
    static IDLE_WAKER: RefCell<Option<Waker>> = const { RefCell::new(None) };
    static IS_IDLE: Cell<bool> = const { Cell::new(false) };
}

/// The main function of a process.
pub(crate) type MainFunction = Box<dyn FnOnce() -> LocalBoxFuture<'static, Result<(), String>>>;

/// Delivers a message to a process. It runs inside the process.
pub(crate) type Delivery = Box<dyn FnOnce()>;

pub(crate) struct Process {
    pub id: ProcessId,
    /// The machine or pod of the process, such as `hub-0`.
    pub host: String,
    /// `None` after a kill.
    runtime: Option<LocalRuntime>,
    world: Rc<ProcessWorld>,
    main: JoinHandle<Result<(), String>>,
    /// Global time of the start.
    started_at: Millis,
    /// Error of its clocks, in millionths.
    drift_ppm: i64,
    /// Total time of suspension, which its monotonic clock does not count.
    suspended: Millis,
    /// A stopped process does not run until this time.
    pub stopped_until: Option<Millis>,
    /// Folder of its files.
    pub folder: PathBuf,
}

pub(crate) struct ProcessConfig {
    pub id: ProcessId,
    pub host: String,
    pub seed: u64,
    pub clocks: Clocks,
    pub drift_ppm: i64,
    pub started_at: Millis,
    pub folder: PathBuf,
    pub outbox: Outbox,
}

impl Process {
    pub(crate) fn start(config: ProcessConfig, main: MainFunction) -> std::io::Result<Self> {
        let mut seed = [0; 32];
        for (to, from) in seed.iter_mut().zip(config.seed.to_le_bytes()) {
            *to = from;
        }
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .rng_seed(RngSeed::from_bytes(&seed))
            .on_thread_park(|| {
                if let Some(waker) = IDLE_WAKER.take() {
                    IS_IDLE.set(true);
                    waker.wake();
                }
            })
            .build_local(LocalOptions::default())?;
        let started = runtime.block_on(async { Instant::now() });
        let world = Rc::new(ProcessWorld::new(
            config.id,
            config.outbox,
            config.seed,
            started,
            config.clocks,
        ));
        let guard = world::enter(Rc::clone(&world) as Rc<dyn world::World>);
        let main = runtime.spawn_local(main());
        drop(guard);
        Ok(Self {
            id: config.id,
            host: config.host,
            runtime: Some(runtime),
            world,
            main,
            started_at: config.started_at,
            drift_ppm: config.drift_ppm,
            suspended: 0,
            stopped_until: None,
            folder: config.folder,
        })
    }

    /// Runs it up to this global time, carries out the deliveries, and runs it until it is idle.
    pub(crate) fn run(&mut self, at: Millis, deliveries: Vec<Delivery>) {
        let target = self.world.started + Duration::from_millis(self.local_time(at));
        let Some(runtime) = &self.runtime else {
            return;
        };
        let _guard = world::enter(Rc::clone(&self.world) as Rc<dyn world::World>);
        runtime.block_on(async {
            if Instant::now() < target {
                sleep_until(target).await;
            }
            for delivery in deliveries {
                delivery();
            }
            wait_until_idle().await;
        });
    }

    /// Lets it continue after a stop (SIGSTOP): all due timers fire immediately.
    pub(crate) fn resume(&mut self, at: Millis) {
        self.stopped_until = None;
        let target = self.world.started + Duration::from_millis(self.local_time(at));
        let Some(runtime) = &self.runtime else {
            return;
        };
        let _guard = world::enter(Rc::clone(&self.world) as Rc<dyn world::World>);
        runtime.block_on(async {
            let elapsed = target.saturating_duration_since(Instant::now());
            tokio::time::advance(elapsed).await;
        });
    }

    /// Its machine was suspended for this time: only the boot clock and the wall clock have advanced.
    pub(crate) fn add_suspension(&mut self, length: Millis) {
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

    /// Returns the result of the main function, once.
    pub(crate) fn take_exit(&mut self) -> Option<Result<(), String>> {
        let runtime = self.runtime.as_ref().filter(|_| self.main.is_finished())?;
        let exit = runtime.block_on(&mut self.main);
        Some(exit.unwrap_or_else(|error| Err(error.to_string())))
    }

    /// The time since boot at a global time.
    pub(crate) fn boot_time(&self, at: Millis) -> Duration {
        let clocks = self.world.clocks.get();
        clocks.boot + clocks.suspended + Duration::from_millis(self.local_time(at))
    }

    /// The first global time at which its boot clock shows at least `boot_time`.
    pub(crate) fn time_at_boot_time(&self, boot_time: Duration) -> Millis {
        let clocks = self.world.clocks.get();
        let local = boot_time.saturating_sub(clocks.boot + clocks.suspended);
        let local = i64::try_from(local.as_millis()).unwrap_or(i64::MAX / 2_000_000);
        let elapsed = local.saturating_mul(1_000_000) / (1_000_000 + self.drift_ppm);
        let elapsed = u64::try_from(elapsed).unwrap_or_default();
        self.started_at + self.suspended + elapsed + 1
    }

    fn local_time(&self, at: Millis) -> Millis {
        let elapsed = at.saturating_sub(self.started_at + self.suspended);
        let elapsed = i64::try_from(elapsed).unwrap_or(i64::MAX);
        let error = elapsed.saturating_mul(self.drift_ppm) / 1_000_000;
        u64::try_from(elapsed + error).unwrap_or_default()
    }
}

impl Drop for Process {
    /// Kills it. Its destructors run, but they neither send anything nor reach its files.
    fn drop(&mut self) {
        let outbox = self.world.outbox.clone();
        outbox.mute(Some(self.id));
        let moved_folder = self.folder.with_extension("killed");
        let is_moved = std::fs::rename(&self.folder, &moved_folder).is_ok();
        {
            let _guard = world::enter(Rc::clone(&self.world) as Rc<dyn world::World>);
            drop(self.runtime.take());
        }
        if is_moved {
            // The destructors may have created the folder again.
            drop(std::fs::remove_dir_all(&self.folder));
            drop(std::fs::rename(&moved_folder, &self.folder));
        }
        outbox.mute(None);
    }
}

/// Waits until the runtime has nothing else to do at this instant.
async fn wait_until_idle() {
    IS_IDLE.set(false);
    poll_fn(|context| {
        if IS_IDLE.replace(false) {
            return Poll::Ready(());
        }
        IDLE_WAKER.set(Some(context.waker().clone()));
        Poll::Pending
    })
    .await;
}
