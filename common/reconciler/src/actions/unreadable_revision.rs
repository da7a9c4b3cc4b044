//! Removes revisions that block a release: sets aside a Secret that cannot be decoded, and forgets earlier failed
//! attempts to install. Objects that these revisions list stay on the cluster.

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_helm::driver::{HelmError, Slot};
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, ReleaseError, Status};
use krypton_runtime::call::{call, if_unchanged};
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use kube::ResourceExt;
use kube::api::{Api, PostParams};

use super::{ActionError, ActionResult, ActionRunner, Job, JobResult, transient, unavailable};
use crate::plan::revisions;

/// The type of a Secret that was set aside. Helm looks only for its own type.
const SET_ASIDE_TYPE: &str = "mesh.openkcm.io/unreadable-release";

impl ActionRunner {
    /// Keeps a copy of the Secret under another name and deletes the Secret. It does so only if Helm cannot decode
    /// the Secret either. If no other revision lists the objects of a removed Tenant, the Secret stays.
    pub(super) async fn set_aside(
        &self,
        job: &Job,
        (secret, error): &(Secret, ReleaseError),
        slot: Option<Slot>,
        result: &mut JobResult,
    ) -> ActionResult {
        let Some(slot) = slot else {
            result.needs_slot = true;
            return Ok(());
        };
        let (problem, name) = (chain(error), secret.name_any());
        let is_removal = job.owner.is_being_removed() || job.desired.retire;
        let reason = match is_removal {
            true => reason::UNINSTALL_FAILED,
            false => reason::UPGRADE_FAILED,
        };
        let Some((_, revision)) = Revision::from_metadata(&secret.metadata) else {
            return Err(ActionError::permanent(reason, problem));
        };
        self.check_permit()?;
        let (target, revision) = (self.helm_target(job), revision.revision);
        let failed = |message: String| ActionError::from_revision(reason, message, revision);
        let helm = &self.tools.helm;
        let decoding = Box::pin(helm.can_decode(slot, &target, revision, &self.stop));
        match decoding.await {
            Ok(false) => {}
            // A newer Helm wrote it, or it exceeds Krypton's size limit. Krypton must not judge it.
            Ok(true) => return Err(failed(format!("{problem}, but Helm can decode it"))),
            Err(HelmError::Stopped) => return Err(ActionError::Conflict),
            Err(error) if error.is_local() => return Err(unavailable(&error)),
            Err(error) => return Err(transient(&error)),
        }
        if is_removal {
            self.relist(job, result).await?;
            let is_only_revision = result.listed().len() <= 1;
            if is_only_revision {
                return Err(failed(format!(
                    "{problem}, and no other revision lists its objects; delete the objects with annotation \
                     meta.helm.sh/release-name={}, then delete that Secret. To keep them, set annotation \
                     {}=true on the {}",
                    job.release.name,
                    krypton_types::names::ORPHAN_ANNOTATION,
                    job.owner.kind(),
                )));
            }
        }
        self.check_permit()?;
        self.save_copy(&job.release, secret, revision).await?;
        self.check_permit()?;
        let removing = self.delete_secret(&job.release, &secret.metadata);
        call("removing a revision", removing).await?;
        let message = format!("{problem}; replaced it with a copy, and kept its objects");
        let event = ObjectEvent::warning("ReleaseUnreadable", message);
        tracing::warn!(member = %self.member.name, secret = %name, error = %problem,
            "undecodable release was set aside");
        self.emit_event(&job.owner, event);
        self.relist(job, result).await
    }

