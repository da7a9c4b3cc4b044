//! Shows the changes, output and exit codes of the `kubectl krypton` commands.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read as _;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_hub::agent_server::join_info;
use krypton_hub::ca::Authority;
use krypton_kubectl::ExitCode::{
    self, Failed, NoResponse, NotFound, NotPermitted, NotReady, Refused, Success, Usage,
};
use krypton_runtime::clock;
use krypton_tests::{
    AgentOptions, Cluster, Daemon, ForwardedPod, Hub, HubOptions, Kubelet, Mode, OwnChart, Parts,
    Scenario, ServiceAccountAccess, TestResult, Tools, assert_contains, by_agent, eventually,
    fleet::{FleetClient, HUB_NAMESPACE, condition},
    kubectl_krypton,
    membership::{enrolled_agent, kubectl_krypton_path, run_kubectl_krypton},
    port::Port,
    process::{ChildProcess, Invocation},
};
use krypton_types::join_info::JoinInfo;
use kube::Api;
use serde_json::json;

const DEADLINE: Duration = Duration::from_secs(30);

by_agent!(paused_tenant_stands_still_and_leaving_uninstalls,);

async fn paused_tenant_stands_still_and_leaving_uninstalls(mode: Mode) -> TestResult {
    let (mut pair, chart) = Scenario::new("verbs", mode).start().await?;
    let fleet_client = pair.fleet_client();
    fleet_client.install("acme").await?;
    let release = pair.release("acme");
    let one = fleet_client.revisions("acme", &release).await?;
    assert_eq!(one.len(), 1, "{one:?}");

    // The Tenant was created on the member, so the user runs the command there.
    let tenant = ["tenant", "acme", "-n", "default"];
    let at_member = async |verb: &str| {
        let args: Vec<&str> = [verb].into_iter().chain(tenant).collect();
        kubectl_krypton(pair.cluster(), &args).await.unwrap()
    };
    for outcome in ["paused", "is paused already"] {
        let expected = format!("tenant.mesh.openkcm.io/acme {outcome}\n");
        assert_eq!(at_member("pause").await, expected);
    }
    chart.write("replicaCount: 0\npaused: once")?;
    let progress = pair.condition("ClusterProgress");
    let paused = (progress.as_str(), "False", "Paused");
    fleet_client.wait_for("acme", &[paused]).await?;
    assert_eq!(fleet_client.revisions("acme", &release).await?, one);
    let output = at_member("resync").await;
    assert_contains!(output, "is reconciled again");
    assert_eq!(fleet_client.revisions("acme", &release).await?, one);
    at_member("resume").await;
    fleet_client.wait_deployed("acme", &release, 2).await?;

    let member = pair.name();
    let run_on_home = async |args: &[&str]| kubectl_krypton(pair.home(), args).await.unwrap();
    run_on_home(&["pause", "cluster", member]).await;
    chart.write("replicaCount: 0\npaused: twice")?;
    fleet_client.wait_for("acme", &[paused]).await?;
    let resumed = run_on_home(&["resume", "cluster", member]).await;
    assert!(resumed.ends_with("edge-1 resumed\n"), "{resumed}");
    fleet_client.wait_deployed("acme", &release, 3).await?;

    let wait_for_ban = async |banned: bool| {
        let members: Api<EdgeCluster> = Api::all(pair.home().client());
        eventually("the ban to be shown", async || {
            let status = members.get(member).await?.status.unwrap_or_default();
            let healthy = condition(&status.conditions, "Healthy");
            let is_banned = healthy.is_some_and(|condition| condition.reason == "Banned");
            ensure!(is_banned == banned, "{healthy:?}");
            Ok(Some(()))
        })
        .await
        .unwrap();
    };
    run_on_home(&["ban", member]).await;
    wait_for_ban(true).await;
    run_on_home(&["unban", member]).await;
    wait_for_ban(false).await;

    let leave_output = run_on_home(&["leave", member, "--uninstall", "--wait"]).await;
    assert!(leave_output.ends_with("is gone\n"), "{leave_output}");
    assert!(fleet_client.releases().await?.is_empty());
    pair.stop().await?;
    Ok(())
}

/// Waits until the log contains this text.
async fn wait_for_log(log: &ChildProcess, text: &str) -> Result<()> {
    eventually(text, async || {
        let log = std::fs::read_to_string(log.log())?;
        ensure!(log.contains(text), "{log}");
        Ok(Some(()))
    })
    .await
}

