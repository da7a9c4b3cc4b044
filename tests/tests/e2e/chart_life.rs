//! Shows that Krypton's charts can be installed, upgraded, rolled back, uninstalled and reinstalled without data loss.

use std::{collections::BTreeMap, path::Path, time::Duration};

use anyhow::Result;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::{edge_cluster::EdgeCluster, tenant::Tenant};
use krypton_tests::{
    AgentPod, ChartRepository, ChartSource, Cluster, HubPod, OwnChart, Parts, TestResult,
    assert_contains, eventually,
    fleet::{CONNECTED, FleetClient},
    home_and_edge,
    membership::join_command,
};
use krypton_types::names;
use kube::{Api, CustomResourceExt, ResourceExt, api::ListParams};
use serde_json::json;

use crate::chart_rights::hub_values;

const CRDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crds/crds");
const RELEASE: &str = "meta.helm.sh/release-name";
const EDGE: &str = "edge-1";
const HELM_DEADLINE: Duration = Duration::from_secs(60);

async fn rollback(cluster: &Cluster, chart: OwnChart, revision: &str) {
    let rollback = ["rollback", chart.name(), revision, "-n", chart.namespace()];
    cluster.helm(rollback).await.unwrap();
}

async fn get_crd(cluster: &Cluster, name: &str) -> CustomResourceDefinition {
    Api::all(cluster.client()).get(name).await.unwrap()
}

async fn get_secret(cluster: &Cluster, namespace: &str, name: &str) -> Option<Secret> {
    let secrets: Api<Secret> = Api::namespaced(cluster.client(), namespace);
    secrets.get_opt(name).await.unwrap()
}

/// Returns the state that must not change: the UIDs of CRDs, members and Tenants, and the release Secrets of the
/// fleet's chart. Also includes a Secret's UID and content.
async fn persistent_state(
    cluster: &Cluster,
    (namespace, name): (&str, &str),
) -> Result<BTreeMap<String, String>> {
    let mut persistent_state = BTreeMap::new();
    let all = ListParams::default();
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.client());
    for crd in crds.list(&all).await? {
        persistent_state.insert(crd.name_any(), crd.uid().unwrap_or_default());
    }
    if persistent_state.contains_key(EdgeCluster::crd_name()) {
        for member in Api::<EdgeCluster>::all(cluster.client()).list(&all).await? {
            persistent_state.insert(member.name_any(), member.uid().unwrap_or_default());
        }
    }
    for tenant in Api::<Tenant>::all(cluster.client()).list(&all).await? {
        persistent_state.insert(tenant.name_any(), tenant.uid().unwrap_or_default());
    }
    let secret = get_secret(cluster, namespace, name).await;
    let secret = secret.map(|secret| (secret.uid(), secret.data));
    persistent_state.insert(format!("{namespace}/{name}"), format!("{secret:?}"));
    for (release, version) in FleetClient::new(cluster).releases().await? {
        if !release.contains(".krypton-") {
            persistent_state.insert(release, version);
        }
    }
    Ok(persistent_state)
}

