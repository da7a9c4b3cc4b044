//! Verifies handovers: the hub replaces a lost agent, and the agent continues without its hub.

use std::net::SocketAddr;

use anyhow::bail;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    AgentOptions, Cluster, Hub, HubOptions, Membership, Mode, Pair, Parts, Scenario, ServedChart,
    TestResult, eventually,
    fleet::{CONNECTED, FleetClient, PATIENCE},
    home_and_edge,
    membership::enrolled_agent,
};
use kube::Api;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A hub with a short grace period for lost agents, and a future member.
struct Stage {
    home: Cluster,
    edge: Cluster,
    fleet_client: FleetClient,
    at_edge: FleetClient,
    hub: Hub,
    _chart: ServedChart,
}

impl Stage {
    async fn set(name: &str) -> TestResult<Self> {
        let chart = ServedChart::small("replicaCount: 0").await?;
        let (home, edge) = home_and_edge(name, Parts::ControlPlane).await?;
        let flags = chart.flags(&["--self-cluster=false", "--proxy-grace=5s"]);
        let options = HubOptions::new(home.kubeconfig()).args(flags);
        Ok(Self {
            hub: Hub::start(&options)?,
            fleet_client: FleetClient::at(&home),
            at_edge: FleetClient::at(&edge),
            home,
            edge,
            _chart: chart,
        })
    }
}

#[tokio::test]
async fn proxy_takes_over_lost_agent_and_yields_back() -> TestResult {
    let Stage {
        home,
        edge,
        fleet_client,
        at_edge,
        mut hub,
        _chart,
    } = Stage::set("handover").await?;
    let mut member = Membership::join(Mode::Agent, &mut hub, &home, &edge, "edge-1").await?;
    at_edge.install("before").await?;
    let agents = at_edge.holder().await?;
    assert!(agents.starts_with("agent/"), "{agents}");

    // A hub with access doesn't act while the agent is connected.
    fleet_client
        .add_member("edge-1", &edge.kubeconfig_with_token())
        .await?;
    let resolved = ("TargetClusterResolved", "True", "Resolved");
    fleet_client
        .member_shows("edge-1", &[resolved, CONNECTED])
        .await?;
    at_edge.lease_renewed().await?;
    assert_eq!(at_edge.holder().await?, agents);
    fleet_client.member_is("edge-1", Mode::Agent).await?;
    let releases = at_edge.releases().await?;
    let log = hub.log()?;
    assert!(!log.contains("running helm"), "{log}");

    member.agent().unwrap().kill9().await?;
    at_edge.create("meanwhile", json!({})).await?;
    let hubs = at_edge.held_by_another(&agents).await?;
    assert!(hubs.starts_with("hub/"), "{hubs}");
    at_edge.ready("meanwhile").await?;
    fleet_client.member_is("edge-1", Mode::Proxy).await?;
    let log = hub.log()?;
    assert_eq!(log.matches("running helm").count(), 1, "{log}");

    member.start_again(&edge)?;
    let agents = at_edge.held_by_another(&hubs).await?;
    assert!(agents.starts_with("agent/"), "{agents}");
    fleet_client.member_is("edge-1", Mode::Agent).await?;
    at_edge.install("after").await?;
    let logs = [hub.log(), member.agent().unwrap().log()].map(Result::unwrap);
    for log in &logs {
        assert_eq!(log.matches("running helm").count(), 1, "{log}");
    }
    let mut now = at_edge.releases().await?;
    now.retain(|name, _| releases.contains_key(name));
    assert_eq!(now, releases, "the existing release is unchanged");
    for name in ["before", "meanwhile", "after"] {
        let release = format!("tenant-{name}-edge-1");
        at_edge.newest_is(name, &release, 1, "deployed").await?;
    }
    Ok(())
}

#[tokio::test]
async fn agent_keeps_working_without_hub_and_across_restart() -> TestResult {
    let (mut pair, chart) = Scenario::new("alone", Mode::Agent).start().await?;
    let (fleet_client, at_edge) = (FleetClient::at(pair.home()), pair.fleet_client());
    at_edge.install_all(&["with", "leaves"]).await?;

    pair.hub()?.kill9().await?;
    at_edge.install("without").await?;

    assert!(pair.actor()?.stop().await?.success());
    pair.start_agent_again()?;
    pair.actor()?.ready(PATIENCE).await?;
    at_edge.install("restarted").await?;
    at_edge.remove("leaves").await?;
    let releases = at_edge.releases().await?;
    let left = releases.keys().any(|name| name.contains("leaves"));
    assert!(!left, "{releases:?}");

    pair.start_hub_again()?;
    eventually("home to count all three", async || {
        let member = fleet_client.member_shows("edge-1", &[CONNECTED]).await?;
        let tenants = member.status.unwrap_or_default().tenants;
        match tenants.map(|tenants| (tenants.total, tenants.ready)) {
            Some((3, 3)) => Ok(Some(())),
            tenants => bail!("{tenants:?}"),
        }
    })
    .await?;
    assert_eq!(at_edge.releases().await?, releases);

    // After its return, the agent receives only the latest state, and applies only that.
    assert!(pair.actor()?.stop().await?.success());
    for change in 1..=3 {
        chart.write(&format!("replicaCount: 0\nmessage: change-{change}"))?;
        eventually("the hub to apply the change", async || {
            let taken = pair
                .hub()?
                .log()?
                .matches("the values file has changed")
                .count();
            Ok((taken >= change).then_some(()))
        })
        .await?;
    }
    let before = desired_sent(&mut pair).await;
    pair.start_agent_again()?;
    for name in ["with", "without", "restarted"] {
        at_edge
            .newest_is(name, &pair.release(name), 2, "deployed")
            .await?;
        at_edge.ready(name).await?;
    }
    assert_eq!(desired_sent(&mut pair).await, before + 1);
    Ok(())
}

