//! Reports from a reconciler to its caller.
//!
//! Each Tenant, each KryptonDeployment, each placed Tenant and the member have one slot each. The latest report wins.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Mutex, PoisonError};

use krypton_types::conditions::{self, ClusterState, Phase};
use krypton_types::deployment::{
    DeploymentKey, DeploymentReport, DesiredDeployment, ReportedEvent, TOLD_AT_HOME,
};
use krypton_types::desired::Version;
use krypton_types::member::MemberReport;
use krypton_types::placed_tenant::PlacedReport;
use krypton_types::tenant::{Next, TenantKey, TenantReport};
use tokio::sync::Notify;

use crate::owner::{OwnerKey, ReleaseOwner};

/// Key of a slot. A placed Tenant has two: its state and its placement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SlotKey {
    Tenant(TenantKey),
    Deployment(DeploymentKey),
    Placed(TenantKey),
}

/// Reports that changed since the last `take`.
#[derive(Debug, Default)]
pub struct Changes {
    pub member: Option<MemberReport>,
    /// `None` for a Tenant that is deleted or names another member.
    pub tenants: BTreeMap<TenantKey, Option<TenantReport>>,
    /// `None` for a KryptonDeployment without an order.
    pub deployments: BTreeMap<DeploymentKey, Option<DeploymentReport>>,
    /// `None` for a Tenant without a placement order.
    pub placed: BTreeMap<TenantKey, Option<PlacedReport>>,
}

impl Changes {
    /// Returns the key of the last change, in the order of `take`.
    pub fn last(&self) -> Option<SlotKey> {
        let placed = self.placed.last_key_value();
        let placed = placed.map(|(key, _)| SlotKey::Placed(key.clone()));
        let deployment = self.deployments.last_key_value();
        let deployment = || deployment.map(|(key, _)| SlotKey::Deployment(key.clone()));
        let tenant = self.tenants.last_key_value();
        let tenant = || tenant.map(|(key, _)| SlotKey::Tenant(key.clone()));
        placed.or_else(deployment).or_else(tenant)
    }
}

/// A batch of changes.
#[derive(Debug)]
pub struct Part {
    pub changes: Changes,
    /// No changes follow.
    pub last: bool,
}

#[derive(Debug, Default)]
struct Slots {
    member: MemberReport,
    member_changed: bool,
    tenants: BTreeMap<TenantKey, TenantReport>,
    deployments: BTreeMap<DeploymentKey, DeploymentReport>,
    placed: BTreeMap<TenantKey, PlacedReport>,
    changed: BTreeSet<SlotKey>,
}

/// Report slots, filled by the reconciler and emptied by its caller. The number of Tenants and KryptonDeployments
/// limits their size.
#[derive(Debug, Default)]
pub struct ReportStore {
    slots: Mutex<Slots>,
    changed: Notify,
}

impl ReportStore {
    /// Sets the Tenant's report. `None` means that it is deleted or names another member.
    pub fn tenant(&self, key: &TenantKey, report: Option<TenantReport>) {
        // Compare the trimmed report, as the hub receives only that one.
        let report = report.map(TenantReport::trimmed);
        let slot = SlotKey::Tenant(key.clone());
        self.set(|slots| &mut slots.tenants, key, report, slot);
    }

    /// Sets the KryptonDeployment's report. `None` means that it has no order.
    pub fn deployment(&self, key: &DeploymentKey, report: Option<DeploymentReport>) {
        let report = report.map(DeploymentReport::trimmed);
        let slot = SlotKey::Deployment(key.clone());
        self.set(|slots| &mut slots.deployments, key, report, slot);
    }

    /// Sets the report of a placement order. `None` means that the order no longer exists.
    pub fn placed(&self, key: &TenantKey, report: Option<PlacedReport>) {
        let report = report.map(PlacedReport::trimmed);
        let slot = SlotKey::Placed(key.clone());
        self.set(|slots| &mut slots.placed, key, report, slot);
    }

