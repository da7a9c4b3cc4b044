//! Places Tenants of the home cluster on this member, one step at a time for each, and reports their placement.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::tenant::Tenant;
use krypton_helm::driver::is_suspended;
use krypton_runtime::call::{ApiError, call, existing, if_uid};
use krypton_runtime::chance;
use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::retry::Backoff;
use krypton_runtime::tasks::KeyedTasks;
use krypton_runtime::work_queue::{Outcome, WorkQueue};
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::DesiredState;
use krypton_types::error_chain::chain;
use krypton_types::names;
use krypton_types::placed_tenant::{PlacedReport, PlacedTenant};
use krypton_types::tenant::TenantKey;
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::task::JoinError;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use crate::actions::ActionRunner;
use crate::actions::error::CONFLICT_PAUSE;
use crate::backup::restoring::UnrestoredTenants;
use crate::index::Index;
use crate::owner::OwnerKey;
use crate::placement::{self, PlacementStep, PlacementView};

/// Maximum number of orders with a request in flight. It protects the API server from two thousand orders at the same
/// time.
const MAX_CONCURRENT_CALLS: usize = 8;
const CONFLICT_BACKOFF: Backoff = Backoff {
    first: CONFLICT_PAUSE,
    max: CONFLICT_PAUSE.saturating_mul(64),
};
/// Number of stale results in a row to report. A watch is rarely this many checks behind the API server.
pub(super) const MAX_UNREPORTED_CONFLICTS: u32 = 5;

/// The placement orders of the current desired state, with their progress.
pub(super) struct PlacedTenants {
    orders: BTreeMap<TenantKey, Arc<PlacedTenant>>,
    queue: WorkQueue<TenantKey>,
    /// UIDs of the Tenants whose removal a read from the API server has confirmed.
    confirmed_removals: BTreeMap<TenantKey, String>,
    pub(super) jobs: KeyedTasks<TenantKey, PlacementStepResult>,
}

/// Result of a step.
pub(super) struct PlacementStepResult {
    order: Arc<PlacedTenant>,
    result: Result<CompletedStep, PlacementError>,
}

enum CompletedStep {
    /// The watch will show the result.
    Written(Option<Box<Tenant>>),
    /// Nothing of the order is left to remove, which this state reports.
    Removed(State),
}

enum PlacementError {
    /// The objects on the member differ from the view.
    Conflict,
    /// A failure to report. The step is retried after a back-off.
    Failed(State),
}

impl PlacedTenants {
    pub(super) fn new(retry_max: Duration) -> Self {
        Self {
            orders: BTreeMap::new(),
            queue: WorkQueue::new(
                MAX_CONCURRENT_CALLS,
                CONFLICT_BACKOFF,
                Backoff::up_to(retry_max),
            ),
            confirmed_removals: BTreeMap::new(),
            jobs: KeyedTasks::default(),
        }
    }

    /// Replaces the orders and returns the keys that are no longer ordered. Their Tenants stay on the member.
    pub(super) fn set_orders(&mut self, orders: &[PlacedTenant]) -> Vec<TenantKey> {
        let next: BTreeMap<TenantKey, &PlacedTenant> =
            orders.iter().map(|order| (order.key(), order)).collect();
        let is_withdrawn = |key: &&TenantKey| !next.contains_key(*key);
        let withdrawn: Vec<TenantKey> = self.orders.keys().filter(is_withdrawn).cloned().collect();
        for key in &withdrawn {
            self.orders.remove(key);
            self.confirmed_removals.remove(key);
            self.queue.forget(key);
        }
        for (key, order) in next {
            if self.orders.get(&key).is_none_or(|known| **known != *order) {
                self.orders.insert(key.clone(), Arc::new(order.clone()));
                // Earlier failures belong to the previous order.
                self.queue.reset(&key);
                self.queue.add(key);
            }
        }
        withdrawn
    }

    pub(super) fn queue_all(&mut self) {
        self.queue.extend(self.orders.keys().cloned());
    }

