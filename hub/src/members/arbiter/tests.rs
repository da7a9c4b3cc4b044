use std::sync::Arc;

use krypton_crds::edge_cluster::Mode;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::Truth;
use krypton_types::deployment::{DeploymentKey, DeploymentReport};
use krypton_types::tenant::{TenantKey, TenantReport};

use super::*;
use crate::members::health::reported;
use crate::members::tenant_reports::TenantReports;

const MEMBER: &str = "edge-1";
const PROXY: ReporterId = ReporterId::Proxy;
const AGENT: ReporterId = ReporterId::Session(1);

struct FleetFixture {
    members: MemberRegistry,
    reports: Arc<TenantReports>,
}

fn fleet() -> FleetFixture {
    let reports = Arc::new(TenantReports::default());
    FleetFixture {
        members: MemberRegistry::new(Arc::clone(&reports)),
        reports,
    }
}

fn at(seconds: u64) -> BootTime {
    BootTime(std::time::Duration::from_secs(seconds))
}

fn observing(holder: &str) -> MemberReport {
    MemberReport {
        synced: true,
        ready: true,
        connected: true,
        holder: Some(holder.to_owned()),
        ..MemberReport::default()
    }
}

fn writing(holder: &str) -> MemberReport {
    MemberReport {
        writing: true,
        applied: Some((Version::default(), "d".to_owned())),
        ..observing(holder)
    }
}

fn agent_details() -> AgentDetails {
    AgentDetails {
        cluster_uid: "old".to_owned(),
        kubernetes_version: "v1".to_owned(),
        agent_version: "0.1.0".to_owned(),
        certificate: Validity::until(jiff::Timestamp::UNIX_EPOCH),
        key: krypton_crds::edge_cluster::AgentKey::default(),
        clock: State::new(Truth::True, reason::CLOCKS_AGREE, ""),
        applied: None,
    }
}

fn key(name: &str) -> TenantKey {
    TenantKey::new("default", name)
}

fn report(reason: &str) -> TenantReport {
    TenantReport::new(1, State::new(Truth::True, reason, ""))
}

fn changes(member: Option<MemberReport>, tenants: &[(&str, &str)]) -> Changes {
    let tenants = tenants
        .iter()
        .map(|(name, reason)| (key(name), Some(report(reason))))
        .collect();
    Changes {
        member,
        tenants,
        ..Changes::default()
    }
}

impl FleetFixture {
    fn report(&self, id: ReporterId, changes: Changes, complete: Option<u64>, second: u64) {
        self.members
            .report(MEMBER, id, changes, complete, at(second));
    }

    /// Opens a reporter, which sends its full report a second later.
    fn open(
        &self,
        id: ReporterId,
        member: MemberReport,
        tenants: &[(&str, &str)],
        second: u64,
    ) -> watch::Receiver<u64> {
        let requests = self.members.open(MEMBER, id, at(second));
        self.report(id, changes(Some(member), tenants), Some(0), second + 1);
        requests
    }

    /// Reports a claim of a desired state that this hub has not issued. Returns the epoch that the hub follows.
    fn claim(&self, member: &str, epoch: Option<u64>, report: MemberReport, second: u64) -> u64 {
        let report = MemberReport {
            ahead: epoch.map(|epoch| Version {
                epoch,
                generation: 9,
            }),
            ..report
        };
        let (members, changes) = (&self.members, changes(Some(report), &[]));
        members.report(member, AGENT, changes, None, at(second));
        members.ahead().get()
    }

    fn total(&self) -> u32 {
        self.reports.counts(MEMBER, false).total
    }

    fn presence(&self) -> Presence {
        self.members.presence(MEMBER).get()
    }

    fn observation(&self) -> MemberObservation {
        self.members.observation(MEMBER).unwrap()
    }

    fn mode(&self) -> (Mode, String) {
        let observation = self.observation();
        (observation.mode, observation.healthy.reason)
    }
}

#[test]
fn lease_holder_is_reporter_among_agent_and_proxy() {
    let fleet = fleet();
    let _requests = fleet.open(PROXY, writing("hub/a"), &[("t", "OfTheProxy")], 0);
    assert_eq!(fleet.mode(), (Mode::Proxy, reason::RECONCILING.to_owned()));
    // The agent connects, observes and waits for the Lease. Its reports do not count yet.
    let tenants = [("t", "OfTheAgent"), ("u", "OfTheAgent")];
    let requests = fleet.open(AGENT, observing("hub/a"), &tenants, 2);
    assert_eq!(fleet.total(), 1);
    assert_eq!(fleet.presence(), Presence::Ready);
    // The proxy yields. The hub requests a full report from the agent, because the earlier one was dropped.
    fleet.members.close(MEMBER, PROXY, at(4));
    assert_eq!(requests.get(), 1);
    let full_report = changes(Some(writing("agent/a")), &[("t", "Again"), ("u", "Again")]);
    fleet.report(AGENT, full_report, Some(1), 5);
    assert_eq!(fleet.mode(), (Mode::Agent, reason::RECONCILING.to_owned()));
    assert_eq!(fleet.total(), 2);
}

