//! Reports the state of a Tenant or KryptonDeployment, and writes it to a Tenant. While Helm runs, the state names
//! the hook that Helm waits for, as recorded by Helm.

use std::pin::pin;

use krypton_helm::releases;
use krypton_runtime::call::call;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::events::ObjectEvent;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::ClusterState;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::{ActionError, ActionResult, ActionRunner, Job, JobResult};
use crate::inputs::StatusMode;
use crate::owner::ReleaseOwner;
use crate::status;
use crate::status::throttle::{PAUSE, QUIET, with_detail};

impl ActionRunner {
    /// Reports the state, writes it to the Tenant if this process does that here, and emits events for changes.
    pub(super) async fn report(&self, job: &Job, result: &mut JobResult) -> ActionResult {
        self.report_state(job, &job.plan.state, result).await
    }

    async fn report_state(
        &self,
        job: &Job,
        state: &ClusterState,
        result: &mut JobResult,
    ) -> ActionResult {
        if job.plan.is_reported {
            let applied_chart = job.plan.applied_chart.as_deref().unwrap_or_default();
            let owner = &job.owner;
            self.report_store.set_owner(
                owner,
                state.clone(),
                applied_chart,
                (job.next, job.handled_request.clone()),
                job.plan.gone,
            );
        } else {
            self.report_store.remove(&job.key);
        }
        result.reported = Some(state.clone());
        // Without the Lease, this process only observes: only the holder writes and emits events.
        if !self.lease_state.get().may_start(BootTime::now()) {
            return Ok(());
        }
        if let (StatusMode::Write, ReleaseOwner::Tenant(tenant)) =
            (self.member.status_mode, &job.owner)
        {
            let newest = result.tenant.as_ref().unwrap_or(tenant);
            let mut status = status::status(
                newest,
                &self.member.name,
                state,
                job.next,
                job.plan.applied_chart.as_deref(),
                job.desired.handling.allow_chart_skip,
                clock::wall(),
            );
            status.history.clone_from(&job.plan.history);
            // A process that only observed may remember an older request than the status has.
            if job.plan.handles_request && job.handled_request.is_some() {
                status
                    .last_handled_reconcile_at
                    .clone_from(&job.handled_request);
            }
            if newest.status.as_ref() != Some(&status) {
                let mut patch = json!({
                    "metadata": { "resourceVersion": newest.metadata.resource_version },
                    "status": status,
                });
                // A merge patch removes only fields that are null.
                if status.next_steps.is_empty() {
                    patch["status"]["nextSteps"] = Value::Null;
                }
                let api = self.tenants(job.key.namespace());
                let params = PatchParams::default();
                let patch = Patch::Merge(&patch);
                let writing = api.patch_status(job.key.name(), &params, &patch);
                let written = call("writing the status", writing).await;
                match written.map_err(ActionError::from) {
                    Ok(tenant) => result.tenant = Some(tenant),
                    Err(error) => {
                        result.reported = None;
                        if let ActionError::Transient(message) | ActionError::Refused(message) =
                            &error
                        {
                            let message = message.clone();
                            let event = ObjectEvent::warning("StatusUpdateFailed", message);
                            self.emit_event(&job.owner, event);
                        }
                        return Err(error);
                    }
                }
            }
        }
        let previous = result.published.as_ref().or(job.published.as_ref());
        for event in status::transition_events(previous, state) {
            let event = status::reinstallation_event(&job.owner, job.newest.as_ref(), event);
            self.emit_event(&job.owner, event);
        }
        // On the home cluster, the hub emits this event, with the phase across all members.
        if self.member.status_mode == StatusMode::Write {
            let skip = job.desired.handling.allow_chart_skip;
            if let Some(event) = status::phase_event(previous, state, skip) {
                self.emit_event(&job.owner, event);
            }
        }
        result.published = Some(state.clone());
        Ok(())
    }

    /// Waits for a Helm run that writes `revision`, and reports the hook that Helm waits for.
    pub(super) async fn run_reporting_hooks<T>(
        &self,
        job: &Job,
        result: &mut JobResult,
        revision: u32,
        run: impl Future<Output = T>,
    ) -> T {
        let mut run = pin!(run);
        let mut pause = QUIET;
        loop {
            if let Ok(ended) = tokio::time::timeout(pause, &mut run).await {
                return ended;
            }
            pause = PAUSE;
            tokio::select! {
                biased;
                ended = &mut run => return ended,
                reported = Box::pin(self.report_hook(job, result, revision)) => {
                    // The next call reports it, or the next plan after Helm has ended.
                    if let Err(error) = reported {
                        tracing::debug!(problem = error.text(), "failed to report progress");
                    }
                }
            }
        }
    }

    async fn report_hook(&self, job: &Job, result: &mut JobResult, revision: u32) -> ActionResult {
        let secret = self.revision_secret(&job.release, revision).await?;
        let hook = secret.and_then(|secret| releases::running_hook(&secret).ok().flatten());
        let announced = &job.plan.state;
        let state = match hook {
            Some(hook) => with_detail(announced, &format!("waiting for {hook}")),
            None => announced.clone(),
        };
        if result.reported.as_ref() == Some(&state) {
            return Ok(());
        }
        let Err(error) = self.report_state(job, &state, result).await else {
            return Ok(());
        };
        if let (ActionError::Conflict, ReleaseOwner::Tenant(tenant)) = (&error, &job.owner) {
            // Another client has written to the Tenant. A new generation has not been reconciled yet.
            let api = self.tenants(job.key.namespace());
            let current = call("reading the Tenant", api.get(job.key.name())).await?;
            if current.uid() == tenant.uid()
                && current.metadata.generation == tenant.metadata.generation
            {
                result.tenant = Some(current);
            }
        }
        Err(error)
    }
}
