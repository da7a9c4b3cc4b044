//! A fleet to simulate: a home cluster with hubs, and edge clusters with agents or kubeconfigs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::future::LocalBoxFuture;
use http::Method;
use krypton_agent::args::Flags;
use krypton_agent::credentials::store::SECRET as IDENTITY_SECRET;
use krypton_hub::args::Settings as HubSettings;
use krypton_runtime::telemetry::Log;
use krypton_runtime::watchdog::Watchdog;
use krypton_sim_apiserver::server::{ApiServer, Crds, Key, Options};
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
use crate::conductor::{Program, ProgramContext, Simulation};
use crate::object::{has_true_condition, is_true};
use crate::plan::{
    Access, COPY_PREFIX, Chart, Edge, HOME, SYSTEM_NAMESPACE, Settings, TENANT_NAMESPACE,
    UNTRUSTED_NAMESPACE, VALUES_CONFIG_MAP,
};
use crate::time::Millis;
use crate::user_client::UserClient;

/// Time until the hub has started, and until all members are connected.
pub(crate) const START: Millis = 180_000;
const HUB_PORT: u16 = 9443;
/// Address of the Service for agents.
const HUB_SERVICE_IP: [u8; 4] = [10, 0, 9, 1];

/// A fleet with the settings of a plan.
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
            if self.settings.crds_exist {
                created_crds()?.add_to(simulation, name);
            }
        }
        simulation.add_service((HUB_SERVICE_IP, HUB_PORT).into(), leader_address);
        let values = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": VALUES_CONFIG_MAP},
            "data": {"values.yaml": "message: fleet-0\n"},
        });
        create_object(simulation, HOME, &system_path("configmaps"), &values)?;
        for index in 0..self.settings.hubs {
            self.add_hub(simulation, index)?;
        }
        self.ensure_kubeconfigs(simulation);
        Ok(())
    }

    /// Creates the Secrets with kubeconfigs, or repairs Secrets that users have changed.
    pub fn ensure_kubeconfigs(&self, simulation: &mut Simulation) {
        for edge in &self.settings.edges {
            if edge.has_kubeconfig()
                && let Some(secret) = kubeconfig_secret(simulation, &edge.name, &edge.name)
            {
                let mut client = UserClient::for_home(simulation);
                let collection = system_path("secrets");
                if client.create(&collection, &secret) == 409 {
                    client.patch(&format!("{collection}/{}", edge.name), &secret);
                }
            }
        }
    }

    /// Returns whether the hub has published its addresses, and knows the members with a kubeconfig that get an agent.
    /// It would not bind their Secrets to members of agents.
    pub fn is_ready_for_agents(&self, simulation: &Simulation) -> bool {
        let is_known = |edge: &Edge| {
            let member = (GROUP, "edgeclusters");
            edge.agent_host().is_none()
                || !edge.has_kubeconfig()
                || find_object(simulation, HOME, member, "", &edge.name).is_some()
        };
        published_join_info(simulation).is_some() && self.settings.edges.iter().all(is_known)
    }

    /// Starts the agents with join bundles. The hub must have published its addresses.
    ///
    /// # Errors
    /// Returns an error if the hub has not.
    pub fn join_agents(&self, simulation: &mut Simulation) -> anyhow::Result<()> {
        for (index, edge) in self.settings.edges.iter().enumerate() {
            if let Some(host) = edge.agent_host() {
                start_agent(simulation, (&edge.name, index), &host)?;
            }
        }
        Ok(())
    }

    /// Returns whether all clusters serve Tenants, and all members are connected.
    pub fn all_connected(&self, simulation: &Simulation) -> bool {
        let is_served = |name: &String| serves_tenants(simulation, name);
        let is_connected = |edge: &Edge| {
            let member = find_object(simulation, HOME, (GROUP, "edgeclusters"), "", &edge.name);
            member.is_some_and(|member| has_true_condition(&member, "Connected"))
        };
        self.settings.clusters().iter().all(is_served)
            && self.settings.edges.iter().all(is_connected)
    }

    fn add_hub(&self, simulation: &mut Simulation, index: u32) -> anyhow::Result<()> {
        let host = format!("hub-{index}");
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": host},
            "spec": {"containers": [{"name": "hub", "image": "hub"}]},
        });
        let pod = create_object(simulation, HOME, &system_path("pods"), &pod)?;
        let uid = pod.pointer("/metadata/uid").and_then(Value::as_str);
        let ip = [10, 0, 1, u8::try_from(index)?];
        let folder = simulation.folder().join(&host);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("kubeconfig"), kubeconfig(&server_authority(0)))?;
        let [a, b, c, d] = ip;
        let [e, f, g, h] = HUB_SERVICE_IP;
        let mut flags = vec![
            format!("--namespace={SYSTEM_NAMESPACE}"),
            format!("--helm={}", write_helm_stub(simulation.folder())?.display()),
            format!("--listen={a}.{b}.{c}.{d}:{HUB_PORT}"),
            format!("--advertise={e}.{f}.{g}.{h}:{HUB_PORT}"),
            "--chart-repo=".to_owned(),
            "--chart-install-crds=false".to_owned(),
            format!("--chart-values-from=configmap/{VALUES_CONFIG_MAP}"),
            format!("--kubeconfig-namespaces={SYSTEM_NAMESPACE},{UNTRUSTED_NAMESPACE}"),
            format!("--leader-lease-duration={}ms", self.settings.leader_lease()),
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
            ("KRYPTON_POD_NAMESPACE", SYSTEM_NAMESPACE.to_owned()),
            ("POD_UID", uid.unwrap_or_default().to_owned()),
        ]);
        simulation.add_host(&host, ip, hub_program(self.settings.chart, flags, env));
        Ok(())
    }
}

