mod coming;
mod deployments;
mod drift;
mod failures;
mod lockdown;
mod ownership;
mod readiness;
mod refusals;
mod releases;
mod removal;
mod values;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{Release, Status};
use krypton_types::allowed_namespaces::AllowedNamespaces;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::{ChartState, DesiredState, Version};
use krypton_types::names;
use proptest::prelude::*;

use super::*;
use crate::fixtures::foreign_revision;
use crate::index::Workspace;
use crate::owner::ReleaseOwner;

const CLUSTER: &str = "edge-1";
const ORIGINAL: &str = "dd782c04db309dcc54c116da69b3f09bdae53e49d4d4e087fb6bce3a92e80a8d";

/// One Tenant on one member, without any fault until a test adds one.
pub(super) struct World {
    tenant: Tenant,
    /// The other owners that request the same release.
    others: Vec<ReleaseOwner>,
    pub(super) revisions: Vec<Revision>,
    workspace: Option<Workspace>,
    elsewhere: Option<String>,
    workspace_shared: bool,
    release_details: Option<Release>,
    /// Whether this process has read the deployed revision, if the test sets no `release_details`.
    is_read: bool,
    unready: Option<String>,
    allowed: AllowedNamespaces,
    pub(super) memory: Memory,
    permit: Permit,
    desired: DesiredState,
    now: BootTime,
    policy: Policy,
}

pub(super) fn world() -> World {
    let mut tenant = Tenant::new("acme", TenantSpec::default());
    tenant.metadata.namespace = Some("team".to_owned());
    tenant.metadata.uid = Some("uid-1".to_owned());
    tenant.metadata.generation = Some(1);
    tenant.metadata.finalizers = Some(vec![names::TENANT_FINALIZER.to_owned()]);
    tenant.metadata.annotations =
        Some([(names::fingerprint_annotation(CLUSTER), ORIGINAL.to_owned())].into());
    World {
        tenant,
        others: Vec::new(),
        revisions: Vec::new(),
        workspace: Some(workspace(Some("uid-1"), "ns-uid")),
        elsewhere: None,
        workspace_shared: false,
        release_details: None,
        is_read: true,
        unready: None,
        allowed: AllowedNamespaces::default(),
        memory: Memory::default(),
        permit: Permit::Granted,
        desired: DesiredState {
            version: Version {
                epoch: 1,
                generation: 1,
            },
            chart: ChartState {
                repo: "https://charts.jetstack.io".to_owned(),
                name: "cert-manager".to_owned(),
                version: "1.19.1".to_owned(),
                install_crds: true,
                ..ChartState::default()
            },
            ..DesiredState::default()
        },
        now: BootTime(Duration::from_secs(10_000)),
        policy: Policy::new(Duration::from_secs(180), ["krypton".to_owned()]),
    }
}

impl World {
    pub(super) fn plan(&self) -> Plan {
        self.plan_for(&self.owner())
    }

    pub(super) fn action(&self) -> Action {
        self.plan().action
    }

    /// Returns the time after so many seconds.
    fn after(&self, seconds: u64) -> BootTime {
        self.now + Duration::from_secs(seconds)
    }

    fn annotate(&mut self, annotation: &str, value: &str) {
        let annotations = self.tenant.metadata.annotations.get_or_insert_default();
        annotations.insert(annotation.to_owned(), value.to_owned());
    }

