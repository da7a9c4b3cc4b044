//! Overload tests: many, slow, flooding and malformed peers do not prevent service to agents.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tonic::Code;
use tonic::codegen::{Service as _, http};

use super::*;

/// Source address of the attackers.
const ATTACKER_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const OTHER_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// Encodes an HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Returns preface and settings, with which every connection starts.
fn connection_start() -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()
}

/// Returns the headers of a call, encoded without compression.
fn call_headers() -> Vec<u8> {
    let path = b"/krypton.fleet.v1.Enrollment/Enroll";
    let kind = b"application/grpc";
    // POST and https by their index in the static table; then name index, length and text.
    let mut block = vec![0x83, 0x87, 0x01, 3, b'h', b'u', b'b'];
    block.extend([0x04, u8::try_from(path.len()).unwrap()]);
    block.extend(path);
    block.extend([0x0f, 0x10, u8::try_from(kind.len()).unwrap()]);
    block.extend(kind);
    block
}

/// Connects from the attackers' address, and starts HTTP/2.
async fn attack(hub: &Hub, credential: Option<Credential>) -> TlsStream<TcpStream> {
    started_from(hub, ATTACKER_ADDRESS, credential).await
}

async fn started_from(
    hub: &Hub,
    from: Ipv4Addr,
    credential: Option<Credential>,
) -> TlsStream<TcpStream> {
    let mut stream = hub.connect_from(from, credential).await.unwrap();
    stream.write_all(&connection_start()).await.unwrap();
    stream
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.unwrap().split_whitespace().next().unwrap();
    number.parse().unwrap()
}

/// Whether the close by the hub has arrived.
fn is_closed(stream: &TcpStream) -> bool {
    let mut buffer = [0; 1024];
    loop {
        match stream.try_read(&mut buffer) {
            Ok(0) => return true,
            // A TLS alert.
            Ok(_) => {}
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        }
    }
}

/// Waits until a new honest agent is served, regardless of the load.
async fn wait_until_served(hub: &Hub, credential: &Credential) {
    let serving = async { while try_identity(hub, Some(credential.clone())).await.is_none() {} };
    tokio::time::timeout(TIMEOUT, serving)
        .await
        .expect("an honest agent is served");
}

#[tokio::test]
async fn address_at_its_limit_leaves_room_for_others() {
    let hub = hub(|limits| {
        limits.handshakes = 4;
        limits.handshake_timeout = TIMEOUT;
        limits.per_address.unauthenticated = 3;
        limits.per_address.handshakes = 2;
        limits.per_address.anonymous = 1;
    })
    .await;
    let mut silent = Vec::new();
    for _ in 0..8 {
        silent.push(hub.plain(ATTACKER_ADDRESS).await.unwrap());
    }
    hub.check_agent_served("edge-1").await;
    hub.check_stranger_served().await;
    // The hub has processed the earlier connections before these two.
    let closed = silent.iter().filter(|stream| is_closed(stream)).count();
    assert_eq!((closed, hub.metrics.refused_count("address")), (5, 5));
    assert_eq!(hub.metrics.handshakes.get(), 2);
    // Without a certificate, an address may have only one connection: the newest.
    let mut first = started_from(&hub, OTHER_ADDRESS, None).await;
    let mut byte = [0; 1];
    first.read_exact(&mut byte).await.unwrap();
    let mut second = started_from(&hub, OTHER_ADDRESS, None).await;
    second.read_exact(&mut byte).await.unwrap();
    assert!(is_ended(&mut first).await);
    hub.check_stranger_served().await;
    // A closed connection frees its slot.
    drop((silent, second));
    while hub.metrics.handshakes.get() > 0 {
        try_identity(&hub, None).await;
    }
    let mut third = attack(&hub, None).await;
    third.read_exact(&mut byte).await.unwrap();
}

#[tokio::test]
async fn all_agents_behind_one_address_are_served() {
    let hub = hub(|limits| {
        limits.unauthenticated = 4;
        limits.per_address.unauthenticated = 4;
        limits.per_address.handshakes = 1;
        limits.per_address.anonymous = 1;
    })
    .await;
    let mut clients = Vec::new();
    for number in 0..20 {
        let credential = hub.credential(&format!("edge-{number}"));
        let (mut client, bridge) = hub.client(Some(credential)).await;
        identity(&mut client).await.unwrap();
        clients.push((client, bridge));
    }
    for (client, _) in &mut clients {
        identity(client).await.unwrap();
    }
    assert_eq!(hub.metrics.handshakes_max.get(), 1);
}

