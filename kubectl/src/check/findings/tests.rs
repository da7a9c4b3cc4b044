use krypton_crds::tenant::Tenant;
use krypton_runtime::call::ApiError;
use kube::ResourceExt as _;
use serde_json::json;

use super::*;
use crate::error::CallError;
use crate::statement::{docs_url, to_text};
use crate::tests::{condition, now};

fn not_permitted<T>() -> Lookup<T> {
    Lookup::NotPermitted("get it".to_owned())
}

#[track_caller]
fn assert_line(line: &Line, mark: Mark, text: &str) {
    assert_eq!(line.mark, mark, "{line:?}");
    assert!(line.text.contains(text), "{line:?}");
}

#[test]
fn old_kubernetes_fails_and_newer_passes() {
    let cases = [
        ("1", "29", Mark::Problem),
        ("1", "30", Mark::Ok),
        ("1", "30+", Mark::Ok),
        ("1", "", Mark::Ok),
        ("2", "1", Mark::Ok),
    ];
    for (major, minor, mark) in cases {
        let info = Info {
            major: major.to_owned(),
            minor: minor.to_owned(),
            git_version: "v1".to_owned(),
            ..Info::default()
        };
        let line = kubernetes(&Lookup::Found(info));
        assert_eq!(line.mark, mark, "{major}.{minor}");
    }
    assert_eq!(kubernetes(&not_permitted()).mark, Mark::Unknown);
    let output = to_text(&[kubernetes(&Lookup::Failed("no route".to_owned()))]);
    let expected = "✗ the API server does not respond: no route\n";
    assert!(output.starts_with(expected), "{output}");
}

#[test]
fn missing_rights_are_named() {
    let rights = [
        ("secrets", Lookup::Found(true)),
        ("services", Lookup::Found(true)),
    ];
    let expected = "✓ you may create what the charts contain\n";
    assert_eq!(to_text(&[super::rights(&rights)]), expected);
    let [secrets, _] = rights;
    let services = ("services", Lookup::Found(false));
    let line = super::rights(&[secrets, services, ("pods", not_permitted())]);
    let (remedy, page) = INSTALL_RIGHTS;
    let page = docs_url(page);
    let expected = format!("✗ you may not create services\n    → {remedy}; see {page}\n");
    assert_eq!(to_text(&[line]), expected);
    let unknown = super::rights(&[("pods", not_permitted())]);
    assert_eq!(unknown.mark, Mark::Unknown);
}

#[test]
fn rights_of_hub_fail_only_if_missing() {
    let right = |lookup| ("list tenants".to_owned(), lookup);
    let missing = "the hub's account krypton/hub may not list tenants";
    let failed = Lookup::Failed("no route".to_owned());
    for (reviewed, mark, expected) in [
        (Lookup::Found(true), Mark::Ok, "has its rights"),
        (Lookup::Found(false), Mark::Problem, missing),
        (not_permitted(), Mark::Note, "you may not get it"),
        (failed, Mark::Problem, "no route"),
    ] {
        let rights = [right(Lookup::Found(true)), right(reviewed)];
        assert_line(&hub_rights(("krypton", "hub"), &rights), mark, expected);
    }
}

#[test]
fn clock_differences_are_judged_by_size() {
    let cases = [
        (0, Mark::Ok, "agree"),
        (-2, Mark::Ok, "agree"),
        (3, Mark::Note, "is 3 s ahead of that of this machine"),
        (-30, Mark::Note, "is 30 s behind"),
        (31, Mark::Problem, "is 31 s ahead of"),
    ];
    for (seconds, mark, expected) in cases {
        let line = clock(SignedDuration::from_secs(seconds), "this machine");
        assert_line(&line, mark, expected);
    }
}

fn served(mut crd: CustomResourceDefinition) -> (String, Lookup<CustomResourceDefinition>) {
    let conditions =
        json!([{"type": "Established", "status": "True", "reason": "", "message": ""}]);
    let status = json!({"conditions": conditions});
    crd.status = serde_json::from_value(status).unwrap();
    (crd.name_any(), Lookup::Found(crd))
}

