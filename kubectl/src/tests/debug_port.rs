//! Requests to debug ports: through streams that a fake API server forwards, and without a listener.

use std::net::SocketAddr;

use axum::body::Body;
use axum::extract::Request;
use futures::{SinkExt as _, StreamExt as _};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::*;

const PORT: u16 = 8082;
const REFUSED: &str = "failed to connect to localhost:8082 inside namespace: connection refused";

/// Starts a debug port and returns its address and the recorded requests.
async fn debug_port() -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&requests);
    let router = Router::new().fallback(
        move |method: Method, uri: Uri, headers: HeaderMap, body: String| async move {
            let host = headers[header::HOST].to_str().unwrap().to_owned();
            let request = format!("{method} {uri} of {host}: {body}");
            recorded.lock().push(request);
            match (uri.path(), body.as_str()) {
                ("/debug/log", "loud") => (StatusCode::BAD_REQUEST, "no level is loud\n".into()),
                ("/debug/log", "") => (StatusCode::OK, "info\n".to_owned()),
                ("/debug/log", filter) => (StatusCode::OK, format!("{filter} until then\n")),
                ("/debug/fleet.json", _) => {
                    let fleet = json!({"replica": "krypton-hub-0", "repo": "https://me:canary@r"});
                    (StatusCode::OK, fleet.to_string())
                }
                ("/debug/tenants.json", _) => {
                    let page = json!({"tenants": [], "next": null});
                    (StatusCode::OK, page.to_string())
                }
                _ => (StatusCode::NOT_FOUND, String::new()),
            }
        },
    );
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, router).into_future());
    (address, requests)
}

/// Forwards a port like an API server: a WebSocket with a data and an error channel, each starting with the port.
/// Without `target`, nothing listens in the pod.
fn forwarded(mut request: Request, target: Option<SocketAddr>) -> Response {
    let key = request.headers()[header::SEC_WEBSOCKET_KEY].as_bytes();
    let accept = derive_accept_key(key);
    let upgrading = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let stream = TokioIo::new(upgrading.await.unwrap());
        let mut socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
        let [low, high] = PORT.to_le_bytes();
        for channel in [0, 1] {
            let first = vec![channel, low, high];
            socket.send(Message::binary(first)).await.unwrap();
        }
        let Some(target) = target else {
            let error = [&[1], REFUSED.as_bytes()].concat();
            socket.send(Message::binary(error)).await.unwrap();
            return socket.close(None).await.unwrap();
        };
        let mut pod = TcpStream::connect(target).await.unwrap();
        let mut bytes = [0; 512];
        loop {
            tokio::select! {
                message = socket.next() => match message {
                    Some(Ok(Message::Binary(data))) => pod.write_all(&data[1..]).await.unwrap(),
                    _ => return,
                },
                read = pod.read(&mut bytes) => match read.unwrap() {
                    0 => return socket.close(None).await.unwrap(),
                    count => {
                        let data = [&[0], &bytes[..count]].concat();
                        socket.send(Message::binary(data)).await.unwrap();
                    }
                },
            }
        }
    });
    Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_ACCEPT, accept)
        .header(header::SEC_WEBSOCKET_PROTOCOL, "v4.channel.k8s.io")
        .body(Body::empty())
        .unwrap()
}

fn pod(name: &str, container: &str, is_leader: bool, args: &[&str]) -> Value {
    let labels = match is_leader {
        true => json!({"mesh.openkcm.io/leader": "true"}),
        false => json!({}),
    };
    json!({
        "metadata": {"name": name, "namespace": "krypton", "labels": labels},
        "spec": {"containers": [{"name": container, "args": args}]},
        "status": {"phase": "Running"},
    })
}

