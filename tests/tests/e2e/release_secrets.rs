//! Verifies the repair of deleted or damaged release Secrets: workloads keep running, and the release becomes complete
//! again.

use anyhow::{Context, Result, bail};
use k8s_openapi::{
    ByteString,
    api::core::v1::{ConfigMap, Secret},
};
use krypton_tests::{
    Merge as _, Mode, Scenario, TestResult, assert_contains, eventually, fleet::FleetClient,
    wait_until_replaced,
};
use krypton_types::names;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams},
};
use serde_json::json;

fn secrets(fleet_client: &FleetClient) -> Api<Secret> {
    Api::namespaced(fleet_client.client.clone(), "acme")
}

fn secret_name(release: &str, revision: u32) -> String {
    format!("sh.helm.release.v1.{release}.v{revision}")
}

async fn damage(fleet_client: &FleetClient, release: &str, revision: u32) -> Result<()> {
    // Valid base64, but not valid gzip.
    let data = ByteString(b"H4sIAAAAAAAA/2RhbWFnZWQ=".to_vec());
    secrets(fleet_client)
        .merge(
            &secret_name(release, revision),
            &json!({"data": {"release": data}}),
        )
        .await?;
    Ok(())
}

async fn uid(fleet_client: &FleetClient, release: &str) -> Result<String> {
    let maps: Api<ConfigMap> = Api::namespaced(fleet_client.client.clone(), "acme");
    maps.get(release).await?.uid().context("no UID")
}

#[tokio::test]
async fn deleted_or_damaged_release_secrets_are_repaired() -> TestResult {
    let (mut pair, chart) = Scenario::new("secrets", Mode::SelfCluster)
        .values("{replicaCount: 0, message: v1}")
        .start()
        .await?;
    let fleet_client = pair.fleet_client();
    let write = |message: &str| {
        let yaml = format!("{{replicaCount: 0, message: {message}}}");
        chart.write(&yaml)
    };
    let release = pair.release("acme");
    fleet_client.create("acme", json!({})).await?;
    fleet_client.wait_deployed("acme", &release, 1).await?;
    let first = uid(&fleet_client, &release).await?;

    // All revisions are deleted: Krypton adopts the objects with the release's name.
    let api = secrets(&fleet_client);
    let params = DeleteParams::default();
    let before = api.get(&secret_name(&release, 1)).await?;
    api.delete(&secret_name(&release, 1), &params).await?;
    wait_until_replaced(&api, &before).await?;
    fleet_client.wait_deployed("acme", &release, 1).await?;

    write("v2")?;
    fleet_client.wait_deployed("acme", &release, 2).await?;
    write("v3")?;
    fleet_client.wait_deployed("acme", &release, 3).await?;

    // A revision in the middle is deleted: no repair is necessary, and the next upgrade succeeds.
    api.delete(&secret_name(&release, 2), &params).await?;
    write("v4")?;
    fleet_client.wait_deployed("acme", &release, 4).await?;

    // The newest revision is deleted: only superseded ones are left.
    let before = api.get(&secret_name(&release, 4)).await?;
    api.delete(&secret_name(&release, 4), &params).await?;
    wait_until_replaced(&api, &before).await?;
    fleet_client.wait_deployed("acme", &release, 4).await?;

    // A revision is damaged while no other action is pending: Helm ignores it, but its name would block the next
    // revision.
    damage(&fleet_client, &release, 4).await?;
    fleet_client
        .event_message("acme", "ReleaseUnreadable")
        .await?;
    eventually("one deployed release", async || {
        let revisions = fleet_client.revisions("acme", &release).await?;
        match revisions.last() {
            Some((4.., status)) if status == "deployed" => Ok(Some(())),
            _ => bail!("{revisions:?}"),
        }
    })
    .await?;
    let revisions = fleet_client.revisions("acme", &release).await?;
    let deployed = revisions.iter().filter(|(_, status)| status == "deployed");
    assert_eq!(deployed.count(), 1, "{revisions:?}");
    let unreadable = ListParams::default().fields("type=mesh.openkcm.io/unreadable-release");
    assert_eq!(api.list(&unreadable).await?.items.len(), 1);
    fleet_client.wait_ready("acme").await?;
    assert_eq!(uid(&fleet_client, &release).await?, first, "not recreated");
    let log = pair.actor()?.log()?;
    assert!(!log.contains("running helm uninstall"), "{log}");

    // A Tenant is deleted with a damaged revision: the objects of the earlier revisions are removed.
    let newest = revisions.last().unwrap().0;
    damage(&fleet_client, &release, newest).await?;
    fleet_client.remove("acme").await?;
    Ok(())
}

#[tokio::test]
async fn unreadable_only_revision_blocks_deletion_until_orphaned() -> TestResult {
    let (mut pair, _chart) = Scenario::new("unread", Mode::SelfCluster).start().await?;
    let fleet_client = pair.fleet_client();
    let release = pair.release("acme");
    let error = pair.condition("ClusterError");
    fleet_client.install("acme").await?;
    // For a live Tenant, Krypton would set the revision aside and install the chart again.
    pair.stop().await?;
    damage(&fleet_client, &release, 1).await?;
    fleet_client.delete("acme").await?;
    pair.start_actor_again()?;
    let failed = (error.as_str(), "True", "UninstallFailed");
    let message = fleet_client.condition_message("acme", &[failed]).await?;
    assert_contains!(message, release, names::ORPHAN_ANNOTATION);
    fleet_client
        .annotate("acme", names::ORPHAN_ANNOTATION, "true")
        .await?;
    fleet_client.wait_gone("acme").await?;
    uid(&fleet_client, &release).await?;
    Ok(())
}
