//! Runs threads one at a time, in many orders, and finds deadlocks and lost wake-ups.
//!
//! The threads are real, and take turns. A turn ends before and after a lock of a [`Mutex`](super::Mutex), before and
//! after a [`step`], and when a future of [`block_on`] waits. A generator chooses the next thread, so the number of a
//! schedule determines it. A schedule fails if all threads that have not ended wait.
//!
//! The schedule doesn't control the locks inside other crates. If a thread waits for one, such as the lock of a watch
//! channel, the others continue after [`STALL`]. The schedule fails if none of them ends that wait.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};

/// Time without a turn after which the running thread counts as stuck, and another one runs. On a slow machine, a thread
/// that is not stuck may exceed it. Two threads then run at the same time, as they would without a schedule.
pub const STALL: Duration = Duration::from_millis(100);
/// Number of stalls after which stuck threads count as deadlocked. Only a failing schedule takes so long.
const STALLS_MAX: u32 = 50;
/// Number of turns of one schedule. More of them mean that the threads wait in a loop.
const TURNS_MAX: u64 = 100_000;

/// The threads of one schedule, and a check of their result.
#[derive(Default)]
pub struct Scene {
    threads: Vec<(&'static str, ThreadBody)>,
    end: Option<Box<dyn FnOnce()>>,
}

type ThreadBody = Box<dyn FnOnce() + Send>;

impl Scene {
    /// Adds a thread.
    pub fn thread(&mut self, name: &'static str, body: impl FnOnce() + Send + 'static) {
        self.threads.push((name, Box::new(body)));
    }

    /// Adds a thread that runs a future.
    pub fn task(&mut self, name: &'static str, future: impl Future<Output = ()> + Send + 'static) {
        self.thread(name, || block_on(future));
    }

    /// Sets the check to run after all threads have ended.
    pub fn end(&mut self, check: impl FnOnce() + 'static) {
        self.end = Some(Box::new(check));
    }
}

impl fmt::Debug for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.threads.iter().map(|(name, _)| name);
        f.debug_list().entries(names).finish()
    }
}

/// The first schedule that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("schedule {number}: {problem}")]
pub struct Failure {
    /// Number of schedules that have succeeded before.
    pub number: u64,
    pub problem: String,
}

/// Runs the threads of `arrange` in `schedules` different orders. Panics if one of them fails.
pub fn check(schedules: u64, arrange: impl Fn(&mut Scene)) {
    if let Err(failure) = explore(schedules, arrange) {
        panic!("{failure}");
    }
}

/// Runs the threads of `arrange` in `schedules` different orders.
///
/// # Errors
/// Fails at the first schedule with a deadlock, a lost wake-up or a panic. Its threads may stay blocked until the process
/// ends.
pub fn explore(schedules: u64, arrange: impl Fn(&mut Scene)) -> Result<(), Failure> {
    for number in 0..schedules {
        let mut scene = Scene::default();
        arrange(&mut scene);
        run(number, scene).map_err(|problem| Failure { number, problem })?;
    }
    Ok(())
}

fn run(number: u64, scene: Scene) -> Result<(), String> {
    let (names, bodies): (Vec<_>, Vec<_>) = scene.threads.into_iter().unzip();
    let run = Arc::new(ScheduleRun {
        state: Mutex::new(State::new(number, &names)),
        turns: names.iter().map(|_| Condvar::new()).collect(),
        progress: Condvar::new(),
    });
    let threads = bodies.into_iter().enumerate().map(|(number, body)| {
        let run = Arc::clone(&run);
        thread::spawn(move || ThreadHandle { run, number }.run_body(body))
    });
    let threads: Vec<_> = threads.collect();
    run.supervise()?;
    for thread in threads {
        thread.join().map_err(|panic| panic_text(&*panic))?;
    }
    let end = scene.end.unwrap_or_else(|| Box::new(|| ()));
    catch_unwind(AssertUnwindSafe(end)).map_err(|panic| panic_text(&*panic))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("panicked").to_owned()
}

/// One schedule.
#[derive(Debug)]
struct ScheduleRun {
    state: Mutex<State>,
    /// Notified when the thread of this number runs, or when the schedule fails.
    turns: Vec<Condvar>,
    /// Notified when the last thread ends, or when the schedule fails.
    progress: Condvar,
}

#[derive(Debug)]
struct State {
    generator: Xoshiro256PlusPlus,
    threads: Vec<Thread>,
    running: Option<usize>,
    /// Number of turns so far.
    turns: u64,
    /// The thread that holds a mutex, by the address of the mutex.
    holders: BTreeMap<usize, usize>,
    failure: Option<String>,
}

