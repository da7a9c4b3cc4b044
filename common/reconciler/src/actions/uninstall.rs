//! Uninstalls a release.

use krypton_helm::driver::Uninstall;
use krypton_helm::releases::record::{RecordComparison, ReleaseRecord};
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, Status};
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::reason;
use kube::ResourceExt;

use super::super::helm_queue::HelmReservation;
use super::leftovers::LeftoverSource;
use super::stored_revisions::{ForeignRevisions, StoredRevisions};
use super::trust::{OwnedObjects, check_unchanged, verdict};
use super::{ActionError, ActionResult, ActionRunner, Job, JobResult, helm_failure, transient};

impl ActionRunner {
    pub(super) async fn uninstall(
        &self,
        job: &Job,
        reservation: Option<HelmReservation>,
        result: &mut JobResult,
    ) -> ActionResult {
        let Some(HelmReservation { slot, .. }) = reservation else {
            return Err(ActionError::Conflict);
        };
        self.check_permit()?;
        self.confirm_deletion(job).await?;
        if job.owner.is_being_removed() {
            result.deletion_confirmed = job.owner.tenant().and_then(|tenant| tenant.uid());
        }
        if job.owner.is_being_removed() || job.desired.retire {
            self.report(job, result).await?;
        }
        self.mark_deletion(job, result).await?;
        let newest = job.newest.as_ref().map_or(0, |newest| newest.revision);
        let needed = [newest];
        let reading = self.read_checked(job, &needed, ForeignRevisions::Keep, result);
        let stored = match reading.await? {
            Ok(stored) => stored,
            // Helm skips a revision that it cannot decode, and would silently use the previous one.
            Err(found) => return self.set_aside(job, &found, Some(slot), result).await,
        };
        self.sweep_before_uninstall(job).await?;
        let hooks = self.check_uninstall(job, &stored, result).await?;
        // The deletions announce the run, so it takes place at another time.
        if self.delete_all_but(job, &stored, newest).await? {
            self.relist(job, result).await?;
            return Err(ActionError::Conflict);
        }
        if hooks {
            self.wait_randomly().await;
        }
        // The preparation may have taken long.
        self.confirm_deletion(job).await?;
        self.recheck(job, &stored).await?;
        self.check_permit()?;
        let uninstall = Uninstall {
            target: self.helm_target(job),
            timeout: self.member.policy.helm_timeout,
            hooks,
        };
        tracing::info!(member = %self.member.name, "running helm uninstall");
        let running = Box::pin(self.tools.helm.uninstall(slot, &uninstall, &self.stop));
        let ended = self.run_reporting_hooks(job, result, newest, running).await;
        self.relist(job, result).await?;
        let name = &job.release.name;
        if !result.listed().is_empty() {
            let message = format!("release {name} still exists after helm uninstall");
            return Err(helm_failure(ended.err(), reason::UNINSTALL_FAILED, message));
        }
        result.clears_failure = true;
        let event = ObjectEvent::normal("HelmUninstalled", format!("uninstalled release {name}"));
        self.emit_event(&job.owner, event);
        Ok(())
    }

    /// Whether `helm uninstall` runs the stored hooks. Without delete hooks it must not, because a user of the
    /// workspace could add one after the check.
    async fn check_uninstall(
        &self,
        job: &Job,
        stored: &StoredRevisions,
        result: &mut JobResult,
    ) -> ActionResult<bool> {
        let Some(newest) = &job.newest else {
            return Ok(false);
        };
        let record = &stored.record;
        let secret = stored
            .revision(newest.revision)
            .ok_or(ActionError::Conflict)?;
        if check_unchanged(&job.release, record, secret)? {
            return releases::has_delete_hooks(secret).map_err(|error| transient(&error));
        }
        self.remove_failed_attempts(job, record, result).await?;
        let mut owned = OwnedObjects::default();
        self.check_objects(job, newest.revision, secret, &mut owned)
            .await?;
        let has_hooks = releases::has_delete_hooks(secret).unwrap_or(true);
        if has_hooks {
            let message = format!(
                "uninstalling release {} without its delete hooks: Krypton has not deployed revision {}",
                job.release.name, newest.revision
            );
            let event = ObjectEvent::warning("HooksSkipped", message);
            self.emit_event(&job.owner, event);
        }
        Ok(false)
    }

    /// Removes failed attempts on top of a recorded revision, together with their leftovers. Helm then uninstalls the
    /// recorded revision and runs its hooks.
    async fn remove_failed_attempts(
        &self,
        job: &Job,
        record: &ReleaseRecord,
        result: &mut JobResult,
    ) -> ActionResult {
        let has_record = |revision: &&Revision| record.digests.contains_key(&revision.revision);
        let Some(good) = job.revisions.iter().rfind(has_record) else {
            return Ok(());
        };
        let newer = job.revisions.iter().rev();
        let newer: Vec<&Revision> = newer
            .take_while(|revision| revision.revision > good.revision)
            .collect();
        if newer.is_empty()
            || newer
                .iter()
                .any(|revision| revision.status != Status::Failed)
        {
            return Ok(());
        }
        let good_secret = self.revision_secret(&job.release, good.revision).await?;
        let good_secret = good_secret.ok_or(ActionError::Conflict)?;
        if verdict(record, &good_secret)?.1 != RecordComparison::Recorded {
            return Ok(());
        }
        for attempt in newer {
            let secret = self.revision_secret(&job.release, attempt.revision).await?;
            let secret = secret.ok_or(ActionError::Conflict)?;
            self.check_permit()?;
            let source = LeftoverSource::ByAttempt;
            self.remove_leftovers(job, (&secret, &good_secret), source, true)
                .await?;
            self.forget(&job.release, &secret.metadata).await?;
        }
        self.relist(job, result).await?;
        Err(ActionError::Conflict)
    }
}
