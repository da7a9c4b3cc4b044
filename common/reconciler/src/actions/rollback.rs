//! Rolls back to the last good revision after Krypton gave up an upgrade.

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::driver::{HelmError, Rollback};
use krypton_helm::releases::labels::ROLLBACK_LABEL;
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, Status};
use krypton_runtime::call::call;
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use super::stored::Foreign;
use super::trust::check_rollback;
use super::{ActionError, ActionRunner, Job, JobResult, ReleaseNews, suspended, unavailable};
use crate::helm_queue::Ready;
use crate::plan::revisions;

impl ActionRunner {
    /// Marks the current revision before the rollback, so Krypton recognizes the lock if the rollback dies.
    async fn sign(&self, job: &Job, current: &Secret, by: u32) -> Result<(), ActionError> {
        self.still_permitted()?;
        let patch = Patch::Merge(json!({ "metadata": {
            "resourceVersion": current.metadata.resource_version,
            "labels": { ROLLBACK_LABEL: by.to_string() },
        }}));
        let (name, params) = (current.name_any(), PatchParams::default());
        let client = self.member.helm_client.clone();
        let api: Api<Secret> = Api::namespaced(client, &job.release.namespace);
        let signing = api.patch_metadata(&name, &params, &patch);
        call("signing a rollback", signing).await?;
        Ok(())
    }

    pub(super) async fn roll_back(
        &self,
        job: &Job,
        to: u32,
        ready: Option<Ready>,
        done: &mut JobResult,
    ) -> Result<(), ActionError> {
        let (Some(newest), Some(ready)) = (&job.newest, ready) else {
            return Err(ActionError::Conflict);
        };
        self.still_permitted()?;
        let Some(current) = self.revision_secret(&job.release, newest.revision).await? else {
            return self.relist_without(job, newest.revision, done).await;
        };
        self.sign(job, &current, newest.revision + 1).await?;
        self.say(job, done).await?;
        let keep = [newest.revision, to];
        let stored = match self.stored(job, &keep, Foreign::Remove, done).await? {
            Ok(stored) => stored,
            Err(unreadable) => {
                let (secret, error) = *unreadable;
                let ready = Some(ready);
                return self.set_aside(job, &secret, &error, ready, done).await;
            }
        };
        let revisions = (stored.revision(newest.revision), stored.revision(to));
        let (Some(current), Some(good)) = revisions else {
            return self.relist(job, done).await;
        };
        self.check_compared(job, &stored.record, current).await?;
        let digest = check_rollback(&job.release, &stored.record, good)?;
        self.wait_unannounced().await;
        self.check_again(job, &stored).await?;
        self.still_permitted()?;
        let chart = job.chart();
        let rollback = Rollback {
            kubeconfig: self.member.kubeconfig.clone(),
            release: job.release.name.clone(),
            namespace: job.release.namespace.clone(),
            to,
            timeout: self.member.policy.helm_timeout,
            server_side: releases::decode(current)
                .is_ok_and(|release_details| release_details.server_side),
            history_max: revisions::history(
                self.member.policy.history_max,
                &job.revisions,
                &chart.fingerprint(),
            ),
            values: chart.helm_values(),
            secret_paths: chart.secret_paths().to_vec(),
            cache_key: self.member.name.clone(),
        };
        tracing::info!(member = %self.member.name, to, "running helm rollback");
        let ended = Box::pin(self.tools.helm.rollback(ready.slot, &rollback, &self.stop)).await;
        self.relist(job, done).await?;
        let metas = match &done.release {
            Some(ReleaseNews::All { metas, .. }) => metas.as_slice(),
            _ => &[],
        };
        let written = metas.iter().filter_map(Revision::of);
        let back = written.map(|(_, revision)| revision).find(|revision| {
            revision.revision > newest.revision && revision.status == Status::Deployed
        });
        if let (Some(back), Ok(())) = (&back, &ended) {
            self.put_on_record(job, back.revision, &digest, stored.record)
                .await;
        }
        let message = match ended {
            _ if back.is_some() => {
                let message = format!("revision {to} is deployed again: the upgrade was given up");
                let told = ObjectEvent {
                    warning: true,
                    reason: "HelmRolledBack",
                    message,
                };
                self.tell(&job.owner, told);
                return Ok(());
            }
            Err(HelmError::Stopped) => return Err(ActionError::Conflict),
            Err(error) if error.is_local() => return Err(unavailable(&error)),
            Err(HelmError::Suspended { complaint }) => return Err(suspended(complaint)),
            Err(error) => chain(&error),
            Ok(()) => format!("Helm succeeded, but revision {to} is not deployed"),
        };
        Err(ActionError::Failed {
            reason: reason::ROLLBACK_FAILED,
            message,
            permanent: false,
        })
    }
}
