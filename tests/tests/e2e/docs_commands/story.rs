//! Plays a user who follows the pages, with home and an edge cluster. It runs their commands unchanged, and runs the
//! processes of Krypton's pods on this machine.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use krypton_kubectl::{Connection, join_info};
use krypton_tests::{
    AgentPod, ChartRepository, ChartSource, Cluster, HubPod, OwnChart, Parts, PodName,
    STEP_DEADLINE, TestResult, Tools, eventually, kubeconfig, membership::kubectl_krypton_path,
};
use kube::{Api, ResourceExt, api::ListParams};
use tempfile::TempDir;

use super::manifest::{At, Entry};
use super::pages::{Command, commands, root};

/// Charts that take longer than this are not covered.
const DEADLINE: Duration = Duration::from_secs(300);
/// The chart that the pages install, and its version.
const CHART: (&str, &str) = ("podinfo", "6.9.1");
const NEXT_VERSION: &str = "6.9.2";
const CHARTS: &str = "https://stefanprodan.github.io/podinfo";

/// Kubeconfig with a context for each cluster, as the pages require.
const CONTEXTS: &str = "kubeconfig";

pub(crate) struct Story {
    folder: TempDir,
    pub(crate) home: Cluster,
    pub(crate) edge: Cluster,
    repository: ChartRepository,
    hub: Option<(PodName, HubPod)>,
    agent: Option<(PodName, AgentPod)>,
}

impl Story {
    pub(crate) async fn start(name: &str) -> TestResult<Self> {
        let sources =
            [CHART.1, NEXT_VERSION].map(|version| ChartSource::small(version).name(CHART.0));
        let repository = ChartRepository::start(&sources).await?;
        let (home, edge) = (format!("{name}-home"), format!("{name}-edge"));
        let (home, edge) = tokio::try_join!(
            Cluster::start(&home, Parts::WithPods),
            Cluster::start(&edge, Parts::WithPods),
        )?;
        let folder = TempDir::with_prefix("krypton-docs-")?;
        for part in ["charts", "examples", "hack"] {
            symlink(root().join(part), folder.path().join(part))?;
        }
        let contexts = [("home", &home), ("edge-1", &edge)];
        kubeconfig::write(&folder.path().join(CONTEXTS), &contexts).unwrap();
        let bin = folder.path().join("bin");
        fs::create_dir(&bin)?;
        symlink(kubectl_krypton_path()?, bin.join("kubectl-krypton"))?;
        Ok(Self {
            folder,
            home,
            edge,
            repository,
            hub: None,
            agent: None,
        })
    }

    /// Returns the path of a file in the user's folder, outside the checkout.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write_file(&self, name: &str, content: &str) {
        fs::write(self.file(name), content).unwrap();
    }

    /// Replaces the texts of the pages that differ here.
    pub(crate) fn with_local_repository(&self, text: &str) -> String {
        text.replace(CHARTS, &self.repository.url())
    }

    /// Runs the page's blocks with this mark, in order.
    pub(crate) async fn run_blocks(&mut self, page: &str, run: &str) {
        let on_page = commands(page).unwrap();
        let chosen: Vec<Command> = on_page
            .into_iter()
            .filter(|command| command.run.as_deref() == Some(run))
            .collect();
        assert!(!chosen.is_empty(), "nothing to run for {run} in {page}");
        for command in chosen {
            let place = match command.remark.strip_prefix("at edge-1") {
                Some(_) => At::Edge,
                None => At::Home,
            };
            self.run_command(&command.text, place, 0, None)
                .await
                .unwrap();
        }
    }

    /// Runs a part of the list of commands, in order.
    pub(crate) async fn run_part(&mut self, entries: &[Entry], run: &str) {
        let selected: Vec<&Entry> = entries
            .iter()
            .filter(|entry| entry.run.as_deref() == Some(run))
            .collect();
        assert!(!selected.is_empty(), "no command for {run}");
        for entry in selected {
            let mut text = entry.command.clone();
            // NAMESPACE contains NAME, so replace longer words first.
            let mut replacements: Vec<_> = entry.with.iter().collect();
            replacements.sort_by_key(|(word, _)| std::cmp::Reverse(word.len()));
            for (word, value) in replacements {
                text = text.replace(word.as_str(), value);
            }
            let says = entry.says.as_deref();
            self.run_command(&text, entry.at, entry.ends, says)
                .await
                .unwrap();
        }
    }

    async fn run_command(
        &mut self,
        text: &str,
        at: At,
        ends: i32,
        says: Option<&str>,
    ) -> TestResult {
        let cluster = match at {
            At::Home => &self.home,
            At::Edge => &self.edge,
        };
        let typed = self.with_local_repository(text);
        let script = [
            "-c",
            r#"cd "$1"; set -euo pipefail; eval "$2""#,
            "bash",
            self.folder.path().to_str().unwrap(),
            &typed,
        ];
        let path = path_variable(&self.folder.path().join("bin"));
        // The cluster's own kubeconfig has the current context.
        let kubeconfigs = [cluster.kubeconfig().to_owned(), self.file(CONTEXTS)];
        let kubeconfigs = std::env::join_paths(kubeconfigs).unwrap();
        let bash = cluster
            .invocation(Path::new("/bin/bash"))
            .args(script)
            .env("PATH", path)
            .env("KUBECONFIG", kubeconfigs);
        let started = Instant::now();
        let result = match text.contains(" --agent-context ") {
            // The command waits until the agent is connected.
            true => {
                let (result, agent) =
                    tokio::try_join!(bash.run(DEADLINE), start_agent(&self.edge))?;
                self.agent = Some(agent);
                result
            }
            false => bash.run(DEADLINE).await?,
        };
        let output = format!("{}{}", result.stdout, result.stderr);
        assert_eq!(result.status.code(), Some(ends), "{text}: {output}");
        assert!(
            says.is_none_or(|words| output.contains(words)),
            "{text}: {output}"
        );
        for chart in changed_charts(text) {
            self.sync_pod_process(chart).await?;
        }
        // hack/first-tenant.sh sums these up.
        let cluster_name = match at {
            At::Home => "home",
            At::Edge => "edge-1",
        };
        println!(
            "{:6.1} s  {cluster_name}: {text}",
            started.elapsed().as_secs_f64()
        );
        Ok(())
    }

    /// Stands in for the kubelet: runs a process for the Deployment's pod, or stops it if there is no pod.
    async fn sync_pod_process(&mut self, chart: OwnChart) -> Result<()> {
        let cluster = match chart {
            OwnChart::Hub => &self.home,
            OwnChart::Agent => &self.edge,
        };
        let pod = running_pod(cluster, chart).await?;
        match chart {
            OwnChart::Hub => {
                let before = self.hub.take();
                if before.as_ref().map(|(name, _)| name) == pod.as_ref() {
                    self.hub = before;
                    return Ok(());
                }
                let mut before = before.map(|(_, hub)| hub);
                if let Some(before) = &mut before {
                    before.hub.stop().await?;
                }
                if let Some(name) = pod {
                    let mut hub = HubPod::start_as(cluster, &name, before.as_ref(), &[]).await?;
                    hub.hub.wait_ready(STEP_DEADLINE).await?;
                    // The leader publishes the addresses shortly after it is ready, and `join` reads them.
                    eventually("the hub to accept agents", async || {
                        let home = Connection::new(cluster.client(), "home");
                        Ok(join_info::read(&home, chart.namespace()).await?)
                    })
                    .await?;
                    self.hub = Some((name, hub));
                }
            }
            OwnChart::Agent => {
                let before = self.agent.take();
                if before.as_ref().map(|(name, _)| name) == pod.as_ref() {
                    self.agent = before;
                    return Ok(());
                }
                if let Some((_, mut before)) = before {
                    before.agent.stop().await?;
                }
                if let Some(name) = pod {
                    self.agent = Some((name, AgentPod::start(cluster).await?));
                }
            }
        }
        Ok(())
    }
}

