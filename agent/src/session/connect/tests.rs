//! Tests over real sockets and real TLS on loopback.

use std::sync::Mutex;

use arc_swap::ArcSwap;
use krypton_proto::v1::RenewRequest;
use krypton_runtime::tls;
use krypton_types::error_chain::chain;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::*;
use crate::fake_hub::{Answers, FakeAuthority, FakeHub, Valid};

async fn refused(authority: &FakeAuthority, address: String) -> DialError {
    authority
        .dialer(vec![address], Valid::Now)
        .connect()
        .await
        .unwrap_err()
}

/// Starts a server that answers the first bytes with `answer` and closes the connection.
async fn server(answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut asked = [0; 1024];
            assert!(stream.read(&mut asked).await.unwrap() > 0);
            stream.write_all(answer).await.unwrap();
        }
    });
    address
}

#[tokio::test]
async fn plain_http_server_error_names_address_and_remedy() {
    let address = server(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n").await;
    let error = refused(&FakeAuthority::new(), address.clone()).await;
    assert!(matches!(error, DialError::NotTls(_)), "{error:?}");
    let said = chain(&error);
    assert!(
        said.contains(&address) && said.contains("--listen port"),
        "{said}"
    );
    assert!(!error.may_pass());
}

#[tokio::test]
async fn cut_off_or_refused_connection_is_transient() {
    let authority = FakeAuthority::new();
    let error = refused(&authority, server(b"").await).await;
    assert!(matches!(error, DialError::CutOff { .. }), "{error:?}");
    assert!(error.may_pass());

    // Bound without a listener, which keeps the port away from other tests.
    let silent = TcpSocket::new_v4().unwrap();
    silent.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let error = refused(&authority, address).await;
    assert!(matches!(error, DialError::Refused(_)), "{error:?}");
    assert!(error.may_pass());

    // An invalid name: the resolver sends no query.
    let error = refused(&authority, "hub..invalid:7443".to_owned()).await;
    assert!(matches!(error, DialError::Resolve { .. }), "{error:?}");
}

#[tokio::test]
async fn wrong_ca_expired_and_impostor_hubs_are_distinguished() {
    let (authority, other) = (FakeAuthority::new(), FakeAuthority::new());
    let foreign = FakeHub::start(&other).await;
    let error = refused(&authority, foreign.address.to_string()).await;
    assert!(matches!(error, DialError::OtherAuthority(_)), "{error:?}");

    let cases = [authority.hub(Valid::Past), authority.impostor()];
    let mut errors = Vec::new();
    for own in cases {
        let hub = FakeHub::start_as(&authority, own, Answers::default(), "127.0.0.1:0").await;
        errors.push(refused(&authority, hub.address.to_string()).await);
    }
    assert!(
        matches!(
            errors.as_slice(),
            [DialError::NotValidNow(_), DialError::NotTheHub(_)]
        ),
        "{errors:?}"
    );
}

#[tokio::test]
async fn certificate_refusal_reason_is_known_after_first_call() {
    let (authority, other) = (FakeAuthority::new(), FakeAuthority::new());
    let hub = FakeHub::start(&authority).await;
    let expired = authority.dialer(hub.addresses(), Valid::Past);
    let of_another = {
        let own = Some(other.agent(Valid::Now));
        let config = tls::client_config(&authority.roots(), own).unwrap();
        Dialer::new(hub.addresses(), Arc::new(ArcSwap::from_pointee(config)))
    };
    for (dialer, word) in [(expired, "expired"), (of_another, "does not know the CA")] {
        let connection = dialer.connect().await.unwrap();
        let called = connection.fleet().renew(RenewRequest::default()).await;
        assert!(called.is_err());
        let said = connection.refused().unwrap().to_string();
        assert!(said.contains(word), "{said}");
    }
}

#[tokio::test]
async fn last_working_address_is_tried_first() {
    let authority = FakeAuthority::new();
    let hub = FakeHub::start(&authority).await;
    let wrong = server(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    let addresses = vec![wrong.clone(), hub.address.to_string()];
    let dialer = authority.dialer(addresses, Valid::Now);
    for _ in 0..2 {
        let connection = dialer.connect().await.unwrap();
        assert_eq!(connection.address(), hub.address.to_string());
    }
    assert_eq!(dialer.first.load(Ordering::Relaxed), 1);

    hub.kill();
    let dead = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = vec![wrong.clone(), dead.local_addr().unwrap().to_string()];
    drop(dead);
    let error = authority
        .dialer(addresses.clone(), Valid::Now)
        .connect()
        .await
        .unwrap_err();
    let said = chain(&error);
    assert!(
        addresses.iter().all(|address| said.contains(address)),
        "{said}"
    );
    // One of the hubs may become available.
    assert!(error.may_pass());
}

#[tokio::test]
async fn skipped_hub_is_tried_after_others() {
    let authority = FakeAuthority::new();
    let (one, other) = (
        FakeHub::start(&authority).await,
        FakeHub::start(&authority).await,
    );
    let both = [&one, &other].map(|hub| hub.address.to_string());
    let dialer = authority.dialer(both.to_vec(), Valid::Now);
    let [one_address, other_address] = &both;
    let reached = async || dialer.connect().await.unwrap().address().to_owned();
    assert_eq!(&reached().await, one_address);
    // Two calls that one hub rejected do not select it again.
    dialer.pass_on(one_address);
    dialer.pass_on(one_address);
    assert_eq!(&reached().await, other_address);
    assert_eq!(&reached().await, other_address);
    // A late rejection by an abandoned hub changes nothing.
    dialer.pass_on(one_address);
    dialer.pass_on("elsewhere:7443");
    assert_eq!(&reached().await, other_address);
    dialer.pass_on(other_address);
    assert_eq!(&reached().await, one_address);
    // The dialer still tries it if no other hub responds.
    dialer.pass_on(one_address);
    other.kill();
    drop(other);
    assert_eq!(&reached().await, one_address);
}

#[tokio::test(start_paused = true)]
async fn silent_server_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let error = refused(&FakeAuthority::new(), address).await;
    assert!(matches!(error, DialError::Silent(_)), "{error:?}");
    assert!(error.may_pass());
    drop(listener);
}

/// Starts an HTTP proxy. Returns its address and the requests that it receives. With `status` 200, it opens the requested
/// connection.
async fn http_proxy(status: u16) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let requests = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&requests);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                request.push(stream.read_u8().await.unwrap());
            }
            let request = String::from_utf8(request).unwrap();
            let target = request.split(' ').nth(1).unwrap().to_owned();
            seen.lock().unwrap().push(request);
            let answer = format!("HTTP/1.1 {status} Status\r\n\r\n");
            stream.write_all(answer.as_bytes()).await.unwrap();
            if status == 200 {
                let mut hub = TcpStream::connect(target).await.unwrap();
                tokio::spawn(async move { copy_bidirectional(&mut stream, &mut hub).await });
            }
        }
    });
    (address, requests)
}