#[test]
fn crds_are_judged_by_schema_version() {
    let all_crds: Vec<_> = krypton_crds::all().map(Clone::clone).map(served).into();
    assert_eq!(to_text(&crds(&all_crds)), "✓ 3 CRDs are served\n");
    assert_eq!(crds_of_original(&all_crds), []);

    let crd_with_version = |version: Option<&str>| {
        let mut crd = Tenant::crd().clone();
        let annotation = krypton_crds::SCHEMA_VERSION_ANNOTATION.to_owned();
        crd.metadata.annotations = version.map(|version| [(annotation, version.to_owned())].into());
        served(crd)
    };
    let tenants = "tenants.mesh.openkcm.io";
    let unserved = (tenants.to_owned(), Lookup::Found(Tenant::crd().clone()));
    let missing = |name: &str| (name.to_owned(), Lookup::NotFound);
    let (old, later) = (crd_with_version(Some("1")), crd_with_version(Some("9999")));
    let no_deployments = missing(KryptonDeployment::crd_name());
    let unreadable = (tenants.to_owned(), not_permitted());
    for (crd, mark, expected) in [
        (old, Mark::Note, "has schema version 1, and"),
        (crd_with_version(None), Mark::Note, "has no schema version"),
        (later, Mark::Ok, "1 CRDs are served"),
        (unserved, Mark::Problem, "does not serve the CRD"),
        (missing(tenants), Mark::Problem, "is missing"),
        (no_deployments, Mark::Note, "KryptonDeployments"),
        (unreadable, Mark::Note, "you may not get it"),
    ] {
        assert_line(&crds(&[crd])[0], mark, expected);
    }
    assert_eq!(crds_of_original(&[crd_with_version(None)]).len(), 1);
}

fn lease(renewed: &str) -> Lookup<Lease> {
    let spec = json!({"holderIdentity": "hub/a", "renewTime": renewed, "leaseDurationSeconds": 5});
    Lookup::Found(serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap())
}

#[test]
fn missing_or_silent_leader_fails() {
    let namespaces = ["krypton".to_owned()];
    let leader_lines = |lease| leader(&lease, &namespaces, now());
    let current = to_text(&leader_lines(lease("2026-01-02T03:04:00.000000Z")));
    assert_eq!(current, "✓ the hub hub/a leads\n");
    let expired = to_text(&leader_lines(lease("2026-01-02T03:00:00.000000Z")));
    assert!(expired.starts_with("✗ no hub has led since"), "{expired}");
    assert!(expired.contains("#kryptonhubnoleader"), "{expired}");
    let missing = to_text(&leader_lines(Lookup::NotFound));
    let expected = "✗ no hub runs in the namespace krypton\n";
    assert!(missing.starts_with(expected), "{missing}");
    assert_eq!(leader_lines(not_permitted())[0].mark, Mark::Unknown);
    assert_eq!(hub_version(PROGRAM_VERSION).mark, Mark::Ok);
    assert_eq!(hub_version("0.0.1").mark, Mark::Note);
}

#[test]
fn clock_of_leader_is_compared_by_its_lease() {
    let entry = |fields: Value, time: &str| json!({"fieldsV1": fields, "time": time});
    let output = |stored: &str| {
        let entries = [
            entry(json!({"f:spec": {"f:renewTime": {}}}), stored),
            entry(json!({"f:metadata": {}}), "2026-01-02T09:00:00Z"),
        ];
        let Lookup::Found(mut lease) = lease("2026-01-02T03:04:05.500000Z") else {
            panic!("no Lease");
        };
        lease.metadata.managed_fields = serde_json::from_value(json!(entries)).unwrap();
        to_text(&leader(&Lookup::Found(lease), &[], now()))
    };
    let agree = "✓ the clocks of the API server and of the leading hub agree\n";
    let ahead = "! the clock of the API server is 7 s ahead of that of the leading hub\n";
    let behind = "✗ the clock of the API server is 59 s behind that of the leading hub\n";
    for (stored, expected) in [
        ("2026-01-02T03:04:05Z", agree),
        ("2026-01-02T03:04:15Z", ahead),
        ("2026-01-02T03:03:05Z", behind),
    ] {
        let output = output(stored);
        assert!(output.contains(expected), "{output}");
    }
}

/// A pod of the hub, with this status of its container.
fn pod(ready: &str, container_status: Value) -> Value {
    let conditions = [
        condition("Initialized", "True", "", ""),
        condition("Ready", ready, "ContainersNotReady", "unready"),
    ];
    let status = json!({"conditions": conditions, "containerStatuses": [container_status]});
    json!({"metadata": {"name": "hub-0"}, "status": status})
}

