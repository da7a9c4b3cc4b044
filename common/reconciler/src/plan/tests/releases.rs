//! Tests of the action for each state of a release.

use krypton_crds::tenant::TenantStatus;
use krypton_types::desired::handling::WaitPolicy;

use super::*;

#[test]
fn new_tenant_gets_finalizer_workspace_then_release() {
    let mut w = world();
    w.tenant.metadata.finalizers = None;
    w.workspace = None;
    assert_eq!(w.action(), Action::AddFinalizer);
    w.tenant.metadata.finalizers = Some(vec![names::TENANT_FINALIZER.to_owned()]);
    assert_eq!(w.action(), Action::CreateWorkspace);
    w.workspace = Some(workspace(None, "n"));
    assert_eq!(w.action(), Action::Helm(Run::Install));
}

#[test]
fn release_as_desired_is_left_unchanged() {
    let plan = world().deployed().plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::True, reason::NO_CHANGE));
    assert_eq!(plan.wake, None);
    let chart = "https://charts.jetstack.io/cert-manager:1.19.1";
    assert_eq!(plan.applied_chart.as_deref(), Some(chart));
}

#[test]
fn history_precedes_run_and_omits_other_owner() {
    let mut w = world().deployed();
    let history = w.plan().history;
    assert_eq!(history[0].chart.as_deref(), Some("cert-manager"));
    w.desired.chart.version = "1.20.0".to_owned();
    assert_eq!(w.plan().history, history, "the announcement has it");
    w.tenant.status = Some(TenantStatus {
        history: history.clone(),
        ..TenantStatus::default()
    });
    w.revisions = vec![Revision {
        owner_uid: Some("uid-2".to_owned()),
        owner_namespace: Some("other".to_owned()),
        ..w.own_revision(2, Status::Deployed)
    }];
    assert_eq!(w.plan().history, history, "it is not this Tenant's");
}

#[test]
fn history_names_the_manager_of_the_spec() {
    let mut w = world().deployed();
    let created = Timestamp::from_second(5).unwrap();
    w.revisions[0].run = Some("install-1".to_owned());
    w.revisions[0].created = Some(created);
    assert_eq!(w.plan().history[0].by, None);
    let managed = serde_json::json!([
        { "manager": "flux", "time": created, "fieldsV1": { "f:spec": {} } }
    ]);
    w.tenant.metadata.managed_fields = serde_json::from_value(managed).unwrap();
    assert_eq!(w.plan().history[0].by.as_deref(), Some("flux"));
}

