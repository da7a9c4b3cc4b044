//! Validates join tokens, and reads, marks and deletes their Secrets.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::bound::{ListError, list_all};
use krypton_runtime::call::{ApiError, call, if_unchanged};
use krypton_types::fingerprint::sha256_hex;
use krypton_types::join_bundle::is_token;
use krypton_types::join_token::{Caller, LABEL, MEMBER_LABEL, NAME_PREFIX, Record};
use kube::Client;
use kube::api::{Api, ListParams, PostParams};
use thiserror::Error;
use tonic::Status;
use zeroize::Zeroizing;

use crate::leader::Leader;

/// Time for which an expired token is kept, because a late user must get a helpful error.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// A string as long as a digest that no known secret has.
const NO_DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";
const PAGE_SIZE: u32 = 200;
/// Attempts to write a token, because other writers may cause conflicts.
const TRIES: usize = 3;

#[derive(Debug, Error)]
pub enum TokenError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    List(#[from] ListError),
    #[error("Secret {namespace}/{name} changes constantly; find out which client writes it")]
    TooManyConflicts { namespace: String, name: String },
    #[error("{}", .0.message())]
    NotLeading(Status),
}

/// How a key uses a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenUse {
    /// The token is unused; this key uses it from now on.
    First,
    /// This key has used the token before.
    Again,
}

/// Why a token is rejected. Only a caller with the right secret gets a reason other than `Unknown`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TokenRefusal {
    #[error(
        "unknown join token; run 'kubectl krypton join NAME' on this hub's home cluster and use the new bundle"
    )]
    Unknown,
    #[error(
        "the join token of cluster {cluster} expired at {expires}; run 'kubectl krypton join {cluster}' again"
    )]
    Expired { cluster: String, expires: Timestamp },
    #[error(
        "the join token of cluster {cluster} was used already by another key; run 'kubectl krypton join {cluster}' again, and find out who has used it if that was not you"
    )]
    Used { cluster: String },
    #[error(
        "the join token of cluster {cluster} was used already on another cluster; run 'kubectl krypton join {cluster}' again, and find out who has used it if that was not you"
    )]
    OtherCluster { cluster: String },
    #[error(
        "EdgeCluster {cluster} has been deleted since the join token was issued; run 'kubectl krypton join {cluster}' again"
    )]
    Gone { cluster: String },
    #[error(
        "the join token of cluster {cluster} is void, because a newer one was used; run 'kubectl krypton join {cluster}' again"
    )]
    Superseded { cluster: String },
}

impl TokenRefusal {
    /// Returns the action of the event.
    pub fn event_action(&self) -> &'static str {
        match self {
            Self::Unknown => "TokenUnknown",
            Self::Expired { .. } => "TokenExpired",
            Self::Used { .. } => "TokenUsed",
            Self::OtherCluster { .. } => "TokenUsedElsewhere",
            Self::Gone { .. } | Self::Superseded { .. } => "TokenRevoked",
        }
    }
}

/// Checks `secret`, which `caller` presents, in constant time: the duration depends neither on the wrong part of
/// a secret nor on whether the token exists.
pub fn check(
    record: Option<&Record>,
    secret: &str,
    now: Timestamp,
    caller: Caller<'_>,
) -> Result<TokenUse, TokenRefusal> {
    let expected = record.map_or(NO_DIGEST, |record| &record.secret_sha256);
    let digest = sha256_hex(secret.as_bytes());
    let comparison =
        aws_lc_rs::constant_time::verify_slices_are_equal(expected.as_bytes(), digest.as_bytes());
    let (Some(record), Ok(())) = (record, comparison) else {
        return Err(TokenRefusal::Unknown);
    };
    let cluster = record.cluster.clone();
    if record.expires <= now {
        let expires = record.expires;
        return Err(TokenRefusal::Expired { cluster, expires });
    }
    match (&record.used_by, &record.cluster_uid) {
        (None, _) => Ok(TokenUse::First),
        (Some(key), _) if key != caller.key => Err(TokenRefusal::Used { cluster }),
        (Some(_), Some(recorded)) if recorded != caller.cluster_uid => {
            Err(TokenRefusal::OtherCluster { cluster })
        }
        (Some(_), _) => Ok(TokenUse::Again),
    }
}

/// A presented token and its record on the home cluster.
#[derive(Clone)]
pub struct PresentedToken {
    secret: Zeroizing<String>,
    object: Option<(Secret, Record)>,
}

