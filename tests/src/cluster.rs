//! Runs one real control plane on loopback: etcd, kube-apiserver and, on request, the components that run pods.

mod audit;
mod components;
mod credentials;
pub(crate) mod lease;
mod node;
mod power;
mod requests;
pub(crate) mod reset;

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ffi::OsString,
    fs,
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use axum::http::Request;
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use parking_lot::Mutex;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::{
    port::Port,
    process::{ChildProcess, Invocation, kill_all},
    tools::Tools,
    wait::{eventually_while_running, eventually_within},
};
pub use audit::Request as AuditedRequest;
pub(crate) use components::Component;
use components::{Audit, Components};
use credentials::Credentials;
use lease::{PlaneInfo, PlaneLease, PoolRequest};
pub use power::Snapshot;

/// Generous, because several control planes can start on two cores at the same time.
const START_DEADLINE: Duration = Duration::from_secs(120);
const COMMAND_DEADLINE: Duration = Duration::from_secs(180);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const AUDIT_DEADLINE: Duration = Duration::from_secs(30);
/// Above the API server's own request limit (60 s). A watch that is silent for longer ends.
const READ_TIMEOUT: Duration = Duration::from_secs(300);

/// The Kubernetes components to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parts {
    /// etcd and kube-apiserver: stores objects, but no controller reacts to them.
    ControlPlane,
    /// Adds kube-controller-manager: deletes namespaces and collects garbage, but no pod runs.
    WithControllers,
    /// Adds kube-scheduler and kwok with one fake node: Deployments become available.
    WithPods,
}

/// A running control plane. Dropping it kills its processes and removes its files.
///
/// If the thread is panicking or `KRYPTON_KEEP` is set, the files stay and their path is printed. The `?` of a
/// `TestResult` panics.
#[derive(Debug)]
pub struct Cluster {
    name: String,
    tools: Tools,
    port: Port,
    etcd_port: Port,
    components: Components,
    credentials: Credentials,
    /// The current token, and the token that also stays valid after the next rotation.
    tokens: Mutex<(String, String)>,
    parts: Parts,
    processes: Mutex<BTreeMap<&'static str, ChildProcess>>,
    config: Config,
    folder: Option<TempDir>,
    lease: Option<PlaneLease>,
}

impl Cluster {
    /// Leases a control plane from the pool, or starts one if there is no pool. The cluster is ready for use: its first
    /// namespaces exist and, with pods, its node accepts them.
    pub async fn start(name: &str, parts: Parts) -> Result<Self> {
        match PlaneLease::take().await? {
            Some((lease, info)) => {
                let cluster = Self::leased(name, parts, lease, info).await?;
                let started = cluster.start_controllers(parts).await;
                started.with_context(|| format!("starting the controllers of cluster {name}"))?;
                Ok(cluster)
            }
            None => Self::start_own(name, parts).await,
        }
    }

    /// Like `start`, but the processes are children of this process.
    pub async fn start_own(name: &str, parts: Parts) -> Result<Self> {
        Self::start_with(name, parts, Audit::Off).await
    }

    async fn leased(name: &str, parts: Parts, lease: PlaneLease, info: PlaneInfo) -> Result<Self> {
        crate::install_tls_provider();
        let tools = Tools::find()?;
        let ports = (info.port, info.etcd_port);
        let components = Components::new(&tools, &info.folder, ports, Audit::Off);
        components.write_home(&info.credentials, name)?;
        let config = client_config(&components.server(), &info.credentials, name).await?;
        Ok(Self {
            name: name.to_owned(),
            tools,
            port: Port::held_elsewhere(info.port),
            etcd_port: Port::held_elsewhere(info.etcd_port),
            components,
            credentials: info.credentials,
            tokens: Mutex::new(info.tokens),
            parts,
            processes: Mutex::default(),
            config,
            folder: None,
            lease: Some(lease),
        })
    }

    /// Describes this cluster to the test that leases it.
    pub(crate) fn info(&self) -> PlaneInfo {
        PlaneInfo {
            folder: self.folder().to_owned(),
            port: self.port.number(),
            etcd_port: self.etcd_port.number(),
            credentials: self.credentials.clone(),
            tokens: self.tokens.lock().clone(),
        }
    }

    /// Keeps the logs and data when the cluster is dropped.
    pub(crate) fn keep_files(&mut self) {
        if let Some(folder) = self.folder.take() {
            eprintln!("a plane's logs and data are in {}", folder.keep().display());
        }
    }

