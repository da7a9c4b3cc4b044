//! Mistakes that schedules must find, and correct programs that they must accept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{Notify, watch};

use super::super::Mutex;
use super::*;
use crate::newest::Newest as _;

const SCHEDULES: u64 = 500;

/// Returns the problem of the first schedule that fails. It must be the same in each exploration.
fn problem(arrange: impl Fn(&mut Scene)) -> String {
    let failure = explore(SCHEDULES, &arrange).unwrap_err();
    assert_eq!(explore(SCHEDULES, &arrange), Err(failure.clone()));
    println!("{failure}");
    failure.problem
}

/// Locks one mutex under the other in each of two threads.
fn two_locks(scene: &mut Scene, opposite: bool) {
    let locks = [Arc::new(Mutex::new(0)), Arc::new(Mutex::new(0))];
    for (name, swapped) in [("first", false), ("second", opposite)] {
        let mut locks = locks.clone();
        if swapped {
            locks.reverse();
        }
        scene.thread(name, move || {
            let mut outer = locks[0].lock();
            *outer += 1;
            *locks[1].lock() += *outer;
        });
    }
    let [_, last] = locks;
    scene.end(move || assert!(opposite || *last.lock() == 3));
}

#[test]
fn opposite_lock_order_is_found() {
    let problem = problem(|scene| two_locks(scene, true));
    for thread in ["first", "second"] {
        assert!(problem.contains(&format!("waits for a mutex of {thread}")));
    }
}

#[test]
fn same_lock_order_succeeds() {
    check(SCHEDULES, |scene| two_locks(scene, false));
}

/// A thread sets a flag, and another one waits for it.
fn set_and_wait_for_flag(scene: &mut Scene, notify: fn(&Notify)) {
    let state = Arc::new((Mutex::new(false), Notify::new()));
    let setter = Arc::clone(&state);
    scene.thread("setter", move || {
        *setter.0.lock() = true;
        notify(&setter.1);
    });
    scene.task("waiter", async move {
        loop {
            let set = *state.0.lock();
            if set {
                return;
            }
            state.1.notified().await;
        }
    });
}

#[test]
fn lost_wake_up_is_found() {
    let problem = problem(|scene| set_and_wait_for_flag(scene, Notify::notify_waiters));
    assert_eq!(problem, "deadlock: waiter is never woken");
}

#[test]
fn wake_up_before_wait_succeeds() {
    check(SCHEDULES, |scene| {
        set_and_wait_for_flag(scene, Notify::notify_one)
    });
}

/// A second read under the guard of a watch channel waits behind a writer.
#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "shows why the guards are forbidden"
)]
fn second_read_under_guard_is_found() {
    let failure = explore(SCHEDULES, |scene| {
        let (sender, receiver) = watch::channel(0);
        scene.thread("reader", move || {
            let first = receiver.borrow();
            assert!(*first <= receiver.get());
        });
        scene.thread("writer", move || {
            sender.send_replace(1);
        });
    });
    let problem = failure.unwrap_err().problem;
    assert_eq!(problem, "deadlock: reader is stuck, writer is stuck");
}

/// A writer that waits for the guard of a watch channel continues once it is dropped.
#[test]
#[expect(clippy::disallowed_methods, reason = "takes the lock of a channel")]
fn wait_for_unknown_lock_is_not_a_deadlock() {
    check(3, |scene| {
        let (sender, receiver) = watch::channel(0);
        scene.thread("reader", move || {
            let first = receiver.borrow();
            step(|| assert_eq!(*first, 0));
        });
        scene.thread("writer", move || {
            sender.send_replace(0);
        });
    });
}

#[test]
fn panic_and_failed_check_name_their_schedule() {
    let problem = problem(|scene| scene.thread("only", || panic!("a mistake")));
    assert_eq!(problem, "only panicked: a mistake");
    let failure = explore(1, |scene| scene.end(|| panic!("wrong")));
    assert_eq!(failure.unwrap_err().to_string(), "schedule 0: wrong");
}

#[test]
fn endless_threads_are_found() {
    let problem = problem(|scene| {
        scene.thread("only", || while step(|| true) {});
    });
    assert_eq!(problem, "the threads never end");
}

#[test]
fn race_between_two_steps_is_found() {
    let problem = problem(|scene| {
        let taken = Arc::new(AtomicBool::new(false));
        for name in ["first", "second"] {
            let taken = Arc::clone(&taken);
            scene.thread(name, move || {
                if !step(|| taken.load(Ordering::Relaxed)) {
                    assert!(!taken.swap(true, Ordering::Relaxed), "taken twice");
                }
            });
        }
    });
    assert!(problem.ends_with("taken twice"), "{problem}");
}