    /// Marks the orders of these Tenants as changed.
    pub(super) fn queue_owners<'a>(&mut self, keys: impl IntoIterator<Item = &'a OwnerKey>) {
        for key in keys {
            if let OwnerKey::Tenant(key) = key
                && self.orders.contains_key(key)
            {
                self.queue.add(key.clone());
            }
        }
    }

    /// Marks the orders in these namespaces as changed.
    pub(super) fn queue_namespaces(&mut self, namespaces: &BTreeSet<String>) {
        let is_inside = |key: &&TenantKey| namespaces.contains(&key.namespace);
        let keys = self.orders.keys().filter(is_inside).cloned();
        self.queue.extend(keys);
    }

    /// Returns the next time at which one is due. A due one waits for an event.
    pub(crate) fn wake(&self, now: BootTime) -> Option<BootTime> {
        self.queue.wake().filter(|at| *at > now)
    }

    /// Takes the next due order whose Tenant does not wait to be restored.
    fn next(&mut self, now: BootTime, is_held: impl Fn(&TenantKey) -> bool) -> Option<TenantKey> {
        while let Some(key) = self.queue.pop(now) {
            if !is_held(&key) {
                return Some(key);
            }
            self.queue.park(key);
        }
        None
    }

    /// Starts the next step of each due order. The Tenants in `unrestored` wait until they are restored.
    pub(super) fn reconcile(
        &mut self,
        desired: &DesiredState,
        unrestored: &UnrestoredTenants,
        index: &Index,
        runner: &Arc<ActionRunner>,
        now: BootTime,
    ) {
        self.queue.unpark();
        while let Some(key) = self.next(now, |key| unrestored.contains_key(key)) {
            self.start_step(key, desired, index, runner);
        }
    }

    fn start_step(
        &mut self,
        key: TenantKey,
        desired: &DesiredState,
        index: &Index,
        runner: &Arc<ActionRunner>,
    ) {
        let Some(order) = self.orders.get(&key).cloned() else {
            return;
        };
        let namespace = index.workspaces.get(&key.namespace);
        let view = PlacementView {
            tenant: index.tenants.get(&key).map(Arc::as_ref),
            namespace_terminating: namespace.map(|namespace| namespace.terminating),
            hold: hold_reason(&order, desired),
        };
        let step = match placement::decide(&order, &view) {
            PlacementStep::Settled(state) => {
                self.queue.reset(&key);
                return runner.report_placement(&order, state, false);
            }
            PlacementStep::Confirm(state)
                if self.confirmed_removals.get(&key) == Some(&order.uid) =>
            {
                return runner.report_placement(&order, state, true);
            }
            step => step,
        };
        let span = tracing::error_span!(
            "placement",
            tenant = %key,
            member = &*runner.member.name,
            generation = order.generation,
            outcome = Empty
        );
        let runner = Arc::clone(runner);
        let running = async move {
            let result = runner.run_placement_step(&order, step).await;
            let outcome = match &result {
                Ok(_) => "ok",
                Err(PlacementError::Conflict) => "conflict",
                Err(PlacementError::Failed(_)) => "failed",
            };
            Span::current().record("outcome", outcome);
            PlacementStepResult { order, result }
        };
        self.queue.start(key.clone());
        self.jobs.spawn(key, running.instrument(span));
    }

    /// Records and reports the result of a step. Returns the owners that it has changed.
    pub(super) fn finish(
        &mut self,
        (key, done): (TenantKey, Result<PlacementStepResult, JoinError>),
        index: &mut Index,
        runner: &ActionRunner,
    ) -> BTreeSet<OwnerKey> {
        let now = BootTime::now();
        let queue = &mut self.queue;
        let Some(current_order) = self.orders.get(&key) else {
            // The home cluster has withdrawn the order, so there is nothing to report.
            queue.done(&key, Outcome::Done, now, 0.0);
            queue.forget(&key);
            return BTreeSet::new();
        };
        let done = match done {
            Ok(done) => done,
            Err(error) => {
                tracing::error!(%error, member = %runner.member.name, tenant = %key, "placing a Tenant panicked");
                let again = Outcome::Again(now + runner.member.retry_max);
                queue.done(&key, again, now, 0.0);
                return BTreeSet::new();
            }
        };
        // If the order has changed, the next step reports its state.
        let is_current = Arc::ptr_eq(&done.order, current_order);
        let outcome = match &done.result {
            Ok(CompletedStep::Written(_)) => Outcome::Wrote,
            Ok(CompletedStep::Removed(_)) => Outcome::Again(now),
            Err(PlacementError::Conflict) => Outcome::Conflict,
            Err(PlacementError::Failed(_)) => Outcome::Failed,
        };
        queue.done(&key, outcome, now, chance::random());
        let (failures, pause) = (queue.failures(&key), queue.not_before(&key).since(now));
        let mut changed = BTreeSet::new();
        let report = match done.result {
            Ok(CompletedStep::Written(tenant)) => {
                if let Some(tenant) = tenant {
                    changed = index.tenant_written(*tenant);
                }
                None
            }
            Ok(CompletedStep::Removed(state)) => {
                self.confirmed_removals.insert(key, done.order.uid.clone());
                Some((state, true))
            }
            Err(PlacementError::Conflict) => (failures > MAX_UNREPORTED_CONFLICTS).then(|| {
                let message = "the Tenant cannot be read, or it changes before each write; look for another controller that writes it";
                let state = State::new(Truth::Unknown, reason::NOT_WRITTEN, message);
                (state, false)
            }),
            Err(PlacementError::Failed(state)) => {
                tracing::warn!(member = %runner.member.name, tenant = %key,
                    generation = done.order.generation, reason = state.reason,
                    problem = state.message, retry_in_seconds = pause.as_secs(),
                    "failed to place or remove Tenant; retrying");
                Some((state, false))
            }
        };
        if let Some((state, is_removed)) = report.filter(|_| is_current) {
            runner.report_placement(&done.order, state, is_removed);
        }
        changed
    }
}

