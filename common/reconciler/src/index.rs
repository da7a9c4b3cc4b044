//! State of one member as its watches show it: plain values, updated by events and relists.

mod sized_map;
mod watch_store;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::tenant::Tenant;
use krypton_helm::releases::WorkloadKind;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::bound::{self, ExceededBound};
use krypton_types::deployment::{DeploymentKey, DesiredDeployment};
use krypton_types::names;
use krypton_types::tenant::TenantKey;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::Event;

use crate::field_managers::keep_last_managers;
use crate::owner::{OwnerKey, ReleaseOwner};
use crate::workload::{WorkloadKey, WorkloadObject, WorkloadState, readiness};
use crate::workspaces::metadata::NamespaceMetadata;

pub use watch_store::WatchStore;

/// Label on a namespace that Krypton created. The value is the UID of the Tenant or KryptonDeployment.
pub const CREATOR_LABEL: &str = "mesh.openkcm.io/created-for";

/// The relevant fields of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workspace {
    pub terminating: bool,
    /// UID of the Tenant that Krypton created the namespace for. `None` if Krypton did not create it.
    pub creator: Option<String>,
    /// Tenant (`NAMESPACE/NAME`) that may use the namespace and adopt the release in it, as annotated by a user.
    pub open_to: Option<String>,
    pub uid: String,
    /// Metadata of a namespace that Krypton created. `None` for other namespaces.
    pub namespace_metadata: Option<Box<NamespaceMetadata>>,
}

impl Workspace {
    fn from_metadata(meta: &ObjectMeta) -> Self {
        let labels = meta.labels.as_ref();
        let creator = labels.and_then(|labels| labels.get(CREATOR_LABEL)).cloned();
        Self {
            terminating: meta.deletion_timestamp.is_some(),
            uid: meta.uid.clone().unwrap_or_default(),
            open_to: (meta.annotations.as_ref())
                .and_then(|annotations| annotations.get(names::ADOPT_ANNOTATION))
                .cloned(),
            namespace_metadata: creator
                .is_some()
                .then(|| Box::new(NamespaceMetadata::new(meta))),
            creator,
        }
    }
}

/// State of the Tenant CRD in its watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrdState {
    Missing,
    Terminating,
    Present,
}

/// Maximum bytes to store of an untrusted server.
const MAX_STORED_BYTES: usize = 64 << 20;
/// Approximate upper limit for the bytes of a Tenant's key.
const BYTES_PER_WAITING_KEY: usize = 512;
/// Maximum length of a name in bytes. No API server allows longer ones.
const MAX_NAME_BYTES: usize = 253;

/// The known state of one member.
#[derive(Debug)]
pub struct Index {
    cluster: String,
    source_namespace: Option<String>,
    pub tenants: WatchStore<TenantKey, Arc<Tenant>>,
    /// Orders of the home cluster in the current desired state. They don't come from a watch.
    deployments: BTreeMap<DeploymentKey, Arc<DesiredDeployment>>,
    pub revisions: WatchStore<(ReleaseKey, u32), Revision>,
    pub workspaces: WatchStore<String, Workspace>,
    workloads: BTreeMap<WorkloadKind, WatchStore<(ReleaseKey, WorkloadKey), WorkloadState>>,
    crd: WatchStore<String, (CrdState, Option<u32>)>,
    claimants_by_release: BTreeMap<ReleaseKey, BTreeSet<OwnerKey>>,
    release_by_owner: BTreeMap<OwnerKey, ReleaseKey>,
    lists_started: u64,
}

impl Index {
    pub fn new(cluster: &str, source_namespace: Option<&str>) -> Self {
        Self {
            cluster: cluster.to_owned(),
            source_namespace: source_namespace.map(str::to_owned),
            tenants: WatchStore::default(),
            deployments: BTreeMap::new(),
            revisions: WatchStore::default(),
            workspaces: WatchStore::default(),
            workloads: WORKLOAD_KINDS
                .map(|kind| (kind, WatchStore::default()))
                .into(),
            crd: WatchStore::default(),
            claimants_by_release: BTreeMap::new(),
            release_by_owner: BTreeMap::new(),
            lists_started: 0,
        }
    }

