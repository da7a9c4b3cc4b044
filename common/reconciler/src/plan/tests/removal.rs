//! Tests of deletion and of a member that leaves the fleet.

use super::*;

#[test]
fn deleted_tenant_follows_repair_table() {
    for status in Status::ALL {
        let mut w = world().deleted();
        w.set_revisions(&[status]);
        assert_eq!(w.action(), Action::Uninstall, "{status}");
    }
}

#[test]
fn deletion_uninstalls_then_removes_namespace_then_finalizer() {
    let mut w = world().deployed().deleted();
    assert_eq!(w.action(), Action::Uninstall);
    w.revisions.clear();
    assert_eq!(w.action(), Action::DeleteWorkspace);
    w.workspace.as_mut().unwrap().terminating = true;
    assert_eq!(w.action(), Action::Nothing);
    w.workspace = None;
    assert_eq!(w.action(), Action::RemoveFinalizer { orphaned: false });
}

#[test]
fn foreign_or_shared_namespace_outlives_tenant() {
    let keeping: [fn(&mut World); 3] = [
        |unmarked| unmarked.workspace.as_mut().unwrap().creator = None,
        |shared| shared.workspace_shared = true,
        |default| default.tenant.spec.workspace = Some("default".to_owned()),
    ];
    for (number, keep) in keeping.into_iter().enumerate() {
        let mut w = world().deleted();
        keep(&mut w);
        let finish = Action::RemoveFinalizer { orphaned: false };
        assert_eq!(w.action(), finish, "{number}");
    }
}

#[test]
fn orphan_annotation_releases_tenant_and_reports_leftovers() {
    let mut w = world().deployed().deleted();
    w.annotate(names::ORPHAN_ANNOTATION, "true");
    let plan = w.plan();
    assert_eq!(plan.action, Action::RemoveFinalizer { orphaned: true });
    assert!(plan.state.ready.message.contains("tenant-acme-edge-1"));
}

#[test]
fn leaving_member_uninstalls_and_releases_its_tenants() {
    let mut world = world().deployed();
    world.desired.retire = true;
    assert_eq!(world.action(), Action::Uninstall);
    // The failure of an upgrade does not delay the removal.
    let mut failed = world;
    failed = failed.failed(reason::UPGRADE_FAILED, 60);
    failed.memory.failure.as_mut().unwrap().attempt.removal = None;
    assert_eq!(failed.action(), Action::Uninstall);
    // A failure of the removal itself delays it, and is shown.
    for failure_reason in [reason::HELM_UNAVAILABLE, reason::SUSPENDED] {
        failed = failed.failed(failure_reason, 60);
        let plan = failed.plan();
        assert_eq!(plan.action, Action::Nothing, "{failure_reason}");
        assert!(plan.wake.is_some(), "{failure_reason}");
    }
    failed = failed.failed(reason::UNINSTALL_FAILED, 60);
    assert_eq!(failed.action(), Action::Nothing);
    assert_ne!(ready(&failed.plan()).1, reason::UNINSTALLED);
    let mut world = failed;
    world.memory.failure = None;
    world.revisions.clear();
    assert_eq!(world.action(), Action::DeleteWorkspace);
    world.workspace = None;
    let last = world.plan();
    assert_eq!(last.action, Action::RemoveFinalizer { orphaned: false });
    assert_ne!(ready(&last).1, reason::UNINSTALLED, "it has not let go yet");
    world.tenant.metadata.finalizers = None;
    let plan = world.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::False, reason::UNINSTALLED));
    // Krypton does not check a kept workspace again.
    let mut without_finalizer = self::world().deployed();
    without_finalizer.desired.retire = true;
    without_finalizer.revisions.clear();
    without_finalizer.tenant.metadata.finalizers = None;
    assert_eq!(without_finalizer.action(), Action::Nothing);
    // If the cluster returns to the fleet, Krypton manages its Tenants again.
    world.desired.retire = false;
    assert_eq!(world.action(), Action::AddFinalizer);
}

#[test]
fn leaving_member_keeps_foreign_orphaned_or_paused_releases() {
    let leaving = |mut world: World| {
        world.desired.retire = true;
        world.tenant.metadata.finalizers = None;
        world
    };
    let mut foreign = leaving(world());
    foreign.tenant.metadata.annotations = None;
    foreign.revisions = vec![foreign_revision(1, Status::Deployed)];
    let plan = foreign.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::False, reason::UNINSTALLED));
    assert!(plan.state.ready.message.contains("not created by Krypton"));

    let orphan = |mut world: World| {
        world.annotate(names::ORPHAN_ANNOTATION, "true");
        world
    };
    let plan = orphan(leaving(world().deployed())).plan();
    assert_eq!(plan.action, Action::Nothing);
    assert!(plan.state.ready.message.contains("release kept"));

    let mut paused = leaving(world().deployed());
    paused.desired.paused = true;
    let mut without_lease = leaving(world().deployed());
    without_lease.permit = Permit::Withheld("another holds the Lease".to_owned());
    for w in [paused, without_lease] {
        let plan = w.plan();
        assert_eq!(plan.action, Action::Nothing);
        assert_ne!(ready(&plan).1, reason::UNINSTALLED);
    }
}

#[test]
fn deletion_without_permit_waits_with_message() {
    let mut w = world().deployed().deleted();
    w.permit = Permit::Withheld("the Lease is not ours".to_owned());
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert!(plan.state.ready.message.contains("Lease"));
}
