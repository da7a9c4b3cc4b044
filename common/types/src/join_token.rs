//! Join tokens as Secrets `krypton-join-<name>` in the hub's namespace. A token is valid for one member, one key, one
//! cluster and a short time. The Secret contains a digest of the token's secret part.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::fingerprint::{hex, sha256_hex};
use crate::join_bundle::is_token;

/// Label of the Secrets, with the value `true`.
pub const LABEL: &str = "mesh.openkcm.io/join-token";
/// Label of the Secrets: the EdgeCluster's name, for listing the tokens of one EdgeCluster.
pub const MEMBER_LABEL: &str = "mesh.openkcm.io/join-cluster";
/// Limits of a token's lifetime.
pub const SHORTEST_LIFE: Duration = Duration::from_secs(60);
pub const LONGEST_LIFE: Duration = Duration::from_secs(24 * 60 * 60);

/// Prefix of the Secrets' names.
pub const NAME_PREFIX: &str = "krypton-join-";
const CLUSTER_KEY: &str = "cluster";
const DIGEST_KEY: &str = "secret-sha256";
const EXPIRES_KEY: &str = "expires";
const USED_BY_KEY: &str = "used-by";
const EDGE_CLUSTER_KEY: &str = "edge-cluster-uid";
const CLUSTER_UID_KEY: &str = "cluster-uid";
const USED_AT_KEY: &str = "used-at";

/// Record of a token on the home cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub cluster: String,
    /// Lower-case hex.
    pub secret_sha256: String,
    pub expires: Timestamp,
    /// Digest of the public key that used the token.
    pub used_by: Option<String>,
    /// UID of the EdgeCluster that the token was used for, or that existed when the token was created.
    pub edge_cluster: Option<String>,
    /// UID of the cluster on which the token was used.
    pub cluster_uid: Option<String>,
    /// When the API server created its Secret.
    pub created: Timestamp,
    pub used_at: Option<Timestamp>,
}

impl Record {
    /// Reads a Secret; `None` if it is not a token.
    pub fn read(object: &Secret) -> Option<Self> {
        if object.metadata.labels.as_ref()?.get(LABEL)? != "true" {
            return None;
        }
        let data = object.data.as_ref()?;
        let text = |key| text(data, key);
        // The author of the Secret sets `expires`, but the API server sets the creation time.
        let created = object.metadata.creation_timestamp.as_ref()?.0;
        let latest = created.saturating_add(LONGEST_LIFE).ok()?;
        let expires: Timestamp = text(EXPIRES_KEY)?.parse().ok()?;
        Some(Record {
            cluster: text(CLUSTER_KEY)?,
            secret_sha256: text(DIGEST_KEY)?,
            expires: expires.min(latest),
            // An unreadable user still means that the token is used.
            used_by: data
                .get(USED_BY_KEY)
                .map(|value| String::from_utf8_lossy(&value.0).into_owned()),
            edge_cluster: text(EDGE_CLUSTER_KEY),
            cluster_uid: text(CLUSTER_UID_KEY),
            created,
            used_at: text(USED_AT_KEY).and_then(|at| at.parse().ok()),
        })
    }
}

/// The caller that presents a token.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// Digest of the caller's public key.
    pub key: &'a str,
    /// UID of the cluster that the caller reports.
    pub cluster_uid: &'a str,
}

impl Caller<'_> {
    /// Records in the token's Secret that this caller used it for an EdgeCluster.
    pub fn mark(self, token: &mut Secret, edge_cluster_uid: &str, now: Timestamp) {
        token.data.get_or_insert_default().extend([
            entry(USED_BY_KEY, self.key),
            entry(USED_AT_KEY, &now.to_string()),
            entry(EDGE_CLUSTER_KEY, edge_cluster_uid),
            entry(CLUSTER_UID_KEY, self.cluster_uid),
        ]);
    }
}

/// A new token.
#[derive(Clone, PartialEq, Eq)]
pub struct NewToken {
    /// The text for the bundle.
    pub token: String,
    pub expires: Timestamp,
}

impl fmt::Debug for NewToken {
    /// Omits the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewToken")
            .field("expires", &self.expires)
            .finish_non_exhaustive()
    }
}

