//! The controller's state, and one pass: decide on all members, then write the statuses that are due.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::{Newest as _, NewestSeen as _, PutNews as _};
use krypton_runtime::tasks::KeyedTasks;
use krypton_runtime::watch::Watch;
use krypton_runtime::work_queue::{Outcome, WorkQueue};
use krypton_types::deployment::DesiredDeployment;
use krypton_types::placed_tenant::PlacedTenant;
use kube::runtime::watcher::Event;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use super::api::{EdgeClusters, Written, certificate_end, create, status_patch, write_status};
use super::credential_expiry::{Reminders, Validity};
use super::decommission::{self, Reading, Retirements};
use super::plan::{self, conditions, mark};
use super::proxies::Proxies;
use super::publisher::DesiredStatePublisher;
use super::source_history::SourceHistory;
use super::status::status;
use super::values::Overlays;
use super::{
    AFTER_FAILURE, BATCH, Fleet, FleetChart, LOOK_EVERY, PATIENCE, UNHEARD, WRITERS, acceptance,
    desired_status, messages,
};
use crate::chart::values::Readings;
use crate::discovery::Origin;
use crate::discovery::membership::{Membership, Refusal};
use crate::leader::home_writer::{self, HomeWrites, PACE, Wrote};
use crate::leader::{Leader, LeaderState};
use crate::members::duplicates::{self, Verdict};
use crate::members::member::Member;
use crate::members::remote_orders::Orders;
use crate::members::{self, MemberRegistry};
use crate::notices::MemberEvent;
use crate::proxy::{Access, Permit};

/// The time of a pass, and whether this hub leads.
pub(super) struct Pass {
    pub(super) now: BootTime,
    pub(super) leading: bool,
    pub(super) stand: LeaderState,
}

impl Pass {
    pub(super) fn now(lead: &Leader) -> Self {
        let now = BootTime::now();
        Self {
            now,
            leading: lead.writes(now),
            stand: lead.stand(),
        }
    }
}

pub(super) struct Controller {
    pub(super) fleet: Fleet,
    pub(super) known: EdgeClusters,
    pub(super) proxies: Proxies,
    pub(super) book: SourceHistory,
    pub(super) orders: watch::Receiver<Option<Orders<DesiredDeployment>>>,
    pub(super) placements: watch::Receiver<Option<Orders<PlacedTenant>>>,
    pub(super) readings: JoinSet<Reading>,
    pub(super) writes: KeyedTasks<String, Written>,
    /// The EdgeClusters to examine.
    pub(super) queue: WorkQueue<String>,
    pub(super) retirements: Retirements,
    pub(super) overlays: Overlays,
    pub(super) publisher: DesiredStatePublisher,
    /// The first epoch of this hub's term, and the last one that it sent to members.
    pub(super) first_epoch: u64,
    pub(super) dealt_epoch: u64,
    /// The last reported rejections of sources, and whether an EdgeCluster has an event about each.
    refused: BTreeMap<Origin, (Refusal, bool)>,
    wrote: desired_status::Wrote,
    reminders: Reminders,
    begun: BootTime,
    /// Start of the term to which the reports above belong.
    led: Option<BootTime>,
    /// Whether a decision is due. Observations change often, and require none.
    look: bool,
    look_next: BootTime,
    /// When a decision is due without a change.
    look_at: Option<BootTime>,
}

/// Members, each with the access to its cluster and its source.
type Wanted = BTreeMap<String, (Access, SourceRef)>;

/// The input of one pass.
pub(super) struct View {
    pub(super) membership: Membership,
    pub(super) wanted: Wanted,
    /// Members that wait for an operator's acceptance.
    pub(super) waiting: Wanted,
    pub(super) verdicts: BTreeMap<String, Verdict>,
    pub(super) given: FleetChart,
    pub(super) ordered: Option<Orders<DesiredDeployment>>,
    pub(super) placed: Option<Orders<PlacedTenant>>,
    pub(super) readings: Arc<Readings>,
}

