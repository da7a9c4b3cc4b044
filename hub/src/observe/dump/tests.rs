//! Tests the dump with a made-up fleet.

use std::time::Duration;

use krypton_crds::edge_cluster::Mode;
use krypton_helm::driver::Load;
use krypton_helm::slots::priority::Priority;
use krypton_types::conditions::{State, Truth};
use krypton_types::desired::{ChartState, DesiredState, Version};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::*;
use crate::leader::Leader;
use crate::members::member::{Admission, PublishedState};
use crate::observe::member_metrics::HomeState;

const HIDDEN: &str = "hidden";

fn empty() -> Dump {
    Dump {
        version: "1.2.3",
        replica: Some("krypton-hub-0".to_owned()),
        started: Timestamp::UNIX_EPOCH,
        now: Timestamp::UNIX_EPOCH,
        leader: None,
        chart: None,
        ca: Some(CaDump::new(&authority())),
        helm: HelmDump::new(
            Load {
                total: 4,
                per_member: 3,
                running: [("edge-1".to_owned(), 2)].into(),
                waiting: vec![(
                    "edge-2".to_owned(),
                    Priority::High,
                    BootTime(Duration::from_secs(30)),
                )],
            },
            BootTime(Duration::from_secs(100)),
        ),
        charts: Vec::new(),
        waiting: WorkMetrics::default().waiting().into(),
        members: BTreeMap::new(),
    }
}

fn authority() -> Authority {
    Authority::generate("fleet", Timestamp::now()).unwrap()
}

fn chart() -> ChartState {
    ChartState {
        repo: format!("https://user:{HIDDEN}@charts.example.org/stable"),
        name: "small".to_owned(),
        version: "1.0.0".to_owned(),
        values: [("password".to_owned(), Value::from(HIDDEN))]
            .into_iter()
            .collect(),
        ..ChartState::default()
    }
}

fn fleet() -> FleetView {
    let view = FleetView::default();
    view.members.observe("edge-1", |observation| {
        observation.mode = Mode::Agent;
        observation.connected = State::new(Truth::True, "Connected", HIDDEN);
        observation.healthy = State::new(Truth::True, "Reconciling", HIDDEN);
        observation.resolved = State::new(Truth::True, "ByAgent", HIDDEN);
        observation.uid = Some("uid-of-the-cluster".to_owned());
        observation.holder = Some("agent/krypton-agent-0/1".to_owned());
        observation.agent_version = Some("0.1.0".to_owned());
        observation.certificate = Some(Validity::until(
            Timestamp::from_second(1_800_000_000).unwrap(),
        ));
        let version = Version {
            epoch: 2,
            generation: 6,
        };
        observation.applied = Some((version, "sha".to_owned()));
    });
    view.members.observe("edge-2", |observation| {
        observation.values =
            MemberValuesState::Reported(State::new(Truth::False, "ValuesMissing", HIDDEN));
    });
    let member = view.members.get_or_create("edge-1", "uid-of-the-object");
    member.admission.send_replace(Admission {
        refused: Some(HIDDEN.to_owned()),
        ..Admission::default()
    });
    drop(member.begin_session("krypton-agent-0", 17));
    let desired = DesiredState {
        version: Version {
            epoch: 2,
            generation: 7,
        },
        chart: chart(),
        paused: true,
        ..DesiredState::default()
    };
    let message = krypton_proto::v1::Desired {
        digest: "newer".to_owned(),
        ..(&desired).into()
    };
    member.published.send_replace(Some(PublishedState {
        desired: Arc::new(desired),
        message: Arc::new(message),
        since: BootTime(Duration::from_secs(60)),
    }));
    let fleet_chart = FleetChart {
        epoch: 2,
        chart: Some(Arc::new(chart())),
        problem: None,
    };
    view.set_home_state(HomeState {
        leader: Leader::always_leading(),
        chart: watch::channel(fleet_chart).1,
        allow_chart_skip: false,
    });
    view
}

fn dump_json(view: &FleetView, only: Option<&str>) -> Value {
    let dump = with_fleet(empty(), view, only, BootTime(Duration::from_secs(100)));
    serde_json::to_value(dump).unwrap()
}

