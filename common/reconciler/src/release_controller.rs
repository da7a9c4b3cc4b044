//! Reconciles one Tenant or KryptonDeployment at a time: plans, runs the action and records the result.

mod outcome;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use jiff::Timestamp;
use krypton_crds::tenant::TenantStatus;
use krypton_helm::chart::ChartRef;
use krypton_helm::slots::priority::Priority;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::lease::LeaseState;
use krypton_runtime::newest::Newest as _;
use krypton_types::deployment::ReportedRevisions;
use krypton_types::desired::DesiredState;
use krypton_types::names;
use tracing::Instrument as _;

use super::digests::DesiredDigests;
use super::helm_queue::HelmRequest;
use crate::actions::{Job, runs_helm};
use crate::index::CrdState;
use crate::inputs::StatusMode;
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::plan::{self, Action, Attempt, Permit, View};
use crate::reconciler::{Reconciler, RunningAction};
use crate::status::throttle;
use crate::workload::{self, StrayRule};

impl Reconciler {
    /// Returns the desired state to act on: with the permit the recorded one, otherwise the latest, for observation.
    pub(super) fn desired_now(&self) -> Arc<DesiredState> {
        match &self.recorded {
            Some(recorded) if self.permitted => Arc::clone(recorded),
            _ => self.desired.get(),
        }
    }

    /// Applies the orders of the desired state that is in effect.
    pub(super) fn apply_orders(&mut self) {
        let desired = self.desired_now();
        if !self.digests.is_for(&desired) {
            let changed = self.index.set_orders(&desired.deployments);
            self.owners_changed(changed);
            for removed in self.placed_tenants.set_orders(&desired.placed) {
                self.report_store.set_placed(&removed, None);
            }
            self.digests = DesiredDigests::new(desired);
        }
    }

    pub(super) fn reconcile_owners(&mut self, now: BootTime) {
        // A missing object means nothing until the lists are complete.
        if !self.index.ready() {
            self.helm_queue.release_unused();
            return;
        }
        // The same applies to Tenants while their CRD is being deleted. Deployments don't depend on the CRD.
        let tenants_complete = self.index.synced()
            && self.index.crd() == Some(CrdState::Present)
            && !(self.permitted && self.crd_was_missing)
            && self.listed_under.is_usable(self.permitted);
        self.queue.unpark();
        // Owners that wait for a turn go before new ones.
        while let Some(key) = self.action_queue.pop(now) {
            self.reconcile_or_park(key, tenants_complete, now);
        }
        let due: Vec<OwnerKey> = std::iter::from_fn(|| self.queue.pop(now)).collect();
        for key in due {
            self.reconcile_or_park(key, tenants_complete, now);
        }
        self.helm_queue.release_unused();
    }

    /// Returns the number of waiting owners: for complete lists, for a turn, and for Helm with high and low priority.
    pub(super) fn queue_depths(&self) -> [usize; 4] {
        let [high, low] =
            [Priority::High, Priority::Low].map(|priority| self.helm_queue.waiting_count(priority));
        [self.queue.ready(), self.action_queue.ready(), high, low]
    }

    /// Reconciles an owner. `tenants_complete` is true if the known Tenants are complete.
    fn reconcile_or_park(&mut self, key: OwnerKey, tenants_complete: bool, now: BootTime) {
        let waits_for_turn = match &key {
            OwnerKey::Tenant(tenant) if !tenants_complete || self.awaits_restore(tenant) => {
                self.queue.park(key.clone());
                false
            }
            _ => self.reconcile_owner(&key, now),
        };
        // An owner that still waits keeps its position.
        if !waits_for_turn {
            self.action_queue.forget(&key);
        }
    }

    /// Plans for one owner and starts the action. Returns true if the action waits for a turn.
    fn reconcile_owner(&mut self, key: &OwnerKey, now: BootTime) -> bool {
        let Some(owner) = self.index.owner(key) else {
            self.forget(key);
            return false;
        };
        self.report_store.update_labels(key, &owner);
        let Some((mut job, request)) = self.plan_owner(key, owner, now) else {
            return false;
        };
        let revisions = job.plan.revisions.take();
        let (owner, plan) = (&job.owner, &job.plan);
        // Report a new owner before its first job ends. Without a report, it would seem to be missing on this member.
        if plan.is_reported && !self.report_store.contains(key) {
            let previous = self.owner_states.get(key);
            let previous =
                previous.and_then(|state| state.memory.last_reported(owner, &self.member.name));
            let state = previous.unwrap_or_else(|| plan.state.clone());
            let answers = (job.next, job.handled_request.clone());
            self.report_store
                .set_owner(owner, state, "", answers, plan.gone);
        }
        if self.member.status_mode == StatusMode::Report {
            self.report_store.update_history(key, owner, &plan.history);
        }
        if let (Some(order), Some(revisions)) = (owner.deployment(), revisions) {
            let revisions = ReportedRevisions::new(self.member.program, revisions);
            self.report_store.update_revisions(order, revisions);
        }
        let revision = job.newest.as_ref().map(|newest| newest.revision);
        if self.drift_schedule.update(key, plan, revision, now) {
            return false;
        }
        if let Some(at) = self.message_not_before(key, owner, plan, now) {
            self.queue.add_at(key.clone(), at);
            return false;
        }
        if plan.action == Action::Nothing && !self.has_changes(&job) {
            self.drift_schedule
                .start(job, &self.index, &self.runner, now);
            return false;
        }
        self.start(job, request)
    }

