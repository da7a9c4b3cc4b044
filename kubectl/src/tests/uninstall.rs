//! `uninstall`: the search for the release, and releases without a Deployment.

use super::*;

/// A cluster without Deployments, pods and CRDs.
async fn empty_cluster() -> FakeApiServer {
    FakeApiServer::with_handler(|uri| {
        json_response(match uri.contains("/deployments") {
            true => list_of(Vec::new(), ""),
            false => failure(404, "NotFound", "not found"),
        })
    })
    .await
}

/// Creates a Helm program with a release of the hub in this namespace.
fn helm_with_hub(server: &FakeApiServer, namespace: &str) -> String {
    let script = format!(
        "case \"$*\" in\nlist*'--namespace {namespace}') echo krypton-hub;;\n\
         uninstall*) echo uninstalled;;\nesac"
    );
    helm_stub(server, &script)
}

#[tokio::test]
async fn release_without_deployment_is_found_and_uninstalled() {
    let server = empty_cluster().await;
    for namespace in ["krypton", "krypton-system", "team"] {
        let helm = helm_with_hub(&server, namespace);
        let args = ["uninstall", "hub", "--helm", helm.as_str()];
        let output = server.run(&args).await.unwrap();
        assert_eq!(output.stdout, "uninstalled\n");
        let expected = format!("Secret {namespace}/krypton-hub-ca");
        assert!(output.stderr.contains(&expected), "{}", output.stderr);
    }
}

#[tokio::test]
async fn missing_release_names_searched_namespaces() {
    let server = empty_cluster().await;
    let helm = helm_with_hub(&server, "hidden");
    let args = ["uninstall", "hub", "--helm", helm.as_str()];
    let error = server.run(&args).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::NotFound);
    let expected = "there is no Helm release krypton-hub in the namespace krypton or krypton-system or team on \
                    the cluster \"home\"; name its namespace with --hub-namespace";
    assert!(error.to_string().starts_with(expected), "{error}");
    assert!(server.uris().is_empty());
}
