//! Reconciles the status of home's Tenants: reexamines a Tenant after each change, and writes its status if
//! it differs.

mod requests;
mod watch_events;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use krypton_crds::tenant::{Tenant, TenantStatus};
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::events::EventRecorder;
use krypton_runtime::tasks::KeyedTasks;
use krypton_runtime::watch::{Watch, list_refusal};
use krypton_runtime::work_queue::{Outcome, WorkQueue};
use krypton_types::error_chain::chain;
use krypton_types::names;
use krypton_types::tenant::TenantKey;
use kube::Client;
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::Config;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::index::{TenantIndex, members_in_conditions};
use super::placement::{self, FinalizerChange, PlacementDecision};
use crate::leader::Leader;
use crate::leader::home_writer::{self, HomeWrites, MIN_WRITE_INTERVAL, WriteOutcome};
use crate::members::placement_orders::PlacementOrders;
use crate::members::tenant_reports::{DirtyTenants, ReportedView, START_GRACE, TenantReports};
use crate::tenants::placement_orders::{CrdObservation, PlacementPlanner, UnverifiedDeletions};
use crate::tenants::status::{
    DecisionMemory, DecisionTime, TenantSettings, decide, may_have_unnamed,
};

use requests::{read_crd, record_events, send_write, span};

/// Minimum interval between two checks that write nothing. Many reports change nothing here.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Throttle for each scanned member. In a fleet of 5,000, a Tenant with unnamed members is checked every 5
/// s.
const SCAN_COST: Duration = Duration::from_micros(500);
/// Maximum number of status writes in flight. Others wait, and a later report replaces an earlier one.
const WRITERS: usize = 8;
/// Tenants and reports that one iteration of the loop examines before it yields.
const STEPS_MAX: usize = 4_096;

/// One of home's Tenants.
#[derive(Debug)]
struct TenantEntry {
    tenant: Arc<Tenant>,
    memory: DecisionMemory,
    /// The last written status, if home's CRD has dropped fields of it.
    written_status: Option<TenantStatus>,
}

impl TenantEntry {
    fn new(tenant: Arc<Tenant>) -> Self {
        Self {
            tenant,
            memory: DecisionMemory::default(),
            written_status: None,
        }
    }

    /// Returns whether the recorded status equals `status`, apart from fields that the CRD dropped.
    fn is_recorded(&self, status: &TenantStatus) -> bool {
        let Some(recorded) = &self.tenant.status else {
            return false;
        };
        // An earlier schema of the CRD lacks these fields.
        let equals_with_dropped = |written: &TenantStatus| {
            let complete = TenantStatus {
                next_steps: written.next_steps.clone(),
                clusters: written.clusters.clone(),
                history: written.history.clone(),
                last_handled_reconcile_at: written.last_handled_reconcile_at.clone(),
                ..recorded.clone()
            };
            complete == *status
        };
        let written = self.written_status.as_ref();
        recorded == status || written.is_some_and(equals_with_dropped)
    }

    fn version(&self) -> Option<&String> {
        self.tenant.metadata.resource_version.as_ref()
    }
}

/// A write to a Tenant.
#[derive(Debug)]
pub(super) enum TenantWrite {
    Status(Box<TenantStatus>),
    Finalizer(FinalizerChange),
}

/// The result of [`TenantStore::next_write`].
#[derive(Debug)]
pub(super) enum NextWrite {
    Write(TenantKey, Arc<Tenant>, TenantWrite),
    /// More Tenants are due after other tasks ran.
    Yield,
    Idle,
}

/// Home's Tenants, and the set of Tenants to check.
#[derive(Debug)]
pub(super) struct TenantStore {
    planner: PlacementPlanner,
    /// Until this time, the hub assumes that home's CRD drops `status.placement`.
    record_dropped_until: Option<BootTime>,
    entries: BTreeMap<TenantKey, TenantEntry>,
    listed: BTreeSet<TenantKey>,
    /// Whether the list is complete.
    synced: bool,
    /// Whether home does not serve Tenants, because a user has deleted their CRD. Empty orders are published then: the
    /// reconciler that creates the CRD again may wait for them, and an absent order has no effect.
    crd_absent: bool,
    queue: WorkQueue<TenantKey>,
    /// The Tenants that concern a member name or a cluster UID.
    index: TenantIndex,
    /// Tenants with unnamed members, known only as a count. Any member may be one of them.
    with_unnamed: BTreeSet<TenantKey>,
    /// Number of decisions so far.
    pub(super) decisions: u64,
}

