//! Tables from objects as an API server returns them, and complete runs against a small HTTP server.

mod debug_port;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::commands::get::{clusters_table, deployments_table, tenants_table};
use crate::commands::support_bundle;
use crate::render::View;

fn now() -> Timestamp {
    "2026-01-02T03:04:05Z".parse().unwrap()
}

fn view(wide: bool) -> View {
    View { wide, now: now() }
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-01-02T03:00:05Z",
    })
}

fn cluster(name: &str, spec: Value, status: Value) -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "EdgeCluster",
        "metadata": {"name": name, "creationTimestamp": "2026-01-02T03:02:00Z"},
        "spec": spec,
        "status": status,
    })
}

fn tenant(namespace: &str, name: &str, status: Value) -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "Tenant",
        "metadata": {"namespace": namespace, "name": name, "creationTimestamp": "2026-01-01T03:04:05Z"},
        "spec": {"workspace": "ws"},
        "status": status,
    })
}

fn fleet() -> Vec<Value> {
    vec![
        cluster(
            "edge-1",
            json!({}),
            json!({
                "mode": "proxy",
                "kubernetesVersion": "v1.36.3",
                "tenants": {"total": 4, "ready": 3, "pending": 1, "error": 0},
                "applied": {"epoch": 1, "generation": 7, "digest": "abc"},
                "desired": {"epoch": 1, "generation": 8, "chart": "r/c:1"},
                "conditions": [condition("Connected", "True", "Connected", "ok")],
                "leaseHolder": "hub-0",
                "clusterUID": "u-1",
                "lastSeen": "2026-01-02T03:03:55Z",
            }),
        ),
        cluster(
            "edge-22",
            json!({"paused": true, "banned": true}),
            json!({
                "mode": "none",
                "conditions": [condition("Connected", "False", "Unreachable", "no answer\nfor 30 s \u{1b}[31m")],
            }),
        ),
        cluster("new", json!({}), Value::Null),
        cluster("odd", json!({"paused": "perhaps"}), json!({})),
    ]
}

#[test]
fn clusters_table_shows_known_state() {
    let expected = "\
NAME      MODE                 CONNECTED   READY   VERSION   APPLIED   AGE
edge-1    proxy                True        3/4     v1.36.3   1.7       2m5s
edge-22   none,paused,banned   False       -       -         -         2m5s
new       -                    Unknown     -       -         -         2m5s
odd       <not readable>
";
    assert_eq!(clusters_table(&fleet(), view(false)).render(), expected);
}

