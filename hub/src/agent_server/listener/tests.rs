//! Tests over real sockets and TLS which peers are admitted, and with which identity.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use krypton_proto::v1;
use krypton_proto::v1::enrollment_client::EnrollmentClient;
use krypton_proto::v1::enrollment_server::{Enrollment, EnrollmentServer};
use krypton_runtime::admin;
use krypton_runtime::tls::{Credential, client_config};
use rcgen::{CertificateParams, KeyPair};
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

mod siege;

const UID: &str = "6f1f2f3c-0000-4000-8000-0123456789ab";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// Far longer than any step here takes.
const PATIENCE: Duration = Duration::from_secs(120);
/// Request that the service never answers.
const HANG: &str = "hang";

/// Replaces the real services: returns the caller's identity as a root.
#[derive(Default)]
struct WhoIsThere {
    hanging: Arc<Notify>,
}

#[tonic::async_trait]
impl Enrollment for WhoIsThere {
    async fn enroll(
        &self,
        request: Request<v1::EnrollRequest>,
    ) -> Result<Response<v1::EnrollResponse>, Status> {
        let peer = request.extensions().get::<Peer>().unwrap();
        assert!(peer.address.ip().is_loopback());
        peer.has_asked();
        if request.get_ref().token == HANG {
            self.hanging.notify_one();
            std::future::pending::<()>().await;
        }
        let said = match &peer.certificate {
            Ok(certificate) => format!("{} {}", certificate.cluster, certificate.uid),
            Err(why) => why.clone(),
        };
        Ok(Response::new(v1::EnrollResponse {
            roots: vec![said.into_bytes().into()],
            ..Default::default()
        }))
    }
}

struct Hub {
    authority: Authority,
    address: SocketAddr,
    tls: Arc<ArcSwap<ServerConfig>>,
    metrics: DoorMetrics,
    hanging: Arc<Notify>,
    stop: CancellationToken,
    served: oneshot::Receiver<Result<(), ListenerError>>,
    _task: AbortOnDropHandle<()>,
}

async fn hub(limits: Limits) -> Hub {
    let authority = Authority::generate("a.krypton", clock::wall()).unwrap();
    let listener = admin::bind(LISTEN_FLAG, &"127.0.0.1:0".parse().unwrap())
        .await
        .unwrap();
    let address = listener.local_addr().unwrap();
    let config = server_config(&authority, clock::wall()).unwrap();
    let tls = Arc::new(ArcSwap::from_pointee(config));
    let stop = CancellationToken::new();
    let (done, served) = oneshot::channel();
    let service = WhoIsThere::default();
    let hanging = Arc::clone(&service.hanging);
    let metrics = DoorMetrics::default();
    let serving = serve_within(
        listener.into(),
        Arc::clone(&tls),
        "a.krypton".to_owned(),
        Routes::new(EnrollmentServer::new(service)),
        limits,
        metrics.clone(),
        stop.clone(),
    );
    let task = tokio::spawn(async move { drop(done.send(serving.await)) });
    Hub {
        authority,
        address,
        tls,
        metrics,
        hanging,
        stop,
        served,
        _task: AbortOnDropHandle::new(task),
    }
}

impl Hub {
    /// Issues a credential of `authority` to an agent, valid for `life` from now.
    fn agent(authority: &Authority, cluster: &str, life: Duration) -> Credential {
        let key = KeyPair::generate().unwrap();
        let request = CertificateParams::default()
            .serialize_request(&key)
            .unwrap();
        let certificates = authority
            .sign_agent(request.der(), cluster, UID, clock::wall(), life)
            .unwrap();
        Credential {
            certificates,
            key: PrivateKeyDer::Pkcs8(key.serialize_der().into()),
        }
    }

    /// Opens a TLS connection whose handshake is complete on the client's side.
    async fn connect(&self, own: Option<Credential>) -> io::Result<TlsStream<TcpStream>> {
        self.connect_from(HERE, own).await
    }

