//! Runs a member with a stub hub that sends desired state and receives reports. The test decides the content of the
//! desired state.
//!
//! The actor on the member is the agent's library. It connects to the stub's port over mutual TLS, as an agent does, or
//! runs next to the stub as the proxy.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use arc_swap::ArcSwap;
use krypton_agent::session::{self, Link, Session, connect::Dialer};
use krypton_helm::{
    chart::ChartCache,
    driver::{Helm, HelmConfig, Supervisor},
};
use krypton_hub::{
    agent_server::{
        fleet_service::FleetService, listener, metrics::SessionMetrics, session::Sessions,
    },
    ca::{Authority, CurrentAuthority},
    edgecluster::publisher::{DesiredStatePublisher, MemberInputs, MemberOrder},
    home_events::HomeEvents,
    leader::Leader,
    members::{MemberRegistry, arbiter::ReporterId, member::PublishedState},
};
use krypton_reconciler::{
    drift::DriftMetrics,
    metrics::WorkMetrics,
    plan::Policy,
    report_store::ReportStore,
    run_loop::{self, Member, StatusMode, Tools},
};
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_runtime::{
    chance,
    clock::{self, BootTime},
    lease::LeaseGoal,
};
use krypton_tests::{
    Agent, ChartRepository, Cluster, Hub, Mode, agent::enrolled_dialer, eventually,
    install_tls_provider,
};
use krypton_types::{
    allowed_namespaces::AllowedNamespaces,
    conditions::Truth,
    deployment::{DeploymentKey, DeploymentReport, DesiredDeployment},
    desired::{ChartState, DesiredState, drift::DriftPolicy, namespaces::NamespaceConfiguration},
};
use serde_json::Value;
use tempfile::TempDir;
use tokio::{
    net::TcpListener,
    sync::watch,
    task::{JoinHandle, JoinSet},
};
use tokio_util::sync::{CancellationToken, DropGuard};

const NAME: &str = "edge-1";
const UID: &str = "uid-of-edge-1";
const TRUST_DOMAIN: &str = "test.krypton";

/// Dropping the stub stops everything. The supervisor stops Helm.
pub(crate) struct StubHub {
    mode: Mode,
    members: Arc<MemberRegistry>,
    publisher: DesiredStatePublisher,
    pub(crate) chart: ChartState,
    authority: Arc<CurrentAuthority>,
    port: SocketAddr,
    kubeconfig: PathBuf,
    client: kube::Client,
    scratch: TempDir,
    actor: Option<(CancellationToken, JoinHandle<()>)>,
    _tasks: JoinSet<()>,
    _stop: DropGuard,
}

