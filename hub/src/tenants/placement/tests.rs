use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_types::allowed_namespaces::Allowed;
use krypton_types::names::{PLACED_FINALIZER, PLACED_ON_ANNOTATION};
use serde_json::{Value, json};

use super::*;
use crate::members::tenant_reports::Target;

const UID: &str = "home-1";
/// The UID of edge-1's cluster.
const CLUSTER: &str = "cluster-1";

/// A Tenant that names edge-1.
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

/// A Tenant that names this member.
fn naming(member: &str) -> Tenant {
    with_spec(json!({ "clusterRef": { "secretName": member } }))
}

/// Places the Tenant on edge-1.
fn placed(tenant: Tenant) -> Tenant {
    on_record_at(held(tenant), "edge-1", CLUSTER)
}

/// Places the Tenant on edge-1 as an older hub did, without a record.
fn held(mut tenant: Tenant) -> Tenant {
    tenant.finalizers_mut().push(PLACED_FINALIZER.to_owned());
    annotated(tenant, PLACED_ON_ANNOTATION, "edge-1")
}

fn on_record_at(mut tenant: Tenant, cluster: &str, uid: &str) -> Tenant {
    tenant.status.get_or_insert_default().placement = Some(TenantPlacement {
        cluster: cluster.to_owned(),
        cluster_uid: uid.to_owned(),
    });
    tenant
}

/// The Tenant after a client overwrote it without home's metadata.
fn wiped(mut tenant: Tenant) -> Tenant {
    tenant.metadata.finalizers = None;
    tenant.metadata.annotations = None;
    tenant
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
    let status = tenant.status.get_or_insert_default();
    let state = State::new(Truth::True, why, "");
    put(status, Some(&state), 3, Timestamp::UNIX_EPOCH);
    tenant
}

pub(crate) fn targets() -> Targets {
    let cluster = |uid: &str| Target {
        cluster_uid: Some(uid.to_owned()),
        ..Target::default()
    };
    let limited = Target {
        allowed: Allowed::new(Some(&["others".to_owned()])),
        ..cluster("cluster-2")
    };
    let sourced = Target {
        source_namespace: Some("krypton".to_owned()),
        ..cluster(CLUSTER)
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
        records: true,
        targets: Some(targets),
        silent: None,
        said: None,
        left_out: false,
        deletion: Deletion::Its,
    }
}

/// The step as a word, and the reason.
fn outcome(verdict: &Verdict) -> (&str, &str) {
    let step = match &verdict.step {
        Step::Nothing if verdict.place.is_some() => "record",
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
fn tenant_is_placed_on_known_member_allowing_it() {
    let targets = targets();
    let at = |tenant: &Tenant, view: View<'_>| {
        let verdict = decide(tenant, &view);
        let (step, why) = outcome(&verdict);
        (step.to_owned(), why.to_owned())
    };
    let from = |namespace: &str| {
        let secret = json!({ "secretName": "edge-1", "secretNamespace": namespace });
        with_spec(json!({ "clusterRef": secret }))
    };
    for (tenant, expected) in [
        (tenant(), ("record", "Ordered")),
        (with_spec(json!({})), ("", "")),
        (naming("self-cluster"), ("", "")),
        (naming("edge-9"), ("", "ClusterNotFound")),
        (naming("limited"), ("", "NamespaceNotAllowed")),
        (from("krypton"), ("record", "Ordered")),
        (from("other"), ("", "ClusterNotFound")),
        (deleted(tenant()), ("", "")),
    ] {
        let found = at(&tenant, view(&targets));
        assert_eq!((found.0.as_str(), found.1.as_str()), expected, "{tenant:?}");
        // Without the finalizer there is no order, and without the flag nothing happens.
        assert_eq!(order(&tenant, &targets, Deletion::Its), None);
        // If home's CRD drops the record, the hub does not wait for it.
        let unkept = View {
            records: false,
            ..view(&targets)
        };
        let begins = expected.0 == "record";
        let step = if begins { "begin" } else { expected.0 };
        assert_eq!(at(&tenant, unkept).0, step);
        let off = View {
            place: false,
            ..view(&targets)
        };
        assert_eq!(at(&tenant, off), (String::new(), String::new()));
        // Before the EdgeClusters are known, the hub does not decide.
        let early = View {
            targets: None,
            ..view(&targets)
        };
        assert_eq!(at(&tenant, early).0, "");
    }
}

#[test]
fn placed_condition_follows_member_report_unless_home_overrides() {
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
    let moved = || placed(naming("edge-2"));
    let unnamed = || placed(with_spec(json!({})));
    let gone_member = || on_record_at(stays(), "edge-2", "cluster-9");
    let orphan = |tenant| annotated(tenant, ORPHAN_ANNOTATION, "true");
    let not_known = doubted(Deletion::NotKnown);
    let of_the_crd = doubted(Deletion::OfTheCrd);
    let crd_for_good = doubted(Deletion::OfTheCrdForGood);
    let other_home = ("orphan", "BelongsToAnother");
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
        (deleted(stays()), said(&of_another_home), other_home),
        (stays(), said(&of_before), ("", "Ordered")),
        (deleted(moved()), said(&gone), ("end", "TenantGone")),
        (deleted(stays()), said(&gone_of_another), ("", "Deleting")),
        (deleted(stays()), away, ("", "ClusterUnreachable")),
        (deleted(stays()), off, ("", "NotPlacing")),
        (deleted(gone_member()), base, ("", "MemberLeft")),
        (orphan(deleted(stays())), base, ("orphan", "Deleting")),
        (deleted(stays()), not_known, ("", "TenantGone")),
        (deleted(stays()), of_the_crd, ("", "TenantGone")),
        (deleted(stays()), crd_for_good, ("orphan", "Deleting")),
        (orphan(deleted(stays())), off, ("orphan", "Deleting")),
        (orphan(deleted(gone_member())), away, ("orphan", "Deleting")),
    ];
    for (tenant, view, expected) in table {
        let verdict = decide(&tenant, &view);
        assert_eq!(outcome(&verdict), expected, "{tenant:?} {view:?}");
        let waits = verdict.step == Step::Nothing
            && ["ClusterUnreachable", "NotPlacing", "MemberLeft"].contains(&expected.1);
        if waits && tenant.metadata.deletion_timestamp.is_some() {
            let message = verdict.placed.unwrap().message;
            assert!(message.contains(ORPHAN_ANNOTATION), "{message}");
        }
    }
}

