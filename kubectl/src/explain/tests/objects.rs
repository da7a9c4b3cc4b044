//! Explanations of clusters and KryptonDeployments.

use super::super::sources::ObjectSources;
use super::*;

fn object_sources<K: serde::de::DeserializeOwned>(object: Value) -> ObjectSources<K> {
    ObjectSources {
        object: serde_json::from_value(object).unwrap(),
        leader_lease: found(lease("hub-0", "2026-11-23T00:39:58.000000Z")),
        hub_namespaces: vec!["krypton".to_owned()],
        members: BTreeMap::from([("edge-1".to_owned(), found(edge_cluster()))]),
        events: Lookup::Found(Vec::new()),
    }
}

#[test]
fn cluster_is_explained_with_its_failing_tenants() {
    let assert_explained = |cluster: Value, ready: bool, lines: &[&str]| {
        let explanation = explanation::explain_cluster(&object_sources(cluster), now());
        assert_lines(&explanation, ready, lines);
    };
    let cluster = with_condition(edge_cluster(), condition("Ready", "True", "Ready", ""));
    let cluster = with_field(cluster, "/status/observedGeneration", json!(1));
    let counts = |ready: u32| json!({"total": 3, "ready": ready, "pending": 3 - ready, "error": 0});
    let healthy = with_field(cluster, "/status/tenants", counts(3));
    let lines = [
        "✓ the hub hub-0 leads\nedge-1\n  ✓ its agent (0.1.0) is connected",
        "  ✓ 3 of 3 Tenants are Ready\n",
    ];
    assert_explained(healthy.clone(), true, &lines);

    let tenant = |name: &str, state: &str| json!({"namespace": "default", "name": name, "state": state, "reason": "Why"});
    let tenants = [
        tenant("a", "NotReady"),
        tenant("b", "Ready"),
        tenant("c", "Error"),
    ];
    let summaries = json!({"tenants": tenants, "omitted": 0});
    let failing = with_field(healthy.clone(), "/status/tenants", counts(1));
    let failing = with_field(failing, "/status/tenantSummaries", summaries);
    let lines = [
        "  ! 1 of 3 Tenants are Ready\n  ! Tenant default/c: Error: Why\n      → kubectl krypton explain tenant c -n default --on edge-1\n  ! Tenant default/a: NotReady: Why\n",
    ];
    assert_explained(failing, true, &lines);

    let away = condition("Connected", "False", "AgentAway", "gone");
    let line = "? at the last contact, 3 of 3 Tenants are Ready";
    assert_explained(with_condition(healthy.clone(), away), false, &[line]);
    let missing = condition("Ready", "False", "ValuesMissing", "no such Secret");
    let line = "! ValuesMissing: no such Secret";
    assert_explained(with_condition(healthy.clone(), missing), false, &[line]);
    let invalid = condition("TargetClusterResolved", "False", "KubeconfigInvalid", "bad");
    let line = "  ! KubeconfigInvalid: bad\n      → correct the kubeconfig";
    assert_explained(with_condition(healthy.clone(), invalid), true, &[line]);
    let at = json!("2026-11-23T00:30:00Z");
    let deleted = with_field(healthy.clone(), "/metadata/deletionTimestamp", at);
    let waiting = condition("Uninstalled", "False", "UninstallWaits", "for edge-1");
    let lines = [
        "! it is leaving the fleet\n",
        "! UninstallWaits: for edge-1\n",
    ];
    assert_explained(with_condition(deleted, waiting), false, &lines);
    let changed = with_field(healthy, "/metadata/generation", json!(2));
    assert_explained(changed, false, &["! it was changed, and its status"]);
}

#[test]
fn cluster_without_agent_shows_fix_once() {
    let message = "no agent has joined yet; to join the cluster, run: kubectl krypton join edge-1";
    let conditions = ["Connected", "Healthy", "Ready"]
        .map(|type_| condition(type_, "Unknown", "Starting", message));
    let cluster = with_field(edge_cluster(), "/status", json!({"conditions": conditions}));
    let explanation = explanation::explain_cluster(&object_sources(cluster), now());
    let line =
        format!("  ? no contact since 2026-11-23T00:30:00Z (10m ago): Starting: {message}\n");
    assert_lines(&explanation, false, &[line.as_str()]);
    let output = to_text(&explanation.lines);
    assert_eq!(output.matches(message).count(), 1, "{output}");
}

