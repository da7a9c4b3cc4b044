//! Shows that the hub doesn't write a placed Tenant that is paused at home, outside the member's allowed namespaces, or
//! beyond the member's size limit.

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::tenant::Tenant;
use krypton_tests::{Merge as _, Mode, TestResult, by_agent};
use krypton_types::names;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::{EDGE, PLACED, Scene, TEAM, message};

by_agent!(held_back_placement_waits_and_keeps_placed_tenants);

const PAUSED: (&str, &str, &str) = ("Placed", "False", "Paused");
const NOT_ALLOWED: (&str, &str, &str) = ("Placed", "False", "NamespaceNotAllowed");
const TOO_MANY: (&str, &str, &str) = ("Placed", "False", "TooMany");

async fn held_back_placement_waits_and_keeps_placed_tenants(mode: Mode) -> TestResult {
    let scene = Scene::open("placed-held", mode).await?;
    paused(&scene).await?;
    not_allowed(&scene).await?;
    too_many(&scene).await?;
    Ok(())
}

async fn paused(scene: &Scene) -> TestResult {
    let spec = json!({
        "workspace": "later-ws",
        "clusterRef": {"secretName": EDGE},
        "values": {"replicaCount": 0},
    });
    let annotations = [(names::PAUSED_ANNOTATION, "true")];
    scene
        .home
        .create_annotated("later", spec, &annotations)
        .await?;
    scene.home.shows("later", &[PAUSED]).await?;
    assert_eq!(scene.edges("later").await, None);
    scene.pause("later", false).await;
    scene.is_placed(TEAM, "later").await?;

    scene.pause("later", true).await;
    let edit = json!({"spec": {"values": {"message": "second"}}});
    scene.patch(&scene.home, "later", edit).await;
    let is = |found: &Tenant| message(found) == Some("second");
    scene.on_edge("later", "the edit to be passed on", is).await;
    let progress = scene.pair.condition("ClusterProgress");
    let aside = [(progress.as_str(), "False", "Paused")];
    scene.edge.shows("later", &aside).await?;
    let release = scene.pair.release("later");
    let revisions = scene.edge.revisions("later-ws", &release).await?;
    assert_eq!(revisions, [(1, "deployed".to_owned())]);

    scene.home.delete("later").await?;
    let waits = scene.home.shows("later", &[PAUSED]).await?;
    assert_eq!(waits.finalizers(), [names::PLACED_FINALIZER]);
    let stays = scene.edges("later").await.unwrap();
    assert_eq!(stays.metadata.deletion_timestamp, None);
    scene.pause("later", false).await;
    scene.home.gone("later").await?;
    assert_eq!(scene.edges("later").await, None);
    Ok(())
}

async fn not_allowed(scene: &Scene) -> TestResult {
    let members: Api<EdgeCluster> = Api::all(scene.home.client.clone());
    let allow = async |namespaces: Value| {
        members
            .merge(EDGE, &json!({"spec": {"allowedNamespaces": namespaces}}))
            .await
            .unwrap();
    };
    scene.place(TEAM, "first").await;
    let first = scene.is_placed(TEAM, "first").await?;
    allow(json!(["others"])).await;
    scene.home.shows("first", &[NOT_ALLOWED]).await?;
    scene.place(TEAM, "second").await;
    let refused = scene.home.shows("second", &[NOT_ALLOWED]).await;
    assert!(refused?.finalizers().is_empty());
    assert_eq!(scene.edges("second").await, None);

    allow(json!(["others", TEAM])).await;
    scene.is_placed(TEAM, "second").await?;
    let stays = scene.is_placed(TEAM, "first").await?;
    assert_eq!(stays.metadata.uid, first.metadata.uid);
    assert_eq!(stays.metadata.generation, first.metadata.generation);

    // Edits don't reach the member, but a deletion does.
    allow(json!(["others"])).await;
    let shown = scene.home.shows("second", &[NOT_ALLOWED]);
    shown.await?;
    let edit = json!({"spec": {"values": {"message": "second"}}});
    scene.patch(&scene.home, "first", edit).await;
    scene.home.shows("first", &[NOT_ALLOWED]).await?;
    scene.home.remove("second").await?;
    assert_eq!(scene.edges("second").await, None);
    let stays = scene.edges("first").await.unwrap();
    assert_eq!(stays.metadata.uid, first.metadata.uid);
    assert_eq!(message(&stays), None);
    let release = scene.pair.release("first");
    let revisions = scene.edge.revisions("first-ws", &release).await?;
    assert_eq!(revisions, [(1, "deployed".to_owned())]);
    allow(Value::Null).await;
    scene.is_placed(TEAM, "first").await?;
    Ok(())
}

/// Creates three Tenants of a size that leaves room for two.
async fn too_many(scene: &Scene) -> TestResult {
    // Create them one after the other. The order of concurrent Tenants is undefined, and existing ones keep their
    // place.
    for (name, expected) in [
        ("large-1", PLACED),
        ("large-2", PLACED),
        ("large-3", TOO_MANY),
    ] {
        let spec = json!({
            // Krypton installs nothing in this workspace.
            "workspace": "kube-system",
            "clusterRef": {"secretName": EDGE},
            "values": {"text": "x".repeat(150 * 1024)},
        });
        scene.home.create(name, spec).await?;
        scene.home.shows(name, &[expected]).await?;
    }
    assert_eq!(scene.edges("large-3").await, None);
    scene.home.delete("large-1").await?;
    scene.home.gone("large-1").await?;
    scene.home.shows("large-3", &[PLACED]).await?;
    assert!(scene.edges("large-2").await.is_some());
    Ok(())
}
