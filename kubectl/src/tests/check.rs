//! `check`: its output for programs.

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