/// A KryptonDeployment on edge-1.
fn deployment(ready: (&str, &str)) -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1", "kind": "KryptonDeployment",
        "metadata": {"name": "acme", "namespace": "accounts", "generation": 2},
        "spec": {"account": {"name": "acme"}, "region": {"name": "paris"}},
        "status": {
            "observedGeneration": 2, "lastAppliedChart": "r/c:1",
            "placements": [{"cluster": "edge-1", "clusterUid": "u"}],
            "conditions": [condition("Ready", ready.0, ready.1, "a message")],
        },
    })
}

#[test]
fn deployment_is_explained_with_its_member() {
    let assert_explained = |object: Value, ready: bool, lines: &[&str]| {
        let explanation = explanation::explain_deployment(&object_sources(object), now());
        assert_lines(&explanation, ready, lines);
    };
    let healthy = deployment(("True", "Deployed"));
    let lines = [
        "✓ KryptonDeployment accounts/acme names the region paris\n✓ Deployed: a message\n✓ the chart that was installed last is r/c:1\n✓ the hub hub-0 leads\n",
        "edge-1\n  ✓ its agent (0.1.0) is connected",
    ];
    assert_explained(healthy.clone(), true, &lines);
    let failed = "✗ HelmFailed: a message\n    → remove the cause, such as a wrong value; to retry now: kubectl krypton resync deployment acme -n accounts\n";
    assert_explained(deployment(("False", "HelmFailed")), false, &[failed]);
    let message = "cluster edge-1: Installing: install applied, waiting: Deployment a/b: 0 of 1";
    let waiting = condition("Ready", "False", "NotReady", message);
    let waiting = with_condition(deployment(("False", "NotReady")), waiting);
    let line = format!("✗ NotReady: {message}\n    → look at the workload");
    assert_explained(waiting, false, &[line.as_str()]);
    let unresolved = condition("TargetClusterResolved", "False", "SecretNotFound", "none");
    let unresolved = with_condition(deployment(("False", "EdgeUnavailable")), unresolved);
    let lines = ["✗ SecretNotFound: none\n", "✗ EdgeUnavailable: a message\n"];
    assert_explained(unresolved, false, &lines);
    let history = json!([{
        "revision": 3, "cluster": "edge-1", "chart": "echo", "chartVersion": "1.1.0",
        "outcome": "Failed", "cause": "Chart", "by": "krypton-hub",
    }]);
    let line = "! revision 3 echo 1.1.0 on edge-1: Failed, cause Chart by krypton-hub\n";
    let upgraded = with_field(healthy.clone(), "/status/history", history);
    assert_explained(upgraded, true, &[line]);
    let paused = json!({"mesh.openkcm.io/paused": "true"});
    let leaving = json!([{"cluster": "edge-1", "clusterUid": "u", "removing": true}]);
    let with = |pointer: &str, value: Value| with_field(healthy.clone(), pointer, value);
    let line = "→ kubectl krypton resume deployment acme -n accounts";
    assert_explained(with("/metadata/annotations", paused), true, &[line]);
    let deleted = with("/metadata/deletionTimestamp", json!("2026-11-23T00:30:00Z"));
    let line = "! being deleted since 2026-11-23T00:30:00Z (10m ago)";
    assert_explained(deleted, false, &[line]);
    let line = "! it was changed, and its status does not reflect the change yet\n";
    assert_explained(with("/metadata/generation", json!(3)), false, &[line]);
    let line = "  ! the release is being uninstalled there\n";
    assert_explained(with("/status/placements", leaving), true, &[line]);
    let line = "? it has no status yet\n";
    assert_explained(with("/status/conditions", json!([])), false, &[line]);
    let mut away = object_sources(healthy);
    away.members.insert("edge-1".to_owned(), Lookup::NotFound);
    let explanation = explanation::explain_deployment(&away, now());
    assert_lines(&explanation, false, &["✗ no EdgeCluster has this name"]);
}
