use std::collections::BTreeMap;

use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::tenant::TenantReport;
use serde_json::{Value, json};

use super::remedy;
use super::sources::{Answer, PastEvent, Sources, members_to_tell};
use super::*;
use crate::statement::{Mark, text};

const NOW: &str = "2026-11-23T00:40:00Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn key() -> TenantKey {
    TenantKey {
        namespace: "default".to_owned(),
        name: "acme".to_owned(),
    }
}

fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": type_, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-11-23T00:30:00Z",
    })
}

/// A Tenant on edge-1 with these conditions.
fn tenant(ready: (&str, &str, &str), progress: &str, error: Option<(&str, &str)>) -> Value {
    let all = if ready.0 == "True" {
        "AllClustersReady"
    } else {
        "ClustersNotReady"
    };
    let going = ["Installing", "Upgrading", "Deleting"].contains(&progress);
    let mut conditions = vec![
        condition("Ready", ready.0, all, "of 1"),
        condition("ClusterReady/edge-1", ready.0, ready.1, ready.2),
        condition(
            "ClusterProgress/edge-1",
            if going { "True" } else { "False" },
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

fn well() -> Value {
    tenant(
        ("True", "Installed", "release installed"),
        "InstallComplete",
        None,
    )
}

fn failed(next: Value) -> Value {
    let mut tenant = tenant(
        ("False", "InstallFailed", "helm said no"),
        "InstallFailed",
        Some(("InstallFailed", "helm said no")),
    );
    tenant["status"]["nextSteps"] = json!([next]);
    tenant
}

fn edge() -> Value {
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

fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap()[field] = value;
    object
}

/// Replaces the condition of the same type.
fn saying(object: Value, said: Value) -> Value {
    let conditions = object.pointer("/status/conditions").unwrap().as_array();
    let mut conditions = conditions.unwrap().clone();
    conditions.retain(|condition| condition["type"] != said["type"]);
    conditions.push(said);
    with(object, "/status/conditions", json!(conditions))
}

fn found<T: serde::de::DeserializeOwned>(object: Value) -> Answer<T> {
    Answer::Found(serde_json::from_value(object).unwrap())
}

fn seen(tenant: Value, members: &[(&str, Value)]) -> Sources {
    Sources {
        tenant: found(tenant),
        reported: Answer::None,
        lead: found(lease("hub-0", "2026-11-23T00:39:58.000000Z")),
        acts: Answer::None,
        hub_namespaces: vec!["krypton".to_owned()],
        members: members
            .iter()
            .map(|(name, object)| ((*name).to_owned(), found(object.clone())))
            .collect(),
        events: Answer::Found(Vec::new()),
    }
}

fn on_edge(tenant: Value, member: Value) -> Sources {
    seen(tenant, &[("edge-1", member)])
}

#[track_caller]
fn tells(sources: &Sources, ready: bool, lines: &[&str]) {
    let story = story::story(&key(), None, sources, now());
    let told = text(&story.lines);
    for line in lines {
        assert!(told.contains(line), "{line:?} is not in\n{told}");
    }
    assert_eq!(story.ready, ready, "{told}");
}

#[test]
fn healthy_tenant_is_shown_without_remedy() {
    let sources = on_edge(well(), edge());
    tells(
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
    let story = story::story(&key(), None, &sources, now());
    assert!(story.lines.iter().all(|line| line.mark == Mark::Well));
    assert!(story.lines.iter().all(|line| line.remedy.is_none()));
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
            "! next: nothing. It was given up after 1 failed attempt, until chart, values or Tenant change\n      → one more: kubectl",
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
        tells(&on_edge(failed(next), edge()), false, &[cause, line]);
    }
    // The command ignores the unknown step of a later version.
    let ponder = json!({"cluster": "edge-1", "action": "Ponder", "attempts": 0});
    tells(
        &on_edge(failed(ponder), edge()),
        false,
        &["✗ InstallFailed"],
    );
}

/// Checks the readiness and a line of the explanation of each Tenant.
fn explains(cases: Vec<(Value, bool, &str)>) {
    for (tenant, ready, line) in cases {
        tells(&on_edge(tenant, edge()), ready, &[line]);
    }
}

#[test]
fn tenant_metadata_is_explained() {
    let annotated =
        |name: &str, value: &str| with(well(), "/metadata/annotations", json!({ name: value }));
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
            with(
                with(
                    well(),
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
            with(well(), "/metadata/generation", json!(2)),
            false,
            "! it was changed, and its status does not reflect the change yet",
        ),
        (
            with(well(), "/status", json!({})),
            false,
            "? it has no status yet\n    → see its events",
        ),
    ];
    explains(cases);
}

#[test]
fn tenant_conditions_are_explained_with_remedy() {
    let error = |reason: &str| {
        let told = Some((reason, "so it is"));
        tenant(("False", reason, "so it is"), reason, told)
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
            "✗ VersionNotFound: so it is\n      → correct --chart-version",
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
            saying(
                with(
                    well(),
                    "/spec",
                    json!({"clusterRef": {"secretName": "edge-9"}}),
                ),
                condition("TargetClusterResolved", "False", "ClusterNotFound", "none"),
            ),
            true,
            "✗ ClusterNotFound: none\n    → correct spec.clusterRef",
        ),
        (
            saying(
                with(
                    well(),
                    "/status/placement",
                    json!({"cluster": "edge-1", "clusterUid": "u"}),
                ),
                condition("Placed", "False", "AlreadyThere", "somebody's"),
            ),
            true,
            "✓ Tenant default/acme is placed on edge-1 by the home cluster\n✗ AlreadyThere: somebody's\n    → it is shown",
        ),
        (
            saying(well(), condition("Placed", "Unknown", "Ordered", "not yet")),
            true,
            "? Ordered: not yet",
        ),
    ];
    explains(cases);
}

#[test]
fn each_member_state_has_its_text() {
    let silent = saying(
        edge(),
        condition("Connected", "False", "AgentAway", "the agent is away"),
    );
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
            with(silent, "/status/lastSeen", Value::Null),
            false,
            "✗ no contact since 2026-11-23T00:30:00Z (10m ago)",
        ),
        (
            with(edge(), "/status/mode", json!("proxy")),
            true,
            "✓ the hub reaches it through its kubeconfig",
        ),
        (
            with(edge(), "/spec/paused", json!(true)),
            true,
            "! paused on the EdgeCluster: nothing is written there but status\n      → kubectl krypton resume cluster edge-1",
        ),
        (
            with(edge(), "/spec/banned", json!(true)),
            true,
            "✗ banned: the hub rejects its agent and does not connect to it\n      → kubectl krypton unban edge-1",
        ),
        (
            saying(
                edge(),
                condition("Healthy", "False", "Observing", "x holds the Lease"),
            ),
            true,
            "! Observing: x holds the Lease\n      → another process",
        ),
        (
            saying(
                edge(),
                condition("Healthy", "False", "DuplicateCluster", "as edge-2"),
            ),
            true,
            "! DuplicateCluster: as edge-2",
        ),
        (
            with(edge(), "/status/applied/generation", json!(13)),
            true,
            "! it has applied desired state 3.13, but not 3.14 (sent since 2026-11-23T00:20:00Z (20m ago)): r/c:1",
        ),
        (
            with(edge(), "/status/applied", Value::Null),
            true,
            "! it has applied no desired state yet; the hub sends 3.14: r/c:1",
        ),
        (
            saying(
                edge(),
                condition("CertificateCurrent", "False", "ExpiresSoon", "in 2 d"),
            ),
            true,
            "! ExpiresSoon: in 2 d",
        ),
        (
            with(edge(), "/status", json!({})),
            false,
            "? the hub has not observed it yet",
        ),
        (
            with(
                edge(),
                "/metadata/deletionTimestamp",
                json!("2026-11-23T00:35:00Z"),
            ),
            true,
            "! it is leaving the fleet",
        ),
    ];
    for (member, ready, line) in cases {
        tells(&on_edge(well(), member), ready, &[line]);
    }
    let mut none = on_edge(well(), edge());
    none.members.insert("edge-1".to_owned(), Answer::None);
    tells(&none, false, &["✗ no EdgeCluster has this name"]);
}

