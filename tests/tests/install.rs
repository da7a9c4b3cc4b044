//! Installing: a real chart on home, what a pass with nothing to do costs, and adoption.

use std::collections::BTreeMap;

use anyhow::Result;
use krypton_common::{fingerprint, names};
use krypton_tests::{
    ChartRepository, ChartSource, Cluster, Hub, HubOptions, Parts, eventually,
    fleet::{Desk, PATIENCE, chart_flags},
};
use serde_json::json;

const READY: [(&str, &str, &str); 2] = [
    ("Ready", "True", "AllClustersReady"),
    ("ClusterReady/self-cluster", "True", "Installed"),
];

/// Requests that a pass with something to do cannot go without.
fn telling(requests: &BTreeMap<(String, String), u64>) -> BTreeMap<(String, String), u64> {
    let watched = [
        "secrets",
        "tenants",
        "events",
        "namespaces",
        "services",
        "deployments",
    ];
    let silent = ["WATCH", "CONNECT"];
    requests
        .iter()
        .filter(|((verb, resource), _)| {
            let writes_or_reads = !silent.contains(&verb.as_str());
            let ours = watched.contains(&resource.as_str());
            writes_or_reads && ours
        })
        .map(|(key, count)| (key.clone(), *count))
        .collect()
}

#[tokio::test]
async fn a_real_chart_is_installed_on_home_told_of_once_and_then_left_in_peace() {
    let repository = ChartRepository::start(&[ChartSource::external_dns("1.19.0").unwrap()])
        .await
        .unwrap();
    let home = Cluster::start("install", Parts::WithPods).await.unwrap();
    let desk = Desk::at(&home);
    let flags = chart_flags(&repository, "external-dns", "1.19.0");
    let hub = Hub::start(&HubOptions::new(home.kubeconfig()).args(flags)).unwrap();

    desk.create("default", "acme", json!({"workspace": "acme-ws"}))
        .await
        .unwrap();
    let progress = ("ClusterProgress/self-cluster", "False", "InstallComplete");
    let error = ("ClusterError/self-cluster", "False", "NoError");
    let expected = [READY[0], READY[1], progress, error];
    let tenant = desk.shows("default", "acme", &expected).await.unwrap();

    let status = tenant.status.clone().unwrap();
    assert_eq!(status.phase.as_deref(), Some("Ready"));
    assert_eq!(
        status.last_message.as_deref(),
        Some("1 of 1 clusters ready")
    );
    let applied = format!("{}/external-dns:1.19.0", repository.url());
    assert_eq!(status.last_applied_chart, Some(applied));
    let release = "tenant-acme-self-cluster";
    let revisions = desk.revisions("acme-ws", release).await.unwrap();
    assert_eq!(revisions, [(1, "deployed".to_owned())]);
    let wait = [
        "wait",
        "--for=condition=Available",
        "deployment",
        "--all",
        "--timeout=60s",
    ];
    home.kubectl(wait.into_iter().chain(["--namespace=acme-ws"]))
        .await
        .unwrap();

    // The annotation of the original is the last thing that is written.
    let annotation = names::fingerprint_annotation("self-cluster");
    let wanted = fingerprint::original(&repository.url(), "external-dns", "1.19.0");
    eventually("the fingerprint annotation", PATIENCE, async || {
        let tenant = desk.tenants("default").get("acme").await?;
        let found = tenant
            .metadata
            .annotations
            .unwrap_or_default()
            .remove(&annotation);
        Ok((found.as_ref() == Some(&wanted)).then_some(()))
    })
    .await
    .unwrap();
    desk.lease_renewed().await.unwrap();
    let told = desk.events("default", "acme").await.unwrap();
    let once = [
        "WorkspaceCreated",
        "HelmInstallStart",
        "HelmInstalled",
        "PhaseSet",
    ];
    assert_eq!(told, once.map(|reason| (reason.to_owned(), 1)).into());

    // A pass with nothing to do: the Tenant is looked at again, and a Lease period goes by.
    let runs = hub.log().unwrap().matches("running helm").count();
    assert_eq!(runs, 1, "{}", hub.log().unwrap());
    desk.annotate("default", "acme", "example.org/unrelated", "touched")
        .await
        .unwrap();
    let touched = desk.tenants("default").get("acme").await.unwrap();
    let releases = desk.releases().await.unwrap();
    let before = telling(&home.requests().await.unwrap());
    let helms = ("POST".to_owned(), "secrets".to_owned());
    assert!(
        before.contains_key(&helms),
        "the install is not in the count: {before:?}"
    );
    desk.lease_renewed().await.unwrap();
    let after = telling(&home.requests().await.unwrap());
    assert_eq!(before, after);
    assert_eq!(desk.releases().await.unwrap(), releases);
    assert_eq!(desk.tenants("default").get("acme").await.unwrap(), touched);
    assert_eq!(desk.events("default", "acme").await.unwrap(), told);
    assert_eq!(hub.log().unwrap().matches("running helm").count(), runs);
}