fn path_variable(first: &Path) -> OsString {
    let tools = Tools::find().unwrap().bin();
    let folders = [first, &tools, Path::new("/usr/bin"), Path::new("/bin")];
    std::env::join_paths(folders).unwrap()
}

/// Returns the charts whose Deployment the command may have changed.
fn changed_charts(text: &str) -> Vec<OwnChart> {
    let commands = ["helm ", " rollout restart ", " scale "];
    let is_changed = |chart: &OwnChart| {
        let program = chart.name().trim_start_matches("krypton-");
        let named = text.contains(chart.name()) && commands.iter().any(|word| text.contains(word));
        named || text.contains(&format!("install {program}"))
    };
    OwnChart::ALL.into_iter().filter(is_changed).collect()
}

/// Runs the process of the agent's pod as soon as the Deployment has a pod.
async fn start_agent(edge: &Cluster) -> Result<(PodName, AgentPod)> {
    let name = eventually("a pod of the agent", async || {
        running_pod(edge, OwnChart::Agent).await
    });
    let name = name.await?;
    Ok((name, AgentPod::start(edge).await?))
}

/// Returns the pod of a completely rolled out Deployment, or `None` if it has no replicas.
async fn running_pod(cluster: &Cluster, chart: OwnChart) -> Result<Option<PodName>> {
    let (name, namespace) = (chart.name(), chart.namespace());
    let deployments: Api<Deployment> = Api::namespaced(cluster.client(), namespace);
    let pods: Api<Pod> = Api::namespaced(cluster.client(), namespace);
    let params = ListParams::default().labels(&format!("app.kubernetes.io/name={name}"));
    eventually(&format!("the pods of {name}"), async || {
        let replicas = match deployments.get_opt(name).await? {
            None => 0,
            Some(found) => {
                let spec = found.spec.context("no spec")?;
                let status = found.status.unwrap_or_default();
                if status.observed_generation != found.metadata.generation
                    || status.updated_replicas.unwrap_or_default()
                        != status.replicas.unwrap_or_default()
                {
                    bail!("{status:?}");
                }
                spec.replicas.unwrap_or(1)
            }
        };
        let all_pods = pods.list(&params).await?.items;
        let live: BTreeMap<String, String> = all_pods
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .filter(|pod| {
                let status = pod.status.as_ref();
                status.and_then(|status| status.phase.as_deref()) == Some("Running")
            })
            .map(|pod| (pod.name_any(), pod.uid().unwrap_or_default()))
            .collect();
        match (replicas, live.len()) {
            (0, _) => Ok(Some(None)),
            (1, 1) => Ok(live
                .into_iter()
                .next()
                .map(|(name, uid)| Some(PodName { name, uid }))),
            (replicas, live) => bail!("only {live} pods of {replicas}"),
        }
    })
    .await
}
