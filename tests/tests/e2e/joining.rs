//! Verifies all mistakes that a user can make while joining: each message names the object and the remedy, and no
//! mistake has another effect.

use std::{fs, path::PathBuf};

use anyhow::bail;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use krypton_tests::{
    Agent, AgentOptions, Cluster, Hub, HubOptions, Merge as _, Mode, Parts, TestResult, bundle,
    eventually,
    fleet::{FleetClient, PATIENCE},
    port::Port,
};
use kube::{
    Api,
    api::{ListParams, PostParams},
};
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpListener;

/// Files with join bundles.
struct Desktop(TempDir);

impl Desktop {
    fn new() -> Self {
        Self(TempDir::with_prefix("krypton-bundles-").unwrap())
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, content).unwrap();
        path
    }
}

/// Returns the log of an agent that exits with an error.
async fn gives_up(options: &AgentOptions<'_>) -> TestResult<String> {
    let mut agent = Agent::start(options)?;
    let status = agent.wait(PATIENCE).await?;
    assert!(!status.success(), "{}", agent.log()?);
    Ok(agent.log()?)
}

/// Returns an agent that keeps retrying, after it has logged these texts.
async fn logs(options: &AgentOptions<'_>, words: &[&str]) -> Agent {
    let agent = Agent::start(options).unwrap();
    eventually(&format!("an agent to log {words:?}"), async || {
        let log = agent.log()?;
        if words.iter().all(|word| log.contains(word)) {
            return Ok(Some(()));
        }
        bail!("{log}")
    })
    .await
    .unwrap();
    agent
}

fn all_there(log: &str, words: &[&str]) {
    for word in words {
        assert!(log.contains(word), "{word:?} is missing in: {log}");
    }
}

#[tokio::test]
async fn bad_bundle_names_remedy_and_good_one_joins() -> TestResult {
    let (home, edge) = tokio::try_join!(
        Cluster::start("joining-home", Parts::ControlPlane),
        Cluster::start("joining-edge", Parts::ControlPlane),
    )?;
    let fleet_client = FleetClient::at(&home);
    let desktop = Desktop::new();
    let flags = ["--self-cluster=false", "--chart-install-crds=false"];
    let mut hub = Hub::start(&HubOptions::new(home.kubeconfig()).args(flags))?;
    hub.ready(PATIENCE).await?;
    let good = bundle(&home, "edge-1").await?;
    let with = |file: &PathBuf, namespace: &str| {
        let namespace = format!("--namespace={namespace}");
        (file.clone(), namespace)
    };

    // Rejected before any request.
    let cut = good.get(..good.len() / 2).unwrap();
    for (name, content) in [
        ("cut.yaml", cut),
        ("prose.yaml", "not: [yaml"),
        ("empty.yaml", ""),
    ] {
        let file = desktop.file(name, content);
        let log = gives_up(&AgentOptions::new(edge.kubeconfig()).join_file(&file)).await?;
        all_there(&log, &[name, "kubectl krypton join"]);
    }
    let missing = desktop.0.path().join("missing.yaml");
    let log = gives_up(&AgentOptions::new(edge.kubeconfig()).join_file(&missing)).await?;
    all_there(&log, &["missing.yaml"]);
    let secrets: Api<Secret> = Api::namespaced(edge.client(), "krypton-system");
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
    let address = |to: &str| {
        let mut bundle: serde_json::Value = serde_saphyr::from_str(&good).unwrap();
        bundle["addresses"] = json!([to]);
        serde_saphyr::to_string(&bundle).unwrap()
    };
    let file = desktop.file("nowhere.yaml", &address(&nowhere));
    let (file, namespace) = with(&file, "nowhere");
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args([namespace]);
    drop(logs(&options, &[&nowhere]).await);
    let file = desktop.file("http.yaml", &address(&http));
    let (file, namespace) = with(&file, "http");
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args([namespace]);
    drop(logs(&options, &[&http, "TLS"]).await);
    serving.abort();

    // The address belongs to a second hub: the agent doesn't accept its certificate.
    let other_namespace =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}});
    home.apply(&other_namespace.to_string()).await?;
    let other = Hub::start(
        &HubOptions::new(home.kubeconfig())
            .args(flags)
            .args(["--namespace=other"]),
    )?;
    let other_address = other.agents_address().to_string();
    let file = desktop.file("other.yaml", &address(&other_address));
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args(["--namespace=other"]);
    drop(logs(&options, &[&other_address, "CA"]).await);
    drop(other);

    // A bundle whose token is for another name.
    let another = bundle(&home, "edge-2").await?.replace("edge-2", "edge-3");
    let file = desktop.file("another.yaml", &another);
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args(["--namespace=another"]);
    let log = gives_up(&options).await?;
    all_there(&log, &["edge-2", "edge-3"]);

    // An expired bundle.
    let expired = bundle(&home, "edge-4").await?;
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
    let file = desktop.file("expired.yaml", &expired);
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args(["--namespace=expired"]);
    let log = gives_up(&options).await?;
    all_there(&log, &["expired", "kubectl krypton join edge-4"]);

    // A valid bundle, and its second use with another key.
    let file = desktop.file("good.yaml", &good);
    let mut agent = Agent::start(&AgentOptions::new(edge.kubeconfig()).join_file(&file))?;
    agent.ready(PATIENCE).await?;
    fleet_client.member_is("edge-1", Mode::Agent).await?;
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args(["--namespace=second"]);
    let log = gives_up(&options).await?;
    all_there(&log, &["used", "kubectl krypton join edge-1"]);
    agent.stop().await?;

    // No log contains any part of a bundle.
    let bundle: serde_json::Value = serde_saphyr::from_str(&good)?;
    let secret = bundle["token"].as_str().unwrap().split_once('.').unwrap().1;
    assert!(!hub.log()?.contains(secret) && !agent.log()?.contains(secret));
    Ok(())
}

#[tokio::test]
async fn agent_logs_its_missing_rights() -> TestResult {
    let (home, edge) = tokio::try_join!(
        Cluster::start("rights-home", Parts::ControlPlane),
        Cluster::start("rights-edge", Parts::ControlPlane),
    )?;
    let desktop = Desktop::new();
    let flags = ["--self-cluster=false", "--chart-install-crds=false"];
    let mut hub = Hub::start(&HubOptions::new(home.kubeconfig()).args(flags))?;
    hub.ready(PATIENCE).await?;
    let file = desktop.file("bundle.yaml", &bundle(&home, "edge-1").await?);
    let accounts: Api<ServiceAccount> = Api::namespaced(edge.client(), "default");
    let nobody = serde_json::from_value(json!({"metadata": {"name": "nobody"}}))?;
    accounts.create(&PostParams::default(), &nobody).await?;
    let request = TokenRequest {
        spec: TokenRequestSpec::default(),
        ..TokenRequest::default()
    };
    let token = accounts
        .create_token_request("nobody", &PostParams::default(), &request)
        .await?;
    let mut kubeconfig: serde_json::Value = serde_saphyr::from_str(&edge.kubeconfig_with_token())?;
    kubeconfig["users"][0]["user"] = json!({"token": token.status.unwrap().token});
    let powerless = desktop.file("powerless.yaml", &kubeconfig.to_string());
    let options = AgentOptions::new(&powerless).join_file(&file);
    drop(logs(&options, &["namespaces", "forbidden"]).await);
    Ok(())
}
