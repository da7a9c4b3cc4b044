//! Reports from a reconciler to its caller.
//!
//! Each Tenant, each KryptonDeployment, each placed Tenant and the member have one report each. The latest one wins.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use krypton_crds::tenant::{ClusterStatus, HistoryEntry, TenantStatus};
use krypton_types::conditions::{self, ClusterState, Phase};
use krypton_types::deployment::{
    DeploymentKey, DeploymentReport, DesiredDeployment, RECORDED_EVENTS, REPORT_WEIGHT,
    ReportedEvent, ReportedRevisions,
};
use krypton_types::desired::Version;
use krypton_types::labels::Labels;
use krypton_types::member::MemberReport;
use krypton_types::names;
use krypton_types::placed_tenant::PlacedReport;
use krypton_types::tenant::{TenantHistory, TenantKey, TenantReport, UpcomingStep};
use kube::ResourceExt as _;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::owner::{OwnerKey, ReleaseOwner};

/// Key of a report. A placed Tenant has two reports: its state and its placement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReportKey {
    Tenant(TenantKey),
    Deployment(DeploymentKey),
    Placed(TenantKey),
}

impl ReportKey {
    fn weight(&self) -> usize {
        match self {
            Self::Deployment(_) => REPORT_WEIGHT,
            Self::Tenant(_) | Self::Placed(_) => 1,
        }
    }
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
    pub fn last(&self) -> Option<ReportKey> {
        let placed = self.placed.last_key_value();
        let placed = placed.map(|(key, _)| ReportKey::Placed(key.clone()));
        let deployment = self.deployments.last_key_value();
        let deployment = || deployment.map(|(key, _)| ReportKey::Deployment(key.clone()));
        let tenant = self.tenants.last_key_value();
        let tenant = || tenant.map(|(key, _)| ReportKey::Tenant(key.clone()));
        placed.or_else(deployment).or_else(tenant)
    }
}

/// A batch of changes.
#[derive(Debug)]
pub struct ChangeBatch {
    pub changes: Changes,
    /// No changes follow.
    pub last: bool,
}

#[derive(Debug, Default)]
struct Reports {
    member: MemberReport,
    member_changed: bool,
    tenants: BTreeMap<TenantKey, TenantReport>,
    deployments: BTreeMap<DeploymentKey, DeploymentReport>,
    placed: BTreeMap<TenantKey, PlacedReport>,
    changed: BTreeSet<ReportKey>,
}

/// The latest reports, set by the reconciler and taken by its caller. The number of Tenants and KryptonDeployments
/// limits their size.
#[derive(Debug, Default)]
pub struct ReportStore {
    reports: Mutex<Reports>,
    changed: Notify,
}

impl ReportStore {
    /// Sets the Tenant's report. `None` means that it is deleted or names another member.
    pub fn set_tenant(&self, key: &TenantKey, report: Option<TenantReport>) {
        // Compare the trimmed report, as the hub receives only that one.
        let report = report.map(TenantReport::trimmed);
        let report_key = ReportKey::Tenant(key.clone());
        self.set(|reports| &mut reports.tenants, key, report, report_key);
    }

    /// Sets the KryptonDeployment's report. `None` means that it has no order.
    pub fn set_deployment(&self, key: &DeploymentKey, report: Option<DeploymentReport>) {
        let report = report.map(DeploymentReport::trimmed);
        let report_key = ReportKey::Deployment(key.clone());
        self.set(|reports| &mut reports.deployments, key, report, report_key);
    }

    /// Sets the report of a placement order. `None` means that the order no longer exists.
    pub fn set_placed(&self, key: &TenantKey, report: Option<PlacedReport>) {
        let report = report.map(PlacedReport::trimmed);
        let report_key = ReportKey::Placed(key.clone());
        self.set(|reports| &mut reports.placed, key, report, report_key);
    }

    fn set<K: Ord + Clone, R: PartialEq>(
        &self,
        map: impl FnOnce(&mut Reports) -> &mut BTreeMap<K, R>,
        key: &K,
        report: Option<R>,
        report_key: ReportKey,
    ) {
        let mut reports = self.reports.lock();
        let map = map(&mut reports);
        if map.get(key) == report.as_ref() {
            return;
        }
        match report {
            Some(report) => map.insert(key.clone(), report),
            None => map.remove(key),
        };
        reports.changed.insert(report_key);
        drop(reports);
        self.changed.notify_one();
    }

