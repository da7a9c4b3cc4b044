//! One state for each promise that violates it.

use super::*;
use crate::snapshot::ObjectSeen;

const ONE: Tenant = Tenant(0);
const TWO: Tenant = Tenant(1);

fn expected() -> ExpectedFleet {
    let tenant_state = |workspace, has_foreign_finalizer| ExpectedTenant {
        workspace,
        has_foreign_finalizer,
    };
    ExpectedFleet {
        repository: "http://charts".to_owned(),
        version: "1.0.0".to_owned(),
        message: "m-1".to_owned(),
        replicas: 1,
        hubs: 2,
        tenants: [
            (ONE, tenant_state(Workspace::Own, false)),
            (TWO, tenant_state(Workspace::Shared(0), true)),
        ]
        .into(),
        foreign: [(
            (Edge::One, "ConfigMap t-000-ws/foreign-1".to_owned()),
            "{}".to_owned(),
        )]
        .into(),
    }
}

fn condition(status: &str) -> (String, String, String) {
    (status.to_owned(), "Reason".to_owned(), "message".to_owned())
}

fn tenant(tenant: Tenant, tenant_state: &ExpectedTenant, chart: &str) -> TenantSeen {
    let mut finalizers = vec![names::TENANT_FINALIZER.to_owned()];
    if tenant_state.has_foreign_finalizer {
        finalizers.push(FOREIGN_FINALIZER.to_owned());
    }
    TenantSeen {
        uid: "uid".to_owned(),
        finalizers,
        workspace: tenant_state.workspace.namespace(tenant),
        generation: 2,
        observed: 2,
        phase: "Ready".to_owned(),
        chart: chart.to_owned(),
        conditions: [
            ("Ready".to_owned(), condition("True")),
            (
                format!("ClusterReady/{}", tenant.edge().name()),
                condition("True"),
            ),
        ]
        .into(),
        deleting: false,
    }
}

fn revision(number: u32, status: &str, expected: &ExpectedFleet) -> RevisionSeen {
    RevisionSeen {
        number,
        status: status.to_owned(),
        fingerprint: expected.chart().fingerprint(),
        content: Ok((status.to_owned(), expected.version.clone())),
    }
}

/// Returns a state without violations.
fn healthy() -> Snapshot {
    let expected = expected();
    let mut snapshot = Snapshot::default();
    for edge in Edge::ALL {
        let conditions = [("Connected", "True"), ("Healthy", "True")];
        let conditions = conditions.map(|(kind, status)| (kind.to_owned(), condition(status)));
        snapshot
            .members
            .insert(edge.name().to_owned(), conditions.into());
        let mut edge_state = EdgeSeen::default();
        for (tenant_slot, tenant_state) in expected
            .tenants
            .iter()
            .filter(|(tenant_slot, _)| tenant_slot.edge() == edge)
        {
            let chart = expected.chart().applied_name();
            let observed = tenant(*tenant_slot, tenant_state, &chart);
            snapshot.home.insert(tenant_slot.name(), observed.clone());
            edge_state.tenants.insert(tenant_slot.name(), observed);
            let namespace = tenant_state.workspace.namespace(*tenant_slot);
            let key = (namespace, tenant_slot.release());
            let numbered = [(1, "superseded"), (2, "deployed")];
            let revisions = numbered.map(|(number, status)| revision(number, status, &expected));
            edge_state.releases.insert(key.clone(), revisions.into());
            for kind in Object::ALL {
                let object = ObjectSeen {
                    uid: "uid".to_owned(),
                    release: tenant_slot.release(),
                    content: expected.content(kind),
                };
                edge_state.objects.insert((kind, key.clone()), object);
            }
            let created_by_krypton = tenant_state.workspace == Workspace::Own;
            let namespace = NamespaceSeen {
                terminating: false,
                created_by_krypton,
            };
            edge_state.namespaces.insert(key.0, namespace);
        }
        snapshot.edges.insert(edge, edge_state);
    }
    snapshot.hubs = [(HubId::A, false), (HubId::B, true)].into();
    snapshot.holder = "hub/hub-b/1".to_owned();
    let foreign = &mut snapshot.edges.get_mut(&Edge::One).unwrap().foreign;
    foreign.insert("ConfigMap t-000-ws/foreign-1".to_owned(), "{}".to_owned());
    snapshot
}

