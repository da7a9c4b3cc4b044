//! HTTP servers of a process for metrics, health and debug, and its readiness.

mod bind_address;
mod bounded_listener;
mod debug;
mod ports;

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use krypton_types::error_chain::chain;
use parking_lot::Mutex;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use bounded_listener::{BoundedListener, ConnectionLimits};

use crate::watchdog::Watchdog;

pub use bind_address::{BindAddress, InvalidBindAddress};
pub use debug::{
    DEBUG_FLAG, DEFAULT_DEBUG_ADDRESS, bind_debug, is_loopback, json, parse_filter_duration,
    serve_debug,
};
pub use ports::{AdminContent, AdminPorts};

/// Flag of the metrics server, for messages.
pub const METRICS_FLAG: &str = "--metrics-bind-address";
/// Flag of the health server, for messages.
pub const HEALTH_FLAG: &str = "--health-probe-bind-address";

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Why a server does not run.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    #[error(
        "{flag}: {address} is in use by another process; choose another port, or 0 to switch it off"
    )]
    InUse {
        flag: &'static str,
        address: BindAddress,
    },
    #[error("{flag}: listening on {address} failed; choose another address, or 0 to switch it off")]
    Bind {
        flag: &'static str,
        address: BindAddress,
        #[source]
        source: io::Error,
    },
    #[error("{flag}: serving failed")]
    Serve {
        flag: &'static str,
        #[source]
        source: io::Error,
    },
}

/// Listens on `address`. Errors name `flag`. Call this at startup, so a port conflict ends the process before
/// it changes any cluster.
pub async fn bind(flag: &'static str, address: &BindAddress) -> Result<TcpListener, AdminError> {
    let result = match &address.host {
        Some(host) => TcpListener::bind((host.as_str(), address.port)).await,
        None => bind_all(address.port).await,
    };
    result.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => AdminError::InUse {
            flag,
            address: address.clone(),
        },
        _ => AdminError::Bind {
            flag,
            address: address.clone(),
            source,
        },
    })
}

/// Listens on the IPv6 wildcard, which also accepts IPv4, or on the IPv4 wildcard without IPv6.
async fn bind_all(port: u16) -> io::Result<TcpListener> {
    match TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))).await {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).await
        }
        result => result,
    }
}

/// Serves `/metrics` in the OpenMetrics text format until `stop`.
pub async fn serve_metrics(
    listener: TcpListener,
    registry: Arc<Registry>,
    stop: CancellationToken,
) -> Result<(), AdminError> {
    let metrics = move || async move {
        let mut text = String::new();
        match encode(&mut text, &registry) {
            Ok(()) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    };
    let listener = BoundedListener::new(listener, ConnectionLimits::READERS);
    let router = Router::new().route("/metrics", get(metrics));
    serve(METRICS_FLAG, listener, router, stop).await
}

/// Serves `/healthz` and `/readyz` until `stop`. `/healthz` fails if work hangs so long that a restart helps.
/// An unreachable cluster never makes it fail.
pub async fn serve_health(
    listener: TcpListener,
    readiness: Readiness,
    watchdog: Watchdog,
    stop: CancellationToken,
) -> Result<(), AdminError> {
    let healthy = move || async move {
        match watchdog.problem() {
            None => (StatusCode::OK, "ok\n".to_owned()),
            Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")),
        }
    };
    let ready = move || async move {
        let waiting = readiness.waiting_for();
        if waiting.is_empty() {
            let notes = readiness.notes();
            let notes: String = notes.iter().map(|note| format!("but {note}\n")).collect();
            (StatusCode::OK, format!("ok\n{notes}"))
        } else {
            (
                StatusCode::SERVICE_UNAVAILABLE,
                format!("waiting for: {}\n", waiting.join(", ")),
            )
        }
    };
    let router = Router::new()
        .route("/healthz", get(healthy))
        .route("/readyz", get(ready));
    // Allow one request per connection, because idle connections would use up the places for probes.
    let router = router.layer(map_response(async |mut response: Response| {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
        response
    }));
    let listener = BoundedListener::new(listener, ConnectionLimits::PROBES);
    serve(HEALTH_FLAG, listener, router, stop).await
}

async fn serve(
    flag: &'static str,
    listener: BoundedListener,
    router: Router,
    stop: CancellationToken,
) -> Result<(), AdminError> {
    axum::serve(listener, router)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
        .map_err(|source| AdminError::Serve { flag, source })
}

/// Runs a server and logs an error if it fails. The process continues without it.
pub async fn run_logged(endpoint: &str, serve: impl Future<Output = Result<(), AdminError>>) {
    if let Err(error) = serve.await {
        tracing::error!(error = %chain(&error), endpoint, "endpoint stopped");
    }
}

/// Readiness of the process: it is ready when no guard is left. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    /// Number of held guards by name.
    held: Arc<Mutex<BTreeMap<String, usize>>>,
    notes: Arc<Mutex<BTreeMap<&'static str, String>>>,
}

impl Readiness {
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the process not ready until the guard is dropped. `name` describes the reason.
    pub fn guard(&self, name: impl Into<String>) -> ReadinessGuard {
        let name = name.into();
        *self.held.lock().entry(name.clone()).or_default() += 1;
        ReadinessGuard {
            name,
            readiness: self.clone(),
        }
    }

    /// Sets a note that `/readyz` reports without affecting readiness. `None` removes it.
    pub fn note(&self, key: &'static str, text: Option<String>) {
        let mut notes = self.notes.lock();
        match text {
            Some(text) => notes.insert(key, text),
            None => notes.remove(key),
        };
    }

    fn notes(&self) -> Vec<String> {
        let notes = self.notes.lock();
        notes.values().cloned().collect()
    }

    pub fn is_ready(&self) -> bool {
        self.held.lock().is_empty()
    }

    /// Returns the names of the remaining guards, sorted.
    pub fn waiting_for(&self) -> Vec<String> {
        self.held.lock().keys().cloned().collect()
    }
}

/// Prevents readiness until it is dropped.
#[derive(Debug)]
#[must_use = "dropping the guard completes it"]
pub struct ReadinessGuard {
    name: String,
    readiness: Readiness,
}

impl Drop for ReadinessGuard {
    fn drop(&mut self) {
        let mut held = self.readiness.held.lock();
        if let Some(count) = held.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.name);
                tracing::debug!(task = self.name, left = held.len(), "ready");
            }
        }
    }
}

#[cfg(test)]
mod tests;
