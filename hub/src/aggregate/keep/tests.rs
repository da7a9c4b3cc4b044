use krypton_common::conditions::{ClusterState, State, Truth, reason};
use krypton_common::tenant::{Next, Step, TenantReport};
use krypton_crds::tenant::TenantSpec;

use super::super::reports::{Changed, Hearing, Target};
use super::*;

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

fn rules() -> Rules {
    Rules {
        self_cluster: false,
        allow_chart_skip: false,
        namespaces: None,
    }
}

fn at(millis: u64) -> Now {
    Now {
        boot: Boot(Duration::from_millis(millis)),
        wall: jiff::Timestamp::UNIX_EPOCH,
        patient: false,
    }
}

fn says(reports: &Reports, why: &str) {
    let report = TenantReport {
        observed_generation: 1,
        applied_chart: String::new(),
        next: None,
        state: ClusterState {
            ready: State::new(Truth::True, why, ""),
            progress: None,
            error: None,
        },
    };
    reports.report(MEMBER, Changed::new([(key(), Some(report))].into()));
    reports.hearing(MEMBER, Hearing::Full);
}

/// What is told to the desk as the loop does it.
fn next(desk: &mut Desk, reports: &Reports, millis: u64) -> Option<TenantStatus> {
    desk.touch(reports.take_dirty().keys);
    match desk.next(reports, &rules(), &Lead::alone(), at(millis))? {
        (_, _, Change::Status(status)) => Some(*status),
        other => panic!("{other:?}"),
    }
}

fn written(before: &str, object: Option<Tenant>) -> Written {
    Written {
        key: key(),
        before: Some(before.to_owned()),
        object,
        recording: false,
        orphaned: None,
        came: Wrote::Ok,
    }
}

#[test]
fn a_status_is_written_once_a_second_however_often_its_members_change() {
    let (mut desk, reports) = (Desk::default(), Reports::default());
    desk.put(key(), object("0", None), &reports);
    let mut times = Vec::new();
    let mut version = 0;
    for millis in (0..5000_u64).step_by(50) {
        let why = if millis.is_multiple_of(100) {
            reason::INSTALLED
        } else {
            reason::UPGRADED
        };
        says(&reports, why);
        if let Some(status) = next(&mut desk, &reports, millis) {
            let before = version.to_string();
            version += 1;
            let object = object(&version.to_string(), Some(status));
            desk.take_written(written(&before, Some(object)), &reports);
            times.push(millis);
        }
    }
    assert!(times.len() >= 4, "{times:?}");
    let apart = times.windows(2).map(|pair| pair[1] - pair[0]);
    assert!(apart.clone().all(|apart| apart >= 1000), "{times:?}");
}

#[test]
fn a_write_that_was_refused_is_made_again_and_waits_for_its_turn() {
    let (mut desk, reports) = (Desk::default(), Reports::default());
    desk.put(key(), object("1", None), &reports);
    says(&reports, reason::INSTALLED);
    assert!(next(&mut desk, &reports, 0).is_some());
    says(&reports, reason::UPGRADED);
    assert_eq!(next(&mut desk, &reports, 2000), None, "one is in flight");
    desk.take_written(written("1", None), &reports);
    assert!(next(&mut desk, &reports, 2000).is_some());
    desk.take_written(written("1", None), &reports);
    assert_eq!(next(&mut desk, &reports, 2999), None);
    assert_eq!(desk.wakes(), Some(at(3000).boot));
    assert!(next(&mut desk, &reports, 3000).is_some());
}

#[test]
fn a_late_answer_to_a_write_does_not_undo_what_the_watch_has_brought_since() {
    let (mut desk, reports) = (Desk::default(), Reports::default());
    desk.put(key(), object("1", None), &reports);
    says(&reports, reason::INSTALLED);
    let status = next(&mut desk, &reports, 0).unwrap();
    // Our own write, then another's, and only then the answer.
    desk.put(key(), object("2", Some(status.clone())), &reports);
    desk.put(key(), object("3", Some(status.clone())), &reports);
    desk.take_written(written("1", Some(object("2", Some(status)))), &reports);
    assert_eq!(desk.slots[&key()].version().unwrap(), "3");
    // Nor does it bring back what was deleted.
    desk.slots.clear();
    desk.take_written(written("3", Some(object("4", None))), &reports);
    assert!(desk.slots.is_empty());
}

#[test]
fn a_place_is_put_on_record_then_held_at_once_and_held_alone_where_home_keeps_no_record() {
    let reports = Reports::default();
    let target = Target {
        cluster_uid: Some("cluster-1".to_owned()),
        ..Target::default()
    };
    reports.aim([(MEMBER.to_owned(), target)].into());
    let named = |version: &str, status: Option<TenantStatus>| {
        let spec = json!({ "clusterRef": { "secretName": MEMBER } });
        let mut tenant = object(version, status);
        tenant.spec = serde_json::from_value(spec).unwrap();
        tenant
    };
    for keeps in [true, false] {
        let mut desk = Desk {
            placing: Some(Placing::new(Arc::default())),
            ..Desk::default()
        };
        desk.put(key(), named("1", None), &reports);
        let Some((_, _, Change::Status(mut status))) =
            desk.next(&reports, &rules(), &Lead::alone(), at(0))
        else {
            panic!("it is not put on record");
        };
        assert_eq!(status.place.as_ref().unwrap().cluster_uid, "cluster-1");
        if !keeps {
            status.place = None;
        }
        let answer = Written {
            recording: true,
            ..written("1", Some(named("2", Some(*status))))
        };
        desk.take_written(answer, &reports);
        assert_eq!(desk.no_records.is_some(), !keeps);
        let due = if keeps { 1 } else { 1000 };
        assert!(
            keeps
                || desk
                    .next(&reports, &rules(), &Lead::alone(), at(1))
                    .is_none()
        );
        let change = desk.next(&reports, &rules(), &Lead::alone(), at(due));
        assert!(
            matches!(&change, Some((_, _, Change::Begin(on))) if on == MEMBER),
            "{change:?}"
        );
    }
}

#[test]
fn what_a_crd_of_before_does_not_keep_is_written_once_and_what_was_refused_again() {
    let (mut desk, reports) = (Desk::default(), Reports::default());
    desk.put(key(), object("0", None), &reports);
    let failing = |second| {
        let next = Next::at_second(Step::Retry, Some(second), 1);
        let report = TenantReport {
            observed_generation: 1,
            applied_chart: String::new(),
            next,
            state: ClusterState {
                ready: State::new(Truth::False, reason::INSTALL_FAILED, ""),
                progress: None,
                error: None,
            },
        };
        reports.report(MEMBER, Changed::new([(key(), Some(report))].into()));
        reports.hearing(MEMBER, Hearing::Full);
    };
    failing(100);
    let mut status = next(&mut desk, &reports, 0).unwrap();
    assert_eq!(status.next.len(), 1);
    // The write came back without it.
    status.next.clear();
    let kept = object("1", Some(status.clone()));
    desk.take_written(written("0", Some(kept)), &reports);
    assert_eq!(next(&mut desk, &reports, 2_000), None);
    failing(200);
    assert!(next(&mut desk, &reports, 4_000).is_some(), "it is another");
    desk.take_written(written("1", None), &reports);
    assert!(next(&mut desk, &reports, 6_000).is_some(), "it was refused");
}
