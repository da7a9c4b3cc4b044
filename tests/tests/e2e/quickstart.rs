//! Shows that `kubectl krypton quickstart` sets up a hub and a Tenant on the cluster that kind hands out. A stub stands
//! in for kind, and a process of this machine for the hub's pod.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    time::Duration,
};

use anyhow::Result;
use krypton_tests::{
    ChartRepository, ChartSource, Cluster, HubPod, Parts, PodName, TestResult, assert_contains,
    eventually, fleet::FleetClient, kubeconfig, membership::kubectl_krypton_path,
    process::Invocation,
};
use tempfile::TempDir;

const DEADLINE: Duration = Duration::from_secs(300);
const KIND: &str = r#"#!/bin/sh
cd "${0%/*}" || exit
echo "$*" >>calls
case "$1 $2" in
'get clusters') if [ -e created ]; then echo try; fi ;;
'create cluster') touch created ;;
'delete cluster') rm created ;;
'get kubeconfig') cat kubeconfig ;;
esac
"#;

/// A folder with a stub of kind, which records its arguments and hands out the kubeconfig of a control plane.
struct StubKind(TempDir);

impl StubKind {
    fn new(cluster: &Cluster) -> Result<Self> {
        let folder = TempDir::with_prefix("krypton-kind-")?;
        kubeconfig::write(&folder.path().join("kubeconfig"), &[("kind-try", cluster)])?;
        let stub = Self(folder);
        fs::write(stub.path(), KIND)?;
        fs::set_permissions(stub.path(), Permissions::from_mode(0o755))?;
        Ok(stub)
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("kind")
    }

    /// The command with this kind, and with a kubeconfig of the user that it must not need.
    fn quickstart(&self, cluster: &Cluster, args: &[&str]) -> Result<Invocation> {
        let command = cluster.invocation(&kubectl_krypton_path()?);
        let command = command.env("KUBECONFIG", "/nonexistent");
        let kind = format!("--kind={}", self.path().display());
        Ok(command
            .args(["quickstart", "--name=try", kind.as_str()])
            .args(args.iter().copied()))
    }

    /// The verbs of all calls.
    fn calls(&self) -> Result<Vec<String>> {
        let calls = fs::read_to_string(self.0.path().join("calls"))?;
        let verbs = calls.lines().map(|line| {
            let verbs: Vec<&str> = line.split(' ').take(2).collect();
            verbs.join(" ")
        });
        Ok(verbs.collect())
    }
}

/// Runs the process of the hub's pod as soon as the command has installed the hub. If the process fails, no other one
/// is started.
async fn start_hub(cluster: &Cluster) -> Result<HubPod> {
    let name = PodName::default();
    eventually("the hub of the command", async || {
        let pod = HubPod::start_as(cluster, &name, None, &[]).await?;
        Ok(Some(pod))
    })
    .await
}

#[tokio::test]
async fn quickstart_sets_up_hub_and_tenant_twice() -> TestResult {
    let repository = ChartRepository::start(&[ChartSource::small("1.0.0")]).await?;
    let cluster = Cluster::start("quickstart", Parts::WithPods).await?;
    let kind = StubKind::new(&cluster)?;
    let repo = format!("--chart-repo={}", repository.url());
    let chart = [repo.as_str(), "--chart-name=small", "--chart-version=1.0.0"];
    let first = kind.quickstart(
        &cluster,
        &[&chart[..], &["--load-image=krypton-hub:test"]].concat(),
    )?;
    let (output, mut pod) = tokio::try_join!(first.output(DEADLINE), start_hub(&cluster))?;
    let steps = "creating the kind cluster try\nloading krypton-hub:test\ninstalling the hub\n\
                 waiting for the member self-cluster\ncreating the Tenant first\n\
                 waiting for the Tenant first\nTenant first is Ready";
    assert!(output.starts_with(steps), "{output}");
    let fleet_client = FleetClient::new(&cluster);
    fleet_client.wait_ready("first").await?;
    let revisions = async || {
        let revisions = fleet_client.revisions("first", "tenant-first-self-cluster");
        revisions.await.unwrap()
    };
    assert_eq!(revisions().await, [(1, "deployed".to_owned())]);

    let second = kind.quickstart(&cluster, &[])?.output(DEADLINE).await?;
    assert!(
        second.starts_with("using the kind cluster try\n"),
        "{second}"
    );
    assert_eq!(revisions().await, [(1, "deployed".to_owned())]);
    let values = cluster
        .helm(&["get", "values", "krypton-hub", "-n", "krypton"])
        .await?;
    assert_contains!(values, "name: small");

    let delete = kind.quickstart(&cluster, &["--delete"])?;
    let deleted = delete.output(DEADLINE).await?;
    assert_eq!(deleted, "kind cluster try deleted\n");
    let calls = [
        "get clusters",
        "create cluster",
        "load docker-image",
        "get kubeconfig",
        "get clusters",
        "get kubeconfig",
        "get clusters",
        "delete cluster",
    ];
    assert_eq!(kind.calls()?, calls);
    pod.hub.stop().await?;
    Ok(())
}
