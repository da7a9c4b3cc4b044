//! A queue of keys to reconcile. Pure: the caller passes the time and the jitter.
//!
//! A key waits at most once, at its earliest time. It never leaves the queue before its back-off ends or while its job
//! runs. Due keys leave in the order in which they became due.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::clock::BootTime;
use crate::retry::Backoff;

/// Time without a write after which the pause between writes resets. Until then, each write doubles the pause, in case
/// another client keeps reverting it.
const QUIET_AFTER: Duration = Duration::from_secs(300);
/// Pause between two writes of one object.
const BETWEEN_WRITES: Backoff = Backoff {
    first: Duration::from_millis(250),
    max: Duration::from_secs(30),
};

/// Result of a job. It decides when its key is due again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The key is due again only if it was added in the meantime.
    Done,
    /// The key is due again, but not before this time.
    Again(BootTime),
    /// The key is due again after a pause that doubles with each write in quick succession.
    Wrote,
    /// The object had changed. The key is due again after a short back-off.
    Conflict,
    /// The key is due again after a back-off with jitter.
    Failed,
}

#[derive(Debug)]
pub struct WorkQueue<K> {
    limit: usize,
    conflict: Backoff,
    failed: Backoff,
    entries: BTreeMap<K, Entry>,
    /// Due keys by arrival.
    ready: BTreeMap<u64, K>,
    delayed: BTreeSet<(BootTime, K)>,
    parked: Vec<K>,
    busy: usize,
    arrivals: u64,
}

#[derive(Debug, Default)]
struct Entry {
    due: Option<Due>,
    busy: bool,
    not_before: BootTime,
    /// Consecutive conflicts and failures.
    failures: u32,
    /// Number of writes in quick succession, and the time of the last one.
    writes: u32,
    written: BootTime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// Due since this arrival.
    Now(u64),
    At(BootTime),
}

impl Entry {
    /// Returns true if a new entry would mean the same.
    fn is_redundant(&self, now: BootTime) -> bool {
        let quiet = self.writes == 0 || now.since(self.written) > QUIET_AFTER;
        !self.busy && self.failures == 0 && self.not_before <= now && quiet
    }
}

impl<K: Ord + Clone> WorkQueue<K> {
    /// Creates a queue for at most `limit` jobs at the same time.
    pub fn new(limit: usize, conflict: Backoff, failed: Backoff) -> Self {
        Self {
            limit,
            conflict,
            failed,
            entries: BTreeMap::new(),
            ready: BTreeMap::new(),
            delayed: BTreeSet::new(),
            parked: Vec::new(),
            busy: 0,
            arrivals: 0,
        }
    }

    /// Makes a key due. A due key keeps its position.
    pub fn add(&mut self, key: K) {
        if !matches!(self.due(&key), Some(Due::Now(_))) {
            self.arrivals += 1;
            self.set_due(key, Due::Now(self.arrivals));
        }
    }

    pub fn extend(&mut self, keys: impl IntoIterator<Item = K>) {
        keys.into_iter().for_each(|key| self.add(key));
    }

    /// Makes a key due at a time, or earlier if it already is.
    pub fn add_at(&mut self, key: K, at: BootTime) {
        let due = Due::At(at);
        if self.due(&key).is_none_or(|previous| due < previous) {
            self.set_due(key, due);
        }
    }

    /// Takes the next due key. Returns `None` while the maximum number of jobs runs.
    pub fn pop(&mut self, now: BootTime) -> Option<K> {
        while let Some((at, _)) = self.delayed.first()
            && *at <= now
        {
            let due = self.delayed.pop_first();
            self.extend(due.map(|(_, key)| key));
        }
        while self.is_free()
            && let Some((_, key)) = self.ready.pop_first()
        {
            let not_before = self.not_before(&key);
            if now < not_before {
                self.set_due(key, Due::At(not_before));
                continue;
            }
            self.remove(&key);
            if self
                .entries
                .get(&key)
                .is_some_and(|entry| entry.is_redundant(now))
            {
                self.entries.remove(&key);
            }
            return Some(key);
        }
        None
    }

    /// Keeps a key that must wait for a condition, until [`Self::unpark`].
    pub fn park(&mut self, key: K) {
        self.parked.push(key);
    }

    /// Makes the parked keys due.
    pub fn unpark(&mut self) {
        let parked = std::mem::take(&mut self.parked);
        self.extend(parked);
    }

    /// Returns true if another job may run.
    pub fn is_free(&self) -> bool {
        self.busy < self.limit
    }

    /// Starts the job of a key, which takes the key out of the queue.
    pub fn start(&mut self, key: K) {
        self.remove(&key);
        let entry = self.entries.entry(key).or_default();
        self.busy += usize::from(!entry.busy);
        entry.busy = true;
    }

