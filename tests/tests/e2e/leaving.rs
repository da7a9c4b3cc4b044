//! Shows a member that leaves the fleet together with its releases, as its EdgeCluster requests.

use anyhow::bail;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    Merge as _, Mode, Pair, Scenario, TestResult, by_agent, eventually,
    fleet::{FleetClient, condition},
    in_both_modes,
    membership::replaced,
};
use krypton_types::names;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

in_both_modes!(leaving_member_uninstalls_releases_and_drops_tenant_finalizers);
by_agent!(member_deletion_waits_while_paused_until_orphaned);

fn members(pair: &Pair) -> Api<EdgeCluster> {
    Api::all(pair.home().client())
}

async fn patched(pair: &Pair, patch: Value) {
    members(pair).merge(pair.name(), &patch).await.unwrap();
}

/// Sets the deletion policy, and waits until the EdgeCluster has the finalizer.
async fn is_to_uninstall(pair: &Pair) -> EdgeCluster {
    patched(pair, json!({"spec": {"deletionPolicy": "Uninstall"}})).await;
    eventually("the EdgeCluster to have its finalizer", async || {
        let object = members(pair).get(pair.name()).await?;
        let held = object.finalizers() == [names::UNINSTALL_FINALIZER];
        Ok(held.then_some(object))
    })
    .await
    .unwrap()
}

async fn delete(pair: &Pair) {
    let params = DeleteParams::default();
    members(pair).delete(pair.name(), &params).await.unwrap();
}

async fn is_gone(pair: &Pair, uid: Option<String>) {
    eventually("the EdgeCluster to be gone", async || {
        match members(pair).get_opt(pair.name()).await? {
            Some(object) if object.metadata.uid == uid => {
                let conditions = object.status.unwrap_or_default().conditions;
                bail!("{:?}", condition(&conditions, "Uninstalled"))
            }
            _ => Ok(Some(())),
        }
    })
    .await
    .unwrap();
}

async fn installed(fleet_client: &FleetClient, tenants: &[&str]) {
    for name in tenants {
        let spec = json!({"workspace": format!("{name}-ws")});
        fleet_client.create(name, spec).await.unwrap();
    }
    for name in tenants {
        fleet_client.ready(name).await.unwrap();
    }
}

async fn leaving_member_uninstalls_releases_and_drops_tenant_finalizers(mode: Mode) -> TestResult {
    let (pair, _chart) = Scenario::new("leaving", mode).start().await?;
    let fleet_client = pair.fleet_client();
    installed(&fleet_client, &["one", "two"]).await;
    let stays = json!({"workspace": "stays-ws"});
    let orphan = [(names::ORPHAN_ANNOTATION, "true")];
    fleet_client
        .create_annotated("stays", stays, &orphan)
        .await?;
    fleet_client.ready("stays").await?;
    let object = is_to_uninstall(&pair).await;
    delete(&pair).await;
    is_gone(&pair, object.metadata.uid).await;

    let ready = pair.condition("ClusterReady");
    for name in ["one", "two", "stays"] {
        let left = [(ready.as_str(), "False", "Uninstalled")];
        let tenant = fleet_client.shows(name, &left).await?;
        assert_eq!(tenant.finalizers(), [] as [&str; 0]);
        assert_eq!(tenant.metadata.deletion_timestamp, None);
        // With this annotation, Krypton would adopt a later user's release as the Tenant's.
        let fingerprint = names::fingerprint_annotation(pair.name());
        let kept = tenant.annotations().contains_key(&fingerprint);
        assert_eq!(kept, name == "stays", "{name}");
    }
    let releases = fleet_client.releases().await?;
    let left: Vec<&String> = releases.keys().collect();
    let kept = format!("sh.helm.release.v1.{}.v1", pair.release("stays"));
    assert_eq!(left, [&kept]);
    for workspace in ["one-ws", "two-ws"] {
        assert_eq!(fleet_client.namespace(workspace).await?, None);
    }
    // The labelled Secret still exists, but it doesn't bring the member back.
    fleet_client.remove("one").await?;
    assert_eq!(members(&pair).get_opt(pair.name()).await?, None);
    assert_eq!(fleet_client.releases().await?, releases);

    // Relabelling the Secret restores the member with everything on it.
    if mode == Mode::Proxy {
        let at_home = FleetClient::at(pair.home());
        at_home.label_member(pair.name(), false).await?;
        at_home.label_member(pair.name(), true).await?;
        fleet_client.ready("two").await?;
    }
    Ok(())
}

async fn member_deletion_waits_while_paused_until_orphaned(mode: Mode) -> TestResult {
    let (mut pair, _chart) = Scenario::new("held", mode).start().await?;
    let fleet_client = pair.fleet_client();
    installed(&fleet_client, &["one"]).await;
    let releases = fleet_client.releases().await?;
    let object = is_to_uninstall(&pair).await;
    patched(&pair, json!({"spec": {"paused": true}})).await;
    delete(&pair).await;
    let at_home = FleetClient::at(pair.home());
    let waits = [("Uninstalled", "False", "UninstallWaits")];
    let message = at_home.member_message(pair.name(), &waits).await?;
    assert!(
        message.contains("paused") && message.contains("orphan"),
        "{message}"
    );
    // A new hub knows only this state, and takes no action either.
    pair.hub()?.kill9().await?;
    pair.start_hub_again()?;
    let connected = [("Connected", "True", "Connected")];
    at_home.member_shows(pair.name(), &connected).await?;
    at_home.member_shows(pair.name(), &waits).await?;
    assert_eq!(fleet_client.releases().await?, releases);

    let orphan = json!({"metadata": {"annotations": {names::ORPHAN_ANNOTATION: "true"}}});
    patched(&pair, orphan).await;
    is_gone(&pair, object.metadata.uid).await;
    assert_eq!(fleet_client.releases().await?, releases);
    let tenant = fleet_client.tenants().get("one").await?;
    assert_eq!(tenant.finalizers(), [names::TENANT_FINALIZER]);
    Ok(())
}

#[tokio::test]
async fn crd_deletion_or_member_replacement_uninstalls_nothing() -> TestResult {
    let (pair, _chart) = Scenario::new("crd", Mode::Proxy).start().await?;
    let fleet_client = pair.fleet_client();
    installed(&fleet_client, &["one"]).await;
    let releases = fleet_client.releases().await?;
    let at_home = FleetClient::at(pair.home());
    let connected = [("Connected", "True", "Connected")];

    let before = is_to_uninstall(&pair).await;
    replaced(pair.home(), pair.name()).await?;
    let after = eventually("the EdgeCluster to be another", async || {
        let object = members(&pair).get(pair.name()).await?;
        let held = object.finalizers() == [names::UNINSTALL_FINALIZER];
        Ok((held && object.metadata.uid != before.metadata.uid).then_some(object))
    })
    .await?;
    assert_eq!(after.spec, before.spec);
    assert_eq!(after.annotations().get(names::ORPHAN_ANNOTATION), None);
    at_home.member_shows(pair.name(), &connected).await?;
    assert_eq!(fleet_client.releases().await?, releases);

    let crds: Api<CustomResourceDefinition> = Api::all(pair.home().client());
    let crd = EdgeCluster::crd().name_any();
    crds.delete(&crd, &DeleteParams::default()).await?;
    is_gone(&pair, after.metadata.uid).await;
    at_home.member_shows(pair.name(), &connected).await?;
    assert_eq!(fleet_client.releases().await?, releases);
    Ok(())
}
