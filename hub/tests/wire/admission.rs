//! Tests which agents the hub admits: certificates, keys, EdgeClusters and clocks, at the start of a session and
//! during it.

use krypton_hub::ca::read_agent_certificate;
use krypton_hub::members::agent_keys;
use krypton_hub::members::member::Admission;
use krypton_proto::v1::{RenewRequest, Report, Tenant};

use super::*;

#[tokio::test]
async fn hub_with_different_ca_is_rejected() {
    let (ours, other) = (TestHub::new(), TestHub::new().with_members(&names(1)));
    let port = other.listen(None).await;
    // Our roots, but the listener of the other hub.
    let message = dial_error(&ours.dialer(port.address, "edge-0")).await;
    assert!(
        message.contains(&port.address.to_string()) && message.contains("CA"),
        "{message}"
    );
}

#[tokio::test]
async fn agent_of_foreign_authority_is_rejected() {
    let (ours, other) = (TestHub::new().with_members(&names(1)), TestHub::new());
    let port = ours.listen(None).await;
    let credential = other.credential("edge-0", &uid("edge-0"), clock::wall(), DAY);
    let dialer = ours.dialer_with(port.address, Some(credential));
    let mut agent = Agent::start(dialer, "a", "c");
    check_link_error(&mut agent, "certificate").await;
    agent.stop().await;
}

#[tokio::test]
async fn an_expired_certificate_is_not_let_in() {
    let (hub, port) = TestHub::start(1).await;
    let long_ago = clock::wall() - SignedDuration::from_hours(24 * 60);
    let credential = hub.credential("edge-0", &uid("edge-0"), long_ago, DAY);
    let mut agent = Agent::start(hub.dialer_with(port.address, Some(credential)), "a", "c");
    check_link_error(&mut agent, "expired").await;
    agent.stop().await;
}

#[tokio::test]
async fn a_session_ends_with_its_certificate() {
    let (hub, port) = TestHub::start(1).await;
    let life = Duration::from_secs(3);
    let credential = hub.credential("edge-0", &uid("edge-0"), clock::wall(), life);
    let dialer = hub.dialer_with(port.address, Some(credential));
    let mut stream = RawSession::greet(&dialer).await.unwrap();
    check_unauthenticated(&stream.closing_status().await);
}

/// TLS or the hub may reject a certificate, and the client may see only the closed connection.
fn check_unauthenticated(status: &Status) {
    let codes = [Code::Unauthenticated, Code::Unknown, Code::Unavailable];
    assert!(codes.contains(&status.code()), "{status:?}");
}

#[tokio::test]
async fn missing_certificate_or_hub_certificate_is_rejected() {
    let (hub, port) = TestHub::start(1).await;
    let hub_credential = hub.authority.get().hub_credential(clock::wall()).unwrap();
    for credential in [None, Some(hub_credential)] {
        let dialer = hub.dialer_with(port.address, credential);
        let Ok(connection) = dialer.connect().await else {
            continue;
        };
        let mut fleet = connection.fleet();
        let (_sender, messages) = mpsc::channel::<AgentMessage>(1);
        let answer = fleet.connect(ReceiverStream::new(messages)).await;
        check_unauthenticated(&answer.unwrap_err());
    }
}

#[tokio::test]
async fn stale_or_unknown_member_is_refused_with_remedy() {
    let (hub, port) = TestHub::start(1).await;
    for (name, uid) in [("edge-0", "uid-before"), ("edge-7", "uid-of-edge-7")] {
        let credential = hub.credential(name, uid, an_hour_ago(), DAY);
        let dialer = hub.dialer_with(port.address, Some(credential));
        let status = RawSession::greet(&dialer).await.err().expect("a refusal");
        check_status(&status, Code::PermissionDenied, "kubectl krypton join");
    }
}

