//! Promises about every message. The fuzzer checks them on the messages that it finds, and a test on the seeds.

use krypton_types::desired::DesiredState;
use krypton_types::error_chain::chain;
use krypton_types::member::MemberReport;
use krypton_types::names::{LABEL_MAX, SUBDOMAIN_MAX};
use krypton_types::report_digest::part;
use krypton_types::root_digest::ROOTS_MAX;
use prost::Message as _;

use crate::v1::{self, agent_message, hub_message};

#[path = "../../fuzz/shared.rs"]
mod shared;
use shared::{Target, message_defect, promise};

/// By the names of the folders of seeds.
pub const TARGETS: &[(&str, Target)] = &[
    ("agent_message", agent_message),
    ("hub_message", hub_message),
];

/// Bytes of a report in JSON: it keeps seven texts of 1,024 bytes and as many bytes of labels, and JSON may escape each
/// byte.
const REPORT_MAX: usize = 8 * 1024 * 6 + 1024;

/// Checks that each report is within limits, and that both sides compute the same digest.
macro_rules! broken_report {
    ($reports:expr, $wire:ty) => {
        $reports.into_iter().find_map(|message| {
            let (key, report) = match message.read() {
                Ok(read) => read,
                Err(error) => return message_defect(&chain(&error)),
            };
            promise!((1..=LABEL_MAX).contains(&key.namespace.len()), "{key:?}");
            promise!((1..=SUBDOMAIN_MAX).contains(&key.name.len()), "{key:?}");
            let report = report?;
            let size = serde_json::to_vec(&report).map_or(usize::MAX, |json| json.len());
            promise!(size <= REPORT_MAX, "a report of {size} bytes");
            let reread = <$wire>::new(&key, Some(&report)).read();
            let same = reread.as_ref().is_ok_and(|(to, reread)| {
                let reread = reread.as_ref();
                *to == key
                    && reread == Some(&report)
                    && reread.map(|reread| part(to, reread)) == Some(part(&key, &report))
            });
            promise!(same, "{report:?} arrives as {reread:?}");
            None
        })
    };
}

/// Decodes a message of an agent, and reads it as the hub does.
pub fn agent_message(bytes: &[u8]) -> Option<String> {
    use agent_message::Kind;
    let message = v1::AgentMessage::decode(bytes).ok()?;
    let reread = v1::AgentMessage::decode(message.encode_to_vec().as_slice());
    promise!(
        reread.as_ref() == Ok(&message),
        "it is encoded as {reread:?}"
    );
    match message.kind? {
        Kind::Hello(hello) => hello.trusted_roots.as_ref().and_then(broken_roots),
        Kind::TrustedRoots(roots) => broken_roots(&roots),
        Kind::Applied(applied) => {
            let read = applied.read()?;
            let reread = v1::Applied::new(read.0, read.1.clone()).read();
            promise!(reread.as_ref() == Some(&read), "{read:?} is {reread:?}");
            None
        }
        Kind::Heartbeat(_) => None,
        Kind::Report(report) => {
            let member = report.member.map(MemberReport::from);
            let member = member.and_then(|member| {
                let reread = MemberReport::from(v1::MemberReport::from(member.clone()));
                promise!(reread == member, "{member:?} is {reread:?}");
                None
            });
            let tenants = broken_report!(report.tenants, v1::Tenant);
            let deployments = broken_report!(report.deployments, v1::Deployment);
            let placed = broken_report!(report.placed, v1::Placed);
            member.or(tenants).or(deployments).or(placed)
        }
    }
}

fn broken_roots(trusted: &v1::TrustedRoots) -> Option<String> {
    let roots = match trusted.read() {
        Ok(roots) => roots,
        Err(error) => return message_defect(&chain(&error)),
    };
    promise!(roots.len() <= ROOTS_MAX, "{} roots", roots.len());
    let reread = v1::TrustedRoots::new(&roots).read();
    promise!(
        reread.as_ref().is_ok_and(|reread| *reread == roots),
        "{roots:?} are {reread:?}"
    );
    None
}

