//! A fleet to simulate: a home cluster with hubs, and edge clusters with agents or kubeconfigs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use futures::future::LocalBoxFuture;
use http::{Request, Response};
use krypton_agent::args::Flags;
use krypton_hub::args::Settings as HubSettings;
use krypton_runtime::telemetry::Log;
use krypton_runtime::watchdog::Watchdog;
use krypton_sim_apiserver::server::{ApiServer, Key, Options};
use krypton_types::join_bundle::JoinBundle;
use krypton_types::join_info::{self, JoinInfo};
use krypton_types::{join_token, names};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::conductor::{Context, Program, Simulation};
use crate::helm::SimHelm;
use crate::streams::SimNetwork;

/// Namespace of the hub, and of Krypton's objects on members.
pub const NAMESPACE: &str = "krypton-system";
pub const HOME: &str = "home";
const PORT: u16 = 9443;
/// Address of the Service for agents.
const SERVICE: [u8; 4] = [10, 0, 9, 1];

/// How the hub reaches a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Agent,
    Kubeconfig,
}

/// The parts of a fleet.
#[derive(Clone, Debug)]
pub struct Fleet {
    pub hubs: u8,
    /// One for each edge cluster: `edge-1`, `edge-2` …
    pub edges: Vec<Access>,
    /// Path of the chart's archive.
    pub chart: PathBuf,
    pub chart_version: String,
    /// More flags of the hub.
    pub hub_flags: Vec<String>,
}

/// Name of the edge cluster with this index.
pub fn edge(index: usize) -> String {
    format!("edge-{}", index + 1)
}

/// Name of the host of a member's agent.
pub fn agent_host(member: &str) -> String {
    format!("agent-{member}")
}

pub fn hub_host(index: u8) -> String {
    format!("hub-{index}")
}

impl Fleet {
    /// Adds the clusters, and starts the hubs.
    ///
    /// # Errors
    /// Returns an error if an API server refuses an object that each cluster has.
    pub fn start(&self, simulation: &mut Simulation) -> anyhow::Result<()> {
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        self.add_cluster(simulation, HOME, 0)?;
        for (index, _) in self.edges.iter().enumerate() {
            self.add_cluster(simulation, &edge(index), index + 1)?;
        }
        simulation.service((SERVICE, PORT).into(), |simulation| {
            let server = &simulation.cluster(HOME)?.server;
            let pods = server.all("", "pods");
            let leader = pods.iter().find(|pod| {
                pod.pointer("/metadata/labels")
                    .and_then(|labels| labels.get(names::LEADER_LABEL))
                    == Some(&json!("true"))
            })?;
            let name = leader.pointer("/metadata/name")?.as_str()?;
            Some((simulation.ip(name)?, PORT).into())
        });
        for index in 0..self.hubs {
            self.add_hub(simulation, index)?;
        }
        for (index, access) in self.edges.iter().enumerate() {
            if *access == Access::Kubeconfig {
                let name = edge(index);
                let secret = json!({
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "metadata": {"name": name, "labels": {names::DISCOVERY_LABEL: "true"}},
                    "stringData": {names::KUBECONFIG_KEY: kubeconfig(&authority(index + 1))},
                });
                create(simulation, HOME, &namespaced("secrets"), &secret)?;
            }
        }
        Ok(())
    }

