//! Reconciles KryptonDeployments: after each change, decides on all of them, then publishes the orders and
//! writes the objects that differ.

mod requests;
mod secrets;
mod watch_events;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::{KryptonDeployment, KryptonDeploymentStatus, Placement};
use krypton_reconciler::keep_last_managers;
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::events::ObjectEvent;
use krypton_runtime::newest::{NewestSeen as _, SendIfChanged as _};
use krypton_runtime::watch::Watch;
use krypton_runtime::work_queue::{Outcome, WorkQueue};
use krypton_types::deployment::{DeploymentKey, DesiredDeployment, ReportedEvent};
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::Config;
use kube::{Client, Resource as _};
use tokio::sync::watch;
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;

use crate::deployments::api::DeploymentWriteResult;
use crate::deployments::events::RecordedEvents;
use crate::deployments::plan::{ClusterView, DeploymentView, HistorySources, Site, decide};
use crate::deployments::target::{
    self, MemberIndex, SelectionInputs, TargetMember, TargetReference, target_reference,
};
use crate::discovery::named_secrets::{SecretReferences, SecretStates};
use crate::home_events::HomeEvents;
use crate::leader::Leader;
use crate::leader::home_writer::{self, DeletionCause, HomeWrites, WriteOutcome};
use crate::members::MemberRegistry;
use crate::members::deployment_orders::{DEPLOYMENTS_MAX, DeploymentOrders, ORDERS_MAX};
use crate::members::tenant_reports::TenantReports;

use requests::{DecidedDeployment, Requests, has_later_fields_of, request_span};
use watch_events::REFUSALS_UNTIL_ABSENT;

/// Pause after a failed read or a write conflict, with 50 % jitter.
const AFTER_FAILURE: Duration = Duration::from_secs(3);
/// Retry interval for checking whether home's CRD retains `status.placements`.
const CRD_RETRY: Duration = Duration::from_secs(20);
const CRD_OUTDATED: &str = "the CRD of KryptonDeployments on the home cluster is older than this hub and drops status.placements; update it, because until then the hub writes no KryptonDeployment and sends no new orders";
/// Minimum interval between two decisions on all objects.
const DECIDE_EVERY: Duration = Duration::from_millis(100);
/// Maximum number of writes and reads in flight. Others wait.
const REQUESTS_MAX: usize = 8;

/// Inputs of the KryptonDeployment controller.
pub(crate) struct DeploymentController {
    pub client: Client,
    pub deployments: Arc<DeploymentOrders>,
    pub members: Arc<MemberRegistry>,
    pub notices: HomeEvents,
    /// Publishes the Secrets that discovery reads.
    pub secret_references: watch::Sender<SecretReferences>,
    /// The states of those Secrets.
    pub secret_states: watch::Receiver<SecretStates>,
    /// Namespaces whose KryptonDeployments are reconciled. `None` means all.
    pub namespaces: Option<BTreeSet<String>>,
    /// Default namespace of a referenced Secret.
    pub discovery_namespace: String,
    /// Namespaces whose Secrets any object may name.
    pub open_namespaces: BTreeSet<String>,
    /// Interval between two drift checks of a release.
    pub check_interval: Duration,
    pub writes: HomeWrites,
    /// Contains the charts that the hub sent to each member.
    pub reports: Arc<TenantReports>,
}

#[derive(Debug)]
struct DeploymentEntry {
    object: Arc<KryptonDeployment>,
    deletion: Option<DeletionCause>,
    recorded_events: RecordedEvents,
    /// The last written status, unless the home cluster has stored it. A CRD with an earlier schema drops some fields.
    written: Option<Box<KryptonDeploymentStatus>>,
    /// The object and the reports that give the recorded history, so it need not be derived again.
    settled_history: Option<(Arc<KryptonDeployment>, HistorySources)>,
}

#[derive(Debug)]
struct DeploymentStore {
    entries: BTreeMap<DeploymentKey, DeploymentEntry>,
    /// The objects to write or read.
    queue: WorkQueue<DeploymentKey>,
    listing: BTreeSet<DeploymentKey>,
    synced: bool,
    /// Consecutive 403 or 404 responses of home.
    refusals: u32,
    members: BTreeMap<String, TargetMember>,
    listed_members: BTreeSet<String>,
    members_synced: bool,
    /// Home's CRD drops `status.placements`. The hub decides nothing until this time.
    crd_outdated_until: Option<BootTime>,
}

impl Default for DeploymentStore {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            queue: home_writer::queue(REQUESTS_MAX),
            listing: BTreeSet::new(),
            synced: false,
            refusals: 0,
            members: BTreeMap::new(),
            listed_members: BTreeSet::new(),
            members_synced: false,
            crd_outdated_until: None,
        }
    }
}