impl Controller {
    pub(super) fn new(fleet: Fleet) -> Self {
        let publisher = DesiredStatePublisher::new(
            fleet.drift,
            fleet.chart_crds,
            fleet.tenant_values,
            fleet.handling,
        );
        Self {
            publisher: publisher.locked_down(fleet.lockdown.clone()),
            book: SourceHistory::new(
                fleet.client.clone(),
                fleet.namespace.clone(),
                fleet.sources.clone(),
            ),
            orders: fleet.shared.members.deployments().orders(),
            placements: fleet.shared.members.placements().orders(),
            fleet,
            known: EdgeClusters::default(),
            proxies: Proxies::default(),
            readings: JoinSet::new(),
            writes: KeyedTasks::default(),
            queue: home_writer::queue(WRITERS),
            retirements: Retirements::default(),
            overlays: Overlays::default(),
            first_epoch: 0,
            dealt_epoch: 0,
            refused: BTreeMap::new(),
            wrote: desired_status::Wrote::default(),
            reminders: Reminders::default(),
            begun: BootTime::now(),
            led: None,
            look: true,
            look_next: BootTime::default(),
            look_at: None,
        }
    }

    pub(super) fn look(&mut self) {
        self.look = true;
    }

    pub(super) fn look_now(&mut self) {
        (self.look, self.look_next) = (true, BootTime::default());
    }

    pub(super) fn look_at_all(&mut self) {
        self.look = true;
        self.queue.extend(self.known.objects.keys().cloned());
    }

    pub(super) fn look_again(&mut self, at: BootTime) {
        self.look_at = Some(self.look_at.map_or(at, |due| due.min(at)));
    }

    /// Discards the state that another hub may have changed.
    pub(super) fn begin(&mut self, listed_again: bool, pass: &Pass) {
        self.look |= self.look_at.take_if(|at| *at <= pass.now).is_some();
        let leader_term = pass.stand.leader_term();
        if listed_again {
            // A standby's view may be stale. It decides nothing.
            self.known.unlist();
            self.fleet.reports.reset_targets();
            self.retirements.read_again();
            self.readings = JoinSet::new();
            self.first_epoch = leader_term.map_or(0, |leader_term| leader_term.epoch);
        }
        let since = leader_term.map(|leader_term| leader_term.since);
        if pass.leading && self.led != since {
            // Another hub may have recorded events, and which sources are members.
            self.reminders = Reminders::default();
            self.wrote = desired_status::Wrote::default();
            self.book.read_again();
            self.queue.extend(self.known.objects.keys().cloned());
            self.led = since;
        }
    }

    /// Whether to decide now. Changes in quick succession share one decision.
    pub(super) fn is_due(&self, pass: &Pass) -> bool {
        let stays = pass.stand != LeaderState::Leaving;
        self.look && self.known.synced && pass.now >= self.look_next && stays
    }

    /// Decides on all members.
    pub(super) fn reconcile(&mut self, listed_in: Option<BootTime>, pass: &Pass) {
        self.look = false;
        // Moved out during the pass, because each member changes the rest of the controller.
        let mut known = std::mem::take(&mut self.known);
        let marks = known.objects.values().filter_map(mark);
        self.fleet.lead.sees(marks);
        let membership = self.membership(&known, pass);
        // Before reports of a new member arrive.
        self.fleet.reports.set_targets(plan::targets(&known));
        let mut wanted = plan::wanted(self.fleet.home.as_ref(), &membership);
        let waiting = acceptance::take_waiting(&mut wanted, &known, &self.fleet.accepting);
        for name in std::mem::take(&mut known.recreated) {
            self.fleet.shared.members.forget_agent(&name, pass.now);
        }
        self.note_certificates(&known, pass);
        for (name, member) in wanted.iter().chain(&waiting) {
            if !known.objects.contains_key(name) {
                // The EdgeCluster comes first: its age decides between two members on one cluster.
                let accepted = waiting.contains_key(name).then_some(false);
                self.create(name, member.1.clone(), accepted, pass);
            } else if !waiting.contains_key(name) {
                let entry = || enter(&self.fleet.shared.members, &known, name);
                let shared = &self.fleet.shared;
                self.proxies.reach(name, member.0.clone(), shared, entry);
            }
        }
        self.proxies.retain(|name| {
            let accepted = |object: &EdgeCluster| acceptance::is_accepted(object);
            wanted.contains_key(name)
                || membership.unseen.contains_key(name)
                    && known.objects.get(name).is_none_or(accepted)
        });
        let view = self.view(&known, membership, (wanted, waiting), pass);
        for (name, object) in &known.objects {
            self.reconcile_member(name, object, &known, &view, pass);
        }
        self.forget_departed(&known, &view, listed_in);
        self.known = known;
        // With many members this takes long. Other work of this loop gets as much time.
        let ended = BootTime::now();
        self.look_next = BootTime(ended.0 + LOOK_EVERY.max(ended.since(pass.now)));
    }