/// A cluster with these pods in the namespace krypton. The pod `listening_pod` has a debug port at `debug_address`.
async fn cluster(
    pods: Vec<Value>,
    listening_pod: &'static str,
    debug_address: Option<SocketAddr>,
) -> FakeApiServer {
    let router = Router::new().fallback(move |request: Request| {
        let path = request.uri().path().to_owned();
        let forward = format!("/api/v1/namespaces/krypton/pods/{listening_pod}/portforward");
        let lease = "/apis/coordination.k8s.io/v1/namespaces/krypton-system/leases/krypton-agent";
        let response = match path.as_str() {
            "/api/v1/namespaces/krypton/pods" => json_response(list_of(pods.clone(), "")),
            path if path == forward => forwarded(request, debug_address),
            path if path == lease => {
                let spec = json!({"holderIdentity": "agent/krypton-agent-b/00000001@uid"});
                json_response((
                    200,
                    json!({"metadata": {"name": "krypton-agent"}, "spec": spec}),
                ))
            }
            path if path.ends_with("/krypton-hub-gone/portforward") => {
                json_response(failure(404, "NotFound", "pods not found"))
            }
            path if path.ends_with("/krypton-hub-away/portforward") => {
                let message = "error dialing backend: no route to host";
                json_response(failure(502, "BadGateway", message))
            }
            path if path.ends_with("/pods") => json_response(list_of(Vec::new(), "")),
            _ => json_response(failure(403, "Forbidden", "not you")),
        };
        async move { response }
    });
    FakeApiServer::serve(router).await
}

fn hubs() -> Vec<Value> {
    vec![
        pod("krypton-hub-a", "krypton-hub", false, &[]),
        pod("somebody", "else", true, &[]),
        pod("krypton-hub-b", "krypton-hub", true, &[]),
    ]
}

#[tokio::test]
async fn port_forward_reaches_leading_hub_and_acting_agent() {
    let (debug_address, requests) = debug_port().await;
    let home = cluster(hubs(), "krypton-hub-b", Some(debug_address)).await;
    let output = home.run(&["log-level", "hub"]).await.unwrap();
    assert_eq!(output.stdout, "krypton-hub-b: info\n");
    let args = ["log-level", "hub", "debug", "--for", "10m"];
    let output = home.run(&args).await.unwrap();
    assert_eq!(output.stdout, "krypton-hub-b: debug until then\n");
    let agents = ["krypton-agent-a", "krypton-agent-b"];
    let agents = agents.map(|name| pod(name, "krypton-agent", false, &[]));
    let edge = cluster(agents.to_vec(), "krypton-agent-b", Some(debug_address)).await;
    let args = ["log-level", "agent", "info,a::b=trace", "--for=0"];
    let output = edge.run(&args).await.unwrap();
    let expected = "krypton-agent-b: info,a::b=trace until then\n";
    assert_eq!(output.stdout, expected);
    assert_eq!(
        *requests.lock(),
        [
            "GET /debug/log of localhost: ",
            "PUT /debug/log?for=600000ms of localhost: debug",
            "PUT /debug/log?for=0 of localhost: info,a::b=trace",
        ]
    );
    // With several pods, the output contains the changed pod although the request to another one fails.
    let args = ["log-level", "hub", "debug", "--pod", "krypton-hub-b"];
    assert!(home.run(&args).await.is_ok());
    for listening_pod in ["krypton-hub-a", "krypton-hub-b"] {
        let home = cluster(hubs(), listening_pod, Some(debug_address)).await;
        let error = home.run(&["log-level", "hub", "debug", "--all"]).await;
        let error = error.unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::Failed);
        let KubectlError::Partial { output, .. } = error else {
            panic!("{error}")
        };
        let expected = format!("{listening_pod}: debug until then\n");
        assert_eq!(output.stdout, expected);
    }
}

