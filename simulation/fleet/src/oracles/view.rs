//! The state of all stores and Helm runs that follows from the observations so far.

mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use krypton_sim_apiserver::server::{Change, Key};
use krypton_types::names::{
    GROUP, HOME_UID_ANNOTATION, MANAGED_BY_HUB, MANAGED_BY_LABEL, PAUSED_ANNOTATION,
};
use serde_json::Value;

use crate::faults::RESTORE_WRITER;
use crate::object::{
    annotation, has_finalizer, has_true_condition, is_terminating, label, number, text,
};
use crate::observe::{Event, Observation};
use crate::plan::{Action, COPY_PREFIX, HOME, Plan, ServerFault, Settings, TENANT_NAMESPACE};
use crate::time::Millis;

/// Time in which a watch delivers a change to a process, if no fault delays it.
pub(crate) const WATCH_LAG: Millis = 30_000;
/// Time in which all processes notice a fault of a store, and recover from it.
pub(crate) const RECOVERY: Millis = 120_000;

/// The phase of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    #[default]
    Start,
    Chaos,
    /// Faults have ended, and the fleet converges.
    Converge,
    /// The fleet has converged, and nothing happens.
    Quiet,
}

/// A running Helm process that may write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub host: String,
    pub verb: String,
    pub release: String,
    pub namespace: String,
    /// Unknown for a release of a KryptonDeployment that a hub installs.
    pub cluster: Option<String>,
    pub owner: ReleaseOwner,
    pub started: Millis,
}

/// The object that a release belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseOwner {
    Tenant(String),
    Deployment(String),
    Unknown,
}

/// The last write of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Renewal {
    pub holder: String,
    /// Host of the writer. Unknown until the request has ended.
    pub host: Option<String>,
    pub at: Millis,
}

/// State of the fleet.
#[derive(Debug, Default)]
pub struct View {
    pub(crate) settings: Settings,
    /// A member that a permanent fault separates.
    pub(crate) separated_member: Option<String>,
    /// Whether no hub runs at the end.
    pub(crate) all_hubs_lost: bool,
    pub(crate) now: Millis,
    pub(crate) phase: Phase,
    /// Start of the phase.
    pub(crate) phase_start: Millis,
    stores: BTreeMap<String, BTreeMap<Key, Arc<Value>>>,
    /// When each object last changed outside its status, by cluster and key.
    last_changes: BTreeMap<(String, Key), Millis>,
    unattributed_changes: Vec<(String, Change)>,
    pub(crate) helm_runs: BTreeMap<u64, Run>,
    /// By cluster and name of the Lease.
    renewals: BTreeMap<(String, String), Renewal>,
    /// Active faults of the infrastructure.
    active_faults: Vec<Action>,
    calm_since: Millis,
    /// When each API server last stopped hanging. Only then does it carry out earlier requests.
    last_hang_ends: BTreeMap<String, Millis>,
    /// End of the last crash, freeze or suspension.
    busy_until: Millis,
    suspended_until: Millis,
    last_restores: BTreeMap<String, Millis>,
    /// Releases that Helm changed during a restore. Helm does not notice that the restore has reverted objects.
    partly_restored: BTreeSet<String>,
    /// Clusters whose clock was wrong for a time.
    wrong_clocks: BTreeSet<String>,
    /// Whether people want each Tenant, by cluster and name, and each KryptonDeployment of this name.
    wanted_tenants: BTreeMap<(String, String), bool>,
    wanted_deployments: BTreeMap<String, bool>,
    /// The chart's version `0.N.0` that people want, as N.
    pub(crate) chart_version: u32,
    /// Since when each Tenant is paused, by cluster and name.
    tenant_pauses: BTreeMap<(String, String), Millis>,
    /// Since when each member is paused.
    member_pauses: BTreeMap<String, Millis>,
    /// When each orphaned KryptonDeployment was deleted.
    orphaned_deployments: BTreeMap<String, Millis>,
    /// UIDs of all orphaned KryptonDeployments.
    pub(crate) orphaned_uids: BTreeSet<String>,
    /// Members whose EdgeCluster people have deleted with the policy `Uninstall`.
    decommissioning: BTreeSet<String>,
    /// Deployments that people, or a restore during a Helm run, have deleted and that are still missing, by cluster.
    missing_workloads: BTreeMap<String, BTreeSet<Key>>,
    /// Those that were missing when the snapshot of a pending restore was taken.
    missing_in_snapshots: BTreeMap<String, BTreeSet<Key>>,
}

