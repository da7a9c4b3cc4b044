//! Tests decisions on a Tenant of home, and the state kept for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use krypton_crds::tenant::{HistoryEntry, Tenant, TenantPlacement, TenantSpec, TenantStatus};
use krypton_runtime::clock::BootTime;
use krypton_types::allowed_namespaces::AllowedNamespaces;
use krypton_types::conditions::{self, ClusterState, State, Truth, reason};
use krypton_types::names;
use krypton_types::tenant::{TenantHistory, TenantReport};

use super::*;
use crate::members::tenant_reports::{MemberView, ReportState, ReportedView, Target, Targets};
use crate::tenants::placement::set_conditions;
use crate::tenants::simulation::now;
use crate::tenants::status::{DecisionMemory, DecisionTime, decide};

mod coming;
mod departure;
mod many;

/// Returns the status of one decision at the start of time, without earlier state.
fn aggregated(
    tenant: &Tenant,
    members: &BTreeMap<Arc<str>, MemberView>,
    targets: Option<&Targets>,
    settings: &TenantSettings,
    in_startup_grace: bool,
) -> TenantStatus {
    let view = ReportedView {
        members: members.clone(),
        targets: targets.cloned().map(Arc::new),
        ..ReportedView::default()
    };
    let now = DecisionTime {
        in_startup_grace,
        ..now(BootTime::default())
    };
    let mut memory = DecisionMemory::default();
    decided(tenant, &view, settings, &mut memory, None, now)
}

/// Returns the status of a decision as the controller completes it, and keeps the memory.
fn decided(
    tenant: &Tenant,
    view: &ReportedView,
    settings: &TenantSettings,
    memory: &mut DecisionMemory,
    placed: Option<&State>,
    now: DecisionTime,
) -> TenantStatus {
    let mut decision = decide(tenant, view, settings, memory, now);
    *memory = decision.memory;
    let generation = tenant.metadata.generation.unwrap_or_default();
    let outlook = decision.outlook;
    set_conditions(&mut decision.status, placed, outlook, generation, now.wall);
    decision.status
}

/// Returns the status for all members without a grace period.
fn status_from(tenant: &Tenant, members: &BTreeMap<Arc<str>, MemberView>) -> TenantStatus {
    aggregated(tenant, members, None, &settings(), false)
}

/// Returns the status after a restart, before any member has reported.
fn status_after_restart(tenant: &Tenant) -> TenantStatus {
    aggregated(tenant, &BTreeMap::new(), None, &settings(), true)
}

/// Returns reports of home and edge-1, where the Tenant is installed.
fn both_installed() -> BTreeMap<Arc<str>, MemberView> {
    complete_views(&[(names::SELF_CLUSTER, installed()), ("edge-1", installed())])
}

fn installed() -> Option<TenantReport> {
    Some(report(Truth::True, reason::INSTALLED))
}

fn report(truth: Truth, reason: &str) -> TenantReport {
    let state = ClusterState {
        ready: State::new(truth, reason, ""),
        progress: None,
        error: Some(State::new(Truth::False, reason::NO_ERROR, "")),
    };
    TenantReport {
        applied_chart: "r/c:1".to_owned(),
        ..TenantReport::new(1, state)
    }
}

fn settings() -> TenantSettings {
    TenantSettings {
        self_cluster: true,
        ..simulation::settings()
    }
}

fn tenant() -> Tenant {
    let mut tenant = Tenant::new("acme", TenantSpec::default());
    tenant.metadata.generation = Some(1);
    tenant
}

fn condition(status: &TenantStatus, type_: &str) -> Option<(String, String)> {
    let mut conditions = status.conditions.iter();
    let condition = conditions.find(|condition| condition.type_ == type_)?;
    Some((condition.status.clone(), condition.reason.clone()))
}

/// The chart of the hub's desired state, for all members.
const DESIRED_CHART: &str = "r/c:1";

fn member_view(report_state: ReportState, report: Option<TenantReport>) -> MemberView {
    MemberView {
        report_state,
        report: report.map(Arc::new),
        in_grace: false,
        desired_chart: Some(DESIRED_CHART.into()),
    }
}

fn complete_views(reports: &[(&str, Option<TenantReport>)]) -> BTreeMap<Arc<str>, MemberView> {
    let view = |report: &Option<TenantReport>| member_view(ReportState::Complete, report.clone());
    reports
        .iter()
        .map(|(name, report)| (Arc::from(*name), view(report)))
        .collect()
}