#[tokio::test]
async fn new_enrollment_retries_until_edge_cluster_is_seen() {
    let (mut hub, port) = TestHub::start(1).await;
    let cases = [
        // An EdgeCluster recreated, and one created.
        ("edge-0", "uid-after", 0),
        ("edge-7", "uid-of-edge-7", 0),
        // By a hub whose clock is ahead.
        ("edge-7", "uid-of-edge-7", -30),
    ];
    let open = async |hub: &TestHub, (name, uid, age): (&str, &str, i64)| {
        let issued_at = clock::wall() - SignedDuration::from_secs(age);
        let credential = hub.credential(name, uid, issued_at, DAY);
        let dialer = hub.dialer_with(port.address, Some(credential));
        RawSession::greet(&dialer).await
    };
    let code = async |hub: &TestHub, case| open(hub, case).await.err().map(|status| status.code());
    for case in cases {
        assert_eq!(code(&hub, case).await, Some(Code::Unavailable), "{case:?}");
    }
    for age in [120, -3600] {
        let old = ("edge-7", "uid-of-edge-7", age);
        assert_eq!(code(&hub, old).await, Some(Code::PermissionDenied), "{age}");
    }
    assert_eq!(hub.metrics.sessions.get(), 0);
    // A member whose EdgeCluster was deleted is rejected, even with a new certificate.
    hub.members
        .retain(|_| false, |name| name == "edge-0", |_| true);
    let deleted = ("edge-0", "uid-of-edge-0", 0);
    assert_eq!(code(&hub, deleted).await, Some(Code::PermissionDenied));

    hub = hub.with_members(&["edge-7".to_owned()]);
    let mut stream = open(&hub, cases[1]).await.unwrap();
    stream.receive_welcome().await;
}

fn set_admission(hub: &TestHub, admission: Admission) {
    let member = hub.members.get("edge-0").unwrap();
    member.admission.send_replace(admission);
}

#[tokio::test]
async fn agent_session_is_bound_to_member_and_cluster() {
    let (hub, port) = TestHub::start(2).await;
    // Messages contain no member name. A Tenant with the name of a member has no effect.
    let first = Agent::start(hub.dialer(port.address, "edge-0"), "a", "cluster-0");
    hub.wait_for_observation("edge-0", |observation| observation.uid.is_some())
        .await;
    let mut stream = RawSession::opened(
        &hub.dialer(port.address, "edge-0"),
        FromAgent::Hello(Hello {
            replica: "edge-1".to_owned(),
            ..hello(1, "0.1.0")
        }),
    )
    .await;
    stream.receive_welcome().await;
    stream
        .send(FromAgent::Report(Report {
            tenants: vec![Tenant {
                namespace: "edge-1".to_owned(),
                name: "edge-1".to_owned(),
                state: None,
            }],
            member: Some(lease_holder_report().into()),
            complete: Some(0),
            ..Report::default()
        }))
        .await;
    hub.wait_for_holder("edge-0").await;
    assert_eq!(hub.members.observation("edge-1"), None);
    // The member is now recorded with another cluster.
    let recorded = Admission {
        cluster_uid: Some("cluster-0".to_owned()),
        ..Admission::default()
    };
    set_admission(&hub, recorded);
    let dialer = hub.dialer(port.address, "edge-0");
    let mut clone = RawSession::greet(&dialer).await.unwrap();
    let status = clone.closing_status().await;
    check_status(&status, Code::FailedPrecondition, "used on a second one");
    assert!(!status.message().contains("cluster-0"), "{status:?}");
    assert!(first.link.get().is_up(), "the established session stays");
    first.stop().await;
}

#[tokio::test]
async fn clock_of_agent_is_compared_in_each_session() {
    let (hub, port) = TestHub::start(1).await;
    for (seconds_ahead, truth) in [(-120, Truth::False), (0, Truth::True)] {
        let greeting = Hello {
            now: clock::wall().as_second() + seconds_ahead,
            ..hello(1, "0.1.0")
        };
        let dialer = hub.dialer(port.address, "edge-0");
        let session = RawSession::open(&dialer, FromAgent::Hello(greeting)).await;
        let mut session = session.unwrap();
        session.receive_welcome().await;
        hub.wait_for_observation("edge-0", |observation| {
            let clock = observation.clock.as_ref();
            clock.is_some_and(|clock| clock.truth == truth)
        })
        .await;
    }
}

