use krypton_crds::tenant::TenantSpec;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::tenant::{Next, Step, TenantReport};

use super::*;
use crate::members::tenant_reports::{Changed, Hearing, Target};
use crate::tenants::simulation::{Rehearsal, member, now, report, rules, targets, tenant_of};

const MEMBER: &str = "edge-1";

fn key() -> TenantKey {
    TenantKey {
        namespace: "n".to_owned(),
        name: "acme".to_owned(),
    }
}

fn object(version: &str, status: Option<TenantStatus>) -> Tenant {
    let mut tenant = Tenant::new("acme", TenantSpec::default());
    tenant.metadata.namespace = Some("n".to_owned());
    tenant.metadata.uid = Some("u".to_owned());
    tenant.metadata.resource_version = Some(version.to_owned());
    tenant.status = status;
    tenant
}

fn at(millis: u64) -> Now {
    Now {
        boot: BootTime(Duration::from_millis(millis)),
        wall: jiff::Timestamp::UNIX_EPOCH,
        patient: false,
    }
}

fn says(reports: &Reports, why: &str) {
    let report = TenantReport {
        observed_generation: 1,
        applied_chart: String::new(),
        next: None,
        state: ClusterState::from(State::new(Truth::True, why, "")),
    };
    reports.report(MEMBER, Changed::new([(key(), Some(report))].into()));
    reports.hearing(MEMBER, Hearing::Full);
}

/// Passes changes to the store in the same order as the loop.
fn next(store: &mut TenantStore, reports: &Reports, millis: u64) -> Option<TenantStatus> {
    store.take_in(reports.take_dirty(at(millis).boot), reports, &rules());
    match store.next(reports, &rules(), &Leader::alone(), at(millis)) {
        Turn::Write(_, _, Change::Status(status)) => Some(*status),
        Turn::Rest => None,
        other => panic!("{other:?}"),
    }
}

fn written(before: &str, object: Option<Tenant>) -> Written {
    Written {
        before: Some(before.to_owned()),
        object,
        recording: false,
        orphaned: None,
        phase: None,
        came: Wrote::Ok,
    }
}

#[test]
fn status_writes_are_limited_to_once_per_second() {
    let (mut store, reports) = (TenantStore::default(), Reports::default());
    store.put(key(), object("0", None), &reports);
    let mut times = Vec::new();
    let mut version = 0;
    for millis in (0..5000_u64).step_by(50) {
        let why = if millis.is_multiple_of(100) {
            reason::INSTALLED
        } else {
            reason::UPGRADED
        };
        says(&reports, why);
        if let Some(status) = next(&mut store, &reports, millis) {
            let before = version.to_string();
            version += 1;
            let object = object(&version.to_string(), Some(status));
            store.take_written(
                key(),
                written(&before, Some(object)),
                &reports,
                BootTime::default(),
            );
            times.push(millis);
        }
    }
    assert!(times.len() >= 4, "{times:?}");
    let apart = times.windows(2).map(|pair| pair[1] - pair[0]);
    assert!(apart.clone().all(|apart| apart >= 1000), "{times:?}");
}

#[test]
fn rejected_write_is_retried_after_its_interval() {
    let (mut store, reports) = (TenantStore::default(), Reports::default());
    store.put(key(), object("1", None), &reports);
    says(&reports, reason::INSTALLED);
    assert!(next(&mut store, &reports, 0).is_some());
    says(&reports, reason::UPGRADED);
    assert_eq!(next(&mut store, &reports, 2000), None, "one is in flight");
    store.take_written(key(), written("1", None), &reports, BootTime::default());
    assert!(next(&mut store, &reports, 2000).is_some());
    store.take_written(key(), written("1", None), &reports, BootTime::default());
    assert_eq!(next(&mut store, &reports, 2999), None);
    assert_eq!(store.queue.wake(), Some(at(3000).boot));
    assert!(next(&mut store, &reports, 3000).is_some());
}

#[test]
fn failed_writes_back_off() {
    let (mut store, reports) = (TenantStore::default(), Reports::default());
    store.put(key(), object("1", None), &reports);
    says(&reports, reason::INSTALLED);
    let ends = |came, version| Written {
        came,
        ..written("1", version)
    };
    let mut now = 0;
    let mut pause = |store: &mut TenantStore, ended: Written| {
        assert!(next(store, &reports, now).is_some());
        store.take_written(key(), ended, &reports, at(now).boot);
        assert_eq!(next(store, &reports, now), None);
        let before = at(now).boot;
        let wakes = store.queue.wake().unwrap();
        now = u64::try_from(wakes.0.as_millis()).unwrap() + 1;
        wakes.since(before)
    };
    for full in [1, 2, 4, 8, 16, 30, 30] {
        let full = Duration::from_secs(full);
        let found = pause(&mut store, ends(Wrote::Failed, None));
        assert!((full / 2..=full).contains(&found), "{found:?} of {full:?}");
    }
    assert_eq!(pause(&mut store, ends(Wrote::Conflict, None)), PACE);
    let kept = object("1", None);
    assert_eq!(pause(&mut store, ends(Wrote::Ok, Some(kept))), PACE);
    let retry = pause(&mut store, ends(Wrote::Failed, None));
    assert!(retry <= Duration::from_secs(1), "{retry:?}");
}