    /// Returns the number of lists that have started, of Tenants, releases and namespaces.
    ///
    /// A response to an earlier request must not change the index: if etcd was restored, its object no longer exists,
    /// although its version is higher. Otherwise, the list or the watch contains it.
    pub fn lists_started(&self) -> u64 {
        self.lists_started
    }

    /// Returns true if every watch has listed once. Before that, absence proves nothing.
    pub fn synced(&self) -> bool {
        self.tenants.synced() && self.others_synced()
    }

    /// Returns true if all lists but that of Tenants are complete.
    fn others_synced(&self) -> bool {
        self.crd.synced()
            && self.revisions.synced()
            && self.workspaces.synced()
            && self.workloads.values().all(WatchStore::synced)
    }

    /// Returns true if everything that exists is listed. Without the CRD there are no Tenants.
    pub fn ready(&self) -> bool {
        self.others_synced() && (self.tenants.synced() || self.crd() != Some(CrdState::Present))
    }

    /// Returns the bound that the objects of the watches exceed. `waiting` keys count too.
    pub fn exceeded_bound(&self, waiting: usize) -> Option<ExceededBound> {
        let sizes = [
            self.tenants.size(),
            self.revisions.size(),
            self.workspaces.size(),
            self.crd.size(),
        ];
        let sizes = sizes
            .into_iter()
            .chain(self.workloads.values().map(WatchStore::size));
        let (mut objects, mut bytes) = (waiting, waiting * BYTES_PER_WAITING_KEY);
        for (store_objects, store_bytes) in sizes {
            objects += store_objects;
            bytes += store_bytes;
        }
        if objects > bound::OBJECTS_MAX {
            return Some(ExceededBound::Objects);
        }
        (bytes > MAX_STORED_BYTES).then_some(ExceededBound::Bytes(MAX_STORED_BYTES))
    }

    /// Drops all watched state until the next lists are complete.
    pub fn clear_watched(&mut self) {
        let tenants = self.tenants.iter().map(|(key, _)| key.clone());
        let tenants = tenants.map(OwnerKey::Tenant).collect();
        self.tenants = WatchStore::default();
        self.revisions = WatchStore::default();
        self.workspaces = WatchStore::default();
        self.workloads = WORKLOAD_KINDS
            .map(|kind| (kind, WatchStore::default()))
            .into();
        self.crd = WatchStore::default();
        self.update_claims(tenants);
    }

    pub fn owner(&self, key: &OwnerKey) -> Option<ReleaseOwner> {
        match key {
            OwnerKey::Tenant(key) => self.tenants.get(key).cloned().map(ReleaseOwner::Tenant),
            OwnerKey::Deployment(key) => {
                let order = self.deployments.get(key).cloned();
                order.map(ReleaseOwner::Deployment)
            }
        }
    }

    /// Returns all Tenants and KryptonDeployments, including ignored ones.
    pub fn owners(&self) -> impl Iterator<Item = (OwnerKey, ReleaseOwner)> {
        let tenants = self.tenants.iter().map(|(key, tenant)| {
            let owner = ReleaseOwner::Tenant(Arc::clone(tenant));
            (OwnerKey::Tenant(key.clone()), owner)
        });
        let deployments = self.deployments.iter().map(|(key, order)| {
            let owner = ReleaseOwner::Deployment(Arc::clone(order));
            (OwnerKey::Deployment(key.clone()), owner)
        });
        tenants.chain(deployments)
    }

    /// Returns the revisions of a release, oldest first.
    pub fn release_revisions(&self, key: &ReleaseKey) -> Vec<&Revision> {
        self.revisions
            .iter_from((key.clone(), 0))
            .take_while(|((release, _), _)| release == key)
            .map(|(_, revision)| revision)
            .collect()
    }

    /// Returns another namespace that contains a release of this name that Krypton did not create and no owner claims.
    pub fn foreign_release_elsewhere(&self, key: &ReleaseKey) -> Option<&str> {
        let is_foreign_elsewhere = |release: &ReleaseKey, revision: &Revision| {
            release.name == key.name
                && release.namespace != key.namespace
                && revision.is_foreign()
                && !self.is_claimed(release)
        };
        let mut revisions = self.revisions.iter();
        let foreign =
            revisions.find(|((release, _), revision)| is_foreign_elsewhere(release, revision));
        foreign.map(|((release, _), _)| release.namespace.as_str())
    }

