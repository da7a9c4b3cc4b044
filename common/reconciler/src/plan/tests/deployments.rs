//! Tests of plans for KryptonDeployments.

use krypton_types::deployment::DesiredDeployment;
use krypton_types::desired::drift::DriftMode;

use super::*;

const UID: &str = "uid-1";

fn order() -> DesiredDeployment {
    DesiredDeployment {
        namespace: "team".to_owned(),
        name: "acme".to_owned(),
        uid: UID.to_owned(),
        generation: 1,
        created: 1_000,
        ..DesiredDeployment::default()
    }
}

fn removal() -> DesiredDeployment {
    DesiredDeployment {
        remove: true,
        ..order()
    }
}

/// An order of the same name, created after [`order`].
fn younger() -> DesiredDeployment {
    DesiredDeployment {
        namespace: "other".to_owned(),
        uid: "uid-2".to_owned(),
        created: 2_000,
        ..order()
    }
}

fn owner(order: &DesiredDeployment) -> ReleaseOwner {
    ReleaseOwner::Deployment(Arc::new(order.clone()))
}

impl World {
    fn plan_order(&self, order: &DesiredDeployment) -> Plan {
        self.plan_for(&owner(order))
    }

    fn plan_beside(mut self, order: &DesiredDeployment, other: &DesiredDeployment) -> Plan {
        self.others = vec![owner(other)];
        self.plan_order(order)
    }

    /// A release as the Go operator left it, without Krypton's labels.
    fn with_original_release(mut self, chart: &str, version: &str) -> Self {
        self.revisions = vec![foreign_revision(1, Status::Deployed)];
        self.release_details(chart, version)
    }

    fn cleaned_up(mut self) -> Self {
        self.memory.cleaned_up = Some(UID.to_owned());
        self
    }
}

#[test]
fn deployment_is_installed_without_finalizer_or_annotation() {
    let mut w = world();
    w.workspace = None;
    assert_eq!(w.plan_order(&order()).action, Action::CreateWorkspace);
    let plan = world().plan_order(&order());
    assert_eq!(plan.action, Action::Helm(Run::Install));
    let plan = world().deployed().plan_order(&order());
    assert_eq!(plan.action, Action::Nothing);
    assert!(plan.settled && plan.is_reported && !plan.gone);
    assert_eq!(ready(&plan), (Truth::True, reason::NO_CHANGE));
    assert!(plan.applied_chart.is_some());
}

#[test]
fn changed_chart_upgrades_and_own_lock_is_broken() {
    let mut w = world().deployed();
    w.desired.chart.version = "1.19.2".to_owned();
    let plan = w.plan_order(&order());
    assert_eq!(plan.action, Action::Helm(Run::Upgrade));
    let mut w = world();
    w.set_revisions(&[Status::PendingInstall]);
    let plan = w.plan_order(&order());
    assert!(matches!(plan.action, Action::Unlock { revision: 1, .. }));
}

#[test]
fn paused_deployment_is_neither_installed_nor_removed() {
    let pause = |order: DesiredDeployment| DesiredDeployment {
        paused: true,
        ..order
    };
    let plan = world().plan_order(&pause(order()));
    assert_eq!(plan.action, Action::Nothing);
    let progress = plan.state.progress.unwrap();
    assert_eq!(progress.reason, reason::PAUSED);
    assert!(progress.message.contains("KryptonDeployment"));
    let plan = world().deployed().plan_order(&pause(removal()));
    assert_eq!((plan.action, plan.gone), (Action::Nothing, false));
}

#[test]
fn removal_uninstalls_then_deletes_workspace_then_acknowledges() {
    let plan = world().deployed().plan_order(&removal());
    assert_eq!((plan.action, plan.gone), (Action::Uninstall, false));
    let plan = world().plan_order(&removal());
    assert_eq!((plan.action, plan.gone), (Action::DeleteWorkspace, false));
    let mut empty = world();
    empty.workspace = None;
    let plan = empty.plan_order(&removal());
    let finish = Action::RemoveFinalizer { orphaned: false };
    assert_eq!((plan.action, plan.gone), (finish, false));
    let plan = empty.cleaned_up().plan_order(&removal());
    assert_eq!((plan.action.clone(), plan.gone), (Action::Nothing, true));
    assert_eq!(ready(&plan), (Truth::False, reason::UNINSTALLED));
}

#[test]
fn removal_waits_for_no_upgrade() {
    let failed = |reason| world().deployed().failed(reason, 60);
    let plan = failed(reason::UPGRADE_FAILED).plan_order(&removal());
    assert_eq!(plan.action, Action::Uninstall);
    let plan = failed(reason::UNINSTALL_FAILED).plan_order(&removal());
    assert_eq!(plan.action, Action::Nothing);
}

