//! Keeps Tenants when their CRD is deleted, and restores them.
//!
//! Each Tenant is recorded in a separate Secret, and its finalizer is removed without an uninstall. Tenants that a user
//! had deleted are recorded too, since their finalizers would block the CRD. They are deleted again.
//!
//! The reconciler deletes a record before it acts on the restored Tenant. A Tenant that is deleted later therefore
//! stays deleted.

pub mod restoring;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_runtime::bound::{self, ExceededBound, ListSize};
use krypton_runtime::call::{self, ApiError, call_within, if_uid, if_unchanged};
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::fingerprint::hex;
use krypton_types::names;
use krypton_types::tenant::TenantKey;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::core::DeserializeGuard;
use kube::{Client, ResourceExt};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use crate::plan::{PREVIOUS_UID_ANNOTATION, previous_uids};

/// Label on the Secrets that record one Tenant each.
pub const RECORD_LABEL: &str = "mesh.openkcm.io/tenant-backup";
/// Key of the Tenant in such a Secret.
pub const RECORD_KEY: &str = "tenant.json.gz";
/// Maximum number of objects in a response.
const PAGE_SIZE: u32 = 50;
const CALL_DEADLINE: Duration = Duration::from_secs(30);
/// Two API servers may set the deletion times of the CRD and of a Tenant, or a clock may step between the two. They differ
/// by at most this.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(10);
/// Limit of an unpacked Tenant, in bytes. An API server accepts about 3 MiB.
const MAX_TENANT_BYTES: u64 = 16 << 20;

#[derive(Debug, Error)]
pub enum BackupError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(
        "Secret {SYSTEM_NAMESPACE}/{0} does not hold a readable Tenant; delete it if the Tenant is not needed"
    )]
    Unreadable(String, #[source] std::io::Error),
    #[error("the list of {0} is too long")]
    EndlessList(&'static str, #[source] ExceededBound),
}

/// Known deletions, as UIDs of Tenants.
#[derive(Clone, Debug, Default)]
pub struct KnownDeletions {
    /// Deletions seen while the CRD was intact.
    pub confirmed: BTreeSet<String>,
    /// Deletions in progress.
    pub in_progress: BTreeSet<String>,
}

/// Whether a user deleted a Tenant that is being deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum UserDeletion {
    /// The Tenant is deleted only because its CRD is.
    #[default]
    No,
    /// The Tenant and its CRD were deleted at about the same time, in an unknown order.
    Perhaps,
    Yes,
}

/// Record of a Tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct TenantBackup {
    namespace: String,
    name: String,
    uid: String,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    spec: TenantSpec,
    #[serde(default)]
    deleted: UserDeletion,
    /// The Tenant had Krypton's finalizer. Without it, a deletion after the restore would leave the release behind.
    #[serde(default)]
    finalizer: bool,
    /// The Tenant is placed on another member, which keeps its release.
    #[serde(default)]
    placed: bool,
}

