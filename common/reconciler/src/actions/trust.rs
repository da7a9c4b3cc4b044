//! Decides whether Krypton may act on a stored release. The users of a workspace can write to its Secrets, so a
//! revision counts only if `krypton-system` has a record of its digest.
//!
//! Helm reads the Secret again after the check. The last request before Helm starts lists the metadata of all
//! revisions. A write after that request takes effect.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::{ReleaseRecord, Verdict};
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, ObjectId, Status, UNCLEAR};
use krypton_runtime::call::call;
use krypton_runtime::events::ObjectEvent;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::{Api, DynamicObject};
use kube::core::{ApiResource, GroupVersionKind};
use kube::discovery::{Scope, pinned_kind};

use super::leftovers::bears_marks;
use super::stored::Stored;
use super::{ActionError, ActionRunner, Job, JobResult, transient};
use crate::release_record;

const RECORD_TRIES: u32 = 3;
const BETWEEN_TRIES: Duration = Duration::from_millis(500);
/// Limit for the objects outside the workspace that Krypton checks for one revision, one request each.
const CHECKED_MOST: usize = 200;

/// Results of checking the revisions of one release. Each object and kind is read once.
#[derive(Default)]
pub(super) struct Owned {
    kinds: BTreeMap<(String, String), Option<(ApiResource, Scope)>>,
    objects: BTreeSet<ObjectId>,
}

impl ActionRunner {
    pub(crate) async fn release_record(
        &self,
        release: &ReleaseKey,
    ) -> Result<ReleaseRecord, ActionError> {
        let reading = release_record::read(&self.member.client, release);
        Ok(call("reading the record of the release", reading).await?)
    }

    /// Records the digest of a revision that Helm has just deployed. If that fails, the revision counts as
    /// unrecorded: it keeps running, but Krypton does not heal from it.
    pub(super) async fn put_on_record(
        &self,
        job: &Job,
        revision: u32,
        digest: &str,
        known: ReleaseRecord,
    ) {
        let mut record = known;
        for attempt in 1..=RECORD_TRIES {
            let kept = |number: &u32| job.revisions.iter().any(|it| it.revision == *number);
            record
                .digests
                .retain(|number, _| kept(number) && *number < revision);
            record.digests.insert(revision, digest.to_owned());
            let writing = release_record::write(&record, &self.member.client, &job.release);
            let Err(error) = call("writing the record of the release", writing).await else {
                return;
            };
            tracing::warn!(member = %self.member.name, revision, attempt, problem = %chain(&error),
                "failed to record the release's digest");
            tokio::time::sleep(BETWEEN_TRIES).await;
            if let Ok(newer) = self.release_record(&job.release).await {
                record = newer;
            }
        }
    }

    /// Deletes the record of a release without revisions.
    pub(super) async fn delete_record(&self, job: &Job) -> Result<(), ActionError> {
        if job.newest.is_some() {
            return Ok(());
        }
        let record = self.release_record(&job.release).await?;
        let deleting = release_record::delete(&record, &self.member.client);
        Ok(call("deleting the record of the release", deleting).await?)
    }

    /// Returns an error unless Helm may compare with this revision. Upgrades and rollbacks delete the objects of its
    /// manifest that the next revision does not have.
    pub(super) async fn check_compared(
        &self,
        job: &Job,
        record: &ReleaseRecord,
        secret: &Secret,
    ) -> Result<(), ActionError> {
        match verdict(record, secret)? {
            (_, Verdict::Recorded) => Ok(()),
            (revision, Verdict::Tampered) => Err(tampered(&job.release, revision)),
            (revision, Verdict::Unrecorded) => {
                let mut owned = Owned::default();
                self.check_objects(job, revision, secret, &mut owned).await
            }
        }
    }

