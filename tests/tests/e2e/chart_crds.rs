//! Verifies the policies for CRDs in a chart's own folder: skip, create once, or update. Krypton never deletes them.

use k8s_openapi::api::core::v1::Secret;
use krypton_reconciler::record::RECORD_NAME;
use krypton_tests::{
    ChartRepository, ChartSource, Cluster, Mode, Pair, Parts, TestResult, assert_contains,
    by_agent, eventually,
    fleet::{SYSTEM_NAMESPACE, chart_flags},
};
use kube::Api;
use serde_json::{Value, json};
use tempfile::TempDir;

const CRD: &str = "widgets.example.org";

by_agent!(chart_crds_follow_policy_and_are_never_deleted);

/// Returns a chart with one ConfigMap, and one CRD with this field.
fn chart(folder: &TempDir, version: &str, field: &str) -> ChartSource {
    let root = folder.path().join(version);
    let crd = json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD},
        "spec": {
            "group": "example.org",
            "scope": "Namespaced",
            "names": {"kind": "Widget", "plural": "widgets", "singular": "widget"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema":
                {"type": "object", "properties": {field: {"type": "string"}}}}}],
        },
    });
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}}\n";
    let crd = crd.to_string();
    let files = [("crds/widgets.yaml", &*crd), ("templates/map.yaml", map)];
    let chart = ChartSource::write(&root, "widgets", &files).unwrap();
    chart.version(version)
}

/// Returns the fields of the CRD, or an empty string if it is missing.
async fn fields(cluster: &Cluster) -> String {
    let path = "{.spec.versions[0].schema.openAPIV3Schema.properties}";
    let output = format!("--output=jsonpath={path}");
    let args = ["get", "crd", CRD, "--ignore-not-found", &output];
    cluster.kubectl(args).await.unwrap()
}

async fn chart_crds_follow_policy_and_are_never_deleted(mode: Mode) -> TestResult {
    let folder = TempDir::with_prefix("krypton-crds-")?;
    let charts = [
        chart(&folder, "1.0.0", "first"),
        chart(&folder, "1.1.0", "second"),
        chart(&folder, "1.2.0", "third"),
    ];
    let repository = ChartRepository::start(&charts).await?;
    let mut pair = Pair::start("chart-crds", mode, Parts::WithControllers).await?;
    let fleet_client = pair.fleet_client();
    let flags = |version: &str, policy: &str| {
        let mut flags = chart_flags(&repository, "widgets", version);
        flags.push(format!("--chart-crds={policy}"));
        flags
    };
    let widget =
        "{apiVersion: example.org/v1, kind: Widget, metadata: {name: a, namespace: default}}";

    pair.start_hub_and_join(flags("1.0.0", "skip")).await?;
    fleet_client.install("left").await?;
    assert_eq!(fields(pair.cluster()).await, "");
    pair.stop().await?;

    pair.start_hub_and_join(flags("1.0.0", "create")).await?;
    // A restarted agent uses the earlier policy until it receives the new one.
    eventually("the policy to be stored", async || {
        let secrets: Api<Secret> = Api::namespaced(fleet_client.client.clone(), SYSTEM_NAMESPACE);
        let record = secrets.get(RECORD_NAME).await?.data.unwrap_or_default();
        let record: Value = serde_json::from_slice(&record.into_values().next().unwrap().0)?;
        Ok(record.get("chartCrds").is_none().then_some(()))
    })
    .await?;
    fleet_client.install("made").await?;
    assert_contains!(fields(pair.cluster()).await, "first");
    pair.cluster().apply(widget).await?;
    pair.stop().await?;

    let release = pair.release("made");
    for (version, policy, revision, field) in [
        ("1.1.0", "create", 2, "first"),
        ("1.2.0", "create-replace", 3, "third"),
    ] {
        pair.start_hub_and_join(flags(version, policy)).await?;
        fleet_client
            .wait_deployed("made", &release, revision)
            .await?;
        assert_contains!(fields(pair.cluster()).await, field);
        pair.stop().await?;
    }
    let get = "get widgets.example.org a -n default";
    pair.cluster().kubectl_line(get).await?;
    Ok(())
}
