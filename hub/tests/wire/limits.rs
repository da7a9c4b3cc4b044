//! Tests the limits of a member's messages and requests.

use krypton_proto::REPORTS_PER_MESSAGE;
use krypton_proto::v1::{FetchChartRequest, Heartbeat, Report, Tenant};

use super::*;

async fn wait_until(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, waiting).await.unwrap();
}

/// Returns a report with as many Tenants as fit into a message.
fn flood(from: u32, generation: i64) -> FromAgent {
    let keys = (from..from + REPORTS_PER_MESSAGE as u32).map(tenant);
    FromAgent::Report(Report {
        tenants: keys
            .map(|key| Tenant::new(&key, Some(&installed(generation))))
            .collect(),
        ..Report::default()
    })
}

#[tokio::test]
async fn flooding_agent_is_throttled_without_loss_or_disruption() {
    // Small messages exhaust the quota also on a slow machine. The large ones wait for it for some seconds.
    const SMALL: u32 = 600;
    const MESSAGES: u32 = SMALL + 10;
    let (mut hub, port) = TestHub::start(2).await;
    let mut other = Agent::start(hub.dialer(port.address, "edge-1"), "a", "c");
    other.wait_for_chart("1.0.0").await;
    let dialer = hub.dialer(port.address, "edge-0");
    let mut flooder = RawSession::start(&dialer).await;
    // A lone reporter counts, even if it only observes.
    flooder
        .send(FromAgent::Report(Report {
            member: Some(lease_holder_report().into()),
            complete: Some(0),
            ..Report::default()
        }))
        .await;
    let FromHub::Desired(_) = flooder.receive().await.unwrap() else {
        panic!("no desired state")
    };
    let sender = flooder.sender.clone();
    let flooding = tokio::spawn(async move {
        for number in 0..MESSAGES {
            let kind = Some(match number < SMALL {
                true => FromAgent::Report(Report::default()),
                false => flood(200 * (number % 40), i64::from(number)),
            });
            sender.send(AgentMessage { kind }).await.unwrap();
        }
        let last = FromAgent::Heartbeat(Heartbeat {
            tenants: 1,
            digest_high: 2,
            digest_low: 3,
        });
        sender
            .send(AgentMessage { kind: Some(last) })
            .await
            .unwrap();
    });
    // The throttled agent still receives changes, and other agents' reports arrive.
    wait_until(|| hub.metrics.throttled.get() > 0).await;
    hub.publish(&names(2), "1.0.1");
    other.wait_for_chart("1.0.1").await;
    let FromHub::Desired(_) = flooder.receive().await.unwrap() else {
        panic!("no desired state")
    };
    other.report_store.set_member(&lease_holder_report());
    hub.wait_for_holder("edge-1").await;
    assert!(hub.count("agent", "report") < u64::from(MESSAGES));
    // All messages arrive in the end. The heartbeat is the last and has a wrong digest, so the hub requests a
    // resync.
    let FromHub::Resync(_) = flooder.receive().await.unwrap() else {
        panic!("no question")
    };
    flooding.await.unwrap();
    // The flooding agent's first report and the two of the other agent are not part of the flood.
    assert!(hub.count("agent", "report") > u64::from(MESSAGES));
    assert_eq!(hub.metrics.sessions.get(), 2);
    assert!(other.link.get().is_up());
    other.stop().await;
}

#[tokio::test]
async fn flooding_agent_disconnect_is_detected_despite_backlog() {
    let (hub, port) = TestHub::start(1).await;
    let dialer = hub.dialer(port.address, "edge-0");
    let flooder = RawSession::start(&dialer).await;
    // One Tenant each: the hub would need minutes to read the messages in flight.
    let small = |generation| {
        FromAgent::Report(Report {
            tenants: vec![Tenant::new(&tenant(0), Some(&installed(generation)))],
            ..Report::default()
        })
    };
    let sender = flooder.sender.clone();
    let flooding = tokio::spawn(async move {
        for generation in 0..1_000 {
            let kind = Some(small(generation));
            sender.send(AgentMessage { kind }).await.unwrap();
        }
    });
    // The queue of unread messages is full.
    wait_until(|| hub.metrics.throttled.get() > 0 && flooder.sender.capacity() == 0).await;
    let before = hub.count("agent", "report");
    flooding.abort();
    drop(flooder);
    hub.wait_until_away("edge-0").await;
    let after = hub.count("agent", "report");
    assert!(after < 900, "{before} and then {after} were heard");
}

#[tokio::test]
async fn renewals_and_chart_fetches_are_throttled_per_member() {
    let (hub, port) = TestHub::start(2).await;
    let [greedy, other] = ["edge-0", "edge-1"].map(|name| hub.dialer(port.address, name));
    let [greedy, other] = [
        greedy.connect().await.unwrap(),
        other.connect().await.unwrap(),
    ];
    let chart = || FetchChartRequest {
        digest: "another".to_owned(),
        ..FetchChartRequest::default()
    };
    let mut refused = [Code::Ok; 2];
    for _ in 0..40 {
        if let Err(status) = greedy.fleet().renew(renew_request()).await {
            refused[0] = status.code();
        }
        let fetched = greedy.fleet().fetch_chart(chart()).await;
        refused[1] = fetched.err().unwrap().code();
    }
    assert_eq!(refused, [Code::ResourceExhausted; 2]);
    other.fleet().renew(renew_request()).await.unwrap();
    let fetched = other.fleet().fetch_chart(chart()).await;
    assert_eq!(fetched.err().unwrap().code(), Code::NotFound);
}

#[tokio::test]
async fn sessions_of_one_member_are_paced() {
    let (hub, port) = TestHub::start(2).await;
    let [greedy, other] = ["edge-0", "edge-1"].map(|name| hub.dialer(port.address, name));
    let greedy = greedy.connect().await.unwrap();
    let mut refused = Code::Ok;
    for _ in 0..40 {
        let (_sender, messages) = mpsc::channel(1);
        let result = greedy.fleet().connect(ReceiverStream::new(messages)).await;
        if let Err(status) = result {
            refused = status.code();
        }
    }
    assert_eq!(refused, Code::ResourceExhausted);
    let other = other.connect().await.unwrap();
    let (_sender, messages) = mpsc::channel(1);
    let result = other.fleet().connect(ReceiverStream::new(messages)).await;
    result.unwrap();
}
