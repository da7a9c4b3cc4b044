//! Stores the latest report of each member on each Tenant.

mod queries;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::sync::Mutex;
use krypton_types::allowed_namespaces::AllowedNamespaces;
use krypton_types::conditions::{ClusterState, State};
use krypton_types::labels::Labels;
use krypton_types::report_digest;
use krypton_types::tenant::{TenantKey, TenantReport};
use tokio::sync::Notify;

use crate::leader::home_writer::HomeWrites;
use crate::members::report_set::ReportSet;
use crate::members::tenant_summary::REASON_MAX;
use crate::notify::Notifier;

pub use queries::UninstallCounts;
pub(crate) use queries::{MemberView, ReportedView};

/// Grace period after a member's start, before a member without a full report counts as silent.
pub(crate) const START_GRACE: Duration = Duration::from_secs(45);

/// Limit for the Tenants of one member: ten times the intended size of a cluster.
pub const TENANTS_MAX: usize = 10_000;

/// Limit for the texts of one member's reports, in bytes: the most that 1,000 Tenants need. Beyond it, a report keeps
/// its reasons and loses its messages, labels and history.
const TEXTS_MAX: usize = 16 * 1024 * 1024;

/// Whether the hub has complete reports of a member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ReportState {
    /// The hub waits for a full report, since it or the member's proxy started.
    #[default]
    Pending,
    /// The member has reported everything.
    Complete,
    /// The member is silent, for this reason.
    Silent(String),
}

/// Name of a member.
type MemberName = Arc<str>;

#[derive(Debug, Default)]
struct MemberReports {
    report_state: ReportState,
    /// Time of the last (re)start of its reports.
    started_at: BootTime,
    tenants: ReportSet<Arc<TenantKey>, Arc<TenantReport>>,
    /// Size of all texts in `tenants`, in bytes.
    text_size: usize,
    /// Chart of the latest desired state for this member, in the format of a Tenant's status.
    desired_chart: Option<Arc<str>>,
}

impl MemberReports {
    fn grace_end(&self) -> BootTime {
        self.started_at + START_GRACE
    }
}

#[derive(Debug, Default)]
struct StoreState {
    members: BTreeMap<MemberName, MemberReports>,
    /// The same reports by Tenant. A decision reads only the members of its Tenant.
    by_tenant: BTreeMap<Arc<TenantKey>, BTreeMap<MemberName, Arc<TenantReport>>>,
    /// Members whose full report is outstanding, by the end of their grace period.
    grace_ends: BTreeSet<(BootTime, MemberName)>,
    /// Members that Tenants may reference; `None` until the EdgeClusters are known.
    targets: Option<Arc<Targets>>,
    dirty: DirtyTenants,
    /// Tenants on the home cluster whose status is a summary; `None` until the home cluster's Tenants are
    /// known.
    summarised: Option<BTreeSet<TenantKey>>,
    /// Its lock is taken while this state is locked, and never the other way around.
    notifier: Notifier,
}

/// All members, by name.
pub type Targets = BTreeMap<String, Target>;

/// Properties of a member that matter to a Tenant that references it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Namespace of the object that the member was discovered by. A `clusterRef` may name it too.
    pub source_namespace: Option<String>,
    pub allowed: AllowedNamespaces,
    /// UID of the cluster, once the hub or an agent has reached it.
    pub cluster_uid: Option<String>,
    /// Another member represents the same cluster and acts on it.
    pub duplicate: bool,
    /// `TargetClusterResolved` of its EdgeCluster.
    pub resolved: Option<State>,
}

impl StoreState {
    /// Returns the member's entry, and its name as the shared allocation.
    fn entry(&mut self, member: &str) -> (MemberName, &mut MemberReports) {
        let known = self.members.get_key_value(member);
        let name = known.map_or_else(|| MemberName::from(member), |(name, _)| Arc::clone(name));
        let reports = self.members.entry(Arc::clone(&name)).or_default();
        (name, reports)
    }

