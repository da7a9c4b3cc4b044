//! The reconciler of one member: watches feed the index, the plan is made, one action a Tenant is done.
//!
//! Level-triggered: nothing is queued but the names of Tenants that are to be looked at, each once.

mod perform;
mod watches;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_common::conditions::ClusterState;
use krypton_common::desired::{DesiredState, Version};
use krypton_common::tenant::{TenantKey, TenantReport};
use krypton_crds::tenant::{Tenant, TenantSpec};
use kube::api::Api;
use kube::runtime::watcher::Event;
use kube::{Client, CustomResourceExt};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::chart::ChartCache;
use crate::clock::Boot;
use crate::events::Events;
use crate::fence::{self, Hold, LeaseName, KILL_AFTER, NO_NEW_RUNS_AFTER};
use crate::helm::{Helm, StopHandle};
use crate::index::{CrdState, Index, ReleaseKey};
use crate::ledger::{self, Advance};
use crate::plan::{self, Action, Applied, Failure, Memory, Permit, Policy, View};
use crate::release::{Release, WorkloadKind};
use crate::report::{MemberReport, ReportBoard};
use crate::status::Told;
use crate::{rescue, workload};
use perform::{Chain, Done, Fault, Job, Performer, ReleaseNews};
use watches::{Seen, Watch};

/// Who writes the status of the member's Tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusMode {
    /// This reconciler.
    Write,
    /// Its caller, out of the reports: on home, where a Tenant has several members.
    Report,
}

/// The member and how it is reached.
#[derive(Clone)]
pub struct Member {
    /// Its name in the fleet; part of the names of releases and conditions.
    pub name: String,
    /// The namespace of the Secret it comes from, which a `clusterRef` may name too.
    pub source_namespace: Option<String>,
    pub client: Client,
    /// The same access, as a file for helm.
    pub kubeconfig: PathBuf,
    /// Our name in the Lease: one process, one name.
    pub holder: String,
    /// Our name in events.
    pub instance: String,
    pub status: StatusMode,
    /// Only Tenants of these namespaces; `None` for all.
    pub namespaces: Option<BTreeSet<String>>,
    pub allow_chart_skip: bool,
    /// The longest pause between two attempts.
    pub retry_max: Duration,
    pub policy: Policy,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member").field("name", &self.name).finish_non_exhaustive()
    }
}

/// What members share: one pool of helm runs, one cache of charts.
#[derive(Clone, Debug)]
pub struct Tools {
    pub helm: Arc<Helm>,
    pub charts: Arc<ChartCache>,
}

/// How long running helms may go on when the process is asked to stop.
const DRAIN: Duration = Duration::from_secs(15);
/// The pause after a write that somebody else's write overtook.
const AFTER_CONFLICT: Duration = Duration::from_millis(250);
/// The pause between two rounds of seeing to the CRD, while it is not as it should be.
const CRD_EVERY: Duration = Duration::from_secs(1);
/// Events taken in before the next look at the Tenants.
const BATCH: usize = 512;

