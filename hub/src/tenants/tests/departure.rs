//! Members that leave the fleet, or lose their Tenant.

use std::time::Duration;

use super::*;
use crate::tenants::status::DEPARTURE_GRACE;

/// One hub's view of a Tenant, over time.
struct Hub {
    tenant: Tenant,
    memory: Memory,
    heard: Heard,
    at: Duration,
    /// Time since its start.
    up: Duration,
    writes: usize,
}

pub(crate) fn targets(members: &[&str]) -> Option<Arc<Targets>> {
    let named = members.iter().copied().chain([names::SELF_CLUSTER]);
    let targets = named.map(|name| (name.to_owned(), Target::default()));
    Some(Arc::new(targets.collect()))
}

impl Hub {
    fn with(members: &[&str]) -> Self {
        let well = || Some(report(Truth::True, reason::INSTALLED));
        let named = members.iter().copied().chain([names::SELF_CLUSTER]);
        let said: Vec<_> = named.map(|name| (name, well())).collect();
        let mut hub = Self {
            tenant: tenant(),
            memory: Memory::default(),
            heard: Heard {
                said: full(&said),
                strangers: 0,
                targets: targets(members),
            },
            at: Duration::ZERO,
            up: Duration::from_secs(1000),
            writes: 0,
        };
        hub.look(0);
        hub
    }

    /// Starts another hub. Only the written status survives.
    fn restart(&mut self) {
        self.memory = Memory::default();
        self.up = Duration::ZERO;
        self.heard = Heard::default();
    }

    fn look(&mut self, later: u64) -> TenantStatus {
        self.at += Duration::from_secs(later);
        self.up += Duration::from_secs(later);
        let wall = Timestamp::from_second(i64::try_from(self.at.as_secs()).unwrap()).unwrap();
        let now = Now {
            boot: BootTime(self.at),
            wall,
            patient: self.up < Duration::from_secs(45),
        };
        let decision = decide(&self.tenant, &self.heard, &rules(), &self.memory, now);
        self.memory = decision.memory;
        if self.tenant.status.as_ref() != Some(&decision.status) {
            self.writes += 1;
            self.tenant.status = Some(decision.status.clone());
        }
        decision.status
    }

    fn says(&mut self, member: &str, hearing: Hearing, report: Option<TenantReport>) {
        let saying = saying(hearing, report);
        self.heard.said.insert(member.into(), saying);
    }
}

fn shows(status: &TenantStatus, member: &str) -> Option<(String, String)> {
    ready(status, &format!("ClusterReady/{member}"))
}

fn because(truth: &str, why: &str) -> Option<(String, String)> {
    Some((truth.to_owned(), why.to_owned()))
}

const GRACE: u64 = DEPARTURE_GRACE.as_secs();

#[test]
fn member_without_tenant_is_shown_during_grace_uncounted() {
    let mut hub = Hub::with(&["edge-1", "edge-2"]);
    hub.says("edge-2", Hearing::Full, None);
    let status = hub.look(1);
    assert_eq!(
        shows(&status, "edge-2"),
        because("Unknown", reason::TENANT_GONE)
    );
    assert_eq!(
        status.last_message.as_deref(),
        Some("2 of 2 clusters ready")
    );
    assert_eq!(ready(&status, "Ready").unwrap().0, "True");
    assert_eq!(ready(&status, "ClusterError/edge-2"), None);
    let writes = hub.writes;
    hub.look(GRACE - 1);
    assert_eq!(hub.writes, writes, "nothing has changed");
    let status = hub.look(1);
    assert_eq!(shows(&status, "edge-2"), None);
    assert_eq!(hub.writes, writes + 1);
}

#[test]
fn departed_member_is_removed_after_grace() {
    for hearing in [
        Hearing::Full,
        Hearing::Silent("away".to_owned()),
        Hearing::NotYet,
    ] {
        let mut hub = Hub::with(&["edge-1", "edge-2"]);
        let last = Some(report(Truth::True, reason::INSTALLED));
        hub.says("edge-2", hearing, last);
        hub.look(1);
        hub.heard.targets = targets(&["edge-1"]);
        let status = hub.look(1);
        assert_eq!(
            shows(&status, "edge-2"),
            because("Unknown", reason::MEMBER_LEFT)
        );
        assert_eq!(ready(&status, "Ready").unwrap().0, "True");
        assert!(shows(&hub.look(GRACE - 1), "edge-2").is_some());
        assert_eq!(shows(&hub.look(1), "edge-2"), None);
        // Further reports of a departed member are ignored.
        hub.says(
            "edge-2",
            Hearing::Full,
            Some(report(Truth::True, reason::INSTALLED)),
        );
        assert_eq!(shows(&hub.look(1), "edge-2"), None);
    }
}

