use krypton_crds::tenant::{HistoryEntry, TenantSpec};
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::tenant::{TenantReport, UpcomingStep, UpcomingStepKind};
use serde_json::json;

use super::*;
use crate::members::tenant_reports::{ReportState, Target, TenantReportChanges};
use crate::tenants::simulation::{
    HomeSimulation, member, now, report, settings, simulated_key, targets,
};

const MEMBER: &str = "edge-1";

fn key() -> TenantKey {
    TenantKey::new("n", "acme")
}

fn object(version: &str, status: Option<TenantStatus>) -> Tenant {
    let mut tenant = Tenant::new("acme", TenantSpec::default());
    tenant.metadata.namespace = Some("n".to_owned());
    tenant.metadata.uid = Some("u".to_owned());
    tenant.metadata.resource_version = Some(version.to_owned());
    tenant.status = status;
    tenant
}

fn naming_member() -> TenantSpec {
    serde_json::from_value(json!({ "clusterRef": { "secretName": MEMBER } })).unwrap()
}

fn at(millis: u64) -> DecisionTime {
    now(BootTime(Duration::from_millis(millis)))
}

fn send(reports: &TenantReports, report: TenantReport) {
    let changes = [(key(), Some(report))].into();
    reports.apply(MEMBER, TenantReportChanges::new(changes));
    reports.set_report_state(MEMBER, ReportState::Complete);
}

fn report_reason(reports: &TenantReports, reason: &str) {
    send(
        reports,
        TenantReport::new(1, State::new(Truth::True, reason, "")),
    );
}

/// Returns a store with version 1 of the Tenant, which its member has installed.
fn installed_store() -> (TenantStore, TenantReports) {
    let (mut store, reports) = (TenantStore::default(), TenantReports::default());
    store.put(key(), object("1", None), &reports);
    report_reason(&reports, reason::INSTALLED);
    (store, reports)
}

fn next_write(store: &mut TenantStore, reports: &TenantReports, now: DecisionTime) -> NextWrite {
    store.next_write(reports, &settings(), &Leader::always_leading(), now)
}

fn finish(store: &mut TenantStore, reports: &TenantReports, write: FinishedWrite) {
    store.finish_write(key(), write, reports, BootTime::default());
}

/// Passes changes to the store in the same order as the loop.
fn next_status(
    store: &mut TenantStore,
    reports: &TenantReports,
    millis: u64,
) -> Option<TenantStatus> {
    store.mark_affected(reports.take_dirty(at(millis).boot), reports, &settings());
    match next_write(store, reports, at(millis)) {
        NextWrite::Write(_, _, TenantWrite::Status(status)) => Some(*status),
        NextWrite::Idle => None,
        other => panic!("{other:?}"),
    }
}

fn finished(base_version: &str, object: Option<Tenant>) -> FinishedWrite {
    FinishedWrite {
        base_version: Some(base_version.to_owned()),
        object,
        records_placement: false,
        written_status: None,
        orphaned: None,
        phase: None,
        outcome: WriteOutcome::Ok,
    }
}

#[test]
fn status_writes_are_limited_to_once_per_second() {
    let (mut store, reports) = (TenantStore::default(), TenantReports::default());
    store.put(key(), object("0", None), &reports);
    let mut times = Vec::new();
    let mut version = 0;
    for millis in (0..5000_u64).step_by(50) {
        let reasons = [reason::INSTALLED, reason::UPGRADED];
        let reason = reasons[usize::from(!millis.is_multiple_of(100))];
        report_reason(&reports, reason);
        if let Some(status) = next_status(&mut store, &reports, millis) {
            let base_version = version.to_string();
            version += 1;
            let object = object(&version.to_string(), Some(status));
            let write = finished(&base_version, Some(object));
            finish(&mut store, &reports, write);
            times.push(millis);
        }
    }
    assert!(times.len() >= 4, "{times:?}");
    let mut intervals = times.windows(2).map(|pair| pair[1] - pair[0]);
    assert!(intervals.all(|interval| interval >= 1000), "{times:?}");
}

#[test]
fn rejected_write_is_retried_after_its_interval() {
    let (mut store, reports) = installed_store();
    assert!(next_status(&mut store, &reports, 0).is_some());
    report_reason(&reports, reason::UPGRADED);
    // One is in flight.
    assert_eq!(next_status(&mut store, &reports, 2000), None);
    finish(&mut store, &reports, finished("1", None));
    assert!(next_status(&mut store, &reports, 2000).is_some());
    finish(&mut store, &reports, finished("1", None));
    assert_eq!(next_status(&mut store, &reports, 2999), None);
    assert_eq!(store.queue.wake(), Some(at(3000).boot));
    assert!(next_status(&mut store, &reports, 3000).is_some());
}

