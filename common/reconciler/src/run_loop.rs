//! The reconcile loop of one member.
//!
//! Watches and the orders of the home cluster feed the index. The loop plans from the index and runs one action for
//! each Tenant or KryptonDeployment at a time.
//!
//! The loop is level-triggered: it queues only the keys to reconcile, each at most once.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use krypton_helm::driver::StopHandle;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::events::EventRecorder;
use krypton_runtime::lease::{
    self, LeaseGoal, LeaseName, LeaseState, LeaseTimes, NO_NEW_RUNS_AFTER,
};
use krypton_runtime::newest::Newest as _;
use krypton_types::desired::DesiredState;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::actions::ActionRunner;
use crate::helm_queue::HelmQueue;
use crate::index::CrdState;
use crate::lease_guard;
use crate::metrics::QueueDepths;
use crate::reconciler::Reconciler;
use crate::report_store::ReportStore;
use crate::tenant_list_schema::TenantListSchema;
use crate::watches::{Watch, WatchEvent};

mod watch_events;

pub use crate::dump::{ConditionDump, DumpRequest, LeaseDump, OwnerDump, ReconcilerDump};
pub use crate::inputs::{Member, StatusMode, Tools};

/// Time that running Helm processes get to finish when the process stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum number of events to apply before the next reconcile.
const EVENT_BATCH: usize = 512;

/// Reconciles the member until `stop`. Returns when no Helm process of this reconciler runs and the Lease is released.
pub async fn run(
    member: Member,
    tools: Tools,
    desired: watch::Receiver<Arc<DesiredState>>,
    report_store: Arc<ReportStore>,
    stop: CancellationToken,
) {
    let no_dump_requests = mpsc::channel(1).1;
    run_with_dumps(member, tools, desired, report_store, no_dump_requests, stop).await;
}

/// Reconciles the member like [`run`], and responds to requests for dumps of its state.
pub async fn run_with_dumps(
    member: Member,
    tools: Tools,
    desired: watch::Receiver<Arc<DesiredState>>,
    report_store: Arc<ReportStore>,
    dump_requests: mpsc::Receiver<DumpRequest>,
    stop: CancellationToken,
) {
    let span = tracing::error_span!("reconciler", member = %member.name);
    let reconciling = Box::pin(async move {
        let (lease_state_sender, lease_state) = watch::channel(LeaseState::default());
        let (lease_goal, lease_goals) = watch::channel(LeaseGoal::Observe);
        let runs_ended = CancellationToken::new();
        let lease_task = lease::hold(
            member.client.clone(),
            (LeaseName::member(), LeaseTimes::MEMBER),
            member.holder.clone(),
            lease_goals,
            lease_state_sender,
            stop.clone(),
            runs_ended.clone(),
        );
        let task_name = |task: &str| format!("{task} of member {}", member.name);
        let lease_task =
            (tools.watchdog).watch(task_name("the Lease"), lease_task.in_current_span());
        let lease_task = tokio::spawn(lease_task);
        let (stop_handle, stop_signal) = StopHandle::new();
        let stop_handle = Arc::new(stop_handle);
        let guard_task = lease_guard::guard_runs(lease_state.clone(), Arc::clone(&stop_handle));
        let guard_task =
            (tools.watchdog).watch(task_name("the end of runs"), guard_task.in_current_span());
        let guard_task = tokio::spawn(guard_task);
        let member = Arc::new(member);
        let events = EventRecorder::start(
            member.client.clone(),
            member.instance.clone(),
            &tools.watchdog,
        )
        .with_counter(tools.work.events_dropped.clone());
        let runner = Arc::new(ActionRunner {
            fleet_client: member.helm_client.clone(),
            member,
            desired,
            tools,
            events,
            report_store,
            lease_state,
            crd_losses: Arc::default(),
            stop: stop_signal,
        });
        let mut reconciler = Reconciler::new(runner, lease_goal);
        reconciler.run(dump_requests, &stop).await;
        reconciler.drain(&stop_handle).await;
        runs_ended.cancel();
        guard_task.abort();
        if let Err(error) = lease_task.await {
            tracing::error!(%error, "the Lease's task failed");
        }
    });
    reconciling.instrument(span).await;
}

