//! Tests the servers over real sockets on loopback.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use super::*;

async fn loopback() -> TcpListener {
    bind(HEALTH_FLAG, &"127.0.0.1:0".parse().unwrap())
        .await
        .unwrap()
}

async fn request(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

/// A server of the probes on loopback.
struct HealthServer {
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<Result<(), AdminError>>,
}

impl HealthServer {
    fn start(listener: TcpListener, readiness: &Readiness) -> Self {
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let (watchdog, stopped) = (Watchdog::default(), stop.clone());
        let server = serve_health(listener, readiness.clone(), watchdog, stopped);
        Self {
            address,
            stop,
            task: tokio::spawn(server),
        }
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn readyz_names_pending_guards_until_last_is_dropped() {
    let readiness = Readiness::new();
    let caches = readiness.guard("caches");
    let fleet = readiness.guard("fleet");
    let server = HealthServer::start(loopback().await, &readiness);
    let check = async |path: &str, status: &str, end: &str| {
        let response = request(server.address, path).await;
        let status_line = format!("HTTP/1.1 {status} ");
        assert!(response.starts_with(&status_line), "{path}: {response}");
        assert!(response.ends_with(end), "{path}: {response}");
    };

    check("/readyz", "503", "waiting for: caches, fleet\n").await;
    check("/healthz", "200", "").await;
    drop(caches);
    check("/readyz", "503", "waiting for: fleet\n").await;
    drop(fleet);
    check("/readyz", "200", "").await;
    readiness.note("values", Some("the values are old".to_owned()));
    check("/readyz", "200", "ok\nbut the values are old\n").await;
    readiness.note("values", None);
    check("/readyz", "200", "\r\n\r\nok\n").await;
    check("/other", "404", "").await;
    server.end().await;
}

#[test]
fn two_guards_of_one_name_are_two() {
    let readiness = Readiness::new();
    let (first, second) = (readiness.guard("member"), readiness.guard("member"));
    drop(first);
    assert!(!readiness.is_ready());
    drop(second);
    assert!(readiness.is_ready());
    let _again = readiness.guard("drain");
    assert_eq!(readiness.waiting_for(), ["drain"]);
}

#[tokio::test]
async fn metrics_are_open_metrics_text() {
    let mut registry = Registry::default();
    let runs = Counter::<u64>::default();
    registry.register("krypton_helm_runs", "Runs of helm", runs.clone());
    runs.inc();
    let listener = loopback().await;
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let server = tokio::spawn(serve_metrics(listener, Arc::new(registry), stop.clone()));

    let response = request(address, "/metrics").await;
    assert!(
        response.contains("content-type: application/openmetrics-text"),
        "{response}"
    );
    assert!(
        response.contains("krypton_helm_runs_total 1") && response.contains("# EOF"),
        "{response}"
    );

    stop.cancel();
    server.await.unwrap().unwrap();
}

#[tokio::test]
async fn used_port_error_names_flag_and_address() {
    let first = loopback().await;
    let address: BindAddress = first.local_addr().unwrap().to_string().parse().unwrap();
    let error = bind(METRICS_FLAG, &address).await.unwrap_err();
    assert!(matches!(error, AdminError::InUse { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(METRICS_FLAG) && text.contains(&address.to_string()),
        "{text}"
    );
}

#[tokio::test]
async fn nonlocal_address_is_rejected_with_bind_error() {
    let error = bind(METRICS_FLAG, &"192.0.2.1:80".parse().unwrap())
        .await
        .unwrap_err();
    assert!(matches!(error, AdminError::Bind { .. }), "{error:?}");
}

#[tokio::test]
async fn without_a_host_the_loopback_address_answers() {
    let listener = bind(HEALTH_FLAG, &":0".parse().unwrap()).await.unwrap();
    let server = HealthServer::start(listener, &Readiness::new());
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, server.address.port()));
    let response = request(loopback, "/healthz").await;
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    server.end().await;
}

/// Timeout for slow machines. It ends a test that hangs.
const TIMEOUT: Duration = Duration::from_secs(60);
const NEVER: Duration = Duration::from_secs(24 * 60 * 60);
const FOUR_CONNECTIONS: ConnectionLimits = ConnectionLimits {
    connections: 4,
    idle: NEVER,
    lifetime: NEVER,
};

async fn serve_within(limits: ConnectionLimits) -> (SocketAddr, CancellationToken) {
    let listener = loopback().await;
    let address = listener.local_addr().unwrap();
    let bounded = BoundedListener::new(listener, limits);
    let router = Router::new().route("/healthz", get(|| async { "ok\n" }));
    let stop = CancellationToken::new();
    let server =
        axum::serve(bounded, router).with_graceful_shutdown(stop.clone().cancelled_owned());
    tokio::spawn(server.into_future());
    (address, stop)
}

/// Reads until the server closes the connection.
async fn until_closed(mut stream: TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    let reading = stream.read_to_end(&mut rest);
    let read = tokio::time::timeout(TIMEOUT, reading).await;
    drop(read.expect("the server closes the connection"));
    rest
}

#[tokio::test]
async fn quiet_connection_is_closed() {
    let limits = ConnectionLimits {
        idle: Duration::from_millis(50),
        lifetime: NEVER,
        ..ConnectionLimits::PROBES
    };
    let (address, _stop) = serve_within(limits).await;
    let idle = TcpStream::connect(address).await.unwrap();
    assert_eq!(until_closed(idle).await, b"");
}

#[tokio::test]
async fn connection_that_trickles_is_closed() {
    let limits = ConnectionLimits {
        idle: NEVER,
        lifetime: Duration::from_millis(50),
        ..ConnectionLimits::PROBES
    };
    let (address, _stop) = serve_within(limits).await;
    let (reader, mut writer) = TcpStream::connect(address).await.unwrap().into_split();
    let trickling = tokio::spawn(async move {
        while writer.write_all(b"G").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let result = tokio::time::timeout(TIMEOUT, trickling).await;
    result.expect("the server closes the connection").unwrap();
    drop(reader);
}

#[tokio::test]
async fn probes_succeed_despite_held_connections() {
    let (address, _stop) = serve_within(FOUR_CONNECTIONS).await;
    let mut held = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\n")
            .await
            .unwrap();
        held.push(stream);
    }
    let response = tokio::time::timeout(TIMEOUT, request(address, "/healthz")).await;
    let response = response.expect("a probe is answered beside held connections");
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    // The server has closed the oldest connection for a new one.
    assert_eq!(until_closed(held.remove(0)).await, b"");
}

/// Connects from a different address than the probes, and reconnects after each disconnect.
async fn reconnect(address: SocketAddr) {
    loop {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        if let Ok(mut stream) = socket.connect(address).await {
            let mut byte = [0];
            drop(stream.read(&mut byte).await);
        }
    }
}

#[tokio::test]
async fn probes_succeed_despite_reconnecting_clients() {
    let (address, _stop) = serve_within(FOUR_CONNECTIONS).await;
    let mut clients = JoinSet::new();
    for _ in 0..32 {
        clients.spawn(reconnect(address));
    }
    for _ in 0..50 {
        let mut probe = TcpStream::connect(address).await.unwrap();
        // A kubelet that sends its request late.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        let sent = probe.write_all(b"GET /healthz HTTP/1.0\r\n\r\n").await;
        assert!(sent.is_ok(), "cut off before it asked");
        let response = String::from_utf8(until_closed(probe).await).unwrap();
        assert!(response.starts_with("HTTP/1.0 200"), "{response:?}");
    }
}

#[tokio::test]
async fn probe_connection_serves_one_request() {
    let server = HealthServer::start(loopback().await, &Readiness::new());
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let request = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(&request.repeat(2)).await.unwrap();
    let responses = String::from_utf8(until_closed(stream).await).unwrap();
    assert_eq!(responses.matches("HTTP/1.1 200").count(), 1, "{responses}");
    server.end().await;
}
