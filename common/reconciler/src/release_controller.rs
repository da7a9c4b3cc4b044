//! Reconciles one Tenant or KryptonDeployment at a time: plans, runs the action and records the result.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use krypton_helm::chart::ChartRef;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_helm::slots::priority::Priority;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::lease::LeaseState;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::retry::backoff;
use krypton_types::conditions::{ClusterState, reason as why};
use krypton_types::desired::DesiredState;
use krypton_types::names;
use krypton_types::tenant::Next;
use tokio::task::{Id, JoinError};
use tracing::{Instrument as _, Span};

use super::digests::Digests;
use super::helm_queue::{Failed, Need, Ready, Waited};
use crate::actions::{ActionError, Job, JobResult, ReleaseNews, runs_helm};
use crate::index::CrdState;
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::placed_tenants::STALE_IS_SAID;
use crate::plan::{
    self, Action, Applied, Attempt, Failure, Permit, Plan, Refusal, Remediation, View,
};
use crate::run_loop::{AFTER_CONFLICT, Reconciler, StatusMode};
use crate::status::throttle;
use crate::turns::Place;
use crate::workload::{self, Strays};

/// Number of consecutive failed requests before a condition shows the failure.
const SHOWN_AFTER: u32 = 3;
/// Longest pause after a failure that the release did not cause.
const LOCAL_RETRY_MAX: Duration = Duration::from_secs(30);

/// The plan for one owner of a release, and its inputs.
struct Decided {
    owner: ReleaseOwner,
    release: ReleaseKey,
    newest: Option<Revision>,
    plan: Plan,
    need: Option<Need>,
    /// The chart and the Helm slot, if the action waited for them and has them.
    ready: Option<Ready>,
    told: Option<ClusterState>,
    next: Option<Next>,
    workspace_exists: bool,
    permitted: bool,
    last: bool,
    desired: Arc<DesiredState>,
    fingerprint: Arc<str>,
}

impl Reconciler {
    /// Returns the desired state to act on: with the permit the recorded one, otherwise the latest, for observation.
    pub(super) fn desired_now(&self) -> Arc<DesiredState> {
        match &self.recorded {
            Some(recorded) if self.permitted => Arc::clone(recorded),
            _ => self.desired.get(),
        }
    }

    /// Applies the orders of the desired state that is in effect.
    pub(super) fn take_orders(&mut self) {
        let desired = self.desired_now();
        if !self.digests.are_of(&desired) {
            let dirty = self.index.ordered(&desired.deployments);
            self.dirty.extend(dirty);
            for left in self.placed_tenants.ordered(&desired.placed) {
                self.report_store.placed(&left, None);
            }
            self.digests = Digests::of(desired);
        }
    }

    pub(super) fn reconcile_owners(&mut self, now: BootTime) {
        while let Some((at, key)) = self.wakes.first().cloned()
            && at <= now
        {
            self.wakes.remove(&(at, key.clone()));
            self.dirty.insert(key);
        }
        // A missing object means nothing until the lists are complete.
        if !self.index.ready() {
            self.helm.give_back();
            return;
        }
        // The same applies to Tenants while their CRD is being deleted. Deployments don't depend on the CRD.
        let tenants = self.index.synced()
            && self.index.crd() == Some(CrdState::Present)
            && !(self.permitted && self.crd_lost)
            && self.listed.will_do(self.permitted);
        // Owners that wait for a turn go before new ones.
        while let Some(key) = self.calls.next() {
            match &key {
                OwnerKey::Tenant(tenant) if !tenants || self.is_kept(tenant) => {
                    self.calls.leave(&key);
                    self.dirty.insert(key);
                }
                _ => self.look_at(&key, now),
            }
        }
        for key in std::mem::take(&mut self.dirty) {
            match &key {
                OwnerKey::Tenant(tenant) if !tenants || self.is_kept(tenant) => {
                    self.dirty.insert(key);
                }
                _ => self.look_at(&key, now),
            }
        }
        self.helm.give_back();
    }

