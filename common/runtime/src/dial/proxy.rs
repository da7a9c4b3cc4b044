//! Connections to the hub through the HTTP proxy of the environment.

use std::future::ready;
use std::io;
use std::net::{IpAddr, SocketAddr};

use futures::future::BoxFuture;
use http::Uri;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use tower::{Service as _, service_fn};

use super::connect::{HANDSHAKE_TIMEOUT, connect_any, resolve};
use super::error::DialError;
use super::no_proxy::ExemptHosts;
use crate::net::{Network, Stream, Tcp};

/// The network of the machine, with the proxies of HTTPS_PROXY, ALL_PROXY and NO_PROXY.
#[derive(Debug)]
pub struct ProxiedTcp {
    proxies: Matcher,
    exempt: ExemptHosts,
}

impl ProxiedTcp {
    /// A variable in upper case overrides the one in lower case, unless it is empty.
    pub fn new(env: &dyn Fn(&str) -> Option<String>) -> Self {
        let (all, https) = (variable(env, "ALL_PROXY"), variable(env, "HTTPS_PROXY"));
        let is_configured = [&all, &https].iter().any(|value| !value.is_empty());
        let proxies = Matcher::builder().all(all).https(https).build();
        let hub = Uri::from_static("https://hub.example.org");
        if is_configured && proxies.intercept(&hub).is_none() {
            tracing::warn!("HTTPS_PROXY is not a valid URL; connecting to the hub without a proxy");
        }
        Self {
            proxies,
            exempt: exempt_hosts(env),
        }
    }
}

impl Network for ProxiedTcp {
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<Stream>> {
        Tcp.connect(address)
    }

    fn proxy(&self, address: &str) -> Option<Intercept> {
        let hub = uri(address).ok()?;
        if self.exempt.contains(&hub) {
            return None;
        }
        self.proxies.intercept(&hub)
    }
}

fn variable(env: &dyn Fn(&str) -> Option<String>, name: &str) -> String {
    let value = |name: &str| env(name).filter(|value| !value.is_empty());
    let value = value(name).or_else(|| value(&name.to_lowercase()));
    value.unwrap_or_default()
}

fn exempt_hosts(env: &dyn Fn(&str) -> Option<String>) -> ExemptHosts {
    ExemptHosts::parse(&variable(env, "NO_PROXY"))
}

/// Returns the value of HTTPS_PROXY if kubectl uses it for the API server at this URL. For loopback addresses, kubectl
/// uses no proxy.
pub(crate) fn https_proxy_of(server: &Uri, env: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let host = server.host()?.trim_matches(['[', ']']);
    let is_loopback = host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let is_local = is_loopback || host == "localhost";
    let is_https = server.scheme_str() == Some("https");
    if is_local || !is_https || exempt_hosts(env).contains(server) {
        return None;
    }
    Some(variable(env, "HTTPS_PROXY")).filter(|value| !value.is_empty())
}

fn uri(address: &str) -> Result<Uri, http::Error> {
    let uri = Uri::builder().scheme("https").authority(address);
    uri.path_and_query("/").build()
}

/// Opens a connection to the hub at `address` through the proxy.
pub(super) async fn open(
    network: &dyn Network,
    address: &str,
    proxy: &Intercept,
) -> Result<Stream, DialError> {
    let host = proxy.uri().host().unwrap_or_default();
    let port = proxy.uri().port_u16().unwrap_or(80);
    let proxy_error = |source: Box<dyn std::error::Error + Send + Sync>| DialError::Proxy {
        address: address.to_owned(),
        proxy: format!("{host}:{port}"),
        source,
    };
    if proxy.uri().scheme_str() != Some("http") {
        return Err(proxy_error(
            "only proxies with http:// are supported".into(),
        ));
    }
    let connecting = async {
        let addresses = resolve(host.trim_matches(['[', ']']), port).await?;
        let stream = connect_any(network, &addresses).await?;
        tunnel(stream, proxy, address).await
    };
    connecting.await.map_err(proxy_error)
}

/// Asks the proxy at the other end of the stream for a connection.
async fn tunnel(
    stream: Stream,
    proxy: &Intercept,
    address: &str,
) -> Result<Stream, Box<dyn std::error::Error + Send + Sync>> {
    let mut stream = Some(TokioIo::new(stream));
    let connector = service_fn(move |_: Uri| {
        let stream = stream.take();
        ready(stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)))
    });
    let mut tunnel = Tunnel::new(proxy.uri().clone(), connector);
    if let Some(authorization) = proxy.basic_auth() {
        tunnel = tunnel.with_auth(authorization.clone());
    }
    let result = tokio::time::timeout(HANDSHAKE_TIMEOUT, tunnel.call(uri(address)?)).await?;
    Ok(result?.into_inner())
}
