//! Checks before each Helm run that Helm and Krypton read the stored revisions in the same way.
//!
//! Helm finds revisions by two labels, whatever the type and name of the Secret. It reads number and status from the
//! payload; Krypton's watch reads them from labels. A user of the workspace can create Secrets in which they differ.

use k8s_openapi::api::core::v1::Secret;
use krypton_common::conditions::reason;
use kube::ResourceExt;
use kube::api::ListParams;

use super::trust::{tampered, verdict};
use super::{Done, Fault, Job, Performer, in_time};
use crate::index::Revision;
use crate::release::{self, ReleaseError, SECRET_TYPE, Status};
use crate::release_record::{ReleaseRecord, Verdict};

/// A revision takes up to a MiB.
const PAGE: u32 = 5;

/// All revisions of a release, and what is on record of them.
pub(super) struct Stored {
    secrets: Vec<Secret>,
    pub(super) record: ReleaseRecord,
}

/// A revision that has to be set aside first.
pub(super) type Unreadable = Box<(Secret, ReleaseError)>;

impl Stored {
    fn revisions(&self) -> impl Iterator<Item = (Revision, &Secret)> {
        self.secrets.iter().filter_map(|secret| {
            let (_, revision) = Revision::of(&secret.metadata)?;
            Some((revision, secret))
        })
    }

    pub(super) fn revision(&self, number: u32) -> Option<&Secret> {
        let mut all = self.revisions();
        let found = all.find(|(revision, _)| revision.revision == number);
        found.map(|(_, secret)| secret)
    }
}

impl Performer {
    /// Reads all revisions that Helm would find. Fails if Helm could read one differently, or if the plan does not know
    /// one.
    pub(super) async fn stored(
        &self,
        job: &Job,
        done: &mut Done,
    ) -> Result<Result<Stored, Unreadable>, Fault> {
        let record = async {
            match job.revisions.is_empty() {
                true => Ok(ReleaseRecord::default()),
                false => self.release_record(&job.release).await,
            }
        };
        let (record, secrets) = tokio::try_join!(record, self.secrets_for_helm(job))?;
        for secret in &secrets {
            if let Err(error) = check(job, &record, secret)? {
                return Ok(Err(Box::new((secret.clone(), error))));
            }
        }
        let stored = Stored { secrets, record };
        let planned = |(found, _): (Revision, &Secret)| {
            let same = |it: &Revision| (it.revision, it.status) == (found.revision, found.status);
            job.revisions.iter().any(same)
        };
        if !stored.revisions().all(planned) {
            self.relist(job, done).await?;
            return Err(Fault::Stale);
        }
        Ok(Ok(stored))
    }

    /// Deletes every revision but this one. Helm skips a revision that it cannot decode, and Krypton's decoder is not
    /// Helm's: an uninstallation must not go by one that was not checked.
    pub(super) async fn leave_only(
        &self,
        job: &Job,
        stored: &Stored,
        number: u32,
    ) -> Result<(), Fault> {
        for (revision, secret) in stored.revisions() {
            if revision.revision != number {
                self.forget(&job.release, &secret.metadata).await?;
            }
        }
        Ok(())
    }

    /// Removes what Helm must not go by where it skips the revision that was checked: one that Krypton has not deployed
    /// and that lists an object of somebody else. Of a failed attempt nothing is kept, as it comes with each retry.
    pub(super) async fn remove_foreign(
        &self,
        job: &Job,
        stored: &Stored,
        checked: u32,
        done: &mut Done,
    ) -> Result<(), Fault> {
        let mut removed = false;
        for (revision, secret) in stored.revisions() {
            let recorded = verdict(&stored.record, secret)?.1 == Verdict::Recorded;
            if recorded || revision.revision == checked {
                continue;
            }
            match self.check_objects(job, revision.revision, secret).await {
                Err(Fault::Shown { message, .. }) => {
                    tracing::warn!(member = %self.member.name, %message, "removing a revision");
                }
                checked => {
                    checked?;
                    continue;
                }
            }
            self.still_permitted()?;
            if revision.status != Status::Failed {
                self.keep_copy(&job.release, secret, revision.revision)
                    .await?;
            }
            self.forget(&job.release, &secret.metadata).await?;
            removed = true;
        }
        if removed {
            self.relist(job, done).await?;
            return Err(Fault::Stale);
        }
        Ok(())
    }

    async fn secrets_for_helm(&self, job: &Job) -> Result<Vec<Secret>, Fault> {
        let api = self.secrets(&job.release);
        let labels = format!("owner=helm,name={}", job.release.name);
        let mut params = ListParams::default().labels(&labels).limit(PAGE);
        let mut secrets = Vec::new();
        loop {
            let page = in_time("reading the release's revisions", api.list(&params)).await?;
            secrets.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(secrets),
            }
        }
    }
}

/// The inner error is of a Secret that cannot be decoded.
fn check(
    job: &Job,
    record: &ReleaseRecord,
    secret: &Secret,
) -> Result<Result<(), ReleaseError>, Fault> {
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
    Ok(Ok(()))
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
