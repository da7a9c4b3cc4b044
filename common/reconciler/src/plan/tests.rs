mod coming;
mod deployments;
mod lockdown;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{Release, Status};
use krypton_types::allowed_namespaces::Allowed;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::crd_policy::CrdPolicy;
use krypton_types::desired::drift::DriftMode;
use krypton_types::desired::handling::WaitPolicy;
use krypton_types::desired::{ChartState, DesiredState, Version};
use krypton_types::names;
use proptest::prelude::*;

use super::*;
use crate::index::Workspace;
use crate::owner::ReleaseOwner;

const CLUSTER: &str = "edge-1";
const ORIGINAL: &str = "dd782c04db309dcc54c116da69b3f09bdae53e49d4d4e087fb6bce3a92e80a8d";

/// One Tenant on one member, without any fault until a test adds one.
pub(super) struct World {
    tenant: Tenant,
    others: Vec<Tenant>,
    pub(super) revisions: Vec<Revision>,
    workspace: Option<Workspace>,
    elsewhere: Option<String>,
    shared: bool,
    release_details: Option<Release>,
    /// Whether this process has read the deployed revision, if the test sets no `release_details`.
    read: bool,
    unready: Option<String>,
    allowed: Allowed,
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
        shared: false,
        release_details: None,
        read: true,
        unready: None,
        allowed: Allowed::default(),
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
        policy: Policy {
            helm_timeout: Duration::from_secs(180),
            foreign_lock_grace: Duration::from_secs(600),
            retries: None,
            remediation: Remediation::Keep,
            history_max: 3,
            protected_namespaces: vec!["krypton".to_owned()],
        },
    }
}

impl World {
    pub(super) fn plan(&self) -> Plan {
        self.view(&self.owner(), self.others(), plan)
    }

    pub(super) fn action(&self) -> Action {
        self.plan().action
    }

    /// Returns the time after so many seconds.
    fn after(&self, seconds: u64) -> BootTime {
        BootTime(self.now.0 + Duration::from_secs(seconds))
    }

    fn annotate(&mut self, annotation: &str, value: &str) {
        let annotations = self.tenant.metadata.annotations.get_or_insert_default();
        annotations.insert(annotation.to_owned(), value.to_owned());
    }

