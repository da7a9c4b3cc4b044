//! Reconciles the status of home's Tenants: reexamines a Tenant after each change, and writes its status if
//! it differs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::tenant::{NextStep, Tenant, TenantStatus};
use krypton_reconciler::index::tenant_key;
use krypton_reconciler::status::PHASE_SET;
use krypton_runtime::call::call;
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::events::{EventRecorder, ObjectEvent};
use krypton_runtime::tasks::KeyedTasks;
use krypton_runtime::watch::Watch;
use krypton_runtime::work_queue::{Outcome, WorkQueue};
use krypton_types::conditions::Phase;
use krypton_types::error_chain::chain;
use krypton_types::names;
use krypton_types::placed_tenant::{is_held, place};
use krypton_types::tenant::TenantKey;
use kube::api::{Api, Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{self, Config, Event};
use kube::{Client, CustomResourceExt, Resource, ResourceExt};
use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use super::concerns::{Concerns, recorded_with};
use super::placement::{self, Deletion, Step, Verdict};
use crate::leader::Leader;
use crate::leader::home_writer::{self, HomeWrites, PACE, Wrote};
use crate::members::placement_orders::Placements;
use crate::members::tenant_reports::{Dirty, Heard, Reports, START_GRACE};
use crate::tenants::placement_orders::{CrdSeen, Doubted, Placing};
use crate::tenants::status::{Memory, Now, Rules, decide, misses};

/// Minimum interval between two checks that write nothing. Many reports change nothing here.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Throttle for each scanned member. In a fleet of 5,000, a Tenant with unnamed members is checked every 5
/// s.
const SCAN_EACH: Duration = Duration::from_micros(500);
/// Maximum number of status writes in flight. Others wait, and a later report replaces an earlier one.
const WRITERS: usize = 8;
/// Tenants and reports that one iteration of the loop examines before it yields.
const STEPS: usize = 4_096;

/// Retry interval after home's CRD dropped `status.placement`.
const RECORD_AGAIN: Duration = Duration::from_secs(600);

/// One of home's Tenants.
#[derive(Debug)]
struct Slot {
    tenant: Arc<Tenant>,
    memory: Memory,
    /// The last written `status.nextSteps`. A CRD with an earlier schema drops it.
    wrote_next: Option<Vec<NextStep>>,
}

impl Slot {
    fn new(tenant: Arc<Tenant>) -> Self {
        Self {
            tenant,
            memory: Memory::default(),
            wrote_next: None,
        }
    }

    /// Returns whether the recorded status equals `status`, apart from a `next` that the CRD dropped.
    fn says(&self, status: &TenantStatus) -> bool {
        let recorded = self.tenant.status.as_ref();
        let wrote = self.wrote_next.as_ref() == Some(&status.next_steps);
        let but_for_next = |recorded: &TenantStatus| {
            let next = status.next_steps.clone();
            wrote
                && recorded.next_steps.is_empty()
                && (TenantStatus {
                    next_steps: next,
                    ..recorded.clone()
                }) == *status
        };
        recorded.is_some_and(|recorded| recorded == status || but_for_next(recorded))
    }

    fn version(&self) -> Option<&String> {
        self.tenant.metadata.resource_version.as_ref()
    }
}

/// A write to a Tenant.
#[derive(Debug)]
pub(super) enum Change {
    Status(Box<TenantStatus>),
    /// Place the Tenant on this member: add the finalizer and the annotation.
    Begin(String),
    /// Remove the finalizer and the annotation. `orphaned` is the message of the event.
    End {
        orphaned: Option<String>,
    },
}

/// The result of one call of `next`.
#[derive(Debug)]
pub(super) enum Turn {
    Write(TenantKey, Arc<Tenant>, Change),
    /// More Tenants are due after other tasks ran.
    Yield,
    Rest,
}

/// Home's Tenants, and the set of Tenants to check.
#[derive(Debug)]
pub(super) struct TenantStore {
    /// `Some` if the hub places Tenants.
    placing: Option<Placing>,
    /// Until this time, the hub assumes that home's CRD drops `status.placement`.
    no_records: Option<BootTime>,
    slots: BTreeMap<TenantKey, Slot>,
    listed: BTreeSet<TenantKey>,
    /// Whether the list is complete.
    synced: bool,
    /// Whether home does not serve Tenants, because a user has deleted their CRD. Empty orders are published then: the
    /// reconciler that creates the CRD again may wait for them, and an absent order has no effect.
    absent: bool,
    queue: WorkQueue<TenantKey>,
    /// The Tenants that concern a member name or a cluster UID.
    index: Concerns,
    /// Tenants with unnamed members, known only as a count. Any member may be one of them.
    missing: BTreeSet<TenantKey>,
    /// Number of decisions so far.
    decided: u64,
}

impl Default for TenantStore {
    fn default() -> Self {
        Self {
            placing: None,
            no_records: None,
            slots: BTreeMap::new(),
            listed: BTreeSet::new(),
            synced: false,
            absent: false,
            queue: home_writer::queue(WRITERS),
            index: Concerns::default(),
            missing: BTreeSet::new(),
            decided: 0,
        }
    }
}

/// A completed write.
struct Written {
    before: Option<String>,
    object: Option<Tenant>,
    /// Whether the write was to record the placement.
    recording: bool,
    /// The finalizer was removed, and these objects remain.
    orphaned: Option<String>,
    /// The new phase, if it changed.
    phase: Option<String>,
    came: Wrote,
}

/// Reconciles the status of home's Tenants until `stop`, while `lead` confirms that this hub leads. With
/// `placements`, it also places Tenants on the members that they name.
pub async fn run(
    client: Client,
    reports: Arc<Reports>,
    rules: Rules,
    placements: Option<Arc<Placements>>,
    recorder: EventRecorder,
    mut lead: Leader,
    stop: CancellationToken,
) {
    let api: Api<DeserializeGuard<Tenant>> = Api::all(client.clone());
    let mut events = Watch::of(api, Config::default());
    let mut store = TenantStore {
        placing: placements.map(Placing::new),
        ..TenantStore::default()
    };
    let mut writes: KeyedTasks<TenantKey, Written> = KeyedTasks::default();
    let mut looks: JoinSet<(Doubted, Option<CrdSeen>)> = JoinSet::new();
    let mut look_next = BootTime::default();
    let mut led = None;
    // Until then, members may still be connecting.
    let mut patient_until = Some(BootTime(BootTime::now().0 + START_GRACE));
    loop {
        let now = BootTime::now();
        let leading = lead.writes(now);
        let leader_term = lead.leader_term().map(|leader_term| leader_term.since);
        if events.begin(leader_term) {
            // A standby's view may be stale: the leader orders and writes nothing based on it.
            store.unlist();
            looks = JoinSet::new();
        }
        if leading && led != leader_term {
            // Another hub may have written in the interim. Treat the recorded status as after a restart.
            patient_until = Some(BootTime(now.0 + START_GRACE));
            store.forget();
            led = leader_term;
        }
        store.take_in(reports.take_dirty(now), &reports, &rules);
        if patient_until.take_if(|until| *until <= now).is_some() {
            store.touch_all();
        }
        // Every hub gives orders, because each serves its own members. Only the leader writes their basis.
        store.give_orders(&reports, events.term());
        if looks.is_empty()
            && now >= look_next
            && let Some(doubted) = store.placing.as_mut().and_then(Placing::doubted)
        {
            look_next = BootTime(now.0 + PACE);
            looks.spawn(look_at_crd(client.clone(), doubted, rules.self_cluster));
        }
        let patience = reports.patience_ends();
        let look = store.placing.as_ref().is_some_and(Placing::is_in_doubt);
        let look = (look && looks.is_empty()).then_some(look_next);
        let mut wake = [patient_until, patience, look].into_iter().flatten().min();
        let mut more = false;
        if leading {
            let now = Now {
                boot: now,
                wall: clock::wall(),
                patient: patient_until.is_some(),
            };
            while store.synced {
                let (key, tenant, change) = match store.next(&reports, &rules, &lead, now) {
                    Turn::Write(key, tenant, change) => (key, tenant, change),
                    Turn::Yield => {
                        more = true;
                        break;
                    }
                    Turn::Rest => break,
                };
                let span = span(&key, &tenant);
                let write = write(client.clone(), key.clone(), tenant, change);
                writes.spawn(key, lead.tracked(write.instrument(span)));
            }
            let wakes = store.queue.wake().filter(|_| store.synced);
            wake = wake.into_iter().chain(wakes).min();
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::task::yield_now(), if more => {}
            () = reports.changed.notified() => {}
            decided = lead.changed() => if !decided { return },
            event = events.next() => match event {
                Ok(event) => store.see(event, &rules, &reports),
                Err(error) => {
                    tracing::debug!(error = %chain(&error), "failed to watch Tenants on the home cluster; retrying");
                    store.absent = matches!(&error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404);
                }
            },
            Some(looked) = looks.join_next(), if !looks.is_empty() => {
                if let (Ok((of, deletion)), Some(placing)) = (looked, &mut store.placing) {
                    store.queue.extend(of.keys().cloned());
                    placing.told(of, deletion);
                }
            }
            (key, written) = writes.next() => match written {
                Ok(written) => {
                    reports.writes.count(HomeWrites::TENANT, written.came);
                    record_events(&recorder, &written);
                    store.take_written(key, written, &reports, BootTime::now());
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
    fn unlist(&mut self) {
        (self.synced, self.absent) = (false, false);
        if let Some(placing) = &mut self.placing {
            placing.reset();
        }
    }

    /// Publishes the orders that follow from changes. Does nothing until the list of home's Tenants from
    /// term `of` is complete, or home does not serve Tenants.
    fn give_orders(&mut self, reports: &Reports, of: Option<BootTime>) {
        let read = self.synced || self.absent;
        let Some(placing) = self.placing.as_mut().filter(|_| read) else {
            return;
        };
        let Some(targets) = reports.targets() else {
            return;
        };
        placing.placements.read_in(of);
        // Tenants that a standby saw earlier may be gone. The next list touches all of them.
        let slots = self.synced.then_some(&self.slots);
        let tenant = |key: &TenantKey| slots?.get(key).map(|slot| &*slot.tenant);
        let news = placing.give(tenant, &targets);
        self.touch(news);
    }

    /// Returns the placement step for a Tenant, and its condition `Placed`.
    fn placement(&self, key: &TenantKey, tenant: &Tenant, heard: &Heard, now: BootTime) -> Verdict {
        let targets = heard.targets.as_deref();
        let member = placement::member(tenant, targets).unwrap_or_default();
        let placing = self.placing.as_ref();
        let said = placing.and_then(|placing| placing.placements.said(member, key));
        let view = placement::View {
            place: placing.is_some(),
            records: self.no_records.is_none_or(|until| until <= now),
            targets,
            silent: placement::silent(heard, member),
            said: said.as_ref().map(|said| &said.report),
            left_out: placing.is_some_and(|placing| placing.is_left_out(member, key)),
            deletion: placing.map_or(Deletion::NotKnown, |placing| placing.deletion(key, tenant)),
        };
        placement::decide(tenant, &view)
    }

    /// Checks due Tenants, and returns the first write.
    pub(super) fn next(
        &mut self,
        reports: &Reports,
        rules: &Rules,
        lead: &Leader,
        now: Now,
    ) -> Turn {
        let mut steps = 0;
        while self.queue.is_free() {
            if steps >= STEPS {
                return Turn::Yield;
            }
            let Some(key) = self.queue.pop(now.boot) else {
                break;
            };
            steps += 1;
            let Some(slot) = self.slots.get(&key) else {
                continue;
            };
            let tenant = Arc::clone(&slot.tenant);
            let recorded = tenant.status.as_ref();
            let Some(epoch) = lead.mark(recorded.and_then(|status| status.hub_epoch)) else {
                // A later leader wrote it. Check it again under a later epoch.
                self.queue.add_at(key, BootTime(now.boot.0 + PACE));
                continue;
            };
            let (heard, scanned) = heard(reports, &key, &tenant, &slot.memory, now.boot);
            steps += heard.said.len() + scanned;
            let scan = SCAN_EACH.saturating_mul(u32::try_from(scanned).unwrap_or(u32::MAX));
            self.decided += 1;
            let mut decision = decide(&tenant, &heard, rules, &slot.memory, now);
            let verdict = self.placement(&key, &tenant, &heard, now.boot);
            let generation = tenant.metadata.generation.unwrap_or_default();
            let placed = verdict.placed.as_ref();
            placement::put(&mut decision.status, placed, generation, now.wall);
            if verdict.place.is_some() {
                decision.status.placement = verdict.place;
            }
            let Some(slot) = self.slots.get_mut(&key) else {
                continue;
            };
            if decision.memory.misses_some() {
                self.missing.insert(key.clone());
            } else {
                self.missing.remove(&key);
            }
            slot.memory = decision.memory;
            let change = match verdict.step {
                Step::Begin(member) => Some(Change::Begin(member)),
                Step::End { orphaned } => Some(Change::End { orphaned }),
                Step::Nothing if slot.says(&decision.status) => None,
                Step::Nothing => {
                    decision.status.hub_epoch = Some(epoch);
                    slot.wrote_next = Some(decision.status.next_steps.clone());
                    Some(Change::Status(Box::new(decision.status)))
                }
            };
            let pause = match change {
                Some(_) => PACE,
                None => LOOK_EVERY,
            };
            if change.is_some() {
                self.queue.start(key.clone());
            }
            let next = BootTime(now.boot.0 + pause.max(scan));
            self.queue.delay(key.clone(), next);
            if let Some(due) = decision.due {
                self.queue.add_at(key.clone(), due);
            }
            if let Some(change) = change {
                return Turn::Write(key, tenant, change);
            }
        }
        Turn::Rest
    }

    /// Marks the Tenants that the changed members affect, and no others.
    pub(super) fn take_in(&mut self, changed: Dirty, reports: &Reports, rules: &Rules) {
        if changed.all {
            self.touch_all();
            if let Some(placing) = &mut self.placing {
                placing.touch(self.slots.keys().cloned());
            }
        }
        self.touch(changed.keys);
        if changed.all || (changed.members.is_empty() && changed.clusters.is_empty()) {
            return;
        }
        let mut concerned = BTreeSet::new();
        for uid in &changed.clusters {
            concerned.extend(self.index.of_cluster(uid));
        }
        for member in &changed.members {
            // Home itself is a member of each Tenant without `clusterRef`.
            if **member == *names::SELF_CLUSTER && rules.self_cluster {
                let own = self
                    .slots
                    .iter()
                    .filter(|(_, slot)| slot.tenant.names_member().is_none());
                concerned.extend(own.map(|(key, _)| key.clone()));
            }
            concerned.extend(self.index.of_member(member));
            concerned.extend(reports.reported_by(member));
        }
        if !changed.members.is_empty() {
            concerned.extend(self.missing.iter().cloned());
        }
        if let Some(placing) = &mut self.placing {
            placing.touch(
                concerned
                    .iter()
                    .filter(|key| self.slots.contains_key(key))
                    .cloned(),
            );
        }
        self.touch(concerned);
    }

    /// Returns the number of decisions so far.
    pub(super) fn decided(&self) -> u64 {
        self.decided
    }

    /// Simulates a write that completes before any other event.
    pub(super) fn was_written(&mut self, key: &TenantKey, object: Tenant, reports: &Reports) {
        let due = self.queue.due_at(key);
        self.put(key.clone(), object, reports);
        let now = BootTime::default();
        self.queue.done(key, Outcome::Done, now, 0.0);
        self.queue.forget(key);
        if let Some(due) = due {
            self.queue.add_at(key.clone(), due);
        }
    }

    fn touch(&mut self, keys: BTreeSet<TenantKey>) {
        let here = keys.into_iter().filter(|key| self.slots.contains_key(key));
        self.queue.extend(here);
    }

    fn touch_all(&mut self) {
        self.queue.extend(self.slots.keys().cloned());
    }

    /// Discards the memory of earlier decisions.
    fn forget(&mut self) {
        for slot in self.slots.values_mut() {
            slot.memory = Memory::default();
            slot.wrote_next = None;
        }
        self.touch_all();
    }

    fn see(&mut self, event: Event<DeserializeGuard<Tenant>>, rules: &Rules, reports: &Reports) {
        // The reconciler of the home cluster reports a Tenant that does not decode.
        let read = |guard: DeserializeGuard<Tenant>| {
            let mut tenant = guard.0.ok()?;
            // Managed fields are larger than the rest of the object, and unused here.
            tenant.metadata.managed_fields = None;
            let key = tenant_key(&tenant.metadata)?;
            let ours = rules
                .namespaces
                .as_ref()
                .is_none_or(|found| found.contains(&key.namespace));
            ours.then_some((key, tenant))
        };
        match event {
            Event::Init => {
                self.listed.clear();
                self.absent = false;
            }
            Event::InitApply(guard) | Event::Apply(guard) => {
                if let Some((key, tenant)) = read(guard) {
                    self.listed.insert(key.clone());
                    self.put(key, tenant, reports);
                }
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                let gone = self.slots.keys().filter(|key| !listed.contains(key));
                if let Some(placing) = &mut self.placing {
                    placing.touch(gone.clone().cloned());
                }
                let gone: Vec<_> = gone.cloned().collect();
                for key in gone {
                    self.drop_slot(&key);
                }
                self.synced = true;
                let summarised = self
                    .slots
                    .iter()
                    .filter(|(_, slot)| is_summary(&slot.tenant));
                reports.summarise_only(summarised.map(|(key, _)| key.clone()).collect());
            }
            Event::Delete(guard) => {
                if let Some((key, _)) = read(guard) {
                    self.drop_slot(&key);
                    reports.summarised(&key, false);
                    if let Some(placing) = &mut self.placing {
                        placing.touch([key]);
                    }
                }
            }
        }
    }

    pub(super) fn put(&mut self, key: TenantKey, tenant: Tenant, reports: &Reports) {
        if self.synced {
            reports.summarised(&key, is_summary(&tenant));
        }
        let tenant = Arc::new(tenant);
        let before = self.slots.get(&key).map(|slot| Arc::clone(&slot.tenant));
        self.index.follow(&key, before.as_deref(), Some(&tenant));
        self.queue.add(key.clone());
        if let Some(placing) = &mut self.placing {
            placing.touch([key.clone()]);
        }
        match self.slots.get_mut(&key) {
            // The Tenant was recreated: the memory belongs to its predecessor.
            Some(slot) if slot.tenant.metadata.uid != tenant.metadata.uid => {
                *slot = Slot::new(tenant);
                self.queue.reset(&key);
            }
            Some(slot) => slot.tenant = tenant,
            None => {
                self.slots.insert(key, Slot::new(tenant));
            }
        }
    }

    fn drop_slot(&mut self, key: &TenantKey) {
        if let Some(slot) = self.slots.remove(key) {
            self.index.follow(key, Some(&slot.tenant), None);
            self.missing.remove(key);
        }
        self.queue.forget(key);
    }

    /// Stores the written object, unless the watch has delivered a newer one.
    fn take_written(&mut self, key: TenantKey, written: Written, reports: &Reports, now: BootTime) {
        // After a conflict or a success, check again after the throttle.
        let outcome = match written.came {
            Wrote::Failed => Outcome::Failed,
            Wrote::Ok | Wrote::Conflict => Outcome::Again(now),
        };
        self.queue.done(&key, outcome, now, chance::random());
        let Some(slot) = self.slots.get_mut(&key) else {
            return self.queue.forget(&key);
        };
        if written.object.is_none() {
            slot.wrote_next = None;
        }
        if let Some(object) = written.object.as_ref().filter(|_| written.recording) {
            match place(object) {
                // The next step writes no status, so the throttle does not apply. A user waits for it.
                Some(_) if !is_held(object) => self.queue.reset(&key),
                Some(_) => {}
                None => self.no_records = Some(BootTime(now.0 + RECORD_AGAIN)),
            }
        }
        // Otherwise, the watch has delivered a newer object.
        let newest = slot.version() == written.before.as_ref();
        if let Some(object) = written.object.filter(|_| newest) {
            self.put(key, object, reports);
        }
    }
}

/// Records the events of a write after it succeeded. A rejected write is retried.
fn record_events(recorder: &EventRecorder, written: &Written) {
    let Some(tenant) = &written.object else {
        return;
    };
    let orphaned = written.orphaned.as_deref().map(orphaned);
    let phase = written.phase.as_deref().map(phase_set);
    for event in orphaned.into_iter().chain(phase) {
        recorder.tell(tenant.object_ref(&()), event);
    }
}

/// Returns the reports that decide a Tenant's status, and the number of other members that the decision
/// looks up.
fn heard(
    reports: &Reports,
    key: &TenantKey,
    tenant: &Tenant,
    memory: &Memory,
    now: BootTime,
) -> (Heard, usize) {
    let targets = reports.targets();
    let sole = placement::sole(tenant, targets.as_deref());
    let sole = sole.as_ref().map(|sole| sole.name);
    let recorded = recorded_with(tenant);
    let mut heard = reports.of(key, sole, recorded.iter().copied(), now);
    if sole.is_none() && misses(tenant, memory) {
        heard.strangers = reports.strangers(key, |name| recorded.contains(name));
        // The decision scans the targets twice: here, and to count silent members.
        let scanned = 2 * heard.targets.as_ref().map_or(0, |targets| targets.len());
        return (heard, scanned);
    }
    (heard, 0)
}

fn is_summary(tenant: &Tenant) -> bool {
    let status = tenant.status.as_ref();
    status.is_some_and(|status| status.summary.is_some())
}

/// Reads why the Tenants in `of` were deleted. If the CRD is not being deleted, the users deleted the
/// Tenants.
async fn look_at_crd(
    client: Client,
    of: Doubted,
    self_cluster: bool,
) -> (Doubted, Option<CrdSeen>) {
    let crds: Api<CustomResourceDefinition> = Api::all(client);
    let request = crds.get_metadata(Tenant::crd_name());
    let deletion = match call("reading the CRD of Tenants", request).await {
        Ok(crd) => Some(CrdSeen {
            deletion: match crd.metadata.deletion_timestamp {
                None => Deletion::Its,
                Some(_) if self_cluster => Deletion::OfTheCrd,
                Some(_) => Deletion::OfTheCrdForGood,
            },
            made: crd.metadata.creation_timestamp.map(|time| time.0),
        }),
        Err(error) => {
            tracing::warn!(error = %chain(&error), "deletions of Tenants wait; retrying");
            None
        }
    };
    (of, deletion)
}

fn phase_set(phase: &str) -> ObjectEvent {
    ObjectEvent {
        warning: false,
        reason: PHASE_SET,
        message: phase.to_owned(),
    }
}

fn orphaned(message: &str) -> ObjectEvent {
    ObjectEvent {
        warning: true,
        reason: "Orphaned",
        message: message.to_owned(),
    }
}

/// Returns the span of a write. The member is the one that the Tenant names, or home.
fn span(key: &TenantKey, tenant: &Tenant) -> Span {
    let member = tenant.names_member().unwrap_or(names::SELF_CLUSTER);
    let generation = tenant.metadata.generation;
    tracing::error_span!("home", tenant = %key, member, generation, outcome = Empty)
}

/// Sends one write. It fails with a conflict if the object changed after the decision.
async fn write(client: Client, key: TenantKey, tenant: Arc<Tenant>, change: Change) -> Written {
    let api: Api<Tenant> = Api::namespaced(client, &key.namespace);
    let before = tenant.metadata.resource_version.clone();
    let recording =
        matches!(&change, Change::Status(status) if status.placement.as_ref() != place(&tenant));
    let request = async {
        let params = PatchParams::default();
        let metadata = |finalizers: Vec<String>, on: Option<&str>| {
            let annotations = json!({ names::PLACED_ON_ANNOTATION: on });
            Patch::Merge(json!({ "metadata": {
                "resourceVersion": before,
                "finalizers": finalizers,
                "annotations": annotations,
            }}))
        };
        let mut finalizers = tenant.finalizers().to_vec();
        match &change {
            Change::Status(status) => {
                let mut patch = json!({
                    "metadata": { "resourceVersion": before },
                    "status": status,
                });
                // A merge patch removes only fields that are null.
                patch["status"]["summary"] = json!(status.summary);
                if status.next_steps.is_empty() {
                    patch["status"]["nextSteps"] = json!(null);
                }
                let patch = Patch::Merge(&patch);
                let call = api.patch_status(&key.name, &params, &patch);
                call.await
            }
            Change::Begin(member) => {
                finalizers.push(names::PLACED_FINALIZER.to_owned());
                let patch = metadata(finalizers, Some(member));
                let call = api.patch(&key.name, &params, &patch);
                call.await
            }
            Change::End { .. } => {
                finalizers.retain(|finalizer| finalizer != names::PLACED_FINALIZER);
                let patch = metadata(finalizers, None);
                let call = api.patch(&key.name, &params, &patch);
                call.await
            }
        }
    };
    let (object, came) = home_writer::write(format!("writing Tenant {key}"), request).await;
    let object = object.map(|mut tenant| {
        tenant.metadata.managed_fields = None;
        tenant
    });
    Span::current().record("outcome", came.name());
    let phase = match &change {
        Change::Status(status) => new_phase(tenant.status.as_ref(), status),
        Change::Begin(_) | Change::End { .. } => None,
    };
    let orphaned = match change {
        Change::End { orphaned } => orphaned,
        Change::Status(_) | Change::Begin(_) => None,
    };
    Written {
        before,
        object,
        recording,
        orphaned,
        phase,
        came,
    }
}

/// Returns the phase over all members, if it differs from the recorded one. A new Tenant is Pending.
fn new_phase(recorded: Option<&TenantStatus>, status: &TenantStatus) -> Option<String> {
    let pending = Phase::Pending.as_str();
    let before = recorded.and_then(|recorded| recorded.phase.as_deref());
    let now = status.phase.as_deref();
    now.filter(|now| *now != before.unwrap_or(pending))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests;
