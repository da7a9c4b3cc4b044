//! The HTTP proxy on loopback through which Helm reaches members with a kubeconfig.
//!
//! The API server of such a member is not trusted. Helm resolves its name again and follows its redirects. The proxy
//! connects only to the server of the kubeconfig, and only to addresses that the policy allows.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use hyper::body::Incoming;
use hyper::ext::ReasonPhrase;
use hyper::header::PROXY_AUTHORIZATION;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use krypton_runtime::chance;
use krypton_runtime::net::{Listener, Network, Stream};
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{Authority, Policy, refused_address};
use thiserror::Error;
use tokio::io::{AsyncReadExt as _, BufReader};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

/// A Helm run has two or three connections.
const CONNECTIONS_MAX: usize = 512;
/// For reading a request, resolving a name, and connecting.
const DEADLINE: Duration = Duration::from_secs(10);
/// hyper's least.
const REQUEST_MAX: usize = 8 * 1024;
const AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(100);
/// For each direction of a connection.
const BUFFER: usize = 32 * 1024;
const USER_NAME: &str = "helm";

/// Why there is no connection. Helm shows the text.
#[derive(Debug, Error)]
pub(super) enum TunnelRefusal {
    #[error("only CONNECT is supported")]
    Method,
    #[error("the kubeconfig names another server, and redirects are not followed")]
    Elsewhere,
    #[error("{host} is not resolved within {} s", DEADLINE.as_secs())]
    Slow { host: String },
    #[error("{host} cannot be resolved")]
    Unresolved {
        host: String,
        #[source]
        source: io::Error,
    },
    #[error("the server's name {host} resolves to {ip}, which is not allowed: {remedy}")]
    Address {
        host: String,
        ip: IpAddr,
        remedy: &'static str,
    },
    #[error("no address of {host} can be connected to")]
    Unreachable {
        host: String,
        #[source]
        source: io::Error,
    },
}

impl TunnelRefusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Elsewhere | Self::Address { .. } => StatusCode::FORBIDDEN,
            Self::Slow { .. } | Self::Unresolved { .. } | Self::Unreachable { .. } => {
                StatusCode::BAD_GATEWAY
            }
        }
    }
}

/// The proxy, until it is dropped.
#[derive(Debug)]
pub struct Tunnels {
    address: SocketAddr,
    key: hmac::Key,
    _serving: AbortOnDropHandle<()>,
}

impl Tunnels {
    /// Listens on loopback. Names are judged by `policy`.
    ///
    /// # Errors
    /// When there is no loopback to listen on.
    pub async fn start(network: &dyn Network, policy: Policy) -> anyhow::Result<Self> {
        let failed = "listening on loopback for Helm's connections to members failed";
        let listener = network.listen_on_loopback().await.context(failed)?;
        let address = listener.local_addr().context(failed)?;
        let key = hmac::Key::new(hmac::HMAC_SHA256, &chance::secret::<[u8; 32]>());
        let serving = tokio::spawn(serve(listener, key.clone(), policy).in_current_span());
        Ok(Self {
            address,
            key,
            _serving: AbortOnDropHandle::new(serving),
        })
    }

    /// The `proxy-url` of a kubeconfig for this server. It is a credential, and good for this server alone.
    pub(super) fn url(&self, server: &Authority) -> String {
        let password = password(&self.key, &target(&server.host, server.port));
        format!("http://{USER_NAME}:{password}@{}", self.address)
    }
}

fn target(host: &str, port: u16) -> String {
    format!("{}:{port}", host.to_ascii_lowercase())
}

fn password(key: &hmac::Key, target: &str) -> String {
    URL_SAFE_NO_PAD.encode(hmac::sign(key, target.as_bytes()))
}

async fn serve(listener: Listener, key: hmac::Key, policy: Policy) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // The semaphore is never closed.
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(error = %chain(&error), "accepting a connection of Helm failed");
                tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
                continue;
            }
        };
        let (key, slot) = (key.clone(), Arc::new(slot));
        let serving = async move {
            let service = service_fn(|request| {
                let response = respond(request, key.clone(), policy, Arc::clone(&slot));
                async { Ok::<_, Infallible>(response.await) }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(DEADLINE)
                .max_buf_size(REQUEST_MAX)
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades()
                .await;
            if let Err(error) = served {
                tracing::debug!(error = %chain(&error), "a connection of Helm ended");
            }
        };
        tokio::spawn(serving.in_current_span());
    }
}

