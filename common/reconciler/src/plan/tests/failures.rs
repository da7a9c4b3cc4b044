//! Tests of failed attempts: back-off, giving up and rollback.

use krypton_types::desired::crd_policy::CrdPolicy;
use krypton_types::desired::handling::Remediation;

use super::*;

#[test]
fn failed_upgrade_backs_off_and_reports_running_revision() {
    let w = world_deployed_then_upgrading_fails();
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.wake, Some(w.after(60)));
    assert_eq!(ready(&plan), (Truth::False, reason::UPGRADE_FAILED));
    let error = plan.state.error.unwrap();
    assert_eq!(error.truth, Truth::True);
    assert!(
        error.message.contains("revision 1 keeps running"),
        "{error:?}"
    );
}

#[test]
fn changed_spec_or_chart_skips_back_off() {
    let mut w = world_deployed_then_upgrading_fails();
    w.tenant.metadata.generation = Some(2);
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    let mut w = world_deployed_then_upgrading_fails();
    w.desired.chart.version = "1.19.2".to_owned();
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn crd_policy_or_cluster_change_skips_back_off() {
    let mut w = world_deployed_then_upgrading_fails();
    assert_eq!(w.action(), Action::Nothing);
    w.desired.chart_crds = CrdPolicy::CreateReplace;
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    w.desired.chart_crds = CrdPolicy::default();
    assert_eq!(w.action(), Action::Nothing);
    w.memory.cluster_changed();
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    // A given-up release starts again, too.
    let mut w = world_deployed_then_upgrading_fails();
    w.desired.handling.retries = Some(0);
    w.now = w.after(100_000);
    assert_eq!(w.action(), Action::Nothing);
    w.memory.cluster_changed();
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn requested_retry_skips_back_off_once() {
    let mut w = world_deployed_then_upgrading_fails();
    assert_eq!(w.action(), Action::Nothing);
    w.annotate(names::RECONCILE_REQUESTED_ANNOTATION, "today");
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    assert!(!w.plan().handles_request, "the retry is to come");
    w.memory.failure.as_mut().unwrap().attempt.requested = Some("today".to_owned());
    assert_eq!(w.action(), Action::Nothing);
    assert!(w.plan().handles_request);
}

#[test]
fn request_is_handled_unless_release_is_held() {
    let mut w = world().deployed();
    assert!(w.plan().handles_request);
    w.annotate(names::PAUSED_ANNOTATION, "true");
    assert!(!w.plan().handles_request);
    let mut w = world().deployed();
    w.permit = Permit::Withheld("another holds the Lease".to_owned());
    assert!(!w.plan().handles_request);
}

#[test]
fn upgrade_out_of_retries_waits_for_change() {
    let mut w = world_deployed_then_upgrading_fails();
    w.now = w.after(10_000);
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    w.desired.handling.retries = Some(1);
    assert_eq!(w.action(), Action::Helm(Run::Upgrade), "one retry is left");
    w.memory.failure.as_mut().unwrap().attempts = 2;
    let plan = w.plan();
    assert_eq!((plan.action, plan.wake), (Action::Nothing, None));
    let message = &plan.state.ready.message;
    assert!(message.contains("no more retries after 2 attempts"));
    w.desired.chart.version = "1.21.0".to_owned();
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn abandoned_upgrade_rolls_back_once_to_deployed_revision() {
    let mut w = world_deployed_then_upgrading_fails();
    w.desired.handling.remediation = Remediation::Rollback;
    assert_eq!(w.action(), Action::Nothing, "it may yet succeed");
    w.memory.failure.as_mut().unwrap().permanent = true;
    assert_eq!(w.action(), Action::Rollback(1));
    // A killed Helm process leaves a lock first.
    w.revisions[1].status = Status::PendingUpgrade;
    w.now = w.after(10_000);
    assert!(matches!(w.action(), Action::Unlock { revision: 2, .. }));
    w.revisions[1].status = Status::Failed;
    let mut rollback_failure = w.memory.failure.clone().unwrap();
    rollback_failure.reason = reason::ROLLBACK_FAILED;
    rollback_failure.retry_at = w.after(5);
    w.memory.failure = Some(rollback_failure);
    assert_eq!(w.action(), Action::Nothing);
    assert_eq!(w.plan().wake, Some(w.after(5)));
    w.now = w.after(5);
    assert_eq!(w.action(), Action::Rollback(1));
    // Helm died in the rollback after it had marked the good revision as superseded. Another upgrade has failed
    // since.
    let revisions = w.revisions.clone();
    w.revisions[0].status = Status::Superseded;
    w.revisions[1].rolled_back_by = Some(3);
    for number in [3, 4] {
        w.revisions.push(w.own_revision(number, Status::Failed));
    }
    assert_eq!(w.action(), Action::Rollback(1));
    w.revisions = revisions;
    // The rollback is complete. Helm copied the labels of the revision that it rolled back to.
    let mut restored = w.revisions[0].clone();
    (restored.revision, restored.status) = (3, Status::Deployed);
    w.revisions[0].status = Status::Superseded;
    w.revisions.push(restored);
    w.memory.failure.as_mut().unwrap().reason = reason::UPGRADE_FAILED;
    assert_eq!(w.action(), Action::Nothing);
    w.revisions.remove(0);
    w.revisions.remove(1);
    assert_eq!(w.action(), Action::Nothing, "nothing to go back to");
}

#[test]
fn deleted_release_is_installed_despite_failed_upgrade() {
    for (failed, is_over) in [
        (reason::UPGRADE_FAILED, true),
        (reason::ROLLBACK_FAILED, true),
        (reason::INSTALL_FAILED, false),
        (reason::RELEASE_TAMPERED, false),
    ] {
        let mut w = world().deployed().failed(failed, 900);
        w.desired.handling.retries = Some(0);
        w.observe();
        w.revisions.clear();
        assert_eq!(w.action(), Action::Nothing, "{failed}");
        w.observe();
        let expected = match is_over {
            true => Action::Helm(Run::Install),
            false => Action::Nothing,
        };
        assert_eq!(w.action(), expected, "{failed}");
        // The watch has not shown the revisions yet.
        let mut w = world().failed(failed, 900);
        w.observe();
        w.observe();
        assert_eq!(w.action(), Action::Nothing, "{failed}");
    }
}

#[test]
fn deletion_of_unreadable_revision_ends_its_failure() {
    let mut w = world();
    w.set_revisions(&[Status::Superseded, Status::Deployed]);
    let mut w = w.failed(reason::UPGRADE_FAILED, 900);
    w.is_read = false;
    w.memory.failure.as_mut().unwrap().revision = Some(2);
    // The watch has not shown the revision yet.
    let unreadable = w.revisions.pop().unwrap();
    w.observe();
    w.observe();
    assert_eq!(w.action(), Action::Nothing);
    w.revisions.push(unreadable);
    w.observe();
    assert_eq!(w.action(), Action::Nothing);
    // A user has deleted it.
    w.revisions.pop();
    w.observe();
    assert!(matches!(w.action(), Action::Unlock { revision: 1, .. }));
}

#[test]
fn deletion_of_older_revision_keeps_failure() {
    let mut w = world();
    w.set_revisions(&[Status::Superseded, Status::Failed]);
    let mut w = w.failed(reason::UPGRADE_FAILED, 900);
    w.observe();
    w.revisions.remove(0);
    w.observe();
    assert_eq!(w.action(), Action::Nothing);
    assert!(w.memory.failure.is_some());
}

#[test]
fn pinned_chart_or_account_change_ends_back_off() {
    let mut w = world().failed(reason::CHART_NOT_LOADED, 60);
    assert_eq!(w.action(), Action::Nothing);
    w.desired.chart.pinned = Some("1.19.1@sha256:ab".to_owned());
    assert_eq!(w.action(), Action::Helm(Run::Install));
    let mut w = world().failed(reason::INSTALL_FAILED, 60);
    w.desired.lockdown.default_service_account = "installer".to_owned();
    assert_eq!(w.action(), Action::Helm(Run::Install));
}

#[test]
fn a_cluster_that_is_suspended_has_not_failed() {
    let mut w = world().deployed().failed(reason::SUSPENDED, 60);
    w.revisions[0].fingerprint = Some("older".to_owned());
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.wake, Some(w.after(60)));
    assert_eq!(ready(&plan), (Truth::Unknown, reason::SUSPENDED));
    assert_eq!(error(&plan), (Truth::False, reason::NO_ERROR));
    // The removal is another attempt, but fails for the same reason.
    let deleted = w.deleted();
    assert_eq!(deleted.action(), Action::Uninstall);
    let plan = deleted.failed(reason::SUSPENDED, 60).plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.error.unwrap().truth, Truth::False);
}