    /// Starts the agent of an edge cluster with a join bundle. The hub must have published its addresses.
    ///
    /// # Errors
    /// Returns an error if the hub has not.
    pub fn join(&self, simulation: &mut Simulation, index: usize) -> anyhow::Result<()> {
        let name = edge(index);
        let info = join_info(simulation).context("the hub has published no addresses")?;
        let random = [u8::try_from(index).unwrap_or(0) + 1; 40];
        let (one, other) = (random.first_chunk::<8>(), random.last_chunk::<32>());
        let (Some(one), Some(other)) = (one, other) else {
            bail!("a token has 40 bytes");
        };
        let now = simulation.wall();
        let hour = Duration::from_secs(3600);
        let (token, made) = join_token::new(&name, None, hour, now, (one, other));
        let token = serde_json::to_value(token)?;
        create(simulation, HOME, &namespaced("secrets"), &token)?;
        let bundle = JoinBundle {
            cluster: name.clone(),
            addresses: info.addresses,
            certificate_authority: info.ca_pem,
            token: made.token.clone(),
            expires: made.expires,
        };
        let host = agent_host(&name);
        let folder = simulation.folder().join(&host);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("join.yaml"), bundle.to_yaml()?)?;
        let path = folder.join("kubeconfig");
        std::fs::write(&path, kubeconfig(&authority(index + 1)))?;
        let ip = [10, 0, 2, u8::try_from(index).unwrap_or(0)];
        simulation.add_host(&host, ip, agent_program());
        Ok(())
    }

    fn add_cluster(
        &self,
        simulation: &mut Simulation,
        name: &str,
        index: usize,
    ) -> anyhow::Result<()> {
        let options = Options {
            name: name.to_owned(),
            version: "v1.33.5".to_owned(),
            crd_delay: Duration::from_millis(300),
            controller_delay: Duration::from_millis(200),
        };
        let server = ApiServer::new(options, simulation.wall());
        simulation.add_cluster(name, &authority(index), server);
        for namespace in ["kube-system", "default", NAMESPACE] {
            if object(simulation, name, ("", "namespaces"), "", namespace).is_some() {
                continue;
            }
            let namespace = json!({
                "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace},
            });
            create(simulation, name, "/api/v1/namespaces", &namespace)?;
        }
        Ok(())
    }

    fn add_hub(&self, simulation: &mut Simulation, index: u8) -> anyhow::Result<()> {
        let host = hub_host(index);
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": host},
            "spec": {"containers": [{"name": "hub", "image": "hub"}]},
        });
        let pod = create(simulation, HOME, &namespaced("pods"), &pod)?;
        let uid = pod.pointer("/metadata/uid").and_then(Value::as_str);
        let ip = [10, 0, 1, index];
        let folder = simulation.folder().join(&host);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("kubeconfig"), kubeconfig(&authority(0)))?;
        let [a, b, c, d] = ip;
        let [e, f, g, h] = SERVICE;
        let mut flags = vec![
            format!("--namespace={NAMESPACE}"),
            format!("--helm={}", helm(simulation.folder())?.display()),
            format!("--listen={a}.{b}.{c}.{d}:{PORT}"),
            format!("--advertise={e}.{f}.{g}.{h}:{PORT}"),
            "--chart-repo=".to_owned(),
            format!("--chart-name={}", self.chart.display()),
            format!("--chart-version={}", self.chart_version),
            "--chart-install-crds=false".to_owned(),
            "--ensure-watch-crds".to_owned(),
            "--metrics-bind-address=0".to_owned(),
            "--health-probe-bind-address=0".to_owned(),
            "--debug-bind-address=0".to_owned(),
        ];
        flags.extend(self.hub_flags.iter().cloned());
        let env = BTreeMap::from([
            (
                "KUBECONFIG",
                folder.join("kubeconfig").display().to_string(),
            ),
            ("TMPDIR", folder.display().to_string()),
            ("POD_NAME", host.clone()),
            ("KRYPTON_POD_NAMESPACE", NAMESPACE.to_owned()),
            ("POD_UID", uid.unwrap_or_default().to_owned()),
        ]);
        simulation.add_host(&host, ip, hub_program(flags, env));
        Ok(())
    }
}

/// Returns what the hub has published for agents.
pub fn join_info(simulation: &Simulation) -> Option<JoinInfo> {
    let found = object(
        simulation,
        HOME,
        ("", "configmaps"),
        NAMESPACE,
        join_info::NAME,
    )?;
    let data = serde_json::from_value(found.get("data")?.clone()).ok()?;
    let info = JoinInfo::of(&data);
    (!info.ca_pem.is_empty() && !info.addresses.is_empty()).then_some(info)
}

/// Returns whether the cluster serves Tenants.
pub fn serves_tenants(simulation: &Simulation, cluster: &str) -> bool {
    let crds = ("apiextensions.k8s.io", "customresourcedefinitions");
    let crd = object(simulation, cluster, crds, "", "tenants.mesh.openkcm.io");
    crd.is_some_and(|crd| condition(&crd, "Established"))
}

/// Returns whether the condition of this type is true.
pub fn condition(object: &Value, kind: &str) -> bool {
    let conditions = object
        .pointer("/status/conditions")
        .and_then(Value::as_array);
    conditions.is_some_and(|list| {
        list.iter()
            .any(|one| one["type"] == kind && one["status"] == "True")
    })
}