    /// Like `start_own`, but with an audit log in the API server. See `audited`.
    pub async fn start_audited(name: &str, parts: Parts) -> Result<Self> {
        Self::start_with(name, parts, Audit::On).await
    }

    async fn start_with(name: &str, parts: Parts, audit: Audit) -> Result<Self> {
        crate::install_tls_provider();
        let started = async {
            let cluster = Self::start_control_plane(name, parts, audit).await?;
            cluster.start_controllers(parts).await?;
            Ok::<_, anyhow::Error>(cluster)
        };
        started
            .await
            .with_context(|| format!("starting cluster {name}"))
    }

    async fn start_control_plane(name: &str, parts: Parts, audit: Audit) -> Result<Self> {
        let tools = Tools::find()?;
        let folder = tempfile::Builder::new()
            .prefix(&format!("krypton-{name}-"))
            .tempdir()
            .context("creating a folder for the cluster")?;
        let (port, etcd_port) = (Port::reserve()?, Port::reserve()?);
        let credentials = Credentials::generate()?;
        let ports = (port.number(), etcd_port.number());
        let components = Components::new(&tools, folder.path(), ports, audit);
        let tokens = (credentials::token()?, credentials::token()?);
        components.write_files(&credentials, name)?;
        components.write_tokens(&[&tokens.0, &tokens.1])?;

        let config = client_config(&components.server(), &credentials, name).await?;
        let cluster = Self {
            name: name.to_owned(),
            tools,
            port,
            etcd_port,
            components,
            credentials,
            tokens: Mutex::new(tokens),
            parts,
            processes: Mutex::default(),
            config,
            folder: Some(folder),
            lease: None,
        };
        // Start both, because the API server needs longer to reach its storage than etcd needs to start.
        cluster.spawn(Component::Etcd)?;
        cluster.spawn(Component::Apiserver)?;
        cluster.wait_ready().await?;
        let namespaces: Api<Namespace> = Api::all(cluster.client());
        for namespace in ["default", "kube-system"] {
            let exists = async || Ok(namespaces.get_opt(namespace).await?.map(drop));
            cluster
                .wait_for(&format!("namespace {namespace}"), exists)
                .await?;
        }
        Ok(cluster)
    }