    fn membership(&mut self, known: &EdgeClusters, pass: &Pass) -> Membership {
        let bound = known.bound();
        self.book.follow(&bound);
        let patient = pass.now.since(self.begun) < PATIENCE;
        let sources = self.fleet.sources.get();
        let membership = plan::members_now(&sources, &bound, &self.book, patient);
        let refused = &membership.refused;
        let shared = &self.fleet.shared;
        messages::tell_refused(shared, known, &mut self.refused, refused, pass.leading);
        self.look_at = plan::patience_ends(membership.waiting, self.begun, pass.now);
        membership
    }

    /// Uses the recorded expiry of agents' certificates until the agents report it in this term.
    fn note_certificates(&self, known: &EdgeClusters, pass: &Pass) {
        let shared = &self.fleet.shared;
        for (name, object) in &known.objects {
            let Some(until) = certificate_end(object) else {
                continue;
            };
            shared.members.agent_known(name, pass.now);
            let leads = pass.stand.leader_term().is_some();
            shared.members.observe(name, |facts| {
                facts.certificate_said &= leads;
                if !facts.certificate_said {
                    facts.certificate = Some(Validity::until(until));
                }
            });
        }
    }

    fn create(&mut self, name: &str, source: SourceRef, accepted: Option<bool>, pass: &Pass) {
        // A dismissed source gets no new EdgeCluster, so the hub must read the register first.
        let may = pass.leading && self.book.is_read() && !self.queue.is_busy(name);
        let due = self.queue.not_before(name);
        if may && due > pass.now {
            self.look_again(due);
        } else if may && self.queue.is_free() {
            let client = self.fleet.client.clone();
            self.start_write(
                name,
                create(client, name.to_owned(), source, accepted),
                pass.now,
            );
        } else {
            // Only a missing writer makes it due again. Otherwise it waits for a change.
            self.look |= may;
        }
    }

    fn view(
        &mut self,
        known: &EdgeClusters,
        membership: Membership,
        (wanted, waiting): (Wanted, Wanted),
        pass: &Pass,
    ) -> View {
        let given = self.fleet.given.see();
        // The epoch of a term may arrive before the term does. By then this hub must list everything again.
        let leader_term = pass.stand.leader_term();
        if let Some(leader_term) =
            leader_term.filter(|leader_term| given.epoch >= leader_term.epoch)
        {
            self.dealt_epoch = leader_term.epoch;
        }
        // Until home's objects are listed, no member gets orders.
        let ordered = self.orders.see();
        let placed = self.placements.see();
        let placed = placed.or_else(|| (!self.fleet.place_tenants).then(BTreeMap::new));
        self.fleet.overlaying.ask(known.objects.values());
        let readings = self.fleet.overlaying.readings.see();
        let claims = plan::claims(known, &wanted, &membership, &self.fleet.shared.members);
        View {
            verdicts: duplicates::verdicts(&claims),
            membership,
            wanted,
            waiting,
            given,
            ordered,
            placed,
            readings,
        }
    }

