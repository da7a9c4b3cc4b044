//! Tenants outlive their CRD (design §3, rule 2): when it is deleted, their specs are kept in a Secret,
//! their finalizers let go without uninstalling, and both are put back.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_common::names;
use krypton_crds::tenant::{Tenant, TenantSpec};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, ResourceExt};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::effect;
use crate::fence::SYSTEM_NAMESPACE;
use crate::plan::PREVIOUS_UID_ANNOTATION;

/// The Secret that keeps the specs.
pub const RESCUE_NAME: &str = "krypton-rescued-tenants";
const KEY: &str = "tenants.json.gz";
const DEADLINE: Duration = Duration::from_secs(30);
/// A Secret holds 1 MiB; specs compress to some 100 bytes each.
const LARGEST: u64 = 64 << 20;

#[derive(Debug, Error)]
pub enum RescueError {
    #[error("listing Tenants before letting them go failed")]
    List(#[source] kube::Error),
    #[error("Secret {SYSTEM_NAMESPACE}/{RESCUE_NAME} could not be {0}")]
    Secret(&'static str, #[source] kube::Error),
    #[error("Secret {SYSTEM_NAMESPACE}/{RESCUE_NAME} does not hold a readable list of Tenants")]
    Content(#[source] std::io::Error),
    #[error("letting go of Tenant {0} failed")]
    Release(String, #[source] kube::Error),
    #[error("putting back Tenant {0} failed")]
    Restore(String, #[source] kube::Error),
    #[error("no answer within {} s", DEADLINE.as_secs())]
    Deadline,
}

/// What is kept of a Tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Kept {
    namespace: String,
    name: String,
    uid: String,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    spec: TenantSpec,
}

impl Kept {
    fn of(tenant: &Tenant) -> Self {
        Self {
            namespace: tenant.namespace().unwrap_or_default(),
            name: tenant.name_any(),
            uid: tenant.uid().unwrap_or_default(),
            labels: tenant.labels().clone(),
            annotations: tenant.annotations().clone(),
            spec: tenant.spec.clone(),
        }
    }

    fn into_tenant(self) -> Tenant {
        let mut tenant = Tenant::new(&self.name, self.spec);
        let mut annotations = self.annotations;
        annotations.insert(PREVIOUS_UID_ANNOTATION.to_owned(), self.uid);
        tenant.metadata.namespace = Some(self.namespace);
        tenant.metadata.labels = Some(self.labels);
        tenant.metadata.annotations = Some(annotations);
        tenant
    }
}

/// Whether a Tenant goes only because its CRD does. One that a person deleted before is not rescued:
/// it is uninstalled as asked.
fn swept_away(tenant: &Tenant, crd_deleted: Timestamp) -> bool {
    tenant
        .metadata
        .deletion_timestamp
        .as_ref()
        .is_none_or(|time| time.0 >= crd_deleted)
}

/// Keeps the specs, then lets go of the finalizers. Returns how many Tenants were let go.
pub async fn keep_and_release(
    client: &Client,
    crd_deleted: Timestamp,
) -> Result<usize, RescueError> {
    tokio::time::timeout(DEADLINE, keep_and_release_now(client, crd_deleted))
        .await
        .unwrap_or(Err(RescueError::Deadline))
}

async fn keep_and_release_now(
    client: &Client,
    crd_deleted: Timestamp,
) -> Result<usize, RescueError> {
    let all: Api<Tenant> = Api::all(client.clone());
    let tenants = all
        .list(&ListParams::default())
        .await
        .map_err(RescueError::List)?
        .items;
    let swept: Vec<&Tenant> = tenants
        .iter()
        .filter(|tenant| swept_away(tenant, crd_deleted))
        .collect();
    if swept.is_empty() {
        return Ok(0);
    }
    keep(
        client,
        swept.iter().map(|tenant| Kept::of(tenant)).collect(),
    )
    .await?;
    let mut released = 0;
    for tenant in swept {
        let finalizers: Vec<&String> = tenant
            .finalizers()
            .iter()
            .filter(|finalizer| *finalizer != names::TENANT_FINALIZER)
            .collect();
        let api: Api<Tenant> =
            Api::namespaced(client.clone(), &tenant.namespace().unwrap_or_default());
        let patch = serde_json::json!({
            "metadata": { "finalizers": finalizers, "resourceVersion": tenant.resource_version() }
        });
        let params = PatchParams::default();
        let (name, patch) = (tenant.name_any(), Patch::Merge(&patch));
        let call = api.patch_metadata(&name, &params, &patch);
        match effect!("rescue.let-go", call).await {
            Ok(_) => released += 1,
            // Gone, or just written by somebody: the next round sees to it.
            Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {}
            Err(error) => return Err(RescueError::Release(tenant.name_any(), error)),
        }
    }
    Ok(released)
}

/// Adds to what is kept already: a crash in between must not lose the first half.
async fn keep(client: &Client, tenants: Vec<Kept>) -> Result<(), RescueError> {
    let api: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let found = api
        .get_opt(RESCUE_NAME)
        .await
        .map_err(|error| RescueError::Secret("read", error))?;
    let mut kept = match &found {
        Some(secret) => unpack(secret)?,
        None => Vec::new(),
    };
    for tenant in tenants {
        kept.retain(|old| (&old.namespace, &old.name) != (&tenant.namespace, &tenant.name));
        kept.push(tenant);
    }
    let data = Some([(KEY.to_owned(), ByteString(pack(&kept)?))].into());
    let params = PostParams::default();
    let written = match found {
        Some(secret) => {
            let next = Secret { data, ..secret };
            effect!("rescue.replace", api.replace(RESCUE_NAME, &params, &next)).await
        }
        None => {
            let metadata = ObjectMeta {
                name: Some(RESCUE_NAME.to_owned()),
                ..ObjectMeta::default()
            };
            let new = Secret {
                metadata,
                data,
                ..Secret::default()
            };
            effect!("rescue.create", api.create(&params, &new)).await
        }
    };
    written
        .map(|_| ())
        .map_err(|error| RescueError::Secret("written", error))
}

/// Puts back what is kept, once the CRD is served again. Returns the Tenants that are back.
pub async fn restore(client: &Client) -> Result<Vec<Tenant>, RescueError> {
    tokio::time::timeout(DEADLINE, restore_now(client))
        .await
        .unwrap_or(Err(RescueError::Deadline))
}

async fn restore_now(client: &Client) -> Result<Vec<Tenant>, RescueError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let found = secrets
        .get_opt(RESCUE_NAME)
        .await
        .map_err(|error| RescueError::Secret("read", error))?;
    let Some(secret) = found else {
        return Ok(Vec::new());
    };
    let mut back = Vec::new();
    for kept in unpack(&secret)? {
        let api: Api<Tenant> = Api::namespaced(client.clone(), &kept.namespace);
        let name = format!("{}/{}", kept.namespace, kept.name);
        let (params, tenant) = (PostParams::default(), kept.into_tenant());
        match effect!("rescue.put-back", api.create(&params, &tenant)).await {
            Ok(tenant) => back.push(tenant),
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            // Its namespace is gone or going: so is the Tenant, and rightly.
            Err(kube::Error::Api(status)) if status.code == 404 || status.code == 403 => {
                tracing::warn!(tenant = %name, reason = %status.message, "not put back");
            }
            Err(error) => return Err(RescueError::Restore(name, error)),
        }
    }
    let preconditions = Preconditions {
        resource_version: secret.metadata.resource_version.clone(),
        uid: secret.metadata.uid.clone(),
    };
    let params = DeleteParams {
        preconditions: Some(preconditions),
        ..DeleteParams::default()
    };
    effect!("rescue.forget", secrets.delete(RESCUE_NAME, &params))
        .await
        .map_err(|error| RescueError::Secret("deleted", error))?;
    Ok(back)
}

fn pack(kept: &[Kept]) -> Result<Vec<u8>, RescueError> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let json = serde_json::to_vec(kept).map_err(|error| RescueError::Content(error.into()))?;
    encoder
        .write_all(&json)
        .and_then(|()| encoder.finish())
        .map_err(RescueError::Content)
}

fn unpack(secret: &Secret) -> Result<Vec<Kept>, RescueError> {
    let missing = || std::io::Error::other(format!("key {KEY} is missing"));
    let packed = secret
        .data
        .as_ref()
        .and_then(|data| data.get(KEY))
        .ok_or_else(|| RescueError::Content(missing()))?;
    let mut json = Vec::new();
    GzDecoder::new(packed.0.as_slice())
        .take(LARGEST)
        .read_to_end(&mut json)
        .map_err(RescueError::Content)?;
    serde_json::from_slice(&json).map_err(|error| RescueError::Content(error.into()))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    fn tenant(deleted: Option<i64>) -> Tenant {
        let mut tenant = Tenant::new("acme", TenantSpec::default());
        tenant.metadata.namespace = Some("team".to_owned());
        tenant.metadata.uid = Some("old".to_owned());
        tenant.metadata.deletion_timestamp =
            deleted.map(|second| Time(Timestamp::from_second(second).unwrap()));
        tenant
    }

    #[test]
    fn only_tenants_that_go_with_the_crd_are_rescued() {
        let crd = Timestamp::from_second(100).unwrap();
        assert!(swept_away(&tenant(None), crd));
        assert!(swept_away(&tenant(Some(100)), crd));
        assert!(swept_away(&tenant(Some(101)), crd));
        assert!(!swept_away(&tenant(Some(99)), crd));
    }

    #[test]
    fn a_kept_tenant_comes_back_with_its_spec_and_its_old_uid() {
        let kept = vec![Kept::of(&tenant(Some(100)))];
        let secret = Secret {
            data: Some([(KEY.to_owned(), ByteString(pack(&kept).unwrap()))].into()),
            ..Secret::default()
        };
        let back = unpack(&secret).unwrap().remove(0).into_tenant();
        assert_eq!(back.namespace().as_deref(), Some("team"));
        assert_eq!(back.annotations()[PREVIOUS_UID_ANNOTATION], "old");
        assert_eq!(back.metadata.deletion_timestamp, None);
    }

    #[test]
    fn rubbish_in_the_secret_is_an_error_and_not_an_empty_list() {
        let secret = Secret {
            data: Some([(KEY.to_owned(), ByteString(b"rubbish".to_vec()))].into()),
            ..Secret::default()
        };
        assert!(matches!(unpack(&secret), Err(RescueError::Content(_))));
    }
}
