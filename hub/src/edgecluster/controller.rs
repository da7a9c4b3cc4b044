//! The controller's state, and one pass: decide on all members, then write the statuses that are due.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::sync::Arc;

use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::{Newest as _, NewestSeen as _, SendIfChanged as _};
use krypton_runtime::tasks::KeyedTasks;
use krypton_runtime::watch::Watch;
use krypton_runtime::work_queue::{Outcome, WorkQueue};
use krypton_types::deployment::DesiredDeployment;
use krypton_types::placed_tenant::PlacedTenant;
use krypton_types::validity::Validity;
use kube::runtime::watcher::Event;
use tokio::sync::watch;
use tokio::task::JoinError;

use super::api::{
    EdgeClusterWrite, EdgeClusters, certificate_expiry, create, status_patch, write_status,
};
use super::credential_expiry::ExpiryReminders;
use super::decommission::{self, Decommissions};
use super::plan::{self, MemberSources, conditions, written_epoch};
use super::proxies::Proxies;
use super::publisher::DesiredStatePublisher;
use super::source_history::SourceHistory;
use super::status::status;
use super::values::MemberCharts;
use super::{
    AFTER_FAILURE, BATCH, FleetChart, FleetInputs, RECONCILE_EVERY, SILENT_AFTER, SOURCES_GRACE,
    WRITERS, acceptance, desired_status, messages,
};
use crate::chart::values::ValuesReadings;
use crate::discovery::membership::{self, BindingInput, Membership, Refusal};
use crate::discovery::{Origin, RunningProvider};
use crate::home_events::MemberEvent;
use crate::leader::home_writer::{
    self, DeletionCause, HomeWrites, MIN_WRITE_INTERVAL, WriteOutcome,
};
use crate::leader::{Leader, LeaderState};
use crate::members::duplicates::{self, ActDecision};
use crate::members::member::Member;
use crate::members::remote_orders::Orders;
use crate::members::{self, MemberRegistry};
use crate::proxy::Permit;

/// The time of a pass, and what this hub may do.
pub(super) struct Pass {
    pub(super) now: BootTime,
    pub(super) may_write: bool,
    pub(super) leader_state: LeaderState,
}

impl Pass {
    pub(super) fn new(leader: &Leader) -> Self {
        let now = BootTime::now();
        Self {
            now,
            may_write: leader.may_write(now),
            leader_state: leader.state(),
        }
    }
}

pub(super) struct FleetController {
    pub(super) fleet: FleetInputs,
    pub(super) edge_clusters: EdgeClusters,
    pub(super) proxies: Proxies,
    pub(super) history: SourceHistory,
    pub(super) deployment_orders: watch::Receiver<Option<Orders<DesiredDeployment>>>,
    pub(super) placement_orders: watch::Receiver<Option<Orders<PlacedTenant>>>,
    /// Reads of deletions, by the name and the UID of the EdgeCluster.
    pub(super) deletion_reads: KeyedTasks<(String, String), Option<DeletionCause>>,
    pub(super) writes: KeyedTasks<String, EdgeClusterWrite>,
    /// The EdgeClusters to examine.
    pub(super) queue: WorkQueue<String>,
    pub(super) decommissions: Decommissions,
    pub(super) member_charts: MemberCharts,
    pub(super) publisher: DesiredStatePublisher,
    /// The first epoch of this hub's term, and the last one that it sent to members.
    pub(super) first_epoch: u64,
    pub(super) published_epoch: u64,
    /// The last reported rejections of sources, and whether an EdgeCluster has an event about each.
    reported_refusals: BTreeMap<Origin, (Refusal, bool)>,
    written_states: desired_status::WrittenStates,
    reminders: ExpiryReminders,
    started: BootTime,
    /// Start of the term to which the reports above belong.
    led_since: Option<BootTime>,
    /// Whether a decision is due. Observations change often, and require none.
    reconcile_due: bool,
    reconcile_after: BootTime,
    /// When a decision is due without a change.
    reconcile_at: Option<BootTime>,
}