#[test]
fn tampered_release_is_not_removed_over_and_over() {
    let mut world = world().deployed().failed(reason::RELEASE_TAMPERED, 60);
    let failure = world.memory.failure.as_mut().unwrap();
    failure.attempt.removal = Some(false);
    let plan = world.plan_order(&removal());
    assert_eq!(plan.action, Action::Nothing);
    let error = plan.state.error.unwrap();
    assert_eq!(error.reason, reason::RELEASE_TAMPERED);
}

#[test]
fn reappeared_release_is_not_reported_gone() {
    let plan = world().deployed().cleaned_up().plan_order(&removal());
    assert_eq!((plan.action, plan.gone), (Action::Uninstall, false));
    // The cleanup of the previous object does not count for a new object with the same name.
    let recreated = DesiredDeployment {
        uid: "uid-2".to_owned(),
        ..removal()
    };
    let plan = world().cleaned_up().plan_order(&recreated);
    assert!(!plan.gone);
}

#[test]
fn withheld_lease_blocks_removal_but_keeps_gone_status() {
    let mut w = world().deployed();
    w.permit = Permit::Withheld("somebody holds it".to_owned());
    let plan = w.plan_order(&removal());
    assert_eq!((plan.action, plan.gone), (Action::Nothing, false));
    let mut w = world().cleaned_up();
    w.permit = Permit::Withheld("somebody holds it".to_owned());
    assert!(w.plan_order(&removal()).gone);
}

#[test]
fn orphaned_release_stays_and_removal_completes() {
    let orphan = DesiredDeployment {
        orphan: true,
        ..removal()
    };
    let plan = world().deployed().plan_order(&orphan);
    assert_eq!(plan.action, Action::RemoveFinalizer { orphaned: true });
    let plan = world().deployed().cleaned_up().plan_order(&orphan);
    assert_eq!((plan.action.clone(), plan.gone), (Action::Nothing, true));
    assert!(plan.state.ready.message.contains("release kept"));
}

#[test]
fn a_shared_workspace_stays() {
    let mut w = world();
    w.workspace_shared = true;
    let plan = w.plan_order(&removal());
    assert_eq!(plan.action, Action::RemoveFinalizer { orphaned: false });
    let mut w = world();
    w.workspace.as_mut().unwrap().creator = None;
    let plan = w.plan_order(&removal());
    assert_eq!(plan.action, Action::RemoveFinalizer { orphaned: false });
}

#[test]
fn older_deployment_holds_release_and_younger_is_refused() {
    let plan = world().plan_beside(&order(), &younger());
    assert_eq!(plan.action, Action::Helm(Run::Install));
    let plan = world().plan_beside(&younger(), &order());
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::False, reason::RELEASE_IN_USE));
    let message = &plan.state.ready.message;
    assert!(message.contains("KryptonDeployment team/acme"), "{message}");
    // The release belongs to the deployment on its label, even if the other one is older.
    let elder = DesiredDeployment {
        created: 1,
        ..younger()
    };
    let plan = world().deployed().plan_beside(&elder, &order());
    assert_eq!(ready(&plan), (Truth::False, reason::RELEASE_IN_USE));
    // An order to remove the other deployment does not remove this one's release.
    let refused = DesiredDeployment {
        remove: true,
        ..elder
    };
    let plan = world().deployed().plan_beside(&refused, &order());
    assert_eq!(plan.action, Action::RemoveFinalizer { orphaned: false });
}

#[test]
fn completed_removal_order_frees_release_name() {
    let plan = world().deployed().plan_beside(&younger(), &removal());
    assert_eq!(ready(&plan), (Truth::False, reason::RELEASE_IN_USE));
    let plan = world().plan_beside(&younger(), &removal());
    assert_eq!(plan.action, Action::Helm(Run::Install));
}

#[test]
fn original_release_of_same_chart_is_adopted() {
    let mut w = world();
    w.revisions = vec![foreign_revision(1, Status::Deployed)];
    let plan = w.plan_order(&order());
    assert_eq!(plan.action, Action::ReadRelease(1));
    assert_eq!(w.plan_order(&removal()).action, Action::ReadRelease(1));

    let w = world().with_original_release("cert-manager", "v1.19.1");
    let plan = w.plan_order(&order());
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::True, reason::NO_CHANGE));

    // The Go operator gave one value to every chart.
    let mut w = world().with_original_release("cert-manager", "v1.19.1");
    for (replicas, action) in [(1, Action::Nothing), (2, Action::Helm(Run::Upgrade))] {
        let values = &mut w.desired.chart.values;
        values.insert("replicaCount".to_owned(), replicas.into());
        assert_eq!(w.plan_order(&order()).action, action);
    }

    let older = world().with_original_release("cert-manager", "v1.18.0");
    let plan = older.plan_order(&order());
    assert_eq!(plan.action, Action::Helm(Run::Upgrade));
    assert_eq!(older.plan_order(&removal()).action, Action::Uninstall);
}

