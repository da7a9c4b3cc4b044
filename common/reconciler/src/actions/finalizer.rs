//! The finalizer of a Tenant, and the annotations that Krypton writes on it.

use krypton_crds::tenant::Tenant;
use krypton_runtime::call::call;
use krypton_runtime::events::ObjectEvent;
use krypton_types::names;

use super::{ActionError, ActionResult, ActionRunner, Job, JobResult};
use crate::owner::ReleaseOwner;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::json;

impl ActionRunner {
    pub(super) async fn add_finalizer(&self, job: &Job, result: &mut JobResult) -> ActionResult {
        let ReleaseOwner::Tenant(tenant) = &job.owner else {
            return Ok(());
        };
        if job.workspace_exists {
            let message = format!("namespace {} exists", job.release.namespace);
            let event = ObjectEvent::normal("WorkspaceExists", message);
            self.emit_event(&job.owner, event);
        }
        let mut finalizers = tenant.finalizers().to_vec();
        finalizers.push(names::TENANT_FINALIZER.to_owned());
        let patching = self.patch_tenant(tenant, result, json!({ "finalizers": finalizers }));
        result.tenant = Some(call("adding the finalizer", patching).await?);
        Ok(())
    }

    pub(super) async fn remove_finalizer(
        &self,
        job: &Job,
        orphaned: bool,
        result: &mut JobResult,
    ) -> ActionResult {
        // Without the finalizer, no process would uninstall a release that an incomplete list omitted.
        if !orphaned && job.newest.is_none() {
            self.relist(job, result).await?;
            if !result.listed().is_empty() {
                return Err(ActionError::Conflict);
            }
        }
        if !orphaned {
            self.delete_cert_manager_crds(job).await?;
            self.delete_record(job).await?;
        }
        let tenant = match &job.owner {
            ReleaseOwner::Tenant(tenant) => tenant,
            // The next report states that the deployment is gone, and the hub then removes its finalizer.
            ReleaseOwner::Deployment(order) => {
                result.cleaned_up = Some(order.uid.clone());
                return Ok(());
            }
        };
        let mut finalizers = tenant.finalizers().to_vec();
        finalizers.retain(|finalizer| finalizer != names::TENANT_FINALIZER);
        if orphaned {
            let event = ObjectEvent::warning("Orphaned", &job.plan.state.ready.message);
            self.emit_event(&job.owner, event);
        }
        let mut metadata = json!({ "finalizers": finalizers });
        // With the annotation, the remaining Tenant would adopt a release that another client installs there.
        if job.desired.retire && !orphaned {
            let annotation = names::fingerprint_annotation(&self.member.name);
            metadata["annotations"] = json!({ annotation: null });
        }
        let patching = self.patch_tenant(tenant, result, metadata);
        result.tenant = Some(call("removing the finalizer", patching).await?);
        Ok(())
    }

    /// Adds the annotation that shows the uninstallation of a deleted Tenant.
    pub(super) async fn mark_deletion(&self, job: &Job, result: &mut JobResult) -> ActionResult {
        let ReleaseOwner::Tenant(tenant) = &job.owner else {
            return Ok(());
        };
        // A Tenant stays if its member leaves the fleet.
        let is_marked = tenant
            .annotations()
            .contains_key(names::DELETING_ANNOTATION);
        if is_marked || !job.owner.is_being_removed() {
            return Ok(());
        }
        let metadata = json!({ "annotations": { names::DELETING_ANNOTATION: "true" } });
        let patching = self.patch_tenant(tenant, result, metadata);
        let written = call("marking the deletion", patching).await;
        match written.map_err(ActionError::from) {
            Ok(written) => result.tenant = Some(written),
            Err(ActionError::Conflict) => return Err(ActionError::Conflict),
            // Without the annotation, the release is uninstalled all the same.
            Err(error) => {
                tracing::warn!(error = %error.text(), "deletion not marked on the Tenant");
            }
        }
        Ok(())
    }

    /// Reports the state, and updates the Go operator's annotation on the Tenant.
    pub(super) async fn annotate(&self, job: &Job, result: &mut JobResult) -> ActionResult {
        self.report(job, result).await?;
        let written = self.write_fingerprint(job, result).await;
        let annotation = names::fingerprint_annotation(&self.member.name);
        let event = match &written {
            Ok(()) => ObjectEvent::normal(
                "FingerprintUpdated",
                format!("updated annotation {annotation}"),
            ),
            Err(ActionError::Conflict) => return written,
            Err(error) => ObjectEvent::warning(
                "FingerprintUpdateFailed",
                format!("failed to update annotation {annotation}: {}", error.text()),
            ),
        };
        self.emit_event(&job.owner, event);
        written
    }

    async fn write_fingerprint(&self, job: &Job, result: &mut JobResult) -> ActionResult {
        let ReleaseOwner::Tenant(tenant) = &job.owner else {
            return Ok(());
        };
        let chart = &job.desired.chart;
        let fingerprint =
            krypton_types::fingerprint::original(&chart.repo, &chart.name, &chart.version);
        let annotation = names::fingerprint_annotation(&self.member.name);
        let metadata = json!({ "annotations": { annotation: fingerprint } });
        let patching = self.patch_tenant(tenant, result, metadata);
        result.tenant = Some(call("annotating the Tenant", patching).await?);
        Ok(())
    }

    pub(super) async fn patch_tenant(
        &self,
        tenant: &Tenant,
        result: &JobResult,
        mut metadata: serde_json::Value,
    ) -> kube::Result<Tenant> {
        let newest = result.tenant.as_ref().unwrap_or(tenant);
        metadata["resourceVersion"] = json!(newest.metadata.resource_version);
        let patch = json!({ "metadata": metadata });
        let api = self.tenants(&newest.namespace().unwrap_or_default());
        let params = PatchParams::default();
        let patch = Patch::Merge(&patch);
        api.patch(&newest.name_any(), &params, &patch).await
    }
}