    fn set<K: Ord + Clone, R: PartialEq>(
        &self,
        of: impl FnOnce(&mut Slots) -> &mut BTreeMap<K, R>,
        key: &K,
        report: Option<R>,
        slot: SlotKey,
    ) {
        let mut slots = self.lock();
        let reports = of(&mut slots);
        if reports.get(key) == report.as_ref() {
            return;
        }
        match report {
            Some(report) => reports.insert(key.clone(), report),
            None => reports.remove(key),
        };
        slots.changed.insert(slot);
        drop(slots);
        self.changed.notify_one();
    }

    /// Sets the owner's report. An empty `applied_chart` keeps the chart of the previous report.
    pub(crate) fn put(
        &self,
        owner: &ReleaseOwner,
        state: ClusterState,
        applied_chart: &str,
        next: Option<Next>,
        gone: bool,
    ) {
        let observed_generation = owner.generation();
        let known = (!applied_chart.is_empty()).then(|| applied_chart.to_owned());
        match owner {
            ReleaseOwner::Tenant(tenant) => {
                let Some(key) = crate::index::tenant_key(&tenant.metadata) else {
                    return;
                };
                let status = tenant.status.as_ref();
                let before = || status.and_then(|status| status.last_applied_chart.clone());
                let report = TenantReport {
                    observed_generation,
                    applied_chart: known.or_else(before).unwrap_or_default(),
                    state,
                    next,
                };
                self.tenant(&key, Some(report));
            }
            ReleaseOwner::Deployment(order) => {
                let key = order.key();
                let before = self.lock().deployments.get(&key).cloned();
                let before = before.filter(|before| before.uid == order.uid);
                let (applied, events) = before
                    .map(|before| (before.applied_chart, before.events))
                    .unwrap_or_default();
                let report = DeploymentReport {
                    uid: order.uid.clone(),
                    observed_generation,
                    gone,
                    applied_chart: known.unwrap_or(applied),
                    state,
                    events,
                };
                self.deployment(&key, Some(report));
            }
        }
    }

    /// Adds an event to the order's report. Drops the event if the order has no report yet.
    pub(crate) fn did(&self, order: &DesiredDeployment, mut reported_event: ReportedEvent) {
        let key = order.key();
        let report = self.lock().deployments.get(&key).cloned();
        let Some(mut report) = report.filter(|report| report.uid == order.uid) else {
            return;
        };
        // An applied chart means that the release existed before and is installed again.
        if reported_event.reason == "HelmInstallStart" && !report.applied_chart.is_empty() {
            "ReleaseMissing".clone_into(&mut reported_event.reason);
        }
        if TOLD_AT_HOME
            .iter()
            .any(|(reason, ..)| *reason == reported_event.reason)
        {
            report.events.push(reported_event);
            self.deployment(&key, Some(report));
        }
    }

    pub(crate) fn forget(&self, key: &OwnerKey) {
        match key {
            OwnerKey::Tenant(key) => self.tenant(key, None),
            OwnerKey::Deployment(key) => self.deployment(key, None),
        }
    }

    /// Returns true if the owner has a report.
    pub(crate) fn has(&self, key: &OwnerKey) -> bool {
        let slots = self.lock();
        match key {
            OwnerKey::Tenant(key) => slots.tenants.contains_key(key),
            OwnerKey::Deployment(key) => slots.deployments.contains_key(key),
        }
    }

    /// Returns true if the last report covers the owner's current generation.
    pub(crate) fn is_of(&self, key: &OwnerKey, owner: &ReleaseOwner) -> bool {
        let slots = self.lock();
        let generation = match key {
            OwnerKey::Tenant(key) => {
                let report = slots.tenants.get(key);
                report.map(|report| report.observed_generation)
            }
            OwnerKey::Deployment(key) => {
                let report = slots.deployments.get(key);
                let report = report.filter(|report| report.uid == owner.uid());
                report.map(|report| report.observed_generation)
            }
        };
        generation == Some(owner.generation())
    }

    pub fn member(&self, report: &MemberReport) {
        let mut slots = self.lock();
        if slots.member == *report {
            return;
        }
        slots.member = report.clone();
        slots.member_changed = true;
        drop(slots);
        self.changed.notify_one();
    }

