//! Installs Krypton's own charts, and runs their pods' processes on this machine.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Container, PodSpec},
};
use kube::Api;

use crate::{
    agent::{Agent, AgentOptions},
    cluster::Cluster,
    fleet::{SYSTEM_NAMESPACE, ValuesFile},
    hub::{Hub, HubOptions},
    service_account::ServiceAccountAccess,
    wait::STEP_DEADLINE,
};

const CHARTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts");
/// Flags with values that only exist in a pod, or that the harness sets itself.
const POD_ONLY_FLAGS: [&str; 7] = [
    "--listen",
    "--advertise",
    "--metrics-bind-address",
    "--health-probe-bind-address",
    "--helm",
    "--chart-values-file",
    "--private-dir",
];

/// A pod's metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodName {
    pub name: String,
    pub uid: String,
}

impl Default for PodName {
    /// A pod that the API server doesn't know.
    fn default() -> Self {
        Self {
            name: "a-pod".to_owned(),
            uid: "0b4d9a52-93a5-4f8a-b1c7-6f1f4cd0e7a1".to_owned(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnChart {
    Hub,
    Agent,
}

impl OwnChart {
    pub const ALL: [Self; 2] = [Self::Hub, Self::Agent];

    /// Returns the name of the chart, which is also the name of its release.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hub => "krypton-hub",
            Self::Agent => "krypton-agent",
        }
    }

    /// Returns the namespace of the documented installation.
    pub fn namespace(self) -> &'static str {
        match self {
            Self::Hub => "krypton",
            Self::Agent => SYSTEM_NAMESPACE,
        }
    }

    pub fn folder(self) -> PathBuf {
        Path::new(CHARTS).join(self.name())
    }

    /// Returns the chart's example values files by name.
    pub fn cases(self) -> Result<BTreeMap<String, PathBuf>> {
        let folder = self.folder().join("ci");
        let read = || -> std::io::Result<Vec<PathBuf>> {
            let entries = fs::read_dir(&folder)?;
            entries.map(|entry| Ok(entry?.path())).collect()
        };
        let files = read().with_context(|| format!("reading {}", folder.display()))?;
        let named_file = |file: PathBuf| {
            let name = file.file_name()?.to_str()?.strip_suffix("-values.yaml")?;
            Some((name.to_owned(), file.clone()))
        };
        Ok(files.into_iter().filter_map(named_file).collect())
    }

    /// Runs `helm upgrade --install --reset-values` with these arguments and without pods. `HubPod` and `AgentPod` run
    /// the pods' processes.
    pub async fn install<A: Into<OsString>>(
        self,
        cluster: &Cluster,
        args: impl IntoIterator<Item = A>,
    ) -> Result<String> {
        let install = ["upgrade", "--install", self.name()].map(OsString::from);
        let namespace = ["-n", self.namespace(), "--create-namespace"].map(OsString::from);
        let values = ["--reset-values", "--set=replicaCount=0"].map(OsString::from);
        let extra = args.into_iter().map(Into::into);
        let command = install.into_iter().chain([self.folder().into()]);
        cluster
            .helm(command.chain(namespace).chain(values).chain(extra))
            .await
    }

    pub async fn uninstall(self, cluster: &Cluster) -> Result<String> {
        let uninstall = ["uninstall", self.name(), "-n", self.namespace()];
        cluster.helm(uninstall).await
    }
}

/// The command line, environment and account of a Deployment's pod, as the API server returns them.
#[derive(Debug)]
struct DeploymentPod {
    namespace: &'static str,
    spec: PodSpec,
    container: Container,
}

impl DeploymentPod {
    async fn read(chart: OwnChart, cluster: &Cluster) -> Result<Self> {
        let (name, namespace) = (chart.name(), chart.namespace());
        let deployments: Api<Deployment> = Api::namespaced(cluster.client(), namespace);
        let deployment = deployments.get(name).await?;
        let template = deployment.spec.map(|spec| spec.template);
        let spec = template
            .and_then(|template| template.spec)
            .context("no pod in the Deployment")?;
        let container = spec.containers.first().context("no container")?.clone();
        Ok(Self {
            namespace,
            spec,
            container,
        })
    }