#[test]
fn without_a_hub_nothing_counts_as_ready() {
    for (lead, line) in [
        (
            lease("hub-0", "2026-11-23T00:30:00.000000Z"),
            "✗ no hub has led since 2026-11-23T00:30:00Z (10m ago)",
        ),
        (
            lease("", "2026-11-23T00:39:55.000000Z"),
            "✗ no hub has led since 2026-11-23T00:39:55Z (5s ago)",
        ),
    ] {
        let sources = Sources {
            lead: found(lead),
            ..on_edge(well(), edge())
        };
        tells(&sources, false, &[line, "→ look at the hub's pods"]);
    }
    let elsewhere = Sources {
        lead: Answer::None,
        ..on_edge(well(), edge())
    };
    let line =
        "? there is no Lease of a hub in the namespace krypton\n    → name the hub's namespace";
    tells(&elsewhere, false, &[line]);
    let ahead = Sources {
        lead: found(lease("hub-0", "2026-11-23T00:45:00.000000Z")),
        ..on_edge(well(), edge())
    };
    let line =
        "? the Lease holder is not known: the Lease was renewed at 2026-11-23T00:45:00Z (in 5m)";
    tells(&ahead, false, &[line, "→ compare the clock"]);
    // The hub is gone, regardless of the last status.
    let seen = with(edge(), "/status/lastSeen", json!("2026-11-23T00:34:00Z"));
    let line = "? the home cluster shows it as connected, but it last responded at 2026-11-23T00:34:00Z (6m ago)";
    tells(&on_edge(well(), seen), false, &[line]);
}

