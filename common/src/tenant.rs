//! What a member says of one Tenant.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::conditions::ClusterState;

/// A Tenant's namespace and name, the same on every member.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TenantKey {
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for TenantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The newest report of one member on one Tenant; an older one is worth nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantReport {
    /// `metadata.generation` of the member's Tenant that the report is about.
    pub observed_generation: i64,
    /// `status.lastAppliedChart`; empty until something was applied.
    pub applied_chart: String,
    pub state: ClusterState,
}
