//! Shows the hub's CA, join tokens and enrollment on a simulated API server: single use of tokens, races, and admission.
//! `joining` shows them on a real one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Secret};
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec, SourceRef};
use krypton_hub::agent_server::enrollment_service::{EnrollmentAudit, EnrollmentService, reason};
use krypton_hub::agent_server::join_info::publish as publish_join_info;
use krypton_hub::agent_server::join_token::{self, TokenRefusal};
use krypton_hub::agent_server::listener::Peer;
use krypton_hub::agent_server::metrics::SessionMetrics;
use krypton_hub::ca::{Authority, AuthorityError, CurrentAuthority, read_agent_certificate};
use krypton_hub::home_events::HomeEvents;
use krypton_hub::leader::Leader;
use krypton_hub::members::MemberRegistry;
use krypton_kubectl::Connection;
use krypton_kubectl::join_info;
use krypton_kubectl::join_token::create as create_token;
use krypton_proto::v1::enrollment_server::Enrollment as _;
use krypton_proto::v1::{EnrollRequest, EnrollResponse};
use krypton_runtime::clock::wall as now;
use krypton_runtime::watchdog::Watchdog;
use krypton_tests::{Merge as _, TestResult, assert_contains, eventually_within};
use krypton_types::ca_rotation::{self, BlockReason, RotationPhase, RotationStage};
use krypton_types::join_info::{JoinInfo, NAME as JOIN_INFO};
use krypton_types::join_token::{Caller, LABEL as TOKEN_LABEL};
use krypton_types::names;
use krypton_types::root_digest::RootDigest;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;
use tonic::{Code, Request, Status};

use crate::attacks::assert_refused;
use crate::simulated_home::SimulatedHome;

const NAMESPACE: &str = "default";
const HOUR: Duration = Duration::from_secs(60 * 60);
const HERE: &str = "6f1f2f3c-0000-4000-8000-0123456789ab";

fn request() -> Result<Vec<u8>> {
    let key = KeyPair::generate()?;
    let request = CertificateParams::default().serialize_request(&key)?;
    Ok(request.der().to_vec())
}

async fn token(client: &Client, cluster: &str) -> Result<String> {
    let home = Connection::new(client.clone(), "home");
    let created = create_token(&home, NAMESPACE, cluster, HOUR, now()).await?;
    Ok(created.token)
}

/// Returns a hub's enrollment service, which records events.
async fn hub(client: &Client) -> Result<(EnrollmentService, Arc<Authority>)> {
    let authority = Authority::load_or_create(client.clone(), NAMESPACE, "a.krypton").await;
    let live = Arc::new(CurrentAuthority::new(authority?));
    let authority = live.get();
    let audit = EnrollmentAudit {
        members: Arc::new(MemberRegistry::default()),
        events: HomeEvents::start(
            client.clone(),
            "test".to_owned(),
            Leader::always_leading(),
            &Watchdog::default(),
        ),
        metrics: Arc::new(SessionMetrics::default()),
    };
    let namespace = NAMESPACE.to_owned();
    let hub = EnrollmentService::new(
        client.clone(),
        namespace,
        live,
        audit,
        Leader::always_leading(),
    );
    Ok((hub, authority))
}

/// Returns the events of a member, as (type, reason, action, message).
async fn member_events(client: &Client, member: &str) -> Result<Vec<[String; 4]>> {
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let all = events.list(&ListParams::default()).await?.items;
    let of_member = all
        .into_iter()
        .filter(|event| event.involved_object.name.as_deref() == Some(member));
    let fields = of_member.map(|event| {
        [event.type_, event.reason, event.action, event.message].map(Option::unwrap_or_default)
    });
    Ok(fields.collect())
}

