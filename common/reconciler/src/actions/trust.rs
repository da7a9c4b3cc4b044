//! Decides whether Krypton may act on a stored release. The users of a workspace can write to its Secrets, so a
//! revision counts only if `krypton-system` has a record of its digest.
//!
//! Helm reads the Secret again after the check. The last request before Helm starts lists the metadata of all
//! revisions. A write after that request takes effect.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::{RecordComparison, ReleaseRecord};
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, ObjectId, Status, UNREADABLE_OBJECT};
use krypton_runtime::call::call;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use kube::api::{Api, DynamicObject};
use kube::core::ApiResource;
use kube::discovery::Scope;

use super::objects::{belongs_to, discover_kind};
use super::{ActionError, ActionResult, ActionRunner, Job};
use crate::release_record;

const MAX_RECORD_ATTEMPTS: u32 = 3;
const RECORD_RETRY_DELAY: Duration = Duration::from_millis(500);
/// Limit for the objects outside the workspace that Krypton checks for one revision, one request each.
const MAX_CHECKED: usize = 200;

/// Results of checking the revisions of one release. Each object and kind is read once.
#[derive(Default)]
pub(super) struct OwnedObjects {
    kinds: BTreeMap<(String, String), Option<(ApiResource, Scope)>>,
    objects: BTreeSet<ObjectId>,
}

impl ActionRunner {
    pub(crate) async fn release_record(&self, release: &ReleaseKey) -> ActionResult<ReleaseRecord> {
        let reading = release_record::read(&self.member.client, release);
        Ok(call("reading the record of the release", reading).await?)
    }

    /// Records the digest of a revision that Helm has just deployed. If that fails, the revision counts as
    /// unrecorded: it keeps running, but Krypton does not heal from it.
    pub(super) async fn record_digest(
        &self,
        job: &Job,
        revision: u32,
        digest: &str,
        mut record: ReleaseRecord,
    ) {
        for attempt in 1..=MAX_RECORD_ATTEMPTS {
            let is_kept = |number: &u32| {
                job.revisions
                    .iter()
                    .any(|revision| revision.revision == *number)
            };
            record
                .digests
                .retain(|number, _| is_kept(number) && *number < revision);
            record.digests.insert(revision, digest.to_owned());
            let writing = release_record::write(&record, &self.member.client, &job.release);
            let Err(error) = call("writing the record of the release", writing).await else {
                return;
            };
            tracing::warn!(member = %self.member.name, revision, attempt, problem = %chain(&error),
                "failed to record the release's digest");
            tokio::time::sleep(RECORD_RETRY_DELAY).await;
            if let Ok(current) = self.release_record(&job.release).await {
                record = current;
            }
        }
    }

    /// Deletes the record of a release without revisions.
    pub(super) async fn delete_record(&self, job: &Job) -> ActionResult {
        if job.newest.is_some() {
            return Ok(());
        }
        let record = self.release_record(&job.release).await?;
        self.check_permit()?;
        let deleting = release_record::delete(&record, &self.member.client);
        Ok(call("deleting the record of the release", deleting).await?)
    }

    /// Forgets the digests of revisions after the newest one. They were deleted, and Helm uses their numbers again.
    pub(super) async fn forget_later_digests(
        &self,
        job: &Job,
        record: &mut ReleaseRecord,
    ) -> ActionResult {
        let newest = job.newest.as_ref().map_or(0, |newest| newest.revision);
        if record.digests.keys().all(|number| *number <= newest) {
            return Ok(());
        }
        record.digests.retain(|number, _| *number <= newest);
        self.check_permit()?;
        let writing = release_record::write(record, &self.member.client, &job.release);
        call("writing the record of the release", writing).await?;
        *record = self.release_record(&job.release).await?;
        Ok(())
    }

    /// Returns an error unless Helm may compare with this revision. Upgrades and rollbacks delete the objects of its
    /// manifest that the next revision does not have.
    pub(super) async fn check_compared(
        &self,
        job: &Job,
        record: &ReleaseRecord,
        (revision, secret): (u32, &Secret),
    ) -> ActionResult {
        if check_unchanged(&job.release, record, secret)? {
            return Ok(());
        }
        let mut owned = OwnedObjects::default();
        self.check_objects(job, revision, secret, &mut owned).await
    }