impl TenantBackup {
    fn new(tenant: &Tenant, deletion: UserDeletion) -> Self {
        Self {
            deleted: deletion,
            finalizer: has_finalizer(tenant, names::TENANT_FINALIZER),
            placed: has_finalizer(tenant, names::PLACED_FINALIZER),
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
        let earlier = annotations.remove(PREVIOUS_UID_ANNOTATION);
        let mut uids = vec![&*self.uid];
        uids.extend(previous_uids(earlier.as_deref()));
        annotations.insert(PREVIOUS_UID_ANNOTATION.to_owned(), uids.join(","));
        tenant.metadata.namespace = Some(self.namespace);
        tenant.metadata.labels = Some(self.labels);
        tenant.metadata.annotations = Some(annotations);
        let finalizers = [
            (self.finalizer, names::TENANT_FINALIZER),
            (self.placed, names::PLACED_FINALIZER),
        ];
        let finalizers = finalizers.into_iter().filter(|(had, _)| *had);
        let finalizers: Vec<String> = finalizers.map(|(_, name)| name.to_owned()).collect();
        tenant.metadata.finalizers = (!finalizers.is_empty()).then_some(finalizers);
        tenant
    }

    /// Merges the record of an earlier process, which may have known more.
    fn merge_previous(mut self, previous: Option<Self>) -> Self {
        if let Some(previous) = previous.filter(|previous| previous.uid == self.uid) {
            self.deleted = self.deleted.max(previous.deleted);
            self.finalizer |= previous.finalizer;
            self.placed |= previous.placed;
        }
        self
    }
}

fn has_finalizer(tenant: &Tenant, name: &str) -> bool {
    let mut finalizers = tenant.finalizers().iter();
    finalizers.any(|finalizer| finalizer == name)
}

/// Decides whether a Tenant was deleted before its CRD. `None` while its deletion is in progress. Only a certain
/// deletion removes a release.
fn user_deletion(
    tenant: &Tenant,
    crd_deleted: Timestamp,
    known_deletions: &KnownDeletions,
) -> Option<UserDeletion> {
    let Some(deleted_at) = &tenant.metadata.deletion_timestamp else {
        return Some(UserDeletion::No);
    };
    let uid = tenant.uid().unwrap_or_default();
    if known_deletions.in_progress.contains(&uid) {
        return None;
    }
    Some(match crd_deleted.duration_since(deleted_at.0) {
        _ if known_deletions.confirmed.contains(&uid) => UserDeletion::Yes,
        lead if lead >= MAX_CLOCK_SKEW => UserDeletion::Yes,
        lead if lead > SignedDuration::ZERO => UserDeletion::Perhaps,
        _ => UserDeletion::No,
    })
}

/// Returns the name of the Secret that records this Tenant.
pub fn record_name(namespace: &str, name: &str) -> String {
    let digest = Sha256::digest(format!("{namespace}/{name}"));
    format!("krypton-tenant-backup-{}", hex(&digest[..16]))
}

/// Records each Tenant, then removes its finalizer. Returns the number of released Tenants and the first error. An
/// error stops no other Tenant.
pub async fn back_up_and_release(
    client: &Client,
    crd_deleted: Timestamp,
    known_deletions: &KnownDeletions,
) -> Result<(usize, Option<BackupError>), BackupError> {
    let all: Api<DeserializeGuard<Tenant>> = Api::all(client.clone());
    let mut params = ListParams::default().limit(PAGE_SIZE);
    let (mut released, mut first_error) = (0, None);
    let mut pages = ListSize::default();
    loop {
        let attempt = "listing Tenants before releasing them";
        let list = call_within(CALL_DEADLINE, attempt, all.list(&params)).await?;
        let objects = list.items.len();
        // A Tenant that does not decode has no finalizer of Krypton, and no API server would accept it again.
        let tenants = list.items.into_iter().filter_map(|tenant| tenant.0.ok());
        for tenant in tenants {
            let Some(deletion) = user_deletion(&tenant, crd_deleted, known_deletions) else {
                continue;
            };
            match back_up_tenant(client, &tenant, deletion).await {
                Ok(is_released) => released += usize::from(is_released),
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        let has_more = pages.next_page(&mut params, list.metadata, objects);
        if !has_more.map_err(|beyond| BackupError::EndlessList("Tenants", beyond))? {
            return Ok((released, first_error));
        }
    }
}

/// Returns true if the finalizer was removed.
async fn back_up_tenant(
    client: &Client,
    tenant: &Tenant,
    deletion: UserDeletion,
) -> Result<bool, BackupError> {
    write_record(client, TenantBackup::new(tenant, deletion)).await?;
    let own_finalizers = [names::TENANT_FINALIZER, names::PLACED_FINALIZER];
    let remaining = tenant.finalizers().iter();
    let remaining: Vec<&String> = remaining
        .filter(|name| !own_finalizers.contains(&name.as_str()))
        .collect();
    // It waits for other finalizers only.
    if remaining.len() == tenant.finalizers().len() {
        return Ok(false);
    }
    let api: Api<Tenant> = Api::namespaced(client.clone(), &tenant.namespace().unwrap_or_default());
    let patch = serde_json::json!({
        "metadata": { "finalizers": remaining, "resourceVersion": tenant.resource_version() }
    });
    let params = PatchParams::default();
    let (name, patch) = (tenant.name_any(), Patch::Merge(&patch));
    let patching = api.patch_metadata(&name, &params, &patch);
    let attempt = format!("removing the finalizer of Tenant {name}");
    match call_within(CALL_DEADLINE, attempt, patching).await {
        Ok(_) => Ok(true),
        // Deleted, or written by another client: the next round retries.
        Err(error) if matches!(error.code(), Some(404 | 409)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Writes the record and replaces an older one of this name.
async fn write_record(client: &Client, backup: TenantBackup) -> Result<(), BackupError> {
    let api: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let name = record_name(&backup.namespace, &backup.name);
    let reading = format!("reading Secret {SYSTEM_NAMESPACE}/{name}");
    let existing = call_within(CALL_DEADLINE, reading, api.get_opt(&name)).await?;
    let previous = existing.as_ref().and_then(|secret| decode(secret).ok());
    let backup = backup.merge_previous(previous.clone());
    if previous.as_ref() == Some(&backup) {
        return Ok(());
    }
    let mut secret = existing.unwrap_or_default();
    let label = (RECORD_LABEL.to_owned(), "true".to_owned());
    secret.labels_mut().extend([label]);
    secret.metadata.name = Some(name.clone());
    secret.data = Some([(RECORD_KEY.to_owned(), ByteString(encode(&name, &backup)?))].into());
    let params = PostParams::default();
    let writing = async {
        match &secret.metadata.uid {
            Some(_) => api.replace(&name, &params, &secret).await,
            None => api.create(&params, &secret).await,
        }
    };
    let attempt = format!("writing Secret {SYSTEM_NAMESPACE}/{name}");
    call_within(CALL_DEADLINE, attempt, writing).await?;
    Ok(())
}

/// Result of a restore for a recorded name.
#[derive(Debug)]
pub enum RestoreResult {
    Recreated(Tenant, UserDeletion),
    /// Another Tenant that was created before the restore, and the workspace of the recorded one.
    Replaced(Tenant, String),
}

/// The record of a Tenant.
#[derive(Debug)]
pub struct BackupRecord {
    secret: Secret,
    backup: Result<TenantBackup, BackupError>,
}

impl BackupRecord {
    fn new(mut secret: Secret) -> Self {
        let backup = decode(&secret);
        // Only its name and version are used later.
        secret.data = None;
        secret.metadata.labels = None;
        secret.metadata.annotations = None;
        secret.metadata.managed_fields = None;
        Self { secret, backup }
    }

    /// Returns the approximate size in bytes.
    fn bytes(&self) -> usize {
        let backup_bytes = self.backup.as_ref().map_or(0, bound::memory_size);
        backup_bytes + self.secret.name_any().len()
    }

    /// Names the Tenant, or the Secret if the record cannot be read.
    pub fn key(&self) -> TenantKey {
        let (namespace, name) = match &self.backup {
            Ok(backup) => (backup.namespace.clone(), backup.name.clone()),
            Err(_) => (SYSTEM_NAMESPACE.to_owned(), self.secret.name_any()),
        };
        TenantKey { namespace, name }
    }

    /// Returns the namespace of its release.
    pub fn workspace(&self) -> Option<String> {
        let backup = self.backup.as_ref().ok()?.clone();
        Some(backup.into_tenant().workspace().to_owned())
    }

    /// Creates the Tenant again, and deletes the record.
    ///
    /// # Errors
    /// If the API server rejects the Tenant, or the record cannot be deleted.
    pub async fn restore(self, client: &Client) -> Result<Option<RestoreResult>, BackupError> {
        let restored = restore(client, self.backup?).await?;
        delete_record(client, &self.secret).await?;
        Ok(restored)
    }
}

/// Lists all records.
///
/// # Errors
/// If they cannot be listed.
pub async fn list_records(client: &Client) -> Result<Vec<BackupRecord>, BackupError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let mut params = ListParams::default().labels(RECORD_LABEL).limit(PAGE_SIZE);
    let endless = |beyond| BackupError::EndlessList("Secrets with backups of Tenants", beyond);
    let mut records = Vec::new();
    let mut pages = ListSize::default();
    loop {
        let attempt = "listing the Secrets with backups of Tenants";
        let list = call_within(CALL_DEADLINE, attempt, secrets.list(&params)).await?;
        let objects = list.items.len();
        for secret in list.items {
            let record = BackupRecord::new(secret);
            pages.add_bytes(record.bytes()).map_err(endless)?;
            records.push(record);
        }
        let has_more = pages.next_page(&mut params, list.metadata, objects);
        if !has_more.map_err(endless)? {
            return Ok(records);
        }
    }
}

pub(crate) async fn delete_record(client: &Client, secret: &Secret) -> Result<(), BackupError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let params = if_unchanged(&secret.metadata);
    let name = secret.name_any();
    let deleting = secrets.delete(&name, &params);
    let attempt = format!("deleting Secret {SYSTEM_NAMESPACE}/{name}");
    match call_within(CALL_DEADLINE, attempt, deleting).await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Some(404) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

async fn restore(
    client: &Client,
    backup: TenantBackup,
) -> Result<Option<RestoreResult>, BackupError> {
    let api: Api<Tenant> = Api::namespaced(client.clone(), &backup.namespace);
    let name = format!("{}/{}", backup.namespace, backup.name);
    let attempt = format!("recreating Tenant {name}");
    let (namespace, deleted, uid) = (backup.namespace.clone(), backup.deleted, backup.uid.clone());
    let (params, tenant) = (PostParams::default(), backup.into_tenant());
    let creating = api.create(&params, &tenant);
    let existing = match call_within(CALL_DEADLINE, attempt.clone(), creating).await {
        Ok(tenant) => Some(tenant),
        Err(error) if error.code() == Some(409) => {
            call_within(CALL_DEADLINE, attempt, api.get_opt(&tenant.name_any())).await?
        }
        Err(error) if matches!(error.code(), Some(403 | 404)) => {
            // If its namespace is deleted or terminating, the Tenant is rightly gone. Otherwise a policy rejects it.
            let namespaces: Api<Namespace> = Api::all(client.clone());
            let reading = async {
                let result = namespaces.get_metadata(&namespace).await;
                call::existing(result, ("namespaces", &namespace))
            };
            let namespace = call_within(CALL_DEADLINE, attempt, reading).await?;
            if namespace.is_some_and(|it| it.metadata.deletion_timestamp.is_none()) {
                return Err(error.into());
            }
            let reason = error.status().map(|status| &*status.message);
            tracing::warn!(object = %name, reason, "Tenant not restored");
            None
        }
        Err(error) => return Err(error.into()),
    };
    let Some(existing) = existing else {
        return Ok(None);
    };
    // An earlier, incomplete attempt created the Tenant if the UID matches. Otherwise it is another Tenant.
    let annotation = existing.annotations().get(PREVIOUS_UID_ANNOTATION);
    let newest = previous_uids(annotation.map(String::as_str)).next();
    if newest != Some(&*uid) {
        return Ok(Some(RestoreResult::Replaced(
            existing,
            tenant.workspace().to_owned(),
        )));
    }
    let deleted = match deleted {
        UserDeletion::Yes => delete(&api, &existing).await?,
        other => other,
    };
    Ok(Some(RestoreResult::Recreated(existing, deleted)))
}

/// Repeats a user's deletion. The finalizer of the restored Tenant makes the reconciler uninstall its release.
async fn delete(api: &Api<Tenant>, tenant: &Tenant) -> Result<UserDeletion, BackupError> {
    let params = if_uid(tenant.uid());
    let name = tenant.name_any();
    let deleting = api.delete(&name, &params);
    let attempt = format!("deleting Tenant {name} again");
    match call_within(CALL_DEADLINE, attempt, deleting).await {
        Ok(_) => Ok(UserDeletion::Yes),
        Err(error) => match error.code() {
            // Already deleted, or replaced by another Tenant.
            Some(404 | 409) => Ok(UserDeletion::Yes),
            // An older chart may not grant this permission. The user must delete the Tenant again.
            Some(403) => Ok(UserDeletion::Perhaps),
            _ => Err(error.into()),
        },
    }
}

fn encode(name: &str, backup: &TenantBackup) -> Result<Vec<u8>, BackupError> {
    let unreadable = |error| BackupError::Unreadable(name.to_owned(), error);
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let json = serde_json::to_vec(backup).map_err(|error| unreadable(error.into()))?;
    encoder
        .write_all(&json)
        .and_then(|()| encoder.finish())
        .map_err(unreadable)
}

fn decode(secret: &Secret) -> Result<TenantBackup, BackupError> {
    let unreadable = |error| BackupError::Unreadable(secret.name_any(), error);
    let missing = || std::io::Error::other(format!("key {RECORD_KEY} is missing"));
    let encoded = secret
        .data
        .as_ref()
        .and_then(|data| data.get(RECORD_KEY))
        .ok_or_else(|| unreadable(missing()))?;
    let mut json = Vec::new();
    GzDecoder::new(encoded.0.as_slice())
        .take(MAX_TENANT_BYTES)
        .read_to_end(&mut json)
        .map_err(unreadable)?;
    serde_json::from_slice(&json).map_err(|error| unreadable(error.into()))
}

#[cfg(test)]
pub(crate) mod tests;
