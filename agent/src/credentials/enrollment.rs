//! Enrolls the agent: exchanges a join token for a certificate.

use std::sync::Arc;
use std::time::Duration;

use krypton_proto::v1::EnrollRequest;
use krypton_runtime::dial::DialError;
use krypton_runtime::net::Network;
use krypton_runtime::tls::{self, TlsError};
use krypton_types::join_bundle::{BundleError, JoinBundle};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::CertificateDer;
use thiserror::Error;
use tonic::{Code, Response, Status};

use crate::credentials::identity::{CertificateError, Enrolled, Membership};
use crate::credentials::join::token_name;
use crate::credentials::store::IdentityError;
use crate::credentials::trusted_roots::TrustError;
use crate::session::connect::{Connection, Dialer, status_message};

/// The hub's own limit is 15 s.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// Reason why the agent got no certificate.
#[derive(Debug, Error)]
pub enum EnrollError {
    #[error("failed to request a certificate from the hub")]
    Dial(#[from] DialError),
    #[error("the hub at {address} issues no certificate for cluster {cluster}: {message}")]
    Refused {
        address: String,
        cluster: String,
        message: String,
    },
    #[error("failed to request a certificate from the hub at {address} ({code:?}): {message}")]
    Call {
        address: String,
        code: Code,
        message: String,
    },
    #[error("the hub at {address} issued no certificate within {} s", CALL_TIMEOUT.as_secs())]
    Deadline { address: String },
    #[error(
        "the certificate from the hub at {address} is not usable; run 'kubectl krypton join' again, or upgrade the hub"
    )]
    Certificate {
        address: String,
        #[source]
        source: CertificateError,
    },
    #[error("the join bundle is not usable")]
    Bundle(#[from] BundleError),
    #[error("failed to set up TLS with the hub")]
    Tls(#[from] TlsError),
    #[error("failed to create a certificate request")]
    Request(#[from] rcgen::Error),
    #[error("failed to store the certificate")]
    Store(#[from] IdentityError),
    #[error("no session with the hub to request a new certificate")]
    NoSession,
    #[error("rejected the roots from the hub; keeping the known roots")]
    Roots(#[from] TrustError),
    #[error("another replica wrote the identity at the same time")]
    Conflict,
    #[error(
        "the identity of this agent is missing from its Secret and works only until the process exits; run 'kubectl krypton join' again"
    )]
    Missing,
}

impl EnrollError {
    fn from_status(connection: &Connection, cluster: &str, status: &Status) -> Self {
        if let Some(rejection) = connection.rejection() {
            return Self::Dial(rejection);
        }
        let address = connection.address().to_owned();
        let message = status_message(status);
        match status.code() {
            Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::InvalidArgument
            | Code::Unauthenticated
            | Code::NotFound
            | Code::Unimplemented => Self::Refused {
                address,
                cluster: cluster.to_owned(),
                message,
            },
            code => Self::Call {
                address,
                code,
                message,
            },
        }
    }

    /// Returns whether a retry can succeed without a change by the user.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Dial(error) => error.is_retryable(),
            Self::Store(error) => error.is_retryable(),
            Self::Call { .. }
            | Self::Deadline { .. }
            | Self::NoSession
            | Self::Conflict
            | Self::Missing => true,
            Self::Refused { .. }
            | Self::Certificate { .. }
            | Self::Bundle(_)
            | Self::Roots(_)
            | Self::Tls(_)
            | Self::Request(_) => false,
        }
    }
}