#[test]
fn return_within_grace_resets_grace() {
    let mut hub = Hub::with(&["edge-1"]);
    let well = || Some(report(Truth::True, reason::INSTALLED));
    for _ in 0..3 {
        hub.says("edge-1", Hearing::Full, None);
        hub.look(1);
        assert!(shows(&hub.look(GRACE - 1), "edge-1").is_some());
        hub.says("edge-1", Hearing::Full, well());
        assert_eq!(
            shows(&hub.look(1), "edge-1"),
            because("True", reason::INSTALLED)
        );
    }
}

#[test]
fn hub_restart_restarts_grace_without_status_writes() {
    let mut hub = Hub::with(&["edge-1", "edge-2", "edge-3"]);
    hub.says("edge-2", Hearing::Full, None);
    hub.heard.targets = targets(&["edge-1", "edge-2"]);
    hub.look(1);
    hub.look(GRACE - 2);
    let before = hub.heard.clone();
    let writes = hub.writes;
    hub.restart();
    hub.look(1);
    // The EdgeClusters are known, but the members have not reported yet.
    hub.heard.targets = targets(&["edge-1", "edge-2"]);
    hub.look(1);
    hub.heard = before;
    hub.look(1);
    assert_eq!(hub.writes, writes);
    let status = hub.look(GRACE - 3);
    assert!(shows(&status, "edge-2").is_some() && shows(&status, "edge-3").is_some());
    let status = hub.look(3);
    assert!(shows(&status, "edge-2").is_none() && shows(&status, "edge-3").is_none());
}

#[test]
fn lasting_silence_removes_nothing() {
    let silent = || Hearing::Silent("no answer".to_owned());
    for (hearing, report) in [
        (silent(), None),
        (Hearing::NotYet, None),
        (silent(), Some(report(Truth::True, reason::INSTALLED))),
    ] {
        let mut hub = Hub::with(&["edge-1"]);
        hub.says("edge-1", hearing, report);
        let unknown = because("Unknown", reason::CLUSTER_UNREACHABLE);
        for _ in 0..3 {
            assert_eq!(shows(&hub.look(10 * GRACE), "edge-1"), unknown);
        }
        // Neither does an unknown list of EdgeClusters.
        hub.restart();
        for _ in 0..3 {
            assert_eq!(shows(&hub.look(10 * GRACE), "edge-1"), unknown);
        }
    }
}

#[test]
fn silent_departing_member_is_kept_until_next_report() {
    let mut hub = Hub::with(&["edge-1"]);
    hub.says("edge-1", Hearing::Full, None);
    hub.look(1);
    hub.says("edge-1", Hearing::Silent("no answer".to_owned()), None);
    let status = hub.look(10 * GRACE);
    assert_eq!(
        shows(&status, "edge-1"),
        because("Unknown", reason::TENANT_GONE)
    );
    assert_eq!(ready(&status, "Ready").unwrap().0, "True");
    hub.says("edge-1", Hearing::Full, None);
    assert!(shows(&hub.look(1), "edge-1").is_some());
    assert_eq!(shows(&hub.look(GRACE), "edge-1"), None);
}

#[test]
fn returned_member_counts_before_its_first_report() {
    let mut hub = Hub::with(&["edge-1"]);
    hub.heard.targets = targets(&[]);
    hub.look(1);
    hub.heard.said.remove("edge-1");
    hub.heard.targets = targets(&["edge-1"]);
    let status = hub.look(1);
    assert_eq!(
        shows(&status, "edge-1"),
        because("Unknown", reason::CLUSTER_UNREACHABLE)
    );
    assert_eq!(ready(&status, "Ready").unwrap().0, "Unknown");
}
