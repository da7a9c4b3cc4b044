//! The clusters, the chart repository and the hub of the demo, and the commands run at them.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};
use krypton_common::names;
use krypton_tests::{
    ChartRepository, ChartSource, Cluster, Hub, HubOptions, Parts, Tools, fleet::Desk,
    process::log_end,
};
use serde_json::json;

use crate::{folder::Folder, kubeconfig, screen::Screen};

pub(crate) const CHART: &str = "external-dns";
pub(crate) const VERSIONS: [&str; 2] = ["1.19.0", "1.20.0"];
const HUB_NAMESPACE: &str = "krypton";
/// Above all that a step may take on a slow machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);
/// Long enough for a demo that somebody has left running.
const FOR_GOOD: Duration = Duration::from_secs(365 * 24 * 3600);

/// A cluster and its name as a member of the fleet.
pub(crate) struct Site {
    pub(crate) cluster: Cluster,
    pub(crate) desk: Desk,
    pub(crate) member: String,
}

impl Site {
    fn new(cluster: Cluster, member: &str) -> Self {
        let desk = Desk::at(&cluster);
        let member = member.to_owned();
        Self {
            cluster,
            desk,
            member,
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.cluster.name()
    }
}

/// Everything that runs. The hub goes first.
pub(crate) struct Stage {
    hub: Option<Hub>,
    pub(crate) home: Site,
    pub(crate) edge_1: Site,
    pub(crate) edge_2: Site,
    repository: ChartRepository,
    kubeconfig: PathBuf,
    path: OsString,
}

impl Stage {
    /// Starts all but the hub, at once.
    pub(crate) async fn set(screen: &Screen, folder: &Folder) -> Result<Self> {
        let charts = VERSIONS.map(ChartSource::external_dns);
        let charts = charts.into_iter().collect::<Result<Vec<_>>>()?;
        let (home, edge_1, edge_2, repository) = tokio::try_join!(
            start(screen, "home"),
            start(screen, "edge-1"),
            start(screen, "edge-2"),
            ChartRepository::start(&charts),
        )?;
        let (versions, url) = (VERSIONS.join(" and "), repository.url());
        screen.say(&format!("{url} serves the chart {CHART}, {versions}"));
        let kubeconfig = folder.path().join("kubeconfig");
        kubeconfig::write(&kubeconfig, &[&home, &edge_1, &edge_2])?;
        Ok(Self {
            hub: None,
            home: Site::new(home, names::SELF_CLUSTER),
            edge_1: Site::new(edge_1, "edge-1"),
            edge_2: Site::new(edge_2, "edge-2"),
            repository,
            kubeconfig,
            path: path()?,
        })
    }

    pub(crate) fn sites(&self) -> [&Site; 3] {
        [&self.home, &self.edge_1, &self.edge_2]
    }

    pub(crate) fn edges(&self) -> [&Site; 2] {
        [&self.edge_1, &self.edge_2]
    }

    /// What `status.lastAppliedChart` says of this version.
    pub(crate) fn applied(&self, version: &str) -> String {
        format!("{}/{CHART}:{version}", self.repository.url())
    }