#[derive(Debug)]
struct Thread {
    name: &'static str,
    state: ThreadState,
    /// Its future was woken since the start of the last poll.
    woken: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThreadState {
    Ready,
    Running,
    /// Waits for the mutex at this address.
    Locked(usize),
    /// Waits until its future is woken.
    Asleep,
    /// Waits for something that the schedule doesn't know.
    Stuck,
    Ended,
}

impl State {
    fn new(number: u64, names: &[&'static str]) -> Self {
        let thread = |name: &&'static str| Thread {
            name,
            state: ThreadState::Ready,
            woken: false,
        };
        Self {
            generator: Xoshiro256PlusPlus::seed_from_u64(number),
            threads: names.iter().map(thread).collect(),
            running: None,
            turns: 0,
            holders: BTreeMap::new(),
            failure: None,
        }
    }

    fn in_state(&self, state: ThreadState) -> impl Iterator<Item = usize> {
        let threads = self.threads.iter().enumerate();
        let matching = threads.filter(move |(_, thread)| thread.state == state);
        matching.map(|(number, _)| number)
    }

    fn is_over(&self) -> bool {
        self.failure.is_some() || self.in_state(ThreadState::Ended).count() == self.threads.len()
    }

    /// Describes why each thread that has not ended waits.
    fn describe_waits(&self) -> String {
        let wait = |thread: &Thread| {
            let reason = match thread.state {
                ThreadState::Locked(mutex) => match self.holders.get(&mutex) {
                    Some(holder) => format!("waits for a mutex of {}", self.threads[*holder].name),
                    None => "waits for a mutex".to_owned(),
                },
                ThreadState::Asleep => "is never woken".to_owned(),
                ThreadState::Stuck => "is stuck".to_owned(),
                ThreadState::Ready | ThreadState::Running | ThreadState::Ended => return None,
            };
            Some(format!("{} {reason}", thread.name))
        };
        let waits: Vec<String> = self.threads.iter().filter_map(wait).collect();
        waits.join(", ")
    }
}

impl ScheduleRun {
    /// Starts the first thread, and waits until all have ended.
    fn supervise(&self) -> Result<(), String> {
        let mut state = self.state.lock();
        self.give_turn(&mut state);
        let (mut turns, mut stalls) = (state.turns, 0);
        while !state.is_over() {
            self.progress.wait_for(&mut state, STALL);
            if state.turns != turns {
                (turns, stalls) = (state.turns, 0);
                continue;
            }
            stalls += 1;
            if let Some(stuck) = state.running.take() {
                state.threads[stuck].state = ThreadState::Stuck;
                self.give_turn(&mut state);
            } else if stalls > STALLS_MAX {
                self.fail(&mut state, None);
            }
        }
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// Lets one of the ready threads run.
    fn give_turn(&self, state: &mut State) {
        state.turns += 1;
        if state.turns > TURNS_MAX {
            return self.fail(state, Some("the threads never end".to_owned()));
        }
        let ready: Vec<usize> = state.in_state(ThreadState::Ready).collect();
        if !ready.is_empty() {
            let next = ready[state.generator.random_range(0..ready.len())];
            state.threads[next].state = ThreadState::Running;
            state.running = Some(next);
            self.turns[next].notify_one();
            return;
        }
        state.running = None;
        if state.is_over() {
            self.progress.notify_one();
        } else if state.in_state(ThreadState::Stuck).next().is_none() {
            self.fail(state, None);
        }
    }

    /// Ends the schedule. Without a `problem`, it is a deadlock.
    fn fail(&self, state: &mut State, problem: Option<String>) {
        let problem = problem.unwrap_or_else(|| format!("deadlock: {}", state.describe_waits()));
        state.failure.get_or_insert(problem);
        for turn in &self.turns {
            turn.notify_one();
        }
        self.progress.notify_one();
    }
}

thread_local! {
    static CURRENT_THREAD: RefCell<Option<ThreadHandle>> = const { RefCell::new(None) };
}

/// One thread of a schedule.
#[derive(Clone, Debug)]
struct ThreadHandle {
    run: Arc<ScheduleRun>,
    number: usize,
}

/// Unwinds a thread whose schedule has failed.
struct ScheduleFailed;

impl ThreadHandle {
    fn current() -> Option<Self> {
        // While the thread ends, the variable may be gone already.
        let handle = CURRENT_THREAD.try_with(|handle| handle.borrow().clone());
        handle.ok().flatten()
    }

