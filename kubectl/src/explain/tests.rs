mod objects;

use std::collections::BTreeMap;

use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::tenant::TenantReport;
use serde_json::{Value, json};

use super::remedy;
use super::sources::{ExplanationSources, Lookup, PastEvent, members_to_explain};
use super::*;
use crate::statement::{Mark, to_text};

const NOW: &str = "2026-11-23T00:40:00Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
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
fn assert_explained(sources: &ExplanationSources, ready: bool, lines: &[&str]) {
    let explanation = explanation::explain(&key(), None, sources, now());
    let output = to_text(&explanation.lines);
    for line in lines {
        assert!(output.contains(line), "{line:?} is not in\n{output}");
    }
    assert_eq!(explanation.ready, ready, "{output}");
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
            "edge-1\n  ✓ its agent (0.1.0) is connected, last seen 30s ago\n",
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
    let cases = [
        (
            retry("2026-11-23T00:42:05Z"),
            "! next: it is retried at 2026-11-23T00:42:05Z (in 2m5s), after 3 failed attempts\n      → now: kubectl krypton resync tenant acme -n default, with the --context of edge-1",
        ),
        (
            retry("2026-11-23T00:39:00Z"),
            "! next: another attempt, due 2026-11-23T00:39:00Z (60s ago), after 3 failed attempts; no result yet",
        ),
        (
            json!({"cluster": "edge-1", "action": "GivenUp", "attempts": 1}),
            "! next: nothing. Krypton has stopped retrying after 1 failed attempt, until the chart, the values or the Tenant changes\n      → one more: kubectl",
        ),
        (
            json!({"cluster": "edge-1", "action": "Unlock", "at": "2026-11-23T00:50:00Z", "attempts": 0}),
            "! next: Krypton takes over the lock of the release at 2026-11-23T00:50:00Z (in 10m)",
        ),
        (
            json!({"cluster": "edge-1", "action": "Wait", "at": "2026-11-23T00:45:00Z", "attempts": 0}),
            "! next: its workloads have until 2026-11-23T00:45:00Z (in 5m) to become ready",
        ),
    ];
    for (next, line) in cases {
        let cause = "  ✗ InstallFailed: helm said no\n      → correct the chart";
        assert_explained(
            &sources_with_member(failed_tenant(next), edge_cluster()),
            false,
            &[cause, line],
        );
    }
    // The command ignores the unknown step of a later version.
    let unknown_step = json!({"cluster": "edge-1", "action": "Ponder", "attempts": 0});
    assert_explained(
        &sources_with_member(failed_tenant(unknown_step), edge_cluster()),
        false,
        &["✗ InstallFailed"],
    );
}

/// Checks the readiness and a line of the explanation of each Tenant.
fn assert_tenants_explained(cases: Vec<(Value, bool, &str)>) {
    for (tenant, ready, line) in cases {
        assert_explained(&sources_with_member(tenant, edge_cluster()), ready, &[line]);
    }
}

#[test]
fn tenant_metadata_is_explained() {
    let annotated = |name: &str, value: &str| {
        with_field(
            healthy_tenant(),
            "/metadata/annotations",
            json!({ name: value }),
        )
    };
    let cases: Vec<(Value, bool, &str)> = vec![
        (
            annotated("mesh.openkcm.io/paused", "true"),
            true,
            "! paused by an annotation: nothing is written for it but its status\n    → kubectl krypton resume tenant acme -n default\n",
        ),
        (
            annotated("mesh.openkcm.io/paused", "false"),
            true,
            "✓ Installed",
        ),
        (
            annotated("mesh.openkcm.io/orphan", "true"),
            true,
            "! annotated as an orphan",
        ),
        (
            with_field(
                with_field(
                    healthy_tenant(),
                    "/metadata/deletionTimestamp",
                    json!("2026-11-23T00:35:00Z"),
                ),
                "/metadata/finalizers",
                json!(["a/b"]),
            ),
            false,
            "! being deleted since 2026-11-23T00:35:00Z (5m ago), held by the finalizers a/b\n",
        ),
        (
            with_field(healthy_tenant(), "/metadata/generation", json!(2)),
            false,
            "! it was changed, and its status does not reflect the change yet",
        ),
        (
            with_field(healthy_tenant(), "/status", json!({})),
            false,
            "? it has no status yet\n    → see its events",
        ),
    ];
    assert_tenants_explained(cases);
}

