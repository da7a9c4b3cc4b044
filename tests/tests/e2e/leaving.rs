//! Shows a member that leaves the fleet together with its releases, as its EdgeCluster requests.

use anyhow::bail;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    Merge as _, Mode, Pair, Scenario, TestResult, eventually,
    fleet::{FleetClient, condition},
};
use krypton_types::names;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

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

#[tokio::test]
async fn leaving_member_uninstalls_releases_and_drops_tenant_finalizers() -> TestResult {
    let (pair, _chart) = Scenario::new("leaving", Mode::Proxy).start().await?;
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
    let at_home = FleetClient::at(pair.home());
    at_home.label_member(pair.name(), false).await?;
    at_home.label_member(pair.name(), true).await?;
    fleet_client.ready("two").await?;
    Ok(())
}
