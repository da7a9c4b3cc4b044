//! Slots, each the right to run Helm once. Limits the total and the number for each member, and grants by
//! priority.

pub mod priority;

use std::collections::BTreeMap;
use std::sync::Arc;

use krypton_runtime::clock::BootTime;
use krypton_runtime::sync::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::oneshot;

use self::priority::{Priority, Waiter};

/// Maximum number of concurrent runs, each at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) total: usize,
    pub(super) per_member: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Slots(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: Limits,
    state: Mutex<State>,
    /// Number of slots in use.
    in_use: Gauge,
}

#[derive(Debug, Default)]
struct State {
    /// Number of running slots for each member that has any.
    running: BTreeMap<String, usize>,
    total: usize,
    waiting: BTreeMap<u64, WaitingRun>,
    /// Number of the last run that joined the queue.
    last_number: u64,
    /// Priority of the last run that received a slot.
    last_priority: Option<Priority>,
}

/// Running and waiting Helm runs.
#[derive(Clone, Debug, Default)]
pub struct Load {
    /// Maximum number of concurrent runs, in total and for one member.
    pub total: usize,
    pub per_member: usize,
    /// Number of runs for each member that has any.
    pub running: BTreeMap<String, usize>,
    /// Waiting runs in order of arrival, with the start of their wait.
    pub waiting: Vec<(String, Priority, BootTime)>,
}

#[derive(Debug)]
struct WaitingRun {
    member: String,
    priority: Priority,
    since: BootTime,
    sender: oneshot::Sender<Slot>,
}

/// The right to run one Helm process, held until it is dropped.
#[derive(Debug)]
pub struct Slot {
    slots: Slots,
    member: String,
}

impl Drop for Slot {
    fn drop(&mut self) {
        {
            let mut state = self.slots.0.state.lock();
            state.total -= 1;
            self.slots.0.in_use.dec();
            if let Some(running) = state.running.get_mut(&self.member) {
                *running -= 1;
                if *running == 0 {
                    state.running.remove(&self.member);
                }
            }
        }
        self.slots.grant_free();
    }
}

/// Removes a run from the queue when its wait is dropped.
struct QueueGuard<'a> {
    slots: &'a Slots,
    number: u64,
}

impl Drop for QueueGuard<'_> {
    fn drop(&mut self) {
        let run = self.slots.0.state.lock().waiting.remove(&self.number);
        drop(run);
    }
}

impl Slots {
    pub(crate) fn new(limits: Limits) -> Self {
        Self(Arc::new(Shared {
            limits,
            state: Mutex::default(),
            in_use: Gauge::default(),
        }))
    }

    /// Returns new slots with the same limits. The gauge `in_use` shows the number of slots in use.
    pub(super) fn with_gauge(&self, in_use: Gauge) -> Self {
        Self(Arc::new(Shared {
            limits: self.0.limits,
            state: Mutex::default(),
            in_use,
        }))
    }

    /// Waits for a slot. Dropping the future removes the run from the queue without side effects.
    pub(super) async fn take(&self, member: &str, priority: Priority) -> Slot {
        let (sender, receiver) = oneshot::channel();
        let number = {
            let mut state = self.0.state.lock();
            state.last_number += 1;
            let number = state.last_number;
            let run = WaitingRun {
                member: member.to_owned(),
                priority,
                since: BootTime::now(),
                sender,
            };
            state.waiting.insert(number, run);
            number
        };
        let guard = QueueGuard {
            slots: self,
            number,
        };
        self.grant_free();
        let slot = receiver.await;
        drop(guard);
        slot.expect("a waiter leaves the queue with a slot or when it is dropped")
    }

    pub(super) fn load(&self) -> Load {
        let state = self.0.state.lock();
        let waiting = state.waiting.values();
        Load {
            total: self.0.limits.total,
            per_member: self.0.limits.per_member,
            running: state.running.clone(),
            waiting: waiting
                .map(|run| (run.member.clone(), run.priority, run.since))
                .collect(),
        }
    }

    /// Grants all free slots.
    fn grant_free(&self) {
        while let Some((sender, slot)) = self.grant_next() {
            // If the receiver is gone, dropping the slot frees it. That takes the lock, so it happens here
            // without it.
            drop(sender.send(slot));
        }
    }

