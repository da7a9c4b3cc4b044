//! Verifies that the hub leaves a member only to an agent that can act.

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    AgentOptions, Hub, HubOptions, Membership, Mode, Parts, ServedChart, TestResult, eventually,
    fleet::FleetClient, home_and_edge, membership::enrolled_agent,
};
use kube::Api;
use tempfile::TempDir;

/// An agent's rights without DaemonSets, which its administrator has forgotten.
const ALMOST_ALL: &str = r#"
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: almost-all}
rules:
- {apiGroups: ["", "coordination.k8s.io", "mesh.openkcm.io", "apiextensions.k8s.io"], resources: ["*"], verbs: ["*"]}
- {apiGroups: ["apps"], resources: ["deployments", "statefulsets"], verbs: ["*"]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: almost-all}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: almost-all}
subjects: [{kind: ServiceAccount, name: agent, namespace: default}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: agent, namespace: default}
"#;

#[tokio::test]
async fn agent_without_full_cluster_access_leaves_proxy_acting() -> TestResult {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let (home, edge) = home_and_edge("blind", Parts::ControlPlane).await?;
    let (fleet_client, at_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    let flags = chart.flags(&["--self-cluster=false", "--proxy-grace=5s"]);
    let mut hub = Hub::start(&HubOptions::new(home.kubeconfig()).args(flags))?;
    let _member = Membership::join(Mode::Proxy, &mut hub, &home, &edge, "edge-1").await?;
    fleet_client.wait_for_mode("edge-1", Mode::Proxy).await?;
    let hubs = at_edge.holder().await?;

    edge.apply(ALMOST_ALL).await?;
    let token = edge.kubectl(["create", "token", "agent"]).await?;
    let folder = TempDir::with_prefix("krypton-blind-")?;
    let blind = folder.path().join("kubeconfig.yaml");
    std::fs::write(&blind, edge.kubeconfig_with(token.trim()))?;
    let _agent = enrolled_agent(&home, "edge-1", AgentOptions::new(&blind)).await?;
    let members: Api<EdgeCluster> = Api::all(home.client());
    eventually("the agent to be shown on home", async || {
        let status = members.get("edge-1").await?.status.unwrap_or_default();
        Ok(status.agent_version.map(drop))
    })
    .await?;

    // Longer than the grace period: only a ready agent makes the hub release the Lease.
    at_edge.wait_for_renewal().await?;
    at_edge.install("acme").await?;
    assert_eq!(at_edge.holder().await?, hubs);
    fleet_client.wait_for_mode("edge-1", Mode::Proxy).await?;
    Ok(())
}
