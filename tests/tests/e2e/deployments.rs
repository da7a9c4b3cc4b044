//! Verifies KryptonDeployments on their member: home's orders, and nothing else, install, upgrade, correct and remove
//! them.

mod stub_hub;

use krypton_helm::releases::labels::{OWNER_NAMESPACE_LABEL, OWNER_UID_LABEL};
use krypton_reconciler::index::CREATOR_LABEL;
use krypton_tests::{
    ChartRepository, ChartSource, Cluster, Mode, Parts, TestResult, assert_contains, by_agent,
    fleet::FleetClient,
    no_tenants::{assert_no_tenant_crd, reject_tenant_crd},
};
use krypton_types::{
    conditions::{Truth, reason},
    deployment::DesiredDeployment,
    desired::drift::{DriftMode, DriftPolicy},
};

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, ResourceExt};
use stub_hub::{Labels, StubHub};

by_agent!(
    deployment_is_reconciled_and_removed_only_by_order,
    release_has_single_owner_and_original_is_adopted
);

fn order(namespace: &str, name: &str) -> DesiredDeployment {
    DesiredDeployment {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: format!("uid-of-{namespace}-{name}"),
        generation: 1,
        created: 1_800_000_000,
        ..DesiredDeployment::default()
    }
}

fn removal(order: &DesiredDeployment) -> DesiredDeployment {
    DesiredDeployment {
        remove: true,
        generation: order.generation + 1,
        ..order.clone()
    }
}

async fn cluster(name: &str, mode: Mode, parts: Parts) -> Cluster {
    let name = format!("{name}-{mode:?}").to_lowercase();
    Cluster::start(&name, parts).await.unwrap()
}

async fn small() -> ChartRepository {
    let charts = [ChartSource::small("1.0.0")];
    ChartRepository::start(&charts).await.unwrap()
}

async fn labels(
    fleet_client: &FleetClient,
    namespace: &str,
    release: &str,
    revision: u32,
) -> Labels {
    let secrets: Api<Secret> = Api::namespaced(fleet_client.client.clone(), namespace);
    let name = format!("sh.helm.release.v1.{release}.v{revision}");
    secrets.get(&name).await.unwrap().labels().clone()
}

/// Also without the CRD of Tenants.
async fn deployment_is_reconciled_and_removed_only_by_order(mode: Mode) -> TestResult {
    let cluster = cluster("ordered", mode, Parts::WithControllers).await;
    reject_tenant_crd(&cluster).await?;
    let (fleet_client, repository) = (FleetClient::new(&cluster), small().await);
    let drift = DriftPolicy {
        mode: DriftMode::Heal,
        interval_seconds: 1,
    };
    let mut stub = StubHub::start(mode, &cluster, &repository, "small", drift).await?;
    stub.value("replicaCount", 0);
    let mut acme = order("accounts", "acme");
    let release = "ced-acme";
    stub.order(&[&acme]);
    let report = stub.wait_ready(&acme, reason::INSTALLED).await;
    assert!(report.applied_chart.ends_with("/small:1.0.0"), "{report:?}");
    assert!(!report.gone);
    fleet_client.wait_deployed("acme", release, 1).await?;
    let revision_labels = labels(&fleet_client, "acme", release, 1).await;
    assert_eq!(revision_labels[OWNER_UID_LABEL], acme.uid);
    assert_eq!(revision_labels[OWNER_NAMESPACE_LABEL], "accounts");
    let workspace = fleet_client.namespace("acme").await?.unwrap();
    assert_eq!(workspace.labels()[CREATOR_LABEL], acme.uid);

    stub.value("message", "again");
    stub.order(&[&acme]);
    stub.wait_ready(&acme, reason::UPGRADED).await;
    fleet_client.wait_deployed("acme", release, 2).await?;
    fleet_client
        .wait_for_message("acme", release, "again")
        .await?;

    // Drift is corrected without a new revision.
    let patch = r#"{"data":{"message":"mine"}}"#;
    let args = ["patch", "configmap", release, "-n", "acme", "-p", patch];
    cluster.kubectl(args).await?;
    fleet_client
        .wait_for_message("acme", release, "again")
        .await?;

    acme.paused = true;
    acme.generation += 1;
    stub.value("message", "paused");
    stub.order(&[&acme]);
    stub.wait_for_report(&acme, "paused", |report| {
        let progress = report.state.progress.as_ref();
        progress.is_some_and(|progress| progress.reason == reason::PAUSED)
    })
    .await;
    fleet_client.wait_deployed("acme", release, 2).await?;
    acme.paused = false;
    acme.generation += 1;
    stub.order(&[&acme]);
    fleet_client.wait_deployed("acme", release, 3).await?;
    stub.wait_ready(&acme, reason::UPGRADED).await;

    // An order missing from the list, or a missing list, removes nothing. The completed second order shows that the
    // list was processed.
    let other = order("accounts", "other");
    stub.order(&[&other]);
    stub.wait_ready(&other, reason::INSTALLED).await;
    stub.wait_until_silent(&acme).await;
    stub.order(&[]);
    stub.wait_until_silent(&other).await;
    stub.restart_actor().await?;
    stub.order(&[&acme, &other]);
    let report = stub.wait_ready(&acme, reason::NO_CHANGE).await;
    assert!(report.applied_chart.ends_with("/small:1.0.0"), "{report:?}");
    for (name, revision) in [("acme", 3), ("other", 1)] {
        let release = format!("ced-{name}");
        fleet_client.wait_deployed(name, &release, revision).await?;
    }

    let gone = removal(&acme);
    stub.order(&[&gone, &other]);
    let report = stub.wait_gone(&gone).await;
    assert_eq!(report.state.ready.reason, reason::UNINSTALLED);
    assert!(fleet_client.revisions("acme", release).await?.is_empty());
    fleet_client.wait_for_namespace_deletion("acme").await?;
    // The successor finds the work done.
    stub.restart_actor().await?;
    stub.wait_gone(&gone).await;
    stub.wait_ready(&other, reason::NO_CHANGE).await;
    fleet_client.wait_deployed("other", "ced-other", 1).await?;
    assert_no_tenant_crd(&cluster).await?;
    Ok(())
}

