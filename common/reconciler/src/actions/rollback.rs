//! Rolls back to the last good revision after Krypton gave up an upgrade.

use krypton_helm::driver::Rollback;
use krypton_helm::releases::labels::ROLLBACK_LABEL;
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, Status};
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::reason;
use serde_json::json;

use super::stored_revisions::ForeignRevisions;
use super::trust::check_rollback;
use super::{ActionError, ActionResult, ActionRunner, Job, JobResult, helm_failure};
use crate::helm_queue::HelmReservation;
use crate::plan::revisions;

impl ActionRunner {
    pub(super) async fn roll_back(
        &self,
        job: &Job,
        to: u32,
        reservation: Option<HelmReservation>,
        result: &mut JobResult,
    ) -> ActionResult {
        let (Some(newest), Some(HelmReservation { slot, .. })) = (&job.newest, reservation) else {
            return Err(ActionError::Conflict);
        };
        self.check_permit()?;
        let Some(current) = self.revision_secret(&job.release, newest.revision).await? else {
            return self.relist_without(job, newest.revision, result).await;
        };
        // Krypton then recognizes the lock if the rollback dies.
        let labels = json!({ ROLLBACK_LABEL: (newest.revision + 1).to_string() });
        self.label_revision(job, &current, labels, "signing a rollback")
            .await?;
        self.report(job, result).await?;
        let needed = [newest.revision, to];
        let reading = self.read_checked(job, &needed, ForeignRevisions::Remove, result);
        let mut stored = match reading.await? {
            Ok(stored) => stored,
            Err(found) => return self.set_aside(job, &found, Some(slot), result).await,
        };
        let revisions = (stored.revision(newest.revision), stored.revision(to));
        let (Some(current), Some(good)) = revisions else {
            return self.relist(job, result).await;
        };
        let compared = (newest.revision, current);
        self.check_compared(job, &stored.record, compared).await?;
        let digest = check_rollback(&job.release, &stored.record, good)?;
        let server_side =
            releases::decode(current).is_ok_and(|release_details| release_details.server_side);
        self.forget_later_digests(job, &mut stored.record).await?;
        self.wait_randomly().await;
        self.recheck(job, &stored).await?;
        self.check_start(job)?;
        let chart = job.chart();
        let policy = &self.member.policy;
        let rollback = Rollback {
            target: self.helm_target(job),
            to,
            timeout: policy.helm_timeout,
            server_side,
            // Helm must keep the failed revision, whose mark shows the rollback.
            history_max: revisions::history_limit(
                policy.handling(&job.desired.handling).history_max,
                &job.revisions,
                &chart.fingerprint(),
            )
            .max(3),
            values: chart.helm_values(),
            secret_paths: chart.secret_paths().to_vec(),
        };
        tracing::info!(member = %self.member.name, to, "running helm rollback");
        let running = Box::pin(self.tools.helm.rollback(slot, &rollback, &self.stop));
        let ended = running.await;
        self.relist(job, result).await?;
        let written = result.listed().iter().filter_map(Revision::from_metadata);
        let restored = written.map(|(_, revision)| revision).find(|revision| {
            revision.revision > newest.revision && revision.status == Status::Deployed
        });
        if let (Some(restored), Ok(())) = (&restored, &ended) {
            self.record_digest(job, restored.revision, &digest, stored.record)
                .await;
        }
        if restored.is_none() {
            let message = format!("Helm succeeded, but revision {to} is not deployed");
            return Err(helm_failure(ended.err(), reason::ROLLBACK_FAILED, message));
        }
        let message = format!("rolled back to revision {to}, because the upgrade failed");
        let event = ObjectEvent::warning("HelmRolledBack", message);
        self.emit_event(&job.owner, event);
        Ok(())
    }
}
