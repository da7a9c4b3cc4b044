//! State of one member as its watches show it: plain values, updated by events and relists.

mod kept;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::tenant::Tenant;
use krypton_helm::releases::WorkloadKind;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_runtime::bound::{self, Beyond};
use krypton_types::deployment::{DeploymentKey, DesiredDeployment};
use krypton_types::names;
use krypton_types::tenant::TenantKey;
use kube::runtime::watcher::Event;

use crate::owner::{OwnerKey, ReleaseOwner};
use crate::workload::{WorkloadKey, WorkloadState};
use crate::workspaces::metadata::NamespaceMetadata;
use kept::{Heap, Kept};

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
    fn of(meta: &ObjectMeta) -> Self {
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
                .then(|| Box::new(NamespaceMetadata::of(meta))),
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
const KEPT_BYTES: usize = 64 << 20;
/// Approximate upper limit for the bytes of a Tenant's key.
const WAITING_BYTES: usize = 512;
/// Maximum length of a name in bytes. No API server allows longer ones.
const LONGEST_NAME: usize = 253;

/// Maximum number of deletions to remember. A response is delayed by at most one Helm run, with far fewer deletions.
const GONE_MOST: usize = 4096;

/// A map that a watch feeds. An event never replaces an entry with an older version. A relist replaces the whole map.
#[derive(Debug)]
pub struct Watched<K, V> {
    items: Kept<K, V>,
    listing: Option<Kept<K, V>>,
    /// Number of objects in the current list, stored or not.
    listed: usize,
    synced: bool,
    /// Recent deletions by resourceVersion, whose older responses may still arrive. At most [`GONE_MOST`].
    gone: Kept<K, ()>,
}

impl<K, V> Default for Watched<K, V> {
    fn default() -> Self {
        Self {
            items: Kept::default(),
            listing: None,
            listed: 0,
            synced: false,
            gone: Kept::default(),
        }
    }
}

impl<K: Ord + Clone + Heap, V: PartialEq + Clone + Heap> Watched<K, V> {
    /// Returns the number of objects and their bytes. A list in progress replaces the stored entries.
    fn size(&self) -> (usize, usize) {
        let listing = self.listing.as_ref();
        let bytes = listing.map_or(0, Kept::bytes).max(self.items.bytes());
        let objects = self.listed.max(self.items.len());
        (objects, bytes + self.gone.bytes())
    }

    pub fn get(&self, key: &K) -> Option<&V> {
        self.items.get(key).map(|(_, value)| value)
    }

    /// Returns the resourceVersion of the entry, if it is a number.
    pub fn version(&self, key: &K) -> Option<u64> {
        let version = self.items.get(key).map(|(version, _)| *version);
        version.filter(|version| *version > 0)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.items.iter().map(|(key, (_, value))| (key, value))
    }

    /// Returns the entries from `from` on, in key order.
    pub fn from(&self, from: K) -> impl Iterator<Item = (&K, &V)> {
        self.items
            .range(from..)
            .map(|(key, (_, value))| (key, value))
    }

    /// Returns true if the first list is complete.
    pub fn synced(&self) -> bool {
        self.synced
    }

    /// Applies an object that was read or written outside the watch.
    ///
    /// If the watch has shown a later deletion, the object stays deleted. Its absence from the watch proves nothing, as
    /// a list may be incomplete.
    fn learn(&mut self, key: K, resource_version: u64, value: V) -> Option<K> {
        let gone = self
            .gone
            .get(&key)
            .is_some_and(|(end, ())| *end >= resource_version);
        match gone {
            true => None,
            false => self.apply(key, resource_version, value),
        }
    }

    /// Applies one object and ignores a version older than the known one. The watch delivers this process's writes
    /// after their responses.
    fn apply(&mut self, key: K, resource_version: u64, value: V) -> Option<K> {
        // A paged list is as old as its first page, so it lacks later writes of this process.
        if let Some(listing) = &mut self.listing {
            listing.insert(key.clone(), resource_version, value.clone());
        }
        if let Some((known, old)) = self.items.get(&key) {
            if *known > resource_version {
                return None;
            }
            if *old == value {
                self.items.insert(key, resource_version, value);
                return None;
            }
        }
        self.items.insert(key.clone(), resource_version, value);
        Some(key)
    }

    fn delete(&mut self, key: &K, resource_version: u64) -> Option<K> {
        match self.items.get(key) {
            Some((known, _)) if *known > resource_version => None,
            Some(_) => self.items.remove(key).map(|_| key.clone()),
            None => None,
        }
    }

    /// Applies one event of kube's watcher. `read` returns the key, the version and the value of an object. Returns the
    /// changed keys.
    fn event<O>(
        &mut self,
        event: Event<O>,
        read: impl Fn(O) -> Option<(K, u64, V)>,
    ) -> BTreeSet<K> {
        match event {
            Event::Apply(object) => read(object)
                .and_then(|(key, version, value)| {
                    self.gone.remove(&key);
                    self.apply(key, version, value)
                })
                .into_iter()
                .collect(),
            Event::Delete(object) => read(object)
                .and_then(|(key, version, _)| {
                    if self.gone.len() >= GONE_MOST {
                        self.gone.clear();
                    }
                    self.gone.insert(key.clone(), version, ());
                    self.delete(&key, version)
                })
                .into_iter()
                .collect(),
            Event::Init => {
                (self.listing, self.listed) = (Some(Kept::default()), 0);
                // A restored etcd continues from an older resourceVersion.
                self.gone.clear();
                BTreeSet::new()
            }
            Event::InitApply(object) => {
                self.listed += 1;
                if let (Some((key, version, value)), Some(listing)) =
                    (read(object), self.listing.as_mut())
                {
                    let newer = listing.get(&key).is_some_and(|(known, _)| *known > version);
                    if !newer {
                        listing.insert(key, version, value);
                    }
                }
                BTreeSet::new()
            }
            Event::InitDone => self.replace(),
        }
    }

    fn replace(&mut self) -> BTreeSet<K> {
        let listing = self.listing.take().unwrap_or_default().into_entries();
        self.listed = 0;
        let mut changed: BTreeSet<K> = self
            .items
            .keys()
            .filter(|key| !listing.contains_key(key))
            .cloned()
            .collect();
        for key in &changed {
            self.items.remove(key);
        }
        // A list comes from a quorum read, so it wins even if it is older than the known state. A restored etcd causes
        // that.
        for (key, (version, value)) in listing {
            let old = self.items.insert(key.clone(), version, value);
            if old.as_ref().map(|(_, value)| value) != self.get(&key) {
                changed.insert(key);
            }
        }
        self.synced = true;
        changed
    }
}

/// The known state of one member.
#[derive(Debug)]
pub struct Index {
    cluster: String,
    source_namespace: Option<String>,
    pub tenants: Watched<TenantKey, Arc<Tenant>>,
    /// Orders of the home cluster in the current desired state. They don't come from a watch.
    deployments: BTreeMap<DeploymentKey, Arc<DesiredDeployment>>,
    pub revisions: Watched<(ReleaseKey, u32), Revision>,
    pub workspaces: Watched<String, Workspace>,
    workloads: BTreeMap<WorkloadKind, Watched<(ReleaseKey, WorkloadKey), WorkloadState>>,
    crd: Watched<String, (CrdState, Option<u32>)>,
    claims: BTreeMap<ReleaseKey, BTreeSet<OwnerKey>>,
    claimed: BTreeMap<OwnerKey, ReleaseKey>,
    lists: u64,
}

impl Index {
    pub fn new(cluster: &str, source_namespace: Option<&str>) -> Self {
        Self {
            cluster: cluster.to_owned(),
            source_namespace: source_namespace.map(str::to_owned),
            tenants: Watched::default(),
            deployments: BTreeMap::new(),
            revisions: Watched::default(),
            workspaces: Watched::default(),
            workloads: WORKLOAD_KINDS.map(|kind| (kind, Watched::default())).into(),
            crd: Watched::default(),
            claims: BTreeMap::new(),
            claimed: BTreeMap::new(),
            lists: 0,
        }
    }

    /// Returns the number of lists that have started, of Tenants, releases and namespaces.
    ///
    /// A response to an earlier request must not change the index: if etcd was restored, its object no longer exists,
    /// although its version is higher. Otherwise, the list or the watch contains it.
    pub fn lists(&self) -> u64 {
        self.lists
    }

    /// Returns true if every watch has listed once. Before that, absence proves nothing.
    pub fn synced(&self) -> bool {
        self.crd.synced()
            && self.tenants.synced()
            && self.revisions.synced()
            && self.workspaces.synced()
            && self.workloads.values().all(Watched::synced)
    }

    /// Marks the known Tenants as incomplete until the next list.
    pub fn list_tenants_again(&mut self) {
        self.tenants.synced = false;
    }

    /// Returns true if everything that exists is listed. Without the CRD there are no Tenants.
    pub fn ready(&self) -> bool {
        self.crd.synced()
            && (self.tenants.synced() || self.crd() != Some(CrdState::Present))
            && self.revisions.synced()
            && self.workspaces.synced()
            && self.workloads.values().all(Watched::synced)
    }

    /// Returns the bound that the objects of the watches exceed. `waiting` keys count too.
    pub fn beyond(&self, waiting: usize) -> Option<Beyond> {
        let sizes = [
            self.tenants.size(),
            self.revisions.size(),
            self.workspaces.size(),
            self.crd.size(),
        ];
        let all = sizes
            .into_iter()
            .chain(self.workloads.values().map(Watched::size));
        let (mut objects, mut bytes) = (waiting, waiting * WAITING_BYTES);
        for size in all {
            objects += size.0;
            bytes += size.1;
        }
        match () {
            () if objects > bound::OBJECTS => Some(Beyond::Objects),
            () if bytes > KEPT_BYTES => Some(Beyond::Bytes(KEPT_BYTES)),
            () => None,
        }
    }

    /// Drops all watched state until the next lists are complete.
    pub fn forget_watched(&mut self) {
        let tenants = self.tenants.iter().map(|(key, _)| key.clone());
        let tenants = tenants.map(OwnerKey::Tenant).collect();
        self.tenants = Watched::default();
        self.revisions = Watched::default();
        self.workspaces = Watched::default();
        self.workloads = WORKLOAD_KINDS.map(|kind| (kind, Watched::default())).into();
        self.crd = Watched::default();
        self.claim(tenants);
    }

    /// Returns the lists that are still incomplete, for messages.
    pub fn waiting_for(&self) -> Vec<&'static str> {
        let mut waiting = Vec::new();
        let mut check = |synced: bool, what: &'static str| {
            if !synced {
                waiting.push(what);
            }
        };
        check(self.crd.synced(), "the Tenant CRD");
        check(self.tenants.synced(), "Tenants");
        check(self.revisions.synced(), "release Secrets");
        check(self.workspaces.synced(), "namespaces");
        for (kind, watched) in &self.workloads {
            check(watched.synced(), kind.as_str());
        }
        waiting
    }

    pub fn owner(&self, key: &OwnerKey) -> Option<ReleaseOwner> {
        match key {
            OwnerKey::Tenant(key) => self.tenants.get(key).cloned().map(ReleaseOwner::Tenant),
            OwnerKey::Deployment(key) => self
                .deployments
                .get(key)
                .cloned()
                .map(ReleaseOwner::Deployment),
        }
    }

    /// Returns all Tenants and KryptonDeployments, including ignored ones.
    pub fn owners(&self) -> impl Iterator<Item = (OwnerKey, ReleaseOwner)> {
        let tenants = self.tenants.iter().map(|(key, tenant)| {
            (
                OwnerKey::Tenant(key.clone()),
                ReleaseOwner::Tenant(Arc::clone(tenant)),
            )
        });
        let deployments = self.deployments.iter().map(|(key, order)| {
            (
                OwnerKey::Deployment(key.clone()),
                ReleaseOwner::Deployment(Arc::clone(order)),
            )
        });
        tenants.chain(deployments)
    }

    /// Returns the revisions of a release, oldest first.
    pub fn release(&self, key: &ReleaseKey) -> Vec<&Revision> {
        self.revisions
            .from((key.clone(), 0))
            .take_while(|((found, _), _)| found == key)
            .map(|(_, revision)| revision)
            .collect()
    }

    /// Returns another namespace that contains a release of this name that Krypton did not create and no owner claims.
    pub fn foreign_elsewhere(&self, key: &ReleaseKey) -> Option<&str> {
        let is_one = |(found, revision): (&ReleaseKey, &Revision)| {
            found.name == key.name
                && found.namespace != key.namespace
                && revision.is_foreign()
                && !self.claimed(found)
        };
        let mut all = self.revisions.iter();
        let found = all.find(|((found, _), revision)| is_one((found, revision)));
        found.map(|((found, _), _)| found.namespace.as_str())
    }

    /// Returns the workloads that carry the release's annotations.
    pub fn release_workloads(&self, key: &ReleaseKey) -> BTreeMap<WorkloadKey, WorkloadState> {
        let mut found = BTreeMap::new();
        for (kind, watched) in &self.workloads {
            let first = WorkloadKey {
                kind: *kind,
                namespace: String::new(),
                name: String::new(),
            };
            found.extend(
                watched
                    .from((key.clone(), first))
                    .take_while(|((release, _), _)| release == key)
                    .map(|((_, workload), state)| (workload.clone(), state.clone())),
            );
        }
        found
    }

    /// Returns the owners on this member that request the release, oldest first.
    pub fn claimants(&self, key: &ReleaseKey) -> Vec<ReleaseOwner> {
        let mut claimants: Vec<_> = self
            .claims
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
    pub fn claimed(&self, key: &ReleaseKey) -> bool {
        self.claims.contains_key(key)
    }

    /// Returns the owners that use the namespace, for any release.
    pub fn users(&self, namespace: &str) -> BTreeSet<OwnerKey> {
        let first = ReleaseKey {
            namespace: namespace.to_owned(),
            name: String::new(),
        };
        self.claims
            .range(first..)
            .take_while(|(key, _)| key.namespace == namespace)
            .flat_map(|(_, users)| users.iter().cloned())
            .collect()
    }

    /// Applies the Tenant from the response to a write. If the watch has shown its deletion in the meantime, it stays
    /// deleted.
    pub fn tenant_written(&mut self, tenant: Tenant) -> BTreeSet<OwnerKey> {
        let known = tenant_key(&tenant.metadata)
            .and_then(|key| self.tenants.get(&key))
            .is_some_and(|known| known.metadata.uid == tenant.metadata.uid);
        if known {
            self.tenant_event(Event::Apply(tenant))
        } else {
            BTreeSet::new()
        }
    }

    pub fn tenant_event(&mut self, event: Event<Tenant>) -> BTreeSet<OwnerKey> {
        self.lists += u64::from(matches!(event, Event::Init));
        let changed = self.tenants.event(event, |mut tenant| {
            // The managed fields are larger than the rest of the object and unused here.
            tenant.metadata.managed_fields = None;
            let key = tenant_key(&tenant.metadata)?;
            Some((key, version(&tenant.metadata), Arc::new(tenant)))
        });
        self.claim(changed.into_iter().map(OwnerKey::Tenant).collect())
    }

    /// Replaces the orders of the home cluster. The reconciler ignores an order that is no longer among them.
    pub fn ordered(&mut self, orders: &[DesiredDeployment]) -> BTreeSet<OwnerKey> {
        let next: BTreeMap<DeploymentKey, &DesiredDeployment> =
            orders.iter().map(|order| (order.key(), order)).collect();
        let gone = |key: &&DeploymentKey| !next.contains_key(*key);
        let mut changed: BTreeSet<DeploymentKey> =
            self.deployments.keys().filter(gone).cloned().collect();
        self.deployments.retain(|key, _| next.contains_key(key));
        for (key, order) in next {
            let known = self.deployments.get(&key);
            if known.is_none_or(|known| **known != *order) {
                self.deployments
                    .insert(key.clone(), Arc::new(order.clone()));
                changed.insert(key);
            }
        }
        self.claim(changed.into_iter().map(OwnerKey::Deployment).collect())
    }

    /// Updates the claims of the changed owners. Returns these and the other owners that claim the same releases.
    fn claim(&mut self, changed: BTreeSet<OwnerKey>) -> BTreeSet<OwnerKey> {
        let mut dirty = changed.clone();
        for key in changed {
            // Reconcile the other claimants of a release when one of them appears, disappears or moves.
            if let Some(release) = self.claimed.remove(&key)
                && let Some(claimants) = self.claims.get_mut(&release)
            {
                claimants.remove(&key);
                dirty.extend(claimants.iter().cloned());
                if claimants.is_empty() {
                    self.claims.remove(&release);
                }
            }
            if let Some(owner) = self.owner(&key) {
                let release = owner.release(&self.cluster);
                let claims = self.claims.entry(release.clone()).or_default();
                dirty.extend(claims.iter().cloned());
                claims.insert(key.clone());
                self.claimed.insert(key, release);
            }
        }
        dirty
    }

    pub fn release_event<O: Into<ObjectMetaOf>>(&mut self, event: Event<O>) -> BTreeSet<OwnerKey> {
        self.lists += u64::from(matches!(event, Event::Init));
        let changed = self.revisions.event(event, |object| {
            let meta = object.into().0;
            let (key, revision) = Revision::of(&meta)?;
            Some(((key, revision.revision), version(&meta), revision))
        });
        let keys: BTreeSet<ReleaseKey> = changed.into_iter().map(|(key, _)| key).collect();
        keys.iter()
            .flat_map(|key| self.claims.get(key).cloned().unwrap_or_default())
            .collect()
    }

    /// Applies a Secret of a release that was read outside the watch.
    pub fn release_read(&mut self, meta: &ObjectMeta) -> BTreeSet<OwnerKey> {
        let Some((key, revision)) = Revision::of(meta) else {
            return BTreeSet::new();
        };
        let of = (key.clone(), revision.revision);
        match self.revisions.learn(of, version(meta), revision) {
            Some(_) => self.claims.get(&key).cloned().unwrap_or_default(),
            None => BTreeSet::new(),
        }
    }

    /// Replaces the revisions of one release with a list of its Secrets at `list_version`. Later changes in the watch
    /// win.
    ///
    /// `known_before` is the highest version that was known before the request. If the list is older, etcd was
    /// restored, and what was known is out of date.
    pub fn release_listed(
        &mut self,
        key: &ReleaseKey,
        fresh: Vec<ObjectMeta>,
        (list_version, known_before): (u64, u64),
    ) {
        let outdated: Vec<u32> = self
            .versions_of(key)
            .filter(|(version, _)| *version <= list_version.max(known_before))
            .map(|(_, revision)| revision)
            .collect();
        let fresh: Vec<_> = (fresh.iter())
            .filter_map(|meta| Some((version(meta), Revision::of(meta)?)))
            .collect();
        let listed: BTreeSet<u32> = fresh.iter().map(|(_, (_, it))| it.revision).collect();
        for revision in outdated {
            if list_version < known_before || !listed.contains(&revision) {
                self.revisions.items.remove(&(key.clone(), revision));
            }
        }
        for (version, (of, revision)) in fresh {
            let key = (of, revision.revision);
            self.revisions.learn(key, version, revision);
        }
    }

    /// Returns the highest `resourceVersion` of a release's known revisions.
    pub fn release_version(&self, key: &ReleaseKey) -> u64 {
        let versions = self.versions_of(key).map(|(version, _)| version);
        versions.max().unwrap_or_default()
    }

    /// Returns the `resourceVersion` and the number of each known revision of a release.
    fn versions_of(&self, key: &ReleaseKey) -> impl Iterator<Item = (u64, u32)> {
        let items = self.revisions.items.range((key.clone(), 0)..);
        let items = items.take_while(move |((found, _), _)| found == key);
        items.map(|((_, revision), (version, _))| (*version, *revision))
    }

    /// Applies a namespace event. Returns the changed namespaces and the owners that use them as a workspace.
    pub fn workspace_event<O: Into<ObjectMetaOf>>(
        &mut self,
        event: Event<O>,
    ) -> (BTreeSet<String>, BTreeSet<OwnerKey>) {
        self.lists += u64::from(matches!(event, Event::Init));
        let changed = self.workspaces.event(event, |object| {
            let meta = object.into().0;
            Some((meta.name.clone()?, version(&meta), Workspace::of(&meta)))
        });
        self.with_users(changed)
    }

    /// Applies a namespace from the response to a read or write. Returns the same as `workspace_event`.
    pub fn workspace_written(
        &mut self,
        meta: &ObjectMeta,
    ) -> (BTreeSet<String>, BTreeSet<OwnerKey>) {
        let workspace = Workspace::of(meta);
        let name = meta.name.clone();
        let changed = name.and_then(|name| self.workspaces.learn(name, version(meta), workspace));
        self.with_users(changed.into_iter().collect())
    }

    fn with_users(&self, changed: BTreeSet<String>) -> (BTreeSet<String>, BTreeSet<OwnerKey>) {
        let users = changed.iter().flat_map(|namespace| self.users(namespace));
        let users = users.collect();
        (changed, users)
    }

    pub fn workload_event<O: kube::Resource>(
        &mut self,
        kind: WorkloadKind,
        event: Event<O>,
        read: impl Fn(&O) -> WorkloadState,
    ) -> BTreeSet<OwnerKey> {
        let read = |object: O| {
            let meta = object.meta();
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
            Some(((release, workload), version(meta), read(&object)))
        };
        let changed = self.workloads.entry(kind).or_default().event(event, read);
        let keys: BTreeSet<ReleaseKey> = changed.into_iter().map(|(key, _)| key).collect();
        keys.iter()
            .flat_map(|key| self.claims.get(key).cloned().unwrap_or_default())
            .collect()
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

    pub fn crd_event<O: Into<ObjectMetaOf>>(&mut self, event: Event<O>) {
        self.crd.event(event, |object| {
            let meta = object.into().0;
            let state = match meta.deletion_timestamp {
                Some(_) => CrdState::Terminating,
                None => CrdState::Present,
            };
            let schema = krypton_crds::schema_version_of(&meta);
            Some((meta.name.clone()?, version(&meta), (state, schema)))
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

/// The metadata of an object of any type.
#[derive(Debug)]
pub struct ObjectMetaOf(pub ObjectMeta);

impl<K> From<kube::core::PartialObjectMeta<K>> for ObjectMetaOf {
    fn from(object: kube::core::PartialObjectMeta<K>) -> Self {
        Self(object.metadata)
    }
}

impl From<ObjectMeta> for ObjectMetaOf {
    fn from(meta: ObjectMeta) -> Self {
        Self(meta)
    }
}

pub fn tenant_key(meta: &ObjectMeta) -> Option<TenantKey> {
    let named = |name: &Option<String>| name.clone().filter(|name| name.len() <= LONGEST_NAME);
    Some(TenantKey {
        namespace: named(&meta.namespace)?,
        name: named(&meta.name)?,
    })
}

/// Returns the resourceVersion as a number. The Kubernetes API guarantees that versions are comparable since 1.35
/// (KEP-5504), and they were before. A version that is not a number counts as newest.
fn version(meta: &ObjectMeta) -> u64 {
    number(meta.resource_version.as_deref())
}

pub(crate) fn number(resource_version: Option<&str>) -> u64 {
    resource_version
        .and_then(|version| version.parse().ok())
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use krypton_helm::releases;
    use krypton_helm::releases::labels::{
        FINGERPRINT_LABEL, OWNER_NAMESPACE_LABEL, OWNER_UID_LABEL, RUN_LABEL,
    };

    use super::*;

    type Object = (&'static str, u64, &'static str);

    fn watched(
        events: impl IntoIterator<Item = Event<Object>>,
    ) -> Watched<&'static str, &'static str> {
        let mut watched = Watched::default();
        for event in events {
            watched.event(event, Some);
        }
        watched
    }

    fn shown(watched: &Watched<&'static str, &'static str>) -> Vec<(&'static str, &'static str)> {
        watched.iter().map(|(key, value)| (*key, *value)).collect()
    }

    #[test]
    fn own_writes_survive_concurrent_list() {
        let mut watched = watched([
            Event::Apply(("a", 1, "old")),
            Event::Init,
            Event::InitApply(("a", 1, "old")),
        ]);
        watched.apply("a", 5, "new");
        watched.apply("b", 6, "new");
        for event in [Event::InitApply(("b", 2, "old")), Event::InitDone] {
            watched.event(event, Some);
        }
        assert_eq!(shown(&watched), [("a", "new"), ("b", "new")]);
    }

    #[test]
    fn relist_replaces_newer_cached_objects() {
        let listed = watched([
            Event::Apply(("a", 9, "known")),
            Event::Apply(("gone", 9, "known")),
            Event::Init,
            Event::InitApply(("a", 3, "restored")),
            Event::InitDone,
        ]);
        assert_eq!(shown(&listed), [("a", "restored")]);
    }

    #[test]
    fn late_response_does_not_restore_deleted_object() {
        let mut watched = watched([
            Event::Apply(("a", 5, "new")),
            Event::Apply(("other", 6, "other")),
            Event::Delete(("a", 7, "new")),
        ]);
        assert_eq!(watched.learn("a", 5, "new"), None, "older than its end");
        assert_eq!(watched.learn("a", 8, "again"), Some("a"));
        assert_eq!(watched.learn("other", 9, "newer"), Some("other"));
        // The list was incomplete and omitted it.
        assert_eq!(watched.learn("b", 2, "old"), Some("b"));
        watched.event(Event::Apply(("a", 9, "new")), Some);
        assert_eq!(watched.learn("a", 10, "newer"), Some("a"));
        // A restored etcd continues from an older resourceVersion.
        watched.event(Event::Delete(("a", 11, "newer")), Some);
        for event in [Event::Init, Event::InitDone] {
            watched.event(event, Some);
        }
        assert_eq!(watched.learn("a", 3, "restored"), Some("a"));
    }

    fn meta(name: &str) -> ObjectMeta {
        ObjectMeta {
            namespace: Some("acme".to_owned()),
            name: Some(name.to_owned()),
            uid: Some("11111111-2222-3333-4444-555555555555".to_owned()),
            resource_version: Some("123456789".to_owned()),
            ..ObjectMeta::default()
        }
    }

    fn tenant(name: &str, label: usize) -> Tenant {
        let mut tenant = Tenant::new(name, krypton_crds::tenant::TenantSpec::default());
        tenant.metadata = meta(name);
        tenant.metadata.labels = Some([("label".to_owned(), "x".repeat(label))].into());
        tenant
    }

    fn secret(number: usize) -> ObjectMeta {
        let name = format!("tenant-acme-{number:06}");
        let labels = [
            ("name", &*name),
            ("version", "1"),
            ("status", "deployed"),
            (FINGERPRINT_LABEL, &"f".repeat(63)),
            (OWNER_UID_LABEL, "11111111-2222-3333-4444-555555555555"),
            (OWNER_NAMESPACE_LABEL, "tenants-of-acme"),
            (RUN_LABEL, "upgrade-0123456789abcdef"),
        ];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        ObjectMeta {
            labels: Some(labels.into()),
            ..meta(&releases::secret_name(&name, 1))
        }
    }

    #[test]
    fn release_list_of_restored_etcd_wins() {
        let secret = |version: u64, status: &str| {
            let mut secret = secret(1);
            secret.resource_version = Some(version.to_string());
            let labels = secret.labels.as_mut().unwrap();
            labels.insert("status".to_owned(), status.to_owned());
            secret
        };
        let key = Revision::of(&secret(1, "failed")).unwrap().0;
        // The versions of the watched Secret, of the list and of the Secret that was known before the list.
        let listed = |watched, list, known_before| {
            let mut index = Index::new("one", None);
            index.release_event(Event::Apply(secret(watched, "deployed")));
            let fresh = vec![secret(list, "failed")];
            index.release_listed(&key, fresh, (list, known_before));
            index.release(&key)[0].status.as_str().to_owned()
        };
        assert_eq!(listed(8, 9, 8), "failed");
        assert_eq!(
            listed(9, 6, 9),
            "failed",
            "the list is older than the known Secret"
        );
        assert_eq!(
            listed(9, 6, 5),
            "deployed",
            "the watch showed it during the request"
        );
    }

    #[test]
    fn honest_cluster_is_within_the_bounds() {
        let mut index = Index::new("one", None);
        for number in 0..100_000 {
            index.release_event(Event::Apply(secret(number)));
        }
        for number in 0..500 {
            index.tenant_event(Event::Apply(tenant(&number.to_string(), 10_000)));
        }
        assert_eq!(index.beyond(500), None);
        assert_eq!(index.revisions.iter().count(), 100_000);
    }

    #[test]
    fn endless_server_exceeds_the_bounds() {
        type Show = fn(&mut Index, usize);
        let large = |index: &mut Index, number: usize| {
            index.tenant_event(Event::Apply(tenant(&number.to_string(), 300_000)));
        };
        let listed = |index: &mut Index, number: usize| {
            if number == 0 {
                index.tenant_event(Event::Init);
            }
            index.tenant_event(Event::InitApply(tenant(&number.to_string(), 300_000)));
        };
        let same = |index: &mut Index, number: usize| {
            if number == 0 {
                index.release_event::<ObjectMeta>(Event::Init);
            }
            index.release_event(Event::InitApply(meta("none")));
        };
        let gone = |index: &mut Index, number: usize| {
            let name = format!("{number}{}", "n".repeat(100_000));
            index.workspace_event(Event::Apply(meta(&name)));
            index.workspace_event(Event::Delete(meta(&name)));
        };
        let shows: [(Show, usize, Beyond); 4] = [
            (large, 300, Beyond::Bytes(KEPT_BYTES)),
            (listed, 300, Beyond::Bytes(KEPT_BYTES)),
            (same, 250_000, Beyond::Objects),
            (gone, 2000, Beyond::Bytes(KEPT_BYTES)),
        ];
        for (number, (show, most, beyond)) in shows.into_iter().enumerate() {
            let mut index = Index::new("one", None);
            let found = (0..most).find_map(|number| {
                show(&mut index, number);
                index.beyond(0)
            });
            assert_eq!(found, Some(beyond), "{number}");
            index.forget_watched();
            assert_eq!((index.beyond(0), index.ready()), (None, false));
            assert!(index.claims.is_empty() && index.claimed.is_empty());
        }
        assert_eq!(
            Index::new("one", None).beyond(250_000),
            Some(Beyond::Objects)
        );
    }

    #[test]
    fn bytes_are_given_back() {
        let mut index = Index::new("one", None);
        for size in [10, 1000, 10] {
            index.tenant_event(Event::Apply(tenant("acme", size)));
        }
        index.tenant_event(Event::Init);
        index.tenant_event(Event::InitApply(tenant("other", 10)));
        index.tenant_event(Event::InitDone);
        index.tenant_event(Event::Delete(tenant("other", 10)));
        index.tenant_event(Event::Init);
        assert_eq!(index.tenants.size(), (0, 0));
    }

    #[test]
    fn an_event_takes_nothing_back_in_time() {
        let kept = watched([Event::Apply(("a", 5, "new")), Event::Apply(("a", 4, "old"))]);
        assert_eq!(shown(&kept), [("a", "new")]);
    }
}