#[tokio::test]
async fn handshake_rate_is_limited_per_address_after_burst() {
    let hub = hub(|limits| {
        limits.handshake_timeout = Duration::from_secs(10);
        limits.per_address.handshake_rate = Rate {
            burst: 3,
            per_token: Duration::from_secs(3600),
        };
    })
    .await;
    for _ in 0..3 {
        hub.connect_from(ATTACKER_ADDRESS, None).await.unwrap();
    }
    assert!(hub.connect_from(ATTACKER_ADDRESS, None).await.is_err());
    assert_eq!(hub.metrics.refused_count("address"), 1);
    hub.check_stranger_served().await;
}

#[tokio::test]
async fn unauthenticated_traffic_is_limited_above_enrollment_size() {
    let hub = hub(|_| {}).await;
    let (mut client, _bridge) = hub.client(None).await;
    let large = v1::EnrollRequest {
        certificate_request: vec![0; 12 * 1024].into(),
        ..Default::default()
    };
    client.enroll(large).await.unwrap();
    let mut stream = hub.connect(None).await.unwrap();
    let pings = frame(PING, 0, 0, &[0; 8]).repeat(100_000);
    let flood = [connection_start(), pings].concat();
    // The hub has closed the connection already, or does so now.
    assert!(stream.write_all(&flood).await.is_err() || is_ended(&mut stream).await);
    wait_until_served(&hub, &hub.credential("edge-1")).await;
}

#[tokio::test]
async fn silent_connection_is_closed() {
    let hub = hub(|limits| limits.silence = Duration::from_millis(50)).await;
    let credential = hub.credential("edge-1");
    let mut stream = hub.connect(Some(credential)).await.unwrap();
    stream.write_all(&connection_start()).await.unwrap();
    assert!(is_ended(&mut stream).await);
}

