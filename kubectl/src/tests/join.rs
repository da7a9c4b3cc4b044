//! `join`: bundles, and the requests that create them.

use super::*;

fn join_info(addresses: &str) -> (u16, Value) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let pem = params.self_signed(&key).unwrap().pem();
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "krypton-hub-join"},
        "data": {"ca.crt": pem, "addresses": addresses},
    });
    (200, object)
}

fn created_secret() -> (u16, Value) {
    let object = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}});
    (201, object)
}

fn no_join_info() -> (u16, Value) {
    failure(404, "NotFound", "configmaps \"krypton-hub-join\" not found")
}

fn hub_pod() -> (u16, Value) {
    let container = json!({"name": "krypton-hub", "image": "r/krypton-hub:1"});
    let pod = json!({"metadata": {"name": "hub-0"}, "spec": {"containers": [container]}});
    list_of(vec![pod], "")
}

fn no_pods() -> (u16, Value) {
    list_of(Vec::new(), "")
}

fn no_member() -> (u16, Value) {
    failure(404, "NotFound", "edgeclusters \"edge-1\" not found")
}

/// A server whose hub names its address, without a member of the name.
pub(super) async fn joinable_server() -> FakeApiServer {
    FakeApiServer::with_responses(vec![
        join_info("hub:1"),
        no_pods(),
        no_member(),
        created_secret(),
    ])
    .await
}

#[tokio::test]
async fn join_prints_bundle_and_next_command() {
    let info = join_info("hub:7443\n10.0.0.1:7443");
    let server =
        FakeApiServer::with_responses(vec![info, hub_pod(), no_member(), created_secret()]).await;
    let output = server.run(&["join", "edge-1"]).await.unwrap();
    let bundle = krypton_types::join_bundle::JoinBundle::parse(&output.stdout).unwrap();
    assert_eq!(bundle.cluster, "edge-1");
    assert_eq!(bundle.addresses, ["hub:7443", "10.0.0.1:7443"]);
    assert_eq!(bundle.expires.to_string(), "2026-01-02T04:04:05Z");
    assert!(
        output
            .stderr
            .contains("install agent --bundle edge-1.yaml --set-string image.registry=r --set-string image.tag=1\n")
            && output.stderr.contains("until 2026-01-02T04:04:05Z"),
        "{}",
        output.stderr
    );
    let uris = server.uris();
    assert_eq!(
        uris[0],
        "/api/v1/namespaces/krypton-system/configmaps/krypton-hub-join"
    );
    assert_eq!(
        uris[2],
        "/apis/mesh.openkcm.io/v1alpha1/edgeclusters/edge-1"
    );
    assert!(
        uris[3].starts_with("/api/v1/namespaces/krypton-system/secrets"),
        "{uris:?}"
    );
}

#[tokio::test]
async fn join_searches_candidate_namespaces_for_hub() {
    let forbidden = || failure(403, "Forbidden", "configmaps is forbidden: no");
    for first_response in [no_join_info(), forbidden()] {
        let responses = vec![
            first_response,
            no_join_info(),
            join_info("hub:1"),
            no_pods(),
            no_member(),
            created_secret(),
        ];
        let server = FakeApiServer::with_responses(responses).await;
        server.run(&["join", "edge-1"]).await.unwrap();
        assert!(server.uris()[5].contains("/team/secrets"));
    }
    let server = FakeApiServer::with_responses(vec![
        no_join_info(),
        join_info("hub:1"),
        no_pods(),
        no_member(),
        created_secret(),
    ])
    .await;
    server.run(&["join", "edge-1"]).await.unwrap();
    assert!(server.uris()[4].contains("/krypton/secrets"));
    let server = joinable_server().await;
    server
        .run(&["join", "edge-1", "--hub-namespace", "hub"])
        .await
        .unwrap();
    assert!(server.uris()[3].contains("/hub/secrets"));

    let server = FakeApiServer::with_responses(vec![
        no_join_info(),
        no_join_info(),
        no_join_info(),
        no_pods(),
        no_pods(),
        no_pods(),
    ])
    .await;
    let text = server.error(&["join", "edge-1"]).await;
    assert!(
        text.contains("in the namespaces krypton-system and krypton and team"),
        "{text}"
    );
    let text = error_with(
        vec![no_join_info(), no_pods()],
        &["join", "edge-1", "--hub-namespace", "hub"],
    )
    .await;
    assert!(text.contains("in the namespace hub,"), "{text}");
    let text = error_with(
        vec![forbidden(), no_join_info(), no_join_info()],
        &["join", "edge-1"],
    )
    .await;
    assert!(
        text.contains("verb get on configmaps")
            && text.contains("krypton-hub-join in the namespace krypton-system"),
        "{text}"
    );
}