#[test]
fn home_counts_every_member_that_reports_the_tenant() {
    let members = complete_views(&[
        (names::SELF_CLUSTER, installed()),
        ("edge-1", installed()),
        ("edge-2", Some(report(Truth::False, "Installing"))),
        ("edge-3", None),
    ]);
    let status = status_from(&tenant(), &members);
    let message = status.last_message.clone().unwrap();
    assert!(message.starts_with("2 of 3 clusters ready"), "{message}");
    assert_eq!(status.phase.as_deref(), Some("Ready"));
    assert_eq!(condition(&status, "Ready").unwrap().0, "False");
    assert_eq!(condition(&status, "ClusterReady/edge-3"), None);
    assert_eq!(status.last_applied_chart.as_deref(), Some("r/c:1"));
}

#[test]
fn a_silent_member_is_unknown_and_not_dropped() {
    let mut acme = tenant();
    let mut members = both_installed();
    acme.status = Some(status_from(&acme, &members));
    members.get_mut("edge-1").unwrap().report_state = ReportState::Silent("no answer".to_owned());
    let status = status_from(&acme, &members);
    let unknown = Some(("Unknown".to_owned(), reason::CLUSTER_UNREACHABLE.to_owned()));
    assert_eq!(condition(&status, "ClusterReady/edge-1"), unknown);
    assert_eq!(condition(&status, "Ready").unwrap().0, "Unknown");
}

#[test]
fn restarted_hub_keeps_member_conditions_until_reports_arrive() {
    let mut acme = tenant();
    acme.status = Some(status_from(&acme, &both_installed()));
    assert_eq!(Some(status_after_restart(&acme)), acme.status);
    let status = status_from(&acme, &BTreeMap::new());
    let edge = condition(&status, "ClusterReady/edge-1").unwrap();
    assert_eq!(edge.0, "Unknown");
}

#[test]
fn tenant_naming_member_ignores_home_cluster() {
    let mut acme = tenant();
    acme.spec = naming("n", Some("edge-1")).spec;
    let members = complete_views(&[(names::SELF_CLUSTER, None), ("edge-1", None)]);
    let status = status_from(&acme, &members);
    assert_eq!(condition(&status, "Ready").unwrap().0, "False");
    assert!(status.last_message.unwrap().contains("edge-1"));
}

fn naming(namespace: &str, member: Option<&str>) -> Tenant {
    let mut tenant = tenant();
    tenant.metadata.namespace = Some(namespace.to_owned());
    if let Some(member) = member {
        let spec = serde_json::json!({ "clusterRef": { "secretName": member } });
        tenant.spec = serde_json::from_value(spec).unwrap();
    }
    tenant
}

#[test]
fn tenant_shows_whether_target_member_is_resolved() {
    let resolved = |acme: &Tenant, targets: Option<&Targets>| {
        let status = aggregated(acme, &BTreeMap::new(), targets, &settings(), false);
        let state = conditions::find(&status.conditions, conditions::TARGET_RESOLVED);
        (status, state.map(|state| (state.truth, state.reason)))
    };
    let stale = State::new(Truth::False, "RemoteClusterStale", "why");
    let target = Target {
        resolved: Some(stale),
        ..Target::default()
    };
    let targets: Targets = [("edge-1".to_owned(), target)].into();
    let mut acme = naming("team-a", Some("edge-1"));
    let (status, resolved_state) = resolved(&acme, Some(&targets));
    let expected_stale = Some((Truth::False, "RemoteClusterStale".to_owned()));
    assert_eq!(resolved_state, expected_stale);
    // While the EdgeClusters are not known, the recorded condition stays.
    acme.status = Some(status);
    assert_eq!(resolved(&acme, None).1, expected_stale);
    let not_found = Some((Truth::False, reason::CLUSTER_NOT_FOUND.to_owned()));
    assert_eq!(resolved(&acme, Some(&Targets::new())).1, not_found);
    acme.spec.cluster_ref = None;
    assert_eq!(resolved(&acme, Some(&targets)).1, None);
}

