//! Unlocks a release that a Helm process left locked.

use krypton_helm::releases::labels::{INSTALL_RUN, RUN_LABEL};
use krypton_helm::releases::{self, Status};
use krypton_runtime::call::call;
use krypton_runtime::events::ObjectEvent;

use super::super::helm_queue::HelmReservation;
use super::{ActionError, ActionResult, ActionRunner, Job, JobResult};
use kube::ResourceExt;
use kube::api::PostParams;

impl ActionRunner {
    pub(super) async fn unlock(
        &self,
        job: &Job,
        (revision, status): (u32, Status),
        reservation: Option<HelmReservation>,
        result: &mut JobResult,
    ) -> ActionResult {
        let Some(secret) = self.revision_secret(&job.release, revision).await? else {
            return self.relist_without(job, revision, result).await;
        };
        // The Helm process may have ended the run since the plan.
        let stored = secret.labels().get("status");
        if stored.map(String::as_str) != Some(status.as_str()) {
            self.relist(job, result).await?;
            return Err(ActionError::Conflict);
        }
        let description =
            format!("Unlocked by Krypton: an interrupted Helm process left it in status {status}");
        let mut unlocked = match releases::unlocked(&secret, &description) {
            Ok(unlocked) => unlocked,
            Err(error) => {
                let slot = reservation.map(|reservation| reservation.slot);
                return self.set_aside(job, &(secret, error), slot, result).await;
            }
        };
        // A revision that was once deployed must not count as a failed installation.
        if status != Status::PendingInstall
            && let Some(labels) = &mut unlocked.metadata.labels
        {
            labels.retain(|label, run| label != RUN_LABEL || !run.starts_with(INSTALL_RUN));
        }
        self.check_permit()?;
        let name = unlocked.name_any();
        let api = self.secrets(&job.release);
        let params = PostParams::default();
        let unlocking = api.replace(&name, &params, &unlocked);
        call("unlocking the release", unlocking).await?;
        let message = format!(
            "unlocked revision {revision}, which an interrupted Helm process left in status {status}"
        );
        let event = ObjectEvent::warning("ReleaseUnlocked", message);
        self.emit_event(&job.owner, event);
        self.relist(job, result).await
    }
}