    /// Passes the Tenant's state to `look`.
    pub(super) fn state<T>(&self, look: impl FnOnce(&ReleaseState<'_>) -> T) -> T {
        let look = |view: &View<'_>| look(&release_state(view));
        self.view(&self.owner(), self.others(), look)
    }

    fn owner(&self) -> ReleaseOwner {
        ReleaseOwner::Tenant(Arc::new(self.tenant.clone()))
    }

    fn others(&self) -> Vec<ReleaseOwner> {
        let others = self.others.iter().cloned();
        let others = others.map(|other| ReleaseOwner::Tenant(Arc::new(other)));
        others.collect()
    }

    /// Plans for `owner` in the same world, in which the `others` request the same release.
    fn plan_of(&self, owner: &ReleaseOwner, others: Vec<ReleaseOwner>) -> Plan {
        self.view(owner, others, plan)
    }

    fn view<T>(
        &self,
        owner: &ReleaseOwner,
        others: Vec<ReleaseOwner>,
        look: impl FnOnce(&View<'_>) -> T,
    ) -> T {
        let release_key = owner.release(CLUSTER);
        let revisions: Vec<&Revision> = self.revisions.iter().collect();
        let mut claimants = others;
        claimants.push(owner.clone());
        claimants.sort_by_cached_key(|claimant| claimant.seniority());
        let chart = self.desired.chart_with(owner.values());
        let newest = revisions.last();
        let newest = newest.filter(|newest| self.read && !newest.is_foreign());
        let own = newest.map(|newest| release(newest.revision, "cert-manager", "1.19.1"));
        look(&View {
            cluster: CLUSTER,
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
            workspace_shared: self.shared,
            release_details: self.release_details.as_ref().or(own.as_ref()),
            unready: self.unready.as_deref(),
            allowed: &self.allowed,
            memory: &self.memory,
        })
    }

    pub(super) fn ours(&self, revision: u32, status: Status) -> Revision {
        Revision {
            revision,
            status,
            fingerprint: Some(self.desired.chart.fingerprint()),
            owner_uid: Some("uid-1".to_owned()),
            owner_namespace: Some("team".to_owned()),
            run: Some(format!("run-{revision}")),
            rolled_back_by: None,
            uid: format!("secret-{revision}"),
            resource_version: revision.to_string(),
            created: None,
        }
    }

    /// A revision without Krypton's labels.
    pub(super) fn foreign(&self, revision: u32, status: Status) -> Revision {
        Revision {
            fingerprint: None,
            owner_uid: None,
            owner_namespace: None,
            run: None,
            rolled_back_by: None,
            ..self.ours(revision, status)
        }
    }

    fn deployed(mut self) -> Self {
        self.revisions = vec![self.ours(1, Status::Deployed)];
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
        let going = self.tenant.metadata.deletion_timestamp.is_some()
            || self.desired.retire
            || reason == krypton_types::conditions::reason::UNINSTALL_FAILED;
        self.memory.failure = Some(Failure {
            reason,
            message: "it broke".to_owned(),
            attempts: 1,
            permanent: false,
            retry_at: self.after(retry_in),
            attempt: Attempt {
                generation: 1,
                fingerprint: self.desired.chart.fingerprint(),
                requested: None,
                removal: going.then_some(false),
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

fn ready(plan: &Plan) -> (Truth, &str) {
    (plan.state.ready.truth, plan.state.ready.reason.as_str())
}

#[test]
fn new_tenant_gets_finalizer_workspace_then_release() {
    let mut w = world();
    w.tenant.metadata.finalizers = None;
    w.workspace = None;
    assert_eq!(w.action(), Action::AddFinalizer);
    w.tenant.metadata.finalizers = Some(vec![names::TENANT_FINALIZER.to_owned()]);
    assert_eq!(w.action(), Action::CreateWorkspace);
    w.workspace = Some(workspace(None, "n"));
    assert_eq!(w.action(), Action::Helm(Run::Install));
}

#[test]
fn release_as_desired_is_left_unchanged() {
    let plan = world().deployed().plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::True, reason::NO_CHANGE));
    assert_eq!(plan.wake, None);
    assert_eq!(
        plan.applied_chart.as_deref(),
        Some("https://charts.jetstack.io/cert-manager:1.19.1")
    );
}

#[test]
fn another_chart_version_or_other_values_upgrade() {
    let mut changed = world().deployed();
    changed.desired.chart.version = "1.20.0".to_owned();
    assert_eq!(changed.action(), Action::Helm(Run::Upgrade));
    let mut changed = world().deployed();
    changed
        .desired
        .chart
        .values
        .insert("a".to_owned(), 1.into());
    assert_eq!(changed.action(), Action::Helm(Run::Upgrade));
}

fn own_values(value: serde_json::Value) -> Option<serde_json::Map<String, serde_json::Value>> {
    value.as_object().cloned()
}

#[test]
fn tenant_values_change_release_where_allowed() {
    let mut w = world();
    w.desired.tenant_values = true;
    let mut w = w.deployed();
    assert_eq!(w.action(), Action::Nothing);
    // No values, and values that change nothing.
    for same in [
        serde_json::json!({}),
        serde_json::json!({"installCRDs": true}),
    ] {
        w.tenant.spec.values = own_values(same);
        assert_eq!(w.action(), Action::Nothing);
    }
    w.tenant.spec.values = own_values(serde_json::json!({"replicas": 3}));
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    let chart = w.desired.chart_with(w.tenant.spec.values.as_ref());
    w.revisions[0].fingerprint = Some(chart.fingerprint());
    assert_eq!(w.action(), Action::Nothing);
    w.tenant.spec.values = None;
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn disallowed_or_oversized_values_block_release_changes() {
    let most = krypton_types::values::MOST_BYTES_OF_TENANT;
    let large = serde_json::json!({"a": "x".repeat(most)});
    let cases = [
        (
            false,
            serde_json::json!({"a": 1}),
            reason::VALUES_NOT_ALLOWED,
        ),
        (true, large, reason::VALUES_TOO_LARGE),
    ];
    for (allowed, values, why) in cases {
        let mut w = world();
        w.desired.tenant_values = allowed;
        w.tenant.spec.values = own_values(values.clone());
        let plan = w.plan();
        assert_eq!(plan.action, Action::Nothing);
        assert_eq!(ready(&plan), (Truth::False, why));
        assert!(plan.state.ready.message.contains("spec.values"));
        // Neither another version nor a failed revision starts Helm, and the running release stays ready.
        let mut w = w.deployed();
        w.memory.said = said(State::new(Truth::True, reason::INSTALLED, ""));
        w.desired.chart.version = "1.20.0".to_owned();
        let plan = w.plan();
        assert_eq!(plan.action, Action::Nothing);
        assert_eq!(ready(&plan), (Truth::True, reason::INSTALLED));
        let error = plan.state.error.unwrap();
        assert_eq!((error.truth, error.reason.as_str()), (Truth::True, why));
        w.revisions.push(w.ours(2, Status::Failed));
        assert_eq!(w.action(), Action::Nothing);
        // The Tenant can still be deleted.
        let w = w.deleted();
        assert_eq!(w.action(), Action::Uninstall);
        // Empty values are allowed.
        let mut w = world().deployed();
        w.tenant.spec.values = own_values(serde_json::json!({}));
        assert_eq!(w.action(), Action::Nothing);
        assert_eq!(ready(&w.plan()), (Truth::True, reason::NO_CHANGE));
    }
}

#[test]
fn every_newest_revision_status_has_its_action() {
    let unlock = |was: &str| Action::Unlock {
        revision: 2,
        was: was.to_owned(),
    };
    let cases = [
        (Status::Deployed, Action::Nothing),
        (Status::Failed, Action::Helm(Run::Upgrade)),
        (Status::Uninstalled, Action::Helm(Run::Upgrade)),
        (Status::Superseded, unlock("superseded")),
        (Status::PendingInstall, unlock("pending-install")),
        (Status::PendingUpgrade, unlock("pending-upgrade")),
        (Status::PendingRollback, unlock("pending-rollback")),
        (Status::Uninstalling, Action::Nothing),
        (Status::Unknown, Action::Nothing),
    ];
    for (status, action) in cases {
        let mut w = world();
        w.revisions = vec![w.ours(1, Status::Superseded), w.ours(2, status)];
        assert_eq!(w.action(), action, "{status:?}");
    }
}

#[test]
fn deleted_tenant_follows_repair_table() {
    for status in Status::ALL {
        let mut w = world().deleted();
        w.revisions = vec![w.ours(1, status)];
        assert_eq!(w.action(), Action::Uninstall, "{status}");
    }
    let mut w = world().deleted();
    assert_eq!(w.action(), Action::DeleteWorkspace);
    w.workspace = None;
    assert_eq!(w.action(), Action::RemoveFinalizer { orphaned: false });
}

#[test]
fn foreign_lock_is_respected_until_grace_expires() {
    let mut w = world();
    w.revisions = vec![
        w.ours(1, Status::Deployed),
        w.ours(2, Status::PendingUpgrade),
    ];
    // When a user runs Helm, Helm copies Krypton's labels to the new revision.
    w.revisions[1].run = w.revisions[0].run.clone();
    w.memory.locked = Some((2, w.now));
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.wake, Some(w.after(600)));
    w.now = w.after(600);
    assert!(matches!(w.action(), Action::Unlock { revision: 2, .. }));
}

#[test]
fn own_interrupted_rollback_is_unlocked_without_grace() {
    let mut w = world();
    w.revisions = vec![
        w.ours(1, Status::Deployed),
        w.ours(2, Status::Failed),
        w.ours(3, Status::PendingRollback),
    ];
    // Helm copied the run label from the revision that it rolls back to.
    w.revisions[2].run = w.revisions[0].run.clone();
    w.memory.locked = Some((3, w.now));
    assert_eq!(w.action(), Action::Nothing);
    w.revisions[1].rolled_back_by = Some(3);
    assert!(matches!(w.action(), Action::Unlock { revision: 3, .. }));
    // A mark that Helm copied, or a mark of a completed rollback, does not count.
    w.revisions[1].rolled_back_by = Some(2);
    w.revisions[2].rolled_back_by = Some(2);
    assert_eq!(w.action(), Action::Nothing);
}

#[test]
fn interrupted_uninstall_is_repaired_for_present_tenant() {
    let mut w = world();
    w.revisions = vec![w.ours(1, Status::Uninstalling)];
    // Another client may run Helm, because an uninstallation leaves no run mark.
    w.memory.locked = Some((1, w.now));
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.progress.unwrap().reason, reason::LOCKED);
    w.now = w.after(600);
    let was = "uninstalling".to_owned();
    assert_eq!(w.action(), Action::Unlock { revision: 1, was });
    assert_eq!(w.deleted().action(), Action::Uninstall);
}

#[test]
fn leftovers_are_swept_by_permit_holder_while_ready() {
    let mut w = world();
    w.revisions = vec![w.ours(1, Status::Failed), w.ours(2, Status::Deployed)];
    let plan = w.plan();
    assert_eq!(plan.action, Action::Sweep(1));
    assert_eq!(ready(&plan).0, Truth::True);
    w.permit = withheld();
    let watched = w.plan();
    assert_eq!(watched.action, Action::Nothing);
    assert_eq!(watched.state, plan.state);
}

#[test]
fn tenant_with_release_elsewhere_is_not_reinstalled() {
    let mut w = world();
    assert_eq!(w.action(), Action::Helm(Run::Install));
    w.elsewhere = Some("acme-ws".to_owned());
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    let (truth, why) = ready(&plan);
    assert_eq!((truth, why), (Truth::False, reason::RELEASE_IN_USE));
    let message = &plan.state.ready.message;
    assert!(message.contains("spec.workspace: acme-ws"), "{message}");
}

#[test]
fn default_leftovers_are_swept_once_workspace_is_ready() {
    let mut w = world().release_details("cert-manager", "1.19.1");
    w.revisions = vec![w.foreign(1, Status::Deployed)];
    assert_eq!(w.action(), Action::Nothing, "adopted as it is");

    w.revisions = vec![
        w.foreign(1, Status::Superseded),
        w.ours(2, Status::Deployed),
    ];
    // Without the manifest, the owner of a workload is unknown.
    assert_eq!(w.action(), Action::ReadRelease(2));
    if let Some(release_details) = &mut w.release_details {
        release_details.revision = 2;
    }
    let plan = w.plan();
    assert_eq!(plan.action, Action::SweepDefault(1));
    assert_eq!(ready(&plan).0, Truth::True);

    w.unready = Some("Deployment acme/web: 0 of 1 available".to_owned());
    assert_eq!(w.action(), Action::Nothing, "it may still be serving");
    w.desired.handling.wait = WaitPolicy::None;
    assert_eq!(w.action(), Action::SweepDefault(1));
    w.unready = None;

    w.permit = withheld();
    let watched = w.plan();
    assert_eq!(watched.action, Action::Nothing);
    assert_eq!(ready(&watched).0, Truth::True);
    w.permit = Permit::Granted;
    w.tenant.spec.workspace = Some("default".to_owned());
    assert_eq!(w.action(), Action::Nothing, "that is the workspace");
    w.tenant.spec.workspace = None;

    w.revisions[0].owner_uid = Some("uid-1".to_owned());
    assert_eq!(w.action(), Action::Nothing, "it was seen to");
}

#[test]
fn failed_install_is_reinstalled_and_failed_upgrade_upgraded() {
    let mut w = world();
    w.revisions = vec![w.ours(1, Status::Failed)];
    w.revisions[0].run = Some("install-1".to_owned());
    assert_eq!(w.action(), Action::InstallAgain);
    w.revisions = vec![w.ours(1, Status::Deployed), w.ours(2, Status::Failed)];
    w.revisions[1].run = Some("upgrade-2".to_owned());
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn manual_revision_on_own_release_is_corrected() {
    let mut w = world();
    w.revisions = vec![w.ours(1, Status::Superseded), w.ours(2, Status::Deployed)];
    w.revisions[1].run = w.revisions[0].run.clone();
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn only_rewritten_deployed_revision_is_read_again() {
    let world = world().deployed();
    let one = world.revisions[0].clone();
    let written = Revision {
        resource_version: "2".to_owned(),
        ..one.clone()
    };
    let superseded = Revision {
        status: Status::Superseded,
        ..written.clone()
    };
    let next = world.ours(2, Status::Deployed);
    for (seen, doubted) in [
        (vec![&one], None),
        (vec![&one, &one], None),
        (vec![&superseded, &one], None),
        (vec![&one, &next], None),
        (vec![&one, &written], Some(1)),
        (vec![&one, &written, &written], Some(1)),
        (vec![&one, &written, &next], None),
    ] {
        let mut memory = Memory::default();
        for newest in &seen {
            memory.saw(Some(newest));
        }
        assert_eq!(memory.doubted, doubted, "{seen:?}");
    }
    // A user writes between Krypton's read and the first event of the watch.
    for (shown, doubted) in [(&one, None), (&written, Some(1)), (&next, None)] {
        let mut memory = Memory::default();
        memory.read(&one);
        memory.saw(Some(shown));
        assert_eq!(memory.doubted, doubted, "{shown:?}");
        // The same version is read a second time, but not endlessly.
        (memory.doubted, memory.deployed) = (None, None);
        memory.read(&one);
        memory.saw(Some(shown));
        assert_eq!(memory.doubted, None, "{shown:?}");
    }
    let mut doubted = world;
    assert_eq!(doubted.action(), Action::Nothing);
    doubted.memory.doubted = Some(1);
    assert_eq!(doubted.action(), Action::ReadRelease(1));
    doubted.memory.doubted = Some(2);
    assert_eq!(doubted.action(), Action::Nothing);
}

#[test]
fn original_release_is_adopted_without_helm_run() {
    let mut w = world();
    w.revisions = vec![w.foreign(1, Status::Deployed)];
    assert_eq!(w.action(), Action::ReadRelease(1));
    let w = w.release_details("cert-manager", "v1.19.1");
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::True, reason::NO_CHANGE));
}

#[test]
fn stale_annotation_does_not_hide_upgrade() {
    let mut w = world().release_details("cert-manager", "v1.18.0");
    w.revisions = vec![w.foreign(1, Status::Deployed)];
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn unknown_release_is_refused_without_adopt_annotation() {
    let mut w = world().release_details("cert-manager", "v1.19.1");
    w.revisions = vec![w.foreign(1, Status::Deployed)];
    w.tenant.metadata.annotations = None;
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::False, reason::RELEASE_IN_USE));
    assert!(plan.state.ready.message.contains(names::ADOPT_ANNOTATION));
    w.annotate(names::ADOPT_ANNOTATION, "true");
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn older_tenant_wins_shared_release() {
    let mut older = world();
    older.tenant.metadata.creation_timestamp = Some(Time(Timestamp::from_second(1).unwrap()));
    let mut younger = world();
    younger.tenant.metadata.uid = Some("uid-2".to_owned());
    younger.tenant.metadata.namespace = Some("other".to_owned());
    younger.tenant.metadata.creation_timestamp = Some(Time(Timestamp::from_second(2).unwrap()));
    older.others = vec![younger.tenant.clone()];
    younger.others = vec![older.tenant.clone()];
    assert_eq!(older.action(), Action::Helm(Run::Install));
    let plan = younger.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::False, reason::RELEASE_IN_USE));
    assert!(
        plan.state.ready.message.contains("team/acme"),
        "{:?}",
        plan.state
    );
    // Deleting the younger Tenant leaves the release unchanged.
    let plan = younger.deleted().plan();
    assert_eq!(plan.action, Action::RemoveFinalizer { orphaned: false });
}

#[test]
fn release_of_tenant_in_other_namespace_is_refused() {
    let mut w = world().deployed();
    w.revisions[0].owner_uid = Some("dead".to_owned());
    // The same namespace and name: the Tenant was restored from a backup.
    assert_eq!(w.action(), Action::Nothing);
    assert_eq!(ready(&w.plan()).0, Truth::True);
    w.revisions[0].owner_namespace = Some("elsewhere".to_owned());
    assert_eq!(ready(&w.plan()), (Truth::False, reason::RELEASE_IN_USE));
}

#[test]
fn reserved_namespace_is_never_a_workspace() {
    for (workspace, owner) in [
        ("kube-system", "Kubernetes"),
        ("krypton-system", "Krypton"),
        ("krypton", "Krypton"),
    ] {
        let mut theirs = world();
        theirs.tenant.spec.workspace = Some(workspace.to_owned());
        let plan = theirs.plan();
        assert_eq!(plan.action, Action::Nothing, "{workspace}");
        assert_eq!(ready(&plan), (Truth::False, reason::NAMESPACE_NOT_OWNED));
        assert!(plan.state.ready.message.contains(owner));
    }
    let mut dotted = world();
    dotted.tenant.metadata.name = Some("a.b".to_owned());
    assert_eq!(
        ready(&dotted.plan()),
        (Truth::False, reason::WORKSPACE_INVALID)
    );
}

#[test]
fn tenant_of_other_member_gets_no_finalizer() {
    let mut w = world();
    w.tenant.metadata.finalizers = None;
    w.tenant.spec = placed("edge-2");
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert!(!plan.ours);
    assert_eq!(ready(&plan), (Truth::False, reason::NOT_THIS_CLUSTER));
}

#[test]
fn targeted_tenant_of_disallowed_namespace_is_ignored() {
    let list = |name: &str| Allowed::new(Some(&[name.to_owned()]));
    for (names_it, allowed, left_alone) in [
        (true, list("other"), true),
        (true, list("team"), false),
        (true, Allowed::default(), false),
        // The Tenant names no member, so the list does not apply.
        (false, list("other"), false),
    ] {
        for mut w in [world(), world().deployed()] {
            let free = w.plan();
            if names_it {
                w.tenant.spec = placed(CLUSTER);
            }
            w.allowed = allowed.clone();
            let plan = w.plan();
            if !left_alone {
                assert_eq!(plan, free, "{allowed:?}");
                continue;
            }
            assert_eq!(plan.action, Action::Nothing);
            assert!(!plan.ours);
            assert_eq!(ready(&plan), (Truth::False, reason::NAMESPACE_NOT_ALLOWED));
            // The deletion of a Tenant is not restricted.
            let mut w = w.deleted();
            let plan = w.plan();
            w.allowed = Allowed::default();
            assert_eq!(plan, w.plan());
        }
    }
}

#[test]
fn withheld_permit_or_pause_prevents_all_actions() {
    let mut w = world();
    w.permit = withheld();
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.ready.truth, Truth::Unknown);
    let mut w = world().deployed();
    w.permit = withheld();
    assert_eq!(ready(&w.plan()).0, Truth::True);
    w.permit = Permit::Granted;
    w.desired.paused = true;
    w.desired.chart.version = "2.0.0".to_owned();
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.progress.unwrap().reason, reason::PAUSED);
}