/// Reconciles the member until `stop`. Returns when no helm run of ours lives and the Lease is given up.
pub async fn run(
    member: Member,
    tools: Tools,
    desired: watch::Receiver<Arc<DesiredState>>,
    board: Arc<ReportBoard>,
    stop: CancellationToken,
) {
    let (holds, hold) = watch::channel(Hold::default());
    let idle = CancellationToken::new();
    let lease = tokio::spawn(fence::hold(
        member.client.clone(),
        LeaseName::of_member(),
        member.holder.clone(),
        holds,
        stop.clone(),
        idle.clone(),
    ));
    let (handle, signal) = StopHandle::new();
    let handle = Arc::new(handle);
    let watchdog = tokio::spawn(watchdog(hold.clone(), Arc::clone(&handle)));
    let member = Arc::new(member);
    let performer = Arc::new(Performer {
        member: Arc::clone(&member),
        tools,
        events: Events::start(member.client.clone(), member.instance.clone()),
        board: Arc::clone(&board),
        hold: hold.clone(),
        stop: signal,
    });
    let mut reconciler = Reconciler {
        index: Index::new(&member.name, member.source_namespace.as_deref()),
        member,
        performer,
        board,
        desired,
        hold,
        recorded: None,
        ahead: None,
        recording: JoinSet::new(),
        jobs: JoinSet::new(),
        crd_jobs: JoinSet::new(),
        crd_checked: false,
        crd_not_before: Boot::default(),
        slots: BTreeMap::new(),
        facts: BTreeMap::new(),
        dirty: BTreeSet::new(),
        wakes: BTreeSet::new(),
        permitted: false,
        problem: None,
    };
    reconciler.follow(&stop).await;
    reconciler.drain(&handle).await;
    idle.cancel();
    watchdog.abort();
    if let Err(error) = lease.await {
        tracing::error!(%error, "the Lease's task ended badly");
    }
}

/// Kills what runs when the Lease has not been renewed for `KILL_AFTER` (design §3, rule 5).
async fn watchdog(mut hold: watch::Receiver<Hold>, handle: Arc<StopHandle>) {
    loop {
        let renewed = hold.borrow_and_update().renewed;
        let Some(renewed) = renewed else {
            handle.kill();
            if hold.changed().await.is_err() {
                return;
            }
            continue;
        };
        handle.permit();
        let left = KILL_AFTER.saturating_sub(Boot::now().since(renewed));
        tokio::select! {
            changed = hold.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(left) => {
                if Boot::now().since(renewed) >= KILL_AFTER && hold.borrow().renewed == Some(renewed) {
                    handle.kill();
                    if hold.changed().await.is_err() {
                        return;
                    }
                }
            }
        }
    }
}

/// What is kept for a Tenant between two looks.
#[derive(Default)]
struct Slot {
    memory: Memory,
    busy: bool,
    wake: Option<Boot>,
    /// Not to be looked at before, since a write did not go through.
    not_before: Option<Boot>,
    stumbles: u32,
}

struct Reconciler {
    member: Arc<Member>,
    performer: Arc<Performer>,
    board: Arc<ReportBoard>,
    index: Index,
    desired: watch::Receiver<Arc<DesiredState>>,
    hold: watch::Receiver<Hold>,
    /// The desired state that is on record on the member, and so may be acted on.
    recorded: Option<Arc<DesiredState>>,
    ahead: Option<Version>,
    recording: JoinSet<(Arc<DesiredState>, Result<Advance, String>)>,
    jobs: JoinSet<Done>,
    crd_jobs: JoinSet<Result<(), String>>,
    /// The CRD is up to date and nothing waits to be put back.
    crd_checked: bool,
    crd_not_before: Boot,
    slots: BTreeMap<TenantKey, Slot>,
    facts: BTreeMap<ReleaseKey, Arc<Release>>,
    dirty: BTreeSet<TenantKey>,
    wakes: BTreeSet<(Boot, TenantKey)>,
    permitted: bool,
    problem: Option<String>,
}