    /// Returns the number of waiting owners: for complete lists, for a turn, and for Helm with high and low priority.
    pub(super) fn waiting(&self) -> [usize; 4] {
        let [urgent, runs] =
            [Priority::High, Priority::Low].map(|urgency| self.helm.waiting(urgency));
        [self.dirty.len(), self.calls.waiting(), urgent, runs]
    }

    fn look_at(&mut self, key: &OwnerKey, now: BootTime) {
        let place = self.calls.leave(key);
        let Some(owner) = self.index.owner(key) else {
            return self.forget(key);
        };
        let Some(decided) = self.decide(key, owner, now) else {
            return;
        };
        let (owner, plan) = (&decided.owner, &decided.plan);
        // Report a new owner before its first job ends. Without a report, it would seem to be missing on this member.
        if plan.ours && !self.report_store.has(key) {
            let before = self.slots.get(key);
            let before = before.and_then(|slot| slot.memory.last_word(owner, &self.member.name));
            let state = before.unwrap_or_else(|| plan.state.clone());
            self.report_store
                .put(owner, state, "", decided.next, plan.gone);
        }
        let revision = decided.newest.as_ref().map(|newest| newest.revision);
        if self.drift_first(key, plan, revision, now) {
            return;
        }
        if let Some(at) = self.words_wait(key, owner, plan, now) {
            self.wakes.insert((at, key.clone()));
            return;
        }
        if plan.action == Action::Nothing && !self.news(key, owner, plan, decided.next) {
            let release = (&decided.release, revision);
            self.begin_drift(key, owner, decided.plan, release, now);
            return;
        }
        self.begin(key, decided, place);
    }

    pub(crate) fn forget(&mut self, key: &OwnerKey) {
        self.drift_schedule.forget(key);
        self.helm.take(key, None);
        if self.slots.get(key).is_none_or(|slot| !slot.busy) {
            self.slots.remove(key);
            self.report_store.forget(key);
        }
    }

