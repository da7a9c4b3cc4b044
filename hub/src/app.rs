//! Starts and stops the hub's process.

mod chart;
mod home_crds;
mod parts;
mod providers;
mod shutdown;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::Context as _;
use krypton_helm::driver::{Processes, Supervisor};
use krypton_reconciler::plan::Policy;
use krypton_reconciler::run_loop::Tools;
use krypton_runtime::access::ClusterConfig;
use krypton_runtime::admin::{AdminContent, AdminPorts, Readiness};
use krypton_runtime::events::EventRecorder;
use krypton_runtime::lease::LeaseTimes;
use krypton_runtime::net::{Listener, Network, Tcp};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::retry::{StartupGrace, retry_until_ready};
use krypton_runtime::tasks::Tasks;
use krypton_runtime::telemetry::Log;
use krypton_runtime::watchdog::Watchdog;
use krypton_runtime::{chance, clock, signals};
use krypton_types::desired::DesiredState;
use kube::Client;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use self::chart::ChartFollower;
use self::parts::Engine;
use self::shutdown::Shutdown;
use crate::agent_server::session::Sessions;
use crate::agent_server::{self, AgentServer, listener};
use crate::args::Settings;
use crate::chart::credentials::{self, ChartCredentials};
use crate::chart::values::ValuesReadings;
use crate::chart::values_reader::ValuesReader;
use crate::chart::values_status::ValuesStatus;
use crate::deployments;
use crate::discovery::named_secrets::{NamedSecrets, SecretReferences, SecretStates};
use crate::discovery::{self, SourceKind, Sources};
use crate::edgecluster::{self, AcceptedNamespaces, FleetChart, FleetInputs, MemberValues};
use crate::home::{self, HomeError};
use crate::home_events::HomeEvents;
use crate::leader::pod_label::LeaderLabel;
use crate::leader::{ElectionHandle, Leader, LeaderElection};
use crate::notify::{self, Notifier, Webhook};
use crate::observe::dump::{self, Dumper};
use crate::observe::fleet_tenants;
use crate::observe::member_metrics::{FleetView, HomeState};
use crate::observe::metrics;
use crate::proxy::{Shared, Tunnels};
use crate::tenants::{self, TenantSettings};

/// Maximum number of concurrent connection attempts. An unreachable member occupies one for 10 s out of
/// about 25 s. A large fleet has fewer such members, so reachable ones do not wait.
const MAX_CONNECTING: usize = 256;

const ELECTION_TASK: &str = "leader election";
const LABEL_TASK: &str = "leader label";
const AGENTS_TASK: &str = "agent server";
const FLEET_TASK: &str = "fleet";

/// The parts of a process that the operating system provides. [`Settings`] hold its environment.
#[derive(Debug)]
pub struct Outside {
    /// Stops the hub.
    pub stop: CancellationToken,
    pub watchdog: Watchdog,
    pub log: Log,
    pub network: Arc<dyn Network>,
    pub helm: Arc<dyn Processes>,
}

impl Outside {
    /// Returns the parts of this process. Signals stop it, and it may open more files.
    ///
    /// Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// Returns an error if the process cannot listen for signals or start the watchdog's thread.
    pub fn real(log: Log) -> anyhow::Result<Self> {
        raise_open_files_limit();
        Ok(Self {
            stop: signals::stop_on_signal()?,
            watchdog: Watchdog::start().context("starting the watchdog's thread failed")?,
            log,
            network: Arc::new(Tcp),
            helm: Arc::new(Supervisor::of_this_program()),
        })
    }
}

/// Runs the hub until it is stopped.
pub async fn run_in(settings: Settings, outside: Outside) -> anyhow::Result<()> {
    let watchdog = outside.watchdog.clone();
    let main = run_hub(Arc::new(settings), outside);
    watchdog.watch("the main loop", main).await
}