#[test]
fn member_report_skips_tenant_from_disallowed_namespace() {
    let limit = |members: &[&str]| -> Targets {
        let all = [names::SELF_CLUSTER, "edge-1", "edge-2"].into_iter();
        let target = |name: &str| Target {
            allowed: if members.contains(&name) {
                AllowedNamespaces::new(Some(&["team-a".to_owned()]))
            } else {
                AllowedNamespaces::default()
            },
            ..Target::default()
        };
        all.map(|name| (name.to_owned(), target(name))).collect()
    };
    let views = both_installed();
    let refused = Some(("False".to_owned(), reason::NAMESPACE_NOT_ALLOWED.to_owned()));
    let installed = Some(("True".to_owned(), reason::INSTALLED.to_owned()));
    let all = [names::SELF_CLUSTER, "edge-1"];
    let (home, edge) = (Some(names::SELF_CLUSTER), Some("edge-1"));
    for (namespace, named, limited, on_self, on_edge) in [
        ("team-b", edge, &["edge-1"][..], &None, &refused),
        ("team-b", edge, &all[..], &None, &refused),
        ("team-b", edge, &["edge-2"][..], &None, &installed),
        ("team-a", edge, &all[..], &None, &installed),
        ("team-b", home, &all[..], &refused, &None),
        ("team-a", home, &all[..], &installed, &None),
        // A Tenant without `clusterRef` stays, and counts all members that report such a Tenant.
        ("team-b", None, &all[..], &installed, &installed),
    ] {
        let case = format!("{namespace} {named:?} {limited:?}");
        let mut acme = naming(namespace, named);
        let status = |acme: &Tenant, targets: &Targets| {
            aggregated(acme, &views, Some(targets), &settings(), false)
        };
        // Without the limit, with it, and without it again.
        acme.status = Some(status(&acme, &limit(&[])));
        let free = acme.status.clone();
        let limits = limit(limited);
        let limited = status(&acme, &limits);
        for (member, expected) in all.into_iter().zip([on_self, on_edge]) {
            let shown = condition(&limited, &format!("ClusterReady/{member}"));
            assert_eq!(shown, *expected, "{case} on {member}");
        }
        let mut conditions = limited.conditions.iter();
        let refusal =
            conditions.find(|condition| condition.reason == reason::NAMESPACE_NOT_ALLOWED);
        if let Some(refusal) = refusal {
            let member = named.unwrap();
            assert_eq!(condition(&limited, &format!("ClusterError/{member}")), None);
            for word in [member, namespace, "spec.allowedNamespaces"] {
                assert!(refusal.message.contains(word), "{refusal:?}");
            }
            assert_eq!(condition(&limited, "Ready").unwrap().0, "False");
        }
        acme.status = Some(limited);
        assert_eq!(acme.status, Some(status(&acme, &limits)), "{case}");
        let again = status(&acme, &limit(&[]));
        let types = |status: &TenantStatus| -> BTreeMap<String, String> {
            let conditions = status.conditions.iter().cloned();
            let types = conditions.map(|condition| (condition.type_, condition.reason));
            types.collect()
        };
        assert_eq!(types(&again), types(free.as_ref().unwrap()), "{case}");
    }
}

/// Records the placement on this member, with its cluster's UID.
fn placed_on(mut tenant: Tenant, member: &str, cluster_uid: &str) -> Tenant {
    let status = tenant.status.get_or_insert_default();
    status.placement = Some(TenantPlacement {
        cluster: member.to_owned(),
        cluster_uid: cluster_uid.to_owned(),
    });
    tenant
}