impl fmt::Debug for PresentedToken {
    /// Formats without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PresentedToken")
            .field("record", &self.record())
            .finish_non_exhaustive()
    }
}

impl PresentedToken {
    pub fn record(&self) -> Option<&Record> {
        self.object.as_ref().map(|(_, record)| record)
    }

    pub fn check(&self, now: Timestamp, caller: Caller<'_>) -> Result<TokenUse, TokenRefusal> {
        check(self.record(), &self.secret, now, caller)
    }
}

/// Reads the record of `token` from the home cluster. A malformed token has none.
pub async fn look_up(
    client: Client,
    namespace: &str,
    token: &str,
) -> Result<PresentedToken, TokenError> {
    let mut presented = PresentedToken {
        secret: Zeroizing::new(String::new()),
        object: None,
    };
    let Some((name, secret)) = token.split_once('.').filter(|_| is_token(token)) else {
        return Ok(presented);
    };
    presented.secret = Zeroizing::new(secret.to_owned());
    let api: Api<Secret> = Api::namespaced(client, namespace);
    presented.object = get(&api, namespace, &format!("{NAME_PREFIX}{name}")).await?;
    Ok(presented)
}

/// Marks a token as used by a key for an EdgeCluster. If two keys race, one succeeds and the other is rejected.
pub async fn redeem(
    client: Client,
    leader: &Leader,
    namespace: &str,
    presented: PresentedToken,
    caller: Caller<'_>,
    edge_cluster_uid: &str,
    now: Timestamp,
) -> Result<Result<(), TokenRefusal>, TokenError> {
    let api: Api<Secret> = Api::namespaced(client, namespace);
    let PresentedToken { secret, mut object } = presented;
    for _ in 0..TRIES {
        let record = object.as_ref().map(|(_, record)| record);
        match check(record, &secret, now, caller) {
            Ok(TokenUse::First) => {}
            Ok(TokenUse::Again) => return Ok(Ok(())),
            Err(refusal) => return Ok(Err(refusal)),
        }
        let Some((mut used, _)) = object else {
            return Ok(Err(TokenRefusal::Unknown));
        };
        leader.ensure_writing().map_err(TokenError::NotLeading)?;
        caller.mark(&mut used, edge_cluster_uid, now);
        let name = used.metadata.name.clone().unwrap_or_default();
        // The object carries the resourceVersion of the read.
        let params = PostParams::default();
        let request = api.replace(&name, &params, &used);
        let attempt = format!("marking Secret {namespace}/{name} as used");
        match call(attempt, request).await {
            Ok(_) => return Ok(Ok(())),
            Err(error) if matches!(error.code(), Some(404 | 409)) => {
                object = get(&api, namespace, &name).await?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(TokenError::TooManyConflicts {
        namespace: namespace.to_owned(),
        name: object
            .and_then(|(object, _)| object.metadata.name)
            .unwrap_or_default(),
    })
}

/// Returns all tokens of a member.
///
/// # Errors
/// Fails if the tokens cannot be listed.
pub async fn list_for_member(
    client: Client,
    namespace: &str,
    cluster: &str,
) -> Result<Vec<Record>, TokenError> {
    let labels = format!("{LABEL}=true,{MEMBER_LABEL}={cluster}");
    let tokens = list(client, namespace, &labels).await?;
    Ok(tokens.iter().filter_map(Record::read).collect())
}

/// Whether an agent has used a newer token of the member. Otherwise, a stolen token would void the newer key. The API
/// server's clock decides, because the clocks of hubs differ.
pub fn is_superseded(token: &Record, others: &[Record]) -> bool {
    others.iter().any(|other| {
        other.used_by.is_some() && other.cluster == token.cluster && other.created > token.created
    })
}

/// Whether a later deletion of the EdgeCluster voids this unused token. Another token shows that: it was used
/// after this one was created, for an EdgeCluster that is gone.
///
/// `others` must be read before `current_uid`. Otherwise the EdgeCluster of a use after that read would seem to
/// be gone.
pub fn is_revoked(token: &Record, others: &[Record], current_uid: Option<&str>) -> bool {
    others.iter().any(|other| {
        let used_since = other.used_at.is_some_and(|at| at >= token.created);
        used_since && other.cluster == token.cluster && other.edge_cluster.as_deref() != current_uid
    })
}

/// Deletes the tokens that expired more than a day ago, and returns their number.
pub async fn delete_expired(
    client: Client,
    namespace: &str,
    now: Timestamp,
) -> Result<usize, TokenError> {
    let tokens = list(client.clone(), namespace, &format!("{LABEL}=true")).await?;
    let api: Api<Secret> = Api::namespaced(client, namespace);
    let mut deleted = 0;
    for object in tokens.iter().filter(|object| is_deletable(object, now)) {
        deleted += usize::from(delete(&api, namespace, object).await?);
    }
    Ok(deleted)
}

async fn list(client: Client, namespace: &str, labels: &str) -> Result<Vec<Secret>, TokenError> {
    let api: Api<Secret> = Api::namespaced(client, namespace);
    let params = ListParams::default().labels(labels).limit(PAGE_SIZE);
    let attempt = format!("listing join tokens in the namespace {namespace}");
    Ok(list_all(&api, &attempt, params).await?)
}

async fn get(
    api: &Api<Secret>,
    namespace: &str,
    name: &str,
) -> Result<Option<(Secret, Record)>, TokenError> {
    let attempt = format!("reading Secret {namespace}/{name}");
    let Some(object) = call(attempt, api.get_opt(name)).await? else {
        return Ok(None);
    };
    let record = Record::read(&object);
    if record.is_none() {
        tracing::warn!(
            secret = %format_args!("{namespace}/{name}"),
            problem = "its label, cluster, secret-sha256 or expires is missing or invalid",
            "ignoring an invalid join token Secret; delete it"
        );
    }
    Ok(record.map(|record| (object, record)))
}

/// Deletes the object if it is unchanged since the list. Returns whether this call deleted it.
async fn delete(api: &Api<Secret>, namespace: &str, object: &Secret) -> Result<bool, TokenError> {
    let name = object.metadata.name.clone().unwrap_or_default();
    let params = if_unchanged(&object.metadata);
    let request = api.delete(&name, &params);
    match call(format!("deleting Secret {namespace}/{name}"), request).await {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.code(), Some(404 | 409)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether a token expired more than a day ago. Returns false for an unreadable token, which the administrator
/// must inspect.
fn is_deletable(object: &Secret, now: Timestamp) -> bool {
    Record::read(object).is_some_and(|record| {
        record
            .expires
            .saturating_add(RETENTION)
            .is_ok_and(|end| end < now)
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use krypton_types::join_token;

    use super::*;

    const SECRET: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn record(used_by: Option<&str>) -> Record {
        Record {
            cluster: "edge-1".to_owned(),
            secret_sha256: sha256_hex(SECRET.as_bytes()),
            expires: at(1000),
            used_by: used_by.map(str::to_owned),
            edge_cluster: None,
            cluster_uid: used_by.map(|_| "here".to_owned()),
            created: at(0),
            used_at: used_by.map(|_| at(500)),
        }
    }

    fn caller(key: &str) -> Caller<'_> {
        let cluster_uid = "here";
        Caller { key, cluster_uid }
    }

    fn object(life: Duration) -> Secret {
        let random = (&[1; 8], &[2; 32]);
        let (mut object, _) = join_token::new("edge-1", None, life, at(0), random);
        object.metadata.creation_timestamp = Some(Time(at(0)));
        object
    }

    #[test]
    fn a_token_is_good_for_one_key_only() {
        let check = |used_by, key| check(Some(&record(used_by)), SECRET, at(999), caller(key));
        assert_eq!(check(None, "a"), Ok(TokenUse::First));
        assert_eq!(check(Some("a"), "a"), Ok(TokenUse::Again));
        let message = check(Some("a"), "b").unwrap_err().to_string();
        assert!(
            message.contains("edge-1 was used already by another key"),
            "{message}"
        );
    }

    #[test]
    fn used_token_is_valid_on_same_cluster_only() {
        let check = |record: &Record, cluster_uid| {
            let caller = Caller {
                key: "a",
                cluster_uid,
            };
            check(Some(record), SECRET, at(999), caller)
        };
        let mut used = record(Some("a"));
        assert_eq!(check(&used, "here"), Ok(TokenUse::Again));
        let message = check(&used, "there").unwrap_err().to_string();
        for word in ["edge-1", "kubectl krypton join"] {
            assert!(message.contains(word), "{message}");
        }
        assert!(!message.contains("UID"), "{message}");
        assert_eq!(check(&record(None), "there"), Ok(TokenUse::First));
        // An older hub does not record the cluster.
        used.cluster_uid = None;
        assert_eq!(check(&used, "there"), Ok(TokenUse::Again));
    }

    #[test]
    fn newer_used_token_voids_older_ones() {
        let created_at = |second, used_by| Record {
            created: at(second),
            ..record(used_by)
        };
        for (token, other, superseded) in [
            (created_at(0, None), created_at(1, Some("a")), true),
            (created_at(0, Some("b")), created_at(1, Some("a")), true),
            (created_at(0, Some("b")), created_at(1, None), false),
            (created_at(1, None), created_at(0, Some("a")), false),
            (created_at(1, Some("a")), created_at(1, Some("a")), false),
        ] {
            assert_eq!(
                is_superseded(&token, std::slice::from_ref(&other)),
                superseded,
                "{other:?}"
            );
            let of_other_member = Record {
                cluster: "edge-2".to_owned(),
                ..other
            };
            assert!(!is_superseded(&token, &[of_other_member]));
        }
    }

    #[test]
    fn deleted_edge_cluster_revokes_unused_tokens() {
        let used_for = |uid: &str| Record {
            edge_cluster: Some(uid.to_owned()),
            ..record(Some("a"))
        };
        let created_at = |second| Record {
            created: at(second),
            ..record(None)
        };
        for (other, token, current_uid, revoked) in [
            (used_for("1"), created_at(0), None, true),
            (used_for("1"), created_at(0), Some("2"), true),
            (used_for("1"), created_at(0), Some("1"), false),
            // Created after the use of the other token, possibly after the deletion.
            (used_for("1"), created_at(501), None, false),
            (created_at(0), created_at(0), None, false),
        ] {
            let others = [other.clone()];
            assert_eq!(
                is_revoked(&token, &others, current_uid),
                revoked,
                "{other:?}"
            );
            let of_other_member = Record {
                cluster: "edge-2".to_owned(),
                ..other
            };
            assert!(!is_revoked(&token, &[of_other_member], current_uid));
        }
    }

    #[test]
    fn expired_token_is_rejected_even_after_earlier_use() {
        for used_by in [None, Some("a"), Some("b")] {
            let record = record(used_by);
            for late in [1000, 1001] {
                let refused = check(Some(&record), SECRET, at(late), caller("a"));
                assert_eq!(
                    refused.unwrap_err().to_string(),
                    "the join token of cluster edge-1 expired at 1970-01-01T00:16:40Z; run 'kubectl krypton join edge-1' again"
                );
            }
        }
    }

    #[test]
    fn wrong_secret_reveals_nothing_about_token() {
        let unknown = Err(TokenRefusal::Unknown);
        let mut truncated = SECRET.to_owned();
        truncated.pop();
        for used_by in [None, Some("a")] {
            let record = record(used_by);
            for wrong in ["", "x", &truncated, &"0".repeat(64), &record.secret_sha256] {
                for now in [0, 5000] {
                    assert_eq!(check(Some(&record), wrong, at(now), caller("a")), unknown);
                }
            }
        }
        for secret in ["", SECRET] {
            assert_eq!(check(None, secret, at(0), caller("a")), unknown);
        }
    }

    #[test]
    fn forged_token_ends_a_day_after_its_creation() {
        let mut forged = object(Duration::MAX);
        let day = 24 * 3600;
        assert_eq!(Record::read(&forged).unwrap().expires, at(day));
        assert!(is_deletable(&forged, at(2 * day + 1)));
        // An object without a creation timestamp does not come from an API server.
        forged.metadata.creation_timestamp = None;
        assert_eq!(Record::read(&forged), None);
    }

    #[test]
    fn an_expired_token_is_kept_for_a_day() {
        let token = object(Duration::from_secs(1000));
        assert!(!is_deletable(&token, at(1000)));
        assert!(!is_deletable(&token, at(1000 + 24 * 3600)));
        assert!(is_deletable(&token, at(1001 + 24 * 3600)));
        assert!(!is_deletable(&Secret::default(), Timestamp::MAX));
    }

    #[test]
    fn no_secret_is_shown() {
        let presented = PresentedToken {
            secret: Zeroizing::new(SECRET.to_owned()),
            object: None,
        };
        assert!(!format!("{presented:?}").contains(SECRET));
    }
}