#[test]
fn another_chart_version_or_other_values_upgrade() {
    let mut changed = world().deployed();
    changed.desired.chart.version = "1.20.0".to_owned();
    assert_eq!(changed.action(), Action::Helm(Run::Upgrade));
    let mut changed = world().deployed();
    changed
        .desired
        .chart
        .values
        .insert("a".to_owned(), 1.into());
    assert_eq!(changed.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn every_newest_revision_status_has_its_action() {
    let unlock = |status| {
        let revision = 2;
        (status, Action::Unlock { revision, status })
    };
    let cases = [
        (Status::Deployed, Action::Nothing),
        (Status::Failed, Action::Helm(Run::Upgrade)),
        (Status::Uninstalled, Action::Helm(Run::Upgrade)),
        unlock(Status::Superseded),
        unlock(Status::PendingInstall),
        unlock(Status::PendingUpgrade),
        unlock(Status::PendingRollback),
        (Status::Uninstalling, Action::Nothing),
        (Status::Unknown, Action::Nothing),
    ];
    for (status, action) in cases {
        let mut w = world();
        w.set_revisions(&[Status::Superseded, status]);
        assert_eq!(w.action(), action, "{status:?}");
    }
}

#[test]
fn foreign_lock_is_respected_until_grace_expires() {
    let mut w = world();
    w.set_revisions(&[Status::Deployed, Status::PendingUpgrade]);
    // When a user runs Helm, Helm copies Krypton's labels to the new revision.
    w.revisions[1].run = w.revisions[0].run.clone();
    w.memory.locked = Some((2, w.now));
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert!(!plan.handles_request, "the upgrade is to come");
    assert_eq!(plan.wake, Some(w.after(600)));
    w.now = w.after(600);
    assert!(matches!(w.action(), Action::Unlock { revision: 2, .. }));
}

#[test]
fn own_interrupted_rollback_is_unlocked_without_grace() {
    let mut w = world();
    w.set_revisions(&[Status::Deployed, Status::Failed, Status::PendingRollback]);
    // Helm copied the run label from the revision that it rolls back to.
    w.revisions[2].run = w.revisions[0].run.clone();
    w.memory.locked = Some((3, w.now));
    assert_eq!(w.action(), Action::Nothing);
    w.revisions[1].rolled_back_by = Some(3);
    assert!(matches!(w.action(), Action::Unlock { revision: 3, .. }));
    // A mark that Helm copied, or a mark of a completed rollback, does not count.
    w.revisions[1].rolled_back_by = Some(2);
    w.revisions[2].rolled_back_by = Some(2);
    assert_eq!(w.action(), Action::Nothing);
}

#[test]
fn interrupted_uninstall_is_repaired_for_present_tenant() {
    let mut w = world();
    w.set_revisions(&[Status::Uninstalling]);
    // Another client may run Helm, because an uninstallation leaves no run mark.
    w.memory.locked = Some((1, w.now));
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.progress.unwrap().reason, reason::LOCKED);
    w.now = w.after(600);
    let unlock = Action::Unlock {
        revision: 1,
        status: Status::Uninstalling,
    };
    assert_eq!(w.action(), unlock);
    assert_eq!(w.deleted().action(), Action::Uninstall);
}

#[test]
fn leftovers_are_swept_by_permit_holder_while_ready() {
    let mut w = world();
    w.set_revisions(&[Status::Failed, Status::Deployed]);
    let plan = w.plan();
    assert_eq!(plan.action, Action::Sweep(1));
    assert_eq!(ready(&plan).0, Truth::True);
    w.permit = withheld();
    let observed = w.plan();
    assert_eq!(observed.action, Action::Nothing);
    assert_eq!(observed.state, plan.state);
}

#[test]
fn default_leftovers_are_swept_once_workspace_is_ready() {
    let mut w = world().release_details("cert-manager", "1.19.1");
    w.revisions = vec![foreign_revision(1, Status::Deployed)];
    assert_eq!(w.action(), Action::Nothing, "adopted as it is");

    w.revisions = vec![
        foreign_revision(1, Status::Superseded),
        w.own_revision(2, Status::Deployed),
    ];
    // Without the manifest, the owner of a workload is unknown.
    assert_eq!(w.action(), Action::ReadRelease(2));
    if let Some(release_details) = &mut w.release_details {
        release_details.revision = 2;
    }
    let plan = w.plan();
    assert_eq!(plan.action, Action::SweepDefault(1));
    assert_eq!(ready(&plan).0, Truth::True);

    w.unready = Some("Deployment acme/web: 0 of 1 available".to_owned());
    assert_eq!(w.action(), Action::Nothing, "it may still be serving");
    w.desired.handling.wait = WaitPolicy::None;
    assert_eq!(w.action(), Action::SweepDefault(1));
    w.unready = None;

    w.permit = withheld();
    let observed = w.plan();
    assert_eq!(observed.action, Action::Nothing);
    assert_eq!(ready(&observed).0, Truth::True);
    w.permit = Permit::Granted;
    w.tenant.spec.workspace = Some("default".to_owned());
    assert_eq!(w.action(), Action::Nothing, "that is the workspace");
    w.tenant.spec.workspace = None;

    w.revisions[0].owner_uid = Some("uid-1".to_owned());
    assert_eq!(w.action(), Action::Nothing, "it was seen to");
}

#[test]
fn failed_install_is_reinstalled_and_failed_upgrade_upgraded() {
    let mut w = world();
    w.set_revisions(&[Status::Failed]);
    w.revisions[0].run = Some("install-1".to_owned());
    assert_eq!(w.action(), Action::InstallAgain);
    w.set_revisions(&[Status::Deployed, Status::Failed]);
    w.revisions[1].run = Some("upgrade-2".to_owned());
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn manual_revision_on_own_release_is_corrected() {
    let mut w = world();
    w.set_revisions(&[Status::Superseded, Status::Deployed]);
    w.revisions[1].run = w.revisions[0].run.clone();
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn only_rewritten_deployed_revision_is_read_again() {
    let world = world().deployed();
    let deployed = world.revisions[0].clone();
    let written = Revision {
        resource_version: "2".to_owned(),
        ..deployed.clone()
    };
    let superseded = Revision {
        status: Status::Superseded,
        ..written.clone()
    };
    let next = world.own_revision(2, Status::Deployed);
    for (observed, expected) in [
        (vec![&deployed], None),
        (vec![&deployed, &deployed], None),
        (vec![&superseded, &deployed], None),
        (vec![&deployed, &next], None),
        (vec![&deployed, &written], Some(1)),
        (vec![&deployed, &written, &written], Some(1)),
        (vec![&deployed, &written, &next], None),
    ] {
        let mut memory = Memory::default();
        for newest in &observed {
            memory.observe_newest(Some(newest));
        }
        assert_eq!(memory.to_reread, expected, "{observed:?}");
    }
    // A user writes between Krypton's read and the first event of the watch.
    for (shown, expected) in [(&deployed, None), (&written, Some(1)), (&next, None)] {
        let mut memory = Memory::default();
        memory.record_read(&deployed);
        memory.observe_newest(Some(shown));
        assert_eq!(memory.to_reread, expected, "{shown:?}");
        // The same version is read a second time, but not endlessly.
        (memory.to_reread, memory.deployed) = (None, None);
        memory.record_read(&deployed);
        memory.observe_newest(Some(shown));
        assert_eq!(memory.to_reread, None, "{shown:?}");
    }
    let mut w = world;
    assert_eq!(w.action(), Action::Nothing);
    w.memory.to_reread = Some(1);
    assert_eq!(w.action(), Action::ReadRelease(1));
    w.memory.to_reread = Some(2);
    assert_eq!(w.action(), Action::Nothing);
}
