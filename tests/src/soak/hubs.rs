//! Runs the hubs of home, each with a separate port, agent connection and home connection.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use krypton_tests::{
    Cluster, FaultLine, FaultProxy, Hub, HubOptions, STEP_DEADLINE, Traffic, fleet::HUB_NAMESPACE,
    port::Port,
};
use krypton_types::names::HUB_LEASE;

use anyhow::{Context, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use tokio::sync::Mutex;

use super::whom::HubId;

/// Versions of the chart.
pub(crate) const VERSIONS: [&str; 2] = ["1.0.0", "1.1.0"];
const LEADER: &str = "krypton_hub_leader ";

/// A hub with its connections.
pub(crate) struct RunningHub {
    pub(crate) hub_id: HubId,
    pub(crate) hub: Mutex<Hub>,
    connections: HubConnections,
}

/// The parts that outlive the process.
struct HubConnections {
    port: Arc<Port>,
    /// The connection from agents.
    agent_link: FaultLine,
    /// The connection to home.
    home_proxy: FaultProxy,
}

pub(crate) struct Hubs {
    running: Vec<RunningHub>,
    /// Flags of all hubs, except the version of the chart.
    flags: Vec<String>,
    version: AtomicU32,
}

impl Hubs {
    /// Starts `count` hubs, and waits until each is ready. Agents get the addresses of all hubs.
    pub(crate) async fn start(home: &Cluster, count: usize, flags: Vec<String>) -> Result<Self> {
        let mut all_connections = Vec::new();
        for hub_id in HubId::first(count) {
            let port = Arc::new(Port::reserve()?);
            let agent_link = FaultLine::start(port.address()).await?;
            let home_proxy = FaultProxy::start(home).await?;
            all_connections.push((
                *hub_id,
                HubConnections {
                    port,
                    agent_link,
                    home_proxy,
                },
            ));
        }
        let addresses: Vec<String> = (all_connections.iter())
            .map(|(_, connections)| connections.agent_link.address().to_string())
            .collect();
        let mut hubs = Self {
            running: Vec::new(),
            flags: [flags, vec![format!("--advertise={}", addresses.join(","))]].concat(),
            version: AtomicU32::new(0),
        };
        for (hub_id, connections) in all_connections {
            let mut hub = hubs.start_hub(hub_id, &connections)?;
            hub.wait_ready(STEP_DEADLINE).await?;
            hubs.running.push(RunningHub {
                hub_id,
                hub: Mutex::new(hub),
                connections,
            });
        }
        Ok(hubs)
    }

    fn start_hub(&self, hub_id: HubId, connections: &HubConnections) -> Result<Hub> {
        let number = self.version.load(Ordering::SeqCst);
        let version = VERSIONS.get(number as usize).unwrap_or(&VERSIONS[0]);
        let home = connections.home_proxy.kubeconfig();
        let options = HubOptions::new(&home)
            .args(&self.flags)
            .args([format!("--chart-version={version}")])
            .env("POD_NAME", hub_id.name())
            .on_port(&connections.port);
        Hub::start(&options)
    }

    /// Starts another process after one has ended.
    pub(crate) fn start_again(&self, running_hub: &RunningHub, hub: &mut Hub) -> Result<()> {
        *hub = self.start_hub(running_hub.hub_id, &running_hub.connections)?;
        Ok(())
    }

    /// Sets the chart version of all hubs that start later.
    pub(crate) fn set_version(&self, number: u32) {
        self.version.store(number, Ordering::SeqCst);
    }

    pub(crate) fn all(&self) -> &[RunningHub] {
        &self.running
    }

    pub(crate) fn get(&self, hub_id: HubId) -> Result<&RunningHub> {
        let running_hub = self
            .running
            .iter()
            .find(|running_hub| running_hub.hub_id == hub_id);
        running_hub.with_context(|| format!("there is no {}", hub_id.name()))
    }

    /// Sets the traffic between agents and this hub, or all hubs.
    pub(crate) fn set_links(&self, hub_id: Option<HubId>, traffic: Traffic) {
        for running_hub in &self.running {
            if hub_id.is_none_or(|hub_id| hub_id == running_hub.hub_id) {
                running_hub.connections.agent_link.set(traffic);
            }
        }
    }

    pub(crate) fn end_faults(&self) {
        self.set_links(None, Traffic::Pass);
        self.running
            .iter()
            .for_each(|running_hub| running_hub.set_home_traffic(Traffic::Pass));
    }

    /// Returns whether each hub reports in its metrics that it is the leader. Omits hubs that don't respond.
    pub(crate) async fn leading(&self) -> BTreeMap<HubId, bool> {
        let mut states = BTreeMap::new();
        for running_hub in &self.running {
            let metrics = running_hub
                .hub
                .lock()
                .await
                .metrics()
                .await
                .unwrap_or_default();
            let leader = metrics.lines().find_map(|line| line.strip_prefix(LEADER));
            states.extend(leader.map(|value| (running_hub.hub_id, value == "1")));
        }
        states
    }
}

impl RunningHub {
    /// Sets the traffic between the hub and home.
    pub(crate) fn set_home_traffic(&self, traffic: Traffic) {
        self.connections.home_proxy.set(traffic);
    }
}

/// Returns the holder of the leader election Lease, or an empty string.
pub(crate) async fn holder(home: &Client) -> Result<String> {
    let leases: Api<Lease> = Api::namespaced(home.clone(), HUB_NAMESPACE);
    let lease = leases
        .get(HUB_LEASE)
        .await
        .context("reading the leader Lease")?;
    Ok(lease
        .spec
        .unwrap_or_default()
        .holder_identity
        .unwrap_or_default())
}
