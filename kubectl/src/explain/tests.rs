mod objects;

use std::collections::BTreeMap;

use k8s_openapi::api::coordination::v1::Lease;
use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::tenant::TenantReport;
use serde_json::{Value, json};

use super::remedy;
use super::sources::{ExplanationSources, Lookup, PastEvent, members_to_explain};
use super::*;
use crate::statement::{Mark, to_text};

fn now() -> Timestamp {
    "2026-11-23T00:40:00Z".parse().unwrap()
}

fn key() -> TenantKey {
    TenantKey::new("default", "acme")
}

fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": type_, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-11-23T00:30:00Z",
    })
}

/// A Tenant on edge-1 with these conditions.
fn tenant(ready: (&str, &str, &str), progress: &str, error: Option<(&str, &str)>) -> Value {
    let ready_reason = if ready.0 == "True" {
        "AllClustersReady"
    } else {
        "ClustersNotReady"
    };
    let in_progress = ["Installing", "Upgrading", "Deleting"].contains(&progress);
    let mut conditions = vec![
        condition("Ready", ready.0, ready_reason, "of 1"),
        condition("ClusterReady/edge-1", ready.0, ready.1, ready.2),
        condition(
            "ClusterProgress/edge-1",
            if in_progress { "True" } else { "False" },
            progress,
            "working",
        ),
    ];
    if let Some((reason, message)) = error {
        conditions.push(condition("ClusterError/edge-1", "True", reason, message));
    }
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1", "kind": "Tenant",
        "metadata": {"name": "acme", "namespace": "default", "generation": 1},
        "spec": {},
        "status": {"observedGeneration": 1, "hubEpoch": 3, "conditions": conditions},
    })
}

fn healthy_tenant() -> Value {
    tenant(
        ("True", "Installed", "release installed"),
        "InstallComplete",
        None,
    )
}

fn failed_tenant(next: Value) -> Value {
    let mut tenant = tenant(
        ("False", "InstallFailed", "helm said no"),
        "InstallFailed",
        Some(("InstallFailed", "helm said no")),
    );
    tenant["status"]["nextSteps"] = json!([next]);
    tenant
}

fn edge_cluster() -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1", "kind": "EdgeCluster",
        "metadata": {"name": "edge-1"}, "spec": {},
        "status": {
            "mode": "agent", "agentVersion": "0.1.0", "leaseHolder": "agent/a", "lastSeen": "2026-11-23T00:39:30Z",
            "applied": {"epoch": 3, "generation": 14, "digest": "d"},
            "desired": {"epoch": 3, "generation": 14, "chart": "r/c:1", "since": "2026-11-23T00:20:00Z"},
            "conditions": [
                condition("Connected", "True", "Connected", ""),
                condition("Healthy", "True", "ByAgent", ""),
            ],
        },
    })
}

fn lease(holder: &str, renewed: &str) -> Value {
    json!({"spec": {"holderIdentity": holder, "renewTime": renewed}})
}

fn with_field(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap()[field] = value;
    object
}

/// Replaces the condition of the same type.
fn with_condition(object: Value, new: Value) -> Value {
    let conditions = object.pointer("/status/conditions").unwrap().as_array();
    let mut conditions = conditions.unwrap().clone();
    conditions.retain(|condition| condition["type"] != new["type"]);
    conditions.push(new);
    with_field(object, "/status/conditions", json!(conditions))
}

fn found<T: serde::de::DeserializeOwned>(object: Value) -> Lookup<T> {
    Lookup::Found(serde_json::from_value(object).unwrap())
}

fn sources(tenant: Value, members: &[(&str, Value)]) -> ExplanationSources {
    ExplanationSources {
        tenant: found(tenant),
        member_report: Lookup::NotFound,
        leader_lease: found(lease("hub-0", "2026-11-23T00:39:58.000000Z")),
        edge_lease: Lookup::NotFound,
        hub_namespaces: vec!["krypton".to_owned()],
        members: members
            .iter()
            .map(|(name, object)| ((*name).to_owned(), found(object.clone())))
            .collect(),
        events: Lookup::Found(Vec::new()),
    }
}

fn sources_with_member(tenant: Value, member: Value) -> ExplanationSources {
    sources(tenant, &[("edge-1", member)])
}