impl Reconciler {
    async fn follow(&mut self, stop: &CancellationToken) {
        let mut watches = watches::all_but_tenants(&self.member.client);
        let mut tenants: Option<Watch> = None;
        loop {
            let now = Boot::now();
            self.see_to_member(now);
            self.see_to_tenants(now);
            self.report_member(now);
            if self.index.crd() == Some(CrdState::Present) && tenants.is_none() {
                tenants = Some(watches::tenants(&self.member.client));
            }
            let wake = self.next_wake(now);
            tokio::select! {
                () = stop.cancelled() => return,
                Some(seen) = watches.next() => {
                    self.see(seen, &mut tenants);
                    // What is ready already is taken in together.
                    for _ in 0..BATCH {
                        match futures::FutureExt::now_or_never(watches.next()) {
                            Some(Some(seen)) => self.see(seen, &mut tenants),
                            _ => break,
                        }
                    }
                }
                Some(seen) = next_of(&mut tenants) => {
                    self.see(seen, &mut tenants);
                    for _ in 0..BATCH {
                        match futures::FutureExt::now_or_never(next_of(&mut tenants)) {
                            Some(Some(seen)) => self.see(seen, &mut tenants),
                            _ => break,
                        }
                    }
                }
                Some(done) = self.jobs.join_next(), if !self.jobs.is_empty() => {
                    self.finish(done);
                }
                Some(done) = self.recording.join_next(), if !self.recording.is_empty() => {
                    self.finish_recording(done);
                }
                Some(done) = self.crd_jobs.join_next(), if !self.crd_jobs.is_empty() => {
                    self.finish_crd(done);
                }
                changed = self.desired.changed() => {
                    if changed.is_err() { return }
                    self.look_at_all();
                }
                changed = self.hold.changed() => if changed.is_err() { return },
                () = sleep_until(wake, now) => {}
            }
        }
    }

    /// Lets what runs end by itself, then asks it to, then makes it.
    async fn drain(&mut self, handle: &StopHandle) {
        self.crd_jobs.abort_all();
        self.recording.abort_all();
        let ended = async { while self.jobs.join_next().await.is_some() {} };
        if tokio::time::timeout(DRAIN, ended).await.is_err() {
            tracing::info!(member = %self.member.name, "asking the running helm processes to stop");
            handle.soft();
        }
        while self.jobs.join_next().await.is_some() {}
    }

    fn see(&mut self, seen: Seen, tenants: &mut Option<Watch>) {
        let dirty = match seen {
            Seen::Tenant(event) => {
                let event = self.decoded(event);
                event.map(|event| self.index.tenant_event(event)).unwrap_or_default()
            }
            Seen::Release(event) => self.index.release_event(event),
            Seen::Workspace(event) => self.index.workspace_event(event),
            Seen::Deployment(event) => self.index.workload_event(
                WorkloadKind::Deployment,
                event,
                workload::deployment,
            ),
            Seen::StatefulSet(event) => self.index.workload_event(
                WorkloadKind::StatefulSet,
                event,
                workload::stateful_set,
            ),
            Seen::DaemonSet(event) => {
                self.index.workload_event(WorkloadKind::DaemonSet, event, workload::daemon_set)
            }
            Seen::Crd(event) => {
                let before = self.index.crd();
                self.index.crd_event(event);
                let after = self.index.crd();
                if after != before {
                    tracing::debug!(member = %self.member.name, crd = ?after, "the Tenant CRD");
                    self.crd_checked = false;
                    // The watch on Tenants starts anew with the CRD, without its back-off.
                    if after != Some(CrdState::Terminating) {
                        *tenants = None;
                    }
                    self.look_at_all();
                }
                BTreeSet::new()
            }
            Seen::Failed { what, error } => {
                self.problem = Some(format!("watching {what}: {}", Chain(&error)));
                tracing::debug!(member = %self.member.name, what, error = %Chain(&error), "watch failed; it is tried again");
                return;
            }
        };
        self.problem = None;
        self.dirty.extend(dirty);
    }

