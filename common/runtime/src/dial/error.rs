//! Errors of the connection to the hub, as messages for users.

use std::io;

use krypton_types::error_chain::chain;
use rustls::{AlertDescription, CertificateError};
use thiserror::Error;

/// Reason why the connection failed. Each message names the address and a fix.
#[derive(Debug, Error)]
pub enum DialError {
    #[error("the hub's address {0:?} is not HOST:PORT; correct it in the bundle or set --hub")]
    Address(String),
    #[error(
        "the name of the hub's address {address} does not resolve; check the name and this machine's DNS, or set another address with --hub"
    )]
    Resolve {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "connection to hub {0} timed out; check that the hub is running and that no firewall blocks the port"
    )]
    Silent(String),
    #[error(
        "connection to hub {0} refused; check that the hub is running with --listen on that port"
    )]
    Refused(String),
    #[error("the hub cannot be reached at {address}; check the network")]
    Unreachable {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "the proxy {proxy} opens no connection to the hub at {address}; check the proxy, or name the hub's host in NO_PROXY"
    )]
    Proxy {
        address: String,
        proxy: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{0} answers, but not with TLS; check that this is the hub's --listen port")]
    NotTls(String),
    #[error(
        "{address} closes the connection before the TLS handshake ends; check that this is the hub's --listen port and that no proxy closes it"
    )]
    CutOff {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "{0} does not speak HTTP/2 over TLS; check that this is the hub's --listen port and that no proxy terminates TLS"
    )]
    NotHttp2(String),
    #[error(
        "the certificate at {0} is from another CA: another hub answers, its CA was rotated while this agent was disconnected, or a proxy intercepts the connection; run 'kubectl krypton join' again"
    )]
    OtherAuthority(String),
    #[error(
        "the hub's certificate at {0} is not valid now; check this machine's clock, then the hub's"
    )]
    NotValidNow(String),
    #[error(
        "the certificate at {0} is from the hub's CA but does not belong to the hub; check that the address is the hub's"
    )]
    NotTheHub(String),
    #[error("TLS with {address} failed")]
    Tls {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "the hub at {0} rejects the agent's certificate as expired or not yet valid; check this machine's clock, or run 'kubectl krypton join' again"
    )]
    OursExpired(String),
    #[error(
        "the hub at {0} does not know the CA of the agent's certificate: it is another hub, or its CA was recreated or rotated while this agent was disconnected; run 'kubectl krypton join' again"
    )]
    OursUnknown(String),
    #[error(
        "the hub at {address} rejected the agent's certificate ({alert:?}); run 'kubectl krypton join' again"
    )]
    OursRefused {
        address: String,
        alert: AlertDescription,
    },
    #[error("the connection to {0} cannot be used")]
    Channel(String, #[source] tonic::transport::Error),
    #[error("no hub address is known; set one with --hub=HOST:PORT")]
    NoAddress,
    #[error("none of the hub's addresses works: {}", joined_messages(.0))]
    All(Vec<DialError>),
}

impl DialError {
    /// Combines the errors of all addresses.
    pub fn from_failures(mut failures: Vec<Self>) -> Self {
        match failures.len() {
            0 => Self::NoAddress,
            1 => failures.remove(0),
            _ => Self::All(failures),
        }
    }

    pub(super) fn from_tcp_error(address: &str, source: io::Error) -> Self {
        let address = address.to_owned();
        match source.kind() {
            io::ErrorKind::TimedOut => Self::Silent(address),
            io::ErrorKind::ConnectionRefused => Self::Refused(address),
            io::ErrorKind::NotFound => Self::Resolve { address, source },
            _ => Self::Unreachable { address, source },
        }
    }

    pub(super) fn from_handshake_error(address: &str, source: io::Error) -> Self {
        use CertificateError::{
            BadSignature, Expired, ExpiredContext, NotValidYet, NotValidYetContext, UnknownIssuer,
        };
        let tls = source
            .get_ref()
            .and_then(|inner| inner.downcast_ref::<rustls::Error>());
        let address = address.to_owned();
        match tls {
            Some(rustls::Error::InvalidMessage(_)) => Self::NotTls(address),
            Some(rustls::Error::NoApplicationProtocol) => Self::NotHttp2(address),
            Some(rustls::Error::AlertReceived(alert)) => Self::from_alert(&address, *alert),
            Some(rustls::Error::InvalidCertificate(problem)) => match problem {
                UnknownIssuer | BadSignature => Self::OtherAuthority(address),
                Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. } => {
                    Self::NotValidNow(address)
                }
                _ => Self::NotTheHub(address),
            },
            Some(_) => Self::Tls { address, source },
            None => match source.kind() {
                io::ErrorKind::TimedOut => Self::Silent(address),
                io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe => Self::CutOff { address, source },
                _ => Self::Unreachable { address, source },
            },
        }
    }

    /// Returns the error for the TLS alert with which the hub closed a connection.
    pub fn from_alert(address: &str, alert: AlertDescription) -> Self {
        let address = address.to_owned();
        match alert {
            AlertDescription::CertificateExpired => Self::OursExpired(address),
            // `DecryptError` means that the CA has the same name as the hub's and a different key.
            AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                Self::OursUnknown(address)
            }
            AlertDescription::NoApplicationProtocol => Self::NotHttp2(address),
            alert => Self::OursRefused { address, alert },
        }
    }

    /// Returns whether a retry can succeed without a change by the user.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Resolve { .. }
            | Self::Silent(_)
            | Self::Refused(_)
            | Self::Unreachable { .. }
            | Self::Proxy { .. }
            | Self::CutOff { .. }
            | Self::Tls { .. }
            | Self::Channel(..) => true,
            Self::All(failures) => failures.iter().any(Self::is_retryable),
            Self::Address(_)
            | Self::NotTls(_)
            | Self::NotHttp2(_)
            | Self::OtherAuthority(_)
            | Self::NotValidNow(_)
            | Self::NotTheHub(_)
            | Self::OursExpired(_)
            | Self::OursUnknown(_)
            | Self::OursRefused { .. }
            | Self::NoAddress => false,
        }
    }
}

fn joined_messages(failures: &[DialError]) -> String {
    let texts: Vec<String> = failures.iter().map(|error| chain(error)).collect();
    texts.join("; ")
}