/// The input of one pass.
pub(super) struct PassInputs {
    pub(super) membership: Membership,
    pub(super) with_source: MemberSources,
    /// Members that wait for an operator's acceptance.
    pub(super) waiting: MemberSources,
    pub(super) act_decisions: BTreeMap<String, ActDecision>,
    pub(super) chart: FleetChart,
    pub(super) deployment_orders: Option<Orders<DesiredDeployment>>,
    pub(super) placement_orders: Option<Orders<PlacedTenant>>,
    pub(super) values: Arc<ValuesReadings>,
}

impl FleetController {
    pub(super) fn new(fleet: FleetInputs) -> Self {
        Self {
            publisher: DesiredStatePublisher::new(fleet.desired.clone()),
            history: SourceHistory::new(
                fleet.client.clone(),
                fleet.namespace.clone(),
                fleet.sources.clone(),
            ),
            deployment_orders: fleet.shared.members.deployments().orders(),
            placement_orders: fleet.shared.members.placements().orders(),
            fleet,
            edge_clusters: EdgeClusters::default(),
            proxies: Proxies::default(),
            deletion_reads: KeyedTasks::default(),
            writes: KeyedTasks::default(),
            queue: home_writer::queue(WRITERS),
            decommissions: Decommissions::default(),
            member_charts: MemberCharts::default(),
            first_epoch: 0,
            published_epoch: 0,
            reported_refusals: BTreeMap::new(),
            written_states: desired_status::WrittenStates::default(),
            reminders: ExpiryReminders::default(),
            started: BootTime::now(),
            led_since: None,
            reconcile_due: true,
            reconcile_after: BootTime::default(),
            reconcile_at: None,
        }
    }

    pub(super) fn request_reconcile(&mut self) {
        self.reconcile_due = true;
    }

    pub(super) fn request_reconcile_now(&mut self) {
        (self.reconcile_due, self.reconcile_after) = (true, BootTime::default());
    }

    pub(super) fn request_full_check(&mut self) {
        self.reconcile_due = true;
        self.queue
            .extend(self.edge_clusters.objects.keys().cloned());
    }

    pub(super) fn request_reconcile_at(&mut self, at: BootTime) {
        self.reconcile_at = Some(self.reconcile_at.map_or(at, |due| due.min(at)));
    }

    /// Discards the state that another hub may have changed.
    pub(super) fn begin_pass(&mut self, relisted: bool, pass: &Pass) {
        self.reconcile_due |= self.reconcile_at.take_if(|at| *at <= pass.now).is_some();
        let leader_term = pass.leader_state.leader_term();
        if relisted {
            // A standby's view may be stale. It decides nothing.
            self.edge_clusters.reset_list();
            self.fleet.reports.reset_targets();
            self.decommissions.read_again();
            self.deletion_reads = KeyedTasks::default();
            self.first_epoch = leader_term.map_or(0, |leader_term| leader_term.epoch);
        }
        let since = pass.leader_state.term_since();
        if pass.may_write && self.led_since != since {
            // Another hub may have recorded events, and which sources are members.
            self.reminders = ExpiryReminders::default();
            self.written_states = desired_status::WrittenStates::default();
            self.history.read_again();
            self.queue
                .extend(self.edge_clusters.objects.keys().cloned());
            self.led_since = since;
        }
    }

    /// Whether to decide now. Changes in quick succession share one decision.
    pub(super) fn is_due(&self, pass: &Pass) -> bool {
        let is_running = pass.leader_state != LeaderState::Leaving;
        self.reconcile_due
            && self.edge_clusters.synced
            && pass.now >= self.reconcile_after
            && is_running
    }

