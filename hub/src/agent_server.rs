//! The hub's endpoint for agents: CA, listener, enrollment and sessions.

mod byte_limit;
mod connection_limiter;
mod enrollment_audit;
mod enrollment_limit;
pub mod enrollment_service;
pub mod fleet_service;
pub mod join_info;
pub mod join_token;
pub mod listener;
pub mod session;
pub(crate) mod strangers;
mod tls_connection;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use krypton_helm::chart::ChartCache;
use krypton_runtime::admin::ReadinessGuard;
use krypton_runtime::call::{ApiError, CALL};
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::cluster;
use krypton_runtime::net::Listener;
use krypton_runtime::newest::NewestSeen as _;
use krypton_runtime::periodic::{Next, Periodic, Schedule};
use krypton_runtime::retry::retry_until_ready;
use krypton_types::error_chain::chain;
use krypton_types::join_info::JoinInfo;
use kube::Client;
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::enrollment_service::{Audit, EnrollmentService};
use self::fleet_service::FleetService;
use self::listener::ListenerError;
use self::session::Sessions;
use crate::ca::rotation_controller::{self, Rotation};
use crate::ca::{Authority, AuthorityError, Live};
use crate::leader::Leader;
use crate::observe::member_metrics::FleetView;

/// When expired join tokens are deleted.
const SWEEP: Schedule = Schedule {
    every: Duration::from_secs(15 * 60),
    jitter: 0.0,
    retry_max: Duration::from_secs(30),
};

/// Inputs of the agents' endpoint.
pub struct Gateway {
    pub client: Client,
    /// Namespace of the hub on the home cluster, with the CA and the join tokens.
    pub namespace: String,
    pub listener: Listener,
    /// Addresses for join bundles, as `host:port`.
    pub advertise: Vec<String>,
    pub sessions: Arc<Sessions>,
    pub charts: Arc<ChartCache>,
    /// Leadership of this hub.
    pub lead: Leader,
    /// Receives the CA.
    pub view: Arc<FleetView>,
    /// Held until agents can connect.
    pub opening: ReadinessGuard,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").finish_non_exhaustive()
    }
}

#[derive(Debug, Error)]
enum PrepareError {
    #[error("unknown trust domain; failed to read the UID of namespace kube-system")]
    TrustDomain(#[source] ApiError),
    #[error("the hub's CA is not available; agents cannot connect")]
    Authority(#[source] AuthorityError),
    #[error("the hub's own certificate cannot be used")]
    Tls(#[source] ListenerError),
}

/// Serves agents until `stop`.
pub async fn run(gateway: Gateway, stop: CancellationToken) {
    let Gateway {
        client,
        namespace,
        listener,
        advertise,
        sessions,
        charts,
        lead,
        view,
        opening,
    } = gateway;
    let preparing = retry_until_ready(
        "the port for agents",
        &stop,
        |_| true,
        || prepare(&client, &namespace),
    );
    let Ok(Some((authority, tls))) = preparing.await else {
        return;
    };
    let tls = Arc::new(ArcSwap::from_pointee(tls));
    tracing::info!(address = ?listener.local_addr().ok(), trust_domain = authority.trust_domain(), ?advertise,
        "listening for agents");
    drop(opening);
    if advertise.is_empty() {
        tracing::warn!("--advertise is not set: 'kubectl krypton join' needs --address");
    }
    let trust_domain = authority.trust_domain().to_owned();
    let info = JoinInfo {
        ca_pem: authority.ca_pem(),
        addresses: advertise,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let (info_tx, info) = watch::channel(info);
    let authority = Arc::new(Live::new(authority));
    view.serves_by(Arc::clone(&authority));
    let mut changes = authority.subscribe();
    let published = async {
        let keeping = join_info::keep(
            client.clone(),
            namespace.clone(),
            info,
            lead.clone(),
            stop.clone(),
        );
        let following = async {
            while changes.changed().await.is_ok() {
                let ca_pem = changes.see().ca_pem();
                info_tx.send_modify(|info| info.ca_pem = ca_pem);
            }
        };
        tokio::join!(keeping, following);
    };
    let rotation = Rotation {
        client: client.clone(),
        namespace: namespace.clone(),
        live: Arc::clone(&authority),
        lead: lead.clone(),
        notices: sessions.notices.clone(),
    };
    let rotating = async {
        rotation_controller::keep(rotation, stop.clone()).await;
        std::future::pending().await
    };
    let audit = Audit {
        members: Arc::clone(&sessions.members),
        notices: sessions.notices.clone(),
        metrics: Arc::clone(&sessions.metrics),
    };
    let metrics = Arc::clone(&sessions.metrics);
    let door = metrics.door.clone();
    let fleet = FleetService::new(sessions, charts, Arc::clone(&authority))
        .recording(client.clone())
        .into_server();
    let enrollment = Arc::new(EnrollmentService::new(
        client.clone(),
        namespace.clone(),
        Arc::clone(&authority),
        audit,
        lead.clone(),
    ));
    let routes = tonic::service::Routes::new(fleet).add_service(enrollment.service());
    let credential = async {
        let (authority, tls) = (Arc::clone(&authority), Arc::clone(&tls));
        listener::keep_credential(authority, tls, metrics, stop.clone()).await;
        // Sessions send their last message before their connections end, so only the listener may end this
        // function.
        std::future::pending().await
    };
    tokio::select! {
        () = published => {}
        () = rotating => {}
        () = sweep(&client, &namespace, lead.clone()) => {}
        () = credential => {}
        served = listener::serve(listener, Arc::clone(&tls), trust_domain, routes, door, stop.clone()) => {
            if let Err(error) = served {
                tracing::error!(error = %chain(&error), "serving agents ended");
            }
        }
    }
}

async fn prepare(
    client: &Client,
    namespace: &str,
) -> Result<(Authority, rustls::ServerConfig), PrepareError> {
    let uid = cluster::uid(client, CALL).await;
    let uid = uid.map_err(PrepareError::TrustDomain)?;
    let trust_domain = format!("{uid}.krypton");
    let authority = Authority::load_or_make(client.clone(), namespace, &trust_domain)
        .await
        .map_err(PrepareError::Authority)?;
    let tls = listener::server_config(&authority, clock::wall()).map_err(PrepareError::Tls)?;
    Ok((authority, tls))
}

/// Deletes expired join tokens periodically while this hub leads.
async fn sweep(client: &Client, namespace: &str, mut lead: Leader) {
    let mut pace = Periodic::new("deleting expired join tokens", SWEEP);
    loop {
        if !lead.writes(BootTime::now()) {
            if !lead.changed().await {
                return std::future::pending().await;
            }
            continue;
        }
        let sweeping = join_token::sweep(client.clone(), namespace, clock::wall());
        let done = lead.tracked(sweeping).await.map(|swept| {
            if swept > 0 {
                tracing::info!(swept, "deleted expired join tokens");
            }
            Next::AsScheduled
        });
        pace.rest(done).await;
    }
}
