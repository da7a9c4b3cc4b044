//! Digests of the desired state. Values may be a megabyte, so each digest is computed once and kept.

use std::sync::{Arc, OnceLock};

use krypton_types::desired::{ChartState, DesiredState};

use crate::owner::ReleaseOwner;

/// The digests of one desired state. Each is computed when it is first needed.
#[derive(Debug, Default)]
pub(super) struct DesiredDigests {
    /// `None` before there is a desired state.
    desired: Option<Arc<DesiredState>>,
    state: OnceLock<Arc<str>>,
    chart: OnceLock<Arc<str>>,
}

impl DesiredDigests {
    pub(super) fn new(desired: Arc<DesiredState>) -> Self {
        Self {
            desired: Some(desired),
            ..Self::default()
        }
    }

    pub(super) fn is_for(&self, desired: &Arc<DesiredState>) -> bool {
        let known = self.desired.as_ref();
        known.is_some_and(|known| Arc::ptr_eq(known, desired))
    }

    /// The digest of the desired state.
    pub(super) fn state(&self, desired: &Arc<DesiredState>) -> Arc<str> {
        self.cached(&self.state, desired, || desired.digest())
    }

    /// The fingerprint of its chart.
    pub(super) fn chart(&self, desired: &Arc<DesiredState>) -> Arc<str> {
        self.cached(&self.chart, desired, || desired.chart.fingerprint())
    }

    /// Computes the digest of any other desired state without keeping it.
    fn cached(
        &self,
        slot: &OnceLock<Arc<str>>,
        desired: &Arc<DesiredState>,
        compute: impl FnOnce() -> String,
    ) -> Arc<str> {
        match self.is_for(desired) {
            true => Arc::clone(slot.get_or_init(|| compute().into())),
            false => compute().into(),
        }
    }
}

/// Caches the fingerprint of an owner's chart where the owner adds values.
#[derive(Debug, Default)]
pub(super) struct FingerprintCache(Option<(Arc<DesiredState>, ReleaseOwner, Arc<str>)>);

impl FingerprintCache {
    /// `chart` is the one for `owner` in `desired`.
    pub(super) fn fingerprint(
        &mut self,
        chart: &ChartState,
        desired: &Arc<DesiredState>,
        owner: &ReleaseOwner,
    ) -> Arc<str> {
        if let Some((cached_desired, cached_owner, cached)) = &self.0
            && Arc::ptr_eq(cached_desired, desired)
            && cached_owner.values() == owner.values()
        {
            return Arc::clone(cached);
        }
        let fingerprint: Arc<str> = chart.fingerprint().into();
        self.0 = Some((Arc::clone(desired), owner.clone(), Arc::clone(&fingerprint)));
        fingerprint
    }
}

#[cfg(test)]
mod tests {
    use krypton_crds::tenant::{Tenant, TenantSpec};
    use krypton_types::placed_tenant::PlacedTenant;
    use serde_json::json;

    use super::*;

    fn desired() -> Arc<DesiredState> {
        let desired = json!({
            "version": { "epoch": 1, "generation": 1 },
            "chart": { "repo": "r", "name": "n", "version": "1", "install_crds": false, "values": {} },
            "paused": false,
            "tenantValues": true,
        });
        Arc::new(serde_json::from_value(desired).unwrap())
    }

    #[test]
    fn digests_are_computed_once_per_desired_state() {
        let (first, second) = (desired(), desired());
        let digests = DesiredDigests::new(Arc::clone(&first));
        for digest in [DesiredDigests::state, DesiredDigests::chart] {
            let cached = digest(&digests, &first);
            assert!(Arc::ptr_eq(&cached, &digest(&digests, &first)));
            let other = digest(&digests, &second);
            assert!(cached == other && !Arc::ptr_eq(&cached, &other));
        }
        assert_eq!(*digests.state(&first), first.digest());
        assert_eq!(*digests.chart(&first), first.chart.fingerprint());
        let other = DesiredState {
            placed: vec![PlacedTenant::default()],
            ..(*first).clone()
        };
        assert_eq!(*digests.state(&Arc::new(other.clone())), other.digest());
    }

    #[test]
    fn own_values_are_rehashed_only_after_change() {
        let owner = |replicas: u32, generation: i64| {
            let values = json!({ "replicas": replicas }).as_object().cloned();
            let mut tenant = Tenant::new("acme", TenantSpec::default());
            tenant.spec.values = values;
            tenant.metadata.generation = Some(generation);
            ReleaseOwner::Tenant(Arc::new(tenant))
        };
        let desired = desired();
        let mut cache = FingerprintCache::default();
        let mut fingerprint_of = |owner: &ReleaseOwner| {
            let chart = desired.chart_with(owner.values());
            let fingerprint = cache.fingerprint(&chart, &desired, owner);
            assert_eq!(*fingerprint, chart.fingerprint());
            fingerprint
        };
        let first = fingerprint_of(&owner(1, 1));
        assert!(Arc::ptr_eq(&first, &fingerprint_of(&owner(1, 2))));
        assert_ne!(first, fingerprint_of(&owner(2, 3)));
        assert_eq!(first, fingerprint_of(&owner(1, 4)));
    }
}