#[test]
fn order_mirrors_tenant_and_deletion_orders_only_removal() {
    let targets = targets();
    let (member, found) = order(&placed(tenant()), &targets, Deletion::Its).unwrap();
    assert_eq!(member, "edge-1");
    assert_eq!((found.uid.as_str(), found.generation), (UID, 3));
    assert_eq!(found.spec.workspace.as_deref(), Some("acme-ws"));
    assert_eq!(found.spec.values.as_ref().unwrap()["a"], 1);
    assert!(!(found.remove || found.adopt || found.paused));
    let (_, goes) = order(&deleted(placed(tenant())), &targets, Deletion::Its).unwrap();
    assert!(goes.remove && goes.spec == PlacedSpec::default());
    let adopted = annotated(placed(tenant()), ADOPT_ANNOTATION, "true");
    let hers = annotated(adopted, PAUSED_ANNOTATION, "true");
    let (_, hers) = order(&hers, &targets, Deletion::Its).unwrap();
    assert!(hers.adopt && hers.paused);

    // If it names another member later, it stays where it was placed.
    let moved = placed(naming("edge-2"));
    assert_eq!(order(&moved, &targets, Deletion::Its).unwrap().0, "edge-1");
    // If the member no longer allows the namespace, the hub sends no order, except for removal.
    let refused = on_record_at(placed(tenant()), "limited", "cluster-2");
    assert_eq!(order(&refused, &targets, Deletion::Its), None);
    let (_, goes) = order(&deleted(refused), &targets, Deletion::Its).unwrap();
    assert!(goes.remove);
    // Deleting the CRD does not request the removal of any Tenant.
    for deletion in [
        Deletion::NotKnown,
        Deletion::OfTheCrd,
        Deletion::OfTheCrdForGood,
    ] {
        assert_eq!(order(&deleted(placed(tenant())), &targets, deletion), None);
        assert!(order(&placed(tenant()), &targets, deletion).is_some());
    }
    // The user orphaned it.
    let orphan = annotated(deleted(placed(tenant())), ORPHAN_ANNOTATION, "true");
    assert_eq!(order(&orphan, &targets, Deletion::Its), None);
}