impl Default for TenantStore {
    fn default() -> Self {
        Self {
            planner: PlacementPlanner::default(),
            record_dropped_until: None,
            entries: BTreeMap::new(),
            listed: BTreeSet::new(),
            synced: false,
            crd_absent: false,
            queue: home_writer::queue(WRITERS),
            index: TenantIndex::default(),
            with_unnamed: BTreeSet::new(),
            decisions: 0,
        }
    }
}

/// A completed write.
struct FinishedWrite {
    base_version: Option<String>,
    object: Option<Tenant>,
    /// Whether the write was to record the placement.
    records_placement: bool,
    /// The written status, if home's CRD dropped fields of it.
    written_status: Option<TenantStatus>,
    /// The finalizer was removed, and these objects remain.
    orphaned: Option<String>,
    /// The new phase, if it changed.
    phase: Option<String>,
    outcome: WriteOutcome,
}

/// Reconciles the status of home's Tenants until `stop`, while `lead` confirms that this hub leads. With
/// `placements`, it also places Tenants on the members that they name.
pub async fn run(
    client: Client,
    reports: Arc<TenantReports>,
    settings: TenantSettings,
    placements: Option<Arc<PlacementOrders>>,
    recorder: EventRecorder,
    mut lead: Leader,
    stop: CancellationToken,
) {
    let api: Api<DeserializeGuard<Tenant>> = Api::all(client.clone());
    let mut watch = Watch::objects(api, Config::default());
    let mut store = TenantStore {
        planner: PlacementPlanner::new(placements),
        ..TenantStore::default()
    };
    let mut writes: KeyedTasks<TenantKey, FinishedWrite> = KeyedTasks::default();
    let mut crd_reads: JoinSet<(UnverifiedDeletions, Option<CrdObservation>)> = JoinSet::new();
    let mut next_crd_read = BootTime::default();
    let mut last_term = None;
    // Until then, members may still be connecting.
    let mut startup_grace_until = Some(BootTime::now() + START_GRACE);
    loop {
        let now = BootTime::now();
        let leading = lead.may_write(now);
        let leader_term = lead.term_since();
        if watch.restart_for_term(leader_term) {
            // A standby's view may be stale: the leader orders and writes nothing based on it.
            store.reset_list();
            crd_reads = JoinSet::new();
        }
        if leading && last_term != leader_term {
            // Another hub may have written in the interim. Treat the recorded status as after a restart.
            startup_grace_until = Some(now + START_GRACE);
            store.reset_memory();
            last_term = leader_term;
        }
        store.mark_affected(reports.take_dirty(now), &reports, &settings);
        if startup_grace_until.take_if(|until| *until <= now).is_some() {
            store.enqueue_all();
        }
        // Every hub publishes orders, because each serves its own members. Only the leader writes their basis.
        store.publish_orders(&reports, watch.term());
        if crd_reads.is_empty()
            && now >= next_crd_read
            && let Some(unverified) = store.planner.take_unverified()
        {
            next_crd_read = now + MIN_WRITE_INTERVAL;
            crd_reads.spawn(read_crd(client.clone(), unverified, settings.self_cluster));
        }
        let must_read_crd = store.planner.has_unverified() && crd_reads.is_empty();
        let crd_read = must_read_crd.then_some(next_crd_read);
        let (mut queue_wake, mut has_more) = (None, false);
        if leading {
            let now = DecisionTime {
                boot: now,
                wall: clock::wall(),
                in_startup_grace: startup_grace_until.is_some(),
            };
            while store.synced {
                match store.next_write(&reports, &settings, &lead, now) {
                    NextWrite::Write(key, tenant, write) => {
                        let span = span(&key, &tenant);
                        let write = send_write(client.clone(), key.clone(), tenant, write);
                        writes.spawn(key, lead.tracked(write.instrument(span)));
                    }
                    NextWrite::Yield => {
                        has_more = true;
                        break;
                    }
                    NextWrite::Idle => break,
                }
            }
            queue_wake = store.queue.wake().filter(|_| store.synced);
        }
        let grace_end = reports.next_grace_end();
        let wakes = [startup_grace_until, grace_end, crd_read, queue_wake];
        let wake = wakes.into_iter().flatten().min();
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::task::yield_now(), if has_more => {}
            () = reports.changed.notified() => {}
            election_runs = lead.changed() => if !election_runs { return },
            event = watch.next() => match event {
                Ok(event) => store.apply_event(event, &settings, &reports),
                Err(error) => {
                    tracing::debug!(error = %chain(&error), "failed to watch Tenants on the home cluster; retrying");
                    store.crd_absent = list_refusal(&error) == Some(404);
                }
            },
            Some(read) = crd_reads.join_next(), if !crd_reads.is_empty() => {
                if let Ok((deletions, crd)) = read {
                    store.queue.extend(deletions.keys().cloned());
                    store.planner.record_crd_read(deletions, crd);
                }
            }
            (key, written) = writes.next() => match written {
                Ok(written) => {
                    reports.writes.count(HomeWrites::TENANT, written.outcome);
                    record_events(&recorder, &written);
                    store.finish_write(key, written, &reports, BootTime::now());
                }
                Err(error) => {
                    tracing::error!(%error, tenant = %key, "the write of a Tenant panicked");
                    store.queue.done(&key, Outcome::Failed, BootTime::now(), chance::random());
                }
            },
            () = clock::sleep_until(wake, now) => {}
        }
    }
}

