//! `get`: tables of objects as an API server returns them, and complete runs.

use tokio::io::AsyncReadExt as _;

use super::*;
use crate::commands::get::{clusters_table, deployments_table, tenants_table};
use crate::render::View;

fn view(wide: bool) -> View {
    View { wide, now: now() }
}

#[test]
fn clusters_table_shows_known_state() {
    let expected = "\
NAME      MODE                 CONNECTED   READY     TENANTS   VERSION   APPLIED   MESSAGE                                AGE
edge-1    proxy                True        True      3/4       v1.36.3   1.7       -                                      2m5s
edge-22   none,paused,banned   False       False     -         -         -         Unreachable: no answer for 30 s [31m   2m5s
new       -                    Unknown     Unknown   -         -         -         -                                      2m5s
odd       <not readable>
";
    assert_eq!(clusters_table(&fleet(), view(false)).render(), expected);
}

#[test]
fn wide_clusters_table_shows_holder_and_message() {
    let expected = "\
NAME      MODE                 CONNECTED   READY   TENANTS   VERSION   APPLIED   MESSAGE                                AGE    WANTED   LAST-SEEN   HOLDER   CLUSTER-UID
edge-1    proxy                True        True    3/4       v1.36.3   1.7       -                                      2m5s   1.8      10s         hub-0    u-1
edge-22   none,paused,banned   False       False   -         -         -         Unreachable: no answer for 30 s [31m   2m5s   -        -           -        -
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
                    condition("ClusterReady/edge-1", "True", "Installed", "release installed"),
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
    let chart = "https://charts.example.org/small:1.0.0";
    assert!(wide.contains(chart), "{wide}");
}

#[test]
fn wide_tenants_have_a_line_for_each_cluster() {
    let expected = "\
NAMESPACE   NAME             PHASE     READY     CHART                                            MESSAGE                                                                             AGE
default     acme             Error     1/4       https://charts.jetstack.io/cert-manager:1.19.1   1 of 4 clusters ready; edge-1: UpgradeFailed: timed out waiting for the condition   24h
            └ edge-1         Error     True                                                       UpgradeFailed: timed out
            └ edge-2         Ready     True                                                       Installed: release installed
            └ edge-3         Unknown   Unknown                                                    ClusterUnreachable
            └ self-cluster   Pending   False                                                      Installing: helm runs
";
    let table = tenants_table(&tenants()[..1], view(true));
    assert_eq!(table.render(), expected);
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
    let member = |name: &str, connected: &str, state: &str| {
        let summary =
            json!({"namespace": "team", "name": "acme", "state": state, "reason": "Installed"});
        let other = json!({"namespace": "team", "name": "other", "state": "Error", "reason": "InstallFailed"});
        let status = json!({
            "conditions": [condition("Connected", connected, "Connected", "")],
            "tenantSummaries": {"tenants": [other, summary], "omitted": 0},
        });
        cluster(name, json!({}), status)
    };
    let mut truncated = member("edge-4", "True", "Ready");
    truncated["status"]["tenantSummaries"] = json!({"tenants": [], "omitted": 1});
    let members = vec![
        member("edge-1", "True", "Ready"),
        member("edge-2", "True", "Ready"),
        member("edge-3", "False", "Ready"),
        truncated,
        cluster("edge-5", json!({}), json!({})),
    ];
    let responses = || {
        let tenants = vec![tenant("team", "acme", status.clone())];
        vec![list_of(tenants, ""), list_of(members.clone(), "")]
    };
    let server = FakeApiServer::with_responses(responses()).await;
    let output = server.run(&["get", "tenant", "acme"]).await.unwrap();
    let expected = "\
NAMESPACE   NAME       PHASE     READY     CHART   MESSAGE                   AGE
team        acme       Error     58/60     -       58 of 60 clusters ready   24h
            └ edge-1   Ready     True              Installed
            └ edge-2   Error     False             InstallFailed: no room
            └ edge-3   Unknown   Unknown           last known: Ready
";
    assert_eq!(output.stdout, expected);
    let note = "3 of 60 clusters are shown; 1 EdgeClusters";
    assert!(output.stderr.starts_with(note), "{output:?}");
    let uris = server.uris();
    assert!(uris[0].contains("/namespaces/team/tenants"), "{uris:?}");
    assert!(uris[0].contains("metadata.name%3Dacme"), "{uris:?}");
    assert!(uris[1].contains("/edgeclusters"), "{uris:?}");

    let output = run_with(responses(), &["get", "tenants", "-o", "wide"]).await;
    assert!(output.stdout.contains("└ and 59 more"), "{output:?}");
    let server = FakeApiServer::with_responses(vec![list_of(Vec::new(), "")]).await;
    let error = server.run(&["get", "tenant", "nobody"]).await.unwrap_err();
    assert!(matches!(error, KubectlError::NotFound { .. }), "{error}");
}

#[tokio::test]
async fn namespace_flags_and_context_select_list_scope() {
    for (command, expected) in [
        ("--context home get tenants", "/namespaces/team/tenants"),
        ("get tenants --context home", "/namespaces/team/tenants"),
        ("get tenant -n other", "/namespaces/other/tenants"),
        ("-n other get tenants", "/namespaces/other/tenants"),
        ("--namespace=other get kd", "/other/kryptondeployments"),
        ("get tn -A", "/v1alpha1/tenants"),
        ("get clusters", "/v1alpha1/edgeclusters"),
        ("get ec -n other", "/v1alpha1/edgeclusters"),
        ("get deployments", "/namespaces/team/kryptondeployments"),
        ("get kd -A", "/v1alpha1/kryptondeployments"),
    ] {
        let server = FakeApiServer::with_responses(vec![list_of(Vec::new(), "")]).await;
        let args: Vec<&str> = command.split(' ').collect();
        let CommandOutput { stdout, stderr } = server.run(&args).await.unwrap();
        assert_eq!(stdout, "");
        assert!(stderr.starts_with("No resources found"), "{stderr}");
        let of_tenants = expected.ends_with("tenants");
        assert_eq!(stderr.contains("--fleet"), of_tenants, "{command}");
        let uri = server.uris().pop().unwrap();
        assert!(uri.contains(expected), "{command}: {uri}");
    }
}

#[tokio::test]
async fn global_flags_work_on_both_sides_of_verb() {
    let router = Router::new().fallback(|headers: HeaderMap| async move {
        let user = headers.get("impersonate-user");
        json_response(match user.is_some_and(|user| user == "jane") {
            true => list_of(tenants(), ""),
            false => failure(403, "Forbidden", "not you"),
        })
    });
    let server = FakeApiServer::serve(router).await;
    let file = server.directory.path().join("other");
    std::fs::rename(server.directory.path().join("config"), &file).unwrap();
    let flags = [
        "--kubeconfig",
        file.to_str().unwrap(),
        "--as=jane",
        "--context=home",
        "--request-timeout=10s",
        "--namespace=team",
    ];
    let command = ["get", "tenants", "-o", "name"];
    for args in [
        [&flags[..], &command].concat(),
        [&command[..], &flags].concat(),
    ] {
        let output = server.run(&args).await.unwrap();
        assert_eq!(output.stdout.lines().count(), tenants().len(), "{output:?}");
    }
    let without_user = [&flags[..2], &command].concat();
    let error = server.run(&without_user).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::NotPermitted);
}

#[tokio::test]
async fn silent_server_ends_request_at_its_timeout() {
    let router = Router::new().fallback(std::future::pending::<Response>);
    let server = FakeApiServer::serve(router).await;
    for args in [
        &["get", "clusters", "--request-timeout=20ms"][..],
        &["explain", "tenant", "acme", "--request-timeout=20ms"],
    ] {
        let error = server.run(args).await.unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::NoResponse, "{error}");
        assert!(error.to_string().contains("0.02 s"), "{error}");
    }
}

