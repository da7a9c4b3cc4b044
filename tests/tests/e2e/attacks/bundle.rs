//! Plays holders of old join bundles, at the agents' port of a real hub.

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_hub::ca::Authority;
use krypton_kubectl::{Connection, join_token};
use krypton_proto::v1::{EnrollRequest, EnrollResponse};
use krypton_runtime::clock::wall as now;
use krypton_runtime::tls;
use krypton_tests::fleet::HUB_NAMESPACE;
use krypton_tests::{Cluster, Parts, TestResult, eventually, join_bundle};
use krypton_types::join_bundle::JoinBundle;
use krypton_types::join_token::LONGEST_LIFE;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};
use tonic::{Code, Status};

use super::{assert_refused, dialer, signing_request, start_hub};

const HERE: &str = "6f1f2f3c-0000-4000-8000-0123456789ab";

async fn enroll(
    bundle: &JoinBundle,
    token: &str,
    request: &[u8],
    cluster_uid: &str,
) -> Result<EnrollResponse, Status> {
    let tls = tls::client_config(&bundle.roots().unwrap(), None).unwrap();
    let hub = dialer(&bundle.addresses, tls).connect().await.unwrap();
    let request = EnrollRequest {
        token: token.to_owned(),
        certificate_request: request.to_vec().into(),
        cluster_uid: cluster_uid.to_owned(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let response = hub.enrollment().enroll(request).await?;
    Ok(response.into_inner())
}

#[tokio::test]
async fn old_bundle_grants_no_certificate() -> TestResult {
    let home = Cluster::start("attack-bundle", Parts::ControlPlane).await?;
    let _hub = start_hub(&home).await;
    let read = async |name| JoinBundle::parse(&join_bundle(&home, name).await.unwrap()).unwrap();
    let denied = Code::PermissionDenied;
    let (request_1, request_2) = (signing_request(&[]), signing_request(&[]));

    let used = read("edge-1").await;
    let token = used.token.as_str();
    enroll(&used, token, &request_1, HERE).await?;
    let with_other_key = enroll(&used, token, &request_2, HERE).await;
    assert_refused(with_other_key, denied, "used already by another key");
    let elsewhere = enroll(&used, token, &request_1, "elsewhere").await;
    assert_refused(elsewhere, denied, "used already on another cluster");

    // An unknown token, a wrong secret and the token of a second hub get the same response.
    let (name, _) = token.split_once('.').unwrap();
    let unknown = format!("{}.{}", "0".repeat(16), "0".repeat(64));
    let (connection, life) = (Connection::new(home.client(), "home"), LONGEST_LIFE);
    let create_token = async |namespace, at| {
        let created = join_token::create(&connection, namespace, "edge-1", life, at);
        created.await.unwrap().token
    };
    let of_another_hub = create_token("kube-public", now()).await;
    let guessed_token = format!("{name}.{}", "0".repeat(64));
    let mut messages = Vec::new();
    for wrong_token in [guessed_token, unknown, of_another_hub] {
        let response = enroll(&used, &wrong_token, &request_2, HERE).await;
        messages.push(assert_refused(response, denied, "unknown join token"));
    }
    messages.dedup();
    assert_eq!(messages.len(), 1, "{messages:?}");
    let day_before_yesterday = now() - jiff::SignedDuration::from_hours(48);
    let expired = create_token(HUB_NAMESPACE, day_before_yesterday).await;
    let late = enroll(&used, &expired, &request_2, HERE).await;
    assert_refused(late, denied, "expired at");
    // This hub can't present a certificate from the second hub's CA.
    let foreign = Authority::generate("other.krypton", now())?;
    let tls = tls::client_config(&foreign.roots(), None)?;
    let led_here = dialer(&used.addresses, tls).connect().await;
    assert!(led_here.is_err(), "{led_here:?}");

    // No bundle from before the deletion creates the EdgeCluster again.
    let [used, before] = [read("edge-9").await, read("edge-9").await];
    enroll(&used, &used.token, &request_1, HERE).await?;
    let meanwhile = read("edge-9").await;
    let members: Api<EdgeCluster> = Api::all(home.client());
    let params = DeleteParams::default();
    members.delete("edge-9", &params).await?;
    let old = [&used, &before, &meanwhile];
    for bundle in old {
        let result = enroll(bundle, &bundle.token, &request_1, HERE).await;
        assert_refused(result, denied, "has been deleted since");
    }
    let names = async || {
        let all = members.list(&ListParams::default()).await.unwrap();
        let names = all.items.iter().map(ResourceExt::name_any);
        names.collect::<Vec<_>>()
    };
    assert_eq!(names().await, ["edge-1"]);
    // The same holds after an operator has invited its successor.
    eventually("a later bundle to be valid", async || {
        let invited = read("edge-9").await;
        let enrolled = enroll(&invited, &invited.token, &request_2, HERE).await;
        Ok(Some(enrolled?))
    })
    .await?;
    for bundle in old {
        let result = enroll(bundle, &bundle.token, &request_1, HERE).await;
        assert_refused(result, denied, "");
    }
    Ok(())
}