    fn insert(
        &mut self,
        name: &MemberName,
        key: TenantKey,
        mut report: TenantReport,
        digest_part: u128,
    ) {
        let known = self.by_tenant.get_key_value(&key);
        let key = known.map_or_else(|| Arc::new(key), |(key, _)| Arc::clone(key));
        let reports = self.members.entry(Arc::clone(name)).or_default();
        let previous = reports.tenants.get(&key);
        let others_size = reports.text_size - previous.map_or(0, |previous| text_size(previous));
        if others_size + text_size(&report) > TEXTS_MAX {
            report = without_messages(report);
        }
        reports.text_size = others_size + text_size(&report);
        let report = Arc::new(report);
        // In a new leader term, the previous report is the baseline.
        for report in previous.into_iter().chain([&report]) {
            self.notifier.tenant(name, &key, report);
        }
        reports
            .tenants
            .insert(Arc::clone(&key), Arc::clone(&report), digest_part);
        let by_member = self.by_tenant.entry(key).or_default();
        by_member.insert(Arc::clone(name), report);
    }

    fn remove(&mut self, member: &str, key: &Arc<TenantKey>) {
        let reports = self.members.get_mut(member);
        if let Some(previous) = reports.and_then(|reports| reports.tenants.remove(key)) {
            self.unindex(member, key, &previous);
        }
        self.dirty.keys.insert(TenantKey::clone(key));
    }

    fn remove_all(&mut self, member: &str) {
        let reports = self.members.get_mut(member);
        let tenants = reports.map(|reports| std::mem::take(&mut reports.tenants));
        for (key, report) in tenants.iter().flat_map(ReportSet::iter) {
            self.unindex(member, key, report);
        }
    }

    /// Removes a member's dropped report from the index and the size of its texts, and marks the Tenant.
    fn unindex(&mut self, member: &str, key: &Arc<TenantKey>, report: &TenantReport) {
        self.notifier.forget_tenant(member, key);
        if let Some(reports) = self.members.get_mut(member) {
            reports.text_size -= text_size(report);
        }
        if let Some(by_member) = self.by_tenant.get_mut(key) {
            by_member.remove(member);
            if by_member.is_empty() {
                self.by_tenant.remove(key);
            }
        }
        self.dirty.keys.insert(TenantKey::clone(key));
    }

    /// Marks a member as changed; its Tenants are then reconciled.
    fn mark_member(&mut self, name: MemberName) {
        self.dirty.members.insert(name);
    }

    fn start_grace(&mut self, name: MemberName, now: BootTime) {
        let reports = self.members.entry(Arc::clone(&name)).or_default();
        let previous_end = (reports.grace_end(), Arc::clone(&name));
        self.grace_ends.remove(&previous_end);
        reports.started_at = now;
        let next_end = (reports.grace_end(), Arc::clone(&name));
        self.grace_ends.insert(next_end);
        self.mark_member(name);
    }
}

fn states(state: &ClusterState) -> impl Iterator<Item = &State> {
    [
        Some(&state.ready),
        state.progress.as_ref(),
        state.error.as_ref(),
    ]
    .into_iter()
    .flatten()
}

fn text_size(report: &TenantReport) -> usize {
    let sizes = states(&report.state).map(|state| state.reason.len() + state.message.len());
    let handled = report.handled_request.as_ref().map_or(0, String::len);
    let history = report.history.iter().flat_map(|history| &history.entries);
    let history = history.flat_map(|entry| [&entry.chart, &entry.chart_version, &entry.by]);
    let sizes = sizes.chain(history.flatten().map(String::len));
    report.applied_chart.len() + handled + report.labels.size() + sizes.sum::<usize>()
}

fn without_messages(report: TenantReport) -> TenantReport {
    let reason_only = |state: &State| state.truncated(REASON_MAX, 0);
    TenantReport {
        applied_chart: String::new(),
        state: ClusterState {
            ready: reason_only(&report.state.ready),
            progress: report.state.progress.as_ref().map(reason_only),
            error: report.state.error.as_ref().map(reason_only),
        },
        labels: Labels::default(),
        history: None,
        ..report
    }
}

/// Changes of one member's reports, each with its part of the digest. Computed before the caller takes a lock.
#[derive(Debug)]
pub struct TenantReportChanges(BTreeMap<TenantKey, Option<(TenantReport, u128)>>);