    /// Ends the job of a key. `jitter` in 0..1 selects a point in the back-off.
    pub fn done(&mut self, key: &K, outcome: Outcome, now: BootTime, jitter: f64) {
        let (conflict, failed) = (self.conflict, self.failed);
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        self.busy -= usize::from(entry.busy);
        entry.busy = false;
        entry.failures = match outcome {
            Outcome::Conflict | Outcome::Failed => entry.failures.saturating_add(1),
            Outcome::Done | Outcome::Again(_) | Outcome::Wrote => 0,
        };
        let after = |pause: Duration| now + pause;
        entry.not_before = match outcome {
            Outcome::Done => entry.not_before,
            Outcome::Again(at) => entry.not_before.max(at),
            Outcome::Wrote => {
                if now.since(entry.written) > QUIET_AFTER {
                    entry.writes = 0;
                }
                (entry.writes, entry.written) = (entry.writes.saturating_add(1), now);
                after(BETWEEN_WRITES.without_jitter(entry.writes))
            }
            Outcome::Conflict => after(conflict.without_jitter(entry.failures)),
            Outcome::Failed => after(failed.pause(entry.failures, jitter)),
        };
        // The key was added while its job ran.
        if let Some(due) = entry.due.take() {
            self.set_due(key.clone(), due);
        }
        if outcome != Outcome::Done {
            self.add(key.clone());
        }
        let is_redundant = |entry: &Entry| entry.due.is_none() && entry.is_redundant(now);
        if self.entries.get(key).is_some_and(is_redundant) {
            self.entries.remove(key);
        }
    }

    /// Keeps a key from leaving the queue before this time. A key that waits for a later time keeps waiting until it is
    /// added again.
    pub fn delay(&mut self, key: K, until: BootTime) {
        self.entries.entry(key).or_default().not_before = until;
    }

    /// Ends the back-off of a key, because its object is another one now. The caller also adds the key.
    pub fn reset(&mut self, key: &K) {
        if let Some(entry) = self.entries.get_mut(key) {
            (entry.not_before, entry.failures) = (BootTime::default(), 0);
        }
    }

    /// Takes a key out of the queue. Its back-off stays.
    pub fn remove(&mut self, key: &K) {
        let due = self.entries.get_mut(key).and_then(|entry| entry.due.take());
        match due {
            Some(Due::Now(arrival)) => drop(self.ready.remove(&arrival)),
            Some(Due::At(at)) => drop(self.delayed.remove(&(at, key.clone()))),
            None => {}
        }
    }

    /// Forgets a key and its back-off. Its running job still counts.
    pub fn forget(&mut self, key: &K) {
        self.remove(key);
        if let Some(entry) = self.entries.remove(key)
            && entry.busy
        {
            let busy = Entry {
                busy: true,
                ..Entry::default()
            };
            self.entries.insert(key.clone(), busy);
        }
    }

    /// Forgets all keys. Running jobs still count.
    pub fn clear(&mut self) {
        self.ready.clear();
        self.delayed.clear();
        self.parked.clear();
        self.entries.retain(|_, entry| entry.busy);
        for entry in self.entries.values_mut() {
            entry.due = None;
        }
    }

    /// Returns the next time at which a key becomes due. Returns `None` while the maximum number of jobs runs, because
    /// the end of a job is an event.
    pub fn wake(&self) -> Option<BootTime> {
        let first = self.delayed.first().map(|(at, _)| *at);
        first.filter(|_| self.is_free())
    }

    /// Returns the time at which a waiting key becomes due. The time is zero for a due key.
    pub fn due_at<Q: Ord + ?Sized>(&self, key: &Q) -> Option<BootTime>
    where
        K: Borrow<Q>,
    {
        self.due(key).map(|due| match due {
            Due::Now(_) => BootTime::default(),
            Due::At(at) => at,
        })
    }

    /// Returns the end of a key's back-off.
    pub fn not_before<Q: Ord + ?Sized>(&self, key: &Q) -> BootTime
    where
        K: Borrow<Q>,
    {
        let entry = self.entries.get(key);
        entry.map_or_else(BootTime::default, |entry| entry.not_before)
    }

