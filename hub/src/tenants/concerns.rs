//! Indexes home's Tenants by member, for decisions that follow from one member's change.

use std::collections::{BTreeMap, BTreeSet};

use krypton_crds::tenant::Tenant;
use krypton_types::conditions::parse_condition_type;
use krypton_types::placed_tenant::{place, placed_on};
use krypton_types::tenant::TenantKey;

/// Indexes Tenants by the members in their spec, placement and conditions, and by the UIDs of the clusters
/// on which they are placed.
#[derive(Debug, Default)]
pub(super) struct Concerns {
    members: BTreeMap<String, BTreeSet<TenantKey>>,
    clusters: BTreeMap<String, BTreeSet<TenantKey>>,
}

impl Concerns {
    /// Replaces a Tenant in the index. `None` means that it does not exist.
    pub(super) fn follow(
        &mut self,
        key: &TenantKey,
        before: Option<&Tenant>,
        after: Option<&Tenant>,
    ) {
        let of = |tenant: Option<&Tenant>| tenant.map(concerned).unwrap_or_default();
        let (was, is) = (of(before), of(after));
        move_key(&mut self.members, key, &was, &is);
        let cluster = |tenant: Option<&Tenant>| -> BTreeSet<String> {
            let place = tenant.and_then(place);
            place
                .map(|place| place.cluster_uid.clone())
                .into_iter()
                .collect()
        };
        move_key(&mut self.clusters, key, &cluster(before), &cluster(after));
    }

    pub(super) fn of_member(&self, name: &str) -> impl Iterator<Item = TenantKey> {
        self.members.get(name).into_iter().flatten().cloned()
    }

    pub(super) fn of_cluster(&self, uid: &str) -> impl Iterator<Item = TenantKey> {
        self.clusters.get(uid).into_iter().flatten().cloned()
    }
}

fn move_key(
    index: &mut BTreeMap<String, BTreeSet<TenantKey>>,
    key: &TenantKey,
    was: &BTreeSet<String>,
    is: &BTreeSet<String>,
) {
    for name in was.difference(is) {
        if let Some(keys) = index.get_mut(name) {
            keys.remove(key);
            if keys.is_empty() {
                index.remove(name);
            }
        }
    }
    for name in is.difference(was) {
        index.entry(name.clone()).or_default().insert(key.clone());
    }
}

fn concerned(tenant: &Tenant) -> BTreeSet<String> {
    let named = tenant.names_member().into_iter().chain(placed_on(tenant));
    named
        .chain(recorded_with(tenant))
        .map(str::to_owned)
        .collect()
}

/// Returns the members with their own conditions.
pub(super) fn recorded_with(tenant: &Tenant) -> BTreeSet<&str> {
    let status = tenant.status.as_ref();
    let conditions = status.map(|status| status.conditions.iter());
    let types = conditions.into_iter().flatten();
    types
        .filter_map(|condition| parse_condition_type(&condition.type_))
        .map(|(_, member)| member)
        .collect()
}
