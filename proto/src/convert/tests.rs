use krypton_types::deployment::{DesiredDeployment, REPORT_WEIGHT};
use krypton_types::desired::crd_policy::CrdPolicy;
use krypton_types::desired::drift::{DriftMode, DriftPolicy};
use krypton_types::desired::handling::{Handling, Remediation, WaitPolicy};
use krypton_types::desired::lockdown::Lockdown;
use krypton_types::desired::namespaces::NamespaceConfiguration;
use krypton_types::desired::{ChartState, Confidential};
use krypton_types::placed_tenant::{PlacedSpec, PlacedTenant};
use proptest::prelude::*;
use prost::Message as _;
use serde_json::{Value, json};

use super::*;
use crate::{AGENT_MESSAGE_MAX, REPORTS_PER_MESSAGE};

fn desired() -> DesiredState {
    DesiredState {
        version: Version {
            epoch: 3,
            generation: 7,
        },
        chart: ChartState {
            repo: "https://charts.example.org".to_owned(),
            name: "small".to_owned(),
            version: "1.0.0".to_owned(),
            install_crds: true,
            values: [("a".to_owned(), serde_json::json!({"b": [1, null]}))]
                .into_iter()
                .collect(),
            confidential: Some(Confidential {
                salt: "salt".to_owned(),
                paths: vec!["/a/b".to_owned()],
            }),
            pinned: Some("1.0.0@sha256:ab".to_owned()),
        },
        paused: true,
        retire: false,
        drift: DriftPolicy {
            mode: DriftMode::Heal,
            interval_seconds: 60,
        },
        chart_crds: CrdPolicy::CreateReplace,
        tenant_values: true,
        handling: Handling {
            wait: WaitPolicy::Hooks,
            delete_cert_manager_crds: true,
            allow_chart_skip: true,
            retries: Some(3),
            remediation: Remediation::Rollback,
            history_max: 10,
        },
        lockdown: Lockdown {
            no_cross_namespace_refs: true,
            default_service_account: "helm".to_owned(),
        },
        namespaces: NamespaceConfiguration {
            labels: [("team".to_owned(), "a".to_owned())].into(),
            annotations: [("example.org/note".to_owned(), "a, b".to_owned())].into(),
        },
        deployments: vec![DesiredDeployment {
            namespace: "accounts".to_owned(),
            name: "acme".to_owned(),
            uid: "uid-1".to_owned(),
            generation: 4,
            created: 1_800_000_000,
            remove: true,
            orphan: true,
            paused: true,
            requested: Some("now".to_owned()),
            drift: Some(DriftPolicy {
                mode: DriftMode::Warn,
                interval_seconds: 5,
            }),
            annotations: [("a".to_owned(), "b".to_owned())].into(),
        }],
        placed: vec![PlacedTenant {
            namespace: "tenants".to_owned(),
            name: "acme".to_owned(),
            uid: "uid-2".to_owned(),
            generation: 5,
            spec: PlacedSpec {
                workspace: Some("acme-ws".to_owned()),
                values: serde_json::from_str(r#"{"a":[1,null]}"#).unwrap(),
                service_account_name: Some("helm".to_owned()),
            },
            remove: true,
            adopt: true,
            paused: true,
            requested: Some("now".to_owned()),
            former_uids: vec!["uid-0".to_owned()],
        }],
    }
}

/// Reads `original` after a change to its JSON, which leaves the digest as it was.
fn with_changed_state(
    original: &DesiredState,
    change: impl FnOnce(&mut Value),
) -> Result<DesiredState, WireError> {
    let mut wire = v1::Desired::from(original);
    let mut state = serde_json::from_slice(&wire.state).unwrap();
    change(&mut state);
    wire.state = state.to_string().into();
    wire.try_into()
}

#[test]
fn a_desired_state_arrives_as_it_was_sent() {
    let retire = DesiredState {
        retire: true,
        ..desired()
    };
    for original in [desired(), retire, DesiredState::default()] {
        let wire = v1::Desired::from(&original);
        assert_eq!(DesiredState::try_from(wire).unwrap(), original);
    }
}

#[test]
fn desired_state_without_some_field_is_rejected() {
    let original = DesiredState {
        retire: true,
        ..desired()
    };
    // The receiver does not know the field.
    for field in [
        "/retire",
        "/drift",
        "/tenantValues",
        "/allowChartSkip",
        "/retries",
        "/remediation",
        "/historyMax",
        "/lockdown",
        "/namespaceConfiguration",
        "/chart/confidential",
        "/deployments",
        "/deployments/0/remove",
        "/placed",
        "/placed/0/adopt",
        "/placed/0/spec/values",
    ] {
        let result = with_changed_state(&original, |state| {
            let (parent, name) = field.rsplit_once('/').unwrap();
            let parent = state.pointer_mut(parent).unwrap();
            let removed = parent.as_object_mut().unwrap().remove(name);
            assert!(removed.is_some(), "{field}");
        });
        assert!(
            matches!(result, Err(WireError::Digest)),
            "{field}: {result:?}"
        );
    }
    let unknown = with_changed_state(&original, |state| state["future"] = true.into());
    assert_eq!(unknown.unwrap(), original, "the digest does not cover it");
}

#[test]
fn invalid_names_and_types_are_rejected() {
    type Matches = fn(&WireError) -> bool;
    let key: Matches = |error| matches!(error, WireError::Key(_));
    let name: Matches = |error| matches!(error, WireError::Name(_));
    let uid: Matches = |error| matches!(error, WireError::Uid(_));
    let state: Matches = |error| matches!(error, WireError::State { .. });
    let reserved = json!({"mesh.openkcm.io/created-for": "a"});
    for (field, value, expected) in [
        ("/deployments/0/uid", json!(""), uid),
        ("/deployments/0/name", json!("a".repeat(254)), key),
        ("/deployments/0/namespace", json!(""), key),
        ("/placed/0/uid", json!("a".repeat(64)), uid),
        ("/placed/0/namespace", json!("../a"), name),
        ("/placed/0/name", json!(""), name),
        ("/placed/0/spec/values", json!([]), state),
        ("/namespaceConfiguration/labels", reserved, name),
        ("/drift/mode", json!("mend"), state),
        ("/remediation", json!("undo"), state),
        ("/chart", json!(null), state),
        ("/chart/values", json!([]), state),
    ] {
        let read = with_changed_state(&desired(), |state| {
            *state.pointer_mut(field).unwrap() = value;
        });
        assert!(expected(&read.unwrap_err()), "{field}");
    }
}

#[test]
fn parse_error_does_not_contain_secrets() {
    let error =
        with_changed_state(&desired(), |state| state["paused"] = "hunter2".into()).unwrap_err();
    assert!(!krypton_types::error_chain::chain(&error).contains("hunter2"));
}

#[test]
fn root_digests_round_trip_and_malformed_are_rejected() {
    let all = RootDigest::from_ders(&[b"a", b"b"]);
    let message = v1::TrustedRoots::new(&all);
    assert_eq!(message.read().unwrap(), all);
    let mut cut = message.clone();
    cut.sha256[1].truncate(31);
    assert!(matches!(cut.read(), Err(WireError::Name(_))));
    let many = v1::TrustedRoots {
        sha256: vec![message.sha256[0].clone(); ROOTS_MAX + 1],
    };
    assert!(matches!(many.read(), Err(WireError::Unexpected(_))));
}

#[test]
fn old_agent_ignores_unknown_hub_message() {
    use prost::Message as _;
    let roots = v1::Roots {
        certificates: vec![vec![1, 2].into()],
        renew_within_millis: Some(1),
    };
    // Simulate an unknown kind of message: the same content under another field number.
    let mut wire = v1::HubMessage {
        kind: Some(v1::hub_message::Kind::Roots(roots)),
    }
    .encode_to_vec();
    wire[0] = (14 << 3) | 2;
    let read = v1::HubMessage::decode(wire.as_slice()).unwrap();
    assert_eq!(read.kind, None);
}

#[test]
fn trimmed_report_has_same_digest_on_both_sides() {
    let key = TenantKey::new("n", "t");
    let long = State::new(Truth::False, "InstallFailed", "ä".repeat(2000));
    let state = ClusterState {
        ready: long.clone(),
        progress: None,
        error: Some(long),
    };
    let report = TenantReport::new(1, state).trimmed();
    let (_, received) = v1::Tenant::new(&key, Some(&report)).read().unwrap();
    let part = |report| krypton_types::report_digest::part(&key, report);
    assert_eq!(part(&report), part(&received.unwrap()));
}

#[test]
fn invalid_or_too_many_labels_are_dropped() {
    let key = TenantKey::new("n", "t");
    let report = TenantReport::new(1, State::new(Truth::True, "Installed", ""));
    let read = |labels: &[(&str, String)]| {
        let mut message = v1::Tenant::new(&key, Some(&report));
        let labels = labels.iter();
        message.state.as_mut().unwrap().labels = labels
            .map(|(key, value)| ((*key).to_owned(), value.clone()))
            .collect();
        message.read().unwrap().1.unwrap().labels
    };
    let (team, value) = (|| ("team", "a".to_owned()), "v".repeat(63));
    assert_eq!(read(&[team()]).to_map()["team"], "a");
    assert!(read(&[team(), ("a=b", String::new())]).is_empty());
    let keys: Vec<String> = (0..100).map(|number| format!("k{number}")).collect();
    let many: Vec<_> = keys.iter().map(|key| (&**key, value.clone())).collect();
    assert!(read(&many).is_empty());
}

/// Largest number in a status.
const STATUS_MAX: u64 = i64::MAX.unsigned_abs();

#[test]
fn applied_numbers_beyond_status_are_dropped() {
    let read = |epoch, generation| {
        let version = Version { epoch, generation };
        v1::Applied::new(version, String::new()).read()
    };
    assert!(read(STATUS_MAX, STATUS_MAX).is_some());
    assert_eq!(read(STATUS_MAX + 1, 1), None);
    assert_eq!(read(1, u64::MAX), None);
}

fn state() -> impl Strategy<Value = State> {
    let truth = prop_oneof![Just(Truth::True), Just(Truth::False), Just(Truth::Unknown)];
    (truth, "[A-Z][a-z]{0,9}", ".{0,40}")
        .prop_map(|(truth, reason, message)| State::new(truth, reason, message))
}

fn revision() -> impl Strategy<Value = ReportedRevision> {
    let label = || proptest::option::of("[a-z]{0,99}");
    let chart = proptest::option::of((".{0,200}", ".{0,9}", proptest::bool::ANY));
    let created = proptest::option::of(proptest::num::i64::ANY);
    let mark = proptest::option::of(0..9_u32);
    (0..20_u32, created, label(), label(), label(), mark, chart).prop_map(
        |(revision, created, fingerprint, owner_uid, run, rolled_back_by, chart)| {
            ReportedRevision {
                revision,
                created,
                status: "deployed".to_owned(),
                fingerprint,
                owner_uid,
                run,
                rolled_back_by,
                chart: chart.map(|(name, version, is_read)| ReportedChart {
                    name,
                    version,
                    is_read,
                }),
            }
        },
    )
}

#[test]
fn largest_report_of_deployments_fits_message() {
    let long = || "x".repeat(4096);
    let state = || State::new(Truth::False, long(), long());
    let revision = |revision| ReportedRevision {
        revision,
        created: Some(i64::MAX),
        status: long(),
        fingerprint: Some(long()),
        owner_uid: Some(long()),
        run: Some(long()),
        rolled_back_by: Some(u32::MAX),
        chart: Some(ReportedChart {
            name: long(),
            version: long(),
            is_read: true,
        }),
    };
    let newest = (u32::MAX - 19..=u32::MAX).map(revision);
    let event = || ReportedEvent {
        at: u64::MAX,
        reason: long(),
        message: long(),
    };
    let report = DeploymentReport {
        uid: "u".repeat(LABEL_MAX),
        observed_generation: i64::MAX,
        gone: true,
        applied_chart: long(),
        state: ClusterState {
            ready: state(),
            progress: Some(state()),
            error: Some(state()),
        },
        next: UpcomingStep::at_second(
            UpcomingStepKind::GivenUp,
            Some(i64::from(u32::MAX)),
            u32::MAX,
        ),
        handled_request: Some(long()),
        events: (0..9).map(|_| event()).collect(),
        revisions: Some(Arc::new(ReportedRevisions::new(
            AGENT_MANAGER,
            newest.collect(),
        ))),
    };
    let key = DeploymentKey {
        namespace: "n".repeat(LABEL_MAX),
        name: "d".repeat(SUBDOMAIN_MAX),
    };
    let deployment = v1::Deployment::new(&key, Some(&report.trimmed()));
    let report = v1::Report {
        deployments: vec![deployment; REPORTS_PER_MESSAGE / REPORT_WEIGHT],
        ..v1::Report::default()
    };
    let kind = Some(v1::agent_message::Kind::Report(report));
    let size = v1::AgentMessage { kind }.encoded_len();
    assert!(size < AGENT_MESSAGE_MAX, "{size}");
}

proptest! {
    #[test]
    fn a_report_arrives_as_it_was_sent(
        generation: i64, applied_chart in ".{0,40}", ready in state(),
        progress in proptest::option::of(state()), error in proptest::option::of(state()),
        next in proptest::option::of((0..4_usize, proptest::option::of(0..4_000_000_000_i64), 0..9_u32)),
        handled_request in proptest::option::of(".{0,40}"),
        labels in proptest::collection::btree_map("[a-z]{1,9}", "[a-z]{0,9}", 0..9),
    ) {
        let labels = Labels::new(&labels);
        let next = next.and_then(|(step, at, attempts)| UpcomingStep::at_second(UpcomingStepKind::ALL[step], at, attempts));
        let key = TenantKey { namespace: "n".to_owned(), name: "t".to_owned() };
        let state = ClusterState { ready, progress, error };
        let report = TenantReport {
            observed_generation: generation, applied_chart, state, labels, next, handled_request, history: None,
        };
        let (read_key, read) = v1::Tenant::new(&key, Some(&report)).read().unwrap();
        prop_assert_eq!(read_key, key);
        prop_assert_eq!(read, Some(report));
    }

    #[test]
    fn deployment_report_round_trips_unchanged(
        observed_generation: i64, gone: bool, applied_chart in ".{0,40}", ready in state(),
        error in proptest::option::of(state()), handled_request in proptest::option::of(".{0,40}"),
        next in proptest::option::of(0..UpcomingStepKind::ALL.len()),
        revisions in proptest::option::of(proptest::collection::vec(revision(), 0..14)),
    ) {
        let revisions = revisions.map(|all| Arc::new(ReportedRevisions::new(AGENT_MANAGER, all)));
        let next = next.map(|step| UpcomingStep::new(UpcomingStepKind::ALL[step], None, 3));
        let key = DeploymentKey { namespace: "n".to_owned(), name: "d".to_owned() };
        let report = DeploymentReport {
            uid: "uid-1".to_owned(), observed_generation, gone, applied_chart,
            state: ClusterState { ready, progress: None, error }, next, handled_request,
            events: vec![ReportedEvent { at: 1, reason: "DriftHealed".to_owned(), message: "put right".to_owned() }],
            revisions,
        };
        let (read_key, read) = v1::Deployment::new(&key, Some(&report)).read().unwrap();
        prop_assert_eq!(read_key, key);
        prop_assert_eq!(read, Some(report));
    }

    #[test]
    fn placed_tenant_report_round_trips_unchanged(
        observed_generation: i64, gone: bool, state in state(),
    ) {
        let key = TenantKey { namespace: "n".to_owned(), name: "t".to_owned() };
        let uid = "uid-1".to_owned();
        let report = PlacedReport { uid, observed_generation, gone, state };
        let (read_key, read) = v1::Placed::new(&key, Some(&report)).read().unwrap();
        prop_assert_eq!(read_key, key);
        prop_assert_eq!(read, Some(report));
    }

    #[test]
    fn a_member_report_arrives_as_it_was_sent(
        flags: [bool; 4], holder in proptest::option::of("[a-z]{1,20}"),
        version in proptest::option::of((0..=STATUS_MAX, 0..=STATUS_MAX)),
    ) {
        let version = version.map(|(epoch, generation)| Version { epoch, generation });
        let [synced, ready, writing, connected] = flags;
        let report = MemberReport {
            synced, ready, writing, connected,
            problem: holder.clone(), not_restored: holder.clone(), holder,
            applied: version.map(|version| (version, "digest".to_owned())),
            ahead: version,
        };
        prop_assert_eq!(MemberReport::from(v1::MemberReport::from(report.clone())), report);
    }
}
