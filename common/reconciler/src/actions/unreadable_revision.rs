//! Removes revisions that block a release: sets aside a Secret that cannot be decoded, and forgets earlier failed
//! attempts to install. Objects that these revisions list stay on the cluster.

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_helm::driver::{HelmError, Look};
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, ReleaseError, Status};
use krypton_runtime::call::call;
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};

use super::{ActionError, ActionRunner, Job, JobResult, ReleaseNews, transient, unavailable};
use crate::helm_queue::Ready;
use crate::plan::revisions;

/// The type of a Secret that was set aside. Helm looks only for its own type.
const SET_ASIDE_TYPE: &str = "mesh.openkcm.io/unreadable-release";

impl ActionRunner {
    /// Keeps a copy of the Secret under another name and deletes the Secret. It does so only if Helm cannot decode
    /// the Secret either. If no other revision lists the objects of a removed Tenant, the Secret stays.
    pub(super) async fn set_aside(
        &self,
        job: &Job,
        secret: &Secret,
        error: &ReleaseError,
        ready: Option<Ready>,
        done: &mut JobResult,
    ) -> Result<(), ActionError> {
        let Some(Ready { slot, .. }) = ready else {
            done.needs_slot = true;
            return Ok(());
        };
        let (why, name) = (chain(error), secret.name_any());
        let going = job.owner.is_going() || job.desired.retire;
        let failed = |message: String| ActionError::Failed {
            reason: if going {
                reason::UNINSTALL_FAILED
            } else {
                reason::UPGRADE_FAILED
            },
            message,
            permanent: true,
        };
        let Some((_, revision)) = Revision::of(&secret.metadata) else {
            return Err(failed(why));
        };
        self.still_permitted()?;
        let look = Look {
            kubeconfig: self.member.kubeconfig.clone(),
            release: job.release.name.clone(),
            namespace: job.release.namespace.clone(),
            revision: revision.revision,
            cache_key: self.member.name.clone(),
        };
        let looked = Box::pin(self.tools.helm.can_decode(slot, &look, &self.stop));
        match looked.await {
            Ok(false) => {}
            // A newer Helm wrote it, or it exceeds Krypton's size limit. Krypton must not judge it.
            Ok(true) => return Err(failed(format!("{why}, but Helm can decode it"))),
            Err(HelmError::Stopped) => return Err(ActionError::Conflict),
            Err(error) if error.is_local() => return Err(unavailable(&error)),
            Err(error) => return Err(transient(&error)),
        }
        if going {
            self.relist(job, done).await?;
            let alone = !matches!(&done.release,
                Some(ReleaseNews::All { metas, .. }) if metas.len() > 1);
            if alone {
                return Err(failed(format!(
                    "{why}, and no other revision lists its objects; delete the objects with annotation \
                     meta.helm.sh/release-name={}, then delete that Secret. To keep them, set annotation \
                     {}=true on the {}",
                    job.release.name,
                    krypton_types::names::ORPHAN_ANNOTATION,
                    job.owner.kind(),
                )));
            }
        }
        self.still_permitted()?;
        self.keep_copy(&job.release, secret, revision.revision)
            .await?;
        self.still_permitted()?;
        let removing = self.remove(&job.release, &secret.metadata);
        call("removing a revision", removing).await?;
        let message = format!("{why}. It was set aside, and what it installed stays");
        let told = ObjectEvent {
            warning: true,
            reason: "ReleaseUnreadable",
            message,
        };
        tracing::warn!(member = %self.member.name, secret = %name, error = %why,
            "undecodable release was set aside");
        self.tell(&job.owner, told);
        self.relist(job, done).await
    }