#[test]
fn wide_clusters_table_shows_holder_and_message() {
    let expected = "\
NAME      MODE                 CONNECTED   READY   VERSION   APPLIED   AGE    WANTED   LAST-SEEN   HOLDER   CLUSTER-UID   MESSAGE
edge-1    proxy                True        3/4     v1.36.3   1.7       2m5s   1.8      10s         hub-0    u-1           -
edge-22   none,paused,banned   False       -       -         -         2m5s   -        -           -        -             Unreachable: no answer for 30 s [31m
";
    assert_eq!(clusters_table(&fleet()[..2], view(true)).render(), expected);
}

fn tenants() -> Vec<Value> {
    let chart = "https://charts.jetstack.io/cert-manager:1.19.1";
    vec![
        tenant(
            "default",
            "acme",
            json!({
                "phase": "Error",
                "lastAppliedChart": chart,
                "lastMessage": "1 of 4 clusters ready; edge-1: UpgradeFailed: timed out waiting for the condition",
                "conditions": [
                    condition("Ready", "False", "ClustersNotReady", ""),
                    condition("ClusterReady/edge-1", "False", "UpgradeFailed", "not ready"),
                    condition("ClusterError/edge-1", "True", "UpgradeFailed", "timed out"),
                    condition("ClusterReady/edge-2", "True", "Installed", "release installed"),
                    condition("ClusterError/edge-2", "False", "NoError", ""),
                    condition("ClusterReady/edge-3", "Unknown", "ClusterUnreachable", ""),
                    condition("ClusterReady/self-cluster", "False", "NotReady", "waits"),
                    condition("ClusterProgress/self-cluster", "True", "Installing", "helm runs"),
                ],
            }),
        ),
        tenant("default", "new", Value::Null),
        tenant("default", "odd", json!({"conditions": "none"})),
    ]
}

#[test]
fn tenants_table_counts_ready_clusters() {
    let expected = "\
NAMESPACE   NAME   PHASE            READY   CHART                 MESSAGE                                                        AGE
default     acme   Error            1/4     cert-manager:1.19.1   1 of 4 clusters ready; edge-1: UpgradeFailed: timed out wai…   24h
default     new    -                0/0     -                     -                                                              24h
default     odd    <not readable>
";
    assert_eq!(tenants_table(&tenants(), view(false)).render(), expected);
}

#[test]
fn deployments_table_shows_region_and_clusters() {
    let deployment = |name: &str, status: Value| {
        json!({
            "apiVersion": "mesh.openkcm.io/v1alpha1",
            "kind": "KryptonDeployment",
            "metadata": {"namespace": "default", "name": name, "creationTimestamp": "2026-01-02T03:02:00Z"},
            "spec": {"account": {"name": "acme"}, "region": {"name": "rome"}},
            "status": status,
        })
    };
    let place = |cluster: &str, removing: bool| json!({"cluster": cluster, "clusterUid": "u", "removing": removing});
    let moved = json!({
        "phase": "Ready",
        "lastAppliedChart": "https://charts.example.org/small:1.0.0",
        "lastMessage": "Successfully deployed to region rome",
        "placements": [place("paris", true), place("rome", false)],
        "conditions": [condition("Ready", "True", "Deployed", "")],
    });
    let objects = [
        deployment("acme", moved),
        deployment("new", Value::Null),
        deployment("odd", json!({"placements": "none"})),
    ];
    let expected = "\
NAMESPACE   NAME   REGION           CLUSTER               PHASE   READY     CHART         MESSAGE                                AGE
default     acme   rome             paris(leaving),rome   Ready   True      small:1.0.0   Successfully deployed to region rome   2m5s
default     new    rome             -                     -       Unknown   -             -                                      2m5s
default     odd    <not readable>
";
    assert_eq!(deployments_table(&objects, view(false)).render(), expected);
    let wide = deployments_table(&objects, view(true)).render();
    assert!(
        wide.contains("https://charts.example.org/small:1.0.0"),
        "{wide}"
    );
}

#[test]
fn wide_tenants_have_a_line_for_each_cluster() {
    let expected = "\
NAMESPACE   NAME             PHASE     READY     CHART                                            MESSAGE                                                                             AGE
default     acme             Error     1/4       https://charts.jetstack.io/cert-manager:1.19.1   1 of 4 clusters ready; edge-1: UpgradeFailed: timed out waiting for the condition   24h
            └ edge-1         Error     False                                                      UpgradeFailed: timed out
            └ edge-2         Ready     True                                                       Installed: release installed
            └ edge-3         Unknown   Unknown                                                    ClusterUnreachable
            └ self-cluster   Pending   False                                                      Installing: helm runs
";
    assert_eq!(
        tenants_table(&tenants()[..1], view(true)).render(),
        expected
    );
}

#[tokio::test]
async fn single_tenant_view_has_row_per_cluster() {
    let summary = json!({"clusters": 60, "ready": 58, "error": 1, "notReady": 0, "unknown": 1});
    let status = json!({
        "phase": "Error", "summary": summary, "lastMessage": "58 of 60 clusters ready",
        "conditions": [
            condition("ClusterReady/edge-2", "False", "InstallFailed", "no room"),
            condition("ClusterError/edge-2", "True", "InstallFailed", "no room"),
        ],
    });
    let of = |name: &str, connected: &str, state: &str| {
        let listed =
            json!({"namespace": "team", "name": "acme", "state": state, "reason": "Installed"});
        let other = json!({"namespace": "team", "name": "other", "state": "Error", "reason": "InstallFailed"});
        let status = json!({
            "conditions": [condition("Connected", connected, "Connected", "")],
            "tenantSummaries": {"tenants": [other, listed], "omitted": 0},
        });
        cluster(name, json!({}), status)
    };
    let mut full = of("edge-4", "True", "Ready");
    full["status"]["tenantSummaries"] = json!({"tenants": [], "omitted": 1});
    let members = vec![
        of("edge-1", "True", "Ready"),
        of("edge-2", "True", "Ready"),
        of("edge-3", "False", "Ready"),
        full,
        cluster("edge-5", json!({}), json!({})),
    ];
    let answers = || {
        let tenants = vec![tenant("team", "acme", status.clone())];
        vec![list_of(tenants, ""), list_of(members.clone(), "")]
    };
    let server = Server::start(answers()).await;
    let printed = server.run(&["get", "tenant", "acme"]).await.unwrap();
    let expected = "\
NAMESPACE   NAME       PHASE     READY     CHART   MESSAGE                   AGE
team        acme       Error     58/60     -       58 of 60 clusters ready   24h
            └ edge-1   Ready     True              Installed
            └ edge-2   Error     False             InstallFailed: no room
            └ edge-3   Unknown   Unknown           last known: Ready
";
    assert_eq!(printed.stdout, expected);
    assert!(
        printed
            .stderr
            .starts_with("3 of 60 clusters are shown; 1 EdgeClusters"),
        "{printed:?}"
    );
    let asked = server.asked();
    assert!(
        asked[0].contains("/namespaces/team/tenants") && asked[0].contains("metadata.name%3Dacme"),
        "{asked:?}"
    );
    assert!(asked[1].contains("/edgeclusters"), "{asked:?}");

    let server = Server::start(answers()).await;
    let printed = server.run(&["get", "tenants", "-o", "wide"]).await.unwrap();
    assert!(printed.stdout.contains("└ and 59 more"), "{printed:?}");
    let server = Server::start(vec![list_of(Vec::new(), "")]).await;
    let error = server.run(&["get", "tenant", "nobody"]).await.unwrap_err();
    assert!(matches!(error, KubectlError::NotFound { .. }), "{error}");
}

/// Returns its responses in order.
struct Server {
    directory: tempfile::TempDir,
    asked: Arc<Mutex<Vec<String>>>,
    sent: Arc<Mutex<Vec<Sent>>>,
}

/// Method, body, and accepted content type.
type Sent = (String, Value, String);

impl Server {
    async fn start(answers: Vec<(u16, Value)>) -> Self {
        let left = Arc::new(Mutex::new(VecDeque::from(answers)));
        let answered = move |_: &str| {
            let next = left.lock().unwrap().pop_front();
            let (code, body) = next.expect("one request per answer");
            answer(code, &body)
        };
        Self::answering(answered).await
    }

    /// Starts a server that computes the response from path and query.
    async fn answering(by: impl Fn(&str) -> Response + Clone + Send + Sync + 'static) -> Self {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        let sent = Arc::new(Mutex::new(Vec::new()));
        let came = Arc::clone(&sent);
        let router = Router::new().fallback(
            move |method: Method, uri: Uri, headers: HeaderMap, body: Bytes| {
                seen.lock().unwrap().push(uri.to_string());
                let body = serde_json::from_slice(&body).unwrap_or_default();
                let accepts = headers.get(header::ACCEPT);
                let accepts = accepts.map(|accepts| accepts.to_str().unwrap().to_owned());
                came.lock()
                    .unwrap()
                    .push((method.to_string(), body, accepts.unwrap_or_default()));
                let response = by(&uri.to_string());
                async move { response }
            },
        );
        Self {
            asked,
            sent,
            ..Self::serving(router).await
        }
    }

    async fn serving(router: Router) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(axum::serve(listener, router).into_future());
        let kubeconfig = json!({
            "current-context": "home",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "home", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        });
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config"), kubeconfig.to_string()).unwrap();
        Self {
            directory,
            asked: Arc::default(),
            sent: Arc::default(),
        }
    }

    async fn run(&self, args: &[&str]) -> Result<Printed, KubectlError> {
        let path = self.directory.path().join("config");
        let env = |name: &str| (name == "KUBECONFIG").then(|| path.display().to_string());
        let all = std::iter::once("kubectl-krypton").chain(args.iter().copied());
        Box::pin(run(all.map(OsString::from), &env, now(), &mut Vec::new())).await
    }

    /// Returns the complete error.
    async fn error(&self, args: &[&str]) -> String {
        krypton_types::error_chain::chain(&self.run(args).await.unwrap_err())
    }

    fn sent(&self) -> Vec<Sent> {
        self.sent.lock().unwrap().clone()
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn answer(code: u16, body: &Value) -> Response {
    let json = [(header::CONTENT_TYPE, "application/json")];
    let code = StatusCode::from_u16(code).unwrap();
    (code, json, body.to_string()).into_response()
}

fn list_of(mut items: Vec<Value>, next: &str) -> (u16, Value) {
    for item in &mut items {
        // A real API server omits these fields in lists.
        let fields = item.as_object_mut().unwrap();
        fields.remove("apiVersion");
        fields.remove("kind");
    }
    let list = json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1", "kind": "List",
        "metadata": {"resourceVersion": "1", "continue": next}, "items": items,
    });
    (200, list)
}

