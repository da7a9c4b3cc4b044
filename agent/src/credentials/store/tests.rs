//! Tests of the Secret's content, and of the store against a small HTTP server.

use std::sync::Mutex;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State as Shared;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use krypton_runtime::access::client_named;
use krypton_types::error_chain::chain;
use kube::Config;
use rcgen::CertificateParams;

use super::*;
use crate::credentials::secret;
use crate::fake_hub::{FakeAuthority, Valid};

fn membership() -> Membership {
    Membership {
        cluster: "edge-1".to_owned(),
        addresses: vec!["hub:7443".to_owned(), "[fd00::1]:7443".to_owned()],
        token_name: "0123456789abcdef".to_owned(),
    }
}

pub(crate) fn enrolled(authority: &FakeAuthority, key: &KeyPair, cluster: &str) -> Enrolled {
    enrolled_until(authority, key, cluster, Valid::Now)
}

pub(crate) fn enrolled_until(
    authority: &FakeAuthority,
    key: &KeyPair,
    cluster: &str,
    valid: Valid,
) -> Enrolled {
    let request = CertificateParams::default().serialize_request(key).unwrap();
    let certificates = vec![authority.sign_until(request.der(), cluster, valid).into()];
    let membership = Membership {
        cluster: cluster.to_owned(),
        ..membership()
    };
    Enrolled::check(key, membership, certificates, authority.roots()).unwrap()
}

fn identity() -> Identity {
    let key = new_key().unwrap();
    let enrolled = enrolled(&FakeAuthority::new(), &key, "edge-1");
    Identity {
        key,
        enrolled: Some(enrolled),
    }
}

#[test]
fn identity_round_trips_with_or_without_certificate() {
    let whole = identity();
    let read = secret::read(&secret::written(empty(), &whole)).unwrap();
    assert_eq!(read.enrolled, whole.enrolled);
    assert_eq!(read.key.serialize_der(), whole.key.serialize_der());

    let half = Identity {
        enrolled: None,
        ..whole
    };
    let read = secret::read(&secret::written(empty(), &half)).unwrap();
    assert_eq!(read.enrolled, None);
    assert_eq!(read.key.serialize_der(), half.key.serialize_der());
}

#[test]
fn each_part_that_cannot_be_used_is_named() {
    let broken = |name: &str, content: Option<&str>| {
        let mut secret = secret::written(empty(), &identity());
        let data = secret.data.as_mut().unwrap();
        match content {
            Some(content) => data.insert(name.to_owned(), k8s_openapi::ByteString(content.into())),
            None => data.remove(name),
        };
        chain(&secret::read(&secret).unwrap_err())
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
        let said = broken(name, content);
        assert!(said.contains(word), "{name}: {said}");
    }
    let other = new_key().unwrap().serialize_pem();
    let said = broken("tls.key", Some(&other));
    assert!(said.contains("a different key"), "{said}");
}

/// One Secret and one namespace, with the responses of an API server.
#[derive(Default)]
struct Cluster {
    namespace: bool,
    secret: Option<Secret>,
    version: u64,
    forbidden: bool,
    log: Vec<String>,
    /// Secret that another replica writes just before the next write.
    overtaken_by: Option<Secret>,
}

type World = Arc<Mutex<Cluster>>;

fn status(code: u16, message: &str) -> Response {
    let body = serde_json::json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "message": message, "reason": if code == 404 { "NotFound" } else { "" }, "code": code,
    });
    (StatusCode::from_u16(code).unwrap(), body.to_string()).into_response()
}

async fn answer(Shared(world): Shared<World>, method: Method, uri: Uri, body: Bytes) -> Response {
    let mut world = world.lock().unwrap();
    world.log.push(format!("{method} {}", uri.path()));
    if world.forbidden {
        return status(403, "user agent may not do that");
    }
    if method != Method::GET
        && let Some(theirs) = world.overtaken_by.take()
    {
        world.version += 1;
        world.secret = Some(theirs);
    }
    let version = world.version.to_string();
    match (method, uri.path()) {
        (Method::POST, "/api/v1/namespaces") => {
            world.namespace = true;
            body.into_response()
        }
        (Method::GET, _) => match world.secret.clone() {
            Some(mut secret) => {
                secret.metadata.resource_version = Some(version);
                serde_json::to_string(&secret).unwrap().into_response()
            }
            None => status(404, "not there"),
        },
        (Method::POST, _) if !world.namespace => status(404, "namespace not there"),
        (Method::POST, _) if world.secret.is_some() => status(409, "exists"),
        (Method::POST | Method::PUT, _) => {
            let mut secret: Secret = serde_json::from_slice(&body).unwrap();
            let based_on = secret.metadata.resource_version.take();
            if based_on.is_some_and(|based_on| based_on != version) {
                return status(409, "changed meanwhile");
            }
            world.version += 1;
            secret.metadata.resource_version = Some(world.version.to_string());
            world.secret = Some(secret.clone());
            serde_json::to_string(&secret).unwrap().into_response()
        }
        _ => status(405, "no such call"),
    }
}

