//! Tests against a loopback server that sends endless responses.

use k8s_openapi::api::core::v1::ConfigMap;
use krypton_types::error_chain::chain;
use kube::api::{Api, ListParams, WatchParams};
use kube::runtime::watcher::{Config, watcher};
use kube::{Client, Config as ClientConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio_util::task::AbortOnDropHandle;

use futures::StreamExt as _;

use super::*;
use crate::access::client_with_limits;

const HEAD: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
const ENDLESS: Duration = Duration::from_secs(24 * 60 * 60);

/// Size limits far below the amount that a test sends, without time limits.
fn limits() -> ResponseLimits {
    ResponseLimits {
        body: 1 << 20,
        error: 64 << 10,
        event: 64 << 10,
        nested: 10_000,
        in_flight: 2 << 20,
        idle: ENDLESS,
        total: ENDLESS,
        watch: ENDLESS,
    }
}

struct Server {
    client: Client,
    report_rx: mpsc::Receiver<String>,
    _task: AbortOnDropHandle<()>,
}

impl Server {
    fn config_maps(&self) -> Api<ConfigMap> {
        Api::default_namespaced(self.client.clone())
    }
}

async fn flooding_server() -> Server {
    server(limits(), HEAD, vec![b' '; 8192], Duration::ZERO).await
}

/// Responds to each request with `head`, and then repeats `chunk` and `pause` until the client disconnects.
async fn server(
    limits: ResponseLimits,
    head: &'static str,
    chunk: Vec<u8>,
    pause: Duration,
) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let task = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(send_endlessly(stream, head, chunk.clone(), pause));
        }
    });
    let (report_tx, report_rx) = mpsc::channel(64);
    let on_cut_off: CutOffCallback =
        Arc::new(move |error: &CutOffError| drop(report_tx.try_send(error.to_string())));
    let config = ClientConfig::new(url.parse().unwrap());
    let unauthorized = Arc::new(Notify::new());
    let client = client_with_limits(config, "test/1", unauthorized, limits, on_cut_off);
    Server {
        client: client.unwrap(),
        report_rx,
        _task: AbortOnDropHandle::new(task),
    }
}

async fn send_endlessly(mut stream: TcpStream, head: &str, chunk: Vec<u8>, pause: Duration) {
    let mut request = [0; 4096];
    assert!(stream.read(&mut request).await.unwrap() > 0);
    stream.write_all(head.as_bytes()).await.unwrap();
    let size = format!("{:x}\r\n", chunk.len());
    let chunk = [size.as_bytes(), &chunk, b"\r\n"].concat();
    while stream.write_all(&chunk).await.is_ok() {
        tokio::time::sleep(pause).await;
    }
}

async fn list_error(server: &Server) -> String {
    let maps = server.config_maps();
    let error = maps.list(&ListParams::default()).await.unwrap_err();
    chain(&error)
}

#[tokio::test]
async fn body_beyond_a_limit_is_cut_off() {
    const ERROR: &str = "HTTP/1.1 500 Internal Server Error\r\nTransfer-Encoding: chunked\r\n\r\n";
    let slow = ResponseLimits {
        total: Duration::from_millis(100),
        ..limits()
    };
    let stalled = ResponseLimits {
        idle: Duration::from_millis(50),
        ..limits()
    };
    let (zero, trickle) = (Duration::ZERO, Duration::from_millis(10));
    let (large, space) = (vec![b' '; 8192], vec![b' ']);
    let endless = "GET /api/v1/namespaces/default/configmaps: it has more than 1048576 bytes";
    let nested = b"{},".repeat(100);
    for (limits, head, chunk, pause, expected) in [
        (limits(), HEAD, large.clone(), zero, endless),
        (limits(), ERROR, large, zero, "more than 65536 bytes"),
        (limits(), HEAD, nested, zero, "nests more than 10000"),
        (slow, HEAD, space.clone(), trickle, "longer than 0.1 s"),
        (stalled, HEAD, space, ENDLESS, "no data arrived for 0.05 s"),
    ] {
        let mut server = server(limits, head, chunk, pause).await;
        let error = list_error(&server).await;
        assert!(error.contains(expected), "{expected}: {error}");
        // A server that only stalls is not reported as hostile.
        let reported = server.report_rx.try_recv().ok();
        let reported = reported.map(|text| text.contains(expected));
        assert_eq!(reported, (pause != ENDLESS).then_some(true), "{expected}");
    }
}

