//! Verifies that recorded messages of other agent and hub versions stay readable.
//!
//! `golden/` contains streams of length-prefixed messages, as on the wire of a session. Some are from released
//! versions. Others imitate a later version, with unknown fields in every message and messages of an unknown kind.
//! Recordings are final: a test records a missing file and fails, and never overwrites an existing one. If a version
//! adds to the protocol, record a new pair of streams and keep the old ones.
//!
//! Decoding drops unknown fields. This is safe because hub and agent never forward the messages of a peer. They convert
//! them to internal types and build new messages. Unknown fields must not cause errors. The digest prevents a member
//! from acting on a partly understood desired state.

#![allow(
    clippy::unwrap_used,
    reason = "this file is tests only, its helping functions included"
)]

use std::path::PathBuf;

use krypton_proto::WireError;
use krypton_proto::v1::{
    AgentMessage, Applied, Chart, Condition, Deployment, DeploymentState, Desired, Drain,
    Heartbeat, Hello, HubMessage, Member, Next, Placed, PlacedState, Report, Resync, Tenant,
    TenantState, Truth, Version, Welcome, agent_message::Kind as Said, hub_message::Kind as Say,
};
use krypton_types::conditions::Truth as Word;
use krypton_types::deployment::DesiredDeployment;
use krypton_types::desired::drift::{DriftMode, DriftPolicy};
use krypton_types::desired::{ChartState, DesiredState, Version as DomainVersion};
use krypton_types::placed_tenant::{PlacedSpec, PlacedTenant};
use krypton_types::tenant::{Next as Coming, Step};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};

/// First number of the fields that only later versions know.
const FUTURE: u32 = 1000;

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden"))
}

/// Returns the recorded bytes. If the file is missing, records `now` and fails.
fn recorded(name: &str, now: &[u8]) -> Vec<u8> {
    let path = folder().join(name);
    if !path.exists() {
        std::fs::write(&path, now).unwrap();
        panic!("{name} was missing and has been recorded: check it in, and never change it");
    }
    std::fs::read(path).unwrap()
}

/// Concatenates messages, each after its length.
fn stream(messages: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for message in messages {
        encode_varint(message.len() as u64, &mut bytes);
        bytes.extend_from_slice(message);
    }
    bytes
}

fn read<M: Message + Default>(mut bytes: &[u8]) -> Vec<M> {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        messages.push(M::decode_length_delimited(&mut bytes).unwrap());
    }
    messages
}

/// Encodes a field that contains a message.
fn field(number: u32, content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_key(number, WireType::LengthDelimited, &mut bytes);
    encode_varint(content.len() as u64, &mut bytes);
    bytes.extend_from_slice(content);
    bytes
}

/// Appends unknown fields of every type that a later version may add.
fn of_the_future(mut bytes: Vec<u8>) -> Vec<u8> {
    encode_key(FUTURE, WireType::Varint, &mut bytes);
    encode_varint(u64::MAX, &mut bytes);
    encode_key(FUTURE + 1, WireType::SixtyFourBit, &mut bytes);
    bytes.extend_from_slice(&[1; 8]);
    encode_key(FUTURE + 2, WireType::ThirtyTwoBit, &mut bytes);
    bytes.extend_from_slice(&[2; 4]);
    bytes.extend_from_slice(&field(FUTURE + 3, b"\xff no text, no message"));
    bytes
}

fn version() -> Option<Version> {
    let (epoch, generation) = (3, 14);
    Some(Version { epoch, generation })
}

fn hello(agent_version: &str, protocol_max: u32) -> Hello {
    Hello {
        trusts: None,
        protocol_min: 1,
        protocol_max,
        agent_version: agent_version.to_owned(),
        replica: "krypton-agent-0".to_owned(),
        cluster_uid: "6f1f2f3c-0000-4000-8000-0123456789ab".to_owned(),
        kubernetes_version: "v1.36.3".to_owned(),
        applied: Some(applied()),
        now: 1_800_000_000,
    }
}

fn applied() -> Applied {
    Applied {
        version: version(),
        digest: "d".repeat(64),
    }
}

