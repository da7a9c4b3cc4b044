//! Creates and upgrades the CRDs that Krypton needs on a cluster. Never downgrades them.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::Value;
use thiserror::Error;

use crate::call::{ApiError, call};

const SERVED_WITHIN: Duration = Duration::from_secs(20);
/// Field manager of Krypton.
pub const FIELD_MANAGER: &str = "krypton";

#[derive(Debug, Error)]
pub enum CrdError {
    #[error(transparent)]
    Read(#[from] ApiError),
    #[error(
        "CRD {0} is not up to date; an administrator can apply it from the folder crds/ instead"
    )]
    Write(String, #[source] ApiError),
    #[error("CRD {0} is being deleted")]
    Terminating(String),
    #[error("CRD {0} exists, but the API server does not serve it yet")]
    NotServed(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Apply,
    Replace,
    Leave,
}

/// Leaves an equal or newer schema unchanged, regardless of its author.
fn step(found: Option<u32>, exists: bool, ours: u32) -> Step {
    match (exists, found) {
        (false, _) => Step::Apply,
        (true, Some(found)) if found >= ours => Step::Leave,
        (true, _) => Step::Replace,
    }
}

/// Ensures that `wanted` exists and is served.
pub async fn ensure(client: &Client, wanted: &CustomResourceDefinition) -> Result<(), CrdError> {
    let found = find(client, wanted).await?;
    bring_up(client, wanted, found).await
}

/// Upgrades `wanted` if it exists. Does not create it.
pub async fn follow(client: &Client, wanted: &CustomResourceDefinition) -> Result<(), CrdError> {
    match find(client, wanted).await? {
        None => Ok(()),
        found => bring_up(client, wanted, found).await,
    }
}

async fn find(
    client: &Client,
    wanted: &CustomResourceDefinition,
) -> Result<Option<CustomResourceDefinition>, CrdError> {
    let name = wanted.metadata.name.clone().unwrap_or_default();
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    Ok(call(format!("reading CRD {name}"), api.get_opt(&name)).await?)
}

async fn bring_up(
    client: &Client,
    wanted: &CustomResourceDefinition,
    found: Option<CustomResourceDefinition>,
) -> Result<(), CrdError> {
    let name = wanted.metadata.name.clone().unwrap_or_default();
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    if found
        .as_ref()
        .is_some_and(|crd| crd.metadata.deletion_timestamp.is_some())
    {
        return Err(CrdError::Terminating(name));
    }
    let version = found.as_ref().and_then(|found| held(found, wanted));
    let replaced = found.is_some();
    let written = match step(version, found.is_some(), krypton_crds::SCHEMA_VERSION) {
        Step::Leave => found,
        // Not `create`: the charts grant that only for the names of Krypton's CRDs, and a create request
        // carries no name for RBAC.
        Step::Apply => {
            let params = PatchParams::apply(FIELD_MANAGER).force();
            let patch = Patch::Apply(wanted);
            let request = api.patch(&name, &params, &patch);
            Some(write(&name, request).await?)
        }
        // Applying over an older schema would keep removed fields, such as krypton-operator's pattern for
        // condition types. The `resourceVersion` of the old CRD is the precondition.
        Step::Replace => {
            let mut next = wanted.clone();
            if let Some(found) = found {
                next.metadata.resource_version = found.metadata.resource_version;
                next.metadata.finalizers = found.metadata.finalizers;
                let keep = |ours: &mut Option<std::collections::BTreeMap<String, String>>,
                            theirs| {
                    let mut merged: std::collections::BTreeMap<_, _> =
                        Option::unwrap_or_default(theirs);
                    merged.extend(ours.take().unwrap_or_default());
                    *ours = Some(merged);
                };
                keep(&mut next.metadata.labels, found.metadata.labels);
                keep(&mut next.metadata.annotations, found.metadata.annotations);
            }
            let params = PostParams::default();
            let request = api.replace(&name, &params, &next);
            Some(write(&name, request).await?)
        }
    };
    if version.is_some_and(|version| version >= krypton_crds::SCHEMA_VERSION)
        && written.as_ref().is_some_and(established)
    {
        return Ok(());
    }
    let served = async {
        served(client, &api, wanted).await;
        if replaced {
            in_force(client, wanted).await;
        }
    };
    tokio::time::timeout(SERVED_WITHIN, served)
        .await
        .map_err(|_| CrdError::NotServed(name))
}

async fn write<T>(
    name: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, CrdError> {
    let written = call(format!("writing CRD {name}"), request).await;
    written.map_err(|error| CrdError::Write(name.to_owned(), error))
}

/// Returns the schema version of the CRD. If another program applies its schema over Krypton's, the version
/// annotation stays, so compare the content too.
fn held(found: &CustomResourceDefinition, wanted: &CustomResourceDefinition) -> Option<u32> {
    let version = krypton_crds::schema_version(found)?;
    let ours = version == krypton_crds::SCHEMA_VERSION;
    (!ours || own_fields(found) == own_fields(wanted)).then_some(version)
}

fn own_fields(crd: &CustomResourceDefinition) -> Option<BTreeSet<String>> {
    let schema = crd.spec.versions.first()?.schema.as_ref()?;
    fields(&serde_json::to_value(schema.open_api_v3_schema.as_ref()?).ok()?)
}

/// Waits until the API server uses the new schema. For a moment, it still uses the previous one and drops
/// fields that are missing there. The published OpenAPI schema changes together with it.
async fn in_force(client: &Client, wanted: &CustomResourceDefinition) {
    let spec = &wanted.spec;
    let Some(version) = spec.versions.first() else {
        return;
    };
    let ours = own_fields(wanted);
    let path = format!("/openapi/v3/apis/{}/{}", spec.group, version.name);
    loop {
        let Ok(request) = http::Request::get(&path).body(Vec::new()) else {
            return;
        };
        match client.request::<Value>(request).await {
            Ok(published) if published_fields(&published, &spec.names.kind) == ours => return,
            // A process without this permission skips the wait.
            Err(kube::Error::Api(status)) if status.code == 403 => return,
            _ => {}
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns the names of the fields in spec and status.
fn fields(schema: &Value) -> Option<BTreeSet<String>> {
    let of = |part: &str| {
        let fields = schema.pointer(&format!("/properties/{part}/properties"))?;
        let names = fields.as_object()?.keys();
        Some(names.map(|name| format!("{part}.{name}")).collect())
    };
    let mut all: BTreeSet<String> = of("spec")?;
    all.extend(of("status").unwrap_or_default());
    Some(all)
}

fn published_fields(document: &Value, kind: &str) -> Option<BTreeSet<String>> {
    let schemas = document.pointer("/components/schemas")?.as_object()?;
    let is_of = |schema: &&Value| {
        let names = schema["x-kubernetes-group-version-kind"].as_array();
        names.is_some_and(|names| names.iter().any(|name| name["kind"] == *kind))
    };
    fields(schemas.values().find(is_of)?)
}

pub fn established(crd: &CustomResourceDefinition) -> bool {
    let conditions = crd
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_deref());
    conditions
        .unwrap_or_default()
        .iter()
        .any(|condition| condition.type_ == "Established" && condition.status == "True")
}

/// Waits until the objects can be listed. For a moment, the API server returns 404 and 429 for an Established
/// CRD, which would send every watch into its back-off.
async fn served(
    client: &Client,
    api: &Api<CustomResourceDefinition>,
    wanted: &CustomResourceDefinition,
) {
    let spec = &wanted.spec;
    let version = spec
        .versions
        .first()
        .map(|version| version.name.clone())
        .unwrap_or_default();
    let kind = GroupVersionKind::gvk(&spec.group, &version, &spec.names.kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, &spec.names.plural);
    let objects: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let name = wanted.metadata.name.as_deref().unwrap_or_default();
    let mut is_established = false;
    loop {
        if !is_established {
            is_established = matches!(api.get_opt(name).await, Ok(Some(crd)) if established(&crd));
        } else {
            match objects.list_metadata(&ListParams::default().limit(1)).await {
                // A process without this permission gets a clear error from its first list.
                Ok(_) => return,
                Err(kube::Error::Api(status)) if status.code == 403 => return,
                Err(_) => {}
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_schema_is_kept_and_unmarked_is_replaced() {
        assert_eq!(step(None, false, 1), Step::Apply);
        assert_eq!(step(None, true, 1), Step::Replace);
        assert_eq!(step(Some(1), true, 2), Step::Replace);
        assert_eq!(step(Some(2), true, 2), Step::Leave);
        assert_eq!(step(Some(3), true, 2), Step::Leave);
    }

    #[test]
    fn published_openapi_reveals_schema_in_use() {
        let spec = |names: &[&str]| {
            let names = names
                .iter()
                .map(|name| ((*name).to_owned(), serde_json::json!({})));
            let names: serde_json::Map<_, _> = names.collect();
            serde_json::json!({"properties": {"spec": {"properties": names}}})
        };
        let mut tenant = spec(&["workspace", "clusterRef"]);
        tenant["x-kubernetes-group-version-kind"] = serde_json::json!([{"kind": "Tenant"}]);
        let document =
            serde_json::json!({"components": {"schemas": {"a": spec(&[]), "b": tenant}}});
        let published = published_fields(&document, "Tenant");
        assert_eq!(published, fields(&spec(&["clusterRef", "workspace"])));
        assert_ne!(published, fields(&spec(&["clusterRef"])));
        let mut said = spec(&["clusterRef", "workspace"]);
        said["properties"]["status"] = serde_json::json!({"properties": {"phase": {}}});
        assert_ne!(published, fields(&said));
        assert_eq!(published_fields(&document, "TenantList"), None);
    }
}