    /// Returns an error if the stored manifest lists an object outside the workspace that does not belong to this
    /// release. Objects in the workspace need no check, because its users can delete them anyway.
    pub(super) async fn check_objects(
        &self,
        job: &Job,
        revision: u32,
        secret: &Secret,
        owned: &mut OwnedObjects,
    ) -> ActionResult {
        let release = &job.release;
        let objects = releases::strict_objects(secret)
            .map_err(|error| ActionError::Transient(chain(&error)))?;
        let Some(objects) = objects else {
            return Err(foreign_object(release, revision, UNREADABLE_OBJECT));
        };
        let client = &self.member.helm_client;
        let OwnedObjects {
            kinds,
            objects: known,
        } = owned;
        let mut checked = 0;
        for object in objects {
            if known.contains(&object) {
                continue;
            }
            let kind_name = (object.api_version.clone(), object.kind.clone());
            if !kinds.contains_key(&kind_name) {
                let discovered = discover_kind(client, &object).await?;
                kinds.insert(kind_name.clone(), discovered);
            }
            let Some(Some((resource, scope))) = kinds.get(&kind_name) else {
                continue;
            };
            let api: Api<DynamicObject> = match (scope, object.namespace.as_deref()) {
                (Scope::Namespaced, None) => continue,
                (Scope::Namespaced, Some(namespace)) if namespace == release.namespace => continue,
                (Scope::Namespaced, Some(other)) => {
                    Api::namespaced_with(client.clone(), other, resource)
                }
                (Scope::Cluster, _) => Api::all_with(client.clone(), resource),
            };
            checked += 1;
            if checked > MAX_CHECKED {
                return Err(foreign_object(
                    release,
                    revision,
                    "too many objects of other namespaces",
                ));
            }
            let reading = api.get_metadata_opt(&object.name);
            let existing = call("reading an object of the release", reading).await?;
            if let Some(existing) = existing
                && !belongs_to(&existing.metadata, release)
            {
                let object_name = format!("{} {}", object.kind, object.name);
                return Err(foreign_object(release, revision, &object_name));
            }
            known.insert(object);
        }
        Ok(())
    }
}

/// Returns the revision that Helm compares with in an upgrade.
pub(super) fn compared_revision(job: &Job) -> Option<u32> {
    let is_deployed = |revision: &&Revision| revision.status == Status::Deployed;
    let compared = job.revisions.iter().rfind(is_deployed);
    compared
        .or(job.newest.as_ref())
        .map(|revision| revision.revision)
}

pub(super) fn verdict(
    record: &ReleaseRecord,
    secret: &Secret,
) -> ActionResult<(u32, RecordComparison)> {
    let (_, revision) = Revision::from_metadata(&secret.metadata).ok_or(ActionError::Conflict)?;
    // The function that decodes the Secret handles a failure to decode it.
    let digest = releases::digest(secret).map_err(|_| ActionError::Conflict)?;
    let verdict = match record.compare(revision.revision, &digest) {
        // An attempt is never recorded: the digest is that of a deleted revision with the same number.
        RecordComparison::Tampered
            if revision.status == Status::Failed || revision.status.is_pending() =>
        {
            RecordComparison::Unrecorded
        }
        verdict => verdict,
    };
    Ok((revision.revision, verdict))
}

/// Returns whether the Secret has a record. Fails if the Secret is not as Krypton deployed it.
pub(super) fn check_unchanged(
    release: &ReleaseKey,
    record: &ReleaseRecord,
    secret: &Secret,
) -> ActionResult<bool> {
    match verdict(record, secret)? {
        (_, RecordComparison::Recorded) => Ok(true),
        (_, RecordComparison::Unrecorded) => Ok(false),
        (revision, RecordComparison::Tampered) => Err(tampered(release, revision)),
    }
}

/// Returns the recorded digest if Helm may roll back to this revision.
pub(super) fn check_rollback(
    release: &ReleaseKey,
    record: &ReleaseRecord,
    secret: &Secret,
) -> ActionResult<String> {
    match verdict(record, secret)? {
        (revision, RecordComparison::Recorded) => record
            .digests
            .get(&revision)
            .cloned()
            .ok_or(ActionError::Conflict),
        (revision, RecordComparison::Tampered) => Err(tampered(release, revision)),
        (revision, RecordComparison::Unrecorded) => {
            let message = format!(
                "Krypton has not deployed revision {revision} of release {}, so it does not roll back to it",
                release.name
            );
            Err(ActionError::permanent(reason::ROLLBACK_FAILED, message))
        }
    }
}

pub(super) fn tampered(release: &ReleaseKey, revision: u32) -> ActionError {
    tampered_with(release, revision, "has changed since Krypton deployed it")
}

fn foreign_object(release: &ReleaseKey, revision: u32, object: &str) -> ActionError {
    let problem = format!(
        "was not deployed by Krypton and lists {object}, which does not belong to the release"
    );
    tampered_with(release, revision, &problem)
}

fn tampered_with(release: &ReleaseKey, revision: u32, problem: &str) -> ActionError {
    let message = format!(
        "revision {revision} of release {} {problem}; to render the chart again, delete Secret {}/{}, or accept the \
         revision with kubectl krypton accept-release",
        release.name,
        release.namespace,
        releases::secret_name(&release.name, revision),
    );
    ActionError::permanent(reason::RELEASE_TAMPERED, message)
}
