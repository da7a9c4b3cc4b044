//! Tests of lockdown, which restricts the namespaces that an owner may use.

use krypton_types::deployment::DesiredDeployment;

use super::*;

fn locked_down() -> World {
    let mut w = world();
    w.desired.lockdown.no_cross_namespace_refs = true;
    w
}

/// Adds a workspace that was created for `creator` and that an operator has opened to `open_to`.
fn with_workspace(mut w: World, creator: Option<&str>, open_to: Option<&str>) -> World {
    w.workspace = Some(Workspace {
        open_to: open_to.map(str::to_owned),
        ..workspace(creator, "ns-uid")
    });
    w
}

#[test]
fn workspace_of_different_namespace_is_rejected() {
    let install = Action::Helm(Run::Install);
    for (creator, open_to, allowed) in [
        (Some("uid-1"), None, true),
        (Some("uid-2"), None, false),
        (None, None, false),
        (None, Some("team/acme"), true),
        (Some("uid-2"), Some("team/acme"), true),
        (None, Some("team/other"), false),
        (None, Some("other/acme"), false),
        (None, Some("true"), false),
    ] {
        let plan = with_workspace(locked_down(), creator, open_to).plan();
        assert_eq!(plan.action == install, allowed, "{creator:?} {open_to:?}");
        if !allowed {
            assert_eq!(ready(&plan), (Truth::False, reason::NAMESPACE_NOT_OWNED));
            assert_eq!(plan.action, Action::Nothing);
            let message = &plan.state.ready.message;
            let remedy = "mesh.openkcm.io/adopt=team/acme";
            assert!(message.contains(remedy), "{message}");
        }
        let plan = with_workspace(world(), creator, open_to).plan();
        assert_eq!(plan.action, install, "without lockdown");
    }
}

#[test]
fn own_namespace_and_new_namespaces_are_used() {
    let mut own = with_workspace(locked_down(), None, None);
    own.tenant.spec.workspace = Some("team".to_owned());
    assert_eq!(own.action(), Action::Helm(Run::Install));
    let mut new = locked_down();
    new.workspace = None;
    assert_eq!(new.action(), Action::CreateWorkspace);
}

#[test]
fn restored_tenant_keeps_its_workspace() {
    let mut w = with_workspace(locked_down(), Some("uid-0"), None);
    let mut release = w.own_revision(1, Status::Deployed);
    release.owner_uid = Some("uid-0".to_owned());
    w.revisions = vec![release.clone()];
    assert_ne!(ready(&w.plan()).1, reason::NAMESPACE_NOT_OWNED);
    // The release belongs to a Tenant in another namespace.
    release.owner_namespace = Some("other".to_owned());
    w.revisions = vec![release];
    assert_eq!(ready(&w.plan()).1, reason::NAMESPACE_NOT_OWNED);
}

#[test]
fn annotations_of_the_author_hand_nothing_over() {
    for annotation in [
        (names::ADOPT_ANNOTATION.to_owned(), "true".to_owned()),
        (names::fingerprint_annotation(CLUSTER), ORIGINAL.to_owned()),
        (PREVIOUS_UID_ANNOTATION.to_owned(), "uid-9".to_owned()),
    ] {
        for (lockdown, open_to) in [(false, None), (true, None), (true, Some("team/acme"))] {
            let mut w = with_workspace(world(), Some("uid-1"), open_to);
            w.desired.lockdown.no_cross_namespace_refs = lockdown;
            let previous = annotation.0 == PREVIOUS_UID_ANNOTATION;
            w.tenant.metadata.annotations = Some([annotation.clone()].into());
            let mut release = foreign_revision(1, Status::Deployed);
            if previous {
                release.owner_uid = Some("uid-9".to_owned());
                release.owner_namespace = Some("other".to_owned());
            }
            w.revisions = vec![release];
            let refused = ready(&w.plan()).1 == reason::RELEASE_IN_USE;
            let expected = lockdown && open_to.is_none();
            assert_eq!(refused, expected, "{annotation:?} {lockdown} {open_to:?}");
        }
    }
}

#[test]
fn deployment_takes_no_release_by_its_chart() {
    let order = DesiredDeployment {
        namespace: "team".to_owned(),
        name: "acme".to_owned(),
        uid: "uid-1".to_owned(),
        ..DesiredDeployment::default()
    };
    let owner = ReleaseOwner::Deployment(Arc::new(order));
    let mut w = with_workspace(locked_down(), Some("uid-1"), None)
        .release_details("cert-manager", "1.19.1");
    w.revisions = vec![foreign_revision(1, Status::Deployed)];
    let plan = w.plan_for(&owner);
    assert_eq!(ready(&plan).1, reason::RELEASE_IN_USE);
    w.desired.lockdown.no_cross_namespace_refs = false;
    let plan = w.plan_for(&owner);
    assert_ne!(ready(&plan).1, reason::RELEASE_IN_USE);
}

#[test]
fn rejected_tenant_deletes_no_foreign_namespace() {
    for (creator, action) in [
        ("uid-1", Action::DeleteWorkspace),
        ("uid-2", Action::RemoveFinalizer { orphaned: false }),
    ] {
        let w = with_workspace(locked_down(), Some(creator), None).deleted();
        assert_eq!(w.action(), action, "{creator}");
    }
}

/// A Tenant of namespace `other`, older than the world's Tenant, with the same name and workspace.
fn squatter() -> ReleaseOwner {
    let mut other = world().tenant;
    other.metadata.namespace = Some("other".to_owned());
    other.metadata.uid = Some("uid-2".to_owned());
    other.metadata.creation_timestamp = Some(Time(Timestamp::from_second(1).unwrap()));
    ReleaseOwner::Tenant(Arc::new(other))
}

#[test]
fn refused_tenant_keeps_no_release_from_others() {
    let contested = |mut w: World| {
        w.tenant.metadata.creation_timestamp = Some(Time(Timestamp::from_second(2).unwrap()));
        w.others = vec![squatter()];
        w
    };
    let install = Action::Helm(Run::Install);
    let in_use = |w: World| ready(&w.plan()).1 == reason::RELEASE_IN_USE;
    let ours = with_workspace(locked_down(), Some("uid-1"), None);
    assert_eq!(contested(ours).action(), install);
    let mut own = contested(with_workspace(locked_down(), None, None));
    own.tenant.spec.workspace = Some("team".to_owned());
    assert_eq!(own.action(), install);
    let open = with_workspace(world(), Some("uid-1"), None);
    assert!(in_use(contested(open)));
    // An operator has opened the workspace to both.
    let both = with_workspace(locked_down(), Some("uid-1"), Some("other/acme"));
    assert!(in_use(contested(both)));
    // The release has belonged to the other Tenant since before the lockdown.
    let mut w = contested(with_workspace(locked_down(), Some("uid-1"), None));
    let mut release = w.own_revision(1, Status::Deployed);
    release.owner_uid = Some("uid-2".to_owned());
    release.owner_namespace = Some("other".to_owned());
    w.revisions = vec![release];
    assert!(in_use(w));
}
