//! Creates and deletes the namespace of a release.

use super::{ActionError, ActionResult, ActionRunner, Job, JobResult};
use crate::index::CREATOR_LABEL;
use crate::workspaces::metadata::NamespaceMetadata;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use kube::api::{Api, PostParams};
use std::collections::BTreeMap;

use krypton_runtime::call::{call, if_unchanged};
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::reason;
use krypton_types::names;

impl ActionRunner {
    pub(super) async fn create_workspace(&self, job: &Job, result: &mut JobResult) -> ActionResult {
        let uid = job.owner.uid().to_owned();
        let labels = [
            (CREATOR_LABEL.to_owned(), uid),
            (names::MANAGED_BY_LABEL.to_owned(), "krypton".to_owned()),
        ];
        let namespace_metadata = NamespaceMetadata {
            labels: labels.into(),
            annotations: BTreeMap::new(),
        };
        let namespace_metadata = namespace_metadata.with_configuration(&job.desired.namespaces);
        let namespace = Namespace {
            metadata: ObjectMeta {
                name: Some(job.release.namespace.clone()),
                labels: Some(namespace_metadata.labels),
                annotations: (!namespace_metadata.annotations.is_empty())
                    .then_some(namespace_metadata.annotations),
                ..ObjectMeta::default()
            },
            ..Namespace::default()
        };
        let api: Api<Namespace> = Api::all(self.client());
        let params = PostParams::default();
        let creating = api.create(&params, &namespace);
        let created = call("creating the workspace", creating).await;
        match created.map_err(ActionError::from) {
            Ok(created) => {
                result.workspace = Some(created.metadata);
                result.clears_failure = true;
                let message = format!("created namespace {}", job.release.namespace);
                let event = ObjectEvent::normal("WorkspaceCreated", message);
                self.emit_event(&job.owner, event);
                Ok(())
            }
            // Another client created it. The watch may have shown it before.
            Err(ActionError::Conflict) => {
                let name = &job.release.namespace;
                let existing = call("reading the workspace", api.get_metadata(name)).await?;
                result.workspace = Some(existing.metadata);
                Ok(())
            }
            Err(error) => {
                let message = format!(
                    "creating namespace {}: {}",
                    job.release.namespace,
                    error.text()
                );
                let event = ObjectEvent::warning("WorkspaceCreateFailed", &message);
                self.emit_event(&job.owner, event);
                Err(ActionError::failed(reason::INSTALL_FAILED, message))
            }
        }
    }

    pub(super) async fn delete_workspace(&self, job: &Job, result: &mut JobResult) -> ActionResult {
        self.report(job, result).await?;
        let api: Api<Namespace> = Api::all(self.client());
        let name = &job.release.namespace;
        let Some(namespace) = call("reading the workspace", api.get_opt(name)).await? else {
            // The watch has not reported it yet. Without a pause, the next plan would read it again immediately.
            return Err(ActionError::Conflict);
        };
        let is_ours = namespace.labels().contains_key(CREATOR_LABEL);
        if !is_ours {
            return Err(ActionError::Conflict);
        }
        if Box::pin(self.is_occupied(job)).await? {
            return self.remove_finalizer(job, false, result).await;
        }
        self.check_permit()?;
        let params = if_unchanged(&namespace.metadata);
        let deleting = api.delete(name, &params);
        call("deleting the workspace", deleting).await?;
        let event = ObjectEvent::normal("WorkspaceDeleted", format!("deleting namespace {name}"));
        self.emit_event(&job.owner, event);
        // The watch shows that the namespace is terminating, and then that it is gone.
        Err(ActionError::Conflict)
    }
}