    /// Waits for a change, and takes all changes.
    pub async fn changes(&self) -> Changes {
        self.changed().await;
        self.take(None, usize::MAX).changes
    }

    /// Waits for a change without taking it. Supports one waiter at a time.
    pub async fn changed(&self) {
        loop {
            let notified = self.changed.notified();
            {
                let slots = self.lock();
                if slots.member_changed || !slots.changed.is_empty() {
                    return;
                }
            }
            notified.await;
        }
    }

    /// Marks all slots as changed, so the next `take` returns the full report. Deleted objects are not in it.
    pub fn resend(&self) {
        let mut slots = self.lock();
        let tenants = slots.tenants.keys().cloned().map(SlotKey::Tenant);
        let deployments = slots.deployments.keys().cloned();
        let placed = slots.placed.keys().cloned().map(SlotKey::Placed);
        slots.changed = tenants
            .chain(deployments.map(SlotKey::Deployment))
            .chain(placed)
            .collect();
        slots.member_changed = true;
        drop(slots);
        self.changed.notify_one();
    }

    /// Takes the changes of at most `limit` slots after the key `after`, in key order. The last batch contains the
    /// member's report.
    pub fn take(&self, after: Option<&SlotKey>, limit: usize) -> Part {
        let mut slots = self.lock();
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut beyond = slots.changed.range((start, Bound::Unbounded));
        let keys: Vec<SlotKey> = beyond.by_ref().take(limit).cloned().collect();
        let last = beyond.next().is_none();
        let mut changes = Changes::default();
        for key in keys {
            slots.changed.remove(&key);
            match key {
                SlotKey::Tenant(key) => {
                    let report = slots.tenants.get(&key).cloned();
                    changes.tenants.insert(key, report);
                }
                SlotKey::Deployment(key) => {
                    let report = slots.deployments.get(&key).cloned();
                    changes.deployments.insert(key, report);
                }
                SlotKey::Placed(key) => {
                    let report = slots.placed.get(&key).cloned();
                    changes.placed.insert(key, report);
                }
            }
        }
        changes.member =
            (last && std::mem::take(&mut slots.member_changed)).then(|| slots.member.clone());
        Part { changes, last }
    }

    /// Returns the number of Tenants with a report.
    pub fn tenants(&self) -> usize {
        self.lock().tenants.len()
    }

    /// Counts the reported Tenants by phase: ready, pending, error.
    pub fn phases(&self, allow_chart_skip: bool) -> [usize; 3] {
        let slots = self.lock();
        let mut phases = [0; 3];
        for report in slots.tenants.values() {
            let one = [(String::new(), report.state.clone())].into();
            let phase = match conditions::summarise(&one, allow_chart_skip).phase {
                Phase::Ready => 0,
                Phase::Pending => 1,
                Phase::Error => 2,
            };
            phases[phase] += 1;
        }
        phases
    }

    /// Returns the number of changed slots that were not taken.
    pub fn unsent(&self) -> usize {
        self.lock().changed.len()
    }

