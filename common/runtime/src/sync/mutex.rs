//! The mutex of parking_lot, with a turn in the schedule before it is locked and after it is unlocked.

use std::ops::{Deref, DerefMut};

use super::schedule::Claim;

/// Has the methods of [`parking_lot::Mutex`] that Krypton uses.
#[derive(Debug, Default)]
pub struct Mutex<T>(parking_lot::Mutex<T>);

/// Unlocks the mutex when it is dropped.
#[derive(Debug)]
#[must_use = "dropping it unlocks the mutex"]
pub struct MutexGuard<'a, T> {
    // Dropped before the claim, so the next thread finds the mutex unlocked.
    value: parking_lot::MutexGuard<'a, T>,
    _claim: Claim,
}

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    /// Waits for the mutex and locks it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let claim = Claim::new(std::ptr::from_ref(self).addr());
        MutexGuard {
            value: self.0.lock(),
            _claim: claim,
        }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}
