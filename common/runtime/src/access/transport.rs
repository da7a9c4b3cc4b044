//! Connections to API servers, below the layers of Krypton.

use std::time::Duration;

use http::header::USER_AGENT;
use http::{HeaderValue, Request, Response};
use kube::Config;
use kube::client::{Body, DynBody};
use tower::BoxError;
use tower::util::BoxService;

/// Timeout for connecting to any API server.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to an API server, without the layers of Krypton.
pub type Transport = BoxService<Request<Body>, Response<Box<DynBody>>, BoxError>;

pub(super) fn with_client_defaults(mut config: Config, user_agent: &'static str) -> Config {
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Watches stay open for minutes, so each call has a deadline instead.
    config.read_timeout = None;
    config.default_retry = false;
    config.headers.retain(|(name, _)| *name != USER_AGENT);
    config
        .headers
        .push((USER_AGENT, HeaderValue::from_static(user_agent)));
    config
}
