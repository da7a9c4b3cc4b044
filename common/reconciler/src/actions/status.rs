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

use super::{ActionError, ActionRunner, Job, JobResult};
use crate::owner::ReleaseOwner;
use crate::run_loop::StatusMode;
use crate::status;
use crate::status::throttle::{PAUSE, QUIET, with_detail};

impl ActionRunner {
    /// Reports the state, writes it to the Tenant if this process does that here, and emits events for changes.
    pub(super) async fn say(&self, job: &Job, done: &mut JobResult) -> Result<(), ActionError> {
        self.say_state(job, &job.plan.state, done).await
    }

    async fn say_state(
        &self,
        job: &Job,
        state: &ClusterState,
        done: &mut JobResult,
    ) -> Result<(), ActionError> {
        if job.plan.ours {
            let applied_chart = job.plan.applied_chart.as_deref().unwrap_or_default();
            let owner = &job.owner;
            self.report_store
                .put(owner, state.clone(), applied_chart, job.next, job.plan.gone);
        } else {
            self.report_store.forget(&job.key);
        }
        done.said = Some(state.clone());
        // Without the Lease, this process only observes: only the holder writes and emits events.
        if !self.hold.get().may_start(BootTime::now()) {
            return Ok(());
        }
        if let (StatusMode::Write, ReleaseOwner::Tenant(tenant)) = (self.member.status, &job.owner)
        {
            let newest = done.tenant.as_ref().unwrap_or(tenant);
            let next = status::status(
                newest,
                &self.member.name,
                state,
                job.next,
                job.plan.applied_chart.as_deref(),
                job.desired.handling.allow_chart_skip,
                clock::wall(),
            );
            if newest.status.as_ref() != Some(&next) {
                let mut patch = json!({
                    "metadata": { "resourceVersion": newest.metadata.resource_version },
                    "status": next,
                });
                // A merge patch removes only fields that are null.
                if next.next_steps.is_empty() {
                    patch["status"]["nextSteps"] = Value::Null;
                }
                let api = self.tenants(job.key.namespace());
                let params = PatchParams::default();
                let patch = Patch::Merge(&patch);
                let writing = api.patch_status(job.key.name(), &params, &patch);
                match call("writing the status", writing)
                    .await
                    .map_err(ActionError::from)
                {
                    Ok(tenant) => done.tenant = Some(tenant),
                    Err(fault) => {
                        done.said = None;
                        if let ActionError::Transient(message) | ActionError::Refused(message) =
                            &fault
                        {
                            let message = message.clone();
                            let told = ObjectEvent {
                                warning: true,
                                reason: "StatusUpdateFailed",
                                message,
                            };
                            self.tell(&job.owner, told);
                        }
                        return Err(fault);
                    }
                }
            }
        }
        let before = done.told.as_ref().or(job.told.as_ref());
        for told in status::told(before, state) {
            self.tell(&job.owner, told);
        }
        // On the home cluster, the hub emits this event, with the phase across all members.
        if self.member.status == StatusMode::Write {
            let skip = job.desired.handling.allow_chart_skip;
            if let Some(told) = status::phase_told(before, state, skip) {
                self.tell(&job.owner, told);
            }
        }
        done.told = Some(state.clone());
        Ok(())
    }

    /// Waits for a Helm run that writes `revision`, and reports the hook that Helm waits for.
    pub(super) async fn reporting_hooks<T>(
        &self,
        job: &Job,
        done: &mut JobResult,
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
                told = Box::pin(self.tell_hook(job, done, revision)) => {
                    // The next call reports it, or the next plan after Helm has ended.
                    if let Err(fault) = told {
                        tracing::debug!(problem = fault.text(), "progress not told");
                    }
                }
            }
        }
    }

    async fn tell_hook(
        &self,
        job: &Job,
        done: &mut JobResult,
        revision: u32,
    ) -> Result<(), ActionError> {
        let secret = self.revision_secret(&job.release, revision).await?;
        let running = secret.and_then(|secret| releases::running_hook(&secret).ok().flatten());
        let announced = &job.plan.state;
        let state = match running {
            Some(hook) => with_detail(announced, &format!("waiting for {hook}")),
            None => announced.clone(),
        };
        if done.said.as_ref() == Some(&state) {
            return Ok(());
        }
        let Err(fault) = self.say_state(job, &state, done).await else {
            return Ok(());
        };
        if let (ActionError::Conflict, ReleaseOwner::Tenant(tenant)) = (&fault, &job.owner) {
            // Another client has written to the Tenant. A new generation has not been reconciled yet.
            let api = self.tenants(job.key.namespace());
            let fresh = call("reading the Tenant", api.get(job.key.name())).await?;
            if fresh.uid() == tenant.uid()
                && fresh.metadata.generation == tenant.metadata.generation
            {
                done.tenant = Some(fresh);
            }
        }
        Err(fault)
    }
}