    /// Plans for one owner; `None` while its job runs or its back-off lasts.
    fn decide(&mut self, key: &OwnerKey, owner: ReleaseOwner, now: BootTime) -> Option<Decided> {
        let cluster = &self.member.name;
        let release_key = owner.release(cluster);
        let desired = self.desired_now();
        let mut users = self.index.users(&release_key.namespace).into_iter();
        let others = users.any(|user| user != *key && self.uses_workspace(&user, &desired))
            || self.is_kept_for(&release_key.namespace);
        let last = self.is_last(key, &owner, &desired);
        let slot = self.slots.entry(key.clone()).or_default();
        // The end of the job starts another plan.
        if slot.busy {
            return None;
        }
        let chart = desired.chart_with(owner.values());
        let fingerprint = match &chart {
            Cow::Borrowed(_) => self.digests.chart(&desired),
            Cow::Owned(chart) => slot.own_chart.fingerprint(chart, &desired, &owner),
        };
        if let Some(at) = slot.not_before
            && now < at
            && slot.held_for(&owner, &desired, &fingerprint)
        {
            self.wakes.insert((at, key.clone()));
            return None;
        }
        let revisions = self.index.release(&release_key);
        let memory = &mut slot.memory;
        memory.look(&owner, cluster, &revisions, now);
        if !owner.is_going() && !desired.retire {
            // The hub withdrew the order, and may repeat it.
            memory.let_go = None;
        }
        let claimants = self.index.claimants(&release_key);
        let newest = revisions.last().copied();
        let facts = self.facts.get(&release_key);
        let facts =
            facts.filter(|facts| newest.is_some_and(|newest| newest.revision == facts.revision));
        let seen = self.index.release_workloads(&release_key);
        let strays = Strays::of(&release_key.namespace, newest);
        let expected = facts.map(|facts| facts.workloads.as_slice());
        let unready = workload::unready(expected, &seen, strays);
        let elsewhere = is_lost(&owner, cluster, revisions.is_empty())
            .then(|| self.index.foreign_elsewhere(&release_key))
            .flatten();
        let allowed = self.member.allowed.get();
        let recorded = self.recorded.is_some() && !self.misses_pause;
        let view = View {
            cluster,
            source_namespace: self.member.source_namespace.as_deref(),
            now,
            policy: &self.member.policy,
            permit: permit(&self.hold.get(), self.permitted, recorded),
            desired: &desired,
            chart: &chart,
            fingerprint: &fingerprint,
            owner: &owner,
            release_key: &release_key,
            revisions: &revisions,
            claimants: &claimants,
            workspace: self.index.workspaces.get(&release_key.namespace),
            elsewhere,
            workspace_shared: others,
            facts: facts.map(Arc::as_ref),
            unready: unready.as_deref(),
            allowed: &allowed,
            memory: &slot.memory,
        };
        let mut plan = plan::plan(&view);
        // Tenants that Krypton has not recreated yet may use it.
        if self.waiting.is_none() && plan.action == Action::DeleteWorkspace {
            plan.action = Action::Nothing;
        }
        let need = need(&plan.action, &view, slot.needs_slot);
        let (workspace_exists, permitted) =
            (view.workspace.is_some(), view.permit == Permit::Granted);
        let ready = self.helm.take(key, need.as_ref());
        let told = slot.memory.told.clone();
        let next = plan.next.map(|next| {
            let next = next.on_the_wall(now, clock::wall());
            next.settled(slot.memory.said_next.or(slot.memory.told_next))
        });
        if let Some(at) = slot.wake.take() {
            self.wakes.remove(&(at, key.clone()));
        }
        if let Some(at) = plan.wake {
            slot.wake = Some(at);
            self.wakes.insert((at, key.clone()));
        }
        Some(Decided {
            newest: newest.cloned(),
            release: release_key,
            owner,
            plan,
            need,
            ready,
            told,
            next,
            workspace_exists,
            permitted,
            last,
            desired: Arc::clone(&desired),
            fingerprint,
        })
    }

    /// Whether no owner stays on the member after this one.
    fn is_last(&self, key: &OwnerKey, owner: &ReleaseOwner, desired: &DesiredState) -> bool {
        if !owner.is_going() && !desired.retire {
            return false;
        }
        let source = self.member.source_namespace.as_deref();
        let mut others = self.index.owners().filter(|(other, _)| other != key);
        self.waiting.as_ref().is_some_and(BTreeMap::is_empty)
            && (desired.retire
                || !others
                    .any(|(_, other)| !other.is_going() && other.is_for(&self.member.name, source)))
    }

    /// Starts the action, or waits for its chart, slot or turn.
    fn begin(&mut self, key: &OwnerKey, decided: Decided, place: Option<Place>) {
        let Decided {
            newest,
            release,
            owner,
            plan,
            need,
            ready,
            told,
            next,
            workspace_exists,
            permitted,
            last,
            desired,
            fingerprint,
        } = decided;
        let span = match &ready {
            Some(ready) => ready.span.clone(),
            None => key.span(&self.member.name, owner.generation(), &release),
        };
        span.record("action", plan.action.name());
        let reading = matches!(plan.action, Action::ReadRelease(_));
        let attempt = Attempt::of(&owner, &desired, &fingerprint);
        if let Some(need) = need.filter(|_| ready.is_none()) {
            let of_member = (&*self.member.name, &self.performer.tools);
            if let Some(slot) = self.slots.get_mut(key) {
                slot.reading = reading;
            }
            self.helm.wait(key, need, attempt, span, of_member);
            return;
        }
        let turn = match &ready {
            Some(_) => None,
            None => match self.calls.take(key, place) {
                Some(turn) => Some(turn),
                None => return,
            },
        };
        if let Some(slot) = self.slots.get_mut(key) {
            slot.busy = true;
            slot.removing = owner.is_going();
            slot.reading = reading;
        }
        let revisions = self.index.release(&release).into_iter();
        let job = Job {
            key: key.clone(),
            newest,
            revisions: revisions.cloned().collect(),
            owner,
            plan,
            told,
            next,
            release,
            workspace_exists,
            tenants: self.index.crd().unwrap_or(CrdState::Missing),
            last,
            desired,
            fingerprint,
            permitted,
            ready,
            turn,
        };
        let performing = Arc::clone(&self.performer).perform(Box::new(job));
        let task = self.jobs.spawn(performing.instrument(span.clone())).id();
        self.running.insert(task, (key.clone(), attempt, span));
    }

