//! Remembers reports, failures and waits of one owner between two plans. A restart loses them.

use krypton_crds::is_default;
use krypton_helm::releases::Status;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{ClusterState, reason};
use krypton_types::desired::DesiredState;
use krypton_types::names;
use krypton_types::tenant::UpcomingStep;

use crate::owner::ReleaseOwner;

/// State of one owner that this process keeps in memory. Losing it costs a retry, never a release.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// The state as last reported, with or without the Lease.
    pub reported: Option<ClusterState>,
    /// The state as last written with the Lease, including its events. Initially the state in the Tenant's status.
    pub published: Option<ClusterState>,
    /// The next step, as last reported and as last written with the Lease.
    pub reported_next: Option<UpcomingStep>,
    pub published_next: Option<UpcomingStep>,
    /// The reconcile request that the last report with the Lease acknowledged. Initially the one in the Tenant's
    /// status.
    pub handled_request: Option<String>,
    /// Time of the last report or write.
    pub reported_at: Option<BootTime>,
    pub failure: Option<Failure>,
    /// The release's revisions at the last plan.
    pub revisions: Vec<u32>,
    /// The API server's refusal of the planned requests.
    pub refusal: Option<Refusal>,
    /// The last Helm run that succeeded.
    pub applied: Option<AppliedRun>,
    /// The newest revision if it is locked, and the time at which this process first saw the lock.
    pub locked: Option<(u32, BootTime)>,
    /// Time at which this process first saw the owner.
    pub known_since: Option<BootTime>,
    /// Result of the last drift check.
    pub drift: Option<RevisionDrift>,
    /// The drift checks that failed since the last one that succeeded.
    pub failed_checks: Option<FailedChecks>,
    /// Number and resource version of the newest revision when it was last seen deployed.
    pub deployed: Option<(u32, String)>,
    /// Number and resource version of the deployed revision that was read last.
    pub last_read: Option<(u32, String)>,
    /// A deployed revision of Krypton without a record, and whether it was read with the permit. A read without the
    /// permit may predate the records of releases that an earlier version installed. A revision has no record if the
    /// process died after Helm deployed it.
    pub unrecorded: Option<(u32, bool)>,
    /// A revision to read again, because Helm may no longer be able to decode it.
    pub to_reread: Option<u32>,
    /// UID of a deployment whose cleanup is complete. Deployments have this instead of a finalizer.
    pub cleaned_up: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    Install,
    Upgrade,
}

/// Whether an attempt failed before Helm started.
pub(super) fn is_before_helm(reason: &str) -> bool {
    [
        reason::CHART_NOT_LOADED,
        reason::VERSION_NOT_FOUND,
        reason::VERSION_INVALID,
        reason::HELM_UNAVAILABLE,
        reason::VALUES_NOT_ALLOWED,
        reason::VALUES_TOO_LARGE,
    ]
    .contains(&reason)
}

/// Drift of a revision; `None` in `message` means no drift.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionDrift {
    pub revision: u32,
    pub message: Option<String>,
}

/// Drift checks of a revision that failed in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedChecks {
    pub revision: u32,
    pub count: u32,
    /// Why the last one failed.
    pub message: String,
}

/// Identifies the inputs of an attempt to install or upgrade. A failure with other inputs does not count.
fn attempt_fingerprint(fingerprint: &str, desired: &DesiredState) -> String {
    let mut inputs = vec![fingerprint.to_owned()];
    // The content may be available now if the hub has found its digest since the last attempt.
    inputs.extend(desired.chart.pinned.clone());
    if !is_default(&desired.chart_crds) {
        inputs.push(desired.chart_crds.to_string());
    }
    // Another service account may have the missing rights.
    if !is_default(&desired.lockdown) {
        inputs.push(desired.lockdown.default_service_account.clone());
    }
    inputs.join(" ")
}

impl Memory {
    /// Clears the last failure, because an attempt may succeed on another version of the cluster.
    pub fn cluster_changed(&mut self) {
        self.failure = None;
    }

    /// Updates the memory before a plan: the previous status, the time since which a revision is locked, and the loss
    /// of all revisions.
    pub fn observe(
        &mut self,
        owner: &ReleaseOwner,
        cluster: &str,
        revisions: &[&Revision],
        now: BootTime,
    ) {
        if self.known_since.is_none() {
            self.known_since = Some(now);
            self.published = owner.state_in_status(cluster);
            let status = owner.tenant().and_then(|tenant| tenant.status.as_ref());
            self.published_next =
                status.and_then(|status| UpcomingStep::from_status(status, cluster));
            self.handled_request =
                status.and_then(|status| status.last_handled_reconcile_at.clone());
        }
        let newest = revisions.last().copied();
        self.locked = newest
            .filter(|revision| revision.status.is_locked())
            .map(|revision| match self.locked {
                Some((number, since)) if number == revision.revision => (number, since),
                _ => (revision.revision, now),
            });
        self.observe_newest(newest);
        self.observe_loss(revisions);
    }

