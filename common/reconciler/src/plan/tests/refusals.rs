//! Tests of requests that the API server refuses.

use super::*;

#[test]
fn refused_request_is_shown_and_waits() {
    let mut world = world();
    world.tenant.metadata.finalizers = None;
    assert_eq!(world.action(), Action::AddFinalizer);
    let world = refused_by_api_server(world);
    let plan = world.plan();
    assert_eq!(plan.action, Action::Nothing);
    let message = "adding the finalizer: denied";
    let refused = State::new(Truth::True, reason::REQUEST_REFUSED, message);
    assert_eq!(plan.state.error, Some(refused));
    assert_eq!(plan.state.ready.truth, Truth::False);
    assert_eq!(plan.wake, Some(world.after(900)));
    assert_eq!(plan.next.map(|next| next.attempts), Some(7));
}

#[test]
fn refused_request_leaves_a_running_release_ready() {
    let mut world = world().deployed();
    world.memory.reported = Some(world.plan().state);
    assert_eq!(world.plan().state.ready.truth, Truth::True);
    world.desired.chart.version = "1.20.0".to_owned();
    assert_eq!(world.action(), Action::Helm(Run::Upgrade));
    let state = refused_by_api_server(world).plan().state;
    assert_eq!(state.ready.truth, Truth::True);
    assert_eq!(state.error.unwrap().reason, reason::REQUEST_REFUSED);
}

#[test]
fn request_spec_change_and_deletion_bypass_refusal_wait() {
    let refused = || {
        let mut world = world();
        world.set_revisions(&[Status::Failed]);
        refused_by_api_server(world)
    };
    let action_after = |change: fn(&mut World)| {
        let mut world = refused();
        change(&mut world);
        world.action()
    };
    assert_eq!(action_after(|_| {}), Action::Nothing);
    let retry = action_after(|world| world.annotate(names::RECONCILE_REQUESTED_ANNOTATION, "now"));
    let changed = action_after(|world| world.tenant.metadata.generation = Some(2));
    let later = action_after(|world| world.now = world.after(900));
    for action in [retry, changed, later] {
        assert_eq!(action, Action::Helm(Run::Install));
    }
    let deleted = refused().deleted().action();
    assert_eq!(deleted, Action::Uninstall);
    // A refused removal waits as well, until the Tenant is orphaned.
    let mut removal = refused_by_api_server(refused().deleted());
    let plan = removal.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.ready.reason, reason::DELETING);
    assert_eq!(plan.state.error.unwrap().reason, reason::REQUEST_REFUSED);
    removal.annotate(names::ORPHAN_ANNOTATION, "true");
    let action = removal.action();
    assert_eq!(action, Action::RemoveFinalizer { orphaned: true });
}

#[test]
fn refused_read_shows_the_pause() {
    let mut world = world();
    world.set_revisions(&[Status::Failed]);
    let mut world = refused_by_api_server(world);
    world.memory.refusal.as_mut().unwrap().is_status_write = true;
    let progress = |world: &World| world.plan().state.progress.unwrap().reason;
    assert_eq!(progress(&world), reason::REQUEST_REFUSED);
    world.annotate(names::PAUSED_ANNOTATION, "true");
    assert_eq!(progress(&refused_by_api_server(world)), reason::PAUSED);
}

#[test]
fn refused_status_is_shown_until_it_is_written() {
    let mut world = refused_by_api_server(world().deployed());
    let error = world.plan().state.error.unwrap();
    assert_ne!(error.reason, reason::REQUEST_REFUSED, "nothing is due");
    world.memory.refusal.as_mut().unwrap().is_status_write = true;
    world.now = world.after(900);
    let state = world.plan().state;
    assert_eq!(state.error.unwrap().reason, reason::REQUEST_REFUSED);
}

#[test]
fn passing_trouble_is_not_shown() {
    let mut world = world();
    world.set_revisions(&[Status::Failed]);
    let mut world = refused_by_api_server(world);
    world.memory.refusal.as_mut().unwrap().shown = false;
    assert_eq!(world.action(), Action::Helm(Run::Install));
}

#[test]
fn refused_annotation_is_planned_again() {
    let mut world = world().deployed();
    assert_eq!(world.action(), Action::Nothing);
    world.annotate(&names::fingerprint_annotation(CLUSTER), "older");
    assert_eq!(world.action(), Action::Annotate);
    let mut world = refused_by_api_server(world);
    assert_eq!(world.action(), Action::Nothing);
    world.now = world.after(900);
    assert_eq!(world.action(), Action::Annotate);
}
