use axum::Router;
use axum::http::Uri;
use krypton_runtime::sync::Mutex;
use serde_json::json;

use super::*;
use crate::leader::{LeaderState, LeaderTerm};
use crate::notify::Notifier;

struct Fixture {
    controller: RotationController,
    memory: RotationMemory,
    /// The CA's Secret on home.
    stored: Arc<Mutex<Secret>>,
}

fn secret(version: &str, data: &SecretData) -> Secret {
    let mut secret = Secret {
        data: Some(data.clone()),
        ..Secret::default()
    };
    secret.metadata.resource_version = Some(version.to_owned());
    secret
}

/// A home cluster with this Secret, and without EdgeClusters.
async fn home(stored: Arc<Mutex<Secret>>) -> Client {
    let router = Router::new().fallback(move |uri: Uri| {
        let response = match uri.path().ends_with(CA_SECRET) {
            true => serde_json::to_value(stored.lock().clone()).unwrap(),
            false => json!({"apiVersion": "mesh.openkcm.io/v1alpha1", "kind": "EdgeClusterList",
                "metadata": {}, "items": []}),
        };
        async move { response.to_string() }
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, router).into_future());
    let config = kube::Config::new(url.parse().unwrap());
    Client::try_from(config).unwrap()
}

impl Fixture {
    async fn new(data: &SecretData, leader: Leader, notifier: Notifier) -> Self {
        let stored = Arc::new(Mutex::new(secret("1", data)));
        let authority = Authority::from_data(data, clock::wall()).unwrap();
        let controller = RotationController {
            client: home(Arc::clone(&stored)).await,
            namespace: "hub".to_owned(),
            authority: Arc::new(CurrentAuthority::new(authority)),
            leader,
            events: HomeEvents::discarding().with_notifier(notifier),
        };
        Self {
            controller,
            memory: RotationMemory::default(),
            stored,
        }
    }

    fn store(&self, version: &str, data: &SecretData) {
        *self.stored.lock() = secret(version, data);
    }

    async fn reconcile(&mut self) {
        let reconciling = Box::pin(self.controller.reconcile(&mut self.memory));
        reconciling.await.unwrap();
    }
}

#[tokio::test]
async fn rotation_is_notified_in_second_term() {
    let now = clock::wall();
    let steady = ca::generate_data("a.krypton", now).unwrap();
    let (leader_state, leader) = Leader::with_state(Leader::always_leading().state());
    let (notifier, next_change) = Notifier::recording(leader.clone());
    let mut fixture = Fixture::new(&steady, leader, notifier).await;
    fixture.reconcile().await;
    leader_state.send_replace(Leader::always_leading().state());
    fixture.reconcile().await;
    assert_eq!(next_change(), None);
    fixture.store("2", &ca::announce(&steady, now).unwrap());
    fixture.reconcile().await;
    let expected = "CertificateAuthority: Steady -> Announced";
    assert_eq!(next_change().as_deref(), Some(expected));
}

#[tokio::test]
async fn expiry_of_ca_is_notified() {
    let now = clock::wall();
    let valid = ca::generate_data("a.krypton", now).unwrap();
    let created = now.saturating_sub(ca::AUTHORITY_LIFE * 9 / 10).unwrap();
    let expiring = ca::generate_data("a.krypton", created).unwrap();
    let leader = Leader::always_leading();
    let (notifier, next_change) = Notifier::recording(leader.clone());
    let mut fixture = Fixture::new(&valid, leader, notifier).await;
    fixture.reconcile().await;
    fixture.store("2", &expiring);
    // The first read replaces the CA, and the second one finds its validity.
    fixture.reconcile().await;
    fixture.reconcile().await;
    let expected = "Credential: Current -> CertificateExpiresSoon";
    assert_eq!(next_change().as_deref(), Some(expected));
}

#[tokio::test]
async fn new_leader_reads_ca_before_it_signs() {
    let now = clock::wall();
    let steady = ca::generate_data("a.krypton", now).unwrap();
    let term = |epoch| match Leader::always_leading().state() {
        LeaderState::Leading(term) => LeaderState::Leading(LeaderTerm { epoch, ..term }),
        state => panic!("{state:?}"),
    };
    let (state, leader) = Leader::with_state(term(1));
    let mut fixture = Fixture::new(&steady, leader.clone(), Notifier::default()).await;
    let authority = Arc::clone(&fixture.controller.authority);
    assert!(authority.get_to_sign(&leader).is_ok());
    fixture.reconcile().await;
    state.send_replace(term(2));
    assert!(authority.get_to_sign(&leader).is_err());
    fixture.reconcile().await;
    assert!(authority.get_to_sign(&leader).is_ok());
}