#[test]
fn unready_and_restarted_pods_have_lines() {
    let ended = |at: &str| {
        let ended = json!({"reason": "OOMKilled", "exitCode": 137, "finishedAt": at});
        json!({"restartCount": 5, "lastState": {"terminated": ended}})
    };
    let recent = "2026-01-02T03:03:05Z";
    let mut waiting = ended(recent);
    waiting["state"] = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}});
    let mut deleted = pod("False", json!({}));
    deleted["metadata"]["deletionTimestamp"] = json!(recent);
    let all_ready = "✓ 1 of 1 pods of the hub are Ready\n";
    let assert_pod = |pod: Value, expected: &str| {
        let hub_pods = Ok(Some(("krypton".to_owned(), vec![pod, deleted.clone()])));
        let output = to_text(&pods(&hub_pods, now()));
        assert!(output.contains(expected), "{output}");
        let is_ok = expected == all_ready;
        assert_eq!(output.lines().count() == 1, is_ok, "{output}");
    };
    assert_pod(pod("True", json!({})), all_ready);
    assert_pod(pod("True", ended("2026-01-02T02:04:04Z")), all_ready);
    let line =
        "! the pod krypton/hub-0 has restarted 5 times, last 60s ago: OOMKilled, exit code 137\n";
    assert_pod(pod("True", ended(recent)), line);
    let line = "✗ the pod krypton/hub-0 is not Ready: ContainersNotReady: unready\n";
    assert_pod(pod("False", json!({})), line);
    let line = "✗ the pod krypton/hub-0 is not Ready: CrashLoopBackOff: back-off; it has restarted 5 times";
    assert_pod(pod("False", waiting), line);
    assert_eq!(pods(&Ok(None), now()), []);
}

#[test]
fn viewer_without_pods_passes_the_check() {
    let status = kube::core::Status::failure("no", "Forbidden").with_code(403);
    let error = ApiError::Failed {
        attempt: "listing pods".into(),
        source: Box::new(kube::Error::Api(status.boxed())),
    };
    let error = KubectlError::Call(Box::new(CallError {
        context: "home".to_owned(),
        verb: "list",
        objects: "pods in the namespace krypton".to_owned(),
        resource: "pods".to_owned(),
        plural: "pods".to_owned(),
        error,
    }));
    let lines = pods(&Err(error), now());
    assert_line(&lines[0], Mark::Note, "the verb list on pods");
    let unreachable = pods(&Err(KubectlError::Failed("no".to_owned())), now());
    assert_eq!(unreachable[0].mark, Mark::Unknown);
}

#[test]
fn signing_root_of_ca_is_judged() {
    let root = |from: &str, to: &str| Validity {
        not_before: from.parse().unwrap(),
        not_after: to.parse().unwrap(),
    };
    let old = root("2016-01-01T00:00:00Z", "2026-01-01T00:00:00Z");
    let late = root("2017-01-01T00:00:00Z", "2027-01-01T00:00:00Z");
    let new = root("2026-01-01T00:00:00Z", "2036-01-01T00:00:00Z");
    for (roots, mark, expected) in [
        (vec![new], Mark::Ok, "valid until 2036-01-01T00:00:00Z"),
        (vec![new, old], Mark::Ok, "valid until 2036-01-01T00:00:00Z"),
        (vec![late, new], Mark::Note, "at 2027-01-01T00:00:00Z"),
        (vec![late], Mark::Note, "expires at 2027-01-01T00:00:00Z"),
        (vec![old], Mark::Problem, "expired at 2026-01-01T00:00:00Z"),
    ] {
        let line = authority(&roots, now()).unwrap();
        assert_line(&line, mark, expected);
        let is_ok = mark == Mark::Ok;
        assert_eq!(line.remedy.is_none(), is_ok, "{line:?}");
        assert_eq!(line.docs.is_none(), is_ok, "{line:?}");
    }
    assert_eq!(authority(&[], now()), None);
}

#[test]
fn hub_without_address_gets_a_warning() {
    assert_eq!(addresses(&["hub:7443".to_owned()]), None);
    let output = to_text(&[addresses(&[]).unwrap()]);
    let expected = "! the hub advertises no address, so kubectl krypton join needs --address\n";
    assert!(output.starts_with(expected), "{output}");
    assert!(output.contains("set advertise"), "{output}");
}

fn cluster(name: &str, spec: Value, connected: &str, more: Value) -> Value {
    let condition = condition("Connected", connected, "AgentAway", "no contact");
    let mut status =
        json!({"conditions": [condition], "mode": "agent", "agentVersion": PROGRAM_VERSION});
    for (key, value) in more.as_object().unwrap() {
        status[key] = value.clone();
    }
    crate::tests::cluster(name, spec, status)
}

fn member_lines(fleet: Vec<Value>) -> Vec<Line> {
    members(&Ok(fleet), Some(PROGRAM_VERSION), now())
}

#[test]
fn well_members_share_one_line() {
    let fleet = vec![
        cluster("edge-1", json!({}), "True", json!({})),
        cluster("edge-2", json!({}), "False", json!({})),
        cluster("edge-3", json!({}), "True", json!({})),
    ];
    let output = to_text(&member_lines(fleet));
    let expected = "✓ 2 of 3 members are connected, and up to date\nedge-2\n  ✗ no contact";
    assert!(output.starts_with(expected), "{output}");
    assert_eq!(member_lines(Vec::new())[0].mark, Mark::Note);
}

