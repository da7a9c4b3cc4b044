//! Tests of the readiness of a release.

use krypton_types::desired::handling::WaitPolicy;
use krypton_types::placed_tenant::PlacedTenant;

use super::*;

#[test]
fn withheld_permit_or_pause_prevents_all_actions() {
    let mut w = world();
    w.permit = withheld();
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.ready.truth, Truth::Unknown);
    let mut w = world().deployed();
    w.permit = withheld();
    assert_eq!(ready(&w.plan()).0, Truth::True);
    w.permit = Permit::Granted;
    w.desired.paused = true;
    w.desired.chart.version = "2.0.0".to_owned();
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.progress.unwrap().reason, reason::PAUSED);
}

#[test]
fn pause_at_home_holds_copy_before_its_annotation() {
    let mut w = world().deployed();
    w.desired.chart.version = "2.0.0".to_owned();
    let label = (
        names::MANAGED_BY_LABEL.to_owned(),
        names::MANAGED_BY_HUB.to_owned(),
    );
    w.tenant.metadata.labels = Some([label].into());
    w.annotate(names::HOME_UID_ANNOTATION, "home-1");
    w.desired.placed.push(PlacedTenant {
        namespace: "team".to_owned(),
        name: "acme".to_owned(),
        uid: "home-1".to_owned(),
        paused: true,
        ..PlacedTenant::default()
    });
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.progress.unwrap().reason, reason::PAUSED);
    w.desired.placed[0].uid = "home-2".to_owned();
    assert_ne!(w.action(), Action::Nothing, "the order is for another");
}

/// The two ways in which an action is held back: another process has the Lease, or a pause.
fn held_back(mut w: World) -> [World; 2] {
    let mut paused = World {
        tenant: w.tenant.clone(),
        revisions: w.revisions.clone(),
        desired: w.desired.clone(),
        memory: w.memory.clone(),
        unready: w.unready.clone(),
        is_read: w.is_read,
        ..world()
    };
    paused.desired.paused = true;
    w.permit = withheld();
    [w, paused]
}

#[test]
fn unread_release_is_read_before_it_is_judged() {
    let restarted = || World {
        is_read: false,
        ..world().deployed()
    };
    let plan = restarted().plan();
    assert_eq!(plan.action, Action::ReadRelease(1));
    assert_eq!(ready(&plan).0, Truth::Unknown);
    let missing = State::new(
        Truth::False,
        reason::NOT_READY,
        "Deployment acme/web: not found",
    );
    for chart in ["1.19.1", "2.0.0"] {
        for mut w in held_back(restarted()) {
            w.desired.chart.version = chart.to_owned();
            w.memory.reported = reported(missing.clone());
            let plan = w.plan();
            assert_eq!(plan.action, Action::ReadRelease(1), "{chart}");
            assert_eq!(plan.state.ready, missing, "until it is known better");
        }
    }
}

#[test]
fn unrecorded_release_is_rendered_again() {
    let action = |run: Option<&str>, with_permit, permit| {
        let mut w = world().deployed();
        w.revisions[0].run = run.map(str::to_owned);
        w.memory.unrecorded = Some((1, with_permit));
        w.permit = permit;
        w.action()
    };
    let ours = Some("install-1");
    let read = Action::ReadRelease(1);
    assert_eq!(action(ours, false, Permit::Granted), read);
    let run = action(ours, true, Permit::Granted);
    assert_eq!(run, Action::Helm(Run::Upgrade));
    let withheld = withheld();
    assert_eq!(action(ours, false, withheld), Action::Nothing);
    let adopted = action(None, true, Permit::Granted);
    assert_eq!(adopted, Action::Nothing);
}

#[test]
fn unreadable_release_is_read_again_after_back_off() {
    let mut w = world().deployed().failed(reason::UPGRADE_FAILED, 30);
    w.is_read = false;
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.wake, Some(w.after(30)));
    assert_eq!(ready(&plan), (Truth::False, reason::UPGRADE_FAILED));
    w.now = w.after(30);
    assert_eq!(w.action(), Action::ReadRelease(1));
}

