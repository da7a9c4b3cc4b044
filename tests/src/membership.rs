//! Makes a cluster a member with one call, in each mode, and provides access to the acting process.

use std::{
    fs,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::{
    agent::{Agent, AgentOptions},
    cluster::Cluster,
    daemon::{Daemon, Program},
    fleet::{FleetClient, HUB_NAMESPACE},
    hub::Hub,
    mode::Mode,
    process::CommandOutput,
    wait::STEP_DEADLINE,
    wait::eventually,
};

const KUBECTL_KRYPTON: Program = Program {
    name: "kubectl-krypton",
    variable: "KRYPTON_KUBECTL_BIN",
};
const JOIN_DEADLINE: Duration = Duration::from_secs(30);

/// Generates two tests from each function that takes a `Mode`: `<body>::proxy` and `<body>::agent`.
#[macro_export]
macro_rules! in_both_modes {
    ($($body:ident),+ $(,)?) => {$(
        mod $body {
            #[tokio::test]
            async fn proxy() -> $crate::TestResult {
                Box::pin(super::$body($crate::Mode::Proxy)).await
            }

            #[tokio::test]
            async fn agent() -> $crate::TestResult {
                Box::pin(super::$body($crate::Mode::Agent)).await
            }
        }
    )+};
}

/// Generates one test, `<body>::agent`, from each function that takes a `Mode`. Use it for behavior of the reconciler
/// that is the same in both modes.
#[macro_export]
macro_rules! by_agent {
    ($($body:ident),+ $(,)?) => {$(
        mod $body {
            #[tokio::test]
            async fn agent() -> $crate::TestResult {
                Box::pin(super::$body($crate::Mode::Agent)).await
            }
        }
    )+};
}

/// A member of the fleet with its optional agent. Dropping it stops the agent.
#[derive(Debug)]
pub struct Membership {
    agent: Option<Agent>,
}

impl Membership {
    /// Makes `edge` a member with this name. For an agent, waits until it has enrolled, which requires a running hub.
    /// Doesn't wait for the member's later status.
    pub async fn join(
        mode: Mode,
        hub: &mut Hub,
        home: &Cluster,
        edge: &Cluster,
        name: &str,
    ) -> Result<Self> {
        let kubeconfig = match mode {
            Mode::Proxy => edge.kubeconfig_with_token(),
            Mode::SelfCluster | Mode::Agent => String::new(),
        };
        let options = AgentOptions::new(edge.kubeconfig());
        Self::join_with(mode, hub, home, (&kubeconfig, options), name).await
    }

    /// Like `join`, with a specific kubeconfig for the hub and specific options for the agent.
    pub async fn join_with(
        mode: Mode,
        hub: &mut Hub,
        home: &Cluster,
        (kubeconfig, options): (&str, AgentOptions<'_>),
        name: &str,
    ) -> Result<Self> {
        match mode {
            Mode::SelfCluster => Ok(Self { agent: None }),
            Mode::Proxy => {
                FleetClient::new(home).add_member(name, kubeconfig).await?;
                Ok(Self { agent: None })
            }
            Mode::Agent => {
                hub.wait_ready(STEP_DEADLINE).await?;
                let agent = Some(enrolled_agent(home, name, options).await?);
                Ok(Self { agent })
            }
        }
    }

    /// Returns the process that manages the member: the agent, or the hub if there is no agent.
    pub fn actor<'a>(&'a mut self, hub: &'a mut Hub) -> &'a mut Daemon {
        match &mut self.agent {
            Some(agent) => agent,
            None => hub,
        }
    }

    pub fn agent(&mut self) -> Option<&mut Agent> {
        self.agent.as_mut()
    }

    /// Starts a new agent after the old one has ended. It has no bundle and no cache, only the old agent's state on the
    /// cluster. Does nothing for a member without an agent.
    pub fn start_again(&mut self, edge: &Cluster) -> Result<()> {
        if let Some(agent) = &mut self.agent {
            *agent = Agent::start(&AgentOptions::new(edge.kubeconfig()))?;
        }
        Ok(())
    }
}

/// Starts an agent with a bundle for this name, and waits until it is ready.
pub async fn enrolled_agent(
    home: &Cluster,
    name: &str,
    options: AgentOptions<'_>,
) -> Result<Agent> {
    let folder = TempDir::with_prefix("krypton-join-").context("creating a folder")?;
    let join = folder.path().join("bundle.yaml");
    write_secret(&join, &join_bundle(home, name).await?)?;
    Agent::start_ready(&options.join_file(&join)).await
}

/// Returns the output of `kubectl krypton join` for this name, once the hub has published its addresses.
pub async fn join_bundle(home: &Cluster, name: &str) -> Result<String> {
    bundle_in_namespace(home, HUB_NAMESPACE, name).await
}

/// Like `join_bundle`, for a hub in this namespace.
pub async fn bundle_in_namespace(home: &Cluster, namespace: &str, name: &str) -> Result<String> {
    join(home, namespace, name, &[]).await
}

/// Returns the output of `kubectl krypton join --replace`: a bundle for a member that already has an agent.
pub async fn replacement_bundle(home: &Cluster, name: &str) -> Result<String> {
    join(home, HUB_NAMESPACE, name, &["--replace"]).await
}

/// Returns the output of `kubectl krypton join -o helm`: a shell command that installs this agent chart.
pub async fn join_command(
    home: &Cluster,
    namespace: &str,
    name: &str,
    chart: &Path,
) -> Result<String> {
    let chart = chart.display().to_string();
    join(home, namespace, name, &["-o", "helm", "--chart", &chart]).await
}

async fn join(home: &Cluster, namespace: &str, name: &str, flags: &[&str]) -> Result<String> {
    let program = KUBECTL_KRYPTON.find()?;
    let join = home
        .invocation(&program)
        .args(["join", name, "--hub-namespace", namespace, "--ttl", "1h"])
        .args(flags.iter().copied());
    eventually("a join bundle", async || {
        Ok(Some(join.output(JOIN_DEADLINE).await?))
    })
    .await
}

/// Runs `kubectl krypton` against the home cluster with these arguments, and returns its standard output.
pub async fn kubectl_krypton(home: &Cluster, args: &[&str]) -> Result<String> {
    let program = KUBECTL_KRYPTON.find()?;
    let run = home.invocation(&program).args(args.iter().copied());
    run.output(JOIN_DEADLINE).await
}

/// Like `kubectl_krypton`, but also returns the output of a failed command.
pub async fn run_kubectl_krypton(home: &Cluster, args: &[&str]) -> Result<CommandOutput> {
    let program = kubectl_krypton_path()?;
    let run = home.invocation(&program).args(args.iter().copied());
    run.run(JOIN_DEADLINE).await
}

/// Returns the path of the kubectl plugin.
pub fn kubectl_krypton_path() -> Result<PathBuf> {
    KUBECTL_KRYPTON.find()
}

/// Creates a file that only its owner can read, because it contains a token.
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
