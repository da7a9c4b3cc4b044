//! Tests the selection of the home cluster with real files and a small HTTP server as API server.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use k8s_openapi::ByteString;
use krypton_runtime::access::{CONNECT_TIMEOUT, LocalSource, kubeconfig_yaml};
use krypton_types::error_chain::chain;
use kube::config::InClusterError;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::*;

const TOKEN: &str = "hunter2";

fn kubeconfig_with(server: &str, cluster: Value, user: Value) -> Value {
    let mut cluster = cluster;
    cluster["server"] = server.into();
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "blue",
        "clusters": [{"name": "c", "cluster": cluster}, {"name": "d", "cluster": {"server": "https://green:6443"}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [
            {"name": "blue", "context": {"cluster": "c", "user": "u"}},
            {"name": "green", "context": {"cluster": "d", "user": "u", "namespace": "ns"}},
        ],
    })
}

fn kubeconfig(server: &str) -> Value {
    kubeconfig_with(server, json!({}), json!({ "token": TOKEN }))
}

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, content: impl ToString) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content.to_string()).unwrap();
        path
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

fn source(choice: HomeChoice, context: Option<&str>, local: LocalSource) -> HomeSource {
    HomeSource {
        choice,
        context: context.map(str::to_owned),
        local,
    }
}

fn outside_of_a_pod() -> Result<Config, InClusterError> {
    Err(InClusterError::ReadEnvironmentVariable(
        std::env::VarError::NotPresent,
    ))
}

fn in_a_pod() -> Result<Config, InClusterError> {
    Ok(Config::new("https://10.0.0.1".parse().unwrap()))
}

async fn choose(source: HomeSource) -> Result<ClusterConfig, HomeError> {
    choose_from(&source, &Policy::default(), outside_of_a_pod).await
}

async fn choose_file(path: &Path, context: Option<&str>) -> Result<ClusterConfig, HomeError> {
    let choice = HomeChoice::File(path.to_owned());
    choose(source(choice, context, LocalSource::default())).await
}

async fn choose_local(
    local: LocalSource,
    context: Option<&str>,
) -> Result<ClusterConfig, HomeError> {
    choose(source(HomeChoice::Local, context, local)).await
}

#[track_caller]
fn assert_home(home: &ClusterConfig, server: &str, context: &str) {
    assert_eq!(home.config.cluster_url.to_string(), server);
    assert_eq!(home.context_name, context);
}

#[tokio::test]
async fn kubeconfig_flag_beats_variable_beats_user_file() {
    let files = Files::new();
    let mut local = LocalSource {
        flag: Some(files.write("flag", kubeconfig("https://flag:1"))),
        kubeconfig_variable: vec![files.write("variable", kubeconfig("https://variable:1"))],
        user_file: Some(files.write("user", kubeconfig("https://user:1"))),
    };
    let home = choose_local(local.clone(), None).await.unwrap();
    assert_home(&home, "https://flag:1/", "blue");
    assert_eq!(home.config.connect_timeout, Some(CONNECT_TIMEOUT));
    assert_eq!(home.config.read_timeout, None);
    local.flag = None;
    let home = choose_local(local.clone(), None).await.unwrap();
    assert_home(&home, "https://variable:1/", "blue");
    local.kubeconfig_variable.clear();
    let home = choose_local(local, None).await.unwrap();
    assert_home(&home, "https://user:1/", "blue");
}

#[tokio::test]
async fn pod_config_ranks_between_variable_and_user_file() {
    let files = Files::new();
    let mut local = LocalSource {
        user_file: Some(files.write("user", kubeconfig("https://user:1"))),
        ..Default::default()
    };
    let home = super::local(&local, Some("ignored"), in_a_pod).await;
    let home = home.unwrap();
    assert_home(&home, "https://10.0.0.1/", "in-cluster");
    local.kubeconfig_variable = vec![files.write("variable", kubeconfig("https://variable:1"))];
    let home = super::local(&local, None, in_a_pod).await.unwrap();
    assert_home(&home, "https://variable:1/", "blue");
}

#[tokio::test]
async fn listed_kubeconfigs_are_merged_skipping_missing_ones() {
    let files = Files::new();
    let mut second = kubeconfig("https://second:1");
    second["contexts"][0]["name"] = "red".into();
    let local = LocalSource {
        kubeconfig_variable: vec![
            files.path("none"),
            files.write("first", kubeconfig("https://first:1")),
            files.write("second", second),
        ],
        ..Default::default()
    };
    // "red" comes from the second file, its cluster "c" from the first, as with kubectl.
    let home = choose_local(local, Some("red")).await.unwrap();
    assert_home(&home, "https://first:1/", "red");
}

