//! Queues the EdgeClusters to examine by due time. A member that is not due costs nothing.

use std::collections::{BTreeMap, BTreeSet};

use krypton_runtime::clock::BootTime;

use super::{LOOK_EVERY, PACE};
use crate::leader::home_writer::Wrote;

#[derive(Debug, Default)]
pub(super) struct Agenda {
    names: BTreeSet<String>,
    not_before: BTreeMap<String, BootTime>,
    /// The entries of `names` by due time.
    queue: BTreeSet<(BootTime, String)>,
    /// Consecutive failed writes. A conflict does not count.
    failures: BTreeMap<String, u32>,
}

impl Agenda {
    /// Returns whether the name is new.
    pub(super) fn add(&mut self, name: &str) -> bool {
        let new = self.names.insert(name.to_owned());
        if new {
            self.queue.insert((self.time(name), name.to_owned()));
        }
        new
    }

    pub(super) fn extend(&mut self, names: impl IntoIterator<Item = String>) {
        for name in names {
            self.add(&name);
        }
    }

    /// Skips the member until this time.
    pub(super) fn wait(&mut self, name: &str, until: BootTime) {
        let before = self.not_before.insert(name.to_owned(), until);
        if self.names.contains(name) {
            let before = before.unwrap_or_default();
            self.queue.remove(&(before, name.to_owned()));
            self.queue.insert((until, name.to_owned()));
        }
    }

    pub(super) fn time(&self, name: &str) -> BootTime {
        self.not_before.get(name).copied().unwrap_or_default()
    }

    pub(super) fn is_due(&self, name: &str, now: BootTime) -> bool {
        self.time(name) <= now
    }

    /// Records a completed write. Returns the number of consecutive failures.
    pub(super) fn ended(&mut self, name: &str, came: Wrote) -> u32 {
        if came != Wrote::Failed {
            self.failures.remove(name);
            return 0;
        }
        let failures = self.failures.entry(name.to_owned()).or_default();
        *failures = failures.saturating_add(1);
        *failures
    }

    /// Returns when to check a waiting member again: at its due time, after its write, or when a writer may
    /// be free.
    pub(super) fn look_again(&self, name: &str, writing: bool, now: BootTime) -> BootTime {
        let least = if writing { PACE } else { LOOK_EVERY };
        self.time(name).max(BootTime(now.0 + least))
    }

    /// Takes the next member that is due.
    pub(super) fn next(&mut self, now: BootTime) -> Option<String> {
        self.queue.first().filter(|(at, _)| *at <= now)?;
        let (_, name) = self.queue.pop_first()?;
        self.names.remove(&name);
        Some(name)
    }

    pub(super) fn wakes(&self) -> Option<BootTime> {
        self.queue.first().map(|(at, _)| *at)
    }

    pub(super) fn forget(&mut self, name: &str) {
        let at = self.time(name);
        self.queue.remove(&(at, name.to_owned()));
        self.names.remove(name);
        self.not_before.remove(name);
        self.failures.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(second: u64) -> BootTime {
        BootTime(Duration::from_secs(second))
    }

    #[test]
    fn member_that_waits_is_not_polled() {
        let mut agenda = Agenda::default();
        let soon = BootTime(at(10).0 + LOOK_EVERY);
        assert_eq!(agenda.look_again("a", false, at(10)), soon);
        assert_eq!(agenda.look_again("a", true, at(10)), at(11));
        agenda.wait("a", at(13));
        for writing in [true, false] {
            assert_eq!(agenda.look_again("a", writing, at(10)), at(13));
        }
    }

    #[test]
    fn agenda_counts_failures_in_a_row() {
        let mut agenda = Agenda::default();
        let mut ended = |came| agenda.ended("a", came);
        assert_eq!([Wrote::Failed; 2].map(&mut ended), [1, 2]);
        for other in [Wrote::Ok, Wrote::Conflict] {
            assert_eq!([other, Wrote::Failed].map(&mut ended), [0, 1]);
        }
    }

    #[test]
    fn member_is_due_exactly_once_at_its_time() {
        let mut agenda = Agenda::default();
        assert!(agenda.add("a") && !agenda.add("a"));
        agenda.wait("b", at(5));
        agenda.wait("c", at(3));
        agenda.extend(["b".to_owned(), "c".to_owned()]);
        assert_eq!(agenda.next(at(1)).as_deref(), Some("a"));
        assert_eq!((agenda.next(at(1)), agenda.wakes()), (None, Some(at(3))));
        agenda.wait("c", at(9));
        assert_eq!(agenda.wakes(), Some(at(5)));
        assert_eq!(agenda.next(at(9)).as_deref(), Some("b"));
        assert_eq!(agenda.next(at(9)).as_deref(), Some("c"));
        assert_eq!((agenda.next(at(99)), agenda.wakes()), (None, None));
        agenda.add("b");
        agenda.forget("b");
        assert_eq!(
            (agenda.next(at(99)), agenda.is_due("b", at(0))),
            (None, true)
        );
    }
}
