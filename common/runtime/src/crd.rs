//! Creates and upgrades the CRDs that Krypton needs on a cluster. Never downgrades them.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Client, ResourceExt as _};
use serde_json::Value;
use thiserror::Error;

use crate::call::{ApiError, call};

/// Time within which the API server serves a CRD.
pub const SERVED_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
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

/// Returns whether a CRD keeps its schema, regardless of its author: it is as new as ours, or newer.
fn is_current(version: Option<u32>, ours: u32) -> bool {
    version.is_some_and(|version| version >= ours)
}

/// Ensures that `wanted` exists and is served.
pub async fn ensure(client: &Client, wanted: &CustomResourceDefinition) -> Result<(), CrdError> {
    let existing = find(client, wanted).await?;
    create_or_upgrade(client, wanted, existing).await
}

/// Upgrades `wanted` if it exists. Does not create it.
pub async fn upgrade_existing(
    client: &Client,
    wanted: &CustomResourceDefinition,
) -> Result<(), CrdError> {
    match find(client, wanted).await? {
        None => Ok(()),
        existing => create_or_upgrade(client, wanted, existing).await,
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

async fn create_or_upgrade(
    client: &Client,
    wanted: &CustomResourceDefinition,
    existing: Option<CustomResourceDefinition>,
) -> Result<(), CrdError> {
    let name = wanted.metadata.name.clone().unwrap_or_default();
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    if existing
        .as_ref()
        .is_some_and(|crd| crd.metadata.deletion_timestamp.is_some())
    {
        return Err(CrdError::Terminating(name));
    }
    let version = existing
        .as_ref()
        .and_then(|existing| schema_version(existing, wanted));
    let is_current = is_current(version, krypton_crds::SCHEMA_VERSION);
    let replaced = existing.is_some();
    let written = match existing {
        Some(existing) if is_current => existing,
        // Applying over an older schema would keep removed fields, such as krypton-operator's pattern for
        // condition types. The `resourceVersion` of the old CRD is the precondition.
        Some(existing) => {
            let mut next = wanted.clone();
            next.metadata.resource_version = existing.metadata.resource_version;
            next.metadata.finalizers = existing.metadata.finalizers;
            let mut labels = existing.metadata.labels.unwrap_or_default();
            labels.append(next.labels_mut());
            *next.labels_mut() = labels;
            let mut annotations = existing.metadata.annotations.unwrap_or_default();
            annotations.append(next.annotations_mut());
            *next.annotations_mut() = annotations;
            let params = PostParams::default();
            write(&name, api.replace(&name, &params, &next)).await?
        }
        // Not `create`: the charts grant that only for the names of Krypton's CRDs, and a create request
        // carries no name for RBAC.
        None => {
            let params = PatchParams::apply(FIELD_MANAGER).force();
            let patch = Patch::Apply(wanted);
            write(&name, api.patch(&name, &params, &patch)).await?
        }
    };
    if is_current && is_established(&written) {
        return Ok(());
    }
    let ready = async {
        wait_until_served(client, &api, wanted).await;
        if replaced {
            wait_until_in_force(client, wanted).await;
        }
    };
    tokio::time::timeout(SERVED_TIMEOUT, ready)
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
fn schema_version(
    existing: &CustomResourceDefinition,
    wanted: &CustomResourceDefinition,
) -> Option<u32> {
    let version = krypton_crds::schema_version(&existing.metadata)?;
    let ours = version == krypton_crds::SCHEMA_VERSION;
    (!ours || own_fields(existing) == own_fields(wanted)).then_some(version)
}

fn own_fields(crd: &CustomResourceDefinition) -> Option<BTreeSet<String>> {
    let schema = crd.spec.versions.first()?.schema.as_ref()?;
    let sections = schema.open_api_v3_schema.as_ref()?.properties.as_ref()?;
    fields(|section| {
        let fields = sections.get(section)?.properties.as_ref()?;
        Some(fields.keys().collect())
    })
}

/// Waits until the API server uses the new schema. For a moment, it still uses the previous one and drops
/// fields that are missing there. The published OpenAPI schema changes together with it.
async fn wait_until_in_force(client: &Client, wanted: &CustomResourceDefinition) {
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
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns the names of the fields in spec and status. `names` returns those of a section.
fn fields<'a>(names: impl Fn(&str) -> Option<Vec<&'a String>>) -> Option<BTreeSet<String>> {
    let with_section = |section: &str| {
        let names = names(section)?.into_iter();
        Some(names.map(move |name| format!("{section}.{name}")).collect())
    };
    let mut all: BTreeSet<String> = with_section("spec")?;
    all.extend(with_section("status").unwrap_or_default());
    Some(all)
}

fn published_fields(document: &Value, kind: &str) -> Option<BTreeSet<String>> {
    let schemas = document.pointer("/components/schemas")?.as_object()?;
    let is_of = |schema: &&Value| {
        let names = schema["x-kubernetes-group-version-kind"].as_array();
        names.is_some_and(|names| names.iter().any(|name| name["kind"] == *kind))
    };
    let schema = schemas.values().find(is_of)?;
    fields(|section| {
        let fields = schema.pointer(&format!("/properties/{section}/properties"))?;
        Some(fields.as_object()?.keys().collect())
    })
}

pub fn is_established(crd: &CustomResourceDefinition) -> bool {
    let conditions = crd
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_deref());
    conditions
        .unwrap_or_default()
        .iter()
        .any(|condition| condition.type_ == "Established" && condition.status == "True")
}

/// Waits until the API server has accepted the names of the CRD.
pub async fn wait_until_established(api: &Api<CustomResourceDefinition>, name: &str) {
    while !matches!(api.get_opt(name).await, Ok(Some(crd)) if is_established(&crd)) {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Waits until the objects can be listed. For a moment, the API server returns 404 and 429 for an Established
/// CRD, which would send every watch into its back-off.
async fn wait_until_served(
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
    wait_until_established(api, name).await;
    loop {
        match objects.list_metadata(&ListParams::default().limit(1)).await {
            // A process without this permission gets a clear error from its first list.
            Ok(_) => return,
            Err(kube::Error::Api(status)) if status.code == 403 => return,
            Err(_) => {}
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_schema_is_kept_and_unmarked_is_replaced() {
        assert!(!is_current(None, 1));
        assert!(!is_current(Some(1), 2));
        assert!(is_current(Some(2), 2));
        assert!(is_current(Some(3), 2));
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
        let names = ["spec.clusterRef", "spec.workspace"].map(str::to_owned);
        let published = published_fields(&document, "Tenant");
        assert_eq!(published, Some(BTreeSet::from(names)));
        assert_eq!(published_fields(&document, "TenantList"), None);
    }

    #[test]
    fn own_fields_equal_published_ones() {
        let crd = krypton_crds::tenant::Tenant::crd();
        let mut schema = serde_json::to_value(&crd.spec.versions[0].schema).unwrap();
        let mut schema = schema["openAPIV3Schema"].take();
        schema["x-kubernetes-group-version-kind"] = serde_json::json!([{"kind": "Tenant"}]);
        let document = serde_json::json!({"components": {"schemas": {"a": schema}}});
        let ours = own_fields(crd).unwrap();
        assert!(ours.contains("spec.workspace") && ours.contains("status.conditions"));
        assert_eq!(published_fields(&document, "Tenant"), Some(ours));
    }
}