    /// Drops a Tenant that does not decode, by name and with the reason, and Tenants that are not
    /// ours to see.
    fn decoded(
        &self,
        event: Event<kube::core::DeserializeGuard<Tenant>>,
    ) -> Option<Event<Tenant>> {
        let read = |guard: kube::core::DeserializeGuard<Tenant>| match guard.0 {
            Ok(tenant) => Some(tenant),
            Err(invalid) => {
                let mut named = Tenant::new("", TenantSpec::default());
                named.metadata = invalid.metadata;
                let message = format!(
                    "this Tenant cannot be read and is left alone until it is corrected: {}",
                    invalid.error
                );
                tracing::warn!(member = %self.member.name,
                    namespace = named.metadata.namespace, name = named.metadata.name, %message);
                let told = Told { warning: true, reason: "TenantInvalid", message };
                self.performer.events.tell(&named, told);
                None
            }
        };
        let ours = |tenant: &Tenant| match (&self.member.namespaces, &tenant.metadata.namespace) {
            (Some(namespaces), Some(namespace)) => namespaces.contains(namespace),
            _ => true,
        };
        let read = |guard| read(guard).filter(&ours);
        Some(match event {
            Event::Apply(guard) => Event::Apply(read(guard)?),
            Event::Delete(guard) => Event::Delete(read(guard)?),
            Event::Init => Event::Init,
            Event::InitApply(guard) => Event::InitApply(read(guard)?),
            Event::InitDone => Event::InitDone,
        })
    }

    fn look_at_all(&mut self) {
        let keys: Vec<TenantKey> = self.index.tenants.iter().map(|(key, _)| key.clone()).collect();
        self.dirty.extend(keys);
    }