impl View {
    pub(crate) fn new(plan: &Plan) -> Self {
        let clusters = plan.settings.clusters().into_iter();
        Self {
            settings: plan.settings.clone(),
            separated_member: plan.separated_member().map(str::to_owned),
            all_hubs_lost: plan.loses_all_hubs(),
            stores: clusters.map(|name| (name, BTreeMap::new())).collect(),
            chart_version: 1,
            ..Self::default()
        }
    }

    /// The Tenant or KryptonDeployment with this UID.
    pub(crate) fn owner(&self, uid: &str) -> Option<&Value> {
        let clusters = self.settings.clusters();
        let mut owners = clusters.iter().flat_map(|cluster| {
            let tenants = self.objects(cluster, GROUP, "tenants");
            tenants.chain(self.objects(cluster, GROUP, "kryptondeployments"))
        });
        let owner = owners.find(|(_, owner)| text(owner, "/metadata/uid") == uid);
        owner.map(|(_, owner)| owner.as_ref())
    }

    /// Returns an object.
    pub(crate) fn get(&self, cluster: &str, key: &Key) -> Option<&Arc<Value>> {
        self.stores.get(cluster)?.get(key)
    }

    /// Returns all objects of a resource on a cluster, in order.
    pub(crate) fn objects<'a>(
        &'a self,
        cluster: &str,
        group: &'a str,
        resource: &'a str,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Value>)> {
        let store = self.stores.get(cluster).into_iter().flatten();
        store.filter(move |(key, _)| key.group == group && key.resource == resource)
    }

    /// Returns all objects in a namespace.
    pub(crate) fn objects_in<'a>(
        &'a self,
        cluster: &str,
        namespace: &'a str,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Value>)> {
        let store = self.stores.get(cluster).into_iter().flatten();
        store.filter(move |(key, _)| key.namespace == namespace)
    }

    /// Whether a Deployment of this namespace was deleted without Helm. Without drift correction, it stays deleted.
    pub(crate) fn lacks_workload(&self, cluster: &str, namespace: &str) -> bool {
        let mut missing = self.missing_workloads.get(cluster).into_iter().flatten();
        missing.any(|key| key.namespace == namespace)
    }

    pub(crate) fn any_workload_missing(&self) -> bool {
        self.missing_workloads.values().any(|keys| !keys.is_empty())
    }

    pub(crate) fn tenant(&self, cluster: &str, name: &str) -> Option<&Arc<Value>> {
        self.get(cluster, &krypton_key("tenants", TENANT_NAMESPACE, name))
    }

    pub(crate) fn edge_cluster(&self, member: &str) -> Option<&Arc<Value>> {
        self.get(HOME, &krypton_key("edgeclusters", "", member))
    }

    /// Returns the release Secrets of a release, the oldest revision first.
    pub(crate) fn revisions(
        &self,
        cluster: &str,
        namespace: &str,
        release: &str,
    ) -> Vec<(u32, &Arc<Value>)> {
        let secrets = self.objects(cluster, "", "secrets");
        let mut revisions: Vec<(u32, &Arc<Value>)> = secrets
            .filter(|(key, secret)| {
                key.namespace == namespace
                    && text(secret, "/type") == "helm.sh/release.v1"
                    && text(secret, "/metadata/labels/name") == release
            })
            .filter_map(|(_, secret)| Some((revision_number(secret)?, secret)))
            .collect();
        revisions.sort_by_key(|(version, _)| *version);
        revisions
    }

    pub(crate) fn renewal(&self, cluster: &str, lease: &str) -> Option<&Renewal> {
        self.renewals.get(&(cluster.to_owned(), lease.to_owned()))
    }

    /// Time since the last change of an object's spec, labels or annotations, or since the start.
    pub(crate) fn time_since_change(&self, cluster: &str, key: &Key) -> Millis {
        let changed_at = self.last_changes.get(&(cluster.to_owned(), key.clone()));
        self.now - changed_at.copied().unwrap_or_default()
    }

    /// Whether the API server of this cluster responds to requests with 401 or 403.
    pub(crate) fn rejects_requests(&self, cluster: &str) -> bool {
        self.active_faults.iter().any(|action| {
            matches!(
                action,
                Action::Server {
                    cluster: rejecting,
                    fault: ServerFault::Unauthorized | ServerFault::Forbidden,
                    ..
                } if rejecting == cluster
            )
        })
    }

    /// Time since the last fault of the infrastructure has ended. Zero while one is active.
    pub(crate) fn calm_time(&self) -> Millis {
        match self.active_faults.is_empty() {
            true => self
                .now
                .saturating_sub(self.calm_since.max(self.busy_until)),
            false => 0,
        }
    }

    /// Whether the machine of this host may be suspended now.
    pub(crate) fn may_be_suspended(&self) -> bool {
        self.now < self.suspended_until
    }

    /// Whether a restore has reverted a part of the last change of a release.
    pub(crate) fn is_partly_restored(&self, release: &str) -> bool {
        self.partly_restored.contains(release)
    }

    /// Whether an API server has stopped hanging within this time.
    pub(crate) fn hung_within(&self, cluster: &str, time: Millis) -> bool {
        let hang_end = self.last_hang_ends.get(cluster);
        hang_end.is_some_and(|at| self.now - at <= time)
    }

    /// Sum of the delays that links add now.
    pub(crate) fn total_link_delay(&self) -> Millis {
        let delays = self.active_faults.iter().map(|action| match action {
            Action::Link {
                fault: crate::plan::LinkFault::Delay(delay),
                ..
            } => *delay,
            _ => 0,
        });
        delays.sum()
    }

    /// Whether the etcd of a cluster was restored within [`RECOVERY`].
    pub(crate) fn recently_restored(&self, cluster: &str) -> bool {
        let restored_at = self.last_restores.get(cluster);
        restored_at.is_some_and(|at| self.now - at <= RECOVERY)
    }

    /// Whether the clock of the API server was ever wrong.
    pub(crate) fn had_wrong_clock(&self, cluster: &str) -> bool {
        self.wrong_clocks.contains(cluster)
    }

    pub(crate) fn was_restored(&self, cluster: &str) -> bool {
        self.last_restores.contains_key(cluster)
    }

    pub(crate) fn ever_restored(&self) -> bool {
        !self.last_restores.is_empty()
    }

    /// Names of the Tenants that people want.
    pub(crate) fn wanted_tenants(&self) -> impl Iterator<Item = &str> {
        let wanted = self.wanted_tenants.iter().filter(|(_, wanted)| **wanted);
        wanted.map(|((_, name), _)| name.as_str())
    }

    /// How long the Tenant has been paused.
    pub(crate) fn tenant_paused_for(&self, cluster: &str, name: &str) -> Option<Millis> {
        let since = self
            .tenant_pauses
            .get(&(cluster.to_owned(), name.to_owned()))?;
        Some(self.now - since)
    }

    /// How long the member has been paused.
    pub(crate) fn member_paused_for(&self, member: &str) -> Option<Millis> {
        Some(self.now - self.member_pauses.get(member)?)
    }

    /// How long ago the KryptonDeployment was deleted as an orphan, unless people have created it again.
    pub(crate) fn deployment_orphaned_for(&self, deployment: &str) -> Option<Millis> {
        Some(self.now - self.orphaned_deployments.get(deployment)?)
    }

    /// Whether people want the Tenant on this cluster, or else on home, and no restore may have brought back an earlier
    /// request.
    pub(crate) fn wants_tenant(&self, cluster: &str, name: &str) -> bool {
        let is_wanted = |cluster: &str| {
            self.wanted_tenants
                .get(&(cluster.to_owned(), name.to_owned()))
        };
        let wanted = is_wanted(cluster).or_else(|| is_wanted(HOME)).copied();
        wanted.unwrap_or(false) && !self.is_terminating_anywhere("tenants", name)
    }

    pub(crate) fn wants_deployment(&self, name: &str) -> bool {
        let wanted = self.wanted_deployments.get(name).copied().unwrap_or(false);
        wanted && !self.is_terminating_anywhere("kryptondeployments", name)
    }

    /// After a restore, the store can contain a deletion that people have since undone by a new object.
    fn is_terminating_anywhere(&self, resource: &str, name: &str) -> bool {
        let key = krypton_key(resource, TENANT_NAMESPACE, name);
        self.ever_restored()
            && self
                .stores
                .keys()
                .filter_map(|cluster| self.get(cluster, &key))
                .any(|object| is_terminating(object))
    }

    pub(crate) fn is_decommissioning(&self, member: &str) -> bool {
        self.decommissioning.contains(member)
    }

    /// Whether the CRD of Tenants is present and not being deleted.
    pub(crate) fn has_tenant_crd(&self, cluster: &str) -> bool {
        self.has_crd(cluster, &format!("tenants.{GROUP}"))
    }

    /// Whether this CRD is present and not being deleted.
    pub(crate) fn has_crd(&self, cluster: &str, name: &str) -> bool {
        self.get(cluster, &Key::of_crd(name))
            .is_some_and(|crd| !is_terminating(crd))
    }
}

