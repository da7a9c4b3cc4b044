//! Parses an agent's certificate after TLS has verified its chain.

use std::sync::Arc;

use jiff::Timestamp;
use krypton_crds::edge_cluster::AgentKey;
use krypton_types::fingerprint::{hex, sha256_hex};
use krypton_types::spiffe::{Role, SpiffeError, SpiffeId};
use krypton_types::validity::BACK_DATED;
use thiserror::Error;
use x509_parser::oid_registry::OID_X509_SERIALNUMBER;
use x509_parser::prelude::{FromDer as _, X509Certificate};
use x509_parser::time::ASN1Time;

use crate::members::agent_keys::whole_seconds;

/// The identity and validity of a client certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentCertificate {
    /// The member.
    pub cluster: String,
    /// UID of the EdgeCluster that the certificate was issued for. The certificate is invalid for a
    /// recreated EdgeCluster.
    pub uid: String,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
    /// Lower-case hex.
    pub serial: String,
    /// SHA-256 of the public key, comparable with that of a certificate request.
    pub key: String,
    /// The complete certificate.
    pub der: Arc<[u8]>,
}

impl AgentCertificate {
    /// When the hub signed it, by the hub's clock.
    pub fn issued(&self) -> Timestamp {
        let issued = self.not_before.saturating_add(BACK_DATED);
        issued.unwrap_or(self.not_before)
    }

    /// Returns the key in its recorded form.
    pub fn recorded_key(&self) -> AgentKey {
        AgentKey {
            key_sha256: self.key.clone(),
            serial: self.serial.clone(),
            since: Some(whole_seconds(self.issued())),
            used: None,
        }
    }
}

/// Why a certificate doesn't identify an agent. Completes a sentence about the certificate.
#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("it is not an X.509 certificate")]
    NotACertificate,
    #[error(transparent)]
    Identity(SpiffeError),
    #[error("its trust domain is {found:?} instead of {expected:?}")]
    TrustDomain { found: String, expected: String },
    #[error("it names the hub, not a cluster")]
    NotACluster,
    #[error("it is not for clients")]
    NotForClients,
    #[error("it does not name its EdgeCluster")]
    NoUid,
}

/// Parses a certificate whose chain and dates are verified.
pub fn read_agent_certificate(
    trust_domain: &str,
    der: &[u8],
) -> Result<AgentCertificate, CertificateError> {
    let id = SpiffeId::from_certificate(der).map_err(CertificateError::Identity)?;
    if id.trust_domain != trust_domain {
        return Err(CertificateError::TrustDomain {
            found: id.trust_domain,
            expected: trust_domain.to_owned(),
        });
    }
    let Role::Cluster(cluster) = id.role else {
        return Err(CertificateError::NotACluster);
    };
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|_| CertificateError::NotACertificate)?;
    let usage = certificate
        .extended_key_usage()
        .map_err(|_| CertificateError::NotACertificate)?;
    if !usage.is_some_and(|usage| usage.value.client_auth) {
        return Err(CertificateError::NotForClients);
    }
    let mut uids = certificate.subject().iter_by_oid(&OID_X509_SERIALNUMBER);
    let uid = match (uids.next(), uids.next()) {
        (Some(uid), None) => uid.as_str().unwrap_or_default(),
        _ => "",
    };
    if uid.is_empty() {
        return Err(CertificateError::NoUid);
    }
    Ok(AgentCertificate {
        cluster,
        uid: uid.to_owned(),
        not_before: timestamp(certificate.validity().not_before)?,
        not_after: timestamp(certificate.validity().not_after)?,
        serial: hex(certificate.raw_serial()),
        key: sha256_hex(certificate.public_key().raw),
        der: der.into(),
    })
}

fn timestamp(time: ASN1Time) -> Result<Timestamp, CertificateError> {
    Timestamp::from_second(time.timestamp()).map_err(|_| CertificateError::NotACertificate)
}