fn condition(truth: i32) -> Condition {
    Condition {
        truth,
        reason: "Installed".to_owned(),
        message: "all well".to_owned(),
    }
}

fn tenant(truth: i32) -> Tenant {
    Tenant {
        namespace: "default".to_owned(),
        name: "acme".to_owned(),
        state: Some(TenantState {
            observed_generation: 2,
            applied_chart: "https://charts.example.org/small:1.0.0".to_owned(),
            ready: Some(condition(truth)),
            progress: Some(condition(Truth::False.into())),
            error: None,
            next: None,
        }),
    }
}

fn member() -> Member {
    Member {
        synced: true,
        ready: true,
        writing: true,
        holder: Some("agent/krypton-agent-0".to_owned()),
        connected: true,
        problem: None,
        applied: Some(applied()),
        ahead: None,
        not_restored: None,
    }
}

fn gone() -> Tenant {
    Tenant {
        namespace: "default".to_owned(),
        name: "gone".to_owned(),
        state: None,
    }
}

/// Messages of an agent of version 0.1.
fn agent_says() -> Vec<Said> {
    vec![
        Said::Hello(hello("0.1.0", 1)),
        Said::Report(Report {
            tenants: vec![tenant(Truth::True.into())],
            member: Some(member()),
            complete: Some(0),
            deployments: Vec::new(),
            placed: Vec::new(),
        }),
        Said::Applied(applied()),
        Said::Report(Report {
            tenants: vec![gone()],
            member: None,
            complete: None,
            deployments: Vec::new(),
            placed: Vec::new(),
        }),
        Said::Heartbeat(Heartbeat {
            tenants: 1,
            digest_high: u64::MAX,
            digest_low: 1,
        }),
    ]
}