    async fn start_controllers(&self, parts: Parts) -> Result<()> {
        if parts == Parts::ControlPlane {
            return Ok(());
        }
        let client = self.client();
        self.spawn(Component::ControllerManager)?;
        if parts == Parts::WithPods {
            self.spawn(Component::Scheduler)?;
            node::create(&client).await?;
            self.spawn(Component::Kwok)?;
            self.wait_for("the fake node", async || node::check_ready(&client).await)
                .await?;
        }
        // The API server rejects pods until the controllers create this service account.
        let accounts: Api<ServiceAccount> = Api::namespaced(client, "default");
        let exists = async || Ok(accounts.get_opt("default").await?.map(drop));
        self.wait_for("service account default/default", exists)
            .await
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// `https://127.0.0.1:<port>`.
    pub fn server(&self) -> String {
        self.components.server()
    }

    /// Returns the path of a kubeconfig with the administrator's client certificate inline.
    pub fn kubeconfig(&self) -> &Path {
        self.components.kubeconfig()
    }

    /// Returns a kubeconfig (YAML) with the administrator's token inline. `rotate_token` revokes this token.
    pub fn kubeconfig_with_token(&self) -> String {
        let token = self.tokens.lock().0.clone();
        self.kubeconfig_with(&token)
    }

    /// Returns a kubeconfig with the next token, which is already valid and stays valid after one `rotate_token`.
    pub fn kubeconfig_with_next_token(&self) -> String {
        let token = self.tokens.lock().1.clone();
        self.kubeconfig_with(&token)
    }

    /// Returns a kubeconfig (YAML) with the given token inline.
    pub fn kubeconfig_with(&self, token: &str) -> String {
        self.kubeconfig_for_user(&format!("token: {token}"))
    }

    /// Returns a kubeconfig (YAML) that reads its token from this file, as in a pod.
    pub fn kubeconfig_with_token_file(&self, file: &Path) -> String {
        self.kubeconfig_for_user(&format!("tokenFile: {}", file.display()))
    }

    fn kubeconfig_for_user(&self, user: &str) -> String {
        self.credentials
            .kubeconfig_for_user(&self.name, &self.server(), user)
    }

    /// Returns a new administrator client. It belongs to the calling runtime and doesn't retry.
    pub fn client(&self) -> Client {
        Client::try_from(self.config.clone()).expect("the cluster was started with this config")
    }

    /// Runs kubectl as administrator and returns its stdout.
    /// Returns an error with kubectl's stderr if kubectl fails or takes over three minutes.
    pub async fn kubectl<A: Into<OsString>>(
        &self,
        args: impl IntoIterator<Item = A>,
    ) -> Result<String> {
        self.command("kubectl")
            .args(args)
            .output(COMMAND_DEADLINE)
            .await
    }

    /// Like `kubectl`, with the arguments in one line. No argument contains a space.
    pub async fn kubectl_line(&self, args: &str) -> Result<String> {
        self.kubectl(args.split(' ')).await
    }

    pub async fn create_namespace(&self, name: &str) -> Result<()> {
        self.kubectl(["create", "namespace", name]).await.map(drop)
    }

    /// Runs `kubectl apply --server-side` with this YAML.
    pub async fn apply(&self, yaml: &str) -> Result<String> {
        let file = tempfile::NamedTempFile::new().context("creating a file for kubectl")?;
        fs::write(file.path(), yaml).context("writing a file for kubectl")?;
        let args = ["apply", "--server-side", "--force-conflicts", "-f"].map(OsString::from);
        self.kubectl(args.into_iter().chain([file.path().into()]))
            .await
    }

    /// Waits until the API server serves the objects of all CRDs.
    pub async fn wait_for_crds(&self) -> Result<()> {
        let established = [
            "wait",
            "--for=condition=Established",
            "crd",
            "--all",
            "--timeout=60s",
        ];
        self.kubectl(established).await?;
        let names = ["get", "crd", "-o", "jsonpath={.items[*].metadata.name}"];
        let names = self.kubectl(names).await?.replace(' ', ",");
        // An API server that still fills its watch cache answers 429, which kubectl retries.
        let objects = ["get", &names, "--all-namespaces", "-o", "name"];
        self.kubectl(objects).await.map(drop)
    }

    /// Runs Helm as administrator, with separate configuration and caches.
    /// Returns an error with Helm's stderr if Helm fails or takes over three minutes.
    pub async fn helm<A: Into<OsString>>(
        &self,
        args: impl IntoIterator<Item = A>,
    ) -> Result<String> {
        self.command("helm")
            .args(args)
            .output(COMMAND_DEADLINE)
            .await
    }

    /// Returns an invocation of kubectl or Helm for this cluster, without arguments.
    pub fn command(&self, tool: &str) -> Invocation {
        self.invocation(&self.tools.binary(tool))
    }

    /// Like `command`, for any program that reads KUBECONFIG.
    pub fn invocation(&self, program: &Path) -> Invocation {
        Invocation::new(program)
            .env("PATH", path_with(&self.tools))
            .env("HOME", self.components.home())
            .env("KUBECONFIG", self.kubeconfig())
    }

    /// Kills the API server with SIGKILL and waits until its port refuses connections. The port stays reserved.
    pub async fn stop_apiserver(&self) -> Result<()> {
        self.kill(&[Component::Apiserver])?;
        power::wait_until_free(&self.port).await
    }

    /// Starts the API server again on the same port and data, and waits until it is ready.
    pub async fn start_apiserver(&self) -> Result<()> {
        self.spawn(Component::Apiserver)?;
        self.wait_ready().await
    }

    /// Revokes the token of `kubeconfig_with_token`, replaces it by the next token, and creates a new next token.
    /// Restarts the API server, which reads its tokens only at startup.
    pub async fn rotate_token(&self) -> Result<()> {
        let newest = credentials::token()?;
        {
            let mut tokens = self.tokens.lock();
            let next = tokens.1.clone();
            self.components.write_tokens(&[&next, &newest])?;
            *tokens = (next, newest);
        }
        self.stop_apiserver().await?;
        self.start_apiserver().await
    }

    /// Returns the number of requests since the API server's last start, by verb and resource. The verbs are GET, LIST,
    /// WATCH, POST, PUT, PATCH, APPLY and DELETE. A watch counts when it ends. The resource is empty for paths such as
    /// `/readyz` and `/metrics`.
    pub async fn requests(&self) -> Result<BTreeMap<(String, String), u64>> {
        requests::count(&self.metrics().await?)
    }

    /// Returns the API server's metrics as Prometheus text.
    pub async fn metrics(&self) -> Result<String> {
        let metrics = self.get("/metrics").await;
        metrics.context("reading the apiserver's metrics")
    }

    /// Returns all requests that the API server completed before this call, and possibly some later ones.
    pub async fn audited_requests(&self) -> Result<Vec<AuditedRequest>> {
        // The API server writes a line after it sends the response. Once the log contains a final marker request, it
        // also contains all earlier ones.
        let marker = format!("/version?marker={}", credentials::token()?);
        self.get(&marker)
            .await
            .context("writing a marker to the audit log")?;
        eventually_within("the marker in the audit log", AUDIT_DEADLINE, async || {
            let requests = audit::read(&self.components.audit_log())?;
            let marked = requests.iter().any(|request| request.uri == marker);
            Ok(marked.then_some(requests))
        })
        .await
    }

    /// Returns the requests of these users, or on their behalf, that the API server denied (403).
    pub async fn denied_requests(&self, users: &[String]) -> Result<Vec<AuditedRequest>> {
        let mut requests = self.audited_requests().await?;
        requests
            .retain(|request| request.is_denied() && users.iter().any(|user| request.is_of(user)));
        Ok(requests)
    }

    /// Process IDs of all running components.
    pub fn pids(&self) -> Vec<u32> {
        self.processes
            .lock()
            .values()
            .map(ChildProcess::pid)
            .collect()
    }

    /// Sends a signal to all running components.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let mut processes = self.processes.lock();
        processes
            .values_mut()
            .try_for_each(|process| process.signal(signal))
    }