    fn forget_departed(&mut self, known: &EdgeClusters, view: &View, listed_in: Option<BootTime>) {
        let here = |name: &str| known.objects.contains_key(name);
        // Without an EdgeCluster, no proxy acts.
        for (name, proxy) in &self.proxies.running {
            if !here(name) {
                proxy.permit.put(Permit::default());
            }
        }
        self.reminders.keep(here);
        self.overlays.keep(here);
        let objects = known.objects.values();
        let uids: BTreeSet<&str> = objects
            .filter_map(|object| object.metadata.uid.as_deref())
            .collect();
        self.retirements.keep(|uid| uids.contains(uid));
        let is_running = |name: &str| self.proxies.running.contains_key(name);
        let needed = |name: &str| {
            here(name)
                || is_running(name)
                || self.proxies.is_leaving(name)
                || view.wanted.contains_key(name)
        };
        let members = &self.fleet.shared.members;
        for name in members.retain(here, is_running, needed) {
            self.wrote.forget(&name);
            self.queue.forget(&name);
        }
        members.listed_in(listed_in);
    }

    /// Starts a write of an EdgeCluster.
    pub(super) fn start_write(
        &mut self,
        name: &str,
        write: impl Future<Output = Written> + Send + 'static,
        now: BootTime,
    ) {
        home_writer::start(&mut self.queue, name.to_owned(), now);
        let write = self.fleet.lead.tracked(write);
        self.writes.spawn(name.to_owned(), write);
    }

    /// Writes the statuses that are due. Returns when to look again, and whether more are due.
    pub(super) fn write(&mut self, pass: &Pass) -> (Option<BootTime>, bool) {
        let now = pass.now;
        let book_due = self.book.work(&mut self.known, &self.fleet.lead, now);
        for name in self.fleet.shared.members.take_changed() {
            // A decommissioned member's EdgeCluster is released once the member reports completion.
            let object = self.known.objects.get(&name);
            self.look |= object.is_some_and(decommission::leaving);
            // A change of the chart changes all observations. Its delivery to the members takes precedence.
            if self.queue.due_at(&name).is_none() {
                let at = self.queue.not_before(&name).max(BootTime(now.0 + PACE));
                self.queue.delay(name.clone(), at);
                self.queue.add(name);
            }
        }
        let stays = pass.stand != LeaderState::Leaving;
        let decides = (self.look && self.known.synced && stays).then_some(self.look_next);
        let mut wake = decides
            .into_iter()
            .chain(book_due)
            .chain(self.look_at)
            .min();
        let mut looked = 0;
        while pass.leading && self.known.synced && self.queue.is_free() {
            if looked >= BATCH {
                return (wake, true);
            }
            let Some(name) = self.queue.pop(now) else {
                wake = wake.into_iter().chain(self.queue.wake()).min();
                break;
            };
            looked += 1;
            self.write_status(name, pass);
        }
        (wake, false)
    }