    /// Whether `helm uninstall` runs the stored hooks. Without delete hooks it must not, because a user of the
    /// workspace could add one after the check.
    pub(super) async fn check_uninstall(
        &self,
        job: &Job,
        stored: &Stored,
        done: &mut JobResult,
    ) -> Result<bool, ActionError> {
        let Some(newest) = &job.newest else {
            return Ok(false);
        };
        let record = &stored.record;
        let secret = stored
            .revision(newest.revision)
            .ok_or(ActionError::Conflict)?;
        match verdict(record, secret)? {
            (_, Verdict::Recorded) => {
                return releases::has_delete_hooks(secret).map_err(|error| transient(&error));
            }
            (revision, Verdict::Tampered) => return Err(tampered(&job.release, revision)),
            (_, Verdict::Unrecorded) => {}
        }
        self.fall_back(job, record, done).await?;
        let mut owned = Owned::default();
        self.check_objects(job, newest.revision, secret, &mut owned)
            .await?;
        let hooks = releases::has_delete_hooks(secret).unwrap_or(true);
        if hooks {
            let message = format!(
                "uninstalling release {} without its delete hooks: Krypton has not deployed revision {}",
                job.release.name, newest.revision
            );
            let told = ObjectEvent {
                warning: true,
                reason: "HooksSkipped",
                message,
            };
            self.tell(&job.owner, told);
        }
        Ok(false)
    }

    /// Removes failed attempts on top of a recorded revision, together with their leftovers. Helm then uninstalls the
    /// recorded revision and runs its hooks.
    async fn fall_back(
        &self,
        job: &Job,
        record: &ReleaseRecord,
        done: &mut JobResult,
    ) -> Result<(), ActionError> {
        let on_record = |it: &&Revision| record.digests.contains_key(&it.revision);
        let Some(good) = job.revisions.iter().rfind(on_record) else {
            return Ok(());
        };
        let newer = job.revisions.iter().rev();
        let newer: Vec<&Revision> = newer.take_while(|it| it.revision > good.revision).collect();
        if newer.is_empty() || newer.iter().any(|it| it.status != Status::Failed) {
            return Ok(());
        }
        let kept = self.revision_secret(&job.release, good.revision).await?;
        let kept = kept.ok_or(ActionError::Conflict)?;
        if verdict(record, &kept)?.1 != Verdict::Recorded {
            return Ok(());
        }
        for attempt in newer {
            let failed = self.revision_secret(&job.release, attempt.revision).await?;
            let failed = failed.ok_or(ActionError::Conflict)?;
            self.still_permitted()?;
            self.sweep_attempt(job, &failed, &kept).await?;
            self.forget(&job.release, &failed.metadata).await?;
        }
        self.relist(job, done).await?;
        Err(ActionError::Conflict)
    }

    /// Returns an error if the stored manifest lists an object outside the workspace that does not belong to this
    /// release. Objects in the workspace need no check, because its users can delete them anyway.
    pub(super) async fn check_objects(
        &self,
        job: &Job,
        revision: u32,
        secret: &Secret,
        owned: &mut Owned,
    ) -> Result<(), ActionError> {
        let release = &job.release;
        let objects = releases::strict_objects(secret)
            .map_err(|error| ActionError::Transient(chain(&error)))?;
        let Some(objects) = objects else {
            return Err(claims(release, revision, UNCLEAR));
        };
        let client = &self.member.helm_client;
        let Owned {
            kinds,
            objects: known,
        } = owned;
        let mut checked = 0;
        for object in objects {
            if known.contains(&object) {
                continue;
            }
            let name = (object.api_version.clone(), object.kind.clone());
            if !kinds.contains_key(&name) {
                let found = kind(client, &object).await?;
                kinds.insert(name.clone(), found);
            }
            let Some(Some((resource, scope))) = kinds.get(&name) else {
                continue;
            };
            let api: Api<DynamicObject> = match (scope, object.namespace.as_deref()) {
                (Scope::Namespaced, None) => continue,
                (Scope::Namespaced, Some(own)) if own == release.namespace => continue,
                (Scope::Namespaced, Some(other)) => {
                    Api::namespaced_with(client.clone(), other, resource)
                }
                (Scope::Cluster, _) => Api::all_with(client.clone(), resource),
            };
            checked += 1;
            if checked > CHECKED_MOST {
                return Err(claims(
                    release,
                    revision,
                    "too many objects of other namespaces",
                ));
            }
            let reading = api.get_metadata_opt(&object.name);
            let found = call("reading an object of the release", reading).await?;
            if let Some(found) = found
                && !bears_marks(&found.metadata, release)
            {
                let named = format!("{} {}", object.kind, object.name);
                return Err(claims(release, revision, &named));
            }
            known.insert(object);
        }
        Ok(())
    }
}