    pub(super) async fn save_copy(
        &self,
        release: &ReleaseKey,
        secret: &Secret,
        revision: u32,
    ) -> ActionResult {
        let uid = secret.uid().unwrap_or_default();
        let copy = Secret {
            metadata: ObjectMeta {
                // The name stays the same after a crash, and differs for another Secret with the same name.
                name: Some(format!(
                    "unreadable.{}.v{revision}.{}",
                    release.name,
                    uid.get(..8).unwrap_or(&uid)
                )),
                ..ObjectMeta::default()
            },
            type_: Some(SET_ASIDE_TYPE.to_owned()),
            data: secret.data.clone(),
            ..Secret::default()
        };
        let params = PostParams::default();
        let api: Api<Secret> = Api::namespaced(self.member.helm_client.clone(), &release.namespace);
        let copying = api.create(&params, &copy);
        let copied = call("setting a release aside", copying).await;
        match copied.map_err(ActionError::from) {
            // The copy already exists.
            Ok(_) | Err(ActionError::Conflict) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Deletes the Secret of a revision if it has not changed.
    async fn delete_secret(&self, release: &ReleaseKey, meta: &ObjectMeta) -> kube::Result<()> {
        let params = if_unchanged(meta);
        // Helm created the Secret. Krypton's own rights include at most an update.
        let api: Api<Secret> = Api::namespaced(self.member.helm_client.clone(), &release.namespace);
        let name = meta.name.clone().unwrap_or_default();
        api.delete(&name, &params).await.map(drop)
    }

    /// Forgets repeated attempts before another upgrade. Helm would drop the oldest attempt for the newest one, and
    /// with it the only list of that attempt's objects.
    pub(super) async fn forget_repeated_attempts(&self, job: &Job) -> ActionResult {
        let repeated = revisions::repeated(&job.revisions);
        if repeated.is_empty() {
            return Ok(());
        }
        let mut failed = failed_revisions(self.list_revisions(job).await?.0);
        while let Some((newest, _)) = failed.first().cloned() {
            let is_repeat =
                |(revision, _): &FailedRevision| revision.fingerprint == newest.fingerprint;
            let (mut attempts, others): (Vec<_>, _) = failed.into_iter().partition(is_repeat);
            attempts.retain(|(revision, _)| repeated.contains(&revision.revision));
            self.forget_all_but(&job.release, newest.revision, attempts)
                .await?;
            failed = others;
        }
        Ok(())
    }

    /// Forgets older attempts before another installation, because Helm limits the history only for upgrades.
    pub(super) async fn forget_older_attempts(&self, job: &Job) -> ActionResult {
        let failed = failed_revisions(self.list_revisions(job).await?.0);
        let Some((newest, _)) = failed.first().cloned() else {
            return Ok(());
        };
        let handling = self.member.policy.handling(&job.desired.handling);
        let kept_count = usize::from(handling.history_max) - 1;
        let older = failed.into_iter().skip(kept_count).collect();
        self.forget_all_but(&job.release, newest.revision, older)
            .await
    }

    /// Forgets failed attempts, newest first. It keeps an attempt that declares an object which `kept_revision` does
    /// not declare.
    async fn forget_all_but(
        &self,
        release: &ReleaseKey,
        kept_revision: u32,
        attempts: Vec<FailedRevision>,
    ) -> ActionResult {
        if attempts.is_empty() {
            return Ok(());
        }
        let kept = self.revision_secret(release, kept_revision).await?;
        let kept = kept.and_then(|kept| releases::objects(&kept).ok());
        let mut candidates = Vec::new();
        for (attempt, meta) in attempts {
            let attempt = self.revision_secret(release, attempt.revision).await?;
            let attempt = attempt.and_then(|attempt| releases::objects(&attempt).ok());
            let pair = attempt.as_ref().zip(kept.as_ref());
            let pair = pair.filter(|(attempt, _)| attempt.unreadable == 0);
            let is_only_declaration = pair.and_then(|(attempt, kept)| {
                let leftovers = releases::leftovers(attempt, kept, &release.namespace)?;
                Some(!leftovers.is_empty())
            });
            candidates.push((meta, is_only_declaration));
        }
        for (meta, is_only_declaration) in revisions::forgettable(candidates) {
            if is_only_declaration {
                tracing::warn!(member = %self.member.name, secret = meta.name.as_deref(),
                    "too many failed attempts; forgetting objects of the oldest");
            }
            self.forget(release, &meta).await?;
        }
        Ok(())
    }

    pub(crate) async fn forget(&self, release: &ReleaseKey, attempt: &ObjectMeta) -> ActionResult {
        self.check_permit()?;
        let removing = self.delete_secret(release, attempt);
        Ok(call("removing a revision", removing).await?)
    }
}

/// A failed revision and its Secret.
type FailedRevision = (Revision, ObjectMeta);

/// The failed revisions, newest first.
fn failed_revisions(metas: Vec<ObjectMeta>) -> Vec<FailedRevision> {
    let read = |meta: ObjectMeta| Some((Revision::from_metadata(&meta)?.1, meta));
    let mut failed: Vec<FailedRevision> = metas.into_iter().filter_map(read).collect();
    failed.retain(|(revision, _)| revision.status == Status::Failed);
    failed.sort_by_key(|(revision, _)| std::cmp::Reverse(revision.revision));
    failed
}
