//! Reconciles the labels and annotations of workspaces' namespaces that Krypton created. Tenants do not wait for it.

pub(crate) mod metadata;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_runtime::clock::BootTime;
use krypton_runtime::effect;
use krypton_runtime::retry::backoff;
use krypton_types::desired::DesiredState;
use krypton_types::error_chain::chain;
use krypton_types::names;
use kube::api::{Api, Patch, PatchParams};
use serde_json::Value;
use tokio::task::{JoinError, JoinSet};
use tracing::Instrument as _;

use crate::actions::ActionRunner;
use crate::index::Index;
use crate::run_loop::{AFTER_CONFLICT, Reconciler};

const DEADLINE: Duration = Duration::from_secs(10);
/// Maximum number of namespaces to write at the same time.
const CALLS: usize = 8;
/// Time without a write after which the pause between writes resets. Until then, each write doubles the pause, in
/// case another client keeps reverting it.
const QUIET_AFTER: Duration = Duration::from_secs(300);
/// Longest pause between two writes.
const ANSWER_EVERY: Duration = Duration::from_secs(30);

/// The namespaces to reconcile.
#[derive(Default)]
pub(super) struct Workspaces {
    /// Desired state of the last reconcile.
    configured: Option<Arc<DesiredState>>,
    dirty: BTreeSet<String>,
    slots: BTreeMap<String, Slot>,
    pub(super) jobs: JoinSet<Written>,
    /// The last logged reason for a failed write.
    told: Option<String>,
}

#[derive(Default)]
pub(crate) struct Slot {
    pub busy: bool,
    pub not_before: Option<BootTime>,
    failures: u32,
    /// Number of successful writes in quick succession, and the time of the last one.
    writes: u32,
    written: BootTime,
}

/// Result of a write.
pub(super) struct Written {
    name: String,
    result: Result<ObjectMeta, Fault>,
}

enum Fault {
    /// The namespace has changed since the read.
    Stale,
    Failed(String),
}

impl Workspaces {
    /// Marks the namespaces as changed. Most namespaces of a cluster don't belong to Krypton.
    pub(super) fn touch(&mut self, namespaces: &BTreeSet<String>, index: &Index) {
        for name in namespaces {
            let found = index.workspaces.get(name);
            if found.is_some_and(|found| found.words.is_some()) || self.slots.contains_key(name) {
                self.dirty.insert(name.clone());
            } else {
                self.dirty.remove(name);
            }
        }
    }

    /// Returns the earliest time at which a waiting namespace may be written again.
    pub(crate) fn wake(&self, now: BootTime) -> Option<BootTime> {
        let idle = |name: &&String| self.slots.get(*name).filter(|slot| !slot.busy);
        let waiting = self.dirty.iter().filter_map(|name| idle(&name)?.not_before);
        waiting.filter(|at| *at > now).min()
    }
}

impl Reconciler {
    pub(super) fn reconcile_workspaces(&mut self, now: BootTime) {
        // Until all namespaces are listed, a missing mark proves nothing.
        let Some(desired) = self
            .recorded
            .clone()
            .filter(|_| self.permitted && !self.misses_pause && self.index.ready())
        else {
            return;
        };
        if desired.paused || desired.retire {
            return;
        }
        let known = self.workspaces.configured.as_ref();
        if known.is_none_or(|known| known.namespaces != desired.namespaces) {
            let all = self.index.workspaces.iter().map(|(name, _)| name.clone());
            self.workspaces.dirty.extend(all);
        }
        self.workspaces.configured = Some(Arc::clone(&desired));
        for name in self.workspaces.dirty.clone() {
            if self.workspaces.jobs.len() >= CALLS {
                return;
            }
            self.reconcile_workspace(name, &desired, now);
        }
    }

