//! Tests of the session against a fake hub over real TLS.

use krypton_proto::v1::{Desired, Drain, Heartbeat, Report, Resync, Roots};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::tls;
use krypton_types::conditions::{State, Truth};
use krypton_types::desired::ChartState;
use krypton_types::tenant::{TenantKey, TenantReport};
use tokio::task::JoinHandle;

use super::*;
use crate::fake_hub::{FakeAuthority, FakeHub, FakeResponses, FakeSession, Validity};

/// An agent's session, with the other ends of its channels.
struct TestAgent {
    report_store: Arc<ReportStore>,
    desired: watch::Receiver<Option<Arc<DesiredState>>>,
    link: watch::Receiver<Link>,
    stop: CancellationToken,
    task: JoinHandle<()>,
    dialer: Arc<Dialer>,
}

impl TestAgent {
    fn start(dialer: Dialer) -> Self {
        let dialer = Arc::new(dialer);
        let report_store = Arc::new(ReportStore::default());
        let (desired_tx, desired) = watch::channel(None);
        let (link_tx, link) = watch::channel(Link::default());
        let session = Session {
            dialer: Arc::clone(&dialer),
            replica: "agent-0".to_owned(),
            cluster_uid: "uid-1".to_owned(),
            kubernetes_version: "v1.36.0".to_owned(),
            report_store: Arc::clone(&report_store),
            desired: desired_tx,
            recorded: Some((version(4), "on record".to_owned())),
            link: link_tx,
            contact: watch::Sender::default(),
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(run(session, stop.clone()));
        Self {
            report_store,
            desired,
            link,
            stop,
            task,
            dialer,
        }
    }

    /// Waits until the link is down for a reason that contains `word`, and returns the reason.
    async fn wait_until_down(&mut self, word: &str) -> String {
        let link = self
            .link
            .wait_for(|link| matches!(link, Link::Down(problem) if problem.contains(word)));
        match &*link.await.unwrap() {
            Link::Down(problem) => problem.clone(),
            Link::Up(_) => unreachable!("it was looked for"),
        }
    }
}

async fn hub_and_agent() -> (FakeHub, TestAgent) {
    let authority = FakeAuthority::new();
    let hub = FakeHub::start(&authority).await;
    let agent = TestAgent::start(authority.dialer(hub.addresses(), Validity::Now));
    (hub, agent)
}

fn version(generation: u64) -> Version {
    Version {
        epoch: 1,
        generation,
    }
}

fn key(name: &str) -> TenantKey {
    TenantKey::new("default", name)
}

fn report(generation: i64) -> TenantReport {
    TenantReport::new(generation, State::new(Truth::True, "Installed", ""))
}

fn desired(generation: u64) -> DesiredState {
    DesiredState {
        version: version(generation),
        chart: ChartState {
            name: "small".to_owned(),
            version: "1.0.0".to_owned(),
            ..ChartState::default()
        },
        ..DesiredState::default()
    }
}

/// Returns the next message that is not a heartbeat.
async fn next_message(session: &mut FakeSession) -> agent_message::Kind {
    loop {
        match session.next().await.unwrap() {
            agent_message::Kind::Heartbeat(_) => {}
            kind => return kind,
        }
    }
}

async fn next_report(session: &mut FakeSession) -> Report {
    match next_message(session).await {
        agent_message::Kind::Report(report) => report,
        kind => panic!("a report was expected: {kind:?}"),
    }
}

/// Receives reports until the full report is complete.
async fn full_report(session: &mut FakeSession) -> (Vec<String>, u64) {
    let mut names = Vec::new();
    loop {
        let report = next_report(session).await;
        names.extend(report.tenants.into_iter().map(|tenant| tenant.name));
        if let Some(number) = report.complete {
            assert!(report.member.is_some());
            return (names, number);
        }
    }
}

/// Returns the next session, after its greeting and full report.
async fn reported_session(hub: &mut FakeHub) -> FakeSession {
    let mut session = hub.session().await;
    session.greet().await;
    full_report(&mut session).await;
    session
}

#[tokio::test]
async fn session_sends_hello_then_full_report_then_changes() {
    let (mut hub, agent) = hub_and_agent().await;
    agent.report_store.set_tenant(&key("a"), Some(report(1)));
    let mut session = hub.session().await;
    let hello = session.greet().await;
    assert_eq!(
        (hello.replica.as_str(), hello.cluster_uid.as_str()),
        ("agent-0", "uid-1")
    );
    assert_eq!(
        hello.applied.unwrap().read(),
        Some((version(4), "on record".to_owned()))
    );
    assert_eq!(full_report(&mut session).await, (vec!["a".to_owned()], 0));

    agent.report_store.set_tenant(&key("b"), Some(report(1)));
    let change = next_report(&mut session).await;
    assert_eq!(change.tenants.len(), 1);
    assert_eq!((change.complete, change.member), (None, None));
    agent.report_store.set_tenant(&key("b"), None);
    let change = next_report(&mut session).await;
    assert_eq!(change.tenants.first().unwrap().state, None);

    agent.stop.cancel();
    agent.task.await.unwrap();
    assert!(!agent.link.get().is_up());
    while session.next().await.is_some() {}
}

#[tokio::test]
async fn heartbeat_carries_report_digest_and_resync_resends_all() {
    let (mut hub, agent) = hub_and_agent().await;
    agent.report_store.set_tenant(&key("a"), Some(report(1)));
    agent.report_store.set_tenant(&key("b"), Some(report(1)));
    let mut session = reported_session(&mut hub).await;
    let mut digest = krypton_types::report_digest::ReportDigest::default();
    digest.set(&key("a"), Some(&report(1)));
    digest.set(&key("b"), Some(&report(1)));
    let expected = Heartbeat::new(digest.value());
    for number in [3, 4] {
        assert_eq!(
            session.next().await,
            Some(agent_message::Kind::Heartbeat(expected))
        );
        session
            .send(hub_message::Kind::Resync(Resync { number }))
            .await;
        let (names, response_number) = full_report(&mut session).await;
        assert_eq!((names.len(), response_number), (2, number));
    }
}

#[tokio::test]
async fn only_readable_desired_state_reaches_slot() {
    let (mut hub, mut agent) = hub_and_agent().await;
    let mut session = reported_session(&mut hub).await;

    let mut unreadable = Desired::from(&desired(6));
    unreadable.digest.clear();
    session.send(hub_message::Kind::Desired(unreadable)).await;
    for generation in [7, 8, 8] {
        let sent = desired(generation);
        session
            .send(hub_message::Kind::Desired(Desired::from(&sent)))
            .await;
        let agent_message::Kind::Applied(applied) = next_message(&mut session).await else {
            panic!("each is answered");
        };
        assert_eq!(applied.read(), Some((sent.version, sent.digest())));
        assert_eq!(agent.desired.get_and_update().as_deref(), Some(&sent));
    }
    // An identical desired state is not a change.
    assert!(!agent.desired.has_changed().unwrap());
}

#[tokio::test]
async fn lost_hub_session_resumes_with_full_report() {
    let authority = FakeAuthority::new();
    let mut hub = FakeHub::start(&authority).await;
    let address = hub.address.to_string();
    let mut agent = TestAgent::start(authority.dialer(hub.addresses(), Validity::Now));
    agent.report_store.set_tenant(&key("a"), Some(report(1)));
    let _session = reported_session(&mut hub).await;
    assert!(agent.link.wait_for(Link::is_up).await.is_ok());
    hub.kill();
    drop(hub);
    agent.wait_until_down(&address).await;
    // Changes during the outage are part of the next full report.
    agent.report_store.set_tenant(&key("b"), Some(report(1)));

    let credential = authority.hub(Validity::Now);
    let mut hub = FakeHub::listen(&authority, credential, FakeResponses::default(), &address).await;
    let mut session = hub.session().await;
    session.greet().await;
    let (names, number) = full_report(&mut session).await;
    assert_eq!((names, number), (vec!["a".to_owned(), "b".to_owned()], 0));
    assert!(agent.link.wait_for(Link::is_up).await.is_ok());
}

#[tokio::test]
async fn drain_ends_session_and_agent_reconnects() {
    let (mut hub, mut agent) = hub_and_agent().await;
    let mut session = hub.session().await;
    session.greet().await;
    let drain = Drain {
        reason: "the hub is stopping".to_owned(),
        reconnect_after_millis: 1,
    };
    session.send(hub_message::Kind::Drain(drain)).await;
    agent.wait_until_down("the hub is stopping").await;
    hub.session().await.greet().await;
}

#[tokio::test]
async fn agent_finds_and_follows_leading_hub() {
    let authority = FakeAuthority::new();
    let mut first = FakeHub::start(&authority).await;
    let mut second = FakeHub::start(&authority).await;
    let addresses = [&first, &second].map(|hub| hub.address.to_string());
    let mut agent = TestAgent::start(authority.dialer(addresses.to_vec(), Validity::Now));
    // A standby hub responds with this status.
    let standby = Status::unavailable("this hub is a standby");
    first.session().await.fail(standby.clone()).await;
    agent.wait_until_down("this hub is a standby").await;
    let mut session = second.session().await;
    session.greet().await;
    agent.link.wait_for(Link::is_up).await.unwrap();

    let drain = Drain {
        reason: "this hub is no longer the leader".to_owned(),
        reconnect_after_millis: 1,
    };
    session.send(hub_message::Kind::Drain(drain)).await;
    agent.wait_until_down("no longer the leader").await;
    // The first hub may not be the leader yet. The agent then tries the other one again.
    first.session().await.fail(standby.clone()).await;
    second.session().await.fail(standby).await;
    let mut session = first.session().await;
    session.greet().await;
    agent.link.wait_for(Link::is_up).await.unwrap();
}

#[tokio::test]
async fn renewed_certificate_opens_new_stream_before_closing_old() {
    let authority = FakeAuthority::new();
    let mut hub = FakeHub::start(&authority).await;
    let mut agent = TestAgent::start(authority.dialer(hub.addresses(), Validity::Now));
    let mut first = reported_session(&mut hub).await;
    agent.link.wait_for(Link::is_up).await.unwrap();
    agent.link.mark_unchanged();
    let renew = || {
        let credential = Some(authority.agent(Validity::Now));
        let config = tls::client_config(&authority.roots(), credential);
        agent.dialer.renew(config.unwrap());
    };

    // While the agent opens the second stream, it still uses the first.
    renew();
    let mut second = hub.session().await;
    agent.report_store.set_tenant(&key("a"), Some(report(1)));
    next_report(&mut first).await;
    // The hub ends the first stream after it has welcomed the second. The agent stays connected.
    second.greet().await;
    first.fail(Status::aborted("another session")).await;
    assert_eq!(full_report(&mut second).await, (vec!["a".to_owned()], 0));
    assert!(agent.link.get_and_update().is_up());

    // A failed attempt leaves the current stream open.
    renew();
    hub.session().await.fail(Status::unavailable("busy")).await;
    agent.report_store.set_tenant(&key("b"), Some(report(1)));
    next_report(&mut second).await;
    let _third = reported_session(&mut hub).await;
    assert!(agent.link.get_and_update().is_up());
}

#[tokio::test]
async fn received_roots_are_forwarded_and_kept_ones_reported() {
    let authority = FakeAuthority::new();
    let mut hub = FakeHub::start(&authority).await;
    let agent = TestAgent::start(authority.dialer(hub.addresses(), Validity::Now));
    let root_updates = agent.dialer.root_updates();
    root_updates.publish_stored(&authority.roots());
    let mut announcements = root_updates.announcements();
    let mut session = hub.session().await;
    let hello = session.greet().await;
    let trusted = RootDigest::from_ders(&authority.roots());
    assert_eq!(hello.trusted_roots.unwrap().read().unwrap(), trusted);
    full_report(&mut session).await;

    let roots = Roots {
        certificates: vec![authority.roots()[0].to_vec().into()],
        renew_within_millis: Some(5),
    };
    session.send(hub_message::Kind::Roots(roots.clone())).await;
    announcements.changed().await.unwrap();
    assert_eq!(announcements.get(), Some(roots.into()));
    root_updates.publish_stored(&authority.roots());
    let agent_message::Kind::TrustedRoots(message) = next_message(&mut session).await else {
        panic!("the stored roots are not announced")
    };
    assert_eq!(message.read().unwrap(), trusted);
}

#[tokio::test]
async fn a_refusal_keeps_the_hubs_words() {
    let (mut hub, mut agent) = hub_and_agent().await;
    let session = hub.session().await;
    session
        .fail(Status::permission_denied("cluster edge-1 is banned"))
        .await;
    let message = agent.wait_until_down("edge-1 is banned").await;
    assert!(message.contains(&hub.address.to_string()), "{message}");
}

#[tokio::test]
async fn link_reports_cause_of_failed_connection() {
    let (authority, other_authority) = (FakeAuthority::new(), FakeAuthority::new());
    let other_hub = FakeHub::start(&other_authority).await;
    let mut agent = TestAgent::start(authority.dialer(other_hub.addresses(), Validity::Now));
    agent.wait_until_down("another CA").await;

    let hub = FakeHub::start(&authority).await;
    let mut agent = TestAgent::start(authority.dialer(hub.addresses(), Validity::Past));
    agent.wait_until_down("as expired or not yet valid").await;
}

#[tokio::test]
async fn incompatible_hub_is_reported_with_its_version() {
    let (mut hub, mut agent) = hub_and_agent().await;
    let session = hub.session().await;
    let welcome = Welcome {
        protocol: 9,
        hub_version: "9.9.9".to_owned(),
        ..Welcome::default()
    };
    session.send(hub_message::Kind::Welcome(welcome)).await;
    agent.wait_until_down("9.9.9").await;
}