#[test]
fn fleet_dump_is_complete_and_hides_secrets() {
    let mut dump = dump_json(&fleet(), None);
    assert!(!dump.to_string().contains(HIDDEN), "{dump}");
    dump["leader"]["acquired"] = Value::Null;
    let roots = dump["ca"]["roots"].take();
    assert_eq!(roots.as_array().unwrap().len(), 1);
    let starting = json!({ "status": "Unknown", "reason": "Starting" });
    assert_eq!(
        dump,
        json!({
            "version": "1.2.3",
            "replica": "krypton-hub-0",
            "started": "1970-01-01T00:00:00Z",
            "now": "1970-01-01T00:00:00Z",
            "leader": { "state": "leading", "holder": null, "epoch": 1, "acquired": null },
            "chart": {
                "epoch": 2, "repo": "https://charts.example.org/stable", "name": "small", "version": "1.0.0",
                "problem": null,
            },
            "ca": { "phase": "Steady", "roots": null },
            "charts": [],
            "waiting": { "calls": 0, "lists": 0, "runs": 0, "urgent": 0 },
            "helm": {
                "limit": 4, "limitPerMember": 3, "running": { "edge-1": 2 },
                "waiting": [{ "member": "edge-2", "priority": "high", "forSeconds": 70 }],
            },
            "members": {
                "edge-1": {
                    "mode": "agent",
                    "conditions": {
                        "Connected": { "status": "True", "reason": "Connected" },
                        "Healthy": { "status": "True", "reason": "Reconciling" },
                        "TargetClusterResolved": { "status": "True", "reason": "ByAgent" },
                    },
                    "clusterUid": "uid-of-the-cluster",
                    "kubernetesVersion": null,
                    "agentVersion": "0.1.0",
                    "leaseHolder": "agent/krypton-agent-0/1",
                    "certificateExpiry": "2027-01-15T08:00:00Z",
                    "accessExpiry": null,
                    "applied": { "version": "2.6", "digest": "sha" },
                    "tenants": { "total": 0, "ready": 0, "pending": 0, "error": 0 },
                    "snapshot": {
                        "edgeClusterUid": "uid-of-the-object",
                        "desired": { "version": "2.7", "digest": "newer" },
                        "desiredForSeconds": 40,
                        "paused": true, "decommission": false, "deployments": 0, "placed": 0, "refused": true,
                        "sessions": { "krypton-agent-0": 17 },
                    },
                },
                "edge-2": {
                    "mode": "none",
                    "conditions": {
                        "Connected": starting,
                        "Healthy": starting,
                        "TargetClusterResolved": starting,
                        "ValuesResolved": { "status": "False", "reason": "ValuesMissing" },
                    },
                    "clusterUid": null, "kubernetesVersion": null, "agentVersion": null, "leaseHolder": null,
                    "certificateExpiry": null, "accessExpiry": null, "applied": null,
                    "tenants": { "total": 0, "ready": 0, "pending": 0, "error": 0 },
                    "snapshot": null,
                },
            },
        })
    );
}

#[test]
fn dump_filters_by_member_and_starts_empty() {
    let one = dump_json(&fleet(), Some("edge-2"));
    let members = one["members"].as_object().unwrap();
    assert_eq!(members.keys().collect::<Vec<_>>(), ["edge-2"]);
    let none = dump_json(&FleetView::default(), None);
    assert_eq!(
        (&none["leader"], &none["members"]),
        (&Value::Null, &json!({}))
    );
}

#[test]
fn a_thousand_members_are_less_than_two_mebibytes() {
    let view = fleet();
    let observation = view.members.observation("edge-1").unwrap();
    for number in 0..1000 {
        view.members
            .observe(&format!("edge-{number:04}"), |stored| {
                *stored = observation.clone()
            });
    }
    let text = serde_json::to_string(&with_fleet(empty(), &view, None, BootTime::now())).unwrap();
    assert!(text.len() < 2 << 20, "{}", text.len());
}
