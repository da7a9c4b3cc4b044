//! How a cluster becomes a member, from one call for each mode, and who acts there then.

use std::{
    fs,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use krypton_crds::edge_cluster;
use tempfile::TempDir;

use crate::{
    agent::{Agent, AgentOptions},
    cluster::Cluster,
    daemon::{Daemon, Program},
    fleet::{FleetClient, HUB_NAMESPACE, PATIENCE},
    hub::Hub,
    process::Ran,
    wait::eventually,
};

const KUBECTL_KRYPTON: Program = Program {
    name: "kubectl-krypton",
    variable: "KRYPTON_KUBECTL_BIN",
};
const JOIN_DEADLINE: Duration = Duration::from_secs(30);

/// How a member is looked after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By the hub, on home itself: a member without anybody's doing.
    SelfCluster,
    /// By the hub, with a kubeconfig out of a Secret.
    Proxy,
    /// By an agent beside it, which has enrolled with a join bundle. The hub has no kubeconfig.
    Agent,
}

impl Mode {
    /// What home's EdgeCluster calls it.
    pub fn on_record(self) -> edge_cluster::Mode {
        match self {
            Self::SelfCluster | Self::Proxy => edge_cluster::Mode::Proxy,
            Self::Agent => edge_cluster::Mode::Agent,
        }
    }
}

/// Two tests of each body that takes a `Mode`, `<body>::proxy` and `<body>::agent`.
#[macro_export]
macro_rules! in_both_modes {
    ($($body:ident),+ $(,)?) => {$(
        mod $body {
            #[tokio::test]
            async fn proxy() {
                Box::pin(super::$body($crate::Mode::Proxy)).await;
            }

            #[tokio::test]
            async fn agent() {
                Box::pin(super::$body($crate::Mode::Agent)).await;
            }
        }
    )+};
}

/// One test of each body that takes a `Mode`, `<body>::agent`: the reconciler does this in the same way in both.
#[macro_export]
macro_rules! by_agent {
    ($($body:ident),+ $(,)?) => {$(
        mod $body {
            #[tokio::test]
            async fn agent() {
                Box::pin(super::$body($crate::Mode::Agent)).await;
            }
        }
    )+};
}

/// A member of home's fleet, and its agent, if it has one, for as long as this is kept.
#[derive(Debug)]
pub struct Membership {
    agent: Option<Agent>,
}

impl Membership {
    /// Makes `edge` a member under this name. Of an agent it waits until it has enrolled, for which
    /// the hub must run; what is told of the member afterwards is not waited for.
    ///
    /// # Errors
    /// When an apiserver refuses, the hub tells no way to join, or the agent does not become ready.
    pub async fn join(
        mode: Mode,
        hub: &mut Hub,
        home: &Cluster,
        edge: &Cluster,
        name: &str,
    ) -> Result<Self> {
        let access = match mode {
            Mode::Proxy => edge.kubeconfig_with_token(),
            Mode::SelfCluster | Mode::Agent => String::new(),
        };
        Self::join_by(mode, hub, home, (&access, edge.kubeconfig()), name).await
    }

    /// The same by an access of its own: a kubeconfig for the hub, and a file with one for the agent.
    ///
    /// # Errors
    /// As `join`.
    pub async fn join_by(
        mode: Mode,
        hub: &mut Hub,
        home: &Cluster,
        (kubeconfig, file): (&str, &Path),
        name: &str,
    ) -> Result<Self> {
        match mode {
            Mode::SelfCluster => Ok(Self { agent: None }),
            Mode::Proxy => {
                FleetClient::at(home).add_member(name, kubeconfig).await?;
                Ok(Self { agent: None })
            }
            Mode::Agent => {
                hub.ready(PATIENCE).await?;
                let bundle = bundle(home, name).await?;
                let folder = TempDir::with_prefix("krypton-join-").context("making a folder")?;
                let join = folder.path().join("bundle.yaml");
                write_secret(&join, &bundle)?;
                let options = AgentOptions::new(file).join_file(&join);
                let mut agent = Agent::start(&options)?;
                agent.ready(PATIENCE).await?;
                Ok(Self { agent: Some(agent) })
            }
        }
    }

