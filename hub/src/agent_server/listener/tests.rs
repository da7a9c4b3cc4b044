//! Tests over real sockets and TLS which peers are admitted, and with which identity.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use krypton_proto::v1;
use krypton_proto::v1::enrollment_client::EnrollmentClient;
use krypton_proto::v1::enrollment_server::{Enrollment, EnrollmentServer};
use krypton_runtime::admin;
use krypton_runtime::tls::{Credential, client_config};
use rcgen::KeyPair;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, oneshot};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

use super::*;
use crate::ca::csr::tests::request;

mod siege;

const UID: &str = "6f1f2f3c-0000-4000-8000-0123456789ab";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

const AGENT_ADDRESS: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// Far longer than any step here takes.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Request that the service never answers.
const HANG_TOKEN: &str = "hang";

/// Replaces the real services: returns the caller's identity as a root.
#[derive(Default)]
struct IdentityService {
    hang_started: Arc<Notify>,
}

#[tonic::async_trait]
impl Enrollment for IdentityService {
    async fn enroll(
        &self,
        request: Request<v1::EnrollRequest>,
    ) -> Result<Response<v1::EnrollResponse>, Status> {
        let peer = request.extensions().get::<Peer>().unwrap();
        assert!(peer.address.ip().is_loopback());
        peer.mark_request_received();
        if request.get_ref().token == HANG_TOKEN {
            self.hang_started.notify_one();
            std::future::pending::<()>().await;
        }
        let identity = match &peer.certificate {
            Ok(certificate) => format!("{} {}", certificate.cluster, certificate.uid),
            Err(reason) => reason.clone(),
        };
        Ok(Response::new(v1::EnrollResponse {
            roots: vec![identity.into_bytes().into()],
            ..Default::default()
        }))
    }
}

struct Hub {
    authority: Authority,
    address: SocketAddr,
    tls: Arc<ArcSwap<ServerConfig>>,
    metrics: PortMetrics,
    hang_started: Arc<Notify>,
    stop: CancellationToken,
    result: oneshot::Receiver<Result<(), ListenerError>>,
    _task: AbortOnDropHandle<()>,
}

/// Starts a hub with the default limits after this change.
async fn hub(change: impl FnOnce(&mut Limits)) -> Hub {
    let mut limits = Limits::default();
    change(&mut limits);
    let authority = Authority::generate("a.krypton", clock::wall()).unwrap();
    let listener = admin::bind(LISTEN_FLAG, &"127.0.0.1:0".parse().unwrap())
        .await
        .unwrap();
    let address = listener.local_addr().unwrap();
    let config = server_config(&authority, clock::wall()).unwrap();
    let tls = Arc::new(ArcSwap::from_pointee(config));
    let stop = CancellationToken::new();
    let (result_tx, result_rx) = oneshot::channel();
    let service = IdentityService::default();
    let hang_started = Arc::clone(&service.hang_started);
    let metrics = PortMetrics::default();
    let serving = serve_within(
        Box::new(listener),
        Arc::clone(&tls),
        "a.krypton".to_owned(),
        Routes::new(EnrollmentServer::new(service)),
        limits,
        metrics.clone(),
        stop.clone(),
    );
    let task = tokio::spawn(async move { drop(result_tx.send(serving.await)) });
    Hub {
        authority,
        address,
        tls,
        metrics,
        hang_started,
        stop,
        result: result_rx,
        _task: AbortOnDropHandle::new(task),
    }
}

impl Hub {
    /// Issues a credential of `authority` to an agent, valid for `life` from now.
    fn agent(authority: &Authority, cluster: &str, life: Duration) -> Credential {
        let key = KeyPair::generate().unwrap();
        let certificates = authority
            .sign_agent(&request(&key), cluster, UID, clock::wall(), life)
            .unwrap();
        Credential {
            certificates,
            key: PrivateKeyDer::Pkcs8(key.serialize_der().into()),
        }
    }

    fn credential(&self, cluster: &str) -> Credential {
        Self::agent(&self.authority, cluster, DAY)
    }

