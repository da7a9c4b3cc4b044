//! Measures the lower bound for any design that runs Helm: plain Helm installs the same releases, four at a time.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Namespace},
};
use krypton_tests::{
    ChartRepository, Cluster, Parts, Tools, cluster::path_with, eventually_within,
    process::Invocation,
};
use kube::{
    Api, ResourceExt,
    api::{ListParams, PostParams},
};
use tempfile::TempDir;

use crate::{
    CHART, CHART_VERSION, HELM_CONCURRENCY,
    arrivals::Arrivals,
    install_timeout,
    krypton::{InstallCost, SETTLE},
    load, log_progress,
    machine::OtherLoad,
    name,
    traffic::{Traffic, dedicated_kubeconfig},
};

const HTTP_TIMEOUT: Duration = Duration::from_secs(10);
const NAMESPACES_AT_ONCE: usize = 16;
/// The last object that the controllers create in each namespace.
const LAST_IN_NAMESPACE: &str = "kube-root-ca.crt";

/// The flags of the Helm command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flags {
    /// `upgrade --install --wait=hookOnly`, with an empty environment.
    Plain,
    /// The hub's flags, except labels, description and values. The remaining difference is the hub's own cost.
    Hubs,
}

#[derive(Debug, Clone)]
pub(crate) struct FloorResults {
    pub(crate) concurrent: InstallCost,
    /// One additional release, installed alone with warm caches.
    pub(crate) single: InstallCost,
}

/// A separate control plane of the same kind as the edge cluster, with its namespaces created beforehand.
struct FloorSetup {
    cluster: Cluster,
    flags: Flags,
    chart: PathBuf,
    kubeconfig: PathBuf,
    folder: TempDir,
}

pub(crate) async fn measure(
    size: u32,
    flags: Flags,
    repository: &ChartRepository,
) -> Result<FloorResults> {
    let description = match flags {
        Flags::Plain => "alone",
        Flags::Hubs => "with the hub's flags",
    };
    log_progress(&format!(
        "{size} releases by helm {description}: starting a control plane"
    ));
    let setup = FloorSetup::start(size, flags, repository).await?;
    tokio::time::sleep(SETTLE).await;
    let numbers: Vec<u32> = (0..size).collect();
    let concurrent = setup.install(&numbers).await?;
    log_progress(&format!(
        "all available after {:.1} s",
        concurrent.arrivals.last.as_secs_f64()
    ));
    let single = setup.install(&[size]).await?;
    Ok(FloorResults { concurrent, single })
}

impl FloorSetup {
    async fn start(size: u32, flags: Flags, repository: &ChartRepository) -> Result<Self> {
        let cluster = Cluster::start("floor", Parts::WithPods).await?;
        let folder = TempDir::with_prefix("krypton-floor-").context("creating a folder")?;
        let chart = folder.path().join("chart.tgz");
        fs::write(&chart, package(repository).await?).context("writing the chart")?;
        let kubeconfig = folder.path().join("kubeconfig");
        fs::write(&kubeconfig, dedicated_kubeconfig(&cluster).await?)
            .context("writing a kubeconfig")?;
        create_namespaces(&cluster, size + 1).await?;
        Ok(Self {
            cluster,
            flags,
            chart,
            kubeconfig,
            folder,
        })
    }

    /// Installs the releases with `xargs -P4`. The CPU time is that of the Helm processes, because `xargs` waits for
    /// them.
    async fn install(&self, numbers: &[u32]) -> Result<InstallCost> {
        let count = u32::try_from(numbers.len()).context("counting releases")?;
        let list = self.folder.path().join("names");
        let names: Vec<_> = numbers.iter().copied().map(name).collect();
        fs::write(&list, names.join("\n") + "\n").context("writing the list of releases")?;
        let xargs_helm = self.xargs_helm(&list)?;
        let deployments: Api<Deployment> = Api::all(self.cluster.client());
        let mut arrivals = Arrivals::watch(deployments).await?;
        let (edge, cpu_before) = (
            Traffic::read(&self.cluster).await?,
            load::children_seconds()?,
        );
        let other_load = OtherLoad::watch(self.known_cpu_seconds()?)?;

        let clock = Instant::now();
        let limit = install_timeout(count);
        let helm_runs = async {
            xargs_helm.output(limit).await?;
            Ok::<_, anyhow::Error>(clock.elapsed())
        };
        let waiting = arrivals.wait_for_all(count, clock, limit, |deployment| {
            check_available(deployment, &names)
        });
        let (helm_ended, arrivals) = tokio::try_join!(helm_runs, waiting)?;
        let other_cores = other_load.cores(self.known_cpu_seconds()?)?;
        let cpu_seconds = load::children_seconds()? - cpu_before;
        tokio::time::sleep(SETTLE).await;
        let edge = Traffic::read(&self.cluster).await?.since(&edge);
        Ok(InstallCost {
            arrivals,
            helm_ended: Some(helm_ended),
            cpu_seconds,
            own_cpu_seconds: 0.0,
            edge,
            other_cores,
        })
    }

