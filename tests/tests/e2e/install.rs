//! Shows the installation of a real chart, and the cost of a no-op reconcile.

use std::collections::BTreeMap;

use krypton_tests::{
    ChartRepository, ChartSource, Mode, Pair, Parts, TestResult, by_agent, eventually,
    fleet::{ALL_READY, chart_flags},
};
use krypton_types::{fingerprint, names};
use serde_json::json;

by_agent!(real_chart_installs_once_and_stays_unchanged);

/// Counts the requests that only a pass with actions sends.
///
/// Excludes background requests. The hub gets a namespace once a minute to verify the cluster's identity. Hub and agent
/// repeat empty lists for ten minutes, and the API server lists its services every three.
fn action_requests(requests: &BTreeMap<(String, String), u64>) -> BTreeMap<(String, String), u64> {
    let watched = [
        "secrets",
        "tenants",
        "events",
        "namespaces",
        "services",
        "deployments",
    ];
    let silent = ["LIST", "WATCH", "CONNECT"];
    requests
        .iter()
        .filter(|((verb, resource), _)| {
            let writes_or_reads = !silent.contains(&verb.as_str());
            let ours = watched.contains(&resource.as_str());
            let regular = (verb.as_str(), resource.as_str()) == ("GET", "namespaces");
            writes_or_reads && ours && !regular
        })
        .map(|(key, count)| (key.clone(), *count))
        .collect()
}

/// On the home cluster, the aggregator writes the status.
#[tokio::test]
async fn home_chart_installs_once_and_stays_unchanged() {
    Box::pin(real_chart_installs_once_and_stays_unchanged(
        Mode::SelfCluster,
    ))
    .await;
}

async fn real_chart_installs_once_and_stays_unchanged(mode: Mode) -> TestResult {
    let repository = ChartRepository::start(&[ChartSource::external_dns("1.19.0")?]).await?;
    let mut pair = Pair::start("install", mode, Parts::WithPods).await?;
    let fleet_client = pair.fleet_client();
    let mut flags = chart_flags(&repository, "external-dns", "1.19.0");
    if mode == Mode::SelfCluster {
        // With an agent port, the hub reads its CA every few seconds, here on the same cluster.
        flags.push("--listen=0".to_owned());
    }
    pair.start_hub_and_join(flags).await?;

    fleet_client
        .create("acme", json!({"workspace": "acme-ws"}))
        .await?;
    let [ready, progress, error] =
        ["ClusterReady", "ClusterProgress", "ClusterError"].map(|kind| pair.condition(kind));
    let expected = [
        ALL_READY,
        (&ready, "True", "Installed"),
        (&progress, "False", "InstallComplete"),
        (&error, "False", "NoError"),
    ];
    let tenant = fleet_client.wait_for("acme", &expected).await?;

    let status = tenant.status.clone().unwrap();
    assert_eq!(status.phase.as_deref(), Some("Ready"));
    assert_eq!(
        status.last_message.as_deref(),
        Some("1 of 1 clusters ready")
    );
    let applied = format!("{}/external-dns:1.19.0", repository.url());
    assert_eq!(status.last_applied_chart, Some(applied));
    let release = pair.release("acme");
    let revisions = fleet_client.revisions("acme-ws", &release).await?;
    assert_eq!(revisions, [(1, "deployed".to_owned())]);
    let wait = "wait --for=condition=Available deployment --all --timeout=60s -n acme-ws";
    pair.cluster().kubectl_line(wait).await?;

    // The original's annotation is the last write of an installation.
    let annotation = names::fingerprint_annotation(pair.name());
    let expected_fingerprint = fingerprint::original(&repository.url(), "external-dns", "1.19.0");
    eventually("the fingerprint annotation", async || {
        let tenant = fleet_client.tenants().get("acme").await?;
        let found = tenant
            .metadata
            .annotations
            .unwrap_or_default()
            .remove(&annotation);
        Ok((found.as_ref() == Some(&expected_fingerprint)).then_some(()))
    })
    .await?;
    fleet_client.wait_for_renewal().await?;
    let events = fleet_client.events("acme").await?;
    let once = [
        "WorkspaceCreated",
        "HelmInstallStart",
        "HelmInstalled",
        "FingerprintUpdated",
        "PhaseSet",
    ];
    assert_eq!(events, once.map(|reason| (reason.to_owned(), 1)).into());

    // A no-op pass: the Tenant is reconciled again, and a Lease period passes.
    let log = pair.actor()?.log()?;
    let runs = log.matches("running helm").count();
    assert_eq!(runs, 1, "{log}");
    fleet_client
        .annotate("acme", "example.org/unrelated", "touched")
        .await?;
    let touched = fleet_client.tenants().get("acme").await?;
    let releases = fleet_client.releases().await?;
    let before = action_requests(&pair.cluster().requests().await?);
    let helms = ("POST".to_owned(), "secrets".to_owned());
    assert!(
        before.contains_key(&helms),
        "the install is not in the count: {before:?}"
    );
    fleet_client.wait_for_renewal().await?;
    let after = action_requests(&pair.cluster().requests().await?);
    assert_eq!(before, after);
    assert_eq!(fleet_client.releases().await?, releases);
    assert_eq!(fleet_client.tenants().get("acme").await?, touched);
    assert_eq!(fleet_client.events("acme").await?, events);
    let log = pair.actor()?.log()?;
    assert_eq!(log.matches("running helm").count(), runs, "{log}");
    Ok(())
}