impl TenantReportChanges {
    pub fn new(changes: BTreeMap<TenantKey, Option<TenantReport>>) -> Self {
        let with_part = |(key, report): (TenantKey, Option<TenantReport>)| {
            let change = report.map(|report| {
                let part = report_digest::part(&key, &report);
                (report, part)
            });
            (key, change)
        };
        Self(changes.into_iter().map(with_part).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The latest report of each member on each Tenant.
#[derive(Debug, Default)]
pub struct TenantReports {
    state: Mutex<StoreState>,
    pub(crate) changed: Notify,
    /// Metrics of the writes on the home cluster.
    pub writes: HomeWrites,
}

impl TenantReports {
    /// Sets the recorder of states for notifications.
    pub(crate) fn set_notifier(&self, notifier: Notifier) {
        self.state.lock().notifier = notifier;
    }

    /// Applies one member's changes. Returns false if the member has more than [`TENANTS_MAX`] Tenants.
    pub fn apply(&self, member: &str, changes: TenantReportChanges) -> bool {
        let mut state = self.state.lock();
        let name = state.entry(member).0;
        for (key, change) in changes.0 {
            match change {
                Some((report, part)) => {
                    state.dirty.keys.insert(key.clone());
                    state.insert(&name, key, report, part);
                }
                None => state.remove(member, &Arc::new(key)),
            }
        }
        let within_limit = state.entry(member).1.tenants.len() <= TENANTS_MAX;
        drop(state);
        self.changed.notify_one();
        within_limit
    }

    /// Whether a session may not add more. It and the session before it have [`TENANTS_MAX`] Tenants each.
    pub(crate) fn is_full(&self, member: &str) -> bool {
        self.state.lock().entry(member).1.tenants.len() >= 2 * TENANTS_MAX
    }

    pub fn set_report_state(&self, member: &str, report_state: ReportState) {
        let mut state = self.state.lock();
        let (name, reports) = state.entry(member);
        if reports.report_state == report_state {
            return;
        }
        let complete = report_state == ReportState::Complete;
        reports.report_state = report_state;
        let grace_end = reports.grace_end();
        if complete {
            for (key, report) in reports.tenants.finish_full_report() {
                state.unindex(member, &key, &report);
            }
        }
        // The grace period no longer applies.
        state.grace_ends.remove(&(grace_end, Arc::clone(&name)));
        state.mark_member(name);
        drop(state);
        self.changed.notify_one();
    }

    /// Marks these Tenants as changed.
    pub fn mark_dirty(&self, keys: BTreeSet<TenantKey>) {
        if !keys.is_empty() {
            self.state.lock().dirty.keys.extend(keys);
            self.changed.notify_one();
        }
    }

    /// Sets the members that Tenants may reference, derived from all EdgeClusters.
    pub fn set_targets(&self, targets: Targets) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        match &state.targets {
            None => state.dirty.all = true,
            Some(previous) if **previous == targets => return,
            Some(previous) => {
                for name in previous.keys().chain(targets.keys()) {
                    let (old, new) = (previous.get(name), targets.get(name));
                    if old == new {
                        continue;
                    }
                    // A Tenant that is placed on a cluster follows it to another member of the same UID.
                    let uids = [old, new].into_iter().flatten();
                    let uids = uids.filter_map(|target| target.cluster_uid.clone());
                    state.dirty.clusters.extend(uids);
                    state.dirty.members.insert(MemberName::from(name.as_str()));
                }
            }
        }
        state.targets = Some(Arc::new(targets));
        drop(guard);
        self.changed.notify_one();
    }

    /// Records the chart of the member's published desired state. Returns whether it differs from the last one.
    pub fn set_desired_chart(&self, member: &str, chart: &str) -> bool {
        let mut state = self.state.lock();
        let is_new = !state.members.contains_key(member);
        let (name, reports) = state.entry(member);
        let changed = reports.desired_chart.as_deref() != Some(chart);
        if changed {
            reports.desired_chart = Some(chart.into());
            // Until the member's reporter connects, the recorded status stays.
            match is_new {
                true => state.start_grace(name, BootTime::now()),
                false => state.mark_member(name),
            }
            drop(state);
            self.changed.notify_one();
        }
        changed
    }

    /// Returns whether the member's published desired state has this chart.
    pub fn has_desired_chart(&self, member: &str, chart: &str) -> bool {
        let state = self.state.lock();
        let reports = state.members.get(member);
        reports.is_some_and(|reports| reports.desired_chart.as_deref() == Some(chart))
    }

    /// Clears the members that Tenants may reference, until the hub has read the EdgeClusters again.
    pub fn reset_targets(&self) {
        self.state.lock().targets = None;
    }

    /// Returns the members that Tenants may reference.
    pub(crate) fn targets(&self) -> Option<Arc<Targets>> {
        self.state.lock().targets.clone()
    }

    /// Starts a new full report of a member. Its earlier reports stay until the full report is complete.
    pub fn begin_full_report(&self, member: &str, now: BootTime) {
        let mut state = self.state.lock();
        let (name, reports) = state.entry(member);
        reports.report_state = ReportState::Pending;
        reports.tenants.begin_full_report();
        state.start_grace(name, now);
        drop(state);
        self.changed.notify_one();
    }

    /// Like [`Self::begin_full_report`], but drops the earlier reports. Ignores unknown members.
    pub fn drop_reports(&self, member: &str, now: BootTime) {
        let mut state = self.state.lock();
        if !state.members.contains_key(member) {
            return;
        }
        state.remove_all(member);
        let (name, reports) = state.entry(member);
        *reports = MemberReports {
            started_at: reports.started_at,
            desired_chart: reports.desired_chart.take(),
            ..MemberReports::default()
        };
        state.start_grace(name, now);
        drop(state);
        self.changed.notify_one();
    }

    /// Returns and clears the changes since the last call.
    pub(crate) fn take_dirty(&self, now: BootTime) -> DirtyTenants {
        let mut state = self.state.lock();
        // A grace period ends without an event.
        while state.grace_ends.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, name)) = state.grace_ends.pop_first() {
                state.mark_member(name);
            }
        }
        std::mem::take(&mut state.dirty)
    }

    /// Sets the Tenants on the home cluster whose status is a summary.
    pub(crate) fn set_summarised(&self, tenants: BTreeSet<TenantKey>) {
        self.state.lock().summarised = Some(tenants);
    }

    /// Sets whether the status of this Tenant is a summary.
    pub(crate) fn set_is_summarised(&self, key: &TenantKey, is_summarised: bool) {
        if let Some(summarised) = &mut self.state.lock().summarised {
            if is_summarised {
                summarised.insert(key.clone());
            } else {
                summarised.remove(key);
            }
        }
    }

    /// Forgets a deleted member that has no reporter.
    pub fn forget(&self, member: &str) {
        let mut state = self.state.lock();
        state.remove_all(member);
        let (name, reports) = state.entry(member);
        let grace_end = reports.grace_end();
        state.grace_ends.remove(&(grace_end, name));
        state.members.remove(member);
    }

    /// Returns when the next grace period ends.
    pub(crate) fn next_grace_end(&self) -> Option<BootTime> {
        self.state.lock().grace_ends.first().map(|(at, _)| *at)
    }
}