async fn install_by_hand(home: &Cluster, repository: &ChartRepository, name: &str) -> Result<()> {
    let release = format!("tenant-{name}-self-cluster");
    let (namespace, repo) = (
        format!("--namespace={name}"),
        format!("--repo={}", repository.url()),
    );
    // No pods run here, and none are asked for.
    let args = [
        "install",
        &release,
        "small",
        "--version=1.0.0",
        "--create-namespace",
    ];
    let more = [namespace.as_str(), &repo, "--set=replicaCount=0"];
    home.helm(args.into_iter().chain(more)).await.map(drop)
}

#[tokio::test]
async fn a_release_of_the_original_is_adopted_as_it_is_and_anybody_elses_only_when_told_to() {
    let repository = ChartRepository::start(&[ChartSource::small("1.0.0")])
        .await
        .unwrap();
    let home = Cluster::start("adoption", Parts::WithControllers)
        .await
        .unwrap();
    for name in ["acme", "stray"] {
        install_by_hand(&home, &repository, name).await.unwrap();
    }
    let desk = Desk::at(&home);
    let found = desk.releases().await.unwrap();
    let flags = chart_flags(&repository, "small", "1.0.0");
    let hub = Hub::start(&HubOptions::new(home.kubeconfig()).args(flags)).unwrap();

    let original = fingerprint::original(&repository.url(), "small", "1.0.0");
    let annotation = names::fingerprint_annotation("self-cluster");
    desk.create_annotated("default", "acme", json!({}), &[(&annotation, &original)])
        .await
        .unwrap();
    desk.create("default", "stray", json!({})).await.unwrap();

    let adopted = [
        ("Ready", "True", "AllClustersReady"),
        ("ClusterReady/self-cluster", "True", "NoChange"),
    ];
    desk.shows("default", "acme", &adopted).await.unwrap();
    let refused = [
        ("Ready", "False", "ClustersNotReady"),
        ("ClusterError/self-cluster", "True", "ReleaseInUse"),
    ];
    let stray = desk.shows("default", "stray", &refused).await.unwrap();
    let message = stray.status.unwrap().last_message.unwrap();
    assert!(message.contains("tenant-stray-self-cluster"), "{message}");
    assert!(message.contains("mesh.openkcm.io/adopt=true"), "{message}");
    assert_eq!(
        desk.releases().await.unwrap(),
        found,
        "both are as they were found"
    );
    assert!(
        !hub.log().unwrap().contains("running helm"),
        "{}",
        hub.log().unwrap()
    );

    desk.annotate("default", "stray", "mesh.openkcm.io/adopt", "true")
        .await
        .unwrap();
    desk.newest_is("stray", "tenant-stray-self-cluster", 2, "deployed")
        .await
        .unwrap();
    desk.newest_is("acme", "tenant-acme-self-cluster", 1, "deployed")
        .await
        .unwrap();
}
