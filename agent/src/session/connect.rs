//! Connects to the hub: tries its addresses in turn, and opens a channel over mutual TLS.

mod channel;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use krypton_proto::v1::enrollment_client::EnrollmentClient;
use krypton_proto::v1::fleet_client::FleetClient;
use krypton_proto::{AGENT_MESSAGE_MAX, HUB_MESSAGE_MAX};
use krypton_runtime::dial::{DialError, open_tls};
use krypton_runtime::net::{Network, Tcp};
use krypton_types::text::truncated;
use rustls::ClientConfig;
use tokio::sync::Notify;
use tonic::Status;
use tonic::transport::Channel;

use crate::credentials::trusted_roots::RootUpdates;
use channel::ReceivedAlert;

/// Longest message of the hub in an error, in bytes.
const MESSAGE_MAX: usize = 500;

/// Returns the hub's message about a failed call, cut to a safe length.
pub(crate) fn status_message(status: &Status) -> String {
    truncated(status.message().to_owned(), MESSAGE_MAX)
}

/// Connects to the hub. Resolves its addresses for each connection and remembers the one that worked.
#[derive(Debug)]
pub struct Dialer {
    addresses: Vec<String>,
    tls: ArcSwap<ClientConfig>,
    /// Index of the address to try first: the last that worked, unless [`Dialer::try_next_first`] moved past it.
    first: AtomicUsize,
    renewed: Notify,
    root_updates: RootUpdates,
    network: Arc<dyn Network>,
}

/// A connection to the hub. It does not reconnect: when it breaks, every call fails.
#[derive(Clone, Debug)]
pub struct Connection {
    channel: Channel,
    address: Arc<str>,
    received_alert: ReceivedAlert,
}

impl Dialer {
    /// `addresses` are `host:port`, tried in order.
    pub fn new(addresses: Vec<String>, tls: ClientConfig) -> Self {
        Self {
            addresses,
            tls: ArcSwap::from_pointee(tls),
            first: AtomicUsize::new(0),
            renewed: Notify::new(),
            root_updates: RootUpdates::default(),
            network: Arc::new(Tcp),
        }
    }

    /// Replaces [`Tcp`].
    #[must_use]
    pub fn with_network(mut self, network: &Arc<dyn Network>) -> Self {
        self.network = Arc::clone(network);
        self
    }

    /// Returns the roots that `tls` trusts and the hub's announcements about them.
    pub fn root_updates(&self) -> &RootUpdates {
        &self.root_updates
    }

    /// Uses `tls` for new connections. The current connection stays.
    pub fn replace(&self, tls: ClientConfig) {
        self.tls.store(Arc::new(tls));
    }

    /// Uses `tls` for new connections and notifies [`Dialer::renewed`]. The current connection should be replaced,
    /// because it ends when its certificate expires.
    pub fn renew(&self, tls: ClientConfig) {
        self.replace(tls);
        self.renewed.notify_one();
    }

    /// Waits until [`Dialer::renew`] sets a newer certificate.
    pub async fn renewed(&self) {
        self.renewed.notified().await;
    }

    /// Tries the address after `address` first, because the hub there responds but serves no agents. Repeated calls for
    /// one address count once.
    pub fn try_next_first(&self, address: &str) {
        let Some(index) = self
            .addresses
            .iter()
            .position(|candidate| candidate == address)
        else {
            return;
        };
        let next = (index + 1) % self.addresses.len();
        // Do not overwrite a choice that another task made in the meantime.
        self.first
            .compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed)
            .ok();
    }

    /// Returns the number of addresses.
    pub fn address_count(&self) -> usize {
        self.addresses.len()
    }

    /// Tries each address once, starting with the preferred one.
    pub async fn connect(&self) -> Result<Connection, DialError> {
        let first = self.first.load(Ordering::Relaxed);
        let mut failures = Vec::new();
        for offset in 0..self.addresses.len() {
            let index = (first + offset) % self.addresses.len();
            let Some(address) = self.addresses.get(index) else {
                continue;
            };
            match connect(self.network.as_ref(), address, self.tls.load_full()).await {
                Ok(connection) => {
                    self.first.store(index, Ordering::Relaxed);
                    return Ok(connection);
                }
                Err(error) => failures.push(error),
            }
        }
        Err(DialError::from_failures(failures))
    }
}

impl Connection {
    /// Address of the hub.
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

    /// Returns the TLS alert with which the hub closed the connection. In TLS 1.3 the server verifies the client
    /// certificate after the client has finished its handshake.
    pub fn rejection(&self) -> Option<DialError> {
        let alert = self.received_alert.get()?;
        Some(DialError::from_alert(&self.address, *alert))
    }
}

async fn connect(
    network: &dyn Network,
    address: &str,
    tls: Arc<ClientConfig>,
) -> Result<Connection, DialError> {
    let stream = open_tls(network, address, tls).await?;
    let (channel, received_alert) = channel::channel(stream)
        .await
        .map_err(|error| DialError::Channel(address.to_owned(), error))?;
    Ok(Connection {
        channel,
        address: address.into(),
        received_alert,
    })
}

#[cfg(test)]
mod tests;
