//! Stores the latest reports of all members: one slot for each member and Tenant.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use krypton_crds::edge_cluster::TenantSummaries;
use krypton_runtime::clock::BootTime;
use krypton_runtime::sync::{Mutex, MutexGuard};
use krypton_types::allowed_namespaces::Allowed;
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
pub enum Hearing {
    /// The hub waits for a full report, since it or the member's proxy started.
    #[default]
    NotYet,
    /// The member has reported everything.
    Full,
    /// The member is silent, for this reason.
    Silent(String),
}

/// Name of a member.
type Name = Arc<str>;

#[derive(Debug, Default)]
struct MemberReports {
    hearing: Hearing,
    /// Time of the last (re)start of its reports.
    begun: BootTime,
    tenants: ReportSet<Arc<TenantKey>, Arc<TenantReport>>,
    /// Size of all texts in `tenants`, in bytes.
    texts: usize,
    /// Chart of the latest desired state for this member, in the format of a Tenant's status.
    dealt: Option<Arc<str>>,
}

#[derive(Debug, Default)]
struct Board {
    members: BTreeMap<Name, MemberReports>,
    /// The same reports by Tenant. A decision reads only the members of its Tenant.
    reporters: BTreeMap<Arc<TenantKey>, BTreeMap<Name, Arc<TenantReport>>>,
    /// Members whose full report is outstanding, by the end of their grace period.
    awaited: BTreeSet<(BootTime, Name)>,
    /// Members that Tenants may reference; `None` until the EdgeClusters are known.
    targets: Option<Arc<Targets>>,
    dirty: Dirty,
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
    pub allowed: Allowed,
    /// UID of the cluster, once the hub or an agent has reached it.
    pub cluster_uid: Option<String>,
    /// Another member represents the same cluster and acts on it.
    pub duplicate: bool,
    /// `TargetClusterResolved` of its EdgeCluster.
    pub resolved: Option<State>,
}

impl Board {
    /// Returns the member's entry, and its name as the shared allocation.
    fn member(&mut self, member: &str) -> (Name, &mut MemberReports) {
        let known = self.members.get_key_value(member);
        let name = known.map_or_else(|| Name::from(member), |(name, _)| Arc::clone(name));
        let reports = self.members.entry(Arc::clone(&name)).or_default();
        (name, reports)
    }

    fn put(&mut self, name: &Name, key: TenantKey, report: TenantReport, part: u128) {
        let known = self.reporters.get_key_value(&key);
        let key = known.map_or_else(|| Arc::new(key), |(key, _)| Arc::clone(key));
        let reports = self.members.entry(Arc::clone(name)).or_default();
        let before = reports.tenants.get(&key);
        let others = reports.texts - before.map_or(0, |before| texts(before));
        let mut report = report;
        if others + texts(&report) > TEXTS_MAX {
            report = without_messages(report);
        }
        reports.texts = others + texts(&report);
        let report = Arc::new(report);
        reports
            .tenants
            .insert(Arc::clone(&key), Arc::clone(&report), part);
        let reporters = self.reporters.entry(key).or_default();
        reporters.insert(Arc::clone(name), report);
    }

    fn take_out(&mut self, member: &str, key: &Arc<TenantKey>) {
        let reports = self.members.get_mut(member);
        if let Some(before) = reports.and_then(|reports| reports.tenants.remove(key)) {
            self.is_gone(member, key, &before);
        }
        self.dirty.keys.insert(TenantKey::clone(key));
    }

    fn take_out_all(&mut self, member: &str) {
        let reports = self.members.get_mut(member);
        let tenants = reports.map(|reports| std::mem::take(&mut reports.tenants));
        for (key, report) in tenants.iter().flat_map(ReportSet::iter) {
            self.is_gone(member, key, report);
        }
    }

    /// Follows the removal of a member's report.
    fn is_gone(&mut self, member: &str, key: &Arc<TenantKey>, report: &TenantReport) {
        if let Some(reports) = self.members.get_mut(member) {
            reports.texts -= texts(report);
        }
        if let Some(reporters) = self.reporters.get_mut(key) {
            reporters.remove(member);
            if reporters.is_empty() {
                self.reporters.remove(key);
            }
        }
        self.dirty.keys.insert(TenantKey::clone(key));
    }

    /// Marks a member as changed; its Tenants are then reconciled.
    fn moves(&mut self, name: Name) {
        self.dirty.members.insert(name);
    }