    /// Whether the owner uses its workspace. An owner that lockdown refuses uses it only if its release exists.
    fn uses_workspace(&self, key: &OwnerKey, desired: &DesiredState) -> bool {
        if self.is_let_go(key) {
            return false;
        }
        let Some(owner) = self.index.owner(key) else {
            return true;
        };
        let release = owner.release(&self.member.name);
        let newest = self.index.release(&release).last().copied();
        let workspace = self.index.workspaces.get(&release.namespace);
        !desired.lockdown.no_cross_namespace_refs
            || newest.is_some()
            || plan::may_use(&owner, &release, workspace, newest)
    }

    /// Whether the deployment's cleanup is complete. It then uses no workspace.
    fn is_let_go(&self, key: &OwnerKey) -> bool {
        let let_go = self
            .slots
            .get(key)
            .and_then(|slot| slot.memory.let_go.as_deref());
        let owner = self.index.owner(key);
        owner.is_some_and(|owner| owner.is_going() && let_go == Some(owner.uid()))
    }

    /// Returns the time until which a new message waits, if nothing but the message has changed.
    fn words_wait(
        &self,
        key: &OwnerKey,
        owner: &ReleaseOwner,
        plan: &plan::Plan,
        now: BootTime,
    ) -> Option<BootTime> {
        let memory = &self.slots.get(key)?.memory;
        // A new generation must be reported as observed without delay.
        let known = self.report_store.is_of(key, owner);
        let said = memory.said.as_ref().zip(memory.said_at);
        let waits = plan.action == Action::Nothing && plan.ours && known;
        said.filter(|_| waits)
            .and_then(|said| throttle::not_before(Some(said), &plan.state, now))
    }

    /// Whether there is something to report or write. If not, the reconcile costs nothing.
    fn news(
        &self,
        key: &OwnerKey,
        owner: &ReleaseOwner,
        plan: &plan::Plan,
        next: Option<Next>,
    ) -> bool {
        let now = (Some(&plan.state), next);
        let memory = self.slots.get(key).map(|slot| &slot.memory);
        let said = memory.map(|memory| (memory.said.as_ref(), memory.said_next));
        if said != Some(now) {
            return true;
        }
        // A state that was only observed is published once this process holds the Lease.
        let told = memory.map(|memory| (memory.told.as_ref(), memory.told_next));
        if self.permitted && told != Some(now) {
            return true;
        }
        let written = owner.tenant().filter(|_| {
            // The hub writes the status of Tenants on the home cluster and of all deployments.
            self.permitted && self.member.status == StatusMode::Write
        });
        let Some(tenant) = written else {
            return !self.report_store.is_of(key, owner) && plan.ours;
        };
        let next = crate::status::status(
            tenant,
            &self.member.name,
            &plan.state,
            next,
            plan.applied_chart.as_deref(),
            self.desired_now().handling.allow_chart_skip,
            Timestamp::UNIX_EPOCH,
        );
        tenant
            .status
            .as_ref()
            .is_none_or(|status| !same_but_for_time(status, &next))
    }