    async fn connect_from(
        &self,
        from: Ipv4Addr,
        own: Option<Credential>,
    ) -> io::Result<TlsStream<TcpStream>> {
        let config = client_config(&self.authority.roots(), own).unwrap();
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
    async fn ask(&self, own: Option<Credential>) -> Result<String, Status> {
        let (mut client, _bridge) = self.client(own).await;
        who(&mut client).await
    }

    async fn client(&self, own: Option<Credential>) -> (EnrollmentClient<Channel>, Bridge) {
        let stream = self.connect(own).await.unwrap();
        let (endpoint, bridge) = bridge(stream).await;
        let channel = endpoint.connect().await.unwrap();
        (EnrollmentClient::new(channel), bridge)
    }
}

async fn who(client: &mut EnrollmentClient<Channel>) -> Result<String, Status> {
    let answer = client.enroll(v1::EnrollRequest::default()).await?;
    let root = answer.into_inner().roots.remove(0);
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

/// Whether the server closes the connection. Its verdict on the client certificate comes with the first read.
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
    let hub = hub(Limits::default()).await;
    let own = Hub::agent(&hub.authority, "edge-1", DAY);
    assert_eq!(hub.ask(Some(own)).await.unwrap(), format!("edge-1 {UID}"));
    assert_eq!(hub.ask(None).await.unwrap(), "no client certificate");
}

#[tokio::test]
async fn invalid_agent_certificates_are_rejected() {
    let hub = hub(Limits::default()).await;
    let other = Authority::generate("a.krypton", clock::wall()).unwrap();
    let expired = Duration::ZERO;
    for own in [
        Hub::agent(&other, "edge-1", DAY),
        Hub::agent(&hub.authority, "edge-1", expired),
        hub.authority.hub_credential(clock::wall()).unwrap(),
    ] {
        let mut stream = hub.connect(Some(own)).await.unwrap();
        assert!(is_ended(&mut stream).await);
    }
    // Later connections are served.
    assert_eq!(hub.ask(None).await.unwrap(), "no client certificate");
}

#[tokio::test]
async fn non_tls_connection_is_rejected_and_next_served() {
    let hub = hub(Limits::default()).await;
    let mut plain = TcpStream::connect(hub.address).await.unwrap();
    plain
        .write_all(b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    // A TLS alert, or a reset if it arrived first.
    drop(plain.read_to_end(&mut answer).await);
    assert!(!answer.starts_with(b"HTTP"));
    assert_eq!(hub.ask(None).await.unwrap(), "no client certificate");
}

#[tokio::test]
async fn unfinished_handshake_times_out_and_frees_slot() {
    let limits = Limits {
        handshakes: 2,
        handshake: Duration::from_millis(50),
        ..Limits::default()
    };
    let hub = hub(limits).await;
    let mut silent = Vec::new();
    for _ in 0..8 {
        silent.push(TcpStream::connect(hub.address).await.unwrap());
    }
    while who_or_nothing(&hub, None).await.is_none() {}
    for mut stream in silent {
        let mut buffer = [0; 16];
        assert!(matches!(stream.read(&mut buffer).await, Ok(0) | Err(_)));
    }
}

#[tokio::test]
async fn strangers_do_not_take_the_places_of_agents() {
    let limits = Limits {
        strangers: 2,
        request: PATIENCE,
        ..Limits::default()
    };
    let hub = hub(limits).await;
    let mut idle = hub.connect(None).await.unwrap();
    let (mut two, _second) = hub.client(None).await;
    who(&mut two).await.unwrap();
    // A new connection replaces the oldest one without a request.
    let (mut three, _third) = hub.client(None).await;
    who(&mut three).await.unwrap();
    assert!(is_ended(&mut idle).await);
    let own = Hub::agent(&hub.authority, "edge-1", DAY);
    assert_eq!(hub.ask(Some(own)).await.unwrap(), format!("edge-1 {UID}"));
    who(&mut two).await.unwrap();
    assert_eq!(hub.metrics.refusals("strangers"), 1);
}

#[tokio::test]
async fn idle_strangers_leave_room_for_enrollment() {
    let limits = Limits {
        strangers: 8,
        stranger: PATIENCE,
        request: PATIENCE,
        of_an_address: OfAnAddress {
            strangers: 2,
            ..Limits::default().of_an_address
        },
        ..Limits::default()
    };
    let hub = hub(limits).await;
    let mut held = Vec::new();
    for last in 2..6 {
        for _ in 0..2 {
            let from = Ipv4Addr::new(127, 0, 0, last);
            held.push(hub.connect_from(from, None).await.unwrap());
        }
    }
    assert_eq!(hub.ask(None).await.unwrap(), "no client certificate");
}

#[tokio::test]
async fn stranger_without_a_request_is_dropped_soon() {
    let limits = Limits {
        stranger: PATIENCE,
        request: Duration::from_millis(50),
        ..Limits::default()
    };
    let hub = hub(limits).await;
    let mut idle = hub.connect(None).await.unwrap();
    assert!(is_ended(&mut idle).await);
}

#[tokio::test]
async fn idle_stranger_times_out_and_frees_slot() {
    let limits = Limits {
        strangers: 1,
        stranger: Duration::from_millis(50),
        ..Limits::default()
    };
    let hub = hub(limits).await;
    let mut idle = hub.connect(None).await.unwrap();
    assert!(is_ended(&mut idle).await);
    while who_or_nothing(&hub, None).await.is_none() {}
}

#[tokio::test]
async fn connection_ends_when_its_certificate_expires() {
    let hub = hub(Limits::default()).await;
    // Certificates have whole seconds, so this one lasts at least one second.
    let own = Hub::agent(&hub.authority, "edge-1", Duration::from_secs(2));
    let mut stream = hub.connect(Some(own)).await.unwrap();
    assert!(is_ended(&mut stream).await);
}

#[tokio::test]
async fn member_over_limit_leaves_other_members_served() {
    let limits = Limits {
        of_a_member: 2,
        ..Limits::default()
    };
    let hub = hub(limits).await;
    let own = Hub::agent(&hub.authority, "edge-1", DAY);
    let (mut one, first) = hub.client(Some(own.clone())).await;
    let (mut two, _second) = hub.client(Some(own.clone())).await;
    who(&mut one).await.unwrap();
    who(&mut two).await.unwrap();
    let mut third = hub.connect(Some(own.clone())).await.unwrap();
    assert!(is_ended(&mut third).await);
    let other = Hub::agent(&hub.authority, "edge-2", DAY);
    assert_eq!(hub.ask(Some(other)).await.unwrap(), format!("edge-2 {UID}"));
    drop((one, first));
    // The slot is free as soon as the hub has seen the close.
    while who_or_nothing(&hub, Some(own.clone())).await.is_none() {}
}

async fn who_or_nothing(hub: &Hub, own: Option<Credential>) -> Option<String> {
    let stream = hub.connect(own).await.ok()?;
    let (endpoint, _bridge) = bridge(stream).await;
    let mut client = EnrollmentClient::new(endpoint.connect().await.ok()?);
    who(&mut client).await.ok()
}

#[tokio::test]
async fn beyond_the_limit_connections_wait_until_one_goes() {
    let limits = Limits {
        connections: 1,
        ..Limits::default()
    };
    let hub = hub(limits).await;
    let (mut one, first) = hub.client(None).await;
    who(&mut one).await.unwrap();
    let came = AtomicUsize::new(0);
    let second = async {
        let said = hub.ask(None).await.unwrap();
        came.fetch_add(1, Ordering::Relaxed);
        said
    };
    let go = async {
        for _ in 0..20 {
            who(&mut one).await.unwrap();
        }
        assert_eq!(came.load(Ordering::Relaxed), 0);
        drop((one, first));
    };
    let (said, ()) = tokio::join!(second, go);
    assert_eq!(said, "no client certificate");
}

#[tokio::test]
async fn new_hub_certificate_applies_to_next_connection() {
    let hub = hub(Limits::default()).await;
    let certificate =
        |stream: &TlsStream<TcpStream>| stream.get_ref().1.peer_certificates().unwrap()[0].clone();
    let before = hub.connect(None).await.unwrap();
    let (mut old, _bridge) = hub.client(None).await;
    let config = server_config(&hub.authority, clock::wall()).unwrap();
    hub.tls.store(Arc::new(config));
    let after = hub.connect(None).await.unwrap();
    assert_ne!(certificate(&before), certificate(&after));
    who(&mut old).await.unwrap();
}

#[tokio::test]
async fn stop_ends_serving_and_frees_port() {
    let hub = hub(Limits::default()).await;
    let own = Hub::agent(&hub.authority, "edge-1", DAY);
    let (mut client, _bridge) = hub.client(Some(own)).await;
    who(&mut client).await.unwrap();
    hub.stop.cancel();
    hub.served.await.unwrap().unwrap();
    TcpListener::bind(hub.address).await.unwrap();
}

#[tokio::test]
async fn unfinished_call_is_aborted_after_drain() {
    let limits = Limits {
        drain: Duration::from_millis(50),
        ..Limits::default()
    };
    let hub = hub(limits).await;
    let own = Hub::agent(&hub.authority, "edge-1", DAY);
    let (mut client, _bridge) = hub.client(Some(own)).await;
    let hang = v1::EnrollRequest {
        token: HANG.to_owned(),
        ..Default::default()
    };
    let stop = async {
        hub.hanging.notified().await;
        hub.stop.cancel();
    };
    let (answer, ()) = tokio::join!(client.enroll(hang), stop);
    answer.unwrap_err();
    hub.served.await.unwrap().unwrap();
}

#[tokio::test]
async fn port_conflict_error_names_flag_and_address() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = admin::bind(LISTEN_FLAG, &address.parse().unwrap())
        .await
        .unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains("--listen") && said.contains(&address),
        "{said}"
    );
}

#[test]
fn hub_certificate_renews_early_or_after_clock_rollback() {
    let made = Timestamp::from_second(1_800_000_000).unwrap();
    let after = |days: i64| Timestamp::from_second(made.as_second() + days * 86_400).unwrap();
    assert!(!is_due(made, made));
    assert!(!is_due(made, after(59)));
    assert!(is_due(made, after(60)));
    assert!(is_due(made, after(-1)));
}

#[test]
fn only_connection_accept_errors_skip_pause() {
    assert!(is_of_one_connection(io::ErrorKind::ConnectionAborted));
    const EMFILE: i32 = 24;
    let no_file = io::Error::from_raw_os_error(EMFILE);
    assert!(!is_of_one_connection(no_file.kind()));
}