/// Returns the number of desired states that the hub has sent to agents since its start.
async fn desired_sent(pair: &mut Pair) -> u64 {
    let metrics = pair.hub().unwrap().metrics().await.unwrap();
    let line = metrics.lines().find_map(|line| {
        line.strip_prefix("krypton_hub_messages_total{sender=\"hub\",kind=\"desired\"} ")
    });
    line.map_or(0, |count| count.parse().unwrap())
}

/// An agent's rights without DaemonSets, which its administrator has forgotten.
const ALMOST_ALL: &str = r#"
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: almost-all}
rules:
- {apiGroups: ["", "coordination.k8s.io", "mesh.openkcm.io", "apiextensions.k8s.io"], resources: ["*"], verbs: ["*"]}
- {apiGroups: ["apps"], resources: ["deployments", "statefulsets"], verbs: ["*"]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: almost-all}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: almost-all}
subjects: [{kind: ServiceAccount, name: agent, namespace: default}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: agent, namespace: default}
"#;

#[tokio::test]
async fn agent_without_full_cluster_access_leaves_proxy_acting() -> TestResult {
    let Stage {
        home,
        edge,
        fleet_client,
        at_edge,
        mut hub,
        _chart,
    } = Stage::set("blind").await?;
    let _member = Membership::join(Mode::Proxy, &mut hub, &home, &edge, "edge-1").await?;
    fleet_client.member_is("edge-1", Mode::Proxy).await?;
    let hubs = at_edge.holder().await?;

    edge.apply(ALMOST_ALL).await?;
    let token = edge.kubectl(["create", "token", "agent"]).await?;
    let folder = TempDir::with_prefix("krypton-blind-")?;
    let mut kubeconfig: Value = serde_saphyr::from_str(&edge.kubeconfig_with_token())?;
    kubeconfig["users"][0]["user"] = json!({"token": token.trim()});
    let blind = folder.path().join("kubeconfig.yaml");
    std::fs::write(&blind, kubeconfig.to_string())?;
    let _agent = enrolled_agent(&home, "edge-1", AgentOptions::new(&blind)).await?;
    let members: Api<EdgeCluster> = Api::all(home.client());
    eventually("the agent to be shown on home", async || {
        let status = members.get("edge-1").await?.status.unwrap_or_default();
        Ok(status.agent_version.map(drop))
    })
    .await?;

    // Longer than the grace period: only a ready agent makes the hub release the Lease.
    at_edge.lease_renewed().await?;
    at_edge.install("acme").await?;
    assert_eq!(at_edge.holder().await?, hubs);
    fleet_client.member_is("edge-1", Mode::Proxy).await?;
    Ok(())
}

/// The connection from an agent to its hub, which can be cut and restored.
struct Way {
    address: SocketAddr,
    open: watch::Sender<bool>,
}

impl Way {
    async fn to(hub: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (open, opened) = watch::channel(true);
        tokio::spawn(async move {
            while let Ok((mut from, _)) = listener.accept().await {
                let mut opened = opened.clone();
                tokio::spawn(async move {
                    let carry = async {
                        let mut to = TcpStream::connect(hub).await?;
                        tokio::io::copy_bidirectional(&mut from, &mut to).await
                    };
                    tokio::select! {
                        _ = opened.wait_for(|open| !open) => {}
                        _ = carry => {}
                    }
                });
            }
        });
        Self { address, open }
    }
}

#[tokio::test]
async fn disconnected_agent_keeps_acting_while_hub_observes() -> TestResult {
    let Stage {
        home,
        edge,
        fleet_client,
        at_edge,
        mut hub,
        _chart,
    } = Stage::set("cut").await?;
    hub.ready(PATIENCE).await?;
    let way = Way::to(hub.agents_address()).await;
    let options = AgentOptions::new(edge.kubeconfig()).args([format!("--hub={}", way.address)]);
    let _agent = enrolled_agent(&home, "edge-1", options).await?;
    fleet_client.member_is("edge-1", Mode::Agent).await?;
    fleet_client
        .add_member("edge-1", &edge.kubeconfig_with_token())
        .await?;
    let agents = at_edge.held_by_another("").await?;

    way.open.send_replace(false);
    // Much longer than the grace period: the Lease is renewed, and the hub shows its holder.
    let observing = ("Healthy", "True", "Observing");
    fleet_client
        .member_shows("edge-1", &[observing, CONNECTED])
        .await?;
    at_edge.install("acme").await?;
    eventually("home to count the hub's Tenants", async || {
        let member = fleet_client.member_shows("edge-1", &[observing]).await?;
        let status = member.status.unwrap_or_default();
        let counted = status.tenants.map(|tenants| (tenants.total, tenants.ready));
        match (counted, status.lease_holder.as_ref() == Some(&agents)) {
            (Some((1, 1)), true) => Ok(Some(())),
            found => bail!("{found:?}"),
        }
    })
    .await?;
    at_edge.lease_renewed().await?;
    assert_eq!(at_edge.holder().await?, agents);

    way.open.send_replace(true);
    let reconciling = ("Healthy", "True", "Reconciling");
    fleet_client
        .member_shows("edge-1", &[reconciling, CONNECTED])
        .await?;
    assert_eq!(at_edge.holder().await?, agents);
    let log = hub.log()?;
    assert!(!log.contains("running helm"), "{log}");
    Ok(())
}
