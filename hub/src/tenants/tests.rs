//! Tests decisions on a Tenant of home, and the state kept for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use krypton_crds::tenant::{Tenant, TenantPlacement, TenantSpec, TenantStatus};
use krypton_runtime::clock::BootTime;
use krypton_types::allowed_namespaces::Allowed;
use krypton_types::conditions::{self, ClusterState, State, Truth, reason};
use krypton_types::names;
use krypton_types::tenant::{TenantKey, TenantReport};

use super::*;
use crate::members::tenant_reports::{Heard, Saying, TEXTS_MAX};
use crate::tenants::status::{Memory, Now, decide};

mod coming;
mod departure;
mod many;

/// Returns the status of one decision without earlier state.
fn aggregated(
    tenant: &Tenant,
    said: &BTreeMap<Arc<str>, Saying>,
    targets: Option<&Targets>,
    rules: &Rules,
    patient: bool,
    wall: Timestamp,
) -> TenantStatus {
    let heard = Heard {
        said: said.clone(),
        strangers: 0,
        targets: targets.cloned().map(Arc::new),
    };
    let boot = BootTime::default();
    let now = Now {
        boot,
        wall,
        patient,
    };
    decide(tenant, &heard, rules, &Memory::default(), now).status
}

/// Returns the status for all members, at the start of time and without patience.
fn shown(tenant: &Tenant, said: &BTreeMap<Arc<str>, Saying>) -> TenantStatus {
    aggregated(tenant, said, None, &rules(), false, Timestamp::UNIX_EPOCH)
}

/// Returns reports of home and edge-1, where the Tenant is installed.
fn both_installed() -> BTreeMap<Arc<str>, Saying> {
    full(&[
        (names::SELF_CLUSTER, Some(report(Truth::True, "Installed"))),
        ("edge-1", Some(report(Truth::True, "Installed"))),
    ])
}

fn report(truth: Truth, why: &str) -> TenantReport {
    TenantReport {
        observed_generation: 1,
        applied_chart: "r/c:1".to_owned(),
        next: None,
        state: ClusterState {
            ready: State::new(truth, why, ""),
            progress: None,
            error: Some(State::new(Truth::False, reason::NO_ERROR, "")),
        },
    }
}

fn rules() -> Rules {
    Rules {
        self_cluster: true,
        allow_chart_skip: false,
        namespaces: None,
    }
}

fn tenant() -> Tenant {
    let mut tenant = Tenant::new("acme", TenantSpec::default());
    tenant.metadata.generation = Some(1);
    tenant
}

fn ready(status: &TenantStatus, type_: &str) -> Option<(String, String)> {
    let mut conditions = status.conditions.iter();
    let condition = conditions.find(|condition| condition.type_ == type_)?;
    Some((condition.status.clone(), condition.reason.clone()))
}

/// The chart of the hub's desired state, for all members.
const DEALT: &str = "r/c:1";

fn saying(hearing: Hearing, report: Option<TenantReport>) -> Saying {
    Saying {
        hearing,
        report: report.map(Arc::new),
        patient: false,
        dealt: Some(DEALT.into()),
    }
}

fn full(members: &[(&str, Option<TenantReport>)]) -> BTreeMap<Arc<str>, Saying> {
    let said = |report: &Option<TenantReport>| saying(Hearing::Full, report.clone());
    let members = members.iter();
    members
        .map(|(name, report)| (Arc::from(*name), said(report)))
        .collect()
}

#[test]
fn home_counts_every_member_that_reports_the_tenant() {
    let said = full(&[
        (names::SELF_CLUSTER, Some(report(Truth::True, "Installed"))),
        ("edge-1", Some(report(Truth::True, "Installed"))),
        ("edge-2", Some(report(Truth::False, "Installing"))),
        ("edge-3", None),
    ]);
    let status = shown(&tenant(), &said);
    let message = status.last_message.clone().unwrap();
    assert!(message.starts_with("2 of 3 clusters ready"), "{message}");
    assert_eq!(status.phase.as_deref(), Some("Ready"));
    assert_eq!(ready(&status, "Ready").unwrap().0, "False");
    assert_eq!(ready(&status, "ClusterReady/edge-3"), None);
    assert_eq!(status.last_applied_chart.as_deref(), Some("r/c:1"));
}