    /// Sets the owner's report, with its next step and the last reconcile request that was handled. An empty
    /// `applied_chart` keeps the chart of the previous report. A Tenant's history and a KryptonDeployment's revisions
    /// stay.
    pub(crate) fn set_owner(
        &self,
        owner: &ReleaseOwner,
        state: ClusterState,
        applied_chart: &str,
        (next, handled_request): (Option<UpcomingStep>, Option<String>),
        gone: bool,
    ) {
        let observed_generation = owner.generation();
        let applied = (!applied_chart.is_empty()).then(|| applied_chart.to_owned());
        match owner {
            ReleaseOwner::Tenant(tenant) => {
                let Some(key) = crate::index::tenant_key(&tenant.metadata) else {
                    return;
                };
                let previous = || recorded_chart(tenant.status.as_ref()?);
                let reports = self.reports.lock();
                let history = reports.tenants.get(&key);
                let history = history.and_then(|report| report.history.clone());
                drop(reports);
                let report = TenantReport {
                    observed_generation,
                    applied_chart: applied.or_else(previous).unwrap_or_default(),
                    state,
                    labels: Labels::new(tenant.labels()),
                    next,
                    handled_request,
                    history,
                };
                self.set_tenant(&key, Some(report));
            }
            ReleaseOwner::Deployment(order) => {
                let key = order.key();
                let previous = self.reports.lock().deployments.get(&key).cloned();
                let previous = previous.filter(|previous| previous.uid == order.uid);
                let (previous_chart, events, revisions) = previous
                    .map(|it| (it.applied_chart, it.events, it.revisions))
                    .unwrap_or_default();
                let report = DeploymentReport {
                    uid: order.uid.clone(),
                    observed_generation,
                    gone,
                    applied_chart: applied.unwrap_or(previous_chart),
                    state,
                    next,
                    handled_request,
                    events,
                    revisions,
                };
                self.set_deployment(&key, Some(report));
            }
        }
    }

    /// Updates the labels in the Tenant's report, if it has one. They change without a new generation and state.
    pub(crate) fn update_labels(&self, key: &OwnerKey, owner: &ReleaseOwner) {
        let (OwnerKey::Tenant(key), ReleaseOwner::Tenant(tenant)) = (key, owner) else {
            return;
        };
        let labels = Labels::new(tenant.labels());
        self.update_tenant(key, |report| {
            let is_changed = report.labels != labels;
            report.labels = labels;
            is_changed
        });
    }

    /// Updates the history in the Tenant's report, if it has one. The history changes without the state if another hub
    /// has run Helm.
    pub(crate) fn update_history(
        &self,
        key: &OwnerKey,
        owner: &ReleaseOwner,
        entries: &[HistoryEntry],
    ) {
        let OwnerKey::Tenant(key) = key else {
            return;
        };
        let uid = owner.uid();
        self.update_tenant(key, |report| {
            let previous = report.history.as_ref();
            if previous.is_some_and(|it| it.uid == uid && it.entries == entries) {
                return false;
            }
            report.history = Some(Arc::new(TenantHistory {
                uid: uid.to_owned(),
                entries: entries.to_vec(),
            }));
            true
        });
    }

    /// Updates the revisions in the report on this order, if it has one. Charts of earlier reports stay.
    pub(crate) fn update_revisions(
        &self,
        order: &DesiredDeployment,
        mut revisions: ReportedRevisions,
    ) {
        let key = order.key();
        let mut reports = self.reports.lock();
        let report = reports.deployments.get_mut(&key);
        let Some(report) = report.filter(|report| report.uid == order.uid) else {
            return;
        };
        if let Some(previous) = report.revisions.as_deref() {
            revisions = revisions.with_charts_of(previous);
            if *previous == revisions {
                return;
            }
        }
        report.revisions = Some(Arc::new(revisions));
        reports.changed.insert(ReportKey::Deployment(key));
        drop(reports);
        self.changed.notify_one();
    }

