//! Finds the kind of a release's object on the cluster, and whether Helm's marks assign the object to the release.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_helm::releases::ObjectId;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_runtime::call::call;
use kube::Client;
use kube::core::{ApiResource, GroupVersionKind};
use kube::discovery::{Scope, pinned_kind};

use super::{ActionResult, transient};

/// Returns the kind of an object and its scope; `None` if the cluster has no such kind.
pub(super) async fn discover_kind(
    client: &Client,
    object: &ObjectId,
) -> ActionResult<Option<(ApiResource, Scope)>> {
    let (group, version) = object
        .api_version
        .split_once('/')
        .unwrap_or(("", &object.api_version));
    let kind = GroupVersionKind::gvk(group, version, &object.kind);
    let discovering = async {
        match pinned_kind(client, &kind).await {
            Ok((resource, capabilities)) => Ok(Some((resource, capabilities.scope))),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            Err(kube::Error::Discovery(_)) => Ok(None),
            Err(error) => Err(error),
        }
    };
    let discovered = call("discovering kinds", discovering).await;
    discovered.map_err(|error| transient(&error))
}

/// Whether Helm's marks assign the object to the release.
pub(super) fn belongs_to(object: &ObjectMeta, release: &ReleaseKey) -> bool {
    let labels = object.labels.as_ref();
    let manager = labels.and_then(|labels| labels.get("app.kubernetes.io/managed-by"));
    manager.is_some_and(|manager| manager == "Helm")
        && annotation(object, "meta.helm.sh/release-name") == Some(&*release.name)
        && annotation(object, "meta.helm.sh/release-namespace") == Some(&*release.namespace)
}

pub(super) fn annotation<'a>(object: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    object.annotations.as_ref()?.get(key).map(String::as_str)
}
