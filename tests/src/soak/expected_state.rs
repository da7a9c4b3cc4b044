//! Stores the desired Tenants, the objects that may disappear, and the observed violations. The faults and the watches
//! share it.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use super::{
    judgement::{ExpectedFleet, ExpectedTenant, Violation},
    snapshot::ObjectKey,
    whom::{Edge, Object, Tenant, Workspace},
};

#[derive(Debug, Default)]
struct FleetRecord {
    expected: ExpectedFleet,
    /// UIDs of all existing objects of the chart, with their releases.
    objects: BTreeMap<(Edge, Object, ObjectKey), (String, String)>,
    /// UIDs of objects that a user has deleted, or whose Tenant is deleted.
    deletable: BTreeSet<String>,
    /// The latest leader epoch that has written each object of home, by UID.
    epochs: BTreeMap<String, u64>,
    violations: Vec<Violation>,
}

#[derive(Debug, Default)]
pub(crate) struct ExpectedState(Mutex<FleetRecord>);

impl ExpectedState {
    pub(crate) fn new(expected: ExpectedFleet) -> Self {
        Self(Mutex::new(FleetRecord {
            expected,
            ..FleetRecord::default()
        }))
    }

    pub(crate) fn expected(&self) -> ExpectedFleet {
        self.0.lock().expected.clone()
    }

    pub(crate) fn update(&self, update: impl FnOnce(&mut ExpectedFleet)) {
        update(&mut self.0.lock().expected);
    }

    pub(crate) fn expected_tenant(&self, tenant: Tenant) -> Option<ExpectedTenant> {
        self.0.lock().expected.tenants.get(&tenant).cloned()
    }

    /// From now on, the Tenant must exist.
    pub(crate) fn expect(&self, tenant: Tenant, workspace: Workspace) {
        let tenant_state = ExpectedTenant {
            workspace,
            has_foreign_finalizer: false,
        };
        self.0.lock().expected.tenants.insert(tenant, tenant_state);
    }

    pub(crate) fn set_foreign_finalizer(&self, tenant: Tenant, value: bool) {
        if let Some(tenant_state) = self.0.lock().expected.tenants.get_mut(&tenant) {
            tenant_state.has_foreign_finalizer = value;
        }
    }

    /// From now on, the Tenant and all its objects must go. A namespace that Krypton created for it must go too, unless
    /// it contains other objects.
    pub(crate) fn expect_deletion(&self, tenant: Tenant) -> Option<ExpectedTenant> {
        let mut state = self.0.lock();
        let tenant_state = state.expected.tenants.remove(&tenant)?;
        let release = tenant.release();
        let uids = state
            .objects
            .values()
            .filter(|(_, owner)| *owner == release);
        let uids: Vec<String> = uids.map(|(uid, _)| uid.clone()).collect();
        state.deletable.extend(uids);
        Some(tenant_state)
    }

    /// Returns true if any object of the Tenant's release exists.
    pub(crate) fn is_installed(&self, tenant: Tenant) -> bool {
        let release = tenant.release();
        self.0
            .lock()
            .objects
            .values()
            .any(|(_, owner)| *owner == release)
    }

    /// Records that a user deletes this object.
    pub(crate) fn allow_deletion(&self, uid: &str) {
        self.0.lock().deletable.insert(uid.to_owned());
    }

    /// Records that an object of the chart exists.
    pub(crate) fn record_object(
        &self,
        edge: Edge,
        kind: Object,
        place: &ObjectKey,
        release: &str,
        uid: &str,
    ) {
        let mut state = self.0.lock();
        let expected_tenants = state.expected.tenants.keys();
        if !expected_tenants
            .into_iter()
            .any(|tenant| tenant.release() == release)
        {
            state.deletable.insert(uid.to_owned());
        }
        let current = (uid.to_owned(), release.to_owned());
        let previous = state
            .objects
            .insert((edge, kind, place.clone()), current.clone());
        if let Some(previous) = previous.filter(|previous| previous.0 != current.0) {
            state.report_loss(edge, kind, place, &previous, &format!("it is {uid} now"));
        }
    }

    /// Records that an object is gone.
    pub(crate) fn record_deletion(&self, edge: Edge, kind: Object, place: &ObjectKey) {
        let mut state = self.0.lock();
        if let Some(previous) = state.objects.remove(&(edge, kind, place.clone())) {
            state.report_loss(edge, kind, place, &previous, "it is gone");
        }
    }

