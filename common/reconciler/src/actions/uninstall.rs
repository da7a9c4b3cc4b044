//! Uninstalls a release.

use krypton_helm::driver::Uninstall;
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::reason;

use super::super::helm_queue::HelmReservation;
use super::stored_revisions::ForeignRevisions;
use super::{ActionError, ActionRunner, Job, JobResult, ReleaseUpdate, helm_failure};
use kube::ResourceExt;

impl ActionRunner {
    pub(super) async fn uninstall(
        &self,
        job: &Job,
        reservation: Option<HelmReservation>,
        result: &mut JobResult,
    ) -> Result<(), ActionError> {
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
        let stored = match self
            .read_checked(job, &[newest], ForeignRevisions::Keep, result)
            .await?
        {
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
            kubeconfig: self.member.kubeconfig.clone(),
            release: job.release.name.clone(),
            namespace: job.release.namespace.clone(),
            timeout: self.member.policy.helm_timeout,
            hooks,
            cache_key: self.member.name.clone(),
        };
        tracing::info!(member = %self.member.name, "running helm uninstall");
        let running = Box::pin(self.tools.helm.uninstall(slot, &uninstall, &self.stop));
        let ended = self.run_reporting_hooks(job, result, newest, running).await;
        self.relist(job, result).await?;
        let is_gone = matches!(&result.release_update, Some(ReleaseUpdate::All { metas, .. }) if metas.is_empty());
        let name = &job.release.name;
        if !is_gone {
            let message = format!("release {name} still exists after helm uninstall");
            return Err(helm_failure(ended.err(), reason::UNINSTALL_FAILED, message));
        }
        result.clears_failure = true;
        let event = ObjectEvent::normal("HelmUninstalled", format!("uninstalled release {name}"));
        self.emit_event(&job.owner, event);
        Ok(())
    }
}
