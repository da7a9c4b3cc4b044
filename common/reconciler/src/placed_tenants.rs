//! Places Tenants of the home cluster on this member, one step at a time for each, and reports their placement.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::tenant::Tenant;
use krypton_helm::driver::is_suspended;
use krypton_runtime::call::{ApiError, call};
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
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use tokio::task::JoinError;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use crate::actions::ActionRunner;
use crate::index::CrdState;
use crate::owner::OwnerKey;
use crate::placement::{self, PlacementStep, View};
use crate::run_loop::{AFTER_CONFLICT, ListedUnder, Reconciler};

/// Maximum number of orders with a request in flight. It protects the API server from two thousand orders at the same
/// time.
const CALLS: usize = 8;
const CONFLICT: Backoff = Backoff {
    first: AFTER_CONFLICT,
    max: AFTER_CONFLICT.saturating_mul(64),
};
/// Number of stale results in a row to report. A watch is rarely this many checks behind the API server.
pub(super) const STALE_IS_SAID: u32 = 5;

/// The placement orders of the current desired state, with their progress.
pub(super) struct PlacedTenants {
    orders: BTreeMap<TenantKey, Arc<PlacedTenant>>,
    queue: WorkQueue<TenantKey>,
    /// UIDs of the Tenants whose removal a read from the API server has confirmed.
    gone: BTreeMap<TenantKey, String>,
    pub(super) jobs: KeyedTasks<TenantKey, Done>,
}

/// Result of a step.
pub(super) struct Done {
    order: Arc<PlacedTenant>,
    result: Result<Step, Fault>,
    /// Report of the confirmed removal.
    confirmed: Option<State>,
}

enum Step {
    /// The watch will show the result.
    Written(Option<Box<Tenant>>),
    /// Nothing of the order is left to remove.
    Gone,
}

enum Fault {
    /// The objects on the member differ from the view.
    Stale,
    /// A failure to report. The step is retried after a back-off.
    Shown(State),
}

impl PlacedTenants {
    pub(super) fn new(retry_max: Duration) -> Self {
        Self {
            orders: BTreeMap::new(),
            queue: WorkQueue::new(CALLS, CONFLICT, Backoff::up_to(retry_max)),
            gone: BTreeMap::new(),
            jobs: KeyedTasks::default(),
        }
    }

    /// Replaces the orders and returns the keys that are no longer ordered. Their Tenants stay on the member.
    pub(super) fn ordered(&mut self, orders: &[PlacedTenant]) -> Vec<TenantKey> {
        let next: BTreeMap<TenantKey, &PlacedTenant> =
            orders.iter().map(|order| (order.key(), order)).collect();
        let gone = |key: &&TenantKey| !next.contains_key(*key);
        let left: Vec<TenantKey> = self.orders.keys().filter(gone).cloned().collect();
        for key in &left {
            self.orders.remove(key);
            self.gone.remove(key);
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
        left
    }

    pub(super) fn all(&mut self) {
        self.queue.extend(self.orders.keys().cloned());
    }

    /// Marks the orders of these Tenants as changed.
    pub(super) fn touch<'a>(&mut self, keys: impl IntoIterator<Item = &'a OwnerKey>) {
        for key in keys {
            if let OwnerKey::Tenant(key) = key
                && self.orders.contains_key(key)
            {
                self.queue.add(key.clone());
            }
        }
    }

    /// Marks the orders in these namespaces as changed.
    pub(super) fn touch_namespaces(&mut self, namespaces: &BTreeSet<String>) {
        let inside = |key: &&TenantKey| namespaces.contains(&key.namespace);
        let inside = self.orders.keys().filter(inside).cloned();
        self.queue.extend(inside);
    }

    /// Returns the next time at which one is due. A due one waits for an event.
    pub(crate) fn wake(&self, now: BootTime) -> Option<BootTime> {
        self.queue.wake().filter(|at| *at > now)
    }