#[tokio::test]
async fn a_context_may_be_chosen_and_must_exist() {
    let files = Files::new();
    let path = files.write("k", kubeconfig("https://blue:1"));
    let home = choose_file(&path, Some("green")).await.unwrap();
    assert_home(&home, "https://green:6443/", "green");
    assert_eq!(home.config.default_namespace, "ns");
    let text = chain(&choose_file(&path, Some("pink")).await.unwrap_err());
    assert!(
        text.contains("\"pink\"") && text.contains("blue, green"),
        "{text}"
    );
}

#[tokio::test]
async fn bad_watch_file_error_names_path_without_content() {
    let files = Files::new();
    let no_context = json!({"clusters": [], "users": [], "contexts": []});
    let proxy = kubeconfig_with(
        "https://a:1",
        json!({"proxy-url": "ftp://user:hunter2@p:1"}),
        json!({}),
    );
    let broken = format!("users:\n- {TOKEN}\n  {TOKEN}: [");
    let no_yaml = "not a kubeconfig in YAML (line";
    for (name, content, expected) in [
        ("none", None, "reading it failed"),
        ("yaml", Some(broken), no_yaml),
        ("scalar", Some(TOKEN.to_owned()), no_yaml),
        (
            "empty",
            Some(no_context.to_string()),
            "it has no current-context",
        ),
        ("proxy", Some(proxy.to_string()), "proxy-url"),
    ] {
        let path = match content {
            Some(content) => files.write(name, content),
            None => files.path(name),
        };
        let error = choose_file(&path, None).await.unwrap_err();
        let text = chain(&error);
        assert!(
            text.starts_with("loading watch kubeconfig failed"),
            "{text}"
        );
        assert!(
            text.contains(expected) && text.contains(path.to_str().unwrap()),
            "{text}"
        );
        assert!(
            !text.contains(TOKEN) && !format!("{error:?}").contains(TOKEN),
            "{text}"
        );
    }
}

#[tokio::test]
async fn missing_local_kubeconfig_error_names_places_and_remedy() {
    let files = Files::new();
    let [none, neither] = ["none", "neither"].map(|name| files.path(name));
    let flag = LocalSource {
        flag: Some(none.clone()),
        ..Default::default()
    };
    let variable = LocalSource {
        kubeconfig_variable: vec![none, neither],
        ..Default::default()
    };
    let unreadable = "none failed; correct it, --kubeconfig or KUBECONFIG";
    for (local, expected) in [
        (flag, unreadable),
        (variable, unreadable),
        (LocalSource::default(), "no --kubeconfig, no KUBECONFIG"),
    ] {
        let error = choose_local(local, None).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

fn secret(key: &str, content: &str) -> Secret {
    let data = BTreeMap::from([(key.to_owned(), ByteString(content.as_bytes().to_vec()))]);
    Secret {
        data: Some(data),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_secret_is_read_through_the_sanitizer() {
    const KEY: &str = "kubeconfig";
    let good = kubeconfig("https://blue:1");
    let exec = kubeconfig_with("https://a:1", json!({}), json!({"exec": {"command": "sh"}}));
    let good = good.to_string();
    let by_address = |address: &str| kubeconfig(address).to_string();
    let missing = Err("secret ns/home missing key \"kubeconfig\"");
    let bad = Err("parse kubeconfig from secret failed: ns/home");
    let green = Ok(("https://green:6443/", "green"));
    // The user who starts the hub may select a loopback or link-local address.
    let loopback = by_address("https://127.0.0.1:1");
    let link_local = by_address("https://169.254.20.10:1");
    let by_link_local = Ok(("https://169.254.20.10:1/", "blue"));
    for (key, content, context, expected) in [
        (KEY, String::new(), None, missing),
        ("other", good.clone(), None, missing),
        (KEY, exec.to_string(), None, bad),
        (KEY, TOKEN.to_owned(), Some("green"), bad),
        (KEY, good.clone(), Some("pink"), bad),
        (KEY, good.clone(), None, Ok(("https://blue:1/", "blue"))),
        (KEY, good, Some("green"), green),
        (KEY, loopback, None, Ok(("https://127.0.0.1:1/", "blue"))),
        (KEY, link_local, None, by_link_local),
    ] {
        let secret = secret(key, &content);
        let result = from_secret(&secret, ("ns/home", KEY), context, &Policy::default()).await;
        match (result, expected) {
            (Ok(home), Ok((server, name))) => assert_home(&home, server, name),
            (Err(error), Err(expected)) => {
                let text = chain(&error);
                assert!(
                    text.starts_with(expected) && !text.contains(TOKEN),
                    "{text}"
                );
            }
            (result, expected) => panic!("{content}: {result:?} instead of {expected:?}"),
        }
    }
}

#[tokio::test]
async fn the_policy_admits_exec_in_the_watch_secret() {
    let exec = json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "true", "interactiveMode": "Never"}});
    let content = kubeconfig_with("https://a:1", json!({}), exec).to_string();
    let policy = Policy {
        allow_exec: true,
        ..Default::default()
    };
    let home = from_secret(&secret("k", &content), ("ns/home", "k"), None, &policy)
        .await
        .unwrap();
    assert!(home.config.auth_info.exec.is_some());
}

/// Responds to every request with `respond` and records the requests.
struct Server {
    url: String,
    requests: Arc<Mutex<Vec<(String, String)>>>,
}

impl Server {
    async fn start(respond: impl Fn() -> Response + Clone + Send + Sync + 'static) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let recorded = Arc::clone(&requests);
        let router = Router::new().fallback(move |uri: Uri, headers: HeaderMap| {
            let agent = headers[header::USER_AGENT].to_str().unwrap().to_owned();
            recorded.lock().push((uri.path().to_owned(), agent));
            let response = respond();
            async move { response }
        });
        tokio::spawn(axum::serve(listener, router).into_future());
        Self { url, requests }
    }

    fn local(&self, files: &Files) -> LocalSource {
        let path = files.write("local", kubeconfig(&self.url));
        LocalSource {
            flag: Some(path),
            ..Default::default()
        }
    }
}

async fn choose_watch_secret(local: LocalSource) -> Result<ClusterConfig, HomeError> {
    let choice = HomeChoice::Secret {
        namespace: "krypton".to_owned(),
        name: "home".to_owned(),
        key: "kubeconfig".to_owned(),
    };
    choose(source(choice, None, local)).await
}

fn as_json(status: StatusCode, body: Value) -> Response {
    (
        status,
        [(header::CONTENT_TYPE, "application/json")],
        body.to_string(),
    )
        .into_response()
}

#[tokio::test]
async fn watch_secret_is_fetched_with_local_kubeconfig() {
    let secret = secret("kubeconfig", &kubeconfig("https://home:6443").to_string());
    let body = serde_json::to_value(&secret).unwrap();
    let server = Server::start(move || as_json(StatusCode::OK, body.clone())).await;
    let files = Files::new();
    let home = choose_watch_secret(server.local(&files)).await.unwrap();
    assert_home(&home, "https://home:6443/", "blue");
    let agent = format!("krypton-hub/{}", env!("CARGO_PKG_VERSION"));
    let path = "/api/v1/namespaces/krypton/secrets/home".to_owned();
    assert_eq!(*server.requests.lock(), [(path, agent)]);
}

#[tokio::test]
async fn missing_watch_secret_error_matches_original() {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404, "message": "secrets \"home\" not found"});
    let server = Server::start(move || as_json(StatusCode::NOT_FOUND, status.clone())).await;
    let files = Files::new();
    let home = choose_watch_secret(server.local(&files)).await;
    let text = home.unwrap_err().to_string();
    assert!(
        text.starts_with("fetch secret krypton/home failed"),
        "{text}"
    );
}

