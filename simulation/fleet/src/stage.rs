//! A fleet to simulate: a home cluster with hubs, and edge clusters with agents or kubeconfigs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::future::LocalBoxFuture;
use http::Method;
use krypton_agent::args::Flags;
use krypton_agent::credentials::store::SECRET as IDENTITY;
use krypton_hub::args::Settings as HubSettings;
use krypton_runtime::telemetry::Log;
use krypton_runtime::watchdog::Watchdog;
use krypton_sim_apiserver::server::{ApiServer, Key, Options};
use krypton_types::fingerprint;
use krypton_types::join_bundle::JoinBundle;
use krypton_types::join_info::{self, JoinInfo};
use krypton_types::join_token;
use krypton_types::names::{self, GROUP};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::chart;
use crate::conductor::{Context, Program, Simulation};
use crate::faults::{self, Person, VALUES};
use crate::observe::Event;
use crate::oracles::condition;
use crate::plan::{Chart, ELSEWHERE, Edge, HOME, SYSTEM, Settings, TENANTS};

/// Starts the names of hosts with a copy of an agent.
pub(crate) const COPY: &str = "copy-";
const PORT: u16 = 9443;
/// Address of the Service for agents.
const SERVICE: [u8; 4] = [10, 0, 9, 1];

/// A fleet of the shape that a plan has.
#[derive(Clone, Debug)]
pub struct Fleet<'a> {
    pub settings: &'a Settings,
}

impl Fleet<'_> {
    /// Adds the clusters, and starts the hubs.
    ///
    /// # Errors
    /// Returns an error if an API server refuses an object that each cluster has.
    pub fn start(&self, simulation: &mut Simulation) -> anyhow::Result<()> {
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        for (index, name) in self.settings.clusters().iter().enumerate() {
            add_cluster(simulation, name, index)?;
        }
        simulation.service((SERVICE, PORT).into(), leader_address);
        let values = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": VALUES},
            "data": {"values.yaml": "message: fleet-0\n"},
        });
        create(simulation, HOME, &namespaced("configmaps"), &values)?;
        for index in 0..self.settings.hubs {
            self.add_hub(simulation, index)?;
        }
        self.provide_kubeconfigs(simulation);
        Ok(())
    }

    /// Creates the Secrets with kubeconfigs, or repairs those that people have changed.
    pub fn provide_kubeconfigs(&self, simulation: &mut Simulation) {
        for edge in &self.settings.edges {
            if edge.has_kubeconfig()
                && let Some(secret) = kubeconfig_secret(simulation, &edge.name, &edge.name)
            {
                let mut person = Person::at_home(simulation);
                let all = namespaced("secrets");
                if person.create(&all, &secret) == 409 {
                    person.patch(&format!("{all}/{}", edge.name), &secret);
                }
            }
        }
    }

    /// Returns whether the hub has published its addresses, and knows the members with a kubeconfig that get an agent. It
    /// would not bind their Secrets to members of agents.
    pub fn awaits_agents(&self, simulation: &Simulation) -> bool {
        let known = |edge: &Edge| {
            let member = (GROUP, "edgeclusters");
            edge.agent().is_none()
                || !edge.has_kubeconfig()
                || object(simulation, HOME, member, "", &edge.name).is_some()
        };
        join_info(simulation).is_some() && self.settings.edges.iter().all(known)
    }

    /// Starts the agents with join bundles. The hub must have published its addresses.
    ///
    /// # Errors
    /// Returns an error if the hub has not.
    pub fn join_agents(&self, simulation: &mut Simulation) -> anyhow::Result<()> {
        for (index, edge) in self.settings.edges.iter().enumerate() {
            if let Some(host) = edge.agent() {
                join(simulation, (&edge.name, index), &host)?;
            }
        }
        Ok(())
    }

    /// Creates the Tenants that exist at the start.
    pub fn create_tenants(&self, simulation: &mut Simulation) {
        for creation in self.settings.creations() {
            faults::apply(simulation, &creation);
        }
    }

    /// Returns whether all clusters serve Tenants, and all members are connected.
    pub fn is_connected(&self, simulation: &Simulation) -> bool {
        let served = |name: &String| serves_tenants(simulation, name);
        let connected = |edge: &Edge| {
            let member = object(simulation, HOME, (GROUP, "edgeclusters"), "", &edge.name);
            member.is_some_and(|member| is_true(&member, "Connected"))
        };
        self.settings.clusters().iter().all(served) && self.settings.edges.iter().all(connected)
    }

    fn add_hub(&self, simulation: &mut Simulation, index: u32) -> anyhow::Result<()> {
        let host = format!("hub-{index}");
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": host},
            "spec": {"containers": [{"name": "hub", "image": "hub"}]},
        });
        let pod = create(simulation, HOME, &namespaced("pods"), &pod)?;
        let uid = pod.pointer("/metadata/uid").and_then(Value::as_str);
        let ip = [10, 0, 1, u8::try_from(index)?];
        let folder = simulation.folder().join(&host);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("kubeconfig"), kubeconfig(&authority(0)))?;
        let [a, b, c, d] = ip;
        let [e, f, g, h] = SERVICE;
        let mut flags = vec![
            format!("--namespace={SYSTEM}"),
            format!("--helm={}", helm(simulation.folder())?.display()),
            format!("--listen={a}.{b}.{c}.{d}:{PORT}"),
            format!("--advertise={e}.{f}.{g}.{h}:{PORT}"),
            "--chart-repo=".to_owned(),
            "--chart-install-crds=false".to_owned(),
            format!("--chart-values-from=configmap/{VALUES}"),
            format!("--kubeconfig-namespaces={SYSTEM},{ELSEWHERE}"),
            "--tenant-values".to_owned(),
            "--place-tenants".to_owned(),
            "--ensure-watch-crds".to_owned(),
            "--metrics-bind-address=0".to_owned(),
            "--health-probe-bind-address=0".to_owned(),
            "--debug-bind-address=0".to_owned(),
        ];
        if !self.settings.self_cluster {
            flags.push("--self-cluster=false".to_owned());
        }
        let env = BTreeMap::from([
            (
                "KUBECONFIG",
                folder.join("kubeconfig").display().to_string(),
            ),
            ("TMPDIR", folder.display().to_string()),
            ("POD_NAME", host.clone()),
            ("KRYPTON_POD_NAMESPACE", SYSTEM.to_owned()),
            ("POD_UID", uid.unwrap_or_default().to_owned()),
        ]);
        simulation.add_host(&host, ip, hub_program(self.settings.chart, flags, env));
        Ok(())
    }
}

