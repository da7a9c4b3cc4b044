//! What a member says of one Tenant.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::conditions::{ClusterState, MESSAGE_MAX, State};

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

impl TenantReport {
    /// With every text cut to [`MESSAGE_MAX`] bytes: as it is sent, compared and kept.
    #[must_use]
    pub fn trimmed(mut self) -> Self {
        trim_all(&mut self.applied_chart, &mut self.state);
        self
    }
}

pub(crate) fn trim_all(applied_chart: &mut String, state: &mut ClusterState) {
    trim(applied_chart);
    let states = [
        Some(&mut state.ready),
        state.progress.as_mut(),
        state.error.as_mut(),
    ];
    for State {
        reason, message, ..
    } in states.into_iter().flatten()
    {
        trim(reason);
        trim(message);
    }
}

fn trim(text: &mut String) {
    text.truncate(text.floor_char_boundary(MESSAGE_MAX));
}