    /// Plans again for a release that has its chart and slot now, or records why the wait failed.
    pub(super) fn finish_waiting(&mut self, ended: Result<(Id, Waited), JoinError>) {
        let failed = match self.helm.ended(ended) {
            None => return,
            Some(Ok(key)) => {
                self.dirty.insert(key);
                return;
            }
            Some(Err(failed)) => failed,
        };
        let Failed {
            key,
            action,
            attempt,
            begun,
            span,
            fault,
        } = failed;
        let now = BootTime::now();
        let outcome = fault.as_ref().map_or("failed", ActionError::outcome);
        span.record("outcome", outcome);
        let _within = span.entered();
        let work = &self.performer.tools.work;
        work.reconciled(&action, now.since(begun), outcome);
        match fault {
            Some(fault) => self.failed((&key, false), attempt, fault, now),
            None => {
                tracing::error!(member = %self.member.name, "the wait for Helm ended badly");
                let slot = self.slots.entry(key.clone()).or_default();
                slot.not_before = Some(BootTime(now.0 + self.member.retry_max));
                slot.held = Some(attempt);
            }
        }
        self.dirty.insert(key);
    }

    pub(super) fn finish(&mut self, done: Result<(Id, Box<JobResult>), JoinError>) {
        let now = BootTime::now();
        let task = done.as_ref().map_or_else(JoinError::id, |(task, _)| *task);
        let (of, span) = match self.running.remove(&task) {
            Some((key, attempt, span)) => (Some((key, attempt)), Some(span)),
            None => (None, None),
        };
        // The following log lines belong to the span of the same job.
        let _within = span.map(Span::entered);
        let done = match done {
            Ok((_, done)) => *done,
            Err(error) => {
                tracing::error!(%error, member = %self.member.name, "an action ended badly");
                if let Some((key, attempt)) = of
                    && let Some(slot) = self.slots.get_mut(&key)
                {
                    slot.panicked(attempt, BootTime(now.0 + self.member.retry_max));
                    self.dirty.insert(key);
                }
                return;
            }
        };
        if let Some(tenant) = done.tenant {
            let dirty = self.index.tenant_written(tenant);
            self.dirty.extend(dirty);
        }
        if let Some(meta) = done.workspace {
            let (namespaces, dirty) = self.index.workspace_written(&meta);
            self.placed_tenants.touch_namespaces(&namespaces);
            self.dirty.extend(dirty);
        }
        let one = match &done.release {
            Some(ReleaseNews::One(meta)) => Revision::of(meta).map(|(_, revision)| revision),
            _ => None,
        };
        match done.release {
            Some(ReleaseNews::All { metas, version }) => {
                self.index.release_listed(&done.of, metas, version);
            }
            Some(ReleaseNews::One(meta)) => {
                let dirty = self.index.release_read(&meta);
                self.dirty.extend(dirty);
            }
            None => {}
        }
        let read = done.facts.is_some();
        if let Some(facts) = done.facts {
            self.facts.insert(done.of.clone(), Arc::new(facts));
        } else if self.index.release(&done.of).is_empty() {
            self.facts.remove(&done.of);
        }
        let slot = self.slots.entry(done.key.clone()).or_default();
        (slot.busy, slot.removing) = (false, false);
        let reading = slot.reading;
        (slot.not_before, slot.held) = (None, None);
        slot.needs_slot = done.needs_slot;
        if read || one.is_some() {
            let unread = one.as_ref().filter(|_| !read);
            slot.memory.doubted = unread.map(|revision| revision.revision);
        }
        if read {
            slot.memory.unrecorded = done.unrecorded;
        }
        if read && let Some(one) = one {
            slot.memory.read(&one);
            let over = |failure: &mut Failure| failure.reason == why::RELEASE_TAMPERED;
            slot.memory.failure.take_if(over);
        }
        if done.let_go.is_some() {
            slot.memory.let_go = done.let_go;
        }
        if done.deletion_confirmed.is_some() {
            slot.deletion_confirmed = done.deletion_confirmed;
        }
        if done.said.is_some() {
            slot.memory.said = done.said;
            slot.memory.said_next = done.next;
            slot.memory.said_at = Some(now);
        }
        if done.told.is_some() {
            slot.memory.told = done.told;
            slot.memory.told_next = done.next;
        }
        if let Some(run) = done.applied {
            slot.memory.applied = Some(Applied { run, ended: now });
        }
        // Reporting a refusal does not end it.
        let refusal = slot.memory.refusal.as_ref();
        let of_action = refusal.is_some_and(|refusal| !refusal.of_status);
        let said_it = done.spoke && of_action;
        if !(said_it || matches!(done.fault, Some(ActionError::Conflict))) {
            slot.stale = 0;
        }
        match done.fault {
            None => {
                let over = |refusal: &Refusal| match reading {
                    true => refusal.of_reading,
                    false => !done.spoke || refusal.of_status,
                };
                if slot.memory.refusal.as_ref().is_none_or(over) {
                    slot.memory.refusal = None;
                    slot.failures = 0;
                }
                if done.progressed {
                    slot.memory.failure = None;
                }
            }
            Some(fault) => {
                let of = (&done.key, done.spoke);
                self.failed(of, done.attempt, fault, now);
            }
        }
        self.dirty.insert(done.key);
    }