/// Returns an object of a cluster.
pub fn object(
    simulation: &Simulation,
    cluster: &str,
    (group, resource): (&str, &str),
    namespace: &str,
    name: &str,
) -> Option<Arc<Value>> {
    let key = Key {
        group: group.to_owned(),
        resource: resource.to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    simulation.cluster(cluster)?.server.get(&key)
}

/// Creates an object as a person.
///
/// # Errors
/// Returns the API server's refusal.
pub fn create(
    simulation: &mut Simulation,
    cluster: &str,
    path: &str,
    object: &Value,
) -> anyhow::Result<Value> {
    let response = send(simulation, cluster, ("POST", path), Some(object))?;
    let body = String::from_utf8_lossy(response.body()).into_owned();
    if !response.status().is_success() {
        bail!("POST {path} on {cluster}: {} {body}", response.status());
    }
    Ok(serde_json::from_str(&body)?)
}

/// Sends a request as a person.
///
/// # Errors
/// Returns an error if the cluster does not exist.
pub fn send(
    simulation: &mut Simulation,
    cluster: &str,
    (method, path): (&str, &str),
    body: Option<&Value>,
) -> anyhow::Result<Response<Bytes>> {
    let content_type = match method {
        "PATCH" => "application/merge-patch+json",
        _ => "application/json",
    };
    let body = body.map(Value::to_string).unwrap_or_default();
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", content_type)
        .header("user-agent", "a-person")
        .body(Bytes::from(body))?;
    simulation
        .request(cluster, &request)
        .context("no such cluster")
}

/// The path of a core resource in Krypton's namespace.
pub fn namespaced(resource: &str) -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/{resource}")
}

/// Returns a file that stands for the Helm program, which is never started.
fn helm(folder: &Path) -> std::io::Result<PathBuf> {
    let path = folder.join("helm");
    std::fs::write(&path, "#!/bin/false\n")?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    Ok(path)
}

fn authority(index: usize) -> String {
    format!("10.0.0.{}:6443", index + 1)
}

fn kubeconfig(authority: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": format!("https://{authority}")}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    })
    .to_string()
}

fn hub_program(flags: Vec<String>, env: BTreeMap<&'static str, String>) -> Program {
    Rc::new(move |context| {
        let (flags, env) = (flags.clone(), env.clone());
        Box::pin(async move {
            run_hub(context, flags, env)
                .await
                .map_err(|error| format!("{error:#}"))
        }) as LocalBoxFuture<'static, Result<(), String>>
    })
}

async fn run_hub(
    context: Context,
    flags: Vec<String>,
    env: BTreeMap<&'static str, String>,
) -> anyhow::Result<()> {
    let argv = [OsString::from("krypton-hub")]
        .into_iter()
        .chain(flags.into_iter().map(OsString::from));
    let settings = HubSettings::read(argv, &|name| env.get(name).cloned(), None)?;
    let outside = krypton_hub::app::Outside {
        stop: CancellationToken::new(),
        watchdog: Watchdog::default(),
        log: Log::unused(),
        network: Arc::new(SimNetwork {
            process: context.process,
            outbox: context.outbox.clone(),
        }),
        helm: Arc::new(SimHelm {
            process: context.process,
            outbox: context.outbox,
        }),
    };
    krypton_hub::app::run_in(settings, outside).await
}

fn agent_program() -> Program {
    Rc::new(|context| {
        Box::pin(async move {
            run_agent(context)
                .await
                .map_err(|error| format!("{error:#}"))
        }) as LocalBoxFuture<'static, Result<(), String>>
    })
}

async fn run_agent(context: Context) -> anyhow::Result<()> {
    let folder: &Path = &context.folder;
    let flags = [
        "krypton-agent".to_owned(),
        format!(
            "--helm={}",
            helm(folder.parent().unwrap_or(folder))?.display()
        ),
        format!("--kubeconfig={}", folder.join("kubeconfig").display()),
        format!("--join-file={}", folder.join("join.yaml").display()),
        format!("--cache-dir={}", folder.join("cache").display()),
        format!("--namespace={NAMESPACE}"),
        "--replica=one".to_owned(),
        "--metrics-bind-address=0".to_owned(),
        "--health-probe-bind-address=0".to_owned(),
        "--debug-bind-address=0".to_owned(),
    ];
    let flags = Flags::read(flags.map(OsString::from))?;
    let outside = krypton_agent::app::Outside {
        env: Arc::new(|_| None),
        stop: CancellationToken::new(),
        watchdog: Watchdog::default(),
        log: Log::unused(),
        network: Arc::new(SimNetwork {
            process: context.process,
            outbox: context.outbox.clone(),
        }),
        helm: Arc::new(SimHelm {
            process: context.process,
            outbox: context.outbox,
        }),
    };
    krypton_agent::app::run_in(flags, outside).await
}
