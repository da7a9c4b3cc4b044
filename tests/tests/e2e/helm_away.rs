//! Verifies that Krypton reports a broken Helm with the remedy, keeps releases running, and continues after the repair.

use std::{
    fs::{self, File},
    io::{ErrorKind, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};
use krypton_tests::{
    Cluster, Hub, HubOptions, Mode, Parts, Scenario, ServedChart, TestResult, Tools,
    assert_contains,
    fleet::{FleetClient, condition},
};
use serde_json::json;
use tempfile::TempDir;

/// Replaces Helm by a script atomically, like a changed image.
fn replace_helm(helm: &Path, script: &str) -> Result<()> {
    let next = helm.with_extension("next");
    fs::write(&next, format!("#!/bin/sh\n{script}\n"))?;
    fs::set_permissions(&next, fs::Permissions::from_mode(0o755))?;
    fs::rename(next, helm)?;
    Ok(())
}

/// Returns Helm's folder of runs below the actor's folder.
fn runs_folder(folder: &Path) -> Result<PathBuf> {
    for entry in fs::read_dir(folder)?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if path.ends_with("helm/runs") {
                return Ok(path);
            }
            if let Ok(found) = runs_folder(&path) {
                return Ok(found);
            }
        }
    }
    bail!("no folder of runs in {}", folder.display())
}

async fn wait_for_condition(
    fleet_client: &FleetClient,
    error: &str,
    reason: &str,
    parts: &[&str],
) -> TestResult {
    let expected = (error, "True", reason);
    let message = fleet_client.condition_message("acme", &[expected]).await?;
    for part in parts {
        assert_contains!(message, part);
    }
    Ok(())
}

#[tokio::test]
async fn helm_failure_reports_remedy_and_upgrade_recovers() -> TestResult {
    let folder = TempDir::with_prefix("krypton-helm-away-")?;
    let helm = folder.path().join("helm");
    let real = Tools::find()?.binary("helm");
    let real = format!("exec '{}' \"$@\"", real.display());
    replace_helm(&helm, &real)?;
    let program = format!("--helm={}", helm.display());
    let (mut pair, chart) = Scenario::new("away", Mode::SelfCluster)
        .values("{replicaCount: 0, message: v1}")
        .flags(&[&program, "--max-concurrent-helm=1"])
        .start()
        .await?;
    let fleet_client = pair.fleet_client();
    let write = |message: u32| {
        let yaml = format!("{{replicaCount: 0, message: v{message}}}");
        chart.write(&yaml).unwrap();
    };
    let release = pair.release("acme");
    let [ready, error] = ["ClusterReady", "ClusterError"].map(|kind| pair.condition(kind));
    let running = async |revision: u32| {
        fleet_client
            .wait_deployed("acme", &release, revision)
            .await
            .unwrap();
        tokio::join!(fleet_client.wait_ready("acme")).0.unwrap();
    };
    fleet_client.create("acme", json!({})).await?;
    running(1).await;

    fs::rename(&helm, folder.path().join("away"))?;
    write(2);
    wait_for_condition(
        &fleet_client,
        &error,
        "HelmUnavailable",
        &["cannot be run", "install Helm"],
    )
    .await?;
    fleet_client
        .event_message("acme", "HelmConfigInitFailed")
        .await?;
    // The running release is as ready as before.
    let tenant = fleet_client.tenants().get("acme").await?;
    let conditions = tenant.status.unwrap().conditions;
    assert_eq!(condition(&conditions, &ready).unwrap().status, "True");
    fs::rename(folder.path().join("away"), &helm)?;
    running(2).await;

    replace_helm(&helm, "echo v3.21.4")?;
    write(3);
    wait_for_condition(
        &fleet_client,
        &error,
        "HelmUnavailable",
        &["v3.21.4", "install Helm"],
    )
    .await?;
    replace_helm(&helm, &real)?;
    running(3).await;

    // A file instead of the folder: even root can't write there.
    let log = pair.actor()?.log_path().to_owned();
    let runs = runs_folder(log.parent().unwrap())?;
    fs::remove_dir_all(&runs)?;
    fs::write(&runs, "in the way")?;
    write(4);
    let parts = ["cannot be used", "--cache-dir"];
    wait_for_condition(&fleet_client, &error, "HelmUnavailable", &parts).await?;
    fs::remove_file(&runs)?;
    running(4).await;

    // Behaves like the kernel when memory is exhausted.
    replace_helm(
        &helm,
        &format!("[ \"$1\" = version ] || kill -9 $$\n{real}"),
    )?;
    write(5);
    let parts = [
        "signal 9",
        "--max-concurrent-helm",
        "revision 4 keeps running",
    ];
    wait_for_condition(&fleet_client, &error, "UpgradeFailed", &parts).await?;
    replace_helm(&helm, &real)?;
    running(5).await;
    Ok(())
}

#[tokio::test]
async fn upgrade_reports_full_disk_and_recovers_after_cleanup() -> TestResult {
    let chart = ServedChart::small("{replicaCount: 0, message: first}").await?;
    let home = Cluster::start("full-home", Parts::WithControllers).await?;
    let flags = chart.flags(&[]);
    let options = HubOptions::new(home.kubeconfig()).args(flags);
    let hub = Hub::start_ready(&options.with_disk_size(64 << 20)).await?;
    let fleet_client = FleetClient::new(&home);
    let running = async |revision: u32| {
        let release = krypton_types::names::tenant_release("acme", "self-cluster");
        fleet_client
            .wait_deployed("acme", &release, revision)
            .await
            .unwrap();
        fleet_client.wait_ready("acme").await.unwrap();
    };
    fleet_client.create("acme", json!({})).await?;
    running(1).await;

    let filler = hub.scratch()?.join("filler");
    let mut file = File::create(&filler)?;
    for size in [1 << 20, 1 << 10, 1] {
        let block = vec![0; size];
        let full = loop {
            if let Err(error) = file.write_all(&block) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::StorageFull, "{full}");
    }
    chart.write("{replicaCount: 0, message: second}")?;
    let parts = ["is the disk full", "No space left on device"];
    wait_for_condition(
        &fleet_client,
        "ClusterError/self-cluster",
        "HelmUnavailable",
        &parts,
    )
    .await?;
    let tenant = fleet_client.tenants().get("acme").await?;
    let conditions = tenant.status.unwrap().conditions;
    let ready = condition(&conditions, "ClusterReady/self-cluster").unwrap();
    assert_eq!(ready.status, "True", "{ready:?}");

    fs::remove_file(&filler)?;
    drop(file);
    running(2).await;
    Ok(())
}