async fn release_has_single_owner_and_original_is_adopted(mode: Mode) -> TestResult {
    let cluster = cluster("ordered-twice", mode, Parts::WithControllers).await;
    let (fleet_client, repository) = (FleetClient::new(&cluster), small().await);
    // Installed by the original, in a namespace that Krypton doesn't own.
    let install = format!("install ced-old small --repo {}", repository.url());
    let options = "--version 1.0.0 -n old --create-namespace --set replicaCount=0";
    let install = format!("{install} {options}");
    cluster.helm(install.split(' ')).await?;

    let drift = DriftPolicy::default();
    let mut stub = StubHub::start(mode, &cluster, &repository, "small", drift).await?;
    let old = order("accounts", "old");
    stub.order(&[&old]);
    stub.wait_ready(&old, reason::NO_CHANGE).await;
    let revisions = fleet_client.revisions("old", "ced-old").await?;
    assert_eq!(revisions, [(1, "deployed".to_owned())]);

    stub.value("replicaCount", 0);
    let older = order("accounts", "acme");
    let younger = DesiredDeployment {
        created: older.created + 60,
        ..order("others", "acme")
    };
    stub.order(&[&older, &younger, &old]);
    stub.wait_ready(&older, reason::INSTALLED).await;
    let report = stub
        .wait_for_readiness(&younger, Truth::False, reason::RELEASE_IN_USE)
        .await;
    let message = &report.state.ready.message;
    assert_contains!(message, "KryptonDeployment accounts/acme");
    // Values that differ from the original's cause an upgrade.
    fleet_client.wait_deployed("old", "ced-old", 2).await?;

    // The rejected order can be removed without any effect.
    let refused = removal(&younger);
    stub.order(&[&older, &refused, &old]);
    stub.wait_gone(&refused).await;
    fleet_client.wait_deployed("acme", "ced-acme", 1).await?;

    // An orphaned release stays. In another namespace of home, the same order has no owner.
    let orphan = DesiredDeployment {
        orphan: true,
        ..removal(&older)
    };
    let gone = removal(&old);
    stub.order(&[&orphan, &younger, &gone]);
    stub.wait_gone(&orphan).await;
    stub.wait_gone(&gone).await;
    stub.wait_for_readiness(&younger, Truth::False, reason::RELEASE_IN_USE)
        .await;
    fleet_client.wait_deployed("acme", "ced-acme", 1).await?;
    assert!(fleet_client.revisions("old", "ced-old").await?.is_empty());
    assert!(fleet_client.namespace("old").await?.is_some());
    Ok(())
}
