//! Opens TCP connections to one of the addresses of a name.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;

use crate::net::{Network, Stream};

const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for a TLS handshake, or for the response of a proxy.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay between attempts at two addresses of one name, because often only one IP version is routable.
const ATTEMPT_DELAY: Duration = Duration::from_millis(300);
/// Maximum number of IP addresses to try for one name.
const RESOLVED_MAX: usize = 8;

/// Returns the addresses of a host.
pub(super) async fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let lookup = tokio::net::lookup_host((host, port));
    let addresses = tokio::time::timeout(RESOLVE_TIMEOUT, lookup).await??;
    Ok(addresses.take(RESOLVED_MAX).collect())
}

/// Returns the first connection that succeeds. Each address gets a head start over the next.
pub(super) async fn connect_any(
    network: &dyn Network,
    addresses: &[SocketAddr],
) -> io::Result<Stream> {
    let mut attempts: FuturesUnordered<_> = addresses
        .iter()
        .zip(0_u32..)
        .map(|(address, position)| async move {
            tokio::time::sleep(ATTEMPT_DELAY * position).await;
            tokio::time::timeout(CONNECT_TIMEOUT, network.connect(*address)).await?
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
