//! The queue of the controllers.

use std::collections::BTreeSet;

use jiff::Timestamp;

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

    pub(crate) fn pop_due(&mut self, now: Timestamp) -> Option<(Timestamp, Task)> {
        match self.next_due()? <= now {
            true => self.0.pop_first(),
            false => None,
        }
    }
}
