//! TLS settings of both ends of a session: TLS 1.3 only, private roots only, and no resumption.
//!
//! A resumed session would accept an expired certificate.

use std::sync::Arc;
use std::time::Duration;

use krypton_types::spiffe::{Role, SpiffeId};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{WebPkiSupportedAlgorithms, aws_lc_rs};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::time_provider::TimeProvider;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig,
    SignatureScheme,
};
use thiserror::Error;

use crate::clock;

/// Protocol above TLS.
const ALPN: &[u8] = b"h2";

/// A certificate chain, starting with the leaf, and its key.
#[derive(Debug)]
pub struct Credential {
    pub certificates: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

impl Clone for Credential {
    fn clone(&self) -> Self {
        Self {
            certificates: self.certificates.clone(),
            key: self.key.clone_key(),
        }
    }
}

#[derive(Debug, Error)]
pub enum TlsError {
    #[error("a root certificate cannot be used")]
    Root(#[source] rustls::Error),
    #[error("the check of client certificates cannot be set up")]
    Verifier(#[source] rustls::server::VerifierBuilderError),
    #[error("certificate and key cannot be used together")]
    Credential(#[source] rustls::Error),
    #[error("TLS 1.3 is not available")]
    Version(#[source] rustls::Error),
}

/// Returns the settings of the hub. A client without a certificate may connect to enroll. A certificate must
/// chain to `roots`.
pub fn server_config(
    roots: &[CertificateDer<'static>],
    credential: Credential,
) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(root_store(roots)?, Arc::clone(&provider))
            .allow_unauthenticated()
            .build()
            .map_err(TlsError::Verifier)?;
    let mut config = ServerConfig::builder_with_details(provider, Arc::new(WallClock))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(TlsError::Version)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(credential.certificates, credential.key)
        .map_err(TlsError::Credential)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Returns the settings of an agent. The hub's certificate must chain to `roots` and contain the hub's URI
/// name. Its address does not matter. An agent without `credential` can only enroll.
pub fn client_config(
    roots: &[CertificateDer<'static>],
    credential: Option<Credential>,
) -> Result<ClientConfig, TlsError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = HubVerifier {
        roots: root_store(roots)?,
        algorithms: provider.signature_verification_algorithms,
    };
    let builder = ClientConfig::builder_with_details(provider, Arc::new(WallClock))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(TlsError::Version)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match credential {
        Some(credential) => builder
            .with_client_auth_cert(credential.certificates, credential.key)
            .map_err(TlsError::Credential)?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

fn root_store(roots: &[CertificateDer<'static>]) -> Result<Arc<RootCertStore>, TlsError> {
    let mut root_store = RootCertStore::empty();
    for root in roots {
        root_store.add(root.clone()).map_err(TlsError::Root)?;
    }
    Ok(Arc::new(root_store))
}

/// Compares the dates of certificates with the clock of the process.
#[derive(Debug)]
struct WallClock;

impl TimeProvider for WallClock {
    fn current_time(&self) -> Option<UnixTime> {
        let seconds = u64::try_from(clock::wall().as_second()).ok()?;
        Some(UnixTime::since_unix_epoch(Duration::from_secs(seconds)))
    }
}

/// Verifies the chain as usual, and the hub's URI name instead of a host name, because the hub's address
/// depends on the agent's network.
#[derive(Debug)]
struct HubVerifier {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for HubVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(end_entity)?,
            &self.roots,
            intermediates,
            now,
            self.algorithms.all,
        )?;
        match SpiffeId::from_certificate(end_entity) {
            Ok(SpiffeId {
                role: Role::Hub, ..
            }) => Ok(ServerCertVerified::assertion()),
            _ => Err(CertificateError::NotValidForName.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