impl StubHub {
    pub(crate) async fn start(
        mode: Mode,
        cluster: &Cluster,
        repository: &ChartRepository,
        chart: &str,
        drift: DriftPolicy,
    ) -> Result<Self> {
        install_tls_provider();
        let stop = CancellationToken::new();
        let members = Arc::new(MemberRegistry::default());
        members.get_or_create(NAME, UID);
        members.retain(|name| name == NAME, |_| false, |_| true);
        let scratch = TempDir::with_prefix("krypton-stub-").context("creating a folder")?;
        let charts = Arc::new(ChartCache::new(scratch.path().join("of-hub"))?);
        let authority = Authority::generate(TRUST_DOMAIN, clock::wall())?;
        let authority = Arc::new(CurrentAuthority::new(authority));
        let sessions = Sessions {
            members: Arc::clone(&members),
            metrics: Arc::<SessionMetrics>::default(),
            events: HomeEvents::discarding(),
            hub_version: env!("CARGO_PKG_VERSION").to_owned(),
            last_number: AtomicU64::new(0),
            watchdog: krypton_runtime::watchdog::Watchdog::default(),
            leader: Leader::always_leading(),
            stop: stop.clone(),
        };
        let metrics = Arc::clone(&sessions.metrics);
        let service = FleetService::new(Arc::new(sessions), charts, Arc::clone(&authority), None);
        let socket = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
        let port = socket.local_addr()?;
        let tls = listener::server_config(&authority.get(), clock::wall())?;
        let serving = listener::serve(
            Box::new(socket),
            Arc::new(ArcSwap::from_pointee(tls)),
            TRUST_DOMAIN.to_owned(),
            tonic::service::Routes::new(service.into_server()),
            metrics.port.clone(),
            stop.clone(),
        );
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { drop(serving.await) });
        let mut stub = Self {
            mode,
            members,
            publisher: DesiredStatePublisher::new(DesiredState {
                drift,
                ..DesiredState::default()
            }),
            chart: ChartState {
                repo: repository.url(),
                name: chart.to_owned(),
                version: "1.0.0".to_owned(),
                ..ChartState::default()
            },
            authority,
            port,
            kubeconfig: cluster.kubeconfig().to_owned(),
            client: cluster.client(),
            scratch,
            actor: None,
            _tasks: tasks,
            _stop: stop.drop_guard(),
        };
        stub.start_actor().await?;
        Ok(stub)
    }

    pub(crate) fn value(&mut self, name: &str, value: impl Into<Value>) {
        self.chart.values.insert(name.to_owned(), value.into());
    }

    /// Replaces the member's orders with these, as the fleet does.
    pub(crate) fn order(&mut self, orders: &[&DesiredDeployment]) {
        let deployments = self.members.deployments();
        let orders = orders.iter().copied().cloned().collect();
        deployments.set_orders([(NAME.to_owned(), orders)].into());
        let ordered = deployments.orders().get().unwrap_or_default();
        let inputs = MemberInputs {
            chart: &self.chart,
            is_override: false,
            namespaces: &NamespaceConfiguration::default(),
            deployments: ordered.get(NAME).map_or(&[], |orders| orders),
            placed: &[],
        };
        let member = self.members.get_or_create(NAME, UID);
        let before = member.published.get();
        let order = MemberOrder::default();
        let next = self
            .publisher
            .next(before.as_ref(), 1, &inputs, order, BootTime::now());
        if let Some(next) = next {
            member.published.send_replace(Some(next));
        }
    }

    pub(crate) fn report(&self, key: &DeploymentKey) -> Option<DeploymentReport> {
        let report = self.members.deployments().latest_report(NAME, key);
        report.map(|report| report.report)
    }

    /// Waits until the hub has a report for exactly this order that satisfies the predicate.
    pub(crate) async fn wait_for_report(
        &self,
        order: &DesiredDeployment,
        what: &str,
        is_expected: impl Fn(&DeploymentReport) -> bool,
    ) -> DeploymentReport {
        let expectation = format!("a report of {NAME} that {} is {what}", order.key());
        eventually(&expectation, async || match self.report(&order.key()) {
            Some(report)
                if report.uid == order.uid
                    && report.observed_generation == order.generation
                    && is_expected(&report) =>
            {
                Ok(Some(report))
            }
            report => bail!("{report:?}"),
        })
        .await
        .unwrap()
    }

    pub(crate) async fn wait_ready(
        &self,
        order: &DesiredDeployment,
        reason: &str,
    ) -> DeploymentReport {
        self.wait_for_readiness(order, Truth::True, reason).await
    }

    pub(crate) async fn wait_for_readiness(
        &self,
        order: &DesiredDeployment,
        truth: Truth,
        reason: &str,
    ) -> DeploymentReport {
        self.wait_for_report(order, reason, |report| {
            let ready = &report.state.ready;
            (ready.truth, ready.reason.as_str()) == (truth, reason)
        })
        .await
    }

    pub(crate) async fn wait_gone(&self, order: &DesiredDeployment) -> DeploymentReport {
        self.wait_for_report(order, "gone", |report| report.gone)
            .await
    }

    /// Waits until the member reports nothing about the order.
    pub(crate) async fn wait_until_silent(&self, order: &DesiredDeployment) {
        let key = order.key();
        let expectation = format!("no report about {key}");
        eventually(&expectation, async || match self.report(&key) {
            None => Ok(Some(())),
            report => bail!("{report:?}"),
        })
        .await
        .unwrap();
    }

    /// Stops the actor gracefully, and starts another one.
    pub(crate) async fn restart_actor(&mut self) -> Result<()> {
        if let Some((stop, task)) = self.actor.take() {
            stop.cancel();
            task.await.context("it failed")?;
        }
        self.start_actor().await
    }

    async fn start_actor(&mut self) -> Result<()> {
        let stop = CancellationToken::new();
        let actor = Actor {
            name: match self.mode {
                Mode::Agent => "agent/one",
                Mode::Proxy | Mode::SelfCluster => "hub/one/edge-1",
            },
            member: self.member(),
            tools: self.tools().await?,
            report_store: Arc::default(),
            published: self.members.get_or_create(NAME, UID).published.subscribe(),
            members: Arc::clone(&self.members),
            stop: stop.clone(),
        };
        let task = match self.mode {
            Mode::Agent => {
                let hub = self.port.to_string();
                let dialer = enrolled_dialer(&self.authority.get(), (NAME, UID), &hub)?;
                tokio::spawn(actor.run_as_agent(dialer))
            }
            Mode::Proxy | Mode::SelfCluster => tokio::spawn(actor.run_as_proxy()),
        };
        self.actor = Some((stop, task));
        Ok(())
    }

    fn member(&self) -> Member {
        Member {
            name: NAME.to_owned(),
            source_namespace: None,
            client: self.client.clone(),
            helm_client: self.client.clone(),
            kubeconfig: self.kubeconfig.clone(),
            holder: String::new(),
            lease_goal: watch::channel(LeaseGoal::Hold).1,
            instance: "one".to_owned(),
            program: "one",
            status_mode: StatusMode::Write,
            namespaces: None,
            allowed_namespaces: watch::channel(AllowedNamespaces::default()).1,
            retry_max: Duration::from_secs(5),
            policy: Policy::new(Duration::from_secs(180), []),
            on_excess: None,
        }
    }

    async fn tools(&self) -> Result<Tools> {
        let program = match self.mode {
            Mode::Agent => Agent::program()?,
            Mode::Proxy | Mode::SelfCluster => Hub::program()?,
        };
        let folder = self.scratch.path();
        let helm = Helm::new(HelmConfig {
            binary: krypton_tests::Tools::find()?.binary("helm"),
            processes: Arc::new(Supervisor::new(program, &["helm-run"])),
            scratch: folder.join("helm"),
            private: folder.join("private"),
            max_concurrent: 2,
            max_per_member: 2,
        });
        Ok(Tools {
            helm: Arc::new(helm.await?),
            charts: Arc::new(ChartCache::new(folder.join("charts"))?),
            drift: DriftMetrics::default(),
            work: WorkMetrics::default(),
            watchdog: krypton_runtime::watchdog::Watchdog::default(),
        })
    }
}

