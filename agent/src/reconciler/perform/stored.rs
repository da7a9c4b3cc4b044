//! Checks before each Helm run that Helm and Krypton read the stored revisions in the same way.
//!
//! Helm finds revisions by two labels, whatever the type and name of the Secret. It reads number and status from the
//! payload; Krypton's watch reads them from labels. A user of the workspace can create Secrets in which they differ.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_common::conditions::reason;
use kube::ResourceExt;
use kube::api::{ListParams, ObjectList};

use super::trust::{Owned, tampered, verdict};
use super::{Done, Fault, Job, Performer, in_time};
use crate::bound::{self, Pages};
use crate::index::Revision;
use crate::release::{self, DATA_KEY, ReleaseError, SECRET_TYPE, Status};
use crate::release_record::{ReleaseRecord, Verdict};

/// A revision takes up to a MiB, so only one page is in memory.
const PAGE: u32 = 5;
/// Helm keeps ten revisions by default, and so does Krypton; the Go operator kept all.
const MOST_REVISIONS: usize = 2000;

/// The revisions of a release that Helm would find, and what is on record of them.
pub(super) struct Stored {
    /// With content: only those that the caller asked for.
    kept: BTreeMap<u32, Secret>,
    all: Vec<ObjectMeta>,
    pub(super) record: ReleaseRecord,
}

/// A revision that has to be set aside first.
pub(super) type Unreadable = Box<(Secret, ReleaseError)>;

/// What happens to a revision that Krypton has not deployed and that lists an object of another owner. Helm must not
/// use it where it skips the revision that was checked.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Foreign {
    Keep,
    Remove,
}

impl Stored {
    pub(super) fn revision(&self, number: u32) -> Option<&Secret> {
        self.kept.get(&number)
    }
}

impl Performer {
    /// Reads all revisions that Helm would find, and keeps the content of those in `keep`. Fails if Helm could read one
    /// differently, or if the plan does not know one.
    pub(super) async fn stored(
        &self,
        job: &Job,
        keep: &[u32],
        foreign: Foreign,
        done: &mut Done,
    ) -> Result<Result<Stored, Unreadable>, Fault> {
        let record = match job.revisions.is_empty() {
            true => ReleaseRecord::default(),
            false => self.release_record(&job.release).await?,
        };
        let mut stored = Stored {
            kept: BTreeMap::new(),
            all: Vec::new(),
            record,
        };
        let mut owned = Owned::default();
        let mut stale = false;
        let labels = format!("owner=helm,name={}", job.release.name);
        let mut params = ListParams::default().labels(&labels).limit(PAGE);
        let mut pages = Pages::default();
        loop {
            let page = self.revisions_page(job, &params).await?;
            let objects = page.items.len();
            for secret in page.items {
                if is_empty(&secret) {
                    continue;
                }
                let revision = match check(job, &stored.record, &secret)? {
                    Ok(revision) => revision,
                    Err(error) => return Ok(Err(Box::new((secret, error)))),
                };
                let same = |it: &Revision| {
                    (it.revision, it.status) == (revision.revision, revision.status)
                };
                stale |= !job.revisions.iter().any(same);
                let kept = pages.keep(bound::weight(&secret.metadata));
                kept.map_err(|_| too_many(job))?;
                stored.all.push(secret.metadata.clone());
                if keep.contains(&revision.revision) {
                    stored.kept.insert(revision.revision, secret);
                } else if foreign == Foreign::Remove {
                    let record = &stored.record;
                    stale |= self
                        .remove_foreign(job, record, &revision, &secret, &mut owned)
                        .await?;
                }
            }
            if stored.all.len() > MOST_REVISIONS {
                return Err(too_many(job));
            }
            let more = pages.follow(&mut params, page.metadata, objects);
            if !more.map_err(|_| too_many(job))? {
                break;
            }
        }
        if stale {
            self.relist(job, done).await?;
            return Err(Fault::Stale);
        }
        Ok(Ok(stored))
    }

