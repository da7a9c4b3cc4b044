//! Checks the hub's responses to agents of other versions. The crate `krypton-proto` contains recorded streams and
//! describes how they are maintained.

use krypton_hub::tenants::Counts;
use prost::Message as _;

use super::*;

/// Version of the hub, between the versions of the agents.
const HUB: &str = "1.6.0";

fn recorded(name: &str) -> Vec<Said> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto/tests/golden");
    let bytes = std::fs::read(std::path::Path::new(folder).join(name)).unwrap();
    let mut left = bytes.as_slice();
    let mut said = Vec::new();
    while !left.is_empty() {
        let message = AgentMessage::decode_length_delimited(&mut left).unwrap();
        said.extend(message.kind);
    }
    said
}

#[tokio::test]
async fn hub_welcomes_only_agents_within_version_skew() {
    let home = Home::new().with_members(&names(1));
    let port = home.listen_as(HUB, None).await;
    let dialer = home.dialer(port.address, "edge-0");
    for (version, refusal) in [
        ("1.3.9", Some("too old")),
        ("1.4.0", None),
        ("1.5.7", None),
        ("1.6.0", None),
        ("1.7.0", None),
        ("1.8.0", Some("upgrade the hub")),
    ] {
        let first = Said::Hello(hello(1, version));
        let mut stream = Stream::open(&dialer, first).await.unwrap();
        match refusal {
            None => {
                let Say::Welcome(welcome) = stream.hear().await.unwrap() else {
                    panic!("{version}: no Welcome")
                };
                assert_eq!((welcome.protocol, &*welcome.hub_version), (1, HUB));
                assert!(matches!(stream.hear().await.unwrap(), Say::Desired(_)));
            }
            Some(words) => {
                let status = stream.end().await;
                assert_eq!(status.code(), Code::FailedPrecondition, "{version}");
                assert!(status.message().contains(words), "{status:?}");
            }
        }
    }
}

#[tokio::test]
async fn current_and_next_agent_streams_are_accepted() {
    for name in ["agent.stream", "agent-next.stream"] {
        let home = Home::new().with_members(&names(1));
        let port = home.listen_as("0.1.0", None).await;
        let mut said = recorded(name).into_iter();
        let first = said.next().unwrap();
        let dialer = home.dialer(port.address, "edge-0");
        let mut stream = Stream::open(&dialer, first).await.unwrap();
        let Say::Welcome(_) = stream.hear().await.unwrap() else {
            panic!("no Welcome")
        };
        for kind in said {
            stream.say(kind).await;
        }
        home.knows("edge-0", |facts| {
            facts.holder.as_deref() == Some("agent/krypton-agent-0")
        })
        .await;
        assert_ne!(
            home.reports.counts("edge-0", false),
            Counts::default(),
            "{name}"
        );
    }
}