    fn reconcile_workspace(&mut self, name: String, desired: &DesiredState, now: BootTime) {
        let slot = self.workspaces.slots.get(&name);
        if slot.is_some_and(|slot| slot.busy || slot.not_before.is_some_and(|at| now < at)) {
            return;
        }
        let change = self.index.workspaces.get(&name).and_then(|workspace| {
            let words = workspace
                .words
                .as_ref()
                .filter(|_| !workspace.terminating)?;
            Some((workspace.uid.clone(), words.change(&desired.namespaces)?))
        });
        let Some((uid, change)) = change else {
            let gone = self.index.workspaces.get(&name).is_none();
            let done = |slot: &Slot| gone || now.since(slot.written) > QUIET_AFTER;
            if self.workspaces.slots.get(&name).is_some_and(done) {
                self.workspaces.slots.remove(&name);
            }
            self.workspaces.dirty.remove(&name);
            return;
        };
        // While a Tenant is paused, nothing is written to its workspace.
        let paused = self.index.users(&name).iter().any(|user| {
            let owner = self.index.owner(user);
            let paused = owner
                .as_ref()
                .and_then(|it| it.annotation(names::PAUSED_ANNOTATION));
            paused.is_some_and(|value| value != "false")
        });
        if paused {
            return;
        }
        self.workspaces.dirty.remove(&name);
        let version = self.index.workspaces.version(&name);
        let slot = self.workspaces.slots.entry(name.clone()).or_default();
        slot.busy = true;
        let performer = Arc::clone(&self.performer);
        let configuring = async move {
            let result = performer.configure(&name, &uid, version, change).await;
            Written { name, result }
        };
        self.workspaces.jobs.spawn(configuring.in_current_span());
    }

    pub(super) fn finish_workspace(&mut self, done: Result<Written, JoinError>) {
        let now = BootTime::now();
        let Written { name, result } = match done {
            Ok(written) => written,
            Err(error) => {
                // The error does not name the namespace. All are reconciled again, and this one stays busy.
                tracing::error!(%error, member = %self.member.name, "writing a namespace ended badly");
                self.workspaces.configured = None;
                return;
            }
        };
        let retry_max = self.member.retry_max;
        let slot = self.workspaces.slots.entry(name.clone()).or_default();
        slot.busy = false;
        let mut said = None;
        let pause = match result {
            Ok(meta) => {
                if now.since(slot.written) > QUIET_AFTER {
                    slot.writes = 0;
                }
                let pause = AFTER_CONFLICT.saturating_mul(1 << slot.writes.min(10));
                (slot.writes, slot.written, slot.failures) = (slot.writes + 1, now, 0);
                let (_, users) = self.index.workspace_written(&meta);
                self.dirty.extend(users);
                pause.min(ANSWER_EVERY)
            }
            Err(Fault::Stale) => {
                let pause = AFTER_CONFLICT.saturating_mul(1 << slot.failures.min(7));
                slot.failures += 1;
                pause.min(ANSWER_EVERY)
            }
            Err(Fault::Failed(why)) => {
                slot.failures += 1;
                said = Some(why);
                backoff(slot.failures, retry_max, rand::random())
            }
        };
        slot.not_before = Some(BootTime(now.0 + pause));
        if let Some(why) = &said
            && self.workspaces.told != said
        {
            tracing::warn!(member = %self.member.name, namespace = name, problem = %why,
                "a workspace does not have the labels and annotations that it is to have");
            self.workspaces.told = said;
        }
        self.workspaces.dirty.insert(name);
    }
}

impl ActionRunner {
    async fn configure(
        &self,
        name: &str,
        uid: &str,
        version: Option<u64>,
        mut metadata: Value,
    ) -> Result<ObjectMeta, Fault> {
        self.still_permitted().map_err(|_| Fault::Stale)?;
        // Patch only the namespace as seen, not another one of its name. A user may have removed Krypton's mark.
        metadata["uid"] = uid.into();
        metadata["resourceVersion"] = version.map(|version| version.to_string()).into();
        let patch = Patch::Merge(serde_json::json!({ "metadata": metadata }));
        let api: Api<Namespace> = Api::all(self.member.client.clone());
        let params = PatchParams::default();
        let call = effect!(
            "workspace.configure",
            api.patch_metadata(name, &params, &patch)
        );
        match tokio::time::timeout(DEADLINE, call).await {
            Ok(Ok(written)) => Ok(written.metadata),
            Ok(Err(kube::Error::Api(status))) if [404, 409].contains(&status.code) => {
                Err(Fault::Stale)
            }
            Ok(Err(error)) => Err(Fault::Failed(chain(&error))),
            Err(_) => Err(Fault::Failed(format!(
                "no answer within {} s",
                DEADLINE.as_secs()
            ))),
        }
    }
}
