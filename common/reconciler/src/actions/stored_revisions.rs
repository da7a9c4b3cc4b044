//! Checks before each Helm run that Helm and Krypton read the stored revisions in the same way.
//!
//! Helm finds revisions by two labels, and ignores type and name of the Secret. It reads number and status from the
//! payload; Krypton's watch reads them from labels. A user of the workspace can create Secrets in which they differ.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::{RecordComparison, ReleaseRecord};
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, DATA_KEY, ReleaseError, SECRET_TYPE, Status};
use krypton_runtime::bound::{self, ListSize};
use krypton_runtime::call::call;
use krypton_runtime::{chance, off_thread};
use krypton_types::conditions::reason;
use kube::ResourceExt;
use kube::api::ListParams;

use super::trust::{OwnedObjects, check_unchanged, verdict};
use super::{ActionError, ActionResult, ActionRunner, Job, JobResult};

/// A revision has at most 1.4 MB in a response, which may have 16 MiB. Only one page is in memory.
const PAGE_SIZE: u32 = 10;
/// The Go operator kept all revisions.
const MAX_REVISIONS: usize = 2000;

/// Limit for reading and checking all revisions. A revision may unpack to 64 MiB.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
const METADATA_PAGE_SIZE: u32 = 500;
/// Helm reads the Secret some 0.2 s after the check.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The revisions of a release that Helm would find, and their record.
pub(super) struct StoredRevisions {
    /// The revisions that the caller needs, with content.
    contents: BTreeMap<u32, Secret>,
    /// All Secrets by name, revisions or not.
    all: BTreeMap<String, ObjectMeta>,
    pub(super) record: ReleaseRecord,
    /// Whether the plan is based on other revisions.
    is_stale: bool,
}

/// The revisions, or the one that must be set aside first.
pub(super) type ReadRevisions = Result<StoredRevisions, Box<(Secret, ReleaseError)>>;

/// How to handle a revision that has no record and lists another owner's object. Helm must not use it when it skips
/// the checked revision.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum ForeignRevisions {
    Keep,
    Remove,
}

impl StoredRevisions {
    pub(super) fn revision(&self, number: u32) -> Option<&Secret> {
        self.contents.get(&number)
    }
}

impl ActionRunner {
    /// Reads all revisions that Helm would find, and keeps the content of those in `needed`. Fails if Helm could read
    /// one differently, or if the plan does not know one.
    pub(super) async fn read_checked(
        &self,
        job: &Job,
        needed: &[u32],
        foreign: ForeignRevisions,
        result: &mut JobResult,
    ) -> ActionResult<ReadRevisions> {
        let reading = Box::pin(self.read_stored(job, needed, foreign));
        let read = tokio::time::timeout(READ_TIMEOUT, reading).await;
        let timed_out =
            || ActionError::Transient("reading the release's revisions takes too long".to_owned());
        let read = read.map_err(|_| timed_out())??;
        if read.as_ref().is_ok_and(|stored| stored.is_stale) {
            self.relist(job, result).await?;
            return Err(ActionError::Conflict);
        }
        Ok(read)
    }

