//! Verifies several hubs: agents follow the leader, and neither its death nor an outdated successor removes anything.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use anyhow::{Result, bail, ensure};
use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    AnsweringProxy, ChartRepository, ChartSource, Cluster, FalseResponse, Hub, HubOptions,
    Membership, Merge as _, Mode, Parts, ResponseFault, TestResult,
    answering_proxy::{READ_VERBS, Verb},
    by_agent, eventually,
    fleet::{
        CONNECTED, FleetClient, HUB_NAMESPACE, ValuesFile, chart_flags, condition, values_flag,
    },
    home_and_edge, kubectl_krypton,
    port::Port,
    wait_until_gone,
};
use krypton_types::names::{self, HUB_LEASE};
use kube::{
    Api, ResourceExt,
    api::DeleteParams,
    runtime::{WatchStreamExt, watcher},
};
use parking_lot::Mutex;
use serde_json::json;
use tokio::task::JoinHandle;

const EDGE: &str = "edge-1";

by_agent!(killed_leader_is_replaced_and_sessions_return);

/// Hubs of one home with their pod names, and all their addresses for agents.
struct HubSet {
    hubs: BTreeMap<String, Hub>,
    ports: BTreeMap<String, Arc<Port>>,
    home: Cluster,
    edge: Cluster,
    fleet_client: FleetClient,
    repository: ChartRepository,
    values: ValuesFile,
    /// Kubeconfigs of hubs that don't reach home directly.
    proxy_kubeconfigs: BTreeMap<&'static str, PathBuf>,
}

impl HubSet {
    async fn new(name: &str, hubs: &[&str]) -> TestResult<Self> {
        let repository = ChartRepository::start(&[ChartSource::small("1.0.0")]).await?;
        let (home, edge) = home_and_edge(name, Parts::ControlPlane).await?;
        let mut stage = Self {
            hubs: BTreeMap::new(),
            ports: BTreeMap::new(),
            fleet_client: FleetClient::new(&home),
            home,
            edge,
            repository,
            values: ValuesFile::new("replicaCount: 0")?,
            proxy_kubeconfigs: BTreeMap::new(),
        };
        stage.add_hubs(hubs);
        for name in hubs {
            stage.start(name).await;
        }
        Ok(stage)
    }

    /// Adds hubs that start later through separate connections.
    fn add_hubs(&mut self, hubs: &[&str]) {
        let port = |name: &&str| ((*name).to_owned(), Arc::new(Port::reserve().unwrap()));
        self.ports.extend(hubs.iter().map(port));
    }

    /// Starts a hub, or its replacement. Agents get the addresses of all hubs.
    async fn start(&mut self, name: &str) {
        let proxy_kubeconfig = self.proxy_kubeconfigs.get(name).map(PathBuf::as_path);
        let kubeconfig = proxy_kubeconfig
            .unwrap_or(self.home.kubeconfig())
            .to_owned();
        let addresses: Vec<String> = (self.ports.values())
            .map(|port| port.address().to_string())
            .collect();
        let options = HubOptions::new(&kubeconfig)
            .args(chart_flags(&self.repository, "small", "1.0.0"))
            .args([values_flag(&self.values)])
            .args(["--self-cluster=false".to_owned()])
            .args([format!("--advertise={}", addresses.join(","))])
            .env("POD_NAME", name)
            .on_port(&self.ports[name]);
        let hub = Hub::start_ready(&options).await.unwrap();
        self.hubs.insert(name.to_owned(), hub);
    }

    fn hub(&mut self, name: &str) -> &mut Hub {
        self.hubs.get_mut(name).unwrap()
    }

    async fn join(&mut self, mode: Mode) -> TestResult<Membership> {
        let leader = self.wait_for_other_leader("").await?;
        let Self {
            hubs, home, edge, ..
        } = self;
        let hub = hubs.get_mut(&leader).unwrap();
        Ok(Membership::join(mode, hub, home, edge, EDGE).await?)
    }

    /// Waits until another hub is the leader, and returns its name.
    async fn wait_for_other_leader(&self, previous: &str) -> Result<String> {
        let leases: Api<Lease> = Api::namespaced(self.fleet_client.client.clone(), HUB_NAMESPACE);
        eventually("another hub to become the leader", async || {
            let spec = leases.get(HUB_LEASE).await?.spec.unwrap_or_default();
            let holder = spec.holder_identity.unwrap_or_default();
            match holder.split('/').nth(1) {
                Some(name) if name != previous => Ok(Some(name.to_owned())),
                _ => bail!("the holder is {holder:?}"),
            }
        })
        .await
    }

    async fn epoch(&self) -> Result<u64> {
        self.fleet_client.hub_epoch().await
    }

    /// Waits until the agent has a session with this hub.
    async fn wait_for_session(&self, hub: &str) {
        self.hubs[hub]
            .wait_for_log("session started")
            .await
            .unwrap();
    }

    async fn wait_connected(&self) -> Result<EdgeCluster> {
        let connected = [CONNECTED];
        self.fleet_client.wait_for_member(EDGE, &connected).await
    }