    /// Returns the workloads that carry the release's annotations.
    pub fn release_workloads(&self, key: &ReleaseKey) -> BTreeMap<WorkloadKey, WorkloadState> {
        let mut workloads = BTreeMap::new();
        for (kind, store) in &self.workloads {
            let first = WorkloadKey {
                kind: *kind,
                namespace: String::new(),
                name: String::new(),
            };
            workloads.extend(
                store
                    .iter_from((key.clone(), first))
                    .take_while(|((release, _), _)| release == key)
                    .map(|((_, workload), state)| (workload.clone(), state.clone())),
            );
        }
        workloads
    }

    /// Returns the owners on this member that request the release, oldest first.
    pub fn claimants(&self, key: &ReleaseKey) -> Vec<ReleaseOwner> {
        let mut claimants: Vec<_> = self
            .claimants_by_release
            .get(key)
            .into_iter()
            .flatten()
            .filter_map(|claimant| self.owner(claimant))
            .filter(|claimant| claimant.is_for(&self.cluster, self.source_namespace.as_deref()))
            .collect();
        claimants.sort_by_cached_key(|claimant| claimant.seniority());
        claimants
    }

    /// Returns true if an owner requests the release.
    pub fn is_claimed(&self, key: &ReleaseKey) -> bool {
        self.claimants_by_release.contains_key(key)
    }

    /// Returns the owners that use the namespace, for any release.
    pub fn workspace_users(&self, namespace: &str) -> BTreeSet<OwnerKey> {
        let first = ReleaseKey::new(namespace, "");
        self.claimants_by_release
            .range(first..)
            .take_while(|(key, _)| key.namespace == namespace)
            .flat_map(|(_, users)| users.iter().cloned())
            .collect()
    }

    /// Applies the Tenant from the response to a write. If the watch has shown its deletion in the meantime, it stays
    /// deleted.
    pub fn tenant_written(&mut self, tenant: Tenant) -> BTreeSet<OwnerKey> {
        let is_known = tenant_key(&tenant.metadata)
            .and_then(|key| self.tenants.get(&key))
            .is_some_and(|known| known.metadata.uid == tenant.metadata.uid);
        if is_known {
            self.tenant_event(Event::Apply(tenant))
        } else {
            BTreeSet::new()
        }
    }

    pub fn tenant_event(&mut self, event: Event<Tenant>) -> BTreeSet<OwnerKey> {
        self.lists_started += u64::from(matches!(event, Event::Init));
        let changed = self.tenants.apply_event(event, |mut tenant| {
            keep_last_managers(&mut tenant.metadata);
            let key = tenant_key(&tenant.metadata)?;
            Some((key, resource_version(&tenant.metadata), Arc::new(tenant)))
        });
        self.update_claims(changed.into_iter().map(OwnerKey::Tenant).collect())
    }

    /// Replaces the orders of the home cluster. The reconciler ignores an order that is no longer among them.
    pub fn set_orders(&mut self, orders: &[DesiredDeployment]) -> BTreeSet<OwnerKey> {
        let next: BTreeMap<DeploymentKey, &DesiredDeployment> =
            orders.iter().map(|order| (order.key(), order)).collect();
        let is_withdrawn = |key: &&DeploymentKey| !next.contains_key(*key);
        let mut changed: BTreeSet<DeploymentKey> = self
            .deployments
            .keys()
            .filter(is_withdrawn)
            .cloned()
            .collect();
        self.deployments.retain(|key, _| next.contains_key(key));
        for (key, order) in next {
            let known = self.deployments.get(&key);
            if known.is_none_or(|known| **known != *order) {
                self.deployments
                    .insert(key.clone(), Arc::new(order.clone()));
                changed.insert(key);
            }
        }
        self.update_claims(changed.into_iter().map(OwnerKey::Deployment).collect())
    }