#[track_caller]
fn assert_lines(explanation: &Explanation, ready: bool, lines: &[&str]) {
    let output = to_text(&explanation.lines);
    for line in lines {
        assert!(output.contains(line), "{line:?} is not in\n{output}");
    }
    assert_eq!(explanation.ready, ready, "{output}");
}

#[track_caller]
fn assert_explained(sources: &ExplanationSources, ready: bool, lines: &[&str]) {
    let explanation = explanation::explain(&key(), None, sources, now());
    assert_lines(&explanation, ready, lines);
}

#[test]
fn healthy_tenant_is_shown_without_remedy() {
    let sources = sources_with_member(healthy_tenant(), edge_cluster());
    assert_explained(
        &sources,
        true,
        &[
            "✓ Tenant default/acme is on edge-1\n",
            "✓ AllClustersReady: of 1\n",
            "✓ the hub hub-0 leads\n",
            "edge-1\n  ✓ its agent (0.1.0) is connected\n",
            "  ✓ agent/a holds its Lease, and acts there\n",
            "  ✓ it has applied the current desired state 3.14: r/c:1\n",
            "  ✓ Installed: release installed\n",
        ],
    );
    let explanation = explanation::explain(&key(), None, &sources, now());
    assert!(explanation.lines.iter().all(|line| line.mark == Mark::Ok));
    assert!(explanation.lines.iter().all(|line| line.remedy.is_none()));
}

#[test]
fn failure_shows_cause_and_next_step() {
    let retry = |at: &str| json!({"cluster": "edge-1", "action": "Retry", "at": at, "attempts": 3});
    let assert_next = |next: Value, line: &str| {
        let cause = "  ✗ InstallFailed: helm said no\n      → correct the chart";
        let sources = sources_with_member(failed_tenant(next), edge_cluster());
        assert_explained(&sources, false, &[cause, line]);
    };
    let line = "! next: it is retried at 2026-11-23T00:42:05Z (in 2m5s), after 3 failed attempts\n      → now: kubectl krypton resync tenant acme -n default, with the --context of edge-1";
    assert_next(retry("2026-11-23T00:42:05Z"), line);
    let line = "! next: another attempt, due 2026-11-23T00:39:00Z (60s ago), after 3 failed attempts; no result yet";
    assert_next(retry("2026-11-23T00:39:00Z"), line);
    let given_up = json!({"cluster": "edge-1", "action": "GivenUp", "attempts": 1});
    let line = "! next: nothing. Krypton has stopped retrying after 1 failed attempt, until the chart, the values or the Tenant changes\n      → one more: kubectl";
    assert_next(given_up, line);
    let step = |action: &str, at: &str| json!({"cluster": "edge-1", "action": action, "at": at, "attempts": 0});
    let line =
        "! next: Krypton takes over the lock of the release at 2026-11-23T00:50:00Z (in 10m)";
    assert_next(step("Unlock", "2026-11-23T00:50:00Z"), line);
    let line = "! next: its workloads have until 2026-11-23T00:45:00Z (in 5m) to become ready";
    assert_next(step("Wait", "2026-11-23T00:45:00Z"), line);
    // The command ignores the unknown step of a later version.
    let unknown_step = json!({"cluster": "edge-1", "action": "Ponder", "attempts": 0});
    assert_tenant(failed_tenant(unknown_step), false, "✗ InstallFailed");
}

/// Checks the readiness and a line of the explanation of a Tenant on a healthy member.
#[track_caller]
fn assert_tenant(tenant: Value, ready: bool, line: &str) {
    assert_explained(&sources_with_member(tenant, edge_cluster()), ready, &[line]);
}

#[test]
fn tenant_metadata_is_explained() {
    let with = |pointer: &str, value: Value| with_field(healthy_tenant(), pointer, value);
    let annotated = |name: &str, value: &str| with("/metadata/annotations", json!({ name: value }));
    let line = "! paused by an annotation: Krypton writes only its status\n    → kubectl krypton resume tenant acme -n default\n";
    assert_tenant(annotated("mesh.openkcm.io/paused", "true"), true, line);
    let line = "✓ Installed";
    assert_tenant(annotated("mesh.openkcm.io/paused", "false"), true, line);
    let line = "! annotated as an orphan";
    assert_tenant(annotated("mesh.openkcm.io/orphan", "true"), true, line);
    let deleted = with("/metadata/deletionTimestamp", json!("2026-11-23T00:35:00Z"));
    let deleted = with_field(deleted, "/metadata/finalizers", json!(["a/b"]));
    let line = "! being deleted since 2026-11-23T00:35:00Z (5m ago), held by the finalizers a/b\n";
    assert_tenant(deleted, false, line);
    let line = "! it was changed, and its status does not reflect the change yet";
    assert_tenant(with("/metadata/generation", json!(2)), false, line);
    let line = "? it has no status yet\n    → see its events";
    assert_tenant(with("/status", json!({})), false, line);
}

