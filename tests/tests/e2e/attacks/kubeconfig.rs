//! Plays a supplier of kubeconfig Secrets that try to make the hub run programs, read files or connect to its own
//! machine.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use krypton_tests::fleet::FleetClient;
use krypton_tests::{Cluster, Hub, HubOptions, Parts, TestResult};
use rcgen::{CertificateParams, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

use super::{CONNECTED, TrapServer, wait_for_hub_renewals};

const INVALID: [(&str, &str, &str); 2] = [
    ("TargetClusterResolved", "False", "KubeconfigInvalid"),
    ("Connected", "False", "KubeconfigInvalid"),
];
/// Far above the memory usage of a hub with three members, and far below the size of the responses.
const MEMORY: u64 = 256 << 20;

fn kubeconfig(cluster: &Value, user: &Value) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    })
    .to_string()
}

/// An API server that responds to every request with `head`, and then sends `more` until the client disconnects.
struct HostileServer {
    address: SocketAddr,
    certificate: String,
    _serving: AbortOnDropHandle<()>,
}

impl HostileServer {
    async fn start(head: String, more: String) -> TestResult<Self> {
        let key = KeyPair::generate()?;
        let names = vec!["127.0.0.1".to_owned()];
        let certificate = CertificateParams::new(names)?.self_signed(&key)?;
        let config = ServerConfig::builder().with_no_client_auth();
        let private = PrivateKeyDer::try_from(key.serialize_der())?;
        let config = config.with_single_cert(vec![certificate.der().clone()], private);
        let acceptor = TlsAcceptor::from(Arc::new(config?));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let serving = tokio::spawn(async move {
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                let (acceptor, head, more) = (acceptor.clone(), head.clone(), more.clone());
                tokio::spawn(async move {
                    let mut stream = acceptor.accept(tcp).await?;
                    let read = stream.read(&mut [0; 16 << 10]).await?;
                    stream.write_all(head.as_bytes()).await?;
                    while read > 0 && !more.is_empty() {
                        stream.write_all(more.as_bytes()).await?;
                    }
                    stream.shutdown().await
                });
            }
        });
        Ok(Self {
            address,
            certificate: BASE64_STANDARD.encode(certificate.pem()),
            _serving: AbortOnDropHandle::new(serving),
        })
    }

    fn kubeconfig(&self) -> String {
        let cluster = json!({
            "server": format!("https://{}", self.address),
            "certificate-authority-data": self.certificate,
        });
        kubeconfig(&cluster, &json!({"token": "t"}))
    }
}

/// Kubeconfigs that name this machine, a metadata service, a file or a program, each with its name.
fn hostile_kubeconfigs(trap: &TrapServer, marker_file: &Path) -> Vec<(&'static str, String)> {
    let port = trap.address.port();
    let token = json!({"token": "t"});
    let with_server = |server: &str| {
        let server = server.replace("PORT", &port.to_string());
        kubeconfig(&json!({ "server": server }), &token)
    };
    let elsewhere = json!({"server": "https://192.0.2.1"});
    let with_user = |user: Value| kubeconfig(&elsewhere, &user);
    let with_cluster_field = |field: &str, value: Value| {
        let cluster = json!({"server": "https://192.0.2.1", field: value});
        kubeconfig(&cluster, &token)
    };
    let touch = json!({
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "/usr/bin/touch",
        "args": [marker_file],
        "interactiveMode": "Never",
    });
    let provider =
        json!({"name": "gcp", "config": {"cmd-path": "/usr/bin/touch", "cmd-args": marker_file}});
    let proxy = format!("http://{}", trap.address);
    vec![
        ("loopback", with_server("https://127.0.0.1:PORT")),
        ("localhost", with_server("https://localhost:PORT")),
        ("localhost-dot", with_server("https://localhost.:PORT")),
        ("loopback-6", with_server("https://[::1]:PORT")),
        ("mapped", with_server("https://[::ffff:127.0.0.1]:PORT")),
        ("translated", with_server("https://[64:ff9b::7f00:1]:PORT")),
        ("this-host", with_server("https://0.0.0.0:PORT")),
        ("number", with_server("https://2130706433:PORT")),
        ("short", with_server("https://127.1:PORT")),
        ("hexadecimal", with_server("https://0x7f000001:PORT")),
        ("plain", with_server("http://192.0.2.1:PORT")),
        ("metadata", with_server("https://169.254.169.254")),
        ("metadata-6", with_server("https://[fd00:ec2::254]")),
        ("link-local", with_server("https://[fe80::1]:PORT")),
        ("proxy", with_cluster_field("proxy-url", json!(proxy))),
        (
            "unverified",
            with_cluster_field("insecure-skip-tls-verify", json!(true)),
        ),
        (
            "authority",
            with_cluster_field("certificate-authority", json!("/etc/hostname")),
        ),
        ("exec", with_user(json!({"exec": touch}))),
        (
            "auth-provider",
            with_user(json!({"auth-provider": provider})),
        ),
        (
            "token-file",
            with_user(json!({"tokenFile": "/etc/hostname"})),
        ),
        (
            "key",
            with_user(
                json!({"client-certificate": "/etc/hostname", "client-key": "/etc/hostname"}),
            ),
        ),
        (
            "other-user",
            with_user(json!({"token": "t", "as": "system:admin"})),
        ),
    ]
}

