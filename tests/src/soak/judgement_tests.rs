//! One state for each promise that violates it.

use super::*;
use crate::snapshot::ObjectSeen;

const ONE: Tenant = Tenant(0);
const TWO: Tenant = Tenant(1);

fn expected() -> Expected {
    let wanted = |workspace, held| Wanted { workspace, held };
    Expected {
        repository: "http://charts".to_owned(),
        version: "1.0.0".to_owned(),
        message: "m-1".to_owned(),
        replicas: 1,
        hubs: 2,
        tenants: [
            (ONE, wanted(Workspace::Own, false)),
            (TWO, wanted(Workspace::Shared(0), true)),
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

fn tenant(tenant: Tenant, wanted: &Wanted, chart: &str) -> TenantSeen {
    let mut finalizers = vec![names::TENANT_FINALIZER.to_owned()];
    if wanted.held {
        finalizers.push(FOREIGN_FINALIZER.to_owned());
    }
    TenantSeen {
        uid: "uid".to_owned(),
        finalizers,
        workspace: wanted.workspace.namespace(tenant),
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

fn revision(number: u32, status: &str, expected: &Expected) -> RevisionSeen {
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
    let mut seen = Snapshot::default();
    for edge in Edge::ALL {
        let conditions = [("Connected", "True"), ("Healthy", "True")];
        let conditions = conditions.map(|(kind, status)| (kind.to_owned(), condition(status)));
        seen.members
            .insert(edge.name().to_owned(), conditions.into());
        let mut here = EdgeSeen::default();
        for (slot, wanted) in expected
            .tenants
            .iter()
            .filter(|(slot, _)| slot.edge() == edge)
        {
            let chart = expected.chart().applied_name();
            let found = tenant(*slot, wanted, &chart);
            seen.home.insert(slot.name(), found.clone());
            here.tenants.insert(slot.name(), found);
            let place = (wanted.workspace.namespace(*slot), slot.release());
            let revisions = vec![
                revision(1, "superseded", &expected),
                revision(2, "deployed", &expected),
            ];
            here.releases.insert(place.clone(), revisions);
            for kind in Object::ALL {
                let object = ObjectSeen {
                    uid: "uid".to_owned(),
                    release: slot.release(),
                    content: expected.content(kind),
                };
                here.objects.insert((kind, place.clone()), object);
            }
            let made = wanted.workspace == Workspace::Own;
            let namespace = NamespaceSeen {
                terminating: false,
                made,
            };
            here.namespaces.insert(place.0, namespace);
        }
        seen.edges.insert(edge, here);
    }
    seen.hubs = [(Seat::A, false), (Seat::B, true)].into();
    seen.holder = "hub/hub-b/1".to_owned();
    let foreign = &mut seen.edges.get_mut(&Edge::One).unwrap().foreign;
    foreign.insert("ConfigMap t-000-ws/foreign-1".to_owned(), "{}".to_owned());
    seen
}

/// Returns the edge cluster of `ONE`, and the place of its release.
fn here(seen: &mut Snapshot) -> (&mut EdgeSeen, Place) {
    let place = ("t-000-ws".to_owned(), ONE.release());
    (seen.edges.get_mut(&Edge::One).unwrap(), place)
}

fn of_one(seen: &mut Snapshot) -> &mut TenantSeen {
    here(seen).0.tenants.get_mut("t-000").unwrap()
}

fn revisions(seen: &mut Snapshot) -> &mut Vec<RevisionSeen> {
    let (edge, place) = here(seen);
    edge.releases.get_mut(&place).unwrap()
}

#[test]
fn healthy_snapshot_breaks_no_promise() {
    assert_eq!(judge(&expected(), &healthy()), []);
}

type Breaks = fn(&mut Snapshot);

/// Each violation with the violated promise.
const VIOLATIONS: &[(&str, Breaks)] = &[
    ("a live Tenant stays", |seen| {
        here(seen).0.tenants.remove("t-000");
    }),
    ("a live Tenant stays", |seen| of_one(seen).deleting = true),
    ("the spec is unchanged", |seen| {
        of_one(seen).workspace = "other".to_owned();
    }),
    ("no finalizer is lost", |seen| {
        of_one(seen).finalizers.clear()
    }),
    ("no foreign finalizer is changed", |seen| {
        let edge = seen.edges.get_mut(&Edge::Two).unwrap();
        edge.tenants.get_mut("t-001").unwrap().finalizers.pop();
    }),
    ("the status is correct", |seen| of_one(seen).observed = 1),
    ("the status is correct", |seen| {
        of_one(seen).chart = "http://charts/small:0.9.0".to_owned();
    }),
    ("the status is correct", |seen| {
        of_one(seen).phase = "Error".to_owned();
    }),
    ("the status is correct", |seen| {
        let ready = condition("Unknown");
        of_one(seen).conditions.insert("Ready".to_owned(), ready);
    }),
    ("home's status is correct", |seen| {
        seen.home.remove("t-000");
    }),
    ("home's status is correct", |seen| {
        let unheard = condition("Unknown");
        let tenant = seen.home.get_mut("t-000").unwrap();
        tenant
            .conditions
            .insert("ClusterReady/edge-1".to_owned(), unheard);
    }),
    ("home's status is correct", |seen| {
        let tenant = seen.home.get_mut("t-000").unwrap();
        let other = condition("True");
        tenant
            .conditions
            .insert("ClusterReady/edge-2".to_owned(), other);
    }),
    ("home's status is correct", |seen| {
        let conditions = seen.members.get_mut("edge-2").unwrap();
        conditions.insert("Connected".to_owned(), condition("False"));
    }),
    ("exactly one hub leads", |seen| {
        seen.hubs.insert(Seat::A, true);
    }),
    ("exactly one hub leads", |seen| {
        seen.hubs.insert(Seat::B, false);
    }),
    ("exactly one hub leads", |seen| {
        seen.hubs.remove(&Seat::A);
    }),
    ("exactly one hub leads", |seen| {
        seen.holder = "hub/hub-a/1".to_owned()
    }),
    ("exactly one hub leads", |seen| seen.holder.clear()),
    ("there is one release", |seen| {
        let (edge, place) = here(seen);
        edge.releases.remove(&place);
    }),
    ("there is one release", |seen| {
        let again = revisions(seen).clone();
        let place = ("t-000".to_owned(), ONE.release());
        here(seen).0.releases.insert(place, again);
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
        let former = Ok(("deployed".to_owned(), "0.9.0".to_owned()));
        revisions(seen).last_mut().unwrap().content = former;
    }),
    ("the release is the desired one", |seen| {
        let damaged = Err("damaged".to_owned());
        revisions(seen).last_mut().unwrap().content = damaged;
    }),
    ("the objects match the chart", |seen| {
        let (edge, place) = here(seen);
        edge.objects.remove(&(Object::Service, place));
    }),
    ("the objects match the chart", |seen| {
        let (edge, place) = here(seen);
        let map = edge.objects.get_mut(&(Object::ConfigMap, place)).unwrap();
        map.content.insert("message".to_owned(), "m-0".to_owned());
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let left = of_one(seen).clone();
        here(seen).0.tenants.insert("t-008".to_owned(), left);
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let left = seen.home["t-000"].clone();
        seen.home.insert("t-008".to_owned(), left);
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let place = ("t-008-ws".to_owned(), Tenant(8).release());
        let left = revisions(seen).clone();
        here(seen).0.releases.insert(place, left);
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let left = ObjectSeen {
            release: Tenant(8).release(),
            ..ObjectSeen::default()
        };
        let place = ("theirs-0".to_owned(), Tenant(8).release());
        here(seen)
            .0
            .objects
            .insert((Object::ConfigMap, place), left);
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let made = NamespaceSeen {
            terminating: false,
            made: true,
        };
        here(seen).0.namespaces.insert("t-008-ws".to_owned(), made);
    }),
    ("a deleted Tenant leaves nothing", |seen| {
        let (edge, _) = here(seen);
        edge.namespaces.get_mut("t-000-ws").unwrap().terminating = true;
    }),
    ("no foreign object is changed", |seen| {
        here(seen).0.foreign.clear()
    }),
    ("no foreign object is changed", |seen| {
        let foreign = here(seen).0.foreign.values_mut();
        foreign.for_each(|content| *content = "{ }".to_owned());
    }),
];

#[test]
fn each_violation_breaks_its_promise() {
    for (number, (promise, breaks)) in VIOLATIONS.iter().enumerate() {
        let mut seen = healthy();
        breaks(&mut seen);
        let found = judge(&expected(), &seen);
        let promises: Vec<_> = found.iter().map(|found| found.promise).collect();
        assert!(
            promises.contains(promise),
            "row {number}: {promise}: {found:#?}"
        );
    }
}

#[test]
fn namespace_with_foreign_objects_stays() {
    for foreign_release in [true, false] {
        let mut seen = healthy();
        let made = NamespaceSeen {
            terminating: false,
            made: true,
        };
        let foreign = revisions(&mut seen).clone();
        let edge = here(&mut seen).0;
        edge.namespaces.insert("t-008-ws".to_owned(), made);
        if foreign_release {
            let place = ("t-008-ws".to_owned(), "foreign-3".to_owned());
            edge.releases.insert(place, foreign);
        } else {
            let foreign = "ConfigMap t-008-ws/foreign-1".to_owned();
            edge.foreign.insert(foreign, "{}".to_owned());
        }
        assert_eq!(judge(&expected(), &seen), [], "release: {foreign_release}");
    }
}

#[test]
fn silent_edge_violates_promises() {
    let mut seen = healthy();
    seen.edges.remove(&Edge::Two);
    assert!(!judge(&expected(), &seen).is_empty());
}
