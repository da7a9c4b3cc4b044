//! What home orders of a member: a KryptonDeployment's release, to be there or to go.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::conditions::ClusterState;
use crate::desired::drift::DriftPolicy;
use crate::names;
use crate::tenant::trim_all;

/// A KryptonDeployment's namespace and name, at home.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeploymentKey {
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for DeploymentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One order of home. That it is missing from a list orders nothing: a release goes by `remove` only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DesiredDeployment {
    pub namespace: String,
    pub name: String,
    /// Of the KryptonDeployment at home.
    pub uid: String,
    /// `metadata.generation` at home.
    pub generation: i64,
    /// When it was made at home, in seconds since 1970: of two that want one release the older has it.
    pub created: i64,
    /// The release is to be uninstalled. Stays in the list until the member has reported it gone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub remove: bool,
    /// With `remove`: the release is let go and stays where it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub orphan: bool,
    /// Nothing of it is written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// The value of the annotation by which a person asks for a try.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested: Option<String>,
    /// In the place of the fleet's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drift: Option<DriftPolicy>,
    /// Those of the KryptonDeployment that are of [`PASSED_ON`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// Annotations of a KryptonDeployment that its member acts on as they are.
pub const PASSED_ON: [&str; 3] = [
    names::ADOPT_ANNOTATION,
    names::DRIFT_ANNOTATION,
    names::DRIFT_IGNORE_ANNOTATION,
];

impl DesiredDeployment {
    pub fn key(&self) -> DeploymentKey {
        DeploymentKey {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }

    /// Bytes as JSON.
    pub fn size(&self) -> usize {
        // What serde writes into memory it can write.
        serde_json::to_vec(self).map_or(usize::MAX, |written| written.len())
    }

    /// The name of its release.
    pub fn release(&self) -> String {
        names::deployment_release(&self.name)
    }

    /// The namespace that its release goes to. Not always a legal one.
    pub fn workspace(&self) -> &str {
        &self.name
    }
}

/// What the member has done about an order, for home to tell as an event: on the member there is no object to
/// tell it on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedEvent {
    /// Nanoseconds since 1970 of the member's clock: tells one from another, and nothing else.
    pub at: u64,
    /// As an event's on a Tenant.
    pub reason: String,
    pub message: String,
}

/// What home tells: the event as the member has it, as the original had it at home, and whether
/// it is a warning. All else home tells out of states.
pub const TOLD_AT_HOME: [(&str, &str, bool); 9] = [
    ("DriftDetected", "DriftDetected", true),
    ("DriftHealed", "RepairTriggered", true),
    ("HelmRolledBack", "HelmRolledBack", true),
    ("ReleaseMissing", "ReleaseMissing", true),
    ("ReleaseUnlocked", "ReleaseUnlocked", true),
    ("ReleaseUnreadable", "ReleaseUnreadable", true),
    ("WorkspaceCreated", "EdgeNamespaceCreated", false),
    ("WorkspaceDeleted", "EdgeNamespaceDeleteRequested", false),
    ("WorkspaceKept", "WorkspaceKept", true),
];

/// Of one order, the latest: what is beyond is lost, as events may be. With their texts, those of all reports of a
/// message are a tenth of what it may hold.
pub const DEEDS_MAX: usize = 3;
const DEED_TEXT_MAX: usize = 128;

/// The newest report of one member on one order; an older one is worth nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeploymentReport {
    /// Of the order that the report is about.
    pub uid: String,
    /// `generation` of that order.
    pub observed_generation: i64,
    /// The order to remove is carried out: nothing of the release is left, or it was not the order's, or
    /// it was let go on purpose. `state` says which.
    pub gone: bool,
    /// As `status.lastAppliedChart`; empty while nothing is known to be applied.
    pub applied_chart: String,
    pub state: ClusterState,
    /// In passing, so in no digest.
    #[serde(skip)]
    pub deeds: Vec<ReportedEvent>,
}

impl DeploymentReport {
    /// With every text cut to what is sent, compared and kept.
    #[must_use]
    pub fn trimmed(mut self) -> Self {
        trim_all(&mut self.applied_chart, &mut self.state);
        let more = self.deeds.len().saturating_sub(DEEDS_MAX);
        self.deeds.drain(..more);
        for deed in &mut self.deeds {
            for text in [&mut deed.reason, &mut deed.message] {
                text.truncate(text.floor_char_boundary(DEED_TEXT_MAX));
            }
        }
        self
    }
}
