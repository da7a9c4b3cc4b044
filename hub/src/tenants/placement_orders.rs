//! Maintains the orders that place home's Tenants on members. Publishes them once all of home has been
//! read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use krypton_crds::tenant::Tenant;
use krypton_runtime::clock::BootTime;
use krypton_types::placed_tenant::{PlacedReport, PlacedTenant, placed_on};
use krypton_types::tenant::{Lifetime, TenantKey};

use super::placement::{self, TenantDeletionCause};
use crate::members::placement_orders::{PlacementOrders, fit};
use crate::members::tenant_reports::Targets;

/// The orders, and the Tenants that exceed a member's limit.
#[derive(Debug, Default)]
pub(super) struct PlacementPlanner {
    /// `None` if the hub does not place Tenants.
    placements: Option<Arc<PlacementOrders>>,
    /// By member, each with its creation time.
    orders: BTreeMap<String, BTreeMap<TenantKey, (i64, PlacedTenant)>>,
    member_of: BTreeMap<TenantKey, String>,
    over_limit: BTreeMap<String, BTreeSet<TenantKey>>,
    /// Tenants to check.
    dirty: BTreeSet<TenantKey>,
    /// Members whose orders have changed.
    changed_members: BTreeSet<String>,
    /// Whether all orders have been published once.
    published: bool,
    /// The known causes of deletion, each for the Tenant of this UID.
    deletion_causes: BTreeMap<TenantKey, (String, TenantDeletionCause)>,
    /// Deleted Tenants whose cause of deletion must be read.
    unverified: UnverifiedDeletions,
}

/// Deleted Tenants, each with its UID.
pub(super) type UnverifiedDeletions = BTreeMap<TenantKey, (String, Lifetime)>;

/// The result of reading the CRD.
#[derive(Clone, Copy, Debug)]
pub(super) struct CrdObservation {
    pub(super) cause: TenantDeletionCause,
    pub(super) created: Option<Timestamp>,
}

impl CrdObservation {
    fn cause_of(&self, deleted: Lifetime) -> TenantDeletionCause {
        match self.cause {
            TenantDeletionCause::User if deleted.ended_before(self.created) => {
                TenantDeletionCause::CrdWithoutRestore
            }
            other => other,
        }
    }
}

impl PlacementPlanner {
    pub(super) fn new(placements: Option<Arc<PlacementOrders>>) -> Self {
        Self {
            placements,
            ..Self::default()
        }
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.placements.is_some()
    }

    /// Returns the member's latest report on the order for a Tenant.
    pub(super) fn latest_report(&self, member: &str, key: &TenantKey) -> Option<PlacedReport> {
        let stored = self.placements.as_ref()?.latest_report(member, key)?;
        Some(stored.report)
    }

    /// Starts over with a new list of home. All orders are published again after it, and all causes of
    /// deletion are read again.
    pub(super) fn reset(&mut self) {
        self.published = false;
        self.changed_members.extend(self.orders.keys().cloned());
        self.dirty.extend(self.member_of.keys().cloned());
        self.dirty.extend(self.deletion_causes.keys().cloned());
        self.deletion_causes.clear();
        self.unverified.clear();
    }

    pub(super) fn deletion_cause(&self, key: &TenantKey, tenant: &Tenant) -> TenantDeletionCause {
        let known = self.deletion_causes.get(key);
        let known = known.filter(|(uid, _)| tenant.metadata.uid.as_ref() == Some(uid));
        known.map_or(TenantDeletionCause::Unknown, |(_, cause)| *cause)
    }

    /// Takes the Tenants whose cause of deletion a read of the CRD must determine.
    pub(super) fn take_unverified(&mut self) -> Option<UnverifiedDeletions> {
        (!self.unverified.is_empty()).then(|| std::mem::take(&mut self.unverified))
    }

    pub(super) fn has_unverified(&self) -> bool {
        !self.unverified.is_empty()
    }

    /// Stores the result of reading the CRD. `None` if the read failed.
    pub(super) fn record_crd_read(
        &mut self,
        deletions: UnverifiedDeletions,
        crd: Option<CrdObservation>,
    ) {
        match crd {
            None => self.unverified.extend(deletions),
            Some(crd) => {
                self.dirty.extend(deletions.keys().cloned());
                let causes = deletions.into_iter();
                let causes =
                    causes.map(|(key, (uid, lifetime))| (key, (uid, crd.cause_of(lifetime))));
                self.deletion_causes.extend(causes);
            }
        }
    }

    pub(super) fn mark_dirty(&mut self, keys: impl IntoIterator<Item = TenantKey>) {
        if self.is_enabled() {
            self.dirty.extend(keys);
        }
    }

    pub(super) fn exceeds_limit(&self, member: &str, key: &TenantKey) -> bool {
        let over_limit = self.over_limit.get(member);
        over_limit.is_some_and(|over_limit| over_limit.contains(key))
    }

