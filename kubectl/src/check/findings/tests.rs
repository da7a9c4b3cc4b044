use std::path::Path;

use krypton_crds::tenant::Tenant;
use kube::ResourceExt as _;
use serde_json::json;

use super::*;
use crate::statement::text;

fn now() -> Timestamp {
    "2026-01-02T03:04:05Z".parse().unwrap()
}

fn refused<T>() -> Answer<T> {
    Answer::NotPermitted("get it".to_owned())
}

#[test]
fn old_kubernetes_fails_and_newer_passes() {
    let cases = [
        ("1", "29", Mark::Wrong),
        ("1", "30", Mark::Well),
        ("1", "30+", Mark::Well),
        ("1", "", Mark::Well),
        ("2", "1", Mark::Well),
    ];
    for (major, minor, mark) in cases {
        let info = Info {
            major: major.to_owned(),
            minor: minor.to_owned(),
            git_version: "v1".to_owned(),
            ..Info::default()
        };
        let found = kubernetes(&Answer::Found(info));
        assert_eq!(found.mark, mark, "{major}.{minor}");
    }
    assert_eq!(kubernetes(&refused()).mark, Mark::NotKnown);
    let failed = text(&[kubernetes(&Answer::Failed("no route".to_owned()))]);
    assert!(
        failed.starts_with("✗ the API server does not respond: no route\n"),
        "{failed}"
    );
}

#[test]
fn missing_rights_are_named() {
    let rights = [
        ("secrets", Answer::Found(true)),
        ("services", Answer::Found(true)),
    ];
    let granted = "✓ you may create what the charts contain\n";
    assert_eq!(text(&[super::rights(&rights)]), granted);
    let [secrets, _] = rights;
    let found = super::rights(&[
        secrets,
        ("services", Answer::Found(false)),
        ("pods", refused()),
    ]);
    let denied = "✗ you may not create services\n    → see docs/how-to/install.md#prerequisites\n";
    assert_eq!(text(&[found]), denied);
    assert_eq!(super::rights(&[("pods", refused())]).mark, Mark::NotKnown);
}

fn served(mut crd: CustomResourceDefinition) -> (String, Answer<CustomResourceDefinition>) {
    let conditions =
        json!([{"type": "Established", "status": "True", "reason": "", "message": ""}]);
    let status = json!({"conditions": conditions});
    crd.status = serde_json::from_value(status).unwrap();
    (crd.name_any(), Answer::Found(crd))
}

#[test]
fn crds_are_judged_by_schema_version() {
    let all = || {
        krypton_crds::all()
            .into_iter()
            .map(served)
            .collect::<Vec<_>>()
    };
    assert_eq!(text(&crds(&all())), "✓ 3 CRDs are served\n");
    assert_eq!(crds_of_original(&all()), []);

    let old = |version: Option<&str>| {
        let mut crd = Tenant::crd();
        let mark = krypton_crds::SCHEMA_VERSION_ANNOTATION.to_owned();
        crd.metadata.annotations = version.map(|version| [(mark, version.to_owned())].into());
        served(crd)
    };
    let tenants = "tenants.mesh.openkcm.io";
    let unserved = (tenants.to_owned(), Answer::Found(Tenant::crd()));
    let missing = |name: &str| (name.to_owned(), Answer::None);
    let cases = [
        (old(Some("1")), Mark::Note, "has schema version 1, and"),
        (old(None), Mark::Note, "has no schema version"),
        (old(Some("9999")), Mark::Well, "1 CRDs are served"),
        (unserved, Mark::Wrong, "does not serve the CRD"),
        (missing(tenants), Mark::Wrong, "is missing"),
        (
            missing(KryptonDeployment::crd_name()),
            Mark::Note,
            "KryptonDeployments",
        ),
        (
            (tenants.to_owned(), refused()),
            Mark::Note,
            "you may not get it",
        ),
    ];
    for (given, mark, expected) in cases {
        let found = crds(&[given]);
        assert_eq!(found[0].mark, mark, "{found:?}");
        assert!(found[0].text.contains(expected), "{found:?}");
    }
    assert_eq!(crds_of_original(&[old(None)]).len(), 1);
}

fn lease(renewed: &str) -> Answer<Lease> {
    let spec = json!({"holderIdentity": "hub/a", "renewTime": renewed, "leaseDurationSeconds": 5});
    Answer::Found(serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap())
}

