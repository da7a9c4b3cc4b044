//! Stores the agent's identity: its key and certificate, in one Secret on its own cluster. All replicas of the agent
//! share the Secret, and the key never leaves the cluster.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::cluster;
use krypton_runtime::tls::{self, Credential, TlsError};
use krypton_types::spiffe::{Role, SpiffeError, SpiffeId};
use kube::Client;
use kube::api::{Api, PostParams};
use rcgen::{KeyPair, PublicKeyData};
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;
use x509_parser::prelude::{FromDer, X509Certificate};

pub use crate::credentials::key::AgentKey;
pub use crate::credentials::secret::IdentityParseError;

use crate::credentials::key::ZeroizedSecret;
use crate::credentials::secret;

/// Name of the Secret.
pub const SECRET: &str = "krypton-agent-identity";
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
        let (not_before, not_after) = (
            time(parsed.validity().not_before)?,
            time(parsed.validity().not_after)?,
        );
        Ok(Self {
            certificates,
            roots,
            membership,
            not_before,
            not_after,
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

#[derive(Debug, Error)]
pub enum IdentityError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(
        "Secret {namespace}/{SECRET} contains no usable identity; repair it, or delete it and run 'kubectl krypton join' again"
    )]
    Unreadable {
        namespace: String,
        #[source]
        source: IdentityParseError,
    },
    #[error("failed to create a key")]
    Key(#[source] rcgen::Error),
}

impl IdentityError {
    /// Returns whether a retry can succeed without a change by the user.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Api(error) if error.is_transient())
    }
}

/// A stored identity with the Secret as read. The next write uses its resource version.
#[derive(Clone, Debug)]
pub struct StoredIdentity {
    pub identity: Identity,
    secret: ZeroizedSecret,
}

/// Access to the Secret on the member.
#[derive(Clone)]
pub struct Store {
    client: Client,
    namespace: String,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

impl Store {
    pub fn new(client: Client, namespace: String) -> Self {
        Self { client, namespace }
    }

    /// Returns the stored identity. If it is missing, creates and stores a key. If two replicas create one, both use
    /// the first.
    pub async fn load(&self) -> Result<StoredIdentity, IdentityError> {
        if let Some(stored) = self.read().await? {
            return Ok(stored);
        }
        let identity = Identity {
            key: new_key()?,
            enrolled: None,
        };
        let new_secret = ZeroizedSecret::new(secret::with_identity(empty_secret(), &identity));
        let created = match self.create(new_secret.as_secret()).await {
            Err(error) if error.code() == Some(404) => {
                self.create_namespace().await?;
                self.create(new_secret.as_secret()).await
            }
            other => other,
        };
        self.written_or_stored(identity, created).await
    }

    /// Returns the stored identity, if any.
    pub async fn read(&self) -> Result<Option<StoredIdentity>, IdentityError> {
        let secret = call(self.attempt("reading"), self.secrets().get_opt(SECRET)).await?;
        secret.map(|secret| self.parse_stored(secret)).transpose()
    }

    /// Replaces the stored identity with `identity`. If another replica wrote first, returns the other identity
    /// unchanged.
    pub async fn replace(
        &self,
        stored: StoredIdentity,
        identity: Identity,
    ) -> Result<StoredIdentity, IdentityError> {
        let next = ZeroizedSecret::new(secret::with_identity(
            stored.secret.into_secret(),
            &identity,
        ));
        let (api, params) = (self.secrets(), PostParams::default());
        let request = api.replace(SECRET, &params, next.as_secret());
        let replaced = call(self.attempt("writing"), request).await;
        self.written_or_stored(identity, replaced).await
    }

    /// After a lost conflict, returns the stored identity.
    async fn written_or_stored(
        &self,
        identity: Identity,
        written: Result<Secret, ApiError>,
    ) -> Result<StoredIdentity, IdentityError> {
        match written {
            Ok(secret) => Ok(StoredIdentity {
                identity,
                secret: ZeroizedSecret::new(secret),
            }),
            Err(error) if error.code() == Some(409) => {
                self.read().await?.ok_or_else(|| error.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn parse_stored(&self, secret: Secret) -> Result<StoredIdentity, IdentityError> {
        let secret = ZeroizedSecret::new(secret);
        let result = secret::parse(secret.as_secret());
        let identity = result.map_err(|source| IdentityError::Unreadable {
            namespace: self.namespace.clone(),
            source,
        })?;
        Ok(StoredIdentity { identity, secret })
    }

    async fn create(&self, secret: &Secret) -> Result<Secret, ApiError> {
        let (api, params) = (self.secrets(), PostParams::default());
        let request = api.create(&params, secret);
        call(self.attempt("creating"), request).await
    }

    async fn create_namespace(&self) -> Result<(), IdentityError> {
        let namespace = cluster::own_namespace(&self.namespace);
        let api: Api<Namespace> = Api::all(self.client.clone());
        let params = PostParams::default();
        let request = api.create(&params, &namespace);
        match call(format!("creating namespace {}", self.namespace), request).await {
            Ok(_) => Ok(()),
            Err(error) if error.code() == Some(409) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn attempt(&self, verb: &str) -> String {
        format!("{verb} Secret {}/{SECRET}", self.namespace)
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

pub fn new_key() -> Result<Arc<AgentKey>, IdentityError> {
    AgentKey::generate()
        .map(Arc::new)
        .map_err(IdentityError::Key)
}

fn empty_secret() -> Secret {
    Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.to_owned()),
            ..ObjectMeta::default()
        },
        ..Secret::default()
    }
}

#[cfg(test)]
pub(crate) mod tests;