#[test]
fn tenant_conditions_are_explained_with_remedy() {
    let assert_error = |reason: &str, line: &str| {
        let tenant = tenant(("False", reason, "why"), reason, Some((reason, "why")));
        assert_tenant(tenant, false, line);
    };
    let line = "✗ ChartNotLoaded: why\n      → check that the hub can reach the repository";
    assert_error(reason::CHART_NOT_LOADED, line);
    let line = "✗ VersionNotFound: why\n      → correct chart.version";
    assert_error(reason::VERSION_NOT_FOUND, line);
    let line = "✗ ReleaseInUse: why\n      → annotate with mesh.openkcm.io/adopt=true";
    assert_error(reason::RELEASE_IN_USE, line);

    let assert_state = |ready: (&str, &str, &str), progress: &str, line: &str| {
        assert_tenant(tenant(ready, progress, None), ready.0 == "True", line);
    };
    let installing = ("False", "Installing", "w");
    assert_state(installing, "Installing", "! Installing: working\n");
    let message = "install applied, waiting: Deployment a/b: 0 of 1";
    let waiting = condition("ClusterProgress/edge-1", "True", "Installing", message);
    let waiting = with_condition(tenant(installing, "Installing", None), waiting);
    let line = format!("! Installing: {message}\n      → look at the workload");
    assert_tenant(waiting, false, &line);
    let unready = ("False", "NotReady", "Deployment a/b: 0 of 1");
    let line = "✗ NotReady: Deployment a/b: 0 of 1\n      → look at the workload";
    assert_state(unready, "NoChange", line);
    let drifted = ("True", "Installed", "ok; drift: ConfigMap a is deleted");
    let line = "✓ Installed: ok\n  ! it has drifted from its chart: ConfigMap a is deleted";
    assert_state(drifted, "NoChange", line);
    let line = "! Krypton changes nothing there: Paused: working\n      → kubectl krypton resume";
    assert_state(("True", "Installed", ""), "Paused", line);
    let silent = ("Unknown", "ClusterUnreachable", "silent");
    assert_state(silent, "NoChange", "? ClusterUnreachable: silent");
    let ready = ("False", "InstallFailed", "");
    let error = ("InstallFailed", "not ready 300 s after the install: x");
    let line = "! no retry is needed: it is Ready as soon as its workloads are";
    assert_tenant(tenant(ready, "InstallFailed", Some(error)), false, line);
    let target = json!({"clusterRef": {"secretName": "edge-9"}});
    let elsewhere = with_field(healthy_tenant(), "/spec", target);
    let unresolved = condition("TargetClusterResolved", "False", "ClusterNotFound", "none");
    let line = "✗ ClusterNotFound: none\n    → correct spec.clusterRef";
    assert_tenant(with_condition(elsewhere, unresolved), true, line);
    let placement = json!({"cluster": "edge-1", "clusterUid": "u"});
    let placed = with_field(healthy_tenant(), "/status/placement", placement);
    let there = condition("Placed", "False", "AlreadyThere", "somebody's");
    let line = "✓ Tenant default/acme is placed on edge-1 by the home cluster\n✗ AlreadyThere: somebody's\n    → it is shown";
    assert_tenant(with_condition(placed, there), true, line);
    let ordered = condition("Placed", "Unknown", "Ordered", "not yet");
    let line = "? Ordered: not yet";
    assert_tenant(with_condition(healthy_tenant(), ordered), true, line);
}

/// Checks the readiness and lines of the explanation of a healthy Tenant on this member.
#[track_caller]
fn assert_member(member: Value, ready: bool, lines: &[&str]) {
    assert_explained(&sources_with_member(healthy_tenant(), member), ready, lines);
}