async fn run_hub(settings: Arc<Settings>, outside: Outside) -> anyhow::Result<()> {
    let Outside {
        stop,
        watchdog,
        log,
        network,
        helm,
    } = outside;
    let readiness = Readiness::new();
    let start_guard = readiness.guard("start");
    // Report mistakes on the command line before any side effect.
    let ports = AdminPorts::bind(
        settings.health_probe_bind_address.as_ref(),
        settings.metrics_bind_address.as_ref(),
        settings.debug_bind_address.as_ref(),
    )
    .await?;
    let agents_port = match &settings.listen {
        Some(address) => Some(network.listen(listener::LISTEN_FLAG, address).await?),
        None => None,
    };
    let values = chart::read_values_file(&settings).await?;
    let webhook = notify::open(&settings).await?;
    let (engine, credentials) = Engine::start(&settings, &watchdog, helm).await?;
    let view = Arc::new(FleetView::new(Arc::default()));
    let mut tasks = JoinSet::new();
    let content = admin_content(&settings, log, (&readiness, &watchdog), (&engine, &view));
    ports.serve(content, &mut tasks, &stop);
    let clearing_label = tokio::spawn(LeaderLabel::clear_stale(
        settings.pod.clone(),
        settings.home.local.clone(),
        readiness.clone(),
    ));
    let Some((home, client)) = reach_home(&settings, &stop).await? else {
        return Ok(());
    };
    if !home_crds::prepare(&settings, &client, &stop).await {
        return Ok(());
    }
    drop(start_guard);
    tracing::info!("home is ready");

    if let Some(secret) = chart_credentials(&settings, &client, &engine) {
        tasks.spawn(credentials::poll_secret(secret, credentials, stop.clone()));
    }
    let (version, pinned) = chart::resolve_version(&settings, &client, &engine, &stop).await;
    let (member_values, readings) = read_values(&settings, &client, &mut tasks, &stop);
    let process = (&readiness, &watchdog);
    let mut follower =
        ChartFollower::new(Arc::clone(&settings), version, values, readings, process);
    let (holder, instance) = names(&settings);
    let mut permanent = Tasks::new(watchdog.clone());
    // With a recorded version of a range, members get nothing before the record is read.
    let fleet_chart = pinned.is_none().then(|| follower.fleet_chart().clone());
    let cluster = (&home, &readiness);
    let election_handle = elect(
        &settings,
        &holder,
        &view,
        cluster,
        fleet_chart,
        &mut permanent,
    )?;
    let mut leader = election_handle.leader.clone();
    permanent.spawn(LABEL_TASK, run_label(clearing_label, leader.clone()));
    let notifier = start_notifier(webhook, &settings, &view, &leader, (&mut tasks, &stop));
    if let Some(pinned) = pinned {
        tasks.spawn(pinned.run(leader.clone(), notifier.clone(), stop.clone()));
    }
    let crds = home_crds::recreate_deleted(
        Arc::clone(&settings),
        client.clone(),
        leader.clone(),
        stop.clone(),
    );
    tasks.spawn(crds);
    let notices = HomeEvents::start(client.clone(), instance.clone(), leader.clone(), &watchdog)
        .with_notifier(notifier);
    let namespace = settings.namespace.clone();
    let mut values_status = ValuesStatus::new(notices.clone(), namespace, readiness.clone());
    // Read the channel only once: a new leader writes to it, and waits for readers.
    let current = follower.fleet_chart().get();
    values_status.report(current.problem.as_ref(), current.chart.is_some());
    let mut shutdown = Shutdown {
        election_handle,
        permanent,
        tasks,
        serving: CancellationToken::new(),
        home: CancellationToken::new(),
        stop: stop.clone(),
        failure: None,
    };
    let startup = Startup {
        settings: &settings,
        client: &client,
        engine: &engine,
        view: &view,
        holder: &holder,
        instance: &instance,
        notices: &notices,
        leader: &leader,
        watchdog: &watchdog,
        network: &*network,
    };
    let fleet_chart = follower.fleet_chart().subscribe();
    let home = settings.self_cluster.then(|| home.config.clone());
    let port = (agents_port, &readiness);
    startup
        .run(home, fleet_chart, member_values, port, &mut shutdown)
        .await?;

    loop {
        follower.publish(&leader, &mut values_status);
        tokio::select! {
            // First: a stop also ends all other tasks, and that is not an error.
            biased;
            () = stop.cancelled() => break,
            () = shutdown.task_ended() => {}
            () = follower.changed() => {}
            true = leader.changed() => follower.leader_changed(&leader, &mut values_status),
        }
    }
    shutdown.end().await
}

fn admin_content(
    settings: &Settings,
    log: Log,
    (readiness, watchdog): (&Readiness, &Watchdog),
    (engine, view): (&Engine, &Arc<FleetView>),
) -> AdminContent {
    let (drift, work) = (&engine.drift, &engine.work);
    let dumper = Dumper {
        replica: settings.reporting_instance.clone(),
        started: clock::wall(),
        view: Arc::clone(view),
        helm: Arc::clone(&engine.helm),
        charts: Arc::clone(&engine.charts),
        work: work.clone(),
    };
    AdminContent {
        readiness: readiness.clone(),
        watchdog: watchdog.clone(),
        registry: metrics::registry(Arc::clone(view), drift, work),
        level: log.level,
        debug: dump::router(Arc::new(dumper)).merge(fleet_tenants::router(Arc::clone(view))),
    }
}