#[tokio::test]
async fn kubectl_plugin_reports_exit_codes_changes_and_completions() -> TestResult {
    let home = Cluster::start("plug-in", Parts::ControlPlane).await?;
    let run = async |args: &[&str]| {
        let output = run_kubectl_krypton(&home, args).await.unwrap();
        let run = output.status.code().unwrap();
        (run, format!("{}{}", output.stdout, output.stderr))
    };
    let expect_exit = async |command: &str, expected: ExitCode, expected_text: &str| {
        let args: Vec<&str> = command.split(' ').collect();
        let (run, text) = run(&args).await;
        assert_eq!(run, expected as i32, "{command}: {text}");
        assert!(text.contains(expected_text), "{command}: {text}");
    };
    // The CRD is not installed yet.
    expect_exit("get clusters", NotFound, "has no edgeclusters").await;
    let crd = include_str!("../../../crds/crds/edgeclusters.mesh.openkcm.io.yaml");
    home.apply(crd).await?;
    home.wait_for_crds().await?;
    home.apply(&edge_cluster("edge-1")).await?;
    expect_exit("get clusters", Success, "edge-1").await;
    expect_exit("get cluster edge-9", NotFound, "edge-9").await;
    expect_exit("pause cluster edge-9", NotFound, "edge-9").await;
    expect_exit("ban edge-1 edge-9", Failed, "edge-1 banned").await;
    expect_exit("pause planet x", Usage, "planet").await;
    expect_exit("leave edge-1", Usage, "<--orphan|--uninstall>").await;
    let itself = "leave self-cluster --orphan";
    expect_exit(itself, Refused, "--self-cluster=false").await;
    expect_exit("join edge-1", NotFound, "krypton-hub-join").await;
    // Without a running hub, no process would uninstall the releases, so the EdgeCluster is not deleted.
    expect_exit("leave edge-1 --orphan", Success, "is leaving").await;
    expect_exit("get cluster edge-1", NotFound, "edge-1").await;

    home.apply(&edge_cluster("edge-2")).await?;
    let folder = tempfile::tempdir()?;
    let log = folder.path().join("watched");
    let watch = home
        .invocation(&kubectl_krypton_path()?)
        .args(["get", "clusters", "--watch"]);
    let mut watching = ChildProcess::spawn("watching", &watch, &log)?;
    wait_for_log(&watching, "edge-2").await?;
    kubectl_krypton(&home, &["pause", "cluster", "edge-2"]).await?;
    wait_for_log(&watching, "-,paused").await?;
    home.apply(&edge_cluster("edge-3")).await?;
    wait_for_log(&watching, "edge-3").await?;
    watching.kill();
    let shown = std::fs::read_to_string(&log)?;
    assert_eq!(shown.matches("NAME").count(), 1, "{shown}");
    assert_eq!(shown.matches("edge-2").count(), 2, "{shown}");

    // kubectl requests completions in this way.
    for name in ["kubectl-krypton", "kubectl_complete-krypton"] {
        symlink(kubectl_krypton_path()?, folder.path().join(name))?;
    }
    let completed = async |args: &[&str]| {
        let kubectl = home.command("kubectl").args(["__complete", "krypton"]);
        let kubectl = with_path(kubectl.args(args.iter().copied()), folder.path());
        kubectl.output(DEADLINE).await.unwrap()
    };
    // As with kubectl's own commands, the flags precede or follow the verb.
    let kubeconfig = home.kubeconfig().to_str().unwrap().to_owned();
    let flags = ["--kubeconfig", &kubeconfig, "--request-timeout=30s"];
    for words in [
        [&flags[..], &["get", "clusters"]].concat(),
        [&["get", "clusters"][..], &flags].concat(),
    ] {
        let kubectl = Invocation::new(Tools::find()?.binary("kubectl"));
        let kubectl = with_path(kubectl.arg("krypton").args(words), folder.path());
        let listed = kubectl.output(DEADLINE).await?;
        assert_contains!(listed, "edge-3");
    }
    let kinds = completed(&["get", "cl"]).await;
    assert!(kinds.starts_with("clusters"), "{kinds}");
    let names = completed(&["pause", "cluster", ""]).await;
    assert!(names.starts_with("edge-2\nedge-3\n"), "{names}");

    home.stop_apiserver().await?;
    expect_exit("get clusters", NoResponse, "cannot be reached").await;
    Ok(())
}

fn edge_cluster(name: &str) -> String {
    format!("apiVersion: mesh.openkcm.io/v1alpha1\nkind: EdgeCluster\nmetadata: {{name: {name}}}\n")
}