#[test]
fn each_member_state_has_its_text() {
    let member = |kind, status, reason, message| {
        with_condition(edge_cluster(), condition(kind, status, reason, message))
    };
    let silent = member("Connected", "False", "AgentAway", "the agent is away");
    let lines = [
        "✗ no contact since 2026-11-23T00:39:30Z (30s ago): AgentAway: the agent is away\n      → look at the agent's log",
        "? agent/a held its Lease at the last contact",
        "? at the last contact, it had applied the current desired state 3.14: r/c:1",
    ];
    assert_member(silent.clone(), false, &lines);
    let lines = ["✗ no contact since 2026-11-23T00:30:00Z (10m ago)"];
    let never_seen = with_field(silent, "/status/lastSeen", Value::Null);
    assert_member(never_seen, false, &lines);
    let with = |pointer: &str, value: Value| with_field(edge_cluster(), pointer, value);
    let line = "✓ the hub reaches it through its kubeconfig";
    assert_member(with("/status/mode", json!("proxy")), true, &[line]);
    let line = "! paused on the EdgeCluster: Krypton writes only status there\n      → kubectl krypton resume cluster edge-1";
    assert_member(with("/spec/paused", json!(true)), true, &[line]);
    let line = "✗ banned: the hub rejects its agent and does not connect to it\n      → kubectl krypton unban edge-1";
    assert_member(with("/spec/banned", json!(true)), true, &[line]);
    let line = "! it has applied desired state 3.13, but not 3.14 (sent since 2026-11-23T00:20:00Z (20m ago)): r/c:1";
    assert_member(with("/status/applied/generation", json!(13)), true, &[line]);
    let line = "! it has applied no desired state yet; the hub sends 3.14: r/c:1";
    assert_member(with("/status/applied", Value::Null), true, &[line]);
    let line = "? the hub has not observed it yet";
    assert_member(with("/status", json!({})), false, &[line]);
    let deleted = with("/metadata/deletionTimestamp", json!("2026-11-23T00:35:00Z"));
    assert_member(deleted, true, &["! it is leaving the fleet"]);
    let observed = member("Healthy", "False", "Observing", "x holds the Lease");
    let line = "! Observing: x holds the Lease\n      → another process";
    assert_member(observed, true, &[line]);
    let duplicate = member("Healthy", "False", "DuplicateCluster", "as edge-2");
    assert_member(duplicate, true, &["! DuplicateCluster: as edge-2"]);
    let expiring = member("CertificateCurrent", "False", "ExpiresSoon", "in 2 d");
    assert_member(expiring, true, &["! ExpiresSoon: in 2 d"]);
    let wrong_clock = member("ClockSynchronized", "False", "ClockDiffers", "by 90 s");
    let line = "! ClockDiffers: by 90 s\n      → restart the agent";
    assert_member(wrong_clock, true, &[line]);
    let mut none = sources_with_member(healthy_tenant(), edge_cluster());
    none.members.insert("edge-1".to_owned(), Lookup::NotFound);
    assert_explained(&none, false, &["✗ no EdgeCluster has this name"]);
}

#[test]
fn without_a_hub_nothing_counts_as_ready() {
    let assert_not_ready = |leader_lease: Lookup<Lease>, lines: &[&str]| {
        let sources = ExplanationSources {
            leader_lease,
            ..sources_with_member(healthy_tenant(), edge_cluster())
        };
        assert_explained(&sources, false, lines);
    };
    let expired = found(lease("hub-0", "2026-11-23T00:30:00.000000Z"));
    let line = "✗ no hub has led since 2026-11-23T00:30:00Z (10m ago)";
    assert_not_ready(expired, &[line, "→ look at the hub's pods"]);
    let released = found(lease("", "2026-11-23T00:39:55.000000Z"));
    let line = "✗ no hub has led since 2026-11-23T00:39:55Z (5s ago)";
    assert_not_ready(released, &[line, "→ look at the hub's pods"]);
    let line =
        "? there is no Lease of a hub in the namespace krypton\n    → name the hub's namespace";
    assert_not_ready(Lookup::NotFound, &[line]);
    let of_future = found(lease("hub-0", "2026-11-23T00:45:00.000000Z"));
    let line =
        "? the Lease holder is not known: the Lease was renewed at 2026-11-23T00:45:00Z (in 5m)";
    assert_not_ready(of_future, &[line, "→ compare the clock"]);
    // The hub is gone, regardless of the last status.
    let last_seen = json!("2026-11-23T00:34:00Z");
    let not_seen = with_field(edge_cluster(), "/status/lastSeen", last_seen);
    let line = "? the home cluster shows it as connected, but it last responded at 2026-11-23T00:34:00Z (6m ago)";
    assert_member(not_seen, false, &[line]);
}

