//! `check`: its output for programs, and Helm's rights for a rendered chart.

use krypton_types::join_bundle::JoinBundle;

use super::*;

/// Responds for a cluster without CRDs of Krypton, whose clock is right.
fn respond(uri: &str, allowed: bool) -> Response {
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "metadata": {}, "spec": {}, "status": {"allowed": allowed},
    });
    let version = json!({"major": "1", "minor": "36", "gitVersion": "v1.36.3"});
    let response = json_response(match uri {
        "/version" => (200, version),
        _ if uri.contains("/selfsubjectaccessreviews") => (201, review),
        _ => failure(404, "NotFound", "no such CRD"),
    });
    ([(header::DATE, "Fri, 02 Jan 2026 03:04:05 GMT")], response).into_response()
}

/// Runs a check with JSON output. Returns its result and its lines.
async fn run_check(server: &FakeApiServer, args: &[&str]) -> (bool, Vec<Value>) {
    let args = [&["check", "-o", "json"][..], args].concat();
    let output = match server.run(&args).await {
        Ok(output) => output,
        Err(KubectlError::NotReady { output }) => output,
        Err(error) => panic!("{error}"),
    };
    let json: Value = serde_json::from_str(&output.stdout).unwrap();
    let lines = json["lines"].as_array().unwrap().clone();
    (json["passed"].as_bool().unwrap(), lines)
}

fn marks(lines: &[Value]) -> Vec<&str> {
    let marks = lines.iter().map(|line| line["mark"].as_str().unwrap());
    marks.collect()
}

#[tokio::test]
async fn check_prints_json_with_link_of_defect() {
    for allowed in [true, false] {
        let server = FakeApiServer::with_handler(move |uri| respond(uri, allowed)).await;
        let (passed, lines) = run_check(&server, &["--pre"]).await;
        assert_eq!(passed, allowed, "{lines:?}");
        let rights = if allowed { "ok" } else { "failed" };
        assert_eq!(marks(&lines), ["ok", "ok", rights], "{lines:?}");
        let docs = lines[2]["docs"].as_str().unwrap_or_default();
        let has_link = docs.starts_with("https://") && docs.ends_with("/install.md#prerequisites");
        assert_eq!(has_link, !allowed, "{lines:?}");
    }
}

#[tokio::test]
async fn check_of_hub_only_omits_members() {
    let respond = |uri: &str| match uri.contains("/edgeclusters?") {
        true => json_response(list_of(fleet(), "")),
        false => respond(uri, true),
    };
    let server = FakeApiServer::with_handler(respond).await;
    let lines = async |args: &[&str]| match server.run(args).await {
        Err(KubectlError::NotReady { output }) => output.stdout,
        other => panic!("{other:?}"),
    };
    let all = lines(&["check"]).await;
    let hub_only = lines(&["check", "--hub-only"]).await;
    assert!(all.contains("edge-22"), "{all}");
    assert!(!hub_only.contains("edge-22"), "{hub_only}");
    assert!(all.starts_with(hub_only.trim_end()), "{all}\n{hub_only}");
}

#[tokio::test]
async fn missing_crd_has_one_line() {
    let server = FakeApiServer::with_handler(|uri| respond(uri, true)).await;
    let (_, lines) = run_check(&server, &[]).await;
    let text = format!("{lines:?}");
    assert!(
        text.contains("edgeclusters.mesh.openkcm.io is missing"),
        "{text}"
    );
    assert!(!text.contains("the members are not known"), "{text}");
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
    json_response(match uri {
        "/api/v1" => (200, kinds),
        _ if uri.contains("/subjectaccessreviews") => (201, review),
        _ if uri.contains("/pods") => list_of(Vec::new(), ""),
        _ => return respond(uri, allowed),
    })
}

#[tokio::test]
async fn manifest_is_checked_for_named_account() {
    let account = ["--account", "team:helm"];
    let granted = "Helm's account team/helm has the rights for this chart (1 kinds)";
    let missing = "may not create, delete, get, patch configmaps in all namespaces; create,";
    let cases: [(&[&str], bool, &str, &str); 3] = [
        (&account, true, "ok ok warning ok", granted),
        (&account, false, "ok ok warning failed", missing),
        (&[], true, "ok ok unknown", "no agent or hub runs in"),
    ];
    for (more, allowed, expected_marks, expected_text) in cases {
        let server = FakeApiServer::with_handler(move |uri| respond_with_kinds(uri, allowed)).await;
        let file = server.directory.path().join("chart.yaml");
        std::fs::write(&file, MANIFEST).unwrap();
        let args = ["--manifest", file.to_str().unwrap()];
        let (_, lines) = run_check(&server, &[&args[..], more].concat()).await;
        assert_eq!(marks(&lines).join(" "), expected_marks, "{lines:?}");
        let text = lines.last().unwrap()["text"].as_str().unwrap();
        assert!(text.contains(expected_text), "{lines:?}");
        let requests = server.requests().into_iter();
        let reviews = requests.filter(|(_, body, _)| body["kind"] == "SubjectAccessReview");
        let users: Vec<Value> = reviews
            .map(|(_, body, _)| body["spec"]["user"].clone())
            .collect();
        // Four verbs for the ConfigMap, and five for the release.
        let expected =
            vec!["system:serviceaccount:team:helm"; if more.is_empty() { 0 } else { 10 }];
        assert_eq!(users, expected, "{lines:?}");
    }
}

