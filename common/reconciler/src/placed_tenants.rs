//! Places Tenants of the home cluster on this member, one step at a time for each, and reports their placement.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::tenant::Tenant;
use krypton_helm::driver::is_suspended;
use krypton_runtime::clock::BootTime;
use krypton_runtime::effect;
use krypton_runtime::newest::Newest as _;
use krypton_runtime::retry::backoff;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::DesiredState;
use krypton_types::error_chain::chain;
use krypton_types::names;
use krypton_types::placed_tenant::{PlacedReport, PlacedTenant};
use krypton_types::tenant::TenantKey;
use kube::Client;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use tokio::task::{Id, JoinError, JoinSet};
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use crate::actions::ActionRunner;
use crate::index::CrdState;
use crate::owner::OwnerKey;
use crate::placement::{self, PlacementStep, View};
use crate::run_loop::{AFTER_CONFLICT, ListedUnder, Reconciler};

const DEADLINE: Duration = Duration::from_secs(10);
/// Maximum number of orders with a request in flight. It protects the API server from two thousand orders at the same
/// time.
const CALLS: usize = 8;
/// Time without a write after which the pause between writes resets. Until then, each write doubles the pause, in
/// case another client keeps reverting it.
const QUIET_AFTER: Duration = Duration::from_secs(300);
/// Longest pause between two writes.
const ANSWER_EVERY: Duration = Duration::from_secs(30);
/// Number of stale results in a row to report. A watch is rarely this many checks behind the API server.
pub(super) const STALE_IS_SAID: u32 = 5;

/// The placement orders of the current desired state, with their progress.
#[derive(Default)]
pub(super) struct PlacedTenants {
    orders: BTreeMap<TenantKey, Arc<PlacedTenant>>,
    slots: BTreeMap<TenantKey, Slot>,
    dirty: BTreeSet<TenantKey>,
    wakes: BTreeSet<(BootTime, TenantKey)>,
    pub(super) jobs: JoinSet<Box<Done>>,
    running: BTreeMap<Id, TenantKey>,
}

#[derive(Default)]
pub(crate) struct Slot {
    pub busy: bool,
    pub not_before: Option<BootTime>,
    failures: u32,
    /// Number of successful writes in quick succession, and the time of the last one.
    writes: u32,
    written: BootTime,
    /// UID of the Tenant whose removal a read from the API server has confirmed.
    gone: Option<String>,
}

/// Result of a step.
pub(super) struct Done {
    key: TenantKey,
    order: Arc<PlacedTenant>,
    result: Result<Step, Fault>,
    said: Option<State>,
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
    /// Replaces the orders and returns the keys that are no longer ordered. Their Tenants stay on the member.
    pub(super) fn ordered(&mut self, orders: &[PlacedTenant]) -> Vec<TenantKey> {
        let next: BTreeMap<TenantKey, &PlacedTenant> =
            orders.iter().map(|order| (order.key(), order)).collect();
        let gone = |key: &&TenantKey| !next.contains_key(*key);
        let left: Vec<TenantKey> = self.orders.keys().filter(gone).cloned().collect();
        self.orders.retain(|key, _| next.contains_key(key));
        self.slots
            .retain(|key, slot| slot.busy || next.contains_key(key));
        for (key, order) in next {
            if self.orders.get(&key).is_none_or(|known| **known != *order) {
                self.orders.insert(key.clone(), Arc::new(order.clone()));
                // Earlier failures belong to the previous order.
                if let Some(slot) = self.slots.get_mut(&key) {
                    (slot.not_before, slot.failures) = (None, 0);
                }
                self.dirty.insert(key);
            }
        }
        left
    }

    pub(super) fn all(&mut self) {
        self.dirty.extend(self.orders.keys().cloned());
    }

    /// Marks the orders of these Tenants as changed.
    pub(super) fn touch(&mut self, keys: &BTreeSet<OwnerKey>) {
        if self.orders.is_empty() {
            return;
        }
        for key in keys {
            if let OwnerKey::Tenant(key) = key
                && self.orders.contains_key(key)
            {
                self.dirty.insert(key.clone());
            }
        }
    }

    /// Marks the orders in these namespaces as changed.
    pub(super) fn touch_namespaces(&mut self, namespaces: &BTreeSet<String>) {
        let inside = |key: &&TenantKey| namespaces.contains(&key.namespace);
        self.dirty
            .extend(self.orders.keys().filter(inside).cloned());
    }

    pub(crate) fn wake(&self) -> Option<BootTime> {
        self.wakes.first().map(|(at, _)| *at)
    }

    /// Takes the next changed Tenant that does not wait to be restored.
    fn take_dirty(&mut self, is_kept: impl Fn(&TenantKey) -> bool) -> Option<TenantKey> {
        let next = self.dirty.iter().find(|key| !is_kept(key)).cloned()?;
        self.dirty.take(&next)
    }
}