    pub(super) async fn keep_copy(
        &self,
        release: &ReleaseKey,
        secret: &Secret,
        revision: u32,
    ) -> Result<(), ActionError> {
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
    async fn remove(&self, release: &ReleaseKey, of: &ObjectMeta) -> kube::Result<()> {
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: of.uid.clone(),
                resource_version: of.resource_version.clone(),
            }),
            ..DeleteParams::default()
        };
        // Helm created the Secret. Krypton's own rights include at most an update.
        let api: Api<Secret> = Api::namespaced(self.member.helm_client.clone(), &release.namespace);
        let name = of.name.clone().unwrap_or_default();
        api.delete(&name, &params).await.map(drop)
    }

    /// Forgets repeated attempts before another upgrade. Helm would drop the oldest attempt for the newest one, and
    /// with it the only list of that attempt's objects.
    pub(super) async fn forget_repeated_attempts(
        &self,
        job: &Job,
        done: &mut JobResult,
    ) -> Result<(), ActionError> {
        let repeated = revisions::repeated(&job.revisions);
        if repeated.is_empty() {
            return Ok(());
        }
        self.relist(job, done).await?;
        let Some(ReleaseNews::All { metas, .. }) = done.release.take() else {
            return Ok(());
        };
        let mut failed = failed(metas);
        while let Some((newest, _)) = failed.first().cloned() {
            let same = |it: &Failed| it.0.fingerprint == newest.fingerprint;
            let (mut attempts, others): (Vec<_>, _) = failed.into_iter().partition(same);
            attempts.retain(|(it, _)| repeated.contains(&it.revision));
            self.forget_all_but(&job.release, newest.revision, attempts)
                .await?;
            failed = others;
        }
        Ok(())
    }

    /// Forgets older attempts before another installation, because Helm limits the history only for upgrades.
    pub(super) async fn forget_older_attempts(
        &self,
        job: &Job,
        done: &mut JobResult,
    ) -> Result<(), ActionError> {
        self.relist(job, done).await?;
        // The list becomes outdated below, so don't return it.
        let Some(ReleaseNews::All { metas, .. }) = done.release.take() else {
            return Ok(());
        };
        let failed = failed(metas);
        let Some((newest, _)) = failed.first().cloned() else {
            return Ok(());
        };
        let kept_beside = usize::from(self.member.policy.history_max) - 1;
        let beyond = failed.into_iter().skip(kept_beside).collect();
        self.forget_all_but(&job.release, newest.revision, beyond)
            .await
    }

    /// Forgets failed attempts, newest first. It keeps an attempt that declares an object which `kept` does not
    /// declare.
    async fn forget_all_but(
        &self,
        release: &ReleaseKey,
        kept: u32,
        attempts: Vec<Failed>,
    ) -> Result<(), ActionError> {
        if attempts.is_empty() {
            return Ok(());
        }
        let kept = self.revision_secret(release, kept).await?;
        let kept = kept.and_then(|kept| releases::objects(&kept).ok());
        let mut beyond = Vec::new();
        for (former, meta) in attempts {
            let former = self.revision_secret(release, former.revision).await?;
            let former = former.and_then(|former| releases::objects(&former).ok());
            let pair = former.as_ref().zip(kept.as_ref());
            let pair = pair.filter(|(former, _)| former.unread == 0);
            let alone = pair.and_then(|(former, kept)| {
                let left = releases::left_over(former, kept, &release.namespace)?;
                Some(!left.is_empty())
            });
            beyond.push((meta, alone));
        }
        for (meta, alone) in revisions::forgettable(beyond) {
            if alone {
                tracing::warn!(member = %self.member.name, secret = meta.name.as_deref(),
                    "too many failed attempts; forgetting objects of the oldest");
            }
            self.forget(release, &meta).await?;
        }
        Ok(())
    }

    pub(crate) async fn forget(
        &self,
        release: &ReleaseKey,
        attempt: &ObjectMeta,
    ) -> Result<(), ActionError> {
        self.still_permitted()?;
        let removing = self.remove(release, attempt);
        Ok(call("removing a revision", removing).await?)
    }
}

/// A failed revision and its Secret.
type Failed = (Revision, ObjectMeta);

/// The failed revisions, newest first.
pub(super) fn failed(metas: Vec<ObjectMeta>) -> Vec<Failed> {
    let read = |meta: ObjectMeta| Some((Revision::of(&meta)?.1, meta));
    let mut failed: Vec<Failed> = metas.into_iter().filter_map(read).collect();
    failed.retain(|(revision, _)| revision.status == Status::Failed);
    failed.sort_by_key(|(revision, _)| std::cmp::Reverse(revision.revision));
    failed
}