    /// Passes the Tenant's state to `inspect`.
    pub(super) fn with_state<T>(&self, inspect: impl FnOnce(&ReleaseState<'_>) -> T) -> T {
        let inspect = |view: &View<'_>| inspect(&release_state(view));
        self.with_view(&self.owner(), inspect)
    }

    fn owner(&self) -> ReleaseOwner {
        ReleaseOwner::Tenant(Arc::new(self.tenant.clone()))
    }

    /// Updates the memory as before a plan.
    fn observe(&mut self) {
        let owner = self.owner();
        let revisions: Vec<&Revision> = self.revisions.iter().collect();
        self.memory.observe(&owner, CLUSTER, &revisions, self.now);
    }

    /// Plans for `owner` in the same world.
    fn plan_for(&self, owner: &ReleaseOwner) -> Plan {
        self.with_view(owner, plan)
    }

    fn with_view<T>(&self, owner: &ReleaseOwner, inspect: impl FnOnce(&View<'_>) -> T) -> T {
        let release_key = owner.release(CLUSTER);
        let revisions: Vec<&Revision> = self.revisions.iter().collect();
        let mut claimants = self.others.clone();
        claimants.push(owner.clone());
        claimants.sort_by_cached_key(|claimant| claimant.seniority());
        let chart = self.desired.chart_with(owner.values());
        let newest = revisions.last();
        let newest = newest.filter(|newest| self.is_read && !newest.is_foreign());
        let default_details =
            newest.map(|newest| release(newest.revision, "cert-manager", "1.19.1"));
        inspect(&View {
            cluster: CLUSTER,
            program: "krypton-agent",
            source_namespace: None,
            now: self.now,
            policy: &self.policy,
            permit: self.permit.clone(),
            desired: &self.desired,
            chart: &chart,
            fingerprint: &chart.fingerprint(),
            owner,
            release_key: &release_key,
            revisions: &revisions,
            claimants: &claimants,
            workspace: self.workspace.as_ref(),
            elsewhere: self.elsewhere.as_deref(),
            workspace_shared: self.workspace_shared,
            release_details: self.release_details.as_ref().or(default_details.as_ref()),
            unready: self.unready.as_deref(),
            allowed: &self.allowed,
            memory: &self.memory,
        })
    }

    pub(super) fn own_revision(&self, revision: u32, status: Status) -> Revision {
        Revision {
            fingerprint: Some(self.desired.chart.fingerprint()),
            owner_uid: Some("uid-1".to_owned()),
            owner_namespace: Some("team".to_owned()),
            run: Some(format!("run-{revision}")),
            ..foreign_revision(revision, status)
        }
    }

    /// Replaces the revisions by Krypton's own with these statuses, numbered from 1.
    fn set_revisions(&mut self, statuses: &[Status]) {
        let numbered = (1..).zip(statuses);
        let revisions = numbered.map(|(number, status)| self.own_revision(number, *status));
        self.revisions = revisions.collect();
    }

    fn deployed(mut self) -> Self {
        self.set_revisions(&[Status::Deployed]);
        self
    }

    pub(super) fn deleted(mut self) -> Self {
        self.tenant.metadata.deletion_timestamp =
            Some(Time(Timestamp::from_second(1_000).unwrap()));
        self
    }

    fn release_details(mut self, chart: &str, version: &str) -> Self {
        self.release_details = Some(release(1, chart, version));
        self
    }

    fn failed(mut self, reason: &'static str, retry_in: u64) -> Self {
        let is_removal = self.tenant.metadata.deletion_timestamp.is_some()
            || self.desired.retire
            || reason == krypton_types::conditions::reason::UNINSTALL_FAILED;
        self.memory.failure = Some(Failure {
            reason,
            message: "it broke".to_owned(),
            attempts: 1,
            permanent: false,
            revision: None,
            retry_at: self.after(retry_in),
            attempt: Attempt {
                generation: 1,
                fingerprint: self.desired.chart.fingerprint(),
                requested: None,
                removal: is_removal.then_some(false),
            },
        });
        self
    }
}

fn withheld() -> Permit {
    Permit::Withheld("agent-1 holds the Lease".to_owned())
}

/// Returns a spec that names this member.
fn placed(member: &str) -> TenantSpec {
    let spec = serde_json::json!({ "clusterRef": { "secretName": member } });
    serde_json::from_value(spec).unwrap()
}

fn workspace(creator: Option<&str>, uid: &str) -> Workspace {
    Workspace {
        terminating: false,
        creator: creator.map(str::to_owned),
        open_to: None,
        uid: uid.to_owned(),
        namespace_metadata: None,
    }
}

pub(super) fn release(revision: u32, chart: &str, version: &str) -> Release {
    Release {
        name: "tenant-acme-edge-1".to_owned(),
        namespace: "acme".to_owned(),
        revision,
        status: Status::Deployed,
        chart_name: chart.to_owned(),
        chart_version: version.to_owned(),
        server_side: true,
        description: String::new(),
        workloads: Vec::new(),
    }
}

fn own_values(value: serde_json::Value) -> Option<serde_json::Map<String, serde_json::Value>> {
    value.as_object().cloned()
}

fn reported(ready: State) -> Option<ClusterState> {
    Some(ClusterState::from(ready))
}

fn world_deployed_then_upgrading_fails() -> World {
    let mut w = world();
    w.set_revisions(&[Status::Deployed, Status::Failed]);
    w.failed(reason::UPGRADE_FAILED, 60)
}

/// A world in which this process has just installed the release, and its workload is not ready.
fn world_just_installed() -> World {
    let mut w = world().deployed();
    w.unready = Some("Deployment acme/web: 0 of 1 available".to_owned());
    w.memory.applied = Some(AppliedRun {
        run: Run::Install,
        ended: w.now,
    });
    w
}

/// A world in which the API server has refused the planned request.
fn refused_by_api_server(mut world: World) -> World {
    let tenant = ReleaseOwner::Tenant(Arc::new(world.tenant.clone()));
    let fingerprint = world.desired.chart_with(tenant.values()).fingerprint();
    world.memory.refusal = Some(Refusal {
        message: "adding the finalizer: denied".to_owned(),
        attempts: 7,
        retry_at: world.after(900),
        attempt: Attempt::new(&tenant, &world.desired, &fingerprint),
        is_status_write: false,
        is_read: false,
        shown: true,
    });
    world
}

fn ready(plan: &Plan) -> (Truth, &str) {
    (plan.state.ready.truth, plan.state.ready.reason.as_str())
}

fn error(plan: &Plan) -> (Truth, &str) {
    let error = plan.state.error.as_ref().unwrap();
    (error.truth, &error.reason)
}

fn statuses() -> impl Strategy<Value = Status> {
    prop::sample::select(Status::ALL.to_vec())
}

proptest! {
    /// In every world, a Tenant that is not deleted keeps its deployed release, and no action runs without a permit.
    #[test]
    fn doubt_removes_nothing(
        history in prop::collection::vec((statuses(), any::<bool>(), any::<bool>()), 0..4),
        annotated in any::<bool>(),
        permitted in any::<bool>(),
        namespace in prop::option::of((any::<bool>(), any::<bool>())),
        finalizer in any::<bool>(),
        elsewhere in any::<bool>(),
        paused in any::<bool>(),
    ) {
        let mut w = world();
        w.revisions = history.iter().enumerate().map(|(at, (status, is_labelled, is_current))| {
            let number = u32::try_from(at).unwrap() + 1;
            let mut revision = if *is_labelled {
                w.own_revision(number, *status)
            } else {
                foreign_revision(number, *status)
            };
            if !is_current {
                revision.fingerprint = revision.fingerprint.map(|_| "older".to_owned());
            }
            revision
        }).collect();
        if !annotated { w.tenant.metadata.annotations = None; }
        if !permitted { w.permit = Permit::Withheld("no".to_owned()); }
        if !finalizer { w.tenant.metadata.finalizers = None; }
        if elsewhere { w.tenant.spec = placed("edge-2"); }
        w.desired.paused = paused;
        w.workspace = namespace.map(|(terminating, ours)| Workspace {
            terminating, ..workspace(ours.then_some("uid-1"), "n")
        });
        let plan = w.plan();
        let newest = w.revisions.last().map(|revision| revision.status);
        match plan.action {
            Action::Uninstall | Action::DeleteWorkspace | Action::RemoveFinalizer { .. } => {
                prop_assert!(false, "removed without a deletion: {:?}", plan.action);
            }
            _ => {}
        }
        let is_read = matches!(plan.action, Action::ReadRelease(_));
        if !permitted || paused || elsewhere {
            prop_assert!(is_read || plan.action == Action::Nothing, "{:?}", plan.action);
        }
        prop_assert!(!(is_read && elsewhere));
        // Only a deployed release is ready.
        if plan.state.ready.truth == Truth::True {
            prop_assert_eq!(newest, Some(Status::Deployed));
        }
        // The same world gives the same plan.
        prop_assert_eq!(plan, w.plan());
    }
}
