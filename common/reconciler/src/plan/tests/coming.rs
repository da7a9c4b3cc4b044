//! Tests of the next step in a report.

use krypton_types::tenant::UpcomingStep;
use krypton_types::tenant::UpcomingStepKind::{self, GivenUp, Retry, Unlock, Wait};

use super::*;

fn step_after(
    step: UpcomingStepKind,
    after: Option<u64>,
    now: BootTime,
    attempts: u32,
) -> Option<PlannedStep> {
    let at = after.map(|after| now + Duration::from_secs(after));
    Some(PlannedStep { step, at, attempts })
}

#[test]
fn failed_run_announces_retry_or_giving_up() {
    let mut w = world_deployed_then_upgrading_fails();
    let retry = w.memory.failure.clone().unwrap();
    let plan = w.plan();
    let next = plan.next.unwrap();
    assert_eq!((next.step, next.at), (Retry, Some(retry.retry_at)));
    assert_eq!(plan.wake, next.at);
    w.now = retry.retry_at;
    let plan = w.plan();
    assert_eq!(plan.action, Action::Helm(Run::Upgrade));
    assert_eq!(plan.next, None);

    w.desired.handling.retries = Some(1);
    w.memory.failure.as_mut().unwrap().attempts = 2;
    assert_eq!(w.plan().next, step_after(GivenUp, None, w.now, 2));
}

#[test]
fn paused_or_withheld_tenant_announces_no_attempt() {
    let mut paused = world_deployed_then_upgrading_fails();
    paused.desired.paused = true;
    assert_eq!(paused.plan().next, None);
    let mut withheld = world_deployed_then_upgrading_fails();
    withheld.permit = Permit::Withheld("somebody else".to_owned());
    assert_eq!(withheld.plan().next, None);
    let unread = World {
        is_read: false,
        ..world().deployed()
    };
    let mut unread = refused_by_api_server(unread);
    unread.memory.refusal.as_mut().unwrap().is_read = true;
    assert!(unread.plan().next.is_some());
    unread.desired.paused = true;
    assert_eq!(unread.plan().next, None);
    for failure_reason in [reason::HELM_UNAVAILABLE, reason::SUSPENDED] {
        let mut w = world().deployed().failed(failure_reason, 30);
        w.desired.chart.version = "1.21.0".to_owned();
        w.memory.failure.as_mut().unwrap().attempt.fingerprint = w.desired.chart.fingerprint();
        let plan = w.plan();
        assert_eq!(plan.action, Action::Nothing, "{failure_reason}");
        assert_eq!(plan.next, None, "{failure_reason}");
    }
    assert_eq!(world().deployed().plan().next, None, "it is well");
}

#[test]
fn stale_lock_and_failed_uninstall_announce_next_attempt() {
    let mut w = world();
    w.set_revisions(&[Status::Deployed, Status::PendingUpgrade]);
    w.revisions[1].run = w.revisions[0].run.clone();
    w.memory.locked = Some((2, w.now));
    assert_eq!(w.plan().next, step_after(Unlock, Some(600), w.now, 0));

    let deleted = world()
        .deployed()
        .deleted()
        .failed(reason::UNINSTALL_FAILED, 40);
    assert_eq!(
        deleted.plan().next,
        step_after(Retry, Some(40), deleted.now, 1)
    );
}

#[test]
fn unready_workloads_announce_wait_deadline_after_quiet_period() {
    let mut w = world_just_installed();
    // A report of the next step or of a handled request would cause a separate write.
    assert_eq!((w.plan().next, w.plan().handles_request), (None, false));
    let ended = w.now;
    w.now += crate::status::throttle::QUIET;
    assert!(w.plan().handles_request);
    let until = w.policy.helm_timeout.as_secs();
    assert_eq!(w.plan().next, step_after(Wait, Some(until), ended, 0));
    w.now = ended + w.policy.helm_timeout;
    assert_eq!(w.plan().next, None);
}

#[test]
fn boot_clock_deadlines_convert_to_wall_time() {
    let now = BootTime(Duration::from_secs(1_000));
    let wall = Timestamp::from_second(50_000).unwrap();
    let next = step_after(Retry, Some(40), now, 2)
        .unwrap()
        .to_wall_clock(now, wall);
    assert_eq!(Some(next), UpcomingStep::at_second(Retry, Some(50_040), 2));
    let given_up = step_after(GivenUp, None, now, 2).unwrap();
    assert_eq!(given_up.to_wall_clock(now, wall).at, None);
}