    /// Opens a TLS connection whose handshake is complete on the client's side.
    async fn connect(&self, credential: Option<Credential>) -> io::Result<TlsStream<TcpStream>> {
        self.connect_from(AGENT_ADDRESS, credential).await
    }

    async fn connect_from(
        &self,
        from: Ipv4Addr,
        credential: Option<Credential>,
    ) -> io::Result<TlsStream<TcpStream>> {
        let config = client_config(&self.authority.roots(), credential).unwrap();
        let stream = self.plain(from).await?;
        let name = ServerName::try_from("hub").unwrap();
        TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
    }

    /// Opens a connection without a handshake.
    async fn plain(&self, from: Ipv4Addr) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((from, 0).into())?;
        socket.connect(self.address).await
    }

    /// Calls the service over a new connection and returns the identity.
    async fn identity(&self, credential: Option<Credential>) -> Result<String, Status> {
        let (mut client, _bridge) = self.client(credential).await;
        identity(&mut client).await
    }

    async fn check_agent_served(&self, cluster: &str) {
        let (mut client, _bridge) = self.client(Some(self.credential(cluster))).await;
        check_identity(&mut client, cluster).await;
    }

    async fn check_stranger_served(&self) {
        let caller = self.identity(None).await.unwrap();
        assert_eq!(caller, "no client certificate");
    }

    async fn client(&self, credential: Option<Credential>) -> (EnrollmentClient<Channel>, Bridge) {
        let stream = self.connect(credential).await.unwrap();
        let (endpoint, bridge) = bridge(stream).await;
        let channel = endpoint.connect().await.unwrap();
        (EnrollmentClient::new(channel), bridge)
    }
}

/// Asserts that the service sees this agent.
async fn check_identity(client: &mut EnrollmentClient<Channel>, cluster: &str) {
    let caller = identity(client).await.unwrap();
    assert_eq!(caller, format!("{cluster} {UID}"));
}

/// Calls the service and returns the identity that it sees.
async fn identity(client: &mut EnrollmentClient<Channel>) -> Result<String, Status> {
    let response = client.enroll(v1::EnrollRequest::default()).await?;
    let root = response.into_inner().roots.remove(0);
    Ok(String::from_utf8(root.to_vec()).unwrap())
}

type Bridge = AbortOnDropHandle<()>;

/// Bridges tonic's client, which uses a socket without TLS, to `stream`.
async fn bridge(mut stream: TlsStream<TcpStream>) -> (Endpoint, Bridge) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let (mut plain, _) = listener.accept().await.unwrap();
        drop(tokio::io::copy_bidirectional(&mut plain, &mut stream).await);
    });
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    (endpoint, AbortOnDropHandle::new(task))
}

/// Whether the server closes the connection. Its decision on the client certificate comes with the first read.
async fn is_ended(stream: &mut TlsStream<TcpStream>) -> bool {
    let mut buffer = [0; 1024];
    loop {
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return true,
            // HTTP/2 settings.
            Ok(_) => {}
        }
    }
}

#[tokio::test]
async fn a_call_knows_which_agent_it_comes_from() {
    let hub = hub(|_| {}).await;
    hub.check_agent_served("edge-1").await;
    hub.check_stranger_served().await;
}

#[tokio::test]
async fn invalid_agent_certificates_are_rejected() {
    let hub = hub(|_| {}).await;
    let other = Authority::generate("a.krypton", clock::wall()).unwrap();
    let expired = Duration::ZERO;
    for credential in [
        Hub::agent(&other, "edge-1", DAY),
        Hub::agent(&hub.authority, "edge-1", expired),
        hub.authority.hub_credential(clock::wall()).unwrap(),
    ] {
        let mut stream = hub.connect(Some(credential)).await.unwrap();
        assert!(is_ended(&mut stream).await);
    }
    // Later connections are served.
    hub.check_stranger_served().await;
}