/// Returns the bytes of a TLS ClientHello.
fn client_hello(hub: &Hub) -> Vec<u8> {
    let config = client_config(&hub.authority.roots(), None).unwrap();
    let name = ServerName::try_from("hub").unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

#[tokio::test]
async fn hundred_slow_handshakes_do_not_block_service() {
    let hub = hub(|limits| limits.handshake_timeout = Duration::from_secs(3)).await;
    let credential = hub.credential("edge-1");
    let (mut connected, _bridge) = hub.client(Some(credential.clone())).await;
    let hello = client_hello(&hub);
    let mut slow = Vec::new();
    for _ in 0..100 {
        slow.push(hub.plain(ATTACKER_ADDRESS).await.unwrap());
    }
    // Send one byte on each connection per served call, and never the last byte.
    let mut bytes = hello[..hello.len() - 1].iter();
    while !slow.is_empty() {
        if let Some(byte) = bytes.next() {
            for stream in &mut slow {
                drop(stream.write_all(&[*byte]).await);
            }
        }
        check_identity(&mut connected, "edge-1").await;
        wait_until_served(&hub, &credential).await;
        slow.retain(|stream| !is_closed(stream));
    }
    assert_eq!(hub.metrics.refused_count("slow"), 100);
    assert_eq!(hub.metrics.handshakes.get(), 0);
}

#[tokio::test]
async fn stalled_connections_after_handshake_do_not_block_service() {
    let hub = hub(|limits| {
        limits.anonymous_lifetime = Duration::from_secs(3);
        limits.silence = Duration::from_secs(3);
    })
    .await;
    let credential = hub.credential("edge-1");
    let (mut connected, _bridge) = hub.client(Some(credential.clone())).await;
    let idle_agent = hub.credential("edge-2");
    let (mut slow, mut silent) = (Vec::new(), Vec::new());
    for _ in 0..16 {
        slow.push(attack(&hub, None).await);
    }
    // Valid certificate, but only a preface.
    for _ in 0..32 {
        silent.push(attack(&hub, Some(idle_agent.clone())).await);
    }
    let headers = frame(HEADERS, END_HEADERS, 1, &call_headers());
    for byte in headers.iter().cycle() {
        let mut open = false;
        for stream in &mut slow {
            open |= stream.write_all(&[*byte]).await.is_ok() && stream.flush().await.is_ok();
        }
        check_identity(&mut connected, "edge-1").await;
        wait_until_served(&hub, &credential).await;
        if !open {
            break;
        }
    }
    for stream in slow.iter_mut().chain(&mut silent) {
        assert!(is_ended(stream).await);
    }
}

/// Raises the limit of open files, because both ends of every connection are in this process.
fn allow_files(needed: u64) {
    let limit = getrlimit(Resource::Nofile);
    assert!(
        limit.maximum.is_none_or(|maximum| maximum >= needed),
        "this needs {needed} open files; raise the limit ('ulimit -Hn')"
    );
    if limit.current.is_some_and(|current| current < needed) {
        let raised = Rlimit {
            current: Some(needed),
            ..limit
        };
        setrlimit(Resource::Nofile, raised).unwrap();
    }
}

#[tokio::test]
async fn connection_flood_uses_bounded_resources_and_frees_them() {
    const COUNT: usize = 10_000;
    const AGENTS: usize = 20;
    allow_files(COUNT as u64 + 3000);
    let max_held = Limits::default().per_address.unauthenticated;
    let hub = hub(|limits| limits.handshake_timeout = Duration::from_secs(5)).await;
    let agent = |number: usize| hub.credential(&format!("edge-{number}"));
    let mut connected = Vec::new();
    for number in 0..AGENTS {
        let (mut client, bridge) = hub.client(Some(agent(number))).await;
        identity(&mut client).await.unwrap();
        connected.push((client, bridge));
    }
    let runtime = tokio::runtime::Handle::current().metrics();
    let tasks = || runtime.num_alive_tasks();
    let (tasks_before, before) = (tasks(), resident_kib());
    let mut open = Vec::new();
    let (mut peak, mut max_tasks) = (0, 0);
    for _ in 0..COUNT / 500 {
        for _ in 0..500 {
            open.push(hub.plain(ATTACKER_ADDRESS).await.unwrap());
        }
        for (client, _) in &mut connected {
            identity(client).await.unwrap();
        }
        // The agent waits in the queue behind all of them.
        wait_until_served(&hub, &agent(AGENTS)).await;
        peak = peak.max(resident_kib());
        max_tasks = max_tasks.max(tasks());
        let held = open.iter().filter(|stream| !is_closed(stream)).count();
        assert!(held <= max_held, "{held} are held");
        assert!(hub.metrics.handshakes.get() <= 64);
    }
    drop(open);
    let freed = async {
        while tasks() > tasks_before || hub.metrics.handshakes.get() > 0 {
            identity(&mut connected[0].0).await.unwrap();
        }
    };
    tokio::time::timeout(TIMEOUT, freed)
        .await
        .expect("all is freed");
    let [address, slow] = ["address", "slow"].map(|reason| hub.metrics.refused_count(reason));
    println!(
        "{COUNT} connections: {address} sent away at once, {slow} after a while; \
         tasks {tasks_before}, {max_tasks} at most; \
         resident {before} KiB before, {peak} at most, {} after",
        resident_kib()
    );
    assert!(max_tasks <= tasks_before + max_held + 16);
    assert!(address + slow >= (COUNT - max_held) as u64);
}

/// Returns the floods, and whether each must end its connection.
fn floods() -> Vec<(&'static str, bool, Vec<u8>)> {
    const MANY: u32 = 100_000;
    let repeated = |frame: &[u8]| frame.repeat(MANY as usize);
    let open = frame(HEADERS, END_HEADERS, 1, &call_headers());
    let resets = (0..MANY).map(|number| {
        let stream = 2 * number + 1;
        let cancel = frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes());
        [frame(HEADERS, END_HEADERS, stream, &call_headers()), cancel].concat()
    });
    let resets = resets.collect::<Vec<_>>().concat();
    // A header of 100 bytes without an index.
    let header = [&[0x00, 1, b'x', 100][..], &[b'y'; 100]].concat();
    let mut continued = frame(HEADERS, 0, 1, &call_headers());
    continued.extend(frame(CONTINUATION, 0, 1, &header).repeat(MANY as usize / 10));
    let mut empty = open;
    empty.extend(repeated(&frame(DATA, 0, 1, &[])));
    vec![
        ("rapid reset", true, resets),
        ("CONTINUATION", true, continued),
        ("empty DATA", true, empty),
        ("PING", false, repeated(&frame(PING, 0, 0, &[0; 8]))),
        ("SETTINGS", false, repeated(&frame(SETTINGS, 0, 0, &[]))),
    ]
}