/// Reconciles KryptonDeployments until `stop`. Every hub publishes orders. Only the leader writes.
pub(crate) async fn run(
    controller: DeploymentController,
    mut leader: Leader,
    stop: CancellationToken,
) {
    let objects: Api<DeserializeGuard<KryptonDeployment>> = Api::all(controller.client.clone());
    let mut objects = Watch::objects(objects, Config::default());
    let members: Api<EdgeCluster> = Api::all(controller.client.clone());
    let mut members = Watch::objects(members, Config::default());
    let mut report_changes = controller.deployments.changes();
    let mut secret_states = controller.secret_states.clone();
    let (mut store, mut recorded_term) = (DeploymentStore::default(), None);
    let mut requests = Requests::default();
    let mut is_decision_due = false;
    let (mut decide_at, mut pause_ends) = (BootTime::default(), BootTime::default());
    loop {
        let now = BootTime::now();
        let may_write = leader.may_write(now);
        let leader_term = leader.leader_term();
        let (leader_term, term_start) = leader_term.map(|it| (it.since, it.acquired_at)).unzip();
        if objects.restart_for_term(leader_term) {
            members.restart_for_term(leader_term);
            // A standby's view may be stale: the leader orders and writes nothing based on it.
            store.reset_for_term();
            for (key, _) in std::mem::take(&mut requests.deletion_reads).keys() {
                store.queue.done(key, Outcome::Done, now, 0.0);
            }
        }
        if may_write && recorded_term != leader_term {
            // The previous leader recorded the earlier events.
            store.discard_recorded_events();
            recorded_term = leader_term;
            is_decision_due = true;
        }
        if store.crd_outdated_until.is_some_and(|until| until <= now) {
            // Objects read before this may lack their stored placements.
            objects.restart();
            (store.crd_outdated_until, store.synced, store.refusals) = (None, false, 0);
        }
        if is_decision_due && now >= decide_at {
            let states = secret_states.get_and_update();
            let decisions = store.decide(&controller, &states, objects.term());
            let next_start = requests.start(
                &mut store,
                decisions,
                (&controller, &leader),
                (may_write, term_start),
                now,
            );
            is_decision_due = next_start.is_some();
            // As in the fleet's loop: pause for as long as the decisions took, so other tasks can run.
            let ended = BootTime::now();
            pause_ends = ended + DECIDE_EVERY.max(ended.since(now));
            decide_at = next_start.map_or(pause_ends, |next_start| next_start.max(pause_ends));
            tokio::task::yield_now().await;
        }
        let decision = is_decision_due.then_some(decide_at);
        let due = decision.into_iter().chain(store.crd_outdated_until).min();
        let mut changed = false;
        tokio::select! {
            () = stop.cancelled() => return,
            is_open = leader.changed() => { if !is_open { return } is_decision_due = true; }
            Ok(()) = report_changes.changed() => changed = true,
            Ok(()) = secret_states.changed() => changed = true,
            event = objects.next() => changed = store.apply_event(event, &controller),
            event = members.next() => changed = store.apply_member_event(event),
            (key, written) = requests.writes.next() => {
                store.write_ended(&key, written, &controller);
                changed = true;
            }
            ((key, uid), deletion) = requests.deletion_reads.next() => {
                store.read_ended(&key, &uid, deletion);
                changed = true;
            }
            () = clock::sleep_until(due, now) => {}
        }
        if changed {
            let soon = pause_ends.max(now + DECIDE_EVERY);
            (is_decision_due, decide_at) = (true, decide_at.min(soon));
        }
    }
}

impl DeploymentEntry {
    /// Records the events that members reported. `term_start` is the start of this hub's leadership.
    fn record_events(
        &mut self,
        reported_events: Vec<(String, Vec<ReportedEvent>)>,
        term_start: Timestamp,
        recorder: &HomeEvents,
    ) {
        let created = self.object.metadata.creation_timestamp.as_ref();
        let predates_term = created.is_some_and(|time| time.0 < term_start);
        for (member, reported_events) in reported_events {
            let events = self
                .recorded_events
                .unrecorded(&member, &reported_events, predates_term);
            record_events(&self.object, events, recorder);
        }
    }
}

impl DeploymentStore {
    /// Starts over with new lists of home's objects, and rereads deletions.
    fn reset_for_term(&mut self) {
        (self.synced, self.refusals, self.members_synced) = (false, 0, false);
        self.crd_outdated_until = None;
        for entry in self.entries.values_mut() {
            entry.deletion = None;
        }
    }