    fn forget(&mut self, key: &OwnerKey) {
        self.drift_schedule.forget(key);
        self.helm_queue.take(key, None);
        self.queue.forget(key);
        self.owner_states.remove(key);
        self.report_store.remove(key);
    }

    /// Plans for one owner; `None` while its back-off lasts. Returns the planned job, with its chart and slot if it
    /// has waited for them, and what it needs for a Helm run.
    fn plan_owner(
        &mut self,
        key: &OwnerKey,
        owner: ReleaseOwner,
        now: BootTime,
    ) -> Option<(Job, Option<HelmRequest>)> {
        let cluster = &self.member.name;
        let release_key = owner.release(cluster);
        let desired = self.desired_now();
        let mut users = self
            .index
            .workspace_users(&release_key.namespace)
            .into_iter();
        let is_workspace_shared = users
            .any(|user| user != *key && self.uses_workspace(&user, &desired))
            || self.has_unrestored_in(&release_key.namespace);
        let is_last_owner = self.is_last(key, &owner, &desired);
        let state = self.owner_states.entry(key.clone()).or_default();
        if state.is_paused && plan::pause_reason(&owner, &desired).is_none() {
            state.is_paused = false;
            state.retry_read(now);
        }
        let chart = desired.chart_with(owner.values());
        let fingerprint = match &chart {
            Cow::Borrowed(_) => self.digests.chart(&desired),
            Cow::Owned(chart) => state.fingerprint_cache.fingerprint(chart, &desired, &owner),
        };
        if let Some(at) = state.not_before
            && now < at
            && state.holds_back(&owner, &desired, &fingerprint)
        {
            self.queue.add_at(key.clone(), at);
            return None;
        }
        let revisions = self.index.release_revisions(&release_key);
        let memory = &mut state.memory;
        memory.observe(&owner, cluster, &revisions, now);
        if !owner.is_being_removed() && !desired.retire {
            // The hub withdrew the order, and may repeat it.
            memory.cleaned_up = None;
        }
        let claimants = self.index.claimants(&release_key);
        let newest = revisions.last().copied();
        let release_details = self.release_details.get(&release_key);
        let release_details = release_details.filter(|release_details| {
            newest.is_some_and(|newest| newest.revision == release_details.revision)
        });
        let workload_states = self.index.release_workloads(&release_key);
        let stray_rule = StrayRule::for_release(&release_key.namespace, newest);
        let expected = release_details.map(|release_details| release_details.workloads.as_slice());
        let unready = workload::unready(expected, &workload_states, stray_rule);
        let elsewhere = may_have_lost_workspace(&owner, cluster, revisions.is_empty())
            .then(|| self.index.foreign_release_elsewhere(&release_key))
            .flatten();
        let allowed = self.member.allowed_namespaces.get();
        let is_recorded = self.recorded.is_some() && !self.pause_unrecorded;
        let view = View {
            cluster,
            program: self.member.program,
            source_namespace: self.member.source_namespace.as_deref(),
            now,
            policy: &self.member.policy,
            permit: permit(&self.lease_state.get(), self.permitted, is_recorded),
            desired: &desired,
            chart: &chart,
            fingerprint: &fingerprint,
            owner: &owner,
            release_key: &release_key,
            revisions: &revisions,
            claimants: &claimants,
            workspace: self.index.workspaces.get(&release_key.namespace),
            elsewhere,
            workspace_shared: is_workspace_shared,
            release_details: release_details.map(Arc::as_ref),
            unready: unready.as_deref(),
            allowed: &allowed,
            memory: &state.memory,
        };
        let mut plan = plan::plan(&view);
        // Tenants that Krypton has not recreated yet may use it.
        if self.unrestored.is_none() && plan.action == Action::DeleteWorkspace {
            plan.action = Action::Nothing;
        }
        let request = helm_request(&plan.action, &view, state.needs_slot);
        let (workspace_exists, permitted) =
            (view.workspace.is_some(), view.permit == Permit::Granted);
        let reservation = self.helm_queue.take(key, request.as_ref());
        let published = state.memory.published.clone();
        let next = plan.next.map(|next| {
            let next = next.to_wall_clock(now, clock::wall());
            next.settled(state.memory.reported_next.or(state.memory.published_next))
        });
        let handled_request = owner
            .reconcile_request()
            .filter(|_| plan.handles_request)
            .map(str::to_owned)
            .or_else(|| state.memory.handled_request.clone());
        state.wake = plan.wake;
        if let Some(at) = plan.wake {
            self.queue.add_at(key.clone(), at);
        }
        let job = Job {
            key: key.clone(),
            newest: newest.cloned(),
            revisions: Vec::new(),
            known_version: self.index.release_version(&release_key),
            lists: self.index.lists_started(),
            owner,
            plan,
            published,
            next,
            handled_request,
            workspace_exists,
            tenant_crd: self.index.crd().unwrap_or(CrdState::Missing),
            crd_losses: self.runner.crd_losses.load(Ordering::Relaxed),
            is_last_owner,
            desired: Arc::clone(&desired),
            fingerprint,
            permitted,
            reservation,
            release: release_key,
        };
        Some((job, request))
    }

