//! Tests the listener of a hub that does not lead or loses leadership.

use krypton_hub::leader::{Leader, LeaderState, LeaderTerm};
use krypton_proto::v1::{FetchChartRequest, RenewRequest};
use krypton_runtime::lease::LeaseTerm;

use super::*;

fn leader_term(epoch: u64) -> LeaderTerm {
    LeaderTerm {
        epoch,
        lease_term: LeaseTerm::default(),
        since: BootTime::now(),
        acquired_at: clock::wall(),
        previous_leader: None,
    }
}

fn standby() -> LeaderState {
    LeaderState::Standby {
        leader: Some("hub/b/1".to_owned()),
    }
}

fn hub_with_state(state: LeaderState) -> (watch::Sender<LeaderState>, TestHub) {
    let (state, leader) = Leader::with_state(state);
    let hub = TestHub {
        leader,
        ..TestHub::new()
    };
    (state, hub.with_members(&names(1)))
}

/// Returns the reason of the drain and the time until the agent may reconnect.
async fn wait_for_drain(stream: &mut RawSession) -> (String, u32) {
    loop {
        if let FromHub::Drain(drain) = stream.receive().await.unwrap() {
            return (drain.reason, drain.reconnect_after_millis);
        }
    }
}

fn first_message() -> FromAgent {
    FromAgent::Hello(hello(1, env!("CARGO_PKG_VERSION")))
}

#[tokio::test]
async fn standby_rejects_agents_and_names_leader() {
    let (state, hub) = hub_with_state(standby());
    let port = hub.listen(None).await;
    let dialer = hub.dialer(port.address, "edge-0");
    let check_refusal = |status: Status| check_status(&status, Code::Unavailable, "hub/b/1 leads");
    check_refusal(
        RawSession::open(&dialer, first_message())
            .await
            .err()
            .unwrap(),
    );
    let connection = dialer.connect().await.unwrap();
    let renewal = connection.fleet().renew(RenewRequest::default()).await;
    check_refusal(renewal.err().unwrap());
    let chart = connection
        .fleet()
        .fetch_chart(FetchChartRequest::default())
        .await;
    check_refusal(chart.err().unwrap());

    state.send_replace(LeaderState::Leading(leader_term(2)));
    let mut stream = RawSession::opened(&dialer, first_message()).await;
    stream.receive_welcome().await;
}

#[tokio::test]
async fn session_survives_unconfirmed_lead_but_not_loss() {
    let (state, hub) = hub_with_state(LeaderState::Leading(leader_term(1)));
    let port = hub.listen(None).await;
    let dialer = hub.dialer(port.address, "edge-0");
    let mut stream = RawSession::opened(&dialer, first_message()).await;
    state.send_replace(LeaderState::Unconfirmed(leader_term(1)));
    // The hub serves new and existing sessions while it is unconfirmed.
    let other = Hello {
        replica: "other".to_owned(),
        ..hello(1, env!("CARGO_PKG_VERSION"))
    };
    let mut second = RawSession::opened(&dialer, FromAgent::Hello(other)).await;
    second.receive_welcome().await;
    state.send_replace(LeaderState::Leading(leader_term(1)));

    state.send_replace(standby());
    for stream in [&mut stream, &mut second] {
        let expected = ("this hub is no longer the leader".to_owned(), 1_000);
        assert_eq!(wait_for_drain(stream).await, expected);
    }
    state.send_replace(LeaderState::Leading(leader_term(3)));
    let mut again = RawSession::opened(&dialer, first_message()).await;
    again.receive_welcome().await;
    // On a shutdown, the stop token drains the session, not the leader state.
    state.send_replace(LeaderState::Leaving);
    let late = RawSession::open(&dialer, first_message())
        .await
        .err()
        .unwrap();
    assert_eq!(late.code(), Code::Unavailable);
    drop(port.stop);
    let expected = ("the hub stops".to_owned(), 2_000);
    assert_eq!(wait_for_drain(&mut again).await, expected);
}
