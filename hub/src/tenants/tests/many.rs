//! Tenants on more members than one object can list.

use std::collections::BTreeSet;

use krypton_types::conditions::MESSAGE_MAX;
use proptest::prelude::*;

use super::*;

/// Bytes that managedFields use for one condition or cluster, in addition to its type or name.
const MANAGED: usize = 200;
const LIMIT: usize = 256 * 1024;

fn name(number: usize) -> String {
    format!("edge-{number:04}")
}

fn complete_view(reports: &BTreeMap<String, TenantReport>) -> ReportedView {
    let members = reports.iter().map(|(name, report)| {
        let view = member_view(ReportState::Complete, Some(report.clone()));
        (Arc::from(name.as_str()), view)
    });
    let targets = reports.keys().map(|name| (name.clone(), Target::default()));
    ReportedView {
        members: members.collect(),
        others_without: 0,
        targets: Some(Arc::new(targets.collect())),
    }
}

fn all_installed(count: usize) -> BTreeMap<String, TenantReport> {
    let each = (0..count).map(|number| (name(number), report(Truth::True, reason::INSTALLED)));
    each.collect()
}

fn decide_next(
    tenant: &mut Tenant,
    view: &ReportedView,
    memory: &mut DecisionMemory,
    in_startup_grace: bool,
) -> TenantStatus {
    let now = DecisionTime {
        in_startup_grace,
        ..now(BootTime::default())
    };
    let status = decided(tenant, view, &simulation::settings(), memory, None, now);
    tenant.status = Some(status.clone());
    status
}

/// Decides on these reports without memory of earlier decisions.
fn decide_first(tenant: &mut Tenant, reports: &BTreeMap<String, TenantReport>) -> TenantStatus {
    let mut memory = DecisionMemory::default();
    decide_next(tenant, &complete_view(reports), &mut memory, false)
}

#[track_caller]
fn assert_message(status: &TenantStatus, expected: &str) {
    assert_eq!(status.last_message.as_deref(), Some(expected));
}

fn listed_members(status: &TenantStatus) -> BTreeSet<String> {
    conditions::clusters(&status.conditions)
        .into_keys()
        .collect()
}

fn size(tenant: &Tenant) -> usize {
    let status = tenant.status.as_ref().unwrap();
    let conditions = status.conditions.iter();
    let clusters = status.clusters.iter();
    let managed = conditions
        .map(|condition| MANAGED + condition.type_.len())
        .chain(clusters.map(|cluster| MANAGED + cluster.name.len()));
    serde_json::to_vec(tenant).unwrap().len() + managed.sum::<usize>()
}

#[test]
fn status_lists_worst_members_and_counts_all() {
    let mut reports = all_installed(200);
    for number in 100..140 {
        let report = reports.get_mut(&name(number)).unwrap();
        report.state.ready = State::new(Truth::False, reason::INSTALLING, "on its way");
    }
    let failed = reports.get_mut(&name(150)).unwrap();
    failed.state.error = Some(State::new(Truth::True, reason::INSTALL_FAILED, "no room"));
    failed.state.progress = Some(State::new(Truth::False, reason::INSTALL_COMPLETE, ""));
    let mut acme = tenant();
    let status = decide_first(&mut acme, &reports);
    let message =
        "159 of 200 clusters ready (1 in error, 40 not ready); edge-0150: InstallFailed: no room";
    assert_message(&status, message);
    assert_eq!(status.phase.as_deref(), Some("Error"));
    let worst: BTreeSet<String> = (100..119).chain([150]).map(name).collect();
    assert_eq!(listed_members(&status), worst);
    assert!(condition(&status, "ClusterError/edge-0150").is_some());
    assert_eq!(condition(&status, "ClusterProgress/edge-0150"), None);
    let clusters = status.clusters.iter().map(|cluster| cluster.name.clone());
    assert_eq!(clusters.collect::<BTreeSet<_>>(), worst);
    let summary = status.summary.unwrap();
    let counts = (summary.clusters, summary.ready, summary.error);
    assert_eq!(counts, (200, 159, 1));
    assert_eq!((summary.not_ready, summary.unknown), (40, 0));

    let status = decide_first(&mut acme, &all_installed(200));
    assert_eq!(listed_members(&status), BTreeSet::new());
    assert_message(&status, "200 of 200 clusters ready");
    assert_eq!(condition(&status, "Ready").unwrap().0, "True");
}

#[test]
fn member_count_at_threshold_switches_form_once() {
    let (mut acme, mut memory) = (tenant(), DecisionMemory::default());
    let mut forms = Vec::new();
    for count in [49, 50, 51, 50, 51, 50, 49, 41, 51, 41, 40, 41, 50, 51] {
        // None of them departs: the members of the next step are different ones, or the first of these.
        if let Some(status) = acme.status.as_mut().filter(|it| it.summary.is_none()) {
            status.conditions.clear();
        }
        let view = complete_view(&all_installed(count));
        let status = decide_next(&mut acme, &view, &mut memory, false);
        let is_summary = status.summary.is_some();
        let listed = if is_summary { 0 } else { count };
        assert_eq!(listed_members(&status).len(), listed);
        forms.push(is_summary);
    }
    let expected = [
        false, false, true, true, true, true, true, true, true, true, false, false, false, true,
    ];
    assert_eq!(forms, expected);
}

