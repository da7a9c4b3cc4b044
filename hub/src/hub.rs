//! The hub's process: what is started, in which order, and how it ends.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_agent::chart::{ChartCache, ChartRef};
use krypton_agent::drift::DriftMetrics;
use krypton_agent::fence::Times;
use krypton_agent::helm::{Helm, HelmConfig, Keyring};
use krypton_agent::newest::{Newest as _, NewestSeen as _};
use krypton_agent::patience::{Settling, patiently};
use krypton_agent::plan::Policy;
use krypton_agent::reconciler::Tools;
use krypton_agent::watchdog::Watchdog;
use krypton_agent::work_metrics::WorkMetrics;
use krypton_agent::{admin, clock, scratch, signals};
use krypton_common::desired::ChartState;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use kube::Client;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::aggregate::{self, Reports, Rules};
use crate::chart_credentials::{self, ChartCredentials};
use crate::chart_pin::{ChartPin, Meaning};
use crate::chart_values::fleet_wide::Teller;
use crate::chart_values::follow::Follow;
use crate::chart_values::{self, Problem, Readings};
use crate::deployment;
use crate::desired;
use crate::discovery::cluster_api::ClusterApi;
use crate::discovery::cluster_profile::provider_file::ProviderFile;
use crate::discovery::cluster_profile::{Access, ClusterProfiles};
use crate::discovery::files::Files;
use crate::discovery::kamaji::Kamaji;
use crate::discovery::labelled_secrets::LabelledSecrets;
use crate::discovery::named_secrets::NamedSecrets;
use crate::discovery::paired::Paired;
use crate::discovery::{self, Provider};
use crate::dump::{self, Dumper};
use crate::facts::FactsBoard;
use crate::fleet::{self, Accepting, Fleet, Given, Overlaying};
use crate::found::Found;
use crate::gateway::{self, Gateway};
use crate::home::{self, Home, HomeError};
use crate::lead::label::Label;
use crate::lead::{self, Election};
use crate::listener;
use crate::member_metrics::{Acting, FleetView};
use crate::members::Members;
use crate::metrics::{self, SessionMetrics};
use crate::notices::Notices;
use crate::proxy::{Shared, Tunnels};
use crate::session::Sessions;
use crate::settings::{ProviderKind, Settings};
use crate::tasks::Tasks;
use crate::values_file::{self, ValuesFile};
use crate::voices::Voices;
use krypton_common::error_chain::chain;
use krypton_common::telemetry::Log;

/// A dead member holds its place for ten seconds out of some 25: as many as a large fleet may have of
/// them, so that those that live do not wait.
const CONNECTING: usize = 256;

const LEAD: &str = "the lead";
const LABEL: &str = "the leader's label";
const AGENTS: &str = "serving agents";
const FLEET: &str = "the fleet";

type Values = serde_json::Map<String, serde_json::Value>;

/// Runs the hub until it is told to stop.
pub async fn run(settings: Settings, log: Log) -> anyhow::Result<()> {
    allow_connections();
    let stop = signals::stop_on_signal()?;
    let watchdog = Watchdog::start().context("starting the watchdog's thread failed")?;
    let main = main_loop(settings, log, watchdog.clone(), stop);
    watchdog.watch("the main loop", main).await
}

/// Opens the keyring once, as its mount may hang.
async fn check_keyring(file: &Path) -> anyhow::Result<()> {
    let at = file.to_owned();
    let opened = values_file::in_time(values_file::DEADLINE, move || std::fs::File::open(at)).await;
    let path = file.display();
    let opened = opened.with_context(|| {
        format!("--chart-keyring: {path} does not answer; check whether its mount hangs")
    })?;
    opened.with_context(|| {
        format!(
            "--chart-keyring: {path} cannot be read; name the file that 'gpg --export' has written"
        )
    })?;
    Ok(())
}

