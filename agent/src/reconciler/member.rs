//! What comes before any Tenant: the permit, the record of the desired state, the CRD, the report.

use std::sync::Arc;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_common::desired::DesiredState;
use krypton_common::error_chain::chain;
use krypton_common::member::MemberReport;
use krypton_crds::tenant::Tenant;
use kube::api::Api;
use kube::{Client, CustomResourceExt, ResourceExt};
use std::time::Duration;
use tracing::Instrument as _;

use super::{CRD_EVERY, ListedUnder, Reconciler};
use crate::clock::Boot;
use crate::events::Events;
use crate::fence::NO_NEW_RUNS_AFTER;
use crate::index::CrdState;
use crate::ledger::{self, Advance, Recording};
use crate::newest::{Newest as _, NewestSeen as _};
use crate::rescue::{Deleted, Deletions, Restored};
use crate::status::Told;
use crate::subject::Subject;
use crate::{plan, rescue};

const RECORD_RETRY_MAX: Duration = Duration::from_secs(60);
/// While the CRD is away, or Tenants are yet to be put back, none of them is looked after.
const CRD_RETRY_MAX: Duration = Duration::from_secs(10);

impl Reconciler {
    /// When the apiserver last answered. Whoever started us had just heard it.
    pub(super) fn heard(&self) -> Boot {
        self.hold
            .get()
            .heard
            .map_or(self.started, |heard| heard.max(self.started))
    }

    /// Permit, record and CRD: what comes before any Tenant.
    pub(super) fn see_to_member(&mut self, now: Boot) {
        // Whoever cannot see the cluster keeps nobody else from acting on it.
        let lease = self.member.lease.get();
        if self.index.ready() && self.wish.get() != lease {
            self.wish.send_replace(lease);
        }
        let (permitted, ours) = {
            let hold = self.hold.see();
            (hold.may_start(now), hold.renewed.is_some())
        };
        self.held = ours.then(|| self.held.unwrap_or(now));
        if permitted != self.permitted {
            self.permitted = permitted;
            tracing::info!(member = %self.member.name, permitted, "the Lease");
            // Another writer may have been here meanwhile; and what has failed while the cluster was away is no
            // reason to wait.
            self.recorded = None;
            self.recording.abort_all();
            self.recording_failures = 0;
            self.look_at_all();
        }
        if !permitted {
            let replaced = self.index.schema().flatten().is_some();
            if self.listed == ListedUnder::Originals && replaced {
                (self.listed, self.list_anew) = (ListedUnder::Observed, true);
            }
            return;
        }
        let wanted = self.desired.get();
        let recorded = self.recorded.as_mut();
        let on_record = recorded.is_some_and(|recorded| is_same(recorded, &wanted));
        if !on_record && self.recording.is_empty() {
            let client = self.member.client.clone();
            let pause = retry_pause(self.recording_failures, RECORD_RETRY_MAX);
            let recording = async move {
                tokio::time::sleep(pause).await;
                let result = ledger::record(&client, &wanted).await;
                (wanted, result.map_err(|error| chain(&error)))
            };
            self.recording.spawn(recording.in_current_span());
        }
        if let Some(state) = self.index.crd()
            && !self.crd_checked
            && self.crd_jobs.is_empty()
            && now >= self.crd_not_before
        {
            let client = self.member.client.clone();
            let events = self.performer.events.clone();
            let known = self.deletions();
            let seeing = async move { see_to_crd(&client, state, &known, &events).await };
            self.crd_jobs.spawn(seeing.in_current_span());
        }
    }

    fn deletions(&self) -> Deletions {
        let mut known = Deletions::default();
        for (key, slot) in &self.slots {
            known.confirmed.extend(slot.deletion_confirmed.clone());
            let subject = self.index.subject(key).filter(|_| slot.removing);
            let tenant = subject.as_ref().and_then(Subject::tenant);
            known
                .under_way
                .extend(tenant.and_then(|tenant| tenant.uid()));
        }
        known
    }

    pub(super) fn finish_recording(
        &mut self,
        done: Result<(Arc<DesiredState>, Result<Recording, String>), tokio::task::JoinError>,
    ) {
        let Ok((desired, result)) = done else { return };
        // Begun under a Lease that is another's by now, perhaps.
        if !self.permitted {
            return;
        }
        if let Ok(Recording { unowned, .. }) = &result
            && *unowned != self.unowned
        {
            if let Some(why) = unowned {
                tracing::warn!(member = %self.member.name, %why,
                    "the record of the desired state has no owner; nothing else depends on that");
            }
            self.unowned.clone_from(unowned);
        }
        match result.map(|recording| recording.advance) {
            Ok(Advance::Recorded | Advance::Record) => {
                self.recording_failures = 0;
                self.ahead = None;
                self.recorded = Some(desired);
                self.look_at_all();
            }
            Ok(Advance::Refuse(version)) => {
                if self.ahead != Some(version) {
                    tracing::warn!(member = %self.member.name, recorded = %version, given = %desired.version,
                        "the member has seen a later desired state; not acting on this one");
                }
                self.recording_failures += 1;
                self.ahead = Some(version);
            }
            Err(problem) => {
                tracing::warn!(member = %self.member.name, %problem, "the desired state is not on record yet");
                self.recording_failures += 1;
                self.problem = Some(problem);
            }
        }
    }

