//! Verifies the readiness of deployed releases: after a restart, while a pause blocks an upgrade, and as
//! Flux, Helm and Argo CD see it.

use anyhow::{Context, Result, bail};
use krypton_tests::{
    ChartSource, Cluster, Mode, Pair, Scenario, TestResult, argo_health, assert_contains, by_agent,
    eventually,
    fleet::{FleetClient, condition},
    kstatus,
};
use krypton_types::names;
use serde_json::{Value, json};
use tempfile::TempDir;

by_agent!(missing_workload_stays_not_ready);
by_agent!(kstatus_is_current_only_once_ready);

/// Returns the Deployment of Tenant acme's release in a form that can be applied again.
async fn read_deployment(cluster: &Cluster, release: &str) -> Result<Value> {
    let get = format!("get deployment {release} -n acme -o json");
    let output = cluster.kubectl_line(&get).await?;
    let mut object: Value = serde_json::from_str(&output)?;
    let of_the_server = [
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "managedFields",
    ];
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.retain(|field, _| !of_the_server.contains(&field.as_str()));
    }
    object["status"].take();
    Ok(object)
}

async fn delete_deployment(cluster: &Cluster, release: &str) {
    let args = ["delete", "deployment", release, "--namespace=acme"];
    cluster.kubectl(args).await.unwrap();
}

async fn missing_workload_stays_not_ready(mode: Mode) -> TestResult {
    let (mut pair, chart) = Scenario::new("missing", mode).start().await?;
    let fleet_client = pair.fleet_client();
    let release = pair.release("acme");
    let [ready, progress] = ["ClusterReady", "ClusterProgress"].map(|kind| pair.condition(kind));
    let lost = (ready.as_str(), "False", "NotReady");
    fleet_client.install("acme").await?;
    let deployment = read_deployment(pair.cluster(), &release).await?;
    delete_deployment(pair.cluster(), &release).await;
    fleet_client.wait_for("acme", &[lost]).await?;

    restart(&mut pair, &fleet_client, mode).await?;
    let tenant = fleet_client.tenants().get("acme").await?;
    let conditions = tenant.status.unwrap_or_default().conditions;
    let now = condition(&conditions, &ready).unwrap();
    assert_eq!((now.status.as_str(), now.reason.as_str()), (lost.1, lost.2));

    // The pause blocks the upgrade. Krypton still updates the readiness, also after a restart.
    let paused = (progress.as_str(), "False", "Paused");
    fleet_client
        .annotate("acme", names::PAUSED_ANNOTATION, "true")
        .await?;
    chart.write("{replicaCount: 0, message: other}")?;
    fleet_client.wait_for("acme", &[paused, lost]).await?;
    pair.cluster().apply(&deployment.to_string()).await?;
    let recovered = (ready.as_str(), "True", "NoChange");
    fleet_client.wait_for("acme", &[paused, recovered]).await?;
    restart(&mut pair, &fleet_client, mode).await?;
    delete_deployment(pair.cluster(), &release).await;
    fleet_client.wait_for("acme", &[paused, lost]).await?;
    assert_derived(
        (pair.cluster(), "tenant", "acme"),
        "InProgress",
        "Suspended",
    )
    .await?;
    let revisions = fleet_client.revisions("acme", &release).await?;
    assert_eq!(revisions, [(1, "deployed".to_owned())]);
    pair.stop().await?;
    Ok(())
}

/// Writes a chart with one Tenant, which has the name of the release.
fn with_tenant() -> Result<TempDir> {
    let folder = TempDir::with_prefix("krypton-tenant-chart-")?;
    let tenant = "apiVersion: mesh.openkcm.io/v1alpha1\nkind: Tenant\n\
        metadata: {name: '{{ .Release.Name }}'}\n\
        spec: {workspace: '{{ .Values.workspace }}'}\n";
    ChartSource::write(
        folder.path(),
        "tenant",
        &[("templates/tenant.yaml", tenant)],
    )?;
    Ok(folder)
}

