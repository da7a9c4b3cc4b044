//! Installs or upgrades a release.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_helm::driver::{ReleaseTarget, Upgrade};
use krypton_helm::releases::labels::{
    FINGERPRINT_LABEL, INSTALL_RUN, OWNER_NAMESPACE_LABEL, OWNER_UID_LABEL, RUN_LABEL, UPGRADE_RUN,
};
use krypton_helm::releases::record::ReleaseRecord;
use krypton_helm::releases::revision::{Revision, run_label};
use krypton_helm::releases::{self, Status};
use krypton_runtime::{chance, off_thread};
use krypton_types::conditions::reason;
use krypton_types::desired::ChartState;
use krypton_types::desired::crd_policy::CrdPolicy;
use krypton_types::error_chain::chain;

use super::chart_crds::{self, ChartCrdError};
use super::stored_revisions::ForeignRevisions;
use super::trust::{self, compared_revision};
use super::{
    ActionError, ActionResult, ActionRunner, Job, JobResult, ReleaseUpdate, helm_failure,
    unavailable,
};
use crate::helm_queue::HelmReservation;
use crate::plan::{Run, revisions};

/// The reason that a failed run is reported with.
pub(super) fn failure_reason(run: Run) -> &'static str {
    match run {
        Run::Install => reason::INSTALL_FAILED,
        Run::Upgrade => reason::UPGRADE_FAILED,
    }
}

impl ActionRunner {
    pub(super) async fn helm(
        &self,
        job: &Job,
        run: Run,
        reinstall: bool,
        reservation: Option<HelmReservation>,
        result: &mut JobResult,
    ) -> ActionResult {
        let Some(HelmReservation {
            slot,
            chart: Some(path),
            ..
        }) = reservation
        else {
            return Err(ActionError::Conflict);
        };
        self.check_permit()?;
        let server_side = match &job.newest {
            None => true,
            Some(newest) => match self.revision_secret(&job.release, newest.revision).await? {
                Some(secret) => match releases::decode(&secret) {
                    Ok(release_details) => release_details.server_side,
                    Err(error) => {
                        return self
                            .set_aside(job, &(secret, error), Some(slot), result)
                            .await;
                    }
                },
                None => return self.relist_without(job, newest.revision, result).await,
            },
        };
        if reinstall {
            self.forget_older_attempts(job).await?;
        }
        if run == Run::Upgrade {
            self.forget_repeated_attempts(job).await?;
        }
        let chart = job.chart();
        let upgrade = self.upgrade_params(job, &chart, run, path, server_side, reinstall);
        let prepared = self
            .tools
            .helm
            .ready(&self.member.name, &upgrade.values)
            .await;
        prepared.map_err(|error| unavailable(&error))?;
        self.report(job, result).await?;
        if run == Run::Upgrade && job.desired.chart_crds == CrdPolicy::CreateReplace {
            self.replace_crds(&upgrade.chart, failure_reason(run))
                .await?;
        }
        // Another attempt to install compares with nothing that is stored.
        let compared = compared_revision(job).filter(|_| !reinstall);
        let foreign = match compared {
            Some(_) => ForeignRevisions::Remove,
            None => ForeignRevisions::Keep,
        };
        let reading = self.read_checked(job, compared.as_slice(), foreign, result);
        let mut stored = match reading.await? {
            Ok(stored) => stored,
            Err(found) => return self.set_aside(job, &found, Some(slot), result).await,
        };
        if let Some(compared) = compared {
            let secret = stored.revision(compared).ok_or(ActionError::Conflict)?;
            let compared = (compared, secret);
            self.check_compared(job, &stored.record, compared).await?;
        }
        // The numbers of revisions start again, so an old digest would not match.
        self.delete_record(job).await?;
        self.forget_later_digests(job, &mut stored.record).await?;
        self.recheck(job, &stored).await?;
        self.check_start(job)?;
        tracing::info!(member = %self.member.name, chart = %chart.applied_name(), ?run, "running helm");
        let expected = job.newest.as_ref().map_or(0, |newest| newest.revision) + 1;
        let running = Box::pin(self.tools.helm.upgrade(slot, &upgrade, &self.stop));
        let ended = self
            .run_reporting_hooks(job, result, expected, running)
            .await;
        // The exit code is a hint. The release Secret decides.
        let finding = self.find_deployed(job, &upgrade, expected, result);
        if let Some(deployed) = finding.await? {
            let digest = ended.ok().flatten();
            let record = stored.record;
            return self
                .deployed(job, run, deployed, (digest, record), result)
                .await;
        }
        let name = &job.release.name;
        let message =
            format!("Helm succeeded, but revision {expected} of release {name} is not deployed");
        Err(helm_failure(ended.err(), failure_reason(run), message))
    }