#[tokio::test]
async fn json_path_prints_fields_of_list_or_object() {
    let get = ["get", "tenants"];
    let each = "jsonpath={range .items[*]}{.metadata.name}{'\\n'}{end}";
    for (args, expected) in [
        (&["-o", each][..], "acme\nnew\nodd\n"),
        (
            &["-o", "jsonpath={.kind} {.items[0].status.phase}"][..],
            "List Error",
        ),
        (&["acme", "-o", "jsonpath={.status.phase}"][..], "Error"),
    ] {
        let mut objects = tenants();
        objects.truncate(if args.len() == 3 { 1 } else { 3 });
        let args = [&get[..], args].concat();
        let output = run_with(vec![list_of(objects, "")], &args).await;
        assert_eq!(output.stdout, expected, "{args:?}");
    }
    let one = vec![list_of(vec![tenants().remove(0)], "")];
    let output = run_with(one, &["get", "tenant", "acme", "-o", "json"]).await;
    let object: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(object, tenants().remove(0));
}

#[tokio::test]
async fn several_names_are_listed_despite_missing_one() {
    let one = |index: usize| list_of(vec![tenants().remove(index)], "");
    let responses = vec![one(0), list_of(Vec::new(), ""), one(1)];
    let server = FakeApiServer::with_responses(responses).await;
    let args = [
        "get",
        "tenant/acme",
        "tenant/gone",
        "tenant.mesh.openkcm.io/new",
    ];
    let error = server.run(&[&args[..], &["--no-headers"]].concat()).await;
    let error = error.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::Failed);
    let KubectlError::Partial { output, .. } = error else {
        panic!("{error}")
    };
    let rows = tenants_table(&tenants()[..2], view(false)).with_header(false);
    assert_eq!(output.stdout, rows.render());
    let uri = server.uris().pop().unwrap();
    assert!(uri.contains("metadata.name%3Dnew"), "{uri}");
}

