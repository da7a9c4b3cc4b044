//! Verifies that an expiring certificate is reported on the EdgeCluster, in the metrics, and in one event, also after a
//! restart of the hub.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Event;
use krypton_agent::session::connect::Dialer;
use krypton_agent::session::{self, Link, Session};
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec};
use krypton_hub::ca::Authority;
use krypton_reconciler::report_store::ReportStore;
use krypton_runtime::clock::wall;
use krypton_runtime::tls::{self, Credential};
use krypton_tests::{
    Cluster, Hub, HubOptions, Parts, TestResult, assert_contains,
    fleet::{CONNECTED, FleetClient, HUB_NAMESPACE},
};
use krypton_types::validity::AGENT_CERTIFICATE_LIFE;
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

const SOON: (&str, &str, &str) = ("CertificateCurrent", "False", "CertificateExpiresSoon");
const CURRENT: (&str, &str, &str) = ("CertificateCurrent", "True", "Current");

/// Starts an agent's session without a cluster, with a certificate that was issued at this time.
async fn connect(
    home: &Cluster,
    hub: &Hub,
    uid: &str,
    key: &KeyPair,
    made: Timestamp,
) -> TestResult<DropGuard> {
    let authority = Authority::load_or_create(home.client(), HUB_NAMESPACE, "test.krypton").await?;
    let request = CertificateParams::default().serialize_request(key)?;
    let life = AGENT_CERTIFICATE_LIFE;
    let certificates = authority.sign_agent(request.der(), "edge-1", uid, made, life);
    let credential = Credential {
        certificates: certificates?,
        key: PrivateKeyDer::try_from(key.serialize_der())?,
    };
    let tls = tls::client_config(&authority.roots(), Some(credential))?;
    let session = Session {
        dialer: Arc::new(Dialer::new(vec![hub.agents_address().to_string()], tls)),
        replica: "one".to_owned(),
        cluster_uid: "a-cluster".to_owned(),
        kubernetes_version: "v1.36.0".to_owned(),
        report_store: Arc::new(ReportStore::default()),
        desired: watch::channel(None).0,
        recorded: None,
        link: watch::channel(Link::default()).0,
        contact: watch::Sender::default(),
    };
    let stop = CancellationToken::new();
    tokio::spawn(session::run(session, stop.clone()));
    Ok(stop.drop_guard())
}

/// Returns the number of reported events.
async fn event_count(home: &Cluster) -> i32 {
    let events: Api<Event> = Api::namespaced(home.client(), "default");
    let params = ListParams::default().fields("involvedObject.name=edge-1");
    let all = events.list(&params).await.unwrap().items;
    let soon = all
        .iter()
        .filter(|event| event.reason.as_deref() == Some(SOON.2));
    soon.map(|event| {
        let series = event.series.as_ref().and_then(|series| series.count);
        series.unwrap_or(1)
    })
    .sum()
}

#[tokio::test]
async fn expiring_certificate_is_reported_once_across_restart() -> TestResult {
    let home = Cluster::start("expiry", Parts::ControlPlane).await?;
    let flags = ["--self-cluster=false", "--chart-install-crds=false"];
    let options = HubOptions::new(home.kubeconfig()).args(flags);
    let mut hub = Hub::start_ready(&options).await?;
    let fleet_client = FleetClient::new(&home);
    let members: Api<EdgeCluster> = Api::all(home.client());
    let member = EdgeCluster::new("edge-1", EdgeClusterSpec::default());
    let uid = members
        .create(&PostParams::default(), &member)
        .await?
        .uid()
        .unwrap();
    // The bundle exists as soon as the hub has its CA.
    krypton_tests::join_bundle(&home, "another").await?;

    // The hub would reject another key.
    let key = KeyPair::generate()?;
    let days = |count: i64| wall() - SignedDuration::from_hours(24 * count);
    let old = connect(&home, &hub, &uid, &key, days(6)).await?;
    let shown_status = fleet_client
        .wait_for_member("edge-1", &[SOON, CONNECTED])
        .await?;
    let shown_status = serde_json::to_string(&shown_status.status)?;
    assert_contains!(shown_status, "kubectl krypton join edge-1");
    let message = fleet_client.event_message("edge-1", SOON.2).await?;
    assert_contains!(message, "kubectl krypton join edge-1");
    let metrics = hub.metrics().await?;
    assert_contains!(
        metrics,
        "krypton_hub_agent_certificate_expiry_timestamp_seconds{member=\"edge-1\"} ",
        "krypton_hub_certificate_expiry_timestamp_seconds{certificate=\"hub\"} ",
        "krypton_hub_certificate_expiry_timestamp_seconds{certificate=\"ca\"} ",
    );

    hub.stop().await?;
    let mut hub = Hub::start_ready(&options.clone().on_port_of(&hub)).await?;
    fleet_client
        .wait_for_member("edge-1", &[SOON, CONNECTED])
        .await?;
    drop(old);
    // The writes about this session follow all earlier ones.
    let _new = connect(&home, &hub, &uid, &key, days(0)).await?;
    fleet_client
        .wait_for_member("edge-1", &[CURRENT, CONNECTED])
        .await?;
    assert_eq!(event_count(&home).await, 1);
    tokio::time::timeout(Duration::from_secs(60), hub.stop()).await??;
    Ok(())
}