    /// Updates the claims of the changed owners. Returns these and the other owners that claim the same releases.
    fn update_claims(&mut self, changed: BTreeSet<OwnerKey>) -> BTreeSet<OwnerKey> {
        let mut affected = changed.clone();
        for key in changed {
            // Reconcile the other claimants of a release when one of them appears, disappears or moves.
            if let Some(release) = self.release_by_owner.remove(&key)
                && let Some(claimants) = self.claimants_by_release.get_mut(&release)
            {
                claimants.remove(&key);
                affected.extend(claimants.iter().cloned());
                if claimants.is_empty() {
                    self.claimants_by_release.remove(&release);
                }
            }
            if let Some(owner) = self.owner(&key) {
                let release = owner.release(&self.cluster);
                let claimants = self
                    .claimants_by_release
                    .entry(release.clone())
                    .or_default();
                affected.extend(claimants.iter().cloned());
                claimants.insert(key.clone());
                self.release_by_owner.insert(key, release);
            }
        }
        affected
    }

    pub fn release_event(&mut self, event: Event<PartialObjectMeta<Secret>>) -> BTreeSet<OwnerKey> {
        self.lists_started += u64::from(matches!(event, Event::Init));
        let changed = self.revisions.apply_event(event, |object| {
            let meta = object.metadata;
            let (key, revision) = Revision::from_metadata(&meta)?;
            Some(((key, revision.revision), resource_version(&meta), revision))
        });
        self.claimants_of(changed.into_iter().map(|(key, _)| key))
    }

    fn claimants_of(&self, releases: impl IntoIterator<Item = ReleaseKey>) -> BTreeSet<OwnerKey> {
        let releases: BTreeSet<ReleaseKey> = releases.into_iter().collect();
        let claimants = releases
            .iter()
            .filter_map(|key| self.claimants_by_release.get(key));
        claimants.flatten().cloned().collect()
    }

    /// Applies a Secret of a release that was read outside the watch.
    pub fn release_read(&mut self, meta: &ObjectMeta) -> BTreeSet<OwnerKey> {
        let Some((key, revision)) = Revision::from_metadata(meta) else {
            return BTreeSet::new();
        };
        let revision_key = (key, revision.revision);
        let changed = self
            .revisions
            .apply_response(revision_key, resource_version(meta), revision);
        self.claimants_of(changed.map(|(key, _)| key))
    }

    /// Replaces the revisions of one release with a list of its Secrets at `list_version`. Later changes in the watch
    /// win.
    ///
    /// `known_before` is the highest version that was known before the request. If the list is older, etcd was
    /// restored, and what was known is out of date.
    pub fn release_listed(
        &mut self,
        key: &ReleaseKey,
        listed: Vec<ObjectMeta>,
        (list_version, known_before): (u64, u64),
    ) {
        let outdated: Vec<u32> = self
            .versions_of(key)
            .filter(|(version, _)| *version <= list_version.max(known_before))
            .map(|(_, revision)| revision)
            .collect();
        let listed: Vec<_> = (listed.iter())
            .filter_map(|meta| Some((resource_version(meta), Revision::from_metadata(meta)?)))
            .collect();
        let listed_revisions: BTreeSet<u32> =
            listed.iter().map(|(_, (_, it))| it.revision).collect();
        for revision in outdated {
            if list_version < known_before || !listed_revisions.contains(&revision) {
                self.revisions.remove(&(key.clone(), revision));
            }
        }
        for (version, (release, revision)) in listed {
            let key = (release, revision.revision);
            self.revisions.apply_response(key, version, revision);
        }
    }

    /// Returns the highest `resourceVersion` of a release's known revisions.
    pub fn release_version(&self, key: &ReleaseKey) -> u64 {
        let versions = self.versions_of(key).map(|(version, _)| version);
        versions.max().unwrap_or_default()
    }

    /// Returns the `resourceVersion` and the number of each known revision of a release.
    fn versions_of(&self, key: &ReleaseKey) -> impl Iterator<Item = (u64, u32)> {
        let versions = self.revisions.versions_from((key.clone(), 0));
        let versions = versions.take_while(move |((release, _), _)| release == key);
        versions.map(|((_, revision), version)| (version, *revision))
    }