    /// Records why an attempt failed, and the time of the next one.
    pub(crate) fn failed(
        &mut self,
        (key, spoke): (&OwnerKey, bool),
        attempt: Attempt,
        fault: ActionError,
        now: BootTime,
    ) {
        let slot = self.slots.entry(key.clone()).or_default();
        let fault = lasting(fault, slot.stale);
        let refused = matches!(fault, ActionError::Refused(_));
        match fault {
            ActionError::Conflict => {
                let pause = AFTER_CONFLICT * (1 << slot.stale.min(4));
                let pause = pause.mul_f64(1.0 + rand::random::<f64>());
                slot.stale += 1;
                slot.not_before = Some(BootTime(now.0 + pause));
            }
            ActionError::Transient(problem) | ActionError::Refused(problem) => {
                let before = slot.memory.refusal.take();
                let same = before.is_some_and(|before| before.attempt == attempt);
                slot.failures = if same { slot.failures + 1 } else { 1 };
                let pause = backoff(slot.failures, self.member.retry_max, rand::random());
                let retry_at = BootTime(now.0 + pause);
                let shown = refused || slot.failures >= SHOWN_AFTER;
                // Write the condition now, unless the API server refuses the status itself.
                if spoke || !shown {
                    (slot.not_before, slot.held) = (Some(retry_at), Some(attempt.clone()));
                }
                slot.memory.refusal = Some(Refusal {
                    message: problem.clone(),
                    attempts: slot.failures,
                    retry_at,
                    attempt,
                    of_status: spoke,
                    of_reading: slot.reading,
                    shown,
                });
                tracing::warn!(member = %self.member.name, %problem,
                    retry_in_seconds = pause.as_secs(), "not done");
            }
            ActionError::Failed {
                reason,
                message,
                permanent,
            } => {
                let before = slot.memory.failure.as_ref();
                let before = before.filter(|failure| failure.attempt == attempt);
                // Count failures of the release separately from other failures, because only they lead to giving up.
                let attempts = before
                    .filter(|failure| is_of_release(failure.reason) == is_of_release(reason))
                    .map_or(0, |failure| failure.attempts)
                    + 1;
                let policy = &self.member.policy;
                let counts =
                    policy.retries.is_some() || policy.remediation == Remediation::Rollback;
                let stands = counts
                    && !is_of_release(reason)
                    && before.is_some_and(|failure| is_of_release(failure.reason));
                let cap = match reason {
                    // A retry costs little, and the cause may end at any time.
                    why::HELM_UNAVAILABLE | why::SUSPENDED => {
                        self.member.retry_max.min(LOCAL_RETRY_MAX)
                    }
                    _ => self.member.retry_max,
                };
                let pause = if permanent {
                    cap
                } else {
                    backoff(attempts, cap, rand::random())
                };
                tracing::warn!(member = %self.member.name, reason, problem = %message,
                    attempts, retry_in_seconds = pause.as_secs(), "failed");
                // The report of this failure may be a write, too. A given-up release must not start again because of
                // it.
                if reason == why::SUSPENDED || stands {
                    slot.not_before = Some(BootTime(now.0 + pause));
                    slot.held = Some(attempt.clone());
                }
                if !stands {
                    slot.memory.failure = Some(Failure {
                        reason,
                        message,
                        attempts,
                        permanent,
                        retry_at: BootTime(now.0 + pause),
                        attempt,
                    });
                }
            }
        }
    }
}