async fn enroll(
    hub: &EnrollmentService,
    token: &str,
    certificate_request: &[u8],
    cluster_uid: &str,
) -> Result<EnrollResponse, Status> {
    let mut request = Request::new(EnrollRequest {
        token: token.to_owned(),
        certificate_request: certificate_request.to_vec().into(),
        cluster_uid: cluster_uid.to_owned(),
        agent_version: "0.1.0".to_owned(),
    });
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    let peer = Peer::new(address, Err("no client certificate".to_owned()));
    request.extensions_mut().insert(peer);
    hub.enroll(request).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn ca_is_created_once_and_unreadable_one_kept() -> TestResult {
    let cluster = SimulatedHome::start().await?;
    let client = cluster.client();
    let load = || Authority::load_or_create(client.clone(), NAMESPACE, "a.krypton");
    let (one, other) = tokio::join!(load(), load());
    let (one, other) = (one?, other?);
    assert_eq!(one.roots(), other.roots());
    assert_eq!(load().await?.ca_pem(), one.ca_pem());

    let api: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    api.merge(names::CA_SECRET, &json!({"stringData": {"ca.key": "x"}}))
        .await?;
    let error = load().await.unwrap_err();
    assert!(matches!(error, AuthorityError::Unusable { .. }), "{error}");
    let secret = api.get(names::CA_SECRET).await?;
    assert_eq!(secret.data.unwrap()["ca.key"].0, b"x");

    let error = Authority::load_or_create(client, "nowhere", "a.krypton").await;
    let error = error.unwrap_err().to_string();
    assert_contains!(error, "nowhere/krypton-hub-ca");
    Ok(())
}

#[tokio::test]
async fn only_one_key_redeems_contested_token() -> TestResult {
    let cluster = SimulatedHome::start().await?;
    let client = cluster.client();
    let token = token(&client, "edge-1").await?;
    let race = (0..8).map(|index| {
        let (client, token) = (client.clone(), token.clone());
        async move {
            let found = join_token::look_up(client.clone(), NAMESPACE, &token)
                .await
                .unwrap();
            let key = format!("key-{}", index / 2);
            let caller = Caller {
                key: &key,
                cluster_uid: HERE,
            };
            let leader = Leader::always_leading();
            let redeemed =
                join_token::redeem(client, &leader, NAMESPACE, found, caller, "uid", now()).await;
            (key, redeemed.unwrap())
        }
    });
    let mut winners = Vec::new();
    for (key, outcome) in futures::future::join_all(race).await {
        match outcome {
            Ok(()) => winners.push(key),
            Err(refusal) => assert!(matches!(refusal, TokenRefusal::Used { .. }), "{refusal}"),
        }
    }
    // Only the two requests with the winning key succeed.
    assert_eq!(winners.len(), 2, "{winners:?}");
    assert_eq!(winners[0], winners[1]);
    Ok(())
}

#[tokio::test]
async fn concurrent_enrollments_with_one_token_yield_one_certificate() -> TestResult {
    let cluster = SimulatedHome::start().await?;
    let client = cluster.client();
    let (hub, _) = hub(&client).await?;
    for round in 0..5 {
        let member = format!("edge-{round}");
        let token = token(&client, &member).await?;
        let requests = [request()?, request()?];
        let (one, other) = tokio::join!(
            enroll(&hub, &token, &requests[0], HERE),
            enroll(&hub, &token, &requests[1], HERE),
        );
        let (won, lost): (Vec<_>, Vec<_>) = [one, other].into_iter().partition(Result::is_ok);
        assert_eq!((won.len(), lost.len()), (1, 1), "{won:?} {lost:?}");
        let lost = lost.into_iter().next().unwrap().unwrap_err();
        assert_eq!(lost.code(), Code::PermissionDenied);
        assert!(lost.message().contains("another key"), "{}", lost.message());
    }
    Ok(())
}

#[tokio::test]
async fn enrollment_events_cover_every_outcome_without_secret() -> TestResult {
    let cluster = SimulatedHome::start().await?;
    let client = cluster.client();
    let (hub, _) = hub(&client).await?;
    let members: Api<EdgeCluster> = Api::all(client.clone());
    let token = token(&client, "edge-1").await?;
    let (name, secret) = token.split_once('.').unwrap();
    let request_1 = request()?;
    enroll(&hub, &token, &request_1, HERE).await?;
    enroll(&hub, &token, &request_1, HERE).await?;
    let request_2 = request()?;
    let guessed_token = format!("{name}.{}", "0".repeat(64));
    enroll(&hub, &token, &request_2, HERE).await.unwrap_err();
    enroll(&hub, &token, &request_1, "elsewhere")
        .await
        .unwrap_err();
    enroll(&hub, &guessed_token, &request_2, HERE)
        .await
        .unwrap_err();
    members
        .merge("edge-1", &json!({"spec": {"banned": true}}))
        .await?;
    enroll(&hub, &token, &request_1, HERE).await.unwrap_err();
    members.delete("edge-1", &DeleteParams::default()).await?;
    enroll(&hub, &token, &request_1, HERE).await.unwrap_err();

    let expected = [
        ("Normal", reason::ENROLLED, "Enroll"),
        ("Normal", reason::ENROLLED, "EnrollAgain"),
        ("Warning", reason::REFUSED, "TokenUsed"),
        ("Warning", reason::REFUSED, "TokenUsedElsewhere"),
        ("Warning", reason::REFUSED, "TokenUnknown"),
        ("Warning", reason::REFUSED, "Banned"),
        ("Warning", reason::REFUSED, "TokenRevoked"),
    ];
    let all = eventually_within("the events", Duration::from_secs(60), async || {
        let all = member_events(&client, "edge-1").await?;
        let exists = |expected_event: &(&str, &str, &str)| {
            all.iter()
                .any(|event| (&*event[0], &*event[1], &*event[2]) == *expected_event)
        };
        match expected
            .iter()
            .find(|expected_event| !exists(expected_event))
        {
            None => Ok(Some(all)),
            Some(missing) => anyhow::bail!("no {missing:?} among {all:?}"),
        }
    })
    .await?;
    assert_eq!(all.len(), expected.len(), "{all:?}");
    for event in &all {
        assert!(
            event[3].contains("127.0.0.1:1") && event[3].contains(name),
            "{event:?}"
        );
        assert!(!event[3].contains(secret), "{event:?}");
    }
    Ok(())
}

#[tokio::test]
async fn guessed_tokens_are_throttled_but_valid_agent_enrolls() -> TestResult {
    let cluster = SimulatedHome::start().await?;
    let client = cluster.client();
    let (hub, _) = hub(&client).await?;
    let token = token(&client, "edge-1").await?;
    let (name, _) = token.split_once('.').unwrap();
    let signing_request = request()?;
    let mut exhausted = 0;
    for number in 0..20_u64 {
        let guessed_token = format!("{name}.{number:064x}");
        let status = enroll(&hub, &guessed_token, &signing_request, HERE)
            .await
            .unwrap_err();
        match status.code() {
            Code::PermissionDenied => {}
            Code::ResourceExhausted => exhausted += 1,
            _ => panic!("{status:?}"),
        }
    }
    assert!(exhausted > 0);
    eventually_within(
        "the valid token to be accepted",
        Duration::from_secs(60),
        async || Ok(Some(enroll(&hub, &token, &signing_request, HERE).await?)),
    )
    .await?;
    Ok(())
}

#[tokio::test]
async fn only_tokens_long_expired_are_swept() -> TestResult {
    let cluster = SimulatedHome::start().await?;
    let client = cluster.client();
    let api: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let past = |hours: i64| Timestamp::from_second(now().as_second() - hours * 3600).unwrap();
    let connection = Connection::new(client.clone(), "home");
    for hours in [48, 26, 24, 2, 0] {
        create_token(&connection, NAMESPACE, "edge-1", HOUR, past(hours)).await?;
    }
    let foreign: Secret = serde_json::from_value(json!({
        "metadata": {"name": "foreign", "labels": {TOKEN_LABEL: "true"}},
        "stringData": {"expires": "1970-01-01T00:00:00Z"},
    }))?;
    api.create(&PostParams::default(), &foreign).await?;
    let swept = join_token::delete_expired(client.clone(), NAMESPACE, now()).await;
    assert_eq!(swept?, 2);
    let swept = join_token::delete_expired(client, NAMESPACE, now()).await;
    assert_eq!(swept?, 0);
    let remaining = api.list(&Default::default()).await?.items;
    assert_eq!(remaining.len(), 4);
    Ok(())
}

#[tokio::test]
async fn how_to_join_is_published_and_repaired() -> TestResult {
    let cluster = SimulatedHome::start().await?;
    let client = cluster.client();
    let info = |address: &str| JoinInfo {
        ca_pem: "PEM\n".to_owned(),
        addresses: vec![address.to_owned()],
        version: "0.1.0".to_owned(),
    };
    let publish = |info: JoinInfo| {
        let client = client.clone();
        async move {
            publish_join_info(client, NAMESPACE, &info, &|| true)
                .await
                .unwrap()
        }
    };
    let connection = Connection::new(client.clone(), "home");
    let read = || join_info::read(&connection, NAMESPACE);
    assert_eq!(read().await?, None);
    publish(info("a:1")).await;
    assert_eq!(read().await?, Some(info("a:1")));
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let version = || async { api.get(JOIN_INFO).await.unwrap().metadata.resource_version };
    let before = version().await;
    publish(info("a:1")).await;
    assert_eq!(version().await, before, "nothing to write");
    publish(info("b:2")).await;
    assert_eq!(read().await?, Some(info("b:2")));
    api.delete(JOIN_INFO, &DeleteParams::default()).await?;
    publish(info("b:2")).await;
    assert_eq!(read().await?, Some(info("b:2")));
    Ok(())
}

#[tokio::test]
async fn token_enrolls_one_agent_and_explains_refusals() -> TestResult {
    let cluster = SimulatedHome::start().await?;
    let client = cluster.client();
    let (hub, authority) = hub(&client).await?;
    let members: Api<EdgeCluster> = Api::all(client.clone());

    // The hub creates the EdgeCluster of a new member, and binds the certificate to it.
    let (token_1, mine) = (token(&client, "edge-1").await?, request()?);
    let response = enroll(&hub, &token_1, &mine, HERE).await?;
    let member = members.get("edge-1").await?;
    let certificate = read_agent_certificate("a.krypton", &response.certificates[0])?;
    assert_eq!(certificate.cluster, "edge-1");
    assert_eq!(Some(certificate.uid.clone()), member.metadata.uid);
    assert_eq!(response.roots[0][..], authority.roots()[0][..]);

    // The same key can enroll again.
    enroll(&hub, &token_1, &mine, HERE).await?;

    // Invalid input. `attacks::bundle` has the tokens that are used, guessed, revoked or expired.
    for malformed in ["x", ""] {
        let result = enroll(&hub, malformed, &mine, HERE).await;
        assert_refused(result, Code::PermissionDenied, "unknown join token");
    }
    let token_2 = token(&client, "edge-2").await?;
    let garbled = enroll(&hub, &token_2, b"x", HERE).await;
    assert_refused(garbled, Code::InvalidArgument, "PKCS#10");
    let nameless = enroll(&hub, &token_2, &mine, "").await;
    assert_refused(nameless, Code::InvalidArgument, "UID");
    let home_itself = token(&client, "self-cluster").await?;
    let home_itself = enroll(&hub, &home_itself, &mine, HERE).await;
    assert_refused(home_itself, Code::FailedPrecondition, "self-cluster");

    // Another cluster under a known name is rejected, which doesn't use up its token.
    let known = json!({"clusterUID": "there"});
    members.merge_status("edge-1", known).await?;
    let token_3 = token(&client, "edge-1").await?;
    let rebuilt = enroll(&hub, &token_3, &request()?, HERE).await;
    assert_refused(
        rebuilt,
        Code::FailedPrecondition,
        "kubectl krypton join edge-1 --replace",
    );
    let known = request()?;
    enroll(&hub, &token_3, &known, "there").await?;

    // A banned member is rejected, even with the key that has used the token.
    members
        .merge("edge-1", &json!({"spec": {"banned": true}}))
        .await?;
    let banned = enroll(&hub, &token_3, &known, "there").await;
    assert_refused(banned, Code::PermissionDenied, "banned");

    cluster.stop();
    let away = enroll(&hub, &token_2, &mine, HERE).await;
    assert_refused(away, Code::Unavailable, "retry later");
    Ok(())
}

#[tokio::test]
async fn ca_rotation_waits_for_enrolled_agent_never_connected() -> TestResult {
    let cluster = SimulatedHome::start().await?;
    let client = cluster.client();
    let (hub, _) = hub(&client).await?;
    let members: Api<EdgeCluster> = Api::all(client.clone());
    let mut by_source = EdgeCluster::new("edge-1", EdgeClusterSpec::default());
    by_source.spec.source_ref = Some(SourceRef {
        kind: "Secret".to_owned(),
        namespace: Some(NAMESPACE.to_owned()),
        name: Some("edge-1".to_owned()),
    });
    let params = PostParams::default();
    members.create(&params, &by_source).await?;
    let blocking_members = async || {
        let stage = RotationStage {
            phase: RotationPhase::Announced,
            root: RootDigest::from_der(b"next"),
        };
        let all = members.list(&ListParams::default()).await.unwrap().items;
        let blocking_members = ca_rotation::blocking_members(stage, &all, now());
        let blocking_members = blocking_members
            .into_iter()
            .map(|member| (member.name, member.reason));
        blocking_members.collect::<Vec<_>>()
    };
    assert_eq!(blocking_members().await, []);

    let token = token(&client, "edge-1").await?;
    let response = enroll(&hub, &token, &request()?, HERE).await?;
    let unheard = [("edge-1".to_owned(), BlockReason::NotConnected)];
    assert_eq!(blocking_members().await, unheard);
    let certificate = read_agent_certificate("a.krypton", &response.certificates[0])?;
    let status = members.get("edge-1").await?.status.unwrap();
    assert_eq!(
        status.pending_certificate_expiry.unwrap().0,
        certificate.not_after
    );

    // Simulates an agent that has connected and trusts the next root.
    let status = json!({
        "certificateExpiry": certificate.not_after,
        "trustedRoots": {"trusted": [RootDigest::from_der(b"next").to_string()]},
    });
    members.merge_status("edge-1", status).await?;
    assert_eq!(blocking_members().await, []);
    Ok(())
}
