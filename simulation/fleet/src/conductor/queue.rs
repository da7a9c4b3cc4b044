//! The future events, in order.

use std::collections::BTreeMap;

use super::Simulation;
use super::requests::RequestInTransit;
use crate::outbox::ProcessId;
use crate::process::Delivery;
use crate::time::Millis;

pub(super) enum QueuedEvent {
    /// All processes run.
    Tick,
    /// A request reaches an API server.
    RequestArrives(Box<RequestInTransit>),
    /// A timer of this cluster's API server.
    ServerTimer(String),
    Deliver(ProcessId, Delivery),
    /// A Helm process may have reached its time limit.
    HelmTimeLimit(ProcessId),
    /// A stopped process continues.
    Resume(ProcessId),
    Restart(String),
    Action(Box<dyn FnOnce(&mut Simulation)>),
}

/// Events of the same time keep their order.
#[derive(Default)]
pub(super) struct EventQueue {
    events: BTreeMap<(Millis, u64), QueuedEvent>,
    count: u64,
}

impl EventQueue {
    pub(super) fn push(&mut self, at: Millis, event: QueuedEvent) {
        self.count += 1;
        self.events.insert((at, self.count), event);
    }

    pub(super) fn pop(&mut self, limit: Millis) -> Option<(Millis, QueuedEvent)> {
        let entry = self.events.first_entry()?;
        let at = entry.key().0;
        (at <= limit).then(|| (at, entry.remove()))
    }
}