impl Reconciler {
    async fn run(
        &mut self,
        mut dump_requests: mpsc::Receiver<DumpRequest>,
        stop: &CancellationToken,
    ) {
        let mut watches = crate::watches::all_except_tenants(&self.member.client);
        let mut tenants: Option<Watch> = None;
        let mut lease_goal = self.member.lease_goal.clone();
        let mut allowed_namespaces = self.member.allowed_namespaces.clone();
        loop {
            let now = BootTime::now();
            self.bounds
                .apply(&self.member.client, &mut watches, &mut tenants, now);
            self.reconcile_member(now);
            if std::mem::take(&mut self.relist_tenants) {
                self.index.tenants.mark_incomplete();
                tenants = None;
            }
            self.apply_orders();
            if let Some(key) = self.drift_schedule.next_due(now) {
                self.queue.add(key.clone());
            }
            self.reconcile_owners(now);
            self.reconcile_placed_tenants(now);
            self.reconcile_workspaces(now);
            self.check_version(now);
            self.report_member(now);
            if self.index.crd() == Some(CrdState::Present) && tenants.is_none() {
                tenants = Some(crate::watches::tenants(&self.member.client));
            }
            self.queue_metrics.publish(QueueDepths {
                waiting: self.queue_depths(),
                writes: self.lease_state.get().may_start(now),
            });
            let wake = self.next_wake(now);
            tokio::select! {
                () = stop.cancelled() => return,
                Some(event) = watches.next() => {
                    self.apply_event(event, &mut tenants);
                    // Apply all events that are already available before the next reconcile.
                    for _ in 0..EVENT_BATCH {
                        match futures::FutureExt::now_or_never(watches.next()) {
                            Some(Some(event)) => self.apply_event(event, &mut tenants),
                            _ => break,
                        }
                    }
                }
                Some(event) = next_event(&mut tenants) => {
                    self.apply_event(event, &mut tenants);
                    for _ in 0..EVENT_BATCH {
                        match futures::FutureExt::now_or_never(next_event(&mut tenants)) {
                            Some(Some(event)) => self.apply_event(event, &mut tenants),
                            _ => break,
                        }
                    }
                }
                (job, done) = self.jobs.next() => self.finish(job, done),
                Some(ended) = self.helm_queue.tasks.join_next_with_id(), if !self.helm_queue.tasks.is_empty() => {
                    self.finish_waiting(ended);
                }
                done = self.placed_tenants.jobs.next() => {
                    let changed = self.placed_tenants.finish(done, &mut self.index, &self.runner);
                    self.owners_changed(changed);
                }
                done = self.workspaces.jobs.next() => {
                    let changed = self.workspaces.finish(done, &mut self.index, &self.member);
                    self.owners_changed(changed);
                }
                Some(done) = self.drift_schedule.jobs.join_next(), if !self.drift_schedule.jobs.is_empty() => {
                    let name = &self.member.name;
                    let key = self.drift_schedule.finish(done, &mut self.owner_states, name);
                    self.queue.extend(key);
                }
                Some(done) = self.cluster_version.queries.join_next(), if !self.cluster_version.queries.is_empty() => {
                    if self.cluster_version.finish(done, &self.member.name) {
                        self.retry_failed_owners();
                    }
                }
                Some(done) = self.recording_tasks.join_next(), if !self.recording_tasks.is_empty() => {
                    self.finish_recording(done);
                }
                Some(done) = self.crd_jobs.join_next(), if !self.crd_jobs.is_empty() => {
                    self.finish_crd(done);
                }
                changed = self.desired.changed() => {
                    if changed.is_err() { return }
                    self.queue_all();
                }
                changed = self.lease_state.changed() => if changed.is_err() { return },
                // An error means that the sender is gone. The goal then never changes again.
                Ok(()) = lease_goal.changed() => {}
                Ok(()) = allowed_namespaces.changed() => self.queue_all(),
                Some(request) = dump_requests.recv() => if !request.is_closed() {
                    // The receiver may have been dropped.
                    drop(request.send(self.dump(BootTime::now())));
                },
                () = clock::sleep_until(wake, now) => {}
            }
        }
    }