/// Puts this folder at the front of PATH.
fn with_path(invocation: Invocation, folder: &Path) -> Invocation {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(folder.to_owned()).chain(std::env::split_paths(&path));
    invocation.env("PATH", std::env::join_paths(folders).unwrap())
}

/// Ends of a command that only the operator may run.
const ONLY_OPERATOR: [ExitCode; 3] = [NotPermitted, Success, NotPermitted];
/// Ends of a command that reads what the CA operator may not read.
const READERS: [ExitCode; 3] = [Success, Success, NotPermitted];

/// Commands, and how they end for a viewer, an operator and a CA operator.
const RIGHTS: &[(&str, [ExitCode; 3])] = &[
    ("get clusters", READERS),
    ("get tenants -A", READERS),
    ("get deployments -A", READERS),
    // The Tenant has no report yet. A user without read access gets a message about the missing information.
    ("explain tenant acme -n default", [NotReady; 3]),
    ("explain cluster edge-1", [NotReady, NotReady, NotPermitted]),
    (
        "explain deployment acme -n default",
        [NotFound, NotFound, NotPermitted],
    ),
    // No hub runs.
    ("check", [NotReady; 3]),
    // The user may not create what the charts contain.
    ("check --pre", [NotReady; 3]),
    ("pause cluster edge-1", ONLY_OPERATOR),
    ("resume cluster edge-1", ONLY_OPERATOR),
    ("pause tenant acme -n default", ONLY_OPERATOR),
    ("resync tenant acme -n default", ONLY_OPERATOR),
    ("resume tenant acme -n default", ONLY_OPERATOR),
    ("ban edge-1", ONLY_OPERATOR),
    ("unban edge-1", ONLY_OPERATOR),
    ("leave edge-2 --orphan", ONLY_OPERATOR),
    ("join edge-3 --hub-namespace HUB_NAMESPACE", ONLY_OPERATOR),
    // As above.
    ("install hub", [NotReady; 3]),
    // Helm may not read its releases.
    ("uninstall hub --hub-namespace HUB_NAMESPACE", [Failed; 3]),
    // It has the rights of kind's own kubeconfig, and takes no other.
    ("quickstart", [Usage; 3]),
    ("migrate --dry-run", ONLY_OPERATOR),
    ("support-bundle --file FILE", READERS),
    // No process listens in the pod. A user with the right to forward its port gets that error.
    (
        "get tenants --fleet --hub-namespace HUB_NAMESPACE",
        [NotPermitted, Refused, NotPermitted],
    ),
    (
        "log-level hub --hub-namespace HUB_NAMESPACE",
        [NotPermitted, Refused, NotPermitted],
    ),
    // There is no CA. A user with read access gets that error.
    (
        "rotate-ca --status --hub-namespace HUB_NAMESPACE",
        [NotPermitted, NotPermitted, NotFound],
    ),
    ("leave self-cluster --orphan", [Refused; 3]),
];

/// Service accounts with the chart's roles, from the fewest rights to the most special ones.
async fn role_accounts(home: &Cluster) -> TestResult<Vec<ServiceAccountAccess>> {
    let mut role_accounts = Vec::new();
    for role in ["krypton-viewer", "krypton-operator", "krypton-ca-operator"] {
        let kubectl = async |args: &str| home.kubectl_line(args).await;
        let account = format!("--serviceaccount=people:{role}");
        kubectl(&format!("create serviceaccount {role} -n people")).await?;
        let near = format!("create rolebinding {role} -n {HUB_NAMESPACE}");
        kubectl(&format!("{near} --role={role} {account}")).await?;
        if role != "krypton-ca-operator" {
            let wide = format!("create clusterrolebinding {role}");
            kubectl(&format!("{wide} --clusterrole={role} {account}")).await?;
        }
        let access = ServiceAccountAccess::new(home, "people", role).await;
        role_accounts.push(access?);
    }
    Ok(role_accounts)
}

