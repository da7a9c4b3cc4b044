//! Shows that a process in a pod tolerates an API server that is down at startup and a rotated service account token.

use anyhow::Result;
use krypton_tests::{
    Agent, AgentOptions, ChartRepository, ChartSource, Cluster, Hub, HubOptions, Parts,
    STEP_DEADLINE, ServiceAccountAccess, TestResult, eventually,
    fleet::{FleetClient, ValuesFile, chart_flags, values_flag},
    membership::{bundle_in_namespace, write_secret},
};
use krypton_types::join_info::NAME as JOIN_INFO;
use serde_json::json;
use tempfile::TempDir;

const NAMESPACE: &str = "krypton-system";
const ACCOUNT: &str = "krypton";
/// Helm impersonates this account, which has no token.
const HELM_ACCOUNT: &str = "krypton-helm";

/// Starts a cluster with the accounts for the process and for Helm.
async fn start_cluster(name: &str) -> Result<(Cluster, ServiceAccountAccess)> {
    let cluster = Cluster::start_audited(name, Parts::WithControllers).await?;
    cluster.create_namespace(NAMESPACE).await?;
    for account in [ACCOUNT, HELM_ACCOUNT] {
        let create = format!("create serviceaccount {account} -n {NAMESPACE}");
        cluster.kubectl_line(&create).await?;
        let role = format!("create clusterrolebinding {account} --clusterrole=cluster-admin");
        let bind = format!("{role} --serviceaccount={NAMESPACE}:{account}");
        cluster.kubectl_line(&bind).await?;
    }
    let access = ServiceAccountAccess::new(&cluster, NAMESPACE, ACCOUNT).await?;
    Ok((cluster, access))
}

/// Waits until the API server accepts the process, not its Helm, with the token in the file.
async fn wait_for_new_token(cluster: &Cluster, access: &ServiceAccountAccess) {
    let (user, credential) = (access.username(), access.credential().unwrap());
    eventually("a request with the new token", async || {
        let used = cluster
            .audited_requests()
            .await?
            .into_iter()
            .any(|request| {
                request.user.username == user
                    && request.impersonated_user.is_none()
                    && request.credential() == Some(&credential)
            });
        Ok(used.then_some(()))
    })
    .await
    .unwrap();
}

async fn install_tenant(fleet_client: &FleetClient, tenant: &str) {
    fleet_client.install(tenant).await.unwrap();
}

#[tokio::test]
async fn hub_and_agent_await_apiserver_and_reload_tokens() -> TestResult {
    let repository = ChartRepository::start(&[ChartSource::small("1.0.0")]).await?;
    let ((home, mut at_home), (edge, mut at_edge)) =
        tokio::try_join!(start_cluster("pod-home"), start_cluster("pod-edge"))?;
    let values = ValuesFile::new("replicaCount: 0")?;
    let (home_config, edge_config) = (at_home.kubeconfig(), at_edge.kubeconfig());
    let account = format!("--helm-service-account={HELM_ACCOUNT}");

    // All processes start before their API server. The first reads home's kubeconfig from a Secret there.
    let secret = json!({"stringData": {"kubeconfig": home.kubeconfig_with_token()}});
    let system = FleetClient::new(&home).in_namespace(NAMESPACE);
    system.apply_secret("home", secret).await?;
    home.stop_apiserver().await?;
    let elsewhere = ["--watch-kubeconfig-secret=home", "--self-cluster=false"];
    let options = HubOptions::new(&home_config)
        .env("POD_NAMESPACE", NAMESPACE)
        .args(elsewhere);
    let mut hub = Hub::start(&options)?;
    hub.wait_for_log("home is not ready").await?;
    home.start_apiserver().await?;
    hub.wait_ready(STEP_DEADLINE).await?;
    hub.stop().await?;

    // The next hub listens at another address, and `join` must not read this one's.
    let delete = format!("delete configmap {JOIN_INFO} -n {NAMESPACE} --ignore-not-found");
    home.kubectl_line(&delete).await?;
    home.stop_apiserver().await?;
    let options = HubOptions::new(&home_config)
        .env("POD_NAMESPACE", NAMESPACE)
        .args(chart_flags(&repository, "small", "1.0.0"))
        .args([values_flag(&values), account.clone()]);
    let mut hub = Hub::start(&options)?;
    hub.wait_for_log("home is not ready").await?;
    home.start_apiserver().await?;
    hub.wait_ready(STEP_DEADLINE).await?;

    let bundle = eventually("the hub to accept agents", async || {
        Ok(bundle_in_namespace(&home, NAMESPACE, "edge-1").await.ok())
    })
    .await?;
    let folder = TempDir::with_prefix("krypton-join-")?;
    let file = folder.path().join("bundle.yaml");
    write_secret(&file, &bundle)?;
    edge.stop_apiserver().await?;
    let options = AgentOptions::new(&edge_config)
        .join_file(&file)
        .env([("POD_NAMESPACE".to_owned(), NAMESPACE.to_owned())])
        .args([account]);
    let mut agent = Agent::start(&options)?;
    agent.wait_for_log("the cluster is not ready").await?;
    edge.start_apiserver().await?;
    agent.wait_ready(STEP_DEADLINE).await?;

    let (fleet_client, on_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    tokio::join!(
        install_tenant(&fleet_client, "first"),
        install_tenant(&on_edge, "one")
    );
    let holder = fleet_client.holder().await?;

    // On home, like the kubelet: the old token stays valid until the new one is in use. On the edge cluster, all requests
    // are rejected until the agent reads the file again, which it does once a minute.
    let old = tokio::try_join!(at_home.renew(&home), at_edge.renew(&edge))?;
    at_edge.revoke(&edge, old.1).await?;
    tokio::join!(
        wait_for_new_token(&home, &at_home),
        wait_for_new_token(&edge, &at_edge)
    );
    at_home.revoke(&home, old.0).await?;
    tokio::join!(
        install_tenant(&fleet_client, "second"),
        install_tenant(&on_edge, "two")
    );
    assert_eq!(fleet_client.holder().await?, holder);

    // Throughout the test, Helm acted as its account, with the process's token.
    let helm = krypton_tests::service_account::username(NAMESPACE, HELM_ACCOUNT);
    for (cluster, access) in [(&home, &at_home), (&edge, &at_edge)] {
        let requests = cluster.audited_requests().await?;
        let by_helm = requests.iter().filter(|request| request.is_of(&helm));
        let user = access.username();
        assert!(by_helm.clone().count() > 0);
        assert!(
            by_helm
                .into_iter()
                .all(|request| request.user.username == user)
        );
    }
    hub.stop().await?;
    agent.stop().await?;
    Ok(())
}