#[tokio::test]
async fn non_tls_connection_is_rejected_and_next_served() {
    let hub = hub(|_| {}).await;
    let mut plain = TcpStream::connect(hub.address).await.unwrap();
    plain
        .write_all(b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n")
        .await
        .unwrap();
    let mut response = Vec::new();
    // A TLS alert, or a reset if it arrived first.
    drop(plain.read_to_end(&mut response).await);
    assert!(!response.starts_with(b"HTTP"));
    hub.check_stranger_served().await;
}

#[tokio::test]
async fn unfinished_handshake_times_out_and_frees_slot() {
    let hub = hub(|limits| {
        limits.handshakes = 2;
        limits.handshake_timeout = Duration::from_millis(50);
    })
    .await;
    let mut silent = Vec::new();
    for _ in 0..8 {
        silent.push(TcpStream::connect(hub.address).await.unwrap());
    }
    while try_identity(&hub, None).await.is_none() {}
    for mut stream in silent {
        let mut buffer = [0; 16];
        assert!(matches!(stream.read(&mut buffer).await, Ok(0) | Err(_)));
    }
}

#[tokio::test]
async fn strangers_do_not_take_the_places_of_agents() {
    let hub = hub(|limits| {
        limits.anonymous = 2;
        limits.first_request = TIMEOUT;
    })
    .await;
    let mut idle = hub.connect(None).await.unwrap();
    let (mut second, _second_bridge) = hub.client(None).await;
    identity(&mut second).await.unwrap();
    // A new connection replaces the oldest one without a request.
    let (mut third, _third_bridge) = hub.client(None).await;
    identity(&mut third).await.unwrap();
    assert!(is_ended(&mut idle).await);
    hub.check_agent_served("edge-1").await;
    identity(&mut second).await.unwrap();
    assert_eq!(hub.metrics.refused_count("unauthenticated"), 1);
}

#[tokio::test]
async fn idle_strangers_leave_room_for_enrollment() {
    let hub = hub(|limits| {
        limits.anonymous = 8;
        limits.anonymous_lifetime = TIMEOUT;
        limits.first_request = TIMEOUT;
        limits.per_address.anonymous = 2;
    })
    .await;
    let mut idle = Vec::new();
    for last in 2..6 {
        for _ in 0..2 {
            let from = Ipv4Addr::new(127, 0, 0, last);
            idle.push(hub.connect_from(from, None).await.unwrap());
        }
    }
    hub.check_stranger_served().await;
}

#[tokio::test]
async fn stranger_without_a_request_is_dropped_soon() {
    let hub = hub(|limits| {
        limits.anonymous_lifetime = TIMEOUT;
        limits.first_request = Duration::from_millis(50);
    })
    .await;
    let mut idle = hub.connect(None).await.unwrap();
    assert!(is_ended(&mut idle).await);
}

#[tokio::test]
async fn idle_stranger_times_out_and_frees_slot() {
    let hub = hub(|limits| {
        limits.anonymous = 1;
        limits.anonymous_lifetime = Duration::from_millis(50);
    })
    .await;
    let mut idle = hub.connect(None).await.unwrap();
    assert!(is_ended(&mut idle).await);
    while try_identity(&hub, None).await.is_none() {}
}

#[tokio::test]
async fn connection_ends_when_its_certificate_expires() {
    let hub = hub(|_| {}).await;
    // Certificates have whole seconds, so this one lasts at least one second.
    let credential = Hub::agent(&hub.authority, "edge-1", Duration::from_secs(2));
    let mut stream = hub.connect(Some(credential)).await.unwrap();
    assert!(is_ended(&mut stream).await);
}

#[tokio::test]
async fn member_over_limit_leaves_other_members_served() {
    let hub = hub(|limits| limits.connections_per_member = 2).await;
    let credential = hub.credential("edge-1");
    let (mut first, first_bridge) = hub.client(Some(credential.clone())).await;
    let (mut second, _second_bridge) = hub.client(Some(credential.clone())).await;
    identity(&mut first).await.unwrap();
    identity(&mut second).await.unwrap();
    let mut third = hub.connect(Some(credential.clone())).await.unwrap();
    assert!(is_ended(&mut third).await);
    hub.check_agent_served("edge-2").await;
    drop((first, first_bridge));
    // The slot is free as soon as the hub has seen the close.
    while try_identity(&hub, Some(credential.clone())).await.is_none() {}
}

async fn try_identity(hub: &Hub, credential: Option<Credential>) -> Option<String> {
    let stream = hub.connect(credential).await.ok()?;
    let (endpoint, _bridge) = bridge(stream).await;
    let mut client = EnrollmentClient::new(endpoint.connect().await.ok()?);
    identity(&mut client).await.ok()
}

#[tokio::test]
async fn beyond_the_limit_connections_wait_until_one_goes() {
    let hub = hub(|limits| limits.connections = 1).await;
    let (mut first, first_bridge) = hub.client(None).await;
    identity(&mut first).await.unwrap();
    let admitted = AtomicUsize::new(0);
    let second = async {
        let identity = hub.identity(None).await.unwrap();
        admitted.fetch_add(1, Ordering::Relaxed);
        identity
    };
    let calls = async {
        for _ in 0..20 {
            identity(&mut first).await.unwrap();
        }
        assert_eq!(admitted.load(Ordering::Relaxed), 0);
        drop((first, first_bridge));
    };
    let (identity, ()) = tokio::join!(second, calls);
    assert_eq!(identity, "no client certificate");
}

#[tokio::test]
async fn new_hub_certificate_applies_to_next_connection() {
    let hub = hub(|_| {}).await;
    let certificate =
        |stream: &TlsStream<TcpStream>| stream.get_ref().1.peer_certificates().unwrap()[0].clone();
    let before = hub.connect(None).await.unwrap();
    let (mut old, _bridge) = hub.client(None).await;
    let config = server_config(&hub.authority, clock::wall()).unwrap();
    hub.tls.store(Arc::new(config));
    let after = hub.connect(None).await.unwrap();
    assert_ne!(certificate(&before), certificate(&after));
    identity(&mut old).await.unwrap();
}

#[tokio::test]
async fn stop_ends_serving_and_frees_port() {
    let hub = hub(|_| {}).await;
    let credential = hub.credential("edge-1");
    let (mut client, _bridge) = hub.client(Some(credential)).await;
    identity(&mut client).await.unwrap();
    hub.stop.cancel();
    hub.result.await.unwrap().unwrap();
    TcpListener::bind(hub.address).await.unwrap();
}

#[tokio::test]
async fn unfinished_call_is_aborted_after_drain() {
    let hub = hub(|limits| limits.drain = Duration::from_millis(50)).await;
    let credential = hub.credential("edge-1");
    let (mut client, _bridge) = hub.client(Some(credential)).await;
    let hang = v1::EnrollRequest {
        token: HANG_TOKEN.to_owned(),
        ..Default::default()
    };
    let stop = async {
        hub.hang_started.notified().await;
        hub.stop.cancel();
    };
    let (response, ()) = tokio::join!(client.enroll(hang), stop);
    response.unwrap_err();
    hub.result.await.unwrap().unwrap();
}

#[tokio::test]
async fn port_conflict_error_names_flag_and_address() {
    let occupied = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = occupied.local_addr().unwrap().to_string();
    let error = admin::bind(LISTEN_FLAG, &address.parse().unwrap())
        .await
        .unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("--listen") && message.contains(&address),
        "{message}"
    );
}

#[test]
fn hub_certificate_renews_early_or_after_clock_rollback() {
    let issued_at = Timestamp::from_second(1_800_000_000).unwrap();
    let after = |days: i64| Timestamp::from_second(issued_at.as_second() + days * 86_400).unwrap();
    assert!(!is_renewal_due(issued_at, issued_at));
    assert!(!is_renewal_due(issued_at, after(59)));
    assert!(is_renewal_due(issued_at, after(60)));
    assert!(is_renewal_due(issued_at, after(-1)));
}

#[test]
fn only_connection_accept_errors_skip_pause() {
    assert!(is_connection_error(io::ErrorKind::ConnectionAborted));
    const EMFILE: i32 = 24;
    let no_file = io::Error::from_raw_os_error(EMFILE);
    assert!(!is_connection_error(no_file.kind()));
}
