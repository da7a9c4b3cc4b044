//! Shows that Krypton stops retrying a failing upgrade, and rolls back to the last good revision if the hub's flag
//! requires it. The flag reaches agents through the desired state.

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use krypton_crds::tenant::{RevisionCause, RevisionOutcome};
use krypton_tests::{Mode, Scenario, TestResult, by_agent, eventually};
use krypton_types::names;
use kube::{Api, ResourceExt};

by_agent!(failed_upgrade_rolls_back_once_without_automatic_retry);

async fn failed_upgrade_rolls_back_once_without_automatic_retry(mode: Mode) -> TestResult {
    let (pair, chart) = Scenario::new("remedy", mode)
        .values("{replicaCount: 0, message: first}")
        .flags(&["--remediation=rollback"])
        .start()
        .await?;
    let fleet_client = pair.fleet_client();
    let release = pair.release("acme");
    let error = pair.condition("ClusterError");
    let maps: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), "acme");
    let map = async || maps.get(&release).await.unwrap();
    let message = |map: &ConfigMap| {
        let data = map.data.as_ref().context("no data");
        data.unwrap().get("message").cloned().unwrap_or_default()
    };
    fleet_client.install("acme").await?;
    let first = map().await;

    chart.write("{replicaCount: 0, message: second, broken: true}")?;
    fleet_client.wait_deployed("acme", &release, 3).await?;
    fleet_client.event_message("acme", "HelmRolledBack").await?;
    let failed = (error.as_str(), "True", "UpgradeFailed");
    let failure_message = fleet_client.condition_message("acme", &[failed]).await?;
    let rolled_back = map().await;
    assert_eq!(message(&rolled_back), "first");
    assert_eq!(rolled_back.uid(), first.uid());
    assert!(
        failure_message.contains("is invalid") || failure_message.contains("field"),
        "{failure_message}"
    );

    // No more attempts follow, even after a Lease period, which spans many back-offs here.
    fleet_client.wait_for_renewal().await?;
    fleet_client.wait_deployed("acme", &release, 3).await?;
    // A user's request causes one more attempt.
    let annotation = names::RECONCILE_REQUESTED_ANNOTATION;
    fleet_client.annotate("acme", annotation, "now").await?;
    fleet_client.wait_deployed("acme", &release, 5).await?;
    let tenants = fleet_client.tenants();
    eventually("the request to be acknowledged", async || {
        let status = tenants.get_status("acme").await?.status.unwrap_or_default();
        let handled = status.last_handled_reconcile_at.as_deref();
        ensure!(handled == Some("now"), "{status:?}");
        Ok(Some(()))
    })
    .await?;

    chart.write("{replicaCount: 0, message: third}")?;
    fleet_client.wait_deployed("acme", &release, 6).await?;
    fleet_client.wait_ready("acme").await?;
    assert_eq!(message(&map().await), "third");
    let expected = [
        (6, RevisionOutcome::Deployed, RevisionCause::Values),
        (5, RevisionOutcome::Superseded, RevisionCause::Rollback),
        (4, RevisionOutcome::RolledBack, RevisionCause::Values),
        (3, RevisionOutcome::Superseded, RevisionCause::Rollback),
        (2, RevisionOutcome::RolledBack, RevisionCause::Values),
        (1, RevisionOutcome::Superseded, RevisionCause::Install),
    ];
    eventually("the history to list all revisions", async || {
        let status = tenants.get_status("acme").await?.status.unwrap_or_default();
        let history = status.history.iter();
        let shown = history.map(|entry| (entry.revision, entry.outcome, entry.cause));
        ensure!(shown.eq(expected), "{status:?}");
        let has_chart = |version: &Option<String>| version.as_deref() == Some("1.0.0");
        let mut versions = status.history.iter().map(|entry| &entry.chart_version);
        ensure!(versions.all(has_chart), "{status:?}");
        let newest = status.history.first();
        let actor = newest.and_then(|entry| entry.by.as_deref());
        ensure!(actor == Some(names::HUB_MANAGER), "{status:?}");
        Ok(Some(()))
    })
    .await?;
    Ok(())
}
