//! `rotate-ca`: start, progress and lock-out of a rotation.

use super::*;

/// The Secret's metadata with these annotations.
fn ca_secret(annotations: Value) -> (u16, Value) {
    let object = json!({
        "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
        "metadata": {"name": "krypton-hub-ca", "resourceVersion": "7", "annotations": annotations},
    });
    (200, object)
}

fn root_digest(content: &str) -> String {
    krypton_types::root_digest::RootDigest::from_der(content.as_bytes()).to_string()
}

/// The Secret during this phase of a rotation, then the members.
fn rotation_in_phase(phase: &str) -> Vec<(u16, Value)> {
    vec![ca_secret_in_phase(phase), members_during_rotation()]
}

fn ca_secret_in_phase(phase: &str) -> (u16, Value) {
    let rotation_state =
        json!({"phase": phase, "root": root_digest("new"), "since": "2026-01-02T03:00:05Z"});
    ca_secret(json!({"mesh.openkcm.io/ca-rotation": rotation_state.to_string()}))
}

/// edge-1 and edge-4 are finished, edge-2 is disconnected, and edge-3 is too old to report its roots.
fn members_during_rotation() -> (u16, Value) {
    let member = |name: &str, roots: Value, connected: &str| {
        let status = json!({
            "certificateExpiry": "2026-02-01T00:00:00Z", "agentVersion": "0.1.0",
            "lastSeen": "2026-01-02T03:02:05Z", "trustedRoots": roots,
            "conditions": [condition("Connected", connected, "x", "")],
        });
        cluster(name, json!({}), status)
    };
    let trusts_both =
        json!({"trusted": [root_digest("new"), root_digest("old")], "issuer": root_digest("old")});
    let trusts_old = json!({"trusted": [root_digest("old")], "issuer": root_digest("old")});
    let reports_no_roots = json!({"issuer": root_digest("old")});
    let members = vec![
        member("edge-1", trusts_both.clone(), "True"),
        member("edge-2", trusts_old, "False"),
        member("edge-3", reports_no_roots, "True"),
        member("edge-4", trusts_both, "True"),
    ];
    list_of(members, "")
}

#[tokio::test]
async fn rotate_ca_patches_annotation_without_reading_key() {
    let server =
        FakeApiServer::with_responses(vec![ca_secret(json!({})), ca_secret(json!({}))]).await;
    let output = server.run(&["rotate-ca"]).await.unwrap();
    assert!(output.stdout.contains("rotate-ca --status"), "{output:?}");
    let uris = server.uris();
    let secret = "/api/v1/namespaces/krypton-system/secrets/krypton-hub-ca";
    assert!(uris.iter().all(|uri| uri.starts_with(secret)), "{uris:?}");
    let requests = server.requests();
    assert_eq!(requests[1].0, "PATCH");
    assert_eq!(
        requests[1].1,
        json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {
                "resourceVersion": "7",
                "annotations": {"mesh.openkcm.io/rotate-ca": "2026-01-02T03:04:05Z"},
            },
        })
    );
    for (_, _, accepted) in requests {
        assert!(accepted.contains("PartialObjectMetadata"), "{accepted}");
    }
}

#[tokio::test]
async fn there_is_one_rotation_at_a_time() {
    let requested = ca_secret(json!({"mesh.openkcm.io/rotate-ca": "2026-01-02T03:04:00Z"}));
    for (responses, expected) in [
        (rotation_in_phase("Announced"), "in progress (Announced)"),
        (rotation_in_phase("Switched"), "in progress (Switched)"),
        (vec![requested], "requested already"),
    ] {
        let text = error_with(responses, &["rotate-ca"]).await;
        let is_complete = text.contains(expected) && text.contains("--status");
        assert!(is_complete, "{text}");
    }
    // After a completed rotation, the user can start another.
    let mut responses = rotation_in_phase("Steady");
    responses.push(ca_secret(json!({})));
    run_with(responses, &["rotate-ca"]).await;
    // After a conflict, the command evaluates the hub's new state.
    let conflict = failure(409, "Conflict", "the object has been modified");
    let mut responses = vec![ca_secret(json!({})), conflict];
    responses.extend(rotation_in_phase("Announced"));
    let text = error_with(responses, &["rotate-ca"]).await;
    assert!(text.contains("in progress"), "{text}");
}