#[test]
fn placement_is_recorded_then_held_then_ordered() {
    let mut targets = targets();
    let ordered = |tenant: &Tenant, targets: &Targets| {
        let order = order(tenant, targets, Deletion::Its);
        order.map(|(member, _)| member)
    };
    let verdict = decide(&tenant(), &view(&targets));
    let place = verdict.place.unwrap();
    assert_eq!(
        (place.cluster.as_str(), place.cluster_uid.as_str()),
        ("edge-1", CLUSTER)
    );
    let on_record = on_record_at(tenant(), "edge-1", CLUSTER);
    let begin = Step::Begin("edge-1".to_owned());
    assert_eq!(decide(&on_record, &view(&targets)).step, begin);
    assert_eq!(ordered(&on_record, &targets), None);
    assert_eq!(
        ordered(&placed(tenant()), &targets).as_deref(),
        Some("edge-1")
    );

    // After a client overwrote the metadata and `clusterRef`, the Tenant stays, and gets its finalizer
    // back.
    let elsewhere = naming("limited");
    let nowhere = with_spec(json!({}));
    for tenant in [elsewhere, nowhere] {
        let wiped = wiped(placed(tenant));
        assert_eq!(decide(&wiped, &view(&targets)).step, begin, "{wiped:?}");
        assert_eq!(ordered(&wiped, &targets), None);
        let off = View {
            place: false,
            ..view(&targets)
        };
        assert_eq!(outcome(&decide(&wiped, &off)), ("", "NotPlacing"));
        let early = View {
            targets: None,
            ..view(&targets)
        };
        assert_eq!(decide(&wiped, &early).step, begin);
        let again = on_record_at(held(wiped.clone()), "edge-1", CLUSTER);
        assert_eq!(
            outcome(&decide(&again, &view(&targets))),
            ("", "ClusterRefChanged")
        );
        assert_eq!(ordered(&again, &targets).as_deref(), Some("edge-1"));
        // A deleted Tenant does not get the finalizer back.
        let deleted = deleted(wiped);
        assert_eq!(decide(&deleted, &view(&targets)).step, Step::Nothing);
        assert_eq!(ordered(&deleted, &targets), None);
    }

    // The cluster's UID is not known yet.
    targets.get_mut("edge-1").unwrap().cluster_uid = None;
    for silent in [None, Some("no agent")] {
        let base = view(&targets);
        let verdict = decide(&tenant(), &View { silent, ..base });
        assert_eq!(outcome(&verdict), ("", "ClusterUnreachable"));
    }
}

#[test]
fn order_goes_to_recorded_cluster_under_any_name() {
    let gone = report(UID, true, "TenantGone");
    let at = |names: &[(&str, Option<&str>)]| -> Targets {
        let target = |uid: Option<&str>| Target {
            cluster_uid: uid.map(str::to_owned),
            ..Target::default()
        };
        let named = names.iter();
        named
            .map(|(name, uid)| ((*name).to_owned(), target(*uid)))
            .collect()
    };
    let another = ("edge-1", Some("cluster-8"));
    let away = |why| (None, ("", why), ("", why));
    let asked = |member| (Some(member), ("", "TenantGone"), ("end", "TenantGone"));
    let by_name = |step, member| (Some(member), (step, "TenantGone"), ("end", "TenantGone"));
    // The member with the order, the verdict, and the verdict on a deleted Tenant once the member reports
    // it gone.
    let only = |name, uid| at(&[(name, uid)]);
    let moved = || at(&[another, ("edge-7", Some(CLUSTER))]);
    let changed = away("ClusterIdentityChanged");
    let unreachable = away("ClusterUnreachable");
    let table = [
        (
            placed(tenant()),
            only("edge-1", Some(CLUSTER)),
            asked("edge-1"),
        ),
        (placed(tenant()), at(&[another]), changed),
        (placed(tenant()), only("edge-1", None), unreachable),
        (placed(tenant()), at(&[]), away("MemberLeft")),
        (
            placed(tenant()),
            only("self-cluster", Some(CLUSTER)),
            away("MemberLeft"),
        ),
        (placed(tenant()), moved(), asked("edge-7")),
        (
            placed(naming("edge-7")),
            only("edge-7", Some(CLUSTER)),
            asked("edge-7"),
        ),
        // Placed by an older hub.
        (held(tenant()), at(&[another]), by_name("record", "edge-1")),
        (held(tenant()), only("edge-1", None), by_name("", "edge-1")),
        (held(tenant()), at(&[]), away("MemberLeft")),
    ];
    for (tenant, targets, (asked, stays, goes)) in table {
        let member = order(&tenant, &targets, Deletion::Its).map(|(member, _)| member);
        assert_eq!(member.as_deref(), asked, "{tenant:?} {targets:?}");
        let view = View {
            said: Some(&gone),
            ..view(&targets)
        };
        assert_eq!(
            outcome(&decide(&tenant, &view)),
            stays,
            "{tenant:?} {targets:?}"
        );
        let deleted = deleted(tenant);
        let member = order(&deleted, &targets, Deletion::Its).map(|(member, _)| member);
        assert_eq!(member.as_deref(), asked, "{deleted:?} {targets:?}");
        let verdict = decide(&deleted, &view);
        assert_eq!(outcome(&verdict), goes, "{deleted:?} {targets:?}");
        let orphan = annotated(deleted, ORPHAN_ANNOTATION, "true");
        assert_eq!(outcome(&decide(&orphan, &view)), ("orphan", "Deleting"));
        if asked.is_none() {
            let message = verdict.placed.unwrap().message;
            assert!(message.contains(ORPHAN_ANNOTATION), "{message}");
        }
    }
}

#[test]
fn ready_takes_placement_reason_without_member_report() {
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