/// Chooses the home cluster. `None` if the hub must stop before.
async fn reach_home(
    settings: &Settings,
    stop: &CancellationToken,
) -> anyhow::Result<Option<(ClusterConfig, Client)>> {
    let apiserver = StartupGrace::new();
    let is_retryable = |error: &HomeError| error.is_retryable(&apiserver);
    let choosing = retry_until_ready("home", stop, is_retryable, async || {
        home::choose(&settings.home, &settings.kubeconfig_policy()).await
    });
    let Some(home) = choosing.await? else {
        return Ok(None);
    };
    let client = home::client(home.config.clone())
        .context("failed to create a client of the home cluster")?;
    tracing::info!(context = %home.context_name, namespace = %settings.namespace,
        chart = %settings.chart.name, version = %settings.chart.version, "hub starts");
    for note in &settings.notes {
        tracing::warn!(%note, "check the settings");
    }
    Ok(Some((home, client)))
}

/// Returns the Secret with the charts' credentials, if the settings name one.
fn chart_credentials(
    settings: &Settings,
    client: &Client,
    engine: &Engine,
) -> Option<ChartCredentials> {
    Some(ChartCredentials {
        client: client.clone(),
        namespace: settings.namespace.clone(),
        name: settings.chart.credentials_secret.clone()?,
        charts: Arc::clone(&engine.charts),
    })
}

/// Starts to read the ConfigMaps and Secrets with values.
fn read_values(
    settings: &Settings,
    client: &Client,
    tasks: &mut JoinSet<()>,
    stop: &CancellationToken,
) -> (MemberValues, watch::Receiver<Arc<ValuesReadings>>) {
    let (requested, requested_rx) = watch::channel(BTreeSet::new());
    let (readings_tx, readings) = watch::channel(Arc::default());
    let member_values = MemberValues {
        fleet_sources: settings.chart_values_from.clone(),
        requested,
        readings: readings.clone(),
    };
    let reader = ValuesReader {
        client: client.clone(),
        namespace: settings.namespace.clone(),
        requested: requested_rx,
        readings: readings_tx,
    };
    member_values.request(std::iter::empty());
    tasks.spawn(reader.run(stop.clone()));
    (member_values, readings)
}

/// Keeps the leader's label on the pod, after the label of an earlier container is removed.
async fn run_label(clearing_label: JoinHandle<Option<LeaderLabel>>, leader: Leader) {
    let cleared = tokio::select! {
        cleared = clearing_label => cleared,
        () = leader.until_leaving() => return,
    };
    match cleared {
        Ok(Some(label)) => label.run(leader).await,
        Ok(None) => leader.until_leaving().await,
        Err(error) => tracing::error!(%error, "removing the leader's label failed"),
    }
}

/// Returns this hub's names in Leases and in events. The name in Leases is unique for each process, so two hubs
/// never confuse their Leases.
fn names(settings: &Settings) -> (String, String) {
    let instance = settings.reporting_instance.as_deref();
    let (name, number) = (instance.unwrap_or("local"), chance::random::<u32>());
    let holder = format!("hub/{name}/{number:08x}");
    (holder, instance.unwrap_or("krypton-hub").to_owned())
}

/// Starts to send notifications, if the settings name a webhook.
fn start_notifier(
    webhook: Option<Webhook>,
    settings: &Settings,
    view: &FleetView,
    leader: &Leader,
    (tasks, stop): (&mut JoinSet<()>, &CancellationToken),
) -> Notifier {
    let Some(webhook) = webhook else {
        return Notifier::default();
    };
    let counts = view.notifications.clone();
    let skip = settings.allow_chart_skip;
    let (notifier, sending) = Notifier::start(webhook, leader.clone(), counts, skip, stop.clone());
    tasks.spawn(sending);
    view.reports.set_notifier(notifier.clone());
    notifier
}

/// Takes part in the leader election: several hubs may run, and one of them writes on home and serves agents.
fn elect(
    settings: &Settings,
    holder: &str,
    view: &FleetView,
    (home, readiness): (&ClusterConfig, &Readiness),
    fleet_chart: Option<watch::Sender<FleetChart>>,
    permanent: &mut Tasks,
) -> anyhow::Result<ElectionHandle> {
    let members = Arc::clone(&view.members);
    let election = LeaderElection {
        client: home::client(home.config.clone())
            .context("failed to create a client of the home cluster")?,
        namespace: settings.namespace.clone(),
        holder: holder.to_owned(),
        times: LeaseTimes::for_leader(settings.lead),
        foreign_epoch: members.ahead().clone(),
        readiness: readiness.clone(),
    };
    let (election_handle, electing) = election.start(move |leader_term, is_new| {
        members.set_epoch(leader_term.epoch);
        if is_new {
            // Objects that this hub read on home earlier may be stale.
            members.begin_term(leader_term.since);
        }
        if let Some(fleet_chart) = &fleet_chart {
            fleet_chart.send_modify(|current| current.epoch = leader_term.epoch);
        }
    });
    permanent.spawn(ELECTION_TASK, electing);
    Ok(election_handle)
}