    /// Decides on all members.
    pub(super) fn reconcile(&mut self, listed_in: Option<BootTime>, pass: &Pass) {
        self.reconcile_due = false;
        // Moved out during the pass, because each member changes the rest of the controller.
        let mut edge_clusters = std::mem::take(&mut self.edge_clusters);
        let epochs = edge_clusters.objects.values().filter_map(written_epoch);
        self.fleet.leader.observe_epochs(epochs);
        let membership = self.membership(&edge_clusters, pass);
        // Before reports of a new member arrive.
        self.fleet
            .reports
            .set_targets(plan::targets(&edge_clusters));
        let mut with_source = plan::members_with_source(self.fleet.home.as_ref(), &membership);
        let waiting = acceptance::take_waiting(
            &mut with_source,
            &edge_clusters,
            &self.fleet.accepted_namespaces,
        );
        for name in std::mem::take(&mut edge_clusters.recreated) {
            self.fleet.shared.members.forget_agent(&name, pass.now);
        }
        self.observe_recorded_certificates(&edge_clusters, pass);
        for (name, (access, source)) in &with_source {
            // The EdgeCluster comes first: its age decides between two members on one cluster.
            let Some(object) = edge_clusters.objects.get(name) else {
                self.create(name, source.clone(), None, pass);
                continue;
            };
            let shared = &self.fleet.shared;
            let member = enter_member(&shared.members, name, object);
            self.proxies
                .start_or_update(name, access.clone(), shared, &member);
        }
        for (name, (_, source)) in &waiting {
            if !edge_clusters.objects.contains_key(name) {
                self.create(name, source.clone(), Some(false), pass);
            }
        }
        self.proxies.retain(|name| {
            let object = edge_clusters.objects.get(name);
            with_source.contains_key(name)
                || membership.unseen.contains_key(name)
                    && object.is_none_or(acceptance::is_accepted)
        });
        let inputs = self.inputs(&edge_clusters, membership, (with_source, waiting), pass);
        for (name, object) in &edge_clusters.objects {
            self.reconcile_member(name, object, &inputs, pass);
        }
        self.forget_departed(&edge_clusters, &inputs, listed_in);
        self.edge_clusters = edge_clusters;
        // With many members this takes long. Other work of this loop gets as much time.
        let ended = BootTime::now();
        self.reconcile_after = ended + RECONCILE_EVERY.max(ended.since(pass.now));
    }

    fn membership(&mut self, edge_clusters: &EdgeClusters, pass: &Pass) -> Membership {
        let bound = edge_clusters.bound();
        self.history.update(&bound);
        let sources = self.fleet.sources.get();
        let providers: Vec<&RunningProvider> = sources.iter().collect();
        let input = BindingInput {
            bound: &bound,
            dismissed: &self.history.dismissed(&bound),
            in_startup_grace: pass.now.since(self.started) < SOURCES_GRACE,
        };
        let membership = membership::bind_sources(&providers, input);
        messages::report_refused(
            &self.fleet.shared,
            edge_clusters,
            &mut self.reported_refusals,
            &membership.refused,
            pass.may_write,
        );
        self.reconcile_at = plan::grace_ends(membership.waiting, self.started, pass.now);
        membership
    }

    /// Uses the recorded expiry of agents' certificates until the agents report it in this term.
    fn observe_recorded_certificates(&self, edge_clusters: &EdgeClusters, pass: &Pass) {
        let shared = &self.fleet.shared;
        for (name, object) in &edge_clusters.objects {
            let Some(expiry) = certificate_expiry(object) else {
                continue;
            };
            shared.members.agent_enrolled(name, pass.now);
            let is_leading = pass.leader_state.leader_term().is_some();
            shared.members.observe(name, |observation| {
                observation.certificate_reported &= is_leading;
                if !observation.certificate_reported {
                    observation.certificate = Some(Validity::until(expiry));
                }
            });
        }
    }

