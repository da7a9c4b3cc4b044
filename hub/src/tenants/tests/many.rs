//! Tenants on more members than one object can list.

use std::collections::BTreeSet;

use krypton_types::conditions::MESSAGE_MAX;
use proptest::prelude::*;

use super::*;

/// Bytes that managedFields use for one condition, in addition to its type.
const MANAGED: usize = 200;
const LIMIT: usize = 256 * 1024;

fn name(number: usize) -> String {
    format!("edge-{number:04}")
}

pub(crate) fn of(reports: &BTreeMap<String, TenantReport>) -> Heard {
    let said = reports.iter().map(|(name, report)| {
        let saying = saying(Hearing::Full, Some(report.clone()));
        (Arc::from(name.as_str()), saying)
    });
    let targets = reports.keys().map(|name| (name.clone(), Target::default()));
    Heard {
        said: said.collect(),
        strangers: 0,
        targets: Some(Arc::new(targets.collect())),
    }
}

fn well(count: usize) -> BTreeMap<String, TenantReport> {
    let each = (0..count).map(|number| (name(number), report(Truth::True, reason::INSTALLED)));
    each.collect()
}

fn edges_only() -> Rules {
    Rules {
        self_cluster: false,
        ..rules()
    }
}

fn step(tenant: &mut Tenant, heard: &Heard, memory: &mut Memory, patient: bool) -> TenantStatus {
    let now = Now {
        boot: BootTime::default(),
        wall: Timestamp::UNIX_EPOCH,
        patient,
    };
    let decision = decide(tenant, heard, &edges_only(), memory, now);
    *memory = decision.memory;
    tenant.status = Some(decision.status.clone());
    decision.status
}

fn listed(status: &TenantStatus) -> BTreeSet<String> {
    conditions::clusters(&status.conditions)
        .into_keys()
        .collect()
}

fn size(tenant: &Tenant) -> usize {
    let conditions = &tenant.status.as_ref().unwrap().conditions;
    let managed = conditions.iter().map(|found| MANAGED + found.type_.len());
    serde_json::to_vec(tenant).unwrap().len() + managed.sum::<usize>()
}

#[test]
fn status_lists_worst_members_and_counts_all() {
    let mut reports = well(200);
    for number in 100..140 {
        let said = reports.get_mut(&name(number)).unwrap();
        said.state.ready = State::new(Truth::False, reason::INSTALLING, "on its way");
    }
    let failed = reports.get_mut(&name(150)).unwrap();
    failed.state.error = Some(State::new(Truth::True, reason::INSTALL_FAILED, "no room"));
    failed.state.progress = Some(State::new(Truth::False, reason::INSTALL_COMPLETE, ""));
    let mut acme = tenant();
    let status = step(&mut acme, &of(&reports), &mut Memory::default(), false);
    let message =
        "159 of 200 clusters ready (1 in error, 40 not ready); edge-0150: InstallFailed: no room";
    assert_eq!(status.last_message.as_deref(), Some(message));
    assert_eq!(status.phase.as_deref(), Some("Error"));
    let worst: BTreeSet<String> = (100..119).chain([150]).map(name).collect();
    assert_eq!(listed(&status), worst);
    assert!(ready(&status, "ClusterError/edge-0150").is_some());
    assert_eq!(ready(&status, "ClusterProgress/edge-0150"), None);
    let summary = status.summary.unwrap();
    assert_eq!(
        (summary.clusters, summary.ready, summary.error),
        (200, 159, 1)
    );
    assert_eq!((summary.not_ready, summary.unknown), (40, 0));

    let status = step(&mut acme, &of(&well(200)), &mut Memory::default(), false);
    assert_eq!(listed(&status), BTreeSet::new());
    assert_eq!(
        status.last_message.as_deref(),
        Some("200 of 200 clusters ready")
    );
    assert_eq!(ready(&status, "Ready").unwrap().0, "True");
}

#[test]
fn member_count_at_threshold_switches_form_once() {
    let (mut acme, mut memory) = (tenant(), Memory::default());
    let mut forms = Vec::new();
    for count in [49, 50, 51, 50, 51, 50, 49, 41, 51, 41, 40, 41, 50, 51] {
        // None of them departs: the members of the next step are different ones, or the first of these.
        if acme
            .status
            .as_ref()
            .is_some_and(|status| status.summary.is_none())
        {
            acme.status.as_mut().unwrap().conditions.clear();
        }
        let status = step(&mut acme, &of(&well(count)), &mut memory, false);
        assert_eq!(
            listed(&status).len(),
            if status.summary.is_some() { 0 } else { count }
        );
        forms.push(status.summary.is_some());
    }
    let expected = [
        false, false, true, true, true, true, true, true, true, true, false, false, false, true,
    ];
    assert_eq!(forms, expected);
}