/// Connects to the server and copies bytes both ways. Holds `slot` until the end.
async fn respond<P: Send + 'static>(
    request: Request<Incoming>,
    key: hmac::Key,
    policy: Policy,
    slot: P,
) -> Response<String> {
    let server = match connect(&request, &key, &policy).await {
        Ok(server) => server,
        Err(refusal) => {
            let problem = chain(&refusal);
            tracing::warn!(%problem, "rejected a connection of Helm");
            let mut response = Response::new(String::new());
            *response.status_mut() = refusal.status();
            // Helm shows nothing else of the answer.
            if let Ok(reason) = ReasonPhrase::try_from(problem.into_bytes()) {
                response.extensions_mut().insert(reason);
            }
            return response;
        }
    };
    let copying = async move {
        let upgraded = hyper::upgrade::on(request).await;
        // Without hyper's wrapper, which has small buffers.
        let helm = upgraded.map(Upgraded::downcast::<TokioIo<Stream>>);
        if let Ok(Ok(helm)) = helm {
            copy_both_ways(helm.io.into_inner(), &helm.read_buf, server).await;
        }
        drop(slot);
    };
    tokio::spawn(copying.in_current_span());
    Response::new(String::new())
}

async fn connect(
    request: &Request<Incoming>,
    key: &hmac::Key,
    policy: &Policy,
) -> Result<TcpStream, TunnelRefusal> {
    if request.method() != Method::CONNECT {
        return Err(TunnelRefusal::Method);
    }
    let authority = request.uri().authority().ok_or(TunnelRefusal::Elsewhere)?;
    let port = authority.port_u16().ok_or(TunnelRefusal::Elsewhere)?;
    let host = authority.host().trim_matches(['[', ']']);
    let authorization = request.headers().get(PROXY_AUTHORIZATION);
    let authorization = authorization.and_then(|authorization| authorization.to_str().ok());
    if !authorization.is_some_and(|authorization| is_for(authorization, key, &target(host, port))) {
        return Err(TunnelRefusal::Elsewhere);
    }
    dial(host, port, policy).await
}

/// Whether the credential is the one for this target.
fn is_for(authorization: &str, key: &hmac::Key, target: &str) -> bool {
    let credential = authorization.strip_prefix("Basic ");
    let credential = credential.and_then(|credential| STANDARD.decode(credential).ok());
    let credential = credential.and_then(|credential| String::from_utf8(credential).ok());
    let tag = credential.as_deref().and_then(|credential| {
        let (_user, password) = credential.split_once(':')?;
        URL_SAFE_NO_PAD.decode(password).ok()
    });
    tag.is_some_and(|tag| hmac::verify(key, target.as_bytes(), &tag).is_ok())
}

async fn dial(host: &str, port: u16, policy: &Policy) -> Result<TcpStream, TunnelRefusal> {
    let addresses = permitted_addresses(host, port, policy).await?;
    let connecting = tokio::time::timeout(DEADLINE, TcpStream::connect(&*addresses)).await;
    let connected = connecting.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let server = connected.map_err(|source| TunnelRefusal::Unreachable {
        host: host.to_owned(),
        source,
    })?;
    // Otherwise each request of Helm waits up to 40 ms for a delayed acknowledgement.
    drop(server.set_nodelay(true));
    Ok(server)
}

/// The addresses of a name. If the policy refuses one of them, it refuses the name.
pub(super) async fn permitted_addresses(
    host: &str,
    port: u16,
    policy: &Policy,
) -> Result<Vec<SocketAddr>, TunnelRefusal> {
    let name = || host.to_owned();
    let resolved = tokio::time::timeout(DEADLINE, lookup_host((host, port))).await;
    let resolved = resolved.map_err(|_| TunnelRefusal::Slow { host: name() })?;
    let resolved = resolved.map_err(|source| TunnelRefusal::Unresolved {
        host: name(),
        source,
    })?;
    let addresses: Vec<SocketAddr> = resolved.collect();
    let refused = addresses.iter().find_map(|address| {
        let ip = address.ip();
        Some((ip, refused_address(ip, policy)?))
    });
    match refused {
        Some((ip, remedy)) => Err(TunnelRefusal::Address {
            host: name(),
            ip,
            remedy,
        }),
        None => Ok(addresses),
    }
}

