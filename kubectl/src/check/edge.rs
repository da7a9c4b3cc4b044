//! Checks what an agent needs with a join bundle, from this machine: the bundle, and a connection to the hub.

use std::error::Error as _;
use std::io;
use std::path::Path;
use std::sync::Arc;

use futures::future::join_all;
use jiff::Timestamp;
use krypton_runtime::dial::{DialError, ProxiedTcp, open_tls};
use krypton_runtime::net::Network;
use krypton_runtime::tls::client_config;
use krypton_types::error_chain::chain;
use krypton_types::join_bundle::JoinBundle;

use super::{findings, validities};
use crate::error::KubectlError;
use crate::home::Env;
use crate::render::one_line;
use crate::statement::{Line, Mark};

/// Explains how the agent connects, and its errors.
const AGENT_DOCS: &str = "reference/reasons.md#agent-messages";
/// For an error whose message names no fix.
const CONNECTION_REMEDY: &str =
    "check that the hub listens at this address, and that no device changes the connection";

pub(crate) fn read(file: &Path) -> Result<JoinBundle, KubectlError> {
    let text = std::fs::read(file).and_then(decode).map_err(|error| {
        KubectlError::Failed(format!("reading {} failed: {error}", file.display()))
    })?;
    JoinBundle::parse(&text).map_err(|error| {
        let error = chain(&error);
        KubectlError::Failed(format!("{} is not valid: {error}", file.display()))
    })
}

/// Decodes UTF-8, and UTF-16, in which Windows PowerShell writes the output of `join` into a file.
fn decode(bytes: Vec<u8>) -> io::Result<String> {
    match bytes.strip_prefix(&[0xff, 0xfe]) {
        Some(utf16) => {
            let (units, _) = utf16.as_chunks();
            let units = units.iter().map(|unit| u16::from_le_bytes(*unit));
            let text: Result<_, _> = char::decode_utf16(units).collect();
            text.map_err(io::Error::other)
        }
        None => String::from_utf8(bytes).map_err(io::Error::other),
    }
}

/// Checks the bundle, and each address of the hub in it.
pub(super) async fn check(bundle: &JoinBundle, env: Env<'_>, now: Timestamp) -> Vec<Line> {
    let mut lines = vec![expiry(bundle, now)];
    lines.extend(findings::authority(
        &validities(&bundle.certificate_authority),
        now,
    ));
    lines.extend(connections(bundle, env).await);
    lines
}

/// Returns on one line why no address can be reached. `None` if one can.
pub(crate) async fn connection_defect(bundle: &JoinBundle, env: Env<'_>) -> Option<String> {
    let lines = connections(bundle, env).await;
    let is_connected = lines.iter().any(|line| line.mark == Mark::Ok);
    let texts = lines.iter().map(|line| match &line.remedy {
        Some(remedy) => one_line(&format!("{}; {remedy}", line.text)),
        None => one_line(&line.text),
    });
    let texts: Vec<String> = texts.collect();
    (!is_connected).then(|| texts.join("; "))
}

/// The hub accepts the bundle until it expires, or one agent has used it.
fn expiry(bundle: &JoinBundle, now: Timestamp) -> Line {
    let JoinBundle {
        cluster, expires, ..
    } = bundle;
    if *expires > now {
        let text = format!("the bundle lets one agent of {cluster} join until {expires}");
        return Line::ok(text);
    }
    let text = format!("the bundle of {cluster} expired at {expires}");
    Line::defect(Mark::Problem, text, (&another_bundle(cluster), AGENT_DOCS))
}

fn another_bundle(cluster: &str) -> String {
    format!("create another: kubectl krypton join {cluster}")
}

/// Connects to each address as an agent does, with the proxy of the environment.
async fn connections(bundle: &JoinBundle, env: Env<'_>) -> Vec<Line> {
    let roots = bundle.roots().unwrap_or_default();
    let tls = match client_config(&roots, None) {
        Ok(tls) => Arc::new(tls),
        Err(error) => {
            let text = format!("the bundle's CA cannot be used: {}", chain(&error));
            let remedy = another_bundle(&bundle.cluster);
            return vec![Line::defect(Mark::Problem, text, (&remedy, AGENT_DOCS))];
        }
    };
    let network = ProxiedTcp::new(env);
    let attempts = bundle.addresses.iter().map(async |address| {
        let opening = open_tls(&network, address, Arc::clone(&tls));
        Attempt {
            address,
            proxy: network.proxy(address).map(|proxy| {
                let host = proxy.uri().host().unwrap_or_default();
                format!("{host}:{}", proxy.uri().port_u16().unwrap_or(80))
            }),
            result: Box::pin(opening).await.map(drop),
        }
    });
    judge(&join_all(attempts).await)
}

struct Attempt<'a> {
    address: &'a str,
    /// Proxy of the environment for this address.
    proxy: Option<String>,
    result: Result<(), DialError>,
}