    /// Changes the Tenant's report, if it has one. `update` returns whether it has changed the report.
    fn update_tenant(&self, key: &TenantKey, update: impl FnOnce(&mut TenantReport) -> bool) {
        let mut reports = self.reports.lock();
        if !reports.tenants.get_mut(key).is_some_and(update) {
            return;
        }
        reports.changed.insert(ReportKey::Tenant(key.clone()));
        drop(reports);
        self.changed.notify_one();
    }

    /// Adds an event to the order's report. Drops the event if the order has no report yet.
    pub(crate) fn add_event(&self, order: &DesiredDeployment, mut reported_event: ReportedEvent) {
        let key = order.key();
        let report = self.reports.lock().deployments.get(&key).cloned();
        let Some(mut report) = report.filter(|report| report.uid == order.uid) else {
            return;
        };
        // An applied chart means that the release existed before and is installed again.
        if reported_event.reason == "HelmInstallStart" && !report.applied_chart.is_empty() {
            "ReleaseMissing".clone_into(&mut reported_event.reason);
        }
        if RECORDED_EVENTS
            .iter()
            .any(|(reason, ..)| *reason == reported_event.reason)
        {
            report.events.push(reported_event);
            self.set_deployment(&key, Some(report));
        }
    }

    pub(crate) fn remove(&self, key: &OwnerKey) {
        match key {
            OwnerKey::Tenant(key) => self.set_tenant(key, None),
            OwnerKey::Deployment(key) => self.set_deployment(key, None),
        }
    }

    /// Returns true if the owner has a report.
    pub(crate) fn contains(&self, key: &OwnerKey) -> bool {
        let reports = self.reports.lock();
        match key {
            OwnerKey::Tenant(key) => reports.tenants.contains_key(key),
            OwnerKey::Deployment(key) => reports.deployments.contains_key(key),
        }
    }

    /// Returns true if the last report covers the owner's current generation.
    pub(crate) fn covers_generation(&self, key: &OwnerKey, owner: &ReleaseOwner) -> bool {
        let reports = self.reports.lock();
        let generation = match key {
            OwnerKey::Tenant(key) => {
                let report = reports.tenants.get(key);
                report.map(|report| report.observed_generation)
            }
            OwnerKey::Deployment(key) => {
                let report = reports.deployments.get(key);
                let report = report.filter(|report| report.uid == owner.uid());
                report.map(|report| report.observed_generation)
            }
        };
        generation == Some(owner.generation())
    }

