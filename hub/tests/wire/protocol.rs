//! Tests that the hub ends sessions of incompatible versions, sessions that break the protocol, and sessions that
//! the same replica replaces.

use krypton_proto::v1::{Applied, Heartbeat, Report, Tenant};

use super::*;

#[tokio::test]
async fn incompatible_versions_are_refused_with_remedy() {
    let (hub, port) = TestHub::start(1).await;
    let cases = [
        (0, "0.1.0", "protocol"),
        (9, "0.1.0", "protocol"),
        (1, "0.9.0", "upgrade the hub"),
        (1, "latest", "SemVer"),
    ];
    for (protocol, version, expected) in cases {
        let dialer = hub.dialer(port.address, "edge-0");
        let mut stream =
            RawSession::opened(&dialer, FromAgent::Hello(hello(protocol, version))).await;
        let status = stream.closing_status().await;
        check_status(&status, Code::FailedPrecondition, expected);
    }
}

#[tokio::test]
async fn protocol_violation_ends_only_its_own_session() {
    let (hub, port) = TestHub::start(2).await;
    let mut other = Agent::start(hub.dialer(port.address, "edge-1"), "a", "c");
    other.wait_for_chart("1.0.0").await;
    let heartbeat = FromAgent::Heartbeat(Heartbeat {
        tenants: 0,
        digest_high: 0,
        digest_low: 0,
    });
    let nameless = FromAgent::Report(Report {
        tenants: vec![Tenant {
            namespace: String::new(),
            name: "t".to_owned(),
            state: None,
        }],
        ..Report::default()
    });
    let oversized = FromAgent::Applied(Applied {
        version: None,
        digest: "x".repeat(2 << 20),
    });
    let dialer = hub.dialer(port.address, "edge-0");
    let mut not_hello = RawSession::opened(&dialer, heartbeat).await;
    assert_eq!(
        not_hello.closing_status().await.code(),
        Code::InvalidArgument
    );
    for (message, code) in [
        (nameless, Code::InvalidArgument),
        (oversized, Code::OutOfRange),
    ] {
        let mut stream = RawSession::start(&dialer).await;
        stream.send(message).await;
        assert_eq!(stream.closing_status().await.code(), code);
    }
    assert!(other.link.get().is_up());
    other.stop().await;
}

#[tokio::test]
async fn newer_session_replaces_only_older_of_same_replica() {
    let (hub, port) = TestHub::start(1).await;
    let dialer = hub.dialer(port.address, "edge-0");
    let as_replica = |replica: &str| {
        let replica = replica.to_owned();
        FromAgent::Hello(Hello {
            replica,
            ..hello(1, "0.1.0")
        })
    };
    let mut other = RawSession::opened(&dialer, as_replica("b")).await;
    let mut older = RawSession::opened(&dialer, as_replica("a")).await;
    older.receive_welcome().await;
    other.receive_welcome().await;
    let mut newer = RawSession::opened(&dialer, as_replica("a")).await;
    assert_eq!(older.closing_status().await.code(), Code::Aborted);
    for stream in [&mut newer, &mut other] {
        let desired = loop {
            match stream.receive().await.unwrap() {
                FromHub::Desired(desired) => break desired,
                FromHub::Welcome(_) => {}
                message => panic!("{message:?}"),
            }
        };
        assert!(DesiredState::try_from(desired).is_ok());
    }
    assert_eq!(hub.metrics.sessions.get(), 2);
}
