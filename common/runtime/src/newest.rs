//! Reads of a watch channel that hold no lock once they return.
//!
//! The guard of `borrow` holds the channel's read lock. While a writer waits for that lock, the lock admits no other
//! reader. A second read in the same thread then waits for the writer, and the writer waits for the guard: a deadlock.
//! `clippy.toml` forbids the guards everywhere else.

#![expect(
    clippy::disallowed_methods,
    reason = "the one place that takes the guards"
)]

use tokio::sync::watch;

use crate::sync::step;

/// The newest value of a watch channel, as a copy.
pub trait Newest<T> {
    /// Copies the newest value.
    fn get(&self) -> T;
}

/// The same for a receiver, which also tracks whether it has seen the value.
pub trait NewestSeen<T>: Newest<T> {
    /// Copies the newest value and marks it as seen: `changed` waits for another one.
    fn get_and_update(&mut self) -> T;
}

/// Writes that leave the channel alone if the value is unchanged.
pub trait SendIfChanged<T> {
    /// Publishes `value` if it differs from the newest one, and returns whether it does. An equal value takes no
    /// write lock and wakes no reader.
    fn send_if_changed(&self, value: T) -> bool;
}

impl<T: Clone> Newest<T> for watch::Receiver<T> {
    fn get(&self) -> T {
        step(|| self.borrow().clone())
    }
}

impl<T: Clone> Newest<T> for watch::Sender<T> {
    fn get(&self) -> T {
        step(|| self.borrow().clone())
    }
}

impl<T: Clone> NewestSeen<T> for watch::Receiver<T> {
    fn get_and_update(&mut self) -> T {
        step(|| self.borrow_and_update().clone())
    }
}

impl<T: PartialEq> SendIfChanged<T> for watch::Sender<T> {
    fn send_if_changed(&self, value: T) -> bool {
        if step(|| *self.borrow() == value) {
            return false;
        }
        // Another writer may have come first.
        self.send_if_modified(|newest| {
            let is_changed = *newest != value;
            *newest = value;
            is_changed
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    const ROUNDS: u64 = 200_000;
    /// Ends a test that hangs. No test that passes waits for it.
    const DEADLINE: Duration = Duration::from_secs(60);

    /// Runs `read` and a writer in two threads, and returns whether both end.
    fn ends_despite_writer(read: impl Fn(&watch::Receiver<u64>) + Send + 'static) -> bool {
        let (sender, receiver) = watch::channel(0);
        let (ended_tx, ended_rx) = mpsc::channel();
        let writer = ended_tx.clone();
        thread::spawn(move || {
            for round in 1..=ROUNDS {
                sender.send_replace(round);
            }
            writer.send(()).ok();
        });
        thread::spawn(move || {
            (1..=ROUNDS).for_each(|_| read(&receiver));
            ended_tx.send(()).ok();
        });
        (0..2).all(|_| ended_rx.recv_timeout(DEADLINE).is_ok())
    }

    #[test]
    fn two_reads_do_not_block_writer() {
        assert!(ends_despite_writer(|newest| {
            let first = newest.get();
            assert!(first <= newest.get());
        }));
    }

    /// Shows the mistake that this module prevents. Two threads of the test process stay blocked.
    #[test]
    #[ignore = "it waits for its deadline; it shows why the guards are forbidden"]
    fn second_guard_deadlocks_with_writer() {
        assert!(!ends_despite_writer(|newest| {
            let first = newest.borrow();
            assert!(*first <= *newest.borrow());
        }));
    }

    #[test]
    fn equal_value_takes_no_write_lock() {
        let (sender, mut receiver) = watch::channel(1);
        assert!(sender.send_if_changed(2));
        assert_eq!(receiver.get_and_update(), 2);
        let guard = receiver.borrow();
        let (ended_tx, ended_rx) = mpsc::channel();
        thread::spawn(move || ended_tx.send(sender.send_if_changed(2)).ok());
        assert_eq!(ended_rx.recv_timeout(DEADLINE), Ok(false));
        drop(guard);
    }
}

/// In the order of each schedule, readers and writers of one channel.
#[cfg(all(test, feature = "simulation"))]
mod schedules {
    use std::sync::Arc;

    use super::*;
    use crate::sync::schedule::{Scene, check};

    const SCHEDULES: u64 = 2_000;

    #[test]
    fn reads_and_writes_of_threads_end() {
        check(SCHEDULES, |scene: &mut Scene| {
            let (sender, mut updates) = watch::channel(0);
            let (sender, receiver) = (Arc::new(sender), updates.clone());
            let writer = Arc::clone(&sender);
            scene.thread("reader", move || {
                let first = receiver.get();
                assert!(first <= receiver.get());
            });
            scene.thread("writer", move || {
                for value in 1..=2 {
                    assert!(writer.send_if_changed(value));
                }
            });
            scene.task("follower", async move {
                while updates.get_and_update() != 2 {
                    updates.changed().await.unwrap();
                }
            });
            scene.end(move || assert_eq!(sender.get(), 2));
        });
    }

    #[test]
    fn one_of_two_equal_writes_is_news() {
        check(SCHEDULES, |scene: &mut Scene| {
            let sender = Arc::new(watch::Sender::new(0));
            let changes = Arc::new(watch::Sender::new(0));
            for name in ["first", "second"] {
                let (sender, changes) = (Arc::clone(&sender), Arc::clone(&changes));
                scene.thread(name, move || {
                    if sender.send_if_changed(1) {
                        changes.send_modify(|changes| *changes += 1);
                    }
                });
            }
            scene.end(move || assert_eq!(changes.get(), 1));
        });
    }
}