/// Decodes a message of a hub, and reads it as the agent does.
pub fn hub_message(bytes: &[u8]) -> Option<String> {
    use hub_message::Kind;
    let message = v1::HubMessage::decode(bytes).ok()?;
    let reread = v1::HubMessage::decode(message.encode_to_vec().as_slice());
    promise!(
        reread.as_ref() == Ok(&message),
        "it is encoded as {reread:?}"
    );
    let Kind::Desired(desired) = message.kind? else {
        return None;
    };
    // No fuzzer finds the digest that is right.
    let state = match desired.read_unchecked() {
        Ok(state) => state,
        Err(error) => return message_defect(&chain(&error)),
    };
    promise!(state.namespaces.check().is_ok(), "{:?}", state.namespaces);
    let reread = DesiredState::try_from(v1::Desired::from(&state));
    promise!(
        reread.as_ref().is_ok_and(|reread| *reread == state),
        "{state:?} arrives as {reread:?}"
    );
    None
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::v1::agent_message::Kind;

    /// `WRITE_CORPUS=1` writes the seeds.
    #[test]
    fn each_seed_keeps_its_promises() {
        write_agent_seeds();
        write_hub_seeds();
        shared::replay(TARGETS);
    }

    fn state(message: &str) -> v1::TenantState {
        v1::TenantState {
            observed_generation: 3,
            applied_chart: "https://example.com/small:1.0.0".to_owned(),
            ready: Some(v1::Condition {
                truth: v1::Truth::True.into(),
                reason: "Installed".to_owned(),
                message: message.to_owned(),
            }),
            next: Some(v1::Next {
                step: "Retry".to_owned(),
                at: Some(1_800_000_000),
                attempts: 2,
            }),
            ..v1::TenantState::default()
        }
    }

    fn write_agent_seeds() {
        let tenant = |namespace: &str, state| v1::Tenant {
            namespace: namespace.to_owned(),
            name: "small".to_owned(),
            state,
        };
        let report = v1::Report {
            tenants: vec![
                tenant("acme", Some(state("release installed"))),
                tenant("acme", None),
            ],
            member: Some(v1::MemberReport {
                ready: true,
                holder: Some("pod-1".to_owned()),
                applied: Some(v1::Applied {
                    version: Some(v1::Version {
                        epoch: 1,
                        generation: 2,
                    }),
                    digest: "ab".to_owned(),
                }),
                ..v1::MemberReport::default()
            }),
            complete: Some(1),
            deployments: vec![v1::Deployment {
                namespace: "acme".to_owned(),
                name: "small".to_owned(),
                state: Some(v1::DeploymentState {
                    uid: "uid-1".to_owned(),
                    gone: false,
                    state: Some(state("release installed")),
                    events: vec![v1::ReportedEvent {
                        at: 1,
                        reason: "DriftHealed".to_owned(),
                        message: "one".to_owned(),
                    }],
                    revisions: Some(v1::Revisions {
                        newest: vec![v1::Revision {
                            number: 1,
                            created: Some(1_800_000_000),
                            status: "deployed".to_owned(),
                            fingerprint: Some("0a1b2c3d4e5f6071".to_owned()),
                            owner_uid: Some("uid-1".to_owned()),
                            run: Some("install-1-1".to_owned()),
                            rolled_back_by: Some(2),
                            chart: Some(v1::RevisionChart {
                                name: "small".to_owned(),
                                version: "1.0.0".to_owned(),
                                is_read: true,
                            }),
                        }],
                    }),
                }),
            }],
            placed: vec![v1::Placed {
                namespace: "acme".to_owned(),
                name: "small".to_owned(),
                state: Some(v1::PlacedState {
                    uid: "uid-1".to_owned(),
                    placed: state("").ready,
                    ..v1::PlacedState::default()
                }),
            }],
        };
        let trusted_roots = v1::TrustedRoots {
            sha256: vec![vec![7; 32].into()],
        };
        let encoded = |kind| v1::AgentMessage { kind: Some(kind) }.encode_to_vec();
        let report_of = |tenant| {
            encoded(Kind::Report(v1::Report {
                tenants: vec![tenant],
                ..v1::Report::default()
            }))
        };
        let long = tenant("acme", Some(state(&"ä".repeat(800))));
        let labelled = Some(v1::TenantState {
            labels: [("team".to_owned(), "a".to_owned())].into(),
            ..state("")
        });
        let stateless = tenant("a", Some(v1::TenantState::default()));
        let many = v1::TrustedRoots {
            sha256: vec![vec![7; 32].into(); ROOTS_MAX + 1],
        };
        let hello = v1::Hello {
            protocol_min: 1,
            protocol_max: 1,
            agent_version: "0.1.0".to_owned(),
            trusted_roots: Some(trusted_roots.clone()),
            ..v1::Hello::default()
        };
        let heartbeat = v1::Heartbeat::default();
        shared::write(
            "agent_message",
            &[
                ("good-report", encoded(Kind::Report(report))),
                ("good-long-message", report_of(long)),
                ("good-labels", report_of(tenant("acme", labelled))),
                ("good-hello", encoded(Kind::Hello(hello))),
                ("good-trusts", encoded(Kind::TrustedRoots(trusted_roots))),
                ("good-heartbeat", encoded(Kind::Heartbeat(heartbeat))),
                (
                    "refused-namespace",
                    report_of(tenant(&"a".repeat(64), None)),
                ),
                ("refused-no-state", report_of(stateless)),
                ("refused-roots", encoded(Kind::TrustedRoots(many))),
                ("refused-cut", vec![0x12, 0x20, 0x0a]),
            ],
        );
    }

    fn write_hub_seeds() {
        let desired = json!({
            "version": {"epoch": 1, "generation": 2},
            "chart": {
                "repo": "https://example.com", "name": "small", "version": "1.0.0", "install_crds": false,
                "values": {"a": {"b": [1, null, 0.1]}},
                "confidential": {"salt": "salt", "paths": ["/a/b"]},
            },
            "paused": false,
            "drift": {"mode": "heal", "interval_seconds": 60},
            "wait": "hooks",
            "deployments": [
                {"namespace": "acme", "name": "small", "uid": "uid-1", "generation": 1, "created": 1},
            ],
            "placed": [{
                "namespace": "acme", "name": "small", "uid": "uid-1", "generation": 1,
                "spec": {"values": {"a": 1.5e300}},
            }],
            "namespaceConfiguration": {"labels": {"team": "a"}},
        });
        let encoded = |kind| v1::HubMessage { kind: Some(kind) }.encode_to_vec();
        let with = |pointer: &str, value: Value| {
            let mut desired = desired.clone();
            *desired.pointer_mut(pointer).unwrap() = value;
            encoded(hub_message::Kind::Desired(v1::Desired {
                state: desired.to_string().into(),
                digest: String::new(),
            }))
        };
        let roots = v1::Roots {
            certificates: vec![vec![1, 2].into()],
            renew_within_millis: Some(1),
        };
        let values = "/placed/0/spec/values";
        let labels = json!({"team": "a", "mesh.openkcm.io/a": "a"});
        shared::write(
            "hub_message",
            &[
                ("good-desired", with("", desired.clone())),
                ("good-plain", with("/deployments", json!([]))),
                ("good-roots", encoded(hub_message::Kind::Roots(roots))),
                ("refused-no-chart", with("/chart", Value::Null)),
                ("refused-mode", with("/drift/mode", "".into())),
                ("refused-wait", with("/wait", "never".into())),
                ("refused-uid", with("/placed/0/uid", "".into())),
                ("refused-values", with(values, json!([]))),
                ("found-long-values", with(values, "a".repeat(5000).into())),
                (
                    "refused-label",
                    with("/namespaceConfiguration/labels", labels),
                ),
            ],
        );
    }
}
