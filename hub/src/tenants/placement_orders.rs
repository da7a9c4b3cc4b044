//! Maintains the orders that place home's Tenants on members. Publishes them once all of home has been
//! read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use krypton_crds::tenant::Tenant;
use krypton_types::placed_tenant::{PlacedTenant, placed_on};
use krypton_types::tenant::TenantKey;

use super::placement::{self, Deletion};
use crate::members::placement_orders::{Placements, fit};
use crate::members::tenant_reports::Targets;

/// The orders, and the Tenants that exceed a member's limit.
#[derive(Debug)]
pub(super) struct Placing {
    pub(super) placements: Arc<Placements>,
    /// By member, each with its creation time.
    orders: BTreeMap<String, BTreeMap<TenantKey, (i64, PlacedTenant)>>,
    of: BTreeMap<TenantKey, String>,
    left_out: BTreeMap<String, BTreeSet<TenantKey>>,
    /// Tenants to check.
    dirty: BTreeSet<TenantKey>,
    /// Members whose orders have changed.
    changed: BTreeSet<String>,
    /// Whether all orders have been published once.
    given: bool,
    /// The known causes of deletion, each for the Tenant of this UID.
    deletions: BTreeMap<TenantKey, (String, Deletion)>,
    /// Deleted Tenants whose cause of deletion must be read.
    doubted: Doubted,
}

/// Deleted Tenants, each with its UID and deletion time.
pub(super) type Doubted = BTreeMap<TenantKey, (String, Option<Timestamp>)>;

/// The result of reading the CRD.
#[derive(Clone, Copy, Debug)]
pub(super) struct CrdSeen {
    pub(super) deletion: Deletion,
    pub(super) made: Option<Timestamp>,
}

impl CrdSeen {
    /// Returns the cause of a deletion. If the Tenant was deleted before the CRD was created, it went with
    /// an earlier CRD. A client then removed that CRD's finalizer, and etcd kept the objects.
    pub(crate) fn of(&self, deleted: Option<Timestamp>) -> Deletion {
        let before = deleted.zip(self.made).is_some_and(|(at, made)| at < made);
        match self.deletion {
            Deletion::Its if before => Deletion::OfTheCrdForGood,
            other => other,
        }
    }
}

impl Placing {
    pub(super) fn new(placements: Arc<Placements>) -> Self {
        Self {
            placements,
            orders: BTreeMap::new(),
            of: BTreeMap::new(),
            left_out: BTreeMap::new(),
            dirty: BTreeSet::new(),
            changed: BTreeSet::new(),
            given: false,
            deletions: BTreeMap::new(),
            doubted: Doubted::new(),
        }
    }

    /// Starts over with a new list of home. All orders are published again after it, and all causes of
    /// deletion are read again.
    pub(super) fn reset(&mut self) {
        self.given = false;
        self.changed.extend(self.orders.keys().cloned());
        self.dirty.extend(self.of.keys().cloned());
        self.dirty.extend(self.deletions.keys().cloned());
        self.deletions.clear();
        self.doubted.clear();
    }

    pub(super) fn deletion(&self, key: &TenantKey, tenant: &Tenant) -> Deletion {
        let known = self.deletions.get(key);
        let known = known.filter(|(uid, _)| tenant.metadata.uid.as_ref() == Some(uid));
        known.map_or(Deletion::NotKnown, |(_, deletion)| *deletion)
    }

    /// Takes the Tenants whose cause of deletion a read of the CRD must determine.
    pub(super) fn doubted(&mut self) -> Option<Doubted> {
        (!self.doubted.is_empty()).then(|| std::mem::take(&mut self.doubted))
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        !self.doubted.is_empty()
    }

    /// Stores the result of reading the CRD. `None` if the read failed.
    pub(super) fn told(&mut self, of: Doubted, seen: Option<CrdSeen>) {
        match seen {
            None => self.doubted.extend(of),
            Some(seen) => {
                self.dirty.extend(of.keys().cloned());
                let told = of.into_iter();
                let told = told.map(|(key, (uid, at))| (key, (uid, seen.of(at))));
                self.deletions.extend(told);
            }
        }
    }

    pub(super) fn touch(&mut self, keys: impl IntoIterator<Item = TenantKey>) {
        self.dirty.extend(keys);
    }