    /// The folder with all files of the cluster: data, certificates and `<component>.log`.
    pub fn folder(&self) -> &Path {
        self.components.folder()
    }

    async fn get(&self, path: &str) -> Result<String> {
        let request = Request::get(path)
            .body(Vec::new())
            .context("building a request")?;
        Ok(self.client().request_text(request).await?)
    }

    pub(crate) fn spawn(&self, component: Component) -> Result<()> {
        if let Some(lease) = &self.lease {
            return lease.execute(&PoolRequest::Spawn(component));
        }
        match self.processes.lock().entry(component.name()) {
            Entry::Occupied(_) => {
                bail!(
                    "component {} of cluster {} already runs",
                    component.name(),
                    self.name
                )
            }
            Entry::Vacant(vacant) => {
                let log = self.folder().join(format!("{}.log", component.name()));
                let invocation = self.components.invocation(component);
                vacant.insert(ChildProcess::spawn(component.name(), &invocation, &log)?);
                Ok(())
            }
        }
    }

    async fn wait_ready(&self) -> Result<()> {
        let ready = async || self.get("/readyz").await.map(|_| Some(()));
        self.wait_for("the apiserver to be ready", ready).await
    }

    /// Like `eventually`, but fails as soon as one of the processes ends.
    async fn wait_for(
        &self,
        what: &str,
        check: impl AsyncFnMut() -> Result<Option<()>>,
    ) -> Result<()> {
        let check_running = || {
            let mut processes = self.processes.lock();
            processes
                .values_mut()
                .try_for_each(ChildProcess::check_running)
        };
        eventually_while_running(what, START_DEADLINE, check_running, check).await
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            if std::thread::panicking() {
                let folder = self.folder().display();
                eprintln!("cluster {}: its logs and data are in {folder}", self.name);
            } else {
                lease.end();
            }
            return;
        }
        let processes = self.processes.get_mut();
        kill_all(processes.values_mut());
        let keep = std::thread::panicking() || std::env::var_os("KRYPTON_KEEP").is_some();
        if let Some(folder) = self.folder.take().filter(|_| keep) {
            let folder = folder.keep();
            let folder = folder.display();
            eprintln!("cluster {}: its logs and data are in {folder}", self.name);
        }
    }
}

/// Returns a PATH that lists the tools first.
pub fn path_with(tools: &Tools) -> OsString {
    let mut path = tools.bin().into_os_string();
    path.push(":/usr/bin:/bin");
    path
}

async fn client_config(server: &str, credentials: &Credentials, name: &str) -> Result<Config> {
    let kubeconfig = Kubeconfig::from_yaml(&credentials.kubeconfig(name, server))?;
    let mut config =
        Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.reset_reader_on_write = true;
    // A test needs to observe a 503, and retries on its own.
    config.default_retry = false;
    Ok(config)
}
