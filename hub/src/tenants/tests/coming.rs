//! The members' next steps in the Tenant's status.

use krypton_types::tenant::{Next, Step};

use super::*;

fn retry(second: i64) -> Option<Next> {
    Next::at_second(Step::Retry, Some(second), 3)
}

fn failing(second: i64) -> TenantReport {
    TenantReport {
        next: retry(second),
        ..report(Truth::False, reason::INSTALL_FAILED)
    }
}

fn once(acme: &Tenant, said: &BTreeMap<Arc<str>, Saying>, patient: bool) -> TenantStatus {
    aggregated(acme, said, None, &rules(), patient, Timestamp::UNIX_EPOCH)
}

#[test]
fn next_step_is_listed_until_cause_ends() {
    let mut acme = tenant();
    let well = Some(report(Truth::True, reason::INSTALLED));
    let said = full(&[
        (names::SELF_CLUSTER, well.clone()),
        ("edge-1", Some(failing(100))),
    ]);
    acme.status = Some(once(&acme, &said, false));
    let status = acme.status.clone().unwrap();
    assert_eq!(status.next_steps.len(), 1);
    assert_eq!(Next::from_status(&status, "edge-1"), retry(100));
    // After a start, it stays until the first report, as the rest of the status does.
    assert_eq!(once(&acme, &BTreeMap::new(), true), status);
    let said = full(&[(names::SELF_CLUSTER, well.clone()), ("edge-1", well)]);
    assert!(once(&acme, &said, false).next_steps.is_empty());
}

#[test]
fn listed_members_show_next_step_with_summary() {
    let members: BTreeMap<Arc<str>, Saying> = (0..60)
        .map(|number| {
            let saying = saying(Hearing::Full, Some(failing(number)));
            (format!("edge-{number:02}").into(), saying)
        })
        .collect();
    let status = once(&tenant(), &members, false);
    assert_eq!(status.summary.unwrap().not_ready, 60);
    assert_eq!(status.next_steps.len(), 20);
    assert_eq!(Next::from_status(&status, "edge-07"), retry(7));
}
