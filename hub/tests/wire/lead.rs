//! Tests the listener of a hub that does not lead or loses leadership.

use krypton_hub::leader::{Leader, LeaderState, LeaderTerm};
use krypton_runtime::lease::LeaseTerm;

use super::*;

fn leader_term(epoch: u64) -> LeaderTerm {
    LeaderTerm {
        epoch,
        term: LeaseTerm::default(),
        since: BootTime::now(),
        won: clock::wall(),
        former: None,
    }
}

fn standby() -> LeaderState {
    LeaderState::Standby {
        leader: Some("hub/b/1".to_owned()),
    }
}

fn home_of(stand: LeaderState) -> (watch::Sender<LeaderState>, Home) {
    let (stand, lead) = Leader::by_hand(stand);
    let home = Home {
        lead,
        ..Home::new()
    };
    (stand, home.with_members(&names(1)))
}

/// Returns the reason of the drain and the time until the agent may reconnect.
async fn drained(stream: &mut Stream) -> (String, u32) {
    loop {
        if let Say::Drain(drain) = stream.hear().await.unwrap() {
            return (drain.reason, drain.reconnect_after_millis);
        }
    }
}

fn first() -> Said {
    Said::Hello(hello(1, env!("CARGO_PKG_VERSION")))
}

#[tokio::test]
async fn standby_rejects_agents_and_names_leader() {
    let (stand, home) = home_of(standby());
    let port = home.listen(None).await;
    let dialer = home.dialer(port.address, "edge-0");
    let refused = |status: Status| {
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert!(status.message().contains("hub/b/1 leads"), "{status}");
    };
    refused(Stream::open(&dialer, first()).await.err().unwrap());
    let connection = dialer.connect().await.unwrap();
    let renewal = connection.fleet().renew(RenewRequest::default()).await;
    refused(renewal.err().unwrap());
    let chart = connection
        .fleet()
        .fetch_chart(FetchChartRequest::default())
        .await;
    refused(chart.err().unwrap());

    stand.send_replace(LeaderState::Leading(leader_term(2)));
    let mut stream = Stream::open(&dialer, first()).await.unwrap();
    assert!(matches!(stream.hear().await.unwrap(), Say::Welcome(_)));
}

#[tokio::test]
async fn session_survives_unconfirmed_lead_but_not_loss() {
    let (stand, home) = home_of(LeaderState::Leading(leader_term(1)));
    let port = home.listen(None).await;
    let dialer = home.dialer(port.address, "edge-0");
    let mut stream = Stream::open(&dialer, first()).await.unwrap();
    stand.send_replace(LeaderState::Unconfirmed(leader_term(1)));
    // The hub serves new and existing sessions while it is unconfirmed.
    let mut other = Hello {
        replica: "other".to_owned(),
        ..hello(1, env!("CARGO_PKG_VERSION"))
    };
    other.cluster_uid = "cluster".to_owned();
    let mut second = Stream::open(&dialer, Said::Hello(other)).await.unwrap();
    assert!(matches!(second.hear().await.unwrap(), Say::Welcome(_)));
    stand.send_replace(LeaderState::Leading(leader_term(1)));

    stand.send_replace(standby());
    for stream in [&mut stream, &mut second] {
        let expected = ("this hub is no longer the leader".to_owned(), 1_000);
        assert_eq!(drained(stream).await, expected);
    }
    stand.send_replace(LeaderState::Leading(leader_term(3)));
    let mut again = Stream::open(&dialer, first()).await.unwrap();
    assert!(matches!(again.hear().await.unwrap(), Say::Welcome(_)));
    // On a shutdown, the stop token drains the session, not the leader state.
    stand.send_replace(LeaderState::Leaving);
    let late = Stream::open(&dialer, first()).await.err().unwrap();
    assert_eq!(late.code(), Code::Unavailable);
    drop(port.stop);
    let expected = ("the hub stops".to_owned(), 2_000);
    assert_eq!(drained(&mut again).await, expected);
}