#[test]
fn reselected_agent_keeps_tenants_until_full_report() {
    let fleet = fleet();
    let (one, other) = (ReporterId::Session(1), ReporterId::Session(2));
    let requests = fleet.open(one, writing("agent/a"), &[("t", "OfOne")], 0);
    let _requests = fleet.open(other, observing("agent/a"), &[("t", "OfOther")], 2);
    let silent = MemberReport {
        connected: false,
        ..writing("agent/a")
    };
    fleet.report(one, changes(Some(silent), &[]), None, 4);
    let again = changes(None, &[("t", "OfOther")]);
    fleet.report(other, again, Some(1), 5);
    // Its report is complete, but the hub has dropped it.
    fleet.report(one, changes(Some(writing("agent/a")), &[]), None, 6);
    assert_eq!(fleet.total(), 1);
    assert_eq!(requests.get(), 1);
}

#[test]
fn problem_in_the_report_makes_the_member_unhealthy() {
    let unrecorded = MemberReport {
        problem: Some("exceeded quota: secrets".to_owned()),
        ..writing("agent/a")
    };
    let not_restored = MemberReport {
        not_restored: Some("default/bad is refused".to_owned()),
        ..writing("agent/a")
    };
    for (report, truth, reason, message) in [
        (writing("agent/a"), Truth::True, reason::RECONCILING, ""),
        (
            unrecorded,
            Truth::False,
            reason::STALE,
            "exceeded quota: secrets",
        ),
        (
            not_restored,
            Truth::False,
            reason::NOT_RESTORED,
            "default/bad is refused",
        ),
    ] {
        let healthy = reported(AGENT, &report, true).healthy.unwrap();
        assert_eq!((healthy.truth, &*healthy.reason), (truth, reason));
        assert!(healthy.message.ends_with(message), "{}", healthy.message);
    }
}

#[test]
fn only_complete_report_removes_missing_tenants() {
    let fleet = fleet();
    let _first = fleet.open(AGENT, writing("agent/a"), &[("t", "A"), ("u", "A")], 0);
    fleet.members.close(MEMBER, AGENT, at(2));
    let agent = ReporterId::Session(2);
    let _second = fleet.members.open(MEMBER, agent, at(3));
    fleet.report(agent, changes(None, &[("u", "B")]), None, 4);
    assert_eq!(fleet.total(), 2, "an unfinished report removes nothing");
    fleet.report(agent, changes(Some(writing("agent/a")), &[]), Some(0), 5);
    assert_eq!(fleet.total(), 1);
}

#[test]
fn observing_proxy_reports_after_agent_is_lost() {
    let fleet = fleet();
    let _requests = fleet.open(AGENT, writing("agent/a"), &[], 0);
    fleet.members.close(MEMBER, AGENT, at(2));
    let away = Presence::Away(at(1));
    assert_eq!(fleet.presence(), away, "it may have died right after");
    // Its last status stays for half a minute after the last report.
    assert_eq!(fleet.mode(), (Mode::Agent, reason::RECONCILING.to_owned()));
    fleet.members.set_connection(MEMBER, None, at(31));
    assert_eq!(fleet.mode(), (Mode::Agent, reason::AGENT_AWAY.to_owned()));
    let observed = observing("agent/a");
    let _requests = fleet.open(PROXY, observed, &[("t", "Seen")], 3);
    assert_eq!(fleet.mode(), (Mode::Agent, reason::OBSERVING.to_owned()));
    assert_eq!(fleet.observation().holder.as_deref(), Some("agent/a"));
    assert_eq!(fleet.total(), 1);
}

