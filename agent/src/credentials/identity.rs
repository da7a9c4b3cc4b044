//! The agent's identity: its key, its certificate and its membership in the fleet.

use std::sync::Arc;

use jiff::Timestamp;
use krypton_runtime::tls::{self, Credential, TlsError};
use krypton_types::spiffe::{Role, SpiffeError, SpiffeId};
use rcgen::{KeyPair, PublicKeyData};
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;
use x509_parser::prelude::{FromDer, X509Certificate};

pub use crate::credentials::key::AgentKey;

/// Limit for certificates in a chain and for roots. A CA rotation needs two roots; the rest is for intermediates.
const CHAIN_MAX: usize = 8;

/// A private key with its enrollment.
#[derive(Clone, Debug)]
pub struct Identity {
    pub key: Arc<AgentKey>,
    /// `None` if the process exited after it stored the key and before it stored the certificate.
    pub enrolled: Option<Enrolled>,
}

/// Result of enrollment and renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enrolled {
    pub certificates: Vec<CertificateDer<'static>>,
    /// Roots of the hub's CA.
    pub roots: Vec<CertificateDer<'static>>,
    pub membership: Membership,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

/// Reason for rejecting a certificate from the hub.
#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("{0} certificates instead of 1 to {CHAIN_MAX}")]
    Count(usize),
    #[error("{0} root certificates instead of 1 to {CHAIN_MAX}")]
    Roots(usize),
    #[error("it is not an X.509 certificate")]
    Encoding,
    #[error("its name is not valid")]
    Name(#[source] SpiffeError),
    #[error("it names {actual} instead of cluster {expected}")]
    OtherName { actual: String, expected: String },
    #[error("it is for a different key")]
    OtherKey,
}

/// Data of the agent that a renewal preserves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Name of the member in the fleet.
    pub cluster: String,
    /// Addresses of the hub, as `host:port`.
    pub addresses: Vec<String>,
    /// Public part of the join token of the first enrollment.
    pub token_name: String,
}

impl Enrolled {
    /// Verifies that the certificate contains the member's name and the agent's key.
    pub fn check(
        key: &KeyPair,
        membership: Membership,
        certificates: Vec<CertificateDer<'static>>,
        roots: Vec<CertificateDer<'static>>,
    ) -> Result<Self, CertificateError> {
        let Some(leaf) = certificates
            .first()
            .filter(|_| certificates.len() <= CHAIN_MAX)
        else {
            return Err(CertificateError::Count(certificates.len()));
        };
        if roots.is_empty() || roots.len() > CHAIN_MAX {
            return Err(CertificateError::Roots(roots.len()));
        }
        let id = SpiffeId::from_certificate(leaf).map_err(CertificateError::Name)?;
        if id.role != Role::Cluster(membership.cluster.clone()) {
            return Err(CertificateError::OtherName {
                actual: id.to_string(),
                expected: membership.cluster,
            });
        }
        let (_, parsed) =
            X509Certificate::from_der(leaf).map_err(|_| CertificateError::Encoding)?;
        if parsed.public_key().raw != key.subject_public_key_info() {
            return Err(CertificateError::OtherKey);
        }
        let time = |time: x509_parser::time::ASN1Time| {
            Timestamp::from_second(time.timestamp()).map_err(|_| CertificateError::Encoding)
        };
        Ok(Self {
            not_before: time(parsed.validity().not_before)?,
            not_after: time(parsed.validity().not_after)?,
            certificates,
            roots,
            membership,
        })
    }

    /// Returns the TLS configuration for connections to the hub.
    pub fn client_config(&self, key: &KeyPair) -> Result<ClientConfig, TlsError> {
        let credential = Credential {
            certificates: self.certificates.clone(),
            key: PrivateKeyDer::Pkcs8(key.serialize_der().into()),
        };
        tls::client_config(&self.roots, Some(credential))
    }
}
