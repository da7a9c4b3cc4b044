//! Tests over real sockets and real TLS on loopback.

use krypton_proto::v1::RenewRequest;
use krypton_runtime::dial::ProxiedTcp;
use krypton_runtime::tls;
use krypton_types::error_chain::chain;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::*;
use crate::fake_hub::{FakeAuthority, FakeHub, Validity};

async fn connect_error(authority: &FakeAuthority, address: String) -> DialError {
    authority
        .dialer(vec![address], Validity::Now)
        .connect()
        .await
        .unwrap_err()
}

/// Starts a server that answers the first bytes with `response` and closes the connection.
async fn server(response: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 1024];
            assert!(stream.read(&mut request).await.unwrap() > 0);
            stream.write_all(response).await.unwrap();
        }
    });
    address
}

#[tokio::test]
async fn plain_http_server_error_names_address_and_remedy() {
    let address = server(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n").await;
    let error = connect_error(&FakeAuthority::new(), address.clone()).await;
    assert!(matches!(error, DialError::NotTls(_)), "{error:?}");
    let message = chain(&error);
    assert!(
        message.contains(&address) && message.contains("--listen port"),
        "{message}"
    );
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn cut_off_or_refused_connection_is_transient() {
    let authority = FakeAuthority::new();
    let error = connect_error(&authority, server(b"").await).await;
    assert!(matches!(error, DialError::CutOff { .. }), "{error:?}");
    assert!(error.is_retryable());

    // Bound without a listener, which keeps the port away from other tests.
    let silent = TcpSocket::new_v4().unwrap();
    silent.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let error = connect_error(&authority, address).await;
    assert!(matches!(error, DialError::Refused(_)), "{error:?}");
    assert!(error.is_retryable());

    // An invalid name: the resolver sends no query.
    let error = connect_error(&authority, "hub..invalid:7443".to_owned()).await;
    assert!(matches!(error, DialError::Resolve { .. }), "{error:?}");
}

#[tokio::test]
async fn wrong_ca_expired_and_impostor_hubs_are_distinguished() {
    let (authority, other_authority) = (FakeAuthority::new(), FakeAuthority::new());
    let other_hub = FakeHub::start(&other_authority).await;
    let error = connect_error(&authority, other_hub.address.to_string()).await;
    assert!(matches!(error, DialError::OtherAuthority(_)), "{error:?}");

    let cases = [authority.hub(Validity::Past), authority.impostor()];
    let mut errors = Vec::new();
    for credential in cases {
        let hub = FakeHub::start_as(&authority, credential).await;
        errors.push(connect_error(&authority, hub.address.to_string()).await);
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
    let (authority, other_authority) = (FakeAuthority::new(), FakeAuthority::new());
    let hub = FakeHub::start(&authority).await;
    let expired = authority.dialer(hub.addresses(), Validity::Past);
    let other_ca = {
        let credential = Some(other_authority.agent(Validity::Now));
        let config = tls::client_config(&authority.roots(), credential).unwrap();
        Dialer::new(hub.addresses(), config)
    };
    for (dialer, word) in [(expired, "expired"), (other_ca, "does not know the CA")] {
        let connection = dialer.connect().await.unwrap();
        let result = connection.fleet().renew(RenewRequest::default()).await;
        assert!(result.is_err());
        let message = connection.rejection().unwrap().to_string();
        assert!(message.contains(word), "{message}");
    }
}

#[tokio::test]
async fn last_working_address_is_tried_first() {
    let authority = FakeAuthority::new();
    let hub = FakeHub::start(&authority).await;
    let wrong_server = server(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    let addresses = vec![wrong_server.clone(), hub.address.to_string()];
    let dialer = authority.dialer(addresses, Validity::Now);
    for _ in 0..2 {
        let connection = dialer.connect().await.unwrap();
        assert_eq!(connection.address(), hub.address.to_string());
    }
    assert_eq!(dialer.first.load(Ordering::Relaxed), 1);

    hub.kill();
    let dead = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = vec![wrong_server.clone(), dead.local_addr().unwrap().to_string()];
    drop(dead);
    let error = authority
        .dialer(addresses.clone(), Validity::Now)
        .connect()
        .await
        .unwrap_err();
    let message = chain(&error);
    assert!(
        addresses.iter().all(|address| message.contains(address)),
        "{message}"
    );
    // One of the hubs may become available.
    assert!(error.is_retryable());
}

#[tokio::test]
async fn skipped_hub_is_tried_after_others() {
    let authority = FakeAuthority::new();
    let (first, second) = (
        FakeHub::start(&authority).await,
        FakeHub::start(&authority).await,
    );
    let addresses = [&first, &second].map(|hub| hub.address.to_string());
    let dialer = authority.dialer(addresses.to_vec(), Validity::Now);
    let [first_address, second_address] = &addresses;
    let connected_address = async || dialer.connect().await.unwrap().address().to_owned();
    assert_eq!(&connected_address().await, first_address);
    // Two calls that one hub rejected do not select it again.
    dialer.try_next_first(first_address);
    dialer.try_next_first(first_address);
    assert_eq!(&connected_address().await, second_address);
    assert_eq!(&connected_address().await, second_address);
    // A late rejection by an abandoned hub changes nothing.
    dialer.try_next_first(first_address);
    dialer.try_next_first("elsewhere:7443");
    assert_eq!(&connected_address().await, second_address);
    dialer.try_next_first(second_address);
    assert_eq!(&connected_address().await, first_address);
    // The dialer still tries it if no other hub responds.
    dialer.try_next_first(first_address);
    second.kill();
    drop(second);
    assert_eq!(&connected_address().await, first_address);
}

#[tokio::test(start_paused = true)]
async fn silent_server_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let error = connect_error(&FakeAuthority::new(), address).await;
    assert!(matches!(error, DialError::Silent(_)), "{error:?}");
    assert!(error.is_retryable());
    drop(listener);
}

/// Starts an HTTP proxy. Returns its address and the requests that it receives. With `status` 200, it opens the requested
/// connection.
async fn http_proxy(status: u16) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let requests = Arc::new(Mutex::new(Vec::new()));
    let received = Arc::clone(&requests);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                request.push(stream.read_u8().await.unwrap());
            }
            let request = String::from_utf8(request).unwrap();
            let target = request.split(' ').nth(1).unwrap().to_owned();
            received.lock().push(request);
            let response = format!("HTTP/1.1 {status} Status\r\n\r\n");
            stream.write_all(response.as_bytes()).await.unwrap();
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
    let dialer_through = |proxy: &str, exempt: &'static str| {
        let proxy = format!("http://me:secret@{proxy}");
        let network: Arc<dyn Network> = Arc::new(ProxiedTcp::new(&|name| match name {
            "https_proxy" => Some(proxy.clone()),
            "NO_PROXY" => Some(exempt.to_owned()),
            _ => None,
        }));
        let dialer = authority.dialer(hub.addresses(), Validity::Now);
        dialer.with_network(&network)
    };
    let (address, requests) = http_proxy(200).await;
    dialer_through(&address, "").connect().await.unwrap();
    let request = requests.lock().join("");
    let request_line = format!("CONNECT {} HTTP/1.1\r\n", hub.address);
    assert!(request.starts_with(&request_line), "{request}");
    assert!(request.contains("Basic bWU6c2VjcmV0"), "{request}");
    dialer_through(&address, "example.org,127.0.0.0/8")
        .connect()
        .await
        .unwrap();
    assert_eq!(requests.lock().len(), 1);

    let (address, _) = http_proxy(403).await;
    let error = dialer_through(&address, "").connect().await.unwrap_err();
    assert!(matches!(error, DialError::Proxy { .. }), "{error:?}");
    let text = chain(&error);
    assert!(
        text.contains(&address) && !text.contains("secret"),
        "{text}"
    );
    assert!(error.is_retryable());
}