async fn main_loop(
    settings: Settings,
    log: Log,
    watchdog: Watchdog,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let readiness = admin::Readiness::new();
    let starting = readiness.guard("start");
    // Whatever a person got wrong on the command line is said before anything is touched.
    let metrics_listener = match &settings.metrics_bind_address {
        Some(address) => Some(admin::bind(admin::METRICS_FLAG, address).await?),
        None => None,
    };
    let health_listener = match &settings.health_probe_bind_address {
        Some(address) => Some(admin::bind(admin::HEALTH_FLAG, address).await?),
        None => None,
    };
    let debug_listener = match &settings.debug_bind_address {
        Some(address) => admin::bind_debug(address).await,
        None => None,
    };
    let agents_listener = match &settings.listen {
        Some(address) => Some(admin::bind(listener::LISTEN_FLAG, address).await?),
        None => None,
    };
    let values = match &settings.chart_values_file {
        Some(path) => ValuesFile::load_in_time(path).await?,
        None => serde_json::Map::new(),
    };
    let profiles = settings
        .discovery
        .providers
        .contains(&ProviderKind::ClusterProfile);
    let provider_file = settings
        .discovery
        .provider_file
        .as_deref()
        .filter(|_| profiles);
    let access_providers = match provider_file {
        Some(path) => Some(ProviderFile::load_in_time(path).await?),
        None => None,
    };
    let scratch = scratch::folder(&settings.helm.cache_dir, "hub", "--helm-cache-dir")?;
    let private = scratch::private(settings.helm.private_dir.as_deref(), &scratch, "hub")?;
    let profile_access = Access::start(
        &watchdog,
        provider_file,
        access_providers,
        private.path(),
        settings.kubeconfig_policy,
    )
    .context("making a folder for the credentials of ClusterProfiles failed; name another with --private-dir")?;
    let work = WorkMetrics::default();
    let helm = Arc::new(
        Helm::new(HelmConfig {
            binary: settings.helm.program.clone(),
            // Not the path: the program may be replaced on disk while it runs.
            supervisor: vec!["/proc/self/exe".into(), "helm-run".into()],
            scratch: scratch.path().join("helm"),
            private: private.path().join("helm"),
            max_concurrent: settings.helm.max_concurrent,
            max_per_member: settings.helm.max_per_member,
        })
        .await?
        .with_metrics(&work.helm),
    );
    let (credentials_tx, credentials) =
        watch::channel(chart_credentials::NOT_READ.map_err(Into::into));
    let mut charts = ChartCache::new(scratch.path().join("charts"))?
        .with_metrics(&work.charts)
        .with_plain_http(settings.chart.plain_http);
    if settings.chart.credentials_secret.is_some() {
        charts = charts.with_credentials(credentials.clone());
    }
    if let Some(file) = settings.chart.keyring.clone() {
        check_keyring(&file).await?;
        let helm = Arc::clone(&helm);
        charts = charts.with_prover(Arc::new(Keyring { helm, file }));
    }
    let charts = Arc::new(charts);
    let found = Arc::new(Found::default());
    let facts = Arc::new(FactsBoard::default());
    let session_metrics = Arc::new(SessionMetrics::default());
    let drift = DriftMetrics::default();
    let reports = Arc::new(Reports::default());
    let view = Arc::new(FleetView::new(Arc::clone(&facts), Arc::clone(&reports)));
    let mut tasks = tokio::task::JoinSet::new();
    if let Some(listener) = health_listener {
        tasks.spawn(admin::logged(
            "health",
            admin::serve_health(listener, readiness.clone(), watchdog.clone(), stop.clone()),
        ));
    }
    if let Some(listener) = metrics_listener {
        let registry = Arc::new(metrics::registry(
            Arc::clone(&view),
            &session_metrics,
            &drift,
            &work,
        ));
        tasks.spawn(admin::logged(
            "metrics",
            admin::serve_metrics(listener, registry, stop.clone()),
        ));
    }

    if let Some(listener) = debug_listener {
        let dumper = Arc::new(Dumper {
            replica: settings.reporting_instance.clone(),
            started: clock::wall(),
            view: Arc::clone(&view),
            helm: Arc::clone(&helm),
            charts: Arc::clone(&charts),
            work: work.clone(),
        });
        let more = dump::router(dumper);
        let serving = admin::serve_debug(listener, log.level, more, stop.clone());
        tasks.spawn(admin::logged("debug", serving));
    }

    let clearing = tokio::spawn(Label::cleared(
        settings.pod.clone(),
        settings.home.local.clone(),
        readiness.clone(),
    ));
    let apiserver = Settling::new();
    let may_pass = |error: &HomeError| error.may_pass(&apiserver);
    let choosing = patiently("home", &stop, may_pass, async || {
        Home::choose(&settings.home, &settings.kubeconfig_policy).await
    });
    let Some(chosen) = choosing.await? else {
        return Ok(());
    };
    let client = home::client(chosen.config.clone()).context("making home's client failed")?;
    tracing::info!(context = %chosen.context_name, namespace = %settings.namespace,
        chart = %settings.chart.name, version = %settings.chart.version, "hub starts");
    for note in &settings.notes {
        tracing::warn!("{note}");
    }

    let mut crds = vec![Tenant::crd(), EdgeCluster::crd()];
    if settings.ensure_watch_crds {
        crds.push(KryptonDeployment::crd());
    }
    if !prepare_home(&client, &crds, &stop).await {
        return Ok(());
    }
    // Under the original's nothing that is on record of a deployment would last. Where there is none it is
    // not for us to make one, and nobody waits for it.
    if !settings.ensure_watch_crds
        && let Err(error) = krypton_agent::crd::follow(&client, &KryptonDeployment::crd()).await
    {
        tracing::warn!(error = %chain(&error), "the CRD of KryptonDeployments is not brought up to date");
    }
    drop(starting);
    tracing::info!("home is ready");

    if let Some(name) = settings.chart.credentials_secret.clone() {
        let secret = ChartCredentials {
            client: client.clone(),
            namespace: settings.namespace.clone(),
            name,
            charts: Arc::clone(&charts),
        };
        tasks.spawn(chart_credentials::keep(
            secret,
            credentials_tx,
            stop.clone(),
        ));
    }
    // The version is looked up before members get any: they never see two meanings in turn.
    let proven = settings.chart.keyring.is_some();
    let unread = Meaning::unread(&settings.chart.version, proven);
    let by_digest = !proven && settings.chart.version.contains("@sha256:");
    let (version_tx, mut version_rx) = watch::channel(unread);
    let mut pinned = None;
    if !by_digest {
        let pin = ChartPin {
            client: client.clone(),
            namespace: settings.namespace.clone(),
            charts: Arc::clone(&charts),
            chart: ChartRef {
                repo: settings.chart.repo.clone(),
                name: settings.chart.name.clone(),
                version: settings.chart.version.clone(),
            },
            every: settings.chart.resolve_every,
            proven,
        };
        if settings.chart.credentials_secret.is_some() {
            chart_credentials::first(credentials).await;
        }
        pinned = Some(pin.begin(version_tx.clone(), &stop).await);
        version_rx.mark_unchanged();
    }
    let (wanted, wanted_rx) = watch::channel(BTreeSet::new());
    let (readings_tx, mut readings_rx) = watch::channel(Arc::default());
    let overlaying = Overlaying {
        fixed: settings.chart_values_from.clone(),
        wanted,
        readings: readings_rx.clone(),
    };
    let following = Follow {
        client: client.clone(),
        namespace: settings.namespace.clone(),
        wanted: wanted_rx,
        readings: readings_tx,
    };
    overlaying.ask(std::iter::empty());
    tasks.spawn(following.run(stop.clone()));
    // The fleet's chart, or why there is none that is as it should be.
    let chart = |meaning: &Meaning, values: &Values, readings: &Readings| {
        let (version, pinned) = (&meaning.version, meaning.pinned.as_deref());
        let file = desired::chart_state(&settings.chart, version, pinned, values);
        chart_values::fleet(file, &settings.chart_values_from, readings).map(Arc::new)
    };
    let mut meaning = version_rx.get();
    let first = chart(&meaning, &values, &readings_rx.get());
    let (given, given_rx) = watch::channel(Given {
        epoch: 0,
        problem: first.as_ref().err().cloned(),
        chart: first.ok(),
    });
    let (values_tx, mut values_rx) = watch::channel(values);
    if let Some(path) = settings.chart_values_file.clone() {
        let interval = values_file::POLL_INTERVAL;
        let following = values_file::watch(path, interval, values_tx.clone(), readiness.clone());
        tokio::spawn(watchdog.watch("the values file", following));
    }
    let ahead = watch::Sender::new(0);
    let members = Arc::new(Members::default());
    let voices = Arc::new(Voices::new(
        Arc::clone(&reports),
        Arc::clone(&facts),
        ahead.clone(),
    ));
    let holder = holder(settings.reporting_instance.as_deref());
    // Several hubs may run; one of them writes on home and serves agents.
    let election = Election {
        client: home::client(chosen.config.clone()).context("making home's client failed")?,
        namespace: settings.namespace.clone(),
        holder: holder.clone(),
        times: Times::of_lead(settings.lead),
        ahead,
        readiness: readiness.clone(),
    };
    let (standing, leading) = election.stand({
        let (voices, members) = (Arc::clone(&voices), Arc::clone(&members));
        let given = given.clone();
        let pins = pinned.is_some();
        move |tenure, begins| {
            voices.set_epoch(tenure.epoch);
            if begins {
                // What this hub has read of home before may be old.
                members.anew(tenure.since);
                voices.anew(tenure.since);
            }
            // Where what a range means is on record, nothing is given before that was read.
            if !pins {
                given.send_modify(|given| given.epoch = tenure.epoch);
            }
        }
    });
    let mut lasting = Tasks::new(watchdog.clone());
    lasting.spawn(LEAD, leading);
    let mut lead = standing.lead.clone();
    lasting.spawn(LABEL, {
        let lead = lead.clone();
        async move {
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
    });
    if let Some(pinned) = pinned {
        tasks.spawn(pinned.keep(lead.clone(), stop.clone()));
    }
    let account = settings.helm.service_account.as_ref();
    let instance = settings
        .reporting_instance
        .clone()
        .unwrap_or_else(|| "krypton-hub".to_owned());
    let mut teller = Teller::new(
        client.clone(),
        settings.namespace.clone(),
        instance.clone(),
        readiness.clone(),
        lead.clone(),
    );
    // One look: who wins the lead writes there, and waits for readers.
    let now = given.get();
    teller.tell(now.problem.as_ref(), now.chart.is_some());
    let (named, named_rx) = watch::channel(None);
    let (findings, findings_rx) = watch::channel(Arc::default());
    let mut providers = providers(&client, &settings, &profile_access);
    // After those that find a Secret by its label, whose word counts.
    providers.push(Arc::new(NamedSecrets {
        client: client.clone(),
        named: named_rx,
        findings,
        label: settings.discovery.label.clone(),
        key: settings.discovery.key.clone(),
        policy: settings.kubeconfig_policy,
    }));
    let sources = discovery::start(providers, &watchdog, &stop);
    let shared = Arc::new(Shared {
        tools: Tools {
            helm,
            charts: Arc::clone(&charts),
            drift,
            work,
            watchdog: watchdog.clone(),
        },
        voices: Arc::clone(&voices),
        facts,
        grace: settings.proxy_grace,
        scratch: private.path().to_owned(),
        helm_account: settings.helm.service_account.clone(),
        notices: Notices::start(client.clone(), instance.clone(), lead.clone(), &watchdog),
        holder,
        instance,
        policy: Policy::new(
            settings.helm.timeout,
            [settings.namespace.clone()]
                .into_iter()
                .chain(account.map(|account| account.namespace().to_owned())),
        )
        .remediated(settings.helm.retries, settings.helm.remediation)
        .with_history(settings.helm.history_max),
        retry_max: settings.retry_max,
        allow_chart_skip: settings.handling.allow_chart_skip,
        watch_namespaces: settings.watch_namespaces.clone(),
        found: Arc::clone(&found),
        sources: sources.clone(),
        kubeconfig_policy: settings.kubeconfig_policy,
        tunnels: Tunnels::start(settings.kubeconfig_policy).await?,
        connecting: Semaphore::new(CONNECTING),
        watchdog: watchdog.clone(),
    });

    let rules = Rules {
        self_cluster: settings.self_cluster,
        allow_chart_skip: settings.handling.allow_chart_skip,
        namespaces: settings.watch_namespaces.clone(),
    };
    view.acts(Acting {
        lead: lead.clone(),
        given: given_rx.clone(),
        members: Arc::clone(&members),
        allow_chart_skip: settings.handling.allow_chart_skip,
    });
    let home_stop = CancellationToken::new();
    // What is served ends after the lead: by then another hub serves.
    let serving = CancellationToken::new();
    lasting.spawn(
        "the aggregator",
        aggregate::run(
            client.clone(),
            Arc::clone(&reports),
            rules,
            settings
                .place_tenants
                .then(|| Arc::clone(voices.placements())),
            shared.instance.clone(),
            lead.clone(),
            home_stop.clone(),
        ),
    );
    lasting.spawn(
        "keeping KryptonDeployments",
        deployment::run(
            deployment::Keep {
                client: client.clone(),
                deployments: Arc::clone(voices.deployments()),
                found: Arc::clone(&found),
                notices: shared.notices.clone(),
                named,
                findings: findings_rx,
                namespaces: settings.watch_namespaces.clone(),
                discovery_namespace: settings.discovery.namespace_of_secrets(&settings.namespace),
                // Under lockdown a label opens a Secret, and nothing else.
                open_namespaces: match settings.lockdown.no_cross_namespace_refs {
                    true => BTreeSet::new(),
                    false => settings.discovery.open_namespaces(&settings.namespace),
                },
                check_interval: settings.check_interval,
                writes: reports.writes.clone(),
                reports: Arc::clone(&reports),
            },
            lead.clone(),
            home_stop.clone(),
        ),
    );
    lasting.spawn("keeping the members' voices", {
        let (voices, stop) = (Arc::clone(&voices), home_stop.clone());
        async move { voices.keep(stop).await }
    });
    if let Some(listener) = agents_listener {
        let sessions = Sessions {
            members: Arc::clone(&members),
            voices: Arc::clone(&voices),
            found: Arc::clone(&found),
            metrics: session_metrics,
            notices: shared.notices.clone(),
            hub_version: env!("CARGO_PKG_VERSION").to_owned(),
            numbers: AtomicU64::new(0),
            lead: lead.clone(),
            stop: serving.clone(),
            watchdog: watchdog.clone(),
        };
        let gateway = Gateway {
            client: client.clone(),
            namespace: settings.namespace.clone(),
            listener,
            advertise: settings.advertise.clone(),
            sessions: Arc::new(sessions),
            charts,
            lead: lead.clone(),
            view: Arc::clone(&view),
            opening: readiness.guard("the agents' port"),
        };
        lasting.spawn(AGENTS, gateway::run(gateway, serving.clone()));
    }
    // Held, so that the version is followed for as long as the hub runs.
    let _version = version_tx;
    lasting.spawn(
        FLEET,
        fleet::run(
            Fleet {
                client: client.clone(),
                namespace: settings.namespace.clone(),
                home: settings.self_cluster.then(|| chosen.config.clone()),
                sources,
                accepting: Accepting(settings.discovery.accepted_namespaces.clone()),
                given: given_rx,
                drift: settings.drift,
                chart_crds: settings.chart_crds,
                tenant_values: settings.tenant_values,
                place_tenants: settings.place_tenants,
                overlaying,
                handling: settings.handling,
                lockdown: settings.lockdown.clone(),
                namespaces: settings.namespaces.clone(),
                lead: lead.clone(),
                shared,
                members,
                reports,
                found,
            },
            serving.clone(),
        ),
    );

    let mut led = None;
    // The loop alone gives a record that was read under a tenure.
    meaning.under = None;
    let mut changes = false;
    let mut broken = None;
    loop {
        if std::mem::take(&mut changes) {
            let before = std::mem::replace(&mut meaning, version_rx.see());
            if before.version != meaning.version {
                let version = &meaning.version;
                tracing::info!(%version, "the range means another version; every member gets it");
            }
            let values = values_rx.see();
            let next = chart(&meaning, &values, &readings_rx.see());
            give(&given, next, &mut teller);
        }
        // After the chart that is given in it.
        if let Some(epoch) = meaning.epoch(lead.tenure().as_ref()) {
            given.send_if_modified(|given| std::mem::replace(&mut given.epoch, epoch) != epoch);
        }
        tokio::select! {
            // First: at the stop all others end too, and not by themselves.
            biased;
            () = stop.cancelled() => break,
            error = lasting.one_ends() => {
                tracing::error!(error = %format_args!("{error:#}"), "the hub cannot go on: it stops, so that it is started again");
                broken = Some(error);
                stop.cancel();
            }
            Some(Err(error)) = tasks.join_next() => {
                tracing::error!(%error, "a task ended badly: the hub stops, so that it is started again");
                broken = Some(error.into());
                stop.cancel();
            }
            // A sender that has gone went with its task, which is told of above, by its name.
            Ok(()) = values_rx.changed() => {
                tracing::info!("the values file has changed");
                changes = true;
            }
            Ok(()) = version_rx.changed() => changes = true,
            Ok(()) = readings_rx.changed() => changes = true,
            true = lead.changed() => {
                if let Some(tenure) = lead.tenure()
                    && led != Some(tenure.since)
                {
                    led = Some(tenure.since);
                    teller.anew(given.get().chart.is_some());
                }
            }
        }
    }
    // First, so that another leads while helm is waited for: the members' own Leases are kept for that.
    standing.leave().await;
    let given_up = tokio::time::timeout(lead::GIVING_UP, lasting.end_of(LEAD)).await;
    if given_up.is_err() {
        tracing::warn!("giving up the lead takes long; its Lease runs out by itself");
    }
    serving.cancel();
    tracing::info!("stopping: running helm processes are waited for");
    let agents = lasting.end_of(AGENTS).await;
    let fleet = lasting.end_of(FLEET).await;
    home_stop.cancel();
    lasting.end().await.and(agents).and(fleet)?;
    given_up.unwrap_or(Ok(()))?;
    tasks.abort_all();
    if let Some(error) = broken {
        return Err(error);
    }
    tracing::info!("stopped");
    Ok(())
}

/// A new chart goes to every member; while it cannot be had, the last good one stays.
fn give(given: &watch::Sender<Given>, next: Result<Arc<ChartState>, Problem>, teller: &mut Teller) {
    let problem = next.as_ref().err().cloned();
    teller.tell(problem.as_ref(), given.get().chart.is_some());
    given.send_if_modified(|given| {
        let changed = given.problem != problem;
        given.problem = problem;
        match next {
            Ok(chart) if given.chart.as_ref() != Some(&chart) => {
                tracing::info!("every member gets the new desired state");
                given.chart = Some(chart);
                true
            }
            _ => changed,
        }
    });
}

/// What looks for members, as the settings want it.
fn providers(
    client: &Client,
    settings: &Settings,
    profile_access: &Arc<Access>,
) -> Vec<Arc<dyn Provider>> {
    let mut providers: Vec<Arc<dyn Provider>> = Vec::new();
    let discovery = &settings.discovery;
    for kind in &discovery.providers {
        match kind {
            ProviderKind::Kubeconfig => {
                for namespace in each(discovery.namespaces.as_ref()) {
                    providers.push(Arc::new(LabelledSecrets {
                        client: client.clone(),
                        namespace,
                        label: discovery.label.clone(),
                        key: discovery.key.clone(),
                        policy: settings.kubeconfig_policy,
                    }));
                }
            }
            ProviderKind::ClusterProfile => {
                for namespace in each(discovery.cluster_namespaces.as_ref()) {
                    providers.push(Arc::new(ClusterProfiles {
                        client: client.clone(),
                        namespace,
                        access: Arc::clone(profile_access),
                    }));
                }
            }
            ProviderKind::ClusterApi => {
                for namespace in each(discovery.cluster_namespaces.as_ref()) {
                    providers.push(Arc::new(Paired {
                        client: client.clone(),
                        namespace,
                        policy: settings.kubeconfig_policy,
                        pairing: ClusterApi,
                    }));
                }
            }
            ProviderKind::Kamaji => {
                for namespace in each(discovery.cluster_namespaces.as_ref()) {
                    let key = discovery.kamaji_key.clone();
                    providers.push(Arc::new(Paired {
                        client: client.clone(),
                        namespace,
                        policy: settings.kubeconfig_policy,
                        pairing: Kamaji { key },
                    }));
                }
            }
            ProviderKind::File => {
                // One each: a mount that is missing or hangs is no other's concern.
                for path in &discovery.paths {
                    providers.push(Arc::new(Files::new(path, settings.kubeconfig_policy)));
                }
            }
        }
    }
    providers
}

/// One for each namespace, so that one that cannot be read costs the others nothing; `None` is for all.
fn each(namespaces: Option<&BTreeSet<String>>) -> Vec<Option<String>> {
    match namespaces {
        None => vec![None],
        Some(names) => names.iter().cloned().map(Some).collect(),
    }
}

/// Each agent is an open file, and the usual soft limit is 1,024.
fn allow_connections() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, soft = ?limit.current, "the limit of open files stays as it is; a large fleet may need more");
    }
}

/// CRDs. An apiserver that is not up yet is waited for; false when it is to stop before.
async fn prepare_home(
    client: &Client,
    crds: &[CustomResourceDefinition],
    stop: &CancellationToken,
) -> bool {
    let mut attempts = 0;
    loop {
        let prepared = async {
            for crd in crds {
                krypton_agent::crd::ensure(client, crd)
                    .await
                    .map_err(|error| chain(&error))?;
            }
            Ok::<(), String>(())
        };
        tokio::select! {
            () = stop.cancelled() => return false,
            prepared = prepared => match prepared {
                Ok(()) => return true,
                Err(problem) => tracing::warn!(%problem, "home is not ready; it is tried again"),
            },
        }
        attempts += 1;
        let pause =
            krypton_agent::patience::backoff(attempts, Duration::from_secs(15), rand::random());
        tokio::select! {
            () = stop.cancelled() => return false,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Our name in Leases: one process, one name, so that two hubs never take each other for themselves.
fn holder(instance: Option<&str>) -> String {
    format!(
        "hub/{}/{:08x}",
        instance.unwrap_or("local"),
        rand::random::<u32>()
    )
}