fn failure(code: u16, reason: &str, message: &str) -> (u16, Value) {
    let status = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure",
        "code": code, "reason": reason, "message": message,
    });
    (code, status)
}

#[tokio::test]
async fn namespace_flags_and_context_select_list_scope() {
    for (args, path) in [
        ("--context home get tenants", "/namespaces/team/tenants"),
        ("get tenants --context home", "/namespaces/team/tenants"),
        ("get tenant -n other", "/namespaces/other/tenants"),
        ("get tn -A", "/v1alpha1/tenants"),
        ("get clusters", "/v1alpha1/edgeclusters"),
        ("get ec -n other", "/v1alpha1/edgeclusters"),
        ("get deployments", "/namespaces/team/kryptondeployments"),
        ("get kd -A", "/v1alpha1/kryptondeployments"),
    ] {
        let server = Server::start(vec![list_of(Vec::new(), "")]).await;
        let words: Vec<&str> = args.split(' ').collect();
        let printed = server.run(&words).await.unwrap();
        assert_eq!(printed.stdout, "");
        assert!(
            printed.stderr.starts_with("No resources found"),
            "{printed:?}"
        );
        let asked = server.asked().pop().unwrap();
        assert!(asked.contains(path), "{args}: {asked}");
    }
}

#[tokio::test]
async fn selector_and_name_output_follow_kubectl() {
    let server = Server::start(vec![list_of(tenants(), "")]).await;
    let args = ["get", "tenants", "-A", "-l", "team=a", "-o", "name"];
    let printed = server.run(&args).await.unwrap();
    let first = printed.stdout.lines().next().unwrap();
    assert!(first.starts_with("tenant.mesh.openkcm.io/"), "{first}");
    let asked = server.asked().pop().unwrap();
    assert!(asked.contains("labelSelector=team%3Da"), "{asked}");
}

