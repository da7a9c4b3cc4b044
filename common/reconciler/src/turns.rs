//! Limits the number of Tenants and deployments with a running job, first come, first served.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::owner::OwnerKey;

/// A limited number of turns, and the queue for them. Dropping the permit returns the turn, even if its task panics.
pub(super) struct ConcurrencyLimit {
    free: Arc<Semaphore>,
    queue: BTreeMap<Place, OwnerKey>,
    places: BTreeMap<OwnerKey, Place>,
    last: Place,
}

/// Position in the queue. An owner keeps it through further plans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(u64);

impl ConcurrencyLimit {
    pub(crate) fn new(turns: usize) -> Self {
        Self {
            free: Arc::new(Semaphore::new(turns)),
            queue: BTreeMap::new(),
            places: BTreeMap::new(),
            last: Place::default(),
        }
    }

    /// Removes `key` from the queue, because its new plan may need no turn.
    pub(super) fn leave(&mut self, key: &OwnerKey) -> Option<Place> {
        let place = self.places.remove(key)?;
        self.queue.remove(&place);
        Some(place)
    }

    /// Returns a turn for `key`. If none is free, queues `key` at its previous `place` or at the end.
    pub(super) fn take(
        &mut self,
        key: &OwnerKey,
        place: Option<Place>,
    ) -> Option<OwnedSemaphorePermit> {
        let turn = Arc::clone(&self.free).try_acquire_owned().ok();
        if turn.is_none() {
            let place = place.unwrap_or_else(|| {
                self.last.0 += 1;
                self.last
            });
            self.queue.insert(place, key.clone());
            self.places.insert(key.clone(), place);
        }
        turn
    }

    /// Returns the number of waiting owners.
    pub(super) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Returns the first waiting owner if a turn is free. The owner may no longer need a turn, so the caller repeats
    /// the call until it returns `None`.
    pub(super) fn next(&self) -> Option<OwnerKey> {
        let (_, first) = self.queue.first_key_value()?;
        (self.free.available_permits() > 0).then(|| first.clone())
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::tenant::TenantKey;
    use proptest::prelude::*;

    use super::*;

    fn key(number: u8) -> OwnerKey {
        OwnerKey::Tenant(TenantKey {
            namespace: "default".to_owned(),
            name: format!("t{number}"),
        })
    }

    #[test]
    fn queue_keeps_arrival_order_when_key_is_readded() {
        let mut turns = ConcurrencyLimit::new(1);
        let turn = turns.take(&key(5), None);
        for number in [9, 1, 4] {
            assert!(turns.take(&key(number), None).is_none());
        }
        let place = turns.leave(&key(9));
        assert!(turns.take(&key(9), place).is_none());
        assert_eq!(turns.next(), None, "no turn is free");
        drop(turn);
        assert_eq!(turns.next(), Some(key(9)));
    }

    proptest! {
        /// Imitates the reconciler: an owner that leaves the queue may or may not need a turn.
        #[test]
        fn limit_is_never_exceeded_and_never_left_unused(
            steps in proptest::collection::vec((0..2_u8, 0..12_u8, any::<bool>()), 0..200)
        ) {
            let mut turns = ConcurrencyLimit::new(3);
            let mut out = Vec::new();
            for (step, number, needs) in steps {
                if step == 0 {
                    let place = turns.leave(&key(number));
                    out.extend(turns.take(&key(number), place));
                } else if !out.is_empty() {
                    drop(out.remove(usize::from(number) % out.len()));
                }
                while let Some(next) = turns.next() {
                    let place = turns.leave(&next);
                    if needs {
                        out.extend(turns.take(&next, place));
                    }
                }
                prop_assert!(out.len() <= 3);
                prop_assert!(out.len() == 3 || turns.queue.is_empty());
                prop_assert_eq!(turns.queue.len(), turns.places.len());
            }
        }
    }
}