/// The two ways in which an action is held back: another process has the Lease, or a pause.
fn held_back(mut w: World) -> [World; 2] {
    let mut paused = World {
        tenant: w.tenant.clone(),
        revisions: w.revisions.clone(),
        desired: w.desired.clone(),
        memory: w.memory.clone(),
        unready: w.unready.clone(),
        read: w.read,
        ..world()
    };
    paused.desired.paused = true;
    w.permit = withheld();
    [w, paused]
}

fn said(ready: State) -> Option<ClusterState> {
    Some(ClusterState::from(ready))
}

#[test]
fn unread_release_is_read_before_it_is_judged() {
    let started = || World {
        read: false,
        ..world().deployed()
    };
    let plan = started().plan();
    assert_eq!(plan.action, Action::ReadRelease(1));
    assert_eq!(ready(&plan).0, Truth::Unknown);
    let missing = State::new(
        Truth::False,
        reason::NOT_READY,
        "Deployment acme/web: not found",
    );
    for chart in ["1.19.1", "2.0.0"] {
        for mut w in held_back(started()) {
            w.desired.chart.version = chart.to_owned();
            w.memory.said = said(missing.clone());
            let plan = w.plan();
            assert_eq!(plan.action, Action::ReadRelease(1), "{chart}");
            assert_eq!(plan.state.ready, missing, "until it is known better");
        }
    }
}