    fn create(&mut self, name: &str, source: SourceRef, accepted: Option<bool>, pass: &Pass) {
        // A dismissed source gets no new EdgeCluster, so the hub must read the register first.
        let may_create = pass.may_write && self.history.is_read() && !self.queue.is_busy(name);
        let due = self.queue.not_before(name);
        if may_create && due > pass.now {
            self.request_reconcile_at(due);
        } else if may_create && self.queue.is_free() {
            let (client, leader) = (self.fleet.client.clone(), self.fleet.leader.clone());
            self.start_write(
                name,
                create(client, leader, name.to_owned(), source, accepted),
                pass.now,
            );
        } else {
            // Only a missing writer makes it due again. Otherwise it waits for a change.
            self.reconcile_due |= may_create;
        }
    }

    fn inputs(
        &mut self,
        edge_clusters: &EdgeClusters,
        membership: Membership,
        (with_source, waiting): (MemberSources, MemberSources),
        pass: &Pass,
    ) -> PassInputs {
        let chart = self.fleet.chart.get_and_update();
        // The epoch of a term may arrive before the term does. By then this hub must list everything again.
        if let Some(leader_term) = pass.leader_state.leader_term()
            && chart.epoch >= leader_term.epoch
        {
            self.published_epoch = leader_term.epoch;
        }
        // Until home's objects are listed, no member gets orders.
        let deployment_orders = self.deployment_orders.get_and_update();
        let placement_orders = self.placement_orders.get_and_update();
        let placement_orders =
            placement_orders.or_else(|| (!self.fleet.place_tenants).then(BTreeMap::new));
        self.fleet
            .member_values
            .request(edge_clusters.objects.values());
        let values = self.fleet.member_values.readings.get_and_update();
        let identities = plan::identities(
            edge_clusters,
            &with_source,
            &membership,
            &self.fleet.shared.members,
        );
        PassInputs {
            act_decisions: duplicates::decide_all(&identities),
            membership,
            with_source,
            waiting,
            chart,
            deployment_orders,
            placement_orders,
            values,
        }
    }

    fn forget_departed(
        &mut self,
        edge_clusters: &EdgeClusters,
        inputs: &PassInputs,
        listed_in: Option<BootTime>,
    ) {
        let exists = |name: &str| edge_clusters.objects.contains_key(name);
        // Without an EdgeCluster, no proxy acts.
        for (name, proxy) in &self.proxies.running {
            if !exists(name) {
                proxy.permit.send_if_changed(Permit::default());
            }
        }
        self.reminders.retain(exists);
        self.member_charts.retain(exists);
        let objects = edge_clusters.objects.values();
        let uids: BTreeSet<&str> = objects
            .filter_map(|object| object.metadata.uid.as_deref())
            .collect();
        self.decommissions.retain(|uid| uids.contains(uid));
        let is_running = |name: &str| self.proxies.running.contains_key(name);
        let is_needed = |name: &str| {
            exists(name)
                || is_running(name)
                || self.proxies.is_stopping(name)
                || inputs.with_source.contains_key(name)
        };
        let members = &self.fleet.shared.members;
        for name in members.retain(exists, is_running, is_needed) {
            self.written_states.remove(&name);
            self.queue.forget(&name);
            self.fleet.shared.notices.notifier().forget_member(&name);
        }
        members.listed_in(listed_in);
    }

    /// Starts a write of an EdgeCluster.
    pub(super) fn start_write(
        &mut self,
        name: &str,
        write: impl Future<Output = EdgeClusterWrite> + Send + 'static,
        now: BootTime,
    ) {
        home_writer::start(&mut self.queue, name.to_owned(), now);
        let write = self.fleet.leader.tracked(write);
        self.writes.spawn(name.to_owned(), write);
    }