#[test]
fn tenant_counts_only_its_own_member() {
    let failed = || {
        let mut report = report(Truth::False, reason::INSTALL_FAILED);
        report.state.error = Some(State::new(Truth::True, reason::INSTALL_FAILED, "a lie"));
        Some(report)
    };
    let views = complete_views(&[
        (names::SELF_CLUSTER, failed()),
        ("edge-1", Some(report(Truth::True, reason::INSTALLED))),
        ("edge-2", failed()),
    ]);
    let target = |uid: &str| Target {
        cluster_uid: Some(uid.to_owned()),
        source_namespace: Some("krypton".to_owned()),
        ..Target::default()
    };
    let targets: Targets = ["edge-1", "edge-2"]
        .map(|name| (name.to_owned(), target(&format!("uid-of-{name}"))))
        .into();
    let mut in_other_namespace = naming("n", Some("edge-1"));
    let spec = serde_json::json!({
        "clusterRef": { "secretName": "edge-1", "secretNamespace": "other" }
    });
    in_other_namespace.spec = serde_json::from_value(spec).unwrap();
    let named = || naming("n", Some("edge-1"));
    // The name, the members that count, the phase.
    let placed = placed_on(named(), "edge-1", "uid-of-edge-1");
    let renamed = placed_on(naming("n", Some("edge-2")), "edge-1", "uid-of-edge-1");
    let cluster_renamed = placed_on(named(), "old", "uid-of-edge-1");
    let replaced = placed_on(named(), "edge-1", "uid-of-another");
    for (case, acme, counted, phase) in [
        ("named", named(), &["edge-1"][..], "Ready"),
        ("placed", placed, &["edge-1"], "Ready"),
        ("placed, names another now", renamed, &["edge-1"], "Ready"),
        ("cluster renamed", cluster_renamed, &["edge-1"], "Ready"),
        ("cluster replaced", replaced, &[], "Pending"),
        ("in another namespace", in_other_namespace, &[], "Pending"),
    ] {
        let result = |acme: &Tenant, targets: Option<&Targets>| {
            let status = aggregated(acme, &views, targets, &settings(), false);
            let members = conditions::clusters(&status.conditions).into_keys();
            (members.collect::<Vec<_>>(), status.phase)
        };
        let expected = (
            counted.iter().map(|name| (*name).to_owned()).collect(),
            Some(phase.to_owned()),
        );
        assert_eq!(result(&acme, Some(&targets)), expected, "{case}");
        // Members that counted without `clusterRef` disappear.
        let mut unreferenced = acme.clone();
        unreferenced.spec.cluster_ref = None;
        let status = unreferenced.status.take();
        let placement = status.and_then(|status| status.placement);
        let unreferenced = aggregated(&unreferenced, &views, Some(&targets), &settings(), false);
        assert_eq!(conditions::clusters(&unreferenced.conditions).len(), 3);
        let mut named = acme.clone();
        named.status = Some(TenantStatus {
            placement,
            ..unreferenced
        });
        if !counted.is_empty() {
            assert_eq!(result(&named, Some(&targets)), expected, "{case}");
        }
        // Before the EdgeClusters are known, only the name decides.
        if ["named", "placed"].contains(&case) {
            assert_eq!(result(&acme, None), expected, "{case}");
        }
    }
}

#[test]
fn last_applied_chart_comes_from_the_hub() {
    let reporting = |chart: &str| TenantReport {
        applied_chart: chart.to_owned(),
        ..report(Truth::True, reason::INSTALLED)
    };
    let mut acme = tenant();
    for (reported, expected) in [
        ("https://elsewhere/c:1", None),
        ("", None),
        (DESIRED_CHART, Some(DESIRED_CHART)),
        ("zzz/the-greatest:9", Some(DESIRED_CHART)),
    ] {
        let members = complete_views(&[("edge-1", Some(reporting(reported)))]);
        let status = status_from(&acme, &members);
        assert_eq!(status.last_applied_chart.as_deref(), expected, "{reported}");
        acme.status = Some(status);
    }
}

#[test]
fn clusters_list_state_cause_and_chart_of_members() {
    let mut failed = report(Truth::True, reason::INSTALLED);
    let no_room = State::new(Truth::True, reason::UPGRADE_FAILED, "no room ".repeat(100));
    failed.state.error = Some(no_room);
    let views = complete_views(&[
        (names::SELF_CLUSTER, installed()),
        ("edge-2", Some(failed)),
        ("edge-1", Some(report(Truth::False, reason::INSTALLING))),
    ]);
    let mut acme = tenant();
    acme.status = Some(status_from(&acme, &views));
    let status = acme.status.clone().unwrap();
    let cluster = |name: &str| status.clusters.iter().find(|cluster| cluster.name == name);
    assert!(status.clusters.is_sorted_by_key(|cluster| &cluster.name));
    for (name, state, cause) in [
        (names::SELF_CLUSTER, "Ready", reason::INSTALLED),
        ("edge-1", "NotReady", reason::INSTALLING),
        ("edge-2", "Error", reason::UPGRADE_FAILED),
    ] {
        let cluster = cluster(name).unwrap();
        assert_eq!((&*cluster.state, &*cluster.reason), (state, cause));
        assert_eq!(cluster.chart.as_deref(), Some("r/c:1"));
        assert!(cluster.message.len() <= 128);
    }
    // A report that changes nothing in the list causes no write, and neither does a restart of the hub.
    assert_eq!(status_from(&acme, &views), status);
    assert_eq!(status_after_restart(&acme), status);
}

