//! Holds the agent's key and the Secret that contains it. Both are zeroed in memory on drop and never printed.
//!
//! The agent cannot zero the memory of libraries. Examples are the bodies of API requests and responses, and the copy
//! that rustls reads once to create its key. aws-lc zeroes its keys itself.

use std::fmt;
use std::ops::Deref;

use k8s_openapi::api::core::v1::Secret;
use rcgen::KeyPair;
use zeroize::{Zeroize, Zeroizing};

/// Private and public key of the agent.
pub struct AgentKey(KeyPair);

impl AgentKey {
    /// Generates a P-256 key, which every hub accepts.
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
    /// Omits everything, including the fields that rcgen prints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentKey").finish_non_exhaustive()
    }
}

/// A Secret that contains the key.
#[derive(Clone, Default)]
pub(super) struct ZeroizedSecret(Secret);

impl ZeroizedSecret {
    pub(super) fn new(secret: Secret) -> Self {
        Self(secret)
    }

    pub(super) fn as_secret(&self) -> &Secret {
        &self.0
    }

    /// Returns the Secret for modification and writing. The returned value is not zeroed.
    pub(super) fn into_secret(mut self) -> Secret {
        std::mem::take(&mut self.0)
    }
}

impl Drop for ZeroizedSecret {
    fn drop(&mut self) {
        for value in self.0.data.iter_mut().flat_map(|data| data.values_mut()) {
            value.0.zeroize();
        }
    }
}

impl fmt::Debug for ZeroizedSecret {
    /// Omits the data, which the `Debug` output of `Secret` contains.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = &self.0.metadata.resource_version;
        f.debug_struct("ZeroizedSecret")
            .field("resource_version", version)
            .finish_non_exhaustive()
    }
}
