//! Stores the desired Tenants, the objects that may disappear, and the observed violations. The faults and the watches
//! share it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{
    judgement::{Expected, Violation, Wanted},
    snapshot::Place,
    whom::{Edge, Object, Tenant, Workspace},
};

#[derive(Debug, Default)]
struct State {
    expected: Expected,
    /// UIDs of all existing objects of the chart, with their releases.
    seen: BTreeMap<(Edge, Object, Place), (String, String)>,
    /// UIDs of objects that a user has deleted, or whose Tenant is deleted.
    may_go: BTreeSet<String>,
    /// The latest leader epoch that has written each object of home, by UID.
    leads: BTreeMap<String, u64>,
    violations: Vec<Violation>,
}

#[derive(Debug, Default)]
pub(crate) struct ExpectedState(Mutex<State>);

impl ExpectedState {
    pub(crate) fn new(expected: Expected) -> Self {
        Self(Mutex::new(State {
            expected,
            ..State::default()
        }))
    }

    pub(crate) fn expected(&self) -> Expected {
        self.lock().expected.clone()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Expected)) {
        change(&mut self.lock().expected);
    }

    pub(crate) fn is_wanted(&self, tenant: Tenant) -> bool {
        self.lock().expected.tenants.contains_key(&tenant)
    }

    pub(crate) fn wanted(&self, tenant: Tenant) -> Option<Wanted> {
        self.lock().expected.tenants.get(&tenant).cloned()
    }

    /// From now on, the Tenant must exist.
    pub(crate) fn want(&self, tenant: Tenant, workspace: Workspace) {
        let wanted = Wanted {
            workspace,
            held: false,
        };
        self.lock().expected.tenants.insert(tenant, wanted);
    }

    pub(crate) fn hold(&self, tenant: Tenant, held: bool) {
        if let Some(wanted) = self.lock().expected.tenants.get_mut(&tenant) {
            wanted.held = held;
        }
    }

    /// From now on, the Tenant and all its objects must go. A namespace that Krypton created for it must go too, unless
    /// it contains other objects.
    pub(crate) fn unwant(&self, tenant: Tenant) -> Option<Wanted> {
        let mut book = self.lock();
        let wanted = book.expected.tenants.remove(&tenant)?;
        let release = tenant.release();
        let own = book.seen.values().filter(|(_, of)| *of == release);
        let own: Vec<String> = own.map(|(uid, _)| uid.clone()).collect();
        book.may_go.extend(own);
        Some(wanted)
    }

    /// Returns true if any object of the Tenant's release exists.
    pub(crate) fn is_installed(&self, tenant: Tenant) -> bool {
        let release = tenant.release();
        self.lock().seen.values().any(|(_, of)| *of == release)
    }

    /// Records that a user deletes this object.
    pub(crate) fn may_go(&self, uid: &str) {
        self.lock().may_go.insert(uid.to_owned());
    }

    /// Records that an object of the chart exists.
    pub(crate) fn there(&self, edge: Edge, kind: Object, place: &Place, release: &str, uid: &str) {
        let mut book = self.lock();
        let live = book.expected.tenants.keys();
        if !live.into_iter().any(|tenant| tenant.release() == release) {
            book.may_go.insert(uid.to_owned());
        }
        let now = (uid.to_owned(), release.to_owned());
        let before = book.seen.insert((edge, kind, place.clone()), now.clone());
        if let Some(before) = before.filter(|before| before.0 != now.0) {
            book.lost(edge, kind, place, &before, &format!("it is {uid} now"));
        }
    }

    /// Records that an object is gone.
    pub(crate) fn gone(&self, edge: Edge, kind: Object, place: &Place) {
        let mut book = self.lock();
        if let Some(before) = book.seen.remove(&(edge, kind, place.clone())) {
            book.lost(edge, kind, place, &before, "it is gone");
        }
    }

    /// Records the complete list of a kind.
    pub(crate) fn only(&self, edge: Edge, kind: Object, all: &BTreeSet<Place>) {
        let missing: Vec<Place> = {
            let book = self.lock();
            let of_kind = book
                .seen
                .keys()
                .filter(|(at, of, _)| (*at, *of) == (edge, kind));
            let missing = of_kind.filter(|(_, _, place)| !all.contains(place));
            missing.map(|(_, _, place)| place.clone()).collect()
        };
        for place in missing {
            self.gone(edge, kind, &place);
        }
    }

    /// Records that the leader of this epoch wrote this object of home.
    pub(crate) fn written(&self, what: &str, uid: &str, epoch: u64) {
        let mut book = self.lock();
        let latest = book.leads.entry(uid.to_owned()).or_default();
        let before = std::mem::replace(latest, epoch.max(*latest));
        if epoch < before {
            let story = format!(
                "{what}, {uid}, was written in epoch {epoch}, after epoch {before}; {}",
                jiff::Timestamp::now()
            );
            book.violations.push(Violation {
                promise: "an earlier leader overwrites nothing",
                story,
            });
        }
    }

    pub(crate) fn violations(&self) -> Vec<Violation> {
        self.lock().violations.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn lost(
        &mut self,
        edge: Edge,
        kind: Object,
        (namespace, name): &Place,
        (uid, release): &(String, String),
        now: &str,
    ) {
        if self.may_go.contains(uid) {
            return;
        }
        let story = format!(
            "{kind:?} {name} of {release} in {namespace} on {}, {uid}: {now}, without a deletion by a user; {}",
            edge.name(),
            jiff::Timestamp::now()
        );
        self.violations.push(Violation {
            promise: "nothing of a live Tenant is uninstalled",
            story,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENANT: Tenant = Tenant(0);

    fn place() -> Place {
        ("t-000-ws".to_owned(), TENANT.release())
    }

    fn with_object() -> ExpectedState {
        let expected_state = ExpectedState::default();
        expected_state.want(TENANT, Workspace::Own);
        appears(&expected_state, "first");
        expected_state
    }

    fn appears(expected_state: &ExpectedState, uid: &str) {
        let release = TENANT.release();
        expected_state.there(Edge::One, Object::Deployment, &place(), &release, uid);
    }

    #[test]
    fn loss_of_live_tenant_object_is_violation() {
        let expected_state = with_object();
        expected_state.gone(Edge::One, Object::Deployment, &place());
        assert_eq!(expected_state.violations().len(), 1);

        let expected_state = with_object();
        appears(&expected_state, "second");
        assert_eq!(expected_state.violations().len(), 1);

        let expected_state = with_object();
        expected_state.only(Edge::One, Object::ConfigMap, &BTreeSet::new());
        assert_eq!(expected_state.violations(), []);
        expected_state.only(Edge::One, Object::Deployment, &BTreeSet::new());
        assert_eq!(expected_state.violations().len(), 1);
    }

    #[test]
    fn announced_object_may_vanish_once() {
        for by_user in [true, false] {
            let expected_state = with_object();
            if by_user {
                expected_state.may_go("first");
            } else {
                expected_state.unwant(TENANT);
            }
            expected_state.gone(Edge::One, Object::Deployment, &place());
            expected_state.want(TENANT, Workspace::Own);
            appears(&expected_state, "second");
            assert_eq!(expected_state.violations(), [], "by user: {by_user}");
            expected_state.gone(Edge::One, Object::Deployment, &place());
            assert_eq!(expected_state.violations().len(), 1, "by user: {by_user}");
        }
    }

    #[test]
    fn stale_leader_overwrite_is_reported_as_violation() {
        let expected_state = ExpectedState::default();
        for epoch in [1, 1, 3] {
            expected_state.written("Tenant t-000", "one", epoch);
        }
        expected_state.written("Tenant t-002", "two", 2);
        assert_eq!(expected_state.violations(), []);
        expected_state.written("Tenant t-000", "one", 2);
        assert_eq!(expected_state.violations().len(), 1);
        expected_state.written("Tenant t-000", "one", 3);
        assert_eq!(expected_state.violations().len(), 1);
    }
}