    async fn read_stored(
        &self,
        job: &Job,
        needed: &[u32],
        foreign: ForeignRevisions,
    ) -> ActionResult<ReadRevisions> {
        let record = match job.revisions.is_empty() {
            true => ReleaseRecord::default(),
            false => self.release_record(&job.release).await?,
        };
        let mut stored = StoredRevisions {
            contents: BTreeMap::new(),
            all: BTreeMap::new(),
            record,
            is_stale: false,
        };
        let mut owned = OwnedObjects::default();
        let api = self.secrets(&job.release);
        let mut params = release_params(job).limit(PAGE_SIZE);
        let mut pages = ListSize::default();
        loop {
            let page = call("reading the release's revisions", api.list(&params)).await?;
            let objects = page.items.len();
            for (secret, checked) in check_all(&job.release, &stored.record, page.items).await? {
                let within_limit = pages.add_bytes(bound::memory_size(&secret.metadata));
                within_limit.map_err(|_| too_many(job))?;
                let meta = secret.metadata.clone();
                stored.all.insert(secret.name_any(), meta);
                let revision = match checked? {
                    CheckedSecret::NoRevision => continue,
                    CheckedSecret::Unreadable(error) => return Ok(Err(Box::new((secret, error)))),
                    CheckedSecret::Revision(revision) => revision,
                };
                let is_same = |known: &Revision| {
                    (known.revision, known.status) == (revision.revision, revision.status)
                };
                stored.is_stale |= !job.revisions.iter().any(is_same);
                if needed.contains(&revision.revision) {
                    stored.contents.insert(revision.revision, secret);
                } else if foreign == ForeignRevisions::Remove {
                    let record = &stored.record;
                    stored.is_stale |= self
                        .remove_foreign(job, record, &revision, &secret, &mut owned)
                        .await?;
                }
            }
            if stored.all.len() > MAX_REVISIONS {
                return Err(too_many(job));
            }
            let more = pages.next_page(&mut params, page.metadata, objects);
            if !more.map_err(|_| too_many(job))? {
                return Ok(Ok(stored));
            }
        }
    }

    /// Fails if any revision has changed since it was checked. This is the last call before Helm starts.
    pub(super) async fn recheck(&self, job: &Job, stored: &StoredRevisions) -> ActionResult {
        let api = self.secrets(&job.release);
        let mut params = release_params(job).limit(METADATA_PAGE_SIZE);
        let mut pages = ListSize::default();
        let mut count = 0;
        loop {
            let listing = api.list_metadata(&params);
            let page = call("listing the release's revisions", listing).await?;
            for item in &page.items {
                let meta = &item.metadata;
                let checked = meta.name.as_ref().and_then(|name| stored.all.get(name));
                let is_unchanged = |checked: &ObjectMeta| {
                    (&checked.uid, &checked.resource_version) == (&meta.uid, &meta.resource_version)
                };
                if !checked.is_some_and(is_unchanged) {
                    return Err(written_before_start(job, meta));
                }
                count += 1;
            }
            let objects = page.items.len();
            let more = pages.next_page(&mut params, page.metadata, objects);
            if !more.map_err(|_| too_many(job))? {
                let is_complete = count == stored.all.len();
                return is_complete.then_some(()).ok_or(ActionError::Conflict);
            }
        }
    }

    /// Waits for a random time. Helm applies the stored content, and a user of the workspace who sees the run coming
    /// must not know when Helm reads it.
    pub(super) async fn wait_randomly(&self) {
        let wait = MAX_WAIT.mul_f64(chance::random());
        tokio::time::sleep(wait).await;
    }

    /// Deletes every revision except this one, and returns whether there were any. Helm skips a revision that it
    /// cannot decode, and its decoder differs from Krypton's. An uninstallation must not use a revision that was not
    /// checked.
    pub(super) async fn delete_all_but(
        &self,
        job: &Job,
        stored: &StoredRevisions,
        number: u32,
    ) -> ActionResult<bool> {
        let is_other = |meta: &&ObjectMeta| {
            Revision::from_metadata(meta).is_some_and(|(_, revision)| revision.revision != number)
        };
        let mut has_others = false;
        for meta in stored.all.values().filter(is_other) {
            self.forget(&job.release, meta).await?;
            has_others = true;
        }
        Ok(has_others)
    }

    /// Returns whether the revision was removed. Keeps no copy of a failed attempt, because each retry creates
    /// another one.
    async fn remove_foreign(
        &self,
        job: &Job,
        record: &ReleaseRecord,
        revision: &Revision,
        secret: &Secret,
        owned: &mut OwnedObjects,
    ) -> ActionResult<bool> {
        if verdict(record, secret)?.1 == RecordComparison::Recorded {
            return Ok(false);
        }
        let checking = self.check_objects(job, revision.revision, secret, owned);
        match checking.await {
            Ok(()) => return Ok(false),
            Err(ActionError::Failed { message, .. }) => {
                tracing::warn!(member = %self.member.name, problem = %message, "removing an untrusted revision");
            }
            Err(error) => return Err(error),
        }
        self.check_permit()?;
        if revision.status != Status::Failed {
            self.save_copy(&job.release, secret, revision.revision)
                .await?;
        }
        self.forget(&job.release, &secret.metadata).await?;
        Ok(true)
    }
}

