//! Complete runs of commands against a small HTTP server.

mod check;
mod debug_port;
mod get;
mod install;
mod join;
mod rotate_ca;
mod support_bundle;
mod uninstall;
mod wait;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use clap::CommandFactory as _;
use jiff::Timestamp;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::*;
use crate::commands::support_bundle::unpacked;

pub(crate) fn now() -> Timestamp {
    "2026-01-02T03:04:05Z".parse().unwrap()
}

pub(crate) fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-01-02T03:00:05Z",
    })
}

pub(crate) fn cluster(name: &str, spec: Value, status: Value) -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "EdgeCluster",
        "metadata": {"name": name, "creationTimestamp": "2026-01-02T03:02:00Z"},
        "spec": spec,
        "status": status,
    })
}

/// The root of a CA.
pub(crate) fn ca_pem() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.self_signed(&key).unwrap().pem()
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
                "conditions": [
                    condition("Connected", "True", "Connected", "ok"),
                    condition("Ready", "True", "Reconciling", ""),
                ],
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
                "conditions": [
                    condition("Connected", "False", "Unreachable", "no answer\nfor 30 s \u{1b}[31m"),
                    condition("Ready", "False", "Unreachable", "no answer"),
                ],
            }),
        ),
        cluster("new", json!({}), Value::Null),
        cluster("odd", json!({"paused": "perhaps"}), json!({})),
    ]
}

/// API server of a test. Its kubeconfig has the context `home` with the namespace `team`.
struct FakeApiServer {
    directory: tempfile::TempDir,
    uris: Arc<Mutex<Vec<String>>>,
    requests: Arc<Mutex<Vec<RecordedRequest>>>,
}

/// Method, body, and accepted content type.
type RecordedRequest = (String, Value, String);

impl FakeApiServer {
    /// Starts a server that returns these responses in order.
    async fn with_responses(responses: Vec<(u16, Value)>) -> Self {
        let remaining = Arc::new(Mutex::new(VecDeque::from(responses)));
        let handler = move |_: &str| {
            let next = remaining.lock().pop_front();
            json_response(next.expect("one request per answer"))
        };
        Self::with_handler(handler).await
    }

    /// Starts a server that computes the response from path and query.
    async fn with_handler(
        handler: impl Fn(&str) -> Response + Clone + Send + Sync + 'static,
    ) -> Self {
        let uris = Arc::new(Mutex::new(Vec::new()));
        let recorded_uris = Arc::clone(&uris);
        let requests = Arc::new(Mutex::new(Vec::new()));
        let recorded_requests = Arc::clone(&requests);
        let router = Router::new().fallback(
            move |method: Method, uri: Uri, headers: HeaderMap, body: Bytes| {
                recorded_uris.lock().push(uri.to_string());
                let body = serde_json::from_slice(&body).unwrap_or_default();
                let accepts = headers.get(header::ACCEPT);
                let accepts = accepts.map(|accepts| accepts.to_str().unwrap().to_owned());
                let request = (method.to_string(), body, accepts.unwrap_or_default());
                recorded_requests.lock().push(request);
                let response = handler(&uri.to_string());
                async move { response }
            },
        );
        Self {
            uris,
            requests,
            ..Self::serve(router).await
        }
    }

    async fn serve(router: Router) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(axum::serve(listener, router).into_future());
        let server = Self {
            directory: tempfile::tempdir().unwrap(),
            uris: Arc::default(),
            requests: Arc::default(),
        };
        server.write_kubeconfig(&url);
        server
    }

    /// Writes the kubeconfig for an API server at this address.
    fn write_kubeconfig(&self, url: &str) {
        let kubeconfig = json!({
            "current-context": "home",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "home", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        });
        let path = self.directory.path().join("config");
        std::fs::write(path, kubeconfig.to_string()).unwrap();
    }

    async fn run(&self, args: &[&str]) -> Result<CommandOutput, KubectlError> {
        let path = self.directory.path().join("config");
        let env = |name: &str| (name == "KUBECONFIG").then(|| path.display().to_string());
        let args = std::iter::once("kubectl-krypton").chain(args.iter().copied());
        Box::pin(run(args.map(OsString::from), &env, now(), &mut Vec::new())).await
    }

    /// Returns the complete error.
    async fn error(&self, args: &[&str]) -> String {
        krypton_types::error_chain::chain(&self.run(args).await.unwrap_err())
    }

    /// Returns the requests so far.
    fn requests(&self) -> Vec<RecordedRequest> {
        self.requests.lock().clone()
    }

    /// Returns path and query of the requests so far.
    fn uris(&self) -> Vec<String> {
        self.uris.lock().clone()
    }
}

