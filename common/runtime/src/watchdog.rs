//! Detects hanging work, such as a deadlock or a loop without an await point, and exits the process. The
//! restart repairs it. A hanging hub or agent would report no error and leave its work undone.
//!
//! The watchdog has a separate thread, because a hanging runtime cannot check itself. It counts the ticks of
//! that thread, not time, because a stopped process or a suspended machine has not hung.

use std::fmt::Write as _;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;

const TICK: Duration = Duration::from_secs(1);
/// Number of ticks after which the health endpoint reports the hang.
const LATE_TICKS: u32 = 20;
/// Number of ticks after which the process exits. No work of Krypton runs for a second without an await
/// point.
const STUCK_TICKS: u32 = 60;
/// Time limit of the last log message, because the hanging code may hold the log's lock.
const LAST_LOG_TIMEOUT: Duration = Duration::from_secs(2);

/// Watches tasks. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct Watchdog {
    tasks: Arc<Mutex<Vec<WatchedTask>>>,
}

#[derive(Debug)]
struct WatchedTask {
    name: String,
    polls: Weak<AtomicU64>,
    /// Whether the task must be polled all the time. Other tasks may wait for any time.
    always_active: bool,
    last: u64,
    ticks: u32,
}

impl WatchedTask {
    /// Counts a tick. `polls` is odd during a poll. Returns the number of ticks without required progress.
    fn tick(&mut self, polls: u64) -> u32 {
        let waits = polls.is_multiple_of(2) && !self.always_active;
        self.ticks = if waits || polls != self.last {
            0
        } else {
            self.ticks.saturating_add(1)
        };
        self.last = polls;
        self.ticks
    }
}

impl Watchdog {
    /// Starts to watch the current runtime, and each task given to `watch`, until the process exits.
    ///
    /// # Errors
    /// Returns an error if no thread can be started.
    pub fn start() -> io::Result<Self> {
        Self::start_with_tick(TICK)
    }

    fn start_with_tick(tick: Duration) -> io::Result<Self> {
        let watchdog = Self::default();
        tokio::spawn(watchdog.register("the runtime", true, async move {
            loop {
                tokio::time::sleep(tick).await;
            }
        }));
        let watchdog_clone = watchdog.clone();
        std::thread::Builder::new()
            .name("watchdog".to_owned())
            .stack_size(128 << 10)
            .spawn(move || {
                loop {
                    std::thread::sleep(tick);
                    if let Some((name, ticks)) = watchdog_clone.tick()
                        && ticks >= STUCK_TICKS
                    {
                        abort(&name);
                    }
                }
            })?;
        Ok(watchdog)
    }

    /// Returns the task, watched under a name for the log.
    pub fn watch<F: Future>(&self, name: impl Into<String>, task: F) -> WatchedFuture<F> {
        self.register(name, false, task)
    }

    fn register<F: Future>(
        &self,
        name: impl Into<String>,
        always_active: bool,
        task: F,
    ) -> WatchedFuture<F> {
        let polls = Arc::new(AtomicU64::new(0));
        self.tasks.lock().push(WatchedTask {
            name: name.into(),
            polls: Arc::downgrade(&polls),
            always_active,
            last: 0,
            ticks: 0,
        });
        WatchedFuture {
            task: Box::pin(task),
            polls,
        }
    }

    /// Returns the tasks that have hung long enough for a restart, for a liveness probe.
    pub fn problem(&self) -> Option<String> {
        let tasks = self.tasks.lock();
        let late = tasks.iter().filter(|task| task.ticks >= LATE_TICKS);
        let longest = late.max_by_key(|task| task.ticks)?;
        Some(format!(
            "{}: no progress for {} s",
            longest.name, longest.ticks
        ))
    }

    /// Returns the task that has hung longest.
    fn tick(&self) -> Option<(String, u32)> {
        let mut tasks = self.tasks.lock();
        // Stop watching tasks that have ended.
        tasks.retain_mut(|task| match task.polls.upgrade() {
            Some(polls) => {
                task.tick(polls.load(Ordering::Relaxed));
                true
            }
            None => false,
        });
        let longest = tasks.iter().max_by_key(|task| task.ticks)?;
        Some((longest.name.clone(), longest.ticks))
    }
}

/// A task that counts its polls and shows whether a poll is in progress.
#[derive(Debug)]
pub struct WatchedFuture<F> {
    task: Pin<Box<F>>,
    polls: Arc<AtomicU64>,
}