/// Returns the edge cluster of `ONE`, and the place of its release.
fn edge_one(seen: &mut Snapshot) -> (&mut EdgeSeen, ObjectKey) {
    let key = ("t-000-ws".to_owned(), ONE.release());
    (seen.edges.get_mut(&Edge::One).unwrap(), key)
}

fn tenant_one(seen: &mut Snapshot) -> &mut TenantSeen {
    edge_one(seen).0.tenants.get_mut("t-000").unwrap()
}

fn own_namespace() -> NamespaceSeen {
    NamespaceSeen {
        terminating: false,
        created_by_krypton: true,
    }
}

fn set_condition(tenant: &mut TenantSeen, kind: &str, status: &str) {
    let condition = condition(status);
    tenant.conditions.insert(kind.to_owned(), condition);
}

fn home_one(seen: &mut Snapshot) -> &mut TenantSeen {
    seen.home.get_mut("t-000").unwrap()
}

fn revisions(seen: &mut Snapshot) -> &mut Vec<RevisionSeen> {
    let (edge, key) = edge_one(seen);
    edge.releases.get_mut(&key).unwrap()
}

#[test]
fn healthy_snapshot_breaks_no_promise() {
    assert_eq!(find_violations(&expected(), &healthy()), []);
}

type BreakPromise = fn(&mut Snapshot);

