//! Opens TLS connections to the hub, directly or through the HTTP proxy of the environment.

mod error;
mod no_proxy;
mod proxy;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use krypton_types::join_bundle::split_address;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::net::{Network, Stream};

pub use error::DialError;
pub use proxy::ProxiedTcp;
pub(crate) use proxy::https_proxy_of;

const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay between attempts at two addresses of one name, because often only one IP version is routable.
const ATTEMPT_DELAY: Duration = Duration::from_millis(300);
/// Maximum number of IP addresses to try for one name.
const RESOLVED_MAX: usize = 8;

/// Opens a connection to the hub at `address` (`HOST:PORT`) with the settings of [`crate::tls::client_config`].
///
/// # Errors
/// Returns an error that names the address, the failed step and a fix.
pub async fn open_tls(
    network: &dyn Network,
    address: &str,
    tls: Arc<ClientConfig>,
) -> Result<TlsStream<Stream>, DialError> {
    let Some((host, port)) = split_address(address) else {
        return Err(DialError::Address(address.to_owned()));
    };
    let tcp = match network.proxy(address) {
        Some(proxy) => proxy::open(network, address, proxy).await?,
        None => {
            let resolve_error = |source| DialError::Resolve {
                address: address.to_owned(),
                source,
            };
            let addresses = resolve(host, port).await.map_err(resolve_error)?;
            let result = connect_any(network, &addresses).await;
            result.map_err(|source| DialError::from_tcp_error(address, source))?
        }
    };
    // Reports and heartbeats are small and must not wait for more data.
    tcp.set_nodelay()
        .map_err(|source| DialError::from_tcp_error(address, source))?;
    // Only for SNI: the hub's identity is in its certificate, independent of its address.
    let host_without_zone = host.split('%').next().unwrap_or(host).to_owned();
    let name = ServerName::try_from(host_without_zone)
        .map_err(|_| DialError::Address(address.to_owned()))?;
    let tls_stream = tokio::time::timeout(
        HANDSHAKE_TIMEOUT,
        TlsConnector::from(tls).connect(name, tcp),
    )
    .await
    .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    .map_err(|source| DialError::from_handshake_error(address, source))?;
    if tls_stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return Err(DialError::NotHttp2(address.to_owned()));
    }
    Ok(tls_stream)
}

async fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let lookup = tokio::time::timeout(RESOLVE_TIMEOUT, tokio::net::lookup_host((host, port)));
    let lookup = lookup
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    Ok(lookup?.take(RESOLVED_MAX).collect())
}

/// Returns the first connection that succeeds. Each address gets a head start over the next.
async fn connect_any(network: &dyn Network, addresses: &[SocketAddr]) -> io::Result<Stream> {
    let mut attempts: FuturesUnordered<_> = addresses
        .iter()
        .zip(0_u32..)
        .map(|(address, position)| async move {
            tokio::time::sleep(ATTEMPT_DELAY * position).await;
            tokio::time::timeout(CONNECT_TIMEOUT, network.connect(*address))
                .await
                .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        })
        .collect();
    let mut problem = io::ErrorKind::NotFound.into();
    while let Some(result) = attempts.next().await {
        match result {
            Ok(stream) => return Ok(stream),
            Err(error) => problem = error,
        }
    }
    Err(problem)
}
