//! Access to a cluster: its configuration, Krypton's API client, and a kubeconfig for Helm.

mod helm_kubeconfig;
mod limit;
pub mod local;
mod service_account;
mod swap;
pub(crate) mod transport;
mod watch_requests;

use std::sync::Arc;

use http::{Response, StatusCode};
use krypton_types::error_chain::chain;
use kube::client::ClientBuilder;
use kube::{Client, Config};
use tokio::sync::Notify;
use tower::util::MapResponseLayer;

pub use helm_kubeconfig::pem;
pub use helm_kubeconfig::{RenderError, kubeconfig_yaml, write_kubeconfig};
use limit::LimitLayer;
pub use limit::{CutOffCallback, CutOffError, ExceededLimit, ResponseLimits};
pub use local::{
    ClusterConfig, ConfigError, InCluster, LocalError, LocalSource, environment_proxy,
    from_kubeconfig, local, read_kubeconfig, redacted, service_account_namespace,
};
pub use service_account::{ServiceAccount, impersonating_config};
pub use service_account::{client_as, kubeconfig_as};
pub use swap::SwappableClient;
use transport::with_client_defaults;
pub use transport::{CONNECT_TIMEOUT, Transport};
use watch_requests::{WatchLayer, WatchService};

/// Creates the client of a cluster, home or member. `user_agent` is its name in the API server's log
/// (`name/version`, visible ASCII). The client has a connect timeout and a rate limit for watches, but no
/// automatic retries. The default of kube waits as long as a server's `Retry-After` requires, up to 15 times.
/// Instead, every caller has a capped back-off.
///
/// Must be called inside a tokio runtime.
pub fn new_client(config: Config, user_agent: &'static str) -> Result<Client, kube::Error> {
    Ok(transport(config, user_agent)?.build())
}

/// Like [`new_client`]. Notifies `unauthorized` whenever the API server rejects the credentials (401).
pub fn client_notifying_unauthorized(
    config: Config,
    user_agent: &'static str,
    unauthorized: Arc<Notify>,
) -> Result<Client, kube::Error> {
    let builder = transport(config, user_agent)?;
    let notify = move |response| notify_if_unauthorized(response, &unauthorized);
    Ok(builder.with_layer(&MapResponseLayer::new(notify)).build())
}

/// Like [`client_notifying_unauthorized`], for an untrusted API server: limits its responses, and calls `report` for each
/// response that exceeds a limit.
pub fn client_with_limits(
    config: Config,
    user_agent: &'static str,
    unauthorized: Arc<Notify>,
    limits: ResponseLimits,
    report: CutOffCallback,
) -> Result<Client, kube::Error> {
    let builder = transport(config, user_agent)?;
    let builder = builder.with_layer(&LimitLayer::new(limits, report));
    let notify = move |response| notify_if_unauthorized(response, &unauthorized);
    Ok(builder.with_layer(&MapResponseLayer::new(notify)).build())
}

/// Prepares the connection to an API server, which the first request opens.
fn transport(
    config: Config,
    user_agent: &'static str,
) -> Result<ClientBuilder<WatchService<Transport>>, kube::Error> {
    let config = with_client_defaults(config, user_agent);
    let layer = WatchLayer::default();
    #[cfg(feature = "simulation")]
    if let Some(world) = crate::world::current() {
        return Ok(world.transport(config)?.with_layer(&layer));
    }
    Ok(ClientBuilder::try_from(config)?.with_layer(&layer))
}

fn notify_if_unauthorized<B>(response: Response<B>, unauthorized: &Notify) -> Response<B> {
    if response.status() == StatusCode::UNAUTHORIZED {
        unauthorized.notify_one();
    }
    response
}

/// Returns the API server's error message, or the error with its causes. kube's own text repeats the whole response.
pub fn api_error_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        other => chain(other),
    }
}