    /// Publishes the orders that have changed. The caller must know all of home's Tenants and EdgeClusters of
    /// this term. Returns the Tenants whose status changes with it.
    pub(super) fn publish<'a>(
        &mut self,
        term: Option<BootTime>,
        tenant: impl Fn(&TenantKey) -> Option<&'a Tenant>,
        targets: &Targets,
    ) -> BTreeSet<TenantKey> {
        let Some(placements) = self.placements.clone() else {
            return BTreeSet::new();
        };
        placements.read_in(term);
        while let Some(key) = self.dirty.pop_first() {
            let order = tenant(&key).and_then(|tenant| {
                let cause = self.verified_cause(&key, tenant);
                let created = tenant.metadata.creation_timestamp.as_ref();
                let created = created.map_or(0, |time| time.0.as_second());
                let (member, order) = placement::order(tenant, targets, cause)?;
                Some((member, (created, order)))
            });
            if tenant(&key).is_none() {
                self.deletion_causes.remove(&key);
                self.unverified.remove(&key);
            }
            self.set_order(key, order);
        }
        let mut affected = BTreeSet::new();
        let mut changed = BTreeMap::new();
        for member in std::mem::take(&mut self.changed_members) {
            let orders = self.orders.get(&member);
            let orders = orders.map(|orders| orders.values().cloned().collect());
            let (fitting, over_limit) = fit(orders.unwrap_or_default());
            let previous = self.over_limit.insert(member.clone(), over_limit.clone());
            let previous = previous.unwrap_or_default();
            affected.extend(previous.symmetric_difference(&over_limit).cloned());
            changed.insert(member, fitting);
        }
        // The first time, all of them have changed.
        if std::mem::replace(&mut self.published, true) {
            for (member, orders) in changed {
                placements.set_member_orders(&member, orders);
            }
        } else {
            placements.set_orders(changed);
        }
        affected
    }

    /// Returns the known cause of a deletion. If it is uncertain, schedules a read of the CRD.
    fn verified_cause(&mut self, key: &TenantKey, tenant: &Tenant) -> TenantDeletionCause {
        let cause = self.deletion_cause(key, tenant);
        let is_deleted =
            tenant.metadata.deletion_timestamp.is_some() && placed_on(tenant).is_some();
        // A CRD that is being deleted may exist again at the next read.
        if is_deleted
            && cause != TenantDeletionCause::User
            && let Some(uid) = &tenant.metadata.uid
        {
            let lifetime = Lifetime::new(&tenant.metadata);
            self.unverified.insert(key.clone(), (uid.clone(), lifetime));
        }
        cause
    }

    fn set_order(&mut self, key: TenantKey, order: Option<(String, (i64, PlacedTenant))>) {
        let member = order.as_ref().map(|(member, _)| member);
        if let Some(previous) = self
            .member_of
            .get(&key)
            .filter(|previous| Some(*previous) != member)
        {
            if let Some(orders) = self.orders.get_mut(previous) {
                orders.remove(&key);
            }
            self.changed_members.insert(previous.clone());
        }
        let Some((member, order)) = order else {
            self.member_of.remove(&key);
            return;
        };
        let orders = self.orders.entry(member.clone()).or_default();
        if orders.get(&key) != Some(&order) {
            orders.insert(key.clone(), order);
            self.changed_members.insert(member.clone());
        }
        self.member_of.insert(key, member);
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
    use krypton_runtime::newest::{Newest as _, NewestSeen as _};
    use krypton_types::names::{PLACED_FINALIZER, PLACED_ON_ANNOTATION};
    use kube::ResourceExt;
    use serde_json::json;

    use super::*;
    use crate::members::tenant_reports::Target;

    fn tenant(name: &str, member: &str) -> Tenant {
        let spec = json!({ "clusterRef": { "secretName": member } });
        let mut tenant = Tenant::new(name, serde_json::from_value(spec).unwrap());
        tenant.metadata.namespace = Some("team".to_owned());
        tenant.metadata.uid = Some(format!("uid-of-{name}"));
        tenant.finalizers_mut().push(PLACED_FINALIZER.to_owned());
        let on = (PLACED_ON_ANNOTATION.to_owned(), member.to_owned());
        tenant.annotations_mut().extend([on]);
        tenant
    }

    fn key(name: &str) -> TenantKey {
        TenantKey::new("team", name)
    }

    #[test]
    fn deletion_older_than_crd_concerns_previous_crd() {
        use TenantDeletionCause::{Crd, CrdWithoutRestore, User};
        let time = |second| Time(Timestamp::from_second(second).unwrap());
        let crd_created = time(5);
        for (cause, created, deleted, expected) in [
            (User, 1, Some(9), User),
            (User, 1, Some(4), CrdWithoutRestore),
            (User, 1, Some(5), CrdWithoutRestore),
            (User, 5, Some(5), User),
            (User, 1, None, User),
            (Crd, 1, Some(4), Crd),
        ] {
            let lifetime = Lifetime::new(&ObjectMeta {
                creation_timestamp: Some(time(created)),
                deletion_timestamp: deleted.map(time),
                ..ObjectMeta::default()
            });
            let crd = CrdObservation {
                cause,
                created: Some(crd_created.0),
            };
            let case = format!("{cause:?} {created} {deleted:?}");
            assert_eq!(crd.cause_of(lifetime), expected, "{case}");
        }
    }

    #[test]
    fn orders_are_published_complete_and_drop_removed_tenants() {
        let placements = Arc::new(PlacementOrders::default());
        let mut planner = PlacementPlanner::new(Some(Arc::clone(&placements)));
        let targets: Targets = ["edge-1", "edge-2"]
            .map(|name| (name.to_owned(), Target::default()))
            .into();
        let mut tenants: BTreeMap<TenantKey, Tenant> = [
            (key("a"), tenant("a", "edge-1")),
            (key("b"), tenant("b", "edge-2")),
        ]
        .into();
        planner.mark_dirty(tenants.keys().cloned());
        let mut orders = placements.orders();
        assert!(orders.get().is_none());
        let publish = |planner: &mut PlacementPlanner, tenants: &BTreeMap<TenantKey, Tenant>| {
            planner.publish(None, |key| tenants.get(key), &targets)
        };
        assert!(publish(&mut planner, &tenants).is_empty());
        let names = |orders: &Option<crate::members::remote_orders::Orders<PlacedTenant>>,
                     member: &str| {
            let orders = orders.as_ref().unwrap().get(member);
            let orders = orders.map_or(&[][..], |orders| orders);
            let names = orders.iter().map(|order| order.name.clone());
            names.collect::<Vec<_>>()
        };
        assert_eq!(names(&orders.get_and_update(), "edge-1"), ["a"]);
        assert_eq!(names(&orders.get(), "edge-2"), ["b"]);
        // Repeating the orders publishes nothing.
        planner.mark_dirty(tenants.keys().cloned());
        publish(&mut planner, &tenants);
        assert!(!orders.has_changed().unwrap());
        tenants.remove(&key("a"));
        planner.mark_dirty([key("a")]);
        publish(&mut planner, &tenants);
        assert!(names(&orders.get_and_update(), "edge-1").is_empty());
        assert_eq!(names(&orders.get(), "edge-2"), ["b"]);
    }

    #[test]
    fn new_term_rechecks_deletion_before_removal() {
        let placements = Arc::new(PlacementOrders::default());
        let mut planner = PlacementPlanner::new(Some(Arc::clone(&placements)));
        let targets: Targets = [("edge-1".to_owned(), Target::default())].into();
        let mut deleted = tenant("a", "edge-1");
        deleted.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        let removes = || {
            let orders = placements.orders().get();
            let orders = orders.and_then(|orders| orders.get("edge-1").cloned());
            orders.is_some_and(|orders| orders.iter().any(|order| order.remove))
        };
        let crd = CrdObservation {
            cause: TenantDeletionCause::User,
            created: None,
        };
        planner.mark_dirty([key("a")]);
        planner.publish(None, |_| Some(&deleted), &targets);
        let unverified = planner.take_unverified().unwrap();
        planner.record_crd_read(unverified, Some(crd));
        planner.publish(None, |_| Some(&deleted), &targets);
        assert!(removes());
        let since = BootTime(std::time::Duration::from_secs(1));
        placements.reset_for_term(since);
        planner.reset();
        planner.publish(Some(since), |_| Some(&deleted), &targets);
        assert!(placements.orders().get().is_some() && !removes());
        // In the interim, the finalizer was removed.
        planner.mark_dirty([key("a")]);
        planner.publish(Some(since), |_| None, &targets);
        assert!(!removes() && !planner.has_unverified());
    }

    #[test]
    fn tenant_is_reported_when_left_out_and_readmitted() {
        let mut planner = PlacementPlanner::new(Some(Arc::default()));
        let targets: Targets = [("edge-1".to_owned(), Target::default())].into();
        let mut tenants: BTreeMap<TenantKey, Tenant> = BTreeMap::new();
        for name in ["a", "b", "c"] {
            let mut tenant = tenant(name, "edge-1");
            let values = json!({ "v": "x".repeat(150 * 1024) });
            tenant.spec.values = values.as_object().cloned();
            tenants.insert(key(name), tenant);
        }
        planner.mark_dirty(tenants.keys().cloned());
        let affected = planner.publish(None, |key| tenants.get(key), &targets);
        assert_eq!(affected, [key("c")].into());
        assert!(planner.exceeds_limit("edge-1", &key("c")));
        tenants.remove(&key("a"));
        planner.mark_dirty([key("a")]);
        let affected = planner.publish(None, |key| tenants.get(key), &targets);
        assert_eq!(affected, [key("c")].into());
        assert!(!planner.exceeds_limit("edge-1", &key("c")));
    }
}