    /// Whether no owner stays on the member after this one.
    fn is_last(&self, key: &OwnerKey, owner: &ReleaseOwner, desired: &DesiredState) -> bool {
        if !owner.is_being_removed() && !desired.retire {
            return false;
        }
        let source = self.member.source_namespace.as_deref();
        let mut others = self.index.owners().filter(|(other, _)| other != key);
        self.unrestored.as_ref().is_some_and(BTreeMap::is_empty)
            && (desired.retire
                || !others.any(|(_, other)| {
                    !other.is_being_removed() && other.is_for(&self.member.name, source)
                }))
    }

    /// Starts the action, or waits for its chart, slot or turn. Returns true if it waits for a turn.
    fn start(&mut self, mut job: Job, request: Option<HelmRequest>) -> bool {
        let key = job.key.clone();
        let span = match &job.reservation {
            Some(reservation) => reservation.span.clone(),
            None => key.span(&self.member.name, job.owner.generation(), &job.release),
        };
        span.record("action", job.plan.action.name());
        let attempt = Attempt::new(&job.owner, &job.desired, &job.fingerprint);
        let state = self.owner_states.entry(key.clone()).or_default();
        state.is_paused = plan::pause_reason(&job.owner, &job.desired).is_some();
        if job.reservation.is_none() {
            if let Some(request) = request {
                state.is_reading = matches!(job.plan.action, Action::ReadRelease(_));
                let member = (&*self.member.name, &self.runner.tools);
                self.helm_queue.wait(&key, request, attempt, span, member);
                return false;
            }
            if !self.action_queue.is_free() {
                self.action_queue.add(key);
                return true;
            }
            self.action_queue.start(key.clone());
        }
        self.queue.start(key);
        state.is_removing = job.owner.is_being_removed();
        state.is_reading = matches!(job.plan.action, Action::ReadRelease(_));
        let revisions = self.index.release_revisions(&job.release).into_iter();
        job.revisions = revisions.cloned().collect();
        let reservation = job.reservation.take();
        let job = Arc::new(job);
        let run = Arc::clone(&self.runner).run_job(Arc::clone(&job), reservation);
        let run = run.instrument(span.clone());
        self.jobs.spawn(RunningAction { job, attempt, span }, run);
        false
    }

    /// Whether the owner uses its workspace. An owner that lockdown refuses uses it only if its release exists.
    fn uses_workspace(&self, key: &OwnerKey, desired: &DesiredState) -> bool {
        if self.is_cleaned_up(key) {
            return false;
        }
        let Some(owner) = self.index.owner(key) else {
            return true;
        };
        let release = owner.release(&self.member.name);
        let newest = self.index.release_revisions(&release).last().copied();
        let workspace = self.index.workspaces.get(&release.namespace);
        !desired.lockdown.no_cross_namespace_refs
            || newest.is_some()
            || plan::may_use(&owner, &release, workspace, newest)
    }

    /// Whether the deployment's cleanup is complete. It then uses no workspace.
    fn is_cleaned_up(&self, key: &OwnerKey) -> bool {
        let cleaned_up = self
            .owner_states
            .get(key)
            .and_then(|state| state.memory.cleaned_up.as_deref());
        let owner = self.index.owner(key);
        owner.is_some_and(|owner| owner.is_being_removed() && cleaned_up == Some(owner.uid()))
    }

