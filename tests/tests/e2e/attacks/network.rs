//! Plays a pod or an outside client that reaches the ports of a hub.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use krypton_hub::ca::Authority;
use krypton_proto::v1::{FetchChartRequest, RenewRequest};
use krypton_runtime::clock::wall as now;
use krypton_runtime::tls::{self, Credential};
use krypton_tests::{
    Cluster, Membership, Mode, Parts, TestResult, assert_contains, fleet::FleetClient, join_bundle,
};
use krypton_types::join_bundle::JoinBundle;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use super::{ATTEMPT, CONNECTED, dialer, start_hub};

const ATTACKERS: usize = 200;
const PROBES: usize = 30;

async fn connect(from: u8, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((Ipv4Addr::new(127, 0, 0, from), 0).into())?;
    socket.connect(to).await
}

/// Returns the response to these bytes, until the connection is closed.
async fn read_response(to: SocketAddr, bytes: &[u8]) -> String {
    let asking = async {
        let mut stream = TcpStream::connect(to).await.unwrap();
        let mut response = Vec::new();
        // A peer that closes before it has read all data resets the connection.
        if stream.write_all(bytes).await.is_ok() {
            drop(stream.read_to_end(&mut response).await);
        }
        String::from_utf8_lossy(&response).into_owned()
    };
    tokio::time::timeout(ATTEMPT, asking).await.unwrap()
}

/// Opens connections from `addresses` addresses, starting at 127.0.0.2. Each sends the start of a request, and
/// reconnects when it is closed.
fn open_crowd(
    to: SocketAddr,
    addresses: usize,
    start: &'static [u8],
) -> (JoinSet<()>, Arc<AtomicUsize>) {
    let connections = Arc::new(AtomicUsize::new(0));
    let mut crowd = JoinSet::new();
    for number in 0..ATTACKERS {
        let connections = Arc::clone(&connections);
        let source = u8::try_from(2 + number % addresses).unwrap();
        crowd.spawn(async move {
            loop {
                if let Ok(mut stream) = connect(source, to).await {
                    connections.fetch_add(1, Ordering::Relaxed);
                    drop(stream.write_all(start).await);
                    drop(stream.read_to_end(&mut Vec::new()).await);
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    }
    (crowd, connections)
}

async fn wait_for_all(connections: &AtomicUsize) {
    let all_connected = async {
        while connections.load(Ordering::Relaxed) < ATTACKERS {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(ATTEMPT, all_connected).await.unwrap();
}

#[tokio::test]
async fn pod_on_the_network_stops_no_probe() -> TestResult {
    let home = Cluster::start("attack-probes", Parts::ControlPlane).await?;
    let hub = start_hub(&home).await;
    let health = hub.health_address();
    let (crowd, connections) = open_crowd(health, 1, b"GET /heal");
    wait_for_all(&connections).await;
    for number in 0..PROBES {
        let probe = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        let response = read_response(health, probe).await;
        assert!(
            response.starts_with("HTTP/1.1 200"),
            "{number}: {response:?}"
        );
    }
    drop(crowd);

    // Requests from a web page, after the user has forwarded the port.
    let debug = hub.debug_address();
    let before = hub.debug("log").await?;
    for (target, hosts) in [
        ("/debug/log", "Host: example.org\r\n"),
        ("/debug/log", "Host: localhost\r\nHost: example.org\r\n"),
        ("http://example.org/debug/log", "Host: localhost\r\n"),
        ("http://example.org/debug/log", "Host: example.org\r\n"),
    ] {
        for method in ["GET", "PUT"] {
            let rest = "Connection: close\r\nContent-Length: 5\r\n\r\ntrace";
            let request = format!("{method} {target} HTTP/1.1\r\n{hosts}{rest}");
            let response = read_response(debug, request.as_bytes()).await;
            let refused = response.starts_with("HTTP/1.1 403");
            assert!(refused, "{request:?}: {response:?}");
        }
    }
    assert_eq!(hub.debug("log").await?, before);
    Ok(())
}

#[tokio::test]
async fn stranger_on_the_network_is_not_answered() -> TestResult {
    let (home, edge) = tokio::try_join!(
        Cluster::start("attack-stranger-home", Parts::ControlPlane),
        Cluster::start("attack-stranger-edge", Parts::ControlPlane),
    )?;
    let mut hub = start_hub(&home).await;
    let port = hub.agents_address();
    for junk in [
        &b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
        &[0; 4096],
        &[0x16, 0x03, 0x01, 0xff, 0xff, 0x01],
    ] {
        let response = read_response(port, junk).await;
        // Allows a TLS alert.
        assert!(response.len() <= 16, "{response:?}");
    }
    let bundle = join_bundle(&home, "edge-1").await?;
    let bundle = JoinBundle::parse(&bundle)?;
    let roots = bundle.roots()?;
    let mut store = RootCertStore::empty();
    store.add(roots[0].clone())?;
    let old = ClientConfig::builder_with_protocol_versions(&[&rustls::version::TLS12])
        .with_root_certificates(store)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost")?;
    let tcp = TcpStream::connect(port).await?;
    let old = tokio_rustls::TlsConnector::from(Arc::new(old));
    let refused = old.connect(name, tcp).await.unwrap_err().to_string();
    assert_contains!(refused, "ProtocolVersion");

    // Without a certificate, and with a forged certificate in a member's name.
    let authority = Authority::generate("krypton", now())?;
    let key = KeyPair::generate()?;
    let request = CertificateParams::default().serialize_request(&key);
    let life = Duration::from_secs(3600);
    let forged = Credential {
        certificates: authority.sign_agent(request?.der(), "edge-1", "uid", now(), life)?,
        key: PrivateKeyDer::try_from(key.serialize_der())?,
    };
    for credential in [None, Some(forged)] {
        let tls = tls::client_config(&roots, credential)?;
        let Ok(hub) = dialer(&bundle.addresses, tls).connect().await else {
            continue;
        };
        let nothing = ReceiverStream::new(tokio::sync::mpsc::channel(1).1);
        let mut fleet = hub.fleet();
        let responses = [
            fleet.connect(nothing).await.map(drop),
            fleet.renew(RenewRequest::default()).await.map(drop),
            fleet
                .fetch_chart(FetchChartRequest::default())
                .await
                .map(drop),
        ];
        for response in responses {
            let code = response.unwrap_err().code();
            let unknown = [Code::Unauthenticated, Code::Unknown, Code::Unavailable];
            assert!(unknown.contains(&code), "{code:?}");
        }
    }

    // An agent joins while clients at eight addresses fill the port.
    let (crowd, connections) = open_crowd(port, 8, &[0x16, 0x03, 0x01]);
    wait_for_all(&connections).await;
    let _member = Membership::join(Mode::Agent, &mut hub, &home, &edge, "edge-1").await?;
    let fleet_client = FleetClient::new(&home);
    fleet_client.wait_for_member("edge-1", &[CONNECTED]).await?;
    drop(crowd);
    assert!(!hub.log()?.contains("panicked"));
    Ok(())
}