    /// Applies a namespace event. Returns the changed namespaces and the owners that use them as a workspace.
    pub fn workspace_event(
        &mut self,
        event: Event<PartialObjectMeta<Namespace>>,
    ) -> (BTreeSet<String>, BTreeSet<OwnerKey>) {
        self.lists_started += u64::from(matches!(event, Event::Init));
        let changed = self.workspaces.apply_event(event, |object| {
            let meta = object.metadata;
            Some((
                meta.name.clone()?,
                resource_version(&meta),
                Workspace::from_metadata(&meta),
            ))
        });
        self.with_users(changed)
    }

    /// Applies a namespace from the response to a read or write. Returns the same as `workspace_event`.
    pub fn workspace_written(
        &mut self,
        meta: &ObjectMeta,
    ) -> (BTreeSet<String>, BTreeSet<OwnerKey>) {
        let workspace = Workspace::from_metadata(meta);
        let name = meta.name.clone();
        let changed = name.and_then(|name| {
            self.workspaces
                .apply_response(name, resource_version(meta), workspace)
        });
        self.with_users(changed.into_iter().collect())
    }

    fn with_users(&self, changed: BTreeSet<String>) -> (BTreeSet<String>, BTreeSet<OwnerKey>) {
        let users = changed
            .iter()
            .flat_map(|namespace| self.workspace_users(namespace));
        let users = users.collect();
        (changed, users)
    }

    pub fn workload_event(
        &mut self,
        kind: WorkloadKind,
        event: Event<WorkloadObject>,
    ) -> BTreeSet<OwnerKey> {
        let read = |object: WorkloadObject| {
            let meta = &object.metadata;
            let annotations = meta.annotations.as_ref()?;
            let release = ReleaseKey {
                namespace: annotations.get("meta.helm.sh/release-namespace")?.clone(),
                name: annotations.get("meta.helm.sh/release-name")?.clone(),
            };
            let workload = WorkloadKey {
                kind,
                namespace: meta.namespace.clone()?,
                name: meta.name.clone()?,
            };
            let state = readiness(kind, &object);
            Some(((release, workload), resource_version(meta), state))
        };
        let changed = self
            .workloads
            .entry(kind)
            .or_default()
            .apply_event(event, read);
        self.claimants_of(changed.into_iter().map(|(key, _)| key))
    }

    /// Returns the state of the watched CRD, or `None` before the first list.
    pub fn crd(&self) -> Option<CrdState> {
        let state = self
            .crd
            .iter()
            .next()
            .map_or(CrdState::Missing, |(_, (state, _))| *state);
        self.crd.synced().then_some(state)
    }

    pub fn crd_event(&mut self, event: Event<PartialObjectMeta<CustomResourceDefinition>>) {
        self.crd.apply_event(event, |object| {
            let meta = object.metadata;
            let state = match meta.deletion_timestamp {
                Some(_) => CrdState::Terminating,
                None => CrdState::Present,
            };
            let schema = krypton_crds::schema_version(&meta);
            Some((meta.name.clone()?, resource_version(&meta), (state, schema)))
        });
    }

    /// Returns the schema version of the Tenant CRD, if it exists. The inner `None` is krypton-operator's CRD.
    pub fn schema(&self) -> Option<Option<u32>> {
        self.crd.iter().next().map(|(_, (_, schema))| *schema)
    }
}

/// The workload kinds whose readiness is watched.
const WORKLOAD_KINDS: [WorkloadKind; 3] = [
    WorkloadKind::Deployment,
    WorkloadKind::StatefulSet,
    WorkloadKind::DaemonSet,
];

pub fn tenant_key(meta: &ObjectMeta) -> Option<TenantKey> {
    let valid_name =
        |name: &Option<String>| name.clone().filter(|name| name.len() <= MAX_NAME_BYTES);
    Some(TenantKey::new(
        valid_name(&meta.namespace)?,
        valid_name(&meta.name)?,
    ))
}

/// Returns the resourceVersion as a number. The Kubernetes API guarantees that versions are comparable since 1.35
/// (KEP-5504), and they were before. A version that is not a number counts as newest.
fn resource_version(meta: &ObjectMeta) -> u64 {
    parse_version(meta.resource_version.as_deref())
}

pub(crate) fn parse_version(resource_version: Option<&str>) -> u64 {
    resource_version
        .and_then(|version| version.parse().ok())
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