fn add_cluster(simulation: &mut Simulation, name: &str, index: usize) -> anyhow::Result<()> {
    let server = api_server(simulation, name);
    simulation.add_cluster(name, &authority(index), server);
    create_namespaces(simulation, name)
}

fn api_server(simulation: &Simulation, name: &str) -> ApiServer {
    let options = Options {
        name: name.to_owned(),
        version: "v1.36.3".to_owned(),
        crd_delay: Duration::from_millis(300),
        controller_delay: Duration::from_millis(200),
    };
    ApiServer::new(options, simulation.wall())
}

/// Replaces a cluster by an empty one at the same address. Its agent stops.
pub(crate) fn rebuild(simulation: &mut Simulation, cluster: &str) {
    simulation.crash(&format!("agent-{cluster}"), None);
    let empty = api_server(simulation, &format!("{cluster} again")).snapshot();
    faults::rebuild(simulation, cluster, empty);
    if let Err(error) = create_namespaces(simulation, cluster) {
        let text = format!("{cluster} gets no namespaces: {error:#}");
        simulation.observe(Event::Fault { text });
    }
}

fn create_namespaces(simulation: &mut Simulation, name: &str) -> anyhow::Result<()> {
    for namespace in [SYSTEM, TENANTS, ELSEWHERE] {
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace},
        });
        create(simulation, name, "/api/v1/namespaces", &namespace)?;
    }
    Ok(())
}