#[tokio::test]
async fn all_pages_are_read_despite_unreadable_object() {
    let mut pages = tenants();
    let second = pages.split_off(2);
    let server = Server::start(vec![list_of(pages, "more"), list_of(second, "")]).await;
    let printed = server.run(&["get", "tenants"]).await.unwrap();
    assert_eq!(
        printed.stdout,
        tenants_table(&tenants(), view(false)).render()
    );
    assert!(
        server.asked()[1].contains("continue=more"),
        "{:?}",
        server.asked()
    );
}

#[tokio::test]
async fn json_and_yaml_print_full_lists() {
    let mut object = fleet().remove(3);
    object["metadata"]["managedFields"] = json!([]);
    let expected = json!({
        "apiVersion": "v1", "kind": "List", "metadata": {}, "items": [fleet().remove(3)],
    });
    for format in ["json", "yaml"] {
        let printed = shown(
            vec![list_of(vec![object.clone()], "")],
            &["get", "clusters", "-o", format],
        )
        .await;
        let found: Value = serde_saphyr::from_str(&printed.stdout).unwrap();
        assert_eq!(found, expected, "{format}: {}", printed.stdout);
    }
}

#[tokio::test]
async fn server_errors_are_one_line_naming_cluster() {
    let forbidden = "may not list edgeclusters in all namespaces";
    let failed = "listing edgeclusters on the cluster \"home\" failed";
    let cases = [
        (404, "NotFound", "not found", "has no edgeclusters"),
        (
            403,
            "Forbidden",
            "edgeclusters is forbidden:\nno",
            forbidden,
        ),
        (
            401,
            "Unauthorized",
            "no",
            "does not accept your credentials",
        ),
        (500, "InternalError", "etcd is gone", failed),
    ];
    for (code, reason, message, expected) in cases {
        let server = Server::start(vec![failure(code, reason, message)]).await;
        let error = server.run(&["get", "clusters"]).await.unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(expected) && text.contains("\"home\""),
            "{text}"
        );
        assert!(!text.contains('\n'), "{text}");
    }
}

#[tokio::test]
async fn usage_errors_exit_2_and_help_exits_0() {
    let server = Server::start(Vec::new()).await;
    let cases: &[(&[&str], i32)] = &[
        (&[], 2),
        (&["get"], 2),
        (&["get", "pods"], 2),
        (&["get", "tenants", "-A", "-n", "x"], 2),
        (&["get", "tenants", "-o", "xml"], 2),
        (&["--help"], 0),
        (&["--version"], 0),
    ];
    for (args, code) in cases {
        let error = server.run(args).await.unwrap_err();
        let KubectlError::Usage(error) = error else {
            panic!("{args:?}: {error}")
        };
        assert_eq!(error.exit_code(), *code, "{args:?}");
    }
    assert!(server.asked().is_empty());
}

#[tokio::test]
async fn the_version_needs_no_cluster() {
    let printed = shown(Vec::new(), &["version", "--client"]).await;
    assert_eq!(
        printed.stdout,
        format!("kubectl-krypton {}\n", env!("CARGO_PKG_VERSION"))
    );
}

#[tokio::test]
async fn unknown_context_error_lists_existing_contexts() {
    let server = Server::start(Vec::new()).await;
    let text = server
        .error(&["get", "clusters", "--context", "away"])
        .await;
    let expected = "\"away\" does not exist; its contexts are: home";
    assert!(text.contains(expected), "{text}");
}

fn join_info(addresses: &str) -> (u16, Value) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let pem = params.self_signed(&key).unwrap().pem();
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "krypton-hub-join"},
        "data": {"ca.crt": pem, "addresses": addresses},
    });
    (200, object)
}

fn a_secret() -> (u16, Value) {
    let object = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}});
    (201, object)
}

fn nothing() -> (u16, Value) {
    failure(404, "NotFound", "configmaps \"krypton-hub-join\" not found")
}

fn hub_pod() -> (u16, Value) {
    let container = json!({"name": "krypton-hub", "image": "r/krypton-hub:1"});
    let pod = json!({"metadata": {"name": "hub-0"}, "spec": {"containers": [container]}});
    list_of(vec![pod], "")
}

fn no_pods() -> (u16, Value) {
    list_of(Vec::new(), "")
}

fn no_member() -> (u16, Value) {
    failure(404, "NotFound", "edgeclusters \"edge-1\" not found")
}

/// Runs a command against a server with these responses.
async fn shown(answers: Vec<(u16, Value)>, args: &[&str]) -> Printed {
    Server::start(answers).await.run(args).await.unwrap()
}

/// Returns the complete error of a command against a server with these responses.
async fn refused(answers: Vec<(u16, Value)>, args: &[&str]) -> String {
    Server::start(answers).await.error(args).await
}

