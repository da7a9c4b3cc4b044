//! Tests of the owner of a release and of its workspace.

use super::*;

#[test]
fn tenant_with_release_elsewhere_is_not_reinstalled() {
    let mut w = world();
    assert_eq!(w.action(), Action::Helm(Run::Install));
    w.elsewhere = Some("acme-ws".to_owned());
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::False, reason::RELEASE_IN_USE));
    let message = &plan.state.ready.message;
    assert!(message.contains("spec.workspace: acme-ws"), "{message}");
}

#[test]
fn original_release_is_adopted_without_helm_run() {
    let mut w = world();
    w.revisions = vec![foreign_revision(1, Status::Deployed)];
    assert_eq!(w.action(), Action::ReadRelease(1));
    let w = w.release_details("cert-manager", "v1.19.1");
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::True, reason::NO_CHANGE));
}

#[test]
fn stale_annotation_does_not_hide_upgrade() {
    let mut w = world().release_details("cert-manager", "v1.18.0");
    w.revisions = vec![foreign_revision(1, Status::Deployed)];
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn unknown_release_is_refused_without_adopt_annotation() {
    let mut w = world().release_details("cert-manager", "v1.19.1");
    w.revisions = vec![foreign_revision(1, Status::Deployed)];
    w.tenant.metadata.annotations = None;
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::False, reason::RELEASE_IN_USE));
    assert!(plan.state.ready.message.contains(names::ADOPT_ANNOTATION));
    w.annotate(names::ADOPT_ANNOTATION, "true");
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn older_tenant_wins_shared_release() {
    let mut older = world();
    older.tenant.metadata.creation_timestamp = Some(Time(Timestamp::from_second(1).unwrap()));
    let mut younger = world();
    younger.tenant.metadata.uid = Some("uid-2".to_owned());
    younger.tenant.metadata.namespace = Some("other".to_owned());
    younger.tenant.metadata.creation_timestamp = Some(Time(Timestamp::from_second(2).unwrap()));
    older.others = vec![younger.owner()];
    younger.others = vec![older.owner()];
    assert_eq!(older.action(), Action::Helm(Run::Install));
    let plan = younger.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::False, reason::RELEASE_IN_USE));
    let message = &plan.state.ready.message;
    assert!(message.contains("team/acme"), "{message}");
    // Deleting the younger Tenant leaves the release unchanged.
    let plan = younger.deleted().plan();
    assert_eq!(plan.action, Action::RemoveFinalizer { orphaned: false });
}

#[test]
fn release_of_tenant_in_other_namespace_is_refused() {
    let mut w = world().deployed();
    w.revisions[0].owner_uid = Some("dead".to_owned());
    // The same namespace and name: the Tenant was restored from a backup.
    assert_eq!(w.action(), Action::Nothing);
    assert_eq!(ready(&w.plan()).0, Truth::True);
    w.revisions[0].owner_namespace = Some("elsewhere".to_owned());
    assert_eq!(ready(&w.plan()), (Truth::False, reason::RELEASE_IN_USE));
}

#[test]
fn reserved_namespace_is_never_a_workspace() {
    for (workspace, owner) in [
        ("kube-system", "Kubernetes"),
        ("krypton-system", "Krypton"),
        ("krypton", "Krypton"),
    ] {
        let mut w = world();
        w.tenant.spec.workspace = Some(workspace.to_owned());
        let plan = w.plan();
        assert_eq!(plan.action, Action::Nothing, "{workspace}");
        assert_eq!(ready(&plan), (Truth::False, reason::NAMESPACE_NOT_OWNED));
        assert!(plan.state.ready.message.contains(owner));
    }
    let mut dotted = world();
    dotted.tenant.metadata.name = Some("a.b".to_owned());
    let plan = dotted.plan();
    assert_eq!(ready(&plan), (Truth::False, reason::WORKSPACE_INVALID));
}

#[test]
fn tenant_of_other_member_gets_no_finalizer() {
    let mut w = world();
    w.tenant.metadata.finalizers = None;
    w.tenant.spec = placed("edge-2");
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert!(!plan.is_reported);
    assert_eq!(ready(&plan), (Truth::False, reason::NOT_THIS_CLUSTER));
}

#[test]
fn targeted_tenant_of_disallowed_namespace_is_ignored() {
    let list = |name: &str| AllowedNamespaces::new(Some(&[name.to_owned()]));
    for (names_member, allowed, ignored) in [
        (true, list("other"), true),
        (true, list("team"), false),
        (true, AllowedNamespaces::default(), false),
        // The Tenant names no member, so the list does not apply.
        (false, list("other"), false),
    ] {
        for mut w in [world(), world().deployed()] {
            let unrestricted = w.plan();
            if names_member {
                w.tenant.spec = placed(CLUSTER);
            }
            w.allowed = allowed.clone();
            let plan = w.plan();
            if !ignored {
                assert_eq!(plan, unrestricted, "{allowed:?}");
                continue;
            }
            assert_eq!(plan.action, Action::Nothing);
            assert!(!plan.is_reported);
            assert_eq!(ready(&plan), (Truth::False, reason::NAMESPACE_NOT_ALLOWED));
            // The deletion of a Tenant is not restricted.
            let mut w = w.deleted();
            let plan = w.plan();
            w.allowed = AllowedNamespaces::default();
            assert_eq!(plan, w.plan());
        }
    }
}