    /// Who acts on the member: its agent, else the hub.
    pub fn actor<'a>(&'a mut self, hub: &'a mut Hub) -> &'a mut Daemon {
        match &mut self.agent {
            Some(agent) => agent,
            None => hub,
        }
    }

    pub fn agent(&mut self) -> Option<&mut Agent> {
        self.agent.as_mut()
    }

    /// Starts another agent in place of one that has ended, with nothing but what that has left on
    /// its cluster: no bundle, no cache. A member without an agent stays as it is.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_again(&mut self, edge: &Cluster) -> Result<()> {
        if let Some(agent) = &mut self.agent {
            *agent = Agent::start(&AgentOptions::new(edge.kubeconfig()))?;
        }
        Ok(())
    }
}

/// What `kubectl krypton join` prints for this name, as soon as the hub has made known where it is.
///
/// # Errors
/// When it is not printed in time, with what is told instead.
pub async fn bundle(home: &Cluster, name: &str) -> Result<String> {
    bundle_of(home, HUB_NAMESPACE, name).await
}

/// The same of a hub in this namespace.
///
/// # Errors
/// As `bundle`.
pub async fn bundle_of(home: &Cluster, namespace: &str, name: &str) -> Result<String> {
    join(home, namespace, name, &[]).await
}

/// What `kubectl krypton join --replace` prints: a bundle for a member with an agent.
///
/// # Errors
/// As `bundle`.
pub async fn replaced(home: &Cluster, name: &str) -> Result<String> {
    join(home, HUB_NAMESPACE, name, &["--replace"]).await
}

/// What `kubectl krypton join -o helm` prints: a command for the shell that installs this chart of
/// the agent.
///
/// # Errors
/// As `bundle`.
pub async fn join_command(
    home: &Cluster,
    namespace: &str,
    name: &str,
    chart: &Path,
) -> Result<String> {
    let chart = chart.display().to_string();
    join(home, namespace, name, &["-o", "helm", "--chart", &chart]).await
}

async fn join(home: &Cluster, namespace: &str, name: &str, more: &[&str]) -> Result<String> {
    let program = KUBECTL_KRYPTON.find()?;
    let join = home
        .aim(&program)
        .args(["join", name, "-n", namespace, "--ttl", "1h"])
        .args(more.iter().copied());
    eventually("a join bundle", PATIENCE, async || {
        Ok(Some(join.output(JOIN_DEADLINE).await?))
    })
    .await
}

/// What `kubectl krypton` prints on standard output, run against this home with these words.
///
/// # Errors
/// When it fails, with what it says, or takes too long.
pub async fn kubectl_krypton(home: &Cluster, words: &[&str]) -> Result<String> {
    let program = KUBECTL_KRYPTON.find()?;
    let run = home.aim(&program).args(words.iter().copied());
    run.output(JOIN_DEADLINE).await
}

/// The same, however it ends.
///
/// # Errors
/// When it cannot be started, or takes too long.
pub async fn krypton_ends(home: &Cluster, words: &[&str]) -> Result<Ran> {
    let program = krypton_program()?;
    let run = home.aim(&program).args(words.iter().copied());
    run.run(JOIN_DEADLINE).await
}

/// The plug-in itself.
///
/// # Errors
/// When it was not built.
pub fn krypton_program() -> Result<PathBuf> {
    KUBECTL_KRYPTON.find()
}

/// For its owner alone: there is a token in it.
///
/// # Errors
/// When it cannot be written, or is there already.
pub fn write_secret(file: &Path, content: &str) -> Result<()> {
    let write = || {
        let mut options = fs::File::options();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(file)?;
        file.write_all(content.as_bytes())
    };
    write().with_context(|| format!("writing {}", file.display()))
}
