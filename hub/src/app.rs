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
use krypton_runtime::admin::{Ports, Readiness, Served};
use krypton_runtime::events::EventRecorder;
use krypton_runtime::lease::Times;
use krypton_runtime::net::{Listener, Network, Tcp};
use krypton_runtime::newest::Newest as _;
use krypton_runtime::retry::{StartupGrace, retry_until_ready};
use krypton_runtime::tasks::Tasks;
use krypton_runtime::telemetry::Log;
use krypton_runtime::watchdog::Watchdog;
use krypton_runtime::{chance, clock, signals};
use kube::Client;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use self::chart::{ChartFollower, Version};
use self::parts::{Engine, Observed};
use self::shutdown::Shutdown;
use crate::agent_server::session::Sessions;
use crate::agent_server::{self, Gateway, listener};
use crate::args::Settings;
use crate::chart::credentials::{self, ChartCredentials};
use crate::chart::values::Readings;
use crate::chart::values_reader::Follow;
use crate::chart::values_status::Teller;
use crate::deployments;
use crate::discovery::named_secrets::{Findings, Named, NamedSecrets};
use crate::discovery::{self, Sources};
use crate::edgecluster::{self, Accepting, Fleet, FleetChart, Overlaying};
use crate::home::{self, Home, HomeError};
use crate::leader::pod_label::Label;
use crate::leader::{ElectionHandle, Leader, LeaderElection};
use crate::members::MemberRegistry;
use crate::notices::HomeEvents;
use crate::observe::dump::{self, Dumper};
use crate::observe::fleet_tenants;
use crate::observe::member_metrics::Acting;
use crate::observe::metrics;
use crate::proxy::{Shared, Tunnels};
use crate::tenants::{self, Rules};

/// Maximum number of concurrent connection attempts. An unreachable member occupies one for 10 s out of
/// about 25 s. A large fleet has fewer such members, so reachable ones do not wait.
const CONNECTING: usize = 256;

const LEAD: &str = "leader election";
const LABEL: &str = "leader label";
const AGENTS: &str = "agent server";
const FLEET: &str = "fleet";

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
        allow_connections();
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
    let main = main_loop(Arc::new(settings), outside);
    watchdog.watch("the main loop", main).await
}

