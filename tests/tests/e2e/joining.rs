//! Verifies all mistakes that a user can make while joining: each message names the object and the remedy, and no
//! mistake has another effect.

use std::{fs, path::PathBuf};

use anyhow::bail;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use krypton_tests::{
    Agent, AgentOptions, Cluster, Hub, HubOptions, Merge as _, Mode, Parts, TestResult, eventually,
    fleet::{FleetClient, STEP_DEADLINE},
    join_bundle,
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
struct BundleFiles(TempDir);

impl BundleFiles {
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
async fn log_of_failed_agent(options: &AgentOptions<'_>) -> TestResult<String> {
    let mut agent = Agent::start(options)?;
    let status = agent.wait(STEP_DEADLINE).await?;
    assert!(!status.success(), "{}", agent.log()?);
    Ok(agent.log()?)
}

/// Returns an agent that keeps retrying, after it has logged these texts.
async fn retrying_agent(options: &AgentOptions<'_>, texts: &[&str]) -> Agent {
    let agent = Agent::start(options).unwrap();
    eventually(&format!("an agent to log {texts:?}"), async || {
        let log = agent.log()?;
        if texts.iter().all(|text| log.contains(text)) {
            return Ok(Some(()));
        }
        bail!("{log}")
    })
    .await
    .unwrap();
    agent
}

fn check_contains_all(log: &str, texts: &[&str]) {
    for text in texts {
        assert!(log.contains(text), "{text:?} is missing in: {log}");
    }
}

#[tokio::test]
async fn bad_bundle_names_remedy_and_good_one_joins() -> TestResult {
    let (home, edge) = tokio::try_join!(
        Cluster::start("joining-home", Parts::ControlPlane),
        Cluster::start("joining-edge", Parts::ControlPlane),
    )?;
    let fleet_client = FleetClient::new(&home);
    let files = BundleFiles::new();
    let flags = ["--self-cluster=false", "--chart-install-crds=false"];
    let mut hub = Hub::start(&HubOptions::new(home.kubeconfig()).args(flags))?;
    hub.wait_ready(STEP_DEADLINE).await?;
    let valid_bundle = join_bundle(&home, "edge-1").await?;
    let join_args = |file: &PathBuf, namespace: &str| {
        let namespace = format!("--namespace={namespace}");
        (file.clone(), namespace)
    };

    // Rejected before any request.
    let cut = valid_bundle.get(..valid_bundle.len() / 2).unwrap();
    for (name, content) in [
        ("cut.yaml", cut),
        ("prose.yaml", "not: [yaml"),
        ("empty.yaml", ""),
    ] {
        let file = files.file(name, content);
        let log =
            log_of_failed_agent(&AgentOptions::new(edge.kubeconfig()).join_file(&file)).await?;
        check_contains_all(&log, &[name, "kubectl krypton join"]);
    }
    let missing = files.0.path().join("missing.yaml");
    let log =
        log_of_failed_agent(&AgentOptions::new(edge.kubeconfig()).join_file(&missing)).await?;
    check_contains_all(&log, &["missing.yaml"]);
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
    let bundle_with_address = |to: &str| {
        let mut bundle: serde_json::Value = serde_saphyr::from_str(&valid_bundle).unwrap();
        bundle["addresses"] = json!([to]);
        serde_saphyr::to_string(&bundle).unwrap()
    };
    let file = files.file("nowhere.yaml", &bundle_with_address(&nowhere));
    let (file, namespace) = join_args(&file, "nowhere");
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args([namespace]);
    drop(retrying_agent(&options, &[&nowhere]).await);
    let file = files.file("http.yaml", &bundle_with_address(&http));
    let (file, namespace) = join_args(&file, "http");
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args([namespace]);
    drop(retrying_agent(&options, &[&http, "TLS"]).await);
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
    let file = files.file("other.yaml", &bundle_with_address(&other_address));
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args(["--namespace=other"]);
    drop(retrying_agent(&options, &[&other_address, "CA"]).await);
    drop(other);

    // A bundle whose token is for another name.
    let another = join_bundle(&home, "edge-2")
        .await?
        .replace("edge-2", "edge-3");
    let file = files.file("another.yaml", &another);
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args(["--namespace=another"]);
    let log = log_of_failed_agent(&options).await?;
    check_contains_all(&log, &["edge-2", "edge-3"]);

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
    let file = files.file("expired.yaml", &expired);
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args(["--namespace=expired"]);
    let log = log_of_failed_agent(&options).await?;
    check_contains_all(&log, &["expired", "kubectl krypton join edge-4"]);

    // A valid bundle, and its second use with another key.
    let file = files.file("good.yaml", &valid_bundle);
    let mut agent = Agent::start(&AgentOptions::new(edge.kubeconfig()).join_file(&file))?;
    agent.wait_ready(STEP_DEADLINE).await?;
    fleet_client.wait_for_mode("edge-1", Mode::Agent).await?;
    let options = AgentOptions::new(edge.kubeconfig())
        .join_file(&file)
        .args(["--namespace=second"]);
    let log = log_of_failed_agent(&options).await?;
    check_contains_all(&log, &["used", "kubectl krypton join edge-1"]);
    agent.stop().await?;

    // No log contains any part of a bundle.
    let bundle: serde_json::Value = serde_saphyr::from_str(&valid_bundle)?;
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
    let files = BundleFiles::new();
    let flags = ["--self-cluster=false", "--chart-install-crds=false"];
    let mut hub = Hub::start(&HubOptions::new(home.kubeconfig()).args(flags))?;
    hub.wait_ready(STEP_DEADLINE).await?;
    let file = files.file("bundle.yaml", &join_bundle(&home, "edge-1").await?);
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
    let powerless = files.file("powerless.yaml", &kubeconfig.to_string());
    let options = AgentOptions::new(&powerless).join_file(&file);
    drop(retrying_agent(&options, &["namespaces", "forbidden"]).await);
    Ok(())
}
