//! The queue of the controllers.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};

use crate::key::Key;

/// A task of a controller.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Task {
    Namespace(String),
    Crd(String),
    Workload(Key),
    /// Checks the dependents of an owner, by its UID.
    Owner(String),
    /// Checks the owners of an object.
    Dependent(Key),
}

/// Tasks with their due times.
#[derive(Debug, Default)]
pub(crate) struct Tasks(BTreeSet<(Timestamp, Task)>);

impl Tasks {
    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        self.0.first().map(|(due, _)| *due)
    }

    pub(crate) fn add(&mut self, due: Timestamp, task: Task) {
        self.0.insert((due, task));
    }

    /// Moves the due times by the same time as the clock. Tasks after a restore have none.
    pub(crate) fn shift(&mut self, by: SignedDuration) {
        let tasks = std::mem::take(&mut self.0).into_iter();
        let shifted = tasks.map(|(due, task)| match due == Timestamp::UNIX_EPOCH {
            true => (due, task),
            false => (due + by, task),
        });
        self.0 = shifted.collect();
    }

    pub(crate) fn pop_due(&mut self, now: Timestamp) -> Option<(Timestamp, Task)> {
        match self.next_due()? <= now {
            true => self.0.pop_first(),
            false => None,
        }
    }
}
