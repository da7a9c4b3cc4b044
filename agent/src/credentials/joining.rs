//! Joins the fleet with the stored identity, or enrolls with the join bundle.

use std::sync::Arc;

use anyhow::bail;
use krypton_runtime::cluster::ClusterIdentity;
use krypton_runtime::net::Network;
use krypton_runtime::retry::retry_until_ready;
use krypton_types::error_chain::chain;
use krypton_types::join_bundle::JoinBundle;
use kube::Client;
use tokio_util::sync::CancellationToken;

use super::enrollment::{self, EnrollError};
use super::identity::{Enrolled, Identity};
use super::join::{self, JoinError};
use super::store::{self, IdentityError, Store, StoredIdentity};
use crate::args::BundleSources;

/// Inputs of joining.
pub(crate) struct JoinInputs<'a> {
    /// Value of the flag `--hub`.
    pub(crate) hub: &'a [String],
    pub(crate) bundle_sources: BundleSources,
    pub(crate) client: &'a Client,
    pub(crate) store: &'a Store,
    pub(crate) cluster: &'a ClusterIdentity,
    pub(crate) network: &'a Arc<dyn Network>,
}

/// Maximum number of attempts if other replicas write the identity at the same time.
const JOIN_ATTEMPTS_MAX: usize = 5;

/// The result of one attempt to join.
enum JoinOutcome {
    Joined(Box<(StoredIdentity, Enrolled)>),
    /// Another replica has written the identity, which must be read again.
    Conflict,
    Stopped,
}

/// Returns the identity with a certificate. Enrolls with the join bundle if the certificate is missing. Replicas that
/// join with one bundle share the first stored key and its certificate.
pub(crate) async fn load_or_enroll(
    inputs: &JoinInputs<'_>,
    stop: &CancellationToken,
) -> anyhow::Result<Option<(StoredIdentity, Enrolled)>> {
    for _ in 0..JOIN_ATTEMPTS_MAX {
        match join_once(inputs, stop).await? {
            JoinOutcome::Joined(joined) => return Ok(Some(*joined)),
            JoinOutcome::Stopped => return Ok(None),
            JoinOutcome::Conflict => {
                tracing::info!("another replica wrote the identity; reading it again");
            }
        }
    }
    bail!(
        "the identity in Secret {namespace}/{} changed during every attempt; stop the other writer and retry",
        store::SECRET,
        namespace = inputs.bundle_sources.namespace,
    )
}

async fn join_once(
    inputs: &JoinInputs<'_>,
    stop: &CancellationToken,
) -> anyhow::Result<JoinOutcome> {
    let JoinInputs {
        bundle_sources,
        client,
        store,
        ..
    } = inputs;
    let reading = retry_identity(stop, async || store.read().await);
    let Some(stored) = reading.await? else {
        return Ok(JoinOutcome::Stopped);
    };
    let current = stored
        .as_ref()
        .and_then(|stored| stored.identity.enrolled.clone());
    let bundle = if current.is_some() {
        // An agent that has joined needs the bundle only to join again.
        match bundle_sources.load(client).await {
            Ok(bundle) => Some(bundle),
            Err(JoinError::Missing { .. }) => None,
            Err(error) => {
                tracing::warn!(error = %chain(&error), "ignoring the join bundle; this cluster has already joined");
                None
            }
        }
    } else {
        let loading = retry_until_ready(
            "the join bundle",
            stop,
            JoinError::is_retryable,
            async || bundle_sources.load(client).await,
        );
        match loading.await? {
            None => return Ok(JoinOutcome::Stopped),
            bundle => bundle,
        }
    };
    let namespace = &bundle_sources.namespace;
    let Some(bundle) = join::bundle_to_enroll(current.as_ref(), bundle, namespace)? else {
        return Ok(match stored.zip(current) {
            Some(joined) => JoinOutcome::Joined(Box::new(joined)),
            None => JoinOutcome::Conflict,
        });
    };
    // A key is created only for a usable bundle, and stored before it is sent.
    let stored = match stored {
        Some(stored) => stored,
        None => match retry_identity(stop, async || store.load().await).await? {
            Some(stored) if stored.identity.enrolled.is_some() => {
                return Ok(JoinOutcome::Conflict);
            }
            Some(stored) => stored,
            None => return Ok(JoinOutcome::Stopped),
        },
    };
    let result = enroll_with_retry(inputs, &bundle, &stored.identity, stop).await;
    let enrolled = match (result, current) {
        (Ok(Some(enrolled)), _) => enrolled,
        (Ok(None), _) => return Ok(JoinOutcome::Stopped),
        (Err(error), Some(current)) => {
            tracing::error!(error = %chain(&error),
                "failed to join again; keeping the current identity");
            return Ok(JoinOutcome::Joined(Box::new((stored, current))));
        }
        // Another replica may have used the token with a key that replaced ours.
        (Err(error), None) => {
            let reading = retry_identity(stop, async || store.read().await);
            return match reading.await? {
                Some(Some(reread)) if reread.identity.enrolled.is_some() => {
                    Ok(JoinOutcome::Conflict)
                }
                Some(_) => Err(error.into()),
                None => Ok(JoinOutcome::Stopped),
            };
        }
    };
    tracing::info!(cluster = %enrolled.membership.cluster, not_after = %enrolled.not_after, "enrolled");
    let identity = Identity {
        enrolled: Some(enrolled),
        ..stored.identity.clone()
    };
    let writing = retry_identity(stop, async || {
        store.replace(stored.clone(), identity.clone()).await
    });
    Ok(match writing.await? {
        None => JoinOutcome::Stopped,
        Some(stored) => match stored.identity.enrolled.clone() {
            Some(enrolled) => JoinOutcome::Joined(Box::new((stored, enrolled))),
            None => JoinOutcome::Conflict,
        },
    })
}

/// Repeats an access to the stored identity while its error may pass. Returns `None` if the agent stops first.
async fn retry_identity<T, F: Future<Output = Result<T, IdentityError>>>(
    stop: &CancellationToken,
    access: impl Fn() -> F,
) -> Result<Option<T>, IdentityError> {
    retry_until_ready("the identity", stop, IdentityError::is_retryable, access).await
}

/// Enrolls. An agent that has joined before tries once: it can work without the hub.
async fn enroll_with_retry(
    inputs: &JoinInputs<'_>,
    bundle: &JoinBundle,
    identity: &Identity,
    stop: &CancellationToken,
) -> Result<Option<Enrolled>, EnrollError> {
    let is_new = identity.enrolled.is_none();
    let is_retryable = |error: &EnrollError| is_new && error.is_retryable();
    retry_until_ready("enrollment", stop, is_retryable, async || {
        let addresses = addresses(inputs.hub, &bundle.addresses);
        let uid = &inputs.cluster.uid;
        enrollment::enroll(bundle, addresses, &identity.key, uid, inputs.network).await
    })
    .await
}

/// Returns the addresses of the flag, or without the flag the hub's addresses.
pub(crate) fn addresses(hub: &[String], known: &[String]) -> Vec<String> {
    let addresses = if hub.is_empty() { known } else { hub };
    addresses.to_vec()
}