#[test]
fn a_silent_member_is_unknown_and_not_dropped() {
    let mut acme = tenant();
    let said = both_installed();
    acme.status = Some(shown(&acme, &said));
    let mut said = said;
    said.get_mut("edge-1").unwrap().hearing = Hearing::Silent("no answer".to_owned());
    let status = shown(&acme, &said);
    let unknown = Some(("Unknown".to_owned(), reason::CLUSTER_UNREACHABLE.to_owned()));
    assert_eq!(ready(&status, "ClusterReady/edge-1"), unknown);
    assert_eq!(ready(&status, "Ready").unwrap().0, "Unknown");
}

#[test]
fn restarted_hub_keeps_member_conditions_until_reports_arrive() {
    let mut acme = tenant();
    let said = both_installed();
    acme.status = Some(shown(&acme, &said));
    let nothing = BTreeMap::new();
    let status = aggregated(&acme, &nothing, None, &rules(), true, Timestamp::UNIX_EPOCH);
    assert_eq!(Some(status), acme.status);
    let status = shown(&acme, &nothing);
    assert_eq!(ready(&status, "ClusterReady/edge-1").unwrap().0, "Unknown");
}

#[test]
fn member_reports_are_kept_until_resync_completes() {
    let reports = Reports::default();
    let key = |name: &str| TenantKey {
        namespace: "n".to_owned(),
        name: name.to_owned(),
    };
    let said = || Some(report(Truth::True, "Installed"));
    let heard = |key: &TenantKey| {
        let heard = reports.of(key, None, ["edge-1"], BootTime::default());
        heard.said["edge-1"].report.clone()
    };
    reports.begin("edge-1", BootTime::default());
    let both = [(key("a"), said()), (key("b"), said())].into();
    assert!(reports.report("edge-1", Changed::new(both)));
    reports.hearing("edge-1", Hearing::Full);
    reports.begin("edge-1", BootTime::default());
    assert!(reports.report("edge-1", Changed::new([(key("a"), said())].into())));
    assert!(heard(&key("b")).is_some());
    reports.hearing("edge-1", Hearing::Full);
    assert!(heard(&key("a")).is_some());
    assert!(heard(&key("b")).is_none());
}

#[test]
fn member_report_texts_are_bounded_but_reasons_kept() {
    let reports = Reports::default();
    let key = |number: usize| TenantKey {
        namespace: "n".to_owned(),
        name: format!("t{number}"),
    };
    let long = |letter: &str| {
        let mut report = report(Truth::False, reason::INSTALL_FAILED);
        report.state.ready.message = letter.repeat(1024);
        report.state.error = Some(State::new(
            Truth::True,
            "UpgradeFailed",
            letter.repeat(1024),
        ));
        report.state.progress = report.state.error.clone();
        report
    };
    let says = |letter: &str, numbers: std::ops::Range<usize>| {
        let said = numbers.map(|number| (key(number), Some(long(letter))));
        assert!(reports.report("edge-1", Changed::new(said.collect())));
        reports.hearing("edge-1", Hearing::Full);
    };
    says("a", 0..TENANTS_MAX);
    let heard = |number: usize| {
        let heard = reports.of(&key(number), None, [], BootTime::default());
        heard.said["edge-1"].report.clone().unwrap()
    };
    let size = |number| serde_json::to_vec(&*heard(number)).unwrap().len();
    let texts = (0..TENANTS_MAX).map(|number| size(number).saturating_sub(256));
    let texts: usize = texts.sum();
    assert!(texts <= TEXTS_MAX + 2 * 1024 * 1024, "{texts}");
    assert_eq!(*heard(0), long("a"));
    let last = heard(TENANTS_MAX - 1);
    assert_eq!(last.state.ready.reason, reason::INSTALL_FAILED);
    assert_eq!(last.state.ready.message, "");
    // Both sides still compute the same digest.
    let digest = reports.digest("edge-1");
    let other = Reports::default();
    let said = (0..TENANTS_MAX).map(|number| (key(number), Some(long("a"))));
    other.report("edge-1", Changed::new(said.collect()));
    other.hearing("edge-1", Hearing::Full);
    assert_eq!(digest, other.digest("edge-1"));
    // A shorter report makes room.
    let gone = (0..TENANTS_MAX - 1).map(|number| (key(number), None));
    reports.report("edge-1", Changed::new(gone.collect()));
    says("b", TENANTS_MAX - 1..TENANTS_MAX);
    assert_eq!(*heard(TENANTS_MAX - 1), long("b"));
}

