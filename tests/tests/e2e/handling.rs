//! Shows release handling: readiness, status messages during Helm runs, and the number of kept revisions.

use anyhow::Result;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_tests::{
    ChartRepository, ChartSource, Gate, Mode, Pair, Parts, ServedChart, TestResult,
    assert_contains, eventually,
    fleet::{FleetClient, ValuesFile, chart_flags, values_flag},
    gate, wait_until_gone,
};
use kube::Api;
use serde_json::json;
use tempfile::TempDir;

const CERTIFICATES: &str = "certificates.cert-manager.io";

/// Waits until a condition of Tenant acme has this status and a message that contains this text.
async fn wait_for_condition(
    fleet_client: &FleetClient,
    kind: &str,
    status: &str,
    expected_text: &str,
) -> String {
    let waiting = fleet_client.wait_for_condition("acme", kind, |found| {
        found.status == status && found.message.contains(expected_text)
    });
    waiting.await.unwrap()
}

/// Waits until the newest revision is at least `at_least`. There must never be more than `most` revisions.
async fn check_history(
    fleet_client: &FleetClient,
    workspace: &str,
    release: &str,
    at_least: u32,
    max: usize,
) {
    let what = format!("revision {at_least} of {release}");
    let enough = eventually(&what, async || {
        let revisions = fleet_client.revisions(workspace, release).await?;
        let newest = revisions.last().map_or(0, |(number, _)| *number);
        Ok((revisions.len() > max || newest >= at_least).then_some(revisions))
    });
    let revisions = enough.await.unwrap();
    assert!(revisions.len() <= max, "{revisions:?}");
}

async fn start_with_flags(pair: &mut Pair, flags: Vec<String>, extra_flags: &[&str]) -> Result<()> {
    let extra_flags = extra_flags.iter().map(|flag| (*flag).to_owned());
    pair.start_hub_and_join(flags.into_iter().chain(extra_flags))
        .await
}

#[tokio::test]
async fn wait_mode_decides_readiness_and_history_is_limited() -> TestResult {
    let gate = Gate::everywhere()?;
    let charts = [gate.chart(), ChartSource::small("1.0.0")];
    let repository = ChartRepository::start(&charts).await?;
    let mut pair = Pair::start("handling", Mode::SelfCluster, Parts::WithControllers).await?;
    let fleet_client = pair.fleet_client();
    let values = ValuesFile::new(&json!({"gates": ["pre-install"]}).to_string())?;
    let flags = |chart: &str| {
        let mut flags = chart_flags(&repository, chart, "1.0.0");
        flags.push(values_flag(&values));
        flags
    };
    let (release, ready) = (pair.release("acme"), pair.condition("ClusterReady"));
    let progress = pair.condition("ClusterProgress");

    // No controller makes pods ready here, so the release never becomes ready. The message names the cause.
    start_with_flags(&mut pair, flags("gates"), &[]).await?;
    fleet_client.create("acme", json!({})).await?;
    let hook = gate::wait_for_hook(&fleet_client, "acme", "pre-install", None).await?;
    let hook_message =
        format!("installing release: waiting for hook Pod acme/{release}-pre-install");
    wait_for_condition(&fleet_client, &progress, "True", &hook_message).await;
    wait_for_condition(&fleet_client, &ready, "False", &hook_message).await;
    gate::complete_hook(&fleet_client, "acme", &hook).await?;
    let workload_message = format!("Deployment acme/{release}: 0 of 1 available");
    wait_for_condition(&fleet_client, &progress, "True", &workload_message).await;
    let starts = fleet_client.events("acme").await?;
    assert_eq!(starts.get("HelmInstallStart"), Some(&1), "{starts:?}");
    pair.stop().await?;

    start_with_flags(&mut pair, flags("gates"), &["--wait=hooks"]).await?;
    fleet_client.wait_ready("acme").await?;
    wait_for_condition(
        &fleet_client,
        &ready,
        "True",
        &format!("; not waited for: {workload_message}"),
    )
    .await;
    pair.stop().await?;

    start_with_flags(&mut pair, flags("gates"), &["--wait=none"]).await?;
    let ready_message = eventually("no message about workloads", async || {
        let ready_message =
            wait_for_condition(&fleet_client, &ready, "True", "; not waited for").await;
        Ok((!ready_message.contains("Deployment")).then_some(ready_message))
    });
    assert!(ready_message.await?.ends_with("; not waited for"));
    fleet_client.wait_deployed("acme", &release, 1).await?;
    pair.stop().await?;

    let extra = ["--wait=none", "--history-max=2", "--retry-max=1s"];
    values.write("{replicaCount: 0, message: m1}")?;
    start_with_flags(&mut pair, flags("small"), &extra).await?;
    fleet_client.create("alpha", json!({})).await?;
    let alpha = pair.release("alpha");
    for number in 1..=4 {
        let message = format!("{{replicaCount: 0, message: m{number}}}");
        values.write(&message)?;
        fleet_client.wait_deployed("alpha", &alpha, number).await?;
        check_history(&fleet_client, "alpha", &alpha, number, 2).await;
    }

    // Repeated failures don't accumulate revisions. This applies to a running release with an immutable Deployment
    // selector, and to a release without a successful revision.
    values.write("{replicaCount: 0, broken: true}")?;
    // Once it fails, the next Tenant gets these values too.
    fleet_client
        .event_message("alpha", "HelmUpgradeFailed")
        .await?;
    fleet_client.create("beta", json!({})).await?;
    fleet_client
        .event_message("beta", "HelmInstallFailed")
        .await?;
    check_history(&fleet_client, "beta", &pair.release("beta"), 4, 2).await;
    // Four other attempts precede. Each of them can have left objects that only its manifest declares.
    check_history(&fleet_client, "acme", &release, 9, 7).await;
    let revisions = fleet_client.revisions("acme", &release).await?;
    let deployed = (1, "deployed".to_owned());
    assert!(revisions.contains(&deployed), "{revisions:?}");
    pair.stop().await?;
    Ok(())
}

