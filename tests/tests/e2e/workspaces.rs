//! Verifies labels and annotations of workspaces: from the fleet, from a member, and from other owners.

use std::collections::BTreeMap;

use anyhow::ensure;
use k8s_openapi::api::core::v1::Namespace;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    ChartSource, Merge as _, Mode, Pair, Parts, ServedChart, TestResult, assert_contains, by_agent,
    eventually, fleet::FleetClient,
};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

const EDGE: &str = "edge-1";
const CREATOR: &str = "mesh.openkcm.io/created-for";
/// A label that Kubernetes sets on each namespace.
const NAME: &str = "kubernetes.io/metadata.name";
const RECORD: &str = "mesh.openkcm.io/namespace-configuration";

by_agent!(workspace_metadata_follows_fleet_and_member_configuration);

async fn patch_namespace(fleet_client: &FleetClient, name: &str, metadata: Value) {
    let namespaces: Api<Namespace> = Api::all(fleet_client.client.clone());
    namespaces
        .merge(name, &json!({"metadata": metadata}))
        .await
        .unwrap();
}

async fn configure_member(home: &FleetClient, configuration: Value) -> kube::Result<EdgeCluster> {
    let spec = json!({"namespaceConfiguration": configuration});
    home.patch_member(EDGE, spec).await
}

type Labels = BTreeMap<String, String>;

fn to_labels(pairs: &[(&str, &str)]) -> Labels {
    let pairs = pairs.iter();
    pairs
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

/// Returns all labels and annotations, except the ones that identify the owner.
fn configured(namespace: &Namespace) -> (Labels, Labels) {
    let (mut labels, mut annotations) =
        (namespace.labels().clone(), namespace.annotations().clone());
    labels.retain(|key, _| ![CREATOR, NAME, "mesh.openkcm.io/managed-by"].contains(&key.as_str()));
    annotations.remove(RECORD);
    (labels, annotations)
}

async fn wait_for_metadata(
    fleet_client: &FleetClient,
    labels: &[(&str, &str)],
    annotations: &[(&str, &str)],
) {
    let expected = (to_labels(labels), to_labels(annotations));
    let what = format!("namespace acme to have {expected:?}");
    eventually(&what, async || {
        let namespace = fleet_client.namespace("acme").await?.unwrap_or_default();
        let actual = configured(&namespace);
        ensure!(actual == expected, "{actual:?}");
        ensure!(namespace.labels().contains_key(CREATOR), "it has no marker");
        Ok(Some(()))
    })
    .await
    .unwrap();
}

async fn workspace_metadata_follows_fleet_and_member_configuration(mode: Mode) -> TestResult {
    let source = ChartSource::small("1.0.0");
    let chart = ServedChart::new(source, ("small", "1.0.0"), None).await?;
    let mut pair = Pair::start("workspaces", mode, Parts::WithControllers).await?;
    let with_flags =
        |extra_flags: &[&str]| chart.flags(&[&["--wait=hooks"][..], extra_flags].concat());
    let first = with_flags(&[
        "--workspace-labels=team=a,zone=1",
        r"--workspace-annotations=example.org/note=one\, two",
    ]);
    pair.start_hub_and_join(first).await?;
    let (fleet_client, home) = (pair.fleet_client(), FleetClient::new(pair.home()));
    pair.cluster().create_namespace("theirs").await?;
    let theirs = fleet_client.namespace("theirs").await?.unwrap();
    for name in ["acme", "theirs"] {
        fleet_client.install(name).await?;
    }

    // The namespace was created with them, and not written since.
    let created = fleet_client.namespace("acme").await?.unwrap();
    let note = ("example.org/note", "one, two");
    let fleets = (
        to_labels(&[("team", "a"), ("zone", "1")]),
        to_labels(&[note]),
    );
    assert_eq!(configured(&created), fleets);
    let manager = |namespace: &Namespace| namespace.managed_fields().len();
    assert_eq!(manager(&created), 1, "{:?}", created.managed_fields());

    // A user's additions stay, but changes are reverted.
    let person = json!({"labels": {"mine": "1", "team": "mine"}, "annotations": {"my": "note"}});
    patch_namespace(&fleet_client, "acme", person).await;
    let (mine, my) = (("mine", "1"), ("my", "note"));
    let inherited = [mine, ("team", "a"), ("zone", "1")];
    wait_for_metadata(&fleet_client, &inherited, &[note, my]).await;

    // A member's own ones override the fleet's.
    let own = json!({"labels": {"zone": "2"}, "annotations": {"example.org/own": "x"}});
    configure_member(&home, own).await?;
    let (zone, own) = (("zone", "2"), ("example.org/own", "x"));
    let overridden = [mine, ("team", "a"), zone];
    wait_for_metadata(&fleet_client, &overridden, &[note, my, own]).await;
    // Invalid entries change nothing. The API server rejects some of them itself.
    let refused = configure_member(&home, json!({"labels": {"zone": "not a value"}})).await;
    assert!(refused.is_err(), "{refused:?}");
    let marks = json!({"labels": {"zone": "3", CREATOR: "me"}});
    configure_member(&home, marks).await?;
    let invalid = ("ValuesResolved", "False", "NamespaceConfigurationInvalid");
    let member = home.wait_for_member(EDGE, &[invalid]).await?;
    let status = serde_json::to_string(&member.status)?;
    assert_contains!(status, CREATOR);
    fleet_client.wait_for_renewal().await?;
    wait_for_metadata(&fleet_client, &overridden, &[note, my, own]).await;
    configure_member(&home, Value::Null).await?;
    wait_for_metadata(&fleet_client, &inherited, &[note, my]).await;
    eventually("no message about it", async || {
        let member = home.wait_for_member(EDGE, &[]).await?;
        let status = serde_json::to_string(&member.status)?;
        ensure!(!status.contains("ValuesResolved"), "{status}");
        Ok(Some(()))
    })
    .await?;

    // The fleet's entries change: one is removed and another one is added. In the end, none are left.
    pair.stop().await?;
    pair.start_hub_and_join(with_flags(&["--workspace-labels=team=b,tier=gold"]))
        .await?;
    let now = [mine, ("team", "b"), ("tier", "gold")];
    wait_for_metadata(&fleet_client, &now, &[my]).await;
    pair.stop().await?;
    pair.start_hub_and_join(with_flags(&[])).await?;
    wait_for_metadata(&fleet_client, &[mine], &[my]).await;
    let bare = fleet_client.namespace("acme").await?.unwrap();
    assert!(!bare.annotations().contains_key(RECORD));

    // No change affected the releases, or a namespace that Krypton didn't create.
    for name in ["acme", "theirs"] {
        fleet_client.wait_ready(name).await?;
        fleet_client
            .wait_deployed(name, &pair.release(name), 1)
            .await?;
    }
    let after = fleet_client.namespace("theirs").await?.unwrap();
    assert_eq!(after.metadata, theirs.metadata);
    Ok(())
}