/// The CRDs that a hub creates on its cluster, and an agent on its own.
#[derive(Debug)]
struct CreatedCrds {
    home: Crds,
    edge: Crds,
}

impl CreatedCrds {
    fn add_to(&self, simulation: &mut Simulation, name: &str) {
        let crds = if name == HOME { &self.home } else { &self.edge };
        simulation.change_cluster(name, |cluster, now| cluster.server.add_crds(crds, now));
    }
}

/// Returns the CRDs of a fleet, which the first call starts.
fn created_crds() -> anyhow::Result<&'static CreatedCrds> {
    static CREATED: OnceLock<Result<CreatedCrds, String>> = OnceLock::new();
    let created = CREATED.get_or_init(|| create_crds().map_err(|error| format!("{error:#}")));
    created.as_ref().map_err(|error| anyhow!("{error}"))
}

fn create_crds() -> anyhow::Result<CreatedCrds> {
    let edge = "edge-1";
    let settings = Settings {
        hubs: 1,
        edges: vec![Edge {
            name: edge.to_owned(),
            access: Access::Agent,
        }],
        ..Settings::default()
    };
    let fleet = Fleet {
        settings: &settings,
    };
    // No plan has this seed, so its folder has another name.
    let mut simulation = Simulation::new(u64::MAX)?;
    fleet.start(&mut simulation)?;
    while !fleet.is_ready_for_agents(&simulation) {
        ensure!(simulation.handle_next_event(START), "no hub leads");
    }
    fleet.join_agents(&mut simulation)?;
    while !fleet.all_connected(&simulation) {
        ensure!(simulation.handle_next_event(START), "no agent is connected");
    }
    let crds = |name: &str| {
        simulation
            .cluster(name)
            .map(|cluster| cluster.server.crds())
    };
    Ok(CreatedCrds {
        home: crds(HOME).unwrap_or_default(),
        edge: crds(edge).unwrap_or_default(),
    })
}

fn add_cluster(simulation: &mut Simulation, name: &str, index: usize) -> anyhow::Result<()> {
    let server = api_server(simulation, name);
    simulation.add_cluster(name, &server_authority(index), server);
    create_namespaces(simulation, name)
}

pub(crate) fn api_server(simulation: &Simulation, name: &str) -> ApiServer {
    let options = Options {
        name: name.to_owned(),
        version: "v1.36.3".to_owned(),
        crd_delay: Duration::from_millis(300),
        controller_delay: Duration::from_millis(200),
    };
    ApiServer::new(options, simulation.wall_time())
}

pub(crate) fn create_namespaces(simulation: &mut Simulation, name: &str) -> anyhow::Result<()> {
    for namespace in [SYSTEM_NAMESPACE, TENANT_NAMESPACE, UNTRUSTED_NAMESPACE] {
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace},
        });
        create_object(simulation, name, "/api/v1/namespaces", &namespace)?;
    }
    Ok(())
}

/// The address of the hub whose pod has the leader's label, as the agents' Service selects it.
fn leader_address(simulation: &Simulation) -> Option<SocketAddr> {
    let pods = simulation.objects(HOME, "", "pods");
    let leader = pods.iter().find(|pod| {
        let labels = pod.pointer("/metadata/labels");
        labels.and_then(|labels| labels.get(names::LEADER_LABEL)) == Some(&json!("true"))
    })?;
    let name = leader.pointer("/metadata/name")?.as_str()?;
    Some((simulation.ip(name)?, HUB_PORT).into())
}

/// Starts the agent of an edge cluster with a join bundle.
fn start_agent(
    simulation: &mut Simulation,
    (name, index): (&str, usize),
    host: &str,
) -> anyhow::Result<()> {
    write_join_bundle(simulation, (name, None), host)?;
    let folder = simulation.folder().join(host);
    std::fs::write(
        folder.join("kubeconfig"),
        kubeconfig(&server_authority(index + 1)),
    )?;
    let ip = [10, 0, 2, u8::try_from(index)?];
    simulation.add_host(host, ip, agent_program());
    Ok(())
}

