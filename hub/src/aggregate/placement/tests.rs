use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_common::allowed::Allowed;
use krypton_common::names::{PLACED_FINALIZER, PLACED_ON_ANNOTATION};
use serde_json::{Value, json};

use super::super::reports::Target;
use super::*;

const UID: &str = "home-1";

/// Names edge-1.
fn tenant() -> Tenant {
    with_spec(json!({
        "clusterRef": { "secretName": "edge-1" }, "workspace": "acme-ws", "values": { "a": 1 }
    }))
}

fn with_spec(spec: Value) -> Tenant {
    let mut tenant = Tenant::new("acme", serde_json::from_value(spec).unwrap());
    tenant.metadata.namespace = Some("team".to_owned());
    tenant.metadata.uid = Some(UID.to_owned());
    tenant.metadata.generation = Some(3);
    tenant
}

/// As it is once it is placed on edge-1.
fn placed(mut tenant: Tenant) -> Tenant {
    tenant.finalizers_mut().push(PLACED_FINALIZER.to_owned());
    annotated(tenant, PLACED_ON_ANNOTATION, "edge-1")
}

fn annotated(mut tenant: Tenant, name: &str, value: &str) -> Tenant {
    let annotation = (name.to_owned(), value.to_owned());
    tenant.annotations_mut().extend([annotation]);
    tenant
}

fn deleted(mut tenant: Tenant) -> Tenant {
    tenant.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    tenant
}

fn recorded(mut tenant: Tenant, why: &str) -> Tenant {
    let mut status = TenantStatus::default();
    let state = State::new(Truth::True, why, "");
    put(&mut status, Some(&state), 3, Timestamp::UNIX_EPOCH);
    tenant.status = Some(status);
    tenant
}

fn targets() -> Targets {
    let limited = Target {
        allowed: Allowed::new(Some(&["others".to_owned()])),
        ..Target::default()
    };
    let sourced = Target {
        source_namespace: Some("krypton".to_owned()),
        ..Target::default()
    };
    [
        ("edge-1".to_owned(), sourced),
        ("limited".to_owned(), limited),
    ]
    .into()
}

fn report(uid: &str, gone: bool, why: &str) -> PlacedReport {
    PlacedReport {
        uid: uid.to_owned(),
        observed_generation: 3,
        gone,
        state: State::new(Truth::True, why, "as the member says"),
    }
}

fn view(targets: &Targets) -> View<'_> {
    View {
        place: true,
        targets: Some(targets),
        silent: None,
        said: None,
        left_out: false,
        deletion: Deletion::Its,
    }
}

/// The step and the reason, in words.
fn words(verdict: &Verdict) -> (&str, &str) {
    let step = match &verdict.step {
        Step::Nothing => "",
        Step::Begin(_) => "begin",
        Step::End { orphaned: None } => "end",
        Step::End { .. } => "orphan",
    };
    (
        step,
        verdict.placed.as_ref().map_or("", |placed| &placed.reason),
    )
}

#[test]
fn a_tenant_is_placed_when_its_member_is_known_and_takes_it() {
    let targets = targets();
    let at = |tenant: &Tenant, view: View<'_>| {
        let verdict = decide(tenant, &view);
        let (step, why) = words(&verdict);
        (step.to_owned(), why.to_owned())
    };
    let named = |spec: Value| with_spec(json!({ "clusterRef": spec }));
    for (tenant, expected) in [
        (tenant(), ("begin", "Ordered")),
        (with_spec(json!({})), ("", "")),
        (named(json!({ "secretName": "self-cluster" })), ("", "")),
        (
            named(json!({ "secretName": "edge-9" })),
            ("", "ClusterNotFound"),
        ),
        (
            named(json!({ "secretName": "limited" })),
            ("", "NamespaceNotAllowed"),
        ),
        (
            named(json!({ "secretName": "edge-1", "secretNamespace": "krypton" })),
            ("begin", "Ordered"),
        ),
        (
            named(json!({ "secretName": "edge-1", "secretNamespace": "other" })),
            ("", "ClusterNotFound"),
        ),
        (deleted(tenant()), ("", "")),
    ] {
        let found = at(&tenant, view(&targets));
        assert_eq!((found.0.as_str(), found.1.as_str()), expected, "{tenant:?}");
        // No order without the finalizer, and nothing at all without the flag.
        assert_eq!(order(&tenant, &targets, Deletion::Its), None);
        let off = View {
            place: false,
            ..view(&targets)
        };
        assert_eq!(at(&tenant, off), (String::new(), String::new()));
        // What is not known yet is not decided.
        let early = View {
            targets: None,
            ..view(&targets)
        };
        assert_eq!(at(&tenant, early).0, "");
    }
}

