//! Starts the clusters, the chart repository, the hub and the agent of the demo, and runs commands against them.

use std::{ffi::OsString, fs, path::PathBuf, time::Duration};

use krypton_tests::{
    Agent, AgentOptions, ChartRepository, ChartSource, Cluster, Hub, HubOptions, Parts, Tools,
    eventually_within,
    fleet::FleetClient,
    kubeconfig,
    process::{Invocation, log_end},
};
use krypton_types::names;

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::{
    folder::{AGENT_LOG, Folder, HUB_LOG},
    screen::Screen,
};

pub(crate) const CHART: &str = "external-dns";
pub(crate) const VERSIONS: [&str; 2] = ["1.19.0", "1.20.0"];
const HUB_NAMESPACE: &str = "krypton";
/// How long an agent must be disconnected before the hub takes over its cluster. The default is 60 s.
pub(crate) const PROXY_GRACE: &str = "5s";
/// Exceeds the duration of any step on a slow machine.
pub(crate) const STEP_DEADLINE: Duration = Duration::from_secs(300);
/// Long enough for a demo that a user leaves running.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// A cluster and its name as a member of the fleet.
pub(crate) struct Site {
    pub(crate) cluster: Cluster,
    pub(crate) fleet_client: FleetClient,
    pub(crate) member: String,
}

impl Site {
    fn new(cluster: Cluster, member: &str) -> Self {
        let fleet_client = FleetClient::new(&cluster);
        let member = member.to_owned();
        Self {
            cluster,
            fleet_client,
            member,
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.cluster.name()
    }
}

/// All running components. The hub and the agent are dropped first.
pub(crate) struct Stage {
    hub: Option<Hub>,
    agent: Option<Agent>,
    /// The stopped hub and agent, kept until their successors start.
    previous: (Option<Hub>, Option<Agent>),
    pub(crate) home: Site,
    pub(crate) edge_1: Site,
    pub(crate) edge_2: Site,
    repository: ChartRepository,
    kubeconfig: PathBuf,
    bundle: PathBuf,
    path: OsString,
}

impl Stage {
    /// Starts everything except the hub and the agent, concurrently.
    pub(crate) async fn start(screen: &Screen, folder: &Folder) -> Result<Self> {
        let charts = VERSIONS.map(ChartSource::external_dns);
        let charts = charts.into_iter().collect::<Result<Vec<_>>>()?;
        let (home, edge_1, edge_2, repository) = tokio::try_join!(
            start(screen, "home"),
            start(screen, "edge-1"),
            start(screen, "edge-2"),
            ChartRepository::start(&charts),
        )?;
        let (versions, url) = (VERSIONS.join(" and "), repository.url());
        screen.event(&format!("{url} serves the chart {CHART}, {versions}"));
        let kubeconfig = folder.path().join("kubeconfig");
        let contexts = [&home, &edge_1, &edge_2].map(|cluster| (cluster.name(), cluster));
        kubeconfig::write(&kubeconfig, &contexts)?;
        Ok(Self {
            hub: None,
            agent: None,
            previous: (None, None),
            home: Site::new(home, names::SELF_CLUSTER),
            edge_1: Site::new(edge_1, "edge-1"),
            edge_2: Site::new(edge_2, "edge-2"),
            repository,
            kubeconfig,
            bundle: folder.path().join("edge-1.yaml"),
            path: path()?,
        })
    }

    pub(crate) fn sites(&self) -> [&Site; 3] {
        [&self.home, &self.edge_1, &self.edge_2]
    }

    pub(crate) fn edges(&self) -> [&Site; 2] {
        [&self.edge_1, &self.edge_2]
    }

    /// Returns the value of `status.lastAppliedChart` for this version.
    pub(crate) fn applied(&self, version: &str) -> String {
        format!("{}/{CHART}:{version}", self.repository.url())
    }

