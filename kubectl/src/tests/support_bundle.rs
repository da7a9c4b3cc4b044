//! `support-bundle`: the files of a bundle.

use super::*;

#[tokio::test]
async fn support_bundle_redacts_secrets_and_lists_missing_files() {
    let pod = |name: &str, container: &str| {
        json!({
            "metadata": {"name": name, "namespace": "krypton-system"},
            "spec": {"containers": [{
                "name": container,
                "env": [{"name": "HTTPS_PROXY", "value": "http://me:canary@proxy"}],
            }]},
        })
    };
    let server = FakeApiServer::with_handler(move |uri| {
        let path = uri.split('?').next().unwrap();
        json_response(match path {
            "/apis/mesh.openkcm.io/v1alpha1/edgeclusters" => list_of(fleet(), ""),
            "/apis/mesh.openkcm.io/v1alpha1/tenants" => {
                let mut acme = tenant("default", "acme", json!({"lastMessage": "token: canary"}));
                acme["spec"]["values"] = json!({"db": "canary"});
                list_of(vec![acme], "")
            }
            "/api/v1/namespaces/krypton-system/pods" => {
                let pods = [pod("krypton-hub-0", "krypton-hub"), pod("somebody", "else")];
                list_of(pods.to_vec(), "")
            }
            "/api/v1/namespaces/krypton-system/pods/krypton-hub-0/log" => {
                match uri.contains("previous=true") {
                    true => failure(400, "BadRequest", "previous terminated container not found"),
                    false => return "hub starts\npassword=canary\n".into_response(),
                }
            }
            _ => failure(403, "Forbidden", "not you"),
        })
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bundle.tar.gz");
    let args = ["support-bundle", "--file", file.to_str().unwrap()];
    let output = server.run(&args).await.unwrap();
    assert_eq!(output.stdout, format!("{}\n", file.display()));
    assert!(output.stderr.contains("README.txt"), "{}", output.stderr);
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
    assert_eq!(mode & 0o077, 0);
    let files = unpacked(std::fs::File::open(&file).unwrap());
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let expected = [
        "README.txt",
        "clusters.yaml",
        "krypton-system/logs/krypton-hub-0.log",
        "krypton-system/pods.yaml",
        "tenants.yaml",
        "versions.json",
    ];
    assert_eq!(names, expected);
    for (name, text) in &files {
        assert!(!text.contains("canary"), "{name}: {text}");
    }
    assert!(files["krypton-system/logs/krypton-hub-0.log"].contains("hub starts\n"));
    assert!(!files["krypton-system/pods.yaml"].contains("somebody"));
    let tenants = &files["tenants.yaml"];
    assert!(tenants.contains("db:"), "{tenants}");
    let readme = &files["README.txt"];
    for missing in [
        "deployments.yaml: ",
        "crds.yaml: ",
        "events.yaml: ",
        "releases.yaml: ",
    ] {
        assert!(readme.contains(missing), "{readme}");
    }
    assert!(!readme.contains("previous.log"), "{readme}");
    // The command overwrites no file. If it can read nothing, it creates no file.
    let second_error = server.run(&args).await.unwrap_err();
    assert_eq!(second_error.exit_code(), ExitCode::Refused);
    let forbidding_server =
        FakeApiServer::with_handler(|_| json_response(failure(403, "Forbidden", "not you")));
    let unwritten_file = folder.path().join("none.tar.gz");
    let args = ["support-bundle", "--file", unwritten_file.to_str().unwrap()];
    let error = forbidding_server.await.run(&args).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::NotPermitted);
    assert!(!unwritten_file.exists());
}