#[test]
fn late_write_response_does_not_undo_watch_updates() {
    let (mut store, reports) = (TenantStore::default(), Reports::default());
    store.put(key(), object("1", None), &reports);
    says(&reports, reason::INSTALLED);
    let status = next(&mut store, &reports, 0).unwrap();
    // The hub's own write, then another client's, and only then the response.
    store.put(key(), object("2", Some(status.clone())), &reports);
    store.put(key(), object("3", Some(status.clone())), &reports);
    store.take_written(
        key(),
        written("1", Some(object("2", Some(status)))),
        &reports,
        BootTime::default(),
    );
    assert_eq!(store.slots[&key()].version().unwrap(), "3");
    // Neither does the response restore a deleted Tenant.
    store.drop_slot(&key());
    store.take_written(
        key(),
        written("3", Some(object("4", None))),
        &reports,
        BootTime::default(),
    );
    assert!(store.slots.is_empty());
}

#[test]
fn placement_record_precedes_finalizer_where_crd_keeps_it() {
    let reports = Reports::default();
    let target = Target {
        cluster_uid: Some("cluster-1".to_owned()),
        ..Target::default()
    };
    reports.set_targets([(MEMBER.to_owned(), target)].into());
    let named = |version: &str, status: Option<TenantStatus>| {
        let spec = json!({ "clusterRef": { "secretName": MEMBER } });
        let mut tenant = object(version, status);
        tenant.spec = serde_json::from_value(spec).unwrap();
        tenant
    };
    for keeps in [true, false] {
        let mut store = TenantStore {
            placing: Some(Placing::new(Arc::default())),
            ..TenantStore::default()
        };
        store.put(key(), named("1", None), &reports);
        let Turn::Write(_, _, Change::Status(mut status)) =
            store.next(&reports, &rules(), &Leader::alone(), at(0))
        else {
            panic!("it is not put on record");
        };
        assert_eq!(status.placement.as_ref().unwrap().cluster_uid, "cluster-1");
        if !keeps {
            status.placement = None;
        }
        let answer = Written {
            recording: true,
            ..written("1", Some(named("2", Some(*status))))
        };
        store.take_written(key(), answer, &reports, BootTime::default());
        assert_eq!(store.no_records.is_some(), !keeps);
        let due = if keeps { 1 } else { 1000 };
        assert!(
            keeps
                || matches!(
                    store.next(&reports, &rules(), &Leader::alone(), at(1)),
                    Turn::Rest
                )
        );
        let change = store.next(&reports, &rules(), &Leader::alone(), at(due));
        assert!(
            matches!(&change, Turn::Write(_, _, Change::Begin(on)) if on == MEMBER),
            "{change:?}"
        );
    }
}

#[test]
fn field_unknown_to_old_crd_is_written_once() {
    let (mut store, reports) = (TenantStore::default(), Reports::default());
    store.put(key(), object("0", None), &reports);
    let failing = |second| {
        let next = Next::at_second(Step::Retry, Some(second), 1);
        let report = TenantReport {
            observed_generation: 1,
            applied_chart: String::new(),
            next,
            state: ClusterState::from(State::new(Truth::False, reason::INSTALL_FAILED, "")),
        };
        reports.report(MEMBER, Changed::new([(key(), Some(report))].into()));
        reports.hearing(MEMBER, Hearing::Full);
    };
    failing(100);
    let mut status = next(&mut store, &reports, 0).unwrap();
    assert_eq!(status.next_steps.len(), 1);
    // The CRD dropped the field from the write.
    status.next_steps.clear();
    let kept = object("1", Some(status.clone()));
    store.take_written(
        key(),
        written("0", Some(kept)),
        &reports,
        BootTime::default(),
    );
    assert_eq!(next(&mut store, &reports, 2_000), None);
    failing(200);
    assert!(next(&mut store, &reports, 4_000).is_some(), "it is another");
    store.take_written(key(), written("1", None), &reports, BootTime::default());
    assert!(
        next(&mut store, &reports, 6_000).is_some(),
        "it was refused"
    );
}