impl Reconciler {
    pub(super) fn reconcile_placed(&mut self, now: BootTime) {
        while let Some((at, key)) = self.placed_tenants.wakes.first().cloned()
            && at <= now
        {
            self.placed_tenants.wakes.remove(&(at, key.clone()));
            self.placed_tenants.dirty.insert(key);
        }
        // Until all Tenants are listed under the current schema, a missing Tenant proves nothing.
        let listed = self.index.synced()
            && self.index.crd() == Some(CrdState::Present)
            && self.listed == ListedUnder::Ours
            && !(self.crd_lost || self.list_anew);
        // An observer reports nothing either, as the writer may know a later order.
        let acts = self.permitted && !self.misses_pause && self.waiting.is_some();
        let Some(desired) = self.recorded.clone().filter(|_| listed && acts) else {
            return;
        };
        while self.placed_tenants.jobs.len() < CALLS
            && let Some(key) = self.placed_tenants.take_dirty(|key| {
                let waiting = self.waiting.as_ref();
                waiting.is_none_or(|waiting| waiting.contains_key(key))
            })
        {
            self.place(&key, &desired, now);
        }
    }

    fn place(&mut self, key: &TenantKey, desired: &Arc<DesiredState>, now: BootTime) {
        let Some(order) = self.placed_tenants.orders.get(key).cloned() else {
            return;
        };
        let slot = self.placed_tenants.slots.entry(key.clone()).or_default();
        // A busy order is checked again when its step is done.
        if slot.busy {
            return;
        }
        if let Some(at) = slot.not_before
            && now < at
        {
            self.placed_tenants.wakes.insert((at, key.clone()));
            return;
        }
        let namespace = self.index.workspaces.get(&key.namespace);
        let view = View {
            found: self.index.tenants.get(key).map(Arc::as_ref),
            terminating: namespace.map(|namespace| namespace.terminating),
            held: held(&order, desired),
        };
        let step = match placement::decide(&order, &view) {
            PlacementStep::Settled(state) => {
                slot.failures = 0;
                self.say(&order, state, false);
                return;
            }
            PlacementStep::Confirm(state) if slot.gone.as_ref() == Some(&order.uid) => {
                self.say(&order, state, true);
                return;
            }
            step => step,
        };
        slot.busy = true;
        let performer = Arc::clone(&self.performer);
        let of = key.clone();
        let member = &*self.member.name;
        let generation = order.generation;
        let span = tracing::error_span!(
            "placing",
            tenant = %key,
            member,
            generation,
            outcome = Empty
        );
        let placing = async move {
            let said = match &step {
                PlacementStep::Confirm(state) => Some(state.clone()),
                _ => None,
            };
            let result = performer.place(&order, step).await;
            let outcome = match &result {
                Ok(_) => "ok",
                Err(Fault::Stale) => "stale",
                Err(Fault::Shown(_)) => "failed",
            };
            Span::current().record("outcome", outcome);
            Box::new(Done {
                key: of,
                order,
                result,
                said,
            })
        };
        let job = self.placed_tenants.jobs.spawn(placing.instrument(span));
        self.placed_tenants.running.insert(job.id(), key.clone());
    }

    fn say(&self, order: &PlacedTenant, state: State, gone: bool) {
        let report = PlacedReport {
            uid: order.uid.clone(),
            observed_generation: order.generation,
            gone,
            state,
        };
        self.report_store.placed(&order.key(), Some(report));
    }

