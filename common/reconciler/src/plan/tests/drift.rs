//! Tests of drift checks in a plan.

use krypton_types::desired::drift::DriftMode;

use super::*;

fn drifting(mode: DriftMode) -> World {
    let mut w = world().deployed();
    w.desired.drift.mode = mode;
    w
}

#[test]
fn only_settled_writable_release_is_checked_for_drift() {
    let drift_mode = |w: &World| w.plan().drift.map(|settings| settings.mode);
    assert_eq!(drift_mode(&drifting(DriftMode::Off)), None);
    for mode in [DriftMode::Warn, DriftMode::Heal] {
        assert_eq!(drift_mode(&drifting(mode)), Some(mode));
        let mut w = drifting(mode);
        w.unready = Some("0 of 1 available".to_owned());
        let unready = State::new(Truth::False, reason::NOT_READY, "0 of 1 available");
        w.memory.reported = reported(unready);
        assert_eq!(drift_mode(&w), Some(mode), "drift may be the cause");
        type Case = (&'static str, fn(&mut World));
        let cases: [Case; 5] = [
            ("no permit", |w| w.permit = withheld()),
            ("paused", |w| w.desired.paused = true),
            ("upgrade first", |w| {
                w.desired.chart.version = "2.0.0".to_owned()
            }),
            ("rollout", |w| {
                w.unready = Some("0 of 1 available".to_owned())
            }),
            ("locked", |w| {
                w.revisions = vec![w.own_revision(1, Status::PendingUpgrade)]
            }),
        ];
        for (case, change) in cases {
            let mut w = drifting(mode);
            change(&mut w);
            assert_eq!(drift_mode(&w), None, "{case}");
        }
    }
    let mut w = drifting(DriftMode::Off);
    w.annotate(names::DRIFT_ANNOTATION, "heal");
    assert_eq!(drift_mode(&w), Some(DriftMode::Heal));
}

#[test]
fn drift_message_survives_restart_within_its_revision() {
    let message = |w: &World| w.plan().state.ready.message;
    let mut w = drifting(DriftMode::Warn);
    let without_drift = message(&w);
    let drift = |revision: u32, message: Option<&str>| RevisionDrift {
        revision,
        message: message.map(str::to_owned),
    };
    w.memory.drift = Some(drift(1, Some("x is deleted")));
    let plan = w.plan();
    assert_eq!(plan.state.ready.truth, Truth::True);
    let with_drift = format!("{without_drift}; drift: x is deleted");
    assert_eq!(plan.state.ready.message, with_drift);
    // The same findings give the same message.
    w.memory.reported = Some(plan.state.clone());
    assert_eq!(w.plan().state, plan.state);
    w.memory.drift = None;
    assert_eq!(w.plan().state, plan.state, "another process has seen it");
    w.memory.drift = Some(drift(2, None));
    assert_eq!(w.plan().state, plan.state, "of another revision");
    w.memory.drift = Some(drift(1, None));
    assert_eq!(message(&w), without_drift);
    w.memory.drift = Some(drift(1, Some("x is deleted")));
    w.desired.drift.mode = DriftMode::Off;
    assert_eq!(message(&w), without_drift);
    w.annotate(names::DRIFT_ANNOTATION, "Heal");
    assert!(message(&w).contains("off, warn or heal"), "{}", message(&w));
}