#[tokio::test]
async fn join_waits_for_hub_that_starts() {
    let responses = vec![
        no_join_info(),
        hub_pod(),
        join_info("hub:1"),
        hub_pod(),
        no_member(),
        created_secret(),
    ];
    let server = FakeApiServer::with_responses(responses).await;
    server
        .run(&["join", "edge-1", "--hub-namespace", "hub"])
        .await
        .unwrap();
    assert_eq!(server.uris().len(), 6);
}

#[tokio::test]
async fn join_requires_published_or_explicit_address() {
    let server = FakeApiServer::with_responses(vec![join_info("")]).await;
    let text = server.error(&["join", "edge-1"]).await;
    assert!(
        text.contains("--advertise=HOST:PORT") && text.contains("--address HOST:PORT"),
        "{text}"
    );
    let server = joinable_server().await;
    let args = [
        "join",
        "edge-1",
        "--address=a:1",
        "--address=b:2",
        "--ttl=30m",
    ];
    let output = server.run(&args).await.unwrap();
    let bundle = krypton_types::join_bundle::JoinBundle::parse(&output.stdout).unwrap();
    assert_eq!(bundle.addresses, ["a:1", "b:2"]);
    assert_eq!(bundle.expires.to_string(), "2026-01-02T03:34:05Z");
}

#[tokio::test]
async fn published_join_info_is_validated_before_token_creation() {
    let mut invalid_ca = join_info("hub:1");
    invalid_ca.1["data"]["ca.crt"] = json!("x");
    for (info, expected) in [
        (invalid_ca, "certificateAuthority"),
        (join_info("hub"), "\"hub\" is not HOST:PORT"),
    ] {
        let text = error_with(vec![info], &["join", "edge-1"]).await;
        assert!(
            text.contains(expected)
                && text.contains("ConfigMap krypton-hub-join in the namespace krypton-system"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn unknown_image_of_hub_is_reported() {
    let hint = "the image of the hub is unknown, because you may not list its pods or it runs outside of pods; \
                if the agent's image is not found, add --set image.registry=REGISTRY";
    let cases: [(&[&str], bool); 3] = [
        (&[], true),
        (&["--set=image.registry=r"], false),
        (&["--chart=own"], false),
    ];
    for (flags, is_hinted) in cases {
        let server = joinable_server().await;
        let args = [&["join", "edge-1"][..], flags].concat();
        let output = server.run(&args).await.unwrap();
        assert_eq!(output.stderr.contains(hint), is_hinted, "{flags:?}");
    }
    let responses = vec![
        join_info("127.0.0.1:1"),
        no_pods(),
        no_member(),
        created_secret(),
        no_pods(),
    ];
    let server = FakeApiServer::with_responses(responses).await;
    let helm = helm_stub(&server, "[ \"$1\" = version ]");
    let flags = [
        "--agent-context=home",
        "--skip-checks",
        "--helm",
        helm.as_str(),
    ];
    let error = server
        .error(&[&["join", "edge-1"][..], &flags].concat())
        .await;
    for expected in ["a possible cause: ", hint, "Helm failed for krypton-agent"] {
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn join_names_missing_secret_create_permission() {
    let forbidden = failure(403, "Forbidden", "secrets is forbidden: no");
    let text = error_with(
        vec![join_info("hub:1"), no_pods(), no_member(), forbidden],
        &["join", "edge-1"],
    )
    .await;
    assert!(
        text.contains("verb create on secrets") && text.contains("\"home\""),
        "{text}"
    );
}
