//! Verifies the readiness of deployed releases: after a restart, while a pause blocks an upgrade, and as Flux and Helm
//! see it.

use anyhow::{Context, Result, bail};
use krypton_tests::{
    Cluster, Mode, Pair, Scenario, TestResult, by_agent, eventually,
    fleet::{FleetClient, STEP_DEADLINE, condition},
    process::Invocation,
    tools::Tools,
};
use krypton_types::names;
use serde_json::{Value, json};

by_agent!(missing_workload_stays_not_ready);
by_agent!(kstatus_is_current_only_once_ready);

/// Returns the Deployment of Tenant acme's release in a form that can be applied again.
async fn read_deployment(cluster: &Cluster, release: &str) -> Result<Value> {
    let args = ["deployment", release, "--namespace=acme", "--output=json"];
    let output = cluster.kubectl(["get"].iter().chain(&args)).await?;
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
    let revisions = fleet_client.revisions("acme", &release).await?;
    assert_eq!(revisions, [(1, "deployed".to_owned())]);
    pair.stop().await?;
    Ok(())
}

/// Returns the status that Flux and `helm --wait` derive from the object.
async fn kstatus(cluster: &Cluster, kind: &str, name: &str) -> Result<String> {
    let object = cluster.kubectl(["get", kind, name, "-o", "json"]).await?;
    let program = Tools::find()?.program("kstatus")?;
    let program = program.to_str().context("the path is not UTF-8")?;
    let pipe = r#"printf %s "$1" | "$2""#;
    let shell = Invocation::new("/bin/sh").args(["-c", pipe, "sh", &object, program]);
    let output = shell.output(STEP_DEADLINE).await?;
    Ok(output.trim().replace('\t', ": "))
}

async fn kstatus_is_current_only_once_ready(mode: Mode) -> TestResult {
    let (mut pair, _chart) = Scenario::new("kstatus", mode).start().await?;
    let fleet_client = pair.fleet_client();
    fleet_client.install("acme").await?;
    let current = kstatus(pair.cluster(), "tenant", "acme").await?;
    assert!(current.starts_with("Current: "), "{current}");
    let member = pair.name();
    eventually("the member to be current", async || {
        let status = kstatus(pair.home(), "edgecluster", member).await?;
        match status.starts_with("Current: ") {
            true => Ok(Some(())),
            false => bail!("{status}"),
        }
    })
    .await?;

    // No process gives the new objects a status.
    pair.stop().await?;
    fleet_client.create("beta", json!({})).await?;
    let other = json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "EdgeCluster",
        "metadata": {"name": "other"},
    });
    pair.home().apply(&other.to_string()).await?;
    for (cluster, kind, name) in [
        (pair.cluster(), "tenant", "beta"),
        (pair.home(), "edgecluster", "other"),
    ] {
        let new = kstatus(cluster, kind, name).await?;
        assert!(new.starts_with("InProgress: "), "{kind}: {new}");
    }
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