    pub(super) fn is_left_out(&self, member: &str, key: &TenantKey) -> bool {
        let left_out = self.left_out.get(member);
        left_out.is_some_and(|left_out| left_out.contains(key))
    }

    /// Publishes the orders that have changed. The caller must know all of home's Tenants and EdgeClusters.
    /// Returns the Tenants whose status changes with it.
    pub(super) fn give<'a>(
        &mut self,
        tenant: impl Fn(&TenantKey) -> Option<&'a Tenant>,
        targets: &Targets,
    ) -> BTreeSet<TenantKey> {
        while let Some(key) = self.dirty.pop_first() {
            let order = tenant(&key).and_then(|tenant| {
                let deletion = self.doubt(&key, tenant);
                let created = tenant.metadata.creation_timestamp.as_ref();
                let created = created.map_or(0, |time| time.0.as_second());
                let (member, order) = placement::order(tenant, targets, deletion)?;
                Some((member, (created, order)))
            });
            if tenant(&key).is_none() {
                self.deletions.remove(&key);
                self.doubted.remove(&key);
            }
            self.set(key, order);
        }
        let mut news = BTreeSet::new();
        let mut changed = BTreeMap::new();
        for member in std::mem::take(&mut self.changed) {
            let orders = self.orders.get(&member);
            let orders = orders.map(|orders| orders.values().cloned().collect());
            let (taken, left) = fit(orders.unwrap_or_default());
            let before = self.left_out.insert(member.clone(), left.clone());
            news.extend(
                before
                    .unwrap_or_default()
                    .symmetric_difference(&left)
                    .cloned(),
            );
            changed.insert(member, taken);
        }
        // The first time, all of them have changed.
        if std::mem::replace(&mut self.given, true) {
            for (member, orders) in changed {
                self.placements.order_of(&member, orders);
            }
        } else {
            self.placements.order(changed);
        }
        news
    }

    /// Returns the known cause of a deletion. If it is uncertain, schedules a read of the CRD.
    fn doubt(&mut self, key: &TenantKey, tenant: &Tenant) -> Deletion {
        let deletion = self.deletion(key, tenant);
        let placed = tenant.metadata.deletion_timestamp.is_some() && placed_on(tenant).is_some();
        // A CRD that is being deleted may exist again at the next read.
        if placed
            && deletion != Deletion::Its
            && let Some(uid) = &tenant.metadata.uid
        {
            let at = tenant.metadata.deletion_timestamp.as_ref();
            let at = at.map(|time| time.0);
            self.doubted.insert(key.clone(), (uid.clone(), at));
        }
        deletion
    }

    fn set(&mut self, key: TenantKey, order: Option<(String, (i64, PlacedTenant))>) {
        let member = order.as_ref().map(|(member, _)| member);
        if let Some(before) = self.of.get(&key).filter(|before| Some(*before) != member) {
            if let Some(orders) = self.orders.get_mut(before) {
                orders.remove(&key);
            }
            self.changed.insert(before.clone());
        }
        let Some((member, order)) = order else {
            self.of.remove(&key);
            return;
        };
        let orders = self.orders.entry(member.clone()).or_default();
        if orders.get(&key) != Some(&order) {
            orders.insert(key.clone(), order);
            self.changed.insert(member.clone());
        }
        self.of.insert(key, member);
    }
}