#[test]
fn unreported_members_stay_unknown_after_hub_restart() {
    let (mut acme, mut memory) = (tenant(), DecisionMemory::default());
    let all = all_installed(200);
    let before = decide_next(&mut acme, &complete_view(&all), &mut memory, false);
    // 50 of 250 members never had the Tenant, and 10 others do not report.
    let (mut memory, fleet) = (DecisionMemory::default(), all_installed(250));
    let view_of = |reported: usize, others_without: usize| ReportedView {
        members: complete_view(&all_installed(reported)).members,
        others_without,
        targets: complete_view(&fleet).targets,
    };
    for view in [ReportedView::default(), view_of(0, 0), view_of(100, 10)] {
        assert_eq!(decide_next(&mut acme, &view, &mut memory, true), before);
    }
    let status = decide_next(&mut acme, &view_of(190, 50), &mut memory, false);
    let message =
        "190 of 200 clusters ready (10 unknown); 10 without a report since the hub started";
    assert_message(&status, message);
    assert_eq!(condition(&status, "Ready").unwrap().0, "Unknown");
    assert_eq!(status.summary.unwrap().clusters, 200);
    // One of them leaves the fleet, and the rest report.
    let mut left = view_of(199, 50);
    let mut targets = Targets::clone(left.targets.as_ref().unwrap());
    targets.remove(&name(199));
    left.targets = Some(Arc::new(targets));
    let status = decide_next(&mut acme, &left, &mut memory, false);
    assert_message(&status, "199 of 199 clusters ready");
    // A silent member that never had the Tenant does not affect it once all members have reported.
    let status = decide_next(&mut acme, &view_of(198, 49), &mut memory, false);
    assert_message(&status, "198 of 198 clusters ready");
}

#[test]
fn summary_stays_while_unnamed_members_are_unknown() {
    let mut acme = tenant();
    decide_first(&mut acme, &all_installed(60));
    let mut memory = DecisionMemory::default();
    let few = ReportedView {
        members: complete_view(&all_installed(5)).members,
        others_without: 20,
        targets: complete_view(&all_installed(60)).targets,
    };
    let status = decide_next(&mut acme, &few, &mut memory, false);
    assert_eq!(status.summary.unwrap().unknown, 35);
    let few = ReportedView {
        others_without: 55,
        ..few
    };
    let status = decide_next(&mut acme, &few, &mut memory, false);
    assert_eq!(status.summary, None);
    assert_eq!(listed_members(&status).len(), 5);
}

fn any_report() -> impl Strategy<Value = TenantReport> {
    let truth = || prop_oneof![Just(Truth::True), Just(Truth::False), Just(Truth::Unknown)];
    // JSON escapes the second one with two bytes.
    let text = prop_oneof![Just("m"), Just("\""), Just("ü ")];
    let all = (truth(), truth(), truth(), any::<bool>(), text);
    all.prop_map(|(ready, progress, error, odd, text)| {
        let message = text.repeat(2 * MESSAGE_MAX);
        let reason = if odd {
            "R".repeat(MESSAGE_MAX)
        } else {
            "R".repeat(100)
        };
        let state = |truth| State::new(truth, reason.clone(), message.clone());
        let state = ClusterState {
            ready: state(ready),
            progress: Some(state(progress)),
            error: Some(state(error)),
        };
        TenantReport {
            applied_chart: "c".repeat(MESSAGE_MAX),
            ..TenantReport::new(1, state)
        }
        .trimmed()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn longest_messages_keep_status_below_etcd_limit(
        kinds in proptest::collection::vec(any_report(), 8),
        counts in proptest::collection::vec(
            prop_oneof![Just(1_usize), Just(25), Just(26), Just(40), Just(50), Just(51), Just(200), Just(5000), 1..60_usize],
            1..4,
        ),
        seed in any::<usize>(),
    ) {
        let (mut acme, mut memory) = (tenant(), DecisionMemory::default());
        for (round, count) in counts.into_iter().enumerate() {
            let members: BTreeMap<String, TenantReport> = (0..count)
                .map(|number| {
                    let kind = (number.wrapping_mul(7) ^ seed.wrapping_add(round)) % kinds.len();
                    (format!("{:a>63}", name(number)), kinds[kind].clone())
                })
                .collect();
            let status = decide_next(&mut acme, &complete_view(&members), &mut memory, false);
            let size = size(&acme);
            prop_assert!(size < LIMIT, "{} members: {} bytes", count, size);
            let listed_members = listed_members(&status);
            prop_assert!(listed_members.len() <= 50, "{}", listed_members.len());
            let clusters = status.clusters.iter().map(|cluster| cluster.name.clone());
            prop_assert!(clusters.eq(listed_members.iter().cloned()));
            if let Some(summary) = status.summary {
                prop_assert_eq!(summary.clusters as usize, count);
                let parts = summary.ready + summary.error + summary.not_ready + summary.unknown;
                prop_assert_eq!(parts as usize, count);
            } else {
                prop_assert!(count <= 50 && members.keys().all(|name| listed_members.contains(name)));
            }
            // The phase matches the listed conditions.
            let shown = conditions::clusters(&status.conditions);
            let error = |state: &ClusterState| state.error.as_ref().is_some_and(|error| error.truth == Truth::True);
            prop_assert_eq!(status.phase.as_deref() == Some("Error"), shown.values().any(error));
            let again = decide_next(&mut acme, &complete_view(&members), &mut memory, false);
            prop_assert!(again == status, "{} members: it is not the same again", count);
        }
    }
}