    /// Puts the edges' kubeconfigs into labelled Secrets on home: that makes them members.
    pub(crate) async fn join_edges(&self, screen: &Screen) -> Result<()> {
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HUB_NAMESPACE},
        });
        self.home.cluster.apply(&namespace.to_string()).await?;
        for edge in self.edges() {
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
        }
        let label = format!("{}=true", names::DISCOVERY_LABEL);
        let secrets = [
            "kubectl",
            "get",
            "secrets",
            "-n",
            HUB_NAMESPACE,
            "-l",
            &label,
        ];
        let shown = self.show(screen, &secrets).await?;
        contains(&shown, &["edge-1", "edge-2"])
    }

    /// Starts the hub with this version of the chart, and waits until it says that it is ready.
    pub(crate) async fn start_hub(&mut self, screen: &Screen, version: &str) -> Result<()> {
        let flags = [
            format!("--namespace={HUB_NAMESPACE}"),
            format!("--chart-repo={}", self.repository.url()),
            format!("--chart-name={CHART}"),
            format!("--chart-version={version}"),
            "--chart-install-crds=false".to_owned(),
        ];
        screen.plain(&format!("$ krypton-hub {}", flags.join(" ")));
        let options = HubOptions::new(self.home.cluster.kubeconfig()).args(flags);
        let hub = self.hub.insert(Hub::start(&options)?);
        hub.ready(PATIENCE).await?;
        screen.say(&format!("the hub is ready (process {})", hub.pid()));
        Ok(())
    }

    /// Asks the hub to end, as a Deployment does before it starts another.
    pub(crate) async fn stop_hub(&mut self, screen: &Screen) -> Result<()> {
        let hub = self.hub.as_mut().context("no hub runs")?;
        let status = hub.stop().await?;
        if !status.success() {
            bail!("the hub was asked to end, and ended with {status}");
        }
        self.hub = None;
        screen.say("the hub has ended; what it installed runs on");
        Ok(())
    }

    /// Fails when the hub has ended though nobody asked it to.
    pub(crate) fn hub_runs(&self) -> Result<()> {
        let hub = self.hub.as_ref().context("no hub runs")?;
        hub.rss_bytes()
            .map(drop)
            .context("the hub has ended by itself")
    }

    /// Returns, with an error, when the hub ends though nobody asked it to.
    pub(crate) async fn hub_ends(&mut self) -> Result<()> {
        let hub = self.hub.as_mut().context("no hub runs")?;
        let status = hub.wait(FOR_GOOD).await?;
        bail!("the hub has ended by itself, with {status}")
    }

    /// Runs a command, shows it with what it prints, and returns that.
    pub(crate) async fn show(&self, screen: &Screen, command: &[&str]) -> Result<String> {
        let (tool, args) = command.split_first().context("an empty command")?;
        screen.plain(&format!("$ {}", command.join(" ")));
        let invocation = self.home.cluster.command(tool).args(args.iter().copied());
        let invocation = invocation
            .env("KUBECONFIG", &self.kubeconfig)
            .env("PATH", &self.path);
        let printed = invocation.output(PATIENCE).await?;
        screen.plain(match printed.trim_end() {
            "" => "(nothing)",
            lines => lines,
        });
        Ok(printed)
    }

    /// Keeps the hub's log beyond the end of the demo, and returns words that lead to it.
    pub(crate) fn keep_log(&self, folder: &Folder) -> String {
        let Some(hub) = &self.hub else {
            return "no hub ran".to_owned();
        };
        let log = hub.log_path();
        match folder.keep_log(log) {
            Ok(kept) => format!(
                "the hub's log is kept in {} and ends:\n{}\nthe demo failed",
                kept.display(),
                log_end(log)
            ),
            Err(error) => format!("the hub's log is lost ({error:#}); the demo failed"),
        }
    }

    /// How to look at all this from another terminal.
    pub(crate) fn directions(&self) -> String {
        let log = self
            .hub
            .as_ref()
            .map(|hub| hub.log_path().display().to_string());
        let own =
            |site: &Site| format!("  {:8}{}", site.name(), site.cluster.kubeconfig().display());
        let singles = self.sites().map(own).join("\n");
        format!(
            "
Everything runs on. In another terminal:

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
{singles}
The hub's log:
  {log}

Ctrl-C stops and removes all of it.",
            kubeconfig = self.kubeconfig.display(),
            path = own_path(&self.path),
            log = log.unwrap_or_default(),
        )
    }
}

async fn start(screen: &Screen, name: &str) -> Result<Cluster> {
    let cluster = Cluster::start(name, Parts::WithPods).await?;
    let server = cluster.server();
    screen.say(&format!(
        "{name} is up at {server}, with a node that takes pods"
    ));
    Ok(cluster)
}

/// Fails when a command has not printed what it is shown for.
pub(crate) fn contains(printed: &str, words: &[&str]) -> Result<()> {
    for word in words {
        if !printed.contains(word) {
            bail!("{word:?} is not in what the last command printed");
        }
    }
    Ok(())
}

/// Where kubectl finds its plug-in, which cargo has put beside this program, and where the tools are.
fn path() -> Result<OsString> {
    let own = std::env::current_exe().context("finding our own program")?;
    let own = own.parent().context("our own program is in no folder")?;
    if !own.join("kubectl-krypton").is_file() {
        bail!(
            "no kubectl-krypton in {}; run 'cargo build --workspace --bins' with the same profile",
            own.display()
        );
    }
    let system = ["/usr/bin", "/bin"].map(PathBuf::from);
    let folders = [own.to_owned(), Tools::find()?.bin()]
        .into_iter()
        .chain(system);
    std::env::join_paths(folders).context("making a PATH")
}

/// Without the system's folders, which everybody has.
fn own_path(path: &OsString) -> String {
    let folders: Vec<_> = std::env::split_paths(path).take(2).collect();
    let folders = folders.iter().map(|folder| folder.display().to_string());
    folders.collect::<Vec<_>>().join(":")
}
