//! The finalizer of a Tenant, and the annotations that Krypton writes on it.

use krypton_crds::tenant::Tenant;
use krypton_runtime::call::call;
use krypton_runtime::events::ObjectEvent;
use krypton_types::names;

use super::{ActionError, ActionRunner, Job, JobResult, ReleaseNews};
use crate::owner::ReleaseOwner;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::json;

impl ActionRunner {
    pub(super) async fn add_finalizer(
        &self,
        job: &Job,
        done: &mut JobResult,
    ) -> Result<(), ActionError> {
        let ReleaseOwner::Tenant(tenant) = &job.owner else {
            return Ok(());
        };
        if job.workspace_exists {
            let message = format!("namespace {} exists", job.release.namespace);
            let told = ObjectEvent {
                warning: false,
                reason: "WorkspaceExists",
                message,
            };
            self.tell(&job.owner, told);
        }
        let mut finalizers = tenant.finalizers().to_vec();
        finalizers.push(names::TENANT_FINALIZER.to_owned());
        let patching = self.patch_tenant(tenant, done, json!({ "finalizers": finalizers }));
        done.tenant = Some(call("adding the finalizer", patching).await?);
        Ok(())
    }

    pub(super) async fn remove_finalizer(
        &self,
        job: &Job,
        orphaned: bool,
        done: &mut JobResult,
    ) -> Result<(), ActionError> {
        // Without the finalizer, no process would uninstall a release that an incomplete list omitted.
        if !orphaned && job.newest.is_none() {
            self.relist(job, done).await?;
            if matches!(&done.release, Some(ReleaseNews::All { metas, .. }) if !metas.is_empty()) {
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
                done.let_go = Some(order.uid.clone());
                return Ok(());
            }
        };
        let mut finalizers = tenant.finalizers().to_vec();
        finalizers.retain(|finalizer| finalizer != names::TENANT_FINALIZER);
        if orphaned {
            let message = job.plan.state.ready.message.clone();
            self.tell(
                &job.owner,
                ObjectEvent {
                    warning: true,
                    reason: "Orphaned",
                    message,
                },
            );
        }
        let mut metadata = json!({ "finalizers": finalizers });
        // With the annotation, the remaining Tenant would adopt a release that another client installs there.
        if job.desired.retire && !orphaned {
            let annotation = names::fingerprint_annotation(&self.member.name);
            metadata["annotations"] = json!({ annotation: null });
        }
        let patching = self.patch_tenant(tenant, done, metadata);
        done.tenant = Some(call("removing the finalizer", patching).await?);
        Ok(())
    }

    pub(super) async fn annotate(
        &self,
        job: &Job,
        done: &mut JobResult,
    ) -> Result<(), ActionError> {
        self.say(job, done).await?;
        let ReleaseOwner::Tenant(tenant) = &job.owner else {
            return Ok(());
        };
        let chart = &job.desired.chart;
        let fingerprint =
            krypton_types::fingerprint::original(&chart.repo, &chart.name, &chart.version);
        let annotation = names::fingerprint_annotation(&self.member.name);
        let metadata = json!({ "annotations": { annotation: fingerprint } });
        let patching = self.patch_tenant(tenant, done, metadata);
        done.tenant = Some(call("annotating the Tenant", patching).await?);
        Ok(())
    }

    pub(super) async fn patch_tenant(
        &self,
        tenant: &Tenant,
        done: &JobResult,
        mut metadata: serde_json::Value,
    ) -> kube::Result<Tenant> {
        let newest = done.tenant.as_ref().unwrap_or(tenant);
        metadata["resourceVersion"] = json!(newest.metadata.resource_version);
        let patch = json!({ "metadata": metadata });
        let api = self.tenants(&newest.namespace().unwrap_or_default());
        let params = PatchParams::default();
        let patch = Patch::Merge(&patch);
        api.patch(&newest.name_any(), &params, &patch).await
    }
}