impl TenantStore {
    /// Starts over with a new list of home's Tenants.
    fn reset_list(&mut self) {
        (self.synced, self.crd_absent) = (false, false);
        self.planner.reset();
    }

    /// Publishes the orders that follow from changes. Does nothing until the list of home's Tenants from
    /// this term is complete, or home does not serve Tenants.
    fn publish_orders(&mut self, reports: &TenantReports, term: Option<BootTime>) {
        let is_read = self.synced || self.crd_absent;
        let Some(targets) = reports.targets().filter(|_| is_read) else {
            return;
        };
        // Tenants that a standby saw earlier may be gone. The next list marks all of them.
        let entries = self.synced.then_some(&self.entries);
        let tenant = |key: &TenantKey| entries?.get(key).map(|entry| &*entry.tenant);
        let affected = self.planner.publish(term, tenant, &targets);
        self.enqueue(affected);
    }

    /// Returns the decision on the placement of a Tenant.
    fn placement(
        &self,
        key: &TenantKey,
        tenant: &Tenant,
        view: &ReportedView,
        now: BootTime,
    ) -> PlacementDecision {
        let targets = view.targets.as_deref();
        let member = placement::current_member(tenant, targets).unwrap_or_default();
        let planner = &self.planner;
        let report = planner.latest_report(member, key);
        let input = placement::PlacementInput {
            enabled: planner.is_enabled(),
            crd_keeps_record: self.record_dropped_until.is_none_or(|until| until <= now),
            targets,
            silence: placement::silence(view, member),
            report: report.as_ref(),
            exceeds_limit: planner.exceeds_limit(member, key),
            deletion: planner.deletion_cause(key, tenant),
        };
        placement::decide(tenant, &input)
    }

    /// Checks due Tenants, and returns the first write.
    pub(super) fn next_write(
        &mut self,
        reports: &TenantReports,
        settings: &TenantSettings,
        lead: &Leader,
        now: DecisionTime,
    ) -> NextWrite {
        let mut steps = 0;
        while self.queue.is_free() {
            if steps >= STEPS_MAX {
                return NextWrite::Yield;
            }
            let Some(key) = self.queue.pop(now.boot) else {
                break;
            };
            steps += 1;
            let Some(entry) = self.entries.get(&key) else {
                continue;
            };
            let tenant = Arc::clone(&entry.tenant);
            let recorded = tenant.status.as_ref();
            let Some(epoch) = lead.epoch_for_write(recorded.and_then(|status| status.hub_epoch))
            else {
                // A later leader wrote it. Check it again under a later epoch.
                self.queue.add_at(key, now.boot + MIN_WRITE_INTERVAL);
                continue;
            };
            let (view, scanned) = reported_view(reports, &key, &tenant, &entry.memory, now.boot);
            steps += view.members.len() + scanned;
            let scan_pause = SCAN_COST.saturating_mul(u32::try_from(scanned).unwrap_or(u32::MAX));
            self.decisions += 1;
            let mut decision = decide(&tenant, &view, settings, &entry.memory, now);
            let placement = self.placement(&key, &tenant, &view, now.boot);
            let generation = tenant.metadata.generation.unwrap_or_default();
            let placed = placement.condition.as_ref();
            let (status, outlook) = (&mut decision.status, decision.outlook);
            placement::set_conditions(status, placed, outlook, generation, now.wall);
            if placement.placement.is_some() {
                decision.status.placement = placement.placement;
            }
            let Some(entry) = self.entries.get_mut(&key) else {
                continue;
            };
            if decision.memory.has_unnamed() {
                self.with_unnamed.insert(key.clone());
            } else {
                self.with_unnamed.remove(&key);
            }
            entry.memory = decision.memory;
            let write = match placement.finalizer {
                Some(change) => Some(TenantWrite::Finalizer(change)),
                None if entry.is_recorded(&decision.status) => None,
                None => {
                    decision.status.hub_epoch = Some(epoch);
                    Some(TenantWrite::Status(Box::new(decision.status)))
                }
            };
            let pause = match write {
                Some(_) => MIN_WRITE_INTERVAL,
                None => CHECK_INTERVAL,
            };
            if write.is_some() {
                self.queue.start(key.clone());
            }
            let not_before = now.boot + pause.max(scan_pause);
            self.queue.delay(key.clone(), not_before);
            if let Some(due) = decision.due {
                self.queue.add_at(key.clone(), due);
            }
            if let Some(write) = write {
                return NextWrite::Write(key, tenant, write);
            }
        }
        NextWrite::Idle
    }

