//! `krypton-agent check HOST:PORT AGENTS`: verifies the agents of a cluster, for `helm test`.
//!
//! It needs no rights: the metrics have no authentication, and each account may read which kinds the API server serves.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use axum::http::Request;
use krypton_runtime::access::new_client;
use krypton_runtime::call::{call, call_within};
use krypton_runtime::clock::BootTime;
use krypton_runtime::lease::{LEASE_NAME, SYSTEM_NAMESPACE};
use krypton_types::names::GROUP;
use kube::{Client, Config};

use crate::app::USER_AGENT;
use crate::metrics::PREFIX;

/// Time for agents to connect, and to take over the Lease of a lost agent.
const DEADLINE: Duration = Duration::from_secs(90);
const RETRY_PAUSE: Duration = Duration::from_secs(2);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Repeats the check until it succeeds or the deadline has passed. `args` are the address of a headless Service for the
/// agents' metrics, and the number of agents.
pub async fn run(args: &[String]) -> anyhow::Result<()> {
    let [address, expected] = args else {
        bail!("name a Service and the number of agents: krypton-agent check HOST:PORT AGENTS");
    };
    let expected = expected
        .parse::<usize>()
        .context("AGENTS must be a number")?;
    let config = Config::incluster().context("check needs a pod with a service account token")?;
    let cluster = new_client(config, USER_AGENT).context("creating the cluster's client failed")?;
    let started = BootTime::now();
    while let Err(problem) = check(&cluster, address, expected).await {
        if BootTime::now().since(started) >= DEADLINE {
            return Err(problem);
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
    println!("the agents are Ready and connected, one holds the Lease, and Tenants are served");
    Ok(())
}

async fn check(cluster: &Client, address: &str, expected: usize) -> anyhow::Result<()> {
    let problem = || {
        format!(
            "failed to resolve {address}; check that an agent is Ready, and that this pod reaches the cluster's DNS"
        )
    };
    let lookup = tokio::net::lookup_host(address);
    let agents = tokio::time::timeout(REQUEST_TIMEOUT, lookup).await;
    let agents = agents.with_context(problem)?.with_context(problem)?;
    let mut scrapes = Vec::new();
    for agent in agents {
        scrapes.push((agent, scrape(agent).await?));
    }
    judge(&scrapes, expected)?;
    let group_version = format!("{GROUP}/v1alpha1");
    let kinds = cluster.list_api_group_resources(&group_version);
    let is_served = match call("reading the served kinds", kinds).await {
        Err(error) if error.code() == Some(404) => false,
        result => result?.resources.iter().any(|kind| kind.name == "tenants"),
    };
    ensure!(
        is_served,
        "the API server does not serve tenants.{GROUP}; the agents' log shows why"
    );
    Ok(())
}

/// Returns the metrics of an agent.
async fn scrape(agent: SocketAddr) -> anyhow::Result<String> {
    let client = new_client(Config::new(format!("http://{agent}").parse()?), USER_AGENT)?;
    let request = Request::get("/metrics").body(Vec::new())?;
    let attempt = format!("reading the metrics of the agent at {agent}");
    Ok(call_within(REQUEST_TIMEOUT, attempt, client.request_text(request)).await?)
}

/// Judges the metrics of all agents that are Ready.
fn judge(scrapes: &[(SocketAddr, String)], expected: usize) -> anyhow::Result<()> {
    let ready = scrapes.len();
    ensure!(ready >= expected, "{ready} of {expected} agents are Ready");
    for (agent, metrics) in scrapes {
        ensure!(
            value(metrics, "session_connected") == Some(1),
            "the agent at {agent} has no session with the hub; its log shows why"
        );
    }
    let is_held = |(_, metrics): &(SocketAddr, String)| value(metrics, "leases_held") == Some(1);
    ensure!(
        scrapes.iter().any(is_held),
        "no agent holds the Lease {SYSTEM_NAMESPACE}/{LEASE_NAME}; follow KryptonAgentNoLease in the runbook"
    );
    Ok(())
}

/// Returns the value of a metric without labels.
fn value(metrics: &str, name: &str) -> Option<i64> {
    metrics.lines().find_map(|line| {
        let series = line.strip_prefix(PREFIX)?.strip_prefix('_')?;
        series.strip_prefix(name)?.strip_prefix(' ')?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use jiff::Timestamp;
    use krypton_reconciler::drift::DriftMetrics;
    use krypton_reconciler::metrics::WorkMetrics;
    use krypton_runtime::admin::serve_metrics;
    use tokio::sync::watch;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::metrics::{AgentMetrics, registry};
    use crate::session::Link;

    #[test]
    fn every_agent_needs_session_and_one_lease() {
        let address: SocketAddr = "10.0.0.1:8080".parse().unwrap();
        let verdict = |agents: &[(u8, u8)], expected| {
            let scrapes = agents.iter().map(|(session, lease)| {
                let lines = [("session_connected", session), ("leases_held", lease)];
                let lines = lines.map(|(name, value)| {
                    format!("# TYPE {PREFIX}_{name} gauge\n{PREFIX}_{name} {value}\n")
                });
                (address, lines.concat())
            });
            let result = judge(&scrapes.collect::<Vec<_>>(), expected);
            result.err().map(|error| error.to_string())
        };
        assert_eq!(verdict(&[(1, 1)], 1), None);
        assert_eq!(verdict(&[(1, 0), (1, 1)], 2), None);
        for (agents, problem) in [
            (&[(1, 1)][..], "1 of 2 agents are Ready"),
            (&[(1, 1), (0, 0)][..], "10.0.0.1:8080 has no session"),
            (&[(1, 0), (1, 0)][..], "no agent holds the Lease"),
        ] {
            let found = verdict(agents, 2).unwrap();
            assert!(found.contains(problem), "{found}");
        }
    }

    #[tokio::test]
    async fn agent_serves_metrics_that_check_reads() {
        let state = AgentMetrics {
            link: watch::channel(Link::default()).1,
            expiry: watch::channel(Timestamp::UNIX_EPOCH).1,
            desired: watch::channel(None).1,
            report_store: Arc::default(),
        };
        let registry = registry(state, &DriftMetrics::default(), &WorkMetrics::default());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let agent = listener.local_addr().unwrap();
        let serving = serve_metrics(listener, Arc::new(registry), CancellationToken::new());
        tokio::spawn(serving);
        let metrics = scrape(agent).await.unwrap();
        for name in ["session_connected", "leases_held"] {
            assert_eq!(value(&metrics, name), Some(0), "{name}: {metrics}");
        }
    }
}