#[test]
fn tenant_conditions_are_explained_with_remedy() {
    let error = |reason: &str| {
        let error = Some((reason, "so it is"));
        tenant(("False", reason, "so it is"), reason, error)
    };
    let cases: Vec<(Value, bool, &str)> = vec![
        (
            error(reason::CHART_NOT_LOADED),
            false,
            "✗ ChartNotLoaded: so it is\n      → check that the hub can reach the repository",
        ),
        (
            error(reason::VERSION_NOT_FOUND),
            false,
            "✗ VersionNotFound: so it is\n      → correct chart.version",
        ),
        (
            error(reason::RELEASE_IN_USE),
            false,
            "✗ ReleaseInUse: so it is\n      → annotate with mesh.openkcm.io/adopt=true",
        ),
        (
            tenant(("False", "Installing", "w"), "Installing", None),
            false,
            "! Installing: working\n",
        ),
        (
            tenant(
                ("False", "NotReady", "Deployment a/b: 0 of 1"),
                "NoChange",
                None,
            ),
            false,
            "✗ NotReady: Deployment a/b: 0 of 1\n      → look at the workload",
        ),
        (
            tenant(
                ("True", "Installed", "ok; drift: ConfigMap a is deleted"),
                "NoChange",
                None,
            ),
            true,
            "✓ Installed: ok\n  ! it has drifted from its chart: ConfigMap a is deleted",
        ),
        (
            tenant(("True", "Installed", ""), "Paused", None),
            true,
            "! nothing is changed there: Paused: working\n      → kubectl krypton resume",
        ),
        (
            tenant(
                ("Unknown", "ClusterUnreachable", "silent"),
                "NoChange",
                None,
            ),
            false,
            "? ClusterUnreachable: silent",
        ),
        (
            tenant(
                ("False", "InstallFailed", ""),
                "InstallFailed",
                Some(("InstallFailed", "not ready 300 s after the install: x")),
            ),
            false,
            "! no retry is needed: it is Ready as soon as its workloads are",
        ),
        (
            with_condition(
                with_field(
                    healthy_tenant(),
                    "/spec",
                    json!({"clusterRef": {"secretName": "edge-9"}}),
                ),
                condition("TargetClusterResolved", "False", "ClusterNotFound", "none"),
            ),
            true,
            "✗ ClusterNotFound: none\n    → correct spec.clusterRef",
        ),
        (
            with_condition(
                with_field(
                    healthy_tenant(),
                    "/status/placement",
                    json!({"cluster": "edge-1", "clusterUid": "u"}),
                ),
                condition("Placed", "False", "AlreadyThere", "somebody's"),
            ),
            true,
            "✓ Tenant default/acme is placed on edge-1 by the home cluster\n✗ AlreadyThere: somebody's\n    → it is shown",
        ),
        (
            with_condition(
                healthy_tenant(),
                condition("Placed", "Unknown", "Ordered", "not yet"),
            ),
            true,
            "? Ordered: not yet",
        ),
    ];
    assert_tenants_explained(cases);
}

