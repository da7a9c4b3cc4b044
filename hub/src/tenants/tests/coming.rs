//! The members' next steps in the Tenant's status.

use krypton_types::tenant::{UpcomingStep, UpcomingStepKind};

use super::*;

fn retry(second: i64) -> Option<UpcomingStep> {
    UpcomingStep::at_second(UpcomingStepKind::Retry, Some(second), 3)
}

fn failing(second: i64) -> TenantReport {
    TenantReport {
        next: retry(second),
        ..report(Truth::False, reason::INSTALL_FAILED)
    }
}

fn decide_once(
    acme: &Tenant,
    members: &BTreeMap<Arc<str>, MemberView>,
    in_startup_grace: bool,
) -> TenantStatus {
    aggregated(
        acme,
        members,
        None,
        &settings(),
        in_startup_grace,
        Timestamp::UNIX_EPOCH,
    )
}

#[test]
fn next_step_is_listed_until_cause_ends() {
    let mut acme = tenant();
    let installed = Some(report(Truth::True, reason::INSTALLED));
    let members = complete_views(&[
        (names::SELF_CLUSTER, installed.clone()),
        ("edge-1", Some(failing(100))),
    ]);
    acme.status = Some(decide_once(&acme, &members, false));
    let status = acme.status.clone().unwrap();
    assert_eq!(status.next_steps.len(), 1);
    assert_eq!(UpcomingStep::from_status(&status, "edge-1"), retry(100));
    // After a start, it stays until the first report, as the rest of the status does.
    assert_eq!(decide_once(&acme, &BTreeMap::new(), true), status);
    let members = complete_views(&[
        (names::SELF_CLUSTER, installed.clone()),
        ("edge-1", installed),
    ]);
    assert!(decide_once(&acme, &members, false).next_steps.is_empty());
}

#[test]
fn listed_members_show_next_step_with_summary() {
    let members: BTreeMap<Arc<str>, MemberView> = (0..60)
        .map(|number| {
            let view = member_view(ReportState::Complete, Some(failing(number)));
            (format!("edge-{number:02}").into(), view)
        })
        .collect();
    let status = decide_once(&tenant(), &members, false);
    assert_eq!(status.summary.unwrap().not_ready, 60);
    assert_eq!(status.next_steps.len(), 20);
    assert_eq!(UpcomingStep::from_status(&status, "edge-07"), retry(7));
}