    fn grant_next(&self) -> Option<(oneshot::Sender<Slot>, Slot)> {
        let limits = self.0.limits;
        let mut state = self.0.state.lock();
        if state.total >= limits.total {
            return None;
        }
        let load = |member: &String| state.running.get(member).copied().unwrap_or_default();
        let waiting = state
            .waiting
            .iter()
            .filter(|(_, run)| load(&run.member) < limits.per_member)
            .map(|(number, run)| Waiter {
                number: *number,
                priority: run.priority,
                since: run.since,
                load: load(&run.member),
            });
        let number = priority::next(waiting, state.last_priority, BootTime::now())?;
        let WaitingRun {
            member,
            priority,
            sender,
            ..
        } = state.waiting.remove(&number)?;
        state.last_priority = Some(priority);
        state.total += 1;
        self.0.in_use.inc();
        *state.running.entry(member.clone()).or_default() += 1;
        let slots = self.clone();
        Some((sender, Slot { slots, member }))
    }
}

#[cfg(all(test, feature = "simulation"))]
mod schedules;
#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use futures::{FutureExt, poll};
    use proptest::prelude::*;

    use super::*;

    fn slots(total: usize, per_member: usize) -> Slots {
        Slots::new(Limits { total, per_member })
    }

    #[tokio::test]
    async fn hung_member_runs_leave_room_for_others() {
        let slots = slots(4, 3);
        let mut hung = Vec::new();
        for _ in 0..3 {
            hung.push(slots.take("hung", Priority::High).await);
        }
        let mut fourth = std::pin::pin!(slots.take("hung", Priority::High));
        assert!(poll!(fourth.as_mut()).is_pending());
        let other = slots.take("other", Priority::Low).await;
        drop(other);
        assert!(poll!(fourth.as_mut()).is_pending());
        hung.pop();
        assert!(poll!(fourth).is_ready());
    }

    #[tokio::test]
    async fn removal_precedes_upgrades_and_cancelled_waiter_blocks_none() {
        let slots = slots(1, 1);
        let first = slots.take("a", Priority::Low).await;
        let mut upgrade = std::pin::pin!(slots.take("a", Priority::Low));
        let mut cancelled = Box::pin(slots.take("a", Priority::High));
        let mut removal = std::pin::pin!(slots.take("b", Priority::High));
        assert!(poll!(upgrade.as_mut()).is_pending());
        assert!(poll!(cancelled.as_mut()).is_pending());
        assert!(poll!(removal.as_mut()).is_pending());
        drop(cancelled);
        drop(first);
        assert!(poll!(upgrade.as_mut()).is_pending());
        drop(removal.await);
        drop(upgrade.await);
        // A granted slot whose receiver was dropped becomes free again.
        let held = slots.take("a", Priority::Low).await;
        let mut dropped_waiter = Box::pin(slots.take("a", Priority::Low));
        assert!(poll!(dropped_waiter.as_mut()).is_pending());
        drop(held);
        drop(dropped_waiter);
        assert!(slots.take("a", Priority::Low).now_or_never().is_some());
    }

    type SlotFuture<'a> = Pin<Box<dyn Future<Output = Slot> + 'a>>;

    proptest! {
        #[test]
        fn slots_respect_limits_and_free_slot_is_used(
            steps in proptest::collection::vec((0..4_u8, 0..3_usize, any::<bool>(), any::<usize>()), 0..150)
        ) {
            let names = ["a", "b", "c"];
            let slots = slots(4, 2);
            let mut waiting: Vec<(usize, SlotFuture<'_>)> = Vec::new();
            let mut held: Vec<(usize, Slot)> = Vec::new();
            for (step, member, high, pick) in steps {
                match step {
                    0 | 1 => {
                        let priority = if high { Priority::High } else { Priority::Low };
                        waiting.push((member, Box::pin(slots.take(names[member], priority))));
                    }
                    2 if !held.is_empty() => drop(held.remove(pick % held.len())),
                    3 if !waiting.is_empty() => drop(waiting.remove(pick % waiting.len())),
                    _ => {}
                }
                // Poll each one until none makes progress.
                let mut index = 0;
                while index < waiting.len() {
                    match (&mut waiting[index].1).now_or_never() {
                        Some(slot) => {
                            let (member, _) = waiting.remove(index);
                            held.push((member, slot));
                        }
                        None => index += 1,
                    }
                }
                let held_by = |member: usize| held.iter().filter(|(holder, _)| *holder == member).count();
                prop_assert!(held.len() <= 4);
                prop_assert!((0..3).all(|member| held_by(member) <= 2));
                if held.len() < 4 {
                    prop_assert!(waiting.iter().all(|(member, _)| held_by(*member) == 2));
                }
            }
        }
    }
}
