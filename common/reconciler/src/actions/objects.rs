//! Finds the kind of a release's object on the cluster, and whether Helm's marks assign the object to the release.

use std::collections::BTreeMap;

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
    let text = |map: &Option<BTreeMap<String, String>>, key: &str| {
        map.as_ref().and_then(|map| map.get(key)).cloned()
    };
    let annotation = |key: &str| text(&object.annotations, key);
    text(&object.labels, "app.kubernetes.io/managed-by").as_deref() == Some("Helm")
        && annotation("meta.helm.sh/release-name").as_ref() == Some(&release.name)
        && annotation("meta.helm.sh/release-namespace").as_ref() == Some(&release.namespace)
}