/// A chart whose release for Tenant acme creates and keeps a CRD of cert-manager.
fn with_crd() -> Result<TempDir> {
    let folder = TempDir::with_prefix("krypton-crd-chart-")?;
    let crd = "{{- if contains \"acme\" .Release.Name }}\n\
        apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\n\
        metadata:\n  name: certificates.cert-manager.io\n  \
        annotations: {helm.sh/resource-policy: keep}\n\
        spec:\n  group: cert-manager.io\n  scope: Namespaced\n  \
        names: {kind: Certificate, listKind: CertificateList, plural: certificates, singular: certificate}\n  \
        versions:\n    - name: v1\n      served: true\n      storage: true\n      \
        schema: {openAPIV3Schema: {type: object}}\n{{- end }}\n";
    ChartSource::write(folder.path(), "certs", &[("templates/crd.yaml", crd)])?;
    Ok(folder)
}

#[tokio::test]
async fn crds_are_deleted_only_if_enabled_and_unused() -> TestResult {
    let source = with_crd()?;
    let source = ChartSource::folder(source.path());
    let chart = ServedChart::new(source, ("certs", "1.0.0"), None).await?;
    let mut pair = Pair::start("certs", Mode::SelfCluster, Parts::WithControllers).await?;
    let fleet_client = pair.fleet_client();
    let crds: Api<CustomResourceDefinition> = Api::all(fleet_client.client.clone());
    let is_there = async || {
        let found = crds.get_opt(CERTIFICATES).await.unwrap();
        found.is_some_and(|crd| crd.metadata.deletion_timestamp.is_none())
    };

    pair.start_hub_and_join(chart.flags(&[])).await?;
    fleet_client.install("acme").await?;
    fleet_client.remove("acme").await?;
    assert!(is_there().await, "no deletion was requested");
    pair.stop().await?;

    let flags = chart.flags(&["--delete-cert-manager-crds"]);
    pair.start_hub_and_join(flags).await?;
    fleet_client.install_all(&["acme", "beta"]).await?;
    fleet_client.remove("acme").await?;
    assert!(is_there().await, "another release exists");
    fleet_client.remove("beta").await?;
    assert!(is_there().await, "the last release didn't create it");

    fleet_client.install("acme").await?;
    let certificate = json!({
        "apiVersion": "cert-manager.io/v1", "kind": "Certificate",
        "metadata": {"name": "theirs", "namespace": "default"},
    });
    let cluster = pair.cluster();
    cluster.apply(&certificate.to_string()).await?;
    fleet_client.remove("acme").await?;
    assert!(is_there().await, "a Certificate exists");
    let message = fleet_client.event_message("acme", "CrdsStay").await?;
    assert_contains!(message, "Certificate default/theirs");

    fleet_client.install("acme").await?;
    let delete = "delete certificates.cert-manager.io theirs -n default";
    cluster.kubectl_line(delete).await?;
    fleet_client.remove("acme").await?;
    wait_until_gone(&crds, CERTIFICATES).await?;
    fleet_client.event_message("acme", "CrdsDeleted").await?;
    pair.stop().await?;
    Ok(())
}
