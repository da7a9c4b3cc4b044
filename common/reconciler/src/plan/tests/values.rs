//! Tests of a Tenant's own values.

use super::*;

#[test]
fn tenant_values_change_release_where_allowed() {
    let mut w = world();
    w.desired.tenant_values = true;
    let mut w = w.deployed();
    assert_eq!(w.action(), Action::Nothing);
    // No values, and values that change nothing.
    for same in [
        serde_json::json!({}),
        serde_json::json!({"installCRDs": true}),
    ] {
        w.tenant.spec.values = own_values(same);
        assert_eq!(w.action(), Action::Nothing);
    }
    w.tenant.spec.values = own_values(serde_json::json!({"replicas": 3}));
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    let chart = w.desired.chart_with(w.tenant.spec.values.as_ref());
    w.revisions[0].fingerprint = Some(chart.fingerprint());
    assert_eq!(w.action(), Action::Nothing);
    w.tenant.spec.values = None;
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn disallowed_or_oversized_values_block_release_changes() {
    let limit = krypton_types::values::TENANT_MAX_BYTES;
    let oversized = serde_json::json!({"a": "x".repeat(limit)});
    let cases = [
        (
            false,
            serde_json::json!({"a": 1}),
            reason::VALUES_NOT_ALLOWED,
        ),
        (true, oversized, reason::VALUES_TOO_LARGE),
    ];
    for (allowed, values, expected_reason) in cases {
        let mut w = world();
        w.desired.tenant_values = allowed;
        w.tenant.spec.values = own_values(values.clone());
        let plan = w.plan();
        assert_eq!(plan.action, Action::Nothing);
        assert_eq!(ready(&plan), (Truth::False, expected_reason));
        assert!(plan.state.ready.message.contains("spec.values"));
        // Neither another version nor a failed revision starts Helm, and the running release stays ready.
        let mut w = w.deployed();
        w.memory.reported = reported(State::new(Truth::True, reason::INSTALLED, ""));
        w.desired.chart.version = "1.20.0".to_owned();
        let plan = w.plan();
        assert_eq!(plan.action, Action::Nothing);
        assert_eq!(ready(&plan), (Truth::True, reason::INSTALLED));
        assert_eq!(error(&plan), (Truth::True, expected_reason));
        w.revisions.push(w.own_revision(2, Status::Failed));
        assert_eq!(w.action(), Action::Nothing);
        // The Tenant can still be deleted.
        let w = w.deleted();
        assert_eq!(w.action(), Action::Uninstall);
        // Empty values are allowed.
        let mut w = world().deployed();
        w.tenant.spec.values = own_values(serde_json::json!({}));
        assert_eq!(w.action(), Action::Nothing);
        assert_eq!(ready(&w.plan()), (Truth::True, reason::NO_CHANGE));
    }
}