    /// Takes the next due order whose Tenant does not wait to be restored.
    fn next(&mut self, now: BootTime, is_kept: impl Fn(&TenantKey) -> bool) -> Option<TenantKey> {
        while let Some(key) = self.queue.pop(now) {
            if !is_kept(&key) {
                return Some(key);
            }
            self.queue.park(key);
        }
        None
    }
}

impl Reconciler {
    pub(super) fn reconcile_placed(&mut self, now: BootTime) {
        // Until all Tenants are listed under the current schema, a missing Tenant proves nothing.
        let listed = self.index.synced()
            && self.index.crd() == Some(CrdState::Present)
            && self.listed == ListedUnder::Ours
            && !(self.crd_lost || self.list_again);
        // An observer reports nothing either, as the writer may know a later order.
        let acts = self.permitted && !self.misses_pause && self.waiting.is_some();
        let Some(desired) = self.recorded.clone().filter(|_| listed && acts) else {
            return;
        };
        self.placed_tenants.queue.unpark();
        while let Some(key) = self.placed_tenants.next(now, |key| {
            let waiting = self.waiting.as_ref();
            waiting.is_none_or(|waiting| waiting.contains_key(key))
        }) {
            self.place(key, &desired);
        }
    }

    fn place(&mut self, key: TenantKey, desired: &Arc<DesiredState>) {
        let Some(order) = self.placed_tenants.orders.get(&key).cloned() else {
            return;
        };
        let namespace = self.index.workspaces.get(&key.namespace);
        let view = View {
            found: self.index.tenants.get(&key).map(Arc::as_ref),
            terminating: namespace.map(|namespace| namespace.terminating),
            held: held(&order, desired),
        };
        let step = match placement::decide(&order, &view) {
            PlacementStep::Settled(state) => {
                self.placed_tenants.queue.reset(&key);
                return self.report_placed(&order, state, false);
            }
            PlacementStep::Confirm(state)
                if self.placed_tenants.gone.get(&key) == Some(&order.uid) =>
            {
                return self.report_placed(&order, state, true);
            }
            step => step,
        };
        let span = tracing::error_span!(
            "placing",
            tenant = %key,
            member = &*self.member.name,
            generation = order.generation,
            outcome = Empty
        );
        let performer = Arc::clone(&self.performer);
        let placing = async move {
            let confirmed = match &step {
                PlacementStep::Confirm(state) => Some(state.clone()),
                _ => None,
            };
            let result = performer.place(&order, step).await;
            let outcome = match &result {
                Ok(_) => "ok",
                Err(Fault::Stale) => "conflict",
                Err(Fault::Shown(_)) => "failed",
            };
            Span::current().record("outcome", outcome);
            Done {
                order,
                result,
                confirmed,
            }
        };
        let placed_tenants = &mut self.placed_tenants;
        placed_tenants.queue.start(key.clone());
        placed_tenants.jobs.spawn(key, placing.instrument(span));
    }

    fn report_placed(&self, order: &PlacedTenant, state: State, gone: bool) {
        let report = PlacedReport {
            uid: order.uid.clone(),
            observed_generation: order.generation,
            gone,
            state,
        };
        self.report_store.placed(&order.key(), Some(report));
    }

