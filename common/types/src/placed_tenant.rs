//! What home orders of a member: a Tenant, to be there or to go.

use krypton_crds::tenant::{Tenant, TenantPlace};
use kube::ResourceExt as _;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::conditions::{MESSAGE_MAX, State};
use crate::names::{PLACED_FINALIZER, PLACED_ON_ANNOTATION};
use crate::tenant::TenantKey;

/// One order of home. That it is missing from a list orders nothing: a Tenant goes by `remove` only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedTenant {
    pub namespace: String,
    pub name: String,
    /// Of the Tenant at home.
    pub uid: String,
    /// Its UID before the CRD at home was deleted and it was put back; what was placed for that one is its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former_uid: Option<String>,
    /// `metadata.generation` at home.
    pub generation: i64,
    #[serde(default, skip_serializing_if = "PlacedSpec::is_empty")]
    pub spec: PlacedSpec,
    /// The Tenant is to be deleted. Stays in the list until the member has reported it gone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub remove: bool,
    /// A Tenant that was placed for another object of home is taken over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopt: bool,
    /// Its release is not written, nor is it made or deleted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// The value of the annotation by which a person asks for a try.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested: Option<String>,
}

/// What the member's Tenant is to say. It names no member: it is for the one that it is on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedSpec {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values: Option<Map<String, Value>>,
    #[serde(
        default,
        rename = "serviceAccountName",
        skip_serializing_if = "Option::is_none"
    )]
    pub service_account_name: Option<String>,
}

impl PlacedSpec {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl PlacedTenant {
    /// Whether what was placed for this object of home was placed for the order.
    pub fn is_for(&self, uid: &str) -> bool {
        self.uid == uid || self.former_uid.as_deref() == Some(uid)
    }

    /// The same on the member as at home.
    pub fn key(&self) -> TenantKey {
        TenantKey {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }
}

/// The newest report of one member on one order; an older one is worth nothing. How the Tenant itself
/// stands is in that one's own report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedReport {
    /// Of the order that the report is about.
    pub uid: String,
    /// `generation` of that order.
    pub observed_generation: i64,
    /// The order to remove is carried out: the Tenant is gone, or what is there is not the order's.
    pub gone: bool,
    /// The condition `Placed`.
    pub state: State,
}

impl PlacedReport {
    /// With its text cut to what is sent, compared and kept.
    #[must_use]
    pub fn trimmed(mut self) -> Self {
        self.state = self.state.within(MESSAGE_MAX, MESSAGE_MAX);
        self
    }
}

/// The member that this Tenant of home is placed on, by the name that it had then and whatever `clusterRef`
/// says by now: it is looked after there, and not here. Its status says so, which whoever writes the Tenant
/// anew does not touch; else the finalizer, with the annotation. Empty where none of them names it any more.
pub fn placed_on(tenant: &Tenant) -> Option<&str> {
    let deleted = tenant.metadata.deletion_timestamp.is_some();
    match (place(tenant), is_held(tenant)) {
        (None, false) => None,
        // Let go.
        (Some(_), false) if deleted => None,
        (Some(place), _) => Some(&place.cluster),
        (None, true) => {
            let recorded = tenant.annotations().get(PLACED_ON_ANNOTATION);
            let recorded = recorded.map(String::as_str);
            Some(recorded.or(tenant.names_member()).unwrap_or_default())
        }
    }
}

/// The cluster that it is placed on, where home has that on record.
pub fn place(tenant: &Tenant) -> Option<&TenantPlace> {
    tenant.status.as_ref()?.place.as_ref()
}

/// Whoever deletes it waits for the member.
pub fn is_held(tenant: &Tenant) -> bool {
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
        tenant.status.get_or_insert_default().place = Some(TenantPlace {
            cluster: "edge-1".to_owned(),
            cluster_uid: "u-1".to_owned(),
        });
        // As somebody has written it anew, without what home had put there.
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