#[tokio::test]
async fn each_role_permits_only_its_own_commands() -> TestResult {
    let home = Cluster::start("roles", Parts::ControlPlane).await?;
    let crds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds/crds");
    let crds = [OsString::from("apply"), "-f".into(), crds.into()];
    home.kubectl(crds).await?;
    home.wait_for_crds().await?;
    home.create_namespace("people").await?;
    let chart = OwnChart::Hub.folder();
    let values = "chart.name=small,chart.repo=https://charts.example.org,chart.version=1.0.0";
    let template = ["template", "hub", "-n", HUB_NAMESPACE, "--set", values];
    let only = ["--show-only=templates/people.yaml", chart.to_str().unwrap()];
    let roles = home.helm(template.into_iter().chain(only)).await?;
    home.apply(&roles).await?;
    for name in ["edge-1", "edge-2"] {
        home.apply(&edge_cluster(name)).await?;
    }
    let fleet_client = FleetClient::new(&home);
    fleet_client.create("acme", json!({})).await?;
    let authority = Authority::generate("home.krypton", clock::wall())?;
    let info = JoinInfo {
        ca_pem: authority.ca_pem(),
        addresses: vec!["hub.example.org:7443".to_owned()],
        version: "0.1.0".to_owned(),
    };
    join_info::publish(home.client(), HUB_NAMESPACE, &info, &|| true).await?;

    let nothing = Port::reserve()?;
    let pod = ForwardedPod {
        namespace: HUB_NAMESPACE,
        name: "krypton-hub-0",
        container: "krypton-hub",
        port: 8099,
        target: nothing.address(),
    };
    let _kubelet = Kubelet::start(&home, &[pod]).await?;
    let role_accounts = role_accounts(&home).await?;
    let versions = kubectl_krypton(&home, &["version", "--hub-namespace", HUB_NAMESPACE]).await?;
    assert_contains!(versions, "\nhub 0.1.0 ");
    let folder = tempfile::tempdir()?;
    for (command, expected) in RIGHTS {
        // The user with the fewest rights comes first.
        for (number, (person, expected)) in role_accounts.iter().zip(expected).enumerate() {
            let kubeconfig = person.kubeconfig();
            let auth_args = ["--kubeconfig", kubeconfig.to_str().unwrap()];
            let file = folder.path().join(number.to_string());
            let file = file.to_str().unwrap();
            let words = command.split(' ').map(|word| match word {
                "FILE" => file,
                "HUB_NAMESPACE" => HUB_NAMESPACE,
                word => word,
            });
            let args: Vec<&str> = words.chain(auth_args).collect();
            let result = run_kubectl_krypton(&home, &args).await?;
            let code = result.status.code();
            let output = format!("{args:?}: {}{}", result.stdout, result.stderr);
            assert_eq!(code, Some(*expected as i32), "{output}");
        }
    }
    Ok(())
}

/// One pod that forwards to the process, and one without a listener.
fn forwarded_pods(
    chart: OwnChart,
    names: [&'static str; 2],
    to: [SocketAddr; 2],
) -> [ForwardedPod; 2] {
    [0, 1].map(|number| ForwardedPod {
        namespace: chart.namespace(),
        name: names[number],
        container: chart.name(),
        port: 8099,
        target: to[number],
    })
}

#[tokio::test]
async fn kubectl_reaches_debug_ports_through_apiserver() -> TestResult {
    let home = Cluster::start("ports", Parts::ControlPlane).await?;
    let options = HubOptions::new(home.kubeconfig()).args([
        "--chart-repo=https://charts.example.org",
        "--chart-name=small",
        "--chart-version=1.0.0",
        "--self-cluster=false",
    ]);
    let hub = Hub::start_ready(&options).await?;
    let folder = tempfile::tempdir()?;
    let replica = [("POD_NAME".to_owned(), "krypton-agent-0".to_owned())];
    let options = AgentOptions::new(home.kubeconfig()).env(replica);
    let agent = enrolled_agent(&home, "edge-1", options).await?;
    let nothing = Port::reserve()?;
    let addresses = |process: &Daemon| [process.debug_address(), nothing.address()];
    let hub_pods = ["krypton-hub-0", "krypton-hub-1"];
    let agent_pods = ["krypton-agent-0", "krypton-agent-1"];
    let pods = [
        forwarded_pods(OwnChart::Hub, hub_pods, addresses(&hub)),
        forwarded_pods(OwnChart::Agent, agent_pods, addresses(&agent)),
    ];
    let _kubelet = Kubelet::start(&home, &pods.concat()).await?;

    let run = async |args: &[&str]| kubectl_krypton(&home, args).await.unwrap();
    let label = "label pod -n krypton krypton-hub-0 mesh.openkcm.io/leader=true";
    home.kubectl_line(label).await?;
    assert_eq!(run(&["log-level", "hub"]).await, "krypton-hub-0: info\n");
    let set = run(&["log-level", "hub", "debug", "--for=1h"]).await;
    assert!(set.starts_with("krypton-hub-0: debug until "), "{set}");
    assert!(hub.debug("log").await?.starts_with("debug until "));
    // The command identifies the active pod by its Lease.
    eventually("the active agent", async || {
        let output = kubectl_krypton(&home, &["log-level", "agent"]).await?;
        Ok((output == "krypton-agent-0: info\n").then_some(()))
    })
    .await?;
    let idle = ["log-level", "hub", "--pod", "krypton-hub-1"];
    let result = run_kubectl_krypton(&home, &idle).await?;
    assert_eq!(result.status.code(), Some(Refused as i32), "{result:?}");
    let refusal = "is not served at 8099";
    assert!(result.stderr.contains(refusal), "{result:?}");

    // The agent acts on the home cluster, too.
    FleetClient::new(&home).create("acme", json!({})).await?;
    eventually("the Tenant in the list of the fleet", async || {
        let output = kubectl_krypton(&home, &["get", "tenants", "--fleet", "--not-ready"]).await?;
        Ok(output.contains("edge-1   default     acme").then_some(()))
    })
    .await?;

    let file = folder.path().join("bundle.tar.gz");
    run(&["support-bundle", "--file", file.to_str().unwrap()]).await;
    let packed = std::fs::File::open(&file)?;
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(packed));
    let mut files = BTreeMap::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.display().to_string();
        let mut text = String::new();
        entry.read_to_string(&mut text)?;
        files.insert(name, text);
    }
    let agent_file = "krypton-system/debug/krypton-agent-0.agent.json";
    let missing = "krypton-hub-1.fleet.json: the debug port of krypton-hub-1 is not served at 8099";
    for (name, holds) in [
        ("krypton/debug/krypton-hub-0.fleet.json", "\"edge-1\""),
        (agent_file, "\"member\": \"edge-1\""),
        ("README.txt", missing),
    ] {
        let text = &files[&format!("krypton-support/{name}")];
        assert!(text.contains(holds), "{name}: {text}");
    }
    Ok(())
}