#[tokio::test]
async fn reinstalled_charts_adopt_state_left_by_uninstall() -> TestResult {
    let repository = ChartRepository::start(&["1.0.0", "1.1.0"].map(ChartSource::small)).await?;
    let (home, edge) = home_and_edge("life", Parts::ControlPlane).await?;
    let (fleet_client, at_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    let (namespace, system) = (OwnChart::Hub.namespace(), OwnChart::Agent.namespace());
    let authority = (namespace, "krypton-hub-ca");
    let identity = (system, "krypton-agent-identity");
    let first = hub_values(&repository, "1.0.0", &[]);

    // The release leaves an existing CRD unchanged and creates the others.
    let tenants = Path::new(CRDS).join(format!("{}.yaml", Tenant::crd_name()));
    let apply = ["apply".into(), "-f".into(), tenants.into_os_string()];
    home.kubectl(apply).await?;
    OwnChart::Hub.install(&home, &first).await?;
    let of_release = async |name: &str| {
        get_crd(&home, name)
            .await
            .annotations()
            .contains_key(RELEASE)
    };
    assert!(!of_release(Tenant::crd_name()).await);
    assert!(of_release(EdgeCluster::crd_name()).await);

    let mut hub = HubPod::start(&home, None).await?;
    // The edge cluster needs only the command that the plugin prints on the home cluster.
    let command = join_command(&home, namespace, EDGE, &OwnChart::Agent.folder()).await?;
    let paste = edge.invocation(Path::new("/bin/sh")).args(["-c", &command]);
    paste.output(HELM_DEADLINE).await?;
    let mut agent = AgentPod::start(&edge).await?;
    fleet_client.wait_for_member(EDGE, &[CONNECTED]).await?;
    let spec = json!({"workspace": "acme-ws"});
    at_edge.create("acme", spec).await?;
    at_edge.wait_ready("acme").await?;
    // The annotation is the last write of an installation, so no action is pending afterwards.
    at_edge.wait_for_renewal().await?;

    // Upgrade the hub's chart while the agent keeps running.
    hub.hub.stop().await?;
    let at_home = persistent_state(&home, authority).await?;
    let on_edge = persistent_state(&edge, identity).await?;
    let values = hub_values(&repository, "1.0.0", &["--set=logFormat=json"]);
    OwnChart::Hub.install(&home, &values).await?;
    assert_eq!(persistent_state(&home, authority).await?, at_home);
    rollback(&home, OwnChart::Hub, "1").await;
    assert_eq!(persistent_state(&home, authority).await?, at_home);
    OwnChart::Hub.uninstall(&home).await?;
    let get = format!("get deployments,roles,serviceaccounts -n {namespace} -o name");
    let remaining = home.kubectl_line(&get).await?;
    assert!(!remaining.contains(OwnChart::Hub.name()));
    assert_eq!(persistent_state(&home, authority).await?, at_home);
    let second = hub_values(&repository, "1.1.0", &[]);
    OwnChart::Hub.install(&home, &second).await?;
    assert_eq!(persistent_state(&home, authority).await?, at_home);
    assert_eq!(persistent_state(&edge, identity).await?, on_edge);

    // The agent verifies the new hub with the CA from its join bundle, and receives the new chart version.
    hub = HubPod::start(&home, Some(&hub)).await?;
    let release = names::tenant_release("acme", EDGE);
    at_edge.wait_deployed("acme-ws", &release, 2).await?;
    at_edge.wait_ready("acme").await?;
    at_edge.wait_for_renewal().await?;

    // Upgrade the agent's chart without the bundle, roll back to the release with the bundle, and uninstall the chart.
    agent.agent.stop().await?;
    let on_edge = persistent_state(&edge, identity).await?;
    let bundle = async || get_secret(&edge, system, "krypton-join").await;
    assert!(bundle().await.is_some());
    let none: [&str; 0] = [];
    OwnChart::Agent.install(&edge, none).await?;
    assert!(bundle().await.is_none());
    assert_eq!(persistent_state(&edge, identity).await?, on_edge);
    rollback(&edge, OwnChart::Agent, "1").await;
    assert!(bundle().await.is_some());
    OwnChart::Agent.uninstall(&edge).await?;
    assert!(bundle().await.is_none());
    assert_eq!(persistent_state(&edge, identity).await?, on_edge);

    // A reinstallation without values resumes as the same member.
    OwnChart::Agent.install(&edge, none).await?;
    agent = AgentPod::start(&edge).await?;
    at_edge.remove("acme").await?;
    eventually("the release to be gone", async || {
        let revisions = at_edge.revisions("acme-ws", &release).await?;
        Ok(revisions.is_empty().then_some(()))
    })
    .await?;
    fleet_client.wait_for_member(EDGE, &[CONNECTED]).await?;
    let member = Api::<EdgeCluster>::all(home.client()).get(EDGE).await;
    assert_eq!(member?.uid().as_ref(), at_home.get(EDGE));
    agent.agent.stop().await?;
    hub.hub.stop().await?;
    start_with_values_of_krypton_operator(&home, &repository).await
}

/// Replaces the hub by one with a values file of krypton-operator's chart, and verifies the lines about its values.
async fn start_with_values_of_krypton_operator(
    home: &Cluster,
    repository: &ChartRepository,
) -> TestResult {
    home.create_namespace("krypton-operator").await?;
    let file = OwnChart::Hub.cases()?["krypton-operator"].clone();
    let file = format!("--values={}", file.display());
    let values = hub_values(repository, "1.1.0", &[&file]);
    let output = OwnChart::Hub.install(home, &values).await?;
    for value in [
        "image.repository",
        "image.command",
        "service.ports",
        "livenessProbe, readinessProbe",
        "ports",
        "autoscaling",
    ] {
        assert_contains!(output, format!("\n- {value}: "));
    }
    let mut hub = HubPod::start(home, None).await?;
    hub.hub.stop().await?;
    Ok(())
}