#[test]
fn failed_writes_back_off() {
    let (mut store, reports) = installed_store();
    let finished_with = |outcome, object| FinishedWrite {
        outcome,
        ..finished("1", object)
    };
    let mut now = 0;
    let mut pause = |store: &mut TenantStore, write: FinishedWrite| {
        assert!(next_status(store, &reports, now).is_some());
        store.finish_write(key(), write, &reports, at(now).boot);
        assert_eq!(next_status(store, &reports, now), None);
        let finished_at = at(now).boot;
        let wake = store.queue.wake().unwrap();
        now = u64::try_from(wake.0.as_millis()).unwrap() + 1;
        wake.since(finished_at)
    };
    for full in [1, 2, 4, 8, 16, 30, 30] {
        let full = Duration::from_secs(full);
        let actual = pause(&mut store, finished_with(WriteOutcome::Failed, None));
        let expected = full / 2..=full;
        assert!(expected.contains(&actual), "{actual:?} of {full:?}");
    }
    let conflict = finished_with(WriteOutcome::Conflict, None);
    assert_eq!(pause(&mut store, conflict), MIN_WRITE_INTERVAL);
    let unchanged = finished("1", Some(object("1", None)));
    assert_eq!(pause(&mut store, unchanged), MIN_WRITE_INTERVAL);
    let retry = pause(&mut store, finished_with(WriteOutcome::Failed, None));
    assert!(retry <= Duration::from_secs(1), "{retry:?}");
}

#[test]
fn late_write_response_does_not_undo_watch_updates() {
    let (mut store, reports) = installed_store();
    let status = next_status(&mut store, &reports, 0).unwrap();
    // The hub's own write, then another client's, and only then the response.
    store.put(key(), object("2", Some(status.clone())), &reports);
    store.put(key(), object("3", Some(status.clone())), &reports);
    let response = finished("1", Some(object("2", Some(status))));
    finish(&mut store, &reports, response);
    assert_eq!(store.entries[&key()].version().unwrap(), "3");
    // Neither does the response restore a deleted Tenant.
    store.remove(&key());
    let response = finished("3", Some(object("4", None)));
    finish(&mut store, &reports, response);
    assert!(store.entries.is_empty());
}

#[test]
fn placement_record_precedes_finalizer_where_crd_keeps_it() {
    let reports = TenantReports::default();
    let target = Target {
        cluster_uid: Some("cluster-1".to_owned()),
        ..Target::default()
    };
    reports.set_targets([(MEMBER.to_owned(), target)].into());
    let named_tenant = |version: &str, status: Option<TenantStatus>| {
        let mut tenant = object(version, status);
        tenant.spec = naming_member();
        tenant
    };
    for crd_keeps_record in [true, false] {
        let mut store = TenantStore {
            planner: PlacementPlanner::new(Some(Arc::default())),
            ..TenantStore::default()
        };
        store.put(key(), named_tenant("1", None), &reports);
        let NextWrite::Write(_, _, TenantWrite::Status(mut status)) =
            next_write(&mut store, &reports, at(0))
        else {
            panic!("it is not put on record");
        };
        assert_eq!(status.placement.as_ref().unwrap().cluster_uid, "cluster-1");
        if !crd_keeps_record {
            status.placement = None;
        }
        let recorded = FinishedWrite {
            records_placement: true,
            ..finished("1", Some(named_tenant("2", Some(*status))))
        };
        finish(&mut store, &reports, recorded);
        assert_eq!(store.record_dropped_until.is_some(), !crd_keeps_record);
        let due = if crd_keeps_record {
            1
        } else {
            let early = next_write(&mut store, &reports, at(1));
            assert!(matches!(early, NextWrite::Idle), "{early:?}");
            1000
        };
        let next = next_write(&mut store, &reports, at(due));
        assert!(
            matches!(&next, NextWrite::Write(_, _, TenantWrite::Finalizer(FinalizerChange::Add(member))) if member == MEMBER),
            "{next:?}"
        );
    }
}

