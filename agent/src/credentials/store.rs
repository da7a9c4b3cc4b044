//! Stores the agent's identity: its key and certificate, in one Secret on its own cluster. All replicas of the agent
//! share the Secret, and the key never leaves the cluster.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::cluster;
use kube::Client;
use kube::api::{Api, PostParams};
use thiserror::Error;

pub use crate::credentials::secret::IdentityParseError;

use crate::credentials::identity::Identity;
use crate::credentials::key::{AgentKey, ZeroizedSecret};
use crate::credentials::secret;

/// Name of the Secret.
pub const SECRET: &str = "krypton-agent-identity";

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
                let creating = cluster::ensure_own_namespace(&self.client, &self.namespace);
                call(format!("creating namespace {}", self.namespace), creating).await?;
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
