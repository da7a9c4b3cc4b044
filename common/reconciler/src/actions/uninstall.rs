//! Uninstalls a release.

use krypton_helm::driver::{HelmError, Uninstall};
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;

use super::super::helm_queue::Ready;
use super::stored::Foreign;
use super::{ActionError, ActionRunner, Job, JobResult, ReleaseNews, suspended, unavailable};
use kube::ResourceExt;

impl ActionRunner {
    pub(super) async fn uninstall(
        &self,
        job: &Job,
        ready: Option<Ready>,
        done: &mut JobResult,
    ) -> Result<(), ActionError> {
        let Some(ready) = ready else {
            return Err(ActionError::Conflict);
        };
        self.still_permitted()?;
        self.confirm_deletion(job).await?;
        if job.owner.is_going() {
            done.deletion_confirmed = job.owner.tenant().and_then(|tenant| tenant.uid());
        }
        if job.owner.is_going() || job.desired.retire {
            self.say(job, done).await?;
        }
        let newest = job.newest.as_ref().map_or(0, |newest| newest.revision);
        let stored = match self.stored(job, &[newest], Foreign::Keep, done).await? {
            Ok(stored) => stored,
            // Helm skips a revision that it cannot decode, and would silently use the previous one.
            Err(unreadable) => {
                let (secret, error) = *unreadable;
                let ready = Some(ready);
                return self.set_aside(job, &secret, &error, ready, done).await;
            }
        };
        self.sweep_before_uninstall(job).await?;
        let hooks = self.check_uninstall(job, &stored, done).await?;
        // The deletions announce the run, so it takes place at another time.
        if self.leave_only(job, &stored, newest).await? {
            self.relist(job, done).await?;
            return Err(ActionError::Conflict);
        }
        if hooks {
            self.wait_unannounced().await;
        }
        self.check_again(job, &stored).await?;
        self.still_permitted()?;
        let uninstall = Uninstall {
            kubeconfig: self.member.kubeconfig.clone(),
            release: job.release.name.clone(),
            namespace: job.release.namespace.clone(),
            timeout: self.member.policy.helm_timeout,
            hooks,
            cache_key: self.member.name.clone(),
        };
        tracing::info!(member = %self.member.name, "running helm uninstall");
        let running = Box::pin(
            self.tools
                .helm
                .uninstall(ready.slot, &uninstall, &self.stop),
        );
        let ended = self.reporting_hooks(job, done, newest, running).await;
        self.relist(job, done).await?;
        let gone =
            matches!(&done.release, Some(ReleaseNews::All { metas, .. }) if metas.is_empty());
        match ended {
            _ if gone => {
                done.progressed = true;
                let message = format!("uninstalled release {}", job.release.name);
                let told = ObjectEvent {
                    warning: false,
                    reason: "HelmUninstalled",
                    message,
                };
                self.tell(&job.owner, told);
                Ok(())
            }
            Err(HelmError::Stopped) => Err(ActionError::Conflict),
            Err(error) if error.is_local() => Err(unavailable(&error)),
            Err(HelmError::Suspended { complaint }) => Err(suspended(complaint)),
            Ok(()) => Err(ActionError::Failed {
                reason: reason::UNINSTALL_FAILED,
                message: format!(
                    "release {} still exists after helm uninstall",
                    job.release.name
                ),
                permanent: false,
            }),
            Err(error) => {
                let message = chain(&error);
                let told = ObjectEvent {
                    warning: true,
                    reason: "HelmUninstallFailed",
                    message: message.clone(),
                };
                self.tell(&job.owner, told);
                let permanent = error.is_permanent();
                Err(ActionError::Failed {
                    reason: reason::UNINSTALL_FAILED,
                    message,
                    permanent,
                })
            }
        }
    }
}