#[test]
fn digest_mismatch_requests_full_report_once() {
    let fleet = fleet();
    let requests = fleet.open(AGENT, writing("agent/a"), &[("t", "A")], 0);
    let same = fleet.reports.digest(MEMBER).unwrap();
    fleet.members.compare(MEMBER, AGENT, same, at(1));
    assert_eq!(requests.get(), 0);
    fleet.members.compare(MEMBER, AGENT, (2, same.1), at(1));
    fleet.members.compare(MEMBER, AGENT, (2, same.1), at(1));
    assert_eq!(requests.get(), 1);
    let again = changes(Some(writing("agent/a")), &[("u", "A"), ("v", "A")]);
    fleet.report(AGENT, again, Some(1), 2);
    let (count, _) = fleet.reports.digest(MEMBER).unwrap();
    assert_eq!(count, 2, "Tenants that it does not contain are gone");
}

#[test]
fn deployment_reports_count_only_from_current_reporter() {
    let fleet = fleet();
    let deployments = Arc::clone(fleet.members.deployments());
    // A Tenant with the same name has no reports.
    let key = DeploymentKey::new("default", "t");
    let report_of = |reason: &str| DeploymentReport {
        uid: "uid-1".to_owned(),
        observed_generation: 1,
        gone: false,
        applied_chart: String::new(),
        state: report(reason).state,
        next: None,
        handled_request: None,
        events: Vec::new(),
        revisions: None,
    };
    let changes_of = |member: MemberReport, reason: &str| Changes {
        member: Some(member),
        deployments: [(key.clone(), Some(report_of(reason)))].into(),
        ..Changes::default()
    };
    let stored_reason = || {
        let stored = deployments.latest_report(MEMBER, &key).unwrap();
        (stored.report.state.ready.reason, stored.is_current)
    };
    let _requests = fleet.members.open(MEMBER, PROXY, at(0));
    let first = changes_of(writing("hub/a"), "OfTheProxy");
    fleet.report(PROXY, first, Some(0), 1);
    assert_eq!(stored_reason(), ("OfTheProxy".to_owned(), true));
    assert_eq!(fleet.total(), 0);
    let requests = fleet.members.open(MEMBER, AGENT, at(2));
    let observed = changes_of(observing("hub/a"), "OfTheAgent");
    fleet.report(AGENT, observed, Some(0), 3);
    assert_eq!(stored_reason(), ("OfTheProxy".to_owned(), true));
    // The proxy's report stays until the agent has sent its full report.
    fleet.members.close(MEMBER, PROXY, at(4));
    assert_eq!(
        (stored_reason(), requests.get()),
        (("OfTheProxy".to_owned(), false), 1)
    );
    let again = changes_of(writing("agent/a"), "OfTheAgent");
    fleet.report(AGENT, again, Some(1), 5);
    assert_eq!(stored_reason(), ("OfTheAgent".to_owned(), true));
    // The stored report matches the digest, so the hub requests nothing.
    let part = krypton_types::report_digest::part(&key, &report_of("OfTheAgent"));
    fleet.members.compare(MEMBER, AGENT, (1, part), at(60));
    assert_eq!(requests.get(), 1);
    fleet.members.compare(MEMBER, AGENT, (0, 0), at(60));
    assert_eq!(requests.get(), 2);
}

#[test]
fn never_ready_agent_blocks_no_proxy() {
    let fleet = fleet();
    let _requests = fleet.members.open(MEMBER, AGENT, at(100));
    assert_eq!(fleet.presence(), Presence::Never);
    fleet.members.close(MEMBER, AGENT, at(101));
    assert_eq!(fleet.presence(), Presence::Away(at(0)));
}

#[test]
fn agent_absence_counts_from_last_ready_contact() {
    let fleet = fleet();
    let presence = fleet.members.presence(MEMBER);
    let [first, second] = [1, 2].map(ReporterId::Session);
    for agent in [first, second] {
        let _requests = fleet.members.open(MEMBER, agent, at(100));
        let ready = changes(Some(writing("agent/a")), &[]);
        fleet.report(agent, ready, Some(0), 100);
    }
    fleet.members.compare(MEMBER, first, (0, 0), at(150));
    fleet.members.compare(MEMBER, second, (0, 0), at(140));
    // The machine is gone. The hub notices the silence after half a minute.
    fleet.members.close(MEMBER, first, at(180));
    assert_eq!(presence.get(), Presence::Ready);
    let unreachable = MemberReport {
        ready: false,
        connected: false,
        ..writing("agent/a")
    };
    // The agent waits half a minute for its API server before it reports the failure.
    fleet.report(second, changes(Some(unreachable), &[]), None, 190);
    assert_eq!(presence.get(), Presence::Away(at(150)));
    fleet.members.compare(MEMBER, second, (0, 0), at(200));
    assert_eq!(presence.get(), Presence::Away(at(150)));
}