    /// Waits for running jobs, then terminates their Helm processes, then kills them.
    async fn drain(&mut self, stop_handle: &StopHandle) {
        stop_handle.close();
        self.helm_queue = HelmQueue::default();
        self.crd_jobs.abort_all();
        self.recording_tasks.abort_all();
        self.cluster_version.queries.abort_all();
        self.placed_tenants.jobs.abort_all();
        self.workspaces.jobs.abort_all();
        self.drift_schedule.end().await;
        if tokio::time::timeout(DRAIN_TIMEOUT, self.jobs.wait_all())
            .await
            .is_err()
        {
            tracing::info!(member = %self.member.name, "stopping Helm processes");
            stop_handle.soft();
        }
        self.jobs.wait_all().await;
    }

    fn reconcile_placed_tenants(&mut self, now: BootTime) {
        // Until all Tenants are listed under the current schema, a missing Tenant proves nothing.
        let is_listed = self.index.synced()
            && self.index.crd() == Some(CrdState::Present)
            && self.listed_under == TenantListSchema::Current
            && !(self.crd_was_missing || self.relist_tenants);
        // An observer reports nothing either, as the writer may know a later order.
        let may_act = self.permitted && !self.pause_unrecorded;
        if is_listed
            && may_act
            && let Some(desired) = &self.recorded
            && let Some(unrestored) = &self.unrestored
        {
            self.placed_tenants
                .reconcile(desired, unrestored, &self.index, &self.runner, now);
        }
    }

    fn reconcile_workspaces(&mut self, now: BootTime) {
        // Until all namespaces are listed, a missing mark proves nothing.
        let is_listed = self.index.ready();
        let may_act = self.permitted && !self.pause_unrecorded;
        if is_listed
            && may_act
            && let Some(desired) = &self.recorded
        {
            self.workspaces
                .reconcile(desired, &self.index, &self.runner, now);
        }
    }

    fn check_version(&mut self, now: BootTime) {
        let due = self.cluster_version.next_query();
        if due.is_some_and(|due| due <= now) && self.needs_version() {
            self.cluster_version.query(&self.member.client, now);
        }
    }

    fn needs_version(&self) -> bool {
        let mut states = self.owner_states.values();
        self.permitted && states.any(|state| state.memory.failure.is_some())
    }

    fn retry_failed_owners(&mut self) {
        for state in self.owner_states.values_mut() {
            state.memory.cluster_changed();
        }
        self.queue_all();
    }

    fn next_wake(&self, now: BootTime) -> Option<BootTime> {
        // Until the lists are complete, no owner is reconciled.
        let owner = self.queue.wake().filter(|_| self.index.ready());
        // The Lease and the connection expire without an event.
        let expiry = [self.lease_state.get().renewed, Some(self.last_response())]
            .into_iter()
            .flatten()
            .map(|time| time + NO_NEW_RUNS_AFTER)
            .filter(|at| *at > now)
            .min();
        let crd = (self.permitted && !self.crd_checked).then_some(self.crd_not_before);
        let version = self.cluster_version.next_query();
        owner
            .into_iter()
            .chain(expiry)
            .chain(crd.filter(|at| *at > now))
            .chain(self.drift_schedule.wake())
            .chain(self.placed_tenants.wake(now))
            .chain(self.workspaces.wake(now))
            .chain(version.filter(|at| *at > now && self.needs_version()))
            .chain(self.bounds.wake())
            .min()
    }
}

async fn next_event(watch: &mut Option<Watch>) -> Option<WatchEvent> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}
