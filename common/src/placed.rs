//! What home orders of a member: a Tenant, to be there or to go.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::conditions::{MESSAGE_MAX, State};
use crate::tenant::TenantKey;

/// One order of home. That it is missing from a list orders nothing: a Tenant goes by `remove` only
/// (design §3, rule 1).
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