fn release_params(job: &Job) -> ListParams {
    ListParams::default().labels(&releases::secrets_selector(&job.release.name))
}

enum CheckedSecret {
    NoRevision,
    Unreadable(ReleaseError),
    Revision(Revision),
}

/// Checks a revision outside the runtime's threads, because decoding takes long.
async fn check_all(
    release: &ReleaseKey,
    record: &ReleaseRecord,
    secrets: Vec<Secret>,
) -> ActionResult<Vec<(Secret, ActionResult<CheckedSecret>)>> {
    let (release, record) = (release.clone(), record.clone());
    let checking = off_thread::start(move || {
        let check_one = |secret| {
            let checked = check(&release, &record, &secret);
            (secret, checked)
        };
        secrets.into_iter().map(check_one).collect()
    });
    checking.await.map_err(|_| ActionError::Conflict)
}

fn check(
    release: &ReleaseKey,
    record: &ReleaseRecord,
    secret: &Secret,
) -> ActionResult<CheckedSecret> {
    let revision = Revision::from_metadata(&secret.metadata)
        .filter(|(key, _)| key == release)
        .filter(|_| secret.type_.as_deref() == Some(SECRET_TYPE));
    let Some((_, revision)) = revision else {
        let payload = secret.data.as_ref().and_then(|data| data.get(DATA_KEY));
        // Helm skips a Secret without a payload.
        if payload.is_none_or(|payload| payload.0.is_empty()) {
            return Ok(CheckedSecret::NoRevision);
        }
        let problem = "has the labels of a revision, but not its name or type";
        return Err(misleading(secret, problem));
    };
    let release_details = match releases::check_keys(secret).and_then(|()| releases::decode(secret))
    {
        Ok(release_details) => release_details,
        Err(error) => return Ok(CheckedSecret::Unreadable(error)),
    };
    if release_details.status != revision.status {
        let problem = "has another status in its payload than in its label";
        return Err(misleading(secret, problem));
    }
    // A failed attempt was never recorded.
    let was_deployed = matches!(revision.status, Status::Deployed | Status::Superseded);
    if was_deployed {
        check_unchanged(release, record, secret)?;
    }
    Ok(CheckedSecret::Revision(revision))
}

/// Returns a permanent failure. A user who writes in a loop then gets only one attempt in each longest pause.
fn written_before_start(job: &Job, meta: &ObjectMeta) -> ActionError {
    let name = meta.name.as_deref().unwrap_or_default();
    let message = format!(
        "Secret {}/{name} changed just before Helm started; find the client that writes it",
        job.release.namespace
    );
    ActionError::permanent(reason::RELEASE_TAMPERED, message)
}

fn too_many(job: &Job) -> ActionError {
    let (namespace, name) = (&job.release.namespace, &job.release.name);
    let message = format!(
        "namespace {namespace} holds more than {MAX_REVISIONS} revisions of release {name}; delete Secrets with the \
         labels owner=helm and name={name}, the oldest first"
    );
    ActionError::permanent(reason::RELEASE_TAMPERED, message)
}