async fn main_loop(settings: Arc<Settings>, outside: Outside) -> anyhow::Result<()> {
    let Outside {
        stop,
        watchdog,
        log,
        network,
        helm,
    } = outside;
    let readiness = Readiness::new();
    let starting = readiness.guard("start");
    // Report mistakes on the command line before any side effect.
    let ports = Ports::bind(
        settings.health_probe_bind_address.as_ref(),
        settings.metrics_bind_address.as_ref(),
        settings.debug_bind_address.as_ref(),
    )
    .await?;
    let agents_port = match &settings.listen {
        Some(address) => Some(network.listen(listener::LISTEN_FLAG, address).await?),
        None => None,
    };
    let values = chart::values_of_file(&settings).await?;
    let (engine, credentials) = Engine::start(&settings, &watchdog, helm).await?;
    let observed = Observed::new();
    let mut tasks = JoinSet::new();
    let served = served(
        &settings,
        log,
        (&readiness, &watchdog),
        (&engine, &observed),
    );
    ports.serve(served, &mut tasks, &stop);
    let clearing = tokio::spawn(Label::cleared(
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
    drop(starting);
    tracing::info!("home is ready");

    if let Some(name) = settings.chart.credentials_secret.clone() {
        let secret = ChartCredentials {
            client: client.clone(),
            namespace: settings.namespace.clone(),
            name,
            charts: Arc::clone(&engine.charts),
        };
        tasks.spawn(credentials::keep(secret, credentials, stop.clone()));
    }
    let mut version = Version::look_up(&settings, &client, &engine, &stop).await;
    let (overlaying, readings) = read_values(&settings, &client, &mut tasks, &stop);
    let process = (&readiness, &watchdog);
    let mut follower =
        ChartFollower::new(Arc::clone(&settings), &version, values, readings, process);
    let pinned = version.pinned.take();
    let control = Control::new(&settings, &observed, pinned.is_some(), follower.given());
    let mut lasting = Tasks::new(watchdog.clone());
    let election_handle = control.elect(&home, &readiness, &mut lasting)?;
    let mut lead = election_handle.lead.clone();
    lasting.spawn(LABEL, label(clearing, lead.clone()));
    if let Some(pinned) = pinned {
        tasks.spawn(pinned.keep(lead.clone(), stop.clone()));
    }
    let crds = home_crds::keep(
        Arc::clone(&settings),
        client.clone(),
        lead.clone(),
        stop.clone(),
    );
    tasks.spawn(crds);
    let instance = control.instance.clone();
    let notices = HomeEvents::start(client.clone(), instance, lead.clone(), &watchdog);
    let namespace = settings.namespace.clone();
    let mut teller = Teller::new(notices.clone(), namespace, readiness.clone());
    // Read the channel only once: a new leader writes to it, and waits for readers.
    let now = follower.given().get();
    teller.tell(now.problem.as_ref(), now.chart.is_some());
    let mut shutdown = Shutdown {
        election_handle,
        lasting,
        tasks,
        serving: CancellationToken::new(),
        home: CancellationToken::new(),
        stop: stop.clone(),
        broken: None,
    };
    let starting = Starting {
        settings: &settings,
        client: &client,
        engine: &engine,
        observed: &observed,
        control: &control,
        notices: &notices,
        lead: &lead,
        watchdog: &watchdog,
    };
    let given = follower.given().subscribe();
    let home = settings.self_cluster.then(|| home.config.clone());
    let port = (agents_port, &readiness);
    starting
        .run(home, given, overlaying, port, &mut shutdown)
        .await?;

    loop {
        follower.give(&lead, &mut teller);
        tokio::select! {
            // First: a stop also ends all other tasks, and that is not an error.
            biased;
            () = stop.cancelled() => break,
            () = shutdown.task_ended() => {}
            () = follower.changed() => {}
            true = lead.changed() => follower.lead_changed(&lead, &mut teller),
        }
    }
    shutdown.end().await
}

fn served(
    settings: &Settings,
    log: Log,
    (readiness, watchdog): (&Readiness, &Watchdog),
    (engine, observed): (&Engine, &Observed),
) -> Served {
    let view = &observed.view;
    let (drift, work) = (&engine.drift, &engine.work);
    let dumper = Dumper {
        replica: settings.reporting_instance.clone(),
        started: clock::wall(),
        view: Arc::clone(view),
        helm: Arc::clone(&engine.helm),
        charts: Arc::clone(&engine.charts),
        work: work.clone(),
    };
    Served {
        readiness: readiness.clone(),
        watchdog: watchdog.clone(),
        registry: metrics::registry(Arc::clone(view), &observed.sessions, drift, work),
        level: log.level,
        debug: dump::router(Arc::new(dumper)).merge(fleet_tenants::router(Arc::clone(view))),
    }
}

/// Chooses the home cluster. `None` if the hub must stop before.
async fn reach_home(
    settings: &Settings,
    stop: &CancellationToken,
) -> anyhow::Result<Option<(Home, Client)>> {
    let apiserver = StartupGrace::new();
    let may_pass = |error: &HomeError| error.may_pass(&apiserver);
    let choosing = retry_until_ready("home", stop, may_pass, async || {
        Home::choose(&settings.home, &settings.kubeconfig_policy()).await
    });
    let Some(home) = choosing.await? else {
        return Ok(None);
    };
    let client = home::client(home.config.clone())
        .context("failed to create a client of the home cluster")?;
    tracing::info!(context = %home.context_name, namespace = %settings.namespace,
        chart = %settings.chart.name, version = %settings.chart.version, "hub starts");
    for note in &settings.notes {
        tracing::warn!("{note}");
    }
    Ok(Some((home, client)))
}

/// Starts to read the ConfigMaps and Secrets with values.
fn read_values(
    settings: &Settings,
    client: &Client,
    tasks: &mut JoinSet<()>,
    stop: &CancellationToken,
) -> (Overlaying, watch::Receiver<Arc<Readings>>) {
    let (wanted, wanted_rx) = watch::channel(BTreeSet::new());
    let (readings_tx, readings) = watch::channel(Arc::default());
    let overlaying = Overlaying {
        fixed: settings.chart_values_from.clone(),
        wanted,
        readings: readings.clone(),
    };
    let following = Follow {
        client: client.clone(),
        namespace: settings.namespace.clone(),
        wanted: wanted_rx,
        readings: readings_tx,
    };
    overlaying.ask(std::iter::empty());
    tasks.spawn(following.run(stop.clone()));
    (overlaying, readings)
}

/// Keeps the leader's label on the pod, after the label of an earlier container is removed.
async fn label(clearing: JoinHandle<Option<Label>>, lead: Leader) {
    let cleared = tokio::select! {
        cleared = clearing => cleared,
        () = lead.left() => return,
    };
    match cleared {
        Ok(Some(label)) => label.keep(lead).await,
        Ok(None) => lead.left().await,
        Err(error) => tracing::error!(%error, "taking the label off ended badly"),
    }
}

/// The registry of members, and this hub's name.
struct Control {
    settings: Arc<Settings>,
    members: Arc<MemberRegistry>,
    given: watch::Sender<FleetChart>,
    /// Whether a recorded version resolves the chart's version range.
    pins: bool,
    /// Name in Leases, unique for each process, so two hubs never confuse their Leases.
    holder: String,
    /// Name in events.
    instance: String,
}

impl Control {
    fn new(
        settings: &Arc<Settings>,
        observed: &Observed,
        pins: bool,
        given: &watch::Sender<FleetChart>,
    ) -> Self {
        let instance = settings.reporting_instance.as_deref();
        Self {
            settings: Arc::clone(settings),
            members: Arc::clone(&observed.members),
            given: given.clone(),
            pins,
            holder: format!(
                "hub/{}/{:08x}",
                instance.unwrap_or("local"),
                chance::random::<u32>()
            ),
            instance: instance.unwrap_or("krypton-hub").to_owned(),
        }
    }

    /// Takes part in the leader election: several hubs may run, and one of them writes on home and serves agents.
    fn elect(
        &self,
        home: &Home,
        readiness: &Readiness,
        lasting: &mut Tasks,
    ) -> anyhow::Result<ElectionHandle> {
        let election = LeaderElection {
            client: home::client(home.config.clone())
                .context("failed to create a client of the home cluster")?,
            namespace: self.settings.namespace.clone(),
            holder: self.holder.clone(),
            times: Times::of_lead(self.settings.lead),
            ahead: self.members.ahead().clone(),
            readiness: readiness.clone(),
        };
        let members = Arc::clone(&self.members);
        let (given, pins) = (self.given.clone(), self.pins);
        let (election_handle, leading) = election.stand(move |leader_term, begins| {
            members.set_epoch(leader_term.epoch);
            if begins {
                // Objects that this hub read on home earlier may be stale.
                members.begin_term(leader_term.since);
            }
            // With a recorded version of a range, members get nothing before the record is read.
            if !pins {
                given.send_modify(|given| given.epoch = leader_term.epoch);
            }
        });
        lasting.spawn(LEAD, leading);
        Ok(election_handle)
    }
}

/// Sources of members, and the Secrets that KryptonDeployments name.
struct Discovered {
    sources: watch::Receiver<Sources>,
    named: watch::Sender<Named>,
    findings: watch::Receiver<Findings>,
}

/// Inputs of the controllers.
struct Starting<'a> {
    settings: &'a Settings,
    client: &'a Client,
    engine: &'a Engine,
    observed: &'a Observed,
    control: &'a Control,
    notices: &'a HomeEvents,
    lead: &'a Leader,
    watchdog: &'a Watchdog,
}

impl Starting<'_> {
    /// Starts discovery, controllers, the agents' port and the fleet.
    async fn run(
        &self,
        home: Option<kube::Config>,
        given: watch::Receiver<FleetChart>,
        overlaying: Overlaying,
        (port, readiness): (Option<Listener>, &Readiness),
        shutdown: &mut Shutdown,
    ) -> anyhow::Result<()> {
        let discovered = self.discover(&shutdown.stop);
        let sources = discovered.sources.clone();
        let shared = self.shared(sources.clone()).await?;
        self.observed.view.acts(Acting {
            lead: self.lead.clone(),
            given: given.clone(),
            allow_chart_skip: self.settings.allow_chart_skip,
        });
        self.write_home(&shared, discovered, shutdown);
        if let Some(listener) = port {
            self.serve_agents(listener, &shared, readiness, shutdown);
        }
        let fleet = self.fleet(home, sources, given, overlaying, shared);
        let running = edgecluster::run(fleet, shutdown.serving.clone());
        shutdown.lasting.spawn(FLEET, running);
        Ok(())
    }

    fn discover(&self, stop: &CancellationToken) -> Discovered {
        let (named, named_rx) = watch::channel(None);
        let (findings_tx, findings) = watch::channel(Arc::default());
        let (settings, discovery) = (self.settings, &self.settings.discovery);
        let access = &self.engine.profile_access;
        let mut providers = providers::providers(self.client, settings, access);
        // After the providers that find a Secret by its label, which take precedence.
        providers.push(Arc::new(NamedSecrets {
            client: self.client.clone(),
            named: named_rx,
            findings: findings_tx,
            label: discovery.label.clone(),
            key: discovery.key.clone(),
            policy: settings.kubeconfig_policy(),
        }));
        Discovered {
            sources: discovery::start(providers, self.watchdog, stop),
            named,
            findings,
        }
    }

    async fn shared(&self, sources: watch::Receiver<Sources>) -> anyhow::Result<Arc<Shared>> {
        let (settings, engine) = (self.settings, self.engine);
        let control = self.control;
        let account = settings.helm_account();
        let own = [settings.namespace.clone()]
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
            members: Arc::clone(&control.members),
            grace: settings.proxy_grace,
            scratch: engine.private.path().to_owned(),
            helm_account: settings.helm_account(),
            notices: self.notices.clone(),
            holder: control.holder.clone(),
            instance: control.instance.clone(),
            policy: Policy::new(settings.helm.timeout, own)
                .remediated(settings.helm.retries, settings.helm.remediation)
                .with_history(settings.helm.history_max),
            retry_max: settings.retry_max,
            allow_chart_skip: settings.allow_chart_skip,
            watch_namespaces: settings.watch_namespaces.clone(),
            sources,
            kubeconfig_policy: settings.kubeconfig_policy(),
            tunnels: Tunnels::start(settings.kubeconfig_policy()).await?,
            connecting: Semaphore::new(CONNECTING),
            watchdog: self.watchdog.clone(),
        }))
    }

    /// Starts the writers of Tenants' status and of KryptonDeployments.
    fn write_home(&self, shared: &Shared, discovered: Discovered, shutdown: &mut Shutdown) {
        let (settings, reports) = (self.settings, &self.observed.reports);
        let members = &self.control.members;
        let rules = Rules {
            self_cluster: settings.self_cluster,
            allow_chart_skip: settings.allow_chart_skip,
            namespaces: settings.watch_namespaces.clone(),
        };
        let placements = Arc::clone(members.placements());
        let (lead, stop) = (self.lead, &shutdown.home);
        let (client, instance) = (self.client.clone(), shared.instance.clone());
        let recorder = EventRecorder::start(client, instance, self.watchdog);
        let aggregating = tenants::run(
            self.client.clone(),
            Arc::clone(reports),
            rules,
            settings.place_tenants.then_some(placements),
            recorder,
            lead.clone(),
            stop.clone(),
        );
        let discovery = &settings.discovery;
        let keep = deployments::Controller {
            client: self.client.clone(),
            deployments: Arc::clone(members.deployments()),
            members: Arc::clone(members),
            notices: shared.notices.clone(),
            named: discovered.named,
            findings: discovered.findings,
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
        let keeping = deployments::run(keep, lead.clone(), stop.clone());
        let (members, stop) = (Arc::clone(members), stop.clone());
        let lasting = &mut shutdown.lasting;
        lasting.spawn("the aggregator", aggregating);
        lasting.spawn("keeping KryptonDeployments", keeping);
        lasting.spawn("selecting the members' reporters", async move {
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
            members: Arc::clone(&self.control.members),
            metrics: Arc::clone(&self.observed.sessions),
            notices: shared.notices.clone(),
            hub_version: env!("CARGO_PKG_VERSION").to_owned(),
            numbers: AtomicU64::new(0),
            lead: self.lead.clone(),
            stop: shutdown.serving.clone(),
            watchdog: self.watchdog.clone(),
        };
        let gateway = Gateway {
            client: self.client.clone(),
            namespace: self.settings.namespace.clone(),
            listener,
            advertise: self.settings.advertise.clone(),
            sessions: Arc::new(sessions),
            charts: Arc::clone(&self.engine.charts),
            lead: self.lead.clone(),
            view: Arc::clone(&self.observed.view),
            opening: readiness.guard("the agents' port"),
        };
        let serving = agent_server::run(gateway, shutdown.serving.clone());
        shutdown.lasting.spawn(AGENTS, serving);
    }

    fn fleet(
        &self,
        home: Option<kube::Config>,
        sources: watch::Receiver<Sources>,
        given: watch::Receiver<FleetChart>,
        overlaying: Overlaying,
        shared: Arc<Shared>,
    ) -> Fleet {
        let settings = self.settings;
        Fleet {
            client: self.client.clone(),
            namespace: settings.namespace.clone(),
            home,
            sources,
            accepting: Accepting(settings.discovery.accepted_namespaces.clone()),
            given,
            drift: settings.drift(),
            chart_crds: settings.chart_crds,
            tenant_values: settings.tenant_values,
            place_tenants: settings.place_tenants,
            overlaying,
            handling: settings.handling(),
            lockdown: settings.lockdown(),
            namespaces: settings.workspace_namespaces(),
            lead: self.lead.clone(),
            shared,
            reports: Arc::clone(&self.observed.reports),
        }
    }
}

/// Raises the limit of open files to its maximum. Each agent uses one, and the usual soft limit is 1,024.
fn allow_connections() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, soft = ?limit.current, "failed to raise the limit of open files; a large fleet may need more");
    }
}