#[tokio::test]
async fn hostile_kubeconfig_supplier_reaches_nothing() -> TestResult {
    let home = Cluster::start("attack-supplier", Parts::ControlPlane).await?;
    let fleet_client = FleetClient::new(&home);
    let trap = TrapServer::start().await;
    let folder = tempfile::tempdir()?;
    let marker_file = folder.path().join("was-run");
    let cases = hostile_kubeconfigs(&trap, &marker_file);
    for (name, kubeconfig) in &cases {
        fleet_client.add_member(name, kubeconfig).await?;
    }
    let options = |loopback: bool| {
        let loopback = format!("--insecure-kubeconfig-loopback={loopback}");
        let flags = ["--chart-repo=http://127.0.0.1:9".to_owned(), loopback];
        HubOptions::new(home.kubeconfig()).args(flags)
    };
    let mut hub = Hub::start(&options(false))?;
    for (name, _) in &cases {
        fleet_client.wait_for_member(name, &INVALID).await?;
    }
    wait_for_hub_renewals(&home).await;
    assert_eq!(trap.connections(), 0);
    assert!(!marker_file.exists());
    hub.stop().await?;
    for (name, _) in &cases {
        home.kubectl(["delete", "secret", name]).await?;
    }

    // Servers that the hub may reach. They redirect it, or their responses never end.
    let led_to = format!("https://{}/api", trap.address);
    let redirect = format!("HTTP/1.1 307 Go\r\nLocation: {led_to}\r\nContent-Length: 0\r\n\r\n");
    let text = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n";
    let endless = format!("{text}Transfer-Encoding: chunked\r\n\r\n");
    let huge = format!("{text}Content-Length: 1099511627776\r\n\r\n{{\"a\": \"");
    let bytes = "x".repeat(0x4000);
    let chunk = format!("4000\r\n{bytes}\r\n");
    let servers = [
        (
            "redirects",
            HostileServer::start(redirect, String::new()).await?,
        ),
        ("endless", HostileServer::start(endless, chunk).await?),
        ("huge", HostileServer::start(huge, bytes).await?),
    ];
    for (name, server) in &servers {
        fleet_client.add_member(name, &server.kubeconfig()).await?;
    }
    let hub = Hub::start_ready(&options(true)).await?;
    for (name, expected_text) in [
        ("redirects", "deserializing response"),
        ("endless", "has more than 16777216 bytes"),
        ("huge", "has more than 16777216 bytes"),
    ] {
        let refused = ("Connected", "False", "Unreachable");
        let message = fleet_client
            .member_condition_message(name, &[refused])
            .await?;
        assert!(message.contains(expected_text), "{name}: {message}");
    }
    wait_for_hub_renewals(&home).await;
    fleet_client
        .wait_for_member("self-cluster", &[CONNECTED])
        .await?;
    assert_eq!(trap.connections(), 0);
    let taken = hub.rss_bytes()?;
    assert!(taken < MEMORY, "{} MiB", taken >> 20);
    assert!(!hub.log()?.contains("panicked"));
    Ok(())
}