#[tokio::test]
async fn join_prints_bundle_and_next_command() {
    let info = join_info("hub:7443\n10.0.0.1:7443");
    let server = Server::start(vec![info, hub_pod(), no_member(), a_secret()]).await;
    let printed = server.run(&["join", "edge-1"]).await.unwrap();
    let bundle = krypton_types::join_bundle::JoinBundle::parse(&printed.stdout).unwrap();
    assert_eq!(bundle.cluster, "edge-1");
    assert_eq!(bundle.addresses, ["hub:7443", "10.0.0.1:7443"]);
    assert_eq!(bundle.expires.to_string(), "2026-01-02T04:04:05Z");
    assert!(
        printed
            .stderr
            .contains("--set-string image.registry=r --set-string image.tag=1 --set-file join.bundle=edge-1.yaml")
            && printed.stderr.contains("until 2026-01-02T04:04:05Z"),
        "{}",
        printed.stderr
    );
    let asked = server.asked();
    assert_eq!(
        asked[0],
        "/api/v1/namespaces/krypton-system/configmaps/krypton-hub-join"
    );
    assert_eq!(
        asked[2],
        "/apis/mesh.openkcm.io/v1alpha1/edgeclusters/edge-1"
    );
    assert!(
        asked[3].starts_with("/api/v1/namespaces/krypton-system/secrets"),
        "{asked:?}"
    );
}

#[tokio::test]
async fn join_searches_candidate_namespaces_for_hub() {
    let forbidden = || failure(403, "Forbidden", "configmaps is forbidden: no");
    for first in [nothing(), forbidden()] {
        let answers = vec![
            first,
            nothing(),
            join_info("hub:1"),
            no_pods(),
            no_member(),
            a_secret(),
        ];
        let server = Server::start(answers).await;
        server.run(&["join", "edge-1"]).await.unwrap();
        assert!(server.asked()[5].contains("/team/secrets"));
    }
    let server = Server::start(vec![
        nothing(),
        join_info("hub:1"),
        no_pods(),
        no_member(),
        a_secret(),
    ])
    .await;
    server.run(&["join", "edge-1"]).await.unwrap();
    assert!(server.asked()[4].contains("/krypton/secrets"));
    let server = Server::start(vec![join_info("hub:1"), no_pods(), no_member(), a_secret()]).await;
    server.run(&["join", "edge-1", "-n", "hub"]).await.unwrap();
    assert!(server.asked()[3].contains("/hub/secrets"));

    let server = Server::start(vec![
        nothing(),
        nothing(),
        nothing(),
        no_pods(),
        no_pods(),
        no_pods(),
    ])
    .await;
    let text = server.error(&["join", "edge-1"]).await;
    assert!(
        text.contains("in the namespaces krypton-system and krypton and team"),
        "{text}"
    );
    let text = refused(vec![nothing(), no_pods()], &["join", "edge-1", "-n", "hub"]).await;
    assert!(text.contains("in the namespace hub,"), "{text}");
    let text = refused(vec![forbidden(), nothing(), nothing()], &["join", "edge-1"]).await;
    assert!(
        text.contains("verb get on configmaps")
            && text.contains("krypton-hub-join in the namespace krypton-system"),
        "{text}"
    );
}

#[tokio::test]
async fn join_waits_for_hub_that_starts() {
    let answers = vec![
        nothing(),
        hub_pod(),
        join_info("hub:1"),
        hub_pod(),
        no_member(),
        a_secret(),
    ];
    let server = Server::start(answers).await;
    server.run(&["join", "edge-1", "-n", "hub"]).await.unwrap();
    assert_eq!(server.asked().len(), 6);
}

#[tokio::test]
async fn join_requires_published_or_explicit_address() {
    let server = Server::start(vec![join_info("")]).await;
    let text = server.error(&["join", "edge-1"]).await;
    assert!(
        text.contains("--advertise=HOST:PORT") && text.contains("--address HOST:PORT"),
        "{text}"
    );
    let server = Server::start(vec![join_info("hub:1"), no_pods(), no_member(), a_secret()]).await;
    let args = [
        "join",
        "edge-1",
        "--address=a:1",
        "--address=b:2",
        "--ttl=30m",
    ];
    let printed = server.run(&args).await.unwrap();
    let bundle = krypton_types::join_bundle::JoinBundle::parse(&printed.stdout).unwrap();
    assert_eq!(bundle.addresses, ["a:1", "b:2"]);
    assert_eq!(bundle.expires.to_string(), "2026-01-02T03:34:05Z");
}