#[test]
fn what_is_said_of_a_placed_tenant_is_the_members_word_unless_home_knows_better() {
    let targets = targets();
    let base = view(&targets);
    let (mine, other) = (
        report(UID, false, "Placed"),
        report("home-0", false, "Placed"),
    );
    let gone = report(UID, true, "TenantGone");
    let gone_of_another = report("home-0", true, "TenantGone");
    let of_another_home = report(UID, true, "BelongsToAnother");
    let of_before = PlacedReport {
        observed_generation: 2,
        ..report(UID, false, "Placed")
    };
    let said = |report| View {
        said: Some(report),
        ..base
    };
    let doubted = |deletion| View {
        deletion,
        ..said(&gone)
    };
    let away = View {
        silent: Some("no heartbeat"),
        ..said(&mine)
    };
    let off = View {
        place: false,
        ..said(&mine)
    };
    let full = View {
        left_out: true,
        ..said(&mine)
    };
    let stays = || placed(tenant());
    let moved = || {
        placed(with_spec(
            json!({ "clusterRef": { "secretName": "edge-2" } }),
        ))
    };
    let unnamed = || placed(with_spec(json!({})));
    let gone_member = || annotated(stays(), PLACED_ON_ANNOTATION, "edge-2");
    let orphan = |tenant| annotated(tenant, ORPHAN_ANNOTATION, "true");
    let table: Vec<(Tenant, View<'_>, (&str, &str))> = vec![
        (stays(), base, ("", "Ordered")),
        (recorded(stays(), "Placed"), base, ("", "Placed")),
        (recorded(stays(), "NotPlacing"), base, ("", "Ordered")),
        (stays(), said(&mine), ("", "Placed")),
        (stays(), said(&other), ("", "Ordered")),
        (stays(), said(&gone), ("", "TenantGone")),
        (stays(), away, ("", "ClusterUnreachable")),
        (stays(), off, ("", "NotPlacing")),
        (stays(), full, ("", "TooMany")),
        (orphan(stays()), said(&mine), ("", "Placed")),
        (moved(), said(&mine), ("", "ClusterRefChanged")),
        (unnamed(), said(&mine), ("", "ClusterRefChanged")),
        (gone_member(), said(&mine), ("", "MemberLeft")),
        (deleted(stays()), base, ("", "Deleting")),
        (deleted(stays()), said(&gone), ("end", "TenantGone")),
        (
            deleted(stays()),
            said(&of_another_home),
            ("orphan", "BelongsToAnother"),
        ),
        (stays(), said(&of_before), ("", "Ordered")),
        (deleted(moved()), said(&gone), ("end", "TenantGone")),
        (deleted(stays()), said(&gone_of_another), ("", "Deleting")),
        (deleted(stays()), away, ("", "ClusterUnreachable")),
        (deleted(stays()), off, ("", "NotPlacing")),
        (deleted(gone_member()), base, ("", "MemberLeft")),
        (orphan(deleted(stays())), base, ("orphan", "Deleting")),
        (
            deleted(stays()),
            doubted(Deletion::NotKnown),
            ("", "TenantGone"),
        ),
        (
            deleted(stays()),
            doubted(Deletion::OfTheCrd),
            ("", "TenantGone"),
        ),
        (
            deleted(stays()),
            doubted(Deletion::OfTheCrdForGood),
            ("orphan", "Deleting"),
        ),
        (orphan(deleted(stays())), off, ("orphan", "Deleting")),
        (orphan(deleted(gone_member())), away, ("orphan", "Deleting")),
    ];
    for (tenant, view, expected) in table {
        let verdict = decide(&tenant, &view);
        assert_eq!(words(&verdict), expected, "{tenant:?} {view:?}");
        let waits = verdict.step == Step::Nothing
            && ["ClusterUnreachable", "NotPlacing", "MemberLeft"].contains(&expected.1);
        if waits && tenant.metadata.deletion_timestamp.is_some() {
            let message = verdict.placed.unwrap().message;
            assert!(message.contains(ORPHAN_ANNOTATION), "{message}");
        }
    }
}