#[test]
fn each_member_state_has_its_text() {
    let member = |kind, status, reason, message| {
        with_condition(edge_cluster(), condition(kind, status, reason, message))
    };
    let silent = member("Connected", "False", "AgentAway", "the agent is away");
    let cases: Vec<(Value, bool, &str)> = vec![
        (
            silent.clone(),
            false,
            "✗ no contact since 2026-11-23T00:39:30Z (30s ago): AgentAway: the agent is away\n      → look at the agent's log",
        ),
        (
            silent.clone(),
            false,
            "? agent/a held its Lease at the last contact",
        ),
        (
            silent.clone(),
            false,
            "? at the last contact, it had applied the current desired state 3.14: r/c:1",
        ),
        (
            with_field(silent, "/status/lastSeen", Value::Null),
            false,
            "✗ no contact since 2026-11-23T00:30:00Z (10m ago)",
        ),
        (
            with_field(edge_cluster(), "/status/mode", json!("proxy")),
            true,
            "✓ the hub reaches it through its kubeconfig",
        ),
        (
            with_field(edge_cluster(), "/spec/paused", json!(true)),
            true,
            "! paused on the EdgeCluster: nothing is written there but status\n      → kubectl krypton resume cluster edge-1",
        ),
        (
            with_field(edge_cluster(), "/spec/banned", json!(true)),
            true,
            "✗ banned: the hub rejects its agent and does not connect to it\n      → kubectl krypton unban edge-1",
        ),
        (
            member("Healthy", "False", "Observing", "x holds the Lease"),
            true,
            "! Observing: x holds the Lease\n      → another process",
        ),
        (
            member("Healthy", "False", "DuplicateCluster", "as edge-2"),
            true,
            "! DuplicateCluster: as edge-2",
        ),
        (
            with_field(edge_cluster(), "/status/applied/generation", json!(13)),
            true,
            "! it has applied desired state 3.13, but not 3.14 (sent since 2026-11-23T00:20:00Z (20m ago)): r/c:1",
        ),
        (
            with_field(edge_cluster(), "/status/applied", Value::Null),
            true,
            "! it has applied no desired state yet; the hub sends 3.14: r/c:1",
        ),
        (
            member("CertificateCurrent", "False", "ExpiresSoon", "in 2 d"),
            true,
            "! ExpiresSoon: in 2 d",
        ),
        (
            with_field(edge_cluster(), "/status", json!({})),
            false,
            "? the hub has not observed it yet",
        ),
        (
            with_field(
                edge_cluster(),
                "/metadata/deletionTimestamp",
                json!("2026-11-23T00:35:00Z"),
            ),
            true,
            "! it is leaving the fleet",
        ),
    ];
    for (member, ready, line) in cases {
        assert_explained(
            &sources_with_member(healthy_tenant(), member),
            ready,
            &[line],
        );
    }
    let mut none = sources_with_member(healthy_tenant(), edge_cluster());
    none.members.insert("edge-1".to_owned(), Lookup::NotFound);
    assert_explained(&none, false, &["✗ no EdgeCluster has this name"]);
}

