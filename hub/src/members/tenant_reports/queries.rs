//! Queries of the stored reports: the view for the decision on a Tenant, and counts, summaries and pages of a member's
//! reports.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use krypton_crds::edge_cluster::{TenantCounts, TenantSummaries};
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{self, Readiness, reason};
use krypton_types::fleet_tenants::{FleetTenant, PAGE_MAX, Position};
use krypton_types::names;
use krypton_types::tenant::{TenantKey, TenantReport};

use super::{
    MemberName, MemberReports, ReportState, TENANTS_MAX, Targets, TenantReports, text_size,
};
use crate::members::tenant_summary;

/// Tenants that are not Ready and that an EdgeCluster lists even if their own status has the member.
const WORST_MAX: usize = 20;
/// Limit for the reports that are read for one page, under the lock.
const PAGE_READ_MAX: usize = TENANTS_MAX;
/// Limit for the texts on a page of reports, in bytes.
const PAGE_TEXTS_MAX: usize = 1024 * 1024;

impl TenantReports {
    /// Returns the number of Tenants that the member has reported and the digest of their reports. Returns
    /// `None` until the full report is complete.
    pub fn digest(&self, member: &str) -> Option<(u64, u128)> {
        let state = self.state.lock();
        let reports = state.members.get(member)?;
        let complete = reports.tenants.is_complete();
        complete.then(|| reports.tenants.digest())
    }

    /// Counts a member's Tenants whose release was uninstalled with the member. Returns `None` until the full
    /// report is complete.
    pub fn uninstall_counts(&self, member: &str) -> Option<UninstallCounts> {
        let state = self.state.lock();
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
    pub fn counts(&self, member: &str, allow_chart_skip: bool) -> TenantCounts {
        let state = self.state.lock();
        let mut counts = TenantCounts::default();
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

    /// Returns at most [`PAGE_MAX`] of the matching reports after this position. The Tenants of a silent member have
    /// unknown readiness, as in the status of the home cluster's Tenants. Also returns the position of the last
    /// report that it has read, unless no report follows it.
    pub(crate) fn page(
        &self,
        member: Option<&str>,
        after: Option<&Position>,
        matches: impl Fn(&TenantKey, &TenantReport) -> bool,
    ) -> (Vec<FleetTenant>, Option<Position>) {
        let after = after.map(|position| (&position.member, Arc::new(position.key.clone())));
        let first_member = after.as_ref().map_or("", |(member, _)| member.as_str());
        let state = self.state.lock();
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
                let mut report = Arc::clone(report);
                if let ReportState::Silent(why) = &reports.report_state {
                    let report = Arc::make_mut(&mut report);
                    report.state = report.state.unreachable(why);
                }
                if !matches(key, &report) {
                    continue;
                }
                size += text_size(&report);
                tenants.push(FleetTenant {
                    member: name.to_string(),
                    key: TenantKey::clone(key),
                    report: Arc::unwrap_or_clone(report),
                });
            }
        }
        (tenants, None)
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
        let state = self.state.lock();
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
                in_grace: now < member.grace_end(),
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

    /// Counts the unrecorded members whose complete report does not contain this Tenant.
    pub(crate) fn count_without(
        &self,
        key: &TenantKey,
        is_recorded: impl Fn(&str) -> bool,
    ) -> usize {
        let state = self.state.lock();
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
        let state = self.state.lock();
        let reports = state.members.get(member);
        let reported = reports
            .into_iter()
            .flat_map(|reports| reports.tenants.iter());
        reported.map(|(key, _)| TenantKey::clone(key)).collect()
    }

    /// Lists the member's state in Tenants whose status is a summary, and in the worst others. Returns `None` until
    /// these Tenants and the member's full report are known.
    pub fn tenant_summaries(
        &self,
        member: &str,
        allow_chart_skip: bool,
    ) -> Option<TenantSummaries> {
        let state = self.state.lock();
        let summarised = state.summarised.as_ref()?;
        let reports = state
            .members
            .get(member)
            .filter(|reports| reports.tenants.is_complete())?;
        let mut worst: Vec<(Readiness, &TenantKey)> = reports
            .tenants
            .iter()
            .map(|(key, report)| {
                let readiness = Readiness::from_state(&report.state, allow_chart_skip);
                (readiness, &**key)
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

#[cfg(test)]
mod tests {
    use krypton_types::conditions::{State, Truth};

    use super::*;
    use crate::members::tenant_reports::TenantReportChanges;

    #[test]
    fn listing_has_worst_twenty_and_summarised_tenants() {
        let key = |name: &str| TenantKey::new("default", name);
        let report = |truth| TenantReport::new(1, State::new(truth, "R", ""));
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