    /// Returns the desired state that the member last reported as applied.
    pub fn applied(&self) -> Option<(Version, String)> {
        self.lock().member.applied.clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Slots> {
        // The slots hold plain values, so a panic elsewhere cannot leave them half written.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use krypton_types::conditions::{ClusterState, State, Truth};

    use super::*;

    fn key(name: &str) -> TenantKey {
        TenantKey {
            namespace: "default".to_owned(),
            name: name.to_owned(),
        }
    }

    fn report(generation: i64) -> TenantReport {
        TenantReport {
            observed_generation: generation,
            applied_chart: String::new(),
            next: None,
            state: ClusterState::from(State {
                truth: Truth::True,
                reason: "Installed".to_owned(),
                message: String::new(),
            }),
        }
    }

    #[tokio::test]
    async fn newest_tenant_report_replaces_older_ones() {
        let report_store = ReportStore::default();
        for generation in 1..=1000 {
            report_store.tenant(&key("a"), Some(report(generation)));
        }
        let changes = report_store.changes().await;
        assert_eq!(changes.tenants.len(), 1);
        assert_eq!(
            changes.tenants[&key("a")]
                .as_ref()
                .unwrap()
                .observed_generation,
            1000
        );
    }

    #[tokio::test]
    async fn only_removal_changes_repeated_report() {
        let report_store = ReportStore::default();
        report_store.tenant(&key("a"), Some(report(1)));
        report_store.changes().await;
        report_store.tenant(&key("a"), Some(report(1)));
        report_store.tenant(&key("b"), None);
        report_store.tenant(&key("a"), None);
        let changes = report_store.changes().await;
        assert_eq!(
            changes.tenants.into_iter().collect::<Vec<_>>(),
            vec![(key("a"), None)]
        );
    }

    #[tokio::test]
    async fn same_named_deployment_and_tenant_have_separate_slots() {
        let report_store = ReportStore::default();
        let order = DesiredDeployment {
            namespace: "default".to_owned(),
            name: "a".to_owned(),
            uid: "uid-1".to_owned(),
            ..DesiredDeployment::default()
        };
        let owner = ReleaseOwner::Deployment(Arc::new(order.clone()));
        report_store.tenant(&key("a"), Some(report(1)));
        report_store.put(&owner, report(1).state, "r/c:1", None, false);
        report_store.put(&owner, report(1).state, "", None, true);
        let part = report_store.take(None, 1);
        assert!(part.changes.deployments.is_empty() && !part.last);
        let part = report_store.take(part.changes.last().as_ref(), 1);
        assert!(part.changes.tenants.is_empty() && part.last);
        let said = part.changes.deployments[&order.key()].clone().unwrap();
        assert_eq!((said.uid.as_str(), said.gone), ("uid-1", true));
        assert_eq!(said.applied_chart, "r/c:1", "what was known stands");
        let key_of = OwnerKey::Deployment(order.key());
        assert!(report_store.is_of(&key_of, &owner));
        let recreated = DesiredDeployment {
            uid: "uid-2".to_owned(),
            ..order.clone()
        };
        let recreated = ReleaseOwner::Deployment(Arc::new(recreated));
        assert!(
            !report_store.is_of(&key_of, &recreated),
            "what is said of the former is not said of it"
        );
        report_store.tenant(&key("a"), None);
        report_store.resend();
        let whole = report_store.changes().await;
        assert!(whole.tenants.is_empty() && whole.deployments.len() == 1);
    }

    #[tokio::test]
    async fn changes_after_resend_contain_all_current_reports() {
        let report_store = ReportStore::default();
        for name in ["a", "b", "gone"] {
            report_store.tenant(&key(name), Some(report(1)));
        }
        report_store.changes().await;
        report_store.tenant(&key("gone"), None);
        report_store.resend();
        let changes = report_store.changes().await;
        assert_eq!(changes.member, Some(MemberReport::default()));
        let named: Vec<_> = changes.tenants.keys().cloned().collect();
        assert_eq!(named, [key("a"), key("b")]);
    }

    #[test]
    fn chunked_resend_lists_each_tenant_once_despite_changes() {
        let report_store = ReportStore::default();
        for name in ["a", "b", "c", "d", "e"] {
            report_store.tenant(&key(name), Some(report(1)));
        }
        report_store.resend();
        let mut after = None;
        let mut named = Vec::new();
        loop {
            let part = report_store.take(after.as_ref(), 2);
            assert!(part.changes.tenants.len() <= 2);
            assert_eq!(part.changes.member.is_some(), part.last);
            after = part.changes.last().or(after);
            named.extend(part.changes.tenants.into_keys());
            // A slot that was sent and changes again waits until the full report is complete.
            report_store.tenant(&key("a"), Some(report(named.len() as i64 + 1)));
            if part.last {
                break;
            }
        }
        assert_eq!(named, ["a", "b", "c", "d", "e"].map(key));
        let after = report_store.take(None, 2);
        assert_eq!(after.changes.tenants[&key("a")], Some(report(6)));
        assert!(after.last);
    }
}
