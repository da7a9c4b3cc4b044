//! Members that leave the fleet, or lose their Tenant.

use std::time::Duration;

use super::*;
use crate::tenants::status::DEPARTURE_GRACE;

/// One hub's view of a Tenant, over time.
struct HubFixture {
    tenant: Tenant,
    memory: DecisionMemory,
    view: ReportedView,
    now: Duration,
    /// Time since its start.
    uptime: Duration,
    writes: usize,
}

pub(crate) fn targets(members: &[&str]) -> Option<Arc<Targets>> {
    let names = members.iter().copied().chain([names::SELF_CLUSTER]);
    let targets = names.map(|name| (name.to_owned(), Target::default()));
    Some(Arc::new(targets.collect()))
}

impl HubFixture {
    fn with(members: &[&str]) -> Self {
        let names = members.iter().copied().chain([names::SELF_CLUSTER]);
        let reports: Vec<_> = names.map(|name| (name, installed())).collect();
        let mut hub = Self {
            tenant: tenant(),
            memory: DecisionMemory::default(),
            view: ReportedView {
                members: complete_views(&reports),
                others_without: 0,
                targets: targets(members),
            },
            now: Duration::ZERO,
            uptime: Duration::from_secs(1000),
            writes: 0,
        };
        hub.decide_after(0);
        hub
    }

    /// Starts another hub. Only the written status survives.
    fn restart(&mut self) {
        self.memory = DecisionMemory::default();
        self.uptime = Duration::ZERO;
        self.view = ReportedView::default();
    }

    fn decide_after(&mut self, seconds: u64) -> TenantStatus {
        self.now += Duration::from_secs(seconds);
        self.uptime += Duration::from_secs(seconds);
        let wall = Timestamp::from_second(i64::try_from(self.now.as_secs()).unwrap()).unwrap();
        let now = DecisionTime {
            boot: BootTime(self.now),
            wall,
            in_startup_grace: self.uptime < Duration::from_secs(45),
        };
        let (tenant, memory) = (&self.tenant, &mut self.memory);
        let status = decided(tenant, &self.view, &settings(), memory, None, now);
        if self.tenant.status.as_ref() != Some(&status) {
            self.writes += 1;
            self.tenant.status = Some(status.clone());
        }
        status
    }

    /// Decides after this time, and returns the condition of a member.
    fn condition_after(&mut self, seconds: u64, member: &str) -> Option<(String, String)> {
        member_condition(&self.decide_after(seconds), member)
    }

    fn set_member(
        &mut self,
        member: &str,
        report_state: ReportState,
        report: Option<TenantReport>,
    ) {
        let view = member_view(report_state, report);
        self.view.members.insert(member.into(), view);
    }
}

fn member_condition(status: &TenantStatus, member: &str) -> Option<(String, String)> {
    condition(status, &format!("ClusterReady/{member}"))
}

fn expected(truth: &str, reason: &str) -> Option<(String, String)> {
    Some((truth.to_owned(), reason.to_owned()))
}

const GRACE: u64 = DEPARTURE_GRACE.as_secs();

#[test]
fn member_without_tenant_is_shown_during_grace_uncounted() {
    let mut hub = HubFixture::with(&["edge-1", "edge-2"]);
    hub.set_member("edge-2", ReportState::Complete, None);
    let status = hub.decide_after(1);
    let gone = expected("Unknown", reason::TENANT_GONE);
    assert_eq!(member_condition(&status, "edge-2"), gone);
    let message = "2 of 2 clusters ready";
    assert_eq!(status.last_message.as_deref(), Some(message));
    assert_eq!(condition(&status, "Ready").unwrap().0, "True");
    assert_eq!(condition(&status, "ClusterError/edge-2"), None);
    let writes = hub.writes;
    hub.decide_after(GRACE - 1);
    assert_eq!(hub.writes, writes, "nothing has changed");
    assert_eq!(hub.condition_after(1, "edge-2"), None);
    assert_eq!(hub.writes, writes + 1);
}