#[test]
fn hold_back_overrides_reporter_until_lifted() {
    let fleet = fleet();
    let _requests = fleet.open(AGENT, writing("agent/a"), &[], 0);
    let reason = Some((reason::BANNED, "by a person".to_owned()));
    fleet.members.hold_back(MEMBER, reason, at(2));
    assert_eq!(fleet.mode(), (Mode::None, reason::BANNED.to_owned()));
    fleet.members.hold_back(MEMBER, None, at(3));
    assert_eq!(fleet.mode(), (Mode::Agent, reason::RECONCILING.to_owned()));
}

#[test]
fn unready_agent_makes_no_proxy_yield() {
    let fleet = fleet();
    let _requests = fleet.members.open(MEMBER, AGENT, at(100));
    // The agent's certificate is recorded by now.
    fleet.members.agent_enrolled(MEMBER, at(101));
    assert_eq!(fleet.presence(), Presence::Never);
}

#[test]
fn agent_without_tenants_is_resynced_after_proxy_leaves() {
    let fleet = fleet();
    let _requests = fleet.open(PROXY, writing("hub/a"), &[("t", "OfTheProxy")], 0);
    let requests = fleet.open(AGENT, observing("hub/a"), &[], 2);
    fleet.members.close(MEMBER, PROXY, at(4));
    assert_eq!(requests.get(), 1, "what was said to nobody is asked for");
    let empty = changes(Some(writing("agent/a")), &[]);
    fleet.report(AGENT, empty, Some(1), 5);
    assert_eq!(fleet.reports.digest(MEMBER), Some((0, 0)));
}

#[test]
fn implausible_epoch_claim_is_ignored() {
    let fleet = fleet();
    fleet.members.set_epoch(7);
    let _requests = fleet.members.open(MEMBER, AGENT, at(0));
    for (epoch, now, expected) in [(u64::MAX, 1, 0), (9, 2, 9)] {
        let followed = fleet.claim(MEMBER, Some(epoch), writing("agent/a"), now);
        assert_eq!(followed, expected);
    }
}

#[test]
fn claimed_epochs_are_followed_with_growing_pauses() {
    let fleet = fleet();
    fleet.members.set_epoch(7);
    let claim_is_followed = |member: &str, report: MemberReport, now: u64| {
        let epoch = fleet.members.state.lock().fleet.epoch;
        let followed = fleet.claim(member, Some(epoch), report, now);
        if followed >= epoch {
            fleet.members.set_epoch(followed + 1);
        }
        followed >= epoch
    };
    for member in [MEMBER, "edge-2"] {
        drop(fleet.members.open(member, AGENT, at(0)));
    }
    assert!(
        !claim_is_followed(MEMBER, observing("agent/a"), 1),
        "it has no record"
    );
    // A member claims a later epoch all day.
    let day = 24 * 60 * 60;
    let mut times = Vec::new();
    for now in (2..day).step_by(10) {
        if claim_is_followed(MEMBER, writing("agent/a"), now) {
            times.push(now);
        }
    }
    assert!(times.len() <= 14, "{times:?}");
    let pauses: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.iter().all(|pause| *pause >= 20), "{pauses:?}");
    assert!(pauses.is_sorted(), "{pauses:?}");
    // Another member's claim is followed immediately.
    assert!(claim_is_followed("edge-2", writing("agent/a"), day));
    // The delay starts from its first value a day after the last claim.
    assert!(claim_is_followed(MEMBER, writing("agent/a"), 3 * day));
    assert!(claim_is_followed(MEMBER, writing("agent/a"), 3 * day + 20));
}

#[test]
fn waiting_epoch_claim_is_followed_when_due() {
    let fleet = fleet();
    drop(fleet.members.open(MEMBER, AGENT, at(0)));
    for (epoch, now, expected) in [(3, 1, 3), (4, 2, 3), (4, 21, 4)] {
        let followed = fleet.claim(MEMBER, Some(epoch), writing("agent/a"), now);
        assert_eq!(followed, expected, "{now}");
        if now == 2 {
            let due = (at(21), MEMBER.to_owned());
            assert!(fleet.members.state.lock().fleet.due.contains(&due));
        }
    }
}

#[test]
fn forgotten_agent_clears_its_presence_and_observation() {
    let fleet = fleet();
    fleet.members.agent_enrolled(MEMBER, at(100));
    fleet.members.agent_connected(MEMBER, &agent_details());
    fleet.members.forget_agent(MEMBER, at(101));
    assert_eq!(fleet.presence(), Presence::Never);
    let observation = fleet.observation();
    assert_eq!((observation.uid, observation.certificate), (None, None));
}