    fn begins(&mut self, name: Name, now: BootTime) {
        let reports = self.members.entry(Arc::clone(&name)).or_default();
        let before = BootTime(reports.begun.0 + START_GRACE);
        reports.begun = now;
        self.awaited.remove(&(before, Arc::clone(&name)));
        self.awaited
            .insert((BootTime(now.0 + START_GRACE), Arc::clone(&name)));
        self.moves(name);
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

fn texts(report: &TenantReport) -> usize {
    let states = states(&report.state).map(|state| state.reason.len() + state.message.len());
    report.applied_chart.len() + states.sum::<usize>()
}

fn without_messages(report: TenantReport) -> TenantReport {
    let cut = |state: &State| state.within(REASON_MAX, 0);
    TenantReport {
        applied_chart: String::new(),
        state: ClusterState {
            ready: cut(&report.state.ready),
            progress: report.state.progress.as_ref().map(cut),
            error: report.state.error.as_ref().map(cut),
        },
        ..report
    }
}

/// Changes, each with its part of the digest. Computed before the caller takes a lock.
#[derive(Debug)]
pub struct Changed(BTreeMap<TenantKey, Option<(TenantReport, u128)>>);

impl Changed {
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

/// The latest reports of all members: one slot for each member and Tenant.
#[derive(Debug, Default)]
pub struct Reports {
    state: Mutex<Board>,
    pub(crate) changed: Notify,
    /// Metrics of the writes on the home cluster.
    pub writes: HomeWrites,
}

impl Reports {
    /// Applies one member's changes. Returns false if the member has more than [`TENANTS_MAX`] Tenants.
    pub fn report(&self, member: &str, changes: Changed) -> bool {
        let mut state = self.lock();
        let report_store = &mut *state;
        let name = report_store.member(member).0;
        for (key, change) in changes.0 {
            match change {
                Some((report, part)) => {
                    report_store.dirty.keys.insert(key.clone());
                    report_store.put(&name, key, report, part);
                }
                None => report_store.take_out(member, &Arc::new(key)),
            }
        }
        let kept = report_store.member(member).1.tenants.len() <= TENANTS_MAX;
        drop(state);
        self.changed.notify_one();
        kept
    }

    pub fn hearing(&self, member: &str, hearing: Hearing) {
        let mut state = self.lock();
        let (name, reports) = state.member(member);
        if reports.hearing == hearing {
            return;
        }
        let full = hearing == Hearing::Full;
        reports.hearing = hearing;
        let until = BootTime(reports.begun.0 + START_GRACE);
        if full {
            for (key, report) in reports.tenants.finish() {
                state.is_gone(member, &key, &report);
            }
        }
        // The grace period no longer applies.
        state.awaited.remove(&(until, Arc::clone(&name)));
        state.moves(name);
        drop(state);
        self.changed.notify_one();
    }

    /// Marks these Tenants as changed.
    pub fn touch(&self, keys: BTreeSet<TenantKey>) {
        if !keys.is_empty() {
            self.lock().dirty.keys.extend(keys);
            self.changed.notify_one();
        }
    }

    /// Sets the members that Tenants may reference, derived from all EdgeClusters.
    pub fn set_targets(&self, targets: Targets) {
        let mut state = self.lock();
        let Some(before) = state.targets.replace(Arc::default()) else {
            state.targets = Some(Arc::new(targets));
            state.dirty.all = true;
            drop(state);
            self.changed.notify_one();
            return;
        };
        let mut news = false;
        let both = before.keys().chain(targets.keys());
        for name in both {
            let (was, is) = (before.get(name), targets.get(name));
            if was == is {
                continue;
            }
            news = true;
            // A Tenant that is placed on a cluster follows it to another member of the same UID.
            let uids = [was, is].into_iter().flatten();
            let uids = uids.filter_map(|target| target.cluster_uid.clone());
            state.dirty.clusters.extend(uids);
            state.dirty.members.insert(Name::from(name.as_str()));
        }
        state.targets = Some(if news { Arc::new(targets) } else { before });
        drop(state);
        if news {
            self.changed.notify_one();
        }
    }

    /// Records the chart of the desired state that the hub has given to the member; returns whether it differs.
    pub fn dealt(&self, member: &str, chart: &str) -> bool {
        let mut state = self.lock();
        let new = !state.members.contains_key(member);
        let (name, reports) = state.member(member);
        let another = reports.dealt.as_deref() != Some(chart);
        if another {
            reports.dealt = Some(chart.into());
            // Until the member's reporter connects, the recorded status stays.
            match new {
                true => state.begins(name, BootTime::now()),
                false => state.moves(name),
            }
            drop(state);
            self.changed.notify_one();
        }
        another
    }

    /// Returns whether the hub has given this chart to the member.
    pub fn was_dealt(&self, member: &str, chart: &str) -> bool {
        let state = self.lock();
        let reports = state.members.get(member);
        reports.is_some_and(|reports| reports.dealt.as_deref() == Some(chart))
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
    pub fn begin(&self, member: &str, now: BootTime) {
        let mut state = self.lock();
        let (name, reports) = state.member(member);
        reports.hearing = Hearing::NotYet;
        reports.tenants.begin();
        state.begins(name, now);
        drop(state);
        self.changed.notify_one();
    }

    /// Like [`Self::begin`], but drops the earlier reports. Ignores unknown members.
    pub fn forget_said(&self, member: &str, now: BootTime) {
        let mut state = self.lock();
        if !state.members.contains_key(member) {
            return;
        }
        state.take_out_all(member);
        let (name, reports) = state.member(member);
        *reports = MemberReports {
            begun: reports.begun,
            dealt: reports.dealt.take(),
            ..MemberReports::default()
        };
        state.begins(name, now);
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
    pub fn retired(&self, member: &str) -> Option<Retired> {
        let state = self.lock();
        let reports = state.members.get(member)?;
        if !reports.tenants.is_complete() || reports.hearing != Hearing::Full {
            return None;
        }
        let tenants = reports.tenants.iter();
        let gone = tenants.filter(|(_, report)| report.state.ready.reason == reason::UNINSTALLED);
        Some(Retired {
            tenants: reports.tenants.len(),
            gone: gone.count(),
        })
    }

    /// Counts the Tenants of a member by phase: all, ready, pending, error.
    pub fn counts(&self, member: &str, allow_chart_skip: bool) -> Counts {
        let state = self.lock();
        let mut counts = Counts::default();
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

    /// Returns at most [`PAGE_MAX`] of the wanted reports after this position. Also returns the position of the last
    /// report that it has read, unless no report follows it.
    pub(crate) fn page(
        &self,
        member: Option<&str>,
        after: Option<&Position>,
        wants: impl Fn(&TenantKey, &TenantReport) -> bool,
    ) -> (Vec<FleetTenant>, Option<Position>) {
        let after = after.map(|position| (&position.member, Arc::new(position.key.clone())));
        let first = after.as_ref().map_or("", |(member, _)| member.as_str());
        let state = self.lock();
        let from = (Bound::Included(first), Bound::Unbounded);
        let members = state.members.range::<str, _>(from);
        let members = members.filter(|(name, _)| member.is_none_or(|member| member == &***name));
        let (mut tenants, mut size) = (Vec::new(), 0);
        let (mut read, mut last) = (0, None);
        for (name, reports) in members {
            let begun = after
                .as_ref()
                .filter(|(member, _)| member.as_str() == &**name);
            for (key, report) in reports.tenants.after(begun.map(|(_, key)| key)) {
                if tenants.len() == PAGE_MAX || size > PAGE_TEXTS_MAX || read == PAGE_READ_MAX {
                    let position = |(name, key): (&Name, &Arc<TenantKey>)| Position {
                        member: name.to_string(),
                        key: TenantKey::clone(key),
                    };
                    return (tenants, last.map(position));
                }
                read += 1;
                last = Some((name, key));
                if !wants(key, report) {
                    continue;
                }
                size += texts(report);
                tenants.push(FleetTenant {
                    member: name.to_string(),
                    key: TenantKey::clone(key),
                    report: TenantReport::clone(report),
                });
            }
        }
        (tenants, None)
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The reports on one Tenant, and the members in `asked` without a report. For a Tenant of one member,
    /// `sole`, that member only.
    pub(crate) fn of<'a>(
        &self,
        key: &TenantKey,
        sole: Option<&'a str>,
        asked: impl IntoIterator<Item = &'a str>,
        now: BootTime,
    ) -> Heard {
        let state = self.lock();
        let mut heard = Heard {
            targets: state.targets.clone(),
            ..Heard::default()
        };
        let reported = state.reporters.get(key);
        let saying = |name: &str, report: Option<&Arc<TenantReport>>| {
            let (name, member) = state.members.get_key_value(name)?;
            let saying = Saying {
                hearing: member.hearing.clone(),
                report: report.cloned(),
                patient: now.since(member.begun) < START_GRACE,
                dealt: member.dealt.clone(),
            };
            Some((Arc::clone(name), saying))
        };
        if sole.is_none() {
            let reported = reported.into_iter().flatten();
            heard.said = reported
                .filter_map(|(name, report)| saying(name, Some(report)))
                .collect();
        }
        for name in asked
            .into_iter()
            .filter(|name| sole.is_none_or(|sole| sole == *name))
            .chain(sole)
        {
            let report = reported.and_then(|reported| reported.get(name));
            heard.said.extend(saying(name, report));
        }
        heard
    }

    /// Counts the members that have reported everything except this Tenant, without those in `asked`.
    pub(crate) fn strangers(&self, key: &TenantKey, asked: impl Fn(&str) -> bool) -> usize {
        let state = self.lock();
        let Some(targets) = &state.targets else {
            return 0;
        };
        let reported = state.reporters.get(key);
        let strange = |(name, member): &(&Name, &MemberReports)| {
            let name: &str = name;
            let has = reported.is_some_and(|reported| reported.contains_key(name));
            let counts = name != names::SELF_CLUSTER && targets.contains_key(name);
            member.hearing == Hearing::Full && counts && !has && !asked(name)
        };
        state.members.iter().filter(strange).count()
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
    pub(crate) fn take_dirty(&self, now: BootTime) -> Dirty {
        let mut state = self.lock();
        // A grace period ends without an event.
        while state.awaited.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, name)) = state.awaited.pop_first() {
                state.moves(name);
            }
        }
        std::mem::take(&mut state.dirty)
    }

    /// Sets the Tenants on the home cluster whose status is a summary.
    pub(crate) fn summarise_only(&self, tenants: BTreeSet<TenantKey>) {
        self.lock().summarised = Some(tenants);
    }

    /// Sets whether the status of this Tenant is a summary.
    pub(crate) fn summarised(&self, key: &TenantKey, is: bool) {
        if let Some(summarised) = &mut self.lock().summarised {
            if is {
                summarised.insert(key.clone());
            } else {
                summarised.remove(key);
            }
        }
    }

    /// Lists the member's state in Tenants whose status is a summary, and in the worst others. Returns `None` until
    /// these Tenants and the member's full report are known.
    pub fn listing(&self, member: &str, allow_chart_skip: bool) -> Option<TenantSummaries> {
        let state = self.lock();
        let summarised = state.summarised.as_ref()?;
        let reports = state
            .members
            .get(member)
            .filter(|found| found.tenants.is_complete())?;
        let mut worst: Vec<(Readiness, &TenantKey)> = reports
            .tenants
            .iter()
            .map(|(key, report)| (Readiness::of(&report.state, allow_chart_skip), &**key))
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
        Some(tenant_summary::listing(reported, allow_chart_skip))
    }

    /// Forgets a deleted member that has no reporter.
    pub fn forget(&self, member: &str) {
        let mut state = self.lock();
        state.take_out_all(member);
        let (name, reports) = state.member(member);
        let until = BootTime(reports.begun.0 + START_GRACE);
        state.awaited.remove(&(until, name));
        state.members.remove(member);
    }

    /// Returns when the next grace period ends.
    pub(crate) fn patience_ends(&self) -> Option<BootTime> {
        self.lock().awaited.first().map(|(at, _)| *at)
    }
}

/// Tenants of a member that is being decommissioned, and how many of them are uninstalled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retired {
    pub tenants: usize,
    pub gone: usize,
}

/// Report of one member on one Tenant.
#[derive(Clone, Debug)]
pub(crate) struct Saying {
    pub(crate) hearing: Hearing,
    pub(crate) report: Option<Arc<TenantReport>>,
    /// The member is within its grace period.
    pub(crate) patient: bool,
    /// The chart that the hub has given to the member.
    pub(crate) dealt: Option<Arc<str>>,
}

/// All reports on one Tenant.
#[derive(Clone, Debug, Default)]
pub(crate) struct Heard {
    /// Reports of all members that have this Tenant or may have it.
    pub(crate) said: BTreeMap<Arc<str>, Saying>,
    /// Number of other members with a full report that does not contain this Tenant.
    pub(crate) strangers: usize,
    pub(crate) targets: Option<Arc<Targets>>,
}

/// Changes that require a reconcile.
#[derive(Debug, Default)]
pub(crate) struct Dirty {
    pub(crate) all: bool,
    pub(crate) keys: BTreeSet<TenantKey>,
    /// Members whose state has changed.
    pub(crate) members: BTreeSet<Arc<str>>,
    /// UIDs of clusters that now belong to another member, or whose member's state has changed.
    pub(crate) clusters: BTreeSet<String>,
}

/// Tenants of a member by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
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
        let reports = Reports::default();
        let failed = (0..30).map(|number| (key(&format!("b-{number}")), Truth::False));
        let all = failed.chain([(key("a"), Truth::True)]);
        let all = all.map(|(key, truth)| (key, Some(report(truth))));
        reports.report("edge-1", Changed::new(all.collect()));
        reports.hearing("edge-1", Hearing::Full);
        assert_eq!(reports.listing("edge-1", false), None);
        for (summarised, expected) in [(None, WORST_MAX), (Some(key("a")), WORST_MAX + 1)] {
            reports.summarise_only(summarised.into_iter().collect());
            let listed = reports.listing("edge-1", false).unwrap();
            let not_ready = listed.tenants.iter().filter(|it| it.state == "NotReady");
            assert_eq!(not_ready.count(), WORST_MAX);
            assert_eq!((listed.tenants.len(), listed.omitted), (expected, 0));
        }
    }
}