    /// Marks the Tenants that the changed members affect, and no others.
    pub(super) fn mark_affected(
        &mut self,
        changed: DirtyTenants,
        reports: &TenantReports,
        settings: &TenantSettings,
    ) {
        if changed.all {
            self.enqueue_all();
            self.planner.mark_dirty(self.entries.keys().cloned());
        }
        self.enqueue(changed.keys);
        if changed.all || (changed.members.is_empty() && changed.clusters.is_empty()) {
            return;
        }
        let mut affected = BTreeSet::new();
        for uid in &changed.clusters {
            affected.extend(self.index.by_cluster(uid));
        }
        for member in &changed.members {
            // Home itself is a member of each Tenant without `clusterRef`.
            if **member == *names::SELF_CLUSTER && settings.self_cluster {
                let without_ref = self
                    .entries
                    .iter()
                    .filter(|(_, entry)| entry.tenant.referenced_member().is_none());
                affected.extend(without_ref.map(|(key, _)| key.clone()));
            }
            affected.extend(self.index.by_member(member));
            affected.extend(reports.reported_by(member));
        }
        if !changed.members.is_empty() {
            affected.extend(self.with_unnamed.iter().cloned());
        }
        let existing = affected.iter().filter(|key| self.entries.contains_key(key));
        self.planner.mark_dirty(existing.cloned());
        self.enqueue(affected);
    }

    /// Simulates a write that completes before any other event.
    pub(super) fn simulate_write(
        &mut self,
        key: &TenantKey,
        object: Tenant,
        reports: &TenantReports,
    ) {
        let due = self.queue.due_at(key);
        self.put(key.clone(), object, reports);
        let now = BootTime::default();
        self.queue.done(key, Outcome::Done, now, 0.0);
        self.queue.forget(key);
        if let Some(due) = due {
            self.queue.add_at(key.clone(), due);
        }
    }

    fn enqueue(&mut self, keys: BTreeSet<TenantKey>) {
        let existing = keys
            .into_iter()
            .filter(|key| self.entries.contains_key(key));
        self.queue.extend(existing);
    }

    fn enqueue_all(&mut self) {
        self.queue.extend(self.entries.keys().cloned());
    }

    /// Discards the memory of earlier decisions.
    fn reset_memory(&mut self) {
        for entry in self.entries.values_mut() {
            entry.memory = DecisionMemory::default();
            entry.written_status = None;
        }
        self.enqueue_all();
    }
}

/// Returns the reports that decide a Tenant's status, and the number of other members that the decision
/// looks up.
fn reported_view(
    reports: &TenantReports,
    key: &TenantKey,
    tenant: &Tenant,
    memory: &DecisionMemory,
    now: BootTime,
) -> (ReportedView, usize) {
    let targets = reports.targets();
    let only_member = placement::only_member(tenant, targets.as_deref());
    let only_member = only_member.as_ref().map(|only| only.name);
    let recorded = members_in_conditions(tenant);
    let mut view = reports.view(key, only_member, recorded.iter().copied(), now);
    if only_member.is_none() && may_have_unnamed(tenant, memory) {
        view.others_without = reports.count_without(key, |name| recorded.contains(name));
        // The decision scans the targets twice: here, and to count silent members.
        let scanned = 2 * view.targets.as_ref().map_or(0, |targets| targets.len());
        return (view, scanned);
    }
    (view, 0)
}

#[cfg(test)]
mod tests;