/// The address of the hub whose pod has the leader's label, as the agents' Service selects it.
fn leader_address(simulation: &Simulation) -> Option<SocketAddr> {
    let pods = simulation.cluster(HOME)?.server.all("", "pods");
    let leader = pods.iter().find(|pod| {
        let labels = pod.pointer("/metadata/labels");
        labels.and_then(|labels| labels.get(names::LEADER_LABEL)) == Some(&json!("true"))
    })?;
    let name = leader.pointer("/metadata/name")?.as_str()?;
    Some((simulation.ip(name)?, PORT).into())
}

/// Starts the agent of an edge cluster with a join bundle.
fn join(
    simulation: &mut Simulation,
    (name, index): (&str, usize),
    host: &str,
) -> anyhow::Result<()> {
    invite(simulation, (name, None), host)?;
    let folder = simulation.folder().join(host);
    std::fs::write(folder.join("kubeconfig"), kubeconfig(&authority(index + 1)))?;
    let ip = [10, 0, 2, u8::try_from(index)?];
    simulation.add_host(host, ip, agent_program());
    Ok(())
}

/// Gives an agent a join bundle, as `kubectl krypton join` prints it. The token is bound to the EdgeCluster of this UID.
///
/// # Errors
/// Returns an error if the hub has not published its addresses, or has this token.
pub(crate) fn invite(
    simulation: &mut Simulation,
    (name, uid): (&str, Option<&str>),
    host: &str,
) -> anyhow::Result<()> {
    let info = join_info(simulation).context("the hub has published no addresses")?;
    let id = fingerprint::sha256_hex(format!("{name} {}", simulation.now()).as_bytes());
    let random = (
        id.as_bytes().first_chunk::<8>(),
        id.as_bytes().last_chunk::<32>(),
    );
    let (Some(one), Some(other)) = random else {
        bail!("a token has 40 bytes");
    };
    // The clocks of hubs differ by hours.
    let life = join_token::LONGEST_LIFE;
    let (token, made) = join_token::new(name, uid, life, simulation.wall(), (one, other));
    let token = serde_json::to_value(token)?;
    create(simulation, HOME, &namespaced("secrets"), &token)?;
    let bundle = JoinBundle {
        cluster: name.to_owned(),
        addresses: info.addresses,
        certificate_authority: info.ca_pem,
        token: made.token.clone(),
        expires: made.expires,
    };
    let folder = simulation.folder().join(host);
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("join.yaml"), bundle.to_yaml()?)?;
    Ok(())
}

/// A Secret of this name with a kubeconfig for the cluster.
pub(crate) fn kubeconfig_secret(
    simulation: &Simulation,
    cluster: &str,
    name: &str,
) -> Option<Value> {
    let config = kubeconfig(simulation.cluster(cluster)?.authority());
    Some(json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {
            names::DISCOVERY_LABEL: "true",
            names::OPEN_TO_DEPLOYMENTS_LABEL: "true",
        }},
        "data": {names::KUBECONFIG_KEY: STANDARD.encode(config)},
    }))
}

/// Starts a copy of an agent with the same files. Returns the name of its host.
pub(crate) fn copy_agent(simulation: &mut Simulation, edge: &str) -> String {
    let (agent, copy) = (format!("agent-{edge}"), format!("{COPY}{edge}"));
    let (from, to) = (
        simulation.folder().join(&agent),
        simulation.folder().join(&copy),
    );
    drop(std::fs::create_dir_all(&to));
    for file in ["kubeconfig", "join.yaml"] {
        drop(std::fs::copy(from.join(file), to.join(file)));
    }
    match simulation.ip(&copy) {
        Some(_) => simulation.start(&copy),
        None => {
            let ip = simulation.ip(&agent).unwrap_or([10, 0, 2, 0]);
            simulation.add_host(&copy, [ip[0], ip[1], 3, ip[3]], agent_program());
        }
    }
    copy
}