    pub fn is_busy<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.entries.get(key).is_some_and(|entry| entry.busy)
    }

    /// Returns the number of consecutive conflicts and failures.
    pub fn failures<Q: Ord + ?Sized>(&self, key: &Q) -> u32
    where
        K: Borrow<Q>,
    {
        self.entries.get(key).map_or(0, |entry| entry.failures)
    }

    /// Returns the number of due and parked keys.
    pub fn ready(&self) -> usize {
        self.ready.len() + self.parked.len()
    }

    fn due<Q: Ord + ?Sized>(&self, key: &Q) -> Option<Due>
    where
        K: Borrow<Q>,
    {
        self.entries.get(key)?.due
    }

    fn set_due(&mut self, key: K, due: Due) {
        self.remove(&key);
        let entry = self.entries.entry(key.clone()).or_default();
        entry.due = Some(due);
        match due {
            // It waits for the end of its job.
            _ if entry.busy => {}
            Due::Now(arrival) => drop(self.ready.insert(arrival, key)),
            Due::At(at) => drop(self.delayed.insert((at, key))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CONFLICT: Backoff = Backoff {
        first: Duration::from_millis(250),
        max: Duration::from_secs(16),
    };
    const FAILED: Backoff = Backoff {
        first: Duration::from_secs(5),
        max: Duration::from_secs(60),
    };

    fn queue(limit: usize) -> WorkQueue<u8> {
        WorkQueue::new(limit, CONFLICT, FAILED)
    }

    fn at(millis: u64) -> BootTime {
        BootTime(Duration::from_millis(millis))
    }

    fn pop_all(queue: &mut WorkQueue<u8>, now: BootTime) -> Vec<u8> {
        std::iter::from_fn(|| queue.pop(now)).collect()
    }

    #[test]
    fn due_keys_leave_in_order_of_arrival() {
        let mut queue = queue(1);
        queue.extend([5, 9, 1]);
        queue.add(5);
        assert_eq!(queue.ready(), 3);
        assert_eq!(pop_all(&mut queue, at(0)), [5, 9, 1]);
        queue.add_at(7, at(10));
        queue.add_at(8, at(5));
        assert_eq!(queue.pop(at(4)), None);
        queue.add(2);
        assert_eq!(queue.pop(at(10)), Some(2));
        queue.add(3);
        assert_eq!(pop_all(&mut queue, at(10)), [8, 7, 3]);
    }

    #[test]
    fn key_waits_once_at_its_earliest_time() {
        let mut queue = queue(1);
        for millis in [30, 20, 40] {
            queue.add_at(1, at(millis));
        }
        assert_eq!(queue.due_at(&1), Some(at(20)));
        assert_eq!(queue.wake(), Some(at(20)));
        queue.add(1);
        queue.add_at(1, at(10));
        assert_eq!((queue.wake(), queue.ready()), (None, 1));
        assert_eq!(pop_all(&mut queue, at(99)), [1]);
        queue.add(1);
        queue.remove(&1);
        assert_eq!(queue.pop(at(99)), None);
    }

    #[test]
    fn parked_key_is_due_after_unpark() {
        let mut queue = queue(1);
        queue.park(1);
        assert_eq!((queue.pop(at(0)), queue.ready()), (None, 1));
        queue.unpark();
        assert_eq!(pop_all(&mut queue, at(0)), [1]);
    }

    #[test]
    fn busy_key_is_due_again_when_done() {
        let mut queue = queue(2);
        queue.start(1);
        queue.add(1);
        queue.add(2);
        assert_eq!(pop_all(&mut queue, at(0)), [2]);
        queue.done(&1, Outcome::Done, at(0), 0.0);
        assert_eq!(pop_all(&mut queue, at(0)), [1]);
        queue.start(1);
        queue.done(&1, Outcome::Done, at(0), 0.0);
        assert!(pop_all(&mut queue, at(0)).is_empty());
        assert!(queue.entries.is_empty());
    }

    #[test]
    fn queue_neither_idles_nor_exceeds_its_limit() {
        let mut queue = queue(1);
        queue.extend([1, 2]);
        queue.add_at(3, at(50));
        let first = queue.pop(at(0)).unwrap();
        queue.start(first);
        assert_eq!((queue.pop(at(0)), queue.wake()), (None, None));
        queue.done(&first, Outcome::Done, at(0), 0.0);
        assert_eq!(queue.pop(at(0)), Some(2));
        assert_eq!(queue.wake(), Some(at(50)));
    }

    #[test]
    fn outcome_decides_when_key_is_due_again() {
        let cases = [
            (Outcome::Again(at(70)), [70, 70, 70]),
            (Outcome::Wrote, [250, 500, 1000]),
            (Outcome::Conflict, [250, 500, 1000]),
            (Outcome::Failed, [3750, 7500, 15_000]),
        ];
        for (outcome, pauses) in cases {
            let mut queue = queue(1);
            for pause in pauses {
                queue.start(1);
                queue.done(&1, outcome, at(0), 0.5);
                assert_eq!(queue.pop(at(pause - 1)), None, "{outcome:?}");
                assert_eq!(queue.wake(), Some(at(pause)), "{outcome:?}");
                assert_eq!(queue.pop(at(pause)), Some(1), "{outcome:?}");
            }
        }
    }

    #[test]
    fn success_ends_the_backoff() {
        let mut queue = queue(1);
        let mut failures_after = |outcome| {
            queue.start(1);
            queue.done(&1, outcome, at(0), 1.0);
            (queue.failures(&1), queue.not_before(&1))
        };
        assert_eq!(failures_after(Outcome::Failed), (1, at(5000)));
        assert_eq!(failures_after(Outcome::Conflict), (2, at(500)));
        assert_eq!(failures_after(Outcome::Failed), (3, at(20_000)));
        assert_eq!(failures_after(Outcome::Wrote), (0, at(250)));
        assert_eq!(failures_after(Outcome::Failed), (1, at(5000)));
    }

    #[test]
    fn pause_between_writes_resets_after_quiet_time() {
        let mut queue = queue(1);
        let mut pause = |now| {
            queue.start(1);
            queue.done(&1, Outcome::Wrote, at(now), 0.0);
            queue.not_before(&1).since(at(now)).as_millis()
        };
        let pauses: Vec<u128> = (0..9).map(&mut pause).collect();
        assert_eq!(pauses[6..], [16_000, 30_000, 30_000]);
        assert_eq!(pause(310_000), 250);
    }

    #[test]
    fn reset_or_forgotten_key_waits_for_no_backoff() {
        let mut queue = queue(2);
        for key in [1, 2] {
            queue.start(key);
            queue.done(&key, Outcome::Failed, at(0), 1.0);
        }
        queue.reset(&1);
        queue.forget(&2);
        assert_eq!(pop_all(&mut queue, at(0)), [1]);
        queue.add(2);
        assert_eq!(pop_all(&mut queue, at(0)), [2]);
        assert!(queue.entries.is_empty());
        queue.start(3);
        queue.forget(&3);
        assert!(queue.is_busy(&3));
    }

    #[test]
    fn cleared_queue_keeps_only_running_jobs() {
        let mut queue = queue(2);
        queue.start(1);
        queue.extend([1, 2]);
        queue.add_at(3, at(0));
        queue.park(4);
        queue.clear();
        assert_eq!((pop_all(&mut queue, at(0)), queue.ready()), (vec![], 0));
        assert!(queue.is_busy(&1));
        queue.done(&1, Outcome::Done, at(0), 0.0);
        assert!(pop_all(&mut queue, at(0)).is_empty());
    }

    proptest! {
        #[test]
        fn key_leaves_exactly_when_it_is_due(
            steps in proptest::collection::vec((0..6_u8, 0..6_u8, 0..400_u64), 0..200)
        ) {
            let mut queue = queue(3);
            let (mut due, mut not_before) = (BTreeMap::new(), BTreeMap::new());
            let mut busy = BTreeSet::new();
            let mut now = at(0);
            for (step, key, millis) in steps {
                let time = at(u64::try_from(now.0.as_millis()).unwrap() + millis);
                match step {
                    0 => {
                        queue.add(key);
                        due.insert(key, at(0));
                    }
                    1 => {
                        queue.add_at(key, time);
                        let earliest: &mut BootTime = due.entry(key).or_insert(time);
                        *earliest = time.min(*earliest);
                    }
                    2 => {
                        let until = time.max(not_before.get(&key).copied().unwrap_or_default());
                        queue.delay(key, until);
                        not_before.insert(key, until);
                    }
                    3 if busy.remove(&key) => queue.done(&key, Outcome::Done, now, 0.0),
                    4 => {
                        queue.forget(&key);
                        due.remove(&key);
                        not_before.remove(&key);
                    }
                    _ => now = time,
                }
                while let Some(key) = queue.pop(now) {
                    prop_assert!(due.remove(&key).unwrap() <= now);
                    prop_assert!(not_before.get(&key).is_none_or(|at| *at <= now));
                    prop_assert!(!busy.contains(&key));
                    queue.start(key);
                    busy.insert(key);
                    prop_assert!(busy.len() <= 3);
                }
                let idle = due.iter().filter(|(key, _)| !busy.contains(key));
                let next = idle.map(|(key, at)| *at.max(not_before.get(key).unwrap_or(at))).min();
                if busy.len() < 3 {
                    prop_assert!(next.is_none_or(|at| at > now));
                    // A key whose back-off ends after its due time makes one more wake-up.
                    prop_assert!(queue.wake().is_none_or(|at| next.is_some_and(|next| at <= next)));
                    prop_assert_eq!(queue.wake().is_some(), next.is_some());
                } else {
                    prop_assert_eq!(queue.wake(), None);
                }
                prop_assert_eq!(queue.busy, busy.len());
            }
        }
    }
}