#[test]
fn unreadable_source_is_shown_as_unknown() {
    let blind = Sources {
        tenant: Answer::NotPermitted("get tenants".to_owned()),
        reported: Answer::None,
        lead: Answer::Failed("no response within 10 s".to_owned()),
        acts: Answer::None,
        hub_namespaces: Vec::new(),
        members: BTreeMap::new(),
        events: Answer::NotPermitted("list events".to_owned()),
    };
    tells(
        &blind,
        false,
        &[
            "? Tenant default/acme is not known: you may not get tenants\n",
            "? the leader of the hubs is not known: no response within 10 s\n",
            "? the list of recent events is not known: you may not list events\n",
        ],
    );
    let mut member = on_edge(well(), edge());
    let refused = Answer::NotPermitted("get edgeclusters".to_owned());
    member.members.insert("edge-1".to_owned(), refused);
    tells(
        &member,
        false,
        &["? the state of this member is not known: you may not get edgeclusters"],
    );
}

#[test]
fn tenant_only_on_member_is_explained_from_report() {
    let sources = |state: ClusterState| Sources {
        tenant: Answer::None,
        reported: Answer::Found(TenantReport {
            observed_generation: 1,
            applied_chart: "r/c:1".to_owned(),
            state,
            next: None,
        }),
        ..on_edge(well(), edge())
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
        let story = story::story(&key(), Some("edge-1"), &sources(state), now());
        let told = text(&story.lines);
        for line in ["✓ Tenant default/acme exists only on edge-1", line] {
            assert!(told.contains(line), "{line:?} is not in\n{told}");
        }
        assert_eq!(story.ready, ready, "{told}");
    }
}

#[test]
fn explain_works_without_home_tenant_and_on_edge() {
    let mut alone = on_edge(well(), edge());
    alone.tenant = Answer::None;
    tells(
        &alone,
        false,
        &[
            "? the home cluster has no Tenant default/acme\n    → if it exists only on a member",
            "✓ its agent (0.1.0) is connected",
            "? the home cluster has no report of this Tenant there",
        ],
    );
    let mut edge = on_edge(with(well(), "/status/hubEpoch", Value::Null), edge());
    edge.members.insert("edge-1".to_owned(), Answer::None);
    edge.lead = Answer::None;
    for (acts, ready, line) in [
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
        (Answer::None, false, "✗ no agent or hub has acted here yet"),
        (
            Answer::NotPermitted("get leases".to_owned()),
            false,
            "? the Lease holder of this cluster is not known: you may not get leases",
        ),
    ] {
        edge.acts = acts;
        let lines = [
            "! this is not the home cluster",
            line,
            "✓ Installed: release installed",
        ];
        tells(&edge, ready, &lines);
    }
}

#[test]
fn worst_members_are_listed_and_healthy_ones_grouped() {
    let mut many = well();
    for number in 2..=12 {
        let type_ = format!("ClusterReady/edge-{number}");
        many = saying(many, condition(&type_, "True", "Installed", ""));
    }
    many = saying(
        many,
        condition("ClusterReady/edge-7", "False", "NotReady", "x"),
    );
    let named = members_to_tell(&found(many.clone()), None);
    assert_eq!(named.len(), 10);
    assert_eq!(named[0], "edge-7");
    assert_eq!(
        members_to_tell(&found(many.clone()), Some("edge-3")),
        ["edge-3"]
    );
    let members: Vec<(&str, Value)> = named.iter().map(|name| (name.as_str(), edge())).collect();
    tells(
        &seen(many, &members),
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
    let happened = |minute: i64| PastEvent {
        at: now() - jiff::SignedDuration::from_mins(minute),
        warning: minute == 1,
        reason: "HelmInstallFailed".to_owned(),
        message: format!("number {minute}"),
    };
    let mut sources = on_edge(well(), edge());
    sources.events = Answer::Found((1..=12).rev().map(happened).collect());
    let told = text(&story::story(&key(), None, &sources, now()).lines);
    assert_eq!(told.matches("event, ").count(), 8, "{told}");
    let last = "! event, 60s ago: HelmInstallFailed: number 1\n";
    assert!(told.ends_with(last), "{told}");
}

#[test]
fn programs_get_the_same_as_json() {
    let story = story::story(&key(), None, &on_edge(well(), edge()), now());
    let told = as_json(&key(), &story);
    assert_eq!(told["ready"], json!(true));
    assert_eq!(told["lines"][0]["mark"], json!("Well"));
    assert_eq!(told["lines"][0]["member"], Value::Null);
    assert_eq!(told["lines"].as_array().unwrap().len(), story.lines.len());
}

#[test]
fn only_failures_needing_action_have_remedy() {
    for none in [
        reason::INSTALLING,
        reason::DELETING,
        reason::NO_ERROR,
        "Else",
    ] {
        assert_eq!(remedy::of_tenant(none), None, "{none}");
    }
    for some in [
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
        assert!(remedy::of_tenant(some).is_some(), "{some}");
    }
}
