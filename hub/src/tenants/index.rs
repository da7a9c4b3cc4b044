//! Indexes home's Tenants by member, for decisions that follow from one member's change.

use std::collections::{BTreeMap, BTreeSet};

use krypton_crds::tenant::Tenant;
use krypton_types::conditions::parse_condition_type;
use krypton_types::placed_tenant::{placed_on, recorded_placement};
use krypton_types::tenant::TenantKey;

/// Indexes Tenants by the members in their spec, placement and conditions, and by the UIDs of the clusters
/// on which they are placed.
#[derive(Debug, Default)]
pub(super) struct TenantIndex {
    members: BTreeMap<String, BTreeSet<TenantKey>>,
    clusters: BTreeMap<String, BTreeSet<TenantKey>>,
}

impl TenantIndex {
    /// Replaces a Tenant in the index. `None` means that the Tenant does not exist.
    pub(super) fn update(&mut self, key: &TenantKey, old: Option<&Tenant>, new: Option<&Tenant>) {
        let members = |tenant: Option<&Tenant>| tenant.map(referenced_members).unwrap_or_default();
        move_key(&mut self.members, key, &members(old), &members(new));
        let clusters = |tenant: Option<&Tenant>| {
            let placement = tenant.and_then(recorded_placement);
            BTreeSet::from_iter(placement.map(|placement| placement.cluster_uid.clone()))
        };
        move_key(&mut self.clusters, key, &clusters(old), &clusters(new));
    }

    pub(super) fn by_member(&self, name: &str) -> impl Iterator<Item = TenantKey> {
        self.members.get(name).into_iter().flatten().cloned()
    }

    pub(super) fn by_cluster(&self, uid: &str) -> impl Iterator<Item = TenantKey> {
        self.clusters.get(uid).into_iter().flatten().cloned()
    }
}

fn move_key(
    index: &mut BTreeMap<String, BTreeSet<TenantKey>>,
    key: &TenantKey,
    old: &BTreeSet<String>,
    new: &BTreeSet<String>,
) {
    for name in old.difference(new) {
        if let Some(keys) = index.get_mut(name) {
            keys.remove(key);
            if keys.is_empty() {
                index.remove(name);
            }
        }
    }
    for name in new.difference(old) {
        index.entry(name.clone()).or_default().insert(key.clone());
    }
}

fn referenced_members(tenant: &Tenant) -> BTreeSet<String> {
    let mut members = members_in_conditions(tenant);
    members.extend(tenant.referenced_member());
    members.extend(placed_on(tenant));
    members.into_iter().map(str::to_owned).collect()
}

/// Returns the members with their own conditions.
pub(super) fn members_in_conditions(tenant: &Tenant) -> BTreeSet<&str> {
    let status = tenant.status.as_ref();
    let conditions = status.map(|status| status.conditions.iter());
    let types = conditions.into_iter().flatten();
    types
        .filter_map(|condition| parse_condition_type(&condition.type_))
        .map(|(_, member)| member)
        .collect()
}
