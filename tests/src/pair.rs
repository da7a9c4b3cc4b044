//! Sets up a home cluster with its hub, and the one member under test.

use anyhow::{Context, Result};
use krypton_types::names;

use crate::{
    cluster::{Cluster, Parts},
    daemon::Daemon,
    fleet::FleetClient,
    hub::{Hub, HubOptions},
    membership::Membership,
    mode::Mode,
};

const EDGE: &str = "edge-1";
const NO_HUB: &str = "no hub was started";

/// A home cluster and a member. The acting processes are dropped first and the clusters last.
#[derive(Debug)]
pub struct Pair {
    processes: Option<(Membership, Hub)>,
    mode: Mode,
    flags: Vec<String>,
    /// Environment variables of the hub.
    hub_env: Vec<(String, String)>,
    home: Cluster,
    /// `None` if the home cluster is the member.
    edge: Option<Cluster>,
}

impl Pair {
    /// Starts the clusters. The member runs these parts. A home cluster that is not the member runs only the control
    /// plane.
    pub async fn start(name: &str, mode: Mode, parts: Parts) -> Result<Self> {
        let (home, edge) = match mode {
            Mode::SelfCluster => (Cluster::start(name, parts).await?, None),
            Mode::Proxy | Mode::Agent => {
                let names = ["home", "edge"].map(|role| format!("{name}-{role}"));
                let (home, edge) = tokio::try_join!(
                    Cluster::start(&names[0], Parts::ControlPlane),
                    Cluster::start(&names[1], parts),
                )?;
                (home, Some(edge))
            }
        };
        Ok(Self {
            processes: None,
            mode,
            flags: Vec::new(),
            hub_env: Vec::new(),
            home,
            edge,
        })
    }

    /// Starts a hub with these flags and joins the member. After `stop`, starts hub and agent again with only the state
    /// on their clusters.
    pub async fn start_hub_and_join(
        &mut self,
        flags: impl IntoIterator<Item = String>,
    ) -> Result<()> {
        self.flags = flags.into_iter().collect();
        if self.edge.is_some() {
            self.flags.push("--self-cluster=false".to_owned());
        }
        if self.processes.is_some() {
            self.start_hub_again()?;
            return self.start_agent_again();
        }
        let mut hub = Hub::start(&self.options())?;
        let membership =
            Membership::join(self.mode, &mut hub, &self.home, self.cluster(), EDGE).await?;
        self.processes = Some((membership, hub));
        Ok(())
    }

    /// Sets the environment of all hubs that start later.
    pub fn set_hub_env(&mut self, hub_env: &[(&str, &str)]) {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        self.hub_env = hub_env.iter().map(owned).collect();
    }

    /// Stops the hub, then the agent, if there is one.
    pub async fn stop(&mut self) -> Result<()> {
        let (membership, hub) = self.processes()?;
        hub.stop().await?;
        match membership.agent() {
            Some(agent) => agent.stop().await.map(drop),
            None => Ok(()),
        }
    }

    /// Returns the process that manages the member: the agent, or the hub if there is no agent.
    /// Returns an error before `start_hub_and_join`.
    pub fn actor(&mut self) -> Result<&mut Daemon> {
        let (membership, hub) = self.processes()?;
        Ok(membership.actor(hub))
    }

    /// Starts a new actor after the old one has ended.
    pub fn start_actor_again(&mut self) -> Result<()> {
        match self.mode {
            Mode::SelfCluster | Mode::Proxy => self.start_hub_again(),
            Mode::Agent => self.start_agent_again(),
        }
    }

    /// Returns the hub, in every mode.
    /// Returns an error before `start_hub_and_join`.
    pub fn hub(&mut self) -> Result<&mut Hub> {
        Ok(&mut self.processes()?.1)
    }

    /// Starts a new hub on the port of the old one.
    pub fn start_hub_again(&mut self) -> Result<()> {
        let (_, hub) = self.processes.as_ref().context(NO_HUB)?;
        let next = Hub::start(&self.options().on_port_of(hub))?;
        *self.hub()? = next;
        Ok(())
    }

    /// Starts a new agent after the old one has ended.
    pub fn start_agent_again(&mut self) -> Result<()> {
        let (membership, _) = self.processes.as_mut().context(NO_HUB)?;
        membership.start_again(self.edge.as_ref().unwrap_or(&self.home))
    }

    pub fn home(&self) -> &Cluster {
        &self.home
    }

    /// Returns the member's cluster.
    pub fn cluster(&self) -> &Cluster {
        self.edge.as_ref().unwrap_or(&self.home)
    }

    /// Returns a user's client for the member.
    pub fn fleet_client(&self) -> FleetClient {
        FleetClient::new(self.cluster())
    }

    /// Returns the member's name.
    pub fn name(&self) -> &'static str {
        match self.mode {
            Mode::SelfCluster => names::SELF_CLUSTER,
            Mode::Proxy | Mode::Agent => EDGE,
        }
    }

    /// Returns the type of a condition about the member, such as `ClusterReady/edge-1`.
    pub fn condition(&self, kind: &str) -> String {
        format!("{kind}/{}", self.name())
    }

    /// Returns the name of the Tenant's release on the member.
    pub fn release(&self, tenant: &str) -> String {
        names::tenant_release(tenant, self.name())
    }

    fn processes(&mut self) -> Result<&mut (Membership, Hub)> {
        self.processes.as_mut().context(NO_HUB)
    }

    fn options(&self) -> HubOptions<'_> {
        let flags = self.flags.iter().map(String::as_str);
        let mut options = HubOptions::new(self.home.kubeconfig()).args(flags);
        for (name, value) in &self.hub_env {
            options = options.env(name, value);
        }
        options
    }
}