    /// Returns the revision that the run has deployed, and its number. If a user deletes the newest revision after
    /// the last check, Helm uses its number again.
    async fn find_deployed(
        &self,
        job: &Job,
        upgrade: &Upgrade,
        expected: u32,
        result: &mut JobResult,
    ) -> ActionResult<Option<(Secret, u32)>> {
        let is_deployed = |secret: &Secret| is_deployed_by(&secret.metadata, upgrade);
        let secret = self.revision_secret(&job.release, expected).await?;
        if let Some(secret) = secret.filter(is_deployed) {
            return Ok(Some((secret, expected)));
        }
        self.relist(job, result).await?;
        let mut listed = result.listed().iter();
        let written = listed.find(|meta| is_deployed_by(meta, upgrade));
        let Some((_, written)) = written.and_then(Revision::from_metadata) else {
            return Ok(None);
        };
        let secret = self.revision_secret(&job.release, written.revision).await?;
        let secret = secret.filter(is_deployed);
        Ok(secret.map(|secret| (secret, written.revision)))
    }

    fn upgrade_params(
        &self,
        job: &Job,
        chart: &ChartState,
        run: Run,
        chart_path: PathBuf,
        server_side: bool,
        reinstall: bool,
    ) -> Upgrade {
        let policy = &self.member.policy;
        let fingerprint = chart.fingerprint();
        let history_max = policy.handling(&job.desired.handling).history_max;
        let history_max = revisions::history_limit(history_max, &job.revisions, &fingerprint);
        let prefix = match run == Run::Install && revisions::is_first_install(&job.revisions) {
            true => INSTALL_RUN,
            false => UPGRADE_RUN,
        };
        let run_id = run_label(prefix, chance::random(), job.owner.generation());
        let owner = (job.owner.uid(), job.owner.namespace());
        Upgrade {
            target: self.helm_target(job),
            chart: chart_path,
            values: chart.helm_values(),
            secret_paths: chart.secret_paths().to_vec(),
            labels: [
                (FINGERPRINT_LABEL.to_owned(), fingerprint),
                (OWNER_UID_LABEL.to_owned(), owner.0.to_owned()),
                (OWNER_NAMESPACE_LABEL.to_owned(), owner.1.to_owned()),
                (RUN_LABEL.to_owned(), run_id),
            ]
            .into(),
            timeout: policy.helm_timeout,
            server_side,
            skip_crds: job.desired.chart_crds == CrdPolicy::Skip,
            history_max,
            description: format!("Krypton, desired state {}", job.desired.version),
            again: reinstall,
        }
    }

    pub(super) fn helm_target(&self, job: &Job) -> ReleaseTarget {
        ReleaseTarget {
            kubeconfig: self.member.kubeconfig.clone(),
            release: job.release.name.clone(),
            namespace: job.release.namespace.clone(),
            cache_key: self.member.name.clone(),
        }
    }

    /// Records the revision that a run of ours has deployed. `digest` is that of Helm's output.
    async fn deployed(
        &self,
        job: &Job,
        run: Run,
        (secret, revision): (Secret, u32),
        (digest, record): (Option<String>, ReleaseRecord),
        result: &mut JobResult,
    ) -> ActionResult {
        let release_details = releases::decode(&secret).ok();
        if let Some(digest) = digest {
            self.record_digest(job, revision, &digest, record).await;
            // An undecodable Secret is set aside by the next pass.
            if release_details.is_some() && releases::digest(&secret).ok() != Some(digest) {
                return Err(trust::tampered(&job.release, revision));
            }
        }
        result.release_update = Some(ReleaseUpdate::One(Box::new(secret.metadata)));
        result.release_details = release_details;
        result.applied = Some(run);
        result.clears_failure = true;
        tracing::info!(member = %self.member.name, revision, "deployed");
        Ok(())
    }

    async fn replace_crds(&self, chart: &Path, reason: &'static str) -> ActionResult {
        let action_error = |error: ChartCrdError| match error {
            ChartCrdError::NotPermitted => ActionError::Conflict,
            error => ActionError::failed(reason, chain(&error)),
        };
        let path = chart.to_owned();
        let reading = off_thread::start(move || chart_crds::read_chart_crds(&path));
        let crds = reading
            .await
            .map_err(|_| ActionError::Conflict)?
            .map_err(action_error)?;
        let is_permitted = || self.check_permit().is_ok();
        let replacing = chart_crds::replace(&self.fleet_client, &crds, is_permitted);
        Box::pin(replacing).await.map_err(action_error)
    }
}

fn is_deployed_by(meta: &ObjectMeta, upgrade: &Upgrade) -> bool {
    let run_id = upgrade.labels.get(RUN_LABEL);
    Revision::from_metadata(meta).is_some_and(|(_, revision)| {
        revision.status == Status::Deployed && revision.run.as_ref() == run_id
    })
}
