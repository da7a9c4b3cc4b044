//! The ports for health, metrics and debugging, which every program of Krypton serves.

use std::sync::Arc;

use axum::Router;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{
    AdminError, BindAddress, HEALTH_FLAG, METRICS_FLAG, Readiness, bind, bind_debug, run_logged,
    serve_debug, serve_health, serve_metrics,
};
use crate::telemetry::LogLevel;
use crate::watchdog::Watchdog;

/// Bound ports; `None` is off.
#[derive(Debug)]
pub struct AdminPorts {
    health: Option<TcpListener>,
    metrics: Option<TcpListener>,
    debug: Option<TcpListener>,
}

/// Content of the ports.
#[derive(Debug)]
pub struct AdminContent {
    pub readiness: Readiness,
    pub watchdog: Watchdog,
    pub registry: Registry,
    pub level: LogLevel,
    /// Further routes of the debug port.
    pub debug: Router,
}

impl AdminPorts {
    /// Binds the ports, before the program touches a cluster.
    ///
    /// # Errors
    /// If the port for health or metrics is in use. Without a debug port the program runs.
    pub async fn bind(
        health: Option<&BindAddress>,
        metrics: Option<&BindAddress>,
        debug: Option<&BindAddress>,
    ) -> Result<Self, AdminError> {
        Ok(Self {
            metrics: match metrics {
                Some(address) => Some(bind(METRICS_FLAG, address).await?),
                None => None,
            },
            health: match health {
                Some(address) => Some(bind(HEALTH_FLAG, address).await?),
                None => None,
            },
            debug: match debug {
                Some(address) => bind_debug(address).await,
                None => None,
            },
        })
    }

    /// Serves them until `stop`.
    pub fn serve(self, content: AdminContent, tasks: &mut JoinSet<()>, stop: &CancellationToken) {
        if let Some(listener) = self.health {
            let server = serve_health(listener, content.readiness, content.watchdog, stop.clone());
            tasks.spawn(run_logged("health", server));
        }
        if let Some(listener) = self.metrics {
            let server = serve_metrics(listener, Arc::new(content.registry), stop.clone());
            tasks.spawn(run_logged("metrics", server));
        }
        if let Some(listener) = self.debug {
            let server = serve_debug(listener, content.level, content.debug, stop.clone());
            tasks.spawn(run_logged("debug", server));
        }
    }
}
