//! Opens TLS connections to the hub, directly or through the HTTP proxy of the environment.

mod connect;
mod error;
mod no_proxy;
mod proxy;

use std::io;
use std::sync::Arc;

use krypton_types::join_bundle::split_address;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::net::{Network, Stream};

use connect::{HANDSHAKE_TIMEOUT, connect_any, resolve};
pub use error::DialError;
pub use proxy::ProxiedTcp;
pub(crate) use proxy::https_proxy_of;

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
        Some(proxy) => proxy::open(network, address, &proxy).await?,
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
