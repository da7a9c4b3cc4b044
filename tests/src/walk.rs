//! Runs hub and agent with a failpoint plan: at each external effect, they die once or the effect fails once. The
//! harness restarts a dead process immediately. The process keeps only the state on the clusters.

use crate::Merge as _;
use std::{
    collections::BTreeSet, fs, path::PathBuf, pin::pin, process::ExitStatus, sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    agent::{Agent, AgentOptions},
    cluster::{Cluster, Parts},
    daemon::{Daemon, Program},
    fleet::{FleetClient, HUB_NAMESPACE, SYSTEM_NAMESPACE, helm_ends},
    hub::{Hub, HubOptions},
    membership::{Mode, bundle, write_secret},
    process::log_end,
    wait::eventually,
};

/// The failpoint variable of `krypton_runtime::failpoint`.
const PLAN: &str = "KRYPTON_FAILPOINT_PLAN";
const STRUCK: &str = "KRYPTON_FAILPOINT_STRUCK";
/// Name of the member.
pub const EDGE: &str = "edge-1";
const HUB_LEASE: &str = "krypton-hub";
const MEMBER_LEASE: &str = "krypton-agent";
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The home cluster with its hub, and one member.
#[derive(Debug)]
pub struct Walk {
    hub: Hub,
    agent: Option<Agent>,
    mode: Mode,
    flags: Vec<String>,
    /// Flags of the agent.
    of_agent: Vec<String>,
    plan: String,
    folder: TempDir,
    /// Number of triggered points at the latest start of the hub and of the agent.
    known: [usize; 2],
    deaths: usize,
    home: Arc<Cluster>,
    edge: Arc<Cluster>,
}

impl Walk {
    /// Starts the clusters and a hub that follows the plan.
    pub async fn begin(name: &str, mode: Mode, plan: &str, flags: Vec<String>) -> Result<Self> {
        knows_plans("krypton-hub")?;
        let names = ["home", "edge"].map(|role| format!("{name}-{role}"));
        let (home, edge) = tokio::try_join!(
            Cluster::start(&names[0], Parts::ControlPlane),
            Cluster::start(&names[1], Parts::WithControllers),
        )?;
        let folder = TempDir::with_prefix("krypton-walk-").context("creating a folder")?;
        let options = hub_options(&home, &flags, plan, folder.path().join("hub"));
        let hub = Hub::start(&options)?;
        Ok(Self {
            hub,
            agent: None,
            mode,
            flags,
            of_agent: vec!["--chart-source=hub".to_owned()],
            plan: plan.to_owned(),
            folder,
            known: [0; 2],
            deaths: 0,
            home: Arc::new(home),
            edge: Arc::new(edge),
        })
    }

    /// Adds the member to the fleet.
    pub async fn join(&mut self) -> Result<()> {
        let home = FleetClient::at(&self.home);
        if self.mode != Mode::Agent {
            return home
                .add_member(EDGE, &self.edge.kubeconfig_with_token())
                .await;
        }
        let at = Arc::clone(&self.home);
        let bundle = self
            .through("being invited", async move { bundle(&at, EDGE).await })
            .await?;
        write_secret(&self.bundle(), &bundle)?;
        self.agent = Some(self.start_agent()?);
        Ok(())
    }

    /// Runs a scene, and restarts the processes that die during it.
    pub async fn through<T>(
        &mut self,
        what: &str,
        scene: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let begun = std::time::Instant::now();
        let (deaths, struck) = (self.deaths, self.struck()?.len());
        let mut scene = pin!(scene);
        let done = loop {
            tokio::select! {
                done = &mut scene => break done,
                () = tokio::time::sleep(LOOK_EVERY) => self.raise().await?,
            }
        };
        let (died, more) = (self.deaths - deaths, self.struck()?.len() - struck);
        let seconds = begun.elapsed().as_secs();
        println!(
            "{:?}, {}: {what}: {more} points, {died} deaths, {seconds} s",
            self.mode, self.plan
        );
        done.with_context(|| format!("{what}, with the plan {}", self.plan))
    }

    /// Kills the hub and the agent, if any. Their successors get one more flag.
    pub async fn kill_and_start_with(&mut self, flag: &str) -> Result<()> {
        self.flags.push(flag.to_owned());
        self.of_agent.push(flag.to_owned());
        self.hub.kill9().await?;
        if let Some(agent) = &mut self.agent {
            agent.kill9().await?;
        }
        self.raise_hub().await?;
        self.raise_agent().await
    }

    /// Stops them with SIGTERM twice, because the plan can kill them before and after they release their Leases.
    pub async fn stop_twice(&mut self) -> Result<()> {
        for _ in 0..2 {
            let (home, edge) = (self.home.client(), self.edge.client());
            let held = async move {
                eventually("the Leases to be held", async || {
                    for (client, namespace, name) in [
                        (&home, HUB_NAMESPACE, HUB_LEASE),
                        (&edge, SYSTEM_NAMESPACE, MEMBER_LEASE),
                    ] {
                        let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
                        let holder = leases.get(name).await?.spec.unwrap_or_default();
                        if holder.holder_identity.unwrap_or_default().is_empty() {
                            bail!("{name} has no holder");
                        }
                    }
                    Ok(Some(()))
                })
                .await
            };
            self.through("starting", held).await?;
            if let Some(agent) = &mut self.agent {
                agent.stop().await?;
            }
            self.hub.stop().await?;
            self.raise_hub().await?;
            self.raise_agent().await?;
        }
        Ok(())
    }