/// Creates a token for `cluster`. Returns the Secret, which the caller must create, and the text for the bundle. With
/// `edge_cluster_uid`, the token is invalid for later EdgeClusters of that name.
pub fn new(
    cluster: &str,
    edge_cluster_uid: Option<&str>,
    life: Duration,
    now: Timestamp,
    random: (&[u8; 8], &[u8; 32]),
) -> (Secret, NewToken) {
    let (name, secret) = (hex(random.0), hex(random.1));
    // Whole seconds, as in the bundle.
    let expires = now.saturating_add(life).unwrap_or(Timestamp::MAX);
    let expires = Timestamp::from_second(expires.as_second()).unwrap_or(expires);
    let labels = [(LABEL, "true"), (MEMBER_LABEL, cluster)];
    let data = [
        entry(CLUSTER_KEY, cluster),
        entry(DIGEST_KEY, &sha256_hex(secret.as_bytes())),
        entry(EXPIRES_KEY, &expires.to_string()),
    ];
    let edge_cluster = edge_cluster_uid.map(|uid| entry(EDGE_CLUSTER_KEY, uid));
    let object = Secret {
        metadata: ObjectMeta {
            name: Some(format!("{NAME_PREFIX}{name}")),
            labels: Some(
                labels
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .into(),
            ),
            ..ObjectMeta::default()
        },
        data: Some(data.into_iter().chain(edge_cluster).collect()),
        ..Secret::default()
    };
    let token = format!("{name}.{secret}");
    (object, NewToken { token, expires })
}

/// Returns the part of a token that identifies it and is not secret. Returns `None` for a malformed token.
pub fn public_part(token: &str) -> Option<&str> {
    let (name, _secret) = token.split_once('.').filter(|_| is_token(token))?;
    Some(name)
}

fn text(data: &BTreeMap<String, ByteString>, key: &str) -> Option<String> {
    let value = std::str::from_utf8(&data.get(key)?.0).ok()?.trim();
    (!value.is_empty()).then(|| value.to_owned())
}

fn entry(key: &str, value: &str) -> (String, ByteString) {
    (key.to_owned(), ByteString(value.as_bytes().to_vec()))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    const SECRET: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn token(used: bool) -> Secret {
        let life = Duration::from_secs(900);
        let (mut object, _) = new("edge-1", Some("uid"), life, at(100), (&[1; 8], &[2; 32]));
        object.metadata.creation_timestamp = Some(Time(at(100)));
        if used {
            let caller = Caller {
                key: "a",
                cluster_uid: "here",
            };
            caller.mark(&mut object, "uid-2", at(500));
        }
        object
    }

    #[test]
    fn public_part_is_extracted_from_valid_tokens_only() {
        let token = format!("{}.{SECRET}", "a".repeat(16));
        assert_eq!(public_part(&token), Some(&*"a".repeat(16)));
        for wrong in ["", ".", "a.b", SECRET, "a\nb.c"] {
            assert_eq!(public_part(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn token_secret_reads_back_unchanged() {
        let unused = Record {
            cluster: "edge-1".to_owned(),
            secret_sha256: sha256_hex("02".repeat(32).as_bytes()),
            expires: at(1000),
            used_by: None,
            edge_cluster: Some("uid".to_owned()),
            cluster_uid: None,
            created: at(100),
            used_at: None,
        };
        let used = Record {
            used_by: Some("a".to_owned()),
            edge_cluster: Some("uid-2".to_owned()),
            cluster_uid: Some("here".to_owned()),
            used_at: Some(at(500)),
            ..unused.clone()
        };
        assert_eq!(Record::read(&token(false)), Some(unused));
        assert_eq!(Record::read(&token(true)), Some(used));
    }

    #[test]
    fn incomplete_token_secret_is_rejected() {
        let good = token(false);
        for key in [CLUSTER_KEY, DIGEST_KEY, EXPIRES_KEY] {
            let mut object = good.clone();
            let data = object.data.as_mut().unwrap();
            data.insert(key.to_owned(), ByteString(b" ".to_vec()));
            assert_eq!(Record::read(&object), None, "{key}");
            object.data.as_mut().unwrap().remove(key);
            assert_eq!(Record::read(&object), None, "{key}");
        }
        let mut unlabelled = good;
        unlabelled.metadata.labels = None;
        assert_eq!(Record::read(&unlabelled), None);
        let mut garbled = token(true);
        let data = garbled.data.as_mut().unwrap();
        data.insert(USED_BY_KEY.to_owned(), ByteString(vec![0xff]));
        assert!(Record::read(&garbled).unwrap().used_by.is_some());
    }

    #[test]
    fn a_token_is_not_printed() {
        let (_, made) = new("edge-1", None, LONGEST_LIFE, at(0), (&[1; 8], &[2; 32]));
        assert_eq!(
            made.token,
            format!("{}.{}", "01".repeat(8), "02".repeat(32))
        );
        assert!(!format!("{made:?}").contains(&made.token));
    }
}