#[test]
fn history_at_home_is_that_of_self_cluster() {
    let entries = |revision| {
        vec![HistoryEntry {
            revision,
            ..HistoryEntry::default()
        }]
    };
    let with_history = |history: Option<Vec<HistoryEntry>>| TenantReport {
        history: history.map(|entries| {
            Arc::new(TenantHistory {
                uid: "u".to_owned(),
                entries,
            })
        }),
        ..report(Truth::True, reason::INSTALLED)
    };
    let recorded = |mut tenant: Tenant| {
        tenant.status = Some(TenantStatus {
            history: entries(1),
            ..TenantStatus::default()
        });
        tenant
    };
    let named = recorded(naming("n", Some("edge-1")));
    let (known, two) = (|| recorded(tenant()), || Some(entries(2)));
    for (case, mut acme, self_cluster, reported, expected) in [
        ("new", tenant(), true, two(), entries(2)),
        ("changed", known(), true, two(), entries(2)),
        ("release is gone", known(), true, Some(vec![]), vec![]),
        ("none reported", known(), true, None, entries(1)),
        ("created again", known(), true, two(), entries(1)),
        ("no member", known(), false, two(), vec![]),
        ("other member", named, true, two(), vec![]),
    ] {
        let uid = if case == "created again" { "v" } else { "u" };
        acme.metadata.uid = Some(uid.to_owned());
        let views = complete_views(&[
            (names::SELF_CLUSTER, Some(with_history(reported))),
            ("edge-1", Some(with_history(Some(entries(3))))),
        ]);
        let settings = TenantSettings {
            self_cluster,
            ..settings()
        };
        let status = aggregated(&acme, &views, None, &settings, false);
        assert_eq!(status.history, expected, "{case}");
        let unread = aggregated(&acme, &BTreeMap::new(), None, &settings, false);
        let is_kept = self_cluster && case != "other member";
        let recorded = acme.status.map(|status| status.history);
        let kept = recorded.filter(|_| is_kept).unwrap_or_default();
        assert_eq!(unread.history, kept, "{case}");
    }
}

#[test]
fn request_at_home_is_acknowledged_by_its_handler() {
    let handled = |request: &str| TenantReport {
        handled_request: Some(request.to_owned()),
        ..report(Truth::True, reason::INSTALLED)
    };
    let requesting = |mut tenant: Tenant| {
        let annotations = tenant.metadata.annotations.get_or_insert_default();
        let name = names::RECONCILE_REQUESTED_ANNOTATION.to_owned();
        annotations.insert(name, "now".to_owned());
        tenant
    };
    let named = naming("n", Some("edge-1"));
    let placed = placed_on(named.clone(), "edge-1", "uid-of-edge-1");
    for (case, acme, at_home, on_edge, acknowledged) in [
        ("home", tenant(), "now", "earlier", true),
        ("home is late", tenant(), "earlier", "now", false),
        ("placed", placed.clone(), "earlier", "now", true),
        ("copy is late", placed, "now", "earlier", false),
        ("not placed", named, "now", "now", false),
    ] {
        let views = complete_views(&[
            (names::SELF_CLUSTER, Some(handled(at_home))),
            ("edge-1", Some(handled(on_edge))),
        ]);
        let status = status_from(&requesting(acme), &views);
        let handled = status.last_handled_reconcile_at.as_deref();
        assert_eq!(handled, acknowledged.then_some("now"), "{case}");
    }
}

#[test]
fn refusal_survives_restart_and_ends_with_limit() {
    let mut acme = naming("team-b", Some("edge-1"));
    let allowed = AllowedNamespaces::new(Some(&["team-a".to_owned()]));
    let target = Target {
        allowed,
        ..Target::default()
    };
    let limits: Targets = [("edge-1".to_owned(), target)].into();
    let no_members = BTreeMap::new();
    let status =
        |acme: &Tenant, members, limits| aggregated(acme, members, limits, &settings(), true);
    acme.status = Some(status(&acme, &no_members, Some(&limits)));
    assert!(condition(acme.status.as_ref().unwrap(), "ClusterReady/edge-1").is_some());
    // The EdgeClusters are not known yet.
    assert_eq!(Some(status(&acme, &no_members, None)), acme.status);
    let mut members = complete_views(&[("edge-1", None)]);
    members.get_mut("edge-1").unwrap().report_state = ReportState::Silent("no answer".to_owned());
    let after = status(&acme, &members, Some(&Targets::new()));
    assert_eq!(condition(&after, "ClusterReady/edge-1"), None);
}