#[test]
fn readiness_is_followed_while_work_is_held_back() {
    const MISSING: &str = "Deployment acme/web: not found";
    let current_readiness = |previous: State, unready: Option<&str>, wait: WaitPolicy| {
        let mut w = world().deployed();
        w.memory.reported = reported(previous);
        w.unready = unready.map(str::to_owned);
        w.desired.chart.version = "2.0.0".to_owned();
        w.desired.handling.wait = wait;
        let [observed, paused] = held_back(w).map(|w| w.plan());
        assert_eq!(observed.action, Action::Nothing);
        let current = paused.state.ready.clone();
        assert_eq!(observed.state.ready, current);
        let progress = [observed, paused].map(|plan| plan.state.progress.unwrap().reason);
        assert_eq!(progress, [reason::LOCKED, reason::PAUSED]);
        current
    };
    let installed = State::new(Truth::True, reason::INSTALLED, "release installed");
    let lost = State::new(Truth::False, reason::NOT_READY, MISSING);
    let recovered = State::new(Truth::True, reason::NO_CHANGE, "release ready");
    let announced = State::new(Truth::False, reason::UPGRADING, "upgrading release");
    let failed = State::new(Truth::False, reason::CHART_NOT_LOADED, "no answer");
    for (previous, unready, expected) in [
        (&installed, None, &installed),
        (&installed, Some(MISSING), &lost),
        (&lost, Some(MISSING), &lost),
        (&lost, None, &recovered),
        (&recovered, Some(MISSING), &lost),
        (&announced, Some(MISSING), &announced),
        (&announced, None, &recovered),
        (&failed, Some(MISSING), &failed),
        (&failed, None, &failed),
    ] {
        let current = current_readiness(previous.clone(), unready, WaitPolicy::Ready);
        assert_eq!(current, *expected, "{previous:?} {unready:?}");
    }
    let noted = current_readiness(installed, Some(MISSING), WaitPolicy::Hooks);
    assert_eq!(noted.truth, Truth::True);
    assert!(noted.message.ends_with(MISSING), "{}", noted.message);
}

#[test]
fn undeployed_release_is_not_ready_while_held_back() {
    let histories: [&[Status]; 3] = [
        &[],
        &[Status::Uninstalled],
        &[Status::Deployed, Status::Failed],
    ];
    for history in histories {
        let mut w = world();
        w.set_revisions(history);
        let installed = State::new(Truth::True, reason::INSTALLED, "release installed");
        w.memory.reported = reported(installed);
        for w in held_back(w) {
            let plan = w.plan();
            assert_eq!(plan.action, Action::Nothing, "{history:?}");
            let not_ready = (Truth::False, reason::NOT_READY);
            assert_eq!(ready(&plan), not_ready, "{history:?}");
        }
    }
}

/// Upgrades that fail before Helm starts: without a chart, by a refused request, or for their values.
fn failing_upgrades() -> [World; 3] {
    let w = || {
        let mut w = world().deployed();
        w.desired.chart.version = "2.0.0".to_owned();
        w
    };
    let mut values = w();
    values.tenant.spec.values = own_values(serde_json::json!({"a": 1}));
    [
        w().failed(reason::CHART_NOT_LOADED, 60),
        refused_by_api_server(w()),
        values,
    ]
}

#[test]
fn readiness_is_followed_while_an_upgrade_fails() {
    let installed = State::new(Truth::True, reason::INSTALLED, "release installed");
    let recovered = (Truth::True, reason::NO_CHANGE);
    for mut w in failing_upgrades() {
        w.memory.reported = reported(installed.clone());
        let first = w.plan();
        assert_eq!(ready(&first), (Truth::True, reason::INSTALLED));
        w.unready = Some("Deployment acme/web: not found".to_owned());
        for _ in 0..2 {
            let plan = w.plan();
            assert_eq!(ready(&plan), (Truth::False, reason::NOT_READY));
            assert_eq!(plan.state.error, first.state.error);
            assert_eq!(plan.action, Action::Nothing);
            w.memory.reported = Some(plan.state);
        }
        w.unready = None;
        assert_eq!(ready(&w.plan()), recovered);
    }
}

