//! Arguments of the Helm runs, as their callers give them.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::releases::labels::{INSTALL_RUN, RUN_LABEL};

/// Arguments of `helm upgrade --install` or `helm install --replace`.
#[derive(Clone)]
pub struct Upgrade {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
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
    /// Name of the member, which selects the discovery cache.
    pub cache_key: String,
}

impl fmt::Debug for Upgrade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upgrade")
            .field("release", &self.release)
            .field("namespace", &self.namespace)
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
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    /// Timeout of each of Helm's phases, in whole seconds.
    pub timeout: Duration,
    /// Whether to run the stored hooks.
    pub hooks: bool,
    /// Name of the member, which selects the discovery cache.
    pub cache_key: String,
}

/// Arguments of `helm rollback`.
#[derive(Clone, Debug)]
pub struct Rollback {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
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
    /// Name of the member, which selects the discovery cache.
    pub cache_key: String,
}

/// Arguments of `helm get metadata`.
#[derive(Clone, Debug)]
pub struct GetMetadata {
    pub kubeconfig: PathBuf,
    pub release: String,
    pub namespace: String,
    pub revision: u32,
    /// Name of the member, which selects the discovery cache.
    pub cache_key: String,
}