    /// Permit, record and CRD: what comes before any Tenant.
    fn see_to_member(&mut self, now: Boot) {
        let permitted = self.hold.borrow_and_update().may_start(now);
        if permitted != self.permitted {
            self.permitted = permitted;
            tracing::info!(member = %self.member.name, permitted, "the Lease");
            if !permitted {
                // Another writer may have been here meanwhile.
                self.recorded = None;
            }
            self.look_at_all();
        }
        if !permitted {
            return;
        }
        let wanted = Arc::clone(&self.desired.borrow());
        let on_record = self.recorded.as_ref().is_some_and(|recorded| **recorded == *wanted);
        if !on_record && self.recording.is_empty() {
            let client = self.member.client.clone();
            let retry = self.ahead.is_some() || self.problem.is_some();
            self.recording.spawn(async move {
                if retry {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                let result = ledger::record(&client, &wanted).await;
                (wanted, result.map_err(|error| Chain(&error).to_string()))
            });
        }
        if let Some(state) = self.index.crd()
            && !self.crd_checked
            && self.crd_jobs.is_empty()
            && now >= self.crd_not_before
        {
            let client = self.member.client.clone();
            let events = self.performer.events.clone();
            self.crd_jobs.spawn(async move {
                see_to_crd(&client, state, &events).await
            });
        }
    }

    fn finish_recording(
        &mut self,
        done: Result<(Arc<DesiredState>, Result<Advance, String>), tokio::task::JoinError>,
    ) {
        let Ok((desired, result)) = done else { return };
        match result {
            Ok(Advance::Recorded | Advance::Record) => {
                self.ahead = None;
                self.recorded = Some(desired);
                self.look_at_all();
            }
            Ok(Advance::Refuse(version)) => {
                if self.ahead != Some(version) {
                    tracing::warn!(member = %self.member.name, recorded = %version, given = %desired.version,
                        "the member has seen a later desired state; not acting on this one");
                }
                self.ahead = Some(version);
            }
            Err(problem) => self.problem = Some(problem),
        }
    }

    fn finish_crd(&mut self, done: Result<Result<(), String>, tokio::task::JoinError>) {
        self.crd_not_before = Boot(Boot::now().0 + CRD_EVERY);
        match done {
            Ok(Ok(())) => {
                self.crd_checked = self.index.crd() == Some(CrdState::Present);
                self.look_at_all();
            }
            Ok(Err(problem)) => {
                tracing::warn!(member = %self.member.name, %problem, "the Tenant CRD");
                self.problem = Some(problem);
            }
            Err(_) => {}
        }
    }

    fn see_to_tenants(&mut self, now: Boot) {
        while let Some((at, key)) = self.wakes.first().cloned()
            && at <= now
        {
            self.wakes.remove(&(at, key.clone()));
            self.dirty.insert(key);
        }
        // Before the lists are complete, and while the CRD goes, absence means nothing.
        if !self.index.synced() || self.index.crd() != Some(CrdState::Present) {
            return;
        }
        for key in std::mem::take(&mut self.dirty) {
            self.look_at(&key, now);
        }
    }

    fn look_at(&mut self, key: &TenantKey, now: Boot) {
        let Some(tenant) = self.index.tenants.get(key).cloned() else {
            if self.slots.get(key).is_none_or(|slot| !slot.busy) {
                self.slots.remove(key);
                self.board.tenant(key, None);
            }
            return;
        };
        let slot = self.slots.entry(key.clone()).or_default();
        // A busy one is looked at when it is done.
        if slot.busy {
            return;
        }
        if let Some(at) = slot.not_before
            && now < at
        {
            self.wakes.insert((at, key.clone()));
            return;
        }
        slot.memory.known_since.get_or_insert(now);
        let release_key = self.index.release_key(&tenant);
        let revisions = self.index.release(&release_key);
        slot.memory.locked = revisions
            .last()
            .filter(|revision| revision.status.is_pending())
            .map(|revision| match slot.memory.locked {
                Some((number, since)) if number == revision.revision => (number, since),
                _ => (revision.revision, now),
            });
        let claimants = self.index.claimants(&release_key);
        let claimants: Vec<&Tenant> = claimants.into_iter().map(Arc::as_ref).collect();
        let facts = self.facts.get(&release_key);
        let facts = facts.filter(|facts| {
            revisions.last().is_some_and(|newest| newest.revision == facts.revision)
        });
        let seen = self.index.release_workloads(&release_key);
        let unready = workload::unready(facts.map(|facts| facts.workloads.as_slice()), &seen);
        let wanted = Arc::clone(&self.desired.borrow());
        let desired = match &self.recorded {
            Some(recorded) if self.permitted => Arc::clone(recorded),
            _ => wanted,
        };
        let others = self.index.users(&release_key.namespace).into_iter().any(|user| user != *key);
        let view = View {
            cluster: &self.member.name,
            source_namespace: self.member.source_namespace.as_deref(),
            now,
            policy: &self.member.policy,
            permit: permit(&self.hold.borrow(), self.permitted, self.recorded.is_some()),
            desired: &desired,
            tenant: &tenant,
            release_key: &release_key,
            revisions: &revisions,
            claimants: &claimants,
            workspace: self.index.workspaces.get(&release_key.namespace),
            workspace_shared: others || self.index.has_releases(&release_key.namespace),
            facts: facts.map(Arc::as_ref),
            unready: unready.as_deref(),
            memory: &slot.memory,
        };
        let plan = plan::plan(&view);
        let workspace_exists = view.workspace.is_some();
        let before = view_said(&slot.memory, &tenant, &self.member.name);
        if let Some(at) = slot.wake.take() {
            self.wakes.remove(&(at, key.clone()));
        }
        if let Some(at) = plan.wake {
            slot.wake = Some(at);
            self.wakes.insert((at, key.clone()));
        }
        // The first look is a report in itself: until then the Tenant would seem not to be here.
        if plan.ours && self.board.generation(key).is_none() {
            let status = tenant.status.as_ref();
            let report = TenantReport {
                observed_generation: tenant.metadata.generation.unwrap_or_default(),
                applied_chart: status
                    .and_then(|status| status.last_applied_chart.clone())
                    .unwrap_or_default(),
                state: before.clone().unwrap_or_else(|| plan.state.clone()),
            };
            self.board.tenant(key, Some(report));
        }
        if plan.action == Action::Nothing && !self.news(key, &tenant, &plan) {
            return;
        }
        let job = Job {
            key: key.clone(),
            newest: revisions.last().map(|newest| (*newest).clone()),
            tenant,
            plan,
            before,
            release: release_key,
            workspace_exists,
            desired: Arc::clone(&desired),
        };
        if let Some(slot) = self.slots.get_mut(key) {
            slot.busy = true;
        }
        self.jobs.spawn(Arc::clone(&self.performer).perform(job));
    }

    /// Whether there is anything to say. When not, the pass over this Tenant costs nothing.
    fn news(&self, key: &TenantKey, tenant: &Tenant, plan: &plan::Plan) -> bool {
        let said = self.slots.get(key).and_then(|slot| slot.memory.said.as_ref());
        if said != Some(&plan.state) {
            return true;
        }
        if self.member.status == StatusMode::Report || !self.permitted {
            return self.board.generation(key) != Some(tenant.metadata.generation.unwrap_or_default())
                && plan.ours;
        }
        let next = crate::status::status(
            tenant,
            &self.member.name,
            &plan.state,
            plan.applied_chart.as_deref(),
            self.member.allow_chart_skip,
            Timestamp::UNIX_EPOCH,
        );
        tenant.status.as_ref().is_none_or(|status| !same_but_for_time(status, &next))
    }

    fn finish(&mut self, done: Result<Done, tokio::task::JoinError>) {
        let done = match done {
            Ok(done) => done,
            Err(error) => {
                tracing::error!(%error, member = %self.member.name, "an action ended badly");
                return;
            }
        };
        let now = Boot::now();
        if let Some(tenant) = done.tenant {
            let dirty = self.index.tenant_written(tenant);
            self.dirty.extend(dirty);
        }
        if let Some(meta) = done.workspace {
            let dirty = self.index.workspace_event(Event::Apply(meta));
            self.dirty.extend(dirty);
        }
        match done.release {
            Some(ReleaseNews::All { metas, version }) => {
                self.index.release_listed(&done.of, metas, version);
            }
            Some(ReleaseNews::Added(meta)) => {
                let dirty = self.index.release_event(Event::Apply(meta));
                self.dirty.extend(dirty);
            }
            None => {}
        }
        if let Some(facts) = done.facts {
            self.facts.insert(done.of.clone(), Arc::new(facts));
        } else if self.index.release(&done.of).is_empty() {
            self.facts.remove(&done.of);
        }
        let slot = self.slots.entry(done.key.clone()).or_default();
        slot.busy = false;
        slot.not_before = None;
        if done.said.is_some() {
            slot.memory.said = done.said;
        }
        if let Some(run) = done.applied {
            slot.memory.applied = Some(Applied { run, ended: now });
        }
        match done.fault {
            None => {
                slot.stumbles = 0;
                if done.progressed {
                    slot.memory.failure = None;
                }
            }
            Some(Fault::Stale) => slot.not_before = Some(Boot(now.0 + AFTER_CONFLICT)),
            Some(Fault::Passing(problem)) => {
                slot.stumbles += 1;
                let pause = plan::backoff(slot.stumbles, self.member.retry_max, rand::random());
                slot.not_before = Some(Boot(now.0 + pause));
                tracing::warn!(member = %self.member.name, tenant = %done.key, %problem,
                    retry_in_seconds = pause.as_secs(), "not done");
            }
            Some(Fault::Shown { reason, message, permanent }) => {
                let attempts = slot.memory.failure.as_ref().map_or(0, |failure| {
                    let same = failure.generation == done.generation
                        && failure.fingerprint == done.fingerprint;
                    if same { failure.attempts } else { 0 }
                }) + 1;
                let cap = self.member.retry_max;
                let pause = if permanent {
                    cap
                } else {
                    plan::backoff(attempts, cap, rand::random())
                };
                tracing::warn!(member = %self.member.name, tenant = %done.key, reason, %message,
                    attempts, retry_in_seconds = pause.as_secs(), "failed");
                slot.memory.failure = Some(Failure {
                    reason,
                    message,
                    attempts,
                    retry_at: Boot(now.0 + pause),
                    fingerprint: done.fingerprint,
                    generation: done.generation,
                });
            }
        }
        self.dirty.insert(done.key);
    }

    fn report_member(&mut self, now: Boot) {
        let hold = self.hold.borrow().clone();
        let connected = hold.connected(now);
        let report = MemberReport {
            // By now every Tenant that was listed has its report.
            synced: self.index.synced() && self.index.crd() == Some(CrdState::Present),
            writing: self.permitted,
            other_holder: hold.other.clone(),
            connected,
            problem: hold.problem.or_else(|| self.problem.clone()).filter(|_| !connected || !self.index.synced()),
            applied: self.recorded.as_ref().map(|desired| (desired.version, desired.digest())),
            ahead: self.ahead,
        };
        self.board.member(&report);
    }

    fn next_wake(&self, now: Boot) -> Option<Boot> {
        let tenant = self.wakes.first().map(|(at, _)| *at);
        let hold = self.hold.borrow();
        // The permit and the connection run out without any event.
        let expiry = [hold.renewed, hold.heard]
            .into_iter()
            .flatten()
            .map(|time| Boot(time.0 + NO_NEW_RUNS_AFTER))
            .filter(|at| *at > now)
            .min();
        let crd = (self.permitted && !self.crd_checked).then_some(self.crd_not_before);
        tenant.into_iter().chain(expiry).chain(crd.filter(|at| *at > now)).min()
    }
}

fn permit(hold: &Hold, permitted: bool, recorded: bool) -> Permit {
    match (permitted, recorded, &hold.other) {
        (true, true, _) => Permit::Granted,
        (true, false, _) => {
            Permit::Withheld("the desired state is not yet on record on this cluster".to_owned())
        }
        (false, _, Some(other)) => {
            Permit::Withheld(format!("{other} holds the Lease of this cluster"))
        }
        (false, _, None) => Permit::Withheld("the Lease of this cluster is not ours".to_owned()),
    }
}

fn view_said(memory: &Memory, tenant: &Tenant, cluster: &str) -> Option<ClusterState> {
    memory.said.clone().or_else(|| {
        let conditions = &tenant.status.as_ref()?.conditions;
        krypton_common::conditions::clusters(conditions).remove(cluster)
    })
}

fn same_but_for_time(
    a: &krypton_crds::tenant::TenantStatus,
    b: &krypton_crds::tenant::TenantStatus,
) -> bool {
    let timeless = |status: &krypton_crds::tenant::TenantStatus| {
        let mut status = status.clone();
        for condition in &mut status.conditions {
            condition.last_transition_time.0 = Timestamp::UNIX_EPOCH;
        }
        status
    };
    timeless(a) == timeless(b)
}

/// Rescue while the CRD goes; otherwise make sure of it, and put back what was rescued.
async fn see_to_crd(client: &Client, state: CrdState, events: &Events) -> Result<(), String> {
    if state == CrdState::Terminating {
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        let crd = crds.get_metadata_opt(Tenant::crd_name()).await.map_err(|error| error.to_string())?;
        let Some(deleted) = crd.and_then(|crd| crd.metadata.deletion_timestamp) else {
            return Ok(());
        };
        let released = rescue::keep_and_release(client, deleted.0)
            .await
            .map_err(|error| Chain(&error).to_string())?;
        if released > 0 {
            tracing::warn!(
                released,
                "the Tenant CRD is being deleted: Tenants are kept and let go, nothing is uninstalled"
            );
        }
        return Ok(());
    }
    crate::crd::ensure(client, &Tenant::crd()).await.map_err(|error| Chain(&error).to_string())?;
    for tenant in rescue::restore(client).await.map_err(|error| Chain(&error).to_string())? {
        let message = "put back after its CRD had been deleted; its release was left alone";
        let told = Told { warning: true, reason: "TenantRestored", message: message.to_owned() };
        events.tell(&tenant, told);
    }
    Ok(())
}

async fn next_of(watch: &mut Option<Watch>) -> Option<Seen> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Boot>, now: Boot) {
    match at {
        Some(at) => tokio::time::sleep(at.since(now)).await,
        None => std::future::pending().await,
    }
}