/// Returns the reason and message if nothing may be written for the order.
fn hold_reason(
    order: &PlacedTenant,
    desired: &DesiredState,
) -> Option<(&'static str, &'static str)> {
    if desired.paused {
        return Some((reason::PAUSED, "paused on the EdgeCluster"));
    }
    let is_leaving = desired.retire && !order.remove;
    is_leaving.then_some((
        reason::UNINSTALLED,
        "the member leaves the fleet; its Tenants stay",
    ))
}

impl ActionRunner {
    fn report_placement(&self, order: &PlacedTenant, state: State, is_removed: bool) {
        let report = PlacedReport {
            uid: order.uid.clone(),
            observed_generation: order.generation,
            gone: is_removed,
            state,
        };
        self.report_store.set_placed(&order.key(), Some(report));
    }

    async fn run_placement_step(
        &self,
        order: &PlacedTenant,
        step: PlacementStep,
    ) -> Result<CompletedStep, PlacementError> {
        self.check_permit().map_err(|_| PlacementError::Conflict)?;
        let client = self.member.client.clone();
        let api: Api<Tenant> = Api::namespaced(client.clone(), &order.namespace);
        let params = PostParams::default();
        match step {
            PlacementStep::Settled(_) => Err(PlacementError::Conflict),
            PlacementStep::CreateNamespace => create_namespace(client, &order.namespace).await,
            PlacementStep::Create(tenant) => {
                let request = api.create(&params, &tenant);
                let created = send("creating the Tenant", request).await?;
                Ok(CompletedStep::Written(Some(Box::new(created))))
            }
            PlacementStep::Update(tenant) => {
                // The replacement carries the resourceVersion of the view, and thus its UID.
                let request = api.replace(&order.name, &params, &tenant);
                let updated = send("updating the Tenant", request).await?;
                Ok(CompletedStep::Written(Some(Box::new(updated))))
            }
            PlacementStep::Delete(uid) => {
                if !is_removal_ordered(order, &self.desired.get()) {
                    return Err(PlacementError::Conflict);
                }
                let params = if_uid(Some(uid));
                let request = api.delete(&order.name, &params);
                send("deleting the Tenant", request).await?;
                Ok(CompletedStep::Written(None))
            }
            PlacementStep::Confirm(state) => {
                let getting =
                    async { existing(api.get(&order.name).await, ("tenants", &order.name)) };
                let tenant = send("looking for the Tenant", getting).await?;
                match placement::is_removal_confirmed(order, tenant.as_ref()) {
                    true => Ok(CompletedStep::Removed(state)),
                    false => Err(PlacementError::Conflict),
                }
            }
        }
    }
}