    /// Writes the statuses that are due. Returns when to call this again, and whether more are due now.
    pub(super) fn write(&mut self, pass: &Pass) -> (Option<BootTime>, bool) {
        let now = pass.now;
        let history_due =
            self.history
                .start_request(&mut self.edge_clusters, &self.fleet.leader, now);
        for name in self.fleet.shared.members.take_changed() {
            // A decommissioned member's EdgeCluster is released once the member reports completion.
            let object = self.edge_clusters.objects.get(&name);
            self.reconcile_due |= object.is_some_and(decommission::is_decommissioning);
            // A change of the chart changes all observations. Its delivery to the members takes precedence.
            if self.queue.due_at(&name).is_none() {
                let at = self.queue.not_before(&name).max(now + MIN_WRITE_INTERVAL);
                self.queue.delay(name.clone(), at);
                self.queue.add(name);
            }
        }
        let is_running = pass.leader_state != LeaderState::Leaving;
        let reconcile_time = (self.reconcile_due && self.edge_clusters.synced && is_running)
            .then_some(self.reconcile_after);
        let mut due = reconcile_time
            .into_iter()
            .chain(history_due)
            .chain(self.reconcile_at)
            .min();
        let mut checked = 0;
        while pass.may_write && self.edge_clusters.synced && self.queue.is_free() {
            if checked >= BATCH {
                return (due, true);
            }
            let Some(name) = self.queue.pop(now) else {
                due = due.into_iter().chain(self.queue.wake()).min();
                break;
            };
            checked += 1;
            self.write_status(name, pass);
        }
        (due, false)
    }

    fn write_status(&mut self, name: String, pass: &Pass) {
        let (shared, reports) = (&self.fleet.shared, &self.fleet.reports);
        let (Some(object), Some(mut observation)) = (
            self.edge_clusters.objects.get(&name),
            shared.members.observation(&name),
        ) else {
            return;
        };
        let Some(epoch) = self.fleet.leader.epoch_for_write(written_epoch(object)) else {
            // A later leader wrote it. Check it again under a later epoch.
            let until = pass.now + AFTER_FAILURE;
            self.queue.delay(name.clone(), until);
            self.queue.add(name);
            self.reconcile_due = true;
            return;
        };
        let is_silent = |since: BootTime| pass.now.since(since) >= SILENT_AFTER;
        observation.record_expired = pass.leader_state.term_since().is_none_or(is_silent);
        let recorded = object.status.as_ref();
        let mut status = status(
            &name,
            recorded,
            &observation,
            reports.counts(&name, shared.allow_chart_skip),
            reports.tenant_summaries(&name, shared.allow_chart_skip),
            object.metadata.generation.unwrap_or_default(),
            clock::wall(),
        );
        let member = shared.members.get(&name).ok();
        let published = member.and_then(|member| member.published.get());
        let written = self.written_states.get(&name);
        status.desired = desired_status::desired(
            recorded.and_then(|status| status.desired.as_ref()),
            written.and_then(Option::as_ref),
            published.as_ref(),
            pass.now,
            clock::wall(),
        );
        let (recorded_conditions, next) = (conditions(object), &status.conditions);
        let record = |reason, message| {
            let event = MemberEvent::new(object, reason, message);
            shared.notices.try_warn(event)
        };
        self.reminders
            .check(&name, recorded_conditions, next, clock::wall(), record);
        shared.notices.notifier().member(&name, next);
        if desired_status::is_up_to_date(written, recorded, &status) {
            return;
        }
        let desired = status.desired.clone();
        self.written_states.insert(name.clone(), desired);
        status.hub_epoch = Some(epoch);
        let version = object.metadata.resource_version.clone();
        let patch = status_patch(recorded, &status);
        let client = self.fleet.client.clone();
        let write = write_status(client, name.clone(), version, patch);
        self.start_write(&name, write, pass.now);
    }