#[test]
fn unrecorded_release_is_rendered_again() {
    let plan = |run: Option<&str>, with_permit, permit| {
        let mut w = world().deployed();
        w.revisions[0].run = run.map(str::to_owned);
        w.memory.unrecorded = Some((1, with_permit));
        w.permit = permit;
        w.action()
    };
    let ours = Some("install-1");
    let read = Action::ReadRelease(1);
    assert_eq!(plan(ours, false, Permit::Granted), read);
    let run = plan(ours, true, Permit::Granted);
    assert_eq!(run, Action::Helm(Run::Upgrade));
    let withheld = withheld();
    assert_eq!(plan(ours, false, withheld), Action::Nothing);
    assert_eq!(
        plan(None, true, Permit::Granted),
        Action::Nothing,
        "adopted"
    );
}

#[test]
fn unreadable_release_is_read_again_after_back_off() {
    let mut w = world().deployed().failed(reason::UPGRADE_FAILED, 30);
    w.read = false;
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.wake, Some(w.after(30)));
    assert_eq!(ready(&plan), (Truth::False, reason::UPGRADE_FAILED));
    w.now = w.after(30);
    assert_eq!(w.action(), Action::ReadRelease(1));
}

#[test]
fn readiness_is_followed_while_work_is_held_back() {
    const MISSING: &str = "Deployment acme/web: not found";
    let held = |before: State, unready: Option<&str>, wait: WaitPolicy| {
        let mut w = world().deployed();
        w.memory.said = said(before);
        w.unready = unready.map(str::to_owned);
        w.desired.chart.version = "2.0.0".to_owned();
        w.desired.handling.wait = wait;
        let [observed, paused] = held_back(w).map(|w| w.plan());
        assert_eq!(observed.action, Action::Nothing);
        let now = paused.state.ready.clone();
        assert_eq!(observed.state.ready, now);
        let progress = [observed, paused].map(|plan| plan.state.progress.unwrap().reason);
        assert_eq!(progress, [reason::LOCKED, reason::PAUSED]);
        now
    };
    let installed = State::new(Truth::True, reason::INSTALLED, "release installed");
    let lost = State::new(Truth::False, reason::NOT_READY, MISSING);
    let back = State::new(Truth::True, reason::NO_CHANGE, "release ready");
    let announced = State::new(Truth::False, reason::UPGRADING, "upgrading release");
    let failed = State::new(Truth::False, reason::CHART_NOT_LOADED, "no answer");
    for (before, unready, after) in [
        (&installed, None, &installed),
        (&installed, Some(MISSING), &lost),
        (&lost, Some(MISSING), &lost),
        (&lost, None, &back),
        (&back, Some(MISSING), &lost),
        (&announced, Some(MISSING), &announced),
        (&announced, None, &back),
        (&failed, Some(MISSING), &failed),
        (&failed, None, &failed),
    ] {
        let now = held(before.clone(), unready, WaitPolicy::Ready);
        assert_eq!(now, *after, "{before:?} {unready:?}");
    }
    let told = held(installed, Some(MISSING), WaitPolicy::Hooks);
    assert_eq!(told.truth, Truth::True);
    assert!(told.message.ends_with(MISSING), "{}", told.message);
}