#[test]
fn an_order_says_what_the_tenant_says_and_of_one_that_goes_only_that() {
    let targets = targets();
    let (member, found) = order(&placed(tenant()), &targets, Deletion::Its).unwrap();
    assert_eq!(member, "edge-1");
    assert_eq!((found.uid.as_str(), found.generation), (UID, 3));
    assert_eq!(found.spec.workspace.as_deref(), Some("acme-ws"));
    assert_eq!(found.spec.values.as_ref().unwrap()["a"], 1);
    assert!(!(found.remove || found.adopt || found.paused));
    let (_, goes) = order(&deleted(placed(tenant())), &targets, Deletion::Its).unwrap();
    assert!(goes.remove && goes.spec == PlacedSpec::default());
    let (_, hers) = order(
        &annotated(
            annotated(placed(tenant()), ADOPT_ANNOTATION, "true"),
            PAUSED_ANNOTATION,
            "true",
        ),
        &targets,
        Deletion::Its,
    )
    .unwrap();
    assert!(hers.adopt && hers.paused);

    // Named anew, it stays where it was placed.
    let moved = placed(with_spec(
        json!({ "clusterRef": { "secretName": "edge-2" } }),
    ));
    assert_eq!(order(&moved, &targets, Deletion::Its).unwrap().0, "edge-1");
    // Not allowed any more: nothing is ordered of what stays, and what was placed can still go.
    let refused = annotated(placed(tenant()), PLACED_ON_ANNOTATION, "limited");
    assert_eq!(order(&refused, &targets, Deletion::Its), None);
    assert!(
        order(&deleted(refused), &targets, Deletion::Its)
            .unwrap()
            .1
            .remove
    );
    // With its CRD nobody has wanted it to go.
    for deletion in [
        Deletion::NotKnown,
        Deletion::OfTheCrd,
        Deletion::OfTheCrdForGood,
    ] {
        assert_eq!(order(&deleted(placed(tenant())), &targets, deletion), None);
        assert!(order(&placed(tenant()), &targets, deletion).is_some());
    }
    // Let go.
    let orphan = annotated(deleted(placed(tenant())), ORPHAN_ANNOTATION, "true");
    assert_eq!(order(&orphan, &targets, Deletion::Its), None);
}

#[test]
fn where_no_member_says_anything_of_it_ready_says_why() {
    let mut status = TenantStatus::default();
    let now = Timestamp::UNIX_EPOCH;
    let none = State::new(Truth::False, reason::NO_CLUSTERS, "create it there");
    conditions::set(&mut status.conditions, conditions::READY, &none, 1, now);
    put(&mut status, Some(&waits("edge-1")), 1, now);
    let ready = conditions::find(&status.conditions, conditions::READY).unwrap();
    assert_eq!(ready.message, waits("edge-1").message);
    assert_eq!(status.last_message, Some(ready.message));
    put(&mut status, None, 1, now);
    assert_eq!(
        conditions::find(&status.conditions, conditions::PLACED),
        None
    );
}