    /// Handles an event, and at most [`BATCH`] more that are ready.
    pub(super) fn apply_events(
        &mut self,
        event: Event<EdgeCluster>,
        events: &mut Watch<EdgeCluster>,
    ) {
        let mut dirty = BTreeSet::new();
        for event in with_ready(event, events) {
            disconnect(&self.fleet.shared.members, &event);
            if let Event::Delete(object) = &event
                && let (Some(name), Some(source)) = (&object.metadata.name, &object.spec.source_ref)
            {
                self.history.record_deleted(name, source);
            }
            self.reconcile_due |= self.edge_clusters.apply_event(event, &mut dirty);
        }
        self.queue.extend(dirty);
    }

    pub(super) fn proxy_ended(&mut self, name: &str) {
        self.reconcile_due = true;
        self.fleet
            .shared
            .members
            .clear_connection(name, BootTime::now());
    }

    pub(super) fn apply_deletion_read(
        &mut self,
        (name, uid): (String, String),
        read: Result<Option<DeletionCause>, JoinError>,
    ) {
        self.reconcile_due = true;
        if let Ok(Some(deletion)) = read {
            self.decommissions.confirm(uid, deletion);
        } else {
            let pause = AFTER_FAILURE.mul_f64(0.5 + chance::random::<f64>());
            self.queue.delay(name, BootTime::now() + pause);
        }
    }

    pub(super) fn apply_write(
        &mut self,
        name: &String,
        result: Result<EdgeClusterWrite, JoinError>,
    ) {
        let now = BootTime::now();
        let is_written = matches!(&result, Ok(write) if write.result == WriteOutcome::Ok);
        if !is_written {
            self.written_states.remove(name);
            self.reconcile_due = true;
        }
        let outcome = match result {
            Ok(write) => {
                let writes = &self.fleet.reports.writes;
                writes.count(HomeWrites::EDGE_CLUSTER, write.result);
                let outcome = write.queue_outcome(now, chance::random());
                if let Some(source) = write.created_source() {
                    self.history.record_created(name, source);
                }
                self.reconcile_due |= self.edge_clusters.apply_write(name, write);
                outcome
            }
            Err(error) => {
                tracing::error!(%error, member = name, "the write of an EdgeCluster panicked");
                Outcome::Failed
            }
        };
        self.queue.done(name, outcome, now, chance::random());
    }
}

/// Yields `first`, and at most [`BATCH`] more events that are ready. Later events stay in the watch.
fn with_ready<K: Send + 'static>(
    first: Event<K>,
    events: &mut Watch<K>,
) -> impl Iterator<Item = Event<K>> {
    let ready = iter::from_fn(move || events.try_next().and_then(Result::ok));
    iter::once(first).chain(ready.take(BATCH))
}

/// Disconnects a member that is banned or deleted, before the next decision.
fn disconnect(members: &MemberRegistry, event: &Event<EdgeCluster>) {
    let (object, reason) = match event {
        Event::Apply(object) if object.spec.banned => (object, None),
        Event::Delete(object) => (object, Some(members::GONE.to_owned())),
        _ => return,
    };
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let reason = reason.unwrap_or_else(|| ban_message(name));
    members.reject_sessions(name, object.metadata.uid.as_deref(), &reason);
}

pub(super) fn ban_message(name: &str) -> String {
    format!("spec.banned is set on EdgeCluster {name}; set it to false to lift the ban")
}

pub(super) fn enter_member(
    members: &MemberRegistry,
    name: &str,
    object: &EdgeCluster,
) -> Arc<Member> {
    members.get_or_create(name, object.metadata.uid.as_deref().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt as _, stream};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn full_batch_loses_no_event() {
        let sent: Vec<usize> = (0..BATCH * 3).collect();
        let objects = sent.clone();
        let mut events = Watch::new(move || {
            let events = objects.clone().into_iter();
            stream::iter(events.map(|object| Ok(Event::Apply(object)))).chain(stream::pending())
        });
        let mut received = Vec::new();
        while let Some(Ok(first)) = events.try_next() {
            for event in with_ready(first, &mut events) {
                let Event::Apply(object) = event else {
                    continue;
                };
                received.push(object);
            }
        }
        assert_eq!(received, sent);
    }
}