#[test]
fn without_a_hub_nothing_counts_as_ready() {
    for (lease, line) in [
        (
            lease("hub-0", "2026-11-23T00:30:00.000000Z"),
            "✗ no hub has led since 2026-11-23T00:30:00Z (10m ago)",
        ),
        (
            lease("", "2026-11-23T00:39:55.000000Z"),
            "✗ no hub has led since 2026-11-23T00:39:55Z (5s ago)",
        ),
    ] {
        let sources = ExplanationSources {
            leader_lease: found(lease),
            ..sources_with_member(healthy_tenant(), edge_cluster())
        };
        assert_explained(&sources, false, &[line, "→ look at the hub's pods"]);
    }
    let without_lease = ExplanationSources {
        leader_lease: Lookup::NotFound,
        ..sources_with_member(healthy_tenant(), edge_cluster())
    };
    let line =
        "? there is no Lease of a hub in the namespace krypton\n    → name the hub's namespace";
    assert_explained(&without_lease, false, &[line]);
    let clock_ahead = ExplanationSources {
        leader_lease: found(lease("hub-0", "2026-11-23T00:45:00.000000Z")),
        ..sources_with_member(healthy_tenant(), edge_cluster())
    };
    let line =
        "? the Lease holder is not known: the Lease was renewed at 2026-11-23T00:45:00Z (in 5m)";
    assert_explained(&clock_ahead, false, &[line, "→ compare the clock"]);
    // The hub is gone, regardless of the last status.
    let not_seen = with_field(
        edge_cluster(),
        "/status/lastSeen",
        json!("2026-11-23T00:34:00Z"),
    );
    let line = "? the home cluster shows it as connected, but it last responded at 2026-11-23T00:34:00Z (6m ago)";
    assert_explained(
        &sources_with_member(healthy_tenant(), not_seen),
        false,
        &[line],
    );
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
    assert_explained(
        &member,
        false,
        &["? the state of this member is not known: you may not get edgeclusters"],
    );
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
    for (state, ready, line) in [
        (installed, true, "✓ Installed: a message"),
        (failed, false, "✗ InstallFailed: a message"),
    ] {
        let explanation = explanation::explain(&key(), Some("edge-1"), &sources(state), now());
        let output = to_text(&explanation.lines);
        for line in ["✓ Tenant default/acme exists only on edge-1", line] {
            assert!(output.contains(line), "{line:?} is not in\n{output}");
        }
        assert_eq!(explanation.ready, ready, "{output}");
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
    let mut edge = sources_with_member(
        with_field(
            with_field(healthy_tenant(), "/status/hubEpoch", Value::Null),
            "/status/history",
            history,
        ),
        edge_cluster(),
    );
    edge.members.insert("edge-1".to_owned(), Lookup::NotFound);
    edge.leader_lease = Lookup::NotFound;
    for (edge_lease, ready, line) in [
        (
            found(lease("agent/a", "2026-11-23T00:39:30.000000Z")),
            true,
            "✓ agent/a holds its Lease, and acts here",
        ),
        (
            found(lease("agent/a", "2026-11-23T00:30:00.000000Z")),
            false,
            "✗ no agent or hub has acted here since 2026-11-23T00:30:00Z (10m ago)",
        ),
        (
            Lookup::NotFound,
            false,
            "✗ no agent or hub has acted here yet",
        ),
        (
            Lookup::NotPermitted("get leases".to_owned()),
            false,
            "? the Lease holder of this cluster is not known: you may not get leases",
        ),
    ] {
        edge.edge_lease = edge_lease;
        let lines = [
            "! this is not the home cluster",
            line,
            "✓ Installed: release installed",
            "! revision 2 echo 1.1.0: RolledBack, cause Chart by krypton-hub, 2026-11-23T00:30:00Z (10m ago)",
        ];
        assert_explained(&edge, ready, &lines);
    }
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
    tenant = with_condition(
        tenant,
        condition("ClusterReady/edge-7", "False", "NotReady", "x"),
    );
    let names = members_to_explain(&found(tenant.clone()), None);
    assert_eq!(names.len(), 10);
    assert_eq!(names[0], "edge-7");
    assert_eq!(
        members_to_explain(&found(tenant.clone()), Some("edge-3")),
        ["edge-3"]
    );
    let members: Vec<(&str, Value)> = names
        .iter()
        .map(|name| (name.as_str(), edge_cluster()))
        .collect();
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
    let explanation = explanation::explain(
        &key(),
        None,
        &sources_with_member(healthy_tenant(), edge_cluster()),
        now(),
    );
    let json = to_json(Some("default"), "acme", &explanation);
    assert_eq!(json["namespace"], json!("default"));
    assert_eq!(json["ready"], json!(true));
    assert_eq!(json["lines"][0]["mark"], json!("ok"));
    assert_eq!(json["lines"][0]["member"], Value::Null);
    assert_eq!(
        json["lines"].as_array().unwrap().len(),
        explanation.lines.len()
    );
}

#[test]
fn only_failures_needing_action_have_remedy() {
    for no_remedy_reason in [
        reason::INSTALLING,
        reason::DELETING,
        reason::NO_ERROR,
        "Else",
    ] {
        assert_eq!(
            remedy::for_tenant(no_remedy_reason),
            None,
            "{no_remedy_reason}"
        );
    }
    for remedy_reason in [
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
        assert!(
            remedy::for_tenant(remedy_reason).is_some(),
            "{remedy_reason}"
        );
    }
}
