//! Stores the latest report of each member on each Tenant.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use krypton_crds::edge_cluster::TenantSummaries;
use krypton_runtime::clock::BootTime;
use krypton_runtime::sync::{Mutex, MutexGuard};
use krypton_types::allowed_namespaces::AllowedNamespaces;
use krypton_types::conditions::{self, ClusterState, Readiness, State, reason};
use krypton_types::fleet_tenants::{FleetTenant, PAGE_MAX, Position};
use krypton_types::names;
use krypton_types::report_digest;
use krypton_types::tenant::{TenantKey, TenantReport};
use tokio::sync::Notify;

use crate::leader::home_writer::HomeWrites;
use crate::members::report_set::ReportSet;
use crate::members::tenant_summary;

/// Grace period after a member's start, before a member without a full report counts as silent.
pub(crate) const START_GRACE: Duration = Duration::from_secs(45);

/// Limit for the Tenants of one member: ten times the intended size of a cluster.
pub const TENANTS_MAX: usize = 10_000;

/// Limit for the texts of one member's reports, in bytes: twice the most that 1,000 Tenants need. Beyond it, a
/// report keeps its reasons and loses its messages.
pub(crate) const TEXTS_MAX: usize = 16 * 1024 * 1024;
/// Tenants that are not Ready and that an EdgeCluster lists even if their own status has the member.
const WORST_MAX: usize = 20;
/// Limit for the reports that are read for one page, under the lock.
const PAGE_READ_MAX: usize = TENANTS_MAX;
/// Limit for the texts on a page of reports, in bytes.
const PAGE_TEXTS_MAX: usize = 1024 * 1024;
/// Longest reason of a report without messages, in bytes.
pub(crate) const REASON_MAX: usize = 128;

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
        report: TenantReport,
        digest_part: u128,
    ) {
        let known = self.by_tenant.get_key_value(&key);
        let key = known.map_or_else(|| Arc::new(key), |(key, _)| Arc::clone(key));
        let reports = self.members.entry(Arc::clone(name)).or_default();
        let previous = reports.tenants.get(&key);
        let others_size = reports.text_size - previous.map_or(0, |previous| text_size(previous));
        let mut report = report;
        if others_size + text_size(&report) > TEXTS_MAX {
            report = without_messages(report);
        }
        reports.text_size = others_size + text_size(&report);
        let report = Arc::new(report);
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
        let previous_end = BootTime(reports.started_at.0 + START_GRACE);
        reports.started_at = now;
        self.grace_ends.remove(&(previous_end, Arc::clone(&name)));
        self.grace_ends
            .insert((BootTime(now.0 + START_GRACE), Arc::clone(&name)));
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
    report.applied_chart.len() + sizes.sum::<usize>()
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
    /// Applies one member's changes. Returns false if the member has more than [`TENANTS_MAX`] Tenants.
    pub fn apply(&self, member: &str, changes: TenantReportChanges) -> bool {
        let mut state = self.lock();
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

    pub fn set_report_state(&self, member: &str, report_state: ReportState) {
        let mut state = self.lock();
        let (name, reports) = state.entry(member);
        if reports.report_state == report_state {
            return;
        }
        let complete = report_state == ReportState::Complete;
        reports.report_state = report_state;
        let grace_end = BootTime(reports.started_at.0 + START_GRACE);
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
            self.lock().dirty.keys.extend(keys);
            self.changed.notify_one();
        }
    }

    /// Sets the members that Tenants may reference, derived from all EdgeClusters.
    pub fn set_targets(&self, targets: Targets) {
        let mut state = self.lock();
        let Some(previous) = state.targets.replace(Arc::default()) else {
            state.targets = Some(Arc::new(targets));
            state.dirty.all = true;
            drop(state);
            self.changed.notify_one();
            return;
        };
        let mut changed = false;
        let names = previous.keys().chain(targets.keys());
        for name in names {
            let (old, new) = (previous.get(name), targets.get(name));
            if old == new {
                continue;
            }
            changed = true;
            // A Tenant that is placed on a cluster follows it to another member of the same UID.
            let uids = [old, new].into_iter().flatten();
            let uids = uids.filter_map(|target| target.cluster_uid.clone());
            state.dirty.clusters.extend(uids);
            state.dirty.members.insert(MemberName::from(name.as_str()));
        }
        state.targets = Some(if changed { Arc::new(targets) } else { previous });
        drop(state);
        if changed {
            self.changed.notify_one();
        }
    }

    /// Records the chart of the member's published desired state. Returns whether it differs from the last one.
    pub fn set_desired_chart(&self, member: &str, chart: &str) -> bool {
        let mut state = self.lock();
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
        let state = self.lock();
        let reports = state.members.get(member);
        reports.is_some_and(|reports| reports.desired_chart.as_deref() == Some(chart))
    }

    /// Clears the members that Tenants may reference, until the hub has read the EdgeClusters again.
    pub fn reset_targets(&self) {
        self.lock().targets = None;
    }

    /// Returns the members that Tenants may reference.
    pub(crate) fn targets(&self) -> Option<Arc<Targets>> {
        self.lock().targets.clone()
    }

    /// Starts a new full report of a member. Its earlier reports stay until the full report is complete.
    pub fn begin_full_report(&self, member: &str, now: BootTime) {
        let mut state = self.lock();
        let (name, reports) = state.entry(member);
        reports.report_state = ReportState::Pending;
        reports.tenants.begin_full_report();
        state.start_grace(name, now);
        drop(state);
        self.changed.notify_one();
    }

    /// Like [`Self::begin_full_report`], but drops the earlier reports. Ignores unknown members.
    pub fn drop_reports(&self, member: &str, now: BootTime) {
        let mut state = self.lock();
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

    /// Returns the number of Tenants that the member has reported and the digest of their reports. Returns
    /// `None` until the full report is complete.
    pub fn digest(&self, member: &str) -> Option<(u64, u128)> {
        let state = self.lock();
        let reports = state.members.get(member)?;
        let complete = reports.tenants.is_complete();
        complete.then(|| reports.tenants.digest())
    }

    /// Counts a member's Tenants whose release was uninstalled with the member. Returns `None` until the full
    /// report is complete.
    pub fn uninstall_counts(&self, member: &str) -> Option<UninstallCounts> {
        let state = self.lock();
        let reports = state.members.get(member)?;
        if !reports.tenants.is_complete() || reports.report_state != ReportState::Complete {
            return None;
        }
        let tenants = reports.tenants.iter();
        let uninstalled =
            tenants.filter(|(_, report)| report.state.ready.reason == reason::UNINSTALLED);
        Some(UninstallCounts {
            total: reports.tenants.len(),
            uninstalled: uninstalled.count(),
        })
    }

    /// Counts the Tenants of a member by phase: all, ready, pending, error.
    pub fn counts(&self, member: &str, allow_chart_skip: bool) -> PhaseCounts {
        let state = self.lock();
        let mut counts = PhaseCounts::default();
        let reports = state.members.get(member).into_iter();
        for (_, report) in reports.flat_map(|reports| reports.tenants.iter()) {
            counts.total += 1;
            match conditions::phase(&report.state, allow_chart_skip) {
                conditions::Phase::Ready => counts.ready += 1,
                conditions::Phase::Pending => counts.pending += 1,
                conditions::Phase::Error => counts.error += 1,
            }
        }
        counts
    }

    /// Returns at most [`PAGE_MAX`] of the matching reports after this position. Also returns the position of the last
    /// report that it has read, unless no report follows it.
    pub(crate) fn page(
        &self,
        member: Option<&str>,
        after: Option<&Position>,
        matches: impl Fn(&TenantKey, &TenantReport) -> bool,
    ) -> (Vec<FleetTenant>, Option<Position>) {
        let after = after.map(|position| (&position.member, Arc::new(position.key.clone())));
        let first_member = after.as_ref().map_or("", |(member, _)| member.as_str());
        let state = self.lock();
        let range = (Bound::Included(first_member), Bound::Unbounded);
        let members = state.members.range::<str, _>(range);
        let members = members.filter(|(name, _)| member.is_none_or(|member| member == &***name));
        let (mut tenants, mut size) = (Vec::new(), 0);
        let (mut read, mut last) = (0, None);
        for (name, reports) in members {
            let start_key = after
                .as_ref()
                .filter(|(member, _)| member.as_str() == &**name);
            for (key, report) in reports.tenants.after(start_key.map(|(_, key)| key)) {
                if tenants.len() == PAGE_MAX || size > PAGE_TEXTS_MAX || read == PAGE_READ_MAX {
                    let position = |(name, key): (&MemberName, &Arc<TenantKey>)| Position {
                        member: name.to_string(),
                        key: TenantKey::clone(key),
                    };
                    return (tenants, last.map(position));
                }
                read += 1;
                last = Some((name, key));
                if !matches(key, report) {
                    continue;
                }
                size += text_size(report);
                tenants.push(FleetTenant {
                    member: name.to_string(),
                    key: TenantKey::clone(key),
                    report: TenantReport::clone(report),
                });
            }
        }
        (tenants, None)
    }

    fn lock(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the reports on one Tenant, and the members in `recorded` without a report. For a Tenant of one
    /// member, `only`, returns that member only.
    pub(crate) fn view<'a>(
        &self,
        key: &TenantKey,
        only: Option<&'a str>,
        recorded: impl IntoIterator<Item = &'a str>,
        now: BootTime,
    ) -> ReportedView {
        let state = self.lock();
        let mut view = ReportedView {
            targets: state.targets.clone(),
            ..ReportedView::default()
        };
        let reported = state.by_tenant.get(key);
        let member_view = |name: &str, report: Option<&Arc<TenantReport>>| {
            let (name, member) = state.members.get_key_value(name)?;
            let view = MemberView {
                report_state: member.report_state.clone(),
                report: report.cloned(),
                in_grace: now.since(member.started_at) < START_GRACE,
                desired_chart: member.desired_chart.clone(),
            };
            Some((Arc::clone(name), view))
        };
        if only.is_none() {
            let reported = reported.into_iter().flatten();
            view.members = reported
                .filter_map(|(name, report)| member_view(name, Some(report)))
                .collect();
        }
        for name in recorded
            .into_iter()
            .filter(|name| only.is_none_or(|only| only == *name))
            .chain(only)
        {
            let report = reported.and_then(|reported| reported.get(name));
            view.members.extend(member_view(name, report));
        }
        view
    }

    /// Counts the members that have reported everything except this Tenant, without those that are recorded.
    pub(crate) fn count_without(
        &self,
        key: &TenantKey,
        is_recorded: impl Fn(&str) -> bool,
    ) -> usize {
        let state = self.lock();
        let Some(targets) = &state.targets else {
            return 0;
        };
        let reported = state.by_tenant.get(key);
        let lacks_tenant = |(name, member): &(&MemberName, &MemberReports)| {
            let name: &str = name;
            let has = reported.is_some_and(|reported| reported.contains_key(name));
            let counts = name != names::SELF_CLUSTER && targets.contains_key(name);
            member.report_state == ReportState::Complete && counts && !has && !is_recorded(name)
        };
        state.members.iter().filter(lacks_tenant).count()
    }

    /// Tenants that the member has reported.
    pub(crate) fn reported_by(&self, member: &str) -> BTreeSet<TenantKey> {
        let state = self.lock();
        let reports = state.members.get(member);
        let reported = reports
            .into_iter()
            .flat_map(|reports| reports.tenants.iter());
        reported.map(|(key, _)| TenantKey::clone(key)).collect()
    }

    /// Returns and clears the changes since the last call.
    pub(crate) fn take_dirty(&self, now: BootTime) -> DirtyTenants {
        let mut state = self.lock();
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
        self.lock().summarised = Some(tenants);
    }

    /// Sets whether the status of this Tenant is a summary.
    pub(crate) fn set_is_summarised(&self, key: &TenantKey, is_summarised: bool) {
        if let Some(summarised) = &mut self.lock().summarised {
            if is_summarised {
                summarised.insert(key.clone());
            } else {
                summarised.remove(key);
            }
        }
    }

    /// Lists the member's state in Tenants whose status is a summary, and in the worst others. Returns `None` until
    /// these Tenants and the member's full report are known.
    pub fn tenant_summaries(
        &self,
        member: &str,
        allow_chart_skip: bool,
    ) -> Option<TenantSummaries> {
        let state = self.lock();
        let summarised = state.summarised.as_ref()?;
        let reports = state
            .members
            .get(member)
            .filter(|reports| reports.tenants.is_complete())?;
        let mut worst: Vec<(Readiness, &TenantKey)> = reports
            .tenants
            .iter()
            .map(|(key, report)| {
                (
                    Readiness::from_state(&report.state, allow_chart_skip),
                    &**key,
                )
            })
            .filter(|(readiness, _)| *readiness != Readiness::Ready)
            .collect();
        if worst.len() > WORST_MAX {
            worst.select_nth_unstable(WORST_MAX);
        }
        let worst = worst.into_iter().take(WORST_MAX).map(|(_, key)| key);
        let listed: BTreeSet<&TenantKey> = summarised.iter().chain(worst).collect();
        let reported = listed.into_iter().filter_map(|key| {
            let report = reports.tenants.get(key)?;
            Some((key, &report.state))
        });
        Some(tenant_summary::summaries(reported, allow_chart_skip))
    }

    /// Forgets a deleted member that has no reporter.
    pub fn forget(&self, member: &str) {
        let mut state = self.lock();
        state.remove_all(member);
        let (name, reports) = state.entry(member);
        let grace_end = BootTime(reports.started_at.0 + START_GRACE);
        state.grace_ends.remove(&(grace_end, name));
        state.members.remove(member);
    }

    /// Returns when the next grace period ends.
    pub(crate) fn next_grace_end(&self) -> Option<BootTime> {
        self.lock().grace_ends.first().map(|(at, _)| *at)
    }
}

/// Number of Tenants on a member that is being decommissioned, and how many of them are uninstalled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UninstallCounts {
    pub total: usize,
    pub uninstalled: usize,
}

