//! Applies the watch events of KryptonDeployments and EdgeClusters to the store.

use std::sync::Arc;

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_reconciler::keep_last_managers;
use krypton_runtime::watch::list_refusal;
use krypton_types::deployment::DeploymentKey;
use krypton_types::error_chain::chain;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{self, Event};
use kube::{CustomResourceExt as _, ResourceExt as _};

use super::{DeploymentController, DeploymentEntry, DeploymentStore};
use crate::deployments::events::RecordedEvents;
use crate::deployments::target::TargetMember;

/// How the hub logs a failed list of KryptonDeployments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListErrorLog {
    Hidden,
    /// The home cluster does not serve the API, which is optional.
    Absent,
    Failed,
}

/// Selects the log level. `is_refused` means that the API server returned 403 or 404. `is_newly_absent` means that
/// the hub has just accepted the absence of KryptonDeployments.
pub(super) fn list_error_log(status: u16, is_refused: bool, is_newly_absent: bool) -> ListErrorLog {
    match (status, is_refused, is_newly_absent) {
        (404, _, true) => ListErrorLog::Absent,
        (404, ..) | (_, true, false) => ListErrorLog::Hidden,
        _ => ListErrorLog::Failed,
    }
}

/// Consecutive 403 or 404 responses after which the hub assumes that home has no KryptonDeployments.
pub(super) const REFUSALS_UNTIL_ABSENT: u32 = 2;

impl DeploymentStore {
    /// Applies a watch event. Returns whether a new decision is necessary.
    pub(super) fn apply_event(
        &mut self,
        event: watcher::Result<Event<DeserializeGuard<KryptonDeployment>>>,
        controller: &DeploymentController,
    ) -> bool {
        let parse = |guard: DeserializeGuard<KryptonDeployment>| {
            let object = guard.0.inspect_err(|error| {
                let (namespace, name) = (&error.metadata.namespace, &error.metadata.name);
                tracing::warn!(?namespace, ?name, %error, "ignoring invalid KryptonDeployment");
            });
            let mut object = object.ok()?;
            keep_last_managers(&mut object.metadata);
            let key = DeploymentKey::new(object.namespace()?, object.metadata.name.clone()?);
            let namespaces = controller.namespaces.as_ref();
            namespaces
                .is_none_or(|namespaces| namespaces.contains(&key.namespace))
                .then_some((key, object))
        };
        match event {
            Ok(Event::Init) => {
                self.listing.clear();
                // The CRD may be a later one, which keeps all fields.
                for entry in self.entries.values_mut() {
                    entry.written = None;
                }
                false
            }
            Ok(Event::InitApply(guard)) => {
                if let Some((key, object)) = parse(guard) {
                    self.listing.insert(key.clone());
                    self.insert(key, object);
                }
                false
            }
            Ok(Event::InitDone) => {
                let listed = std::mem::take(&mut self.listing);
                let removed = self.entries.extract_if(.., |key, _| !listed.contains(key));
                removed.for_each(|(key, _)| {
                    self.queue.forget(&key);
                    controller.notices.notifier().forget_deployment(&key);
                });
                self.synced = true;
                true
            }
            Ok(Event::Apply(guard)) => {
                if let Some((key, object)) = parse(guard) {
                    self.insert(key, object);
                }
                true
            }
            Ok(Event::Delete(guard)) => {
                if let Some((key, _)) = parse(guard) {
                    self.entries.remove(&key);
                    self.queue.forget(&key);
                    controller.notices.notifier().forget_deployment(&key);
                }
                true
            }
            Err(error) => {
                let status = list_refusal(&error).unwrap_or_default();
                // If the API is absent or forbidden, do not wait for its list. Earlier objects remain
                // valid.
                let is_refused = matches!(status, 403 | 404) && self.members_synced;
                self.refusals += u32::from(is_refused);
                let is_newly_absent =
                    is_refused && self.refusals == REFUSALS_UNTIL_ABSENT && !self.synced;
                match list_error_log(status, is_refused, is_newly_absent) {
                    ListErrorLog::Hidden => {
                        tracing::debug!(error = %chain(&error), "failed to list KryptonDeployments; retrying");
                    }
                    ListErrorLog::Absent => {
                        tracing::info!(
                            crd = KryptonDeployment::crd_name(),
                            "CRD not installed; ignoring KryptonDeployments"
                        );
                    }
                    ListErrorLog::Failed => {
                        tracing::warn!(error = %chain(&error), waits = !self.synced && !is_newly_absent, "failed to list KryptonDeployments; retrying");
                    }
                }
                is_newly_absent
            }
        }
    }

    fn insert(&mut self, key: DeploymentKey, object: KryptonDeployment) {
        if let Some(entry) = self.entries.get_mut(&key)
            && entry.object.metadata.uid == object.metadata.uid
        {
            // If home was restored from a backup, the object may not be deleted there.
            if object.metadata.deletion_timestamp.is_none() {
                entry.deletion = None;
            }
            entry.object = Arc::new(object);
            return;
        }
        let entry = DeploymentEntry {
            object: Arc::new(object),
            deletion: None,
            recorded_events: RecordedEvents::default(),
            written: None,
            settled_history: None,
        };
        self.queue.reset(&key);
        self.entries.insert(key, entry);
    }

    pub(super) fn apply_member_event(
        &mut self,
        event: watcher::Result<Event<EdgeCluster>>,
    ) -> bool {
        match event {
            Ok(Event::Init) => {
                self.listed_members.clear();
                false
            }
            Ok(Event::InitApply(object)) => {
                self.listed_members.insert(object.name_any());
                self.insert_member(&object);
                false
            }
            Ok(Event::InitDone) => {
                let listed = std::mem::take(&mut self.listed_members);
                self.members.retain(|name, _| listed.contains(name));
                self.members_synced = true;
                true
            }
            Ok(Event::Apply(object)) => self.insert_member(&object),
            Ok(Event::Delete(object)) => self.members.remove(&object.name_any()).is_some(),
            Err(error) => {
                tracing::debug!(error = %chain(&error), "watching EdgeClusters failed; retrying");
                false
            }
        }
    }

    fn insert_member(&mut self, object: &EdgeCluster) -> bool {
        let member = TargetMember::new(object);
        let previous = self.members.insert(object.name_any(), member.clone());
        previous.as_ref() != Some(&member)
    }
}
