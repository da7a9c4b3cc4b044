//! Secrets that hold the kubeconfig of a member, for all providers.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::call::call;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{self, Policy, SanitizedKubeconfig};
use kube::Client;

use super::provider::secrets;
use super::{Origin, Unresolved};

/// Reads the Secret of `origin` again, in the same namespace, because the watch may lag.
pub(super) async fn reread(client: &Client, origin: &Origin, name: &str) -> Option<Secret> {
    let api = secrets(client, Some(origin.namespace.as_deref()?));
    let result = call("reading the Secret again", api.get(name)).await;
    result
        .inspect_err(
        |error| tracing::debug!(%origin, error = %chain(error), "still using the last read Secret"),
    )
    .ok()
}

/// Parses the kubeconfig under `key`. Errors name the key and the Secret, described by `object`. If the key
/// is missing, `missing` completes the error message with the fix.
pub(super) fn kubeconfig(
    secret: &Secret,
    object: &str,
    key: &str,
    missing: &str,
    policy: &Policy,
) -> Result<Arc<SanitizedKubeconfig>, Unresolved> {
    let invalid = |message| Unresolved::new(reason::KUBECONFIG_INVALID, message);
    match secret.data.as_ref().and_then(|data| data.get(key)) {
        None => Err(invalid(format!("{object} has no key {key:?}{missing}"))),
        Some(bytes) => kubeconfig::parse(&bytes.0, policy)
            .map(Arc::new)
            .map_err(|error| invalid(format!("{object}, key {key:?}: {}", chain(&error)))),
    }
}