#[tokio::test]
async fn rotation_status_shows_phase_and_pending_clusters() {
    let show = ["rotate-ca", "--status"];
    let output = run_with(rotation_in_phase("Announced"), &show).await;
    let expected = format!(
        "\
Announced 4m ago: agents receive the new root; when all trust it, it signs. It is {}.
WAITING-FOR   CONNECTED   LAST-SEEN   AGENT   WHY
edge-2        False       2m          0.1.0   its agent does not trust the new root yet: bring its agent back, or delete EdgeCluster edge-2 if the cluster is gone
edge-3        True        2m          0.1.0   its agent is too old to report its trusted roots: upgrade its agent
",
        root_digest("new").get(..16).unwrap()
    );
    assert_eq!(output.stdout, expected);
    let stdout = run_with(rotation_in_phase("Switched"), &show).await.stdout;
    assert!(stdout.starts_with("Switched 4m ago"), "{stdout}");
    assert!(stdout.contains("edge-1  "), "{stdout}");
    let no_members = vec![ca_secret_in_phase("Announced"), list_of(vec![], "")];
    let stdout = run_with(no_members, &show).await.stdout;
    assert!(stdout.ends_with("No cluster blocks the rotation.\n"));
    let stdout = run_with(vec![ca_secret(json!({}))], &show).await.stdout;
    assert!(stdout.contains("there has been none"));
    let requested = ca_secret(json!({"mesh.openkcm.io/rotate-ca": "2026-01-02T03:02:05Z"}));
    let CommandOutput { stdout, stderr } = run_with(vec![requested], &show).await;
    assert!(stdout.contains("requested 2m ago"), "{stdout}");
    assert!(stderr.contains("No hub has accepted it"), "{stderr}");
}

#[tokio::test]
async fn only_named_clusters_are_locked_out() {
    let lock_out_error = async |args: &[&str]| {
        let server = FakeApiServer::with_responses(rotation_in_phase("Announced")).await;
        let text = server.error(args).await;
        assert_eq!(server.uris().len(), 2, "nothing is written");
        text
    };
    let text = lock_out_error(&["rotate-ca", "--force"]).await;
    for word in [
        "2 clusters will have to join again",
        "edge-2 (its agent does not trust",
        "--force --lock-out=edge-2,edge-3'",
    ] {
        assert!(text.contains(word), "{text}");
    }
    let text = lock_out_error(&["rotate-ca", "--force", "--lock-out=edge-2"]).await;
    assert!(text.contains("--lock-out=edge-2,edge-3"), "{text}");
    let args = ["rotate-ca", "--force", "--lock-out=edge-2,edge-3,edge-4"];
    let text = lock_out_error(&args).await;
    assert!(text.contains("edge-4 is not waited for"), "{text}");

    let mut responses = rotation_in_phase("Announced");
    responses.push(ca_secret(json!({})));
    let server = FakeApiServer::with_responses(responses).await;
    let args = ["rotate-ca", "--force", "--lock-out", "edge-3,edge-2"];
    let output = server.run(&args).await.unwrap();
    let command = "kubectl krypton join edge-2";
    assert!(output.stdout.contains(command), "{output:?}");
    let request = server.requests().pop().unwrap().1;
    let lock_out = &request["metadata"]["annotations"]["mesh.openkcm.io/rotate-ca-lock-out"];
    let lock_out: Value = serde_json::from_str(lock_out.as_str().unwrap()).unwrap();
    let expected =
        json!({"root": root_digest("new"), "announced": ["edge-2", "edge-3"], "switched": []});
    assert_eq!(lock_out, expected);

    let no_members = vec![ca_secret_in_phase("Announced"), list_of(vec![], "")];
    for (responses, word) in [
        (vec![ca_secret(json!({}))], "no rotation is in progress"),
        (no_members, "no cluster blocks the rotation"),
    ] {
        let args = ["rotate-ca", "--force", "--lock-out=edge-2"];
        let text = error_with(responses, &args).await;
        assert!(text.contains(word), "{text}");
    }
}

#[tokio::test]
async fn rotate_ca_error_names_missing_verb_or_namespaces() {
    let forbidden = || failure(403, "Forbidden", "secrets is forbidden: no");
    let missing = || failure(404, "NotFound", "not found");
    let announced = ca_secret_in_phase("Announced");
    let namespaces = "krypton-system and krypton and team";
    for (responses, expected) in [
        (vec![forbidden(), forbidden(), forbidden()], "verb get"),
        (vec![ca_secret(json!({})), forbidden()], "verb patch"),
        (vec![announced, forbidden()], "verb list"),
        (vec![missing(), missing(), missing()], namespaces),
    ] {
        let text = error_with(responses, &["rotate-ca"]).await;
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("\"home\""), "{text}");
    }
}
