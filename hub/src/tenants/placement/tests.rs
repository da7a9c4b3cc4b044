use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_types::allowed_namespaces::AllowedNamespaces;
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
    with_record(without_record(tenant), "edge-1", CLUSTER)
}

/// Places the Tenant on edge-1 as an older hub did, without a record.
fn without_record(mut tenant: Tenant) -> Tenant {
    tenant.finalizers_mut().push(PLACED_FINALIZER.to_owned());
    annotated(tenant, PLACED_ON_ANNOTATION, "edge-1")
}

fn with_record(mut tenant: Tenant, cluster: &str, uid: &str) -> Tenant {
    tenant.status.get_or_insert_default().placement = Some(TenantPlacement {
        cluster: cluster.to_owned(),
        cluster_uid: uid.to_owned(),
    });
    tenant
}

/// The Tenant after a client overwrote it without home's metadata.
fn without_metadata(mut tenant: Tenant) -> Tenant {
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

fn with_condition(mut tenant: Tenant, reason: &str) -> Tenant {
    let status = tenant.status.get_or_insert_default();
    let state = State::new(Truth::True, reason, "");
    set_conditions(status, Some(&state), None, 3, Timestamp::UNIX_EPOCH);
    tenant
}

pub(crate) fn targets() -> Targets {
    let cluster = |uid: &str| Target {
        cluster_uid: Some(uid.to_owned()),
        ..Target::default()
    };
    let limited = Target {
        allowed: AllowedNamespaces::new(Some(&["others".to_owned()])),
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

fn report(uid: &str, gone: bool, reason: &str) -> PlacedReport {
    PlacedReport {
        uid: uid.to_owned(),
        observed_generation: 3,
        gone,
        state: State::new(Truth::True, reason, "as the member says"),
    }
}

fn input(targets: &Targets) -> PlacementInput<'_> {
    PlacementInput {
        enabled: true,
        crd_keeps_record: true,
        targets: Some(targets),
        silence: None,
        report: None,
        exceeds_limit: false,
        deletion: TenantDeletionCause::User,
    }
}

/// Returns the order for a Tenant. If it is deleted, a user requested that.
fn user_order(tenant: &Tenant, targets: &Targets) -> Option<(String, PlacedTenant)> {
    order(tenant, targets, TenantDeletionCause::User)
}

/// Returns the member that gets that order.
fn order_member(tenant: &Tenant, targets: &Targets) -> Option<String> {
    user_order(tenant, targets).map(|(member, _)| member)
}

/// The step as a word, and the reason.
fn outcome(decision: &PlacementDecision) -> (&str, &str) {
    let step = match &decision.finalizer {
        None if decision.placement.is_some() => "record",
        None => "",
        Some(FinalizerChange::Add(_)) => "begin",
        Some(FinalizerChange::Remove { orphaned: None }) => "end",
        Some(FinalizerChange::Remove { .. }) => "orphan",
    };
    let condition = decision.condition.as_ref();
    (step, condition.map_or("", |condition| &condition.reason))
}

#[test]
fn tenant_is_placed_on_known_member_allowing_it() {
    let targets = targets();
    let outcome_of = |tenant: &Tenant, input: PlacementInput<'_>| {
        let decision = decide(tenant, &input);
        let (step, reason) = outcome(&decision);
        (step.to_owned(), reason.to_owned())
    };
    let in_namespace = |namespace: &str| {
        let secret = json!({ "secretName": "edge-1", "secretNamespace": namespace });
        with_spec(json!({ "clusterRef": secret }))
    };
    for (tenant, expected) in [
        (tenant(), ("record", "Ordered")),
        (with_spec(json!({})), ("", "")),
        (naming("self-cluster"), ("", "")),
        (naming("edge-9"), ("", "ClusterNotFound")),
        (naming("limited"), ("", "NamespaceNotAllowed")),
        (in_namespace("krypton"), ("record", "Ordered")),
        (in_namespace("other"), ("", "ClusterNotFound")),
        (deleted(tenant()), ("", "")),
    ] {
        let (step, reason) = outcome_of(&tenant, input(&targets));
        assert_eq!((&*step, &*reason), expected, "{tenant:?}");
        // Without the finalizer there is no order, and without the flag nothing happens.
        assert_eq!(user_order(&tenant, &targets), None);
        // If home's CRD drops the record, the hub does not wait for it.
        let dropped = PlacementInput {
            crd_keeps_record: false,
            ..input(&targets)
        };
        let is_placed = expected.0 == "record";
        let step = if is_placed { "begin" } else { expected.0 };
        assert_eq!(outcome_of(&tenant, dropped).0, step);
        let off = PlacementInput {
            enabled: false,
            ..input(&targets)
        };
        assert_eq!(outcome_of(&tenant, off), (String::new(), String::new()));
        // Before the EdgeClusters are known, the hub does not decide.
        let early = PlacementInput {
            targets: None,
            ..input(&targets)
        };
        assert_eq!(outcome_of(&tenant, early).0, "");
    }
}

#[test]
fn placed_condition_follows_member_report_unless_home_overrides() {
    let targets = targets();
    let base = input(&targets);
    let (own, other) = (
        report(UID, false, "Placed"),
        report("home-0", false, "Placed"),
    );
    let gone = report(UID, true, "TenantGone");
    let other_gone = report("home-0", true, "TenantGone");
    let foreign = report(UID, true, "BelongsToAnother");
    let outdated = PlacedReport {
        observed_generation: 2,
        ..report(UID, false, "Placed")
    };
    let reporting = |report| PlacementInput {
        report: Some(report),
        ..base
    };
    let caused_by = |deletion| PlacementInput {
        deletion,
        ..reporting(&gone)
    };
    let silent = PlacementInput {
        silence: Some("no heartbeat"),
        ..reporting(&own)
    };
    let off = PlacementInput {
        enabled: false,
        ..reporting(&own)
    };
    let full = PlacementInput {
        exceeds_limit: true,
        ..reporting(&own)
    };
    let unchanged = || placed(tenant());
    let renamed = || placed(naming("edge-2"));
    let unnamed = || placed(with_spec(json!({})));
    let without_member = || with_record(unchanged(), "edge-2", "cluster-9");
    let lost = || deleted(without_member());
    let deleting = || deleted(unchanged());
    let conditioned = |reason| with_condition(unchanged(), reason);
    let orphan = |tenant| annotated(tenant, ORPHAN_ANNOTATION, "true");
    let unknown_cause = caused_by(TenantDeletionCause::Unknown);
    let crd_deleted = caused_by(TenantDeletionCause::Crd);
    let crd_deleted_for_good = caused_by(TenantDeletionCause::CrdWithoutRestore);
    let orphaned_foreign = ("orphan", "BelongsToAnother");
    let table: Vec<(Tenant, PlacementInput<'_>, (&str, &str))> = vec![
        (unchanged(), base, ("", "Ordered")),
        (conditioned("Placed"), base, ("", "Placed")),
        (conditioned("NotPlacing"), base, ("", "Ordered")),
        (unchanged(), reporting(&own), ("", "Placed")),
        (unchanged(), reporting(&other), ("", "Ordered")),
        (unchanged(), reporting(&gone), ("", "TenantGone")),
        (unchanged(), silent, ("", "ClusterUnreachable")),
        (unchanged(), off, ("", "NotPlacing")),
        (unchanged(), full, ("", "TooMany")),
        (orphan(unchanged()), reporting(&own), ("", "Placed")),
        (renamed(), reporting(&own), ("", "ClusterRefChanged")),
        (unnamed(), reporting(&own), ("", "ClusterRefChanged")),
        (without_member(), reporting(&own), ("", "MemberLeft")),
        (deleting(), base, ("", "Deleting")),
        (deleting(), reporting(&gone), ("end", "TenantGone")),
        (deleting(), reporting(&foreign), orphaned_foreign),
        (unchanged(), reporting(&outdated), ("", "Ordered")),
        (deleted(renamed()), reporting(&gone), ("end", "TenantGone")),
        (deleting(), reporting(&other_gone), ("", "Deleting")),
        (deleting(), silent, ("", "ClusterUnreachable")),
        (deleting(), off, ("", "NotPlacing")),
        (lost(), base, ("", "MemberLeft")),
        (orphan(deleting()), base, ("orphan", "Deleting")),
        (deleting(), unknown_cause, ("", "TenantGone")),
        (deleting(), crd_deleted, ("", "TenantGone")),
        (deleting(), crd_deleted_for_good, ("orphan", "Deleting")),
        (orphan(deleting()), off, ("orphan", "Deleting")),
        (orphan(lost()), silent, ("orphan", "Deleting")),
    ];
    for (tenant, input, expected) in table {
        let decision = decide(&tenant, &input);
        assert_eq!(outcome(&decision), expected, "{tenant:?} {input:?}");
        let is_waiting = decision.finalizer.is_none()
            && ["ClusterUnreachable", "NotPlacing", "MemberLeft"].contains(&expected.1);
        if is_waiting && tenant.metadata.deletion_timestamp.is_some() {
            let message = decision.condition.unwrap().message;
            assert!(message.contains(ORPHAN_ANNOTATION), "{message}");
        }
    }
}

#[test]
fn order_mirrors_tenant_and_deletion_orders_only_removal() {
    let targets = targets();
    let (member, ordered) = user_order(&placed(tenant()), &targets).unwrap();
    assert_eq!(member, "edge-1");
    assert_eq!((ordered.uid.as_str(), ordered.generation), (UID, 3));
    assert_eq!(ordered.spec.workspace.as_deref(), Some("acme-ws"));
    assert_eq!(ordered.spec.values.as_ref().unwrap()["a"], 1);
    assert!(!(ordered.remove || ordered.adopt || ordered.paused));
    let (_, removal) = user_order(&deleted(placed(tenant())), &targets).unwrap();
    assert!(removal.remove && removal.spec == PlacedSpec::default());
    let adopted = annotated(placed(tenant()), ADOPT_ANNOTATION, "true");
    let paused = annotated(adopted, PAUSED_ANNOTATION, "true");
    let (_, paused) = user_order(&paused, &targets).unwrap();
    assert!(paused.adopt && paused.paused);
    let restored = annotated(placed(tenant()), PREVIOUS_UID_ANNOTATION, "home-0,home-00");
    let (_, restored) = user_order(&restored, &targets).unwrap();
    assert!(restored.is_for("home-0") && restored.is_for("home-00"));

    // If it names another member later, it stays where it was placed.
    let moved = placed(naming("edge-2"));
    assert_eq!(order_member(&moved, &targets).as_deref(), Some("edge-1"));
    // If the member no longer allows the namespace, the hub sends no order, except for removal.
    let refused = with_record(placed(tenant()), "limited", "cluster-2");
    assert_eq!(user_order(&refused, &targets), None);
    let (_, removal) = user_order(&deleted(refused), &targets).unwrap();
    assert!(removal.remove);
    // Deleting the CRD does not request the removal of any Tenant.
    for deletion in [
        TenantDeletionCause::Unknown,
        TenantDeletionCause::Crd,
        TenantDeletionCause::CrdWithoutRestore,
    ] {
        assert_eq!(order(&deleted(placed(tenant())), &targets, deletion), None);
        assert!(order(&placed(tenant()), &targets, deletion).is_some());
    }
    // The user orphaned it.
    let orphaned = annotated(deleted(placed(tenant())), ORPHAN_ANNOTATION, "true");
    assert_eq!(user_order(&orphaned, &targets), None);
}

#[test]
fn placement_is_recorded_then_held_then_ordered() {
    let mut targets = targets();
    let decision = decide(&tenant(), &input(&targets));
    let placement = decision.placement.unwrap();
    assert_eq!(
        (placement.cluster.as_str(), placement.cluster_uid.as_str()),
        ("edge-1", CLUSTER)
    );
    let recorded = with_record(tenant(), "edge-1", CLUSTER);
    let add_finalizer = Some(FinalizerChange::Add("edge-1".to_owned()));
    assert_eq!(decide(&recorded, &input(&targets)).finalizer, add_finalizer);
    assert_eq!(order_member(&recorded, &targets), None);
    let member = order_member(&placed(tenant()), &targets);
    assert_eq!(member.as_deref(), Some("edge-1"));

    // After a client overwrote the metadata and `clusterRef`, the Tenant stays, and gets its finalizer
    // back.
    let elsewhere = naming("limited");
    let nowhere = with_spec(json!({}));
    for tenant in [elsewhere, nowhere] {
        let wiped = without_metadata(placed(tenant));
        let decision = decide(&wiped, &input(&targets));
        assert_eq!(decision.finalizer, add_finalizer, "{wiped:?}");
        assert_eq!(order_member(&wiped, &targets), None);
        let off = PlacementInput {
            enabled: false,
            ..input(&targets)
        };
        assert_eq!(outcome(&decide(&wiped, &off)), ("", "NotPlacing"));
        let early = PlacementInput {
            targets: None,
            ..input(&targets)
        };
        assert_eq!(decide(&wiped, &early).finalizer, add_finalizer);
        let again = with_record(without_record(wiped.clone()), "edge-1", CLUSTER);
        let decision = decide(&again, &input(&targets));
        assert_eq!(outcome(&decision), ("", "ClusterRefChanged"));
        assert_eq!(order_member(&again, &targets).as_deref(), Some("edge-1"));
        // A deleted Tenant does not get the finalizer back.
        let deleted = deleted(wiped);
        assert_eq!(decide(&deleted, &input(&targets)).finalizer, None);
        assert_eq!(order_member(&deleted, &targets), None);
    }

    // The cluster's UID is not known yet.
    targets.get_mut("edge-1").unwrap().cluster_uid = None;
    for silence in [None, Some("no agent")] {
        let base = input(&targets);
        let decision = decide(&tenant(), &PlacementInput { silence, ..base });
        assert_eq!(outcome(&decision), ("", "ClusterUnreachable"));
    }
}

#[test]
fn order_goes_to_recorded_cluster_under_any_name() {
    let gone = report(UID, true, "TenantGone");
    let targets_of = |names: &[(&str, Option<&str>)]| -> Targets {
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
    let blocked = |why| (None, ("", why), ("", why));
    let ordered_from = |member| (Some(member), ("", "TenantGone"), ("end", "TenantGone"));
    let by_name = |step, member| (Some(member), (step, "TenantGone"), ("end", "TenantGone"));
    // The member with the order, the decision, and the decision on a deleted Tenant once the member reports
    // it gone.
    let only_target = |name, uid| targets_of(&[(name, uid)]);
    let renamed = targets_of(&[another, ("edge-7", Some(CLUSTER))]);
    let changed = blocked("ClusterIdentityChanged");
    let unreachable = blocked("ClusterUnreachable");
    let same = |name| only_target(name, Some(CLUSTER));
    let left = blocked("MemberLeft");
    let recorded = || placed(tenant());
    let renamed_ref = placed(naming("edge-7"));
    // Placed by an older hub.
    let older = || without_record(tenant());
    let table = [
        (recorded(), same("edge-1"), ordered_from("edge-1")),
        (recorded(), targets_of(&[another]), changed),
        (recorded(), only_target("edge-1", None), unreachable),
        (recorded(), targets_of(&[]), left),
        (recorded(), same("self-cluster"), left),
        (recorded(), renamed, ordered_from("edge-7")),
        (renamed_ref, same("edge-7"), ordered_from("edge-7")),
        (older(), targets_of(&[another]), by_name("record", "edge-1")),
        (older(), only_target("edge-1", None), by_name("", "edge-1")),
        (older(), targets_of(&[]), left),
    ];
    for (tenant, targets, (ordered_from, outcome_kept, outcome_deleted)) in table {
        let member = order_member(&tenant, &targets);
        assert_eq!(member.as_deref(), ordered_from, "{tenant:?} {targets:?}");
        let input = PlacementInput {
            report: Some(&gone),
            ..input(&targets)
        };
        let decision = decide(&tenant, &input);
        assert_eq!(outcome(&decision), outcome_kept, "{tenant:?} {targets:?}");
        let deleted = deleted(tenant);
        let member = order_member(&deleted, &targets);
        assert_eq!(member.as_deref(), ordered_from, "{deleted:?} {targets:?}");
        let decision = decide(&deleted, &input);
        assert_eq!(outcome(&decision), outcome_deleted, "{deleted:?}");
        let orphan = annotated(deleted, ORPHAN_ANNOTATION, "true");
        assert_eq!(outcome(&decide(&orphan, &input)), ("orphan", "Deleting"));
        if ordered_from.is_none() {
            let message = decision.condition.unwrap().message;
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
    set_conditions(&mut status, Some(&waiting_for("edge-1")), None, 1, now);
    let ready = conditions::find(&status.conditions, conditions::READY).unwrap();
    assert_eq!(ready.message, waiting_for("edge-1").message);
    assert_eq!(status.last_message, Some(ready.message));
    let foreign = State::new(Truth::False, reason::BELONGS_TO_ANOTHER, "not this one");
    for (placed, type_) in [
        (waiting_for("edge-1"), conditions::RECONCILING),
        (foreign, conditions::STALLED),
    ] {
        set_conditions(&mut status, Some(&placed), None, 1, now);
        let found = conditions::find(&status.conditions, type_).unwrap();
        assert_eq!(found.message, placed.message);
        // `Ready`, `Placed`, and one of the two.
        assert_eq!(status.conditions.len(), 3, "{status:?}");
    }
    set_conditions(&mut status, None, None, 1, now);
    assert_eq!(
        conditions::find(&status.conditions, conditions::PLACED),
        None
    );
}