#[test]
fn release_with_another_chart_is_not_adopted() {
    let w = world().with_original_release("echo-server", "1.0.0");
    let plan = w.plan_order(&order());
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::False, reason::RELEASE_IN_USE));
    assert!(plan.state.ready.message.contains("echo-server"));
    let plan = w.plan_order(&removal());
    assert_eq!(plan.action, Action::RemoveFinalizer { orphaned: false });
}

#[test]
fn release_follows_recreated_deployment_only_in_its_namespace() {
    let mut w = world().deployed();
    w.revisions[0].owner_uid = Some("uid-0".to_owned());
    assert_eq!(w.plan_order(&order()).action, Action::Nothing);
    assert_eq!(ready(&w.plan_order(&order())).0, Truth::True);
    w.revisions[0].owner_namespace = Some("other".to_owned());
    let plan = w.plan_order(&order());
    assert_eq!(ready(&plan), (Truth::False, reason::RELEASE_IN_USE));
}

#[test]
fn invalid_or_reserved_namespace_names_are_rejected() {
    for (name, expected_reason) in [
        ("a.b", reason::WORKSPACE_INVALID),
        ("kube-system", reason::NAMESPACE_NOT_OWNED),
        ("krypton-system", reason::NAMESPACE_NOT_OWNED),
        ("krypton", reason::NAMESPACE_NOT_OWNED),
    ] {
        let named = DesiredDeployment {
            name: name.to_owned(),
            ..order()
        };
        let plan = world().plan_order(&named);
        assert_eq!(ready(&plan), (Truth::False, expected_reason), "{name}");
        assert!(plan.state.ready.message.contains("another name"));
    }
}

#[test]
fn retired_member_uninstalls_deployments_without_acknowledging() {
    let mut w = world().deployed();
    w.desired.retire = true;
    assert_eq!(w.plan_order(&order()).action, Action::Uninstall);
    let mut w = world().cleaned_up();
    w.desired.retire = true;
    w.workspace = None;
    let plan = w.plan_order(&order());
    assert_eq!(ready(&plan), (Truth::False, reason::UNINSTALLED));
    assert!(!plan.gone);
    // The hub withdrew the order.
    w.desired.retire = false;
    assert_eq!(w.plan_order(&order()).action, Action::CreateWorkspace);
}

#[test]
fn repeatedly_failed_check_is_an_error_of_deployments() {
    let mut w = world().deployed();
    w.desired.drift.mode = DriftMode::Heal;
    let error = |plan: &Plan| plan.state.error.clone().unwrap();
    for _ in 0..2 {
        w.memory.record_failed_check(1, "denied".to_owned());
        assert_eq!(error(&w.plan_order(&order())).truth, Truth::False);
    }
    w.memory.record_failed_check(1, "denied".to_owned());
    let plan = w.plan_order(&order());
    let failed = error(&plan);
    assert_eq!(failed.truth, Truth::True);
    assert_eq!(failed.reason, reason::HEALTH_CHECK_FAILED);
    assert!(failed.message.ends_with(": denied"), "{failed:?}");
    assert_eq!(ready(&plan).0, Truth::True);
    assert!(plan.drift.is_some(), "the next check follows");
    assert_eq!(error(&w.plan()).truth, Truth::False, "a Tenant");
    // The next revision has its own checks.
    w.memory.record_failed_check(2, "denied".to_owned());
    assert_eq!(error(&w.plan_order(&order())).truth, Truth::False);
}

#[test]
fn fleet_policy_controls_drift_checks() {
    let mut w = world().deployed();
    w.desired.drift.mode = DriftMode::Heal;
    let plan = w.plan_order(&order());
    assert_eq!(plan.drift.unwrap().mode, DriftMode::Heal);
}

#[test]
fn only_deployment_reports_its_revisions() {
    let w = world().deployed();
    assert_eq!(w.plan().revisions, None, "a Tenant has a history");
    let revisions = w.plan_order(&order()).revisions.unwrap();
    let chart = revisions[0].chart.as_ref().unwrap();
    assert_eq!((revisions.len(), chart.name.as_str()), (1, "cert-manager"));
}

#[test]
fn revisions_are_reported_with_announced_upgrade() {
    let mut w = world().deployed();
    let revisions = w.plan_order(&order()).revisions;
    w.desired.chart.version = "1.20.0".to_owned();
    let announced = w.plan_order(&order());
    assert_eq!(announced.action, Action::Helm(Run::Upgrade));
    assert_eq!(announced.revisions, revisions);
}

#[test]
fn other_owner_hides_revisions() {
    let mut w = world().deployed();
    w.revisions[0].owner_uid = Some("uid-0".to_owned());
    w.revisions[0].owner_namespace = Some("other".to_owned());
    assert_eq!(w.plan_order(&order()).revisions, None);
}

#[test]
fn missing_release_is_reported_without_revisions() {
    assert_eq!(world().plan_order(&order()).revisions, Some(Vec::new()));
}
