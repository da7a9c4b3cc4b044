use std::sync::Arc;

use krypton_crds::edge_cluster::Mode;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::ClusterState;
use krypton_types::deployment::{DeploymentKey, DeploymentReport};
use krypton_types::tenant::{TenantKey, TenantReport};

use super::*;
use crate::members::health::reported;
use crate::tenants::Reports;

const MEMBER: &str = "edge-1";

struct Fleet {
    members: MemberRegistry,
    reports: Arc<Reports>,
}

fn fleet() -> Fleet {
    let reports = Arc::new(Reports::default());
    Fleet {
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

fn key(name: &str) -> TenantKey {
    TenantKey {
        namespace: "default".to_owned(),
        name: name.to_owned(),
    }
}

fn report(why: &str) -> TenantReport {
    TenantReport {
        observed_generation: 1,
        applied_chart: String::new(),
        next: None,
        state: ClusterState::from(State::new(Truth::True, why, "")),
    }
}

fn changes(member: Option<MemberReport>, tenants: &[(&str, &str)]) -> Changes {
    let tenants = tenants
        .iter()
        .map(|(name, why)| (key(name), Some(report(why))))
        .collect();
    Changes {
        member,
        tenants,
        ..Changes::default()
    }
}

impl Fleet {
    fn mode(&self) -> (Mode, String) {
        let facts = self.members.observation(MEMBER).unwrap();
        (facts.mode, facts.healthy.reason)
    }
}

#[test]
fn lease_holder_is_reporter_among_agent_and_proxy() {
    let fleet = fleet();
    let (proxy, agent) = (ReporterId::Proxy, ReporterId::Session(1));
    let _asks = fleet.members.open(MEMBER, proxy, at(0));
    let first = changes(Some(writing("hub/a")), &[("t", "OfTheProxy")]);
    fleet.members.report(MEMBER, proxy, first, Some(0), at(1));
    assert_eq!(fleet.mode(), (Mode::Proxy, reason::RECONCILING.to_owned()));
    // The agent connects, observes and waits for the Lease. Its reports do not count yet.
    let asks = fleet.members.open(MEMBER, agent, at(2));
    let seen = changes(
        Some(observing("hub/a")),
        &[("t", "OfTheAgent"), ("u", "OfTheAgent")],
    );
    fleet.members.report(MEMBER, agent, seen, Some(0), at(3));
    assert_eq!(fleet.reports.counts(MEMBER, false).total, 1);
    assert_eq!(fleet.members.presence(MEMBER).get(), Presence::Ready);
    // The proxy yields. The hub requests a full report from the agent, because the earlier one was dropped.
    fleet.members.close(MEMBER, proxy, at(4));
    assert_eq!(asks.get(), 1);
    let holds = changes(Some(writing("agent/a")), &[("t", "Again"), ("u", "Again")]);
    fleet.members.report(MEMBER, agent, holds, Some(1), at(5));
    assert_eq!(fleet.mode(), (Mode::Agent, reason::RECONCILING.to_owned()));
    assert_eq!(fleet.reports.counts(MEMBER, false).total, 2);
}

#[test]
fn unrecorded_desired_state_makes_the_member_stale() {
    let healthy = |problem: &str| {
        let said = MemberReport {
            problem: Some(problem.to_owned()).filter(|problem| !problem.is_empty()),
            ..writing("agent/a")
        };
        let healthy = reported(ReporterId::Session(1), &said, true)
            .healthy
            .unwrap();
        (healthy.truth, healthy.reason, healthy.message)
    };
    let (truth, reason, message) = healthy("exceeded quota: secrets");
    assert_eq!((truth, &*reason), (Truth::False, reason::STALE));
    assert!(message.contains("exceeded quota: secrets"), "{message}");
    let (truth, reason, _) = healthy("");
    assert_eq!((truth, &*reason), (Truth::True, reason::RECONCILING));
}

#[test]
fn only_complete_report_removes_missing_tenants() {
    let fleet = fleet();
    let agent = ReporterId::Session(1);
    let _first = fleet.members.open(MEMBER, agent, at(0));
    let all = changes(Some(writing("agent/a")), &[("t", "A"), ("u", "A")]);
    fleet.members.report(MEMBER, agent, all, Some(0), at(1));
    fleet.members.close(MEMBER, agent, at(2));
    let agent = ReporterId::Session(2);
    let _second = fleet.members.open(MEMBER, agent, at(3));
    fleet
        .members
        .report(MEMBER, agent, changes(None, &[("u", "B")]), None, at(4));
    assert_eq!(
        fleet.reports.counts(MEMBER, false).total,
        2,
        "an unfinished account removes nothing"
    );
    fleet.members.report(
        MEMBER,
        agent,
        changes(Some(writing("agent/a")), &[]),
        Some(0),
        at(5),
    );
    assert_eq!(fleet.reports.counts(MEMBER, false).total, 1);
}

#[test]
fn observing_proxy_reports_after_agent_is_lost() {
    let fleet = fleet();
    let agent = ReporterId::Session(1);
    let _asks = fleet.members.open(MEMBER, agent, at(0));
    fleet.members.report(
        MEMBER,
        agent,
        changes(Some(writing("agent/a")), &[]),
        Some(0),
        at(1),
    );
    fleet.members.close(MEMBER, agent, at(2));
    assert_eq!(
        fleet.members.presence(MEMBER).get(),
        Presence::Away(at(1)),
        "it may have died right after"
    );
    // Its last status stays for half a minute after the last report.
    assert_eq!(fleet.mode(), (Mode::Agent, reason::RECONCILING.to_owned()));
    fleet.members.link(MEMBER, None, at(31));
    assert_eq!(fleet.mode(), (Mode::Agent, reason::AGENT_AWAY.to_owned()));
    let _asks = fleet.members.open(MEMBER, ReporterId::Proxy, at(3));
    let seen = changes(Some(observing("agent/a")), &[("t", "Seen")]);
    fleet
        .members
        .report(MEMBER, ReporterId::Proxy, seen, Some(0), at(4));
    assert_eq!(fleet.mode(), (Mode::Agent, reason::OBSERVING.to_owned()));
    assert_eq!(
        fleet.members.observation(MEMBER).unwrap().holder.as_deref(),
        Some("agent/a")
    );
    assert_eq!(fleet.reports.counts(MEMBER, false).total, 1);
}

#[test]
fn digest_mismatch_requests_full_report_once() {
    let fleet = fleet();
    let agent = ReporterId::Session(1);
    let asks = fleet.members.open(MEMBER, agent, at(0));
    let all = changes(Some(writing("agent/a")), &[("t", "A")]);
    fleet.members.report(MEMBER, agent, all, Some(0), at(1));
    let same = fleet.reports.digest(MEMBER).unwrap();
    fleet.members.compare(MEMBER, agent, same, at(1));
    assert_eq!(asks.get(), 0);
    fleet.members.compare(MEMBER, agent, (2, same.1), at(1));
    fleet.members.compare(MEMBER, agent, (2, same.1), at(1));
    assert_eq!(asks.get(), 1);
    let again = changes(Some(writing("agent/a")), &[("u", "A"), ("v", "A")]);
    fleet.members.report(MEMBER, agent, again, Some(1), at(2));
    assert_eq!(
        fleet.reports.digest(MEMBER).unwrap().0,
        2,
        "what is not in it is gone"
    );
}

#[test]
fn deployment_reports_count_only_from_current_reporter() {
    let fleet = fleet();
    let (proxy, agent) = (ReporterId::Proxy, ReporterId::Session(1));
    let deployments = Arc::clone(fleet.members.deployments());
    // A Tenant with the same name has no reports.
    let key = DeploymentKey {
        namespace: key("t").namespace,
        name: "t".to_owned(),
    };
    let said = |why: &str| DeploymentReport {
        uid: "uid-1".to_owned(),
        observed_generation: 1,
        gone: false,
        applied_chart: String::new(),
        state: report(why).state,
        events: Vec::new(),
    };
    let of = |member: MemberReport, why: &str| Changes {
        member: Some(member),
        deployments: [(key.clone(), Some(said(why)))].into(),
        ..Changes::default()
    };
    let held = || {
        let held = deployments.said(MEMBER, &key).unwrap();
        (held.report.state.ready.reason, held.fresh)
    };
    let _asks = fleet.members.open(MEMBER, proxy, at(0));
    let first = of(writing("hub/a"), "OfTheProxy");
    fleet.members.report(MEMBER, proxy, first, Some(0), at(1));
    assert_eq!(held(), ("OfTheProxy".to_owned(), true));
    assert_eq!(fleet.reports.counts(MEMBER, false).total, 0);
    let asks = fleet.members.open(MEMBER, agent, at(2));
    let seen = of(observing("hub/a"), "OfTheAgent");
    fleet.members.report(MEMBER, agent, seen, Some(0), at(3));
    assert_eq!(held(), ("OfTheProxy".to_owned(), true));
    // The proxy's report stays until the agent has sent its full report.
    fleet.members.close(MEMBER, proxy, at(4));
    assert_eq!((held(), asks.get()), (("OfTheProxy".to_owned(), false), 1));
    let again = of(writing("agent/a"), "OfTheAgent");
    fleet.members.report(MEMBER, agent, again, Some(1), at(5));
    assert_eq!(held(), ("OfTheAgent".to_owned(), true));
    // The stored report matches the digest, so the hub requests nothing.
    let part = krypton_types::report_digest::part(&key, &said("OfTheAgent"));
    fleet.members.compare(MEMBER, agent, (1, part), at(60));
    assert_eq!(asks.get(), 1);
    fleet.members.compare(MEMBER, agent, (0, 0), at(60));
    assert_eq!(asks.get(), 2);
}

#[test]
fn never_ready_agent_blocks_no_proxy() {
    let fleet = fleet();
    let agent = ReporterId::Session(1);
    let _asks = fleet.members.open(MEMBER, agent, at(100));
    assert_eq!(fleet.members.presence(MEMBER).get(), Presence::Never);
    fleet.members.close(MEMBER, agent, at(101));
    assert_eq!(fleet.members.presence(MEMBER).get(), Presence::Away(at(0)));
}

#[test]
fn agent_absence_counts_from_last_ready_contact() {
    let fleet = fleet();
    let presence = fleet.members.presence(MEMBER);
    let [first, second] = [1, 2].map(ReporterId::Session);
    for agent in [first, second] {
        let _asks = fleet.members.open(MEMBER, agent, at(100));
        let ready = changes(Some(writing("agent/a")), &[]);
        fleet.members.report(MEMBER, agent, ready, Some(0), at(100));
    }
    fleet.members.compare(MEMBER, first, (0, 0), at(150));
    fleet.members.compare(MEMBER, second, (0, 0), at(140));
    // The machine is gone. The hub notices the silence after half a minute.
    fleet.members.close(MEMBER, first, at(180));
    assert_eq!(presence.get(), Presence::Ready);
    let deaf = MemberReport {
        ready: false,
        connected: false,
        ..writing("agent/a")
    };
    // The agent waits half a minute for its API server before it reports the failure.
    fleet
        .members
        .report(MEMBER, second, changes(Some(deaf), &[]), None, at(190));
    assert_eq!(presence.get(), Presence::Away(at(150)));
    fleet.members.compare(MEMBER, second, (0, 0), at(200));
    assert_eq!(presence.get(), Presence::Away(at(150)));
}

#[test]
fn hold_back_overrides_reporter_until_lifted() {
    let fleet = fleet();
    let agent = ReporterId::Session(1);
    let _asks = fleet.members.open(MEMBER, agent, at(0));
    fleet.members.report(
        MEMBER,
        agent,
        changes(Some(writing("agent/a")), &[]),
        Some(0),
        at(1),
    );
    let why = Some((reason::BANNED, "by a person".to_owned()));
    fleet.members.hold_back(MEMBER, why, at(2));
    assert_eq!(fleet.mode(), (Mode::None, reason::BANNED.to_owned()));
    fleet.members.hold_back(MEMBER, None, at(3));
    assert_eq!(fleet.mode(), (Mode::Agent, reason::RECONCILING.to_owned()));
}

#[test]
fn unready_agent_makes_no_proxy_yield() {
    let fleet = fleet();
    let _asks = fleet.members.open(MEMBER, ReporterId::Session(1), at(100));
    // The agent's certificate is recorded by now.
    fleet.members.agent_known(MEMBER, at(101));
    assert_eq!(
        fleet.members.presence(MEMBER).get(),
        Presence::Never,
        "who is not ready is waited for by nobody"
    );
}

#[test]
fn agent_without_tenants_is_resynced_after_proxy_leaves() {
    let fleet = fleet();
    let (proxy, agent) = (ReporterId::Proxy, ReporterId::Session(1));
    let _asks = fleet.members.open(MEMBER, proxy, at(0));
    let first = changes(Some(writing("hub/a")), &[("t", "OfTheProxy")]);
    fleet.members.report(MEMBER, proxy, first, Some(0), at(1));
    let asks = fleet.members.open(MEMBER, agent, at(2));
    let empty = changes(Some(observing("hub/a")), &[]);
    fleet.members.report(MEMBER, agent, empty, Some(0), at(3));
    fleet.members.close(MEMBER, proxy, at(4));
    assert_eq!(asks.get(), 1, "what was said to nobody is asked for");
    let empty = changes(Some(writing("agent/a")), &[]);
    fleet.members.report(MEMBER, agent, empty, Some(1), at(5));
    assert_eq!(fleet.reports.digest(MEMBER), Some((0, 0)));
}

#[test]
fn implausible_epoch_claim_is_ignored() {
    let members = MemberRegistry::default();
    let heard = members.ahead().subscribe();
    members.set_epoch(7);
    let agent = ReporterId::Session(1);
    let _asks = members.open(MEMBER, agent, at(0));
    let knows = |epoch| {
        let ahead = Some(Version {
            epoch,
            generation: 0,
        });
        let report = MemberReport {
            ahead,
            ..writing("agent/a")
        };
        changes(Some(report), &[])
    };
    members.report(MEMBER, agent, knows(u64::MAX), None, at(1));
    assert_eq!(heard.get(), 0);
    members.report(MEMBER, agent, knows(9), None, at(2));
    assert_eq!(heard.get(), 9);
}

#[test]
fn tenants_that_are_not_restored_are_shown() {
    let healthy = |report: &MemberReport| {
        let state = reported(ReporterId::Proxy, report, true).healthy.unwrap();
        (state.truth, state.reason, state.message)
    };
    let refused = MemberReport {
        not_restored: Some("default/bad is refused".to_owned()),
        ..writing("hub/a")
    };
    let (truth, why, message) = healthy(&refused);
    assert_eq!((truth, why.as_str()), (Truth::False, reason::NOT_RESTORED));
    assert_eq!(message, "default/bad is refused");
    assert_eq!(healthy(&writing("hub/a")).1, reason::RECONCILING);
}

#[test]
fn claimed_epochs_are_followed_with_growing_pauses() {
    let members = MemberRegistry::default();
    let heard = members.ahead().subscribe();
    members.set_epoch(7);
    let agent = ReporterId::Session(1);
    let claims = |member: &str, report: MemberReport, now: u64| {
        let epoch = members.lock().fleet.epoch;
        let ahead = Some(Version {
            epoch,
            generation: 9,
        });
        let report = MemberReport { ahead, ..report };
        members.report(member, agent, changes(Some(report), &[]), None, at(now));
        let followed = heard.get() >= epoch;
        if followed {
            members.set_epoch(heard.get() + 1);
        }
        followed
    };
    for member in [MEMBER, "edge-2"] {
        drop(members.open(member, agent, at(0)));
    }
    assert!(!claims(MEMBER, observing("agent/a"), 1), "it has no record");
    // A member claims a later epoch all day.
    let day = 24 * 60 * 60;
    let mut times = Vec::new();
    for now in (2..day).step_by(10) {
        if claims(MEMBER, writing("agent/a"), now) {
            times.push(now);
        }
    }
    assert!(times.len() <= 14, "{times:?}");
    let pauses: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.iter().all(|pause| *pause >= 20), "{pauses:?}");
    assert!(pauses.is_sorted(), "{pauses:?}");
    // Another member's claim is followed immediately.
    assert!(claims("edge-2", writing("agent/a"), day));
    // The delay starts from its first value a day after the last claim.
    assert!(claims(MEMBER, writing("agent/a"), 3 * day));
    assert!(claims(MEMBER, writing("agent/a"), 3 * day + 20));
}

#[test]
fn waiting_epoch_claim_is_followed_when_due() {
    let members = MemberRegistry::default();
    let heard = members.ahead().subscribe();
    let agent = ReporterId::Session(1);
    drop(members.open(MEMBER, agent, at(0)));
    for (epoch, now, expected) in [(3, 1, 3), (4, 2, 3), (4, 21, 4)] {
        let ahead = Some(Version {
            epoch,
            generation: 0,
        });
        let report = MemberReport {
            ahead,
            ..writing("agent/a")
        };
        members.report(MEMBER, agent, changes(Some(report), &[]), None, at(now));
        assert_eq!(heard.get(), expected, "{now}");
        if now == 2 {
            let due = members
                .lock()
                .fleet
                .due
                .iter()
                .any(|due| *due == (at(21), MEMBER.to_owned()));
            assert!(due, "it is looked at again by itself");
        }
    }
}

#[test]
fn forgotten_agent_clears_its_presence_and_observation() {
    let fleet = fleet();
    fleet.members.agent_known(MEMBER, at(100));
    let agent = AgentDetails {
        cluster_uid: "old".to_owned(),
        kubernetes_version: "v1".to_owned(),
        agent_version: "0.1.0".to_owned(),
        certificate: Validity::until(jiff::Timestamp::UNIX_EPOCH),
        key: krypton_crds::edge_cluster::AgentKey::default(),
        applied: None,
    };
    fleet.members.agent(MEMBER, &agent);
    fleet.members.forget_agent(MEMBER, at(101));
    assert_eq!(fleet.members.presence(MEMBER).get(), Presence::Never);
    let facts = fleet.members.observation(MEMBER).unwrap();
    assert_eq!((facts.uid, facts.certificate), (None, None));
}

#[test]
fn suspended_member_health_is_unknown_not_false() {
    let fleet = fleet();
    let _asks = fleet.members.open(MEMBER, ReporterId::Proxy, at(0));
    let said = changes(Some(writing("hub/a")), &[("t", "A")]);
    fleet
        .members
        .report(MEMBER, ReporterId::Proxy, said, Some(0), at(1));
    for (why, truth) in [
        (reason::SUSPENDED, Truth::Unknown),
        (reason::DUPLICATE, Truth::False),
    ] {
        let held = Some((why, "it is Sleeping".to_owned()));
        fleet.members.hold_back(MEMBER, held, at(2));
        let facts = fleet.members.observation(MEMBER).unwrap();
        assert_eq!(
            (facts.mode, facts.healthy.truth),
            (Mode::None, truth),
            "{why}"
        );
        assert_eq!(facts.healthy.message, "it is Sleeping");
        assert_eq!(facts.connected.truth, Truth::True, "{why}");
    }
    fleet.members.hold_back(MEMBER, None, at(3));
    assert_eq!(fleet.mode(), (Mode::Proxy, reason::RECONCILING.to_owned()));
}

#[test]
fn new_term_forgets_reports_of_closed_session() {
    let fleet = fleet();
    let agent = ReporterId::Session(1);
    let _asks = fleet.members.open(MEMBER, agent, at(0));
    let said = changes(Some(writing("agent/a")), &[("t", "A")]);
    fleet.members.report(MEMBER, agent, said, Some(0), at(1));
    fleet.members.agent(
        MEMBER,
        &AgentDetails {
            cluster_uid: "u".to_owned(),
            kubernetes_version: "1".to_owned(),
            agent_version: "1".to_owned(),
            certificate: Validity::until(jiff::Timestamp::UNIX_EPOCH),
            key: krypton_crds::edge_cluster::AgentKey::default(),
            applied: None,
        },
    );
    // While its session lives, its reports stay current.
    fleet.members.begin_term(at(2));
    assert_eq!(fleet.reports.counts(MEMBER, false).total, 1);
    assert!(fleet.members.observation(MEMBER).unwrap().certificate_said);
    fleet.members.close(MEMBER, agent, at(3));
    fleet.members.begin_term(at(4));
    let facts = fleet.members.observation(MEMBER).unwrap();
    assert_eq!(fleet.reports.counts(MEMBER, false).total, 0);
    assert_eq!((facts.applied, facts.holder), (None, None));
    assert_eq!((facts.agent_version, facts.certificate), (None, None));
    assert!(!facts.certificate_said && facts.roots.is_none());
    assert_eq!(facts.connected.reason, reason::STARTING);
}

#[test]
fn new_term_keeps_proxy_reports_only_if_connected() {
    for (said, total, asked) in [
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
        let asks = fleet.members.open(MEMBER, ReporterId::Proxy, at(0));
        let all = changes(Some(observing("hub/b")), &[("t", "A")]);
        fleet
            .members
            .report(MEMBER, ReporterId::Proxy, all, Some(0), at(1));
        let now = changes(Some(said), &[]);
        fleet
            .members
            .report(MEMBER, ReporterId::Proxy, now, None, at(2));
        fleet.members.begin_term(at(3));
        assert_eq!(fleet.reports.counts(MEMBER, false).total, total);
        assert_eq!(asks.get(), asked);
    }
}

#[test]
fn answer_beyond_the_limits_shows_for_a_while() {
    let fleet = fleet();
    let healthy = || fleet.members.observation(MEMBER).unwrap().healthy.reason;
    fleet.members.open(MEMBER, ReporterId::Proxy, at(1));
    let said = changes(Some(writing("hub")), &[]);
    fleet
        .members
        .report(MEMBER, ReporterId::Proxy, said, Some(0), at(1));
    assert_eq!(healthy(), reason::RECONCILING);
    fleet.members.offend(MEMBER, "first".to_owned(), at(2));
    fleet.members.offend(MEMBER, "second".to_owned(), at(100));
    let facts = fleet.members.observation(MEMBER).unwrap();
    let limited = State::new(Truth::False, reason::LIMIT_EXCEEDED, "first");
    assert_eq!(facts.healthy, limited);
    assert_eq!(facts.connected.truth, Truth::True);
    let settle = |seconds| fleet.members.link(MEMBER, None, at(seconds));
    settle(399);
    assert_eq!(healthy(), reason::LIMIT_EXCEEDED);
    settle(400);
    assert_eq!(healthy(), reason::RECONCILING);
}

#[test]
fn lone_epoch_claim_is_shown_as_unconfirmed() {
    let members = MemberRegistry::default();
    let heard = members.ahead().subscribe();
    members.set_epoch(7);
    let agent = ReporterId::Session(1);
    let says = |member: &str, claims: Option<u64>, now: u64| {
        let ahead = claims.map(|epoch| Version {
            epoch,
            generation: 9,
        });
        let report = MemberReport {
            ahead,
            ..writing("agent/a")
        };
        members.report(member, agent, changes(Some(report), &[]), None, at(now));
        heard.get()
    };
    for member in [MEMBER, "edge-2", "edge-3"] {
        drop(members.open(member, agent, at(0)));
    }
    assert_eq!(says("edge-2", None, 1), 0);
    assert_eq!(says(MEMBER, Some(12), 2), 0);
    let healthy = members.observation(MEMBER).unwrap().healthy;
    assert_eq!(healthy.reason, reason::STALE);
    assert!(healthy.message.contains("no other member confirms it"));
    // The hub takes the later of two claims, because one later epoch satisfies both.
    assert_eq!(says("edge-3", Some(9), 3), 12);
}