    /// Creates a Tenant on the edge cluster, and waits until home shows the member in its status.
    async fn create_tenant(&self, name: &str) {
        let edge = FleetClient::new(&self.edge);
        edge.install(name).await.unwrap();
        self.wait_for_counts(name).await;
    }

    /// Waits until home's EdgeCluster counts all Tenants of the edge cluster.
    async fn wait_for_counts(&self, what: &str) {
        let edge_tenants = FleetClient::new(&self.edge).tenants();
        let members: Api<EdgeCluster> = Api::all(self.fleet_client.client.clone());
        eventually(
            &format!("home to count the Tenants, after {what}"),
            async || {
                let edge_tenants = edge_tenants.list(&Default::default()).await?.items.len();
                let status = members.get(EDGE).await?.status.unwrap_or_default();
                let ready = status.tenants.map(|tenants| tenants.ready);
                match ready {
                    Some(ready) if usize::try_from(ready)? == edge_tenants => Ok(Some(())),
                    ready => bail!("{ready:?} of {edge_tenants}"),
                }
            },
        )
        .await
        .unwrap();
    }
}

/// The history of the member's Connected condition.
struct ConditionHistory {
    reasons: Arc<Mutex<Vec<String>>>,
    _watching: JoinHandle<()>,
}

impl ConditionHistory {
    /// Returns when the member has a condition.
    async fn start(fleet_client: &FleetClient) -> Self {
        let members: Api<EdgeCluster> = Api::all(fleet_client.client.clone());
        let reasons = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&reasons);
        let watching = tokio::spawn(async move {
            let events = watcher(members, watcher::Config::default())
                .default_backoff()
                .applied_objects();
            let mut events = std::pin::pin!(events);
            while let Some(event) = events.next().await {
                let Ok(member) = event else { continue };
                let conditions = member.status.unwrap_or_default().conditions;
                let connected = condition(&conditions, "Connected");
                let reason = connected.map(|it| it.reason.clone()).unwrap_or_default();
                sink.lock().push(reason);
            }
        });
        let watched = Self {
            reasons,
            _watching: watching,
        };
        eventually("the member to be watched", async || {
            Ok((!watched.reasons().is_empty()).then_some(()))
        })
        .await
        .unwrap();
        watched
    }

    fn reasons(&self) -> Vec<String> {
        self.reasons.lock().clone()
    }
}

async fn killed_leader_is_replaced_and_sessions_return(mode: Mode) -> TestResult {
    let mut stage = HubSet::new("followed", &["a", "b"]).await?;
    let _member = stage.join(mode).await?;
    stage.wait_connected().await?;
    stage.create_tenant("first").await;
    let releases = FleetClient::new(&stage.edge).releases().await?;
    let epoch = stage.epoch().await?;
    let watched = ConditionHistory::start(&stage.fleet_client).await;

    let leader = stage.wait_for_other_leader("").await?;
    stage.hub(&leader).kill9().await?;
    let next = stage.wait_for_other_leader(&leader).await?;
    eventually("a new epoch", async || {
        Ok((stage.epoch().await.unwrap() > epoch).then_some(()))
    })
    .await?;
    assert_eq!(stage.epoch().await?, epoch + 1);
    stage.wait_for_session(&next).await;
    stage.create_tenant("second").await;
    stage.wait_connected().await?;
    let reasons = watched.reasons();
    assert!(
        reasons.iter().all(|reason| reason == "Connected"),
        "{reasons:?}"
    );
    let mut now = FleetClient::new(&stage.edge).releases().await?;
    now.retain(|name, _| !name.contains("second"));
    assert_eq!(now, releases, "nothing was installed again");
    for name in ["first", "second"] {
        let events = FleetClient::new(&stage.edge).events(name).await?;
        for done in ["WorkspaceCreated", "HelmInstallStart", "HelmInstalled"] {
            assert_eq!(events.get(done), Some(&1), "{name}: {events:?}");
        }
    }
    // Its replacement becomes a standby.
    stage.start(&leader).await;
    assert_eq!(stage.wait_for_other_leader(&leader).await?, next);
    assert_eq!(stage.epoch().await?, epoch + 1);
    Ok(())
}

