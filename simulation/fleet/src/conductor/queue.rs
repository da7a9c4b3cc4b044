//! The events to come, in order.

use std::collections::BTreeMap;

use super::api::Arriving;
use super::{Millis, Simulation};
use crate::outbox::ProcessId;
use crate::process::Delivery;

pub(super) enum Event {
    /// All processes run.
    Window,
    /// A request reaches an API server.
    Arrives(Box<Arriving>),
    /// A timer of this cluster's API server.
    Server(String),
    Deliver(ProcessId, Delivery),
    /// A Helm process may have reached its time limit.
    HelmLimit(ProcessId),
    /// A stopped process continues.
    Resume(ProcessId),
    Restart(String),
    Action(Box<dyn FnOnce(&mut Simulation)>),
}

/// Events of the same time keep their order.
#[derive(Default)]
pub(super) struct Queue {
    events: BTreeMap<(Millis, u64), Event>,
    count: u64,
}

impl Queue {
    pub(super) fn push(&mut self, at: Millis, event: Event) {
        self.count += 1;
        self.events.insert((at, self.count), event);
    }

    pub(super) fn pop(&mut self, limit: Millis) -> Option<(Millis, Event)> {
        let entry = self.events.first_entry()?;
        let at = entry.key().0;
        (at <= limit).then(|| (at, entry.remove()))
    }
}