#[tokio::test]
async fn manifest_before_join_is_checked_for_default_account() {
    for (allowed, mark, expected) in [
        (true, "ok", "has the rights for this chart (1 kinds)"),
        (false, "warning", "may not create, delete, get, patch"),
    ] {
        let server = FakeApiServer::with_handler(move |uri| respond_with_kinds(uri, allowed)).await;
        let write = |name: &str, content: &str| {
            let file = server.directory.path().join(name);
            std::fs::write(&file, content).unwrap();
            file.to_str().unwrap().to_owned()
        };
        let bundle = JoinBundle {
            cluster: "edge-1".to_owned(),
            // An invalid name: the resolver sends no query.
            addresses: vec!["hub..invalid:7443".to_owned()],
            certificate_authority: ca_pem(),
            token: format!("{}.{}", "a".repeat(16), "0".repeat(64)),
            expires: now(),
        };
        let bundle = write("edge-1.yaml", &bundle.to_yaml().unwrap());
        let manifest = write("chart.yaml", MANIFEST);
        let args = ["--bundle", &bundle, "--manifest", &manifest];
        let (_, lines) = run_check(&server, &args).await;
        let line = lines.last().unwrap();
        assert_eq!(line["mark"], mark, "{lines:?}");
        let text = line["text"].as_str().unwrap();
        let account =
            "Helm's account krypton-system/krypton-agent-helm (default of the agent's chart)";
        assert!(text.starts_with(&format!("{account} {expected}")), "{text}");
    }
}

/// Responds with objects that have a defect if `code` is 200, otherwise with this code.
fn respond_with_defects(uri: &str, code: u16) -> Response {
    let lease = json!({
        "metadata": {"managedFields": [{
            "fieldsV1": {"f:spec": {"f:renewTime": {}}}, "time": "2026-01-02T03:02:00Z",
        }]},
        "spec": {"holderIdentity": "hub/a", "renewTime": "2026-01-02T03:00:00.000000Z"},
    });
    let pod = json!({
        "metadata": {"name": "hub-0"},
        "spec": {"serviceAccountName": "hub", "containers": [{"name": "krypton-hub"}]},
    });
    let version = json!({"major": "1", "minor": "29", "gitVersion": "v1.29.0"});
    let response = json_response(match uri {
        "/version" => (200, version),
        _ if code != 200 => failure(code, "Failed", "no"),
        _ if uri.contains("/leases/") => (200, lease),
        _ if uri.contains("/pods") => list_of(vec![pod], ""),
        _ if uri.contains("/edgeclusters?") => list_of(fleet(), ""),
        _ if uri.contains("/configmaps/") => {
            (200, json!({"metadata": {}, "data": {"version": "0.0.1"}}))
        }
        _ => return respond_with_kinds(uri, false),
    });
    ([(header::DATE, "Fri, 02 Jan 2026 03:06:05 GMT")], response).into_response()
}

#[tokio::test]
async fn each_defect_has_remedy_and_page() {
    let mut defects = 0;
    for code in [200, 403, 404, 500] {
        let server = FakeApiServer::with_handler(move |uri| respond_with_defects(uri, code)).await;
        let file = server.directory.path().join("chart.yaml");
        std::fs::write(&file, MANIFEST).unwrap();
        let file = file.to_str().unwrap();
        let commands: [&[&str]; 4] = [
            &[],
            &["--pre"],
            &["--manifest", file],
            &["--manifest", file, "--account", "team:helm"],
        ];
        for args in commands {
            let (_, lines) = run_check(&server, args).await;
            for line in lines.iter().filter(|line| line["mark"] != "ok") {
                let remedy = line["remedy"].as_str().unwrap_or_default();
                let page = line["docs"].as_str().unwrap_or_default();
                let is_complete = !remedy.is_empty() && page.contains(".md#");
                assert!(is_complete, "{code} {args:?}: {line}");
                defects += 1;
            }
        }
    }
    assert!(defects > 50, "{defects}");
}
