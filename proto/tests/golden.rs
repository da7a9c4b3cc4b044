//! Verifies that recorded messages of agents and hubs stay readable.
//!
//! `golden/` contains streams of length-prefixed messages, as on the wire of a session. `agent` and `hub` come from this
//! version. `agent-next` and `hub-next` imitate a later version, with unknown fields in every message and messages of an
//! unknown kind. A test records a missing file and fails. It never overwrites an existing one. Recordings are final
//! once a version is released: if a later version adds to the protocol, record new streams and keep the old ones.
//!
//! Decoding drops unknown fields. This is safe because hub and agent never forward the messages of a peer. They convert
//! them to internal types and build new messages. Unknown fields must not cause errors. The digest prevents a member
//! from acting on a partly understood desired state.

#![allow(
    clippy::unwrap_used,
    reason = "this file is tests only, its helping functions included"
)]

use std::path::Path;

use krypton_proto::WireError;
use krypton_proto::v1::{
    AgentMessage, Applied, Condition, Deployment, DeploymentState, Desired, Drain, Heartbeat,
    Hello, HubMessage, MemberReport, Next, Placed, PlacedState, Report, ReportedEvent, Resync,
    Revision, RevisionChart, Revisions, Roots, Tenant, TenantState, TrustedRoots, Truth, Version,
    Welcome, agent_message::Kind as AgentKind, hub_message::Kind as HubKind,
};
use krypton_types::conditions::Truth as DomainTruth;
use krypton_types::deployment::DesiredDeployment;
use krypton_types::desired::drift::{DriftMode, DriftPolicy};
use krypton_types::desired::namespaces::NamespaceConfiguration;
use krypton_types::desired::{ChartState, DesiredState, Version as DomainVersion};
use krypton_types::placed_tenant::{PlacedSpec, PlacedTenant};
use krypton_types::tenant::{UpcomingStep, UpcomingStepKind};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};

/// First number of the fields that only later versions know.
const FIRST_UNKNOWN_FIELD: u32 = 1000;

/// Returns the recorded messages. If the file is missing, records `now`, each message after its length, and fails.
fn recorded<M: Message + Default>(name: &str, now: &[Vec<u8>]) -> Vec<M> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name);
    if !path.exists() {
        let mut bytes = Vec::new();
        for message in now {
            encode_varint(message.len() as u64, &mut bytes);
            bytes.extend_from_slice(message);
        }
        std::fs::write(&path, bytes).unwrap();
        panic!("{name} was missing and has been recorded: check it in, and never change it");
    }
    let bytes = std::fs::read(path).unwrap();
    let mut bytes = bytes.as_slice();
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
fn with_unknown_fields(mut bytes: Vec<u8>) -> Vec<u8> {
    encode_key(FIRST_UNKNOWN_FIELD, WireType::Varint, &mut bytes);
    encode_varint(u64::MAX, &mut bytes);
    encode_key(FIRST_UNKNOWN_FIELD + 1, WireType::SixtyFourBit, &mut bytes);
    bytes.extend_from_slice(&[1; 8]);
    encode_key(FIRST_UNKNOWN_FIELD + 2, WireType::ThirtyTwoBit, &mut bytes);
    bytes.extend_from_slice(&[2; 4]);
    bytes.extend_from_slice(&field(FIRST_UNKNOWN_FIELD + 3, b"\xff no text, no message"));
    bytes
}

/// Encodes a field with a message that has unknown fields.
fn next_field(number: u32, message: &impl Message) -> Vec<u8> {
    field(number, &with_unknown_fields(message.encode_to_vec()))
}

fn version() -> Option<Version> {
    let (epoch, generation) = (3, 14);
    Some(Version { epoch, generation })
}

fn hello(agent_version: &str, protocol_max: u32) -> Hello {
    Hello {
        trusted_roots: None,
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
    let next = Next {
        step: "Retry".to_owned(),
        at: Some(1_800_000_000),
        attempts: 3,
    };
    Tenant {
        namespace: "default".to_owned(),
        name: "acme".to_owned(),
        state: Some(TenantState {
            observed_generation: 2,
            applied_chart: "https://charts.example.org/small:1.0.0".to_owned(),
            ready: Some(condition(truth)),
            progress: Some(condition(Truth::False.into())),
            next: Some(next),
            ..TenantState::default()
        }),
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
            events: vec![ReportedEvent {
                at: 1,
                reason: "DriftHealed".to_owned(),
                message: "corrected 1 object".to_owned(),
            }],
            revisions: Some(Revisions {
                newest: vec![Revision {
                    number: 3,
                    created: Some(1_800_000_000),
                    status: "superseded".to_owned(),
                    fingerprint: Some("0a1b2c3d4e5f6071".to_owned()),
                    owner_uid: Some("uid-of-acme".to_owned()),
                    run: Some("upgrade-7-2".to_owned()),
                    rolled_back_by: Some(4),
                    chart: Some(RevisionChart {
                        name: "small".to_owned(),
                        version: "1.0.0".to_owned(),
                        is_read: true,
                    }),
                }],
            }),
        }),
    }
}