/// Changes that require a reconcile.
#[derive(Debug, Default)]
pub(crate) struct DirtyTenants {
    pub(crate) all: bool,
    pub(crate) keys: BTreeSet<TenantKey>,
    /// Members whose state has changed.
    pub(crate) members: BTreeSet<Arc<str>>,
    /// UIDs of clusters that now belong to another member, or whose member's state has changed.
    pub(crate) clusters: BTreeSet<String>,
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use krypton_types::conditions::{Truth, reason};

    use super::*;
    use crate::leader::Leader;

    #[test]
    fn change_in_new_term_is_notified() {
        let (leader_state, leader) = Leader::with_state(Leader::always_leading().state());
        let (notifier, next_change) = Notifier::recording(leader);
        let reports = TenantReports::default();
        reports.set_notifier(notifier);
        let apply = |truth, reason: &str| {
            let report = TenantReport::new(1, State::new(truth, reason, ""));
            let changes = [(TenantKey::new("n", "acme"), Some(report))].into();
            assert!(reports.apply("edge-1", TenantReportChanges::new(changes)));
        };
        apply(Truth::True, reason::INSTALLED);
        leader_state.send_replace(Leader::always_leading().state());
        apply(Truth::False, reason::NOT_READY);
        assert_eq!(next_change().as_deref(), Some("Tenant: Ready -> Pending"));
    }

