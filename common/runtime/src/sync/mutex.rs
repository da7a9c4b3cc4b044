//! The mutex of the standard library, with a turn in the schedule before it is locked and after it is unlocked.

use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError};

use super::schedule::Claim;

/// Has the methods of [`std::sync::Mutex`] that Krypton uses.
#[derive(Debug, Default)]
pub struct Mutex<T>(std::sync::Mutex<T>);

/// Unlocks the mutex when it is dropped.
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    // Dropped before the claim, so the next thread finds the mutex unlocked.
    value: std::sync::MutexGuard<'a, T>,
    _claim: Claim,
}

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// Waits for the mutex and locks it.
    ///
    /// # Errors
    /// Fails if a thread has panicked while it held the mutex. The error contains the guard.
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let claim = Claim::new(std::ptr::from_ref(self).addr());
        match self.0.lock() {
            Ok(value) => Ok(MutexGuard {
                value,
                _claim: claim,
            }),
            Err(poisoned) => Err(PoisonError::new(MutexGuard {
                value: poisoned.into_inner(),
                _claim: claim,
            })),
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