#[tokio::test]
async fn published_join_info_is_validated_before_token_creation() {
    let mut garbled = join_info("hub:1");
    garbled.1["data"]["ca.crt"] = json!("x");
    for (info, word) in [
        (garbled, "certificateAuthority"),
        (join_info("hub"), "\"hub\" is not HOST:PORT"),
    ] {
        let text = refused(vec![info], &["join", "edge-1"]).await;
        assert!(
            text.contains(word)
                && text.contains("ConfigMap krypton-hub-join in the namespace krypton-system"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn join_names_missing_secret_create_permission() {
    let forbidden = failure(403, "Forbidden", "secrets is forbidden: no");
    let text = refused(
        vec![join_info("hub:1"), no_pods(), no_member(), forbidden],
        &["join", "edge-1"],
    )
    .await;
    assert!(
        text.contains("verb create on secrets") && text.contains("\"home\""),
        "{text}"
    );
}

#[tokio::test]
async fn invalid_arguments_are_rejected_without_any_request() {
    let server = Server::start(Vec::new()).await;
    let long = "a".repeat(64);
    let cases: &[(&[&str], &str)] = &[
        (&["join"], "<NAME>"),
        (&["join", "self-cluster"], "home cluster"),
        (&["join", "Edge_1"], "lower-case letters"),
        (&["join", &long], "at most 63"),
        (&["join", "edge-1", "--ttl=59s"], "1m to 24h"),
        (&["join", "edge-1", "--ttl=25h"], "1m to 24h"),
        (&["join", "edge-1", "--ttl=1"], "1m to 24h"),
        (&["join", "edge-1", "--address=hub"], "host and a port"),
        (&["join", "edge-1", "-n", "a/b"], "lower-case letters"),
        (
            &["join", "edge-1", "--agent-context=a", "-o", "helm"],
            "cannot be used with",
        ),
        (&["install"], "<PROGRAM>"),
        (&["install", "hub", "--timeout=0"], "write a duration"),
    ];
    for (args, word) in cases {
        let KubectlError::Usage(error) = server.run(args).await.unwrap_err() else {
            panic!("{args:?}")
        };
        assert_eq!(error.exit_code(), 2, "{args:?}");
        assert!(error.to_string().contains(word), "{error}");
    }
    assert!(server.asked().is_empty());
}

#[tokio::test]
async fn change_is_conditional_and_retried_after_conflict() {
    let found = |version: &str| {
        let mut member = cluster("edge-1", json!({}), json!({}));
        member["metadata"]["uid"] = json!("u");
        member["metadata"]["resourceVersion"] = json!(version);
        (200, member)
    };
    let conflict = || failure(409, "Conflict", "the object has been modified");
    for words in [&["ban", "edge-1"][..], &["leave", "edge-1", "--uninstall"]] {
        let forbidden = failure(403, "Forbidden", "no");
        let answers = vec![found("7"), conflict(), found("8"), forbidden];
        let server = Server::start(answers).await;
        let error = server.run(words).await.unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::NotPermitted);
        let patches = server.sent().into_iter().filter(|sent| sent.0 == "PATCH");
        let metadata = patches.map(|(_, patch, _)| {
            let metadata = &patch["metadata"];
            assert_eq!(metadata["uid"], "u");
            metadata["resourceVersion"].clone()
        });
        assert_eq!(metadata.collect::<Vec<_>>(), ["7", "8"]);
    }
    let attempt = || vec![found("7"), conflict()];
    let answers = [attempt(), attempt(), attempt()].concat();
    let server = Server::start(answers).await;
    let error = server.run(&["ban", "edge-1"]).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::Refused);
}

/// The Secret's metadata with these annotations.
fn authority(annotations: Value) -> (u16, Value) {
    let object = json!({
        "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
        "metadata": {"name": "krypton-hub-ca", "resourceVersion": "7", "annotations": annotations},
    });
    (200, object)
}

fn digest(of: &str) -> String {
    krypton_types::root_digest::RootDigest::of(of.as_bytes()).to_string()
}

fn stands(phase: &str) -> (u16, Value) {
    let rotation_state =
        json!({"phase": phase, "root": digest("new"), "since": "2026-01-02T03:00:05Z"});
    authority(json!({"mesh.openkcm.io/ca-rotation": rotation_state.to_string()}))
}

/// edge-1 and edge-4 are finished, edge-2 is disconnected, and edge-3 is too old to report its roots.
fn rotating() -> (u16, Value) {
    let with = |name: &str, roots: Value, connected: &str| {
        let status = json!({
            "certificateExpiry": "2026-02-01T00:00:00Z", "agentVersion": "0.1.0",
            "lastSeen": "2026-01-02T03:02:05Z", "trustedRoots": roots,
            "conditions": [condition("Connected", connected, "x", "")],
        });
        cluster(name, json!({}), status)
    };
    let both = json!({"trusted": [digest("new"), digest("old")], "issuer": digest("old")});
    let old = json!({"trusted": [digest("old")], "issuer": digest("old")});
    let silent = json!({"issuer": digest("old")});
    let members = vec![
        with("edge-1", both.clone(), "True"),
        with("edge-2", old, "False"),
        with("edge-3", silent, "True"),
        with("edge-4", both, "True"),
    ];
    list_of(members, "")
}

#[tokio::test]
async fn rotate_ca_patches_annotation_without_reading_key() {
    let server = Server::start(vec![authority(json!({})), authority(json!({}))]).await;
    let printed = server.run(&["rotate-ca"]).await.unwrap();
    assert!(printed.stdout.contains("rotate-ca --status"), "{printed:?}");
    let asked = server.asked();
    let secret = "/api/v1/namespaces/krypton-system/secrets/krypton-hub-ca";
    assert!(
        asked.iter().all(|asked| asked.starts_with(secret)),
        "{asked:?}"
    );
    let sent = server.sent();
    assert_eq!(sent[1].0, "PATCH");
    assert_eq!(
        sent[1].1,
        json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {
                "resourceVersion": "7",
                "annotations": {"mesh.openkcm.io/rotate-ca": "2026-01-02T03:04:05Z"},
            },
        })
    );
    for (_, _, accepted) in sent {
        assert!(accepted.contains("PartialObjectMetadata"), "{accepted}");
    }
}

