//! Shows how the hub keeps clients for its members, and releases resources when members leave.

use anyhow::{Context as _, Result, anyhow};
use axum::body::Bytes;
use axum::http::HeaderMap;
use axum::routing::any;
use krypton_tests::{
    Cluster, Gate, Hub, HubOptions, Mode, Parts, STEP_DEADLINE, Scenario, ServedChart, TestResult,
    assert_contains, eventually,
    fleet::{CONNECTED, FleetClient, HEALTHY, RESOLVED},
    gate, home_and_edge,
    port::Port,
    process::Invocation,
};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

/// Number of members that join and leave in each round.
const MEMBERS: usize = 20;
const ROUNDS: usize = 4;
const NOTIFY_KEY: &str = "a-key-of-notifications";

/// A receiver of notifications that are signed with [`NOTIFY_KEY`].
struct Receiver {
    url: String,
    requests: mpsc::Receiver<(HeaderMap, Bytes)>,
}

impl Receiver {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let (tx, requests) = mpsc::channel(64);
        let handler = move |headers: HeaderMap, body: Bytes| {
            let tx = tx.clone();
            async move { drop(tx.send((headers, body)).await) }
        };
        let router = axum::Router::new().fallback(any(handler));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(Self { url, requests })
    }

    /// Waits for the notification about this state, and verifies its signature as docs/how-to/monitor.md describes.
    async fn wait_for(&mut self, subject: &str, state: &str) -> Result<()> {
        let matching = async {
            while let Some((headers, body)) = self.requests.recv().await {
                let event: Value = serde_json::from_slice(&body)?;
                if event["subject"] == subject && event["data"]["to"] == state {
                    return Ok((headers, body));
                }
            }
            Err(anyhow!("the receiver has ended"))
        };
        let (headers, body) = tokio::time::timeout(STEP_DEADLINE, matching)
            .await
            .with_context(|| format!("no notification that {subject} is {state}"))??;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("body.json");
        std::fs::write(&file, &body)?;
        let openssl = Invocation::new("openssl")
            .args(["dgst", "-sha256", "-hmac", NOTIFY_KEY])
            .arg(&file)
            .env("PATH", std::env::var_os("PATH").unwrap_or_default());
        let output = openssl.output(STEP_DEADLINE).await?;
        let digest = output.trim().rsplit(' ').next();
        let signature = headers["x-signature"].to_str()?;
        assert_eq!(signature.strip_prefix("sha256="), digest, "{output}");
        Ok(())
    }
}