    pub(super) fn finish_placed(&mut self, (key, done): (TenantKey, Result<Done, JoinError>)) {
        let now = BootTime::now();
        let queue = &mut self.placed_tenants.queue;
        let Some(ordered) = self.placed_tenants.orders.get(&key) else {
            // The home cluster has withdrawn the order, so there is nothing to report.
            queue.done(&key, Outcome::Done, now, 0.0);
            return queue.forget(&key);
        };
        let done = match done {
            Ok(done) => done,
            Err(error) => {
                tracing::error!(%error, member = %self.member.name, tenant = %key, "placing a Tenant panicked");
                let again = Outcome::Again(BootTime(now.0 + self.member.retry_max));
                return queue.done(&key, again, now, 0.0);
            }
        };
        // If the order has changed, the next step reports its state.
        let current = Arc::ptr_eq(&done.order, ordered);
        let outcome = match &done.result {
            Ok(Step::Written(_)) => Outcome::Wrote,
            Ok(Step::Gone) => Outcome::Again(now),
            Err(Fault::Stale) => Outcome::Conflict,
            Err(Fault::Shown(_)) => Outcome::Failed,
        };
        queue.done(&key, outcome, now, chance::random());
        let (failures, pause) = (queue.failures(&key), queue.not_before(&key).since(now));
        let report = match done.result {
            Ok(Step::Written(tenant)) => {
                let dirty = tenant.map(|tenant| self.index.tenant_written(*tenant));
                self.owners_changed(dirty.unwrap_or_default());
                None
            }
            Ok(Step::Gone) => {
                let gone = &mut self.placed_tenants.gone;
                gone.insert(key, done.order.uid.clone());
                done.confirmed.map(|state| (state, true))
            }
            Err(Fault::Stale) => (failures > STALE_IS_SAID).then(|| {
                let message = "the Tenant cannot be read, or it changes before each write; look for another controller that writes it";
                let state = State::new(Truth::Unknown, reason::NOT_WRITTEN, message);
                (state, false)
            }),
            Err(Fault::Shown(state)) => {
                tracing::warn!(member = %self.member.name, tenant = %key,
                    generation = done.order.generation, reason = state.reason,
                    problem = state.message, retry_in_seconds = pause.as_secs(), "not placed");
                Some((state, false))
            }
        };
        if let Some((state, gone)) = report.filter(|_| current) {
            self.report_placed(&done.order, state, gone);
        }
    }
}

/// Returns the reason and message if nothing may be written for the order.
fn held(order: &PlacedTenant, desired: &DesiredState) -> Option<(&'static str, &'static str)> {
    if desired.paused {
        return Some((reason::PAUSED, "paused on the EdgeCluster"));
    }
    let leaves = desired.retire && !order.remove;
    leaves.then_some((
        reason::UNINSTALLED,
        "the member leaves the fleet; its Tenants stay",
    ))
}

impl ActionRunner {
    async fn place(&self, order: &PlacedTenant, step: PlacementStep) -> Result<Step, Fault> {
        self.still_permitted().map_err(|_| Fault::Stale)?;
        let client = self.member.client.clone();
        let api: Api<Tenant> = Api::namespaced(client.clone(), &order.namespace);
        let params = PostParams::default();
        match step {
            PlacementStep::Settled(_) => Err(Fault::Stale),
            PlacementStep::CreateNamespace => create_namespace(client, &order.namespace).await,
            PlacementStep::Create(tenant) => {
                let call = api.create(&params, &tenant);
                let made = requested("making the Tenant", call).await?;
                Ok(Step::Written(Some(Box::new(made))))
            }
            PlacementStep::Update(tenant) => {
                // The replacement carries the resourceVersion of the view, and thus its UID.
                let call = api.replace(&order.name, &params, &tenant);
                let written = requested("updating the Tenant", call).await?;
                Ok(Step::Written(Some(Box::new(written))))
            }
            PlacementStep::Delete(uid) => {
                if !still_ordered(order, &self.desired.get()) {
                    return Err(Fault::Stale);
                }
                let params = DeleteParams {
                    preconditions: Some(Preconditions {
                        uid: Some(uid),
                        resource_version: None,
                    }),
                    ..DeleteParams::default()
                };
                let call = api.delete(&order.name, &params);
                requested("deleting the Tenant", call).await?;
                Ok(Step::Written(None))
            }
            PlacementStep::Confirm(_) => {
                let looking = looked_for(&api, &order.name);
                let found = requested("looking for the Tenant", looking).await?;
                match placement::confirmed(order, found.as_ref()) {
                    true => Ok(Step::Gone),
                    false => Err(Fault::Stale),
                }
            }
        }
    }
}