#[test]
fn release_is_read_once_while_upgrade_fails() {
    for mut w in failing_upgrades() {
        let installed = State::new(Truth::True, reason::INSTALLED, "release installed");
        w.memory.reported = reported(installed);
        w.is_read = false;
        assert_eq!(w.action(), Action::ReadRelease(1));
        if let Some(refusal) = &mut w.memory.refusal {
            refusal.is_read = true;
            assert_eq!(w.action(), Action::Nothing, "reading is refused");
        }
        w.is_read = true;
        assert_eq!(w.action(), Action::Nothing);
        let mut w = w.failed(reason::RELEASE_TAMPERED, 60);
        w.is_read = false;
        assert_eq!(w.action(), Action::Nothing, "reading has failed");
    }
}

#[test]
fn upgrade_that_cannot_start_leaves_release_ready() {
    for failure_reason in [reason::HELM_UNAVAILABLE, reason::CHART_NOT_LOADED] {
        let mut w = world().deployed().failed(failure_reason, 60);
        w.revisions[0].fingerprint = Some("older".to_owned());
        w.memory.reported = reported(State::new(Truth::True, reason::INSTALLED, "installed"));
        let plan = w.plan();
        assert_eq!(plan.action, Action::Nothing, "{failure_reason}");
        let installed = (Truth::True, reason::INSTALLED);
        assert_eq!(ready(&plan), installed, "{failure_reason}");
        assert_eq!(plan.state.error.unwrap().reason, failure_reason);
    }
}

#[test]
fn release_waits_for_workloads_and_fails_after_timeout() {
    let mut w = world_just_installed();
    let plan = w.plan();
    assert_eq!(ready(&plan), (Truth::False, reason::INSTALLING));
    assert_eq!(plan.wake, Some(w.after(10)));
    assert_eq!(
        plan.applied_chart, None,
        "the status says no more than the announcement"
    );
    w.now = w.after(10);
    let plan = w.plan();
    assert_eq!(ready(&plan), (Truth::False, reason::INSTALLING));
    assert!(plan.state.ready.message.contains("Deployment acme/web"));
    assert_eq!(plan.wake, Some(w.after(170)));
    w.now = w.after(170);
    let plan = w.plan();
    assert_eq!(ready(&plan), (Truth::False, reason::INSTALL_FAILED));
    let error = plan.state.error.unwrap();
    assert!(error.message.contains("Deployment acme/web"));
    w.unready = None;
    let plan = w.plan();
    assert_eq!(ready(&plan), (Truth::True, reason::INSTALLED));
    assert_eq!(plan.state.error.unwrap().truth, Truth::False);
}

#[test]
fn release_without_wait_is_ready_once_deployed() {
    let mut w = world_just_installed();
    for (wait, message) in [
        (WaitPolicy::None, "release installed; not waited for"),
        (
            WaitPolicy::Hooks,
            "release installed; not waited for: Deployment acme/web: 0 of 1 available",
        ),
    ] {
        w.desired.handling.wait = wait;
        let plan = w.plan();
        assert_eq!(ready(&plan), (Truth::True, reason::INSTALLED), "{wait}");
        assert_eq!(plan.state.ready.message, message);
        assert_eq!((plan.wake, plan.action), (None, Action::Nothing));
        w.memory.reported = Some(plan.state);
    }
    // A release that Helm has not deployed is not ready under any policy.
    w.set_revisions(&[Status::Failed]);
    assert_eq!(ready(&w.plan()).0, Truth::False);
    // After a change of the policy, the note in the message goes away.
    w.set_revisions(&[Status::Deployed]);
    w.desired.handling.wait = WaitPolicy::Ready;
    w.unready = None;
    assert_eq!(w.plan().state.ready.message, "release installed");
}
