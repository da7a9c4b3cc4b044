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
#[cfg(test)]
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_runtime::bound::{self, Beyond, Pages};
use krypton_runtime::call::{ApiError, call_within};
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::names;
use krypton_types::tenant::TenantKey;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::DeserializeGuard;
use kube::{Client, ResourceExt};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use crate::plan::PREVIOUS_UID_ANNOTATION;

/// Label on the Secrets that record one Tenant each.
pub const RECORD_LABEL: &str = "mesh.openkcm.io/rescued-tenant";
/// Key of the Tenant in such a Secret.
pub const RECORD_KEY: &str = "tenant.json.gz";
/// Maximum number of objects in a response.
const PAGE: u32 = 50;
const DEADLINE: Duration = Duration::from_secs(30);
/// Maximum clock skew between two API servers, which may have set the deletion times of the CRD and of a Tenant.
const CLOCKS_DIFFER_BY: SignedDuration = SignedDuration::from_secs(60);
/// Limit of an unpacked Tenant, in bytes. An API server accepts about 3 MiB.
const LARGEST: u64 = 16 << 20;

#[derive(Debug, Error)]
pub enum BackupError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(
        "Secret {SYSTEM_NAMESPACE}/{0} does not hold a readable Tenant; delete it if the Tenant is not needed"
    )]
    Content(String, #[source] std::io::Error),
    #[error("the list of {0} does not end")]
    Endless(&'static str, #[source] Beyond),
}

/// Known deletions, as UIDs of Tenants.
#[derive(Clone, Debug, Default)]
pub struct Deletions {
    /// Deletions seen while the CRD was intact.
    pub confirmed: BTreeSet<String>,
    /// Deletions in progress.
    pub under_way: BTreeSet<String>,
}

/// Whether a user deleted a Tenant that is being deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Deleted {
    /// The Tenant is deleted only because its CRD is.
    #[default]
    No,
    /// The Tenant and its CRD were deleted at about the same time, in an unknown order.
    Perhaps,
    Yes,
}

/// Record of a Tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Kept {
    namespace: String,
    name: String,
    uid: String,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    spec: TenantSpec,
    #[serde(default)]
    deleted: Deleted,
    /// The Tenant had Krypton's finalizer. Without it, a deletion after the restore would leave the release behind.
    #[serde(default)]
    finalizer: bool,
    /// The Tenant is placed on another member, which keeps its release.
    #[serde(default)]
    placed: bool,
}

