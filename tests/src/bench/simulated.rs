//! Agents without clusters, built from the agent's own dialer, session and report store over mutual TLS. Only the
//! cluster is simulated, and the reconciler sends the reports of an idle one.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Secret;
use krypton_agent::session::{self, Link, Session, connect::Dialer};
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec};
use krypton_hub::ca::Authority;
use krypton_reconciler::report_store::ReportStore;
use krypton_runtime::newest::NewestSeen as _;
use krypton_tests::{
    Cluster, Hub, agent::enrolled_dialer, eventually_within, fleet::HUB_NAMESPACE,
};
use krypton_types::{
    conditions::{ClusterState, State, Truth, reason},
    desired::{DesiredState, Version},
    member::MemberReport,
    names::CA_SECRET,
    tenant::{TenantKey, TenantReport},
};
use kube::{Api, ResourceExt, api::PostParams};
use parking_lot::Mutex;
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{CHART, CHART_VERSION};

/// Deadline for all agents to reach a state.
pub(crate) const DEADLINE: Duration = Duration::from_secs(180);
const CREATE_CONCURRENCY: usize = 16;
pub(crate) const REPLICA: &str = "one";
pub(crate) const KUBERNETES_VERSION: &str = "v1.36.0-simulated";
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A member's name and the UID of its EdgeCluster, to which its certificate is bound.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) uid: String,
}

/// An enrolled agent that is not running yet.
#[derive(Debug)]
pub(crate) struct Enrolled {
    pub(crate) name: String,
    pub(crate) dialer: Arc<Dialer>,
}

/// Running agents. Dropping this value stops them.
#[derive(Debug)]
pub(crate) struct Agents {
    agents: Vec<Arc<SimulatedAgent>>,
    // Each agent has two tasks, which stop when this is dropped.
    _tasks: JoinSet<()>,
    _stop: DropGuard,
}

#[derive(Debug)]
struct SimulatedAgent {
    report_store: Arc<ReportStore>,
    observation: Mutex<AgentObservation>,
}

/// Observations of an agent about its hub.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AgentObservation {
    /// Start of the current session. `None` while disconnected.
    pub(crate) up: Option<Instant>,
    /// End of the latest session. `None` until the first session ends.
    pub(crate) ended: Option<Instant>,
    /// The latest desired state and the time of its arrival.
    pub(crate) desired: Option<(Version, Instant)>,
}

/// Creates EdgeClusters with these names.
pub(crate) async fn create_members(
    home: &Cluster,
    names: impl Iterator<Item = String>,
) -> Result<Vec<Member>> {
    let api: Api<EdgeCluster> = Api::all(home.client());
    let creations = names.map(|name| {
        let api = api.clone();
        async move {
            let object = EdgeCluster::new(&name, EdgeClusterSpec::default());
            let created = api.create(&PostParams::default(), &object).await?;
            let uid = created.uid().context("an EdgeCluster without a UID")?;
            Ok::<_, anyhow::Error>(Member { name, uid })
        }
    });
    let creating = stream::iter(creations).buffered(CREATE_CONCURRENCY);
    creating.try_collect().await.context("making EdgeClusters")
}

/// Issues certificates from the hub's CA, once the hub has created it.
pub(crate) async fn enroll(home: &Cluster, hub: &Hub, members: &[Member]) -> Result<Vec<Enrolled>> {
    let client = home.client();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), HUB_NAMESPACE);
    eventually_within("the hub's CA", DEADLINE, async || {
        Ok(secrets.get_opt(CA_SECRET).await?.map(drop))
    })
    .await?;
    let authority = Authority::load_or_create(client, HUB_NAMESPACE, "bench.krypton").await?;
    let hub = hub.agents_address().to_string();
    let enroll = |member| Enrolled::new(&authority, member, &hub);
    members.iter().map(enroll).collect()
}

impl Enrolled {
    /// Creates an agent with its own key and certificate, as after enrollment.
    pub(crate) fn new(authority: &Authority, member: &Member, hub: &str) -> Result<Self> {
        let Member { name, uid } = member;
        Ok(Self {
            name: name.clone(),
            dialer: enrolled_dialer(authority, (name, uid), hub)?,
        })
    }
}

impl Agents {
    /// Starts all agents concurrently.
    pub(crate) fn start(enrolled: Vec<Enrolled>) -> Self {
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let agents = enrolled
            .into_iter()
            .map(|Enrolled { name, dialer }| {
                let (desired, desired_receiver) = watch::channel(None);
                let (link, link_receiver) = watch::channel(Link::default());
                let agent = Arc::new(SimulatedAgent {
                    report_store: Arc::default(),
                    observation: Mutex::default(),
                });
                let session = Session {
                    dialer,
                    replica: REPLICA.to_owned(),
                    cluster_uid: format!("cluster-of-{name}"),
                    kubernetes_version: KUBERNETES_VERSION.to_owned(),
                    report_store: Arc::clone(&agent.report_store),
                    desired,
                    recorded: None,
                    link,
                    contact: watch::Sender::default(),
                };
                tasks.spawn(session::run(session, stop.clone()));
                tasks.spawn(reconcile(
                    Arc::clone(&agent),
                    link_receiver,
                    desired_receiver,
                ));
                agent
            })
            .collect();
        Self {
            agents,
            _tasks: tasks,
            _stop: stop.drop_guard(),
        }
    }