/// Returns whether the stored certificate of the agent on this edge cluster has expired by the clock of some hub.
pub(crate) fn is_expired(simulation: &Simulation, edge: &str) -> bool {
    let secret = object(simulation, edge, ("", "secrets"), SYSTEM, IDENTITY);
    let end = secret.and_then(|secret| {
        let pem = STANDARD
            .decode(secret.pointer("/data/tls.crt")?.as_str()?)
            .ok()?;
        let der = CertificateDer::from_pem_slice(&pem).ok()?;
        let (_, certificate) = X509Certificate::from_der(&der).ok()?;
        Some(certificate.validity().not_after.timestamp())
    });
    let latest = simulation.wall().as_second() + 12 * 60 * 60;
    end.is_some_and(|end| end <= latest)
}

/// Returns what the hub has published for agents.
pub fn join_info(simulation: &Simulation) -> Option<JoinInfo> {
    let found = object(
        simulation,
        HOME,
        ("", "configmaps"),
        SYSTEM,
        join_info::NAME,
    )?;
    let data = serde_json::from_value(found.get("data")?.clone()).ok()?;
    let info = JoinInfo::of(&data);
    (!info.ca_pem.is_empty() && !info.addresses.is_empty()).then_some(info)
}

/// Returns whether the cluster serves Tenants.
fn serves_tenants(simulation: &Simulation, cluster: &str) -> bool {
    let crds = ("apiextensions.k8s.io", "customresourcedefinitions");
    let crd = object(simulation, cluster, crds, "", "tenants.mesh.openkcm.io");
    crd.is_some_and(|crd| is_true(&crd, "Established"))
}

/// Returns whether the condition of this type is true.
fn is_true(object: &Value, kind: &str) -> bool {
    condition(object, kind).is_some_and(|(status, _)| status == "True")
}

/// Returns an object of a cluster.
fn object(
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
fn create(
    simulation: &mut Simulation,
    cluster: &str,
    path: &str,
    object: &Value,
) -> anyhow::Result<Value> {
    let mut person = Person {
        simulation,
        cluster,
    };
    let (code, body) = person.send(Method::POST, path, "application/json", object);
    ensure!(code == 201, "POST {path} on {cluster}: {code} {body}");
    Ok(body)
}

/// The path of a core resource in Krypton's namespace.
fn namespaced(resource: &str) -> String {
    format!("/api/v1/namespaces/{SYSTEM}/{resource}")
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

fn hub_program(chart: Chart, flags: Vec<String>, env: BTreeMap<&'static str, String>) -> Program {
    Rc::new(move |context| {
        let (flags, env) = (flags.clone(), env.clone());
        Box::pin(async move {
            run_hub(context, chart, flags, env)
                .await
                .map_err(|error| format!("{error:#}"))
        }) as LocalBoxFuture<'static, Result<(), String>>
    })
}

async fn run_hub(
    context: Context,
    chart: Chart,
    mut flags: Vec<String>,
    env: BTreeMap<&'static str, String>,
) -> anyhow::Result<()> {
    let all = context.folder.parent().unwrap_or(&context.folder);
    let number = faults::chart_version_in(all);
    let (path, version) = chart::write(&all.join("charts"), chart, number)?;
    flags.push(format!("--chart-name={}", path.display()));
    flags.push(format!("--chart-version={version}"));
    let argv = [OsString::from("krypton-hub")]
        .into_iter()
        .chain(flags.into_iter().map(OsString::from));
    let settings = HubSettings::read(argv, &|name| env.get(name).cloned(), None)?;
    let outside = krypton_hub::app::Outside {
        stop: context.stop.clone(),
        watchdog: Watchdog::default(),
        log: Log::unused(),
        network: context.network(),
        helm: context.helm(),
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
        format!("--namespace={SYSTEM}"),
        "--replica=one".to_owned(),
        "--metrics-bind-address=0".to_owned(),
        "--health-probe-bind-address=0".to_owned(),
        "--debug-bind-address=0".to_owned(),
    ];
    let flags = Flags::read(flags.map(OsString::from))?;
    let outside = krypton_agent::app::Outside {
        env: Arc::new(|_| None),
        stop: context.stop.clone(),
        watchdog: Watchdog::default(),
        log: Log::unused(),
        network: context.network(),
        helm: context.helm(),
    };
    krypton_agent::app::run_in(flags, outside).await
}