/// Returns the Tenant, or `None` if the API server reports that this Tenant does not exist. Other 404 responses come
/// from an intermediary or from an API server that does not serve Tenants.
async fn looked_for(api: &Api<Tenant>, name: &str) -> kube::Result<Option<Tenant>> {
    match api.get(name).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            let details = status.details.as_ref();
            match details.is_some_and(|found| found.name == name && found.kind == "tenants") {
                true => Ok(None),
                false => Err(kube::Error::Api(status)),
            }
        }
        found => found.map(Some),
    }
}

/// Creates the namespace of the home cluster. It is not deleted with the last Tenant, as others may use it.
async fn create_namespace(client: Client, name: &str) -> Result<Step, Fault> {
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
    let call = api.create(&params, &namespace);
    requested("making the namespace", call).await?;
    Ok(Step::Written(None))
}

/// Returns true if the latest desired state still orders the removal of this Tenant.
fn still_ordered(order: &PlacedTenant, now: &DesiredState) -> bool {
    let mut orders = now.placed.iter();
    let newest = orders.find(|newest| newest.uid == order.uid && newest.key() == order.key());
    newest.is_some_and(|newest| newest.remove && !newest.paused) && !now.paused
}

async fn requested<T>(
    attempt: &'static str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, Fault> {
    call(attempt, request).await.map_err(|error| {
        let reason = match error.status() {
            Some(status) if matches!(status.code, 404 | 409) => return Fault::Stale,
            Some(status) if is_suspended(&status.message) => reason::SUSPENDED,
            Some(status) if status.code == 403 => reason::FORBIDDEN,
            Some(status) if status.code == 422 => reason::NOT_ADMITTED,
            _ => reason::NOT_WRITTEN,
        };
        Fault::Shown(State::new(Truth::False, reason, message(attempt, &error)))
    })
}

fn message(attempt: &str, error: &ApiError) -> String {
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

    fn due(placed_tenants: &mut PlacedTenants) -> Vec<TenantKey> {
        std::iter::from_fn(|| placed_tenants.next(BootTime::default(), |_| false)).collect()
    }

    #[test]
    fn unlisted_orders_are_forgotten_and_changes_queued() {
        let mut placed_tenants = PlacedTenants::new(Duration::ZERO);
        let (a, b) = (order("a", false), order("b", false));
        assert_eq!(placed_tenants.ordered(&[a.clone(), b.clone()]), []);
        assert_eq!(due(&mut placed_tenants), [a.key(), b.key()]);
        let gone = order("b", true);
        assert_eq!(placed_tenants.ordered(&[a.clone(), gone.clone()]), []);
        assert_eq!(due(&mut placed_tenants), [b.key()]);
        assert_eq!(placed_tenants.ordered(&[gone]), [a.key()]);
        assert_eq!(due(&mut placed_tenants), []);
        let other = OwnerKey::Tenant(order("c", false).key());
        let known = OwnerKey::Tenant(b.key());
        placed_tenants.touch(&[other, known]);
        assert_eq!(due(&mut placed_tenants), [b.key()]);
    }

    #[test]
    fn unrestored_tenant_holds_up_no_other() {
        let mut placed_tenants = PlacedTenants::new(Duration::ZERO);
        let (a, b) = (order("a", false), order("b", false));
        placed_tenants.ordered(&[a.clone(), b.clone()]);
        let (now, is_a) = (BootTime::default(), |key: &TenantKey| *key == a.key());
        assert_eq!(placed_tenants.next(now, is_a), Some(b.key()));
        assert_eq!(placed_tenants.next(now, is_a), None);
        placed_tenants.queue.unpark();
        assert_eq!(due(&mut placed_tenants), [a.key()]);
    }
}
