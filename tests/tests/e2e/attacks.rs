//! Plays the attackers of `docs/explanation/security.md` on real control planes, and checks that each attempt fails.

mod bundle;
mod credential;
mod home_user;
mod kubeconfig;
mod network;
mod repository;
pub(crate) mod workspace;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use std::time::Duration;

use krypton_agent::session::connect::Dialer;
use krypton_tests::{
    Cluster, Hub, HubOptions, TestResult,
    fleet::{CONNECTED, FleetClient},
    kubeconfig::for_server,
};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use rcgen::{CertificateParams, KeyPair, SanType};
use rustls::ClientConfig;
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Status};

/// Maximum duration of one attempt of an attacker.
const ATTEMPT: Duration = Duration::from_secs(30);

/// Starts a hub without a chart, and waits until it is ready.
async fn start_hub(home: &Cluster) -> Hub {
    let flags = ["--self-cluster=false", "--chart-repo=http://127.0.0.1:9"];
    let options = HubOptions::new(home.kubeconfig()).args(flags);
    Hub::start_ready(&options).await.unwrap()
}

/// Waits until the hub has renewed its Lease several times, so it has had time to react to an attempt.
async fn wait_for_hub_renewals(home: &Cluster) {
    let fleet_client = FleetClient::new(home);
    for _ in 0..4 {
        fleet_client.wait_for_hub_renewal().await.unwrap();
    }
}

/// Returns a client of an account that may only edit this namespace.
async fn editor_client(cluster: &Cluster, namespace: &str) -> TestResult<Client> {
    let account = format!("--serviceaccount={namespace}:mallory");
    let kubectl = async |args: String| cluster.kubectl_line(&args).await;
    kubectl(format!("create serviceaccount mallory -n {namespace}")).await?;
    let bind = format!("create rolebinding mallory --clusterrole=edit {account}");
    kubectl(format!("{bind} -n {namespace}")).await?;
    let token = kubectl(format!("create token mallory -n {namespace}")).await?;
    let kubeconfig = Kubeconfig::from_yaml(&cluster.kubeconfig_with(token.trim()))?;
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options);
    Ok(Client::try_from(config.await?)?)
}

fn is_forbidden<T>(result: &kube::Result<T>) -> bool {
    matches!(result, Err(kube::Error::Api(status)) if status.code == 403)
}

/// A server to which no program of Krypton may connect.
struct TrapServer {
    address: std::net::SocketAddr,
    connections: Arc<AtomicUsize>,
    _accepting: AbortOnDropHandle<()>,
}

impl TrapServer {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        let accepting = tokio::spawn(async move {
            while listener.accept().await.is_ok() {
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self {
            address,
            connections,
            _accepting: AbortOnDropHandle::new(accepting),
        }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    fn kubeconfig(&self) -> String {
        for_server(&format!("https://{}", self.address))
    }
}

/// Returns a certificate signing request with these names.
fn signing_request(names: &[String]) -> Vec<u8> {
    let mut params = CertificateParams::default();
    let names = names.iter().map(|name| name.as_str().try_into().unwrap());
    params.subject_alt_names = names.map(SanType::URI).collect();
    let request = params.serialize_request(&KeyPair::generate().unwrap());
    request.unwrap().der().to_vec()
}

fn dialer(addresses: &[String], tls: ClientConfig) -> Dialer {
    Dialer::new(addresses.to_vec(), tls)
}

pub(crate) fn assert_refused<T: std::fmt::Debug>(
    result: Result<T, Status>,
    code: Code,
    expected_text: &str,
) -> String {
    let status = result.unwrap_err();
    assert_eq!(status.code(), code, "{status:?}");
    assert!(status.message().contains(expected_text), "{status:?}");
    status.message().to_owned()
}
