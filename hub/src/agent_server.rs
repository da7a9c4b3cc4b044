//! The hub's endpoint for agents: CA, listener, enrollment and sessions.

pub(crate) mod anonymous_connections;
mod byte_limit;
mod connection_limiter;
mod enrollment_audit;
mod enrollment_limit;
mod enrollment_result;
pub mod enrollment_service;
pub mod fleet_service;
pub mod join_info;
pub mod join_token;
pub mod listener;
pub mod metrics;
pub mod session;
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
use krypton_runtime::periodic::{NextRun, Periodic, Schedule};
use krypton_runtime::retry::retry_until_ready;
use krypton_types::error_chain::chain;
use kube::Client;
use thiserror::Error;

use self::enrollment_service::{EnrollmentAudit, EnrollmentService};
use self::fleet_service::FleetService;
use self::listener::ListenerError;
use self::session::Sessions;
use crate::ca::rotation_controller::{self, RotationController};
use crate::ca::{Authority, AuthorityError, CurrentAuthority};
use crate::leader::Leader;
use crate::observe::member_metrics::FleetView;

/// When expired join tokens are deleted.
const TOKEN_CLEANUP: Schedule = Schedule {
    every: Duration::from_secs(15 * 60),
    jitter: 0.0,
    retry_max: Duration::from_secs(30),
};

/// Inputs of the agents' endpoint.
pub(crate) struct AgentServer {
    pub client: Client,
    /// Namespace of the hub on the home cluster, with the CA and the join tokens.
    pub namespace: String,
    pub listener: Listener,
    /// Addresses for join bundles, as `host:port`.
    pub advertise: Vec<String>,
    pub sessions: Arc<Sessions>,
    pub charts: Arc<ChartCache>,
    /// Receives the CA.
    pub fleet_view: Arc<FleetView>,
    /// Held until agents can connect.
    pub readiness_guard: ReadinessGuard,
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

/// Serves agents until the sessions stop.
pub(crate) async fn run(server: AgentServer) {
    let AgentServer {
        client,
        namespace,
        listener,
        advertise,
        sessions,
        charts,
        fleet_view,
        readiness_guard,
    } = server;
    let (leader, stop) = (sessions.leader.clone(), sessions.stop.clone());
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
    drop(readiness_guard);
    if advertise.is_empty() {
        tracing::warn!("--advertise is not set: 'kubectl krypton join' needs --address");
    }
    let trust_domain = authority.trust_domain().to_owned();
    let authority = Arc::new(CurrentAuthority::new(authority));
    fleet_view.set_authority(Arc::clone(&authority));
    let publishing = join_info::run(
        client.clone(),
        namespace.clone(),
        advertise,
        authority.subscribe(),
        leader.clone(),
        stop.clone(),
    );
    let join_info = async {
        Box::pin(publishing).await;
        std::future::pending().await
    };
    let rotation = RotationController {
        client: client.clone(),
        namespace: namespace.clone(),
        authority: Arc::clone(&authority),
        leader: leader.clone(),
        events: sessions.events.clone(),
    };
    let rotating = async {
        rotation_controller::run(rotation, stop.clone()).await;
        std::future::pending().await
    };
    let audit = EnrollmentAudit {
        members: Arc::clone(&sessions.members),
        events: sessions.events.clone(),
        metrics: Arc::clone(&sessions.metrics),
    };
    let metrics = Arc::clone(&sessions.metrics);
    let listener_metrics = metrics.port.clone();
    let home = Some(client.clone());
    let fleet = FleetService::new(sessions, charts, Arc::clone(&authority), home).into_server();
    let enrollment = Arc::new(EnrollmentService::new(
        client.clone(),
        namespace.clone(),
        Arc::clone(&authority),
        audit,
        leader.clone(),
    ));
    let routes = tonic::service::Routes::new(fleet).add_service(enrollment.service());
    let renewing_credential = async {
        let (authority, tls) = (Arc::clone(&authority), Arc::clone(&tls));
        listener::renew_credential(authority, tls, metrics, stop.clone()).await;
        // Sessions send their last message before their connections end, so only the listener may end this
        // function.
        std::future::pending().await
    };
    tokio::select! {
        () = join_info => {}
        () = rotating => {}
        () = delete_expired_tokens(&client, &namespace, leader.clone()) => {}
        () = renewing_credential => {}
        served = listener::serve(listener, Arc::clone(&tls), trust_domain, routes, listener_metrics, stop.clone()) => {
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
    let authority = Authority::load_or_create(client.clone(), namespace, &trust_domain)
        .await
        .map_err(PrepareError::Authority)?;
    let tls = listener::server_config(&authority, clock::wall()).map_err(PrepareError::Tls)?;
    Ok((authority, tls))
}

/// Deletes expired join tokens periodically while this hub leads.
async fn delete_expired_tokens(client: &Client, namespace: &str, mut leader: Leader) {
    let mut pace = Periodic::new("deleting expired join tokens", TOKEN_CLEANUP);
    loop {
        if !leader.may_write(BootTime::now()) {
            if !leader.changed().await {
                return std::future::pending().await;
            }
            continue;
        }
        let deleting = join_token::delete_expired(client.clone(), namespace, clock::wall());
        let result = leader.tracked(deleting).await.map(|deleted| {
            if deleted > 0 {
                tracing::info!(swept = deleted, "deleted expired join tokens");
            }
            NextRun::AsScheduled
        });
        pace.pause_after(result).await;
    }
}