    pub(super) fn finish_placed(&mut self, done: Result<(Id, Box<Done>), JoinError>) {
        let now = BootTime::now();
        let (key, done) = match done {
            Ok((job, done)) => {
                self.placed_tenants.running.remove(&job);
                (done.key.clone(), Some(*done))
            }
            Err(error) => {
                tracing::error!(%error, member = %self.member.name, "placing a Tenant ended badly");
                let Some(key) = self.placed_tenants.running.remove(&error.id()) else {
                    return;
                };
                (key, None)
            }
        };
        let Some(ordered) = self.placed_tenants.orders.get(&key) else {
            // The home cluster has withdrawn the order, so there is nothing to report.
            self.placed_tenants.slots.remove(&key);
            return;
        };
        let current = done
            .as_ref()
            .is_some_and(|done| Arc::ptr_eq(&done.order, ordered));
        self.placed_tenants.dirty.insert(key.clone());
        let retry_max = self.member.retry_max;
        let slot = self.placed_tenants.slots.entry(key).or_default();
        slot.busy = false;
        let Some(done) = done else {
            slot.not_before = Some(BootTime(now.0 + retry_max));
            return;
        };
        let mut words = None;
        match done.result {
            Ok(Step::Written(tenant)) => {
                if now.since(slot.written) > QUIET_AFTER {
                    slot.writes = 0;
                }
                let pause = AFTER_CONFLICT.saturating_mul(1 << slot.writes.min(10));
                slot.not_before = Some(BootTime(now.0 + pause.min(ANSWER_EVERY)));
                (slot.writes, slot.written, slot.failures) = (slot.writes + 1, now, 0);
                if let Some(tenant) = tenant {
                    let dirty = self.index.tenant_written(*tenant);
                    self.dirty.extend(dirty);
                }
            }
            Ok(Step::Gone) => {
                (slot.gone, slot.failures) = (Some(done.order.uid.clone()), 0);
                words = done.said.map(|state| (state, true));
            }
            Err(Fault::Stale) => {
                let pause = AFTER_CONFLICT.saturating_mul(1 << slot.failures.min(6));
                slot.failures += 1;
                slot.not_before = Some(BootTime(now.0 + pause));
                if slot.failures > STALE_IS_SAID {
                    let message = "what is on this cluster is not what can be seen of it: a Tenant of this name cannot be read, or changes all the time";
                    let state = State::new(Truth::Unknown, reason::NOT_WRITTEN, message);
                    words = Some((state, false));
                }
            }
            Err(Fault::Shown(state)) => {
                slot.failures += 1;
                let pause = backoff(slot.failures, retry_max, rand::random());
                slot.not_before = Some(BootTime(now.0 + pause));
                tracing::warn!(member = %self.member.name, tenant = %done.key,
                    generation = done.order.generation, reason = state.reason,
                    problem = state.message, retry_in_seconds = pause.as_secs(), "not placed");
                words = Some((state, false));
            }
        }
        // If the order has changed, the next check reports its state.
        if let Some((state, gone)) = words.filter(|_| current) {
            self.say(&done.order, state, gone);
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
        "the member leaves the fleet; what is there stays",
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
                let call = effect!("placement.create", api.create(&params, &tenant));
                let made = in_time("making the Tenant", call).await?;
                Ok(Step::Written(Some(Box::new(made))))
            }
            PlacementStep::Update(tenant) => {
                // The replacement carries the resourceVersion of the view, and thus its UID.
                let call = api.replace(&order.name, &params, &tenant);
                let call = effect!("placement.update", call);
                let written = in_time("updating the Tenant", call).await?;
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
                let call = effect!("placement.delete", api.delete(&order.name, &params));
                in_time("deleting the Tenant", call).await?;
                Ok(Step::Written(None))
            }
            PlacementStep::Confirm(_) => {
                let looking = looked_for(&api, &order.name);
                let found = in_time("looking for the Tenant", looking).await?;
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
    let call = effect!("placement.namespace", api.create(&params, &namespace));
    in_time("making the namespace", call).await?;
    Ok(Step::Written(None))
}

/// Returns true if the latest desired state still orders the removal of this Tenant.
fn still_ordered(order: &PlacedTenant, now: &DesiredState) -> bool {
    let mut orders = now.placed.iter();
    let newest = orders.find(|newest| newest.uid == order.uid && newest.key() == order.key());
    newest.is_some_and(|newest| newest.remove && !newest.paused) && !now.paused
}

async fn in_time<T>(what: &str, call: impl Future<Output = kube::Result<T>>) -> Result<T, Fault> {
    let shown = |why: &str, message: String| {
        let message = format!("{what}: {message}");
        Err(Fault::Shown(State::new(Truth::False, why, message)))
    };
    match tokio::time::timeout(DEADLINE, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) => match status.code {
            404 | 409 => Err(Fault::Stale),
            _ if is_suspended(&status.message) => shown(reason::SUSPENDED, status.message.clone()),
            403 => shown(reason::FORBIDDEN, status.message.clone()),
            422 => shown(reason::NOT_ADMITTED, status.message.clone()),
            _ => shown(reason::NOT_WRITTEN, status.message.clone()),
        },
        Ok(Err(error)) => shown(reason::NOT_WRITTEN, chain(&error)),
        Err(_) => {
            let message = format!("no answer within {} s", DEADLINE.as_secs());
            shown(reason::NOT_WRITTEN, message)
        }
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

    #[tokio::test]
    async fn unlisted_orders_are_forgotten_and_only_changes_dirty() {
        let mut placed_tenants = PlacedTenants::default();
        let (a, b) = (order("a", false), order("b", false));
        assert_eq!(placed_tenants.ordered(&[a.clone(), b.clone()]), []);
        assert_eq!(placed_tenants.dirty, [a.key(), b.key()].into());
        placed_tenants.dirty.clear();
        let gone = order("b", true);
        assert_eq!(placed_tenants.ordered(&[a.clone(), gone.clone()]), []);
        assert_eq!(placed_tenants.dirty, [b.key()].into());
        placed_tenants.dirty.clear();
        assert_eq!(placed_tenants.ordered(&[gone]), [a.key()]);
        assert!(placed_tenants.dirty.is_empty());
        let other = OwnerKey::Tenant(order("c", false).key());
        let known = OwnerKey::Tenant(b.key());
        placed_tenants.touch(&[other, known].into());
        assert_eq!(placed_tenants.dirty, [b.key()].into());
    }

    #[test]
    fn unrestored_tenant_holds_up_no_other() {
        let mut placed_tenants = PlacedTenants::default();
        let (a, b) = (order("a", false), order("b", false));
        placed_tenants.ordered(&[a.clone(), b.clone()]);
        let is_a = |key: &TenantKey| *key == a.key();
        assert_eq!(placed_tenants.take_dirty(is_a), Some(b.key()));
        assert_eq!(placed_tenants.take_dirty(is_a), None);
        assert_eq!(placed_tenants.take_dirty(|_| false), Some(a.key()));
    }
}
