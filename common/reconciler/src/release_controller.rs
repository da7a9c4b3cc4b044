//! Reconciles one Tenant or KryptonDeployment at a time: plans, runs the action and records the result.

mod outcome;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use krypton_helm::chart::ChartRef;
use krypton_helm::slots::priority::Priority;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::lease::LeaseState;
use krypton_runtime::newest::Newest as _;
use krypton_types::desired::DesiredState;
use krypton_types::names;
use krypton_types::tenant::Next;
use tracing::{Instrument as _, Span};

use super::digests::Digests;
use super::helm_queue::Need;
use crate::actions::{Job, runs_helm};
use crate::index::CrdState;
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::plan::{self, Action, Attempt, Permit, View};
use crate::run_loop::{Reconciler, StatusMode};
use crate::status::throttle;
use crate::workload::{self, Strays};

/// A running action.
pub(super) struct Running {
    key: OwnerKey,
    attempt: Attempt,
    span: Span,
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
            self.owners_changed(dirty);
            for left in self.placed_tenants.ordered(&desired.placed) {
                self.report_store.placed(&left, None);
            }
            self.digests = Digests::of(desired);
        }
    }

    pub(super) fn reconcile_owners(&mut self, now: BootTime) {
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
        self.queue.unpark();
        // Owners that wait for a turn go before new ones.
        while let Some(key) = self.calls.pop(now) {
            self.look_at(key, tenants, now);
        }
        let due: Vec<OwnerKey> = std::iter::from_fn(|| self.queue.pop(now)).collect();
        for key in due {
            self.look_at(key, tenants, now);
        }
        self.helm.give_back();
    }

    /// Returns the number of waiting owners: for complete lists, for a turn, and for Helm with high and low priority.
    pub(super) fn waiting(&self) -> [usize; 4] {
        let [urgent, runs] =
            [Priority::High, Priority::Low].map(|priority| self.helm.waiting(priority));
        [self.queue.ready(), self.calls.ready(), urgent, runs]
    }

    /// Reconciles an owner. `tenants` is true if the known Tenants are complete.
    fn look_at(&mut self, key: OwnerKey, tenants: bool, now: BootTime) {
        let waits_for_turn = match &key {
            OwnerKey::Tenant(tenant) if !tenants || self.is_kept(tenant) => {
                self.queue.park(key.clone());
                false
            }
            _ => self.reconcile_owner(&key, now),
        };
        // An owner that still waits keeps its position.
        if !waits_for_turn {
            self.calls.forget(&key);
        }
    }

    /// Plans for one owner and starts the action. Returns true if the action waits for a turn.
    fn reconcile_owner(&mut self, key: &OwnerKey, now: BootTime) -> bool {
        let Some(owner) = self.index.owner(key) else {
            self.forget(key);
            return false;
        };
        let Some((job, need)) = self.decide(key, owner, now) else {
            return false;
        };
        let (owner, plan) = (&job.owner, &job.plan);
        // Report a new owner before its first job ends. Without a report, it would seem to be missing on this member.
        if plan.ours && !self.report_store.has(key) {
            let before = self.slots.get(key);
            let before = before.and_then(|slot| slot.memory.last_word(owner, &self.member.name));
            let state = before.unwrap_or_else(|| plan.state.clone());
            self.report_store.put(owner, state, "", job.next, plan.gone);
        }
        let revision = job.newest.as_ref().map(|newest| newest.revision);
        if self.drift_first(key, plan, revision, now) {
            return false;
        }
        if let Some(at) = self.words_wait(key, owner, plan, now) {
            self.queue.add_at(key.clone(), at);
            return false;
        }
        if plan.action == Action::Nothing && !self.news(key, owner, plan, job.next) {
            let release = (&job.release, revision);
            self.begin_drift(key, &job.owner, job.plan, release, now);
            return false;
        }
        self.begin(job, need)
    }

    fn forget(&mut self, key: &OwnerKey) {
        self.drift_schedule.forget(key);
        self.helm.take(key, None);
        self.queue.forget(key);
        self.slots.remove(key);
        self.report_store.forget(key);
    }

    /// Plans for one owner; `None` while its back-off lasts. Returns the planned job, with its chart and slot if it
    /// has waited for them, and what it needs for a Helm run.
    fn decide(
        &mut self,
        key: &OwnerKey,
        owner: ReleaseOwner,
        now: BootTime,
    ) -> Option<(Job, Option<Need>)> {
        let cluster = &self.member.name;
        let release_key = owner.release(cluster);
        let desired = self.desired_now();
        let mut users = self.index.users(&release_key.namespace).into_iter();
        let others = users.any(|user| user != *key && self.uses_workspace(&user, &desired))
            || self.is_kept_for(&release_key.namespace);
        let last = self.is_last(key, &owner, &desired);
        let slot = self.slots.entry(key.clone()).or_default();
        let chart = desired.chart_with(owner.values());
        let fingerprint = match &chart {
            Cow::Borrowed(_) => self.digests.chart(&desired),
            Cow::Owned(chart) => slot.own_chart.fingerprint(chart, &desired, &owner),
        };
        if let Some(at) = slot.not_before
            && now < at
            && slot.held_for(&owner, &desired, &fingerprint)
        {
            self.queue.add_at(key.clone(), at);
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
        let release_details = self.release_details.get(&release_key);
        let release_details = release_details.filter(|release_details| {
            newest.is_some_and(|newest| newest.revision == release_details.revision)
        });
        let seen = self.index.release_workloads(&release_key);
        let strays = Strays::of(&release_key.namespace, newest);
        let expected = release_details.map(|release_details| release_details.workloads.as_slice());
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
            release_details: release_details.map(Arc::as_ref),
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
        slot.wake = plan.wake;
        if let Some(at) = plan.wake {
            self.queue.add_at(key.clone(), at);
        }
        let job = Job {
            key: key.clone(),
            newest: newest.cloned(),
            revisions: Vec::new(),
            known_version: self.index.release_version(&release_key),
            lists: self.index.lists(),
            owner,
            plan,
            told,
            next,
            workspace_exists,
            tenants: self.index.crd().unwrap_or(CrdState::Missing),
            last,
            desired: Arc::clone(&desired),
            fingerprint,
            permitted,
            ready,
            release: release_key,
        };
        Some((job, need))
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

    /// Starts the action, or waits for its chart, slot or turn. Returns true if it waits for a turn.
    fn begin(&mut self, mut job: Job, need: Option<Need>) -> bool {
        let key = job.key.clone();
        let span = match &job.ready {
            Some(ready) => ready.span.clone(),
            None => key.span(&self.member.name, job.owner.generation(), &job.release),
        };
        span.record("action", job.plan.action.name());
        let attempt = Attempt::of(&job.owner, &job.desired, &job.fingerprint);
        let slot = self.slots.entry(key.clone()).or_default();
        if job.ready.is_none() {
            if let Some(need) = need {
                slot.reading = matches!(job.plan.action, Action::ReadRelease(_));
                let of_member = (&*self.member.name, &self.performer.tools);
                self.helm.wait(&key, need, attempt, span, of_member);
                return false;
            }
            if !self.calls.is_free() {
                self.calls.add(key);
                return true;
            }
            self.calls.start(key.clone());
        }
        self.queue.start(key.clone());
        slot.removing = job.owner.is_going();
        slot.reading = matches!(job.plan.action, Action::ReadRelease(_));
        let revisions = self.index.release(&job.release).into_iter();
        job.revisions = revisions.cloned().collect();
        let performing = Arc::clone(&self.performer).perform(Box::new(job));
        let running = Running {
            key,
            attempt,
            span: span.clone(),
        };
        self.jobs.spawn(running, performing.instrument(span));
        false
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
        priority: action.priority(view.memory.failure.is_some()),
        generation: view.owner.generation(),
    })
}

fn permit(hold: &LeaseState, permitted: bool, recorded: bool) -> Permit {
    match (permitted, recorded, &hold.other) {
        (true, true, _) => Permit::Granted,
        (true, false, _) => {
            Permit::Withheld("the desired state is not recorded on this cluster yet".to_owned())
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
        status.next_steps.clear();
        for condition in &mut status.conditions {
            condition.last_transition_time.0 = Timestamp::UNIX_EPOCH;
        }
        status
    };
    timeless(a) == timeless(b)
}