/// Installs the chart with `helm --wait`.
async fn deliver(
    cluster: &Cluster,
    chart: &TempDir,
    (name, workspace): (&str, &str),
    timeout: &str,
) -> Result<String> {
    let chart = chart.path().to_str().context("the path is not UTF-8")?;
    let (workspace, timeout) = (
        format!("--set=workspace={workspace}"),
        format!("--timeout={timeout}"),
    );
    let args = ["install", name, chart, "--wait", &workspace, &timeout];
    cluster.helm(args).await
}

/// Checks what Flux and Argo CD derive from the object.
async fn assert_derived(
    (cluster, kind, name): (&Cluster, &str, &str),
    status: &str,
    health: &str,
) -> TestResult {
    let derived = kstatus(cluster, kind, name).await?;
    assert!(derived.starts_with(status), "{kind} {name}: {derived}");
    let derived = argo_health(cluster, kind, name).await?;
    assert!(derived.starts_with(health), "{kind} {name}: {derived}");
    Ok(())
}

async fn kstatus_is_current_only_once_ready(mode: Mode) -> TestResult {
    let (mut pair, _chart) = Scenario::new("kstatus", mode).start().await?;
    let fleet_client = pair.fleet_client();
    fleet_client.install("acme").await?;
    let acme = (pair.cluster(), "tenant", "acme");
    assert_derived(acme, "Current", "Healthy").await?;
    let member = pair.name();
    eventually("the member to be current", async || {
        let status = kstatus(pair.home(), "edgecluster", member).await?;
        match status.starts_with("Current: ") {
            true => Ok(Some(())),
            false => bail!("{status}"),
        }
    })
    .await?;
    assert_derived((pair.home(), "edgecluster", member), "Current", "Healthy").await?;

    // Helm returns once the Tenant is ready, or once only a user can make it ready.
    let chart = with_tenant()?;
    let cluster = pair.cluster();
    deliver(cluster, &chart, ("beta", "beta"), "170s").await?;
    let conditions = fleet_client.tenants().get("beta").await?;
    let conditions = conditions.status.unwrap_or_default().conditions;
    assert_eq!(condition(&conditions, "Ready").unwrap().status, "True");
    let refused = deliver(cluster, &chart, ("gamma", "kube-system"), "170s").await;
    let error = format!("{:#}", refused.unwrap_err());
    assert_contains!(error, "status: Failed", "NamespaceNotOwned");
    assert_derived((cluster, "tenant", "gamma"), "Failed", "Degraded").await?;

    // No process gives new objects a status, or takes a change in.
    pair.stop().await?;
    let cluster = pair.cluster();
    let waited = deliver(cluster, &chart, ("delta", "delta"), "5s").await;
    let error = format!("{:#}", waited.unwrap_err());
    assert_contains!(error, "default/delta not ready");
    let other = json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "EdgeCluster",
        "metadata": {"name": "other"},
    });
    pair.home().apply(&other.to_string()).await?;
    let home = FleetClient::new(pair.home());
    home.patch_member(member, json!({"paused": true})).await?;
    for object in [
        (cluster, "tenant", "delta"),
        (pair.home(), "edgecluster", "other"),
        (pair.home(), "edgecluster", member),
    ] {
        assert_derived(object, "InProgress", "Progressing").await?;
    }
    fleet_client.delete("acme").await?;
    let deleted = kstatus(cluster, "tenant", "acme").await?;
    assert!(deleted.starts_with("Terminating: "), "{deleted}");
    Ok(())
}

async fn restart(pair: &mut Pair, fleet_client: &FleetClient, mode: Mode) -> TestResult {
    let holder = fleet_client.holder().await?;
    pair.stop().await?;
    pair.start_hub_again()?;
    if mode == Mode::Agent {
        pair.start_agent_again()?;
    }
    fleet_client.wait_for_new_holder(&holder).await?;
    // After the Lease was held for a full period, every object has been reconciled.
    fleet_client.wait_for_renewal().await?;
    Ok(())
}