    fn xargs_helm(&self, list: &Path) -> Result<Invocation> {
        let path = path_with(&Tools::find()?);
        let mut helm: Vec<OsString> = ["helm", "upgrade", "--install", "--wait=hookOnly"]
            .map(OsString::from)
            .into();
        if self.flags == Flags::Hubs {
            let more = [
                "--reset-values",
                "--hide-notes",
                "--disable-openapi-validation",
                "--history-max=3",
                "--timeout=180s",
                "--qps=50",
                "--burst-limit=300",
                "--server-side=true",
                "--force-conflicts",
            ];
            helm.extend(more.map(OsString::from));
        }
        helm.extend([
            "--kubeconfig".into(),
            self.kubeconfig.clone().into_os_string(),
        ]);
        helm.extend(["--namespace", "{}", "tenant-{}-floor"].map(OsString::from));
        helm.push(self.chart.clone().into_os_string());
        let mut xargs = Invocation::new("xargs")
            .args(["-P", &HELM_CONCURRENCY.to_string(), "-I", "{}", "-a"].map(OsString::from))
            .arg(list.as_os_str());
        if self.flags == Flags::Hubs {
            for (name, value) in [
                ("GOMEMLIMIT", "128MiB"),
                ("GOGC", "400"),
                ("GOMAXPROCS", "2"),
            ] {
                xargs = xargs.env(name, value);
            }
        }
        Ok(xargs
            .args(helm)
            .env("PATH", path)
            .env("HOME", self.folder.path()))
    }

    fn known_cpu_seconds(&self) -> Result<f64> {
        load::total_seconds(&self.cluster.pids())
    }
}

/// Fetches the chart package that the hub also uses.
async fn package(repository: &ChartRepository) -> Result<Vec<u8>> {
    let url = format!("{}/{CHART}-{CHART_VERSION}.tgz", repository.url());
    let client = reqwest::Client::builder()
        .no_proxy()
        .timeout(HTTP_TIMEOUT)
        .build()?;
    let response = client.get(&url).send().await?.error_for_status()?;
    Ok(response
        .bytes()
        .await
        .with_context(|| format!("fetching {url}"))?
        .into())
}

/// Creates the namespaces and waits until the controllers have added the default objects to each.
async fn create_namespaces(cluster: &Cluster, count: u32) -> Result<()> {
    let client = cluster.client();
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let creations = (0..count).map(|number| {
        let namespaces = namespaces.clone();
        async move {
            let mut namespace = Namespace::default();
            namespace.metadata.name = Some(name(number));
            namespaces.create(&PostParams::default(), &namespace).await
        }
    });
    let creates = stream::iter(creations).buffer_unordered(NAMESPACES_AT_ONCE);
    creates
        .try_for_each(|_| async { Ok(()) })
        .await
        .context("creating namespaces")?;
    let config_map_api: Api<ConfigMap> = Api::all(client);
    let last = ListParams::default().fields(&format!("metadata.name={LAST_IN_NAMESPACE}"));
    eventually_within(
        "default objects in all namespaces",
        install_timeout(count),
        async || {
            let config_maps = config_map_api.list_metadata(&last).await?.items;
            let own = config_maps.iter().filter(|map| {
                map.namespace()
                    .is_some_and(|namespace| namespace.starts_with("bench-"))
            });
            Ok((own.count() >= count as usize).then_some(()))
        },
    )
    .await
}

/// Returns the reason why the Deployment is not available. Rejects Deployments of other releases.
fn check_available(deployment: &Deployment, names: &[String]) -> Result<(), String> {
    if !deployment
        .namespace()
        .is_some_and(|namespace| names.contains(&namespace))
    {
        return Err("not one of these".to_owned());
    }
    let replicas = deployment
        .spec
        .as_ref()
        .and_then(|spec| spec.replicas)
        .unwrap_or(1);
    let status = deployment.status.clone().unwrap_or_default();
    let available_replicas = status.available_replicas.unwrap_or_default();
    if status.observed_generation == deployment.metadata.generation
        && available_replicas >= replicas
    {
        Ok(())
    } else {
        Err(format!("{available_replicas} of {replicas} pods available"))
    }
}
