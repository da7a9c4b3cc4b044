//! What the reconciler remembers of a Tenant or KryptonDeployment between two reconciles.

use krypton_runtime::clock::BootTime;
use krypton_types::desired::DesiredState;

use crate::digests::FingerprintCache;
use crate::owner::ReleaseOwner;
use crate::plan::{Attempt, Memory};

/// State of a Tenant or KryptonDeployment between two reconciles.
#[derive(Default)]
pub(crate) struct OwnerState {
    pub memory: Memory,
    /// The running action handles a deletion.
    pub is_removing: bool,
    /// The last action read the release.
    pub is_reading: bool,
    /// The last action started during a pause.
    pub is_paused: bool,
    /// UID of the object whose deletion was seen while the CRD was intact.
    pub confirmed_deletion: Option<String>,
    pub wake: Option<BootTime>,
    /// Earliest time of the next reconcile, after a failed write.
    pub not_before: Option<BootTime>,
    /// Attempt that is held back until `not_before`. `None` holds back every attempt.
    pub held_attempt: Option<Attempt>,
    /// Number of consecutive actions that failed because their plan was out of date.
    pub conflicts: u32,
    /// The last action stopped because it needs a Helm slot.
    pub needs_slot: bool,
    pub(crate) fingerprint_cache: FingerprintCache,
}

impl OwnerState {
    /// Makes a failed read due, because only a read with the permit, and without a pause, can set aside a release that
    /// cannot be decoded.
    pub(crate) fn retry_read(&mut self, now: BootTime) {
        let refusal = self.memory.refusal.as_mut();
        if let Some(refusal) = refusal.filter(|refusal| refusal.is_read) {
            refusal.retry_at = now;
            (self.not_before, self.held_attempt) = (None, None);
        }
    }

    /// Returns true if the current attempt is the one that is held back.
    pub(crate) fn holds_back(
        &self,
        owner: &ReleaseOwner,
        desired: &DesiredState,
        fingerprint: &str,
    ) -> bool {
        let held_attempt = self.held_attempt.as_ref();
        held_attempt
            .is_none_or(|held_attempt| *held_attempt == Attempt::new(owner, desired, fingerprint))
    }
}