    /// Creates the hub's namespace, because the hub doesn't create it.
    pub(crate) async fn create_namespace(&self) -> Result<()> {
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HUB_NAMESPACE},
        });
        self.home
            .cluster
            .apply(&namespace.to_string())
            .await
            .map(drop)
    }

    /// Stores an edge cluster's kubeconfig in a labelled Secret on the home cluster. This makes the cluster a member,
    /// or lets the hub reach an existing member without its agent.
    pub(crate) async fn add_kubeconfig(&self, screen: &Screen, edge: &Site) -> Result<()> {
        let secret = json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": edge.member,
                "namespace": HUB_NAMESPACE,
                "labels": {names::DISCOVERY_LABEL: "true"},
            },
            "stringData": {names::KUBECONFIG_KEY: edge.cluster.kubeconfig_with_token()},
        });
        self.home.cluster.apply(&secret.to_string()).await?;
        let label = names::DISCOVERY_LABEL;
        let secrets = format!("kubectl get secrets -n {HUB_NAMESPACE} -l {label}=true");
        let output = self.show(screen, &secrets).await?;
        check_contains(&output, &[&edge.member])?;
        if edge.member == self.edge_1.member {
            self.bind(screen, edge).await?;
        }
        Ok(())
    }

    /// Sets the Secret as the source of a member that has an agent. The hub never does this automatically.
    async fn bind(&self, screen: &Screen, edge: &Site) -> Result<()> {
        let source = json!({"kind": "Secret", "namespace": HUB_NAMESPACE, "name": edge.member});
        let patch = json!({"spec": {"sourceRef": source}});
        let name = &edge.member;
        let command = format!("kubectl patch edgecluster {name} --type=merge -p {patch}");
        let output = self.show(screen, &command).await?;
        check_contains(&output, &["patched"])
    }

    /// Runs `kubectl krypton join` once, and writes the join bundle for the agent of edge-1 to a file.
    pub(crate) async fn create_bundle(&self, screen: &Screen) -> Result<()> {
        let name = self.edge_1.member.as_str();
        let command = format!("kubectl krypton join {name} --hub-namespace {HUB_NAMESPACE}");
        let file = self.bundle.file_name().unwrap_or_default().display();
        screen.print(&format!("$ {command} >{file}"));
        // The hub becomes ready before it publishes its addresses.
        let output = eventually_within("a join bundle", STEP_DEADLINE, async || {
            Ok(Some(self.command(&command)?.output(STEP_DEADLINE).await?))
        })
        .await?;
        // Only its owner can read the folder, and the token works for one agent only.
        fs::write(&self.bundle, &output)
            .with_context(|| format!("writing {}", self.bundle.display()))?;
        check_contains(&output, &[name, "BEGIN CERTIFICATE"])?;
        screen.event("the bundle: the hub's addresses, its CA, and a token for one agent");
        Ok(())
    }

    /// Starts the agent of edge-1 and waits until it is ready. The first agent enrolls with the bundle. A later one
    /// uses only the state that the first has left on edge-1.
    pub(crate) async fn start_agent(&mut self, screen: &Screen) -> Result<()> {
        let edge = self.edge_1.cluster.kubeconfig();
        let (options, join) = match self.previous.1 {
            None => (
                AgentOptions::new(edge).join_file(&self.bundle),
                " --join-file edge-1.yaml",
            ),
            Some(_) => (AgentOptions::new(edge), ""),
        };
        screen.print(&format!("$ krypton-agent --kubeconfig edge-1{join}"));
        let agent = self.agent.insert(Agent::start(&options)?);
        agent.wait_ready(STEP_DEADLINE).await?;
        self.previous.1 = None;
        screen.event(&format!("the agent is ready (process {})", agent.pid()));
        Ok(())
    }

    /// Kills the agent with SIGKILL, so it releases no Lease and sends no final report.
    pub(crate) async fn kill_agent(&mut self, screen: &Screen) -> Result<()> {
        let agent = self.agent.as_mut().context("no agent runs")?;
        screen.print(&format!("$ kill -KILL {}", agent.pid()));
        agent.kill9().await?;
        self.previous.1 = self.agent.take();
        screen.event("the agent is dead");
        Ok(())
    }

    /// Starts the hub with this version of the chart, and waits until it is ready.
    pub(crate) async fn start_hub(&mut self, screen: &Screen, version: &str) -> Result<()> {
        let flags = [
            format!("--namespace={HUB_NAMESPACE}"),
            format!("--chart-repo={}", self.repository.url()),
            format!("--chart-name={CHART}"),
            format!("--chart-version={version}"),
            "--chart-install-crds=false".to_owned(),
            format!("--proxy-grace={PROXY_GRACE}"),
        ];
        screen.print(&format!("$ krypton-hub {}", flags.join(" ")));
        let mut options = HubOptions::new(self.home.cluster.kubeconfig()).args(flags);
        if let Some(previous) = &self.previous.0 {
            options = options.on_port_of(previous);
        }
        let hub = self.hub.insert(Hub::start(&options)?);
        hub.wait_ready(STEP_DEADLINE).await?;
        self.previous.0 = None;
        screen.event(&format!("the hub is ready (process {})", hub.pid()));
        Ok(())
    }

    /// Stops the hub gracefully, as a Deployment does before it starts a new pod.
    pub(crate) async fn stop_hub(&mut self, screen: &Screen) -> Result<()> {
        let hub = self.hub.as_mut().context("no hub runs")?;
        let status = hub.stop().await?;
        if !status.success() {
            bail!("the hub exited with {status} after SIGTERM");
        }
        self.previous.0 = self.hub.take();
        screen.event("the hub has ended; its releases keep running");
        Ok(())
    }

    /// Returns an error if the hub or the agent has ended unexpectedly.
    pub(crate) fn check_running(&self) -> Result<()> {
        let hub = self.hub.as_ref().context("no hub runs")?;
        hub.rss_bytes().context("the hub has ended unexpectedly")?;
        if let Some(agent) = &self.agent {
            agent
                .rss_bytes()
                .context("the agent has ended unexpectedly")?;
        }
        Ok(())
    }

    /// Returns an error when the hub ends unexpectedly.
    pub(crate) async fn wait_for_hub_exit(&mut self) -> Result<()> {
        let hub = self.hub.as_mut().context("no hub runs")?;
        let status = hub.wait(FOREVER).await?;
        bail!("the hub has ended unexpectedly with {status}")
    }

    /// Runs a command, shows it with its output, and returns the output.
    pub(crate) async fn show(&self, screen: &Screen, command: &str) -> Result<String> {
        screen.print(&format!("$ {command}"));
        let output = self.command(command)?.output(STEP_DEADLINE).await?;
        screen.print(match output.trim_end() {
            "" => "(nothing)",
            lines => lines,
        });
        Ok(output)
    }

    /// Builds a command with a context for each cluster. The home cluster's context is the current one. No argument
    /// contains a space.
    fn command(&self, command: &str) -> Result<Invocation> {
        let (tool, args) = command.split_once(' ').context("no arguments")?;
        let invocation = self.home.cluster.command(tool).args(args.split(' '));
        Ok(invocation
            .env("KUBECONFIG", &self.kubeconfig)
            .env("PATH", &self.path))
    }

    /// Saves the logs of hub and agent beyond the end of the demo. Returns a text with their paths and last lines.
    pub(crate) fn save_logs(&self, folder: &Folder) -> String {
        let (previous_hub, previous_agent) = &self.previous;
        let hubs = [previous_hub, &self.hub].into_iter().flatten();
        let agents = [previous_agent, &self.agent].into_iter().flatten();
        let logs = hubs.map(|hub| (HUB_LOG, hub.log_path()));
        let logs = logs.chain(agents.map(|agent| (AGENT_LOG, agent.log_path())));
        let mut summary = String::new();
        for (name, log) in logs {
            summary += &match folder.save_log(name, log) {
                Ok(saved) => format!("{} is kept and ends:\n{}\n", saved.display(), log_end(log)),
                Err(error) => format!("{name} is lost ({error:#})\n"),
            };
        }
        summary + "the demo failed"
    }

    /// Returns instructions for inspecting the clusters from another terminal.
    pub(crate) fn instructions(&self) -> String {
        let hub = self.hub.as_ref().map(|hub| hub.log_path());
        let agent = self.agent.as_ref().map(|agent| agent.log_path());
        let logs = [hub, agent].into_iter().flatten();
        let logs: Vec<_> = logs.map(|log| format!("  {}", log.display())).collect();
        let kubeconfig_line =
            |site: &Site| format!("  {:8}{}", site.name(), site.cluster.kubeconfig().display());
        let kubeconfig_lines = self.sites().map(kubeconfig_line).join("\n");
        format!(
            "
The fleet keeps running. In another terminal:

  export KUBECONFIG={kubeconfig}
  export PATH={path}:$PATH

  kubectl krypton get clusters -o wide
  kubectl krypton get tenants -A -o wide
  kubectl get edgeclusters                     # home is the current context
  kubectl --context edge-1 get tenants -A
  helm --kube-context edge-1 list -A
  echo '{{apiVersion: mesh.openkcm.io/v1alpha1, kind: Tenant, metadata: {{name: mine}}}}' |
    kubectl --context edge-1 create -f -

Kubeconfigs of one cluster each:
{kubeconfig_lines}
The logs of hub and agent:
{logs}

Press Ctrl-C to stop and remove the fleet.",
            kubeconfig = self.kubeconfig.display(),
            path = own_path(&self.path),
            logs = logs.join("\n"),
        )
    }
}

