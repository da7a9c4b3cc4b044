//! Who this agent is to the hub: its key and certificate, kept in one Secret on its own cluster, which
//! all replicas of the agent share. The key never leaves that cluster.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_runtime::access::reason_of;
use krypton_runtime::tls::{self, Credential, TlsError};
use krypton_runtime::{cluster, effect};
use krypton_types::spiffe::{Role, SpiffeError, SpiffeId};
use kube::Client;
use kube::api::{Api, PostParams};
use rcgen::{KeyPair, PublicKeyData};
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;
use x509_parser::prelude::{FromDer, X509Certificate};

pub use crate::credentials::key::AgentKey;
pub use crate::credentials::secret::Unreadable;

use crate::credentials::key::KeptSecret;

/// The Secret's name.
pub const SECRET: &str = "krypton-agent-identity";
const DEADLINE: Duration = Duration::from_secs(10);
/// Certificates in a chain, and roots: two while a CA is replaced, with room for intermediate ones.
const CHAIN_MAX: usize = 8;

/// A key, and what was got for it.
#[derive(Clone, Debug)]
pub struct Identity {
    pub key: Arc<AgentKey>,
    /// Without: the process ended between making the key and storing the certificate.
    pub enrolled: Option<Enrolled>,
}

/// What enrolment and renewal give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enrolled {
    pub certificates: Vec<CertificateDer<'static>>,
    /// The hub's.
    pub roots: Vec<CertificateDer<'static>>,
    /// The member's name in the fleet.
    pub cluster: String,
    /// `host:port` of the hub.
    pub addresses: Vec<String>,
    /// The public part of the join token that it was first got with.
    pub token_name: String,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

/// What is wrong with a certificate that was given to us.
#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("there are {0} certificates instead of 1 to {CHAIN_MAX}")]
    Count(usize),
    #[error("there are {0} root certificates instead of 1 to {CHAIN_MAX}")]
    Roots(usize),
    #[error("it is not an X.509 certificate")]
    Encoding,
    #[error("whom it names cannot be read")]
    Name(#[source] SpiffeError),
    #[error("it names {found} instead of cluster {expected}")]
    OtherName { found: String, expected: String },
    #[error("it is for another key than ours")]
    OtherKey,
}

/// Who is asking, besides key and certificate.
#[derive(Clone, Debug)]
pub struct Membership {
    pub cluster: String,
    pub addresses: Vec<String>,
    pub token_name: String,
}

impl Enrolled {
    /// Checks that the certificate is for us: the member's name and our key.
    pub fn check(
        key: &KeyPair,
        membership: Membership,
        certificates: Vec<CertificateDer<'static>>,
        roots: Vec<CertificateDer<'static>>,
    ) -> Result<Self, CertificateError> {
        let Some(own) = certificates
            .first()
            .filter(|_| certificates.len() <= CHAIN_MAX)
        else {
            return Err(CertificateError::Count(certificates.len()));
        };
        if roots.is_empty() || roots.len() > CHAIN_MAX {
            return Err(CertificateError::Roots(roots.len()));
        }
        let id = SpiffeId::of_certificate(own).map_err(CertificateError::Name)?;
        if id.role != Role::Cluster(membership.cluster.clone()) {
            return Err(CertificateError::OtherName {
                found: id.to_string(),
                expected: membership.cluster,
            });
        }
        let (_, read) = X509Certificate::from_der(own).map_err(|_| CertificateError::Encoding)?;
        if read.public_key().raw != key.subject_public_key_info() {
            return Err(CertificateError::OtherKey);
        }
        let time = |time: x509_parser::time::ASN1Time| {
            Timestamp::from_second(time.timestamp()).map_err(|_| CertificateError::Encoding)
        };
        let (not_before, not_after) = (
            time(read.validity().not_before)?,
            time(read.validity().not_after)?,
        );
        Ok(Self {
            certificates,
            roots,
            cluster: membership.cluster,
            addresses: membership.addresses,
            token_name: membership.token_name,
            not_before,
            not_after,
        })
    }

    pub fn membership(&self) -> Membership {
        Membership {
            cluster: self.cluster.clone(),
            addresses: self.addresses.clone(),
            token_name: self.token_name.clone(),
        }
    }

    /// For connections to the hub.
    pub fn client_config(&self, key: &KeyPair) -> Result<ClientConfig, TlsError> {
        let own = Credential {
            certificates: self.certificates.clone(),
            key: PrivateKeyDer::Pkcs8(key.serialize_der().into()),
        };
        tls::client_config(&self.roots, Some(own))
    }
}

#[derive(Debug, Error)]
pub enum IdentityError {
    #[error(
        "this agent may not {verb} {what}: {reason}; give its service account, or the user of its kubeconfig, the right to {verb} {what}"
    )]
    Forbidden {
        verb: &'static str,
        what: String,
        reason: String,
    },
    #[error("{attempt} {what} failed")]
    Call {
        attempt: &'static str,
        what: String,
        #[source]
        source: kube::Error,
    },
    #[error("{what}: no answer within {} s", DEADLINE.as_secs())]
    Deadline { what: String },
    #[error(
        "Secret {namespace}/{SECRET} holds no identity that can be used, and is left as it is; repair it, or delete it and run 'kubectl krypton join' again"
    )]
    Unreadable {
        namespace: String,
        #[source]
        source: Unreadable,
    },
    #[error("a key could not be made")]
    Key(#[source] rcgen::Error),
}