#[tokio::test]
async fn endless_line_of_a_watch_is_cut_off() {
    let mut server = flooding_server().await;
    let maps = server.config_maps();
    let watch = maps.watch(&WatchParams::default(), "1").await;
    let mut watch = Box::pin(watch.unwrap());
    let error = loop {
        match watch.next().await.unwrap() {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    let (error, expected) = (chain(&error), "an event has more than 65536 bytes");
    assert!(error.contains(expected), "{error}");
    assert!(server.report_rx.recv().await.is_some());
}

#[tokio::test]
async fn watch_that_never_ends_is_cut_off() {
    let limits = ResponseLimits {
        watch: Duration::from_millis(100),
        ..limits()
    };
    let server = server(limits, HEAD, vec![b'\n'], Duration::from_millis(1)).await;
    let maps = server.config_maps();
    let watch = maps.watch(&WatchParams::default(), "1").await;
    let watch = Box::pin(watch.unwrap());
    let failed = watch.filter_map(async |event| event.err());
    let error = Box::pin(failed).next().await;
    // An empty line is neither an event nor an error.
    if let Some(error) = error {
        let error = chain(&error);
        assert!(error.contains("watch took longer than"), "{error}");
    }
}

#[tokio::test]
async fn another_server_answers_while_one_floods() {
    let flooding = flooding_server().await;
    let body = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{\"items\":[]}";
    let head = std::str::from_utf8(body).unwrap();
    let well_behaved = server(limits(), head, Vec::new(), ENDLESS).await;
    let flooding = async {
        for _ in 0..20 {
            list_error(&flooding).await;
        }
    };
    let asking = async {
        for _ in 0..20 {
            let maps = well_behaved.config_maps();
            let maps = maps.list(&ListParams::default()).await.unwrap();
            assert!(maps.items.is_empty());
        }
    };
    tokio::join!(flooding, asking);
}

#[tokio::test]
async fn watcher_of_flooding_server_fails_and_retries() {
    let server = flooding_server().await;
    let events = watcher(server.config_maps(), Config::default());
    let errors = events.filter_map(async |event| event.err());
    let errors: Vec<_> = Box::pin(errors).take(3).collect().await;
    for error in errors {
        let error = chain(&error);
        assert!(error.contains("more than 1048576 bytes"), "{error}");
    }
}

#[test]
fn watch_events_are_limited_individually() {
    let mut meter = ResponseMeter::new(ResponseKind::Watch, limits());
    for _ in 0..10 {
        meter
            .read(&[vec![b' '; 40_000], b"\n".to_vec()].concat())
            .unwrap();
    }
    meter.read(&vec![b' '; 40_000]).unwrap();
    let result = meter.read(&vec![b' '; 40_000]);
    assert_eq!(result, Err(ExceededLimit::Event(limits().event)));
}

#[test]
fn dropped_bodies_release_their_byte_budget() {
    let in_flight = Arc::new(AtomicUsize::new(0));
    let new_counter = || InFlightBytes {
        in_flight: Arc::clone(&in_flight),
        bytes: 0,
    };
    let (mut one, mut two) = (new_counter(), new_counter());
    one.set(60, 100).unwrap();
    one.set(70, 100).unwrap();
    two.set(30, 100).unwrap();
    assert_eq!(two.set(31, 100), Err(ExceededLimit::InFlight(100)));
    drop(one);
    two.set(100, 100).unwrap();
    drop(two);
    assert_eq!(in_flight.load(Ordering::Relaxed), 0);
}