#[tokio::test]
async fn there_is_one_rotation_at_a_time() {
    let asked = || authority(json!({"mesh.openkcm.io/rotate-ca": "2026-01-02T03:04:00Z"}));
    for (found, word) in [
        (
            vec![stands("Announced"), rotating()],
            "in progress (Announced)",
        ),
        (
            vec![stands("Switched"), rotating()],
            "in progress (Switched)",
        ),
        (vec![asked()], "requested already"),
    ] {
        let server = Server::start(found).await;
        let text = server.error(&["rotate-ca"]).await;
        assert!(text.contains(word) && text.contains("--status"), "{text}");
    }
    // After a completed rotation, the user can start another.
    let server = Server::start(vec![stands("Steady"), rotating(), authority(json!({}))]).await;
    server.run(&["rotate-ca"]).await.unwrap();
    // After a conflict, the command evaluates the hub's new state.
    let conflict = failure(409, "Conflict", "the object has been modified");
    let answers = vec![
        authority(json!({})),
        conflict,
        stands("Announced"),
        rotating(),
    ];
    let text = refused(answers, &["rotate-ca"]).await;
    assert!(text.contains("in progress"), "{text}");
}

#[tokio::test]
async fn rotation_status_shows_phase_and_pending_clusters() {
    let server = Server::start(vec![stands("Announced"), rotating()]).await;
    let printed = server.run(&["rotate-ca", "--status"]).await.unwrap();
    let expected = format!(
        "\
Announced 4m ago: agents receive the new root; when all trust it, it signs. It is {}.
WAITING-FOR   CONNECTED   LAST-SEEN   AGENT   WHY
edge-2        False       2m          0.1.0   its agent does not trust the new root yet: bring its agent back, or delete EdgeCluster edge-2 if the cluster is gone
edge-3        True        2m          0.1.0   its agent is too old to report its trusted roots: upgrade its agent
",
        digest("new").get(..16).unwrap()
    );
    assert_eq!(printed.stdout, expected);
    let server = Server::start(vec![stands("Switched"), rotating()]).await;
    let printed = server.run(&["rotate-ca", "--status"]).await.unwrap();
    assert!(
        printed.stdout.starts_with("Switched 4m ago") && printed.stdout.contains("edge-1  "),
        "{}",
        printed.stdout
    );
    let server = Server::start(vec![stands("Announced"), list_of(vec![], "")]).await;
    let printed = server.run(&["rotate-ca", "--status"]).await.unwrap();
    assert!(
        printed
            .stdout
            .ends_with("No cluster blocks the rotation.\n")
    );
    let server = Server::start(vec![authority(json!({}))]).await;
    let printed = server.run(&["rotate-ca", "--status"]).await.unwrap();
    assert!(printed.stdout.contains("there has been none"));
    let asked = authority(json!({"mesh.openkcm.io/rotate-ca": "2026-01-02T03:02:05Z"}));
    let printed = shown(vec![asked], &["rotate-ca", "--status"]).await;
    assert!(printed.stdout.contains("requested 2m ago"), "{printed:?}");
    assert!(
        printed.stderr.contains("No hub has accepted it"),
        "{printed:?}"
    );
}

#[tokio::test]
async fn only_named_clusters_are_locked_out() {
    let refused = async |args: &[&str]| {
        let server = Server::start(vec![stands("Announced"), rotating()]).await;
        let text = server.error(args).await;
        assert_eq!(server.asked().len(), 2, "nothing is written");
        text
    };
    let text = refused(&["rotate-ca", "--force"]).await;
    for word in [
        "2 clusters will have to join again",
        "edge-2 (its agent does not trust",
        "--force --lock-out=edge-2,edge-3'",
    ] {
        assert!(text.contains(word), "{text}");
    }
    let text = refused(&["rotate-ca", "--force", "--lock-out=edge-2"]).await;
    assert!(text.contains("--lock-out=edge-2,edge-3"), "{text}");
    let args = ["rotate-ca", "--force", "--lock-out=edge-2,edge-3,edge-4"];
    let text = refused(&args).await;
    assert!(text.contains("edge-4 is not waited for"), "{text}");

    let answers = vec![stands("Announced"), rotating(), authority(json!({}))];
    let server = Server::start(answers).await;
    let args = ["rotate-ca", "--force", "--lock-out", "edge-3,edge-2"];
    let printed = server.run(&args).await.unwrap();
    assert!(
        printed.stdout.contains("kubectl krypton join edge-2"),
        "{printed:?}"
    );
    let sent = server.sent().pop().unwrap().1;
    let written = &sent["metadata"]["annotations"]["mesh.openkcm.io/rotate-ca-lock-out"];
    let written: Value = serde_json::from_str(written.as_str().unwrap()).unwrap();
    let expected =
        json!({"root": digest("new"), "announced": ["edge-2", "edge-3"], "switched": []});
    assert_eq!(written, expected);

    let cases: &[(Vec<(u16, Value)>, &str)] = &[
        (vec![authority(json!({}))], "no rotation is in progress"),
        (
            vec![stands("Announced"), list_of(vec![], "")],
            "no cluster blocks the rotation",
        ),
    ];
    for (answers, word) in cases {
        let server = Server::start(answers.clone()).await;
        let args = ["rotate-ca", "--force", "--lock-out=edge-2"];
        let text = server.error(&args).await;
        assert!(text.contains(word), "{text}");
    }
    let server = Server::start(vec![]).await;
    for args in [
        &["rotate-ca", "--lock-out=edge-2"][..],
        &["rotate-ca", "--status", "--force"],
    ] {
        let error = server.run(args).await.unwrap_err();
        assert!(matches!(error, KubectlError::Usage(_)), "{error}");
    }
}

