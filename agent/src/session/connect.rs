//! Reaching the hub: from its addresses to a channel over mutual TLS, and what stands in the way.

mod channel;
mod error;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use krypton_proto::v1::enrollment_client::EnrollmentClient;
use krypton_proto::v1::fleet_client::FleetClient;
use krypton_proto::{AGENT_MESSAGE_MAX, HUB_MESSAGE_MAX};
use krypton_types::join_bundle::split_address;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::Channel;

use crate::credentials::trusted_roots::Trust;
use channel::Refusal;

pub use error::DialError;

const RESOLVE: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(10);
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Between the tries of two addresses of one name: of the two IP versions often only one has a way.
const STAGGER: Duration = Duration::from_millis(300);
/// Of the addresses of one name.
const RESOLVED_MAX: usize = 8;

/// Finds the hub anew each time.
#[derive(Debug)]
pub struct Dialer {
    addresses: Vec<String>,
    tls: Arc<ArcSwap<ClientConfig>>,
    /// Index of the address that is tried first: the one that worked last, until it was passed on from.
    first: AtomicUsize,
    renewed: Notify,
    trust: Trust,
}

/// A way to the hub. It is not mended: when it breaks, every call fails.
#[derive(Clone, Debug)]
pub struct Connection {
    channel: Channel,
    address: Arc<str>,
    refusal: Refusal,
}

impl Dialer {
    /// `addresses` are `host:port`, tried in turn. `tls` is looked at for each connection.
    pub fn new(addresses: Vec<String>, tls: Arc<ArcSwap<ClientConfig>>) -> Self {
        Self {
            addresses,
            tls,
            first: AtomicUsize::new(0),
            renewed: Notify::new(),
            trust: Trust::default(),
        }
    }

    /// Which roots `tls` trusts, and what the hub says of them.
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// From here on connections are made with `tls`. The one there is stays.
    pub fn replace(&self, tls: ClientConfig) {
        self.tls.store(Arc::new(tls));
    }

    /// From here on connections are made with `tls`; the one there is should be followed by a new one,
    /// since it ends with the certificate that it was made with.
    pub fn renew(&self, tls: ClientConfig) {
        self.replace(tls);
        self.renewed.notify_one();
    }

    /// Waits until there is a newer certificate than the last time.
    pub async fn renewed(&self) {
        self.renewed.notified().await;
    }

    /// Behind `address` is a hub that serves nobody now, though it answers: the next address is tried first.
    /// Said twice of the same one, it counts once.
    pub fn pass_on(&self, address: &str) {
        let Some(index) = self.addresses.iter().position(|known| known == address) else {
            return;
        };
        let next = (index + 1) % self.addresses.len();
        // Somebody else may have found a better one meanwhile, which then stays.
        self.first
            .compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed)
            .ok();
    }

    /// How many addresses there are.
    pub fn ways(&self) -> usize {
        self.addresses.len()
    }

    /// Tries each address once, beginning with the one that worked last, unless it was passed on from.
    pub async fn connect(&self) -> Result<Connection, DialError> {
        let first = self.first.load(Ordering::Relaxed);
        let mut failures = Vec::new();
        for offset in 0..self.addresses.len() {
            let index = (first + offset) % self.addresses.len();
            let Some(address) = self.addresses.get(index) else {
                continue;
            };
            match connect(address, self.tls.load_full()).await {
                Ok(connection) => {
                    self.first.store(index, Ordering::Relaxed);
                    return Ok(connection);
                }
                Err(error) => failures.push(error),
            }
        }
        Err(DialError::of_all(failures))
    }
}

impl Connection {
    /// The address that it goes to.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn fleet(&self) -> FleetClient<Channel> {
        FleetClient::new(self.channel.clone())
            .max_decoding_message_size(HUB_MESSAGE_MAX)
            .max_encoding_message_size(AGENT_MESSAGE_MAX)
    }

    pub fn enrollment(&self) -> EnrollmentClient<Channel> {
        EnrollmentClient::new(self.channel.clone())
            .max_decoding_message_size(AGENT_MESSAGE_MAX)
            .max_encoding_message_size(AGENT_MESSAGE_MAX)
    }

    /// Why the hub has ended the connection, when TLS has told: with TLS 1.3 it judges our certificate
    /// after we think that we are connected.
    pub fn refused(&self) -> Option<DialError> {
        let alert = self.refusal.get()?;
        Some(DialError::of_alert(&self.address, *alert))
    }
}

async fn connect(address: &str, tls: Arc<ClientConfig>) -> Result<Connection, DialError> {
    let stream = secure(address, tls).await?;
    let (channel, refusal) = channel::channel(stream)
        .await
        .map_err(|error| DialError::Channel(address.to_owned(), error))?;
    Ok(Connection {
        channel,
        address: address.into(),
        refusal,
    })
}

async fn secure(address: &str, tls: Arc<ClientConfig>) -> Result<TlsStream<TcpStream>, DialError> {
    let Some((host, port)) = split_address(address) else {
        return Err(DialError::Address(address.to_owned()));
    };
    let unresolved = |source| DialError::Resolve {
        address: address.to_owned(),
        source,
    };
    let found: Vec<SocketAddr> =
        tokio::time::timeout(RESOLVE, tokio::net::lookup_host((host, port)))
            .await
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
            .map_err(unresolved)?
            .take(RESOLVED_MAX)
            .collect();
    let tcp = reach(&found)
        .await
        .map_err(|source| DialError::of_tcp(address, source))?;
    // A report or a heartbeat is small, and waits for nothing.
    tcp.set_nodelay(true)
        .map_err(|source| DialError::of_tcp(address, source))?;
    // Only for the peer's routing: whom we trust is in its certificate, whatever it is reached by.
    let zoneless = host.split('%').next().unwrap_or(host).to_owned();
    let name =
        ServerName::try_from(zoneless).map_err(|_| DialError::Address(address.to_owned()))?;
    let shaken = tokio::time::timeout(HANDSHAKE, TlsConnector::from(tls).connect(name, tcp))
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
        .map_err(|source| DialError::of_handshake(address, source))?;
    if shaken.get_ref().1.alpn_protocol() != Some(b"h2") {
        return Err(DialError::NotHttp2(address.to_owned()));
    }
    Ok(shaken)
}

/// The first of the addresses that answers; each is given a head start over the next.
async fn reach(addresses: &[SocketAddr]) -> std::io::Result<TcpStream> {
    let mut tries: FuturesUnordered<_> = addresses
        .iter()
        .zip(0_u32..)
        .map(|(address, position)| async move {
            tokio::time::sleep(STAGGER * position).await;
            tokio::time::timeout(CONNECT, TcpStream::connect(address))
                .await
                .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
        })
        .collect();
    let mut problem = std::io::ErrorKind::NotFound.into();
    while let Some(tried) = tries.next().await {
        match tried {
            Ok(stream) => return Ok(stream),
            Err(error) => problem = error,
        }
    }
    Err(problem)
}

#[cfg(test)]
mod tests;
