//! Joins the fleet with the stored identity, or enrolls with the join bundle.

use std::sync::Arc;

use anyhow::bail;
use krypton_runtime::cluster::Cluster;
use krypton_runtime::net::Network;
use krypton_runtime::retry::retry_until_ready;
use krypton_types::error_chain::chain;
use krypton_types::join_bundle::JoinBundle;
use kube::Client;
use tokio_util::sync::CancellationToken;

use super::enrollment::{self, EnrollError};
use super::join::{self, JoinError, Places, Start};
use super::store::{self, Enrolled, Identity, IdentityError, Kept, Store};

/// Inputs of joining.
pub struct Joining<'a> {
    /// Value of the flag `--hub`.
    pub hub: &'a [String],
    pub places: Places,
    pub client: &'a Client,
    pub store: &'a Store,
    pub cluster: &'a Cluster,
    pub network: &'a Arc<dyn Network>,
}

impl std::fmt::Debug for Joining<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Joining").finish_non_exhaustive()
    }
}

/// Maximum number of attempts if other replicas write the identity at the same time.
const JOIN_TRIES: usize = 5;

/// The result of one attempt to join.
enum Joined {
    As(Box<(Kept, Enrolled)>),
    /// Another replica has written the identity, which must be read again.
    Overtaken,
    Stopped,
}

/// Returns the identity with a certificate. Enrolls with the join bundle if the certificate is missing. Replicas that
/// join with one bundle share the first stored key and its certificate.
pub async fn joined(
    joining: &Joining<'_>,
    stop: &CancellationToken,
) -> anyhow::Result<Option<(Kept, Enrolled)>> {
    for _ in 0..JOIN_TRIES {
        match join_once(joining, stop).await? {
            Joined::As(joined) => return Ok(Some(*joined)),
            Joined::Stopped => return Ok(None),
            Joined::Overtaken => {
                tracing::info!("another replica wrote the identity; reading it again");
            }
        }
    }
    bail!(
        "the identity in Secret {namespace}/{} changed during every attempt; stop the other writer and retry",
        store::SECRET,
        namespace = joining.places.namespace,
    )
}

async fn join_once(joining: &Joining<'_>, stop: &CancellationToken) -> anyhow::Result<Joined> {
    let Joining {
        places,
        client,
        store,
        ..
    } = joining;
    let read = async || {
        retry_until_ready("the identity", stop, IdentityError::may_pass, async || {
            store.read().await
        })
        .await
    };
    let Some(kept) = read().await? else {
        return Ok(Joined::Stopped);
    };
    let before = kept
        .as_ref()
        .and_then(|kept| kept.identity.enrolled.clone());
    let bundle = if before.is_some() {
        // An agent that has joined needs the bundle only to join again.
        places.find(client).await
    } else {
        let found = retry_until_ready("the join bundle", stop, JoinError::may_pass, async || {
            places.find(client).await
        });
        match found.await {
            Ok(Some(bundle)) => Ok(bundle),
            Ok(None) => return Ok(Joined::Stopped),
            Err(error) => Err(error),
        }
    };
    let bundle = match bundle {
        Ok(bundle) => Some(bundle),
        Err(JoinError::Nowhere { .. }) if before.is_some() => None,
        Err(error) if before.is_some() => {
            tracing::warn!(error = %chain(&error), "ignoring the join bundle; this cluster has already joined");
            None
        }
        Err(error) => return Err(error.into()),
    };
    let start = join::decide(before.as_ref(), bundle.as_ref(), &places.namespace)?;
    let bundle = match (start, bundle) {
        (Start::Enroll, Some(bundle)) => bundle,
        _ => {
            return Ok(match kept.zip(before) {
                Some(joined) => Joined::As(Box::new(joined)),
                None => Joined::Overtaken,
            });
        }
    };
    // A key is created only for a usable bundle, and stored before it is sent.
    let kept = match kept {
        Some(kept) => kept,
        None => {
            let made =
                retry_until_ready("the identity", stop, IdentityError::may_pass, async || {
                    store.load().await
                });
            match made.await? {
                Some(kept) if kept.identity.enrolled.is_some() => return Ok(Joined::Overtaken),
                Some(kept) => kept,
                None => return Ok(Joined::Stopped),
            }
        }
    };
    let asked = ask(joining, &bundle, &kept.identity, stop).await;
    let enrolled = match (asked, before) {
        (Ok(Some(enrolled)), _) => enrolled,
        (Ok(None), _) => return Ok(Joined::Stopped),
        (Err(error), Some(before)) => {
            tracing::error!(error = %chain(&error),
                "failed to join again; keeping the current identity");
            return Ok(Joined::As(Box::new((kept, before))));
        }
        // Another replica may have used the token with a key that replaced ours.
        (Err(error), None) => {
            return match read().await? {
                Some(Some(now)) if now.identity.enrolled.is_some() => Ok(Joined::Overtaken),
                Some(_) => Err(error.into()),
                None => Ok(Joined::Stopped),
            };
        }
    };
    tracing::info!(cluster = %enrolled.cluster, not_after = %enrolled.not_after, "enrolled");
    let identity = Identity {
        enrolled: Some(enrolled),
        ..kept.identity.clone()
    };
    let writing = retry_until_ready("the identity", stop, IdentityError::may_pass, async || {
        store.keep(kept.clone(), identity.clone()).await
    });
    Ok(match writing.await? {
        None => Joined::Stopped,
        Some(kept) => match kept.identity.enrolled.clone() {
            Some(enrolled) => Joined::As(Box::new((kept, enrolled))),
            None => Joined::Overtaken,
        },
    })
}

/// Enrolls. An agent that has joined before tries once: it can work without the hub.
async fn ask(
    joining: &Joining<'_>,
    bundle: &JoinBundle,
    identity: &Identity,
    stop: &CancellationToken,
) -> Result<Option<Enrolled>, EnrollError> {
    let new = identity.enrolled.is_none();
    let may_pass = |error: &EnrollError| new && error.may_pass();
    retry_until_ready("enrollment", stop, may_pass, async || {
        let addresses = addresses(joining.hub, &bundle.addresses);
        let uid = &joining.cluster.uid;
        enrollment::enroll(bundle, addresses, &identity.key, uid, joining.network).await
    })
    .await
}

/// Returns the addresses of the flag, or without the flag the hub's addresses.
pub fn addresses(hub: &[String], known: &[String]) -> Vec<String> {
    if hub.is_empty() {
        known.to_vec()
    } else {
        hub.to_vec()
    }
}