#[tokio::test]
async fn watch_secret_fetch_fails_without_local_kubeconfig() {
    let home = choose_watch_secret(LocalSource::default()).await;
    let text = home.unwrap_err().to_string();
    assert_eq!(text, "construct client failed for secret fetch");
}

#[tokio::test]
async fn a_client_leaves_retrying_to_its_caller() {
    let server = Server::start(|| {
        (
            StatusCode::TOO_MANY_REQUESTS,
            [(header::RETRY_AFTER, "3600")],
        )
            .into_response()
    })
    .await;
    let client = client(Config::new(server.url.parse().unwrap())).unwrap();
    assert!(client.apiserver_version().await.is_err());
    assert_eq!(server.requests.lock().len(), 1);
}

fn rendered(config: &Config) -> Value {
    serde_json::from_str(&kubeconfig_yaml(config, None).unwrap()).unwrap()
}

#[tokio::test]
async fn certificates_in_files_are_inline_for_helm() {
    let files = Files::new();
    let user = json!({
        "client-certificate": files.write("cert", "the certificate"),
        "client-key": files.write("key", "the key"),
    });
    let path = files.write(
        "k",
        kubeconfig_with("https://a:1", json!({"tls-server-name": "b"}), user),
    );
    let home = choose_file(&path, None).await.unwrap();
    let kubeconfig = rendered(&home.config);
    let expected = json!({
        "client-certificate-data": ByteString(b"the certificate".to_vec()),
        "client-key-data": ByteString(b"the key".to_vec()),
    });
    assert_eq!(kubeconfig["users"][0]["user"], expected);
    assert_eq!(kubeconfig["clusters"][0]["cluster"]["tls-server-name"], "b");

    std::fs::remove_file(files.path("key")).unwrap();
    let error = kubeconfig_yaml(&home.config, None).unwrap_err().to_string();
    assert!(
        error.contains(files.path("key").to_str().unwrap()),
        "{error}"
    );
}

#[tokio::test]
async fn a_members_kubeconfig_makes_its_configuration() {
    let config = member_config(&kubeconfig("https://edge:6443").to_string())
        .await
        .unwrap();
    assert_eq!(config.cluster_url.to_string(), "https://edge:6443/");
    assert!(config.proxy_url.is_none());
}