    fn args(&self) -> Vec<String> {
        let args = self.container.args.clone().unwrap_or_default();
        let flag = |arg: &str| arg.split_once('=').map_or(arg, |(flag, _)| flag).to_owned();
        args.into_iter()
            .filter(|arg| !POD_ONLY_FLAGS.contains(&flag(arg).as_str()))
            .collect()
    }

    fn env(&self, pod_name: &PodName) -> Result<BTreeMap<String, String>> {
        let variables = self.container.env.clone().unwrap_or_default();
        let resolve = |variable: k8s_openapi::api::core::v1::EnvVar| {
            let field = variable.value_from.and_then(|from| from.field_ref);
            let value = match field.map(|field| field.field_path).as_deref() {
                None => variable.value.unwrap_or_default(),
                Some("metadata.name") => pod_name.name.clone(),
                Some("metadata.uid") => pod_name.uid.clone(),
                Some("metadata.namespace") => self.namespace.to_owned(),
                Some(other) => bail!("{} has the unknown source {other}", variable.name),
            };
            Ok((variable.name, value))
        };
        variables.into_iter().map(resolve).collect()
    }

    async fn access(&self, cluster: &Cluster) -> Result<ServiceAccountAccess> {
        let account = self.spec.service_account_name.as_deref();
        let account = account.context("the pod names no service account")?;
        ServiceAccountAccess::new(cluster, self.namespace, account).await
    }
}

/// The hub from the chart's Deployment: its flags, variables, account and values file.
#[derive(Debug)]
pub struct HubPod {
    pub hub: Hub,
    pub access: ServiceAccountAccess,
    pub values: ValuesFile,
}

impl HubPod {
    /// Starts the hub, and waits until it is ready. It listens on the port of `previous`, if given, so its agents find
    /// it.
    pub async fn start(cluster: &Cluster, previous: Option<&Self>) -> Result<Self> {
        let mut pod = Self::start_as(cluster, &PodName::default(), previous, &[]).await?;
        pod.hub.wait_ready(STEP_DEADLINE).await?;
        Ok(pod)
    }

    /// Like `start`, as this pod of the Deployment and with more flags. Doesn't wait until the hub is ready.
    pub async fn start_as(
        cluster: &Cluster,
        pod_name: &PodName,
        previous: Option<&Self>,
        flags: &[String],
    ) -> Result<Self> {
        let pod = DeploymentPod::read(OwnChart::Hub, cluster).await?;
        let access = pod.access(cluster).await?;
        let values = ValuesFile::new(&values(cluster, pod.namespace).await?)?;
        let kubeconfig = access.kubeconfig();
        let mut options = HubOptions::new(&kubeconfig)
            .args(pod.args())
            .args(flags.iter().map(String::as_str));
        options.env = pod.env(pod_name)?;
        let args = pod.container.args.as_deref().unwrap_or_default();
        if args
            .iter()
            .any(|arg| arg.starts_with("--chart-values-file="))
        {
            options = options.args([crate::fleet::values_flag(&values)]);
        }
        if let Some(previous) = previous {
            options = options.on_port_of(&previous.hub);
        }
        Ok(Self {
            hub: Hub::start(&options)?,
            access,
            values,
        })
    }
}

/// Returns the mounted values of the fleet's chart.
async fn values(cluster: &Cluster, namespace: &str) -> Result<String> {
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), namespace);
    let map = maps.get("krypton-hub-values").await?;
    let file = map.data.and_then(|mut data| data.remove("values.yaml"));
    file.context("no values.yaml in the ConfigMap")
}

/// The agent from the chart's Deployment: its flags, variables and account.
#[derive(Debug)]
pub struct AgentPod {
    pub agent: Agent,
    pub access: ServiceAccountAccess,
}

impl AgentPod {
    /// Starts the agent, and waits until it is ready.
    pub async fn start(cluster: &Cluster) -> Result<Self> {
        let pod = DeploymentPod::read(OwnChart::Agent, cluster).await?;
        let access = pod.access(cluster).await?;
        let kubeconfig = access.kubeconfig();
        let options = AgentOptions::new(&kubeconfig)
            .args(pod.args())
            .env(pod.env(&PodName::default())?);
        Ok(Self {
            agent: Agent::start_ready(&options).await?,
            access,
        })
    }
}
