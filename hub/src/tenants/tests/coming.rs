//! The members' next steps in the Tenant's status, and what they mean for the whole Tenant.

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

fn given_up() -> TenantReport {
    TenantReport {
        next: UpcomingStep::at_second(UpcomingStepKind::GivenUp, None, 3),
        ..report(Truth::False, reason::INSTALL_FAILED)
    }
}

#[test]
fn next_step_is_listed_until_cause_ends() {
    let mut acme = tenant();
    let members = complete_views(&[
        (names::SELF_CLUSTER, installed()),
        ("edge-1", Some(failing(100))),
    ]);
    acme.status = Some(status_from(&acme, &members));
    let status = acme.status.clone().unwrap();
    assert_eq!(status.next_steps.len(), 1);
    assert_eq!(UpcomingStep::from_status(&status, "edge-1"), retry(100));
    // After a start, it stays until the first report, as the rest of the status does.
    assert_eq!(status_after_restart(&acme), status);
    let status = status_from(&acme, &both_installed());
    assert!(status.next_steps.is_empty());
}

#[test]
fn listed_members_show_next_step_with_summary() {
    let members: BTreeMap<Arc<str>, MemberView> = (0..60)
        .map(|number| {
            let report = match number {
                59 => given_up(),
                _ => failing(number),
            };
            let view = member_view(ReportState::Complete, Some(report));
            (format!("edge-{number:02}").into(), view)
        })
        .collect();
    let status = status_from(&tenant(), &members);
    assert_eq!(status.summary.unwrap().not_ready, 60);
    assert_eq!(status.next_steps.len(), 20);
    assert_eq!(UpcomingStep::from_status(&status, "edge-07"), retry(7));
    // The member that gave up is not among the listed ones.
    assert!(condition(&status, conditions::STALLED).is_some());
}

#[test]
fn unready_tenant_is_reconciling_stalled_or_paused() {
    let installed = report(Truth::True, reason::INSTALLED);
    let (retrying, given_up) = (failing(100), given_up());
    let in_use = report(Truth::False, reason::RELEASE_IN_USE);
    let mut paused = failing(100);
    paused.state.progress = Some(State::new(Truth::False, reason::PAUSED, ""));
    for (on_home, on_edge, expected) in [
        (&installed, &installed, None),
        (&installed, &retrying, Some(conditions::RECONCILING)),
        (&installed, &paused, None),
        (&paused, &retrying, Some(conditions::RECONCILING)),
        (&retrying, &given_up, Some(conditions::STALLED)),
        (&paused, &given_up, Some(conditions::STALLED)),
        (&in_use, &installed, Some(conditions::STALLED)),
    ] {
        let mut acme = tenant();
        let members = complete_views(&[
            (names::SELF_CLUSTER, Some(on_home.clone())),
            ("edge-1", Some(on_edge.clone())),
        ]);
        let status = status_from(&acme, &members);
        let shown: Vec<&str> = [conditions::RECONCILING, conditions::STALLED]
            .into_iter()
            .filter(|type_| {
                let found = conditions::find(&status.conditions, type_);
                let message = found.map(|found| found.message);
                message.is_some_and(|message| status.last_message == Some(message))
            })
            .collect();
        assert_eq!(shown, Vec::from_iter(expected), "{on_home:?} {on_edge:?}");
        acme.status = Some(status.clone());
        assert_eq!(status_from(&acme, &members), status);
    }
}

#[test]
fn unreported_tenant_keeps_conditions_of_its_placement() {
    let mut acme = naming("team-a", Some("edge-1"));
    let placed = State::new(Truth::False, reason::TOO_MANY, "the member is full");
    let view = ReportedView {
        members: complete_views(&[(names::SELF_CLUSTER, None), ("edge-1", None)]),
        ..ReportedView::default()
    };
    let decide = |acme: &Tenant, second| {
        let now = DecisionTime {
            wall: Timestamp::from_second(second).unwrap(),
            ..now(BootTime::default())
        };
        let mut memory = DecisionMemory::default();
        decided(acme, &view, &settings(), &mut memory, Some(&placed), now)
    };
    let status = decide(&acme, 1);
    let stalled = conditions::find(&status.conditions, conditions::STALLED);
    assert!(stalled.is_some(), "{status:?}");
    assert!(conditions::find(&status.conditions, conditions::RECONCILING).is_none());
    acme.status = Some(status.clone());
    assert_eq!(decide(&acme, 2), status);
}
