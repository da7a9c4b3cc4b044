//! Shows how the home cluster aggregates a Tenant's status across 100 members.

#[path = "../../src/bench/simulated.rs"]
#[expect(
    dead_code,
    reason = "the benchmark's agents can do more than is tested here"
)]
mod simulated;

use std::time::Duration;

use anyhow::bail;
use jiff::Timestamp;
use krypton_crds::tenant::{ClusterSummary, Tenant};
use krypton_tests::{
    Cluster, Hub, HubOptions, Parts, TestResult, eventually, fleet::FleetClient, kubectl_krypton,
};
use krypton_types::conditions::{State, Truth, clusters, reason};
use krypton_types::tenant::TenantKey;
use kube::Api;
use serde_json::json;
use simulated::{Agents, installed_report};

/// Name of the chart in the simulated agents' reports.
const CHART: &str = "small";
const CHART_VERSION: &str = "1.0.0";

/// Name of a Tenant in the simulated agents' reports.
fn name(number: u32) -> String {
    format!("tenant-{number}")
}

/// A home cluster with a hub and simulated members.
struct SimulatedFleet {
    agents: Agents,
    hub: Hub,
    home: Cluster,
}

impl SimulatedFleet {
    fn options(home: &Cluster) -> HubOptions<'_> {
        HubOptions::new(home.kubeconfig()).args([
            "--namespace=default",
            // Never fetched, because there is no cluster to install the chart on.
            "--chart-repo=https://charts.example.org",
            "--chart-name=small",
            "--chart-version=1.0.0",
            "--self-cluster=false",
        ])
    }

    async fn start(count: u32) -> TestResult<Self> {
        let home = Cluster::start_audited("many", Parts::ControlPlane).await?;
        let hub = Hub::start_ready(&Self::options(&home)).await?;
        let members = simulated::create_members(&home, (0..count).map(member)).await?;
        let enrolled = simulated::enroll(&home, &hub, &members).await?;
        let agents = Agents::start_and_wait(enrolled).await?;
        Ok(Self { agents, hub, home })
    }

    /// Reports a Tenant from a member. `Some(false)` is a Tenant that is not ready, and `None` a deleted one.
    fn send_report(&self, member: u32, tenant: &str, ready: Option<bool>, generation: i64) {
        let key = TenantKey::new("default", tenant);
        let report = ready.map(|ready| {
            let mut report = installed_report();
            report.observed_generation = generation;
            if !ready {
                let message = "m".repeat(1024);
                report.state.ready = State::new(Truth::False, reason::INSTALLING, message);
            }
            report
        });
        self.agents.report(member as usize, &key, report);
    }

    async fn wait_for(&self, tenant: &str, message: &str) -> Tenant {
        let tenants: Api<Tenant> = Api::namespaced(self.home.client(), "default");
        eventually(&format!("{tenant} to show {message:?}"), async || {
            let tenant_object = tenants.get(tenant).await?;
            let found_message = tenant_object
                .status
                .as_ref()
                .and_then(|status| status.last_message.clone());
            if found_message
                .as_deref()
                .is_some_and(|found_message| found_message.starts_with(message))
            {
                return Ok(Some(tenant_object));
            }
            bail!("{found_message:?}");
        })
        .await
        .unwrap()
    }

    /// Returns when the API server received each status write of a Tenant, by its audit log.
    async fn status_writes(&self, tenant: &str) -> Vec<Timestamp> {
        let requests = self.home.audited_requests().await.unwrap();
        let is_status_write = |request: &&krypton_tests::AuditedRequest| {
            let object = &request.object;
            request.verb == "patch" && object.resource == "tenants" && object.name == tenant
        };
        let writes = requests.iter().filter(is_status_write);
        let mut times: Vec<_> = writes.map(|request| request.received).collect();
        times.sort();
        times
    }
}

fn member(number: u32) -> String {
    format!("edge-{number:03}")
}

fn json_size(tenant: &Tenant) -> usize {
    serde_json::to_vec(tenant).unwrap().len()
}

