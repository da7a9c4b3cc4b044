//! The agent's key, and the Secret that it is read from and written to: wiped from our memory when
//! nobody holds them any more, and never shown.
//!
//! What is not ours cannot be wiped: the bodies of requests to the apiserver and of its answers, and the
//! copy that rustls reads once to make a key of its own. aws-lc wipes its keys itself.

use std::fmt;
use std::ops::Deref;

use k8s_openapi::api::core::v1::Secret;
use rcgen::KeyPair;
use zeroize::{Zeroize, Zeroizing};

/// A key pair.
pub struct AgentKey(KeyPair);

impl AgentKey {
    /// P-256: what every hub takes.
    pub(super) fn generate() -> Result<Self, rcgen::Error> {
        KeyPair::generate().map(Self)
    }

    pub(super) fn from_pem(pem: &str) -> Result<Self, rcgen::Error> {
        KeyPair::from_pem(pem).map(Self)
    }

    pub(super) fn to_pem(&self) -> Zeroizing<String> {
        Zeroizing::new(self.0.serialize_pem())
    }
}

impl Deref for AgentKey {
    type Target = KeyPair;

    fn deref(&self) -> &KeyPair {
        &self.0
    }
}

impl Drop for AgentKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for AgentKey {
    /// Not even what the library shows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentKey").finish_non_exhaustive()
    }
}

/// A Secret with the key in it.
#[derive(Clone, Default)]
pub(super) struct KeptSecret(Secret);

impl KeptSecret {
    pub(super) fn new(secret: Secret) -> Self {
        Self(secret)
    }

    pub(super) fn as_secret(&self) -> &Secret {
        &self.0
    }

    /// To be changed and written: what becomes of it is not ours to wipe.
    pub(super) fn into_secret(mut self) -> Secret {
        std::mem::take(&mut self.0)
    }
}

impl Drop for KeptSecret {
    fn drop(&mut self) {
        for value in self.0.data.iter_mut().flat_map(|data| data.values_mut()) {
            value.0.zeroize();
        }
    }
}

impl fmt::Debug for KeptSecret {
    /// Without the content, which a Secret's own shows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = &self.0.metadata.resource_version;
        f.debug_struct("KeptSecret")
            .field("resource_version", version)
            .finish_non_exhaustive()
    }
}
