//! Selects the next one of the runs waiting for Helm. Pure functions.

use std::cmp::Ordering;
use std::time::Duration;

use krypton_runtime::clock::BootTime;

/// After this wait, a run goes before later ones, and an upgrade no longer yields to every installation and
/// deletion.
pub(crate) const OVERDUE: Duration = Duration::from_secs(60);

/// Urgency of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Priority {
    /// A first installation, because its workload is not available yet, or a removal, because a deletion
    /// waits for it.
    High,
    /// Any other run. Workloads keep running until it starts.
    Low,
}

impl Priority {
    /// Returns the name for metrics and dumps.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Low => "low",
        }
    }
}

/// A run that waits for a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiter {
    /// Unique number in order of arrival.
    pub(crate) number: u64,
    pub(crate) priority: Priority,
    pub(crate) since: BootTime,
    /// Number of slots that its member uses now.
    pub(crate) load: usize,
}

/// Returns the number of the next run. `last` is the priority of the previous one. If upgrades are overdue
/// while high-priority runs wait, both kinds alternate, so neither starves.
pub(crate) fn next(
    waiting: impl IntoIterator<Item = Waiter>,
    last: Option<Priority>,
    now: BootTime,
) -> Option<u64> {
    let is_overdue = |waiter: &Waiter| now.since(waiter.since) >= OVERDUE;
    let compare = |a: &Waiter, b: &Waiter| match (is_overdue(a), is_overdue(b)) {
        (true, true) => a.number.cmp(&b.number),
        (true, false) => Ordering::Less,
        (false, true) => Ordering::Greater,
        (false, false) => (a.load, a.number).cmp(&(b.load, b.number)),
    };
    let (mut high, mut low): (Option<Waiter>, Option<Waiter>) = (None, None);
    for waiter in waiting {
        let best = match waiter.priority {
            Priority::High => &mut high,
            Priority::Low => &mut low,
        };
        if best.is_none_or(|best| compare(&waiter, &best) == Ordering::Less) {
            *best = Some(waiter);
        }
    }
    let chosen = match (high, low) {
        (Some(_), Some(low)) if is_overdue(&low) && last == Some(Priority::High) => Some(low),
        (high, low) => high.or(low),
    };
    chosen.map(|waiter| waiter.number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn waiter(number: u64, priority: Priority, since: u64, load: usize) -> Waiter {
        Waiter {
            number,
            priority,
            since: BootTime(Duration::from_secs(since)),
            load,
        }
    }

    fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(seconds))
    }

    #[test]
    fn urgent_goes_first_then_least_loaded_then_oldest() {
        use Priority::{High, Low};
        let upgrade = waiter(1, Low, 0, 0);
        let install = waiter(2, High, 0, 3);
        assert_eq!(next([upgrade, install], None, at(0)), Some(2));
        let (busy, idle) = (waiter(1, Low, 0, 2), waiter(2, Low, 0, 0));
        assert_eq!(next([busy, idle], None, at(0)), Some(2));
        assert_eq!(
            next([waiter(4, Low, 0, 1), waiter(3, Low, 0, 1)], None, at(0)),
            Some(3)
        );
        assert_eq!(next([], None, at(0)), None);
    }

    #[test]
    fn overdue_upgrade_alternates_with_urgent_runs() {
        use Priority::{High, Low};
        let waiting = [waiter(1, Low, 0, 0), waiter(2, High, 60, 0)];
        assert_eq!(next(waiting, Some(High), at(59)), Some(2));
        assert_eq!(next(waiting, Some(High), at(60)), Some(1));
        assert_eq!(next(waiting, Some(Low), at(60)), Some(2));
    }

    /// One step of the model: a run arrives, or the next slot is granted.
    #[derive(Clone, Debug)]
    struct ModelStep {
        /// Whether the run has high priority, and its member's load.
        arrival: Option<(bool, usize)>,
        seconds: u64,
        grants: bool,
    }

    fn steps() -> impl Strategy<Value = Vec<ModelStep>> {
        let step = (
            proptest::option::of((any::<bool>(), 0..4_usize)),
            0..30_u64,
            any::<bool>(),
        );
        let step = step.prop_map(|(arrival, seconds, grants)| ModelStep {
            arrival,
            seconds,
            grants,
        });
        proptest::collection::vec(step, 1..200)
    }

    proptest! {
        #[test]
        fn overdue_waiter_gets_turn_within_bound(
            steps in steps()
        ) {
            let (mut now, mut number, mut last) = (0, 0, None);
            let mut waiting: Vec<Waiter> = Vec::new();
            // For each overdue run: the number of slots granted to others since.
            let mut granted_since: std::collections::BTreeMap<u64, (usize, usize)> = Default::default();
            for step in steps {
                now += step.seconds;
                if let Some((high, load)) = step.arrival {
                    number += 1;
                    let priority = if high { Priority::High } else { Priority::Low };
                    waiting.push(waiter(number, priority, now, load));
                }
                for waiter in &waiting {
                    if at(now).since(waiter.since) >= OVERDUE {
                        let earlier = waiting.iter().filter(|other| {
                            other.priority == waiter.priority && other.number < waiter.number
                        });
                        let ahead = earlier.count();
                        granted_since.entry(waiter.number).or_insert((0, ahead));
                    }
                }
                if !step.grants {
                    continue;
                }
                let chosen = next(waiting.iter().copied(), last, at(now));
                prop_assert_eq!(chosen.is_some(), !waiting.is_empty());
                if let Some(chosen) = chosen {
                    let index = waiting.iter().position(|waiter| waiter.number == chosen).unwrap();
                    last = Some(waiting.remove(index).priority);
                    granted_since.remove(&chosen);
                    for (grants, ahead) in granted_since.values_mut() {
                        *grants += 1;
                        prop_assert!(*grants <= 2 * *ahead + 2, "{} with {} ahead", grants, ahead);
                    }
                }
            }
        }

        #[test]
        fn next_waiter_is_independent_of_input_order(
            kinds in proptest::collection::vec((any::<bool>(), 0..120_u64, 0..3_usize), 0..20),
            last in proptest::option::of(any::<bool>()),
        ) {
            let priority = |high: bool| if high { Priority::High } else { Priority::Low };
            let mut all: Vec<Waiter> = (0..)
                .zip(&kinds)
                .map(|(number, (high, since, load))| waiter(number, priority(*high), *since, *load))
                .collect();
            let chosen = next(all.iter().copied(), last.map(priority), at(120));
            all.reverse();
            prop_assert_eq!(next(all.iter().copied(), last.map(priority), at(120)), chosen);
        }
    }
}