async fn start(screen: &Screen, name: &str) -> Result<Cluster> {
    let cluster = Cluster::start(name, Parts::WithPods).await?;
    let server = cluster.server();
    screen.event(&format!("{name} is up at {server}, with a node for pods"));
    Ok(cluster)
}

/// Returns an error if the output lacks one of the expected texts.
pub(crate) fn check_contains(output: &str, expected: &[&str]) -> Result<()> {
    for text in expected {
        if !output.contains(text) {
            bail!("the output of the last command lacks {text:?}");
        }
    }
    Ok(())
}

/// Returns a PATH with the kubectl plugin, which cargo builds next to this program, and with the tools.
fn path() -> Result<OsString> {
    let program_folder = std::env::current_exe().context("finding the current program")?;
    let program_folder = program_folder
        .parent()
        .context("the current program is in no folder")?;
    if !program_folder.join("kubectl-krypton").is_file() {
        bail!(
            "no kubectl-krypton in {}; run 'cargo build --workspace --bins' with the same profile",
            program_folder.display()
        );
    }
    let system = ["/usr/bin", "/bin"].map(PathBuf::from);
    let folders = [program_folder.to_owned(), Tools::find()?.bin()]
        .into_iter()
        .chain(system);
    std::env::join_paths(folders).context("building a PATH")
}

/// Returns the PATH without the system's folders, which every shell has.
fn own_path(path: &OsString) -> String {
    let folders: Vec<_> = std::env::split_paths(path).take(2).collect();
    let folders = folders.iter().map(|folder| folder.display().to_string());
    folders.collect::<Vec<_>>().join(":")
}