/// Creates the namespace of the home cluster. It is not deleted with the last Tenant, as others may use it.
async fn create_namespace(client: Client, name: &str) -> Result<CompletedStep, PlacementError> {
    let label = (
        names::MANAGED_BY_LABEL.to_owned(),
        names::MANAGED_BY_HUB.to_owned(),
    );
    let namespace = Namespace {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some([label].into()),
            ..ObjectMeta::default()
        },
        ..Namespace::default()
    };
    let api: Api<Namespace> = Api::all(client);
    let params = PostParams::default();
    let request = api.create(&params, &namespace);
    send("creating the namespace", request).await?;
    Ok(CompletedStep::Written(None))
}

/// Returns true if the latest desired state still orders the removal of this Tenant.
fn is_removal_ordered(order: &PlacedTenant, desired: &DesiredState) -> bool {
    let mut orders = desired.placed.iter();
    let current = orders.find(|current| current.uid == order.uid && current.key() == order.key());
    current.is_some_and(|current| current.remove && !current.paused) && !desired.paused
}

async fn send<T>(
    attempt: &'static str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, PlacementError> {
    call(attempt, request).await.map_err(|error| {
        let reason = match error.status() {
            Some(status) if matches!(status.code, 404 | 409) => return PlacementError::Conflict,
            Some(status) if is_suspended(&status.message) => reason::SUSPENDED,
            Some(status) if status.code == 403 => reason::FORBIDDEN,
            Some(status) if status.code == 422 => reason::NOT_ADMITTED,
            _ => reason::NOT_WRITTEN,
        };
        PlacementError::Failed(State::new(
            Truth::False,
            reason,
            error_message(attempt, &error),
        ))
    })
}

fn error_message(attempt: &str, error: &ApiError) -> String {
    match error {
        ApiError::Failed { source, .. } => match &**source {
            kube::Error::Api(status) => format!("{attempt}: {}", status.message),
            source => format!("{attempt}: {}", chain(source)),
        },
        ApiError::Timeout { .. } => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(name: &str, remove: bool) -> PlacedTenant {
        PlacedTenant {
            namespace: "team".to_owned(),
            name: name.to_owned(),
            uid: format!("uid-of-{name}"),
            remove,
            ..PlacedTenant::default()
        }
    }

    fn pop_due(placed_tenants: &mut PlacedTenants) -> Vec<TenantKey> {
        std::iter::from_fn(|| placed_tenants.next(BootTime::default(), |_| false)).collect()
    }

    #[test]
    fn unlisted_orders_are_forgotten_and_changes_queued() {
        let mut placed_tenants = PlacedTenants::new(Duration::ZERO);
        let (a, b) = (order("a", false), order("b", false));
        assert_eq!(placed_tenants.set_orders(&[a.clone(), b.clone()]), []);
        assert_eq!(pop_due(&mut placed_tenants), [a.key(), b.key()]);
        let removal = order("b", true);
        assert_eq!(placed_tenants.set_orders(&[a.clone(), removal.clone()]), []);
        assert_eq!(pop_due(&mut placed_tenants), [b.key()]);
        assert_eq!(placed_tenants.set_orders(&[removal]), [a.key()]);
        assert_eq!(pop_due(&mut placed_tenants), []);
        let other = OwnerKey::Tenant(order("c", false).key());
        let known = OwnerKey::Tenant(b.key());
        placed_tenants.queue_owners(&[other, known]);
        assert_eq!(pop_due(&mut placed_tenants), [b.key()]);
    }

    #[test]
    fn unrestored_tenant_holds_up_no_other() {
        let mut placed_tenants = PlacedTenants::new(Duration::ZERO);
        let (a, b) = (order("a", false), order("b", false));
        placed_tenants.set_orders(&[a.clone(), b.clone()]);
        let (now, is_a) = (BootTime::default(), |key: &TenantKey| *key == a.key());
        assert_eq!(placed_tenants.next(now, is_a), Some(b.key()));
        assert_eq!(placed_tenants.next(now, is_a), None);
        placed_tenants.queue.unpark();
        assert_eq!(pop_due(&mut placed_tenants), [a.key()]);
    }
}