    /// Decides on all objects, and publishes the orders. Returns nothing until home's lists are complete.
    fn decide(
        &mut self,
        controller: &DeploymentController,
        secret_states: &SecretStates,
        term: Option<BootTime>,
    ) -> Vec<DecidedDeployment> {
        if self.crd_outdated_until.is_some()
            || !self.members_synced
            || !(self.synced || self.refusals >= REFUSALS_UNTIL_ABSENT)
        {
            return Vec::new();
        }
        // The hub records no UID for a member that does not act, so use the UID that it found. Only a user
        // changes a recorded one.
        target::add_observed_uids(&mut self.members, |name| {
            controller.members.cluster_uid(name).flatten()
        });
        let inputs = SelectionInputs {
            members: &MemberIndex::new(&self.members),
            secret_states,
            open_namespaces: &controller.open_namespaces,
        };
        // Oldest first: beyond the member's limit, the newest objects wait.
        let entries = self.by_age();
        let references = self.referenced_secrets(&entries, controller);
        let references = Some(Arc::new(references));
        controller.secret_references.send_if_changed(references);
        let mut ordered: BTreeMap<String, Vec<DesiredDeployment>> = BTreeMap::new();
        let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
        let (mut decisions, mut settled) = (Vec::new(), Vec::new());
        for (key, entry) in entries {
            let is_full = |cluster: &str| {
                let count = ordered.get(cluster).map_or(0, Vec::len);
                let bytes = sizes.get(cluster).copied().unwrap_or_default();
                count >= DEPLOYMENTS_MAX || bytes >= ORDERS_MAX
            };
            let mut view = self.view(key, entry, controller, inputs, is_full);
            let reported_events = view.reported_events();
            view.repair = entry.recorded_events.repair(&reported_events);
            let sources = view.history_sources();
            view.is_history_settled = entry
                .settled_history
                .as_ref()
                .is_some_and(|known| Arc::ptr_eq(&known.0, &entry.object) && known.1 == sources);
            let decision = decide(&view);
            let recorded = entry.object.status.as_ref().map(|it| &*it.history);
            let is_recorded = recorded.unwrap_or_default() == decision.status.history;
            if is_recorded && !view.is_history_settled {
                settled.push((key.clone(), (Arc::clone(&entry.object), sources)));
            }
            for (cluster, order) in &decision.orders {
                let orders = ordered.entry(cluster.clone()).or_default();
                *sizes.entry(cluster.clone()).or_insert(0) += order.size();
                orders.push(order.clone());
            }
            decisions.push((key.clone(), decision, reported_events));
        }
        for (key, sources) in settled {
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.settled_history = Some(sources);
            }
        }
        // The orders are based on reads of this term.
        controller.deployments.read_in(term);
        controller.deployments.set_orders(ordered);
        decisions
    }

    fn by_age(&self) -> Vec<(&DeploymentKey, &DeploymentEntry)> {
        let mut entries: Vec<_> = self.entries.iter().collect();
        entries.sort_by_key(|(_, entry)| entry.object.metadata.creation_timestamp.clone());
        entries
    }

    fn view<'a>(
        &self,
        key: &DeploymentKey,
        entry: &'a DeploymentEntry,
        controller: &DeploymentController,
        inputs: SelectionInputs<'_>,
        is_full: impl Fn(&str) -> bool,
    ) -> DeploymentView<'a> {
        let object = &*entry.object;
        let reference = target_reference(&object.spec, &controller.discovery_namespace);
        let secret_key = match &reference {
            TargetReference::Secret { key, .. } => key.clone(),
            TargetReference::Profile { .. } => None,
        };
        let target = target::select(&reference, &object.spec.region.name, &key.namespace, inputs);
        let site = |placement: Placement| {
            let (uid, cluster) = (&placement.cluster_uid, &placement.cluster);
            let member = target::acting_member(uid, cluster, inputs.members);
            let cluster = member.and_then(|name| {
                let target = self.members.get(&name)?.clone();
                let mut report = controller.deployments.latest_report(&name, key);
                if let Some(stored) = &mut report {
                    let chart = &mut stored.report.applied_chart;
                    // Show only a chart text that the hub sent: the report merely confirms it.
                    if !controller.reports.has_desired_chart(&name, chart) {
                        chart.clear();
                    }
                }
                Some(ClusterView {
                    report,
                    is_full: is_full(&name),
                    member: Some((name, target)),
                })
            });
            Site {
                placement,
                cluster: cluster.unwrap_or_default(),
            }
        };
        DeploymentView {
            object,
            sites: recorded_placements(object)
                .iter()
                .cloned()
                .map(site)
                .collect(),
            target: target.map(|(cluster, cluster_uid)| {
                site(Placement {
                    cluster,
                    cluster_uid,
                    key: secret_key,
                    removing: false,
                })
            }),
            deletion: entry.deletion,
            drift_check_seconds: u32::try_from(controller.check_interval.as_secs())
                .unwrap_or(u32::MAX),
            repair: None,
            is_history_settled: false,
            now: clock::wall(),
        }
    }

    /// Stores the written object, unless the watch has delivered a newer one.
    fn write_ended(
        &mut self,
        key: &DeploymentKey,
        result: Result<DeploymentWriteResult, JoinError>,
        controller: &DeploymentController,
    ) {
        let result = match result {
            Ok(result) => result,
            Err(error) => {
                tracing::error!(%error, deployment = %key, "the write of a KryptonDeployment panicked");
                return self.finish(key, Outcome::Failed);
            }
        };
        if let Some(outcome) = result.outcome {
            controller.writes.count(HomeWrites::DEPLOYMENT, outcome);
        }
        let recorder = &controller.notices;
        if result.is_crd_outdated {
            if self.crd_outdated_until.is_none()
                && let Some(entry) = self.entries.get(key)
            {
                request_span(key, &entry.object).in_scope(|| {
                    tracing::warn!(
                        problem = CRD_OUTDATED,
                        "CRD of KryptonDeployments is outdated"
                    );
                });
                let event = ObjectEvent::warning("CrdOutdated", CRD_OUTDATED);
                record_events(&entry.object, vec![event], recorder);
            }
            self.crd_outdated_until = Some(BootTime::now() + CRD_RETRY);
        }
        if let Some(object) = &result.object {
            record_events(object, result.events, recorder);
        }
        let is_written = result.outcome == Some(WriteOutcome::Ok);
        let outcome = match (&result.object, result.outcome) {
            (Some(_), _) => WriteOutcome::Ok.for_queue(BootTime::now()),
            (None, Some(WriteOutcome::Failed)) => Outcome::Failed,
            (None, Some(WriteOutcome::Ok | WriteOutcome::Conflict) | None) => {
                Outcome::Again(retry_time())
            }
        };
        self.finish(key, outcome);
        // The watch may have delivered the object's deletion first.
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        let stored = result.object.as_ref().filter(|_| is_written);
        let is_dropped = entry
            .written
            .as_ref()
            .zip(stored)
            .is_some_and(|(written, stored)| {
                let status = stored.status.as_ref();
                !status.is_some_and(|status| has_later_fields_of(status, written))
            });
        if !is_dropped {
            entry.written = None;
        }
        if let Some(mut object) = result.object
            && entry.object.metadata.resource_version == result.previous_version
        {
            keep_last_managers(&mut object.metadata);
            entry.object = Arc::new(object);
        }
    }

    fn read_ended(
        &mut self,
        key: &DeploymentKey,
        uid: &str,
        result: Result<Option<DeletionCause>, JoinError>,
    ) {
        let outcome = match result {
            Ok(deletion) => {
                let is_current = |entry: &&mut DeploymentEntry| {
                    entry.object.metadata.uid.as_deref() == Some(uid)
                };
                match (self.entries.get_mut(key).filter(is_current), deletion) {
                    (Some(entry), Some(deletion)) => {
                        entry.deletion = Some(deletion);
                        Outcome::Done
                    }
                    _ => Outcome::Again(retry_time()),
                }
            }
            Err(error) => {
                tracing::error!(%error, deployment = %key, "the read of a KryptonDeployment panicked");
                Outcome::Failed
            }
        };
        self.finish(key, outcome);
    }

    /// Ends a request. The next decision finds what is left to do.
    fn finish(&mut self, key: &DeploymentKey, outcome: Outcome) {
        self.queue
            .done(key, outcome, BootTime::now(), chance::random());
        if !self.entries.contains_key(key) {
            self.queue.forget(key);
        }
    }

    /// Discards the events recorded in an earlier term.
    fn discard_recorded_events(&mut self) {
        for entry in self.entries.values_mut() {
            entry.recorded_events = RecordedEvents::default();
        }
    }
}

fn record_events(object: &KryptonDeployment, events: Vec<ObjectEvent>, recorder: &HomeEvents) {
    for event in events {
        recorder.log_and_record(object.object_ref(&()), event);
    }
}

fn recorded_placements(object: &KryptonDeployment) -> &[Placement] {
    let status = object.status.as_ref();
    status
        .and_then(|status| status.placements.as_deref())
        .unwrap_or_default()
}

fn retry_time() -> BootTime {
    BootTime::now() + AFTER_FAILURE.mul_f64(0.5 + chance::random::<f64>())
}

#[cfg(test)]
mod tests;