    /// Returns the time until which a new message waits, if nothing but the message has changed.
    fn message_not_before(
        &self,
        key: &OwnerKey,
        owner: &ReleaseOwner,
        plan: &plan::Plan,
        now: BootTime,
    ) -> Option<BootTime> {
        let memory = &self.owner_states.get(key)?.memory;
        // A new generation must be reported as observed without delay.
        let is_known = self.report_store.covers_generation(key, owner);
        let reported = memory.reported.as_ref().zip(memory.reported_at);
        let may_wait = plan.action == Action::Nothing && plan.is_reported && is_known;
        reported
            .filter(|_| may_wait)
            .and_then(|reported| throttle::not_before(Some(reported), &plan.state, now))
    }

    /// Whether there is something to report or write. If not, the reconcile costs nothing.
    fn has_changes(&self, job: &Job) -> bool {
        let (key, owner, plan) = (&job.key, &job.owner, &job.plan);
        let current = (Some(&plan.state), job.next);
        let memory = self.owner_states.get(key).map(|state| &state.memory);
        let reported = memory.map(|memory| (memory.reported.as_ref(), memory.reported_next));
        if reported != Some(current) {
            return true;
        }
        // A state that was only observed is published once this process holds the Lease.
        let published = memory.map(|memory| (memory.published.as_ref(), memory.published_next));
        let handled = memory.map(|memory| &memory.handled_request);
        let is_published = published == Some(current) && handled == Some(&job.handled_request);
        if self.permitted && !is_published {
            return true;
        }
        let written_tenant = owner.tenant().filter(|_| {
            // The hub writes the status of Tenants on the home cluster and of all deployments.
            self.permitted && self.member.status_mode == StatusMode::Write
        });
        let Some(tenant) = written_tenant else {
            return !self.report_store.covers_generation(key, owner) && plan.is_reported;
        };
        let desired_status = crate::status::status(
            tenant,
            &self.member.name,
            &plan.state,
            job.next,
            plan.applied_chart.as_deref(),
            self.desired_now().handling.allow_chart_skip,
            Timestamp::UNIX_EPOCH,
        );
        tenant
            .status
            .as_ref()
            .is_none_or(|status| !equal_except_times(status, &desired_status))
    }
}

/// Whether a Tenant was installed before, names no workspace, and has no release in its default workspace.
fn may_have_lost_workspace(owner: &ReleaseOwner, cluster: &str, has_no_release: bool) -> bool {
    let names_no_workspace = owner.tenant().is_some_and(|tenant| {
        let workspace = tenant.spec.workspace.as_deref();
        workspace.unwrap_or_default().is_empty()
    });
    has_no_release
        && names_no_workspace
        && owner
            .annotation(&names::fingerprint_annotation(cluster))
            .is_some()
}

/// Returns the needs of an action that requires a Helm slot; `None` for other actions.
fn helm_request(action: &Action, view: &View<'_>, needs_slot: bool) -> Option<HelmRequest> {
    let chart = matches!(action, Action::Helm(_) | Action::InstallAgain).then(|| ChartRef {
        repo: view.chart.repo.clone(),
        name: view.chart.name.clone(),
        version: view.chart.version_to_fetch().into_owned(),
    });
    let is_read = matches!(action, Action::ReadRelease(_) | Action::Unlock { .. });
    (runs_helm(action) || (needs_slot && is_read)).then(|| HelmRequest {
        action: action.clone(),
        chart,
        priority: action.priority(view.memory.failure.is_some()),
        generation: view.owner.generation(),
    })
}

fn permit(lease_state: &LeaseState, permitted: bool, is_recorded: bool) -> Permit {
    match (permitted, is_recorded, &lease_state.other_holder) {
        (true, true, _) => Permit::Granted,
        (true, false, _) => {
            Permit::Withheld("the desired state is not recorded on this cluster yet".to_owned())
        }
        (false, _, Some(other)) => {
            Permit::Withheld(format!("{other} holds the Lease of this cluster"))
        }
        (false, _, None) => Permit::Withheld("this process does not hold the Lease".to_owned()),
    }
}

fn equal_except_times(a: &TenantStatus, b: &TenantStatus) -> bool {
    let without_times = |status: &TenantStatus| {
        let mut status = status.clone();
        // A CRD of an earlier schema drops these fields, so only the memory of the last write counts.
        status.next_steps.clear();
        status.last_handled_reconcile_at = None;
        for condition in &mut status.conditions {
            condition.last_transition_time.0 = Timestamp::UNIX_EPOCH;
        }
        status
    };
    without_times(a) == without_times(b)
}
