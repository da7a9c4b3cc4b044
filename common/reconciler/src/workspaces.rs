//! Reconciles the labels and annotations of workspaces' namespaces that Krypton created. Tenants do not wait for it.

pub(crate) mod metadata;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::chance;
use krypton_runtime::clock::BootTime;
use krypton_runtime::retry::Backoff;
use krypton_runtime::tasks::KeyedTasks;
use krypton_runtime::work_queue::{Outcome, WorkQueue};
use krypton_types::desired::DesiredState;
use krypton_types::error_chain::chain;
use kube::api::{Api, Patch, PatchParams};
use serde_json::Value;
use tokio::task::JoinError;
use tracing::Instrument as _;

use crate::actions::ActionRunner;
use crate::actions::error::CONFLICT_PAUSE;
use crate::index::Index;
use crate::inputs::Member;
use crate::owner::OwnerKey;
use crate::plan::pause_reason;

/// Maximum number of namespaces to write at the same time.
const MAX_CONCURRENT_CALLS: usize = 8;
const CONFLICT_BACKOFF: Backoff = Backoff {
    first: CONFLICT_PAUSE,
    max: Duration::from_secs(30),
};

/// The namespaces to reconcile.
pub(super) struct Workspaces {
    /// Desired state of the last reconcile.
    configured: Option<Arc<DesiredState>>,
    queue: WorkQueue<String>,
    pub(super) jobs: KeyedTasks<String, PatchResult>,
    /// The last logged reason for a failed write.
    logged_problem: Option<String>,
}

/// Result of a write. `None` if the namespace has changed since the read.
type PatchResult = Result<Option<ObjectMeta>, ApiError>;

impl Workspaces {
    pub(super) fn new(retry_max: Duration) -> Self {
        Self {
            configured: None,
            queue: WorkQueue::new(
                MAX_CONCURRENT_CALLS,
                CONFLICT_BACKOFF,
                Backoff::up_to(retry_max),
            ),
            jobs: KeyedTasks::default(),
            logged_problem: None,
        }
    }

    /// Marks the namespaces as changed. Most namespaces of a cluster don't belong to Krypton.
    pub(super) fn queue_changed(&mut self, namespaces: &BTreeSet<String>, index: &Index) {
        for name in namespaces {
            match index.workspaces.get(name) {
                Some(workspace) if workspace.namespace_metadata.is_some() => {
                    self.queue.add(name.clone())
                }
                Some(_) => self.queue.remove(name),
                None => self.queue.forget(name),
            }
        }
    }

    /// Returns the next time at which one is due. A due one waits for an event.
    pub(crate) fn wake(&self, now: BootTime) -> Option<BootTime> {
        self.queue.wake().filter(|at| *at > now)
    }

    /// Starts the writes to the due namespaces.
    pub(super) fn reconcile(
        &mut self,
        desired: &Arc<DesiredState>,
        index: &Index,
        runner: &Arc<ActionRunner>,
        now: BootTime,
    ) {
        if desired.paused || desired.retire {
            return;
        }
        let configured = self.configured.as_ref();
        if configured.is_none_or(|configured| configured.namespaces != desired.namespaces) {
            let names = index.workspaces.iter().map(|(name, _)| name.clone());
            self.queue.extend(names);
        }
        self.configured = Some(Arc::clone(desired));
        self.queue.unpark();
        while let Some(name) = self.queue.pop(now) {
            self.reconcile_one(name, desired, index, runner);
        }
    }

    fn reconcile_one(
        &mut self,
        name: String,
        desired: &DesiredState,
        index: &Index,
        runner: &Arc<ActionRunner>,
    ) {
        let patch = index.workspaces.get(&name).and_then(|workspace| {
            let namespace_metadata = workspace
                .namespace_metadata
                .as_ref()
                .filter(|_| !workspace.terminating)?;
            Some((
                workspace.uid.clone(),
                namespace_metadata.patch(&desired.namespaces)?,
            ))
        });
        let Some((uid, patch)) = patch else {
            return;
        };
        // While a Tenant is paused, nothing is written to its workspace. No event shows the end of the pause here.
        let is_paused = index.workspace_users(&name).iter().any(|user| {
            let owner = index.owner(user);
            owner.is_some_and(|owner| pause_reason(&owner, desired).is_some())
        });
        if is_paused {
            return self.queue.park(name);
        }
        let version = index.workspaces.version(&name);
        let runner = Arc::clone(runner);
        let namespace = name.clone();
        let writing = async move {
            runner
                .patch_namespace(&namespace, &uid, version, patch)
                .await
        };
        self.queue.start(name.clone());
        self.jobs.spawn(name, writing.in_current_span());
    }

    /// Records the result of a write. Returns the owners that it has changed.
    pub(super) fn finish(
        &mut self,
        (name, result): (String, Result<PatchResult, JoinError>),
        index: &mut Index,
        member: &Member,
    ) -> BTreeSet<OwnerKey> {
        let now = BootTime::now();
        let mut changed = BTreeSet::new();
        let outcome = match result {
            Ok(Ok(Some(meta))) => {
                (_, changed) = index.workspace_written(&meta);
                Outcome::Wrote
            }
            Ok(Ok(None)) => Outcome::Conflict,
            Ok(Err(error)) => {
                let problem = chain(&error);
                if self.logged_problem.as_ref() != Some(&problem) {
                    tracing::warn!(member = %member.name, namespace = name, %problem,
                        "failed to update workspace metadata; retrying");
                    self.logged_problem = Some(problem);
                }
                Outcome::Failed
            }
            Err(error) => {
                tracing::error!(%error, member = %member.name, namespace = name,
                    "the write of a workspace panicked");
                Outcome::Again(now + member.retry_max)
            }
        };
        self.queue.done(&name, outcome, now, chance::random());
        changed
    }
}

impl ActionRunner {
    async fn patch_namespace(
        &self,
        name: &str,
        uid: &str,
        version: Option<u64>,
        mut metadata: Value,
    ) -> PatchResult {
        if self.check_permit().is_err() {
            return Ok(None);
        }
        // Patch only the namespace as seen, not another one of its name. A user may have removed Krypton's mark.
        metadata["uid"] = uid.into();
        metadata["resourceVersion"] = version.map(|version| version.to_string()).into();
        let patch = Patch::Merge(serde_json::json!({ "metadata": metadata }));
        let api: Api<Namespace> = Api::all(self.member.client.clone());
        let params = PatchParams::default();
        let request = api.patch_metadata(name, &params, &patch);
        match call("patching the namespace", request).await {
            Ok(patched) => Ok(Some(patched.metadata)),
            Err(error) if matches!(error.code(), Some(404 | 409)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