/// The hub's view of one member for one Tenant.
#[derive(Clone, Debug)]
pub(crate) struct MemberView {
    pub(crate) report_state: ReportState,
    pub(crate) report: Option<Arc<TenantReport>>,
    /// The member is within its grace period.
    pub(crate) in_grace: bool,
    /// Chart of the member's published desired state.
    pub(crate) desired_chart: Option<Arc<str>>,
}

/// The hub's view of all members for one Tenant.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReportedView {
    /// All members that have this Tenant or may have it.
    pub(crate) members: BTreeMap<Arc<str>, MemberView>,
    /// Number of other members with a full report that does not contain this Tenant.
    pub(crate) others_without: usize,
    pub(crate) targets: Option<Arc<Targets>>,
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

/// Tenants of a member by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseCounts {
    pub total: u32,
    pub ready: u32,
    pub pending: u32,
    pub error: u32,
}

#[cfg(test)]
mod tests {
    use krypton_types::conditions::Truth;

    use super::*;

    #[test]
    fn listing_has_worst_twenty_and_summarised_tenants() {
        let key = |name: &str| TenantKey {
            namespace: "default".to_owned(),
            name: name.to_owned(),
        };
        let report = |truth| TenantReport {
            observed_generation: 1,
            applied_chart: String::new(),
            state: ClusterState::from(State::new(truth, "R", "")),
            next: None,
        };
        let reports = TenantReports::default();
        let failed = (0..30).map(|number| (key(&format!("b-{number}")), Truth::False));
        let all = failed.chain([(key("a"), Truth::True)]);
        let all = all.map(|(key, truth)| (key, Some(report(truth))));
        reports.apply("edge-1", TenantReportChanges::new(all.collect()));
        reports.set_report_state("edge-1", ReportState::Complete);
        assert_eq!(reports.tenant_summaries("edge-1", false), None);
        for (summarised, expected) in [(None, WORST_MAX), (Some(key("a")), WORST_MAX + 1)] {
            reports.set_summarised(summarised.into_iter().collect());
            let listed = reports.tenant_summaries("edge-1", false).unwrap();
            let not_ready = listed.tenants.iter().filter(|it| it.state == "NotReady");
            assert_eq!(not_ready.count(), WORST_MAX);
            assert_eq!((listed.tenants.len(), listed.omitted), (expected, 0));
        }
    }
}
