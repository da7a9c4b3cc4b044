//! Tests of the Secret's content, and of the store against a small HTTP server.

use axum::Router;
use axum::body::Bytes;
use axum::extract::State as Shared;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use krypton_runtime::access::new_client;
use krypton_types::error_chain::chain;
use kube::Config;
use parking_lot::Mutex;
use rcgen::{CertificateParams, KeyPair};

use super::*;
use crate::credentials::identity::{Enrolled, Membership};
use crate::fake_hub::{FakeAuthority, Validity};

fn enrolled(authority: &FakeAuthority, key: &KeyPair, valid: Validity) -> Enrolled {
    let request = CertificateParams::default().serialize_request(key).unwrap();
    let certificates = vec![authority.sign(request.der(), "edge-1", valid).into()];
    let membership = Membership {
        cluster: "edge-1".to_owned(),
        addresses: vec!["hub:7443".to_owned(), "[fd00::1]:7443".to_owned()],
        token_name: "0123456789abcdef".to_owned(),
    };
    Enrolled::check(key, membership, certificates, authority.roots()).unwrap()
}

/// Returns a new identity of the member `edge-1`.
pub(crate) fn new_identity(authority: &FakeAuthority, valid: Validity) -> Identity {
    let key = new_key().unwrap();
    let enrolled = Some(enrolled(authority, &key, valid));
    Identity { key, enrolled }
}

fn identity() -> Identity {
    new_identity(&FakeAuthority::new(), Validity::Now)
}

fn secret_of(identity: &Identity) -> Secret {
    secret::with_identity(empty_secret(), identity)
}

#[test]
fn identity_round_trips_with_or_without_certificate() {
    let identity_with_certificate = identity();
    let read = secret::parse(&secret_of(&identity_with_certificate)).unwrap();
    assert_eq!(read.enrolled, identity_with_certificate.enrolled);
    assert_eq!(
        read.key.serialize_der(),
        identity_with_certificate.key.serialize_der()
    );

    let key_only = Identity {
        enrolled: None,
        ..identity_with_certificate
    };
    let read = secret::parse(&secret_of(&key_only)).unwrap();
    assert_eq!(read.enrolled, None);
    assert_eq!(read.key.serialize_der(), key_only.key.serialize_der());
}

#[test]
fn each_part_that_cannot_be_used_is_named() {
    let error_for = |name: &str, content: Option<&str>| {
        let mut secret = secret_of(&identity());
        let data = secret.data.as_mut().unwrap();
        match content {
            Some(content) => data.insert(name.to_owned(), k8s_openapi::ByteString(content.into())),
            None => data.remove(name),
        };
        chain(&secret::parse(&secret).unwrap_err())
    };
    for (name, content, word) in [
        ("tls.key", None, "no tls.key"),
        ("tls.key", Some("x"), "tls.key"),
        ("tls.crt", Some("-----BEGIN CERTIFICATE-----\n!"), "tls.crt"),
        ("ca.crt", None, "no ca.crt"),
        ("ca.crt", Some("nothing"), "root certificates"),
        ("cluster", None, "no cluster"),
        ("cluster", Some("edge-2"), "instead of cluster edge-2"),
        ("addresses", Some("hub"), "addresses"),
    ] {
        let message = error_for(name, content);
        assert!(message.contains(word), "{name}: {message}");
    }
    let other = new_key().unwrap().serialize_pem();
    let message = error_for("tls.key", Some(&other));
    assert!(message.contains("a different key"), "{message}");
}

/// One Secret and one namespace, with the responses of an API server.
#[derive(Default)]
struct FakeApiServer {
    namespace: bool,
    secret: Option<Secret>,
    version: u64,
    forbidden: bool,
    requests: Vec<String>,
    /// Secret that another replica writes just before the next write.
    conflicting_write: Option<Secret>,
}

type SharedApiServer = Arc<Mutex<FakeApiServer>>;

fn status(code: u16, message: &str) -> Response {
    let body = serde_json::json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "message": message, "reason": if code == 404 { "NotFound" } else { "" }, "code": code,
    });
    (StatusCode::from_u16(code).unwrap(), body.to_string()).into_response()
}