/// Components of an actor.
struct Actor {
    name: &'static str,
    member: Member,
    tools: Tools,
    report_store: Arc<ReportStore>,
    published: watch::Receiver<Option<PublishedState>>,
    members: Arc<MemberRegistry>,
    stop: CancellationToken,
}

impl Actor {
    /// Runs as the agent's process.
    async fn run_as_agent(self, dialer: Arc<Dialer>) {
        let (desired_tx, desired) = watch::channel(None);
        let session = Session {
            dialer,
            replica: "one".to_owned(),
            cluster_uid: "cluster".to_owned(),
            kubernetes_version: "v1.36.3".to_owned(),
            report_store: Arc::clone(&self.report_store),
            desired: desired_tx,
            recorded: None,
            link: watch::channel(Link::default()).0,
            contact: watch::Sender::default(),
        };
        let session_stop = CancellationToken::new();
        let session = tokio::spawn(session::run(session, session_stop.clone()));
        self.reconcile(desired).await;
        session_stop.cancel();
        drop(session.await);
    }

    /// Runs as the hub's proxy.
    async fn run_as_proxy(self) {
        let (desired_tx, desired) = watch::channel(None);
        let (mut published, report_store, members) = (
            self.published.clone(),
            Arc::clone(&self.report_store),
            Arc::clone(&self.members),
        );
        let mut resync_requests = members.open(NAME, ReporterId::Proxy, BootTime::now());
        let forwarding = tokio::spawn(async move {
            let mut complete = Some(0);
            published.mark_changed();
            loop {
                tokio::select! {
                    changes = report_store.changes() => {
                        members.report(NAME, ReporterId::Proxy, changes, complete.take(), BootTime::now());
                    }
                    Ok(()) = resync_requests.changed() => {
                        report_store.resend();
                        complete = Some(resync_requests.get_and_update());
                    }
                    Ok(()) = published.changed() => {
                        let published = published.get_and_update();
                        desired_tx.send_replace(published.as_ref().map(|published| Arc::clone(&published.desired)));
                    }
                }
            }
        });
        let members = Arc::clone(&self.members);
        self.reconcile(desired).await;
        forwarding.abort();
        members.close(NAME, ReporterId::Proxy, BootTime::now());
    }

    /// Waits for the first desired state, then reconciles.
    async fn reconcile(self, mut slot: watch::Receiver<Option<Arc<DesiredState>>>) {
        let first = tokio::select! {
            () = self.stop.cancelled() => return,
            first = slot.wait_for(Option::is_some) => first.ok().and_then(|first| first.clone()),
        };
        let Some(first) = first else { return };
        let (desired_tx, desired) = watch::channel(first);
        let forwarding = tokio::spawn(async move {
            while slot.changed().await.is_ok() {
                if let Some(next) = slot.get_and_update() {
                    desired_tx.send_replace(next);
                }
            }
            std::future::pending::<()>().await;
        });
        let member = Member {
            holder: format!("{}/{:08x}", self.name, chance::random::<u32>()),
            ..self.member
        };
        run_loop::run(member, self.tools, desired, self.report_store, self.stop).await;
        forwarding.abort();
    }
}

/// Labels of the release's newest revision.
pub(crate) type Labels = BTreeMap<String, String>;