    pub(super) fn finish_crd(&mut self, done: Result<Result<(), String>, tokio::task::JoinError>) {
        match &done {
            Ok(Ok(())) => self.crd_failures = 0,
            _ => self.crd_failures += 1,
        }
        let pause = CRD_EVERY.max(retry_pause(self.crd_failures, CRD_RETRY_MAX));
        self.crd_not_before = Boot(Boot::now().0 + pause);
        match done {
            Ok(Ok(())) => {
                self.crd_checked = self.index.crd() == Some(CrdState::Present);
                let outdated = self.listed != ListedUnder::Ours;
                if self.crd_checked && (self.crd_lost || outdated) {
                    // What was put back is not in a list that is older, nor all of what an older schema had.
                    (self.crd_lost, self.list_anew) = (false, true);
                    self.listed = ListedUnder::Ours;
                }
                self.look_at_all();
            }
            Ok(Err(problem)) => {
                tracing::warn!(member = %self.member.name, %problem, "the Tenant CRD");
                self.problem = Some(problem);
            }
            Err(_) => {}
        }
    }

    pub(super) fn report_member(&mut self, now: Boot) {
        let hold = self.hold.get();
        let connected = now.since(self.heard()) < NO_NEW_RUNS_AFTER;
        let report = MemberReport {
            // By now every Tenant that was listed has its report.
            synced: self.index.synced()
                && self.index.crd() == Some(CrdState::Present)
                && !(self.permitted && (self.crd_lost || self.list_anew))
                && self.listed.will_do(self.permitted),
            ready: connected && self.index.ready(),
            writing: self.permitted,
            holder: if self.permitted {
                Some(self.member.holder.clone())
            } else {
                hold.other.clone()
            },
            connected,
            problem: hold.problem.or_else(|| self.problem.clone()).filter(|_| {
                !connected || !self.index.synced() || (self.permitted && self.recorded.is_none())
            }),
            applied: self
                .recorded
                .as_ref()
                .map(|desired| (desired.version, self.digests.state(desired).to_string())),
            ahead: self.ahead,
        };
        self.board.member(&report);
    }
}

/// Rescue while the CRD goes; otherwise make sure of it, and put back what was rescued.
async fn see_to_crd(
    client: &Client,
    state: CrdState,
    known: &Deletions,
    events: &Events,
) -> Result<(), String> {
    if state == CrdState::Terminating {
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        let crd = crds
            .get_metadata_opt(Tenant::crd_name())
            .await
            .map_err(|error| error.to_string())?;
        let Some(deleted) = crd.and_then(|crd| crd.metadata.deletion_timestamp) else {
            return Ok(());
        };
        let released = rescue::keep_and_release(client, deleted.0, known)
            .await
            .map_err(|error| chain(&error))?;
        if released > 0 {
            tracing::warn!(
                released,
                "the Tenant CRD is being deleted: Tenants are kept and let go, nothing is uninstalled"
            );
        }
        return Ok(());
    }
    crate::crd::ensure(client, &Tenant::crd())
        .await
        .map_err(|error| chain(&error))?;
    for restored in rescue::restore(client)
        .await
        .map_err(|error| chain(&error))?
    {
        tell(events, &restored);
    }
    Ok(())
}

fn tell(events: &Events, restored: &Restored) {
    let (tenant, reason, message) = match restored {
        Restored::Back(tenant, deleted) => {
            let more = match deleted {
                Deleted::No => "its release was left alone",
                Deleted::Perhaps => {
                    "whether it had been deleted for itself before is not certain: delete it again if it is to go"
                }
                Deleted::Yes => "and deleted again, as it had been before",
            };
            let message = format!("put back after its CRD had been deleted; {more}");
            (tenant, "TenantRestored", message)
        }
        Restored::InTheWay(tenant, workspace) => {
            let message = format!(
                "this was made before another Tenant of its name could be put back after the deletion of the \
                 CRD; if that had a release in namespace {workspace}, it is left alone"
            );
            (tenant, "TenantNotRestored", message)
        }
    };
    let told = Told {
        warning: true,
        reason,
        message,
    };
    events.tell(tenant, told);
}

/// Whether they are equal. They are one from then on, and are not compared again.
fn is_same(recorded: &mut Arc<DesiredState>, wanted: &Arc<DesiredState>) -> bool {
    if Arc::ptr_eq(recorded, wanted) {
        return true;
    }
    let same = **recorded == **wanted;
    if same {
        recorded.clone_from(wanted);
    }
    same
}

/// Before the next attempt at the member's own objects.
fn retry_pause(failures: u32, longest: Duration) -> Duration {
    match failures {
        0 => Duration::ZERO,
        _ => plan::backoff(failures, longest, rand::random()),
    }
}
