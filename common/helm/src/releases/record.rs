//! Record of the revisions that Krypton deployed: a Secret per release in `krypton-system`, where the users
//! of a workspace cannot write. Krypton does not trust a release Secret that does not match its record.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_types::fingerprint::sha256_hex;
use serde::{Deserialize, Serialize};

use super::labels::ReleaseKey;

/// Key of the record in the Secret.
pub const KEY: &str = "record.json";
/// Label of all records.
pub const RECORD_LABEL: (&str, &str) = ("mesh.openkcm.io/release-record", "true");

/// The digests of one release's revisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReleaseRecord {
    /// Digests by revision, as [`digest`](super::digest) returns them.
    pub digests: BTreeMap<u32, String>,
    /// The Secret of the record. `None` for a new record.
    secret: Option<Secret>,
}

#[derive(Deserialize, Serialize)]
struct StoredRecord {
    namespace: String,
    name: String,
    digests: BTreeMap<u32, String>,
}

/// Result of comparing a stored revision with the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordComparison {
    Recorded,
    /// Krypton has no digest of this revision: another program wrote it, or Krypton stopped before it could
    /// record it.
    Unrecorded,
    /// The revision has changed since Krypton deployed it.
    Tampered,
}

impl ReleaseRecord {
    /// Reads the record from the Secret with [`name`], if it exists. A record that cannot be decoded counts
    /// as empty, so it confirms no revision.
    pub fn from_secret(secret: Option<Secret>, release: &ReleaseKey) -> Self {
        let digests = secret
            .as_ref()
            .and_then(|secret| digests_in(secret, release));
        Self {
            digests: digests.unwrap_or_default(),
            secret,
        }
    }

    /// Compares a revision's digest with the record.
    pub fn compare(&self, revision: u32, digest: &str) -> RecordComparison {
        match self.digests.get(&revision) {
            Some(recorded) if recorded == digest => RecordComparison::Recorded,
            Some(_) => RecordComparison::Tampered,
            None => RecordComparison::Unrecorded,
        }
    }

    /// Returns whether the record's Secret exists.
    pub fn exists(&self) -> bool {
        self.secret.is_some()
    }

    /// Returns the Secret that the record was read from.
    pub fn secret(&self) -> Option<&Secret> {
        self.secret.as_ref()
    }

    /// Returns the Secret to write, with the `resourceVersion` of the previous one.
    ///
    /// # Errors
    /// Returns an error if the digests cannot be encoded.
    pub fn to_secret(&self, release: &ReleaseKey) -> serde_json::Result<Secret> {
        let content = serde_json::to_vec(&StoredRecord {
            namespace: release.namespace.clone(),
            name: release.name.clone(),
            digests: self.digests.clone(),
        })?;
        let (label, value) = RECORD_LABEL;
        let mut secret = self.secret.clone().unwrap_or_else(|| Secret {
            metadata: ObjectMeta {
                name: Some(name(release)),
                labels: Some([(label.to_owned(), value.to_owned())].into()),
                ..ObjectMeta::default()
            },
            ..Secret::default()
        });
        secret.data = Some([(KEY.to_owned(), ByteString(content))].into());
        Ok(secret)
    }
}

/// Returns the name of the record's Secret. It is a digest, because namespace and name together can be too
/// long for a name.
pub fn name(release: &ReleaseKey) -> String {
    let full_name = format!("{}/{}", release.namespace, release.name);
    let digest = sha256_hex(full_name.as_bytes());
    format!("krypton-release-{}", digest.get(..40).unwrap_or(&digest))
}

/// Returns the digests in a Secret, or `None` if it is not the record of this release.
pub fn digests_in(secret: &Secret, release: &ReleaseKey) -> Option<BTreeMap<u32, String>> {
    let content = secret.data.as_ref()?.get(KEY)?;
    let stored: StoredRecord = serde_json::from_slice(&content.0).ok()?;
    let is_same_release = stored.namespace == release.namespace && stored.name == release.name;
    is_same_release.then_some(stored.digests)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(name: &str) -> ReleaseKey {
        ReleaseKey::new("acme", name)
    }

    #[test]
    fn revision_is_trusted_only_with_its_own_digest() {
        let record = ReleaseRecord {
            digests: [(2, "a".to_owned()), (3, "b".to_owned())].into(),
            secret: None,
        };
        assert_eq!(record.compare(3, "b"), RecordComparison::Recorded);
        assert_eq!(record.compare(3, "a"), RecordComparison::Tampered);
        assert_eq!(record.compare(4, "b"), RecordComparison::Unrecorded);
        assert_eq!(
            ReleaseRecord::default().compare(1, "a"),
            RecordComparison::Unrecorded
        );
    }

    #[test]
    fn record_of_different_release_is_ignored() {
        let content = serde_json::json!({"namespace": "acme", "name": "a", "digests": {"1": "x"}});
        let secret = Secret {
            data: Some([(KEY.to_owned(), ByteString(content.to_string().into_bytes()))].into()),
            ..Secret::default()
        };
        assert_eq!(
            digests_in(&secret, &release("a")),
            Some([(1, "x".to_owned())].into())
        );
        assert_eq!(digests_in(&secret, &release("b")), None);
        assert_eq!(digests_in(&Secret::default(), &release("a")), None);
        assert_ne!(name(&release("a")), name(&release("b")));
    }
}