#[tokio::test]
async fn ca_rotation_survives_leader_changes_without_lockout() -> TestResult {
    let mut stage = HubSet::new("rotated", &["a", "b", "c"]).await?;
    let _member = stage.join(Mode::Agent).await?;
    stage.wait_connected().await?;
    stage.create_tenant("first").await;
    let rotate = async |home: &Cluster, extra_args: &[&str]| {
        let args = [&["rotate-ca", "--hub-namespace", HUB_NAMESPACE], extra_args].concat();
        kubectl_krypton(home, &args).await
    };
    let forced = rotate(&stage.home, &["--force"]).await.unwrap_err();
    assert!(forced.to_string().contains("nothing to force"), "{forced}");
    let ca = (HUB_NAMESPACE, names::CA_SECRET);
    let previous = secret_field(&stage.home, ca, "ca\\.crt").await?;
    rotate(&stage.home, &[]).await?;
    for phase in ["Announced", "Switched"] {
        eventually(&format!("the phase {phase}"), async || {
            let status = rotate(&stage.home, &["--status"]).await?;
            // The work may have progressed.
            let past = status.starts_with(phase) || status.contains("the last one ended");
            ensure!(
                past || (phase == "Announced" && status.starts_with("Switched")),
                "{status}"
            );
            Ok(Some(()))
        })
        .await?;
        let leader = stage.wait_for_other_leader("").await?;
        stage.hub(&leader).kill9().await?;
        stage.wait_for_other_leader(&leader).await?;
        stage.start(&leader).await;
    }
    eventually("the rotation to end", async || {
        let status = rotate(&stage.home, &["--status"]).await?;
        ensure!(status.contains("the last one ended"), "{status}");
        Ok(Some(()))
    })
    .await?;
    let root = secret_field(&stage.home, ca, "ca\\.crt").await?;
    assert_ne!(root, previous);
    for key in ["former\\.crt", "next\\.key"] {
        assert_eq!(secret_field(&stage.home, ca, key).await?, "", "{key}");
    }
    eventually("the agent to trust only the new root", async || {
        let identity = ("krypton-system", "krypton-agent-identity");
        let trusted = secret_field(&stage.edge, identity, "ca\\.crt").await?;
        Ok((trusted == root).then_some(()))
    })
    .await?;
    stage.create_tenant("second").await;
    stage.wait_connected().await?;
    Ok(())
}

/// Returns a field of a Secret in base64.
async fn secret_field(
    cluster: &Cluster,
    (namespace, name): (&str, &str),
    key: &str,
) -> Result<String> {
    let field = format!("--output=jsonpath={{.data.{key}}}");
    let args = ["get", "secret", name, "--namespace", namespace, &field];
    cluster.kubectl(args).await
}

/// Orders from a revoked deletion are the most harmful result of outdated information.
#[tokio::test]
async fn stale_hub_does_not_uninstall_orphaned_member() -> TestResult {
    let mut stage = HubSet::new("let-go", &[]).await?;
    stage.add_hubs(&["a", "b"]);
    let proxy = AnsweringProxy::start(&stage.home).await?;
    stage.proxy_kubeconfigs.insert("b", proxy.kubeconfig());
    for name in ["a", "b"] {
        stage.start(name).await;
    }
    assert_eq!(stage.wait_for_other_leader("").await?, "a");
    let mut member = stage.join(Mode::Agent).await?;
    stage.wait_connected().await?;
    stage.create_tenant("acme").await;
    let releases = FleetClient::new(&stage.edge).releases().await?;
    let members: Api<EdgeCluster> = Api::all(stage.fleet_client.client.clone());
    let policy = json!({"deletionPolicy": "Uninstall"});
    stage.fleet_client.patch_member(EDGE, policy).await?;
    eventually("the EdgeCluster to have its finalizer", async || {
        let held = members.get(EDGE).await?;
        let held = held.finalizers() == [names::UNINSTALL_FINALIZER];
        Ok(held.then_some(()))
    })
    .await?;

    // The member is disconnected, so its deletion waits. Both hubs have observed the deletion.
    member.agent().unwrap().stop().await?;
    let of_nothing = ResponseFault {
        verbs: READ_VERBS,
        resources: &["nothing"],
        response: FalseResponse::Status(500),
    };
    proxy.inject(of_nothing);
    members.delete(EDGE, &DeleteParams::default()).await?;
    eventually("hub b to observe the deletion", async || {
        let read = (Verb::Get, "edgeclusters".to_owned());
        Ok(proxy.forwarded_requests().contains_key(&read).then_some(()))
    })
    .await?;

    // Hub b no longer receives EdgeClusters. A user orphans the member's releases, and the leader removes the
    // EdgeCluster.
    proxy.inject(ResponseFault {
        resources: &["edgeclusters"],
        ..of_nothing
    });
    let orphan = json!({"metadata": {"annotations": {names::ORPHAN_ANNOTATION: "true"}}});
    members.merge(EDGE, &orphan).await?;
    wait_until_gone(&members, EDGE).await?;
    stage.hub("a").kill9().await?;
    assert_eq!(stage.wait_for_other_leader("a").await?, "b");
    member.start_again(&stage.edge)?;
    let logs = async |agent: &mut Membership, what: &str| {
        agent.agent().unwrap().wait_for_log(what).await.unwrap();
    };
    // Hub b rejects the agent and sends it no order from the outdated state.
    logs(&mut member, "does not know its members yet").await;
    proxy.forward_all();
    logs(&mut member, "does not exist").await;
    let now = FleetClient::new(&stage.edge).releases().await?;
    assert_eq!(now, releases);
    let log = member.agent().unwrap().log()?;
    assert!(!log.contains("in session with the hub"), "{log}");
    Ok(())
}
