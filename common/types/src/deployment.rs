//! Orders from the home cluster to a member: install or remove the release of a KryptonDeployment.

mod revisions;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::conditions::ClusterState;
use crate::desired::drift::DriftPolicy;
use crate::names;
use crate::tenant::{UpcomingStep, trim_all, trim_request};
use crate::text::truncate;
use crate::values;

pub use revisions::{ReportedChart, ReportedRevision, ReportedRevisions};

/// Weight of a KryptonDeployment's report in a message. It is larger than a Tenant's, because it contains revisions.
pub const REPORT_WEIGHT: usize = 4;

/// Namespace and name of a KryptonDeployment on the home cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeploymentKey {
    pub namespace: String,
    pub name: String,
}

impl DeploymentKey {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for DeploymentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One order from the home cluster. An order's absence from the list has no effect: only `remove` uninstalls a
/// release.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DesiredDeployment {
    pub namespace: String,
    pub name: String,
    /// UID of the KryptonDeployment on the home cluster.
    pub uid: String,
    /// `metadata.generation` on the home cluster.
    pub generation: i64,
    /// Creation time on the home cluster, in seconds since 1970. If two orders request one release, the older one
    /// gets it.
    pub created: i64,
    /// Uninstall the release. The order stays in the list until the member has reported the release gone.
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub remove: bool,
    /// With `remove`: keep the release in place, but stop managing it.
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub orphan: bool,
    /// Suspends all writes for this order.
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub paused: bool,
    /// Value of the annotation through which a user requests a retry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested: Option<String>,
    /// Overrides the fleet's drift policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drift: Option<DriftPolicy>,
    /// The KryptonDeployment's annotations that [`PASSED_ANNOTATIONS`] lists.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// Annotations of a KryptonDeployment that the hub passes to the member unchanged.
pub const PASSED_ANNOTATIONS: [&str; 3] = [
    names::ADOPT_ANNOTATION,
    names::DRIFT_ANNOTATION,
    names::DRIFT_IGNORE_ANNOTATION,
];

impl DesiredDeployment {
    pub fn key(&self) -> DeploymentKey {
        DeploymentKey::new(&self.namespace, &self.name)
    }

    /// Size of the JSON in bytes.
    pub fn size(&self) -> usize {
        values::size(self)
    }

    /// Name of the release.
    pub fn release(&self) -> String {
        names::deployment_release(&self.name)
    }

    /// Namespace of the release. It is not always a legal name.
    pub fn workspace(&self) -> &str {
        &self.name
    }
}

/// An action of the member that the hub records as an event on the KryptonDeployment: the member has no object for
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedEvent {
    /// Nanoseconds since 1970 by the member's clock. It only distinguishes events from each other.
    pub at: u64,
    /// The reason that the event has on a Tenant.
    pub reason: String,
    pub message: String,
}

/// Events that the hub records on the home cluster. Each entry has the reason on the member, the reason that the hub
/// uses, and whether the event is a warning. The second reason is the one of krypton-operator. The hub derives all
/// other events from states.
pub const RECORDED_EVENTS: [(&str, &str, bool); 10] = [
    ("DriftDetected", "DriftDetected", true),
    ("DriftHealed", "RepairTriggered", true),
    ("HelmRolledBack", "HelmRolledBack", true),
    ("ReleaseMissing", "ReleaseMissing", true),
    ("ReleaseNotInstalled", "ReleaseNotInstalled", true),
    ("ReleaseUnlocked", "ReleaseUnlocked", true),
    ("ReleaseUnreadable", "ReleaseUnreadable", true),
    ("WorkspaceCreated", "EdgeNamespaceCreated", false),
    ("WorkspaceDeleted", "EdgeNamespaceDeleteRequested", false),
    ("WorkspaceKept", "WorkspaceKept", true),
];

/// Most events in a report. A report keeps the latest ones and drops the others. With the limit for their texts, the
/// events of all reports in a message need a tenth of its maximum size.
pub const EVENTS_MAX: usize = 3;
const EVENT_TEXT_MAX: usize = 128;

/// The latest report of one member on one order. It replaces all earlier ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeploymentReport {
    /// UID of the reported order.
    pub uid: String,
    /// `generation` of the reported order.
    pub observed_generation: i64,
    /// The removal is complete: the release is uninstalled, was orphaned on request, or did not belong to this order.
    /// `state` gives the reason.
    pub gone: bool,
    /// The value of `status.lastAppliedChart`. Empty until a chart is known to be applied.
    pub applied_chart: String,
    pub state: ClusterState,
    /// The member's next automatic step after a failure or while it waits. No digest contains it.
    #[serde(skip)]
    pub next: Option<UpcomingStep>,
    /// The reconcile request that the member handled last. No digest contains it.
    #[serde(skip)]
    pub handled_request: Option<String>,
    /// Transient, so no digest contains them.
    #[serde(skip)]
    pub events: Vec<ReportedEvent>,
    /// The revisions of the release. `None` if the reporter does not know them, or does not own the release. No digest
    /// contains them.
    #[serde(skip)]
    pub revisions: Option<Arc<ReportedRevisions>>,
}

impl DeploymentReport {
    /// Returns the report with every text cut to its limit, as it is sent, compared and stored.
    #[must_use]
    pub fn trimmed(mut self) -> Self {
        trim_all(&mut self.applied_chart, &mut self.state);
        trim_request(&mut self.handled_request);
        let excess = self.events.len().saturating_sub(EVENTS_MAX);
        self.events.drain(..excess);
        for event in &mut self.events {
            for text in [&mut event.reason, &mut event.message] {
                truncate(text, EVENT_TEXT_MAX);
            }
        }
        self
    }
}