#[test]
fn unreadable_source_is_shown_as_unknown() {
    let nothing_readable = ExplanationSources {
        tenant: Lookup::NotPermitted("get tenants".to_owned()),
        member_report: Lookup::NotFound,
        leader_lease: Lookup::Failed("no response within 10 s".to_owned()),
        edge_lease: Lookup::NotFound,
        hub_namespaces: Vec::new(),
        members: BTreeMap::new(),
        events: Lookup::NotPermitted("list events".to_owned()),
    };
    assert_explained(
        &nothing_readable,
        false,
        &[
            "? Tenant default/acme is not known: you may not get tenants\n",
            "? the leader of the hubs is not known: no response within 10 s\n",
            "? the list of recent events is not known: you may not list events\n",
        ],
    );
    let mut member = sources_with_member(healthy_tenant(), edge_cluster());
    let not_permitted = Lookup::NotPermitted("get edgeclusters".to_owned());
    member.members.insert("edge-1".to_owned(), not_permitted);
    let line = "? the state of this member is not known: you may not get edgeclusters";
    assert_explained(&member, false, &[line]);
}

#[test]
fn tenant_only_on_member_is_explained_from_report() {
    let sources = |state: ClusterState| ExplanationSources {
        tenant: Lookup::NotFound,
        member_report: Lookup::Found(TenantReport {
            applied_chart: "r/c:1".to_owned(),
            ..TenantReport::new(1, state)
        }),
        ..sources_with_member(healthy_tenant(), edge_cluster())
    };
    let state = |truth, reason| State::new(truth, reason, "a message");
    let installed = ClusterState::from(state(Truth::True, "Installed"));
    let failed = ClusterState {
        error: Some(state(Truth::True, "InstallFailed")),
        ..ClusterState::from(state(Truth::False, "NotReady"))
    };
    let upgrade_failed = ClusterState {
        error: Some(state(Truth::True, "VersionNotFound")),
        ..installed.clone()
    };
    for (state, ready, line) in [
        (installed, true, "✓ Installed: a message"),
        (upgrade_failed, false, "✗ VersionNotFound: a message"),
        (failed, false, "✗ InstallFailed: a message"),
    ] {
        let explanation = explanation::explain(&key(), Some("edge-1"), &sources(state), now());
        let lines = ["✓ Tenant default/acme exists only on edge-1", line];
        assert_lines(&explanation, ready, &lines);
    }
}

#[test]
fn explain_works_without_home_tenant_and_on_edge() {
    let mut without_tenant = sources_with_member(healthy_tenant(), edge_cluster());
    without_tenant.tenant = Lookup::NotFound;
    assert_explained(
        &without_tenant,
        false,
        &[
            "? the home cluster has no Tenant default/acme\n    → if it exists only on a member",
            "✓ its agent (0.1.0) is connected",
            "? the home cluster has no report of this Tenant there",
        ],
    );
    let history = json!([{
        "revision": 2, "chart": "echo", "chartVersion": "1.1.0", "time": "2026-11-23T00:30:00Z",
        "outcome": "RolledBack", "cause": "Chart", "by": "krypton-hub",
    }]);
    let tenant = with_field(healthy_tenant(), "/status/hubEpoch", Value::Null);
    let tenant = with_field(tenant, "/status/history", history);
    let mut edge = sources_with_member(tenant, edge_cluster());
    edge.members.insert("edge-1".to_owned(), Lookup::NotFound);
    edge.leader_lease = Lookup::NotFound;
    let mut assert_lease = |edge_lease: Lookup<Lease>, ready: bool, line: &str| {
        edge.edge_lease = edge_lease;
        let lines = [
            "! this is not the home cluster",
            line,
            "✓ Installed: release installed",
            "! revision 2 echo 1.1.0: RolledBack, cause Chart by krypton-hub, 2026-11-23T00:30:00Z (10m ago)",
        ];
        assert_explained(&edge, ready, &lines);
    };
    let held = found(lease("agent/a", "2026-11-23T00:39:30.000000Z"));
    assert_lease(held, true, "✓ agent/a holds its Lease, and acts here");
    let expired = found(lease("agent/a", "2026-11-23T00:30:00.000000Z"));
    let line = "✗ no agent or hub has acted here since 2026-11-23T00:30:00Z (10m ago)";
    assert_lease(expired, false, line);
    let line = "✗ no agent or hub has acted here yet";
    assert_lease(Lookup::NotFound, false, line);
    let not_permitted = Lookup::NotPermitted("get leases".to_owned());
    let line = "? the Lease holder of this cluster is not known: you may not get leases";
    assert_lease(not_permitted, false, line);
}

