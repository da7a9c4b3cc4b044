//! Verifies home's record of a placement: rewriting the Tenant doesn't change it, and another cluster with the member's
//! name is not used.

use std::io::Write;

use k8s_openapi::api::core::v1::Namespace;
use krypton_crds::tenant::TenantPlacement;
use krypton_tests::{
    Agent, AgentOptions, Cluster, Mode, Parts, TestResult, by_agent,
    fleet::{FleetClient, PATIENCE},
    membership::replaced,
};
use krypton_types::names;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use super::{EDGE, PLACED, Scene, TEAM};

by_agent!(placed_tenant_stays_bound_to_recorded_cluster);

const ANOTHER: (&str, &str, &str) = ("Placed", "Unknown", "ClusterIdentityChanged");

/// Runs `kubectl replace`, which keeps only the manifest and the status.
async fn replace(home: &Cluster, manifest: &Value) -> TestResult {
    let mut file = NamedTempFile::new()?;
    file.write_all(manifest.to_string().as_bytes())?;
    let words = ["replace", "-f", file.path().to_str().unwrap()];
    home.kubectl(words).await?;
    Ok(())
}

async fn uid(cluster: &Cluster) -> String {
    let namespaces: Api<Namespace> = Api::all(cluster.client());
    namespaces.get("kube-system").await.unwrap().uid().unwrap()
}

async fn placed_tenant_stays_bound_to_recorded_cluster(mode: Mode) -> TestResult {
    let mut scene = Scene::open("placed-record", mode).await?;
    scene.place(TEAM, "acme").await;
    scene.place(TEAM, "kept").await;
    let made = scene.is_placed(TEAM, "acme").await?;
    let kept = scene.is_placed(TEAM, "kept").await?;
    let place = TenantPlacement {
        cluster: EDGE.to_owned(),
        cluster_uid: uid(scene.pair.cluster()).await,
    };
    let again = json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "Tenant",
        "metadata": {"namespace": TEAM, "name": "acme"},
        "spec": {
            "workspace": "acme-ws",
            "clusterRef": {"secretName": "edge-2"},
            "values": {"replicaCount": 0},
        },
    });
    replace(scene.pair.home(), &again).await?;
    let refused = [("Placed", "False", "ClusterRefChanged")];
    let written = scene.home.shows("acme", &refused).await?;
    assert_eq!(written.finalizers(), [names::PLACED_FINALIZER]);
    assert_eq!(written.annotations()[names::PLACED_ON_ANNOTATION], EDGE);
    assert_eq!(written.status.unwrap().placement, Some(place));
    let same = scene.edges("acme").await.unwrap();
    assert_eq!(same.metadata.uid, made.metadata.uid);
    assert_eq!(same.metadata.generation, made.metadata.generation);
    // Home waits for the first Tenant, which is gone by then.
    scene.home.remove("acme").await?;
    assert_eq!(scene.edges("acme").await, None);
    let release = scene.pair.release("acme");
    let left = scene.edge.revisions("acme-ws", &release).await?;
    assert!(left.is_empty(), "{left:?}");

    // A user accepts another cluster as the member of that name.
    let other = Cluster::start("placed-record-other", Parts::ControlPlane).await?;
    let agent = takes_the_name(&mut scene, &other, mode).await;
    scene.home.shows("kept", &[ANOTHER]).await?;
    scene.home.delete("kept").await?;
    let waits = scene.home.shows("kept", &[ANOTHER]).await?;
    assert!(waits.metadata.deletion_timestamp.is_some());
    // The new cluster creates and removes the Tenants of later orders.
    let spec = json!({"clusterRef": {"secretName": EDGE}, "workspace": "kube-system"});
    scene.home.create("fresh", spec).await?;
    scene.home.shows("fresh", &[PLACED]).await?;
    let at_other = FleetClient::at(&other).within(TEAM);
    assert!(at_other.tenants().get("fresh").await.is_ok());
    scene.home.remove("fresh").await?;
    let found = at_other.tenants().get_opt("kept").await?;
    assert_eq!(found, None);
    let waits = scene.home.shows("kept", &[ANOTHER]).await?;
    assert_eq!(waits.finalizers(), [names::PLACED_FINALIZER]);
    let orphan = (names::ORPHAN_ANNOTATION, "true");
    scene.home.annotate("kept", orphan.0, orphan.1).await?;
    scene.home.gone("kept").await?;
    let same = scene.edges("kept").await.unwrap();
    assert_eq!(same.metadata.uid, kept.metadata.uid);
    assert_eq!(same.metadata.deletion_timestamp, None);
    drop(agent);
    Ok(())
}

/// Starts the agent of the cluster that now has the member's name, if the mode needs one.
async fn takes_the_name(scene: &mut Scene, other: &Cluster, mode: Mode) -> Option<Agent> {
    if mode != Mode::Agent {
        let access = other.kubeconfig_with_token();
        scene.home.add_member(EDGE, &access).await.unwrap();
        let changed = ("Healthy", "False", "ClusterIdentityChanged");
        scene.home.member_shows(EDGE, &[changed]).await.unwrap();
        replaced(scene.pair.home(), EDGE).await.unwrap();
        return None;
    }
    scene.pair.actor().unwrap().stop().await.unwrap();
    let bundle = replaced(scene.pair.home(), EDGE).await.unwrap();
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bundle.as_bytes()).unwrap();
    let options = AgentOptions::new(other.kubeconfig()).join_file(file.path());
    let mut agent = Agent::start(&options).unwrap();
    agent.ready(PATIENCE).await.unwrap();
    Some(agent)
}
