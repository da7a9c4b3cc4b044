//! Tenants outlive their CRD (design §3, rule 2): when it is deleted, their specs are kept in a Secret,
//! their finalizers let go without uninstalling, and both are put back. So are those that were to go, since
//! their finalizers would keep all others away; they are deleted once more.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_common::error_chain::chain;
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
/// The stamps of the CRD and of a Tenant may be of two apiservers, whose clocks differ by less than this.
const CLOCKS_DIFFER_BY: SignedDuration = SignedDuration::from_secs(60);
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

/// What this process knows of deletions, by the UIDs of the Tenants.
#[derive(Clone, Debug, Default)]
pub struct Deletions {
    /// Seen while the CRD was whole.
    pub confirmed: BTreeSet<String>,
    /// Being carried out at this moment.
    pub under_way: BTreeSet<String>,
}

/// Whether a person has deleted a Tenant that goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Deleted {
    /// It goes only because its CRD does.
    #[default]
    No,
    /// At about the time of its CRD, and nobody saw which came first.
    Perhaps,
    Yes,
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
    #[serde(default)]
    deleted: Deleted,
    /// It had our finalizer. Put back without, it would be gone at once if it was deleted, and its release not.
    #[serde(default)]
    finalizer: bool,
    /// It is placed on another member, which keeps what it has.
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

/// Whether a Tenant was deleted before its CRD; `None` while that is being carried out. Doubt removes
/// nothing: only what is certain counts.
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

/// Keeps the specs, then lets go of the finalizers. Returns how many Tenants were let go.
pub async fn keep_and_release(
    client: &Client,
    crd_deleted: Timestamp,
    known: &Deletions,
) -> Result<usize, RescueError> {
    tokio::time::timeout(DEADLINE, keep_and_release_now(client, crd_deleted, known))
        .await
        .unwrap_or(Err(RescueError::Deadline))
}