/// An agent, and the account of its Helm with the rights for the chart `small`, except for its Service.
const AGENT_WITH_FEW_RIGHTS: &str = "apiVersion: v1
kind: Namespace
metadata: {name: krypton-system}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: krypton-agent, namespace: krypton-system}
---
apiVersion: v1
kind: Pod
metadata: {name: krypton-agent-0, namespace: krypton-system}
spec:
  serviceAccountName: krypton-agent
  automountServiceAccountToken: false
  containers:
  - {name: krypton-agent, image: krypton-agent, args: [--helm-service-account=platform/installer]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: installer}
rules:
- {apiGroups: [''], resources: [configmaps, secrets], verbs: ['*']}
- {apiGroups: [apps], resources: [deployments], verbs: [create, delete, get, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: installer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: installer}
subjects: [{kind: ServiceAccount, name: installer, namespace: platform}]
";

#[tokio::test]
async fn manifest_check_names_missing_rights_of_helm() -> TestResult {
    let edge = Cluster::start("manifest", Parts::ControlPlane).await?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("chart.yaml");
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/small");
    let rendered = edge.helm(["template", "acme", chart, "-n", "acme"]).await?;
    std::fs::write(&file, rendered)?;
    let command = ["check", "-n", "acme", "--manifest", file.to_str().unwrap()];
    // The API server learns of a new role with a delay.
    let wait_for = async |more: &[&str], code: ExitCode, expected: &str| {
        let args = [&command[..], more].concat();
        eventually(expected, async || {
            let result = run_kubectl_krypton(&edge, &args).await?;
            ensure!(result.status.code() == Some(code as i32), "{result:?}");
            ensure!(result.stdout.contains(expected), "{result:?}");
            Ok(Some(()))
        })
        .await
        .unwrap();
    };
    let none = "no agent or hub runs in the namespace";
    wait_for(&[], NotReady, none).await;

    edge.apply(AGENT_WITH_FEW_RIGHTS).await?;
    let missing = "✗ Helm's account platform/installer may not create, delete, get, patch services \
                   in the namespace acme\n";
    wait_for(&[], NotReady, missing).await;
    let other = ["--account", "platform:other"];
    let missing = "platform/other may not create, delete, get, patch configmaps in the namespace";
    wait_for(&other, NotReady, missing).await;

    let role = "create clusterrole services --resource=services --verb=create,delete,get,patch";
    edge.kubectl_line(role).await?;
    let subject = "--clusterrole=services --serviceaccount=platform:installer";
    let binding = format!("create clusterrolebinding services {subject}");
    edge.kubectl_line(&binding).await?;
    let complete = "✓ Helm's account platform/installer has the rights for this chart (3 kinds)\n";
    wait_for(&[], Success, complete).await;
    Ok(())
}