impl<F: Future> Future for WatchedFuture<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.polls.fetch_add(1, Ordering::Relaxed);
        let polled = self.task.as_mut().poll(context);
        self.polls.fetch_add(1, Ordering::Relaxed);
        polled
    }
}

/// Logs the state of every thread and exits the process immediately.
fn abort(name: &str) {
    let text = format!(
        "{name}: no progress for {STUCK_TICKS} s, which is a bug in Krypton; the process exits and restarts. Threads: {}",
        threads()
    );
    let logging = std::thread::Builder::new().spawn(move || tracing::error!("{text}"));
    drop(logging);
    std::thread::sleep(LAST_LOG_TIMEOUT);
    std::process::abort();
}

/// Returns the kernel's information about each thread: name, state and current system call.
fn threads() -> String {
    let mut text = String::new();
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return text;
    };
    for thread in threads.flatten() {
        let read =
            |file: &str| std::fs::read_to_string(thread.path().join(file)).unwrap_or_default();
        let stat = read("stat");
        let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        let state = state.split(' ').next().unwrap_or_default();
        let call = read("syscall");
        // Writing to a string fails only when memory runs out.
        write!(text, "{} {state} {}; ", read("comm").trim(), call.trim()).ok();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use rustix::process::Signal;

    use super::*;

    fn watched_task(always_active: bool) -> WatchedTask {
        WatchedTask {
            name: "it".to_owned(),
            polls: Weak::new(),
            always_active,
            last: 0,
            ticks: 0,
        }
    }

    #[test]
    fn stuck_poll_is_counted_but_waiting_is_not() {
        // Polls seen at each tick, and the resulting count.
        for (always_active, polls, expected) in [
            (false, [0, 0, 0, 0], [0, 0, 0, 0]),
            (false, [2, 2, 2, 2], [0, 0, 0, 0]),
            (false, [1, 1, 1, 1], [0, 1, 2, 3]),
            // Busy, but making progress.
            (false, [1, 3, 5, 7], [0, 0, 0, 0]),
            (false, [3, 3, 4, 5], [0, 1, 0, 0]),
            (true, [2, 4, 6, 8], [0, 0, 0, 0]),
            (true, [2, 2, 2, 4], [0, 1, 2, 0]),
            (true, [0, 0, 0, 0], [1, 2, 3, 4]),
        ] {
            let mut watched_task = watched_task(always_active);
            assert_eq!(
                polls.map(|polls| watched_task.tick(polls)),
                expected,
                "{polls:?}"
            );
        }
    }

    #[tokio::test]
    async fn hanging_task_is_named_until_it_ends() {
        let watchdog = Watchdog::default();
        assert_eq!(watchdog.watch("short", async { 7 }).await, 7);
        let waits = watchdog.watch("waits", std::future::pending::<()>());
        let hangs = watchdog.watch("hangs", async {
            for _ in 0..=LATE_TICKS {
                watchdog.tick();
            }
            watchdog.problem()
        });
        assert_eq!(
            hangs.await.as_deref(),
            Some(format!("hangs: no progress for {LATE_TICKS} s").as_str())
        );
        drop(waits);
        assert_eq!((watchdog.tick(), watchdog.problem()), (None, None));
    }

    /// Runs in a separate process: see [`process_with_hanging_task_aborts`].
    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "it hangs"]
    async fn task_that_hangs() {
        tracing_subscriber::fmt().init();
        let watchdog = Watchdog::start_with_tick(Duration::from_millis(10)).unwrap();
        let hangs = async {
            loop {
                std::thread::park();
            }
        };
        watchdog.watch("the loop", hangs).await
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "this test program again")]
    fn process_with_hanging_task_aborts() {
        let this = std::env::current_exe().unwrap();
        let output = std::process::Command::new(this)
            .args(["--ignored", "--exact", "watchdog::tests::task_that_hangs"])
            .arg("--nocapture")
            .output()
            .unwrap();
        let log = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            output.status.signal(),
            Some(Signal::ABORT.as_raw()),
            "{log}"
        );
        assert!(log.contains("the loop: no progress for 60 s"), "{log}");
    }

    #[test]
    fn every_thread_is_reported() {
        assert!(threads().matches("; ").count() >= 1, "{}", threads());
    }
}