fn placed() -> Placed {
    Placed {
        namespace: "tenants".to_owned(),
        name: "acme".to_owned(),
        state: Some(PlacedState {
            uid: "uid-of-acme".to_owned(),
            observed_generation: 2,
            gone: true,
            placed: Some(condition(Truth::False.into())),
        }),
    }
}

fn member() -> MemberReport {
    MemberReport {
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

/// Messages of an agent of this version.
fn agent_messages() -> Vec<AgentKind> {
    let gone = Report {
        tenants: vec![Tenant {
            name: "gone".to_owned(),
            state: None,
            ..tenant(0)
        }],
        deployments: vec![Deployment {
            state: None,
            ..deployment()
        }],
        placed: vec![Placed {
            state: None,
            ..placed()
        }],
        ..Report::default()
    };
    vec![
        AgentKind::Hello(hello("0.1.0", 1)),
        AgentKind::Report(Report {
            tenants: vec![tenant(Truth::True.into())],
            member: Some(member()),
            complete: Some(0),
            deployments: vec![deployment()],
            placed: vec![placed()],
        }),
        AgentKind::Applied(applied()),
        AgentKind::TrustedRoots(TrustedRoots {
            sha256: vec![vec![7; 32].into()],
        }),
        AgentKind::Report(gone),
        AgentKind::Heartbeat(Heartbeat {
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
    let pair = |key: &str, value: &str| [(key.to_owned(), value.to_owned())].into();
    let deployment = |name: &str, remove: bool| DesiredDeployment {
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
        annotations: pair("mesh.openkcm.io/adopt", "true"),
    };
    let placed = |name: &str, remove: bool| PlacedTenant {
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
        former_uids: (!remove)
            .then(|| "uid-before".to_owned())
            .into_iter()
            .collect(),
    };
    DesiredState {
        version: DomainVersion {
            epoch: 3,
            generation: 14,
        },
        chart: chart(),
        namespaces: NamespaceConfiguration {
            labels: pair("team", "a"),
            annotations: pair("example.org/note", "a, b"),
        },
        deployments: vec![deployment("acme", false), deployment("beta", true)],
        placed: vec![placed("acme", false), placed("beta", true)],
        ..DesiredState::default()
    }
}

/// Messages of a hub of this version.
fn hub_messages() -> Vec<HubKind> {
    vec![
        HubKind::Welcome(Welcome {
            protocol: 1,
            hub_version: "0.1.0".to_owned(),
            session: 7,
            heartbeat_millis: 10_000,
            now: 1_800_000_000,
        }),
        HubKind::Desired((&desired_state()).into()),
        HubKind::Resync(Resync { number: 1 }),
        HubKind::Roots(Roots {
            certificates: vec![vec![1, 2].into()],
            renew_within_millis: Some(1),
        }),
        HubKind::Drain(Drain {
            reason: "the hub stops".to_owned(),
            reconnect_after_millis: 1000,
        }),
    ]
}

fn agent_message(kind: AgentKind) -> Vec<u8> {
    AgentMessage { kind: Some(kind) }.encode_to_vec()
}

fn hub_message(kind: HubKind) -> Vec<u8> {
    HubMessage { kind: Some(kind) }.encode_to_vec()
}

#[test]
fn agent_messages_decode_as_recorded() {
    let now: Vec<_> = agent_messages().into_iter().map(agent_message).collect();
    let decoded: Vec<AgentMessage> = recorded("agent.stream", &now);
    let decoded: Vec<_> = decoded.into_iter().map(|message| message.kind).collect();
    assert_eq!(
        decoded,
        agent_messages().into_iter().map(Some).collect::<Vec<_>>()
    );
}

#[test]
fn hub_messages_decode_as_recorded() {
    let now: Vec<_> = hub_messages().into_iter().map(hub_message).collect();
    let decoded: Vec<HubMessage> = recorded("hub.stream", &now);
    for (decoded, expected) in decoded.into_iter().zip(hub_messages()) {
        match (decoded.kind, expected) {
            // The order of the fields in the JSON is not significant.
            (Some(HubKind::Desired(desired)), HubKind::Desired(_)) => {
                assert_eq!(DesiredState::try_from(desired).unwrap(), desired_state());
            }
            (decoded, expected) => assert_eq!(decoded, Some(expected)),
        }
    }
}

#[test]
fn fields_of_newer_agent_are_ignored() {
    // Unknown fields in each message, including the innermost.
    let mut state = tenant(9).state.unwrap();
    let ready = state.ready.take().unwrap();
    let state = [next_field(3, &ready), state.encode_to_vec()];
    let named = Tenant {
        state: None,
        ..tenant(9)
    };
    let tenant_bytes = [
        named.encode_to_vec(),
        field(3, &with_unknown_fields(state.concat())),
    ];
    let report = [
        field(1, &with_unknown_fields(tenant_bytes.concat())),
        next_field(2, &member()),
        Report {
            complete: Some(0),
            ..Report::default()
        }
        .encode_to_vec(),
    ];
    let now = [
        next_field(1, &hello("0.2.0", 2)),
        with_unknown_fields(field(2, &with_unknown_fields(report.concat()))),
        // A message of an unknown kind.
        field(FIRST_UNKNOWN_FIELD, b"\x08\x01"),
        next_field(4, &applied()),
    ];
    let decoded: Vec<AgentMessage> = recorded("agent-next.stream", &now);
    let expected = [
        Some(AgentKind::Hello(hello("0.2.0", 2))),
        Some(AgentKind::Report(Report {
            tenants: vec![tenant(9)],
            member: Some(member()),
            complete: Some(0),
            ..Report::default()
        })),
        None,
        Some(AgentKind::Applied(applied())),
    ];
    let kinds: Vec<_> = decoded.into_iter().map(|message| message.kind).collect();
    assert_eq!(kinds, expected);
    // An unknown truth value becomes `Unknown`.
    let (_, report) = tenant(9).read().unwrap();
    assert_eq!(report.unwrap().state.ready.truth, DomainTruth::Unknown);
}

#[test]
fn fields_of_newer_hub_are_ignored_unless_digested() {
    let desired = Desired::from(&desired_state());
    let mut state: serde_json::Value = serde_json::from_slice(&desired.state).unwrap();
    state["chart"]["future"] = true.into();
    let with = |digest: &str| Desired {
        state: state.to_string().into(),
        digest: digest.to_owned(),
    };
    let welcome = Welcome {
        hub_version: "0.2.0".to_owned(),
        protocol: 1,
        ..Welcome::default()
    };
    let now = [
        next_field(1, &welcome),
        // The digest does not cover the chart's new fields, so the member understands the whole state.
        next_field(2, &with(&desired.digest)),
        // The digest covers new fields, so the member would apply only a part.
        next_field(2, &with(&"e".repeat(64))),
        field(FIRST_UNKNOWN_FIELD, b"\x08\x01"),
        with_unknown_fields(next_field(3, &Resync { number: 2 })),
    ];
    let decoded: Vec<HubMessage> = recorded("hub-next.stream", &now);
    let mut kinds = decoded.into_iter().map(|message| message.kind);
    assert!(matches!(kinds.next(), Some(Some(HubKind::Welcome(welcome))) if welcome.protocol == 1));
    let mut read = || match kinds.next() {
        Some(Some(HubKind::Desired(desired))) => DesiredState::try_from(desired),
        other => panic!("{other:?}"),
    };
    assert_eq!(read().unwrap(), desired_state());
    assert!(matches!(read(), Err(WireError::Digest)));
    assert_eq!(kinds.next(), Some(None));
    assert_eq!(
        kinds.next(),
        Some(Some(HubKind::Resync(Resync { number: 2 })))
    );
    assert_eq!(kinds.next(), None);
}

#[test]
fn unknown_next_step_of_agent_is_ignored() {
    let read = |step: &str, at, attempts| {
        let mut tenant = tenant(Truth::False.into());
        let step = step.to_owned();
        tenant.state.as_mut().unwrap().next = Some(Next { step, at, attempts });
        tenant.read().unwrap().1.unwrap().next
    };
    let time = Some(1_800_000_000);
    assert_eq!(
        read("Retry", time, 3),
        UpcomingStep::at_second(UpcomingStepKind::Retry, time, 3)
    );
    assert_eq!(
        read("GivenUp", None, 6),
        UpcomingStep::at_second(UpcomingStepKind::GivenUp, None, 6)
    );
    assert_eq!(read("Ponder", time, 0), None);
    assert_eq!(read("Wait", Some(i64::MAX), 0), None, "a time out of range");
}