#[test]
fn member_change_reevaluates_only_its_own_tenants() {
    let mut fleet = Rehearsal::new(20, 5);
    assert_eq!(fleet.decides(), 0);
    let name = member(7);
    fleet.is_heard(7, false);
    assert_eq!(fleet.decides(), 5, "it falls silent");
    fleet.reports.hearing(&name, Hearing::Full);
    assert_eq!(fleet.decides(), 5, "it is heard again");
    fleet.reports.begin(&name, fleet.now);
    assert_eq!(fleet.decides(), 5, "it begins again");
    fleet.reports.hearing(&name, Hearing::Full);
    assert_eq!(fleet.decides(), 5, "it has said nothing since");
    let said = [(tenant_of(7, 3), Some(report(true)))];
    fleet.reports.report(&name, Changed::new(said.into()));
    assert_eq!(fleet.decides(), 1, "it says something of one");
    let mut others = targets(20);
    others.get_mut(&name).unwrap().resolved = Some(State::new(Truth::False, "Any", ""));
    fleet.reports.set_targets(others);
    assert_eq!(fleet.decides(), 5, "its EdgeCluster says something else");
    fleet.reports.set_targets(targets(19));
    assert_eq!(
        fleet.decides(),
        10,
        "another leaves, and this one is as before"
    );
    fleet.reports.forget_said(&name, fleet.now);
    assert_eq!(fleet.decides(), 5, "what it has said counts no more");
}

#[test]
fn expired_grace_affects_only_that_members_tenants() {
    let mut fleet = Rehearsal::new(3, 2);
    let begun = fleet.now;
    fleet.reports.begin(&member(1), begun);
    assert_eq!(
        fleet.reports.patience_ends(),
        Some(BootTime(begun.0 + START_GRACE))
    );
    assert_eq!(fleet.decides(), 2);
    fleet.now = BootTime(fleet.now.0 + START_GRACE);
    assert_eq!(fleet.decides(), 2);
    assert_eq!(fleet.reports.patience_ends(), None);
    let slot = &fleet.store.slots[&tenant_of(1, 0)];
    let status = slot.tenant.status.as_ref().unwrap();
    let states = krypton_types::conditions::clusters(&status.conditions);
    assert_eq!(states[&member(1)].ready.reason, reason::CLUSTER_UNREACHABLE);
}

#[test]
fn looking_at_many_tenants_yields_to_others() {
    let mut fleet = Rehearsal::new(STEPS / 100 + 2, 100);
    fleet.store.touch_all();
    let mut turns = 0;
    let now = now(BootTime(fleet.now.0 + PACE));
    loop {
        let before = fleet.store.decided;
        let turn = fleet
            .store
            .next(&fleet.reports, &rules(), &Leader::alone(), now);
        assert!(fleet.store.decided - before <= STEPS as u64);
        turns += 1;
        match turn {
            Turn::Yield => {}
            Turn::Rest => break,
            Turn::Write(..) => panic!("nothing is to be written"),
        }
    }
    assert!(turns >= 3, "{turns}");
}

#[test]
fn orders_are_published_while_home_lacks_crd() {
    let (placements, reports) = (Arc::new(Placements::default()), Reports::default());
    reports.set_targets([(MEMBER.to_owned(), Target::default())].into());
    let mut placed = object("1", None);
    placed.spec =
        serde_json::from_value(json!({ "clusterRef": { "secretName": MEMBER } })).unwrap();
    placed.metadata.finalizers = Some(vec![names::PLACED_FINALIZER.to_owned()]);
    let on = (names::PLACED_ON_ANNOTATION.to_owned(), MEMBER.to_owned());
    placed.metadata.annotations = Some([on].into());
    let mut store = TenantStore {
        placing: Some(Placing::new(Arc::clone(&placements))),
        ..TenantStore::default()
    };
    // A standby saw this Tenant before the CRD was deleted.
    store.put(key(), placed.clone(), &reports);
    store.unlist();
    for (absent, published) in [(false, None), (true, Some(0))] {
        store.absent = absent;
        store.give_orders(&reports, None);
        let orders = placements.orders().get();
        let orders = orders.map(|orders| orders.values().map(|orders| orders.len()).sum());
        assert_eq!(orders, published, "{absent}");
    }
    store.put(key(), placed, &reports);
    store.synced = true;
    store.give_orders(&reports, None);
    let orders = placements.orders().get().unwrap();
    assert!(
        orders.values().any(|orders| orders.len() == 1),
        "{orders:?}"
    );
}

/// Returns a store with Tenants whose members are known only as a count, before they are late.
pub(crate) fn summarised(members: usize, tenants: usize) -> (TenantStore, Reports) {
    let (mut store, reports) = (TenantStore::default(), Reports::default());
    reports.set_targets(targets(members));
    for number in 0..tenants {
        let summary = krypton_crds::tenant::ClusterSummary {
            clusters: u32::try_from(members).unwrap(),
            ..Default::default()
        };
        let status = TenantStatus {
            summary: Some(summary),
            ..TenantStatus::default()
        };
        store.put(tenant_of(0, number), object("1", Some(status)), &reports);
    }
    store.synced = true;
    (store, reports)
}