#[test]
fn fields_unknown_to_old_crd_are_written_once() {
    let (mut store, reports) = (TenantStore::default(), TenantReports::default());
    store.put(key(), object("0", None), &reports);
    let failing = |second| {
        let next = UpcomingStep::at_second(UpcomingStepKind::Retry, Some(second), 1);
        let failed = State::new(Truth::False, reason::INSTALL_FAILED, "");
        let report = TenantReport {
            next,
            ..TenantReport::new(1, failed)
        };
        send(&reports, report);
    };
    failing(100);
    let mut status = next_status(&mut store, &reports, 0).unwrap();
    assert_eq!(status.next_steps.len(), 1);
    assert_eq!(status.clusters.len(), 1);
    // The CRD dropped the fields from the write.
    let written = status.clone();
    status.next_steps.clear();
    status.clusters.clear();
    let kept = FinishedWrite {
        written_status: Some(written),
        ..finished("0", Some(object("1", Some(status.clone()))))
    };
    finish(&mut store, &reports, kept);
    assert_eq!(next_status(&mut store, &reports, 2_000), None);
    // Another step is written, and again after a refusal.
    failing(200);
    assert!(next_status(&mut store, &reports, 4_000).is_some());
    finish(&mut store, &reports, finished("1", None));
    assert!(next_status(&mut store, &reports, 6_000).is_some());
}

#[test]
fn history_that_crd_drops_counts_as_recorded() {
    let with_history = |revision| TenantStatus {
        history: vec![HistoryEntry {
            revision,
            ..HistoryEntry::default()
        }],
        ..TenantStatus::default()
    };
    let tenant = object("1", Some(TenantStatus::default()));
    let mut entry = TenantEntry::new(Arc::new(tenant));
    assert!(!entry.is_recorded(&with_history(1)));
    entry.written_status = Some(with_history(1));
    assert!(entry.is_recorded(&with_history(1)));
    assert!(!entry.is_recorded(&with_history(2)), "it is another");
}

#[test]
fn member_change_reevaluates_only_its_own_tenants() {
    let mut fleet = HomeSimulation::new(20, 5);
    assert_eq!(fleet.reconcile(), 0);
    let name = member(7);
    fleet.set_connected(7, false);
    assert_eq!(fleet.reconcile(), 5, "it falls silent");
    fleet.reports.set_report_state(&name, ReportState::Complete);
    assert_eq!(fleet.reconcile(), 5, "it is heard again");
    fleet.reports.begin_full_report(&name, fleet.now);
    assert_eq!(fleet.reconcile(), 5, "it begins again");
    fleet.reports.set_report_state(&name, ReportState::Complete);
    assert_eq!(fleet.reconcile(), 5, "it has said nothing since");
    let change = [(simulated_key(7, 3), Some(report(true)))];
    let change = TenantReportChanges::new(change.into());
    fleet.reports.apply(&name, change);
    assert_eq!(fleet.reconcile(), 1, "it says something of one");
    let mut others = targets(20);
    others.get_mut(&name).unwrap().resolved = Some(State::new(Truth::False, "Any", ""));
    fleet.reports.set_targets(others);
    assert_eq!(fleet.reconcile(), 5, "its EdgeCluster says something else");
    fleet.reports.set_targets(targets(19));
    assert_eq!(fleet.reconcile(), 10, "another leaves, and it is as before");
    fleet.reports.drop_reports(&name, fleet.now);
    assert_eq!(fleet.reconcile(), 5, "what it has said counts no more");
}

#[test]
fn expired_grace_affects_only_that_members_tenants() {
    let mut fleet = HomeSimulation::new(3, 2);
    let started_at = fleet.now;
    fleet.reports.begin_full_report(&member(1), started_at);
    let grace_end = started_at + START_GRACE;
    assert_eq!(fleet.reports.next_grace_end(), Some(grace_end));
    assert_eq!(fleet.reconcile(), 2);
    fleet.now += START_GRACE;
    assert_eq!(fleet.reconcile(), 2);
    assert_eq!(fleet.reports.next_grace_end(), None);
    let entry = &fleet.store.entries[&simulated_key(1, 0)];
    let status = entry.tenant.status.as_ref().unwrap();
    let states = krypton_types::conditions::clusters(&status.conditions);
    assert_eq!(states[&member(1)].ready.reason, reason::CLUSTER_UNREACHABLE);
}

#[test]
fn looking_at_many_tenants_yields_to_others() {
    let mut fleet = HomeSimulation::new(STEPS_MAX / 100 + 2, 100);
    fleet.store.enqueue_all();
    let mut rounds = 0;
    let now = now(fleet.now + MIN_WRITE_INTERVAL);
    loop {
        let previous = fleet.store.decisions;
        let next = next_write(&mut fleet.store, &fleet.reports, now);
        assert!(fleet.store.decisions - previous <= STEPS_MAX as u64);
        rounds += 1;
        match next {
            NextWrite::Yield => {}
            NextWrite::Idle => break,
            NextWrite::Write(..) => panic!("nothing is to be written"),
        }
    }
    assert!(rounds >= 3, "{rounds}");
}