#[tokio::test]
async fn version_fails_after_own_version_without_cluster() {
    let responses = vec![failure(403, "Forbidden", "no")];
    let server = FakeApiServer::with_responses(responses).await;
    let path = server.directory.path().join("config");
    let env = |name: &str| (name == "KUBECONFIG").then(|| path.display().to_string());
    let args = ["kubectl-krypton", "version", "-o", "json"];
    let mut printed = Vec::new();
    let error = run(args.map(OsString::from), &env, now(), &mut printed).await;
    assert_eq!(error.unwrap_err().exit_code(), ExitCode::NotPermitted);
    let versions: Value = serde_json::from_slice(&printed).unwrap();
    assert_eq!(versions["client"]["version"], env!("CARGO_PKG_VERSION"));
}

#[tokio::test]
async fn selector_and_name_output_follow_kubectl() {
    let server = FakeApiServer::with_responses(vec![list_of(tenants(), "")]).await;
    let args = ["get", "tenants", "-A", "-l", "team=a", "-o", "name"];
    let output = server.run(&args).await.unwrap();
    let first = output.stdout.lines().next().unwrap();
    assert!(first.starts_with("tenant.mesh.openkcm.io/"), "{first}");
    let uri = server.uris().pop().unwrap();
    assert!(uri.contains("labelSelector=team%3Da"), "{uri}");
}

#[tokio::test]
async fn objects_are_listed_by_namespace_and_name() {
    let shuffled = [("two", "a"), ("one", "c"), ("one", "b")];
    let shuffled = shuffled.map(|(namespace, name)| tenant(namespace, name, Value::Null));
    let list = || list_of(shuffled.to_vec(), "");
    let expected = ["b", "c", "a"].map(|name| format!("tenant.mesh.openkcm.io/{name}\n"));
    let args = ["get", "tenants", "-A", "-o", "name"];
    let output = run_with(vec![list()], &args).await;
    assert_eq!(output.stdout, expected.concat());

    // The watch fails after the list, which ends the command.
    let responses = vec![list(), failure(403, "Forbidden", "no watch")];
    let server = FakeApiServer::with_responses(responses).await;
    let path = server.directory.path().join("config");
    let env = |name: &str| (name == "KUBECONFIG").then(|| path.display().to_string());
    let args = std::iter::once("kubectl-krypton").chain(args);
    let args = args.chain(["--watch"]).map(OsString::from);
    let mut printed = Vec::new();
    let error = run(args, &env, now(), &mut printed).await.unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::NotPermitted);
    assert_eq!(String::from_utf8(printed).unwrap(), expected.concat());
}

