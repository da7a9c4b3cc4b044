//! `join`: bundles, and the requests that create them.

use super::*;

fn join_info(addresses: &str) -> (u16, Value) {
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "krypton-hub-join"},
        "data": {"ca.crt": ca_pem(), "addresses": addresses},
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

/// The responses of a hub that names its address, without a pod, and without a member of the name.
fn joinable() -> Vec<(u16, Value)> {
    let info = join_info("hub:1");
    vec![info, no_pods(), no_member(), created_secret()]
}

pub(super) async fn joinable_server() -> FakeApiServer {
    FakeApiServer::with_responses(joinable()).await
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
    let command = "install agent --bundle edge-1.yaml --set-string image.registry=r --set-string image.tag=1\n";
    for expected in [command, "until 2026-01-02T04:04:05Z"] {
        assert!(output.stderr.contains(expected), "{}", output.stderr);
    }
    let uris = server.uris();
    let namespace = "/api/v1/namespaces/krypton-system";
    assert_eq!(uris[0], format!("{namespace}/configmaps/krypton-hub-join"));
    let member = "/apis/mesh.openkcm.io/v1alpha1/edgeclusters/edge-1";
    assert_eq!(uris[2], member);
    let secrets = format!("{namespace}/secrets");
    assert!(uris[3].starts_with(&secrets), "{uris:?}");
}

#[tokio::test]
async fn join_searches_candidate_namespaces_for_hub() {
    let forbidden = || failure(403, "Forbidden", "configmaps is forbidden: no");
    let join = ["join", "edge-1"];
    let join_in_hub = ["join", "edge-1", "--hub-namespace", "hub"];
    for (args, first_responses, namespace) in [
        (&join[..], vec![no_join_info(), no_join_info()], "team"),
        (&join, vec![forbidden(), no_join_info()], "team"),
        (&join, vec![no_join_info()], "krypton"),
        (&join_in_hub, Vec::new(), "hub"),
    ] {
        let responses = [first_responses, joinable()].concat();
        let server = FakeApiServer::with_responses(responses).await;
        server.run(args).await.unwrap();
        let uri = server.uris().pop().unwrap();
        assert!(uri.contains(&format!("/{namespace}/secrets")), "{uri}");
    }
    let three = |response: fn() -> (u16, Value)| vec![response(), response(), response()];
    let text = error_with([three(no_join_info), three(no_pods)].concat(), &join).await;
    let expected = "in the namespaces krypton-system and krypton and team";
    assert!(text.contains(expected), "{text}");
    let text = error_with(vec![no_join_info(), no_pods()], &join_in_hub).await;
    assert!(text.contains("in the namespace hub,"), "{text}");
    let responses = vec![forbidden(), no_join_info(), no_join_info()];
    let text = error_with(responses, &join).await;
    assert!(text.contains("verb get on configmaps"), "{text}");
    let expected = "krypton-hub-join in the namespace krypton-system";
    assert!(text.contains(expected), "{text}");
}

#[tokio::test]
async fn join_waits_for_hub_that_starts() {
    let mut responses = vec![no_join_info(), hub_pod()];
    responses.extend(joinable());
    let server = FakeApiServer::with_responses(responses).await;
    let args = ["join", "edge-1", "--hub-namespace", "hub"];
    server.run(&args).await.unwrap();
    assert_eq!(server.uris().len(), 6);
}

#[tokio::test]
async fn join_requires_published_or_explicit_address() {
    let join = ["join", "edge-1"];
    let text = error_with(vec![join_info("")], &join).await;
    assert!(text.contains("--advertise=HOST:PORT"), "{text}");
    assert!(text.contains("--address HOST:PORT"), "{text}");
    let flags = ["--address=a:1", "--address=b:2", "--ttl=30m"];
    let output = run_with(joinable(), &[&join[..], &flags].concat()).await;
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
        let object = "ConfigMap krypton-hub-join in the namespace krypton-system";
        assert!(text.contains(expected) && text.contains(object), "{text}");
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
        let args = [&["join", "edge-1"][..], flags].concat();
        let output = run_with(joinable(), &args).await;
        assert_eq!(output.stderr.contains(hint), is_hinted, "{flags:?}");
    }
    let mut responses = joinable();
    responses[0] = join_info("127.0.0.1:1");
    responses.extend([no_member(), no_pods()]);
    let server = FakeApiServer::with_responses(responses).await;
    let helm = helm_stub(&server, "[ \"$1\" = version ]");
    let flags = ["--agent-context=home", "--skip-checks", "--helm", &helm];
    let args = [&["join", "edge-1"][..], &flags].concat();
    let error = server.error(&args).await;
    for expected in [
        "a possible cause: ",
        hint,
        "Helm failed for krypton-agent in the namespace krypton-system",
    ] {
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn join_waits_for_new_session_of_connected_member() {
    let connected = |expiry: &str| {
        let conditions = [condition("Connected", "True", "Connected", "")];
        let status = json!({"conditions": conditions, "certificateExpiry": expiry});
        (200, cluster("edge-1", json!({}), status))
    };
    let previous = "2026-01-05T00:00:00Z";
    let refused =
        "has not connected with the new bundle within 1 s, and the member is connected without it";
    for (later, expected) in [("2026-01-09T00:00:00Z", None), (previous, Some(refused))] {
        let responses = vec![
            join_info("127.0.0.1:1"),
            no_pods(),
            connected(previous),
            created_secret(),
            connected(previous),
            connected(later),
        ];
        let server = FakeApiServer::with_responses(responses).await;
        let helm = helm_stub(&server, "exit 0");
        let flags = [
            "--agent-context=home",
            "--skip-checks",
            "--timeout=1s",
            "--helm",
            &helm,
        ];
        let args = [&["join", "edge-1"][..], &flags].concat();
        match expected {
            Some(expected) => {
                let error = server.error(&args).await;
                assert!(error.contains(expected), "{error}");
            }
            None => {
                let output = server.run(&args).await.unwrap();
                let expected = "edgecluster.mesh.openkcm.io/edge-1 connected\n";
                assert_eq!(output.stdout, expected);
            }
        }
        assert_eq!(server.uris().len(), 6);
    }
}

#[tokio::test]
async fn join_names_missing_secret_create_permission() {
    let forbidden = failure(403, "Forbidden", "secrets is forbidden: no");
    let responses = vec![join_info("hub:1"), no_pods(), no_member(), forbidden];
    let text = error_with(responses, &["join", "edge-1"]).await;
    assert!(text.contains("verb create on secrets"), "{text}");
    assert!(text.contains("\"home\""), "{text}");
}