async fn store(cluster: Cluster) -> (Store, World) {
    let world: World = Arc::new(Mutex::new(cluster));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new()
        .fallback(answer)
        .with_state(Arc::clone(&world));
    tokio::spawn(axum::serve(listener, router).into_future());
    let client = client_named(Config::new(url.parse().unwrap()), "test/1").unwrap();
    (Store::new(client, "krypton-system".to_owned()), world)
}

/// A store that contains `identity`.
pub(crate) async fn store_with(identity: &Identity) -> Store {
    let (store, _world) = store(Cluster {
        namespace: true,
        secret: Some(secret::written(empty(), identity)),
        ..Cluster::default()
    })
    .await;
    store
}

/// A store that contains `identity`. Another replica writes `theirs` just before the first write.
pub(crate) async fn store_overtaken_by(identity: &Identity, theirs: &Identity) -> Store {
    let (store, _world) = store(Cluster {
        namespace: true,
        secret: Some(secret::written(empty(), identity)),
        overtaken_by: Some(secret::written(empty(), theirs)),
        ..Cluster::default()
    })
    .await;
    store
}

#[tokio::test]
async fn key_is_stored_first_and_namespace_created() {
    let (store, world) = store(Cluster::default()).await;
    let kept = store.load().await.unwrap();
    assert!(world.lock().unwrap().namespace);
    assert_eq!(kept.identity.enrolled, None);
    let again = store.load().await.unwrap();
    assert_eq!(
        again.identity.key.serialize_der(),
        kept.identity.key.serialize_der()
    );

    let enrolled = enrolled(&FakeAuthority::new(), &kept.identity.key, "edge-1");
    let identity = Identity {
        enrolled: Some(enrolled.clone()),
        ..kept.identity.clone()
    };
    store.keep(kept, identity).await.unwrap();
    let read = store.read().await.unwrap().unwrap();
    assert_eq!(read.identity.enrolled, Some(enrolled));
}

#[tokio::test]
async fn slower_replica_adopts_identity_stored_first() {
    let theirs = identity();
    let half = Identity {
        enrolled: None,
        ..theirs.clone()
    };
    let (store, world) = store(Cluster {
        namespace: true,
        overtaken_by: Some(secret::written(empty(), &half)),
        ..Cluster::default()
    })
    .await;
    let kept = store.load().await.unwrap();
    assert_eq!(
        kept.identity.key.serialize_der(),
        theirs.key.serialize_der()
    );

    world.lock().unwrap().overtaken_by = Some(secret::written(empty(), &theirs));
    let kept = store.keep(kept, identity()).await.unwrap();
    assert_eq!(kept.identity.enrolled, theirs.enrolled);
}

#[tokio::test]
async fn unreadable_identity_is_reported_and_not_overwritten() {
    let mut broken = secret::written(empty(), &identity());
    broken.data.as_mut().unwrap().remove("tls.key");
    let (store, world) = store(Cluster {
        namespace: true,
        secret: Some(broken),
        ..Cluster::default()
    })
    .await;
    let error = store.load().await.unwrap_err();
    let said = chain(&error);
    assert!(
        said.contains("krypton-system/krypton-agent-identity"),
        "{said}"
    );
    assert!(said.contains("tls.key"), "{said}");
    assert!(!error.may_pass());
    let log = world.lock().unwrap().log.clone();
    assert!(log.iter().all(|line| line.starts_with("GET")), "{log:?}");
}

#[tokio::test]
async fn missing_permission_error_names_verb_and_resource() {
    let (store, _world) = store(Cluster {
        forbidden: true,
        ..Cluster::default()
    })
    .await;
    let error = store.load().await.unwrap_err();
    let message = error.to_string();
    assert_eq!(
        message,
        "reading Secret krypton-system/krypton-agent-identity failed; grant the missing permission"
    );
    assert!(!error.may_pass());
}

#[tokio::test]
async fn no_key_is_shown() {
    let authority = FakeAuthority::new();
    let key = new_key().unwrap();
    let identity = Identity {
        enrolled: Some(enrolled(&authority, &key, "edge-1")),
        key,
    };
    let kept = store_with(&identity).await.read().await.unwrap().unwrap();
    let pem = kept.identity.key.to_pem();
    let body: String = pem.lines().filter(|line| !line.contains("--")).collect();
    let der = kept.identity.key.serialize_der();
    // As text, as a list of numbers, and in hexadecimal.
    let numbers = format!("{:?}", pem.as_bytes());
    let numbers = numbers.trim_matches(['[', ']']);
    let ders = format!("{der:?}");
    let ders = ders.trim_matches(['[', ']']);
    let hex: String = der.iter().map(|byte| format!("{byte:02x}")).collect();
    for shown in [format!("{kept:?}"), format!("{:?}", kept.identity)] {
        for secret in [&body, numbers, ders, &hex] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}