#[test]
fn suspended_member_health_is_unknown_not_false() {
    let fleet = fleet();
    let _requests = fleet.open(PROXY, writing("hub/a"), &[("t", "A")], 0);
    for (reason, truth) in [
        (reason::SUSPENDED, Truth::Unknown),
        (reason::DUPLICATE, Truth::False),
    ] {
        let hold = Some((reason, "it is Sleeping".to_owned()));
        fleet.members.hold_back(MEMBER, hold, at(2));
        let observation = fleet.observation();
        let state = (observation.mode, observation.healthy.truth);
        assert_eq!(state, (Mode::None, truth), "{reason}");
        assert_eq!(observation.healthy.message, "it is Sleeping");
        assert_eq!(observation.connected.truth, Truth::True, "{reason}");
    }
    fleet.members.hold_back(MEMBER, None, at(3));
    assert_eq!(fleet.mode(), (Mode::Proxy, reason::RECONCILING.to_owned()));
}

#[test]
fn new_term_forgets_reports_of_closed_session() {
    let fleet = fleet();
    let _requests = fleet.open(AGENT, writing("agent/a"), &[("t", "A")], 0);
    fleet.members.agent_connected(MEMBER, &agent_details());
    // While its session lives, its reports stay current.
    fleet.members.begin_term(at(2));
    assert_eq!(fleet.total(), 1);
    assert!(fleet.observation().certificate_reported);
    fleet.members.close(MEMBER, AGENT, at(3));
    fleet.members.begin_term(at(4));
    let observation = fleet.observation();
    assert_eq!(fleet.total(), 0);
    assert_eq!((observation.applied, observation.holder), (None, None));
    assert_eq!(
        (observation.agent_version, observation.certificate),
        (None, None)
    );
    assert!(!observation.certificate_reported && observation.roots.is_none());
    assert_eq!(observation.connected.reason, reason::STARTING);
}

#[test]
fn new_term_keeps_proxy_reports_only_if_connected() {
    for (report, total, requested) in [
        (observing("hub/b"), 1, 0),
        (
            MemberReport {
                connected: false,
                ..observing("hub/b")
            },
            0,
            1,
        ),
    ] {
        let fleet = fleet();
        let requests = fleet.open(PROXY, observing("hub/b"), &[("t", "A")], 0);
        let update = changes(Some(report), &[]);
        fleet.report(PROXY, update, None, 2);
        fleet.members.begin_term(at(3));
        assert_eq!(fleet.total(), total);
        assert_eq!(requests.get(), requested);
    }
}

#[test]
fn answer_beyond_the_limits_shows_for_a_while() {
    let fleet = fleet();
    let healthy = || fleet.observation().healthy.reason;
    let _requests = fleet.open(PROXY, writing("hub"), &[], 0);
    assert_eq!(healthy(), reason::RECONCILING);
    fleet
        .members
        .oversized_response(MEMBER, "first".to_owned(), at(2));
    fleet
        .members
        .oversized_response(MEMBER, "second".to_owned(), at(100));
    let observation = fleet.observation();
    let limited = State::new(Truth::False, reason::LIMIT_EXCEEDED, "first");
    assert_eq!(observation.healthy, limited);
    assert_eq!(observation.connected.truth, Truth::True);
    let reevaluate = |seconds| fleet.members.set_connection(MEMBER, None, at(seconds));
    reevaluate(399);
    assert_eq!(healthy(), reason::LIMIT_EXCEEDED);
    reevaluate(400);
    assert_eq!(healthy(), reason::RECONCILING);
}

#[test]
fn lone_epoch_claim_is_shown_as_unconfirmed() {
    let fleet = fleet();
    fleet.members.set_epoch(7);
    let report_claim = |member: &str, claim: Option<u64>, now: u64| {
        fleet.claim(member, claim, writing("agent/a"), now)
    };
    for member in [MEMBER, "edge-2", "edge-3"] {
        drop(fleet.members.open(member, AGENT, at(0)));
    }
    assert_eq!(report_claim("edge-2", None, 1), 0);
    assert_eq!(report_claim(MEMBER, Some(12), 2), 0);
    let healthy = fleet.observation().healthy;
    assert_eq!(healthy.reason, reason::STALE);
    assert!(healthy.message.contains("no other member confirms it"));
    // The hub takes the later of two claims, because one later epoch satisfies both.
    assert_eq!(report_claim("edge-3", Some(9), 3), 12);
}