/// Requests a certificate for `key` with the bundle's token. Connects to the hub at `addresses`, which may differ from
/// the bundle's.
pub async fn enroll(
    bundle: &JoinBundle,
    addresses: Vec<String>,
    key: &KeyPair,
    cluster_uid: &str,
    network: &Arc<dyn Network>,
) -> Result<Enrolled, EnrollError> {
    let config = tls::client_config(&bundle.roots()?, None)?;
    let dialer = Dialer::new(addresses, config).with_network(network);
    let request = EnrollRequest {
        token: bundle.token.clone(),
        certificate_request: certificate_request(key)?.into(),
        cluster_uid: cluster_uid.to_owned(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let mut attempts_left = dialer.address_count();
    let (connection, response) = loop {
        let connection = dialer.connect().await?;
        let mut client = connection.enrollment();
        let response_future = client.enroll(request.clone());
        attempts_left = attempts_left.saturating_sub(1);
        match await_response(&connection, &bundle.cluster, response_future).await {
            Ok(response) => break (connection, response),
            // A hub that is not the leader returns this code. A retry with the same key does not use the token twice.
            Err(EnrollError::Call {
                code: Code::Unavailable,
                ..
            }) if attempts_left > 0 => dialer.try_next_first(connection.address()),
            Err(error) => return Err(error),
        }
    };
    let membership = Membership {
        cluster: bundle.cluster.clone(),
        addresses: bundle.addresses.clone(),
        token_name: token_name(bundle).to_owned(),
    };
    let (certificates, roots) = (to_der(response.certificates), to_der(response.roots));
    verify_enrollment(&connection, key, membership, certificates, roots)
}

pub(super) fn certificate_request(key: &KeyPair) -> Result<Vec<u8>, EnrollError> {
    // The hub uses only the key of the request.
    let request = CertificateParams::default().serialize_request(key)?;
    Ok(request.der().to_vec())
}

/// Awaits the hub's answer, with a deadline.
pub(super) async fn await_response<T>(
    connection: &Connection,
    cluster: &str,
    response_future: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, EnrollError> {
    match tokio::time::timeout(CALL_TIMEOUT, response_future).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(EnrollError::from_status(connection, cluster, &status)),
        Err(_) => Err(EnrollError::Deadline {
            address: connection.address().to_owned(),
        }),
    }
}

/// Checks the identity that the hub has signed.
pub(super) fn verify_enrollment(
    connection: &Connection,
    key: &KeyPair,
    membership: Membership,
    certificates: Vec<CertificateDer<'static>>,
    roots: Vec<CertificateDer<'static>>,
) -> Result<Enrolled, EnrollError> {
    let enrolled = Enrolled::check(key, membership, certificates, roots).map_err(|source| {
        EnrollError::Certificate {
            address: connection.address().to_owned(),
            source,
        }
    })?;
    // Never store an identity that TLS rejects.
    enrolled.client_config(key)?;
    Ok(enrolled)
}

pub(super) fn to_der(certificates: Vec<impl AsRef<[u8]>>) -> Vec<CertificateDer<'static>> {
    certificates
        .iter()
        .map(|der| CertificateDer::from(der.as_ref().to_vec()))
        .collect()
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use krypton_proto::v1::FetchChartRequest;
    use krypton_runtime::net::Tcp;
    use krypton_types::error_chain::chain;

    use super::*;
    use crate::credentials::store::new_key;
    use crate::fake_hub::{FakeAuthority, FakeHub, FakeResponses};

    fn bundle(authority: &FakeAuthority, hub: &FakeHub) -> JoinBundle {
        JoinBundle {
            cluster: "edge-1".to_owned(),
            addresses: hub.addresses(),
            certificate_authority: authority.root_pem.clone(),
            token: format!("{}.{}", "a".repeat(16), "0".repeat(64)),
            expires: Timestamp::from_second(1_800_000_000).unwrap(),
        }
    }

    async fn enrolled(bundle: &JoinBundle, key: &KeyPair) -> Result<Enrolled, EnrollError> {
        let network: Arc<dyn Network> = Arc::new(Tcp);
        enroll(bundle, bundle.addresses.clone(), key, "uid-1", &network).await
    }

    #[tokio::test]
    async fn token_yields_certificate_accepted_by_hub() {
        let authority = Arc::new(FakeAuthority::new());
        let hub = FakeHub::start_signing(&authority, "edge-1").await;
        let key = new_key().unwrap();
        let bundle = bundle(&authority, &hub);
        let enrolled = enrolled(&bundle, &key).await.unwrap();
        assert_eq!(enrolled.membership.cluster, "edge-1");
        assert_eq!(enrolled.membership.token_name, "a".repeat(16));
        let config = enrolled.client_config(&key).unwrap();
        let dialer = Dialer::new(hub.addresses(), config);
        let connection = dialer.connect().await.unwrap();
        let request = FetchChartRequest::default();
        assert!(connection.fleet().fetch_chart(request).await.is_ok());
    }

    #[tokio::test]
    async fn certificate_with_different_name_is_rejected() {
        let authority = Arc::new(FakeAuthority::new());
        let hub = FakeHub::start_signing(&authority, "edge-2").await;
        let error = enrolled(&bundle(&authority, &hub), &new_key().unwrap())
            .await
            .unwrap_err();
        let message = chain(&error);
        assert!(
            message.contains("edge-2") && message.contains("edge-1"),
            "{message}"
        );
        assert!(!error.is_retryable());
    }

    #[tokio::test]
    async fn a_refusal_ends_it_with_the_hubs_words() {
        let authority = FakeAuthority::new();
        let message = "the join token of cluster edge-1 was used already by another key";
        let responses = FakeResponses {
            enroll: Box::new(move |_| Err(Status::failed_precondition(message))),
            ..FakeResponses::default()
        };
        let hub = FakeHub::start_with(&authority, responses).await;
        let error = enrolled(&bundle(&authority, &hub), &new_key().unwrap())
            .await
            .unwrap_err();
        assert!(chain(&error).contains(message), "{error:?}");
        assert!(!error.is_retryable());
    }

    #[tokio::test]
    async fn foreign_ca_is_rejected_busy_hub_is_retried() {
        let authority = Arc::new(FakeAuthority::new());
        let hub = FakeHub::start_signing(&authority, "edge-1").await;
        let foreign = bundle(&FakeAuthority::new(), &hub);
        let key = new_key().unwrap();
        let error = enrolled(&foreign, &key).await.unwrap_err();
        assert!(chain(&error).contains("another CA"), "{error:?}");

        let responses = FakeResponses {
            enroll: Box::new(|_| Err(Status::unavailable("busy"))),
            ..FakeResponses::default()
        };
        let busy = FakeHub::start_with(&authority, responses).await;
        let error = enrolled(&bundle(&authority, &busy), &key)
            .await
            .unwrap_err();
        assert!(error.is_retryable(), "{error:?}");

        // The agent tries the next hub in the same attempt.
        let mut bundle_for_both = bundle(&authority, &busy);
        bundle_for_both.addresses.extend(hub.addresses());
        let enrolled = enrolled(&bundle_for_both, &key).await.unwrap();
        assert_eq!(enrolled.membership.addresses, bundle_for_both.addresses);
    }
}
