//! Arguments of the Helm runs, as their callers give them.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::releases::labels::{INSTALL_RUN, RUN_LABEL};

/// The release of a Helm run, and its cluster.
#[derive(Clone, Debug)]
pub struct ReleaseTarget {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    /// Name of the member, which selects the discovery cache.
    pub cache_key: String,
}

/// Arguments of `helm upgrade --install` or `helm install --replace`.
#[derive(Clone)]
pub struct Upgrade {
    pub target: ReleaseTarget,
    /// Path of a local `.tgz`.
    pub chart: PathBuf,
    pub values: Map<String, Value>,
    /// JSON pointers to the secret values, regardless of their key names.
    pub secret_paths: Vec<String>,
    /// Labels for the release Secret.
    pub labels: BTreeMap<String, String>,
    /// Timeout of each of Helm's phases, in whole seconds.
    pub timeout: Duration,
    /// Whether to use server-side apply with forced conflicts. If false, Helm applies as Helm 3 did.
    pub server_side: bool,
    /// Whether to skip the CRDs in the chart's `crds` folder.
    pub skip_crds: bool,
    /// Number of revisions to keep. A repeated installation removes none.
    pub history_max: u8,
    pub description: String,
    /// Whether to repeat a failed installation: its hooks run again, and Helm adopts the objects it created.
    pub again: bool,
}

impl fmt::Debug for Upgrade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upgrade")
            .field("target", &self.target)
            .field("chart", &self.chart)
            .finish_non_exhaustive()
    }
}

impl Upgrade {
    /// Returns the verb for metrics. Helm does not distinguish a first installation from an upgrade.
    pub(super) fn verb(&self) -> &'static str {
        let run_label = self.labels.get(RUN_LABEL);
        match (self.again, run_label) {
            (true, _) => "reinstall",
            (false, Some(label)) if label.starts_with(INSTALL_RUN) => "install",
            (false, _) => "upgrade",
        }
    }
}

/// Arguments of `helm uninstall`.
#[derive(Clone, Debug)]
pub struct Uninstall {
    pub target: ReleaseTarget,
    /// Timeout of each of Helm's phases, in whole seconds.
    pub timeout: Duration,
    /// Whether to run the stored hooks.
    pub hooks: bool,
}

/// Arguments of `helm rollback`.
#[derive(Clone, Debug)]
pub struct Rollback {
    pub target: ReleaseTarget,
    /// The revision to roll back to.
    pub to: u32,
    /// Timeout of each of Helm's phases, in whole seconds.
    pub timeout: Duration,
    /// As in [`Upgrade`]. Must match the way Helm applied the latest revision.
    pub server_side: bool,
    /// Number of revisions to keep.
    pub history_max: u8,
    /// Values of the abandoned revision, to redact their secrets from Helm's messages.
    pub values: Map<String, Value>,
    /// JSON pointers to the secret values, regardless of their key names.
    pub secret_paths: Vec<String>,
}