async fn handle(
    Shared(api_server): Shared<SharedApiServer>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> Response {
    let mut api_server = api_server.lock();
    api_server.requests.push(format!("{method} {}", uri.path()));
    if api_server.forbidden {
        return status(403, "user agent may not do that");
    }
    if method != Method::GET
        && let Some(other_identity) = api_server.conflicting_write.take()
    {
        api_server.version += 1;
        api_server.secret = Some(other_identity);
    }
    let version = api_server.version.to_string();
    match (method, uri.path()) {
        (Method::POST, "/api/v1/namespaces") => {
            api_server.namespace = true;
            body.into_response()
        }
        (Method::GET, _) => match api_server.secret.clone() {
            Some(mut secret) => {
                secret.metadata.resource_version = Some(version);
                serde_json::to_string(&secret).unwrap().into_response()
            }
            None => status(404, "not there"),
        },
        (Method::POST, _) if !api_server.namespace => status(404, "namespace not there"),
        (Method::POST, _) if api_server.secret.is_some() => status(409, "exists"),
        (Method::POST | Method::PUT, _) => {
            let mut secret: Secret = serde_json::from_slice(&body).unwrap();
            let request_version = secret.metadata.resource_version.take();
            if request_version.is_some_and(|request_version| request_version != version) {
                return status(409, "changed meanwhile");
            }
            api_server.version += 1;
            secret.metadata.resource_version = Some(api_server.version.to_string());
            api_server.secret = Some(secret.clone());
            serde_json::to_string(&secret).unwrap().into_response()
        }
        _ => status(405, "no such call"),
    }
}

async fn store(cluster: FakeApiServer) -> (Store, SharedApiServer) {
    let api_server: SharedApiServer = Arc::new(Mutex::new(cluster));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new()
        .fallback(handle)
        .with_state(Arc::clone(&api_server));
    tokio::spawn(axum::serve(listener, router).into_future());
    let client = new_client(Config::new(url.parse().unwrap()), "test/1").unwrap();
    (Store::new(client, "krypton-system".to_owned()), api_server)
}

/// A store that contains `identity`.
pub(crate) async fn store_with(identity: &Identity) -> Store {
    let api_server = FakeApiServer {
        secret: Some(secret_of(identity)),
        ..FakeApiServer::default()
    };
    store(api_server).await.0
}

/// A store that contains `identity`. Another replica writes `other_identity` just before the first write.
pub(crate) async fn store_with_conflict(identity: &Identity, other_identity: &Identity) -> Store {
    let api_server = FakeApiServer {
        secret: Some(secret_of(identity)),
        conflicting_write: Some(secret_of(other_identity)),
        ..FakeApiServer::default()
    };
    store(api_server).await.0
}

#[tokio::test]
async fn key_is_stored_first_and_namespace_created() {
    let (store, api_server) = store(FakeApiServer::default()).await;
    let stored = store.load().await.unwrap();
    assert!(api_server.lock().namespace);
    assert_eq!(stored.identity.enrolled, None);
    let reloaded = store.load().await.unwrap();
    assert_eq!(
        reloaded.identity.key.serialize_der(),
        stored.identity.key.serialize_der()
    );

    let key = &stored.identity.key;
    let enrolled = enrolled(&FakeAuthority::new(), key, Validity::Now);
    let identity = Identity {
        enrolled: Some(enrolled.clone()),
        ..stored.identity.clone()
    };
    store.replace(stored, identity).await.unwrap();
    let read = store.read().await.unwrap().unwrap();
    assert_eq!(read.identity.enrolled, Some(enrolled));
}

#[tokio::test]
async fn slower_replica_adopts_identity_stored_first() {
    let other_identity = identity();
    let key_only = Identity {
        enrolled: None,
        ..other_identity.clone()
    };
    let (store, api_server) = store(FakeApiServer {
        namespace: true,
        conflicting_write: Some(secret_of(&key_only)),
        ..FakeApiServer::default()
    })
    .await;
    let stored = store.load().await.unwrap();
    assert_eq!(
        stored.identity.key.serialize_der(),
        other_identity.key.serialize_der()
    );

    api_server.lock().conflicting_write = Some(secret_of(&other_identity));
    let stored = store.replace(stored, identity()).await.unwrap();
    assert_eq!(stored.identity.enrolled, other_identity.enrolled);
}

#[tokio::test]
async fn unreadable_identity_is_reported_and_not_overwritten() {
    let mut broken = secret_of(&identity());
    broken.data.as_mut().unwrap().remove("tls.key");
    let (store, api_server) = store(FakeApiServer {
        namespace: true,
        secret: Some(broken),
        ..FakeApiServer::default()
    })
    .await;
    let error = store.load().await.unwrap_err();
    let message = chain(&error);
    assert!(
        message.contains("krypton-system/krypton-agent-identity"),
        "{message}"
    );
    assert!(message.contains("tls.key"), "{message}");
    assert!(!error.is_retryable());
    let requests = api_server.lock().requests.clone();
    assert!(
        requests.iter().all(|line| line.starts_with("GET")),
        "{requests:?}"
    );
}

#[tokio::test]
async fn missing_permission_error_names_verb_and_resource() {
    let (store, _api_server) = store(FakeApiServer {
        forbidden: true,
        ..FakeApiServer::default()
    })
    .await;
    let error = store.load().await.unwrap_err();
    let message = error.to_string();
    assert_eq!(
        message,
        "reading Secret krypton-system/krypton-agent-identity failed; grant the missing permission"
    );
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn no_key_is_shown() {
    let store = store_with(&identity()).await;
    let stored = store.read().await.unwrap().unwrap();
    let pem = stored.identity.key.to_pem();
    let body: String = pem.lines().filter(|line| !line.contains("--")).collect();
    let der = stored.identity.key.serialize_der();
    // As text, as a list of numbers, and in hexadecimal.
    let numbers = format!("{:?}", pem.as_bytes());
    let numbers = numbers.trim_matches(['[', ']']);
    let ders = format!("{der:?}");
    let ders = ders.trim_matches(['[', ']']);
    let hex: String = der.iter().map(|byte| format!("{byte:02x}")).collect();
    for debug_text in [format!("{stored:?}"), format!("{:?}", stored.identity)] {
        for secret in [&body, numbers, ders, &hex] {
            assert!(!debug_text.contains(secret), "{debug_text}");
        }
    }
}
