//! Verifies the cleanup after failed attempts. Krypton removes objects that no good revision declares, except objects
//! with data, with a keep policy, or of other owners.

use std::collections::BTreeMap;

use anyhow::Result;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim};
use krypton_tests::{ChartSource, Mode, Scenario, TestResult, eventually, fleet::FleetClient};
use krypton_types::names;
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use tempfile::TempDir;

const TEMPLATE: &str = r#"
{{- range .Values.maps }}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ . }}}
{{- end }}
{{- if .Values.random }}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: random-{{ randAlphaNum 8 | lower }}}
{{- end }}
{{- if .Values.claim }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
{{- end }}
{{- if .Values.broken }}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: kept, annotations: {helm.sh/resource-policy: keep}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: broken}
spec: {replicas: -1, selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: c}}}}
{{- end }}
"#;

fn chart(folder: &TempDir) -> ChartSource {
    ChartSource::write(folder.path(), "maps", &[("templates/all.yaml", TEMPLATE)]).unwrap()
}

/// Returns the UIDs of the ConfigMaps, except Kubernetes' own and terminating ones.
async fn config_maps(fleet_client: &FleetClient) -> Result<BTreeMap<String, String>> {
    let api: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), "acme");
    let maps = api.list(&ListParams::default()).await?.into_iter();
    let ours = maps.filter(|map| {
        map.metadata.deletion_timestamp.is_none() && map.name_any() != "kube-root-ca.crt"
    });
    Ok(ours
        .map(|map| (map.name_any(), map.uid().unwrap_or_default()))
        .collect())
}

async fn wait_for_config_maps(fleet_client: &FleetClient, expected: &[&str]) {
    let what = format!("ConfigMaps {expected:?}");
    let has_expected = async || {
        let actual = config_maps(fleet_client).await?;
        let names: Vec<&str> = actual.keys().map(String::as_str).collect();
        Ok((names == expected).then_some(()))
    };
    eventually(&what, has_expected).await.unwrap();
}

#[tokio::test]
async fn only_leftovers_of_failed_attempts_are_removed() -> TestResult {
    let folder = tempfile::tempdir()?;
    let (pair, chart) = Scenario::new("leftovers", Mode::SelfCluster)
        .chart(chart(&folder), "maps")
        .values("maps: [stays]")
        .flags(&["--retry-max=10m"])
        .start()
        .await?;
    let fleet_client = pair.fleet_client();
    let release = pair.release("acme");
    let failed = pair.condition("ClusterError");
    let failed = [(failed.as_str(), "True", "UpgradeFailed")];
    // A namespace that Krypton didn't create, so the remaining objects outlive the Tenant.
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "acme"}});
    let namespaces = Api::all(fleet_client.client.clone());
    let namespace: k8s_openapi::api::core::v1::Namespace = serde_json::from_value(namespace)?;
    let params = PostParams::default();
    namespaces.create(&params, &namespace).await?;
    let theirs = json!({"metadata": {"name": "theirs"}});
    let api: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), "acme");
    let theirs = serde_json::from_value(theirs)?;
    api.create(&params, &theirs).await?;
    fleet_client.install("acme").await?;
    wait_for_config_maps(&fleet_client, &["stays", "theirs"]).await;
    let before = config_maps(&fleet_client).await?;

    // Two attempts, each with one object that only it declares.
    chart.write("{maps: [stays, first], claim: true, broken: true}")?;
    fleet_client
        .wait_for_revision("acme", &release, 2, "failed")
        .await?;
    chart.write("{maps: [stays, second], broken: true}")?;
    fleet_client
        .wait_for_revision("acme", &release, 3, "failed")
        .await?;
    fleet_client.wait_for("acme", &failed).await?;
    wait_for_config_maps(
        &fleet_client,
        &["first", "kept", "second", "stays", "theirs"],
    )
    .await;

    chart.write("{maps: [stays], again: true}")?;
    fleet_client.wait_ready("acme").await?;
    wait_for_config_maps(&fleet_client, &["kept", "stays", "theirs"]).await;
    fleet_client
        .event_message("acme", "LeftoversRemoved")
        .await?;
    fleet_client.event_message("acme", "LeftoversStay").await?;
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(fleet_client.client.clone(), "acme");
    let claim = claims.get("data").await?;
    let after = config_maps(&fleet_client).await?;
    for name in ["stays", "theirs"] {
        assert_eq!(after[name], before[name], "{name}");
    }

    // Also before the release is removed, because Helm would delete the objects of its newest revision.
    chart.write("{maps: [stays, third], claim: true, broken: true}")?;
    fleet_client.wait_for("acme", &failed).await?;
    chart.write("{maps: [fourth], broken: true}")?;
    wait_for_config_maps(
        &fleet_client,
        &["fourth", "kept", "stays", "theirs", "third"],
    )
    .await;
    fleet_client.remove("acme").await?;
    wait_for_config_maps(&fleet_client, &["kept", "theirs"]).await;
    let still = claims.get("data").await?;
    assert_eq!(still.uid(), claim.uid());
    assert_eq!(
        config_maps(&fleet_client).await?["theirs"],
        before["theirs"]
    );
    Ok(())
}

#[tokio::test]
async fn failed_installations_leave_a_bounded_history() -> TestResult {
    // --history-max=3, and 16 revisions with objects that only they declare.
    const KEPT: usize = 3 + 16;
    // One more than the bound of the assertion below.
    const FAILURES: u32 = 21;
    let folder = tempfile::tempdir()?;
    let (pair, chart) = Scenario::new("failures", Mode::Agent)
        .chart(chart(&folder), "maps")
        .values("{maps: [], random: true, broken: true}")
        .start()
        .await?;
    let (fleet_client, release) = (pair.fleet_client(), pair.release("acme"));
    fleet_client.create("acme", json!({})).await?;
    for number in 1..=FAILURES {
        fleet_client
            .wait_for_revision("acme", &release, number, "failed")
            .await?;
        let revisions = fleet_client.revisions("acme", &release).await?.len();
        assert!(revisions <= KEPT + 1, "{revisions} after {number} failures");
        let annotation = names::RECONCILE_REQUESTED_ANNOTATION;
        let requested = number.to_string();
        fleet_client
            .annotate("acme", annotation, &requested)
            .await?;
    }
    chart.write("{maps: [one]}")?;
    fleet_client.wait_ready("acme").await?;
    Ok(())
}
