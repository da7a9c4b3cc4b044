//! Tests agents that lose their hub and reconnect, also 200 at a time, and connections that fail or are half
//! open.

use super::*;

#[tokio::test]
async fn agent_reconnects_to_restarted_hub_and_resends_report() {
    let (hub, port, mut agent) = TestHub::start_with_agent().await;
    let address = port.address;
    agent.report_store.set_member(&lease_holder_report());
    hub.wait_for_holder("edge-0").await;
    port.close().await;
    agent.wait_for_link(false).await;
    let _port = hub.listen(Some(address)).await;
    agent.wait_for_link(true).await;
    hub.wait_for_holder("edge-0").await;
    agent.stop().await;
}

#[tokio::test]
async fn returning_agent_gets_latest_state_and_reports_once() {
    let members = names(1);
    let (mut hub, port, mut agent) = TestHub::start_with_agent().await;
    let address = port.address;
    agent.report_store.set_member(&lease_holder_report());
    for number in 0..3 {
        agent
            .report_store
            .set_tenant(&tenant(number), Some(installed(1)));
    }
    hub.wait_for_holder("edge-0").await;
    port.close().await;
    agent.wait_for_link(false).await;
    let counts = |hub: &TestHub| {
        [("hub", "desired"), ("agent", "report")].map(|(sender, kind)| hub.count(sender, kind))
    };
    let before = counts(&hub);
    // While they are disconnected, both sides change.
    for version in ["1.0.1", "1.0.2", "1.0.3"] {
        hub.publish(&members, version);
    }
    for generation in 2..10 {
        agent
            .report_store
            .set_tenant(&tenant(0), Some(installed(generation)));
    }
    agent.report_store.set_tenant(&tenant(1), None);
    let _port = hub.listen(Some(address)).await;
    agent.wait_for_chart("1.0.3").await;
    hub.publish(&members, "1.0.4");
    agent.wait_for_chart("1.0.4").await;
    // Messages arrive in order, so this change of the member arrives after all earlier ones.
    agent.report_store.set_member(&MemberReport {
        holder: Some("agent/b".to_owned()),
        ..lease_holder_report()
    });
    hub.wait_for_observation("edge-0", |observation| {
        observation.holder.as_deref() == Some("agent/b")
    })
    .await;
    let [desired, reports] = counts(&hub);
    assert_eq!(
        desired - before[0],
        2,
        "the last of three, and the one after"
    );
    assert_eq!(reports - before[1], 2, "the account, and the change after");
    agent.stop().await;
}

#[tokio::test]
async fn agent_started_before_hub_connects_once_available() {
    let (hub, port) = TestHub::start(1).await;
    let address = port.address;
    port.close().await;
    let mut agent = Agent::start(hub.dialer(address, "edge-0"), "a", "c");
    check_link_error(&mut agent, &address.to_string()).await;
    let _port = hub.listen(Some(address)).await;
    agent.wait_for_chart("1.0.0").await;
    agent.stop().await;
}

#[tokio::test]
async fn two_hundred_simultaneous_agents_are_served() {
    let members = names(200);
    let hub = TestHub::new().with_members(&members);
    let port = hub.listen(None).await;
    let mut agents: Vec<Agent> = members
        .iter()
        .map(|name| Agent::start(hub.dialer(port.address, name), "a", name))
        .collect();
    for agent in &mut agents {
        agent.wait_for_chart("1.0.0").await;
    }
    assert_eq!(hub.metrics.sessions.get(), 200);
    // All of them lose their hub simultaneously and reconnect.
    let address = port.address;
    port.close().await;
    for agent in &mut agents {
        agent.wait_for_link(false).await;
    }
    let _port = hub.listen(Some(address)).await;
    for agent in &mut agents {
        agent.wait_for_link(true).await;
    }
    assert_eq!(hub.metrics.sessions.get(), 200);
    // They share one address, as behind a NAT. Concurrent handshakes stay within its share.
    let max_handshakes = hub.metrics.port.handshakes_max.get();
    assert!((1..=64).contains(&max_handshakes), "{max_handshakes}");
    println!("most handshakes at a time: {max_handshakes}");
    for agent in agents {
        agent.stop().await;
    }
}

/// The peer vanishes silently: from some moment on, the relay discards all bytes.
#[tokio::test]
async fn half_open_connection_is_detected_by_both_sides() {
    let (hub, port) = TestHub::start(1).await;
    let relay = Relay::start(port.address).await;
    let mut agent = Agent::start(hub.dialer(relay.address, "edge-0"), "a", "c");
    agent.wait_for_chart("1.0.0").await;
    relay.discard.cancel();
    agent.wait_for_link(false).await;
    hub.wait_until_away("edge-0").await;
    assert_eq!(hub.metrics.sessions.get(), 0);
    agent.stop().await;
}

/// Relays bytes in both directions until it discards them, and keeps its sockets open.
struct Relay {
    address: SocketAddr,
    discard: CancellationToken,
    _stop: DropGuard,
}

impl Relay {
    async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (discard, stop) = (CancellationToken::new(), CancellationToken::new());
        let (discarding, stopping) = (discard.clone(), stop.clone());
        tokio::spawn(async move {
            while let Some(Ok((mut from, _))) =
                stopping.run_until_cancelled(listener.accept()).await
            {
                let (discarding, stopping) = (discarding.clone(), stopping.clone());
                tokio::spawn(async move {
                    let mut to = tokio::net::TcpStream::connect(to).await.unwrap();
                    let copying = tokio::io::copy_bidirectional(&mut from, &mut to);
                    if discarding.run_until_cancelled(copying).await.is_none() {
                        stopping.cancelled().await;
                    }
                });
            }
        });
        Self {
            address,
            discard,
            _stop: stop.drop_guard(),
        }
    }
}

#[tokio::test]
async fn dial_error_names_port_without_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let response = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
        tokio::io::AsyncWriteExt::write_all(&mut stream, response)
            .await
            .unwrap();
        stream
    });
    let hub = TestHub::new();
    let message = dial_error(&hub.dialer(address, "edge-0")).await;
    assert!(
        message.contains(&address.to_string()) && message.contains("TLS"),
        "{message}"
    );
    serving.await.unwrap();
}