/// Inputs of the controllers.
struct Startup<'a> {
    settings: &'a Settings,
    client: &'a Client,
    engine: &'a Engine,
    view: &'a Arc<FleetView>,
    /// Name in Leases.
    holder: &'a str,
    /// Name in events.
    instance: &'a str,
    notices: &'a HomeEvents,
    leader: &'a Leader,
    watchdog: &'a Watchdog,
    network: &'a dyn Network,
}

impl Startup<'_> {
    /// Starts discovery, controllers, the agents' port and the fleet.
    async fn run(
        &self,
        home: Option<kube::Config>,
        fleet_chart: watch::Receiver<FleetChart>,
        member_values: MemberValues,
        (port, readiness): (Option<Listener>, &Readiness),
        shutdown: &mut Shutdown,
    ) -> anyhow::Result<()> {
        let (secret_references, references) = watch::channel(None);
        let (states, secret_states) = watch::channel(Arc::default());
        let sources = self.discover((references, states), &shutdown.stop);
        let shared = self.proxy_inputs(sources.clone()).await?;
        self.view.set_home_state(HomeState {
            leader: self.leader.clone(),
            chart: fleet_chart.clone(),
            allow_chart_skip: self.settings.allow_chart_skip,
        });
        self.start_home_writers(&shared, (secret_references, secret_states), shutdown);
        if let Some(listener) = port {
            self.serve_agents(listener, &shared, readiness, shutdown);
        }
        let fleet = self.fleet_inputs(home, sources, fleet_chart, member_values, shared);
        let running = edgecluster::run(fleet, shutdown.serving.clone());
        shutdown.permanent.spawn(FLEET_TASK, running);
        Ok(())
    }

    /// Starts to look for the members and for the Secrets that KryptonDeployments name.
    fn discover(
        &self,
        (references, states): (
            watch::Receiver<SecretReferences>,
            watch::Sender<SecretStates>,
        ),
        stop: &CancellationToken,
    ) -> watch::Receiver<Sources> {
        let (settings, discovery) = (self.settings, &self.settings.discovery);
        let access = &self.engine.profile_access;
        let mut providers = providers::providers(self.client, settings, access);
        let prefixes = discovery.member_prefixes.clone();
        let secret_prefix = prefixes.get(&SourceKind::Secret);
        // After the providers that find a Secret by its label, which take precedence.
        providers.push(Arc::new(NamedSecrets {
            client: self.client.clone(),
            references,
            states,
            label: discovery.label.clone(),
            key: discovery.key.clone(),
            prefix: secret_prefix.cloned().unwrap_or_default(),
            policy: settings.kubeconfig_policy(),
        }));
        discovery::start(providers, prefixes, self.watchdog, stop)
    }

    async fn proxy_inputs(&self, sources: watch::Receiver<Sources>) -> anyhow::Result<Arc<Shared>> {
        let (settings, engine) = (self.settings, self.engine);
        let account = settings.helm_account();
        let own_namespaces = [settings.namespace.clone()]
            .into_iter()
            .chain(account.map(|account| account.namespace().to_owned()));
        Ok(Arc::new(Shared {
            tools: Tools {
                helm: Arc::clone(&engine.helm),
                charts: Arc::clone(&engine.charts),
                drift: engine.drift.clone(),
                work: engine.work.clone(),
                watchdog: self.watchdog.clone(),
            },
            members: Arc::clone(&self.view.members),
            grace: settings.proxy_grace,
            scratch: engine.private.path().to_owned(),
            helm_account: settings.helm_account(),
            notices: self.notices.clone(),
            holder: self.holder.to_owned(),
            instance: self.instance.to_owned(),
            policy: Policy::new(settings.helm.timeout, own_namespaces),
            retry_max: settings.retry_max,
            allow_chart_skip: settings.allow_chart_skip,
            watch_namespaces: settings.watch_namespaces.clone(),
            sources,
            kubeconfig_policy: settings.kubeconfig_policy(),
            tunnels: Tunnels::start(self.network, settings.kubeconfig_policy()).await?,
            connecting: Semaphore::new(MAX_CONNECTING),
            watchdog: self.watchdog.clone(),
        }))
    }

    /// Starts the writers of Tenants' status and of KryptonDeployments.
    fn start_home_writers(
        &self,
        shared: &Shared,
        (secret_references, secret_states): (
            watch::Sender<SecretReferences>,
            watch::Receiver<SecretStates>,
        ),
        shutdown: &mut Shutdown,
    ) {
        let (settings, reports) = (self.settings, &self.view.reports);
        let members = &self.view.members;
        let tenant_settings = TenantSettings {
            self_cluster: settings.self_cluster,
            allow_chart_skip: settings.allow_chart_skip,
            namespaces: settings.watch_namespaces.clone(),
        };
        let placements = Arc::clone(members.placements());
        let (leader, stop) = (self.leader, &shutdown.home);
        let (client, instance) = (self.client.clone(), shared.instance.clone());
        let recorder = EventRecorder::start(client, instance, self.watchdog);
        let aggregating = tenants::run(
            self.client.clone(),
            Arc::clone(reports),
            tenant_settings,
            settings.place_tenants.then_some(placements),
            recorder,
            leader.clone(),
            stop.clone(),
        );
        let discovery = &settings.discovery;
        let deployment_controller = deployments::DeploymentController {
            client: self.client.clone(),
            deployments: Arc::clone(members.deployments()),
            members: Arc::clone(members),
            notices: shared.notices.clone(),
            secret_references,
            secret_states,
            namespaces: settings.watch_namespaces.clone(),
            discovery_namespace: discovery.namespace_of_secrets(&settings.namespace),
            // Under lockdown, only the label opens a Secret.
            open_namespaces: match settings.lockdown().no_cross_namespace_refs {
                true => BTreeSet::new(),
                false => discovery.open_namespaces(&settings.namespace),
            },
            check_interval: settings.check_interval,
            writes: reports.writes.clone(),
            reports: Arc::clone(reports),
        };
        let reconciling = deployments::run(deployment_controller, leader.clone(), stop.clone());
        let (members, stop) = (Arc::clone(members), stop.clone());
        let permanent = &mut shutdown.permanent;
        permanent.spawn("the aggregator", aggregating);
        permanent.spawn("keeping KryptonDeployments", reconciling);
        permanent.spawn("selecting the members' reporters", async move {
            members.run(stop).await;
        });
    }

    fn serve_agents(
        &self,
        listener: Listener,
        shared: &Shared,
        readiness: &Readiness,
        shutdown: &mut Shutdown,
    ) {
        let sessions = Sessions {
            members: Arc::clone(&self.view.members),
            metrics: Arc::clone(&self.view.sessions),
            events: shared.notices.clone(),
            hub_version: env!("CARGO_PKG_VERSION").to_owned(),
            last_number: AtomicU64::new(0),
            leader: self.leader.clone(),
            stop: shutdown.serving.clone(),
            watchdog: self.watchdog.clone(),
        };
        let server = AgentServer {
            client: self.client.clone(),
            namespace: self.settings.namespace.clone(),
            listener,
            advertise: self.settings.advertise.clone(),
            sessions: Arc::new(sessions),
            charts: Arc::clone(&self.engine.charts),
            fleet_view: Arc::clone(self.view),
            readiness_guard: readiness.guard("the agents' port"),
        };
        let serving = agent_server::run(server);
        shutdown.permanent.spawn(AGENTS_TASK, serving);
    }

    fn fleet_inputs(
        &self,
        home: Option<kube::Config>,
        sources: watch::Receiver<Sources>,
        fleet_chart: watch::Receiver<FleetChart>,
        member_values: MemberValues,
        shared: Arc<Shared>,
    ) -> FleetInputs {
        let settings = self.settings;
        FleetInputs {
            client: self.client.clone(),
            namespace: settings.namespace.clone(),
            home,
            sources,
            accepted_namespaces: AcceptedNamespaces(settings.discovery.accepted_namespaces.clone()),
            chart: fleet_chart,
            desired: DesiredState {
                drift: settings.drift(),
                chart_crds: settings.chart_crds,
                tenant_values: settings.tenant_values,
                handling: settings.handling(),
                lockdown: settings.lockdown(),
                namespaces: settings.workspace_namespaces(),
                ..DesiredState::default()
            },
            place_tenants: settings.place_tenants,
            member_values,
            leader: self.leader.clone(),
            shared,
            reports: Arc::clone(&self.view.reports),
        }
    }
}

/// Raises the limit of open files to its maximum. Each agent uses one, and the usual soft limit is 1,024.
fn raise_open_files_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, soft = ?limit.current, "failed to raise the limit of open files");
    }
}