    pub fn set_member(&self, report: &MemberReport) {
        let mut reports = self.reports.lock();
        if reports.member == *report {
            return;
        }
        reports.member = report.clone();
        reports.member_changed = true;
        drop(reports);
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
                let reports = self.reports.lock();
                if reports.member_changed || !reports.changed.is_empty() {
                    return;
                }
            }
            notified.await;
        }
    }

    /// Marks all reports as changed, so the next `take` returns the full report. Deleted objects are not in it.
    pub fn resend(&self) {
        let mut reports = self.reports.lock();
        let tenants = reports.tenants.keys().cloned().map(ReportKey::Tenant);
        let deployments = reports.deployments.keys().cloned();
        let placed = reports.placed.keys().cloned().map(ReportKey::Placed);
        reports.changed = tenants
            .chain(deployments.map(ReportKey::Deployment))
            .chain(placed)
            .collect();
        reports.member_changed = true;
        drop(reports);
        self.changed.notify_one();
    }

    /// Takes the changes of at most `limit` reports after the key `after`, in key order. It takes fewer if some are
    /// large, but at least one. The last batch contains the member's report.
    pub fn take(&self, after: Option<&ReportKey>, limit: usize) -> ChangeBatch {
        let mut reports = self.reports.lock();
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut keys: Vec<ReportKey> = Vec::new();
        let (mut weight, mut last) = (0_usize, true);
        for key in reports.changed.range((start, Bound::Unbounded)) {
            weight = weight.saturating_add(key.weight());
            if weight > limit && !keys.is_empty() {
                last = false;
                break;
            }
            keys.push(key.clone());
        }
        let mut changes = Changes::default();
        for key in keys {
            reports.changed.remove(&key);
            match key {
                ReportKey::Tenant(key) => {
                    let report = reports.tenants.get(&key).cloned();
                    changes.tenants.insert(key, report);
                }
                ReportKey::Deployment(key) => {
                    let report = reports.deployments.get(&key).cloned();
                    changes.deployments.insert(key, report);
                }
                ReportKey::Placed(key) => {
                    let report = reports.placed.get(&key).cloned();
                    changes.placed.insert(key, report);
                }
            }
        }
        changes.member =
            (last && std::mem::take(&mut reports.member_changed)).then(|| reports.member.clone());
        ChangeBatch { changes, last }
    }

    /// Returns the number of Tenants with a report.
    pub fn tenant_count(&self) -> usize {
        self.reports.lock().tenants.len()
    }

    /// Counts the reported Tenants by phase: ready, pending, error.
    pub fn count_phases(&self, allow_chart_skip: bool) -> [usize; 3] {
        let reports = self.reports.lock();
        let mut phases = [0; 3];
        for report in reports.tenants.values() {
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

    /// Returns the number of changed reports that were not taken.
    pub fn unsent_count(&self) -> usize {
        self.reports.lock().changed.len()
    }

    /// Returns the desired state that the member last reported as applied.
    pub fn applied_version(&self) -> Option<(Version, String)> {
        self.reports.lock().member.applied.clone()
    }
}

/// Returns the chart that this member last applied. At home, `last_applied_chart` can come from a different member.
fn recorded_chart(status: &TenantStatus) -> Option<String> {
    if status.clusters.is_empty() {
        return status.last_applied_chart.clone();
    }
    let own = |cluster: &&ClusterStatus| cluster.name == names::SELF_CLUSTER;
    status.clusters.iter().find(own)?.chart.clone()
}

#[cfg(test)]
mod tests {
    use krypton_crds::tenant::{Tenant, TenantSpec};
    use krypton_types::conditions::{State, Truth};
    use krypton_types::deployment::ReportedRevision;
    use krypton_types::tenant::UpcomingStepKind;

    use super::*;

    #[test]
    fn chart_of_other_member_is_not_reported() {
        let mut status = TenantStatus {
            last_applied_chart: Some("r/c:2".to_owned()),
            ..TenantStatus::default()
        };
        assert_eq!(recorded_chart(&status).as_deref(), Some("r/c:2"));
        let cluster = |name: &str, chart: &str| ClusterStatus {
            name: name.to_owned(),
            chart: Some(chart.to_owned()),
            ..ClusterStatus::default()
        };
        status.clusters = vec![cluster("edge-1", "r/c:2")];
        assert_eq!(recorded_chart(&status), None);
        status.clusters.push(cluster(names::SELF_CLUSTER, "r/c:1"));
        assert_eq!(recorded_chart(&status).as_deref(), Some("r/c:1"));
    }

    fn key(name: &str) -> TenantKey {
        TenantKey::new("default", name)
    }

    fn report(generation: i64) -> TenantReport {
        TenantReport::new(generation, State::new(Truth::True, "Installed", ""))
    }

    #[tokio::test]
    async fn newest_tenant_report_replaces_older_ones() {
        let report_store = ReportStore::default();
        for generation in 1..=1000 {
            report_store.set_tenant(&key("a"), Some(report(generation)));
        }
        let changes = report_store.changes().await;
        assert_eq!(changes.tenants, [(key("a"), Some(report(1000)))].into());
    }

    #[tokio::test]
    async fn only_removal_changes_repeated_report() {
        let report_store = ReportStore::default();
        report_store.set_tenant(&key("a"), Some(report(1)));
        report_store.changes().await;
        report_store.set_tenant(&key("a"), Some(report(1)));
        report_store.set_tenant(&key("b"), None);
        report_store.set_tenant(&key("a"), None);
        let changes = report_store.changes().await;
        assert_eq!(changes.tenants, [(key("a"), None)].into());
    }

    #[test]
    fn changed_labels_alone_change_the_report() {
        let report_store = ReportStore::default();
        let owner = |team: &str| {
            let mut tenant = Tenant::new("a", TenantSpec::default());
            tenant.metadata.namespace = Some("default".to_owned());
            tenant.metadata.labels = Some([("team".to_owned(), team.to_owned())].into());
            ReleaseOwner::Tenant(Arc::new(tenant))
        };
        let owner_key = OwnerKey::Tenant(key("a"));
        report_store.update_labels(&owner_key, &owner("one"));
        assert_eq!(report_store.unsent_count(), 0, "there is no report");
        report_store.set_owner(&owner("one"), report(1).state, "", (None, None), false);
        let labels = || {
            let report = report_store.take(None, 1).changes.tenants.remove(&key("a"));
            report.unwrap().unwrap().labels.to_map()
        };
        assert_eq!(labels()["team"], "one");
        report_store.update_labels(&owner_key, &owner("one"));
        assert_eq!(report_store.unsent_count(), 0, "nothing has changed");
        report_store.update_labels(&owner_key, &owner("two"));
        assert_eq!(labels()["team"], "two");
    }

    #[test]
    fn changed_history_alone_changes_the_report() {
        let report_store = ReportStore::default();
        let mut tenant = Tenant::new("a", TenantSpec::default());
        tenant.metadata.namespace = Some("default".to_owned());
        let owner = ReleaseOwner::Tenant(Arc::new(tenant));
        let owner_key = OwnerKey::Tenant(key("a"));
        let update = |revision: u32| {
            let entry = HistoryEntry {
                revision,
                ..HistoryEntry::default()
            };
            report_store.update_history(&owner_key, &owner, &[entry]);
        };
        let set_state = |state| report_store.set_owner(&owner, state, "", (None, None), false);
        let reported = || {
            let report = report_store.take(None, 1).changes.tenants.remove(&key("a"));
            report.map(|report| report.unwrap().history.map(|it| it.entries[0].revision))
        };
        update(1);
        assert_eq!(report_store.unsent_count(), 0, "there is no report");
        set_state(report(1).state);
        assert_eq!(reported(), Some(None));
        for (revision, expected) in [(1, Some(Some(1))), (1, None), (2, Some(Some(2)))] {
            update(revision);
            assert_eq!(reported(), expected, "{revision}");
        }
        set_state(report(1).state);
        assert_eq!(reported(), None);
        let failed = State::new(Truth::False, "Failed", "");
        set_state(failed.into());
        assert_eq!(reported(), Some(Some(2)), "another state keeps the history");
    }

    fn revisions(numbers: impl IntoIterator<Item = u32>) -> ReportedRevisions {
        let numbered = numbers.into_iter().map(|revision| ReportedRevision {
            revision,
            ..ReportedRevision::default()
        });
        ReportedRevisions::new("agent", numbered.collect())
    }

    #[test]
    fn changed_revisions_alone_change_the_report() {
        let report_store = ReportStore::default();
        let order = DesiredDeployment {
            uid: "uid-1".to_owned(),
            ..DesiredDeployment::default()
        };
        let owner = ReleaseOwner::Deployment(Arc::new(order.clone()));
        let set_state = |state| report_store.set_owner(&owner, state, "", (None, None), false);
        let reported = || {
            let changes = report_store
                .take(None, 1)
                .changes
                .deployments
                .remove(&order.key());
            changes.map(|report| report.unwrap().revisions.map(|it| it.newest_first().len()))
        };
        report_store.update_revisions(&order, revisions(0..1));
        assert_eq!(reported(), None, "there is no report");
        set_state(report(1).state);
        assert_eq!(reported(), Some(None));
        for (count, expected) in [
            (1, Some(Some(1))),
            (1, None),
            (0, Some(Some(0))),
            (2, Some(Some(2))),
        ] {
            report_store.update_revisions(&order, revisions(0..count));
            assert_eq!(reported(), expected, "{count}");
        }
        set_state(State::new(Truth::False, "Failed", "").into());
        assert_eq!(reported(), Some(Some(2)), "another state keeps them");
        let recreated = DesiredDeployment {
            uid: "uid-2".to_owned(),
            ..order.clone()
        };
        report_store.update_revisions(&recreated, revisions(0..9));
        assert_eq!(reported(), None, "the report is on another object");
    }

    #[test]
    fn changed_next_step_alone_changes_deployment_report() {
        let report_store = ReportStore::default();
        let order = DesiredDeployment::default();
        let owner = ReleaseOwner::Deployment(Arc::new(order.clone()));
        let given_up = Some(UpcomingStep::new(UpcomingStepKind::GivenUp, None, 2));
        for (next, is_changed) in [(None, true), (given_up, true), (given_up, false)] {
            report_store.set_owner(&owner, report(1).state, "", (next, None), false);
            let changed = report_store.take(None, 1).changes.deployments;
            let changed = changed.get(&order.key());
            let reported = changed.map(|report| report.as_ref().unwrap().next);
            assert_eq!(reported, is_changed.then_some(next), "{next:?}");
        }
    }

    #[test]
    fn batch_has_fewer_reports_of_deployments() {
        let report_store = ReportStore::default();
        for number in 0..9 {
            let order = DesiredDeployment {
                name: number.to_string(),
                ..DesiredDeployment::default()
            };
            let owner = ReleaseOwner::Deployment(Arc::new(order));
            report_store.set_owner(&owner, report(1).state, "", (None, None), false);
        }
        let sizes = [1, 4, 11, 100].map(|limit| {
            report_store.resend();
            let batch = report_store.take(None, limit);
            (batch.changes.deployments.len(), batch.last)
        });
        assert_eq!(sizes, [(1, false), (1, false), (2, false), (9, true)]);
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
        report_store.set_tenant(&key("a"), Some(report(1)));
        let handled = Some("now".to_owned());
        report_store.set_owner(&owner, report(1).state, "r/c:1", (None, None), false);
        report_store.set_owner(&owner, report(1).state, "", (None, handled.clone()), true);
        let batch = report_store.take(None, 1);
        assert!(batch.changes.deployments.is_empty() && !batch.last);
        let batch = report_store.take(batch.changes.last().as_ref(), 1);
        assert!(batch.changes.tenants.is_empty() && batch.last);
        let reported = batch.changes.deployments[&order.key()].clone().unwrap();
        assert_eq!((reported.uid.as_str(), reported.gone), ("uid-1", true));
        assert_eq!(reported.applied_chart, "r/c:1", "what was known stands");
        assert_eq!(reported.handled_request, handled);
        let owner_key = OwnerKey::Deployment(order.key());
        assert!(report_store.covers_generation(&owner_key, &owner));
        let recreated = DesiredDeployment {
            uid: "uid-2".to_owned(),
            ..order.clone()
        };
        let recreated = ReleaseOwner::Deployment(Arc::new(recreated));
        assert!(!report_store.covers_generation(&owner_key, &recreated));
        report_store.set_tenant(&key("a"), None);
        report_store.resend();
        let full_report = report_store.changes().await;
        assert!(full_report.tenants.is_empty() && full_report.deployments.len() == 1);
    }

    #[tokio::test]
    async fn changes_after_resend_contain_all_current_reports() {
        let report_store = ReportStore::default();
        for name in ["a", "b", "gone"] {
            report_store.set_tenant(&key(name), Some(report(1)));
        }
        report_store.changes().await;
        report_store.set_tenant(&key("gone"), None);
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
            report_store.set_tenant(&key(name), Some(report(1)));
        }
        report_store.resend();
        let mut after = None;
        let mut named = Vec::new();
        loop {
            let batch = report_store.take(after.as_ref(), 2);
            assert!(batch.changes.tenants.len() <= 2);
            assert_eq!(batch.changes.member.is_some(), batch.last);
            after = batch.changes.last().or(after);
            named.extend(batch.changes.tenants.into_keys());
            // A report that was sent and changes again waits until the full report is complete.
            report_store.set_tenant(&key("a"), Some(report(named.len() as i64 + 1)));
            if batch.last {
                break;
            }
        }
        assert_eq!(named, ["a", "b", "c", "d", "e"].map(key));
        let last = report_store.take(None, 2);
        assert_eq!(last.changes.tenants[&key("a")], Some(report(6)));
        assert!(last.last);
    }
}