/// The agents use the real protocol. Only their clusters are simulated.
#[tokio::test]
async fn large_fleet_summary_is_throttled_and_survives_restart() -> TestResult {
    const ALL: u32 = 100;
    let mut fleet = SimulatedFleet::start(ALL).await?;
    let fleet_client = FleetClient::new(&fleet.home);
    for tenant in ["acme", "other"] {
        for number in 0..ALL {
            fleet.send_report(number, tenant, Some(true), 1);
        }
        fleet_client.create(tenant, json!({})).await?;
    }
    fleet.wait_for("other", "100 of 100 clusters ready").await;
    let acme = fleet.wait_for("acme", "100 of 100 clusters ready").await;
    let status = acme.status.unwrap();
    assert_eq!(clusters(&status.conditions), [].into());
    let full = ClusterSummary {
        clusters: ALL,
        ready: ALL,
        ..ClusterSummary::default()
    };
    assert_eq!(status.summary, Some(full));

    // Reports that don't change the summary aren't written, while the other Tenant's are.
    let (before, written) = (
        acme.metadata.resource_version,
        fleet.status_writes("acme").await.len(),
    );
    for (round, ready) in [(2, false), (3, true), (4, false), (5, true)] {
        for number in 0..ALL {
            fleet.send_report(number, "acme", Some(true), round);
        }
        fleet.send_report(0, "other", Some(ready), round);
        let count = if ready { ALL } else { ALL - 1 };
        fleet
            .wait_for("other", &format!("{count} of 100 clusters ready"))
            .await;
    }
    let tenants: Api<Tenant> = fleet_client.tenants();
    let acme = tenants.get("acme").await?;
    assert_eq!(acme.metadata.resource_version, before);
    assert_eq!(fleet.status_writes("acme").await.len(), written);

    // All members change their reports continuously.
    for round in 6..46 {
        for number in 0..ALL {
            fleet.send_report(
                number,
                "acme",
                Some((number + round).is_multiple_of(3)),
                i64::from(round),
            );
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for number in 0..ALL {
        fleet.send_report(number, "acme", Some(number >= 30), 46);
    }
    let acme = fleet
        .wait_for(
            "acme",
            "70 of 100 clusters ready (30 not ready); edge-000: Installing: m",
        )
        .await;
    let times = fleet.status_writes("acme").await.split_off(written);
    assert!(times.len() > 1, "{times:?}");
    // However slow this machine is, the hub waits after each write. The API server's clock may be corrected in between.
    for pair in times.windows(2) {
        let pause = pair[1].duration_since(pair[0]);
        assert!(pause.as_millis() >= 900, "{times:?}");
    }
    assert!(json_size(&acme) < 256 * 1024, "{} bytes", json_size(&acme));
    assert_eq!(clusters(&acme.status.unwrap().conditions).len(), 20);

    check_kubectl_lists_all(&fleet).await;

    // A restart loses no member, although the status doesn't contain their names.
    fleet.hub.kill9().await?;
    let options = SimulatedFleet::options(&fleet.home).on_port_of(&fleet.hub);
    fleet.hub = Hub::start(&options)?;
    let tenants = fleet_client.tenants();
    fleet.send_report(0, "acme", Some(true), 47);
    eventually("a new report after the restart", async || {
        let status = tenants.get("acme").await?.status.unwrap_or_default();
        let (summary, message) = (status.summary.unwrap(), status.last_message.unwrap());
        assert_eq!((summary.clusters, summary.unknown), (ALL, 0), "{message}");
        if !message.starts_with("71 of 100") {
            bail!("{message}");
        }
        Ok(Some(()))
    })
    .await?;

    // With few members, the status lists all of them again.
    for number in 40..ALL {
        fleet.send_report(number, "acme", None, 0);
    }
    let acme = fleet
        .wait_for("acme", "11 of 40 clusters ready; edge-001")
        .await;
    let status = acme.status.unwrap();
    assert_eq!(status.summary, None);
    let cluster_states = clusters(&status.conditions);
    assert_eq!(
        cluster_states
            .values()
            .filter(|state| !state.has_departed())
            .count(),
        40
    );
    let log = fleet.hub.log()?;
    assert!(!log.contains("panicked"), "{log}");
    Ok(())
}

async fn check_kubectl_lists_all(fleet: &SimulatedFleet) {
    let args = ["get", "tenant", "acme", "-n", "default"];
    eventually("a condition for each cluster", async || {
        let output = kubectl_krypton(&fleet.home, &args).await?;
        let lines = |word: &str| output.lines().filter(|line| line.contains(word)).count();
        if (lines("└ edge-"), lines("Installed"), lines("Pending")) != (100, 70, 30) {
            bail!("{output}");
        }
        Ok(Some(()))
    })
    .await
    .unwrap();
}