/// Returns the kind of an object and its scope; `None` if the cluster has no such kind.
pub(super) async fn kind(
    client: &Client,
    object: &ObjectId,
) -> Result<Option<(ApiResource, Scope)>, ActionError> {
    let (group, version) = object
        .api_version
        .split_once('/')
        .unwrap_or(("", &object.api_version));
    let kind = GroupVersionKind::gvk(group, version, &object.kind);
    let discovering = async {
        match pinned_kind(client, &kind).await {
            Ok((resource, about)) => Ok(Some((resource, about.scope))),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            Err(kube::Error::Discovery(_)) => Ok(None),
            Err(error) => Err(error),
        }
    };
    let found = call("discovering kinds", discovering).await;
    found.map_err(|error| transient(&error))
}

/// Returns the revision that Helm compares with in an upgrade.
pub(super) fn compared(job: &Job) -> Option<u32> {
    let deployed = |it: &&Revision| it.status == Status::Deployed;
    let compared = job.revisions.iter().rfind(deployed);
    compared.or(job.newest.as_ref()).map(|it| it.revision)
}

pub(super) fn verdict(
    record: &ReleaseRecord,
    secret: &Secret,
) -> Result<(u32, Verdict), ActionError> {
    let (_, revision) = Revision::of(&secret.metadata).ok_or(ActionError::Conflict)?;
    // The function that decodes the Secret handles a failure to decode it.
    let digest = releases::digest(secret).map_err(|_| ActionError::Conflict)?;
    let verdict = record.verdict(revision.revision, &digest);
    Ok((revision.revision, verdict))
}

/// Returns whether the Secret has a record. Fails if the Secret is not as Krypton deployed it.
pub(super) fn check_unchanged(
    release: &ReleaseKey,
    record: &ReleaseRecord,
    secret: &Secret,
) -> Result<bool, ActionError> {
    match verdict(record, secret)? {
        (_, Verdict::Recorded) => Ok(true),
        (_, Verdict::Unrecorded) => Ok(false),
        (revision, Verdict::Tampered) => Err(tampered(release, revision)),
    }
}

/// Returns the recorded digest if Helm may roll back to this revision.
pub(super) fn check_rollback(
    release: &ReleaseKey,
    record: &ReleaseRecord,
    secret: &Secret,
) -> Result<String, ActionError> {
    match verdict(record, secret)? {
        (revision, Verdict::Recorded) => record
            .digests
            .get(&revision)
            .cloned()
            .ok_or(ActionError::Conflict),
        (revision, Verdict::Tampered) => Err(tampered(release, revision)),
        (revision, Verdict::Unrecorded) => Err(ActionError::Failed {
            reason: reason::ROLLBACK_FAILED,
            message: format!(
                "Krypton has not deployed revision {revision} of release {}, so it does not roll back to it",
                release.name
            ),
            permanent: true,
        }),
    }
}

pub(super) fn tampered(release: &ReleaseKey, revision: u32) -> ActionError {
    refused(
        release,
        revision,
        "has changed since Krypton deployed it".to_owned(),
    )
}

fn claims(release: &ReleaseKey, revision: u32, object: &str) -> ActionError {
    let what = format!(
        "was not deployed by Krypton and lists {object}, which does not belong to the release"
    );
    refused(release, revision, what)
}

fn refused(release: &ReleaseKey, revision: u32, what: String) -> ActionError {
    let message = format!(
        "revision {revision} of release {} {what}; to render the chart again, delete Secret {}/{}, or accept the \
         revision with kubectl krypton accept-release",
        release.name,
        release.namespace,
        releases::secret_name(&release.name, revision),
    );
    ActionError::Failed {
        reason: reason::RELEASE_TAMPERED,
        message,
        permanent: true,
    }
}