/// Upgrades that fail before Helm starts: without a chart, by a refused request, or for their values.
fn failing_upgrades() -> [World; 3] {
    let w = || {
        let mut w = world().deployed();
        w.desired.chart.version = "2.0.0".to_owned();
        w
    };
    let mut values = w();
    values.tenant.spec.values = own_values(serde_json::json!({"a": 1}));
    [
        w().failed(reason::CHART_NOT_LOADED, 60),
        refused_by_api_server(w()),
        values,
    ]
}

#[test]
fn readiness_is_followed_while_an_upgrade_fails() {
    let installed = State::new(Truth::True, reason::INSTALLED, "release installed");
    let back = (Truth::True, reason::NO_CHANGE);
    for mut w in failing_upgrades() {
        w.memory.said = said(installed.clone());
        let first = w.plan();
        assert_eq!(ready(&first), (Truth::True, reason::INSTALLED));
        w.unready = Some("Deployment acme/web: not found".to_owned());
        for _ in 0..2 {
            let plan = w.plan();
            assert_eq!(ready(&plan), (Truth::False, reason::NOT_READY));
            assert_eq!(plan.state.error, first.state.error);
            assert_eq!(plan.action, Action::Nothing);
            w.memory.said = Some(plan.state);
        }
        w.unready = None;
        assert_eq!(ready(&w.plan()), back);
    }
}

#[test]
fn release_is_read_once_while_upgrade_fails() {
    for mut w in failing_upgrades() {
        let installed = State::new(Truth::True, reason::INSTALLED, "release installed");
        w.memory.said = said(installed);
        w.read = false;
        assert_eq!(w.action(), Action::ReadRelease(1));
        if let Some(refusal) = &mut w.memory.refusal {
            refusal.of_reading = true;
            assert_eq!(w.action(), Action::Nothing, "reading is refused");
        }
        w.read = true;
        assert_eq!(w.action(), Action::Nothing);
        let mut w = w.failed(reason::RELEASE_TAMPERED, 60);
        w.read = false;
        assert_eq!(w.action(), Action::Nothing, "reading has failed");
    }
}

fn world_deployed_then_upgrading_fails() -> World {
    let mut w = world();
    w.revisions = vec![w.ours(1, Status::Deployed), w.ours(2, Status::Failed)];
    w.failed(reason::UPGRADE_FAILED, 60)
}

#[test]
fn failed_upgrade_backs_off_and_reports_running_revision() {
    let w = world_deployed_then_upgrading_fails();
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.wake, Some(w.after(60)));
    assert_eq!(ready(&plan), (Truth::False, reason::UPGRADE_FAILED));
    let error = plan.state.error.unwrap();
    assert_eq!(error.truth, Truth::True);
    assert!(
        error.message.contains("revision 1 keeps running"),
        "{error:?}"
    );
}