#[test]
fn clock_of_each_agent_is_judged() {
    let member = |name: &str, mode: &str, clock: Option<&str>| {
        let differs = |status| condition("ClockSynchronized", status, "ClockDiffers", "why");
        let clock = clock.map(differs);
        let connected = condition("Connected", "True", "Connected", "");
        let conditions: Vec<Value> = [connected].into_iter().chain(clock).collect();
        let status = json!({"conditions": conditions, "mode": mode});
        cluster(name, json!({}), "True", status)
    };
    let fleet = vec![
        member("edge-1", "agent", Some("True")),
        member("edge-2", "agent", Some("False")),
        // It has not connected yet.
        member("edge-3", "agent", None),
        member("edge-4", "proxy", Some("True")),
    ];
    let lines = member_lines(fleet);
    let agreeing = "the clocks of 1 of 3 agents agree with the hub's";
    assert_line(&lines[1], Mark::Ok, agreeing);
    assert_line(&lines[2], Mark::Note, "ClockDiffers: why");
    assert_eq!(lines[2].member.as_deref(), Some("edge-2"));
    assert_eq!(lines.len(), 3, "{lines:?}");
    let unknown = member_lines(vec![member("edge-3", "agent", None)]);
    assert_eq!(unknown.len(), 1, "{unknown:?}");
}

#[test]
fn each_defect_of_member_is_shown() {
    let counts = json!({"tenants": {"total": 4, "ready": 3, "pending": 0, "error": 1}});
    let summary = |state: &str, reason: &str| json!({"namespace": "a", "name": "b", "state": state, "reason": reason});
    let failing = summary("Error", "VersionNotFound");
    let tenants = [failing.clone(), failing, summary("NotReady", "Installing")];
    let mut with_reasons = counts.clone();
    with_reasons["tenantSummaries"] = json!({"tenants": tenants, "omitted": 0});
    let soon = "CertificateExpiresSoon";
    let conditions = [
        condition("Connected", "True", "Connected", ""),
        condition("AccessCurrent", "False", soon, "new kubeconfig"),
    ];
    let (paused, not_accepted) = (json!({"paused": true}), json!({"accepted": false}));
    let old_agent = json!({"agentVersion": "0.0.1"});
    let expiring = json!({"conditions": conditions});
    let has_problem = |lines: &[Line]| lines.iter().any(|line| line.mark == Mark::Problem);
    for (spec, status, expected) in [
        (paused, json!({}), "! paused"),
        (not_accepted, json!({}), "kubectl krypton accept edge-1"),
        (json!({}), counts, "! 1 of 4 Tenants are in phase Error\n"),
        (
            json!({}),
            with_reasons,
            "! 1 of 4 Tenants are in phase Error: VersionNotFound\n",
        ),
        (json!({}), old_agent, "! its agent has version 0.0.1"),
        (
            json!({}),
            expiring,
            "! CertificateExpiresSoon: new kubeconfig",
        ),
    ] {
        let lines = member_lines(vec![cluster("edge-1", spec, "True", status)]);
        assert!(!has_problem(&lines), "{lines:?}");
        assert!(to_text(&lines).contains(expected), "{lines:?}");
    }
    let banned = cluster("edge-1", json!({"banned": true}), "False", json!({}));
    let lines = member_lines(vec![banned]);
    assert!(!has_problem(&lines), "{lines:?}");
    let mut broken = cluster("edge-1", json!({}), "True", json!({}));
    broken["spec"] = json!({"paused": "perhaps"});
    assert_eq!(member_lines(vec![broken])[0].mark, Mark::Problem);
}

#[test]
fn only_worst_members_have_lines() {
    let paused = |number| {
        let name = format!("edge-{number:02}");
        cluster(&name, json!({"paused": true}), "True", json!({}))
    };
    let mut fleet: Vec<Value> = (0..30).map(paused).collect();
    fleet.push(cluster("unknown", json!({}), "Unknown", json!({})));
    fleet.push(cluster("lost", json!({}), "False", json!({})));
    let lines = member_lines(fleet);
    assert!(lines[0].text.starts_with("12 more members"), "{lines:?}");
    assert_eq!(lines[1].member.as_deref(), Some("lost"));
    let is_unknown =
        |line: &Line| line.member.as_deref() == Some("unknown") && line.mark == Mark::Unknown;
    assert!(lines.iter().any(is_unknown), "{lines:?}");
    let names = lines.iter().filter_map(|line| line.member.as_deref());
    let names: std::collections::BTreeSet<&str> = names.collect();
    assert_eq!(names.len(), MAX_MEMBERS);
}