/// Key of one of Krypton's objects.
pub(crate) fn krypton_key(resource: &str, namespace: &str, name: &str) -> Key {
    Key::new(GROUP, resource, namespace, name)
}

/// The cluster of an agent's host, or of its copy.
pub(crate) fn agent_cluster(host: &str) -> Option<&str> {
    host.strip_prefix("agent-")
        .or_else(|| host.strip_prefix(COPY_PREFIX))
}

/// Whether Krypton or its Helm wrote, by the user agent.
pub(crate) fn is_product(by: &str) -> bool {
    is_krypton(by) || is_helm(by)
}

pub(crate) fn is_krypton(by: &str) -> bool {
    by.starts_with("krypton-")
}

pub(crate) fn is_helm(by: &str) -> bool {
    by.starts_with("Helm/")
}

/// Whether the hub has placed this Tenant on a member.
pub(crate) fn is_placed_copy(tenant: &Value) -> bool {
    label(tenant, MANAGED_BY_LABEL) == Some(MANAGED_BY_HUB)
        && annotation(tenant, HOME_UID_ANNOTATION).is_some()
}

/// Whether the change deletes the object, or marks it as being deleted.
pub(crate) fn starts_deletion(change: &Change) -> bool {
    let before = change.before.as_deref();
    before.is_some_and(|before| !is_terminating(before))
        && change.after.as_deref().is_none_or(is_terminating)
}