/// Each violation with the violated promise.
const VIOLATIONS: &[(&str, BreakPromise)] = &[
    ("a live Tenant stays", |seen| {
        edge_one(seen).0.tenants.remove("t-000");
    }),
    ("a live Tenant stays", |seen| {
        tenant_one(seen).deleting = true
    }),
    ("the spec is unchanged", |seen| {
        tenant_one(seen).workspace = "other".to_owned();
    }),
    ("no finalizer is lost", |seen| {
        tenant_one(seen).finalizers.clear()
    }),
    ("no foreign finalizer is changed", |seen| {
        let edge = seen.edges.get_mut(&Edge::Two).unwrap();
        edge.tenants.get_mut("t-001").unwrap().finalizers.pop();
    }),
    ("the status is correct", |seen| {
        tenant_one(seen).observed = 1
    }),
    ("the status is correct", |seen| {
        tenant_one(seen).chart = "http://charts/small:0.9.0".to_owned();
    }),
    ("the status is correct", |seen| {
        tenant_one(seen).phase = "Error".to_owned();
    }),
    ("the status is correct", |seen| {
        set_condition(tenant_one(seen), "Ready", "Unknown");
    }),
    ("home's status is correct", |seen| {
        seen.home.remove("t-000");
    }),
    ("home's status is correct", |seen| {
        set_condition(home_one(seen), "ClusterReady/edge-1", "Unknown");
    }),
    ("home's status is correct", |seen| {
        set_condition(home_one(seen), "ClusterReady/edge-2", "True");
    }),
    ("home's status is correct", |seen| {
        let conditions = seen.members.get_mut("edge-2").unwrap();
        conditions.insert("Connected".to_owned(), condition("False"));
    }),
    ("exactly one hub leads", |seen| {
        seen.hubs.insert(HubId::A, true);
    }),
    ("exactly one hub leads", |seen| {
        seen.hubs.insert(HubId::B, false);
    }),
    ("exactly one hub leads", |seen| {
        seen.hubs.remove(&HubId::A);
    }),
    ("exactly one hub leads", |seen| {
        seen.holder = "hub/hub-a/1".to_owned()
    }),
    ("exactly one hub leads", |seen| seen.holder.clear()),
    ("there is one release", |seen| {
        let (edge, key) = edge_one(seen);
        edge.releases.remove(&key);
    }),
    ("there is one release", |seen| {
        let copy = revisions(seen).clone();
        let key = ("t-000".to_owned(), ONE.release());
        edge_one(seen).0.releases.insert(key, copy);
    }),
    ("one revision, the newest, is deployed", |seen| {
        let third = revision(3, "pending-upgrade", &expected());
        revisions(seen).push(third);
    }),
    ("one revision, the newest, is deployed", |seen| {
        let second = revision(2, "failed", &expected());
        *revisions(seen).last_mut().unwrap() = second;
    }),
    ("one revision, the newest, is deployed", |seen| {
        let first = revision(1, "deployed", &expected());
        *revisions(seen).first_mut().unwrap() = first;
    }),
    ("the release is the desired one", |seen| {
        revisions(seen).last_mut().unwrap().fingerprint.clear();
    }),
    ("the release is the desired one", |seen| {
        let previous = Ok(("deployed".to_owned(), "0.9.0".to_owned()));
        revisions(seen).last_mut().unwrap().content = previous;
    }),
    ("the release is the desired one", |seen| {
        let damaged = Err("damaged".to_owned());
        revisions(seen).last_mut().unwrap().content = damaged;
    }),
    ("the objects match the chart", |seen| {
        let (edge, key) = edge_one(seen);
        edge.objects.remove(&(Object::Service, key));
    }),
    ("the objects match the chart", |seen| {
        let (edge, key) = edge_one(seen);
        let map = edge.objects.get_mut(&(Object::ConfigMap, key)).unwrap();
        map.content.insert("message".to_owned(), "m-0".to_owned());
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let leftover = tenant_one(seen).clone();
        let (edge, _) = edge_one(seen);
        edge.tenants.insert("t-008".to_owned(), leftover);
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let leftover = seen.home["t-000"].clone();
        seen.home.insert("t-008".to_owned(), leftover);
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let key = ("t-008-ws".to_owned(), Tenant(8).release());
        let leftover = revisions(seen).clone();
        edge_one(seen).0.releases.insert(key, leftover);
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let leftover = ObjectSeen {
            release: Tenant(8).release(),
            ..ObjectSeen::default()
        };
        let key = ("theirs-0".to_owned(), Tenant(8).release());
        let (edge, _) = edge_one(seen);
        edge.objects.insert((Object::ConfigMap, key), leftover);
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let namespaces = &mut edge_one(seen).0.namespaces;
        namespaces.insert("t-008-ws".to_owned(), own_namespace());
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let (edge, _) = edge_one(seen);
        edge.namespaces.get_mut("t-000-ws").unwrap().terminating = true;
    }),
    ("no foreign object is changed", |seen| {
        edge_one(seen).0.foreign.clear()
    }),
    ("no foreign object is changed", |seen| {
        let foreign = edge_one(seen).0.foreign.values_mut();
        foreign.for_each(|content| *content = "{ }".to_owned());
    }),
];

#[test]
fn each_violation_breaks_its_promise() {
    for (number, (promise, break_promise)) in VIOLATIONS.iter().enumerate() {
        let mut seen = healthy();
        break_promise(&mut seen);
        let violations = find_violations(&expected(), &seen);
        let mut promises = violations.iter().map(|violation| violation.promise);
        let is_found = promises.any(|found| found == *promise);
        assert!(is_found, "row {number}: {promise}: {violations:#?}");
    }
}

#[test]
fn namespace_with_foreign_objects_stays() {
    for foreign_release in [true, false] {
        let mut seen = healthy();
        let foreign = revisions(&mut seen).clone();
        let edge = edge_one(&mut seen).0;
        edge.namespaces
            .insert("t-008-ws".to_owned(), own_namespace());
        if foreign_release {
            let key = ("t-008-ws".to_owned(), "foreign-3".to_owned());
            edge.releases.insert(key, foreign);
        } else {
            let foreign = "ConfigMap t-008-ws/foreign-1".to_owned();
            edge.foreign.insert(foreign, "{}".to_owned());
        }
        let violations = find_violations(&expected(), &seen);
        assert_eq!(violations, [], "release: {foreign_release}");
    }
}

#[test]
fn silent_edge_violates_promises() {
    let mut seen = healthy();
    seen.edges.remove(&Edge::Two);
    assert!(!find_violations(&expected(), &seen).is_empty());
}