    /// Returns all triggered points, as `effect:moment`.
    pub fn struck(&self) -> Result<BTreeSet<String>> {
        let mut all = BTreeSet::new();
        for who in ["hub", "agent"] {
            all.extend(self.struck_of(who)?);
        }
        Ok(all)
    }

    fn struck_of(&self, who: &str) -> Result<Vec<String>> {
        match fs::read_to_string(self.folder.path().join(who)) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error).context("reading the triggered points"),
        }
    }

    pub fn deaths(&self) -> usize {
        self.deaths
    }

    pub fn home(&self) -> Arc<Cluster> {
        Arc::clone(&self.home)
    }

    pub fn edge(&self) -> Arc<Cluster> {
        Arc::clone(&self.edge)
    }

    async fn raise(&mut self) -> Result<()> {
        if let Some(status) = self.hub.ended()? {
            self.was_struck("hub", status)?;
            self.raise_hub().await?;
            // An agent in enrollment would back off.
            if let Some(agent) = &mut self.agent
                && !agent.log()?.contains("joined;")
            {
                agent.kill9().await?;
                self.raise_agent().await?;
            }
        }
        let ended = self.agent.as_mut().map(|agent| agent.ended());
        if let Some(status) = ended.transpose()?.flatten() {
            self.was_struck("agent", status)?;
            self.raise_agent().await?;
        }
        Ok(())
    }

    /// Asserts that the plan ended the process.
    fn was_struck(&mut self, who: &str, status: ExitStatus) -> Result<()> {
        let now = self.struck_of(who)?;
        let known = &mut self.known[usize::from(who == "agent")];
        let log = match (who, &self.agent) {
            ("agent", Some(agent)) => agent.log_path(),
            _ => self.hub.log_path(),
        };
        ensure!(
            now.len() > *known,
            "the {who} ended with {status} and nothing had struck; its log ends:\n{}",
            log_end(log)
        );
        *known = now.len();
        self.deaths += 1;
        Ok(())
    }

    async fn raise_hub(&mut self) -> Result<()> {
        gone(&self.hub).await?;
        release_lease(self.home.client(), HUB_NAMESPACE, HUB_LEASE).await?;
        if self.agent.is_none() {
            release_lease(self.edge.client(), SYSTEM_NAMESPACE, MEMBER_LEASE).await?;
        }
        let file = self.folder.path().join("hub");
        let options = hub_options(&self.home, &self.flags, &self.plan, file);
        self.hub = Hub::start(&options.in_place_of(&self.hub))?;
        Ok(())
    }

    async fn raise_agent(&mut self) -> Result<()> {
        if let Some(agent) = &self.agent {
            gone(agent).await?;
            release_lease(self.edge.client(), SYSTEM_NAMESPACE, MEMBER_LEASE).await?;
            self.agent = Some(self.start_agent()?);
        }
        Ok(())
    }

    fn bundle(&self) -> PathBuf {
        self.folder.path().join("bundle.yaml")
    }

    fn start_agent(&self) -> Result<Agent> {
        let bundle = self.bundle();
        let struck = self.folder.path().join("agent");
        let plan = [
            (PLAN, self.plan.clone()),
            (STRUCK, struck.display().to_string()),
        ];
        let options = AgentOptions::new(self.edge.kubeconfig())
            .join_file(&bundle)
            .args(self.of_agent.iter().map(String::as_str))
            .env(plan.map(|(name, value)| (name.to_owned(), value)));
        Agent::start(&options)
    }
}

fn hub_options<'a>(
    home: &'a Cluster,
    flags: &[String],
    plan: &str,
    struck: PathBuf,
) -> HubOptions<'a> {
    HubOptions::new(home.kubeconfig())
        .args(flags.iter().map(String::as_str))
        .env(PLAN, plan)
        .env(STRUCK, &struck.display().to_string())
        // The pod doesn't exist, but the hub tries to label it.
        .env("POD_NAME", "krypton-hub-0")
        .env("POD_UID", "0b4d9a52-93a5-4f8a-b1c7-6f1f4cd0e7a1")
        .env("KRYPTON_POD_NAMESPACE", HUB_NAMESPACE)
}

/// Waits until the Helm processes of the dead process have ended. Only then may its Lease be released.
async fn gone(dead: &Daemon) -> Result<()> {
    helm_ends(dead.folder()?).await
}

/// Releases the Lease of a dead process, which would otherwise expire after a minute.
async fn release_lease(client: Client, namespace: &str, name: &str) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(client, namespace);
    match leases
        .merge(name, &json!({"spec": {"holderIdentity": ""}}))
        .await
    {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error).context("releasing the Lease of a dead process"),
    }
}

/// Asserts that the program contains failpoints. Without them, every walk would pass.
fn knows_plans(name: &'static str) -> Result<()> {
    let variable = "KRYPTON_HUB_BIN";
    let binary = Program { name, variable }.find()?;
    let bytes = fs::read(&binary).with_context(|| format!("reading {}", binary.display()))?;
    let plan = PLAN.as_bytes();
    ensure!(
        bytes.windows(plan.len()).any(|window| window == plan),
        "{} was built without failpoints; run 'cargo build --workspace --bins --examples --features failpoints'",
        binary.display()
    );
    Ok(())
}