fn misleading(secret: &Secret, problem: &str) -> ActionError {
    let (namespace, name) = (secret.namespace().unwrap_or_default(), secret.name_any());
    let message = format!(
        "Secret {namespace}/{name} {problem}, so Helm could take it for another revision; delete it"
    );
    ActionError::failed(reason::RELEASE_TAMPERED, message)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::super::trust::check_rollback;
    use super::*;

    const RELEASE: &str = "tenant-acme";

    fn key() -> ReleaseKey {
        ReleaseKey::new("acme", RELEASE)
    }

    fn secret(name: &str, kind: &str, payload: &str) -> Secret {
        let labels = [
            ("owner", "helm"),
            ("name", RELEASE),
            ("version", "1"),
            ("status", "deployed"),
        ];
        let data = match payload {
            "" => None,
            json => Some(ByteString(releases::pack(json.as_bytes()).unwrap())),
        };
        Secret {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: Some("acme".to_owned()),
                labels: Some(
                    labels
                        .map(|(label, value)| (label.to_owned(), value.to_owned()))
                        .into(),
                ),
                ..ObjectMeta::default()
            },
            type_: Some(kind.to_owned()),
            data: data.map(|data| [(DATA_KEY.to_owned(), data)].into()),
            ..Secret::default()
        }
    }

    fn payload(status: &str, manifest: &str) -> String {
        serde_json::json!({
            "name": RELEASE, "namespace": "acme", "version": 1, "manifest": manifest,
            "info": {"status": status}, "chart": {"metadata": {"name": "small", "version": "1.0.0"}},
        })
        .to_string()
    }

    #[test]
    fn only_consistent_release_secrets_are_revisions() {
        let first = releases::secret_name(RELEASE, 1);
        let good = payload("deployed", "");
        let result = |name: &str, kind: &str, payload: &str| {
            let checked = check(
                &key(),
                &ReleaseRecord::default(),
                &secret(name, kind, payload),
            );
            match checked {
                Ok(CheckedSecret::Revision(revision)) => format!("revision {}", revision.revision),
                Ok(CheckedSecret::NoRevision) => "none".to_owned(),
                Ok(CheckedSecret::Unreadable(_)) => "unreadable".to_owned(),
                Err(error) => error.text().to_owned(),
            }
        };
        assert_eq!(result(&first, SECRET_TYPE, &good), "revision 1");
        // Helm skips these two, but would not skip the same Secret with a payload.
        assert_eq!(result("copy", SECRET_TYPE, ""), "none");
        assert_eq!(result(&first, "Opaque", ""), "none");
        assert!(result("copy", SECRET_TYPE, &good).contains("name or type"));
        assert!(result(&first, "Opaque", &good).contains("name or type"));
        assert_eq!(result(&first, SECRET_TYPE, ""), "unreadable");
        let other = payload("superseded", "");
        assert!(result(&first, SECRET_TYPE, &other).contains("another status"));
    }

    #[test]
    fn digest_of_deleted_revision_spares_attempt() {
        let first = releases::secret_name(RELEASE, 1);
        let mut written = secret(&first, SECRET_TYPE, &payload("deployed", "a: 2"));
        let mut record = ReleaseRecord::default();
        record.digests.insert(1, "deleted".to_owned());
        let changed = check_unchanged(&key(), &record, &written).unwrap_err();
        assert!(changed.text().contains("has changed"), "{}", changed.text());
        let labels = written.metadata.labels.get_or_insert_default();
        labels.insert("status".to_owned(), "failed".to_owned());
        assert!(!check_unchanged(&key(), &record, &written).unwrap());
    }

    #[test]
    fn changed_revision_is_never_rolled_back_to() {
        let first = releases::secret_name(RELEASE, 1);
        let written = secret(&first, SECRET_TYPE, &payload("superseded", "a: 1"));
        let digest = releases::digest(&written).unwrap();
        let mut record = ReleaseRecord::default();
        record.digests.insert(1, digest.clone());
        assert_eq!(check_rollback(&key(), &record, &written).unwrap(), digest);
        let changed = secret(&first, SECRET_TYPE, &payload("superseded", "a: 2"));
        let refused = check_rollback(&key(), &record, &changed).unwrap_err();
        assert!(refused.text().contains("has changed"), "{}", refused.text());
        let unknown = check_rollback(&key(), &ReleaseRecord::default(), &written).unwrap_err();
        let problem = unknown.text();
        assert!(problem.contains("has not deployed"), "{problem}");
    }
}
