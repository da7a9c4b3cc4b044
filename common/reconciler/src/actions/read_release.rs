//! Reads the Secrets of a release.

use krypton_helm::releases;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::call::call;

use super::super::helm_queue::HelmReservation;
use super::{
    ActionError, ActionResult, ActionRunner, Job, JobResult, ReleaseUpdate, transient, trust,
};
use crate::index::parse_version;
use crate::plan;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;

impl ActionRunner {
    pub(super) async fn read_release(
        &self,
        job: &Job,
        revision: u32,
        reservation: Option<HelmReservation>,
        result: &mut JobResult,
    ) -> ActionResult {
        let Some(secret) = self.revision_secret(&job.release, revision).await? else {
            return self.relist_without(job, revision, result).await;
        };
        let release_details = match releases::decode(&secret) {
            Ok(release_details) => release_details,
            // Without a permit, or while paused, reading must not lead to a write.
            Err(error)
                if self.check_permit().is_err()
                    || plan::pause_reason(&job.owner, &job.desired).is_some() =>
            {
                return Err(transient(&error));
            }
            Err(error) => {
                let slot = reservation.map(|reservation| reservation.slot);
                return self.set_aside(job, &(secret, error), slot, result).await;
            }
        };
        let record = self.release_record(&job.release).await?;
        let recorded = trust::check_unchanged(&job.release, &record, &secret)?;
        result.unrecorded = (!recorded).then_some((revision, job.permitted));
        result.release_details = Some(release_details);
        result.release_update = Some(ReleaseUpdate::One(Box::new(secret.metadata)));
        Ok(())
    }

    pub(super) async fn revision_secret(
        &self,
        release: &ReleaseKey,
        revision: u32,
    ) -> ActionResult<Option<Secret>> {
        let name = releases::secret_name(&release.name, revision);
        Ok(call("reading the release", self.secrets(release).get_opt(&name)).await?)
    }

    /// Relists after a read has not found a revision. Fails if the API server still lists it: another attempt must wait.
    pub(super) async fn relist_without(
        &self,
        job: &Job,
        revision: u32,
        result: &mut JobResult,
    ) -> ActionResult {
        self.relist(job, result).await?;
        let name = releases::secret_name(&job.release.name, revision);
        let is_missing_revision = |meta: &ObjectMeta| meta.name.as_ref() == Some(&name);
        if result.listed().iter().any(is_missing_revision) {
            let message = format!("the API server lists Secret {name} but does not find it");
            return Err(ActionError::Transient(message));
        }
        Ok(())
    }

    /// Reads the release's Secrets afresh, without their content.
    pub(super) async fn relist(&self, job: &Job, result: &mut JobResult) -> ActionResult {
        let (metas, version) = self.list_revisions(job).await?;
        result.release_update = Some(ReleaseUpdate::All {
            metas,
            version,
            known_before: job.known_version,
        });
        Ok(())
    }

    /// Returns the metadata of the release's Secrets, and the version of their list.
    pub(super) async fn list_revisions(&self, job: &Job) -> ActionResult<(Vec<ObjectMeta>, u64)> {
        let labels = releases::secrets_selector(&job.release.name);
        let helm_type = format!("type={}", releases::SECRET_TYPE);
        let params = ListParams::default().labels(&labels).fields(&helm_type);
        let api = self.secrets(&job.release);
        let listing = api.list_metadata(&params);
        let list = call("listing the release's revisions", listing).await?;
        let version = parse_version(list.metadata.resource_version.as_deref());
        // Like the watch: a Secret may bear the labels without being a revision.
        let is_revision = |meta: &ObjectMeta| {
            Revision::from_metadata(meta).is_some_and(|(release, _)| release == job.release)
        };
        let metas = list.items.into_iter().map(|item| item.metadata);
        Ok((metas.filter(is_revision).collect(), version))
    }
}