#[test]
fn orders_are_published_while_home_lacks_crd() {
    let placements = Arc::new(PlacementOrders::default());
    let reports = TenantReports::default();
    reports.set_targets([(MEMBER.to_owned(), Target::default())].into());
    let mut placed = object("1", None);
    placed.spec = naming_member();
    placed.metadata.finalizers = Some(vec![names::PLACED_FINALIZER.to_owned()]);
    let on = (names::PLACED_ON_ANNOTATION.to_owned(), MEMBER.to_owned());
    placed.metadata.annotations = Some([on].into());
    let mut store = TenantStore {
        planner: PlacementPlanner::new(Some(Arc::clone(&placements))),
        ..TenantStore::default()
    };
    // A standby saw this Tenant before the CRD was deleted.
    store.put(key(), placed.clone(), &reports);
    store.reset_list();
    for (absent, published) in [(false, None), (true, Some(0))] {
        store.crd_absent = absent;
        store.publish_orders(&reports, None);
        let orders = placements.orders().get();
        let orders = orders.map(|orders| orders.values().map(|orders| orders.len()).sum());
        assert_eq!(orders, published, "{absent}");
    }
    store.put(key(), placed, &reports);
    store.synced = true;
    store.publish_orders(&reports, None);
    let orders = placements.orders().get().unwrap();
    let has_one = orders.values().any(|orders| orders.len() == 1);
    assert!(has_one, "{orders:?}");
}

/// Returns a Tenant whose status has only these numbers of members.
fn summarised(clusters: u32, ready: u32) -> Tenant {
    let summary = krypton_crds::tenant::ClusterSummary {
        clusters,
        ready,
        ..Default::default()
    };
    let status = TenantStatus {
        summary: Some(summary),
        ..TenantStatus::default()
    };
    object("1", Some(status))
}

/// Returns a store with Tenants whose members are known only as a count, before they are late.
fn summarised_store(members: usize, tenants: usize) -> (TenantStore, TenantReports) {
    let (mut store, reports) = (TenantStore::default(), TenantReports::default());
    reports.set_targets(targets(members));
    for number in 0..tenants {
        let object = summarised(u32::try_from(members).unwrap(), 0);
        store.put(simulated_key(0, number), object, &reports);
    }
    store.synced = true;
    (store, reports)
}

/// Returns the number of decisions, and whether no Tenant is due.
fn decide_idle(store: &mut TenantStore, reports: &TenantReports, millis: u64) -> (u64, bool) {
    let previous = store.decisions;
    let now = DecisionTime {
        in_startup_grace: true,
        ..at(millis)
    };
    let next = next_write(store, reports, now);
    assert!(!matches!(next, NextWrite::Write(..)), "{next:?}");
    (store.decisions - previous, matches!(next, NextWrite::Idle))
}

#[test]
fn scan_of_many_members_yields_to_others() {
    let (mut store, reports) = summarised_store(STEPS_MAX, 5);
    for _ in 0..5 {
        assert_eq!(decide_idle(&mut store, &reports, 0).0, 1);
    }
}

#[test]
fn scan_of_many_members_is_paced() {
    let (mut store, reports) = summarised_store(1_000, 3);
    while !decide_idle(&mut store, &reports, 0).1 {}
    for (millis, decided) in [(300, 0), (999, 0), (1_000, 3)] {
        store.enqueue_all();
        let decisions = decide_idle(&mut store, &reports, millis).0;
        assert_eq!(decisions, decided, "{millis}");
    }
}

#[test]
fn members_known_by_number_only_are_found_again() {
    let (mut store, reports) = (TenantStore::default(), TenantReports::default());
    let count = 60;
    reports.set_targets(targets(count));
    store.put(key(), summarised(60, 60), &reports);
    store.synced = true;
    let mut status = next_status(&mut store, &reports, 100_000).unwrap();
    assert_eq!(status.summary.unwrap().unknown, 60);
    for number in 0..count {
        let name = member(number);
        let change = (number < 55).then(|| (key(), Some(report(true))));
        let changes = change.into_iter().collect();
        reports.apply(&name, TenantReportChanges::new(changes));
        reports.set_report_state(&name, ReportState::Complete);
        let millis = 102_000 + 2_000 * number as u64;
        let object = object(&format!("{}", number + 2), Some(status.clone()));
        store.put(key(), object, &reports);
        let queue = &mut store.queue;
        queue.done(&key(), Outcome::Done, BootTime::default(), 0.0);
        if let Some(next) = next_status(&mut store, &reports, millis) {
            status = next;
        }
        let summary = status.summary.unwrap();
        let reported = u32::try_from(number + 1).unwrap().min(55);
        assert_eq!(summary.ready, reported);
    }
    let summary = status.summary.unwrap();
    assert_eq!((summary.clusters, summary.unknown), (55, 0));
    assert!(store.with_unnamed.is_empty());
}