#[test]
fn changed_spec_or_chart_skips_back_off() {
    let mut w = world_deployed_then_upgrading_fails();
    w.tenant.metadata.generation = Some(2);
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    let mut w = world_deployed_then_upgrading_fails();
    w.desired.chart.version = "1.19.2".to_owned();
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn crd_policy_or_cluster_change_skips_back_off() {
    let mut w = world_deployed_then_upgrading_fails();
    assert_eq!(w.action(), Action::Nothing);
    w.desired.chart_crds = CrdPolicy::CreateReplace;
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    w.desired.chart_crds = CrdPolicy::default();
    assert_eq!(w.action(), Action::Nothing);
    w.memory.cluster_changed();
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    // A given-up release starts again, too.
    let mut w = world_deployed_then_upgrading_fails();
    w.policy.retries = Some(0);
    w.now = w.after(100_000);
    assert_eq!(w.action(), Action::Nothing);
    w.memory.cluster_changed();
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn requested_retry_skips_back_off_once() {
    let mut w = world_deployed_then_upgrading_fails();
    assert_eq!(w.action(), Action::Nothing);
    w.annotate(names::RECONCILE_REQUESTED_ANNOTATION, "today");
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    w.memory.failure.as_mut().unwrap().attempt.requested = Some("today".to_owned());
    assert_eq!(w.action(), Action::Nothing);
}

#[test]
fn upgrade_out_of_retries_waits_for_change() {
    let mut w = world_deployed_then_upgrading_fails();
    w.now = w.after(10_000);
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
    w.policy.retries = Some(1);
    assert_eq!(w.action(), Action::Helm(Run::Upgrade), "one retry is left");
    w.memory.failure.as_mut().unwrap().attempts = 2;
    let plan = w.plan();
    assert_eq!((plan.action, plan.wake), (Action::Nothing, None));
    assert!(
        plan.state
            .ready
            .message
            .contains("given up after 2 attempts")
    );
    w.desired.chart.version = "1.21.0".to_owned();
    assert_eq!(w.action(), Action::Helm(Run::Upgrade));
}

#[test]
fn abandoned_upgrade_rolls_back_once_to_deployed_revision() {
    let mut w = world_deployed_then_upgrading_fails();
    w.policy.remediation = Remediation::Rollback;
    assert_eq!(w.action(), Action::Nothing, "it may yet succeed");
    w.memory.failure.as_mut().unwrap().permanent = true;
    assert_eq!(w.action(), Action::Rollback(1));
    // A killed Helm process leaves a lock first.
    w.revisions[1].status = Status::PendingUpgrade;
    w.now = w.after(10_000);
    assert!(matches!(w.action(), Action::Unlock { revision: 2, .. }));
    w.revisions[1].status = Status::Failed;
    let mut not_back = w.memory.failure.clone().unwrap();
    not_back.reason = reason::ROLLBACK_FAILED;
    not_back.retry_at = w.after(5);
    w.memory.failure = Some(not_back);
    assert_eq!(w.action(), Action::Nothing);
    assert_eq!(w.plan().wake, Some(w.after(5)));
    w.now = w.after(5);
    assert_eq!(w.action(), Action::Rollback(1));
    // Helm died in the rollback after it had marked the good revision as superseded. Another upgrade has failed
    // since.
    let intact = w.revisions.clone();
    w.revisions[0].status = Status::Superseded;
    w.revisions[1].rolled_back_by = Some(3);
    for number in [3, 4] {
        w.revisions.push(w.ours(number, Status::Failed));
    }
    assert_eq!(w.action(), Action::Rollback(1));
    w.revisions = intact;
    // The rollback is complete. Helm copied the labels of the revision that it rolled back to.
    let mut back = w.revisions[0].clone();
    (back.revision, back.status) = (3, Status::Deployed);
    w.revisions[0].status = Status::Superseded;
    w.revisions.push(back);
    w.memory.failure.as_mut().unwrap().reason = reason::UPGRADE_FAILED;
    assert_eq!(w.action(), Action::Nothing);
    w.revisions.remove(0);
    w.revisions.remove(1);
    assert_eq!(w.action(), Action::Nothing, "nothing to go back to");
}

#[test]
fn pinned_chart_or_account_change_ends_back_off() {
    let mut w = world().failed(reason::CHART_NOT_LOADED, 60);
    assert_eq!(w.action(), Action::Nothing);
    w.desired.chart.pinned = Some("1.19.1@sha256:ab".to_owned());
    assert_eq!(w.action(), Action::Helm(Run::Install));
    let mut w = world().failed(reason::INSTALL_FAILED, 60);
    w.desired.lockdown.default_service_account = "installer".to_owned();
    assert_eq!(w.action(), Action::Helm(Run::Install));
}

#[test]
fn a_cluster_that_is_suspended_has_not_failed() {
    let mut w = world().deployed().failed(reason::SUSPENDED, 60);
    w.revisions[0].fingerprint = Some("older".to_owned());
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.wake, Some(w.after(60)));
    assert_eq!(ready(&plan), (Truth::Unknown, reason::SUSPENDED));
    let error = plan.state.error.unwrap();
    assert_eq!(
        (error.truth, error.reason.as_str()),
        (Truth::False, reason::NO_ERROR)
    );
    // The removal is another attempt, but fails for the same reason.
    let deleted = w.deleted();
    assert_eq!(deleted.action(), Action::Uninstall);
    let plan = deleted.failed(reason::SUSPENDED, 60).plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.error.unwrap().truth, Truth::False);
}

#[test]
fn upgrade_that_cannot_start_leaves_release_ready() {
    for why in [reason::HELM_UNAVAILABLE, reason::CHART_NOT_LOADED] {
        let mut w = world().deployed().failed(why, 60);
        w.revisions[0].fingerprint = Some("older".to_owned());
        w.memory.said = said(State::new(Truth::True, reason::INSTALLED, "installed"));
        let plan = w.plan();
        assert_eq!(plan.action, Action::Nothing, "{why}");
        assert_eq!(ready(&plan), (Truth::True, reason::INSTALLED), "{why}");
        assert_eq!(plan.state.error.unwrap().reason, why);
    }
}

#[test]
fn release_waits_for_workloads_and_fails_after_timeout() {
    let mut w = world().deployed();
    w.unready = Some("Deployment acme/web: 0 of 1 available".to_owned());
    w.memory.applied = Some(Applied {
        run: Run::Install,
        ended: w.now,
    });
    let plan = w.plan();
    assert_eq!(ready(&plan), (Truth::False, reason::INSTALLING));
    assert_eq!(plan.wake, Some(w.after(10)));
    assert_eq!(
        plan.applied_chart, None,
        "the status says no more than the announcement"
    );
    w.now = w.after(10);
    let plan = w.plan();
    assert_eq!(ready(&plan), (Truth::False, reason::INSTALLING));
    assert!(plan.state.ready.message.contains("Deployment acme/web"));
    assert_eq!(plan.wake, Some(w.after(170)));
    w.now = w.after(170);
    let plan = w.plan();
    assert_eq!(ready(&plan), (Truth::False, reason::INSTALL_FAILED));
    assert!(
        plan.state
            .error
            .unwrap()
            .message
            .contains("Deployment acme/web")
    );
    w.unready = None;
    let plan = w.plan();
    assert_eq!(ready(&plan), (Truth::True, reason::INSTALLED));
    assert_eq!(plan.state.error.unwrap().truth, Truth::False);
}

#[test]
fn release_without_wait_is_ready_once_deployed() {
    let mut w = world().deployed();
    w.unready = Some("Deployment acme/web: 0 of 1 available".to_owned());
    w.memory.applied = Some(Applied {
        run: Run::Install,
        ended: w.now,
    });
    for (wait, message) in [
        (WaitPolicy::None, "release installed; not waited for"),
        (
            WaitPolicy::Hooks,
            "release installed; not waited for: Deployment acme/web: 0 of 1 available",
        ),
    ] {
        w.desired.handling.wait = wait;
        let plan = w.plan();
        assert_eq!(ready(&plan), (Truth::True, reason::INSTALLED), "{wait}");
        assert_eq!(plan.state.ready.message, message);
        assert_eq!((plan.wake, plan.action), (None, Action::Nothing));
        w.memory.said = Some(plan.state);
    }
    // A release that Helm has not deployed is not ready under any policy.
    w.revisions = vec![w.ours(1, Status::Failed)];
    assert_eq!(ready(&w.plan()).0, Truth::False);
    // After a change of the policy, the note in the message goes away.
    w.revisions = vec![w.ours(1, Status::Deployed)];
    w.desired.handling.wait = WaitPolicy::Ready;
    w.unready = None;
    assert_eq!(w.plan().state.ready.message, "release installed");
}