/// Whether a Tenant was installed before, names no workspace, and has no release in its default workspace.
fn is_lost(owner: &ReleaseOwner, cluster: &str, has_none: bool) -> bool {
    let unnamed = owner.tenant().is_some_and(|tenant| {
        let workspace = tenant.spec.workspace.as_deref();
        workspace.unwrap_or_default().is_empty()
    });
    has_none
        && unnamed
        && owner
            .annotation(&names::fingerprint_annotation(cluster))
            .is_some()
}

/// Returns the needs of an action that requires a Helm slot; `None` for other actions.
fn need(action: &Action, view: &View<'_>, needs_slot: bool) -> Option<Need> {
    let chart = matches!(action, Action::Helm(_) | Action::InstallAgain).then(|| ChartRef {
        repo: view.chart.repo.clone(),
        name: view.chart.name.clone(),
        version: view.chart.version_to_fetch().into_owned(),
    });
    let reads = matches!(action, Action::ReadRelease(_) | Action::Unlock { .. });
    (runs_helm(action) || (needs_slot && reads)).then(|| Need {
        action: action.clone(),
        chart,
        urgency: action.urgency(view.memory.failure.is_some()),
        generation: view.owner.generation(),
    })
}

/// Whether the release itself failed, and not one of its prerequisites.
fn is_of_release(reason: &str) -> bool {
    [
        why::INSTALL_FAILED,
        why::UPGRADE_FAILED,
        why::ROLLBACK_FAILED,
        why::UNINSTALL_FAILED,
    ]
    .contains(&reason)
}

/// Turns a conflict that keeps recurring into a refusal, which the conditions show.
fn lasting(fault: ActionError, stale: u32) -> ActionError {
    match fault {
        ActionError::Conflict if stale >= STALE_IS_SAID => ActionError::Refused(
            "the API server keeps answering 404 or 409, or an object changes before each write; look for a proxy or \
             another controller"
                .to_owned(),
        ),
        fault => fault,
    }
}

fn permit(hold: &LeaseState, permitted: bool, recorded: bool) -> Permit {
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

fn same_but_for_time(
    a: &krypton_crds::tenant::TenantStatus,
    b: &krypton_crds::tenant::TenantStatus,
) -> bool {
    let timeless = |status: &krypton_crds::tenant::TenantStatus| {
        let mut status = status.clone();
        // A CRD of an earlier schema drops the next steps, so only the memory of the last write counts.
        status.next.clear();
        for condition in &mut status.conditions {
            condition.last_transition_time.0 = Timestamp::UNIX_EPOCH;
        }
        status
    };
    timeless(a) == timeless(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_stale_answer_is_shown() {
        let after = |stale| lasting(ActionError::Conflict, stale);
        assert!(matches!(after(STALE_IS_SAID - 1), ActionError::Conflict));
        assert!(matches!(after(STALE_IS_SAID), ActionError::Refused(_)));
        let passing = lasting(
            ActionError::Transient("no answer".to_owned()),
            STALE_IS_SAID,
        );
        assert!(matches!(passing, ActionError::Transient(_)));
    }
}
