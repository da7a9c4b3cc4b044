//! Home with its hub, and the one member that a test is about.

use anyhow::{Context, Result};
use krypton_types::names;

use crate::{
    chart_repository::{ChartRepository, ChartSource},
    cluster::{Cluster, Parts},
    daemon::Daemon,
    fleet::{FleetClient, ValuesFile, chart_flags, values_flag},
    hub::{Hub, HubOptions},
    membership::{Membership, Mode},
};

const EDGE: &str = "edge-1";
const NOT_OPEN: &str = "no hub was started";

/// Who acts goes first, the clusters last.
#[derive(Debug)]
pub struct Pair {
    acting: Option<(Membership, Hub)>,
    mode: Mode,
    flags: Vec<String>,
    /// Of the hub.
    variables: Vec<(String, String)>,
    home: Cluster,
    /// None where home is the member.
    edge: Option<Cluster>,
}

impl Pair {
    /// A member on which Deployments are installed without pods.
    pub async fn with_small_chart(
        name: &str,
        mode: Mode,
    ) -> Result<(Self, ChartRepository, ValuesFile)> {
        let repository = ChartRepository::start(&[ChartSource::small("1.0.0")]).await?;
        let mut pair = Self::start(name, mode, Parts::WithControllers).await?;
        let values = ValuesFile::new("replicaCount: 0")?;
        let mut flags = chart_flags(&repository, "small", "1.0.0");
        flags.push(values_flag(&values));
        pair.open(flags).await?;
        Ok((pair, repository, values))
    }

    /// Starts the clusters, with these parts at the member; a home that is none has only its
    /// objects.
    ///
    /// # Errors
    /// As `Cluster::start`.
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
            acting: None,
            mode,
            flags: Vec::new(),
            variables: Vec::new(),
            home,
            edge,
        })
    }

    /// Starts a hub with these flags, and makes the member one of its fleet. After `stop`: starts
    /// both again, with nothing but what is on their clusters.
    ///
    /// # Errors
    /// When one of them cannot be started, or the member not join.
    pub async fn open(&mut self, flags: impl IntoIterator<Item = String>) -> Result<()> {
        self.flags = flags.into_iter().collect();
        if self.edge.is_some() {
            self.flags.push("--self-cluster=false".to_owned());
        }
        if self.acting.is_some() {
            self.start_hub_again()?;
            return self.start_agent_again();
        }
        let mut hub = Hub::start(&self.options())?;
        let joining = Membership::join(self.mode, &mut hub, &self.home, self.cluster(), EDGE);
        let membership = joining.await?;
        self.acting = Some((membership, hub));
        Ok(())
    }

    /// Environment of the hubs that are started from now on.
    pub fn variables(&mut self, variables: &[(&str, &str)]) {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        self.variables = variables.iter().map(owned).collect();
    }

    /// Ends the hub, then the agent, if there is one.
    ///
    /// # Errors
    /// When one of them does not end in time.
    pub async fn stop(&mut self) -> Result<()> {
        let (membership, hub) = self.acting()?;
        hub.stop().await?;
        match membership.agent() {
            Some(agent) => agent.stop().await.map(drop),
            None => Ok(()),
        }
    }

    /// Who acts on the member: its agent, else the hub.
    ///
    /// # Errors
    /// Before `open`.
    pub fn actor(&mut self) -> Result<&mut Daemon> {
        let (membership, hub) = self.acting()?;
        Ok(membership.actor(hub))
    }

    /// Another in place of the actor, which has ended.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_actor_again(&mut self) -> Result<()> {
        match self.mode {
            Mode::SelfCluster | Mode::Proxy => self.start_hub_again(),
            Mode::Agent => self.start_agent_again(),
        }
    }

    /// The hub, whoever acts.
    ///
    /// # Errors
    /// Before `open`.
    pub fn hub(&mut self) -> Result<&mut Hub> {
        Ok(&mut self.acting()?.1)
    }

    /// # Errors
    /// When it cannot be started.
    pub fn start_hub_again(&mut self) -> Result<()> {
        let (_, hub) = self.acting.as_ref().context(NOT_OPEN)?;
        let next = Hub::start(&self.options().in_place_of(hub))?;
        *self.hub()? = next;
        Ok(())
    }

    /// # Errors
    /// When it cannot be started.
    pub fn start_agent_again(&mut self) -> Result<()> {
        let (membership, _) = self.acting.as_mut().context(NOT_OPEN)?;
        membership.start_again(self.edge.as_ref().unwrap_or(&self.home))
    }

    /// Stops the agent, and joins the member again with a new bundle.
    ///
    /// # Errors
    /// When the agent does not end, or the member not join.
    pub async fn join_again(&mut self) -> Result<()> {
        let edge = self.edge.as_ref().unwrap_or(&self.home);
        let (membership, hub) = self.acting.as_mut().context(NOT_OPEN)?;
        if let Some(agent) = membership.agent() {
            agent.stop().await?;
        }
        *membership = Membership::join(self.mode, hub, &self.home, edge, EDGE).await?;
        Ok(())
    }

    pub fn home(&self) -> &Cluster {
        &self.home
    }

    /// The member's.
    pub fn cluster(&self) -> &Cluster {
        self.edge.as_ref().unwrap_or(&self.home)
    }

    /// A person at the member.
    pub fn desk(&self) -> FleetClient {
        FleetClient::at(self.cluster())
    }

    /// The member's name.
    pub fn name(&self) -> &'static str {
        match self.mode {
            Mode::SelfCluster => names::SELF_CLUSTER,
            Mode::Proxy | Mode::Agent => EDGE,
        }
    }

    /// A type of condition that is about the member: `ClusterReady/edge-1`.
    pub fn condition(&self, kind: &str) -> String {
        format!("{kind}/{}", self.name())
    }

    /// The release of a Tenant there.
    pub fn release(&self, tenant: &str) -> String {
        names::tenant_release(tenant, self.name())
    }

    fn acting(&mut self) -> Result<&mut (Membership, Hub)> {
        self.acting.as_mut().context(NOT_OPEN)
    }

    fn options(&self) -> HubOptions<'_> {
        let flags = self.flags.iter().map(String::as_str);
        let mut options = HubOptions::new(self.home.kubeconfig()).args(flags);
        for (name, value) in &self.variables {
            options = options.env(name, value);
        }
        options
    }
}