#[test]
fn deletion_uninstalls_then_removes_namespace_then_finalizer() {
    let mut w = world().deployed().deleted();
    assert_eq!(w.action(), Action::Uninstall);
    w.revisions.clear();
    assert_eq!(w.action(), Action::DeleteWorkspace);
    w.workspace.as_mut().unwrap().terminating = true;
    assert_eq!(w.action(), Action::Nothing);
    w.workspace = None;
    assert_eq!(w.action(), Action::RemoveFinalizer { orphaned: false });
}

#[test]
fn foreign_or_shared_namespace_outlives_tenant() {
    let mut unmarked = world().deleted();
    unmarked.workspace.as_mut().unwrap().creator = None;
    assert_eq!(
        unmarked.action(),
        Action::RemoveFinalizer { orphaned: false }
    );
    let mut shared = world().deleted();
    shared.shared = true;
    assert_eq!(shared.action(), Action::RemoveFinalizer { orphaned: false });
    let mut default = world().deleted();
    default.tenant.spec.workspace = Some("default".to_owned());
    assert_eq!(
        default.action(),
        Action::RemoveFinalizer { orphaned: false }
    );
}

#[test]
fn orphan_annotation_releases_tenant_and_reports_leftovers() {
    let mut w = world().deployed().deleted();
    w.annotate(names::ORPHAN_ANNOTATION, "true");
    let plan = w.plan();
    assert_eq!(plan.action, Action::RemoveFinalizer { orphaned: true });
    assert!(plan.state.ready.message.contains("tenant-acme-edge-1"));
}

#[test]
fn leaving_member_uninstalls_and_releases_its_tenants() {
    let mut world = world().deployed();
    world.desired.retire = true;
    assert_eq!(world.action(), Action::Uninstall);
    // The failure of an upgrade does not delay the removal.
    let mut failed = world;
    failed = failed.failed(reason::UPGRADE_FAILED, 60);
    failed.memory.failure.as_mut().unwrap().attempt.removal = None;
    assert_eq!(failed.action(), Action::Uninstall);
    // A failure of the removal itself delays it, and is shown.
    for why in [reason::HELM_UNAVAILABLE, reason::SUSPENDED] {
        failed = failed.failed(why, 60);
        let plan = failed.plan();
        assert_eq!(plan.action, Action::Nothing, "{why}");
        assert!(plan.wake.is_some(), "{why}");
    }
    failed = failed.failed(reason::UNINSTALL_FAILED, 60);
    assert_eq!(failed.action(), Action::Nothing);
    assert_ne!(ready(&failed.plan()).1, reason::UNINSTALLED);
    let mut world = failed;
    world.memory.failure = None;
    world.revisions.clear();
    assert_eq!(world.action(), Action::DeleteWorkspace);
    world.workspace = None;
    let last = world.plan();
    assert_eq!(last.action, Action::RemoveFinalizer { orphaned: false });
    assert_ne!(ready(&last).1, reason::UNINSTALLED, "it has not let go yet");
    world.tenant.metadata.finalizers = None;
    let done = world.plan();
    assert_eq!(done.action, Action::Nothing);
    assert_eq!(ready(&done), (Truth::False, reason::UNINSTALLED));
    // Krypton does not check a kept workspace again.
    let mut kept = self::world().deployed();
    kept.desired.retire = true;
    kept.revisions.clear();
    kept.tenant.metadata.finalizers = None;
    assert_eq!(kept.action(), Action::Nothing);
    // If the cluster returns to the fleet, Krypton manages its Tenants again.
    world.desired.retire = false;
    assert_eq!(world.action(), Action::AddFinalizer);
}

#[test]
fn leaving_member_keeps_foreign_orphaned_or_paused_releases() {
    let leaving = |mut world: World| {
        world.desired.retire = true;
        world.tenant.metadata.finalizers = None;
        world
    };
    let mut foreign = leaving(world());
    foreign.tenant.metadata.annotations = None;
    foreign.revisions = vec![foreign.foreign(1, Status::Deployed)];
    let plan = foreign.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(ready(&plan), (Truth::False, reason::UNINSTALLED));
    assert!(plan.state.ready.message.contains("not created by Krypton"));

    let orphan = |mut world: World| {
        world.annotate(names::ORPHAN_ANNOTATION, "true");
        world
    };
    let plan = orphan(leaving(world().deployed())).plan();
    assert_eq!(plan.action, Action::Nothing);
    assert!(plan.state.ready.message.contains("left where it is"));

    let mut paused = leaving(world().deployed());
    paused.desired.paused = true;
    let mut fenced = leaving(world().deployed());
    fenced.permit = Permit::Withheld("another holds the Lease".to_owned());
    for waits in [paused, fenced] {
        let plan = waits.plan();
        assert_eq!(plan.action, Action::Nothing);
        assert_ne!(ready(&plan).1, reason::UNINSTALLED);
    }
}