/// Returns the object that a restore of etcd has written, unless it is being deleted.
pub(crate) fn restored_live(change: &Change) -> Option<&Value> {
    let after = change.after.as_deref();
    after.filter(|after| change.by == RESTORE_WRITER && !is_terminating(after))
}

pub(crate) fn is_paused(object: &Value) -> bool {
    annotation(object, PAUSED_ANNOTATION) == Some("true")
}

pub(crate) fn holder(lease: &Value) -> &str {
    text(lease, "/spec/holderIdentity")
}

/// Revision of a release Secret.
pub(crate) fn revision_number(secret: &Value) -> Option<u32> {
    text(secret, "/metadata/labels/version").parse().ok()
}

/// The cluster and a change of an existing object, with the object before and after.
pub(crate) type Update<'a> = (&'a str, &'a Change, &'a Value, &'a Value);

pub(crate) fn object_update(observation: &Observation) -> Option<Update<'_>> {
    let Event::Change { cluster, change } = &observation.event else {
        return None;
    };
    let (before, after) = (change.before.as_deref()?, change.after.as_deref()?);
    Some((cluster, change, before, after))
}

/// The cluster, the change, and the previous object, if Krypton has removed this finalizer or the object with it.
pub(crate) fn finalizer_removal<'a>(
    observation: &'a Observation,
    finalizer: &str,
) -> Option<(&'a str, &'a Change, &'a Value)> {
    let Event::Change { cluster, change } = &observation.event else {
        return None;
    };
    let before = change.before.as_deref()?;
    let is_present = |object| has_finalizer(object, finalizer);
    let is_removed = is_present(before) && !change.after.as_deref().is_some_and(is_present);
    (is_removed && is_product(&change.by)).then_some((cluster, change, before))
}

/// The member that reconciles a Tenant of this cluster.
pub(crate) fn reconciling_member<'a>(tenant: &'a Value, cluster: &'a str) -> &'a str {
    match text(tenant, "/spec/clusterRef/secretName") {
        "" => Settings::member_for(cluster),
        member => member,
    }
}

/// The namespace of a Tenant's release.
pub(crate) fn workspace(tenant: &Value) -> &str {
    match text(tenant, "/spec/workspace") {
        "" => text(tenant, "/metadata/name"),
        workspace => workspace,
    }
}

/// Whether the object is ready at its generation.
pub(crate) fn is_ready(object: &Value) -> bool {
    number(object, "/status/observedGeneration") == number(object, "/metadata/generation")
        && has_true_condition(object, "Ready")
}

/// Whether the hub no longer shows an EdgeCluster as connected.
pub(crate) fn is_disconnected(before: &Value, after: &Value) -> bool {
    has_true_condition(before, "Connected") && !has_true_condition(after, "Connected")
}

/// Epoch and generation of the desired or applied state of an EdgeCluster.
pub(crate) fn state_version(member: &Value, field: &str) -> [Option<u64>; 2] {
    ["epoch", "generation"].map(|part| number(member, &format!("/status/{field}/{part}")))
}