impl Kept {
    fn of(tenant: &Tenant, deleted: Deleted) -> Self {
        Self {
            deleted,
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
        annotations.insert(PREVIOUS_UID_ANNOTATION.to_owned(), self.uid);
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
}

fn has_finalizer(tenant: &Tenant, name: &str) -> bool {
    let mut finalizers = tenant.finalizers().iter();
    finalizers.any(|finalizer| finalizer == name)
}

/// Decides whether a Tenant was deleted before its CRD. `None` while its deletion is in progress. Only a certain
/// deletion removes a release.
fn deleted(tenant: &Tenant, crd: Timestamp, known: &Deletions) -> Option<Deleted> {
    let Some(stamp) = &tenant.metadata.deletion_timestamp else {
        return Some(Deleted::No);
    };
    let uid = tenant.uid().unwrap_or_default();
    if known.under_way.contains(&uid) {
        return None;
    }
    Some(match crd.duration_since(stamp.0) {
        _ if known.confirmed.contains(&uid) => Deleted::Yes,
        before if before >= CLOCKS_DIFFER_BY => Deleted::Yes,
        before if before > SignedDuration::ZERO => Deleted::Perhaps,
        _ => Deleted::No,
    })
}

/// Returns the name of the Secret that records this Tenant.
pub fn record_name(namespace: &str, name: &str) -> String {
    let digest = Sha256::digest(format!("{namespace}/{name}"));
    let digest: String = digest[..16]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("krypton-rescued-tenant-{digest}")
}

/// Records each Tenant, then removes its finalizer. Returns the number of released Tenants and the first error. An
/// error stops no other Tenant.
pub async fn keep_and_release(
    client: &Client,
    crd_deleted: Timestamp,
    known: &Deletions,
) -> Result<(usize, Option<BackupError>), BackupError> {
    let all: Api<DeserializeGuard<Tenant>> = Api::all(client.clone());
    let mut params = ListParams::default().limit(PAGE);
    let (mut released, mut refused) = (0, None);
    let mut pages = Pages::default();
    loop {
        let list = call_within(
            DEADLINE,
            "listing Tenants before releasing them",
            all.list(&params),
        )
        .await?;
        let objects = list.items.len();
        // A Tenant that does not decode has no finalizer of Krypton, and no API server would accept it again.
        let tenants = list.items.into_iter().filter_map(|tenant| tenant.0.ok());
        for tenant in tenants {
            let Some(deleted) = deleted(&tenant, crd_deleted, known) else {
                continue;
            };
            match keep_one(client, &tenant, deleted).await {
                Ok(gone) => released += usize::from(gone),
                Err(error) => drop(refused.get_or_insert(error)),
            }
        }
        let more = pages.follow(&mut params, list.metadata, objects);
        if !more.map_err(|beyond| BackupError::Endless("Tenants", beyond))? {
            return Ok((released, refused));
        }
    }
}

/// Returns true if the finalizer was removed.
async fn keep_one(client: &Client, tenant: &Tenant, deleted: Deleted) -> Result<bool, BackupError> {
    keep(client, Kept::of(tenant, deleted)).await?;
    let ours = [names::TENANT_FINALIZER, names::PLACED_FINALIZER];
    let finalizers = tenant.finalizers().iter();
    let finalizers: Vec<&String> = finalizers
        .filter(|name| !ours.contains(&name.as_str()))
        .collect();
    let api: Api<Tenant> = Api::namespaced(client.clone(), &tenant.namespace().unwrap_or_default());
    let patch = serde_json::json!({
        "metadata": { "finalizers": finalizers, "resourceVersion": tenant.resource_version() }
    });
    let params = PatchParams::default();
    let (name, patch) = (tenant.name_any(), Patch::Merge(&patch));
    let patching = api.patch_metadata(&name, &params, &patch);
    match call_within(
        DEADLINE,
        format!("removing the finalizer of Tenant {name}"),
        patching,
    )
    .await
    {
        Ok(_) => Ok(true),
        // Deleted, or written by another client: the next round retries.
        Err(error) if matches!(error.code(), Some(404 | 409)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl Kept {
    /// Merges the record of an earlier process, which may have known more.
    fn after(mut self, before: Option<Self>) -> Self {
        if let Some(before) = before.filter(|before| before.uid == self.uid) {
            self.deleted = self.deleted.max(before.deleted);
            self.finalizer |= before.finalizer;
            self.placed |= before.placed;
        }
        self
    }
}

/// Writes the record and replaces an older one of this name.
async fn keep(client: &Client, tenant: Kept) -> Result<(), BackupError> {
    let api: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let name = record_name(&tenant.namespace, &tenant.name);
    let reading = format!("reading Secret {SYSTEM_NAMESPACE}/{name}");
    let found = call_within(DEADLINE, reading, api.get_opt(&name)).await?;
    let before = found.as_ref().and_then(|secret| unpack(secret).ok());
    let tenant = tenant.after(before.clone());
    if before.as_ref() == Some(&tenant) {
        return Ok(());
    }
    let mut secret = found.unwrap_or_default();
    let label = (RECORD_LABEL.to_owned(), "true".to_owned());
    secret.labels_mut().extend([label]);
    secret.metadata.name = Some(name.clone());
    secret.data = Some([(RECORD_KEY.to_owned(), ByteString(pack(&name, &tenant)?))].into());
    let params = PostParams::default();
    let writing = async {
        match &secret.metadata.uid {
            Some(_) => api.replace(&name, &params, &secret).await,
            None => api.create(&params, &secret).await,
        }
    };
    let attempt = format!("writing Secret {SYSTEM_NAMESPACE}/{name}");
    call_within(DEADLINE, attempt, writing).await?;
    Ok(())
}

/// Result of a restore for a recorded name.
#[derive(Debug)]
pub enum Restored {
    Back(Tenant, Deleted),
    /// Another Tenant that was created before the restore, and the workspace of the recorded one.
    InTheWay(Tenant, String),
}

/// The record of a Tenant.
#[derive(Debug)]
pub struct Record {
    secret: Secret,
    kept: Result<Kept, BackupError>,
}

impl Record {
    fn of(mut secret: Secret) -> Self {
        let kept = unpack(&secret);
        // Only its name and version are used later.
        secret.data = None;
        secret.metadata.labels = None;
        secret.metadata.annotations = None;
        secret.metadata.managed_fields = None;
        Self { secret, kept }
    }

    /// Returns the approximate size in bytes.
    fn bytes(&self) -> usize {
        let kept = self.kept.as_ref().map_or(0, bound::weight);
        kept + self.secret.name_any().len()
    }

    /// Names the Tenant, or the Secret if the record cannot be read.
    pub fn key(&self) -> TenantKey {
        let (namespace, name) = match &self.kept {
            Ok(kept) => (kept.namespace.clone(), kept.name.clone()),
            Err(_) => (SYSTEM_NAMESPACE.to_owned(), self.secret.name_any()),
        };
        TenantKey { namespace, name }
    }

    /// Returns the namespace of its release.
    pub fn workspace(&self) -> Option<String> {
        let kept = self.kept.as_ref().ok()?.clone();
        Some(kept.into_tenant().workspace().to_owned())
    }

    /// Creates the Tenant again, and deletes the record.
    ///
    /// # Errors
    /// If the API server rejects the Tenant, or the record cannot be deleted.
    pub async fn put_back(self, client: &Client) -> Result<Option<Restored>, BackupError> {
        let restored = put_back(client, self.kept?).await?;
        forget(client, &self.secret).await?;
        Ok(restored)
    }
}

/// Lists all records.
///
/// # Errors
/// If they cannot be listed.
pub async fn records(client: &Client) -> Result<Vec<Record>, BackupError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let mut params = ListParams::default().labels(RECORD_LABEL).limit(PAGE);
    let endless = |beyond| BackupError::Endless("Secrets with rescued Tenants", beyond);
    let mut records = Vec::new();
    let mut pages = Pages::default();
    loop {
        let attempt = "listing the Secrets with rescued Tenants";
        let list = call_within(DEADLINE, attempt, secrets.list(&params)).await?;
        let objects = list.items.len();
        for secret in list.items {
            let record = Record::of(secret);
            pages.keep(record.bytes()).map_err(endless)?;
            records.push(record);
        }
        let more = pages.follow(&mut params, list.metadata, objects);
        if !more.map_err(endless)? {
            return Ok(records);
        }
    }
}

pub(crate) async fn forget(client: &Client, secret: &Secret) -> Result<(), BackupError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            resource_version: secret.metadata.resource_version.clone(),
            uid: secret.metadata.uid.clone(),
        }),
        ..DeleteParams::default()
    };
    let name = secret.name_any();
    let forgetting = secrets.delete(&name, &params);
    let attempt = format!("deleting Secret {SYSTEM_NAMESPACE}/{name}");
    match call_within(DEADLINE, attempt, forgetting).await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Some(404) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

async fn put_back(client: &Client, kept: Kept) -> Result<Option<Restored>, BackupError> {
    let api: Api<Tenant> = Api::namespaced(client.clone(), &kept.namespace);
    let name = format!("{}/{}", kept.namespace, kept.name);
    let attempt = format!("putting back Tenant {name}");
    let (namespace, deleted, uid) = (kept.namespace.clone(), kept.deleted, kept.uid.clone());
    let (params, tenant) = (PostParams::default(), kept.into_tenant());
    let creating = api.create(&params, &tenant);
    let there = match call_within(DEADLINE, attempt.clone(), creating).await {
        Ok(tenant) => Some(tenant),
        Err(error) if error.code() == Some(409) => {
            call_within(DEADLINE, attempt, api.get_opt(&tenant.name_any())).await?
        }
        Err(error) if matches!(error.code(), Some(403 | 404)) => {
            // If its namespace is deleted or terminating, the Tenant is rightly gone. Otherwise a policy rejects it.
            let namespaces: Api<Namespace> = Api::all(client.clone());
            let found =
                call_within(DEADLINE, attempt, namespaces.get_metadata_opt(&namespace)).await?;
            if found.is_some_and(|found| found.metadata.deletion_timestamp.is_none()) {
                return Err(error.into());
            }
            let reason = error.status().map(|status| &*status.message);
            tracing::warn!(object = %name, reason, "not put back");
            None
        }
        Err(error) => return Err(error.into()),
    };
    let Some(there) = there else { return Ok(None) };
    // An earlier, incomplete attempt created the Tenant if the UID matches. Otherwise it is another Tenant.
    if there.annotations().get(PREVIOUS_UID_ANNOTATION) != Some(&uid) {
        return Ok(Some(Restored::InTheWay(
            there,
            tenant.workspace().to_owned(),
        )));
    }
    let deleted = match deleted {
        Deleted::Yes => delete(&api, &there).await?,
        other => other,
    };
    Ok(Some(Restored::Back(there, deleted)))
}

/// Repeats a user's deletion. The finalizer of the restored Tenant makes the reconciler uninstall its release.
async fn delete(api: &Api<Tenant>, tenant: &Tenant) -> Result<Deleted, BackupError> {
    let preconditions = Preconditions {
        uid: tenant.uid(),
        resource_version: None,
    };
    let params = DeleteParams {
        preconditions: Some(preconditions),
        ..DeleteParams::default()
    };
    let name = tenant.name_any();
    let deleting = api.delete(&name, &params);
    match call_within(DEADLINE, format!("deleting Tenant {name} again"), deleting).await {
        Ok(_) => Ok(Deleted::Yes),
        Err(error) => match error.code() {
            // Already deleted, or replaced by another Tenant.
            Some(404 | 409) => Ok(Deleted::Yes),
            // An older chart may not grant this permission. The user must delete the Tenant again.
            Some(403) => Ok(Deleted::Perhaps),
            _ => Err(error.into()),
        },
    }
}

fn pack(name: &str, kept: &Kept) -> Result<Vec<u8>, BackupError> {
    let content = |error| BackupError::Content(name.to_owned(), error);
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let json = serde_json::to_vec(kept).map_err(|error| content(error.into()))?;
    encoder
        .write_all(&json)
        .and_then(|()| encoder.finish())
        .map_err(content)
}

fn unpack(secret: &Secret) -> Result<Kept, BackupError> {
    let content = |error| BackupError::Content(secret.name_any(), error);
    let missing = || std::io::Error::other(format!("key {RECORD_KEY} is missing"));
    let packed = secret
        .data
        .as_ref()
        .and_then(|data| data.get(RECORD_KEY))
        .ok_or_else(|| content(missing()))?;
    let mut json = Vec::new();
    GzDecoder::new(packed.0.as_slice())
        .take(LARGEST)
        .read_to_end(&mut json)
        .map_err(content)?;
    serde_json::from_slice(&json).map_err(|error| content(error.into()))
}

/// Returns the record of a Tenant.
#[cfg(test)]
pub(crate) fn record_of(tenant: &Tenant) -> Secret {
    let kept = Kept::of(tenant, Deleted::No);
    let name = record_name(&kept.namespace, &kept.name);
    Secret {
        data: Some(
            [(
                RECORD_KEY.to_owned(),
                ByteString(pack(&name, &kept).unwrap()),
            )]
            .into(),
        ),
        metadata: ObjectMeta {
            name: Some(name),
            ..ObjectMeta::default()
        },
        ..Secret::default()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use krypton_types::error_chain::chain;
    use kube::client::Body;

    use super::*;

    static ASKED: AtomicUsize = AtomicUsize::new(0);

    fn tenant(deleted: Option<i64>) -> Tenant {
        let mut tenant = Tenant::new("acme", TenantSpec::default());
        tenant.metadata.namespace = Some("team".to_owned());
        tenant.metadata.uid = Some("old".to_owned());
        tenant.metadata.deletion_timestamp =
            deleted.map(|second| Time(Timestamp::from_second(second).unwrap()));
        tenant
    }

    #[test]
    fn deletion_must_certainly_precede_crd_deletion() {
        let crd = Timestamp::from_second(100).unwrap();
        let (nobody, old) = (BTreeSet::new(), BTreeSet::from(["old".to_owned()]));
        let known = |confirmed: &BTreeSet<String>, under_way: &BTreeSet<String>| Deletions {
            confirmed: confirmed.clone(),
            under_way: under_way.clone(),
        };
        let unknown = known(&nobody, &nobody);
        for (stamp, expected) in [
            (None, Deleted::No),
            (Some(161), Deleted::No),
            (Some(100), Deleted::No),
            (Some(99), Deleted::Perhaps),
            (Some(41), Deleted::Perhaps),
            (Some(40), Deleted::Yes),
        ] {
            let tenant = tenant(stamp);
            assert_eq!(deleted(&tenant, crd, &unknown), Some(expected), "{stamp:?}");
            let sure = stamp.map_or(Deleted::No, |_| Deleted::Yes);
            let confirmed = known(&old, &nobody);
            assert_eq!(deleted(&tenant, crd, &confirmed), Some(sure), "{stamp:?}");
            let waits = stamp.is_none().then_some(Deleted::No);
            let busy = known(&old, &old);
            assert_eq!(deleted(&tenant, crd, &busy), waits, "{stamp:?}");
        }
    }

    fn recorded(kept: &Kept) -> Secret {
        let data = ByteString(pack("record", kept).unwrap());
        Secret {
            data: Some([(RECORD_KEY.to_owned(), data)].into()),
            ..Secret::default()
        }
    }

    #[test]
    fn restored_tenant_keeps_spec_and_previous_uid() {
        let record = Record::of(recorded(&Kept::of(&tenant(Some(100)), Deleted::No)));
        assert_eq!(record.workspace().as_deref(), Some("acme"));
        assert_eq!(record.key().to_string(), "team/acme");
        let back = record.kept.unwrap().into_tenant();
        assert_eq!(back.namespace().as_deref(), Some("team"));
        assert_eq!(back.annotations()[PREVIOUS_UID_ANNOTATION], "old");
        assert_eq!(back.metadata.deletion_timestamp, None);
        assert_eq!(back.metadata.finalizers, None);
    }

    #[test]
    fn placed_tenant_is_restored_as_placed() {
        let mut placed = tenant(Some(100));
        placed.metadata.finalizers = Some(vec![names::PLACED_FINALIZER.to_owned()]);
        let on = (names::PLACED_ON_ANNOTATION.to_owned(), "edge-1".to_owned());
        placed.annotations_mut().extend([on]);
        let back = Kept::of(&placed, Deleted::No).into_tenant();
        assert_eq!(
            krypton_types::placed_tenant::placed_on(&back),
            Some("edge-1")
        );
        assert_eq!(back.finalizers(), [names::PLACED_FINALIZER]);
        assert_eq!(back.annotations()[PREVIOUS_UID_ANNOTATION], "old");
    }

    #[test]
    fn tenant_is_restored_with_only_own_finalizer() {
        let mut held = tenant(Some(100));
        let finalizers = ["example.org/hold", names::TENANT_FINALIZER];
        held.metadata.finalizers = Some(finalizers.map(str::to_owned).to_vec());
        let before = Kept::of(&held, Deleted::No);
        // Krypton's finalizer is already removed, but another controller's finalizer remains.
        held.metadata.finalizers = Some(vec![finalizers[0].to_owned()]);
        let back = Kept::of(&held, Deleted::No)
            .after(Some(before))
            .into_tenant();
        assert_eq!(back.finalizers(), [names::TENANT_FINALIZER]);
    }

    #[test]
    fn confirmed_deletion_outlives_process_for_same_uid() {
        let of = |uid: &str, deleted| Kept {
            uid: uid.to_owned(),
            ..Kept::of(&tenant(Some(99)), deleted)
        };
        for (uid, expected) in [("old", Deleted::Yes), ("another", Deleted::Perhaps)] {
            let kept = of(uid, Deleted::Perhaps).after(Some(of("old", Deleted::Yes)));
            assert_eq!(kept, of(uid, expected));
        }
    }

    #[test]
    fn record_of_older_version_is_readable() {
        let mut old = serde_json::to_value(Kept::of(&tenant(None), Deleted::No)).unwrap();
        let fields = old.as_object_mut().unwrap();
        fields.retain(|name, _| !["deleted", "finalizer"].contains(&name.as_str()));
        let read: Kept = serde_json::from_value(old).unwrap();
        assert_eq!((read.deleted, read.finalizer), (Deleted::No, false));
    }

    #[test]
    fn rubbish_in_a_record_is_an_error() {
        let mut secret = recorded(&Kept::of(&tenant(None), Deleted::No));
        secret.metadata.name = Some("record".to_owned());
        let data = secret.data.get_or_insert_default();
        data.insert(RECORD_KEY.to_owned(), ByteString(b"rubbish".to_vec()));
        let record = Record::of(secret);
        assert_eq!(record.key().to_string(), "krypton-system/record");
        assert!(matches!(record.kept, Err(BackupError::Content(..))));
    }

    #[test]
    fn each_tenant_has_its_own_record() {
        let names = [("a", "b-c"), ("a-b", "c"), ("a", "b")];
        let names: BTreeSet<_> = names.map(|(ns, name)| record_name(ns, name)).into();
        assert_eq!(names.len(), 3);
        assert!(names.iter().all(|name| name.len() <= 63), "{names:?}");
    }

    #[tokio::test]
    async fn endless_pages_of_tenants_are_an_error() {
        let service = tower::service_fn(|_: http::Request<Body>| async {
            // Many more pages than the limit, but finite, so the test ends even without the limit.
            let next = if ASKED.fetch_add(1, Ordering::Relaxed) % 20_000 == 19_999 {
                ""
            } else {
                "more"
            };
            let page = serde_json::json!({"metadata": {"continue": next}, "items": []});
            Ok::<_, Infallible>(http::Response::new(Body::from(
                page.to_string().into_bytes(),
            )))
        });
        let client = Client::new(service, "default");
        let crd = Timestamp::from_second(100).unwrap();
        let kept = keep_and_release(&client, crd, &Deletions::default()).await;
        let errors = [kept.map(drop), records(&client).await.map(drop)];
        for error in errors.map(Result::unwrap_err) {
            let error = chain(&error);
            assert!(error.contains("more than 4000 pages"), "{error}");
        }
    }
}
