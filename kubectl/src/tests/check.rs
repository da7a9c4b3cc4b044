//! `check`: its output for programs, and Helm's rights for a rendered chart.

use super::*;

/// Responds for a cluster without CRDs of Krypton, whose clock is right.
fn respond(uri: &str, allowed: bool) -> Response {
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "metadata": {}, "spec": {}, "status": {"allowed": allowed},
    });
    let version = json!({"major": "1", "minor": "36", "gitVersion": "v1.36.3"});
    let (code, body) = match uri {
        "/version" => (200, version),
        _ if uri.contains("/selfsubjectaccessreviews") => (201, review),
        _ => failure(404, "NotFound", "no such CRD"),
    };
    let mut response = json_response(code, &body);
    let date = "Fri, 02 Jan 2026 03:04:05 GMT".parse().unwrap();
    response.headers_mut().insert(header::DATE, date);
    response
}

#[tokio::test]
async fn check_prints_json_with_link_of_defect() {
    for allowed in [true, false] {
        let server = FakeApiServer::with_handler(move |uri| respond(uri, allowed)).await;
        let output = match server.run(&["check", "--pre", "-o", "json"]).await {
            Ok(output) => output,
            Err(KubectlError::ChecksFailed { output }) => output,
            Err(error) => panic!("{error}"),
        };
        let json: Value = serde_json::from_str(&output.stdout).unwrap();
        assert_eq!(json["passed"], allowed, "{json}");
        let lines = json["lines"].as_array().unwrap();
        let marks: Vec<&str> = lines
            .iter()
            .map(|line| line["mark"].as_str().unwrap())
            .collect();
        let rights = if allowed { "ok" } else { "failed" };
        assert_eq!(marks, ["ok", "ok", rights], "{json}");
        let docs = lines[2]["docs"].as_str().unwrap_or_default();
        let has_link = docs.starts_with("https://") && docs.ends_with("/install.md#prerequisites");
        assert_eq!(has_link, !allowed, "{json}");
    }
}

#[tokio::test]
async fn check_of_hub_only_omits_members() {
    let respond = |uri: &str| match uri.contains("/edgeclusters?") {
        true => {
            let (code, body) = list_of(fleet(), "");
            json_response(code, &body)
        }
        false => respond(uri, true),
    };
    let server = FakeApiServer::with_handler(respond).await;
    let lines = async |args: &[&str]| match server.run(args).await {
        Err(KubectlError::ChecksFailed { output }) => output.stdout,
        other => panic!("{other:?}"),
    };
    let (all, hub_only) = (
        lines(&["check"]).await,
        lines(&["check", "--hub-only"]).await,
    );
    assert!(
        all.contains("edge-22") && !hub_only.contains("edge-22"),
        "{hub_only}"
    );
    assert!(all.starts_with(hub_only.trim_end()), "{all}\n{hub_only}");
}

const MANIFEST: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n---\n\
                        apiVersion: example.org/v1\nkind: Thing\nmetadata: {name: b}\n";

/// Like [`respond`], for a cluster with the kind ConfigMap, and without pods.
fn respond_with_kinds(uri: &str, allowed: bool) -> Response {
    let kind = |name: &str| {
        json!({
            "name": name, "singularName": "configmap", "namespaced": true, "kind": "ConfigMap",
            "verbs": ["get"],
        })
    };
    let kinds = json!({
        "apiVersion": "v1", "kind": "APIResourceList", "groupVersion": "v1",
        "resources": [kind("configmaps"), kind("configmaps/status")],
    });
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "metadata": {}, "spec": {}, "status": {"allowed": allowed},
    });
    let (code, body) = match uri {
        "/api/v1" => (200, kinds),
        _ if uri.contains("/subjectaccessreviews") => (201, review),
        _ if uri.contains("/pods") => list_of(Vec::new(), ""),
        _ => return respond(uri, allowed),
    };
    json_response(code, &body)
}

#[tokio::test]
async fn manifest_is_checked_for_named_account() {
    let account = ["--account", "team:helm"];
    let cases: [(&[&str], bool, &[&str], &str); 3] = [
        (
            &account,
            true,
            &["ok", "ok", "warning", "ok"],
            "Helm's account team/helm has the rights for this chart (1 kinds)",
        ),
        (
            &account,
            false,
            &["ok", "ok", "warning", "failed"],
            "may not create, delete, get, patch configmaps in all namespaces; create,",
        ),
        (
            &[],
            true,
            &["ok", "ok", "unknown"],
            "no agent or hub runs in",
        ),
    ];
    for (more, allowed, expected_marks, expected_text) in cases {
        let server = FakeApiServer::with_handler(move |uri| respond_with_kinds(uri, allowed)).await;
        let file = server.directory.path().join("chart.yaml");
        std::fs::write(&file, MANIFEST).unwrap();
        let args = ["check", "-o", "json", "--manifest", file.to_str().unwrap()];
        let output = match server.run(&[&args[..], more].concat()).await {
            Ok(output) => output,
            Err(KubectlError::ChecksFailed { output }) => output,
            Err(error) => panic!("{error}"),
        };
        let json: Value = serde_json::from_str(&output.stdout).unwrap();
        let lines = json["lines"].as_array().unwrap();
        let marks: Vec<&str> = lines
            .iter()
            .map(|line| line["mark"].as_str().unwrap())
            .collect();
        assert_eq!(marks, expected_marks, "{json}");
        let text = lines.last().unwrap()["text"].as_str().unwrap();
        assert!(text.contains(expected_text), "{json}");
        let requests = server.requests().into_iter();
        let reviews = requests.filter(|(_, body, _)| body["kind"] == "SubjectAccessReview");
        let users: Vec<Value> = reviews
            .map(|(_, body, _)| body["spec"]["user"].clone())
            .collect();
        // Four verbs for the ConfigMap, and five for the release.
        let expected =
            vec!["system:serviceaccount:team:helm"; if more.is_empty() { 0 } else { 10 }];
        assert_eq!(users, expected, "{json}");
    }
}
