//! Orders from the home cluster to a member: create or delete a Tenant.

use krypton_crds::tenant::{Tenant, TenantPlacement};
use kube::ResourceExt as _;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::conditions::{MESSAGE_MAX, State};
use crate::names::{PLACED_FINALIZER, PLACED_ON_ANNOTATION};
use crate::tenant::TenantKey;

/// One order from the home cluster. An order's absence from the list has no effect: only `remove` deletes a Tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedTenant {
    pub namespace: String,
    pub name: String,
    /// UID of the Tenant on the home cluster.
    pub uid: String,
    /// UIDs that the Tenant had before its CRD on the home cluster was deleted and the Tenant was restored. A Tenant
    /// placed for one of them belongs to the order too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former_uids: Vec<String>,
    /// `metadata.generation` on the home cluster.
    pub generation: i64,
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub spec: PlacedSpec,
    /// Delete the Tenant. The order stays in the list until the member has reported the Tenant gone.
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub remove: bool,
    /// Take over a Tenant that was placed for another object of the home cluster.
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub adopt: bool,
    /// Suspends writes to the release, and the creation and deletion of the Tenant.
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub paused: bool,
    /// Value of the annotation through which a user requests a retry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested: Option<String>,
}

/// Spec of the member's Tenant. It has no `clusterRef`: the Tenant applies to the cluster that it is on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlacedSpec {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values: Option<Map<String, Value>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
}

impl PlacedTenant {
    /// Returns whether a Tenant that was placed for the home cluster's object `uid` belongs to this order.
    pub fn is_for(&self, uid: &str) -> bool {
        self.uid == uid || self.former_uids.iter().any(|former| former == uid)
    }

    /// Namespace and name, which are the same on the member and on the home cluster.
    pub fn key(&self) -> TenantKey {
        TenantKey::new(&self.namespace, &self.name)
    }
}

/// The latest report of one member on one order. It replaces all earlier ones. The state of the Tenant itself is in
/// that Tenant's own report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedReport {
    /// UID of the reported order.
    pub uid: String,
    /// `generation` of the reported order.
    pub observed_generation: i64,
    /// The deletion is complete: the Tenant is gone, or the existing Tenant does not belong to this order.
    pub gone: bool,
    /// The condition `Placed`.
    pub state: State,
}

impl PlacedReport {
    /// Returns the report with its message cut to the limit, as it is sent, compared and stored.
    #[must_use]
    pub fn trimmed(mut self) -> Self {
        self.state = self.state.truncated(MESSAGE_MAX, MESSAGE_MAX);
        self
    }
}

/// Returns the name of the member on which this Tenant of the home cluster is placed, even if `clusterRef` has
/// changed since. That member reconciles the Tenant, and the home cluster does not.
///
/// The status records the member, and a client that replaces the Tenant does not change the status. Without it, the
/// finalizer and its annotation count. The name is empty if none of them names the member.
pub fn placed_on(tenant: &Tenant) -> Option<&str> {
    let is_deleted = tenant.metadata.deletion_timestamp.is_some();
    match (recorded_placement(tenant), has_placed_finalizer(tenant)) {
        (None, false) => None,
        // The finalizer was removed: the deletion no longer waits for the member.
        (Some(_), false) if is_deleted => None,
        (Some(placement), _) => Some(&placement.cluster),
        (None, true) => {
            let annotation = tenant.annotations().get(PLACED_ON_ANNOTATION);
            let annotation = annotation.map(String::as_str);
            Some(
                annotation
                    .or(tenant.referenced_member())
                    .unwrap_or_default(),
            )
        }
    }
}

/// Returns the recorded cluster on which the Tenant is placed.
pub fn recorded_placement(tenant: &Tenant) -> Option<&TenantPlacement> {
    tenant.status.as_ref()?.placement.as_ref()
}

/// Returns whether a deletion of the Tenant waits for the member.
pub fn has_placed_finalizer(tenant: &Tenant) -> bool {
    let mut finalizers = tenant.finalizers().iter();
    finalizers.any(|name| name == PLACED_FINALIZER)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    #[test]
    fn finalizer_and_annotation_record_tenant_placement() {
        let spec = serde_json::json!({ "clusterRef": { "secretName": "edge-2" } });
        let mut tenant = Tenant::new("acme", serde_json::from_value(spec).unwrap());
        assert_eq!(placed_on(&tenant), None);
        tenant.finalizers_mut().push(PLACED_FINALIZER.to_owned());
        assert_eq!(placed_on(&tenant), Some("edge-2"));
        let record = (PLACED_ON_ANNOTATION.to_owned(), "edge-1".to_owned());
        tenant.annotations_mut().extend([record]);
        assert_eq!(placed_on(&tenant), Some("edge-1"));
        tenant.annotations_mut().clear();
        tenant.spec.cluster_ref = None;
        assert_eq!(placed_on(&tenant), Some(""));
    }

    #[test]
    fn status_place_wins_until_deleted_and_released() {
        let spec = serde_json::json!({ "clusterRef": { "secretName": "edge-2" } });
        let mut tenant = Tenant::new("acme", serde_json::from_value(spec).unwrap());
        tenant.status.get_or_insert_default().placement = Some(TenantPlacement {
            cluster: "edge-1".to_owned(),
            cluster_uid: "u-1".to_owned(),
        });
        // As after a client has replaced the Tenant without the hub's finalizer and annotation.
        assert_eq!(placed_on(&tenant), Some("edge-1"));
        let annotation = (PLACED_ON_ANNOTATION.to_owned(), "edge-3".to_owned());
        tenant.annotations_mut().extend([annotation]);
        tenant.finalizers_mut().push(PLACED_FINALIZER.to_owned());
        assert_eq!(placed_on(&tenant), Some("edge-1"));
        tenant.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
        assert_eq!(placed_on(&tenant), Some("edge-1"));
        tenant.finalizers_mut().clear();
        assert_eq!(placed_on(&tenant), None);
    }
}