fn chart() -> ChartState {
    ChartState {
        repo: "https://charts.example.org".to_owned(),
        name: "small".to_owned(),
        version: "1.0.0".to_owned(),
        install_crds: true,
        values: serde_json::from_str(r#"{"replicaCount":0,"a":{"b":[1,null]}}"#).unwrap(),
        confidential: None,
        pinned: None,
    }
}

fn desired_state() -> DesiredState {
    DesiredState {
        version: DomainVersion {
            epoch: 3,
            generation: 14,
        },
        chart: chart(),
        paused: false,
        retire: false,
        drift: krypton_types::desired::drift::DriftPolicy::default(),
        chart_crds: krypton_types::desired::crd_policy::CrdPolicy::default(),
        tenant_values: false,
        handling: krypton_types::desired::handling::Handling::default(),
        lockdown: krypton_types::desired::lockdown::Lockdown::default(),
        namespaces: krypton_types::desired::namespaces::NamespaceConfiguration::default(),
        deployments: Vec::new(),
        placed: Vec::new(),
    }
}

fn orders() -> DesiredState {
    let order = |name: &str, remove: bool| DesiredDeployment {
        namespace: "accounts".to_owned(),
        name: name.to_owned(),
        uid: format!("uid-of-{name}"),
        generation: 2,
        created: 1_800_000_000,
        remove,
        orphan: remove,
        paused: !remove,
        requested: remove.then(|| "2027-01-15".to_owned()),
        drift: (!remove).then_some(DriftPolicy {
            mode: DriftMode::Heal,
            interval_seconds: 60,
        }),
        annotations: [("mesh.openkcm.io/adopt".to_owned(), "true".to_owned())].into(),
    };
    DesiredState {
        deployments: vec![order("acme", false), order("beta", true)],
        ..desired_state()
    }
}

fn deployment() -> Deployment {
    Deployment {
        namespace: "accounts".to_owned(),
        name: "acme".to_owned(),
        state: Some(DeploymentState {
            uid: "uid-of-acme".to_owned(),
            gone: true,
            state: tenant(Truth::True.into()).state,
            deeds: Vec::new(),
        }),
    }
}

/// Protocol addition: members reconcile KryptonDeployments.
#[test]
fn deployment_messages_decode_as_recorded() {
    let report = || {
        Said::Report(Report {
            tenants: vec![tenant(Truth::True.into())],
            deployments: vec![
                deployment(),
                Deployment {
                    state: None,
                    ..deployment()
                },
            ],
            member: None,
            complete: None,
            placed: Vec::new(),
        })
    };
    let now = [agent_message(report())];
    let heard: Vec<AgentMessage> = read(&recorded("agent-deployments.stream", &stream(&now)));
    assert_eq!(heard[0].kind, Some(report()));

    let now = [hub_message(Say::Desired((&orders()).into()))];
    let heard: Vec<HubMessage> = read(&recorded("hub-deployments.stream", &stream(&now)));
    match heard[0].kind.clone() {
        Some(Say::Desired(desired)) => {
            assert_eq!(DesiredState::try_from(desired).unwrap(), orders());
        }
        other => panic!("{other:?}"),
    }
}

/// Protocol addition: labels and annotations of workspaces.
#[test]
fn namespace_configuration_decodes_as_recorded() {
    let pair = |key: &str, value: &str| [(key.to_owned(), value.to_owned())].into();
    let configured = DesiredState {
        namespaces: krypton_types::desired::namespaces::NamespaceConfiguration {
            labels: pair("team", "a"),
            annotations: pair("example.org/note", "a, b"),
        },
        ..desired_state()
    };
    let now = [hub_message(Say::Desired((&configured).into()))];
    let heard: Vec<HubMessage> = read(&recorded("hub-namespaces.stream", &stream(&now)));
    match heard[0].kind.clone() {
        Some(Say::Desired(desired)) => {
            assert_eq!(DesiredState::try_from(desired).unwrap(), configured);
        }
        other => panic!("{other:?}"),
    }
}

fn placements() -> DesiredState {
    let order = |name: &str, remove: bool| PlacedTenant {
        namespace: "tenants".to_owned(),
        name: name.to_owned(),
        uid: format!("uid-of-{name}"),
        generation: 2,
        spec: PlacedSpec {
            workspace: (!remove).then(|| "acme-ws".to_owned()),
            values: (!remove).then(|| chart().values),
            service_account_name: None,
        },
        remove,
        adopt: !remove,
        paused: remove,
        requested: remove.then(|| "2027-01-15".to_owned()),
        former_uid: (!remove).then(|| "uid-before".to_owned()),
    };
    DesiredState {
        placed: vec![order("acme", false), order("beta", true)],
        ..desired_state()
    }
}

/// Protocol addition: the hub places Tenants of the home cluster on members.
#[test]
fn placed_tenant_messages_decode_as_recorded() {
    let placed = |state| Placed {
        namespace: "tenants".to_owned(),
        name: "acme".to_owned(),
        state,
    };
    let report = || {
        let said = PlacedState {
            uid: "uid-of-acme".to_owned(),
            observed_generation: 2,
            gone: true,
            placed: Some(Condition {
                truth: Truth::False.into(),
                reason: "AlreadyThere".to_owned(),
                message: "it is somebody's".to_owned(),
            }),
        };
        Said::Report(Report {
            tenants: vec![tenant(Truth::True.into())],
            deployments: Vec::new(),
            placed: vec![placed(Some(said)), placed(None)],
            member: None,
            complete: None,
        })
    };
    let now = [agent_message(report())];
    let heard: Vec<AgentMessage> = read(&recorded("agent-placed.stream", &stream(&now)));
    assert_eq!(heard[0].kind, Some(report()));

    let now = [hub_message(Say::Desired((&placements()).into()))];
    let heard: Vec<HubMessage> = read(&recorded("hub-placed.stream", &stream(&now)));
    match heard[0].kind.clone() {
        Some(Say::Desired(desired)) => {
            assert_eq!(DesiredState::try_from(desired).unwrap(), placements());
        }
        other => panic!("{other:?}"),
    }
}

/// Messages of a hub of version 0.1.
fn hub_says() -> Vec<Say> {
    vec![
        Say::Welcome(Welcome {
            protocol: 1,
            hub_version: "0.1.0".to_owned(),
            session: 7,
            heartbeat_millis: 10_000,
            now: 1_800_000_000,
        }),
        Say::Desired((&desired_state()).into()),
        Say::Resync(Resync { number: 1 }),
        Say::Drain(Drain {
            reason: "the hub stops".to_owned(),
            reconnect_after_millis: 1000,
        }),
    ]
}

fn agent_message(kind: Said) -> Vec<u8> {
    AgentMessage { kind: Some(kind) }.encode_to_vec()
}

fn hub_message(kind: Say) -> Vec<u8> {
    HubMessage { kind: Some(kind) }.encode_to_vec()
}

#[test]
fn agent_0_1_messages_decode_as_recorded() {
    let now: Vec<_> = agent_says().into_iter().map(agent_message).collect();
    let heard: Vec<AgentMessage> = read(&recorded("agent-0.1.stream", &stream(&now)));
    let heard: Vec<_> = heard.into_iter().map(|message| message.kind).collect();
    assert_eq!(
        heard,
        agent_says().into_iter().map(Some).collect::<Vec<_>>()
    );
}

#[test]
fn hub_0_1_messages_decode_as_recorded() {
    let now: Vec<_> = hub_says().into_iter().map(hub_message).collect();
    let heard: Vec<HubMessage> = read(&recorded("hub-0.1.stream", &stream(&now)));
    for (heard, meant) in heard.into_iter().zip(hub_says()) {
        match (heard.kind, meant) {
            // The order of keys in the values is not significant.
            (Some(Say::Desired(desired)), Say::Desired(_)) => {
                assert_eq!(DesiredState::try_from(desired).unwrap(), desired_state());
            }
            (heard, meant) => assert_eq!(heard, Some(meant)),
        }
    }
}

#[test]
fn fields_of_newer_agent_are_ignored() {
    // Unknown fields in each message, including the innermost.
    let state = tenant(9).state.unwrap();
    let ready = of_the_future(state.ready.unwrap().encode_to_vec());
    let state = [
        field(3, &ready),
        TenantState {
            ready: None,
            ..tenant(9).state.unwrap()
        }
        .encode_to_vec(),
    ];
    let named = Tenant {
        state: None,
        ..tenant(9)
    };
    let tenant_bytes = [
        named.encode_to_vec(),
        field(3, &of_the_future(state.concat())),
    ];
    let report = [
        field(1, &of_the_future(tenant_bytes.concat())),
        field(2, &of_the_future(member().encode_to_vec())),
        Report {
            complete: Some(0),
            ..Report::default()
        }
        .encode_to_vec(),
    ];
    let now = [
        field(1, &of_the_future(hello("0.2.0", 2).encode_to_vec())),
        of_the_future(field(2, &of_the_future(report.concat()))),
        // A message of an unknown kind.
        field(FUTURE, b"\x08\x01"),
        field(4, &of_the_future(applied().encode_to_vec())),
    ];
    let heard: Vec<AgentMessage> = read(&recorded("agent-next.stream", &stream(&now)));
    let meant = [
        Some(Said::Hello(hello("0.2.0", 2))),
        Some(Said::Report(Report {
            tenants: vec![tenant(9)],
            member: Some(member()),
            complete: Some(0),
            deployments: Vec::new(),
            placed: Vec::new(),
        })),
        None,
        Some(Said::Applied(applied())),
    ];
    let kinds: Vec<_> = heard.into_iter().map(|message| message.kind).collect();
    assert_eq!(kinds, meant);
    // An unknown truth value becomes `Unknown`.
    let (_, said) = tenant(9).read().unwrap();
    assert_eq!(said.unwrap().state.ready.truth, Word::Unknown);
}

#[test]
fn fields_of_newer_hub_are_ignored_unless_digested() {
    let desired = Desired::from(&desired_state());
    let chart_bytes = of_the_future(desired.chart.clone().unwrap().encode_to_vec());
    let around = |digest: &str| {
        let rest = Desired {
            chart: None,
            digest: digest.to_owned(),
            ..desired.clone()
        };
        of_the_future([rest.encode_to_vec(), field(2, &chart_bytes)].concat())
    };
    let now = [
        field(
            1,
            &of_the_future(
                Welcome {
                    hub_version: "0.2.0".to_owned(),
                    protocol: 1,
                    ..Welcome::default()
                }
                .encode_to_vec(),
            ),
        ),
        // The digest does not cover the chart's new fields, so the member understands the whole state.
        field(2, &around(&desired.digest)),
        // The digest covers new fields, so the member would apply only a part.
        field(2, &around(&"e".repeat(64))),
        field(FUTURE, b"\x08\x01"),
        of_the_future(field(
            3,
            &of_the_future(Resync { number: 2 }.encode_to_vec()),
        )),
    ];
    let heard: Vec<HubMessage> = read(&recorded("hub-next.stream", &stream(&now)));
    let mut kinds = heard.into_iter().map(|message| message.kind);
    assert!(matches!(kinds.next(), Some(Some(Say::Welcome(welcome))) if welcome.protocol == 1));
    let mut read = || match kinds.next() {
        Some(Some(Say::Desired(desired))) => DesiredState::try_from(desired),
        other => panic!("{other:?}"),
    };
    assert_eq!(read().unwrap(), desired_state());
    assert!(matches!(read(), Err(WireError::Digest)));
    assert_eq!(kinds.next(), Some(None));
    assert_eq!(kinds.next(), Some(Some(Say::Resync(Resync { number: 2 }))));
    assert_eq!(kinds.next(), None);
}

#[test]
fn recorded_hellos_of_all_versions_decode() {
    // The hub's tests answer these Hellos. Hellos of later versions contain unknown fields.
    for (version, next) in [
        ("1.3.9", false),
        ("1.4.0", false),
        ("1.5.7", false),
        ("1.6.0", false),
        ("1.7.0", true),
        ("1.8.0", true),
    ] {
        let now = match next {
            false => agent_message(Said::Hello(hello(version, 1))),
            true => field(1, &of_the_future(hello(version, 2).encode_to_vec())),
        };
        let name = format!("hello-{version}.stream");
        let heard: Vec<AgentMessage> = read(&recorded(&name, &stream(&[now])));
        let meant = hello(version, if next { 2 } else { 1 });
        assert_eq!(heard.len(), 1);
        assert_eq!(heard[0].kind, Some(Said::Hello(meant)));
    }
}

#[test]
fn a_chart_is_whole_or_refused() {
    let mut desired = Desired::from(&desired_state());
    desired.chart = Some(Chart {
        install_crds: false,
        ..desired.chart.unwrap()
    });
    assert!(matches!(
        DesiredState::try_from(desired),
        Err(WireError::Digest)
    ));
}

#[test]
fn next_step_of_agent_decodes_as_recorded() {
    let said = |what: &str, at, attempts| {
        let mut said = tenant(Truth::False.into());
        let what = what.to_owned();
        if let Some(state) = &mut said.state {
            state.next = Some(Next { what, at, attempts });
        }
        said
    };
    let report = || {
        Said::Report(Report {
            tenants: vec![
                said("Retry", Some(1_800_000_000), 3),
                said("GivenUp", None, 6),
                // An unknown step of a later version, and a time out of range.
                said("Ponder", Some(1_800_000_000), 0),
                said("Wait", Some(i64::MAX), 0),
            ],
            ..Report::default()
        })
    };
    let now = [agent_message(report())];
    let heard: Vec<AgentMessage> = read(&recorded("agent-coming.stream", &stream(&now)));
    assert_eq!(heard[0].kind, Some(report()));
    let Some(Said::Report(report)) = heard[0].kind.clone() else {
        panic!("{heard:?}");
    };
    let next = |tenant: Tenant| tenant.read().unwrap().1.unwrap().next;
    let next: Vec<_> = report.tenants.into_iter().map(next).collect();
    let retry = Coming::at_second(Step::Retry, Some(1_800_000_000), 3);
    let given_up = Coming::at_second(Step::GivenUp, None, 6);
    assert_eq!(next, [retry, given_up, None, None]);
}