/// Until either side ends: TLS needs no half of a connection. `early` came from Helm with its request.
async fn copy_both_ways(helm: Stream, early: &[u8], mut server: TcpStream) {
    let (from_helm, mut to_helm) = tokio::io::split(helm);
    let (from_server, mut to_server) = server.split();
    let mut from_helm = BufReader::with_capacity(BUFFER, early.chain(from_helm));
    let mut from_server = BufReader::with_capacity(BUFFER, from_server);
    let ended = tokio::select! {
        up = tokio::io::copy_buf(&mut from_helm, &mut to_server) => up,
        down = tokio::io::copy_buf(&mut from_server, &mut to_helm) => down,
    };
    if let Err(error) = ended {
        tracing::debug!(error = %chain(&error), "a connection of Helm to a member ended");
    }
}

#[cfg(test)]
mod tests {
    use krypton_runtime::net::Tcp;
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpListener;

    use super::*;

    fn loopback() -> Policy {
        Policy {
            allow_loopback: true,
            ..Policy::default()
        }
    }

    fn authority(host: &str, port: u16) -> Authority {
        let host = host.to_owned();
        Authority { host, port }
    }

    fn authorization(url: &str) -> String {
        let (_, rest) = url.split_once("//").unwrap();
        let (credential, _) = rest.split_once('@').unwrap();
        format!("Basic {}", STANDARD.encode(credential))
    }

    /// The head of the answer, and the connection.
    async fn send(tunnels: &Tunnels, request: &str) -> (String, TcpStream) {
        let mut stream = TcpStream::connect(tunnels.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        (String::from_utf8(head).unwrap(), stream)
    }

    fn connect_to(target: &str, authorization: &str) -> String {
        format!(
            "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nProxy-Authorization: {authorization}\r\n\r\n"
        )
    }

    #[tokio::test]
    async fn helm_reaches_the_server_of_its_kubeconfig() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = server.local_addr().unwrap().port();
        let tunnels = Tunnels::start(&Tcp, loopback()).await.unwrap();
        let authorization_header = authorization(&tunnels.url(&authority("localhost", port)));
        let request = connect_to(&format!("LOCALHOST:{port}"), &authorization_header);
        let (head, mut helm) = send(&tunnels, &request).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        let (mut upstream, _) = server.accept().await.unwrap();
        let mut bytes = [0; 5];
        helm.write_all(b"hello").await.unwrap();
        upstream.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"hello");
        upstream.write_all(b"world").await.unwrap();
        helm.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"world");
        drop(helm);
        assert_eq!(upstream.read(&mut [0]).await.unwrap(), 0, "ended with Helm");
    }

    #[tokio::test]
    async fn helm_reaches_no_other_server() {
        let tunnels = Tunnels::start(&Tcp, loopback()).await.unwrap();
        let other_tunnels = Tunnels::start(&Tcp, loopback()).await.unwrap();
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = server.local_addr().unwrap().port();
        let (here, elsewhere) = (format!("127.0.0.1:{port}"), "127.0.0.1:1");
        let authorization_header = authorization(&tunnels.url(&authority("127.0.0.1", port)));
        let foreign = authorization(&other_tunnels.url(&authority("127.0.0.1", port)));
        for (request, answer) in [
            (
                connect_to(elsewhere, &authorization_header),
                "403 the kubeconfig",
            ),
            (connect_to(&here, &foreign), "403 the kubeconfig"),
            (connect_to(&here, "Basic aGVsbTo="), "403 the kubeconfig"),
            (connect_to(&here, ""), "403 the kubeconfig"),
            (
                format!(
                    "GET http://{here}/ HTTP/1.1\r\nHost: {here}\r\nProxy-Authorization: {authorization_header}\r\n\r\n"
                ),
                "405 only CONNECT",
            ),
        ] {
            let (head, _) = send(&tunnels, &request).await;
            let expected = format!("HTTP/1.1 {answer}");
            assert!(head.starts_with(&expected), "{request}{head}");
        }
        // The first that the server sees is the one that is allowed.
        let (head, mut helm) = send(&tunnels, &connect_to(&here, &authorization_header)).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        helm.write_all(b"hello").await.unwrap();
        let (mut first, _) = server.accept().await.unwrap();
        let mut bytes = [0; 5];
        first.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"hello");
    }

    #[tokio::test]
    async fn names_of_forbidden_addresses_are_refused() {
        let tunnels = Tunnels::start(&Tcp, Policy::default()).await.unwrap();
        let authorization_header = authorization(&tunnels.url(&authority("localhost", 1)));
        let (head, _) = send(&tunnels, &connect_to("localhost:1", &authorization_header)).await;
        assert!(
            head.starts_with("HTTP/1.1 403 the server's name localhost"),
            "{head}"
        );
        assert!(head.contains("--insecure-kubeconfig-loopback"), "{head}");
    }
}