    /// Forgets a failure once a user has deleted the revision that caused it. Also forgets a failed upgrade or rollback
    /// once all revisions have been deleted, because an installation is due then.
    ///
    /// If a revision was missing before the failure, the watch may only be late, and the failure stays.
    fn observe_loss(&mut self, revisions: &[&Revision]) {
        let current = revisions.iter().map(|revision| revision.revision).collect();
        let previous = std::mem::replace(&mut self.revisions, current);
        let is_lost = |number: u32| previous.contains(&number) && !self.revisions.contains(&number);
        let are_all_lost = !previous.is_empty() && self.revisions.is_empty();
        let needs_revisions =
            |reason| [reason::UPGRADE_FAILED, reason::ROLLBACK_FAILED].contains(&reason);
        self.failure.take_if(|failure| {
            failure.revision.is_some_and(is_lost)
                || (are_all_lost && needs_revisions(failure.reason))
        });
    }

    /// Forgets a failure because of another user's change, and returns whether there was one.
    pub fn forget_tampering(&mut self) -> bool {
        let is_tampering = |failure: &mut Failure| failure.reason == reason::RELEASE_TAMPERED;
        self.failure.take_if(is_tampering).is_some()
    }

    /// Records the newest revision. A deployed revision that changes before a newer one exists must be read again,
    /// because no regular operation writes to it.
    pub fn observe_newest(&mut self, newest: Option<&Revision>) {
        self.to_reread = self
            .to_reread
            .filter(|number| newest.is_some_and(|newest| newest.revision == *number));
        let deployed = newest.filter(|newest| newest.status == Status::Deployed);
        let current = deployed.map(|newest| (newest.revision, newest.resource_version.clone()));
        if let (Some((previous, old_version)), Some((number, new_version))) =
            (&self.deployed, &current)
            && previous == number
            && old_version != new_version
        {
            self.to_reread = Some(*number);
        }
        self.deployed = current;
    }

    /// Records that a drift check of the revision failed.
    pub fn record_failed_check(&mut self, revision: u32, message: String) {
        let previous = self.failed_checks.take();
        let previous = previous.filter(|failed| failed.revision == revision);
        self.failed_checks = Some(FailedChecks {
            revision,
            count: previous.map_or(0, |failed| failed.count).saturating_add(1),
            message,
        });
    }

    /// Records the resource version that was read, as the watch may already have shown a later one. If the same
    /// version is read twice, the watch shows an earlier one, as after a restore. No further read is needed then.
    pub fn record_read(&mut self, revision: &Revision) {
        if revision.status == Status::Deployed {
            let version = Some((revision.revision, revision.resource_version.clone()));
            let is_same = self.last_read == version;
            self.deployed = version.clone().filter(|_| !is_same);
            self.last_read = version;
        }
    }

    /// Returns the last reported state, or else the state that an earlier process left in the status.
    pub fn last_reported(&self, owner: &ReleaseOwner, cluster: &str) -> Option<ClusterState> {
        self.reported
            .clone()
            .or_else(|| owner.state_in_status(cluster))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedRun {
    pub run: Run,
    pub ended: BootTime,
}

/// The last attempt, if it failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub reason: &'static str,
    pub message: String,
    pub attempts: u32,
    /// A retry of the same attempt would fail in the same way.
    pub permanent: bool,
    /// The revision whose Secret caused the failure. The failure ends with the Secret.
    pub revision: Option<u32>,
    pub retry_at: BootTime,
    pub attempt: Attempt,
}

/// Identifies an attempt. A failure holds back only retries of the same attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub generation: i64,
    pub fingerprint: String,
    /// The value of the annotation that requests a retry.
    pub requested: Option<String>,
    /// `None` if the release stays; otherwise whether its removal leaves the objects behind.
    pub removal: Option<bool>,
}

impl Attempt {
    /// `fingerprint` is the fingerprint of the chart for this owner.
    pub fn new(owner: &ReleaseOwner, desired: &DesiredState, fingerprint: &str) -> Self {
        let requested = owner.annotation(names::RECONCILE_REQUESTED_ANNOTATION);
        let leaves_objects = owner.annotation(names::ORPHAN_ANNOTATION) == Some("true");
        let is_removal = owner.is_being_removed() || desired.retire;
        Self {
            generation: owner.generation(),
            fingerprint: attempt_fingerprint(fingerprint, desired),
            requested: requested.map(str::to_owned),
            removal: is_removal.then_some(leaves_objects),
        }
    }
}

/// Consecutive requests that the API server rejected or did not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub message: String,
    pub attempts: u32,
    pub retry_at: BootTime,
    pub attempt: Attempt,
    /// The API server refused the status write itself.
    pub is_status_write: bool,
    /// The API server refused to return the content of the release.
    pub is_read: bool,
    /// Whether the conditions show the refusal. False during a possibly short outage.
    pub shown: bool,
}