    #[test]
    fn member_reports_are_kept_until_resync_completes() {
        let reports = TenantReports::default();
        let key = |name: &str| TenantKey::new("n", name);
        let installed = |name: &str| {
            let state = State::new(Truth::True, reason::INSTALLED, "");
            (key(name), Some(TenantReport::new(1, state)))
        };
        let stored_report = |name: &str| {
            let view = reports.view(&key(name), None, ["edge-1"], BootTime::default());
            view.members["edge-1"].report.clone()
        };
        reports.begin_full_report("edge-1", BootTime::default());
        let both = [installed("a"), installed("b")].into();
        assert!(reports.apply("edge-1", TenantReportChanges::new(both)));
        reports.set_report_state("edge-1", ReportState::Complete);
        reports.begin_full_report("edge-1", BootTime::default());
        let one = [installed("a")].into();
        assert!(reports.apply("edge-1", TenantReportChanges::new(one)));
        assert!(stored_report("b").is_some());
        reports.set_report_state("edge-1", ReportState::Complete);
        assert!(stored_report("a").is_some());
        assert!(stored_report("b").is_none());
    }

    #[test]
    fn member_report_texts_are_bounded_but_reasons_kept() {
        let reports = TenantReports::default();
        let key = |number: usize| TenantKey::new("n", format!("t{number}"));
        let long = |letter: &str| {
            let text = letter.repeat(1024);
            let failed = State::new(Truth::True, "UpgradeFailed", text.clone());
            let state = ClusterState {
                ready: State::new(Truth::False, reason::INSTALL_FAILED, text),
                progress: Some(failed.clone()),
                error: Some(failed),
            };
            TenantReport {
                applied_chart: "r/c:1".to_owned(),
                labels: Labels::new(&[("team".to_owned(), letter.to_owned())].into()),
                ..TenantReport::new(1, state)
            }
        };
        let send_reports = |letter: &str, numbers: Range<usize>| {
            let changes = numbers.map(|number| (key(number), Some(long(letter))));
            assert!(reports.apply("edge-1", TenantReportChanges::new(changes.collect())));
            reports.set_report_state("edge-1", ReportState::Complete);
        };
        send_reports("a", 0..TENANTS_MAX);
        let stored_report = |number: usize| {
            let view = reports.view(&key(number), None, [], BootTime::default());
            view.members["edge-1"].report.clone().unwrap()
        };
        let size = |number| serde_json::to_vec(&*stored_report(number)).unwrap().len();
        let texts = (0..TENANTS_MAX).map(|number| size(number).saturating_sub(256));
        let texts: usize = texts.sum();
        assert!(texts <= TEXTS_MAX + 2 * 1024 * 1024, "{texts}");
        assert_eq!(*stored_report(0), long("a"));
        let last = stored_report(TENANTS_MAX - 1);
        assert_eq!(last.state.ready.reason, reason::INSTALL_FAILED);
        assert_eq!(last.state.ready.message, "");
        assert!(last.labels.is_empty());
        // Both sides still compute the same digest.
        let digest = reports.digest("edge-1");
        let other = TenantReports::default();
        let changes = (0..TENANTS_MAX).map(|number| (key(number), Some(long("a"))));
        other.apply("edge-1", TenantReportChanges::new(changes.collect()));
        other.set_report_state("edge-1", ReportState::Complete);
        assert_eq!(digest, other.digest("edge-1"));
        // A shorter report makes room.
        let removals = (0..TENANTS_MAX - 1).map(|number| (key(number), None));
        reports.apply("edge-1", TenantReportChanges::new(removals.collect()));
        send_reports("b", TENANTS_MAX - 1..TENANTS_MAX);
        assert_eq!(*stored_report(TENANTS_MAX - 1), long("b"));
    }
}