#[cfg(test)]
mod tests {
    use krypton_runtime::clock::BootTime;
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
        TenantKey {
            namespace: "team".to_owned(),
            name: name.to_owned(),
        }
    }

    #[test]
    fn deletion_older_than_crd_concerns_previous_crd() {
        let at = |second| Some(Timestamp::from_second(second).unwrap());
        for (seen, made, deleted, expected) in [
            (Deletion::Its, at(5), at(9), Deletion::Its),
            (Deletion::Its, at(5), at(5), Deletion::Its),
            (Deletion::Its, at(5), at(4), Deletion::OfTheCrdForGood),
            (Deletion::Its, None, at(4), Deletion::Its),
            (Deletion::OfTheCrd, at(5), at(4), Deletion::OfTheCrd),
        ] {
            let crd = CrdSeen {
                deletion: seen,
                made,
            };
            assert_eq!(crd.of(deleted), expected, "{seen:?} {made:?} {deleted:?}");
        }
    }

    #[test]
    fn orders_are_published_complete_and_drop_removed_tenants() {
        let placements = Arc::new(Placements::default());
        let mut placing = Placing::new(Arc::clone(&placements));
        let targets: Targets = ["edge-1", "edge-2"]
            .map(|name| (name.to_owned(), Target::default()))
            .into();
        let mut tenants: BTreeMap<TenantKey, Tenant> = [
            (key("a"), tenant("a", "edge-1")),
            (key("b"), tenant("b", "edge-2")),
        ]
        .into();
        placing.touch(tenants.keys().cloned());
        let mut orders = placements.orders();
        assert!(orders.get().is_none());
        let given = |placing: &mut Placing, tenants: &BTreeMap<TenantKey, Tenant>| {
            placing.give(|key| tenants.get(key), &targets)
        };
        assert!(given(&mut placing, &tenants).is_empty());
        let names = |orders: &Option<crate::members::remote_orders::Orders<PlacedTenant>>,
                     member: &str| {
            let orders = orders.as_ref().unwrap().get(member);
            let orders = orders.map_or(&[][..], |orders| orders);
            let names = orders.iter().map(|order| order.name.clone());
            names.collect::<Vec<_>>()
        };
        assert_eq!(names(&orders.see(), "edge-1"), ["a"]);
        assert_eq!(names(&orders.get(), "edge-2"), ["b"]);
        // Repeating the orders publishes nothing.
        placing.touch(tenants.keys().cloned());
        given(&mut placing, &tenants);
        assert!(!orders.has_changed().unwrap());
        tenants.remove(&key("a"));
        placing.touch([key("a")]);
        given(&mut placing, &tenants);
        assert!(names(&orders.see(), "edge-1").is_empty());
        assert_eq!(names(&orders.get(), "edge-2"), ["b"]);
    }

    #[test]
    fn new_term_rechecks_deletion_before_removal() {
        let placements = Arc::new(Placements::default());
        let mut placing = Placing::new(Arc::clone(&placements));
        let targets: Targets = [("edge-1".to_owned(), Target::default())].into();
        let mut deleted = tenant("a", "edge-1");
        let at = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::UNIX_EPOCH);
        deleted.metadata.deletion_timestamp = Some(at);
        let removes = || {
            let orders = placements.orders().get();
            let orders = orders.and_then(|orders| orders.get("edge-1").cloned());
            orders.is_some_and(|orders| orders.iter().any(|order| order.remove))
        };
        let seen = CrdSeen {
            deletion: Deletion::Its,
            made: None,
        };
        placing.touch([key("a")]);
        placing.give(|_| Some(&deleted), &targets);
        let doubted = placing.doubted().unwrap();
        placing.told(doubted, Some(seen));
        placing.give(|_| Some(&deleted), &targets);
        assert!(removes());
        let since = BootTime(std::time::Duration::from_secs(1));
        placements.reset_for_term(since);
        placing.reset();
        placements.read_in(Some(since));
        placing.give(|_| Some(&deleted), &targets);
        assert!(placements.orders().get().is_some() && !removes());
        // In the interim, the finalizer was removed.
        placing.touch([key("a")]);
        placing.give(|_| None, &targets);
        assert!(!removes() && !placing.is_in_doubt());
    }

    #[test]
    fn tenant_is_reported_when_left_out_and_readmitted() {
        let placements = Arc::new(Placements::default());
        let mut placing = Placing::new(placements);
        let targets: Targets = [("edge-1".to_owned(), Target::default())].into();
        let mut tenants: BTreeMap<TenantKey, Tenant> = BTreeMap::new();
        for name in ["a", "b", "c"] {
            let mut tenant = tenant(name, "edge-1");
            let large = json!({ "v": "x".repeat(150 * 1024) });
            tenant.spec.values = large.as_object().cloned();
            tenants.insert(key(name), tenant);
        }
        placing.touch(tenants.keys().cloned());
        let news = placing.give(|key| tenants.get(key), &targets);
        assert_eq!(news, [key("c")].into());
        assert!(placing.is_left_out("edge-1", &key("c")));
        tenants.remove(&key("a"));
        placing.touch([key("a")]);
        let news = placing.give(|key| tenants.get(key), &targets);
        assert_eq!(news, [key("c")].into());
        assert!(!placing.is_left_out("edge-1", &key("c")));
    }
}