impl IdentityError {
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Call { source, .. } if is_code(source, 409))
    }

    /// Whether it may go by itself.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Deadline { .. } => true,
            Self::Call { source, .. } => match source {
                kube::Error::Api(status) => status.code >= 500 || matches!(status.code, 409 | 429),
                _ => true,
            },
            Self::Forbidden { .. } | Self::Unreadable { .. } | Self::Key(_) => false,
        }
    }
}

/// What is kept, as it was read: what is written next rests on it.
#[derive(Clone, Debug)]
pub struct Kept {
    pub identity: Identity,
    secret: KeptSecret,
}

/// The Secret on the member.
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

    /// What is kept; when there is nothing, a key is made and kept. Of two replicas that make one, the
    /// faster one's is used by both.
    pub async fn load(&self) -> Result<Kept, IdentityError> {
        if let Some(kept) = self.read().await? {
            return Ok(kept);
        }
        let identity = Identity {
            key: new_key()?,
            enrolled: None,
        };
        let fresh = KeptSecret::new(crate::credentials::secret::written(empty(), &identity));
        let created = match self.create(fresh.as_secret()).await {
            Err(IdentityError::Call { source, .. }) if is_code(&source, 404) => {
                self.make_namespace().await?;
                self.create(fresh.as_secret()).await
            }
            other => other,
        };
        match created {
            Ok(secret) => Ok(Kept {
                identity,
                secret: KeptSecret::new(secret),
            }),
            Err(error) if error.is_conflict() => self.read().await?.ok_or(error),
            Err(error) => Err(error),
        }
    }

    /// What is kept by now, if anything.
    pub async fn read(&self) -> Result<Option<Kept>, IdentityError> {
        let what = format!("Secret {SECRET} in namespace {}", self.namespace);
        let found = in_time("get", "reading", what, self.secrets().get_opt(SECRET)).await?;
        found.map(|secret| self.kept(secret)).transpose()
    }

    /// Keeps `identity` in the place of what was read. When somebody else was faster, what they have
    /// written stays and is given back.
    pub async fn keep(&self, kept: Kept, identity: Identity) -> Result<Kept, IdentityError> {
        let next = KeptSecret::new(crate::credentials::secret::written(
            kept.secret.into_secret(),
            &identity,
        ));
        let what = format!("Secret {SECRET} in namespace {}", self.namespace);
        let (api, params) = (self.secrets(), PostParams::default());
        let replaced = effect!(
            "identity.keep",
            api.replace(SECRET, &params, next.as_secret())
        );
        match in_time("update", "writing", what, replaced).await {
            Ok(secret) => Ok(Kept {
                identity,
                secret: KeptSecret::new(secret),
            }),
            // Who has lost does not begin an identity of its own.
            Err(error) if error.is_conflict() => self.read().await?.ok_or(error),
            Err(error) => Err(error),
        }
    }

    fn kept(&self, secret: Secret) -> Result<Kept, IdentityError> {
        let secret = KeptSecret::new(secret);
        let read = crate::credentials::secret::read(secret.as_secret());
        let identity = read.map_err(|source| IdentityError::Unreadable {
            namespace: self.namespace.clone(),
            source,
        })?;
        Ok(Kept { identity, secret })
    }

    async fn create(&self, secret: &Secret) -> Result<Secret, IdentityError> {
        let what = format!("Secrets in namespace {}", self.namespace);
        let (api, params) = (self.secrets(), PostParams::default());
        let created = effect!("identity.create", api.create(&params, secret));
        in_time("create", "creating", what, created).await
    }

    async fn make_namespace(&self) -> Result<(), IdentityError> {
        let namespace = cluster::own_namespace(&self.namespace);
        let api: Api<Namespace> = Api::all(self.client.clone());
        let params = PostParams::default();
        let what = format!("namespaces ({} is missing)", self.namespace);
        let made = effect!("identity.namespace", api.create(&params, &namespace));
        match in_time("create", "creating", what, made).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_conflict() => Ok(()),
            Err(error) => Err(error),
        }
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

fn empty() -> Secret {
    Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.to_owned()),
            ..ObjectMeta::default()
        },
        ..Secret::default()
    }
}

async fn in_time<T>(
    verb: &'static str,
    attempt: &'static str,
    what: String,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<T, IdentityError> {
    match tokio::time::timeout(DEADLINE, call).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(source)) if is_code(&source, 403) => Err(IdentityError::Forbidden {
            verb,
            what,
            reason: reason_of(&source),
        }),
        Ok(Err(source)) => Err(IdentityError::Call {
            attempt,
            what,
            source,
        }),
        Err(_) => Err(IdentityError::Deadline {
            what: format!("{attempt} {what}"),
        }),
    }
}

fn is_code(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

#[cfg(test)]
pub(crate) mod tests;