#[tokio::test]
async fn all_pages_are_read_despite_unreadable_object() {
    let mut pages = tenants();
    let second = pages.split_off(2);
    let responses = vec![list_of(pages, "more"), list_of(second, "")];
    let server = FakeApiServer::with_responses(responses).await;
    let args = ["get", "tenants", "-o", "table"];
    let output = server.run(&args).await.unwrap();
    let expected = tenants_table(&tenants(), view(false)).render();
    assert_eq!(output.stdout, expected);
    let uris = server.uris();
    assert!(uris[1].contains("continue=more"), "{uris:?}");
}

#[tokio::test]
async fn json_and_yaml_print_full_lists() {
    let mut object = fleet().remove(3);
    object["metadata"]["managedFields"] = json!([]);
    let expected = json!({
        "apiVersion": "v1", "kind": "List", "metadata": {}, "items": [fleet().remove(3)],
    });
    for format in ["json", "yaml"] {
        let responses = vec![list_of(vec![object.clone()], "")];
        let output = run_with(responses, &["get", "clusters", "-o", format]).await;
        let list: Value = serde_saphyr::from_str(&output.stdout).unwrap();
        assert_eq!(list, expected, "{format}: {}", output.stdout);
    }
}

#[tokio::test]
async fn watch_fails_if_first_list_fails() {
    for (code, reason) in [(500, "InternalError"), (400, "BadRequest")] {
        let responses = vec![failure(code, reason, "no list")];
        let error = error_with(responses, &["get", "clusters", "--watch"]).await;
        assert!(error.contains("no list"), "{error}");
    }
}

#[tokio::test]
async fn unreachable_cluster_is_reported_with_cause() {
    let server = FakeApiServer::with_responses(Vec::new()).await;
    server.write_kubeconfig("http://127.0.0.1:1");
    let error = server.error(&["get", "clusters"]).await;
    assert!(error.contains("Connection refused"), "{error}");
}

#[tokio::test]
async fn cluster_is_reached_through_proxy_of_environment() {
    let server = FakeApiServer::with_responses(Vec::new()).await;
    let config = server.directory.path().join("config");
    server.write_kubeconfig("https://home.invalid:6443");
    let proxy = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = proxy.local_addr().unwrap();
    let env = |name: &str| match name {
        "KUBECONFIG" => Some(config.display().to_string()),
        "HTTPS_PROXY" => Some(format!("http://{address}")),
        _ => None,
    };
    let args = ["kubectl-krypton", "get", "clusters"].map(OsString::from);
    let mut printed = Vec::new();
    let request = async {
        let (mut client, _) = proxy.accept().await.unwrap();
        let mut request = vec![0; "CONNECT home.invalid:6443 ".len()];
        client.read_exact(&mut request).await.unwrap();
        String::from_utf8(request).unwrap()
    };
    let (result, request) = tokio::join!(run(args, &env, now(), &mut printed), request);
    assert_eq!(request, "CONNECT home.invalid:6443 ");
    assert_eq!(result.unwrap_err().exit_code(), ExitCode::NoResponse);
}

#[tokio::test]
async fn context_without_kubeconfig_is_wrong_usage() {
    let args = ["kubectl-krypton", "--context=prod", "get", "clusters"];
    let result = run(args.map(OsString::from), &|_| None, now(), &mut Vec::new()).await;
    let Err(KubectlError::Usage(error)) = result else {
        panic!("a cluster was contacted")
    };
    assert!(error.to_string().contains("set --kubeconfig"), "{error}");
}

#[tokio::test]
async fn server_errors_are_one_line_naming_cluster() {
    let forbidden = failure(403, "Forbidden", "edgeclusters is forbidden:\nno");
    let unauthorized = failure(401, "Unauthorized", "no");
    let failed = "listing edgeclusters on the cluster \"home\" failed";
    for (response, expected) in [
        (failure(404, "NotFound", "not found"), "has no edgeclusters"),
        (forbidden, "may not list edgeclusters in all namespaces"),
        (unauthorized, "does not accept your credentials"),
        (failure(500, "InternalError", "etcd is gone"), failed),
    ] {
        let server = FakeApiServer::with_responses(vec![response]).await;
        let error = server.run(&["get", "clusters"]).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("\"home\"") && !text.contains('\n'), "{text}");
    }
}