    fn write_status(&mut self, name: String, pass: &Pass) {
        let (shared, reports) = (&self.fleet.shared, &self.fleet.reports);
        let (Some(object), Some(mut facts)) = (
            self.known.objects.get(&name),
            shared.members.observation(&name),
        ) else {
            return;
        };
        let Some(epoch) = self.fleet.lead.mark(mark(object)) else {
            // A later leader wrote it. Check it again under a later epoch.
            let until = BootTime(pass.now.0 + AFTER_FAILURE);
            self.queue.delay(name.clone(), until);
            self.queue.add(name);
            self.look = true;
            return;
        };
        let unheard = |since: BootTime| pass.now.since(since) >= UNHEARD;
        let leader_term = pass.stand.leader_term();
        facts.unheard = leader_term.is_none_or(|leader_term| unheard(leader_term.since));
        let recorded = object.status.as_ref();
        let mut status = status(
            &name,
            recorded,
            &facts,
            reports.counts(&name, shared.allow_chart_skip),
            reports.listing(&name, shared.allow_chart_skip),
            object.metadata.generation.unwrap_or_default(),
            clock::wall(),
        );
        let member = shared.members.get(&name).ok();
        let published = member.and_then(|member| member.published.get());
        status.desired = desired_status::desired(
            recorded.and_then(|status| status.desired.as_ref()),
            self.wrote.of(&name),
            published.as_ref(),
            pass.now,
            clock::wall(),
        );
        let (record, next) = (conditions(object), &status.conditions);
        let uid = object.metadata.uid.clone().unwrap_or_default();
        let tell = |(reason, message)| {
            shared.notices.offer(MemberEvent {
                member: name.clone(),
                uid: uid.clone(),
                reason,
                message,
            })
        };
        self.reminders
            .look(&name, record, next, clock::wall(), tell);
        if self.wrote.is_so(&name, recorded, &status) {
            return;
        }
        self.wrote.note(&name, &status);
        status.hub_epoch = Some(epoch);
        let version = object.metadata.resource_version.clone();
        let patch = status_patch(recorded, &status);
        let client = self.fleet.client.clone();
        let write = write_status(client, name.clone(), version, patch);
        self.start_write(&name, write, pass.now);
    }

    /// Handles an event, and all further events that are ready.
    pub(super) fn see(&mut self, event: Event<EdgeCluster>, events: &mut Watch<EdgeCluster>) {
        let mut dirty = BTreeSet::new();
        let mut next = Some(event);
        for _ in 0..=BATCH {
            let Some(event) = next else { break };
            cut_off(&self.fleet.shared.members, &event);
            self.look |= self.known.see(event, &mut dirty);
            next = events.ready().and_then(Result::ok);
        }
        self.queue.extend(dirty);
    }

    pub(super) fn proxy_ended(&mut self, name: &str) {
        self.look = true;
        self.fleet.shared.members.unlink(name, BootTime::now());
    }

    pub(super) fn take_reading(&mut self, reading: Reading) {
        self.look = true;
        self.retirements.take(&reading);
        if reading.found.is_none() {
            let pause = AFTER_FAILURE.mul_f64(0.5 + chance::random::<f64>());
            self.queue
                .delay(reading.name, BootTime(BootTime::now().0 + pause));
        }
    }

    pub(super) fn take_written(&mut self, name: &String, written: Result<Written, JoinError>) {
        let now = BootTime::now();
        let outcome = match &written {
            Ok(written) => written.outcome(now, chance::random()),
            Err(_) => Outcome::Failed,
        };
        self.look |= written.as_ref().map_or(true, |it| it.came != Wrote::Ok);
        self.queue.done(name, outcome, now, chance::random());
        if !written.as_ref().is_ok_and(Written::went_through) {
            self.wrote.forget(name);
        }
        match written {
            Ok(written) => {
                let writes = &self.fleet.reports.writes;
                writes.count(HomeWrites::EDGE_CLUSTER, written.came);
                self.look |= self.known.take_written(written);
            }
            Err(error) => {
                tracing::error!(%error, member = name, "the write of an EdgeCluster panicked")
            }
        }
    }
}

/// Disconnects a member that is banned or deleted, before the next decision.
fn cut_off(members: &MemberRegistry, event: &Event<EdgeCluster>) {
    let (object, why) = match event {
        Event::Apply(object) if object.spec.banned => (object, None),
        Event::Delete(object) => (object, Some(members::GONE.to_owned())),
        _ => return,
    };
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let why = why.unwrap_or_else(|| banned(name));
    members.cut(name, object.metadata.uid.as_deref(), &why);
}

pub(super) fn banned(name: &str) -> String {
    format!("spec.banned is set on EdgeCluster {name}; set it to false to lift the ban")
}

pub(super) fn enter(members: &MemberRegistry, known: &EdgeClusters, name: &str) -> Arc<Member> {
    let object = known.objects.get(name);
    let uid = object.and_then(|object| object.metadata.uid.as_deref());
    members.enter(name, uid.unwrap_or_default())
}
