//! Secrets that hold the kubeconfig of a member, for all providers.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{self, Policy, Sanitized};
use kube::Client;
use kube::api::Api;

use super::{Origin, Unresolved};

const DEADLINE: Duration = Duration::from_secs(10);

/// The Secrets of one namespace, or of all for `None`.
pub(crate) fn of(client: &Client, namespace: Option<&str>) -> Api<Secret> {
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Reads the Secret of `origin` again, in the same namespace, because the watch may lag.
pub(super) async fn again(client: &Client, origin: &Origin, name: &str) -> Option<Secret> {
    let api = of(client, Some(origin.namespace.as_deref()?));
    match tokio::time::timeout(DEADLINE, api.get(name)).await {
        Ok(Ok(secret)) => Some(secret),
        Ok(Err(error)) => {
            tracing::debug!(%origin, error = %chain(&error), "reading the Secret again failed");
            None
        }
        Err(_) => None,
    }
}

/// Parses the kubeconfig under `key`. Errors name the key and the Secret, described by `object`. If the key
/// is missing, `missing` completes the error message with the fix.
pub(super) fn kubeconfig(
    secret: &Secret,
    object: &str,
    key: &str,
    missing: &str,
    policy: &Policy,
) -> Result<Arc<Sanitized>, Unresolved> {
    let invalid = |message| Unresolved {
        reason: reason::KUBECONFIG_INVALID,
        message,
    };
    match secret.data.as_ref().and_then(|data| data.get(key)) {
        None => Err(invalid(format!("{object} has no key {key:?}{missing}"))),
        Some(bytes) => kubeconfig::parse(&bytes.0, policy)
            .map(Arc::new)
            .map_err(|error| invalid(format!("{object}, key {key:?}: {}", chain(&error)))),
    }
}