/// An agent needs one of the addresses.
fn judge(attempts: &[Attempt<'_>]) -> Vec<Line> {
    let is_connected = attempts.iter().any(|attempt| attempt.result.is_ok());
    let line = |attempt: &Attempt<'_>| {
        let machine = match &attempt.proxy {
            Some(proxy) => format!("from this machine through its proxy {proxy}"),
            None => "from this machine".to_owned(),
        };
        let place = format!("{machine}, not from the cluster");
        match &attempt.result {
            Ok(()) => Line::ok(format!(
                "the hub responds at {} with a valid certificate ({place})",
                attempt.address
            )),
            Err(error) => {
                let mark = match is_connected {
                    true => Mark::Note,
                    false => Mark::Problem,
                };
                let message = error.to_string();
                let parts = message.split_once("; ");
                let (problem, fix) = parts.unwrap_or((&message, CONNECTION_REMEDY));
                let cause = error.source().map(|cause| format!(": {}", chain(cause)));
                let text = format!("{problem}{} ({place})", cause.unwrap_or_default());
                Line::defect(mark, text, (fix, AGENT_DOCS))
            }
        }
    };
    attempts.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use krypton_runtime::tls::{Credential, server_config};
    use rcgen::{CertificateParams, DnType, KeyPair};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpSocket};
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::tests::{ca_pem, now};

    #[test]
    fn bundle_is_read_as_powershell_writes_it() {
        let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert_eq!(decode(utf16("\u{feff}é: 𝄞")).unwrap(), "é: 𝄞");
        assert_eq!(decode("é: 𝄞".into()).unwrap(), "é: 𝄞");
        for invalid in [&b"\xff"[..], b"\xff\xfe\x00\xd8"] {
            assert!(decode(invalid.to_vec()).is_err(), "{invalid:?}");
        }
    }

    fn bundle(addresses: Vec<String>) -> JoinBundle {
        JoinBundle {
            cluster: "edge-1".to_owned(),
            addresses,
            certificate_authority: ca_pem(),
            token: format!("{}.{}", "a".repeat(16), "0".repeat(64)),
            expires: now(),
        }
    }

    #[tokio::test]
    async fn server_without_tls_and_expired_bundle_fail() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            assert!(stream.read(&mut request).await.unwrap() > 0);
            let response = b"HTTP/1.1 400 Bad Request\r\n\r\n";
            stream.write_all(response).await.unwrap();
        });
        let lines = check(&bundle(vec![address.clone()]), &|_| None, now()).await;
        let [expiry, authority, connection] = lines.as_slice() else {
            panic!("{lines:?}");
        };
        assert_eq!(expiry.mark, Mark::Problem, "{expiry:?}");
        assert!(expiry.text.contains("expired at"), "{expiry:?}");
        assert_eq!(authority.mark, Mark::Ok, "{authority:?}");
        assert_eq!(connection.mark, Mark::Problem, "{connection:?}");
        for text in [&*address, "not with TLS", "not from the cluster"] {
            assert!(connection.text.contains(text), "{connection:?}");
        }
    }

    /// Starts a server with a self-signed certificate. Returns its address.
    async fn start_other_hub() -> String {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "another");
        let certificate = params.self_signed(&key).unwrap().der().clone();
        let roots = [certificate.clone()];
        let credential = Credential {
            certificates: vec![certificate],
            key: key.into(),
        };
        let acceptor = TlsAcceptor::from(Arc::new(server_config(&roots, credential).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            // The client ends the handshake.
            drop(acceptor.accept(stream).await);
        });
        address
    }

    #[tokio::test]
    async fn each_failed_connection_has_cause_and_fix() {
        // Bound, but not listening.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let refusing = socket.local_addr().unwrap().to_string();
        // An invalid name: the resolver sends no query.
        let unknown = "hub..invalid:7443".to_owned();
        for (address, problem, fix) in [
            (unknown, "does not resolve: ", "check the name and"),
            (refusing, " refused ", "check that the hub is running"),
            (
                start_other_hub().await,
                "is from another CA: ",
                "run 'kubectl krypton join' again",
            ),
        ] {
            let lines = check(&bundle(vec![address.clone()]), &|_| None, now()).await;
            let line = lines.last().unwrap();
            assert_eq!(line.mark, Mark::Problem, "{line:?}");
            for text in [&*address, problem] {
                assert!(line.text.contains(text), "{line:?}");
            }
            let remedy = line.remedy.as_deref().unwrap();
            assert!(remedy.starts_with(fix), "{line:?}");
        }
    }

    #[test]
    fn one_reachable_address_suffices() {
        let attempt = |address, proxy: Option<&str>, result| Attempt {
            address,
            proxy: proxy.map(str::to_owned),
            result,
        };
        let refused = || Err(DialError::Refused("b:2".to_owned()));
        let lines = judge(&[
            attempt("a:1", Some("proxy:3128"), Ok(())),
            attempt("b:2", None, refused()),
        ]);
        assert_eq!(lines[0].mark, Mark::Ok);
        assert!(lines[0].text.contains("proxy:3128"), "{lines:?}");
        assert_eq!(lines[1].mark, Mark::Note);
        let expected = "connection to hub b:2 refused";
        assert!(lines[1].text.starts_with(expected), "{lines:?}");
        let lines = judge(&[attempt("b:2", None, refused())]);
        assert_eq!(lines[0].mark, Mark::Problem);
    }
}
