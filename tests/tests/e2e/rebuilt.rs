//! Verifies a member whose cluster was rebuilt: nothing acts on it until a user accepts it as the same member.

use std::fs;

use k8s_openapi::api::core::v1::Namespace;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    Agent, AgentOptions, Cluster, Hub, HubOptions, Membership, Merge as _, Mode, Parts,
    STEP_DEADLINE, ServedChart, TestResult, assert_contains,
    fleet::{CONNECTED, FleetClient, HEALTHY},
    in_both_modes, join_bundle,
    membership::replacement_bundle,
};
use kube::{Api, ResourceExt};
use serde_json::json;
use tempfile::TempDir;

in_both_modes!(rebuilt_cluster_is_untouched_until_edge_cluster_replaced);

async fn cluster_uid(cluster: &Cluster) -> String {
    let namespaces: Api<Namespace> = Api::all(cluster.client());
    namespaces.get("kube-system").await.unwrap().uid().unwrap()
}

async fn rebuilt_cluster_is_untouched_until_edge_cluster_replaced(mode: Mode) -> TestResult {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let (home, former, rebuilt) = tokio::try_join!(
        Cluster::start("rebuilt-home", Parts::ControlPlane),
        Cluster::start("rebuilt-former", Parts::WithControllers),
        Cluster::start("rebuilt-new", Parts::WithControllers),
    )?;
    let options = HubOptions::new(home.kubeconfig()).args(chart.flags(&["--self-cluster=false"]));
    let mut hub = Hub::start(&options)?;
    let (fleet_client, at_former, at_rebuilt) = (
        FleetClient::new(&home),
        FleetClient::new(&former),
        FleetClient::new(&rebuilt),
    );
    let mut member = Membership::join(mode, &mut hub, &home, &former, "edge-1").await?;
    at_former.install("acme").await?;
    let before = fleet_client
        .wait_for_member("edge-1", &[CONNECTED, HEALTHY])
        .await?;
    let recorded = before.status.as_ref().unwrap().cluster_uid.clone();
    assert_eq!(recorded, Some(cluster_uid(&former).await));
    // Fields that a user has set on the member.
    let members: Api<EdgeCluster> = Api::all(home.client());
    let user_fields = json!({
        "metadata": {"labels": {"team": "a"}},
        "spec": {"allowedNamespaces": ["default"]},
    });
    members.merge("edge-1", &user_fields).await?;

    // The cluster is rebuilt. The old addresses lead to the new cluster.
    let folder = TempDir::with_prefix("krypton-rebuilt-")?;
    if let Some(agent) = member.agent() {
        agent.stop().await?;
        let file = folder.path().join("refused.yaml");
        fs::write(&file, join_bundle(&home, "edge-1").await?)?;
        let options = AgentOptions::new(rebuilt.kubeconfig()).join_file(&file);
        let mut agent = Agent::start(&options)?;
        agent.wait(STEP_DEADLINE).await?;
        let log = agent.log()?;
        assert_contains!(log, "kubectl krypton join edge-1 --replace");
        let message = fleet_client
            .event_message("edge-1", "EnrollmentRefused")
            .await;
        assert_contains!(message?, "--replace");
    } else {
        fleet_client
            .add_member("edge-1", &rebuilt.kubeconfig_with_token())
            .await?;
        let changed = ("Healthy", "False", "ClusterIdentityChanged");
        let status = fleet_client.wait_for_member("edge-1", &[changed]).await?;
        let status = serde_json::to_string(&status)?;
        assert_contains!(status, "kubectl krypton join edge-1 --replace");
        assert_eq!(at_rebuilt.namespace("krypton-system").await?, None);
    }

    let bundle = replacement_bundle(&home, "edge-1").await?;
    let agent = match mode {
        Mode::Agent => {
            let file = folder.path().join("bundle.yaml");
            fs::write(&file, bundle)?;
            let options = AgentOptions::new(rebuilt.kubeconfig()).join_file(&file);
            Some(Agent::start_ready(&options).await?)
        }
        Mode::Proxy | Mode::SelfCluster => {
            assert_eq!(bundle, "edgecluster.mesh.openkcm.io/edge-1 replaced\n");
            None
        }
    };
    let after = fleet_client
        .wait_for_member("edge-1", &[CONNECTED, HEALTHY])
        .await?;
    assert_ne!(after.uid(), before.uid());
    assert_eq!(after.spec.source_ref, before.spec.source_ref);
    assert_eq!(
        after.spec.allowed_namespaces,
        Some(vec!["default".to_owned()])
    );
    assert_eq!(after.labels().get("team").map(String::as_str), Some("a"));
    assert_eq!(
        after.status.as_ref().unwrap().cluster_uid,
        Some(cluster_uid(&rebuilt).await)
    );
    fleet_client.wait_for_mode("edge-1", mode).await?;
    at_rebuilt.install("acme").await?;
    // The releases on the old cluster are unchanged.
    at_former
        .wait_deployed("acme", "tenant-acme-edge-1", 1)
        .await?;

    // After a restart, the agent reports that its certificate is invalid.
    if let Some(mut agent) = agent {
        member.start_again(&former)?;
        let old = member.agent().unwrap();
        old.wait_for_log("belongs to a deleted EdgeCluster edge-1")
            .await?;
        fleet_client
            .wait_for_member("edge-1", &[CONNECTED, HEALTHY])
            .await?;
        agent.stop().await?;
    }
    Ok(())
}