    /// Records the complete list of a kind.
    pub(crate) fn record_list(&self, edge: Edge, kind: Object, all: &BTreeSet<ObjectKey>) {
        let missing: Vec<ObjectKey> = {
            let state = self.0.lock();
            let places = state
                .objects
                .keys()
                .filter(|(edge_seen, kind_seen, _)| (*edge_seen, *kind_seen) == (edge, kind));
            let missing = places.filter(|(_, _, place)| !all.contains(place));
            missing.map(|(_, _, place)| place.clone()).collect()
        };
        for place in missing {
            self.record_deletion(edge, kind, &place);
        }
    }

    /// Records that the leader of this epoch wrote this object of home.
    pub(crate) fn record_write(&self, what: &str, uid: &str, epoch: u64) {
        let mut state = self.0.lock();
        let latest = state.epochs.entry(uid.to_owned()).or_default();
        let previous = std::mem::replace(latest, epoch.max(*latest));
        if epoch < previous {
            let details = format!(
                "{what}, {uid}, was written in epoch {epoch}, after epoch {previous}; {}",
                jiff::Timestamp::now()
            );
            state.violations.push(Violation {
                promise: "an earlier leader overwrites nothing",
                details,
            });
        }
    }

    pub(crate) fn violations(&self) -> Vec<Violation> {
        self.0.lock().violations.clone()
    }
}

impl FleetRecord {
    fn report_loss(
        &mut self,
        edge: Edge,
        kind: Object,
        (namespace, name): &ObjectKey,
        (uid, release): &(String, String),
        current: &str,
    ) {
        if self.deletable.contains(uid) {
            return;
        }
        let details = format!(
            "{kind:?} {name} of {release} in {namespace} on {}, {uid}: {current}, without a deletion by a user; {}",
            edge.name(),
            jiff::Timestamp::now()
        );
        self.violations.push(Violation {
            promise: "nothing of a live Tenant is uninstalled",
            details,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENANT: Tenant = Tenant(0);

    fn place() -> ObjectKey {
        ("t-000-ws".to_owned(), TENANT.release())
    }

    fn with_object() -> ExpectedState {
        let expected_state = ExpectedState::default();
        expected_state.expect(TENANT, Workspace::Own);
        appears(&expected_state, "first");
        expected_state
    }

    fn appears(expected_state: &ExpectedState, uid: &str) {
        let release = TENANT.release();
        expected_state.record_object(Edge::One, Object::Deployment, &place(), &release, uid);
    }

    #[test]
    fn loss_of_live_tenant_object_is_violation() {
        let expected_state = with_object();
        expected_state.record_deletion(Edge::One, Object::Deployment, &place());
        assert_eq!(expected_state.violations().len(), 1);

        let expected_state = with_object();
        appears(&expected_state, "second");
        assert_eq!(expected_state.violations().len(), 1);

        let expected_state = with_object();
        expected_state.record_list(Edge::One, Object::ConfigMap, &BTreeSet::new());
        assert_eq!(expected_state.violations(), []);
        expected_state.record_list(Edge::One, Object::Deployment, &BTreeSet::new());
        assert_eq!(expected_state.violations().len(), 1);
    }

    #[test]
    fn announced_object_may_vanish_once() {
        for by_user in [true, false] {
            let expected_state = with_object();
            if by_user {
                expected_state.allow_deletion("first");
            } else {
                expected_state.expect_deletion(TENANT);
            }
            expected_state.record_deletion(Edge::One, Object::Deployment, &place());
            expected_state.expect(TENANT, Workspace::Own);
            appears(&expected_state, "second");
            assert_eq!(expected_state.violations(), [], "by user: {by_user}");
            expected_state.record_deletion(Edge::One, Object::Deployment, &place());
            assert_eq!(expected_state.violations().len(), 1, "by user: {by_user}");
        }
    }

    #[test]
    fn stale_leader_overwrite_is_reported_as_violation() {
        let expected_state = ExpectedState::default();
        for epoch in [1, 1, 3] {
            expected_state.record_write("Tenant t-000", "one", epoch);
        }
        expected_state.record_write("Tenant t-002", "two", 2);
        assert_eq!(expected_state.violations(), []);
        expected_state.record_write("Tenant t-000", "one", 2);
        assert_eq!(expected_state.violations().len(), 1);
        expected_state.record_write("Tenant t-000", "one", 3);
        assert_eq!(expected_state.violations().len(), 1);
    }
}