#[tokio::test]
async fn frame_flood_affects_only_its_own_connection() {
    let hub = hub(|_| {}).await;
    let credential = hub.credential("edge-1");
    let (mut connected, _bridge) = hub.client(Some(credential.clone())).await;
    let flooding_agent = hub.credential("edge-2");
    for (name, ends, flood) in floods() {
        let before = resident_kib();
        let mut stream = hub
            .connect_from(ATTACKER_ADDRESS, Some(flooding_agent.clone()))
            .await
            .unwrap();
        let (ended_tx, ended_rx) = oneshot::channel();
        let flooding = AbortOnDropHandle::new(tokio::spawn(async move {
            let written = stream.write_all(&connection_start()).await;
            let written = match written {
                Ok(()) => stream.write_all(&flood).await,
                failed => failed,
            };
            drop(flood);
            let ended = ends && (written.is_err() || is_ended(&mut stream).await);
            ended_tx.send(ended).ok();
        }));
        for _ in 0..50 {
            check_identity(&mut connected, "edge-1").await;
            wait_until_served(&hub, &credential).await;
        }
        if ends {
            let ended = tokio::time::timeout(TIMEOUT, ended_rx).await;
            assert!(ended.unwrap().unwrap(), "{name}");
        }
        drop(flooding);
        println!("{name}: {before} KiB before, {} after", resident_kib());
    }
    wait_until_served(&hub, &credential).await;
}

#[tokio::test]
async fn only_member_over_byte_limit_is_throttled() {
    let hub = hub(|limits| {
        // Allows practically nothing after the burst.
        limits.member_bytes = Rate {
            burst: 64 * 1024,
            per_token: Duration::from_secs(3600),
        };
        limits.silence = Duration::from_secs(3);
    })
    .await;
    let credential = hub.credential("edge-1");
    let flooding_agent = hub.credential("edge-2");
    let mut stream = attack(&hub, Some(flooding_agent)).await;
    // More than all buffers on the way can hold.
    let flood = frame(PING, 0, 0, &[0; 8]).repeat(2_000_000);
    let flooding = async move { stream.write_all(&flood).await };
    let flooding = AbortOnDropHandle::new(tokio::spawn(flooding));
    for _ in 0..5 {
        wait_until_served(&hub, &credential).await;
    }
    // The flood fills all buffers, and the connection times out as silent.
    let ended = tokio::time::timeout(TIMEOUT, flooding).await.unwrap();
    assert!(ended.unwrap().is_err());
    wait_until_served(&hub, &credential).await;
}

#[tokio::test]
async fn invalid_call_gets_status_code_and_connection_survives() {
    let hub = hub(|_| {}).await;
    let credential = hub.credential("edge-1");
    let stream = hub.connect(Some(credential)).await.unwrap();
    let (endpoint, _bridge) = bridge(stream).await;
    let mut channel = endpoint.connect().await.unwrap();
    let enroll = "/krypton.fleet.v1.Enrollment/Enroll";
    let message = |flag: u8, length: u32, content: &str| {
        let mut body = vec![flag];
        body.extend(length.to_be_bytes());
        body.extend(content.as_bytes());
        String::from_utf8(body).unwrap()
    };
    let gzip = message(1, 2, "\u{1f}x");
    let unknown_paths = [
        "/",
        "/krypton.fleet.v1.Enrollment",
        "/krypton.fleet.v1.Enrollment/Else",
        "//krypton.fleet.v1.Enrollment/Enroll",
        "/krypton.fleet.v1.Enrollment%2FEnroll",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ];
    let unknown = unknown_paths.map(|path| (path, None, message(0, 0, ""), Code::Unimplemented));
    let cases = [
        (enroll, Some("gzip"), gzip.clone(), Code::Unimplemented),
        (enroll, None, gzip, Code::Internal),
        (enroll, None, message(7, 0, ""), Code::Internal),
        // Larger than the limit, both sent and only announced.
        (enroll, None, message(0, 0x7f00_0000, "x"), Code::OutOfRange),
        (
            enroll,
            None,
            message(0, 5 << 20, &"x".repeat(5 << 20)),
            Code::OutOfRange,
        ),
        // A truncated message, and bytes that are not a message.
        (enroll, None, message(0, 9, "x"), Code::Internal),
        (enroll, None, message(0, 2, "\u{7f}\u{7f}"), Code::Internal),
    ];
    for (path, encoding, body, code) in unknown.into_iter().chain(cases) {
        let mut request = http::Request::post(format!("http://hub{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(encoding) = encoding {
            request = request.header("grpc-encoding", encoding);
        }
        let length = body.len();
        let request = request.body(tonic::body::Body::new(body)).unwrap();
        std::future::poll_fn(|cx| channel.poll_ready(cx))
            .await
            .unwrap();
        let response = channel.call(request).await.unwrap();
        let status = Status::from_header_map(response.headers());
        assert_eq!(
            status.map(|status| status.code()),
            Some(code),
            "{path}, {length} bytes"
        );
    }
    let mut client = EnrollmentClient::new(channel);
    check_identity(&mut client, "edge-1").await;
}