/// Creates a program that runs this script of a shell in its folder. Returns its path.
pub(crate) fn stub_program(folder: &Path, name: &str, script: &str) -> String {
    let path = folder.join(name);
    let script = format!("#!/bin/sh\ncd '{}'\n{script}\n", folder.display());
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// Creates a Helm program in the server's folder.
fn helm_stub(server: &FakeApiServer, script: &str) -> String {
    stub_program(server.directory.path(), "helm", script)
}

fn json_response((code, body): (u16, Value)) -> Response {
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
async fn usage_errors_exit_2_and_help_exits_0() {
    let server = FakeApiServer::with_responses(Vec::new()).await;
    let cases: &[(&[&str], i32)] = &[
        (&[], 2),
        (&["get"], 2),
        (&["get", "pods"], 2),
        (&["get", "tenants", "-o", "xml"], 2),
        (&["get", "tenants", "acme", "-A"], 2),
        (&["get", "tenant/acme", "clusters/edge-1"], 2),
        (&["get", "tenants", "a", "b", "--watch"], 2),
        (&["explain", "tenant"], 2),
        (&["explain", "tenant", "a", "b"], 2),
        (&["pause", "tenant"], 2),
        (&["get", "tenants", "--as-group", "sre"], 2),
        (&["get", "--no-color", "--help"], 0),
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
    assert!(server.uris().is_empty());
}

#[tokio::test]
async fn help_names_default_namespace_of_each_command() {
    let server = FakeApiServer::with_responses(Vec::new()).await;
    for (command, expected) in [
        ("get", "it is that of the context"),
        ("migrate", "for migrate and check all namespaces"),
        ("log-level", "in krypton-system, else krypton, else that of"),
    ] {
        let help = server.run(&[command, "--help"]).await.unwrap_err();
        let KubectlError::Usage(help) = help else {
            panic!("{command}: {help}")
        };
        let help = help.to_string();
        let words: Vec<&str> = help.split_whitespace().collect();
        assert!(words.join(" ").contains(expected), "{help}");
    }
}

#[test]
fn help_of_each_command_has_valid_examples() {
    for command in Cli::command().get_subcommands() {
        let name = command.get_name();
        let help = command.get_after_help().expect(name).to_string();
        let examples = help.strip_prefix("Examples:\n").expect(name);
        for example in examples.split("\n\n") {
            let (comment, typed) = example.split_once("\n  kubectl ").expect(example);
            assert!(comment.starts_with("  # "), "{example}");
            // A word in capitals is a placeholder. No example has a blank between quotes.
            let words = typed.split(' ').take_while(|word| *word != ">");
            let is_placeholder = |word: &str| word.bytes().all(|it| it.is_ascii_uppercase());
            let words = words.map(|word| match is_placeholder(word) {
                true => word.to_lowercase(),
                false => word.replace('\'', ""),
            });
            let matches = Cli::command().try_get_matches_from(words);
            let matches = matches.unwrap_or_else(|error| panic!("{example}: {error}"));
            assert_eq!(matches.subcommand_name(), Some(name), "{example}");
        }
    }
}

#[tokio::test]
async fn the_version_needs_no_cluster() {
    let output = run_with(Vec::new(), &["version", "--client"]).await;
    let expected = concat!("kubectl-krypton ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(output.stdout, expected);
}

/// Runs a command against a server with these responses.
async fn run_with(responses: Vec<(u16, Value)>, args: &[&str]) -> CommandOutput {
    let server = FakeApiServer::with_responses(responses).await;
    server.run(args).await.unwrap()
}

/// Returns the complete error of a command against a server with these responses.
async fn error_with(responses: Vec<(u16, Value)>, args: &[&str]) -> String {
    let server = FakeApiServer::with_responses(responses).await;
    server.error(args).await
}

#[tokio::test]
async fn invalid_arguments_are_rejected_without_any_request() {
    let server = FakeApiServer::with_responses(Vec::new()).await;
    let long = format!("join {}", "a".repeat(64));
    for (command, expected) in [
        ("join", "<NAME>"),
        ("join self-cluster", "home cluster"),
        ("join Edge_1", "lower-case letters"),
        (&*long, "at most 63"),
        ("join edge-1 --ttl=59s", "1m to 24h"),
        ("join edge-1 --ttl=25h", "1m to 24h"),
        ("join edge-1 --ttl=1", "1m to 24h"),
        ("join edge-1 --address=hub", "host and a port"),
        ("-n a/b get tenants", "lower-case letters"),
        ("join edge-1 -n hub", "--hub-namespace"),
        ("-n hub rotate-ca", "--hub-namespace"),
        ("check -n hub", "--hub-namespace"),
        ("check --account=a:b", "--manifest"),
        ("check --manifest=- --account=a/b", "NAMESPACE:NAME"),
        ("check --manifest=- --pre", "cannot be used with"),
        ("version -n hub", "--hub-namespace"),
        ("install hub -n hub", "with --hub-namespace"),
        ("install hub --bundle=f", "takes no --bundle"),
        ("log-level agent --hub-namespace=x", "with --namespace"),
        ("-n x get tenants -A", "exclude each other"),
        (
            "get tenants --fleet -l a=b=c",
            "\"a=b=c\" does not select labels",
        ),
        ("get clusters --fleet", "lists only Tenants"),
        ("leave edge-1", "<--orphan|--uninstall>"),
        (
            "get tenants -o jsonpath={.items[?(@.a==1)]}",
            "is not supported",
        ),
        ("explain cluster edge-1 --on edge-2", "--on is for a Tenant"),
        ("get clusters --request-timeout=soon", "write a duration"),
        (
            "join edge-1 --agent-context=a -o helm",
            "cannot be used with",
        ),
        ("install", "<PROGRAM>"),
        ("log-level", "<PROGRAM>"),
        ("log-level somebody", "'somebody'"),
        ("log-level hub --for=1m", "FILTER"),
        ("log-level hub debug --for=25h", "at most 24h"),
        ("log-level hub --pod=a --all", "cannot be used with"),
        ("log-level hub --debug-address=10.0.0.1:1", "not a loopback"),
        ("rotate-ca --lock-out=edge-2", "--force"),
        ("rotate-ca --status --force", "cannot be used with"),
        ("install hub --timeout=0", "write a duration"),
    ] {
        let args: Vec<&str> = command.split(' ').collect();
        let KubectlError::Usage(error) = server.run(&args).await.unwrap_err() else {
            panic!("{command}")
        };
        assert_eq!(error.exit_code(), 2, "{command}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert!(server.uris().is_empty());
}

#[tokio::test]
async fn change_is_conditional_and_retried_after_conflict() {
    let member_response = |version: &str| {
        let mut member = cluster("edge-1", json!({}), json!({}));
        member["metadata"]["uid"] = json!("u");
        member["metadata"]["resourceVersion"] = json!(version);
        (200, member)
    };
    let conflict = || failure(409, "Conflict", "the object has been modified");
    for args in [&["ban", "edge-1"][..], &["leave", "edge-1", "--uninstall"]] {
        let mut responses = vec![member_response("7"), conflict(), member_response("8")];
        responses.push(failure(403, "Forbidden", "no"));
        let server = FakeApiServer::with_responses(responses).await;
        let error = server.run(args).await.unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::NotPermitted);
        let requests = server.requests().into_iter();
        let patches = requests.filter(|(method, ..)| method == "PATCH");
        let metadata = patches.map(|(_, patch, _)| {
            let metadata = &patch["metadata"];
            assert_eq!(metadata["uid"], "u");
            metadata["resourceVersion"].clone()
        });
        assert_eq!(metadata.collect::<Vec<_>>(), ["7", "8"]);
    }
    let attempt = || vec![member_response("7"), conflict()];
    let responses = [attempt(), attempt(), attempt()].concat();
    let server = FakeApiServer::with_responses(responses).await;
    let error = server.run(&["ban", "edge-1"]).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::Refused);
}