#[tokio::test]
async fn hub_is_reached_through_proxy_of_environment() {
    let authority = FakeAuthority::new();
    let hub = FakeHub::start(&authority).await;
    let through = |proxy: &str, exempt: &'static str| {
        let proxy = format!("http://me:secret@{proxy}");
        let network: Arc<dyn Network> = Arc::new(ProxiedTcp::new(&|name| match name {
            "https_proxy" => Some(proxy.clone()),
            "NO_PROXY" => Some(exempt.to_owned()),
            _ => None,
        }));
        let dialer = authority.dialer(hub.addresses(), Valid::Now);
        dialer.with_network(&network)
    };
    let (address, requests) = http_proxy(200).await;
    through(&address, "").connect().await.unwrap();
    let request = requests.lock().unwrap().join("");
    let first = format!("CONNECT {} HTTP/1.1\r\n", hub.address);
    assert!(request.starts_with(&first), "{request}");
    assert!(request.contains("Basic bWU6c2VjcmV0"), "{request}");
    through(&address, "example.org,127.0.0.0/8")
        .connect()
        .await
        .unwrap();
    assert_eq!(requests.lock().unwrap().len(), 1);

    let (address, _) = http_proxy(403).await;
    let error = through(&address, "").connect().await.unwrap_err();
    assert!(matches!(error, DialError::Proxy { .. }), "{error:?}");
    let text = chain(&error);
    assert!(
        text.contains(&address) && !text.contains("secret"),
        "{text}"
    );
    assert!(error.may_pass());
}