#[tokio::test]
async fn debug_port_failure_sets_exit_code_and_message() {
    use ExitCode::{NoResponse, NotFound, NotPermitted, Refused};
    let hub = |name: &str| vec![pod(name, "krypton-hub", true, &[])];
    let disabled = ["--debug-bind-address=0"];
    let disabled = vec![pod("krypton-hub-a", "krypton-hub", true, &disabled)];
    let followers = ["a", "b"].map(|name| pod(name, "krypton-hub", false, &[]));
    let forbidden = "may not get and create pods/portforward in the namespace krypton";
    let deleted = "no pod of the name \"krypton-hub-gone\"";
    let no_leader = "cannot determine which of the pods a, b is the leader";
    for (pods, code, expected) in [
        // First no listener in the pod, then a port that the flag disables.
        (hub("krypton-hub-a"), Refused, "is not served at 8082"),
        (disabled, Refused, "is switched off"),
        (hub("krypton-hub-b"), NotPermitted, forbidden),
        // The pod was deleted after the list request.
        (hub("krypton-hub-gone"), NotFound, deleted),
        // The pod's node does not respond.
        (hub("krypton-hub-away"), NoResponse, "no route to host"),
        (Vec::new(), NotFound, "in krypton-system or krypton or team"),
        (followers.to_vec(), Refused, no_leader),
    ] {
        let home = cluster(pods, "krypton-hub-a", None).await;
        let error = home.run(&["log-level", "hub"]).await.unwrap_err();
        assert_eq!(error.exit_code(), code, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    let home = cluster(hub("krypton-hub-a"), "krypton-hub-a", None).await;
    let args = ["log-level", "hub", "--pod", "other"];
    let error = home.run(&args).await.unwrap_err();
    assert_eq!(error.exit_code(), NotFound, "{error}");
    assert!(error.to_string().contains("other"), "{error}");
}

#[tokio::test]
async fn loopback_debug_address_is_used_without_pod() {
    let server = FakeApiServer::with_responses(Vec::new()).await;
    let (debug_address, _) = debug_port().await;
    let address_flag = format!("--debug-address={debug_address}");
    let args = ["log-level", "agent", &address_flag];
    let output = server.run(&args).await.unwrap();
    assert_eq!(output.stdout, format!("{debug_address}: info\n"));
    let args = ["log-level", "agent", "loud", &address_flag];
    let error = server.run(&args).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::Refused);
    assert!(error.to_string().contains("no level is loud"), "{error}");
    // Bound without a listener, which keeps the port away from other tests.
    let unused_socket = TcpSocket::new_v4().unwrap();
    unused_socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let unused_address_flag = format!("--debug-address={}", unused_socket.local_addr().unwrap());
    let args = ["log-level", "hub", &unused_address_flag];
    let error = server.run(&args).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::NoResponse);
    assert!(server.uris().is_empty());
}

#[tokio::test]
async fn fleet_list_rejects_unknown_member_or_tenant() {
    let (debug_address, _) = debug_port().await;
    let server = FakeApiServer::with_handler(|uri| {
        json_response(match uri.contains("/edgeclusters/edge-1") {
            true => (200, fleet().remove(0)),
            false => failure(404, "NotFound", "no"),
        })
    });
    let server = server.await;
    let address_flag = format!("--debug-address={debug_address}");
    for (selection, code) in [
        (&["--on=edge-1"][..], ExitCode::Success),
        (&["--on=edge-99"], ExitCode::NotFound),
        (&["acme"], ExitCode::NotFound),
        (&["acme", "--not-ready"], ExitCode::Success),
    ] {
        let list = ["get", "tenants", "--fleet", &address_flag];
        let result = server.run(&[&list[..], selection].concat()).await;
        let found = result.map_or_else(|error| error.exit_code(), |_| ExitCode::Success);
        assert_eq!(found, code, "{selection:?}");
    }
}

#[tokio::test]
async fn support_bundle_contains_debug_reports_or_failure_reasons() {
    let (debug_address, _) = debug_port().await;
    let mut pods = hubs();
    pods.push(pod("krypton-hub-c", "krypton-hub", false, &[]));
    // The command does not query a failed pod.
    pods[3]["status"]["phase"] = "Failed".into();
    let home = cluster(pods, "krypton-hub-b", Some(debug_address)).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bundle.tar.gz");
    let address_flag = format!("--debug-address={debug_address}");
    let args = [
        "support-bundle",
        "--file",
        file.to_str().unwrap(),
        &address_flag,
    ];
    home.run(&args).await.unwrap();
    let files = unpacked(std::fs::File::open(&file).unwrap());
    for name in [
        "krypton/debug/krypton-hub-b.fleet.json".to_owned(),
        format!("debug/{debug_address}.fleet.json"),
    ] {
        let fleet: Value = serde_json::from_str(&files[&name]).unwrap();
        let expected = json!({"replica": "krypton-hub-0", "repo": "https://[redacted]@r"});
        assert_eq!(fleet, expected);
    }
    let readme = &files["README.txt"];
    let missing =
        "  krypton/debug/krypton-hub-a.fleet.json: you may not get and create pods/portforward";
    assert!(readme.contains(missing), "{readme}");
    let ended = "  krypton/debug/krypton-hub-c.fleet.json: its pod does not run";
    assert!(readme.contains(ended), "{readme}");
    assert!(!readme.contains("agent.json"), "{readme}");
}
