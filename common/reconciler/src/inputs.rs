//! What the process gives to a reconciler: the member, the access to it, and the tools that members share.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use krypton_helm::chart::ChartCache;
use krypton_helm::driver::Helm;
use krypton_runtime::access::CutOffCallback;
use krypton_runtime::lease::LeaseGoal;
use krypton_runtime::watchdog::Watchdog;
use krypton_types::allowed_namespaces::AllowedNamespaces;
use kube::Client;
use tokio::sync::watch;

use crate::drift::DriftMetrics;
use crate::metrics::WorkMetrics;
use crate::plan::Policy;

/// Selects the writer of the status of the member's Tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusMode {
    /// This reconciler writes the status.
    Write,
    /// The caller writes the status from the reports. The home cluster uses this, as a Tenant there has several
    /// members.
    Report,
}

/// A member and the access to it.
#[derive(Clone)]
pub struct Member {
    /// Name in the fleet. It is part of the names of releases and conditions.
    pub name: String,
    /// Namespace of the Secret that defines the member. A `clusterRef` may name it too.
    pub source_namespace: Option<String>,
    pub client: Client,
    /// Client with Helm's rights, for requests on the objects of releases.
    pub helm_client: Client,
    /// Kubeconfig file for Helm, with the same access.
    pub kubeconfig: PathBuf,
    /// Holder name in the Lease. Each process has its own.
    pub holder: String,
    /// Goal for the Lease. `Observe` only reports and writes nothing. `Hold` is never revoked.
    pub lease_goal: watch::Receiver<LeaseGoal>,
    /// Reporting instance in events.
    pub instance: String,
    /// Field manager of this process.
    pub program: &'static str,
    pub status_mode: StatusMode,
    /// Namespaces of the Tenants to reconcile. `None` means all.
    pub namespaces: Option<BTreeSet<String>>,
    /// Namespaces whose Tenants may name this member, if they are Tenants of the home cluster.
    pub allowed_namespaces: watch::Receiver<AllowedNamespaces>,
    /// Longest back-off between two attempts.
    pub retry_max: Duration,
    pub policy: Policy,
    /// Receives an error if the watches exceed the bounds. `None` trusts the API server and disables the bounds.
    pub on_excess: Option<CutOffCallback>,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Resources that members share: one pool of Helm runs and one chart cache.
#[derive(Clone, Debug)]
pub struct Tools {
    pub helm: Arc<Helm>,
    pub charts: Arc<ChartCache>,
    pub drift: DriftMetrics,
    pub work: WorkMetrics,
    /// Ends the process if a task hangs.
    pub watchdog: Watchdog,
}
