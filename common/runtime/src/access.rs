//! Access to a cluster: where its configuration is found, the client that we use, and the same as a
//! kubeconfig for helm.

mod helm_kubeconfig;
mod limit;
pub mod local;
mod service_account;
mod swap;
mod watch_rate;

use std::sync::Arc;
use std::time::Duration;

use http::header::USER_AGENT;
use http::{HeaderValue, StatusCode};
use kube::client::ClientBuilder;
use kube::{Client, Config};
use tokio::sync::Notify;
use tower::util::MapResponseLayer;

pub use helm_kubeconfig::pem;
pub use helm_kubeconfig::{RenderError, kubeconfig_yaml, write_kubeconfig};
use limit::LimitLayer;
pub use limit::{CutOff, Excess, Limits, Report};
pub use local::{
    ConfigError, Found, InCluster, LocalError, LocalSource, from_kubeconfig, local,
    read_kubeconfig, service_account_namespace, without_content,
};
pub use service_account::{ServiceAccount, acting_as};
pub use service_account::{client_as, kubeconfig_as};
pub use swap::Swap;
use watch_rate::PaceLayer;

/// Longest wait for a connection to any apiserver.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The client of a cluster, home or member: a name in the apiserver's log (`name/version`, visible
/// ASCII), a deadline to connect, a pace for watches, and no retries of its own. kube's default would wait as long as a
/// server's `Retry-After` says, up to 15 times; every caller here has a capped back-off, which is the
/// only one that waits.
///
/// Must be called inside a tokio runtime.
pub fn client_named(config: Config, user_agent: &'static str) -> Result<Client, kube::Error> {
    let builder = ClientBuilder::try_from(bounded(config, user_agent))?;
    Ok(builder.with_layer(&PaceLayer::default()).build())
}

/// As [`client_named`]. Whenever the apiserver answers that it does not know us (401), `refused` is told.
pub fn client_watched(
    config: Config,
    user_agent: &'static str,
    refused: Arc<Notify>,
) -> Result<Client, kube::Error> {
    let builder = ClientBuilder::try_from(bounded(config, user_agent))?;
    let builder = builder.with_layer(&PaceLayer::default());
    let layer = MapResponseLayer::new(move |response| told_of_refusal(response, &refused));
    Ok(builder.with_layer(&layer).build())
}

/// As [`client_watched`], for an API server that is not trusted: its answers are limited, and each that
/// exceeds a limit is told to `report`.
pub fn client_limited(
    config: Config,
    user_agent: &'static str,
    refused: Arc<Notify>,
    limits: Limits,
    report: Report,
) -> Result<Client, kube::Error> {
    let builder = ClientBuilder::try_from(bounded(config, user_agent))?;
    let builder = builder.with_layer(&LimitLayer::new(limits, report));
    let builder = builder.with_layer(&PaceLayer::default());
    let layer = MapResponseLayer::new(move |response| told_of_refusal(response, &refused));
    Ok(builder.with_layer(&layer).build())
}

fn told_of_refusal<B>(response: http::Response<B>, refused: &Notify) -> http::Response<B> {
    if response.status() == StatusCode::UNAUTHORIZED {
        refused.notify_one();
    }
    response
}

fn bounded(mut config: Config, user_agent: &'static str) -> Config {
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Watches stay open for minutes: each call has its own deadline instead.
    config.read_timeout = None;
    config.default_retry = false;
    config.headers.retain(|(name, _)| *name != USER_AGENT);
    config
        .headers
        .push((USER_AGENT, HeaderValue::from_static(user_agent)));
    config
}

/// What went wrong in a call, as an apiserver told it: kube's own text repeats the answer in full.
pub fn reason_of(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        other => other.to_string(),
    }
}
