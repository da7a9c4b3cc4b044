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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Duration;

    use krypton_crds::tenant::TenantSpec;
    use krypton_helm::driver::StopHandle;
    use krypton_runtime::events::EventRecorder;
    use krypton_runtime::lease::{LeaseGoal, LeaseState};
    use krypton_types::allowed_namespaces::AllowedNamespaces;
    use krypton_types::conditions::{ClusterState, State, Truth, reason};
    use krypton_types::desired::DesiredState;
    use krypton_types::fingerprint;
    use krypton_types::tenant::TenantKey;
    use tempfile::TempDir;
    use tokio::sync::watch;

    use super::*;
    use crate::fixtures::tools;
    use crate::index::CrdState;
    use crate::inputs::{Member, StatusMode, Tools};
    use crate::owner::OwnerKey;
    use crate::plan::{Action, Plan, Policy};
    use crate::stub_server::StubServer;

    const MEMBER: &str = "edge-1";

    fn runner(server: &StubServer, events: EventRecorder, tools: Tools) -> Arc<ActionRunner> {
        let member = Member {
            name: MEMBER.to_owned(),
            source_namespace: None,
            client: server.client.clone(),
            helm_client: server.client.clone(),
            kubeconfig: PathBuf::new(),
            holder: String::new(),
            lease_goal: watch::channel(LeaseGoal::Hold).1,
            instance: String::new(),
            program: names::AGENT_MANAGER,
            status_mode: StatusMode::Report,
            namespaces: None,
            allowed_namespaces: watch::channel(AllowedNamespaces::default()).1,
            retry_max: Duration::from_secs(5),
            policy: Policy::new(Duration::from_secs(180), []),
            on_excess: None,
        };
        Arc::new(ActionRunner {
            member: Arc::new(member),
            fleet_client: server.client.clone(),
            desired: watch::channel(Arc::default()).1,
            tools,
            events,
            report_store: Arc::default(),
            lease_state: watch::channel(LeaseState::default()).1,
            crd_losses: Arc::default(),
            stop: StopHandle::new().1,
        })
    }

    /// Returns the job for a Tenant whose release is as desired and whose annotation is not.
    fn annotation_job(tenant: Tenant) -> Job {
        let owner = ReleaseOwner::Tenant(Arc::new(tenant));
        let ready = State::new(Truth::True, reason::INSTALLED, "release installed");
        Job {
            key: OwnerKey::Tenant(TenantKey::new(owner.namespace(), owner.name())),
            release: owner.release(MEMBER),
            owner,
            plan: Plan {
                action: Action::Annotate,
                state: ClusterState::from(ready),
                applied_chart: None,
                history: Vec::new(),
                revisions: None,
                wake: None,
                next: None,
                is_reported: true,
                gone: false,
                settled: true,
                handles_request: false,
                drift: None,
            },
            published: None,
            next: None,
            handled_request: None,
            newest: None,
            revisions: Vec::new(),
            known_version: 0,
            lists: 0,
            workspace_exists: true,
            tenant_crd: CrdState::Present,
            crd_losses: 0,
            is_last_owner: false,
            desired: Arc::new(DesiredState::default()),
            fingerprint: Arc::from("fingerprint"),
            permitted: true,
            reservation: None,
        }
    }

    #[tokio::test]
    async fn refused_annotation_is_reported_and_written_later() {
        let annotation = names::fingerprint_annotation(MEMBER);
        let mut tenant = Tenant::new("acme", TenantSpec::default());
        tenant.metadata.namespace = Some("team".to_owned());
        tenant.metadata.resource_version = Some("7".to_owned());
        tenant.metadata.annotations = Some([(annotation.clone(), "older".to_owned())].into());
        let stored = serde_json::to_value(&tenant).unwrap();
        let server = StubServer::start(move |request| {
            if request.earlier == 0 {
                return (403, json!("no annotations here"));
            }
            let mut written = stored.clone();
            written["metadata"]["annotations"] = request.body["metadata"]["annotations"].clone();
            (200, written)
        });
        let folder = TempDir::new().unwrap();
        let (events, mut queue) = EventRecorder::queue(4);
        let runner = runner(&server, events, tools(&folder).await);
        let job = Arc::new(annotation_job(tenant));
        let run = || Box::pin(Arc::clone(&runner).run_job(Arc::clone(&job), None));

        let refused = run().await;
        assert!(matches!(refused.error, Some(ActionError::Refused(_))));
        let event = queue.try_recv().unwrap().event;
        assert_eq!(
            (event.warning, event.reason),
            (true, "FingerprintUpdateFailed")
        );
        assert!(event.message.contains("no annotations here"), "{event:?}");

        let retried = run().await;
        assert!(retried.error.is_none());
        let event = queue.try_recv().unwrap().event;
        assert_eq!((event.warning, event.reason), (false, "FingerprintUpdated"));
        let chart = &job.desired.chart;
        let expected = fingerprint::original(&chart.repo, &chart.name, &chart.version);
        let written = retried.tenant.as_ref().unwrap();
        assert_eq!(written.annotations().get(&annotation), Some(&expected));
        for request in server.requests() {
            assert_eq!(request.line(), "PATCH acme");
            assert_eq!(request.body["metadata"]["resourceVersion"], "7");
        }
    }
}