    /// Starts all agents concurrently, and waits until each has a session and a desired state.
    pub(crate) async fn start_and_wait(enrolled: Vec<Enrolled>) -> Result<Self> {
        let agents = Self::start(enrolled);
        let desired_at = |observation: &AgentObservation| {
            observation.up.and(observation.desired).map(|(_, at)| at)
        };
        agents
            .wait_for_all("have a desired state", desired_at)
            .await?;
        Ok(agents)
    }

    /// Reports `each` Ready Tenants from every agent.
    pub(crate) fn report_tenants(&self, each: u32) {
        let report = installed_report();
        for agent in &self.agents {
            for number in 0..each {
                let report = Some(report.clone());
                agent.report_store.set_tenant(&tenant_key(number), report);
            }
        }
    }

    /// Sets the report of one agent about one Tenant.
    ///
    /// # Panics
    /// Panics if the agent doesn't exist.
    pub(crate) fn report(&self, index: usize, key: &TenantKey, report: Option<TenantReport>) {
        self.agents[index].report_store.set_tenant(key, report);
    }

    /// Waits until `wanted` returns a time for every agent. Returns the times in ascending order.
    pub(crate) async fn wait_for_all(
        &self,
        what: &str,
        select_time: impl Fn(&AgentObservation) -> Option<Instant>,
    ) -> Result<Vec<Instant>> {
        let end = Instant::now() + DEADLINE;
        loop {
            let known_times = self
                .agents
                .iter()
                .filter_map(|agent| select_time(&agent.observation.lock()));
            let mut times: Vec<Instant> = known_times.collect();
            if times.len() == self.agents.len() {
                times.sort();
                return Ok(times);
            }
            if Instant::now() > end {
                let (count, all) = (times.len(), self.agents.len());
                bail!("{count} of {all} simulated agents {what} after {DEADLINE:?}");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until the session of this agent ends, and returns the time.
    pub(crate) async fn wait_for_session_end(&self, index: usize) -> Result<Instant> {
        let agent = self.agents.get(index).context("the agent doesn't exist")?;
        let what = format!("the session of simulated agent {index} to end");
        eventually_within(&what, DEADLINE, async || Ok(agent.observation.lock().ended)).await
    }

    pub(crate) fn count(&self) -> usize {
        self.agents.len()
    }

    /// Returns the latest version of the desired state across all agents.
    pub(crate) fn version(&self) -> Option<Version> {
        let versions = self
            .agents
            .iter()
            .map(|agent| agent.observation.lock().desired);
        versions.flatten().map(|(version, _)| version).max()
    }
}

/// Stands in for a reconciler: holds the Lease and applies each desired state immediately.
async fn reconcile(
    agent: Arc<SimulatedAgent>,
    mut link: watch::Receiver<Link>,
    mut desired: watch::Receiver<Option<Arc<DesiredState>>>,
) {
    loop {
        tokio::select! {
            changed = link.changed() => {
                if changed.is_err() {
                    return;
                }
                let up = link.get_and_update().is_up();
                let mut observation = agent.observation.lock();
                if !up && observation.up.is_some() {
                    observation.ended = Some(Instant::now());
                }
                observation.up = up.then(Instant::now);
            }
            changed = desired.changed() => {
                if changed.is_err() {
                    return;
                }
                let Some(newest) = desired.get_and_update() else {
                    continue;
                };
                agent.observation.lock().desired = Some((newest.version, Instant::now()));
                agent.report_store.set_member(&idle_report(&newest));
            }
        }
    }
}

fn idle_report(desired: &DesiredState) -> MemberReport {
    MemberReport {
        synced: true,
        ready: true,
        writing: true,
        connected: true,
        holder: Some(format!("agent/{REPLICA}")),
        applied: Some((desired.version, desired.digest())),
        ..MemberReport::default()
    }
}

pub(crate) fn tenant_key(number: u32) -> TenantKey {
    TenantKey::new("default", super::name(number))
}

pub(crate) fn installed_report() -> TenantReport {
    let state = |truth, reason: &str| State::new(truth, reason, "");
    let state = ClusterState {
        ready: state(Truth::True, reason::INSTALLED),
        progress: Some(state(Truth::False, reason::INSTALL_COMPLETE)),
        error: Some(state(Truth::False, reason::NO_ERROR)),
    };
    TenantReport {
        applied_chart: format!("https://charts.example.org/{CHART}:{CHART_VERSION}"),
        ..TenantReport::new(1, state)
    }
}