fn rests(store: &mut TenantStore, reports: &Reports, millis: u64) -> (u64, bool) {
    let before = store.decided;
    let now = Now {
        patient: true,
        ..at(millis)
    };
    let turn = store.next(reports, &rules(), &Leader::alone(), now);
    assert!(!matches!(turn, Turn::Write(..)), "{turn:?}");
    (store.decided - before, matches!(turn, Turn::Rest))
}

#[test]
fn scan_of_many_members_yields_to_others() {
    let (mut store, reports) = summarised(STEPS, 5);
    for _ in 0..5 {
        assert_eq!(rests(&mut store, &reports, 0).0, 1);
    }
}

#[test]
fn scan_of_many_members_is_paced() {
    let (mut store, reports) = summarised(1_000, 3);
    while !rests(&mut store, &reports, 0).1 {}
    for (millis, decided) in [(300, 0), (999, 0), (1_000, 3)] {
        store.touch_all();
        assert_eq!(rests(&mut store, &reports, millis).0, decided, "{millis}");
    }
}

#[test]
fn members_known_by_number_only_are_found_again() {
    let (mut store, reports) = (TenantStore::default(), Reports::default());
    let count = 60;
    reports.set_targets(targets(count));
    let summary = krypton_crds::tenant::ClusterSummary {
        clusters: 60,
        ready: 60,
        ..Default::default()
    };
    let status = TenantStatus {
        summary: Some(summary),
        ..TenantStatus::default()
    };
    store.put(key(), object("1", Some(status)), &reports);
    store.synced = true;
    let mut status = next(&mut store, &reports, 100_000).unwrap();
    assert_eq!(status.summary.unwrap().unknown, 60);
    for number in 0..count {
        let name = member(number);
        let said = [(key(), Some(report(true)))];
        let said = if number < 55 { said.into() } else { [].into() };
        reports.report(&name, Changed::new(said));
        reports.hearing(&name, Hearing::Full);
        let millis = 102_000 + 2_000 * number as u64;
        let object = object(&format!("{}", number + 2), Some(status.clone()));
        store.put(key(), object, &reports);
        let queue = &mut store.queue;
        queue.done(&key(), Outcome::Done, BootTime::default(), 0.0);
        if let Some(next) = next(&mut store, &reports, millis) {
            status = next;
        }
        let summary = status.summary.unwrap();
        let heard = u32::try_from(number + 1).unwrap().min(55);
        assert_eq!(summary.ready, heard);
    }
    let summary = status.summary.unwrap();
    assert_eq!((summary.clusters, summary.unknown), (55, 0));
    assert!(store.missing.is_empty());
}

#[test]
fn phase_event_on_home_reports_all_members() {
    let with = |phase: Option<&str>| TenantStatus {
        phase: phase.map(str::to_owned),
        ..TenantStatus::default()
    };
    for (before, after, told) in [
        (None, Some("Pending"), None),
        (None, Some("Ready"), Some("Ready")),
        (Some(with(None)), Some("Error"), Some("Error")),
        (Some(with(Some("Ready"))), Some("Ready"), None),
        (Some(with(Some("Ready"))), Some("Error"), Some("Error")),
        (Some(with(Some("Ready"))), Some("Pending"), Some("Pending")),
    ] {
        let news = new_phase(before.as_ref(), &with(after));
        assert_eq!(news.as_deref(), told, "{before:?} {after:?}");
    }
}

/// Prints the cost of one change, for `--ignored --nocapture`. Asserts nothing.
#[test]
#[ignore = "a measurement: 500,000 Tenants take a gigabyte"]
fn cost_of_a_change_among_five_thousand_members() {
    let cpu = || -> Duration {
        let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        let nanos = stat.split_whitespace().next().unwrap().parse().unwrap();
        Duration::from_nanos(nanos)
    };
    let begun = std::time::Instant::now();
    let mut fleet = Rehearsal::new(5_000, 100);
    println!(
        "5,000 members x 100 Tenants decided and written: {:?}",
        begun.elapsed()
    );
    for (what, heard) in [("silent", false), ("heard", true)] {
        let before = cpu();
        for number in 0..20 {
            fleet.is_heard(number * 200, heard);
            assert_eq!(fleet.decides(), 100);
        }
        println!("{what}: {:?} of CPU for a member", (cpu() - before) / 20);
    }
    let before = cpu();
    for number in 0..20 {
        fleet.says(number * 200, false);
        assert_eq!(fleet.decides(), 100);
    }
    println!("reports: {:?} of CPU for a member", (cpu() - before) / 20);
}
