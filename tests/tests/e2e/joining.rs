//! Verifies all mistakes that a user can make while joining: each message names the object and the remedy, and no
//! mistake has another effect.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::ensure;
use k8s_openapi::api::core::v1::Secret;
use krypton_tests::{
    Agent, AgentOptions, Cluster, Hub, HubOptions, Merge as _, Mode, Parts, STEP_DEADLINE,
    TestResult, assert_contains, eventually,
    fleet::{FleetClient, SYSTEM_NAMESPACE},
    join_bundle,
    port::Port,
};
use kube::{Api, api::ListParams};
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpListener;

/// An edge cluster, and the files of its agents.
struct JoiningEdge {
    cluster: Cluster,
    folder: TempDir,
}

impl JoiningEdge {
    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, content).unwrap();
        path
    }

    fn start_agent(&self, bundle: &Path, namespace: &str) -> Agent {
        let options = AgentOptions::new(self.cluster.kubeconfig())
            .join_file(bundle)
            .args([format!("--namespace={namespace}")]);
        Agent::start(&options).unwrap()
    }

    /// Waits until an agent exits with an error, and verifies that it has logged these texts.
    async fn check_failure(&self, bundle: &Path, namespace: &str, texts: &[&str]) {
        let mut agent = self.start_agent(bundle, namespace);
        let status = agent.wait(STEP_DEADLINE).await.unwrap();
        let log = agent.log().unwrap();
        assert!(!status.success(), "{log}");
        for text in texts {
            assert_contains!(log, text);
        }
    }
}

/// Waits until an agent, which keeps retrying, has logged these texts.
async fn check_retries(agent: Agent, texts: &[&str]) {
    eventually(&format!("an agent to log {texts:?}"), async || {
        let log = agent.log()?;
        ensure!(texts.iter().all(|text| log.contains(text)), "{log}");
        Ok(Some(()))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn bad_bundle_names_remedy_and_good_one_joins() -> TestResult {
    let (home, cluster) = tokio::try_join!(
        Cluster::start("joining-home", Parts::ControlPlane),
        Cluster::start("joining-edge", Parts::ControlPlane),
    )?;
    let fleet_client = FleetClient::new(&home);
    let folder = TempDir::with_prefix("krypton-bundles-")?;
    let edge = JoiningEdge { cluster, folder };
    let flags = ["--self-cluster=false", "--chart-install-crds=false"];
    let hub = Hub::start_ready(&HubOptions::new(home.kubeconfig()).args(flags)).await?;
    let valid_bundle = join_bundle(&home, "edge-1").await?;

    // Rejected before any request.
    let cut = valid_bundle.get(..valid_bundle.len() / 2).unwrap();
    for (name, content) in [
        ("cut.yaml", cut),
        ("prose.yaml", "not: [yaml"),
        ("empty.yaml", ""),
    ] {
        let file = edge.file(name, content);
        edge.check_failure(&file, SYSTEM_NAMESPACE, &[name, "kubectl krypton join"])
            .await;
    }
    let missing = edge.folder.path().join("missing.yaml");
    edge.check_failure(&missing, SYSTEM_NAMESPACE, &["missing.yaml"])
        .await;
    let secrets: Api<Secret> = Api::namespaced(edge.cluster.client(), SYSTEM_NAMESPACE);
    assert!(secrets.list(&ListParams::default()).await?.items.is_empty());

    // No listener, and a foreign listener. The agent retries, because both can be temporary.
    let silent = Port::reserve()?;
    let nowhere = silent.address().to_string();
    let plain = TcpListener::bind("127.0.0.1:0").await?;
    let http = plain.local_addr()?.to_string();
    let serving = tokio::spawn(async move {
        let router = axum::Router::new();
        axum::serve(plain, router).await
    });
    let bundle_with_address = |to: &str| {
        let mut bundle: serde_json::Value = serde_saphyr::from_str(&valid_bundle).unwrap();
        bundle["addresses"] = json!([to]);
        serde_saphyr::to_string(&bundle).unwrap()
    };
    let file = edge.file("nowhere.yaml", &bundle_with_address(&nowhere));
    check_retries(edge.start_agent(&file, "nowhere"), &[&nowhere]).await;
    let file = edge.file("http.yaml", &bundle_with_address(&http));
    check_retries(edge.start_agent(&file, "http"), &[&http, "TLS"]).await;
    serving.abort();

    // The address belongs to a second hub: the agent doesn't accept its certificate.
    home.create_namespace("other").await?;
    let options = HubOptions::new(home.kubeconfig()).args(flags);
    let other = Hub::start(&options.args(["--namespace=other"]))?;
    let other_address = other.agents_address().to_string();
    let file = edge.file("other.yaml", &bundle_with_address(&other_address));
    check_retries(edge.start_agent(&file, "other"), &[&other_address, "CA"]).await;
    drop(other);

    // A bundle whose token is for another name.
    let another = join_bundle(&home, "edge-2")
        .await?
        .replace("edge-2", "edge-3");
    let file = edge.file("another.yaml", &another);
    edge.check_failure(&file, "another", &["edge-2", "edge-3"])
        .await;

    // An expired bundle.
    let expired = join_bundle(&home, "edge-4").await?;
    let tokens: Api<Secret> = Api::namespaced(home.client(), "default");
    let labelled = ListParams::default().labels("mesh.openkcm.io/join-token=true");
    for token in tokens.list(&labelled).await?.items {
        let name = token.metadata.name.unwrap();
        let of_edge_4 = token
            .data
            .is_some_and(|data| data.get("cluster").is_some_and(|name| name.0 == b"edge-4"));
        if of_edge_4 {
            let past = json!({"stringData": {"expires": "2020-01-01T00:00:00Z"}});
            tokens.merge(&name, &past).await?;
        }
    }
    let file = edge.file("expired.yaml", &expired);
    let remedy = ["expired", "kubectl krypton join edge-4"];
    edge.check_failure(&file, "expired", &remedy).await;

    // An agent without rights on its cluster.
    let kubectl = async |args: &str| edge.cluster.kubectl_line(args).await;
    kubectl("create serviceaccount nobody").await?;
    let token = kubectl("create token nobody").await?;
    let powerless = edge.file(
        "powerless.yaml",
        &edge.cluster.kubeconfig_with(token.trim()),
    );
    let file = edge.file("edge-5.yaml", &join_bundle(&home, "edge-5").await?);
    let agent = Agent::start(&AgentOptions::new(&powerless).join_file(&file))?;
    check_retries(agent, &["namespaces", "forbidden"]).await;

    // A valid bundle, and its second use with another key.
    let file = edge.file("good.yaml", &valid_bundle);
    let mut agent = edge.start_agent(&file, SYSTEM_NAMESPACE);
    agent.wait_ready(STEP_DEADLINE).await?;
    fleet_client.wait_for_mode("edge-1", Mode::Agent).await?;
    let remedy = ["used", "kubectl krypton join edge-1"];
    edge.check_failure(&file, "second", &remedy).await;
    agent.stop().await?;

    // No log contains any part of a bundle.
    let bundle: serde_json::Value = serde_saphyr::from_str(&valid_bundle)?;
    let secret = bundle["token"].as_str().unwrap().split_once('.').unwrap().1;
    assert!(!hub.log()?.contains(secret) && !agent.log()?.contains(secret));
    Ok(())
}
