//! Checks the hub's responses to agents of other versions. The crate `krypton-proto` contains recorded streams and
//! describes how they are maintained.

use krypton_crds::edge_cluster::TenantCounts;
use prost::Message as _;

use super::*;

/// Version of the hub, between the versions of the agents.
const HUB_VERSION: &str = "1.6.0";

fn read_recording(name: &str) -> Vec<FromAgent> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto/tests/golden");
    let bytes = std::fs::read(std::path::Path::new(folder).join(name)).unwrap();
    let mut remaining = bytes.as_slice();
    let mut messages = Vec::new();
    while !remaining.is_empty() {
        let message = AgentMessage::decode_length_delimited(&mut remaining).unwrap();
        messages.extend(message.kind);
    }
    messages
}

#[tokio::test]
async fn hub_welcomes_only_agents_within_version_skew() {
    let hub = TestHub::new().with_members(&names(1));
    let port = hub.listen_with_version(HUB_VERSION, None).await;
    let dialer = hub.dialer(port.address, "edge-0");
    for (version, refusal) in [
        ("1.3.9", Some("too old")),
        ("1.4.0", None),
        ("1.5.7", None),
        ("1.6.0", None),
        ("1.7.0", None),
        ("1.8.0", Some("upgrade the hub")),
    ] {
        let first = FromAgent::Hello(hello(1, version));
        let mut stream = RawSession::opened(&dialer, first).await;
        match refusal {
            None => {
                let FromHub::Welcome(welcome) = stream.receive().await.unwrap() else {
                    panic!("{version}: no Welcome")
                };
                assert_eq!((welcome.protocol, &*welcome.hub_version), (1, HUB_VERSION));
                assert!(matches!(
                    stream.receive().await.unwrap(),
                    FromHub::Desired(_)
                ));
            }
            Some(message) => {
                let status = stream.closing_status().await;
                check_status(&status, Code::FailedPrecondition, message);
            }
        }
    }
}

#[tokio::test]
async fn current_and_next_agent_streams_are_accepted() {
    for name in ["agent.stream", "agent-next.stream"] {
        let hub = TestHub::new().with_members(&names(1));
        let port = hub.listen_with_version("0.1.0", None).await;
        let mut messages = read_recording(name).into_iter();
        let first = messages.next().unwrap();
        let dialer = hub.dialer(port.address, "edge-0");
        let mut stream = RawSession::opened(&dialer, first).await;
        stream.receive_welcome().await;
        for kind in messages {
            stream.send(kind).await;
        }
        hub.wait_for_observation("edge-0", |observation| {
            observation.holder.as_deref() == Some("agent/krypton-agent-0")
        })
        .await;
        assert_ne!(
            hub.reports.counts("edge-0", false),
            TenantCounts::default(),
            "{name}"
        );
    }
}
