//! Creates the fake node that kwok simulates, with room for any number of pods.

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, api::PostParams};
use serde_json::json;

const NAME: &str = "fake-1";

pub(super) async fn create(client: &Client) -> Result<()> {
    let capacity = json!({"cpu": "10k", "memory": "10Ti", "pods": "10k"});
    let node: Node = serde_json::from_value(json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": NAME,
            "annotations": {"kwok.x-k8s.io/node": "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {
                "kubernetes.io/arch": "amd64",
                "kubernetes.io/os": "linux",
                "kubernetes.io/hostname": NAME,
                "type": "kwok",
            },
        },
        "status": {"allocatable": capacity, "capacity": capacity},
    }))
    .context("serializing the fake node")?;
    let nodes: Api<Node> = Api::all(client.clone());
    nodes
        .create(&PostParams::default(), &node)
        .await
        .context("creating the fake node")?;
    Ok(())
}

/// Returns `Some` if the scheduler can use the node: ready and without the not-ready taint.
pub(super) async fn check_ready(client: &Client) -> Result<Option<()>> {
    let node = Api::<Node>::all(client.clone())
        .get(NAME)
        .await
        .context("reading the fake node")?;
    let conditions = node
        .status
        .and_then(|status| status.conditions)
        .unwrap_or_default();
    let ready = conditions
        .iter()
        .find(|condition| condition.type_ == "Ready");
    let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
    match (ready.map(|ready| ready.status.as_str()), taints.first()) {
        (Some("True"), None) => Ok(Some(())),
        (Some("True"), Some(taint)) => bail!("the node has taint {}", taint.key),
        (status, _) => bail!("the node's Ready is {}", status.unwrap_or("not set")),
    }
}