/// Writes a join bundle for an agent, as `kubectl krypton join` prints it. The token is bound to the EdgeCluster of
/// this UID.
///
/// # Errors
/// Returns an error if the hub has not published its addresses, or has this token.
pub(crate) fn write_join_bundle(
    simulation: &mut Simulation,
    (name, uid): (&str, Option<&str>),
    host: &str,
) -> anyhow::Result<()> {
    let info = published_join_info(simulation).context("the hub has published no addresses")?;
    let digest = fingerprint::sha256_hex(format!("{name} {}", simulation.now()).as_bytes());
    let halves = (
        digest.as_bytes().first_chunk::<8>(),
        digest.as_bytes().last_chunk::<32>(),
    );
    let (Some(token_id), Some(token_secret)) = halves else {
        bail!("a token has 40 bytes");
    };
    // The clocks of hubs differ by hours.
    let lifetime = join_token::LONGEST_LIFE;
    let (secret, new_token) = join_token::new(
        name,
        uid,
        lifetime,
        simulation.wall_time(),
        (token_id, token_secret),
    );
    let secret = serde_json::to_value(secret)?;
    create_object(simulation, HOME, &system_path("secrets"), &secret)?;
    let bundle = JoinBundle {
        cluster: name.to_owned(),
        addresses: info.addresses,
        certificate_authority: info.ca_pem,
        token: new_token.token.clone(),
        expires: new_token.expires,
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
    let (agent, copy) = (format!("agent-{edge}"), format!("{COPY_PREFIX}{edge}"));
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
    let secret = find_object(
        simulation,
        edge,
        ("", "secrets"),
        SYSTEM_NAMESPACE,
        IDENTITY_SECRET,
    );
    let expiry = secret.and_then(|secret| {
        let pem = STANDARD
            .decode(secret.pointer("/data/tls.crt")?.as_str()?)
            .ok()?;
        let der = CertificateDer::from_pem_slice(&pem).ok()?;
        let (_, certificate) = X509Certificate::from_der(&der).ok()?;
        Some(certificate.validity().not_after.timestamp())
    });
    let latest_time = simulation.wall_time().as_second() + 12 * 60 * 60;
    expiry.is_some_and(|expiry| expiry <= latest_time)
}

/// Returns whether people have banned the member.
pub(crate) fn is_banned(simulation: &Simulation, member: &str) -> bool {
    let object = find_object(simulation, HOME, (GROUP, "edgeclusters"), "", member);
    object.is_some_and(|object| is_true(&object, "/spec/banned"))
}

/// Returns the join information that the hub has published for agents.
pub fn published_join_info(simulation: &Simulation) -> Option<JoinInfo> {
    let config_map = find_object(
        simulation,
        HOME,
        ("", "configmaps"),
        SYSTEM_NAMESPACE,
        join_info::NAME,
    )?;
    let data = serde_json::from_value(config_map.get("data")?.clone()).ok()?;
    let info = JoinInfo::from_data(&data);
    (!info.ca_pem.is_empty() && !info.addresses.is_empty()).then_some(info)
}

/// Returns whether the cluster serves Tenants.
fn serves_tenants(simulation: &Simulation, cluster: &str) -> bool {
    let crds = ("apiextensions.k8s.io", "customresourcedefinitions");
    let crd = find_object(simulation, cluster, crds, "", "tenants.mesh.openkcm.io");
    crd.is_some_and(|crd| has_true_condition(&crd, "Established"))
}

/// Returns an object of a cluster.
fn find_object(
    simulation: &Simulation,
    cluster: &str,
    (group, resource): (&str, &str),
    namespace: &str,
    name: &str,
) -> Option<Arc<Value>> {
    let key = Key::new(group, resource, namespace, name);
    simulation.object(cluster, &key)
}

/// Creates an object with the client of people.
fn create_object(
    simulation: &mut Simulation,
    cluster: &str,
    path: &str,
    object: &Value,
) -> anyhow::Result<Value> {
    let mut client = UserClient::new(simulation, cluster);
    let (code, body) = client.send(Method::POST, path, "application/json", object);
    ensure!(code == 201, "POST {path} on {cluster}: {code} {body}");
    Ok(body)
}

/// The path of a core resource in Krypton's namespace.
fn system_path(resource: &str) -> String {
    format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/{resource}")
}

/// Writes a file in place of the Helm program, which is never started. Returns its path.
fn write_helm_stub(folder: &Path) -> std::io::Result<PathBuf> {
    let path = folder.join("helm");
    std::fs::write(&path, "#!/bin/false\n")?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    Ok(path)
}

fn server_authority(index: usize) -> String {
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
    context: ProgramContext,
    chart: Chart,
    mut flags: Vec<String>,
    env: BTreeMap<&'static str, String>,
) -> anyhow::Result<()> {
    let root = context.folder.parent().unwrap_or(&context.folder);
    let number = chart::version_in(root);
    let (path, version) = chart::write_archive(&root.join("charts"), chart, number)?;
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

async fn run_agent(context: ProgramContext) -> anyhow::Result<()> {
    let folder: &Path = &context.folder;
    let flags = [
        "krypton-agent".to_owned(),
        format!(
            "--helm={}",
            write_helm_stub(folder.parent().unwrap_or(folder))?.display()
        ),
        format!("--kubeconfig={}", folder.join("kubeconfig").display()),
        format!("--join-file={}", folder.join("join.yaml").display()),
        format!("--cache-dir={}", folder.join("cache").display()),
        format!("--namespace={SYSTEM_NAMESPACE}"),
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
