//! Tests sessions, controllers and the leader that use the registry at the same time, in many thread orders.

use std::time::Duration;

use krypton_reconciler::report_store::Changes;
use krypton_runtime::newest::NewestSeen as _;
use krypton_runtime::sync::schedule::{Scene, check};
use krypton_types::conditions::{State, Truth};
use krypton_types::deployment::DesiredDeployment;
use krypton_types::member::MemberReport;
use krypton_types::tenant::{TenantKey, TenantReport};

use super::arbiter::ReporterId;
use super::*;

const SCHEDULES: u64 = 300;
const NAME: &str = "edge-1";
const VERSION: &str = "v1.33.0";

fn at(seconds: u64) -> BootTime {
    BootTime(Duration::from_secs(seconds))
}

fn tenant() -> TenantKey {
    TenantKey::new("default", "acme")
}

/// The full report of a member with one Tenant, from its Lease holder or an observer.
fn full_report(writing: bool) -> Changes {
    let report = TenantReport::new(1, State::new(Truth::True, "Installed", ""));
    let member = MemberReport {
        synced: true,
        ready: true,
        connected: true,
        writing,
        applied: Some((Version::default(), "digest".to_owned())),
        ..MemberReport::default()
    };
    Changes {
        member: Some(member),
        tenants: [(tenant(), Some(report))].into(),
        ..Changes::default()
    }
}

/// One reporter from its start to its end. It sends a full report whenever the hub requests one.
async fn reporter(members: Arc<MemberRegistry>, id: ReporterId) {
    let mut requested = members.open(NAME, id, at(1));
    for _ in 0..2 {
        let number = requested.get_and_update();
        let writing = id != ReporterId::Proxy;
        members.report(NAME, id, full_report(writing), Some(number), at(2));
    }
    members.compare(NAME, id, (7, 7), at(3));
    members.close(NAME, id, at(4));
}

/// Waits for the observation [`VERSION`] as the controller of the EdgeClusters does.
async fn follow_observations(members: Arc<MemberRegistry>) {
    loop {
        for name in members.take_changed() {
            members.reports.counts(&name, false);
            let observation = members.observation(&name).unwrap_or_default();
            if observation.kubernetes_version.as_deref() == Some(VERSION) {
                return;
            }
        }
        members.changed.notified().await;
    }
}

/// Waits for a change of the Tenant as the controller of the Tenants does.
async fn follow_tenants(reports: Arc<TenantReports>) {
    while !reports.take_dirty(at(5)).keys.contains(&tenant()) {
        reports.changed.notified().await;
    }
}

#[test]
fn controllers_see_last_report_in_every_schedule() {
    check(SCHEDULES, |scene: &mut Scene| {
        let reports = Arc::new(TenantReports::default());
        let members = Arc::new(MemberRegistry::new(Arc::clone(&reports)));
        let registry = || Arc::clone(&members);
        scene.task("session", reporter(registry(), ReporterId::Session(1)));
        let proxy = registry();
        scene.task("proxy", async move {
            proxy.set_connection(NAME, Some(State::new(Truth::True, "Connected", "")), at(1));
            reporter(Arc::clone(&proxy), ReporterId::Proxy).await;
            proxy.observe(NAME, |observation| {
                observation.kubernetes_version = Some(VERSION.to_owned());
            });
        });
        let leader = registry();
        scene.thread("leader", move || {
            leader.begin_term(at(3));
            leader.listed_in(Some(at(3)));
            leader.desired_versions();
        });
        scene.task("EdgeClusters", follow_observations(registry()));
        scene.task("Tenants", follow_tenants(reports));
    });
}

#[test]
fn recreated_edge_cluster_ends_session_in_every_schedule() {
    check(SCHEDULES, |scene: &mut Scene| {
        let members = Arc::new(MemberRegistry::default());
        let old_member = members.get_or_create(NAME, "before");
        scene.task("session", async move {
            let mut admission = old_member.admission.subscribe();
            let session = old_member.begin_session("replica", 1);
            while admission.get_and_update().refused.is_none() {
                admission.changed().await.unwrap();
            }
            old_member.end_session("replica", 1);
            assert!(session.is_some());
        });
        let registry = || Arc::clone(&members);
        let controller = registry();
        scene.thread("EdgeClusters", move || {
            let new_member = controller.get_or_create(NAME, "after");
            new_member.begin_session("replica", 2);
            controller.reject_sessions(NAME, Some("after"), "cut");
        });
        let list = registry();
        scene.thread("list", move || {
            list.retain(|name| name == NAME, |_| false, |_| true);
        });
        let (dump, presence) = (registry(), registry());
        scene.thread("dump", move || {
            dump.snapshots();
        });
        scene.task("proxy", async move {
            let mut presence = presence.presence(NAME);
            while presence.get_and_update() == arbiter::Presence::Never {
                presence.changed().await.unwrap();
            }
        });
        let enrollment = registry();
        scene.thread("enrollment", move || enrollment.agent_enrolled(NAME, at(1)));
        scene.end(move || {
            let snapshot = &members.snapshots()[NAME];
            assert_eq!((&*snapshot.uid, snapshot.refused), ("after", true));
            assert_eq!(snapshot.sessions.len(), 1);
        });
    });
}

fn orders(name: &str) -> BTreeMap<String, Vec<DesiredDeployment>> {
    let order = DesiredDeployment {
        namespace: "default".to_owned(),
        name: name.to_owned(),
        ..DesiredDeployment::default()
    };
    [(NAME.to_owned(), vec![order])].into()
}

#[test]
fn orders_of_old_term_are_always_dropped() {
    check(SCHEDULES, |scene: &mut Scene| {
        let members = Arc::new(MemberRegistry::default());
        let deployment_orders = || Arc::clone(members.deployments());
        let mut orders_seen = deployment_orders().orders();
        let leader = Arc::clone(&members);
        scene.thread("leader", move || {
            leader.begin_term(at(1));
            let deployments = leader.deployments();
            assert!(
                deployments.orders().get().is_none(),
                "the old term's orders remain"
            );
            deployments.read_in(Some(at(1)));
            deployments.set_orders(orders("new"));
        });
        let old = deployment_orders();
        scene.thread("old term", move || old.set_orders(orders("old")));
        let one = deployment_orders();
        scene.thread("one member", move || {
            one.set_member_orders(NAME, Vec::new())
        });
        scene.task("agent", async move {
            while orders_seen.get_and_update().is_none() {
                orders_seen.changed().await.unwrap();
            }
        });
    });
}