#[test]
fn missing_or_silent_leader_fails() {
    let namespaces = ["krypton".to_owned()];
    let of = |lease| leader(&lease, &namespaces, now());
    assert_eq!(
        text(&of(lease("2026-01-02T03:04:00.000000Z"))),
        "✓ the hub hub/a leads\n"
    );
    let silent = text(&of(lease("2026-01-02T03:00:00.000000Z")));
    assert!(silent.starts_with("✗ no hub has led since"), "{silent}");
    assert!(silent.contains("#kryptonhubnoleader"), "{silent}");
    let none = text(&of(Answer::None));
    assert!(
        none.starts_with("✗ no hub runs in the namespace krypton\n"),
        "{none}"
    );
    assert_eq!(of(refused())[0].mark, Mark::NotKnown);
    assert_eq!(hub_version(PROGRAM).mark, Mark::Well);
    assert_eq!(hub_version("0.0.1").mark, Mark::Note);
}

fn cluster(name: &str, spec: Value, connected: &str, more: Value) -> Value {
    let condition = json!({
        "type": "Connected", "status": connected, "reason": "AgentAway", "message": "no contact",
        "lastTransitionTime": "2026-01-02T03:00:05Z",
    });
    let mut status = json!({"conditions": [condition], "mode": "agent", "agentVersion": PROGRAM});
    for (key, value) in more.as_object().unwrap() {
        status[key] = value.clone();
    }
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1", "kind": "EdgeCluster",
        "metadata": {"name": name}, "spec": spec, "status": status,
    })
}

fn of(fleet: Vec<Value>) -> Vec<Line> {
    members(&Ok(fleet), Some(PROGRAM), now())
}

#[test]
fn well_members_share_one_line() {
    let fleet = vec![
        cluster("edge-1", json!({}), "True", json!({})),
        cluster("edge-2", json!({}), "False", json!({})),
        cluster("edge-3", json!({}), "True", json!({})),
    ];
    let found = text(&of(fleet));
    let expected = "✓ 2 of 3 members are connected, and up to date\nedge-2\n  ✗ no contact";
    assert!(found.starts_with(expected), "{found}");
    assert_eq!(of(Vec::new())[0].mark, Mark::Note);
}

#[test]
fn each_defect_of_member_is_shown() {
    let counts = json!({"tenants": {"total": 4, "ready": 3, "pending": 0, "error": 1}});
    let cases = [
        (json!({"paused": true}), json!({}), "! paused"),
        (
            json!({"accepted": false}),
            json!({}),
            "kubectl krypton accept edge-1",
        ),
        (json!({}), counts, "! 1 of 4 Tenants are in phase Error"),
        (
            json!({}),
            json!({"agentVersion": "0.0.1"}),
            "! its agent has version 0.0.1",
        ),
    ];
    for (spec, status, expected) in cases {
        let lines = of(vec![cluster("edge-1", spec, "True", status)]);
        assert!(
            lines.iter().all(|line| line.mark != Mark::Wrong),
            "{lines:?}"
        );
        assert!(text(&lines).contains(expected), "{lines:?}");
    }
    let banned = of(vec![cluster(
        "edge-1",
        json!({"banned": true}),
        "False",
        json!({}),
    )]);
    assert!(
        banned.iter().all(|line| line.mark != Mark::Wrong),
        "{banned:?}"
    );
    let mut broken = cluster("edge-1", json!({}), "True", json!({}));
    broken["spec"] = json!({"paused": "perhaps"});
    assert_eq!(of(vec![broken])[0].mark, Mark::Wrong);
}

#[test]
fn only_worst_members_have_lines() {
    let paused = |n| {
        cluster(
            &format!("edge-{n:02}"),
            json!({"paused": true}),
            "True",
            json!({}),
        )
    };
    let mut fleet: Vec<Value> = (0..30).map(paused).collect();
    fleet.push(cluster("lost", json!({}), "False", json!({})));
    let lines = of(fleet);
    assert!(lines[0].text.starts_with("11 more members"), "{lines:?}");
    assert_eq!(lines[1].member.as_deref(), Some("lost"));
    let named = lines.iter().filter_map(|line| line.member.as_deref());
    let named: std::collections::BTreeSet<&str> = named.collect();
    assert_eq!(named.len(), MEMBERS_MOST);
}

#[test]
fn remedies_name_existing_headings() {
    let remedies = [INSTALL, CRDS, ORIGINAL, HUB, SKEW, NO_MEMBER, TENANTS];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for remedy in remedies {
        let link = remedy.split(' ').find(|word| word.starts_with("docs/"));
        let link = link.unwrap().trim_end_matches(';');
        let (page, heading) = link.split_once('#').unwrap_or((link, ""));
        let page = std::fs::read_to_string(root.join(page)).expect(link);
        let anchor = |title: &str| title.to_lowercase().replace(' ', "-");
        let mut titles = page.lines().filter_map(|line| line.strip_prefix("## "));
        assert!(
            heading.is_empty() || titles.any(|title| anchor(title) == heading),
            "{link}"
        );
    }
}