#[test]
fn tenant_naming_member_ignores_home_cluster() {
    let mut acme = tenant();
    acme.spec = naming("n", Some("edge-1")).spec;
    let said = full(&[(names::SELF_CLUSTER, None), ("edge-1", None)]);
    let status = shown(&acme, &said);
    assert_eq!(ready(&status, "Ready").unwrap().0, "False");
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
        let now = Timestamp::UNIX_EPOCH;
        let status = aggregated(acme, &full(&[]), targets, &rules(), false, now);
        let state = conditions::find(&status.conditions, conditions::TARGET_RESOLVED);
        (status, state.map(|state| (state.truth, state.reason)))
    };
    let stale = State::new(Truth::False, "RemoteClusterStale", "why");
    let target = Target {
        resolved: Some(stale),
        ..Target::default()
    };
    let here: Targets = [("edge-1".to_owned(), target)].into();
    let mut acme = naming("team-a", Some("edge-1"));
    let (status, said) = resolved(&acme, Some(&here));
    let is_stale = Some((Truth::False, "RemoteClusterStale".to_owned()));
    assert_eq!(said, is_stale);
    // While the EdgeClusters are not known, the recorded condition stays.
    acme.status = Some(status);
    assert_eq!(resolved(&acme, None).1, is_stale);
    let nowhere = Some((Truth::False, reason::CLUSTER_NOT_FOUND.to_owned()));
    assert_eq!(resolved(&acme, Some(&Targets::new())).1, nowhere);
    acme.spec.cluster_ref = None;
    assert_eq!(resolved(&acme, Some(&here)).1, None, "it names nobody now");
}