#[test]
fn unreported_members_stay_unknown_after_hub_restart() {
    let (mut acme, mut memory) = (tenant(), Memory::default());
    let all = well(200);
    let before = step(&mut acme, &of(&all), &mut memory, false);
    // 50 of 250 members never had the Tenant, and 10 others do not report.
    let (mut memory, fleet) = (Memory::default(), well(250));
    let heard = |to: usize, strangers: usize| Heard {
        said: of(&well(to)).said,
        strangers,
        targets: of(&fleet).targets,
    };
    assert_eq!(
        step(&mut acme, &Heard::default(), &mut memory, true),
        before
    );
    assert_eq!(step(&mut acme, &heard(0, 0), &mut memory, true), before);
    assert_eq!(step(&mut acme, &heard(100, 10), &mut memory, true), before);
    let status = step(&mut acme, &heard(190, 50), &mut memory, false);
    let message =
        "190 of 200 clusters ready (10 unknown); 10 without a report since the hub started";
    assert_eq!(status.last_message.as_deref(), Some(message));
    assert_eq!(ready(&status, "Ready").unwrap().0, "Unknown");
    assert_eq!(status.summary.unwrap().clusters, 200);
    // One of them leaves the fleet, and the rest report.
    let mut left = heard(199, 50);
    let mut targets = Targets::clone(left.targets.as_ref().unwrap());
    targets.remove(&name(199));
    left.targets = Some(Arc::new(targets));
    let status = step(&mut acme, &left, &mut memory, false);
    assert_eq!(
        status.last_message.as_deref(),
        Some("199 of 199 clusters ready")
    );
    // A silent member that never had the Tenant does not affect it once all members have reported.
    let status = step(&mut acme, &heard(198, 49), &mut memory, false);
    assert_eq!(
        status.last_message.as_deref(),
        Some("198 of 198 clusters ready")
    );
}

#[test]
fn summary_stays_while_unnamed_members_are_unknown() {
    let mut acme = tenant();
    step(&mut acme, &of(&well(60)), &mut Memory::default(), false);
    let mut memory = Memory::default();
    let few = Heard {
        said: of(&well(5)).said,
        strangers: 20,
        targets: of(&well(60)).targets,
    };
    let status = step(&mut acme, &few, &mut memory, false);
    assert_eq!(status.summary.unwrap().unknown, 35);
    let few = Heard {
        strangers: 55,
        ..few
    };
    let status = step(&mut acme, &few, &mut memory, false);
    assert_eq!(status.summary, None);
    assert_eq!(listed(&status).len(), 5);
}

fn any_report() -> impl Strategy<Value = TenantReport> {
    let truth = || prop_oneof![Just(Truth::True), Just(Truth::False), Just(Truth::Unknown)];
    // JSON escapes the second one with two bytes.
    let text = prop_oneof![Just("m"), Just("\""), Just("ü ")];
    let all = (truth(), truth(), truth(), any::<bool>(), text);
    all.prop_map(|(ready, progress, error, odd, text)| {
        let message = text.repeat(2 * MESSAGE_MAX);
        let why = if odd {
            "R".repeat(MESSAGE_MAX)
        } else {
            "R".repeat(100)
        };
        let state = |truth| State::new(truth, why.clone(), message.clone());
        TenantReport {
            observed_generation: 1,
            applied_chart: "c".repeat(MESSAGE_MAX),
            next: None,
            state: ClusterState {
                ready: state(ready),
                progress: Some(state(progress)),
                error: Some(state(error)),
            },
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
        let (mut acme, mut memory) = (tenant(), Memory::default());
        for (round, count) in counts.into_iter().enumerate() {
            let members: BTreeMap<String, TenantReport> = (0..count)
                .map(|number| {
                    let kind = (number.wrapping_mul(7) ^ seed.wrapping_add(round)) % kinds.len();
                    (format!("{:a>63}", name(number)), kinds[kind].clone())
                })
                .collect();
            let status = step(&mut acme, &of(&members), &mut memory, false);
            let size = size(&acme);
            prop_assert!(size < LIMIT, "{} members: {} bytes", count, size);
            let listed = listed(&status);
            prop_assert!(listed.len() <= 50, "{}", listed.len());
            if let Some(summary) = status.summary {
                prop_assert_eq!(summary.clusters as usize, count);
                let parts = summary.ready + summary.error + summary.not_ready + summary.unknown;
                prop_assert_eq!(parts as usize, count);
            } else {
                prop_assert!(count <= 50 && members.keys().all(|name| listed.contains(name)));
            }
            // The phase matches the listed conditions.
            let shown = conditions::clusters(&status.conditions);
            let error = |state: &ClusterState| state.error.as_ref().is_some_and(|error| error.truth == Truth::True);
            prop_assert_eq!(status.phase.as_deref() == Some("Error"), shown.values().any(error));
            let again = step(&mut acme, &of(&members), &mut memory, false);
            prop_assert!(again == status, "{} members: it is not the same again", count);
        }
    }
}
