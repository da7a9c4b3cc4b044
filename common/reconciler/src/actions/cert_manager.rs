//! Deletes cert-manager's six CRDs, which charts keep on uninstallation. A flag of the hub must enable it.
//!
//! Krypton deletes them with the member's last release, if that release created them. The cluster must have no
//! objects of their kinds. Krypton deletes all of them or none.

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_helm::releases;
use krypton_helm::releases::labels::OWNER_UID_LABEL;
use krypton_runtime::call::{ApiError, call, if_unchanged};
use krypton_runtime::events::ObjectEvent;
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::{ApiResource, GroupVersionKind, ObjectMeta};

use super::objects::belongs_to;
use super::{ActionError, ActionResult, ActionRunner, Job, transient};

const CRD_NAMES: [&str; 6] = [
    "certificaterequests.cert-manager.io",
    "certificates.cert-manager.io",
    "challenges.acme.cert-manager.io",
    "clusterissuers.cert-manager.io",
    "issuers.cert-manager.io",
    "orders.acme.cert-manager.io",
];

/// Why Krypton deletes none of them.
enum KeepReason {
    /// The CRDs stay, and an event gives the reason.
    Blocked(String),
    Error(ActionError),
}

impl From<ApiError> for KeepReason {
    /// The API server would refuse a refused request again, so the CRDs stay. After a server error or a timeout, Krypton
    /// retries.
    fn from(error: ApiError) -> Self {
        match error.status() {
            Some(status) if (400..429).contains(&status.code) => {
                Self::Blocked(format!("{error}: {}", status.message))
            }
            _ => Self::Error(transient(&error)),
        }
    }
}

impl From<ActionError> for KeepReason {
    fn from(error: ActionError) -> Self {
        Self::Error(error)
    }
}

impl ActionRunner {
    /// Deletes the CRDs if the flag is set. CRDs that stay now stay for good, because the Tenant is then gone.
    pub(super) async fn delete_cert_manager_crds(&self, job: &Job) -> ActionResult {
        let is_enabled = job.desired.handling.delete_cert_manager_crds;
        if !is_enabled || !job.is_last_owner || job.newest.is_some() {
            return Ok(());
        }
        let event = match Box::pin(self.delete_crds(job)).await {
            Ok(deleted) if deleted.is_empty() => return Ok(()),
            Ok(deleted) => ObjectEvent::warning(
                "CrdsDeleted",
                format!(
                    "deleted with the last release, because of --delete-cert-manager-crds: {}",
                    deleted.join(", ")
                ),
            ),
            Err(KeepReason::Blocked(reason)) => ObjectEvent::warning(
                "CrdsStay",
                format!("kept the CRDs of cert-manager: {reason}"),
            ),
            Err(KeepReason::Error(error)) => return Err(error),
        };
        self.emit_event(&job.owner, event);
        Ok(())
    }

    async fn delete_crds(&self, job: &Job) -> Result<Vec<&'static str>, KeepReason> {
        let client = &self.fleet_client;
        // List again, because another Tenant's release may have appeared a moment ago.
        let releases: Api<Secret> = Api::all(self.member.client.clone());
        let own_releases = ListParams::default()
            .labels(&format!("owner=helm,{OWNER_UID_LABEL}"))
            .fields(&format!("type={}", releases::SECRET_TYPE))
            .limit(1);
        let remaining = call("listing releases", releases.list_metadata(&own_releases)).await?;
        if !remaining.items.is_empty() {
            return Ok(Vec::new());
        }
        let api: Api<CustomResourceDefinition> = Api::all(client.clone());
        let mut crds = Vec::new();
        for name in CRD_NAMES {
            let Some(crd) = call("reading a CRD", api.get_opt(name)).await? else {
                continue;
            };
            if crd.metadata.deletion_timestamp.is_some() {
                continue;
            }
            if !belongs_to(&crd.metadata, &job.release) {
                return Err(KeepReason::Blocked(format!(
                    "{name} does not belong to the last release"
                )));
            }
            crds.push((name, crd));
        }
        for (name, crd) in &crds {
            let Some(kind) = served_version(crd) else {
                return Err(KeepReason::Blocked(format!("{name} is not served")));
            };
            let instances: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
            let first = ListParams::default().limit(1);
            let objects =
                call("listing remaining objects", instances.list_metadata(&first)).await?;
            if let Some(object) = objects.items.first() {
                return Err(KeepReason::Blocked(format!(
                    "{} exists",
                    object_name(&kind, &object.metadata)
                )));
            }
        }
        let mut deleted = Vec::new();
        for (name, crd) in &crds {
            self.check_permit()?;
            let params = if_unchanged(&crd.metadata);
            let deleting = api.delete(name, &params);
            call("deleting a CRD", deleting).await?;
            deleted.push(*name);
        }
        Ok(deleted)
    }
}

/// Returns a served version of the CRD. Each version shows all objects.
fn served_version(crd: &CustomResourceDefinition) -> Option<ApiResource> {
    let version = crd.spec.versions.iter().find(|version| version.served)?;
    let kind = GroupVersionKind::gvk(&crd.spec.group, &version.name, &crd.spec.names.kind);
    Some(ApiResource::from_gvk_with_plural(
        &kind,
        &crd.spec.names.plural,
    ))
}

fn object_name(kind: &ApiResource, object: &ObjectMeta) -> String {
    let name = object.name.as_deref().unwrap_or_default();
    match &object.namespace {
        Some(namespace) => format!("{} {namespace}/{name}", kind.kind),
        None => format!("{} {name}", kind.kind),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_are_found_by_served_version() {
        let crd = |served_first: bool, served_second: bool| -> CustomResourceDefinition {
            let version =
                |name: &str, served: bool| json!({"name": name, "served": served, "storage": true});
            serde_json::from_value(json!({
                "metadata": {"name": "orders.acme.cert-manager.io"},
                "spec": {
                    "group": "acme.cert-manager.io", "scope": "Namespaced",
                    "names": {"kind": "Order", "plural": "orders"},
                    "versions": [version("v1alpha2", served_first), version("v1", served_second)],
                },
            }))
            .unwrap()
        };
        let kind = served_version(&crd(false, true)).unwrap();
        assert_eq!(
            (kind.api_version.as_str(), kind.plural.as_str()),
            ("acme.cert-manager.io/v1", "orders")
        );
        assert!(served_version(&crd(false, false)).is_none());
    }
}