#[tokio::test]
async fn newer_kubeconfig_takes_over_only_once_it_works() -> TestResult {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let (home, edge) = home_and_edge("newer", Parts::ControlPlane).await?;
    let mut receiver = Receiver::start().await?;
    let folder = tempfile::tempdir()?;
    let key_file = folder.path().join("key");
    std::fs::write(&key_file, NOTIFY_KEY)?;
    let notify_url = format!("--notify-url={}", receiver.url);
    let notify_key = format!("--notify-key-file={}", key_file.display());
    let flags = chart.flags(&["--self-cluster=false", &notify_url, &notify_key]);
    let _hub = Hub::start(&HubOptions::new(home.kubeconfig()).args(flags))?;
    let (fleet_client, at_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    let valid = edge.kubeconfig_with_token();
    fleet_client.add_member("edge-1", &valid).await?;
    fleet_client
        .wait_for_member("edge-1", &[RESOLVED, CONNECTED])
        .await?;
    let holder = eventually("the hub to hold the Lease", async || {
        let holder = at_edge.holder().await?;
        Ok((!holder.is_empty()).then_some(holder))
    })
    .await?;

    // No server listens at this address.
    let nowhere = Port::reserve()?;
    let server = edge.server();
    let elsewhere = format!("https://{}", nowhere.address());
    assert!(valid.contains(&server), "{server}");
    let unreachable_server = valid.replace(&server, &elsewhere);
    fleet_client
        .add_member("edge-1", &unreachable_server)
        .await?;
    let stale = ("TargetClusterResolved", "False", "RemoteClusterStale");
    fleet_client
        .wait_for_member("edge-1", &[stale, CONNECTED])
        .await?;
    at_edge.install("meanwhile").await?;

    // The first kubeconfig is valid again, and the proxy didn't restart.
    fleet_client.add_member("edge-1", &valid).await?;
    fleet_client
        .wait_for_member("edge-1", &[RESOLVED, CONNECTED])
        .await?;
    assert_eq!(at_edge.holder().await?, holder);

    // The API server replaces the token first. It rejects the last good client, and the hub still switches to the newer
    // one.
    edge.rotate_token().await?;
    fleet_client
        .add_member("edge-1", &edge.kubeconfig_with_token())
        .await?;
    at_edge.install("rotated").await?;
    fleet_client
        .wait_for_member("edge-1", &[RESOLVED, CONNECTED, HEALTHY])
        .await?;
    rejected_or_removed_kubeconfig_uninstalls_nothing(&fleet_client, &at_edge, &edge, &mut receiver)
        .await
}

/// Returns the same access through an exec plugin, which the hub rejects by default.
fn with_exec(cluster: &Cluster) -> String {
    cluster
        .kubeconfig_with_token()
        .lines()
        .map(|line| match line.split_once("token:") {
            Some((indent, _)) => {
                let exec =
                    "exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/true}";
                format!("{indent}{exec}\n")
            }
            None => format!("{line}\n"),
        })
        .collect()
}

async fn rejected_or_removed_kubeconfig_uninstalls_nothing(
    fleet_client: &FleetClient,
    at_edge: &FleetClient,
    edge: &Cluster,
    receiver: &mut Receiver,
) -> TestResult {
    let healthy = [RESOLVED, CONNECTED, HEALTHY];
    fleet_client.add_member("edge-1", &with_exec(edge)).await?;
    let invalid = ("TargetClusterResolved", "False", "KubeconfigInvalid");
    let expected = [invalid, CONNECTED, HEALTHY];
    let message = fleet_client
        .member_condition_message("edge-1", &expected)
        .await?;
    assert_contains!(message, "default/edge-1", "exec");
    at_edge.install("before").await?;
    fleet_client
        .add_member("edge-1", &edge.kubeconfig_with_token())
        .await?;
    fleet_client.wait_for_member("edge-1", &healthy).await?;

    let tenant = fleet_client.create("before", json!({})).await?;
    assert_eq!(tenant.status.unwrap_or_default().phase, None);
    fleet_client.wait_ready("before").await?;
    let releases = at_edge.releases().await?;
    assert_eq!(releases.len(), 3);
    fleet_client.label_member("edge-1", false).await?;
    let source_gone = [
        ("TargetClusterResolved", "False", "SourceGone"),
        ("Connected", "False", "SourceGone"),
    ];
    fleet_client.wait_for_member("edge-1", &source_gone).await?;
    let unknown = [
        ("ClusterReady/edge-1", "Unknown", "ClusterUnreachable"),
        ("Ready", "Unknown", "ClustersUnknown"),
    ];
    fleet_client.wait_for("before", &unknown).await?;
    assert_eq!(at_edge.holder().await?, "", "the Lease is released");
    receiver
        .wait_for("EdgeCluster/edge-1", "SourceGone")
        .await?;
    // No actor reconciles Tenants now.
    at_edge.create("later", json!({})).await?;
    assert_eq!(at_edge.releases().await?, releases);

    fleet_client.label_member("edge-1", true).await?;
    at_edge.wait_ready("later").await?;
    fleet_client.wait_for_member("edge-1", &healthy).await?;
    fleet_client.wait_ready("before").await?;
    let mut now = at_edge.releases().await?;
    now.retain(|name, _| releases.contains_key(name));
    assert_eq!(now, releases);
    Ok(())
}

#[tokio::test]
async fn helm_run_outlasts_a_rotation_of_its_kubeconfig() -> TestResult {
    let gate = Gate::new()?;
    let (mut pair, _chart) = Scenario::new("outlasts", Mode::Proxy)
        .chart(gate.chart(), "gate")
        .start()
        .await?;
    let (fleet_client, at_home, name) = (
        pair.fleet_client(),
        FleetClient::new(pair.home()),
        pair.name(),
    );
    fleet_client.create("acme", json!({})).await?;
    let hook = gate::wait_for_any_hook(&fleet_client, "acme", None).await?;

    let newer = pair.cluster().kubeconfig_with_next_token();
    at_home.add_member(name, &newer).await?;
    let hub = pair.hub()?;
    hub.wait_for_log("a newer kubeconfig of the same cluster is in use")
        .await?;
    gate::complete_hook(&fleet_client, "acme", &hook).await?;
    fleet_client.wait_ready("acme").await?;
    let log = pair.hub()?.log()?;
    assert_eq!(log.matches("running helm").count(), 1, "{log}");
    Ok(())
}

#[tokio::test]
async fn joins_and_leaves_leak_no_task_or_socket() -> TestResult {
    let (home, edge) = tokio::try_join!(
        Cluster::start("leave-home", Parts::ControlPlane),
        Cluster::start("leave-edge", Parts::ControlPlane),
    )?;
    let options = HubOptions::new(home.kubeconfig()).args(["--self-cluster=false"]);
    let hub = Hub::start(&options)?;
    let fleet_client = FleetClient::new(&home);
    let kubeconfig = edge.kubeconfig_with_token();
    let names: Vec<String> = (0..MEMBERS).map(|index| format!("edge-{index}")).collect();
    for name in &names {
        fleet_client.add_member(name, &kubeconfig).await?;
    }
    let source_gone = ("TargetClusterResolved", "False", "SourceGone");
    let mut empty = (usize::MAX, usize::MAX);
    for round in 0..ROUNDS {
        for name in &names {
            fleet_client.label_member(name, true).await?;
        }
        for name in &names {
            // All members are the same cluster. The hub acts on one, and has a client for each.
            fleet_client
                .wait_for_member(name, &[RESOLVED, CONNECTED])
                .await?;
        }
        let full = hub_load(&hub).await?;
        for name in &names {
            fleet_client.label_member(name, false).await?;
        }
        for name in &names {
            fleet_client.wait_for_member(name, &[source_gone]).await?;
        }
        let what = format!("round {round}: nothing to be left of {full:?} but {empty:?}");
        let remaining = eventually(&what, async || {
            let remaining = hub_load(&hub).await?;
            let as_before = remaining.0 <= empty.0 && remaining.1 <= empty.1;
            let freed = remaining.0 + MEMBERS <= full.0 && remaining.1 + MEMBERS <= full.1;
            if !(as_before && freed) {
                anyhow::bail!("{remaining:?} tasks and sockets");
            }
            Ok(Some(remaining))
        })
        .await?;
        // The first round warms up resources that stay.
        if round == 0 {
            empty = remaining;
        }
    }
    Ok(())
}

/// Returns the numbers of tasks and open sockets of the hub.
async fn hub_load(hub: &Hub) -> Result<(usize, usize)> {
    let metrics = hub.metrics().await?;
    let tasks = metrics
        .lines()
        .find_map(|line| line.strip_prefix("krypton_hub_tasks "))
        .context("no metric krypton_hub_tasks")?;
    Ok((tasks.trim().parse()?, hub.sockets()?))
}