async fn keep_and_release_now(
    client: &Client,
    crd_deleted: Timestamp,
    known: &Deletions,
) -> Result<usize, RescueError> {
    let all: Api<Tenant> = Api::all(client.clone());
    let tenants = all
        .list(&ListParams::default())
        .await
        .map_err(RescueError::List)?
        .items;
    let going: Vec<(&Tenant, Deleted)> = tenants
        .iter()
        .filter_map(|tenant| Some((tenant, deleted(tenant, crd_deleted, known)?)))
        .collect();
    if going.is_empty() {
        return Ok(0);
    }
    let all = going
        .iter()
        .map(|(tenant, deleted)| Kept::of(tenant, *deleted));
    keep(client, all.collect()).await?;
    let mut released = 0;
    for (tenant, _) in going {
        let finalizers: Vec<&String> = tenant
            .finalizers()
            .iter()
            .filter(|name| {
                ![names::TENANT_FINALIZER, names::PLACED_FINALIZER].contains(&name.as_str())
            })
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

/// In the place of what is kept of its name. Who was here before us may have known more.
fn add(kept: &mut Vec<Kept>, mut tenant: Kept) {
    let same = |old: &Kept| (&old.namespace, &old.name) == (&tenant.namespace, &tenant.name);
    if let Some(place) = kept.iter().position(same) {
        let old = kept.swap_remove(place);
        if old.uid == tenant.uid {
            tenant.deleted = tenant.deleted.max(old.deleted);
            tenant.finalizer |= old.finalizer;
            tenant.placed |= old.placed;
        }
    }
    kept.push(tenant);
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
        add(&mut kept, tenant);
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

/// A Tenant of which a kept one has the name.
#[derive(Debug)]
pub enum Restored {
    Back(Tenant, Deleted),
    /// Another one that was made before the kept one could be put back, whose release is in that namespace.
    InTheWay(Tenant, String),
}

/// Puts back what is kept, once the CRD is served again.
/// One that is not taken back keeps none of the others away, and stays kept.
pub async fn restore(client: &Client) -> Result<Vec<Restored>, RescueError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let found = in_time(secrets.get_opt(RESCUE_NAME)).await?;
    let found = found.map_err(|error| RescueError::Secret("read", error))?;
    let Some(secret) = found else {
        return Ok(Vec::new());
    };
    let (mut restored, mut refused) = (Vec::new(), None);
    for kept in unpack(&secret)? {
        match put_back(client, kept).await {
            Ok(found) => restored.extend(found),
            Err(error) => {
                tracing::warn!(problem = %chain(&error), "not put back yet");
                refused = Some(error);
            }
        }
    }
    if let Some(refused) = refused {
        return Err(refused);
    }
    let preconditions = Preconditions {
        resource_version: secret.metadata.resource_version.clone(),
        uid: secret.metadata.uid.clone(),
    };
    let params = DeleteParams {
        preconditions: Some(preconditions),
        ..DeleteParams::default()
    };
    let forgetting = effect!("rescue.forget", secrets.delete(RESCUE_NAME, &params));
    forgetting
        .await
        .map_err(|error| RescueError::Secret("deleted", error))?;
    Ok(restored)
}

async fn put_back(client: &Client, kept: Kept) -> Result<Option<Restored>, RescueError> {
    let api: Api<Tenant> = Api::namespaced(client.clone(), &kept.namespace);
    let name = format!("{}/{}", kept.namespace, kept.name);
    let restore = |error| RescueError::Restore(name.clone(), error);
    let (namespace, deleted, uid) = (kept.namespace.clone(), kept.deleted, kept.uid.clone());
    let (params, tenant) = (PostParams::default(), kept.into_tenant());
    let creating = effect!("rescue.put-back", api.create(&params, &tenant));
    let there = match in_time(creating).await? {
        Ok(tenant) => Some(tenant),
        Err(kube::Error::Api(status)) if status.code == 409 => {
            let found = in_time(api.get_opt(&tenant.name_any())).await?;
            found.map_err(restore)?
        }
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 403 => {
            // Its namespace is gone or going: so is the Tenant, and rightly. Else it is somebody's rule.
            let namespaces: Api<Namespace> = Api::all(client.clone());
            let found = in_time(namespaces.get_metadata_opt(&namespace)).await?;
            let found = found.map_err(restore)?;
            if found.is_some_and(|found| found.metadata.deletion_timestamp.is_none()) {
                return Err(restore(kube::Error::Api(status)));
            }
            tracing::warn!(object = %name, reason = %status.message, "not put back");
            None
        }
        Err(error) => return Err(restore(error)),
    };
    let Some(there) = there else { return Ok(None) };
    // By who was here before us, and got no further; or it is somebody else's.
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

async fn in_time<T>(call: impl Future<Output = T>) -> Result<T, RescueError> {
    let answer = tokio::time::timeout(DEADLINE, call).await;
    answer.map_err(|_| RescueError::Deadline)
}

/// As a person had. With the finalizer that it was put back with, it is uninstalled now.
async fn delete(api: &Api<Tenant>, tenant: &Tenant) -> Result<Deleted, RescueError> {
    let preconditions = Preconditions {
        uid: tenant.uid(),
        resource_version: None,
    };
    let params = DeleteParams {
        preconditions: Some(preconditions),
        ..DeleteParams::default()
    };
    let name = tenant.name_any();
    match effect!("rescue.delete", api.delete(&name, &params)).await {
        Ok(_) => Ok(Deleted::Yes),
        // Gone already, or another one by now.
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {
            Ok(Deleted::Yes)
        }
        // The chart that gives the right may be older: a person has to.
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(Deleted::Perhaps),
        Err(error) => Err(RescueError::Restore(name, error)),
    }
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
    fn a_deletion_counts_only_where_it_is_certain_that_it_came_before_that_of_the_crd() {
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

    #[test]
    fn a_kept_tenant_comes_back_with_its_spec_and_its_old_uid() {
        let kept = vec![Kept::of(&tenant(Some(100)), Deleted::No)];
        let secret = Secret {
            data: Some([(KEY.to_owned(), ByteString(pack(&kept).unwrap()))].into()),
            ..Secret::default()
        };
        let back = unpack(&secret).unwrap().remove(0).into_tenant();
        assert_eq!(back.namespace().as_deref(), Some("team"));
        assert_eq!(back.annotations()[PREVIOUS_UID_ANNOTATION], "old");
        assert_eq!(back.metadata.deletion_timestamp, None);
        assert_eq!(back.metadata.finalizers, None);
    }

    #[test]
    fn a_placed_tenant_is_put_back_as_a_placed_tenant() {
        let mut placed = tenant(Some(100));
        placed.metadata.finalizers = Some(vec![names::PLACED_FINALIZER.to_owned()]);
        let on = (names::PLACED_ON_ANNOTATION.to_owned(), "edge-1".to_owned());
        placed.annotations_mut().extend([on]);
        let back = Kept::of(&placed, Deleted::No).into_tenant();
        assert_eq!(crate::placement::placed_on(&back), Some("edge-1"));
        assert_eq!(back.finalizers(), [names::PLACED_FINALIZER]);
        assert_eq!(back.annotations()[PREVIOUS_UID_ANNOTATION], "old");
    }

    #[test]
    fn a_tenant_is_put_back_with_our_finalizer_if_it_had_that_and_without_those_of_others() {
        let mut held = tenant(Some(100));
        let finalizers = ["example.org/hold", names::TENANT_FINALIZER];
        held.metadata.finalizers = Some(finalizers.map(str::to_owned).to_vec());
        let mut kept = vec![Kept::of(&held, Deleted::No)];
        // Ours is off already, and somebody else's holds it still.
        held.metadata.finalizers = Some(vec![finalizers[0].to_owned()]);
        add(&mut kept, Kept::of(&held, Deleted::No));
        let back = kept.remove(0).into_tenant();
        assert_eq!(back.finalizers(), [names::TENANT_FINALIZER]);
    }

    #[test]
    fn what_was_certain_stays_certain_when_another_process_goes_on() {
        let of = |uid: &str, deleted| Kept {
            uid: uid.to_owned(),
            ..Kept::of(&tenant(Some(99)), deleted)
        };
        for (uid, expected) in [("old", Deleted::Yes), ("another", Deleted::Perhaps)] {
            let mut kept = vec![of("old", Deleted::Yes)];
            add(&mut kept, of(uid, Deleted::Perhaps));
            assert_eq!(kept, [of(uid, expected)]);
        }
    }

    #[test]
    fn what_an_older_krypton_has_kept_is_put_back() {
        let mut old = serde_json::to_value(Kept::of(&tenant(None), Deleted::No)).unwrap();
        let fields = old.as_object_mut().unwrap();
        fields.retain(|name, _| !["deleted", "finalizer"].contains(&name.as_str()));
        let read: Kept = serde_json::from_value(old).unwrap();
        assert_eq!((read.deleted, read.finalizer), (Deleted::No, false));
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