#[tokio::test]
async fn certificate_renews_for_requesting_member_unless_removed() {
    let (hub, port) = TestHub::start(1).await;
    let connection = hub.dialer(port.address, "edge-0").connect().await.unwrap();
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    // The hub ignores the subject of the request.
    let named = rcgen::CertificateParams::new(vec!["edge-1".to_owned()]).unwrap();
    let request = RenewRequest {
        certificate_request: named.serialize_request(&key).unwrap().der().to_vec().into(),
    };
    let renewed = connection
        .fleet()
        .renew(request.clone())
        .await
        .unwrap()
        .into_inner();
    let certificate = read_agent_certificate(TRUST_DOMAIN, &renewed.certificates[0]).unwrap();
    assert_eq!(certificate.cluster, "edge-0");
    assert_eq!(certificate.uid, uid("edge-0"));
    hub.members.retain(|_| false, |_| false, |_| true);
    let status = connection.fleet().renew(request).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
}

#[tokio::test]
async fn stolen_key_is_refused_and_reported_after_renewal() {
    let (hub, port, mut agent) = TestHub::start_with_agent().await;
    // A thief has renewed a copied key.
    let renewed = hub.credential("edge-0", &uid("edge-0"), an_hour_ago(), DAY);
    let authority = hub.authority.get();
    let renewed = read_agent_certificate(authority.trust_domain(), &renewed.certificates[0]);
    let keys = agent_keys::enrolled(None, renewed.unwrap().recorded_key());
    let recorded = Admission {
        keys: Some(keys),
        ..Admission::default()
    };
    set_admission(&hub, recorded);
    agent.wait_for_lost_link("voids all older keys").await;
    hub.wait_for_observation("edge-0", |observation| observation.key_refused.is_some())
        .await;
    agent.stop().await;
    let dialer = hub.dialer(port.address, "edge-0");
    let renewal = dialer.connect().await.unwrap();
    let status = renewal.fleet().renew(RenewRequest::default()).await;
    assert_eq!(status.unwrap_err().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn agent_reconnects_with_newer_certificate() {
    let (hub, port) = TestHub::start(1).await;
    let dialer = hub.dialer(port.address, "edge-0");
    let mut agent = Agent::start(Arc::clone(&dialer), "a", "c");
    agent.wait_for_chart("1.0.0").await;
    let longer = DAY * 2;
    let credential = hub.credential("edge-0", &uid("edge-0"), clock::wall(), longer);
    let not_after = clock::wall() + longer - DAY / 2;
    dialer.renew(tls::client_config(&hub.authority.get().roots(), Some(credential)).unwrap());
    hub.wait_for_observation("edge-0", |observation| {
        observation
            .certificate
            .is_some_and(|certificate| certificate.not_after > not_after)
    })
    .await;
    agent.stop().await;
}

#[tokio::test]
async fn banned_member_is_disconnected_immediately() {
    let (hub, _port, mut agent) = TestHub::start_with_agent().await;
    let refused = Admission {
        refused: Some("spec.banned is set".to_owned()),
        ..Admission::default()
    };
    set_admission(&hub, refused);
    agent.wait_for_lost_link("spec.banned").await;
    agent.stop().await;
}

#[tokio::test]
async fn deleted_or_recreated_edge_cluster_disconnects_member() {
    for is_recreated in [false, true] {
        let (hub, _port, mut agent) = TestHub::start_with_agent().await;
        if is_recreated {
            hub.members.get_or_create("edge-0", "another-uid");
        } else {
            hub.members.retain(|_| false, |_| false, |_| true);
        }
        agent.wait_for_lost_link("kubectl krypton join").await;
        agent.stop().await;
    }
}

#[tokio::test]
async fn small_clock_skew_is_harmless_large_is_reported() {
    for hours in [-1, 1] {
        let hub =
            TestHub::with_clock_offset(SignedDuration::from_hours(hours)).with_members(&names(1));
        let port = hub.listen(None).await;
        let issued_at = clock::wall() + hub.clock_offset;
        let credential = hub.credential("edge-0", &uid("edge-0"), issued_at, DAY);
        let mut agent = Agent::start(hub.dialer_with(port.address, Some(credential)), "a", "c");
        agent.wait_for_chart("1.0.0").await;
        agent.stop().await;
    }
    let hub = TestHub::with_clock_offset(SignedDuration::from_hours(72)).with_members(&names(1));
    let port = hub.listen(None).await;
    let message = dial_error(&hub.dialer_with(port.address, None)).await;
    assert!(message.contains("clock"), "{message}");
}