    fn run_body(self, body: ThreadBody) {
        CURRENT_THREAD.set(Some(self.clone()));
        let result = catch_unwind(AssertUnwindSafe(|| {
            let mut state = self.run.state.lock();
            self.wait(&mut state);
            self.unwind_if_failed(state);
            body();
        }));
        CURRENT_THREAD.set(None);
        let mut state = self.run.state.lock();
        state.threads[self.number].state = ThreadState::Ended;
        match result {
            Err(panic) if !panic.is::<ScheduleFailed>() => {
                let name = state.threads[self.number].name;
                let problem = format!("{name} panicked: {}", panic_text(&*panic));
                self.run.fail(&mut state, Some(problem));
            }
            _ => self.give_turn(&mut state),
        }
    }

    /// Gives the turn to another thread until this one is chosen again.
    fn pause(&self, next: ThreadState) {
        let mut state = self.run.state.lock();
        self.pass_turn(&mut state, next);
        self.unwind_if_failed(state);
    }

    /// Unwinds the thread if the schedule has failed.
    fn unwind_if_failed(&self, state: MutexGuard<'_, State>) {
        let failed = state.failure.is_some();
        drop(state);
        if failed && !thread::panicking() {
            resume_unwind(Box::new(ScheduleFailed));
        }
    }

    fn pass_turn(&self, state: &mut MutexGuard<'_, State>, next: ThreadState) {
        state.threads[self.number].state = next;
        self.give_turn(state);
        self.wait(state);
    }

    /// Gives the turn away, unless another thread has run since this one was stuck.
    fn give_turn(&self, state: &mut State) {
        if state.running.is_none_or(|running| running == self.number) {
            self.run.give_turn(state);
        }
    }

    /// Waits until it is this thread's turn, or the schedule has failed.
    fn wait(&self, state: &mut MutexGuard<'_, State>) {
        let turn = &self.run.turns[self.number];
        while state.failure.is_none() && state.running != Some(self.number) {
            // On a busy machine, a thread can lose its turn before it wakes up.
            if state.threads[self.number].state == ThreadState::Stuck {
                state.threads[self.number].state = ThreadState::Ready;
                self.give_turn(state);
                continue;
            }
            turn.wait(state);
        }
    }
}

/// Runs `action`. A schedule can run other threads before and after it.
pub fn step<T>(action: impl FnOnce() -> T) -> T {
    let handle = ThreadHandle::current();
    let pause = || {
        handle
            .iter()
            .for_each(|handle| handle.pause(ThreadState::Ready))
    };
    pause();
    let result = action();
    pause();
    result
}

/// The right of a thread to lock a mutex, unless the thread is not part of a schedule.
#[derive(Debug)]
pub(super) struct Claim(Option<(ThreadHandle, usize)>);

impl Claim {
    /// Waits until no other thread of the schedule holds `mutex`.
    pub(super) fn new(mutex: usize) -> Self {
        let handle = ThreadHandle::current().filter(|_| !thread::panicking());
        if let Some(handle) = &handle {
            handle.pause(ThreadState::Ready);
            let mut state = handle.run.state.lock();
            while state.failure.is_none() && state.holders.contains_key(&mutex) {
                handle.pass_turn(&mut state, ThreadState::Locked(mutex));
            }
            state.holders.insert(mutex, handle.number);
            handle.unwind_if_failed(state);
        }
        Self(handle.map(|handle| (handle, mutex)))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Some((handle, mutex)) = self.0.take() else {
            return;
        };
        let mut state = handle.run.state.lock();
        state.holders.remove(&mutex);
        for thread in &mut state.threads {
            if thread.state == ThreadState::Locked(mutex) {
                thread.state = ThreadState::Ready;
            }
        }
        // A thread of a failed schedule unwinds at its next lock, because a destructor must not.
        if state.failure.is_none() && !thread::panicking() {
            handle.pass_turn(&mut state, ThreadState::Ready);
        }
    }
}

/// Runs a future to its end in a thread of a schedule. Panics in any other thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let handle = ThreadHandle::current().expect("a schedule runs this thread");
    let waker = Waker::from(Arc::new(ThreadWaker(handle.clone())));
    let mut future = pin!(future);
    loop {
        handle.pause(ThreadState::Ready);
        handle.run.state.lock().threads[handle.number].woken = false;
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        if !handle.run.state.lock().threads[handle.number].woken {
            handle.pause(ThreadState::Asleep);
        }
    }
}

/// Wakes the future of a thread.
struct ThreadWaker(ThreadHandle);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        let ThreadHandle { run, number } = &self.0;
        let mut state = run.state.lock();
        let thread = &mut state.threads[*number];
        thread.woken = true;
        if thread.state == ThreadState::Asleep {
            thread.state = ThreadState::Ready;
            if state.running.is_none() {
                run.give_turn(&mut state);
            }
        }
    }
}

#[cfg(test)]
mod tests;