#[test]
fn member_report_skips_tenant_from_disallowed_namespace() {
    let limit = |members: &[&str]| -> Targets {
        let all = [names::SELF_CLUSTER, "edge-1", "edge-2"].into_iter();
        let target = |name: &str| Target {
            allowed: if members.contains(&name) {
                Allowed::new(Some(&["team-a".to_owned()]))
            } else {
                Allowed::default()
            },
            ..Target::default()
        };
        all.map(|name| (name.to_owned(), target(name))).collect()
    };
    let said = both_installed();
    let refused = Some(("False".to_owned(), reason::NAMESPACE_NOT_ALLOWED.to_owned()));
    let well = Some(("True".to_owned(), reason::INSTALLED.to_owned()));
    let all = [names::SELF_CLUSTER, "edge-1"];
    for (namespace, named, limited, on_self, on_edge) in [
        ("team-b", Some("edge-1"), &["edge-1"][..], &None, &refused),
        ("team-b", Some("edge-1"), &all[..], &None, &refused),
        ("team-b", Some("edge-1"), &["edge-2"][..], &None, &well),
        ("team-a", Some("edge-1"), &all[..], &None, &well),
        (
            "team-b",
            Some(names::SELF_CLUSTER),
            &all[..],
            &refused,
            &None,
        ),
        ("team-a", Some(names::SELF_CLUSTER), &all[..], &well, &None),
        // A Tenant without `clusterRef` stays, and counts all members that report such a Tenant.
        ("team-b", None, &all[..], &well, &well),
    ] {
        let case = format!("{namespace} {named:?} {limited:?}");
        let mut acme = naming(namespace, named);
        let now = Timestamp::UNIX_EPOCH;
        let status = |acme: &Tenant, targets: Option<&Targets>| {
            aggregated(acme, &said, targets, &rules(), false, now)
        };
        // Without the limit, with it, and without it again.
        acme.status = Some(status(&acme, Some(&limit(&[]))));
        let free = acme.status.clone();
        let limits = limit(limited);
        let limited = status(&acme, Some(&limits));
        assert_eq!(
            ready(&limited, "ClusterReady/self-cluster"),
            *on_self,
            "{case}"
        );
        assert_eq!(ready(&limited, "ClusterReady/edge-1"), *on_edge, "{case}");
        let mut conditions = limited.conditions.iter();
        let told = conditions.find(|found| found.reason == reason::NAMESPACE_NOT_ALLOWED);
        if let Some(told) = told {
            let member = named.unwrap();
            assert_eq!(ready(&limited, &format!("ClusterError/{member}")), None);
            for word in [member, namespace, "spec.allowedNamespaces"] {
                assert!(told.message.contains(word), "{told:?}");
            }
            assert_eq!(ready(&limited, "Ready").unwrap().0, "False");
        }
        acme.status = Some(limited);
        assert_eq!(acme.status, Some(status(&acme, Some(&limits))), "{case}");
        let again = status(&acme, Some(&limit(&[])));
        let types = |status: &TenantStatus| -> BTreeMap<String, String> {
            let conditions = status.conditions.iter().cloned();
            conditions
                .map(|found| (found.type_, found.reason))
                .collect()
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
    let said = full(&[
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
    let mut of_another = naming("n", Some("edge-1"));
    let spec = serde_json::json!({
        "clusterRef": { "secretName": "edge-1", "secretNamespace": "other" }
    });
    of_another.spec = serde_json::from_value(spec).unwrap();
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
        ("named in another namespace", of_another, &[], "Pending"),
    ] {
        let now = Timestamp::UNIX_EPOCH;
        let shown = |acme: &Tenant, targets: Option<&Targets>| {
            let status = aggregated(acme, &said, targets, &rules(), false, now);
            let members = conditions::clusters(&status.conditions).into_keys();
            (members.collect::<Vec<_>>(), status.phase)
        };
        let expected = (
            counted.iter().map(|name| (*name).to_owned()).collect(),
            Some(phase.to_owned()),
        );
        assert_eq!(shown(&acme, Some(&targets)), expected, "{case}");
        // Members that counted without `clusterRef` disappear.
        let mut before = acme.clone();
        before.spec.cluster_ref = None;
        let place = before.status.take().and_then(|status| status.placement);
        let before = aggregated(&before, &said, Some(&targets), &rules(), false, now);
        assert_eq!(conditions::clusters(&before.conditions).len(), 3);
        let mut named = acme.clone();
        named.status = Some(TenantStatus {
            placement: place,
            ..before
        });
        if !counted.is_empty() {
            assert_eq!(shown(&named, Some(&targets)), expected, "{case}");
        }
        // Before the EdgeClusters are known, only the name decides.
        if ["named", "placed"].contains(&case) {
            assert_eq!(shown(&acme, None), expected, "{case}");
        }
    }
}

#[test]
fn last_applied_chart_comes_from_the_hub() {
    let claim = |chart: &str| TenantReport {
        applied_chart: chart.to_owned(),
        ..report(Truth::True, reason::INSTALLED)
    };
    let now = Timestamp::UNIX_EPOCH;
    let mut acme = tenant();
    for (claimed, expected) in [
        ("https://elsewhere/c:1", None),
        ("", None),
        (DEALT, Some(DEALT)),
        ("zzz/the-greatest:9", Some(DEALT)),
    ] {
        let said = full(&[("edge-1", Some(claim(claimed)))]);
        let status = aggregated(&acme, &said, None, &rules(), false, now);
        assert_eq!(status.last_applied_chart.as_deref(), expected, "{claimed}");
        acme.status = Some(status);
    }
}

#[test]
fn refusal_survives_restart_and_ends_with_limit() {
    let mut acme = naming("team-b", Some("edge-1"));
    let allowed = Allowed::new(Some(&["team-a".to_owned()]));
    let target = Target {
        allowed,
        ..Target::default()
    };
    let limits: Targets = [("edge-1".to_owned(), target)].into();
    let nothing = BTreeMap::new();
    let now = Timestamp::UNIX_EPOCH;
    let status = |acme: &Tenant, said, limits| aggregated(acme, said, limits, &rules(), true, now);
    acme.status = Some(status(&acme, &nothing, Some(&limits)));
    assert!(ready(acme.status.as_ref().unwrap(), "ClusterReady/edge-1").is_some());
    // The EdgeClusters are not known yet.
    assert_eq!(Some(status(&acme, &nothing, None)), acme.status);
    let mut said = full(&[("edge-1", None)]);
    said.get_mut("edge-1").unwrap().hearing = Hearing::Silent("no answer".to_owned());
    let after = status(&acme, &said, Some(&Targets::new()));
    assert_eq!(ready(&after, "ClusterReady/edge-1"), None);
}