#[tokio::test]
async fn rotate_ca_error_names_missing_verb_or_namespaces() {
    let forbidden = || failure(403, "Forbidden", "secrets is forbidden: no");
    let missing = || failure(404, "NotFound", "not found");
    for (answers, word) in [
        (vec![forbidden(), forbidden(), forbidden()], "verb get"),
        (vec![authority(json!({})), forbidden()], "verb patch"),
        (vec![stands("Announced"), forbidden()], "verb list"),
        (
            vec![missing(), missing(), missing()],
            "krypton-system and krypton and team",
        ),
    ] {
        let text = refused(answers, &["rotate-ca"]).await;
        assert!(text.contains(word) && text.contains("\"home\""), "{text}");
    }
}

#[tokio::test]
async fn support_bundle_redacts_secrets_and_lists_missing_files() {
    let pod = |name: &str, container: &str| {
        json!({
            "metadata": {"name": name, "namespace": "krypton-system"},
            "spec": {"containers": [{
                "name": container,
                "env": [{"name": "HTTPS_PROXY", "value": "http://me:canary@proxy"}],
            }]},
        })
    };
    let server = Server::answering(move |asked| {
        let text = |text: &str| (StatusCode::OK, text.to_owned()).into_response();
        let of = |(code, body): (u16, Value)| answer(code, &body);
        let path = asked.split('?').next().unwrap();
        match path {
            "/apis/mesh.openkcm.io/v1alpha1/edgeclusters" => of(list_of(fleet(), "")),
            "/apis/mesh.openkcm.io/v1alpha1/tenants" => {
                let mut acme = tenant("default", "acme", json!({"lastMessage": "token: canary"}));
                acme["spec"]["values"] = json!({"db": "canary"});
                of(list_of(vec![acme], ""))
            }
            "/api/v1/namespaces/krypton-system/pods" => of(list_of(
                vec![pod("krypton-hub-0", "krypton-hub"), pod("somebody", "else")],
                "",
            )),
            "/api/v1/namespaces/krypton-system/pods/krypton-hub-0/log" => {
                match asked.contains("previous=true") {
                    true => of(failure(
                        400,
                        "BadRequest",
                        "previous terminated container not found",
                    )),
                    false => text("hub starts\npassword=canary\n"),
                }
            }
            _ => of(failure(403, "Forbidden", "not you")),
        }
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bundle.tar.gz");
    let words = ["support-bundle", "--file", file.to_str().unwrap()];
    let printed = server.run(&words).await.unwrap();
    assert_eq!(printed.stdout, format!("{}\n", file.display()));
    assert!(printed.stderr.contains("README.txt"), "{}", printed.stderr);
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
    assert_eq!(mode & 0o077, 0);
    let files = support_bundle::unpacked(std::fs::File::open(&file).unwrap());
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let expected = [
        "README.txt",
        "clusters.yaml",
        "krypton-system/logs/krypton-hub-0.log",
        "krypton-system/pods.yaml",
        "tenants.yaml",
        "versions.json",
    ];
    assert_eq!(names, expected);
    for (name, text) in &files {
        assert!(!text.contains("canary"), "{name}: {text}");
    }
    assert!(files["krypton-system/logs/krypton-hub-0.log"].contains("hub starts\n"));
    assert!(!files["krypton-system/pods.yaml"].contains("somebody"));
    assert!(
        files["tenants.yaml"].contains("db:"),
        "{}",
        files["tenants.yaml"]
    );
    let readme = &files["README.txt"];
    for missing in [
        "deployments.yaml: ",
        "crds.yaml: ",
        "events.yaml: ",
        "releases.yaml: ",
    ] {
        assert!(readme.contains(missing), "{readme}");
    }
    assert!(!readme.contains("previous.log"), "{readme}");
    // The command overwrites no file. If it can read nothing, it creates no file.
    let again = server.run(&words).await.unwrap_err();
    assert_eq!(again.exit_code(), ExitCode::Refused);
    let nobody = Server::answering(|_| {
        let (code, body) = failure(403, "Forbidden", "not you");
        answer(code, &body)
    });
    let none = folder.path().join("none.tar.gz");
    let words = ["support-bundle", "--file", none.to_str().unwrap()];
    let error = nobody.await.run(&words).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::NotPermitted);
    assert!(!none.exists());
}