    async fn revisions_page(
        &self,
        job: &Job,
        params: &ListParams,
    ) -> Result<ObjectList<Secret>, Fault> {
        let api = self.secrets(&job.release);
        in_time("reading the release's revisions", api.list(params)).await
    }

    /// Deletes every revision but this one. Helm skips a revision that it cannot decode, and Krypton's decoder is not
    /// Helm's: an uninstallation must not use one that was not checked.
    pub(super) async fn leave_only(
        &self,
        job: &Job,
        stored: &Stored,
        number: u32,
    ) -> Result<(), Fault> {
        for meta in &stored.all {
            if Revision::of(meta).is_some_and(|(_, revision)| revision.revision != number) {
                self.forget(&job.release, meta).await?;
            }
        }
        Ok(())
    }

    /// Returns whether the revision was removed. Of a failed attempt no copy is kept, as each retry makes another.
    async fn remove_foreign(
        &self,
        job: &Job,
        record: &ReleaseRecord,
        revision: &Revision,
        secret: &Secret,
        owned: &mut Owned,
    ) -> Result<bool, Fault> {
        if verdict(record, secret)?.1 == Verdict::Recorded {
            return Ok(false);
        }
        match self
            .check_objects(job, revision.revision, secret, owned)
            .await
        {
            Ok(()) => return Ok(false),
            Err(Fault::Shown { message, .. }) => {
                tracing::warn!(member = %self.member.name, %message, "removing a revision");
            }
            Err(fault) => return Err(fault),
        }
        self.still_permitted()?;
        if revision.status != Status::Failed {
            self.keep_copy(&job.release, secret, revision.revision)
                .await?;
        }
        self.forget(&job.release, &secret.metadata).await?;
        Ok(true)
    }
}

/// Helm skips a Secret without a payload. It is no revision, whatever its labels are.
fn is_empty(secret: &Secret) -> bool {
    let payload = secret.data.as_ref().and_then(|data| data.get(DATA_KEY));
    payload.is_none_or(|payload| payload.0.is_empty())
}

/// The inner error is of a Secret that cannot be decoded.
fn check(
    job: &Job,
    record: &ReleaseRecord,
    secret: &Secret,
) -> Result<Result<Revision, ReleaseError>, Fault> {
    let revision = Revision::of(&secret.metadata)
        .filter(|(release, _)| *release == job.release)
        .filter(|_| secret.type_.as_deref() == Some(SECRET_TYPE));
    let Some((_, revision)) = revision else {
        let what = "has the labels of the release and not the name or type of a revision";
        return Err(misleading(secret, what));
    };
    let facts = match release::check_keys(secret).and_then(|()| release::decode(secret)) {
        Ok(facts) => facts,
        Err(error) => return Ok(Err(error)),
    };
    if facts.status != revision.status {
        let what = "has another status in its payload than in its label";
        return Err(misleading(secret, what));
    }
    // What a failed attempt wrote was never recorded.
    let was_deployed = matches!(revision.status, Status::Deployed | Status::Superseded);
    if was_deployed && verdict(record, secret)?.1 == Verdict::Tampered {
        return Err(tampered(&job.release, revision.revision));
    }
    Ok(Ok(revision))
}

fn too_many(job: &Job) -> Fault {
    let (namespace, name) = (&job.release.namespace, &job.release.name);
    Fault::Shown {
        reason: reason::RELEASE_TAMPERED,
        message: format!(
            "namespace {namespace} holds more than {MOST_REVISIONS} revisions of release {name}; delete Secrets with \
             the labels owner=helm and name={name}, the oldest first"
        ),
        permanent: true,
    }
}

fn misleading(secret: &Secret, what: &str) -> Fault {
    let (namespace, name) = (secret.namespace().unwrap_or_default(), secret.name_any());
    Fault::Shown {
        reason: reason::RELEASE_TAMPERED,
        message: format!(
            "Secret {namespace}/{name} {what}, so Helm could take it for another revision; delete it"
        ),
        permanent: false,
    }
}