#[test]
fn deletion_without_permit_waits_with_message() {
    let mut w = world().deployed().deleted();
    w.permit = Permit::Withheld("the Lease is not ours".to_owned());
    let plan = w.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert!(plan.state.ready.message.contains("Lease"));
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
        w.revisions = history.iter().enumerate().map(|(at, (status, labelled, same))| {
            let number = u32::try_from(at).unwrap() + 1;
            let mut revision = if *labelled {
                w.ours(number, *status)
            } else {
                w.foreign(number, *status)
            };
            if !same {
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
        let reads = matches!(plan.action, Action::ReadRelease(_));
        if !permitted || paused || elsewhere {
            prop_assert!(reads || plan.action == Action::Nothing, "{:?}", plan.action);
        }
        prop_assert!(!(reads && elsewhere));
        // Only a deployed release is ready.
        if plan.state.ready.truth == Truth::True {
            prop_assert_eq!(newest, Some(Status::Deployed));
        }
        // The same world gives the same plan.
        prop_assert_eq!(plan, w.plan());
    }
}

fn drifting(mode: DriftMode) -> World {
    let mut w = world().deployed();
    w.desired.drift.mode = mode;
    w
}

#[test]
fn only_settled_writable_release_is_checked_for_drift() {
    let wanted = |w: &World| w.plan().drift.map(|wanted| wanted.mode);
    assert_eq!(wanted(&drifting(DriftMode::Off)), None);
    for mode in [DriftMode::Warn, DriftMode::Heal] {
        assert_eq!(wanted(&drifting(mode)), Some(mode));
        let mut w = drifting(mode);
        w.unready = Some("0 of 1 available".to_owned());
        w.memory.said = said(State::new(
            Truth::False,
            reason::NOT_READY,
            "0 of 1 available",
        ));
        assert_eq!(
            wanted(&w),
            Some(mode),
            "what is not ready may be so by drift"
        );
        type Row = (&'static str, fn(&mut World));
        let rows: [Row; 5] = [
            ("no permit", |w| w.permit = withheld()),
            ("paused", |w| w.desired.paused = true),
            ("upgrade first", |w| {
                w.desired.chart.version = "2.0.0".to_owned()
            }),
            ("rollout", |w| {
                w.unready = Some("0 of 1 available".to_owned())
            }),
            ("locked", |w| {
                w.revisions = vec![w.ours(1, Status::PendingUpgrade)]
            }),
        ];
        for (row, change) in rows {
            let mut w = drifting(mode);
            change(&mut w);
            assert_eq!(wanted(&w), None, "{row}");
        }
    }
    let mut w = drifting(DriftMode::Off);
    w.annotate(names::DRIFT_ANNOTATION, "heal");
    assert_eq!(wanted(&w), Some(DriftMode::Heal));
}

#[test]
fn drift_message_survives_restart_within_its_revision() {
    let said = |w: &World| w.plan().state.ready.message;
    let mut w = drifting(DriftMode::Warn);
    let plain = said(&w);
    let drifted = |revision: u32, message: Option<&str>| Drifted {
        revision,
        message: message.map(str::to_owned),
    };
    w.memory.drift = Some(drifted(1, Some("x is deleted")));
    let plan = w.plan();
    assert_eq!(plan.state.ready.truth, Truth::True);
    assert_eq!(
        plan.state.ready.message,
        format!("{plain}; drift: x is deleted")
    );
    // The same findings give the same message.
    w.memory.said = Some(plan.state.clone());
    assert_eq!(w.plan().state, plan.state);
    w.memory.drift = None;
    assert_eq!(w.plan().state, plan.state, "another process has seen it");
    w.memory.drift = Some(drifted(2, None));
    assert_eq!(w.plan().state, plan.state, "of another revision");
    w.memory.drift = Some(drifted(1, None));
    assert_eq!(said(&w), plain);
    w.memory.drift = Some(drifted(1, Some("x is deleted")));
    w.desired.drift.mode = DriftMode::Off;
    assert_eq!(said(&w), plain);
    w.annotate(names::DRIFT_ANNOTATION, "Heal");
    assert!(said(&w).contains("off, warn or heal"), "{}", said(&w));
}

/// A world in which the API server has refused the planned request.
fn refused_by_api_server(mut world: World) -> World {
    let tenant = ReleaseOwner::Tenant(Arc::new(world.tenant.clone()));
    let fingerprint = world.desired.chart_with(tenant.values()).fingerprint();
    world.memory.refusal = Some(Refusal {
        message: "adding the finalizer: denied".to_owned(),
        attempts: 7,
        retry_at: world.after(900),
        attempt: Attempt::of(&tenant, &world.desired, &fingerprint),
        of_status: false,
        of_reading: false,
        shown: true,
    });
    world
}

#[test]
fn refused_request_is_shown_and_waits() {
    let mut world = world();
    world.tenant.metadata.finalizers = None;
    assert_eq!(world.action(), Action::AddFinalizer);
    let world = refused_by_api_server(world);
    let plan = world.plan();
    assert_eq!(plan.action, Action::Nothing);
    let error = plan.state.error.unwrap();
    assert_eq!(
        (error.truth, error.reason.as_str(), error.message.as_str()),
        (
            Truth::True,
            reason::REQUEST_REFUSED,
            "adding the finalizer: denied"
        )
    );
    assert_eq!(plan.state.ready.truth, Truth::False);
    assert_eq!(plan.wake, Some(world.after(900)));
    assert_eq!(plan.next.map(|next| next.attempts), Some(7));
}

#[test]
fn refused_request_leaves_a_running_release_ready() {
    let mut world = world().deployed();
    world.memory.said = Some(world.plan().state);
    assert_eq!(world.plan().state.ready.truth, Truth::True);
    world.desired.chart.version = "1.20.0".to_owned();
    assert_eq!(world.action(), Action::Helm(Run::Upgrade));
    let state = refused_by_api_server(world).plan().state;
    assert_eq!(state.ready.truth, Truth::True);
    assert_eq!(state.error.unwrap().reason, reason::REQUEST_REFUSED);
}

#[test]
fn request_spec_change_and_deletion_bypass_refusal_wait() {
    let refused = || {
        let mut world = world();
        world.revisions = vec![world.ours(1, Status::Failed)];
        refused_by_api_server(world)
    };
    let acts = |change: fn(&mut World)| {
        let mut world = refused();
        change(&mut world);
        world.action()
    };
    assert_eq!(acts(|_| {}), Action::Nothing);
    let retry = acts(|world| world.annotate(names::RECONCILE_REQUESTED_ANNOTATION, "now"));
    let changed = acts(|world| world.tenant.metadata.generation = Some(2));
    let later = acts(|world| world.now = world.after(900));
    for action in [retry, changed, later] {
        assert_eq!(action, Action::Helm(Run::Install));
    }
    let deleted = refused().deleted().action();
    assert_eq!(deleted, Action::Uninstall);
    // A refused removal waits as well, until the Tenant is orphaned.
    let mut removal = refused_by_api_server(refused().deleted());
    let plan = removal.plan();
    assert_eq!(plan.action, Action::Nothing);
    assert_eq!(plan.state.ready.reason, reason::DELETING);
    assert_eq!(plan.state.error.unwrap().reason, reason::REQUEST_REFUSED);
    removal.annotate(names::ORPHAN_ANNOTATION, "true");
    let action = removal.action();
    assert_eq!(action, Action::RemoveFinalizer { orphaned: true });
}

#[test]
fn refused_status_is_shown_until_it_is_written() {
    let mut world = refused_by_api_server(world().deployed());
    assert_ne!(
        world.plan().state.error.unwrap().reason,
        reason::REQUEST_REFUSED,
        "nothing is to be done"
    );
    world.memory.refusal.as_mut().unwrap().of_status = true;
    world.now = world.after(900);
    let state = world.plan().state;
    assert_eq!(state.error.unwrap().reason, reason::REQUEST_REFUSED);
}

#[test]
fn passing_trouble_is_not_shown() {
    let mut world = world();
    world.revisions = vec![world.ours(1, Status::Failed)];
    let mut world = refused_by_api_server(world);
    world.memory.refusal.as_mut().unwrap().shown = false;
    assert_eq!(world.action(), Action::Helm(Run::Install));
}