#[test]
fn departed_member_is_removed_after_grace() {
    for report_state in [
        ReportState::Complete,
        ReportState::Silent("away".to_owned()),
        ReportState::Pending,
    ] {
        let mut hub = HubFixture::with(&["edge-1", "edge-2"]);
        hub.set_member("edge-2", report_state, installed());
        hub.decide_after(1);
        hub.view.targets = targets(&["edge-1"]);
        let status = hub.decide_after(1);
        let left = expected("Unknown", reason::MEMBER_LEFT);
        assert_eq!(member_condition(&status, "edge-2"), left);
        assert_eq!(condition(&status, "Ready").unwrap().0, "True");
        assert!(hub.condition_after(GRACE - 1, "edge-2").is_some());
        assert_eq!(hub.condition_after(1, "edge-2"), None);
        // Further reports of a departed member are ignored.
        hub.set_member("edge-2", ReportState::Complete, installed());
        assert_eq!(hub.condition_after(1, "edge-2"), None);
    }
}

#[test]
fn return_within_grace_resets_grace() {
    let mut hub = HubFixture::with(&["edge-1"]);
    for _ in 0..3 {
        hub.set_member("edge-1", ReportState::Complete, None);
        hub.decide_after(1);
        assert!(hub.condition_after(GRACE - 1, "edge-1").is_some());
        hub.set_member("edge-1", ReportState::Complete, installed());
        let ready = expected("True", reason::INSTALLED);
        assert_eq!(hub.condition_after(1, "edge-1"), ready);
    }
}

#[test]
fn hub_restart_restarts_grace_without_status_writes() {
    let mut hub = HubFixture::with(&["edge-1", "edge-2", "edge-3"]);
    hub.set_member("edge-2", ReportState::Complete, None);
    hub.view.targets = targets(&["edge-1", "edge-2"]);
    hub.decide_after(1);
    hub.decide_after(GRACE - 2);
    let view_before = hub.view.clone();
    let writes = hub.writes;
    hub.restart();
    hub.decide_after(1);
    // The EdgeClusters are known, but the members have not reported yet.
    hub.view.targets = targets(&["edge-1", "edge-2"]);
    hub.decide_after(1);
    hub.view = view_before;
    hub.decide_after(1);
    assert_eq!(hub.writes, writes);
    for (seconds, is_shown) in [(GRACE - 3, true), (3, false)] {
        let status = hub.decide_after(seconds);
        for member in ["edge-2", "edge-3"] {
            assert_eq!(member_condition(&status, member).is_some(), is_shown);
        }
    }
}

#[test]
fn lasting_silence_removes_nothing() {
    let silent = || ReportState::Silent("no answer".to_owned());
    for (report_state, report) in [
        (silent(), None),
        (ReportState::Pending, None),
        (silent(), installed()),
    ] {
        let mut hub = HubFixture::with(&["edge-1"]);
        hub.set_member("edge-1", report_state, report);
        let unknown = expected("Unknown", reason::CLUSTER_UNREACHABLE);
        for _ in 0..3 {
            assert_eq!(hub.condition_after(10 * GRACE, "edge-1"), unknown);
        }
        // Neither does an unknown list of EdgeClusters.
        hub.restart();
        for _ in 0..3 {
            assert_eq!(hub.condition_after(10 * GRACE, "edge-1"), unknown);
        }
    }
}

#[test]
fn silent_departing_member_is_kept_until_next_report() {
    let mut hub = HubFixture::with(&["edge-1"]);
    hub.set_member("edge-1", ReportState::Complete, None);
    hub.decide_after(1);
    hub.set_member("edge-1", ReportState::Silent("no answer".to_owned()), None);
    let status = hub.decide_after(10 * GRACE);
    let gone = expected("Unknown", reason::TENANT_GONE);
    assert_eq!(member_condition(&status, "edge-1"), gone);
    assert_eq!(condition(&status, "Ready").unwrap().0, "True");
    hub.set_member("edge-1", ReportState::Complete, None);
    assert!(hub.condition_after(1, "edge-1").is_some());
    assert_eq!(hub.condition_after(GRACE, "edge-1"), None);
}

#[test]
fn returned_member_counts_before_its_first_report() {
    let mut hub = HubFixture::with(&["edge-1"]);
    hub.view.targets = targets(&[]);
    hub.decide_after(1);
    hub.view.members.remove("edge-1");
    hub.view.targets = targets(&["edge-1"]);
    let status = hub.decide_after(1);
    let unreachable = expected("Unknown", reason::CLUSTER_UNREACHABLE);
    assert_eq!(member_condition(&status, "edge-1"), unreachable);
    assert_eq!(condition(&status, "Ready").unwrap().0, "Unknown");
}