#[test]
fn history_on_home_is_that_of_self_cluster() {
    let history = json!([{ "revision": 1, "outcome": "Deployed", "cause": "Install" }]);
    let tenant = with_field(healthy_tenant(), "/status/history", history);
    let sources = sources_with_member(tenant, edge_cluster());
    let lines = ["self-cluster\n  ✓ revision 1: Deployed, cause Install\n"];
    assert_explained(&sources, true, &lines);
    let only_edge = explanation::explain(&key(), Some("edge-1"), &sources, now());
    let output = to_text(&only_edge.lines);
    assert!(!output.contains("revision 1"), "{output}");
}

#[test]
fn worst_members_are_listed_and_healthy_ones_grouped() {
    let mut tenant = healthy_tenant();
    for number in 2..=12 {
        let type_ = format!("ClusterReady/edge-{number}");
        tenant = with_condition(tenant, condition(&type_, "True", "Installed", ""));
    }
    let not_ready = condition("ClusterReady/edge-7", "False", "NotReady", "x");
    tenant = with_condition(tenant, not_ready);
    let names = members_to_explain(&found(tenant.clone()), None);
    assert_eq!(names.len(), 10);
    assert_eq!(names[0], "edge-7");
    let named = members_to_explain(&found(tenant.clone()), Some("edge-3"));
    assert_eq!(named, ["edge-3"]);
    let members = names.iter().map(|name| (name.as_str(), edge_cluster()));
    let members: Vec<(&str, Value)> = members.collect();
    assert_explained(
        &sources(tenant, &members),
        true,
        &[
            "✓ Tenant default/acme is on 12 clusters\n",
            "edge-7\n  ✓ its agent",
            "✓ well on 9 members: edge-1, edge-10",
            "! only the 10 worst of 12 clusters are shown: kubectl krypton get tenant acme -n default",
        ],
    );
}

#[test]
fn newest_event_is_shown_last() {
    let event = |minute: i64| PastEvent {
        at: now() - jiff::SignedDuration::from_mins(minute),
        warning: minute == 1,
        reason: "HelmInstallFailed".to_owned(),
        message: format!("number {minute}"),
    };
    let mut sources = sources_with_member(healthy_tenant(), edge_cluster());
    sources.events = Lookup::Found((1..=12).rev().map(event).collect());
    let output = to_text(&explanation::explain(&key(), None, &sources, now()).lines);
    assert_eq!(output.matches("event, ").count(), 8, "{output}");
    let last = "! event, 60s ago: HelmInstallFailed: number 1\n";
    assert!(output.ends_with(last), "{output}");
}

#[test]
fn programs_get_the_same_as_json() {
    let sources = sources_with_member(healthy_tenant(), edge_cluster());
    let explanation = explanation::explain(&key(), None, &sources, now());
    let json = to_json(Some("default"), "acme", &explanation);
    assert_eq!(json["namespace"], json!("default"));
    assert_eq!(json["ready"], json!(true));
    assert_eq!(json["lines"][0]["mark"], json!("ok"));
    assert_eq!(json["lines"][0]["member"], Value::Null);
    let lines = json["lines"].as_array().unwrap();
    assert_eq!(lines.len(), explanation.lines.len());
}

#[test]
fn only_failures_needing_action_have_remedy() {
    for reason in [
        reason::INSTALLING,
        reason::DELETING,
        reason::NO_ERROR,
        "Else",
    ] {
        assert_eq!(remedy::for_tenant(reason), None, "{reason}");
    }
    for reason in [
        reason::INSTALL_FAILED,
        reason::UPGRADE_FAILED,
        reason::ROLLBACK_FAILED,
        reason::UNINSTALL_FAILED,
        reason::CHART_NOT_LOADED,
        reason::VERSION_INVALID,
        reason::NOT_THIS_CLUSTER,
        reason::NAMESPACE_NOT_ALLOWED,
        reason::NAMESPACE_NOT_OWNED,
        reason::WORKSPACE_INVALID,
        reason::VALUES_NOT_ALLOWED,
    ] {
        assert!(remedy::for_tenant(reason).is_some(), "{reason}");
    }
}
