//! Runs the part of a kubelet that forwards ports. kwok contains the kubelet's code for it. The pods are on a separate
//! node, and each pod's container is a process of this machine.

use std::{fs, net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::{
    Api, Resource,
    api::{Patch, PatchParams, PostParams},
};
use rcgen::{CertificateParams, KeyPair};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    cluster::Cluster,
    port::Port,
    process::{ChildProcess, Invocation},
    tools::Tools,
    wait::eventually_while_running,
};

const NODE: &str = "forwarding";
const ACCOUNT: &str = "forwarded";
const DEADLINE: Duration = Duration::from_secs(60);

/// A pod with one container and one port, and the port's destination.
#[derive(Clone, Debug)]
pub struct ForwardedPod {
    pub namespace: &'static str,
    pub name: &'static str,
    pub container: &'static str,
    pub port: u16,
    pub target: SocketAddr,
}

/// A running kubelet. Dropping it stops it, but keeps the node and the pods.
#[derive(Debug)]
pub struct Kubelet {
    _process: ChildProcess,
    _port: Port,
    _folder: TempDir,
}

impl Kubelet {
    /// Creates the node and these pods, and forwards their ports.
    pub async fn start(cluster: &Cluster, pods: &[ForwardedPod]) -> Result<Self> {
        let folder = TempDir::with_prefix("kubelet-").context("creating a folder for a kubelet")?;
        let port = Port::reserve()?;
        let file = |name: &str| folder.path().join(name);
        let key = KeyPair::generate().context("generating a key")?;
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]);
        let certificate = params.and_then(|params| params.self_signed(&key));
        let certificate = certificate.context("generating a certificate")?;
        let config: String = pods.iter().map(ForwardedPod::port_forward_yaml).collect();
        write(&file("tls.crt"), &certificate.pem())?;
        write(&file("tls.key"), &key.serialize_pem())?;
        write(&file("forwards.yaml"), &config)?;
        let tools = Tools::find()?;
        let invocation = Invocation::new(tools.binary("kwok"))
            .arg(format!("--kubeconfig={}", cluster.kubeconfig().display()))
            // kwok doesn't start without stages.
            .arg(format!("--config={}", tools.stages().display()))
            .arg(format!("--config={}", file("forwards.yaml").display()))
            .arg(format!("--server-address={}", port.address()))
            .arg(format!("--tls-cert-file={}", file("tls.crt").display()))
            .arg(format!(
                "--tls-private-key-file={}",
                file("tls.key").display()
            ))
            // kwok simulates no node or pod here, so it changes none of these objects.
            .args([
                "--manage-all-nodes=false",
                "--manage-nodes-with-label-selector=played=never",
            ])
            .env("HOME", folder.path());
        let mut process = ChildProcess::spawn("kubelet", &invocation, &file("log"))?;
        let url = format!("http://{}/healthz", port.address());
        let listening = async || Ok(Some(reqwest::get(&url).await?.error_for_status()?));
        let check_running = || process.check_running();
        eventually_while_running("the kubelet to listen", DEADLINE, check_running, listening)
            .await?;
        create_node(cluster, port.number()).await?;
        for pod in pods {
            pod.create(cluster).await?;
        }
        Ok(Self {
            _process: process,
            _port: port,
            _folder: folder,
        })
    }
}

impl ForwardedPod {
    fn port_forward_yaml(&self) -> String {
        let Self {
            namespace,
            name,
            target,
            ..
        } = self;
        format!(
            "---\napiVersion: kwok.x-k8s.io/v1alpha1\nkind: PortForward\n\
             metadata: {{name: {name}, namespace: {namespace}}}\n\
             spec: {{forwards: [{{ports: [{}], target: {{address: {}, port: {}}}}}]}}\n",
            self.port,
            target.ip(),
            target.port()
        )
    }

    async fn create(&self, cluster: &Cluster) -> Result<()> {
        let client = cluster.client();
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), self.namespace);
        let pods: Api<Pod> = Api::namespaced(client, self.namespace);
        create_if_absent(&namespaces, json!({"metadata": {"name": self.namespace}})).await?;
        create_if_absent(&accounts, json!({"metadata": {"name": ACCOUNT}})).await?;
        let spec = json!({
            "nodeName": NODE,
            "serviceAccountName": ACCOUNT,
            "automountServiceAccountToken": false,
            "containers": [{
                "name": self.container,
                "image": self.container,
                "args": [format!("--debug-bind-address=127.0.0.1:{}", self.port)],
            }],
        });
        let pod = json!({"metadata": {"name": self.name}, "spec": spec});
        create_if_absent(&pods, pod).await?;
        let running = json!({"status": {"phase": "Running"}});
        pods.patch_status(self.name, &PatchParams::default(), &Patch::Merge(&running))
            .await
            .map(drop)
            .context("marking a pod as running")
    }
}

async fn create_node(cluster: &Cluster, port: u16) -> Result<()> {
    let nodes: Api<Node> = Api::all(cluster.client());
    let status = json!({
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    });
    create_if_absent(
        &nodes,
        json!({"metadata": {"name": NODE}, "status": status}),
    )
    .await
}

/// Creates the object if it doesn't exist.
async fn create_if_absent<K>(api: &Api<K>, object: Value) -> Result<()>
where
    K: Resource + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let typed: K = serde_json::from_value(object).context("serializing an object")?;
    match api.create(&PostParams::default(), &typed).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        created => created.map(drop).context("creating an object"),
    }
}

fn write(file: &Path, content: &str) -> Result<()> {
    fs::write(file, content).with_context(|| format!("writing {}", file.display()))
}
